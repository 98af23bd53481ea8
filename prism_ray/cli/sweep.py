"""`prism-ray sweep`: run a sweep on the Ray cluster; jobs/sweep_pqt.py is the same under `ray job submit`."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated

import typer

from prism_ray.cli.spaces import load_space


def sweep(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, for example train.steps=40 space.rank=[4,8]")] = None,
    space: Annotated[str, typer.Option(help="module:function that returns a SweepConfig")] = "pqt:quickstart",
    resume: Annotated[bool, typer.Option(help="go on with the sweep of this name")] = False,
    verbose: Annotated[bool, typer.Option(help="show the output of every worker")] = False,
    address: Annotated[str | None, typer.Option(help="Ray address; default RAY_ADDRESS, else the cluster on this machine")] = None,
) -> None:
    """Sweep regularizer strength, rank, learning rate and format; write trials, report and the merged best adapter."""
    from prism_ray.dist.config import SweepConfig

    config = load_space(space, SweepConfig, overrides or [])
    from prism_ray.dist.cluster import connect
    from prism_ray.dist.sweep import run_sweep

    connect(address, verbose=verbose)
    report = run_sweep(config, resume=resume, command=shlex.join(["prism-ray", "sweep", *sys.argv[1:]]))
    typer.echo(f"report: {report}")
