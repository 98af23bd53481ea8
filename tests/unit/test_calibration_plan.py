"""prism_ray.calibrate.shapes, costs and plan: shapes against transformers itself, byte arithmetic against real states, waves, refusals, and the command.

Field cases: CAL-08 (widths that do not divide), CAL-11 (uneven layers), RAY-05 (CPUs for readers), RAY-06 (bounded store and disk).
"""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from prism_ray.calibrate.costs import (
    GIB,
    MACHINES,
    PROCESS_BYTES,
    Planner,
    PlanOptions,
    Unit,
    expert_rows,
    longest_first,
    plane_bytes,
    state_bytes,
)
from prism_ray.calibrate.plan import Plan, make_plan, smallest_workers
from prism_ray.calibrate.shapes import FAMILIES, BlockShape, ModelShape, WeightShape, model_shape, read_config
from prism_ray.cli.main import run
from prism_ray.cli.plan import parse_bytes, parse_rate
from prism_ray.core.errors import ConfigError, FormatError, ModelError, ResourceError, UnknownName
from prism_ray.formats.policy import DEFAULT_IGNORE, QuantPolicy
from prism_ray.formats.policy import make_plan as policy_plan
from prism_ray.hessian.state import GramState

CONFIGS = Path(__file__).resolve().parents[1] / "data" / "configs"

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 160,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
}
LATENT = {
    **SMALL,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "head_dim": None,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "q_lora_rank": 40,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
V4 = {
    **{key: value for key, value in SMALL.items() if key != "intermediate_size"},
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "q_lora_rank": 40,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "o_groups": 2,
    "o_lora_rank": 12,
    "index_n_heads": 4,
    "index_head_dim": 8,
    "index_topk": 2,
    "hc_mult": 3,
    "num_hash_layers": 1,
    "compress_ratios": [0, 4, 128, 4],
}
TINY: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SMALL},
    "llama, tied and biased": {"model_type": "llama", **SMALL, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", **SMALL},
    "qwen2": {"model_type": "qwen2", **SMALL, "head_dim": None},
    "qwen3": {"model_type": "qwen3", **SMALL},
    "mixtral": {"model_type": "mixtral", **SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"model_type": "qwen3_moe", **SMALL, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe, some dense": {
        "model_type": "qwen3_moe",
        **SMALL,
        "num_hidden_layers": 5,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    },
    "gpt_oss": {"model_type": "gpt_oss", **SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True},
    "deepseek_v3": {"model_type": "deepseek_v3", **LATENT},
    "deepseek_v3, full queries": {"model_type": "deepseek_v3", **LATENT, "q_lora_rank": None, "attention_bias": True},
    "deepseek_v4": {"model_type": "deepseek_v4", **V4},
}


def tiny_model(config: dict[str, Any], device: str) -> nn.Module:
    values = {key: value for key, value in config.items() if (key != "model_type" and value is not None) or key == "q_lora_rank"}
    built = AutoConfig.for_model(config["model_type"], **values)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(built, attn_implementation="eager", dtype=torch.float32)


def shape_of(name: str) -> ModelShape:
    return model_shape(read_config(CONFIGS / f"{name}.json"))


EXPERTS = QuantPolicy(format="mxfp4")
"""What gpt-oss's own layout holds: every expert in mxfp4, nothing else quantized."""


def policy_of(name: str) -> QuantPolicy:
    return EXPERTS if name == "gpt-oss-120b" else QuantPolicy()


def options(**values: Any) -> PlanOptions:
    return PlanOptions(**({"workers": 8, "memory_bytes": 64 * GIB, "machine": MACHINES["cpu2"]} | values))


# ---------------------------------------------------------------- shapes against transformers


