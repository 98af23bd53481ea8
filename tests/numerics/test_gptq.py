"""prism_ray.quantizers.gptq and descent against the textbook in float64: GPTQ column by column, and an objective that no refinement may raise."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from prism_ray.formats.spec import FORMATS, FormatSpec
from prism_ray.hessian.factor import factorize
from prism_ray.hessian.state import GramState
from prism_ray.quantizers.base import Member, QuantizerOptions, TensorRecord
from prism_ray.quantizers.descent import descend, refit_scales
from prism_ray.quantizers.gptq import PANEL, gptq, gptq_batch, sweep
from prism_ray.quantizers.rounding import rounder
from prism_ray.quantizers.rtn import rtn, tensor_scale_for
from prism_ray.quantizers.simple import amax_scales

by_format = pytest.mark.parametrize("name", list(FORMATS))
PLAIN = QuantizerOptions(scales="amax", refine=0)
FLIPS = 0.03
"""Share of codes that may differ between two orders of float32 sums, or float32 and float64. A value is off by some 10 to 100 units of float32 of the weights, at most
1e-5 of a step, so of the 4000 codes of a case one lies on the other side of a tie in one case of 25. A flip changes the error that all later columns of its row get, of which a
part then differs too: at most one row of 16, half of it on average, that is 3 %."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated(rows: int, width: int, seed: int = 0) -> Tensor:
    """Rows with a fast falling spectrum, unequal column sizes and a mean."""
    basis = normal(width, width, seed=seed + 1) / width**0.5 * torch.logspace(0.5, -1.5, width)[:, None]
    sizes = torch.logspace(-0.5, 0.5, width)[torch.randperm(width, generator=torch.Generator().manual_seed(seed))]
    return normal(rows, width, seed=seed) @ basis * sizes + 0.02


def stats_of(x: Tensor) -> GramState:
    return GramState(width=x.shape[1]).add(x)


def member(name: str, weight: Tensor, where: str = "w") -> Member:
    return Member.of(where, weight, FORMATS[name])


def step_of(one: Member, options: QuantizerOptions = PLAIN) -> Tensor:
    """Decoded scale times tensor scale, [O, G], from the block maxima."""
    tensor_scale, _ = tensor_scale_for(one.amax, one.spec)
    return one.spec.grid.decode(amax_scales(one, options)) * tensor_scale


def textbook(weight: Tensor, steps: Tensor, spec: FormatSpec, gram: Tensor, order: list[int]) -> Tensor:
    """Quantized weight of plain GPTQ, all in float64, one column after another in the order given. steps: [O, I]. gram: the damped mean."""
    permuted = gram[order][:, order]
    upper = torch.linalg.cholesky(torch.linalg.inv(permuted), upper=True)
    values = torch.tensor(sorted({spec.codes.values[code] for code in spec.codes.legal}), dtype=torch.float64)
    work, steps = weight.double()[:, order].clone(), steps.double()[:, order]
    out = torch.zeros_like(work)
    for column in range(work.shape[1]):
        step = steps[:, column]
        scaled = work[:, column] / torch.where(step > 0, step, torch.inf)
        out[:, column] = values[(scaled[:, None] - values).abs().argmin(1)] * step
        error = (work[:, column] - out[:, column]) / upper[column, column]
        work[:, column + 1 :] -= error[:, None] * upper[column, column + 1 :]
    back = torch.empty_like(out)
    back[:, order] = out
    return back


def output_error(weight: Tensor, quantized: Tensor, gram: Tensor) -> float:
    residual = weight.double() - quantized.double()
    return float(((residual @ gram.double()) * residual).sum())


def solved(one: Member, stats: GramState, options: QuantizerOptions) -> tuple[Tensor, TensorRecord]:
    ((tensor, entry),) = gptq([one], stats, options)
    tensor.validate()
    assert entry.method == "gptq", entry.reason
    return tensor.dequantize(), entry


def same(found: Tensor, expected: Tensor, step: Tensor) -> float:
    """Share of values that differ by more than rounding; codes are at least half a step apart."""
    return float(((found.double() - expected.double()).abs() > 0.25 * step).double().mean())


