"""QuantTensor: one quantized weight, and the one place where codes and scales become a weight.

Value = codes.decode(code) * grid.decode(scale) * tensor_scale, always in this multiply convention. Not a torch.Tensor subclass: an operation that does not
know about planes fails loudly instead of computing on bytes.

A weight is rounded exactly once. With E2M1 codes and one-byte scales the product code * scale has at most six significant bits, exact in bfloat16 and in
float32, and the tensor scale rounds it. With integer codes and bfloat16 scales it has up to twelve; both factors are exact in bfloat16, torch multiplies
bfloat16 numbers in float32 and rounds the result, and there is no tensor scale to round again (`FormatSpec` refuses the combination).
`dequantize(dtype=bfloat16)` therefore equals `dequantize(dtype=float32).to(bfloat16)` bit for bit in every format.

Legend: E experts (leading, optional), O rows, I columns, G = I / block scale blocks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from prism_ray.core.digests import sha256_tensors
from prism_ray.core.errors import FormatError
from prism_ray.formats.codes import CodeGrid, require_legal_codes
from prism_ray.formats.grids import require_legal
from prism_ray.formats.spec import FormatSpec


@dataclass(frozen=True, kw_only=True)
class QuantTensor:
    """codes uint8 [..., O, I/2]; scales uint8 [..., O, G * grid.width]; tensor_scale float32 [] (or [E]); format.

    divisor: the reciprocal tensor scale as a checkpoint stored it (float32, shape of tensor_scale), kept so that writing what was read gives
    the same bytes: 1/(1/g) is not always g in float32. None where the tensor was not read from such a checkpoint.
    Construction checks shapes and dtypes; `validate` also checks every byte.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    tensor_scale: torch.Tensor
    format: FormatSpec
    divisor: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.codes.dtype != torch.uint8 or self.scales.dtype != torch.uint8 or self.tensor_scale.dtype != torch.float32:
            raise FormatError(
                f"planes must be uint8, uint8 and float32, got {self.codes.dtype}, {self.scales.dtype}, {self.tensor_scale.dtype}"
            )
        expected = (*self.codes.shape[:-1], self.format.blocks(self.codes.shape[-1] * 2) * self.format.grid.width)
        if tuple(self.scales.shape) != expected:
            raise FormatError(f"scales have shape {list(self.scales.shape)}, codes {list(self.codes.shape)} need {list(expected)}")
        if tuple(self.tensor_scale.shape) != tuple(self.codes.shape[:-2]):
            raise FormatError(f"tensor_scale has shape {list(self.tensor_scale.shape)}, expected {list(self.codes.shape[:-2])}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight, [..., O, I]."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 2)

    def validate(self, where: str = "") -> None:
        """Raise FormatError at the first illegal scale, illegal code or non-finite tensor scale; `where` names the tensor."""
        require_legal(self.format.grid, self.scales, where)
        require_legal_codes(self.format.codes, self.codes, where)
        if not bool(torch.isfinite(self.tensor_scale).all()) or bool((self.tensor_scale <= 0).any()):
            raise FormatError("tensor scale is not a positive finite number", where=where, remedy="quantize it again")

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight [..., O, I] in float32 or bfloat16, rounded once."""
        return dequantize(self.codes, self.format.codes, self.format.grid.decode(self.scales), self.tensor_scale, dtype)

    def with_scales(self, scales: torch.Tensor) -> QuantTensor:
        """The same codes under another scale plane."""
        return replace(self, scales=scales)

    def __getitem__(self, expert: int) -> QuantTensor:
        """One expert of a batched tensor."""
        divisor = None if self.divisor is None else self.divisor[expert]
        return QuantTensor(
            codes=self.codes[expert],
            scales=self.scales[expert],
            tensor_scale=self.tensor_scale[expert],
            format=self.format,
            divisor=divisor,
        )


@lru_cache(maxsize=32)
def _pair_table(grid: CodeGrid, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """256 entries: the two values of a code byte side by side, viewed as one integer so that one gather moves both."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = torch.stack([grid.decode(codes & 15), grid.decode(codes >> 4)], dim=-1).to(dtype).contiguous()
    return values.view(torch.int32 if dtype == torch.bfloat16 else torch.int64).reshape(-1).to(device)


def unscaled(codes: torch.Tensor, grid: CodeGrid, dtype: torch.dtype) -> torch.Tensor:
    """Values [..., I] of packed codes [..., I/2] in float32 or bfloat16 (both exact)."""
    if dtype not in (torch.float32, torch.bfloat16):
        raise FormatError(
            f"weights are dequantized to float32 or bfloat16, not {dtype}", remedy="float16 cannot hold every NVFP4 scale times code"
        )
    table = _pair_table(grid, dtype, codes.device)
    flat = table.index_select(0, codes.reshape(-1).int())
    return flat.view(dtype).reshape(*codes.shape[:-1], codes.shape[-1] * 2)


def dequantize(
    codes: torch.Tensor, grid: CodeGrid, scale: torch.Tensor, tensor_scale: torch.Tensor | float, dtype: torch.dtype
) -> torch.Tensor:
    """Weight [..., O, I] from packed codes [..., O, I/2], decoded scales float32 [..., O, G] and the tensor scale."""
    return apply_scales(unscaled(codes, grid, dtype), scale, tensor_scale)


def apply_scales(weight: torch.Tensor, scale: torch.Tensor, tensor_scale: torch.Tensor | float) -> torch.Tensor:
    """`unscaled` values [..., O, I] times decoded scales float32 [..., O, G] times the tensor scale, written into `weight`, which is returned."""
    blocks = weight.view(*scale.shape, weight.shape[-1] // scale.shape[-1])
    blocks.mul_(scale.to(weight.dtype).unsqueeze(-1))
    if isinstance(tensor_scale, torch.Tensor) and tensor_scale.ndim:
        # A batched scalar: multiplied in float32 and rounded once, as the scalar path does.
        return (weight.to(torch.float32) * tensor_scale.view(-1, 1, 1)).to(weight.dtype)
    factor = float(tensor_scale)
    return weight if factor == 1.0 else weight.mul_(factor)


def code_plane_fingerprint(tensors: dict[str, QuantTensor]) -> str:
    """SHA-256 over names, shapes, formats and code bytes in sorted name order (design.md, "Code plane")."""
    header = "\n".join(f"{name} {tensors[name].format.name} {list(tensors[name].shape)}" for name in sorted(tensors))
    return sha256_tensors(((name, tensor.codes) for name, tensor in tensors.items()), header)


def scale_plane_fingerprint(tensors: dict[str, QuantTensor]) -> str:
    """SHA-256 over the scale bytes and tensor scales in sorted name order."""
    scales = sha256_tensors((name, tensor.scales) for name, tensor in tensors.items())
    factors = sha256_tensors((name, tensor.tensor_scale) for name, tensor in tensors.items())
    return hashlib.sha256(f"{scales} {factors}".encode()).hexdigest()