def test_every_family_has_a_tiny_config():
    assert {config["model_type"] for config in TINY.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", TINY)
def test_names_and_shapes_are_those_of_the_real_modules(name):
    model = tiny_model(TINY[name], "meta")
    expected = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
    assert model_shape(TINY[name]).parameters() == expected
    assert model_shape(TINY[name]).count == sum(math.prod(shape) for shape in expected.values())


@pytest.mark.parametrize("name", TINY)
def test_planned_weights_are_the_linears_and_experts_of_the_blocks(name):
    model, shape = tiny_model(TINY[name], "meta"), model_shape(TINY[name])
    linears = {key for key, module in model.named_modules() if isinstance(module, nn.Linear) and ".layers." in key}
    planned = {f"{shape.prefix.format(i)}.{w.name}" for i, block in enumerate(shape.blocks) for w in block.weights if not w.experts}
    assert planned == linears
    three = {key for key, parameter in model.named_parameters() if parameter.ndim == 3}
    fused = {f"{shape.prefix.format(i)}.{w.name}" for i, block in enumerate(shape.blocks) for w in block.weights if w.experts}
    assert fused == three
    for index, block in enumerate(shape.blocks):
        for weight in block.weights:
            module = model.get_submodule(f"{shape.prefix.format(index)}.{weight.name}") if not weight.experts else None
            assert weight.groups == getattr(module, "n_groups", 1)


@pytest.mark.parametrize("name", TINY)
def test_weights_share_an_input_exactly_where_a_forward_gives_them_the_same_tensor(name):
    """One Gram for q, k, v and one for gate, up: the labels must cut the block's linears as the tensors of a real forward do."""
    torch.manual_seed(0)
    model, shape = tiny_model(TINY[name], "cpu").eval(), model_shape(TINY[name])
    seen: dict[str, torch.Tensor] = {}

    def keep(path: str) -> Any:
        return lambda _module, inputs: seen.__setitem__(path, inputs[0])

    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".layers." in path:
            module.register_forward_pre_hook(keep(path))
    with torch.no_grad():
        model(input_ids=torch.randint(0, 160, (1, 12)))
    for index, block in enumerate(shape.blocks):
        by_tensor: dict[int, set[str]] = {}
        by_label: dict[str, set[str]] = {}
        for weight in block.weights:
            if not weight.experts:
                # Every input is kept alive in `seen`, so an address names one tensor.
                by_tensor.setdefault(seen[f"{shape.prefix.format(index)}.{weight.name}"].data_ptr(), set()).add(weight.name)
                by_label.setdefault(weight.reads, set()).add(weight.name)
        assert sorted(map(sorted, by_tensor.values())) == sorted(map(sorted, by_label.values()))


@pytest.mark.parametrize(
    ("name", "total", "active", "tolerance"),
    [
        # Published as 116.83 B, 235 B (22 B active), 671 B (37 B active), 284 B (13 B active), rounded as written: half a unit of the last digit.
        # gpt-oss' 5.1 B active leaves out both embedding tables (1.16 B) less the rounding; DeepSeek counts none of its 0.93 B input embedding.
        ("gpt-oss-120b", 116.83e9, None, 0.005e9),
        ("qwen3-235b-a22b", 235e9, 22e9, 0.5e9),
        ("deepseek-v3", 671e9, 37.0e9 + 0.93e9, 0.5e9),
        ("deepseek-v4-flash", 284e9, 13e9 + 0.53e9, 0.5e9),
        # Exact: the sums of the published safetensors.
        ("llama-3.1-8b", 8_030_261_248, 8_030_261_248, 0.5),
        ("smollm2-135m", 134_515_008, 134_515_008, 0.5),
    ],
)
def test_totals_are_the_published_ones(name, total, active, tolerance):
    shape = shape_of(name)
    assert shape.count == pytest.approx(total, abs=tolerance)
    if active is not None:
        assert shape.active == pytest.approx(active, abs=tolerance)


def test_source_bytes_are_those_of_the_published_checkpoints():
    # gpt-oss model card: 60.8 GiB, so within half of its last digit.
    assert shape_of("gpt-oss-120b").source_bytes / GIB == pytest.approx(60.8, abs=0.05)
    # A listing of V4-Flash's tensors sums to 148.65 GiB, of which the MTP block, which is not loaded, has 3.35 (3 x 1 for its experts' codes, 3/16 for
    # their scales, 0.16 for the rest). Left out here: float32 instead of bf16 for the hyper-connections (0.06) and the hash tables (0.02).
    assert shape_of("deepseek-v4-flash").source_bytes / GIB == pytest.approx(148.65 - 3.35, abs=0.1)
    # bf16: two bytes a parameter. fp8 with one float32 scale for 128 x 128: norms, routers and both embeddings stay bf16.
    assert shape_of("qwen3-235b-a22b").source_bytes == 2 * shape_of("qwen3-235b-a22b").count
    v3 = shape_of("deepseek-v3")
    weights = sum(w.count for block in v3.blocks for w in block.weights)
    assert v3.source_bytes == pytest.approx(weights * (1 + 4 / 128**2) + 2 * (v3.count - weights), rel=1e-12)


def test_v4_layers_are_as_in_its_checkpoint():
    kinds = {block.kind: layers for block, layers in shape_of("deepseek-v4-flash").kinds()}
    assert kinds == {"MoE": [0, 1], "MoE, sparse": list(range(2, 43, 2)), "MoE, heavy": list(range(3, 42, 2))}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"hidden_size": None}, ModelError, "'hidden_size' is None"),
        ({"num_hidden_layers": "2"}, ModelError, "'num_hidden_layers' is '2'"),
        ({"num_hidden_layers": 0}, ModelError, "no decoder block"),
        ({"intermediate_size": 0}, ModelError, "is empty"),
        ({"model_type": "lama"}, UnknownName, "did you mean 'llama'"),
        ({"model_type": None}, ModelError, "names no model_type"),
        ({"quantization_config": {"quant_method": "awq"}}, ModelError, "quantized already"),
    ],
)
def test_a_config_that_says_too_little_is_refused_in_one_line(change, error, words):
    with pytest.raises(error, match=re.escape(words)) as caught:
        model_shape({**TINY["llama"], **change}, "here/config.json")
    assert "\n" not in str(caught.value)


def test_v4_without_its_attention_schedule_is_refused():
    with pytest.raises(ModelError, match="compress_ratios must name the attention of 4 blocks, got 2"):
        model_shape({**TINY["deepseek_v4"], "compress_ratios": [0, 4]})
    with pytest.raises(ModelError, match="unknown: \\['7'\\]"):
        model_shape({**TINY["deepseek_v4"], "compress_ratios": [0, 4, 7, 4]})


