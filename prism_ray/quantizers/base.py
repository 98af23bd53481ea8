"""What every quantizer takes and gives: a group of weights with one input, its statistics, one set of options; planes and a record for each weight.

A *group* is what shares an input: q/k/v of one attention, gate/up of one feed-forward layer, or one projection of all experts of a block. Its members share the statistics, and those
that are served as one matrix share their tensor scale (field case FMT-05). A quantizer is a function

    (weights, spec, stats, options, amax) -> [(QuantTensor, TensorRecord)]

and a registry line that says whether it needs statistics. It never falls back silently: a record says which method made the planes and why it is not the asked one.

A method may also *choose* factors that are folded into the model before rounding (AWQ). The pass finds the places where that leaves the model as it is (`calibrate.fold`), asks the method
once a place, and hands each member its `Factors`.

Errors in a record are relative output errors on the calibration rows, tr((W - Q) H (W - Q)') / tr(W H W'), NaN without rows; `error_before` is that of plain rounding to
nearest under the same tensor scale.

Legend: E experts, O rows, I columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from prism_ray.core.config import Config
from prism_ray.core.errors import FormatError
from prism_ray.formats import e2m1
from prism_ray.formats.spec import FormatSpec
from prism_ray.formats.tensor import QuantTensor
from prism_ray.hessian.factor import dead_columns
from prism_ray.hessian.state import GramState
from prism_ray.quantizers.rtn import tensor_scale_for


class QuantizerOptions(Config):
    """scale_rule: block-scale rule, default the format's. scales: how block scales are chosen: from the maximum, by weight error, or by error under the
    Hessian (methods without one use `mse` in its place). refine: passes of coordinate descent after GPTQ's sweep. damping: fraction of the mean diagonal. act_order: sweep by falling mean square.
    starved: what happens to an expert with fewer rows than columns: `damp` runs the method on what it has, `rtn` rounds. awq_grid: exponents
    tried. awq_block_constant: one AWQ factor a scale block."""

    scale_rule: str | None = None
    scales: Literal["amax", "mse", "hessian"] = "hessian"
    refine: int = Field(default=4, ge=0, le=20)
    damping: float = Field(default=0.01, ge=0.0, le=1.0)
    act_order: bool = False
    starved: Literal["damp", "rtn"] = "damp"
    awq_grid: int = Field(default=20, ge=2, le=100)
    awq_block_constant: bool = False


@dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """What happened to one weight (one expert of a fused weight).

    method: what made the planes; asked: what was asked for; reason: why they differ, or empty. tokens: calibration rows. rank: upper bound of the rank of H: the
    smaller of rows and live columns. alpha: exponent of the factors that were folded into the weight's columns, NaN where no factors were chosen. damping, retries, dead: see hessian.factor; NaN and 0 where no factor was made. error_before, error_after, weight_error: relative,
    the last one ||W - Q|| / ||W||. clipped, flushed: blocks whose maximum lies above the largest code; non-zero blocks of which nothing is left.
    steps: calibration rows by loop step, {"0": tokens} for a weight that a forward pass calls once (JSON has no integer keys).
    """

    name: str
    shape: tuple[int, ...]
    format: str
    asked: str
    method: str
    reason: str = ""
    tokens: int = 0
    rank: int = 0
    alpha: float = math.nan
    damping: float = math.nan
    retries: int = 0
    dead: int = 0
    error_before: float = math.nan
    error_after: float = math.nan
    weight_error: float = 0.0
    clipped: int = 0
    flushed: int = 0
    steps: Mapping[str, int] = field(default_factory=dict)

    @property
    def fell_back(self) -> bool:
        """Whether another method than the asked one made the planes."""
        return self.method != self.asked


@dataclass(frozen=True, kw_only=True)
class Factors:
    """What is folded into a weight before it is rounded: W * columns * rows[:, None], the two float32 [I] and [O], None for ones.

    columns: factors of its input, chosen with exponent `alpha`. rows: those of what reads its output. reason: why no factors were chosen for its input, or empty.
    """

    columns: Tensor | None = None
    rows: Tensor | None = None
    alpha: float = math.nan
    reason: str = ""

    def fold(self, weight: Tensor) -> Tensor:
        """The weight [O, I] to round, in float32."""
        weight = weight.to(torch.float32)
        weight = weight if self.columns is None else weight * self.columns
        return weight if self.rows is None else weight * self.rows[:, None]

    def unfold(self, weight: Tensor) -> Tensor:
        """Back from `fold`: the weight of the model as it was that does the same."""
        weight = weight if self.columns is None else weight / self.columns
        return weight if self.rows is None else weight / self.rows[:, None]


Quantized = list[tuple[QuantTensor, TensorRecord]]
GroupQuantizer = Callable[[Sequence["Member"], GramState | None, QuantizerOptions], Quantized]


@dataclass(frozen=True, kw_only=True)
class Member:
    """One weight of a group: float [O, I], its format, and the maximum that its tensor scale is made for (its own, or that of what it is served with).

    factors: what has been folded into `weight` already.
    """

    name: str
    weight: Tensor
    spec: FormatSpec
    amax: Tensor
    factors: Factors | None = None

    @classmethod
    def of(cls, name: str, weight: Tensor, spec: FormatSpec, amax: Tensor | None = None, factors: Factors | None = None) -> Member:
        """A member with a checked weight; FormatError for columns that do not divide into blocks and for NaN or infinity."""
        spec.blocks(weight.shape[-1], name)
        weight = weight.detach().to(torch.float32)
        own = weight.abs().amax()
        if not bool(torch.isfinite(own)):
            raise FormatError("weight holds NaN or infinity", where=name, remedy="repair the source checkpoint")
        return cls(name=name, weight=weight, spec=spec, amax=own if amax is None else torch.maximum(own, amax.to(own)), factors=factors)


Groups = Callable[[], Iterable[tuple[Sequence[Member], GramState | None]]]
"""Groups of weights that read one place, made anew at every call: one group's weights and statistics are in memory at a time."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Factors of a place's channels, float32 [P], None for ones; their exponent; why none were chosen, or empty."""

    channels: Tensor | None = None
    alpha: float = math.nan
    reason: str = ""


Choose = Callable[[Groups, Tensor, QuantizerOptions], Choice]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A registered quantizer. needs_stats: whether it is of any use without calibration rows. batch: `run` of several groups of one shape at once. choose: factors of a place
    from the groups that read it and, int64 [I], the place's channel behind each of their columns; a block of such a method has one owner."""

    run: GroupQuantizer
    needs_stats: bool
    batch: Callable[[Sequence[tuple[Sequence[Member], GramState | None]], QuantizerOptions], list[Quantized]] | None = None
    choose: Choose | None = None


