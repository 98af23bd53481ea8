"""Does a probe of the base still work on a variant, and if not, which remedy mends it (cosine-noise-floor, appendix, table 5)?

The probe is the difference-in-means of the base: unit direction w, threshold t midway between the projected class means, fitted on one half
of each class. On the other half, with x = w . h_base - t and y = w . h_variant - t the decision values of the same samples,

    y = shift + slope x + residual,    R^2 = corr(x, y)^2,    AUROC of x and of y,    accuracy of y > 0 and of y > recalibrated threshold.

A scale-invariant statistic cannot tell a translation from an attenuation: AUROC is *exactly* the same under the first, and also under an
attenuation of all of w; it moves only where w mixes the attenuated direction with others. Where a direction v with gain g carries the share

    c = cov((w . v)(v . h), x) / var(x)    of the decision variable's variance,    slope = 1 - c (1 - g)

exactly, so the slope detects an attenuation and understates it; the regression along v itself gives g.

`kind`, every comparison against 2 standard errors of its own:

    undefined     no class direction in the variant, or no spread of x
    rotation      the variant's direction is below its own split-half null (`noise.direction_test`)
    translation   shift only
    attenuation   slope < 1 and no shift; also a rotation that is too small to be called, for a turn by theta has slope cos(theta)
    amplification slope > 1 and no shift
    scatter       neither, but AUROC moved: the variant adds noise along w, which leaves the slope of y on x at 1
    mixed         a shift together with a slope other than 1 or with another AUROC
    unchanged     none of these: not distinguishable from the base at this n, which is no claim of equality

A variant that differs by noise alone comes out as something else about once in ten, for shift and slope are two tests at 5 % each; equal
activations always come out as unchanged.

Legend: m rows of the half that is evaluated (both classes), d hidden size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from scipy.optimize import brentq
from scipy.stats import rankdata

from prism_ray.core.errors import DataError
from prism_ray.risk.noise import (
    UNIT_ROUNDOFF,
    DirectionTest,
    DirectionVerdict,
    class_rows,
    direction_test,
    half_memberships,
    paired_rows,
    subspace_gain,
    zero_norm,
)

Kind = Literal["unchanged", "translation", "attenuation", "amplification", "scatter", "rotation", "mixed", "undefined"]

REMEDIES: dict[Kind, str] = {
    "unchanged": "no change above the noise at this n: keep the probe",
    "translation": "recalibrate the threshold on the variant: the ranking is the base's",
    "attenuation": "recalibrating the threshold does not help: rescale the decision values by 1 / slope, or refit the probe on the variant",
    "amplification": "the threshold stands: rescale the decision values by 1 / slope where they are read as magnitudes",
    "scatter": "neither threshold nor scale moved but the ranking did: refit the probe on the variant, or quantize this layer less",
    "rotation": "refit the probe on the variant: its class direction is another one",
    "mixed": "refit the probe on the variant: recalibrating the threshold mends the shift only",
    "undefined": "the variant has no class direction or the base's decision values no spread: look at the activations first",
}

Z95 = 1.959963984540054


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A proportion, its 95 % interval [low, high], and the n rows that it was read from."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Probe:
    """Unit direction float64 [d] from class b to class a, and the threshold on it: class a where `decision_values` > 0."""

    direction: torch.Tensor
    threshold: float
    threshold_se: float

    def decision_values(self, h: torch.Tensor) -> torch.Tensor:
        """w . h - t in float64 [n], for h [n, d]."""
        return h.to(torch.float64) @ self.direction - self.threshold


@dataclass(frozen=True, kw_only=True)
class Regression:
    """y on x: slope and intercept (`shift`, the value of y at x = 0, the base's threshold), heteroscedastic standard errors (HC1), R^2, n
    rows.

    Computed from y - x, so equal inputs give slope 1 and shift 0 exactly. All NaN where x has no spread; R^2 is 0 where only y has none.
    """

    slope: float
    slope_se: float
    shift: float
    shift_se: float
    r2: float
    n: int


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A base probe on a variant; the module docstring has the meaning of every kind.

    n_fit, n_eval: rows of both classes in the two halves. regression: decision values of variant on base; its standard errors also hold the
    rounding of float64 decision values and, for the shift, the threshold's own sampling error times 1 - slope. auroc_base, auroc_variant:
    of x, of y; auroc_refit: of a probe refitted on the variant's fit half, None where the variant has no direction there. auroc_change:
    variant - base, refit_gain: refit - variant, each with its paired DeLong standard error; a refit_gain above 2 of them says that the
    ranking is still there along another direction, also where the turn is too small to be called a rotation. accuracy_base: x > 0;
    accuracy_transferred: y > 0; accuracy_recalibrated: y > recalibrated_threshold, the midpoint of y's class means in the fit half.
    subspace_gain (not centred), projected_slope (g itself), variance_share (c): along the `direction` of the call, by default the probe's
    own, where c = 1. rotation: the direction test on all rows.
    """

    kind: Kind
    remedy: str
    n_fit: int
    n_eval: int
    d: int
    regression: Regression
    auroc_base: Estimate
    auroc_variant: Estimate
    auroc_refit: Estimate | None
    auroc_change: float
    auroc_change_se: float
    refit_gain: float
    refit_gain_se: float
    accuracy_base: Estimate
    accuracy_transferred: Estimate
    accuracy_recalibrated: Estimate
    recalibrated_threshold: float
    subspace_gain: float
    projected_slope: float
    variance_share: float
    rotation: DirectionTest


def fit_probe(a: torch.Tensor, b: torch.Tensor) -> Probe:
    """Difference-in-means probe of A [n_a, d] and B [n_b, d], two rows a class at least.

    threshold_se: sampling error of the midpoint along w. `DataError` for fewer rows, unequal d, NaN or Inf, and for equal class means.
    """
    rows_a, rows_b = class_rows(a, b, "probe", 2)
    mean_a, mean_b = rows_a.mean(dim=0), rows_b.mean(dim=0)
    delta = mean_a - mean_b
    if float(delta.norm()) <= zero_norm(rows_a, rows_b):
        raise DataError("both classes have the same mean, there is no direction to fit", where="probe", remedy="look at labels and layer")
    w = delta / delta.norm()
    spread = float((rows_a @ w).var()) / len(rows_a) + float((rows_b @ w).var()) / len(rows_b)
    return Probe(direction=w, threshold=float((mean_a + mean_b) @ w) / 2, threshold_se=math.sqrt(spread) / 2)


def wilson(successes: int, n: int) -> Estimate:
    """Proportion with its Wilson score interval at 95 %; n > 0."""
    p, z2 = successes / n, Z95 * Z95
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # At p = 0 and 1 the bound is p itself; the difference of equal numbers would leave rounding.
    return Estimate(value=p, low=0.0 if successes == 0 else centre - half, high=1.0 if successes == n else centre + half, n=n)


def auroc(scores_a: torch.Tensor, scores_b: torch.Tensor) -> float:
    """P(a score of class a exceeds one of class b), ties counted half; exact for [n_a] and [n_b] scores, by mid-ranks."""
    n_a, n_b = len(scores_a), len(scores_b)
    ranks = rankdata(torch.cat([scores_a, scores_b]).cpu().numpy())
    return float(ranks[:n_a].sum() - n_a * (n_a + 1) / 2) / (n_a * n_b)


def auroc_interval(value: float, n_a: int, n_b: int) -> tuple[float, float]:
    """95 % score interval of an AUROC: Hanley and McNeil's variance with equalized class sizes, solved as Wilson's is (Newcombe 2006,
    method 5).

    Unlike value +- 2 se it stays in [0, 1] and keeps a width at 0 and 1, where a well separated probe of a real model lies.
    """

    def lower(value: float) -> float:
        if value <= 0:
            return 0.0
        size = (n_a + n_b) / 2 - 1

        def gap(theta: float) -> float:
            spread = 1 + size * (1 - theta) / (2 - theta) + size * theta / (1 + theta)
            return value - theta - Z95 * math.sqrt(theta * (1 - theta) * spread / (n_a * n_b))

        # At theta = value = 1 the gap is 0 by the variance's own zero, which is not the root that is meant.
        return float(brentq(gap, 0.0, min(value, 1 - 1e-9), xtol=1e-12))

    return lower(value), 1 - lower(1 - value)


def _auroc_estimate(scores_a: torch.Tensor, scores_b: torch.Tensor) -> Estimate:
    value = auroc(scores_a, scores_b)
    low, high = auroc_interval(value, len(scores_a), len(scores_b))
    return Estimate(value=value, low=low, high=high, n=len(scores_a) + len(scores_b))


def _placements(scores_a: torch.Tensor, scores_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """DeLong's components: the share of the other class below each score of a [n_a] and of b [n_b], ties half."""
    n_a, n_b = len(scores_a), len(scores_b)
    a, b = scores_a.cpu().numpy(), scores_b.cpu().numpy()
    ranks = torch.from_numpy(rankdata(torch.cat([scores_a, scores_b]).cpu().numpy()))
    own_a, own_b = torch.from_numpy(rankdata(a)), torch.from_numpy(rankdata(b))
    return (ranks[:n_a] - own_a) / n_b, (ranks[n_a:] - own_b) / n_a


def auroc_change_se(base_a: torch.Tensor, base_b: torch.Tensor, variant_a: torch.Tensor, variant_b: torch.Tensor) -> float:
    """DeLong standard error of AUROC(variant) - AUROC(base) on the same samples, [n_a] and [n_b] scores of two rows a class at least; 0 for
    equal ranks.
    """
    change = [now - then for now, then in zip(_placements(variant_a, variant_b), _placements(base_a, base_b), strict=True)]
    return math.sqrt(sum(float(part.var()) / len(part) for part in change))


def regress(x: torch.Tensor, y: torch.Tensor, rounding: float = 0.0) -> Regression:
    """Least squares of y on x, float64 [n], n > 2. rounding: bound on the rounding error of each value, which enters the standard errors in
    quadrature.

    `DataError` for fewer rows.
    """
    n = len(x)
    if n <= 2 or n != len(y):
        raise DataError(f"{n} and {len(y)} decision values", where="regression", remedy="give the same rows of both models, 3 at least")
    centred, change = x - x.mean(), y - x
    spread = float(centred.square().sum())
    if math.sqrt(spread / n) <= rounding or spread == 0:
        return Regression(slope=math.nan, slope_se=math.nan, shift=math.nan, shift_se=math.nan, r2=math.nan, n=n)
    tilt = float((centred * change).sum()) / spread
    shift = float(change.mean()) - tilt * float(x.mean())
    squares = (change - shift - tilt * x).square() * (n / (n - 2))
    # Influence of row i on slope and on the intercept at x = 0.
    on_slope = centred / spread
    on_shift = 1 / n - float(x.mean()) * on_slope
    per_sd = rounding / math.sqrt(spread / n)
    spread_y = float((y - y.mean()).square().sum())
    correlated = float((centred * (y - y.mean())).sum()) ** 2 / (spread * spread_y) if math.sqrt(spread_y / n) > rounding else 0.0
    return Regression(
        slope=1 + tilt,
        slope_se=math.hypot(math.sqrt(float((squares * on_slope.square()).sum())), per_sd),
        shift=shift,
        shift_se=math.hypot(math.sqrt(float((squares * on_shift.square()).sum())), rounding + abs(float(x.mean())) * per_sd),
        r2=min(1.0, correlated),
        n=n,
    )


def variance_share(h: torch.Tensor, probe: Probe, direction: torch.Tensor) -> float:
    """c: share of the variance of the probe's decision values on h [n, d] that `direction` [d] (any norm) carries; NaN where they have no
    variance.
    """
    v = direction.to(torch.float64) / direction.to(torch.float64).norm()
    x = probe.decision_values(h)
    carried = float(probe.direction @ v) * (h.to(torch.float64) @ v)
    centred = x - x.mean()
    total = float(centred.square().sum())
    return float((carried * centred).sum()) / total if total > 0 else math.nan


def transfer_kind(regression: Regression, auroc_change: float, auroc_change_se: float, verdict: DirectionVerdict) -> Kind:
    """The classification of the module docstring, from the numbers alone."""
    if verdict == "undefined" or math.isnan(regression.slope):
        return "undefined"
    if verdict == "rotation":
        return "rotation"
    scaled = abs(regression.slope - 1) > 2 * regression.slope_se
    shifted = abs(regression.shift) > 2 * regression.shift_se
    ranked = abs(auroc_change) > 2 * auroc_change_se
    if shifted:
        return "mixed" if scaled or ranked else "translation"
    if scaled:
        return "attenuation" if regression.slope < 1 else "amplification"
    return "scatter" if ranked else "unchanged"


def _accuracy(scores_a: torch.Tensor, scores_b: torch.Tensor, threshold: float) -> Estimate:
    right = int((scores_a > threshold).sum()) + int((scores_b <= threshold).sum())
    return wilson(right, len(scores_a) + len(scores_b))


def _refit(fit: list[torch.Tensor], held: list[torch.Tensor], y_a: torch.Tensor, y_b: torch.Tensor) -> tuple[Estimate | None, float, float]:
    """AUROC on `held` (a, b) of a probe of `fit` (a, b), and its gain over the scores y with its standard error; (None, NaN, NaN) without
    direction.
    """
    try:
        probe = fit_probe(*fit)
    except DataError:
        return None, math.nan, math.nan
    z_a, z_b = (probe.decision_values(rows) for rows in held)
    estimate = _auroc_estimate(z_a, z_b)
    return estimate, estimate.value - auroc(y_a, y_b), auroc_change_se(y_a, y_b, z_a, z_b)


def transfer_test(
    base_a: torch.Tensor,
    base_b: torch.Tensor,
    variant_a: torch.Tensor,
    variant_b: torch.Tensor,
    *,
    direction: torch.Tensor | None = None,
    splits: int = 200,
    seed: int = 0,
    rotation: DirectionTest | None = None,
) -> Transfer:
    """Fit a probe on half of the base's rows, read base and variant with it on the other half, and name what happened.

    base_a, variant_a: [n_a, d]; base_b, variant_b: [n_b, d]; row i of a variant block is the sample of row i of its base block. direction:
    [d], the direction whose gain is asked, by default the probe's. rotation: the direction test of these rows where it has been made already.
    splits: of that test, which uses all rows. seed: of both kinds
    of halves. `DataError` below 4 rows a class, for shapes that differ, for NaN or Inf, for a zero direction, and where the base's class
    means are equal.
    """
    rows = paired_rows(base_a, base_b, variant_a, variant_b)
    first_a, first_b = (member[0].bool().to(rows[0].device) for member in half_memberships(len(rows[0]), len(rows[1]), 2, seed))
    firsts = (first_a, first_b, first_a, first_b)
    fit = [block[first] for block, first in zip(rows, firsts, strict=True)]
    held = [block[~first] for block, first in zip(rows, firsts, strict=True)]
    d = rows[0].shape[1]

    probe = fit_probe(fit[0], fit[1])
    v = probe.direction if direction is None else direction.to(probe.direction)
    if v.shape != (d,) or not bool(torch.isfinite(v).all()) or float(v.norm()) == 0:
        raise DataError(
            f"a direction of shape {tuple(v.shape)} or of norm 0", where="direction", remedy=f"give {d} finite numbers, not all 0"
        )

    x_a, x_b, y_a, y_b = (probe.decision_values(block) for block in held)
    # An inner product of d terms with a unit vector is off by d 2^-53 ||h||, the subtraction of t by one more rounding; y - x carries two
    # of them.
    rounding = 2 * (d + 1) * UNIT_ROUNDOFF * (max(float(block.norm(dim=1).max()) for block in held) + abs(probe.threshold))
    line = regress(torch.cat([x_a, x_b]), torch.cat([y_a, y_b]), rounding)
    # The shift is read at the base's threshold t; where the slope is not 1 it moves by (1 - slope) with every error of t.
    line = Regression(**{**vars(line), "shift_se": math.hypot(line.shift_se, (1 - line.slope) * probe.threshold_se)})

    base_estimate, variant_estimate = _auroc_estimate(x_a, x_b), _auroc_estimate(y_a, y_b)
    change, change_se = variant_estimate.value - base_estimate.value, auroc_change_se(x_a, x_b, y_a, y_b)
    recalibrated = float(probe.decision_values(fit[2]).mean() + probe.decision_values(fit[3]).mean()) / 2
    refit, refit_gain, refit_gain_se = _refit(fit[2:], held[2:], y_a, y_b)
    if rotation is None:
        rotation = direction_test(base_a, base_b, variant_a, variant_b, splits=splits, seed=seed)
    kind = transfer_kind(line, change, change_se, rotation.verdict)
    held_base, held_variant = torch.cat(held[:2]), torch.cat(held[2:])
    return Transfer(
        kind=kind,
        remedy=REMEDIES[kind],
        n_fit=len(fit[0]) + len(fit[1]),
        n_eval=line.n,
        d=d,
        regression=line,
        auroc_base=base_estimate,
        auroc_variant=variant_estimate,
        auroc_refit=refit,
        auroc_change=change,
        auroc_change_se=change_se,
        refit_gain=refit_gain,
        refit_gain_se=refit_gain_se,
        accuracy_base=_accuracy(x_a, x_b, 0.0),
        accuracy_transferred=_accuracy(y_a, y_b, 0.0),
        accuracy_recalibrated=_accuracy(y_a, y_b, recalibrated),
        recalibrated_threshold=recalibrated,
        subspace_gain=subspace_gain(held_base, held_variant, v),
        projected_slope=regress(held_base @ v, held_variant @ v, rounding).slope,
        variance_share=variance_share(held_base, probe, v),
        rotation=rotation,
    )
