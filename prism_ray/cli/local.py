"""`prism-ray local -- command`: run a command against a Ray head of its own on this machine."""

from __future__ import annotations

from typing import Annotated

import typer


def local(
    command: Annotated[list[str], typer.Argument(help="command and arguments, after --")],
    num_cpus: Annotated[float, typer.Option(help="logical CPUs of the head")] = 2,
) -> None:
    """Start a Ray head on the loopback, run COMMAND with RAY_ADDRESS set, stop the head; the exit code is the command's."""
    from prism_ray.dist.local import run_on_local_head

    raise typer.Exit(run_on_local_head(command, num_cpus=num_cpus))