def test_more_experts_a_token_than_experts_are_refused():
    with pytest.raises(ModelError, match="more experts are visited than exist"):
        model_shape({**TINY["mixtral"], "num_experts_per_tok": 5})


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_a_file_that_is_no_config_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"give a config\.json"):
        read_config(tmp_path)


# ---------------------------------------------------------------- bytes of states, rows of experts, owners


@pytest.mark.parametrize("width", [8, 9, 16])
def test_state_bytes_are_those_of_a_real_state(width):
    torch.manual_seed(0)
    for rows in range(2 * width):
        state = GramState(width=width)
        for row in torch.randn(rows, width):
            state = state.add(row[None])
        assert state_bytes(rows, width) == state.nbytes, rows


@pytest.mark.parametrize("lanes", range(1, 10))
def test_held_bytes_are_the_worst_moment_of_a_real_walk_through_the_lanes(lanes):
    """A worker merges finished lanes into whole nodes of the tree at once, like the carries of a binary counter."""
    planner = Planner(shape_of("smollm2-135m"), options(workers=1, lanes=lanes, samples=360, length=10))
    unit = Unit(label="x", width=64, outputs=1, rows=planner.tokens, plane_bytes=0)
    finished: list[int] = []
    worst = 0.0
    for _ in range(lanes):
        sizes = [*finished, 1]
        worst = max(worst, sum(state_bytes(3600 / lanes * size, 64) for size in sizes))
        while len(sizes) > 1 and sizes[-1] == sizes[-2]:
            sizes[-2:] = [sizes[-1] * 2]
        finished = sizes
    assert planner.held(unit) == pytest.approx(worst)


@pytest.mark.parametrize(("top_k", "experts", "skew"), [(4, 128, 2.5), (8, 256, 1.0), (2, 8, 3.8), (6, 7, 3.8), (3, 3, 2.0)])
def test_expert_rows_sum_to_every_routed_token(top_k, experts, skew):
    rows = expert_rows(1000.0, top_k, experts, skew)
    assert sum(rows) == pytest.approx(1000.0 * top_k)
    assert rows == sorted(rows, reverse=True) and max(rows) <= 1000.0 + 1e-9 and min(rows) > 0


def test_the_skew_is_the_95_percent_quantile_over_the_mean():
    rows = sorted(expert_rows(1e6, 1, 2000, 2.5))
    # 2000 midpoint quantiles, no clipping: the 95 % one lies between two of them, and cutting the lognormal's tail at 1 - 1/4000 lowers the mean by under 0.5 %.
    assert rows[1900] / (1e6 / 2000) == pytest.approx(2.5, rel=0.02)
    assert set(expert_rows(100.0, 2, 5, 1.0)) == {40.0}


def test_owners_by_longest_processing_time():
    # 7, 6 | 5 joins 6, 4 joins 7, 3 ties at 11 and goes to the lower number: by hand.
    assert longest_first([7, 6, 5, 4, 3], [0.0, 0.0]) == [0, 1, 1, 0, 0]
    assert longest_first([1.0, 1.0], [5.0, 0.0, 1.0]) == [1, 2]
    for costs in ([3, 3, 2, 2, 2], [5, 4, 3, 3, 3], [8, 7, 6, 5, 4]):
        best = min(
            max(sum(c for c, w in zip(costs, way, strict=True) if w == worker) for worker in range(2))
            for way in itertools.product((0, 1), repeat=5)
        )
        owners = longest_first(costs, [0.0, 0.0])
        assert max(sum(c for c, w in zip(costs, owners, strict=True) if w == worker) for worker in range(2)) <= best * 7 / 6


def test_plane_bytes_by_hand():
    weight = WeightShape(name="w", rows=4, columns=64, reads="x")
    # 256 codes in 128 bytes; 16 E4M3 scales and a float32; 8 E8M0 scales; 4 bf16 scales.
    assert plane_bytes(weight, "nvfp4") == 128 + 16 + 4
    assert plane_bytes(weight, "mxfp4") == 128 + 8
    assert plane_bytes(weight, "int4-g64") == 128 + 8
    experts = WeightShape(name="w", rows=4, columns=64, reads="x", experts=3)
    assert plane_bytes(experts, "nvfp4") == 3 * plane_bytes(weight, "nvfp4")


# ---------------------------------------------------------------- the three big plans


def gram(width: int) -> int:
    return 8 * width * width + 8 * width


