"""Scale-QLoRA's forward and backward: `qast_scales`, the effective scales on the grid, and `scale_linear`, the linear that trains them.

    s = grid(clip(s0 * (1 + scaling * B A), s_min, s_max)),  0 where s0 is;   inside = whether the clip left the scale alone
    y = x W' + bias,  W = tensor_scale * e2m1(codes) * s
    dA = scaling * B' (s0 * dL/ds * inside),    dB = scaling * (s0 * dL/ds * inside) A'          (straight through the rounding)

*Bytes.* B A, and what follows up to the clip, is float64; the clipped number is rounded to float32 and then to the grid, to nearest with ties to even on E4M3,
in the log2 domain on E8M0: the operations of prism_ray.adapters.qast one by one. Two orders of a float64 sum of r products differ by at most r 2^-52 of the sum
of their magnitudes, so two devices give different bytes only where a scale lies that close to a boundary between two bytes: at r = 64 and magnitudes
of order one, about one block in 10^12. Where the products are exact (B = 0 at the start) there is no difference at all. A float32 product would need its
error bound, and this product for the blocks near a boundary; r multiplications a block are a share of r / (block * tokens) of the layer's.

*Memory.* Between forward and backward `scale_linear` holds x, A, B and two bytes a block (s and inside); a call's own extra memory is a few planes [O, G]:
neither W nor its gradient is ever written (prism_kernels.scale_gradient).

On CUDA tensors a Triton kernel makes the scales, on others torch by chunks of rows. Legend: E experts, O rows, I columns, G = I / block scale blocks,
T tokens, r rank.
"""

from __future__ import annotations

import struct
from typing import Any

import torch

from prism_kernels.dispatch import kernel_dtype, require, tl, triton, use_triton
from prism_kernels.formats import KernelFormat, decode_scales, e8m0_scale, kernel_format, require_weight, tensor_scale_of
from prism_kernels.matmul import fp4_matmul
from prism_kernels.scale_gradient import CHUNK_BYTES, grad_input, scale_grad

LOG2_TIE = 0x3504F3
"""Mantissa bits of float32 sqrt(2), below the real one: a float32 at or below it is nearer, in log2, to the power of two below."""
QAST_TILE = (32, 64)
"""Rows and scale blocks of a program."""


@triton.jit
def e4m3_scale(byte):
    """uint8 -> float32 value of an E4M3 byte; NaN for those that no plane may hold."""
    # The byte at the place of a bfloat16's exponent and mantissa reads as scale * 2^-120.
    value = (byte.to(tl.uint32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where(byte >= 0x7F, float("nan"), value)


@triton.jit
def encode_e4m3(value):
    """Nearest E4M3 byte, ties to even, of float32 values in 0 .. 448; 0x7F for NaN."""
    bits = value.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # Below 2^-6 the grid is the multiples of 2^-9, which is float32's spacing at 2^14: the addition rounds.
    subnormal = (value + 16384.0).to(tl.uint32, bitcast=True) & 0xF
    byte = tl.where(value < 0.015625, subnormal, normal)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7F, byte).to(tl.uint8)


@triton.jit
def encode_e8m0(value):
    """Byte of the power of two nearest in log2 to float32 values in 2^-127 .. 2^127; 255 for NaN."""
    bits = value.to(tl.uint32, bitcast=True)
    normal = (bits >> 23) + ((bits & 0x7FFFFF) > 0x3504F3).to(tl.uint32)
    # 2^-127 .. 2^-126 are float32's subnormal numbers, whose leading bit is bit 22.
    byte = tl.where(bits < 0x800000, (bits > 0x5A8279).to(tl.uint32), normal)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 255, byte).to(tl.uint8)


