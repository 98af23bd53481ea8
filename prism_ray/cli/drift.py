"""`prism-ray drift`: how far variants drifted from their base, along which axis, above which noise, and what to do."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prism_ray.cli.spaces import load_space
from prism_ray.core.errors import EXIT_FAILED, ConfigError

if TYPE_CHECKING:
    from prism_ray.drift.config import DriftConfig
    from prism_ray.drift.result import DriftResult
    from prism_ray.training.task import BenchmarkConfig

# Stems that say which part of a data set a file is and nothing about which set.
PARTS = {"train", "test", "valid", "validation", "val", "dev", "data", "data_full", "part"}


def drift(
    models: Annotated[
        list[str], typer.Argument(metavar="BASE VARIANT…", help="folder, GGUF, hub id, pypi:<package>==<version>, or adapter[@its-base]")
    ],
    data: Annotated[list[str], typer.Option(help="file of prompt and answer columns or of text, or benchmarks:function; repeatable")],
    out: Annotated[Path, typer.Option(help="folder for drift.json, drift.parquet, samples.parquet, drift.html")] = Path("drift"),
    name: Annotated[list[str] | None, typer.Option(help="a name per variant, in order")] = None,
    prompt: Annotated[str | None, typer.Option(help="template with {column} fields for the files of --data")] = None,
    answer: Annotated[str | None, typer.Option(help="answer column of the files of --data")] = None,
    column: Annotated[str, typer.Option(help="text column where there is no answer")] = "text",
    max_examples: Annotated[int, typer.Option(help="samples of each file", min=1)] = 512,
    max_tokens: Annotated[int, typer.Option(help="longest sample", min=2)] = 512,
    max_batch: Annotated[int, typer.Option(help="samples of a batch", min=1)] = 16,
    max_batch_tokens: Annotated[int, typer.Option(help="tokens of a batch after padding", min=1)] = 2048,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16")] = "auto",
    threads: Annotated[int, typer.Option(help="torch threads of a process, 0 for all")] = 0,
    joint: Annotated[bool, typer.Option(help="also optimize the alignment over the orthogonal group")] = False,
    floor_samples: Annotated[int, typer.Option(help="samples for base against itself in other batch shapes, 0 for none", min=0)] = 32,
    max_dropped: Annotated[int, typer.Option(help="samples that may be left out for NaN or infinity", min=0)] = 0,
    max_bound: Annotated[float | None, typer.Option(help="fail above this bound, nats a token")] = None,
    fail_on: Annotated[list[str] | None, typer.Option(help="rotation, scale, shape, head or drift; repeatable")] = None,
    seed: Annotated[int, typer.Option()] = 0,
    ray: Annotated[bool, typer.Option("--ray", help="shard the data over the Ray cluster's workers")] = False,
    workers: Annotated[int, typer.Option(help="workers with --ray", min=1)] = 2,
    address: Annotated[str | None, typer.Option(help="Ray address with --ray")] = None,
) -> int:
    """Compare VARIANTs with BASE on each --data; exit code 1 when a threshold is crossed."""
    from prism_ray.drift.config import DriftConfig

    if len(models) < 2:
        raise ConfigError("give a base and at least one variant", where="BASE VARIANT…")
    benchmarks = [_benchmark(entry, prompt, answer, column, max_examples, max_tokens) for entry in data]
    config = DriftConfig.load(
        {
            "base": models[0],
            "variants": models[1:],
            "names": name or None,
            "data": benchmarks,
            "dtype": dtype,
            "max_batch": max_batch,
            "max_batch_tokens": max_batch_tokens,
            "threads": threads,
            "alignments": ["identity", "nuclear", *(["joint"] if joint else [])],
            "floor_samples": floor_samples,
            "max_dropped": max_dropped,
            "max_bound": max_bound,
            "fail_on": fail_on or [],
            "seed": seed,
        }
    )
    if ray:
        from prism_ray.dist.cluster import connect
        from prism_ray.dist.drift import run_on_ray

        connect(address)
        results = run_on_ray(config, workers=workers, say=typer.echo)
    else:
        from prism_ray.drift.run import run_drift

        results = run_drift(config, say=typer.echo)
    return finish(out, config, results)


def finish(out: Path, config: DriftConfig, results: Sequence[DriftResult]) -> int:
    """Write the files, print the table and the verdicts; 1 when a threshold is crossed."""
    from prism_ray.drift import outcome
    from prism_ray.reports.drift import write_drift_report

    summary = outcome.write(out, config, results, command=shlex.join(["prism-ray", *sys.argv[1:]]))
    report = write_drift_report(out, outcome.table(results), outcome.samples(results), summary)
    _print(results, summary)
    typer.echo(f"report: {report}")
    return 0 if summary["passed"] else EXIT_FAILED


def _print(results: Sequence[DriftResult], summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 180)
    shown = Table(
        "variant",
        "benchmark",
        "n",
        "rho_T",
        "rho_P",
        "1-Omega",
        "delta",
        "gamma",
        "B (95 %)",
        "range",
        "|dR| ± se",
        "axis",
        "status",
        "direction",
    )
    for result in results:
        bound, test = result.bound, result.direction
        shown.add_row(
            result.variant,
            result.benchmark,
            str(result.samples),
            f"{bound.rho_target:.3f}",
            f"{bound.rho_proxy:.3f}",
            f"{bound.one_minus_omega:.3g}",
            f"{bound.delta:.3g}",
            f"{bound.gamma:.3g}",
            f"{bound.value:.3g} ({result.interval.low:.3g} to {result.interval.high:.3g})",
            f"{result.tight.value:.3g}",
            f"{abs(result.delta_ce):.4f} ± {result.delta_ce_se:.4f}",
            f"{bound.dominant} {100 * bound.shares[bound.dominant]:.0f} %" if bound.dominant else "–",
            result.verdict.status,
            "–" if test is None else f"{test.cosine:.4f}, null {test.own_null.mean:.4f} ± {test.own_null.sd:.4f}: {test.verdict}",
        )
    console.print(shown)
    for result in results:
        console.print(result.verdict.text, markup=False, highlight=False)
    for entry in summary["ranking"]:
        console.print(f"Spearman of {entry['reading']} with |dR|: {entry['mean']} ± {entry['sem']}", markup=False, highlight=False)
    for line in summary["failures"]:
        console.print(f"fails: {line}", markup=False, highlight=False)


def _benchmark(entry: str, prompt: str | None, answer: str | None, column: str, max_examples: int, max_tokens: int) -> BenchmarkConfig:
    """A file with the given columns, or a function that returns the whole."""
    from prism_ray.training.task import BenchmarkConfig

    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", entry) and not Path(entry).exists() and not entry.startswith(("demo:", "datasets:")):
        return load_space(entry, BenchmarkConfig, [])
    if (prompt is None) != (answer is None):
        raise ConfigError("--prompt and --answer belong together", where="--prompt" if prompt is None else "--answer")
    values: dict[str, Any] = {"location": entry, "name": _name(entry), "max_examples": max_examples, "max_tokens": max_tokens}
    if prompt is None:
        prompt, answer = _usual_columns(entry)
    values |= {"column": column} if prompt is None else {"prompt": prompt, "answer": answer}
    return BenchmarkConfig(**values)


def _usual_columns(entry: str) -> tuple[str | None, str | None]:
    """`{prompt}` and `answer` where a table has columns of these names, so that plain files need no option."""
    import prism_ray.training.demo  # noqa: F401 - registers `demo:`
    from prism_ray.core.rows import format_of, read_table

    if not entry.startswith(("demo:", "datasets:")) and format_of(entry) == "text":
        return None, None
    first = next(iter(read_table(entry).rows(())), None)
    if first is not None and {"prompt", "answer"} <= set(first.values):
        return "{prompt}", "answer"
    return None, None


def _name(entry: str) -> str:
    path = Path(entry.rsplit(":", 1)[-1])
    stem = path.name.split(".", 1)[0]
    return path.parent.name if stem.casefold() in PARTS and path.parent.name else stem or entry
