"""Quantizers without error feedback: rounding to nearest, and rounding under searched block scales (weight-MSE).

`rtn` takes each block's scale from its maximum. `mse` searches it (`quantizers.scales`) for the smallest weight error. Neither needs rows; their records carry output errors where rows
are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from prism_ray.hessian.state import GramState
from prism_ray.quantizers.base import Member, Quantized, QuantizerOptions, assemble, output_error, record
from prism_ray.quantizers.rtn import tensor_scale_for
from prism_ray.quantizers.scales import search_scales


def amax_scales(member: Member, options: QuantizerOptions) -> Tensor:
    """Scale bytes [O, G * width] from the block maxima."""
    spec = member.spec
    tensor_scale, _ = tensor_scale_for(member.amax, spec)
    blocks = member.weight.view(member.weight.shape[0], -1, spec.block)
    return spec.grid.encode_amax(blocks.abs().amax(-1) / tensor_scale, options.scale_rule or spec.amax_rule, spec.codes.largest)


def searched_scales(member: Member, options: QuantizerOptions, metric: Tensor | None = None) -> Tensor:
    """Scale bytes [O, G * width] by search under a metric (None: weight error)."""
    tensor_scale, _ = tensor_scale_for(member.amax, member.spec)
    return search_scales(member.weight, member.spec, tensor_scale, options.scale_rule or member.spec.amax_rule, metric)


def rounding_error(member: Member, stats: GramState | None, options: QuantizerOptions) -> float:
    """Relative output error of plain rounding to nearest: what a record calls error_before."""
    tensor = assemble(member, amax_scales(member, options), member.weight)
    return output_error(member.weight, member.weight - tensor.dequantize(), stats)


def rtn(
    members: Sequence[Member], stats: GramState | None, options: QuantizerOptions, *, asked: str = "rtn", reason: str = ""
) -> Quantized:
    """Round to nearest; asked and reason are given where another method falls back to it."""
    out: Quantized = []
    for member in members:
        tensor = assemble(member, amax_scales(member, options), member.weight)
        entry = record(member, tensor, stats, asked=asked, method="rtn", reason=reason)
        out.append((tensor, replace(entry, error_before=entry.error_after)))
    return out


def mse(members: Sequence[Member], stats: GramState | None, options: QuantizerOptions) -> Quantized:
    """Round under the block scales of smallest weight error."""
    out: Quantized = []
    for member in members:
        tensor = assemble(member, searched_scales(member, options), member.weight)
        before = rounding_error(member, stats, options)
        out.append((tensor, record(member, tensor, stats, asked="mse", method="mse", error_before=before)))
    return out
