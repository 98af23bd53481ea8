"""A model's calibration inputs, surveyed before anything is quantized: rank by loop step, rows by expert, feedback exposure, advice (survey_result).

The model runs whole over the calibration windows. Every distinct input of its weights (q/k/v share one) has a state for each loop step (hessian.survey). Which weights: Linear
modules and fused experts that the policy's ignore patterns leave; formats play no part here, so a width that divides into no block is surveyed too. Looped models of
a known family are read for feedback exposure, once for INT4 with a scale a row and once with a scale a group (calibrate.exposure). Other models that call a weight
more than once have all readings but this one.

*Memory.* As survey_plan says: several passes over the data where the states do not fit one, evenly spaced rows of what is too wide. n in every reading is the rows that it was read from,
`tokens` all rows, and `limited` says why they differ.

Rows that are not finite stop the survey with the sample's number (field case CAL-10); padding never counts (CAL-07); weights that nothing called, large ones that are no Linear, and
those that the policy ignores are listed in `left_out` (CAL-04).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from prism_ray.calibrate.advice import advise, measure_exposure
from prism_ray.calibrate.exposure import Quantize, component_linears, round_int
from prism_ray.calibrate.survey_plan import Share, SurveyConfig, held_at, passes, planned, share_of, size_of, top_k_of
from prism_ray.calibrate.survey_result import ExpertReading, LayerReading, Rank, SchemeReading, Survey
from prism_ray.calibrate.text import Chunk, Samples, make_chunks
from prism_ray.core.errors import ConfigError, DataError
from prism_ray.hessian.capture import Capture, InputGroup, NonFinite, use_our_experts
from prism_ray.hessian.state import GramState
from prism_ray.hessian.survey import Overlap, Slot, Spectrum, StepCapture, Tally, overlap, rank_gain, spectrum
from prism_ray.models.families import unwrap
from prism_ray.models.loops import Batch, LoopSpec, count_calls, find_loop, run_loop

GROUPS = (128, 64, 32, 16)
"""Group sizes of grouped INT4; a weight takes the largest that divides its columns and is below them, and one scale a row where none is."""
NOT_CALLED = "no forward pass called it"
PROBE_TOKENS = 8
"""Length of the forward pass that tells the groups and the calls."""


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
        late = [name for name in missed if isinstance(held_at(inner, name), nn.Linear)]
        groups += [InputGroup(name=name, members=(name,), width=held_at(inner, name).in_features) for name in late]
        left_out += [(name, NOT_CALLED, size_of(inner, name)) for name in missed if name not in late]
        tokens = sum(map(len, samples))
        top_k = top_k_of(inner)
        shares = [share_of(group, calls[group.name], tokens, top_k, config) for group in groups]
        layers: dict[str, LayerReading] = {}
        experts: dict[str, list[ExpertReading]] = {}
        waves = list(passes(shares, config.memory_bytes))
        for number, wave in enumerate(waves, start=1):
            say(f"pass {number} of {len(waves)}: {len(wave)} of {len(shares)} inputs, {len(samples)} samples, {tokens:,} tokens")
            capture = _collect(inner, spec, wave, calls, chunks)
            left_out += [(name, NOT_CALLED, size_of(inner, name)) for name in capture.missed]
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
    return round_int(weight, group=next((size for size in GROUPS if size < weight.shape[-1] and weight.shape[-1] % size == 0), None))


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
