"""Folding of AWQ's factors: places by family, the block unchanged, the whole pass and its checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from prism_ray.calibrate import fold
from prism_ray.calibrate.assemble import write_checkpoint
from prism_ray.calibrate.config import CalibrateConfig
from prism_ray.calibrate.fold import Folding, Place, find_places, fold_block, holds, norm_offset
from prism_ray.calibrate.run import CrewSpec, LocalCrew, calibrate
from prism_ray.calibrate.text import TextData
from prism_ray.calibrate.units import Unit, apply_planes, make_units, read_plain, read_planes, read_records, weight_of
from prism_ray.core.errors import ModelError
from prism_ray.formats.parameters import meta_model
from prism_ray.formats.policy import DEFAULT_IGNORE, QuantPolicy, expert_parameters, make_plan
from prism_ray.hessian.capture import Capture, InputGroup, use_our_experts
from prism_ray.hessian.state import GramState
from prism_ray.models.load import load_model
from prism_ray.models.tiny import save_tiny, tiny_llama, tiny_qwen3_moe
from prism_ray.quantizers.awq import NO_PLACE
from prism_ray.quantizers.base import QuantizerOptions

SMALL: dict[str, Any] = {
    "vocab_size": 64,
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
MLA: dict[str, Any] = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
ATTENTION = {"input_layernorm", "self_attn.v_proj"}
FAMILIES: dict[str, tuple[Callable[[], Any], set[str]]] = {
    # name -> (config, makers of the places that its last block has)
    "llama": (lambda: LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True), {*ATTENTION, "post_attention_layernorm", "mlp.up_proj"}),
    "llama-mha": (lambda: LlamaConfig(**SMALL | {"num_key_value_heads": 4}), {*ATTENTION, "post_attention_layernorm", "mlp.up_proj"}),
    "qwen3_moe": (
        lambda: Qwen3MoeConfig(**SMALL, **EXPERTS, num_experts=4, head_dim=16),
        {*ATTENTION, "post_attention_layernorm", "mlp.experts.gate_up_proj"},
    ),
    "mixtral": (
        lambda: MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
        {*ATTENTION, "post_attention_layernorm", "mlp.experts.gate_up_proj"},
    ),
    "deepseek_v3": (
        lambda: DeepseekV3Config(
            **SMALL | MLA | EXPERTS | {"num_key_value_heads": 4},
            n_group=2,
            topk_group=1,
            n_routed_experts=4,
            n_shared_experts=1,
            first_k_dense_replace=1,
        ),
        {
            *("input_layernorm", "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm", "self_attn.kv_b_proj", "post_attention_layernorm"),
            *("mlp.experts.gate_up_proj", "mlp.shared_experts.up_proj"),
        },
    ),
    # Its experts clamp and add 1 to up: no place for down_proj. Its weights are transposed and interleaved.
    "gpt_oss": (
        lambda: GptOssConfig(**SMALL, head_dim=16, num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"] * 2),
        {*ATTENTION, "post_attention_layernorm"},
    ),
    # Norms multiply by 1 + weight, and post_attention_layernorm stands behind the attention.
    "gemma2": (lambda: Gemma2Config(**SMALL, head_dim=16), {*ATTENTION, "pre_feedforward_layernorm", "mlp.up_proj"}),
}


def random_model(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape) * 0.2)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                # Channels that carry more than others, or there is nothing to fold.
                parameter[::7] += 4.0
    use_our_experts(model)
    return model


class Bench:
    """The last block of a model with its planned weights, an input, and its statistics."""

    def __init__(self, model: Any):
        self.block: nn.Module = model.model.layers[-1]
        self.formats = {
            name: "nvfp4" for name, module in self.block.named_modules() if isinstance(module, nn.Linear) and not name.endswith("router")
        }
        self.formats |= {f"{name}.{leaf}": "nvfp4" for name, module in self.block.named_modules() for leaf in expert_parameters(module)}
        self._seen: dict[str, Any] = {}
        hook = self.block.register_forward_pre_hook(lambda _, args, kwargs: self._seen.update(args=args, kwargs=kwargs), with_kwargs=True)
        model(torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(1)), use_cache=False)
        hook.remove()

    def run(self) -> torch.Tensor:
        with torch.no_grad():
            output = self.block(*self._seen["args"], **self._seen["kwargs"])
        return output[0] if isinstance(output, tuple) else output

    def places(self) -> list[Place]:
        return find_places(self.block, self.formats, self.run)

    def folding(self, formats: dict[str, str] | None = None, **options: Any) -> Folding:
        formats = self.formats if formats is None else formats
        groups, states = self.collect(formats)
        units, chosen = make_units(self.block, groups), QuantizerOptions(**{"scales": "amax"} | options)
        return fold_block(self.block, "", units, formats, states.get, self.run, "awq", chosen)

    def collect(self, formats: dict[str, str]) -> tuple[list[InputGroup], dict[str, GramState]]:
        latent = "self_attn.kv_b_proj"
        seen: list[torch.Tensor] = []
        hook = (
            self.block.get_submodule(latent).register_forward_pre_hook(lambda _, args: seen.append(args[0])) if latent in formats else None
        )
        names = [name for name in formats if name != latent]
        with Capture(self.block, names) as capture, capture.batch(torch.ones(2, 24, dtype=torch.bool)):
            self.run()
        groups, states = capture.groups, dict(capture.states)
        if hook is not None:
            # [B, 1, T, latent], which is no shape that the capture takes.
            hook.remove()
            width = seen[0].shape[-1]
            groups.append(InputGroup(name=latent, members=(latent,), width=width))
            states[latent] = GramState(width=width).add(seen[0].reshape(-1, width))
        return groups, states

    @torch.no_grad()
    def fold(self, folding: Folding) -> None:
        for name, factors in folding.factors.items():
            path, _, number = name.rpartition(".")
            weight = weight_of(self.block, path, int(number)) if number.isdigit() else weight_of(self.block, name, None)
            weight.copy_(factors.fold(weight))
        apply_planes(self.block, {}, folding.plain)


def state_of(block: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in block.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_places_of_each_family(family, dtype):
    config, expected = FAMILIES[family]
    bench = Bench(random_model(config(), dtype))
    before = state_of(bench.block)
    places = bench.places()
    assert {place.maker for place in places} == expected
    readers = [name for place in places for name in place.readers]
    assert len(readers) == len(set(readers))
    assert set(bench.formats) - set(readers) == ({"mlp.experts.down_proj"} if family == "gpt_oss" else set())
    # Trying them has put every weight back, to the last bit.
    assert all(torch.equal(value, before[name]) for name, value in bench.block.state_dict().items())


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folded_block_computes_what_it_computed(family, constant, monkeypatch):
    monkeypatch.setattr(fold, "STORED", torch.float32)
    bench = Bench(random_model(FAMILIES[family][0]()))
    before, weights = bench.run(), state_of(bench.block)
    folding = bench.folding(awq_block_constant=constant)
    assert all(torch.equal(value, weights[name]) for name, value in bench.block.state_dict().items())
    assert any(factors.alpha > 0 for factors in folding.factors.values())
    if family in ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"):
        router = "mlp.router.weight" if family == "gpt_oss" else "mlp.gate.weight"
        assert folding.plain[router].shape == weights[router].shape
    bench.fold(folding)
    moved = sum(not torch.equal(value, weights[name]) for name, value in bench.block.state_dict().items())
    assert moved >= 4
    # Each factor is rounded to float32 on either side and so are the products: a handful of 2^-24 a term, sqrt(96) of them random in a sum, through seven
    # projections of which the largest terms exceed their sum by some ten times: 5 * 2^-24 * 10 * 7 * 10 = 2e-4 at most. A wrong factor moves the output by itself.
    assert float((bench.run() - before).abs().max()) < 2e-4 * float(before.abs().max())


def test_a_wrong_fold_is_seen():
    # The same model with one factor left out: what the test above would see.
    bench = Bench(random_model(FAMILIES["llama"][0]()))
    before, folding = bench.run(), bench.folding()
    plain = {name: value for name, value in folding.plain.items() if name != "post_attention_layernorm.weight"}
    bench.fold(Folding(factors=folding.factors, plain=plain))
    assert float((bench.run() - before).abs().max()) > 1e-2 * float(before.abs().max())


def test_query_heads_on_one_value_head_share_its_factors():
    bench = Bench(random_model(FAMILIES["llama"][0]()))
    columns = bench.folding().factors["self_attn.o_proj"].columns
    assert columns is not None
    heads = columns.view(2, 2, 16)
    assert torch.equal(heads[:, 0], heads[:, 1]) and not torch.equal(heads[0], heads[1])


def test_biases_before_a_weight_are_folded_too():
    bench = Bench(random_model(FAMILIES["llama"][0]()))
    folding = bench.folding()
    rows = folding.factors["mlp.up_proj"].rows
    columns = folding.factors["mlp.down_proj"].columns
    assert rows is not None and columns is not None and torch.equal(rows, 1.0 / columns)
    bias = bench.block.get_parameter("mlp.up_proj.bias")
    assert torch.equal(folding.plain["mlp.up_proj.bias"], (bias * rows).to(torch.bfloat16))
    assert "mlp.down_proj.bias" not in folding.plain


def test_what_is_not_quantized_takes_its_part_as_a_plain_tensor():
    bench = Bench(random_model(FAMILIES["llama"][0]()))
    formats = {name: chosen for name, chosen in bench.formats.items() if name not in ("self_attn.v_proj", "mlp.up_proj")}
    folding = bench.folding(formats)
    v_proj = bench.block.get_parameter("self_attn.v_proj.weight")
    q, o = folding.factors["self_attn.q_proj"].columns, folding.factors["self_attn.o_proj"].columns
    assert q is not None and o is not None
    expected = v_proj * q * (1.0 / o.view(2, 2, 16)[:, 0].reshape(-1))[:, None]
    assert torch.equal(folding.plain["self_attn.v_proj.weight"], expected.to(torch.bfloat16))
    assert set(folding.factors) == set(formats)
    assert folding.plain["mlp.up_proj.weight"].dtype == torch.bfloat16


def test_experts_have_factors_of_their_own_and_share_those_of_the_norm():
    bench = Bench(random_model(FAMILIES["qwen3_moe"][0]()))
    factors = bench.folding().factors
    shared = [factors[f"mlp.experts.gate_up_proj.{expert}"] for expert in range(4)]
    own = [factors[f"mlp.experts.down_proj.{expert}"] for expert in range(4)]
    assert shared[0].columns is not None
    assert all(one.columns is not None and torch.equal(one.columns, shared[0].columns) for one in shared)
    assert len({one.alpha for one in shared}) == 1
    made = [one.columns for one in own if one.columns is not None]
    assert len(made) > 1 and not torch.equal(made[0], made[1])
    for gate_up, down in zip(shared, own, strict=True):
        if down.columns is not None:
            # Rows of gate keep theirs; rows of up make what down reads.
            assert gate_up.rows is not None
            assert torch.equal(gate_up.rows, torch.cat([torch.ones(32), 1.0 / down.columns]))


def test_an_expert_without_rows_has_no_factors_of_its_own():
    model = random_model(FAMILIES["qwen3_moe"][0]())
    bench = Bench(model)
    groups, states = bench.collect(bench.formats)
    units = make_units(bench.block, groups)
    states = {key: state for key, state in states.items() if not key.endswith("_proj.2")}
    folding = fold_block(bench.block, "", units, bench.formats, states.get, bench.run, "awq", QuantizerOptions(scales="amax"))
    down, gate_up = folding.factors["mlp.experts.down_proj.2"], folding.factors["mlp.experts.gate_up_proj.2"]
    assert (down.reason, down.columns) == ("no calibration rows", None)
    assert gate_up.columns is not None and gate_up.rows is None


class Shifted(nn.Module):
    """A norm in whose place nothing can be folded by its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.weight)


