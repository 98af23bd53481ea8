"""Is the shape regularizer worth it here? The gating reading of the PRISM paper, App. H, off the lambda = 0 trials alone.

The paper: regularizing is indicated when (i) Omega drifts substantially during fine-tuning and (ii) the forgetting downstream is
dominated by shape. Made into rules, per format, over the good trials with lambda = 0 (k of them):

  (i)  mean(1 - Omega) > 10 x its null, and >= 0.01.
       The null is measured: the base against itself at another batch shape, which only rounding separates; the largest of the k is
       taken, and never less than 2^-23, the float32 spacing next to 1. Ten times keeps every printed digit but the first clear of it.
       0.01 is the headroom: the paper's settings at 0.009 and 0.001 showed no benefit, the one at 0.094 showed -19 % (Table 22).
  (ii) mean(shape_term) > mean(scale_term), and mean|ΔR| > 2 SE, and mean ΔR > 0.
       SE^2 = (mean paired SE)^2 + var(|ΔR| over trials)/k. The first part is not divided by k: the trials share the benchmark's
       examples, so that more trials do not average its sampling error away. A benchmark that became better is not forgetting.

Undecided: fewer than 2 such trials, fewer than 30 benchmark examples, a number missing, or |ΔR| within 2 SE while |ΔR| + 2 SE still
allows more than 0.02 nats (the paper's evaluation noise floor): a small n must not read as a "no".
Where the sweep has lambda > 0 trials, their measured effect stands beside the prediction; it never changes the verdict.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import pandas as pd

from prism_ray.core.config import Config

NULL_FACTOR = 10.0
NULL_FLOOR = 2.0**-23
HEADROOM = 0.01
SIGMAS = 2.0
MATERIAL_NATS = 0.02
MIN_TRIALS = 2
MIN_EXAMPLES = 30

RULE = (
    f"(i) mean 1-Omega > {NULL_FACTOR:g} x its measured null and >= {HEADROOM:g}; "
    f"(ii) mean shape term > mean scale term and mean |ΔR| > {SIGMAS:g} SE with ΔR > 0; "
    f"undecided below {MIN_TRIALS} trials at lambda = 0 or {MIN_EXAMPLES} benchmark examples"
)

Decision = Literal["worth it", "not indicated", "undecided"]


class LambdaEffect(Config):
    """What one lambda > 0 did to mean |ΔR|, measured in this sweep. Nats per answer token; `relative_change` < 0 means it helped.

    Trials are paired with the lambda = 0 trial of the same rank and learning rate; where no such pair exists, all trials of both
    sides are compared (`pairs` = 0). `relative_change` is missing where the lambda = 0 value is itself within its noise, and its
    standard error leaves out the noise of the denominator.
    """

    penalty: str
    lambda_: float
    trials: int
    pairs: int
    mean_abs_delta_r: float
    mean_abs_delta_r_se: float | None
    mean_one_minus_omega: float | None
    change: float
    change_se: float | None
    relative_change: float | None
    relative_change_se: float | None
    above_noise: bool


class GatingReading(Config):
    """The reading of one format; None stands for what could not be measured. The rules are the module's."""

    format: str
    trials: int
    tokens: int
    examples: int
    mean_one_minus_omega: float | None
    null: float | None
    drift_ratio: float | None
    drift_above_noise: bool | None
    drift_has_headroom: bool | None
    mean_delta_r: float | None
    mean_abs_delta_r: float | None
    mean_abs_delta_r_se: float | None
    mean_shape_term: float | None
    mean_scale_term: float | None
    forgetting_above_noise: bool | None
    shape_dominated: bool | None
    decision: Decision
    verdict: str
    effects: tuple[LambdaEffect, ...] = ()
    rule: str = RULE


class _Mean(NamedTuple):
    value: float
    se: float | None


def gating(trials: pd.DataFrame) -> list[GatingReading]:
    """One reading per format that occurs in `trials`, in name order; a format without good lambda = 0 trials reads undecided."""
    formats = sorted({str(name) for name in trials["format"] if not pd.isna(name) and str(name)})
    good = trials[(trials["state"] == "good") & _number(trials, "delta_ce").notna()]
    return [_read(name, good[good["format"] == name]) for name in formats]


