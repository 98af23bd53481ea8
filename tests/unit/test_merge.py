"""prism_ray.adapters.merge, over every format: max |dW| is 0.0 on the written files, codes verbatim, logits equal, refusals write nothing (ADP-01)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from prism_ray.adapters import merge
from prism_ray.adapters.merge import ADAPTER_KIND, SCALE_PLANE_NAME, adapter_layers, merge_to_folder, write_scale_plane
from prism_ray.adapters.qast import corrected_scales
from prism_ray.adapters.scale_qlora import ScaleQLoraConfig, ScaleQLoraLinear
from prism_ray.calibrate.quantize import quantize_to_folder
from prism_ray.core.errors import FingerprintMismatch, FormatError, GridMismatch, MergeLoss, ModelError
from prism_ray.core.manifest import read_manifest, verify_file
from prism_ray.formats import safetensors_io
from prism_ray.formats.checkpoint import KIND, load_quantized_model, read_quantized
from prism_ray.formats.modules import planes, set_code_storage
from prism_ray.formats.policy import QuantPolicy
from prism_ray.formats.spec import FP4_FORMATS
from prism_ray.models.tiny import tiny_llama, tiny_qwen3_moe, tiny_tokenizer

IDS = torch.tensor([[1, 5, 9, 40, 200, 7], [3, 3, 3, 250, 11, 0]])
BUILD = {"llama": tiny_llama, "moe": tiny_qwen3_moe}


@pytest.fixture(scope="module", params=[(name, kind) for name in FP4_FORMATS for kind in BUILD], ids="-".join)
def base(request, tmp_path_factory) -> Path:
    name, kind = request.param
    folder = tmp_path_factory.mktemp("base") / "model"
    quantize_to_folder(BUILD[kind](), tiny_tokenizer(), QuantPolicy(format=name), folder, source="tiny")
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    quantize_to_folder(tiny_llama(), tiny_tokenizer(), QuantPolicy(), folder)
    return folder


def adapted(folder: Path, seed: int = 0, adapter: str = "default", dtype=torch.float32, **options) -> PeftModel:
    """A loaded checkpoint under an adapter that moves a good share of its scales."""
    torch.manual_seed(seed)  # A is drawn from the global generator
    model = get_peft_model(load_quantized_model(folder, dtype=dtype), ScaleQLoraConfig(r=2, alpha=2.0, **options), adapter_name=adapter)
    train(model, adapter, seed)
    return model.eval()


def train(model, adapter: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in adapter_layers(model, adapter).values():
            layer.qast_B[adapter].copy_(torch.randn(layer.qast_B[adapter].shape, generator=generator) * 0.5)


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(input_ids=IDS).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_merged_checkpoint_is_the_unmerged_model_to_the_bit(base, tmp_path, dtype):
    model = adapted(base, dtype=dtype)
    report = merge_to_folder(model, base, tmp_path / "merged")
    assert report.max_abs_dw == 0.0 and report.codes_identical
    assert all(layer.max_abs_dw == 0.0 and layer.lost_at_merge == 0.0 for layer in report.layers.values())
    merged = load_quantized_model(tmp_path / "merged", dtype=dtype)
    assert torch.equal(logits(merged), logits(model))
    assert not torch.equal(logits(merged), logits(load_quantized_model(base, dtype=dtype)))


def test_max_abs_dw_measured_here_from_the_written_files(base, tmp_path):
    model = adapted(base)
    merge_to_folder(model, base, tmp_path / "merged")
    _, written, _ = read_quantized(tmp_path / "merged")
    _, original, _ = read_quantized(base)
    layers = adapter_layers(model)
    assert layers and all(name in written for name in layers)
    for name, tensor in written.items():
        assert torch.equal(tensor.codes, original[name].codes) and torch.equal(tensor.tensor_scale, original[name].tensor_scale)
        if name in layers:
            # The forward's own weight, by sending the unit vectors through it.
            with torch.no_grad():
                forward = layers[name](torch.eye(layers[name].in_features)).T
            assert torch.equal(tensor.dequantize(), forward)
        else:
            assert torch.equal(tensor.scales, original[name].scales)


def test_only_scale_tensors_change_and_every_other_file_is_copied(base, tmp_path):
    report = merge_to_folder(adapted(base), base, tmp_path / "merged")
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8))}
    assert set(before) == set(after) and all(before[name].dtype == after[name].dtype for name in before)
    assert changed == {f"{name}.weight_scale" for name, layer in report.layers.items() if layer.changed}
    assert changed
    with safe_open(tmp_path / "merged" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    names = {path.name for path in base.iterdir()}
    assert {path.name for path in (tmp_path / "merged").iterdir()} == names and "tokenizer.json" in names
    for name in names - {"model.safetensors", "manifest.json"}:
        assert (tmp_path / "merged" / name).read_bytes() == (base / name).read_bytes()


def test_the_report_and_the_manifest_say_what_happened(base, tmp_path):
    model = adapted(base)
    report = merge_to_folder(model, base, tmp_path / "merged")
    spec, original, _ = read_quantized(base)
    for name, layer in adapter_layers(model).items():
        wanted, entry = layer.scale_bytes("default"), report.layers[name]
        assert entry.blocks == wanted.numel()
        assert entry.changed == int((wanted != original[name].scales).sum())
        raw = corrected_scales(original[name].scales, layer.qast_A["default"], layer.qast_B["default"], 1.0, spec)
        outside = ((raw > spec.grid.largest) | (raw < spec.grid.smallest)) & (spec.grid.decode(original[name].scales) > 0)
        assert entry.clamped == int(outside.sum())
    assert report.changed == sum(layer.changed for layer in report.layers.values())
    assert report.blocks == sum(layer.blocks for layer in report.layers.values())
    assert report.changed > 0 and sum(layer.clamped for layer in report.layers.values()) > 0

    base_manifest, manifest = read_manifest(base, KIND), read_manifest(tmp_path / "merged", KIND)
    assert manifest["code_plane"] == report.code_plane == base_manifest["code_plane"]
    assert manifest["scale_plane"] == report.scale_plane != base_manifest["scale_plane"]
    assert manifest["base_scale_plane"] == base_manifest["scale_plane"]
    assert manifest["merge"] == json.loads(json.dumps(report.to_dict()))
    assert (manifest["merged_adapter"], manifest["format"]) == ("default", spec.name)
    # The rounding rule of the base is kept: re-reading a merged model must not guess it (FMT-03).
    assert all(manifest[key] == base_manifest[key] for key in ("scale_rule", "packing", "method", "kept"))


def test_a_merge_of_an_untrained_adapter_is_the_base(base, tmp_path):
    model = get_peft_model(load_quantized_model(base, dtype=torch.float32), ScaleQLoraConfig(r=2))
    report = merge_to_folder(model, base, tmp_path / "merged")
    assert (report.changed, report.max_abs_dw) == (0, 0.0)
    assert (tmp_path / "merged" / "model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()


def test_merging_the_saved_and_loaded_adapter_gives_the_same_bytes(base, tmp_path):
    model = adapted(base)
    model.save_pretrained(tmp_path / "adapter")
    merge_to_folder(model, base, tmp_path / "first")
    loaded = PeftModel.from_pretrained(load_quantized_model(base), tmp_path / "adapter")  # in bfloat16, frozen
    merge_to_folder(loaded, base, tmp_path / "second")
    assert (tmp_path / "first" / "model.safetensors").read_bytes() == (tmp_path / "second" / "model.safetensors").read_bytes()


def test_the_named_adapter_is_merged_whichever_is_active_merged_or_disabled(llama, tmp_path):
    model = adapted(llama, seed=1)
    model.add_adapter("other", ScaleQLoraConfig(r=1, alpha=4.0))
    train(model, "other", seed=2)
    merge_to_folder(model, llama, tmp_path / "default")
    merge_to_folder(model, llama, tmp_path / "other", adapter="other")
    read = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in ("default", "other")}
    assert read["default"] != read["other"]
    model.set_adapter("other")
    merge_to_folder(model, llama, tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == read["default"]
    model.merge_adapter(["other"])
    for name in ("default", "other"):
        merge_to_folder(model, llama, tmp_path / "again", adapter=name, replace=True)
        assert (tmp_path / "again" / "model.safetensors").read_bytes() == read[name]
    model.unmerge_adapter()
    set_code_storage(model, "parameter")
    with model.disable_adapter():
        merge_to_folder(model, llama, tmp_path / "again", adapter="other", replace=True)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == read["other"]


def test_every_shard_is_rewritten(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_io, "SHARD_BYTES", 60_000)
    quantize_to_folder(tiny_llama(), tiny_tokenizer(), QuantPolicy(), tmp_path / "base")
    assert len(list((tmp_path / "base").glob("model-*.safetensors"))) > 1
    model = adapted(tmp_path / "base")
    report = merge_to_folder(model, tmp_path / "base", tmp_path / "merged")
    assert report.max_abs_dw == 0.0 and all(layer.changed for layer in report.layers.values())
    assert torch.equal(logits(load_quantized_model(tmp_path / "merged", dtype=torch.float32)), logits(model))


def test_a_merged_checkpoint_is_a_base_again(llama, tmp_path):
    merge_to_folder(adapted(llama), llama, tmp_path / "once")
    model = adapted(tmp_path / "once", seed=5)
    report = merge_to_folder(model, tmp_path / "once", tmp_path / "twice")
    assert report.max_abs_dw == 0.0
    manifest = read_manifest(tmp_path / "twice", KIND)
    assert manifest["base_scale_plane"] == read_manifest(tmp_path / "once", KIND)["scale_plane"]


def empty(folder: Path) -> bool:
    return not list(folder.iterdir())


@pytest.fixture
def out(tmp_path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_factors_are_refused_and_nothing_is_written(base, out, bad):
    model = adapted(base)
    name, layer = list(adapter_layers(model).items())[-1]
    with torch.no_grad():
        layer.qast_A["default"][1, 0] = bad
    with pytest.raises(FormatError, match=f"{name}: adapter factors hold NaN or infinity"):
        merge_to_folder(model, base, out / "merged")
    assert empty(out)


def test_another_code_plane_is_refused(llama, out, tmp_path):
    quantize_to_folder(tiny_llama(seed=1), tiny_tokenizer(), QuantPolicy(), tmp_path / "other")
    with pytest.raises(FingerprintMismatch, match=r"layers\.\d\..*: codes of the model and of the checkpoint differ"):
        merge_to_folder(adapted(llama), tmp_path / "other", out / "merged")
    assert empty(out)


def test_another_scale_plane_over_the_same_codes_is_refused(llama, out, tmp_path):
    """A merged checkpoint has the base's codes: merging the adapter into it would replace scales it was never trained on."""
    merge_to_folder(adapted(llama, seed=3), llama, tmp_path / "merged")
    with pytest.raises(FingerprintMismatch, match="scales of the model and of the checkpoint differ"):
        merge_to_folder(adapted(llama), tmp_path / "merged", out / "merged")
    assert empty(out)


