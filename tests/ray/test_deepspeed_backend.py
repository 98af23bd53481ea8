"""DeepSpeedBackend against LocalBackend: ZeRO 0 to 3 with one and two processes on gloo give one adapter, one curve, one checkpoint (RAY-01, RAY-02, ADP-05).

Two process groups are started, one of two workers and one of one, each running all its jobs; the tests read what they wrote. A job is a few steps of
a tiny model with accumulation (micro batches), clipping, a shape penalty whose rows lie on both workers, and validation, test and benchmark sets
that give the workers unequal numbers of batches.

Tolerance. Workers and stages add the same float32 numbers in other orders: a running error bound of n u, u = 2^-24, n = 4096 roundings (a gradient
sums over 250 tokens of the batch, and lies behind 28 products one after the other of at most 128 terms). Adam divides by sqrt(v) + eps; with its usual eps of 1e-8 an
element whose gradient is nearly 0 by cancellation would turn that noise into a difference of the size of the learning rate (seen: 4e-3). So these runs
take EPS = 0.02: then an error d of a gradient moves an update by at most 2 lr d / EPS. The rounding of scales to their grid is the same on both sides
unless one lies within 1e-6 of a border. With G the largest gradient: d <= n u G.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("deepspeed")

from prism_ray.calibrate.quantize import quantize_to_folder
from prism_ray.core.errors import EnvironmentFault
from prism_ray.core.manifest import read_manifest
from prism_ray.formats.policy import QuantPolicy
from prism_ray.models.tiny import tiny_llama, tiny_qwen3_moe, tiny_tokenizer
from prism_ray.training.backends import LocalBackend
from prism_ray.training.base import base_manifest
from prism_ray.training.checkpoint import KIND, latest_complete
from prism_ray.training.config import AdapterConfig, OptimizerConfig, RegularizerConfig, TrainConfig
from prism_ray.training.deepspeed_backend import check_toolchain
from prism_ray.training.loop import Trainer
from prism_ray.training.run import RunContext, build, final_metrics
from prism_ray.training.task import BenchmarkConfig, ReferenceConfig, TaskConfig

pytestmark = pytest.mark.ray

WORKER = Path(__file__).with_name("_deepspeed_worker.py")
EPS, RATE, STEPS = 0.02, 1.0, 3
LIMIT_S = 400  # workers that wait for each other for ever; a run takes a tenth of it
ROUNDING = 4096 * 2.0**-24
WORDS = ("red", "green", "blue")
TEXTS = ("the rain is in the town", "one two three", "a cat on a mat is not a rat on a hat", "ten men")
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one-row": ("base", {"batch": 1}),
    "replay": ("base", {"kind": "replay"}),
    "observed": ("base", {"strength": 0.0, "observe_every": 2}),
    "moe": ("moe", {}),
    "odd": ("odd", {}),
}


# --- jobs --------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Bases and data files."""
    folder = tmp_path_factory.mktemp("deepspeed")
    quantize_to_folder(tiny_llama(), tiny_tokenizer(), QuantPolicy(), folder / "base")
    # 96 and 160 columns give rows of 3 and 5 blocks: with rank 1 two workers cannot part A evenly.
    odd = tiny_llama(hidden_size=96, intermediate_size=160, num_layers=1)
    quantize_to_folder(odd, tiny_tokenizer(), QuantPolicy(format="mxfp4"), folder / "odd")
    quantize_to_folder(tiny_qwen3_moe(num_layers=1), tiny_tokenizer(), QuantPolicy(), folder / "moe")
    for split, count, stride in (("train", 24, 1), ("validation", 7, 2), ("test", 5, 5)):
        rows = [
            {"t": f"{i * stride % 7} {WORDS[i * stride % 3] * (i % 3 + 1)} {split} {i}", "a": WORDS[i * stride % 3]} for i in range(count)
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    return folder


def config(root: Path, *, base: str = "base", **options: Any) -> TrainConfig:
    regularizer: dict[str, Any] = {"strength": 0.3, "batch": 3, "reference": ReferenceConfig(location=str(root / "texts.jsonl"))}
    task = {split: str(root / f"{split}.jsonl") for split in ("train", "validation", "test")}
    defaults: dict[str, Any] = {
        "model": str(root / base),
        "format": "mxfp4" if base == "odd" else "nvfp4",
        "task": TaskConfig(name="colours", prompt="say {t}:", answer="a", labels=WORDS, **task),
        "benchmark": BenchmarkConfig(location=str(root / "texts.jsonl")),
        "adapter": AdapterConfig(rank=1 if base == "odd" else 2, alpha=4.0),
        "regularizer": RegularizerConfig(**(regularizer | options.pop("regularizer", {}))),
        "optimizer": OptimizerConfig(learning_rate=RATE, warmup_steps=0, schedule="constant", max_grad_norm=0.3),
        "steps": STEPS,
        "batch_size": 8,
        "micro_batch_size": 2,
        "eval_every": 2,
        "eval_batch_tokens": 128,
        "dtype": "float32",
        "backend": "deepspeed",
    }
    return TrainConfig(**(defaults | options))


def launch(root: Path, world: int, jobs: list[dict[str, Any]]) -> Path:
    """Run jobs on `world` processes over 127.0.0.1; returns their folder. A worker that fails ends all of them."""
    out = root / f"world-{world}"
    out.mkdir()
    listed = [{**job, "config": job["config"].to_dict(), "resume": job.get("resume") and str(job["resume"])} for job in jobs]
    (out / "jobs.json").write_text(json.dumps({"out": str(out), "eps": EPS, "jobs": listed}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    workers = []
    for rank in range(world):
        log = (out / f"log-{rank}.txt").open("w")
        environment = (
            os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        )
        command = [sys.executable, str(WORKER), str(out / "jobs.json")]
        workers.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        log.close()
    deadline = time.monotonic() + LIMIT_S
    try:
        while any(worker.poll() is None for worker in workers) and not any(worker.poll() for worker in workers):
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    if any(worker.returncode for worker in workers):
        logs = "\n".join((out / f"log-{rank}.txt").read_text()[-3000:] for rank in range(world))
        pytest.fail(f"of {world} workers one failed, or they did not end in {LIMIT_S} s:\n{logs}")
    return out


@pytest.fixture(scope="module")
def two(root) -> Path:
    jobs: list[dict[str, Any]] = [{"name": f"zero{stage}", "config": config(root, zero_stage=stage)} for stage in (0, 2, 3)]
    # A reference batch of one leaves the second worker without a row.
    jobs.append({"name": "one-row", "config": config(root, zero_stage=3, regularizer=VARIANTS["one-row"][1])})
    # Without strength the reference set is run in some steps only, so that passes differ from step to step.
    jobs.append({"name": "observed", "config": config(root, zero_stage=3, regularizer=VARIANTS["observed"][1])})
    # Frozen experts, whose codes are sharded too and read one by one.
    jobs.append({"name": "moe", "config": config(root, base="moe", zero_stage=3)})
    jobs.append({"name": "replay", "config": config(root, zero_stage=2, regularizer=VARIANTS["replay"][1])})
    jobs.append({"name": "odd", "config": config(root, base="odd", zero_stage=3)})
    resume = root / "world-2" / "zero3" / "checkpoint-2"
    jobs += [{"name": f"3-to-{stage}", "config": config(root, zero_stage=stage), "resume": resume} for stage in (2, 3)]
    return launch(root, 2, jobs)


@pytest.fixture(scope="module")
def one(root, two) -> Path:
    jobs: list[dict[str, Any]] = [{"name": f"zero{stage}", "config": config(root, zero_stage=stage)} for stage in (0, 1, 2, 3)]
    resume = two / "zero3" / "checkpoint-2"
    jobs += [{"name": f"3-to-{stage}", "config": config(root, zero_stage=stage), "resume": resume} for stage in (1, 2, 3)]
    return launch(root, 1, jobs)


class Local:
    """Curve, metrics and end state of a run of LocalBackend."""

    def __init__(self, settings: TrainConfig, resume: Path | None = None):
        context: RunContext = build(settings.with_overrides({"backend": "local"}))
        for group in context.backend.optimizer.param_groups:  # type: ignore[attr-defined]
            group["eps"] = EPS
        assert isinstance(context.backend, LocalBackend)
        self.curve: list[dict[str, Any]] = []
        report = lambda metrics, folder: self.curve.append(metrics)  # noqa: E731
        self.result = Trainer(settings, context.backend, context.data, report=report, resume=resume, quiet=True).run()
        self.metrics = final_metrics(context)
        self.state = {f"{key}:{name}": value for name, entry in context.backend.export_state().items() for key, value in entry.items()}
        squares = [value.max() / (1 - 0.99**STEPS) for key, value in self.state.items() if key.startswith("exp_avg_sq:")]
        self.gradient = math.sqrt(float(max(squares)))


@pytest.fixture(scope="module")
def local(root) -> Local:
    return Local(config(root))


def close(state: dict[str, torch.Tensor], wanted: Local) -> None:
    """See the module docstring. Second moments: d(g^2) = 2 g d."""
    d = ROUNDING * wanted.gradient
    allowed = {"value": STEPS * RATE * 2 * d / EPS, "exp_avg": d, "exp_avg_sq": 2 * wanted.gradient * d}
    assert state.keys() == wanted.state.keys()
    for name, value in wanted.state.items():
        assert (state[name] - value).abs().max() <= allowed[name.partition(":")[0]], name
    # A factor of two, a lost worker or a mean in place of a sum moves values by shares of what training moved.
    largest = max(float(value.abs().max()) for name, value in wanted.state.items() if name.startswith("value:") and "qast_B" in name)
    assert largest > 20 * allowed["value"]


def curve_close(found: list[dict[str, float]], wanted: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    for row, expected in zip(found, wanted, strict=True):
        for key in ("loss", "task_loss", "validation_loss", "grad_norm", "learning_rate"):
            if key in expected:
                # Each update adds its share: factors that differ by rounding may put a corrected scale that lies on a boundary on its other side.
                assert row[key] == pytest.approx(expected[key], rel=ROUNDING * max(1.0, row["step"])), (row["step"], key)
        # 1 - Omega is a difference of numbers of size 1; its error is that of the features times its own root.
        drift = expected["one_minus_omega"]
        assert math.isnan(row["one_minus_omega"]) == math.isnan(drift)
        if math.isnan(drift):
            continue
        assert row["one_minus_omega"] == pytest.approx(drift, abs=2 * ROUNDING * math.sqrt(drift) + ROUNDING**2)


def read(folder: Path, rank: int = 0) -> dict[str, Any]:
    return json.loads((folder / f"rank-{rank}.json").read_text())


def names(out: Path) -> list[str]:
    return sorted(path.parent.name for path in out.glob("*/rank-0.json"))


# --- equal to the local back end ---------------------------------------------------------------------------------------------------


def test_the_run_to_compare_with_exercises_what_it_should(local):
    """Otherwise the comparisons below would hold for a model that stands still: clipping acts, scales move, the drift has a gradient."""
    assert all(row["grad_norm"] > 0.3 for row in local.curve)
    assert local.curve[-1]["one_minus_omega"] > 1e-4
    assert local.curve[-1]["loss"] != local.curve[-1]["task_loss"]
    assert local.metrics["benchmark_one_minus_omega"] > 1e3 * local.metrics["one_minus_omega_null"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_process(one, local, stage):
    close(load_file(one / f"zero{stage}" / "state.safetensors"), local)
    curve_close(read(one / f"zero{stage}")["curve"], local.curve)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_processes(two, local, stage):
    close(load_file(two / f"zero{stage}" / "state.safetensors"), local)
    for rank in (0, 1):
        curve_close(read(two / f"zero{stage}", rank)["curve"], local.curve)


@pytest.mark.parametrize("name", list(VARIANTS))
def test_other_objectives_and_models_on_two_processes(root, two, name):
    """A worker without a reference row, the replay baseline, a drift that is only observed, sparse experts, shapes that do not divide."""
    base, options = VARIANTS[name]
    wanted = Local(config(root, base=base, regularizer=options))
    close(load_file(two / name / "state.safetensors"), wanted)
    curve_close(read(two / name)["curve"], wanted.curve)


def test_whole_batches_give_what_micro_batches_give(root, local):
    """Accumulation on the local side, whose result the engines above were compared with."""
    whole = Local(config(root, micro_batch_size=8))
    close(whole.state, local)


def test_uneven_evaluation_counts_every_example_once(two, one, local):
    """7 validation, 5 test and 4 benchmark examples in batches of at most 128 tokens: the workers get unequal numbers of batches, and none waits for ever."""
    for folder in (two / "zero3", two / "zero2", one / "zero3"):
        metrics = read(folder)["metrics"]
        assert (metrics["test_n"], metrics["benchmark_examples"]) == (5, 4)
        assert metrics["benchmark_tokens"] == local.metrics["benchmark_tokens"]
        assert metrics["test_loss"] == pytest.approx(local.metrics["test_loss"], rel=ROUNDING)
        assert metrics["delta_ce"] == pytest.approx(local.metrics["delta_ce"], abs=ROUNDING * metrics["benchmark_ce"])
        # What the adapter off gives, under ZeRO-3 too: the base's loss, and a null that is rounding only.
        assert metrics["benchmark_ce_base"] == pytest.approx(local.metrics["benchmark_ce_base"], rel=ROUNDING)
        assert metrics["one_minus_omega_null"] <= ROUNDING**2


def test_all_workers_read_the_same_metrics(two):
    for name in names(two):
        first, second = (read(two / name, rank) for rank in (0, 1))
        assert first["metrics"] == second["metrics"], name
        clean = [[{key: row[key] for key in row if key != "tokens_per_second"} for row in found["curve"]] for found in (first, second)]
        assert str(clean[0]) == str(clean[1]), name


# --- state, checkpoints, adapters --------------------------------------------------------------------------------------------------


def test_export_and_import_round_trip_on_every_stage(one, two):
    """Also for tensors that two workers cannot part evenly (`odd`); and a fresh engine can be exported at all."""
    for out, ranks in ((one, 1), (two, 2)):
        for folder in (out / name for name in names(out)):
            for rank in range(ranks):
                found = read(folder, rank)
                assert found["round_trip"] == {"changed": True, "back": True, "step": True}, folder
                state = load_file(folder / "state.safetensors")
                assert found["fresh_export"] == {name: list(state[f"value:{name}"].shape) for name in found["trainable"]}, folder
    assert len(names(two)) == 10 and len(names(one)) == 7


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_workers_of_stage_3_resume_as_one_of_another_stage(one, local, stage):
    found = read(one / f"3-to-{stage}")
    assert found["resumed_at"] == [2]
    curve_close(found["curve"], local.curve[2:])
    close(load_file(one / f"3-to-{stage}" / "state.safetensors"), local)


@pytest.mark.parametrize("stage", [2, 3])
def test_two_workers_resume_as_two(two, local, stage):
    found = read(two / f"3-to-{stage}")
    assert found["resumed_at"] == [2]
    curve_close(found["curve"], local.curve[2:])
    close(load_file(two / f"3-to-{stage}" / "state.safetensors"), local)


def test_two_workers_of_stage_3_resume_without_deepspeed(root, two, local):
    resume = latest_complete([two / "zero3" / "checkpoint-2"])
    assert resume is not None
    found = Local(config(root), resume)
    curve_close(found.curve, local.curve[2:])
    close(found.state, local)
    assert found.result.progress.resumed_at == [2]


def test_a_checkpoint_of_two_workers_is_complete_and_skipped_when_a_file_is_missing(two, tmp_path):
    copies = [Path(shutil.copytree(two / "zero3" / f"checkpoint-{step}", tmp_path / str(step))) for step in (2, 3)]
    assert latest_complete(copies) == copies[1] and read_manifest(copies[1], KIND)["step"] == 3
    (copies[1] / "trainer.safetensors").unlink()
    assert latest_complete(copies) == copies[0]


def test_the_saved_adapter_is_whole_under_stage_3(one, two, local):
    wanted = {name.removeprefix("value:"): value for name, value in local.state.items() if name.startswith("value:")}
    shapes = {key.removeprefix("model.").replace(".default", ".weight"): list(value.shape) for key, value in wanted.items()}
    for folder in (two / "zero3" / "adapter", two / "zero3" / "checkpoint-3", one / "zero3" / "adapter", one / "zero0" / "adapter"):
        saved = load_file(folder / "adapter_model.safetensors")
        assert len(saved) == 28 and all(value.numel() for value in saved.values())
        single = load_file(one / "zero0" / "adapter" / "adapter_model.safetensors")
        assert {name: value.shape for name, value in saved.items()} == {name: value.shape for name, value in single.items()}
    assert sorted(map(tuple, shapes.values())) == sorted(tuple(value.shape) for value in saved.values())


# --- codes -------------------------------------------------------------------------------------------------------------------------


def test_two_workers_of_stage_3_hold_half_of_the_codes_each(one, two):
    """4.5 bits a weight, of which the codes are 4: 2 layers of (64 * 64 * 2 + 32 * 64 * 2 + 3 * 128 * 64) weights in half a byte each."""
    full = 2 * (64 * 64 * 2 + 32 * 64 * 2 + 3 * 128 * 64) // 2
    for stage in (0, 1, 2, 3):
        assert read(one / f"zero{stage}")["code_bytes"] == full
    held = [read(two / "zero3", rank)["code_bytes"] for rank in (0, 1)]
    assert held == [full // 2, full // 2]
    assert [read(two / f"zero{stage}", rank)["code_bytes"] for stage in (0, 2) for rank in (0, 1)] == [full] * 4


def test_code_hash_is_unchanged_and_the_same_on_every_stage(root, one, two):
    for out, ranks in ((one, 1), (two, 2)):
        for name in names(out):
            base = base_manifest(root / (name if name in ("odd", "moe") else "base"))["code_plane"]
            for rank in range(ranks):
                assert read(out / name, rank)["code_hash"] == [base, base], (name, rank)


def test_only_factors_have_optimizer_state_and_workers_share_it(one, two, local):
    total = sum(value.numel() for name, value in local.state.items() if name.startswith("value:"))
    for folder in (one / "zero0", one / "zero2", one / "zero3", two / "zero0"):
        assert read(folder)["optimizer_numel"] == total
        assert all(".qast_A." in name or ".qast_B." in name for name in read(folder)["trainable"])
    for stage in (2, 3):
        held = [read(two / f"zero{stage}", rank)["optimizer_numel"] for rank in (0, 1)]
        # At most one element of padding per tensor.
        assert total <= sum(held) <= total + 28 and max(held) - min(held) <= 28


# --- the toolchain -----------------------------------------------------------------------------------------------------------------


def test_no_compiler_is_one_line_before_deepspeed_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(EnvironmentFault) as caught:
        check_toolchain("cpu")
    message = str(caught.value)
    assert "no C++ compiler" in message and "g++" in message and "backend=local" in message and "\n" not in message
    monkeypatch.setenv("CXX", str(tmp_path / "absent"))
    with pytest.raises(EnvironmentFault):
        check_toolchain("cpu")
    check_toolchain("cuda")
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    check_toolchain("cpu")
