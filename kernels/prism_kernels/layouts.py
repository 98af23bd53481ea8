"""Layouts in which serving engines keep block scales: permutations of the linear plane uint8 [..., O, G], each with its inverse and its addresses.

| layout | shape | who reads it |
|---|---|---|
| linear | [..., O, G] | files, this package's kernels |
| swizzled | [..., O up to 128s, G up to 4s] | FP4 tensor cores of Blackwell through cuBLAS and CUTLASS |
| marlin | [..., G, O] | vLLM's weight-only Marlin kernels with 16-bit activations |

swizzled: tiles of 128 rows x 4 blocks in row-major order, 512 bytes each; inside one, row r and block g lie at 16 (r mod 32) + 4 (r div 32) + g: the four
scales of a row are one 32-bit word, and rows 32 apart are neighbours (cuBLAS, "1D block scaling factors layout"). Padding bytes are zero, and `from_swizzled`
refuses a plane in which they are not: stale padding turns into NaN in real rows (field case FMT-07).

marlin: transposed; within 64 rows, row i + 8 j (i, j < 8) goes to 8 i + j, so that a thread finds the scales of its eight columns side by side; then the
middle two of every four change places, which the 16-bit decoding of 8-bit scales asks for. O must divide by 64 (vLLM pads before). A weight of one single
block has its own order: within 32 rows, row 2 a + b + 8 c (a, c < 4, b < 2) goes to 8 a + 2 c + b.

Marlin also recodes NVFP4 bytes: a scale becomes the top 8 bits below the sign of float16(scale * factor * 128), 5 exponent and 3 mantissa bits, and the tensor scale
is divided by `factor`, a power of two chosen from the plane. `marlin_bytes` and `linear_bytes` do that and its inverse. Two things follow for who swaps
planes there: every plane of a layer must be recoded with the *factor of the resident one* (its tensor scale is shared), and a scale below 2^-6 / factor has
no byte; vLLM writes zero, which silently drops the block. Both are refused here.

Legend: O rows, G scale blocks.
"""

from __future__ import annotations

from typing import Literal

import torch

from prism_kernels.dispatch import require
from prism_kernels.formats import decode_scales

Layout = Literal["linear", "swizzled", "marlin"]
LAYOUTS: tuple[Layout, ...] = ("linear", "swizzled", "marlin")
TILE_ROWS, TILE_BLOCKS = 128, 4
MARLIN_ROWS, MARLIN_ROWS_ONE_BLOCK = 64, 32


