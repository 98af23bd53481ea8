"""Atomic files and folders, disk checks, locks.

Outputs are written under a temporary name beside their destination, synced, and renamed: a killed run leaves either the old file or the
new one. Names of temporaries start with `.tmp-`, so that a listing can tell them from results.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prism_ray.core.errors import ResourceError

TEMPORARY_PREFIX = ".tmp-"


@contextmanager
def atomic_path(destination: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside `destination`; on success fsync and rename it there, on error remove it."""
    destination = Path(destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, suffix=destination.suffix, dir=destination.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        # mkstemp makes 0600 files; results are for the user's whole team, as open() would have made them.
        os.chmod(temporary, 0o666 & ~_umask())
        yield temporary
        _sync(temporary)
        os.replace(temporary, destination)
        _sync(destination.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(destination: Path | str, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside `destination`; on success sync and rename it there, on error remove it.

    replace: an existing destination is moved away and deleted after the rename; without it an existing one raises FileExistsError.
    """
    destination = Path(destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    if destination.exists() and not replace:
        raise FileExistsError(f"{destination} exists")
    temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=destination.parent))
    old: Path | None = None
    try:
        os.chmod(temporary, 0o777 & ~_umask())
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                _sync(file)
        if destination.exists():
            old = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=destination.parent)) / "old"
            os.replace(destination, old)
        os.replace(temporary, destination)
        _sync(destination.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if old is not None:
            shutil.rmtree(old.parent, ignore_errors=True)


def write_json(path: Path | str, value: Any) -> None:
    """Write sorted, indented JSON atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")


def require_disk(folder: Path | str, needed_bytes: int, purpose: str) -> None:
    """Raise ResourceError, before anything is written, when the file system of `folder` has less than `needed_bytes` free."""
    folder = Path(folder).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise ResourceError(
            f"not enough disk for {purpose}: {needed_bytes / 2**20:,.0f} MiB needed, {free / 2**20:,.0f} MiB free",
            where=str(folder),
            remedy="free some space or choose another folder",
        )


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
