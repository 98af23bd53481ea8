"""prism_ray.formats.sources: a block filled by name equals from_pretrained's bit for bit; each storage is dequantized by its formula; lacks are named."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV4Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssForCausalLM

from prism_ray.core.errors import CheckpointError, FormatError, ModelError
from prism_ray.formats import compressed_tensors, config_groups, gpt_oss, modelopt
from prism_ray.formats.fp8 import fp8_dequantize
from prism_ray.formats.parameters import load_block, load_expert
from prism_ray.formats.policy import PlanEntry, QuantPlan, QuantPolicy
from prism_ray.formats.sources import TensorSource
from prism_ray.formats.spec import FORMATS
from prism_ray.quantizers.rtn import rtn

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_group": 2,
    "topk_group": 1,
    "num_key_value_heads": 4,
}
FAMILIES: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SMALL),
    "llama-tied": lambda: LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SMALL, num_experts=12, num_experts_per_tok=2, moe_intermediate_size=32),
    "mixtral": lambda: MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": lambda: GptOssConfig(**SMALL, head_dim=16, num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"] * 2),
    "deepseek_v3": lambda: DeepseekV3Config(
        **SMALL | MLA, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1
    ),
    "deepseek_v4": lambda: DeepseekV4Config(
        **{key: value for key, value in SMALL.items() if key not in ("intermediate_size", "num_key_value_heads", "num_hidden_layers")},
        num_hidden_layers=3,
        moe_intermediate_size=32,
        head_dim=32,
        q_lora_rank=32,
        o_lora_rank=16,
        o_groups=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=4,
        sliding_window=8,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        mlp_layer_types=["hash_moe", "moe", "moe"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    ),
}


def write_model(config: Any, folder: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Path:
    """A random model of a config, every value different from what an initializer leaves (zeros, ones)."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape) * 0.1)
            else:
                tensor.copy_(torch.randint(0, 4, tensor.shape))
    model.save_pretrained(folder, max_shard_size="60KB")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {name: write_model(build(), tmp_path_factory.mktemp("models") / name) for name, build in FAMILIES.items()}