def test_norms_are_told_by_what_they_do():
    llama, gemma = random_model(FAMILIES["llama"][0]()), random_model(FAMILIES["gemma2"][0]())
    assert norm_offset(llama.model.norm, 64) == 0.0
    assert norm_offset(gemma.model.norm, 64) == 1.0
    assert norm_offset(nn.LayerNorm(8), 8) == 0.0
    assert norm_offset(nn.LayerNorm(8, elementwise_affine=False), 8) is None
    assert norm_offset(nn.Linear(8, 8), 8) is None
    assert norm_offset(llama.model.norm, 32) is None


class TinyBlock(nn.Module):
    """norm -> q_proj, and beside it whatever `forward` does."""

    def __init__(self, norm: nn.Module, beside: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.input_layernorm, self.self_attn, self.beside = norm, nn.Module(), beside
        self.self_attn.q_proj, self.self_attn.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)
        self.extra = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.input_layernorm(x)
        return x + self.self_attn.q_proj(made) + (self.extra(made) if self.beside else 0.0)


@pytest.mark.parametrize(
    ("norm", "beside", "readers", "expected"),
    [
        (nn.RMSNorm(8), False, ("self_attn.q_proj",), True),
        (nn.LayerNorm(8), False, ("self_attn.q_proj",), True),
        # Something that the map does not know reads the norm too.
        (nn.RMSNorm(8), True, ("self_attn.q_proj",), False),
        # A reader that does not read: multiplying it changes nothing, as folding it would not.
        (nn.RMSNorm(8), False, ("self_attn.k_proj",), False),
        (Shifted(), False, ("self_attn.q_proj",), False),
    ],
)
def test_a_place_is_used_only_where_the_block_stays_the_same(norm, beside, readers, expected):
    block = TinyBlock(norm, beside)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(8))
        if getattr(norm, "bias", None) is not None:
            norm.bias.copy_(torch.randn(8))
    x = torch.randn(3, 8)
    before = state_of(block)
    place = Place(maker="input_layernorm", readers=readers, source=torch.arange(8), norm=True)
    with torch.no_grad():
        assert holds(place, block, lambda: block(x)) is expected
    assert all(torch.equal(value, before[name]) for name, value in block.state_dict().items())


