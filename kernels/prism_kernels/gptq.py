"""gptq_block: GPTQ's sweep over a panel of columns on the E2M1 grid, scales fixed before it, every expert with its own factor.

Column by column, for all rows and experts at once, with v = work[j], s = steps[j], U the upper Cholesky factor of the damped inverse Hessian:

    q = s * nearest E2M1 of (v / s), 0 where s = 0;   e_j = (v - q) / U[j, j];   work[k] -= U[j, k] e_j   for the later columns k

Inside a scale block (16 or 32 columns) the last step follows every column; what a finished block does to the rest of the panel is one product, work[rest] -= U[block, rest]' e.
That is the order of prism_ray.quantizers.gptq. Divisions are correctly rounded, and work - U e is one fused multiply-add: what torch.addcmul is on CUDA and on CPUs that have the
instruction. A block's values and errors therefore equal prism_ray's bit for bit. The product for the rest is a library's, whose sums have no fixed order: on one
machine a wide panel agrees bit for bit too, across devices to rounding.

A column lies together: work, steps and errors are [E, P, O] (P columns of the panel, O rows). `work` is changed in place: column j ends as the value at which it was rounded; quantize it
under the same steps to get the codes. A program holds all columns of a block for its rows in registers and reads each number once.
NaN is not looked for. Legend: E experts, P columns of the panel, O rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from prism_kernels.dispatch import require, tl, triton, use_triton
from prism_kernels.formats import E2M1_VALUES, kernel_format
from prism_kernels.quantize import MIDPOINTS, e2m1_magnitude


class GptqTile(NamedTuple):
    """Launch shape: rows of a program, warps."""

    rows: int
    warps: int = 4


GPTQ_TILES = (GptqTile(64, 2), GptqTile(32, 1))
"""A thread holds one row's columns of a block; the first is used unless another is given."""


@triton.jit
def e2m1_nearest(x):
    """float32 -> the nearest E2M1 value, ties to the even code; zeros are positive."""
    code = e2m1_magnitude(tl.abs(x))
    # Codes 0 .. 3 are multiples of 0.5, 4 and 5 are 2 and 3, 6 and 7 are 4 and 6.
    magnitude = tl.where(
        code < 4, code.to(tl.float32) * 0.5, tl.where(code < 6, code.to(tl.float32) - 2.0, code.to(tl.float32) * 2.0 - 8.0)
    )
    return tl.where((x < 0.0) & (code > 0), -magnitude, magnitude)


