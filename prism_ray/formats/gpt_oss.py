"""The gpt-oss checkpoint layout of MXFP4 experts (`quant_method` "mxfp4"), read and written, converted here and nowhere else.

For the experts module M of a layer (model.layers.3.mlp.experts), E experts, H hidden width, F expert width:

| tensor | dtype, shape | ours |
|---|---|---|
| M.gate_up_proj_blocks | uint8 [E, 2F, H/32, 16], low nibble = even column | codes [E, 2F, H/2], same bytes |
| M.gate_up_proj_scales | uint8 E8M0 [E, 2F, H/32] | scales, same bytes |
| M.gate_up_proj_bias | bfloat16 [E, 2F] | bias, same row order |
| M.down_proj_blocks, _scales, _bias | [E, H, F/32, 16], [E, H, F/32], [E, H] | the same |

Row order (field case FMT-08): on disk the rows of gate_up_proj are *interleaved*, g0, u0, g1, u1, …, and so are the columns of transformers'
`GptOssExperts.gate_up_proj`, which is the transpose [E, H, 2F] (`parameter`). Kernels and other MoE models want *contiguous* rows, [gate; up]. Both have the
same shape, so the order is a field of `ExpertWeight` and changes through `with_rows` alone; files are always written interleaved and the manifest says so.

A width of 2880 is 90 blocks. Refuses: blocks whose last dimension is not 16, scales of another shape, byte 255 (NaN), formats other than mxfp4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from prism_ray.core.errors import CheckpointError, FormatError
from prism_ray.core.files import atomic_folder, require_disk, write_json
from prism_ray.core.manifest import write_manifest
from prism_ray.formats.e2m1 import PACKING
from prism_ray.formats.safetensors_io import read_tensors, write_shards
from prism_ray.formats.spec import MXFP4
from prism_ray.formats.tensor import QuantTensor, code_plane_fingerprint, scale_plane_fingerprint

BLOCKS, SCALES, BIAS = "_blocks", "_scales", "_bias"
PAIRED = "gate_up_proj"
BLOCK_BYTES = MXFP4.block // 2
# What the published checkpoints list: everything but the experts.
NOT_CONVERTED = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
INCOMPLETE = "the checkpoint is incomplete: write it again"

RowOrder = Literal["interleaved", "contiguous", "single"]


@dataclass(frozen=True, kw_only=True)
class ExpertWeight:
    """One fused expert parameter: tensor [E, O, I] in mxfp4, bias [E, O] or None, and the order of the O rows of both.

    rows: "interleaved" (g0, u0, g1, …) or "contiguous" ([gate; up]) for a parameter that holds gate and up, "single" for any other.
    """

    tensor: QuantTensor
    rows: RowOrder
    bias: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.tensor.format.name != MXFP4.name or len(self.tensor.shape) != 3:
            raise FormatError(f"experts are mxfp4 [E, O, I] here, got {self.tensor.format.name} {list(self.tensor.shape)}")
        if self.rows != "single" and self.tensor.shape[1] % 2:
            raise FormatError(f"{self.tensor.shape[1]} rows cannot hold gate and up")
        if self.bias is not None and tuple(self.bias.shape) != self.tensor.shape[:2]:
            raise FormatError(f"bias has shape {list(self.bias.shape)}, expected {list(self.tensor.shape[:2])}")

    def with_rows(self, rows: RowOrder) -> ExpertWeight:
        """The same weight with its rows in another order; "single" has no other."""
        if rows == self.rows:
            return self
        if "single" in (rows, self.rows):
            raise FormatError(f"rows that are {self.rows} cannot become {rows}", remedy="only gate_up_proj holds pairs of rows")
        move = contiguous if rows == "contiguous" else interleaved
        moved = replace(self.tensor, codes=move(self.tensor.codes, 1), scales=move(self.tensor.scales, 1))
        return ExpertWeight(tensor=moved, rows=rows, bias=None if self.bias is None else move(self.bias, 1))


def contiguous(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Interleaved rows g0, u0, g1, u1, … along `dim` -> all of gate, then all of up (a copy)."""
    even, odd = (rows.index_select(dim, torch.arange(start, rows.shape[dim], 2, device=rows.device)) for start in (0, 1))
    return torch.cat([even, odd], dim)


