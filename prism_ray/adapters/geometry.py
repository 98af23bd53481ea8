"""Geometry of a learnt scale correction: how many directions it has, what a low rank recovers, what frozen codes can reach (scale-qlora App. G).

A correction is the relative change of the block scales, D = scaling * B A [O, G] as trained, or D = s / s0 - 1 as the grid rounded it.

    energy        sigma_i^2 / sum sigma^2 of the singular values of D; left vectors are directions over rows, right vectors directions over blocks
    spread        1 / sum v_i^4 of a unit vector: how many rows (blocks) a direction touches, 1 .. O (G)
    parts         ||D||^2 split by means without a rest: uniform (one number for the layer), by row (what PEQA's row scales hold), by block column, and the remainder, which only per-block scales hold
    recovery      of the best rank-k D_k: share of the energy, of all scale bytes, and of the bytes that the whole correction moves, which come out the same

Nesting. Frozen-code families of a weight W0 with codes C: one factor a row, one factor a block, any weight. Each is fitted to a target by least squares, so residuals must fall:

    weights W [O, I]    row: a_o = <w_o, c_o> / <c_o, c_o>; block: the same for each block; any weight: residual 0
    outputs Y [n, O]    of inputs X [n, I]: row: y_o ~ a_o X w0_o; block: y_o ~ sum_g s_og X_g w0_og, G unknowns a row; any weight: y_o ~ X w

`Nesting.zero_coded` is the part of a weight target on zero-coded weights, which no scale moves: a floor under both frozen-code residuals. `rounded` is what is left of the fitted block correction
after its grid: a fit of relative steps far below a grid step comes back as the base.

All in float64, up to the rounding onto the grid, which is QAST's. Least squares of outputs takes the minimum-norm change of the base, so rank-deficient inputs are fitted too. Refused: integer formats, shapes that do
not belong together, a target that is the base itself or not finite.

Legend: O rows, I columns, G blocks a row, B columns a block, n samples, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prism_ray.adapters.fixed_point import require_fp4
from prism_ray.core.errors import FormatError
from prism_ray.formats import e2m1
from prism_ray.formats.tensor import QuantTensor
from prism_ray.hessian.survey import THRESHOLD, Spectrum

ROWS_AT_ONCE = 1 << 22
"""Elements of the [rows, n, G] designs of one batch: 32 MiB of float64."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Directions:
    """Singular decomposition of a correction D [O, G], float64. values [k] descending, left [O, k], right [G, k]."""

    values: Tensor
    left: Tensor
    right: Tensor

    @property
    def spectrum(self) -> Spectrum:
        """Energies as a spectrum, with its thresholded and effective rank."""
        return Spectrum(values=self.values.square(), rows=len(self.left), width=len(self.right), threshold=THRESHOLD)

    def energy(self, rank: int) -> float:
        """Share of the energy in the first `rank` directions; 0 for a correction of zeros."""
        energies = self.values.square()
        total = float(energies.sum())
        return float(energies[:rank].sum()) / total if total > 0 else 0.0

    def needed(self, share: float) -> int:
        """The smallest rank with at least that share of the energy."""
        return next((rank for rank in range(1, len(self.values) + 1) if self.energy(rank) >= share), len(self.values))

    def spread(self, position: int = 0) -> tuple[float, float]:
        """(rows, blocks) that a direction touches."""
        return tuple(float(1.0 / side[:, position].pow(4).sum()) for side in (self.left, self.right))  # type: ignore[return-value]

    def truncated(self, rank: int) -> Tensor:
        """The best rank-`rank` D [O, G]."""
        return (self.left[:, :rank] * self.values[:rank]) @ self.right[:, :rank].T


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Shares of ||D||^2; they sum to 1, or are all 0 for a correction of zeros."""

    uniform: float
    row: float
    block: float
    remainder: float


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """rank: of the truncated correction. energy, same_bytes, same_moved: shares as in the module docstring; same_moved is 1 where nothing moves. stray: bytes that the
    truncation moves and the whole correction does not."""

    rank: int
    energy: float
    same_bytes: float
    same_moved: float
    stray: int


@dataclass(frozen=True, kw_only=True)
class Nesting:
    """Squared residuals of the best member of each family, over the target's own distance from the base; zero_coded and rounded on the same scale.

    step: mean |relative change| of the fitted block scales; moved: share of blocks whose stored byte the fit changes."""

    row: float
    block: float
    weight: float
    zero_coded: float
    rounded: float
    step: float
    moved: float

    def holds(self, slack: float = 1e-9) -> bool:
        """Whether residuals fall from family to family; slack is for rounding, relative to the base's own error (1)."""
        return self.weight <= self.block + slack and self.block <= self.row + slack and self.row <= 1 + slack


