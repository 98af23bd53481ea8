"""Accuracy by answer log-likelihood, held-out loss and drift, spread over the workers of a back end.

Every worker runs the same number of forward passes, since a ZeRO-3 pass is a collective: a worker that has run out of batches repeats the first one and
counts nothing. Counts and sums are added over workers, so the numbers do not depend on how many there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from scipy.stats import binomtest

from prism_ray.risk.moments import FeatureMoments, feature_moments
from prism_ray.training.backends import Backend
from prism_ray.training.data import Encoded, batches_by_length, collate
from prism_ray.training.scoring import pack_candidates


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """correct of n examples, and the mean log-loss over the label set (nats); `interval` is Wilson's at 95 %."""

    correct: int
    n: int
    loss: float

    @property
    def value(self) -> float:
        """Share correct, NaN for n = 0."""
        return self.correct / self.n if self.n else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson 95 % interval of the share."""
        if not self.n:
            return math.nan, math.nan
        found = binomtest(self.correct, self.n).proportion_ci(method="wilson")
        return float(found.low), float(found.high)


def spread(batches: Sequence[list[int]], backend: Backend) -> Iterator[tuple[list[int], bool]]:
    """This worker's share of the batches, the same number on every worker: (indices, whether they count)."""
    for first in range(0, len(batches), backend.world):
        place = first + backend.rank
        yield (batches[place], True) if place < len(batches) else (batches[0], False)


@torch.no_grad()
def label_accuracy(
    backend: Backend,
    groups: Sequence[Sequence[Encoded]],
    labels: Sequence[int],
    pad_id: int,
    *,
    max_batch: int = 32,
    max_tokens: int = 2048,
    packed: bool = True,
) -> Accuracy:
    """Accuracy of the most likely candidate. groups: per example its C encoded candidates; labels: index of the right one."""
    sizes = [Encoded([0] * _cost(group, packed), 0, group[0].id) for group in groups]
    batches = list(batches_by_length(sizes, max_batch, max_tokens))
    sums = torch.zeros(3, dtype=torch.float64)
    for indices, counts in spread(batches, backend):
        chosen = [groups[index] for index in indices]
        scores = backend.run("scores", pack_candidates(chosen, pad_id)) if packed else _plain_scores(backend, chosen, pad_id)
        wanted = torch.tensor([labels[index] for index in indices])
        scores = scores.double().cpu()
        if counts:
            loss = torch.nn.functional.cross_entropy(scores, wanted, reduction="sum")
            sums += torch.tensor([float((scores.argmax(dim=-1) == wanted).sum()), len(indices), float(loss)], dtype=torch.float64)
    correct, n, loss = backend.all_reduce(sums).tolist()
    return Accuracy(correct=round(correct), n=round(n), loss=loss / n if n else math.nan)


def _cost(group: Sequence[Encoded], packed: bool) -> int:
    shared = min(item.prompt_tokens for item in group)
    lengths = [len(item.input_ids) for item in group]
    return shared + sum(length - shared for length in lengths) if packed else len(group) * max(lengths)


def _plain_scores(backend: Backend, groups: Sequence[Sequence[Encoded]], pad_id: int) -> torch.Tensor:
    """The same scores from prompt + candidate, one sequence a candidate."""
    batch = collate([item for group in groups for item in group], pad_id)
    _, ce = backend.run("features", batch)
    total = torch.zeros(batch.input_ids.shape[0]).index_add_(0, batch.target_rows, -ce.float().cpu())
    return total.view(len(groups), -1)


@torch.no_grad()
def answer_loss(
    backend: Backend, items: Sequence[Encoded], pad_id: int, *, max_batch: int = 32, max_tokens: int = 2048
) -> tuple[float, int]:
    """(mean cross-entropy in nats per answer token, answer tokens) of encoded examples."""
    sums = torch.zeros(2, dtype=torch.float64)
    for indices, counts in spread(list(batches_by_length(items, max_batch, max_tokens)), backend):
        batch = collate([items[index] for index in indices], pad_id)
        _, ce = backend.run("features", batch)
        if counts:
            sums += torch.tensor([float(ce.double().sum()), batch.answer_tokens], dtype=torch.float64)
    total, tokens = backend.all_reduce(sums).tolist()
    return total / tokens if tokens else math.nan, round(tokens)


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Moments of tuned against base features on a held-out set, and of base against base in other batch shapes (the measured null)."""

    moments: FeatureMoments
    null: FeatureMoments


@torch.no_grad()
def measure_drift(backend: Backend, items: Sequence[Encoded], pad_id: int, *, max_batch: int = 32, max_tokens: int = 2048) -> Drift:
    """Run the set with the adapter off (T), on (P), and off again in batches of a third the size (the null). A collective."""
    moments, null = FeatureMoments(), FeatureMoments()
    model = backend.objective.model
    for indices, counts in spread(list(batches_by_length(items, max_batch, max_tokens)), backend):
        batch = collate([items[index] for index in indices], pad_id)
        with model.disable_adapter():  # type: ignore[operator]
            base, base_ce = backend.run("features", batch)
            parts = _thirds(indices)
            # Always three passes, so that workers with batches of other sizes stay in step.
            pieces = [
                backend.run("features", collate([items[index] for index in part], pad_id)) for part in parts + parts[:1] * (3 - len(parts))
            ]
            pieces = pieces[: len(parts)]
        now, now_ce = backend.run("features", batch)
        if counts:
            rows = batch.target_rows
            moments += feature_moments(base, now, base_ce, now_ce, rows)
            null += feature_moments(
                base, torch.cat([piece[0] for piece in pieces]), base_ce, torch.cat([piece[1] for piece in pieces]), rows
            )
    sums = backend.all_reduce(torch.tensor([*moments.to_list(), *null.to_list()], dtype=torch.float64)).tolist()
    half = len(sums) // 2
    return Drift(moments=FeatureMoments.from_list(sums[:half]), null=FeatureMoments.from_list(sums[half:]))


def _thirds(indices: list[int]) -> list[list[int]]:
    """Up to three consecutive parts of a batch."""
    size = -(-len(indices) // 3)
    return [indices[start : start + size] for start in range(0, len(indices), size)]
