"""Merge: write an adapter's on-grid scale bytes into a copy of the base checkpoint, codes verbatim; then measure what was written.

The bytes come from `qast.effective_scales`, the function that every forward pass called, so max |dW| = 0 by construction. It is measured all the same:
the written checkpoint is read again and each weight compared with the one the unmerged forward uses (field case ADP-01).

Shards are rewritten one at a time; tensors other than `weight_scale` are copied byte for byte. The result appears by renaming.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from prism_ray.adapters.qast import corrected_scales, effective_scales, require_finite
from prism_ray.adapters.scale_qlora.config import ScaleQLoraConfig
from prism_ray.adapters.scale_qlora.layer import ScaleQLoraLinear
from prism_ray.core.errors import FingerprintMismatch, GridMismatch, MergeLoss, ModelError
from prism_ray.core.files import atomic_folder, atomic_path, require_disk
from prism_ray.core.manifest import MANIFEST_NAME, read_manifest, write_manifest
from prism_ray.formats import compressed_tensors as convention
from prism_ray.formats.checkpoint import KIND, read_config, read_quantized
from prism_ray.formats.modules import planes
from prism_ray.formats.safetensors_io import METADATA, shard_map
from prism_ray.formats.tensor import QuantTensor, code_plane_fingerprint, scale_plane_fingerprint

ADAPTER_KIND = "scale-adapter"
SCALE_PLANE_NAME = "scale_plane.safetensors"
ADAPTER_NAME = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, kw_only=True)
class LayerMerge:
    """blocks: scale blocks of the layer; changed: blocks whose byte the merge changed; clamped: corrected scales outside the grid's range before
    the clip (zero scales, which stay zero, not counted);
    lost_correction: share of the on-grid correction (L1, relative to the base scale) that the written bytes do not carry; max_abs_dw: largest
    |merged - unmerged forward| weight, measured on the written file."""

    blocks: int
    changed: int
    clamped: int
    lost_correction: float
    max_abs_dw: float


@dataclass(frozen=True, kw_only=True)
class MergeReport:
    """Per layer and in total; `max_abs_dw` must be exactly 0.0."""

    layers: dict[str, LayerMerge]
    max_abs_dw: float
    changed: int
    blocks: int
    code_plane: str
    scale_plane: str
    codes_identical: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a manifest."""
        return asdict(self)


def adapter_layers(model: Any, adapter: str = "default") -> dict[str, ScaleQLoraLinear]:
    """Module path in the base model -> tuner layer that holds `adapter`; raises ModelError where there is none."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    found = {name: module for name, module in base.named_modules() if isinstance(module, ScaleQLoraLinear) and adapter in module.qast_A}
    if not found:
        raise ModelError(f"the model holds no Scale-QLoRA adapter called '{adapter}'", where=adapter)
    return found


def base_planes(model: Any) -> dict[str, QuantTensor]:
    """Every quantized weight of the base by name, with the scales that it had before an adapter was merged in place (views, no copy)."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    found = planes(base)
    for name, module in base.named_modules():
        if isinstance(module, ScaleQLoraLinear):
            found[name] = found[name].with_scales(module.base_scales)
    return found


def _require_same_base(model: Any, quantized: dict[str, QuantTensor]) -> None:
    """Compare all planes of the model, experts one by one, with those read from a checkpoint; raises FingerprintMismatch naming the first other."""
    fields = {convention.CODES: "codes", convention.SCALES: "scales", convention.DIVISOR: "divisor"}
    for name, tensor in base_planes(model).items():
        for key, value in convention.to_checkpoint(name, tensor).items():
            module, _, part = key.rpartition(".")
            stored = getattr(quantized.get(module), fields[part], None)
            found = value.cpu().view(torch.uint8).flatten()
            if stored is None or not torch.equal(stored.reshape(value.shape).contiguous().view(torch.uint8).flatten(), found):
                what = "codes" if part == convention.CODES else "scales"
                raise FingerprintMismatch(
                    f"{what} of the model and of the checkpoint differ",
                    where=name,
                    remedy="merge into the base that the adapter was trained on",
                )


def merge_to_folder(
    model: Any, base_folder: Path | str, out: Path | str, *, adapter: str = "default", tolerance: float = 0.0, replace: bool = False
) -> MergeReport:
    """Merge `adapter` of a PEFT model into a copy of the checkpoint its base was loaded from.

    Raises FingerprintMismatch when the model's codes or base scales are not the checkpoint's, GridMismatch for another grid, FormatError for non-finite factors,
    MergeLoss when the measured max |dW| exceeds `tolerance`; in each case `out` is left as it was.
    """
    base_folder = Path(base_folder)
    layers = adapter_layers(model, adapter)
    config: ScaleQLoraConfig = model.peft_config[adapter]
    spec, quantized, _ = read_quantized(base_folder)
    if config.grid not in (None, spec.grid.name):
        raise GridMismatch(
            f"adapter was trained on grid {config.grid}, the checkpoint has {spec.grid.name} scales",
            where=str(base_folder),
            remedy="train on this format",
        )
    _require_same_base(model, quantized)
    for name, layer in layers.items():
        require_finite(name, layer.qast_A[adapter], layer.qast_B[adapter])
    planes = {name: layer.scale_bytes(adapter).cpu() for name, layer in layers.items()}
    size = sum((base_folder / file).stat().st_size for file in set(shard_map(base_folder).values()))
    require_disk(out, int(size * 1.05), "the merged checkpoint")
    with atomic_folder(out, replace=replace) as temporary:
        _rewrite(base_folder, temporary, planes)
        report = _measure(temporary, layers, adapter, quantized)
        if not report.max_abs_dw <= tolerance or not report.codes_identical:
            raise MergeLoss(
                f"max |dW| = {report.max_abs_dw:.3g} on the written checkpoint, allowed {tolerance:.3g}",
                where=str(out),
                remedy="report this: it is 0 by construction",
            )
        fields: dict[str, Any] = {
            "format": spec.name,
            "merged_adapter": adapter,
            "source": str(read_config(base_folder).get("_name_or_path") or ""),
            "merge": report.to_dict(),
        }
        if (base_folder / MANIFEST_NAME).is_file():
            base = read_manifest(base_folder, KIND, verify=False)
            fields |= {key: base[key] for key in ("packing", "scale_rule", "method", "plan", "kept") if key in base}
            fields["base_scale_plane"] = base["scale_plane"]
        write_manifest(temporary, KIND, code_plane=report.code_plane, scale_plane=report.scale_plane, **fields)
    return report


