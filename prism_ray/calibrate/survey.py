"""A model's calibration inputs, surveyed before anything is quantized: rank by loop step, rows by expert, feedback exposure, advice (survey_result).

The model runs whole over the calibration windows. Every distinct input of its weights (q/k/v share one) has a state for each loop step (hessian.survey). Which weights: Linear
modules and fused experts that the policy's ignore patterns leave; formats play no part here, so a width that divides into no block is surveyed too. Looped models of
a known family are read for feedback exposure, once for INT4 with a scale a row and once with a scale a group (calibrate.exposure). Other models that call a weight
more than once have all readings but this one.

*Memory.* Inputs are surveyed in passes over the data whose states together take at most `memory_bytes`; one eigendecomposition takes about four float64 [I, I] beside them. An
input wider than `max_width`, or whose states alone pass the budget, is read from evenly spaced rows instead: so few that all its steps together have at most max_width rows. n
in every reading is the rows that it was read from, `tokens` all rows, and `limited` says why they differ.

Rows that are not finite stop the survey with the sample's number (field case CAL-10); padding never counts (CAL-07); weights that nothing called, large ones that are no Linear, and
those that the policy ignores are listed in `left_out` (CAL-04).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from prism_ray.calibrate.advice import advise, measure_exposure
from prism_ray.calibrate.exposure import ITERATIONS, Quantize, component_linears, round_int
from prism_ray.calibrate.survey_result import ExpertReading, LayerReading, Rank, SchemeReading, Survey
from prism_ray.calibrate.text import Chunk, Samples, TextData, make_chunks
from prism_ray.core.compute import DtypeName
from prism_ray.core.config import Config
from prism_ray.core.errors import ConfigError, DataError, ModelError
from prism_ray.formats.policy import LARGE_SHARE, QuantPolicy, expert_parameters
from prism_ray.hessian.capture import Capture, InputGroup, NonFinite, use_our_experts
from prism_ray.hessian.state import GramState
from prism_ray.hessian.survey import THRESHOLD, Overlap, Slot, Spectrum, StepCapture, Tally, overlap, rank_gain, spectrum
from prism_ray.models.families import unwrap
from prism_ray.models.loops import Batch, LoopSpec, count_calls, find_loop, run_loop

GROUPS = (128, 64, 32, 16)
"""Group sizes of grouped INT4; a weight takes the largest that divides its columns, and one scale a row where none does."""
NOT_CALLED = "no forward pass called it"
PROBE_TOKENS = 8
"""Length of the forward pass that tells the groups and the calls."""


class SurveyConfig(Config):
    """model: any source of models.source. steps: recurrence depth of a looped model, its own where None. ignore: globs of modules beside the policy's own.

    exposure_samples: samples for the feedback exposure, 0 for none. radius_iterations: of its spectral radius. max_width, memory_bytes: see the module's docstring.
    """

    model: str
    data: TextData
    steps: int | None = Field(default=None, ge=1)
    ignore: tuple[str, ...] = ()
    dtype: DtypeName = "auto"
    max_width: int = Field(default=2048, ge=2)
    memory_bytes: int = Field(default=4 * 2**30, ge=2**20)
    threshold: float = Field(default=THRESHOLD, gt=0.0, lt=1.0)
    exposure_samples: int = Field(default=8, ge=0)
    radius_iterations: int = Field(default=ITERATIONS, ge=2)


def run_survey(config: SurveyConfig, *, say: Callable[[str], None] = lambda _line: None) -> tuple[Survey, Samples]:
    """Load the model and the text of a config and survey them. Raises what the loaders raise, and what `survey_model` raises."""
    from prism_ray.calibrate.text import make_samples, read_texts
    from prism_ray.core.compute import compute_dtype
    from prism_ray.models.load import load_model, load_tokenizer
    from prism_ray.models.source import resolve

    folder = str(resolve(config.model))
    tokenizer = load_tokenizer(folder)
    samples = make_samples(read_texts(config.data), tokenizer, config.data)
    model = load_model(folder, dtype=compute_dtype(config.dtype))
    return survey_model(model, samples.tokens, config, pad=tokenizer.pad_token_id or 0, say=say), samples


@torch.no_grad()
def survey_model(
    model: Any, samples: Sequence[Sequence[int]], config: SurveyConfig, *, pad: int = 0, say: Callable[[str], None] = lambda _line: None
) -> Survey:
    """Survey a loaded model on token lists. The model is as it was afterwards.

    Raises ConfigError (steps for a model that does not loop), ModelError (no weight to survey, a loop of unknown layout), DataError (a sample that makes NaN or infinity).
    """
    inner: Any = unwrap(model)
    with _own_experts(inner), _at_depth(inner, config.steps):
        spec = find_loop(inner)
        names, left_out = planned(inner, config.ignore)
        chunks = _halves(samples, config.data.chunk, pad)
        calls, groups, missed = _probe(inner, spec, names, chunks[0][1])
        # A short pass does not route a token to every expert that is a module of its own; fused ones are called as a whole.
        late = [name for name in missed if isinstance(_held(inner, name), nn.Linear)]
        groups += [InputGroup(name=name, members=(name,), width=_held(inner, name).in_features) for name in late]
        left_out += [(name, NOT_CALLED, _size(inner, name)) for name in missed if name not in late]
        tokens = sum(map(len, samples))
        top_k = _top_k(inner)
        shares = [share_of(group, calls[group.name], tokens, top_k, config) for group in groups]
        layers: dict[str, LayerReading] = {}
        experts: dict[str, list[ExpertReading]] = {}
        waves = list(_waves(shares, config.memory_bytes))
        for number, wave in enumerate(waves, start=1):
            say(f"pass {number} of {len(waves)}: {len(wave)} of {len(shares)} inputs, {len(samples)} samples, {tokens:,} tokens")
            capture = _collect(inner, spec, wave, calls, chunks)
            left_out += [(name, NOT_CALLED, _size(inner, name)) for name in capture.missed]
            for share in _led(wave, capture):
                if share.group.experts:
                    experts[share.group.name] = _expert_readings(share, capture, config.threshold)
                else:
                    layers[share.group.name] = _layer_reading(share, capture, spec, config.threshold)
        exposure, why = _exposure(inner, spec, samples[: config.exposure_samples], config, pad, say)
    return Survey(
        family="" if spec is None else spec.family,
        steps=1 if spec is None else spec.steps,
        samples=len(samples),
        tokens=tokens,
        passes=len(waves),
        threshold=config.threshold,
        layers=tuple(layers.values()),
        experts=tuple(reading for found in experts.values() for reading in found),
        left_out=tuple(left_out),
        exposure=exposure,
        exposure_samples=len(samples[: config.exposure_samples]) if exposure else 0,
        no_exposure=why,
    )


# --- what is surveyed ---


def planned(model: nn.Module, ignore: Sequence[str] = ()) -> tuple[list[str], list[tuple[str, str, int]]]:
    """(Linear modules and fused expert parameters in module order, what is left out as (name, reason, bytes)). ModelError where nothing is left.

    Left out is named where it is a Linear, a fused expert, or any other matrix of more than LARGE_SHARE of the model that the ignore patterns do not name.
    """
    policy, extra = QuantPolicy(), tuple(ignore)
    names: list[str] = []
    left_out: list[tuple[str, str, int]] = []
    covered: set[int] = set()
    for path, module in model.named_modules():
        found = [(path, module.weight)] if isinstance(module, nn.Linear) else []
        found += [(f"{path}.{leaf}", getattr(module, leaf)) for leaf in expert_parameters(module)]
        for name, weight in found:
            covered.add(id(weight))
            if policy.format_of(name) is None or any(fnmatch.fnmatch(name, pattern) for pattern in extra):
                left_out.append((name, "ignored by the policy", weight.numel() * weight.element_size()))
            else:
                names.append(name)
    total = sum(parameter.numel() for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        if id(parameter) not in covered and parameter.ndim > 1 and policy.format_of(name.removesuffix(".weight")) is not None:
            if parameter.numel() > LARGE_SHARE * total:
                left_out.append((name, "neither a Linear nor fused experts", parameter.numel() * parameter.element_size()))
    if not names:
        raise ModelError(
            "has no full-precision linear weight to survey", where=type(model).__name__, remedy="give the model before quantization"
        )
    return names, left_out


def _held(model: nn.Module, name: str) -> Any:
    """The module or parameter of a path."""
    parent, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(parent), leaf)


def _size(model: nn.Module, name: str) -> int:
    held = _held(model, name)
    weight: Tensor = held.weight if isinstance(held, nn.Module) else held
    return weight.numel() * weight.element_size()


def _top_k(model: Any) -> int | None:
    config = model.config.get_text_config()
    found = next((getattr(config, name, None) for name in ("num_experts_per_tok", "experts_per_token", "top_k")), None)
    return found if isinstance(found, int) else None


@dataclass(frozen=True, kw_only=True)
class Share:
    """A group's place in memory. limit: rows kept of a step or an expert, None for all, 0 for counts alone. size: bytes at most. reason: of the limit."""

    group: InputGroup
    calls: int
    limit: int | None
    size: int
    reason: str


