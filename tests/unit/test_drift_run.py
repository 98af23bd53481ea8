"""`prism-ray drift` on tiny models: numbers against a plain loop of one sample at a time, shapes and padding, bad input, thresholds."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from peft import LoraConfig, get_peft_model

from prism_ray.calibrate.quantize import quantize_to_folder
from prism_ray.cli.main import run
from prism_ray.core.errors import ConfigError, DataError, EnvironmentFault, ModelError
from prism_ray.drift import data as plans
from prism_ray.drift.config import DriftConfig
from prism_ray.drift.reader import FeatureReader, layout
from prism_ray.drift.run import load_benchmarks, run_drift
from prism_ray.drift.variants import linear_head, open_variant
from prism_ray.formats.policy import QuantPolicy
from prism_ray.models.load import load_model
from prism_ray.models.tiny import save_tiny, tiny_llama, tiny_qwen3_moe, tiny_tokenizer
from prism_ray.training.task import BenchmarkConfig

WORDS = ("red", "green")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base, the same quantized, a LoRA adapter, a changed head, data of two kinds."""
    folder = tmp_path_factory.mktemp("drift")
    base = tiny_llama(tie=False)
    save_tiny(folder / "base", base)
    quantize_to_folder(tiny_llama(tie=False), tiny_tokenizer(), QuantPolicy(), folder / "fp4")
    other = tiny_llama(tie=False)
    with torch.no_grad():
        other.lm_head.weight += 0.02 * torch.randn(other.lm_head.weight.shape, generator=torch.Generator().manual_seed(1))
    save_tiny(folder / "head", other)
    peft = get_peft_model(tiny_llama(tie=False), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, value in peft.named_parameters():
            if "lora_B" in name:
                value.normal_(generator=torch.Generator().manual_seed(2), std=0.2)
    peft.save_pretrained(folder / "lora")
    rows = [{"prompt": f"{'very ' * (i % 5)}{i} is", "answer": WORDS[i % 2]} for i in range(40)]
    (folder / "colours.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "text.txt").write_text("\n\n".join("the rain is in the town " * (1 + i % 4) for i in range(12)))
    return folder


def config(root: Path, *variants: str, **options) -> DriftConfig:
    data = [
        BenchmarkConfig(name="colours", location=str(root / "colours.jsonl"), prompt="{prompt}", answer="answer"),
        BenchmarkConfig(name="text", location=str(root / "text.txt"), max_tokens=24),
    ]
    values = {
        "base": str(root / "base"),
        "variants": [str(root / name) for name in variants],
        "data": data,
        "dtype": "float32",
        "floor_samples": 8,
    }
    return DriftConfig.load(values | {"max_batch": 4} | options)


@pytest.fixture(scope="module")
def results(root: Path):
    found = run_drift(config(root, "fp4", "head", "lora", "base", alignments=["identity", "nuclear", "joint"]))
    return {(entry.variant, entry.benchmark): entry for entry in found}


@torch.no_grad()
def by_hand(root: Path, variant: str, benchmark: int) -> dict[str, float]:
    """Risks, rhos and Omega from one unpadded sample at a time with the models' own full logits."""
    settings = config(root, variant)
    encoded, _ = load_benchmarks(settings)
    models = [open_variant(str(root / name), base=settings.base, dtype=torch.float32) for name in ("base", variant)]
    features: list[list[torch.Tensor]] = [[], []]
    losses: list[list[torch.Tensor]] = [[], []]
    for item in encoded[benchmark].items:
        ids = torch.tensor([item.input_ids])
        first = max(item.prompt_tokens, 1)
        for side, model in enumerate(models):
            output = model(input_ids=ids, output_hidden_states=True)
            features[side].append(output.hidden_states[-1][0, first - 1 : -1].double())
            losses[side].append(
                torch.nn.functional.cross_entropy(output.logits[0, first - 1 : -1], ids[0, first:], reduction="none").double()
            )
    z, ce = [torch.cat(entry) for entry in features], [torch.cat(entry) for entry in losses]
    return {
        "rho_target": float(z[0].norm()) / math.sqrt(len(z[0])),
        "rho_proxy": float(z[1].norm()) / math.sqrt(len(z[1])),
        "omega": float((z[0] * z[1]).sum() / z[0].norm() / z[1].norm()),
        "risk_target": float(ce[0].mean()),
        "risk_proxy": float(ce[1].mean()),
        "tokens": len(z[0]),
        "samples": len(features[0]),
    }


@pytest.mark.parametrize("variant", ["fp4", "head", "lora"])
@pytest.mark.parametrize("benchmark", [0, 1])
def test_numbers_are_those_of_one_unpadded_sample_at_a_time(root, results, variant, benchmark):
    """Field cases DRF-01, CAL-07. Tolerance: float32 products in other shapes."""
    found = results[variant, ("colours", "text")[benchmark]].row()
    for name, value in by_hand(root, variant, benchmark).items():
        assert found[name] == pytest.approx(value, rel=2e-5), name


def test_the_bound_holds_in_every_cell_and_the_axes_are_where_the_change_is(results):
    for entry in results.values():
        for bound in entry.bounds.values():
            assert abs(entry.delta_ce) <= bound.value + 1e-12
        assert abs(entry.delta_ce_sequence) <= entry.sequence.value + 1e-12
        assert abs(entry.delta_ce) <= entry.tight.value + 1e-12
        assert entry.tight.feature <= entry.bound.delta * (1 + 1e-6)
        assert entry.tight.head <= entry.bound.gamma * (1 + 1e-6)
        # KL(T || P) is the mean of the loss difference under T's own tokens, so the same inequality bounds it (field case DRF-04).
        assert entry.kl <= entry.bound.value + 1e-9
    assert results["fp4", "text"].bound.dominant == "shape"
    assert results["lora", "text"].bound.gamma == results["fp4", "text"].bound.gamma == 0.0
    assert results["head", "text"].bound.dominant == "head"
    assert results["head", "text"].bound.delta == 0.0


def test_the_base_against_itself_is_within_its_own_floor(results):
    same = results["base", "colours"]
    assert (same.bound.value, same.verdict.status) == (0.0, "identical")
    assert same.agreement == pytest.approx(1.0, abs=1e-6)
    assert same.direction.verdict == "within noise"
    assert same.transfer.kind == "unchanged"
    floor = results["fp4", "text"].axes["shape"]
    assert floor.layouts == 5
    assert 0 <= floor.floor_largest < 1e-9 < floor.value


def test_other_batch_sizes_change_nothing_beyond_the_floor(root, results):
    """Field case DRF-02: batches of 1, 2 and 16."""
    reference = results["fp4", "text"]
    for size in (1, 2, 16):
        other = next(entry for entry in run_drift(config(root, "fp4", max_batch=size)) if entry.benchmark == "text")
        # Noise of relative size e in the features makes a floor of e^2 / 2, and moves a mismatch v by up to sqrt(2 v) e: twice the root of floor times v.
        shape = reference.axes["shape"]
        moved = 2 * (shape.floor_largest * reference.bound.one_minus_omega) ** 0.5
        assert other.bound.one_minus_omega == pytest.approx(reference.bound.one_minus_omega, abs=moved + 1e-9)
        assert other.delta_ce == pytest.approx(reference.delta_ce, abs=1e-5)
        assert (other.samples, other.tokens) == (reference.samples, reference.tokens)


def test_left_padding_reads_the_same_positions(root):
    settings = config(root, "fp4")
    benchmarks, tokenizer = load_benchmarks(settings)
    reader = FeatureReader(load_model(settings.base, dtype=torch.float32))
    items = benchmarks[0].items[:6]
    right, left = (reader.read(layout(items, tokenizer.pad_token_id, side)).hidden for side in ("right", "left"))
    assert len({len(item.input_ids) for item in items}) > 1
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_layouts_hold_the_same_samples_in_other_shapes(root):
    benchmark = load_benchmarks(config(root, "fp4"))[0][0]
    plan = plans.floor_plan(benchmark, 8)
    wanted = sorted(index for batch in plan for index in batch)
    assert len(wanted) >= 8
    shapes = set()
    for name, side, batches in plans.other_layouts(plan, 0):
        assert sorted(index for batch in batches for index in batch) == wanted, name
        shapes.add((side, tuple(map(tuple, batches))))
    assert len(shapes) == 5


def test_routing_flips_are_counted_for_experts_only(root, results, tmp_path):
    assert results["fp4", "text"].flips is None
    save_tiny(tmp_path / "moe", tiny_qwen3_moe())
    quantize_to_folder(tiny_qwen3_moe(), tiny_tokenizer(), QuantPolicy(), tmp_path / "moe4")
    settings = config(root, "fp4", base=str(tmp_path / "moe"), variants=[str(tmp_path / "moe4"), str(tmp_path / "moe")])
    found = {(entry.variant, entry.benchmark): entry for entry in run_drift(settings)}
    assert 0 < found["moe4", "text"].flips < 1
    assert found["moe", "text"].flips == 0.0
    assert found["moe4", "text"].floor.flips == pytest.approx(0.0, abs=0.01)


def test_the_quantized_head_of_a_checkpoint_counts(root, tmp_path):
    """FP4 planes in the head: its dequantized weight is the head."""
    policy = QuantPolicy(ignore=("*embed*", "*norm*"))
    quantize_to_folder(tiny_llama(tie=False), tiny_tokenizer(), policy, tmp_path / "all")
    model = open_variant(str(tmp_path / "all"), base="", dtype=torch.float32)
    head = linear_head(model)
    z = torch.randn(3, head.weight.shape[1])
    torch.testing.assert_close(head.logits(z), model.lm_head(z))
    found = run_drift(config(root, "fp4", variants=[str(tmp_path / "all")]))[0]
    assert found.bound.gamma > 0


class Broken(torch.nn.Module):
    """A backbone's norm that answers NaN for one token id's samples."""

    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        self.calls += 1
        return y.index_fill(0, torch.tensor([0]), math.nan) if self.calls == 1 else y


def broken(root: Path):
    model = load_model(str(root / "base"), dtype=torch.float32)
    model.model.norm = Broken(model.model.norm)
    return model


def test_a_sample_with_nan_stops_the_run_by_name_or_is_left_out_of_both_models(root):
    """Field case CAL-10."""
    with pytest.raises(DataError, match=r"colours: 1 samples give NaN or infinite numbers, 0 allowed; the first is colours-\d+, in broken"):
        run_drift(config(root, "broken"), opener=lambda source: broken(root))
    settings = config(root, "broken", max_dropped=1)
    found = run_drift(settings, opener=lambda source: broken(root))[0]
    assert list(found.dropped.values()) == ["broken"]
    assert found.samples == 39
    assert found.bound.value == 0.0


def cli(root: Path, out: Path, *arguments: str) -> int:
    return run(["drift", *arguments, "--out", str(out), "--dtype", "float32", "--floor-samples", "8", "--max-batch", "8"])


def test_the_command_writes_its_files_and_prints_the_verdict(root, tmp_path, capsys):
    code = cli(
        root, tmp_path, str(root / "base"), str(root / "fp4"), "--data", str(root / "colours.jsonl"), "--data", str(root / "text.txt")
    )
    printed = capsys.readouterr().out
    assert code == 0
    assert "Hessian-aware" in printed
    table = pd.read_parquet(tmp_path / "drift.parquet")
    assert table["benchmark"].tolist() == ["colours", "text"]
    samples = pd.read_parquet(tmp_path / "samples.parquet")
    assert len(samples) == 40 + table["samples"].tolist()[1]
    first = samples[samples["benchmark"] == "colours"]
    assert first["residual"].is_monotonic_decreasing
    summary = json.loads((tmp_path / "drift.json").read_text())
    assert summary["passed"] is True
    assert summary["results"][0]["row"]["bound"] == pytest.approx(table["bound"][0])
    assert "<html" in (tmp_path / "drift.html").read_text()[:200].lower()


def test_thresholds_decide_the_exit_code(root, tmp_path, capsys):
    models = (str(root / "base"), str(root / "fp4"), "--data", str(root / "text.txt"))
    assert cli(root, tmp_path / "a", *models, "--max-bound", "1e9") == 0
    assert cli(root, tmp_path / "b", *models, "--max-bound", "1e-9") == 1
    assert "is above max_bound" in capsys.readouterr().out
    assert cli(root, tmp_path / "c", *models, "--fail-on", "shape") == 1
    assert cli(root, tmp_path / "d", *models, "--fail-on", "head") == 0


def test_a_variant_of_another_vocabulary_or_tokenizer_is_refused_by_name(root, tmp_path):
    wide = tiny_llama(vocab_size=tiny_llama().config.vocab_size + 8, tie=False)
    save_tiny(tmp_path / "wide", wide)
    with pytest.raises(ModelError, match="wide: vocabulary of"):
        run_drift(config(root, "fp4", variants=[str(tmp_path / "wide")]))
    save_tiny(tmp_path / "words", tiny_llama(tie=False))
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["drift"])
    tokenizer.save_pretrained(tmp_path / "words")
    with pytest.raises(ModelError, match="words: its tokenizer has"):
        run_drift(config(root, "fp4", variants=[str(tmp_path / "words")]))


def test_an_empty_answer_and_one_sample(root, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a", "answer": " "}\n')
    with pytest.raises(DataError, match=r"row 2 \(line 2\): column 'answer' is empty"):
        run_drift(
            config(
                root, "fp4", data=[BenchmarkConfig(name="bad", location=str(tmp_path / "bad.jsonl"), prompt="{prompt}", answer="answer")]
            )
        )
    (tmp_path / "one.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    one = BenchmarkConfig(name="one", location=str(tmp_path / "one.jsonl"), prompt="{prompt}", answer="answer")
    found = run_drift(config(root, "fp4", data=[one]))[0]
    assert found.samples == 1
    assert math.isnan(found.delta_ce_se)
    assert found.direction is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"names": ["a", "b"]}, "2 names for 1 variants"),
        ({"variants": ["x/a", "y/a"]}, "variant name 'a' stands twice"),
        ({"fail_on": ["size"]}, "fail_on"),
        ({"max_bound": 0}, "max_bound"),
    ],
)
def test_bad_settings(root, options, expected):
    with pytest.raises(ConfigError, match=expected):
        config(root, "fp4", **options)


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_bitsandbytes_variants_where_it_is_installed(root, kind):
    pytest.importorskip("bitsandbytes")
    found = run_drift(config(root, "fp4", variants=[f"bnb-{kind}:{root / 'base'}"], names=[kind]))
    assert all(entry.verdict.status == "drifted" and entry.bound.gamma == 0.0 for entry in found)
    assert all(abs(entry.delta_ce) <= entry.tight.value for entry in found)


def test_bitsandbytes_is_asked_for_by_name_where_it_is_missing(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(EnvironmentFault, match=r"package 'bitsandbytes' is not installed; pip install 'prism-ray\[bitsandbytes\]'"):
        open_variant(f"bnb-nf4:{root / 'base'}", base="", dtype=torch.float32)
