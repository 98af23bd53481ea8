"""`prism-ray plan`: what a calibration needs and takes, from a config.json alone; and its replay with stragglers and losses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prism_ray.core.errors import ConfigError

if TYPE_CHECKING:
    from prism_ray.calibrate.costs import Machine, Need
    from prism_ray.calibrate.plan import Plan
    from prism_ray.calibrate.shapes import ModelShape
    from prism_ray.calibrate.simulate import Row

UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
GIB = 2**30


def parse_bytes(text: str, where: str) -> int:
    """'64GiB', '80GB', '512MiB' in bytes; ConfigError for anything else, a bare number included: GB and GiB differ by 7 %."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b", text.strip().lower())
    if not found or float(found[1]) <= 0:
        raise ConfigError(f"'{text}' is no size", where=where, remedy="write for example 64GiB or 80GB")
    return int(float(found[1]) * UNITS[found[2] or ""])


def parse_rate(text: str, where: str) -> float:
    """'10Gbit/s' or '2GB/s' in bytes a second; ConfigError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?(b|bit)/s", text.strip().lower())
    if not found or float(found[1]) <= 0 or (found[3] == "b" and "B" not in text):
        raise ConfigError(f"'{text}' is no rate", where=where, remedy="write for example 10Gbit/s or 2GB/s")
    return float(found[1]) * UNITS[found[2] or ""] / (8 if found[3] == "bit" else 1)


def plan(
    model: Annotated[Path, typer.Argument(metavar="MODEL-CONFIG", help="config.json or the folder of one")],
    workers: Annotated[int, typer.Option(help="worker actors", min=1)],
    memory: Annotated[str, typer.Option(help="memory of one worker, without the object store: 64GiB")],
    machine: Annotated[str, typer.Option(help="preset of rates: cpu2, h100")] = "cpu2",
    set_rate: Annotated[list[str] | None, typer.Option("--set", help="one rate of the preset: solve_flops_per_s=1e12; repeatable")] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="GPU memory of one worker; default the preset's")] = None,
    object_store: Annotated[
        str | None, typer.Option(help="object store of one node; default 30 % of its workers' memory, as Ray's")
    ] = None,
    disk: Annotated[str | None, typer.Option(help="free disk of one node; not checked when absent")] = None,
    network: Annotated[str | None, typer.Option(help="rate of one worker: 10Gbit/s or 1.25GB/s")] = None,
    format: Annotated[str, typer.Option(help="weight format")] = "nvfp4",
    method: Annotated[str, typer.Option(help="gptq, awq, mse or rtn")] = "gptq",
    samples: Annotated[int, typer.Option(help="calibration sequences", min=1)] = 512,
    length: Annotated[int, typer.Option(help="tokens of a sequence", min=1)] = 2048,
    batch: Annotated[int, typer.Option(help="sequences of one forward", min=1)] = 1,
    lanes: Annotated[
        int | None, typer.Option(help="fixed pieces of the data whose states merge along one tree; default one a worker")
    ] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="glob of modules that stay as they are; repeatable")] = None,
    override: Annotated[list[str] | None, typer.Option(help="glob=format, before the default format; repeatable")] = None,
    keep_indivisible: Annotated[bool, typer.Option(help="leave layers that do not divide into blocks in full precision")] = False,
    workers_per_node: Annotated[int, typer.Option(min=1)] = 1,
    cpus: Annotated[float | None, typer.Option(help="CPUs of the cluster; not checked when absent")] = None,
    cpus_per_worker: Annotated[float, typer.Option()] = 1.0,
    reader_cpus: Annotated[float, typer.Option(help="CPUs that Ray Data keeps to read")] = 1.0,
    skew: Annotated[float, typer.Option(help="95 % quantile of an expert's rows over their mean")] = 2.5,
    simulate: Annotated[str | None, typer.Option(help="numbers of workers to replay: 1,2,4,8")] = None,
    stragglers: Annotated[float, typer.Option(help="sigma of the logarithm of a worker's slowness", min=0)] = 0.0,
    losses: Annotated[float, typer.Option(help="losses an hour of one worker", min=0)] = 0.0,
    replace_after: Annotated[float, typer.Option(help="seconds from a loss to its replacement", min=0)] = 180.0,
    seed: Annotated[int, typer.Option()] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Plan a layer-streamed calibration of MODEL-CONFIG, or refuse it with the arithmetic; no weight is read."""
    from prism_ray.calibrate.costs import PlanOptions
    from prism_ray.calibrate.plan import make_plan
    from prism_ray.calibrate.shapes import model_shape, read_config
    from prism_ray.calibrate.simulate import SimulationOptions, scaling
    from prism_ray.formats.policy import DEFAULT_IGNORE, QuantPolicy

    shape = model_shape(read_config(model), str(model))
    policy = QuantPolicy(
        format=format, ignore=(*DEFAULT_IGNORE, *(ignore or ())), overrides=_overrides(override or []), keep_indivisible=keep_indivisible
    )
    options = PlanOptions(
        workers=workers,
        memory_bytes=parse_bytes(memory, "memory"),
        machine=_machine(machine, set_rate or [], gpu_memory, network),
        policy=policy,
        method=method,
        samples=samples,
        length=length,
        batch=batch,
        lanes=lanes,
        object_store_bytes=parse_bytes(object_store, "object-store") if object_store else None,
        disk_bytes=parse_bytes(disk, "disk") if disk else None,
        workers_per_node=workers_per_node,
        cpus=cpus,
        cpus_per_worker=cpus_per_worker,
        reader_cpus=reader_cpus,
        skew=skew,
    )
    numbers = _numbers(simulate) if simulate else []
    made = make_plan(shape, options)
    simulation = SimulationOptions(seed=seed, straggler_sigma=stragglers, losses_per_hour=losses, replace_s=replace_after)
    rows = scaling(shape, options, numbers, simulation)
    if as_json:
        typer.echo(json.dumps(made.to_dict() | {"simulation": {"options": simulation.to_dict(), "rows": [row.to_dict() for row in rows]}}))
        return
    typer.echo("\n".join([*_head(shape, made), "", *_blocks(made), "", *_peaks(made), "", *_times(made)]))
    if rows:
        typer.echo("\n".join(["", *_simulation(rows, stragglers, losses, replace_after, seed)]))


