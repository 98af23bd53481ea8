"""`prism-ray adapter`: check, apply, roll back, audit and merge scale adapters; publish and pull them (`cli.adapter_store`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prism_ray.cli import adapter_store
from prism_ray.core.errors import EXIT_FAILED, ConfigError

if TYPE_CHECKING:
    import torch

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

Checkpoint = Annotated[Path, typer.Argument(help="FP4 checkpoint folder")]
Adapter = Annotated[Path, typer.Argument(help="adapter folder")]
Reason = Annotated[str, typer.Option(help="admit an adapter of another base, for this reason; goes to the audit log")]
Log = Annotated[Path | None, typer.Option(help="audit log (JSON lines); default with --allow-mismatch: CHECKPOINT.audit.jsonl beside it")]
NoChange = Annotated[bool, typer.Option("--allow-no-change", help="admit an adapter that moves no scale")]


@app.command("check")
def check(
    checkpoint: Checkpoint, adapter: Adapter, allow_mismatch: Reason = "", audit_log: Log = None, allow_no_change: NoChange = False
) -> None:
    """Every check of `apply` that needs no forward; nothing is written but the audit log."""
    from prism_ray.adapters.admission import admit
    from prism_ray.adapters.apply import open_checkpoint
    from prism_ray.adapters.generation import recover

    recover(checkpoint)
    base = open_checkpoint(checkpoint).base
    admitted = admit(adapter, base, **_admission(checkpoint, allow_mismatch, audit_log, allow_no_change))
    typer.echo(
        f"{adapter}: admitted, {admitted.changed} of {admitted.blocks} scale bytes differ in "
        f"{len(admitted.plane.tensors) - len(admitted.unchanged)} of {len(admitted.plane.tensors)} layers"
    )
    for mismatch in admitted.overridden:
        typer.echo(f"overridden: {mismatch}")


@app.command("apply")
def apply(
    checkpoint: Checkpoint,
    adapter: Adapter,
    id: Annotated[str | None, typer.Option(help="name to record; default the adapter folder's")] = None,
    probe: Annotated[str, typer.Option(help="text whose logits must differ before and after")] = "",
    allow_mismatch: Reason = "",
    audit_log: Log = None,
    allow_no_change: NoChange = False,
) -> None:
    """Write ADAPTER's scale plane into CHECKPOINT, as a whole or not at all; codes are not touched. An applied adapter is replaced."""
    from prism_ray.adapters.apply import apply_adapter

    state = apply_adapter(
        checkpoint,
        adapter,
        adapter_id=id,
        probe=(lambda folder: _logits(folder, probe)) if probe else None,
        **_admission(checkpoint, allow_mismatch, audit_log, allow_no_change),
    )
    typer.echo(
        f"{checkpoint}: {state.adapter} applied, {state.changed} scale bytes differ from the base, "
        f"scale plane {state.scale_plane[:12]}, code plane {state.code_plane[:12]}"
    )


@app.command("rollback")
def rollback(
    checkpoint: Checkpoint,
    base: Annotated[Path | None, typer.Option(help="base checkpoint to take the bytes from; default the stored delta")] = None,
) -> None:
    """Put the base's scale bytes back, verified by SHA-256."""
    from prism_ray.adapters.apply import rollback as roll_back

    typer.echo(f"{checkpoint}: rolled back, scale plane {roll_back(checkpoint, base=base)[:12]}")


@app.command("audit")
def audit(
    checkpoint: Checkpoint,
    base: Annotated[Path, typer.Option(help="base checkpoint to compare with")],
    shown: Annotated[int, typer.Option(min=1, help="findings to print")] = 5,
) -> None:
    """Compare CHECKPOINT with its base byte by byte; exits with 1 when anything but a legal scale plane differs."""
    from prism_ray.adapters.audit import audit as compare
    from prism_ray.adapters.audit import summary
    from prism_ray.adapters.generation import recover

    recover(checkpoint)
    report = compare(checkpoint, base)
    for line in summary(report, shown=shown).values():
        typer.echo(line)
    if len(report.findings) > shown:
        typer.echo(f"... and {len(report.findings) - shown} more tensor(s)")
    if not report.code_plane_intact:
        raise typer.Exit(EXIT_FAILED)


@app.command("merge")
def merge(
    base: Annotated[Path, typer.Argument(help="FP4 checkpoint folder that the adapter was trained on")],
    adapter: Adapter,
    out: Annotated[Path, typer.Option(help="folder to write")],
    tolerance: Annotated[float, typer.Option(min=0.0, help="largest |dW| to accept")] = 0.0,
    max_swallowed: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="largest share of corrections that may move no byte")
    ] = None,
    probe: Annotated[str, typer.Option(help="text on which each layer's output is compared, unmerged and merged")] = "",
    max_output_error: Annotated[float | None, typer.Option(min=0.0, help="largest relative output error on --probe")] = None,
    report: Annotated[bool, typer.Option("--report", help="print the table of layers")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="overwrite an existing folder")] = False,
) -> None:
    """Merge ADAPTER into a copy of BASE; refuses when a merged weight differs from the unmerged forward's by more than --tolerance."""
    import torch

    from prism_ray.adapters.admission import load_adapter
    from prism_ray.adapters.merge import merge_to_folder
    from prism_ray.formats.checkpoint import load_quantized_model

    if out.exists() and not replace:
        raise ConfigError("the folder exists already", where=str(out), remedy="choose another, or give --replace")
    if max_output_error is not None and not probe:
        raise ConfigError("there is no output to compare", where="max-output-error", remedy="give a text with --probe")
    model = load_adapter(load_quantized_model(base, dtype=torch.bfloat16), adapter)
    merged = merge_to_folder(
        model,
        base,
        out,
        tolerance=tolerance,
        max_output_error=max_output_error,
        max_swallowed=max_swallowed,
        probe=_ids(base, probe) if probe else None,
        replace=replace,
    )
    if report:
        typer.echo(_table({name: layer.__dict__ for name, layer in merged.layers.items()}))
    typer.echo(
        f"{out}: max|dW| = {merged.max_abs_dw}, {merged.changed} of {merged.blocks} scale bytes changed, code plane {merged.code_plane[:12]}"
    )


def _table(rows: dict[str, dict[str, Any]]) -> str:
    """Layers down, the numbers of a merge report across, aligned; whatever fields the report has."""
    header = ["layer", *next(iter(rows.values()))]
    lines = [header, *([name, *(_cell(value) for value in row.values())] for name, row in rows.items())]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def _admission(checkpoint: Path, allow_mismatch: str, audit_log: Path | None, allow_no_change: bool) -> dict[str, Any]:
    if allow_mismatch and audit_log is None:
        audit_log = checkpoint.resolve().with_name(f"{checkpoint.resolve().name}.audit.jsonl")
    return {"allow_mismatch": allow_mismatch, "audit_log": audit_log, "allow_no_change": allow_no_change}


def _ids(folder: Path, text: str) -> torch.Tensor:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)(text, return_tensors="pt")["input_ids"]


def _logits(folder: Path, text: str) -> torch.Tensor:
    import torch

    from prism_ray.formats.checkpoint import load_quantized_model

    with torch.no_grad():
        return load_quantized_model(folder, dtype=torch.bfloat16)(input_ids=_ids(folder, text)).logits


adapter_store.register(app)