@pytest.mark.parametrize(
    ("name", "dense", "experts", "widths"),
    [
        # experts only, hidden and inner; the attention stays.
        ("gpt-oss-120b", [], 128, (2880, 2880)),
        ("qwen3-235b-a22b", [4096, 8192], 128, (4096, 1536)),
        # attention, query latent, output latent, router's input, shared expert's inner; the block-diagonal o_a_proj stays.
        ("deepseek-v4-flash", [4096, 1024, 8192, 4096, 2048], 256, (4096, 2048)),
    ],
)
def test_state_and_moved_bytes_of_the_big_plans_by_hand(name, dense, experts, widths):
    # Without skew every expert sees at least 1048576 x 4 / 128 / 8 = 4096 or 3072 rows a worker, more than half its width: all states are Gram matrices.
    shape = shape_of(name)
    plan = make_plan(shape, options(machine=MACHINES["h100"], memory_bytes=128 * GIB, skew=1.0, policy=policy_of(name)))
    expected = sum(map(gram, dense)) + experts * sum(map(gram, widths))
    for block in plan.blocks:
        assert block.state_bytes == expected
        assert block.moved_bytes == 7 * expected
        assert len(block.tasks) == len(dense) + 2 * experts
        assert sum(block.wave_experts) == experts
    planes = sum(len(block.layers) * block.plane_bytes for block in plan.blocks)
    assert plan.moved_bytes == pytest.approx(7 * (len(shape.blocks) * expected + planes), rel=1e-12)
    linears = [w for block in shape.blocks for w in block.weights]
    stay = [w for w in linears if (name == "gpt-oss-120b" and not w.experts) or w.groups > 1]
    weights = sum(plane_bytes(w, policy_of(name).format) for w in linears if w not in stay)
    assert planes == pytest.approx(weights, rel=1e-12)
    kept = sum(k.count for block in shape.blocks for k in block.kept) + sum(k.count for k in (*shape.outer, *stay))
    assert plan.output_bytes == pytest.approx(weights + 2 * kept, rel=1e-12)


def test_starved_experts_keep_rows_and_send_less():
    """64 workers: an expert sees 512 rows a worker, under half of 2880, and its state is 512 rows instead of a matrix."""
    plan = make_plan(shape_of("gpt-oss-120b"), options(workers=64, machine=MACHINES["h100"], skew=1.0, policy=EXPERTS))
    assert plan.blocks[0].state_bytes == 256 * (4 * 512 * 2880 + 8 * 2880)
    # The owner has the products to make that the workers did not: 32768 rows of one expert.
    expert = next(task for task in plan.blocks[0].tasks if "gate_up_proj[" in task.label)
    assert expert.reduce_s > 32768 * 2880**2 / MACHINES["h100"].gram_flops_per_s


@pytest.mark.parametrize("name", ["gpt-oss-120b", "qwen3-235b-a22b", "deepseek-v4-flash", "deepseek-v3", "llama-3.1-8b", "smollm2-135m"])
@pytest.mark.parametrize("machine", ["cpu2", "h100"])
def test_a_plan_stays_inside_what_it_was_given(name, machine):
    given = options(machine=MACHINES[machine], memory_bytes=96 * GIB, disk_bytes=400 * GIB, policy=policy_of(name))
    plan = make_plan(shape_of(name), given)
    limits = {"RAM": 96 * GIB, "GPU": MACHINES[machine].gpu_memory_bytes, "object store": 0.3 * 96 * GIB, "disk": 400 * GIB}
    for need in plan.needs:
        assert need.total <= limits[need.resource], need.arithmetic()
    assert sorted(layer for block in plan.blocks for layer in block.layers) == list(range(len(plan.shape.blocks)))
    assert plan.seconds == pytest.approx(sum(plan.phases().values())) and min(plan.phases().values()) >= 0


def test_activations_count_every_residual_stream():
    # 64 samples x 2048 tokens x 4 streams x 4096 x 2 bytes.
    plan = make_plan(shape_of("deepseek-v4-flash"), options(machine=MACHINES["h100"], memory_bytes=128 * GIB))
    assert plan.activation_bytes == 64 * 2048 * 4 * 4096 * 2


def test_a_shard_that_does_not_fit_beside_the_rest_is_streamed_too():
    shape, given = shape_of("deepseek-v3"), options(workers=4)
    resident = Planner(shape, given)
    assert resident.activations < given.activation_share * given.memory_bytes
    assert make_plan(shape, given).spilled and not make_plan(shape, given.with_overrides({"memory_bytes": 96 * GIB})).spilled


def test_a_shard_above_its_share_of_memory_is_streamed_from_disk():
    roomy = make_plan(shape_of("llama-3.1-8b"), options(workers=1, memory_bytes=96 * GIB))
    tight = make_plan(shape_of("llama-3.1-8b"), options(workers=1, memory_bytes=32 * GIB))
    assert not roomy.spilled and tight.spilled
    held = dict(next(need for need in tight.needs if need.stage == "collect").terms)["activations"]
    assert held == 2 * 2048 * 4096 * 4
    # One more reading of the shard in each forward.
    assert tight.phases()["propagate"] - roomy.phases()["propagate"] == pytest.approx(32 * roomy.activation_bytes / 1e9)


# ---------------------------------------------------------------- CAL-11: uneven layers, waves


