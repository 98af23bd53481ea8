"""Every adapter method through the one training loop: folder, counts, codes, merge; and what a config refuses before anything is loaded."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file

from prism_ray.adapters.methods import ADAPTER_METHODS, AdapterSettings, Budget, budget, load_adapter_model, matched, target_shapes
from prism_ray.adapters.scale_qlora.model import trainable_parameters
from prism_ray.core.errors import ConfigError, GridMismatch, ModelError, UnknownName
from prism_ray.core.manifest import read_manifest
from prism_ray.formats.checkpoint import KIND, load_quantized_model
from prism_ray.models.tiny import save_tiny, tiny_llama
from prism_ray.training.base import base_manifest, prepare_base
from prism_ray.training.config import AdapterConfig, OptimizerConfig, TrainConfig
from prism_ray.training.demo import demo_task
from prism_ray.training.run import BASELINE_KIND, build, merge_best, run_local, train

METHODS = tuple(ADAPTER_METHODS)
OTHERS = tuple(method for method in METHODS if method != "scale-qlora")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("source") / "tiny", tiny_llama(num_layers=1))


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRISM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def config(model: Path, method: str, **options: Any) -> TrainConfig:
    adapter = {"method": method, "rank": 2, "alpha": 4.0} | options.pop("adapter", {})
    defaults: dict[str, Any] = {
        "task": demo_task(train=16, validation=8, test=10).with_overrides({"max_tokens": 48}),
        "adapter": AdapterConfig(**adapter),
        "optimizer": OptimizerConfig(learning_rate=0.05),
        "steps": 6,
        "batch_size": 8,
        "micro_batch_size": 4,
        "eval_every": 3,
        "dtype": "float32",
    }
    return TrainConfig(model=str(model), **(defaults | options))


def test_the_configs_names_are_the_registrys():
    assert set(get_args(AdapterConfig.model_fields["method"].annotation)) == set(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_writes_an_adapter_that_merges_as_its_method_does(method, source, tmp_path):
    settings = config(source, method)
    metrics = run_local(settings, tmp_path / "adapter")
    base = prepare_base(str(source), "nvfp4")
    assert all(math.isfinite(value) for value in metrics.values()) and metrics["test_n"] == 10
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    written = json.loads((tmp_path / "adapter" / "train_config.json").read_text())
    assert TrainConfig.load(written) == settings
    if method in OTHERS:
        assert metrics["trainable_parameters"] == sum(tensor.numel() for tensor in saved.values())
        assert metrics["scale_qlora_parameters"] == 2 * sum(o + i // 16 for o, i in shapes(base))
    if not ADAPTER_METHODS[method].scale_plane:
        manifest = read_manifest(tmp_path / "adapter", BASELINE_KIND)
        assert (manifest["method"], manifest["format"], manifest["base_code_plane"]) == (method, "nvfp4", base_manifest(base)["code_plane"])
        assert manifest["progress"]["step"] == 6 and manifest["metrics"]["test_n"] == 10
    measured = merge_best(settings, base, tmp_path / "adapter", tmp_path / "merged", quantizer="gptq")
    assert measured["unmerged_test_loss"] == metrics["test_loss"]
    exact = method in ("scale-qlora", "qat-lora")
    assert (measured["max_abs_dw"] == 0) is exact
    assert (measured["merged_test_loss"] == measured["unmerged_test_loss"]) is exact
    assert measured["codes_identical"] is (method not in ("qlora", "qat-lora"))
    assert read_manifest(tmp_path / "merged", KIND)["code_plane"]
    load_adapter_model(load_quantized_model(base, dtype=torch.float32), tmp_path / "adapter")


def shapes(base: Path) -> list[tuple[int, int]]:
    return [shape[:2] for shape in target_shapes(load_quantized_model(base, dtype=torch.float32), None).values()]


@pytest.mark.parametrize("method", OTHERS)
def test_the_loss_falls_and_codes_stay(method, source):
    context = build(config(source, method, steps=12, eval_every=4, optimizer=OptimizerConfig(learning_rate=0.05, schedule="constant")))
    result = train(context, quiet=True)  # raises should a code byte change
    losses = [row["task_loss"] for row in result.progress.history]
    assert not result.diverged and losses[-1] < losses[0]


# --- matched counts ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 3, 8, 31])
@pytest.mark.parametrize("method", METHODS)
def test_the_matched_rank_has_the_nearest_count(method, rank):
    weights = [(576, 576, 36), (192, 576, 36), (1536, 576, 36), (576, 1536, 96)]
    reference = rank * sum(o + g for o, _, g in weights)
    found = budget(method, weights, rank, match=True)
    assert found.reference == reference
    if not ADAPTER_METHODS[method].ranked:
        assert found == budget(method, weights, rank, match=False) and found.rank == 0
        return
    counts = {r: sum(ADAPTER_METHODS[method].count(weight, r) for weight in weights) for r in range(1, 200)}
    best = min(counts, key=lambda r: (abs(counts[r] - reference), r))
    assert (found.rank, found.parameters) == (best, counts[best])
    assert budget(method, weights, rank, match=False) == Budget(rank=rank, parameters=counts[rank], reference=reference)


def test_alpha_over_rank_survives_matching(source):
    settings = AdapterSettings(rank=8, alpha=16.0)
    assert matched(settings, Budget(rank=4, parameters=1, reference=1)) == AdapterSettings(rank=4, alpha=8.0)
    assert matched(settings, Budget(rank=0, parameters=1, reference=1)) == settings
    adapter = {"rank": 4, "alpha": 4.0, "match_parameters": True}
    for method in ("qat-lora", "qlora"):
        context = build(config(source, method, adapter=adapter))
        chosen = context.model.peft_config["default"]
        assert context.budget is not None and chosen.r == context.budget.rank == 2
        assert getattr(chosen, "lora_alpha", None) == 2.0 or chosen.alpha == 2.0
        assert sum(p.numel() for p in trainable_parameters(context.model).values()) == context.budget.parameters
        assert abs(context.budget.parameters - context.budget.reference) <= sum(o + i for o, i in shapes(context.base)) / 2


# --- refusals ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["int4-g32", "int3-g64"])
def test_integer_formats_are_refused_by_the_config_itself(method, name, tmp_path):
    """The model does not exist: nothing is looked for before the refusal."""
    if method == "qlora":
        assert config(tmp_path / "nowhere", method, format=name).format == name
        return
    with pytest.raises(GridMismatch) as caught:
        config(tmp_path / "nowhere", method, format=name)
    message = str(caught.value)
    assert "\n" not in message and method in message and name in message and "nvfp4" in message


def test_lora_trains_on_integers(source):
    context = build(config(source, "qlora", format="int4-g32", steps=2, eval_every=2))
    assert not train(context, quiet=True).diverged


def test_other_mistakes_are_one_line(source, tmp_path):
    with pytest.raises(ConfigError, match="method"):
        AdapterConfig(method="lora")
    with pytest.raises(UnknownName, match="nvfp5"):
        build(config(source, "peqa", format="nvfp5"))
    with pytest.raises(ModelError, match="target_modules"):
        build(config(source, "peqa", adapter={"target_modules": ("query",)}))
    with pytest.raises(ConfigError, match="rank 65"):
        build(config(source, "qat-lora", adapter={"rank": 65}))
