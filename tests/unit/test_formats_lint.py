"""prism_ray.formats.lint: a good folder has no finding; each way to break one by hand has its own (FMT-05, FMT-06, FMT-09)."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from prism_ray.calibrate.quantize import quantize_model, quantize_to_folder
from prism_ray.core.errors import CheckpointError
from prism_ray.formats.checkpoint import save_quantized
from prism_ray.formats.lint import lint_checkpoint
from prism_ray.formats.modules import FP4Linear
from prism_ray.formats.policy import DEFAULT_IGNORE, QuantPolicy
from prism_ray.formats.spec import FORMATS
from prism_ray.models.tiny import tiny_llama, tiny_qwen3_moe, tiny_tokenizer
from prism_ray.quantizers.rtn import rtn

MLP, ATTENTION = "model.layers.0.mlp", "model.layers.1.self_attn"
FORMAT_NAMES = ("nvfp4", "mxfp4", "int4-g64", "int3-g64")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("lint")
    for name in FORMAT_NAMES:
        quantize_to_folder(tiny_llama(), tiny_tokenizer(), QuantPolicy(format=name), root / name)
    moe = QuantPolicy(overrides={"*.experts.*": "int4-g32"})
    quantize_to_folder(tiny_qwen3_moe(), tiny_tokenizer(), moe, root / "moe")
    return {path.name: path for path in root.iterdir()}


@pytest.fixture
def broken(folders, tmp_path) -> Callable[..., list[str]]:
    """Findings for a copy of a folder after changes to its tensors, its quantization config and its manifest."""

    def change(name: str, *, tensors: Callable = id, config: Callable = id, manifest: Callable = id) -> list[str]:
        folder = tmp_path / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(folders[name], folder)
        found = load_file(folder / "model.safetensors")
        tensors(found)
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
        for file, edit in (("config.json", lambda whole: config(whole["quantization_config"])), ("manifest.json", manifest)):
            values = json.loads((folder / file).read_text())
            edit(values)
            (folder / file).write_text(json.dumps(values))
        return lint_checkpoint(folder)

    return change


def one(findings: list[str], pattern: str) -> None:
    assert len(findings) == 1 and re.search(pattern, findings[0]), findings
    assert "\n" not in findings[0]


@pytest.mark.parametrize("name", [*FORMAT_NAMES, "moe"])
def test_a_good_folder_has_no_finding_with_and_without_its_manifest(folders, tmp_path, name):
    assert lint_checkpoint(folders[name]) == []
    shutil.copytree(folders[name], tmp_path / "copy")
    (tmp_path / "copy" / "manifest.json").unlink()
    assert lint_checkpoint(tmp_path / "copy") == []


@pytest.mark.parametrize(
    ("name", "part"),
    [
        *[("nvfp4", part) for part in ("weight_scale", "weight_global_scale")],
        ("mxfp4", "weight_scale"),
        *[("int4-g64", part) for part in ("weight_scale", "weight_shape")],
    ],
)
def test_a_missing_companion(broken, name, part):
    one(broken(name, tensors=lambda t: t.pop(f"{MLP}.up_proj.{part}")), rf"tensor '{MLP}\.up_proj\.{part}' is missing")


def test_companions_without_codes(broken):
    findings = broken("nvfp4", tensors=lambda t: t.pop(f"{MLP}.down_proj.weight_packed"))
    assert len(findings) == 3
    for part in ("weight_scale", "weight_global_scale"):
        assert f"{MLP}.down_proj.{part}: a companion without '{MLP}.down_proj.weight_packed'" in findings
    assert f"{MLP}.down_proj: the plan quantizes it, but it is not in the files packed" in findings


@pytest.mark.parametrize("part", ["weight_zero_point", "weight_g_idx"])
def test_companions_of_other_conventions(broken, part):
    one(broken("int4-g64", tensors=lambda t: t.update({f"{MLP}.up_proj.{part}": torch.zeros(2, 2)})), rf"'{MLP}\.up_proj\.{part}' means")


def test_a_weight_that_is_there_twice(broken):
    findings = broken("nvfp4", tensors=lambda t: t.update({f"{MLP}.up_proj.weight": torch.zeros(128, 64)}))
    assert findings[0] == f"{MLP}.up_proj: holds both 'weight' and 'weight_packed'"
    assert findings[1:] == [f"{MLP}.up_proj.weight: is plain, but neither planned nor kept"]


@pytest.mark.parametrize(
    ("name", "part", "change", "pattern"),
    [
        ("nvfp4", "weight_scale", lambda t: t.view(torch.uint8), r"weight_scale' has dtype torch\.uint8"),
        ("nvfp4", "weight_scale", lambda t: t[:, :2].contiguous(), r"scales have shape"),
        ("nvfp4", "weight_global_scale", lambda t: t.repeat(2), r"weight_global_scale' has shape \[2\]"),
        ("nvfp4", "weight_global_scale", lambda t: t * 0, r"tensor scale is not a positive finite number"),
        ("int4-g64", "weight_packed", lambda t: t.view(torch.uint8), r"weight_packed' has dtype torch\.uint8"),
        ("int4-g64", "weight_shape", lambda t: t + 1, r"weight_shape' says \[129, 65\]"),
        ("int4-g64", "weight_scale", lambda t: t.to(torch.float16), r"weight_scale' has dtype torch\.float16"),
    ],
)
def test_wrong_dtypes_and_shapes(broken, name, part, change, pattern):
    key = f"{MLP}.up_proj.{part}"
    one(broken(name, tensors=lambda t: t.update({key: change(t[key])})), pattern)


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("nvfp4", torch.full((1,), 0x7F, dtype=torch.uint8)),
        ("mxfp4", torch.full((1,), 255, dtype=torch.uint8)),
        ("int4-g64", -torch.ones(1)),
    ],
)
def test_an_illegal_scale(broken, name, raw):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        scales = tensors[f"{MLP}.up_proj.weight_scale"]
        scales[3, 0] = raw[0] if name != "nvfp4" else raw.view(torch.float8_e4m3fn)[0]

    one(broken(name, tensors=change), rf"{MLP}\.up_proj: scale byte 0x\w+ at \[3, 0\] is not legal")


def test_a_code_outside_the_planned_format(broken):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{MLP}.up_proj.weight_packed"].view(torch.uint8)[5, 7] = 0x0F

    one(broken("int3-g64", tensors=change), rf"{MLP}\.up_proj: code byte 0x0F at \[5, 7\] holds a code outside int3")
    assert broken("int4-g64", tensors=change) == []


def test_ignore_entries_that_match_nothing_or_a_packed_module(broken):
    one(
        broken("nvfp4", config=lambda c: c["ignore"].append("model.layers.0.mlp.in_proj")),
        r"in_proj: the config's ignore list has it, but no module",
    )
    one(broken("nvfp4", config=lambda c: c["ignore"].append("re:.*in_proj_qkv$")), r"re:\.\*in_proj_qkv\$: the config's ignore list has it")
    one(
        broken("nvfp4", config=lambda c: c["ignore"].append(f"{MLP}.up_proj")),
        rf"{MLP}\.up_proj: is packed, but the config's ignore list has",
    )
    assert broken("moe", config=lambda c: c["ignore"].append("re:.*norm$")) == []


def test_a_head_is_missed_only_where_it_is_not_tied(broken, folders, tmp_path):
    """The tied folder ignores lm_head and holds no tensor of it; untied in the config, the same files lack one."""
    shutil.copytree(folders["nvfp4"], tmp_path / "untied")
    config = json.loads((tmp_path / "untied" / "config.json").read_text())
    assert config["tie_word_embeddings"] and "lm_head" in config["quantization_config"]["ignore"]
    (tmp_path / "untied" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    findings = lint_checkpoint(tmp_path / "untied")
    assert "lm_head: the config's ignore list has it, but no module of that name is in the files" in findings
    assert "lm_head: kept by the plan, but not in the files plain" in findings


def test_fmt05_global_scales_of_a_group_that_differ(broken):
    key = f"{ATTENTION}.k_proj.weight_global_scale"
    one(
        broken("nvfp4", tensors=lambda t: t.update({key: t[key] * 2})),
        rf"{ATTENTION}\.v_proj: served as one matrix, but the global scales are",
    )
    assert broken("nvfp4", tensors=lambda t: t.update({key.replace("k_proj", "o_proj"): t[key] * 2})) == []


def test_fmt09_a_group_of_which_one_is_plain(broken):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("weight_packed", "weight_scale"):
            tensors.pop(f"{ATTENTION}.q_proj.{part}")
        tensors[f"{ATTENTION}.q_proj.weight"] = torch.zeros(64, 64)

    findings = broken("mxfp4", tensors=change)
    assert any(re.search(rf"{ATTENTION}\.q_proj, .*served as one matrix, but stored as plain, mxfp4, mxfp4", text) for text in findings), (
        findings
    )
    assert f"{ATTENTION}.q_proj: the plan quantizes it, but it is not in the files packed" in findings


def test_the_plan_of_the_manifest(broken):
    def entry(manifest: dict[str, Any], name: str) -> dict[str, Any]:
        return next(item for item in manifest["plan"] if item["tensor"] == name)

    down = f"{MLP}.down_proj"
    one(broken("nvfp4", manifest=lambda m: m["plan"].remove(entry(m, down))), rf"{down}: is packed, but not in the plan")
    one(
        broken("nvfp4", manifest=lambda m: entry(m, down).update(shape=[64, 64])),
        rf"{down}: the plan says shape \[64, 64\], the files hold 64 rows",
    )
    one(broken("nvfp4", manifest=lambda m: entry(m, down).update(format="mxfp4")), rf"{down}: the manifest says mxfp4, the config nvfp4")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    one(broken("moe", manifest=lambda m: entry(m, name).update(shape=[8, 32, 64])), rf"{name}: \d+ bytes of planes, the plan comes to \d+")


def test_what_the_manifest_kept(broken):
    norm = "model.norm.weight"
    one(broken("nvfp4", tensors=lambda t: t.pop(norm)), rf"{norm}: kept by the plan, but not in the files plain")
    one(broken("nvfp4", tensors=lambda t: t.update({norm: t[norm].to(torch.bfloat16)})), rf"{norm}: 128 bytes, the plan kept 256")
    one(
        broken("nvfp4", tensors=lambda t: t.update({"model.extra.weight": torch.zeros(4, 4)})),
        r"model\.extra\.weight: is plain, but neither planned",
    )


def test_a_folder_that_cannot_be_read_is_one_finding(tmp_path, broken):
    one(lint_checkpoint(tmp_path), r"no config\.json")
    one(broken("nvfp4", config=lambda c: c.update(quant_method="awq")), "quantization 'awq' format 'nvfp4-pack-quantized' cannot be read")


def test_saving_a_model_that_contradicts_its_plan_leaves_no_folder(tmp_path):
    model = tiny_llama()
    plan, _ = quantize_model(model, QuantPolicy())
    dense = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    model.model.layers[0].self_attn.k_proj = FP4Linear(rtn(dense[:32], FORMATS["nvfp4"])[0])  # its own global scale, not its group's
    with pytest.raises(CheckpointError, match=r"q: the written checkpoint contradicts its plan \(1 finding\(s\)\): .*global scales are"):
        save_quantized(model, plan, tmp_path / "q")
    assert list(tmp_path.iterdir()) == []


def test_a_kept_fused_expert_parameter_and_a_kept_layer_are_no_findings(tmp_path):
    ignore = (*DEFAULT_IGNORE, "model.layers.0.*", "*.experts.down_proj")
    quantize_to_folder(tiny_qwen3_moe(), tiny_tokenizer(), QuantPolicy(ignore=ignore), tmp_path / "q")
    assert lint_checkpoint(tmp_path / "q") == []
