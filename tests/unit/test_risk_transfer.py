"""A base probe on a variant: every statistic against a plain loop or a hand-worked case, every kind against the edit that makes it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch

from prism_ray.core.errors import DataError
from prism_ray.risk.noise import half_memberships
from prism_ray.risk.transfer import (
    REMEDIES,
    Z95,
    Kind,
    Probe,
    Regression,
    auroc,
    auroc_change_se,
    auroc_interval,
    fit_probe,
    regress,
    transfer_kind,
    transfer_test,
    variance_share,
    wilson,
)

Edit = Callable[[torch.Tensor], torch.Tensor]


def classes(seed: int = 0, n: int = 600, d: int = 64, rho: float = 1.33):
    """The paper's table 5: n = 1200, d = 64, an AUROC near 0.8. Classes [n, d] at +-rho v / 2, and v."""
    generator = torch.Generator().manual_seed(seed)
    v = torch.nn.functional.normalize(torch.randn(d, generator=generator, dtype=torch.float64), dim=0)
    rows = torch.randn(2, n, d, generator=generator, dtype=torch.float64)
    return rows[0] + rho / 2 * v, rows[1] - rho / 2 * v, v


def attenuate(v: torch.Tensor, gain: float) -> Edit:
    return lambda h: h - (1 - gain) * (h @ v)[:, None] * v


def noisy(scale: float, seed: int = 77) -> Edit:
    generator = torch.Generator().manual_seed(seed)
    return lambda h: h + scale * torch.randn(h.shape, generator=generator, dtype=torch.float64)


def run(edit: Edit, seed: int = 0, **options):
    a, b, v = classes(seed)
    return transfer_test(a, b, edit(a), edit(b), direction=v, splits=40, **options)


# --- AUROC, its interval and its standard error ---------------------------------------------------------------------------------------


def loop_auroc(a: list[float], b: list[float]) -> float:
    return sum(1.0 if x > y else 0.5 if x == y else 0.0 for x in a for y in b) / (len(a) * len(b))


@pytest.mark.parametrize("seed", range(5))
def test_auroc_against_all_pairs_with_many_ties(seed):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(0, 6, (17,), generator=generator).double() + 1
    b = torch.randint(0, 6, (23,), generator=generator).double()
    # Both are integers over 2 * 17 * 23: equal to the last bit.
    assert auroc(a, b) == loop_auroc(a.tolist(), b.tolist())
    assert auroc(a, b) + auroc(b, a) == pytest.approx(1.0, abs=1e-15)
    assert auroc(a.exp(), b.exp()) == auroc(a, b)


def test_auroc_by_hand():
    assert auroc(torch.tensor([2.0, 3.0]), torch.tensor([1.0])) == 1.0
    assert auroc(torch.tensor([1.0]), torch.tensor([1.0, 1.0])) == 0.5
    assert auroc(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 3.0])) == (0 + 0 + 1 + 0.5) / 4


def test_paired_standard_error_by_delongs_definition_and_by_the_jackknife():
    """DeLong's variance from all pairs; and the two-sample delete-one jackknife, which equals it exactly for an AUROC (its pseudo-values
    are the components).
    """
    generator = torch.Generator().manual_seed(1)
    x_a, x_b = torch.randn(12, generator=generator).double() + 1, torch.randn(9, generator=generator).double()
    y_a, y_b = x_a + torch.randn(12, generator=generator), x_b + torch.randn(9, generator=generator)
    y_a[3] = y_b[2]

    def change(keep_a: list[int], keep_b: list[int]) -> float:
        return loop_auroc(y_a[keep_a].tolist(), y_b[keep_b].tolist()) - loop_auroc(x_a[keep_a].tolist(), x_b[keep_b].tolist())

    every_a, every_b = list(range(12)), list(range(9))
    left_a = [change(every_a[:i] + every_a[i + 1 :], every_b) for i in every_a]
    left_b = [change(every_a, every_b[:i] + every_b[i + 1 :]) for i in every_b]
    variance = sum((n - 1) / n * float(np.sum((np.array(left) - np.mean(left)) ** 2)) for left, n in ((left_a, 12), (left_b, 9)))
    found = auroc_change_se(x_a, x_b, y_a, y_b)
    assert found == pytest.approx(math.sqrt(variance), rel=1e-12, abs=0)
    assert auroc_change_se(x_a, x_b, 3 * x_a + 1, 3 * x_b + 1) == 0.0


