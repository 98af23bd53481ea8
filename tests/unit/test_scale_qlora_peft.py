"""Scale-QLoRA as a PEFT method: everything that works for LoRA in PEFT works here, exactly, on tiny models of both formats."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils.peft_types import PeftType
from safetensors.torch import load_file
from torch import nn

from prism_ray.adapters.scale_qlora import ScaleQLoraConfig, ScaleQLoraLinear
from prism_ray.adapters.scale_qlora.model import trainable_parameters
from prism_ray.adapters.scale_qlora.register import register
from prism_ray.calibrate.quantize import quantize_model
from prism_ray.core.errors import ConfigError, FormatError, GridMismatch, ModelError
from prism_ray.formats.modules import FP4Linear, planes, quantized_modules, set_code_storage
from prism_ray.formats.policy import DEFAULT_IGNORE, QuantPolicy
from prism_ray.formats.spec import FORMATS, FP4_FORMATS
from prism_ray.models.tiny import tiny_llama, tiny_qwen3_moe

IDS = torch.tensor([[1, 5, 9, 40, 200, 7], [3, 3, 3, 250, 11, 0]])
both = pytest.mark.parametrize("name", FP4_FORMATS)
QUANTIZED: dict[str, nn.Module] = {}


def base(name: str = "nvfp4"):
    """A quantized tiny Llama, a fresh copy each time."""
    if name not in QUANTIZED:
        model = tiny_llama()
        quantize_model(model, QuantPolicy(format=name))
        QUANTIZED[name] = model
    return copy.deepcopy(QUANTIZED[name])


def train(model, adapter: str = "default", seed: int = 0, std: float = 0.5) -> None:
    """Stand in for training: a B that moves a good share of the scale bytes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, ScaleQLoraLinear) and adapter in module.qast_B:
                shape = module.qast_B[adapter].shape
                module.qast_B[adapter].copy_(torch.randn(shape, generator=generator) * std)


def adapted(name: str = "nvfp4", seed: int = 0, **options):
    model = get_peft_model(base(name), ScaleQLoraConfig(r=2, alpha=2.0, **options))
    train(model, seed=seed)
    return model.eval()


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(input_ids=IDS).logits


def scale_plane(model) -> dict[str, torch.Tensor]:
    return {name: module.scales.clone() for name, module in quantized_modules(model)}


def test_the_method_is_registered_once_with_peft():
    register()
    kind = PeftType("SCALE_QLORA")
    assert kind is PeftType.SCALE_QLORA and kind == "SCALE_QLORA" and kind in list(PeftType)
    assert PEFT_TYPE_TO_CONFIG_MAPPING[kind] is ScaleQLoraConfig
    assert PeftType("LORA") is PeftType.LORA and kind != PeftType.LORA
    assert json.dumps({"peft_type": kind}) == '{"peft_type": "SCALE_QLORA"}'


@both
@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3_moe])
def test_an_untrained_adapter_is_the_base_bit_for_bit(name, build):
    model = build()
    quantize_model(model, QuantPolicy(format=name))
    expected = logits(model)
    linears = sorted(path for path, module in quantized_modules(model) if isinstance(module, FP4Linear))
    peft = get_peft_model(model, ScaleQLoraConfig(r=2))
    assert torch.equal(logits(peft), expected)
    # Every FP4Linear is a target, nothing else is, and only A and B train.
    layers = [path for path, module in peft.get_base_model().named_modules() if isinstance(module, ScaleQLoraLinear)]
    assert sorted(layers) == linears
    trainable = trainable_parameters(peft)
    assert len(trainable) == 2 * len(linears) and all(".qast_A.default" in key or ".qast_B.default" in key for key in trainable)
    assert all(parameter.dtype == torch.float32 for parameter in trainable.values())
    assert peft.peft_config["default"].grid == FORMATS[name].grid.name
    shapes = {key: tuple(value.shape) for key, value in trainable.items()}
    groups = 64 // FORMATS[name].block
    assert shapes["base_model.model.model.layers.0.self_attn.q_proj.qast_A.default"] == (2, groups)
    assert shapes["base_model.model.model.layers.0.self_attn.q_proj.qast_B.default"] == (64, 2)


