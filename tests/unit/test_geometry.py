"""prism_ray.adapters.geometry: spectra, parts, recovery and nested families against numpy in float64, by hand and as properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_ray.adapters import geometry
from prism_ray.adapters.geometry import (
    corrected_bytes,
    directions,
    factor_directions,
    nest_outputs,
    nest_weights,
    on_grid_correction,
    parts,
    recovery,
    zero_coded,
)
from prism_ray.adapters.qast import effective_scales
from prism_ray.core.errors import FormatError
from prism_ray.formats import e2m1
from prism_ray.formats.spec import FORMATS, FP4_FORMATS
from prism_ray.formats.tensor import QuantTensor
from prism_ray.quantizers.rtn import rtn


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def base_of(name: str = "nvfp4", seed: int = 0, rows: int = 6, columns: int = 128) -> QuantTensor:
    return rtn(drawn(seed, rows, columns) * 0.05, FORMATS[name])[0]


# --- spectra ---


@pytest.mark.parametrize(("rows", "groups", "rank"), [(12, 8, 3), (4, 8, 4), (3, 8, 6), (40, 5, 7)])
def test_factor_directions_are_the_singular_decomposition_of_the_product(rows, groups, rank):
    a, b = drawn(1, rank, groups), drawn(2, rows, rank)
    product = (0.5 * b.double() @ a.double()).numpy()
    found = factor_directions(a, b, 0.5)
    values = np.linalg.svd(product, compute_uv=False)[: len(found.values)]
    # Products of float64 orthogonal factors: a few times 2^-53 per element of a sum.
    np.testing.assert_allclose(found.values.numpy(), values, rtol=1e-12, atol=1e-12 * values[0])
    np.testing.assert_allclose(found.truncated(len(values)).numpy(), product, atol=1e-12 * values[0])
    for side in (found.left, found.right):
        np.testing.assert_allclose((side.T @ side).numpy(), np.eye(side.shape[1]), atol=1e-12)
    assert torch.allclose(directions(torch.from_numpy(product)).values[: len(values)], found.values, atol=1e-12)


def test_energy_by_hand():
    """Singular values 3, 2, 1, 0 on axes: energies 9, 4, 1 of 14; every direction touches one row and one block."""
    found = directions(torch.diag(torch.tensor([2.0, 0.0, 3.0, 1.0])))
    assert [found.energy(rank) for rank in range(1, 5)] == pytest.approx([9 / 14, 13 / 14, 1.0, 1.0])
    assert (found.needed(0.6), found.needed(0.9), found.needed(1.0)) == (1, 2, 3)
    assert found.spread(0) == pytest.approx((1.0, 1.0))
    shares = np.array([9, 4, 1]) / 14
    assert found.spectrum.effective == pytest.approx(math.exp(-(shares * np.log(shares)).sum()))
    assert found.spectrum.rank == 3


def test_a_row_rescaling_touches_one_row_and_all_blocks():
    d = torch.zeros(5, 8)
    d[2] = 0.1
    assert directions(d).spread() == pytest.approx((1.0, 8.0))
    found = parts(d)
    # Row mean 0.1 of row 2, grand mean 0.02: 8 (0.08^2 + 4 * 0.02^2) by row and 40 * 0.02^2 uniform, of 0.08.
    assert found.row == pytest.approx(8 * (0.08**2 + 4 * 0.02**2) / 0.08) and found.uniform == pytest.approx(0.2)
    assert found.block == pytest.approx(0.0, abs=1e-12) and found.remainder == pytest.approx(0.0, abs=1e-12)


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 9), groups=st.integers(1, 9), seed=st.integers(0, 1 << 30))
def test_parts_sum_to_one_and_mirror(rows, groups, seed):
    d = drawn(seed, rows, groups)
    found, mirrored = parts(d), parts(d.T)
    assert found.uniform + found.row + found.block + found.remainder == pytest.approx(1.0)
    assert (found.row, found.block) == pytest.approx((mirrored.block, mirrored.row), abs=1e-12)
    assert min(found.uniform, found.row, found.block, found.remainder) >= 0


def test_a_correction_of_zeros():
    found = directions(torch.zeros(3, 4))
    assert found.energy(1) == 0.0 and found.spectrum.effective == 0.0
    assert parts(torch.zeros(3, 4)) == geometry.Parts(uniform=0.0, row=0.0, block=0.0, remainder=0.0)
    base = base_of()
    entry = recovery(base, factor_directions(torch.zeros(2, 8), torch.zeros(6, 2), 1.0), [1])[0]
    assert (entry.same_bytes, entry.same_moved, entry.stray) == (1.0, 1.0, 0)


# --- recovery ---


@pytest.mark.parametrize("name", FP4_FORMATS)
def test_corrected_bytes_are_those_of_qast(name):
    base = base_of(name, rows=16, columns=512)
    a, b = drawn(3, 2, base.scales.shape[1]) * 0.5, drawn(4, 16, 2)
    whole = effective_scales(base.scales, a, b, 0.5, base.format)
    found = factor_directions(a, b, 0.5)
    assert torch.equal(corrected_bytes(base, 0.5 * b.double() @ a.double()), whole)
    assert bool((whole != base.scales).any())
    wanted = base.format.grid.decode(whole).double() / base.format.grid.decode(base.scales).double() - 1
    assert torch.equal(on_grid_correction(base, whole), wanted)
    assert recovery(base, found, [2], whole)[0].same_bytes == 1.0


@pytest.mark.parametrize("name", FP4_FORMATS)
def test_recovery_counts_bytes_by_hand(name):
    base = base_of(name, rows=16, columns=512)
    found = factor_directions(drawn(3, 4, base.scales.shape[1]) * 0.3, drawn(4, 16, 4), 1.0)
    whole = corrected_bytes(base, found.truncated(4))
    entries = recovery(base, found, [1, 2, 4])
    for entry in entries:
        data = corrected_bytes(base, found.truncated(entry.rank)).numpy()
        moves = whole.numpy() != base.scales.numpy()
        assert entry.same_bytes == pytest.approx((data == whole.numpy()).mean())
        assert entry.same_moved == pytest.approx((data == whole.numpy())[moves].mean())
        assert entry.stray == ((data != base.scales.numpy()) & ~moves).sum()
        assert entry.energy == pytest.approx(found.energy(entry.rank))
    assert entries[0].same_moved < 1 and entries[0].energy < entries[1].energy < 1
    assert (entries[2].same_bytes, entries[2].same_moved, entries[2].stray) == (1.0, 1.0, 0)
    assert entries[2].energy == pytest.approx(1.0)


def test_zero_scales_stay_and_zero_codes_are_counted():
    base = base_of()
    scales = base.scales.clone()
    scales[0, 0] = 0
    base = base.with_scales(scales)
    moved = corrected_bytes(base, torch.full(scales.shape, 0.5))
    assert int(moved[0, 0]) == 0 and on_grid_correction(base, moved)[0, 0] == 0.0
    codes = e2m1.unpack(base.codes).numpy()
    assert zero_coded(base) == (int(((codes == 0) | (codes == 8)).sum()), codes.size)
    assert 0 < zero_coded(base)[0] < codes.size


# --- nested families ---


def numpy_weight_residuals(base: QuantTensor, target: torch.Tensor) -> tuple[float, float]:
    """(row, block) squared residuals over the base's own, by np.linalg.lstsq one unknown at a time."""
    weight, wanted, block = base.dequantize().double().numpy(), target.double().numpy(), base.format.block
    row = sum(np.linalg.lstsq(w[:, None], t, rcond=None)[1].sum() for w, t in zip(weight, wanted, strict=True))
    pairs = zip(weight.reshape(-1, block), wanted.reshape(-1, block), strict=True)
    blocks = sum(np.linalg.lstsq(w[:, None], t, rcond=None)[1].sum() for w, t in pairs)
    own = ((weight - wanted) ** 2).sum()
    return row / own, blocks / own


