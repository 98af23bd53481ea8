"""Every mixture-of-experts family through the whole layer-streamed pass: coverage, an expert without a token, one worker against two, and the checkpoint (CAL-01, CAL-04, CAL-05)."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    DeepseekV3Config,
    DeepseekV4Config,
    GptOssConfig,
    MixtralConfig,
    Mxfp4Config,
    Qwen3MoeConfig,
)

from prism_ray.calibrate import units
from prism_ray.calibrate.assemble import quantized_model, write_checkpoint
from prism_ray.calibrate.config import CalibrateConfig
from prism_ray.calibrate.quantize import quantize_model
from prism_ray.calibrate.run import CrewSpec, Handles, calibrate
from prism_ray.calibrate.skeleton import Skeleton
from prism_ray.calibrate.text import Chunk
from prism_ray.calibrate.worker import CHUNKS, BlockWorker, read_chunks, write_chunks
from prism_ray.cli.main import run
from prism_ray.core.errors import CalibrationFailed, CheckpointError, ModelError
from prism_ray.formats import compressed_tensors, gpt_oss
from prism_ray.formats.checkpoint import read_quantized
from prism_ray.formats.modules import quantized_modules
from prism_ray.formats.parameters import meta_model
from prism_ray.formats.policy import COMPRESSED, DEFAULT_IGNORE, GPT_OSS, QuantPlan, QuantPolicy, make_plan
from prism_ray.formats.spec import FORMATS
from prism_ray.hessian.capture import Capture, InputGroup
from prism_ray.models.load import load_model
from prism_ray.models.tiny import TINY_VOCAB_SIZE, save_tiny, tiny_qwen3_moe, tiny_tokenizer
from prism_ray.quantizers.base import QuantizerOptions
from prism_ray.quantizers.rtn import rtn

TEXT = "".join(f"{'the rain in the town ' * (1 + line % 3)}is {line} and on a street\n" for line in range(60))
EXPERTS, TOP, UNUSED = 6, 2, 5
SMALL: dict[str, Any] = {
    "vocab_size": TINY_VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": TOP,
    "pad_token_id": TINY_VOCAB_SIZE - 5,
    "bos_token_id": TINY_VOCAB_SIZE - 4,
    "eos_token_id": TINY_VOCAB_SIZE - 3,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
STREAMS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "moe_intermediate_size": 32,
    "head_dim": 32,
    "q_lora_rank": 32,
    "o_lora_rank": 16,
    "o_groups": 2,
    "n_routed_experts": EXPERTS,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
}


def without(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in names}


FAMILIES: dict[str, Any] = {
    "qwen3_moe": lambda: Qwen3MoeConfig(**SMALL, num_experts=EXPERTS, moe_intermediate_size=32),
    "mixtral": lambda: MixtralConfig(**SMALL, num_local_experts=EXPERTS),
    "gpt_oss": lambda: GptOssConfig(**SMALL, head_dim=16, num_local_experts=EXPERTS, layer_types=["sliding_attention", "full_attention"]),
    "deepseek_v3": lambda: DeepseekV3Config(**SMALL | LATENT),
    "deepseek_v4": lambda: DeepseekV4Config(**without(SMALL, "intermediate_size", "num_key_value_heads") | STREAMS),
}
MOE_LAYERS = {"qwen3_moe": (0, 1), "mixtral": (0, 1), "gpt_oss": (0, 1), "deepseek_v3": (1,), "deepseek_v4": (0, 1, 2)}
every = pytest.mark.parametrize("family", FAMILIES)
compressed = pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt_oss"])


def policy_of(family: str) -> QuantPolicy:
    return QuantPolicy(format="mxfp4" if family == "gpt_oss" else "nvfp4")


@torch.no_grad()
def shut_out(layer: Any) -> None:
    """Make a layer's router never choose expert UNUSED."""
    router = layer.mlp.router if hasattr(layer.mlp, "router") else layer.mlp.gate
    if hasattr(router, "tid2eid"):
        ids = torch.arange(len(router.tid2eid))
        router.tid2eid.copy_(torch.stack([ids % UNUSED, (ids + 2) % UNUSED], 1))
    elif hasattr(router, "e_score_correction_bias"):
        router.e_score_correction_bias[UNUSED] = -100.0
    elif getattr(router, "bias", None) is not None:
        router.bias[UNUSED] = -100.0
    else:
        # Logits a, -a, b, -b, c and 0: two of the others are always above 0.
        router.weight[1], router.weight[3], router.weight[UNUSED] = -router.weight[0], -router.weight[2], 0.0


