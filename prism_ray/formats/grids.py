"""Scale grids: which block scales can be stored, and how a real number is rounded onto them.

| grid | bytes | values | largest | smallest positive |
|---|---|---|---|---|
| E4M3 (OCP FP8, `float8_e4m3fn`) | 1: sign, 4 exponent, 3 mantissa | 0 and 126 positive finite ones | 448 | 2^-9 |
| E8M0 (OCP MX) | 1: 8 exponent bits, bias 127 | 2^-127 .. 2^127 | 2^127 | 2^-127 |
| BF16 (of the integer formats) | 2: sign, 8 exponent, 7 mantissa, little-endian | 0 and the positive finite ones | 255 * 2^120 | 2^-133 |

A scale plane is uint8 [..., O, G * width], `width` bytes a scale: `encode` multiplies the last dimension by the width, `decode` and `illegal` divide it.

E4M3 has no infinity, so a cast above 464 would give NaN (0x7F): every encoder clamps first, and no NaN byte (0x7F, 0xFF; 255 in E8M0; an
infinity in BF16) is ever written (field cases FMT-03, FMT-04). Negative scales are illegal in all.

Two different questions are asked of a grid:

- `encode`: the byte nearest to a real scale. E4M3, BF16: round to nearest, ties to even. E8M0: nearest in the log2 domain. This is the rounding of
  Scale-QLoRA's QAST and of its merge (scale-qlora §3).
- `encode_amax`: the byte for a block whose largest magnitude is known, for codes whose `largest` is given. `nearest` is encode(amax / largest). For E8M0 three defensible rules exist and differ by a byte on most
  blocks, so the rule has a name that goes into the manifest: `floor` (OCP MX v1.0 §6.3: 2^(floor(log2 amax) - 2)), `even` (amax rounded
  to the nearest power of two at one mantissa bit more than E2M1 holds: 1.75 goes up), `ceil` (smallest power of two with amax / scale <= 6).
"""

from __future__ import annotations

import math
from typing import Literal, Protocol

import torch

from prism_ray.core.errors import FormatError, UnknownName
from prism_ray.formats import e2m1

AmaxRule = Literal["nearest", "floor", "even", "ceil"]


class ScaleGrid(Protocol):
    """What formats, quantizers and adapters need of a scale grid; bytes are uint8, values float32. width: bytes of a scale."""

    name: str
    width: int
    largest: float
    smallest: float
    amax_rules: tuple[str, ...]

    def encode(self, scale: torch.Tensor) -> torch.Tensor:
        """Nearest bytes of non-negative float32 scales; clamps to [smallest, largest], keeps exact zeros where the grid has one. NaN alone gives
        an illegal byte."""

    def encode_amax(self, amax: torch.Tensor, rule: str, largest: float) -> torch.Tensor:
        """Bytes of the block scales for block maxima (float32, in units of the tensor scale) of codes with that `CodeGrid.largest`."""

    def decode(self, data: torch.Tensor) -> torch.Tensor:
        """float32 values of uint8 scale bytes."""

    def illegal(self, data: torch.Tensor) -> torch.Tensor:
        """Boolean mask, one an encoded scale, of those that no scale plane may hold."""


def _table(values: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    return values.to(data.device).index_select(0, data.reshape(-1).int()).reshape(data.shape)


class E4M3:
    """Positive finite E4M3, with zero (byte 0) for blocks that are all zero."""

    name = "e4m3"
    width = 1
    largest = 448.0
    smallest = 2.0**-9
    amax_rules: tuple[str, ...] = ("nearest",)

    def __init__(self) -> None:
        self._values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)

    def encode(self, scale: torch.Tensor) -> torch.Tensor:
        return scale.clamp(0.0, self.largest).to(torch.float8_e4m3fn).view(torch.uint8)

    def encode_amax(self, amax: torch.Tensor, rule: str, largest: float) -> torch.Tensor:
        require_rule(self, rule)
        return self.encode(amax / largest)

    def decode(self, data: torch.Tensor) -> torch.Tensor:
        return _table(self._values, data)

    def illegal(self, data: torch.Tensor) -> torch.Tensor:
        return data >= 0x7F


