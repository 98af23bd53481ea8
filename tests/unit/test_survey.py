"""`prism-ray survey` on tiny models: every reading against rows taken by hooks of the test's own, limits of memory and width, findings, files, bad input."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

from prism_ray.calibrate.quantize import quantize_model
from prism_ray.calibrate.survey import survey_model
from prism_ray.calibrate.survey_plan import SurveyConfig, passes, planned, share_of
from prism_ray.calibrate.survey_result import LayerReading, Rank, Survey
from prism_ray.calibrate.text import TextData
from prism_ray.cli.main import run
from prism_ray.core.digests import sha256_tensors
from prism_ray.core.errors import ConfigError, DataError, ModelError
from prism_ray.formats.policy import QuantPolicy
from prism_ray.hessian.capture import InputGroup
from prism_ray.hessian.survey import Overlap
from prism_ray.models.looped import looped_lm
from prism_ray.models.tiny import save_tiny, tiny_llama, tiny_qwen3_moe
from prism_ray.reports.survey import write_survey_report

THRESHOLD = 1e-3
LOOPS = 4


def config(**fields: Any) -> SurveyConfig:
    chunk = fields.pop("chunk", 5)
    return SurveyConfig(model="m", data=TextData(location="x", chunk=chunk), **{"exposure_samples": 0, **fields})


def tokens(count: int, length: int, *, seed: int = 0, high: int = 250) -> list[list[int]]:
    return torch.randint(0, high, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()


def looped(**fields: Any) -> Any:
    defaults = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_loops": LOOPS, "max_position_embeddings": 64}
    return looped_lm(0, std=0.2, **{**defaults, **fields})


@torch.no_grad()
def inputs(model: Any, name: str, samples: Sequence[Sequence[int]], calls: int = 1) -> list[list[Tensor]]:
    """Rows of a module by step, then by sample, from a forward pass of each sample alone."""
    seen: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _module, args: seen.append(args[0][0].double()))
    for sample in samples:
        # A block that is met twice would find its own keys in the cache.
        model(input_ids=torch.tensor([sample]), use_cache=False)
    handle.remove()
    assert len(seen) == calls * len(samples)
    return [seen[step::calls] for step in range(calls)]


def by_svd(rows: Tensor) -> tuple[int, Tensor]:
    """(thresholded rank, basis [I, rank]) by the definition, on the rows themselves."""
    _, values, v = torch.linalg.svd(rows, full_matrices=False)
    squares = values.square()
    near = ((squares / squares[0] / THRESHOLD).log()).abs().min()
    # float32 products of n rows move an eigenvalue by some sqrt(n) 2^-24 of the largest: at n = 300 by 1e-3 of one that lies at the threshold.
    assert near > 1e-3, "an eigenvalue lies on the threshold; choose another seed"
    rank = int((squares > THRESHOLD * squares[0]).sum())
    return rank, v[:rank].T


def mean_cosine(one: Tensor, other: Tensor) -> float:
    return float((one.T @ other).square().sum()) / min(one.shape[1], other.shape[1])


def layer(found: Survey, name: str) -> LayerReading:
    return next(reading for reading in found.layers if reading.name == name)


def check(found: LayerReading, steps: list[list[Tensor]]) -> None:
    """A reading against the rows of each step and sample."""
    whole = [torch.cat(step) for step in steps]
    half = len(steps[0]) // 2
    assert [step.rank for step in found.steps] == [by_svd(rows)[0] for rows in whole]
    assert [step.n for step in found.steps] == [len(rows) for rows in whole]
    assert found.accumulated is not None and found.floor_first is not None and found.floor_last is not None
    assert found.accumulated.rank == by_svd(torch.cat(whole))[0]
    assert found.accumulated.n == sum(map(len, whole))
    assert found.gain == found.accumulated.rank / found.steps[0].rank
    # float32 rounding of the rows turns a span by 1e-7 over the gap at the threshold, some 1e-4 there: 1e-2 leaves room for the smallest gap.
    for floor, rows in ((found.floor_first, steps[0]), (found.floor_last, steps[-1])):
        parts = [by_svd(torch.cat(part))[1] for part in (rows[:half], rows[half:])]
        assert floor.value == pytest.approx(mean_cosine(*parts), abs=1e-2)
        assert floor.rows == tuple(sum(map(len, part)) for part in (rows[:half], rows[half:]))
    if len(steps) > 1:
        assert found.overlap is not None
        assert found.overlap.value == pytest.approx(mean_cosine(by_svd(whole[0])[1], by_svd(whole[-1])[1]), abs=1e-2)
    # Sums of squares of float32 rows that differ by rounding.
    assert found.trace == pytest.approx([float(rows.square().sum()) for rows in whole], rel=1e-4)


class TestDense:
    def test_the_gain_is_exactly_1_and_there_is_no_overlap(self):
        model, samples = tiny_llama(), tokens(9, 16)
        found = survey_model(model, samples, config())
        assert (found.family, found.steps, found.samples, found.tokens, found.passes) == ("", 1, 9, 144, 1)
        assert [reading.name for reading in found.layers][:4] == [
            f"model.layers.0.{part}" for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
        ]
        assert found.layers[0].members == tuple(f"model.layers.0.self_attn.{part}_proj" for part in "qkv")
        for reading in found.layers:
            assert (reading.gain, reading.overlap, reading.shifted, reading.blind, reading.calls) == (1.0, None, None, False, 1)
            assert reading.floor_first is not None and reading.floor_first.rows == (64, 80)
            check(reading, inputs(model, reading.name, samples))
        assert found.exposure == {} and "no recurrence" in found.no_exposure
        assert found.findings == [] and "gain 1 by construction" in found.text

    def test_what_rows_bound_is_said(self):
        found = survey_model(tiny_llama(), tokens(2, 20), config())
        reading = layer(found, "model.layers.0.mlp.down_proj")
        assert reading.notes == ("n = 40 rows < 128 columns: the rank is at most 40",)
        assert reading.accumulated is not None and reading.accumulated.bound == 40 and reading.accumulated.rank <= 40
        bound = [finding for finding in found.findings if finding.kind == "rank-bound"]
        assert [finding.action for finding in bound] == ["more-rows"] * 8  # all are 64 or 128 wide
        assert "8 inputs have fewer rows than columns" in found.text

    def test_one_sample_has_no_noise_floor(self):
        found = survey_model(tiny_llama(), tokens(1, 20), config())
        assert all(reading.floor_first is None for reading in found.layers)
        json.dumps(found.to_dict(), allow_nan=False)

    def test_padding_and_batches_change_nothing(self):
        samples = [row[: 4 + 3 * index] for index, row in enumerate(tokens(7, 24))]
        alone, padded = (survey_model(tiny_llama(), samples, config(chunk=chunk)) for chunk in (1, 7))
        assert padded.tokens == sum(map(len, samples))
        for one, other in zip(alone.layers, padded.layers, strict=True):
            assert (one.tokens, [step.rank for step in one.steps]) == (other.tokens, [step.rank for step in other.steps])
            assert one.trace == pytest.approx(other.trace, rel=1e-4)

    def test_what_is_planned(self):
        names, left_out = planned(tiny_llama(tie=False), ["*.1.mlp.*"])
        assert len(names) == 11 and "model.layers.1.mlp.up_proj" not in names
        assert [(name, reason) for name, reason, _ in left_out] == [
            *((f"model.layers.1.mlp.{part}_proj", "ignored by the policy") for part in ("gate", "up", "down")),
            ("lm_head", "ignored by the policy"),
        ]
        assert left_out[0][2] == 64 * 128 * 4
        model = tiny_llama()
        model.model.layers[0].register_parameter("memory", torch.nn.Parameter(torch.zeros(64, 64)))
        assert ("model.layers.0.memory", "neither a Linear nor fused experts", 64 * 64 * 4) in planned(model)[1]
        quantized = tiny_llama(tie=False)
        quantize_model(quantized, QuantPolicy())
        with pytest.raises(ModelError, match="no full-precision linear weight"):
            survey_model(quantized, tokens(2, 8), config())

    def test_a_weight_that_nothing_calls_is_listed(self):
        model = tiny_llama()
        model.model.layers[0].spare = torch.nn.Linear(64, 8, bias=False)
        found = survey_model(model, tokens(2, 8), config())
        assert ("model.layers.0.spare", "no forward pass called it", 64 * 8 * 4) in found.left_out

    def test_not_a_number_names_the_sample(self):
        model, samples = tiny_llama(tie=False), tokens(9, 12, high=200)
        samples[7][3] = 240
        with torch.no_grad():
            model.model.embed_tokens.weight[240] = float("nan")
        with pytest.raises(DataError, match=r"^model\.layers\.0\.self_attn\.q_proj: sample 7: .*NaN"):
            survey_model(model, samples, config(chunk=3))


class TestLooped:
    def test_readings_of_each_step(self):
        model, samples = looped(), tokens(10, 12)
        found = survey_model(model, samples, config())
        assert (found.family, found.steps) == ("prism_looped", LOOPS)
        for name in ("model.adapter", "model.core.0.self_attn.o_proj", "model.core.1.mlp.down_proj", "model.coda.0.mlp.gate_proj"):
            check(layer(found, name), inputs(model, name, samples, LOOPS if "coda" not in name else 1))

    def test_core_and_adapter_are_met_at_every_step_and_nothing_else(self):
        found = survey_model(looped(), tokens(10, 12), config())
        parts = {"adapter": 1, "core": 8, "prelude": 4, "coda": 4}
        assert {part: sum(reading.component == part for reading in found.layers) for part in parts} == parts
        for reading in found.layers:
            looping = reading.component in ("adapter", "core")
            assert reading.calls == len(reading.steps) == len(reading.trace) == (LOOPS if looping else 1)
            assert reading.tokens == 120 and reading.accumulated is not None
            assert reading.accumulated.n == (LOOPS if looping else 1) * 120
            assert looping or reading.gain == 1.0

    def test_step_0_of_the_adapter_is_blind(self):
        # The initial state is a function of the position alone: 8 positions give it 8 directions of 32, later states have more (docstring of models.looped).
        found = survey_model(looped(), tokens(24, 8), config())
        adapter = layer(found, "model.adapter")
        assert adapter.gain is not None and adapter.gain > 1 and adapter.steps[0].rank <= 8 + 32
        assert adapter.shifted is True and adapter.blind
        blind = [finding for finding in found.findings if finding.kind == "blind" and finding.name == "model.adapter"]
        assert [finding.action for finding in blind] == ["trajectory"]
        assert "n = 192 rows" in blind[0].reason and "halves of the samples" in blind[0].reason

    def test_another_depth_and_the_model_as_it_was(self):
        model = looped()
        before = sha256_tensors(model.state_dict().items())
        found = survey_model(model, tokens(4, 8), config(steps=2))
        assert found.steps == 2 and layer(found, "model.adapter").calls == 2
        assert model.config.num_loops == LOOPS and sha256_tensors(model.state_dict().items()) == before
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
        with pytest.raises(ConfigError, match="^steps: the model has no recurrence"):
            survey_model(tiny_llama(), tokens(4, 8), config(steps=2))

    def test_exposure_and_its_advice(self):
        found = survey_model(looped(), tokens(4, 12), config(exposure_samples=2, radius_iterations=2))
        assert list(found.exposure) == ["int4-channel", "int4-group"] and found.exposure_samples == 2
        for scheme, reading in found.exposure.items():
            assert reading.exposure.agreement["adapter"].n == 24
            assert {len(row.proxy) for row in reading.exposure.sensitivities} == {LOOPS}
            own = {finding.name: finding.action for finding in found.findings if finding.scheme == scheme}
            assert own == {name: decision.action for name, decision in reading.advice.decisions.items()} and len(own) == 4
            assert reading.advice.text in found.text
        channel, group = (reading.exposure.sensitivities[0].proxy for reading in found.exposure.values())
        assert sum(group) < sum(channel)  # a scale for 32 of the adapter's 64 columns rounds finer than one a row
        json.dumps(found.to_dict(), allow_nan=False)

    def test_a_block_that_is_shared_in_a_model_of_no_known_family(self):
        model, samples = tiny_llama(), tokens(8, 16)
        model.model.layers[1] = model.model.layers[0]
        found = survey_model(model, samples, config(exposure_samples=4))
        assert len(found.layers) == 4 and {reading.calls for reading in found.layers} == {2}
        check(layer(found, "model.layers.0.mlp.down_proj"), inputs(model, "model.layers.0.mlp.down_proj", samples, 2))
        assert found.exposure == {} and "known family" in found.no_exposure and found.family == ""


def shaped_moe() -> Any:
    """Six experts, two a token. Logits ±v.x and ±u.x: two of the first four are always above 0, so expert 4 (logit 0) is never chosen, and expert 5 seldom."""
    model = tiny_qwen3_moe(num_experts=6)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for block in model.model.layers:
            v, u, z = torch.randn(3, 64, generator=generator)
            block.mlp.gate.weight.copy_(torch.stack([v, -v, u, -u, torch.zeros(64), 0.1 * z]))
    return model


class TestExperts:
    def routed(self, model: Any, samples: list[list[int]]) -> list[Tensor]:
        """Tokens of each expert by layer, from the routers' inputs."""
        counts = []
        for index in range(2):
            rows = torch.cat(inputs(model, f"model.layers.{index}.mlp", samples)[0])
            chosen = (rows @ model.model.layers[index].mlp.gate.weight.double().T).topk(2).indices
            counts.append(chosen.flatten().bincount(minlength=6))
        return counts

    def test_starved_and_untouched(self):
        model, samples = shaped_moe(), tokens(18, 16)
        found = survey_model(model, samples, config())
        for index, counts in enumerate(self.routed(model, samples)):
            assert counts[4] == 0 and 0 < counts[5] < 64
            for leaf, width in (("gate_up_proj", 64), ("down_proj", 32)):
                own = [expert for expert in found.experts if expert.projection == f"model.layers.{index}.mlp.experts.{leaf}"]
                assert [expert.tokens for expert in own] == counts.tolist() and [expert.expert for expert in own] == list(range(6))
                assert [expert.share for expert in own] == (counts / counts.sum().double()).tolist()
                assert sum(expert.tokens for expert in own) == 2 * found.tokens
                for expert in own:
                    assert (expert.width, expert.bound) == (width, min(expert.tokens, width))
                    assert expert.untouched == (expert.expert == 4) and expert.starved == (0 < expert.tokens < width)
                    assert (expert.rank is None) == expert.untouched
                    assert expert.rank is None or (expert.rank.n == expert.tokens and 0 < expert.rank.rank <= expert.bound)
        kinds = {(finding.kind, finding.action) for finding in found.findings}
        assert kinds == {("untouched", "no-statistics"), ("starved", "more-rows")}
        assert sum(finding.kind == "untouched" for finding in found.findings) == 4
        assert "4 got no token" in found.text

    def test_rank_of_an_expert_from_its_own_rows(self):
        model, samples = shaped_moe(), tokens(18, 16)
        found = survey_model(model, samples, config())
        rows = torch.cat(inputs(model, "model.layers.0.mlp", samples)[0])
        chosen = (rows @ model.model.layers[0].mlp.gate.weight.double().T).topk(2).indices
        for expert in found.experts[:6]:
            mine = rows[(chosen == expert.expert).any(-1)]
            if len(mine):
                assert expert.rank is not None and expert.rank.rank == by_svd(mine)[0]
                assert expert.trace == pytest.approx(float(mine.square().sum()), rel=1e-4)

    def test_the_model_keeps_its_own_experts_function(self):
        model = shaped_moe()
        before = model.config._experts_implementation
        survey_model(model, tokens(2, 8), config())
        assert model.config._experts_implementation == before
        assert not any(hasattr(module, "_prism_capture") for module in model.modules())

    def test_experts_past_the_budget_are_read_from_even_rows(self):
        found = survey_model(shaped_moe(), tokens(18, 16), config(max_width=40))
        first = [expert for expert in found.experts if expert.width == 64 and expert.tokens > 40]
        assert first
        for expert in first:
            assert expert.rank is not None and 20 <= expert.rank.n <= 40 and not expert.untouched
            assert expert.limited == "64 columns > max_width 40: at most 40 evenly spaced rows of an expert"
        assert all(not expert.limited for expert in found.experts if expert.width == 32)


