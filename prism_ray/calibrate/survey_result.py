"""Readings of a survey (calibrate.survey), and what follows from them: findings by name for a program, a paragraph for a reader.

| finding | when | action |
|---|---|---|
| component | feedback exposure, once for each rounding scheme | as calibrate.advice: keep-bf16, rotate, trajectory, quantize |
| blind | a layer that is called more than once, whose gain is at least GAIN or whose inputs have shifted | trajectory: sum its Hessian over all steps |
| masked | one later step has at least MASKED times the rank of the sum | try-skip-first: step 0 sets the threshold (App. P: it helps some models only) |
| rank-bound | fewer rows than columns in all | more-rows |
| starved, untouched | an expert with fewer rows than columns, with none | more-rows; no-statistics: round it to nearest, or keep it |

A layer's inputs have *shifted* when the overlap of step 0 with the last step is further from 1, by more than SHIFT times, than the overlap of each of the two with itself between halves of
the samples: its noise floor. The halves have half the rows, so they agree less than whole repeats would, and the floor errs towards "not shifted". Where one of the two spans is the
whole space every overlap is 1 and nothing is said.

Rank gain does not predict how much a calibration over all steps recovers (looped-quantization, section 8): it says what step 0 leaves unseen.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prism_ray.calibrate.advice import Advice, Exposure
from prism_ray.hessian.survey import Overlap, Spectrum

GAIN = 2.0
"""Each of the paper's nine checkpoints has a layer that reaches this gain (section 4.1)."""
MASKED = 2.0
SHIFT = 2.0
EPSILON = 1e-9
"""Distance from 1 of the overlap of a span with itself, at most: rounding."""

FindingKind = Literal["component", "blind", "masked", "rank-bound", "starved", "untouched"]


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A thresholded rank, the effective rank, the n rows that they were read from, and the largest rank that n rows can have."""

    rank: int
    effective: float
    n: int
    bound: int

    @classmethod
    def of(cls, found: Spectrum) -> Rank:
        """Of a spectrum, whose values are then not needed any more."""
        return cls(rank=found.rank, effective=found.effective, n=found.rows, bound=found.bound)


@dataclass(frozen=True, kw_only=True)
class LayerReading:
    """One distinct input. members: the weights that get it. component: of the loop, "" outside of one. calls: T.

    tokens: rows of one step, read or not. steps: rank of each step, empty where only counts were kept. accumulated: of the sum over steps. gain: None where step 0 has rank 0.
    overlap: step 0 with the last step, None where T = 1. floor_first, floor_last: each with itself between halves of the samples. trace: tr(H) by step, over all rows.
    limited: why n < tokens. notes: what bounds a rank.
    """

    name: str
    members: tuple[str, ...]
    component: str
    width: int
    calls: int
    tokens: int
    steps: tuple[Rank, ...]
    accumulated: Rank | None
    gain: float | None
    overlap: Overlap | None
    floor_first: Overlap | None
    floor_last: Overlap | None
    trace: tuple[float, ...]
    limited: str
    notes: tuple[str, ...]

    @property
    def shifted(self) -> bool | None:
        """Whether the last step's inputs span another space than step 0's; None where an overlap is missing or a span is the whole space."""
        if self.overlap is None or self.floor_first is None or self.floor_last is None or self.overlap.chance >= 1:
            return None
        noise = 1 - min(self.floor_first.value, self.floor_last.value)
        return 1 - self.overlap.value > SHIFT * max(noise, EPSILON)

    @property
    def blind(self) -> bool:
        """Whether step 0 leaves inputs of later steps unseen."""
        return self.calls > 1 and ((self.gain or 0.0) >= GAIN or self.shifted is True)

    @property
    def masked(self) -> bool:
        """Whether the sum over steps shows fewer directions than a later step alone."""
        if self.accumulated is None or len(self.steps) < 2:
            return False
        return max(step.rank for step in self.steps[1:]) >= MASKED * max(1, self.accumulated.rank)


@dataclass(frozen=True, kw_only=True)
class ExpertReading:
    """One expert of a fused projection, all loop steps together. share: its part of the projection's rows. bound: the largest rank that its rows can have.

    starved: some rows, but fewer than columns. untouched: none. rank: None where only counts were kept.
    """

    projection: str
    expert: int
    width: int
    tokens: int
    share: float
    bound: int
    rank: Rank | None
    starved: bool
    untouched: bool
    trace: float
    limited: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One row of the module's table. scheme: of a component's exposure, "" elsewhere."""

    kind: FindingKind
    name: str
    action: str
    reason: str
    scheme: str = ""