def test_paired_standard_error_is_the_spread_over_samples():
    """250 draws of 60 + 40 pairs: the sd of the change, known to 1 / sqrt(500) = 4.5 %, against the mean of its standard error; 4 of these."""
    generator = torch.Generator().manual_seed(3)
    changes, errors = [], []
    for _ in range(250):
        x_a, x_b = torch.randn(60, generator=generator).double() + 1, torch.randn(40, generator=generator).double()
        y_a, y_b = x_a + 0.7 * torch.randn(60, generator=generator), x_b + 0.7 * torch.randn(40, generator=generator)
        changes.append(auroc(y_a, y_b) - auroc(x_a, x_b))
        errors.append(auroc_change_se(x_a, x_b, y_a, y_b))
    assert np.mean(errors) == pytest.approx(np.std(changes, ddof=1), rel=0.18)


def test_auroc_interval_solves_its_equation_and_has_a_width_at_one():
    for value, n_a, n_b in ((0.8, 50, 70), (0.5, 10, 10), (0.99, 300, 300), (0.02, 40, 9)):
        low, high = auroc_interval(value, n_a, n_b)
        assert 0 < low < value < high < 1
        for bound in (low, high):
            # Hanley and McNeil's own letters: Q1 = t / (2 - t), Q2 = 2 t^2 / (1 + t), class sizes both at their mean.
            q1, q2, mean = bound / (2 - bound), 2 * bound**2 / (1 + bound), (n_a + n_b) / 2
            variance = (bound * (1 - bound) + (mean - 1) * (q1 - bound**2) + (mean - 1) * (q2 - bound**2)) / (n_a * n_b)
            assert abs(value - bound) == pytest.approx(Z95 * math.sqrt(variance), rel=1e-6)
        assert auroc_interval(1 - value, n_a, n_b) == pytest.approx((1 - high, 1 - low), abs=1e-9)
    low, high = auroc_interval(1.0, 20, 20)
    assert high == 1.0 and 0.8 < low < 0.99
    assert auroc_interval(1.0, 200, 200)[0] > low
    assert auroc_interval(0.0, 20, 20) == (0.0, pytest.approx(1 - low, abs=1e-9))


def test_auroc_interval_covers():
    """Gaussian scores with d' = 1.2, AUROC = Phi(1.2 / sqrt(2)) = 0.8019, n = 40 + 40: 95 % of 400 draws, binomial sd 1.1 %, 4 of these."""
    truth = 0.5 * (1 + math.erf(1.2 / 2))
    generator = torch.Generator().manual_seed(5)
    inside = 0
    for _ in range(400):
        a, b = torch.randn(40, generator=generator).double() + 1.2, torch.randn(40, generator=generator).double()
        low, high = auroc_interval(auroc(a, b), 40, 40)
        inside += low <= truth <= high
    assert abs(inside / 400 - 0.95) < 0.044


def test_wilson_by_its_definition():
    """Both bounds solve |p - bound| = z sqrt(bound (1 - bound) / n)."""
    for successes, n in ((7, 10), (1, 10), (300, 480), (0, 5), (5, 5)):
        found = wilson(successes, n)
        assert found.value == successes / n and found.n == n and 0 <= found.low <= found.value <= found.high <= 1
        for bound in (found.low, found.high):
            assert abs(found.value - bound) == pytest.approx(Z95 * math.sqrt(bound * (1 - bound) / n), rel=1e-9, abs=1e-12)
        assert found.high - found.low > 0


# --- the regression -------------------------------------------------------------------------------------------------------------------