def uneven() -> ModelShape:
    """Blocks of 8, 24 and 48 experts whose down projection reads 16384 columns: one state is 2 GiB in float64."""
    base = model_shape({**TINY["mixtral"], "hidden_size": 512, "intermediate_size": 16384, "num_hidden_layers": 1})
    blocks = []
    for experts in (8, 24, 48):
        weights = tuple(WeightShape(**{**_fields(w), "experts": experts if w.experts else 0}) for w in base.blocks[0].weights)
        blocks.append(BlockShape(kind=f"{experts} experts", weights=weights, kept=(), attention=base.blocks[0].attention, top_k=2))
    return ModelShape(model_type="uneven", hidden=512, vocab=1000, blocks=tuple(blocks), outer=base.outer, tied=False)


def _fields(weight: WeightShape) -> dict[str, Any]:
    return {field: getattr(weight, field) for field in weight.__dataclass_fields__}


def test_waves_follow_the_largest_layer_not_the_average():
    plan = make_plan(uneven(), options(workers=2))
    assert [block.waves for block in plan.blocks] == [1, 1, 2]
    assert [block.wave_experts for block in plan.blocks] == [(8,), (24,), (24, 24)]
    peak = plan.peak("RAM")
    assert peak is not None and 48 * GIB < peak.total <= 64 * GIB
    # The average layer has 26.7 experts, 53.4 GiB of states: a plan made from it would run the third block in one wave, 96 GiB.
    by_kind = {block.kind: dict(next(n for n in block.needs if n.stage == "collect").terms)["states"] for block in plan.blocks}
    assert by_kind["8 experts"] < by_kind["24 experts"] and by_kind["48 experts"] < 64 * GIB


def test_each_wave_is_one_more_forward():
    one = make_plan(uneven(), options(workers=2, memory_bytes=200 * GIB)).blocks[2]
    two = make_plan(uneven(), options(workers=2)).blocks[2]
    assert (one.waves, two.waves) == (1, 2)
    assert two.phases()["forward"] == pytest.approx(2 * one.phases()["forward"])
    assert two.phases()["gram"] == pytest.approx(one.phases()["gram"])
    assert two.moved_bytes == pytest.approx(one.moved_bytes)


def test_less_memory_never_means_fewer_waves():
    waves = []
    for memory in range(24, 120, 4):
        try:
            waves.append(make_plan(uneven(), options(workers=2, memory_bytes=memory * GIB)).blocks[2].waves)
        except ResourceError:
            assert not waves, "a larger memory was refused after a smaller one fitted"
    assert waves == sorted(waves, reverse=True) and waves[0] >= 4 and waves[-1] == 1


def test_every_expert_is_in_one_wave_once():
    for block in make_plan(uneven(), options(workers=2, memory_bytes=40 * GIB)).blocks:
        down = [task.label for task in block.tasks if task.label.startswith("down_proj")]
        assert sorted(down) == sorted(f"down_proj[{index}]" for index in range(block.experts))
        for wave, size in enumerate(block.wave_experts):
            assert sum(task.wave == wave and task.label.startswith("down_proj") for task in block.tasks) == size


def refused(shape: ModelShape, given: PlanOptions) -> str:
    with pytest.raises(ResourceError) as caught:
        make_plan(shape, given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("deepseek-v3", {"workers": 4, "memory_bytes": 16 * GIB}),
        ("deepseek-v3", {"workers": 32, "memory_bytes": 56 * GIB}),
        ("gpt-oss-120b", {"workers": 2, "memory_bytes": 8 * GIB}),
        ("llama-3.1-8b", {"workers": 1, "memory_bytes": 12 * GIB}),
        ("qwen3-235b-a22b", {"workers": 8, "memory_bytes": 8 * GIB, "lanes": 64}),
    ],
)
def test_the_memory_that_a_refusal_names_is_the_least_that_fits(name, values):
    shape, given = shape_of(name), options(object_store_bytes=64 * GIB, policy=policy_of(name), **values)
    text = refused(shape, given)
    terms = re.search(r"RAM ([\d.]+) GiB in .* = (.*?)(, one expert a wave)?; ([\d.]+) GiB are given", text)
    assert terms, text
    parts = [float(part) for part in re.findall(r" ([\d.]+)(?= \+|$)", terms[2])]
    assert sum(parts) == pytest.approx(float(terms[1]), abs=0.005 * (len(parts) + 1))
    least = re.search(r"the least that fits: ([\d.]+) GiB of RAM", text)
    assert least, text
    enough = round(float(least[1]) * GIB)
    assert make_plan(shape, given.with_overrides({"memory_bytes": enough})).peak("RAM").total <= enough
    refused(shape, given.with_overrides({"memory_bytes": enough - GIB // 50}))


def test_the_number_of_workers_that_a_refusal_names_is_the_least_that_fits():
    # Two sets of activations, 16 GiB over all workers, beside 5.61 GiB of output: with 5 workers the largest shard has 103 of
    # 512 samples, 6.44 + 5.61 GiB, with 6 it has 86, 5.38 + 5.61.
    shape, given = shape_of("llama-3.1-8b"), options(workers=2, disk_bytes=12 * GIB)
    text = refused(shape, given)
    fewest = int(re.search(r"; (\d+) workers with what each has now", text)[1])
    assert fewest == smallest_workers(shape, given) == 6
    make_plan(shape, given.with_overrides({"workers": fewest}))
    refused(shape, given.with_overrides({"workers": fewest - 1}))


def test_where_no_number_of_workers_helps_the_refusal_says_so():
    # Every worker holds a whole block: 42.9 GiB in float32.
    assert "no number of workers up to 512 fits" in refused(shape_of("deepseek-v3"), options(memory_bytes=32 * GIB))


def test_gpu_memory_is_a_limit_of_its_own():
    shape = shape_of("deepseek-v3")
    machine = MACHINES["h100"].with_overrides({"gpu_memory_bytes": 24 * GIB})
    text = refused(shape, options(machine=machine, memory_bytes=256 * GIB))
    assert re.search(r"GPU [\d.]+ GiB in (solve|collect) of a MoE block = weights 21\.43 \+", text), text
    least = float(re.search(r"the least that fits: ([\d.]+) GiB of GPU", text)[1])
    make_plan(shape, options(machine=machine.with_overrides({"gpu_memory_bytes": round(least * GIB)}), memory_bytes=256 * GIB))


def test_fixed_lanes_cost_a_tree_of_states():
    shape = shape_of("llama-3.1-8b")
    one, many = (make_plan(shape, options(memory_bytes=128 * GIB, lanes=lanes)) for lanes in (8, 64))
    held = [dict(next(n for n in plan.needs if n.stage == "collect").terms)["states"] for plan in (one, many)]
    # 8 lanes a worker: at the last one, nodes of 4, 2 and 1 lanes and the lane in progress, all of them Gram matrices.
    assert held[1] == 4 * held[0]
    assert one.moved_bytes == many.moved_bytes


# ---------------------------------------------------------------- RAY-05, RAY-06, CAL-08, methods


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"workers": 2, "cpus": 2},
            "2 workers x 1 CPU = 2 and 1 for reading need 3 CPUs, the cluster has 2; 1 worker(s) leave the readers theirs, or add 1",
        ),
        ({"workers": 2, "cpus": 8, "cpus_per_worker": 4}, "2 workers x 4 CPU = 8 and 1 for reading need 9 CPUs"),
        ({"workers": 1, "cpus": 1}, "no worker fits beside the readers"),
        ({"workers": 2, "reader_cpus": 0}, "no CPU is reserved for reading"),
    ],
)
def test_actors_that_leave_no_cpu_to_read_are_refused(values, words):
    assert words in refused(shape_of("smollm2-135m"), options(**values))


