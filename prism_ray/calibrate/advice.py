"""All readings of feedback exposure in one result, and what to do with each component of a looped model: keep it, rotate it, or quantize it as it is.

A component is *exposed* when quantizing it alone costs agreement (below HARMLESS) and either costs EXPOSED_GAP more than the core costs, with intervals that do not
overlap, or pushes the local spectral radius from at most 1 above 1. Only the adapter can be: it has no identity path around it (looped-quantization, section 3.2).

| component | reading | action |
|---|---|---|
| adapter | not exposed | `trajectory`: quantize, Hessians summed over all steps |
| adapter | exposed, rotation closes at least ROTATION_CLOSES of the gap to the core (or to HARMLESS, whichever is lower) | `rotate`: Hadamard on its input, then as above |
| adapter | exposed otherwise | `keep-bf16` |
| core | always | `trajectory`: it too sees states that step 0 does not show |
| prelude, coda | always | `quantize`: called once, the plain Hessian is the whole one |

Sensitivities and proxies are in the result for comparison and decide nothing: random-direction gain and Hessian trace do not see where an error enters (App. G), and the
proxy's magnitude is nearly the same at every step while its directions change (App. J).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import nn

from prism_ray.calibrate.exposure import (
    ITERATIONS,
    InjectionPoint,
    Kind,
    Quantize,
    Sensitivity,
    SpectralRadius,
    agreement,
    component_agreement,
    component_linears,
    injection_curve,
    perturbation_agreement,
    radius_pair,
    replaced,
    sensitivities,
    top_tokens,
)
from prism_ray.calibrate.rotation import through_rotation
from prism_ray.core.errors import ModelError
from prism_ray.models.loops import Batch, require_known_loop
from prism_ray.risk.transfer import Estimate

HARMLESS = 0.95
"""Agreement from which quantizing a component is left alone, exposed or not."""
EXPOSED_GAP = 0.05
"""Agreement that the adapter must lie below the core, beyond disjoint intervals, to count as exposed."""
ROTATION_CLOSES = 0.5
"""Part of the gap that rotation must close to be worth an extra operation per step."""

Action = Literal["keep-bf16", "rotate", "trajectory", "quantize"]


@dataclass(frozen=True, kw_only=True)
class Exposure:
    """Readings of one model under one Quantize. agreement: by component. rotated: the adapter quantized through a rotation, None without an adapter.

    radius_*: at the base's last state, of the base and with adapter and core quantized.
    """

    family: str
    steps: int
    agreement: dict[str, Estimate]
    rotated: Estimate | None
    injection: list[InjectionPoint]
    radius_base: SpectralRadius
    radius_quantized: SpectralRadius
    perturbations: dict[tuple[Kind, str], Estimate]
    sensitivities: list[Sensitivity]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; perturbations as a list of rows."""
        rows = [{"kind": kind, "component": part, **asdict(found)} for (kind, part), found in self.perturbations.items()]
        fields = asdict(self) | {"perturbations": rows}
        for row, reading in zip(fields["sensitivities"], self.sensitivities, strict=True):
            row |= {"proxy_spread": reading.proxy_spread, "first_share": reading.first_share}
        return fields


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do with a component, and why, in one sentence."""

    component: str
    action: Action
    reason: str


@dataclass(frozen=True, kw_only=True)
class Advice:
    """decisions: by component. modules: Linear modules by action, for a policy's ignore list and a rotation. text: the paragraph for a reader."""

    decisions: dict[str, Decision]
    modules: dict[Action, tuple[str, ...]]
    text: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def measure_exposure(
    model: nn.Module, batches: Sequence[Batch], quantize: Quantize, *, seeds: Sequence[int] = (0, 1, 2), iterations: int = ITERATIONS
) -> Exposure:
    """Every reading on `batches`. The number of forward passes is about (12 + 3 len(seeds) + projections) a batch, and 2 x `iterations` short ones for the radius, which is read on the first batch.

    Raises ModelError for a model that does not loop, or loops in a way that is not known.
    """
    spec = require_known_loop(model)
    if spec is None:
        raise ModelError("has no recurrence", where=type(model).__name__, remedy="feedback exposure is a question for looped models")
    base = top_tokens(model, spec, batches)
    linears = component_linears(model, spec)
    found = component_agreement(model, spec, batches, quantize, base=base)
    rotated = None
    if "adapter" in linears:
        with replaced(model, linears["adapter"], through_rotation(quantize)):
            now = top_tokens(model, spec, batches)
        rotated = agreement(base, now)
    loop = linears.get("both", linears["core"])
    radius_base, radius_quantized = radius_pair(model, spec, batches[0], loop, quantize, iterations=iterations)
    entry = "adapter" if "adapter" in linears else "core"
    return Exposure(
        family=spec.family,
        steps=spec.steps,
        agreement=found,
        rotated=rotated,
        injection=injection_curve(model, spec, batches, quantize, component=entry),
        radius_base=radius_base,
        radius_quantized=radius_quantized,
        perturbations=perturbation_agreement(model, spec, batches, quantize, seeds=seeds, base=base),
        sensitivities=sensitivities(model, spec, batches, quantize, base=base),
    )


