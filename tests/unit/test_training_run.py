"""A whole run on a tiny model and the demo task: adapter folder, merge without any difference, cached bases, and bad input in one line."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from prism_ray.adapters.merge import ADAPTER_KIND, SCALE_PLANE_NAME, adapter_layers
from prism_ray.calibrate.quantize import quantize_to_folder
from prism_ray.core.errors import ConfigError, DataError, GridMismatch, ModelError, PrismError, UnknownName
from prism_ray.core.manifest import MANIFEST_NAME, read_manifest
from prism_ray.formats.checkpoint import KIND, load_quantized_model
from prism_ray.formats.policy import QuantPolicy
from prism_ray.formats.spec import FORMATS, FP4_FORMATS
from prism_ray.models.tiny import save_tiny, tiny_llama, tiny_tokenizer
from prism_ray.training import base as base_module
from prism_ray.training.base import base_manifest, prepare_base
from prism_ray.training.config import AdapterConfig, OptimizerConfig, RegularizerConfig, TrainConfig
from prism_ray.training.demo import demo_benchmark, demo_task, write_demo
from prism_ray.training.run import build, evaluate_checkpoint, merge_best, run_local, task_metrics
from prism_ray.training.task import ReferenceConfig, TaskConfig


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("source") / "tiny", tiny_llama(num_layers=1))


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PRISM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def config(model: Path, **options: Any) -> TrainConfig:
    defaults: dict[str, Any] = {
        "task": demo_task(train=16, validation=8, test=10).with_overrides({"max_tokens": 48}),
        "benchmark": demo_benchmark(max_examples=6),
        "adapter": AdapterConfig(rank=2, alpha=4.0),
        "regularizer": RegularizerConfig(strength=0.1, reference=ReferenceConfig(max_examples=3, max_tokens=32), batch=2),
        "optimizer": OptimizerConfig(learning_rate=0.1),
        "steps": 3,
        "batch_size": 4,
        "micro_batch_size": 2,
        "eval_every": 2,
        "dtype": "float32",
    }
    return TrainConfig(model=str(model), **(defaults | options))


@pytest.fixture(scope="module", params=FP4_FORMATS)
def finished(request, source, tmp_path_factory) -> dict[str, Any]:
    """A run of every format, once."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRISM_CACHE", str(folder / "cache"))
        settings = config(source, format=request.param)
        metrics = run_local(settings, folder / "adapter")
        base = prepare_base(str(source), request.param)
    return {"config": settings, "adapter": folder / "adapter", "base": base, "metrics": metrics, "folder": folder}


# --- end to end --------------------------------------------------------------------------------------------------------------------