def test_cpus_that_are_enough_are_accepted():
    make_plan(shape_of("smollm2-135m"), options(workers=2, cpus=3))
    make_plan(shape_of("smollm2-135m"), options(workers=2, cpus=2.5, reader_cpus=0.5))


def test_states_go_through_a_small_store_in_rounds():
    plan = make_plan(shape_of("gpt-oss-120b"), options(object_store_bytes=2 * GIB, policy=EXPERTS))
    peak = plan.peak("object store")
    assert peak is not None and peak.stage == "reduce" and peak.total == 2 * GIB
    assert plan.moved_bytes == make_plan(shape_of("gpt-oss-120b"), options(object_store_bytes=60 * GIB, policy=EXPERTS)).moved_bytes


def test_a_store_below_its_least_is_refused_and_one_worker_needs_none():
    shape = shape_of("gpt-oss-120b")
    text = refused(shape, options(object_store_bytes=GIB, policy=EXPERTS))
    # The planes of a block are larger than two of its largest states.
    least = float(re.search(r"the least that fits: ([\d.]+) GiB of object store", text)[1])
    assert least == pytest.approx(plane_total(shape) / GIB, abs=0.01)
    make_plan(shape, options(object_store_bytes=round(least * GIB), policy=EXPERTS))
    assert make_plan(shape, options(workers=1, object_store_bytes=0, policy=EXPERTS)).peak("object store") is None


def plane_total(shape: ModelShape) -> float:
    return sum(plane_bytes(w, "mxfp4") for w in shape.blocks[0].weights if w.experts)


def test_disk_is_checked_up_front():
    text = refused(shape_of("gpt-oss-120b"), options(disk_bytes=50 * GIB, policy=EXPERTS))
    assert re.search(r"disk 63\.5\d GiB in write of a last block = activations 2\.81 \+ output 60\.77; 50\.00 GiB are given", text), text


def test_every_width_that_does_not_divide_is_listed_with_what_fits():
    config = {
        **TINY["llama"],
        "hidden_size": 200,
        "intermediate_size": 48,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "head_dim": 40,
    }
    with pytest.raises(FormatError) as caught:
        make_plan(model_shape(config), options(workers=1, policy=QuantPolicy(format="int4-g128")))
    text = str(caught.value)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        assert f"{name} (" in text
    assert "self_attn.q_proj (200 columns, int4-g128 block 128" in text and "mlp.down_proj (48 columns, int4-g128 block 128" in text
    assert "formats that fit: nvfp4" in text


