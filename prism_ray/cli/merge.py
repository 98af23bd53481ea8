"""`prism-ray merge`: write a Scale-QLoRA adapter into a copy of its base checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prism_ray.core.errors import ConfigError


def merge(
    base: Annotated[Path, typer.Argument(help="FP4 checkpoint folder that the adapter was trained on")],
    adapter: Annotated[Path, typer.Argument(help="adapter folder")],
    out: Annotated[Path, typer.Option(help="folder to write")],
    replace: Annotated[bool, typer.Option(help="overwrite an existing folder")] = False,
) -> None:
    """Merge ADAPTER into BASE; refuses when any merged weight differs from the unmerged forward's."""
    import torch

    from prism_ray.adapters.admission import load_adapter
    from prism_ray.adapters.merge import merge_to_folder
    from prism_ray.formats.checkpoint import load_quantized_model

    if out.exists() and not replace:
        raise ConfigError("the folder exists already", where=str(out), remedy="choose another, or give --replace")
    model = load_adapter(load_quantized_model(base, dtype=torch.bfloat16), adapter)
    report = merge_to_folder(model, base, out, replace=replace)
    typer.echo(
        f"{out}: max|dW| = {report.max_abs_dw}, {report.changed} of {report.blocks} scale bytes changed, code plane {report.code_plane[:12]}"
    )
