"""The sweep on a real local cluster: a job submitted with `ray job submit`, bad trials, killed workers, killed drivers.

Tiny random models keep a trial at seconds; everything else is the shipped code on real Ray, Tune, Train V2 and DeepSpeed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from safetensors.torch import load_file

from prism_ray.cli.spaces import load_space
from prism_ray.core.manifest import read_manifest
from prism_ray.dist.config import SweepConfig
from prism_ray.dist.local import LocalHead
from prism_ray.formats.checkpoint import KIND, read_quantized
from prism_ray.training.base import base_manifest
from prism_ray.training.run import build, code_shard, train, write_adapter
from tests.ray.conftest import ROOT, TINY, Sweep, run_sweep, sweep_command

pytestmark = pytest.mark.ray


ASK_ALL = """
import contextlib, io, json, sys, traceback
import ray
from prism_ray.cli.main import run
for line in sys.stdin:
    case = json.loads(line)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = run(["sweep", *case["arguments"]])
        except BaseException:
            code = -1
            traceback.print_exc()
        ray.shutdown()
    print(json.dumps({"name": case["name"], "code": code, "output": out.getvalue()}), flush=True)
"""


def ask_all(head: LocalHead, cases: dict[str, list[str]]) -> dict[str, dict]:
    """Sweep commands one after the other by the command's own entry point in one driver process, which saves the imports; {"code", "output"} by name."""
    lines = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in cases.items()]
    done = subprocess.run(
        [sys.executable, "-c", ASK_ALL],
        input="\n".join(lines),
        env=head.env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return {entry["name"]: entry for entry in (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))}


def job_status(head: LocalHead, submission: str) -> str:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "ray"), "job", "status", submission],
        env=head.env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return (done.stdout + done.stderr).upper()


