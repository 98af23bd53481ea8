# mypy: disable-error-code="no-untyped-def"
"""NVFP4 and MXFP4 for kernels: constants, decoding in plain torch, decoding inside a Triton kernel.

| format | block | scale byte | decode |
|---|---|---|---|
| nvfp4 | 16 | E4M3, 0x00 .. 0x7E | sign 0, 4 exponent bits with bias 7, 3 mantissa bits; byte 0 is 0 |
| mxfp4 | 32 | E8M0, 0 .. 254 | 2^(byte - 127) |

A code is E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and, with bit 3, their negatives; two codes a byte, the even column in the low nibble.
Value = e2m1(code) * decode(scale) * tensor_scale. code * scale has at most six significant bits and is exact in bfloat16, float16 (NVFP4 only) and float32.

Decoding in a kernel moves bits, no table: a code's three magnitude bits, put at the bottom of a bfloat16 exponent, read as value * 2^-126 (0.5 becomes a
subnormal number, which tensor cores and multipliers take at full speed), an E4M3 byte at the same place as scale * 2^-120. In float16 these are 2^-14 and
2^-8. One multiplication a code brings the product back, exactly:

    nvfp4: (code bits) * (scale * 2^118) = value * scale * 2^-8, in float16 (code bits) * (scale * 2^6); the missing 2^8 goes into the tensor scale,
           because 448 * 2^126 is no bfloat16 number.
    mxfp4: (code bits * 2^126) * 2^(byte - 127): two multiplications, since its scales span the whole range of bfloat16.

Bytes that no plane may hold (E4M3: 0x7F and all with a sign; E8M0: 255) decode to NaN in both ways: a corrupt plane shows. Legend: O rows, I columns, G = I / block scale blocks, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from prism_kernels.dispatch import require, tl, triton

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class KernelFormat:
    """What a kernel needs of a format. `illegal_from`: the first scale byte that no plane may hold; all above it are illegal too."""

    name: str
    block: int
    e8m0: bool
    illegal_from: int


FORMATS = {
    "nvfp4": KernelFormat(name="nvfp4", block=16, e8m0=False, illegal_from=0x7F),
    "mxfp4": KernelFormat(name="mxfp4", block=32, e8m0=True, illegal_from=0xFF),
}


def kernel_format(name: str) -> KernelFormat:
    """The format of that name; an unknown one raises ValueError with the known."""
    require(name in FORMATS, f"format '{name}' has no kernel; known: {', '.join(FORMATS)}")
    return FORMATS[name]


@lru_cache(maxsize=16)
def _pairs(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """256 entries: both values of a code byte side by side, viewed as one integer so that one gather moves both."""
    byte = torch.arange(256)
    values = torch.tensor(E2M1_VALUES, dtype=dtype)
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], dim=-1).contiguous()
    return pairs.view(torch.int64 if dtype == torch.float32 else torch.int32).reshape(-1).to(device)


def decode_codes(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """E2M1 values [..., I] of packed codes uint8 [..., I/2]; exact in every float dtype."""
    flat = _pairs(dtype, codes.device).index_select(0, codes.reshape(-1).int())
    return flat.view(dtype).reshape(*codes.shape[:-1], codes.shape[-1] * 2)


@lru_cache(maxsize=8)
def _scale_values(name: str, device: torch.device) -> torch.Tensor:
    byte = torch.arange(256)
    if FORMATS[name].e8m0:
        values = torch.ldexp(torch.ones(256, dtype=torch.float64), byte - 127).to(torch.float32)
    else:
        values = byte.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    values[FORMATS[name].illegal_from :] = torch.nan
    return values.to(device)


def decode_scales(scales: torch.Tensor, format: str) -> torch.Tensor:
    """float32 values of scale bytes uint8, same shape, without the tensor scale."""
    return _scale_values(format, scales.device).index_select(0, scales.reshape(-1).int()).reshape(scales.shape)


def decode_weight(codes: torch.Tensor, scales: torch.Tensor, format: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """code * scale [..., O, I] without the tensor scale: exact in float32 and bfloat16, and in float16 for nvfp4."""
    weight = decode_codes(codes, dtype)
    weight.view(*scales.shape, weight.shape[-1] // scales.shape[-1]).mul_(decode_scales(scales, format).to(dtype).unsqueeze(-1))
    return weight


def tensor_scale_of(value: torch.Tensor | float, device: torch.device, experts: int = 1) -> torch.Tensor:
    """Tensor scale(s) as float32 [experts] on the device; a number or a one-element tensor serves every expert."""
    scale = value.detach().to(device, torch.float32) if isinstance(value, torch.Tensor) else torch.full((1,), value, device=device)
    require(scale.numel() in (1, experts), f"tensor_scale has {scale.numel()} elements, expected 1 or {experts}")
    return scale.reshape(-1).expand(experts).contiguous()


def require_weight(codes: torch.Tensor, scales: torch.Tensor, format: str, *, experts: bool = False) -> None:
    """Raise ValueError unless codes uint8 [(E,) O, I/2] and scales uint8 [(E,) O, I/block] belong together."""
    spec = kernel_format(format)
    require(codes.dtype == torch.uint8 and scales.dtype == torch.uint8, f"planes must be uint8, got {codes.dtype} and {scales.dtype}")
    require(codes.ndim == 2 + experts, f"codes have shape {list(codes.shape)}, expected {'[E, O, I/2]' if experts else '[O, I/2]'}")
    columns = codes.shape[-1] * 2
    require(columns % spec.block == 0, f"{columns} columns do not divide into {format} blocks of {spec.block}")
    expected = [*codes.shape[:-1], columns // spec.block]
    require(list(scales.shape) == expected, f"scales have shape {list(scales.shape)}, codes {list(codes.shape)} need {expected}")


def require_input(x: torch.Tensor, columns: int, bias: torch.Tensor | None, bias_shape: tuple[int, ...]) -> None:
    """Raise ValueError unless x is [T, columns] in a float dtype and the bias, where there is one, has its shape."""
    require(x.dtype in FLOATS, f"x is {x.dtype}, expected bfloat16, float16 or float32")
    require(x.ndim == 2 and x.shape[1] == columns, f"x has shape {list(x.shape)}, expected [T, {columns}]")
    shape = None if bias is None else tuple(bias.shape)
    require(shape in (None, bias_shape), f"bias has shape {list(shape or ())}, expected {list(bias_shape)}")


@triton.jit
def e2m1_bits(packed, COMPUTE: tl.constexpr):
    """uint8 [R, C] of packed codes -> COMPUTE [R, 2C], columns in order: value * 2^-126, or value * 2^-14 in float16.

    A byte becomes one 32-bit word with the even column in its lower half, as the tensor cores' operands hold two neighbours: one set of shifts serves both.
    """
    word = packed.to(tl.uint32) * 0x1001
    if COMPUTE == tl.float16:  # noqa: SIM108, SIM300
        word = ((word << 12) & 0x80008000) | ((word << 9) & 0x0E000E00)
    else:
        word = ((word << 12) & 0x80008000) | ((word << 6) & 0x01C001C0)
    if COMPUTE == tl.float32:  # noqa: SIM300
        pairs = tl.join(word << 16, word & 0xFFFF0000)
    else:
        pairs = tl.join((word & 0xFFFF).to(tl.uint16), (word >> 16).to(tl.uint16))
    return tl.reshape(pairs.to(COMPUTE, bitcast=True), (packed.shape[0], packed.shape[1] * 2))


@triton.jit
def e2m1_values(packed, COMPUTE: tl.constexpr):
    """uint8 [R, C] of packed codes -> their values [R, 2C] in COMPUTE."""
    bits = e2m1_bits(packed, COMPUTE)
    return bits * 16384.0 if COMPUTE == tl.float16 else bits * 8.507059173023462e37  # noqa: SIM300


@triton.jit
def e8m0_scale(byte):
    """uint8 -> float32 2^(byte - 127); byte 0 is a subnormal number, 255 NaN."""
    bits = byte.to(tl.uint32)
    bits = tl.where(bits == 0, 0x00400000, bits << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_factor(byte, COMPUTE: tl.constexpr):
    """uint8 -> what `e2m1_bits` is multiplied with, in COMPUTE: scale * 2^118, or scale * 2^6 in float16; NaN for bytes that no plane may hold."""
    if COMPUTE == tl.float16:  # noqa: SIM300
        factor = (byte.to(tl.uint16) << 7).to(tl.float16, bitcast=True) * 16384.0
    else:
        # scale * 2^-120, and 2^238 is no float32 number: two exact steps.
        factor = (byte.to(tl.uint32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36 * 3.32306998946229e35
    return tl.where(byte >= 0x7F, float("nan"), factor).to(COMPUTE)


@triton.jit
def decode_tile(packed, scale_bytes, E8M0: tl.constexpr, BLOCK: tl.constexpr, COMPUTE: tl.constexpr):
    """Codes uint8 [R, C] and scale bytes uint8 [R, 2C / BLOCK] -> value * scale [R, 2C] in COMPUTE, times 2^-8 for nvfp4 (see `output_factor`)."""
    ROWS: tl.constexpr = packed.shape[0]
    COLUMNS: tl.constexpr = packed.shape[1] * 2
    if E8M0:
        values = e2m1_values(packed, COMPUTE)
        factor = e8m0_scale(scale_bytes).to(COMPUTE)
    else:
        values = e2m1_bits(packed, COMPUTE)
        factor = e4m3_factor(scale_bytes, COMPUTE)
    return tl.reshape(tl.reshape(values, (ROWS, COLUMNS // BLOCK, BLOCK)) * factor[:, :, None], (ROWS, COLUMNS))


@triton.jit
def output_factor(tensor_scale, E8M0: tl.constexpr):
    """What a sum over `decode_tile` is multiplied with."""
    return tensor_scale if E8M0 else tensor_scale * 256.0
