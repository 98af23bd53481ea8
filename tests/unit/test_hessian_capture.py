"""prism_ray.hessian.capture: who shares a state, which rows count, steps of looped modules, experts with their own rows (CAL-01, CAL-03, CAL-04, CAL-07, CAL-10)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3Experts
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Config, DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

from prism_ray.core.errors import ConfigError, ModelError
from prism_ray.formats.modules import FP4Experts
from prism_ray.formats.spec import FORMATS
from prism_ray.hessian.capture import EXPERTS, Capture, NonFinite, experts_forward, use_our_experts
from prism_ray.hessian.state import GramState, reduce_lanes
from prism_ray.hessian.windows import Window
from prism_ray.models.tiny import tiny_llama, tiny_qwen3_moe
from prism_ray.quantizers.base import Member, QuantizerOptions
from prism_ray.quantizers.gptq import gptq_batch
from prism_ray.quantizers.rtn import rtn


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(rows: Tensor) -> Tensor:
    return rows.double().T @ rows.double()


def close(found: GramState, rows: Tensor) -> bool:
    """Whether a state is the second moment of these rows: counts exactly, sums to R + 2 float32 units of |x|'|x| (tests/numerics/test_gram_state.py)."""
    wide = rows.double().abs()
    bound = (rows.shape[0] + 2) * 2.0**-24 * (wide.T @ wide)
    return found.tokens == rows.shape[0] and bool(((found.matrix() - exact(rows)).abs() <= bound + 1e-300).all())


def mask_of(*lengths: int, left: bool = False) -> Tensor:
    """bool [B, T], padded on one side to the longest."""
    width = max(lengths)
    places = torch.arange(width)
    return torch.stack([places >= width - length if left else places < length for length in lengths])


