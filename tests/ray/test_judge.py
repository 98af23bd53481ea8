"""How a trial is judged from what Ray hands back: real exception types, no cluster."""

from __future__ import annotations

import math
import shutil
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RayActorError

from prism_ray.cli.spaces import load_space
from prism_ray.core.errors import DataError, ResourceError
from prism_ray.dist import cluster, sweep
from prism_ray.dist.config import ScalingConfig, SweepConfig
from prism_ray.dist.sweep import judge

GOOD = {"final": 1.0, "validation_metric": 0.5, "step": 8.0, "loss": 1.0}


@pytest.mark.parametrize(
    ("metrics", "error", "state", "reason"),
    [
        (GOOD, None, "good", ""),
        (GOOD | {"validation_metric": math.nan}, None, "diverged", "not finite"),
        (GOOD | {"diverged": 1.0, "step": 3.0}, None, "diverged", "step 3"),
        ({"final": 1.0, "user_error": "train.csv: no column 'x'"}, None, "error", "no column 'x'"),
        ({"loss": 1.0, "validation_metric": 0.2, "step": 4.0}, None, "stopped_early", "after step 4"),
        ({}, None, "never_reported", "without reporting"),
        (GOOD, ValueError("bad\nsecond line"), "error", "ValueError: bad"),
        ({}, RayActorError(), "killed", "RayActorError"),
        (GOOD, DataError("empty", where="a.csv"), "error", "a.csv: empty"),
    ],
)
def test_states_and_reasons(metrics: dict, error: BaseException | None, state: str, reason: str):
    found_state, found_reason = judge(metrics, error)
    assert found_state == state
    assert reason in found_reason
    assert "\n" not in found_reason


def test_a_user_error_is_found_inside_the_errors_that_ray_wraps_around_it():
    inner = DataError("empty", where="a.csv")
    outer = RuntimeError("outer")
    outer.__cause__ = ValueError("between")
    outer.__cause__.__cause__ = inner
    assert cluster.unwrap(outer) is inner


def nodes(*resources: dict[str, float]) -> list[dict]:
    return [{"Alive": True, "Resources": entry} for entry in resources]


@pytest.mark.parametrize(
    ("cluster_nodes", "scaling", "slots"),
    [
        (nodes({"CPU": 2.0}), ScalingConfig(cpus_per_worker=0.95, concurrent=2), 2),
        (nodes({"CPU": 2.0}), ScalingConfig(cpus_per_worker=1.0, concurrent=2), 1),
        (nodes({"CPU": 8.0, "GPU": 4.0}), ScalingConfig(cpus_per_worker=1, gpus_per_worker=1, workers=2, concurrent=9), 2),
        (
            nodes({"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 1.0}),
            ScalingConfig(cpus_per_worker=1, gpus_per_worker=1, workers=2, concurrent=9),
            1,
        ),
        (nodes({"CPU": 1.0}), ScalingConfig(cpus_per_worker=32, concurrent=3, autoscaling=True), 3),
    ],
)
def test_slots_follow_from_what_each_node_holds(
    monkeypatch: pytest.MonkeyPatch, cluster_nodes: list[dict], scaling: ScalingConfig, slots: int
):
    monkeypatch.setattr(ray, "nodes", lambda: cluster_nodes)
    assert cluster.check_feasible(scaling) == slots


def test_a_bundle_that_fits_no_single_node_is_refused_with_the_arithmetic(monkeypatch: pytest.MonkeyPatch):
    # Two GPUs in the cluster, one a node: a worker that wants two can never be placed (field case RAY-07).
    monkeypatch.setattr(ray, "nodes", lambda: nodes({"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 1.0}))
    with pytest.raises(ResourceError) as caught:
        cluster.check_feasible(ScalingConfig(cpus_per_worker=1, gpus_per_worker=2))
    assert "2 GPU" in str(caught.value)
    assert "[1.0, 1.0]" in str(caught.value)


def test_a_sweep_whose_checkpoints_do_not_fit_the_disk_is_refused_before_any_trial(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Field case RAY-06: the budget is of all trials together, because Ray's limit of kept checkpoints is per trial."""
    entry = {"parameters_per_rank": 1_000_000, "bytes": 5 << 30, "notes": []}
    monkeypatch.setattr(sweep, "_remote", lambda *args: entry)
    free = {"bytes": 0}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free["bytes"], total=1 << 50, used=0))
    config = load_space("pqt:quickstart", SweepConfig, ["space.rank=[8]", "space.strength=[0.0,0.1,0.5]"])
    needed = int(1.1 * (8_000_000 * 4 * sweep.CHECKPOINT_COPIES * (config.keep_checkpoints + 1) * 3 + (5 << 30)))
    free["bytes"] = needed
    assert sweep._prepare(config, tmp_path)["nvfp4"] == entry
    free["bytes"] = needed - (1 << 20)
    with pytest.raises(ResourceError, match="not enough disk for checkpoints of 3 trials"):
        sweep._prepare(config, tmp_path)
