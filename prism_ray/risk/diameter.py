"""Exact diameter of a linear head's rows without looking at all pairs: K_feat of the PRISM bound (prism-risk-bound App. A.3, eq. 17).

The gradient of cross-entropy in a feature z is a convex combination of differences of the head's rows, so its norm is at most

    K_feat = max_{i, j} d_ij,   d_ij = |h_i - h_j|.

With c the mean row, x_i = h_i - c and r_i = |x_i|, the triangle inequality d_ij <= r_i + r_j excludes every pair with r_i + r_j <= L, the largest
distance found so far. L starts from farthest-point sweeps among the outermost rows (from a row to the row farthest from it, and on from there) and
rises while the pairs that are left are looked at in blocks, by descending radius. A trained head has some rows far from the rest, and few pairs are
left; where all radii are equal nothing is excluded, and the search costs what all pairs cost in float64.

Rounding, all sums in float64 with u = 2^-53: a radius and a distance carry at most (d + 4) u relative, so a pair is excluded only below
L (1 - 8 (d + 8) u), and none that is longer than the pair kept. A block's squared distances r_i^2 + r_j^2 - 2 x_i'x_j carry at most
(d + 8) u (r_i + r_j)^2 <= 4 (d + 8) u K_feat^2 (c lies between the rows, so r_i <= K_feat), which only matters between pairs as close in length as that:
`value`, recomputed from h_i - h_j, is K_feat up to 8 (d + 8) u relative, 4e-12 at d = 4096.

Legend: V rows (vocabulary), d hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from prism_ray.core.errors import ConfigError, FormatError

CHUNK = 1024
PASS_ENTRIES = 2**17
"""A pass over all rows takes blocks of 1 MiB in float64, which stay in a core's cache; at d = 576, 0.1 MiB takes twice as long and 4 MiB a fifth more."""
MOST_SWEEPS = 8
UNIT = 2.0**-53
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, kw_only=True)
class Diameter:
    """The largest distance between two rows, a pair that attains it (first <= second), and how much was looked at.

    value: in the unit of the weight; pairs_checked: pairs whose distance the block search computed, each at most once; pairs_total: V (V - 1) / 2;
    sweeps: passes from one row to the `chunk` rows of largest radius (to all, where those are equal) before the search, not in pairs_checked.
    """

    value: float
    first: int
    second: int
    pairs_checked: int
    pairs_total: int
    sweeps: int = 0


@torch.no_grad()
def head_diameter(weight: torch.Tensor, *, chunk: int = CHUNK) -> Diameter:
    """Largest Euclidean distance between two rows of `weight`, exact up to float64 rounding (module docstring).

    weight: [V, d] float32, bfloat16, float16 or float64, on any device; float64 entries should be above 1e-154, or their squares underflow.
    chunk: rows of a block. Beyond `weight` no tensor has more than max(V, d, chunk d, chunk^2) entries, in float64.
    Raises FormatError for another shape or dtype, no rows, and a row that holds NaN, infinity or values whose squares overflow float64 (its number);
    ConfigError for a chunk below 1.
    """
    _check(weight, chunk)
    rows, hidden = weight.shape
    total = sum((block.sum(0) for block in _blocks(weight, chunk)), torch.zeros(hidden, dtype=torch.float64, device=weight.device))
    centre = total / rows
    radii = _norms(weight, centre, chunk)
    if not bool(radii.isfinite().all()):
        # One bad row spoils the mean and with it every radius; its norm tells which it is.
        largest_row_norm(weight, chunk=chunk)
        _refuse_infinite(radii)

    radii, order = radii.sort(descending=True, stable=True)
    value, (i, j), sweeps = _sweep(weight.index_select(0, order[:chunk]), 0, chunk)
    pair, checked = (int(order[i]), int(order[j])), 0
    if value == 0:
        # The outermost rows are equal. If a sweep over all rows ends at 0 too, all are, though rounding of the mean may leave radii above 0.
        value, pair, sweeps = _sweep(weight, pair[0], chunk)
    if value > 0:
        value, pair, checked = _search(weight, centre, radii, order, value, pair, chunk)
    return Diameter(
        value=value, first=min(pair), second=max(pair), pairs_checked=checked, pairs_total=rows * (rows - 1) // 2, sweeps=sweeps
    )


@torch.no_grad()
def largest_row_norm(weight: torch.Tensor, *, chunk: int = CHUNK) -> tuple[float, int]:
    """Largest Euclidean norm of a row of `weight` [V, d] in float64, and the first row that has it. Raises as `head_diameter` does."""
    _check(weight, chunk)
    norms = _norms(weight, torch.zeros(weight.shape[1], dtype=torch.float64, device=weight.device), chunk)
    _refuse_infinite(norms)
    row = int(norms.argmax())
    return float(norms[row]), row