def widths(name: str) -> list[int]:
    return [width for width in (128, 144, 256, 288) if width % FORMATS[name].block == 0]


class TestTextbook:
    @by_format
    @pytest.mark.parametrize("act_order", [False, True])
    def test_codes_and_output_error_are_the_textbooks(self, name, act_order):
        """At every width around one and two panels that the format's blocks divide."""
        assert PANEL == 128, "the widths of this test lie around the panel"
        for width in widths(name):
            x, weight = correlated(3 * width, width), normal(16, width, seed=5)
            stats, one = stats_of(x), member(name, weight)
            options = PLAIN.model_copy(update={"act_order": act_order})
            found, entry = solved(one, stats, options)
            gram = x.double().T @ x.double() / len(x)
            damped = gram + 0.01 * gram.diagonal().mean() * torch.eye(width, dtype=torch.float64)
            order = gram.diagonal().argsort(descending=True).tolist() if act_order else list(range(width))
            steps = step_of(one).repeat_interleave(one.spec.block, 1)
            expected = textbook(weight, steps, one.spec, damped, order)
            assert same(found, expected, steps) <= FLIPS, width
            assert output_error(weight, found, damped) == pytest.approx(output_error(weight, expected, damped), rel=1e-3), width
            # The test would be worth little if GPTQ and rounding were nearly the same thing here.
            assert same(found, rtn(weight, one.spec)[0].dequantize(), steps) > 0.1
            assert entry.error_after < 0.8 * entry.error_before

    @pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "int4-g32"])
    def test_dead_columns_are_as_if_they_were_not_there(self, name):
        """CAL-02: columns 17 (zero) and 18 (all 1e-25); the rest against the textbook on the 126 live columns alone."""
        x, weight = correlated(400, 128), normal(16, 128, seed=5)
        x[:, 17], x[:, 18] = 0.0, 1e-25
        one = member(name, weight)
        found, entry = solved(one, stats_of(x), PLAIN)
        assert entry.dead == 2
        live = [column for column in range(128) if column not in (17, 18)]
        rows = x[:, live].double()
        gram = rows.T @ rows / len(x)
        damped = gram + 0.01 * gram.diagonal().mean() * torch.eye(126, dtype=torch.float64)
        steps = step_of(one).repeat_interleave(one.spec.block, 1)
        expected = textbook(weight[:, live], steps[:, live], one.spec, damped, list(range(126)))
        assert same(found[:, live], expected, steps[:, live]) <= FLIPS

    @by_format
    @pytest.mark.parametrize("act_order", [False, True])
    def test_a_diagonal_matrix_is_rounding_to_nearest(self, name, act_order):
        """Nothing is spread, so the codes are those of plain rounding under the same scales, bit for bit; refinement finds no better code."""
        weight = normal(16, 256, seed=5).bfloat16()
        gram = torch.diag(torch.logspace(-2, 2, 256, dtype=torch.float64)[torch.randperm(256, generator=torch.Generator().manual_seed(0))])
        stats = GramState(width=256, tokens=500, weight=500.0, gram=gram * 500, absolute=torch.ones(256, dtype=torch.float64))
        ((tensor, _),) = gptq([member(name, weight)], stats, PLAIN.model_copy(update={"act_order": act_order}))
        expected, _ = rtn(weight, FORMATS[name])
        assert torch.equal(tensor.codes, expected.codes)
        assert torch.equal(tensor.scales, expected.scales)

    def test_a_sweep_worked_by_hand(self):
        """One row (0.4, 0.4) under H = [[1, 1/2], [1/2, 1]], integer steps of 1: the first column rounds to 0, half its error goes to the second, 0.6, which rounds to 1."""
        spec = FORMATS["int4-g32"]
        gram = torch.eye(32, dtype=torch.float64)
        gram[0, 1] = gram[1, 0] = 0.5
        weight = torch.zeros(1, 32)
        weight[0, :2] = 0.4
        upper = factorize(gram, 1.0, damping=0.0).upper.float()[None]
        values = sweep(weight[None], torch.ones(1, 1, 1), spec, upper)[0, 0]
        torch.testing.assert_close(values[:3], torch.tensor([0.4, 0.6, 0.0]), rtol=0, atol=1e-6)
        assert rounder(spec.codes)(values)[:2].tolist() == [0.0, 1.0]
        # Rounding both down costs 0.4^2 (1 + 1 + 2 / 2) = 0.48; this costs 0.16 + 0.36 - 0.24 = 0.28.
        reverse = sweep(weight[None], torch.ones(1, 1, 1), spec, upper, order=torch.arange(32)[None])
        assert torch.equal(reverse[0, 0], values)

    @pytest.mark.parametrize("rows", [1, 3])
    def test_weights_are_left_as_they_are(self, rows):
        """A single row has the same memory in both layouts, so a transposed view of it is the caller's own tensor."""
        one, mean, _, step, values = TestDescent().case("nvfp4", 0, 128)
        weight, values, step = one.weight[:rows], values[:rows].clone(), step[:rows]
        before = weight.clone(), values.clone(), step.clone(), mean.clone()
        sweep(weight[None], step[None], one.spec, factorize(mean, 1.0).upper[None])
        descend(weight[None], values[None], step[None], one.spec, mean.float()[None])
        refit_scales(weight, values, amax_scales(one, PLAIN)[:rows], tensor_scale_for(one.amax, one.spec)[0], one.spec, mean.float())
        for given, kept in zip((weight, values, step, mean), before, strict=True):
            assert torch.equal(given, kept)