def assemble(member: Member, scales: Tensor, values: Tensor) -> QuantTensor:
    """Planes of `values` [O, I] (the weight, or what error feedback made of it) under scale bytes [O, G * width]."""
    spec = member.spec
    tensor_scale, divisor = tensor_scale_for(member.amax, spec)
    step = (spec.grid.decode(scales) * tensor_scale).repeat_interleave(spec.block, -1)
    codes = spec.codes.round_to_codes(values / torch.where(step > 0, step, torch.inf))
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
        "steps": {} if stats is None else {str(step): stats.steps[step] for step in sorted(stats.steps)},
        "rank": 0 if "rank" in details or stats is None or not stats.tokens else _rank(stats),
        "error_after": output_error(weight, error, stats),
        "weight_error": float(torch.linalg.vector_norm(error, dtype=torch.float64)) / norm if norm else 0.0,
        "clipped": int((block_amax > spec.codes.largest * step * (1 + 2**-20)).sum()),
        "flushed": int(((block_amax > 0) & (left == 0)).sum()),
    }
    return TensorRecord(**(fields | details))  # type: ignore[arg-type]


def _rank(stats: GramState) -> int:
    live = ~dead_columns(stats.matrix(), stats.weight)
    return min(stats.tokens, int(live.sum()))


def output_error(weight: Tensor, error: Tensor, stats: GramState | None) -> float:
    """tr(E H E') / tr(W H W') for float32 [O, I]; NaN without rows, or where the weight does nothing to them."""
    if stats is None or not stats.tokens:
        return math.nan
    gram = stats.matrix().to(torch.float32)
    whole = float(((weight @ gram) * weight).sum(dtype=torch.float64))
    part = float(((error @ gram) * error).sum(dtype=torch.float64))
    return part / whole if whole > 0 else math.nan
