"""The noise floor of a difference-in-means direction, and whether a variant's direction left it (cosine-noise-floor, §4-5, eq. 1, tables
1-4).

Two classes A [n_a, d], B [n_b, d] of activations, direction dmu = mean A - mean B, sigma^2 the pooled within-class variance per dimension:

    rho^2 = ||dmu||^2 / sigma^2 - 2 d / n        (debiased: a mean difference of pure noise has ||dmu||^2 / sigma^2 = 2 d / n on average)
    kappa = n rho^2 / d,    E[cos of two halves] ~ 1 / (1 + 4 / kappa)        (eq. 1).

Two halves of n / 2 rows a class each have a mean difference with noise 2 sigma^2 / (n / 2) = 4 sigma^2 / n a dimension, hence the 4. For
unequal classes n is the harmonic mean 2 / (1 / n_a + 1 / n_b), because sigma^2 (1 / n_a + 1 / n_b) is then 2 sigma^2 / n.

Which n. The null compares two *independent* directions of n / 2 rows a class; the cosine that it judges is between two directions of all n
rows, and base and variant saw the *same* rows. Without any rotation that cosine is near 1, and for two independent runs at full n it would
be 1 / (1 + 2 / kappa) (Spearman-Brown of eq. 1), both above the null's mean. So the rule `cos < null mean - 2 sd` errs on one known side:
what it calls is more than sampling noise, what it does not call may still have moved, by as much as 1 - null mean + 2 sd. It is a decision
rule, not a calibrated test, and "within noise" is no claim of equality. The null is the variant's own: the base's would assume that both
estimators have the same variance.

Legend: n rows a class, d hidden size, s splits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from prism_ray.core.errors import ConfigError, DataError

DirectionVerdict = Literal["rotation", "within noise", "undefined"]

LEAST_ROWS = 4
UNIT_ROUNDOFF = 2.0**-53


@dataclass(frozen=True, kw_only=True)
class Separation:
    """How far two classes lie apart, in pooled within-class standard deviations.

    n: rows a class, harmonic mean of n_a and n_b; d: hidden size; rho_naive = ||dmu|| / sigma; rho: debiased, 0 where noise alone would
    give more; rho_per_dim = rho / sqrt(d), comparable across hidden sizes; kappa = n rho^2 / d; floor: `closed_form_floor(kappa)`.
    """

    n: float
    d: int
    rho_naive: float
    rho: float
    rho_per_dim: float
    kappa: float
    floor: float


@dataclass(frozen=True, kw_only=True)
class SplitHalfNull:
    """Cosines between the directions of two random halves of the same rows.

    mean, sd: over the splits, sd with splits - 1; both NaN where a half had no direction. n_a, n_b: rows that were halved; cosines:
    [splits].
    """

    mean: float
    sd: float
    n_a: int
    n_b: int
    splits: int
    cosines: tuple[float, ...] = field(repr=False)

    @property
    def call_below(self) -> float:
        """mean - 2 sd: a cosine below it is called a rotation."""
        return self.mean - 2 * self.sd


@dataclass(frozen=True, kw_only=True)
class DirectionTest:
    """A variant's direction against the base's, judged by the variant's own null.

    cosine: between the two directions of all rows, NaN where one is zero; own_null, base_null: split-half nulls of variant and base on the
    same partitions, so that their difference is the activations' and not the draw's; base, own: separations of base and variant;
    subspace_gain: mean |h_variant . v| / mean |h_base . v| over the rows of both classes, v the unit base direction; verdict: 'rotation' if
    cosine < own_null.call_below, else 'within noise', 'undefined' where a direction (of all rows or of a half) is zero.
    """

    cosine: float
    own_null: SplitHalfNull
    base_null: SplitHalfNull
    base: Separation
    own: Separation
    subspace_gain: float
    verdict: DirectionVerdict

    @property
    def floor(self) -> float:
        """Eq. 1 at the base's kappa, as in the paper's table 3; it decides nothing."""
        return self.base.floor

    @property
    def callable_deficit(self) -> float:
        """2 sd of the own null, the paper's smallest callable deficit, counted from the null's *mean*; from a cosine of 1 it is 1 - mean +
        2 sd.
        """
        return 2 * self.own_null.sd

    @property
    def n(self) -> float:
        """Rows a class, harmonic mean."""
        return self.base.n

    @property
    def d(self) -> int:
        """Hidden size."""
        return self.base.d


def closed_form_floor(kappa: float) -> float:
    """1 / (1 + 4 / kappa), the expected cosine between the directions of two halves; 0 for kappa <= 0, 1 for infinite kappa."""
    return 0.0 if kappa <= 0 else 1.0 / (1.0 + 4.0 / kappa)


def finite_rows(h: torch.Tensor, name: str, least: int = 1) -> torch.Tensor:
    """h [n, d] as float64, without gradient. `DataError` for another rank, fewer than `least` rows, d = 0, or a row that holds NaN or Inf."""
    if h.ndim != 2 or h.shape[1] == 0:
        raise DataError(f"activations of shape {tuple(h.shape)}", where=name, remedy="give one row a sample: [n, d], d > 0")
    if h.shape[0] < least:
        raise DataError(f"{h.shape[0]} rows, at least {least} a class are needed", where=name, remedy="add samples of this class")
    rows = h.detach().to(torch.float64)
    bad = (~torch.isfinite(rows).all(dim=1)).nonzero()
    if len(bad):
        raise DataError(
            f"{len(bad)} of {len(rows)} rows hold NaN or Inf", where=f"{name}, row {int(bad[0])}", remedy="drop the row or mend the model"
        )
    return rows


def class_rows(a: torch.Tensor, b: torch.Tensor, name: str, least: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both classes through `finite_rows`; `DataError` also where their hidden sizes differ."""
    rows_a, rows_b = finite_rows(a, f"{name} class a", least), finite_rows(b, f"{name} class b", least)
    if rows_a.shape[1] != rows_b.shape[1]:
        raise DataError(
            f"hidden sizes {rows_a.shape[1]} and {rows_b.shape[1]} of the two classes", where=name, remedy="read both at one layer"
        )
    return rows_a, rows_b


