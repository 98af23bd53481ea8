"""The layer-streamed pass over a Ray cluster: Ray Data reads and tokenizes, actors hold blocks, states travel through the object store once.

Every actor is a `calibrate.worker.BlockWorker` over the same work folder, which must lie where all nodes see it. An actor keeps its lanes' states in its own memory until the owners are known; then each unit's
states become one object, fetched by that unit's owner alone and dropped with its reference (field case RAY-06). Because a worker's input and output are files, a worker that dies is
replaced and its call made again: same lanes, same sums, same bytes. Lost workers and faults of the code are counted apart (field case RAY-08): a PrismError ends the run at once, a lost
worker is replaced up to `max_losses` times.

No collective is called, so workers need not hold the same modules (field case CAL-05): a call that does not answer within `timeout_s` is an error that names the
block, the worker and its lanes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, cast

import ray
from pydantic import Field
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayTaskError

from prism_ray.calibrate.config import CalibrateConfig
from prism_ray.calibrate.run import CrewSpec, Handles, calibrate
from prism_ray.calibrate.text import Samples, TextData, read_texts, tokenize, window
from prism_ray.calibrate.units import Unit
from prism_ray.calibrate.worker import Node, NodeStates
from prism_ray.core.config import Config
from prism_ray.core.errors import EnvironmentFault, PrismError, ResourceError, one_line
from prism_ray.core.rows import format_of
from prism_ray.dist.cluster import unwrap
from prism_ray.hessian.capture import InputGroup
from prism_ray.hessian.state import GramState
from prism_ray.models.load import load_tokenizer
from prism_ray.quantizers.base import QuantizerOptions

READER_CPUS = 0.5
"""What a tokenizing actor asks for."""


class CrewConfig(Config):
    """workers: actors. cpus, gpus: what one of them asks for; it computes with max(1, cpus) threads. reader_cpus: left free for Ray Data. max_losses: workers lost
    before the run fails. timeout_s: longest time for one call."""

    workers: int = Field(default=2, ge=1)
    cpus: float = Field(default=1.0, gt=0)
    gpus: float = Field(default=0.0, ge=0)
    reader_cpus: float = Field(default=0.0, ge=0)
    max_losses: int = Field(default=10, ge=0)
    timeout_s: float = Field(default=24 * 3600.0, gt=0)


class CalibrationWorker:
    """An actor around a BlockWorker."""

    def __init__(self, spec: CrewSpec, threads: int):
        import torch

        torch.set_num_threads(threads)
        self._worker = spec.worker()
        self._states: NodeStates = {}

    def ping(self) -> bool:
        """Whether it lives."""
        return True

    def embed(self, numbers: Sequence[int] | None, split: Any = None) -> int:
        """Write the first block's inputs of chunks given by number, or of those that a split of Ray Data hands out."""
        if split is not None:
            numbers = [int(row["chunk"]) for row in split.iter_rows()]
        return self._worker.embed(numbers or [])

    def collect(self, index: int, start: int, stop: int) -> list[InputGroup]:
        """Sum the lanes' states and keep them."""
        groups, self._states = self._worker.collect(index, start, stop)
        return groups

    def pack(self, keys: Sequence[Sequence[str]]) -> Any:
        """One object for each list of keys: {node: {key: state}}. They are dropped here."""
        packs = [{node: {key: states[key] for key in wanted if key in states} for node, states in self._states.items()} for wanted in keys]
        self._states = {}
        return packs[0] if len(packs) == 1 else tuple(packs)

    def solve(
        self,
        index: int,
        units: Sequence[tuple[int, Unit]],
        packs: Sequence[Sequence[ray.ObjectRef]],
        method: str,
        options: QuantizerOptions,
        own: int,
    ) -> list[dict[str, Any]]:
        """Quantize units one after the other, each with its states fetched just before. own: which pack of a unit this worker made itself."""
        done: list[dict[str, Any]] = []
        for unit, references in zip(units, packs, strict=True):
            states: dict[Node, dict[str, GramState]] = {}
            received = 0
            for worker, part in enumerate(ray.get(list(references))):
                states |= part
                received += sum(state.nbytes for held in part.values() for state in held.values()) if worker != own else 0
            done += [line | {"received_bytes": received} for line in self._worker.solve(index, [unit], states, method, options)]
        return done

    def propagate(self, index: int, numbers: Sequence[int]) -> None:
        """Write the next block's inputs."""
        self._worker.propagate(index, numbers)

    def close(self) -> None:
        """Drop the block."""
        self._worker.close()