def test_an_override_is_honoured_before_the_default_block():
    # 48 columns are no multiple of mxfp4's 32; the override's 16 fits.
    config = {**TINY["llama"], "intermediate_size": 48}
    with pytest.raises(FormatError, match="1 kind"):
        make_plan(model_shape(config), options(workers=1, policy=QuantPolicy(format="mxfp4")))
    policy = QuantPolicy(format="mxfp4", overrides={"*.down_proj": "nvfp4"})
    weights = {name: chosen for name, _, chosen in make_plan(model_shape(config), options(workers=1, policy=policy)).blocks[0].weights}
    assert weights["mlp.down_proj"] == "nvfp4" and weights["mlp.up_proj"] == "mxfp4"
    kept = make_plan(model_shape(config), options(workers=1, policy=QuantPolicy(format="mxfp4", keep_indivisible=True)))
    assert {name: chosen for name, _, chosen in kept.blocks[0].weights}["mlp.down_proj"] is None


def test_a_policy_that_names_layers_splits_the_kinds():
    policy = QuantPolicy(ignore=(*DEFAULT_IGNORE, "model.layers.0.*"))
    plan = make_plan(shape_of("smollm2-135m"), options(policy=policy))
    assert [block.layers for block in plan.blocks] == [(0,), tuple(range(1, 30))]
    assert not plan.blocks[0].tasks and plan.blocks[0].plane_bytes == 0


def test_a_head_that_is_to_be_quantized_is_refused_as_long_as_it_is_not_planned():
    with pytest.raises(ConfigError, match="leaves lm_head as it is"):
        make_plan(shape_of("llama-3.1-8b"), options(policy=QuantPolicy(ignore=("*embed*",))))
    with pytest.raises(ConfigError, match="quantizes nothing"):
        make_plan(shape_of("llama-3.1-8b"), options(policy=QuantPolicy(ignore=("*",))))


def test_a_plan_quantizes_what_the_policy_quantizes_on_the_real_modules():
    """gpt-oss and DeepSeek-V4 on meta: the same weights in the same formats as formats.policy plans."""
    for name in ("gpt_oss", "deepseek_v4", "deepseek_v3", "llama"):
        policy = EXPERTS if name == "gpt_oss" else QuantPolicy(keep_indivisible=True)
        entries = {entry.name: entry.format for entry in policy_plan(tiny_model(TINY[name], "meta"), policy).entries}
        plan = make_plan(model_shape(TINY[name]), options(workers=1, policy=policy))
        found = {
            f"{plan.shape.prefix.format(layer)}.{weight}": chosen
            for block in plan.blocks
            for layer in block.layers
            for weight, _, chosen in block.weights
            if chosen is not None
        }
        assert found == entries


def test_an_override_of_a_block_diagonal_linear_is_refused():
    with pytest.raises(ModelError, match=r"layers.0.self_attn.o_a_proj: is to be mxfp4, but a block-diagonal linear stays"):
        make_plan(model_shape(TINY["deepseek_v4"]), options(workers=1, policy=QuantPolicy(overrides={"*.o_a_proj": "mxfp4"})))


def test_a_method_without_statistics_reads_no_sample():
    plan = make_plan(shape_of("gpt-oss-120b"), options(method="rtn", reader_cpus=0, policy=EXPERTS))
    phases = plan.phases()
    assert plan.blocks[0].waves == 0 and plan.activation_bytes == 0
    assert phases["forward"] == phases["gram"] == phases["propagate"] == phases["reduce"] == 0 and phases["load"] > 0 < phases["solve"]
    assert plan.output_bytes == make_plan(shape_of("gpt-oss-120b"), options(policy=EXPERTS)).output_bytes


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"method": "gpqt"}, UnknownName, "unknown method 'gpqt'"),
        ({"workers": 513}, ConfigError, "every worker needs a lane, every lane a sample"),
        ({"lanes": 4}, ConfigError, "every worker needs a lane"),
        ({"policy": QuantPolicy(format="nvfp5")}, UnknownName, "unknown format 'nvfp5'"),
    ],
)
def test_options_that_contradict_each_other_are_refused(values, error, words):
    with pytest.raises(error, match=re.escape(words)):
        make_plan(shape_of("smollm2-135m"), options(**values))


# ---------------------------------------------------------------- times


def test_the_forward_of_a_dense_model_by_hand():
    """SmolLM2: 2 x 3.54 M weights a block and 4 x 9 x 64 x 512 for scores, 32768 tokens, 30 blocks, 60 GFLOP/s."""
    plan = make_plan(shape_of("smollm2-135m"), options(workers=1, samples=64, length=512))
    weights = 576 * (2 * 576 + 2 * 192) + 3 * 576 * 1536
    assert plan.phases()["forward"] == pytest.approx(30 * 64 * 512 * (2 * weights + 4 * 9 * 64 * 512) / 60e9, rel=1e-12)


def test_two_workers_halve_what_is_shared_and_nothing_else():
    one, two = (make_plan(shape_of("smollm2-135m"), options(workers=workers)).phases() for workers in (1, 2))
    for phase in ("forward", "gram"):
        assert two[phase] == pytest.approx(one[phase] / 2, rel=0.01)
    assert two["load"] == one["load"]
    assert one["publish"] == 0 and two["publish"] > 0
    assert one["solve"] / 2 <= two["solve"] < one["solve"]


