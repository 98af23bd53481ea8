"""prism_ray.hessian.factor: U against the inverse it stands for, and the rule for every singular matrix of field case CAL-02."""

from __future__ import annotations

import math

import pytest
import torch

from prism_ray.hessian.factor import SCHEDULE, SMALLEST_SQUARE, NoFactor, clean_mean, dead_columns, factorize
from prism_ray.hessian.state import GramState

EPS = torch.finfo(torch.float64).eps


def gram_of(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """X'X of correlated rows, float64."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=generator, dtype=torch.float64) / width**0.5
    x = torch.randn(rows, width, generator=generator, dtype=torch.float64) @ mix + 0.2
    return x.T @ x


def inverse_error(upper: torch.Tensor, damped: torch.Tensor) -> float:
    """|| U'U D - I || in units of I eps cond(D): a backward stable factor and inverse leave a small constant (Higham, sections 10.1 and 14.2)."""
    size = damped.shape[0]
    values = torch.linalg.eigvalsh(damped)
    error = torch.linalg.matrix_norm(upper.T @ upper @ damped - torch.eye(size, dtype=torch.float64), ord=2)
    return float(error / (size * EPS * values[-1] / values[0]))


@pytest.mark.parametrize("width", [1, 2, 16, 129, 300])
@pytest.mark.parametrize("damping", [0.0, 0.01, 1.0])
def test_u_is_the_upper_factor_of_the_damped_inverse(width, damping):
    rows = 3 * width
    gram = gram_of(rows, width)
    before = gram.clone()
    factor = factorize(gram, float(rows), damping=damping)
    assert torch.equal(gram, before)
    mean = gram / rows
    damped = mean + damping * mean.diagonal().mean() * torch.eye(width, dtype=torch.float64)
    torch.testing.assert_close(factor.mean, damped, rtol=1e-14, atol=0)
    assert torch.equal(factor.upper, factor.upper.triu())
    assert bool((factor.upper.diagonal() > 0).all())
    assert inverse_error(factor.upper, damped) < 8
    assert (factor.damping, factor.retries, factor.dead.numel()) == (damping, 0, 0)


def test_a_factor_worked_by_hand():
    """H = [[2, 1], [1, 2]]: H^-1 = [[2, -1], [-1, 2]] / 3 = U'U with U = [[sqrt(2/3), -sqrt(1/6)], [0, sqrt(1/2)]]."""
    factor = factorize(torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64), 1.0, damping=0.0)
    expected = torch.tensor([[math.sqrt(2 / 3), -math.sqrt(1 / 6)], [0.0, math.sqrt(1 / 2)]], dtype=torch.float64)
    torch.testing.assert_close(factor.upper, expected, rtol=4 * EPS, atol=0)


def test_a_diagonal_matrix_gives_a_diagonal_factor_exactly():
    """What makes GPTQ under a diagonal H plain rounding: no error is spread, to the last bit."""
    diagonal = torch.logspace(-3, 3, 33, dtype=torch.float64)
    upper = factorize(torch.diag(diagonal), 1.0, damping=0.0).upper
    assert torch.equal(upper, torch.diag(upper.diagonal()))
    torch.testing.assert_close(upper.diagonal(), diagonal.rsqrt(), rtol=4 * EPS, atol=0)


def test_the_weight_divides():
    gram = gram_of(50, 16)
    one, two = factorize(gram, 50.0), factorize(2 * gram, 100.0)
    torch.testing.assert_close(one.upper, two.upper, rtol=1e-12, atol=1e-15)


