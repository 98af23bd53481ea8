"""GPTQ on a format's own grid: block scales first, then a sweep over the columns with error feedback.

Minimizes tr((W - Q) H (W - Q)') greedily. With (H + d)^-1 = U' U (`hessian.factor`), column j is rounded under its block's fixed scale, and its error is spread over the columns
that follow:

    q_j = s_j round(w_j / s_j),    e_j = (w_j - q_j) / U_jj,    w_k -= e_j U_jk  for k > j.

The sweep is blocked: inside a scale block column by column, then one product for the rest of a panel of PANEL columns, then one for the rest of the matrix. Weights with the same
input share the factor and are swept as one matrix; experts are swept side by side, each with its own factor. For a diagonal H nothing is spread and the result is rounding to nearest.

*Scales* are fixed before the sweep (design.md): from the block maxima, or by `quantizers.scales.search_scales` with each column's error weighted by H_jj. `refine` passes of coordinate
descent (`quantizers.descent`) may follow, which fit scales and codes to each other under the same H.

*Order*: with `act_order` columns are swept by falling mean square. Scales are fixed by then, so blocks stay what they are in memory and no index tensor is stored.

Legend: E experts, O rows (of all weights of the group), I columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prism_ray.formats.spec import FormatSpec
from prism_ray.hessian.factor import SMALLEST_SQUARE, Factor, NoFactor, factorize
from prism_ray.hessian.state import GramState
from prism_ray.quantizers.base import Member, Quantized, QuantizerOptions, assemble, record
from prism_ray.quantizers.descent import descend, refit_scales
from prism_ray.quantizers.rounding import rounder
from prism_ray.quantizers.rtn import tensor_scale_for
from prism_ray.quantizers.simple import amax_scales, rounding_error, rtn, searched_scales

PANEL = 128
IDLE = 2.0**-48
"""Weight of a dead column, as a part of the mean one, where scales are chosen: its error vanishes in float32 beside that of a live column, and a block of dead
columns alone is fitted to its weights."""


def sweep(weight: Tensor, step: Tensor, spec: FormatSpec, upper: Tensor, *, order: Tensor | None = None) -> Tensor:
    """The values at which each column was rounded, float32 [E, O, I]: quantize them under `step` to get the codes.

    weight: float32 [E, O, I]. step: decoded scale times tensor scale, float32 [E, O, G]; columns under a zero step become zero. upper: U [E, I, I] in the
    order of the sweep. order: [E, I] column indices in the order of the sweep, default as they are.
    """
    columns = weight.shape[-1]
    step = step.repeat_interleave(spec.block, -1)
    if order is not None:
        index = order.unsqueeze(1).expand_as(weight)
        weight, step = weight.gather(-1, index), step.gather(-1, index)
    # [E, I, O]: a column of all rows lies together. A clone, because `contiguous` of a single row would be the caller's weight.
    work = weight.transpose(-1, -2).clone(memory_format=torch.contiguous_format)
    steps = step.transpose(-1, -2).contiguous()
    # Divided, not multiplied by a reciprocal: a tie must go the way that rounding to nearest sends it.
    divisor = torch.where(steps > 0, steps, torch.inf)
    upper = upper.to(torch.float32)
    for start in range(0, columns, PANEL):
        stop = min(start + PANEL, columns)
        error = _panel(work[:, start:stop], steps[:, start:stop], divisor[:, start:stop], upper[:, start:stop, start:stop], spec)
        if stop < columns:
            work[:, stop:] -= torch.bmm(upper[:, start:stop, stop:].transpose(1, 2), error)
    swept = work.transpose(-1, -2)
    if order is not None:
        swept = torch.empty_like(weight).scatter_(-1, index, swept)
    return swept.contiguous()


def _panel(work: Tensor, steps: Tensor, divisor: Tensor, upper: Tensor, spec: FormatSpec) -> Tensor:
    """Sweep a panel [E, P, O] in place; returns its errors e, same shape."""
    error = torch.empty_like(work)
    nearest = rounder(spec.codes)
    diagonal = upper.diagonal(dim1=-2, dim2=-1)
    width = work.shape[1]
    for start in range(0, width, spec.block):
        stop = min(start + spec.block, width)
        for column in range(start, stop):
            value = work[:, column]
            rounded = nearest((value / divisor[:, column]).contiguous()).mul_(steps[:, column])
            torch.sub(value, rounded, out=rounded).div_(diagonal[:, column, None])
            error[:, column] = rounded
            if column + 1 < stop:
                work[:, column + 1 : stop].addcmul_(upper[:, column, column + 1 : stop, None], rounded[:, None], value=-1)
        if stop < width:
            work[:, stop:] -= torch.bmm(upper[:, start:stop, stop:].transpose(1, 2), error[:, start:stop])
    return error


@dataclass(frozen=True, kw_only=True)
class _Solvable:
    """A group whose factor is there. weight [O, I] and scales uint8 [O, G * width] of all members, one below the other; tensor_scale float32 [O]; order: columns in the
    order of the sweep, of which `factor` is made; mean: see `_objective`."""

    members: Sequence[Member]
    stats: GramState
    factor: Factor
    mean: Tensor
    order: Tensor | None
    weight: Tensor
    scales: Tensor
    tensor_scale: Tensor

    @property
    def step(self) -> Tensor:
        return self.members[0].spec.grid.decode(self.scales) * self.tensor_scale[:, None]


def gptq(members: Sequence[Member], stats: GramState | None, options: QuantizerOptions) -> Quantized:
    """Quantize weights of one format with one input under one Gram matrix; falls back to rounding to nearest, on the record, where there is no factor."""
    return gptq_batch([(members, stats)], options)[0]


def gptq_batch(groups: Sequence[tuple[Sequence[Member], GramState | None]], options: QuantizerOptions) -> list[Quantized]:
    """`gptq` of several groups of one shape and format (the experts of a block), swept side by side; results in the order given.

    Each group's result equals that of its own call up to the order of float32 sums in batched products.
    """
    out: list[Quantized | None] = [None] * len(groups)
    solvable: dict[int, _Solvable] = {}
    for place, (members, stats) in enumerate(groups):
        prepared = _prepare(members, stats, options)
        if isinstance(prepared, str):
            out[place] = rtn(members, stats, options, asked="gptq", reason=prepared)
        else:
            solvable[place] = prepared
    for place, (values, scales) in zip(solvable, _solve(list(solvable.values()), options), strict=True):
        out[place] = _finish(solvable[place], values, scales, options)
    return [found for found in out if found is not None]


def _prepare(members: Sequence[Member], stats: GramState | None, options: QuantizerOptions) -> _Solvable | str:
    """Factor and scales of a group, or why there are none."""
    if stats is None or not stats.tokens:
        return "no calibration rows"
    if options.starved == "rtn" and stats.starved:
        return f"{stats.tokens} rows for {stats.width} columns"
    gram = stats.matrix()
    order = gram.diagonal().argsort(descending=True, stable=True) if options.act_order else None
    try:
        factor = factorize(gram if order is None else gram[order][:, order], stats.weight, damping=options.damping, where=members[0].name)
    except NoFactor as fault:
        return fault.what
    mean = _objective(factor, order)
    squares = (gram.diagonal() / stats.weight).to(torch.float32)
    dead = factor.dead if order is None else order[factor.dead]
    squares[dead] = mean.diagonal()[dead]
    metric = squares if options.scales == "hessian" else None
    scales = [amax_scales(member, options) if options.scales == "amax" else searched_scales(member, options, metric) for member in members]
    factors = [tensor_scale_for(member.amax, member.spec)[0].expand(member.weight.shape[0]) for member in members]
    return _Solvable(
        members=members,
        stats=stats,
        factor=factor,
        mean=mean,
        order=order,
        weight=torch.cat([member.weight for member in members]),
        scales=torch.cat(scales),
        tensor_scale=torch.cat(factors),
    )


def _objective(factor: Factor, order: Tensor | None) -> Tensor:
    """The damped mean Gram matrix under which scales and codes are chosen, float32 [I, I] in the order of memory; dead columns weigh IDLE of it."""
    mean = factor.mean.to(torch.float32)
    mean.diagonal()[factor.dead] *= IDLE
    if order is not None:
        back = torch.argsort(order)
        mean = mean[back][:, back]
    # The diagonal is divided by: it may not leave float32's range.
    mean.diagonal().clamp_(min=SMALLEST_SQUARE)
    return mean


def _solve(groups: Sequence[_Solvable], options: QuantizerOptions) -> list[tuple[Tensor, Tensor]]:
    """(values, scales) of every group: the sweep, then the refinements; side by side."""
    if not groups:
        return []
    spec = groups[0].members[0].spec
    weight = torch.stack([group.weight for group in groups])
    step = torch.stack([group.step for group in groups])
    orders = [group.order for group in groups if group.order is not None]
    upper = torch.stack([group.factor.upper.to(torch.float32) for group in groups])
    values = sweep(weight, step, spec, upper, order=torch.stack(orders) if orders else None)
    scales = [group.scales for group in groups]
    if not options.refine:
        return list(zip(values, scales, strict=True))
    step = step.clone()
    divisor = torch.where(step > 0, step, torch.inf).repeat_interleave(spec.block, -1)
    values = rounder(spec.codes)(values / divisor) * step.repeat_interleave(spec.block, -1)
    mean = torch.stack([group.mean for group in groups])
    for _ in range(options.refine):
        for place, group in enumerate(groups):
            scales[place], values[place] = refit_scales(group.weight, values[place], scales[place], group.tensor_scale, spec, group.mean)
            step[place] = spec.grid.decode(scales[place]) * group.tensor_scale[:, None]
        values = descend(weight, values, step, spec, mean)
    return list(zip(values, scales, strict=True))


def _finish(group: _Solvable, values: Tensor, scales: Tensor, options: QuantizerOptions) -> Quantized:
    """Planes and records of a group's members."""
    factor, stats = group.factor, group.stats
    rows = [member.weight.shape[0] for member in group.members]
    out: Quantized = []
    for member, part, data in zip(group.members, values.split(rows), scales.split(rows), strict=True):
        tensor = assemble(member, data.clone(), part)
        entry = record(
            member,
            tensor,
            stats,
            asked="gptq",
            method="gptq",
            damping=factor.damping,
            retries=factor.retries,
            dead=factor.dead.numel(),
            rank=min(stats.tokens, stats.width - factor.dead.numel()),
            error_before=rounding_error(member, stats, options),
        )
        out.append((tensor, entry))
    return out