class TestGroups:
    @by_format
    def test_members_of_one_input_are_solved_as_if_alone(self, name):
        """Rows do not meet in a sweep: only the shapes of float32 products differ."""
        stats = stats_of(correlated(600, 256))
        members = [member(name, normal(rows, 256, seed=rows), f"m{rows}") for rows in (8, 24, 1)]
        for options in (PLAIN, QuantizerOptions()):
            together = gptq(members, stats, options)
            assert [entry.name for _, entry in together] == ["m8", "m24", "m1"]
            for one, (tensor, entry) in zip(members, together, strict=True):
                alone, expected = solved(one, stats, options)
                assert tensor.shape == tuple(one.weight.shape)
                assert same(tensor.dequantize(), alone, 0.01 * step_of(one).amin()) <= (FLIPS if len(one.weight) > 1 else 0.5)
                assert entry.error_after == pytest.approx(expected.error_after, rel=0.02)
                assert (entry.damping, entry.rank, entry.tokens) == (expected.damping, expected.rank, expected.tokens)

    @pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "int4-g64"])
    @pytest.mark.parametrize("act_order", [False, True])
    def test_experts_side_by_side_are_each_as_if_alone(self, name, act_order):
        """Each has its own statistics (one of them starved) and its own order; results come in the order given."""
        groups = [([member(name, normal(16, 256, seed=expert), f"e{expert}")], stats_of(correlated(rows, 256, seed=expert)))
                  for expert, rows in enumerate((600, 40, 300))]  # fmt: skip
        for options in (PLAIN, QuantizerOptions()):
            options = options.model_copy(update={"act_order": act_order})
            batch = gptq_batch(groups, options)
            assert [entry.name for ((_, entry),) in batch] == ["e0", "e1", "e2"]
            for (members, stats), ((tensor, entry),) in zip(groups, batch, strict=True):
                alone, expected = solved(members[0], stats, options)
                assert same(tensor.dequantize(), alone, 0.01 * step_of(members[0]).amin()) <= FLIPS
                assert entry.error_after == pytest.approx(expected.error_after, rel=0.01)
                assert (entry.tokens, entry.rank) == (stats.tokens, min(stats.tokens, 256))

    def test_a_shared_maximum_gives_a_shared_tensor_scale(self):
        """FMT-05: what is served as one matrix has one tensor scale."""
        stats = stats_of(correlated(400, 128))
        small, large = normal(8, 128), 5 * normal(8, 128, seed=1)
        members = [Member.of(name, weight, FORMATS["nvfp4"], large.abs().amax()) for name, weight in (("q", small), ("k", large))]
        (one, _), (two, _) = gptq(members, stats, QuantizerOptions())
        assert torch.equal(one.tensor_scale, two.tensor_scale)
        assert one.divisor is not None


