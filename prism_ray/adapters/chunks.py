"""Deduplication by chunks of about 64 KiB: how many bytes a store that knows nothing of planes would keep (scale-qlora B.4).

| method | a chunk ends |
|---|---|
| fixed | every 64 KiB from the start of each file |
| content | where the gear hash of the last 32 bytes has 16 zero bits, at least 16 KiB and at most 256 KiB after the last end |

gear(i) = sum over k < 32 of G[byte(i - k)] * 2^k mod 2^32, with G a fixed table of 256 random words. Content-defined ends move with the bytes, so an
insertion does not shift all chunks behind it; fixed ones suit files whose layout stays, as merged checkpoints' does.

The measure only: the store itself keeps planes and patches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

Method = Literal["fixed", "content"]
CHUNK_BYTES = 64 << 10
LEAST_BYTES, MOST_BYTES = CHUNK_BYTES // 4, CHUNK_BYTES * 4
WINDOW = 32
_MASK = np.uint32((CHUNK_BYTES - 1) << 16)
_READ_BYTES = 8 << 20
_GEAR = np.frombuffer(hashlib.shake_256(b"prism-ray gear table").digest(1024), dtype="<u4").astype(np.uint32)


@dataclass(frozen=True, kw_only=True)
class Deduplicated:
    """bytes, chunks: of all files; unique_bytes, unique_chunks: of those that no file before them had."""

    bytes: int
    unique_bytes: int
    chunks: int
    unique_chunks: int


class ChunkIndex:
    """The chunks that a store holds; files are added one after another."""

    def __init__(self, method: Method = "fixed"):
        self.method: Method = method
        self.known: set[bytes] = set()

    def add(self, files: Iterable[Path]) -> Deduplicated:
        """Add files; what they hold, and what of it was new."""
        total = unique = chunks = fresh = 0
        for path in files:
            for chunk in chunks_of(path, self.method):
                digest = hashlib.sha256(chunk).digest()
                total, chunks = total + len(chunk), chunks + 1
                if digest not in self.known:
                    self.known.add(digest)
                    unique, fresh = unique + len(chunk), fresh + 1
        return Deduplicated(bytes=total, unique_bytes=unique, chunks=chunks, unique_chunks=fresh)


def chunks_of(path: Path, method: Method = "fixed") -> Iterator[bytes]:
    """The chunks of a file in order; together they are the file."""
    if method == "fixed":
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
        return
    yield from _content_chunks(path)


def _content_chunks(path: Path) -> Iterator[bytes]:
    pending = b""  # bytes since the last end; what was read before them does not matter to a hash of 32 bytes after 16 KiB
    with open(path, "rb") as file:
        while True:
            block = file.read(_READ_BYTES)
            pending += block
            begin = 0
            ends = _candidates(np.frombuffer(pending, np.uint8))
            position = 0
            while True:
                # The first candidate that leaves at least LEAST_BYTES.
                position = int(np.searchsorted(ends, begin + LEAST_BYTES))
                end = min(int(ends[position]), begin + MOST_BYTES) if position < len(ends) else begin + MOST_BYTES
                if end > len(pending):
                    break
                yield pending[begin:end]
                begin = end
            pending = pending[begin:]
            if not block:
                if pending:
                    yield pending
                return


def _candidates(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Ends (exclusive) of the windows whose hash has the mask's bits zero."""
    if len(data) < WINDOW:
        return np.empty(0, np.int64)
    # Doubling: the sum over 2m bytes is that over the last m plus that over the m before them, shifted by m.
    sums = _GEAR[data]
    width = 1
    while width < WINDOW:
        shifted = sums.copy()
        shifted[width:] += sums[:-width] << np.uint32(width)
        sums, width = shifted, 2 * width
    return np.flatnonzero((sums & _MASK) == 0) + 1
