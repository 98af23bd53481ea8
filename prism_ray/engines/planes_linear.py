"""Quantized modules that choose a scale plane for each token, over one set of codes (scale-qlora §5.2, B.2).

    y[t] = x[t] W(p(t))' + b,   W(p)[o, k] = code[o, k] * decode(plane p)[o, k // block] * tensor_scale

A step is one forward over packed tokens; `PlaneStep` says which plane each of them runs on. The stepping thread writes it before the forward and the modules
read it inside, so a plane changes between two steps only. Tokens are grouped by plane: a group is multiplied as if it were alone, so another tenant's
tokens change no number of it, and a plane that has no scales for a layer shares that layer's group with the base.

    PlaneLinear   in the place of FP4Linear; the same arithmetic: equal to the bit to FP4Linear with the plane's scales, for the same rows
    PlaneExperts  in the place of a fused expert weight [E, O, I]; its experts stay the separate planes of the checkpoint, so memory-mapped ones are not copied

On a CPU decoded weights are kept under a byte budget (`DequantCache`); 0 bytes decode in every step. On CUDA the multi-plane kernel reads the codes once for all.
Legend: T tokens of a step, O rows, I columns, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from prism_kernels import DequantCache, multi_plane_linear_cpu, multi_plane_matmul
from torch import nn

from prism_ray.adapters.planes import BasePlanes, ScalePlane
from prism_ray.core.errors import CheckpointError, FormatError, ModelError
from prism_ray.engines.protocol import BASE, Plane
from prism_ray.formats.modules import FP4Linear
from prism_ray.formats.tensor import QuantTensor, dequantize

Rows = slice | torch.Tensor


class PlaneStep:
    """Which plane each token of a step runs on.

    digests: the planes of the step. index: int64 [T], position in `digests` of each token's plane; None where there is one plane for all.
    head_index: the same for the rows that reach the output head, where the model cuts them before it. cache: decoded weights.
    """

    def __init__(self, cache_bytes: int = 0):
        self.cache = DequantCache(cache_bytes)
        self.digests: tuple[str, ...] = (BASE,)
        self.index: torch.Tensor | None = None
        self.head_index: torch.Tensor | None = None
        self.active = BASE
        self._groups: dict[tuple[tuple[str, ...], int, bool], list[tuple[str, Rows]]] = {}

    def uniform(self, digest: str) -> None:
        """One plane for every token."""
        self.digests, self.index, self.head_index, self.active = (digest,), None, None, digest
        self._groups.clear()

    def mixed(self, sequences: Sequence[tuple[str, int]], head_positions: torch.Tensor | None, device: torch.device) -> None:
        """Packed sequences as (digest, tokens), in the order of the batch; head_positions: tokens whose logits are asked for, None where all are."""
        digests = tuple(dict.fromkeys(digest for digest, _ in sequences))
        self.uniform(digests[0])
        if len(digests) == 1:
            return
        slots = torch.tensor([digests.index(digest) for digest, _ in sequences])
        self.digests = digests
        self.index = slots.repeat_interleave(torch.tensor([tokens for _, tokens in sequences])).to(device)
        self.head_index = None if head_positions is None else self.index[head_positions.long()]

    def groups(self, held: Mapping[str, Any], rows: int, *, head: bool = False) -> list[tuple[str, Rows]]:
        """(key, its rows) for a module that has scales for the planes in `held`; the key of the others is the base's. Found once a step for modules alike."""
        keys = tuple(digest if digest in held else BASE for digest in self.digests)
        name = (keys, rows, head)
        if name not in self._groups:
            self._groups[name] = self._find(keys, rows, head)
        return self._groups[name]

    def _find(self, keys: tuple[str, ...], rows: int, head: bool) -> list[tuple[str, Rows]]:
        distinct = list(dict.fromkeys(keys))
        if len(distinct) == 1:
            return [(distinct[0], slice(0, rows))]
        index = self.head_index if head and self.head_index is not None else self.index
        if index is None or index.shape[0] != rows:
            raise ModelError(
                f"a linear got {rows} rows in a step of {0 if index is None else index.shape[0]} tokens",
                where="mixed planes",
                remedy="this architecture reorders tokens: serve one plane at a time",
            )
        slots = torch.tensor([distinct.index(key) for key in keys], device=index.device)[index]
        return [(key, _rows(slots == slot)) for slot, key in enumerate(distinct) if bool((slots == slot).any())]


