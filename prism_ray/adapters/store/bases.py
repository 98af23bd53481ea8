"""Base checkpoints in the store: `bases/<code plane>/<scale plane>.json`, by the fingerprints that adapters name in their manifests.

A safetensors shard is kept as four objects, so that checkpoints that differ in their scales alone share all the rest:

    header | bytes of all `weight_packed` tensors | of all `weight_scale` tensors | of all others      each in the order of the file

The header says where every span belongs, so joining gives back the shard byte for byte. The other files of the folder are kept whole. Bases have no
owner: every tenant's adapters refer to them. A base record is created once and never changed; the collector keeps what it names.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from prism_ray.adapters.folder import inside
from prism_ray.adapters.store.backend import Backend
from prism_ray.adapters.store.ids import require_digest
from prism_ray.adapters.store.objects import Objects
from prism_ray.adapters.store.records import decode_record, encode_record
from prism_ray.core.digests import CHUNK_BYTES, sha256_file
from prism_ray.core.errors import CheckpointError, FingerprintMismatch
from prism_ray.core.files import atomic_folder
from prism_ray.core.manifest import MANIFEST_NAME, read_manifest, verify_file
from prism_ray.formats import compressed_tensors as convention
from prism_ray.formats.checkpoint import KIND, read_quantized
from prism_ray.formats.config_groups import format_of_config, formats_of_modules
from prism_ray.formats.safetensors_io import read_safetensors_header, shard_map
from prism_ray.formats.tensor import QuantTensor, code_plane_fingerprint, scale_plane_fingerprint

PARTS = ("header", "codes", "scales", "rest")


@dataclass(frozen=True, kw_only=True)
class Base:
    """A stored checkpoint. files: name -> {sha256, bytes} and either `object` or, for a shard, `parts` {part: {object, bytes}}."""

    code_plane: str
    scale_plane: str
    format: str
    source: str
    files: dict[str, dict[str, Any]]

    @property
    def objects(self) -> set[str]:
        """Digests of all objects of the base."""
        return {digest for entry in self.files.values() for digest in objects_of(entry)}


def objects_of(entry: Mapping[str, Any]) -> set[str]:
    """Digests of the objects that one file is kept as."""
    return {part["object"] for part in entry["parts"].values()} if "parts" in entry else {entry["object"]}


def record_path(code_plane: str, scale_plane: str) -> str:
    """Path of a base's record; ConfigError for what are no fingerprints."""
    return f"bases/{require_digest(code_plane, 'code plane')}/{require_digest(scale_plane, 'scale plane')}.json"


def read_base(backend: Backend, code_plane: str, scale_plane: str) -> Base | None:
    """The base with these fingerprints, None where the store has none. Raises CheckpointError for a corrupted record."""
    path = record_path(code_plane, scale_plane)
    where = f"{backend.url}: {path}"
    try:
        fields = decode_record(backend.read(path), where)
    except FileNotFoundError:
        return None
    base = Base(**{key: fields[key] for key in Base.__dataclass_fields__})
    if (base.code_plane, base.scale_plane) != (code_plane, scale_plane):
        raise CheckpointError("is the record of another base", where=where, remedy="restore it from a backup of the store")
    return base


def list_bases(backend: Backend) -> list[Base]:
    """Every base of the store."""
    found = []
    for code_plane in backend.names("bases"):
        for name in backend.names(f"bases/{code_plane}"):
            base = read_base(backend, code_plane, name.removesuffix(".json"))
            if base is not None:
                found.append(base)
    return found


def write_record(backend: Backend, base: Base) -> None:
    """Create the record; one that another writer has just created says the same."""
    backend.create(record_path(base.code_plane, base.scale_plane), encode_record(asdict(base)))


def split_base(folder: Path, parts: Path) -> tuple[Base, dict[str, Path]]:
    """(record, object digest -> local file) of a checkpoint folder; the parts of shards are written below `parts`.

    Raises CheckpointError for a folder that contradicts its manifest, FingerprintMismatch where the manifest's fingerprints are not the planes'.
    """
    manifest = read_manifest(folder, KIND)
    _, quantized, _ = read_quantized(folder)
    fused = convention.fuse_experts(quantized)
    for key, found in (("code_plane", code_plane_fingerprint(fused)), ("scale_plane", scale_plane_fingerprint(fused))):
        if manifest.get(key) != found:
            raise FingerprintMismatch(
                f"the manifest's {key} is not that of the files", where=str(folder), remedy="quantize or merge it again"
            )
    shards = set(shard_map(folder).values())
    sources: dict[str, Path] = {}
    files: dict[str, dict[str, Any]] = {}
    listed = {**manifest["files"], MANIFEST_NAME: None}
    for name in sorted(listed):
        path = folder / name
        entry: dict[str, Any] = {"sha256": sha256_file(path), "bytes": path.stat().st_size}
        if name in shards:
            entry["parts"] = {}
            for part, file in _split_shard(path, parts).items():
                digest = sha256_file(file)
                entry["parts"][part] = {"object": digest, "bytes": file.stat().st_size}
                sources[digest] = file
        else:
            entry["object"] = entry["sha256"]
            sources[entry["sha256"]] = path
        files[name] = entry
    base = Base(
        code_plane=manifest["code_plane"],
        scale_plane=manifest["scale_plane"],
        format=str(manifest.get("format", "")),
        source=str(manifest.get("source") or ""),
        files=files,
    )
    return base, sources


