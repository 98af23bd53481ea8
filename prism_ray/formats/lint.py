"""A linter for written quantized folders: what a loader would read wrongly is found here, before the folder gets its name (field case FMT-09).

Three views of one policy lie in a folder: the tensors, the config's groups and ignore list, and the manifest's plan. `lint_checkpoint` compares them:

- every weight is plain or has all companions (codes, scales, global scale, shape) with the right dtypes and shapes, and no companion lies alone;
- no illegal scale, code or global scale;
- every entry of the ignore list matches a module that is there, and that is plain;
- projections that are served as one matrix are all of one format or all plain, and under NVFP4 carry one global scale (field case FMT-05);
- names, shapes, formats and bytes of the manifest's plan, and names and bytes of what it kept, are what lies there.

Shards are memory-mapped; scales and global scales are read, codes only where a format has illegal ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from prism_ray.core.errors import PrismError
from prism_ray.core.manifest import MANIFEST_NAME, read_manifest
from prism_ray.formats import compressed_tensors as convention
from prism_ray.formats.checkpoint import KIND, read_config
from prism_ray.formats.config_groups import FUSED_PARTS, format_of_config, formats_of_modules, ignored_by, narrowed
from prism_ray.formats.fusion import fused_groups
from prism_ray.formats.safetensors_io import read_tensors
from prism_ray.formats.spec import FORMATS, FormatSpec
from prism_ray.formats.tensor import QuantTensor

Tensors = Mapping[str, torch.Tensor]
COMPANIONS = (convention.SCALES, convention.DIVISOR, convention.SHAPE, *convention.REFUSED)
HEADS = ("lm_head", "embed_out")


def lint_checkpoint(folder: Path | str) -> list[str]:
    """Findings, one line each; none means that the folder may be released. The folder's manifest is used where there is one."""
    folder = Path(folder)
    try:
        whole = read_config(folder)
        config = whole.get("quantization_config") or {}
        tensors = dict(read_tensors(folder))
        packed = convention.module_names(tensors)
        formats = formats_of_modules(config, packed, str(folder))
        format_of_config(config, str(folder))
        manifest = read_manifest(folder, KIND, verify=False) if (folder / MANIFEST_NAME).is_file() else None
    except PrismError as error:
        return [str(error)]
    tied = bool(whole.get("tie_word_embeddings"))
    findings = list(_alone(tensors, packed))
    quantized: dict[str, QuantTensor] = {}
    planned = {entry["tensor"]: entry for entry in (manifest or {}).get("plan", [])}
    fused = convention.fused_names(packed)
    for name in packed:
        try:
            entry = planned.get(fused[name])
            spec = narrowed(formats[name], entry["format"], name) if entry else formats[name]
            quantized[name] = convention.from_checkpoint(name, tensors, spec)
        except PrismError as error:
            findings.append(str(error))
    findings += _ignored(config, tensors, packed, tied)
    findings += _fused(tensors, packed, quantized)
    if planned:
        findings += _planned(planned, tensors, packed, quantized)
        findings += _kept((manifest or {}).get("kept", []), tensors, tied)
    return findings


def _alone(tensors: Tensors, packed: list[str]) -> Iterator[str]:
    """Companions without codes, and weights that are there twice."""
    known = set(packed)
    for name in sorted(tensors):
        module, _, part = name.rpartition(".")
        if part in COMPANIONS and module not in known:
            yield f"{name}: a companion without '{module}.{convention.CODES}'"
        elif part == "weight" and module in known:
            yield f"{module}: holds both 'weight' and '{convention.CODES}'"


def _ignored(config: Mapping[str, Any], tensors: Tensors, packed: list[str], tied: bool) -> Iterator[str]:
    """Entries of the ignore list that match nothing, or a packed module."""
    plain = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
    for entry in map(str, config.get("ignore") or []):
        for name in ignored_by(entry, packed):
            yield f"{name}: is packed, but the config's ignore list has '{entry}'"
        # A tied head has no tensor of its own.
        if not ignored_by(entry, [*plain, *packed, *(HEADS if tied else ())]):
            yield f"{entry}: the config's ignore list has it, but no module of that name is in the files"