class TestLimits:
    def test_a_wide_input_is_read_from_evenly_spaced_rows(self):
        model, samples = looped(), tokens(10, 12)
        found = survey_model(model, samples, config(max_width=48))
        adapter = layer(found, "model.adapter")
        assert adapter.limited == "64 columns > max_width 48: at most 12 evenly spaced rows of a step"
        assert adapter.tokens == 120 and adapter.blind in (True, False)
        rows = inputs(model, "model.adapter", samples, LOOPS)
        # 120 rows, at most 12: every 16th; each half of the first and last step has 60 rows, at most 6, every 16th of its own.
        kept = [torch.cat([torch.cat(part)[::16] for part in (step[:5], step[5:])]) for step in (rows[0], rows[-1])]
        middle = [torch.cat(step)[::16] for step in rows[1:-1]]
        expected = [by_svd(part)[0] for part in (kept[0], *middle, kept[1])]
        assert [step.rank for step in adapter.steps] == expected
        assert [step.n for step in adapter.steps] == [8, 8, 8, 8]
        assert adapter.accumulated is not None and adapter.accumulated.n == 32
        assert adapter.trace == pytest.approx([float(torch.cat(step).square().sum()) for step in rows], rel=1e-4)  # of all rows
        assert "n = 8 rows < 64 columns" in adapter.notes[0] and adapter.notes[1].startswith("all steps: n = 32")
        assert not layer(found, "model.core.0.self_attn.q_proj").limited

    def test_counts_alone_where_not_two_rows_fit(self):
        found = survey_model(looped(), tokens(4, 8), config(max_width=7))
        adapter = layer(found, "model.adapter")
        assert adapter.limited.endswith("counts and traces alone")
        assert (adapter.steps, adapter.accumulated, adapter.gain, adapter.overlap) == ((), None, None, None)
        assert adapter.tokens == 32 and adapter.trace[0] > 0
        json.dumps(found.to_dict(), allow_nan=False)
        pd.DataFrame(found.rows())

    def test_several_passes_give_the_same_readings(self):
        samples = tokens(6, 16)
        model = tiny_llama(hidden_size=128, intermediate_size=256)
        small, whole = (survey_model(model, samples, config(memory_bytes=size)) for size in (2**20, 2**30))
        assert whole.passes == 1 and small.passes > 1
        assert small.layers == whole.layers

    def test_the_bytes_of_a_share_bound_what_its_states_hold(self):
        for width, calls, count in ((64, 1, 40), (64, 1, 4000), (64, 4, 40)):
            group = InputGroup(name="x", members=("x",), width=width)
            share = share_of(group, calls, count, None, config())
            assert share.limit is None
            assert share.size == (calls + 2 if calls > 1 else 2) * min(8 * width**2, 16 * width * count)

    def test_passes_keep_the_order_and_the_budget(self):
        group = InputGroup(name="x", members=("x",), width=64)
        share = share_of(group, 1, 4000, None, config())
        found = list(passes([share] * 5, 2 * share.size))
        assert [len(wave) for wave in found] == [2, 2, 1]
        assert [len(wave) for wave in passes([share], 1)] == [1]  # one that passes the budget alone is not lost
        assert list(passes([], 1)) == []