def write_model(family: str, folder: Path) -> None:
    """A random bfloat16 model whose routers leave out one expert, with the tiny tokenizer beside it."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.bfloat16)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape) * 0.1 + (1.0 if "norm" in name else 0.0))
        for index in MOE_LAYERS[family]:
            shut_out(model.model.layers[index])
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def settings(root: Path, family: str, **values: Any) -> CalibrateConfig:
    data = {"location": str(root / "text.txt"), "samples": 10, "length": 24, "chunk": 2}
    given = {"model": str(root / family), "policy": policy_of(family).to_dict(), "data": data, "dtype": "float32", "lanes": 4}
    return CalibrateConfig.load(given | {"max_fallback_share": 1.0, "options": {"refine": 1}} | values)


def quiet(line: str) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Done:
    """A finished pass: the model's folder, its work folder, summary, plan and records."""

    folder: Path
    work: Path
    summary: dict[str, Any]
    plan: QuantPlan
    records: list[dict[str, Any]]

    def of_experts(self, layer: int, leaf: str) -> dict[int, dict[str, Any]]:
        """Records of a fused parameter by expert."""
        start = f"model.layers.{layer}.mlp.experts.{leaf}."
        return {int(record["name"].removeprefix(start)): record for record in self.records if record["name"].startswith(start)}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    (folder / "text.txt").write_text(TEXT)
    for family in FAMILIES:
        write_model(family, folder / family)
    return folder


@pytest.fixture(scope="module")
def passes(root: Path) -> dict[str, Done]:
    """The pass of every family in one process."""
    done = {}
    for family in FAMILIES:
        work = root / f"{family}.work"
        summary = calibrate(settings(root, family), work, say=quiet)
        plan = make_plan(meta_model(root / family), policy_of(family))
        records = [record for folder in sorted((work / "blocks").iterdir()) for record in units.read_records(folder)]
        done[family] = Done(folder=root / family, work=work, summary=summary, plan=plan, records=records)
    return done


def planned_names(plan: QuantPlan) -> list[str]:
    """Names of records: one an expert."""
    each = [(entry.name, entry.shape[0] if len(entry.shape) == 3 else 0) for entry in plan.entries]
    return sorted(name for name, experts in each for name in ([f"{name}.{e}" for e in range(experts)] if experts else [name]))


@every
def test_cal04_every_planned_weight_has_finite_planes_and_a_record(passes, family):
    done = passes[family]
    assert sorted(record["name"] for record in done.records) == planned_names(done.plan)
    leaves = {entry.name for entry in done.plan.entries}
    assert {f"model.layers.{layer}.mlp.experts.{leaf}" for layer in MOE_LAYERS[family] for leaf in ("gate_up_proj", "down_proj")} <= leaves
    source = load_model(done.folder, dtype=torch.float32).requires_grad_(False)
    for entry in done.plan.entries:
        index = int(entry.name.split(".")[2])
        below = entry.name.removeprefix(f"model.layers.{index}.")
        (tensor,) = units.read_planes(done.work / "blocks" / f"{index:04d}", {below: entry.format}).values()
        weight = tensor.dequantize()
        assert tuple(weight.shape) == entry.shape and bool(torch.isfinite(weight).all())
        held = source.get_parameter(entry.name if len(entry.shape) == 3 else f"{entry.name}.weight")
        held = held.mT if entry.transposed else held
        # A wrong layout gives weights that have nothing to do with these: relative error 1.4 instead of the 0.1 to 0.3 of four bits.
        assert float((weight - held).norm() / held.norm()) < 0.4, entry.name


