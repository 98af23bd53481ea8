"""The pass over looped models held whole: windows, stages, resume, recollection, refusals, and the plain path as its special case."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from prism_ray.calibrate import whole
from prism_ray.calibrate.config import CalibrateConfig
from prism_ray.calibrate.run import calibrate, summarize
from prism_ray.calibrate.skeleton import Skeleton
from prism_ray.calibrate.text import Chunk, Samples, TextData, lane_of, make_chunks
from prism_ray.calibrate.units import read_planes, read_records
from prism_ray.calibrate.whole import WholePass, make_stages, refuse_recurrence, run_whole, stored_formats
from prism_ray.calibrate.worker import CHUNKS, BadSample, NodeStates, _merge_node, merge, write_chunks
from prism_ray.core.errors import ConfigError, ModelError
from prism_ray.formats.policy import DEFAULT_IGNORE, QuantPolicy, make_plan
from prism_ray.hessian.state import GramState, lane_nodes
from prism_ray.hessian.windows import Window
from prism_ray.models.looped import PrismLoopedForCausalLM, looped_lm
from prism_ray.models.loops import LoopSpec, count_calls, find_loop
from prism_ray.models.tiny import save_tiny, tiny_llama, tiny_qwen3_moe
from prism_ray.quantizers.base import Member, QuantizerOptions
from prism_ray.quantizers.gptq import gptq

LOOPS = 3
POLICY = QuantPolicy(format="int4-g32")
ADAPTER, GATE, CODA = "model.adapter", "model.core.0.mlp.gate_proj", "model.coda.0.mlp.gate_proj"
# Products are float32 over fewer than 2^8 rows of one sign on the diagonal: relative error below 2^8 * 2^-24 of the norm, with the rounding of the reference's own rows to spare.
CLOSE = 2e-5


def model_of(loops: int = LOOPS, **fields: Any) -> PrismLoopedForCausalLM:
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "core_layers": 1, "max_position_embeddings": 16}
    return looped_lm(1, std=0.2, num_loops=loops, **small | fields)


def chunks_of(samples: int = 5, length: int = 10) -> list[Chunk]:
    """Chunks of two samples; the second sample is shorter, so that the first chunk is padded."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, 256, (length,), generator=generator).tolist() for _ in range(samples)]
    tokens[1] = tokens[1][:-3]
    return make_chunks(tokens, 2, 285)


def pass_of(
    work: Path, model: Any = None, *, lanes: int = 2, spec: LoopSpec | None = None, policy: QuantPolicy = POLICY, **fields: Any
) -> WholePass:
    model = model_of() if model is None else model
    own = {name: fields.pop(name) for name in ("recollect", "dropped", "chunks") if name in fields}
    chunks = own.pop("chunks", chunks_of())
    config = CalibrateConfig(model="looped", policy=policy, **fields)
    found = spec or find_loop(model)
    assert found is not None
    return WholePass(
        model, found, make_plan(model, policy), config, work, chunks=chunks, lanes=lane_of(len(chunks), lanes), say=lambda _: None, **own
    )


def inputs_of(model: Any, name: str, chunks: list[Chunk]) -> list[Tensor]:
    """Inputs of the real tokens of all chunks by step, float64 [N, I] each."""
    steps: dict[int, list[Tensor]] = {}
    for chunk in chunks:
        seen: list[Tensor] = []
        handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].detach().double()))
        with torch.no_grad():
            model(input_ids=chunk.input_ids, attention_mask=chunk.mask.long())
        handle.remove()
        for step, x in enumerate(seen):
            steps.setdefault(step, []).append(x[chunk.mask])
    return [torch.cat(steps[step]) for step in sorted(steps)]


def state_of(held: WholePass, stage: int, key: str) -> GramState:
    _, states = held.collect(held.stages[stage])
    found = merge(states, key, len(held.lanes))
    assert found is not None
    return found


def close(state: GramState, rows: list[tuple[Tensor, float]]) -> None:
    wanted = sum(weight * x.T @ x for x, weight in rows)
    assert isinstance(wanted, Tensor)
    assert float((state.matrix() - wanted).norm() / wanted.norm()) < CLOSE


def contents(work: Path) -> dict[str, bytes]:
    return {str(path.relative_to(work)): path.read_bytes() for path in sorted((work / "blocks").rglob("*")) if path.is_file()}


# --- windows ---


