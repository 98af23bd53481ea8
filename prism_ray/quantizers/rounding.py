"""Fast rounding in the value domain, made from a code grid's own rule.

`CodeGrid.round_to_codes` is the one rounding rule; it works on bits and is slow in a loop over columns. A `Rounder` asks it once, at every midpoint between neighbouring values, which way
the tie goes, and then rounds by a search among the midpoints: `Rounder(codes)(x) == codes.decode(codes.round_to_codes(x))` for every finite x (the sign of zero apart).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from prism_ray.formats.codes import CodeGrid


class Rounder:
    """Nearest values of a code grid: float32 in, float32 out, any shape. NaN is not looked for."""

    def __init__(self, codes: CodeGrid):
        values = torch.tensor(sorted({codes.values[code] for code in codes.legal}), dtype=torch.float32)
        middle = (values[:-1] + values[1:]) / 2
        goes_up = codes.decode(codes.round_to_codes(middle)) > middle
        # bucketize puts x <= boundary below: a midpoint that goes up needs a boundary just under it.
        self._boundaries = torch.where(goes_up, torch.nextafter(middle, torch.tensor(-torch.inf)), middle)
        self._values = values

    def __call__(self, x: Tensor) -> Tensor:
        index = torch.bucketize(x.contiguous(), self._boundaries, out_int32=True)
        return self._values.index_select(0, index.view(-1)).view(x.shape)


@lru_cache(maxsize=8)
def rounder(codes: CodeGrid) -> Rounder:
    """The one Rounder of a grid."""
    return Rounder(codes)