def test_the_rates_divide_the_phases_they_name():
    base = options(machine=MACHINES["h100"], memory_bytes=128 * GIB, policy=EXPERTS)
    shape = shape_of("gpt-oss-120b")
    before = make_plan(shape, base).phases()
    for field, phase in (("forward_flops_per_s", "forward"), ("network_bytes_per_s", "publish"), ("solve_flops_per_s", "solve")):
        faster = base.machine.with_overrides({field: 2 * getattr(base.machine, field)})
        after = make_plan(shape, base.with_overrides({"machine": faster.to_dict()})).phases()
        assert after[phase] == pytest.approx(before[phase] / 2)


# ---------------------------------------------------------------- the command


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(["plan", *arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_the_command_prints_a_plan(capsys):
    code, out, err = command(
        capsys, str(CONFIGS / "gpt-oss-120b.json"), "--workers", "8", "--memory", "64GiB", "--simulate", "1,8", "--format", "mxfp4"
    )
    assert (code, err) == (0, "")
    for words in (
        "116.83 B parameters",
        "128 experts top-4",
        "mlp.experts.down_proj",
        "RAM, the busiest owner",
        "object store, a node",
        "moved over",
    ):
        assert words in out
    assert "Times are estimates" in out and out.count("100.0%") >= 3
    assert max(len(line) for line in out.splitlines()) <= 180 and all(line == line.rstrip() for line in out.splitlines())


def test_the_command_prints_json(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY["deepseek_v3"]))
    arguments = ("--workers", "2", "--memory", "8GiB", "--samples", "8", "--length", "16", "--format", "nvfp4", "--ignore", "*.self_attn.*")
    code, out, _ = command(capsys, str(tmp_path), *arguments, "--override", "*.experts.*=mxfp4", "--json", "--simulate", "1,2,16")
    found = json.loads(out)
    assert code == 0 and found["model"]["layers"] == 3 and len(found["blocks"]) == 2
    formats = {name: chosen for name, _, chosen in found["blocks"][1]["weights"]}
    assert (
        formats["mlp.experts.down_proj"] == "mxfp4"
        and formats["self_attn.o_proj"] is None
        and formats["mlp.shared_experts.up_proj"] == "nvfp4"
    )
    rows = found["simulation"]["rows"]
    assert [row["workers"] for row in rows] == [1, 2, 16] and "every worker needs a lane" in rows[2]["refusal"]
    assert rows[0]["makespan_s"] == pytest.approx(rows[0]["planned_s"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--memory", "16GiB", "--format", "mxfp4"], "the least that fits"),
        (["--memory", "64GiB", "--cpus", "8"], "7 worker(s) leave the readers theirs"),
        (["--memory", "64GiB"], "is to be nvfp4, but the gpt-oss-mxfp4 layout holds every expert in mxfp4"),
        (["--memory", "64GiB", "--format", "mxfp4", "--override", "*.q_proj=mxfp4"], "the gpt-oss-mxfp4 layout holds experts only"),
        (["--memory", "64"], "'64' is no size"),
        (["--memory", "64GiB", "--network", "10G"], "'10G' is no rate"),
        (["--memory", "64GiB", "--machine", "a100"], "unknown machine 'a100'"),
        (["--memory", "64GiB", "--set", "solve_flops=1"], "did you mean 'solve_flops_per_s'"),
        (["--memory", "64GiB", "--simulate", "1,x"], "no list of numbers"),
        (["--memory", "64GiB", "--override", "x"], "not of the form glob=format"),
    ],
)
def test_the_command_refuses_in_one_line(capsys, arguments, words):
    code, out, err = command(capsys, str(CONFIGS / "gpt-oss-120b.json"), "--workers", "8", *arguments)
    assert code == 2 and out == "" and words in err and err.count("\n") == 1


@pytest.mark.parametrize(("text", "size"), [("64GiB", 64 * GIB), ("80GB", 80 * 10**9), ("1.5 tib", 1.5 * 2**40), ("512mb", 512 * 10**6)])
def test_sizes(text, size):
    assert parse_bytes(text, "memory") == size


@pytest.mark.parametrize(("text", "rate"), [("10Gbit/s", 1.25e9), ("2GB/s", 2e9), ("1GiB/s", 2**30), ("100 Mbit/s", 12.5e6)])
def test_rates(text, rate):
    assert parse_rate(text, "network") == rate


@pytest.mark.parametrize("text", ["0GiB", "-1GiB", "GiB", "64Gb/s", "1e3GiB"])
def test_sizes_that_are_none(text):
    with pytest.raises(ConfigError):
        parse_bytes(text, "memory")


@pytest.mark.parametrize("text", ["10Gb/s", "10GB", "0Gbit/s", "10gb/s"])
def test_rates_that_are_none_or_could_be_bits_or_bytes(text):
    with pytest.raises(ConfigError):
        parse_rate(text, "network")


def test_a_plan_is_plain_data():
    plan: Plan = make_plan(shape_of("gpt-oss-120b"), options(policy=EXPERTS))
    assert json.loads(json.dumps(plan.to_dict()))["needs"][0]["terms"]["process"] == PROCESS_BYTES