def reading(**fields: Any) -> LayerReading:
    rank = Rank(rank=10, effective=5.0, n=100, bound=64)
    made = {
        "name": "x",
        "members": ("x",),
        "component": "core",
        "width": 64,
        "calls": 3,
        "tokens": 100,
        "steps": (rank, rank, rank),
        "accumulated": rank,
        "gain": 1.0,
        "overlap": span(0.99),
        "floor_first": span(0.98),
        "floor_last": span(0.99),
        "trace": (1.0, 1.0, 1.0),
        "limited": "",
        "notes": (),
    }
    return LayerReading(**{**made, **fields})


def span(value: float, chance: float = 0.2) -> Overlap:
    return Overlap(value=value, ranks=(10, 10), rows=(100, 100), chance=chance)


class TestJudgement:
    @pytest.mark.parametrize(
        ("value", "first", "last", "expected"),
        [
            (0.97, 0.98, 0.99, False),  # 3 % against 2 x 2 %
            (0.95, 0.98, 0.99, True),
            (0.95, 0.99, 0.97, False),  # the worse of the floors counts
            (1.0, 1.0, 1.0, False),
            (1.0 - 1e-12, 1.0, 1.0, False),  # rounding
            (0.006, 0.9, 0.997, True),
        ],
    )
    def test_shifted(self, value, first, last, expected):
        found = reading(overlap=span(value), floor_first=span(first), floor_last=span(last))
        assert found.shifted is expected and found.blind is expected

    def test_nothing_is_said_without_a_floor_or_of_whole_spaces(self):
        assert reading(floor_last=None).shifted is None
        assert reading(overlap=None).shifted is None
        assert reading(overlap=span(0.5, chance=1.0)).shifted is None

    def test_gain_and_masked(self):
        low, high = (dataclasses.replace(reading().steps[0], rank=rank) for rank in (1, 40))
        gained = reading(steps=(low, high, high), accumulated=high, gain=40.0)
        assert gained.blind and not gained.masked
        # The paper's Ouro bottleneck: rank 1 at step 0 and over all steps, 974 to 1,194 at later ones.
        masked = reading(steps=(low, high, high), accumulated=low, gain=1.0)
        assert masked.masked and not masked.blind
        assert not reading().masked and not reading(steps=(low,), calls=1).masked


