"""E2M1: the 4-bit element of NVFP4 and MXFP4 (OCP Microscaling Formats v1.0, section 5.3.3), and its one packing.

A code is four bits: sign (bit 3), two exponent bits with bias 1, one mantissa bit. The magnitudes are 0, 0.5, 1, 1.5, 2, 3, 4, 6.

Rounding is to nearest with ties to the even code (the mantissa bit 0): 0.25 -> 0, 0.75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4,
5 -> 4. Magnitudes above 6 saturate. The sign of zero is kept (code 8 is -0), so a code plane survives a round trip through any tool.

Packing is *adjacent low-first*: two codes a byte, the even column in the low nibble. Two other orders are in use elsewhere with the same
shapes (field case FMT-01); nothing but a name in the manifest tells them apart, hence `PACKING`.

Legend: O rows, I columns.
"""

from __future__ import annotations

import torch

from prism_ray.core.errors import FormatError

PACKING = "adjacent-low-first"
MAX = 6.0
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def round_to_codes(x: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 codes of `x` (float32, any shape): uint8, one code an element. NaN raises FormatError."""
    if torch.isnan(x).any():
        raise FormatError("a NaN has no E2M1 code", remedy="look for the layer that produced it")
    magnitude = x.abs()
    # torch.round is half-to-even, and within each binade an even multiple is an even code.
    code = torch.where(
        magnitude < 2, torch.round(magnitude * 2), torch.where(magnitude < 4, torch.round(magnitude) + 2, torch.round(magnitude * 0.5) + 4)
    )
    return code.clamp_(max=7).to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of uint8 codes 0..15, same shape."""
    return torch.tensor(VALUES, device=codes.device).index_select(0, codes.reshape(-1).int()).reshape(codes.shape)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [..., I] -> bytes [..., I/2], even column in the low nibble; an odd I raises FormatError."""
    if codes.shape[-1] % 2:
        raise FormatError(f"{codes.shape[-1]} columns cannot be packed two a byte")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Bytes [..., I/2] -> uint8 codes [..., I]."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
