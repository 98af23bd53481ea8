"""`prism-ray train`: one run in this process, without Ray or DeepSpeed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from prism_ray.cli.spaces import load_space


def train(
    out: Annotated[Path, typer.Option(help="adapter folder to write")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, for example steps=40 adapter.rank=4")] = None,
    space: Annotated[str, typer.Option(help="module:function that returns a TrainConfig")] = "runs:demo",
) -> None:
    """Train a Scale-QLoRA adapter, score it, and write it with its scale plane."""
    from prism_ray.training.config import TrainConfig
    from prism_ray.training.run import run_local

    config = load_space(space, TrainConfig, overrides or []).with_overrides({"backend": "local"})
    metrics = run_local(config, out)
    typer.echo(json.dumps({key: value for key, value in metrics.items() if math.isfinite(value)}, indent=2, sort_keys=True))
