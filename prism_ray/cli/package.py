"""`prism-ray package`: what `ray job submit --working-dir` would upload, before it does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def package(
    folder: Annotated[Path, typer.Argument(help="the job's working directory")] = Path("."),
    limit_mib: Annotated[float, typer.Option(help="largest package that may be submitted, MiB")] = 100.0,
) -> None:
    """Print the package's size and its ten largest entries; exit with 2 above the limit."""
    from prism_ray.core.workdir import check_package

    typer.echo(check_package(folder, int(limit_mib * 2**20)))