def interleaved(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """All of gate, then all of up, along `dim` -> interleaved rows (a copy); the inverse of `contiguous`."""
    half = rows.shape[dim] // 2
    order = torch.arange(2 * half, device=rows.device).view(2, half).t().reshape(-1)
    return rows.index_select(dim, order)


def parameter(tensor: QuantTensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The dequantized weight as transformers' `GptOssExperts` holds it: [E, I, O], contiguous in memory, columns in the order of our rows."""
    return tensor.dequantize(dtype).transpose(-1, -2).contiguous()


def to_checkpoint(name: str, weight: ExpertWeight) -> dict[str, torch.Tensor]:
    """Checkpoint tensors of one fused expert parameter; `name` is its path (…mlp.experts.gate_up_proj). Rows are written interleaved."""
    if (weight.rows == "single") == name.endswith(PAIRED):
        raise FormatError(f"rows are said to be {weight.rows}", where=name, remedy=f"{PAIRED} holds pairs of rows, other parameters do not")
    if weight.rows == "contiguous":
        weight = weight.with_rows("interleaved")
    codes = weight.tensor.codes
    out = {f"{name}{BLOCKS}": codes.reshape(*codes.shape[:-1], -1, BLOCK_BYTES), f"{name}{SCALES}": weight.tensor.scales}
    return out if weight.bias is None else out | {f"{name}{BIAS}": weight.bias}


def from_checkpoint(name: str, tensors: Mapping[str, torch.Tensor]) -> ExpertWeight:
    """One fused expert parameter, validated, with its rows in the order of the file: interleaved for gate_up_proj."""
    for end in (BLOCKS, SCALES):
        if f"{name}{end}" not in tensors:
            raise CheckpointError(f"tensor '{name}{end}' is missing", where=name, remedy=INCOMPLETE)
    blocks, scales = tensors[f"{name}{BLOCKS}"], tensors[f"{name}{SCALES}"]
    check_shapes(name, tuple(blocks.shape), tuple(scales.shape))
    if blocks.dtype != torch.uint8 or scales.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise CheckpointError(f"blocks and scales have dtype {blocks.dtype} and {scales.dtype}, expected bytes", where=name)
    tensor = QuantTensor(
        codes=blocks.reshape(*blocks.shape[:2], -1), scales=scales.view(torch.uint8), tensor_scale=torch.ones(blocks.shape[0]), format=MXFP4
    )
    tensor.validate(name)
    return ExpertWeight(tensor=tensor, rows="interleaved" if name.endswith(PAIRED) else "single", bias=tensors.get(f"{name}{BIAS}"))


def check_shapes(name: str, blocks: tuple[int, ...], scales: tuple[int, ...]) -> None:
    """Raise CheckpointError unless blocks are [E, O, G, 16] and scales [E, O, G]: a last dimension of 15 or 32 is another packing."""
    if len(blocks) != 4 or blocks[-1] != BLOCK_BYTES:
        raise CheckpointError(
            f"'{name}{BLOCKS}' has shape {list(blocks)}, expected [experts, rows, columns / {MXFP4.block}, {BLOCK_BYTES}]", where=name
        )
    if scales != blocks[:-1]:
        raise CheckpointError(f"'{name}{SCALES}' has shape {list(scales)}, the blocks need {list(blocks[:-1])}", where=name)


def parameter_names(tensors: Iterable[str]) -> list[str]:
    """Paths of the quantized expert parameters among checkpoint tensor names, complete or not."""
    return sorted({name.removesuffix(end) for name in tensors for end in (BLOCKS, SCALES) if name.endswith(f"_proj{end}")})


def quantization_config(not_converted: Iterable[str] = NOT_CONVERTED) -> dict[str, Any]:
    """The `quantization_config` of config.json; not_converted: modules that stay as they are, as transformers' patterns."""
    return {"quant_method": "mxfp4", "modules_to_not_convert": list(not_converted)}


def require_mxfp4(config: Mapping[str, Any] | None, where: str) -> None:
    """Raise CheckpointError unless a `quantization_config` is that of this layout."""
    method = None if config is None else config.get("quant_method")
    if method != "mxfp4":
        raise CheckpointError(f"quantization '{method}' is not gpt-oss's mxfp4", where=where, remedy="read it with its own reader")


def read_quantized(folder: Path | str) -> tuple[dict[str, ExpertWeight], dict[str, torch.Tensor]]:
    """(expert parameters by path, every other tensor) of a gpt-oss MXFP4 folder. Raises CheckpointError naming what is missing or malformed."""
    # Not at import time: `checkpoint` may dispatch to this module.
    from prism_ray.formats.checkpoint import read_config

    require_mxfp4(read_config(folder).get("quantization_config"), str(folder))
    tensors = dict(read_tensors(folder))
    names = parameter_names(tensors)
    quantized = {name: from_checkpoint(name, tensors) for name in names}
    used = {f"{name}{end}" for name in names for end in (BLOCKS, SCALES, BIAS)}
    return quantized, {name: tensor for name, tensor in tensors.items() if name not in used}


def write_quantized(
    folder: Path | str,
    quantized: Mapping[str, ExpertWeight],
    plain: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    *,
    details: dict[str, Any] | None = None,
    beside: Sequence[Any] = (),
    replace: bool = False,
) -> dict[str, Any]:
    """Write a gpt-oss MXFP4 folder (config.json, shards, manifest.json); returns its manifest.

    quantized: expert parameters by path, rows in either order. config: the model's config.json; a quantization_config in it that is not this layout's is
    replaced. details: extra manifest fields. beside: what else the folder gets, by its `save_pretrained` (tokenizer, generation config). Raises
    FileExistsError without `replace`, ResourceError when the disk is too small, CheckpointError when what was written reads back as something else.
    """
    from prism_ray.formats.checkpoint import KIND

    tensors = dict(plain)
    on_disk: dict[str, QuantTensor] = {}
    for name, weight in quantized.items():
        on_disk[name] = weight.tensor if weight.rows == "single" else weight.with_rows("interleaved").tensor
        tensors |= to_checkpoint(name, weight)
    require_disk(folder, int(1.05 * sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())), "the quantized checkpoint")
    found = config.get("quantization_config") or {}
    settings = found if found.get("quant_method") == "mxfp4" else quantization_config()
    with atomic_folder(folder, replace=replace) as temporary:
        for part in beside:
            part.save_pretrained(temporary)
        write_json(temporary / "config.json", {**config, "quantization_config": settings})
        write_shards(temporary, tensors)
        _require_same(temporary, on_disk, plain)
        fields = {
            "format": MXFP4.name,
            "layout": "gpt-oss-mxfp4",
            "packing": PACKING,
            "row_order": {PAIRED: "interleaved"},
            "code_plane": code_plane_fingerprint(on_disk),
            "scale_plane": scale_plane_fingerprint(on_disk),
            **(details or {}),
        }
        return write_manifest(temporary, KIND, **fields)


def _require_same(folder: Path, quantized: dict[str, QuantTensor], plain: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError unless a folder reads back as these planes and plain tensors of these names, shapes and dtypes."""
    found, rest = read_quantized(folder)
    planes = {name: weight.tensor for name, weight in found.items()}
    shapes = [{name: (tensor.dtype, tensor.shape) for name, tensor in part.items()} for part in (rest, plain)]
    for what, same in (
        ("codes", code_plane_fingerprint(planes) == code_plane_fingerprint(quantized)),
        ("scales", scale_plane_fingerprint(planes) == scale_plane_fingerprint(quantized)),
        ("tensors that are not quantized", shapes[0] == shapes[1]),
    ):
        if not same:
            raise CheckpointError(
                f"the {what} read back are not those written", where=str(folder), remedy="nothing was released; write again"
            )