def _machine(name: str, rates: list[str], gpu_memory: str | None, network: str | None) -> Machine:
    """A preset with the rates that options replace."""
    from prism_ray.calibrate.costs import MACHINES

    changed = MACHINES[name].with_overrides(rates)
    if gpu_memory:
        changed = changed.with_overrides({"gpu_memory_bytes": parse_bytes(gpu_memory, "gpu-memory")})
    return changed.with_overrides({"network_bytes_per_s": parse_rate(network, "network")}) if network else changed


def _overrides(items: list[str]) -> dict[str, str]:
    found = {}
    for item in items:
        pattern, separator, name = item.partition("=")
        if not separator or not name:
            raise ConfigError(f"'{item}' is not of the form glob=format", where="override", remedy="write for example *.down_proj=mxfp4")
        found[pattern] = name
    return found


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"'{text}' is no list of numbers of workers", where="simulate", remedy="write for example 1,2,4,8")
    return sorted({int(part) for part in parts})


def _table(rows: list[list[str]], left: int = 1) -> list[str]:
    """Aligned lines; the first `left` columns to the left, numbers to the right, columns that are empty in every row left out."""
    kept = [column for column in range(len(rows[0])) if any(row[column] for row in rows)]
    widths = {column: max(len(row[column]) for row in rows) for column in kept}
    cells = [[row[c].ljust(widths[c]) if c < left else row[c].rjust(widths[c]) for c in kept] for row in rows]
    return ["  ".join(line).rstrip() for line in cells]


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.2f} h"


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f}"


def _head(shape: ModelShape, made: Plan) -> list[str]:
    options = made.options
    asked = options.workers * options.cpus_per_worker
    cluster = f" of {options.cpus:g}" if options.cpus else ""
    size = f"{shape.count / 1e9:.2f} B parameters ({shape.active / 1e9:.2f} B a token), {len(shape.blocks)} blocks"
    files = f"source {_gib(shape.source_bytes)} GiB, output {_gib(made.output_bytes)} GiB ({options.policy.format}, {options.method})"
    data = f"{options.samples} x {options.length} tokens on {options.workers} {options.machine.name} worker(s)"
    where = "streamed from disk" if made.spilled else "in memory"
    return [
        f"{shape.model_type}: {size}, {files}",
        f"{data}, at most {max(made.shard_samples)} samples each; activations {_gib(made.activation_bytes)} GiB a worker, {where}",
        f"CPUs: {options.workers} x {options.cpus_per_worker:g} + {options.reader_cpus:g} to read = {asked + options.reader_cpus:g}{cluster}",
    ]