class E8M0:
    """Powers of two from 2^-127 to 2^127; there is no zero, and byte 255 is NaN and forbidden."""

    name = "e8m0"
    width = 1
    largest = 2.0**127
    smallest = 2.0**-127
    amax_rules: tuple[str, ...] = ("even", "floor", "ceil")

    def __init__(self) -> None:
        self._values = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(-127, 129)).to(torch.float32)
        self._values[255] = math.nan

    def encode(self, scale: torch.Tensor) -> torch.Tensor:
        scale = scale.to(torch.float32)
        mantissa, exponent = torch.frexp(scale.clamp(self.smallest, self.largest))
        # scale = mantissa * 2^exponent with mantissa in [0.5, 1): nearest in log2 means above or below 2^-0.5; a tie cannot be represented, since
        # 2^-0.5 is irrational. torch compares in float32, whose nearest number to 2^-0.5 lies below it: hence <=.
        return self._bytes(exponent - (mantissa <= math.sqrt(0.5)).to(exponent.dtype), scale)

    def encode_amax(self, amax: torch.Tensor, rule: str, largest: float) -> torch.Tensor:
        require_rule(self, rule)
        if largest != e2m1.MAX:
            raise FormatError(f"the rules of grid {self.name} are those of E2M1 codes, whose largest is {e2m1.MAX:g}, not {largest:g}")
        amax = amax.to(torch.float32)
        mantissa, exponent = torch.frexp(amax.clamp(min=self.smallest))
        shift = 2  # E2M1's largest power of two is 4 = 2^2
        if rule == "floor":
            return self._bytes(exponent - 1 - shift, amax)
        if rule == "even":
            return self._bytes(exponent - 1 - shift + (mantissa >= 1.75 / 2).to(exponent.dtype), amax)
        # ceil: amax / 2^e <= 6 = 0.75 * 2^3
        return self._bytes(exponent - 3 + (mantissa > 0.75).to(exponent.dtype), amax)

    def _bytes(self, exponent: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        # frexp's exponent of a number that is not finite is not specified: infinity saturates, NaN stays NaN so that a check can see it.
        data = (exponent + 127).clamp(0, 254).to(torch.uint8)
        return data.masked_fill_(torch.isposinf(source), 254).masked_fill_(torch.isnan(source), 255)

    def decode(self, data: torch.Tensor) -> torch.Tensor:
        return _table(self._values, data)

    def illegal(self, data: torch.Tensor) -> torch.Tensor:
        return data == 255


class BF16:
    """Non-negative finite bfloat16, the scale of compressed-tensors' integer groups; two little-endian bytes a scale."""

    name = "bf16"
    width = 2
    largest = 255.0 * 2.0**120
    smallest = 2.0**-133
    amax_rules: tuple[str, ...] = ("nearest",)

    def encode(self, scale: torch.Tensor) -> torch.Tensor:
        return scale.clamp(0.0, self.largest).to(torch.bfloat16).contiguous().view(torch.uint8)

    def encode_amax(self, amax: torch.Tensor, rule: str, largest: float) -> torch.Tensor:
        require_rule(self, rule)
        return self.encode(amax / largest)

    def decode(self, data: torch.Tensor) -> torch.Tensor:
        return self._values(data).to(torch.float32)

    def illegal(self, data: torch.Tensor) -> torch.Tensor:
        values = self._values(data)
        return ~torch.isfinite(values) | torch.signbit(values)

    @staticmethod
    def _values(data: torch.Tensor) -> torch.Tensor:
        # A view of an odd byte offset cannot be read as bfloat16 in place; torch refuses it, and a copy starts at an even one.
        return (data.clone() if data.storage_offset() % 2 else data.contiguous()).view(torch.bfloat16)


def require_rule(grid: ScaleGrid, rule: str) -> None:
    """Raise UnknownName, listing the grid's rules, for a rule that it does not have."""
    if rule not in grid.amax_rules:
        raise UnknownName(f"grid {grid.name} has no scale rule '{rule}'", where="scale_rule", remedy=f"known: {', '.join(grid.amax_rules)}")


def require_legal(grid: ScaleGrid, data: torch.Tensor, where: str) -> None:
    """Raise FormatError naming the first illegal scale (row, block) of `data` [..., O, G * width]."""
    bad = grid.illegal(data)
    if bad.any():
        index = [int(i) for i in bad.nonzero()[0]]
        scale = data.reshape(*bad.shape, grid.width)[tuple(index)].tolist()
        raise FormatError(
            f"scale byte 0x{int.from_bytes(bytes(scale), 'little'):0{2 * grid.width}X} at {index} is not legal on grid {grid.name}",
            where=where,
            remedy="quantize it again",
        )
