"""Where a store's bytes are: one folder of a local disk, S3, GCS or memory, with the few operations that the store builds on.

| operation | local | s3, gs | memory |
|---|---|---|---|
| create: write unless there, atomically | temporary file, fsync, link(2) | conditional put (If-None-Match, ifGenerationMatch=0) | a lock of the process |
| put: write or replace, atomically | temporary file, fsync, rename(2) | put | same |

Everything that two writers could fight over goes through `create`; a backend that cannot do it is refused: another protocol by its name, an
S3-compatible server that ignores the condition by `require_exclusive_create`, which tries. gs:// has the operation in gcsfs; it is not tested here.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec

from prism_ray.core.errors import ConfigError, EnvironmentFault, PrismError, one_line
from prism_ray.core.files import TEMPORARY_PREFIX, atomic_path

_LOCAL, _REMOTE, _MEMORY = ("file", "local"), ("s3", "s3a", "gs", "gcs"), ("memory",)
_MEMORY_LOCK = threading.Lock()
_BUSY_TRIES = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored file: bytes, and when it was last written by the storage's own clock (seconds since 1970)."""

    size: int
    modified: float


class Backend:
    """The operations, on one fsspec URL. Paths are relative to it, with `/`, and made of checked names only."""

    def __init__(self, url: str | Path, storage_options: Mapping[str, Any] | None = None):
        self.url = str(url)
        options = dict(storage_options or {})
        place = self.url if "://" in self.url else str(Path(self.url).expanduser().absolute())
        if place.startswith(("s3://", "s3a://")):
            # A cached listing would hide what another process has just written.
            options.setdefault("use_listings_cache", False)
        try:
            self.fs, root = fsspec.url_to_fs(place, **options)
        except ImportError as error:
            extra = "s3" if place.startswith("s3") else "gcsfs"
            remedy = "pip install 'prism-ray[s3]'" if extra == "s3" else f"pip install {extra}"
            raise EnvironmentFault(one_line(error), where=self.url, remedy=remedy) from None
        except (ValueError, TypeError) as error:
            raise ConfigError(one_line(error), where=self.url, remedy="give a folder, or an s3://, gs:// or memory:// URL") from None
        protocols = (self.fs.protocol,) if isinstance(self.fs.protocol, str) else tuple(self.fs.protocol)
        if not set(protocols) & {*_LOCAL, *_REMOTE, *_MEMORY}:
            raise ConfigError(
                f"{protocols[0]} storage has no exclusive create, so two writers could lose a version",
                where=self.url,
                remedy="use a folder, s3://, gs:// or memory://",
            )
        self.local = bool(set(protocols) & set(_LOCAL))
        self.memory = bool(set(protocols) & set(_MEMORY))
        self.root = root.rstrip("/")
        self._proved = not set(protocols) & set(_REMOTE)

    def path(self, relative: str) -> str:
        """The full path of a relative one, for fsspec and for messages."""
        return f"{self.root}/{relative}" if relative else self.root

    @contextmanager
    def _reported(self, relative: str, *, writing: bool = False) -> Iterator[None]:
        """Turn what a storage library raises into one line; whether a file that is read is there or not is for the caller."""
        try:
            yield
        except FileNotFoundError as error:
            if not writing:
                raise
            raise EnvironmentFault(
                f"there is no such place ({one_line(error)})", where=self.url, remedy="make the bucket or folder first"
            ) from None
        except (PrismError, FileExistsError):
            raise
        except Exception as error:  # noqa: BLE001 (no credentials, no connection: client libraries have classes of their own for these)
            raise EnvironmentFault(
                f"storage failed ({type(error).__name__}: {one_line(error)})",
                where=f"{self.url}: {relative}",
                remedy="check the URL, the credentials and the network",
            ) from None

    def create(self, relative: str, data: bytes) -> bool:
        """Write a new file; False, and nothing written, when there is one already. `data` must be unique to this call (it holds a nonce)."""
        with self._reported(relative, writing=True):
            if self.local:
                return _link_new(Path(self.path(relative)), data)
            if self.memory:
                with _MEMORY_LOCK:
                    if self.fs.exists(self.path(relative)):
                        return False
                    self.fs.pipe_file(self.path(relative), data)
                    return True
            return self._create_remote(relative, data)

    def _create_remote(self, relative: str, data: bytes) -> bool:
        for attempt in range(_BUSY_TRIES):
            try:
                self.fs.pipe_file(self.path(relative), data, mode="create")
                return True
            except FileExistsError:
                # A put whose answer was lost is repeated by the client and then meets itself.
                return bool(self.fs.cat_file(self.path(relative)) == data)
            except OSError as error:
                # 409: two conditional puts at the same moment; S3 asks for another try.
                if error.errno != errno.EBUSY or attempt == _BUSY_TRIES - 1:
                    raise
                time.sleep(0.05 * 2**attempt)
        return False

    def require_exclusive_create(self) -> None:
        """Raise EnvironmentFault for a server that writes over what `create` should have left alone; asked once per object."""
        if self._proved:
            return
        probe = f"probe/{secrets.token_hex(16)}"
        try:
            exclusive = self.create(probe, b"1") and not self.create(probe, b"2")
        finally:
            self.delete(probe)
        if not exclusive:
            raise EnvironmentFault(
                "the server ignores conditional writes, so two writers could lose a version",
                where=self.url,
                remedy="use a server that keeps If-None-Match",
            )
        self._proved = True

    def put(self, relative: str, source: Path | bytes) -> None:
        """Write or replace a file, whole or not at all."""
        with self._reported(relative, writing=True):
            if self.local:
                with atomic_path(self.path(relative)) as temporary:
                    if isinstance(source, bytes):
                        temporary.write_bytes(source)
                    else:
                        shutil.copyfile(source, temporary)
            elif isinstance(source, bytes) or self.memory:
                self.fs.pipe_file(self.path(relative), source if isinstance(source, bytes) else source.read_bytes())
            else:
                self.fs.put_file(str(source), self.path(relative))

    def read(self, relative: str) -> bytes:
        """A file's bytes; FileNotFoundError where there is none."""
        with self._reported(relative):
            return bytes(self.fs.cat_file(self.path(relative)))

    def fetch(self, relative: str, destination: Path) -> None:
        """Copy a file to a local path; FileNotFoundError where there is none."""
        with self._reported(relative):
            self.fs.get_file(self.path(relative), str(destination))

    def names(self, relative: str) -> list[str]:
        """Names of the files and folders right below a folder, sorted; none where there is no such folder."""
        with self._reported(relative):
            try:
                found = self.fs.ls(self.path(relative), detail=False, **({"refresh": True} if not (self.local or self.memory) else {}))
            except (FileNotFoundError, NotADirectoryError):
                return []
        names = {path.rstrip("/").rsplit("/", 1)[-1] for path in found}
        return sorted(name for name in names if not name.startswith(TEMPORARY_PREFIX))

    def files(self, relative: str) -> dict[str, Entry]:
        """Every file below a folder, temporaries too: path relative to the store -> Entry."""
        with self._reported(relative):
            try:
                found = self.fs.find(self.path(relative), detail=True)
            except FileNotFoundError:
                return {}
        return {path[len(self.root) + 1 :]: _entry(info) for path, info in found.items()}

    def entry(self, relative: str) -> Entry | None:
        """Size and time of one file, None where there is none."""
        with self._reported(relative):
            try:
                return _entry(self.fs.info(self.path(relative)))
            except FileNotFoundError:
                return None

    def delete(self, relative: str) -> None:
        """Remove a file; one that is gone already is fine."""
        with self._reported(relative):
            try:
                self.fs.rm_file(self.path(relative))
            except FileNotFoundError:
                return


def _entry(info: Mapping[str, Any]) -> Entry:
    """Size and time from fsspec's info: `mtime` (local: seconds), `LastModified` (S3), `updated` (GCS: text), `created` (memory)."""
    when = next((info[key] for key in ("mtime", "LastModified", "updated", "created") if info.get(key) is not None), None)
    if isinstance(when, str):
        when = datetime.fromisoformat(when)
    if isinstance(when, datetime):
        when = (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    return Entry(int(info.get("size") or 0), float(when or 0.0))


def _link_new(destination: Path, data: bytes) -> bool:
    """Create a file whole: a link to a synced temporary either appears under a free name or fails."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = destination.parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, destination)
        except FileExistsError:
            return False
        except OSError as error:
            raise EnvironmentFault(
                f"the file system has no hard links ({error.strerror}), which exclusive create needs",
                where=str(destination.parent),
                remedy="put the store on another file system",
            ) from None
        handle = os.open(destination.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        return True
    finally:
        temporary.unlink(missing_ok=True)
