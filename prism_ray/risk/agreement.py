"""Label-free agreement of two models' outputs, and whether it finds the wrong answers better than confidence does.

Per scored token the cosine of the two output distributions, averaged over a sample's tokens (the second abstract in cosine-noise-floor.txt: cosine of
probability vectors before and after quantization). Samples are ranked by it; at fixed percentiles the low part's accuracy is compared with the high
part's, beside the same split by the variant's own confidence. Accuracy needs labels and is reported only as a check of the ranking.

Legend: n tokens, V vocabulary, N samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

PERCENTILES = (10, 25, 50)


@dataclass(frozen=True, kw_only=True)
class OutputPair:
    """Per token, float32 [n]: cosine of the distributions, KL(target || proxy) in nats, cross-entropies, top probabilities, whether the
    most likely token is the right one, whether both models name the same token, and the two terms of the range bound (see `bound.RangeBound`)."""

    cosine: torch.Tensor
    kl: torch.Tensor
    ce_target: torch.Tensor
    ce_proxy: torch.Tensor
    confidence_target: torch.Tensor
    confidence_proxy: torch.Tensor
    correct_target: torch.Tensor
    correct_proxy: torch.Tensor
    same_token: torch.Tensor
    feature_range: torch.Tensor
    head_range: torch.Tensor


def spread(difference: torch.Tensor) -> torch.Tensor:
    """Largest minus smallest entry of each row [n, V] -> [n]."""
    low, high = difference.aminmax(dim=-1)
    return high - low


def compare_outputs(
    logits_target: torch.Tensor, logits_proxy: torch.Tensor, targets: torch.Tensor, logits_mixed: torch.Tensor | None = None
) -> OutputPair:
    """Readings of one chunk of tokens. logits_*: float32 [n, V]; targets: int64 [n]; logits_mixed: of the target's head on the proxy's features, None
    where the proxy kept the head."""
    mixed = logits_proxy if logits_mixed is None else logits_mixed
    feature_range = spread(logits_target - mixed)
    head_range = torch.zeros_like(feature_range) if logits_mixed is None else spread(logits_mixed - logits_proxy)
    log_target = torch.log_softmax(logits_target, dim=-1)
    log_proxy = torch.log_softmax(logits_proxy, dim=-1)
    wanted = targets.unsqueeze(1)
    ce_target, ce_proxy = -log_target.gather(1, wanted).squeeze(1), -log_proxy.gather(1, wanted).squeeze(1)
    top_target, best_target = log_target.max(dim=-1)
    top_proxy, best_proxy = log_proxy.max(dim=-1)
    p, q = log_target.exp(), log_proxy.exp()
    cosine = torch.linalg.vecdot(p, q) / (p.norm(dim=-1) * q.norm(dim=-1))
    # KL as sum p (log p - log q): the terms where p underflows to 0 are 0, not 0 * inf, unless q underflows too, which log_softmax rules out.
    kl = torch.linalg.vecdot(p, log_target.sub_(log_proxy))
    return OutputPair(
        cosine=cosine.clamp_(max=1.0),
        kl=kl.clamp_(min=0.0),
        ce_target=ce_target,
        ce_proxy=ce_proxy,
        confidence_target=top_target.exp(),
        confidence_proxy=top_proxy.exp(),
        correct_target=(best_target == targets).float(),
        correct_proxy=(best_proxy == targets).float(),
        same_token=(best_target == best_proxy).float(),
        feature_range=feature_range,
        head_range=head_range,
    )


@dataclass(frozen=True, kw_only=True)
class SplitReading:
    """Accuracies below and above a percentile of a score; se: standard error of the difference, from the two parts' variances."""

    score: str
    percentile: int
    n_low: int
    n_high: int
    low: float
    high: float
    se: float

    @property
    def separation(self) -> float:
        """High minus low: how much better the samples are that the score trusts."""
        return self.high - self.low


def split_readings(
    score: Sequence[float], correct: Sequence[float], name: str, percentiles: Sequence[int] = PERCENTILES
) -> list[SplitReading]:
    """Split N samples at percentiles of `score` (ties broken by order). correct: accuracy of each sample in [0, 1]. Parts below 2 samples are skipped."""
    order = np.argsort(np.asarray(score, dtype=np.float64), kind="stable")
    right = np.asarray(correct, dtype=np.float64)[order]
    found: list[SplitReading] = []
    for percentile in percentiles:
        cut = round(len(right) * percentile / 100)
        low, high = right[:cut], right[cut:]
        if len(low) < 2 or len(high) < 2:
            continue
        se = math.sqrt(low.var(ddof=1) / len(low) + high.var(ddof=1) / len(high))
        found.append(
            SplitReading(
                score=name,
                percentile=percentile,
                n_low=len(low),
                n_high=len(high),
                low=float(low.mean()),
                high=float(high.mean()),
                se=se,
            )
        )
    return found