@settings(max_examples=25, deadline=None)
@given(name=st.sampled_from(FP4_FORMATS), seed=st.integers(0, 1 << 30), size=st.floats(1e-3, 3))
def test_weight_residuals_are_numpys_and_nest(name, seed, size):
    base = base_of(name, seed % 1000)
    target = base.dequantize() + drawn(seed, *base.shape) * 0.05 * size
    found = nest_weights(base, target)
    row, block = numpy_weight_residuals(base, target)
    # Residuals are of order one and sums of at most 768 squares: a few hundred roundings of 2^-53, and lstsq's own.
    assert (found.row, found.block) == pytest.approx((row, block), rel=1e-9)
    assert found.holds() and found.weight == 0.0
    assert found.zero_coded <= found.block < found.row < 1  # a generic target: inclusions are strict
    assert found.rounded >= found.block


def test_targets_inside_a_family_are_reached():
    base = base_of()
    weight = base.dequantize()
    rows = nest_weights(base, weight * torch.linspace(0.5, 2, 6).unsqueeze(1))
    assert rows.row < 1e-12 and rows.block < 1e-12 and rows.zero_coded == 0.0
    factors = drawn(1, *base.scales.shape).abs() + 0.5
    blocks = nest_weights(base, weight * factors.repeat_interleave(16, 1))
    assert blocks.block < 1e-12 and blocks.row > 0.1
    # float32 products of the target: relative 2^-24 each, squared.
    assert blocks.step == pytest.approx(float((factors - 1).abs().mean()), rel=1e-6)


