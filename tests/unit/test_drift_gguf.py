"""A GGUF file as base and variant of a drift run, and the reproduction job's writer of such files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import pytest
import torch

from prism_ray.drift.config import DriftConfig
from prism_ray.drift.run import run_drift
from prism_ray.models.load import load_model
from tests.unit.test_models_source import write_gguf

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def variants():
    """The module jobs/reproduce/variants.py, which is no package."""
    sys.path.insert(0, str(ROOT / "jobs" / "reproduce"))
    try:
        import variants

        yield variants
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def files(variants, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(folder / "base.gguf")
    variants.write_gguf(folder / "base.gguf", folder / "plain.gguf", "Q4_0", head=False)
    variants.write_gguf(folder / "base.gguf", folder / "head.gguf", "Q4_0", head=True)
    rows = [{"prompt": f"{i} is", "answer": ("red", "green")[i % 2]} for i in range(12)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_the_written_file_keeps_everything_but_the_quantized_matrices(files):
    before, after = (gguf.GGUFReader(files / f"{name}.gguf") for name in ("base", "head"))
    own = {name for name in before.fields if not name.startswith("GGUF.")}
    assert own == {name for name in after.fields if not name.startswith("GGUF.")}
    assert all(before.fields[name].contents() == after.fields[name].contents() for name in own)
    old, new = ({tensor.name: tensor for tensor in reader.tensors} for reader in (before, after))
    assert set(new) - set(old) == {"output.weight"} and not set(old) - set(new)
    for name, tensor in old.items():
        if name.startswith("blk.") and len(tensor.shape) == 2:
            assert new[name].tensor_type == gguf.GGMLQuantizationType.Q4_0
            source = gguf.dequantize(tensor.data, tensor.tensor_type)
            stored = gguf.dequantize(new[name].data, new[name].tensor_type)
            # Q4_0 steps are the block's largest value over 8.
            assert abs(stored - source).max() <= abs(source).max() / 8
        else:
            assert new[name].data.tobytes() == tensor.data.tobytes()


def test_a_gguf_file_is_a_base_and_a_variant_with_its_quantized_head(files):
    """The file of the base itself reads zero on every axis; the head's axis is moved by the file whose head is quantized, and by no other."""
    config = DriftConfig.load(
        {
            "base": str(files / "base.gguf"),
            "variants": [str(files / f"{name}.gguf") for name in ("base", "plain", "head")],
            "names": ["same", "plain", "head"],
            "data": [{"name": "rows", "location": str(files / "rows.jsonl"), "prompt": "{prompt}", "answer": "answer"}],
            "dtype": "float32",
            "floor_samples": 4,
        }
    )
    same, plain, head = run_drift(config)
    assert same.bound.value == 0 and same.delta_ce == 0
    assert plain.bound.gamma == 0 and plain.bound.one_minus_omega > 1e-4
    assert head.bound.gamma > 0 and head.bound.one_minus_omega == pytest.approx(plain.bound.one_minus_omega, rel=1e-6)
    for result in (plain, head):
        assert abs(result.delta_ce) <= result.bound.value


def test_the_head_of_the_file_is_the_variants_own(files):
    base, head = (load_model(files / f"{name}.gguf", dtype=torch.float32) for name in ("base", "head"))
    assert not head.config.tie_word_embeddings
    assert torch.equal(head.get_input_embeddings().weight, base.get_input_embeddings().weight)
    assert not torch.equal(head.get_output_embeddings().weight, base.get_output_embeddings().weight)
