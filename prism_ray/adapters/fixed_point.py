"""Why a naive merge returns the base: is the un-adapted block what a quantizer gives back for the adapted one? (scale-qlora App. C)

A base block q0 lies on the grid. A naive merge rounds w = q0 + delta again. Three tests ask what comes back, by reconstructed weight:

    weight-MSE   is q0 a global minimum of ||w - q||^2 over every q = t * s * codes, every legal scale byte s, every choice of codes?
    amax/6       does the rule s = grid(amax / 6 / t), codes to nearest, give exactly q0?
    ceiling      the same for the smallest s whose largest code reaches amax

Stored bytes are compared too, but they prove little: (s, codes) and (2 s, codes / 2) are one weight under two bytes. Two numbers say what became of the correction: `kept`, <q - q0, delta> / <delta, delta>,
0 where it is deleted, 1 where it is kept on average, above 1 where a rule moves the block further than it was asked to; and `missed`, ||w - q|| / ||delta||, 1 where the base comes back.

The search is exact. For one scale the best codes are the nearest of the reconstructed values r_k = float32(k * s * t), which is how `QuantTensor` decodes; their midpoints (r_k + r_k+1) / 2
are exact in float64, so which is nearest is never a matter of rounding. Scales that cannot win are left out by proof, not by guess: below the first one for which the block's maximum alone costs no more than
the amax/6 rule's whole block; above the first one that rounds the whole block to zero, since all above do the same.

Ties. Candidates that reconstruct q0 are q0, whatever their bytes. Costs of the others are float64 sums with a relative error below (B + 4) 2^-52; where the interval of one meets that of q0's cost, the two are
compared again in rational arithmetic. So `TIED` means equal to the last digit, and q0 is then *a* global minimum, not the only one; shares count it and `tied` says how many there are. Among equal costs the reported byte is the
larger scale, as in `quantizers.scales`.

Refused: formats whose codes are not E2M1. Legend: N blocks, B columns a block, K legal scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor

from prism_ray.core.errors import FormatError
from prism_ray.core.registry import Registry
from prism_ray.formats import e2m1
from prism_ray.formats.spec import FormatSpec
from prism_ray.formats.tensor import QuantTensor
from prism_ray.risk.transfer import Estimate, wilson

PIECE = 1 << 16
"""Weights searched at once: about 4 MiB of temporaries."""
MAGNITUDES = torch.tensor(e2m1.VALUES[:8])
NO, TIED, UNIQUE = 0, 1, 2
SEARCH = "weight-MSE"


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Blocks of one format, each with its own tensor scale. base, adapted: float32 [N, B], base on the grid. scales: the base's bytes uint8 [N]. factor: float32 [N]."""

    base: Tensor
    adapted: Tensor
    scales: Tensor
    factor: Tensor
    spec: FormatSpec