def test_a_difference_in_a_layer_without_adapter_is_refused_too(llama, out, tmp_path):
    model = adapted(llama, target_modules=["q_proj"])
    other = shutil.copytree(llama, tmp_path / "other")
    (other / "manifest.json").unlink()
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_packed"][0, 0] ^= 1
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(FingerprintMismatch, match=r"layers\.0\.mlp\.up_proj: codes of the model and of the checkpoint differ"):
        merge_to_folder(model, other, out / "merged")
    assert empty(out)


def test_experts_of_another_base_are_refused(out, tmp_path):
    for seed in (0, 1):
        quantize_to_folder(tiny_qwen3_moe(seed), tiny_tokenizer(), QuantPolicy(), tmp_path / str(seed))
    model = adapted(tmp_path / "0")
    mixed = shutil.copytree(tmp_path / "0", tmp_path / "mixed")
    (mixed / "manifest.json").unlink()
    tensors, others = load_file(mixed / "model.safetensors"), load_file(tmp_path / "1" / "model.safetensors")
    save_file({name: others[name] if ".experts.2." in name else value for name, value in tensors.items()}, mixed / "model.safetensors")
    with pytest.raises(FingerprintMismatch, match=r"experts\.\w+: codes of the model and of the checkpoint differ"):
        merge_to_folder(model, mixed, out / "merged")
    assert empty(out)


