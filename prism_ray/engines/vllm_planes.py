"""Linears that choose a scale plane for each token, under vLLM: one stack of codes, the base's scales, and a plane a tenant.

    y[t] = x[t] W(p(t))' + b,   W(p)[o, k] = code[o, k] * decode(plane p)[o, k // block] * tensor_scale[o]

vLLM stacks q/k/v, and gate/up, along O; planes are stacked alike. The parts of a stack keep their own tensor scales: rows under one number are a `Span`.
`Step` says which plane each token of the step in hand runs on; the manager (`vllm_worker`) writes it before the forward, so a plane changes between two steps
only. On a CPU tokens are grouped by plane and each group is multiplied as it would be alone, by vLLM's own product for dense weights over decoded weights that
`KernelCache` keeps under a byte budget; what it does not keep is decoded in chunks by `multi_plane_linear_cpu`. On CUDA the planes lie in one stack,
[1 + M, O, G], and `multi_plane_matmul` reads the codes once for all.

Legend: T tokens of a step, O rows, I columns, G scale blocks a row, M slots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from prism_kernels.cpu import multi_plane_linear_cpu

from prism_ray.engines.protocol import BASE
from prism_ray.formats.spec import FormatSpec
from prism_ray.formats.tensor import dequantize

Product = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(x [T, I], bias [O] or None) -> [T, O]."""


class Span(NamedTuple):
    """Rows start to stop of a stack, and their tensor scale."""

    start: int
    stop: int
    factor: float


def spans_of(rows: Sequence[int], factors: Sequence[float]) -> tuple[Span, ...]:
    """Spans of stacked parts with `rows` rows each; neighbours under one number become one. A single factor serves all parts."""
    factors = list(factors) * len(rows) if len(factors) == 1 else list(factors)
    out: list[Span] = []
    start = 0
    for count, factor in zip(rows, factors, strict=True):
        if out and out[-1].factor == factor:
            out[-1] = out[-1]._replace(stop=start + count)
        else:
            out.append(Span(start, start + count, factor))
        start += count
    return tuple(out)


class Group(NamedTuple):
    """Tokens of a step that run on one plane, as positions int64; None for all of them."""

    digest: str
    tokens: torch.Tensor | None


class Step:
    """The plane of each token. digests: the planes of the step; tokens: how many it has, None where all run on one plane; slots: for CUDA, int32 [T] into
    the stacks, 0 being the base."""

    def __init__(self, slots: torch.Tensor | None = None):
        self.digests: tuple[str, ...] = (BASE,)
        self.tokens: int | None = None
        self.slots = slots
        self._index = np.zeros(0, dtype=np.int64)
        self._groups: dict[tuple[str, ...], list[Group]] = {}

    def set(self, planes: Sequence[str], index: np.ndarray) -> None:
        """index int64 [T]: position in `planes` of each token's plane."""
        used = np.unique(index)
        self._groups = {}
        self.digests = tuple(planes[i] for i in used) or (BASE,)
        self.tokens = None if len(used) < 2 else len(index)
        self._index = np.searchsorted(used, index)

    def groups(self, held: Mapping[str, Any], tokens: int) -> list[Group]:
        """The groups for a linear that has scales for the planes in `held`: tokens of the others are the base's. RuntimeError for another number of tokens."""
        keys = tuple(digest if digest in held else BASE for digest in self.digests)
        if len(set(keys)) == 1:
            return [Group(keys[0], None)]
        if tokens != self.tokens:
            # Answering with some plane would be answering a tenant with another's adapter.
            raise RuntimeError(
                f"a linear got {tokens} rows in a step of {self.tokens} tokens: this architecture cannot mix planes in a batch"
            )
        found = self._groups.get(keys)
        if found is None:
            distinct = list(dict.fromkeys(keys))
            of_token = np.array([distinct.index(key) for key in keys])[self._index]
            found = [Group(key, torch.from_numpy(np.flatnonzero(of_token == i))) for i, key in enumerate(distinct)]
            self._groups[keys] = found
        return found


