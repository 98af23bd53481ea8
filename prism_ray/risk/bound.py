"""The PRISM bound |R_T - R_P| <= delta + gamma, its axes, at one or more orthogonal alignments (prism-risk-bound Theorem 1, App. C, App. D).

    delta = K_feat sqrt((rho_T - rho_P)^2 + 2 rho_T rho_P (1 - Omega_W)),   gamma = sqrt(2) sqrt(E |z_P (W H_T - H_P) + b_T - b_P|^2)

Risks are mean cross-entropies in nats per scored token (`token`) or the mean over sequences of a sequence's mean (`sequence`).

The *range bound* is a sharper inequality from the same proof. Along a change dv of the logits the loss moves by (p - e_y) . dv, which lies between
min_j dv_j - dv_y and max_j dv_j - dv_y, so it never exceeds the range max dv - min dv. Hence, token by token,

    |R_T - R_P| <= E range(H_T' (z_T - z_P)) + E range((H_T - H_P)' z_P + b_T - b_P),

and each term is at most its counterpart: range(H' dz) <= K_feat |dz| and range(dv) <= sqrt(2) |dv|, the second by a factor that grows like sqrt(V / log V)
where a head's rounding errors spread over the vocabulary. It has no scale and shape parts; it says how much of B the change really points at.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from prism_ray.core.errors import DataError
from prism_ray.risk.alignment import Objective, joint_alignment, procrustes
from prism_ray.risk.cross import PairMoments
from prism_ray.risk.head import K_PRED, HeadTerms
from prism_ray.risk.moments import FeatureMoments

Alignment = Literal["identity", "nuclear", "joint"]
Axis = Literal["scale", "shape", "head"]
AXES: tuple[Axis, ...] = ("scale", "shape", "head")


@dataclass(frozen=True, kw_only=True)
class Bound:
    """One reading of the bound. All but `omega` and the rhos are in nats, or nats per unit of feature (k_feat)."""

    alignment: Alignment
    level: Literal["token", "sequence"]
    rho_target: float
    rho_proxy: float
    omega: float
    one_minus_omega: float
    k_feat: float
    delta: float
    gamma: float

    @property
    def value(self) -> float:
        """B = delta + gamma."""
        return self.delta + self.gamma

    @property
    def scale_term(self) -> float:
        """(rho_T - rho_P)^2."""
        return (self.rho_target - self.rho_proxy) ** 2

    @property
    def shape_term(self) -> float:
        """2 rho_T rho_P (1 - Omega_W); 0 where one side's features are all zero and Omega does not exist."""
        product = 2 * self.rho_target * self.rho_proxy
        return product * self.one_minus_omega if product > 0 else 0.0

    @property
    def shares(self) -> dict[Axis, float]:
        """What part of B each axis carries; scale and shape part delta as their squares do. NaN where B is 0."""
        if self.value == 0:
            return dict.fromkeys(AXES, math.nan)
        squares = self.scale_term + self.shape_term
        scale = self.delta * self.scale_term / squares if squares > 0 else 0.0
        return {"scale": scale / self.value, "shape": (self.delta - scale) / self.value, "head": self.gamma / self.value}

    @property
    def dominant(self) -> Axis | None:
        """The axis with the largest share, None where nothing drifted."""
        if self.value == 0:
            return None
        shares = self.shares
        return max(AXES, key=lambda axis: shares[axis])

    def to_dict(self) -> dict[str, Any]:
        """Fields and derived numbers, JSON-able."""
        derived = {"bound": self.value, "scale_term": self.scale_term, "shape_term": self.shape_term, "shares": self.shares}
        return asdict(self) | derived | {"dominant": self.dominant}


@dataclass(frozen=True, kw_only=True)
class RangeBound:
    """The range bound's two terms, nats a token: of the features and of the head."""

    feature: float
    head: float

    @property
    def value(self) -> float:
        """Their sum, at most the identity bound's B."""
        return self.feature + self.head


def bounds(moments: PairMoments, head: HeadTerms, *, alignments: tuple[Alignment, ...] = ("identity", "nuclear")) -> dict[Alignment, Bound]:
    """Token-level bounds by alignment; `identity` is the default of the paper. DataError without a scored token."""
    token = _require(moments.token)
    found: dict[Alignment, Bound] = {}
    objective: Objective | None = None
    best = torch.eye(0)
    if "nuclear" in alignments or "joint" in alignments:
        n = token.tokens
        objective = Objective(
            total=token.rho_target**2 + token.rho_proxy**2,
            residual=token.difference_squared / n,
            cross=moments.cross / n,
            covariance=moments.gram / n,
            mean=moments.proxy_sum / n,
            head=head,
        )
        best, _ = procrustes(moments.cross)
    for name in alignments:
        if name == "identity" or objective is None:
            found[name] = _identity(token, moments.head_token, head, "token")
            continue
        w = best
        if name == "joint":
            w = joint_alignment(objective, [torch.eye(best.shape[0], dtype=torch.float64), best])
        found[name] = _aligned(name, token, objective, w)
    return found


def sequence_bound(moments: PairMoments, head: HeadTerms) -> Bound:
    """The bound at W = I on the sequence-level risk (prism-risk-bound App. D, averaged over sequences)."""
    return _identity(_require(moments.sequence), moments.head_sequence, head, "sequence")


def _require(moments: FeatureMoments) -> FeatureMoments:
    if moments.tokens == 0:
        raise DataError("no answer token was scored", remedy="check prompt, answer column and max_tokens")
    return moments


def _identity(moments: FeatureMoments, head_sum: float, head: HeadTerms, level: Literal["token", "sequence"]) -> Bound:
    drift = moments.one_minus_omega
    return Bound(
        alignment="identity",
        level=level,
        rho_target=moments.rho_target,
        rho_proxy=moments.rho_proxy,
        omega=1 - drift,
        one_minus_omega=drift,
        k_feat=head.k_feat,
        delta=head.k_feat * math.sqrt(moments.difference_squared / moments.tokens),
        gamma=K_PRED * math.sqrt(max(0.0, head_sum) / moments.tokens),
    )


def _aligned(name: Alignment, moments: FeatureMoments, objective: Objective, w: torch.Tensor) -> Bound:
    squared = objective.feature_squared(w)
    product = 2 * moments.rho_target * moments.rho_proxy
    # From the residual, as at W = I: 1 - tr(C W) / (rho rho) would cancel.
    drift = max(0.0, squared - moments.scale_term) / product if product > 0 else math.nan
    return Bound(
        alignment=name,
        level="token",
        rho_target=moments.rho_target,
        rho_proxy=moments.rho_proxy,
        omega=1 - drift,
        one_minus_omega=drift,
        k_feat=objective.head.k_feat,
        delta=objective.head.k_feat * math.sqrt(squared),
        gamma=K_PRED * math.sqrt(objective.head_squared(w)),
    )