@triton.jit
def qast_kernel(
    base_ptr, a_ptr, b_ptr, out_ptr, inside_ptr, scaling_bits, n_rows, n_blocks, rank,
    E8M0: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Programs (block tile, row tile, expert). scaling_bits: the bits of the float64 `scaling`, since a float argument would be cut to float32."""
    expert = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    blocks = tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G)
    row_mask = rows < n_rows
    block_mask = blocks < n_blocks
    a_row = a_ptr + expert * rank * n_blocks + blocks
    b_rows = b_ptr + (expert * n_rows + rows) * rank
    delta = tl.zeros((BLOCK_O, BLOCK_G), dtype=tl.float64)
    for k in range(rank):
        b = tl.load(b_rows + k, mask=row_mask, other=0.0).to(tl.float64)
        a = tl.load(a_row + k * n_blocks, mask=block_mask, other=0.0).to(tl.float64)
        delta += b[:, None] * a[None, :]
    place = (expert * n_rows + rows)[:, None] * n_blocks + blocks[None, :]
    mask = row_mask[:, None] & block_mask[None, :]
    base_byte = tl.load(base_ptr + place, mask=mask, other=0)
    base = (e8m0_scale(base_byte) if E8M0 else e4m3_scale(base_byte)).to(tl.float64)
    raw = (delta * scaling_bits.to(tl.int64).to(tl.float64, bitcast=True) + 1.0) * base
    smallest: tl.constexpr = 2.0**-127 if E8M0 else 2.0**-9
    largest: tl.constexpr = 2.0**127 if E8M0 else 448.0
    clipped = tl.where(raw < smallest, smallest, tl.where(raw > largest, largest, raw))  # NaN fails both and stays
    scale = tl.where(base == 0.0, 0.0, clipped).to(tl.float32)
    byte = encode_e8m0(scale) if E8M0 else encode_e4m3(scale)
    tl.store(out_ptr + place, byte, mask=mask)
    tl.store(inside_ptr + place, (clipped == raw).to(tl.uint8), mask=mask)


def _rounded(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, spec: KernelFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes, inside) of one weight [O, G], in plain torch."""
    decoded = decode_scales(base, spec.name)
    raw = (b.to(torch.float64) @ a.to(torch.float64)).mul_(scaling).add_(1.0).mul_(decoded)
    smallest, largest = (2.0**-127, 2.0**127) if spec.e8m0 else (2.0**-9, 448.0)
    clipped = raw.clamp(smallest, largest)
    scale = clipped.to(torch.float32).masked_fill_(decoded == 0, 0.0)
    if not spec.e8m0:
        return scale.to(torch.float8_e4m3fn).view(torch.uint8), clipped == raw
    bits = scale.view(torch.int32)
    normal = (bits >> 23) + ((bits & 0x7FFFFF) > LOG2_TIE).to(torch.int32)
    data = torch.where(bits < 0x800000, (bits > (0x800000 | LOG2_TIE) >> 1).to(torch.int32), normal)
    return data.to(torch.uint8).masked_fill_(torch.isnan(scale), 255), clipped == raw


def qast_scales_ref(
    base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, format: str = "nvfp4"
) -> tuple[torch.Tensor, torch.Tensor]:
    """`qast_scales` in plain torch, all rows at once."""
    spec = kernel_format(format)
    if base.ndim == 2:
        return _rounded(base, a, b, scaling, spec)
    parts = [_rounded(base[e], a[e], b[e], scaling, spec) for e in range(base.shape[0])]
    return torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts])