def layout_shape(rows: int, blocks: int, layout: Layout) -> tuple[int, int]:
    """Shape of one plane [rows, blocks] in that layout; ValueError where it has none."""
    require(layout in LAYOUTS, f"layout '{layout}' is not known; known: {', '.join(LAYOUTS)}")
    if layout == "swizzled":
        return -(-rows // TILE_ROWS) * TILE_ROWS, -(-blocks // TILE_BLOCKS) * TILE_BLOCKS
    if layout == "marlin":
        least = MARLIN_ROWS if blocks > 1 else MARLIN_ROWS_ONE_BLOCK
        require(rows % least == 0, f"{rows} rows do not divide by {least}, as the marlin layout needs; pad the layer as the engine does")
        return blocks, rows
    return rows, blocks


def places(positions: torch.Tensor, rows: int, blocks: int, layout: Layout) -> torch.Tensor:
    """Flat positions in `layout` of flat positions (row * blocks + block) in the linear plane; int64. Positions are taken as legal."""
    layout_shape(rows, blocks, layout)
    position = positions.to(torch.int64)
    row, block = position // blocks, position % blocks
    if layout == "swizzled":
        tiles = -(-blocks // TILE_BLOCKS)
        tile = (row // TILE_ROWS) * tiles + block // TILE_BLOCKS
        inner = row % TILE_ROWS
        return tile * (TILE_ROWS * TILE_BLOCKS) + (inner % 32) * 16 + (inner // 32) * 4 + block % TILE_BLOCKS
    if layout == "marlin":
        return block * rows + _marlin_row(row, blocks)
    return position


def _marlin_row(row: torch.Tensor, blocks: int) -> torch.Tensor:
    """Where a row stands in a line of the marlin layout."""
    if blocks > 1:
        inner = row % MARLIN_ROWS
        place = (inner % 8) * 8 + inner // 8
        start = row - inner
    else:
        inner = row % MARLIN_ROWS_ONE_BLOCK
        place = (inner % 8 // 2) * 8 + (inner // 8) * 2 + inner % 2
        start = row - inner
    quad = place % 4
    return start + place - quad + (quad % 2) * 2 + quad // 2


def to_layout(scales: torch.Tensor, layout: Layout) -> torch.Tensor:
    """uint8 [..., O, G] -> the plane(s) in `layout` (new tensor; padding zero)."""
    require(scales.dtype == torch.uint8 and scales.ndim >= 2, f"scales are {scales.dtype} {list(scales.shape)}, expected uint8 [..., O, G]")
    rows, blocks = scales.shape[-2:]
    shape = layout_shape(rows, blocks, layout)
    target = places(torch.arange(rows * blocks, device=scales.device), rows, blocks, layout)
    flat = scales.new_zeros((*scales.shape[:-2], shape[0] * shape[1]))
    flat[..., target] = scales.reshape(*scales.shape[:-2], rows * blocks)
    return flat.reshape(*scales.shape[:-2], *shape)


def from_layout(data: torch.Tensor, rows: int, blocks: int, layout: Layout) -> torch.Tensor:
    """The linear plane(s) uint8 [..., rows, blocks] of `data`; ValueError where its shape or its padding is not that of `to_layout`."""
    shape = layout_shape(rows, blocks, layout)
    require(data.dtype == torch.uint8, f"scales are {data.dtype}, expected uint8")
    require(tuple(data.shape[-2:]) == shape, f"a plane [{rows}, {blocks}] is {list(shape)} in layout {layout}, got {list(data.shape)}")
    source = places(torch.arange(rows * blocks, device=data.device), rows, blocks, layout)
    flat = data.reshape(*data.shape[:-2], shape[0] * shape[1])
    linear = flat[..., source]
    require(
        int(flat.count_nonzero()) == int(linear.count_nonzero()),
        f"padding of the {layout} plane is not zero: it was written by something else, or the plane is in another layout",
    )
    return linear.reshape(*data.shape[:-2], rows, blocks)


def marlin_factor(scales: torch.Tensor) -> float:
    """The power of two that vLLM takes for a layer's NVFP4 scales: 2^floor(log2(448 / largest)); 1 for a plane of zeros."""
    largest = decode_scales(scales, "nvfp4").max()
    require(bool(torch.isfinite(largest)), "the plane holds an illegal scale byte")
    if largest == 0:
        return 1.0
    return float(torch.exp2(torch.floor(torch.log2(448.0 / largest))))


def marlin_bytes(scales: torch.Tensor, factor: float) -> torch.Tensor:
    """NVFP4 scale bytes as Marlin reads them, same shape and order. `factor`: that of the resident plane.

    ValueError names how many scales have no byte: positive ones below 2^-6 / factor, and those above 448 / factor.
    """
    value = decode_scales(scales, "nvfp4") * factor
    lost = int(((value > 0) & (value < 2.0**-6)).sum())
    require(lost == 0, f"{lost} scales are below 2^-6 / {factor:g} and would become zero in Marlin; serve this plane without Marlin")
    over = int((~(value <= 448.0)).sum())
    require(
        over == 0,
        f"{over} scales are above 448 / {factor:g}, the resident plane's factor, or not legal; load the layer anew with this plane",
    )
    bits = (value * 128.0).to(torch.float16).view(torch.int16)
    return (bits >> 7).to(torch.uint8)


def linear_bytes(data: torch.Tensor, factor: float) -> torch.Tensor:
    """The inverse of `marlin_bytes`: E4M3 bytes."""
    value = (data.to(torch.int16) << 7).view(torch.float16).to(torch.float32) / (128.0 * factor)
    back = value.to(torch.float8_e4m3fn)
    require(bool((back.to(torch.float32) == value).all()), f"the plane holds scales that are not E4M3 under factor {factor:g}")
    return back.view(torch.uint8)
