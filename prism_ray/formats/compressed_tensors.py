"""The compressed-tensors checkpoint convention (`nvfp4-pack-quantized`, `mxfp4-pack-quantized`), converted here and nowhere else.

For a Linear called N the checkpoint holds

| tensor | dtype, shape | ours |
|---|---|---|
| N.weight_packed | uint8 [O, I/2], low nibble = even column | codes, same bytes |
| N.weight_scale | float8_e4m3fn (NVFP4) or uint8 (MXFP4) [O, G] | scales, same bytes |
| N.weight_global_scale | float32 [1], NVFP4 only: the *reciprocal*, 2688 / amax | tensor_scale = 1 / it; kept as `divisor` |

The convention of the scalar is fixed by this tensor name, never guessed from its size (field case FMT-02). Fused experts [E, O, I] are stored per
expert under the names of the modules they were fused from, `experts.3.gate_proj` and `experts.3.up_proj` for the halves of `gate_up_proj`; both halves carry
the same scalar, so fusing them again is exact. The package itself is not imported; tests check against it in both directions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from prism_ray.core.errors import CheckpointError, FormatError
from prism_ray.formats.policy import QuantPlan
from prism_ray.formats.spec import FORMATS, FormatSpec
from prism_ray.formats.tensor import QuantTensor

CODES, SCALES, DIVISOR = "weight_packed", "weight_scale", "weight_global_scale"
FUSED_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",), "up_proj": ("up_proj",)}
_EXPERT = re.compile(r"^(?P<experts>.*\.experts)\.(?P<index>\d+)\.(?P<part>gate_proj|up_proj|down_proj)$")


def to_checkpoint(name: str, tensor: QuantTensor) -> dict[str, torch.Tensor]:
    """Checkpoint tensors of one quantized weight; `name` is a Linear's path or the path of a fused expert parameter."""
    if len(tensor.shape) == 2:
        return _linear_tensors(name, tensor)
    prefix, parameter = name.rsplit(".", 1)
    parts = FUSED_PARTS[parameter]
    rows = tensor.shape[1] // len(parts)
    out: dict[str, torch.Tensor] = {}
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
            out |= _linear_tensors(f"{prefix}.{expert}.{part}", piece)
    return out


def _linear_tensors(name: str, tensor: QuantTensor) -> dict[str, torch.Tensor]:
    out = {f"{name}.{CODES}": tensor.codes, f"{name}.{SCALES}": tensor.scales.view(tensor.format.checkpoint_scale_dtype)}
    if tensor.format.has_tensor_scale:
        divisor = tensor.divisor if tensor.divisor is not None else 1.0 / tensor.tensor_scale
        if tensor.divisor is None and not torch.equal(1.0 / divisor, tensor.tensor_scale):
            raise FormatError(
                "tensor scale has no float32 reciprocal that gives it back", where=name, remedy="quantize with tensor_scale_for"
            )
        out[f"{name}.{DIVISOR}"] = divisor.reshape(1).clone()
    return out


def from_checkpoint(name: str, tensors: Mapping[str, torch.Tensor], spec: FormatSpec) -> QuantTensor:
    """One Linear's QuantTensor from its checkpoint tensors, validated. Raises CheckpointError naming a missing or misshapen tensor."""
    wanted = (CODES, SCALES, DIVISOR) if spec.has_tensor_scale else (CODES, SCALES)
    for part in wanted:
        if f"{name}.{part}" not in tensors:
            raise CheckpointError(f"tensor '{name}.{part}' is missing", where=name, remedy="the checkpoint is incomplete: write it again")
    scales = tensors[f"{name}.{SCALES}"]
    if scales.dtype != spec.checkpoint_scale_dtype:
        raise CheckpointError(
            f"'{name}.{SCALES}' has dtype {scales.dtype}, {spec.checkpoint_format} stores {spec.checkpoint_scale_dtype}", where=name
        )
    divisor = tensors[f"{name}.{DIVISOR}"] if spec.has_tensor_scale else None
    if divisor is not None:
        if divisor.numel() != 1 or divisor.dtype != torch.float32:
            raise CheckpointError(
                f"'{name}.{DIVISOR}' has shape {list(divisor.shape)} and dtype {divisor.dtype}, expected one float32", where=name
            )
        divisor = divisor.reshape(())
    scale = torch.ones((), dtype=torch.float32) if divisor is None else 1.0 / divisor
    try:
        tensor = QuantTensor(
            codes=tensors[f"{name}.{CODES}"], scales=scales.view(torch.uint8), tensor_scale=scale, format=spec, divisor=divisor
        )
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
            groups.setdefault(match["experts"], {}).setdefault(int(match["index"]), {})[match["part"]] = tensor
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
    divisor = None if first.divisor is None else torch.stack([row[0].divisor for row in pieces if row[0].divisor is not None])
    return QuantTensor(
        codes=torch.stack([torch.cat([piece.codes for piece in row]) for row in pieces]),
        scales=torch.stack([torch.cat([piece.scales for piece in row]) for row in pieces]),
        tensor_scale=torch.stack([row[0].tensor_scale for row in pieces]),
        format=first.format,
        divisor=divisor,
    )


def quantization_config(plan: QuantPlan) -> dict[str, Any]:
    """The `quantization_config` of config.json for a plan with one format; several formats raise FormatError."""
    names = {entry.format for entry in plan.entries}
    if len(names) != 1:
        raise FormatError(
            f"a compressed-tensors checkpoint holds one format here, the plan has {sorted(names)}", remedy="use one format per checkpoint"
        )
    spec = FORMATS[names.pop()]
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "dynamic": False,
        "strategy": "tensor_group" if spec.has_tensor_scale else "group",
        "group_size": spec.block,
        "scale_dtype": str(spec.checkpoint_scale_dtype),
        "observer": "memoryless_minmax",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": spec.checkpoint_format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "format": spec.checkpoint_format, "weights": weights}},
        "ignore": plan.ignored_linears,
    }


def format_of_config(config: Mapping[str, Any], where: str) -> FormatSpec:
    """The FormatSpec of a checkpoint's `quantization_config`; raises CheckpointError for a method or format that cannot be read."""
    found = config.get("format")
    for name in FORMATS:
        if FORMATS[name].checkpoint_format == found and config.get("quant_method") == "compressed-tensors":
            return FORMATS[name]
    known = ", ".join(FORMATS[name].checkpoint_format for name in FORMATS)
    raise CheckpointError(
        f"quantization '{config.get('quant_method')}' format '{found}' cannot be read", where=where, remedy=f"readable: {known}"
    )


def module_names(tensors: Iterable[str]) -> list[str]:
    """Names of the quantized Linears among checkpoint tensor names."""
    return sorted(name.removesuffix(f".{CODES}") for name in tensors if name.endswith(f".{CODES}"))


def require_ignored_plain(config: Mapping[str, Any], packed: Iterable[str], where: str) -> None:
    """Raise CheckpointError when the config's ignore list names a module whose weight is packed (field case FMT-09): a loader that believes the config
    would read codes as numbers, or keep random weights.

    packed: `module_names`. Entries are exact names or, with the prefix `re:`, regular expressions that match from the start of a name.
    """
    for entry in config.get("ignore") or []:
        pattern = re.compile(str(entry).removeprefix("re:") if str(entry).startswith("re:") else f"{re.escape(str(entry))}$")
        for name in packed:
            if pattern.match(name):
                raise CheckpointError(
                    f"the config's ignore list has '{entry}', but the files hold '{name}' packed",
                    where=where,
                    remedy="one of the two is wrong: write the checkpoint again, or mend quantization_config.ignore",
                )