@every
def test_cal01_the_expert_without_a_token_is_on_the_record(passes, family):
    done = passes[family]
    for layer in MOE_LAYERS[family]:
        for leaf in ("gate_up_proj", "down_proj"):
            records = done.of_experts(layer, leaf)
            assert sum(record["tokens"] for record in records.values()) == done.summary["tokens"] * TOP
            unused = records[UNUSED]
            assert (unused["tokens"], unused["method"], unused["asked"]) == (0, "rtn", "gptq")
            assert unused["reason"] == "no calibration rows"
            assert {record["method"] for record in records.values() if record["tokens"]} == {"gptq"}
    without_rows = sum(record["tokens"] == 0 for record in done.records)
    assert done.summary["untouched"] == done.summary["fallbacks"] == without_rows >= 2 * len(MOE_LAYERS[family])
    assert done.summary["fallback_reasons"] == {"no calibration rows": without_rows}
    starved = sum(record["tokens"] < record["shape"][1] for record in done.records)
    assert starved >= without_rows and done.summary["starved_share"] == starved / len(done.records)


def test_hash_routed_experts_get_the_rows_of_their_token_ids(passes):
    done = passes["deepseek_v4"]
    ids = torch.cat([chunk.input_ids[chunk.mask] for chunk in read_chunks(done.work / CHUNKS)]).tolist()
    expected = Counter(expert for token in ids for expert in (token % UNUSED, (token + 2) % UNUSED))
    found = {expert: record["tokens"] for expert, record in done.of_experts(0, "down_proj").items()}
    assert found == {expert: expected[expert] for expert in range(EXPERTS)}


