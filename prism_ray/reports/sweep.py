"""The tables of a sweep and what is read off them: the best trial, the Pareto front, the gating of App. H.

`trials` has one row a trial (`TRIAL_COLUMNS`), `history` one row a trial and logged step (`HISTORY_COLUMNS`). Losses are nats per answer
token; `delta_ce` = R_t - R_0 on the held-out benchmark, with its paired standard error over the same examples. A number that a trial
never reached is missing (NaN), and a missing or infinite number never wins anything. Columns beyond the schema are kept, behind it.

Accuracies carry Wilson 95 % intervals, which stay inside [0, 1] and keep their coverage near 0 and 1 at small n.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal, NamedTuple

import pandas as pd
from scipy.stats import binomtest

from prism_ray.core.config import suggest
from prism_ray.core.errors import DataError
from prism_ray.core.files import atomic_path
from prism_ray.reports.gating import GatingReading, LambdaEffect, gating

__all__ = [
    "HISTORY_COLUMNS",
    "STATES",
    "TRIAL_COLUMNS",
    "GatingReading",
    "Interval",
    "LambdaEffect",
    "accuracy_interval",
    "best_trial",
    "conform_history",
    "conform_trials",
    "gating",
    "good_trials",
    "pareto",
    "wilson",
    "write_tables",
]

STATES = ("good", "diverged", "error", "killed", "stopped_early", "never_reported", "infeasible")
CONFIDENCE = 0.95

# Int64 (nullable) keeps counts whole in the CSV where a bad trial has none.
TRIAL_COLUMNS = {
    "trial_id": "str",
    "state": "str",
    "reason": "str",
    "format": "str",
    "rank": "Int64",
    "lambda_": "float64",
    "penalty": "str",
    "learning_rate": "float64",
    "steps": "Int64",
    "train_seconds": "float64",
    "tokens_per_second": "float64",
    "trainable_parameters": "Int64",
    "validation_accuracy": "float64",
    "validation_n": "Int64",
    "validation_loss": "float64",
    "test_accuracy": "float64",
    "test_n": "Int64",
    "base_test_accuracy": "float64",
    "benchmark_ce_base": "float64",
    "benchmark_ce": "float64",
    "delta_ce": "float64",
    "delta_ce_se": "float64",
    "benchmark_tokens": "Int64",
    "benchmark_examples": "Int64",
    "one_minus_omega": "float64",
    "one_minus_omega_null": "float64",
    "rho_base": "float64",
    "rho": "float64",
    "delta_rho": "float64",
    "scale_term": "float64",
    "shape_term": "float64",
    "adapter_path": "str",
}
HISTORY_COLUMNS = {
    "trial_id": "str",
    "step": "Int64",
    "loss": "float64",
    "task_loss": "float64",
    "penalty_value": "float64",
    "omega": "float64",
    "delta_rho": "float64",
    "learning_rate": "float64",
    "tokens_per_second": "float64",
    "validation_accuracy": "float64",
    "validation_loss": "float64",
}


class Interval(NamedTuple):
    """A confidence interval [low, high] of a proportion."""

    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def overlaps(self, other: Interval) -> bool:
        return self.low <= other.high and other.low <= self.high


def wilson(k: int, n: int) -> Interval:
    """Wilson 95 % interval of k successes in n; n = 0 says nothing, so it gives [0, 1]. k outside 0..n raises ValueError."""
    if not 0 <= k <= n:
        raise ValueError(f"{k} successes in {n} attempts")
    if n == 0:
        return Interval(0.0, 1.0)
    found = binomtest(k, n).proportion_ci(confidence_level=CONFIDENCE, method="wilson")
    return Interval(float(found.low), float(found.high))


def accuracy_interval(accuracy: float, n: float) -> Interval | None:
    """Wilson interval of an accuracy measured on n examples; None where either is missing."""
    if pd.isna(accuracy) or pd.isna(n) or n <= 0:
        return None
    return wilson(min(max(round(float(accuracy) * int(n)), 0), int(n)), int(n))


def conform_trials(trials: pd.DataFrame) -> pd.DataFrame:
    """A copy with the schema's order and types; DataError names a missing column, an unknown state or a repeated trial_id."""
    table = _conform(trials, TRIAL_COLUMNS, "trials")
    for row, state in enumerate(table["state"]):
        if state not in STATES:
            raise DataError(f"unknown trial state '{state}'", where=f"trials row {row}", remedy=f"known: {', '.join(STATES)}")
    repeated = table["trial_id"][table["trial_id"].duplicated()]
    if len(repeated):
        raise DataError(f"trial_id '{repeated.iloc[0]}' appears twice", where=f"trials row {repeated.index[0]}")
    return table