@both
def test_saved_and_loaded_adapters_give_equal_logits(name, tmp_path):
    model = adapted(name)
    assert not torch.equal(logits(model), logits(base(name)))
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert saved and all(key.endswith((".qast_A", ".qast_B")) for key in saved)
    assert set(saved) == set(get_peft_model_state_dict(model))
    config = PeftConfig.from_pretrained(tmp_path)
    assert isinstance(config, ScaleQLoraConfig)
    assert (config.r, config.alpha, config.grid, config.peft_type) == (2, 2.0, FORMATS[name].grid.name, PeftType.SCALE_QLORA)
    loaded = PeftModel.from_pretrained(base(name), tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    assert not trainable_parameters(loaded)
    resumed = PeftModel.from_pretrained(base(name), tmp_path, is_trainable=True)
    assert set(trainable_parameters(resumed)) == set(trainable_parameters(model))


def test_fingerprints_of_the_base_travel_with_the_adapter(tmp_path):
    model = adapted(code_plane="c" * 64, scale_plane="s" * 64)
    model.save_pretrained(tmp_path)
    config = PeftConfig.from_pretrained(tmp_path)
    assert (config.code_plane, config.scale_plane) == ("c" * 64, "s" * 64)


@both
def test_several_named_adapters_switch_disable_and_delete(name, tmp_path):
    model = adapted(name, seed=1)
    plain, first = logits(base(name)), logits(model)
    model.add_adapter("second", ScaleQLoraConfig(r=1, alpha=3.0))
    assert torch.equal(logits(model), first)  # adding does not activate
    train(model, "second", seed=2)
    model.set_adapter("second")
    second = logits(model)
    assert not torch.equal(first, second) and not torch.equal(second, plain)
    assert all(".second" in key for key in trainable_parameters(model))
    with model.disable_adapter():
        assert torch.equal(logits(model), plain)
    assert torch.equal(logits(model), second)
    model.set_adapter("default")
    assert torch.equal(logits(model), first)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base(name), tmp_path)
    loaded.load_adapter(tmp_path / "second", adapter_name="second")
    assert torch.equal(logits(loaded), first)
    loaded.set_adapter("second")
    assert torch.equal(logits(loaded), second)
    model.delete_adapter("default")
    model.set_adapter("second")
    assert torch.equal(logits(model), second)
    assert not any("default" in key for key in model.state_dict())


def test_two_active_adapters_are_refused_in_one_line():
    model = adapted()
    model.add_adapter("second", ScaleQLoraConfig(r=1))
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ConfigError, match=r"q_proj: adapters \['default', 'second'\] are active at once; .* activate one") as raised:
        logits(model)
    assert "\n" not in str(raised.value)
    with pytest.raises(ConfigError, match="cannot merge"):
        model.merge_adapter(["default", "second"])


def test_an_adapter_on_some_layers_leaves_the_others_at_the_base():
    model = adapted(target_modules=["q_proj"], layers_to_transform=[1])
    layers = [path for path, module in model.get_base_model().named_modules() if isinstance(module, ScaleQLoraLinear)]
    assert layers == ["model.layers.1.self_attn.q_proj"]
    model.add_adapter("second", ScaleQLoraConfig(r=1, target_modules=["v_proj"]))
    train(model, "second")
    model.set_adapter("second")
    second = logits(model)
    model.set_adapter("default")
    assert not torch.equal(logits(model), second)
    assert not torch.equal(logits(model), logits(base()))


@both
def test_merging_and_unmerging_in_place_is_byte_exact(name):
    model = adapted(name)
    model.add_adapter("second", ScaleQLoraConfig(r=1))
    expected, before = logits(model), scale_plane(model)
    layers = {path: module for path, module in model.named_modules() if isinstance(module, ScaleQLoraLinear)}
    wanted = {path: layer.scale_bytes("default") for path, layer in layers.items()}
    model.merge_adapter()
    assert all(torch.equal(layer.base_layer.scales, wanted[path]) for path, layer in layers.items())
    assert any(not torch.equal(after, before[path]) for path, after in scale_plane(model).items())
    assert torch.equal(logits(model), expected)
    # While merged, an adapter's bytes are still those over the base, not over the merged plane.
    assert all(torch.equal(layer.scale_bytes("default"), wanted[path]) for path, layer in layers.items())
    with pytest.raises(ConfigError, match=r"cannot merge \['second'\] over \['default'\]"):
        model.merge_adapter(["second"])
    for _ in range(5):
        model.unmerge_adapter()
        model.merge_adapter()
    model.unmerge_adapter()
    assert all(torch.equal(after, before[path]) for path, after in scale_plane(model).items())
    assert torch.equal(logits(model), expected)


