"""The dependency directions of design.md, read from the imports themselves, and a run without the heavy optional packages."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "prism_ray"

LEVEL_0 = {"core"}
LEVEL_1 = LEVEL_0 | {"formats", "hessian"}
LEVEL_2 = LEVEL_1 | {"risk", "quantizers", "models"}
LEVEL_3 = LEVEL_2 | {"calibrate", "training", "adapters"}
LEVEL_4 = LEVEL_3 | {"drift", "engines", "reports"}
# Package -> the packages that it may import besides itself: the table "Layout" of design.md, row by row.
MAY_IMPORT = {
    "core": set(),
    "formats": LEVEL_0,
    "hessian": LEVEL_0,
    "risk": LEVEL_0,
    "quantizers": {"core", "formats", "hessian"},
    "models": {"core", "formats"},
    "calibrate": LEVEL_2,
    "training": LEVEL_2 | {"adapters", "calibrate"},
    "adapters": LEVEL_2,
    "engines": LEVEL_3,
    "reports": LEVEL_3,
    "drift": LEVEL_3,
    "dist": LEVEL_4,
    "cli": LEVEL_4 | {"dist"},
}
RAY_PLACES = ("prism_ray/dist", "serve_apps", "tune_spaces", "jobs", "tests")
# Third-party packages that core may use, all small beside torch: what stands there is a dependency of every level. core.rows imports its readers
# inside functions, for the locations that need them.
CORE_MAY_USE = {"torch", "numpy", "pydantic", "pathspec", "pyarrow", "fsspec", "datasets"}


def sources(*roots: Path) -> list[Path]:
    return sorted(path for root in roots if root.exists() for path in root.rglob("*.py"))


def imports(path: Path) -> list[tuple[str, int]]:
    """(dotted module, line) of every import of a file, also those inside functions and under TYPE_CHECKING; relative ones resolved."""
    found: list[tuple[str, int]] = []
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            prefix = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (prefix, node.module or "") if part)
            # `from prism_ray import training` names a package in its alias.
            found += [(f"{module}.{alias.name}" if module == "prism_ray" else module, node.lineno) for alias in node.names]
        elif isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if called in ("import_module", "__import__", "require") and node.args and isinstance(node.args[0], ast.Constant):
                found.append((str(node.args[0].value), node.lineno))
    return found


def level_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def test_every_package_has_a_row_in_the_table():
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert packages <= set(MAY_IMPORT), f"no row in design.md's table for {sorted(packages - set(MAY_IMPORT))}"
    assert {"core", "formats", "quantizers", "calibrate", "adapters", "models"} <= packages


def test_a_level_imports_only_what_the_table_allows():
    wrong = []
    for path in sources(PACKAGE):
        own = level_of(path)
        for module, line in imports(path):
            parts = module.split(".")
            if parts[0] != "prism_ray" or len(parts) == 1 or not (PACKAGE / parts[1]).is_dir():
                continue
            if parts[1] != own and parts[1] not in MAY_IMPORT.get(own, set()):
                wrong.append(
                    f"{path.relative_to(ROOT)}:{line} imports {module}: {own or 'prism_ray'} may import {sorted(MAY_IMPORT.get(own, ()))}"
                )
    assert not wrong, "\n".join(wrong)


def test_ray_is_imported_only_where_it_belongs():
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sources(PACKAGE, ROOT / "kernels", ROOT / "tune_spaces", ROOT / "serve_apps", ROOT / "jobs")
        for module, line in imports(path)
        if module.split(".")[0] == "ray" and not str(path.relative_to(ROOT)).startswith(RAY_PLACES)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_package_itself_imports_nothing():
    assert imports(PACKAGE / "__init__.py") == []


def test_core_uses_only_the_standard_library_torch_numpy_and_pydantic():
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sources(PACKAGE / "core")
        for module, line in imports(path)
        if (top := module.split(".")[0]) not in sys.stdlib_module_names and top not in CORE_MAY_USE | {"prism_ray"}
    ]
    assert not wrong, "\n".join(wrong)


def test_formats_does_not_import_the_package_that_it_is_checked_against():
    wrong = [str(path) for path in sources(PACKAGE) for module, _ in imports(path) if module.split(".")[0] == "compressed_tensors"]
    assert not wrong


def test_nothing_imports_upwards_out_of_the_library():
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sources(PACKAGE)
        for module, line in imports(path)
        if module.split(".")[0] in ("tune_spaces", "serve_apps", "jobs", "tests")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import ray.data as d", ["ray.data"]),
        ("def f():\n    from ray import train", ["ray"]),
        ("from prism_ray import dist", ["prism_ray.dist"]),
        ("from ..dist import x", ["prism_ray.dist"]),
        ("from . import grids", ["prism_ray.formats"]),
        ("import importlib\nimportlib.import_module('ray.tune')", ["importlib", "ray.tune"]),
    ],
)
def test_the_import_reader_sees_every_form(source, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    file = tmp_path / "prism_ray" / "formats" / "probe.py"
    file.parent.mkdir(parents=True)
    file.write_text(source)
    assert sorted(module for module, _ in imports(file)) == sorted(expected)


def test_every_module_below_dist_imports_without_ray_deepspeed_vllm_and_triton():
    modules = []
    for path in sources(PACKAGE):
        if level_of(path) not in ("dist", "cli"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            modules.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    assert len(modules) > 20
    script = """
import importlib, sys, traceback
for absent in ("ray", "deepspeed", "vllm", "triton"):
    sys.modules[absent] = None
failed = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception:
        failed.append(name + "\\n" + traceback.format_exc(limit=-3))
print("\\n".join(failed))
sys.exit(bool(failed))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, *modules],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
