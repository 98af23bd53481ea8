"""Merge: write an adapter's on-grid scale bytes into a copy of the base checkpoint, codes verbatim; then measure what was written.

The bytes come from `qast.effective_scales`, the function that every forward pass called, so max |dW| = 0 by construction. It is measured all the same:
the written checkpoint is read again and each weight compared with the one the unmerged forward uses (`merge_report`, field case ADP-01). An adapter
trained without QAST is rounded here for the first time: its max |dW| is not 0, and only a tolerance accepts it.

Policy for corrections that the grid swallows, of E8M0 above all: the merged checkpoint is what QAST trained, so it is written as long as one byte moves;
a merge that would return the base, or one whose swallowed share exceeds `max_swallowed`, is refused.

Shards are rewritten one at a time; tensors other than `weight_scale` are copied byte for byte. Fused experts are stored per expert, under the names that
the checkpoint uses. The result appears by renaming.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from prism_ray.adapters.merge_report import LayerMerge, MergeReport, Probe, measure_layer, output_errors, stitched
from prism_ray.adapters.qast import ROUNDING, require_finite
from prism_ray.adapters.scale_plane import (
    ADAPTER_KIND,
    ADAPTER_NAME,
    PEFT_PREFIX,
    SCALE_PLANE_NAME,
    adapter_layers,
    base_model,
    base_planes,
    read_scale_plane,
    write_scale_plane,
)
from prism_ray.adapters.scale_qlora.config import ScaleQLoraConfig
from prism_ray.adapters.scale_qlora.layer import ScaleQLoraLayer
from prism_ray.core.errors import FingerprintMismatch, GridMismatch, MergeLoss
from prism_ray.core.files import atomic_folder, require_disk
from prism_ray.core.manifest import MANIFEST_NAME, read_manifest, write_manifest
from prism_ray.formats import compressed_tensors as convention
from prism_ray.formats.checkpoint import KIND, read_config, read_quantized
from prism_ray.formats.config_groups import FUSED_PARTS
from prism_ray.formats.safetensors_io import METADATA, shard_map
from prism_ray.formats.tensor import QuantTensor, code_plane_fingerprint, scale_plane_fingerprint

__all__ = [
    "ADAPTER_KIND",
    "ADAPTER_NAME",
    "PEFT_PREFIX",
    "SCALE_PLANE_NAME",
    "LayerMerge",
    "MergeReport",
    "adapter_layers",
    "base_planes",
    "merge_to_folder",
    "read_scale_plane",
    "write_scale_plane",
]


class _Stored:
    """How a checkpoint stores the model's weights: fused experts under the names of Linear modules, which differ by family and by writer."""

    def __init__(self, model: Any, names: Mapping[str, Any]):
        self._candidates = (convention.stored_parts(base_model(model)), FUSED_PARTS)
        self._names = names

    def table(self, name: str) -> Mapping[str, tuple[str, ...]]:
        """Fused parameter -> its stored parts, as the checkpoint has them for the expert weight `name`."""
        prefix, _, parameter = name.rpartition(".")
        fitting = (parts for parts in self._candidates if all(f"{prefix}.0.{part}" in self._names for part in parts[parameter]))
        return next(fitting, self._candidates[0])

    def parts(self, name: str, expert: int | None) -> list[str]:
        """Names of the stored weights that make up a linear layer (expert None), or one expert of a fused weight, from top to bottom."""
        if expert is None:
            return [name]
        prefix, _, parameter = name.rpartition(".")
        return [f"{prefix}.{expert}.{part}" for part in self.table(name)[parameter]]


def _require_same_base(model: Any, quantized: dict[str, QuantTensor], stored: _Stored) -> None:
    """Compare all planes of the model, experts one by one, with those read from a checkpoint; raises FingerprintMismatch naming the first other."""
    fields = {convention.CODES: "codes", convention.SCALES: "scales", convention.DIVISOR: "divisor"}
    for name, tensor in base_planes(model).items():
        table = stored.table(name) if len(tensor.shape) == 3 else FUSED_PARTS
        for key, value in convention.to_checkpoint(name, tensor, table).items():
            module, _, part = key.rpartition(".")
            held = getattr(quantized.get(module), fields[part], None)
            found = value.cpu().view(torch.uint8).flatten()
            if held is None or not torch.equal(held.reshape(value.shape).contiguous().view(torch.uint8).flatten(), found):
                what = "codes" if part == convention.CODES else "scales"
                raise FingerprintMismatch(
                    f"{what} of the model and of the checkpoint differ",
                    where=name,
                    remedy="merge into the base that the adapter was trained on",
                )


