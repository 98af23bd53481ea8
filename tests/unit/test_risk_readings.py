"""Floors, bootstrap, agreement splits, rankings and verdicts: against loops, scipy and hand-worked numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from prism_ray.risk.agreement import compare_outputs, split_readings
from prism_ray.risk.bound import Bound
from prism_ray.risk.floor import axis_readings, bound_interval
from prism_ray.risk.ranking import rank_variants, spearman
from prism_ray.risk.verdict import verdict


def bound(scale: float = 0.0, drift: float = 0.0, gamma: float = 0.0) -> Bound:
    rho = 10.0
    delta = 2 * math.sqrt(scale**2 + 2 * rho * (rho + scale) * drift)
    return Bound(
        alignment="identity", level="token", rho_target=rho, rho_proxy=rho + scale, omega=1 - drift, one_minus_omega=drift, k_feat=2.0,
        delta=delta, gamma=gamma,
    )  # fmt: skip


def test_an_axis_clears_its_floor_above_the_largest_layout_and_two_deviations():
    floor = [bound(drift=value) for value in (1e-6, 2e-6, 3e-6)]
    for drift, clear in ((2.9e-6, False), (3.9e-6, False), (4.1e-6, True)):  # mean 2e-6, sd 1e-6
        reading = axis_readings(bound(drift=drift), floor)["shape"]
        assert (reading.layouts, reading.floor_mean, reading.floor_sd) == (3, pytest.approx(2e-6), pytest.approx(1e-6))
        assert reading.distinguishable is clear
    assert axis_readings(bound(drift=1.0), [])["shape"].distinguishable is None
    assert axis_readings(bound(), floor)["head"].distinguishable is False  # 0 is not above a floor of 0


def test_the_bootstrap_is_a_loop_over_resamples():
    generator = np.random.default_rng(3)
    tokens, squared, head = generator.integers(1, 9, 40), generator.random(40), generator.random(40)
    found = bound_interval(tokens, squared, head, 2.0, replicates=500, seed=7)
    counts = np.random.default_rng(7).multinomial(40, np.full(40, 1 / 40), size=500)
    values = []
    for row in counts:
        chosen = np.repeat(np.arange(40), row)
        n = tokens[chosen].sum()
        values.append(2.0 * math.sqrt(squared[chosen].sum() / n) + math.sqrt(2 * head[chosen].sum() / n))
    assert (found.low, found.high) == pytest.approx(tuple(np.percentile(values, [2.5, 97.5])))
    assert (found.n, found.replicates) == (40, 500)
    point = 2.0 * math.sqrt(squared.sum() / tokens.sum()) + math.sqrt(2 * head.sum() / tokens.sum())
    assert found.low < point < found.high
    assert math.isnan(bound_interval([3], [1.0], [0.0], 1.0).low)


def test_outputs_are_compared_token_by_token():
    generator = torch.Generator().manual_seed(0)
    target, proxy = torch.randn(6, 11, generator=generator), torch.randn(6, 11, generator=generator)
    proxy[0] = target[0] + 3.0  # the same distribution: a constant on all logits
    targets = torch.randint(0, 11, (6,), generator=generator)
    found = compare_outputs(target.clone(), proxy.clone(), targets)
    p, q = torch.softmax(target.double(), -1), torch.softmax(proxy.double(), -1)
    for token in range(6):
        assert found.cosine[token].item() == pytest.approx(
            float(torch.dot(p[token], q[token]) / p[token].norm() / q[token].norm()), abs=1e-5
        )
        assert found.kl[token].item() == pytest.approx(float((p[token] * (p[token] / q[token]).log()).sum()), abs=1e-5)
        assert found.ce_proxy[token].item() == pytest.approx(-math.log(q[token, targets[token]]), abs=1e-5)
        assert found.confidence_proxy[token].item() == pytest.approx(float(q[token].max()), abs=1e-6)
        assert found.correct_target[token].item() == float(p[token].argmax() == targets[token])
        assert found.same_token[token].item() == float(p[token].argmax() == q[token].argmax())
    assert found.cosine[0].item() == pytest.approx(1.0, abs=1e-6)


def test_a_token_of_probability_zero_gives_a_finite_divergence():
    found = compare_outputs(torch.tensor([[0.0, -500.0]]), torch.tensor([[0.0, 0.0]]), torch.tensor([0]))
    assert found.kl.item() == pytest.approx(math.log(2), rel=1e-6)
    assert 0.0 < found.cosine.item() < 1.0


def test_a_score_that_knows_the_wrong_answers_separates_and_a_constant_one_does_not():
    correct = [0.0] * 10 + [1.0] * 30
    perfect = split_readings([0.1] * 10 + [0.9] * 30, correct, "agreement")
    assert [(entry.percentile, entry.n_low, entry.n_high) for entry in perfect] == [(10, 4, 36), (25, 10, 30), (50, 20, 20)]
    assert (perfect[1].low, perfect[1].high, perfect[1].separation, perfect[1].se) == (0.0, 1.0, 1.0, 0.0)
    shuffled = np.random.default_rng(0).permutation(correct).tolist()
    blind = split_readings([0.5] * 40, shuffled, "agreement")[1]
    assert abs(blind.separation) < 3 * blind.se
    assert split_readings([0.5, 0.5], [1.0, 0.0], "agreement") == []


def test_spearman_is_scipys_with_an_interval_that_narrows():
    generator = np.random.default_rng(1)
    x = generator.random(30).round(1)
    y = x + generator.random(30).round(1)
    found = spearman(x, y)
    assert found.r == pytest.approx(spearmanr(x, y).statistic)
    assert found.low < found.r < found.high
    wide = spearman(x[:10], y[:10])
    assert wide.high - wide.low > found.high - found.low
    assert spearman([*x, math.nan], [*y, 1.0]) == found
    assert math.isnan(spearman([1, 2, 3], [1, 2, 3]).r)
    assert math.isnan(spearman([1, 1, 1, 1], [1, 2, 3, 4]).r)
    assert spearman(range(10), range(10)).r == pytest.approx(1.0)


def test_rankings_pair_readings_with_the_size_of_the_loss():
    rows = [
        {"benchmark": name, "bound": value, "one_minus_omega": -value, "delta_ce": sign * value}
        for name in ("a", "b")
        for value, sign in ((1, -1), (2, 1), (3, -1), (4, 1), (5, 1))
    ]
    rows[-1]["delta_ce"] = 0.5
    found = {entry.reading: entry for entry in rank_variants(rows)}
    assert set(found) == {"bound", "one_minus_omega"}
    assert found["bound"].per_benchmark["a"].r == pytest.approx(1.0)
    assert found["bound"].per_benchmark["b"].r == pytest.approx(0.0)  # ranks 2 3 4 5 1
    assert found["bound"].mean == pytest.approx(0.5)
    assert found["bound"].sem == pytest.approx(0.5)
    assert found["one_minus_omega"].mean == pytest.approx(-0.5)


def judged(value: Bound, floor: list[Bound], delta: float = 0.2, se: float = 0.01):
    return verdict("v", "bench", value, axis_readings(value, floor), delta_ce=delta, delta_ce_se=se, samples=64, tokens=900)


@pytest.mark.parametrize(
    ("value", "axis", "remedy"),
    [
        (bound(drift=0.1), "shape", "Hessian-aware"),
        (bound(gamma=5.0, drift=1e-5), "head", "head in bf16"),
        (bound(scale=4.0), "scale", "outliers"),
    ],
)
def test_the_verdict_names_the_axis_its_share_and_the_remedy(value, axis, remedy):
    found = judged(value, [bound(drift=1e-9)] * 3)
    assert (found.status, found.axis) == ("drifted", axis)
    assert remedy in found.text
    assert f"{100 * found.share:.0f} % {axis}" in found.text
    assert "64 samples, 900 scored tokens" in found.text
    assert "more than twice its error" in found.text
    assert "cannot tell from none" in judged(value, [], delta=0.01, se=0.01).text


def test_below_the_floor_nothing_is_claimed_and_identity_is_named():
    quiet = judged(bound(drift=1e-8), [bound(drift=1e-7)] * 3)
    assert quiet.status == "within noise"
    assert "does not prove" in quiet.text
    assert judged(bound(), []).status == "identical"


def test_the_range_terms_are_their_definition_and_bound_every_token():
    generator = torch.Generator().manual_seed(4)
    z_target, noise = torch.randn(50, 6, generator=generator), torch.randn(50, 6, generator=generator)
    head_target, head_noise = torch.randn(6, 30, generator=generator), torch.randn(6, 30, generator=generator)
    targets = torch.randint(0, 30, (50,), generator=generator)
    z_proxy, head_proxy = z_target + 0.3 * noise, head_target + 0.2 * head_noise
    found = compare_outputs(z_target @ head_target, z_proxy @ head_proxy, targets, z_proxy @ head_target)
    feature, head = (z_target - z_proxy) @ head_target, z_proxy @ (head_target - head_proxy)
    torch.testing.assert_close(found.feature_range, feature.max(1).values - feature.min(1).values, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.head_range, head.max(1).values - head.min(1).values, rtol=1e-4, atol=1e-4)
    assert ((found.ce_target - found.ce_proxy).abs() <= found.feature_range + found.head_range + 1e-5).all()
    assert (found.kl <= found.feature_range + found.head_range + 1e-5).all()
    assert (found.head_range <= math.sqrt(2) * head.norm(dim=1) + 1e-4).all()
    kept = compare_outputs(z_target @ head_target, z_proxy @ head_target, targets)
    assert not kept.head_range.any()
    torch.testing.assert_close(kept.feature_range, found.feature_range, rtol=1e-4, atol=1e-4)


def test_the_range_bound_is_attained():
    """Two logits, the right one falls and the wrong one rises: the loss moves by almost the whole range."""
    before, after = torch.tensor([[-50.0, 50.0]]), torch.tensor([[-53.0, 54.0]])
    found = compare_outputs(before, after, torch.tensor([0]))
    assert found.feature_range.item() == pytest.approx(7.0)
    assert (found.ce_proxy - found.ce_target).item() == pytest.approx(7.0, rel=1e-6)
