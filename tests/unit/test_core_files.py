"""prism_ray.core.files, digests, manifest: a killed or failing write leaves the old or the new, never a half; damage is named."""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from prism_ray.core.compute import compute_dtype
from prism_ray.core.digests import sha256_file, sha256_tensors, tensor_bytes
from prism_ray.core.errors import CheckpointError, ResourceError
from prism_ray.core.files import TEMPORARY_PREFIX, atomic_folder, atomic_path, require_disk, write_json
from prism_ray.core.manifest import MAJOR, MANIFEST_NAME, read_manifest, write_manifest
from prism_ray.core.progress import Progress

ROOT = Path(__file__).resolve().parents[2]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_atomic_path_replaces_and_makes_parents(tmp_path):
    target = tmp_path / "deep" / "er" / "file.json"
    for text in ("old", "new"):
        with atomic_path(target) as temporary:
            assert temporary.parent == target.parent and temporary.name.startswith(TEMPORARY_PREFIX) and temporary.suffix == ".json"
            temporary.write_text(text)
            assert not target.exists() or target.read_text() == "old"
        assert target.read_text() == text
    assert names(target.parent) == ["file.json"]


@pytest.mark.parametrize("existing", [True, False])
def test_atomic_path_under_an_exception_leaves_what_was_there(tmp_path, existing):
    target = tmp_path / "file"
    if existing:
        target.write_text("old")

    def write() -> None:
        with atomic_path(target) as temporary:
            temporary.write_text("half")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        write()
    assert names(tmp_path) == (["file"] if existing else [])
    assert not existing or target.read_text() == "old"


@pytest.mark.parametrize("existing", [True, False])
def test_atomic_folder_under_an_exception_leaves_what_was_there(tmp_path, existing):
    target = tmp_path / "out"
    if existing:
        target.mkdir()
        (target / "a").write_text("old")

    def write() -> None:
        with atomic_folder(target, replace=True) as temporary:
            (temporary / "a").write_text("half")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        write()
    assert names(tmp_path) == (["out"] if existing else [])
    assert not existing or (target / "a").read_text() == "old"


def test_atomic_folder_replaces_whole_and_only_on_request(tmp_path):
    target = tmp_path / "out"
    with atomic_folder(target) as temporary:
        (temporary / "sub").mkdir()
        (temporary / "sub" / "a").write_text("1")
        assert not target.exists()
    with pytest.raises(FileExistsError, match="out exists"), atomic_folder(target):
        pytest.fail("the body must not run")
    with atomic_folder(target, replace=True) as temporary:
        (temporary / "b").write_text("2")
        assert (target / "sub" / "a").read_text() == "1"
    assert names(tmp_path) == ["out"] and names(target) == ["b"]


def test_results_have_the_permissions_of_ordinary_files(tmp_path):
    (tmp_path / "plain").write_text("x")
    (tmp_path / "plain_folder").mkdir()
    with atomic_path(tmp_path / "file") as temporary:
        temporary.write_text("x")
    with atomic_folder(tmp_path / "folder"):
        pass
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == stat.S_IMODE((tmp_path / "plain_folder").stat().st_mode)


def killed(script: str, *arguments: str) -> None:
    """Run a script that dies with os._exit(9), as under SIGKILL: no finally block runs."""
    code = "import os, sys\nfrom pathlib import Path\nfrom prism_ray.core.files import atomic_folder, atomic_path\n" + script
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60, check=False
    )
    assert done.returncode == 9