class TwoWorkers:
    """Two workers by hand, each with its own half of the lanes and its own units, over one work folder."""

    workers = 2

    def __init__(self, spec: CrewSpec):
        self._workers = [spec.worker(), spec.worker()]

    def embed(self, shares: Sequence[Sequence[int]]) -> None:
        for worker, share in zip(self._workers, shares, strict=True):
            worker.embed(share)

    def collect(self, index: int, spans: Sequence[tuple[int, int]]) -> tuple[list[InputGroup], Handles]:
        parts = [worker.collect(index, *span) for worker, span in zip(self._workers, spans, strict=True)]
        assert len(parts) == 2 and parts[0][0] == parts[1][0] and not set(parts[0][1]) & set(parts[1][1])
        return parts[0][0], parts[1][1] | parts[0][1]

    def solve(
        self, index: int, owned: Sequence[Sequence[tuple[int, units.Unit]]], handles: Handles, method: str, options: QuantizerOptions
    ) -> list[dict[str, Any]]:
        assert all(owned)
        found = [worker.solve(index, part, handles, method, options) for worker, part in zip(self._workers, owned, strict=True)]
        return found[1] + found[0]

    def propagate(self, index: int, shares: Sequence[Sequence[int]]) -> None:
        for worker, share in zip(self._workers, shares, strict=True):
            worker.propagate(index, share)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def digests(work: Path) -> dict[str, str]:
    return {str(path.relative_to(work)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(work.rglob("part-*"))}


@every
def test_cal05_two_workers_give_the_bytes_of_one_and_an_allowed_share_of_zero_stops_the_run(root, passes, tmp_path, family):
    with pytest.raises(CalibrationFailed, match=r"of \d+ weights fell back to another method, allowed 0.0% \(\{'no calibration rows'"):
        calibrate(settings(root, family, max_fallback_share=0.0), tmp_path / "work", hire=TwoWorkers, say=quiet)
    # It fails at its end, with every record there.
    assert digests(tmp_path / "work") == digests(passes[family].work)
    assert json.loads((tmp_path / "work" / "summary.json").read_text())["workers"] == 2


def propagated(done: Done) -> list[tuple[Chunk, torch.Tensor]]:
    """(chunk, logits) of what the pass itself propagated through its last quantized block."""
    frame = Skeleton(done.folder, torch.float32)
    last = done.work / "activations" / f"{frame.layers:04d}"
    chunks = read_chunks(done.work / CHUNKS)
    return [(chunk, frame.logits(chunk, load_file(last / f"{chunk.index:06d}.safetensors")["hidden"])) for chunk in chunks]


@torch.no_grad()
def require_logits(model: Any, done: Done) -> None:
    plain = load_model(done.folder, dtype=torch.float32)
    for chunk, expected in propagated(done):
        # The same float32 weights in both, so only the order of sums of a few hundred terms differs.
        torch.testing.assert_close(model(chunk.input_ids).logits, expected, rtol=1e-4, atol=1e-4)
        # The comparison can fail: the model without quantization is further off.
        distance = float((plain(chunk.input_ids).logits - expected).abs().max())
        assert distance > 1e-2


@compressed
def test_the_folder_gives_the_logits_that_the_pass_propagated(passes, tmp_path, family):
    done = passes[family]
    assert done.plan.layout == COMPRESSED
    write_checkpoint(done.folder, done.work, done.plan, tmp_path / "out")
    require_logits(load_model(tmp_path / "out", dtype=torch.float32), done)


def test_gpt_oss_is_written_in_its_own_layout_and_transformers_gives_the_logits(passes, tmp_path):
    done = passes["gpt_oss"]
    assert done.plan.layout == GPT_OSS
    manifest = write_checkpoint(done.folder, done.work, done.plan, tmp_path / "out", details={"source": "here"})
    options: dict[str, Any] = {"dtype": torch.bfloat16, "quantization_config": Mxfp4Config(dequantize=True), "output_loading_info": True}
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", **options)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    # Four bits times a power of two are exact in bfloat16, and so is everything else in the files.
    require_logits(loaded.float().eval(), done)
    require_logits(quantized_model(done.folder, done.work, done.plan, torch.float32), done)
    experts, plain = gpt_oss.read_quantized(tmp_path / "out")
    assert set(experts) == {entry.name for entry in done.plan.entries}
    for entry in done.plan.entries:
        index = int(entry.name.split(".")[2])
        (tensor,) = units.read_planes(done.work / "blocks" / f"{index:04d}", {entry.name.split(".", 3)[3]: "mxfp4"}).values()
        assert torch.equal(experts[entry.name].tensor.codes, tensor.codes) and torch.equal(experts[entry.name].tensor.scales, tensor.scales)
    assert plain["model.layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16
    kept = {entry["tensor"]: entry["reason"] for entry in manifest["kept"]}
    assert kept["model.layers.1.self_attn.k_proj"] == "linear: gpt-oss-mxfp4 holds experts only"
    assert manifest["layout"] == GPT_OSS and manifest["source"] == "here" and len(manifest["reports"]) == 2 * 2 * EXPERTS
    assert (tmp_path / "out" / "tokenizer.json").is_file() and (tmp_path / "out" / "generation_config.json").is_file()


def test_the_command_quantizes_gpt_oss_with_nothing_but_its_format(root, tmp_path):
    assert run(["quantize", str(root / "gpt_oss"), "--format", "mxfp4", "--method", "rtn", "--out", str(tmp_path / "q")]) == 0
    source = load_model(root / "gpt_oss", dtype=torch.float32)
    experts, plain = gpt_oss.read_quantized(tmp_path / "q")
    assert len(experts) == 4 and not any("experts" in name for name in plain)
    for name, weight in experts.items():
        expected, _ = rtn(source.get_parameter(name).mT.contiguous(), FORMATS["mxfp4"])
        assert torch.equal(weight.tensor.codes, expected.codes) and torch.equal(weight.tensor.scales, expected.scales)
        assert torch.equal(weight.bias.float(), source.get_parameter(f"{name}_bias"))


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        (QuantPolicy(format="nvfp4"), "'model.layers.0.mlp.experts.gate_up_proj' is to be nvfp4, and 4 such"),
        (QuantPolicy(format="mxfp4", overrides={"*.layers.1.mlp.experts.*": "int4-g32"}), "gate_up_proj' is to be int4-g32, and 2 such"),
        (
            QuantPolicy(format="mxfp4", overrides={"*.layers.1.*.o_proj": "mxfp4"}),
            "'model.layers.1.self_attn.o_proj' is to be mxfp4, and 1",
        ),
        (
            QuantPolicy(format="mxfp4", ignore=(*DEFAULT_IGNORE, "*.layers.1.mlp.experts.down_proj")),
            "down_proj' stays .experts: ignored., and 1",
        ),
    ],
)
def test_what_the_gpt_oss_layout_cannot_hold_is_refused_when_the_plan_is_made(root, policy, named):
    with pytest.raises(ModelError, match=named) as raised:
        make_plan(meta_model(root / "gpt_oss"), policy)
    assert 'use QuantPolicy(format="mxfp4")' in str(raised.value) and "\n" not in str(raised.value)


