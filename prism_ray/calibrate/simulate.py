"""A discrete-event replay of a calibration plan with stragglers and spot losses, for 1 to 512 workers.

The pass runs in stages with a barrier after each, as its driver does: for every block and wave *collect* (every worker its shard; the first wave loads the block),
*solve* (every owner its units, one after the other), and after the last wave *propagate* (fetch planes, second forward, write activations), at whose end the block is durable.

A worker is a slot with incarnations. Each has a speed, a lognormal factor exp(sigma z) on every duration, and a life, exponential with `losses_per_hour`. A lost worker comes
back `replace_s` later, empty: it loads the block again and redoes its shard of the stage. What is durable is never redone: blocks written, planes of solved units.

    lost while collecting      its shard of this wave is collected again, also if it had finished: its states died with it
    lost while solving         its unsolved units go to a pool that any idle worker takes from; no unit starts until the lost shard's states are there again
    lost while propagating     planes are read from disk again and its shard is propagated again, unless its activations were written

A unit is merged from exactly one state of every shard, whatever was lost; `Merge` records which incarnation's. Everything is drawn from (seed, slot, incarnation), so a result
depends on nothing else, and a higher loss rate shortens the very same lives.

Seconds are the plan's estimates; nothing here is measured.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import Field

from prism_ray.calibrate.costs import PlanOptions, Task
from prism_ray.calibrate.plan import BlockPlan, Plan, make_plan
from prism_ray.calibrate.shapes import ModelShape
from prism_ray.core.config import Config
from prism_ray.core.errors import PrismError, ResourceError


class SimulationOptions(Config):
    """straggler_sigma: of the logarithm of a worker's slowness, median 1. losses_per_hour: of one worker. replace_s: from a loss to its replacement.
    max_losses: ends a run that cannot finish because workers live shorter than their work."""

    seed: int = 0
    straggler_sigma: float = Field(default=0.0, ge=0)
    losses_per_hour: float = Field(default=0.0, ge=0)
    replace_s: float = Field(default=180.0, ge=0)
    max_losses: int = Field(default=20_000, ge=0)


@dataclass(frozen=True, kw_only=True)
class Merge:
    """One solved unit: where it was solved, and the incarnation of every shard whose state went into it."""

    layer: int
    wave: int
    label: str
    slot: int
    incarnations: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Result:
    """useful_s, wasted_s, sent_bytes, received_bytes: of each worker. wasted: work that a loss undid or caused. resent_bytes: sent again after a loss, part of sent."""

    workers: int
    makespan_s: float
    useful_s: tuple[float, ...]
    wasted_s: tuple[float, ...]
    sent_bytes: tuple[float, ...]
    received_bytes: tuple[float, ...]
    resent_bytes: float
    losses: int
    shards_written: tuple[int, ...]
    merges: tuple[Merge, ...]

    @property
    def utilization(self) -> tuple[float, ...]:
        """Useful share of each worker's time."""
        return tuple(useful / self.makespan_s if self.makespan_s else 1.0 for useful in self.useful_s)

    @property
    def moved_bytes(self) -> float:
        """Bytes over the network."""
        return sum(self.received_bytes)

    def efficiency(self, reference: Result) -> float:
        """Speed-up over `reference` per worker: 1 where N times the workers take an N-th of the time."""
        return reference.makespan_s * reference.workers / (self.makespan_s * self.workers)


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """kind: collect, solve or propagate. seconds: of each slot's shard. fresh_s: what an empty worker does first. tasks: of a solve."""

    kind: str
    layer: int
    wave: int
    seconds: tuple[float, ...]
    fresh_s: float
    tasks: tuple[Task, ...] = ()


def stages(plan: Plan) -> Iterator[_Stage]:
    """The stages of the whole pass, in order; a shard's seconds are the plan's, which are for the largest shard, times its share of that."""
    largest = max(plan.shard_samples)
    shares = [samples / largest for samples in plan.shard_samples]
    at = {layer: block for block in plan.blocks for layer in block.layers}
    for layer in sorted(at):
        yield from _block_stages(plan, at[layer], layer, shares)


