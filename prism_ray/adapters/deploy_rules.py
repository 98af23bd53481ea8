"""Deploy rules: what a merged artifact becomes when a tool on its way re-derives codes and scales (scale-qlora §5.2, App. B.1).

A tool that loads a 4-bit checkpoint as weights and stores it as 4 bits again applies a rule of its own. The five of the paper, as data:

| rule | tensor scale t | block scale s | codes |
|---|---|---|---|
| nearest | from the largest |w| | grid(amax of the block / 6 / t) | to nearest, ties to even |
| toward-zero | as nearest | as nearest | the largest code at or below |w| |
| stochastic | as nearest | as nearest | one of the two neighbours at random, unbiased, seeded |
| whole-tensor | as nearest | one for all blocks, from the largest |w| | to nearest |
| saved-scalar | the one that the artifact stores | as nearest | to nearest |

On a format without a tensor scale saved-scalar is nearest. Weights that are served as one matrix keep one tensor scale (field case FMT-05): it is derived from the maximum of all of them. `nearest` is `quantizers.rtn` to the byte.

Truncation and stochastic rounding count a weight within SLACK below a reconstructed value k * s * t as on it: a derived t may miss the stored one by its last bit, and a
quotient w / (s t) that falls a rounding below 6 would truncate an untouched weight to 4. So a weight that lies on the grid of its new scales keeps its code under all three roundings. Stochastic
rounding draws from a generator seeded by (seed, tensor name), so the order of tensors does not matter.

`deploy_folder` writes the checkpoint that a tool would have written, and counts what it changed against the stored planes. The source is a quantized folder of any method (Scale-QLoRA, RTN or GPTQ merges, …) or, with
`template`, a full-precision folder (a merged LoRA, a QAT-LoRA's weight) whose layers, format and saved scalars are those of the template. Memory: the planes of the whole model, one group of weights in float32.

Refused: formats whose codes are not E2M1, NaN and infinity, fused 3-D expert parameters of a full-precision source. Legend: E experts (optional), O rows, I columns, G blocks a row.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from prism_ray.adapters.fixed_point import levels, require_fp4
from prism_ray.core.errors import CheckpointError, FormatError
from prism_ray.core.files import atomic_folder, require_disk
from prism_ray.core.manifest import MANIFEST_NAME, read_manifest, write_manifest
from prism_ray.core.registry import Registry
from prism_ray.formats import compressed_tensors as convention
from prism_ray.formats import e2m1
from prism_ray.formats.checkpoint import KIND, read_config, read_quantized
from prism_ray.formats.fusion import fused_groups
from prism_ray.formats.safetensors_io import read_tensors, shard_map, write_shard
from prism_ray.formats.spec import FormatSpec
from prism_ray.formats.tensor import QuantTensor, code_plane_fingerprint, scale_plane_fingerprint
from prism_ray.quantizers.rtn import tensor_scale_for


@dataclass(frozen=True, kw_only=True)
class DeployRule:
    """scalar: where the tensor scale comes from; scales: what a block scale is made for; rounding: of the codes."""

    name: str
    scalar: Literal["derived", "saved"] = "derived"
    scales: Literal["block", "tensor"] = "block"
    rounding: Literal["nearest", "zero", "stochastic"] = "nearest"


SLACK = 2.0**-20
"""Relative; a weight, a derived tensor scale and a level carry at most two roundings of 2^-24 each."""
RULES: Registry[DeployRule] = Registry("deploy rule")
for _rule in (
    DeployRule(name="nearest"),
    DeployRule(name="toward-zero", rounding="zero"),
    DeployRule(name="stochastic", rounding="stochastic"),
    DeployRule(name="whole-tensor", scales="tensor"),
    DeployRule(name="saved-scalar", scalar="saved"),
):
    RULES.add(_rule.name, _rule)


@dataclass(frozen=True, kw_only=True)
class Change:
    """What a rule did to one weight, against the stored planes. codes, scales: how many changed, of how many; scalar: whether the tensor scale did. weights: dequantized weights that
    differ in value; max_abs_dw: by how much at most; relative: ||W - W'|| / ||W||, 0 for an all-zero weight."""

    codes: int
    weights: int
    of_weights: int
    scales: int
    of_scales: int
    scalar: bool
    max_abs_dw: float
    relative: float

    @property
    def identity(self) -> bool:
        """Whether every stored byte is what it was."""
        return not (self.codes or self.scales or self.scalar)


