"""`run_drift` over Ray Data on a real local cluster: the numbers of one process, also when a worker is killed half way; bad input as one line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest

from prism_ray.calibrate.quantize import quantize_to_folder
from prism_ray.dist.local import LocalHead
from prism_ray.formats.policy import QuantPolicy
from prism_ray.models.tiny import save_tiny, tiny_llama, tiny_tokenizer
from tests.ray.conftest import ROOT

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drift")
    # Wide enough that a unit takes a moment, so that a worker can be killed in the middle of one.
    save_tiny(folder / "base", tiny_llama(hidden_size=256, intermediate_size=512, num_layers=4, tie=False))
    for name in ("nvfp4", "mxfp4"):
        model = tiny_llama(hidden_size=256, intermediate_size=512, num_layers=4, tie=False)
        quantize_to_folder(model, tiny_tokenizer(), QuantPolicy(format=name), folder / name)
    rows = [{"prompt": f"{'very ' * (i % 40)}{i} is", "answer": ("red", "green")[i % 2] * (1 + i % 3)} for i in range(600)]
    (folder / "colours.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def command(root: Path, out: Path, *arguments: str) -> list[str]:
    models = [str(root / name) for name in ("base", "nvfp4", "mxfp4")]
    options = [
        "--data",
        str(root / "colours.jsonl"),
        "--out",
        str(out),
        "--dtype",
        "float32",
        "--max-examples",
        "600",
        "--max-batch",
        "8",
        "--threads",
        "1",
    ]
    return [sys.executable, "-m", "prism_ray.cli.main", "drift", *models, *options, *arguments]


def run(root: Path, out: Path, *arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(root, out, *arguments), env=env, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)


@pytest.fixture(scope="module")
def single(root: Path, head: LocalHead, tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    out = tmp_path_factory.mktemp("single")
    done = run(root, out, env=head.env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return pd.read_parquet(out / "drift.parquet")


def same(found: pd.DataFrame, wanted: pd.DataFrame) -> None:
    """Sums of the same float64 numbers in another order; a lost or doubled unit changes counts."""
    assert found["samples"].tolist() == wanted["samples"].tolist() == [600, 600]
    assert found["tokens"].tolist() == wanted["tokens"].tolist()
    pd.testing.assert_frame_equal(found, wanted, rtol=1e-10, atol=1e-12)


def test_two_workers_give_the_numbers_of_one_process(root, head, single, tmp_path):
    done = run(root, tmp_path, "--ray", "--workers", "2", env=head.env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    same(pd.read_parquet(tmp_path / "drift.parquet"), single)


def drift_workers(head: LocalHead) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        title = " ".join(process.info["cmdline"] or ())
        if "ray::" in title and ("DriftWorker" in title or "_MapWorker" in title or "MapWorker" in title):
            found.append(process)
    return found


def test_a_worker_killed_half_way_is_replaced_and_counted_once(root, head, single, tmp_path):
    output = (tmp_path / "out.txt").open("wb")
    process = subprocess.Popen(command(root, tmp_path, "--ray", "--workers", "2"), env=head.env, cwd=ROOT, stdout=output, stderr=output)
    deadline = time.monotonic() + 200
    killed = False
    while process.poll() is None and time.monotonic() < deadline:
        busy = [worker for worker in drift_workers(head) if worker.cpu_times().user > 4]
        if busy:
            busy[0].send_signal(signal.SIGKILL)
            killed = True
            break
        time.sleep(0.2)
    assert process.wait(timeout=300) == 0, (tmp_path / "out.txt").read_text()[-3000:]
    assert killed, "no worker was seen at work"
    same(pd.read_parquet(tmp_path / "drift.parquet"), single)


def test_a_workers_user_error_is_one_line(root, head, tmp_path):
    save_tiny(tmp_path / "wide", tiny_llama(vocab_size=tiny_llama().config.vocab_size + 8, tie=False))
    models = [str(root / "base"), str(tmp_path / "wide")]
    line = [
        sys.executable,
        "-m",
        "prism_ray.cli.main",
        "drift",
        *models,
        "--data",
        str(root / "colours.jsonl"),
        "--out",
        str(tmp_path / "out"),
        "--ray",
    ]
    done = subprocess.run(line, env=head.env, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2, done.stdout[-2000:] + done.stderr[-2000:]
    errors = [entry for entry in (done.stdout + done.stderr).splitlines() if entry.startswith("error: ")]
    assert len(errors) == 1
    assert "hidden size" in errors[0] or "vocabulary" in errors[0]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out" / "drift.parquet").exists()
