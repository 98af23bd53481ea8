"""The layer-streamed pass on a real local cluster: the bytes of one process on one worker and on two, with workers, an owner and the driver killed; bad input."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from prism_ray.calibrate.costs import GIB, MACHINES, PlanOptions
from prism_ray.calibrate.plan import Plan, make_plan
from prism_ray.calibrate.shapes import model_shape, read_config
from prism_ray.calibrate.simulate import simulate
from prism_ray.dist.local import LocalHead
from prism_ray.models.tiny import save_tiny, tiny_qwen3_moe
from tests.ray.conftest import ROOT

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrate")
    # Wide enough that sums and solves take a moment, so that a worker can be killed in the middle of one.
    model = tiny_qwen3_moe(num_experts=8, hidden_size=256, moe_intermediate_size=128, num_layers=3, dtype=torch.bfloat16)
    save_tiny(folder / "model", model)
    (folder / "text.txt").write_text(
        "".join(f"{'the rain in the town ' * (1 + line % 3)}is {line} and on a street\n" for line in range(3000))
    )
    return folder


def command(root: Path, out: Path, *arguments: str) -> list[str]:
    script = (
        [sys.executable, str(ROOT / "jobs" / "calibrate.py")]
        if "--workers" in arguments
        else [sys.executable, "-m", "prism_ray.cli.main", "quantize"]
    )
    data = ["--data", str(root / "text.txt"), "--samples", "96", "--length", "64", "--max-fallback-share", "1"]
    settings = ["dtype=float32", "lanes=6", "data.chunk=4", "options.refine=3"]
    return [*script, str(root / "model"), *data, "--out", str(out), "--keep-work", *arguments, *settings]


def parts(out: Path) -> dict[str, str]:
    work = out.with_name(f"{out.name}.work")
    return {str(path.relative_to(work)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(work.rglob("part-*"))}


def run(root: Path, out: Path, *arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    # One thread, as an actor of one CPU has: the number of threads decides the order of sums inside a product.
    env = env | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command(root, out, *arguments), env=env, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)


@pytest.fixture(scope="module")
def single(root: Path, head: LocalHead, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("single") / "q"
    done = run(root, out, env=head.env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return parts(out)


def workers(doing: str) -> list[psutil.Process]:
    """Processes of calibration workers whose title says what they do ("" for any)."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        title = " ".join(process.info["cmdline"] or ())
        if "ray::CalibrationWorker" in title and doing in title:
            found.append(process)
    return found


def kill_when(doing: str, times: int, driver: subprocess.Popen[str]) -> int:
    """SIGKILL a worker that is at `doing`, `times` times; how often it came to that before the driver ended."""
    killed: set[int] = set()
    while len(killed) < times and driver.poll() is None:
        for process in workers(doing):
            if process.pid not in killed:
                process.send_signal(signal.SIGKILL)
                killed.add(process.pid)
                break
        time.sleep(0.02)
    return len(killed)


def start(root: Path, out: Path, head: LocalHead) -> subprocess.Popen[str]:
    arguments = command(root, out, "--workers", "2", "--worker-cpus", "0.7")
    return subprocess.Popen(arguments, env=head.env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def moved(out: Path) -> dict[str, int]:
    """Bytes of merged states, and of those that owners received from others, of a finished run."""
    blocks = [json.loads(path.read_text()) for path in sorted(out.with_name(f"{out.name}.work").glob("blocks/*/block.json"))]
    return {key: sum(block[key] for block in blocks) for key in ("state_bytes", "received_bytes")}


def planned(root: Path, count: int) -> dict[str, int]:
    """The same from the plan for even routing, its replay agreeing."""

    def plan_of(workers: int, lanes: int) -> Plan:
        given = {"workers": workers, "lanes": lanes, "memory_bytes": 4 * GIB, "machine": MACHINES["cpu2"]}
        return make_plan(model_shape(read_config(root / "model")), PlanOptions(**given, samples=96, length=64, skew=1.0))

    whole, plan = plan_of(1, 1), plan_of(count, 6)
    received = sum(len(block.layers) * block.moved_bytes for block in plan.blocks)
    planes = sum(len(block.layers) * block.plane_bytes for block in plan.blocks) * (count - 1)
    assert simulate(plan).moved_bytes == pytest.approx(received + planes)
    return {"state_bytes": round(sum(len(b.layers) * b.state_bytes for b in whole.blocks)), "received_bytes": round(received)}


@pytest.mark.parametrize("count", ["1", "2"])
def test_any_number_of_workers_gives_the_bytes_of_one_process(root, head, single, tmp_path, count):
    done = run(root, tmp_path / "q", "--workers", count, "--worker-cpus", "0.7", env=head.env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert parts(tmp_path / "q") == single
    assert (tmp_path / "q" / "manifest.json").is_file()
    assert not workers("")
    # Planned without skew, every expert in every lane holds a whole matrix; here the router leaves some below half their width, which hold and send less.
    found, bound = moved(tmp_path / "q"), planned(root, int(count))
    for key, value in bound.items():
        assert 0.7 * value <= found[key] <= value, (key, found, bound)


@pytest.mark.parametrize(("doing", "times"), [("collect", 2), ("solve", 1), ("propagate", 1)])
def test_a_killed_worker_is_replaced_and_counted_once(root, head, single, tmp_path, doing, times):
    driver = start(root, tmp_path / "q", head)
    killed = kill_when(doing, times, driver)
    output, _ = driver.communicate(timeout=400)
    assert killed == times, f"the run ended before a worker was seen at {doing}"
    assert driver.returncode == 0, output[-3000:]
    assert "another one takes over" in output
    assert parts(tmp_path / "q") == single


def test_a_killed_driver_goes_on_where_it_was(root, head, single, tmp_path):
    driver = start(root, tmp_path / "q", head)
    done = tmp_path / "q.work" / "blocks" / "0000" / "block.json"
    limit = time.monotonic() + 300
    while not done.is_file() and time.monotonic() < limit and driver.poll() is None:
        time.sleep(0.02)
    os.kill(driver.pid, signal.SIGKILL)
    driver.communicate()
    first = done.stat().st_mtime_ns
    again = run(root, tmp_path / "q", "--workers", "2", "--worker-cpus", "0.7", env=head.env)
    assert again.returncode == 0, again.stdout[-2000:] + again.stderr[-2000:]
    assert parts(tmp_path / "q") == single and done.stat().st_mtime_ns == first


def test_no_room_for_reading_is_refused_with_the_arithmetic(root, head, tmp_path):
    """Field case RAY-05: workers that hold every CPU leave none to the reader."""
    done = run(root, tmp_path / "q", "--workers", "2", "--worker-cpus", "1", "--reader-cpus", "1", env=head.env)
    assert done.returncode == 2
    assert "error: workers: 2 workers x 1 CPU + 1 for reading = 3, the cluster has 2; at most 1 workers fit" in done.stderr
    assert not (tmp_path / "q.work").exists()


def test_a_fault_of_the_data_ends_the_run_in_one_line(root, head, tmp_path):
    arguments = command(root, tmp_path / "q", "--workers", "1")
    arguments[arguments.index("--length") + 1] = "1000000"
    done = subprocess.run(arguments, env=head.env, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 2 and len(errors) == 1 and "gives no window of 1000000 tokens" in errors[0]


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Callable[[], None] | None:
    yield
    limit = time.monotonic() + 20
    while workers("") and time.monotonic() < limit:
        time.sleep(0.1)
    assert not workers("")
