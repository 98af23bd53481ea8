"""Orthogonal alignments of the proxy's features with the target's: identity, Procrustes, and the joint optimum of feature and head term.

W_N = V U' from Z_T' Z_P = U S V' minimizes the feature term alone (prism-risk-bound App. A.4); the sum of feature and head term has no closed
form (App. C.3). `joint_alignment` descends on the orthogonal group from both I and W_N, with step

    W <- qf(W - t W skew(W' grad)),   t by Barzilai and Borwein, halved until the true objective falls (Armijo),

and returns the best W seen, the two starts included: never worse than the better of the two. The group has two components; each start explores its own.
The head term has a cone's tip at W = I when the head was kept, where no gradient exists: inside the square root a small constant rounds it
off for the direction of descent, while the objective that accepts a step is the exact one.

Legend: d hidden size, n rows; a = rho_T^2 + rho_P^2, C = Z_T' Z_P / n, S = Z_P' Z_P / n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from prism_ray.risk.head import K_PRED, HeadTerms


@dataclass(frozen=True, kw_only=True)
class Objective:
    """delta(W) + gamma(W) and its gradient. total: rho_T^2 + rho_P^2; residual: |Z_T - Z_P|^2 / n; cross, covariance: C, S [d, d]; mean: [d]."""

    total: float
    residual: float
    cross: torch.Tensor
    covariance: torch.Tensor
    mean: torch.Tensor
    head: HeadTerms

    def feature_squared(self, w: torch.Tensor) -> float:
        """|Z_T - Z_P W|^2 / n, from the exact residual at I plus what W changes."""
        identity = torch.eye(w.shape[0], dtype=w.dtype)
        return max(0.0, self.residual - 2 * float((self.cross.T * (w - identity)).sum()))

    def head_squared(self, w: torch.Tensor) -> float:
        """E |z_P (W H_T - H_P) + b_T - b_P|^2."""
        head, x = self.head, w - torch.eye(w.shape[0], dtype=w.dtype)
        value = float((self.covariance * head.difference_gram).sum()) + 2 * float(self.mean @ head.difference_bias) + head.bias_squared
        value += float(((self.covariance @ x) * (x @ head.target_gram)).sum())
        value += 2 * float((self.covariance * (x @ head.target_difference)).sum())
        value += 2 * float(self.mean @ x @ head.target_bias)
        return max(0.0, value)

    def value(self, w: torch.Tensor) -> float:
        """The bound at W, in nats."""
        return self.head.k_feat * math.sqrt(self.feature_squared(w)) + K_PRED * math.sqrt(self.head_squared(w))

    def gradient(self, w: torch.Tensor, smooth: float) -> torch.Tensor:
        """Euclidean gradient [d, d] of the objective, with `smooth` added under both roots."""
        head, x = self.head, w - torch.eye(w.shape[0], dtype=w.dtype)
        features = -self.head.k_feat / math.sqrt(self.feature_squared(w) + smooth) * self.cross.T
        heads = self.covariance @ (x @ head.target_gram + head.target_difference.T) + torch.outer(self.mean, head.target_bias)
        return features + K_PRED / math.sqrt(self.head_squared(w) + smooth) * heads


def procrustes(cross: torch.Tensor) -> tuple[torch.Tensor, float]:
    """(W_N [d, d], nuclear norm of `cross`) for cross = Z_T' Z_P [d, d]; on the null space of `cross` any rotation serves."""
    u, s, vh = torch.linalg.svd(cross)
    return vh.T @ u.T, float(s.sum())


def joint_alignment(objective: Objective, starts: list[torch.Tensor], *, iterations: int = 60, tolerance: float = 1e-5) -> torch.Tensor:
    """The best W [d, d] found by descent from each start; stops when a step gains less than `tolerance` of the objective."""
    best, best_value = starts[0], math.inf
    for start in starts:
        value = objective.value(start)
        if value < best_value:
            best, best_value = start, value
        w, value = _descend(objective, start, value, iterations, tolerance)
        if value < best_value:
            best, best_value = w, value
    return best


def _descend(objective: Objective, w: torch.Tensor, value: float, iterations: int, tolerance: float) -> tuple[torch.Tensor, float]:
    smooth = 1e-6 * max(objective.total, 1e-30)
    step, previous = 0.0, None
    for _ in range(iterations):
        gradient = objective.gradient(w, smooth)
        skew = w.T @ gradient
        direction = w @ (skew - skew.T) / 2
        norm = float(direction.norm())
        if norm == 0 or not math.isfinite(norm):
            break
        if previous is None:
            step = 0.1 * math.sqrt(w.shape[0]) / norm
        else:
            moved, turned = w - previous[0], direction - previous[1]
            curvature = abs(float((moved * turned).sum()))
            step = float(moved.square().sum()) / curvature if curvature > 0 else step
        previous = (w, direction)
        for _ in range(25):
            candidate = _orthogonal(w - step * direction)
            reached = objective.value(candidate)
            if reached <= value - 1e-4 * step * norm * norm:
                break
            step /= 2
        else:
            break
        gained, w, value = value - reached, candidate, reached
        if gained < tolerance * value:
            break
    return w, value


def _orthogonal(w: torch.Tensor) -> torch.Tensor:
    """Q of the QR decomposition with a positive diagonal of R: the retraction, which stays in W's component."""
    q, r = torch.linalg.qr(w)
    return q * torch.sign(torch.diagonal(r))
