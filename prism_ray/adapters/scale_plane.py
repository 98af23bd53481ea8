"""The scale plane of an adapter as a file: `scale_plane.safetensors` beside the factors, and the manifest of an adapter folder.

| tensor | dtype, shape | |
|---|---|---|
| N | uint8 [O, G] | on-grid scale bytes of the linear layer N |
| N | uint8 [E', O, G] | of a fused expert weight N: the E' experts of which the adapter changes a byte |
| N.experts | int32 [E'] | their numbers, ascending; every other expert has the base's bytes |

Codes and tensor scales are the base's. The manifest names them by fingerprint, with what else an adapter must agree on with its base (field case ADP-03):
format, grid, block, rounding rule, tokenizer. `read_scale_plane` gives full planes back, byte for byte, or refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from prism_ray.adapters.qast import ROUNDING, effective_scales, require_finite
from prism_ray.adapters.scale_qlora.config import ScaleQLoraConfig
from prism_ray.adapters.scale_qlora.experts import ScaleQLoraExperts
from prism_ray.adapters.scale_qlora.layer import ScaleQLoraLayer
from prism_ray.core.digests import sha256_file
from prism_ray.core.errors import CheckpointError, ModelError
from prism_ray.core.files import atomic_path
from prism_ray.core.manifest import MANIFEST_NAME, read_manifest, write_manifest
from prism_ray.formats.checkpoint import KIND
from prism_ray.formats.grids import require_legal
from prism_ray.formats.modules import planes
from prism_ray.formats.safetensors_io import check_safetensors
from prism_ray.formats.tensor import QuantTensor, code_plane_fingerprint, scale_plane_fingerprint

ADAPTER_KIND = "scale-adapter"
SCALE_PLANE_NAME = "scale_plane.safetensors"
ADAPTER_NAME = "adapter_model.safetensors"
TOKENIZER_NAME = "tokenizer.json"
PEFT_PREFIX = "base_model.model."
EXPERTS = ".experts"


def base_model(model: Any) -> Any:
    """The transformers model under a PEFT model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def adapter_layers(model: Any, adapter: str = "default") -> dict[str, ScaleQLoraLayer]:
    """Module path in the base model -> tuner layer that holds `adapter`; raises ModelError where there is none."""
    modules = base_model(model).named_modules()
    found = {name: module for name, module in modules if isinstance(module, ScaleQLoraLayer) and adapter in module.qast_A}
    if not found:
        raise ModelError(f"the model holds no Scale-QLoRA adapter called '{adapter}'", where=adapter)
    return found


def base_planes(model: Any) -> dict[str, QuantTensor]:
    """Every quantized weight of the base by name, with the scales that it had before an adapter was merged in place (views, no copy)."""
    base = base_model(model)
    found = planes(base)
    for name, module in base.named_modules():
        if isinstance(module, ScaleQLoraLayer):
            found[name] = found[name].with_scales(module.base_scales)
    return found


def write_scale_plane(
    model: Any, adapter_folder: Path | str, *, adapter: str = "default", base_folder: Path | str | None = None, **fields: Any
) -> dict[str, Any]:
    """Add `scale_plane.safetensors` (the on-grid bytes of every adapted layer) and the manifest to a saved PEFT adapter folder.

    base_folder: where the base's tokenizer and manifest are looked for; default the folder that the model was loaded from. fields: further manifest entries
    (metrics, base source). Returns the manifest. The plane goes through a temporary file; the manifest is last.
    The factors are those of the folder's file: under ZeRO-3 the model itself holds only a part of them on each worker. The base's fingerprints come from
    the adapter's config, or from the model where the config has none. Raises FormatError for factors that are not finite, CheckpointError for factors of
    another shape than the model's layers.
    """
    folder = Path(adapter_folder)
    layers = adapter_layers(model, adapter)
    config: ScaleQLoraConfig = model.peft_config[adapter]
    saved = load_file(folder / ADAPTER_NAME)
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in layers.items():
        tensors |= _plane(name, layer, adapter, saved, str(folder / ADAPTER_NAME))
    with atomic_path(folder / SCALE_PLANE_NAME) as temporary:
        save_file(tensors, temporary)
    spec = next(iter(layers.values())).base_layer.format
    identity: dict[str, Any] = {"format": spec.name, "grid": spec.grid.name, "block": spec.block, "rank": config.r, "alpha": config.alpha}
    identity |= {"qast": config.qast, "rounding": ROUNDING[spec.grid.name]}
    identity["experts"] = {key.removesuffix(EXPERTS): tensors[key].tolist() for key in expert_keys(tensors)}
    return write_manifest(
        folder,
        ADAPTER_KIND,
        base_code_plane=config.code_plane or code_plane_fingerprint(base_planes(model)),
        base_scale_plane=config.scale_plane or scale_plane_fingerprint(base_planes(model)),
        **identity,
        **_base_facts(model, base_folder),
        **fields,
    )