@dataclass(frozen=True, kw_only=True)
class Returned:
    """One test over some blocks; sums and counts, so `+` is over more blocks.

    returned: blocks whose base is what the test asks for; tied: of these, blocks where another weight is as good; same_scale: blocks whose stored byte is the base's.
    moved: <q - q0, delta>; wanted: <delta, delta>; lost: ||w - q||^2.
    """

    test: str
    blocks: int
    returned: int
    same_scale: int
    moved: float
    wanted: float
    lost: float
    tied: int = 0

    def __add__(self, other: Returned) -> Returned:
        return replace(
            self,
            blocks=self.blocks + other.blocks,
            returned=self.returned + other.returned,
            same_scale=self.same_scale + other.same_scale,
            moved=self.moved + other.moved,
            wanted=self.wanted + other.wanted,
            lost=self.lost + other.lost,
            tied=self.tied + other.tied,
        )

    @property
    def share(self) -> Estimate:
        """Share of blocks that come back as the base, with Wilson's interval."""
        return wilson(self.returned, self.blocks)

    @property
    def kept(self) -> float:
        """Share of the correction that is left; NaN without one."""
        return self.moved / self.wanted if self.wanted > 0 else math.nan

    @property
    def missed(self) -> float:
        """Error against the adapted weight in units of the correction; NaN without one."""
        return math.sqrt(self.lost / self.wanted) if self.wanted > 0 else math.nan


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The best reconstruction of each block: stored byte uint8 [N], values float32 [N, B], squared error float64 [N]. base: NO, TIED or UNIQUE int8 [N]: whether the
    given base block is a global minimum; None where none was given."""

    scales: Tensor
    values: Tensor
    cost: Tensor
    base: Tensor | None


def blocks_of(base: QuantTensor, delta: Tensor, index: Tensor | None = None) -> Blocks:
    """Blocks of a quantized weight [..., O, I] and of the same plus `delta` (float32 sum). index: int64, blocks to take of the ... * O * G; all without it."""
    spec = require_fp4(base.format)
    if tuple(delta.shape) != base.shape:
        raise FormatError(f"the correction has shape {list(delta.shape)}, the weight {list(base.shape)}")
    weight = base.dequantize()
    adapted = (weight + delta.to(torch.float32)).view(-1, spec.block)
    if not bool(torch.isfinite(adapted).all()):
        raise FormatError("the adapted weight holds NaN or infinity", remedy="training diverged: use an earlier checkpoint")
    factor = base.tensor_scale.reshape(*base.tensor_scale.shape, 1, 1).expand(base.scales.shape).reshape(-1)
    parts = (weight.view(-1, spec.block), adapted, base.scales.reshape(-1), factor)
    blocks, adapted, scales, factor = parts if index is None else tuple(part.index_select(0, index) for part in parts)
    return Blocks(base=blocks, adapted=adapted, scales=scales, factor=factor, spec=spec)


def require_fp4(spec: FormatSpec, where: str = "") -> FormatSpec:
    """The format itself where its codes are E2M1, else FormatError."""
    if not spec.is_fp4:
        raise FormatError(f"codes of {spec.name} are not E2M1", where=where, remedy="use nvfp4 or mxfp4")
    return spec


def levels(scale: Tensor, factor: Tensor) -> Tensor:
    """The eight reconstructed magnitudes float32 [..., 8] under decoded scales and tensor scales [...], to the bit those that `QuantTensor.dequantize` gives."""
    return scale.unsqueeze(-1) * MAGNITUDES * factor.unsqueeze(-1)


def nearest_level(magnitude: Tensor, found: Tensor) -> Tensor:
    """Index int64 of the level nearest to each magnitude: [..., B] float64 among [..., 8] float32. A midpoint goes to the smaller one, which costs the same."""
    wide = found.to(torch.float64)
    middle = (wide[..., 1:] + wide[..., :-1]) / 2
    index = torch.zeros(magnitude.shape, dtype=torch.int64)
    for level in range(7):
        index += magnitude > middle[..., level, None]
    return index


def nearest_values(weight: Tensor, scale: Tensor, factor: Tensor) -> Tensor:
    """Blocks [N, B] under the best codes for decoded scales and tensor scales [N], float32."""
    found = levels(scale, factor)
    picked = found.gather(-1, nearest_level(weight.abs().to(torch.float64), found))
    return torch.where(weight < 0, -picked, picked)


def squared_error(weight: Tensor, values: Tensor) -> Tensor:
    """||w - q||^2 of each block, float64 [N]."""
    return (weight.to(torch.float64) - values.to(torch.float64)).square().sum(-1)


@lru_cache(maxsize=4)
def legal_scales(spec: FormatSpec) -> tuple[Tensor, Tensor]:
    """(bytes uint8 [K], values float32 [K]) of every legal scale in rising order."""
    data = torch.arange(256, dtype=torch.uint8)
    data = data[~spec.grid.illegal(data) & (spec.grid.decode(data) >= 0)]
    values = spec.grid.decode(data)
    order = values.argsort()
    return data[order], values[order]


# --- fixed rules ---

Bytes = Callable[[Tensor, Tensor, FormatSpec], Tensor]
"""Block maxima float32 [N], tensor scales [N], format -> scale bytes uint8 [N]."""
RULES: Registry[Bytes] = Registry("scale rule")


def amax_bytes(amax: Tensor, factor: Tensor, spec: FormatSpec) -> Tensor:
    """amax / 6 on the grid: to nearest on E4M3, nearest in log2 on E8M0."""
    return spec.grid.encode(amax / factor / spec.codes.largest)


def ceiling_bytes(amax: Tensor, factor: Tensor, spec: FormatSpec) -> Tensor:
    """The smallest scale whose largest code, as it is reconstructed, is at or above the maximum; the largest scale where none is."""
    data, values = legal_scales(spec)
    index = torch.searchsorted(values.to(torch.float64), amax.to(torch.float64) / (factor.to(torch.float64) * spec.codes.largest))
    last = len(values) - 1
    # The quotient may lie a rounding above a scale that reaches the maximum, or below one that does not.
    for position in (index + 1, index, index - 1):
        position = position.clamp(0, last)
        index = torch.where(values[position] * spec.codes.largest * factor >= amax, position, index)
    return data[index.clamp(max=last)]


RULES.add("amax/6", amax_bytes)
RULES.add("ceiling", ceiling_bytes)
RULES.add("even", lambda amax, factor, spec: spec.grid.encode_amax(amax / factor, "even", spec.codes.largest))
RULES.add("floor", lambda amax, factor, spec: spec.grid.encode_amax(amax / factor, "floor", spec.codes.largest))


def rules_of(spec: FormatSpec) -> list[str]:
    """The fixed rules that a format's grid has."""
    return [rule for rule in RULES if rule in ("amax/6", "ceiling") or rule in spec.grid.amax_rules]