def test_regression_against_the_sandwich_written_as_matrices():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, generator=generator).double() + 2
    y = 0.4 * x + 0.3 + x.abs() * torch.randn(30, generator=generator)
    found = regress(x, y)
    design = np.stack([np.ones(30), x.numpy()], axis=1)
    bread = np.linalg.inv(design.T @ design)
    beta = bread @ design.T @ y.numpy()
    residual = y.numpy() - design @ beta
    covariance = bread @ (design.T * residual**2) @ design @ bread * 30 / 28
    assert (found.shift, found.slope) == pytest.approx(tuple(beta), rel=1e-10)
    assert (found.shift_se, found.slope_se) == pytest.approx(tuple(np.sqrt(np.diag(covariance))), rel=1e-10)
    assert found.r2 == pytest.approx(np.corrcoef(x.numpy(), y.numpy())[0, 1] ** 2, rel=1e-10)
    assert found.n == 30


def test_regression_at_its_ends():
    x = torch.tensor([1.0, 2.0, 4.0]).double()
    same = regress(x, x.clone())
    assert (same.slope, same.shift, same.slope_se, same.shift_se) == (1.0, 0.0, 0.0, 0.0) and same.r2 == pytest.approx(1.0, abs=1e-15)
    line = regress(x, 0.5 * x - 3)
    assert (line.slope, line.shift, line.r2) == pytest.approx((0.5, -3.0, 1.0), rel=1e-14)
    flat = regress(x, torch.full((3,), 7.0).double())
    assert (flat.slope, flat.r2) == (pytest.approx(0.0, abs=1e-15), 0.0)
    none = regress(torch.full((3,), 7.0).double(), x)
    assert all(math.isnan(value) for value in (none.slope, none.slope_se, none.shift, none.shift_se, none.r2))
    with pytest.raises(DataError, match="2 and 2 decision values"):
        regress(x[:2], x[:2])


def test_standard_errors_cover():
    """Noise in y that grows with |x|: slope and shift lie within 2 HC1 errors in 95.4 % of 600 draws of 200; HC1 is 1 % short at this n, sd
    0.9 %, 4.
    """
    generator = torch.Generator().manual_seed(8)
    inside = np.zeros(2)
    for _ in range(600):
        x = torch.randn(200, generator=generator).double()
        found = regress(x, 0.7 * x + 0.2 + (0.1 + x.abs()) * torch.randn(200, generator=generator))
        inside += [abs(found.slope - 0.7) <= 2 * found.slope_se, abs(found.shift - 0.2) <= 2 * found.shift_se]
    assert (np.abs(inside / 600 - 0.95) < 0.045).all()


# --- the probe ------------------------------------------------------------------------------------------------------------------------


def test_probe_by_hand():
    a, b = torch.tensor([[4.0, 1.0], [6.0, 1.0]]), torch.tensor([[0.0, 1.0], [2.0, 1.0], [1.0, 1.0]])
    probe = fit_probe(a, b)
    assert probe.direction.tolist() == [1.0, 0.0] and probe.threshold == 3.0
    # var / n of both classes, 2 / 2 and 1 / 3; the midpoint has half of their sum's root.
    assert probe.threshold_se == pytest.approx(math.sqrt(1 + 1 / 3) / 2, rel=1e-14)
    assert probe.decision_values(torch.tensor([[3.0, 9.0], [5.0, -2.0]])).tolist() == [0.0, 2.0]