def test_gpt_oss_in_memory_is_refused_by_name(root):
    model = load_model(root / "gpt_oss", dtype=torch.bfloat16)
    with pytest.raises(ModelError, match="GptOssForCausalLM: its experts are held transposed.*use prism-ray quantize"):
        quantize_model(model, QuantPolicy(format="mxfp4"))
    assert not list(quantized_modules(model))


def test_a_gpt_oss_folder_that_reads_back_as_something_else_is_not_released(passes, tmp_path, monkeypatch):
    done = passes["gpt_oss"]
    written = gpt_oss.write_shards

    def change(folder: Path, tensors: dict[str, torch.Tensor]) -> Any:
        name = "model.layers.0.mlp.experts.down_proj_scales"
        return written(folder, tensors | {name: tensors[name].flip(0)})

    monkeypatch.setattr(gpt_oss, "write_shards", change)
    with pytest.raises(CheckpointError, match="the scales read back are not those written"):
        write_checkpoint(done.folder, done.work, done.plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_linears_with_a_forward_of_their_own_are_kept_and_an_override_of_one_is_refused(root, passes):
    kept = {name: reason for name, reason, _ in passes["deepseek_v4"].plan.kept}
    assert kept["model.layers.2.self_attn.o_a_proj"] == "linear: DeepseekV4GroupedLinear has a forward of its own"
    assert "model.layers.2.self_attn.o_a_proj" in passes["deepseek_v4"].plan.ignored_linears
    with pytest.raises(
        ModelError, match="layers.0.self_attn.o_a_proj: is to be mxfp4, but DeepseekV4GroupedLinear has a forward of its own"
    ):
        make_plan(meta_model(root / "deepseek_v4"), QuantPolicy(overrides={"*.o_a_proj": "mxfp4"}))


@every
def test_kept_bytes_are_those_of_the_loaded_model(root, passes, family):
    """Parameters that a family holds in float32 count as such, and so do stored buffers."""
    model = load_model(root / family, dtype=torch.bfloat16)
    state = model.state_dict()
    kept = {name if name in state else f"{name}.weight": size for name, _, size in passes[family].plan.kept}
    assert kept == {name: state[name].numel() * state[name].element_size() for name in kept}
    planned = {entry.name if len(entry.shape) == 3 else f"{entry.name}.weight" for entry in passes[family].plan.entries}
    assert set(kept) | planned == set(state)


@compressed
def test_transformers_own_loading_gives_our_experts(root, tmp_path, family):
    policy = QuantPolicy(format="int4-g32")
    calibrate(settings(root, family, method="rtn", data=None, policy=policy.to_dict()), tmp_path / "work", say=quiet)
    write_checkpoint(root / family, tmp_path / "work", make_plan(meta_model(root / family), policy), tmp_path / "out")
    config = CompressedTensorsConfig(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16, quantization_config=config)
    for name, module in quantized_modules(load_model(tmp_path / "out")):
        held = theirs.get_parameter(name if len(module.quant_tensor().shape) == 3 else f"{name}.weight")
        assert torch.equal(held, module.dequantize(torch.bfloat16)), name


@compressed
def test_fmt06_experts_are_stored_under_the_names_that_the_family_gives_them(root, family):
    stored = compressed_tensors.stored_parts(meta_model(root / family))
    names = {"mixtral": ("w1", "w3"), "deepseek_v4": ("w1", "w3")}.get(family, ("gate_proj", "up_proj"))
    assert stored["gate_up_proj"] == names and stored["down_proj"] == (("w2",) if names[0] == "w1" else ("down_proj",))
    generator = torch.Generator().manual_seed(0)
    fused = {
        f"m.experts.{leaf}": rtn(torch.randn(3, 64, 64, generator=generator), FORMATS["nvfp4"])[0] for leaf in ("gate_up_proj", "down_proj")
    }
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in fused.items():
        tensors |= compressed_tensors.to_checkpoint(name, tensor, stored)
    modules = compressed_tensors.module_names(tensors)
    assert f"m.experts.2.{names[1]}" in modules and len(modules) == 9
    assert set(compressed_tensors.fused_names(modules).values()) == set(fused)
    again = compressed_tensors.fuse_experts({name: compressed_tensors.from_checkpoint(name, tensors, FORMATS["nvfp4"]) for name in modules})
    assert all(
        torch.equal(again[name].codes, tensor.codes) and torch.equal(again[name].scales, tensor.scales) for name, tensor in fused.items()
    )
    assert set(again) == set(fused)


def test_a_written_folder_holds_every_expert(passes, tmp_path):
    done = passes["mixtral"]
    write_checkpoint(done.folder, done.work, done.plan, tmp_path / "out")
    _, linears, _ = read_quantized(tmp_path / "out")
    assert sum(".experts." in name for name in linears) == 2 * EXPERTS * 3
    assert {name for name in compressed_tensors.fuse_experts(linears) if ".experts." in name} == {
        entry.name for entry in done.plan.entries if len(entry.shape) == 3
    }


def test_states_of_experts_that_see_few_rows_take_at_most_a_quarter_of_dense_gram_matrices(tmp_path):
    """48 experts, two a token, 120 tokens: an expert sees 4 % of the rows, five of them, on average."""
    experts, tokens = 48, 120
    save_tiny(tmp_path / "m", tiny_qwen3_moe(num_experts=experts, num_layers=1, dtype=torch.bfloat16))
    ids = torch.randint(0, 250, (5, tokens // 5), generator=torch.Generator().manual_seed(1))
    write_chunks(tmp_path / CHUNKS, [Chunk(index=0, first=0, input_ids=ids, mask=torch.ones_like(ids, dtype=torch.bool))])
    formats = {"model.layers.0.mlp.experts.gate_up_proj": "nvfp4", "model.layers.0.mlp.experts.down_proj": "nvfp4"}
    worker = BlockWorker(tmp_path / "m", tmp_path, torch.float32, formats, [range(1)])
    worker.embed([0])
    groups, nodes = worker.collect(0, 0, 1)
    states = nodes[0, 1]
    assert {group.name: group.width for group in groups} == {"mlp.experts.gate_up_proj": 64, "mlp.experts.down_proj": 32}
    for group in groups:
        found = [states[key] for key in group.states if key in states]
        assert sum(state.tokens for state in found) == 2 * tokens
        assert sum(state.tokens for state in found) / (experts * tokens) < 0.1
    dense = sum(group.experts * group.width**2 * 8 for group in groups)
    held = sum(state.nbytes for state in states.values())
    # Rows alone: 240 rows of 64 and 32 float32, and their mean magnitudes.
    assert 240 * (64 + 32) * 4 < held <= dense / 4
    # Exact all the same: what is kept gives the Gram matrix of the rows.
    assert any(state.gram is None for state in states.values())
    assert all(float(state.matrix().trace()) > 0 for state in states.values())


@pytest.mark.parametrize("left", [False, True])
def test_an_input_with_a_place_for_heads_counts_its_tokens_only(left):
    """[B, 1, T, I], as the latent of deepseek's attention comes to its second projection."""
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1, slice(0, 4) if left else slice(3, 7)] = False
    x = torch.randn(3, 1, 7, 16, generator=torch.Generator().manual_seed(0))
    model = torch.nn.ModuleDict({"kv": torch.nn.Linear(16, 4)})
    with torch.no_grad(), Capture(model, ["kv"]) as capture, capture.batch(mask):
        model["kv"](x)
    rows = x[:, 0][mask].double()
    state = capture.states["kv"]
    assert state.tokens == 17
    # Float32 products of 17 terms against float64 ones.
    torch.testing.assert_close(state.matrix(), rows.T @ rows, rtol=1e-5, atol=1e-5)
    for shape in ((3, 2, 7, 16), (3, 1, 6, 16), (3, 1, 7, 1, 16)):
        with pytest.raises(ModelError, match="has no place for"), Capture(model, ["kv"]) as capture, capture.batch(mask):
            model["kv"](torch.zeros(shape))