def test_another_grid_is_refused(llama, out, tmp_path):
    quantize_to_folder(tiny_llama(), tiny_tokenizer(), QuantPolicy(format="mxfp4"), tmp_path / "mx")
    with pytest.raises(GridMismatch, match="adapter was trained on grid e4m3, the checkpoint has e8m0 scales; train on this format"):
        merge_to_folder(adapted(llama), tmp_path / "mx", out / "merged")
    assert empty(out)


def test_an_adapter_that_is_not_there_is_named(llama, out):
    with pytest.raises(ModelError, match="holds no Scale-QLoRA adapter called 'french'"):
        merge_to_folder(adapted(llama), llama, out / "merged", adapter="french")
    with pytest.raises(ModelError, match="holds no Scale-QLoRA adapter called 'default'"):
        merge_to_folder(load_quantized_model(llama), llama, out / "merged")
    assert empty(out)


def test_an_existing_output_needs_replace_and_is_replaced_whole(llama, tmp_path):
    out = tmp_path / "merged"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    model = adapted(llama)
    with pytest.raises(FileExistsError):
        merge_to_folder(model, llama, out)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    merge_to_folder(model, llama, out, replace=True)
    assert not (out / "notes.txt").exists() and read_manifest(out, KIND)


@pytest.mark.parametrize("damage", ["scale", "code", "nan"])
def test_a_write_that_differs_from_the_forward_is_measured_refused_and_removed(llama, out, monkeypatch, damage):
    """The measurement must be able to fail: damage the written file between writing and measuring."""
    model = adapted(llama)
    kept = out / "merged"
    kept.mkdir()
    (kept / "old").write_text("old")
    write = merge._rewrite

    def damaged(base: Path, folder: Path, *rest) -> None:
        write(base, folder, *rest)
        tensors = load_file(folder / "model.safetensors")
        layer = "model.layers.1.mlp.up_proj"
        if damage == "scale":
            raw = tensors[f"{layer}.weight_scale"].view(torch.uint8)
            raw[5, 1] = raw[5, 1] - 1 if raw[5, 1] > 1 else raw[5, 1] + 1
        elif damage == "code":
            tensors["model.layers.0.mlp.down_proj.weight_packed"][0, 0] ^= 1
        else:
            tensors[f"{layer}.weight_global_scale"] = torch.tensor([1e-38])  # 1 / 1e-38 * 448 overflows: inf - w, inf * 0
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(merge, "_rewrite", damaged)
    with pytest.raises(MergeLoss, match="on the written checkpoint, allowed 0"):
        merge_to_folder(model, llama, kept, replace=True)
    assert [path.name for path in out.iterdir()] == ["merged"] and (kept / "old").read_text() == "old"