def submit(head: LocalHead, submission: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    ray = str(Path(sys.executable).parent / "ray")
    command = [ray, "job", "submit", "--submission-id", submission, "--working-dir", ".", "--", "python", "jobs/sweep_pqt.py", *arguments]
    return subprocess.run(command, env=head.env, cwd=ROOT, capture_output=True, text=True, timeout=540, check=False)


def test_submitted_job_gives_tables_report_and_a_bit_exact_merge(head: LocalHead, tiny_model: str, tmp_path: Path):
    options = [*TINY, f"train.model={tiny_model}", "space.rank=[2]", "space.strength=[0.5]", "name=job", f"storage={tmp_path}"]
    done = submit(head, "prism-good", *options)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "SUCCEEDED" in job_status(head, "prism-good")
    folder = tmp_path / "job"
    trials = pd.read_parquet(folder / "trials.parquet")
    assert trials["state"].tolist() == ["good"]
    assert trials["lambda_"].tolist() == [0.5]
    pd.testing.assert_frame_equal(
        pd.read_csv(folder / "trials.csv")[["trial_id", "rank"]], trials[["trial_id", "rank"]].astype({"rank": "int64"}), check_dtype=False
    )
    history = pd.read_parquet(folder / "history.parquet")
    for _, curve in history.groupby("trial_id"):
        assert curve["step"].tolist() == [1, 2, 3, 4, 5, 6]
        assert np.isfinite(curve["loss"]).all()
    page = (folder / "report.html").read_text()
    assert all(trial in page for trial in trials["trial_id"])
    # TensorBoard's event files come from Tune's own logger.
    assert len(list((folder / "tune").rglob("events.out.tfevents.*"))) == 1
    # The merge: same codes as the base, on-grid scales, and the scales that the adapter's plane holds.
    base = json.loads((folder / "base.json").read_text())["nvfp4"]
    manifest = read_manifest(folder / "best" / "merged", KIND)
    assert manifest["code_plane"] == base["code_plane"]
    assert manifest["merge"]["max_abs_dw"] == 0.0
    assert manifest["merge"]["changed"] > 0
    _, merged, _ = read_quantized(folder / "best" / "merged")
    plane = load_file(folder / "best" / "adapter" / "scale_plane.safetensors")
    assert plane.keys() == merged.keys()
    assert all(torch.equal(plane[name], merged[name].scales) for name in plane)


def test_nan_never_wins_and_too_few_good_trials_fail_the_job(head: LocalHead, tiny_model: str, tmp_path: Path):
    # A strength of 1e39 overflows float32, so the first update makes the factors NaN. (A huge learning rate does not: the scales are clamped.)
    options = [*TINY, f"train.model={tiny_model}", "train.backend=local", "space.rank=[2]", "space.strength=[0.0,1e39]"]
    options += ["merge_best=false", "asha.enabled=false"]
    done = submit(head, "prism-half", *options, "required_good=2", "name=half", f"storage={tmp_path}")
    assert done.returncode != 0
    assert "FAILED" in job_status(head, "prism-half")
    trials = pd.read_parquet(tmp_path / "half" / "trials.parquet").set_index("lambda_")
    assert trials.loc[0.0, "state"] == "good"
    assert trials.loc[1e39, "state"] == "diverged"
    assert "NaN or infinite" in trials.loc[1e39, "reason"]
    assert "1 of 2 trials are good, 2 required" in done.stdout + done.stderr
    best = json.loads((tmp_path / "half" / "best" / "adapter" / "train_config.json").read_text())
    assert best["regularizer"]["strength"] == 0.0


def train_workers(head: LocalHead) -> list[psutil.Process]:
    """Ray Train's worker processes of this head."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        title = " ".join(process.info["cmdline"] or ())
        if "RayTrainWorker" in title and str(head.folder) in " ".join(_environment(process)):
            found.append(process)
    return found


def _environment(process: psutil.Process) -> list[str]:
    try:
        return [*process.environ().values(), *(file.path for file in process.open_files())]
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []


def wait_for(condition, what: str, seconds: float = 300.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.2)
    raise AssertionError(f"{what} did not happen within {seconds} s")


def start_sweep(head: LocalHead, storage: Path, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    output = open(storage / f"{name}.out", "wb")  # noqa: SIM115 (the process writes to it)
    return subprocess.Popen(
        sweep_command(*arguments, f"name={name}", f"storage={storage}"),
        env=head.env,
        cwd=ROOT,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def evaluations(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if " step " in line and "ended" not in line] if log.is_file() else []


@dataclass(frozen=True)
class Interrupted:
    """A sweep of two trials, one at a time: the first one's worker was killed, then the driver during the second. What was refused meanwhile, what the
    resumed sweep gave, what its log says after the resume, and the loss curves of undisturbed runs of the same configs by lambda."""

    refusals: dict[str, dict]
    resumed: Sweep
    after: str
    undisturbed: dict[float, list[float]]


@pytest.fixture(scope="module")
def interrupted(head: LocalHead, tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    storage = tmp_path_factory.mktemp("interrupted")
    options = [*TINY, f"train.model={tiny_model}", "train.backend=local", "train.steps=12", "space.rank=[2]", "space.strength=[0.0,0.5]"]
    options += ["scaling.concurrent=1", "asha.enabled=false", "merge_best=false"]
    process = start_sweep(head, storage, "long", *options)
    log = storage / "long" / "progress.log"
    wait_for(lambda: evaluations(log), "the first evaluation")
    for victim in wait_for(lambda: train_workers(head), "a training worker"):
        victim.send_signal(signal.SIGKILL)
    # The first trial ends all the same, from its last checkpoint.
    wait_for(
        lambda: "ended" in log.read_text() and len({line.split()[2] for line in evaluations(log)}) == 2, "an evaluation of the second trial"
    )
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = log.read_text()
    place = ["name=long", f"storage={storage}"]
    refusals = ask_all(head, {"without --resume": [*options, *place], "changed": ["--resume", *options, "train.seed=7", *place]})
    resumed = run_sweep(head, storage, "long", "--resume", *options)
    space = load_space("pqt:quickstart", SweepConfig, options)
    undisturbed: dict[float, list[float]] = {}
    for point in space.points():
        curve: list[float] = []
        train(build(space.trial_config(point)), report=lambda metrics, folder, c=curve: c.append(metrics["task_loss"]), quiet=True)
        undisturbed[float(point["strength"])] = curve
    return Interrupted(refusals, resumed, log.read_text()[len(before) :], undisturbed)


def test_a_killed_driver_is_resumed_without_running_finished_trials_again(interrupted: Interrupted):
    for name, words in (("without --resume", "--resume"), ("changed", "'train' differs")):
        assert interrupted.refusals[name]["code"] == 2
        assert words in interrupted.refusals[name]["output"]
    resumed = interrupted.resumed
    assert resumed.code == 0, resumed.output[-3000:]
    trials = resumed.trials.sort_values("lambda_")
    assert trials["state"].tolist() == ["good", "good"]
    first = trials["trial_id"].iloc[0]
    assert f"trial {first}" not in interrupted.after, "the finished trial reported again"
    assert trials["trial_id"].iloc[1] in interrupted.after


@pytest.mark.parametrize("strength", [0.0, 0.5], ids=["worker killed", "driver killed"])
def test_a_killed_process_is_replaced_from_the_last_checkpoint_and_the_losses_go_on(interrupted: Interrupted, strength: float):
    trial = interrupted.resumed.trials.set_index("lambda_").loc[strength]
    assert trial["resumes"] >= 1
    history = interrupted.resumed.history
    curve = history[history["trial_id"] == trial["trial_id"]]
    assert curve["step"].tolist() == list(range(1, 13))
    # As if nothing had happened: steps are functions of their number, and the checkpoint holds the moments.
    np.testing.assert_allclose(curve["task_loss"], interrupted.undisturbed[strength], rtol=1e-5)


def test_zero_3_on_two_workers_shards_the_codes_and_saves_the_whole_adapter(head: LocalHead, tiny_model: str, tmp_path: Path):
    shared = [*TINY, f"train.model={tiny_model}", "space.rank=[2]", "space.strength=[0.1]", "train.batch_size=8"]
    two = ["scaling.workers=2", "scaling.cpus_per_worker=0.9", "train.zero_stage=3", "train.micro_batch_size=4"]
    sharded = run_sweep(head, tmp_path, "sharded", *shared, *two)
    assert sharded.code == 0, sharded.output[-3000:]
    # The single process is the library itself: no Ray, no DeepSpeed.
    space = load_space("pqt:quickstart", SweepConfig, [*shared, "train.backend=local", "train.micro_batch_size=8"])
    context = build(space.trial_config(space.points()[0]))
    curve: list[dict] = []
    result = train(context, report=lambda metrics, folder: curve.append(metrics), quiet=True)
    write_adapter(context, result, tmp_path / "single", {})
    whole = sum(entry.codes.numel() for entry in read_quantized(context.base)[1].values())
    assert code_shard(context.model)[0] == whole
    # DeepSpeed pads each tensor to a multiple of the world size: at most one bfloat16 a tensor more than half.
    assert whole / 2 <= sharded.trials["code_bytes_per_worker"].item() <= whole / 2 + 2 * 14
    files = [load_file(folder / "adapter_model.safetensors") for folder in (sharded.folder / "best" / "adapter", tmp_path / "single")]
    assert {name: tensor.shape for name, tensor in files[0].items()} == {name: tensor.shape for name, tensor in files[1].items()}
    assert all(tensor.numel() for tensor in files[0].values())
    assert any(bool(tensor.any()) for name, tensor in files[0].items() if "qast_B" in name)
    assert read_manifest(sharded.folder / "best" / "merged", KIND)["code_plane"] == base_manifest(context.base)["code_plane"]
    # The same steps up to the order of float32 sums; Adam's first steps, of size lr whatever the gradient, magnify it where a gradient is near zero.
    np.testing.assert_allclose(sharded.history["task_loss"], [row["task_loss"] for row in curve], rtol=2e-3)


BAD = {
    "unknown key": (["train.stepz=3"], "did you mean 'steps'?"),
    "unknown space": (["--space", "pqt:quickstrat"], "did you mean 'quickstart'?"),
    "unknown format": (["space.format=[\"nvfp5\"]"], "unknown format 'nvfp5'; did you mean 'nvfp4'?"),
    "rank 0": (["space.rank=[0]"], "rank must be 1 or more"),
    "rank above the blocks": (["space.rank=[99]"], "rank 99 exceeds the 4 scale blocks"),
    "no model": (["train.model=./no/such/model"], "no/such/model"),
    "missing column": (["train.task.answer=intention"], "intention"),
    "label outside the set": (["train.task.labels=[\"disk full\",\"certificate expired\"]"], "label"),
    "too many CPUs": (["scaling.cpus_per_worker=64"], "a trial needs 1 worker(s) of 64 CPU"),
    "a bundle that never comes": (["scaling.cpus_per_worker=64", "scaling.autoscaling=true", "scaling.pending_timeout_s=3"], "no node could hold {'CPU': 64.0} within 3 s; free now:"),
    "nothing to resume": (["--resume"], "no sweep to resume"),
    "not enough good trials possible": (["required_good=9"], "required_good is 9"),
}  # fmt: skip


@pytest.fixture(scope="module")
def refusals(head: LocalHead, tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict]]:
    """Every case of BAD, and the storage that they were to write to."""
    storage = tmp_path_factory.mktemp("bad")
    cases = {}
    for number, (case, (arguments, _)) in enumerate(BAD.items()):
        model = [] if "model" in case else [f"train.model={tiny_model}"]
        cases[case] = [*TINY, *model, "space.rank=[2]", "space.strength=[0.0]", *arguments, f"name=bad{number}", f"storage={storage}"]
    return storage, ask_all(head, cases)


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_with_exit_code_2_and_nothing_left(case: str, refusals: tuple[Path, dict[str, dict]]):
    storage, results = refusals
    result = results[case]
    assert result["code"] == 2, result["output"][-2000:]
    errors = [line for line in result["output"].splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert BAD[case][1] in errors[0]
    assert "Traceback" not in result["output"]
    assert not (storage / f"bad{list(BAD).index(case)}" / "trials.parquet").exists()


def held(head: LocalHead) -> dict[str, float]:
    """CPUs that placement groups or workers hold: resources of the cluster that are not free."""
    ask = "import json, ray; ray.init('auto', log_to_driver=False); print(json.dumps([ray.cluster_resources(), ray.available_resources()]))"
    done = subprocess.run([sys.executable, "-c", ask], env=head.env, capture_output=True, text=True, timeout=120, check=True)
    total, free = json.loads(done.stdout.strip().splitlines()[-1])
    return {name: total[name] - free.get(name, 0.0) for name in total if name == "CPU" and total[name] - free.get(name, 0.0) > 1e-6}


def test_workers_that_find_no_place_end_the_trial_with_the_arithmetic_and_release_what_they_held(head, tiny_model, tmp_path):
    """Field case RAY-07: one worker fits, so the base is prepared; three never do on two CPUs. Ray Train itself would try again for ever."""
    options = ["space.rank=[2]", "space.strength=[0.0]", "scaling.workers=3", "scaling.cpus_per_worker=0.9", "train.batch_size=12"]
    options += ["train.micro_batch_size=4", "scaling.autoscaling=true", "scaling.pending_timeout_s=5", "scaling.concurrent=1"]
    result = run_sweep(head, tmp_path, "pending", *TINY, f"train.model={tiny_model}", *options)
    assert result.code == 1, result.output[-2000:]
    trial = result.trials.iloc[0]
    assert trial["state"] == "error"
    assert "3 worker(s) of {'CPU': 0.9} found no place within 5 s; free now: " in trial["reason"]
    wait_for(lambda: not held(head), "the release of every placement group", 60)


def test_no_ray_at_the_address_is_one_line(head: LocalHead, tmp_path: Path):
    result = run_sweep(head, tmp_path, "nowhere", "--address", "127.0.0.1:1", timeout=180)
    assert result.code == 2
    assert [line for line in result.output.splitlines() if line.startswith("error: 127.0.0.1:1: no Ray cluster answers")]
