"""prism_ray.calibrate.quantize: a model quantized in place: coverage of the plan, what stays untouched, ties (CAL-09)."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from prism_ray.calibrate.quantize import quantize_model, quantize_to_folder
from prism_ray.core.errors import FormatError, ModelError, UnknownName
from prism_ray.core.manifest import read_manifest
from prism_ray.formats.checkpoint import KIND, load_quantized_model, read_quantized
from prism_ray.formats.modules import FP4Experts, FP4Linear, quantized_modules
from prism_ray.formats.policy import DEFAULT_IGNORE, QuantPolicy
from prism_ray.formats.spec import FORMATS
from prism_ray.models.families import split_head
from prism_ray.models.tiny import tiny_llama, tiny_qwen3_moe, tiny_tokenizer
from prism_ray.quantizers.rtn import rtn

WIDE = [
    lambda: tiny_llama(hidden_size=128),
    lambda: tiny_qwen3_moe(hidden_size=128, moe_intermediate_size=128),
]  # 128 columns fit every format
IDS = torch.tensor([[1, 5, 9, 40, 200, 7]])
every = pytest.mark.parametrize("name", list(FORMATS))
wide = pytest.mark.parametrize("build", WIDE, ids=["llama", "moe"])
SERVED_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def group_amax(before: dict[str, torch.Tensor], name: str) -> torch.Tensor | None:
    """The maximum over the weights that are served as one matrix with `name`."""
    parent, _, leaf = name.rpartition(".")
    members = next((group for group in SERVED_TOGETHER if leaf in group), ())
    return torch.stack([before[f"{parent}.{other}.weight"].abs().amax() for other in members]).amax() if members else None


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(IDS).logits


@every
@wide
def test_every_plan_entry_becomes_planes_and_nothing_else_changes(name, build):
    model = build()
    before = snapshot(model)
    plan, reports = quantize_model(model, QuantPolicy(format=name))
    modules = dict(quantized_modules(model))
    assert set(modules) == set(reports) == {entry.name for entry in plan.entries}
    for entry in plan.entries:
        module = modules[entry.name]
        assert isinstance(module, FP4Experts if len(entry.shape) == 3 else FP4Linear)
        assert module.quant_tensor().shape == entry.shape and module.format.name == name
        original = before[entry.name if len(entry.shape) == 3 else f"{entry.name}.weight"]
        expected, report = rtn(original, FORMATS[name], amax=group_amax(before, entry.name) if name == "nvfp4" else None)
        assert torch.equal(module.code_bytes, expected.codes) and torch.equal(module.scales, expected.scales)
        assert reports[entry.name] == report
    # No full-precision copy of a quantized weight is left, and all other tensors are the same bits.
    planned = {entry.name for entry in plan.entries} | {f"{entry.name}.weight" for entry in plan.entries}
    after = snapshot(model)
    assert not planned & set(after)
    for key in set(before) - planned:
        assert torch.equal(after[key], before[key]), key
    assert not any(parameter.requires_grad for parameter in model.parameters())


@every
@wide
def test_the_quantized_model_computes_with_the_dequantized_weights(name, build):
    """A twin whose dense weights are the dequantized ones gives the same logits, and other ones than the original."""
    model, twin = build(), build()
    plain = logits(model)
    quantize_model(model, QuantPolicy(format=name))
    twin.config._experts_implementation = "eager"
    with torch.no_grad():
        for path, module in quantized_modules(model):
            target = twin.get_submodule(path).weight if isinstance(module, FP4Linear) else twin.get_parameter(path)
            target.copy_(module.quant_tensor().dequantize())
    assert torch.equal(logits(model), logits(twin))
    assert not torch.equal(logits(model), plain)


def test_biases_are_kept():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_bias=True,
        mlp_bias=True,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    bias = model.model.layers[0].self_attn.q_proj.bias.detach().clone()
    quantize_model(model, QuantPolicy())
    module = model.model.layers[0].self_attn.q_proj
    assert isinstance(module, FP4Linear) and torch.equal(module.bias, bias)
    x = torch.randn(3, 32)
    assert torch.allclose(module(x) - bias, x @ module.quant_tensor().dequantize().T, atol=1e-5)


def test_shape_errors_are_raised_before_the_first_change():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=72, num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=3
    )
    model = LlamaForCausalLM(config)
    before = snapshot(model)
    with pytest.raises(FormatError, match=r"1 layer\(s\) do not divide.*down_proj \(72 columns, nvfp4 block 16"):
        quantize_model(model, QuantPolicy())
    assert not list(quantized_modules(model))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    plan, _ = quantize_model(model, QuantPolicy(keep_indivisible=True))
    assert ("model.layers.0.mlp.down_proj", "linear: 72 columns do not divide into nvfp4 blocks of 16", 48 * 72 * 4) in plan.kept
    assert isinstance(model.model.layers[0].mlp.down_proj, nn.Linear)


def test_an_unknown_method_is_refused_before_the_first_change():
    model = tiny_llama()
    with pytest.raises(UnknownName, match="unknown quantizer 'awq'"):
        quantize_model(model, QuantPolicy(), method="awq")
    assert not list(quantized_modules(model))


# CAL-09 a: quantize a tied lm_head
HEAD = {"lm_head": "nvfp4"}


def test_cal09a_quantizing_a_tied_head_is_refused_without_untie():
    model = tiny_llama(tie=True)
    with pytest.raises(ModelError, match="'lm_head' shares its weight with the embedding and is to be quantized; set untie=true"):
        quantize_model(model, QuantPolicy(overrides=HEAD))
    assert not list(quantized_modules(model)) and split_head(model).tied


def test_cal09a_untie_gives_the_head_planes_and_leaves_the_embedding_alone(tmp_path):
    model = tiny_llama(tie=True)
    embedding = model.model.embed_tokens.weight.detach().clone()
    manifest = quantize_to_folder(model, tiny_tokenizer(), QuantPolicy(overrides=HEAD, untie=True), tmp_path / "q")
    assert isinstance(model.lm_head, FP4Linear) and model.config.tie_word_embeddings is False
    assert torch.equal(model.model.embed_tokens.weight, embedding)
    assert "model.embed_tokens.weight" in {entry["tensor"] for entry in manifest["kept"]}
    assert json.loads((tmp_path / "q" / "config.json").read_text())["tie_word_embeddings"] is False
    loaded = load_quantized_model(tmp_path / "q", dtype=torch.float32)
    assert torch.equal(loaded.model.embed_tokens.weight, embedding)
    assert isinstance(loaded.lm_head, FP4Linear) and torch.equal(logits(loaded), logits(model))
    _, quantized, plain = read_quantized(tmp_path / "q")
    assert "lm_head" in quantized and "model.embed_tokens.weight" in plain and "lm_head.weight" not in plain


def test_cal09a_an_untied_head_may_be_quantized():
    model = tiny_llama(tie=False)
    embedding = model.model.embed_tokens.weight.detach().clone()
    quantize_model(model, QuantPolicy(overrides=HEAD))
    assert isinstance(model.lm_head, FP4Linear) and torch.equal(model.model.embed_tokens.weight, embedding)


def test_cal09b_an_ignored_tied_head_stays_tied_through_the_folder(tmp_path):
    model = tiny_llama(tie=True)
    quantize_to_folder(model, tiny_tokenizer(), QuantPolicy(), tmp_path / "q")
    _, _, plain = read_quantized(tmp_path / "q")
    assert "lm_head.weight" not in plain  # one copy on disk
    loaded = load_quantized_model(tmp_path / "q", dtype=torch.float32)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight and split_head(loaded).tied
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("declared", [True, False])
def test_cal09cd_a_config_that_contradicts_the_storage_is_an_error_before_any_change(declared):
    model = tiny_llama(tie=not declared)
    model.config.tie_word_embeddings = declared
    with pytest.raises(ModelError, match="tie_word_embeddings is true, but" if declared else "tie_word_embeddings is false"):
        quantize_model(model, QuantPolicy())
    assert not list(quantized_modules(model))


def test_the_folder_names_method_rule_source_reports_and_kept_tensors(tmp_path):
    manifest = quantize_to_folder(
        tiny_llama(), tiny_tokenizer(), QuantPolicy(format="mxfp4", scale_rule="ceil"), tmp_path / "q", source="tiny:llama"
    )
    assert manifest == read_manifest(tmp_path / "q", KIND)
    assert (manifest["format"], manifest["scale_rule"], manifest["method"], manifest["source"]) == ("mxfp4", "ceil", "rtn", "tiny:llama")
    assert manifest["packing"] == "adjacent-low-first"
    report = manifest["reports"]["model.layers.0.mlp.down_proj"]
    assert report["scale_rule"] == "ceil" and report["clipped_blocks"] == 0 and 0 < report["relative_error"] < 0.2
    assert {"tensor": "model.norm.weight", "reason": "not a linear weight", "bytes": 256} in manifest["kept"]


def test_what_the_writer_would_refuse_is_refused_before_the_first_weight_is_quantized(tmp_path):
    """Hours of calibration followed by a failure at save is field case CAL-08."""
    model = tiny_llama()
    for policy in (QuantPolicy(overrides={"*.q_proj": "mxfp4"}), QuantPolicy(ignore=(*DEFAULT_IGNORE, "*.layers.1.mlp.up_proj"))):
        with pytest.raises(FormatError, match="served as one matrix have different formats"):
            quantize_to_folder(model, tiny_tokenizer(), policy, tmp_path / "q")
    assert not list(quantized_modules(model)) and not (tmp_path / "q").exists()
    (tmp_path / "q").mkdir()
    with pytest.raises(FileExistsError):
        quantize_to_folder(model, tiny_tokenizer(), QuantPolicy(), tmp_path / "q")
    assert not list(quantized_modules(model))


# FMT-05: gate amax 0.5, up amax 1.0; q/k/v amax 1.0/0.7/0.2
AMAX = {"gate_proj": 0.5, "up_proj": 1.0, "q_proj": 1.0, "k_proj": 0.7, "v_proj": 0.2}


def test_fmt05_weights_that_are_served_as_one_share_one_global_scale_and_keep_their_precision(tmp_path):
    model = tiny_llama()
    original = {}
    with torch.no_grad():
        for name, module in model.named_modules():
            if (amax := AMAX.get(name.rpartition(".")[2])) is not None:
                module.weight.mul_(amax / module.weight.abs().max())
                original[name] = module.weight.detach().clone()
    quantize_to_folder(model, tiny_tokenizer(), QuantPolicy(), tmp_path / "q")
    stored = load_file(tmp_path / "q" / "model.safetensors")
    for layer in ("model.layers.0", "model.layers.1"):
        for parent, members in (("self_attn", SERVED_TOGETHER[0]), ("mlp", SERVED_TOGETHER[1])):
            scales = {stored[f"{layer}.{parent}.{leaf}.weight_global_scale"].item() for leaf in members}
            # 2688 / 1.0; the maximum was scaled in float32, so it may be a few units off.
            assert len(scales) == 1 and scales.pop() == pytest.approx(2688.0, rel=2**-22)
        other = {stored[f"{layer}.{name}.weight_global_scale"].item() for name in ("self_attn.o_proj", "mlp.down_proj")}
        assert len(other) == 2 and 2688.0 not in other
    _, quantized, _ = read_quantized(tmp_path / "q")
    for name, weight in original.items():
        blocks = weight.reshape(-1, 16)
        amax = blocks.abs().amax(-1, keepdim=True)
        error = (quantized[name].dequantize() - weight).reshape(-1, 16).abs()
        # The stored scale is amax / 6 within 2^-4 (three mantissa bits, normal numbers: amax is above 2^-6 * 6 / 2688 here). Half the largest gap of
        # E2M1 is one scale; a maximum above six scales is clipped by at most 2^-4 of itself.
        assert (amax > 2.0**-6 * 6 / 2688).all()
        assert (error <= amax / 6 * (1 + 2.0**-4) * (1 + 2.0**-20)).all(), name
        # Equalising costs no more than E4M3's rounding: block scales of either are within 2^-4 of the same number, so the errors' norms are close.
        alone = (rtn(weight, FORMATS["nvfp4"])[0].dequantize() - weight).norm()
        assert error.norm() <= alone * (1 + 2.0**-4)


def test_fmt05_a_group_with_a_weight_that_is_not_finite_names_it():
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[0, 3] = float("nan")
    with pytest.raises(FormatError, match=r"model\.layers\.0\.self_attn\.v_proj: weight holds NaN or infinity"):
        quantize_model(model, QuantPolicy())


def test_int3_keeps_its_name_through_a_checkpoint_of_int4_codes(tmp_path):
    model = tiny_llama(hidden_size=128)
    manifest = quantize_to_folder(model, tiny_tokenizer(), QuantPolicy(format="int3-g64"), tmp_path / "q")
    assert manifest["format"] == "int3-g64" and {entry["format"] for entry in manifest["plan"]} == {"int3-g64"}
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    weights = config["config_groups"]["group_0"]["weights"]
    assert (config["format"], weights["num_bits"], weights["group_size"]) == ("pack-quantized", 4, 64)
    spec, quantized, _ = read_quantized(tmp_path / "q")
    assert spec.name == "int3-g64" and {tensor.format.name for tensor in quantized.values()} == {"int3-g64"}
    assert torch.equal(logits(load_quantized_model(tmp_path / "q", dtype=torch.float32)), logits(model))
    (tmp_path / "q" / "manifest.json").unlink()
    spec, quantized, _ = read_quantized(tmp_path / "q")
    assert spec.name == "int4-g64" and {tensor.format.name for tensor in quantized.values()} == {"int4-g64"}
