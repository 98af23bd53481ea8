"""SHA-256 of files, bytes and tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch

CHUNK_BYTES = 1 << 20


def sha256_file(path: Path | str) -> str:
    """Hex SHA-256 of a file, read in chunks."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The raw little-endian bytes of a tensor in row-major order, without a copy where it is contiguous and on the CPU."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy() if flat.numel() else b"")  # type: ignore[arg-type]


def sha256_tensors(named: Iterable[tuple[str, torch.Tensor]], header: str = "") -> str:
    """Hex SHA-256 over header, then (name, dtype, shape, bytes) of each tensor in sorted name order."""
    digest = hashlib.sha256(header.encode())
    for name, tensor in sorted(named, key=lambda item: item[0]):
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()
