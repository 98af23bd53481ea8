"""Additive moments of two feature matrices on the same tokens, and what follows from them without another pass.

For features Z_T, Z_P [n, d] (inputs of the linear head at the positions that predict an answer token) and the two cross-entropies there:

    n, ||Z_T||^2, ||Z_P||^2, <Z_T, Z_P>, sum CE_T, sum CE_P, and per example the sums that a paired standard error needs.

All are sums in float64, so two shards merge by addition and one worker or fifty give the same result. From them (prism-risk-bound §3.2, W = I)

    rho = ||Z|| / sqrt(n),   Omega = <Z_T, Z_P> / (||Z_T|| ||Z_P||),
    scale term = (rho_T - rho_P)^2,   shape term = 2 rho_T rho_P (1 - Omega).

Legend: n tokens, d hidden size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class FeatureMoments:
    """Sums over tokens and examples; `+` merges two disjoint parts, `FeatureMoments()` is the empty one.

    gap: sum over examples of the example's summed CE difference d_i = sum (CE_P - CE_T); gap_squared: sum of d_i^2; gap_tokens: sum of d_i m_i;
    tokens_squared: sum of m_i^2, with m_i the example's scored tokens.
    """

    tokens: int = 0
    examples: int = 0
    target_squared: float = 0.0
    proxy_squared: float = 0.0
    inner: float = 0.0
    difference_squared: float = 0.0
    ce_target: float = 0.0
    ce_proxy: float = 0.0
    gap_squared: float = 0.0
    gap_tokens: float = 0.0
    tokens_squared: float = 0.0

    def __add__(self, other: FeatureMoments) -> FeatureMoments:
        sums: dict[str, Any] = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return FeatureMoments(**sums)

    def to_list(self) -> list[float]:
        """The sums in field order, for an all-reduce."""
        return [float(getattr(self, field.name)) for field in fields(self)]

    @classmethod
    def from_list(cls, values: list[float]) -> FeatureMoments:
        """Inverse of `to_list`."""
        counts = {"tokens", "examples"}
        named: dict[str, Any] = {
            field.name: round(value) if field.name in counts else value for field, value in zip(fields(cls), values, strict=True)
        }
        return cls(**named)

    @property
    def rho_target(self) -> float:
        """RMS feature norm of the target, NaN without tokens."""
        return math.sqrt(self.target_squared / self.tokens) if self.tokens else math.nan

    @property
    def rho_proxy(self) -> float:
        """RMS feature norm of the proxy, NaN without tokens."""
        return math.sqrt(self.proxy_squared / self.tokens) if self.tokens else math.nan

    @property
    def one_minus_omega(self) -> float:
        """Shape mismatch 1 - Omega, from ||Z_T - Z_P||^2: for nearly equal features 1 - <>/(|| ||) would cancel to rounding noise."""
        product = math.sqrt(self.target_squared) * math.sqrt(self.proxy_squared)
        if product == 0:
            return math.nan
        norms = math.sqrt(self.target_squared) - math.sqrt(self.proxy_squared)
        return max(0.0, (self.difference_squared - norms * norms) / (2 * product))

    @property
    def scale_term(self) -> float:
        """(rho_T - rho_P)^2."""
        return (self.rho_target - self.rho_proxy) ** 2

    @property
    def shape_term(self) -> float:
        """2 rho_T rho_P (1 - Omega)."""
        return 2 * self.rho_target * self.rho_proxy * self.one_minus_omega

    @property
    def delta_ce(self) -> float:
        """R_P - R_T in nats per scored token."""
        return (self.ce_proxy - self.ce_target) / self.tokens if self.tokens else math.nan

    @property
    def delta_ce_se(self) -> float:
        """Standard error of `delta_ce`: paired by token, clustered by example (linearized ratio estimator), NaN below two examples."""
        if self.examples < 2:
            return math.nan
        gap = self.delta_ce
        squares = self.gap_squared - 2 * gap * self.gap_tokens + gap * gap * self.tokens_squared
        return math.sqrt(max(0.0, squares) * self.examples / (self.examples - 1)) / self.tokens


def feature_moments(
    z_target: torch.Tensor,
    z_proxy: torch.Tensor,
    ce_target: torch.Tensor,
    ce_proxy: torch.Tensor,
    rows: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
) -> FeatureMoments:
    """Moments of one batch. z_*: [n, d]; ce_*: [n] nats; rows: int64 [n], the example of each token (any labels).

    weight: float64 [n], one over the example's number of tokens, for sequence-level moments: every sum then runs over sequences, and `tokens`
    counts those; None for token-level moments.
    """
    target, proxy = z_target.to(torch.float64), z_proxy.to(torch.float64)
    _, index = torch.unique(rows, return_inverse=True)
    count = int(index.max()) + 1 if index.numel() else 0
    root = None if weight is None else weight.sqrt().unsqueeze(1)
    if weight is None or root is None:
        weight = torch.ones(rows.numel(), dtype=torch.float64, device=target.device)
    else:
        target, proxy = target * root, proxy * root
    ce_target, ce_proxy = ce_target.to(torch.float64) * weight, ce_proxy.to(torch.float64) * weight
    per_example = torch.zeros(count, dtype=torch.float64, device=target.device).index_add_(0, index, ce_proxy - ce_target)
    sizes = torch.zeros(count, dtype=torch.float64, device=target.device).index_add_(0, index, weight)
    return FeatureMoments(
        tokens=round(float(weight.sum())),
        examples=count,
        target_squared=float(target.square().sum()),
        proxy_squared=float(proxy.square().sum()),
        inner=float((target * proxy).sum()),
        difference_squared=float((target - proxy).square().sum()),
        ce_target=float(ce_target.sum()),
        ce_proxy=float(ce_proxy.sum()),
        gap_squared=float(per_example.square().sum()),
        gap_tokens=float((per_example * sizes).sum()),
        tokens_squared=float(sizes.square().sum()),
    )