def test_whole_result_against_a_plain_script():
    """Every number of a run that is neither equal nor separable, recomputed with numpy from the public partition."""
    a, b, v = classes(3, n=31, d=5)
    a, b = a[:30], b + 0.2
    edit = noisy(0.4)
    va, vb = 0.8 * edit(a) + v, 0.8 * edit(b) + v
    found = transfer_test(a, b, va, vb, direction=3 * v, splits=20, seed=11)
    in_a, in_b = (member[0].bool().numpy() for member in half_memberships(30, 31, 2, 11))
    fit, held = [
        [h.numpy()[keep] for h, keep in zip((a, b, va, vb), keeps, strict=True)] for keeps in ((in_a, in_b) * 2, (~in_a, ~in_b) * 2)
    ]
    delta = fit[0].mean(0) - fit[1].mean(0)
    w = delta / np.linalg.norm(delta)
    t = (fit[0] @ w).mean() / 2 + (fit[1] @ w).mean() / 2
    x_a, x_b, y_a, y_b = (h @ w - t for h in held)
    new = ((fit[2] @ w - t).mean() + (fit[3] @ w - t).mean()) / 2
    refit_w = fit[2].mean(0) - fit[3].mean(0)

    assert (found.n_fit, found.n_eval, found.d) == (30, 31, 5)
    slope, shift = np.polyfit(np.concatenate([x_a, x_b]), np.concatenate([y_a, y_b]), 1)
    assert (found.regression.slope, found.regression.shift) == pytest.approx((slope, shift), rel=1e-9)
    assert (found.auroc_base.value, found.auroc_variant.value) == (loop_auroc(x_a, x_b), loop_auroc(y_a, y_b))
    assert found.auroc_change == found.auroc_variant.value - found.auroc_base.value
    assert found.auroc_refit.value == loop_auroc(held[2] @ refit_w, held[3] @ refit_w)
    assert found.refit_gain == found.auroc_refit.value - found.auroc_variant.value
    for estimate, left, right, cut in (
        (found.accuracy_base, x_a, x_b, 0),
        (found.accuracy_transferred, y_a, y_b, 0),
        (found.accuracy_recalibrated, y_a, y_b, new),
    ):
        assert estimate == wilson(int((left > cut).sum() + (right <= cut).sum()), 31)
    assert found.recalibrated_threshold == pytest.approx(new, rel=1e-12)
    assert len({found.accuracy_base.value, found.accuracy_transferred.value, found.accuracy_recalibrated.value}) == 3
    along, along_variant = (np.concatenate(h) @ v.numpy() for h in (held[:2], held[2:]))
    assert found.subspace_gain == pytest.approx(np.abs(along_variant).mean() / np.abs(along).mean(), rel=1e-12)
    assert found.projected_slope == pytest.approx(np.polyfit(along, along_variant, 1)[0], rel=1e-9)
    x = np.concatenate([x_a, x_b])
    assert found.variance_share == pytest.approx((w @ v.numpy()) * np.cov(along, x)[0, 1] / x.var(ddof=1), rel=1e-9)


def test_a_score_at_the_threshold_is_class_b():
    """Base 4 against 0, so t = 2. A variant at 6 against 2 puts class b, one at 2 against 0 class a, exactly on it."""
    a, b = torch.full((4, 1), 4.0), torch.zeros(4, 1)
    assert transfer_test(a, b, a + 2, b + 2).accuracy_transferred.value == 1.0
    assert transfer_test(a, b, a - 2, b).accuracy_transferred.value == 0.5
    assert transfer_test(a, b, a - 2, b).accuracy_recalibrated.value == 1.0