def test_a_scale_plane_is_written_beside_the_adapter(base, tmp_path):
    model = adapted(base)
    model.save_pretrained(tmp_path)
    manifest = write_scale_plane(model, tmp_path, metrics={"accuracy": 0.5})
    assert manifest == read_manifest(tmp_path, ADAPTER_KIND)
    spec = read_quantized(base)[0]
    identity = {key: manifest[key] for key in ("format", "grid", "block", "rank", "alpha", "metrics")}
    assert identity == {
        "format": spec.name,
        "grid": spec.grid.name,
        "block": spec.block,
        "rank": 2,
        "alpha": 2.0,
        "metrics": {"accuracy": 0.5},
    }
    base_manifest = read_manifest(base, KIND)
    assert (manifest["base_code_plane"], manifest["base_scale_plane"]) == (base_manifest["code_plane"], base_manifest["scale_plane"])
    assert set(manifest["files"]) >= {"adapter_config.json", "adapter_model.safetensors", SCALE_PLANE_NAME}
    for name, entry in manifest["files"].items():
        verify_file(tmp_path / name, entry["bytes"], entry["sha256"])
    plane = load_file(tmp_path / SCALE_PLANE_NAME)
    merge_to_folder(model, base, tmp_path / "merged")
    _, merged, _ = read_quantized(tmp_path / "merged")
    assert set(plane) == set(adapter_layers(model))
    assert all(data.dtype == torch.uint8 and torch.equal(data, merged[name].scales) for name, data in plane.items())


def test_the_fingerprints_of_a_merged_in_place_model_are_still_the_bases(llama, tmp_path):
    model = adapted(llama)
    model.save_pretrained(tmp_path)
    model.merge_adapter()
    manifest = write_scale_plane(model, tmp_path)
    assert manifest["base_scale_plane"] == read_manifest(llama, KIND)["scale_plane"]


def test_a_non_finite_adapter_gets_no_scale_plane(llama, tmp_path):
    model = adapted(llama)
    layer = next(module for module in model.modules() if isinstance(module, ScaleQLoraLinear))
    with torch.no_grad():
        layer.qast_B["default"][0, 0] = float("nan")
    model.save_pretrained(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(FormatError, match="adapter factors hold NaN or infinity"):
        write_scale_plane(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_checkpoint_without_manifest_is_merged_too(llama, tmp_path):
    foreign = shutil.copytree(llama, tmp_path / "foreign")
    (foreign / "manifest.json").unlink()
    model = adapted(foreign)
    assert merge_to_folder(model, foreign, tmp_path / "merged").max_abs_dw == 0.0
    merged = planes(load_quantized_model(tmp_path / "merged"))
    assert read_manifest(tmp_path / "merged", KIND)["format"] == next(iter(merged.values())).format.name
