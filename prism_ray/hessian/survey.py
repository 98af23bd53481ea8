"""What a Gram matrix sees: thresholded rank, rank gain over loop steps, overlap of two subspaces (looped-quantization, section 4, App. I and O).

With λ_1 ≥ λ_2 ≥ … the eigenvalues of H = X'X [I, I] over n rows, and V_k the eigenvectors of the k largest:

    rank           k = number of λ_i > threshold λ_1,  threshold 1e-3;  k <= min(n, I)
    effective rank exp(-sum p_i log p_i),  p_i = λ_i / sum λ
    gain           rank of the sum over all steps / rank of step 0
    overlap        ||V_k' V'_l||_F^2 / min(k, l): the mean squared cosine of the principal angles between two spans

Two independent random spans of dimensions k and l overlap by max(k, l) / I on average, which is the *chance* level. Neither number means anything without n: where
n < I the rank cannot pass n, and `Spectrum.note` says so. The overlap has a noise floor of its own, which the caller measures: the same step, two halves of the samples.

Eigenvalues are float64. A state that keeps rows is read through X X' [n, n], which has the same non-zero eigenvalues; its V is X' U Λ^(-1/2). Products of a state that holds its Gram
matrix are float32: their error, about sqrt(n) 2^-24 of λ_1, lies far below the threshold.

`StepCapture` collects one state for every (input, loop step, half of the samples), or at most `limit` evenly spaced rows of each, so that layers of any width fit.

Legend: n rows, I input width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from prism_ray.core.errors import DataError
from prism_ray.hessian.capture import Capture
from prism_ray.hessian.state import GramState

THRESHOLD = 1e-3


@dataclass(frozen=True, kw_only=True, eq=False)
class Spectrum:
    """values: eigenvalues, float64 [min(n, I) or I], descending, none below 0. rows: n. basis: float64 [I, rank], the eigenvectors above the threshold; None where not asked for."""

    values: Tensor
    rows: int
    width: int
    threshold: float
    basis: Tensor | None = None

    @property
    def rank(self) -> int:
        """Eigenvalues above threshold times the largest; 0 without rows and for rows of zeros."""
        return _above(self.values, self.threshold)

    @property
    def effective(self) -> float:
        """Exponential of the entropy of the eigenvalues' shares; 0 where they are all 0."""
        total = self.values.sum()
        if not float(total) > 0:
            return 0.0
        shares = self.values / total
        return float(torch.special.entr(shares).sum().exp())

    @property
    def bound(self) -> int:
        """The largest rank that n rows of this width can have."""
        return min(self.rows, self.width)

    @property
    def note(self) -> str:
        """That n bounds the rank, where it does; empty elsewhere."""
        return f"n = {self.rows} rows < {self.width} columns: the rank is at most {self.rows}" if self.rows < self.width else ""


def _above(values: Tensor, threshold: float) -> int:
    # A threshold on zeros would count none, and on an empty spectrum there is no largest.
    return int((values > threshold * values[0]).sum()) if values.numel() and float(values[0]) > 0 else 0


def spectrum(states: Sequence[GramState], *, threshold: float = THRESHOLD, vectors: bool = False) -> Spectrum:
    """The spectrum of the sum of states of one width, none of which is changed. vectors: also the basis.

    Costs the eigendecomposition of [m, m] float64, m = n where all states keep rows and n < I, else I; with vectors about four matrices of that size. DataError
    without a state and for states of several widths.
    """
    widths = {state.width for state in states}
    if len(widths) != 1:
        raise DataError(f"a spectrum needs states of one width, not {len(widths)}", where="spectrum")
    width, rows = widths.pop(), sum(state.tokens for state in states)
    kept = [state for state in states if state.tokens]
    if not kept:
        empty = torch.zeros(0, dtype=torch.float64)
        return Spectrum(values=empty, rows=0, width=width, threshold=threshold, basis=empty.reshape(width, 0) if vectors else None)
    x = _rows(kept)
    if x is None:
        gram = _sum(kept)
    elif x.shape[0] < width:
        gram = x @ x.T
    else:
        # Of the rows themselves in float64: a state's own product is float32.
        gram, x = x.T @ x, None
    if not vectors:
        found = torch.linalg.eigvalsh(gram).flip(0).clamp(min=0.0)
        return Spectrum(values=found, rows=rows, width=width, threshold=threshold)
    values, columns = torch.linalg.eigh(gram)
    values, columns = values.flip(0).clamp(min=0.0), columns.flip(1)
    rank = _above(values, threshold)
    basis = columns[:, :rank] if x is None else x.T @ (columns[:, :rank] / values[:rank].sqrt())
    return Spectrum(values=values, rows=rows, width=width, threshold=threshold, basis=basis.contiguous())


def _rows(states: Sequence[GramState]) -> Tensor | None:
    """All rows, each times the root of its weight, float64 [n, I]; None where a state holds its Gram matrix."""
    if any(state.gram is not None for state in states):
        return None
    return torch.cat([rows.to(torch.float64) * weight**0.5 for state in states for rows, weight in state.rows])


def _sum(states: Sequence[GramState]) -> Tensor:
    total = states[0].matrix()
    for state in states[1:]:
        total = total + state.matrix()
    return total


