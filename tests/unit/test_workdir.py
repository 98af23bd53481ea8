"""What a job's package holds (field case RAY-04), without building 120 MB: sparse files have the size and take no room."""

from __future__ import annotations

from pathlib import Path

import pytest

from prism_ray.core.errors import ResourceError
from prism_ray.core.workdir import check_package, packed_files

ROOT = Path(__file__).resolve().parents[2]


def sparse(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.truncate(size)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    sparse(tmp_path / ".git" / "objects" / "pack.bin", 120 << 20)
    sparse(tmp_path / "weights" / "model.safetensors", 200 << 20)
    for number in range(500):
        (tmp_path / f"note-{number:03d}.txt").write_text("x" * 100)
    (tmp_path / "job.py").write_text("print(1)\n")
    return tmp_path


def test_without_ignore_files_the_package_is_refused_and_its_largest_entries_named(tree: Path):
    with pytest.raises(ResourceError) as caught:
        check_package(tree, 100 << 20)
    message = str(caught.value)
    assert "weights/model.safetensors (200.0 MiB), .git/objects/pack.bin (120.0 MiB)" in message
    assert "320.0 MiB in 503 files" in message or "320." in message
    assert "\n" not in message


def test_ignore_files_count_as_ray_counts_them(tree: Path):
    (tree / ".rayignore").write_text(".git/\n*.safetensors\n")
    (tree / "sub").mkdir()
    (tree / "sub" / ".gitignore").write_text("*.tmp\n")
    (tree / "sub" / "a.tmp").write_text("no")
    (tree / "a.tmp").write_text("yes")
    names = {name for name, _ in packed_files(tree)}
    assert "job.py" in names
    assert "a.tmp" in names
    assert "sub/a.tmp" not in names
    assert not any(name.startswith(".git/") or name.endswith(".safetensors") for name in names)
    table = check_package(tree, 1 << 20)
    assert len(table.splitlines()) == 11
    assert f"in {len(names)} files" in table.splitlines()[0]


def test_the_limit_is_the_last_size_that_passes(tmp_path: Path):
    sparse(tmp_path / "a", 1000)
    assert check_package(tmp_path, 1000)
    with pytest.raises(ResourceError):
        check_package(tmp_path, 999)


def test_this_repository_ships_excludes_that_keep_its_package_small():
    files = dict(packed_files(ROOT))
    assert "jobs/sweep_pqt.py" in files
    assert "tune_spaces/pqt.py" in files
    assert not any(name.startswith((".git/", ".venv/", "runs/")) for name in files)
    assert sum(files.values()) < 5 << 20