def conform_history(history: pd.DataFrame) -> pd.DataFrame:
    """A copy with the schema's order and types; DataError names a missing column. A frame without rows may lack them all."""
    if history.empty:
        history = history.reindex(columns=[*HISTORY_COLUMNS, *(c for c in history.columns if c not in HISTORY_COLUMNS)])
    return _conform(history, HISTORY_COLUMNS, "history")


def write_tables(folder: Path | str, trials: pd.DataFrame, history: pd.DataFrame) -> list[Path]:
    """Write trials.parquet, trials.csv and history.parquet into `folder`, each atomically; returns their paths.

    Nothing is written when either frame breaks the schema (DataError). In the CSV a missing number is an empty field.
    """
    folder = Path(folder)
    trial_table, history_table = conform_trials(trials), conform_history(history)
    paths = [folder / "trials.parquet", folder / "trials.csv", folder / "history.parquet"]
    with atomic_path(paths[0]) as temporary:
        trial_table.to_parquet(temporary, index=False)
    with atomic_path(paths[1]) as temporary:
        trial_table.to_csv(temporary, index=False, lineterminator="\n")
    with atomic_path(paths[2]) as temporary:
        history_table.to_parquet(temporary, index=False)
    return paths


def good_trials(trials: pd.DataFrame) -> pd.DataFrame:
    """The rows whose state is good; an early-stopped trial is none, since it never had its full budget."""
    return trials[trials["state"] == "good"]


def best_trial(
    trials: pd.DataFrame, metric: str = "validation_accuracy", *, mode: Literal["max", "min"] = "max", tolerance: float = 0.0
) -> pd.Series | None:
    """The good trial with the best `metric`, or None where no good trial has a finite one.

    Values within `tolerance` of the best are ties. The default is 0: only equal values tie, because breaking ties over a whole Wilson
    half-width would let a worse trial win by noise in another column (the report lists such trials beside the winner instead).
    Ties go to the smaller |delta_ce|, then the smaller rank, then the first trial_id; a missing value loses its tie.
    """
    if metric not in trials.columns:
        raise DataError(f"no column '{metric}'", where="trials", remedy=suggest(metric, [str(c) for c in trials.columns]))
    if tolerance < 0:
        raise ValueError(f"tolerance {tolerance} is negative")
    pool = good_trials(trials)
    value = _finite(pool[metric]) * (1 if mode == "max" else -1)
    if value.dropna().empty:
        return None
    pool = pool[value >= value.max() - tolerance]
    order = pd.DataFrame({"loss": _finite(pool["delta_ce"]).abs(), "rank": _finite(pool["rank"]), "id": pool["trial_id"].astype(str)})
    return pool.loc[order.sort_values(["loss", "rank", "id"], na_position="last").index[0]]


def pareto(trials: pd.DataFrame) -> pd.DataFrame:
    """The good trials that no other one dominates, by ascending loss of the base.

    Axes: test_accuracy up, *signed* delta_ce down. Signed, because a benchmark that became better is no loss: the front would
    otherwise punish it as much as an equal damage. A trial is dominated when another is at least as good on both axes and better on
    one; equal points both stay. A trial with a missing value on either axis is on no front. delta_ce is relative to the base of the
    trial's own format, so fronts over several formats compare losses against different bases: pass one format at a time for a front
    that does not.
    """
    pool = good_trials(trials)
    pool = pool[_finite(pool["test_accuracy"]).notna() & _finite(pool["delta_ce"]).notna()]
    points = list(zip(pool["test_accuracy"].astype(float), pool["delta_ce"].astype(float), strict=True))
    keep = [not any(a >= b and c <= d and (a > b or c < d) for a, c in points) for b, d in points]
    return pool[pd.Series(keep, index=pool.index, dtype=bool)].sort_values(["delta_ce", "test_accuracy"], kind="stable")


def _finite(column: pd.Series) -> pd.Series:
    """As float64, with everything that is not a finite number missing."""
    numbers = pd.to_numeric(column, errors="coerce").astype("float64")
    return numbers.where(numbers.abs() < math.inf)


def _conform(frame: pd.DataFrame, columns: dict[str, str], name: str) -> pd.DataFrame:
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise DataError(f"column '{missing[0]}' is missing", where=name, remedy=f"write all of: {', '.join(columns)}")
    table = frame[[*columns, *(c for c in frame.columns if c not in columns)]].reset_index(drop=True)
    for column, kind in columns.items():
        try:
            if kind == "str":
                table[column] = table[column].map(lambda value: "" if pd.isna(value) else str(value)).astype("str")
            elif kind == "Int64":
                table[column] = _finite(table[column]).astype("Int64")
            else:
                table[column] = table[column].astype("float64")
        except (TypeError, ValueError) as error:
            raise DataError(f"not {kind}: {error}", where=f"{name}, column '{column}'") from None
    return table