def test_a_killed_write_leaves_the_old_file_and_folder(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").write_text("old")
    killed(
        """
root = Path(sys.argv[1])
with atomic_path(root / "file") as file, atomic_folder(root / "folder", replace=True) as folder, atomic_folder(root / "fresh") as fresh:
    file.write_text("half")
    (folder / "a").write_text("half")
    (fresh / "a").write_text("half")
    os._exit(9)
""",
        str(tmp_path),
    )
    assert (tmp_path / "file").read_text() == "old" and (tmp_path / "folder" / "a").read_text() == "old"
    assert not (tmp_path / "fresh").exists()
    # What is left over can be told from results by its name.
    assert [name for name in names(tmp_path) if not name.startswith(TEMPORARY_PREFIX)] == ["file", "folder"]


def test_write_json_is_sorted_and_refuses_what_is_no_json(tmp_path):
    write_json(tmp_path / "x.json", {"b": 1, "a": [1.5, None]})
    assert (tmp_path / "x.json").read_text() == '{\n  "a": [\n    1.5,\n    null\n  ],\n  "b": 1\n}\n'
    with pytest.raises(ValueError):
        write_json(tmp_path / "x.json", {"a": float("nan")})
    assert json.loads((tmp_path / "x.json").read_text())["b"] == 1 and names(tmp_path) == ["x.json"]


def test_disk_is_checked_with_the_arithmetic_in_the_message(tmp_path):
    require_disk(tmp_path / "not" / "there", 1, "a test")
    with pytest.raises(ResourceError, match=r"not enough disk for the plane: 1,073,741,824 MiB needed, [\d,]+ MiB free; free some space"):
        require_disk(tmp_path / "not" / "there", 1 << 50, "the plane")


def folder_with(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.bin").write_bytes(b"abc")
    (tmp_path / "sub" / "b.txt").write_text("xyz")
    write_manifest(tmp_path, "thing", extra=3)
    return tmp_path


def test_a_manifest_lists_every_file_with_size_and_hash(tmp_path):
    manifest = read_manifest(folder_with(tmp_path), "thing")
    assert manifest["files"] == {
        "a.bin": {"bytes": 3, "sha256": hashlib.sha256(b"abc").hexdigest()},
        "sub/b.txt": {"bytes": 3, "sha256": hashlib.sha256(b"xyz").hexdigest()},
    }
    assert (manifest["kind"], manifest["extra"], manifest["format_version"].split(".")[0]) == ("thing", 3, str(MAJOR))
    assert manifest["producer"].startswith("prism-ray ")


def test_every_kind_of_damage_is_named(tmp_path):
    folder = folder_with(tmp_path)
    path = folder / "a.bin"
    path.write_bytes(b"abd")
    with pytest.raises(CheckpointError, match=r"a\.bin: SHA-256 differs from the manifest"):
        read_manifest(folder, "thing")
    assert read_manifest(folder, "thing", verify=False)["extra"] == 3
    path.write_bytes(b"ab")
    with pytest.raises(CheckpointError, match=r"a\.bin: 2 bytes found, 3 expected"):
        read_manifest(folder, "thing")
    path.unlink()
    with pytest.raises(CheckpointError, match=r"a\.bin: file is missing"):
        read_manifest(folder, "thing")
    with pytest.raises(CheckpointError, match="holds a 'thing', expected a 'other'"):
        read_manifest(folder, "other")
    (folder / MANIFEST_NAME).write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_manifest(folder, "thing")
    (folder / MANIFEST_NAME).unlink()
    with pytest.raises(CheckpointError, match=r"no manifest\.json, so the folder is incomplete"):
        read_manifest(folder, "thing")


@pytest.mark.parametrize(("version", "readable"), [(f"{MAJOR}.0", True), (f"{MAJOR}.99", True), (f"{MAJOR + 1}.0", False), ("0.9", False)])
def test_another_major_version_is_refused(tmp_path, version, readable):
    folder = folder_with(tmp_path)
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    write_json(folder / MANIFEST_NAME, manifest | {"format_version": version})
    if readable:
        assert read_manifest(folder, "thing")["format_version"] == version
    else:
        with pytest.raises(CheckpointError, match=f"format version {version} is not readable by this release"):
            read_manifest(folder, "thing")


def test_file_and_tensor_digests(tmp_path):
    (tmp_path / "big").write_bytes(bytes(range(256)) * 10_000)
    assert sha256_file(tmp_path / "big") == hashlib.sha256(bytes(range(256)) * 10_000).hexdigest()
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    assert bytes(tensor_bytes(tensor)) == tensor.numpy().tobytes()
    assert bytes(tensor_bytes(tensor.T)) == tensor.T.contiguous().numpy().tobytes()
    assert bytes(tensor_bytes(torch.tensor([1.0], dtype=torch.bfloat16))) == b"\x80\x3f"
    assert bytes(tensor_bytes(torch.empty(0))) == b""
    named = {"a": tensor, "b": tensor.T}
    base = sha256_tensors(named.items())
    assert sha256_tensors(reversed(named.items())) == base
    others = [
        sha256_tensors(named.items(), "header"),
        sha256_tensors({"a": tensor, "c": tensor.T}.items()),
        sha256_tensors({"a": tensor.reshape(3, 2), "b": tensor.T}.items()),
        sha256_tensors({"a": tensor.view(torch.int32), "b": tensor.T}.items()),
        sha256_tensors({"a": tensor + 1, "b": tensor.T}.items()),
    ]
    assert len({base, *others}) == 6


def test_progress_prints_the_last_line_always_and_others_rarely():
    stream = io.StringIO()
    progress = Progress("train", 100, every_s=1e9, stream=stream)
    for done in range(1, 101):
        progress.update(done, loss=0.123456, state="ok")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2 and lines[0].startswith("train 1/100 (") and lines[1].startswith("train 100/100 (")
    assert lines[1].endswith("loss=0.1235 state=ok")


def test_compute_dtype():
    assert compute_dtype("float32") == torch.float32 and compute_dtype("bfloat16") == torch.bfloat16
    assert compute_dtype("auto", "cuda") == torch.bfloat16
    assert compute_dtype("auto") in (torch.float32, torch.bfloat16)