def rank_gain(accumulated: Spectrum, first: Spectrum) -> float | None:
    """Rank over all steps / rank of step 0; None where step 0 has none."""
    return accumulated.rank / first.rank if first.rank else None


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """value: mean squared cosine, 0 to 1. ranks: dimensions of the two spans. rows: n behind each. chance: the value of two random spans of these dimensions."""

    value: float
    ranks: tuple[int, int]
    rows: tuple[int, int]
    chance: float


def overlap(one: Spectrum, other: Spectrum) -> Overlap | None:
    """Overlap of the spans above the threshold; None where a span is empty. Both need their basis."""
    if one.basis is None or other.basis is None:
        raise DataError("the overlap of two spectra needs their eigenvectors", where="overlap", remedy="ask for them")
    if not one.rank or not other.rank:
        return None
    squares = float((one.basis.T @ other.basis).square().sum())
    ranks = (one.rank, other.rank)
    # Rounding may carry a span's overlap with itself past 1.
    value = min(1.0, squares / min(ranks))
    return Overlap(value=value, ranks=ranks, rows=(one.rows, other.rows), chance=max(ranks) / one.width)


@dataclass(kw_only=True)
class EvenRows:
    """At most `limit` >= 1 rows of a stream of unknown length: every stride-th, the stride a power of two that doubles whenever the limit is passed. Keeps more than a
    limit's half as soon as so many were seen. A function of the stream and the limit alone, however it is cut into batches."""

    width: int
    limit: int
    seen: int = 0
    stride: int = 1
    rows: list[Tensor] = field(default_factory=list)

    def add(self, x: Tensor) -> None:
        """Count rows x [R, I]."""
        start = -self.seen % self.stride
        self.seen += x.shape[0]
        kept = x.detach()[start :: self.stride].to(torch.float32)
        self.rows.append(kept.clone())
        while (count := sum(len(piece) for piece in self.rows)) > self.limit:
            # Kept rows are the multiples of the stride: every second one is a multiple of twice the stride.
            self.rows, self.stride = [torch.cat(self.rows)[::2].clone()], 2 * self.stride
            assert sum(len(piece) for piece in self.rows) < count

    @property
    def state(self) -> GramState:
        """The kept rows as a state that counts only them."""
        rows = tuple((piece, 1.0) for piece in self.rows if len(piece))
        return GramState(
            width=self.width, tokens=sum(len(piece) for piece, _ in rows), weight=float(sum(len(piece) for piece, _ in rows)), rows=rows
        )


@dataclass(kw_only=True)
class Tally:
    """rows: all that were seen. squares: sum of their squared entries, their part of tr(H)."""

    rows: int = 0
    squares: float = 0.0


Slot = tuple[int, int]
"""(loop step, half of the samples)."""


class StepCapture(Capture):
    """A Capture that keeps every loop step apart, and the halves of the samples too at the first and the last step of Linear modules.

    Set `half` (0 or 1) before each batch. limits: by leader or fused parameter: rows kept of a step or of an expert, half of them for a half of the samples; 0 for counts
    alone; a GramState of all rows where absent. After the passes: `slots` {state key: {(step, half): state}}, `tallies` {state key: {step: Tally}}. Experts are summed over steps and halves.
    """

    def __init__(self, root: nn.Module, names: Sequence[str], *, steps: Mapping[str, int], limits: Mapping[str, int] | None = None):
        super().__init__(root, names, steps=steps)
        self.half = 0
        self.slots: dict[str, dict[Slot, GramState | EvenRows]] = {}
        self.tallies: dict[str, dict[int, Tally]] = {}
        self._limits = dict(limits or {})

    def states_of(self, key: str) -> dict[Slot, GramState]:
        """States of a key by slot; empty where no row reached it or only counts are kept."""
        return {slot: held.state if isinstance(held, EvenRows) else held for slot, held in self.slots.get(key, {}).items()}

    def _add(self, key: str, module: str, rows: Tensor, step: int, tokens: Tensor | None = None) -> None:
        if not rows.shape[0]:
            return
        # Finite exactly when every entry is: float64 cannot overflow on squares of float32.
        squares = float(torch.linalg.vector_norm(rows.detach(), dtype=torch.float64)) ** 2
        if not squares < float("inf"):
            raise self._fault(module, rows, tokens)
        tally = self.tallies.setdefault(key, {}).setdefault(step, Tally())
        tally.rows, tally.squares = tally.rows + rows.shape[0], tally.squares + squares
        limit = self._limits.get(module)
        if limit == 0:
            return
        expert = module in self._experts
        halved = not expert and step in (0, self._expected(module) - 1)
        slot = (0, 0) if expert else (step, self.half if halved else 0)
        slots = self.slots.setdefault(key, {})
        if limit is None:
            held = slots.get(slot, GramState(width=rows.shape[-1]))
            assert isinstance(held, GramState)
            slots[slot] = held.add(rows)
        else:
            sample = slots.setdefault(slot, EvenRows(width=rows.shape[-1], limit=max(1, limit // 2) if halved else limit))
            assert isinstance(sample, EvenRows)
            sample.add(rows)