def _read(name: str, good: pd.DataFrame) -> GatingReading:
    strength = _number(good, "lambda_")
    plain, regularized = good[strength == 0], good[strength > 0]
    drift, null = _mean(plain, "one_minus_omega"), _number(plain, "one_minus_omega_null").max()
    noise = None if pd.isna(null) else max(float(null), NULL_FLOOR)
    loss = _mean_abs_loss(plain)
    signed, shape, scale = _mean(plain, "delta_ce"), _mean(plain, "shape_term"), _mean(plain, "scale_term")
    examples, tokens = _least(plain, "benchmark_examples"), _least(plain, "benchmark_tokens")

    decision: Decision
    decision, why = "undecided", ""
    if len(plain) < MIN_TRIALS or examples < MIN_EXAMPLES:
        why = f"n too small ({len(plain)} good at lambda = 0, {examples} benchmark examples; at least {MIN_TRIALS} and {MIN_EXAMPLES} are needed)"
    elif drift is None or noise is None or loss is None or loss.se is None or shape is None or scale is None or signed is None:
        why = "1-Omega, its null, the paired standard error, or the shape and scale terms were not measured in every such trial"
    elif drift <= NULL_FACTOR * noise:
        decision, why = "not indicated", f"shape drift 1-Omega = {drift:.2g} is not above {NULL_FACTOR:g} x its null {noise:.2g}"
    elif drift < HEADROOM:
        decision, why = "not indicated", f"shape drift 1-Omega = {drift:.2g} is below {HEADROOM:g}: no headroom to repair"
    elif loss.value <= SIGMAS * loss.se:
        small = loss.value + SIGMAS * loss.se <= MATERIAL_NATS
        decision = "not indicated" if small else "undecided"
        reading = f"|ΔR| = {loss.value:.3f} ± {loss.se:.3f} nats is within its noise"
        why = f"{reading} and below {MATERIAL_NATS:g} nats" if small else f"n too small ({reading} over {examples} examples)"
    elif signed <= 0:
        decision, why = "not indicated", f"the base lost nothing (ΔR = {signed:+.3f} nats: the benchmark became better)"
    elif shape <= scale:
        decision, why = "not indicated", f"the drift is scale-dominated (scale term {scale:.3g} >= shape term {shape:.3g})"
    else:
        decision = "worth it"
        why = (
            f"shape drift 1-Omega = {drift:.2g} is {drift / noise:,.0f} x its null, the shape term {shape:.3g} exceeds the scale term "
            f"{scale:.3g}, and the base lost {loss.value:.3f} ± {loss.se:.3f} nats"
        )
    lead = "regularizing is worth it here" if decision == "worth it" else decision
    return GatingReading(
        format=name,
        trials=len(plain),
        tokens=tokens,
        examples=examples,
        mean_one_minus_omega=drift,
        null=None if pd.isna(null) else float(null),
        drift_ratio=None if drift is None or noise is None else drift / noise,
        drift_above_noise=None if drift is None or noise is None else drift > NULL_FACTOR * noise,
        drift_has_headroom=None if drift is None else drift >= HEADROOM,
        mean_delta_r=signed,
        mean_abs_delta_r=None if loss is None else loss.value,
        mean_abs_delta_r_se=None if loss is None else loss.se,
        mean_shape_term=shape,
        mean_scale_term=scale,
        forgetting_above_noise=None if loss is None or loss.se is None else loss.value > SIGMAS * loss.se,
        shape_dominated=None if shape is None or scale is None else shape > scale,
        decision=decision,
        verdict=f"{lead}: {why}",
        effects=tuple(
            _effect(str(group["penalty"].iloc[0]), float(group["lambda_"].iloc[0]), group, plain)
            for _, group in regularized.assign(penalty=regularized["penalty"].fillna("")).groupby(["penalty", "lambda_"])
            if len(plain)
        ),
    )


def _effect(penalty: str, strength: float, group: pd.DataFrame, plain: pd.DataFrame) -> LambdaEffect:
    pairs = group.merge(plain, on=["rank", "learning_rate"], suffixes=("", "_0"))
    # Repeated trials of one rank and learning rate pair more than once; they are no more evidence than the smaller side has.
    count = min(pairs["trial_id"].nunique(), pairs["trial_id_0"].nunique())
    after = _mean_abs_loss(group)
    assert after is not None  # groupby gives no empty group, and gating() kept only trials with a delta_ce
    if len(pairs):
        difference = _number(pairs, "delta_ce").abs() - _number(pairs, "delta_ce_0").abs()
        sampling = (_number(pairs, "delta_ce_se") ** 2 + _number(pairs, "delta_ce_se_0") ** 2).mean(skipna=False)
        change, change_se = float(difference.mean()), _standard_error(float(sampling), difference, count)
        reference = _mean_abs_loss(pairs, "_0")
    else:
        reference = _mean_abs_loss(plain)
        assert reference is not None
        change = after.value - reference.value
        change_se = None if after.se is None or reference.se is None else math.hypot(after.se, reference.se)
    assert reference is not None
    firm = reference.se is not None and reference.value > SIGMAS * reference.se
    return LambdaEffect(
        penalty=penalty,
        lambda_=strength,
        trials=len(group),
        pairs=count,
        mean_abs_delta_r=after.value,
        mean_abs_delta_r_se=after.se,
        mean_one_minus_omega=_mean(group, "one_minus_omega"),
        change=change,
        change_se=change_se,
        relative_change=change / reference.value if firm else None,
        relative_change_se=change_se / reference.value if firm and change_se is not None else None,
        above_noise=change_se is not None and abs(change) > SIGMAS * change_se,
    )


def _number(table: pd.DataFrame, column: str) -> pd.Series:
    numbers = pd.to_numeric(table[column], errors="coerce").astype("float64")
    return numbers.where(numbers.abs() < math.inf)


def _mean(table: pd.DataFrame, column: str) -> float | None:
    """Mean over all rows; a row without the number makes it missing, since a mean over the rest would have another n."""
    values = _number(table, column)
    return float(values.mean()) if len(values) and values.notna().all() else None


def _least(table: pd.DataFrame, column: str) -> int:
    least = _number(table, column).min()
    return 0 if pd.isna(least) else int(least)


def _mean_abs_loss(table: pd.DataFrame, suffix: str = "") -> _Mean | None:
    losses = _number(table, f"delta_ce{suffix}").abs()
    if losses.empty:
        return None
    paired = _number(table, f"delta_ce_se{suffix}")
    return _Mean(float(losses.mean()), _standard_error(float(paired.mean()) ** 2 if paired.notna().all() else math.nan, losses))


def _standard_error(sampling_variance: float, values: pd.Series, count: int | None = None) -> float | None:
    """sqrt(sampling variance + variance between trials / count); count defaults to the number of values."""
    if math.isnan(sampling_variance):
        return None
    between = float(values.var(ddof=1)) / (count or len(values)) if len(values) > 1 else 0.0
    return math.sqrt(sampling_variance + between)
