"""The quantized base of a run: made once per (source, format, policy) and cached, or taken as it is.

Many trials start at once and want the same base: one process quantizes under a file lock, the others wait and then find the finished folder, which appeared by
renaming.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from prism_ray import __version__
from prism_ray.calibrate.quantize import quantize_to_folder
from prism_ray.core.errors import GridMismatch
from prism_ray.core.manifest import MANIFEST_NAME
from prism_ray.formats.checkpoint import KIND, read_config
from prism_ray.formats.config_groups import format_of_config
from prism_ray.formats.policy import QuantPolicy
from prism_ray.formats.spec import FORMATS
from prism_ray.models.load import load_model, load_tokenizer
from prism_ray.models.source import cache_root, resolve


def prepare_base(model: str, format_name: str, policy: QuantPolicy | None = None, *, cache_dir: Path | None = None) -> Path:
    """Folder of the base of `model` in `format_name`. An already quantized model is returned as it is; another format raises GridMismatch."""
    spec = FORMATS[format_name]
    source = resolve(model, cache_dir=cache_dir)
    quantization = read_config(source).get("quantization_config")
    if quantization:
        found = format_of_config(quantization, str(source))
        if found.name != spec.name:
            raise GridMismatch(
                f"the model is stored as {found.name}, the run asks for {spec.name}", where=model, remedy=f"set format={found.name}"
            )
        return source
    policy = (policy or QuantPolicy()).with_overrides({"format": format_name})
    key = hashlib.sha256(
        json.dumps([str(source.resolve()), policy.to_dict(), _stamp(source), __version__], sort_keys=True).encode()
    ).hexdigest()[:16]
    folder = cache_root(cache_dir) / "bases" / f"{source.name}-{format_name}-{key}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / MANIFEST_NAME).is_file():
            loaded = load_model(str(source), dtype=torch.bfloat16), load_tokenizer(str(source))
            quantize_to_folder(*loaded, policy, folder, source=model, replace=True)  # a folder without a manifest is no base
    return folder


def _stamp(folder: Path) -> list[list[Any]]:
    """Names, sizes and modification times of a model folder's weights: a changed source gives another base."""
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(folder.glob("*.safetensors"))]


def base_manifest(folder: Path) -> dict[str, Any]:
    """Fingerprints of a base folder; for a checkpoint of another writer they are computed."""
    from prism_ray.core.manifest import read_manifest
    from prism_ray.formats.checkpoint import read_quantized
    from prism_ray.formats.compressed_tensors import fuse_experts
    from prism_ray.formats.tensor import code_plane_fingerprint, scale_plane_fingerprint

    if (folder / MANIFEST_NAME).is_file():
        return read_manifest(folder, KIND, verify=False)
    _, quantized, _ = read_quantized(folder)
    fused = fuse_experts(quantized)
    return {"code_plane": code_plane_fingerprint(fused), "scale_plane": scale_plane_fingerprint(fused)}