def _rewrite(base: Path, out: Path, planes: dict[str, torch.Tensor]) -> None:
    """Copy a checkpoint folder, replacing the scale tensors of the layers in `planes`."""
    shards = set(shard_map(base).values())
    for path in sorted(base.iterdir()):
        if path.is_file() and path.name not in shards and path.name != MANIFEST_NAME:
            shutil.copyfile(path, out / path.name)
    for shard in sorted(shards):
        tensors = load_file(base / shard)
        for name, data in planes.items():
            key = f"{name}.{convention.SCALES}"
            if key in tensors:
                tensors[key] = data.view(tensors[key].dtype).contiguous()
        save_file(tensors, out / shard, metadata=METADATA)


def _measure(written: Path, layers: dict[str, ScaleQLoraLinear], adapter: str, base: dict[str, Any]) -> MergeReport:
    """Read `written` again and compare every adapted weight with the unmerged forward's."""
    _, merged, _ = read_quantized(written)
    reports: dict[str, LayerMerge] = {}
    for name, layer in layers.items():
        spec = layer.base_layer.format
        grid = spec.grid
        factors = layer.qast_A[adapter].detach(), layer.qast_B[adapter].detach()
        raw = corrected_scales(layer.base_scales, *factors, layer.scaling[adapter], spec).cpu()
        forward_bytes = layer.scale_bytes(adapter).cpu()
        old, new = grid.decode(base[name].scales), grid.decode(merged[name].scales)
        forward = layer.base_layer.dequantize(torch.float32, grid.decode(layer.scale_bytes(adapter))).cpu()
        wanted = grid.decode(forward_bytes)
        correction = (wanted - old).abs().sum()
        reports[name] = LayerMerge(
            blocks=old.numel(),
            changed=int((merged[name].scales != base[name].scales).sum()),
            clamped=int((((raw > grid.largest) | (raw < grid.smallest)) & (old > 0)).sum()),
            lost_correction=float((wanted - new).abs().sum() / correction) if correction > 0 else 0.0,
            max_abs_dw=float((merged[name].dequantize() - forward).abs().max()),
        )
    return MergeReport(
        layers=reports,
        max_abs_dw=float(torch.tensor([report.max_abs_dw for report in reports.values()], dtype=torch.float64).max()),  # keeps a NaN
        changed=sum(report.changed for report in reports.values()),
        blocks=sum(report.blocks for report in reports.values()),
        code_plane=code_plane_fingerprint(convention.fuse_experts(merged)),
        scale_plane=scale_plane_fingerprint(convention.fuse_experts(merged)),
        codes_identical=all(torch.equal(merged[name].codes, base[name].codes) for name in base),
    )


def write_scale_plane(model: Any, adapter_folder: Path | str, *, adapter: str = "default", **fields: Any) -> dict[str, Any]:
    """Add `scale_plane.safetensors` (the on-grid bytes of every adapted layer) and the manifest to a saved PEFT adapter folder.

    fields: further manifest entries (metrics, base source). Returns the manifest. The plane goes through a temporary file; the manifest is last.
    The factors are those of the folder's file: under ZeRO-3 the model itself holds only a part of them on each worker. The base's fingerprints come from
    the adapter's config, or from the model where the config has none. Raises FormatError for factors that are not finite.
    """
    folder = Path(adapter_folder)
    layers = adapter_layers(model, adapter)
    config: ScaleQLoraConfig = model.peft_config[adapter]
    saved = load_file(folder / ADAPTER_NAME)
    planes: dict[str, torch.Tensor] = {}
    for name, layer in layers.items():
        a, b = (saved[f"{PEFT_PREFIX}{name}.{part}"] for part in ("qast_A", "qast_B"))
        require_finite(name, a, b)
        planes[name] = effective_scales(layer.base_scales.cpu(), a, b, layer.scaling[adapter], layer.base_layer.format).contiguous()
    with atomic_path(folder / SCALE_PLANE_NAME) as temporary:
        save_file(planes, temporary)
    spec = next(iter(layers.values())).base_layer.format
    identity = {"format": spec.name, "grid": spec.grid.name, "block": spec.block, "rank": config.r, "alpha": config.alpha}
    return write_manifest(
        folder,
        ADAPTER_KIND,
        base_code_plane=config.code_plane or code_plane_fingerprint(base_planes(model)),
        base_scale_plane=config.scale_plane or scale_plane_fingerprint(base_planes(model)),
        **identity,
        **fields,
    )