def _block_stages(plan: Plan, block: BlockPlan, layer: int, shares: Sequence[float]) -> Iterator[_Stage]:
    for wave, (forward, gram) in enumerate(block.collect_s or ((0.0, 0.0),)):
        load = block.load_s if wave == 0 else 0.0
        seconds = tuple(load + share * (forward + gram) for share in shares)
        # An empty worker loads the block; in the first wave that is part of the stage itself.
        yield _Stage(kind="collect", layer=layer, wave=wave, seconds=seconds, fresh_s=block.load_s - load)
        tasks = tuple(task for task in block.tasks if task.wave == wave)
        recollect = tuple(share * (forward + gram) for share in shares)
        yield _Stage(kind="solve", layer=layer, wave=wave, seconds=recollect, fresh_s=block.load_s, tasks=tasks)
    rest = tuple(block.publish_s + share * (block.propagate_s + block.write_s) for share in shares)
    planes = max(0.0, block.plane_bytes / plan.options.machine.read_bytes_per_s - block.publish_s)
    yield _Stage(kind="propagate", layer=layer, wave=0, seconds=rest, fresh_s=block.load_s + planes)


def critical_path(plan: Plan) -> float:
    """The sum over stages of the longest piece of work that cannot be split: no order and no number of helpers is faster."""
    total = 0.0
    for stage in stages(plan):
        total += max((task.seconds for task in stage.tasks), default=0.0) if stage.kind == "solve" else max(stage.seconds)
    return total


def work(plan: Plan) -> float:
    """Seconds of all workers together, without stragglers and losses."""
    return sum(sum(task.seconds for task in stage.tasks) if stage.kind == "solve" else sum(stage.seconds) for stage in stages(plan))


@dataclass
class _Slot:
    """One worker's place. token: counts its assignments; a finish event of an older one is void. running: (task or None for a shard, seconds, useful part)."""

    number: int
    incarnation: int = -1
    alive: bool = False
    speed: float = 1.0
    fresh: bool = True
    token: int = 0
    started: float = 0.0
    running: tuple[Task | None, float, float] | None = None
    done: bool = False
    useful_last: float = 0.0
    planes: float = 0.0
    useful: float = 0.0
    wasted: float = 0.0
    sent: float = 0.0
    received: float = 0.0
    written: int = 0