# --- files and command line ---


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def require_self_contained(text: str) -> None:
    for tag, attributes in (page := Tags(text)).tags:
        assert not any(attributes.get(name) for name in ("src", "href", "srcset", "action", "data")), (tag, attributes)
        assert tag not in ("link", "iframe", "img", "base", "object", "embed")
    policy = next(a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'") and "http" not in policy
    assert text.count("plotly.js v") == 1


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("survey")
    save_tiny(folder / "loop", looped(num_loops=2))
    save_tiny(folder / "moe", shaped_moe())
    save_tiny(folder / "dense", tiny_llama())
    lines = [f"the rain in {i} towns is {i * i % 97}, and on the other hand the water ran to the sea" for i in range(60)]
    (folder / "text.txt").write_text("\n".join(lines))
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"body": line}) for line in lines))
    return folder


def test_the_command_on_a_looped_model(root, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["survey", str(root / "loop"), "--data", str(root / "text.txt"), "--samples", "8", "--length", "16", "--steps", "3"]
    cheap = ["--exposure-samples", "1", "--radius-iterations", "2", "--dtype", "float32"]
    assert run([*arguments, *cheap, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["survey.html", "survey.json", "survey.parquet"]
    content = json.loads((out / "survey.json").read_text())
    assert content["steps"] == 3 and content["tokens"] == 128 and content["config"]["steps"] == 3
    assert set(content["exposure"]) == {"int4-channel", "int4-group"}
    assert content["exposure"]["int4-group"]["sensitivities"][0]["name"] == "model.adapter"
    table = pd.read_parquet(out / "survey.parquet")
    assert len(table) == len(content["layers"]) == 17 and set(table["kind"]) == {"layer"}
    adapter = table.set_index("name").loc["model.adapter"]
    assert len(adapter["rank_by_step"]) == 3 and adapter["n_accumulated"] == 3 * 128
    line = next(line for line in printed.splitlines() if line.startswith("model.adapter "))
    found = next(entry for entry in content["layers"] if entry["name"] == "model.adapter")
    assert line.split()[1:8] == [
        "64",
        "3",
        "128",
        "128",
        *(str(rank) for rank in (adapter["rank_first"], adapter["rank_last"], adapter["rank"])),
    ]
    # The noise floor stands beside the overlap.
    assert line.split()[9:12] == [f"{found[name]['value']:.4f}" for name in ("overlap", "floor_first", "floor_last")]
    assert content["text"] in printed and "int4-channel, top tokens kept" in printed
    text = (out / "survey.html").read_text()
    require_self_contained(text)
    for name in ("rank-by-step", "injection"):
        assert f'id="{name}"' in text
    assert "expert-tokens" not in text and "model.adapter" in text


def test_the_command_on_experts_and_on_rows(root, tmp_path, capsys):
    common = ["--samples", "20", "--length", "32"]
    assert run(["survey", str(root / "moe"), "--data", str(root / "text.txt"), *common, "--out", str(tmp_path / "moe")]) == 0
    printed = capsys.readouterr().out
    line = next(line for line in printed.splitlines() if line.startswith("model.layers.0.mlp.experts.gate_up_proj "))
    assert line.split()[1:4] == ["64", "6", "0"] and int(line.split()[6]) == 1  # one untouched
    table = pd.read_parquet(tmp_path / "moe" / "survey.parquet")
    assert len(table[table["kind"] == "expert"]) == 24 and table["untouched"].sum() == 4
    text = (tmp_path / "moe" / "survey.html").read_text()
    require_self_contained(text)
    assert 'id="expert-tokens"' in text and "Not measured: the model has no recurrence" in text
    rows = ["--data", str(root / "rows.jsonl"), "--mode", "rows", "--column", "body", *common, "--out", str(tmp_path / "dense")]
    assert run(["survey", str(root / "dense"), *rows]) == 0
    printed = capsys.readouterr().out
    assert "rows were longer than 32 tokens and were cut" in printed
    line = next(line for line in printed.splitlines() if line.startswith("model.layers.0.self_attn.q_proj "))
    assert line.split()[8:10] == ["1.00", "n/a"] and 0 < float(line.split()[10]) <= 1 and line.split()[11] == "n/a"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dense", "--data", "none.txt"], "none.txt"),
        (["none", "--data", "text.txt"], "none"),
        (["dense", "--data", "text.txt", "--length", "100000"], "gives no window of 100000 tokens"),
        (["dense", "--data", "rows.jsonl"], "no column 'text'"),
        (["dense", "--data", "text.txt", "--steps", "3"], "no recurrence"),
        (["dense", "--data", "text.txt", "--memory", "4"], "'4' is no size"),
        (["dense", "--data", "text.txt", "--memory", "4MB", "--dtype", "float16"], "dtype"),
        (["dense", "--data", "text.txt", "--ignore", "*"], "no full-precision linear weight"),
        (["dense", "--data", "text.txt", "--out", "text.txt"], "is a file"),
        (["dense"], "--data"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(root, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(root)
    given = [f"./{entry}" if entry in ("dense", "none") else entry for entry in arguments]
    assert run(["survey", *given]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1 and message in error[0]
    assert not (root / "survey").exists()


def test_the_page_escapes_names_and_says_what_was_left_out(tmp_path):
    found = survey_model(tiny_llama(), tokens(4, 8), config())
    content = found.to_dict()
    content["layers"][0]["name"] = "<script>alert(1)</script>"
    content["config"] = {"model": "a/<b>model</b>"}
    path = write_survey_report(tmp_path, content)
    text = path.read_text()
    assert "<script>alert(1)" not in text and "&lt;b&gt;model" in text and "<b>model" not in text
    assert "Not surveyed (1)" in text and "lm_head" in text
    require_self_contained(text)