class TestSingular:
    """CAL-02: 32 tokens of 128 features; column 17 zero; column 18 all 1e-25, whose square underflows; columns 40 and 41 the same."""

    def inputs(self, case: str, rows: int = 32) -> torch.Tensor:
        x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(1))
        if "b" in case:
            x[:, 17] = 0.0
        if "c" in case:
            x[:, 18] = 1e-25
        if "d" in case:
            x[:, 41] = x[:, 40]
        return x

    def state(self, case: str, rows: int = 32) -> GramState:
        return GramState(width=128).add(self.inputs(case, rows))

    @pytest.mark.parametrize("case", ["a", "b", "c", "d", "bcd"])
    @pytest.mark.parametrize("damping", [0.0, 0.01])
    @pytest.mark.parametrize("rows", [32, 512])
    def test_every_case_ends_in_a_finite_factor_with_its_damping_on_record(self, case, damping, rows):
        state = self.state(case, rows)
        factor = factorize(state.matrix(), state.weight, damping=damping)
        assert bool(torch.isfinite(factor.upper).all())
        dead = [column for letter, column in (("b", 17), ("c", 18)) if letter in case]
        assert factor.dead.tolist() == dead
        live = [column for column in range(128) if column not in dead]
        level = float(state.matrix().diagonal()[live].mean()) / rows
        clean = clean_mean(state.matrix(), state.weight)[0]
        torch.testing.assert_close(factor.mean, clean + factor.damping * level * torch.eye(128, dtype=torch.float64), rtol=1e-12, atol=0)
        # It is singular without damping where rows are too few. Two equal columns alone may pass: their float32 products can differ in the last bit.
        assert factor.retries > 0 if damping == 0.0 and rows == 32 else factor.retries == 0 or "d" in case
        assert factor.damping == ((0.0, *SCHEDULE)[factor.retries] if damping == 0.0 else 0.01)
        assert inverse_error(factor.upper, factor.mean) < 8

    @pytest.mark.parametrize("damping", [0.0, 0.01])
    @pytest.mark.parametrize("rows", [32, 512])
    def test_dead_columns_leave_the_others_as_if_they_were_not_there(self, damping, rows):
        state = self.state("bc", rows)
        whole = factorize(state.matrix(), state.weight, damping=damping)
        live = torch.tensor([column for column in range(128) if column not in (17, 18)])
        alone = GramState(width=126).add(self.inputs("bc", rows)[:, live])
        factor = factorize(alone.matrix(), alone.weight, damping=damping)
        assert factor.damping == whole.damping
        # Both invert the same matrix to a relative error of I eps cond, and cond <= largest eigenvalue / damping < 1e6: 128 * 2e-16 * 1e6 < 1e-7;
        # the products of the two states differ by float32 rounding, 32 * 2^-24 relative, amplified by the same cond in the worst case.
        scale = float(whole.upper.abs().max())
        assert float((whole.upper[live][:, live] - factor.upper).abs().max()) < 1e-2 * scale
        same = factorize(state.matrix()[live][:, live], state.weight, damping=damping)
        assert float((whole.upper[live][:, live] - same.upper).abs().max()) < 1e-7 * scale
        # Nothing goes from a dead column to a live one, or back: exact zeros.
        for column in (17, 18):
            assert int((whole.upper[column] != 0).sum()) == 1
            assert int((whole.upper[:, column] != 0).sum()) == 1

    def test_a_full_rank_matrix_is_left_alone(self):
        state = self.state("a", 512)
        assert factorize(state.matrix(), state.weight, damping=0.0).retries == 0

    def test_the_schedule_goes_on_from_the_asked_fraction(self):
        """The matrix of ones plus -0.05 I needs a shift above 0.05: with a mean diagonal of 0.95, the fraction 0.1 is the first that is enough."""
        gram = torch.ones(8, 8, dtype=torch.float64) - 0.05 * torch.eye(8, dtype=torch.float64)
        for damping, retries in ((0.0, 4), (0.005, 2), (0.02, 1), (0.5, 0)):
            factor = factorize(gram, 1.0, damping=damping)
            assert (factor.damping, factor.retries) == (max(damping, 0.1), retries)

    def test_no_damping_is_enough_for_an_indefinite_matrix(self):
        gram = torch.diag(torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64))
        gram[0, 1] = gram[1, 0] = 5.0
        with pytest.raises(NoFactor, match="layer.q: no damping up to 1 "):
            factorize(gram, 1.0, where="layer.q")

    def test_a_factor_that_would_amplify_rounding_is_not_used(self):
        """A Cholesky factorization of diag(1, 1e-17) succeeds, and its U would be 3e8 times larger in one place than in another."""
        gram = torch.diag(torch.tensor([1.0, 1e-17], dtype=torch.float64))
        factor = factorize(gram, 1.0, damping=0.0)
        assert factor.retries == 1
        assert float(factor.upper.max() / factor.upper.diagonal().min()) < EPS**-0.5


class TestRefusals:
    def test_no_rows(self):
        with pytest.raises(NoFactor, match="no calibration row"):
            factorize(torch.zeros(4, 4, dtype=torch.float64), 0.0)

    def test_all_columns_dead(self):
        with pytest.raises(NoFactor, match="all its input columns are zero"):
            factorize(torch.zeros(4, 4, dtype=torch.float64), 5.0)
        with pytest.raises(NoFactor, match="all its input columns are zero"):
            factorize(torch.full((4, 4), 5e-50, dtype=torch.float64), 5.0)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_values_that_are_not_finite(self, bad):
        gram = gram_of(20, 4)
        gram[1, 2] = bad
        with pytest.raises(NoFactor, match="NaN or infinity"):
            factorize(gram, 20.0)

    def test_dead_is_below_the_smallest_normal_square(self):
        squares = torch.tensor([0.0, SMALLEST_SQUARE * 0.99, SMALLEST_SQUARE, 1.0], dtype=torch.float64)
        assert dead_columns(torch.diag(squares * 7), 7.0).tolist() == [True, True, False, False]