@triton.jit
def gptq_kernel(
    work_ptr, steps_ptr, upper_ptr, error_ptr, first, last, n_columns, n_rows,
    BLOCK: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """Programs (row tile, expert). Sweeps the columns first .. last - 1, at most BLOCK, of panels [E, n_columns, n_rows]."""
    expert = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    row_mask = rows < n_rows
    columns = first + tl.arange(0, BLOCK)
    column_mask = columns < last
    wide_rows = tl.full((), 0, tl.int64) + n_rows
    place = expert * n_columns * n_rows
    tile = place + columns[:, None].to(tl.int64) * n_rows + rows[None, :]
    tile_mask = column_mask[:, None] & row_mask[None, :]
    work = tl.load(work_ptr + tile, mask=tile_mask, other=0.0)
    upper_ptr += expert * n_columns * n_columns
    for column in range(first, last):
        here = (columns == column)[:, None]
        value = tl.sum(tl.where(here, work, 0.0), axis=0)
        step = tl.load(steps_ptr + place + column * wide_rows + rows, mask=row_mask, other=0.0)
        rounded = e2m1_nearest(tl.div_rn(value, tl.where(step > 0.0, step, float("inf")))) * step
        diagonal = tl.load(upper_ptr + column * n_columns + column)
        error = tl.div_rn(value - rounded, tl.zeros((BLOCK_O,), dtype=tl.float32) + diagonal)
        tl.store(error_ptr + place + column * wide_rows + rows, error, mask=row_mask)
        row = tl.load(upper_ptr + column * n_columns + columns, mask=column_mask & (columns > column), other=0.0)
        later = (columns > column)[:, None] & column_mask[:, None]
        work = tl.where(
            later, tl.fma(tl.broadcast_to(-row[:, None], (BLOCK, BLOCK_O)), tl.broadcast_to(error[None, :], (BLOCK, BLOCK_O)), work), work
        )
    tl.store(work_ptr + tile, work, mask=tile_mask)


def _nearest(x: torch.Tensor) -> torch.Tensor:
    """float32 -> the nearest E2M1 value by a search among the midpoints, one of which belongs to the number below unless its tie goes up."""
    middles = torch.tensor([middle for middle, _ in MIDPOINTS], device=x.device)
    zero = torch.zeros((), device=x.device)
    up = torch.tensor([up for _, up in MIDPOINTS], device=x.device)
    boundaries = torch.where(up, torch.nextafter(middles, zero), middles)
    values = torch.tensor(E2M1_VALUES[:8], device=x.device)
    magnitude = values.index_select(0, torch.bucketize(x.abs(), boundaries, out_int32=True).view(-1)).view(x.shape)
    return torch.where(magnitude == 0, magnitude, torch.copysign(magnitude, x))


def _sweep_columns(work: torch.Tensor, steps: torch.Tensor, upper: torch.Tensor, error: torch.Tensor, first: int, last: int) -> None:
    """Columns first .. last - 1 of the panels, in plain torch."""
    for column in range(first, last):
        value, step = work[:, column], steps[:, column]
        rounded = _nearest(value / torch.where(step > 0, step, torch.inf)).mul_(step)
        torch.sub(value, rounded, out=rounded).div_(upper[:, column, column, None])
        error[:, column] = rounded
        if column + 1 < last:
            work[:, column + 1 : last].addcmul_(upper[:, column, column + 1 : last, None], rounded[:, None], value=-1)


@torch.library.custom_op("prism_kernels::gptq_block", mutates_args=("work",))
def _gptq_block(work: torch.Tensor, steps: torch.Tensor, upper: torch.Tensor, block: int, tile: list[int]) -> torch.Tensor:
    experts, n_columns, n_rows = work.shape
    error = torch.empty_like(work)
    if not work.numel():
        return error
    triton_path = use_triton(work)
    shape = GptqTile(*tile) if tile else GPTQ_TILES[0]
    if triton_path:
        steps, upper = steps.contiguous(), upper.contiguous()
    for first in range(0, n_columns, block):
        last = min(first + block, n_columns)
        if triton_path:
            gptq_kernel[(triton.cdiv(n_rows, shape.rows), experts)](
                work, steps, upper, error, first, last, n_columns, n_rows,
                BLOCK=block, BLOCK_O=shape.rows, num_warps=shape.warps, enable_fp_fusion=False,
            )  # fmt: skip
        else:
            _sweep_columns(work, steps, upper, error, first, last)
        if last < n_columns:
            work[:, last:] -= torch.bmm(upper[:, first:last, last:].transpose(1, 2), error[:, first:last])
    return error


@_gptq_block.register_fake
def _(work, steps, upper, block, tile):  # type: ignore[no-untyped-def]
    return torch.empty_like(work)


def _require_panel(work: torch.Tensor, steps: torch.Tensor, upper: torch.Tensor) -> None:
    for name, tensor in (("work", work), ("steps", steps), ("upper", upper)):
        require(tensor.dtype == torch.float32, f"{name} is {tensor.dtype}, expected float32")
    require(work.ndim == 3 and work.is_contiguous(), f"work has shape {list(work.shape)}, expected contiguous [E, P, O]")
    require(steps.shape == work.shape, f"steps have shape {list(steps.shape)}, work {list(work.shape)}; they must agree")
    expected = [work.shape[0], work.shape[1], work.shape[1]]
    require(list(upper.shape) == expected, f"upper has shape {list(upper.shape)}, expected {expected}")


def gptq_block(
    work: torch.Tensor, steps: torch.Tensor, upper: torch.Tensor, format: str = "nvfp4", *, tile: GptqTile | None = None
) -> torch.Tensor:
    """Sweep a panel in place; returns its errors e, float32 [E, P, O], for the product that updates the columns behind it.

    work: contiguous float32 [E, P, O], the weights of the panel's columns as the sweep left them so far. steps: float32 [E, P, O], decoded scale times tensor scale of each number;
    where it is 0 the number is rounded to 0. upper: float32 [E, P, P], the panel's part of U. format: its block is the width inside which columns are updated one
    by one; P need not be a multiple. tile: another launch shape of GPTQ_TILES. Raises ValueError for dtypes and shapes that do not fit together.
    """
    spec = kernel_format(format)
    _require_panel(work, steps, upper)
    return _gptq_block(work, steps, upper, spec.block, [] if tile is None else list(tile))


def gptq_block_ref(work: torch.Tensor, steps: torch.Tensor, upper: torch.Tensor, format: str = "nvfp4") -> torch.Tensor:
    """`gptq_block` in plain torch."""
    _require_panel(work, steps, upper)
    error, block = torch.empty_like(work), kernel_format(format).block
    for first in range(0, work.shape[1], block):
        last = min(first + block, work.shape[1])
        _sweep_columns(work, steps, upper, error, first, last)
        if last < work.shape[1]:
            work[:, last:] -= torch.bmm(upper[:, first:last, last:].transpose(1, 2), error[:, first:last])
    return error
