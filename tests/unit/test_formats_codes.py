"""prism_ray.formats.codes: the 16 values, rounding against an exact reference, the range of int3 inside int4."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from prism_ray.core.errors import FormatError
from prism_ray.formats import e2m1
from prism_ray.formats.codes import E2M1, INT3, INT4, IntCodes, require_legal_codes

every = pytest.mark.parametrize("grid", [E2M1, INT4, INT3], ids=lambda grid: grid.name)
integers = pytest.mark.parametrize("grid", [INT4, INT3], ids=lambda grid: grid.name)
ALL = torch.arange(16, dtype=torch.uint8)


@every
def test_decode_is_the_table_of_values_and_codes_of_values_are_themselves(grid):
    assert len(grid.values) == 16 and grid.decode(ALL).tolist() == list(grid.values)
    assert grid.decode(ALL.reshape(2, 8)).shape == (2, 8) and grid.decode(ALL).dtype == torch.float32
    legal = torch.tensor(grid.legal, dtype=torch.uint8)
    assert torch.equal(grid.round_to_codes(grid.decode(legal)), legal)


def test_ranges_and_largest():
    assert [grid.largest for grid in (E2M1, INT4, INT3)] == [6.0, 7.5, 3.5]
    assert INT4.legal == tuple(range(16)) and INT4.values == tuple(range(-8, 8))
    assert INT3.legal == tuple(range(4, 12)) and INT3.decode(torch.tensor(INT3.legal)).tolist() == list(range(-4, 4))
    assert hash(IntCodes(4)) == hash(INT4) and IntCodes(3) == INT3 != INT4
    with pytest.raises(FormatError, match="integer codes have 3 or 4 bits, not 8"):
        IntCodes(8)


@integers
def test_integers_round_half_to_even_and_clamp_to_the_range(grid):
    """Exact rational reference: Python rounds a Fraction half to even."""
    lowest, highest = grid.values[grid.legal[0]], grid.values[grid.legal[-1]]
    halves = torch.arange(-40, 41, dtype=torch.float32) / 4
    near = torch.cat([halves.nextafter(torch.tensor(math.inf)), halves.nextafter(torch.tensor(-math.inf))])
    x = torch.cat([halves, near, torch.tensor([math.inf, -math.inf, 1e30, -1e30, 0.0, -0.0])])
    for number, code in zip(x.tolist(), grid.round_to_codes(x).tolist(), strict=True):
        rounded = round(Fraction(max(min(number, 100.0), -100.0)))
        assert code - 8 == min(max(rounded, lowest), highest), number


@every
def test_nan_is_refused_and_e2m1_is_its_own_module(grid):
    with pytest.raises(FormatError, match="NaN has no"):
        grid.round_to_codes(torch.tensor([0.0, math.nan]))
    x = torch.linspace(-9, 9, 1001)
    assert torch.equal(E2M1.round_to_codes(x), e2m1.round_to_codes(x))


def test_illegal_nibbles_are_named_at_their_byte():
    packed = torch.full((2, 3, 4), 0x88, dtype=torch.uint8)
    for grid in (E2M1, INT4, INT3):
        require_legal_codes(grid, packed, "w")
    for byte in range(256):
        packed[1, 2, 3] = byte
        require_legal_codes(INT4, packed, "w")
        if 4 <= byte & 15 < 12 and 4 <= byte >> 4 < 12:
            require_legal_codes(INT3, packed, "w")
        else:
            with pytest.raises(FormatError, match=rf"w: code byte 0x{byte:02X} at \[1, 2, 3\] holds a code outside int3"):
                require_legal_codes(INT3, packed, "w")
