"""What the bound needs of the two linear heads: K_feat of the target's, and the products of their difference.

With H = W' of a head's weight [V, d] (rows are the columns h_j of the paper's H) and logits = softcap(scale (z H + b)):

- K_feat = max |h_j - h_k| of the target (prism-risk-bound App. A.3), scale included;
- for an alignment W, the head term is sqrt(2) sqrt(E |z_P (W H_T - H_P) + b_T - b_P|^2). With X = W - I and D = H_T - H_P it is taken from
      G_TT = H_T H_T',  G_TD = H_T D',  G_DD = D D'  [d, d]  and  H_T db, D db [d], |db|^2,
  so that nothing cancels at W = I, where only G_DD is left: 0 for a head that was kept.

Soft-capping c tanh(v / c) keeps the inequality: it is 1-Lipschitz and acts on each logit, so the head term stands; the gradient in z is a combination
of p_j (s_j h_j - s_y h_y) with s in (0, 1], whose norm is largest at corners of the square, so K_feat becomes max(diameter, largest |h_j|). It does
not hold between heads of different caps, which are refused.

Legend: V vocabulary, d hidden size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from prism_ray.core.errors import ModelError
from prism_ray.risk.diameter import head_diameter, largest_row_norm

K_PRED = math.sqrt(2.0)
"""Lipschitz constant of cross-entropy in the logits (prism-risk-bound App. A.5)."""


@dataclass(frozen=True, kw_only=True)
class LinearHead:
    """logits = softcap(scale (z W' + b)). weight: [V, d] of a float dtype; bias: [V] or None; softcap: c, or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, z: torch.Tensor) -> torch.Tensor:
        """float32 logits [n, V] of features [n, d]."""
        logits = torch.nn.functional.linear(z.to(self.weight.dtype), self.weight, self.bias).to(torch.float32)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


@dataclass(frozen=True, kw_only=True)
class HeadTerms:
    """k_feat; kept: the two heads hold the same bytes; difference products as in the module docstring (zeros where kept), float64."""

    k_feat: float
    kept: bool
    target_gram: torch.Tensor
    target_difference: torch.Tensor
    difference_gram: torch.Tensor
    target_bias: torch.Tensor
    difference_bias: torch.Tensor
    bias_squared: float

    def squared(self, z: torch.Tensor) -> torch.Tensor:
        """|z (H_T - H_P) + b_T - b_P|^2 per row, float64 [n], for z [n, d]: no [n, V] tensor."""
        z = z.to(torch.float64).cpu()
        if self.kept:
            return torch.zeros(z.shape[0], dtype=torch.float64)
        value = torch.linalg.vecdot(z @ self.difference_gram, z) + 2 * (z @ self.difference_bias) + self.bias_squared
        return value.clamp_(min=0)


def feature_constant(head: LinearHead) -> float:
    """K_feat of the target's head: the diameter of its columns, for a soft-capped one at least their largest norm."""
    value = head_diameter(head.weight).value
    if head.softcap is not None:
        value = max(value, largest_row_norm(head.weight)[0])
    return abs(head.scale) * value


def require_comparable(target: LinearHead, proxy: LinearHead, where: str) -> None:
    """Raise ModelError, naming the variant, for heads between which the inequality says nothing."""
    if target.weight.shape[1] != proxy.weight.shape[1]:
        raise ModelError(
            f"hidden size {proxy.weight.shape[1]}, the base has {target.weight.shape[1]}",
            where=where,
            remedy="compare variants of one base",
        )
    if target.weight.shape[0] != proxy.weight.shape[0]:
        raise ModelError(
            f"vocabulary of {proxy.weight.shape[0]}, the base has {target.weight.shape[0]}: the logits are not of the same tokens",
            where=where,
            remedy="resize its embeddings to the base's vocabulary, or compare it with its own base",
        )
    if target.softcap != proxy.softcap:
        raise ModelError(
            f"final logit soft-capping is {proxy.softcap}, the base has {target.softcap}: the bound does not hold between them",
            where=where,
            remedy="set the same final_logit_softcapping",
        )


def head_terms(target: LinearHead, proxy: LinearHead, *, k_feat: float, chunk: int = 4096) -> HeadTerms:
    """Products of two comparable heads, in float64 over `chunk` rows of the vocabulary at a time: O(d^2 + chunk d) memory."""
    hidden = target.weight.shape[1]
    zero = {name: torch.zeros(hidden, hidden, dtype=torch.float64) for name in ("target_gram", "target_difference", "difference_gram")}
    vectors = {name: torch.zeros(hidden, dtype=torch.float64) for name in ("target_bias", "difference_bias")}
    bias_squared, kept = 0.0, True
    for start in range(0, target.weight.shape[0], chunk):
        part = slice(start, start + chunk)
        ours = _rows(target, part)
        difference = ours - _rows(proxy, part)
        bias = _bias(target, part) - _bias(proxy, part)
        zero["target_gram"].addmm_(ours.T, ours)
        if bool(difference.any()) or bool(bias.any()):
            kept = False
            zero["target_difference"].addmm_(ours.T, difference)
            zero["difference_gram"].addmm_(difference.T, difference)
            vectors["target_bias"] += ours.T @ bias
            vectors["difference_bias"] += difference.T @ bias
            bias_squared += float(bias.square().sum())
    return HeadTerms(k_feat=k_feat, kept=kept, bias_squared=bias_squared, **zero, **vectors)


def _rows(head: LinearHead, part: slice) -> torch.Tensor:
    return head.weight[part].detach().cpu().to(torch.float64) * head.scale


def _bias(head: LinearHead, part: slice) -> torch.Tensor:
    if head.bias is None:
        return torch.zeros(head.weight[part].shape[0], dtype=torch.float64)
    return head.bias[part].detach().cpu().to(torch.float64) * head.scale
