"""prism_ray.formats.modelopt: the scalar multiplies, bytes survive a round trip, and nothing that is missing, foreign or excluded goes unnoticed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from prism_ray.core.errors import CheckpointError, FormatError
from prism_ray.formats import compressed_tensors, e2m1, modelopt
from prism_ray.formats.modelopt import ModelOptCheckpoint, from_checkpoint, read_quantized, to_checkpoint, write_quantized
from prism_ray.formats.policy import PlanEntry, QuantPlan, QuantPolicy
from prism_ray.formats.spec import FORMATS
from prism_ray.formats.tensor import QuantTensor
from prism_ray.quantizers.rtn import rtn

NVFP4 = FORMATS["nvfp4"]
CONFIG = {"model_type": "llama", "hidden_size": 64}
MODEL = {"model.norm.weight": torch.ones(8, dtype=torch.bfloat16), "model.embed_tokens.weight": torch.randn(5, 8)}
# As the exporter writes them (Llama-3.3-70B-Instruct-FP4 and the conversion that ModelOpt makes of it for config.json).
PUBLISHED = {
    "producer": {"name": "modelopt", "version": "0.23.0"},
    "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]},
}


def weight(seed: int, *shape: int, scale: float = 1.0) -> QuantTensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return rtn(values, NVFP4)[0]


def plan(*formats: str) -> QuantPlan:
    entries = tuple(PlanEntry(name=f"l{i}", shape=(4, 32), format=name) for i, name in enumerate(formats))
    return QuantPlan(policy=QuantPolicy(), entries=entries, kept=(("lm_head", "linear: ignored", 4),))


def checkpoint(*, experts: int = 3, input_scales: bool = False, **fields: Any) -> ModelOptCheckpoint:
    names = ["model.layers.0.self_attn.q_proj"]
    names += [f"model.layers.0.mlp.experts.{e}.{part}" for e in range(experts) for part in ("gate_proj", "up_proj", "down_proj")]
    only = not input_scales
    defaults: dict[str, Any] = {
        "quantized": {name: weight(i, 4, 32) for i, name in enumerate(names)},
        "plain": dict(MODEL),
        "input_scales": {name: torch.tensor(0.5 + i) for i, name in enumerate(names)} if input_scales else {},
        "config": modelopt.quantization_config(plan("nvfp4"), weight_only=only),
        "quant_config": modelopt.quant_config(plan("nvfp4"), weight_only=only),
    }
    return ModelOptCheckpoint(**defaults | fields)


@pytest.fixture
def folder(tmp_path) -> Path:
    write_quantized(tmp_path / "q", checkpoint(input_scales=True), CONFIG)
    return tmp_path / "q"


def edit(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_golden_bytes():
    # A block that no reordering leaves alone: codes 1 to 7, then negative ones and -0 (FMT-01); the even column is the low nibble.
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0]], dtype=torch.uint8)
    scale = torch.tensor([[1.5]]).to(torch.float8_e4m3fn)
    tensor = QuantTensor(codes=e2m1.pack(codes), scales=scale.view(torch.uint8), tensor_scale=torch.tensor(0.25), format=NVFP4)
    stored = to_checkpoint("n", tensor)
    assert stored["n.weight"].tolist() == [[0x21, 0x43, 0x65, 0x87, 0xA9, 0xCB, 0xED, 0x0F]]
    assert stored["n.weight_scale"].dtype == torch.float8_e4m3fn and stored["n.weight_scale"].view(torch.uint8).tolist() == [[0x3C]]
    assert stored["n.weight_scale_2"].shape == () and stored["n.weight_scale_2"].dtype == torch.float32
    values = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6, 0])
    back = from_checkpoint("n", stored).dequantize()
    assert torch.equal(back[0], values * 1.5 * 0.25)
    assert torch.signbit(back[0, 7])


@pytest.mark.parametrize(("amax", "factor"), [(0.75, 2.790178571e-4), (2688.0, 1.0)])
def test_the_scalar_multiplies(amax, factor):
    # FMT-02: ModelOpt stores amax / 2688, compressed-tensors 2688 / amax, of the same weight; both give the same numbers.
    values = torch.randn(4, 32)
    values[1, 3] = 2 * values.abs().max()
    values *= amax / values.abs().max()
    tensor = rtn(values, NVFP4)[0]
    ours, other = to_checkpoint("n", tensor), compressed_tensors.to_checkpoint("n", tensor)
    assert float(ours["n.weight_scale_2"]) == pytest.approx(factor, rel=1e-6)
    assert float(other["n.weight_global_scale"]) == pytest.approx(1 / factor, rel=1e-6)
    assert torch.equal(from_checkpoint("n", ours).dequantize(), compressed_tensors.from_checkpoint("n", other, NVFP4).dequantize())
    assert from_checkpoint("n", ours).dequantize().abs().max() == pytest.approx(amax, rel=1e-6)


def test_fused_experts_are_stored_one_by_one_and_fuse_again():
    fused = weight(1, 3, 8, 32)
    stored = to_checkpoint("m.experts.gate_up_proj", fused)
    assert set(stored) == {
        f"m.experts.{e}.{p}.{end}"
        for e in range(3)
        for p in ("gate_proj", "up_proj")
        for end in ("weight", "weight_scale", "weight_scale_2")
    }
    linears = {name: from_checkpoint(name, stored) for name in modelopt.module_names(stored)}
    again = compressed_tensors.fuse_experts(linears)["m.experts.gate_up_proj"]
    assert torch.equal(again.codes, fused.codes) and torch.equal(again.scales, fused.scales)
    assert torch.equal(again.tensor_scale, fused.tensor_scale)


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("input_scales", [False, True])
def test_read_then_write_gives_the_same_files(tmp_path, shape, input_scales):
    first, second = tmp_path / "a", tmp_path / "b"
    written = checkpoint(input_scales=input_scales, scalar_shape=shape)
    write_quantized(first, written, CONFIG)
    read = read_quantized(first)
    assert read.weight_only is not input_scales
    assert set(read.plain) == set(MODEL) and set(read.quantized) == set(written.quantized)
    write_quantized(second, read, json.loads((first / "config.json").read_text()))
    assert {file.name for file in first.iterdir()} == {file.name for file in second.iterdir()}
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes(), file.name
    assert load_file(first / "model.safetensors")["model.layers.0.self_attn.q_proj.weight_scale_2"].shape == shape


def test_configs():
    config = modelopt.quantization_config(plan("nvfp4"), weight_only=False)
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    assert config["config_groups"] == {"group_0": {"input_activations": numbers, "weights": numbers, "targets": ["Linear"]}}
    assert config["quant_method"] == "modelopt" and config["quant_algo"] == "NVFP4" and config["ignore"] == ["lm_head"]
    only = modelopt.quantization_config(plan("nvfp4"))
    assert only["quant_algo"] == "W4A16_NVFP4" and "input_activations" not in only["config_groups"]["group_0"]
    # The three fields that serving engines require of an NVFP4 hf_quant_config.json.
    section = modelopt.quant_config(plan("nvfp4"))["quantization"]
    assert {"group_size": 16, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}.items() <= section.items()
    with pytest.raises(FormatError, match="cannot hold mxfp4"):
        modelopt.quantization_config(plan("nvfp4", "mxfp4"))
    with pytest.raises(FormatError, match="holds nvfp4, not mxfp4"):
        to_checkpoint("n", rtn(torch.randn(2, 32), FORMATS["mxfp4"])[0])


def test_a_published_folder_without_a_config_of_ours(tmp_path):
    # Only hf_quant_config.json says what the folder is; its fp8 cache scales and plain tensors pass through as they are.
    tensors = to_checkpoint("model.layers.0.mlp.up_proj", weight(1, 4, 32)) | {"model.layers.0.self_attn.k_proj.k_scale": torch.ones(())}
    tensors |= {"model.layers.0.mlp.up_proj.input_scale": torch.tensor(0.1)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(PUBLISHED))
    read = read_quantized(tmp_path)
    assert read.config is None and read.quant_config == PUBLISHED and not read.weight_only
    assert set(read.plain) == {"model.layers.0.self_attn.k_proj.k_scale"}
    assert all(torch.equal(read.tensors()[name], tensor) for name, tensor in tensors.items()) and set(read.tensors()) == set(tensors)
    assert modelopt.excluded(None, PUBLISHED) == ["lm_head"]


class TestRefusals:
    @pytest.mark.parametrize("part", ["weight", "weight_scale", "weight_scale_2"])
    def test_a_missing_tensor(self, folder, part):
        name = f"model.layers.0.mlp.experts.1.up_proj.{part}"
        edit(folder, lambda tensors: tensors.pop(name))
        with pytest.raises(CheckpointError, match=f"'{name}' is missing"):
            read_quantized(folder)

    def test_packed_bytes_without_any_scale(self, folder):
        name = "model.layers.0.self_attn.q_proj"
        edit(folder, lambda tensors: [tensors.pop(f"{name}.{end}") for end in ("weight_scale", "weight_scale_2", "input_scale")])
        with pytest.raises(CheckpointError, match=f"'{name}.weight_scale' is missing"):
            read_quantized(folder)

    def test_an_input_scale_of_some_modules_only(self, folder):
        # FMT-06: 8 experts, input_scale for 7. Nothing may stand in for it.
        edit(folder, lambda tensors: tensors.pop("model.layers.0.mlp.experts.2.down_proj.input_scale"))
        with pytest.raises(CheckpointError, match=r"1 of 10 quantized modules have no input_scale: model.layers.0.mlp.experts.2.down_proj"):
            read_quantized(folder)

    def test_no_input_scale_at_all_is_weight_only(self, folder):
        edit(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith("input_scale")])
        assert read_quantized(folder).weight_only

    def test_a_missing_expert(self, folder):
        prefix = "model.layers.0.mlp.experts.1.gate_proj."
        edit(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(prefix)])
        with pytest.raises(CheckpointError, match=r"gate_proj of experts \[1\] is missing"):
            read_quantized(folder)

    @pytest.mark.parametrize("value", [1e-40, 0.0, -1.0, float("nan"), float("inf")])
    @pytest.mark.parametrize("part", ["weight_scale_2", "input_scale"])
    def test_a_scalar_that_cannot_scale(self, folder, part, value):
        name = f"model.layers.0.mlp.experts.0.up_proj.{part}"
        edit(folder, lambda tensors: tensors.update({name: torch.tensor(value)}))
        with pytest.raises(CheckpointError, match=f"{name}.*no positive normal float32"):
            read_quantized(folder)

    def test_half_filled_block_scales(self, folder):
        # What a loader with NaN sentinels leaves behind: refused by the byte.
        name = "model.layers.0.mlp.experts.0.up_proj.weight_scale"
        edit(folder, lambda tensors: tensors[name].view(torch.uint8)[2:].fill_(0x7F))
        with pytest.raises(FormatError, match=r"experts.0.up_proj.*0x7F at \[2, 0\]"):
            read_quantized(folder)

    def test_padded_or_swizzled_scales(self, folder):
        # FMT-07: 4 rows padded to 128 of 2 blocks padded to 4.
        name = "model.layers.0.self_attn.q_proj.weight_scale"
        edit(folder, lambda tensors: tensors.update({name: torch.ones(128, 4).to(torch.float8_e4m3fn)}))
        with pytest.raises(CheckpointError, match=r"q_proj: scales have shape \[128, 4\]"):
            read_quantized(folder)

    @pytest.mark.parametrize("part", ["weight_global_scale", "pre_quant_scale"])
    def test_a_tensor_of_another_layout(self, folder, part):
        edit(folder, lambda tensors: tensors.update({f"model.layers.0.self_attn.q_proj.{part}": torch.ones(1)}))
        with pytest.raises(CheckpointError, match=f"{part}' is not of the plain NVFP4 layout"):
            read_quantized(folder)

    def test_an_excluded_module_that_is_packed(self, folder):
        path = folder / "hf_quant_config.json"
        config = json.loads(path.read_text())
        config["quantization"]["exclude_modules"] = ["lm_head", "model.layers.0.self_attn*"]
        path.write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=r"'model.layers.0.self_attn\*', but the files hold 'model.layers.0.self_attn.q_proj'"):
            read_quantized(folder)

    @pytest.mark.parametrize("algorithm", ["MXFP4", "FP8", "MIXED_PRECISION", "NVFP4_AWQ", "W4A8_MXFP4_FP8"])
    def test_other_algorithms_by_name(self, folder, algorithm):
        for file, section in (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization")):
            config = json.loads((folder / file).read_text())
            config[section]["quant_algo"] = algorithm
            (folder / file).write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=f"'{algorithm}' cannot be read"):
            read_quantized(folder)

    def test_files_that_contradict_each_other(self, folder):
        (folder / "hf_quant_config.json").write_text(json.dumps(PUBLISHED | {"quantization": {"quant_algo": "FP8"}}))
        with pytest.raises(CheckpointError, match="name FP8 and NVFP4"):
            read_quantized(folder)

    def test_another_group_size(self, folder):
        config = json.loads((folder / "hf_quant_config.json").read_text())
        config["quantization"]["group_size"] = 32
        (folder / "hf_quant_config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match="group_size 32"):
            read_quantized(folder)

    def test_another_method(self, folder):
        (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": {"quant_method": "awq"}}))
        with pytest.raises(CheckpointError, match="'awq' is not ModelOpt's"):
            read_quantized(folder)

    def test_an_incomplete_checkpoint_is_not_written(self, tmp_path):
        good = checkpoint(input_scales=True)
        scales = dict(good.input_scales)
        scales.pop("model.layers.0.self_attn.q_proj")
        with pytest.raises(CheckpointError, match="have no input_scale"):
            write_quantized(tmp_path / "q", dataclasses.replace(good, input_scales=scales), CONFIG)
        assert not (tmp_path / "q").exists()