class _Run:
    """The clock, the event heap and the slots."""

    def __init__(self, plan: Plan, options: SimulationOptions, record: bool):
        self.plan, self.options, self.record = plan, options, record
        self.workers = plan.options.workers
        self.clock, self.losses, self.resent = 0.0, 0, 0.0
        self.order = 0
        self.events: list[tuple[float, int, str, int, int]] = []
        self.slots = [_Slot(number=number) for number in range(self.workers)]
        self.merges: list[Merge] = []
        self.to_all = 0.0
        self.missing = 0
        self.queues: list[deque[Task]] = []
        self.pool: deque[Task] = deque()
        self.left: set[str] = set()
        self.started: set[str] = set()
        for slot in self.slots:
            self.born(slot)

    def push(self, delay: float, kind: str, slot: _Slot, mark: int) -> None:
        self.order += 1
        heapq.heappush(self.events, (self.clock + delay, self.order, kind, slot.number, mark))

    def born(self, slot: _Slot) -> None:
        """A new incarnation: its speed and its life come from (seed, slot, incarnation) alone."""
        slot.incarnation += 1
        slot.alive, slot.fresh, slot.planes = True, True, 0.0
        draw = random.Random(f"{self.options.seed}/{slot.number}/{slot.incarnation}")
        slot.speed = math.exp(self.options.straggler_sigma * draw.gauss(0.0, 1.0))
        life = draw.expovariate(1.0)
        if self.options.losses_per_hour:
            self.push(life * 3600 / self.options.losses_per_hour, "lost", slot, slot.incarnation)

    def assign(self, slot: _Slot, task: Task | None, seconds: float, extra: float) -> None:
        """Start work of `seconds`, after `extra` that only an empty worker has to do."""
        slot.token += 1
        slot.started = self.clock
        slot.running = (task, (seconds + extra) * slot.speed, seconds * slot.speed)
        self.push(slot.running[1], "finished", slot, slot.token)

    def run(self) -> Result:
        for stage in stages(self.plan):
            self.begin(stage)
            while not self.complete(stage):
                self.clock, _, kind, number, mark = heapq.heappop(self.events)
                slot = self.slots[number]
                if kind == "back":
                    self.born(slot)
                    self.enter(stage, slot)
                elif kind == "lost" and slot.alive and mark == slot.incarnation:
                    self.lose(stage, slot)
                elif kind == "finished" and slot.running and mark == slot.token:
                    self.finish(stage, slot)
            self.end()
        slots = self.slots
        return Result(
            workers=self.workers,
            makespan_s=self.clock,
            useful_s=tuple(slot.useful for slot in slots),
            wasted_s=tuple(slot.wasted for slot in slots),
            sent_bytes=tuple(slot.sent + self.to_all for slot in slots),
            received_bytes=tuple(slot.received for slot in slots),
            resent_bytes=self.resent,
            losses=self.losses,
            shards_written=tuple(slot.written for slot in slots),
            merges=tuple(self.merges),
        )

    def begin(self, stage: _Stage) -> None:
        for slot in self.slots:
            # In the first wave every worker is empty of this block, and the stage's seconds hold the load.
            slot.fresh = slot.fresh and not (stage.kind == "collect" and stage.wave == 0)
            # The barrier before a solve leaves every shard's states in a living worker.
            slot.done = stage.kind == "solve"
        self.missing = 0 if stage.kind == "solve" else self.workers
        if stage.kind == "solve":
            self.queues = [deque() for _ in self.slots]
            for task in stage.tasks:
                self.queues[task.owner].append(task)
            self.left, self.pool, self.started = {task.label for task in stage.tasks}, deque(), set()
            assert len(self.left) == len(stage.tasks)
        elif stage.kind == "propagate":
            self.publish()
        for slot in self.slots:
            if slot.alive:
                self.enter(stage, slot)

    def publish(self) -> None:
        """Every worker that is there gets the planes of the owners that are; others read them from disk later."""
        there = [slot for slot in self.slots if slot.alive and not slot.fresh]
        total = sum(slot.planes for slot in there)
        for slot in there:
            slot.received += total - slot.planes
            slot.sent += slot.planes * (len(there) - 1)
        for slot in there:
            slot.planes = 0.0

    def enter(self, stage: _Stage, slot: _Slot) -> None:
        """Give a living, idle worker what there is to do in this stage."""
        if slot.running:
            return
        if not slot.done:
            self.assign(slot, None, stage.seconds[slot.number], stage.fresh_s if slot.fresh else 0.0)
        elif stage.kind == "solve" and not self.missing:
            queue = self.queues[slot.number] or self.pool
            if queue:
                task = queue.popleft()
                self.receive(slot, task)
                self.assign(slot, task, task.seconds, 0.0)

    def receive(self, slot: _Slot, task: Task) -> None:
        """The states of one unit travel from every other worker to this one."""
        slot.received += task.moved_bytes
        if self.workers > 1:
            each = task.moved_bytes / (self.workers - 1)
            self.to_all += each
            slot.sent -= each
        self.resent += task.moved_bytes if task.label in self.started else 0.0
        self.started.add(task.label)

    def finish(self, stage: _Stage, slot: _Slot) -> None:
        assert slot.running is not None
        task, seconds, useful = slot.running
        slot.running = None
        slot.fresh = False
        if task is not None:
            self.left.discard(task.label)
            slot.planes += task.plane_bytes
            slot.useful += seconds
            if self.record:
                incarnations = tuple(other.incarnation for other in self.slots)
                self.merges.append(Merge(layer=stage.layer, wave=stage.wave, label=task.label, slot=slot.number, incarnations=incarnations))
        else:
            slot.done = True
            self.missing -= 1
            again = stage.kind == "solve"
            slot.useful_last = 0.0 if again else useful
            slot.useful += slot.useful_last
            slot.wasted += seconds - slot.useful_last
            slot.written += stage.kind == "propagate"
        # A shard that is there again may let every waiting owner go on.
        for other in self.slots if stage.kind == "solve" and task is None else [slot]:
            if other.alive:
                self.enter(stage, other)

    def lose(self, stage: _Stage, slot: _Slot) -> None:
        self.losses += 1
        if self.losses > self.options.max_losses:
            life = 3600 / self.options.losses_per_hour
            raise ResourceError(
                f"{self.losses} losses and block {stage.layer} is not done: a worker lives {life:.0f} s, so one of {self.workers} is lost every "
                f"{life / self.workers:.0f} s and replaced after {self.options.replace_s:.0f} s; a shard of this stage takes {max(stage.seconds) + stage.fresh_s:.0f} s",
                where="losses_per_hour",
                remedy="use machines that live longer or are replaced sooner, or fewer workers where the wait is longer than the shard",
            )
        if slot.running:
            slot.wasted += self.clock - slot.started
            if slot.running[0] is not None:
                self.pool.append(slot.running[0])
            slot.running = None
        slot.alive, slot.fresh, slot.planes = False, True, 0.0
        if stage.kind == "collect" and slot.done:
            slot.useful -= slot.useful_last
            slot.wasted += slot.useful_last
        if stage.kind != "propagate" and slot.done:
            slot.done = False
            self.missing += 1
        if stage.kind == "solve":
            # Its unsolved units go to whoever is idle.
            self.pool.extend(self.queues[slot.number])
            self.queues[slot.number].clear()
        self.push(self.options.replace_s, "back", slot, slot.incarnation)

    def complete(self, stage: _Stage) -> bool:
        return not self.left if stage.kind == "solve" else not self.missing

    def end(self) -> None:
        """At a barrier whatever still runs (states collected again that no unit needs any more) is dropped."""
        for slot in self.slots:
            if slot.running:
                slot.wasted += self.clock - slot.started
                slot.running = None


