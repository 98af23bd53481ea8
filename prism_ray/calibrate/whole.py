"""Calibration of a looped model held whole in memory: its recurrence is one stage, its statistics come from whole rollouts (looped-quantization, section 5).

Stages in order: each prelude block; the *recurrence*, adapter and core together; each coda block; the head, where the plan has it. A planned weight outside of these belongs to the
recurrence where a forward pass calls it more than once, else to the head's stage. A stage's statistics come from forward passes in which all earlier stages are quantized and the
stage itself is in full precision, so those of the recurrence are sums over the reference rollout of T steps:

    H = sum over steps t of w_t X_t' X_t        w_t of `hessian.windows`; modules called once a forward have t = 0 alone, and no window

*Recollection*: with `recollect` = n the recurrence is quantized, its statistics are collected again on the rollout of the quantized weights, and it is quantized again from
the original weights, n times. Each round is kept until the last one is done.

The work folder is the layer-streamed pass's (`calibrate.worker`), with one folder a stage and weights under their whole paths in the model. A stage is done when its `block.json` is
there; a run that was killed goes on at the first stage, or round, that is not, and gives the same bytes. Lanes are merged along the same tree, each node as soon as both halves are
there, so that log2(lanes) + 2 states of a weight are in memory at most. Nothing of a forward pass is stored: a stage costs one rollout over all chunks (a prelude block's ends with the block).

Refuses: models that are quantized already, methods that fold factors into other weights (AWQ), a tied head without `untie`, models that no loop family describes. A model of no known
family whose blocks are called several times is refused for the layer-streamed pass too, by `refuse_recurrence`.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import prism_ray.models.looped  # noqa: F401 - registers its family with transformers
from prism_ray.calibrate.config import CalibrateConfig
from prism_ray.calibrate.run import BLOCK, note_progress, progress_text
from prism_ray.calibrate.skeleton import Skeleton
from prism_ray.calibrate.text import Chunk
from prism_ray.calibrate.units import apply_planes, make_units, read_planes, read_records, solve, weight_of, write_part
from prism_ray.calibrate.worker import CHUNKS, BadSample, NodeStates, merge, read_chunks
from prism_ray.core.compute import compute_dtype
from prism_ray.core.errors import ConfigError, ModelError
from prism_ray.core.files import TEMPORARY_PREFIX, write_json
from prism_ray.formats.modules import QuantizedModule
from prism_ray.formats.parameters import meta_model
from prism_ray.formats.policy import QuantPlan
from prism_ray.formats.tensor import QuantTensor
from prism_ray.hessian.capture import Capture, InputGroup, NonFinite, use_our_experts
from prism_ray.hessian.state import GramState
from prism_ray.hessian.windows import Window
from prism_ray.models.families import decoder_layers, split_head
from prism_ray.models.load import load_model
from prism_ray.models.loops import LoopSpec, count_calls, require_known_loop, run_loop
from prism_ray.quantizers.base import TensorRecord
from prism_ray.quantizers.methods import METHODS

Say = Callable[[str], None]


class _Stop(Exception):
    """Ends a forward pass behind the last module of a stage."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What is quantized at a time. formats: format of each planned weight by its path in the model. recurrent: whether the window and recollection concern it. end: module
    behind whose first call a forward pass may end, "" for none."""

    name: str
    formats: Mapping[str, str]
    recurrent: bool = False
    end: str = ""


def make_stages(spec: LoopSpec, formats: Mapping[str, str], calls: Mapping[str, int]) -> list[Stage]:
    """Stages of a model, those without a planned weight included. calls: of each module in a forward pass (models.loops.count_calls)."""
    parts: dict[str, dict[str, str]] = {}
    for name, chosen in formats.items():
        parts.setdefault(_stage_of(spec, name, calls), {})[name] = chosen
    stages = [Stage(name=block, formats=parts.get(block, {}), end=block) for block in spec.prelude]
    stages.append(Stage(name="recurrence", formats=parts.get("recurrence", {}), recurrent=True))
    stages += [Stage(name=block, formats=parts.get(block, {})) for block in spec.coda]
    return [*stages, Stage(name="head", formats=parts.get("head", {}))]


def _stage_of(spec: LoopSpec, name: str, calls: Mapping[str, int]) -> str:
    component = spec.component(name)
    if component in ("prelude", "coda"):
        blocks = spec.prelude if component == "prelude" else spec.coda
        return next(block for block in blocks if name == block or name.startswith(f"{block}."))
    # A fused expert parameter is no module: its experts are called.
    count = max(calls.get(name, 0), calls.get(name.rpartition(".")[0], 0) if name not in calls else 0)
    return "recurrence" if component is not None or count > 1 else "head"


def stored_formats(folder: Path, formats: Mapping[str, str]) -> dict[str, str]:
    """The planned weights, by path in the model, whose records lie in the folder of a stage."""
    done = {record["name"] for record in read_records(folder)}
    return {name: chosen for name, chosen in formats.items() if name in done or f"{name}.0" in done}


class WholePass:
    """One pass over a looped model in memory, whose planned weights are replaced by their dequantized planes as it goes.

    model: a causal language model in eval mode; it is changed. plan: made from it. config: method, options and window count here. chunks, lanes, dropped: of the text, see
    `calibrate.worker`; no lanes where the method needs no statistics. recollect: rounds, or whether there is one.
    """

    def __init__(
        self,
        model: Any,
        spec: LoopSpec,
        plan: QuantPlan,
        config: CalibrateConfig,
        work: Path | str,
        *,
        chunks: Sequence[Chunk] = (),
        lanes: Sequence[range] = (),
        dropped: Sequence[int] = (),
        recollect: bool | int = False,
        say: Say = print,
    ):
        self.model, self.spec, self.config, self.work, self.say = model, spec, config, Path(work), say
        self.chunks, self.lanes, self.dropped = list(chunks), list(lanes), set(dropped)
        self.recollect = int(recollect)
        self._check(plan)
        use_our_experts(model)
        self.calls = count_calls(model, {"input_ids": chunks[0].input_ids[:1, :1]} if chunks else None)
        self.stages = make_stages(spec, {entry.name: entry.format for entry in plan.entries}, self.calls)

    def _check(self, plan: QuantPlan) -> None:
        where = type(self.model).__name__
        if METHODS[self.config.method].choose is not None:
            what = f"method '{self.config.method}' folds factors into the weights before, which is not known for a loop"
            raise ConfigError(what, where=where, remedy="use gptq, mse or rtn")
        if any(isinstance(module, QuantizedModule) for module in self.model.modules()):
            raise ModelError("is quantized already", where=where, remedy="give the full-precision model")
        language_model = split_head(self.model)
        head = next(name for name, module in self.model.named_modules() if module is language_model.head)
        if language_model.tied and any(entry.name == head for entry in plan.entries):
            if not plan.policy.untie:
                what = "shares its weight with the embedding and is to be quantized"
                raise ModelError(what, where=head, remedy="set untie=true, or ignore it")
            module: Any = language_model.head
            module.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=False)
            self.model.config.tie_word_embeddings = False

    # --- stages ---

    def run(self) -> None:
        """Bring every stage to its end; the model holds the quantized weights then."""
        began = time.monotonic()
        for index, stage in enumerate(self.stages):
            if not stage.formats:
                continue
            started, done = time.monotonic(), (self.folder(index) / BLOCK).is_file()
            self.quantize(index)
            if not done:
                self._report(index, started, began)

    def folder(self, index: int) -> Path:
        """Where a stage's planes and records lie."""
        return self.work / "blocks" / f"{index:04d}"

    def quantize(self, index: int) -> None:
        """Quantize a stage unless its folder says that it is done, and put the dequantized weights in the model. Earlier stages must be in it already."""
        stage, folder = self.stages[index], self.folder(index)
        rounds = self.recollect if stage.recurrent and self.lanes else 0
        if (folder / BLOCK).is_file():
            found = json.loads((folder / BLOCK).read_text())["rounds"]
            if found != rounds:
                raise ConfigError(
                    f"was collected again {found} times, not {rounds}", where=str(folder), remedy="choose another work folder"
                )
        else:
            original = self._weights(stage) if rounds else {}
            for number in range(rounds + 1):
                place = folder if number == rounds else folder / f"round-{number}"
                if (place / BLOCK).is_file():
                    continue
                if number:
                    self._apply(stage, folder / f"round-{number - 1}")
                groups, states = self.collect(stage)
                for held, weight in original.values():
                    held.copy_(weight)
                self._solve(stage, groups, states, place, rounds)
        for number in range(rounds):
            shutil.rmtree(folder / f"round-{number}", ignore_errors=True)
        self._apply(stage, folder)

    def _weights(self, stage: Stage) -> dict[str, tuple[Tensor, Tensor]]:
        """The storage of each weight of a stage, and a copy of what it holds."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for name in stage.formats:
            held: Any = getattr(self.model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            parameter: Any = held.weight if isinstance(held, nn.Module) else held
            found[name] = (parameter.data, parameter.data.clone())
        return found

    def _apply(self, stage: Stage, folder: Path) -> None:
        # From the files also in the run that has just written them: a resumed run must see the same weights.
        apply_planes(self.model, read_planes(folder, stage.formats))

    def _solve(self, stage: Stage, groups: Sequence[InputGroup], states: NodeStates, place: Path, rounds: int) -> None:
        place.mkdir(parents=True, exist_ok=True)
        for left in [*place.glob("part-*"), *place.glob(f"{TEMPORARY_PREFIX}*")]:
            left.unlink()
        parts, state_bytes = [], 0
        for number, unit in enumerate(make_units(self.model, groups)):
            merged = {key: merge(states, key, len(self.lanes)) for key in unit.keys}
            present = {key: state for key, state in merged.items() if state is not None}
            solved: list[tuple[str, QuantTensor, TensorRecord]] = solve(
                unit, self.model, "", stage.formats, present, self.config.method, self.config.options
            )
            path = place / f"part-{number:04d}.safetensors"
            write_part(path, solved)
            parts.append(path.name)
            state_bytes += sum(state.nbytes for state in present.values())
        write_json(place / BLOCK, {"stage": stage.name, "parts": parts, "state_bytes": state_bytes, "rounds": rounds})

    # --- statistics ---

    def collect(self, stage: Stage) -> tuple[list[InputGroup], NodeStates]:
        """Input groups of a stage's weights, and their states over all lanes by nodes of the lanes' tree, from the model as it is."""
        if not self.lanes:
            return [self._lone_group(name) for name in stage.formats], {}
        groups: list[InputGroup] = []
        nodes: NodeStates = {}
        for number, lane in enumerate(self.lanes):
            with self._capture(stage) as capture:
                for index in lane:
                    if (chunk := self._part(index)) is not None:
                        self._collect_chunk(capture, stage, chunk)
            groups = capture.groups or groups
            if capture.groups and capture.missed:
                raise ModelError(
                    f"{len(capture.missed)} planned weight(s) were not called in a forward pass, first '{capture.missed[0]}'",
                    where=stage.name,
                    remedy="exclude them from the plan, or report the family",
                )
            nodes[number, number + 1] = capture.states
            _carry(nodes, number)
        return groups, nodes

    def _capture(self, stage: Stage) -> Capture:
        # A window is about steps: what is called once has none to choose from.
        window = self.config.window if stage.recurrent else Window()
        return Capture(self.model, list(stage.formats), window=window, steps=self.calls)

    def _lone_group(self, name: str) -> InputGroup:
        held = getattr(self.model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
        experts = 0 if isinstance(held, nn.Module) else int(held.shape[0])
        width = weight_of(self.model, name, 0 if experts else None).shape[-1]
        return InputGroup(name=name, members=(name,), width=width, experts=experts)

    def _part(self, number: int) -> Chunk | None:
        """A chunk without its dropped samples, None where nothing is left."""
        chunk = self.chunks[number]
        rows = [row for row in range(chunk.mask.shape[0]) if chunk.first + row not in self.dropped]
        return Chunk(index=number, first=chunk.first, input_ids=chunk.input_ids[rows], mask=chunk.mask[rows]) if rows else None

    def _collect_chunk(self, capture: Capture, stage: Stage, chunk: Chunk) -> None:
        try:
            with capture.batch(chunk.mask):
                self._forward(chunk, stage.end)
        except NonFinite as fault:
            sample = self._bad_sample(stage, chunk)
            raise BadSample(fault.what, where=f"{fault.where}, sample {sample}", sample=sample) from None

    def _bad_sample(self, stage: Stage, chunk: Chunk) -> int:
        """The first sample of a chunk that makes an input that is not finite, each run alone."""
        kept = [number for row in range(self.chunks[chunk.index].mask.shape[0]) if (number := chunk.first + row) not in self.dropped]
        for row, number in enumerate(kept):
            part = slice(row, row + 1)
            alone = Chunk(index=chunk.index, first=number, input_ids=chunk.input_ids[part], mask=chunk.mask[part])
            try:
                with self._capture(stage) as capture, capture.batch(alone.mask):
                    self._forward(alone, stage.end)
            except NonFinite:
                return number
        return kept[0]

    @torch.no_grad()
    def _forward(self, chunk: Chunk, end: str) -> None:
        """A rollout of the deployed depth; a family that draws its initial state draws another one for every chunk, and the same one in every stage."""
        batch = {"input_ids": chunk.input_ids}
        if not bool(chunk.mask.all()):
            batch["attention_mask"] = chunk.mask.to(torch.int64)
        handle = self.model.get_submodule(end).register_forward_hook(_stop) if end else None
        try:
            run_loop(self.model, self.spec, batch, seed=chunk.index)
        except _Stop:
            pass
        finally:
            if handle is not None:
                handle.remove()

    def _report(self, index: int, started: float, began: float) -> None:
        """A line of progress, told and kept in the work folder."""
        planned = [number for number, stage in enumerate(self.stages) if stage.formats]
        place, now = planned.index(index), time.monotonic()
        line = note_progress(
            self.work,
            read_records(self.folder(index)),
            block=place,
            blocks=len(planned),
            stage=self.stages[index].name,
            samples=sum(len(chunk.mask) for chunk in self.chunks) - len(self.dropped),
            seconds=round(now - started, 2),
            seconds_left=round((now - began) / (place + 1) * (len(planned) - place - 1), 1),
        )
        self.say(f"stage {place + 1}/{len(planned)} {line['stage']}: {progress_text(line)}")


def _stop(*_: object) -> None:
    raise _Stop


def _carry(nodes: NodeStates, lane: int) -> None:
    """Merge the node that ends with `lane` with the one before it while both are halves of a node of the tree."""
    low, size = lane, 1
    while low % (2 * size) == size:
        left, right = nodes.pop((low - size, low)), nodes.pop((low, low + size))
        low, size = low - size, 2 * size
        nodes[low, low + size] = {key: _sum(left.get(key), right.get(key)) for key in sorted({*left, *right})}


def _sum(left: GramState | None, right: GramState | None) -> GramState:
    found = right if left is None else left if right is None else left + right
    assert found is not None
    return found


# --- entry ---


def run_whole(
    config: CalibrateConfig,
    work: Path,
    folder: Path,
    plan: QuantPlan,
    run: Mapping[str, Any],
    say: Say = print,
    *,
    recollect: bool | int = False,
) -> Any:
    """Run or go on with the pass of a work folder (`calibrate.run` has written its chunks and `run`); returns the model with quantized weights.

    Raises ModelError for a model that recurs in a way that no family describes, or not at all; BadSample.
    """
    model: Any = load_model(folder, dtype=compute_dtype(config.dtype))
    chunks = read_chunks(work / CHUNKS)
    spec = require_known_loop(model)
    if spec is None:
        raise ModelError("is no looped model", where=str(folder), remedy="use the layer-streamed pass")
    lanes = [range(*lane) for lane in run["lanes"]]
    held = WholePass(model, spec, plan, config, work, chunks=chunks, lanes=lanes, dropped=run["dropped"], recollect=recollect, say=say)
    held.run()
    return model


def refuse_recurrence(skeleton: Skeleton, chunk: Chunk) -> None:
    """Raise ModelError for a model that the layer-streamed pass would take for a plain one: one whose forward pass calls a decoder block more than once, or whose blocks share a
    module with weights. Runs the frame without its blocks on the chunk."""
    meta = meta_model(skeleton.source.folder)
    meta.tie_weights()
    layers = decoder_layers(split_head(meta).backbone)
    where, remedy = type(skeleton.model).__name__, "no family in prism_ray/models/loops.py describes it; add it there"
    owner: dict[int, int] = {}
    for index, block in enumerate(layers):
        for name, module in block.named_modules():
            if (first := owner.setdefault(id(module), index)) != index and list(module.parameters(recurse=False)):
                raise ModelError(f"blocks {first} and {index} share '{name or 'themselves'}', so it recurs", where=where, remedy=remedy)
    calls: Counter[int] = Counter()
    handles = [
        skeleton.model.get_submodule(skeleton.prefix(index)).register_forward_pre_hook(lambda *_, index=index: calls.update([index]))
        for index in range(skeleton.layers)
    ]
    try:
        skeleton.finish(chunk, skeleton.embed(chunk))
    finally:
        for handle in handles:
            handle.remove()
    for index, count in sorted(calls.items()):
        # The embedding's forward ends at the first block, which is called once for that.
        if (found := count - (index == 0)) > 1:
            raise ModelError(f"calls '{skeleton.prefix(index)}' {found} times in one forward pass", where=where, remedy=remedy)