@pytest.mark.parametrize("name", ["first", "all", "skip-first", "last", "alpha", "equal-row"])
@pytest.mark.parametrize("key", [ADAPTER, "model.core.0.self_attn.q_proj"])
def test_windows_weigh_the_steps_of_the_recurrence(tmp_path, name, key):
    held = pass_of(tmp_path, lanes=1, window=Window(name=name, alpha=0.25))
    steps = inputs_of(held.model, key, held.chunks)
    assert len(steps) == LOOPS
    # Steps differ by far more than the tolerance, so that a wrong window fails.
    assert float((steps[0].T @ steps[0] - steps[1].T @ steps[1]).norm() / (steps[0].T @ steps[0]).norm()) > 0.05
    weights = {
        "first": [1, 0, 0],
        "all": [1, 1, 1],
        "skip-first": [0, 1, 1],
        "last": [0, 0, 1],
        "alpha": [0.25, 1, 1],
        "equal-row": [1, 1, 1],
    }
    rows = [x[step::LOOPS] if name == "equal-row" else x for step, x in enumerate(steps)]
    state = state_of(held, 1, key)
    close(state, [(x, weight) for x, weight in zip(rows, weights[name], strict=True) if weight])
    assert state.tokens == sum(len(x) for x, weight in zip(rows, weights[name], strict=True) if weight)


def test_equal_rows_are_as_many_as_one_step_has(tmp_path):
    held = pass_of(tmp_path, lanes=1, window=Window(name="equal-row"))
    assert state_of(held, 1, ADAPTER).tokens == sum(int(chunk.mask.sum()) for chunk in held.chunks)


def test_windows_leave_what_is_called_once_alone(tmp_path):
    held = pass_of(tmp_path, window=Window(name="skip-first"))
    held.run()
    for stage in (0, 2):
        assert {record["tokens"] for record in read_records(held.folder(stage))} == {sum(int(chunk.mask.sum()) for chunk in held.chunks)}


# --- stages ---


def test_stages_follow_the_model():
    model = model_of(core_layers=2, prelude_layers=2)
    spec = find_loop(model)
    assert spec is not None
    formats = {entry.name: entry.format for entry in make_plan(model, POLICY).entries} | {"lm_head": "int4-g32", "model.gate": "int4-g32"}
    stages = make_stages(spec, formats, count_calls(model) | {"model.gate": 3})
    assert [stage.name for stage in stages] == ["model.prelude.0", "model.prelude.1", "recurrence", "model.coda.0", "head"]
    assert [stage.recurrent for stage in stages] == [False, False, True, False, False]
    assert [name for name in stages[2].formats if not name.startswith("model.core.")] == [ADAPTER, "model.gate"]
    assert sum(name.startswith("model.core.") for name in stages[2].formats) == 14
    assert set(stages[4].formats) == {"lm_head"}
    assert sum(len(stage.formats) for stage in stages) == len(formats)


def test_a_stage_is_calibrated_behind_quantized_ones_and_is_whole_itself(tmp_path):
    held = pass_of(tmp_path, lanes=1)
    for index in (0, 1):
        held.quantize(index)
    reference = model_of()
    before = inputs_of(reference, CODA, held.chunks)
    for index in (0, 1):
        for name, tensor in read_planes(held.folder(index), held.stages[index].formats).items():
            reference.get_submodule(name).weight.data.copy_(tensor.dequantize())
    state = state_of(held, 2, CODA)
    close(state, [(x, 1.0) for x in inputs_of(reference, CODA, held.chunks)])
    assert float((state.matrix() - before[0].T @ before[0]).norm() / state.matrix().norm()) > 100 * CLOSE


def test_planes_are_those_of_gptq_on_the_trajectory(tmp_path):
    model = model_of()
    held = pass_of(tmp_path, lanes=1)
    held.quantize(0)
    weight = held.model.model.adapter.weight.clone()
    state = state_of(held, 1, ADAPTER)
    held.quantize(1)
    (tensor, _) = gptq([Member.of(ADAPTER, weight, held_format())], state, QuantizerOptions())[0]
    found = read_planes(held.folder(1), held.stages[1].formats)[ADAPTER]
    assert torch.equal(found.codes, tensor.codes) and torch.equal(found.scales, tensor.scales)
    assert torch.equal(held.model.model.adapter.weight, tensor.dequantize())
    assert torch.equal(weight, model.model.adapter.weight), "the recurrence was quantized from other weights"


def held_format() -> Any:
    from prism_ray.formats.spec import FORMATS

    return FORMATS["int4-g32"]