def test_a_clamp_that_ordinary_inputs_do_not_reach_is_found():
    class Clamped(nn.Module):
        def __init__(self, limit: float):
            super().__init__()
            torch.manual_seed(0)
            self.gate_proj, self.up_proj, self.down_proj, self.limit = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), limit

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            up = self.up_proj(x).clamp(-self.limit, self.limit)
            result: torch.Tensor = self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * up)
            return result

    x = torch.randn(4, 8)
    for limit, expected in ((torch.inf, True), (100.0, False)):
        block = Clamped(limit)
        assert float(block.up_proj(x).detach().abs().max()) < 10
        with torch.no_grad():
            place = Place(maker="up_proj", readers=("down_proj",), source=torch.arange(8))
            assert holds(place, block, lambda block=block: block(x)) is expected


def test_a_part_of_a_block_is_refused():
    bench = Bench(random_model(FAMILIES["qwen3_moe"][0]()))
    groups, states = bench.collect(bench.formats)
    units = make_units(bench.block, groups)
    with pytest.raises(ModelError, match="needs a block's units together"):
        fold_block(bench.block, "b", units[1:], bench.formats, states.get, bench.run, "awq", QuantizerOptions())


def test_a_whole_block_is_one_unit():
    bench = Bench(random_model(FAMILIES["qwen3_moe"][0]()))
    groups, _ = bench.collect(bench.formats)
    parts = make_units(bench.block, groups)
    (one,) = make_units(bench.block, groups, together=True)
    assert one.parts == tuple(parts) and set(one.members) == set(bench.formats)
    assert one.keys == [key for part in parts for key in part.keys]
    assert one.cost(2) == sum(part.cost(2) for part in parts)
    assert make_units(bench.block, [], together=True) == []


