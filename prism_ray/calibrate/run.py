"""The layer-streamed pass: text to a checkpoint, block after block, over one worker or many.

For each block: every worker runs its lanes' chunks through it and sums their inputs; each unit's owner merges its states along the fixed tree, quantizes, and writes planes and
records; every worker loads the quantized block and writes the inputs of the next one. What is under way is in the work folder only, each file whole or absent, and a block is done when its
`block.json` is there: a run that was killed goes on at the first block that is not, and gives the same bytes as one that was not (field cases CAL-05, CAL-06, RAY-08).

The last unit is the head, where the policy quantizes it. Then the checkpoint is written from the planes and the source's other tensors.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

import prism_ray.models.looped  # noqa: F401 - registers its family with transformers
from prism_ray.calibrate.config import CalibrateConfig
from prism_ray.calibrate.text import Samples, lane_of, make_chunks, make_samples, read_texts
from prism_ray.calibrate.units import Unit, assign, make_units, read_records
from prism_ray.calibrate.worker import CHUNKS, BadSample, BlockWorker, Node, write_chunks
from prism_ray.core.compute import compute_dtype
from prism_ray.core.errors import CalibrationFailed, ConfigError, DataError
from prism_ray.core.files import require_disk, write_json
from prism_ray.formats.parameters import meta_model
from prism_ray.formats.policy import QuantPlan, make_plan
from prism_ray.hessian.capture import InputGroup
from prism_ray.models.load import load_tokenizer
from prism_ray.models.loops import find_loop
from prism_ray.models.source import resolve
from prism_ray.quantizers.base import QuantizerOptions
from prism_ray.quantizers.methods import METHODS

RUN, BLOCK, PROGRESS = "run.json", "block.json", "progress.jsonl"


Handles = Mapping[Node, Mapping[str, Any]]


class Crew(Protocol):
    """Workers of a pass. Shares and spans have one entry a worker; handles stand for states wherever they are."""

    workers: int

    def embed(self, shares: Sequence[Sequence[int]]) -> None:
        """Write the first block's inputs of each worker's chunks."""

    def collect(self, index: int, spans: Sequence[tuple[int, int]]) -> tuple[list[InputGroup], Handles]:
        """States of each worker's lanes."""

    def solve(
        self, index: int, owned: Sequence[Sequence[tuple[int, Unit]]], handles: Handles, method: str, options: QuantizerOptions
    ) -> list[dict[str, Any]]:
        """Quantize each owner's units."""

    def propagate(self, index: int, shares: Sequence[Sequence[int]]) -> None:
        """Write the next block's inputs."""

    def close(self) -> None:
        """Let the workers go."""


@dataclass(frozen=True, kw_only=True)
class CrewSpec:
    """What a worker is made of; plain data."""

    folder: str
    work: str
    dtype: str
    formats: dict[str, str]
    lanes: list[tuple[int, int]]
    dropped: list[int]

    def worker(self) -> BlockWorker:
        """A worker in this process."""
        lanes = [range(start, stop) for start, stop in self.lanes]
        return BlockWorker(self.folder, self.work, getattr(torch, self.dtype), self.formats, lanes, self.dropped)


class LocalCrew:
    """One worker, in this process."""

    workers = 1

    def __init__(self, spec: CrewSpec):
        self._worker = spec.worker()

    def embed(self, shares: Sequence[Sequence[int]]) -> None:
        self._worker.embed(shares[0])

    def collect(self, index: int, spans: Sequence[tuple[int, int]]) -> tuple[list[InputGroup], Handles]:
        return self._worker.collect(index, *spans[0])

    def solve(
        self, index: int, owned: Sequence[Sequence[tuple[int, Unit]]], handles: Handles, method: str, options: QuantizerOptions
    ) -> list[dict[str, Any]]:
        return self._worker.solve(index, owned[0], handles, method, options)

    def propagate(self, index: int, shares: Sequence[Sequence[int]]) -> None:
        self._worker.propagate(index, shares[0])

    def close(self) -> None:
        self._worker.close()


Hire = Callable[[CrewSpec], Crew]
Say = Callable[[str], None]


