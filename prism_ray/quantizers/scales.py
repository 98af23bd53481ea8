"""Block scales chosen by search: for each block the stored scale whose rounding error is smallest under a metric.

For a block w [block] and a candidate step s = decode(byte) * tensor_scale the cost is

    e = w - s * round(w / s),        cost = e M e'

with M the identity (weight-MSE), a diagonal (importance of columns), or a full [block, block] matrix (the part of a Hessian that belongs to the block). Candidates are the bytes that the
factors of `FACTORS` give when they multiply the block's maximum, so every candidate is a storable scale and the search is exact over them. Ties go to the larger scale, which
clips less. A block that is all zero keeps the byte of its maximum.

Rows are searched in pieces that stay in a core's cache; the result does not depend on the piece.

Legend: E experts (one for a single weight), O rows, I columns, G blocks a row, B columns a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prism_ray.formats.spec import FormatSpec
from prism_ray.quantizers.rounding import rounder

FACTORS: dict[str, tuple[float, ...]] = {
    # One step of E4M3 is 1/16 to 1/8 of the scale: these factors reach every byte between 0.75 and 1.15 of the unrounded scale, and all but 2 % of those from 0.6 on.
    "e4m3": tuple(round(1.15 - 0.05 * step, 2) for step in range(12)),
    "e8m0": (2.0, 1.0, 0.5),
    "bf16": tuple(round(1.06 - 0.03 * step, 2) for step in range(18)),
}
PIECE = 1 << 16
"""Weights searched at once: 256 KiB of float32."""


def search_scales(weight: Tensor, spec: FormatSpec, factor: Tensor, rule: str, metric: Tensor | None = None) -> Tensor:
    """Scale bytes uint8 [O, G * width] of a weight [O, I] float32.

    factor: tensor scale, float32 [O] (one a row) or []. metric: None, [I], or [G, B, B] (symmetric, positive semi-definite), float32.
    """
    rows = max(1, PIECE // weight.shape[1])
    factor = factor.expand(weight.shape[0])
    pieces = zip(weight.split(rows), factor.split(rows), strict=True)
    return torch.cat([_search(piece, spec, scale, rule, metric) for piece, scale in pieces])


def _search(weight: Tensor, spec: FormatSpec, factor: Tensor, rule: str, metric: Tensor | None) -> Tensor:
    rows, columns = weight.shape
    groups = columns // spec.block
    blocks = weight.reshape(rows, groups, spec.block)
    largest = blocks.abs().amax(-1)
    amax = largest / factor[:, None]
    # Errors in units of a power of two near the block's maximum: the squares of weights below 1e-19 or above 1e19 leave float32's range.
    unit = torch.ldexp(torch.ones_like(largest), -torch.frexp(largest).exponent.clamp(-126, 126))
    blocks = blocks * unit.unsqueeze(-1)
    costs: list[Tensor] = []
    candidates: list[Tensor] = []
    for multiple in FACTORS[spec.grid.name]:
        data = spec.grid.encode_amax(amax * multiple, rule, spec.codes.largest)
        if candidates and torch.equal(data, candidates[-1]):
            continue
        step = (spec.grid.decode(data) * factor[:, None] * unit).unsqueeze(-1)
        candidates.append(data)
        costs.append(block_cost(blocks - round_blocks(blocks, step, spec), metric))
    # argmin takes the first of equal costs: the larger scale.
    chosen = torch.stack(costs).argmin(0).repeat_interleave(spec.grid.width, -1)
    return torch.stack(candidates).gather(0, chosen.unsqueeze(0)).squeeze(0)


def round_blocks(blocks: Tensor, step: Tensor, spec: FormatSpec) -> Tensor:
    """blocks [..., B] rounded onto step [..., 1] times the format's codes; zero where the step is zero."""
    return rounder(spec.codes)(blocks / torch.where(step > 0, step, torch.inf)) * step


def block_cost(error: Tensor, metric: Tensor | None) -> Tensor:
    """e M e' of each block: error [O, G, B] -> [O, G]."""
    if metric is None:
        return error.square().sum(-1)
    if metric.ndim == 1:
        return (error.square() * metric.view(error.shape[1:])).sum(-1)
    by_block = error.transpose(0, 1)
    return (torch.bmm(by_block, metric) * by_block).sum(-1).T


def block_diagonal(matrix: Tensor, block: int) -> Tensor:
    """The [G, B, B] blocks on the diagonal of [I, I], float32."""
    groups = matrix.shape[0] // block
    return matrix.view(groups, block, groups, block).diagonal(dim1=0, dim2=2).permute(2, 0, 1).to(torch.float32).contiguous()
