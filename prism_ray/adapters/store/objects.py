"""Content-addressed blobs: `objects/sha256/ab/cdef...`, named by the SHA-256 of their bytes, and verified against it whenever they are read.

Writing is idempotent: two writers of the same bytes write the same file. An object that is there already is written again, which renews its time for
the collector (`gc`) and heals a damaged copy. A corrupted object is an error that names it; nothing of it is used.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from prism_ray.adapters.store.backend import Backend
from prism_ray.adapters.store.ids import require_digest
from prism_ray.core.digests import sha256_file
from prism_ray.core.errors import CheckpointError
from prism_ray.core.files import atomic_path

FOLDER = "objects/sha256"


def object_path(digest: str) -> str:
    """Path of an object in the store. Raises ConfigError for what is no SHA-256."""
    require_digest(digest, "object")
    return f"{FOLDER}/{digest[:2]}/{digest[2:]}"


def digest_of(path: str) -> str | None:
    """The SHA-256 that a path below `objects/` is named by, None for anything else, such as a temporary of an interrupted write."""
    digest = path.removeprefix(FOLDER).replace("/", "")
    return digest if len(digest) == 64 and set(digest) <= set("0123456789abcdef") else None


class Objects:
    """The blobs of one store, with an optional local read cache of the same layout."""

    def __init__(self, backend: Backend, cache: Path | None = None):
        self.backend, self.cache = backend, cache

    def put(self, digest: str, source: Path | bytes) -> None:
        """Write an object. Raises CheckpointError when `source` is not what `digest` says, as after a change between check and copy."""
        found = hashlib.sha256(source).hexdigest() if isinstance(source, bytes) else sha256_file(source)
        if found != digest:
            where = "bytes" if isinstance(source, bytes) else str(source)
            raise CheckpointError("changed while it was being published", where=where, remedy="publish a folder that nobody writes to")
        self.backend.put(object_path(digest), source)

    def present(self, digest: str) -> bool:
        """Whether the object is there; its bytes are verified by reading it."""
        return self.backend.entry(object_path(digest)) is not None

    def read(self, digest: str, what: str) -> bytes:
        """The bytes of an object. what: what it is part of, for the message. Raises CheckpointError when it is missing or corrupted."""
        cached = self._cached(digest)
        if cached is not None:
            return cached.read_bytes()
        try:
            data = self.backend.read(object_path(digest))
        except FileNotFoundError:
            raise self._missing(digest, what) from None
        if hashlib.sha256(data).hexdigest() != digest:
            raise self._corrupted(digest, what)
        if self.cache is not None:
            with atomic_path(self.cache / object_path(digest)) as temporary:
                temporary.write_bytes(data)
        return data

    def fetch(self, digest: str, destination: Path, what: str) -> None:
        """Copy an object to a local path, which appears only once the bytes are verified. Raises CheckpointError as `read`."""
        target = destination if self.cache is None else self.cache / object_path(digest)
        if self._cached(digest) is None:
            with atomic_path(target) as temporary:
                try:
                    self.backend.fetch(object_path(digest), temporary)
                except FileNotFoundError:
                    raise self._missing(digest, what) from None
                if sha256_file(temporary) != digest:
                    raise self._corrupted(digest, what)
        if target != destination:
            with atomic_path(destination) as temporary:
                shutil.copyfile(target, temporary)

    def _cached(self, digest: str) -> Path | None:
        """The cached copy, verified; a damaged one is dropped and read from the store again."""
        if self.cache is None:
            return None
        path = self.cache / object_path(digest)
        if not path.is_file():
            return None
        if sha256_file(path) == digest:
            return path
        path.unlink(missing_ok=True)
        return None

    def _missing(self, digest: str, what: str) -> CheckpointError:
        return CheckpointError(f"object {digest[:12]} of {what} is missing", where=self.backend.url, remedy="publish it again")

    def _corrupted(self, digest: str, what: str) -> CheckpointError:
        return CheckpointError(
            f"object {digest[:12]} of {what} is corrupted: its bytes have another SHA-256",
            where=f"{self.backend.url}: {object_path(digest)}",
            remedy="publish the same folder again, which writes it anew",
        )
