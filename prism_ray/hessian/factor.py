"""The damped inverse factor of a Gram matrix, with a rule for every way in which it can be singular.

GPTQ needs U, upper triangular, with (H + d I)^-1 = U' U. With J the reversal of order and J (H + d I) J = L L', R = J L J is upper triangular,
H + d I = R R', and U = R^-1: one Cholesky factorization and one triangular inverse, in float64.

*Dead columns*: an input column whose mean square is below float32's smallest normal number (2^-126), or exactly 0, carries no information: its row and column of H are set to zero and
its diagonal to the mean of the live ones, so its weights are rounded as they are and never influence another column (field case CAL-02).

*Damping* d is a fraction of the mean live diagonal. When the factorization fails, or gives a pivot so small that U would amplify rounding beyond 1 / sqrt(eps), the fraction is
raised along SCHEDULE; what was used is in the result. If the last one fails too, NoFactor is raised and the caller records its fallback.

Legend: I input width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prism_ray.core.errors import PrismError

SCHEDULE = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Fractions tried after the asked one, those that are larger than it."""
SMALLEST_SQUARE = 2.0**-126


class NoFactor(PrismError):
    """A Gram matrix has no usable factor at any damping of the schedule, or holds no rows."""


@dataclass(frozen=True, kw_only=True)
class Factor:
    """upper: U float64 [I, I]. mean: the damped mean Gram matrix it is the factor of, float64 [I, I]. damping: the fraction used. retries: how many fractions
    failed before it. dead: indices of dead columns."""

    upper: Tensor
    mean: Tensor
    damping: float
    retries: int
    dead: Tensor


def dead_columns(gram: Tensor, weight: float) -> Tensor:
    """Boolean [I]: columns whose mean square is below SMALLEST_SQUARE. gram: float64 [I, I], a sum over `weight` rows."""
    return gram.diagonal() / weight < SMALLEST_SQUARE


def clean_mean(gram: Tensor, weight: float) -> tuple[Tensor, Tensor, float]:
    """(mean Gram matrix float64 [I, I] with dead columns replaced, boolean [I] of the dead ones, mean live diagonal); NaN level when all are dead."""
    mean = gram / weight
    dead = dead_columns(gram, weight)
    level = float(mean.diagonal()[~dead].mean())
    if bool(dead.any()):
        mean[dead, :] = 0.0
        mean[:, dead] = 0.0
        mean.diagonal()[dead] = level
    return mean, dead, level


def factorize(gram: Tensor, weight: float, *, damping: float = 0.01, where: str = "") -> Factor:
    """U of the mean Gram matrix gram / weight, damped by `damping` times its mean live diagonal.

    gram: float64 [I, I], not changed. weight: sum of the row weights, > 0. Raises NoFactor without rows or when every damping fails.
    """
    if weight <= 0:
        raise NoFactor("no calibration row reached it", where=where)
    if not bool(torch.isfinite(gram).all()):
        raise NoFactor("its Gram matrix holds NaN or infinity", where=where)
    mean, dead, level = clean_mean(gram, weight)
    if bool(dead.all()):
        raise NoFactor("all its input columns are zero", where=where)
    tried = [damping, *(fraction for fraction in SCHEDULE if fraction > damping)]
    for retries, fraction in enumerate(tried):
        upper = _inverse_factor(mean, fraction * level)
        if upper is not None:
            mean.diagonal().add_(fraction * level)
            return Factor(upper=upper, mean=mean, damping=fraction, retries=retries, dead=dead.nonzero().flatten())
    raise NoFactor(f"no damping up to {tried[-1]:g} makes its Gram matrix positive definite", where=where)


def _inverse_factor(mean: Tensor, shift: float) -> Tensor | None:
    """U for mean + shift I, or None where the factorization fails or is too ill-conditioned to be of use in float32."""
    damped = mean.flip(0, 1)
    damped.diagonal().add_(shift)
    lower, info = torch.linalg.cholesky_ex(damped)
    if int(info):
        return None
    diagonal = lower.diagonal()
    if not bool(torch.isfinite(diagonal).all()) or float(diagonal.min()) < float(diagonal.max()) * torch.finfo(torch.float64).eps ** 0.5:
        return None
    identity = torch.eye(mean.shape[0], dtype=mean.dtype, device=mean.device)
    # J L^-1 J is upper triangular and the inverse of R.
    return torch.linalg.solve_triangular(lower, identity, upper=False).flip(0, 1)
