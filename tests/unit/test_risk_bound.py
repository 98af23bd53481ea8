"""The PRISM bound: it holds, its parts equal their definitions written out with full matrices, moments merge, alignments are ordered.

Tolerance: float64 throughout, 1e-9 relative is far above n 2^-53 for the sizes here and far below every effect that is tested.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from prism_ray.core.errors import DataError, ModelError
from prism_ray.risk.alignment import Objective, joint_alignment, procrustes
from prism_ray.risk.bound import bounds, sequence_bound
from prism_ray.risk.cross import PairMoments, pair_moments
from prism_ray.risk.head import HeadTerms, LinearHead, feature_constant, head_terms, require_comparable

N, D, V = 90, 12, 40
ROWS = torch.repeat_interleave(torch.arange(9), torch.tensor([1, 2, 3, 30, 4, 20, 10, 15, 5]))


def random(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cross_entropy(z: torch.Tensor, head: LinearHead, targets: torch.Tensor) -> torch.Tensor:
    logits = head.scale * (z @ head.weight.T + (0 if head.bias is None else head.bias))
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none")


class Case:
    """Features, heads and losses of a made pair."""

    def __init__(
        self,
        noise: float = 0.1,
        head_noise: float = 0.05,
        bias: bool = False,
        softcap: float | None = None,
        scale: float = 1.0,
        seed: int = 0,
    ):
        self.z_target = random(N, D, seed=seed)
        self.z_proxy = self.z_target + random(N, D, seed=seed + 1, scale=noise)
        weight = random(V, D, seed=seed + 2)
        biases = (random(V, seed=seed + 3), random(V, seed=seed + 4)) if bias else (None, None)
        self.target = LinearHead(weight=weight, bias=biases[0], scale=scale, softcap=softcap)
        self.proxy = LinearHead(weight=weight + random(V, D, seed=seed + 5, scale=head_noise), bias=biases[1], scale=scale, softcap=softcap)
        self.targets = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(seed + 6))
        self.ce_target = cross_entropy(self.z_target, self.target, self.targets)
        self.ce_proxy = cross_entropy(self.z_proxy, self.proxy, self.targets)
        self.terms = head_terms(self.target, self.proxy, k_feat=feature_constant(self.target), chunk=7)
        self.moments = self.measure(slice(None))

    def measure(self, part: slice) -> PairMoments:
        z = self.z_proxy[part]
        return pair_moments(self.z_target[part], z, self.ce_target[part], self.ce_proxy[part], ROWS[part], self.terms.squared(z))

    def gamma(self, w: torch.Tensor) -> float:
        """The definition with the full [n, V] matrix."""
        bias = 0 if self.target.bias is None else self.target.bias - self.proxy.bias
        difference = self.target.scale * (self.z_proxy @ (w @ self.target.weight.T - self.proxy.weight.T) + bias)
        return math.sqrt(2 * float(difference.square().sum(1).mean()))

    def delta(self, w: torch.Tensor) -> float:
        return self.terms.k_feat * math.sqrt(float((self.z_target - self.z_proxy @ w).square().sum() / N))


CASES = {
    "plain": {},
    "kept head": {"head_noise": 0.0},
    "bias": {"bias": True},
    "scaled logits": {"scale": 0.25},
    "soft cap": {"softcap": 3.0},
    "far": {"noise": 2.0, "head_noise": 1.0},
}


@pytest.mark.parametrize("name", CASES)
def test_the_bound_holds_and_its_terms_are_their_definitions(name):
    for seed in range(0, 50, 10):
        case = Case(**CASES[name], seed=seed)
        found = bounds(case.moments, case.terms, alignments=("identity", "nuclear", "joint"))
        gap = abs(float((case.ce_target - case.ce_proxy).mean()))
        eye = torch.eye(D, dtype=torch.float64)
        w, _ = procrustes(case.z_target.T @ case.z_proxy)
        for alignment, matrix in (("identity", eye), ("nuclear", w)):
            assert found[alignment].delta == pytest.approx(case.delta(matrix), rel=1e-9)
            assert found[alignment].gamma == pytest.approx(case.gamma(matrix), rel=1e-9, abs=1e-9)
        for entry in found.values():
            assert gap <= entry.value
            assert entry.delta == pytest.approx(entry.k_feat * math.sqrt(entry.scale_term + entry.shape_term), rel=1e-9)
        assert found["nuclear"].omega >= found["identity"].omega - 1e-12
        assert found["nuclear"].delta <= found["identity"].delta * (1 + 1e-12)
        assert found["joint"].value <= min(found["identity"].value, found["nuclear"].value) * (1 + 1e-12)


def test_a_kept_head_has_no_head_term_at_the_identity_and_one_elsewhere():
    case = Case(head_noise=0.0, noise=0.5)
    assert case.terms.kept
    found = bounds(case.moments, case.terms)
    assert found["identity"].gamma == 0.0
    assert found["nuclear"].gamma > 0.0


def test_omega_and_rho_are_the_papers():
    case = Case(noise=0.4)
    found = bounds(case.moments, case.terms)
    norms = float(case.z_target.norm() * case.z_proxy.norm())
    assert found["identity"].omega == pytest.approx(float((case.z_target * case.z_proxy).sum()) / norms, rel=1e-12)
    nuclear = float(torch.linalg.svdvals(case.z_target.T @ case.z_proxy).sum()) / norms
    assert found["nuclear"].omega == pytest.approx(nuclear, rel=1e-9)
    assert found["identity"].rho_target == pytest.approx(float(case.z_target.norm()) / math.sqrt(N), rel=1e-12)


def test_axes_one_and_a_half_times_the_base_is_scale_alone_and_a_rotation_is_shape_alone():
    """Field case DRF-04."""
    case = Case(head_noise=0.0)
    for z, axis, other in ((1.5 * case.z_target, "scale", "shape"), (case.z_target.roll(1, dims=1), "shape", "scale")):
        moments = pair_moments(case.z_target, z, case.ce_target, case.ce_target, ROWS)
        found = bounds(moments, case.terms)["identity"]
        assert found.shares[axis] == pytest.approx(1.0, abs=1e-9)
        assert found.shares[other] == pytest.approx(0.0, abs=1e-9)
        assert found.dominant == axis


def test_a_dominating_channel_hides_a_zeroed_vector_from_omega_and_not_from_the_channel_reading():
    """Field case DRF-04: one channel of 3000 among 4096 normal values; channels 8 and up set to zero."""
    z = torch.randn(1, 4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z[0, 3] = 3000.0
    broken = z.clone()
    broken[:, 8:] = 0
    zero = torch.zeros(1)
    moments = pair_moments(z, broken, zero, zero, torch.zeros(1, dtype=torch.int64))
    assert moments.token.one_minus_omega == pytest.approx(2.2e-4, rel=0.2)
    assert moments.channel_one_minus_omega == pytest.approx(1 - math.sqrt(8 / 4096), rel=1e-9)


@pytest.mark.parametrize("edges", [[0, 90], [0, 6, 90], [0, 1, 3, 6, 36, 40, 60, 70, 85, 90]], ids=len)
def test_moments_merge(edges):
    case = Case(bias=True)
    total = PairMoments.zero(D)
    for start, end in itertools.pairwise(edges):
        total = total + PairMoments.from_arrays(case.measure(slice(start, end)).to_arrays())
    for name, tensor in case.moments.to_arrays().items():
        torch.testing.assert_close(total.to_arrays()[name], tensor, rtol=1e-10, atol=1e-10)
    assert bounds(total, case.terms)["nuclear"].value == pytest.approx(bounds(case.moments, case.terms)["nuclear"].value, rel=1e-9)


def test_the_sequence_level_bound_is_the_token_bound_of_rows_weighted_by_their_sequence():
    """App. D averaged over sequences, written out: every row weighs 1 / (its sequence's length)."""
    case = Case(noise=0.5)
    found = sequence_bound(case.moments, case.terms)
    sizes = torch.bincount(ROWS).double()
    weight = (1 / sizes[ROWS]) / len(sizes)
    squared = float(((case.z_target - case.z_proxy).square().sum(1) * weight).sum())
    assert found.delta == pytest.approx(case.terms.k_feat * math.sqrt(squared), rel=1e-9)
    head = float((case.terms.squared(case.z_proxy) * weight).sum())
    assert found.gamma == pytest.approx(math.sqrt(2 * head), rel=1e-9)
    gap = float(((case.ce_proxy - case.ce_target) * weight).sum())
    assert case.moments.sequence.delta_ce == pytest.approx(gap, rel=1e-9)
    assert abs(gap) <= found.value
    assert found.value != pytest.approx(bounds(case.moments, case.terms)["identity"].value, rel=1e-6)


def test_head_terms_do_not_depend_on_the_chunk():
    case = Case(bias=True)
    for chunk in (1, 7, 1000):
        other = head_terms(case.target, case.proxy, k_feat=1.0, chunk=chunk)
        torch.testing.assert_close(other.difference_gram, case.terms.difference_gram, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(other.squared(case.z_proxy), case.terms.squared(case.z_proxy), rtol=1e-9, atol=1e-12)


def objective(case: Case, terms: HeadTerms | None = None) -> Objective:
    return Objective(
        total=case.moments.token.rho_target**2 + case.moments.token.rho_proxy**2,
        residual=case.moments.token.difference_squared / N,
        cross=case.moments.cross / N,
        covariance=case.moments.gram / N,
        mean=case.moments.proxy_sum / N,
        head=terms or case.terms,
    )


def test_the_gradient_of_the_joint_objective_is_its_finite_difference():
    case = Case(noise=0.5, bias=True)
    found = objective(case)
    w = torch.linalg.qr(torch.eye(D, dtype=torch.float64) + random(D, D, seed=9, scale=0.1))[0]
    gradient = found.gradient(w, 0.0)
    for seed in range(5):
        direction = random(D, D, seed=20 + seed)
        step = 1e-6
        numeric = (found.value(w + step * direction) - found.value(w - step * direction)) / (2 * step)
        assert float((gradient * direction).sum()) == pytest.approx(numeric, rel=1e-5)


def test_the_joint_optimum_finds_a_rotated_model_with_a_rotated_head():
    """Features and head turned together: the same model, whose bound is 0 at the turn and large at the identity. W_N finds it, the descent keeps it."""
    case = Case(noise=0.0, head_noise=0.0)
    turn = torch.linalg.qr(random(D, D, seed=3))[0]
    z = case.z_target @ turn
    proxy = LinearHead(weight=case.target.weight @ turn)
    terms = head_terms(case.target, proxy, k_feat=case.terms.k_feat)
    moments = pair_moments(case.z_target, z, case.ce_target, case.ce_target, ROWS, terms.squared(z))
    found = bounds(moments, terms, alignments=("identity", "nuclear", "joint"))
    assert found["identity"].value > 1
    assert found["joint"].value < 1e-5


def test_the_descent_improves_on_both_starts_where_they_differ():
    case = Case(noise=0.6, head_noise=0.3)
    found = bounds(case.moments, case.terms, alignments=("identity", "nuclear", "joint"))
    assert found["joint"].value < 0.999 * min(found["identity"].value, found["nuclear"].value)
    w = joint_alignment(objective(case), [torch.eye(D, dtype=torch.float64)])
    torch.testing.assert_close(w @ w.T, torch.eye(D, dtype=torch.float64), rtol=0, atol=1e-12)


def test_zero_features_and_identical_models_read_zero_without_a_crash():
    case = Case(noise=0.0, head_noise=0.0)
    found = bounds(case.moments, case.terms)["identity"]
    assert found.value == 0.0
    assert found.dominant is None
    nothing = torch.zeros(N, D, dtype=torch.float64)
    one_sided = bounds(pair_moments(case.z_target, nothing, case.ce_target, case.ce_target, ROWS), case.terms)["identity"]
    assert math.isnan(one_sided.omega)
    assert one_sided.dominant == "scale"
    both = bounds(pair_moments(nothing, nothing, case.ce_target, case.ce_target, ROWS), case.terms)
    assert both["identity"].value == both["nuclear"].value == 0.0


def test_no_scored_token_is_an_error():
    case = Case()
    with pytest.raises(DataError, match="no answer token"):
        bounds(PairMoments.zero(D), case.terms)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"weight": torch.zeros(V + 3, D)}, f"vocabulary of {V + 3}, the base has {V}"),
        ({"weight": torch.zeros(V, D + 2)}, f"hidden size {D + 2}, the base has {D}"),
        ({"softcap": 30.0}, "soft-capping is 30.0, the base has None"),
    ],
)
def test_heads_between_which_the_bound_says_nothing_are_refused_by_name(change, expected):
    base = LinearHead(weight=torch.zeros(V, D))
    with pytest.raises(ModelError, match=f"tuned: .*{expected}"):
        require_comparable(base, LinearHead(**({"weight": base.weight} | change)), "tuned")


def test_a_soft_capped_head_needs_the_largest_norm_too():
    """All columns near one far point: their diameter is small, and the cap's slopes differ between logits, so that it alone would not bound the loss."""
    weight = torch.full((5, 4), 10.0, dtype=torch.float64) + random(5, 4, seed=0, scale=1e-3)
    assert feature_constant(LinearHead(weight=weight)) < 0.1
    assert feature_constant(LinearHead(weight=weight, softcap=5.0)) == pytest.approx(20.0, rel=1e-3)