class Attention(nn.Module):
    """q, k get the very same tensor, v a copy of it, o something else."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.spare = (nn.Linear(width, width, bias=False) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(self.q_proj(x) + self.k_proj(x) + self.v_proj(x.clone()))


NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "spare"]


class TestGroups:
    def test_the_same_tensor_is_one_state_and_an_equal_one_is_not(self):
        model, x = Attention(), normal(2, 5, 16)
        with Capture(model, NAMES) as capture, capture.batch(mask_of(5, 5)):
            model(x)
        assert [(group.name, group.members, group.width, group.experts) for group in capture.groups] == [
            ("q_proj", ("q_proj", "k_proj"), 16, 0),
            ("v_proj", ("v_proj",), 16, 0),
            ("o_proj", ("o_proj",), 16, 0),
        ]
        assert sorted(capture.states) == ["o_proj", "q_proj", "v_proj"]
        assert [group.states for group in capture.groups] == [["q_proj"], ["v_proj"], ["o_proj"]]
        assert close(capture.states["q_proj"], x.flatten(0, 1))
        assert close(capture.states["v_proj"], x.flatten(0, 1))

    def test_weights_that_were_not_called_are_listed(self):
        model = Attention()
        with Capture(model, NAMES) as capture:
            assert capture.missed == NAMES
            with capture.batch(mask_of(5)):
                model(normal(1, 5, 16))
        assert capture.missed == ["spare"]

    def test_groups_of_a_real_model_are_qkv_and_gate_up(self):
        model = tiny_llama()
        layer = model.model.layers[0]
        names = [name for name, module in layer.named_modules() if isinstance(module, nn.Linear)]
        with torch.no_grad(), Capture(layer, names) as capture, capture.batch(mask_of(7)):
            model(input_ids=torch.arange(7)[None])
        assert [group.members for group in capture.groups] == [
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            ("self_attn.o_proj",),
            ("mlp.gate_proj", "mlp.up_proj"),
            ("mlp.down_proj",),
        ]
        assert {state.tokens for state in capture.states.values()} == {7}

    def test_several_batches_add_up(self):
        model, x = Attention(), normal(4, 5, 16)
        with Capture(model, NAMES) as capture:
            for part in x.split(1):
                with capture.batch(mask_of(5)):
                    model(part)
        assert close(capture.states["q_proj"], x.flatten(0, 1))
        assert capture.calls == {"q_proj": 1, "k_proj": 1, "v_proj": 1, "o_proj": 1}

    def test_a_module_that_leaves_its_group_is_refused_by_name(self):
        model = Attention()
        with Capture(model, NAMES) as capture:
            with capture.batch(mask_of(5)):
                model(normal(1, 5, 16))
            with pytest.raises(ModelError, match="k_proj: shared its input with 'q_proj'"), capture.batch(mask_of(5)):
                model.k_proj(normal(1, 5, 16))

    def test_modules_that_share_only_later_keep_their_own_rows(self):
        model, x, y, z = Attention(), normal(1, 5, 16, seed=1), normal(1, 5, 16, seed=2), normal(1, 5, 16, seed=3)
        with Capture(model, ["q_proj", "k_proj"]) as capture:
            with capture.batch(mask_of(5)):
                model.q_proj(x)
                model.k_proj(y)
            with capture.batch(mask_of(5)):
                model.q_proj(z)
                model.k_proj(z)
        assert close(capture.states["q_proj"], torch.cat([x, z]).flatten(0, 1))
        assert close(capture.states["k_proj"], torch.cat([y, z]).flatten(0, 1))

    def test_a_freed_tensors_address_does_not_join_two_groups(self):
        """Inputs made one after another may get the same address; they are told apart all the same."""
        layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(8))
        names = [str(number) for number in range(8)]
        with torch.no_grad(), Capture(layers, names) as capture, capture.batch(mask_of(5)):
            for number, layer in enumerate(layers):
                layer(normal(1, 5, 16, seed=number))
        assert len(capture.groups) == 8


class TestHooks:
    def count(self, model: nn.Module) -> int:
        return sum(len(module._forward_pre_hooks) for module in model.modules())

    def test_hooks_are_gone_after_exit_and_after_an_exception(self):
        model = Attention()
        with Capture(model, NAMES):
            assert self.count(model) == len(NAMES)
        assert self.count(model) == 0
        with pytest.raises(RuntimeError, match="shapes"), Capture(model, NAMES) as capture, capture.batch(mask_of(5)):
            model(normal(1, 5, 17))
        assert self.count(model) == 0

    def test_a_capture_that_cannot_be_made_leaves_nothing(self):
        model = nn.ModuleDict({"a": Attention(), "experts": qwen_experts()})
        with pytest.raises(AttributeError):
            Capture(model, ["a.q_proj", "experts.gate_up_proj", "a.absent"])
        assert self.count(model) == 0
        assert not hasattr(model["experts"], "_prism_capture")

    def test_nothing_is_counted_outside_a_batch(self):
        model = Attention()
        with Capture(model, NAMES) as capture:
            model(normal(1, 5, 16))
        assert not capture.states
        assert not capture.groups

    def test_two_captures_of_the_same_experts_are_refused(self):
        experts = qwen_experts()
        root = nn.ModuleDict({"experts": experts})
        with Capture(root, ["experts.gate_up_proj"]), pytest.raises(ModelError, match="experts: its experts are captured"):
            Capture(root, ["experts.down_proj"])
        assert not hasattr(experts, "_prism_capture")
        with Capture(root, ["experts.gate_up_proj", "experts.down_proj"]):
            pass


class TestRows:
    """CAL-07: two sequences of 5 and 20 tokens padded to 20 with an embedding of norm 50."""

    def padded(self, left: bool) -> tuple[Tensor, Tensor, Tensor]:
        """(x [2, 20, 16], mask [2, 20], the 25 token rows)."""
        mask = mask_of(5, 20, left=left)
        rows = normal(25, 16)
        x = torch.full((2, 20, 16), 50 / 16**0.5)
        x[mask] = rows
        return x, mask, rows

    @pytest.mark.parametrize("left", [False, True])
    @pytest.mark.parametrize("shape", ["[B, T, I]", "[B * T, I]", "[B, T, 2, I / 2]"])
    @pytest.mark.parametrize("kind", [torch.bool, torch.int64])
    def test_padding_never_counts(self, left, shape, kind):
        x, mask, rows = self.padded(left)
        width = 8 if shape.startswith("[B, T, 2") else 16
        given = {"[B, T, I]": x, "[B * T, I]": x.flatten(0, 1), "[B, T, 2, I / 2]": x.view(2, 20, 2, 8)}[shape]
        model = nn.ModuleDict({"q": nn.Linear(width, 4)})
        with Capture(model, ["q"]) as capture, capture.batch(mask.to(kind)):
            model["q"](given)
        state = capture.states["q"]
        assert close(state, rows.view(-1, width))
        assert state.weight == state.tokens == (25 if width == 16 else 50)
        # The trap: the padding would be most of the second moment.
        assert float(exact(x.reshape(-1, width)).trace()) > 3 * float(state.matrix().trace())

    @pytest.mark.parametrize("shape", [(3, 20, 16), (39, 16), (2, 19, 16)])
    def test_an_input_without_a_place_for_each_token_is_refused_by_name(self, shape):
        model = nn.ModuleDict({"q": nn.Linear(16, 4)})
        with (
            Capture(model, ["q"]) as capture,
            pytest.raises(ModelError, match=r"q: its input \[.*\] has no place"),
            capture.batch(mask_of(20, 20)),
        ):
            model["q"](torch.zeros(shape))

    def test_a_batch_without_tokens_adds_nothing(self):
        model = Attention()
        with Capture(model, NAMES) as capture, capture.batch(torch.zeros(1, 5, dtype=torch.bool)):
            model(normal(1, 5, 16))
        assert {state.tokens for state in capture.states.values()} == {0}

    @pytest.mark.parametrize("left", [False, True])
    def test_experts_see_flattened_tokens_without_padding(self, left):
        x, mask, rows = self.padded(left)
        experts = qwen_experts(hidden=16)
        index = (torch.arange(40)[:, None] + torch.tensor([0, 1])) % 4
        with torch.no_grad(), Capture(nn.ModuleDict({"e": experts}), ["e.gate_up_proj", "e.down_proj"]) as capture, capture.batch(mask):
            experts_forward(experts, x.flatten(0, 1), index, torch.full((40, 2), 0.5))
        assert sum(capture.states[f"e.gate_up_proj.{expert}"].tokens for expert in range(4)) == 2 * 25
        for expert in range(4):
            routed = (index == expert).any(-1)[mask.flatten()]
            assert close(capture.states[f"e.gate_up_proj.{expert}"], rows[routed])
            assert capture.states[f"e.down_proj.{expert}"].tokens == int(routed.sum())

    def test_experts_that_get_another_number_of_rows_are_refused(self):
        experts = qwen_experts(hidden=16)
        with (
            Capture(nn.ModuleDict({"e": experts}), ["e.gate_up_proj"]) as capture,
            pytest.raises(ModelError, match="e: its input of 7 rows"),
            capture.batch(mask_of(4, 4)),
        ):
            experts_forward(experts, normal(7, 16), torch.zeros(7, 1, dtype=torch.int64), torch.ones(7, 1))

    @pytest.mark.parametrize("left", [False, True])
    def test_a_real_moe_model_gives_the_batch_of_one_statistics(self, left):
        model = tiny_qwen3_moe(num_layers=1)
        use_our_experts(model)
        layer = model.model.layers[0]
        names = [name for name, module in layer.named_modules() if isinstance(module, nn.Linear)] + [
            "mlp.experts.gate_up_proj",
            "mlp.experts.down_proj",
        ]
        with torch.no_grad():
            model.model.embed_tokens.weight[0] *= 50 / model.model.embed_tokens.weight[0].norm()
        samples = [torch.arange(1, 6), torch.arange(30, 50)]
        mask = mask_of(5, 20, left=left)
        ids = torch.zeros(2, 20, dtype=torch.int64)
        ids[mask] = torch.cat(samples)
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad(), Capture(layer, names) as padded, padded.batch(mask):
            model(input_ids=ids, attention_mask=mask.long(), position_ids=positions)
        with torch.no_grad(), Capture(layer, names) as single:
            for sample in samples:
                with single.batch(torch.ones(1, len(sample), dtype=torch.bool)):
                    model(input_ids=sample[None])
        assert padded.missed == []
        assert sorted(padded.states) == sorted(single.states)
        for name, state in padded.states.items():
            assert state.tokens == single.states[name].tokens, name
            expected = single.states[name].matrix()
            # Attention over a padded row is summed in another order: float32 rounding of a two-digit number of operations, 1e-5 is 100 units.
            assert float((state.matrix() - expected).norm()) <= 1e-5 * float(expected.norm()), name
        assert padded.states["self_attn.q_proj"].tokens == 25


class Loop(nn.Module):
    """Two layers run `steps` times; what enters the second pass is 50 times larger (CAL-03)."""

    def __init__(self, steps: int):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.steps = steps
        self.seen: dict[str, list[Tensor]] = {"first": [], "second": []}

    def forward(self, x: Tensor) -> Tensor:
        for step in range(self.steps):
            x = torch.tanh(x) * (50.0 if step == 1 else 1.0)
            self.seen["first"].append(x)
            x = self.first(x)
            self.seen["second"].append(x)
            x = self.second(x)
        return x


class TestSteps:
    """CAL-03: two physical layers, hidden 64, run three times, 64 tokens."""

    def run(self, steps: int, window: Window | None = None, declared: bool = True) -> tuple[Loop, Capture]:
        torch.manual_seed(0)
        model = Loop(steps)
        given = {"first": steps, "second": steps} if declared else None
        with torch.no_grad(), Capture(model, ["first", "second"], window=window, steps=given) as capture:
            for seed in range(2):
                with capture.batch(mask_of(32)):
                    model(normal(1, 32, 64, seed=seed))
        return model, capture

    def test_the_sum_over_all_passes_is_that_of_their_concatenated_inputs(self):
        model, capture = self.run(3)
        for name in ("first", "second"):
            rows = torch.cat(model.seen[name]).flatten(0, 1)
            state = capture.states[name]
            assert float((state.matrix() - exact(rows)).norm() / exact(rows).norm()) < 1e-6
            assert state.tokens == 192
            assert dict(state.steps) == {0: 64, 1: 64, 2: 64}
        assert capture.calls == {"first": 3, "second": 3}

    def test_the_second_pass_is_seen(self):
        model, capture = self.run(3)
        first = torch.cat(model.seen["first"][0::3]).flatten(0, 1)
        assert float(capture.states["first"].matrix().trace()) > 100 * float(exact(first).trace())

    def test_one_loop_is_the_plain_path_bit_for_bit(self):
        _, plain = self.run(1, declared=False)
        for window in (None, *(Window(name=name) for name in ("first", "all", "last", "alpha", "equal-row"))):
            _, looped = self.run(1, window)
            for name, state in looped.states.items():
                assert torch.equal(state.matrix(), plain.states[name].matrix())
                assert state.steps == plain.states[name].steps == {0: 64}

    @pytest.mark.parametrize(
        ("window", "weights"),
        [
            (Window(name="first"), (1, 0, 0)),
            (Window(name="skip-first"), (0, 1, 1)),
            (Window(name="last"), (0, 0, 1)),
            (Window(name="alpha", alpha=0.25), (0.25, 1, 1)),
        ],
    )
    def test_windows_weigh_the_steps(self, window, weights):
        model, capture = self.run(3, window)
        for name, state in capture.states.items():
            expected = sum(weight * exact(torch.cat(model.seen[name][step::3]).flatten(0, 1)) for step, weight in enumerate(weights))
            assert isinstance(expected, Tensor)
            assert float((state.matrix() - expected).norm() / expected.norm()) < 1e-6
            assert state.weight == 64 * sum(weights)
            assert dict(state.steps) == {step: 64 for step, weight in enumerate(weights) if weight}

    def test_equal_row_takes_as_many_rows_as_one_step_has(self):
        model, capture = self.run(3, Window(name="equal-row"))
        for name, state in capture.states.items():
            steps = [torch.cat(model.seen[name][step::3], 1)[0] for step in range(3)]
            rows = torch.cat([steps[step][step::3] for step in range(3)])
            assert close(state, rows)
            assert state.tokens == 64
            assert dict(state.steps) == {0: 22, 1: 21, 2: 21}

    @pytest.mark.parametrize("steps", [None, {}, {"first": 3}, {"first": 3, "second": 2}])
    def test_a_module_called_more_often_than_declared_is_refused_by_name(self, steps):
        model = Loop(3)
        name = "second" if steps else "first"
        with (
            Capture(model, ["first", "second"], steps=steps) as capture,
            pytest.raises(ModelError, match=f"{name}: was called 3 times"),
            capture.batch(mask_of(8)),
        ):
            model(normal(1, 8, 64))

    def test_a_module_called_less_often_than_declared_is_refused(self):
        model = Loop(2)
        with (
            Capture(model, ["first"], steps={"first": 3}) as capture,
            pytest.raises(ModelError, match="first: was called 2 times .* not 3"),
            capture.batch(mask_of(8)),
        ):
            model(normal(1, 8, 64))

    def test_a_block_shared_by_two_depths_counts_each_call_once(self):
        shared = nn.Linear(16, 16, bias=False)
        model = nn.ModuleDict({"shared": shared, "own": nn.Linear(16, 16, bias=False)})
        x = normal(1, 9, 16)
        with torch.no_grad(), Capture(model, ["shared", "own"], steps={"shared": 2}) as capture, capture.batch(mask_of(9)):
            y = model["own"](shared(x))
            shared(y)
        assert close(capture.states["shared"], torch.cat([x, y]).flatten(0, 1))
        assert dict(capture.states["shared"].steps) == {0: 9, 1: 9}

    def test_experts_in_a_loop_know_their_step(self):
        experts = qwen_experts(hidden=16)
        root, names = nn.ModuleDict({"e": experts}), ["e.gate_up_proj", "e.down_proj"]
        index, weights = torch.zeros(6, 1, dtype=torch.int64), torch.ones(6, 1)
        x, y = normal(6, 16, seed=1), normal(6, 16, seed=2)
        with torch.no_grad(), Capture(root, names, steps={"e": 2}, window=Window(name="skip-first")) as capture, capture.batch(mask_of(6)):
            experts_forward(experts, x, index, weights)
            experts_forward(experts, y, index, weights)
        assert close(capture.states["e.gate_up_proj.0"], y)
        assert dict(capture.states["e.down_proj.0"].steps) == {1: 6}
        with (
            Capture(root, names) as capture,
            pytest.raises(ModelError, match="e.gate_up_proj: was called 2 times"),
            capture.batch(mask_of(6)),
        ):
            _ = [experts_forward(experts, given, index, weights) for given in (x, y)]

    def test_skip_first_of_a_module_called_once_is_refused(self):
        with pytest.raises(ConfigError, match="skip-first"):
            self.run(1, Window(name="skip-first"))


class TestNonFinite:
    """CAL-10: one NaN in one token, or an infinity."""

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("left", [False, True])
    def test_the_first_module_that_sees_it_is_named_with_the_batch_row(self, bad, left):
        model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
        x = normal(3, 6, 16)
        x[2, 3, 7] = bad
        with (
            torch.no_grad(),
            Capture(model, ["1", "2"]) as capture,
            pytest.raises(NonFinite, match="1: its input holds NaN or infinity") as caught,
            capture.batch(mask_of(6, 3, 4, left=left)),
        ):
            model(x)
        assert caught.value.row == 2
        assert not capture.states, "the sums hold part of the sample"

    def test_a_sum_before_it_is_not_poisoned_and_left(self):
        model = nn.ModuleDict({"q": nn.Linear(4, 4)})
        with Capture(model, ["q"]) as capture:
            with capture.batch(mask_of(6)):
                model["q"](normal(1, 6, 4))
            with pytest.raises(NonFinite), capture.batch(mask_of(6)):
                model["q"](torch.full((1, 6, 4), math.nan))
        assert not capture.states

    def test_padding_may_hold_anything(self):
        model = nn.ModuleDict({"q": nn.Linear(16, 16)})
        x, mask = normal(2, 6, 16), mask_of(6, 4)
        x[1, 5] = math.nan
        with Capture(model, ["q"]) as capture, capture.batch(mask):
            model["q"](x)
        assert close(capture.states["q"], x[mask])

    def test_half_precision_overflow_is_caught(self):
        model = nn.ModuleDict({"q": nn.Linear(16, 16).half()})
        x = (normal(2, 4, 16) * 7e4).half()
        assert bool(torch.isinf(x).any())
        with Capture(model, ["q"]) as capture, pytest.raises(NonFinite, match="q: "), capture.batch(mask_of(4, 4)):
            model["q"](x)

    def test_an_input_of_four_dimensions_names_the_right_row(self):
        model = nn.ModuleDict({"q": nn.Linear(8, 4)})
        x = normal(3, 5, 2, 8)
        x[1, 2, 1, 0] = math.nan
        with Capture(model, ["q"]) as capture, pytest.raises(NonFinite) as caught, capture.batch(mask_of(2, 5, 5)):
            model["q"](x)
        assert caught.value.row == 1

    def test_experts_name_the_row_of_the_routed_token(self):
        experts = qwen_experts(hidden=16)
        x = normal(12, 16)
        x[9, 3] = math.nan
        index = torch.arange(12)[:, None] % 4
        with (
            torch.no_grad(),
            Capture(nn.ModuleDict({"e": experts}), ["e.gate_up_proj"]) as capture,
            pytest.raises(NonFinite) as caught,
            capture.batch(mask_of(2, 4, 4)),
        ):
            experts_forward(experts, x, index, torch.ones(12, 1))
        assert caught.value.row == 2
        assert caught.value.where == "e.gate_up_proj"


def fill(experts: Any, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return experts.requires_grad_(False)


def qwen_experts(experts: int = 4, hidden: int = 64, inner: int = 32) -> Any:
    return fill(Qwen3MoeExperts(Qwen3MoeConfig(num_experts=experts, hidden_size=hidden, moe_intermediate_size=inner)))


FAMILIES: dict[str, Any] = {
    "qwen3_moe": qwen_experts,
    "mixtral": lambda: fill(MixtralExperts(MixtralConfig(num_local_experts=4, hidden_size=64, intermediate_size=32))),
    "gpt_oss": lambda: fill(GptOssExperts(GptOssConfig(num_local_experts=4, hidden_size=64, intermediate_size=32))),
    "deepseek_v3": lambda: fill(DeepseekV3Experts(DeepseekV3Config(n_routed_experts=4, hidden_size=64, moe_intermediate_size=32))),
    "deepseek_v4": lambda: fill(
        DeepseekV4Experts(DeepseekV4Config(n_routed_experts=4, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2))
    ),
}


def routed(tokens: int, experts: int = 4, top: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    scores = normal(tokens, experts, seed=seed + 100)
    weights, index = scores.softmax(-1).topk(top)
    return index, weights


def eager(experts: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    experts.config._experts_implementation = "eager"
    return experts(x, index, weights)


class TestExpertsForward:
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("tokens", [1, 33])
    def test_it_is_the_eager_forward(self, family, tokens):
        experts = FAMILIES[family]()
        x, (index, weights) = normal(tokens, 64), routed(tokens)
        expected = eager(experts, x, index, weights)
        use_our_experts(Holder(experts))
        assert experts.config._experts_implementation == EXPERTS
        found = experts(x, index, weights)
        # The same products and sums of 64 and 32 float32 numbers, over rows in another order: two orders differ by at most 2 * 100 units of the
        # sums of magnitudes, which are below 30 times the result's largest.
        assert float((found - expected).abs().max()) <= 200 * 2.0**-24 * 30 * float(expected.abs().max())
        assert float(expected.abs().max()) > 0.1

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("format_name", ["nvfp4", "mxfp4", "int4-g32"])
    def test_planes_in_the_place_of_the_parameters(self, family, format_name):
        """FP4Experts hold [E, O, I] in every family, also where the parameter is [E, I, O]."""
        spec = FORMATS[format_name]
        dense, planes = FAMILIES[family](), FAMILIES[family]()
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(dense, name).data
            transposed = weight.mT.contiguous() if dense.is_transposed else weight
            tensor, _ = rtn(transposed, spec)
            values = tensor.dequantize()
            getattr(dense, name).data = values.mT.contiguous() if dense.is_transposed else values
            delattr(planes, name)
            setattr(planes, name, FP4Experts(tensor, torch.float32))
        x, (index, weights) = normal(33, 64), routed(33)
        expected, found = eager(dense, x, index, weights), experts_forward(planes, x, index, weights)
        assert float((found - expected).abs().max()) <= 200 * 2.0**-24 * 30 * float(expected.abs().max())

    def test_slots_of_no_expert_are_left_out(self):
        """transformers marks a slot that belongs to another process by an index of num_experts."""
        experts, x = qwen_experts(), normal(6, 64)
        index, weights = routed(6)
        marked = torch.where(index == 1, 4, index)
        zeroed = torch.where(index == 1, torch.zeros_like(weights), weights)
        torch.testing.assert_close(experts_forward(experts, x, marked, weights), experts_forward(experts, x, index, zeroed))

    def test_registering_twice_and_models_without_experts_are_fine(self):
        model = tiny_llama(num_layers=1)
        use_our_experts(model)
        use_our_experts(model)
        assert ALL_EXPERTS_FUNCTIONS[EXPERTS] is experts_forward
        model(input_ids=torch.arange(4)[None])

    def test_a_whole_model_keeps_its_logits(self):
        model = tiny_qwen3_moe()
        ids = torch.arange(12)[None]
        with torch.no_grad():
            expected = model(input_ids=ids).logits
            use_our_experts(model)
            found = model(input_ids=ids).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Holder(nn.Module):
    """A model as far as `use_our_experts` looks at one."""

    def __init__(self, experts: Any):
        super().__init__()
        self.experts, self.config = experts, experts.config


class TestExperts:
    """CAL-04: gate_up_proj [4, 64, 32], down_proj [4, 32, 32], no Linear inside."""

    NAMES = ("e.gate_up_proj", "e.down_proj")

    def captured(self, family: str, index: Tensor, x: Tensor) -> tuple[Any, Capture]:
        experts = FAMILIES[family]()
        weights = torch.full(index.shape, 0.5)
        with torch.no_grad(), Capture(nn.ModuleDict({"e": experts}), self.NAMES) as capture, capture.batch(mask_of(len(x))):
            experts_forward(experts, x, index, weights)
        return experts, capture

    def test_token_0_reaches_expert_2_only(self):
        experts = qwen_experts(hidden=32, inner=32)
        assert experts.gate_up_proj.shape == (4, 64, 32)
        assert experts.down_proj.shape == (4, 32, 32)
        x = normal(5, 32)
        index = torch.tensor([[2], [0], [0], [3], [3]])
        with torch.no_grad(), Capture(nn.ModuleDict({"e": experts}), self.NAMES) as capture, capture.batch(mask_of(5)):
            experts_forward(experts, x, index, torch.ones(5, 1))
        assert close(capture.states["e.gate_up_proj.2"], x[:1])
        assert close(capture.states["e.gate_up_proj.0"], x[1:3])
        assert close(capture.states["e.gate_up_proj.3"], x[3:])
        assert "e.gate_up_proj.1" not in capture.states
        assert [(group.name, group.members, group.width, group.experts) for group in capture.groups] == [
            ("e.gate_up_proj", ("e.gate_up_proj",), 32, 4),
            ("e.down_proj", ("e.down_proj",), 32, 4),
        ]
        assert capture.groups[0].states == [f"e.gate_up_proj.{expert}" for expert in range(4)]
        assert capture.missed == []

    @pytest.mark.parametrize("family", FAMILIES)
    def test_each_slice_gets_its_own_routed_rows_and_what_leaves_its_gate(self, family):
        x = normal(33, 64)
        index, _ = routed(33)
        experts, capture = self.captured(family, index, x)
        for expert in range(4):
            rows = x[(index == expert).any(-1)]
            assert close(capture.states[f"e.gate_up_proj.{expert}"], rows)
            weight = experts.gate_up_proj[expert].T if experts.is_transposed else experts.gate_up_proj[expert]
            bias = experts.gate_up_proj_bias[expert] if experts.has_bias else None
            inner = experts._apply_gate(nn.functional.linear(rows, weight, bias))
            state = capture.states[f"e.down_proj.{expert}"]
            assert state.width == 32
            assert state.tokens == len(rows)
            assert float((state.matrix() - exact(inner)).norm() / exact(inner).norm()) < 1e-5

    def test_one_projection_alone(self):
        experts = qwen_experts()
        with torch.no_grad(), Capture(nn.ModuleDict({"e": experts}), ["e.down_proj"]) as capture, capture.batch(mask_of(3)):
            experts_forward(experts, normal(3, 64), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
        assert list(capture.states) == ["e.down_proj.0"]
        assert [group.name for group in capture.groups] == ["e.down_proj"]

    def test_experts_called_in_another_way_are_missed_not_forgotten(self):
        """CAL-04: a family that does not go through the interface must end in a refusal, not in a silent bf16 layer."""
        experts = qwen_experts()
        experts.config._experts_implementation = "eager"
        with Capture(nn.ModuleDict({"e": experts}), self.NAMES) as capture, capture.batch(mask_of(3)):
            experts(normal(3, 64), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
        assert capture.missed == list(self.NAMES)

    def test_an_expert_without_tokens_falls_back_on_the_record(self):
        """CAL-01: 8 experts, top 2, hidden 64, four shards of 128 tokens; expert 5 never gets one, expert 6 only in the last shard."""
        experts = qwen_experts(8)
        router = normal(8, 64, seed=5) * 0.3
        parts: dict[tuple[int, int], dict[str, GramState]] = {}
        for shard in range(4):
            bias = torch.zeros(8)
            bias[5] = -1e4
            bias[6] = 0.0 if shard == 3 else -1e4
            x = normal(128, 64, seed=shard)
            weights, index = (x @ router.T + bias).softmax(-1).topk(2)
            with torch.no_grad(), Capture(nn.ModuleDict({"e": experts}), ["e.gate_up_proj"]) as capture, capture.batch(mask_of(64, 64)):
                experts_forward(experts, x, index, weights)
            parts[shard, shard + 1] = capture.states
            assert "e.gate_up_proj.5" not in capture.states
            assert ("e.gate_up_proj.6" in capture.states) == (shard == 3)
        keys = [f"e.gate_up_proj.{expert}" for expert in range(8)]
        merged = {key: reduce_lanes({lane: states.get(key) or GramState(width=64) for lane, states in parts.items()}, 4) for key in keys}
        assert sum(state.tokens for state in merged.values()) == 2 * 512
        groups = [([Member.of(key, experts.gate_up_proj[number], FORMATS["nvfp4"])], merged[key]) for number, key in enumerate(keys)]
        records = [
            record for ((tensor, record),) in gptq_batch(groups, QuantizerOptions()) if bool(torch.isfinite(tensor.dequantize()).all())
        ]
        assert len(records) == 8
        assert [record.name for record in records if record.fell_back] == [keys[5]]
        assert (records[5].method, records[5].reason, records[5].tokens, records[5].rank) == ("rtn", "no calibration rows", 0, 0)
        assert math.isnan(records[5].error_after)
        assert (records[6].method, records[6].tokens) == ("gptq", merged[keys[6]].tokens)
        assert records[6].tokens > 0
