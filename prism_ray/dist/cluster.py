"""Connecting to a Ray cluster, and refusing what it cannot run, with the arithmetic."""

from __future__ import annotations

import os
import socket
from typing import Any

import ray

from prism_ray.core.errors import EnvironmentFault, PrismError, ResourceError
from prism_ray.dist.config import ScalingConfig

TRIAL_CPUS = 0.01
"""CPUs of a trial's own actor, which only waits for its workers; Ray refuses 0."""


def connect(address: str | None = None, *, verbose: bool = False) -> None:
    """Connect to a running cluster: `address`, else RAY_ADDRESS, else the one on this machine. Never starts one. verbose: show workers' output."""
    if ray.is_initialized():
        return
    target = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        _require_listener(target)
        # Workers' output stays in the cluster's logs: eight trials' interleaved lines would bury the sweep's own (field case RAY-06).
        ray.init(address=target, log_to_driver=verbose, configure_logging=False)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise EnvironmentFault(
            f"no Ray cluster answers ({reason})", where=target, remedy="start one (ray start --head), or set RAY_ADDRESS"
        ) from None


def _require_listener(target: str) -> None:
    """Raise OSError unless something listens at host:port: Ray itself would knock for minutes. Other forms of address are left to Ray."""
    host, _, port = target.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def check_feasible(scaling: ScalingConfig) -> int:
    """How many trials fit at once, at most scaling.concurrent; raises ResourceError when not even one does.

    Workers of a trial are single bundles that must each fit a node; an autoscaling cluster is not refused for what it lacks now.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus = [float(node.get("CPU", 0)) for node in nodes]
    gpus = [float(node.get("GPU", 0)) for node in nodes]
    if scaling.autoscaling:
        return scaling.concurrent
    slots = 0
    for node_cpus, node_gpus in zip(cpus, gpus, strict=True):
        fits = int((node_cpus - TRIAL_CPUS) / (scaling.cpus_per_worker + TRIAL_CPUS / scaling.workers) + 1e-9)
        if scaling.gpus_per_worker:
            fits = min(fits, int(node_gpus / scaling.gpus_per_worker + 1e-9))
        slots += max(0, fits)
    possible = slots // scaling.workers
    if possible < 1:
        raise ResourceError(
            f"a trial needs {scaling.workers} worker(s) of {scaling.cpus_per_worker:g} CPU and {scaling.gpus_per_worker:g} GPU, plus {TRIAL_CPUS:g} CPU; "
            f"the cluster's {len(nodes)} node(s) have CPUs {cpus} and GPUs {gpus}, which hold {slots} such worker(s)",
            where="scaling",
            remedy="lower cpus_per_worker or workers, add nodes, or set scaling.autoscaling=true",
        )
    return min(possible, scaling.concurrent)


def worker_bundle(scaling: ScalingConfig) -> dict[str, float]:
    """What one worker asks of one node."""
    return {"CPU": scaling.cpus_per_worker, **({"GPU": scaling.gpus_per_worker} if scaling.gpus_per_worker else {})}


def free_resources() -> str:
    """CPUs and GPUs that no task, actor or group holds now, of all nodes together."""
    free = ray.available_resources()
    return ", ".join(f"{free.get(name, 0.0):g} {name}" for name in ("CPU", "GPU") if name in free or name == "CPU")


def unwrap(error: BaseException) -> BaseException:
    """The PrismError inside Ray's task and training errors, or the innermost cause."""
    seen: set[int] = set()
    current: Any = error
    while id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, PrismError) and not hasattr(current, "cause"):
            return current
        failures = getattr(current, "worker_failures", None)
        if failures:
            current = next(iter(failures.values()))
            continue
        following = getattr(current, "cause", None) or current.__cause__
        if following is None:
            return current
        current = following
    return current
