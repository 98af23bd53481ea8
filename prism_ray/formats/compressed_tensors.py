"""The tensors of the compressed-tensors convention (`nvfp4-pack-quantized`, `mxfp4-pack-quantized`, `pack-quantized`), converted here and nowhere else.

For a Linear called N the checkpoint holds

| tensor | dtype, shape | ours |
|---|---|---|
| N.weight_packed | uint8 [O, I/2], low nibble = even column | codes, same bytes |
| N.weight_scale | float8_e4m3fn (NVFP4) or uint8 (MXFP4) [O, G] | scales, same bytes |
| N.weight_global_scale | float32 [1], NVFP4 only: the *reciprocal*, 2688 / amax | tensor_scale = 1 / it; kept as `divisor` |

and for the integer formats

| tensor | dtype, shape | ours |
|---|---|---|
| N.weight_packed | int32 [O, I/8], code = value + 8, lowest nibble = first column | codes, same bytes (little-endian) |
| N.weight_scale | bfloat16 [O, G] | scales, same bytes |
| N.weight_shape | int64 [2]: O, I | checked, not kept |

The convention of the scalar is fixed by this tensor name, never guessed from its size (field case FMT-02). Fused experts [E, O, I] are stored per
expert under the names of the modules they were fused from, `experts.3.gate_proj` and `experts.3.up_proj` for the halves of `gate_up_proj`, or what the family
calls them (`w1` and `w3` in mixtral and deepseek_v4: `stored_parts`; either is read); both halves carry the same scalar, so fusing them again is exact. Companions of conventions that are not read (`weight_zero_point`, `weight_g_idx`) are refused. The package itself is not imported; tests check against it in both directions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from prism_ray.core.errors import CheckpointError, FormatError
from prism_ray.formats.config_groups import FUSED_PARTS, PACKED
from prism_ray.formats.spec import FormatSpec
from prism_ray.formats.tensor import QuantTensor

CODES, SCALES, DIVISOR, SHAPE = "weight_packed", "weight_scale", "weight_global_scale", "weight_shape"
REFUSED = {"weight_zero_point": "asymmetric codes", "weight_g_idx": "columns permuted by activation order"}
_OTHER_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_EXPERT = re.compile(r"^(?P<experts>.*\.experts)\.(?P<index>\d+)\.(?P<part>gate_proj|up_proj|down_proj|w1|w2|w3)$")


def parts_of(spec: FormatSpec) -> tuple[str, ...]:
    """Names of the tensors that a quantized Linear has in a checkpoint, without the module's name."""
    return (CODES, SCALES, *((DIVISOR,) if spec.has_tensor_scale else ()), *((SHAPE,) if spec.checkpoint_format == PACKED else ()))


def stored_parts(model: Any) -> dict[str, tuple[str, ...]]:
    """Names of the Linear modules that each fused expert parameter of a transformers model is stored as, as transformers' own loader asks for them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    parts = dict(FUSED_PARTS)
    for entry in get_model_conversion_mapping(model):
        target = entry.target_patterns[0].rpartition(".experts.")[2] if isinstance(entry, WeightConverter) else ""
        found = [re.search(r"experts\.?\*\.(\w+)\.weight", source) for source in entry.source_patterns]
        names = tuple(match[1] for match in found if match)
        if target in parts and [_OTHER_NAMES.get(name, name) for name in names] == list(FUSED_PARTS[target]):
            parts[target] = names
    return parts


def to_checkpoint(name: str, tensor: QuantTensor, stored: Mapping[str, tuple[str, ...]] = FUSED_PARTS) -> dict[str, torch.Tensor]:
    """Checkpoint tensors of one quantized weight; `name` is a Linear's path or the path of a fused expert parameter. stored: `stored_parts` of the model."""
    if len(tensor.shape) == 2:
        return _linear_tensors(name, tensor)
    out: dict[str, torch.Tensor] = {}
    for part, piece in split_experts(name, tensor, stored):
        out |= _linear_tensors(part, piece)
    return out


