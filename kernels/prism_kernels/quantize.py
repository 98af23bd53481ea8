"""quantize_rtn: a weight to codes and scale bytes by rounding to nearest, bit for bit as prism_ray.quantizers.rtn.

    divisor = 448 * 6 / amax of the tensor (nvfp4; 1 where that or its reciprocal is not finite), tensor_scale = 1 / divisor;  mxfp4: tensor_scale = 1
    byte = grid(amax of the block / tensor_scale),   step = decode(byte) * tensor_scale,   code = nearest E2M1 of w / step, ties to even

All in float32, divisions correctly rounded: a product with a reciprocal would send ties another way. Rules for the byte:

| format | rule | byte |
|---|---|---|
| nvfp4 | nearest (default) | nearest E4M3, ties to even, of amax / 6, clamped to 448 |
| mxfp4 | even (default) | 2^(e - 2) for amax = m 2^e, 1 <= m < 2; one more where m >= 1.75 |
| mxfp4 | floor | 2^(e - 2) |
| mxfp4 | ceil | the smallest power of two with amax / scale <= 6 |

Degenerate blocks: a block whose scale byte decodes to 0 has all codes 0 (a zero scale is never a divisor); elsewhere the sign of a zero is kept, code 8. Bytes
that no plane may hold are never written. NaN and infinity are refused, which on a GPU waits for the device.

One pass over the weight for the tensor's maximum, one for the rest. Legend: E experts, O rows, I columns, G = I / block scale blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from prism_kernels.dispatch import kernel_dtype, require, tl, triton, use_triton
from prism_kernels.formats import FLOATS, KernelFormat, decode_scales, e8m0_scale, kernel_format
from prism_kernels.qast import e4m3_scale, encode_e4m3
from prism_kernels.scale_gradient import CHUNK_BYTES

RULES = {"nvfp4": ("nearest",), "mxfp4": ("even", "floor", "ceil")}
"""Names of the scale rules, the default first."""
ROUND_UP_FROM = {"nearest": 0, "even": 0x600000, "floor": 0x800000, "ceil": 0x400001}
"""Float32 mantissa bits of a block maximum at which an E8M0 rule takes the next power of two; 0x800000 is never reached."""
MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
"""Between which E2M1 magnitudes, and whether the tie goes up: to the even code."""


class RtnTile(NamedTuple):
    """Launch shape: rows x columns of a program; warps."""

    rows: int
    columns: int
    warps: int = 4


RTN_TILES = (RtnTile(16, 128), RtnTile(32, 128), RtnTile(16, 256, 8))


class RtnPlanes(NamedTuple):
    """codes uint8 [(E,) O, I/2]; scales uint8 [(E,) O, G]; tensor_scale float32 [] or [E]; divisor: its reciprocal as a checkpoint stores it, None for mxfp4."""

    codes: torch.Tensor
    scales: torch.Tensor
    tensor_scale: torch.Tensor
    divisor: torch.Tensor | None


@triton.jit
def e2m1_magnitude(magnitude):
    """float32 >= 0 -> int32 0 .. 7, the nearest E2M1 code, ties to even, above 6 the code of 6."""
    code = (magnitude > 0.25).to(tl.int32) + (magnitude >= 0.75).to(tl.int32) + (magnitude > 1.25).to(tl.int32)
    code += (magnitude >= 1.75).to(tl.int32) + (magnitude > 2.5).to(tl.int32) + (magnitude >= 3.5).to(tl.int32)
    return code + (magnitude > 5.0).to(tl.int32)


@triton.jit
def rtn_kernel(
    weight_ptr, tensor_scale_ptr, codes_ptr, scales_ptr, n_rows, n_columns,
    E8M0: tl.constexpr, BLOCK: tl.constexpr, UP_FROM: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Programs (column tile, row tile, expert)."""
    expert = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    columns = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    blocks = tl.program_id(0) * (BLOCK_I // BLOCK) + tl.arange(0, BLOCK_I // BLOCK)
    pairs = tl.program_id(0) * (BLOCK_I // 2) + tl.arange(0, BLOCK_I // 2)
    row_mask = (rows < n_rows)[:, None]
    place = (expert * n_rows + rows)[:, None]
    weight = tl.load(weight_ptr + place * n_columns + columns[None, :], mask=row_mask & (columns < n_columns)[None, :], other=0.0).to(
        tl.float32
    )
    values = tl.reshape(weight, (BLOCK_O, BLOCK_I // BLOCK, BLOCK))
    tensor_scale = tl.load(tensor_scale_ptr + expert)
    amax = tl.div_rn(tl.max(tl.abs(values), axis=2), tl.zeros((BLOCK_O, BLOCK_I // BLOCK), dtype=tl.float32) + tensor_scale)
    if E8M0:
        bits = amax.to(tl.int32, bitcast=True)
        # The byte of 2^(e - 2) is e's own less 2; subnormal maxima end at byte 0 under every rule.
        byte = tl.maximum((bits >> 23) - 2 + ((bits & 0x7FFFFF) >= UP_FROM).to(tl.int32), 0).to(tl.uint8)
        scale = e8m0_scale(byte)
    else:
        byte = encode_e4m3(tl.minimum(tl.div_rn(amax, tl.full((BLOCK_O, BLOCK_I // BLOCK), 6.0, dtype=tl.float32)), 448.0))
        scale = e4m3_scale(byte)
    tl.store(scales_ptr + place * (n_columns // BLOCK) + blocks[None, :], byte, mask=row_mask & (blocks < n_columns // BLOCK)[None, :])
    step = tl.broadcast_to((scale * tensor_scale)[:, :, None], (BLOCK_O, BLOCK_I // BLOCK, BLOCK))
    usable = step > 0.0
    quotient = tl.div_rn(values, tl.where(usable, step, 1.0))
    sign = (quotient.to(tl.uint32, bitcast=True) >> 28) & 8
    code = tl.where(usable, e2m1_magnitude(tl.abs(quotient)) | sign.to(tl.int32), 0).to(tl.uint8)
    low, high = tl.split(tl.reshape(code, (BLOCK_O, BLOCK_I // 2, 2)))
    tl.store(codes_ptr + place * (n_columns // 2) + pairs[None, :], low | (high << 4), mask=row_mask & (pairs < n_columns // 2)[None, :])


def _quantize_rows(
    weight: torch.Tensor, tensor_scale: torch.Tensor, spec: KernelFormat, rule: str, codes: torch.Tensor, scales: torch.Tensor
) -> None:
    """Rows [R, I] of one weight into their planes, in plain torch."""
    blocks = weight.to(torch.float32).unflatten(-1, (-1, spec.block))
    amax = blocks.abs().amax(dim=-1) / tensor_scale
    if spec.e8m0:
        bits = amax.view(torch.int32)
        scales.copy_(((bits >> 23) - 2 + ((bits & 0x7FFFFF) >= ROUND_UP_FROM[rule]).to(torch.int32)).clamp_(min=0))
    else:
        scales.copy_((amax / 6.0).clamp_(max=448.0).to(torch.float8_e4m3fn).view(torch.uint8))
    step = (decode_scales(scales, spec.name) * tensor_scale).unsqueeze(-1)
    usable = step > 0
    quotient = blocks / torch.where(usable, step, 1.0)
    magnitude = quotient.abs()
    code = torch.zeros_like(quotient, dtype=torch.uint8)
    for middle, up in MIDPOINTS:
        code += (magnitude >= middle) if up else (magnitude > middle)
    code |= torch.signbit(quotient).to(torch.uint8) << 3
    flat = code.mul_(usable).flatten(-2)
    torch.bitwise_or(flat[:, 0::2], flat[:, 1::2] << 4, out=codes)


@torch.library.custom_op("prism_kernels::quantize_rtn", mutates_args=())
def _quantize_rtn(
    weight: torch.Tensor, tensor_scale: torch.Tensor, format: str, rule: str, tile: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    spec = kernel_format(format)
    experts, n_rows, n_columns = weight.shape
    codes = torch.empty(experts, n_rows, n_columns // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(experts, n_rows, n_columns // spec.block, dtype=torch.uint8, device=weight.device)
    if not weight.numel():
        return codes, scales
    if not use_triton(weight):
        step = max(1, CHUNK_BYTES // (4 * n_columns))
        for e in range(experts):
            for start in range(0, n_rows, step):
                part = slice(start, start + step)
                _quantize_rows(weight[e, part], tensor_scale[e], spec, rule, codes[e, part], scales[e, part])
        return codes, scales
    shape = RtnTile(*tile) if tile else RTN_TILES[0]
    grid = (triton.cdiv(n_columns, shape.columns), triton.cdiv(n_rows, shape.rows), experts)
    rtn_kernel[grid](
        weight.to(kernel_dtype(weight.dtype)).contiguous(), tensor_scale, codes, scales, n_rows, n_columns,
        E8M0=spec.e8m0, BLOCK=spec.block, UP_FROM=ROUND_UP_FROM[rule], BLOCK_O=shape.rows, BLOCK_I=shape.columns,
        num_warps=shape.warps, enable_fp_fusion=False,
    )  # fmt: skip
    return codes, scales


@_quantize_rtn.register_fake
def _(weight, tensor_scale, format, rule, tile):  # type: ignore[no-untyped-def]
    lead, columns = weight.shape[:-1], weight.shape[-1]
    block = kernel_format(format).block
    return weight.new_empty((*lead, columns // 2), dtype=torch.uint8), weight.new_empty((*lead, columns // block), dtype=torch.uint8)


def tensor_scale_for(amax: torch.Tensor, format: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(tensor_scale, divisor), float32 of the shape of `amax`; 1 where amax is 0 or its reciprocal leaves float32, and for mxfp4, whose divisor is None."""
    if kernel_format(format).e8m0:
        return torch.ones_like(amax, dtype=torch.float32), None
    divisor = 2688.0 / amax.to(torch.float32)
    divisor = torch.where(torch.isfinite(divisor) & torch.isfinite(1.0 / divisor), divisor, torch.ones_like(divisor))
    return 1.0 / divisor, divisor


def _prepared(
    weight: torch.Tensor, format: str, scale_rule: str | None, amax: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, str]:
    """(weight [E, O, I], tensor_scale [E], divisor [E], rule) of checked arguments."""
    spec = kernel_format(format)
    rule = scale_rule or RULES[format][0]
    require(rule in RULES[format], f"{format} has no scale rule '{rule}'; known: {', '.join(RULES[format])}")
    require(weight.dtype in FLOATS, f"weight is {weight.dtype}, expected bfloat16, float16 or float32")
    require(weight.ndim in (2, 3), f"weights have 2 or 3 dimensions, got {weight.ndim}")
    require(weight.shape[-1] % spec.block == 0, f"{weight.shape[-1]} columns do not divide into {format} blocks of {spec.block}")
    held = weight.detach() if weight.ndim == 3 else weight.detach()[None]
    own = torch.zeros(held.shape[0], dtype=torch.float32, device=weight.device)
    if held.numel():
        low, high = torch.aminmax(held.reshape(held.shape[0], -1), dim=1)
        own = torch.maximum(-low.to(torch.float32), high.to(torch.float32))  # NaN wins both, and infinities show
    require(bool(torch.isfinite(own).all()), "weight holds NaN or infinity; repair the source checkpoint")
    if amax is not None:
        given = amax.to(own).reshape(-1)
        fits = amax.shape == weight.shape[:-2] and bool((given >= own).all())
        require(fits, f"the given maximum {amax.tolist()} does not bound the weight's own, {own.tolist()}")
        own = given
    tensor_scale, divisor = tensor_scale_for(own, format)
    return held, tensor_scale, divisor, rule


def quantize_rtn(
    weight: torch.Tensor,
    format: str = "nvfp4",
    *,
    scale_rule: str | None = None,
    amax: torch.Tensor | None = None,
    tile: RtnTile | None = None,
) -> RtnPlanes:
    """Planes of a weight [O, I] or [E, O, I] (bfloat16, float16, float32), each expert with a tensor scale of its own.

    scale_rule: of RULES[format], the first unless given. amax: float [] or [E], the maximum that the tensor scale is made for, at or above the weight's own; weights that
    are fused when served get their group's. tile: a launch shape of RTN_TILES. Raises ValueError for NaN or infinite values, columns that do not divide into blocks, and
    dtypes, shapes, formats and rules that do not fit.
    """
    held, tensor_scale, divisor, rule = _prepared(weight, format, scale_rule, amax)
    codes, scales = _quantize_rtn(held, tensor_scale, format, rule, [] if tile is None else list(tile))
    lead = weight.shape[:-2]
    return RtnPlanes(
        codes.view(*weight.shape[:-1], codes.shape[-1]),
        scales.view(*weight.shape[:-1], scales.shape[-1]),
        tensor_scale.reshape(lead),
        None if divisor is None else divisor.reshape(lead),
    )


def quantize_rtn_ref(
    weight: torch.Tensor, format: str = "nvfp4", *, scale_rule: str | None = None, amax: torch.Tensor | None = None
) -> RtnPlanes:
    """`quantize_rtn` in plain torch, all rows of an expert at once."""
    held, tensor_scale, divisor, rule = _prepared(weight, format, scale_rule, amax)
    spec = kernel_format(format)
    codes = torch.empty(*held.shape[:-1], held.shape[-1] // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(*held.shape[:-1], held.shape[-1] // spec.block, dtype=torch.uint8, device=weight.device)
    for e in range(held.shape[0]):
        _quantize_rows(held[e], tensor_scale[e], spec, rule, codes[e], scales[e])
    lead = weight.shape[:-2]
    shaped = tuple(plane.view(*weight.shape[:-1], plane.shape[-1]) for plane in (codes, scales))
    return RtnPlanes(shaped[0], shaped[1], tensor_scale.reshape(lead), None if divisor is None else divisor.reshape(lead))