def empty_model(folder: Path) -> Any:
    config = AutoConfig.from_pretrained(folder)
    with init_empty_weights():
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def edit(folder: Path, change) -> None:
    """Rewrite a folder's tensors as one file after `change(tensors)`, and drop the index."""
    tensors = {name: tensor.clone() for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    change(tensors)
    for file in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        file.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def set_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_blocks_equal_from_pretrained(folders, family, dtype):
    # The files are bfloat16, so both dtypes are exact copies: equality is demanded bit for bit, and of the dtypes too.
    folder = folders[family]
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict()
    source = TensorSource(folder, max_open=2)
    model = empty_model(folder)
    layers = [f"model.layers.{index}" for index in range(model.config.num_hidden_layers)]
    rest = [f"model.{name}" for name, _ in model.model.named_children() if name != "layers" and "rotary" not in name]
    for prefix in [*layers, *rest, "lm_head"]:
        block = model.get_submodule(prefix)
        read = load_block(source, block, prefix, dtype)
        state = block.state_dict()
        assert state and read == sum(
            source.nbytes(weight) for weight in {w for name in state for w in source.parameters.recipe(f"{prefix}.{name}", source).weights}
        )
        for name, tensor in state.items():
            assert tensor.dtype == expected[f"{prefix}.{name}"].dtype, f"{prefix}.{name}"
            assert torch.equal(tensor, expected[f"{prefix}.{name}"]), f"{prefix}.{name}"
    assert not [name for name, tensor in model.state_dict().items() if tensor.is_meta]


def test_files_without_the_prefix_of_the_base_model(folders, tmp_path):
    # DeepSeek-V4 is published as layers.0.attn.wq_a.weight, without "model.", and with an extra prediction layer, which transformers ignores.
    shutil.copytree(folders["deepseek_v4"], tmp_path / "m")

    def change(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)
        tensors["mtp.0.attn.wq_a.weight"] = torch.zeros(2, 2)

    edit(tmp_path / "m", change)
    source = TensorSource(tmp_path / "m")
    assert "layers.0.attn.wq_a.weight" in source.names()
    first, second = empty_model(folders["deepseek_v4"]), empty_model(tmp_path / "m")
    load_block(TensorSource(folders["deepseek_v4"]), first, "", torch.bfloat16)
    load_block(source, second, "", torch.bfloat16)
    assert all(torch.equal(tensor, second.state_dict()[name]) for name, tensor in first.state_dict().items())


def test_two_files_that_make_one_parameter(folders, tmp_path):
    shutil.copytree(folders["mixtral"], tmp_path / "m")
    name = "model.layers.0.block_sparse_moe.gate.weight"
    edit(tmp_path / "m", lambda tensors: tensors.update({name.replace("block_sparse_moe", "mlp"): tensors[name].clone()}))
    with pytest.raises(CheckpointError, match="are both 'model.layers.0.mlp.gate.weight'"):
        TensorSource(tmp_path / "m").parameters.recipe(name, TensorSource(tmp_path / "m"))


def test_a_loaded_block_computes_what_the_model_computes(folders):
    folder = folders["qwen3_moe"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    other = empty_model(folder)
    load_block(TensorSource(folder), other.model.layers[1].mlp, "model.layers.1.mlp", torch.float32)
    x = torch.randn(1, 5, 64)
    ours, theirs = other.model.layers[1].mlp(x), model.model.layers[1].mlp(x)
    assert torch.equal(ours[0] if isinstance(ours, tuple) else ours, theirs[0] if isinstance(theirs, tuple) else theirs)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v4"])
def test_one_expert_is_a_slice_of_the_block(folders, family):
    source = TensorSource(folders[family])
    model = empty_model(folders[family])
    load_block(source, model.model.layers[1], "model.layers.1", torch.bfloat16)
    for parameter in ("gate_up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.{parameter}"
        whole = model.get_parameter(name)
        assert len(whole) > 3
        for index in (0, len(whole) - 1):
            assert torch.equal(load_expert(source, name, index, torch.bfloat16), whole[index])
    with pytest.raises(CheckpointError, match="expert|no expert"):
        load_expert(source, "model.layers.1.mlp.experts.down_proj", 99, torch.bfloat16)


def test_names_shapes_and_bytes_come_from_the_headers(folders, monkeypatch):
    source = TensorSource(folders["llama"])
    monkeypatch.setattr(source, "_read", lambda *a: pytest.fail("read a tensor"))
    tensors = {name: t for file in folders["llama"].glob("*.safetensors") for name, t in load_file(file).items()}
    assert source.names() == sorted(tensors)
    for name, tensor in tensors.items():
        assert source.shape(name) == tuple(tensor.shape)
        assert source.nbytes(name) == tensor.nbytes
        assert source.dtype(name) == "BF16"


def test_a_source_pickles_keeps_few_files_open_and_gives_memory_of_its_own(folders):
    source = pickle.loads(pickle.dumps(TensorSource(folders["llama"])))
    source._max_open = 1
    assert len(set(source._files.values())) > 2
    first = {name: source.get(name, torch.bfloat16) for name in source.names()}
    assert len(source._open) == 1
    for tensor in first.values():
        tensor.add_(1)
    assert all(torch.equal(source.get(name, torch.bfloat16).add_(1), tensor) for name, tensor in first.items())
    source.close()
    assert torch.isfinite(source.get("model.norm.weight")).all()
    with pytest.raises(FormatError, match="float32 or bfloat16"):
        source.get("model.norm.weight", torch.float16)


class TestLacks:
    @pytest.fixture
    def folder(self, tmp_path) -> Path:
        return write_model(FAMILIES["qwen3_moe"](), tmp_path / "m")

    def block(self, folder: Path) -> int:
        return load_block(TensorSource(folder), empty_model(folder).model.layers[0], "model.layers.0", torch.float32)

    def test_missing_parameter(self, folder):
        edit(folder, lambda tensors: tensors.pop("model.layers.0.self_attn.q_norm.weight"))
        with pytest.raises(CheckpointError, match="no tensor for the parameter 'model.layers.0.self_attn.q_norm.weight'") as caught:
            self.block(folder)
        assert str(folder) in str(caught.value) and "\n" not in str(caught.value)

    def test_missing_expert(self, folder):
        edit(folder, lambda tensors: [tensors.pop(f"model.layers.0.mlp.experts.{index}.up_proj.weight") for index in (3, 11)])
        with pytest.raises(CheckpointError, match=r"up_proj.weight' of experts \[3, 11\] is missing"):
            self.block(folder)

    def test_last_experts_missing(self, folder):
        edit(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.0.mlp.experts.11." in name])
        with pytest.raises(
            CheckpointError, match=r"gate_proj.weight' of experts \[11\] is missing for 'model.layers.0.mlp.experts.gate_up_proj"
        ):
            self.block(folder)

    def test_more_experts_than_the_module_has(self, folder):
        names = [f"model.layers.0.mlp.experts.{{}}.{part}_proj.weight" for part in ("gate", "up", "down")]
        edit(folder, lambda tensors: tensors.update({name.format(12): tensors[name.format(0)].clone() for name in names}))
        with pytest.raises(CheckpointError, match="13 experts for 'model.layers.0.mlp.experts.gate_up_proj', the module has 12"):
            self.block(folder)

    def test_surplus_tensor(self, folder):
        edit(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
        with pytest.raises(CheckpointError, match="no place in Qwen3MoeDecoderLayer: model.layers.0.self_attn.q_proj.bias"):
            self.block(folder)

    def test_rotary_frequencies_of_old_files_are_no_surplus(self, folder):
        edit(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
        assert self.block(folder) > 0

    def test_wrong_shape(self, folder):
        edit(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.zeros(5)}))
        with pytest.raises(CheckpointError, match=r"q_norm.weight' \[5\], the module needs \[64\]|q_norm.weight' \[5\]"):
            self.block(folder)

    def test_truncated_shard_is_named_with_the_first_cut_tensor(self, folder):
        edit(folder, lambda tensors: None)
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        with open(file, "rb") as handle:
            header = json.loads(handle.read(8 + int.from_bytes(file.read_bytes()[:8], "little"))[8:])
        header.pop("__metadata__")
        last = max(header, key=lambda name: header[name]["data_offsets"][1])
        with pytest.raises(CheckpointError, match="truncated") as caught:
            TensorSource(folder)
        assert str(file) in str(caught.value) and f"'{last}'" in str(caught.value)

    def test_missing_tensor(self, folder):
        with pytest.raises(CheckpointError, match="'nothing.weight' is missing"):
            TensorSource(folder).get("nothing.weight")

    def test_a_file_that_vanished(self, folder):
        source = TensorSource(folder)
        name = "model.norm.weight"
        (folder / source._files[name]).unlink()
        with pytest.raises(CheckpointError, match=f"'{name}' cannot be read"):
            source.get(name)

    def test_buffers_that_are_in_no_file(self, folder):
        block = empty_model(folder).model.layers[0].self_attn
        block.register_buffer("table", torch.empty(3, device="meta"), persistent=False)
        with pytest.raises(ModelError, match="buffer 'table' is on meta"):
            load_block(TensorSource(folder), block, "model.layers.0.self_attn", torch.float32)

    def test_other_quantization(self, folder):
        set_config(folder, quantization_config={"quant_method": "gptq"})
        with pytest.raises(CheckpointError, match="'gptq' cannot be read"):
            TensorSource(folder)


def test_a_model_that_transformers_does_not_know_is_read_under_its_own_names(tmp_path):
    weight = torch.randn(4, 4)
    save_file({"core.w.weight": weight}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text('{"model_type": "of_our_own"}')
    with torch.device("meta"):
        module = nn.Sequential()
        module.w = nn.Linear(4, 4, bias=False)
    assert load_block(TensorSource(tmp_path), module, "core", torch.float32) == weight.nbytes
    assert torch.equal(module.w.weight, weight)


class TestFP8:
    def quantized(self, weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = -(-weight.shape[0] // block[0]), -(-weight.shape[1] // block[1])
        scale = torch.empty(rows, columns)
        codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        for i in range(rows):
            for j in range(columns):
                where = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
                scale[i, j] = weight[where].abs().max() / 448
                codes[where] = (weight[where] / scale[i, j]).to(torch.float8_e4m3fn)
        return codes, scale

    @pytest.mark.parametrize("shape", [(256, 256), (130, 200), (1, 129), (100, 3)])
    def test_formula(self, shape):
        codes, scale = self.quantized(torch.randn(shape), (128, 128))
        rows, columns = torch.arange(shape[0]) // 128, torch.arange(shape[1]) // 128
        expected = codes.float() * scale[rows][:, columns]
        assert torch.equal(fp8_dequantize(codes, scale, (128, 128), "w"), expected)
        assert torch.equal(fp8_dequantize(codes, scale, (128, 128), "w", torch.bfloat16), expected.to(torch.bfloat16))

    def test_one_scale_for_all_and_experts(self):
        codes, scale = torch.randn(3, 40, 50).to(torch.float8_e4m3fn), torch.rand(3, 2, 2)
        out = fp8_dequantize(codes, scale, (32, 32), "w")
        assert torch.equal(out[2], fp8_dequantize(codes[2], scale[2], (32, 32), "w"))
        assert torch.equal(fp8_dequantize(codes[0], torch.tensor(0.5), (32, 32), "w"), codes[0].float() * 0.5)
        assert torch.equal(fp8_dequantize(codes, torch.tensor([0.5, 2.0, 1.0]), (32, 32), "w")[1], codes[1].float() * 2)

    def test_refusals(self):
        codes = torch.ones(40, 40).to(torch.float8_e4m3fn)
        with pytest.raises(CheckpointError, match=r"shape \[1, 2\].*needs \[2, 2\]"):
            fp8_dequantize(codes, torch.ones(1, 2), (32, 32), "w")
        for bad in (-1.0, float("nan"), float("inf")):
            with pytest.raises(CheckpointError, match="negative or not finite"):
                fp8_dequantize(codes, torch.full((2, 2), bad), (32, 32), "w")
        with pytest.raises(FormatError, match="0xFF"):
            fp8_dequantize(codes, torch.full((2, 2), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu), (32, 32), "w")
        codes.view(torch.uint8)[3, 3] = 0x7F
        with pytest.raises(CheckpointError, match="a weight is not finite"):
            fp8_dequantize(codes, torch.ones(2, 2), (32, 32), "w")

    @pytest.mark.parametrize("kind", ["float32", "e8m0", "uint8", "scale-name"])
    def test_checkpoint(self, tmp_path, kind):
        # Widths 64 and 96 do not divide by 40, so the last blocks are smaller in both directions.
        folder, block, expected = write_model(FAMILIES["qwen3_moe"](), tmp_path / "m"), (40, 40), {}

        def change(tensors):
            for name in [name for name in tensors if name.endswith("_proj.weight")]:
                codes, scale = self.quantized(tensors[name].float(), block)
                if kind in ("e8m0", "uint8"):
                    scale = torch.exp2(torch.ceil(torch.log2(scale)))
                rows, columns = torch.arange(codes.shape[0]) // 40, torch.arange(codes.shape[1]) // 40
                expected[name] = codes.float() * scale[rows][:, columns]
                tensors[name] = codes
                stored = scale if kind in ("float32", "scale-name") else scale.to(torch.float8_e8m0fnu)
                key = name.removesuffix("weight") + "scale" if kind == "scale-name" else f"{name}_scale_inv"
                tensors[key] = stored.view(torch.uint8) if kind == "uint8" else stored

        edit(folder, change)
        set_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": list(block), "fmt": "e4m3"})
        source = TensorSource(folder)
        assert not [name for name in source.names() if "scale" in name]
        for name, weight in expected.items():
            assert torch.equal(source.get(name), weight)
            assert source.dtype(name) == "F8_E4M3" and source.shape(name) == tuple(weight.shape)
        model = empty_model(folder)
        load_block(source, model.model.layers[1], "model.layers.1", torch.bfloat16)
        stacked = torch.stack(
            [torch.cat([expected[f"model.layers.1.mlp.experts.{e}.{p}_proj.weight"] for p in ("gate", "up")]) for e in range(12)]
        )
        assert torch.equal(model.model.layers[1].mlp.experts.gate_up_proj, stacked.to(torch.bfloat16))
        assert torch.equal(load_expert(source, "model.layers.1.mlp.experts.gate_up_proj", 10, torch.float32), stacked[10])

    def test_missing_companions(self, tmp_path):
        name = "model.layers.0.self_attn.q_proj.weight"
        folder = write_model(FAMILIES["llama"](), tmp_path / "m")
        set_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
        edit(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
        with pytest.raises(CheckpointError, match=f"'{name}' is stored as F8_E4M3, and no scale") as caught:
            TensorSource(folder)
        assert str(folder / "model.safetensors") in str(caught.value)
        edit(folder, lambda tensors: [tensors.pop(name), tensors.update({f"{name}_scale_inv": torch.ones(1, 1)})])
        with pytest.raises(CheckpointError, match=f"'{name}' is missing"):
            TensorSource(folder)

    def test_deepseek_v4_packed_experts(self, tmp_path):
        # int8 with two E2M1 codes a byte and E8M0 scales for 32 columns under the name `.scale`, beside FP8 linears.
        folder, expected = write_model(FAMILIES["deepseek_v4"](), tmp_path / "m"), {}

        def change(tensors):
            for name in [name for name in tensors if ".experts." in name and name.endswith(".weight")]:
                tensor, _ = rtn(tensors[name].float(), FORMATS["mxfp4"])
                expected[name] = tensor.dequantize()
                tensors[name] = tensor.codes.view(torch.int8)
                tensors[name.removesuffix("weight") + "scale"] = tensor.scales.view(torch.float8_e8m0fnu)

        edit(folder, change)
        assert expected
        set_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"})
        source = TensorSource(folder)
        for name, weight in expected.items():
            assert source.shape(name) == tuple(weight.shape)
            assert torch.equal(source.get(name), weight)
        model = empty_model(folder)
        load_block(source, model.model.layers[2], "model.layers.2", torch.bfloat16)
        assert len(model.model.layers[2].mlp.experts.down_proj) == 4


class TestFourBitSources:
    @pytest.mark.parametrize("layout", ["modelopt-nvfp4", "compressed-nvfp4", "compressed-mxfp4", "compressed-int4-g32"])
    def test_a_quantized_source_is_read_as_weights(self, tmp_path, layout):
        folder, expected = write_model(FAMILIES["qwen3_moe"](), tmp_path / "m"), {}
        kind, _, name = layout.partition("-")
        spec = FORMATS[name]
        convention: Any = modelopt if kind == "modelopt" else compressed_tensors

        def change(tensors):
            for name in [name for name in tensors if name.endswith("_proj.weight")]:
                module = name.removesuffix(".weight")
                tensor, _ = rtn(tensors.pop(name).float(), spec)
                expected[name] = tensor.dequantize()
                tensors |= {key: value.contiguous() for key, value in convention.to_checkpoint(module, tensor).items()}

        edit(folder, change)
        entries = tuple(PlanEntry(name=name, shape=(1, 1), format=spec.name) for name in ("a",))
        plan = QuantPlan(policy=QuantPolicy(format=spec.name), entries=entries, kept=())
        config = modelopt.quantization_config(plan) if kind == "modelopt" else config_groups.quantization_config(plan)
        set_config(folder, quantization_config=config)
        source = TensorSource(folder)
        for name, weight in expected.items():
            assert source.shape(name) == tuple(weight.shape)
            assert torch.equal(source.get(name), weight)
        model = empty_model(folder)
        read = load_block(source, model.model.layers[0], "model.layers.0", torch.bfloat16)
        down = torch.stack([expected[f"model.layers.0.mlp.experts.{e}.down_proj.weight"] for e in range(12)])
        assert torch.equal(model.model.layers[0].mlp.experts.down_proj, down.to(torch.bfloat16))
        assert read < sum(4 * t.numel() for t in model.model.layers[0].parameters()) / 4
        part = "weight_scale_2" if kind == "modelopt" else "weight_scale"
        edit(folder, lambda tensors: tensors.pop(f"model.layers.0.self_attn.q_proj.{part}"))
        with pytest.raises(CheckpointError, match=f"'model.layers.0.self_attn.q_proj.{part}' is missing"):
            TensorSource(folder)

    def test_gpt_oss_blocks(self, tmp_path):
        config = FAMILIES["gpt_oss"]()
        torch.manual_seed(3)
        model = GptOssForCausalLM(config)
        plain, quantized = {name: t.to(torch.bfloat16) for name, t in model.state_dict().items()}, {}
        for name in [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]:
            tensor, _ = rtn(plain.pop(name).transpose(1, 2).float(), FORMATS["mxfp4"])
            rows = "interleaved" if name.endswith("gate_up_proj") else "single"
            quantized[name] = gpt_oss.ExpertWeight(tensor=tensor, rows=rows, bias=plain.pop(f"{name}_bias"))
        gpt_oss.write_quantized(tmp_path / "q", quantized, plain, config.to_dict())
        source = TensorSource(tmp_path / "q")
        other = empty_model(tmp_path / "q")
        load_block(source, other.model.layers[1], "model.layers.1", torch.bfloat16)
        for name, weight in quantized.items():
            assert source.shape(name) == tuple(model.get_parameter(name).shape)
            assert torch.equal(source.get(name), weight.tensor.dequantize().transpose(1, 2))
            assert torch.equal(source.expert(name, 2), source.get(name)[2])
            if "layers.1" in name:
                assert torch.equal(other.get_parameter(name), source.get(name, torch.bfloat16))
        edit(tmp_path / "q", lambda tensors: tensors.pop("model.layers.0.mlp.experts.down_proj_scales"))
        with pytest.raises(CheckpointError, match="'model.layers.0.mlp.experts.down_proj_scales' is missing"):
            TensorSource(tmp_path / "q")

    def test_activation_scales_belong_to_no_weight(self, tmp_path):
        folder = write_model(FAMILIES["llama"](), tmp_path / "m")
        edit(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.k_proj.k_scale": torch.ones(())}))
        set_config(folder, quantization_config={"quant_method": "fp8"})
        source = TensorSource(folder)
        assert source.auxiliary == ("model.layers.0.self_attn.k_proj.k_scale",)
        assert load_block(source, empty_model(folder).model.layers[0], "model.layers.0", torch.float32) > 0
