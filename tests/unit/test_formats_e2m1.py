"""prism_ray.formats.e2m1: the 16 codes, rounding against a float64 reference written here from the bit fields, and the packing (FMT-01)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_ray.core.errors import FormatError
from prism_ray.formats import e2m1


def value_of(code: int) -> float:
    """OCP MX v1.0: sign, two exponent bits with bias 1, one mantissa bit; exponent 0 is subnormal."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if sign else magnitude


def nearest_even(x: float) -> int:
    """Brute force in float64: nearest magnitude code, on a tie the one with mantissa bit 0; saturates; keeps the sign of zero."""
    best = min(range(8), key=lambda code: (abs(min(abs(x), 6.0) - value_of(code)), code & 1))
    return best | (8 if math.copysign(1.0, x) < 0 else 0)


def codes_of(values: list[float]) -> list[int]:
    return e2m1.round_to_codes(torch.tensor(values, dtype=torch.float32)).tolist()


def test_all_16_codes_decode_and_encode_to_themselves():
    codes = torch.arange(16, dtype=torch.uint8)
    values = e2m1.decode(codes)
    assert values.dtype == torch.float32
    assert values.tolist() == [value_of(code) for code in range(16)]
    assert torch.signbit(values).tolist() == [code >= 8 for code in range(16)]
    assert torch.equal(e2m1.round_to_codes(values), codes)


@pytest.mark.parametrize(("x", "expected"), [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4)])
def test_ties_go_to_the_even_code(x, expected):
    assert e2m1.decode(e2m1.round_to_codes(torch.tensor([x, -x]))).tolist() == [expected, -expected]
    below, above = np.nextafter(np.float32(x), np.float32(0)), np.nextafter(np.float32(x), np.float32(9))
    lower = max(value for value in e2m1.VALUES if value < x)
    upper = min(value for value in e2m1.VALUES if value > x)
    assert e2m1.decode(torch.tensor(codes_of([float(below), float(above)]), dtype=torch.uint8)).tolist() == [lower, upper]


def test_signed_zero_saturation_and_infinity():
    assert codes_of([0.0, -0.0, 1e-45, -1e-45]) == [0, 8, 0, 8]
    assert codes_of([6.0, 6.5, 7.0, 3e38, math.inf]) == [7] * 5
    assert codes_of([-6.0, -100.0, -math.inf]) == [15] * 3


def test_nan_is_refused():
    with pytest.raises(FormatError, match="NaN"):
        e2m1.round_to_codes(torch.tensor([1.0, math.nan]))


def test_rounding_equals_the_float64_reference_on_a_dense_sweep():
    # Every multiple of 1/64 up to 8: all values, all ties, and the points between.
    grid = [sign * step / 64 for step in range(513) for sign in (1.0, -1.0)]
    assert codes_of(grid) == [nearest_even(x) for x in grid]


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64))
@settings(max_examples=100, deadline=None)
def test_rounding_equals_the_float64_reference(values):
    assert codes_of(values) == [nearest_even(x) for x in values]


# FMT-01: adjacent pairs, low nibble first. High-first would give 0x12, a half split 0x?1 with element 16 in the high nibble.
def test_packing_golden_vector():
    codes = torch.tensor([1, 2, 3, 4, 5, 6, 7, 1] + [0] * 24, dtype=torch.uint8)
    packed = e2m1.pack(codes)
    assert packed[:4].tolist() == [0x21, 0x43, 0x65, 0x17]
    assert packed[4:].tolist() == [0] * 12
    assert torch.equal(e2m1.unpack(packed), codes)


def test_packing_golden_vector_with_negative_codes_and_minus_zero():
    values = torch.tensor([0.5, -0.5, -0.0, 6.0, -6.0, 0.0, -3.0, 1.5])
    codes = e2m1.round_to_codes(values)
    assert codes.tolist() == [1, 9, 8, 7, 15, 0, 13, 3]
    packed = e2m1.pack(codes)
    assert packed.tolist() == [0x91, 0x78, 0x0F, 0x3D]
    back = e2m1.decode(e2m1.unpack(packed))
    assert torch.equal(back, values) and torch.equal(torch.signbit(back), torch.signbit(values))


def test_an_odd_number_of_columns_is_refused():
    with pytest.raises(FormatError, match="3 columns"):
        e2m1.pack(torch.zeros(2, 3, dtype=torch.uint8))


def test_every_byte_survives_unpack_and_pack():
    data = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    assert torch.equal(e2m1.pack(e2m1.unpack(data)), data)


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_any_codes_survive_pack_and_unpack(data):
    shape = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 16).map(lambda n: 2 * n)))
    flat = data.draw(st.lists(st.integers(0, 15), min_size=math.prod(shape), max_size=math.prod(shape)))
    codes = torch.tensor(flat, dtype=torch.uint8).reshape(shape)
    packed = e2m1.pack(codes)
    assert packed.shape == (*shape[:-1], shape[-1] // 2)
    assert torch.equal(e2m1.unpack(packed), codes)
