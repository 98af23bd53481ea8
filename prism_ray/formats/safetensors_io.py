"""Safetensors shards: index files, and a header check that runs before any tensor is trusted.

A truncated copy has a valid header and missing bytes; the library's own message depends on its version and on the code path (field case ADP-06).
A safetensors file is 8 bytes little-endian header length N, N bytes of JSON ({name: {dtype, shape, data_offsets: [begin, end]}}), then the
data. `check_safetensors` reads only the headers: N within the file, offsets inside the data, contiguous and without gaps from 0, each as
long as its dtype and shape say, the last one ending where the file ends; an index must name shards that exist and hold its tensors.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from prism_ray.core.errors import CheckpointError, ModelError, one_line

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# The safetensors library's own limit; a larger length is a damaged file, not a large header.
MAX_HEADER_BYTES = 100_000_000
REWRITE = "copy or download it again"
METADATA = {"format": "pt"}
SHARD_BYTES = 4 << 30

_DTYPE_BITS = {
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


def check_safetensors(path: Path | str) -> list[Path]:
    """Check the headers of a model folder's shards, of an index's shards, or of one safetensors file; returns the files checked.

    Reads headers only, so it costs milliseconds for any size. In a folder `model.safetensors` comes before the index, as in transformers.
    Raises CheckpointError naming the file and what is wrong with it, ModelError for a folder without safetensors weights.
    """
    path = Path(path)
    if path.is_dir():
        single, index = path / SINGLE_NAME, path / INDEX_NAME
        if not single.is_file() and not index.is_file():
            pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
            found = f" (only {pickled[0]}, and pickled weights are not loaded)" if pickled else ""
            raise ModelError(f"the folder holds no {SINGLE_NAME} and no {INDEX_NAME}{found}", where=str(path), remedy=REWRITE)
        path = single if single.is_file() else index
    if path.name.endswith(".json"):
        return _check_index(path)
    read_safetensors_header(path)
    return [path]


def _check_index(index: Path) -> list[Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards: dict[str, list[str]] = {}
        for tensor, shard in weight_map.items():
            if not isinstance(shard, str):
                raise TypeError(f"the shard of '{tensor}' is no text")
            shards.setdefault(shard, []).append(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"is no index of safetensors shards ({one_line(error)})", where=str(index), remedy=REWRITE) from None
    for shard, tensors in sorted(shards.items()):
        if Path(shard).name != shard:
            raise CheckpointError(f"names the shard '{shard}', which is no file name of this folder", where=str(index), remedy=REWRITE)
        if not (index.parent / shard).is_file():
            raise CheckpointError(f"names the shard '{shard}', which is not there", where=str(index), remedy="download the missing shard")
        absent = sorted(set(tensors) - read_safetensors_header(index.parent / shard).keys())
        if absent:
            raise CheckpointError(f"says that {shard} holds '{absent[0]}', which it does not", where=str(index), remedy=REWRITE)
    return [index.parent / shard for shard in sorted(shards)]


def read_safetensors_header(path: Path) -> dict[str, dict[str, Any]]:
    """The tensors of one safetensors file, {name: {dtype, shape, data_offsets}}, after checking them against the file's size."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise _damaged(path, f"{size} bytes found, a header of {length} bytes announced")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})", where=str(path), remedy=REWRITE) from None
    try:
        header = json.loads(text)
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        spans = sorted((*_span(entry), name) for name, entry in tensors.items())
        sizes = {name: _bits(entry) for name, entry in tensors.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _damaged(path, f"its header is no table of tensors ({one_line(error)})") from None
    _check_spans(path, spans, sizes, size - 8 - length)
    return tensors


def _check_spans(path: Path, spans: list[tuple[int, int, str]], sizes: dict[str, int | None], data_bytes: int) -> None:
    """Spans of tensors, sorted by begin, must tile [0, data_bytes) and have the sizes of their dtype and shape."""
    position = 0
    for begin, end, name in spans:
        if begin != position:
            fault = "overlaps the tensor before it" if begin < position else "leaves a gap before it"
            raise _damaged(path, f"tensor '{name}' {fault} (begins at {begin}, expected {position})")
        if end < begin:
            raise _damaged(path, f"tensor '{name}' ends at {end}, before it begins at {begin}")
        bits = sizes[name]
        if bits is not None and bits != 8 * (end - begin):
            raise _damaged(path, f"tensor '{name}' occupies {end - begin} bytes, its dtype and shape say {bits / 8:g}")
        position = end
    if position != data_bytes:
        fault = "the file is truncated" if position > data_bytes else "bytes follow the last tensor"
        raise _damaged(path, f"{data_bytes} bytes of data found, its header describes {position}: {fault}")


def _span(entry: dict[str, Any]) -> tuple[int, int]:
    begin, end = entry["data_offsets"]
    return int(begin), int(end)


def _bits(entry: dict[str, Any]) -> int | None:
    """Bits of one tensor, or None for a dtype newer than this table, whose size is then left to the safetensors library."""
    shape = [int(length) for length in entry["shape"]]
    if any(length < 0 for length in shape):
        raise ValueError("negative length in a shape")
    width = _DTYPE_BITS.get(entry["dtype"])
    return None if width is None else width * math.prod(shape)


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(what, where=str(path), remedy=REWRITE)


def shard_map(folder: Path | str) -> dict[str, str]:
    """Tensor name -> file name of a checkpoint folder, after `check_safetensors`."""
    return {name: file.name for file in check_safetensors(folder) for name in read_safetensors_header(file)}


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


def write_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors in name order as shards of at most SHARD_BYTES with an index, or as one file where one is enough."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name in sorted(tensors):
        bytes_ = tensors[name].numel() * tensors[name].element_size()
        if shards[-1] and size + bytes_ > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensors[name]
        size += bytes_
    if len(shards) == 1:
        write_shard(folder / SINGLE_NAME, shards[0])
        return
    names = [f"model-{position + 1:05d}-of-{len(shards):05d}.safetensors" for position in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        write_shard(folder / name, shard)
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True))
