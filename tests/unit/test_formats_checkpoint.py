"""prism_ray.formats.checkpoint: quantized folders: equal logits after loading, and no damage, lack or surplus goes unnoticed (ADP-06, FMT-06)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from prism_ray.calibrate.quantize import quantize_model, quantize_to_folder
from prism_ray.core.errors import CheckpointError, ModelError
from prism_ray.core.manifest import read_manifest
from prism_ray.formats import safetensors_io
from prism_ray.formats.checkpoint import KIND, load_quantized_model, read_quantized, save_quantized
from prism_ray.formats.modules import planes, set_code_storage
from prism_ray.formats.policy import DEFAULT_IGNORE, QuantPolicy
from prism_ray.formats.spec import FORMATS
from prism_ray.formats.tensor import code_plane_fingerprint, scale_plane_fingerprint
from prism_ray.models.tiny import tiny_llama, tiny_qwen3_moe, tiny_tokenizer

IDS = torch.tensor([[1, 5, 9, 40, 200, 7], [3, 3, 3, 250, 11, 0]])
every = pytest.mark.parametrize("name", list(FORMATS))
BUILDERS: dict[str, Callable] = {
    "tied": lambda: tiny_llama(hidden_size=128, tie=True),
    "untied": lambda: tiny_llama(hidden_size=128, tie=False),
    "moe": lambda: wide_moe(),
    "bfloat16": lambda: in_bfloat16(tiny_llama(hidden_size=128)),
    "moe-bfloat16": lambda: in_bfloat16(wide_moe()),
}


def wide_moe(seed: int = 0):
    """128 columns everywhere, which every format divides."""
    return tiny_qwen3_moe(seed, hidden_size=128, moe_intermediate_size=128)


def in_bfloat16(model):
    """The model as from_pretrained(dtype=bfloat16) gives it: rotary frequencies stay float32, which .to(bfloat16) would round."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(IDS).logits


def quantized_folder(path: Path, name: str = "nvfp4", model=None) -> Path:
    quantize_to_folder(model if model is not None else tiny_llama(), tiny_tokenizer(), QuantPolicy(format=name), path)
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder without a manifest, so that a change reaches the reader's own checks; `sealed` keeps it."""
    path = quantized_folder(tmp_path / "q")
    (path / "manifest.json").unlink()
    return path


@pytest.fixture
def sealed(tmp_path) -> Path:
    return quantized_folder(tmp_path / "q")


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@every
@pytest.mark.parametrize("kind", BUILDERS)
def test_saved_and_loaded_logits_are_equal_to_the_bit(name, kind, tmp_path):
    model = BUILDERS[kind]()
    quantized_folder(tmp_path / "q", name, model)
    loaded = load_quantized_model(tmp_path / "q", dtype=model.dtype)
    assert not loaded.training and not any(parameter.requires_grad for parameter in loaded.parameters())
    assert loaded.config.tie_word_embeddings == model.config.tie_word_embeddings
    assert torch.equal(logits(loaded), logits(model))


@every
def test_the_manifest_fingerprints_are_those_of_the_loaded_model(name, tmp_path):
    path = quantized_folder(tmp_path / "q", name, wide_moe())
    manifest = read_manifest(path, KIND)
    loaded = planes(load_quantized_model(path))
    assert manifest["code_plane"] == code_plane_fingerprint(loaded)
    assert manifest["scale_plane"] == scale_plane_fingerprint(loaded)
    assert (manifest["format"], manifest["scale_rule"]) == (name, FORMATS[name].amax_rule)
    other = quantize_to_folder(wide_moe(1), tiny_tokenizer(), QuantPolicy(format=name), tmp_path / "other")
    assert other["code_plane"] != manifest["code_plane"] and other["scale_plane"] != manifest["scale_plane"]


def test_a_loaded_model_saved_again_gives_the_same_tensors(sealed, tmp_path):
    model = load_quantized_model(sealed, dtype=torch.float32)
    plan, _ = quantize_model(tiny_llama(), QuantPolicy())
    save_quantized(model, plan, tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (sealed / "model.safetensors").read_bytes()


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3_moe])
def test_codes_stored_as_parameters_are_written_as_the_same_bytes(build, tmp_path):
    model = build()
    plan, _ = quantize_model(model, QuantPolicy())
    first = save_quantized(model, plan, tmp_path / "buffer")
    set_code_storage(model, "parameter")
    second = save_quantized(model, plan, tmp_path / "parameter")
    assert first["files"]["model.safetensors"] == second["files"]["model.safetensors"]


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3_moe])
def test_several_shards_hold_the_same_model(build, tmp_path, monkeypatch):
    model = build(tie=False)
    monkeypatch.setattr(safetensors_io, "SHARD_BYTES", 60_000)
    path = quantized_folder(tmp_path / "q", "nvfp4", model)
    shards = sorted(file.name for file in path.glob("model-*.safetensors"))
    assert len(shards) > 1 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert all((path / shard).stat().st_size < 60_000 + 288 * 64 * 4 + 20_000 for shard in shards)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(shards)
    assert torch.equal(logits(load_quantized_model(path, dtype=torch.float32)), logits(model))
    (path / "manifest.json").unlink()
    (path / shards[1]).unlink()
    with pytest.raises(CheckpointError, match=f"names the shard '{shards[1]}', which is not there"):
        load_quantized_model(path)