def factor_directions(a: Tensor, b: Tensor, scaling: float) -> Directions:
    """Of scaling * B A with A [r, G], B [O, r], through the r x r core: no [O, G] is made."""
    left, core_left = torch.linalg.qr(b.to(torch.float64))
    right, core_right = torch.linalg.qr(a.to(torch.float64).T)
    u, values, v = torch.linalg.svd(core_left @ core_right.T * scaling)
    count = len(values)
    return Directions(values=values, left=left @ u[:, :count], right=right @ v[:count].T)


def directions(correction: Tensor) -> Directions:
    """Of any correction [O, G], such as an on-grid one."""
    u, values, v = torch.linalg.svd(correction.to(torch.float64), full_matrices=False)
    return Directions(values=values, left=u, right=v.T)


def on_grid_correction(base: QuantTensor, scales: Tensor) -> Tensor:
    """s / s0 - 1 float64 [O, G] for stored bytes; 0 where the base scale is 0."""
    require_fp4(base.format)
    old, new = (base.format.grid.decode(data).to(torch.float64) for data in (base.scales, scales))
    return torch.where(old > 0, new / torch.where(old > 0, old, 1.0) - 1, torch.zeros_like(old))


def corrected_bytes(base: QuantTensor, correction: Tensor) -> Tensor:
    """Bytes uint8 [O, G] of s0 * (1 + D), clipped and rounded as QAST rounds; zero scales stay."""
    grid = require_fp4(base.format).grid
    old = grid.decode(base.scales)
    raw = correction.to(torch.float64).add(1.0).mul(old).clamp(grid.smallest, grid.largest)
    return grid.encode(raw.to(torch.float32)).mul_(old != 0)


def parts(correction: Tensor) -> Parts:
    """Where the energy of a correction [O, G] lies; see the module docstring."""
    d = correction.to(torch.float64)
    total = float(d.square().sum())
    if total == 0:
        return Parts(uniform=0.0, row=0.0, block=0.0, remainder=0.0)
    mean, by_row, by_block = d.mean(), d.mean(1), d.mean(0)
    uniform = d.numel() * float(mean.square())
    row = d.shape[1] * float((by_row - mean).square().sum())
    block = d.shape[0] * float((by_block - mean).square().sum())
    rest = float((d - by_row[:, None] - by_block + mean).square().sum())
    return Parts(uniform=uniform / total, row=row / total, block=block / total, remainder=rest / total)


def recovery(base: QuantTensor, found: Directions, ranks: Sequence[int], whole: Tensor | None = None) -> list[Recovery]:
    """What each rank recovers of the whole correction that `found` decomposes. whole: its bytes uint8 [O, G], where the caller has them from QAST itself."""
    whole = corrected_bytes(base, found.truncated(len(found.values))) if whole is None else whole
    moves = whole != base.scales
    out = []
    for rank in ranks:
        data = corrected_bytes(base, found.truncated(rank))
        same = data == whole
        out.append(
            Recovery(
                rank=rank,
                energy=found.energy(rank),
                same_bytes=float(same.double().mean()),
                same_moved=float(same[moves].double().mean()) if bool(moves.any()) else 1.0,
                stray=int((~moves & ~same).sum()),
            )
        )
    return out


