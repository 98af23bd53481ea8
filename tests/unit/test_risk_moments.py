"""FeatureMoments: additive, exact where 1 - Omega is tiny, scale apart from shape (field case DRF-04), and a standard error with its n.

Tolerance: all sums are float64, a sum of N terms is off by at most N 2^-53 relative to the sum of absolute values; 1e-10 is what design.md asks.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import fields
from functools import reduce

import pytest
import torch

from prism_ray.risk.moments import FeatureMoments, feature_moments

N, D = 60, 24


def parts(seed: int = 0, noise: float = 0.1, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(N, D, generator=generator).to(dtype)
    now = base + noise * torch.randn(N, D, generator=generator).to(dtype)
    ce, ce_now = torch.rand(N, generator=generator) * 5, torch.rand(N, generator=generator) * 5
    sizes = [1, 9, 20, 3, 17, 10]
    rows = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return base, now, ce, ce_now, rows


def cut(arrays, edges: list[int]) -> list[FeatureMoments]:
    return [feature_moments(*(array[start:end] for array in arrays)) for start, end in itertools.pairwise(edges)]


@pytest.mark.parametrize("edges", [[0, 60], [0, 30, 60], [0, 10, 30, 33, 50, 60], [0, 1, 10, 30, 33, 50, 60]], ids=len)
def test_one_part_or_many_in_any_order(edges):
    """Cuts lie between examples, as batches do."""
    arrays = parts()
    whole = feature_moments(*arrays)
    pieces = cut(arrays, edges)
    for order in itertools.islice(itertools.permutations(pieces), 24):
        found = reduce(lambda left, right: left + right, order, FeatureMoments())
        assert (found.tokens, found.examples) == (N, 6)
        for field in fields(FeatureMoments):
            assert getattr(found, field.name) == pytest.approx(getattr(whole, field.name), rel=1e-10, abs=0), field.name
        for name in ("one_minus_omega", "scale_term", "shape_term", "delta_ce", "delta_ce_se", "rho_target", "rho_proxy"):
            assert getattr(found, name) == pytest.approx(getattr(whole, name), rel=1e-10, abs=0), name


def test_the_empty_part_is_neutral_and_has_no_reading():
    whole = feature_moments(*parts())
    assert whole + FeatureMoments() == whole == FeatureMoments() + whole
    assert feature_moments(*(array[:0] for array in parts())) == FeatureMoments()
    empty = FeatureMoments()
    assert all(math.isnan(getattr(empty, name)) for name in ("rho_target", "rho_proxy", "one_minus_omega", "delta_ce", "delta_ce_se"))


def test_weights_are_tokens_not_batches():
    """Shards of 100 and 900 tokens whose features have norms 1 and 3: rho^2 = (100 + 9 * 900) / 1000, not (1 + 9) / 2 (field case CAL-06)."""
    small, large = torch.zeros(100, 4), torch.zeros(900, 4)
    small[:, 0], large[:, 1] = 1.0, 3.0
    moments = [
        feature_moments(z, z, torch.zeros(len(z)), torch.ones(len(z)), torch.zeros(len(z), dtype=torch.int64)) for z in (small, large)
    ]
    assert (moments[0] + moments[1]).rho_target == math.sqrt(8200 / 1000)
    assert (moments[0] + moments[1]).delta_ce == 1.0


def test_list_round_trip():
    whole = feature_moments(*parts())
    assert FeatureMoments.from_list(whole.to_list()) == whole
    assert len(whole.to_list()) == len(fields(FeatureMoments))
    # An all-reduce adds the lists.
    halves = cut(parts(), [0, 30, 60])
    added = [left + right for left, right in zip(halves[0].to_list(), halves[1].to_list(), strict=True)]
    assert FeatureMoments.from_list(added) == halves[0] + halves[1]


@pytest.mark.parametrize("noise", [1.0, 1e-2, 1e-4, 1e-6, 1e-8])
def test_one_minus_omega_keeps_its_digits_where_the_direct_formula_cancels(noise):
    """Against 1 - <Z_T, Z_P> / (||Z_T|| ||Z_P||) in exact rational arithmetic: fractions of the float64 inputs, square root by 60 digits."""
    from decimal import Decimal, getcontext
    from fractions import Fraction

    getcontext().prec = 60
    base, now, ce, ce_now, rows = parts(noise=noise, dtype=torch.float64)
    found = feature_moments(base, now, ce, ce_now, rows).one_minus_omega

    def total(left: torch.Tensor, right: torch.Tensor) -> Decimal:
        value = sum(
            (Fraction(a) * Fraction(b) for a, b in zip(left.flatten().tolist(), right.flatten().tolist(), strict=True)), Fraction(0)
        )
        return Decimal(value.numerator) / Decimal(value.denominator)

    wanted = 1 - total(base, now) / (total(base, base).sqrt() * total(now, now).sqrt())
    assert float(wanted) > 0
    # ||T - P||^2 carries N D 2^-53 relative error, and (||T|| - ||P||)^2 <= ||T - P||^2 carries the square of a difference of norms, each with N D 2^-53
    # relative: together 2 (N D u) ||T|| * | ||T|| - ||P|| | absolute, against 2 ||T||^2 (1 - Omega) in the denominator's units.
    u = N * D * 2.0**-53
    gap = abs(float(total(base, base).sqrt() - total(now, now).sqrt()) / float(total(base, base).sqrt()))
    assert found == pytest.approx(float(wanted), rel=8 * u + 4 * u * (gap + u) / float(wanted), abs=0)
    if noise <= 1e-8:
        direct = 1 - float((base * now).sum() / (base.norm() * now.norm()))
        assert abs(direct - float(wanted)) > float(wanted), "the direct formula must fail here, or this test shows nothing"


def test_equal_features_have_no_drift_at_all():
    base, _, ce, _, rows = parts()
    moments = feature_moments(base, base.clone(), ce, ce.clone(), rows)
    assert moments.one_minus_omega == 0.0 and moments.scale_term == 0.0 and moments.shape_term == 0.0 and moments.delta_ce == 0.0


def test_a_scaled_variant_shows_on_the_scale_axis_only():
    base, _, ce, ce_now, rows = parts()
    moments = feature_moments(base, 1.5 * base.double(), ce, ce_now, rows)
    assert moments.scale_term == pytest.approx((0.5 * moments.rho_target) ** 2, rel=1e-12, abs=0)
    assert moments.shape_term <= 1e-12 * moments.scale_term


def test_a_zeroed_part_shows_on_the_shape_axis():
    """Half of the energy in channels that are set to 0: Omega = ||P|| / ||T|| = sqrt(1/2)."""
    base = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0]])
    now = base * torch.tensor([1.0, 0.0])
    zeros = torch.zeros(3)
    moments = feature_moments(base, now, zeros, zeros, torch.arange(3))
    assert moments.one_minus_omega == pytest.approx(1 - math.sqrt(0.5), rel=1e-12, abs=0)
    assert moments.shape_term > 3 * moments.scale_term


def test_rows_of_other_labels_count_the_same():
    base, now, ce, ce_now, rows = parts()
    assert feature_moments(base, now, ce, ce_now, rows) == feature_moments(base, now, ce, ce_now, rows * 7 + 3)


# --- the standard error of delta CE ------------------------------------------------------------------------------------------------


def test_standard_error_by_hand_for_examples_of_one_token():
    """With one token an example the ratio estimator is the mean, and its standard error s / sqrt(n)."""
    gaps = torch.tensor([0.5, -1.0, 2.0, 0.25])
    z = torch.ones(4, 2)
    moments = feature_moments(z, z, torch.zeros(4), gaps, torch.arange(4))
    assert moments.delta_ce == pytest.approx(float(gaps.double().mean()), rel=1e-14)
    assert moments.delta_ce_se == pytest.approx(float(gaps.double().std(unbiased=True)) / 2, rel=1e-12, abs=0)


def test_standard_error_equals_the_linearized_ratio_and_lies_by_the_jackknife():
    """sqrt(m / (m - 1) sum (d_i - r n_i)^2) / n by its definition; the delete-one jackknife agrees to second order, O(1/m) relative, m = 6."""
    base, now, ce, ce_now, rows = parts(seed=4)
    moments = feature_moments(base, now, ce, ce_now, rows)
    gap = (ce_now.double() - ce.double()).tolist()
    sums = [sum(g for g, row in zip(gap, rows.tolist(), strict=True) if row == example) for example in range(6)]
    sizes = [rows.tolist().count(example) for example in range(6)]
    ratio = sum(sums) / N
    residual = sum((total - ratio * size) ** 2 for total, size in zip(sums, sizes, strict=True))
    assert moments.delta_ce_se == pytest.approx(math.sqrt(6 / 5 * residual) / N, rel=1e-10, abs=0)
    left_out = [(sum(sums) - total) / (N - size) for total, size in zip(sums, sizes, strict=True)]
    mean = sum(left_out) / 6
    jackknife = math.sqrt(5 / 6 * sum((value - mean) ** 2 for value in left_out))
    # The largest cluster holds a third of the tokens: deleting it rescales its residual by 1 / (1 - 1/3).
    assert moments.delta_ce_se == pytest.approx(jackknife, rel=0.5)
    # Clustering matters: the naive error over tokens is another number.
    naive = float(torch.tensor(gap).std()) / math.sqrt(N)
    assert abs(moments.delta_ce_se - naive) > 1e-3 * naive


def test_below_two_examples_there_is_no_standard_error():
    z = torch.ones(5, 2)
    moments = feature_moments(z, z, torch.zeros(5), torch.rand(5), torch.zeros(5, dtype=torch.int64))
    assert moments.examples == 1 and math.isnan(moments.delta_ce_se) and not math.isnan(moments.delta_ce)