def merge_to_folder(
    model: Any,
    base_folder: Path | str,
    out: Path | str,
    *,
    adapter: str = "default",
    tolerance: float = 0.0,
    max_output_error: float | None = None,
    max_swallowed: float | None = None,
    probe: Probe | None = None,
    replace: bool = False,
) -> MergeReport:
    """Merge `adapter` of a PEFT model into a copy of the checkpoint its base was loaded from.

    probe: a batch on which each layer's output is compared, unmerged and merged. Raises FingerprintMismatch when the model's codes or base scales are not the
    checkpoint's, GridMismatch for another grid, FormatError for non-finite factors, and MergeLoss when the measured max |dW| exceeds `tolerance`, a layer's
    output error `max_output_error`, or the share of corrections that moved no byte `max_swallowed` (default: when none moved one; 1.0 accepts even that).
    In each case `out` is left as it was.
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
    stored = _Stored(model, quantized)
    _require_same_base(model, quantized, stored)
    for name, layer in layers.items():
        require_finite(name, layer.qast_A[adapter], layer.qast_B[adapter])
    planes = _written_planes(layers, adapter, stored, quantized)
    size = sum((base_folder / file).stat().st_size for file in set(shard_map(base_folder).values()))
    require_disk(out, int(size * 1.05), "the merged checkpoint")
    with atomic_folder(out, replace=replace) as temporary:
        _rewrite(base_folder, temporary, planes)
        report = _measure(temporary, model, adapter, quantized, stored, probe)
        _require_lossless(report, str(out), config.qast, tolerance, max_output_error, max_swallowed)
        fields: dict[str, Any] = {
            "format": spec.name,
            "rounding": ROUNDING[spec.grid.name],
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


def _require_lossless(
    report: MergeReport, where: str, qast: bool, tolerance: float, max_output_error: float | None, max_swallowed: float | None
) -> None:
    if not report.max_abs_dw <= tolerance or not report.codes_identical or not report.rest_identical:
        rounding = "the adapter was trained without rounding (qast=false): train it with, or give a tolerance that accepts the loss"
        whole = report.codes_identical and report.rest_identical
        raise MergeLoss(
            f"max |dW| = {report.max_abs_dw:.3g} on the written checkpoint, allowed {tolerance:.3g}"
            + ("" if whole else "; tensors that a merge never touches differ too"),
            where=where,
            remedy=rounding if whole and not qast else "report this: it is 0 by construction",
        )
    if max_output_error is not None and report.output_error is not None and not report.output_error <= max_output_error:
        worst = max((layer.output_error or 0.0, name) for name, layer in report.layers.items())[1]
        raise MergeLoss(
            f"relative output error {report.output_error:.3g} at {worst}, allowed {max_output_error:.3g}",
            where=where,
            remedy="serve the adapter unmerged, or train it with qast=true",
        )
    swallowed = report.corrected > 0 and report.changed == 0 if max_swallowed is None else report.swallowed > max_swallowed
    if swallowed:
        raise MergeLoss(
            f"{report.swallowed:.4%} of {report.corrected} scale corrections moved no byte"
            + (": the merged checkpoint would be the base" if report.changed == 0 else ""),
            where=where,
            remedy="train with a higher rate or alpha, use nvfp4, whose steps are finer, or raise max_swallowed",
        )


def _written_planes(
    layers: Mapping[str, ScaleQLoraLayer], adapter: str, stored: _Stored, base: Mapping[str, QuantTensor]
) -> dict[str, torch.Tensor]:
    """Stored weight -> the scale bytes to write. Experts that the adapter does not train are not in it."""
    planes: dict[str, torch.Tensor] = {}
    for name, layer in layers.items():
        for correction in layer.corrections(adapter):
            names = stored.parts(name, correction.expert)
            rows = [base[part].scales.shape[0] for part in names]
            planes |= dict(zip(names, correction.scale_bytes().cpu().split(rows), strict=True))
    return planes


def _rewrite(base: Path, out: Path, planes: dict[str, torch.Tensor]) -> None:
    """Copy a checkpoint folder, replacing the scale tensors of the stored weights in `planes`."""
    shards = set(shard_map(base).values())
    for path in sorted(base.iterdir()):
        if path.is_file() and path.name not in shards and path.name != MANIFEST_NAME:
            shutil.copyfile(path, out / path.name)
    for shard in sorted(shards):
        tensors = load_file(base / shard)
        for key in list(tensors):
            name, _, part = key.rpartition(".")
            if part == convention.SCALES and name in planes:
                tensors[key] = planes[name].contiguous().view(tensors[key].dtype)
        save_file(tensors, out / shard, metadata=METADATA)


def _measure(written: Path, model: Any, adapter: str, base: dict[str, QuantTensor], stored: _Stored, probe: Probe | None) -> MergeReport:
    """Read `written` again and compare every adapted weight, and on a probe every adapted layer's output, with the unmerged forward's."""
    _, merged, _ = read_quantized(written)
    layers = adapter_layers(model, adapter)

    def weight(name: str, expert: int | None, dtype: torch.dtype) -> torch.Tensor:
        return stitched(stored.parts(name, expert), merged).dequantize(dtype)

    errors = {} if probe is None else output_errors(model, layers, adapter, weight, probe)
    reports: dict[str, LayerMerge] = {}
    unmoved = 0
    touched: set[str] = set()
    for name, layer in layers.items():
        parts = {correction.expert: stored.parts(name, correction.expert) for correction in layer.corrections(adapter)}
        touched |= {part for names in parts.values() for part in names}
        reports[name], still = measure_layer(layer, adapter, parts, base, merged, errors.get(name))
        unmoved += still
    corrected = sum(report.corrected for report in reports.values())
    return MergeReport(
        layers=reports,
        max_abs_dw=_largest([report.max_abs_dw for report in reports.values()]),
        changed=sum(report.changed for report in reports.values()),
        blocks=sum(report.blocks for report in reports.values()),
        corrected=corrected,
        swallowed=unmoved / corrected if corrected else 0.0,
        output_error=_largest(list(errors.values())) if errors else None,
        code_plane=code_plane_fingerprint(convention.fuse_experts(merged)),
        scale_plane=scale_plane_fingerprint(convention.fuse_experts(merged)),
        codes_identical=all(torch.equal(merged[name].codes, base[name].codes) for name in base),
        rest_identical=all(
            torch.equal(merged[name].tensor_scale, base[name].tensor_scale)
            and (name in touched or torch.equal(merged[name].scales, base[name].scales))
            for name in base
        ),
    )


def _largest(values: list[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).max())  # keeps a NaN
