"""The additive second moment of a layer's inputs: sums and an integer row count, never means.

    H = sum over rows of w x x'        [I, I]        a = sum over rows of w |x|        [I]

A row is one input vector that reached the layer (a token; in a looped model a token at a step; in an expert a token routed to it); w is 1 unless a window
of a looped model weighs its steps (looped-quantization, App. P). Products of a batch of rows are float32, sums of batches float64, so a sum of
2^20 batches loses nothing that the products had.

*Rows instead of a Gram matrix.* While fewer than I / 2 rows were seen the state keeps the rows: exact, and rows * I * 4 bytes instead of I * I * 8. Most experts of a sparse
MoE never leave this form. The Gram matrix is formed from all kept rows in one product when the limit is passed, or when it is asked for.

*Merging* adds. Addition of two float64 numbers does not depend on their order, so `a + b` and `b + a` are the same bytes where a matrix is held (kept rows stay in the
order of the sum, and so does the product made of them); three states are not associative to the last bit. A pass that must give the same bytes on any number of workers therefore merges along one fixed tree (`reduce_lanes`): lanes are fixed pieces
of the data, a lane's sum is made in sample order by whoever holds it, and node (2k, 2k + 1) of one level is node k of the next.

Legend: R rows, I input width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from prism_ray.core.errors import DataError

TILE = 256
"""Columns of one block of the product: only blocks on and below the diagonal are computed, 1/2 + 1/(2 I / TILE) of the full product."""


@dataclass(frozen=True, kw_only=True)
class GramState:
    """Second moment of the inputs of one layer (or one expert) of width `width`.

    tokens: rows seen, whatever their weight. steps: rows seen per loop step, {0: n} for a module called once a forward. weight: sum of weights.
    rows: kept rows, float32 [r, I] pieces with their weights; empty once `gram` is there. gram: float64 [I, I], symmetric. absolute: float64 [I].
    A value: `add` and `+` return new states, but `add` may reuse the storage of the state it is called on, which must not be used afterwards.
    """

    width: int
    tokens: int = 0
    weight: float = 0.0
    steps: Mapping[int, int] = field(default_factory=dict)
    rows: tuple[tuple[Tensor, float], ...] = ()
    gram: Tensor | None = None
    absolute: Tensor | None = None

    def add(self, x: Tensor, *, weight: float = 1.0, step: int = 0) -> GramState:
        """The state with the rows x [R, I] (any float dtype) counted `weight` times each, at loop step `step`. R = 0 changes nothing."""
        if x.ndim != 2 or x.shape[1] != self.width:
            raise DataError(f"rows have shape {list(x.shape)}, the layer's input is {self.width} wide")
        if x.shape[0] == 0:
            return self
        x = x.detach().to(torch.float32)
        absolute = x.abs().sum(0, dtype=torch.float64) * weight
        counted = replace(
            self,
            tokens=self.tokens + x.shape[0],
            weight=self.weight + weight * x.shape[0],
            steps={**self.steps, step: self.steps.get(step, 0) + x.shape[0]},
            absolute=absolute if self.absolute is None else self.absolute.add_(absolute),
        )
        if self.gram is None and 2 * counted.tokens < self.width:
            return replace(counted, rows=(*self.rows, (x.clone(), weight)))
        if self.gram is None:
            return _formed(replace(counted, rows=(*self.rows, (x, weight))))
        return replace(counted, gram=_add_product(self.gram, x, weight))

    def __add__(self, other: GramState) -> GramState:
        """The merged state of two disjoint sets of rows; both stay usable. DataError when the widths differ."""
        if other.width != self.width:
            raise DataError(f"states of widths {self.width} and {other.width} cannot be merged")
        if not self.tokens or not other.tokens:
            return (self if self.tokens else other)._copy()
        steps = {step: self.steps.get(step, 0) + other.steps.get(step, 0) for step in sorted({*self.steps, *other.steps})}
        assert self.absolute is not None and other.absolute is not None
        merged = replace(
            self,
            tokens=self.tokens + other.tokens,
            weight=self.weight + other.weight,
            steps=steps,
            absolute=self.absolute + other.absolute,
            rows=(*self.rows, *other.rows),
        )
        if self.gram is None and other.gram is None:
            return merged if 2 * merged.tokens < self.width else _formed(merged)
        return replace(merged, rows=(), gram=self.matrix() + other.matrix())

    def _copy(self) -> GramState:
        # A sum may be grown with `add`, which must not reach into what the sum was made of.
        gram, absolute = (None if held is None else held.clone() for held in (self.gram, self.absolute))
        return replace(self, gram=gram, absolute=absolute)

    def matrix(self) -> Tensor:
        """H as float64 [I, I]; zeros without rows. A view of the state where it holds the matrix already."""
        if self.gram is not None:
            return self.gram
        return _product(self.rows, self.width)

    def magnitude(self) -> Tensor:
        """Mean |x| of each input column, float64 [I]; zeros without rows."""
        return torch.zeros(self.width, dtype=torch.float64) if self.absolute is None else self.absolute / self.weight

    @property
    def starved(self) -> bool:
        """Whether fewer rows were seen than the layer is wide: H has no full rank, whatever the data."""
        return self.tokens < self.width

    @property
    def nbytes(self) -> int:
        """Bytes of the sums and rows, as held and as sent."""
        held = [rows for rows, _ in self.rows] + [tensor for tensor in (self.gram, self.absolute) if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)


def _formed(state: GramState) -> GramState:
    return replace(state, rows=(), gram=_product(state.rows, state.width))


def _product(rows: Sequence[tuple[Tensor, float]], width: int) -> Tensor:
    """Sum of w X'X over pieces, pieces of one weight in one product."""
    gram = torch.zeros(width, width, dtype=torch.float64)
    for weight in sorted({weight for _, weight in rows}):
        gram = _add_product(gram, torch.cat([piece for piece, of in rows if of == weight]), weight)
    return gram