def test_a_row_of_layers_left_in_full_precision_comes_back(tmp_path):
    """Names that the checkpoint's ignore list holds, and one expert parameter kept beside a quantized one."""
    model = tiny_qwen3_moe()
    ignore = (*DEFAULT_IGNORE, "model.layers.0.*", "*.experts.down_proj")
    quantize_to_folder(model, tiny_tokenizer(), QuantPolicy(ignore=ignore), tmp_path / "q")
    loaded = load_quantized_model(tmp_path / "q", dtype=torch.float32)
    assert set(planes(loaded)) == set(planes(model)) and not any(name.startswith("model.layers.0.") for name in planes(loaded))
    assert "model.layers.1.mlp.experts.gate_up_proj" in planes(loaded)
    assert torch.equal(logits(loaded), logits(model))


def test_indivisible_experts_that_are_kept_come_back(tmp_path):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    quantize_to_folder(model, tiny_tokenizer(), QuantPolicy(keep_indivisible=True), tmp_path / "q")
    loaded = load_quantized_model(tmp_path / "q", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(loaded(IDS % 64).logits, model(IDS % 64).logits)


def test_cut_at_ninety_percent_names_file_and_both_sizes(folder):
    path = folder / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, size * 9 // 10)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: \d+ bytes of data found, its header describes \d+: the file is truncated"
    ):
        load_quantized_model(folder)


def test_cut_at_ninety_percent_is_found_by_the_manifest_too(sealed):
    path = sealed / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, size * 9 // 10)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {size * 9 // 10} bytes found, {size} expected"):
        load_quantized_model(sealed)


@pytest.mark.parametrize("lost", ["model.layers.1.mlp.down_proj.weight_scale", "model.layers.0.self_attn.q_proj.weight_global_scale"])
def test_a_missing_plane_is_named(folder, lost):
    edit(folder, lambda tensors: tensors.pop(lost))
    with pytest.raises(CheckpointError, match=f"tensor '{lost}' is missing"):
        load_quantized_model(folder)


@pytest.mark.parametrize("lost", ["model.norm.weight", "model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"])
def test_a_missing_plain_tensor_is_named(folder, lost):
    edit(folder, lambda tensors: tensors.pop(lost))
    with pytest.raises(CheckpointError, match=rf"1 tensor\(s\) missing, first '{lost}'|2 tensor\(s\) missing, first '{lost}'"):
        load_quantized_model(folder)


def test_a_weight_whose_planes_are_all_missing_is_named(folder):
    edit(folder, lambda tensors: [tensors.pop(key) for key in list(tensors) if key.startswith("model.layers.1.mlp.up_proj.")])
    with pytest.raises(CheckpointError, match=r"missing, first 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load_quantized_model(folder)


@pytest.mark.parametrize(
    "name", ["extra.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.input_global_scale", "lm_head.bias"]
)
def test_an_extra_tensor_is_refused_by_name(folder, name):
    edit(folder, lambda tensors: tensors.update({name: torch.zeros(4)}))
    with pytest.raises(CheckpointError, match=f"tensor '{name}' has no place in the model"):
        load_quantized_model(folder)


def test_an_extra_global_scale_beside_mxfp4_planes_is_refused(tmp_path):
    path = quantized_folder(tmp_path / "q", "mxfp4")
    (path / "manifest.json").unlink()
    name = "model.layers.0.mlp.up_proj.weight_global_scale"
    edit(path, lambda tensors: tensors.update({name: torch.ones(1)}))
    with pytest.raises(CheckpointError, match=f"tensor '{name}' has no place in the model"):
        load_quantized_model(path)


def test_a_bias_is_neither_lost_nor_invented(tmp_path):
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=2, attention_bias=True)).eval()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.bias.normal_()
    path = quantized_folder(tmp_path / "q", "nvfp4", model)
    loaded = load_quantized_model(path, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(loaded(IDS % 64).logits, model(IDS % 64).logits)
    (path / "manifest.json").unlink()
    without = shutil.copytree(path, tmp_path / "without")
    edit(without, lambda tensors: tensors.pop("model.layers.0.self_attn.q_proj.bias"))
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.self_attn\.q_proj: .*bias"):
        load_quantized_model(without)
    edit(path, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.bias": torch.zeros(64)}))
    with pytest.raises(CheckpointError, match=r"'model\.layers\.0\.mlp\.up_proj\.bias' has no place in the model"):
        load_quantized_model(path)


def test_another_architecture_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"num_hidden_layers": 3}, r"missing, first 'model\.layers\.2\."),
        ({"num_hidden_layers": 1}, r"model\.layers\.1\.mlp\.\w+: the model has no such module; the checkpoint belongs to another"),
        ({"intermediate_size": 96}, r"model\.layers\.0\.mlp\.\w+: shape \[.*\] in the checkpoint, \[.*\] in the model"),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(CheckpointError, match=message):
            load_quantized_model(folder)