def zero_coded(tensor: QuantTensor) -> tuple[int, int]:
    """(weights whose code is +0 or -0, weights): what no scale can move."""
    require_fp4(tensor.format)
    return int((e2m1.unpack(tensor.codes) & 7 == 0).sum()), tensor.codes.numel() * 2


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Least-squares factor; 1, which leaves the base, where the base has nothing to scale."""
    return torch.where(denominator > 0, numerator / torch.where(denominator > 0, denominator, 1.0), torch.ones_like(numerator))


def nest_weights(base: QuantTensor, target: Tensor) -> Nesting:
    """Each family fitted to a weight [O, I]."""
    spec = require_fp4(base.format)
    if tuple(target.shape) != base.shape or len(base.shape) != 2:
        raise FormatError(f"the target has shape {list(target.shape)}, the weight {list(base.shape)}", remedy="give one weight [O, I]")
    weight, wanted = base.dequantize().to(torch.float64), target.to(torch.float64)
    distance = _distance(wanted - weight)
    row = _ratio((weight * wanted).sum(1), weight.square().sum(1))
    blocks, goal = (value.view(*base.scales.shape, spec.block) for value in (weight, wanted))
    block = _ratio((blocks * goal).sum(-1), blocks.square().sum(-1))
    stored, rounded = _rounded(base, block)
    dead = e2m1.unpack(base.codes) & 7 == 0
    return Nesting(
        row=float((wanted - row[:, None] * weight).square().sum()) / distance,
        block=float((goal - block.unsqueeze(-1) * blocks).square().sum()) / distance,
        weight=0.0,
        zero_coded=float((wanted - weight)[dead].square().sum()) / distance,
        rounded=float((wanted - rounded).square().sum()) / distance,
        step=float((block - 1).abs().mean()),
        moved=float((stored != base.scales).double().mean()),
    )


def nest_outputs(base: QuantTensor, x: Tensor, y: Tensor) -> Nesting:
    """Each family fitted to outputs y [n, O] of inputs x [n, I]. `zero_coded` is 0: outputs do not say which weight they are owed to."""
    spec = require_fp4(base.format)
    if len(base.shape) != 2 or x.ndim != 2 or y.ndim != 2 or (len(y), x.shape[1], y.shape[1]) != (len(x), base.shape[1], base.shape[0]):
        raise FormatError(f"inputs {list(x.shape)} and outputs {list(y.shape)} do not belong to a weight {list(base.shape)}")
    x, y, weight = x.to(torch.float64), y.to(torch.float64), base.dequantize().to(torch.float64)
    out = x @ weight.T
    distance = _distance(y - out)
    row = _ratio((out * y).sum(0), out.square().sum(0))
    block, left = torch.ones(base.scales.shape, dtype=torch.float64), 0.0
    count, groups = len(x), base.scales.shape[1]
    rows = max(1, ROWS_AT_ONCE // (count * groups))
    by_block = x.view(count, groups, spec.block)
    for start in range(0, len(weight), rows):
        span = slice(start, start + rows)
        design = torch.einsum("ngb,ogb->ong", by_block, weight[span].view(-1, groups, spec.block))
        owed = (y[:, span] - out[:, span]).T.unsqueeze(-1)
        # The change from the base: the minimum-norm solution then leaves alone what the inputs do not see.
        change = torch.linalg.lstsq(design, owed, driver="gelsd").solution
        left += float((owed - design @ change).square().sum())
        block[span] += change.squeeze(-1)
    change = torch.linalg.lstsq(x, y - out, driver="gelsd").solution
    stored, rounded = _rounded(base, block)
    return Nesting(
        row=float((y - out * row).square().sum()) / distance,
        block=left / distance,
        weight=float((y - out - x @ change).square().sum()) / distance,
        zero_coded=0.0,
        rounded=float((y - x @ rounded.T).square().sum()) / distance,
        step=float((block - 1).abs().mean()),
        moved=float((stored != base.scales).double().mean()),
    )


def _distance(error: Tensor) -> float:
    distance = float(error.square().sum())
    if not 0 < distance < float("inf"):
        raise FormatError(
            "the target is the base itself" if distance == 0 else "the target holds NaN or infinity", remedy="fit a target that differs"
        )
    return distance


def _rounded(base: QuantTensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """(bytes, weight float64 [O, I]) of block factors put on the grid. A factor below 0 turns signs over, which a stored scale cannot: it is clipped."""
    stored = corrected_bytes(base, factors - 1)
    return stored, base.with_scales(stored).dequantize().to(torch.float64)