def share_of(group: InputGroup, calls: int, tokens: int, top_k: int | None, config: SurveyConfig) -> Share:
    """How a group is read. tokens: in all samples; a group of experts gets top_k rows of each a call, all experts where unknown."""
    width = group.width
    slots = group.experts or (calls + 2 if calls > 1 else 2)
    if group.experts:
        # Below I / 2 rows a state takes 4 I a row; a Gram matrix of 8 I^2 is made at I / 2, so it is at most 16 I a row.
        full = min(slots * 8 * width**2, 16 * width * tokens * calls * min(group.experts, top_k or group.experts))
    else:
        full = slots * min(8 * width**2, 16 * width * tokens)
    if width <= config.max_width and full <= config.memory_bytes:
        return Share(group=group, calls=calls, limit=None, size=full, reason="")
    steps = group.experts or calls
    # While a sample is thinned out its old and its new rows are held: 8 bytes a value instead of 4.
    affordable = config.memory_bytes // (8 * width * steps)
    limit = min(config.max_width // (1 if group.experts else calls), affordable)
    cause = f"{width} columns > max_width {config.max_width}" if width > config.max_width else f"its states would take {full:,} bytes"
    if limit < 2:
        return Share(group=group, calls=calls, limit=0, size=0, reason=f"{cause}, and not two rows of each fit: counts and traces alone")
    of = "an expert" if group.experts else "a step"
    return Share(
        group=group, calls=calls, limit=limit, size=8 * width * steps * limit, reason=f"{cause}: at most {limit} evenly spaced rows of {of}"
    )


def _waves(shares: Sequence[Share], memory: int) -> Iterator[list[Share]]:
    """Runs of groups in module order whose states fit together."""
    wave: list[Share] = []
    for share in shares:
        if wave and sum(other.size for other in wave) + share.size > memory:
            yield wave
            wave = []
        wave.append(share)
    if wave:
        yield wave


# --- forward passes ---


@contextmanager
def _own_experts(model: Any) -> Iterator[None]:
    """Call fused experts one by one within the block."""
    parts = list({id(config): config for config in (model.config, model.config.get_text_config())}.values())
    before = [part._experts_implementation for part in parts]
    use_our_experts(model)
    try:
        yield
    finally:
        for part, value in zip(parts, before, strict=True):
            part._experts_implementation = value


@contextmanager
def _at_depth(model: Any, steps: int | None) -> Iterator[None]:
    """Another recurrence depth within the block, where a family's config or backbone holds it."""
    if steps is None:
        yield
        return
    spec = find_loop(model)
    if spec is None:
        raise ConfigError("the model has no recurrence of a known family", where="steps", remedy="leave the option out")
    fields = ("num_loops", "mean_recurrence", "total_ut_steps")
    places = [
        (place, name)
        for place in (model.config, getattr(model, "base_model", None))
        for name in fields
        if isinstance(getattr(place, name, None), int)
    ]
    before = [getattr(place, name) for place, name in places]
    try:
        for place, name in places:
            setattr(place, name, steps)
        yield
    finally:
        for (place, name), value in zip(places, before, strict=True):
            setattr(place, name, value)


def _halves(samples: Sequence[Sequence[int]], chunk: int, pad: int) -> list[tuple[int, Chunk]]:
    """Chunks with the half of the samples that they belong to; one sample has no second half."""
    middle = len(samples) // 2 or 1
    found = [(half, part) for half, run in enumerate((samples[:middle], samples[middle:])) for part in make_chunks(run, chunk, pad)]
    return [
        (half, Chunk(index=part.index, first=part.first + half * middle, input_ids=part.input_ids, mask=part.mask)) for half, part in found
    ]


def _batch(chunk: Chunk) -> Batch:
    return {"input_ids": chunk.input_ids, "attention_mask": chunk.mask.to(torch.int64)}


def _forward(model: Any, spec: LoopSpec | None, chunk: Chunk) -> None:
    # The head is not surveyed, and its logits are the largest tensor of the pass; the loop's depth is the whole model's to set.
    if spec is None:
        model.base_model(**_batch(chunk), use_cache=False)
    else:
        run_loop(model, spec, _batch(chunk))


def _probe(
    model: nn.Module, spec: LoopSpec | None, names: Sequence[str], chunk: Chunk
) -> tuple[dict[str, int], list[InputGroup], list[str]]:
    """(calls a forward of each weight, groups, weights that were not called) from a short forward pass."""
    short = Chunk(index=0, first=0, input_ids=chunk.input_ids[:1, :PROBE_TOKENS], mask=chunk.mask[:1, :PROBE_TOKENS])
    modules = count_calls(model, _batch(short))
    # A fused parameter is used as often as its module is called.
    calls = {name: modules.get(name, modules.get(name.rpartition(".")[0], 1)) for name in names}
    with Capture(model, names, steps=calls) as capture, capture.batch(short.mask):
        _forward(model, spec, short)
    return calls, capture.groups, capture.missed


def _collect(
    model: nn.Module, spec: LoopSpec | None, wave: Sequence[Share], calls: Mapping[str, int], chunks: Sequence[tuple[int, Chunk]]
) -> StepCapture:
    names = [name for share in wave for name in share.group.members]
    limits = {share.group.name: share.limit for share in wave if share.limit is not None}
    with StepCapture(model, names, steps={name: calls[name] for name in names}, limits=limits) as capture:
        for half, chunk in chunks:
            capture.half = half
            try:
                with capture.batch(chunk.mask):
                    _forward(model, spec, chunk)
            except NonFinite as error:
                sample = chunk.first + error.row
                raise DataError(
                    f"sample {sample}: {error.what}", where=error.where, remedy="leave the sample out, or use float32"
                ) from error
    return capture


# --- readings ---


def _led(wave: Sequence[Share], capture: StepCapture) -> list[Share]:
    """The shares of the groups that the pass has found, with all their members: inputs that the short pass did not see may have turned out to be one."""
    found = {group.name: group for group in capture.groups}
    return [replace(share, group=found[share.group.name]) for share in wave if share.group.name in found]


def _layer_reading(share: Share, capture: StepCapture, spec: LoopSpec | None, threshold: float) -> LayerReading:
    group, states = share.group, capture.states_of(share.group.name)
    tallies = capture.tallies.get(group.name, {})
    steps = [tallies.get(step, Tally()) for step in range(share.calls)]
    last = share.calls - 1
    spectra = [_spectrum(states, step, threshold, vectors=last > 0 and step in (0, last)) for step in range(share.calls)]
    read = [found for found in spectra if found is not None]
    whole = None
    if len(read) == share.calls:
        # With one call the sum is step 0 itself, and so its spectrum: the gain is exactly 1.
        whole = read[0] if last == 0 else spectrum(list(states.values()), threshold=threshold)
    between = overlap(read[0], read[-1]) if last and whole is not None else None
    first = _floor(states, 0, threshold)
    final = _floor(states, last, threshold) if last else first
    bounds = [("step 0: " if last else "", read[0])] if read else []
    bounds += [("all steps: ", whole)] if last and whole is not None else []
    return LayerReading(
        name=group.name,
        members=group.members,
        component=(spec.component(group.name) or "") if spec is not None else "",
        width=group.width,
        calls=share.calls,
        tokens=steps[0].rows,
        steps=tuple(Rank.of(found) for found in read),
        accumulated=None if whole is None else Rank.of(whole),
        gain=None if whole is None else rank_gain(whole, read[0]),
        overlap=between,
        floor_first=first,
        floor_last=final,
        trace=tuple(step.squares for step in steps),
        limited=share.reason,
        notes=tuple(f"{which}{found.note}" for which, found in bounds if found.note),
    )


def _spectrum(states: Mapping[Slot, GramState], step: int, threshold: float, *, vectors: bool) -> Spectrum | None:
    held = [state for (of, _), state in states.items() if of == step]
    return spectrum(held, threshold=threshold, vectors=vectors) if held else None


def _floor(states: Mapping[Slot, GramState], step: int, threshold: float) -> Overlap | None:
    """Overlap of a step with itself between the halves; None where there is no second half."""
    halves = [states.get((step, half)) for half in (0, 1)]
    found = [spectrum([state], threshold=threshold, vectors=True) for state in halves if state is not None]
    return overlap(*found) if len(found) == 2 else None


def _expert_readings(share: Share, capture: StepCapture, threshold: float) -> list[ExpertReading]:
    group = share.group
    tallies = [capture.tallies.get(key, {}).values() for key in group.states]
    rows = [sum(tally.rows for tally in found) for found in tallies]
    total = sum(rows)
    readings = []
    for expert, key in enumerate(group.states):
        states = list(capture.states_of(key).values())
        tokens = rows[expert]
        rank = Rank.of(spectrum(states, threshold=threshold)) if states else None
        readings.append(
            ExpertReading(
                projection=group.name,
                expert=expert,
                width=group.width,
                tokens=tokens,
                share=tokens / total if total else 0.0,
                bound=min(tokens, group.width),
                rank=rank,
                starved=0 < tokens < group.width,
                untouched=tokens == 0,
                trace=sum(tally.squares for tally in tallies[expert]),
                # Only where rows were left out: most experts of a sparse model stay below any limit.
                limited=share.reason if tokens and (rank is None or rank.n < tokens) else "",
            )
        )
    return readings


# --- feedback exposure ---


def _grouped(weight: Tensor) -> Tensor:
    return round_int(weight, group=next((size for size in GROUPS if weight.shape[-1] % size == 0), None))


SCHEMES: dict[str, tuple[str, Quantize]] = {
    "int4-channel": ("INT4, one scale a row", round_int),
    "int4-group": (f"INT4, one scale for {', '.join(map(str, GROUPS[:-1]))} or {GROUPS[-1]} columns", _grouped),
}


def _exposure(
    model: nn.Module, spec: LoopSpec | None, samples: Sequence[Sequence[int]], config: SurveyConfig, pad: int, say: Callable[[str], None]
) -> tuple[dict[str, SchemeReading], str]:
    if spec is None:
        return {}, "the model has no recurrence of a known family"
    if not samples:
        return {}, "no samples were asked for"
    batches = [_batch(chunk) for chunk in make_chunks(samples, config.data.chunk, pad)]
    found = {}
    for scheme, (detail, quantize) in SCHEMES.items():
        say(f"feedback exposure, {detail}: {len(samples)} samples, {spec.steps} steps")
        exposure = measure_exposure(model, batches, quantize, iterations=config.radius_iterations)
        found[scheme] = SchemeReading(detail=detail, exposure=exposure, advice=advise(exposure, component_linears(model, spec)))
    return found, ""
