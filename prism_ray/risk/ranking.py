"""Does a reading rank variants by what they lost? Spearman per benchmark with its interval, and the rows of the paper's ablation.

Rank correlations of m variants are noisy: the interval is Fisher's z with Bonett and Wright's variance (1 + r^2 / 2) / (m - 3). A mean over benchmarks
carries its standard error over benchmarks (prism-risk-bound §5.2, Table 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import norm, rankdata

ABLATION: dict[str, str] = {
    "one_minus_omega": "shape only, W = I",
    "delta": "shape and scale, W = I",
    "bound": "shape, scale and head, W = I",
    "one_minus_omega_nuclear": "shape only, W = W_N",
    "delta_nuclear": "shape and scale, W = W_N",
    "bound_nuclear": "shape, scale and head, W = W_N",
    "bound_joint": "all, W optimized",
    "bound_mixed": "shape and scale, W = I, and the head's range",
    "bound_range": "range of the features' and of the head's logits",
}
"""Column -> what it measures, in the order of the paper's Table 3."""


@dataclass(frozen=True, kw_only=True)
class Spearman:
    """Rank correlation r of n pairs with a 95 % interval; NaN below 4 pairs or where one side is constant."""

    r: float
    low: float
    high: float
    n: int


def spearman(x: Sequence[float], y: Sequence[float]) -> Spearman:
    """Spearman's r of two equally long sequences, ties sharing their mean rank; pairs with a NaN are left out."""
    pairs = np.asarray([x, y], dtype=np.float64)
    pairs = pairs[:, ~np.isnan(pairs).any(axis=0)]
    n = pairs.shape[1]
    ranks = np.stack([rankdata(row) for row in pairs]) if n else pairs
    if n < 4 or np.ptp(ranks[0]) == 0 or np.ptp(ranks[1]) == 0:
        return Spearman(r=math.nan, low=math.nan, high=math.nan, n=n)
    r = float(np.corrcoef(ranks)[0, 1])
    half = float(norm.ppf(0.975)) * math.sqrt((1 + r * r / 2) / (n - 3))
    z = math.atanh(max(-1 + 1e-12, min(1 - 1e-12, r)))
    return Spearman(r=r, low=math.tanh(z - half), high=math.tanh(z + half), n=n)


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """One row of the ablation: a reading's Spearman per benchmark, their mean and its standard error over benchmarks."""

    reading: str
    per_benchmark: Mapping[str, Spearman]

    @property
    def mean(self) -> float:
        """Unweighted mean over the benchmarks that have one."""
        values = self._values()
        return float(np.mean(values)) if values else math.nan

    @property
    def sem(self) -> float:
        """Standard error of the mean over benchmarks, NaN below two."""
        values = self._values()
        return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan

    def _values(self) -> list[float]:
        return [entry.r for entry in self.per_benchmark.values() if not math.isnan(entry.r)]


def rank_variants(rows: Sequence[Mapping[str, object]], *, readings: Sequence[str] = tuple(ABLATION)) -> list[Ranking]:
    """Rankings of every reading that the rows hold against |delta_ce|. rows: one a (variant, benchmark), with `benchmark` and `delta_ce`."""
    benchmarks = list(dict.fromkeys(str(row["benchmark"]) for row in rows))
    found: list[Ranking] = []
    for reading in readings:
        if not any(reading in row for row in rows):
            continue
        per_benchmark: dict[str, Spearman] = {}
        for benchmark in benchmarks:
            chosen = [row for row in rows if row["benchmark"] == benchmark and reading in row]
            per_benchmark[benchmark] = spearman(
                [_number(row[reading]) for row in chosen], [abs(_number(row["delta_ce"])) for row in chosen]
            )
        found.append(Ranking(reading=reading, per_benchmark=per_benchmark))
    return found


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan
