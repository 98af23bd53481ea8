"""The bytes and seconds of one stage of a layer-streamed pass: options, machine rates, solve units, and what each stage of a block holds and takes.

    state bytes      4 R I + 8 I  while 2 R < I (rows kept),  8 I^2 + 8 I  from then on        R rows that this worker saw, I input width
    expert rows      tokens top_k / E on average; a lognormal spread whose 95 % quantile is `skew` times the mean, scaled to the exact sum
    solve            4/3 I^3 + O I^2 multiplications and additions; owners by longest processing time first on this cost

Bytes follow from shapes; seconds are estimates from the named rates of a `Machine`. `calibrate.plan` puts the stages together and refuses what cannot fit.

Legend: N workers, R rows, I input width, O output width, E experts.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

from pydantic import Field

from prism_ray.calibrate.shapes import BlockShape, ModelShape, WeightShape
from prism_ray.core.config import Config
from prism_ray.core.registry import Registry
from prism_ray.formats.policy import QuantPolicy
from prism_ray.formats.spec import FORMATS
from prism_ray.hessian.state import TILE, lane_nodes

GIB = 2**30
GRAM_ENTRY_BYTES = 8
"""A Gram matrix is held and sent in float64 (hessian.state)."""
ROW_ENTRY_BYTES = 4
PROCESS_BYTES = 3 * GIB // 4
"""Interpreter, torch and Ray of one worker process."""
SOLVE_MATRICES = 7
"""[I, I] float64 matrices alive at the peak of hessian.factor: sum, mean, damped, factor, identity, inverse, its reversal."""
SOLVE_WEIGHTS = 3
"""[O, I] float32 copies of a solve: weight, error, result."""
ACTIVATION_SETS = 2
"""Activations on disk: the last durable block's and the one being written."""
STORE_SHARE = 0.3
"""Ray's own default for the object store, as a share of memory."""
EXPERT_SKEW = 2.5
"""95 % quantile of an expert's rows over their mean, where nothing is known about the corpus."""
CHOLESKY_FLOPS, INVERSE_FLOPS = 1 / 3, 1.0
"""Times I^3: the factorization, and the triangular inverse as hessian.factor makes it (a solve against the identity)."""
METHODS = {"gptq": True, "awq": True, "mse": False, "rtn": False}
"""Method -> whether it needs second moments; without them a block is loaded, quantized and written, and no sample is read."""


class Machine(Config):
    """Rates of one worker, sustained and not peak. compute_bytes: bytes a value in the forward pass. solve_flops_per_s: float64 factor and column sweep.
    network and disk rates are a worker's own share. gpu_memory_bytes: None computes in RAM."""

    name: str
    compute_bytes: int = Field(gt=0)
    forward_flops_per_s: float = Field(gt=0)
    gram_flops_per_s: float = Field(gt=0)
    solve_flops_per_s: float = Field(gt=0)
    memory_bytes_per_s: float = Field(gt=0)
    network_bytes_per_s: float = Field(gt=0)
    read_bytes_per_s: float = Field(gt=0)
    write_bytes_per_s: float = Field(gt=0)
    gpu_memory_bytes: int | None = Field(default=None, gt=0)


MACHINES: Registry[Machine] = Registry("machine")
MACHINES.add(
    "cpu2",
    Machine(
        name="cpu2",
        compute_bytes=4,
        forward_flops_per_s=60e9,
        gram_flops_per_s=60e9,
        solve_flops_per_s=19e9,
        memory_bytes_per_s=10e9,
        network_bytes_per_s=1.25e9,
        read_bytes_per_s=1e9,
        write_bytes_per_s=0.5e9,
    ),
)
MACHINES.add(
    "h100",
    Machine(
        name="h100",
        compute_bytes=2,
        forward_flops_per_s=300e12,
        gram_flops_per_s=40e12,
        solve_flops_per_s=5e12,
        memory_bytes_per_s=2.5e12,
        network_bytes_per_s=3.125e9,
        read_bytes_per_s=2e9,
        write_bytes_per_s=1e9,
        gpu_memory_bytes=76 * GIB,
    ),
)


class PlanOptions(Config):
    """What to plan for. memory_bytes: heap of one worker, the object store not counted. object_store_bytes and disk_bytes: of one node, which holds workers_per_node
    workers; store None is STORE_SHARE of the workers' memory, disk None is not checked. cpus: of the cluster, None is not checked. lanes: fixed pieces of the data whose
    states merge along one tree, None is one a worker. batch: sequences of one forward. activation_share: of memory; a shard above it, or one that does not fit beside the rest, is streamed from disk."""

    workers: int = Field(ge=1)
    memory_bytes: int = Field(gt=0)
    machine: Machine
    policy: QuantPolicy = Field(default_factory=QuantPolicy)
    method: str = "gptq"
    samples: int = Field(default=512, ge=1)
    length: int = Field(default=2048, ge=1)
    batch: int = Field(default=1, ge=1)
    lanes: int | None = Field(default=None, ge=1)
    object_store_bytes: int | None = Field(default=None, ge=0)
    disk_bytes: int | None = Field(default=None, ge=0)
    workers_per_node: int = Field(default=1, ge=1)
    cpus: float | None = Field(default=None, gt=0)
    cpus_per_worker: float = Field(default=1.0, gt=0)
    reader_cpus: float = Field(default=1.0, ge=0)
    activation_share: float = Field(default=0.25, gt=0, lt=1)
    skew: float = Field(default=EXPERT_SKEW, ge=1, le=3.8)

    @property
    def store_bytes(self) -> float:
        """Object store of one node."""
        return self.object_store_bytes if self.object_store_bytes is not None else STORE_SHARE * self.memory_bytes * self.workers_per_node

    @property
    def lane_count(self) -> int:
        """Pieces of the data."""
        return self.lanes or self.workers


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Weights that share one input, hence one state, one owner and one solve. outputs: their O together. rows: expected rows over all workers."""

    label: str
    width: int
    outputs: int
    rows: float
    plane_bytes: float

    @property
    def solve_flops(self) -> float:
        """Factorization, inverse and column sweep."""
        return (CHOLESKY_FLOPS + INVERSE_FLOPS) * self.width**3 + float(self.outputs) * self.width**2


@dataclass(frozen=True, kw_only=True)
class Task:
    """One unit's way through its owner: bytes received from the other workers, seconds to receive and merge, to solve, to write the planes."""

    label: str
    wave: int
    owner: int
    moved_bytes: float
    plane_bytes: float
    reduce_s: float
    solve_s: float
    write_s: float

    @property
    def seconds(self) -> float:
        """All of it, one after the other."""
        return self.reduce_s + self.solve_s + self.write_s


@dataclass(frozen=True, kw_only=True)
class Need:
    """What one stage of one block kind holds at once. resource: RAM (a worker), GPU (a worker), object store or disk (a node)."""

    resource: str
    stage: str
    kind: str
    terms: tuple[tuple[str, float], ...]

    @property
    def total(self) -> float:
        """Sum of the terms in bytes."""
        return sum(size for _, size in self.terms)

    def arithmetic(self) -> str:
        """'total = term + term', in GiB."""
        terms = " + ".join(f"{label} {size / GIB:.2f}" for label, size in self.terms if size)
        return f"{self.resource} {self.total / GIB:.2f} GiB in {self.stage} of a {self.kind} block = {terms}"


def state_bytes(rows: float, width: int) -> float:
    """Bytes of a state after `rows` rows, as held and as sent; 0 for none."""
    if rows <= 0:
        return 0.0
    return (ROW_ENTRY_BYTES * rows * width if 2 * rows < width else GRAM_ENTRY_BYTES * float(width) ** 2) + 8 * width


def expert_rows(tokens: float, top_k: int, experts: int, skew: float) -> list[float]:
    """Expected rows of every expert, most first: lognormal quantiles with 95 % quantile skew x mean, scaled to sum tokens x top_k, none above `tokens`."""
    z95 = NormalDist().inv_cdf(0.95)
    sigma = z95 - math.sqrt(max(0.0, z95**2 - 2 * math.log(skew)))
    shares = [math.exp(sigma * NormalDist().inv_cdf((index + 0.5) / experts)) for index in reversed(range(experts))]
    rows, left, weight = [0.0] * experts, tokens * top_k, sum(shares)
    # Clipping the busiest at `tokens` hands their surplus to the others, busiest first.
    for index, share in enumerate(shares):
        rows[index] = min(tokens, left * share / weight) if weight else 0.0
        left, weight = left - rows[index], weight - share
    return rows


