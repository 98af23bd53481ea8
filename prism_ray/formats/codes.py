"""Code grids: which numbers a 4-bit code stands for, and how a real number is rounded onto them.

| grid | code | values | largest |
|---|---|---|---|
| E2M1 | sign, 2 exponent, 1 mantissa bit | 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives | 6 |
| int4 | value + 8 | -8 .. 7 | 7.5 |
| int3 | value + 8, in the same nibble | -4 .. 3 | 3.5 |

`largest` is what a block's maximum is mapped to. For integers it is half the range, (2^b - 1) / 2, the symmetric rule of compressed-tensors: the positive
end is rounded by half a step, and no code of the negative end is wasted. Integers are stored as offset binary whose offset is 8 for both widths: a plane of
int3 codes is a plane of int4 codes in a narrower range, and packed bytes are those of compressed-tensors' int32 words in little-endian order.

Rounding is to nearest with ties to even, then clamped to the range. NaN is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch

from prism_ray.core.errors import FormatError
from prism_ray.formats import e2m1

OFFSET = 8


class CodeGrid(Protocol):
    """What formats and quantizers need of the codes of a format; codes are uint8 0..15, one an element, values float32."""

    @property
    def name(self) -> str:
        """Name in messages and caches."""

    @property
    def largest(self) -> float:
        """The number that a block's maximum is mapped to."""

    @property
    def values(self) -> tuple[float, ...]:
        """The 16 values in the order of their codes; those of illegal codes included."""

    @property
    def legal(self) -> tuple[int, ...]:
        """Codes that a code plane may hold."""

    def __hash__(self) -> int:
        """Grids are keys of table caches."""

    def round_to_codes(self, x: torch.Tensor) -> torch.Tensor:
        """Codes of the values nearest to `x` (float32, any shape). NaN raises FormatError."""

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """float32 values of codes, same shape."""


@dataclass(frozen=True)
class E2M1Codes:
    """The element of NVFP4 and MXFP4; `formats.e2m1` is its one rounding rule."""

    name: str = "e2m1"
    largest: float = e2m1.MAX
    values: tuple[float, ...] = e2m1.VALUES
    legal: tuple[int, ...] = tuple(range(16))

    def round_to_codes(self, x: torch.Tensor) -> torch.Tensor:
        return e2m1.round_to_codes(x)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        return e2m1.decode(codes)


@dataclass(frozen=True)
class IntCodes:
    """Signed integers of `bits` bits as offset binary in a nibble."""

    bits: int

    def __post_init__(self) -> None:
        if self.bits not in (3, 4):
            raise FormatError(f"integer codes have 3 or 4 bits, not {self.bits}")

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    @property
    def largest(self) -> float:
        return (2**self.bits - 1) / 2

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(float(code - OFFSET) for code in range(16))

    @property
    def legal(self) -> tuple[int, ...]:
        half = 2 ** (self.bits - 1)
        return tuple(range(OFFSET - half, OFFSET + half))

    def round_to_codes(self, x: torch.Tensor) -> torch.Tensor:
        if torch.isnan(x).any():
            raise FormatError("a NaN has no integer code", remedy="look for the layer that produced it")
        return torch.round(x).clamp_(self.legal[0] - OFFSET, self.legal[-1] - OFFSET).add_(OFFSET).to(torch.uint8)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.to(torch.float32).sub_(OFFSET)


E2M1, INT4, INT3 = E2M1Codes(), IntCodes(4), IntCodes(3)


@lru_cache(maxsize=16)
def _illegal_bytes(grid: CodeGrid, device: torch.device) -> torch.Tensor:
    """Boolean [256]: bytes of which a nibble is no legal code."""
    legal = torch.zeros(16, dtype=torch.bool)
    legal[list(grid.legal)] = True
    data = torch.arange(256)
    return (~(legal[data & 15] & legal[data >> 4])).to(device)


def require_legal_codes(grid: CodeGrid, packed: torch.Tensor, where: str) -> None:
    """Raise FormatError naming the first byte of `packed` [..., I/2] that holds a code outside the grid."""
    if len(grid.legal) == 16 or not packed.numel():
        return
    bad = _illegal_bytes(grid, packed.device).index_select(0, packed.reshape(-1).int()).reshape(packed.shape)
    if bool(bad.any()):
        index = [int(i) for i in bad.nonzero()[0]]
        raise FormatError(
            f"code byte 0x{int(packed[tuple(index)]):02X} at {index} holds a code outside {grid.name}",
            where=where,
            remedy="quantize it again",
        )