@dataclass(frozen=True, kw_only=True)
class DeployReport:
    """Per weight, and the fingerprints of what was written."""

    rule: str
    seed: int
    scale_rule: str
    layers: dict[str, Change]
    code_plane: str
    scale_plane: str

    @property
    def identity(self) -> bool:
        """Whether the rule gave back every byte of every plane."""
        return all(change.identity for change in self.layers.values())

    @property
    def codes_changed(self) -> float:
        """Share of codes that the rule changed."""
        return sum(change.codes for change in self.layers.values()) / sum(change.of_weights for change in self.layers.values())

    @property
    def scales_changed(self) -> float:
        """Share of scale bytes that the rule changed."""
        return sum(change.scales for change in self.layers.values()) / sum(change.of_scales for change in self.layers.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a manifest."""
        return asdict(self) | {"codes_changed": self.codes_changed, "scales_changed": self.scales_changed}


def requantize(
    weight: Tensor,
    spec: FormatSpec,
    rule: str,
    *,
    amax: Tensor | None = None,
    saved: QuantTensor | None = None,
    scale_rule: str | None = None,
    seed: int = 0,
    name: str = "",
) -> QuantTensor:
    """A weight [..., O, I] under a deploy rule.

    amax: maximum [...] that a derived tensor scale is made for, default the weight's own. saved: the artifact whose tensor scale `saved-scalar` takes. scale_rule: of the grid, default the format's.
    seed, name: of stochastic rounding. Raises UnknownName for a rule, FormatError for a format or weight that cannot be rounded.
    """
    chosen, weight = RULES[rule], weight.detach().to(torch.float32)
    require_fp4(spec, name)
    groups = spec.blocks(weight.shape[-1], name)
    if not bool(torch.isfinite(weight).all()):
        raise FormatError("weight holds NaN or infinity", where=name, remedy="repair the source checkpoint")
    blocks = weight.reshape(*weight.shape[:-1], groups, spec.block)
    maxima = blocks.abs().amax(-1)
    whole = maxima.flatten(-2).amax(-1)
    if chosen.scalar == "saved" and spec.has_tensor_scale:
        if saved is None:
            raise FormatError("the saved-scalar rule needs the artifact's own tensor scale", where=name, remedy="give the stored planes")
        tensor_scale, divisor = saved.tensor_scale, saved.divisor
    else:
        tensor_scale, divisor = tensor_scale_for(whole if amax is None else torch.maximum(amax.to(whole), whole), spec)
    factor = tensor_scale.reshape(*tensor_scale.shape, 1, 1).expand(maxima.shape)
    wanted = maxima if chosen.scales == "block" else whole.reshape(*whole.shape, 1, 1).expand(maxima.shape)
    scales = spec.grid.encode_amax(wanted / factor, scale_rule or spec.amax_rule, spec.codes.largest)
    codes = _codes(blocks, spec.grid.decode(scales), factor, spec, chosen.rounding, _generator(seed, name))
    return QuantTensor(codes=e2m1.pack(codes.flatten(-2)), scales=scales, tensor_scale=tensor_scale, format=spec, divisor=divisor)


def _codes(blocks: Tensor, scale: Tensor, factor: Tensor, spec: FormatSpec, rounding: str, generator: torch.Generator) -> Tensor:
    """Codes uint8 of blocks [..., G, B] under decoded scales and tensor scales [..., G]; +-0 where a scale is zero."""
    if rounding == "nearest":
        step = (scale * factor).unsqueeze(-1)
        return spec.codes.round_to_codes(blocks / torch.where(step > 0, step, torch.inf))
    magnitude, found = blocks.abs(), levels(scale, factor)
    below = torch.zeros(blocks.shape, dtype=torch.int64)
    for level in range(1, 8):
        below += magnitude >= found[..., level, None] * (1 - SLACK)
    below *= (scale > 0).unsqueeze(-1)
    if rounding == "stochastic":
        low, high = (found.gather(-1, index) for index in (below, (below + 1).clamp(max=7)))
        gap = high - low
        share = torch.where(gap > 0, (magnitude - low) / torch.where(gap > 0, gap, 1.0), torch.zeros_like(gap))
        below += torch.rand(blocks.shape, generator=generator) < share
    return below.to(torch.uint8) | (torch.signbit(blocks).to(torch.uint8) << 3)


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def changes(stored: QuantTensor, new: QuantTensor, weight: Tensor | None = None) -> Change:
    """What differs between two quantized forms of one weight. weight: float32 [..., O, I] that the second was made from, default what the first decodes to."""
    before, after = stored.dequantize(), new.dequantize()
    weight = before if weight is None else weight.to(torch.float32)
    error = after - weight
    norm = float(torch.linalg.vector_norm(weight, dtype=torch.float64))
    differing = stored.codes ^ new.codes
    return Change(
        codes=int((differing & 15 > 0).sum()) + int((differing >> 4 > 0).sum()),
        weights=int((before != after).sum()),
        of_weights=before.numel(),
        scales=int((stored.scales != new.scales).sum()),
        of_scales=stored.scales.numel(),
        scalar=not torch.equal(stored.tensor_scale, new.tensor_scale),
        max_abs_dw=float(error.abs().max()),
        relative=float(torch.linalg.vector_norm(error, dtype=torch.float64)) / norm if norm else 0.0,
    )


def spread(accuracies: Mapping[str, float]) -> float:
    """Best minus worst accuracy over the rules: 0 for an artifact that is read as it is."""
    return max(accuracies.values()) - min(accuracies.values())


def deploy_folder(
    source: Path | str,
    out: Path | str,
    rule: str,
    *,
    template: Path | str | None = None,
    scale_rule: str | None = None,
    seed: int = 0,
    replace: bool = False,
) -> DeployReport:
    """Write `source` as a tool with that rule would store it; see the module docstring.

    template: the quantized folder that a full-precision source takes its layers from. scale_rule: default the one in the manifest, else each format's. Raises UnknownName, FormatError, CheckpointError, FileExistsError
    without `replace`, ResourceError; `out` is left as it was then.
    """
    source, stored = Path(source), Path(template or source)
    RULES[rule]  # a misspelt name is refused before a file is read
    spec, quantized, _ = read_quantized(stored)
    manifest = read_manifest(stored, KIND, verify=False) if (stored / MANIFEST_NAME).is_file() else {}
    written = str(manifest.get("scale_rule", ""))
    dense = dict(read_tensors(source)) if template is not None else {}
    planes: dict[str, QuantTensor] = {}
    report: dict[str, Change] = {}
    for group in fused_groups(quantized):
        weights = {name: _weight(name, quantized[name], dense if template is not None else None, source) for name in group}
        amax = torch.stack([weight.abs().amax() for weight in weights.values()]).amax()
        for name, weight in weights.items():
            old = quantized[name]
            # The manifest names the rule of its default format; layers of another grid may not have it.
            own = scale_rule or (written if written in old.format.grid.amax_rules else None)
            planes[name] = requantize(weight, old.format, rule, amax=amax, saved=old, scale_rule=own, seed=seed, name=name)
            report[name] = changes(old, planes[name], weight)
    done = DeployReport(
        rule=rule,
        seed=seed,
        scale_rule=scale_rule or written or spec.amax_rule,
        layers=report,
        code_plane=code_plane_fingerprint(convention.fuse_experts(planes)),
        scale_plane=scale_plane_fingerprint(convention.fuse_experts(planes)),
    )
    fields: dict[str, Any] = {key: manifest[key] for key in ("packing", "method", "plan", "kept") if key in manifest}
    fields |= {"format": spec.name, "source": str(read_config(stored).get("_name_or_path") or ""), "deploy": done.to_dict()}
    size = sum((stored / file).stat().st_size for file in set(shard_map(stored).values()))
    require_disk(out, int(size * 1.05), "the redeployed checkpoint")
    with atomic_folder(out, replace=replace) as temporary:
        _rewrite(stored, temporary, planes, dense)
        write_manifest(temporary, KIND, code_plane=done.code_plane, scale_plane=done.scale_plane, scale_rule=done.scale_rule, **fields)
    return done


def _weight(name: str, stored: QuantTensor, dense: Mapping[str, Tensor] | None, source: Path) -> Tensor:
    """The weight that a tool holds before it rounds, float32 [O, I]."""
    if dense is None:
        return stored.dequantize()
    found = dense.get(f"{name}.weight")
    if found is None or tuple(found.shape) != stored.shape:
        fault = "is missing" if found is None else f"has shape {list(found.shape)}, the template {list(stored.shape)}"
        raise CheckpointError(f"tensor '{name}.weight' {fault}", where=str(source), remedy="give a merged folder of the template's model")
    return found.to(torch.float32)


def _rewrite(stored: Path, out: Path, planes: Mapping[str, QuantTensor], dense: Mapping[str, Tensor]) -> None:
    """Copy a checkpoint folder with other planes, and with the full-precision source's tensors where it has them; shard by shard."""
    replaced = {key: value for name, tensor in planes.items() for key, value in convention.to_checkpoint(name, tensor).items()}
    shards = set(shard_map(stored).values())
    for path in sorted(stored.iterdir()):
        if path.is_file() and path.name not in shards and path.name != MANIFEST_NAME:
            shutil.copyfile(path, out / path.name)
    for shard in sorted(shards):
        tensors = load_file(stored / shard)
        for key, value in tensors.items():
            tensors[key] = replaced.get(key, dense.get(key, value).to(value.dtype))
        write_shard(out / shard, tensors)
