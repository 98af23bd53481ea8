"""What every quantizer takes and gives: a group of weights with one input, its statistics, one set of options; planes and a record for each weight.

A *group* is what shares an input: q/k/v of one attention, gate/up of one feed-forward layer, or one projection of all experts of a block. Its members share the statistics, and those
that are served as one matrix share their tensor scale (field case FMT-05). A quantizer is a function

    (weights, spec, stats, options, amax) -> [(QuantTensor, TensorRecord)]

and a registry line that says whether it needs statistics. It never falls back silently: a record says which method made the planes and why it is not the asked one.

Errors in a record are relative output errors on the calibration rows, tr((W - Q) H (W - Q)') / tr(W H W'), NaN without rows; `error_before` is that of plain rounding to
nearest under the same tensor scale.

Legend: E experts, O rows, I columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from prism_ray.core.config import Config
from prism_ray.core.errors import FormatError
from prism_ray.formats import e2m1
from prism_ray.formats.spec import FormatSpec
from prism_ray.formats.tensor import QuantTensor
from prism_ray.hessian.state import GramState
from prism_ray.quantizers.rtn import tensor_scale_for


class QuantizerOptions(Config):
    """scale_rule: block-scale rule, default the format's. scales: how block scales are chosen: from the maximum, by weight error, or by error under the
    Hessian (methods without one use `mse` in its place). refine: passes of coordinate descent after GPTQ's sweep. damping: fraction of the mean diagonal. act_order: sweep by falling mean square.
    starved: what happens to an expert with fewer rows than columns: `damp` runs the method on what it has, `rtn` rounds. awq_grid: exponents
    tried. awq_block_constant: one AWQ factor a scale block."""

    scale_rule: str | None = None
    scales: Literal["amax", "mse", "hessian"] = "hessian"
    refine: int = Field(default=2, ge=0, le=20)
    damping: float = Field(default=0.01, ge=0.0, le=1.0)
    act_order: bool = False
    starved: Literal["damp", "rtn"] = "damp"
    awq_grid: int = Field(default=20, ge=2, le=100)
    awq_block_constant: bool = False


@dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """What happened to one weight (one expert of a fused weight).

    method: what made the planes; asked: what was asked for; reason: why they differ, or empty. tokens: calibration rows. rank: upper bound of the rank of H: the
    smaller of rows and live columns. damping, retries, dead: see hessian.factor; NaN and 0 where no factor was made. error_before, error_after, weight_error: relative,
    the last one ||W - Q|| / ||W||. clipped, flushed: blocks whose maximum lies above the largest code; non-zero blocks of which nothing is left.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    asked: str
    method: str
    reason: str = ""
    tokens: int = 0
    rank: int = 0
    damping: float = math.nan
    retries: int = 0
    dead: int = 0
    error_before: float = math.nan
    error_after: float = math.nan
    weight_error: float = 0.0
    clipped: int = 0
    flushed: int = 0

    @property
    def fell_back(self) -> bool:
        """Whether another method than the asked one made the planes."""
        return self.method != self.asked


Quantized = list[tuple[QuantTensor, TensorRecord]]
GroupQuantizer = Callable[[Sequence["Member"], GramState | None, QuantizerOptions], Quantized]


@dataclass(frozen=True, kw_only=True)
class Member:
    """One weight of a group: float [O, I], its format, and the maximum that its tensor scale is made for (its own, or that of what it is served with)."""

    name: str
    weight: Tensor
    spec: FormatSpec
    amax: Tensor

    @classmethod
    def of(cls, name: str, weight: Tensor, spec: FormatSpec, amax: Tensor | None = None) -> Member:
        """A member with a checked weight; FormatError for columns that do not divide into blocks and for NaN or infinity."""
        spec.blocks(weight.shape[-1], name)
        weight = weight.detach().to(torch.float32)
        own = weight.abs().amax()
        if not bool(torch.isfinite(own)):
            raise FormatError("weight holds NaN or infinity", where=name, remedy="repair the source checkpoint")
        return cls(name=name, weight=weight, spec=spec, amax=own if amax is None else torch.maximum(own, amax.to(own)))


@dataclass(frozen=True, kw_only=True)
class Method:
    """A registered quantizer. needs_stats: whether it is of any use without calibration rows. batch: `run` of several groups of one shape at once."""

    run: GroupQuantizer
    needs_stats: bool
    batch: Callable[[Sequence[tuple[Sequence[Member], GramState | None]], QuantizerOptions], list[Quantized]] | None = None



def assemble(member: Member, scales: Tensor, values: Tensor) -> QuantTensor:
    """Planes of `values` [O, I] (the weight, or what error feedback made of it) under scale bytes [O, G * width]."""
    spec = member.spec
    tensor_scale, divisor = tensor_scale_for(member.amax, spec)
    step = (spec.grid.decode(scales) * tensor_scale).repeat_interleave(spec.block, -1)
    inverse = torch.where(step > 0, 1.0 / step, torch.zeros_like(step))
    codes = spec.codes.round_to_codes(values * inverse)
    return QuantTensor(codes=e2m1.pack(codes), scales=scales, tensor_scale=tensor_scale, format=spec, divisor=divisor)


def record(member: Member, tensor: QuantTensor, stats: GramState | None, *, asked: str, method: str, **details: object) -> TensorRecord:
    """The record of a weight with the errors measured on its planes."""
    weight, spec = member.weight, member.spec
    error = weight - tensor.dequantize()
    blocks = weight.view(weight.shape[0], -1, spec.block)
    step = spec.grid.decode(tensor.scales) * tensor.tensor_scale
    block_amax = blocks.abs().amax(-1)
    norm = float(torch.linalg.vector_norm(weight, dtype=torch.float64))
    left = tensor.dequantize().view_as(blocks).abs().amax(-1)
    fields: dict[str, object] = {
        "name": member.name,
        "shape": tuple(weight.shape),
        "format": spec.name,
        "asked": asked,
        "method": method,
        "tokens": 0 if stats is None else stats.tokens,
        "error_after": output_error(weight, error, stats),
        "weight_error": float(torch.linalg.vector_norm(error, dtype=torch.float64)) / norm if norm else 0.0,
        "clipped": int((block_amax > spec.codes.largest * step * (1 + 2**-20)).sum()),
        "flushed": int(((block_amax > 0) & (left == 0)).sum()),
    }
    return TensorRecord(**(fields | details))  # type: ignore[arg-type]


def output_error(weight: Tensor, error: Tensor, stats: GramState | None) -> float:
    """tr(E H E') / tr(W H W') for float32 [O, I]; NaN without rows, or where the weight does nothing to them."""
    if stats is None or not stats.tokens:
        return math.nan
    gram = stats.matrix().to(torch.float32)
    whole = float(((weight @ gram) * weight).sum(dtype=torch.float64))
    part = float(((error @ gram) * error).sum(dtype=torch.float64))
    return part / whole if whole > 0 else math.nan
