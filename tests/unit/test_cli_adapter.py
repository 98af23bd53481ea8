"""`prism-ray adapter`: the verbs end to end on tiny folders, with their exit codes and one-line errors."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from prism_ray.adapters.apply import read_state
from prism_ray.adapters.audit_log import read_entries
from prism_ray.cli.main import run
from prism_ray.core.errors import EXIT_FAILED, EXIT_OK, EXIT_USER_ERROR
from prism_ray.models.tiny import tiny_llama
from tests.unit._fuzzed_folders import make_adapter, make_base, tree_digest


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("folders")
    base = make_base(root / "base")
    return base, make_adapter(base, root / "adapter")


@pytest.fixture
def model(folders, tmp_path) -> Path:
    return shutil.copytree(folders[0], tmp_path / "model")


def call(capsys, *arguments: object) -> tuple[int, str, str]:
    """(exit code, stdout, errors on stderr: progress bars are left out)."""
    code = run(["adapter", *(str(argument) for argument in arguments)])
    out = capsys.readouterr()
    return code, out.out, "\n".join(line for line in out.err.splitlines() if line.startswith("error"))


def test_check_apply_audit_rollback(folders, model, capsys):
    base, adapter = folders
    before = tree_digest(model)
    code, out, _ = call(capsys, "check", model, adapter)
    assert code == EXIT_OK and "admitted," in out and "in 7 of 7 layers" in out
    assert tree_digest(model) == before
    code, out, _ = call(capsys, "apply", model, adapter, "--id", "billing", "--probe", "the end")
    state = read_state(model)
    assert code == EXIT_OK and state is not None and state.adapter == "billing"
    assert f"billing applied, {state.changed} scale bytes differ" in out
    code, out, _ = call(capsys, "audit", model, "--base", base, "--shown", 2)
    assert code == EXIT_OK and out.startswith("scale_plane: codes are the base's") and "... and 5 more tensor(s)" in out
    code, out, _ = call(capsys, "rollback", model)
    assert code == EXIT_OK and f"rolled back, scale plane {state.base_scale_plane[:12]}" in out
    assert tree_digest(model) == before
    code, out, _ = call(capsys, "audit", model, "--base", base)
    assert code == EXIT_OK and out.startswith("identical: every byte is the base's")


def test_audit_of_tampered_codes_exits_with_1_and_names_the_code(folders, model, capsys):
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_packed"][3, 4] ^= 0x10
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    code, out, _ = call(capsys, "audit", model, "--base", folders[0])
    assert code == EXIT_FAILED
    assert "codes: codes are NOT the base's" in out and "up_proj.weight_packed" in out and "(first at row 3, block 0, column 9)" in out


def test_another_base_is_refused_and_an_override_leaves_a_trace(folders, tmp_path, capsys):
    other = make_base(tmp_path / "other", tiny_llama(seed=1, hidden_size=32, num_layers=1, intermediate_size=32))
    before = tree_digest(other)
    capsys.readouterr()
    code, out, error = call(capsys, "apply", other, folders[1])
    assert (code, out) == (EXIT_USER_ERROR, "") and "\n" not in error and "the adapter's code_plane is" in error
    assert tree_digest(other) == before
    code, out, _ = call(capsys, "check", other, folders[1], "--allow-mismatch", "ticket 7")
    assert code == EXIT_OK and out.count("overridden: the adapter's code_plane is") == 2
    code, out, _ = call(capsys, "apply", other, folders[1], "--allow-mismatch", "ticket 7")
    assert code == EXIT_OK and tree_digest(other) != before
    entries = read_entries(tmp_path / "other.audit.jsonl")
    assert [entry["event"] for entry in entries] == ["overridden", "overridden"] and entries[1]["reason"] == "ticket 7"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("rollback", "MODEL"), "no adapter is applied"),
        (("rollback", "MODEL/none"), "is no folder"),
        (("apply", "MODEL", "MODEL"), "expected a 'scale-adapter'"),
        (("apply", "MODEL", "ADAPTER", "--id", "../x"), "not a legal adapter id"),
        (("check", "MODEL", "ADAPTER/none"), "is no folder"),
        (("audit", "MODEL", "--base", "ADAPTER"), "holds no model.safetensors"),
        (("merge", "MODEL", "ADAPTER", "--out", "MODEL"), "the folder exists already"),
        (("merge", "MODEL", "ADAPTER", "--out", "NEW", "--max-output-error", "0.1"), "there is no output to compare"),
    ],
)
def test_mistakes_are_one_line_and_exit_with_2(folders, model, capsys, arguments, text):
    before = tree_digest(model)
    places = {"MODEL": str(model), "ADAPTER": str(folders[1]), "NEW": str(model.parent / "new")}
    filled = [
        next((argument.replace(key, place, 1) for key, place in places.items() if argument.startswith(key)), argument)
        for argument in arguments
    ]
    code, out, error = call(capsys, *filled)
    assert (code, out) == (EXIT_USER_ERROR, "") and text in error and error.isprintable()
    assert tree_digest(model) == before and not (model.parent / "new").exists()


def test_an_adapter_without_effect_needs_its_flag(folders, model, tmp_path, capsys):
    empty = make_adapter(folders[0], tmp_path / "empty", spread=0.0)
    capsys.readouterr()
    assert call(capsys, "apply", model, empty)[0] == EXIT_USER_ERROR
    code, out, _ = call(capsys, "apply", model, empty, "--allow-no-change")
    assert code == EXIT_OK and "empty applied, 0 scale bytes differ" in out
    assert call(capsys, "rollback", model)[0] == EXIT_OK and tree_digest(model) == tree_digest(folders[0])


def test_merge_prints_its_table_and_equals_the_applied_folder(folders, model, tmp_path, capsys):
    base, adapter = folders
    code, out, _ = call(
        capsys, "merge", base, adapter, "--out", tmp_path / "merged", "--report", "--probe", "the end", "--max-output-error", "0"
    )
    lines = out.splitlines()
    assert code == EXIT_OK and lines[0].split()[:3] == ["layer", "blocks", "changed"] and "max_abs_dw" in lines[0]
    assert len(lines) == 1 + 7 + 1 and "max|dW| = 0.0" in lines[-1]
    assert len({len(line.rstrip()) for line in lines[:-1]}) == 1  # aligned
    call(capsys, "apply", model, adapter)
    code, out, _ = call(capsys, "audit", model, "--base", tmp_path / "merged")
    assert code == EXIT_OK and out.startswith("identical")
    assert run(["merge", str(base), str(adapter), "--out", str(tmp_path / "old-verb")]) == EXIT_OK