def test_probe_is_fitted_on_one_half_and_read_on_the_other():
    """Labels of pure noise, d > n: a probe separates the rows it was fitted on, and the held-out AUROC lies at 1/2 within its own interval."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(60, 200, generator=generator).double() for _ in range(2))
    found = transfer_test(a, b, a, b, splits=10)
    assert found.auroc_base.low < 0.5 < found.auroc_base.high
    probe = fit_probe(a, b)
    assert auroc(probe.decision_values(a), probe.decision_values(b)) > 0.95


def test_result_is_a_function_of_its_arguments():
    a, b, v = classes(n=40, d=8)
    edit = noisy(0.3)
    va, vb = edit(a), edit(b)
    first = transfer_test(a, b, va, vb, direction=v, seed=4)
    torch.manual_seed(0)
    assert transfer_test(a, b, va, vb, direction=v, seed=4) == first
    assert transfer_test(a, b, va, vb, direction=v, seed=5).regression != first.regression


# --- the kinds ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_identical_models_are_unchanged(seed):
    found = run(lambda h: h.clone(), seed)
    assert found.kind == "unchanged" and found.auroc_variant == found.auroc_base
    assert (found.regression.slope, found.regression.shift, found.auroc_change, found.auroc_change_se) == (1.0, 0.0, 0.0, 0.0)
    assert found.accuracy_base == found.accuracy_transferred == found.accuracy_recalibrated
    assert (found.subspace_gain, found.projected_slope, found.refit_gain) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("size", [-1.9, 0.3, 1.9, 1e-6])
def test_translation_leaves_auroc_exactly_and_costs_accuracy_until_recalibrated(seed, size):
    """Two of 300 x 300 differences are about 1e-5 apart, 1e9 times the rounding of a translated decision value: no pair changes its order."""
    _, _, v = classes(seed)
    found = run(lambda h: h + size * v, seed)
    assert found.kind == "translation" and "recalibrate the threshold" in found.remedy
    assert found.auroc_variant == found.auroc_base and found.auroc_change_se == 0.0
    assert found.regression.slope == pytest.approx(1.0, abs=1e-12) and found.regression.r2 == pytest.approx(1.0, abs=1e-12)
    moved = size * float(fit_probe_of(seed).direction @ v)
    assert found.regression.shift == pytest.approx(moved, abs=1e-12)
    assert found.accuracy_recalibrated == found.accuracy_base
    assert found.projected_slope == pytest.approx(1.0, abs=1e-12)
    if abs(size) > 1:
        # 1.9 sd with a separation of 1.2: (Phi(2.5) + Phi(-1.3)) / 2 = 0.55 against 0.73, standard error 0.02.
        assert found.accuracy_transferred.high < found.accuracy_base.low


def fit_probe_of(seed: int) -> Probe:
    """The probe of `run` at its default seed 0."""
    a, b, _ = classes(seed)
    in_a, in_b = (member[0].bool() for member in half_memberships(len(a), len(b), 2, 0))
    return fit_probe(a[in_a], b[in_b])


@pytest.mark.parametrize("gain", [0.6, 0.3])
def test_attenuation_moves_auroc_and_recalibrating_does_not_help(gain):
    """Ten data sets, each of table 5's size; the kind is 'attenuation' but for shifts that pass 2 standard errors by chance, 5 % each."""
    kinds = []
    for seed in range(10):
        found = run(attenuate(classes(seed)[2], gain), seed)
        kinds.append(found.kind)
        assert found.auroc_change < -2 * found.auroc_change_se < 0
        assert found.regression.slope < 1 - 2 * found.regression.slope_se and found.regression.r2 < 0.99
        assert abs(found.accuracy_recalibrated.value - found.accuracy_transferred.value) < 0.03
        assert found.rotation.verdict == "within noise"
    # P(4 or more of 10) at 5 % each: 0.1 %.
    assert set(kinds) <= {"attenuation", "mixed"} and kinds.count("attenuation") >= 7
    assert "does not help" in REMEDIES["attenuation"]


@pytest.mark.parametrize(("gain", "seed"), list(itertools.product([0.9, 0.6, 0.3, 0.0, 1.4], [0, 1])))
def test_slope_is_one_minus_c_times_one_minus_gain(gain, seed):
    """An identity of the sample, not an approximation; along v itself the regression gives g, which the slope understates for any c < 1."""
    found = run(attenuate(classes(seed)[2], gain), seed)
    c = found.variance_share
    assert 0.7 < c < 0.95
    assert found.regression.slope == pytest.approx(1 - c * (1 - gain), abs=1e-12)
    assert found.projected_slope == pytest.approx(gain, abs=1e-12)
    assert found.subspace_gain == pytest.approx(gain, abs=1e-12)
    assert abs(found.regression.slope - 1) < abs(found.projected_slope - 1)


def test_the_paper_s_two_slopes_give_one_share():
    """Table 5: 0.686 at g = 0.6 and 0.451 at g = 0.3, each to 0.0005, against c = 0.784."""
    for gain, slope in ((0.6, 0.686), (0.3, 0.451)):
        assert 1 - 0.784 * (1 - gain) == pytest.approx(slope, abs=0.0005 + 0.0005 * (1 - gain))


