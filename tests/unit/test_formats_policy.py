"""prism_ray.formats.policy: which tensors a plan holds, and that every doubt is raised before anything is read or changed (CAL-04, CAL-08)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from prism_ray.core.errors import ConfigError, FormatError, ModelError
from prism_ray.formats.policy import DEFAULT_IGNORE, QuantPolicy, expert_parameters, make_plan
from prism_ray.models.tiny import tiny_llama, tiny_qwen3_moe


class Named(nn.Module):
    """Linear layers of given shapes under given names; a dot nests."""

    def __init__(self, **shapes: tuple[int, int]):
        super().__init__()
        for name, (rows, columns) in shapes.items():
            self.add_module(name, nn.Linear(columns, rows, bias=False))


class FusedExperts(nn.Module):
    """CAL-04: two 3-D parameters, no Linear inside."""

    def __init__(self, **shapes: tuple[int, ...]):
        super().__init__()
        self.proj = nn.Linear(32, 32, bias=False)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(*shape)))


def test_a_llama_plan_holds_every_linear_but_the_head_and_lists_what_stays():
    model = tiny_llama()
    plan = make_plan(model, QuantPolicy())
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"}
    assert [entry.name for entry in plan.entries] == list(linears)
    assert all(entry.shape == tuple(linears[entry.name].weight.shape) and entry.format == "nvfp4" for entry in plan.entries)
    assert plan.ignored_linears == ["lm_head"]
    kept = {name: (reason, size) for name, reason, size in plan.kept}
    assert kept["lm_head"] == ("linear: ignored", model.lm_head.weight.numel() * 4)
    assert kept["model.norm.weight"] == ("not a linear weight", 64 * 4)


def test_an_untied_model_lists_the_embedding_and_the_head():
    model = tiny_llama(tie=False)
    kept = {name for name, _, _ in make_plan(model, QuantPolicy()).kept}
    assert {"lm_head", "model.embed_tokens.weight"} <= kept


@pytest.mark.parametrize("model", [tiny_llama(), tiny_llama(tie=False), tiny_qwen3_moe()], ids=["tied", "untied", "moe"])
def test_every_parameter_is_either_planned_or_kept(model):
    plan = make_plan(model, QuantPolicy())
    listed = [entry.name for entry in plan.entries] + [name for name, _, _ in plan.kept]
    by_name = dict(model.named_parameters(remove_duplicate=False))
    found = [id(by_name[name if name in by_name else f"{name}.weight"]) for name in listed]
    assert sorted(found) == sorted(id(parameter) for parameter in model.parameters())


def test_fused_experts_are_planned_and_routers_are_not():
    model = tiny_qwen3_moe()
    plan = make_plan(model, QuantPolicy(format="mxfp4"))
    shapes = {entry.name: entry.shape for entry in plan.entries}
    assert shapes["model.layers.0.mlp.experts.gate_up_proj"] == (4, 64, 64)
    assert shapes["model.layers.1.mlp.experts.down_proj"] == (4, 64, 32)
    assert not any(name.endswith(".gate") or "norm" in name or "embed" in name or "lm_head" in name for name in shapes)
    assert len(shapes) == 2 * (4 + 2)
    assert "model.layers.0.mlp.gate.weight" in {name for name, _, _ in plan.kept}


def test_cal04_experts_without_any_linear_inside_are_planned():
    model = FusedExperts(gate_up_proj=(4, 64, 32), down_proj=(4, 32, 32))
    assert expert_parameters(model) == ["gate_up_proj", "down_proj"] and expert_parameters(model.proj) == []
    plan = make_plan(nn.ModuleDict({"experts": model}), QuantPolicy())
    assert {entry.name: entry.shape for entry in plan.entries} == {
        "experts.proj": (32, 32),
        "experts.gate_up_proj": (4, 64, 32),
        "experts.down_proj": (4, 32, 32),
    }


def test_cal04_an_unknown_large_parameter_fails_the_plan():
    model = nn.ModuleDict({"experts": FusedExperts(w1=(4, 64, 32))})
    with pytest.raises(
        ModelError, match=r"experts\.w1: parameter of 8,192 values \(88\.9% of the model\) is neither quantized nor ignored"
    ):
        make_plan(model, QuantPolicy())
    plan = make_plan(model, QuantPolicy(ignore=(*DEFAULT_IGNORE, "*.w1")))
    assert ("experts.w1", "not a linear weight", 8192 * 4) in plan.kept


def test_a_small_unknown_parameter_is_kept_and_listed():
    model = nn.ModuleDict({"body": FusedExperts(scale=(2, 4))})  # 8 of 1032 values: below 1 %
    assert ("body.scale", "not a linear weight", 32) in make_plan(model, QuantPolicy()).kept


def test_transposed_experts_are_refused_by_name():
    model = nn.ModuleDict({"experts": FusedExperts(gate_up_proj=(4, 32, 64))})
    model["experts"].is_transposed = True
    with pytest.raises(ModelError, match="experts: experts of FusedExperts are stored transposed"):
        make_plan(model, QuantPolicy())


# CAL-08
def test_every_offending_layer_is_listed_with_columns_block_and_what_fits():
    model = Named(a=(8, 768), b=(8, 200), c=(8, 48), d=(8, 64))
    with pytest.raises(FormatError) as raised:
        make_plan(model, QuantPolicy(format="mxfp4"))
    text = str(raised.value)
    assert "2 layer(s) do not divide into blocks" in text
    assert "b (200 columns, mxfp4 block 32; exclude the layer: no format fits)" in text
    assert "c (48 columns, mxfp4 block 32; formats that fit: nvfp4)" in text
    assert "a (" not in text and "d (" not in text
    assert "override their format or set keep_indivisible" in text and "\n" not in text


def test_the_override_is_honoured_before_the_check():
    model = Named(c=(8, 48), d=(8, 64))
    plan = make_plan(model, QuantPolicy(format="mxfp4", overrides={"c": "nvfp4"}))
    assert {entry.name: entry.format for entry in plan.entries} == {"c": "nvfp4", "d": "mxfp4"}
    # ... in the other direction it makes a layer offend that the default would not.
    with pytest.raises(FormatError, match=r"c \(48 columns, mxfp4 block 32"):
        make_plan(model, QuantPolicy(format="nvfp4", overrides={"c": "mxfp4"}))


def test_an_override_brings_an_ignored_layer_back_and_the_first_match_wins():
    policy = QuantPolicy(overrides={"lm_*": "mxfp4", "*head": "nvfp4"})
    assert policy.format_of("lm_head") == "mxfp4" and policy.format_of("other.head") == "nvfp4"
    assert policy.format_of("model.embed_tokens") is None


def test_keep_indivisible_reports_the_layer_and_its_bytes():
    model = Named(b=(8, 200), d=(8, 64)).to(torch.bfloat16)
    plan = make_plan(model, QuantPolicy(keep_indivisible=True))
    assert [entry.name for entry in plan.entries] == ["d"]
    assert plan.kept == (("b", "linear: 200 columns do not divide into nvfp4 blocks of 16", 8 * 200 * 2),)
    assert plan.ignored_linears == ["b"]


def test_a_policy_that_quantizes_nothing_is_refused():
    with pytest.raises(ModelError, match="the policy quantizes nothing"):
        make_plan(tiny_llama(), QuantPolicy(ignore=("*",)))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"format": "fp4"}, "unknown format 'fp4'"),
        ({"overrides": {"*.q_proj": "nvfp5"}}, "unknown format 'nvfp5'.*nvfp4"),
        ({"scale_rule": "closest"}, "no scale rule 'closest'"),
        ({"format": "mxfp4", "scale_rule": "nearest"}, "no scale rule 'nearest'.*even"),
        ({"overrides": {"*.q_proj": "mxfp4"}, "scale_rule": "floor"}, "no scale rule 'floor'.*nearest"),
    ],
)
def test_unknown_formats_and_rules_fail_the_plan_by_name(policy, message):
    with pytest.raises(ConfigError, match=message) as raised:
        make_plan(tiny_llama(), QuantPolicy(**policy))
    assert "\n" not in str(raised.value)