def longest_first(costs: Sequence[float], before: Sequence[float]) -> list[int]:
    """Owner of each task: tasks by falling cost, each to the worker with the least so far (4/3 of the optimum at worst).

    before: what each worker owned in earlier waves, one entry a worker; it breaks ties only, since a wave ends on all workers together. Then the lower number.
    """
    heap = [(0.0, earlier, worker) for worker, earlier in enumerate(before)]
    heapq.heapify(heap)
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, earlier, worker = heapq.heappop(heap)
        owners[index] = worker
        heapq.heappush(heap, (load + costs[index], earlier, worker))
    return owners


def plane_bytes(weight: WeightShape, format_name: str) -> float:
    """Codes (half a byte each), block scales, and one float32 scale a matrix where the format has it."""
    spec = FORMATS[format_name]
    matrices = max(1, weight.experts)
    return weight.count / 2 + weight.count / spec.block * spec.grid.width + (4 * matrices if spec.has_tensor_scale else 0)


def _bits(number: int) -> list[int]:
    """The powers of two that a number is the sum of."""
    return [1 << bit for bit in range(number.bit_length()) if number >> bit & 1]


def _fullest(number: int) -> list[int]:
    """Numbers up to `number` of which one has every set bit of any other: itself, and itself with one bit traded for all lower ones."""
    return [number, *((number >> bit ^ 1) << bit | (1 << bit) - 1 for bit in range(number.bit_length()) if number >> bit & 1)]


