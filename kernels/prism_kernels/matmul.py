# mypy: disable-error-code="no-untyped-def"
"""fp4_matmul: y = x W' + b with an NVFP4 or MXFP4 weight, read as codes and scale bytes.

    y[t, o] = tensor_scale * sum_k x[t, k] * e2m1(c[o, k]) * s[o, k // block] + b[o]

x [T, I] bfloat16, float16 or float32; codes uint8 [O, I/2]; scales uint8 [O, G]; products are accumulated in float32 and rounded once, on output.
The tile of the weight is decoded in registers (prism_kernels.formats) and is the *left* operand of the matrix product, tile [rows, columns] times x'
[columns, tokens]: Hopper's wgmma takes its left operand from registers and its right one from shared memory, and the token side of a tile may be as narrow as
8, so one kernel serves decoding and prefill. In decoding, where O / rows tiles do not fill a GPU, the columns are split over programs; their float32
partial sums are added in a fixed order by a second kernel, not by atomics, so equal inputs give equal bits.

float16 x with an MXFP4 weight: the scales exceed float16, so each block of 32 codes is multiplied unscaled and its float32 partial sum is scaled.
float32 x is multiplied in full float32, not TF32: for checks, slow on a GPU.

The tile is chosen by `choose_tile` from shapes alone, never by timing: two replicas must give equal bits. `DECODE_TILES` and `PREFILL_TILES` are the
spaces that a benchmark searches; a tile found there is passed as `tile`.
Legend: O rows, I columns, G = I / block scale blocks, T tokens, M planes, S splits of the columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch

from prism_kernels.cpu import linear_cpu
from prism_kernels.dispatch import kernel_dtype, require, tl, triton, use_triton
from prism_kernels.formats import (
    FLOATS,
    KernelFormat,
    decode_tile,
    decode_weight,
    e2m1_values,
    e8m0_scale,
    kernel_format,
    output_factor,
    require_input,
    require_weight,
    tensor_scale_of,
)


@dataclass(frozen=True)
class Tile:
    """One launch shape. tokens x rows outputs a program, `columns` a step; `splits` programs share a row's columns; warps and pipeline stages."""

    tokens: int
    rows: int
    columns: int
    splits: int = 1
    warps: int = 4
    stages: int = 3

    def check(self, spec: KernelFormat, dtype: torch.dtype) -> Tile:
        """This tile, or ValueError where the kernel has no such shape."""
        for name, least in (("tokens", 8), ("rows", 16), ("columns", 32)):
            value = getattr(self, name)
            require(value >= least and value & (value - 1) == 0, f"tile {name} is {value}, must be a power of two of at least {least}")
        require(self.splits >= 1, f"tile splits is {self.splits}, must be at least 1")
        if scales_sums(spec, dtype):
            return Tile(self.tokens, self.rows, spec.block, self.splits, self.warps, self.stages)
        return self


DECODE_TILES = (
    Tile(8, 64, 128, splits=4),
    Tile(8, 128, 128, splits=2),
    Tile(16, 64, 128, splits=4),
    Tile(16, 128, 128, splits=2),
)
PREFILL_TILES = (
    Tile(64, 64, 128),
    Tile(64, 128, 64),
    Tile(128, 128, 64, warps=8),
)
SPLIT_TARGET = 264  # two programs for each of an H200's 132 multiprocessors


def scales_sums(spec: KernelFormat, dtype: torch.dtype) -> bool:
    """Whether scales multiply partial sums instead of codes: where the dtype of x cannot hold them."""
    return spec.e8m0 and dtype == torch.float16


