"""Two noises of a drift reading: what the base shows against itself, and what other samples would have shown.

*Floor.* The base is run again over other batch shapes, other padding sides and in another order; the same kernels then round differently, which repeating
one shape hides (field case DRF-02). Each layout gives one reading of each axis. A variant's axis is `distinguishable` when it lies above the largest of the
floor's readings and above their mean by more than two standard deviations; otherwise it is `not distinguishable`, which is no zero.

*Interval.* The bound at W = I is a function of three sums over samples, so a bootstrap over samples is one product of a [replicates, N] matrix of
multinomial counts with an [N, 3] matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prism_ray.risk.bound import AXES, Axis, Bound
from prism_ray.risk.head import K_PRED


@dataclass(frozen=True, kw_only=True)
class AxisReading:
    """An axis of a variant beside its floor. value and floor are the axis's own numbers: |rho_T - rho_P|, 1 - Omega, gamma."""

    axis: Axis
    value: float
    floor_mean: float
    floor_sd: float
    floor_largest: float
    layouts: int

    @property
    def distinguishable(self) -> bool | None:
        """None where no floor was measured."""
        if self.layouts == 0:
            return None
        sd = 0.0 if math.isnan(self.floor_sd) else self.floor_sd
        return self.value > max(self.floor_largest, self.floor_mean + 2 * sd)


def axis_value(bound: Bound, axis: Axis) -> float:
    """The axis's own number in a bound."""
    return {"scale": abs(bound.rho_target - bound.rho_proxy), "shape": bound.one_minus_omega, "head": bound.gamma}[axis]


def axis_readings(bound: Bound, floor: Sequence[Bound]) -> dict[Axis, AxisReading]:
    """Every axis of `bound` beside base-against-base readings, one a layout."""
    found: dict[Axis, AxisReading] = {}
    for axis in AXES:
        null = np.asarray([axis_value(entry, axis) for entry in floor], dtype=np.float64)
        found[axis] = AxisReading(
            axis=axis,
            value=axis_value(bound, axis),
            floor_mean=float(null.mean()) if len(null) else math.nan,
            floor_sd=float(null.std(ddof=1)) if len(null) > 1 else math.nan,
            floor_largest=float(null.max()) if len(null) else math.nan,
            layouts=len(null),
        )
    return found


@dataclass(frozen=True, kw_only=True)
class BootstrapInterval:
    """2.5 and 97.5 percentiles over `replicates` resamples of n samples."""

    low: float
    high: float
    n: int
    replicates: int


def bound_interval(
    tokens: Sequence[float],
    difference_squared: Sequence[float],
    head_squared: Sequence[float],
    k_feat: float,
    *,
    replicates: int = 1000,
    seed: int = 0,
) -> BootstrapInterval:
    """Interval of B at W = I from per-sample sums, each [N]: scored tokens, |Z_T - Z_P|^2, sums of the squared head difference."""
    table = np.asarray([tokens, difference_squared, head_squared], dtype=np.float64).T
    n = len(table)
    if n < 2:
        return BootstrapInterval(low=math.nan, high=math.nan, n=n, replicates=0)
    counts = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=replicates)
    sums = counts @ table
    values = k_feat * np.sqrt(sums[:, 1] / sums[:, 0]) + K_PRED * np.sqrt(sums[:, 2] / sums[:, 0])
    low, high = np.percentile(values, [2.5, 97.5])
    return BootstrapInterval(low=float(low), high=float(high), n=n, replicates=replicates)
