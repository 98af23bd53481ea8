"""Recurrences: known families by their module names and config fields, unknown ones by counting calls."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from prism_ray.core.errors import ModelError
from prism_ray.models.looped import looped_lm
from prism_ray.models.loops import count_calls, find_loop, require_known_loop, run_loop, unknown_recurrence
from prism_ray.models.tiny import tiny_llama, tiny_qwen3_moe

H = 8


class Huginn(nn.Module):
    """Module names, config fields and the num_steps pair of Huginn, with linear blocks that return a tuple; draws its state in every call."""

    def __init__(self, **config):
        super().__init__()
        self.config = SimpleNamespace(model_type="huginn_raven", n_embd=H, mean_recurrence=5, **config)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(16, H),
                "prelude": nn.ModuleList([nn.Linear(H, H)]),
                "adapter": nn.Linear(2 * H, H),
                "core_block": nn.ModuleList([nn.Linear(H, H), nn.Linear(H, H)]),
                "coda": nn.ModuleList([nn.Linear(H, H)]),
            }
        )

    def forward(self, input_ids, num_steps=None, use_cache=True):
        free, graded = num_steps if num_steps is not None else (0, self.config.mean_recurrence)
        e = self.transformer["prelude"][0](self.transformer["wte"](input_ids))
        state = torch.randn_like(e)
        assert free == 0
        for _ in range(graded):
            state = self.transformer["adapter"](torch.cat([state, e], dim=-1))
            for block in self.transformer["core_block"]:
                state = state + block(state).tanh()
        return SimpleNamespace(logits=self.transformer["coda"][0](state))


class OuroBackbone(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.total_ut_steps = config.total_ut_steps
        self.embed_tokens = nn.Embedding(16, H)
        self.layers = nn.ModuleList([nn.Linear(H, H), nn.Linear(H, H)])
        self.norm = nn.LayerNorm(H)

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids)
        for _ in range(self.total_ut_steps):
            for layer in self.layers:
                x = x + layer(x)
            x = self.norm(x)
        return x


class Ouro(nn.Module):
    """Names and the total_ut_steps attribute of Ouro, which the backbone keeps a copy of."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(model_type="ouro", total_ut_steps=4)
        self.model = OuroBackbone(self.config)
        self.base_model = self.model

    def forward(self, input_ids, use_cache=True):
        return SimpleNamespace(logits=self.model(input_ids))


class Shared(nn.Module):
    """One block called three times, of no known family."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(model_type="albert")
        self.embed = nn.Embedding(16, H)
        self.block = nn.Sequential(nn.Linear(H, H), nn.ReLU())
        self.act = nn.ReLU()

    def forward(self, input_ids, use_cache=True):
        x = self.embed(input_ids)
        for _ in range(3):
            x = self.act(self.block(x))
        return SimpleNamespace(logits=x)


IDS = {"input_ids": torch.tensor([[1, 2, 3]])}


def test_our_own_model():
    spec = find_loop(looped_lm(hidden_size=32, intermediate_size=32, num_loops=6))
    assert spec is not None
    assert (spec.steps, spec.keyword, spec.state_width) == (6, "num_loops", 32)
    assert spec.entry == "model.adapter" and spec.exit == "model.core.1"
    assert spec.component("model.core.0.mlp.up_proj") == "core" and spec.component("model.adapter") == "adapter"
    assert spec.component("model.prelude.0") == "prelude" and spec.component("model.coda.0.mlp") == "coda"
    assert spec.component("lm_head") is None and spec.component("model.adapter2") is None


def test_huginn_by_its_names():
    model = Huginn()
    spec = find_loop(model)
    assert spec is not None and spec.family == "huginn" and spec.steps == 5 and spec.state_width == H
    assert spec.adapter == ("transformer.adapter",)
    assert spec.core == ("transformer.core_block.0", "transformer.core_block.1")
    assert spec.prelude == ("transformer.prelude.0",) and spec.coda == ("transformer.coda.0",)


def test_ouro_by_its_names():
    spec = find_loop(Ouro())
    assert spec is not None and spec.family == "ouro" and spec.steps == 4
    assert spec.adapter == () and spec.core == ("model.layers.0", "model.layers.1")
    assert spec.entry == "model.layers.0" and spec.exit == "model.norm" and spec.state_width is None


@pytest.mark.parametrize("build", [Huginn, Ouro])
def test_the_step_count_can_be_overridden_for_one_call(build):
    model = build()
    spec = find_loop(model)
    calls = []
    model.get_submodule(spec.entry).register_forward_hook(lambda *_: calls.append(1))
    deployed = run_loop(model, spec, IDS).logits
    assert len(calls) == spec.steps
    run_loop(model, spec, IDS, steps=2)
    assert len(calls) == spec.steps + 2
    assert torch.equal(run_loop(model, spec, IDS).logits, deployed)
    assert getattr(model.config, "total_ut_steps", 4) == 4


def test_a_drawn_initial_state_is_the_same_in_every_call_and_the_global_state_is_put_back():
    model = Huginn()
    spec = find_loop(model)
    before = torch.get_rng_state()
    first = run_loop(model, spec, IDS).logits
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(run_loop(model, spec, IDS).logits, first)
    assert not torch.equal(run_loop(model, spec, IDS, seed=1).logits, first)


def test_the_attribute_comes_back_when_the_call_fails():
    model = Ouro()
    with pytest.raises(IndexError):
        run_loop(model, find_loop(model), {"input_ids": torch.tensor([[99]])}, steps=2)
    assert model.model.total_ut_steps == 4 and model.config.total_ut_steps == 4


def test_a_known_type_with_other_modules_is_refused_by_name():
    model = Huginn()
    del model.transformer["adapter"]
    with pytest.raises(ModelError, match=r"huginn_raven.*transformer\.adapter"):
        find_loop(model)
    model = Huginn()
    del model.config.mean_recurrence
    with pytest.raises(ModelError, match="mean_recurrence"):
        find_loop(model)


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3_moe])
def test_plain_models_do_not_recur(build):
    model = build()
    assert require_known_loop(model) is None
    assert unknown_recurrence(model) == ()


def test_calls_are_counted():
    calls = count_calls(looped_lm(hidden_size=32, intermediate_size=32, num_loops=6))
    assert calls["model.adapter"] == calls["model.core.1.mlp.up_proj"] == 6
    assert calls["model.prelude.0"] == calls["model.coda.0.self_attn.k_proj"] == calls["lm_head"] == 1
    model = Shared()
    count_calls(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_an_unknown_recurrence_is_found_and_refused_by_name():
    model = Shared()
    assert unknown_recurrence(model) == ("block",)  # neither its inner Linear nor the shared activation
    with pytest.raises(ModelError, match=r"Shared: calls 'block' 3 times.*known: prism_looped, huginn"):
        require_known_loop(model)
    assert unknown_recurrence(looped_lm(hidden_size=32, intermediate_size=32)) == ()
