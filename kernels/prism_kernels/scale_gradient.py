"""The backward of a linear whose codes are frozen: `scale_grad`, the gradient of its scales, and `grad_input`, that of its input.

    dL/ds[o, g] = tensor_scale * sum over i in block g of e2m1(c[o, i]) * (sum over t of dy[t, o] x[t, i]),       dL/dx = dy W

A tile of dy'x stays in registers and one number a block is stored: the [O, I] gradient is never written. W is decoded tile by tile. Sums are float32.

On CUDA tensors these are Triton kernels, on others torch by chunks of rows under CHUNK_BYTES, in float32: bfloat16 products are several times slower than
float32 ones on CPUs without instructions for them, and round the sum over tokens.

Legend: E experts, O rows, I columns, G = I / block scale blocks, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from prism_kernels.dispatch import kernel_dtype, require, tl, triton, use_triton
from prism_kernels.formats import (
    FLOATS,
    decode_codes,
    decode_tile,
    decode_weight,
    e2m1_values,
    kernel_format,
    output_factor,
    require_weight,
    tensor_scale_of,
)
from prism_kernels.matmul import triton_dtype

CHUNK_BYTES = 1 << 21
"""Bytes of a chunk's largest temporary on CPUs: it stays in the cache, and a matrix product of it still runs at full speed."""


@dataclass(frozen=True)
class GradTile:
    """Launch shape of `scale_grad` and `grad_input`: an output tile rows x columns (tokens x columns), `depth` summed a step; warps, pipeline stages."""

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 3


GRAD_TILES = (GradTile(64, 64, 32), GradTile(64, 128, 32), GradTile(128, 128, 32, warps=8))
WIDE_GRAD_TILE = GradTile(32, 64, 16)
"""For products in full float32: their operands lie in registers, of which larger tiles have too few."""


def choose_grad_tile(rows: int, columns: int, wide: bool = False) -> GradTile:
    """The tile for an output of that shape; the same on every device and in every process, so that equal inputs give equal bits. wide: in float32."""
    if wide:
        return WIDE_GRAD_TILE
    if rows >= 1024 and columns >= 1024:
        return GRAD_TILES[2]
    return GRAD_TILES[1] if rows * columns >= 1 << 18 else GRAD_TILES[0]


