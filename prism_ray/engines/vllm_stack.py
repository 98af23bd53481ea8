"""How a plane reaches vLLM's worker: checked, stacked as vLLM stacks the linears, in a file of shared memory.

The worker maps the file and the engine unlinks it: the pages live as long as the worker's tensors. Where shared memory has no room the file lies in the
temporary folder. Refused: scales that do not fit the base (`adapters.planes.ScalePlane.require_fit`), or are not those of the digest.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from prism_ray.adapters.planes import BasePlanes, ScalePlane
from prism_ray.core.errors import CheckpointError, FormatError, ResourceError
from prism_ray.engines.protocol import Plane

SHARED_MEMORY = Path("/dev/shm")
SLACK_BYTES = 16 << 20


def cache_salt(salt: str, digest: str) -> str:
    """What vLLM keys the first block of a sequence by, besides the tokens."""
    return f"{len(salt)}:{salt}:{digest}"


def stacked(
    layout: Mapping[str, Sequence[str]], base: Mapping[str, torch.Tensor], plane: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Scales by vLLM's module: parts that the plane lacks are the base's, modules of which it has no part are left out."""
    touched = {module: parts for module, parts in layout.items() if any(part in plane for part in parts)}
    return {module: torch.cat([plane.get(part, base[part]) for part in parts]).contiguous() for module, parts in touched.items()}


def write_plane(plane: Plane, base: BasePlanes, layout: Mapping[str, Sequence[str]]) -> tuple[Path, int]:
    """Check a plane and write its stacked scales; returns the file and the bytes it holds. Raises FormatError, ResourceError; nothing is left then."""
    found = ScalePlane(plane.scales)
    if found.digest() != plane.digest:
        raise FormatError("the scales are not those of the plane's digest", where=plane.digest[:12], remedy="read the plane again")
    scales = base.scales().tensors
    try:
        fitted = found.by_linear(scales)
        fitted.require_fit(base.quantized, plane.digest[:12])
    except CheckpointError as error:
        raise FormatError(error.what, where=error.where, remedy=error.remedy) from None
    tensors = stacked(layout, scales, fitted.tensors)
    size = sum(tensor.numel() for tensor in tensors.values())
    for folder in (SHARED_MEMORY, Path(tempfile.gettempdir())):
        if folder.is_dir() and shutil.disk_usage(folder).free > size + SLACK_BYTES:
            handle, name = tempfile.mkstemp(prefix="prism-plane-", suffix=".safetensors", dir=folder)
            os.close(handle)
            try:
                save_file(tensors, name)
            except BaseException:
                Path(name).unlink()
                raise
            return Path(name), size
    raise ResourceError(f"no room for {size} bytes of scales in shared memory or the temporary folder", where=plane.digest[:12])