def calibrate(
    config: CalibrateConfig, work: Path | str, *, hire: Hire = LocalCrew, say: Say = print, samples: Samples | None = None
) -> dict[str, Any]:
    """Run or go on with the pass in a work folder; returns the summary (also in summary.json there).

    samples: token lists made elsewhere (Ray Data); default those of config.data. Raises ConfigError for a work folder of another run, BadSample, CalibrationFailed, and what
    loading and planning raise.
    """
    work = Path(work)
    folder = resolve(config.model)
    plan = make_plan(meta_model(folder), config.policy)
    if config.data is None and METHODS[config.method].needs_stats:
        raise ConfigError(f"method '{config.method}' needs calibration text", where="data", remedy="give --data FILE")
    run = _open_run(config, work, folder, samples, say)
    while True:
        try:
            return _pass(config, work, folder, plan, run, hire, say)
        except BadSample as fault:
            if config.nonfinite == "stop":
                raise
            run["dropped"] = sorted({*run["dropped"], fault.sample})
            say(f"sample {fault.sample} dropped for all layers ({fault}); starting again")
            if len(run["dropped"]) > config.max_dropped * run["samples"]:
                raise CalibrationFailed(
                    f"{len(run['dropped'])} of {run['samples']} samples make inputs that are not finite",
                    where=config.model,
                    remedy="mend the data",
                ) from None
            _restart(work, run)


def _open_run(config: CalibrateConfig, work: Path, folder: Path, samples: Samples | None, say: Say) -> dict[str, Any]:
    """The run's record: read and compared where there is one, else made with the chunks."""
    settings = config.to_dict()
    path = work / RUN
    if path.is_file():
        run: dict[str, Any] = json.loads(path.read_text())
        if run["config"] != settings:
            different = sorted(key for key in settings if run["config"].get(key) != settings[key])
            raise ConfigError(
                f"belongs to a run with other settings ({', '.join(different)})",
                where=str(work),
                remedy="choose another folder, or remove it",
            )
        return run
    if config.data is None:
        work.mkdir(parents=True, exist_ok=True)
        write_chunks(work / CHUNKS, [])
        run = {"config": settings, "folder": str(folder), "samples": 0, "tokens": 0, "cut": 0, "lanes": [], "dropped": []}
        write_json(path, run)
        return run
    tokenizer = load_tokenizer(folder)
    made = samples or make_samples(read_texts(config.data), tokenizer, config.data)
    chunks = make_chunks(made.tokens, config.data.chunk, tokenizer.pad_token_id)
    lanes = [[lane.start, lane.stop] for lane in lane_of(len(chunks), config.lanes)]
    say(
        f"{len(made.tokens)} samples, {made.total} tokens, {len(chunks)} chunks in {len(lanes)} lanes"
        + (f", {made.cut} samples cut" if made.cut else "")
    )
    if made.short:
        say(f"the text gives {len(made.tokens)} samples, {config.data.samples} were asked for")
    work.mkdir(parents=True, exist_ok=True)
    hidden = int(getattr(meta_model(folder).config.get_text_config(), "hidden_size", 0))
    require_disk(work, 2 * 4 * made.total * hidden, "two generations of activations")
    write_chunks(work / CHUNKS, chunks)
    run = {
        "config": settings, "folder": str(folder), "samples": len(made.tokens), "tokens": made.total, "cut": made.cut, "lanes": lanes, "dropped": [],
    }  # fmt: skip
    write_json(path, run)
    return run


def _restart(work: Path, run: dict[str, Any]) -> None:
    """Forget every block, keep the chunks."""
    for name in ("activations", "blocks"):
        shutil.rmtree(work / name, ignore_errors=True)
    write_json(work / RUN, run)


def _pass(config: CalibrateConfig, work: Path, folder: Path, plan: QuantPlan, run: dict[str, Any], hire: Hire, say: Say) -> dict[str, Any]:
    formats = {entry.name: entry.format for entry in plan.entries}
    dtype = str(compute_dtype(config.dtype)).removeprefix("torch.")
    spec = CrewSpec(
        folder=str(folder),
        work=str(work),
        dtype=dtype,
        formats=formats,
        lanes=[tuple(lane) for lane in run["lanes"]],
        dropped=run["dropped"],
    )
    started = time.monotonic()
    frame = meta_model(folder)
    frame.tie_weights()
    if find_loop(frame) is not None:
        from prism_ray.calibrate.whole import run_whole  # it writes the same folder, and so imports this module

        if config.data is None:
            raise ConfigError(
                "a looped model is quantized on its rollout, which needs calibration text", where="data", remedy="give --data FILE"
            )
        run_whole(config, work, folder, plan, run, say, recollect=config.recollect)
        return _close(config, work, run, plan, started, workers=1)
    crew = hire(spec)
    try:
        stages = _Stages(config, work, spec, plan, crew, run["samples"] - len(run["dropped"]), say)
        blocks = stages.blocks(folder)
        for index in range(blocks):
            stages.block(index, blocks)
        if any(not name.startswith(stages.prefix) for name in formats):
            stages.block(blocks, blocks)
    finally:
        crew.close()
    return _close(config, work, run, plan, started, workers=crew.workers)