def test_the_adapter_folder_is_complete(finished):
    folder, settings = finished["adapter"], finished["config"]
    names = {path.name for path in folder.iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", SCALE_PLANE_NAME, "train_config.json", MANIFEST_NAME}
    manifest, base = read_manifest(folder, ADAPTER_KIND), base_manifest(finished["base"])
    assert (manifest["format"], manifest["rank"], manifest["grid"]) == (settings.format, 2, FORMATS[settings.format].grid.name)
    assert (manifest["base_code_plane"], manifest["base_scale_plane"]) == (base["code_plane"], base["scale_plane"])
    assert manifest["progress"]["step"] == 3 and manifest["metrics"]["test_n"] == 10
    assert TrainConfig.load(json.loads((folder / "train_config.json").read_text())) == settings
    written = json.loads((folder / "adapter_config.json").read_text())
    assert (written["peft_type"], written["code_plane"], written["r"]) == ("SCALE_QLORA", base["code_plane"], 2)


def test_the_scale_plane_is_what_the_forward_uses(finished):
    model = PeftModel.from_pretrained(load_quantized_model(finished["base"], dtype=torch.float32), str(finished["adapter"]))
    plane, layers = load_file(finished["adapter"] / SCALE_PLANE_NAME), adapter_layers(model)
    assert plane.keys() == layers.keys() and len(plane) == 7
    assert all(torch.equal(plane[name], layer.scale_bytes("default")) for name, layer in layers.items())
    assert any(not torch.equal(plane[name], layer.base_scales) for name, layer in layers.items()), "training must have moved a scale"


def test_metrics_carry_their_counts_and_a_null(finished):
    metrics = finished["metrics"]
    assert metrics["base_test_n"] == metrics["test_n"] == 10 and metrics["benchmark_examples"] == 6
    assert metrics["test_correct"] == metrics["test_accuracy"] * 10
    assert metrics["benchmark_one_minus_omega"] > metrics["one_minus_omega_null"] >= 0
    assert metrics["delta_ce"] == pytest.approx(metrics["benchmark_ce"] - metrics["benchmark_ce_base"], abs=1e-12)
    assert metrics["delta_ce_se"] > 0 and all(math.isfinite(value) for value in metrics.values())


def test_merging_loses_nothing(finished):
    out = finished["folder"] / "merged"
    measured = merge_best(finished["config"], finished["base"], finished["adapter"], out)
    assert measured["max_abs_dw"] == 0.0 and measured["codes_identical"] is True
    assert 0 < measured["changed_scale_bytes"] <= measured["scale_bytes"]
    for key in ("test_accuracy", "test_correct", "test_n", "test_loss"):
        assert measured[f"merged_{key}"] == measured[f"unmerged_{key}"] == finished["metrics"][key], key
    assert measured["merged_test_loss"] != finished["metrics"]["base_test_loss"]
    assert read_manifest(out, KIND)["code_plane"] == base_manifest(finished["base"])["code_plane"]
    assert evaluate_checkpoint(finished["config"], out)["test_loss"] == measured["merged_test_loss"]


def test_the_run_repeats_to_the_byte(finished, cache):
    again = run_local(finished["config"], finished["folder"] / "again")
    assert again == finished["metrics"]
    for name in ("adapter_model.safetensors", SCALE_PLANE_NAME):
        assert (finished["folder"] / "again" / name).read_bytes() == (finished["adapter"] / name).read_bytes()


def test_plain_scoring_gives_the_packed_numbers(finished):
    """Equal up to rounding: n = 15 * 128 float32 roundings on logits of size about 10, for up to 20 answer tokens."""
    packed = evaluate_checkpoint(finished["config"], finished["base"])
    plain = evaluate_checkpoint(finished["config"].with_overrides({"scoring": "plain"}), finished["base"])
    assert plain["test_n"] == packed["test_n"] == 10
    assert plain["test_loss"] == pytest.approx(packed["test_loss"], abs=2 * 20 * 15 * 128 * 2.0**-24 * 10)


def test_a_diverged_run_says_so_and_writes_no_adapter(source, tmp_path, cache):
    wild = OptimizerConfig(learning_rate=1e20, weight_decay=1e18, max_grad_norm=0.0)
    metrics = run_local(config(source, optimizer=wild, steps=6, eval_every=1), tmp_path / "adapter")
    assert metrics["diverged"] == 1.0
    assert not (tmp_path / "adapter").exists()


# --- bases -------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch) -> list[Path]:
    calls: list[Path] = []
    original = base_module.quantize_to_folder

    def counting(model: Any, tokenizer: Any, policy: Any, folder: Path, **options: Any) -> Any:
        calls.append(folder)
        return original(model, tokenizer, policy, folder, **options)

    monkeypatch.setattr(base_module, "quantize_to_folder", counting)
    return calls


def test_a_base_is_quantized_once_per_format_and_policy(source, cache, counted):
    first = prepare_base(str(source), "nvfp4")
    stamp = (first / MANIFEST_NAME).stat().st_mtime_ns
    assert prepare_base(str(source), "nvfp4") == first and len(counted) == 1
    assert (first / MANIFEST_NAME).stat().st_mtime_ns == stamp
    other = prepare_base(str(source), "mxfp4")
    narrower = prepare_base(str(source), "nvfp4", QuantPolicy(ignore=("lm_head", "*down_proj")))
    assert len({first, other, narrower}) == 3 and len(counted) == 3
    assert base_manifest(first)["code_plane"] != base_manifest(other)["code_plane"]


def test_a_changed_source_gives_another_base(tmp_path, cache, counted):
    folder = save_tiny(tmp_path / "model", tiny_llama(num_layers=1))
    first = prepare_base(str(folder), "nvfp4")
    tiny_llama(seed=5, num_layers=1).save_pretrained(folder)
    second = prepare_base(str(folder), "nvfp4")
    assert first != second and len(counted) == 2
    assert base_manifest(first)["code_plane"] != base_manifest(second)["code_plane"]


def test_trials_that_start_together_quantize_once(source, cache, counted):
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(prepare_base(str(source), "nvfp4"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and len(set(found)) == 1 and len(counted) == 1


def test_a_quantization_that_was_cut_off_is_made_again(source, cache, counted):
    first = prepare_base(str(source), "nvfp4")
    (first / MANIFEST_NAME).unlink()
    assert prepare_base(str(source), "nvfp4") == first
    assert len(counted) == 2 and read_manifest(first, KIND)


def test_a_quantized_model_is_taken_as_it_is(tmp_path, cache, counted):
    folder = tmp_path / "ready"
    quantize_to_folder(tiny_llama(num_layers=1), tiny_tokenizer(), QuantPolicy(format="mxfp4"), folder)
    assert prepare_base(str(folder), "mxfp4") == folder and counted == []
    with pytest.raises(GridMismatch) as caught:
        prepare_base(str(folder), "nvfp4")
    assert "mxfp4" in str(caught.value) and "nvfp4" in str(caught.value) and str(folder) in str(caught.value)


def test_fingerprints_of_a_checkpoint_without_our_manifest(tmp_path):
    folder = tmp_path / "ready"
    quantize_to_folder(tiny_llama(num_layers=1), tiny_tokenizer(), QuantPolicy(), folder)
    ours = base_manifest(folder)
    (folder / MANIFEST_NAME).unlink()
    assert base_manifest(folder) == {"code_plane": ours["code_plane"], "scale_plane": ours["scale_plane"]}


# --- bad input ---------------------------------------------------------------------------------------------------------------------


def refused(error: type[PrismError], settings: TrainConfig, *words: str) -> None:
    with pytest.raises(error) as caught:
        build(settings)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


def test_bad_input_is_one_line_that_names_the_place(source, tmp_path, cache):
    refused(UnknownName, config(source, format="nvfp5"), "nvfp5", "nvfp4")
    refused(ModelError, config(tmp_path / "nowhere"), "nowhere")
    refused(ConfigError, config(source, adapter=AdapterConfig(rank=5)), "rank 5", "4 scale blocks", "q_proj")
    with pytest.raises(ConfigError, match="rank"):
        AdapterConfig(rank=0)
    task = write_demo(tmp_path / "demo", train=16, validation=8, test=8)
    no_validation = TaskConfig(**(task.to_dict() | {"validation": None, "validation_fraction": 0.0}))
    refused(DataError, config(source, task=no_validation), "no validation examples", "validation_fraction")
    refused(DataError, config(source, task=task.with_overrides({"answer": "intention"})), "intention", "train.jsonl")
    (tmp_path / "demo" / "validation.jsonl").write_text("")
    refused(DataError, config(source, task=task), "validation.jsonl")


def test_without_a_test_split_there_is_nothing_to_report(source, cache):
    task = demo_task(train=16, validation=8).with_overrides({"test": None, "max_tokens": 48})
    context = build(config(source, task=task))
    assert task_metrics(context, "test") == {}
    assert task_metrics(context, "validation")["validation_n"] == 8