def simulate(plan: Plan, options: SimulationOptions | None = None, *, record: bool = False) -> Result:
    """Replay a plan. record: keep which incarnations' states every unit was merged from. ResourceError when losses outrun the work."""
    return _Run(plan, options or SimulationOptions(), record).run()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One number of workers: its plan and replay, or the refusal."""

    workers: int
    plan: Plan | None = None
    result: Result | None = None
    refusal: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without the plan's details."""
        if self.result is None or self.plan is None:
            return {"workers": self.workers, "refusal": self.refusal}
        kept = {key: value for key, value in asdict(self.result).items() if key != "merges"}
        waves = max(block.waves for block in self.plan.blocks)
        return kept | {"waves": waves, "planned_s": self.plan.seconds, "moved_bytes": self.result.moved_bytes}


def scaling(shape: ModelShape, options: PlanOptions, workers: Sequence[int], simulation: SimulationOptions) -> list[Row]:
    """A plan and its replay for every number of workers; a number that does not fit, or does not finish, keeps its refusal."""
    rows = []
    for number in workers:
        lanes = None if options.lanes is None else max(options.lanes, number)
        try:
            # The numbers are hypothetical: the CPUs of today's cluster do not bound them.
            plan = make_plan(shape, options.with_overrides({"workers": number, "lanes": lanes, "cpus": None}))
            rows.append(Row(workers=number, plan=plan, result=simulate(plan, simulation)))
        except PrismError as error:
            rows.append(Row(workers=number, refusal=str(error)))
    return rows