def _close(config: CalibrateConfig, work: Path, run: Mapping[str, Any], plan: QuantPlan, started: float, *, workers: int) -> dict[str, Any]:
    """Write the summary, then hold it against the limits."""
    summary = summarize(config, work, run, plan) | {"seconds": round(time.monotonic() - started, 2), "workers": workers}
    write_json(work / "summary.json", summary)
    _judge(config, summary)
    return summary


class _Stages:
    """One pass's walk over the blocks."""

    def __init__(self, config: CalibrateConfig, work: Path, spec: CrewSpec, plan: QuantPlan, crew: Crew, samples: int, say: Say):
        self.config, self.work, self.spec, self.plan, self.crew, self.say = config, work, spec, plan, crew, say
        self.lanes = [range(*lane) for lane in spec.lanes]
        count = min(crew.workers, len(self.lanes))
        bounds = [worker * len(self.lanes) // max(1, count) for worker in range(count + 1)]
        self.spans = [(bounds[worker], bounds[worker + 1]) for worker in range(count)]
        self.shares = [[number for lane in self.lanes[start:stop] for number in lane] for start, stop in self.spans]
        self.samples = samples
        self.started = time.monotonic()
        self.first: int | None = None
        self.prefix = ""
        self.phases: dict[str, float] = {}

    def blocks(self, folder: Path) -> int:
        """Number of decoder blocks."""
        from prism_ray.models.families import decoder_layers, split_head

        model = meta_model(folder)
        model.tie_weights()
        held = decoder_layers(split_head(model).backbone)
        self.prefix = next(name for name, module in model.named_modules() if module is held) + "."
        self._meta = held
        return len(held)

    def _ready(self, index: int) -> bool:
        """Whether every chunk's input of a block is there."""
        folder = self.work / "activations" / f"{index:04d}"
        return (folder / "complete").is_file()

    def _complete(self, index: int) -> None:
        (self.work / "activations" / f"{index:04d}").mkdir(parents=True, exist_ok=True)
        (self.work / "activations" / f"{index:04d}" / "complete").touch()

    def _block_file(self, index: int) -> Path:
        return self.work / "blocks" / f"{index:04d}" / BLOCK

    def block(self, index: int, blocks: int) -> None:
        """Bring a block to its end, wherever it stands."""
        done = self._block_file(index)
        if done.is_file() and (not self.lanes or index >= blocks or self._ready(index + 1) or self._block_file(index + 1).is_file()):
            return
        began = time.monotonic()
        self.phases = {}
        if self.first is None:
            self.first = index
        if self.lanes and not self._ready(index):
            with self._timed("restore"):
                self._restore(index)
        if not done.is_file():
            self._solve(index, done)
        if self.lanes and index < blocks:
            with self._timed("propagate"):
                self.crew.propagate(index, self.shares)
            self._complete(index + 1)
            shutil.rmtree(self.work / "activations" / f"{index:04d}", ignore_errors=True)
        self._report(index, blocks, began)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.phases[phase] = round(time.monotonic() - began, 3)

    def _restore(self, index: int) -> None:
        """The inputs of a block when they are not there: from the start, through the blocks that are done."""
        if not self._ready(0):
            self.crew.embed(self.shares)
            self._complete(0)
        for earlier in range(index):
            if not self._ready(earlier + 1):
                self.crew.propagate(earlier, self.shares)
                self._complete(earlier + 1)

    def _solve(self, index: int, done: Path) -> None:
        shutil.rmtree(done.parent, ignore_errors=True)
        with self._timed("collect"):
            groups, handles = self.crew.collect(index, self.spans) if self.lanes else (self._lone_groups(index), {})
        units = self._units(index, groups)
        numbers = {unit.name: number for number, unit in enumerate(units)}
        owned = [[(numbers[unit.name], unit) for unit in part] for part in assign(units, self.crew.workers, self.config.options.refine)]
        with self._timed("solve"):
            parts = self.crew.solve(index, owned, handles, self.config.method, self.config.options)
        done.parent.mkdir(parents=True, exist_ok=True)
        sums = {key: sum(part.get(key, 0) for part in parts) for key in ("state_bytes", "received_bytes")}
        write_json(done, {"parts": sorted(part["part"] for part in parts), **sums})

    def _lone_groups(self, index: int) -> list[InputGroup]:
        """Every weight a group of its own: without rows nobody shares an input."""
        inside = f"{self.prefix}{index}." if index < len(self._meta) else ""
        found: list[InputGroup] = []
        for entry in self.plan.entries:
            if entry.name.startswith(inside) if inside else not entry.name.startswith(self.prefix):
                name = entry.name.removeprefix(inside)
                experts = entry.shape[0] if len(entry.shape) == 3 else 0
                found.append(InputGroup(name=name, members=(name,), width=entry.shape[-1], experts=experts))
        return found

    def _units(self, index: int, groups: Sequence[InputGroup]) -> list[Unit]:
        # A method that folds factors into a block's other weights needs all of them in one place.
        together = METHODS[self.config.method].choose is not None
        block = self._meta[index] if index < len(self._meta) else meta_model(Path(self.spec.folder))
        return make_units(block, groups, together=together)

    def _report(self, index: int, blocks: int, began: float) -> None:
        assert self.first is not None
        elapsed = time.monotonic() - self.started
        left = elapsed / (index + 1 - self.first) * (blocks - index - 1)
        line = note_progress(
            self.work,
            read_records(self.work / "blocks" / f"{index:04d}"),
            block=index,
            blocks=blocks,
            samples=self.samples,
            seconds=round(time.monotonic() - began, 2),
            seconds_left=round(max(0.0, left), 1),
            phases=self.phases,
        )
        self.say(
            f"block {index + 1}/{blocks}: {progress_text(line)}, {line['seconds_left']:.0f} s left, peak {line['peak_bytes'] / 2**30:.2f} GiB"
        )


def note_progress(work: Path, records: Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
    """Append a line about a finished block or stage to the work folder's progress file; the line. fields: what the caller knows beside the records."""
    errors = [record["error_after"] for record in records if record["error_after"] is not None]
    line = fields | {
        "weights": len(records),
        "fallbacks": sum(record["method"] != record["asked"] for record in records),
        "output_error": round(sum(errors) / len(errors), 6) if errors else None,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    with (work / PROGRESS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())
    return line


def progress_text(line: Mapping[str, Any]) -> str:
    """What a line of progress says of its weights and its time."""
    error = "" if line["output_error"] is None else f", output error {line['output_error']:.4g}"
    return f"{line['weights']} weights{error}, {line['fallbacks']} fallbacks, {line['seconds']} s"


def summarize(config: CalibrateConfig, work: Path, run: Mapping[str, Any], plan: QuantPlan) -> dict[str, Any]:
    """Counts over all records: weights, methods, fallbacks with their reasons, starved ones, mean errors."""
    records = [record for folder in sorted((work / "blocks").glob("[0-9]*")) for record in read_records(folder)]
    planned = {entry.name: (entry.shape[0] if len(entry.shape) == 3 else 1) for entry in plan.entries}
    if len(records) != sum(planned.values()):
        raise DataError(f"{len(records)} weights were quantized, {sum(planned.values())} were planned", where=str(work))
    fallbacks = [record for record in records if record["method"] != record["asked"]]
    starved = [record for record in records if record["tokens"] < record["shape"][1]] if run["samples"] else []
    blocks = [json.loads(path.read_text()) for path in (work / "blocks").glob("*/block.json")]
    return {
        "model": config.model,
        "method": config.method,
        "samples": run["samples"],
        "dropped": run["dropped"],
        "tokens": run["tokens"],
        "weights": len(records),
        "fallbacks": len(fallbacks),
        "fallback_share": len(fallbacks) / len(records),
        "fallback_reasons": {reason: sum(r["reason"] == reason for r in fallbacks) for reason in sorted({r["reason"] for r in fallbacks})},
        "starved": len(starved),
        "starved_share": len(starved) / len(records),
        "untouched": sum(record["tokens"] == 0 for record in records) if run["samples"] else 0,
        "damping_raised": sum(record["retries"] > 0 for record in records),
        "error_before": _mean([record["error_before"] for record in records]),
        "error_after": _mean([record["error_after"] for record in records]),
        "state_bytes": sum(block["state_bytes"] for block in blocks),
        "received_bytes": sum(block.get("received_bytes", 0) for block in blocks),
        "kept_bytes": sum(size for _, _, size in plan.kept),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None


def _judge(config: CalibrateConfig, summary: Mapping[str, Any]) -> None:
    for share, limit, what in (
        ("fallback_share", config.max_fallback_share, "fell back to another method"),
        ("starved_share", config.max_starved_share, "saw fewer rows than they have columns"),
    ):
        if summary[share] > limit:
            raise CalibrationFailed(
                f"{summary[share]:.1%} of {summary['weights']} weights {what}, allowed {limit:.1%} ({summary['fallback_reasons']})",
                where=config.model,
                remedy="give more calibration text, or raise the limit",
            )