def rule_test(blocks: Blocks, rule: str, factor: Tensor | None = None) -> Returned:
    """Whether a fixed rule gives the base back. factor: tensor scales [N] to round under instead of the base's. UnknownName for a rule that the grid lacks."""
    factor = blocks.factor if factor is None else factor
    data = RULES[rule](blocks.adapted.abs().amax(-1), factor, blocks.spec)
    values = nearest_values(blocks.adapted, blocks.spec.grid.decode(data), factor)
    return _returned(blocks, rule, data, values, (values == blocks.base).all(-1))


def search_test(blocks: Blocks) -> Returned:
    """Whether the base is a global minimum of the weight error, over every legal scale byte and every choice of codes."""
    found = search(blocks.adapted, blocks.factor, blocks.spec, blocks.base)
    assert found.base is not None
    result = _returned(blocks, SEARCH, found.scales, found.values, found.base != NO)
    return replace(result, tied=int((found.base == TIED).sum()))


def _returned(blocks: Blocks, test: str, data: Tensor, values: Tensor, same: Tensor) -> Returned:
    delta = (blocks.adapted - blocks.base).to(torch.float64)
    return Returned(
        test=test,
        blocks=len(same),
        returned=int(same.sum()),
        same_scale=int((data == blocks.scales).sum()),
        moved=float(((values - blocks.base).to(torch.float64) * delta).sum()),
        wanted=float(delta.square().sum()),
        lost=float(squared_error(blocks.adapted, values).sum()),
    )


# --- exact search ---


