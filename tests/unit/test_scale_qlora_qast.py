"""prism_ray.adapters.qast: the one function of forward and merge: ADP-01's numbers, the ceiling, zero scales, determinism."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_ray.adapters.qast import corrected_scales, effective_scales, require_finite, round_scales, straight_through
from prism_ray.core.errors import FormatError
from prism_ray.formats.spec import FORMATS, FP4_FORMATS

NVFP4, MXFP4 = FORMATS["nvfp4"], FORMATS["mxfp4"]
both = pytest.mark.parametrize("name", FP4_FORMATS)


def gradients(grad_scale, base, a, b, spec):
    """(dA, dB) as the layer's backward takes them: with the mask of the forward pass's rounding."""
    return straight_through(grad_scale, base, round_scales(base, a, b, 1.0, spec)[1], a, b, 1.0, spec)


def after(byte: int, correction: float, spec=NVFP4) -> float:
    """The scale that base `byte` becomes under 1 + correction."""
    base = torch.tensor([[byte]], dtype=torch.uint8)
    data = effective_scales(base, torch.tensor([[correction]]), torch.ones(1, 1), 1.0, spec)
    return spec.grid.decode(data).item()


# ADP-01: E4M3 steps from 1.0 are 1/8 up and 1/16 down.
@pytest.mark.parametrize(
    ("factor", "expected"),
    [(1.05, 1.0), (0.98, 1.0), (1.07, 1.125), (1.0625, 1.0), (1.0626, 1.125), (0.96, 0.9375), (1.1874, 1.125), (1.1876, 1.25)],
)
def test_adp01_e4m3_numbers(factor, expected):
    assert after(0x38, factor - 1) == expected


@pytest.mark.parametrize(
    ("factor", "expected"), [(1.41, 1.0), (1.42, 2.0), (0.71, 1.0), (0.70, 0.5), (2.82, 2.0), (2.83, 4.0), (1.05, 1.0)]
)
def test_adp01_e8m0_moves_only_beyond_its_threshold(factor, expected):
    assert after(127, factor - 1, MXFP4) == expected


def test_scaling_is_alpha_over_r_and_multiplies_the_product():
    base = torch.full((3, 2), 0x38, dtype=torch.uint8)
    a, b = torch.tensor([[1.0, 2.0], [0.5, -1.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    expected = torch.tensor([[1.5, 2.0], [1.25, 0.5], [1.75, 1.5]], dtype=torch.float64)
    assert torch.equal(corrected_scales(base, a, b, 0.5, NVFP4), expected)
    assert torch.equal(NVFP4.grid.decode(effective_scales(base, a, b, 0.5, NVFP4)), expected.to(torch.float32))


@both
def test_the_bytes_are_the_nearest_ones_to_a_float64_reference(name):
    """Brute force over all legal bytes on random factors; log2 distances for E8M0, plain ones for E4M3, nothing near a tie by chance."""
    spec = FORMATS[name]
    generator = torch.Generator().manual_seed(0)
    low, high = (1, 0x7E) if name == "nvfp4" else (100, 150)
    base = torch.randint(low, high + 1, (64, 16), generator=generator).to(torch.uint8)
    a, b = torch.randn(4, 16, generator=generator), torch.randn(64, 4, generator=generator) * 0.2
    data = effective_scales(base, a, b, 2.0, spec)
    legal = torch.arange(255 if name == "mxfp4" else 0x7F)
    values = spec.grid.decode(legal.to(torch.uint8)).to(torch.float64)
    raw = spec.grid.decode(base).to(torch.float64) * (1 + 2.0 * (b.to(torch.float64) @ a.to(torch.float64)))
    raw = raw.clamp(spec.grid.smallest, spec.grid.largest)
    measure = (lambda x: x) if name == "nvfp4" else torch.log2
    expected = (measure(raw)[..., None] - measure(values)).abs().argmin(-1)
    assert torch.equal(data.long(), expected)
    assert (data != base).float().mean() > 0.3


def test_scales_near_the_ceiling_stay_448_and_their_gradient_stops():
    base = torch.tensor([[0x7E, 0x7D, 0x70, 0x7E]], dtype=torch.uint8)  # 448, 416, 128, 448
    a, b = torch.tensor([[100.0, 0.5, 0.5, -0.25]]), torch.ones(1, 1)
    data = effective_scales(base, a, b, 1.0, NVFP4)
    assert data.tolist() == [[0x7E, 0x7E, 0x74, 0x7A]]  # 448, 448 (624 clamped), 192, 336 -> tie of 320 and 352 -> even 0x7A = 320
    assert NVFP4.grid.decode(data).tolist() == [[448.0, 448.0, 192.0, 320.0]]
    grad_a, grad_b = gradients(torch.ones(1, 4), base, a, b, NVFP4)
    assert grad_a.tolist() == [[0.0, 0.0, 128.0, 448.0]]
    assert grad_b.item() == 128 * 0.5 + 448 * -0.25


def test_a_correction_below_minus_one_gives_the_smallest_scale_and_no_gradient():
    base = torch.tensor([[0x38, 0x38]], dtype=torch.uint8)
    a, b = torch.tensor([[-3.0, -1.0]]), torch.ones(1, 1)
    for spec in (NVFP4, MXFP4):
        data = effective_scales(base, a, b, 1.0, spec)
        assert spec.grid.decode(data).tolist() == [[spec.grid.smallest] * 2]
        grad_a, _ = gradients(torch.ones(1, 2), base, a, b, spec)
        assert not grad_a.any()


def test_exactly_at_the_ceiling_the_gradient_still_flows():
    base, a, b = torch.tensor([[0x7E]], dtype=torch.uint8), torch.zeros(1, 1), torch.ones(1, 1)
    assert gradients(torch.ones(1, 1), base, a, b, NVFP4)[0].item() == 448


def test_zero_scales_stay_zero_under_any_correction_and_have_no_gradient():
    base = torch.tensor([[0, 1, 0x38]], dtype=torch.uint8)
    for size in (0.1, 1e6, -1e6):
        a, b = torch.full((1, 3), size), torch.ones(1, 1)
        assert effective_scales(base, a, b, 1.0, NVFP4)[0, 0] == 0
        assert gradients(torch.ones(1, 3), base, a, b, NVFP4)[0][0, 0] == 0
    # Byte 0 of E8M0 is no zero: it is 2^-127, and moves.
    assert effective_scales(base[:, :1], torch.ones(1, 1), torch.ones(1, 1), 1.0, MXFP4).item() == 1


@both
def test_zero_factors_leave_every_legal_byte_alone(name):
    spec = FORMATS[name]
    data = torch.arange(256, dtype=torch.uint8)
    base = data[~spec.grid.illegal(data)][None]
    assert torch.equal(effective_scales(base, torch.randn(2, base.shape[1]), torch.zeros(1, 2), 5.0, spec), base)


@both
@given(correction=st.floats(width=32, allow_nan=False, allow_infinity=False), byte=st.integers(0, 255))
@settings(max_examples=200, deadline=None)
def test_finite_factors_never_give_an_illegal_byte(name, correction, byte):
    spec = FORMATS[name]
    base = torch.tensor([[byte]], dtype=torch.uint8)
    if not spec.grid.illegal(base).any():
        assert not spec.grid.illegal(effective_scales(base, torch.tensor([[correction]]), torch.ones(1, 1), 1.0, spec)).any()


@both
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_factors_are_refused_by_name_and_never_pass_as_a_legal_plane(name, bad):
    spec = FORMATS[name]
    a, b = torch.ones(1, 2), torch.zeros(3, 1)
    require_finite("layer", a, b)
    for broken in ((a * bad, b), (a, b + bad)):
        with pytest.raises(FormatError, match="layer: adapter factors hold NaN or infinity"):
            require_finite("layer", *broken)
    # inf * 0 and NaN both give NaN products here.
    data = effective_scales(torch.full((3, 2), 0x38, dtype=torch.uint8), a * bad, b, 1.0, spec)
    assert spec.grid.illegal(data).all()


@both
def test_the_bytes_do_not_depend_on_the_number_of_threads(name):
    spec = FORMATS[name]
    generator = torch.Generator().manual_seed(1)
    base = torch.randint(1, 0x7F, (1024, 256), generator=generator).to(torch.uint8)
    a, b = torch.randn(16, 256, generator=generator), torch.randn(1024, 16, generator=generator) * 0.1
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(effective_scales(base, a, b, 1.0, spec))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
    # Nor on which rows are computed together.
    parts = torch.cat([effective_scales(base[i : i + 100], a, b[i : i + 100], 1.0, spec) for i in range(0, 1024, 100)])
    assert torch.equal(parts, found[0])