def test_attenuation_along_the_probe_itself_is_a_rescaling():
    """c = 1: slope g, R^2 = 1, AUROC exactly the base's. This is why AUROC cannot tell a translation from an attenuation of the decision
    variable.
    """
    a, b, _ = classes()
    probe = fit_probe_of(0)
    edit = attenuate(probe.direction, 0.5)
    found = transfer_test(a, b, edit(a), edit(b), splits=40)
    assert variance_share(torch.cat([a, b]), probe, 7 * probe.direction) == pytest.approx(1.0, abs=1e-12)
    assert (found.variance_share, found.regression.slope, found.regression.r2) == pytest.approx((1.0, 0.5, 1.0), abs=1e-12)
    assert found.auroc_variant == found.auroc_base


def test_rotation_is_called_and_a_refit_brings_the_ranking_back():
    a, b, v = classes(rho=4.0)
    other = torch.zeros_like(v)
    other[0] = 1.0
    other = torch.nn.functional.normalize(other - (other @ v) * v, dim=0)

    def turn(h: torch.Tensor) -> torch.Tensor:
        p, q = h @ v, h @ other
        return h + (math.cos(1.2) * p - math.sin(1.2) * q - p)[:, None] * v + (math.sin(1.2) * p + math.cos(1.2) * q - q)[:, None] * other

    found = transfer_test(a, b, turn(a), turn(b), splits=40)
    assert found.kind == "rotation" == found.rotation.verdict and "refit" in found.remedy
    assert found.refit_gain > 2 * found.refit_gain_se > 0
    # Turned back by the refit, the variant's rows are the base's: the same AUROC up to what the probe's other error does, 1 % here.
    assert found.auroc_refit.value == pytest.approx(found.auroc_base.value, abs=0.01)
    assert found.regression.slope == pytest.approx(math.cos(1.2), abs=0.1)


def test_noise_alone_is_unchanged_or_scatter_and_rarely_anything_else():
    """25 data sets each. Slope and shift pass 2 errors in 4.6 % each: 9 % of 25 is 2.3, sd 1.4, so more than 7 would be 3.3 sd."""
    for scale, expected in ((0.02, "unchanged"), (1.5, "scatter")):
        kinds = [run(noisy(scale, 100 + seed), seed).kind for seed in range(25)]
        assert len(kinds) - kinds.count(expected) <= 7, kinds
        assert "rotation" not in kinds


def test_shift_with_attenuation_is_mixed():
    _, _, v = classes()
    found = run(lambda h: attenuate(v, 0.5)(h) + 0.8 * v)
    assert found.kind == "mixed" and "mends the shift only" in found.remedy
    assert found.accuracy_recalibrated.value > found.accuracy_transferred.value


def test_sampling_error_of_the_threshold_is_no_shift():
    """Gain 0 along the probe: y = -t for all rows is a shift by -t exactly, residual 0. It is within t's own error, so nothing more than
    attenuation.
    """
    a, b, _ = classes()
    probe = fit_probe_of(0)
    assert abs(probe.threshold) < 2 * probe.threshold_se
    edit = attenuate(probe.direction, 0.0)
    found = transfer_test(a, b, edit(a), edit(b), splits=40)
    assert found.kind == "attenuation" and found.regression.slope == pytest.approx(0.0, abs=1e-12)
    assert found.regression.shift == pytest.approx(-probe.threshold, abs=1e-12)
    assert found.regression.r2 == 0.0


LINE = Regression(slope=1.0, slope_se=0.1, shift=0.0, shift_se=0.1, r2=0.9, n=100)