def search(weight: Tensor, factor: Tensor, spec: FormatSpec, base: Tensor | None = None) -> Optimum:
    """The global minimum of each block float32 [N, B] under tensor scales [N]; base: blocks [N, B] to be judged."""
    rows = max(1, PIECE // spec.block)
    pieces = [
        _search(part, factor[start : start + rows], spec, None if base is None else base[start : start + rows])
        for start, part in zip(range(0, len(weight), rows), weight.split(rows), strict=False)
    ]
    return Optimum(
        scales=torch.cat([piece.scales for piece in pieces]),
        values=torch.cat([piece.values for piece in pieces]),
        cost=torch.cat([piece.cost for piece in pieces]),
        base=None if base is None else torch.cat([piece.base for piece in pieces if piece.base is not None]),
    )


def _window(weight: Tensor, factor: Tensor, spec: FormatSpec) -> tuple[Tensor, Tensor]:
    """First and last index [N] into the legal scales that can hold the minimum. The small factors widen the window past every rounding in the bounds themselves."""
    _, values = legal_scales(spec)
    amax = weight.abs().amax(-1)
    known = squared_error(weight, nearest_values(weight, spec.grid.decode(amax_bytes(amax, factor, spec)), factor))
    wide, scale = values.to(torch.float64), factor.to(torch.float64)
    least = (amax.to(torch.float64) - known.sqrt() * (1 + 1e-9)).clamp(min=0.0)
    first = torch.searchsorted(wide, least / (spec.codes.largest * scale) * (1 - 1e-6))
    # At a quarter of the scale the first level's midpoint reaches the maximum.
    last = torch.searchsorted(wide, amax.to(torch.float64) * 4 / scale * (1 + 1e-6))
    return first.clamp(max=len(values) - 1), last.clamp(max=len(values) - 1)


def _search(weight: Tensor, factor: Tensor, spec: FormatSpec, base: Tensor | None) -> Optimum:
    data, scales = legal_scales(spec)
    first, last = _window(weight, factor, spec)
    best_cost = torch.full((len(weight),), math.inf, dtype=torch.float64)
    best_values, best_index = torch.zeros_like(weight), first.clone()
    judge = None if base is None else _Judge(weight, base, spec.block)
    for step in range(int((last - first).max()) + 1):
        index = torch.minimum(first + step, last)
        values = nearest_values(weight, scales[index], factor)
        cost = squared_error(weight, values)
        better = cost <= best_cost
        best_cost = torch.where(better, cost, best_cost)
        best_values = torch.where(better.unsqueeze(-1), values, best_values)
        best_index = torch.where(better, index, best_index)
        if judge is not None:
            judge.hear(values, cost, scales[index], factor)
    return Optimum(scales=data[best_index], values=best_values, cost=best_cost, base=None if judge is None else judge.verdict)


class _Judge:
    """Whether blocks [N, B] are global minima for `weight`, from all the candidates that are heard."""

    def __init__(self, weight: Tensor, base: Tensor, block: int):
        self.weight, self.base = weight, base
        self.cost = squared_error(weight, base)
        self.margin = (block + 4) * 2.0**-52
        self.verdict = torch.full((len(weight),), UNIQUE, dtype=torch.int8)

    def hear(self, values: Tensor, cost: Tensor, scale: Tensor, factor: Tensor) -> None:
        """One candidate a block: values [N, B], their cost, decoded scale and tensor scale [N]."""
        other = (values != self.base).any(-1)
        same = (~other & (self.verdict == UNIQUE)).nonzero().flatten()
        self.verdict[same[_halfway(self.weight[same], scale[same], factor[same])]] = TIED
        slack = self.margin * torch.maximum(cost, self.cost)
        self.verdict[other & (cost < self.cost - slack)] = NO
        close = other & ((cost - self.cost).abs() <= slack) & (self.verdict != NO)
        for block in close.nonzero().flatten().tolist():
            gap = _exact_gap(self.weight[block], values[block], self.base[block])
            if gap <= 0:
                self.verdict[block] = NO if gap < 0 else TIED


def _halfway(weight: Tensor, scale: Tensor, factor: Tensor) -> Tensor:
    """Blocks of which a weight lies exactly between its level and the next one, which `nearest_level` does not take and which costs the same."""
    found = levels(scale, factor)
    magnitude = weight.abs().to(torch.float64)
    index = nearest_level(magnitude, found)
    low, high = (found.gather(-1, position).to(torch.float64) for position in (index, (index + 1).clamp(max=7)))
    return ((low < high) & (2 * magnitude == low + high)).any(-1)


def _exact_gap(weight: Tensor, values: Tensor, base: Tensor) -> Fraction:
    """||w - values||^2 - ||w - base||^2 of one block, without rounding."""
    total = Fraction(0)
    for w, q, q0 in zip(weight.tolist(), values.tolist(), base.tolist(), strict=True):
        total += (Fraction(w) - Fraction(q)) ** 2 - (Fraction(w) - Fraction(q0)) ** 2
    return total