@torch.no_grad()
def all_pairs_diameter(weight: torch.Tensor, chunk: int = CHUNK) -> Diameter:
    """The same from every pair, as float32 products of blocks of centred rows: a yardstick for the bench and the tests, not for use.

    A pair within about 4 d 2^-24 (relative) of the longest may be taken for it; the value is recomputed from it in float64. Keeps the head in float32.
    Raises as `head_diameter` does, and for rows whose squares overflow float32.
    """
    _check(weight, chunk)
    rows = weight.shape[0]
    _refuse_infinite(weight.abs().amax(1))
    centred = weight.to(torch.float32) - weight.to(torch.float32).mean(0)
    squares = centred.square().sum(1)
    _refuse_infinite(squares)
    best, pair = -1.0, (0, 0)
    for i in range(0, rows, chunk):
        for j in range(i, rows, chunk):
            squared = torch.addmm(squares[j : j + chunk], centred[i : i + chunk], centred[j : j + chunk].T, alpha=-2)
            largest, column = squared.max(1)
            row = int(largest.add_(squares[i : i + chunk]).argmax())
            if float(largest[row]) > best:
                best, pair = float(largest[row]), (i + row, j + int(column[row]))
    total = rows * (rows - 1) // 2
    return Diameter(value=_distance(weight, *pair), first=min(pair), second=max(pair), pairs_checked=total, pairs_total=total)


def _sweep(rows: torch.Tensor, start: int, chunk: int) -> tuple[float, tuple[int, int], int]:
    """(distance, pair, sweeps) of the last gain on the way from one of `rows` to the one farthest from it, and on from there."""
    value, pair = 0.0, (start, start)
    for sweep in range(1, MOST_SWEEPS + 1):
        distances = _norms(rows, rows[start].to(torch.float64), chunk)
        end = int(distances.argmax())
        if float(distances[end]) <= value:
            return value, pair, sweep
        value, pair, start = float(distances[end]), (start, end), end
    return value, pair, MOST_SWEEPS


def _search(
    weight: torch.Tensor,
    centre: torch.Tensor,
    radii: torch.Tensor,
    order: torch.Tensor,
    value: float,
    pair: tuple[int, int],
    chunk: int,
) -> tuple[float, tuple[int, int], int]:
    """(distance, pair, pairs looked at): the longest pair, given one of length `value` > 0.

    radii, order: float64 and int64 [V], descending radii and the rows that have them. Each block of rows meets the blocks up to its own: r_i + r_j falls
    along both loops, so the inner one ends at the first excluded block, and all is done once a block is excluded together with the first row.
    """
    slack = 8 * (weight.shape[1] + 8) * UNIT
    checked = 0

    def left(start: int, other: int) -> slice:
        """Rows of the block at `start` that the radius of row `other` does not exclude: a prefix of it."""
        block = radii[start : start + chunk]
        return slice(start, start + int((block + radii[other] > value * (1 - slack)).sum()))

    for late in range(0, len(order), chunk):
        for early in range(0, late + 1, chunk):
            rows, columns = left(late, early), left(early, late)
            if rows.stop == rows.start:
                if early == 0:
                    return value, pair, checked
                break
            count, width = rows.stop - rows.start, columns.stop - columns.start
            checked += count * (count - 1) // 2 if late == early else count * width
            xs, ys = (weight.index_select(0, order[part]).to(torch.float64) - centre for part in (rows, columns))
            squared = torch.addmm(radii[columns].square(), xs, ys.T, alpha=-2).add_(radii[rows].square()[:, None])
            best = int(squared.argmax())
            if float(squared.view(-1)[best]) > value * value:
                found = int(order[late + best // width]), int(order[early + best % width])
                distance = _distance(weight, *found)
                if distance > value:
                    value, pair = distance, found
    return value, pair, checked


def _distance(weight: torch.Tensor, first: int, second: int) -> float:
    """|h_first - h_second| from the difference in float64."""
    return float(torch.linalg.vector_norm(weight[first].to(torch.float64) - weight[second].to(torch.float64)))


def _norms(weight: torch.Tensor, centre: torch.Tensor, chunk: int) -> torch.Tensor:
    """|h_i - centre| of every row, float64 [V]."""
    return torch.cat([torch.linalg.vector_norm(block.sub_(centre), dim=1) for block in _blocks(weight, chunk)])


def _blocks(weight: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
    """The rows in float64, at most `chunk` at a time, in one buffer that the caller may write to and the next block overwrites.

    A new tensor each time would cost more than the arithmetic wherever the allocator returns it to the system: its pages are faulted in again.
    """
    rows, hidden = weight.shape
    size = min(rows, chunk, max(1, PASS_ENTRIES // hidden))
    buffer = torch.empty(size, hidden, dtype=torch.float64, device=weight.device)
    for start in range(0, rows, size):
        yield buffer[: min(size, rows - start)].copy_(weight[start : start + size])


def _check(weight: torch.Tensor, chunk: int) -> None:
    if weight.ndim != 2 or 0 in weight.shape:
        raise FormatError(f"a head's weight has shape [vocabulary, hidden], got {list(weight.shape)}")
    if weight.dtype not in DTYPES:
        raise FormatError(
            f"a head's weight is {str(weight.dtype).removeprefix('torch.')}",
            remedy="convert it to float32, bfloat16, float16 or float64; dequantize a quantized head",
        )
    if chunk < 1:
        raise ConfigError(f"must be at least 1, got {chunk}", where="chunk")


def _refuse_infinite(per_row: torch.Tensor) -> None:
    """Raise for the first row whose number (a norm or its like) is not finite."""
    finite = per_row.isfinite()
    if not bool(finite.all()):
        row = int(finite.logical_not().int().argmax())
        raise FormatError(
            "holds NaN, infinity or values too large to square", where=f"row {row} of the head", remedy="repair the checkpoint"
        )
