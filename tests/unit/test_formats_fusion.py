"""prism_ray.formats.fusion: the architecture map of projections that are served as one matrix (FMT-05), on names and on models."""

from __future__ import annotations

import pytest
from torch import nn

from prism_ray.core.errors import FormatError
from prism_ray.formats.fusion import FUSED, fused_groups, require_uniform
from prism_ray.models.tiny import tiny_llama, tiny_qwen3_moe


def test_a_llama_layer_has_two_groups_and_two_weights_alone():
    names = [name for name, module in tiny_llama(num_layers=1).named_modules() if isinstance(module, nn.Linear)]
    layer = "model.layers.0"
    assert fused_groups(names) == [
        (f"{layer}.self_attn.q_proj", f"{layer}.self_attn.k_proj", f"{layer}.self_attn.v_proj"),
        (f"{layer}.self_attn.o_proj",),
        (f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"),
        (f"{layer}.mlp.down_proj",),
        ("lm_head",),
    ]


def test_groups_never_cross_a_parent_and_members_have_the_order_of_the_map():
    names = ["b.up_proj", "a.v_proj", "a.gate_proj", "b.gate_proj", "a.q_proj", "c.up_proj", "q_proj", "k_proj"]
    assert fused_groups(names) == [
        ("b.gate_proj", "b.up_proj"),
        ("a.q_proj", "a.v_proj"),
        ("a.gate_proj",),
        ("c.up_proj",),
        ("q_proj", "k_proj"),
    ]
    assert fused_groups([]) == []


def test_experts_latent_attention_and_keys_that_are_values():
    names = ["m.experts.0.gate_proj", "m.experts.1.gate_proj", "m.experts.0.up_proj", "m.experts.1.up_proj", "m.experts.0.down_proj"]
    assert fused_groups(names) == [
        ("m.experts.0.gate_proj", "m.experts.0.up_proj"),
        ("m.experts.1.gate_proj", "m.experts.1.up_proj"),
        ("m.experts.0.down_proj",),
    ]
    names = ["a.q_a_proj", "a.q_b_proj", "a.kv_a_proj_with_mqa", "a.kv_b_proj", "a.o_proj"]
    assert fused_groups(names)[0] == ("a.q_a_proj", "a.kv_a_proj_with_mqa") and len(fused_groups(names)) == 4
    assert fused_groups(["a.q_proj", "a.k_proj", "a.o_proj"]) == [("a.q_proj", "a.k_proj"), ("a.o_proj",)]


def test_fused_expert_parameters_stay_alone():
    names = [f"model.layers.0.mlp.experts.{leaf}" for leaf in ("gate_up_proj", "down_proj")]
    assert set(names) <= dict(tiny_qwen3_moe().named_parameters()).keys()
    assert fused_groups(names) == [(name,) for name in names]


def test_no_leaf_is_in_two_groups():
    leaves = [leaf for group in FUSED for leaf in group]
    assert len(leaves) == len(set(leaves))


def test_a_group_of_several_formats_is_refused_with_its_members():
    require_uniform({"a.q_proj": "nvfp4", "a.k_proj": "nvfp4", "b.q_proj": "mxfp4", "c.k_proj": None, "c.q_proj": None})
    with pytest.raises(FormatError, match=r"^a: projections .* \(q_proj nvfp4, k_proj full precision\); give them one format"):
        require_uniform({"a.k_proj": None, "a.q_proj": "nvfp4", "b.q_proj": "mxfp4"})