def _blocks(made: Plan) -> list[str]:
    lines: list[str] = []
    for block in made.blocks:
        waves = f", {block.waves} wave(s) of at most {max(block.wave_experts)} experts" if block.experts and block.waves else ""
        moe = ""
        if block.experts:
            most, mean, least = block.expert_rows
            moe = f", {block.experts} experts top-{block.top_k}, rows an expert {least:,.0f} to {most:,.0f}, mean {mean:,.0f}"
        lines.append(f"{block.kind} x {len(block.layers)} (blocks {_ranges(block.layers)}){moe}{waves}")
        table = [[f"  {name}", " x ".join(map(str, shape)), chosen or "kept"] for name, shape, chosen in block.weights]
        lines += _table(table, left=2)
        lines.append(
            f"  a worker sends {_gib(block.state_bytes)} GiB of states for {len(block.tasks)} solves, planes {_gib(block.plane_bytes)} GiB, "
            f"{_duration(sum(block.phases().values()))} a block"
        )
    return lines


def _ranges(layers: tuple[int, ...]) -> str:
    """0-2, or 2, 4 ... 42 where they are many and not in a row."""
    if len(layers) == layers[-1] - layers[0] + 1:
        return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
    return ", ".join(map(str, layers)) if len(layers) <= 4 else f"{layers[0]}, {layers[1]} ... {layers[-1]}"


def _peaks(made: Plan) -> list[str]:
    options = made.options
    wanted: list[tuple[str, Need | None, float | None]] = [
        ("RAM, a worker", made.peak("RAM", owner=False), options.memory_bytes),
        ("RAM, the busiest owner", made.peak("RAM", owner=True), options.memory_bytes),
        ("GPU, a worker", made.peak("GPU", owner=False), options.machine.gpu_memory_bytes),
        ("GPU, the busiest owner", made.peak("GPU", owner=True), options.machine.gpu_memory_bytes),
        ("object store, a node", made.peak("object store"), options.store_bytes),
        ("disk, the node with the output", made.peak("disk"), options.disk_bytes),
    ]
    rows = [["peak, GiB", "needed", "given", "stage", "terms"]]
    for label, need, given in wanted:
        if need is not None:
            terms = " + ".join(f"{name} {size / GIB:.2f}" for name, size in need.terms if size)
            rows.append([label, _gib(need.total), _gib(given) if given is not None else "-", f"{need.stage}, {need.kind}", terms])
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        f"{row[0].ljust(widths[0])}  {row[1].rjust(widths[1])}  {row[2].rjust(widths[2])}  {row[3].ljust(widths[3])}  {row[4]}"
        for row in rows
    ]


def _times(made: Plan) -> list[str]:
    options = made.options
    states = sum(len(block.layers) * block.moved_bytes for block in made.blocks)
    phases = made.phases()
    rows = [["estimate", "seconds", "share"]]
    rows += [[phase, f"{seconds:,.1f}", f"{seconds / made.seconds:.1%}"] for phase, seconds in phases.items()]
    rows.append(["in all", f"{made.seconds:,.1f}", _duration(made.seconds)])
    return [
        f"moved over the network: {_gib(made.moved_bytes)} GiB (states {_gib(states)}, planes {_gib(made.moved_bytes - states)})",
        "",
        *_table(rows),
        f"Times are estimates from the rates of '{options.machine.name}', not measurements.",
    ]


def _simulation(rows: list[Row], stragglers: float, losses: float, replace_after: float, seed: int) -> list[str]:
    header = [
        "workers",
        "waves",
        "duration",
        "speed-up",
        "efficiency",
        "busy mean",
        "busy least",
        "moved GiB",
        "sent again",
        "losses",
        "wasted",
    ]
    table, refused = [header], []
    reference = next((row.result for row in rows if row.result is not None), None)
    for row in rows:
        result = row.result
        if result is None or row.plan is None or reference is None:
            table.append([str(row.workers), *["-"] * (len(header) - 1)])
            refused.append(f"{row.workers} workers: {row.refusal}")
            continue
        busy, spent = result.utilization, sum(result.useful_s) + sum(result.wasted_s)
        table.append(
            [
                str(row.workers),
                str(max(block.waves for block in row.plan.blocks)),
                _duration(result.makespan_s),
                f"{reference.makespan_s / result.makespan_s:.2f}",
                f"{result.efficiency(reference):.1%}",
                f"{sum(busy) / len(busy):.1%}",
                f"{min(busy):.1%}",
                _gib(result.moved_bytes),
                _gib(result.resent_bytes),
                str(result.losses),
                f"{sum(result.wasted_s) / spent:.1%}" if spent else "0.0%",
            ]
        )
    stated = f"straggler sigma {stragglers:g}, {losses:g} losses a worker-hour, replaced after {replace_after:g} s, seed {seed}"
    base = f"{reference.workers} worker(s)" if reference else "none"
    return [f"simulated ({stated}); speed-up and efficiency against {base}", *_table(table, left=0), *refused]