def _fused(tensors: Tensors, packed: list[str], quantized: Mapping[str, QuantTensor]) -> Iterator[str]:
    """Groups that are served as one matrix and differ in format or global scale."""
    known = set(packed)
    plain = {module for name in tensors if name.endswith(".weight") and (module := name.removesuffix(".weight")) not in known}
    for group in fused_groups(sorted(known | plain)):
        # A member that cannot be read has a finding already.
        if len(group) == 1 or any(name in known and name not in quantized for name in group):
            continue
        kinds = [quantized[name].format.name if name in quantized else "plain" for name in group]
        if len(set(kinds)) > 1:
            yield f"{', '.join(group)}: served as one matrix, but stored as {', '.join(kinds)}"
        elif group[0] in quantized and quantized[group[0]].format.has_tensor_scale:
            scales = [float(tensors[f"{name}.{convention.DIVISOR}"]) for name in group]
            if len(set(scales)) > 1:
                yield f"{', '.join(group)}: served as one matrix, but the global scales are {', '.join(f'{scale:g}' for scale in scales)}"


def _planned(
    planned: Mapping[str, Mapping[str, Any]], tensors: Tensors, packed: list[str], quantized: Mapping[str, QuantTensor]
) -> Iterator[str]:
    """Differences between the manifest's plan and the quantized weights."""
    fused = convention.fused_names(packed)
    members: dict[str, list[str]] = {}
    for name in packed:
        members.setdefault(fused[name], []).append(name)
    for name in sorted(planned.keys() | members.keys()):
        if name not in members:
            yield f"{name}: the plan quantizes it, but it is not in the files packed"
        elif name not in planned:
            yield f"{name}: is packed, but not in the plan"
        elif all(member in quantized for member in members[name]):
            spec, shape = FORMATS[planned[name]["format"]], planned[name]["shape"]
            rows = sum(quantized[member].shape[0] for member in members[name])
            columns = {quantized[member].shape[1] for member in members[name]}
            if (rows, columns) != (math.prod(shape[:-1]), {shape[-1]}):
                yield f"{name}: the plan says shape {shape}, the files hold {rows} rows of {sorted(columns)} columns"
                continue
            found = sum(_bytes(tensors[f"{member}.{part}"]) for member in members[name] for part in convention.parts_of(spec))
            linears = 1 if len(shape) == 2 else shape[0] * len(FUSED_PARTS[name.rpartition(".")[2]])
            wanted = stored_bytes(spec, rows, shape[-1], linears)
            if found != wanted:
                yield f"{name}: {found} bytes of planes, the plan comes to {wanted}"


def stored_bytes(spec: FormatSpec, rows: int, columns: int, linears: int) -> int:
    """Bytes of `rows` of a weight in a checkpoint, stored as `linears` modules: codes, scales, and each module's global scale or shape."""
    per_linear = (4 if spec.has_tensor_scale else 0) + (16 if convention.SHAPE in convention.parts_of(spec) else 0)
    return rows * (columns // 2 + spec.blocks(columns) * spec.grid.width) + linears * per_linear


def _kept(kept: list[Mapping[str, Any]], tensors: Tensors, tied: bool) -> Iterator[str]:
    """Differences between what the manifest says was kept and the plain tensors. A tied head and its embedding are one tensor under either name."""
    companions = (convention.CODES, *COMPANIONS)
    plain = {name: _bytes(tensor) for name, tensor in tensors.items() if name.rpartition(".")[2] not in companions}
    listed = set()
    shared = None
    for entry in kept:
        name = entry["tensor"] if entry["tensor"] in plain else f"{entry['tensor']}.weight"
        listed.add(name)
        if name not in plain:
            if tied and entry["tensor"] in HEADS and shared is None:
                shared = entry["bytes"]
            else:
                yield f"{entry['tensor']}: kept by the plan, but not in the files plain"
        elif plain[name] != entry["bytes"]:
            yield f"{name}: {plain[name]} bytes, the plan kept {entry['bytes']}"
    for name in sorted(plain.keys() - listed):
        if plain[name] == shared and tensors[name].ndim == 2:
            shared = None
        elif tensors[name].ndim >= 2:
            yield f"{name}: is plain, but neither planned nor kept"


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
