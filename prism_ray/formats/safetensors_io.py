"""Safetensors shards: index files, and a header check that runs before any tensor is trusted.

A truncated copy has a valid header and missing bytes; the library's own message depends on its version and on the code path. `check_shard`
reads the header itself and names file, expected and found size (field case ADP-06). Format: 8-byte little-endian header length, JSON header,
then the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import operator
import struct
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from prism_ray.core.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100 << 20
METADATA = {"format": "pt"}


def check_shard(path: Path | str) -> dict[str, dict]:
    """Header of a safetensors file after checking it against the file's size; raises CheckpointError naming the file and both sizes."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError("file is missing", where=str(path), remedy="copy or write it again")
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(
                f"header length {length} is impossible for a file of {size} bytes",
                where=str(path),
                remedy="it is truncated or no safetensors file",
            )
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise CheckpointError("header is not JSON", where=str(path), remedy="it is damaged or no safetensors file") from None
    try:
        spans = sorted((*map(operator.index, entry["data_offsets"]), name) for name, entry in header.items() if name != "__metadata__")
        if any(len(span) != 3 for span in spans):
            raise ValueError
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CheckpointError("header is not a table of tensors", where=str(path), remedy="it is damaged or no safetensors file") from None
    end = 0
    for start, stop, name in spans:
        if start != end or stop < start:
            raise CheckpointError(f"tensor '{name}' starts at {start}, expected {end}", where=str(path), remedy="the file is damaged")
        end = stop
    if 8 + length + end != size:
        raise CheckpointError(
            f"{size} bytes found, {8 + length + end} expected: the file is truncated or has trailing bytes",
            where=str(path),
            remedy="copy or write it again",
        )
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def shard_map(folder: Path | str) -> dict[str, str]:
    """Tensor name -> file name of a checkpoint folder, after checking every shard's header. Raises CheckpointError naming what is missing."""
    folder = Path(folder)
    index = folder / INDEX_NAME
    if not index.is_file():
        return dict.fromkeys(check_shard(folder / SINGLE_NAME), SINGLE_NAME)
    try:
        weights: dict[str, str] = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError("not valid JSON with a weight_map", where=str(index), remedy="copy or write it again") from None
    headers = {file: check_shard(folder / file) for file in sorted(set(weights.values()))}
    for name, file in weights.items():
        if name not in headers[file]:
            raise CheckpointError(f"tensor '{name}' is not in the shard that the index names", where=str(folder / file))
    return weights


def read_tensors(folder: Path | str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every (name, tensor) of a checkpoint folder, shard by shard, memory-mapped."""
    weights = shard_map(folder)
    for file in sorted(set(weights.values())):
        with safe_open(Path(folder) / file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (a safe_open handle is not iterable)
                yield name, shard.get_tensor(name)


def write_shard(path: Path | str, tensors: dict[str, torch.Tensor]) -> None:
    """Write one safetensors file with the metadata that transformers expects; contiguous tensors only."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(path), metadata=METADATA)
