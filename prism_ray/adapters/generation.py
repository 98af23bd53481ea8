"""Replace a checkpoint folder by an edited one, as a whole and at once: a kill at any point leaves the old folder or the new one, never a mixture.

    work   .tmp-work-NAME    being written; worth nothing
    next   .tmp-next-NAME    complete and synced
    last   .tmp-last-NAME    what was replaced

`next` and the folder change places by `renameat2(RENAME_EXCHANGE)`, one step of the kernel. Where a file system has no exchange (NFS), the folder is renamed to
`last` and `next` to the folder: between the two there is no folder, and `recover` puts `next` there. All lie beside the folder, so its parent must be writable.

Unchanged files are hard links, so a generation costs the changed shards only; a shard is copied and only the named tensors' bytes are overwritten, so
its header and every other byte stay by construction. Files that others have open or mapped stay as they were for them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from prism_ray.core.digests import tensor_bytes
from prism_ray.core.errors import CheckpointError, ModelError, ResourceError
from prism_ray.core.files import TEMPORARY_PREFIX, require_disk
from prism_ray.formats.safetensors_io import read_safetensors_header, shard_map

AT_FDCWD, RENAME_EXCHANGE = -100, 2
LOCK_SECONDS = 10.0
Step = Callable[[str], None]


def ignore_step(step: str) -> None:
    """A `Step` for callers that do not follow the progress."""


@contextmanager
def locked(folder: Path | str) -> Iterator[Path]:
    """The resolved folder, recovered, with no other apply or rollback at work on it. Raises ModelError where there is none, ResourceError when it is busy."""
    path = Path(folder).resolve()
    try:
        if not path.is_dir() and not _beside(path, "next").exists():
            raise ModelError("is no folder", where=str(folder), remedy="give a checkpoint folder")
        with FileLock(_beside(path, "lock"), timeout=LOCK_SECONDS):
            _recover(path)
            yield path
    except Timeout:
        raise ResourceError("another apply or rollback is at work", where=str(folder), remedy="wait for it") from None
    except OSError as error:
        raise ResourceError(
            f"cannot be changed ({error.strerror or error})", where=str(folder), remedy="its parent folder must be writable"
        ) from None


def recover(folder: Path | str) -> None:
    """Finish or clean up after an apply or rollback that was killed; does nothing where there was none."""
    path = Path(folder).resolve()
    if any(_beside(path, kind).exists() for kind in ("work", "next", "last")):
        with locked(path):
            pass


@contextmanager
def next_generation(folder: Path, step: Step = ignore_step) -> Iterator[Path]:
    """Yield an empty folder to fill with the new content; on success it takes the place of `folder`, on error it is removed. Only within `locked`."""
    work, ready, last = (_beside(folder, kind) for kind in ("work", "next", "last"))
    try:
        work.mkdir()
        shutil.copymode(folder, work)
        yield work
        _sync_tree(work)
        os.rename(work, ready)
        _sync(folder.parent)
        step("ready")
        if not _exchange(ready, folder):
            os.rename(folder, last)
            step("between")
            os.rename(ready, folder)
        _sync(folder.parent)
        step("switched")
    finally:
        # Both renames of the fallback may be behind us or none; a folder that is missing here is for `_recover`.
        _recover(folder)
    step("cleaned")


def stage(folder: Path, work: Path, tensors: Mapping[str, torch.Tensor], skip: frozenset[str], step: Step = ignore_step) -> list[str]:
    """Fill `work` from `folder`: `tensors` (checkpoint name -> bytes) overwritten, everything else linked. skip: top-level names to leave out.

    Returns the shards that were written.
    """
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, file in shard_map(folder).items():
        if name in tensors:
            shards.setdefault(file, {})[name] = tensors[name]
    require_disk(folder.parent, int(1.05 * sum((folder / file).stat().st_size for file in shards)), "the changed shards")
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if relative.parts[0] in skip:
            continue
        target = work / relative
        if str(relative) in shards:
            _patched_copy(path, target, shards[str(relative)])
            step(f"shard {relative}")
        elif path.is_symlink():
            os.symlink(os.readlink(path), target)
        elif path.is_dir():
            target.mkdir()
        else:
            _link(path, target)
    step("linked")
    return sorted(shards)


def _patched_copy(source: Path, target: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    shutil.copyfile(source, target)
    shutil.copymode(source, target)
    header = read_safetensors_header(target)
    with open(target, "r+b") as file:
        data_start = 8 + int.from_bytes(file.read(8), "little")
        for name, tensor in tensors.items():
            begin, end = header[name]["data_offsets"]
            data = tensor_bytes(tensor)
            if len(data) != end - begin:
                raise CheckpointError(f"'{name}' holds {end - begin} bytes, {len(data)} were to be written", where=str(source))
            file.seek(data_start + begin)
            file.write(data)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.EXDEV):
            raise
        shutil.copy2(source, target)


def _recover(folder: Path) -> None:
    work, ready, last = (_beside(folder, kind) for kind in ("work", "next", "last"))
    if not folder.exists() and ready.exists():
        os.rename(ready, folder)
        _sync(folder.parent)
    if folder.exists():
        for path in (work, ready, last):
            shutil.rmtree(path, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change names in one step; False where the kernel or the file system cannot."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    if function(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def _beside(folder: Path, kind: str) -> Path:
    return folder.parent / f"{TEMPORARY_PREFIX}{kind}-{folder.name}"


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        # A linked file is the old folder's own, on disk already.
        if not path.is_symlink() and (path.is_dir() or path.stat().st_nlink == 1):
            _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
