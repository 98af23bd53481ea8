"""Fake quantization of a whole weight W = W0 + scaling * B A onto its native grid, as QAT-LoRA does in every forward pass.

    scale byte = grid.encode_amax(max |W_block| / t, rule),    s = decode(byte),    W' = e2m1(W / (s t)) * s * t

W0 [O, I] is the dequantized base, t its stored tensor scale: weights that are served as one matrix share t (field case FMT-05), so it is not derived again.
This is `quantizers.rtn` under that t, to the byte; a block whose scale is zero becomes zero.

Rounding to E2M1 is bit arithmetic on float32, without a table: let p be the power of two at or below |x|, at least 1 (the exponent bits of x, clamped). E2M1's step
there is p / 2. Adding and subtracting m = 1.5 * 2^22 * p, whose last bit is worth p / 2, rounds x to that step; the processor's own rounding sends ties to even multiples, which
are the even codes. Then clamp to 6. Six passes over the data, each one vector instruction.

A weight is worked on in pieces of rows that stay in a core's cache, so those passes, the gather of the codes and the product with A read memory once.
The merge runs over the same pieces: the sums of B A, hence all bytes, are those of the forward pass (on one machine: a product's last bit depends on the processor).

Legend: O rows, I columns, G blocks a row, r rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from prism_ray.adapters.scale_qlora.layer import Planes
from prism_ray.formats import e2m1
from prism_ray.formats.spec import FormatSpec
from prism_ray.formats.tensor import dequantize

PIECE = 1 << 19
"""Weights worked on at once on a CPU: 2 MiB of float32; smaller pieces cost more in calls than they save in memory traffic."""
_MAGNITUDE, _EXPONENT, _ONE = 0x7FFFFFFF, 0x7F800000, 0x3F800000
_MAGIC = 1.5 * 2.0**22


def round_e2m1_(x: Tensor) -> Tensor:
    """Nearest E2M1 values of float32 `x`, in place; the same as decode(round_to_codes(x)) up to the sign of zero. NaN and infinity become NaN."""
    magic = x.view(torch.int32).bitwise_and(_EXPONENT).clamp_(min=_ONE).view(torch.float32).mul_(_MAGIC)
    return x.add_(magic).sub_(magic).clamp_(-e2m1.MAX, e2m1.MAX)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Rows `start` .. of a weight before its rounding: quotients [o, G, B] float32 W / (s t), scale bytes uint8 [o, G], decoded scales [o, G]."""

    start: int
    quotients: Tensor
    data: Tensor
    scale: Tensor


def pieces(planes: Planes, a: Tensor, b: Tensor, scaling: float, rule: str | None = None) -> Iterator[Piece]:
    """W0 + scaling * B A in pieces of rows, with the scales that `rule` gives; default, and for a grid without it, the format's. a: float32 [r, I]; b: float32 [O, r]."""
    spec: FormatSpec = planes.format
    factor, codes, held = planes.factor, planes.code_bytes, planes.scales
    rule = rule if rule in spec.grid.amax_rules else spec.amax_rule
    rows = max(1, PIECE // planes.in_features) if codes.device.type == "cpu" else planes.out_features
    for start in range(0, planes.out_features, rows):
        stop = start + rows
        weight = dequantize(codes[start:stop], spec.codes, spec.grid.decode(held[start:stop]), factor, torch.float32)
        weight.addmm_(b[start:stop], a, alpha=scaling)
        blocks = weight.view(weight.shape[0], -1, spec.block)
        # Magnitudes in the order of their bits: torch reduces integers over short rows several times faster than floats, and NaN stays NaN.
        amax = blocks.view(torch.int32).bitwise_and(_MAGNITUDE).amax(-1).view(torch.float32)
        data = spec.grid.encode_amax(amax.div_(factor), rule, spec.codes.largest)
        scale = spec.grid.decode(data)
        step = scale * factor
        # Divided, not multiplied by a reciprocal: a tie must go the way that rounding to nearest sends it.
        blocks.div_(torch.where(step == 0, torch.inf, step).unsqueeze(-1))
        yield Piece(start=start, quotients=blocks, data=data, scale=scale)


def fake_quantize(planes: Planes, a: Tensor, b: Tensor, scaling: float, dtype: torch.dtype, rule: str | None = None) -> Tensor:
    """W' [O, I] in float32 or bfloat16: what `requantized` dequantizes to, bit for bit (the sign of zero apart)."""
    out = torch.empty(planes.out_features, planes.in_features, dtype=dtype, device=planes.scales.device)
    factor = planes.factor
    for piece in pieces(planes, a, b, scaling, rule):
        # code * scale is exact; the tensor scale rounds it, once.
        values = round_e2m1_(piece.quotients).mul_(piece.scale.unsqueeze(-1)).flatten(-2)
        part = out[piece.start : piece.start + values.shape[0]]
        part.copy_(values if factor == 1.0 else values.mul_(factor))
    return out


def requantized(planes: Planes, a: Tensor, b: Tensor, scaling: float, rule: str | None = None) -> tuple[Tensor, Tensor]:
    """(codes uint8 [O, I/2], scale bytes uint8 [O, G]): what the forward pass computes with, for a merge. NaN raises FormatError."""
    codes, data = zip(
        *(
            (e2m1.pack(e2m1.round_to_codes(piece.quotients).flatten(-2)), piece.data)
            for piece in pieces(planes, a.detach(), b.detach(), scaling, rule)
        ),
        strict=True,
    )
    return torch.cat(codes), torch.cat(data)