class TestImprovement:
    @by_format
    @pytest.mark.parametrize("scales", ["amax", "mse", "hessian"])
    @pytest.mark.parametrize("act_order", [False, True])
    def test_the_output_error_is_at_most_that_of_rounding(self, name, scales, act_order):
        for seed, rows in ((0, 600), (1, 300), (2, 60)):
            stats, weight = stats_of(correlated(rows, 256, seed)), normal(16, 256, seed=seed + 20)
            for refine in (0, 2):
                _, entry = solved(member(name, weight), stats, QuantizerOptions(scales=scales, act_order=act_order, refine=refine))
                assert entry.error_after <= entry.error_before

    @by_format
    def test_more_passes_never_raise_the_objective(self, name):
        """tr(R (H + d) R') of the planes after 0 .. 4 passes, in float64."""
        x, weight = correlated(600, 256, 3), normal(16, 256, seed=8)
        stats, one = stats_of(x), member(name, weight)
        mean = factorize(stats.matrix(), stats.weight).mean
        costs = [output_error(weight, solved(one, stats, QuantizerOptions(refine=refine))[0], mean) for refine in range(5)]
        allowed = rounding_slack(mean, step_of(one), one.spec)
        assert all(after <= before + allowed for before, after in itertools.pairwise(costs))
        assert costs[2] < 0.98 * costs[0], "two passes must bring something"


def rounding_slack(gram: Tensor, step: Tensor, spec: FormatSpec) -> float:
    """How much float32 may raise the objective in a pass. A code is chosen by a target that is a sum of I products: off by some sqrt(I) units of a few steps. The wrong
    side of a tie costs at most 2 H_jj s^2 times that, summed over all columns and rows. It is a thousandth of the objectives below."""
    columns = gram.shape[0]
    steps = step.repeat_interleave(spec.block, 1).double()
    return 2 * 4 * columns**0.5 * 2.0**-24 * float((steps.square() * gram.diagonal()).sum())