@dataclass(frozen=True, kw_only=True)
class SchemeReading:
    """Exposure and advice under one rounding. detail: the rounding in words."""

    detail: str
    exposure: Exposure
    advice: Advice


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Everything found. family, steps: of a looped model of a known family, "" and 1 otherwise. samples, tokens: surveyed. passes: over the data.

    left_out: (weight, reason, bytes). exposure: by scheme, read on exposure_samples; no_exposure: why there is none.
    """

    family: str
    steps: int
    samples: int
    tokens: int
    passes: int
    threshold: float
    layers: tuple[LayerReading, ...]
    experts: tuple[ExpertReading, ...]
    left_out: tuple[tuple[str, str, int], ...]
    exposure: Mapping[str, SchemeReading]
    exposure_samples: int
    no_exposure: str

    @property
    def findings(self) -> list[Finding]:
        """What to do, by name."""
        found = [
            Finding(kind="component", name=name, action=decision.action, reason=decision.reason, scheme=scheme)
            for scheme, reading in self.exposure.items()
            for name, decision in reading.advice.decisions.items()
        ]
        return [*found, *_layer_findings(self.layers), *_expert_findings(self.experts)]

    @property
    def summary(self) -> str:
        """What the ranks and the experts say."""
        return " ".join([f"{self.samples} samples, {self.tokens:,} tokens.", *_layer_words(self), *_expert_words(self.experts)])

    @property
    def text(self) -> str:
        """The paragraph of advice: the summary, and the exposure under each scheme."""
        return " ".join([self.summary, *(f"{reading.detail}: {reading.advice.text}" for reading in self.exposure.values())])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; infinite numbers become null."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["exposure"] = {
            scheme: {"detail": found.detail, **found.exposure.to_dict(), "advice": found.advice.to_dict()}
            for scheme, found in self.exposure.items()
        }
        layers = [_plain(layer) | {"shifted": layer.shifted, "blind": layer.blind, "masked": layer.masked} for layer in self.layers]
        made: dict[str, Any] = _plain(fields) | {"layers": layers, "findings": _plain(self.findings)}
        return made | {"summary": self.summary, "text": self.text}

    def rows(self) -> list[dict[str, Any]]:
        """One flat row a layer and a row an expert, for a table; what one kind has not is null."""
        return [*(_layer_row(layer) for layer in self.layers), *(_expert_row(expert) for expert in self.experts)]


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _value(found: Overlap | None) -> float | None:
    return None if found is None else found.value


def _layer_row(layer: LayerReading) -> dict[str, Any]:
    whole = layer.accumulated
    return {
        "kind": "layer",
        "name": layer.name,
        "expert": None,
        "component": layer.component,
        "members": list(layer.members),
        "width": layer.width,
        "calls": layer.calls,
        "tokens": layer.tokens,
        "n": layer.steps[0].n if layer.steps else 0,
        "n_accumulated": None if whole is None else whole.n,
        "rank_first": layer.steps[0].rank if layer.steps else None,
        "rank_last": layer.steps[-1].rank if layer.steps else None,
        "rank": None if whole is None else whole.rank,
        "effective_rank": None if whole is None else whole.effective,
        "bound": None if whole is None else whole.bound,
        "gain": layer.gain,
        "overlap": _value(layer.overlap),
        "overlap_chance": None if layer.overlap is None else layer.overlap.chance,
        "floor_first": _value(layer.floor_first),
        "floor_last": _value(layer.floor_last),
        "shifted": layer.shifted,
        "rank_by_step": [step.rank for step in layer.steps],
        "trace_by_step": list(layer.trace),
        "trace": sum(layer.trace),
        "share": None,
        "starved": None,
        "untouched": layer.tokens == 0,
        "note": "; ".join(note for note in (layer.limited, *layer.notes) if note),
    }


def _expert_row(expert: ExpertReading) -> dict[str, Any]:
    rank = expert.rank
    absent = dict.fromkeys(
        ("rank_first", "rank_last", "gain", "overlap", "overlap_chance", "floor_first", "floor_last", "shifted", "calls", "n_accumulated")
    )
    return absent | {
        "kind": "expert",
        "name": expert.projection,
        "expert": expert.expert,
        "component": "",
        "members": [f"{expert.projection}.{expert.expert}"],
        "width": expert.width,
        "tokens": expert.tokens,
        "n": 0 if rank is None else rank.n,
        "rank": None if rank is None else rank.rank,
        "effective_rank": None if rank is None else rank.effective,
        "bound": expert.bound,
        "rank_by_step": [],
        "trace_by_step": [],
        "trace": expert.trace,
        "share": expert.share,
        "starved": expert.starved,
        "untouched": expert.untouched,
        "note": expert.limited,
    }


# --- what follows ---


def _layer_findings(layers: Sequence[LayerReading]) -> list[Finding]:
    found = []
    for layer in layers:
        if layer.blind:
            found.append(Finding(kind="blind", name=layer.name, action="trajectory", reason=_blind_words(layer)))
        if layer.masked and layer.accumulated is not None:
            most = max(step.rank for step in layer.steps[1:])
            reason = (
                f"a later step alone has rank {most}, the sum over steps {layer.accumulated.rank}: step 0's largest eigenvalue hides it"
            )
            found.append(Finding(kind="masked", name=layer.name, action="try-skip-first", reason=reason))
        rows = layer.tokens * layer.calls
        if rows < layer.width:
            reason = f"n = {rows} rows < {layer.width} columns: the rank is at most {rows}"
            found.append(Finding(kind="rank-bound", name=layer.name, action="more-rows", reason=reason))
    return found


def _blind_words(layer: LayerReading) -> str:
    assert layer.accumulated is not None
    parts = [f"rank {layer.steps[0].rank} at step 0, {layer.accumulated.rank} over {layer.calls} steps, of {layer.width} columns"]
    if layer.overlap is not None:
        halves = " and ".join("none" if floor is None else f"{floor.value:.1%}" for floor in (layer.floor_first, layer.floor_last))
        parts.append(
            f"step 0 and the last step overlap by {layer.overlap.value:.1%}, "
            f"halves of the samples by {halves} (n = {layer.overlap.rows[0]} rows; chance {layer.overlap.chance:.1%})"
        )
    return "; ".join(parts)


def _expert_findings(experts: Sequence[ExpertReading]) -> list[Finding]:
    found = []
    for expert in experts:
        name = f"{expert.projection}.{expert.expert}"
        if expert.untouched:
            found.append(Finding(kind="untouched", name=name, action="no-statistics", reason="no token was routed to it"))
        elif expert.starved:
            reason = f"n = {expert.tokens} rows < {expert.width} columns: the rank is at most {expert.bound}"
            found.append(Finding(kind="starved", name=name, action="more-rows", reason=reason))
    return found


def _layer_words(survey: Survey) -> list[str]:
    looped = [layer for layer in survey.layers if layer.calls > 1]
    bound = [layer for layer in survey.layers if layer.tokens * layer.calls < layer.width]
    words = []
    if not looped:
        words.append(
            "No surveyed layer is called more than once a forward pass: the plain Hessian is the whole one, gain 1 by construction."
        )
    else:
        blind, masked = [layer for layer in looped if layer.blind], [layer for layer in looped if layer.masked]
        known = [layer for layer in looped if layer.gain is not None]
        lead = f"Step 0 is blind to later inputs in {len(blind)} of {len(looped)} inputs that are met more than once"
        if known:
            most = max(known, key=lambda layer: layer.gain or 0.0)
            assert most.accumulated is not None
            lead += (
                f"; largest rank gain {most.gain:.2g} at {most.name} ({most.steps[0].rank} to {most.accumulated.rank} of {most.width}, "
                f"n = {most.steps[0].n} rows a step)"
            )
        words.append(f"{lead}: {'calibrate with Hessians summed over all steps' if blind else 'one step shows most directions'}.")
        if masked:
            words.append(f"In {len(masked)} a later step alone has more rank than the sum; the window skip-first may be worth a try.")
    if bound:
        words.append(f"{len(bound)} inputs have fewer rows than columns, which bounds their ranks: give more samples before reading them.")
    limited = [layer for layer in survey.layers if layer.limited]
    if limited:
        words.append(f"{len(limited)} wide inputs were read from a part of their rows.")
    return words


def _expert_words(experts: Sequence[ExpertReading]) -> list[str]:
    if not experts:
        return []
    untouched, starved = sum(expert.untouched for expert in experts), sum(expert.starved for expert in experts)
    lead = f"Of {len(experts)} expert weights {untouched} got no token and {starved} fewer than they have columns"
    if untouched or starved:
        return [f"{lead}: give more samples, and record a fallback for what stays empty."]
    return [f"{lead}."]
