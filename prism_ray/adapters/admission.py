"""Admission: what is checked before an adapter's bytes touch a base.

An adapter belongs to one code plane and one base scale plane, of one format, block and grid; its manifest and config say which (field case ADP-03). `admit`
compares them with the base's own bytes after `adapters.folder` has checked the files:

| differs | refused with | override |
|---|---|---|
| code plane, base scale plane, scale rule, rounding, tokenizer | FingerprintMismatch | `allow_mismatch`, written to the audit log |
| grid, format, block | GridMismatch, FormatError | none: the bytes mean something else |
| layers and shapes against the base, its config's targets and its factors (field case ADP-04) | CheckpointError naming the first few | none |
| a byte illegal on the grid | FormatError | none |
| scale plane against the factors' own rounding on this base | CheckpointError | none |
| no byte differs from the base | CheckpointError | `allow_no_change` |

The plane and the factors are two forms of one adapter: an apply uses the first, a merge the second, and both must give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import check_target_module_exists

from prism_ray.adapters.audit_log import append_entry
from prism_ray.adapters.folder import AdapterFolder, open_adapter, printable
from prism_ray.adapters.planes import BasePlanes, ScalePlane, expert_parts, name_some, read_planes_file
from prism_ray.adapters.qast import ROUNDING, effective_scales, require_finite
from prism_ray.adapters.scale_plane import ADAPTER_NAME, PEFT_PREFIX, SCALE_PLANE_NAME
from prism_ray.adapters.scale_qlora import ScaleQLoraConfig
from prism_ray.core.errors import CheckpointError, ConfigError, FingerprintMismatch, FormatError, GridMismatch, ModelError, PrismError
from prism_ray.formats import compressed_tensors as convention
from prism_ray.formats.safetensors_io import check_safetensors
from prism_ray.formats.tensor import QuantTensor

FACTORS = ("qast_A", "qast_B")
NO_CHANGE = "the adapter changes nothing"


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """An adapter that passed. plane: its bytes by the base's Linear names; changed of blocks: scale bytes that differ from the base;
    unchanged: layers without any; overridden: the mismatches that the caller allowed."""

    plane: ScalePlane
    manifest: Mapping[str, Any]
    changed: int
    blocks: int
    unchanged: tuple[str, ...] = ()
    overridden: tuple[str, ...] = ()


def admit(
    folder: Path | str,
    base: BasePlanes,
    *,
    root: Path | str | None = None,
    allow_mismatch: str = "",
    allow_no_change: bool = False,
    audit_log: Path | str | None = None,
) -> Admitted:
    """Check an adapter folder against a base; nothing is applied. See the module docstring for what is refused.

    root: folder that the adapter must lie in. allow_mismatch: the reason for applying an adapter of another base; needs `audit_log`, which also takes refusals.
    """
    if allow_mismatch and audit_log is None:
        raise ConfigError("an override is written to an audit log", where="allow_mismatch", remedy="give audit_log")
    subject = {"adapter": Path(folder).name, "base_code_plane": base.code_plane, "base_scale_plane": base.scale_plane}
    try:
        admitted = _admit(open_adapter(folder, root=root), base, bool(allow_mismatch), allow_no_change)
    except PrismError as error:
        if audit_log is not None:
            append_entry(audit_log, "refused", **subject, error=type(error).__name__, what=error.what)
        raise
    if admitted.overridden and audit_log is not None:
        append_entry(audit_log, "overridden", **subject, mismatches=list(admitted.overridden), reason=allow_mismatch)
    return admitted


def _admit(folder: AdapterFolder, base: BasePlanes, allow_mismatch: bool, allow_no_change: bool) -> Admitted:
    where = str(folder.path)
    if not folder.has(SCALE_PLANE_NAME):
        raise CheckpointError(
            f"holds no {SCALE_PLANE_NAME}", where=where, remedy="write it with prism_ray.adapters.merge.write_scale_plane"
        )
    config = folder.peft_config() if folder.config is not None else None
    mismatches = _mismatches(folder, config, base)
    if mismatches and not allow_mismatch:
        raise FingerprintMismatch(mismatches[0], where=where, remedy="use the base it was trained on")
    stored = ScalePlane.read(folder.path)
    plane = stored.by_linear(base.scales().tensors)
    plane.require_fit(base.quantized, where)
    _require_format(folder.manifest or {}, config, plane, base)
    if config is not None:
        _require_targets(config, stored.layers(), base.quantized, where)
    if config is not None and folder.has(ADAPTER_NAME):
        planes = factor_planes(read_planes_file(folder.path / ADAPTER_NAME), config, base.quantized, where)
        _require_same(planes, plane.tensors, base.quantized, compare=not mismatches, where=where)
    changes = {name: int((data != base.quantized[name].scales.cpu()).sum()) for name, data in plane.tensors.items()}
    if not any(changes.values()) and not allow_no_change:
        raise CheckpointError(NO_CHANGE, where=where, remedy="train it, or declare it with allow_no_change")
    return Admitted(
        plane=plane,
        manifest=folder.manifest or {},
        changed=sum(changes.values()),
        blocks=sum(data.numel() for data in plane.tensors.values()),
        unchanged=tuple(sorted(name for name, count in changes.items() if not count)),
        overridden=tuple(mismatches),
    )


def _mismatches(folder: AdapterFolder, config: ScaleQLoraConfig | None, base: BasePlanes) -> list[str]:
    """What of the base's identity differs from the one that the adapter was trained on, a line each."""
    for name in ("base_code_plane", "base_scale_plane"):
        if folder.field(name) is None:
            raise CheckpointError(f"the manifest says no '{name}'", where=str(folder.path), remedy="write the scale plane again")
    grid = folder.field("grid") or ""
    pairs = [
        ("code_plane", folder.field("base_code_plane"), base.code_plane),
        ("scale_plane", folder.field("base_scale_plane"), base.scale_plane),
        ("scale_rule", folder.field("scale_rule"), base.scale_rule),
        ("tokenizer", folder.field("tokenizer"), base.tokenizer),
        ("rounding", folder.field("rounding"), ROUNDING.get(grid)),
    ]
    if config is not None:
        pairs += [("code_plane", config.code_plane, base.code_plane), ("scale_plane", config.scale_plane, base.scale_plane)]
    return [
        f"the adapter's {name} is {printable(wanted[:12])[1:-1]}, the base has {found[:12]}"
        for name, wanted, found in pairs
        if wanted is not None and found is not None and wanted != found
    ]