def split_experts(name: str, tensor: QuantTensor, stored: Mapping[str, tuple[str, ...]] = FUSED_PARTS) -> Iterator[tuple[str, QuantTensor]]:
    """(module path in the files, its planes) of every part of a fused expert parameter [E, O, I]: …experts.gate_up_proj is …experts.0.gate_proj, ….0.up_proj, …"""
    prefix, parameter = name.rsplit(".", 1)
    parts = stored[parameter]
    rows = tensor.shape[1] // len(parts)
    for expert in range(tensor.shape[0]):
        whole = tensor[expert]
        for position, part in enumerate(parts):
            span = slice(position * rows, (position + 1) * rows)
            piece = QuantTensor(
                codes=whole.codes[span],
                scales=whole.scales[span],
                tensor_scale=whole.tensor_scale,
                format=whole.format,
                divisor=whole.divisor,
            )
            yield f"{prefix}.{expert}.{part}", piece


def _linear_tensors(name: str, tensor: QuantTensor) -> dict[str, torch.Tensor]:
    spec = tensor.format
    out = {f"{name}.{CODES}": tensor.codes, f"{name}.{SCALES}": _viewed(tensor.scales, spec.checkpoint_scale_dtype)}
    if spec.checkpoint_format == PACKED:
        out[f"{name}.{CODES}"] = _viewed(tensor.codes, torch.int32)
        out[f"{name}.{SHAPE}"] = torch.tensor(tensor.shape, dtype=torch.int64)
    if tensor.format.has_tensor_scale:
        divisor = tensor.divisor if tensor.divisor is not None else 1.0 / tensor.tensor_scale
        if tensor.divisor is None and not torch.equal(1.0 / divisor, tensor.tensor_scale):
            raise FormatError(
                "tensor scale has no float32 reciprocal that gives it back", where=name, remedy="quantize with tensor_scale_for"
            )
        out[f"{name}.{DIVISOR}"] = divisor.reshape(1).clone()
    return out


