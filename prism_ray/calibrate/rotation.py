"""Orthogonal rotation of a Linear's input: W x = (W R') (R x), so that an outlier of x or W spreads over all columns before rounding.

For n = p m, p the largest power of two in n,

    R = (Q ⊗ H_p) diag(σ)        [n, n], R R' = I

H_p is the normalized Hadamard matrix (entries ± 1/sqrt(p), applied as p log p additions), Q an orthogonal [m, m] from the QR decomposition of a seeded normal
matrix (m = 1: no Q), and σ seeded signs, without which a constant input would be gathered into one column instead of spread. A unit vector becomes one of largest entry
max |Q| / sqrt(p), which is 1 / sqrt(n) for a power of two (looped-quantization, App. D: Hadamard, with a QR fallback for widths that have no Hadamard matrix).

Weights are rotated in float64 and rounded once to their own dtype; inputs in float32 (float64 where they are float64) and back to theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from prism_ray.core.errors import ModelError

DEFAULT_SEED = 0


class Rotation(nn.Module):
    """R of one width; a function of (width, seed) alone, so it is rebuilt and not stored."""

    def __init__(self, width: int, seed: int = DEFAULT_SEED):
        super().__init__()
        if width < 1:
            raise ModelError(f"width {width} cannot be rotated", where="rotation")
        self.width = width
        self.seed = seed
        self.power = width & -width
        generator = torch.Generator().manual_seed(seed)
        signs = torch.randint(0, 2, (width,), generator=generator, device="cpu").to(torch.float64) * 2 - 1
        odd = width // self.power
        block = torch.linalg.qr(torch.randn(odd, odd, generator=generator, dtype=torch.float64, device="cpu"))[0]
        # Plain attributes: `model.to(bfloat16)` casts buffers, and R is orthogonal only before that.
        self._signs, self._block = signs, block if odd > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """R x for the last dimension of x [..., n]."""
        wide = _wide(x)
        signs, block = self._parts(wide)
        return self._mix(wide * signs, block).to(x.dtype)

    def inverse(self, x: Tensor) -> Tensor:
        """R' x for the last dimension of x [..., n]."""
        wide = _wide(x)
        signs, block = self._parts(wide)
        return (self._mix(wide, None if block is None else block.T) * signs).to(x.dtype)

    def extra_repr(self) -> str:
        return f"width={self.width}, hadamard={self.power}, qr={self.width // self.power}, seed={self.seed}"

    def _mix(self, x: Tensor, block: Tensor | None) -> Tensor:
        spread = hadamard(x.reshape(*x.shape[:-1], -1, self.power))
        if block is not None:
            spread = torch.einsum("ij,...jp->...ip", block, spread)
        return spread.reshape(x.shape)

    def _parts(self, like: Tensor) -> tuple[Tensor, Tensor | None]:
        if like.shape[-1] != self.width:
            raise ModelError(f"rotation of width {self.width} meets a tensor of {like.shape[-1]} columns", where="rotation")
        return self._signs.to(like), None if self._block is None else self._block.to(like)


def hadamard(x: Tensor) -> Tensor:
    """H_p x over the last dimension, p a power of two, normalized: its own inverse. Fast Walsh-Hadamard transform in Sylvester's order."""
    size = x.shape[-1]
    if size & (size - 1):
        raise ModelError(f"{size} is no power of two, so it has no Sylvester-Hadamard matrix", where="hadamard", remedy="use Rotation")
    half = 1
    while half < size:
        pairs = x.reshape(*x.shape[:-1], -1, 2, half)
        a, b = pairs.unbind(dim=-2)
        x = torch.stack([a + b, a - b], dim=-2).reshape(x.shape)
        half *= 2
    return x / math.sqrt(size)


class RotatedLinear(nn.Module):
    """A Linear that rotates its input and holds W R' in `linear`, where a plan or a quantizer finds it. The bias is untouched."""

    def __init__(self, linear: nn.Linear, rotation: Rotation):
        super().__init__()
        self.rotation = rotation
        self.linear = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.linear.weight = nn.Parameter(rotate_weight(linear.weight.detach(), rotation), requires_grad=linear.weight.requires_grad)
        if linear.bias is not None:
            self.linear.bias = linear.bias

    @property
    def in_features(self) -> int:
        return self.rotation.width

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.rotation(x))


def rotate_weight(weight: Tensor, rotation: Rotation) -> Tensor:
    """W R' [O, I], computed in float64, in the dtype of W."""
    return rotation(weight.to(torch.float64)).to(weight.dtype)


def through_rotation(quantize: Callable[[Tensor], Tensor], seed: int = DEFAULT_SEED) -> Callable[[Tensor], Tensor]:
    """The weight W -> quantize(W R') R that a RotatedLinear with a quantized `linear` applies, as a function on the unrotated weight."""

    def apply(weight: Tensor) -> Tensor:
        rotation = Rotation(weight.shape[-1], seed)
        return rotation.inverse(quantize(rotate_weight(weight, rotation)).to(torch.float64)).to(weight.dtype)

    return apply


def rotate_linear(model: nn.Module, name: str, seed: int = DEFAULT_SEED) -> RotatedLinear:
    """Replace the Linear called `name` by a RotatedLinear; ModelError where it is none."""
    parent_name, _, leaf = name.rpartition(".")
    linear = getattr(model.get_submodule(parent_name), leaf, None)
    if not isinstance(linear, nn.Linear):
        raise ModelError(f"is {type(linear).__name__}, and only a Linear's input can be rotated", where=name)
    rotated = RotatedLinear(linear, Rotation(linear.in_features, seed))
    setattr(model.get_submodule(parent_name), leaf, rotated)
    return rotated


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.to(torch.float32)
