"""prism_ray.hessian.state against float64: products of a batch in float32, sums in float64, the tiled product, and the trap of low-precision sums (CAL-06)."""

from __future__ import annotations

import pytest
import torch

from prism_ray.hessian.state import TILE, GramState

UNIT = 2.0**-24
"""Rounding unit of float32."""


def inputs(rows: int, width: int, seed: int = 0, size: float = 1.0) -> torch.Tensor:
    """Correlated rows with a mean that is not zero, so that off-diagonal sums do not cancel to nothing."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=generator) / width**0.5
    return (torch.randn(rows, width, generator=generator) @ mix + 0.3) * size


def bound(x: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
    """Largest error of a float32 product x'x of R rows in any order of summation: R u |x|'|x| (Higham, section 3.5), one unit more for a weight."""
    wide = x.double().abs()
    return (x.shape[0] + 2) * UNIT * weight * (wide.T @ wide)


def exact(x: torch.Tensor) -> torch.Tensor:
    return x.double().T @ x.double()


@pytest.mark.parametrize("width", [8, 64, 255, 256, 257, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_batch_equals_float64_to_the_float32_product(width, dtype):
    x = inputs(2 * width, width).to(dtype)
    state = GramState(width=width).add(x)
    assert state.gram is not None
    assert state.gram.dtype == torch.float64
    assert bool(((state.gram - exact(x)).abs() <= bound(x.float())).all())
    # 16-bit inputs are exact in float32, and so is their product in float64: an error far below the bound's size would mean float64 products.
    assert state.absolute is not None
    torch.testing.assert_close(state.absolute, x.double().abs().sum(0), rtol=2 * width * 2.0**-52, atol=0)


@pytest.mark.parametrize("width", [255, 256, 257, 600])
def test_the_tiled_lower_product_equals_the_full_one_and_is_symmetric(width):
    assert TILE == 256, "the widths of this test lie around the tile"
    x = inputs(width, width, seed=1)
    gram = GramState(width=width).add(x).matrix()
    full = (x.T @ x).double()
    # Two float32 products of the same rows in two orders: each within the bound of the exact one.
    assert bool(((gram - full).abs() <= 2 * bound(x)).all())
    assert torch.equal(gram, gram.T)


def test_integer_inputs_are_summed_exactly():
    """Products below 2^24 are exact in float32, so nothing may differ, whatever the tile and however many batches."""
    generator = torch.Generator().manual_seed(2)
    batches = [torch.randint(-8, 9, (rows, 300), generator=generator).float() for rows in (1, 40, 150, 7, 300)]
    state = GramState(width=300)
    for batch in batches:
        state = state.add(batch)
    assert torch.equal(state.matrix(), exact(torch.cat(batches)))


def test_sums_of_many_batches_lose_nothing():
    """2^12 equal batches of one large and one small row: a float32 sum would stop growing by the small part, the float64 one does not."""
    big, small = torch.full((1, 4), 4096.0), torch.full((1, 4), 1.0)
    state = GramState(width=4).add(big).add(big)
    for _ in range(4096):
        state = state.add(small)
    assert torch.equal(state.matrix(), torch.full((4, 4), 2 * 4096.0**2 + 4096, dtype=torch.float64))
    low = torch.tensor(2 * 4096.0**2)
    assert float(low + 1.0) == float(low), "the case must be one that float32 loses"


@pytest.mark.parametrize("weight", [0.15, 2.0])
def test_weights_multiply_the_second_moment_and_the_magnitudes(weight):
    x, y = inputs(20, 32, 3), inputs(50, 32, 4)
    state = GramState(width=32).add(x, weight=weight).add(y)
    assert state.weight == pytest.approx(weight * 20 + 50)
    assert state.tokens == 70
    error = (state.matrix() - weight * exact(x) - exact(y)).abs()
    assert bool((error <= bound(x, weight) + bound(y)).all())
    expected = (weight * x.double().abs().sum(0) + y.double().abs().sum(0)) / (weight * 20 + 50)
    torch.testing.assert_close(state.magnitude(), expected, rtol=1e-12, atol=0)


def test_kept_rows_of_several_weights_give_the_weighted_product():
    x, y, z = inputs(5, 64, 5), inputs(6, 64, 6), inputs(7, 64, 7)
    state = GramState(width=64).add(x, weight=0.5).add(y).add(z, weight=0.5)
    assert state.gram is None
    error = (state.matrix() - 0.5 * exact(x) - exact(y) - 0.5 * exact(z)).abs()
    assert bool((error <= bound(torch.cat([x, z]), 0.5) + bound(y)).all())


class TestShards:
    """CAL-06: shards of 100 and 900 tokens, 64 wide, bfloat16 of magnitude 300."""

    def shards(self) -> tuple[torch.Tensor, torch.Tensor]:
        return inputs(100, 64, 10, 300).bfloat16(), inputs(900, 64, 11, 300).bfloat16() * 0.5

    def test_merged_mean_is_that_of_one_process(self):
        small, large = self.shards()
        merged = GramState(width=64).add(small) + GramState(width=64).add(large)
        alone = GramState(width=64).add(torch.cat([small, large]))
        assert merged.tokens == alone.tokens == 1000
        assert merged.weight == 1000.0
        expected = exact(torch.cat([small, large])) / 1000
        for state in (merged, alone):
            mean = state.matrix() / state.weight
            assert float((mean - expected).norm() / expected.norm()) < 1e-5
        # Both weights that field cases report as wrong lie far outside: the mean of two means, and the sum without a count.
        wrong = (exact(small) / 100 + exact(large) / 900) / 2
        assert float((wrong - expected).norm() / expected.norm()) > 0.1

    def test_order_and_empty_shards_do_not_matter(self):
        small, large = self.shards()
        a, b, empty = GramState(width=64).add(small), GramState(width=64).add(large), GramState(width=64).add(small[:0])
        assert torch.equal((a + b).matrix(), (b + a).matrix())
        assert torch.equal((a + empty + b).matrix(), (a + b).matrix())
        assert (a + empty).tokens == 100
        assert (empty + empty).tokens == 0
        assert float((empty + empty).matrix().abs().sum()) == 0.0

    def test_tokens_count_and_not_batches(self):
        small, large = self.shards()
        whole = GramState(width=64)
        for batch in (*small.split(7), *large.split(450)):
            whole = whole.add(batch)
        assert whole.tokens == 1000
        expected = exact(torch.cat([small, large]))
        assert float((whole.matrix() - expected).norm() / expected.norm()) < 1e-5
