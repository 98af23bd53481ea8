"""Tiny bases and adapters on disk for the tests of admission, apply and audit; made by the fuzz job, so that both see the same folders."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from prism_ray.core.digests import sha256_file
from prism_ray.core.manifest import MANIFEST_NAME

_PATH = Path(__file__).resolve().parents[2] / "jobs" / "reproduce" / "fuzz_adapters.py"
_SPEC = importlib.util.spec_from_file_location("reproduce_fuzz_adapters", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
fuzz = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(fuzz)

make_base, make_adapter, tree_digest = fuzz.make_base, fuzz.make_adapter, fuzz.tree_digest


def sign(folder: Path, **fields: Any) -> None:
    """Give the manifest the files' present sizes and digests, and other fields."""
    path = folder / MANIFEST_NAME
    manifest = json.loads(path.read_text()) | fields
    files = {file.name: {"sha256": sha256_file(file), "bytes": file.stat().st_size} for file in folder.iterdir() if file != path}
    path.write_text(json.dumps({key: value for key, value in (manifest | {"files": files}).items() if value is not None}))


def edit_json(path: Path, **fields: Any) -> None:
    """Replace top-level entries of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