def _plane(name: str, layer: ScaleQLoraLayer, adapter: str, saved: Mapping[str, torch.Tensor], where: str) -> dict[str, torch.Tensor]:
    """The tensors of one adapted weight, from the factors of the folder's file."""
    try:
        a, b = (saved[f"{PEFT_PREFIX}{name}.{part}"] for part in ("qast_A", "qast_B"))
    except KeyError as error:
        raise CheckpointError(f"tensor {error} is missing", where=where, remedy="save the adapter again") from None
    wanted = tuple(layer.qast_B[adapter].shape[:-2])
    # A layer under ZeRO-3 holds an empty piece: only the table of experts says how many there are.
    if isinstance(layer, ScaleQLoraExperts):
        wanted = (len(layer.experts[adapter]),)
    base = layer.base_scales.cpu()
    rows, groups = base.shape[-2:]
    if tuple(a.shape) != (*wanted, layer.r[adapter], groups) or tuple(b.shape) != (*wanted, rows, layer.r[adapter]):
        raise CheckpointError(f"factors of '{name}' have shapes {list(a.shape)} and {list(b.shape)}, unlike the model's", where=where)
    require_finite(name, a, b)
    spec, scaling = layer.base_layer.format, layer.scaling[adapter]
    if not isinstance(layer, ScaleQLoraExperts):
        return {name: effective_scales(base, a, b, scaling, spec).contiguous()}
    numbers = torch.tensor(layer.experts[adapter], dtype=torch.int64)
    before = base[numbers]
    data = effective_scales(before, a, b, scaling, spec)
    changed = (data != before).flatten(1).any(1)
    return {name: data[changed].contiguous(), f"{name}{EXPERTS}": numbers[changed].to(torch.int32)}


def expert_keys(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The index tensors among the tensors of a scale plane, sorted."""
    return sorted(name for name in tensors if name.endswith(EXPERTS) and name.removesuffix(EXPERTS) in tensors)


def _base_facts(model: Any, base_folder: Path | str | None) -> dict[str, Any]:
    """Digest of the base's tokenizer and the rule its scales were made with, where its folder is known and has them."""
    folder = Path(base_folder or getattr(getattr(base_model(model), "config", None), "_name_or_path", "") or "")
    facts: dict[str, Any] = {}
    if not folder.name or not folder.is_dir():
        return facts
    if (digest := tokenizer_digest(folder)) is not None:
        facts["tokenizer"] = digest
    if (folder / MANIFEST_NAME).is_file():
        manifest = read_manifest(folder, KIND, verify=False)
        facts |= {key: manifest[key] for key in ("scale_rule",) if key in manifest}
    return facts


def tokenizer_digest(folder: Path | str) -> str | None:
    """SHA-256 of a model folder's tokenizer.json; None where there is none."""
    path = Path(folder) / TOKENIZER_NAME
    return sha256_file(path) if path.is_file() else None


def read_scale_plane(folder: Path | str, base: Mapping[str, QuantTensor]) -> dict[str, torch.Tensor]:
    """Full scale planes uint8 [..., O, G] of the weights that an adapter folder's scale plane names, over those of `base` (`base_planes`).

    Raises CheckpointError for a weight that the base lacks, another shape or dtype, and expert numbers that are not ascending or not the base's; FormatError for
    an illegal byte.
    """
    path = Path(folder) / SCALE_PLANE_NAME
    check_safetensors(path)
    tensors = load_file(path)
    indices = expert_keys(tensors)
    out: dict[str, torch.Tensor] = {}
    for name, data in tensors.items():
        if name in indices:
            continue
        if name not in base:
            raise CheckpointError(f"'{name}' is no quantized weight of the base", where=str(path), remedy="use the base it was trained on")
        plane, numbers = base[name].scales, tensors.get(f"{name}{EXPERTS}")
        shape = tuple(plane.shape)
        if numbers is not None:
            require_numbers(numbers, shape[0], f"{path}: {name}{EXPERTS}")
            shape = (numbers.numel(), *shape[1:])
        if data.dtype != torch.uint8 or tuple(data.shape) != shape:
            raise CheckpointError(f"'{name}' is {data.dtype} {list(data.shape)}, the base needs bytes {list(shape)}", where=str(path))
        require_legal(base[name].format.grid, data, f"{path}: {name}")
        if numbers is None:
            out[name] = data
        else:
            out[name] = plane.cpu().clone()
            out[name][numbers.long()] = data
    return out


def require_numbers(numbers: torch.Tensor, count: int, where: str) -> None:
    """Raise CheckpointError unless `numbers` are ascending expert numbers below `count`, int32 [E']."""
    values = numbers.tolist()
    if (
        numbers.dtype != torch.int32
        or numbers.ndim != 1
        or values != sorted(set(values))
        or not all(0 <= value < count for value in values)
    ):
        raise CheckpointError(f"is no ascending list of experts below {count}", where=where, remedy="write the adapter again")