@triton.jit
def scale_grad_kernel(
    dy_ptr, x_ptr, codes_ptr, tensor_scale_ptr, offsets_ptr, out_ptr, n_tokens, n_rows, n_columns,
    OFFSETS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Programs (column tile, row tile, expert). OFFSETS: tokens offsets[e] .. offsets[e + 1] - 1 are expert e's."""
    expert = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    columns = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    row_mask = rows < n_rows
    column_mask = columns < n_columns
    begin = 0
    end = n_tokens
    if OFFSETS:
        begin = tl.load(offsets_ptr + expert).to(tl.int32)
        end = tl.load(offsets_ptr + expert + 1).to(tl.int32)
    acc = tl.zeros((BLOCK_O, BLOCK_I), dtype=tl.float32)
    for start in range(begin, end, BLOCK_T):
        tokens = start + tl.arange(0, BLOCK_T)
        token_mask = tokens < end
        token_rows = tokens.to(tl.int64)[:, None]
        dy = tl.load(dy_ptr + token_rows * n_rows + rows[None, :], mask=token_mask[:, None] & row_mask[None, :], other=0.0)
        x = tl.load(x_ptr + token_rows * n_columns + columns[None, :], mask=token_mask[:, None] & column_mask[None, :], other=0.0)
        acc = tl.dot(tl.trans(dy), x, acc, input_precision="ieee")
    code_columns = tl.program_id(0) * (BLOCK_I // 2) + tl.arange(0, BLOCK_I // 2)
    code_rows = (expert * n_rows + rows)[:, None]
    code_mask = row_mask[:, None] & (code_columns < n_columns // 2)[None, :]
    packed = tl.load(codes_ptr + code_rows * (n_columns // 2) + code_columns[None, :], mask=code_mask, other=0)
    product = tl.reshape(acc * e2m1_values(packed, tl.float32), (BLOCK_O, BLOCK_I // BLOCK, BLOCK))
    grad = tl.sum(product, axis=2) * tl.load(tensor_scale_ptr + expert)
    blocks = tl.program_id(0) * (BLOCK_I // BLOCK) + tl.arange(0, BLOCK_I // BLOCK)
    mask = row_mask[:, None] & (blocks < n_columns // BLOCK)[None, :]
    tl.store(out_ptr + code_rows * (n_columns // BLOCK) + blocks[None, :], grad, mask=mask)


@triton.jit
def grad_input_kernel(
    dy_ptr, codes_ptr, scales_ptr, tensor_scale_ptr, out_ptr, n_tokens, n_rows, n_columns,
    E8M0: tl.constexpr, BLOCK: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """dx [T, I] = dy [T, O] W. Programs (token tile, column tile)."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    code_columns = tl.program_id(1) * (BLOCK_I // 2) + tl.arange(0, BLOCK_I // 2)
    blocks = tl.program_id(1) * (BLOCK_I // BLOCK) + tl.arange(0, BLOCK_I // BLOCK)
    token_mask = tokens < n_tokens
    token_rows = tokens.to(tl.int64)[:, None]
    acc = tl.zeros((BLOCK_T, BLOCK_I), dtype=tl.float32)
    for start in range(0, n_rows, BLOCK_O):
        rows = start + tl.arange(0, BLOCK_O)
        row_mask = rows < n_rows
        weight_rows = rows.to(tl.int64)[:, None]
        dy = tl.load(dy_ptr + token_rows * n_rows + rows[None, :], mask=token_mask[:, None] & row_mask[None, :], other=0.0)
        code_mask = row_mask[:, None] & (code_columns < n_columns // 2)[None, :]
        packed = tl.load(codes_ptr + weight_rows * (n_columns // 2) + code_columns[None, :], mask=code_mask, other=0)
        scale_mask = row_mask[:, None] & (blocks < n_columns // BLOCK)[None, :]
        scales = tl.load(scales_ptr + weight_rows * (n_columns // BLOCK) + blocks[None, :], mask=scale_mask, other=0)
        acc = tl.dot(dy.to(COMPUTE), decode_tile(packed, scales, E8M0, BLOCK, COMPUTE), acc, input_precision="ieee")
    out = acc * output_factor(tl.load(tensor_scale_ptr), E8M0)
    mask = token_mask[:, None] & (columns < n_columns)[None, :]
    tl.store(out_ptr + token_rows * n_columns + columns[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


def scale_grad_ref(
    dy: torch.Tensor,
    x: torch.Tensor,
    codes: torch.Tensor,
    tensor_scale: torch.Tensor | float = 1.0,
    format: str = "nvfp4",
    *,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """`scale_grad` in plain torch and float32, by way of the weight gradient [O, I]."""
    factors = tensor_scale_of(tensor_scale, x.device, 1 if offsets is None else codes.shape[0])
    if offsets is None:
        outer = (dy.float().T @ x.float()) * decode_codes(codes)
        return outer.unflatten(-1, (-1, kernel_format(format).block)).sum(-1) * factors
    bounds = offsets.tolist()
    parts = [scale_grad_ref(dy[low:high], x[low:high], codes[e], factors[e], format) for e, (low, high) in enumerate(pairwise(bounds))]
    return torch.stack(parts)


def _scale_grad_cpu(
    dy: torch.Tensor, x: torch.Tensor, codes: torch.Tensor, tensor_scale: torch.Tensor, block: int, out: torch.Tensor
) -> None:
    """One weight's [O, G] into `out`, chunk by chunk of its rows."""
    x, dy = x.to(torch.float32), dy.to(torch.float32)
    (n_rows, n_blocks), step = out.shape, max(1, CHUNK_BYTES // (4 * x.shape[1]))
    held = torch.empty(min(step, n_rows), x.shape[1], dtype=torch.float32, device=x.device)
    for start in range(0, n_rows, step):
        part = slice(start, min(start + step, n_rows))
        product = torch.mm(dy[:, part].T, x, out=held[: part.stop - start]).mul_(decode_codes(codes[part]))
        torch.sum(product.view(-1, n_blocks, block), dim=-1, out=out[part])
    out.mul_(tensor_scale)


@torch.library.custom_op("prism_kernels::scale_grad", mutates_args=())
def _scale_grad(
    dy: torch.Tensor,
    x: torch.Tensor,
    codes: torch.Tensor,
    tensor_scale: torch.Tensor,
    offsets: torch.Tensor | None,
    block: int,
    tile: list[int],
) -> torch.Tensor:
    n_rows, n_columns = codes.shape[-2], codes.shape[-1] * 2
    out = torch.empty(*codes.shape[:-1], n_columns // block, dtype=torch.float32, device=x.device)
    experts = 1 if offsets is None else codes.shape[0]
    if not out.numel():
        return out
    if not use_triton(x):
        bounds = [0, x.shape[0]] if offsets is None else offsets.tolist()
        for e, (low, high) in enumerate(pairwise(bounds)):
            weight, into = (codes, out) if offsets is None else (codes[e], out[e])
            _scale_grad_cpu(dy[low:high], x[low:high], weight, tensor_scale[e], block, into)
        return out
    shape = GradTile(*tile) if tile else choose_grad_tile(n_rows, n_columns, x.dtype == torch.float32)
    grid = (triton.cdiv(n_columns, shape.columns), triton.cdiv(n_rows, shape.rows), experts)
    scale_grad_kernel[grid](
        dy.to(kernel_dtype(dy.dtype)).contiguous(), x.to(kernel_dtype(x.dtype)).contiguous(), codes.contiguous(), tensor_scale, offsets, out,
        x.shape[0], n_rows, n_columns, OFFSETS=offsets is not None, BLOCK=block, BLOCK_O=shape.rows, BLOCK_I=shape.columns, BLOCK_T=shape.depth,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return out


@_scale_grad.register_fake
def _(dy, x, codes, tensor_scale, offsets, block, tile):  # type: ignore[no-untyped-def]
    return x.new_empty((*codes.shape[:-1], codes.shape[-1] * 2 // block), dtype=torch.float32)


def _require_pair(dy: torch.Tensor, other: torch.Tensor | None, codes: torch.Tensor) -> None:
    require(dy.dtype in FLOATS, f"dy is {dy.dtype}, expected bfloat16, float16 or float32")
    require(dy.ndim == 2 and dy.shape[1] == codes.shape[-2], f"dy has shape {list(dy.shape)}, expected [T, {codes.shape[-2]}]")
    if other is not None:
        require(other.dtype == dy.dtype, f"x is {other.dtype}, dy {dy.dtype}; they must have one dtype")
        expected = [dy.shape[0], codes.shape[-1] * 2]
        require(list(other.shape) == expected, f"x has shape {list(other.shape)}, expected {expected}")


def scale_grad(
    dy: torch.Tensor,
    x: torch.Tensor,
    codes: torch.Tensor,
    tensor_scale: torch.Tensor | float = 1.0,
    format: str = "nvfp4",
    *,
    offsets: torch.Tensor | None = None,
    tile: GradTile | None = None,
) -> torch.Tensor:
    """dL/ds float32 [O, G]: tensor_scale * the sums over blocks of e2m1(codes) * (dy' x), accumulated in float32.

    dy: [T, O], x: [T, I], one dtype of bfloat16, float16, float32. codes: uint8 [O, I/2]. tensor_scale: float32 of one element, or a number.
    offsets: for experts, int32 or int64 [E + 1], ascending from 0 to T: tokens offsets[e] .. offsets[e + 1] - 1 are expert e's; codes are then [E, O, I/2], tensor_scale [E] or one
    number, the result [E, O, G], and zero for an expert without tokens. tile: a launch shape other than `choose_grad_tile`'s.
    Raises ValueError for shapes, dtypes and formats that do not fit together.
    """
    spec = kernel_format(format)
    require(
        codes.dtype == torch.uint8 and codes.ndim == (2 if offsets is None else 3), f"codes {codes.dtype} {list(codes.shape)} are no plane"
    )
    require(codes.shape[-1] * 2 % spec.block == 0, f"{codes.shape[-1] * 2} columns do not divide into {format} blocks of {spec.block}")
    _require_pair(dy, x, codes)
    experts = 1
    if offsets is not None:
        experts = codes.shape[0]
        require(offsets.dtype in (torch.int32, torch.int64), f"offsets are {offsets.dtype}, expected int32 or int64")
        require(list(offsets.shape) == [experts + 1], f"offsets have shape {list(offsets.shape)}, expected [{experts + 1}]")
    shape = [] if tile is None else [tile.rows, tile.columns, tile.depth, tile.warps, tile.stages]
    return _scale_grad(dy, x, codes, tensor_scale_of(tensor_scale, x.device, experts), offsets, spec.block, shape)


def grad_input_ref(
    dy: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, tensor_scale: torch.Tensor | float = 1.0, format: str = "nvfp4"
) -> torch.Tensor:
    """`grad_input` in plain torch and float32, by way of the decoded weight."""
    return ((dy.float() @ decode_weight(codes, scales, format)) * tensor_scale_of(tensor_scale, dy.device)).to(dy.dtype)


@torch.library.custom_op("prism_kernels::grad_input", mutates_args=())
def _grad_input(
    dy: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, tensor_scale: torch.Tensor, format: str, tile: list[int]
) -> torch.Tensor:
    spec = kernel_format(format)
    (n_tokens, n_rows), n_columns = dy.shape, codes.shape[1] * 2
    if not use_triton(dy):
        out = torch.zeros(n_tokens, n_columns, dtype=torch.float32, device=dy.device)
        step = max(1, CHUNK_BYTES // (4 * n_columns))
        for start in range(0, n_rows, step):
            part = slice(start, start + step)
            out.addmm_(dy[:, part].to(torch.float32), decode_weight(codes[part], scales[part], format))
        return out.mul_(tensor_scale).to(dy.dtype)
    held = dy.to(kernel_dtype(dy.dtype)).contiguous()
    out = torch.empty(n_tokens, n_columns, dtype=held.dtype, device=dy.device)
    # float16 cannot hold MXFP4's scales; its mantissas fit float32.
    compute = tl.float32 if spec.e8m0 and held.dtype == torch.float16 else triton_dtype(held.dtype)
    shape = GradTile(*tile) if tile else choose_grad_tile(n_tokens, n_columns, compute == tl.float32)
    if n_tokens:
        grad_input_kernel[(triton.cdiv(n_tokens, shape.rows), triton.cdiv(n_columns, shape.columns))](
            held, codes.contiguous(), scales.contiguous(), tensor_scale, out, n_tokens, n_rows, n_columns,
            E8M0=spec.e8m0, BLOCK=spec.block, COMPUTE=compute, BLOCK_T=shape.rows, BLOCK_I=shape.columns, BLOCK_O=shape.depth,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
    return out.to(dy.dtype)


@_grad_input.register_fake
def _(dy, codes, scales, tensor_scale, format, tile):  # type: ignore[no-untyped-def]
    return dy.new_empty((dy.shape[0], codes.shape[1] * 2))


def grad_input(
    dy: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    tensor_scale: torch.Tensor | float = 1.0,
    format: str = "nvfp4",
    *,
    tile: GradTile | None = None,
) -> torch.Tensor:
    """dL/dx [T, I] = dy [T, O] W in dy's dtype, accumulated in float32, W decoded tile by tile.

    dy: bfloat16, float16 or float32. codes: uint8 [O, I/2]. scales: uint8 [O, G]. tensor_scale: float32 of one element, or a number. tile: a launch shape
    other than `choose_grad_tile`'s. Raises ValueError for shapes, dtypes and formats that do not fit together.
    """
    require_weight(codes, scales, format)
    _require_pair(dy, None, codes)
    shape = [] if tile is None else [tile.rows, tile.columns, tile.depth, tile.warps, tile.stages]
    return _grad_input(dy, codes, scales, tensor_scale_of(tensor_scale, dy.device), format, shape)
