"""The baselines as PEFT methods: what works for LoRA in PEFT works here, on tiny models of both formats, dense and with fused experts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import PeftConfig, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils.peft_types import PeftType
from torch import nn

from prism_ray.adapters.baselines import BaselineLayer, FP4LoraLinear, PeqaBlockConfig, PeqaConfig, QatLoraConfig
from prism_ray.adapters.methods import ADAPTER_METHODS, AdapterSettings, load_adapter_model
from prism_ray.adapters.peft_types import register
from prism_ray.adapters.scale_qlora.model import trainable_parameters
from prism_ray.calibrate.quantize import quantize_model
from prism_ray.core.errors import ConfigError, GridMismatch, ModelError
from prism_ray.formats.modules import FP4Linear, quantized_modules
from prism_ray.formats.policy import DEFAULT_IGNORE, QuantPolicy
from prism_ray.formats.spec import FP4_FORMATS
from prism_ray.models.tiny import tiny_llama, tiny_qwen3_moe

IDS = torch.tensor([[1, 5, 9, 40, 200, 7], [3, 3, 3, 250, 11, 0]])
OURS = {"qat-lora": QatLoraConfig, "peqa": PeqaConfig, "peqa-block": PeqaBlockConfig}
methods = pytest.mark.parametrize("method", [*OURS, "qlora"])
ours = pytest.mark.parametrize("method", OURS)
both = pytest.mark.parametrize("name", FP4_FORMATS)
QUANTIZED: dict[tuple[str, Any], nn.Module] = {}


def base(name: str = "nvfp4", build: Any = tiny_llama) -> Any:
    """A quantized tiny model, a fresh copy each time."""
    if (name, build) not in QUANTIZED:
        model = build()
        quantize_model(model, QuantPolicy(format=name))
        QUANTIZED[name, build] = model
    return copy.deepcopy(QUANTIZED[name, build])


def adapted(method: str, name: str = "nvfp4", **settings: Any) -> Any:
    torch.manual_seed(0)
    model = base(name)
    return get_peft_model(model, ADAPTER_METHODS[method].build(model, AdapterSettings(**({"rank": 2, "alpha": 4.0} | settings))))


def train(model: Any, steps: int = 6, rate: float = 0.03) -> list[float]:
    optimizer = torch.optim.AdamW(trainable_parameters(model).values(), lr=rate)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits


def planes(model: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    found = quantized_modules(model)
    return {name.removeprefix("base_model.model."): (module.codes.clone(), module.scales.clone()) for name, module in found}


def same(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(torch.equal(a, b) for name in left for a, b in zip(left[name], right[name], strict=True))


def test_each_method_is_registered_once_with_peft():
    for config in OURS.values():
        kind = PeftType(config.METHOD.upper())
        assert PEFT_TYPE_TO_CONFIG_MAPPING[kind] is config
        register(config.METHOD, object, object, "another_")
        assert PEFT_TYPE_TO_CONFIG_MAPPING[kind] is config
    assert PeftType("LORA") is PeftType.LORA


@both
@methods
def test_training_starts_at_the_base_lowers_the_loss_and_moves_no_plane(method, name):
    expected, before = logits(base(name)), planes(base(name))
    model = adapted(method, name)
    assert torch.equal(logits(model), expected)
    trainable = trainable_parameters(model)
    assert len(trainable) == 14 * (2 if "lora" in method else 1)
    assert all(parameter.dtype == torch.float32 and parameter.grad is None for parameter in trainable.values())
    shapes = [module._shape for _, module in quantized_modules(model)]
    counted = sum(ADAPTER_METHODS[method].count((o, i, i // (16 if name == "nvfp4" else 32)), 2) for o, i in shapes)
    assert sum(parameter.numel() for parameter in trainable.values()) == counted
    losses = train(model)
    assert losses[-1] < losses[0] - 0.1, losses
    assert same(planes(model), before)
    assert not torch.equal(logits(model), expected)
    with model.disable_adapter():
        assert torch.equal(logits(model), expected)


@both
@methods
def test_saved_adapters_give_equal_logits(method, name, tmp_path):
    model = adapted(method, name)
    train(model, 2)
    model.save_pretrained(tmp_path)
    loaded = load_adapter_model(base(name), tmp_path)
    assert torch.equal(logits(loaded), logits(model.eval())) and not trainable_parameters(loaded)
    again = load_adapter_model(base(name), tmp_path, trainable=True)
    assert trainable_parameters(again).keys() == trainable_parameters(model).keys()
    config = PeftConfig.from_pretrained(tmp_path)
    if method == "qlora":
        assert config.peft_type == PeftType.LORA  # an ordinary adapter, which any server of LoRA reads
    else:
        assert isinstance(config, OURS[method]) and config.grid == ("e4m3" if name == "nvfp4" else "e8m0")


@methods
def test_several_named_adapters_switch_disable_and_delete(method):
    model = adapted(method)
    plain = logits(base())
    train(model, 2)
    first = logits(model)
    model.add_adapter("second", ADAPTER_METHODS[method].build(base(), AdapterSettings(rank=1, alpha=1.0)))
    assert torch.equal(logits(model), first)  # adding does not activate
    model.set_adapter("second")
    assert torch.equal(logits(model), plain)
    assert all(".second" in key for key in trainable_parameters(model))
    train(model, 3)
    second = logits(model)
    assert not torch.equal(second, first) and not torch.equal(second, plain)
    with model.disable_adapter():
        assert torch.equal(logits(model), plain)
    model.set_adapter("default")
    assert torch.equal(logits(model), first)
    model.delete_adapter("second")
    assert not any(".second" in key for key, _ in model.named_parameters())
    assert torch.equal(logits(model), first)


@both
@ours
def test_a_merge_in_place_is_undone_to_the_byte(method, name):
    model = adapted(method, name)
    train(model, rate=0.2)  # E8M0 swallows factors below sqrt 2
    before, unmerged = planes(model), logits(model)
    model.merge_adapter()
    merged = planes(model)
    assert not same(merged, before)
    codes_kept = all(torch.equal(merged[path][0], before[path][0]) for path in before)
    assert codes_kept is (method != "qat-lora")
    if method == "qat-lora":
        assert torch.equal(logits(model), unmerged)
    else:
        assert not torch.equal(logits(model), unmerged)
    model.unmerge_adapter()
    assert same(planes(model), before) and torch.equal(logits(model), unmerged)
    # PEFT's unload gives back the base, and merge_and_unload a model of planes alone.
    assert same(planes(copy.deepcopy(model).unload()), before)
    alone = model.merge_and_unload()
    assert same(planes(alone), merged) and not any(isinstance(module, BaselineLayer) for module in alone.modules())


def test_lora_refuses_to_merge_in_place():
    model = adapted("qlora")
    assert all(isinstance(module, FP4LoraLinear) for module in model.modules() if hasattr(module, "lora_A"))
    with pytest.raises(ModelError, match="posthoc"):
        model.merge_adapter()


@both
@ours
def test_experts_train_and_switch_as_linears_do(method, name):
    expected, before = logits(base(name, tiny_qwen3_moe)), planes(base(name, tiny_qwen3_moe))
    torch.manual_seed(0)
    options = {"r": 2, "alpha": 4.0} if method == "qat-lora" else {}
    model = get_peft_model(base(name, tiny_qwen3_moe), OURS[method](experts=True, **options))
    layers = [module for module in model.modules() if isinstance(module, BaselineLayer)]
    assert len(layers) == len(before) and sum(layer.base_layer.scales.ndim == 3 for layer in layers) == 4
    assert torch.equal(logits(model), expected)
    with torch.enable_grad():  # the lazy path of training
        assert torch.equal(model(input_ids=IDS).logits.detach(), expected)
    losses = train(model)
    assert losses[-1] < losses[0] - 0.1 and same(planes(model), before)
    trained = logits(model)
    # The two forwards differ in the order of operations only for PEQA, which multiplies outputs in one and weights in the other.
    lazy = model(input_ids=IDS).logits.detach()
    assert torch.equal(lazy, trained) if method != "peqa" else torch.allclose(lazy, trained, atol=1e-4)
    with model.disable_adapter():
        assert torch.equal(logits(model), expected)
    model.merge_adapter()
    assert torch.equal(logits(model), trained) is (method == "qat-lora")
    model.unmerge_adapter()
    assert same(planes(model), before)


@ours
def test_an_experts_gradient_is_that_of_its_own_rows(method):
    """Each expert's gradient through the model against the same rows through a linear layer of that expert alone."""
    options = {"r": 2, "alpha": 4.0} if method == "qat-lora" else {}
    model = get_peft_model(base("nvfp4", tiny_qwen3_moe), OURS[method](target_modules=["down_proj"], **options))
    layer = next(module for module in model.modules() if isinstance(module, BaselineLayer))
    seen: dict[int, list[torch.Tensor]] = {}
    rule = next(iter(layer.rules.values()))
    original = type(rule).multiply

    def spy(self: Any, x: torch.Tensor, planes: Any, parameters: Any) -> torch.Tensor:
        y = original(self, x, planes, parameters)
        if planes.module is layer.base_layer:
            y.register_hook(lambda grad: seen.setdefault(planes.expert, []).extend([x.detach(), grad]))
        return y

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(rule), "multiply", spy)
        model(input_ids=IDS, labels=IDS).loss.backward()
    assert seen
    for weight in layer.adapted("default"):
        parameters = tuple(parameter.clone().requires_grad_() for parameter in weight.parameters)
        found = [parameter.grad[weight.expert] for parameter in layer.parameters_of("default")]
        if weight.expert not in seen:
            assert all((grad == 0).all() for grad in found)
            continue
        x, grad = seen[weight.expert]
        rule.multiply(x, weight.layer_planes, parameters).backward(grad)
        assert all(torch.equal(a.grad, b) for a, b in zip(parameters, found, strict=True))


