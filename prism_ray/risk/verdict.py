"""One reading of the bound in words: the dominant axis, whether it clears its floor, and the remedy that the paper ties to it.

Remedies (prism-risk-bound §5.3, "From diagnosis to remediation"): shape -> Hessian-aware reconstruction for a quantized variant, the shape regularizer for a
tuned one; head -> keep the output head in bf16; scale -> outlier smoothing. Two remedies per axis where the lifecycle differs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from prism_ray.risk.bound import Axis, Bound
from prism_ray.risk.floor import AxisReading

WORDS: dict[Axis, str] = {
    "scale": "the features' magnitude changed (scale)",
    "shape": "the features' arrangement changed (shape)",
    "head": "the output head changed (head)",
}
REMEDIES: dict[Axis, str] = {
    "scale": "Smooth activation outliers per channel before quantizing (or clip less), then measure again.",
    "shape": (
        "For a quantized variant use Hessian-aware reconstruction (prism-ray quantize --method gptq) or a finer format; "
        "for a tuned one train with the shape regularizer (lambda in a sweep)."
    ),
    "head": "Keep the output head in bf16: leave lm_head out of the quantization.",
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """status: `identical`, `within noise` or `drifted`; axis: the dominant one, None without drift; share: its part of the bound."""

    status: str
    axis: Axis | None
    share: float
    text: str


def verdict(
    variant: str,
    benchmark: str,
    bound: Bound,
    readings: Mapping[Axis, AxisReading],
    *,
    delta_ce: float,
    delta_ce_se: float,
    samples: int,
    tokens: int,
    rotation: str | None = None,
) -> Verdict:
    """The paragraph for one variant on one benchmark. rotation: the direction test's verdict, None where no classes were given."""
    where = f"{variant} on {benchmark} ({samples} samples, {tokens} scored tokens)"
    gap = f"The measured cross-entropy gap is {delta_ce:+.4f} nats a token"
    if not math.isnan(delta_ce_se):
        gap += f" (standard error {delta_ce_se:.4f})"
    axis = bound.dominant
    if axis is None:
        return Verdict(status="identical", axis=None, share=math.nan, text=f"{where}: identical to the base on every axis. {gap}.")
    share = bound.shares[axis]
    reading = readings[axis]
    size = f"B = {bound.value:.4g} nats, of which {100 * share:.0f} % {axis}"
    turned = f" The class direction shows {rotation}." if rotation in ("rotation", "within noise") else ""
    if reading.distinguishable is False:
        text = (
            f"{where}: not distinguishable from the base against itself. {size}; the {axis} axis reads {reading.value:.3g}, "
            f"its floor over {reading.layouts} batch layouts is {reading.floor_mean:.3g} (largest {reading.floor_largest:.3g}). "
            f"{gap}.{turned} This bounds the drift that could be seen; it does not prove that there is none."
        )
        return Verdict(status="within noise", axis=axis, share=share, text=text)
    floor = "no floor was measured" if reading.distinguishable is None else f"its floor is {reading.floor_mean:.3g}"
    significant = not math.isnan(delta_ce_se) and abs(delta_ce) > 2 * delta_ce_se
    consequence = "which is more than twice its error" if significant else "which these samples cannot tell from none"
    text = f"{where}: {WORDS[axis]}. {size}; the {axis} axis reads {reading.value:.3g}, {floor}. {gap}, {consequence}.{turned} {REMEDIES[axis]}"
    return Verdict(status="drifted", axis=axis, share=share, text=text)
