"""Audit by byte comparison: the first code that differs is named, and a legal scale plane is told from tampering (field cases FMT-02, FMT-04, FMT-05)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from prism_ray.adapters import audit as module
from prism_ray.adapters.apply import apply_adapter
from prism_ray.adapters.audit import audit, summary
from prism_ray.core.errors import CheckpointError
from prism_ray.models.tiny import tiny_llama, tiny_qwen3_moe
from tests.unit._fuzzed_folders import edit_json, make_adapter, make_base

UP = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module", params=["nvfp4", "mxfp4"])
def base(request, tmp_path_factory) -> Path:
    model = tiny_llama(hidden_size=64, num_layers=1, intermediate_size=64)
    return make_base(tmp_path_factory.mktemp("base") / "base", model, format=request.param)


@pytest.fixture(scope="module")
def moe(tmp_path_factory) -> Path:
    return make_base(tmp_path_factory.mktemp("moe") / "base", tiny_qwen3_moe(hidden_size=32, num_layers=1))


def edited(base: Path, folder: Path, change) -> Path:
    """A copy of a checkpoint with changed tensors. Audit reads no manifest: a tamperer would have written one."""
    shutil.copytree(base, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def block_of(base: Path) -> int:
    return 16 if any(name.endswith("global_scale") for name in load_file(base / "model.safetensors")) else 32


def test_a_copy_is_identical_and_everything_was_compared(base, tmp_path):
    report = audit(shutil.copytree(base, tmp_path / "copy"), base)
    tensors = load_file(base / "model.safetensors")
    assert (report.verdict, report.findings, report.tensors) == ("identical", (), len(tensors))
    assert report.code_bytes == sum(tensor.numel() for name, tensor in tensors.items() if name.endswith("weight_packed"))
    assert report.code_plane_intact


def test_an_applied_adapter_is_a_legal_scale_plane(base, tmp_path):
    folder = shutil.copytree(base, tmp_path / "copy")
    state = apply_adapter(folder, make_adapter(base, tmp_path / "adapter", spread=2.0))
    report = audit(folder, base)
    assert report.verdict == "scale_plane" and report.code_plane_intact
    assert report.count("scale_plane") == state.changed
    assert audit(base, folder).verdict in ("scale_plane", "illegal_scale")


@pytest.mark.parametrize("chunk", [64 << 20, 7])
@pytest.mark.parametrize(("row", "column", "flip"), [(0, 0, 1), (0, 1, 8), (17, 35, 4), (63, 63, 2)])
def test_the_first_changed_code_is_named(base, tmp_path, monkeypatch, row, column, flip, chunk):
    monkeypatch.setattr(module, "CHUNK", chunk)

    def change(tensors):
        codes = tensors[f"{UP}.weight_packed"]
        codes[row, column // 2] ^= flip << (4 * (column % 2))
        codes[63, 31] ^= 0x80  # a later one: the high nibble of the last byte

    before = int(load_file(base / "model.safetensors")[f"{UP}.weight_packed"][row, column // 2]) >> (4 * (column % 2)) & 15
    report = audit(edited(base, tmp_path / "copy", change), base)
    finding = report.findings[0]
    assert report.verdict == "codes" and len(report.findings) == 1 and not report.code_plane_intact
    assert (finding.tensor, finding.expert, finding.row, finding.column) == (f"{UP}.weight_packed", None, row, column)
    assert finding.block == column // block_of(base)
    assert finding.count == (1 if (row, column) == (63, 63) else 2)
    if (row, column) != (63, 63):
        assert f"the first is {before ^ flip}, the base has {before}" in finding.what
    assert f"row {row}, block {finding.block}, column {column}" in str(finding)


def test_a_tampered_expert_is_named_by_its_number(moe, tmp_path):
    name = "model.layers.0.mlp.experts.2.down_proj"

    def change(tensors):
        tensors[f"{name}.weight_packed"][5, 3] ^= 0x30
        tensors["model.layers.0.self_attn.q_proj.weight_scale"].view(torch.uint8)[0, 0] ^= 1

    report = audit(edited(moe, tmp_path / "copy", change), moe)
    assert [finding.kind for finding in report.findings] == ["codes", "scale_plane"]
    first = report.findings[0]
    assert (first.expert, first.row, first.block, first.column) == (2, 5, 0, 7)
    assert "expert 2, row 5, block 0, column 7" in summary(report)["finding 1"]


def test_the_place_in_a_fused_tensor_counts_rows_per_expert():
    assert module._place("model.experts.blocks", [4, 10, 8], 23) == (2, 3)
    assert module._place("model.layers.3.experts.7.w1.weight_packed", [10, 8], 9) == (7, 9)
    assert module._place("model.layers.3.q_proj.weight_packed", [10, 8], 9) == (None, 9)


def test_another_tensor_scale_is_another_base(base, tmp_path):
    if block_of(base) != 16:
        pytest.skip("mxfp4 has no tensor scale")

    def invert(tensors):
        tensors[f"{UP}.weight_global_scale"] = 1.0 / tensors[f"{UP}.weight_global_scale"]

    report = audit(edited(base, tmp_path / "copy", invert), base)
    assert (report.verdict, len(report.findings)) == ("tensor_scale", 1)
    assert report.findings[0].tensor == f"{UP}.weight_global_scale" and "the base has" in report.findings[0].what


def test_scales_that_no_adapter_writes_are_told_from_those_that_one_may(base, tmp_path):
    grid_nan = 0x7F if block_of(base) == 16 else 0xFF

    def illegal(tensors):
        tensors[f"{UP}.weight_scale"].view(torch.uint8)[9, 1] = grid_nan

    report = audit(edited(base, tmp_path / "nan", illegal), base)
    assert report.verdict == "illegal_scale" and not report.code_plane_intact
    assert (report.findings[0].row, report.findings[0].block) == (9, 1) and f"0x{grid_nan:02x}" in report.findings[0].what


def test_a_revived_zero_block_is_no_adapters_work(moe, tmp_path):
    key = "model.layers.0.self_attn.q_proj.weight_scale"
    zero = edited(moe, tmp_path / "zero", lambda tensors: tensors[key].view(torch.uint8).__setitem__((2, 1), 0))
    assert audit(zero, moe).verdict == "scale_plane"
    assert audit(moe, zero).verdict == "illegal_scale"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda tensors: tensors.pop(f"{UP}.weight_scale"), "missing from the folder"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "not in the base"),
        (
            lambda tensors: tensors.update({f"{UP}.weight_packed": tensors[f"{UP}.weight_packed"][:8].clone()}),
            "U8 [8, 32], the base has U8 [64, 32]",
        ),
        (lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].half()}), "F16"),
    ],
    ids=["missing", "extra", "shape", "dtype"],
)
def test_missing_and_surplus_tensors_outrank_everything(base, tmp_path, change, text):
    def both(tensors):
        tensors["model.layers.0.mlp.down_proj.weight_packed"][0, 0] ^= 1
        change(tensors)

    report = audit(edited(base, tmp_path / "copy", both), base)
    assert report.verdict == "tensors" and text in str(report.findings[0])
    assert [finding.kind for finding in report.findings] == ["tensors", "codes"]


def test_a_changed_norm_is_found(base, tmp_path):
    report = audit(edited(base, tmp_path / "copy", lambda tensors: tensors["model.norm.weight"].view(-1)[3:4].add_(1)), base)
    assert report.verdict == "plain" and report.findings[0].tensor == "model.norm.weight"


def test_another_format_in_the_config_is_found(base, tmp_path):
    folder = shutil.copytree(base, tmp_path / "copy")
    edit_json(folder / "config.json", quantization_config={"format": "x\ny"})
    report = audit(folder, base)
    assert (
        report.verdict == "tensors"
        and str(report.findings[0]).isprintable()
        and "quantization_config differs in" in str(report.findings[0])
    )


def test_another_quantization_of_the_same_model_differs_in_its_codes(base, tmp_path):
    other = make_base(
        tmp_path / "other",
        tiny_llama(seed=1, hidden_size=64, num_layers=1, intermediate_size=64),
        format="nvfp4" if block_of(base) == 16 else "mxfp4",
    )
    report = audit(other, base)
    assert report.verdict == "codes"
    assert len([finding for finding in report.findings if finding.kind == "codes"]) == 7
    assert report.to_dict()["verdict"] == "codes" and len(summary(report, shown=2)) == 3


def test_a_truncated_folder_cannot_be_audited(base, tmp_path):
    folder = shutil.copytree(base, tmp_path / "copy")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) * 9 // 10])
    with pytest.raises(CheckpointError, match="the file is truncated"):
        audit(folder, base)