class RayCrew:
    """Workers of a pass as actors. See the module docstring for what happens when one is lost."""

    def __init__(self, spec: CrewSpec, config: CrewConfig, say: Callable[[str], None]):
        self.spec, self.config, self.say = spec, config, say
        self.workers = config.workers
        self.losses = 0
        self._spans: list[tuple[int, int]] = []
        self._collected: list[int | None] = [None] * self.workers
        self._actors: list[Any] = [self._hire() for _ in range(self.workers)]

    def _hire(self) -> Any:
        threads = max(1, int(self.config.cpus))
        remote = ray.remote(num_cpus=self.config.cpus, num_gpus=self.config.gpus, max_restarts=0, max_task_retries=0)(CalibrationWorker)
        return cast(Any, remote).remote(self.spec, threads)

    def _each(self, what: str, method: str, calls: dict[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call a method of each worker with its arguments; those of lost workers again on new ones. Raises the PrismError of a call, or EnvironmentFault."""
        answers: dict[int, Any] = {}
        while len(answers) < len(calls):
            pending = {
                worker: getattr(self._actors[worker], method).remote(*arguments)
                for worker, arguments in calls.items()
                if worker not in answers
            }
            for worker, reference in pending.items():
                try:
                    answers[worker] = ray.get(reference, timeout=self.config.timeout_s)
                except RayActorError as loss:
                    self._replace(worker, what, loss)
                except GetTimeoutError:
                    raise EnvironmentFault(
                        f"worker {worker} gave no answer in {self.config.timeout_s:g} s", where=what, remedy="see its log"
                    ) from None
                except RayTaskError as error:
                    cause = unwrap(error)
                    if isinstance(cause, PrismError):
                        raise cause from None
                    raise EnvironmentFault(f"worker {worker} failed ({one_line(cause)})", where=what, remedy="see its log") from error
        return answers

    def _replace(self, worker: int, what: str, loss: BaseException) -> None:
        self.losses += 1
        if self.losses > self.config.max_losses:
            raise EnvironmentFault(
                f"{self.losses} workers were lost, allowed {self.config.max_losses} ({one_line(loss)})",
                where=what,
                remedy="look at the nodes",
            ) from None
        self.say(f"worker {worker} was lost during {what}; another one takes over")
        self._actors[worker] = self._hire()
        self._collected[worker] = None

    def embed(self, shares: Sequence[Sequence[int]]) -> None:
        chunks = [{"chunk": number} for share in shares for number in share]
        count = min(self.workers, len(chunks))
        splits = ray.data.from_items(chunks, override_num_blocks=len(chunks)).streaming_split(count, equal=False)
        try:
            for reference in [self._actors[worker].embed.remote(None, split) for worker, split in enumerate(splits)]:
                ray.get(reference, timeout=self.config.timeout_s)
        except RayActorError as loss:
            # A split cannot be read a second time; the shares can.
            self.say(f"a worker was lost during embedding ({one_line(loss)}); embedding again")
            for worker in self._dead():
                self._replace(worker, "embedding", loss)
            self._each("embedding", "embed", {worker: (share,) for worker, share in enumerate(shares)})
        except RayTaskError as error:
            cause = unwrap(error)
            raise cause if isinstance(cause, PrismError) else EnvironmentFault(f"embedding failed ({one_line(cause)})") from None

    def _dead(self) -> list[int]:
        dead: list[int] = []
        for worker, actor in enumerate(self._actors):
            try:
                ray.get(actor.ping.remote(), timeout=self.config.timeout_s)
            except RayActorError:
                dead.append(worker)
        return dead

    def collect(self, index: int, spans: Sequence[tuple[int, int]]) -> tuple[list[InputGroup], Handles]:
        self._spans = list(spans)
        self._collected = [None] * self.workers
        return self._gather(index), {}

    def _gather(self, index: int) -> list[InputGroup]:
        """Collect whatever workers have not collected yet; the groups."""
        calls = {worker: (index, *span) for worker, span in enumerate(self._spans) if self._collected[worker] != index}
        found = self._each(f"the statistics of block {index}", "collect", calls)
        for worker in found:
            self._collected[worker] = index
        return next((groups for groups in found.values() if groups), [])

    def solve(
        self, index: int, owned: Sequence[Sequence[tuple[int, Unit]]], handles: Handles, method: str, options: QuantizerOptions
    ) -> list[dict[str, Any]]:
        units = [unit for part in owned for _, unit in part]
        while True:
            try:
                return self._solve(index, owned, units, method, options)
            except (RayActorError, ObjectLostError) as loss:
                # Whoever was lost held states of its lanes or units of its own: both are made again.
                for worker in self._dead():
                    self._replace(worker, f"the solves of block {index}", loss)
                self._collected = [None] * self.workers
                self._gather(index)

    def _solve(
        self, index: int, owned: Sequence[Sequence[tuple[int, Unit]]], units: Sequence[Unit], method: str, options: QuantizerOptions
    ) -> list[dict[str, Any]]:
        keys = [unit.keys for unit in units]
        packs: dict[str, list[Any]] = {unit.name: [] for unit in units}
        for worker in range(len(self._spans)):
            references = self._actors[worker].pack.options(num_returns=len(keys)).remote(keys)
            for unit, reference in zip(units, [references] if len(keys) == 1 else references, strict=True):
                packs[unit.name].append(reference)
            self._collected[worker] = None
        calls = [
            self._actors[worker].solve.remote(index, list(part), [packs[unit.name] for _, unit in part], method, options, worker)
            for worker, part in enumerate(owned)
            if part
        ]
        done: list[dict[str, Any]] = []
        for reference in calls:
            try:
                done += ray.get(reference, timeout=self.config.timeout_s)
            except RayTaskError as error:
                cause = unwrap(error)
                if isinstance(cause, (ObjectLostError, RayActorError)):
                    raise cause from None
                raise (
                    cause
                    if isinstance(cause, PrismError)
                    else EnvironmentFault(f"a solve failed ({one_line(cause)})", where=f"block {index}")
                ) from None
            except GetTimeoutError:
                raise EnvironmentFault(f"no answer in {self.config.timeout_s:g} s", where=f"the solves of block {index}") from None
        return done

    def propagate(self, index: int, shares: Sequence[Sequence[int]]) -> None:
        self._each(f"block {index} forward", "propagate", {worker: (index, share) for worker, share in enumerate(shares)})

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)


def require_crew(config: CrewConfig) -> None:
    """ResourceError, with the arithmetic, when the cluster has no room for the workers and Ray Data's readers (field case RAY-05)."""
    total = ray.cluster_resources()
    for name, each, reserved in (("CPU", config.cpus, config.reader_cpus), ("GPU", config.gpus, 0.0)):
        needed = config.workers * each + reserved
        there = total.get(name, 0.0)
        if needed > there + 1e-9:
            most = max(0, math.floor((there - reserved) / each))
            raise ResourceError(
                f"{config.workers} workers x {each:g} {name} + {reserved:g} for reading = {needed:g}, the cluster has {there:g}",
                where="workers",
                remedy=f"at most {most} workers fit" if most else "give fewer CPUs a worker, or a larger cluster",
            )


class _Tokenizer:
    """A Ray Data map: text to ids, with a tokenizer of its own."""

    def __init__(self, source: str, data: dict[str, Any]):
        self.tokenizer = load_tokenizer(source)
        self.data = TextData.load(data)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"ids": tokenize(str(row[self.data.column]), self.tokenizer, self.data)}


def samples_from_ray(data: TextData, tokenizer_source: str, *, readers: int = 1) -> Samples:
    """`make_samples` of the same text, read and tokenized by Ray Data; equal token for token.

    Rows come back in order (preserve_order), and reading stops when there are enough samples.
    """
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    dataset = _dataset(data).map(
        cast(Any, _Tokenizer),
        fn_constructor_args=(tokenizer_source, data.to_dict()),
        compute=ray.data.ActorPoolStrategy(size=readers),
        num_cpus=READER_CPUS,
    )
    return window((row["ids"] for row in dataset.iter_rows()), load_tokenizer(tokenizer_source).eos_token_id, data)


def _dataset(data: TextData) -> Any:
    kind = format_of(data.location) if data.format == "auto" and not data.location.startswith("datasets:") else data.format
    suffix = PurePosixPath(data.location).suffix
    if kind == "parquet" and suffix == ".parquet":
        return ray.data.read_parquet(data.location, columns=[data.column])
    if kind == "jsonl" and suffix == ".jsonl":
        return ray.data.read_json(data.location, lines=True).select_columns([data.column])
    return ray.data.from_items([{data.column: text} for text in read_texts(data)])


def calibrate_on_ray(config: CalibrateConfig, work: str, crew: CrewConfig, *, say: Callable[[str], None] = print) -> dict[str, Any]:
    """`calibrate.run.calibrate` on the connected cluster."""
    require_crew(crew)
    samples = None
    if config.data is not None and not _started(work):
        samples = samples_from_ray(config.data, config.model)
    return calibrate(config, work, hire=lambda spec: RayCrew(spec, crew, say), say=say, samples=samples)


def _started(work: str) -> bool:
    return (Path(work) / "run.json").is_file()