def test_zero_coded_weights_alone_are_out_of_reach():
    base = base_of()
    dead = e2m1.unpack(base.codes) & 7 == 0
    found = nest_weights(base, base.dequantize() + dead * 0.01)
    assert found.zero_coded == 1.0 and found.block == pytest.approx(1.0) and found.row == pytest.approx(1.0)
    assert found.moved == 0.0


@pytest.mark.parametrize("name", FP4_FORMATS)
def test_a_fit_below_the_grids_half_step_is_erased(name):
    """0.3 % against half steps of at least 3 % (E4M3) and 40 % (E8M0)."""
    base = base_of(name)
    target = base.dequantize() * (1 + 0.003 * torch.sign(drawn(2, *base.scales.shape))).repeat_interleave(base.format.block, 1)
    found = nest_weights(base, target)
    assert found.block < 1e-9 and found.moved == 0.0 and found.rounded == 1.0
    assert found.step == pytest.approx(0.003, rel=1e-3)


def numpy_output_residuals(base: QuantTensor, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float, float]:
    weight, block = base.dequantize().double().numpy(), base.format.block
    x, y = x.double().numpy(), y.double().numpy()

    def least(design: np.ndarray, wanted: np.ndarray) -> float:
        return float(((wanted - design @ np.linalg.lstsq(design, wanted, rcond=None)[0]) ** 2).sum())

    row = sum(least((x @ weight[o])[:, None], y[:, o]) for o in range(len(weight)))
    by_block = sum(
        least(np.stack([x[:, g : g + block] @ weight[o, g : g + block] for g in range(0, x.shape[1], block)], 1), y[:, o])
        for o in range(len(weight))
    )
    own = ((y - x @ weight.T) ** 2).sum()
    return row / own, by_block / own, least(x, y) / own


@pytest.mark.parametrize("name", FP4_FORMATS)
@pytest.mark.parametrize("count", [300, 20, 3])
@pytest.mark.parametrize("at_once", [1, 1 << 22])
def test_output_residuals_are_numpys_and_nest(name, count, at_once, monkeypatch):
    """300 samples over-determine every family, 20 the block family alone, 3 none."""
    monkeypatch.setattr(geometry, "ROWS_AT_ONCE", at_once)
    base = base_of(name, 5)
    x = drawn(6, count, 128)
    y = x @ base.dequantize().T + drawn(7, count, 6) * 0.2
    found = nest_outputs(base, x, y)
    wanted = numpy_output_residuals(base, x, y)
    assert (found.row, found.block, found.weight) == pytest.approx(wanted, rel=1e-8, abs=1e-18)
    assert found.holds()
    assert (found.weight > 1e-3) == (count > 128) and found.block < found.row < 1


def test_outputs_of_unit_inputs_are_weights():
    base = base_of("nvfp4", 8)
    target = base.dequantize() + drawn(9, *base.shape) * 0.01
    outputs, weights = nest_outputs(base, torch.eye(128), target.T), nest_weights(base, target)
    for key in ("row", "block", "weight", "rounded", "step", "moved"):
        assert getattr(outputs, key) == pytest.approx(getattr(weights, key), rel=1e-9, abs=1e-18)


def test_holds_sees_a_broken_order():
    values = {"row": 0.8, "block": 0.5, "weight": 0.1, "zero_coded": 0.0, "rounded": 0.6, "step": 0.1, "moved": 0.1}
    assert geometry.Nesting(**values).holds()
    for broken in ({"row": 0.4}, {"block": 0.05}, {"row": 1.1}):
        assert not geometry.Nesting(**(values | broken)).holds()


def test_refusals():
    base = base_of()
    with pytest.raises(FormatError, match="shape"):
        nest_weights(base, torch.zeros(6, 64))
    with pytest.raises(FormatError, match="base itself"):
        nest_weights(base, base.dequantize())
    with pytest.raises(FormatError, match="NaN"):
        nest_weights(base, torch.full(base.shape, math.nan))
    with pytest.raises(FormatError, match="do not belong"):
        nest_outputs(base, torch.zeros(4, 128), torch.zeros(5, 6))
    with pytest.raises(FormatError, match="int4-g64"):
        zero_coded(rtn(drawn(0, 2, 64), FORMATS["int4-g64"])[0])