@both
def test_disabling_a_merged_adapter_gives_the_base(name):
    model = adapted(name)
    model.merge_adapter()
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(base(name)))


@both
def test_merge_and_unload_leaves_plain_quantized_modules(name):
    model = adapted(name)
    expected = logits(model)
    merged = model.merge_and_unload()
    assert not any(isinstance(module, ScaleQLoraLinear) for module in merged.modules())
    assert torch.equal(logits(merged), expected)
    for path, module in quantized_modules(base(name)):
        assert torch.equal(planes(merged)[path].codes, module.codes)
    unloaded = adapted(name).unload()
    assert torch.equal(logits(unloaded), logits(base(name)))


def test_merging_non_finite_factors_is_refused_and_changes_nothing():
    model = adapted()
    before = scale_plane(model)
    layer = next(module for module in reversed(list(model.modules())) if isinstance(module, ScaleQLoraLinear))
    with torch.no_grad():
        layer.qast_B["default"][0, 0] = float("nan")
    with pytest.raises(FormatError, match="adapter factors hold NaN or infinity"):
        layer.merge()
    assert all(torch.equal(after, before[path]) for path, after in scale_plane(model).items())


@both
def test_non_finite_factors_show_in_the_output_of_the_layer(name):
    """Of the layer, not of the model: torch's attention on CPUs gives zeros for NaN queries, so a loss may look normal."""
    for layer in (module for module in adapted(name).modules() if isinstance(module, ScaleQLoraLinear)):
        with torch.no_grad():
            layer.qast_B["default"][3] = float("nan")
            y = layer(torch.ones(1, layer.in_features))
        assert y.isnan().nonzero().tolist() == [[0, 3]]


def test_an_adapter_of_the_other_grid_is_refused_and_the_model_left_alone(tmp_path):
    adapted("nvfp4").save_pretrained(tmp_path)
    model = base("mxfp4")
    expected = logits(model)
    with pytest.raises(GridMismatch, match=r"q_proj: adapter was trained on grid e4m3, this weight has e8m0 scales") as raised:
        PeftModel.from_pretrained(model, tmp_path)
    assert "\n" not in str(raised.value)
    assert not any(isinstance(module, ScaleQLoraLinear) for module in model.modules())
    assert torch.equal(logits(model), expected)


def test_an_integer_format_is_refused_by_name_and_the_model_left_alone():
    model = tiny_llama()
    quantize_model(model, QuantPolicy(format="int4-g64"))
    expected = logits(model)
    with pytest.raises(
        GridMismatch, match=r"q_proj: scale adapters are for FP4 formats, this weight is int4-g64; quantize the base"
    ) as raised:
        get_peft_model(model, ScaleQLoraConfig(r=1))
    assert "\n" not in str(raised.value)
    assert not any(isinstance(module, ScaleQLoraLinear) for module in model.modules())
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("rank", [0, -1, 1.5, True, "4", None])
def test_a_rank_that_is_no_positive_number_is_one_line(rank):
    with pytest.raises(ConfigError, match="r: rank must be a whole number of at least 1, got") as raised:
        ScaleQLoraConfig(r=rank)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("alpha", [float("nan"), float("inf"), "8", None])
def test_an_alpha_that_is_no_finite_number_is_one_line(alpha):
    with pytest.raises(ConfigError, match="alpha: must be a finite number, got"):
        ScaleQLoraConfig(alpha=alpha)


def narrow_down_proj(name: str):
    """Hidden 64 and intermediate 32: down_proj has half the blocks of q_proj, which comes first in the order of modules."""
    model = tiny_llama(intermediate_size=32)
    quantize_model(model, QuantPolicy(format=name))
    return model


@pytest.mark.parametrize(("name", "rank", "blocks"), [("nvfp4", 3, 2), ("nvfp4", 9, 4), ("mxfp4", 2, 1)])
def test_a_rank_above_the_block_count_is_one_line_and_changes_nothing(name, rank, blocks):
    model = narrow_down_proj(name)
    expected = logits(model)
    with pytest.raises(ConfigError, match=rf"_proj: rank {rank} exceeds the {blocks} scale blocks of a row .*at most {blocks}") as raised:
        get_peft_model(model, ScaleQLoraConfig(r=rank))
    assert "\n" not in str(raised.value)
    assert not any(isinstance(module, ScaleQLoraLinear) for module in model.modules())
    assert torch.equal(logits(model), expected)


