"""What a layer-streamed calibration needs and takes, from a model's shape alone: waves, peak memory, object store, disk, bytes moved, seconds a phase.

The pass that is planned, for every decoder block in order: each of N workers *loads* the block (compute dtype), runs its shard of the samples through it and adds
into second-moment states (*collect*), sends each state to the one worker that owns it (*reduce*), which merges and *solves*, and *publishes* the planes; all
workers run the quantized block (*propagate*) and *write* their activations. A phase starts when the one before it has ended on every worker.

    state bytes      4 R I + 8 I  while 2 R < I (rows kept),  8 I^2 + 8 I  from then on        R rows that this worker saw, I input width
    expert rows      tokens top_k / E on average; a lognormal spread whose 95 % quantile is `skew` times the mean, scaled to the exact sum
    waves            fewest W so that the ceil(E / W) largest expert states fit beside the rest; each wave is one more forward of the block
    solve            4/3 I^3 + O I^2 multiplications and additions; owners by longest processing time first on this cost
    moved            (N - 1) times a worker's state to its owner, (N - 1) times the planes to the others

Every second is an estimate from the named rates of a `Machine`; every byte follows from shapes. Sums of kept rows and of waves use expectations: a corpus that
routes more unevenly than `skew` needs more.

Refused, before anything is read: widths that do not divide into blocks (all of them listed, field case CAL-08), CPUs that leave none for Ray Data's readers
(RAY-05), and whatever does not fit, with its terms and with the memory or the number of workers that would (CAL-11, RAY-06).

Legend: N workers, R rows, I input width, O output width, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prism_ray.calibrate.costs import GIB, METHODS, Need, Planner, PlanOptions, Task, plane_bytes
from prism_ray.calibrate.shapes import BlockShape, ModelShape, WeightShape
from prism_ray.core.errors import ConfigError, FormatError, ModelError, ResourceError, UnknownName
from prism_ray.formats.policy import GPT_OSS, QuantPolicy
from prism_ray.formats.spec import FORMATS, MXFP4

MAX_WORKERS = 4096
PHASES = ("load", "forward", "gram", "reduce", "solve", "publish", "propagate", "write")


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """The plan of one kind of block. layers: where it stands. weights: (name, shape, format or None). wave_experts: experts a wave.
    collect_s, per wave: (forward, gram) of the largest shard. propagate_s and write_s: of the largest shard."""

    kind: str
    layers: tuple[int, ...]
    weights: tuple[tuple[str, tuple[int, ...], str | None], ...]
    experts: int
    top_k: int
    wave_experts: tuple[int, ...]
    expert_rows: tuple[float, float, float]
    state_bytes: float
    plane_bytes: float
    tasks: tuple[Task, ...]
    needs: tuple[Need, ...]
    load_s: float
    collect_s: tuple[tuple[float, float], ...]
    publish_s: float
    propagate_s: float
    write_s: float

    @property
    def waves(self) -> int:
        """Forwards that collect; 0 for a method without second moments."""
        return len(self.wave_experts)

    @property
    def moved_bytes(self) -> float:
        """Bytes that states travel to their owners, of one block."""
        return sum(task.moved_bytes for task in self.tasks)

    def critical(self, wave: int) -> tuple[float, float, float]:
        """(reduce, solve, write) of the owner that takes longest in a wave."""
        owners: dict[int, list[Task]] = {}
        for task in self.tasks:
            if task.wave == wave:
                owners.setdefault(task.owner, []).append(task)
        slowest = max(owners.values(), key=lambda tasks: sum(task.seconds for task in tasks), default=[])
        return sum(t.reduce_s for t in slowest), sum(t.solve_s for t in slowest), sum(t.write_s for t in slowest)

    def phases(self) -> dict[str, float]:
        """Seconds a phase of one block, without stragglers and losses."""
        owners = [self.critical(wave) for wave in range(max(1, self.waves))]
        return {
            "load": self.load_s,
            "forward": sum(forward for forward, _ in self.collect_s),
            "gram": sum(gram for _, gram in self.collect_s),
            "reduce": sum(reduce for reduce, _, _ in owners),
            "solve": sum(solve for _, solve, _ in owners),
            "publish": self.publish_s,
            "propagate": self.propagate_s,
            "write": self.write_s + sum(write for _, _, write in owners),
        }


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The whole plan. shard_samples: samples of each worker. output_bytes: the written checkpoint. spilled: activations are streamed from disk."""

    shape: ModelShape
    options: PlanOptions
    blocks: tuple[BlockPlan, ...]
    needs: tuple[Need, ...]
    shard_samples: tuple[int, ...]
    activation_bytes: float
    spilled: bool
    output_bytes: float

    def peak(self, resource: str, *, owner: bool | None = None) -> Need | None:
        """The largest need of a resource; owner: only the stages where owners differ from others (True), or only the rest (False)."""
        found = [need for need in self.needs if need.resource == resource and (owner is None or (need.stage == "solve") is owner)]
        return max(found, key=lambda need: need.total, default=None)

    @property
    def moved_bytes(self) -> float:
        """Bytes over the network in the whole pass: states to owners, planes to everybody else."""
        others = self.options.workers - 1
        return sum(len(block.layers) * (block.moved_bytes + others * block.plane_bytes) for block in self.blocks)

    def phases(self) -> dict[str, float]:
        """Seconds a phase of the whole pass."""
        each = [(len(block.layers), block.phases()) for block in self.blocks]
        return {phase: sum(times * seconds[phase] for times, seconds in each) for phase in PHASES}

    @property
    def seconds(self) -> float:
        """Estimated duration, without stragglers and losses."""
        return sum(self.phases().values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data: model, options, blocks, needs, phases."""
        blocks = [
            {
                **{k: v for k, v in asdict(b).items() if k not in ("tasks", "needs")},
                "waves": b.waves,
                "solves": len(b.tasks),
                "phases": b.phases(),
            }
            for b in self.blocks
        ]
        needs = [{**asdict(need), "terms": dict(need.terms), "total_bytes": need.total} for need in self.needs]
        model = {"model_type": self.shape.model_type, "parameters": self.shape.count, "active_parameters": self.shape.active}
        return {
            "model": model | {"source_bytes": self.shape.source_bytes, "output_bytes": self.output_bytes, "layers": len(self.shape.blocks)},
            "options": self.options.to_dict(),
            "shard_samples": list(self.shard_samples),
            "activation_bytes": self.activation_bytes,
            "spilled": self.spilled,
            "blocks": blocks,
            "needs": needs,
            "moved_bytes": self.moved_bytes,
            "phases": self.phases(),
            "seconds": self.seconds,
        }


def _formats(shape: ModelShape, policy: QuantPolicy) -> list[tuple[BlockShape, tuple[str | None, ...], list[int]]]:
    """Distinct (block, format of each weight) with their layers; FormatError lists every width that does not divide (CAL-08)."""
    found: dict[tuple[BlockShape, tuple[str | None, ...]], list[int]] = {}
    offending: dict[str, str] = {}
    transposed = any(weight.transposed for block in shape.blocks for weight in block.weights)
    for layer, block in enumerate(shape.blocks):
        chosen: list[str | None] = []
        for weight in block.weights:
            name = f"{shape.prefix.format(layer)}.{weight.name}"
            format_name = _format_of(weight, name, policy, experts_only=transposed)
            if format_name is not None:
                try:
                    FORMATS[format_name].blocks(weight.columns)
                except FormatError as error:
                    if not policy.keep_indivisible:
                        key = f"{weight.name} ({weight.columns} columns, {format_name} block {FORMATS[format_name].block}; {error.remedy})"
                        offending.setdefault(key, name)
                    format_name = None
            chosen.append(format_name)
        found.setdefault((block, tuple(chosen)), []).append(layer)
    if offending:
        raise FormatError(
            f"{len(offending)} kind(s) of weight do not divide into blocks: {', '.join(offending)}",
            where=next(iter(offending.values())),
            remedy="override their format or keep them in full precision",
        )
    if not any(name for _, names in found for name in names):
        raise ConfigError("the policy quantizes nothing", remedy="check its ignore patterns against the module names")
    return [(block, names, layers) for (block, names), layers in found.items()]


def _format_of(weight: WeightShape, name: str, policy: QuantPolicy, *, experts_only: bool) -> str | None:
    """The format that `formats.policy.make_plan` gives this weight: a block-diagonal linear stays, and beside transposed experts (gpt-oss) every linear does.

    Raises ModelError where that plan would, for an override or a format that no layout holds.
    """
    chosen = policy.format_of(name)
    if weight.transposed and chosen != MXFP4.name:
        raise ModelError(
            f"is to be {chosen or 'kept'}, but the {GPT_OSS} layout holds every expert in mxfp4 and nothing else quantized",
            where=name,
            remedy="plan for --format mxfp4, without overrides and without experts in ignore",
        )
    if weight.experts or not (experts_only or weight.groups > 1) or chosen is None:
        return chosen
    if policy.override_of(name) is not None:
        reason = f"the {GPT_OSS} layout holds experts only" if experts_only else "a block-diagonal linear stays in full precision"
        raise ModelError(f"is to be {chosen}, but {reason}", where=name, remedy="take it out of overrides")
    return None


def _check_cpus(options: PlanOptions) -> None:
    """Ray Data reads with CPUs of its own: actors that take all of them leave the readers none, and the pass waits for ever (RAY-05)."""
    asked = options.workers * options.cpus_per_worker
    text = f"{options.workers} workers x {options.cpus_per_worker:g} CPU = {asked:g}"
    if METHODS[options.method] and options.reader_cpus == 0:
        raise ResourceError(f"{text}, and no CPU is reserved for reading", where="reader_cpus", remedy="reserve at least 1")
    if options.cpus is not None and asked + options.reader_cpus > options.cpus:
        fit = int((options.cpus - options.reader_cpus) / options.cpus_per_worker + 1e-9)
        remedy = f"{fit} worker(s) leave the readers theirs" if fit > 0 else "no worker fits beside the readers"
        raise ResourceError(
            f"{text} and {options.reader_cpus:g} for reading need {asked + options.reader_cpus:g} CPUs, the cluster has {options.cpus:g}",
            where="cpus",
            remedy=f"{remedy}, or add {asked + options.reader_cpus - options.cpus:g} CPUs",
        )


def _check_options(options: PlanOptions) -> None:
    if options.method not in METHODS:
        raise UnknownName(f"unknown method '{options.method}'", where="method", remedy=f"known: {', '.join(METHODS)}")
    if not options.workers <= options.lane_count <= options.samples:
        raise ConfigError(
            f"{options.workers} workers, {options.lane_count} lanes and {options.samples} samples: every worker needs a lane, every lane a sample",
            where="workers",
            remedy="use fewer workers or more samples",
        )


def _limits(options: PlanOptions) -> dict[str, float]:
    limits: dict[str, float] = {"RAM": options.memory_bytes, "object store": options.store_bytes}
    if options.machine.gpu_memory_bytes is not None:
        limits["GPU"] = options.machine.gpu_memory_bytes
    if options.disk_bytes is not None:
        limits["disk"] = options.disk_bytes
    return limits


def _over(needs: Sequence[Need], limits: dict[str, float]) -> list[Need]:
    """Needs above their limits, the worst first."""
    over = [need for need in needs if need.total > limits.get(need.resource, math.inf)]
    return sorted(over, key=lambda need: need.total / max(1.0, limits[need.resource]), reverse=True)


def _chunk(planner: Planner, block: BlockShape, formats: Sequence[str | None]) -> tuple[int, list[Need]]:
    """The most experts a wave that fit, and what the block then needs; with one expert that does not fit either, the needs say so."""
    limits = _limits(planner.options)
    sizes = sorted({math.ceil(block.experts / count) for count in range(1, block.experts + 1)}, reverse=True) or [1]
    low, high = 0, len(sizes) - 1
    # Needs fall with the size of a wave: the first size that fits, by bisection.
    while low < high:
        middle = (low + high) // 2
        if _over(planner.block_needs(block, formats, sizes[middle]), limits):
            low = middle + 1
        else:
            high = middle
    needs = planner.block_needs(block, formats, sizes[low])
    return sizes[low], needs


def _block_plan(
    planner: Planner, block: BlockShape, formats: Sequence[str | None], layers: Sequence[int], chunk: int, needs: list[Need]
) -> BlockPlan:
    """The plan of one kind of block with `chunk` experts a wave."""
    machine = planner.machine
    dense, routed = planner.units(block, formats)
    waves = planner.waves(dense, routed, chunk)
    tasks = planner.tasks(waves)
    planes = sum(task.plane_bytes for task in tasks)
    owned = [0.0] * planner.options.workers
    for task in tasks:
        owned[task.owner] += task.plane_bytes
    # A worker receives what it does not own; the busiest owner sends its own to all others. The slower of the two counts.
    carried = max(planes - min(owned), max(owned) * (planner.options.workers - 1)) if planner.options.workers > 1 else 0.0
    streamed = planner.activations if planner.spilled else 0.0
    forward = planner.forward_s(block) + streamed / machine.read_bytes_per_s if planner.needs_states else 0.0
    seen = [units[0].rows for units in routed if units]
    used = [unit for wave in waves for unit in wave]
    return BlockPlan(
        kind=block.kind,
        layers=tuple(layers),
        weights=tuple((w.name, w.shape, name) for w, name in zip(block.weights, formats, strict=True)),
        experts=block.experts,
        top_k=block.top_k,
        wave_experts=tuple(len(range(wave, block.experts, len(waves))) for wave in range(len(waves))) if planner.needs_states else (),
        expert_rows=(seen[0], planner.tokens * block.top_k / block.experts, seen[-1]) if seen else (0.0, 0.0, 0.0),
        state_bytes=sum(planner.sent(unit) for unit in used) if planner.needs_states else 0.0,
        plane_bytes=planes,
        tasks=tuple(tasks),
        needs=tuple(needs),
        load_s=block.source_bytes / machine.read_bytes_per_s + block.count * machine.compute_bytes / machine.memory_bytes_per_s,
        collect_s=tuple((forward, planner.gram_s(wave)) for wave in waves) if planner.needs_states else (),
        publish_s=carried / machine.network_bytes_per_s,
        propagate_s=forward + block.count * machine.compute_bytes / machine.memory_bytes_per_s if planner.needs_states else 0.0,
        write_s=planner.activations / machine.write_bytes_per_s,
    )


def _output_bytes(shape: ModelShape, kinds: Sequence[tuple[BlockShape, tuple[str | None, ...], list[int]]]) -> float:
    """The written checkpoint: planes, and everything else in bf16."""
    total = sum(2.0 * kept.count for kept in shape.outer)
    for block, formats, layers in kinds:
        weights = sum(plane_bytes(w, name) if name else 2.0 * w.count for w, name in zip(block.weights, formats, strict=True))
        total += len(layers) * (weights + sum(2.0 * kept.count for kept in block.kept))
    return total


@dataclass(frozen=True, kw_only=True)
class _Draft:
    """Kinds of block, the experts a wave and the needs of each, and all needs together."""

    planner: Planner
    kinds: list[tuple[BlockShape, tuple[str | None, ...], list[int]]]
    chosen: list[tuple[int, list[Need]]]
    needs: list[Need]

    @property
    def over(self) -> list[Need]:
        """Needs above their limits, the worst first."""
        return _over(self.needs, _limits(self.planner.options))


def _draft(shape: ModelShape, options: PlanOptions) -> _Draft:
    """Activations in memory where they are a small share of it and everything fits, else streamed from disk."""
    kinds = _formats(shape, options.policy)
    output = _output_bytes(shape, kinds)

    def made(spilled: bool) -> _Draft:
        planner = Planner(shape, options, spilled=spilled)
        chosen = [_chunk(planner, block, formats) for block, formats, _ in kinds]
        needs = [need for _, found in chosen for need in found] + planner.outer_needs(output)
        return _Draft(planner=planner, kinds=kinds, chosen=chosen, needs=needs)

    first = made(Planner(shape, options).activations > options.activation_share * options.memory_bytes)
    return first if first.planner.spilled or not first.over else made(True)


def make_plan(shape: ModelShape, options: PlanOptions) -> Plan:
    """The plan, or the refusal: FormatError (blocks), ResourceError (CPUs, memory, store, disk; one line with the arithmetic and what would fit)."""
    _check_options(options)
    _check_cpus(options)
    if not shape.tied and options.policy.format_of("lm_head") is not None:
        raise ConfigError(
            "the pass goes block by block and leaves lm_head as it is", where="ignore", remedy="add lm_head to the policy's ignore list"
        )
    draft = _draft(shape, options)
    if draft.over:
        raise _refusal(shape, options, draft.over)
    planner, kinds = draft.planner, draft.kinds
    blocks = [
        _block_plan(planner, block, formats, layers, chunk, found)
        for (block, formats, layers), (chunk, found) in zip(kinds, draft.chosen, strict=True)
    ]
    return Plan(
        shape=shape,
        options=options,
        blocks=tuple(blocks),
        needs=tuple(draft.needs),
        shard_samples=planner.shards,
        activation_bytes=planner.activations,
        spilled=planner.spilled,
        output_bytes=_output_bytes(shape, kinds),
    )


def _refusal(shape: ModelShape, options: PlanOptions, over: Sequence[Need]) -> ResourceError:
    worst = over[0]
    limit = _limits(options)[worst.resource]
    waves = ", one expert a wave" if any(block.experts for block in shape.blocks) and worst.stage in ("collect", "reduce", "solve") else ""
    resources = sorted({need.resource for need in over})
    least = ", ".join(f"{_least(shape, options, resource) / GIB:.2f} GiB of {resource}" for resource in resources)
    workers = smallest_workers(shape, options)
    fewest = (
        f"{workers} workers with what each has now"
        if workers
        else f"no number of workers up to {min(MAX_WORKERS, options.samples)} fits as it is"
    )
    return ResourceError(
        f"{worst.arithmetic()}{waves}; {limit / GIB:.2f} GiB are given",
        where=f"{options.workers} worker(s)",
        remedy=f"the least that fits: {least}; {fewest}",
    )


def _least(shape: ModelShape, options: PlanOptions, resource: str) -> float:
    """The smallest amount of one resource with which these workers fit: one expert a wave, activations on disk, the store's smallest rounds.

    Rounded up to a hundredth of a GiB, so that what a message prints is enough.
    """
    kinds = _formats(shape, options.policy)
    planner = Planner(shape, options.with_overrides({"object_store_bytes": 0}), spilled=True)
    needs = [need for block, formats, _ in kinds for need in planner.block_needs(block, formats, 1)]
    needs += planner.outer_needs(_output_bytes(shape, kinds))
    return math.ceil(max(need.total for need in needs if need.resource == resource) / GIB * 100) / 100 * GIB


def smallest_workers(shape: ModelShape, options: PlanOptions) -> int | None:
    """The fewest workers, each with the resources of `options`, that fit; None where none up to MAX_WORKERS (or one a sample) does."""
    most = min(MAX_WORKERS, options.samples)

    def fits(workers: int) -> bool:
        # Lanes fixed by the caller stay, as long as there are enough of them.
        lanes = None if options.lanes is None else max(options.lanes, workers)
        tried = options.with_overrides({"workers": workers, "lanes": lanes, "cpus": None})
        return not _draft(shape, tried).over

    high = 1
    while not fits(high):
        if high >= most:
            return None
        high = min(most, 2 * high)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle
    return high