def join_base(objects: Objects, base: Base, out: Path, *, replace: bool) -> None:
    """Write the checkpoint folder, byte for byte what was published; `out` appears when everything is verified."""
    with atomic_folder(out, replace=replace) as temporary, tempfile.TemporaryDirectory(prefix=".tmp-", dir=temporary.parent) as scratch:
        for name, entry in base.files.items():
            inside(temporary, name)  # refuses a name that leaves the folder
            path = temporary / name
            what = f"base {base.code_plane[:12]}, {name}"
            if "parts" in entry:
                parts = {part: Path(scratch) / part for part in PARTS}
                for part, file in parts.items():
                    objects.fetch(entry["parts"][part]["object"], file, what)
                _join_shard(parts, path)
            else:
                objects.fetch(entry["object"], path, what)
            verify_file(path, entry["bytes"], entry["sha256"])
        read_manifest(temporary, KIND)


def _part_of(name: str) -> str:
    leaf = name.rpartition(".")[2]
    return {convention.CODES: "codes", convention.SCALES: "scales"}.get(leaf, "rest")


def _spans(header_file: Path, *, size: int | None = None) -> list[tuple[str, int]]:
    """(part, bytes) of every tensor in file order. size: of the whole shard, where only its header is at hand."""
    tensors = read_safetensors_header(header_file) if size is None else _bare_header(header_file.read_bytes())
    spans = sorted((entry["data_offsets"], name) for name, entry in tensors.items())
    return [(_part_of(name), end - begin) for (begin, end), name in spans]


def _bare_header(data: bytes) -> dict[str, dict[str, Any]]:
    """The tensors of a header that was checked when its shard was split and whose SHA-256 was checked since."""
    return {name: entry for name, entry in json.loads(data[8:]).items() if name != "__metadata__"}


def _copy(source: BinaryIO, target: BinaryIO, size: int) -> None:
    while size:
        chunk = source.read(min(CHUNK_BYTES, size))
        if not chunk:
            raise CheckpointError("a part of the shard is shorter than its header says", where="base", remedy="publish the base again")
        target.write(chunk)
        size -= len(chunk)


def _split_shard(shard: Path, folder: Path) -> dict[str, Path]:
    parts = {part: folder / f"{shard.name}.{part}" for part in PARTS}
    spans = _spans(shard)
    header = shard.stat().st_size - sum(size for _, size in spans)
    with open(shard, "rb") as source:
        streams = {part: open(path, "wb") for part, path in parts.items()}  # noqa: SIM115 (closed below, all of them)
        try:
            _copy(source, streams["header"], header)
            for part, size in spans:
                _copy(source, streams[part], size)
        finally:
            for stream in streams.values():
                stream.close()
    return parts


def _join_shard(parts: Mapping[str, Path], shard: Path) -> None:
    spans = _spans(parts["header"], size=0)
    with open(shard, "wb") as target:
        target.write(parts["header"].read_bytes())
        streams = {part: open(path, "rb") for part, path in parts.items() if part != "header"}  # noqa: SIM115 (closed below)
        try:
            for part, size in spans:
                _copy(streams[part], target, size)
        finally:
            for stream in streams.values():
                stream.close()


def stored_scales(objects: Objects, base: Base) -> dict[str, torch.Tensor]:
    """The base scale plane {name in the model: uint8 [..., O, G * width]}, experts fused, from its own objects alone: no code is read."""
    what = f"base {base.code_plane[:12]}"
    scales: dict[str, torch.Tensor] = {}
    for entry in base.files.values():
        if "parts" not in entry:
            continue
        tensors = _bare_header(objects.read(entry["parts"]["header"]["object"], what))
        data = bytearray(objects.read(entry["parts"]["scales"]["object"], what))
        position = 0
        for (begin, end), name in sorted((value["data_offsets"], name) for name, value in tensors.items()):
            if _part_of(name) == "scales":
                rows = tensors[name]["shape"][:-1]
                plane = torch.frombuffer(data, dtype=torch.uint8, count=end - begin, offset=position)
                scales[name.rpartition(".")[0]] = plane.reshape(*rows, -1)
                position += end - begin
    config = json.loads(objects.read(base.files["config.json"]["object"], what)).get("quantization_config") or {}
    formats = formats_of_modules(config, list(scales), what) if scales else {}
    default = format_of_config(config, what)
    return fused_scales({name: (plane, formats.get(name, default)) for name, plane in scales.items()})


def fused_scales(linears: Mapping[str, tuple[torch.Tensor, Any]]) -> dict[str, torch.Tensor]:
    """Scale planes by the model's own names from those of single Linear modules with their formats."""
    planes: dict[str, QuantTensor] = {}
    for name, (scales, spec) in linears.items():
        columns = scales.shape[-1] // spec.grid.width * spec.block
        # Codes without memory: fusing needs their shape only.
        codes = torch.empty(*scales.shape[:-1], columns // 2, dtype=torch.uint8, device="meta")
        planes[name] = QuantTensor(codes=codes, scales=scales, tensor_scale=torch.ones(scales.shape[:-2]), format=spec)
    return {name: tensor.scales for name, tensor in convention.fuse_experts(planes).items()}


def folder_scales(folder: Path | str) -> dict[str, torch.Tensor]:
    """The scale plane of a checkpoint folder by the model's own names, experts fused."""
    _, quantized, _ = read_quantized(folder)
    return {name: tensor.scales for name, tensor in convention.fuse_experts(quantized).items()}