def choose_tile(tokens: int, rows: int, columns: int) -> Tile:
    """The tile for a shape; the same on every device and in every process."""
    if tokens <= 16:
        width = 8 if tokens <= 8 else 16
        height = 64 if rows <= 8192 else 128
        programs = -(-rows // height)
        splits = 1
        while splits < 8 and programs * splits < SPLIT_TARGET and columns // (splits * 2) >= 512:
            splits *= 2
        return Tile(width, height, 128, splits=splits)
    return PREFILL_TILES[0] if tokens <= 64 else PREFILL_TILES[2]


@triton.jit
def scale_addresses(planes_ptr, plane, plane_stride, offset, POINTERS: tl.constexpr):
    """Address of one plane's scale bytes for the weight at `offset`: planes_ptr is the stack's start, or a table of int64 addresses."""
    if POINTERS:
        base = tl.load(planes_ptr + plane).to(tl.pointer_type(tl.uint8))
    else:
        base = planes_ptr + (tl.full((), 0, tl.int64) + plane) * plane_stride
    return base + offset


@triton.jit
def load_planes(plane_ptr, tokens, token_mask, n_planes):
    """int32 [BLOCK_T]: each token's plane; -1 is plane 0, and n_planes stands for every index that names none."""
    plane = tl.load(plane_ptr + tokens, mask=token_mask, other=0)
    plane = tl.where((plane < -1) | (plane >= n_planes), n_planes, plane)
    return tl.maximum(plane, 0).to(tl.int32)


@triton.jit
def tile_product(
    x_ptr,
    codes_ptr,
    planes_ptr,
    plane_stride,
    plane_offset,
    tokens,
    token_mask,
    plane,
    rows,
    n_rows,
    n_columns,
    n_planes,
    k_begin,
    k_end,
    PLANES: tl.constexpr,
    POINTERS: tl.constexpr,
    E8M0: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED_SUMS: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """float32 [BLOCK_O, BLOCK_T]: the sums over columns k_begin .. k_end of the rows of one weight times the tokens of x, without `output_factor`.

    tokens, rows: indices [BLOCK_T], [BLOCK_O]; plane: int32 [BLOCK_T], whose scales each token takes; ignored unless PLANES.
    Codes are read and decoded once a tile, whatever the number of planes. With PLANES, each plane that the tile's tokens name scales them and multiplies its
    own tokens, the others being zero: adding zeros changes no sum, so a token's result has the bits that it has alone.
    """
    row_mask = rows < n_rows
    blocks = n_columns // BLOCK
    code_rows = codes_ptr + rows.to(tl.int64)[:, None] * (n_columns // 2)
    scale_rows = rows.to(tl.int64) * blocks
    x_rows = x_ptr + tokens.to(tl.int64)[None, :] * n_columns
    acc = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32)
    first = 0
    last = 0
    if PLANES:
        first = tl.min(tl.where(token_mask, plane, n_planes), axis=0)
        last = tl.minimum(tl.max(tl.where(token_mask, plane, -1), axis=0), n_planes - 1)
    for k in range(k_begin, k_end, BLOCK_K):
        code_columns = k // 2 + tl.arange(0, BLOCK_K // 2)
        packed = tl.load(code_rows + code_columns[None, :], mask=row_mask[:, None] & (code_columns < n_columns // 2)[None, :], other=0)
        columns = k + tl.arange(0, BLOCK_K)
        column_mask = (columns < n_columns)[:, None]
        if SCALED_SUMS:
            x = tl.load(x_rows + columns[:, None], mask=token_mask[None, :] & column_mask, other=0.0)
            part = tl.dot(e2m1_values(packed, COMPUTE), x, input_precision="ieee")
            if PLANES:
                known = token_mask & (plane < n_planes)
                base = scale_addresses(planes_ptr, tl.where(known, plane, 0), plane_stride, plane_offset, POINTERS)
                byte = tl.load(base[None, :] + (scale_rows + k // BLOCK)[:, None], mask=row_mask[:, None] & known[None, :], other=0)
                acc += part * e8m0_scale(byte)
            else:
                byte = tl.load(planes_ptr + plane_offset + scale_rows + k // BLOCK, mask=row_mask, other=0)
                acc += part * e8m0_scale(byte)[:, None]
        else:
            scale_columns = k // BLOCK + tl.arange(0, BLOCK_K // BLOCK)
            scale_mask = row_mask[:, None] & (scale_columns < blocks)[None, :]
            addresses = scale_rows[:, None] + scale_columns[None, :]
            if PLANES:
                for m in range(first, last + 1):
                    mine = token_mask & (plane == m)
                    if tl.max(mine.to(tl.int32), axis=0) > 0:
                        base = scale_addresses(planes_ptr, m, plane_stride, plane_offset, POINTERS)
                        byte = tl.load(base + addresses, mask=scale_mask, other=0)
                        # Read again for each plane: kept in registers beside the codes, a tile of x made large tiles spill.
                        x = tl.load(x_rows + columns[:, None], mask=mine[None, :] & column_mask, other=0.0)
                        acc = tl.dot(decode_tile(packed, byte, E8M0, BLOCK, COMPUTE), x, acc, input_precision="ieee")
            else:
                x = tl.load(x_rows + columns[:, None], mask=token_mask[None, :] & column_mask, other=0.0)
                byte = tl.load(planes_ptr + plane_offset + addresses, mask=scale_mask, other=0)
                acc = tl.dot(decode_tile(packed, byte, E8M0, BLOCK, COMPUTE), x, acc, input_precision="ieee")
    if PLANES:
        # A plane that does not exist has no answer: NaN, not another tenant's output.
        acc = tl.where((plane >= n_planes)[None, :], float("nan"), acc)
    return acc


@triton.jit
def store_tile(
    acc, y_ptr, partial_ptr, tensor_scale, bias_ptr, tokens, token_mask, rows, n_tokens, n_rows, split,
    E8M0: tl.constexpr, HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Write a tile: finished to y [T, O], or raw to partial [S, T, O] where several programs share its columns."""
    mask = (rows < n_rows)[:, None] & token_mask[None, :]
    place = tokens.to(tl.int64)[None, :] * n_rows + rows[:, None]
    if SPLITS > 1:
        tl.store(partial_ptr + split.to(tl.int64) * n_tokens * n_rows + place, acc, mask=mask)
    else:
        y = acc * output_factor(tensor_scale, E8M0)
        if HAS_BIAS:
            y += tl.load(bias_ptr + rows, mask=rows < n_rows, other=0.0).to(tl.float32)[:, None]
        tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def finish_kernel(
    partial_ptr, y_ptr, tensor_scale_ptr, bias_ptr, n_tokens, n_rows,
    E8M0: tl.constexpr, HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """y [T, O] = the sum of partial [S, T, O], in the order of the splits, times the tensor scale, plus the bias."""
    token = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    mask = rows < n_rows
    acc = tl.zeros((BLOCK_O,), dtype=tl.float32)
    for split in range(SPLITS):
        acc += tl.load(partial_ptr + (split * n_tokens + token) * n_rows + rows, mask=mask, other=0.0)
    y = acc * output_factor(tl.load(tensor_scale_ptr), E8M0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * n_rows + rows, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def fp4_matmul_kernel(
    x_ptr, codes_ptr, planes_ptr, plane_stride, plane_ptr, order_ptr, y_ptr, partial_ptr, tensor_scale_ptr, bias_ptr,
    n_tokens, n_rows, n_columns, n_planes, columns_a_split,
    PLANES: tl.constexpr, POINTERS: tl.constexpr, ORDERED: tl.constexpr, E8M0: tl.constexpr, BLOCK: tl.constexpr, SCALED_SUMS: tl.constexpr,
    HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Programs (row tile, token tile, split). Also the kernel of multi_plane_matmul, with PLANES; ORDERED: tokens sorted by plane through `order`."""
    split = tl.program_id(2)
    rows = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    slots = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    token_mask = slots < n_tokens
    tokens = tl.load(order_ptr + slots, mask=token_mask, other=0) if ORDERED else slots
    plane = tl.zeros((BLOCK_T,), dtype=tl.int32)
    if PLANES:
        plane = load_planes(plane_ptr, tokens, token_mask, n_planes)
    begin = split * columns_a_split
    acc = tile_product(
        x_ptr, codes_ptr, planes_ptr, plane_stride, 0, tokens, token_mask, plane, rows, n_rows, n_columns, n_planes,
        begin, tl.minimum(begin + columns_a_split, n_columns),
        PLANES, POINTERS, E8M0, BLOCK, SCALED_SUMS, COMPUTE, BLOCK_T, BLOCK_O, BLOCK_K,
    )  # fmt: skip
    store_tile(
        acc,
        y_ptr,
        partial_ptr,
        tl.load(tensor_scale_ptr),
        bias_ptr,
        tokens,
        token_mask,
        rows,
        n_tokens,
        n_rows,
        split,
        E8M0,
        HAS_BIAS,
        SPLITS,
    )


def launch(
    x: torch.Tensor,
    codes: torch.Tensor,
    planes: torch.Tensor,
    plane_index: torch.Tensor | None,
    order: torch.Tensor | None,
    tensor_scale: torch.Tensor,
    spec: KernelFormat,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    tile: Tile,
) -> torch.Tensor:
    """Run `fp4_matmul_kernel`. planes: scales [O, G], a stack [M, O, G], or int64 addresses [M] of such planes. Tensors are contiguous here."""
    (n_tokens, n_columns), n_rows = x.shape, codes.shape[0]
    tile = tile.check(spec, x.dtype)
    pointers = planes.dtype == torch.int64
    inputs = x.to(kernel_dtype(x.dtype))
    y = torch.empty((n_tokens, n_rows), dtype=kernel_dtype(out_dtype), device=x.device)
    partial = torch.empty((tile.splits, n_tokens, n_rows), dtype=torch.float32, device=x.device) if tile.splits > 1 else y
    bias_arg = y if bias is None else bias.to(kernel_dtype(bias.dtype))
    steps = triton.cdiv(triton.cdiv(n_columns, tile.columns), tile.splits)
    grid = (triton.cdiv(n_rows, tile.rows), triton.cdiv(n_tokens, tile.tokens), tile.splits)
    if n_tokens and n_rows:
        fp4_matmul_kernel[grid](
            inputs, codes, planes, 0 if pointers else n_rows * (n_columns // spec.block), plane_index, order, y, partial, tensor_scale, bias_arg,
            n_tokens, n_rows, n_columns, planes.shape[0], steps * tile.columns,
            PLANES=plane_index is not None, POINTERS=pointers, ORDERED=order is not None, E8M0=spec.e8m0, BLOCK=spec.block,
            SCALED_SUMS=scales_sums(spec, x.dtype), HAS_BIAS=bias is not None, SPLITS=tile.splits, COMPUTE=triton_dtype(inputs.dtype),
            BLOCK_T=tile.tokens, BLOCK_O=tile.rows, BLOCK_K=tile.columns, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip
        if tile.splits > 1:
            finish_kernel[(triton.cdiv(n_rows, 256), n_tokens)](
                partial, y, tensor_scale, bias_arg, n_tokens, n_rows,
                E8M0=spec.e8m0, HAS_BIAS=bias is not None, SPLITS=tile.splits, BLOCK_O=256, enable_fp_fusion=False,
            )  # fmt: skip
    return y.to(out_dtype)


def triton_dtype(dtype: torch.dtype) -> object:
    """Triton's name of a float dtype."""
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]


@torch.library.custom_op("prism_kernels::fp4_matmul", mutates_args=())
def _fp4_matmul(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    tensor_scale: torch.Tensor,
    format: str,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    tile: Sequence[int],
) -> torch.Tensor:
    if use_triton(x):
        shape = Tile(*tile) if tile else choose_tile(x.shape[0], codes.shape[0], x.shape[1])
        contiguous = None if bias is None else bias.contiguous()
        return launch(
            x.contiguous(),
            codes.contiguous(),
            scales.contiguous(),
            None,
            None,
            tensor_scale,
            kernel_format(format),
            contiguous,
            out_dtype,
            shape,
        )
    return linear_cpu(x, codes, scales, tensor_scale, format, bias).to(out_dtype)


@_fp4_matmul.register_fake
def _(x, codes, scales, tensor_scale, format, bias, out_dtype, tile):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[0], codes.shape[0]), dtype=out_dtype)


def fp4_matmul(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    tensor_scale: torch.Tensor | float = 1.0,
    format: str = "nvfp4",
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """y [T, O] = x [T, I] W' + bias, in `out_dtype` (x's own unless given), accumulated in float32.

    x: bfloat16, float16 or float32. codes: uint8 [O, I/2], even column in the low nibble. scales: uint8 [O, I/block], bytes of the format's grid.
    tensor_scale: a float32 tensor of one element, or a number (which costs a copy to the device). format: "nvfp4" or "mxfp4". bias: float [O].
    tile: a launch shape other than `choose_tile`'s. Raises ValueError for shapes, dtypes and formats that do not fit together; bytes are not checked:
    an illegal scale gives NaN. Without CUDA this is `linear_cpu`, whose weight is rounded to x's dtype with its tensor scale, as QuantTensor.dequantize does.
    """
    require_weight(codes, scales, format)
    require_input(x, codes.shape[1] * 2, bias, (codes.shape[0],))
    dtype = x.dtype if out_dtype is None else out_dtype
    require(dtype in FLOATS, f"out_dtype is {dtype}, expected bfloat16, float16 or float32")
    return _fp4_matmul(x, codes, scales, tensor_scale_of(tensor_scale, x.device), format, bias, dtype, list(astuple(tile)) if tile else [])


def fp4_matmul_ref(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    tensor_scale: torch.Tensor | float = 1.0,
    format: str = "nvfp4",
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The same in plain torch and float32: exact weights, one product, the tensor scale and the bias on its result."""
    y = (x.float() @ decode_weight(codes, scales, format).T) * tensor_scale_of(tensor_scale, x.device)
    return (y if bias is None else y + bias.float()).to(out_dtype or x.dtype)
