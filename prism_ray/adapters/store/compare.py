"""What differs between two versions: changed scale blocks of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from prism_ray.core.errors import FingerprintMismatch


@dataclass(frozen=True, kw_only=True)
class LayerDiff:
    """blocks: scale bytes of the layer; changed: those that differ; steps: sum of |difference| of the bytes, which on E4M3 and E8M0 is grid steps;
    only: the version that alone touches the layer where the other's scales are not known (its base is not in the store), else empty."""

    blocks: int
    changed: int
    steps: int
    only: str = ""


@dataclass(frozen=True, kw_only=True)
class PlaneDiff:
    """Per layer and in total; layers that differ nowhere are in it with changed = 0."""

    first: str
    second: str
    layers: dict[str, LayerDiff]

    @property
    def changed(self) -> int:
        """Changed blocks of all layers."""
        return sum(layer.changed for layer in self.layers.values())

    @property
    def blocks(self) -> int:
        """Blocks of all layers that either version touches."""
        return sum(layer.blocks for layer in self.layers.values())


def diff_planes(
    first: str,
    a: Mapping[str, torch.Tensor],
    base_a: Mapping[str, torch.Tensor],
    second: str,
    b: Mapping[str, torch.Tensor],
    base_b: Mapping[str, torch.Tensor],
) -> PlaneDiff:
    """Compare two planes layer by layer; a layer that one lacks has the scales of that one's base, where they are known."""
    layers: dict[str, LayerDiff] = {}
    for name in sorted({*a, *b}):
        left, right = a.get(name, base_a.get(name)), b.get(name, base_b.get(name))
        if left is None or right is None:
            known = right if left is None else left
            assert known is not None
            layers[name] = LayerDiff(blocks=known.numel(), changed=known.numel(), steps=0, only=second if left is None else first)
            continue
        if left.shape != right.shape:
            raise FingerprintMismatch(f"scales {list(left.shape)} in {first}, {list(right.shape)} in {second}", where=name)
        distance = (left.to(torch.int16) - right.to(torch.int16)).abs()
        layers[name] = LayerDiff(blocks=left.numel(), changed=int((distance > 0).sum()), steps=int(distance.sum()))
    return PlaneDiff(first=first, second=second, layers=layers)