def test_a_plain_tensor_of_another_shape_is_refused_by_name(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    with pytest.raises(CheckpointError, match=r"'model\.embed_tokens\.weight' has shape \[288, 64\], the model needs \[300, 64\]"):
        load_quantized_model(folder)


def test_fewer_experts_than_the_config_says_are_refused(tmp_path):
    path = quantized_folder(tmp_path / "q", "nvfp4", tiny_qwen3_moe())
    (path / "manifest.json").unlink()
    edit(path, lambda tensors: [tensors.pop(key) for key in list(tensors) if "layers.1.mlp.experts.3." in key])
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.experts\.\w+: shape \[3, .* in the checkpoint, \[4, "):
        load_quantized_model(path)


@pytest.mark.parametrize("entry", ["model.layers.0.self_attn.q_proj", "re:.*q_proj$", "re:model[.]layers[.]0"])
def test_an_ignore_list_that_names_a_packed_module_is_refused(folder, entry):
    """Field case FMT-09: believed, the config would leave q_proj's codes to be read as something else."""
    read_quantized(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["ignore"].append(entry)
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"ignore list has '.*', but the files hold 'model\.layers\.0\."):
        read_quantized(folder)


@pytest.mark.parametrize("entry", ["layers.0.self_attn.q_proj", "model.layers.0.self_attn.q", "re:.*w_proj", "lm_head"])
def test_an_ignore_entry_that_matches_no_packed_module_is_no_contradiction(folder, entry):
    _, before, _ = read_quantized(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["ignore"].append(entry)
    path.write_text(json.dumps(config))
    assert read_quantized(folder)[1].keys() == before.keys() != set()


def test_a_folder_that_is_no_quantized_model(tmp_path, folder):
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_quantized(tmp_path)
    (folder / "config.json").write_text('{"quantization_config": {"for')
    with pytest.raises(ModelError, match=r"config\.json: .*JSON"):
        read_quantized(folder)
    tiny_llama().save_pretrained(tmp_path / "dense")
    with pytest.raises(CheckpointError, match="quantization 'None' format 'None' cannot be read"):
        load_quantized_model(tmp_path / "dense")


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_changed_byte_in_any_file_is_found_by_the_manifest(sealed, file):
    path = sealed / file
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{file}: SHA-256 differs"):
        load_quantized_model(sealed)


def test_an_interrupted_write_leaves_nothing(tmp_path):
    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None:
            assert (folder / "config.json").is_file()
            raise RuntimeError("power cut")

    model = tiny_llama()
    plan, _ = quantize_model(model, QuantPolicy())
    with pytest.raises(RuntimeError, match="power cut"):
        save_quantized(model, plan, tmp_path / "q", tokenizer=Tokenizer())
    assert list(tmp_path.iterdir()) == []
    save_quantized(model, plan, tmp_path / "q")
    kept = (tmp_path / "q" / "model.safetensors").read_bytes()
    with pytest.raises(RuntimeError, match="power cut"):
        save_quantized(model, plan, tmp_path / "q", tokenizer=Tokenizer(), replace=True)
    assert [path.name for path in tmp_path.iterdir()] == ["q"] and (tmp_path / "q" / "model.safetensors").read_bytes() == kept


def test_writing_over_a_folder_needs_replace(sealed):
    model = tiny_llama(seed=1)
    plan, _ = quantize_model(model, QuantPolicy())
    before = (sealed / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError):
        save_quantized(model, plan, sealed)
    assert (sealed / "model.safetensors").read_bytes() == before
    save_quantized(model, plan, sealed, replace=True)
    assert torch.equal(logits(load_quantized_model(sealed, dtype=torch.float32)), logits(model))