def paired_rows(
    base_a: torch.Tensor, base_b: torch.Tensor, variant_a: torch.Tensor, variant_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The four blocks through `class_rows`, at least `LEAST_ROWS` a class; `DataError` where a variant block has not its base block's
    shape.
    """
    base = class_rows(base_a, base_b, "base", LEAST_ROWS)
    variant = class_rows(variant_a, variant_b, "variant", LEAST_ROWS)
    for label, left, right in zip("ab", base, variant, strict=True):
        if left.shape != right.shape:
            raise DataError(
                f"base {tuple(left.shape)}, variant {tuple(right.shape)}",
                where=f"class {label}",
                remedy="give the same samples of both models, row by row",
            )
    return *base, *variant


def zero_norm(*blocks: torch.Tensor) -> float:
    """Norm up to which a mean difference of these rows is rounding: a sum of n rows is off by n 2^-53 of their norms, and two means enter
    it.
    """
    return 2 * UNIT_ROUNDOFF * sum(len(block) for block in blocks) * max(float(block.norm(dim=1).max()) for block in blocks)


def half_memberships(n_a: int, n_b: int, splits: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows are in the first half: float64 0/1 of [splits, n_a] and [splits, n_b], floor(n / 2) ones a row.

    A function of the four arguments and nothing else, so base and variant, or two variants, are split alike.
    """
    if splits < 2:
        raise ConfigError(f"splits={splits}", remedy="a spread over splits needs at least 2")
    generator = np.random.default_rng(seed)

    def draw(n: int) -> torch.Tensor:
        first = np.zeros((splits, n))
        first[:, : n // 2] = 1.0
        return torch.from_numpy(generator.permuted(first, axis=1))

    return draw(n_a), draw(n_b)


def separation(a: torch.Tensor, b: torch.Tensor) -> Separation:
    """Separation of A [n_a, d] and B [n_b, d], two rows a class at least. `DataError` for fewer, for unequal d, and for NaN or Inf.

    Rows that are all equal within their class give an infinite rho and a floor of 1; equal class means give 0.
    """
    rows_a, rows_b = class_rows(a, b, "separation", 2)
    n_a, n_b, d = len(rows_a), len(rows_b), rows_a.shape[1]
    mean_a, mean_b = rows_a.mean(dim=0), rows_b.mean(dim=0)
    within = float((rows_a - mean_a).square().sum() + (rows_b - mean_b).square().sum()) / ((n_a + n_b - 2) * d)
    between = float((mean_a - mean_b).square().sum())
    n = 2 / (1 / n_a + 1 / n_b)
    zero = zero_norm(rows_a, rows_b)
    naive_squared = between / within if math.sqrt(within * d) > zero else math.inf
    # Asked last, so that 0 / 0 is no separation.
    if math.sqrt(between) <= zero:
        naive_squared = 0.0
    squared = max(0.0, naive_squared - 2 * d / n)
    kappa = n * squared / d
    return Separation(
        n=n,
        d=d,
        rho_naive=math.sqrt(naive_squared),
        rho=math.sqrt(squared),
        rho_per_dim=math.sqrt(squared / d),
        kappa=kappa,
        floor=closed_form_floor(kappa),
    )


def _cosines(left: torch.Tensor, right: torch.Tensor, zero: float) -> torch.Tensor:
    """Row-wise cosines [s] of two [s, d], NaN where a row's norm is at most `zero`."""
    norm_left, norm_right = left.norm(dim=1), right.norm(dim=1)
    cosines = ((left * right).sum(dim=1) / (norm_left * norm_right)).clamp(-1.0, 1.0)
    return cosines.masked_fill((norm_left <= zero) | (norm_right <= zero), math.nan)


def _half_means(rows: torch.Tensor, first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Means [s, d] of the first half and of the rest, for membership `first` [s, n]."""
    size = len(rows) // 2
    sums = first.to(rows.device) @ rows
    return sums / size, (rows.sum(dim=0) - sums) / (len(rows) - size)


def split_half_null(a: torch.Tensor, b: torch.Tensor, splits: int = 200, seed: int = 0) -> SplitHalfNull:
    """Null of the direction of A [n_a, d] and B [n_b, d]: each class is halved at random `splits` times (`half_memberships`), one product a
    class.

    `DataError` below 4 rows a class, for unequal d, and for NaN or Inf; `ConfigError` below 2 splits. A half whose two class means are
    equal has no direction: its cosine, the mean and the sd are NaN.
    """
    rows_a, rows_b = class_rows(a, b, "split-half null", LEAST_ROWS)
    first_a, first_b = half_memberships(len(rows_a), len(rows_b), splits, seed)
    (one_a, two_a), (one_b, two_b) = _half_means(rows_a, first_a), _half_means(rows_b, first_b)
    cosines = _cosines(one_a - one_b, two_a - two_b, zero_norm(rows_a, rows_b))
    return SplitHalfNull(
        mean=float(cosines.mean()),
        sd=float(cosines.std(unbiased=True)),
        n_a=len(rows_a),
        n_b=len(rows_b),
        splits=splits,
        cosines=tuple(cosines.tolist()),
    )


def subspace_gain(base: torch.Tensor, variant: torch.Tensor, direction: torch.Tensor) -> float:
    """mean |h_variant . v| / mean |h_base . v| (paper, table 3) for base, variant [n, d] and direction [d] of any norm; NaN where the base
    has none of it.

    The projections are not centred: a translation along v changes the gain too; the regression slope of the projections tells the two
    apart.
    """
    v = direction.to(torch.float64)
    here, there = float((base.to(torch.float64) @ v).abs().mean()), float((variant.to(torch.float64) @ v).abs().mean())
    return there / here if here > 0 else math.nan


def direction_test(
    base_a: torch.Tensor,
    base_b: torch.Tensor,
    variant_a: torch.Tensor,
    variant_b: torch.Tensor,
    *,
    splits: int = 200,
    seed: int = 0,
) -> DirectionTest:
    """Has the variant's class direction turned by more than its own noise? Row i of a variant block is the sample of row i of its base
    block.

    base_a, variant_a: [n_a, d]; base_b, variant_b: [n_b, d]. `DataError` below 4 rows a class, for shapes that differ, and for NaN or Inf.
    """
    rows = paired_rows(base_a, base_b, variant_a, variant_b)
    base_rows, variant_rows = rows[:2], rows[2:]
    base_direction = base_rows[0].mean(dim=0) - base_rows[1].mean(dim=0)
    own_direction = variant_rows[0].mean(dim=0) - variant_rows[1].mean(dim=0)
    gain = math.nan
    if float(base_direction.norm()) > zero_norm(*base_rows):
        gain = subspace_gain(torch.cat(base_rows), torch.cat(variant_rows), base_direction)
    # A zero of either model makes its own direction NaN, so each is held against its own rounding.
    zeros = [float(base_direction.norm()) <= zero_norm(*base_rows), float(own_direction.norm()) <= zero_norm(*variant_rows)]
    cosine = math.nan if any(zeros) else float(_cosines(base_direction[None], own_direction[None], 0.0))
    own_null = split_half_null(*variant_rows, splits=splits, seed=seed)
    verdict: DirectionVerdict = "within noise"
    if math.isnan(cosine) or math.isnan(own_null.call_below):
        verdict = "undefined"
    elif cosine < own_null.call_below:
        verdict = "rotation"
    return DirectionTest(
        cosine=cosine,
        own_null=own_null,
        base_null=split_half_null(*base_rows, splits=splits, seed=seed),
        base=separation(*base_rows),
        own=separation(*variant_rows),
        subspace_gain=gain,
        verdict=verdict,
    )