class KernelCache:
    """Products over decoded weights under a byte budget, by plane.

    Every step asks for every layer in turn, and under a budget smaller than that, dropping the oldest entry would drop each just before it is needed. So whole
    planes go, least recently used first, and never one of the step in hand: what then finds no room is not kept (`refused`).
    """

    def __init__(self, budget_bytes: int, step: Step):
        self.budget_bytes, self.step = budget_bytes, step
        self.used_bytes = self.hits = self.misses = self.refused = 0
        self._planes: OrderedDict[str, dict[str, tuple[Product, int]]] = OrderedDict()

    def get(self, digest: str, layer: str, size_bytes: int, make: Callable[[], Product]) -> Product | None:
        """The product of a layer under a plane, made on a miss; None where it will not be kept."""
        found = self._planes.get(digest, {}).get(layer)
        if found is not None:
            self.hits += 1
            return found[0]
        while self.used_bytes + size_bytes > self.budget_bytes:
            idle = next((plane for plane in self._planes if plane not in self.step.digests), None)
            if idle is None:
                self.refused += 1
                return None
            self.forget(idle)
        self.misses += 1
        product = make()
        self._planes.setdefault(digest, {})[layer] = (product, size_bytes)
        self.used_bytes += size_bytes
        return product

    def touch(self) -> None:
        """The planes of the step in hand are the most recently used."""
        for digest in self.step.digests:
            if digest in self._planes:
                self._planes.move_to_end(digest)

    def forget(self, digest: str) -> None:
        """Drop a plane's products."""
        self.used_bytes -= sum(size for _, size in self._planes.pop(digest, {}).values())


def plain_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """torch's product."""
    return lambda x, added: torch.nn.functional.linear(x, weight, added)


@dataclass(kw_only=True)
class PlanedLinear:
    """One stacked linear of vLLM. name: of its module; members: the parts' names as vLLM calls them. codes uint8 [O, I/2], scales uint8 [O, G], the base's.

    planes: digest -> uint8 [O, G], on a CPU. stack: uint8 [1 + M, O, G] on CUDA. product: makes a product of a decoded weight and the layer's bias.
    """

    name: str
    members: tuple[str, ...]
    codes: torch.Tensor
    scales: torch.Tensor
    spans: tuple[Span, ...]
    format: FormatSpec
    bias: torch.Tensor | None = None
    product: Callable[[torch.Tensor, torch.Tensor | None], Product] = plain_product
    step: Step = field(default_factory=Step)
    cache: KernelCache | None = None
    planes: dict[str, torch.Tensor] = field(default_factory=dict)
    stack: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, I] -> [T, O] in x's dtype."""
        if x.device.type != "cpu":
            return self._kernel(x, bias)
        groups = self.step.groups(self.planes, x.shape[0])
        products = [self._product(group.digest, x.dtype) for group in groups]
        if len(groups) == 1 and products[0] is not None:
            return products[0](x, bias)
        y = x.new_empty((x.shape[0], self.codes.shape[0]))
        rest = [group for group, product in zip(groups, products, strict=True) if product is None]
        for group, product in zip(groups, products, strict=True):
            if product is not None:
                y[group.tokens] = product(x[group.tokens], bias)
        if rest:
            self._chunked(x, bias, rest, y)
        return y

    def _product(self, digest: str, dtype: torch.dtype) -> Product | None:
        if self.cache is None:
            return None
        size = self.codes.numel() * 2 * dtype.itemsize
        return self.cache.get(digest, self.name, size, partial(self._make, digest, dtype))

    def _make(self, digest: str, dtype: torch.dtype) -> Product:
        return self.product(self.weight(digest, dtype), self.bias)

    def weight(self, digest: str, dtype: torch.dtype) -> torch.Tensor:
        """The decoded weight [O, I] under a plane, rounded once."""
        scale = self.format.grid.decode(self.planes.get(digest, self.scales))
        parts = [
            dequantize(self.codes[span.start : span.stop], self.format.codes, scale[span.start : span.stop], span.factor, dtype)
            for span in self.spans
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _chunked(self, x: torch.Tensor, bias: torch.Tensor | None, groups: list[Group], y: torch.Tensor) -> None:
        """The groups whose weights are not kept, all in one pass over the codes, into their rows of y."""
        every = groups[0].tokens is None
        tokens = torch.arange(x.shape[0]) if every else torch.cat([group.tokens for group in groups if group.tokens is not None])
        counts = torch.tensor([x.shape[0] if group.tokens is None else len(group.tokens) for group in groups])
        index = torch.arange(len(groups)).repeat_interleave(counts)
        rows = x if every else x[tokens]
        for start, stop, factor in self.spans:
            members = [self.planes.get(group.digest, self.scales)[start:stop] for group in groups]
            added = None if bias is None else bias[start:stop]
            y[tokens, start:stop] = multi_plane_linear_cpu(rows, self.codes[start:stop], members, index, factor, self.format.name, added)

    def _kernel(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        from prism_kernels.multi_plane import multi_plane_matmul

        stack = self.scales.unsqueeze(0) if self.stack is None else self.stack
        slots = self.step.slots
        index = torch.zeros(x.shape[0], dtype=torch.int32, device=x.device) if slots is None or self.stack is None else slots[: x.shape[0]]
        parts = []
        for start, stop, factor in self.spans:
            added = None if bias is None else bias[start:stop]
            planes = stack[:, start:stop].contiguous() if len(self.spans) > 1 else stack
            parts.append(multi_plane_matmul(x, self.codes[start:stop], planes, index, factor, self.format.name, added))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