def _viewed(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as another dtype; rows of a slice may start at a byte that the wider dtype cannot be read from in place."""
    data = data.contiguous()
    return (data.clone() if data.storage_offset() % dtype.itemsize else data).view(dtype)


def from_checkpoint(name: str, tensors: Mapping[str, torch.Tensor], spec: FormatSpec) -> QuantTensor:
    """One Linear's QuantTensor from its checkpoint tensors, validated. Raises CheckpointError naming a missing, misshapen or surplus tensor."""
    for part in parts_of(spec):
        if f"{name}.{part}" not in tensors:
            raise CheckpointError(f"tensor '{name}.{part}' is missing", where=name, remedy="the checkpoint is incomplete: write it again")
    for part, meaning in REFUSED.items():
        if f"{name}.{part}" in tensors:
            raise CheckpointError(f"'{name}.{part}' means {meaning}, which cannot be read", where=name, remedy="quantize it without")
    scales, codes = tensors[f"{name}.{SCALES}"], tensors[f"{name}.{CODES}"]
    packed = torch.int32 if spec.checkpoint_format == PACKED else torch.uint8
    for part, found, wanted in ((SCALES, scales.dtype, spec.checkpoint_scale_dtype), (CODES, codes.dtype, packed)):
        if found != wanted:
            raise CheckpointError(f"'{name}.{part}' has dtype {found}, {spec.checkpoint_format} stores {wanted}", where=name)
    codes = codes.contiguous().view(torch.uint8)
    shape = tensors.get(f"{name}.{SHAPE}")
    if shape is not None and shape.tolist() != [codes.shape[0], codes.shape[-1] * 2]:
        raise CheckpointError(f"'{name}.{SHAPE}' says {shape.tolist()}, the codes hold {[codes.shape[0], codes.shape[-1] * 2]}", where=name)
    divisor = tensors[f"{name}.{DIVISOR}"] if spec.has_tensor_scale else None
    if divisor is not None:
        if divisor.numel() != 1 or divisor.dtype != torch.float32:
            raise CheckpointError(
                f"'{name}.{DIVISOR}' has shape {list(divisor.shape)} and dtype {divisor.dtype}, expected one float32", where=name
            )
        divisor = divisor.reshape(())
    scale = torch.ones((), dtype=torch.float32) if divisor is None else 1.0 / divisor
    try:
        tensor = QuantTensor(codes=codes, scales=scales.contiguous().view(torch.uint8), tensor_scale=scale, format=spec, divisor=divisor)
    except FormatError as error:
        raise CheckpointError(error.what, where=name) from None
    tensor.validate(name)
    return tensor


def fuse_experts(linears: dict[str, QuantTensor]) -> dict[str, QuantTensor]:
    """Replace per-expert Linear entries by the fused [E, O, I] weights of transformers 5; other entries pass through.

    Raises CheckpointError naming missing expert ids (field case FMT-06) and gate/up pairs with different tensor scales (field case FMT-05).
    """
    out: dict[str, QuantTensor] = {}
    groups: dict[str, dict[int, dict[str, QuantTensor]]] = {}
    for name, tensor in linears.items():
        match = _EXPERT.match(name)
        if match:
            groups.setdefault(match["experts"], {}).setdefault(int(match["index"]), {})[_part(match)] = tensor
        else:
            out[name] = tensor
    for prefix, experts in groups.items():
        if sorted(experts) != list(range(len(experts))):
            missing = sorted(set(range(max(experts) + 1)) - set(experts))
            raise CheckpointError(f"experts {missing} are missing", where=prefix, remedy="the checkpoint is incomplete: write it again")
        # The union over experts, so that one that lacks a part is found. A parameter that no expert has was left in full precision.
        parts = {part for expert in experts.values() for part in expert}
        for parameter in ("gate_up_proj", "down_proj") if "gate_proj" in parts else ("up_proj", "down_proj"):
            if parts & set(FUSED_PARTS[parameter]):
                out[f"{prefix}.{parameter}"] = _stack(prefix, parameter, experts)
    return out


def _part(match: re.Match[str]) -> str:
    return _OTHER_NAMES.get(match["part"], match["part"])


def fused_names(linears: Iterable[str]) -> dict[str, str]:
    """Linear name -> the model's name of the weight it is a part of: for an expert's Linear the fused parameter, else the name itself."""
    names = list(linears)
    matches = {name: match for name in names if (match := _EXPERT.match(name))}
    gated = {match["experts"] for match in matches.values() if _part(match) == "gate_proj"}
    out = {name: name for name in names}
    for name, match in matches.items():
        gate_up = _part(match) != "down_proj" and match["experts"] in gated
        out[name] = f"{match['experts']}.{'gate_up_proj' if gate_up else _part(match)}"
    return out


def _stack(prefix: str, parameter: str, experts: dict[int, dict[str, QuantTensor]]) -> QuantTensor:
    pieces: list[list[QuantTensor]] = []
    for index in range(len(experts)):
        try:
            row = [experts[index][part] for part in FUSED_PARTS[parameter]]
        except KeyError as error:
            raise CheckpointError(
                f"expert {index} has no {error}", where=prefix, remedy="the checkpoint is incomplete: write it again"
            ) from None
        if any(not torch.equal(piece.tensor_scale, row[0].tensor_scale) for piece in row):
            raise CheckpointError(
                f"gate_proj and up_proj of expert {index} have different tensor scales", where=prefix, remedy="quantize them as one weight"
            )
        pieces.append(row)
    first = pieces[0][0]
    formats = {piece.format.name for row in pieces for piece in row}
    if len(formats) > 1:
        raise CheckpointError(f"parts of '{parameter}' have formats {sorted(formats)}", where=prefix, remedy="quantize them as one weight")
    divisor = None if first.divisor is None else torch.stack([row[0].divisor for row in pieces if row[0].divisor is not None])
    return QuantTensor(
        codes=torch.stack([torch.cat([piece.codes for piece in row]) for row in pieces]),
        scales=torch.stack([torch.cat([piece.scales for piece in row]) for row in pieces]),
        tensor_scale=torch.stack([row[0].tensor_scale for row in pieces]),
        format=first.format,
        divisor=divisor,
    )


def module_names(tensors: Iterable[str]) -> list[str]:
    """Names of the quantized Linears among checkpoint tensor names."""
    return sorted(name.removesuffix(f".{CODES}") for name in tensors if name.endswith(f".{CODES}"))