def outlying(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter[::9] *= 8
    return model


MODELS: dict[str, tuple[Callable[[], PreTrainedModel], QuantPolicy]] = {
    "llama": (lambda: tiny_llama(dtype=torch.bfloat16), QuantPolicy(ignore=DEFAULT_IGNORE[2:], untie=True)),
    "qwen3_moe": (lambda: tiny_qwen3_moe(num_experts=8, dtype=torch.bfloat16), QuantPolicy()),
}


class Passes:
    """Folders of the models, and passes over them made once for each name and set of options."""

    def __init__(self, root: Path):
        self.root, self.made = root, dict[str, Path]()
        self.text = root / "text.txt"
        self.text.write_text("the rain in spain is a thing of which one can say that it is not so\n" * 60)
        for name, (build, _) in MODELS.items():
            save_tiny(root / name, outlying(build()))

    def config(self, name: str, **options: Any) -> CalibrateConfig:
        return CalibrateConfig(
            model=str(self.root / name),
            policy=MODELS[name][1],
            method="awq",
            options=QuantizerOptions(**{"scales": "amax"} | options),
            data=TextData(location=str(self.text), samples=8, length=32, chunk=2),
            dtype="float32",
            lanes=2,
            max_fallback_share=1.0,
        )

    def work(self, name: str, hire: Callable[[CrewSpec], Any] = LocalCrew, **options: Any) -> Path:
        key = f"{name}-{hire.__name__}-{sorted(options.items())}"
        if key not in self.made:
            work = self.root / f"work-{len(self.made)}"
            calibrate(self.config(name, **options), work, hire=hire, say=lambda _: None)
            self.made[key] = work
        return self.made[key]


@pytest.fixture(scope="module")
def passes(tmp_path_factory) -> Passes:
    return Passes(tmp_path_factory.mktemp("awq"))


def blocks_of(work: Path) -> list[Path]:
    return sorted((work / "blocks").glob("[0-9]*"))


def fake_quantized(folder: Path, work: Path, policy: QuantPolicy) -> Any:
    """The source model with the pass's dequantized weights in the place of its own."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    formats = {entry.name: entry.format for entry in make_plan(meta_model(folder), policy).entries}
    if "lm_head" in formats:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    for index, found in enumerate(blocks_of(work)):
        prefix = f"model.layers.{index}." if index < len(model.model.layers) else ""
        inside = {name.removeprefix(prefix): chosen for name, chosen in formats.items() if name.startswith(prefix or "lm_head")}
        apply_planes(model.model.layers[index] if prefix else model, read_planes(found, inside), read_plain(found))
    return model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scales", ["amax", "hessian"])
def test_the_checkpoint_is_the_model_of_the_pass(passes, name, scales, tmp_path):
    folder, policy, work = passes.root / name, MODELS[name][1], passes.work(name, scales=scales)
    write_checkpoint(folder, work, make_plan(meta_model(folder), policy), tmp_path / "out")
    loaded = load_model(tmp_path / "out", dtype=torch.float32)
    ids = torch.randint(3, 200, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, expected = loaded(ids).logits, fake_quantized(folder, work, policy)(ids).logits
        source = load_model(folder, dtype=torch.float32)(ids).logits
    # Same float32 weights and activations; the experts are summed by other kernels: some 2^-24 a term through two blocks.
    assert float((logits - expected).abs().max()) < 1e-4 * float(expected.abs().max())
    assert float((logits - source).abs().max()) > 1e-2 * float(source.abs().max())
    # What the pass handed on from its last block is what the checkpoint computes there.
    chunk = load_file(work / "chunks.safetensors")
    stored = load_file(work / "activations" / "0002" / "000000.safetensors")["hidden"]
    seen: list[torch.Tensor] = []
    hook = loaded.model.layers[-1].register_forward_hook(lambda _module, _args, output: seen.append(output))
    with torch.no_grad():
        loaded(chunk["0.input_ids"], attention_mask=chunk["0.mask"].long())
    hook.remove()
    mask = chunk["0.mask"]
    assert float((seen[0][mask] - stored[mask]).abs().max()) < 1e-4 * float(stored.abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_plain_tensors_in_the_part_files_are_what_was_folded(passes, name):
    work = passes.work(name)
    plain = read_plain(blocks_of(work)[0])
    expected = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    assert set(plain) == (expected if name == "llama" else {*expected, "mlp.gate.weight"})
    assert all(value.dtype == torch.bfloat16 for value in plain.values())
    source = AutoModelForCausalLM.from_pretrained(passes.root / name, dtype=torch.float32).model.layers[0]
    factor = source.get_parameter("input_layernorm.weight") / plain["input_layernorm.weight"].float()
    # Outlying channels got larger weights and smaller inputs.
    others = torch.tensor([channel % 9 != 0 for channel in range(64)])
    assert float(factor[::9].mean().detach()) > 1.3 * float(factor[others].mean().detach())
    if name == "llama":
        assert set(read_plain(blocks_of(work)[2])) == {"model.norm.weight"}


@pytest.mark.parametrize("name", MODELS)
def test_records_of_a_pass(passes, name):
    records = [record for found in blocks_of(passes.work(name)) for record in read_records(found)]
    assert {record["asked"] for record in records} == {"awq"}
    for record in records:
        assert (record["method"] == "awq") == (record["reason"] == "")
        if record["method"] == "awq":
            assert 0 <= record["alpha"] < 1
    # Rounding to nearest is one of the exponents tried; error_before has another tensor scale, a sixteenth of a step of the block scales at most.
    used = [record for record in records if record["method"] == "awq" and record["tokens"]]
    assert sum(record["error_after"] for record in used) < 0.9 * sum(record["error_before"] for record in used)
    assert any(record["alpha"] > 0 for record in used)
    assert not [record for record in records if record["reason"] == NO_PLACE]


@pytest.mark.parametrize(
    "changes", [{"awq_grid": 3}, {"awq_block_constant": True}, {"scales": "mse"}, {"scales": "hessian"}, {"starved": "rtn"}]
)
def test_every_option_reaches_the_pass(passes, changes):
    base, other = blocks_of(passes.work("qwen3_moe"))[0], blocks_of(passes.work("qwen3_moe", **changes))[0]
    formats = {
        name.removeprefix("model.layers.0."): "nvfp4" for name in formats_of(passes, "qwen3_moe") if name.startswith("model.layers.0.")
    }
    left, right = read_planes(base, formats), read_planes(other, formats)
    assert any(not torch.equal(left[name].codes, right[name].codes) for name in formats)


def formats_of(passes: Passes, name: str) -> list[str]:
    return [entry.name for entry in make_plan(meta_model(passes.root / name), MODELS[name][1]).entries]


def parts_of(owned: Any) -> list[tuple[int, Unit]]:
    """The units that a block's one unit is made of, numbered."""
    ((_, whole),) = owned[0]
    return list(enumerate(whole.parts))


class Apart(LocalCrew):
    """Hands a block's units over one by one, in one call of one owner."""

    def solve(self, index: int, owned: Any, handles: Any, method: str, options: QuantizerOptions) -> Any:
        return super().solve(index, [parts_of(owned)], handles, method, options)


class OneByOne(LocalCrew):
    """Solves units in calls of their own, as several owners would."""

    def solve(self, index: int, owned: Any, handles: Any, method: str, options: QuantizerOptions) -> Any:
        return [done for numbered in parts_of(owned) for done in super(OneByOne, self).solve(index, [[numbered]], handles, method, options)]


def test_a_block_as_one_unit_gives_the_same_planes(passes):
    for left, right in zip(blocks_of(passes.work("qwen3_moe", Apart)), blocks_of(passes.work("qwen3_moe")), strict=True):
        formats = dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"), "nvfp4")
        one, other = read_planes(left, formats), read_planes(right, formats)
        assert all(
            torch.equal(one[name].codes, other[name].codes) and torch.equal(one[name].scales, other[name].scales) for name in formats
        )
        plain, again = read_plain(left), read_plain(right)
        assert plain.keys() == again.keys() and all(torch.equal(plain[key], again[key]) for key in plain)
        assert len(list(right.glob("part-*.safetensors"))) == 1 < len(list(left.glob("part-*.safetensors")))


def test_several_owners_of_one_block_are_refused(passes, tmp_path):
    with pytest.raises(ModelError, match="is solved by another owner"):
        calibrate(passes.config("llama"), tmp_path / "work", hire=OneByOne, say=lambda _: None)


def test_olmo_norms_have_no_weight_to_fold_into():
    bench = Bench(random_model(OlmoConfig(**SMALL)))
    assert {place.maker for place in bench.places()} == {"self_attn.v_proj", "mlp.up_proj"}
    folding = bench.folding()
    assert folding.factors["self_attn.q_proj"].reason == NO_PLACE
    assert folding.factors["mlp.down_proj"].reason == ""