@ours
def test_what_cannot_be_adapted_is_refused_in_one_line(method):
    config = OURS[method]
    cases = [
        (lambda: base("int4-g32"), {}, GridMismatch, "int4-g32"),
        (base, {"target_modules": ["lm_head"]}, ModelError, "lm_head"),
        (tiny_llama, {}, ModelError, "no FP4"),
        (lambda: base("mxfp4"), {"grid": "e4m3"}, GridMismatch, "e4m3"),
    ]
    for build, options, error, words in cases:
        with pytest.raises(error, match=words) as caught:
            get_peft_model(build(), config(**options))
        assert "\n" not in str(caught.value)
    model = adapted(method)
    model.add_adapter("second", config())
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ConfigError, match="at once"):
        logits(model)


def test_lora_over_planes_takes_linears_only_and_any_format():
    model = get_peft_model(base("int4-g32"), ADAPTER_METHODS["qlora"].build(base("int4-g32"), AdapterSettings(rank=2, alpha=4.0)))
    losses = train(model)
    assert losses[-1] < losses[0] - 0.1
    moe = base("nvfp4", tiny_qwen3_moe)
    with pytest.raises(ModelError, match="experts"):
        ADAPTER_METHODS["qlora"].build(moe, AdapterSettings(rank=2, alpha=4.0, target_modules=("down_proj",)))
    peft = get_peft_model(moe, ADAPTER_METHODS["qlora"].build(moe, AdapterSettings(rank=2, alpha=4.0)))
    assert sum(isinstance(module, FP4LoraLinear) for module in peft.modules()) == 8


@methods
def test_without_targets_only_fp4_layers_are_taken_where_others_share_their_names(method):
    model = tiny_llama()
    quantize_model(model, QuantPolicy(ignore=(*DEFAULT_IGNORE, "model.layers.0.*")))
    peft = get_peft_model(model, ADAPTER_METHODS[method].build(model, AdapterSettings(rank=2, alpha=4.0)))
    layers = [path for path, module in peft.get_base_model().named_modules() if isinstance(module, (BaselineLayer, FP4LoraLinear))]
    assert len(layers) == 7 and all(path.startswith("model.layers.1.") for path in layers)
    assert all(isinstance(module.base_layer, FP4Linear) for module in peft.modules() if isinstance(module, FP4LoraLinear))