def _add_product(gram: Tensor, x: Tensor, weight: float) -> Tensor:
    """gram += w x'x in place, by blocks on and below the diagonal; the upper half is mirrored."""
    width = x.shape[1]
    for low in range(0, width, TILE):
        rows = slice(low, min(low + TILE, width))
        block = x[:, rows].T @ x[:, : rows.stop]
        if weight != 1.0:
            block.mul_(weight)
        gram[rows, : rows.stop] += block
        if low:
            gram[:low, rows] += block[:, :low].T
    return gram


def reduce_lanes(parts: Mapping[tuple[int, int], GramState], lanes: int) -> GramState:
    """Merge states of disjoint lane ranges into one, along the binary tree over 0 .. lanes.

    parts: {(first, last + 1): state}; each range must be a node of the tree (`lane_nodes` gives the nodes of any range), and together they must cover
    every lane once: DataError names the lanes that are missing or twice there, as after a lost or a repeated delivery (field case CAL-06).
    """
    covered = sorted(lane for start, stop in parts for lane in range(start, stop))
    if covered != list(range(lanes)):
        missing = sorted(set(range(lanes)) - set(covered))
        twice = sorted({lane for lane in covered if covered.count(lane) > 1})
        raise DataError(f"lanes missing: {missing}, counted twice: {twice}, of {lanes}", remedy="collect the block again")
    return _reduce(parts, 0, tree_size(lanes), lanes)


def _reduce(parts: Mapping[tuple[int, int], GramState], start: int, stop: int, lanes: int) -> GramState:
    clipped = (start, min(stop, lanes))
    if clipped in parts:
        return parts[clipped]
    if stop - start < 2:
        raise DataError(f"the range of lane {start} is no node of the tree over {lanes} lanes")
    middle = (start + stop) // 2
    left = _reduce(parts, start, middle, lanes)
    return left if middle >= lanes else left + _reduce(parts, middle, stop, lanes)


def tree_size(lanes: int) -> int:
    """The smallest power of two that holds `lanes`."""
    return 1 << max(0, lanes - 1).bit_length()


def lane_nodes(start: int, stop: int, lanes: int) -> list[tuple[int, int]]:
    """The fewest nodes of the tree over `lanes` that cover the lanes start .. stop - 1, in order: what a holder of these lanes may merge itself."""

    def cover(low: int, high: int) -> list[tuple[int, int]]:
        end = min(high, lanes)
        if low >= stop or end <= start or low >= lanes:
            return []
        if start <= low and end <= stop:
            return [(low, end)]
        middle = (low + high) // 2
        return cover(low, middle) + cover(middle, high)

    return cover(0, tree_size(lanes))