def _require_format(manifest: Mapping[str, Any], config: ScaleQLoraConfig | None, plane: ScalePlane, base: BasePlanes) -> None:
    """Format, block and grid of the manifest, and the grid of the config, against those of every layer that the plane touches."""
    for name in plane.tensors:
        spec = base.quantized[name].format
        grids = [manifest.get("grid"), *([config.grid] if config is not None and config.grid is not None else [])]
        other = [grid for grid in grids if grid != spec.grid.name]
        if other:
            raise GridMismatch(
                f"adapter was trained on grid {printable(other[0])}, the base has {spec.grid.name} scales",
                where=name,
                remedy="train it again on this format",
            )
        if manifest.get("format") != spec.name or manifest.get("block") != spec.block:
            raise FormatError(
                f"adapter is for {printable(manifest.get('format'))} in blocks of {printable(manifest.get('block'))}, "
                f"the base has {spec.name} in blocks of {spec.block}",
                where=name,
                remedy="train it again on this format",
            )


def _require_targets(config: ScaleQLoraConfig, layers: set[str], base: Mapping[str, QuantTensor], where: str) -> None:
    """The layers of the plane must be those that the config's target list finds on this base: fewer would adapt half of the model.

    Regular expressions are left out: one from a client can take hours to match.
    """
    if not isinstance(config.target_modules, (list, set)) or isinstance(config.exclude_modules, str) or config.layers_pattern:
        return
    whole = convention.fused_names(base)
    wanted = {name for name in whole.values() if check_target_module_exists(config, name)}
    found = {whole.get(name, name) for name in layers}
    missing, surplus = sorted(wanted - found), sorted(found - wanted)
    if missing or surplus:
        what = f"holds no {name_some(missing)}" if missing else f"holds {name_some(surplus)} besides"
        raise CheckpointError(
            f"the config targets {len(wanted)} layer(s), the adapter {what}", where=where, remedy="save the adapter again"
        )


