"""AWQ: factors from magnitudes, the exponent by output error, blocks of one factor, records."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from prism_ray.formats.spec import FORMATS
from prism_ray.hessian.state import GramState
from prism_ray.quantizers.awq import FLOOR, NO_PLACE, awq, choose, factors_of, log_magnitudes
from prism_ray.quantizers.base import Factors, Member, QuantizerOptions
from prism_ray.quantizers.methods import METHODS
from prism_ray.quantizers.simple import mse, rtn

WIDTH = 64
AMAX = QuantizerOptions(scales="amax")
SAME = torch.arange(WIDTH)


def member(name: str = "q_proj", chosen: str = "nvfp4", rows: int = 32, seed: int = 0, weight: torch.Tensor | None = None) -> Member:
    values = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)) if weight is None else weight
    return Member.of(name, values, FORMATS[chosen])


def statistics(outliers: dict[int, float] | None = None, rows: int = 256, seed: int = 1) -> GramState:
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))
    for channel, factor in (outliers or {}).items():
        x[:, channel] *= factor
    return GramState(width=WIDTH).add(x)


OUTLIERS = {3: 60.0, 17: 40.0, 50: 25.0}


def folded(one: Member, factors: Factors) -> Member:
    return Member.of(one.name, factors.fold(one.weight), one.spec, factors=factors)


def chosen_error(one: Member, stats: GramState, options: QuantizerOptions) -> tuple[float, float]:
    """(alpha, output error) of the whole method on one weight."""
    choice = choose(lambda: [([one], stats)], SAME, options)
    factors = Factors(columns=choice.channels, alpha=choice.alpha, reason=choice.reason)
    ((_, entry),) = awq([folded(one, factors)], stats, options)
    return choice.alpha, entry.error_after


def test_factors_by_hand():
    # Magnitudes 1, 4, 16, … to the power 1/2 are 1, 2, 4; divided by sqrt(4 * 1) they are 1/2, 1, 2.
    logs = log_magnitudes(torch.tensor([1.0, 4.0, 16.0], dtype=torch.float64), torch.arange(3))
    assert torch.allclose(factors_of(logs, 0.5), torch.tensor([0.5, 1.0, 2.0]), rtol=1e-6)
    assert torch.equal(factors_of(logs, 0.0), torch.ones(3))


@pytest.mark.parametrize("alpha", [0.05, 0.5, 0.95])
def test_the_geometric_mean_of_the_extremes_is_one(alpha):
    mean = torch.rand(WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) + 0.01
    factors = factors_of(log_magnitudes(mean, SAME), alpha).double()
    # Two float32 values, each within 2^-24 of itself.
    assert abs(float(factors.max() * factors.min()) - 1.0) < 4 * 2**-24
    assert torch.equal(factors.argsort(), mean.argsort())


def test_a_dead_channel_counts_as_the_floor():
    mean = torch.tensor([0.0, 1e-30, 1.0, 2.0], dtype=torch.float64)
    logs = log_magnitudes(mean, torch.arange(4))
    assert torch.allclose(logs.exp(), torch.tensor([2 * FLOOR, 2 * FLOOR, 1.0, 2.0], dtype=torch.float64))
    assert float(factors_of(logs, 1.0).max()) <= FLOOR**-0.5 * 1.001


def test_columns_that_share_a_channel_are_averaged_and_get_one_factor():
    # Three channels, the middle one unread: it has no say in the extremes.
    source = torch.tensor([0, 2, 0, 2])
    logs = log_magnitudes(torch.tensor([1.0, 5.0, 3.0, 11.0], dtype=torch.float64), source)
    assert torch.allclose(logs[[0, 2]].exp(), torch.tensor([2.0, 8.0], dtype=torch.float64))
    assert float(logs[1]) == float(logs[[0, 2]].min())


def test_constant_blocks_hold_the_geometric_mean():
    mean = torch.rand(WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) + 0.1
    logs = log_magnitudes(mean, SAME, [32])
    assert torch.allclose(logs, mean.log().view(-1, 32).mean(-1).repeat_interleave(32))


def test_constant_blocks_follow_shared_channels():
    # Heads of 2, pairs of query heads on one key-value head: a block of 4 holds both heads of a pair, a block of 8 two pairs.
    source = torch.tensor([0, 1, 0, 1, 2, 3, 2, 3])
    mean = torch.arange(1.0, 9.0, dtype=torch.float64)
    four, eight = log_magnitudes(mean, source, [4]), log_magnitudes(mean, source, [8])
    assert four[0] == four[1] != four[2] == four[3]
    assert len(eight.unique()) == 1
    # A block of 3 over channels 0 1 2 | 2 3 ... ties everything through channel 2, directly or not.
    chained = log_magnitudes(torch.arange(1.0, 7.0, dtype=torch.float64), torch.tensor([0, 1, 2, 2, 3, 4]), [3])
    assert len(chained.unique()) == 1


@pytest.mark.parametrize("chosen", ["nvfp4", "mxfp4", "int4-g32", "int3-g64"])
def test_alpha_zero_is_rounding_to_nearest(chosen):
    one, stats = member(chosen=chosen), statistics(OUTLIERS)
    ((plain, base),) = rtn([one], stats, AMAX)
    ((made, entry),) = awq([folded(one, Factors(alpha=0.0))], stats, AMAX)
    assert torch.equal(made.codes, plain.codes) and torch.equal(made.scales, plain.scales)
    assert (entry.method, entry.alpha, entry.fell_back) == ("awq", 0.0, False)
    assert entry.error_after == entry.error_before == base.error_after
    assert entry.weight_error == base.weight_error


@pytest.mark.parametrize("chosen", ["nvfp4", "mxfp4", "int4-g64", "int3-g64"])
@pytest.mark.parametrize("scales", ["amax", "mse", "hessian"])
def test_outlier_channels_get_factors_and_a_lower_error(chosen, scales):
    # The channels that carry the output lie beside channels of larger weights: rounding to nearest gives them coarse steps.
    weight = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(0))
    weight[:, list(OUTLIERS)] *= 0.1
    one, stats, options = member(chosen=chosen, weight=weight), statistics(OUTLIERS), QuantizerOptions(scales=scales)
    alpha, error = chosen_error(one, stats, options)
    ((_, base),) = awq([folded(one, Factors(alpha=0.0))], stats, options)
    assert 0 < alpha < 1
    assert error < 0.7 * base.error_after
    assert error < 0.7 * rtn([one], stats, options)[0][1].error_after


@pytest.mark.parametrize("scales", ["amax", "hessian"])
@pytest.mark.parametrize("seed", range(4))
def test_it_is_never_worse_than_no_factors_under_the_same_scales(scales, seed):
    one, stats, options = member(seed=seed, chosen="mxfp4"), statistics(seed=seed), QuantizerOptions(scales=scales)
    ((_, base),) = awq([folded(one, Factors(alpha=0.0))], stats, options)
    # The search rounds by division and the planes by multiplication with a reciprocal: a tie may fall the other way.
    assert chosen_error(one, stats, options)[1] <= base.error_after * (1 + 1e-4)


def test_the_exponent_is_the_best_of_the_grid_for_all_readers_together():
    options = QuantizerOptions(scales="amax", awq_grid=5)
    first, second = member("q_proj", seed=4), member("k_proj", seed=5)
    other, stats, more = member("up_proj", seed=6, chosen="int4-g32"), statistics(OUTLIERS), statistics({9: 30.0}, seed=8)
    choice = choose(lambda: [([first, second], stats), ([other], more)], SAME, options)
    assert stats.absolute is not None and more.absolute is not None
    logs = log_magnitudes((stats.absolute + more.absolute) / (stats.weight + more.weight), SAME)
    costs = []
    for step in range(5):
        factors = Factors(columns=factors_of(logs, step / 5))
        total = 0.0
        for members, state in (([first, second], stats), ([other], more)):
            scaled = [factors.fold(one.weight) for one in members]
            largest = torch.stack([weight.abs().amax() for weight in scaled]).amax()
            for one, weight in zip(members, scaled, strict=True):
                ((tensor, _),) = awq([Member.of(one.name, weight, one.spec, largest, factors)], state, options)
                error = (one.weight - factors.unfold(tensor.dequantize())).double()
                total += float(((error @ state.matrix()) * error).sum())
        costs.append(total)
    assert choice.alpha == costs.index(min(costs)) / 5
    assert choice.channels is not None and torch.equal(choice.channels, factors_of(logs, choice.alpha))


def test_constant_blocks_leave_mxfp4_blocks_as_they_are():
    # One factor a block multiplies the whole block: codes and exponent of W diag(s) are those of a scaled W, so no weight of a block loses a bit to its neighbour.
    weight, stats = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(0)), statistics(OUTLIERS)
    one = member(chosen="mxfp4", weight=weight)
    logs = {constant: log_magnitudes(stats.magnitude(), SAME, [32] if constant else []) for constant in (True, False)}
    for alpha in (0.3, 0.6, 0.9):
        shift: dict[bool, torch.Tensor] = {}
        for constant in (True, False):
            factors = Factors(columns=factors_of(logs[constant], alpha))
            assert factors.columns is not None
            assert constant == bool((factors.columns.view(-1, 32) == factors.columns.view(-1, 32)[:, :1]).all())
            ((tensor, _),) = awq([folded(one, factors)], stats, AMAX)
            # log2 of the step, seen from the unfolded weight: by block for one factor, by its smallest column otherwise.
            smallest = factors.columns.view(-1, 32).amin(-1)
            shift[constant] = one.spec.grid.decode(tensor.scales).log2() - smallest.log2()
        ((plain, _),) = rtn([one], stats, AMAX)
        steps = one.spec.grid.decode(plain.scales).log2()
        # A block times one factor keeps its step up to where the octave is cut: less than one octave either way.
        assert bool(((shift[True] - steps).abs() < 1.0).all())
        # With factors that vary, some block's weights lose an octave and more.
        assert bool(((shift[False] - steps) >= 1.0).any())


def test_constant_blocks_by_option():
    stats = statistics(OUTLIERS)
    weight = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(0))
    weight[:, :32] *= 0.1
    one = member(chosen="mxfp4", weight=weight)
    wide = statistics(dict.fromkeys(range(32), 50.0))
    for state in (stats, wide):
        for constant in (True, False):
            options = QuantizerOptions(scales="mse", awq_block_constant=constant)
            found = choose(lambda state=state: [([one], state)], SAME, options).channels
            if found is not None and constant:
                assert torch.equal(found.view(-1, 32), found.view(-1, 32)[:, :1].expand(-1, 32))
    assert choose(lambda: [([one], wide)], SAME, QuantizerOptions(scales="amax", awq_block_constant=True)).channels is not None


def test_without_a_place_it_rounds_and_says_so():
    one, stats = member(), statistics(OUTLIERS)
    ((made, entry),) = METHODS["awq"].run([one], stats, AMAX)
    assert (entry.method, entry.asked, entry.reason, entry.fell_back) == ("rtn", "awq", NO_PLACE, True)
    assert math.isnan(entry.alpha)
    ((plain, _),) = rtn([one], stats, AMAX)
    assert torch.equal(made.codes, plain.codes)
    # Under the scales that were asked for.
    ((searched, _),) = awq([one], stats, QuantizerOptions(scales="mse"))
    ((expected, _),) = mse([one], stats, AMAX)
    assert torch.equal(searched.codes, expected.codes) and not torch.equal(searched.codes, plain.codes)


def test_without_rows_there_is_no_choice():
    one = member()
    for state in (None, GramState(width=WIDTH)):
        choice = choose(lambda state=state: [([one], state)], SAME, AMAX)
        assert choice.channels is None and choice.reason == "no calibration rows" and math.isnan(choice.alpha)
    zero = GramState(width=WIDTH).add(torch.zeros(WIDTH, WIDTH))
    assert choose(lambda: [([one], zero)], SAME, AMAX).reason == "its input is always zero"


def test_an_expert_without_rows_is_rounded_under_the_factors_of_its_place():
    factors = Factors(columns=torch.linspace(0.5, 2.0, WIDTH), alpha=0.4)
    ((tensor, entry),) = awq([folded(member(), factors)], None, QuantizerOptions())
    assert (entry.method, entry.reason, entry.alpha, entry.tokens) == ("rtn", "no calibration rows", 0.4, 0)
    assert math.isnan(entry.error_after)
    # Half a step of 4 bits at the largest code is 1/6 of the block's maximum; a factor of 4 within the weight would be off by much more.
    assert entry.weight_error < 0.2
    assert torch.equal(factors.unfold(tensor.dequantize()), tensor.dequantize() / factors.columns)


def test_errors_are_those_of_the_weight_before_folding():
    one, stats = member(), statistics(OUTLIERS)
    factors = Factors(columns=torch.linspace(0.5, 2.0, WIDTH), rows=torch.linspace(0.25, 4.0, 32), alpha=0.4)
    ((tensor, entry),) = awq([folded(one, factors)], stats, AMAX)
    assert factors.columns is not None and factors.rows is not None
    error = (one.weight - tensor.dequantize() / factors.columns / factors.rows[:, None]).double()
    weight, gram = one.weight.double(), stats.matrix()
    expected = float(((error @ gram) * error).sum() / ((weight @ gram) * weight).sum())
    # Folding there and back rounds each weight three times in float32, far below the rounding of 4 bits that the error is made of.
    assert entry.error_after == pytest.approx(expected, rel=1e-4)
    assert entry.weight_error == pytest.approx(float(error.norm() / weight.norm()), rel=1e-4)
    assert entry.error_before == pytest.approx(rtn([one], stats, AMAX)[0][1].error_after, rel=1e-4)


def test_every_option_changes_the_result():
    weight = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(0))
    weight[:, list(OUTLIERS)] *= 0.1
    one, stats = member(chosen="mxfp4", weight=weight), statistics(OUTLIERS, rows=48)

    def made(**changes: object) -> tuple[torch.Tensor, torch.Tensor, str]:
        options = QuantizerOptions(scales="amax").model_copy(update=changes)
        choice = choose(lambda: [([one], stats)], SAME, options)
        factors = Factors(columns=choice.channels, alpha=choice.alpha, reason=choice.reason)
        ((tensor, entry),) = awq([folded(one, factors)], stats, options)
        return tensor.codes, tensor.scales, entry.reason

    base = made()
    for changes in (
        {"awq_grid": 2},
        {"awq_block_constant": True},
        {"scales": "mse"},
        {"scales": "hessian"},
        {"starved": "rtn"},
        {"scale_rule": "floor"},
    ):
        codes, scales, _ = made(**changes)
        assert not (torch.equal(codes, base[0]) and torch.equal(scales, base[1])), changes
    assert made(starved="rtn")[2] == "48 rows for 64 columns"
    # A starved expert has no say, and is on the record though its place has factors.
    enough = statistics(OUTLIERS, seed=5)
    options = QuantizerOptions(scales="amax", starved="rtn")
    alone = choose(lambda: [([one], enough)], SAME, options)
    both = choose(lambda: [([one], enough), ([one], stats)], SAME, options)
    assert alone.alpha == both.alpha and alone.channels is not None and torch.equal(alone.channels, both.channels)


def test_factors_fold_there_and_back():
    factors = Factors(columns=torch.tensor([2.0, 0.5]), rows=torch.tensor([4.0, 1.0, 0.25]))
    weight = torch.arange(6.0).view(3, 2).to(torch.bfloat16)
    assert torch.equal(factors.fold(weight), torch.tensor([[0.0, 2.0], [4.0, 1.5], [2.0, 0.625]]))
    assert torch.equal(factors.unfold(factors.fold(weight)), weight.float())
    assert torch.equal(replace(factors, columns=None, rows=None).fold(weight), weight.float())


def test_it_is_registered_as_a_method_that_chooses():
    assert METHODS["awq"].needs_stats and METHODS["awq"].choose is choose
    assert all(METHODS[name].choose is None for name in METHODS if name != "awq")
