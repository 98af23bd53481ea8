"""Coordinate descent on a quantized weight under its Hessian: scales one block at a time, codes one column at a time.

GPTQ is greedy: a column that was rounded early never hears of what happened later. With R = W - Q and the objective tr(R H R'), the best value of column j while all others stay is

    q_j = round_s(q_j + (R H)_j / H_jj),

and the best scale of block b with its codes v_b fixed is

    s_b + (R H)_b . v_b / (v_b H_bb v_b'),

put on the scale grid and taken only where it lowers the objective. Both steps never raise it (up to float32 rounding), so a few passes after a sweep keep what GPTQ found and improve on it.
Passes are blocked as the sweep is: inside a block column by column, then products for the panel and for the rest.

Legend: E experts, O rows, I columns, G blocks a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prism_ray.formats.spec import FormatSpec
from prism_ray.quantizers.rounding import rounder

PANEL = 128


def descend(weight: Tensor, quantized: Tensor, step: Tensor, spec: FormatSpec, gram: Tensor) -> Tensor:
    """One pass over the columns; the new quantized values, float32 [E, O, I].

    weight, quantized: float32 [E, O, I]. step: float32 [E, O, G], decoded scale times tensor scale; columns under a zero step stay zero. gram: the damped mean
    Gram matrix, float32 [E, I, I] with a positive diagonal.
    """
    columns = weight.shape[-1]
    steps = step.repeat_interleave(spec.block, -1).transpose(-1, -2).contiguous()
    inverse = torch.where(steps > 0, 1.0 / steps, torch.zeros_like(steps))
    # A clone, because `contiguous` of a single row would be the caller's tensor.
    values = quantized.transpose(-1, -2).clone(memory_format=torch.contiguous_format)
    pull = torch.bmm(gram, (weight - quantized).transpose(-1, -2))
    pull /= gram.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    # Rows of H over their diagonal: `pull` stays (R H)_j / H_jj.
    scaled = gram / gram.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    nearest = rounder(spec.codes)
    for start in range(0, columns, PANEL):
        stop = min(start + PANEL, columns)
        moved = torch.empty_like(values[:, start:stop])
        for low in range(start, stop, spec.block):
            high = min(low + spec.block, stop)
            for column in range(low, high):
                target = (values[:, column] + pull[:, column]) * inverse[:, column]
                rounded = nearest(target).mul_(steps[:, column])
                change = rounded - values[:, column]
                values[:, column] = rounded
                moved[:, column - start] = change
                if column + 1 < high:
                    pull[:, column + 1 : high].addcmul_(scaled[:, column + 1 : high, column, None], change[:, None], value=-1)
            if high < stop:
                pull[:, high:stop] -= torch.bmm(scaled[:, high:stop, low:high], moved[:, low - start : high - start])
        if stop < columns:
            pull[:, stop:] -= torch.bmm(scaled[:, stop:, start:stop], moved)
    return values.transpose(-1, -2).contiguous()


def refit_scales(
    weight: Tensor, quantized: Tensor, scales: Tensor, tensor_scale: Tensor, spec: FormatSpec, gram: Tensor
) -> tuple[Tensor, Tensor]:
    """(scales, quantized): one pass over the blocks with the codes fixed.

    weight, quantized: float32 [O, I]. scales: uint8 [O, G * width]. tensor_scale: float32 [] or [O]. gram: damped mean, float32 [I, I].
    """
    factor = tensor_scale.expand(weight.shape[0])
    step = spec.grid.decode(scales) * factor[:, None]
    codes = quantized / torch.where(step > 0, step, torch.inf).repeat_interleave(spec.block, -1)
    pull = (weight - quantized) @ gram
    data = scales.view(scales.shape[0], -1, spec.grid.width).clone()
    for block in range(step.shape[1]):
        columns = slice(block * spec.block, (block + 1) * spec.block)
        code = codes[:, columns]
        energy = ((code @ gram[columns, columns]) * code).sum(-1)
        gain = (pull[:, columns] * code).sum(-1)
        wanted = step[:, block] + torch.where(energy > 0, gain / energy, torch.zeros_like(gain))
        stored = spec.grid.encode((wanted / factor).clamp(min=0.0)[:, None])
        new = spec.grid.decode(stored)[:, 0] * factor
        change = new - step[:, block]
        # The change of the objective is change^2 energy - 2 change gain. A scale that would round to nothing is never taken.
        better = (change * change * energy < 2 * change * gain) & (new > 0)
        change = torch.where(better, change, torch.zeros_like(change))
        data[:, block] = torch.where(better[:, None], stored, data[:, block])
        step[:, block] += change
        pull -= (change[:, None] * code) @ gram[columns]
    return data.view(scales.shape), codes * step.repeat_interleave(spec.block, -1)