def _rows(chosen: torch.Tensor) -> Rows:
    """A slice where the chosen rows are neighbours, which costs no gather; else their indices."""
    found = chosen.nonzero().squeeze(1)
    first, last = int(found[0]), int(found[-1])
    return slice(first, last + 1) if last - first + 1 == found.shape[0] else found


class PlaneLinear(FP4Linear):
    """FP4Linear under the plane of each token. planes: digest -> uint8 [O, G * width]."""

    def __init__(self, source: FP4Linear, step: PlaneStep, *, head: bool = False):
        super().__init__(source.quant_tensor(), None if source.bias is None else source.bias.data)
        self.step, self.head = step, head
        self.planes: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, self.in_features)
        groups = self.step.groups(self.planes, flat.shape[0], head=self.head)
        y = self._product(flat, groups).reshape(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _product(self, x: torch.Tensor, groups: list[tuple[str, Rows]]) -> torch.Tensor:
        if self.format.is_fp4 and x.device.type != "cpu":
            members = [self.planes.get(key, self.scales) for key, _ in groups]
            return multi_plane_matmul(x, self.code_bytes, members, _slots(groups, x), self.tensor_scale, self.format.name)
        weights = [self._weight(x.dtype, key) for key, _ in groups]
        if self.format.is_fp4 and any(weight is None for weight in weights):
            # Not kept: the codes are decoded in pieces, each once for all planes.
            members, keys = [self.planes.get(key, self.scales) for key, _ in groups], [key for key, _ in groups]
            slots, cache = _slots(groups, x), self.step.cache
            return multi_plane_linear_cpu(x, self.code_bytes, members, slots, self.factor, self.format.name, cache=cache, keys=keys)
        return grouped(x, groups, lambda rows, position: nn.functional.linear(rows, self._at(weights, groups, position, x.dtype)))

    def _at(self, weights: list[torch.Tensor | None], groups: list[tuple[str, Rows]], position: int, dtype: torch.dtype) -> torch.Tensor:
        weight = weights[position]
        return self._decode(dtype, groups[position][0]) if weight is None else weight

    def _weight(self, dtype: torch.dtype, key: str) -> torch.Tensor | None:
        scales = self.planes.get(key, self.scales)
        return self.step.cache.get(self.code_bytes, scales, (dtype, self.format.name, self.factor), partial(self._decode, dtype, key), key)

    def _decode(self, dtype: torch.dtype, key: str) -> torch.Tensor:
        return self.dequantize(dtype, self.format.grid.decode(self.planes.get(key, self.scales)))


def grouped(x: torch.Tensor, groups: list[tuple[str, Rows]], product: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
    """product(rows of x, position of their group) for each group, put together in the order of x."""
    if len(groups) == 1:
        return product(x, 0)
    out: torch.Tensor | None = None
    for position, (_, rows) in enumerate(groups):
        part = product(x[rows], position)
        out = part.new_empty((x.shape[0], *part.shape[1:])) if out is None else out
        out[rows] = part
    assert out is not None
    return out


def _slots(groups: list[tuple[str, Rows]], x: torch.Tensor) -> torch.Tensor:
    """int64 [T]: position of each row's group."""
    slots = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    for position, (_, rows) in enumerate(groups):
        slots[rows] = position
    return slots


@dataclass(kw_only=True)
class ExpertPart:
    """One Linear of one expert: its name in the checkpoint, its base planes, and digest -> scales."""

    name: str
    tensor: QuantTensor
    planes: dict[str, torch.Tensor] = field(default_factory=dict)


class PlaneExperts(nn.Module):
    """A fused expert weight as the parts it is stored as, indexable by expert under the active plane.

    experts: for each expert the Linears that are stacked along O. The eager forward of a transformers experts module reads `self.gate_up_proj[expert]`.
    """

    def __init__(self, experts: Sequence[Sequence[ExpertPart]], dtype: torch.dtype, step: PlaneStep):
        super().__init__()
        self.experts, self.dtype, self.step = experts, dtype, step

    def __getitem__(self, expert: int | torch.Tensor) -> torch.Tensor:
        parts = self.experts[int(expert)]
        key = self.step.active if any(self.step.active in part.planes for part in parts) else BASE
        make = partial(_stacked, parts, key, self.dtype)
        first = parts[0].tensor
        rest = (self.dtype, first.format.name, len(parts))
        weight = self.step.cache.get(first.codes, first.scales, rest, make, key)
        return make() if weight is None else weight

    def digests(self) -> dict[str, None]:
        """Planes that have scales for some expert."""
        return dict.fromkeys(digest for parts in self.experts for part in parts for digest in part.planes)

    def extra_repr(self) -> str:
        return f"experts={len(self.experts)}, parts={len(self.experts[0])}, format={self.experts[0][0].tensor.format.name}"


def _stacked(parts: Sequence[ExpertPart], key: str, dtype: torch.dtype) -> torch.Tensor:
    weights = []
    for part in parts:
        spec = part.tensor.format
        scales = part.planes.get(key, part.tensor.scales)
        weights.append(dequantize(part.tensor.codes, spec.codes, spec.grid.decode(scales), float(part.tensor.tensor_scale), dtype))
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def group_experts(container: nn.Module, step: PlaneStep) -> None:
    """Make an experts module run once for each plane of a step, over that plane's tokens: its forward(hidden [T, H], indices [T, k], weights [T, k])."""
    held = [child for child in container.children() if isinstance(child, PlaneExperts)]
    container.forward = partial(_by_plane, container.forward, held, step)  # type: ignore[method-assign]


def _by_plane(forward: Callable[..., torch.Tensor], held: list[PlaneExperts], step: PlaneStep, *args: Any) -> torch.Tensor:
    hidden, *routing = args
    groups = step.groups({digest: None for experts in held for digest in experts.digests()}, hidden.shape[0])

    def product(rows: torch.Tensor, position: int) -> torch.Tensor:
        step.active, chosen = groups[position]
        if len(groups) == 1:
            return forward(*args)
        return forward(rows, *(value[chosen] for value in routing))

    return grouped(hidden, groups, product)


class PlaneSet:
    """The planes of one model: where each Linear keeps its scales, and what is resident. Attach and detach belong between two steps."""

    def __init__(self, model: nn.Module, base: BasePlanes, step: PlaneStep):
        """Replace every FP4Linear of the model by a PlaneLinear; expert weights are PlaneExperts already (`loading`)."""
        self.base, self.step = base, step
        self.resident: dict[str, int] = {}
        self._homes: dict[str, tuple[dict[str, torch.Tensor], torch.device]] = {}
        head = getattr(model, "get_output_embeddings", lambda: None)()
        for name, module in list(model.named_modules()):
            if isinstance(module, PlaneExperts):
                for part in (part for parts in module.experts for part in parts):
                    self._homes[part.name] = part.planes, part.tensor.codes.device
            elif isinstance(module, FP4Linear):
                parent, _, leaf = name.rpartition(".")
                linear = PlaneLinear(module, step, head=module is head)
                setattr(model.get_submodule(parent), leaf, linear)
                self._homes[name] = linear.planes, linear.codes.device
        for module in model.modules():
            if any(isinstance(child, PlaneExperts) for child in module.children()):
                group_experts(module, step)
        surplus = set(base.quantized) - set(self._homes)
        if surplus:
            raise ModelError(f"quantized weights without a module, first '{min(surplus)}'", where=base.where)

    def fitted(self, plane: Plane) -> dict[str, torch.Tensor]:
        """The plane's scales by Linear name, on their devices. Raises FormatError for another digest, surplus layers, shapes, and illegal bytes."""
        found = ScalePlane(plane.scales)
        if found.digest() != plane.digest:
            raise FormatError("the scales are not those of the plane's digest", where=plane.digest[:12], remedy="read the plane again")
        try:
            linears = found.by_linear({name: tensor.scales for name, tensor in self.base.quantized.items()})
            linears.require_fit(self.base.quantized, plane.digest[:12])
        except CheckpointError as error:
            raise FormatError(error.what, where=error.where, remedy=error.remedy) from None
        return {name: tensor.contiguous().to(self._homes[name][1]) for name, tensor in linears.tensors.items()}

    def attach(self, digest: str, scales: Mapping[str, torch.Tensor]) -> None:
        """Make fitted scales resident."""
        for name, tensor in scales.items():
            self._homes[name][0][digest] = tensor
        self.resident[digest] = sum(tensor.numel() for tensor in scales.values())

    def detach(self, digest: str) -> None:
        """Let go of a plane's scales and of the weights decoded under them."""
        for planes, _ in self._homes.values():
            planes.pop(digest, None)
        self.resident.pop(digest, None)
        self.step.cache.forget(digest)
