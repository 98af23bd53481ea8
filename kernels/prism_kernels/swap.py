# mypy: disable-error-code="no-untyped-def"
"""swap_planes: change some bytes of a resident scale plane in place, and hand back those that stood there.

    previous[i] = plane[positions[i]];  plane[positions[i]] = values[i]

A patch of an adapter is (positions, values): positions ascend strictly in the linear plane (row * G + block), so none is written twice and the order of
writing does not matter. Swapping `previous` back in restores the plane byte for byte. `layout` says how the resident plane lies (prism_kernels.layouts);
positions always mean the linear plane, whatever the engine made of it. Values are written as given: for Marlin's NVFP4 they come from `marlin_bytes`.

All or nothing: with `check` the whole patch is looked at before a byte is written. On a GPU that look waits for the device; a patch that was checked when it
was loaded can go with check=False, inside a CUDA graph too. Positions outside the plane are then left out, never written, and their `previous` is 0.
"""

from __future__ import annotations

import torch

from prism_kernels.dispatch import require, tl, triton, use_triton
from prism_kernels.formats import kernel_format
from prism_kernels.layouts import Layout, layout_shape, places


@triton.jit
def swap_kernel(plane_ptr, positions_ptr, values_ptr, previous_ptr, n_changes, n_bytes, BLOCK: tl.constexpr):
    """previous, plane <- plane, values at each position in 0 .. n_bytes - 1."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < n_changes
    position = tl.load(positions_ptr + place, mask=mask, other=0).to(tl.int64)
    inside = mask & (position >= 0) & (position < n_bytes)
    tl.store(previous_ptr + place, tl.load(plane_ptr + position, mask=inside, other=0), mask=mask)
    tl.store(plane_ptr + position, tl.load(values_ptr + place, mask=mask, other=0), mask=inside)


@torch.library.custom_op("prism_kernels::swap_bytes", mutates_args=("plane",))
def _swap_bytes(plane: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    count = positions.numel()
    if use_triton(plane):
        previous = torch.empty_like(values, memory_format=torch.contiguous_format)
        if count:
            swap_kernel[(triton.cdiv(count, 1024),)](
                plane, positions.contiguous(), values.contiguous(), previous, count, plane.numel(), BLOCK=1024
            )
        return previous
    flat = plane.view(-1)
    inside = (positions >= 0) & (positions < flat.numel())
    place = positions[inside].to(torch.int64)
    previous = torch.zeros_like(values)
    previous[inside] = flat[place]
    flat[place] = values[inside]
    return previous


@_swap_bytes.register_fake
def _(plane, positions, values):  # type: ignore[no-untyped-def]
    return torch.empty_like(values)


def require_patch(positions: torch.Tensor, values: torch.Tensor, size: int, format: str) -> None:
    """Raise ValueError unless positions ascend strictly within 0 .. size - 1 and every value is a legal byte. Waits for a GPU."""
    if not positions.numel():
        return
    first, last = int(positions[0]), int(positions[-1])
    require(
        bool((positions[1:] > positions[:-1]).all()),
        "positions of a patch must ascend strictly; sort the patch, and keep each position once",
    )
    require(first >= 0 and last < size, f"positions run from {first} to {last}, the plane has {size} bytes; the patch is for another layer")
    illegal = values >= kernel_format(format).illegal_from
    require(not bool(illegal.any()), f"the patch holds {int(illegal.sum())} bytes that are no {format} scale")


def swap_planes(
    plane: torch.Tensor,
    positions: torch.Tensor,
    values: torch.Tensor,
    format: str = "nvfp4",
    *,
    layout: Layout = "linear",
    shape: tuple[int, int] | None = None,
    check: bool = True,
) -> torch.Tensor:
    """Write uint8 `values` [N] at int32 or int64 `positions` [N] of `plane`, a contiguous uint8 tensor changed in place; returns the previous bytes [N].

    layout: how the plane lies; other than linear it needs `shape`, (O, G) of the linear plane. check: look at the whole patch first (see the module).
    Raises ValueError for dtypes, shapes, positions out of the plane or not ascending, and bytes that are no scale of the format.
    """
    require(plane.dtype == torch.uint8 and plane.is_contiguous(), f"plane must be contiguous uint8, got {plane.dtype}")
    require(positions.dtype in (torch.int32, torch.int64), f"positions are {positions.dtype}, expected int32 or int64")
    require(values.dtype == torch.uint8, f"values are {values.dtype}, expected uint8")
    same = positions.ndim == 1 and positions.shape == values.shape
    require(same, f"positions {list(positions.shape)} and values {list(values.shape)} must be two vectors of one length")
    kernel_format(format)
    size = plane.numel()
    if layout != "linear":
        require(shape is not None, f"a plane in layout {layout} needs shape=(O, G) of its linear plane")
        assert shape is not None
        held = layout_shape(*shape, layout)
        require(size == held[0] * held[1], f"a plane {list(shape)} has {held[0] * held[1]} bytes in layout {layout}, this one {size}")
        size = shape[0] * shape[1]
    if check:
        # Marlin's own bytes of NVFP4 use the whole range; their legality was settled when they were made.
        require_patch(positions, values, size, "mxfp4" if layout == "marlin" else format)
    places_ = positions
    if layout != "linear":
        assert shape is not None
        # A position out of the linear plane must stay out of the other one, whose padding makes it larger.
        inside = (positions >= 0) & (positions < size)
        places_ = torch.where(inside, places(positions, *shape, layout), -1)
    return _swap_bytes(plane, places_, values)


def swap_planes_ref(plane: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The same on a linear plane in plain torch, without checks."""
    flat, place = plane.view(-1), positions.to(torch.int64)
    previous = flat[place].clone()
    flat[place] = values
    return previous
