"""The size of a Ray job's working directory, counted as Ray packs it: everything that no .gitignore or .rayignore excludes.

Ray fails late, with an HTTP error, when a package is too large, and `.git` is in no ignore file of most repositories (field case RAY-04).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pathspec

from prism_ray.core.errors import ResourceError

IGNORE_FILES = (".gitignore", ".rayignore")
LARGEST = 10


def packed_files(folder: Path | str) -> Iterator[tuple[str, int]]:
    """(relative path, bytes) of every file that would be packed; nested ignore files count from their own folder."""
    root = Path(folder).resolve()
    rules: list[tuple[Path, pathspec.GitIgnoreSpec]] = []
    for current, folders, files in os.walk(root):
        here = Path(current)
        for name in IGNORE_FILES:
            if name in files:
                rules.append((here, pathspec.GitIgnoreSpec.from_lines((here / name).read_text().splitlines())))

        def ignored(path: Path, is_folder: bool) -> bool:
            suffix = "/" if is_folder else ""
            return any(path.is_relative_to(base) and spec.match_file(f"{path.relative_to(base)}{suffix}") for base, spec in rules)

        folders[:] = sorted(name for name in folders if not ignored(here / name, True))
        for name in sorted(files):
            path = here / name
            if not path.is_symlink() and not ignored(path, False):
                yield str(path.relative_to(root)), path.stat().st_size


def check_package(folder: Path | str, limit_bytes: int) -> str:
    """A table of total size and the ten largest entries; raises ResourceError, with them, above the limit."""
    files = sorted(packed_files(folder), key=lambda item: (-item[1], item[0]))
    total = sum(size for _, size in files)
    rows = [f"{size / 2**20:9.2f} MiB  {name}" for name, size in files[:LARGEST]]
    if total > limit_bytes:
        named = ", ".join(f"{name} ({size / 2**20:.1f} MiB)" for name, size in files[:LARGEST])
        raise ResourceError(
            f"the package has {total / 2**20:.1f} MiB in {len(files)} files, the limit is {limit_bytes / 2**20:.1f} MiB; largest: {named}",
            where=str(folder),
            remedy="name them in .rayignore, and give models and data as URIs",
        )
    return "\n".join([f"{total / 2**20:.2f} MiB in {len(files)} files, limit {limit_bytes / 2**20:.0f} MiB; the largest:", *rows])