def test_a_second_adapter_that_does_not_fit_leaves_the_first_alone():
    model = get_peft_model(narrow_down_proj("nvfp4"), ScaleQLoraConfig(r=1))
    train(model)
    expected = logits(model)
    with pytest.raises(ConfigError, match=r"down_proj: rank 3 exceeds the 2 scale blocks"):
        model.add_adapter("second", ScaleQLoraConfig(r=3))
    assert list(model.peft_config) == ["default"]
    assert not any("second" in key for key in model.state_dict())
    assert torch.equal(logits(model), expected)


def test_a_rank_that_fits_the_chosen_layers_is_accepted():
    model = get_peft_model(base(), ScaleQLoraConfig(r=8, target_modules=["down_proj"]))
    assert torch.equal(logits(model), logits(base()))


def test_a_model_without_planes_is_refused_with_the_remedy():
    with pytest.raises(ModelError, match=r"no FP4 linear layer.*quantize it first"):
        get_peft_model(tiny_llama(), ScaleQLoraConfig())


def test_a_target_that_is_no_fp4_layer_is_refused_by_name():
    model = base()
    with pytest.raises(ModelError, match=r"lm_head: target is a Linear, not a quantized linear layer"):
        get_peft_model(model, ScaleQLoraConfig(r=1, target_modules=["q_proj", "lm_head"]))
    assert not any(isinstance(module, ScaleQLoraLinear) for module in model.modules())


def test_without_targets_only_fp4_layers_are_taken_where_others_share_their_names():
    """A first layer kept in full precision, as many recipes do: its q_proj is no target."""
    model = tiny_llama()
    quantize_model(model, QuantPolicy(ignore=(*DEFAULT_IGNORE, "model.layers.0.*")))
    expected = logits(model)
    peft = get_peft_model(model, ScaleQLoraConfig(r=2))
    layers = [path for path, module in peft.get_base_model().named_modules() if isinstance(module, ScaleQLoraLinear)]
    assert len(layers) == 7 and all(path.startswith("model.layers.1.") for path in layers)
    assert torch.equal(logits(peft), expected)


def test_lora_still_works_after_the_registration():
    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    assert model.peft_config["default"].peft_type == "LORA"
    assert all("lora_" in key for key in trainable_parameters(model))


@both
def test_codes_as_parameters_give_the_same_bits_and_survive_a_state_round_trip(name):
    model = adapted(name)
    expected = logits(model)
    adapter = {key: value.clone() for key, value in get_peft_model_state_dict(model).items()}
    set_code_storage(model, "parameter")
    assert torch.equal(logits(model), expected)
    codes = {key: value for key, value in model.named_parameters() if key.endswith(".codes")}
    assert len(codes) == 14 and all(value.dtype == torch.bfloat16 and not value.requires_grad for value in codes.values())
    assert not any(key.endswith(".codes") for key, _ in model.named_buffers())
    state = {key: value.clone() for key, value in model.state_dict().items()}
    other = adapted(name, seed=9)
    set_code_storage(other, "parameter")
    with torch.no_grad():
        for key, value in other.named_parameters():
            if key.endswith(".codes"):
                value.zero_()
    other.load_state_dict(state)
    assert torch.equal(logits(other), expected)
    after = get_peft_model_state_dict(model)
    assert set(after) == set(adapter) and all(torch.equal(after[key], adapter[key]) for key in adapter)
    set_code_storage(model, "buffer")
    assert torch.equal(logits(model), expected)
    original = dict(quantized_modules(base(name)))
    for path, module in quantized_modules(model.get_base_model()):
        assert module.codes.dtype == torch.uint8 and torch.equal(module.codes, original[path].codes)


def test_bit_patterns_that_are_nan_as_bfloat16_survive():
    """Code bytes 0xFF are NaN when viewed as bfloat16: only copies may touch them, never arithmetic."""
    model = base()
    module = next(module for _, module in quantized_modules(model))
    module.codes.fill_(0xFF)
    set_code_storage(model, "parameter")
    clone = copy.deepcopy(model)
    clone.load_state_dict(model.state_dict())
    assert (next(module for _, module in quantized_modules(clone)).code_bytes == 0xFF).all()
