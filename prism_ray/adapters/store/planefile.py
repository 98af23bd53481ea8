"""The file `scale_plane.safetensors` taken apart for a patch and put together again, byte for byte (its layout: `adapters.scale_plane`).

A fused expert weight is there with the experts that the adapter changes, [E', O, G] beside their numbers [E']; it is patched against the same experts of the base.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, load_file, save

from prism_ray.adapters.folder import CONFIG_NAME
from prism_ray.adapters.patch import Factors
from prism_ray.adapters.scale_plane import ADAPTER_NAME, EXPERTS, PEFT_PREFIX, expert_keys, require_numbers
from prism_ray.core.errors import CheckpointError, FormatError
from prism_ray.formats.spec import FORMATS

Planes = dict[str, torch.Tensor]
Experts = dict[str, list[int]]


def split_file(data: bytes) -> tuple[Planes, Experts]:
    """(scale bytes by weight, expert numbers of the fused ones that are there in part) of a file's bytes."""
    tensors = load(data)
    keys = expert_keys(tensors)
    experts = {key.removesuffix(EXPERTS): [int(number) for number in tensors[key].tolist()] for key in keys}
    return {name: tensor for name, tensor in tensors.items() if name not in keys}, experts


def join_file(planes: Mapping[str, torch.Tensor], experts: Mapping[str, list[int]]) -> bytes:
    """The file of `split_file`'s parts, as `scale_plane.write_scale_plane` lays it out."""
    return save({**planes, **{f"{name}{EXPERTS}": torch.tensor(numbers, dtype=torch.int32) for name, numbers in experts.items()}})


def matching_base(base: Mapping[str, torch.Tensor], experts: Mapping[str, list[int]]) -> Planes:
    """The base plane with the experts of each fused weight that the adapter holds. Raises FormatError or CheckpointError for experts that it lacks."""
    out = dict(base)
    for name, numbers in experts.items():
        if name not in base or base[name].ndim != 3:
            raise FormatError("the base plane has no such fused experts", where=name, remedy="use the base that the adapter was trained on")
        index = torch.tensor(numbers, dtype=torch.int32)
        require_numbers(index, base[name].shape[0], f"{name}{EXPERTS}")
        out[name] = base[name][index.long()]
    return out


def full_planes(planes: Planes, experts: Experts, base: Mapping[str, torch.Tensor] | None, where: str) -> Planes:
    """Planes with all experts: those that the adapter does not hold have the base's bytes. Raises CheckpointError where the base is needed and None."""
    out = dict(planes)
    for name, numbers in experts.items():
        if base is None:
            raise CheckpointError(
                f"'{name}' holds some experts only, and their base is not in the store", where=where, remedy="publish the base"
            )
        matching_base(base, {name: numbers})
        out[name] = base[name].clone()
        out[name][torch.tensor(numbers, dtype=torch.long)] = planes[name]
    return out


def read_factors(folder: Path, manifest: Mapping[str, Any], planes: Mapping[str, torch.Tensor], experts: Experts) -> Factors | None:
    """A [.., r, G], B [.., O, r] and the scaling of every weight, None for an adapter of another kind: its plane is then patched without them.

    A wrong guess here costs bytes only: the patch proves its result against the plane itself.
    """
    config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    rank, alpha = config.get("r"), config.get("alpha")
    if config.get("peft_type") != "SCALE_QLORA" or not isinstance(rank, int) or rank < 1 or not isinstance(alpha, (int, float)):
        return None
    saved = load_file(folder / ADAPTER_NAME)
    layers: dict[str, tuple[torch.Tensor, torch.Tensor, float]] = {}
    for name, plane in planes.items():
        a, b = (saved.get(f"{PEFT_PREFIX}{name}.{part}") for part in ("qast_A", "qast_B"))
        if a is None or b is None:
            continue
        if plane.ndim == 3 and a.ndim == 3 and len(a) != len(plane) and len(a) > max(experts.get(name, [0]), default=0):
            # Factors of all experts, of which some moved no byte.
            index = torch.tensor(experts.get(name, []), dtype=torch.long)
            a, b = a[index], b[index]
        if (
            a.shape[:-2] == b.shape[:-2] == plane.shape[:-2]
            and (*b.shape[-2:-1], *a.shape[-1:]) == plane.shape[-2:]
            and a.shape[-2] == b.shape[-1]
        ):
            layers[name] = (a, b, alpha / rank)
    return Factors(layers=layers, format=FORMATS[manifest["format"]]) if layers else None