class Planner:
    """The sizes of one (shape, options); methods return parts of the plan."""

    def __init__(self, shape: ModelShape, options: PlanOptions, *, spilled: bool = False):
        self.spilled = spilled
        self.shape, self.options, self.machine = shape, options, options.machine
        self.needs_states = METHODS[options.method]
        lanes, workers = options.lane_count, options.workers
        bounds = [worker * lanes // workers for worker in range(workers + 1)]
        self.lane_ranges = list(pairwise(bounds))
        edges = [lane * options.samples // lanes for lane in range(lanes + 1)]
        self.shards = tuple(edges[stop] - edges[start] for start, stop in self.lane_ranges)
        self.tokens = options.samples * options.length
        self.largest = max(self.shards)
        self.shard_share = self.largest / options.samples
        self.shard_tokens = self.largest * options.length
        per_sample = options.length * shape.hidden * shape.streams * self.machine.compute_bytes
        self.activations = float(self.largest * per_sample) if self.needs_states else 0.0
        # A shard streamed from disk has one batch on its way in and one on its way out.
        self.resident = min(self.activations, 2.0 * options.batch * per_sample) if spilled else self.activations
        self.held_lanes = max(stop - start for start, stop in self.lane_ranges)
        self.stacks = [[*_bits(done), 1] for done in _fullest(self.held_lanes - 1)]
        nodes = max((lane_nodes(start, stop, lanes) for start, stop in self.lane_ranges), key=len)
        self.sent_lanes = [stop - start for start, stop in nodes]

    def held(self, unit: Unit) -> float:
        """Bytes of a unit's states in one worker at the peak: finished lanes merged into whole nodes of the tree, and the lane in progress."""
        rows = unit.rows * self.shard_share / self.held_lanes
        return max(sum(state_bytes(rows * piece, unit.width) for piece in pieces) for pieces in self.stacks)

    def keeps_rows(self, unit: Unit) -> bool:
        """Whether a worker's state of the unit still holds rows when it is sent."""
        return 2 * unit.rows * self.shard_share < unit.width

    def sent(self, unit: Unit) -> float:
        """Bytes of a unit's states as one worker sends them."""
        rows = unit.rows * self.shard_share
        return sum(state_bytes(rows * piece / sum(self.sent_lanes), unit.width) for piece in self.sent_lanes)

    def units(self, block: BlockShape, formats: Sequence[str | None]) -> tuple[list[Unit], list[list[Unit]]]:
        """(dense units, units of each expert by falling rows) of the weights that are quantized."""
        chosen = [(weight, name) for weight, name in zip(block.weights, formats, strict=True) if name is not None]
        dense: list[Unit] = []
        for label in dict.fromkeys(weight.reads for weight, _ in chosen if not weight.experts):
            members = [(weight, name) for weight, name in chosen if weight.reads == label and not weight.experts]
            first, groups = members[0][0], members[0][0].groups
            outputs = sum(weight.rows // groups for weight, _ in members)
            planes = sum(plane_bytes(weight, name) for weight, name in members) / groups
            names = "+".join(weight.name.rsplit(".", 1)[-1] for weight, _ in members)
            for group in range(groups):
                name = f"{label}: {names}" + (f"[{group}]" if groups > 1 else "")
                dense.append(Unit(label=name, width=first.columns, outputs=outputs, rows=self.tokens, plane_bytes=planes))
        fused = [(weight, name) for weight, name in chosen if weight.experts]
        rows = expert_rows(self.tokens, block.top_k, block.experts, self.options.skew) if fused else []
        routed = [
            [
                Unit(
                    label=f"{weight.name.rsplit('.', 1)[-1]}[{index}]",
                    width=weight.columns,
                    outputs=weight.rows,
                    rows=seen,
                    plane_bytes=plane_bytes(weight, name) / weight.experts,
                )
                for weight, name in fused
            ]
            for index, seen in enumerate(rows)
        ]
        return dense, routed

    def workspace(self, block: BlockShape) -> float:
        """Bytes of one forward of `batch` sequences: every linear's output alive at once (an upper bound), eager scores, one float32 input of a Gram product."""
        if not self.needs_states:
            return 0.0
        tokens, length = self.options.batch * self.options.length, self.options.length
        outputs = sum(w.rows * (block.top_k if w.experts else 1) for w in block.weights) + 4 * self.shape.hidden * self.shape.streams
        keys = length * (1 + block.attention.extra_keys)
        scores = tokens * block.attention.heads * keys * (self.machine.compute_bytes + 4) if block.attention.eager else 0.0
        return tokens * (outputs * self.machine.compute_bytes + 4 * max(w.columns for w in block.weights)) + scores

    def block_needs(self, block: BlockShape, formats: Sequence[str | None], chunk: int) -> list[Need]:
        """What the stages of a block hold with `chunk` experts a wave; experts counted are the largest."""
        dense, routed = self.units(block, formats)
        weights = float(block.count * self.machine.compute_bytes)
        source = max(w.count * w.source_bits / 8 for w in block.weights)
        planes = sum(unit.plane_bytes for unit in [*dense, *(unit for units in routed for unit in units)])
        work = self.workspace(block)
        wave = [*dense, *(unit for units in routed[:chunk] for unit in units)]
        collected = sum(self.held(unit) for unit in wave) if self.needs_states else 0.0
        owned, own_planes = [0.0] * self.options.workers, [0.0] * self.options.workers
        for unit, owner in zip(wave, self.owners([wave])[0], strict=True):
            owned[owner] += self.held(unit) if self.needs_states else 0.0
            own_planes[owner] += unit.plane_bytes
        largest = max((self.solving(unit) for unit in wave), default=0.0)
        base = [("process", float(PROCESS_BYTES)), ("activations", self.resident)]
        stages: list[tuple[str, list[tuple[str, float]], list[tuple[str, float]]]] = [
            ("load", [("source tensor", source)], [("weights", weights)]),
            ("collect", [], [("weights", weights), ("states", collected), ("forward", work)]),
            (
                "solve",
                [("own planes", max(own_planes))],
                [("weights", weights), ("own states", max(owned)), ("largest solve", largest)],
            ),
            ("propagate", [("planes", planes)], [("weights", weights), ("forward", work)]),
        ]
        needs = []
        for stage, on_host, on_device in stages:
            if stage in ("collect", "propagate") and not self.needs_states:
                continue
            if self.machine.gpu_memory_bytes is None:
                needs.append(Need(resource="RAM", stage=stage, kind=block.kind, terms=(*base, *on_host, *on_device)))
            else:
                needs.append(Need(resource="RAM", stage=stage, kind=block.kind, terms=(*base, *on_host)))
                needs.append(Need(resource="GPU", stage=stage, kind=block.kind, terms=tuple(on_device)))
        return [*needs, *self.store_needs(block, wave, planes)]

    def solving(self, unit: Unit) -> float:
        """Bytes of merging and solving one unit at its owner: a tree of partial sums first, then the factor and the sweep."""
        copies = 4.0 * SOLVE_WEIGHTS * unit.outputs * unit.width
        if not self.needs_states:
            return copies
        square = GRAM_ENTRY_BYTES * float(unit.width) ** 2
        if self.keeps_rows(unit):
            merge = ROW_ENTRY_BYTES * min(unit.rows, unit.width / 2) * unit.width + square
        else:
            merge = (1 + math.ceil(math.log2(self.options.workers))) * square + square
        return max(merge, SOLVE_MATRICES * square + copies)

    def store_needs(self, block: BlockShape, wave: Sequence[Unit], planes: float) -> list[Need]:
        """Object store of a node. States go through it in as many rounds as it takes: two of the largest a worker must fit at once."""
        if self.options.workers == 1:
            return []
        each = self.options.workers_per_node
        needs = [Need(resource="object store", stage="publish", kind=block.kind, terms=(("planes", planes),))]
        if self.needs_states and wave:
            largest = max(self.sent(unit) for unit in wave)
            out = sum(self.sent(unit) for unit in wave) * (1 - 1 / self.options.workers)
            room = self.options.store_bytes / each - largest
            terms = (("states sent", each * min(out, max(largest, room))), ("state received", each * largest))
            needs.append(Need(resource="object store", stage="reduce", kind=block.kind, terms=terms))
        return needs

    def outer_needs(self, output: float) -> list[Need]:
        """The embedding before the first block, and the disk of the node that also holds the output folder."""
        embedding = float(self.shape.vocab * self.shape.hidden * self.machine.compute_bytes) if self.needs_states else 0.0
        terms = (("process", float(PROCESS_BYTES)), ("activations", self.resident), ("embedding", embedding))
        disk = ("activations", ACTIVATION_SETS * self.activations * self.options.workers_per_node)
        return [
            Need(resource="RAM", stage="embedding", kind="first", terms=terms),
            Need(resource="disk", stage="write", kind="last", terms=(disk, ("output", output))),
        ]

    def owners(self, waves: Sequence[Sequence[Unit]]) -> list[list[int]]:
        """Owner of every unit of every wave."""
        loads, found = [0.0] * self.options.workers, []
        for wave in waves:
            found.append(longest_first([unit.solve_flops for unit in wave], loads))
            for unit, owner in zip(wave, found[-1], strict=True):
                loads[owner] += unit.solve_flops
        return found

    def tasks(self, waves: Sequence[Sequence[Unit]]) -> list[Task]:
        """Every unit's reduce, solve and write, with owners chosen wave by wave."""
        machine, others = self.machine, self.options.workers - 1
        found = []
        for number, (wave, owners) in enumerate(zip(waves, self.owners(waves), strict=True)):
            for unit, owner in zip(wave, owners, strict=True):
                moved, formed = 0.0, 0.0
                if self.needs_states:
                    one = self.sent(unit)
                    moved = others * one
                    formed = unit.rows * float(unit.width) ** 2 / machine.gram_flops_per_s if self.keeps_rows(unit) else 0.0
                    formed += 3 * moved / machine.memory_bytes_per_s
                swept = unit.solve_flops / machine.solve_flops_per_s
                passed = SOLVE_WEIGHTS * 4.0 * unit.outputs * unit.width / machine.memory_bytes_per_s
                found.append(
                    Task(
                        label=unit.label,
                        wave=number,
                        owner=owner,
                        moved_bytes=moved,
                        plane_bytes=unit.plane_bytes,
                        reduce_s=moved / machine.network_bytes_per_s + formed,
                        solve_s=swept if self.needs_states else passed,
                        write_s=unit.plane_bytes / machine.write_bytes_per_s,
                    )
                )
        return found

    def forward_s(self, block: BlockShape) -> float:
        """One forward of the largest shard through a block."""
        attention = block.attention
        keys = self.options.length * (1 + attention.extra_keys)
        flops = block.flops_per_token + 2.0 * attention.heads * keys * (attention.qk_width + attention.v_width)
        return self.shard_tokens * flops / self.machine.forward_flops_per_s

    def gram_s(self, wave: Sequence[Unit]) -> float:
        """Products of the largest shard's rows, blocks on and below the diagonal, and their addition in float64 after every forward."""
        flops = additions = 0.0
        for unit in wave:
            rows = unit.rows * self.shard_share
            if not self.keeps_rows(unit):
                flops += rows * float(unit.width) ** 2 * (1 + min(1.0, TILE / unit.width))
                additions += math.ceil(self.largest / self.options.batch) * 3 * GRAM_ENTRY_BYTES * float(unit.width) ** 2
        return flops / self.machine.gram_flops_per_s + additions / self.machine.memory_bytes_per_s

    def waves(self, dense: list[Unit], routed: list[list[Unit]], chunk: int) -> list[list[Unit]]:
        """Units of each wave: the dense ones first, experts dealt so that every wave gets heavy and light ones."""
        count = max(1, math.ceil(len(routed) / chunk)) if self.needs_states else 1
        found: list[list[Unit]] = [[] for _ in range(count)]
        found[0] += dense
        for index, units in enumerate(routed):
            found[index % count] += units
        return found