class TestDescent:
    def case(self, name: str, seed: int, width: int) -> tuple[Member, Tensor, Tensor, Tensor, Tensor]:
        """(member, mean Gram matrix float64, scale bytes, steps [O, G], values rounded to nearest): a start that leaves much to gain."""
        stats = stats_of(correlated(2 * width, width, seed))
        one = member(name, normal(12, width, seed=seed + 3))
        mean = factorize(stats.matrix(), stats.weight).mean
        tensor, _ = rtn(one.weight, one.spec)
        return one, mean, tensor.scales, step_of(one), tensor.dequantize()

    @by_format
    @pytest.mark.parametrize("seed", [0, 1])
    def test_neither_step_raises_the_objective(self, name, seed):
        for width in widths(name):
            one, mean, scales, step, values = self.case(name, seed, width)
            tensor_scale, _ = tensor_scale_for(one.amax, one.spec)
            allowed = rounding_slack(mean, step, one.spec)
            cost = first = output_error(one.weight, values, mean)
            for _ in range(3):
                scales, values = refit_scales(one.weight, values, scales, tensor_scale, one.spec, mean.float())
                refitted = output_error(one.weight, values, mean)
                assert refitted <= cost + allowed, (width, "scales")
                step = one.spec.grid.decode(scales) * tensor_scale
                values = descend(one.weight[None], values[None], step[None], one.spec, mean.float()[None])[0]
                cost = output_error(one.weight, values, mean)
                assert cost <= refitted + allowed, (width, "codes")
            assert cost < 0.9 * first

    @by_format
    def test_a_pass_leaves_every_last_column_at_its_best_code(self, name):
        """The last column was chosen when all others stood: no other code of its grid lowers the objective, tried one by one in float64."""
        one, mean, _, step, values = self.case(name, 2, 256)
        moved = descend(one.weight[None], values[None], step[None], one.spec, mean.float()[None])[0]
        cost = row_costs(one.weight, moved, mean)
        for code in one.spec.codes.legal:
            other = moved.clone()
            other[:, -1] = one.spec.codes.values[code] * step[:, -1]
            assert bool((row_costs(one.weight, other, mean) >= cost - rounding_slack(mean, step, one.spec)).all())

    @by_format
    def test_a_pass_is_the_textbooks_coordinate_descent(self, name):
        """q_j = s round((q_j + (R H)_j / H_jj) / s) for one column after another, in float64; blocks and panels are only a way to compute it."""
        for width in widths(name):
            one, mean, _, step, values = self.case(name, 4, width)
            found = descend(one.weight[None], values[None], step[None], one.spec, mean.float()[None])[0]
            steps = step.repeat_interleave(one.spec.block, 1).double()
            grid = torch.tensor(sorted({one.spec.codes.values[code] for code in one.spec.codes.legal}), dtype=torch.float64)
            expected, weight = values.double().clone(), one.weight.double()
            for column in range(width):
                target = expected[:, column] + (weight - expected) @ mean[:, column] / mean[column, column]
                expected[:, column] = grid[(target[:, None] / steps[:, column, None] - grid).abs().argmin(1)] * steps[:, column]
            assert same(found, expected, steps) <= FLIPS, width

    @by_format
    def test_scales_that_are_best_already_stay(self, name):
        """A weight that is its own quantization has nothing to gain: bytes and values stay as they are."""
        one, mean, scales, _, values = self.case(name, 5, 256)
        tensor_scale, _ = tensor_scale_for(one.amax, one.spec)
        kept, same_values = refit_scales(values, values, scales, tensor_scale, one.spec, mean.float())
        assert torch.equal(kept, scales)
        torch.testing.assert_close(same_values, values, rtol=2.0**-22, atol=0)

    @by_format
    def test_scales_that_are_off_are_found_again(self, name):
        """The weight is exactly representable, and every scale is stored one grid step or more too large: refitting alone goes back to it."""
        spec = FORMATS[name]
        codes = torch.randint(0, len(spec.codes.legal), (6, 256), generator=torch.Generator().manual_seed(0))
        plane = torch.tensor([spec.codes.values[code] for code in spec.codes.legal])[codes]
        right = spec.grid.encode(torch.full((6, 256 // spec.block), 1.0))
        wrong = spec.grid.encode(torch.full((6, 256 // spec.block), 2.0))
        gram = torch.eye(256)
        scales, values = refit_scales(plane, plane * 2.0, wrong, torch.tensor(1.0), spec, gram)
        assert torch.equal(scales, right)
        torch.testing.assert_close(values, plane, rtol=1e-6, atol=0)

    def test_a_scale_that_would_round_to_zero_is_never_taken(self):
        """NVFP4 alone has a zero scale; a block whose best scale lies far below the grid keeps the one it has, and a zero block stays zero."""
        spec = FORMATS["nvfp4"]
        weight = torch.cat([torch.full((1, 16), 1e-7), torch.zeros(1, 16)], 1)
        quantized = torch.cat([torch.full((1, 16), 0.5 * 2.0**-9), torch.zeros(1, 16)], 1)
        scales = torch.tensor([[1, 0]], dtype=torch.uint8)
        kept, values = refit_scales(weight, quantized, scales, torch.tensor(1.0), spec, torch.eye(32))
        assert torch.equal(kept, scales)
        assert torch.equal(values, quantized)
        step = torch.tensor([[[2.0**-9, 0.0]]])
        moved = descend(torch.ones(1, 1, 32), quantized[None], step, spec, torch.eye(32)[None])
        assert float(moved[..., 16:].abs().max()) == 0.0
        assert float(moved[..., :16].min()) == 6 * 2.0**-9


def row_costs(weight: Tensor, quantized: Tensor, gram: Tensor) -> Tensor:
    residual = weight.double() - quantized.double()
    return ((residual @ gram) * residual).sum(1)