def factor_planes(
    tensors: Mapping[str, torch.Tensor], config: ScaleQLoraConfig, base: Mapping[str, QuantTensor], where: str
) -> dict[str, torch.Tensor]:
    """The on-grid bytes by Linear that PEFT factors give on `base`; of fused experts, those that the config trains.

    Raises CheckpointError for keys and shapes that are not exactly a pair for each weight.
    """
    experts = expert_parts(base)
    surplus = sorted(
        name for name in tensors if f"{PEFT_PREFIX}{_layer_of(name)}.{_part_of(name)}" != name or _part_of(name) not in FACTORS
    )
    surplus += sorted(name for name in tensors if name not in surplus and _layer_of(name) not in base and _layer_of(name) not in experts)
    if surplus:
        raise CheckpointError(
            f"{len(surplus)} of {len(tensors)} tensor(s) belongs to no quantized layer of the base: {name_some(surplus)}",
            where=where,
            remedy="use the base it was trained on",
        )
    out: dict[str, torch.Tensor] = {}
    for layer in sorted({_layer_of(name) for name in tensors}):
        if layer in base:
            (a, b), parts = _pair(tensors, layer, (), [layer], config, base, where), [[layer]]
            a, b = a.unsqueeze(0), b.unsqueeze(0)
        else:
            numbers = config.experts_of(layer, len(experts[layer]))
            parts = [experts[layer][number] for number in numbers]
            a, b = _pair(tensors, layer, (len(numbers),), experts[layer][0], config, base, where)
        for index, names in enumerate(parts):
            old = torch.cat([base[name].scales for name in names])
            data = effective_scales(old, a[index].to(old.device), b[index].to(old.device), config.scaling, base[names[0]].format)
            out |= dict(zip(names, data.split([base[name].scales.shape[0] for name in names]), strict=True))
    return out


