"""Merges of the baselines into checkpoint folders: what is written, what the report says of it, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model

from prism_ray.adapters.baselines import PeqaBlockConfig, PeqaConfig, QatLoraConfig
from prism_ray.adapters.baselines.lora import lora_weights
from prism_ray.adapters.baselines.merge import BaselineMerge, baseline_layers, merge_baseline
from prism_ray.adapters.methods import ADAPTER_METHODS, AdapterSettings
from prism_ray.calibrate.quantize import quantize_to_folder
from prism_ray.core.errors import DataError, FingerprintMismatch, FormatError, MergeLoss, ModelError, UnknownName
from prism_ray.core.manifest import read_manifest
from prism_ray.formats.checkpoint import KIND, load_quantized_model, read_quantized
from prism_ray.formats.compressed_tensors import fuse_experts
from prism_ray.formats.fusion import fused_groups
from prism_ray.formats.lint import lint_checkpoint
from prism_ray.formats.modules import planes
from prism_ray.formats.policy import QuantPolicy
from prism_ray.formats.spec import FP4_FORMATS
from prism_ray.models.tiny import tiny_llama, tiny_qwen3_moe, tiny_tokenizer
from prism_ray.quantizers.rtn import rtn
from prism_ray.training.data import Batch, Encoded, collate
from prism_ray.training.posthoc import merge_posthoc

IDS = torch.tensor([[1, 5, 9, 40, 200, 7], [3, 3, 3, 250, 11, 0]])
CONFIGS: dict[str, Any] = {"qat-lora": QatLoraConfig, "peqa": PeqaConfig, "peqa-block": PeqaBlockConfig}
both = pytest.mark.parametrize("name", FP4_FORMATS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    for name, layers in zip(FP4_FORMATS, (2, 1), strict=True):
        quantize_to_folder(tiny_llama(num_layers=layers), tiny_tokenizer(), QuantPolicy(format=name), root / name)
    quantize_to_folder(tiny_qwen3_moe(num_layers=1), tiny_tokenizer(), QuantPolicy(), root / "moe")
    quantize_to_folder(tiny_llama(seed=7), tiny_tokenizer(), QuantPolicy(), root / "other")
    return {path.name: path for path in root.iterdir()}


def adapted(folder: Path, method: str, *, std: float = 0.2, **options: Any) -> Any:
    """An adapter with random parameters: a stand-in for training."""
    torch.manual_seed(0)
    model = load_quantized_model(folder, dtype=torch.float32)
    settings = AdapterSettings(rank=2, alpha=2.0)
    config = CONFIGS[method](**options) if options else ADAPTER_METHODS[method].build(model, settings)
    peft = get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in peft.named_parameters():
            if parameter.requires_grad and "_A" not in key:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return peft


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits


def written(folder: Path) -> dict[str, Any]:
    return fuse_experts(read_quantized(folder)[1])


def require_report(report: BaselineMerge, wanted: dict[str, tuple[torch.Tensor, torch.Tensor]], base: Path, out: Path) -> None:
    """The report against the folders alone: wanted holds (W0, W) by layer."""
    before, after = written(base), written(out)
    off = moved = 0.0
    for name, (start, weight) in wanted.items():
        error = (after[name].dequantize() - weight).double()
        assert report.layers[name].max_abs_dw == float(error.abs().max())
        assert report.layers[name].lost == pytest.approx(float(error.norm() / (weight - start).double().norm()), rel=1e-9)
        off, moved = off + float(error.square().sum()), moved + float((weight - start).double().square().sum())
    assert report.lost == pytest.approx(math.sqrt(off / moved), rel=1e-9)
    assert report.max_abs_dw == max(layer.max_abs_dw for layer in report.layers.values())
    assert report.code_bytes == sum(int((after[name].codes != before[name].codes).sum()) for name in before)
    assert report.scale_bytes == sum(int((after[name].scales != before[name].scales).sum()) for name in before)
    assert report.codes_identical is (report.code_bytes == 0)
    manifest = read_manifest(out, KIND)
    assert (manifest["code_plane"], manifest["scale_plane"]) == (report.code_plane, report.scale_plane)
    assert not lint_checkpoint(out)


@both
@pytest.mark.parametrize("method", CONFIGS)
def test_the_written_folder_is_what_the_report_says(method, name, folders, tmp_path):
    model = adapted(folders[name], method)
    report = merge_baseline(model, folders[name], tmp_path / "out")
    wanted = {
        path: (weight.base(), weight.weight()) for path, layer in baseline_layers(model).items() for weight in layer.adapted("default")
    }
    require_report(report, wanted, folders[name], tmp_path / "out")
    merged = load_quantized_model(tmp_path / "out", dtype=torch.float32)
    if method == "qat-lora":
        assert report.max_abs_dw == 0.0 and report.lost == 0.0 and not report.codes_identical
        assert torch.equal(logits(merged), logits(model))
    else:
        assert report.codes_identical and report.scale_bytes > 0 and 0 < report.lost < 1
        assert not torch.equal(logits(merged), logits(model))
    # In place and on disk a merge writes the same planes.
    model.merge_adapter()
    live = planes(model.get_base_model())
    for path, tensor in written(tmp_path / "out").items():
        assert torch.equal(live[path].codes, tensor.codes) and torch.equal(live[path].scales, tensor.scales)


def test_a_grid_of_octaves_gives_small_row_factors_back(folders, tmp_path):
    """E8M0 rounds factors between 2^-1/2 and 2^1/2 to 1: the merge is the base, and the report says so."""
    model = adapted(folders["mxfp4"], "peqa", std=0.05)
    report = merge_baseline(model, folders["mxfp4"], tmp_path / "out")
    assert report.scale_bytes == 0 and report.returned == 1.0 and report.lost == pytest.approx(1.0, abs=1e-6)
    assert torch.equal(logits(load_quantized_model(tmp_path / "out", dtype=torch.float32)), logits(model.unload()))


@pytest.mark.parametrize("method", CONFIGS)
def test_experts_are_written_under_their_stored_names(method, folders, tmp_path):
    options = {"experts": True} | ({"r": 2} if method == "qat-lora" else {})
    model = adapted(folders["moe"], method, **options)
    report = merge_baseline(model, folders["moe"], tmp_path / "out")
    assert len(report.layers) == 6 and (report.max_abs_dw == 0) is (method == "qat-lora")
    merged = load_quantized_model(tmp_path / "out", dtype=torch.float32)
    if method == "qat-lora":
        assert torch.equal(logits(merged), logits(model))
    model.merge_adapter()
    assert torch.equal(logits(merged), logits(model))


def test_bad_merges_leave_nothing_behind(folders, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(MergeLoss, match="0.001"):
        merge_baseline(adapted(folders["nvfp4"], "peqa"), folders["nvfp4"], out, tolerance=0.001)
    with pytest.raises(FingerprintMismatch, match="q_proj"):
        merge_baseline(adapted(folders["nvfp4"], "peqa"), folders["other"], out)
    broken = adapted(folders["nvfp4"], "peqa")
    with torch.no_grad():
        next(iter(baseline_layers(broken).values())).parameters_of("default")[0][3] = math.nan
    with pytest.raises(FormatError, match="NaN"):
        merge_baseline(broken, folders["nvfp4"], out)
    live = adapted(folders["nvfp4"], "qat-lora")
    live.merge_adapter()
    with pytest.raises(ModelError, match="unmerge"):
        merge_baseline(live, folders["nvfp4"], out)
    with pytest.raises(ModelError, match="nobody"):
        merge_baseline(live, folders["nvfp4"], out, adapter="nobody")
    assert not out.exists()


# --- the naive merge -----------------------------------------------------------------------------------------------------------------


def batches() -> list[Batch]:
    rows = torch.randint(0, 250, (24, 24), generator=torch.Generator().manual_seed(0)).tolist()
    items = [Encoded(row[: 24 - index % 5], 8, str(index)) for index, row in enumerate(rows)]
    return [collate(items[start : start + 8], 283) for start in range(0, 24, 8)]


@both
@pytest.mark.parametrize("method", ["rtn", "mse", "awq", "gptq"])
def test_naive_merges_choose_every_code_again(method, name, folders, tmp_path):
    model = adapted(folders[name], "qlora", std=0.3)
    report = merge_posthoc(model, folders[name], tmp_path / "out", method=method, batches=batches())
    wanted = {path: (base, weight) for path, base, weight in lora_weights(model)}
    if method != "awq":  # whose planes hold folded weights
        require_report(report, wanted, folders[name], tmp_path / "out")
    assert (report.method, report.rule) == ("qlora", method)
    assert 0 < report.lost < 1 and not report.codes_identical and report.scale_bytes > 0
    assert {record["method"] for record in report.records.values()} == {method} and len(report.records) == (14 if name == "nvfp4" else 7)
    merged = logits(load_quantized_model(tmp_path / "out", dtype=torch.float32))
    unmerged = logits(model)
    with model.disable_adapter():
        base = logits(model)
    assert 0 < float((merged - unmerged).norm()) < float((base - unmerged).norm())


def test_rounding_again_is_rtn_of_the_merged_weight_under_shared_tensor_scales(folders, tmp_path):
    model = adapted(folders["nvfp4"], "qlora", std=0.3)
    merge_posthoc(model, folders["nvfp4"], tmp_path / "out")
    weights = {path: weight for path, _, weight in lora_weights(model)}
    found = written(tmp_path / "out")
    for group in fused_groups(weights):
        amax = torch.stack([weights[path].abs().max() for path in group]).max()
        for path in group:
            expected, _ = rtn(weights[path], found[path].format, amax=amax)
            assert torch.equal(found[path].codes, expected.codes) and torch.equal(found[path].scales, expected.scales)
            assert torch.equal(found[path].tensor_scale, expected.tensor_scale)


def test_awq_folds_into_norms_and_measures_unfolded(folders, tmp_path):
    """The written model computes with the weights that the report measured: its error is that of weights, not of factors."""
    model = adapted(folders["nvfp4"], "qlora", std=0.3)
    report = merge_posthoc(model, folders["nvfp4"], tmp_path / "out", method="awq", batches=batches())
    before, after = read_quantized(folders["nvfp4"])[2], read_quantized(tmp_path / "out")[2]
    norms = [name for name in before if "layernorm" in name and not torch.equal(before[name], after[name])]
    assert norms and all(record["alpha"] is not None for record in report.records.values())
    # A weight multiplied by factors of 2 and more would be off by its own size: the loss would be far above 1.
    assert report.lost < 1
    rounded = merge_posthoc(model, folders["nvfp4"], tmp_path / "rtn")
    assert report.max_abs_dw < 4 * rounded.max_abs_dw


def test_gptq_answers_to_the_tasks_rows(folders, tmp_path):
    """Its output error on them, summed over the weights, is below that of rounding to nearest on the same inputs."""
    model = adapted(folders["nvfp4"], "qlora", std=0.3)
    report = merge_posthoc(model, folders["nvfp4"], tmp_path / "out", method="gptq", batches=batches())
    records = list(report.records.values())
    tokens = sum(int(batch.attention_mask.sum()) for batch in batches())
    assert all(record["tokens"] == tokens for record in records)
    assert sum(record["error_after"] for record in records) < 0.9 * sum(record["error_before"] for record in records)


def test_an_untrained_adapter_merges_to_the_base(folders, tmp_path):
    """Up to the tensor scale, which is derived again from a maximum that was rounded: two roundings of 2^-24."""
    model = adapted(folders["nvfp4"], "qlora", std=0.0)
    for method in ("rtn", "mse"):
        report = merge_posthoc(model, folders["nvfp4"], tmp_path / method, method=method)
        largest = max(float(base.abs().max()) for _, base, _ in lora_weights(model))
        assert report.max_abs_dw <= 2.0**-22 * largest


def test_experts_are_quantized_again_by_the_rows_they_were_routed(folders, tmp_path):
    model = adapted(folders["moe"], "qlora", std=0.3)
    for method in ("mse", "gptq"):
        report = merge_posthoc(model, folders["moe"], tmp_path / method, method=method, batches=batches())
        experts = {name: record for name, record in report.records.items() if ".experts." in name}
        assert len(experts) == 8 and len(report.records) == 12 and len(report.layers) == 4
        merged = load_quantized_model(tmp_path / method, dtype=torch.float32)
        assert torch.isfinite(logits(merged)).all()
    routed = sum(record["tokens"] for name, record in experts.items() if "layers.0" in name and "gate_up" in name)
    assert routed == 2 * sum(int(batch.attention_mask.sum()) for batch in batches())


def test_bad_naive_merges_leave_nothing_behind(folders, tmp_path):
    model, out = adapted(folders["nvfp4"], "qlora"), tmp_path / "out"
    with pytest.raises(DataError, match="gptq"):
        merge_posthoc(model, folders["nvfp4"], out, method="gptq")
    with pytest.raises(UnknownName, match="rtn"):
        merge_posthoc(model, folders["nvfp4"], out, method="rtm")
    with pytest.raises(FingerprintMismatch):
        merge_posthoc(model, folders["other"], out)
    with pytest.raises(ModelError, match="LoRA"):
        merge_posthoc(adapted(folders["nvfp4"], "peqa"), folders["nvfp4"], out)
    assert not out.exists()