def advise(exposure: Exposure, linears: dict[str, list[str]]) -> Advice:
    """Decide per component by the table above. linears: `component_linears` of the same model."""
    decisions: dict[str, Decision] = {}
    for part in exposure.agreement:
        if part == "adapter":
            decisions[part] = _adapter(exposure)
        elif part == "core":
            share = exposure.agreement["core"]
            decisions[part] = Decision(
                component=part,
                action="trajectory",
                reason=f"residual, called {exposure.steps} times: alone it keeps {_percent(share)} of the top tokens; "
                "Hessians of the first step alone would miss the inputs of later ones",
            )
        elif part != "both":
            share = exposure.agreement[part]
            reason = f"outside the loop, called once: alone it keeps {_percent(share)} of the top tokens"
            decisions[part] = Decision(component=part, action="quantize", reason=reason)
    modules: dict[Action, list[str]] = {}
    for part, decision in decisions.items():
        modules.setdefault(decision.action, []).extend(linears.get(part, []))
    return Advice(
        decisions=decisions, modules={action: tuple(names) for action, names in modules.items()}, text=_paragraph(exposure, decisions)
    )


def _adapter(exposure: Exposure) -> Decision:
    adapter, core = exposure.agreement["adapter"], exposure.agreement["core"]
    lost = f"alone it keeps {_percent(adapter)} of the top tokens, the core {_percent(core)}"
    below = adapter.high < core.low and core.value - adapter.value >= EXPOSED_GAP
    crossing = exposure.radius_base.estimate <= 1 < exposure.radius_quantized.estimate
    if adapter.value >= HARMLESS or not (below or crossing):
        why = (
            f"at least {HARMLESS:.0%}" if adapter.value >= HARMLESS else "not clearly below the core, and the radius stays on its side of 1"
        )
        return Decision(component="adapter", action="trajectory", reason=f"{lost}: {why}")
    sign = "clearly below the core" if below else "the spectral radius passes 1"
    target = min(HARMLESS, core.value) if below else HARMLESS
    gap = target - adapter.value
    closed = (exposure.rotated.value - adapter.value) / gap if exposure.rotated is not None and gap > 0 else 0.0
    if closed >= ROTATION_CLOSES:
        reason = f"{lost}: {sign}, no identity path goes around it; rotation closes {closed:.0%} of the gap"
        return Decision(component="adapter", action="rotate", reason=reason)
    reason = f"{lost}: {sign}, no identity path goes around it, and rotation closes only {max(0.0, closed):.0%} of the gap"
    return Decision(component="adapter", action="keep-bf16", reason=reason)


WORDS: dict[Action, str] = {
    "keep-bf16": "keep in bf16",
    "rotate": "rotate by Hadamard, then quantize with Hessians summed over all steps",
    "trajectory": "quantize with Hessians summed over all steps",
    "quantize": "quantize",
}


def _paragraph(exposure: Exposure, decisions: dict[str, Decision]) -> str:
    parts = [f"{decision.component}: {WORDS[decision.action]} ({decision.reason})." for decision in decisions.values()]
    first, last = exposure.injection[0], exposure.injection[-1]
    entry = "adapter" if "adapter" in exposure.agreement else "core"
    feedback = (
        f"Without the error carried over from earlier steps, quantizing the {entry} would keep {_percent(first.agreement)} instead of "
        f"{_percent(last.agreement)} (final state off by {first.relative_error:.3g} instead of {last.relative_error:.3g}, relative)."
    )
    radius = f"Local spectral radius {exposure.radius_base.estimate:.2f}, quantized {exposure.radius_quantized.estimate:.2f}."
    return " ".join([f"{exposure.family}, {exposure.steps} steps.", *parts, feedback, radius])


def _percent(share: Estimate) -> str:
    return f"{share.value:.1%} [{share.low:.1%}, {share.high:.1%}]"
