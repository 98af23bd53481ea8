"""Round to nearest: the block scale from the block's maximum, rounded onto the grid first, then codes under exactly the stored scale.

For a block with maximum magnitude a: scale byte = grid.encode_amax(a / tensor_scale, rule); code = nearest of w / (decode(byte) * tensor_scale).
NVFP4's tensor scale maps the tensor's maximum (or that of its fused group, field case FMT-05) to 448 * 6 and is stored as a float32 whose reciprocal a
checkpoint can hold.

Degenerate blocks (field case FMT-04): an all-zero block, and one whose scale rounds to the zero byte, decode to exact zeros; a zero scale is
never a divisor; a scale above the grid's largest is clamped before the cast. The report counts zero, flushed and clipped blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from prism_ray.core.errors import FormatError
from prism_ray.core.registry import Registry
from prism_ray.formats import e2m1
from prism_ray.formats.spec import FormatSpec
from prism_ray.formats.tensor import QuantTensor


@dataclass(frozen=True, kw_only=True)
class QuantReport:
    """What happened to one weight: everything that a manifest must be able to say about it.

    method and scale_rule: names. rows, columns (summed over experts for a batched weight). zero_blocks: all-zero input. flushed_blocks: non-zero
    blocks of which nothing is left, because their scale would lie too far below the grid. clipped_blocks: blocks whose maximum lies above `codes.largest` scales.
    relative_error: ||W - Q||_F / ||W||_F, 0 for an all-zero weight.
    """

    method: str
    scale_rule: str
    rows: int
    columns: int
    zero_blocks: int
    flushed_blocks: int
    clipped_blocks: int
    relative_error: float


def tensor_scale_for(amax: torch.Tensor, spec: FormatSpec) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(tensor_scale, divisor), float32 of the shape of `amax`: the scale that maps amax to the largest block scale times the
    largest code.

    1 where amax is 0 (its reciprocal would be infinite), and for formats without a tensor scale, whose divisor is None.
    """
    if not spec.has_tensor_scale:
        return torch.ones_like(amax), None
    divisor = (spec.grid.largest * spec.codes.largest) / amax.to(torch.float32)
    usable = torch.isfinite(divisor) & torch.isfinite(1.0 / divisor)
    divisor = torch.where(usable, divisor, torch.ones_like(divisor))
    return 1.0 / divisor, divisor


def rtn(
    weight: torch.Tensor, spec: FormatSpec, *, scale_rule: str | None = None, amax: torch.Tensor | None = None, where: str = ""
) -> tuple[QuantTensor, QuantReport]:
    """Quantize a weight [O, I] or [E, O, I] (float32, bfloat16, float16) by rounding to nearest.

    scale_rule: one of spec.grid.amax_rules, default spec.amax_rule. amax: maximum [] or [E] that the tensor scale is made for, default the weight's own;
    weights that are fused when served get their group's. where: name used in error messages. Raises FormatError for a column count that does not divide into blocks and for NaN or infinite values.
    """
    if weight.ndim not in (2, 3):
        raise FormatError(f"weights have 2 or 3 dimensions, got {weight.ndim}", where=where)
    rule = scale_rule or spec.amax_rule
    groups = spec.blocks(weight.shape[-1], where)
    values = weight.detach().to(torch.float32)
    if not bool(torch.isfinite(values).all()):
        raise FormatError("weight holds NaN or infinity", where=where, remedy="repair the source checkpoint")
    blocks = values.reshape(*values.shape[:-1], groups, spec.block)
    block_amax = blocks.abs().amax(dim=-1)
    tensor_scale, divisor = tensor_scale_for(_tensor_amax(block_amax, amax, where), spec)
    factor = tensor_scale.reshape(*tensor_scale.shape, 1, 1)
    scales = spec.grid.encode_amax(block_amax / factor, rule, spec.codes.largest)
    step = (spec.grid.decode(scales) * factor).unsqueeze(-1)
    usable = step > 0
    codes = spec.codes.round_to_codes(torch.where(usable, blocks / torch.where(usable, step, 1.0), torch.zeros_like(blocks)))
    packed = e2m1.pack(codes.flatten(-2))
    tensor = QuantTensor(codes=packed, scales=scales, tensor_scale=tensor_scale, format=spec, divisor=divisor)
    # float64 sums: the squares of weights above 1e19 or below 1e-19 leave float32's range.
    norm = torch.linalg.vector_norm(values, dtype=torch.float64)
    error = torch.linalg.vector_norm(values - tensor.dequantize(), dtype=torch.float64) / norm if norm > 0 else norm
    report = QuantReport(
        method="rtn",
        scale_rule=rule,
        rows=values.numel() // values.shape[-1],
        columns=values.shape[-1],
        zero_blocks=int((block_amax == 0).sum()),
        flushed_blocks=int(((block_amax > 0) & (spec.codes.decode(codes) == 0).all(dim=-1)).sum()),
        clipped_blocks=int((usable.squeeze(-1) & (block_amax > spec.codes.largest * step.squeeze(-1) * (1 + 2**-20))).sum()),
        relative_error=float(error),
    )
    return tensor, report


def _tensor_amax(block_amax: torch.Tensor, given: torch.Tensor | None, where: str) -> torch.Tensor:
    """The maximum [...] for the tensor scale of block maxima [..., O, G]; a given one must have that shape and lie at or above them."""
    own = block_amax.flatten(-2).amax(dim=-1)
    if given is None:
        return own
    given = given.to(own)
    if given.shape != own.shape or not bool((given >= own).all()):
        raise FormatError(f"the given maximum {given.tolist()} does not bound the weight's own, {own.tolist()}", where=where)
    return given


QUANTIZERS: Registry = Registry("quantizer")
QUANTIZERS.add("rtn", rtn)
