"""Merges of the baselines: new planes into a copy of the base checkpoint, and what the written files have lost, measured.

A merge knows three weights of every layer: W0 of the base, W of the unmerged forward, and M that the written checkpoint means. With ||.|| the Frobenius norm over a layer, or over all

    lost = ||W - M|| / ||W - W0||      share of the correction lost: 0 for an exact merge, 1 for one that is as far from W as the base
    max_abs_dw = max |W - M|           returned = share of the scale blocks that the adapter moved and the merge put back to W0

all in float32. M is read back from disk. QAT-LoRA's merge writes the planes of its forward pass: it must measure 0, else it is refused. PEQA's and PEQA-block's round their scales for the first time,
and keep every code. Merges that re-quantize a whole model (`training.posthoc`) use the same writer; where they folded factors into neighbours (AWQ), M is the weight unfolded.

Fused experts are stored per expert, under the names that the checkpoint uses. The folder appears by renaming, its manifest last.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from prism_ray.adapters.baselines.layer import BaselineLayer
from prism_ray.adapters.scale_plane import base_model, base_planes
from prism_ray.core.errors import FingerprintMismatch, MergeLoss, ModelError
from prism_ray.core.files import atomic_folder, require_disk
from prism_ray.core.manifest import MANIFEST_NAME, read_manifest, write_manifest
from prism_ray.formats import compressed_tensors as convention
from prism_ray.formats.checkpoint import KIND, read_config, read_quantized
from prism_ray.formats.config_groups import FUSED_PARTS
from prism_ray.formats.safetensors_io import shard_map, write_shard
from prism_ray.formats.tensor import QuantTensor, code_plane_fingerprint, scale_plane_fingerprint
from prism_ray.quantizers.base import Factors


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """One weight [O, I] as the unmerged forward computes it. name: in the model; expert: its number in a fused weight, or None. base: W0, weight: W, float32;
    factors: what a merge folded into it."""

    name: str
    base: Tensor
    weight: Tensor
    expert: int | None = None
    factors: Factors | None = None


@dataclass(frozen=True, kw_only=True)
class LayerLoss:
    """See the module. codes, scales: how many 4-bit codes and scales changed, of how many; code_bytes, scale_bytes: how many stored bytes."""

    max_abs_dw: float
    lost: float
    returned: float
    codes: int
    of_codes: int
    scales: int
    of_scales: int
    code_bytes: int
    scale_bytes: int


@dataclass(frozen=True, kw_only=True)
class BaselineMerge:
    """Per layer and in total. method: the adapter's; rule: how planes were made. records: of a quantizer, by weight."""

    method: str
    rule: str
    layers: dict[str, LayerLoss]
    max_abs_dw: float
    lost: float
    returned: float
    code_bytes: int
    scale_bytes: int
    codes_identical: bool
    code_plane: str
    scale_plane: str
    records: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a manifest."""
        return asdict(self)


def baseline_layers(model: Any, adapter: str = "default") -> dict[str, BaselineLayer]:
    """Module path in the base model -> tuner layer that holds `adapter`; ModelError where there is none."""
    modules = base_model(model).named_modules()
    found = {name: module for name, module in modules if isinstance(module, BaselineLayer) and adapter in module.rules}
    if not found:
        raise ModelError(f"the model holds no baseline adapter called '{adapter}'", where=adapter)
    return found


def merge_baseline(
    model: Any,
    base_folder: Path | str,
    out: Path | str,
    *,
    adapter: str = "default",
    tolerance: float | None = None,
    replace: bool = False,
) -> BaselineMerge:
    """Merge a QAT-LoRA, PEQA or PEQA-block adapter into a copy of the checkpoint that its base was loaded from.

    tolerance: largest max |dW| that is accepted; None: 0 for QAT-LoRA, whose merge is exact, and any for the others, whose loss is what one wants to know. Raises FingerprintMismatch when the
    model's planes are not the checkpoint's, FormatError for parameters that are not finite, MergeLoss; `out` is left as it was.
    """
    layers = baseline_layers(model, adapter)
    method = model.peft_config[adapter].METHOD
    if any(layer.merged_adapters for layer in layers.values()):
        raise ModelError("an adapter is merged in place, so the base's planes are not there", where=adapter, remedy="unmerge it first")
    planes: dict[str, QuantTensor] = {}
    for name, layer in layers.items():
        codes, scales = layer.merged_planes(adapter)
        held = layer.base_layer.quant_tensor()
        planes[name] = QuantTensor(codes=codes, scales=scales, tensor_scale=held.tensor_scale, format=held.format, divisor=held.divisor)

    def wanted() -> Iterator[Wanted]:
        for name, layer in layers.items():
            for weight in layer.adapted(adapter):
                yield Wanted(name=name, base=weight.base(), weight=weight.weight(), expert=weight.expert)

    exact = method == "qat_lora"
    allowed = 0.0 if tolerance is None and exact else tolerance
    return write_merge(model, base_folder, out, planes, wanted(), method=method, rule="own", allowed=allowed, replace=replace)


def write_merge(
    model: Any,
    base_folder: Path | str,
    out: Path | str,
    planes: Mapping[str, QuantTensor],
    wanted: Iterable[Wanted],
    *,
    method: str,
    rule: str,
    plain: Mapping[str, Tensor] | None = None,
    records: Mapping[str, Any] | None = None,
    allowed: float | None = None,
    replace: bool = False,
) -> BaselineMerge:
    """Write `planes` (by the model's names, experts [E, O, I]) and `plain` tensors into a copy of a checkpoint, read it again and compare it with `wanted`."""
    base_folder = Path(base_folder)
    spec, before, _ = read_quantized(base_folder)
    fused = convention.fuse_experts(before)
    _require_same_base(model, fused)
    files = shard_map(base_folder)
    replaced: dict[str, Tensor] = dict(plain or {})
    for name, tensor in planes.items():
        tables = (convention.stored_parts(base_model(model)), FUSED_PARTS)
        forms = [convention.to_checkpoint(name, tensor, table) for table in tables]
        replaced |= next((form for form in forms if form.keys() <= files.keys()), forms[0])
    if missing := sorted(replaced.keys() - files.keys()):
        raise ModelError(f"the checkpoint has no tensor '{missing[0]}'", where=str(base_folder), remedy="merge into the adapter's base")
    require_disk(out, int(1.05 * sum((base_folder / shard).stat().st_size for shard in set(files.values()))), "the merged checkpoint")
    with atomic_folder(out, replace=replace) as temporary:
        _rewrite(base_folder, temporary, replaced)
        _, after, _ = read_quantized(temporary)
        report = _measure(convention.fuse_experts(after), fused, wanted, method, rule, records or {})
        if allowed is not None and not report.max_abs_dw <= allowed:
            raise MergeLoss(
                f"max |dW| = {report.max_abs_dw:.3g} on the written checkpoint, allowed {allowed:.3g}",
                where=str(out),
                remedy="raise the tolerance, or serve the adapter unmerged",
            )
        fields: dict[str, Any] = {"format": spec.name, "source": str(read_config(base_folder).get("_name_or_path") or "")}
        if (base_folder / MANIFEST_NAME).is_file():
            base = read_manifest(base_folder, KIND, verify=False)
            fields |= {key: base[key] for key in ("packing", "scale_rule", "method", "plan", "kept") if key in base}
            fields |= {"base_code_plane": base["code_plane"], "base_scale_plane": base["scale_plane"]}
        write_manifest(temporary, KIND, code_plane=report.code_plane, scale_plane=report.scale_plane, merge=report.to_dict(), **fields)
    return report


def _require_same_base(model: Any, stored: Mapping[str, QuantTensor]) -> None:
    """Raises FingerprintMismatch naming the first weight whose planes differ between model and checkpoint."""
    for name, tensor in base_planes(model).items():
        found = stored.get(name)
        if found is None or not all(
            torch.equal(getattr(tensor, part).cpu(), getattr(found, part)) for part in ("codes", "scales", "tensor_scale")
        ):
            raise FingerprintMismatch(
                "planes of the model and of the checkpoint differ", where=name, remedy="merge into the base that the adapter was trained on"
            )


def _rewrite(base: Path, out: Path, replaced: Mapping[str, Tensor]) -> None:
    """Copy a checkpoint folder with other tensors, in the dtypes that it stores them in; one shard in memory at a time."""
    shards = set(shard_map(base).values())
    for path in sorted(base.iterdir()):
        if path.is_file() and path.name not in shards and path.name != MANIFEST_NAME:
            shutil.copyfile(path, out / path.name)
    for shard in sorted(shards):
        tensors = load_file(base / shard)
        for key in tensors.keys() & replaced.keys():
            tensors[key] = replaced[key].detach().cpu().to(tensors[key].dtype).contiguous()
        write_shard(out / shard, tensors)


@dataclass
class _Sums:
    """Additive over the experts of a layer, and over layers."""

    worst: float = 0.0
    off: float = 0.0
    moved: float = 0.0
    moved_blocks: int = 0
    returned: int = 0

    def add(self, wanted: Wanted, merged: Tensor, block: int) -> None:
        """merged: M, float32 [O, I]."""
        base, weight = wanted.base.cpu(), wanted.weight.cpu()
        error = (weight - merged).abs()
        self.worst = float(torch.tensor([self.worst, float(error.max())]).max())  # keeps a NaN
        self.off += float(error.double().square().sum())
        self.moved += float((weight - base).double().square().sum())
        changed = (weight != base).view(base.shape[0], -1, block).any(-1)
        self.moved_blocks += int(changed.sum())
        self.returned += int((changed & (merged == base).view(base.shape[0], -1, block).all(-1)).sum())

    def shares(self) -> tuple[float, float]:
        """(lost, returned)."""
        lost = (self.off / self.moved) ** 0.5 if self.moved else 0.0 if not self.off else float("inf")
        return lost, self.returned / self.moved_blocks if self.moved_blocks else 0.0


def _measure(
    after: Mapping[str, QuantTensor],
    before: Mapping[str, QuantTensor],
    wanted: Iterable[Wanted],
    method: str,
    rule: str,
    records: Mapping[str, Any],
) -> BaselineMerge:
    """Compare every weight that `wanted` names, as written, with the unmerged forward's, and all planes with the base's."""
    sums: dict[str, _Sums] = {}
    for weight in wanted:
        written = after[weight.name] if weight.expert is None else after[weight.name][weight.expert]
        merged = written.dequantize()
        sums.setdefault(weight.name, _Sums()).add(
            weight, merged if weight.factors is None else weight.factors.unfold(merged), written.format.block
        )
    layers = {name: _layer_loss(found, before[name], after[name]) for name, found in sums.items()}
    whole = _Sums(**{part: sum(getattr(found, part) for found in sums.values()) for part in ("off", "moved", "moved_blocks", "returned")})
    lost, returned = whole.shares()
    return BaselineMerge(
        method=method,
        rule=rule,
        layers=layers,
        max_abs_dw=float(torch.tensor([found.worst for found in sums.values()], dtype=torch.float64).max()),
        lost=lost,
        returned=returned,
        code_bytes=sum(int((after[name].codes != before[name].codes).sum()) for name in before),
        scale_bytes=sum(int((after[name].scales != before[name].scales).sum()) for name in before),
        codes_identical=all(torch.equal(after[name].codes, before[name].codes) for name in before),
        code_plane=code_plane_fingerprint(dict(after)),
        scale_plane=scale_plane_fingerprint(dict(after)),
        records=dict(records),
    )


def _layer_loss(sums: _Sums, before: QuantTensor, after: QuantTensor) -> LayerLoss:
    lost, returned = sums.shares()
    codes = before.codes ^ after.codes
    scales = before.scales != after.scales
    whole = scales.view(*scales.shape[:-1], -1, before.format.grid.width).any(-1)
    return LayerLoss(
        max_abs_dw=sums.worst,
        lost=lost,
        returned=returned,
        codes=int((codes & 15 > 0).sum()) + int((codes >> 4 > 0).sum()),
        of_codes=2 * codes.numel(),
        scales=int(whole.sum()),
        of_scales=whole.numel(),
        code_bytes=int((codes > 0).sum()),
        scale_bytes=int(scales.sum()),
    )
