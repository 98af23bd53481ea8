"""Versioned manifests: what a folder holds, who made it, the SHA-256 of each file.

A manifest is written last, so a folder without a valid one is an interrupted write. Readers refuse a newer major version rather than
guess at it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prism_ray import __version__
from prism_ray.core.digests import sha256_file
from prism_ray.core.errors import CheckpointError
from prism_ray.core.files import write_json

MANIFEST_NAME = "manifest.json"
MAJOR, MINOR = 1, 0


def write_manifest(folder: Path | str, kind: str, **fields: Any) -> dict[str, Any]:
    """Hash every file of `folder` and write `manifest.json`; returns what was written."""
    folder = Path(folder)
    files = {
        str(path.relative_to(folder)): {"sha256": sha256_file(path), "bytes": path.stat().st_size}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST_NAME
    }
    manifest = {"kind": kind, "format_version": f"{MAJOR}.{MINOR}", "producer": f"prism-ray {__version__}", "files": files, **fields}
    write_json(folder / MANIFEST_NAME, manifest)
    return manifest


def read_manifest(folder: Path | str, kind: str, *, verify: bool = True) -> dict[str, Any]:
    """Read a manifest and, with `verify`, check every file's size and SHA-256.

    Raises CheckpointError naming the folder and file: no manifest, other kind, newer major version, missing or changed file.
    """
    folder = Path(folder)
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise CheckpointError("no manifest.json, so the folder is incomplete", where=str(folder), remedy="write it again")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"not valid JSON ({error})", where=str(path), remedy="write the folder again") from None
    version = str(manifest.get("format_version", "0"))
    if manifest.get("kind") != kind:
        raise CheckpointError(f"holds a '{manifest.get('kind')}', expected a '{kind}'", where=str(path))
    if version.split(".")[0] != str(MAJOR):
        raise CheckpointError(
            f"format version {version} is not readable by this release (reads {MAJOR}.x)", where=str(path), remedy="update prism-ray"
        )
    if verify:
        for name, entry in manifest["files"].items():
            verify_file(folder / name, entry["bytes"], entry["sha256"])
    return manifest


def verify_file(path: Path, size_bytes: int, sha256: str) -> None:
    """Raise CheckpointError when `path` is missing, has another size, or another SHA-256."""
    if not path.is_file():
        raise CheckpointError("file is missing", where=str(path), remedy="copy or write it again")
    found = path.stat().st_size
    if found != size_bytes:
        raise CheckpointError(
            f"{found} bytes found, {size_bytes} expected: the file is truncated or changed",
            where=str(path),
            remedy="copy or write it again",
        )
    if sha256_file(path) != sha256:
        raise CheckpointError("SHA-256 differs from the manifest", where=str(path), remedy="copy or write it again")