def test_records_count_tokens_by_step(tmp_path):
    held = pass_of(tmp_path)
    held.run()
    tokens = sum(int(chunk.mask.sum()) for chunk in held.chunks)
    for index, steps in ((0, 1), (1, LOOPS), (2, 1)):
        records = read_records(held.folder(index))
        assert len(records) == len(held.stages[index].formats)
        for record in records:
            assert record["steps"] == {str(step): tokens for step in range(steps)}
            assert record["tokens"] == steps * tokens
    assert not held.folder(3).exists(), "the head is not planned"
    shutil.rmtree(held.work / "blocks")
    last = pass_of(tmp_path, window=Window(name="last"))
    last.run()
    assert {json.dumps(record["steps"]) for record in read_records(last.folder(1))} == {json.dumps({str(LOOPS - 1): tokens})}


def test_an_ignored_adapter_keeps_its_bytes(tmp_path):
    held = pass_of(tmp_path, policy=QuantPolicy(format="int4-g32", ignore=(*DEFAULT_IGNORE, "*.adapter")))
    held.run()
    assert torch.equal(held.model.model.adapter.weight, model_of().model.adapter.weight)
    assert ADAPTER not in {record["name"] for record in read_records(held.folder(1))}
    assert not torch.equal(held.model.model.core[0].mlp.gate_proj.weight, model_of().model.core[0].mlp.gate_proj.weight)


def test_without_text_plain_rounding_is_done(tmp_path):
    held = pass_of(tmp_path, chunks=[], lanes=1, method="rtn", recollect=True)
    held.run()
    records = [record for index in range(3) for record in read_records(held.folder(index))]
    assert {record["name"] for record in records} == {entry.name for entry in make_plan(model_of(), POLICY).entries}
    assert {record["method"] for record in records} == {"rtn"} and {record["tokens"] for record in records} == {0}


def test_a_tied_head_gets_a_weight_of_its_own_or_is_refused(tmp_path):
    planned = QuantPolicy(format="int4-g32", ignore=("*embed*", "*norm*"))
    with pytest.raises(ModelError, match="lm_head"):
        pass_of(tmp_path, policy=planned)
    held = pass_of(tmp_path, policy=planned.model_copy(update={"untie": True}))
    held.run()
    assert torch.equal(held.model.model.embed_tokens.weight, model_of().model.embed_tokens.weight)
    assert not torch.equal(held.model.lm_head.weight, held.model.model.embed_tokens.weight)
    assert [record["name"] for record in read_records(held.folder(3))] == ["lm_head"]


# --- lanes ---


@pytest.mark.parametrize("lanes", range(1, 10))
def test_lanes_are_merged_along_the_tree_of_the_streamed_pass(lanes):
    def states() -> NodeStates:
        drawn = torch.Generator().manual_seed(lanes)
        rows = [torch.randn(5, 8, generator=drawn) for _ in range(lanes)]
        # No row of lane 0 reaches `b`, and none of lane 2 reaches `a`.
        keys = [[key for key, gone in (("a", 2), ("b", 0)) if lane != gone] for lane in range(lanes)]
        return {(lane, lane + 1): {key: GramState(width=8).add(rows[lane]) for key in keys[lane]} for lane in range(lanes)}

    nodes: NodeStates = {}
    for lane in range(lanes):
        nodes[lane, lane + 1] = states()[lane, lane + 1]
        whole._carry(nodes, lane)
        assert len(nodes) <= lane.bit_length() + 1
    parts = states()
    for key in ("a", "b"):
        (node,) = lane_nodes(0, lanes, lanes)
        found = merge(nodes, key, lanes)
        if not any(key in part for part in parts.values()):
            assert found is None
            continue
        assert found is not None
        wanted = _merge_node(parts, node, key)
        assert torch.equal(found.matrix(), wanted.matrix()) and found.tokens == wanted.tokens


# --- resume ---