def _pair(
    tensors: Mapping[str, torch.Tensor],
    layer: str,
    leading: tuple[int, ...],
    parts: list[str],
    config: ScaleQLoraConfig,
    base: Mapping[str, QuantTensor],
    where: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A [.., r, G] and B [.., O, r] of a weight stored as `parts`, checked."""
    keys = [f"{PEFT_PREFIX}{layer}.{part}" for part in FACTORS]
    absent = [key for key in keys if key not in tensors]
    if absent:
        raise CheckpointError(f"tensor(s) missing: {name_some(absent)}", where=where, remedy="save the adapter again")
    rows = sum(base[name].scales.shape[0] for name in parts)
    groups = base[parts[0]].scales.shape[-1] // base[parts[0]].format.grid.width
    for key, shape in zip(keys, ((*leading, config.r, groups), (*leading, rows, config.r)), strict=True):
        tensor = tensors[key]
        if tuple(tensor.shape) != shape or tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise CheckpointError(
                f"{name_some([key])} is {tensor.dtype} {list(tensor.shape)}, rank {config.r} on this base needs {list(shape)}",
                where=where,
                remedy="use the base it was trained on; under ZeRO-3 gather before saving",
            )
    a, b = (tensors[key] for key in keys)
    require_finite(layer, a, b)
    return a, b


def _layer_of(name: str) -> str:
    return name.removeprefix(PEFT_PREFIX).rpartition(".")[0]


def _part_of(name: str) -> str:
    return name.rpartition(".")[2]


def _require_same(
    factors: Mapping[str, torch.Tensor],
    plane: Mapping[str, torch.Tensor],
    base: Mapping[str, QuantTensor],
    *,
    compare: bool,
    where: str,
) -> None:
    """Layers of both must agree; bytes too where the base is the one of training (`compare`). A plane leaves out trained experts that did not change."""
    whole = convention.fused_names(base)
    other = sorted((plane.keys() - factors.keys()) | {name for name in factors.keys() - plane.keys() if whole[name] == name})
    if other:
        raise CheckpointError(
            f"factors and scale plane are of different layers: {name_some(other)}", where=where, remedy="write the scale plane again"
        )
    changed = [name for name, data in factors.items() if compare and not torch.equal(data.cpu(), plane.get(name, base[name].scales.cpu()))]
    if changed:
        raise CheckpointError(
            f"the scale plane is not what the factors give on this base: {name_some(changed)}",
            where=where,
            remedy="write the scale plane again from the factors",
        )


def load_adapter(
    model: Any,
    folder: Path | str,
    *,
    adapter: str = "default",
    root: Path | str | None = None,
    allow_no_change: bool = True,
    probe: Callable[[Any], torch.Tensor] | None = None,
) -> PeftModel:
    """`PeftModel.from_pretrained` after every check, its manifest's included where there is one; `model` is untouched when one fails.

    allow_no_change: admit factors that move no scale byte (an untrained adapter). probe: a forward; the same output with and without the adapter
    is refused. Raises ModelError, CheckpointError, FingerprintMismatch, GridMismatch, FormatError.
    """
    folder = Path(folder)
    opened = open_adapter(folder, root=root, manifest_required=False, config_required=True)
    config = opened.peft_config()
    check_safetensors(folder / ADAPTER_NAME)
    base = BasePlanes.from_model(model)
    mismatches = _mismatches(opened, config, base) if opened.manifest is not None else _config_mismatches(config, base)
    if mismatches:
        raise FingerprintMismatch(mismatches[0], where=str(folder), remedy="use the base it was trained on")
    grids = {tensor.format.grid.name for tensor in base.quantized.values()}
    if config.grid is not None and config.grid not in grids:
        raise GridMismatch(
            f"adapter was trained on grid {printable(config.grid)}, the base has {', '.join(sorted(grids))} scales",
            where=str(folder),
            remedy="train it again on this format",
        )
    factors = read_planes_file(folder / ADAPTER_NAME)
    planes = factor_planes(factors, config, base.quantized, str(folder))
    _require_targets(config, {_layer_of(name) for name in factors}, base.quantized, str(folder))
    if not allow_no_change and all(torch.equal(data, base.quantized[name].scales) for name, data in planes.items()):
        raise CheckpointError(NO_CHANGE, where=str(folder), remedy="train it, or declare it with allow_no_change")
    if opened.manifest is not None and opened.has(SCALE_PLANE_NAME):
        plane = ScalePlane.read(folder).by_linear(base.scales().tensors)
        _require_same(planes, plane.tensors, base.quantized, compare=True, where=str(folder))
    before = probe(model) if probe is not None else None
    loaded = PeftModel.from_pretrained(model, str(folder), adapter_name=adapter, config=config)
    if probe is not None and before is not None and torch.equal(before, probe(loaded)):
        loaded.unload()
        raise ModelError("the probe's output is the same with and without the adapter", where=str(folder), remedy="check its layers")
    return loaded


def _config_mismatches(config: ScaleQLoraConfig, base: BasePlanes) -> list[str]:
    pairs = [("code_plane", config.code_plane, base.code_plane), ("scale_plane", config.scale_plane, base.scale_plane)]
    return [
        f"the adapter's {name} is {printable(wanted[:12])[1:-1]}, the base has {found[:12]}"
        for name, wanted, found in pairs
        if wanted not in (None, found) and wanted is not None
    ]