@torch.library.custom_op("prism_kernels::qast_scales", mutates_args=())
def _qast_scales(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    spec = kernel_format(format)
    out = torch.empty_like(base, memory_format=torch.contiguous_format)
    inside = torch.empty_like(out, dtype=torch.bool)
    experts, (n_rows, n_blocks), rank = (base.shape[0] if base.ndim == 3 else 1), base.shape[-2:], a.shape[-2]
    if not base.numel():
        return out, inside
    if not use_triton(base):
        step = max(1, CHUNK_BYTES // (8 * n_blocks))
        for planes in zip(*(tensor.view(experts, *tensor.shape[-2:]) for tensor in (out, inside, base.contiguous(), a, b)), strict=True):
            for start in range(0, n_rows, step):
                part = slice(start, start + step)
                planes[0][part], planes[1][part] = _rounded(planes[2][part], planes[3], planes[4][part], scaling, spec)
        return out, inside
    grid = (triton.cdiv(n_blocks, QAST_TILE[1]), triton.cdiv(n_rows, QAST_TILE[0]), experts)
    qast_kernel[grid](
        base.contiguous(), a.to(kernel_dtype(a.dtype)).contiguous(), b.to(kernel_dtype(b.dtype)).contiguous(), out, inside.view(torch.uint8),
        struct.unpack("<q", struct.pack("<d", scaling))[0], n_rows, n_blocks, rank,
        E8M0=spec.e8m0, BLOCK_O=QAST_TILE[0], BLOCK_G=QAST_TILE[1], enable_fp_fusion=False,
    )  # fmt: skip
    return out, inside


@_qast_scales.register_fake
def _(base, a, b, scaling, format):  # type: ignore[no-untyped-def]
    return base.new_empty(base.shape), base.new_empty(base.shape, dtype=torch.bool)


def qast_scales(
    base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, format: str = "nvfp4"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale bytes uint8, inside bool), both [O, G], or [E, O, G] for experts.

    base: scale bytes uint8 [(E,) O, G] of the base. a: float [(E,) r, G]. b: float [(E,) O, r]. scaling: alpha / r. format: "nvfp4" or "mxfp4". A block of
    base scale 0 stays 0; NaN factors give an illegal byte. Raises ValueError for shapes, dtypes and formats that do not fit together. Not differentiable:
    `scale_linear` is.
    """
    kernel_format(format)
    require(base.dtype == torch.uint8, f"base scales are {base.dtype}, expected uint8")
    require(base.ndim in (2, 3), f"base scales have shape {list(base.shape)}, expected [O, G] or [E, O, G]")
    fits = a.ndim == b.ndim == base.ndim and a.shape[-2] == b.shape[-1] and (*b.shape[:-1], a.shape[-1]) == tuple(base.shape)
    require(
        fits and a.shape[:-2] == base.shape[:-2], f"A {list(a.shape)} and B {list(b.shape)} do not make a correction of {list(base.shape)}"
    )
    require(a.is_floating_point() and b.is_floating_point(), f"factors are {a.dtype} and {b.dtype}, expected floats")
    return _qast_scales(base, a.detach(), b.detach(), float(scaling), format)


def straight_through(
    grad_scale: torch.Tensor, base: torch.Tensor, inside: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, format: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dA [r, G], dB [O, r]) from dL/ds float32 [O, G]: the rounding passes the gradient, the clip stops it where `inside` is false."""
    grad = decode_scales(base, format).mul_(grad_scale).mul_(inside)
    return (b.to(torch.float32).T @ grad).mul_(scaling).to(a.dtype), (grad @ a.to(torch.float32).T).mul_(scaling).to(b.dtype)


class ScaleLinear(torch.autograd.Function):
    """`scale_linear` of x [T, I]; gradients for x, A, B and the bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        codes: torch.Tensor,
        base: torch.Tensor,
        tensor_scale: torch.Tensor,
        scaling: float,
        format: str,
    ) -> torch.Tensor:
        scales, inside = qast_scales(base, a, b, scaling, format)
        ctx.save_for_backward(x, a, b, codes, base, tensor_scale, scales, inside)
        ctx.scaling, ctx.format = scaling, format
        ctx.bias_dtype = None if bias is None else bias.dtype
        return fp4_matmul(x, codes, scales, tensor_scale, format, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, a, b, codes, base, tensor_scale, scales, inside = ctx.saved_tensors
        dy = grads[0].contiguous()
        grad_x = grad_a = grad_b = grad_bias = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            grad_scale = scale_grad(dy, x, codes, tensor_scale, ctx.format)
            grad_a, grad_b = straight_through(grad_scale, base, inside, a, b, ctx.scaling, ctx.format)
        if ctx.needs_input_grad[3]:
            grad_bias = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        if ctx.needs_input_grad[0]:
            grad_x = grad_input(dy, codes, scales, tensor_scale, ctx.format)
        return grad_x, grad_a, grad_b, grad_bias, None, None, None, None, None


def scale_linear(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    codes: torch.Tensor,
    base: torch.Tensor,
    tensor_scale: torch.Tensor | float = 1.0,
    scaling: float = 1.0,
    format: str = "nvfp4",
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """y [..., O] of a Scale-QLoRA linear, differentiable in x, A, B and the bias.

    x: [..., I] bfloat16, float16 or float32. a: float [r, G], b: float [O, r], usually float32 parameters. codes: uint8 [O, I/2], base: uint8 [O, G], frozen.
    tensor_scale: float32 of one element, or a number. Raises ValueError for shapes, dtypes and formats that do not fit together.
    """
    require_weight(codes, base, format)
    require(x.shape[-1] == codes.shape[1] * 2, f"x has shape {list(x.shape)}, expected [..., {codes.shape[1] * 2}]")
    factor = tensor_scale_of(tensor_scale, x.device)
    y = ScaleLinear.apply(x.reshape(-1, x.shape[-1]), a, b, bias, codes, base, factor, float(scaling), format)
    return y.view(*x.shape[:-1], codes.shape[0])  # type: ignore[no-any-return, unused-ignore]
