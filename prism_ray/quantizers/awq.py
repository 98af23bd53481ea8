"""AWQ: rounding to nearest after the input channels that carry the most were given larger weights.

    Q(W diag(s)) diag(1/s) x,        s_j = m_j^alpha / sqrt(max m^alpha min m^alpha),        m_j = mean |x_j|

s is folded into what makes x (`calibrate.fold`), so that no operation is added. One s serves all weights that read the place; alpha is the one of `awq_grid` exponents k / awq_grid in
[0, 1) with the smallest output error sum tr(E H E'), E = W - Q(W diag(s)) diag(1/s), over all of them, H the sum of x x'. The exponents are compared under scales from the block maxima; where
scales are searched, the FINALISTS best and alpha = 0 are compared again under searched ones, so the result is never worse than no factors under the same scales.

*Blocks* (scale-qlora, App. F): factors that vary within a block move its maximum. Under E8M0 scales, whose steps are octaves, that can cost all weights of the block a bit.
`awq_block_constant` uses the geometric mean of m over each block: then Q(W diag(s)) has the blocks of W, each multiplied by one number.

Channels whose mean magnitude lies below FLOOR times the largest count as FLOOR of it: a dead channel gets no infinite factor.

Records compare with the weight as it was before folding, so errors of methods are comparable. Refuses nothing: without a place, or without rows to choose by, the weight is rounded as it is and
its record says `rtn` and why. An expert without rows is rounded under the factors that others have chosen for its place, and recorded so.

Legend: P channels of a place, I columns of a weight that reads it (several may read one channel), O rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from prism_ray.formats.fusion import fused_groups
from prism_ray.hessian.state import GramState
from prism_ray.quantizers.base import Choice, Factors, Groups, Member, Quantized, QuantizerOptions, assemble, output_error, record
from prism_ray.quantizers.rtn import tensor_scale_for
from prism_ray.quantizers.scales import round_blocks
from prism_ray.quantizers.simple import amax_scales, rounding_error, searched_scales

FLOOR = 1e-4
FINALISTS = 2
NO_PLACE = "no place to fold its factors"


def awq(members: Sequence[Member], stats: GramState | None, options: QuantizerOptions) -> Quantized:
    """Round members whose factors are folded in already (`Member.factors`)."""
    out: Quantized = []
    for member in members:
        factors = member.factors or Factors(reason=NO_PLACE)
        reason = factors.reason or unusable(stats, options)
        tensor = assemble(member, _scales(member, stats, factors.columns, options), member.weight)
        original = factors.unfold(member.weight)
        error = original - factors.unfold(tensor.dequantize())
        entry = record(
            member,
            tensor,
            stats,
            asked="awq",
            method="rtn" if reason else "awq",
            reason=reason,
            alpha=factors.alpha,
            error_before=rounding_error(_unfolded(member, factors), stats, options),
            error_after=output_error(original, error, stats),
            weight_error=_relative(error, original),
        )
        out.append((tensor, entry))
    return out


def choose(groups: Groups, source: Tensor, options: QuantizerOptions) -> Choice:
    """Factors of a place that `groups` read; source: int64 [I], the channel of the place behind each column of theirs."""
    blocks: set[int] = set()
    total, weight, why = torch.zeros(source.shape[0], dtype=torch.float64), 0.0, unusable(None, options)
    for members, stats in groups():
        if found := unusable(stats, options):
            why = found if stats is not None else why
            continue
        assert stats is not None and stats.absolute is not None
        total, weight = total + stats.absolute, weight + stats.weight
        blocks |= {member.spec.block for member in members} if options.awq_block_constant else set()
    if not weight or not bool(total.any()):
        return Choice(reason="its input is always zero" if weight else why)
    logs = log_magnitudes(total / weight, source, sorted(blocks))
    alphas = torch.arange(options.awq_grid, dtype=torch.float64) / options.awq_grid
    costs = _costs(groups, logs, source, alphas, replace_scales(options, "amax"))
    if options.scales != "amax":
        # Ties and the final choice go to the smaller exponent: it changes the model less.
        alphas = alphas[sorted({0, *costs.argsort(stable=True)[:FINALISTS].tolist()})]
        costs = _costs(groups, logs, source, alphas, options)
    alpha = float(alphas[costs.argmin()])
    return Choice(channels=factors_of(logs, alpha) if alpha else None, alpha=alpha)


def unusable(stats: GramState | None, options: QuantizerOptions) -> str:
    """Why statistics have no say in the factors, or empty."""
    if stats is None or not stats.tokens:
        return "no calibration rows"
    if options.starved == "rtn" and stats.starved:
        return f"{stats.tokens} rows for {stats.width} columns"
    return ""


def log_magnitudes(mean: Tensor, source: Tensor, blocks: Sequence[int] = ()) -> Tensor:
    """log m of each channel, float64 [P], from the mean |x| of each column, [I]; P is 1 + the largest of source.

    Columns that read one channel are averaged. blocks: widths of scale blocks over which m is made constant by its geometric mean; channels that meet in any block
    are one set.
    """
    channels = int(source.max()) + 1
    count = torch.zeros(channels, dtype=torch.float64).index_add_(0, source, torch.ones_like(mean))
    mean = torch.zeros(channels, dtype=torch.float64).index_add_(0, source, mean) / count.clamp(min=1.0)
    logs = mean.clamp(min=FLOOR * float(mean.max())).log()
    # A channel that no column reads has no magnitude, and its factor must not set the extremes.
    logs[count == 0] = logs[count > 0].min()
    if not blocks:
        return logs
    label = _connected(source, channels, blocks)
    read = (count > 0).to(torch.float64)
    sums = torch.zeros(channels, dtype=torch.float64).index_add_(0, label, logs * read)
    sizes = torch.zeros(channels, dtype=torch.float64).index_add_(0, label, read)
    return torch.where(count > 0, sums[label] / sizes[label].clamp(min=1.0), logs)


def _connected(source: Tensor, channels: int, blocks: Sequence[int]) -> Tensor:
    """For each channel the smallest channel that blocks tie it to, directly or through others."""
    label = torch.arange(channels)
    while True:
        before = label
        for block in blocks:
            smallest = label[source].view(-1, block).amin(-1).repeat_interleave(block)
            label = label.scatter_reduce(0, source, smallest, "amin")
        if torch.equal(label, before):
            return label


def factors_of(logs: Tensor, alpha: float) -> Tensor:
    """s, float32 [P]: the geometric mean of its extremes is 1."""
    return (alpha * (logs - (logs.max() + logs.min()) / 2)).exp().to(torch.float32)


def replace_scales(options: QuantizerOptions, scales: str) -> QuantizerOptions:
    """The same options with another way to choose block scales."""
    return options.model_copy(update={"scales": scales})


def _costs(groups: Groups, logs: Tensor, source: Tensor, alphas: Tensor, options: QuantizerOptions) -> Tensor:
    """sum tr(E H E') of each exponent, float64."""
    costs = torch.zeros(len(alphas), dtype=torch.float64)
    for members, stats in groups():
        if stats is None or unusable(stats, options):
            continue
        gram = stats.matrix().to(torch.float32)
        for place, alpha in enumerate(alphas.tolist()):
            columns = factors_of(logs, alpha)[source]
            folded = [member.weight * columns for member in members]
            for member, weight, amax in zip(members, folded, _maxima(members, folded), strict=True):
                trial = replace(member, weight=weight, amax=amax)
                error = member.weight - _rounded(trial, _scales(trial, stats, columns, options)) / columns
                costs[place] += ((error @ gram) * error).sum(dtype=torch.float64)
    return costs


def _maxima(members: Sequence[Member], weights: Sequence[Tensor]) -> list[Tensor]:
    """The maximum of each weight and of what it is served with."""
    own = {member.name: weight.abs().amax() for member, weight in zip(members, weights, strict=True)}
    shared = {name: torch.stack([own[other] for other in group]).amax() for group in fused_groups(own) for name in group}
    return [shared[member.name] for member in members]


def _scales(member: Member, stats: GramState | None, columns: Tensor | None, options: QuantizerOptions) -> Tensor:
    """Block scales of a folded weight. Its input is x / columns, so the mean square of an input column is H_jj / columns_j^2."""
    if options.scales == "amax":
        return amax_scales(member, options)
    if options.scales == "mse" or stats is None or unusable(stats, options):
        return searched_scales(member, options)
    square = (stats.matrix().diagonal() / stats.weight).to(torch.float32)
    return searched_scales(member, options, square if columns is None else square / columns.square())


def _rounded(member: Member, scales: Tensor) -> Tensor:
    """The values [O, I] that planes of the weight under these scales hold, without making the planes."""
    tensor_scale, _ = tensor_scale_for(member.amax, member.spec)
    step = (member.spec.grid.decode(scales) * tensor_scale).unsqueeze(-1)
    return round_blocks(member.weight.view(member.weight.shape[0], -1, member.spec.block), step, member.spec).view_as(member.weight)


def _unfolded(member: Member, factors: Factors) -> Member:
    """The weight as it was, with a tensor scale of its own where folding has changed it."""
    if factors.columns is None and factors.rows is None:
        return member
    weight = factors.unfold(member.weight)
    return replace(member, weight=weight, amax=weight.abs().amax())


def _relative(error: Tensor, weight: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(weight, dtype=torch.float64))
    return float(torch.linalg.vector_norm(error, dtype=torch.float64)) / norm if norm else 0.0