@pytest.mark.parametrize("done", [0, 1, 2, 3])
def test_a_run_that_goes_on_gives_the_same_bytes(tmp_path, done):
    pass_of(tmp_path / "whole").run()
    wanted = contents(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for index in range(done, 4):
        shutil.rmtree(tmp_path / "cut" / "blocks" / f"{index:04d}", ignore_errors=True)
    if done < 3:
        # What a killed run leaves: parts without a block.json.
        folder = tmp_path / "cut" / "blocks" / f"{done:04d}"
        folder.mkdir()
        (folder / "part-0099.safetensors").write_bytes(b"half")
        (folder / ".tmp-part").write_bytes(b"")
    held = pass_of(tmp_path / "cut")
    held.run()
    assert contents(tmp_path / "cut") == wanted
    for name, weight in pass_of_weights(tmp_path / "whole").items():
        assert torch.equal(held.model.get_submodule(name).weight, weight)


def pass_of_weights(work: Path) -> dict[str, Tensor]:
    formats = {entry.name: entry.format for entry in make_plan(model_of(), POLICY).entries}
    found: dict[str, Tensor] = {}
    for folder in sorted((work / "blocks").iterdir()):
        found |= {name: tensor.dequantize() for name, tensor in read_planes(folder, stored_formats(folder, formats)).items()}
    assert set(found) == set(formats)
    return found


def test_a_round_of_recollection_is_not_done_again(tmp_path, monkeypatch):
    pass_of(tmp_path / "whole", recollect=2).run()
    held = pass_of(tmp_path / "cut", recollect=2)
    held.quantize(0)
    solves = []
    real = WholePass._solve

    def dies(self: WholePass, *arguments: Any) -> None:
        solves.append(arguments[3].name)
        if len(solves) == 2:
            raise KeyboardInterrupt
        real(self, *arguments)

    monkeypatch.setattr(WholePass, "_solve", dies)
    with pytest.raises(KeyboardInterrupt):
        held.quantize(1)
    assert solves == ["round-0", "round-1"]
    solves[:] = ["", "", ""]
    pass_of(tmp_path / "cut", recollect=2).run()
    assert solves[3:] == ["round-1", "0001", "0002"]
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert not list((tmp_path / "cut" / "blocks").rglob("round-*"))


# --- recollection ---


def test_recollection_uses_the_quantized_rollout_and_the_original_weights(tmp_path):
    pass_of(tmp_path / "once", lanes=1).run()
    held = pass_of(tmp_path / "again", lanes=1, recollect=True)
    held.quantize(0)
    weight = held.model.model.adapter.weight.clone()
    quantized = model_of()
    for name, value in pass_of_weights(tmp_path / "once").items():
        if not name.startswith("model.coda"):
            quantized.get_submodule(name).weight.data.copy_(value)
    state = GramState(width=64)
    for x in inputs_of(quantized, ADAPTER, held.chunks):
        state = state.add(x)
    held.quantize(1)
    (tensor, _) = gptq([Member.of(ADAPTER, weight, held_format())], state, QuantizerOptions())[0]
    found = read_planes(held.folder(1), held.stages[1].formats)[ADAPTER]
    first = read_planes(tmp_path / "once" / "blocks" / "0001", held.stages[1].formats)[ADAPTER]
    # The sums are made in another order here, so a code on the edge may fall the other way; another rollout moves many.
    moved = int((found.codes != first.codes).sum())
    assert int((found.codes != tensor.codes).sum()) <= moved // 4
    assert moved > 0
    assert json.loads((held.folder(1) / "block.json").read_text())["rounds"] == 1


def test_other_rounds_are_another_run(tmp_path):
    pass_of(tmp_path).run()
    with pytest.raises(ConfigError, match="0 times, not 1"):
        pass_of(tmp_path, recollect=True).run()


# --- one loop is the plain path ---


def test_every_window_of_one_loop_gives_the_same_planes(tmp_path):
    found = {}
    for name in ("first", "all", "last", "alpha", "equal-row"):
        pass_of(tmp_path / name, model_of(1), window=Window(name=name, alpha=0.25)).run()
        found[name] = contents(tmp_path / name)
    assert len({json.dumps({path: data.hex() for path, data in one.items()}) for one in found.values()}) == 1
    with pytest.raises(ConfigError, match="skip-first"):
        pass_of(tmp_path / "skip", model_of(1), window=Window(name="skip-first")).run()


def test_a_plain_model_gets_the_bytes_of_the_layer_streamed_pass(tmp_path):
    """A plain model as a recurrence of one step: its first block as the prelude, its second as the core."""
    folder = save_tiny(tmp_path / "model", tiny_llama())
    chunks = chunks_of()
    tokens = tuple(tuple(chunk.input_ids[row][chunk.mask[row]].tolist()) for chunk in chunks for row in range(len(chunk.mask)))
    config = CalibrateConfig(
        model=str(folder), policy=POLICY, dtype="float32", lanes=2, data=TextData(location="none", samples=5, length=10, chunk=2)
    )
    calibrate(config, tmp_path / "streamed", samples=Samples(tokens=tokens), say=lambda _: None)
    spec = LoopSpec(
        family="plain", adapter=(), core=("model.layers.1",), prelude=("model.layers.0",), coda=(), entry="model.layers.1", exit="model.layers.1",
        state_width=None, steps=1,
    )  # fmt: skip
    held = pass_of(tmp_path / "whole", tiny_llama(), spec=spec)
    held.run()
    for index in range(2):
        mine = read_planes(held.folder(index), held.stages[index].formats)
        below = {name.removeprefix(f"model.layers.{index}."): chosen for name, chosen in held.stages[index].formats.items()}
        theirs = read_planes(tmp_path / "streamed" / "blocks" / f"{index:04d}", below)
        assert set(below) == set(theirs) and len(theirs) == len(mine) > 0
        for name, tensor in mine.items():
            other = theirs[name.removeprefix(f"model.layers.{index}.")]
            assert torch.equal(tensor.codes, other.codes) and torch.equal(tensor.scales, other.scales), name
        streamed = {record["name"]: record for record in read_records(tmp_path / "streamed" / "blocks" / f"{index:04d}")}
        assert {record["name"]: record for record in read_records(held.folder(index))} == streamed


# --- faults and refusals ---


def test_a_bad_sample_is_named_and_can_be_dropped(tmp_path):
    chunks = chunks_of()
    model = model_of()
    everything = torch.cat([chunk.input_ids.flatten() for chunk in chunks])
    # A token that no other sample has.
    row = next(token for token in chunks[1].input_ids[1].tolist() if int((everything == token).sum()) == 1)
    with torch.no_grad():
        model.model.embed_tokens.weight[row] = torch.nan
    with pytest.raises(BadSample) as fault:
        pass_of(tmp_path / "a", model).run()
    assert fault.value.sample == 3
    held = pass_of(tmp_path / "b", model, dropped=[3])
    held.run()
    kept = sum(int(chunk.mask.sum()) for chunk in chunks) - 10
    assert {record["tokens"] for record in read_records(held.folder(0))} == {kept}


def test_folding_methods_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="awq"):
        pass_of(tmp_path, method="awq")


