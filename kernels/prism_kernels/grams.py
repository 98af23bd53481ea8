"""gram: the second moment of a layer's inputs, its lower triangle, accumulated in float32; and that of every expert in one launch.

    H[i, j] += sum over rows t of w_t x[t, i] x[t, j],   j <= i          (w_t = 1 unless given; a masked row is never read)

Only tiles on and below the diagonal are computed, and inside a diagonal tile only its lower half is written: what stands above the diagonal stays. `fill_upper` mirrors it.
A masked row may hold anything, NaN included (padding positions do not count).

*Weights.* A product w x of float32 and bfloat16 does not fit bfloat16, and rounding it there would cost half of the digits of H. The kernel writes it as a sum of three
bfloat16 numbers, 8 bits each, and multiplies three times: as accurate as float32 at the speed of tensor cores. float16 x with weights is multiplied in float32 (slow): its range
does not hold the parts. Without weights bfloat16 and float16 products are exact. float32 x is multiplied in full float32, not TF32.

A float32 sum of n products is within n 2^-24 of the sum of their magnitudes; callers that see many batches add them in float64 (prism_ray.hessian.state does), or pass `out`.
Results depend on the shapes alone, never on timing. Without CUDA: float32 products in torch by blocks on and below the diagonal.
Legend: R rows, I columns, E experts.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from prism_kernels.dispatch import INTERPRETED, kernel_dtype, require, tl, triton, use_triton
from prism_kernels.formats import FLOATS

CPU_TILE = 256
"""Columns of one block of the product on a CPU: 1/2 + 1/(2 I / CPU_TILE) of the full product."""


class GramTile(NamedTuple):
    """Launch shape: a square tile of H, rows of x a step, warps, pipeline stages."""

    side: int
    depth: int
    warps: int = 4
    stages: int = 3


GRAM_TILES = (GramTile(64, 64), GramTile(128, 32, 8), GramTile(128, 64, 8))
"""The last is for rows without weights: three parts of a product leave too few registers."""
WIDE_GRAM_TILE = GramTile(32, 16)
"""For products in full float32: their operands lie in registers, of which larger tiles have too few."""


def choose_gram_tile(columns: int, weighted: bool = False, wide: bool = False) -> GramTile:
    """The tile for a width; the same on every device and in every process. wide: multiplied in float32."""
    if wide:
        return WIDE_GRAM_TILE
    return GRAM_TILES[0] if columns <= 1024 else GRAM_TILES[1 if weighted else 2]


@triton.jit
def gram_kernel(
    x_ptr, mask_ptr, weight_ptr, offsets_ptr, out_ptr, n_rows, n_columns,
    MASKED: tl.constexpr, WEIGHTED: tl.constexpr, OFFSETS: tl.constexpr, WIDE: tl.constexpr, COMPUTE: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Programs (tile of the lower triangle, expert). WIDE: weighted products are multiplied in float32; else in three parts, in COMPUTE."""
    expert = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    # Tiles are counted row by row: row i starts at i (i + 1) / 2. The square root may be off by one where it is rounded.
    tile_row = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    tile_row = tl.where(tile_row * (tile_row + 1) // 2 > tile, tile_row - 1, tile_row)
    tile_row = tl.where((tile_row + 1) * (tile_row + 2) // 2 <= tile, tile_row + 1, tile_row)
    tile_column = tile - tile_row * (tile_row + 1) // 2
    left = tile_row * SIDE + tl.arange(0, SIDE)
    right = tile_column * SIDE + tl.arange(0, SIDE)
    begin = 0
    end = n_rows
    if OFFSETS:
        begin = tl.load(offsets_ptr + expert).to(tl.int32)
        end = tl.load(offsets_ptr + expert + 1).to(tl.int32)
    acc = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    for start in range(begin, end, DEPTH):
        rows = start + tl.arange(0, DEPTH)
        counted = rows < end
        if MASKED:
            counted = counted & (tl.load(mask_ptr + rows, mask=counted, other=0) != 0)
        x_rows = x_ptr + rows.to(tl.int64)[:, None] * n_columns
        x_left = tl.load(x_rows + left[None, :], mask=counted[:, None] & (left < n_columns)[None, :], other=0.0)
        x_right = tl.load(x_rows + right[None, :], mask=counted[:, None] & (right < n_columns)[None, :], other=0.0)
        if WEIGHTED:
            weight = tl.load(weight_ptr + rows, mask=counted, other=0.0)
            product = x_left.to(tl.float32) * weight[:, None]
            if WIDE:
                acc = tl.dot(tl.trans(product), x_right.to(tl.float32), acc, input_precision="ieee")
            else:
                high = product.to(tl.bfloat16).to(tl.float32)
                middle = (product - high).to(tl.bfloat16).to(tl.float32)
                low = product - high - middle  # fits bfloat16
                x_right = x_right.to(COMPUTE)
                acc = tl.dot(tl.trans(low).to(COMPUTE), x_right, acc)
                acc = tl.dot(tl.trans(middle).to(COMPUTE), x_right, acc)
                acc = tl.dot(tl.trans(high).to(COMPUTE), x_right, acc)
        else:
            acc = tl.dot(tl.trans(x_left), x_right, acc, input_precision="ieee")
    place = out_ptr + (expert * n_columns + left)[:, None] * n_columns + right[None, :]
    mask = (left < n_columns)[:, None] & (right[None, :] <= left[:, None])
    tl.store(place, tl.load(place, mask=mask, other=0.0) + acc, mask=mask)


def _gram_cpu(x: torch.Tensor, mask: torch.Tensor | None, weight: torch.Tensor | None, out: torch.Tensor) -> None:
    """Rows [R, I] into one matrix, blocks on and below the diagonal; the sum of a block is one float32 product."""
    if mask is not None:
        x, weight = x[mask], None if weight is None else weight[mask]
    x = x.to(torch.float32)
    scaled = x if weight is None else x * weight[:, None]
    for low in range(0, x.shape[1], CPU_TILE):
        rows = slice(low, min(low + CPU_TILE, x.shape[1]))
        block = scaled[:, rows].T @ x[:, : rows.stop]
        if low:
            out[rows, :low] += block[:, :low]
        out[rows, rows] += block[:, low:].tril()


@torch.library.custom_op("prism_kernels::gram", mutates_args=("out",))
def _gram(
    x: torch.Tensor,
    mask: torch.Tensor | None,
    weight: torch.Tensor | None,
    offsets: torch.Tensor | None,
    out: torch.Tensor,
    tile: list[int],
) -> None:
    n_rows, n_columns = x.shape
    experts = 1 if offsets is None else out.shape[0]
    if not out.numel() or not n_rows:
        return
    if not use_triton(x):
        bounds = [0, n_rows] if offsets is None else offsets.tolist()
        for e, (low, high) in enumerate(pairwise(bounds)):
            part = slice(low, high)
            counted = (None if mask is None else mask[part], None if weight is None else weight[part])
            _gram_cpu(x[part], *counted, out if offsets is None else out[e])
        return
    wide = x.dtype == torch.float32 or (x.dtype == torch.float16 and weight is not None)
    shape = GramTile(*tile) if tile else choose_gram_tile(n_columns, weight is not None, wide)
    tiles = triton.cdiv(n_columns, shape.side)
    gram_kernel[(tiles * (tiles + 1) // 2, experts)](
        x.to(kernel_dtype(x.dtype)).contiguous(), None if mask is None else mask.contiguous().view(torch.uint8),
        None if weight is None else weight.to(torch.float32).contiguous(), offsets, out, n_rows, n_columns,
        MASKED=mask is not None, WEIGHTED=weight is not None, OFFSETS=offsets is not None, WIDE=x.dtype != torch.bfloat16, COMPUTE=tl.float32 if INTERPRETED else tl.bfloat16,
        SIDE=shape.side, DEPTH=shape.depth, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip


@_gram.register_fake
def _(x, mask, weight, offsets, out, tile):  # type: ignore[no-untyped-def]
    return None


def gram(
    x: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tile: GramTile | None = None,
) -> torch.Tensor:
    """H float32 [I, I], or [E, I, I] with `offsets`: `out` with the rows added to its lower triangle, zeros unless given.

    x: [R, I] bfloat16, float16 or float32. mask: bool [R], the rows that count. weight: float [R], any sign. offsets: int32 or int64 [E + 1], ascending from 0 to R:
    rows offsets[e] .. offsets[e + 1] - 1 are expert e's; an expert without rows gets nothing. out: contiguous float32, changed in place and returned; nothing is read from or
    written to its upper triangle. tile: a launch shape other than `choose_gram_tile`'s. Raises ValueError for dtypes and shapes that do not fit together.
    """
    require(x.dtype in FLOATS, f"x is {x.dtype}, expected bfloat16, float16 or float32")
    require(x.ndim == 2, f"x has shape {list(x.shape)}, expected [R, I]")
    n_rows, n_columns = x.shape
    require(mask is None or (mask.dtype == torch.bool and list(mask.shape) == [n_rows]), f"mask must be bool [{n_rows}]")
    require(weight is None or (weight.is_floating_point() and list(weight.shape) == [n_rows]), f"weight must be float [{n_rows}]")
    shape = [n_columns, n_columns]
    if offsets is not None:
        require(offsets.dtype in (torch.int32, torch.int64), f"offsets are {offsets.dtype}, expected int32 or int64")
        require(offsets.ndim == 1 and offsets.numel() > 0, f"offsets have shape {list(offsets.shape)}, expected [E + 1]")
        shape = [offsets.numel() - 1, *shape]
    if out is None:
        out = torch.zeros(shape, dtype=torch.float32, device=x.device)
    fits = out.dtype == torch.float32 and list(out.shape) == shape and out.is_contiguous()
    require(fits, f"out is {out.dtype} {list(out.shape)}, expected contiguous float32 {shape}")
    _gram(x.detach(), mask, weight, offsets, out, [] if tile is None else list(tile))
    return out


def gram_ref(
    x: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The lower triangle of H in plain torch, from zero, computed and returned in `dtype`."""
    bounds = [0, x.shape[0]] if offsets is None else offsets.tolist()
    parts = []
    for low, high in pairwise(bounds):
        counted = torch.ones(high - low, dtype=torch.bool, device=x.device) if mask is None else mask[low:high]
        rows = x[low:high][counted].to(dtype)
        scaled = rows if weight is None else rows * weight[low:high][counted].to(dtype)[:, None]
        parts.append((scaled.T @ rows).tril())
    return parts[0] if offsets is None else torch.stack(parts)


def fill_upper(lower: torch.Tensor) -> torch.Tensor:
    """A new symmetric [..., I, I] from its lower triangle."""
    return lower.tril() + lower.tril(-1).mT