@pytest.mark.parametrize(
    ("changes", "auroc_change", "verdict", "kind"),
    [
        ({}, 0.0, "within noise", "unchanged"),
        ({"slope": 0.81, "shift": -0.19}, 0.019, "within noise", "unchanged"),
        ({"shift": -0.21}, 0.0, "within noise", "translation"),
        ({"slope": 0.79}, 0.0, "within noise", "attenuation"),
        ({"slope": 0.79}, -0.3, "within noise", "attenuation"),
        ({"slope": 1.21}, 0.0, "within noise", "amplification"),
        ({}, -0.021, "within noise", "scatter"),
        ({"shift": 0.21}, -0.021, "within noise", "mixed"),
        ({"shift": 0.21, "slope": 0.79}, 0.0, "within noise", "mixed"),
        ({"shift": 0.21, "slope": 0.79}, -0.3, "rotation", "rotation"),
        ({"slope": 0.79}, 0.0, "undefined", "undefined"),
        ({"slope": math.nan, "shift": math.nan}, 0.0, "within noise", "undefined"),
        ({"slope": math.nan, "shift": math.nan}, 0.0, "rotation", "undefined"),
    ],
)
def test_kind_from_numbers(changes, auroc_change, verdict, kind):
    assert transfer_kind(replace(LINE, **changes), auroc_change, 0.01, verdict) == kind


def test_a_smaller_standard_error_changes_the_kind():
    """No fixed number decides: the same slope is noise or an attenuation."""
    assert transfer_kind(replace(LINE, slope=0.95), 0.0, 0.01, "within noise") == "unchanged"
    assert transfer_kind(replace(LINE, slope=0.95, slope_se=0.01), 0.0, 0.01, "within noise") == "attenuation"


def test_every_kind_has_a_remedy():
    assert set(REMEDIES) == set(get_args(Kind)) and len(set(REMEDIES.values())) == len(REMEDIES)


# --- inputs that have no answer -------------------------------------------------------------------------------------------------------


def test_a_variant_of_zeros_is_undefined_by_name():
    found = run(torch.zeros_like)
    assert found.kind == "undefined" and found.auroc_refit is None and math.isnan(found.refit_gain)
    assert found.auroc_variant.value == 0.5 and found.subspace_gain == 0.0


def test_inputs_without_an_answer_are_refused():
    a, b, v = classes(n=20, d=8)
    with pytest.raises(DataError, match="both classes have the same mean"):
        transfer_test(torch.ones(20, 8), torch.ones(20, 8), a, b)
    broken = a.clone()
    broken[7, 2] = math.nan
    with pytest.raises(DataError, match="variant class a, row 7"):
        transfer_test(a, b, broken, b)
    for rows in (1, 3):
        with pytest.raises(DataError, match=rf"base class b: {rows} rows, at least 4"):
            transfer_test(a, b[:rows], a, b[:rows])
    with pytest.raises(DataError, match="class a: base"):
        transfer_test(a, b, a[:19], b)
    for direction in (torch.zeros(8), v[:7], torch.full((8,), math.nan)):
        with pytest.raises(DataError, match="give 8 finite numbers"):
            transfer_test(a, b, a, b, direction=direction)


def test_the_smallest_sample_and_fewer_rows_than_dimensions():
    a, b, _ = classes(n=4, d=40, rho=30.0)
    found = transfer_test(a, b, a, b)
    assert (found.n_fit, found.n_eval, found.kind) == (4, 4, "unchanged")
    # Separated rows: the interval must not shrink to the point that four rows give.
    assert found.auroc_base.value == 1.0 and found.auroc_base.low < 0.8 and found.accuracy_base.low < 0.8


def test_single_precision_activations_give_the_same_answer():
    """Rounding of the rows to float32 is 2^-24 of their norm 8, so 1e-6 of decision values of size 1. Of 300 x 300 differences with a
    density below 0.3 at 0, 0.1 lie that near: 5 swapped pairs would be a fault.
    """
    a, b, v = classes()
    va, vb = a + 0.3 * v, b + 0.3 * v
    exact = transfer_test(a, b, va, vb, splits=20)
    single = transfer_test(a.float(), b.float(), va.float(), vb.float(), splits=20)
    assert single.regression.shift == pytest.approx(exact.regression.shift, abs=2e-6)
    assert abs(single.auroc_change) < 5 / 90_000
    # Rounded rows differ by noise as well: the standard errors are its, not those of float64.
    assert 1e-9 < single.regression.slope_se < 1e-6 and exact.regression.slope_se < 1e-12
    assert exact.kind == single.kind == "translation"