def test_a_folder_runs_to_a_summary(tmp_path):
    folder = save_tiny(tmp_path / "model", model_of())
    chunks = chunks_of()
    work = tmp_path / "work"
    write_chunks(work / CHUNKS, chunks)
    config = CalibrateConfig(model=str(folder), policy=POLICY, dtype="float32")
    plan = make_plan(model_of(), POLICY)
    run = {"lanes": [[0, 2], [2, 3]], "dropped": [], "samples": 5, "tokens": 47}
    lines: list[str] = []
    model = run_whole(config, work, folder, plan, run, lines.append)
    summary = summarize(config, work, run, plan)
    assert summary["weights"] == len(plan.entries) and summary["fallbacks"] == 0 and summary["state_bytes"] > 0
    assert len(lines) == 3 and "recurrence" in lines[1]
    assert [json.loads(line)["stage"] for line in (work / "progress.jsonl").read_text().splitlines()][1] == "recurrence"
    pass_of(tmp_path / "direct").run()
    for name, weight in pass_of_weights(tmp_path / "direct").items():
        assert torch.equal(model.get_submodule(name).weight, weight)


def test_a_plain_model_is_no_looped_one(tmp_path):
    folder = save_tiny(tmp_path / "model")
    write_chunks(tmp_path / CHUNKS, chunks_of())
    config = CalibrateConfig(model=str(folder), policy=POLICY)
    with pytest.raises(ModelError, match="no looped model"):
        run_whole(config, tmp_path, folder, make_plan(tiny_llama(), POLICY), {"lanes": [[0, 3]], "dropped": []})


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3_moe])
def test_the_streamed_pass_refuses_blocks_that_are_called_twice(tmp_path, make):
    skeleton = Skeleton(save_tiny(tmp_path / "model", make()), torch.float32)
    chunk = chunks_of()[0]
    refuse_recurrence(skeleton, chunk)
    skeleton.model.model.layers.extend(list(skeleton.model.model.layers))
    skeleton.model.config.num_hidden_layers = 4
    with pytest.raises(ModelError, match=r"calls 'model\.layers\.0' 2 times"):
        refuse_recurrence(skeleton, chunk)


def test_the_streamed_pass_refuses_blocks_that_share_a_module(tmp_path, monkeypatch):
    folder = save_tiny(tmp_path / "model")
    skeleton = Skeleton(folder, torch.float32)

    def shared(_: Path) -> nn.Module:
        model = tiny_llama()
        model.model.layers[1].mlp = model.model.layers[0].mlp
        return model

    monkeypatch.setattr(whole, "meta_model", shared)
    with pytest.raises(ModelError, match=r"blocks 0 and 1 share 'mlp\.gate_proj'"):
        refuse_recurrence(skeleton, chunks_of()[0])
