"""prism_ray.quantizers: the fast rounder, the scale search, members, planes and records, fallbacks, and that every option does something."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from prism_ray.core.errors import ConfigError, FormatError, UnknownName
from prism_ray.formats.codes import E2M1, INT3, INT4
from prism_ray.formats.spec import FORMATS, FormatSpec
from prism_ray.hessian.state import GramState
from prism_ray.quantizers import scales as scales_module
from prism_ray.quantizers.base import Member, Quantized, QuantizerOptions, assemble, output_error, record
from prism_ray.quantizers.methods import METHODS
from prism_ray.quantizers.rounding import Rounder, rounder
from prism_ray.quantizers.rtn import rtn as rtn_planes
from prism_ray.quantizers.rtn import tensor_scale_for
from prism_ray.quantizers.scales import FACTORS, block_cost, block_diagonal, round_blocks, search_scales
from prism_ray.quantizers.simple import amax_scales

by_format = pytest.mark.parametrize("name", list(FORMATS))
by_codes = pytest.mark.parametrize("codes", [E2M1, INT4, INT3], ids=lambda codes: codes.name)


def normal(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size


def correlated(rows: int, width: int, seed: int = 0) -> Tensor:
    """Rows whose columns are correlated and of unequal size, as activations are."""
    sizes = torch.logspace(-1, 1, width)[torch.randperm(width, generator=torch.Generator().manual_seed(seed + 7))]
    return normal(rows, width, seed=seed) @ normal(width, width, seed=seed + 1, size=width**-0.5) * sizes + 0.2


def stats_of(x: Tensor) -> GramState:
    return GramState(width=x.shape[1]).add(x)


def run(method: str, weight: Tensor, name: str, stats: GramState | None, **options: object) -> Quantized:
    return METHODS[method].run([Member.of("layer.w", weight, FORMATS[name])], stats, QuantizerOptions(**options))  # type: ignore[arg-type]


class TestRounder:
    @by_codes
    def test_it_is_the_code_grids_own_rule(self, codes):
        values = torch.tensor(sorted({codes.values[code] for code in codes.legal}))
        middle = (values[:-1] + values[1:]) / 2
        infinity = torch.tensor(math.inf)
        near = [torch.nextafter(point, sign * infinity) for point in (middle, values) for sign in (-1, 1)]
        special = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38, math.inf, -math.inf])
        x = torch.cat([normal(20000, size=4.0), values, middle, *near, special])
        assert torch.equal(rounder(codes)(x), codes.decode(codes.round_to_codes(x)))

    @by_codes
    def test_shapes_and_strides(self, codes):
        x = normal(6, 5, 4, size=3.0)
        for view in (x, x.mT, x[:, :, 1], x[:, 0], x[0, 0, 0], x[:0]):
            found = rounder(codes)(view)
            assert found.shape == view.shape
            assert torch.equal(found, codes.decode(codes.round_to_codes(view)))

    def test_one_of_each(self):
        assert rounder(E2M1) is rounder(E2M1)
        assert isinstance(rounder(INT3), Rounder)
        assert float(rounder(INT3)(torch.tensor(7.0))) == 3.0
        assert float(rounder(INT4)(torch.tensor(7.0))) == 7.0


METRICS = ("weight", "diagonal", "block")


def metric_of(kind: str, columns: int, block: int, seed: int = 3) -> Tensor | None:
    gram = stats_of(correlated(300, columns, seed)).matrix() / 300
    return {"weight": None, "diagonal": gram.diagonal().float(), "block": block_diagonal(gram, block)}[kind]


def cost64(error: Tensor, metric: Tensor | None) -> Tensor:
    """e M e' in float64: error [O, G, B] -> [O, G]."""
    error = error.double()
    if metric is None:
        return error.square().sum(-1)
    if metric.ndim == 1:
        return (error.square() * metric.double().view(error.shape[1:])).sum(-1)
    return torch.einsum("ogi,gij,ogj->og", error, metric.double(), error)


def errors_under(blocks: Tensor, scale: Tensor, spec: FormatSpec) -> tuple[Tensor, Tensor]:
    """(rounding errors, rounded) of blocks [O, G, B] under scales [O, G] by the code grid's own rule."""
    step = scale.unsqueeze(-1)
    codes = spec.codes.round_to_codes(torch.where(step > 0, blocks / step, torch.zeros_like(blocks)))
    rounded = spec.codes.decode(codes) * step
    return blocks.double() - rounded.double(), rounded


def slack(blocks: Tensor, metric: Tensor | None) -> Tensor:
    """What float32 may hide of the root of a cost: each error is off by some units of the weight, so the root by 2^-21 of the weight's own root cost under |M|."""
    return 2.0**-21 * cost64(blocks.abs(), None if metric is None else metric.abs()).sqrt()


class TestSearch:
    def case(self, name: str, kind: str, size: float = 1.0, rows: int = 12) -> tuple[FormatSpec, Tensor, Tensor, Tensor, Tensor | None]:
        """(spec, weight, tensor scale, blocks, metric)."""
        spec = FORMATS[name]
        weight = normal(rows, 256, seed=1, size=size)
        weight[0, ::5] *= 20
        weight[1, : spec.block] = 0.0
        factor, _ = tensor_scale_for(weight.abs().amax(), spec)
        return spec, weight, factor, weight.view(rows, -1, spec.block), metric_of(kind, 256, spec.block)

    def root(self, spec: FormatSpec, blocks: Tensor, data: Tensor, factor: Tensor, metric: Tensor | None) -> Tensor:
        return cost64(errors_under(blocks, spec.grid.decode(data) * factor, spec)[0], metric).sqrt()

    @by_format
    @pytest.mark.parametrize("kind", METRICS)
    @pytest.mark.parametrize("size", [1.0, 3e-4, 1e-24, 1e24])
    def test_never_worse_than_the_scale_of_the_maximum(self, name, kind, size):
        spec, weight, factor, blocks, metric = self.case(name, kind, size)
        found = search_scales(weight, spec, factor, spec.amax_rule, metric)
        own = spec.grid.encode_amax(blocks.abs().amax(-1) / factor, spec.amax_rule, spec.codes.largest)
        assert found.shape == (12, weight.shape[1] // spec.block * spec.grid.width)
        assert not bool(spec.grid.illegal(found).any())
        ours, before = self.root(spec, blocks, found, factor, metric), self.root(spec, blocks, own, factor, metric)
        assert bool((ours <= before + slack(blocks, metric)).all())
        # And better somewhere, or the search would be for nothing.
        assert float((ours**2).sum()) < (1 - 1e-4) * float((before**2).sum())

    @by_format
    @pytest.mark.parametrize("kind", METRICS)
    def test_it_is_the_best_of_its_candidates_and_ties_go_to_the_larger(self, name, kind):
        spec, weight, factor, blocks, metric = self.case(name, kind)
        found = search_scales(weight, spec, factor, spec.amax_rule, metric)
        amax = blocks.abs().amax(-1) / factor
        candidates = [spec.grid.encode_amax(amax * multiple, spec.amax_rule, spec.codes.largest) for multiple in FACTORS[spec.grid.name]]
        roots = torch.stack([self.root(spec, blocks, data, factor, metric) for data in candidates])
        assert bool((self.root(spec, blocks, found, factor, metric) <= roots.amin(0) + slack(blocks, metric)).all())
        values = torch.stack([spec.grid.decode(data) for data in candidates])
        chosen = spec.grid.decode(found)
        # Where two candidates have no error at all (a block of zeros), the larger of them is taken.
        free = (roots == 0) & (values != 0)
        assert bool((chosen >= torch.where(free, values, torch.zeros_like(values)).amax(0)).all())

    @by_format
    @pytest.mark.parametrize("kind", ["weight", "diagonal"])
    def test_against_every_scale_of_the_grid(self, name, kind):
        """No byte in the range of the factors beats the search by more than the gap to the nearest candidate allows.

        Two scales s, c with |s - c| <= d s give, with the same codes, errors that differ by at most d |Q|, and rounding again under c only lowers the
        cost: root cost(c) <= root cost(s) + d root (Q M Q'). d is 0 for E4M3 from 0.75 on and for E8M0, whose bytes are all candidates; for
        bfloat16 half a gap of the factors, 0.015 / 0.55, and its rounding 2^-8. What the factors leave out: scales outside of their range.
        """
        spec, weight, factor, blocks, metric = self.case(name, kind)
        found = search_scales(weight, spec, factor, spec.amax_rule, metric)
        ours = self.root(spec, blocks, found, factor, metric)
        low, high, gap = {"e4m3": (0.75, 1.15, 0.0), "e8m0": (0.5, 2.0, 0.0), "bf16": (0.55, 1.06, 0.015 / 0.55 + 2.0**-8)}[spec.grid.name]
        amax = blocks.abs().amax(-1) / factor
        # E8M0's own rounding of the maximum moves its scale by up to a factor of two, so its range starts from that.
        centre = (
            spec.grid.decode(spec.grid.encode_amax(amax, spec.amax_rule, 6.0)) if spec.grid.name == "e8m0" else amax / spec.codes.largest
        )
        data = torch.arange(1, 256, dtype=torch.uint8)[:, None] if spec.grid.width == 1 else self.bfloat16_near(centre)
        tried = 0
        for byte in data[~spec.grid.illegal(data).flatten()]:
            scale = spec.grid.decode(byte[None])
            inside = (scale >= low * centre) & (scale <= high * centre) & (centre > 0)
            error, rounded = errors_under(blocks, (scale * factor).expand(centre.shape), spec)
            allowed = cost64(error, metric).sqrt() + gap * cost64(rounded, metric).sqrt() + slack(blocks, metric)
            assert bool((ours <= allowed)[inside].all()), byte
            tried += int(inside.sum())
        assert tried > 2 * centre.numel(), "the comparison must have met several scales a block"

    def bfloat16_near(self, centre: Tensor) -> Tensor:
        """A sixteenth of the bfloat16 scales between half the smallest positive centre and twice the largest, two bytes each."""
        bits = torch.stack([centre[centre > 0].min() / 2, centre.max() * 2]).bfloat16().view(torch.int16).tolist()
        return torch.arange(bits[0], bits[1], 16, dtype=torch.int16)[:, None].view(torch.uint8)

    @pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "int4-g32"])
    @pytest.mark.parametrize("kind", METRICS)
    def test_the_piece_does_not_matter(self, name, kind, monkeypatch):
        spec, weight, factor, _, metric = self.case(name, kind, rows=24)
        rows = factor * torch.linspace(1, 2, 24)
        whole = search_scales(weight, spec, rows, spec.amax_rule, metric)
        for piece in (1, 256, 5 * 256, 1000):
            monkeypatch.setattr(scales_module, "PIECE", piece)
            assert torch.equal(search_scales(weight, spec, rows, spec.amax_rule, metric), whole)

    @by_format
    def test_an_all_zero_weight_keeps_the_byte_of_its_maximum(self, name):
        spec = FORMATS[name]
        own = spec.grid.encode_amax(torch.zeros(2, 256 // spec.block), spec.amax_rule, spec.codes.largest)
        assert torch.equal(search_scales(torch.zeros(2, 256), spec, torch.tensor(1.0), spec.amax_rule), own)

    def test_factors_reach_every_e4m3_byte_from_three_quarters_on(self):
        grid = FORMATS["nvfp4"].grid
        amax = torch.logspace(0, 1, 4001, base=2.0)[:-1] * 48
        reached = torch.stack([grid.encode_amax(amax * multiple, "nearest", 6.0) for multiple in FACTORS["e4m3"]])
        for byte in range(1, 127):
            ratio = grid.decode(torch.tensor([byte], dtype=torch.uint8)) / (amax / 6)
            inside = (ratio >= 0.75) & (ratio <= 1.15)
            assert bool((reached == byte).any(0)[inside].all()), byte

    def test_cost_of_a_block_by_hand(self):
        error = torch.tensor([[[1.0, -2.0], [3.0, 0.5]]])
        assert block_cost(error, None).tolist() == [[5.0, 9.25]]
        assert block_cost(error, torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [[9.0, 28.0]]
        matrix = torch.arange(16.0).view(4, 4)
        matrix = matrix + matrix.T
        blocks = block_diagonal(matrix.double(), 2)
        assert blocks.tolist() == [matrix[:2, :2].tolist(), matrix[2:, 2:].tolist()]
        # [1, -2] [[0, 5], [5, 10]] [1, -2]' = 20; [3, 0.5] [[20, 25], [25, 30]] [3, 0.5]' = 262.5
        assert block_cost(error, blocks).tolist() == [[20.0, 262.5]]

    def test_blocks_under_a_zero_step_are_zero(self):
        spec = FORMATS["nvfp4"]
        assert float(round_blocks(torch.ones(1, 1, 16), torch.zeros(1, 1, 1), spec).abs().sum()) == 0.0


class TestMember:
    def test_columns_that_do_not_divide_are_refused_with_the_formats_that_fit(self):
        with pytest.raises(FormatError, match=r"layer.w: 48 columns do not divide into mxfp4 blocks of 32; formats that fit: nvfp4"):
            Member.of("layer.w", torch.ones(2, 48), FORMATS["mxfp4"])

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_a_weight_that_is_not_finite_is_refused_by_name(self, bad):
        weight = normal(4, 32)
        weight[1, 3] = bad
        with pytest.raises(FormatError, match="layer.w: weight holds NaN or infinity"):
            Member.of("layer.w", weight, FORMATS["nvfp4"])

    def test_the_maximum_is_the_groups_where_that_is_larger(self):
        weight = torch.full((2, 16), 3.0, dtype=torch.bfloat16)
        assert float(Member.of("w", weight, FORMATS["nvfp4"]).amax) == 3.0
        assert float(Member.of("w", weight, FORMATS["nvfp4"], torch.tensor(8.0)).amax) == 8.0
        assert float(Member.of("w", weight, FORMATS["nvfp4"], torch.tensor(1.0)).amax) == 3.0
        assert Member.of("w", weight, FORMATS["nvfp4"]).weight.dtype == torch.float32


class TestSimple:
    @by_format
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_rtn_is_the_one_rounding_to_nearest(self, name, dtype):
        """The planes of quantizers.rtn, byte for byte: bfloat16 weights lie on ties often, where a reciprocal would send them the other way."""
        weight = normal(64, 512, size=0.02).to(dtype)
        weight[3] = 0.0
        ((tensor, entry),) = run("rtn", weight, name, None)
        expected, report = rtn_planes(weight, FORMATS[name])
        assert torch.equal(tensor.codes, expected.codes)
        assert torch.equal(tensor.scales, expected.scales)
        assert torch.equal(tensor.tensor_scale, expected.tensor_scale)
        assert (entry.clipped, entry.flushed) == (report.clipped_blocks, report.flushed_blocks)
        assert entry.weight_error == pytest.approx(report.relative_error, rel=1e-6)
        tensor.validate()

    @by_format
    def test_mse_lowers_the_weight_error(self, name):
        weight = normal(32, 256)
        ((_, before),), ((tensor, after),) = run("rtn", weight, name, None), run("mse", weight, name, None)
        assert after.weight_error < before.weight_error
        assert (after.method, after.asked, after.fell_back) == ("mse", "mse", False)
        tensor.validate()

    @by_format
    @pytest.mark.parametrize("method", list(METHODS))
    def test_zero_weights_and_zero_blocks(self, name, method):
        spec = FORMATS[name]
        weight = normal(8, 256)
        weight[:, : spec.block] = 0.0
        weight[2] = 0.0
        stats = stats_of(correlated(400, 256))
        for given in (weight, torch.zeros(8, 256)):
            ((tensor, entry),) = run(method, given, name, stats)
            values = tensor.dequantize()
            tensor.validate()
            assert bool(torch.isfinite(values).all())
            assert entry.flushed == 0
            if method != "gptq" or not bool(given.any()):
                assert float(values[given == 0].abs().max()) == 0.0
        assert entry.weight_error == 0.0
        assert math.isnan(entry.error_after), "an all-zero weight does nothing to the rows"

    @by_format
    @pytest.mark.parametrize("method", list(METHODS))
    def test_the_same_input_gives_the_same_bytes_and_nothing_is_changed(self, name, method):
        weight, stats = normal(8, 256), stats_of(correlated(400, 256))
        before = weight.clone(), stats.matrix().clone()
        (one, _), (two, _) = run(method, weight, name, stats)[0], run(method, weight, name, stats)[0]
        assert torch.equal(one.codes, two.codes)
        assert torch.equal(one.scales, two.scales)
        assert torch.equal(weight, before[0])
        assert torch.equal(stats.matrix(), before[1])


class TestRecord:
    @by_format
    @pytest.mark.parametrize("method", ["rtn", "mse", "gptq"])
    def test_errors_are_those_of_the_planes_in_float64(self, name, method):
        spec = FORMATS[name]
        weight, x = normal(16, 256), correlated(400, 256)
        stats = stats_of(x)
        ((tensor, entry),) = run(method, weight, name, stats)
        error, wide, rows = weight.double() - tensor.dequantize().double(), weight.double(), x.double()
        expected = float((rows @ error.T).square().sum() / (rows @ wide.T).square().sum())
        # Float32 products with H: 256 * 2^-24 relative to sums of magnitudes that are at most some tens of the result.
        assert entry.error_after == pytest.approx(expected, rel=1e-3)
        assert entry.weight_error == pytest.approx(float(error.norm() / wide.norm()), rel=1e-5)
        plain, _ = rtn_planes(weight, spec)
        before = float((rows @ (wide - plain.dequantize().double()).T).square().sum() / (rows @ wide.T).square().sum())
        assert entry.error_before == pytest.approx(before, rel=1e-3)
        assert (entry.name, entry.shape, entry.format, entry.asked, entry.method) == ("layer.w", (16, 256), name, method, method)
        assert (entry.tokens, entry.rank, entry.dead, entry.reason) == (400, 256, 0, "")
        if method == "gptq":
            assert (entry.damping, entry.retries) == (0.01, 0)
        else:
            assert math.isnan(entry.damping)

    @pytest.mark.parametrize("method", list(METHODS))
    def test_rank_is_bounded_by_rows_and_by_live_columns(self, method):
        x = correlated(300, 256)
        x[:, 7] = 0.0
        assert run(method, normal(4, 256), "nvfp4", stats_of(x))[0][1].rank == 255
        assert run(method, normal(4, 256), "nvfp4", stats_of(x[:40]))[0][1].rank == 40
        assert run(method, normal(4, 256), "nvfp4", None)[0][1].rank == 0

    @pytest.mark.parametrize("method", list(METHODS))
    @pytest.mark.parametrize("stats", [None, GramState(width=32)])
    def test_without_rows_the_output_error_is_not_a_number(self, method, stats):
        ((_, entry),) = run(method, normal(4, 32), "nvfp4", stats)
        assert math.isnan(entry.error_after)
        assert math.isnan(entry.error_before)
        assert entry.tokens == 0

    def test_clipped_and_flushed_blocks_are_counted(self):
        """Of three blocks, one has its maximum above 6 scales, one rounds to nothing, one is as it should be."""
        spec = FORMATS["nvfp4"]
        weight = torch.cat([torch.full((1, 16), 7.0), torch.full((1, 16), 1e-3), torch.full((1, 16), 6.0)], 1)
        member = Member.of("w", weight, spec, torch.tensor(448.0 * 6))
        scales = spec.grid.encode(torch.ones(1, 3))
        entry = record(member, assemble(member, scales, weight), None, asked="mse", method="mse")
        assert (entry.clipped, entry.flushed) == (1, 1)

    def test_output_error_by_hand(self):
        x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        stats = stats_of(x)
        # x W' = (3, 8), x E' = (1, 2): 5 / 73.
        assert output_error(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 1.0]]), stats) == pytest.approx(5 / 73)


class TestFallback:
    """What GPTQ cannot do is rounded, and says so."""

    def fell(self, weight: Tensor, stats: GramState | None, reason: str, **options: object) -> None:
        ((tensor, entry),) = run("gptq", weight, "nvfp4", stats, **options)
        assert (entry.asked, entry.method, entry.fell_back) == ("gptq", "rtn", True)
        assert reason in entry.reason
        assert math.isnan(entry.damping)
        expected, _ = rtn_planes(weight, FORMATS["nvfp4"])
        assert torch.equal(tensor.codes, expected.codes)
        assert torch.equal(tensor.scales, expected.scales)

    @pytest.mark.parametrize("stats", [None, GramState(width=128)])
    def test_no_rows(self, stats):
        """CAL-01."""
        self.fell(normal(8, 128), stats, "no calibration rows")

    def test_dead_inputs_only(self):
        self.fell(normal(8, 128), stats_of(torch.zeros(50, 128)), "all its input columns are zero")

    @pytest.mark.parametrize("rows", [20, 127])
    def test_starved_on_request(self, rows):
        self.fell(normal(8, 128), stats_of(correlated(rows, 128)), f"{rows} rows for 128 columns", starved="rtn")
        assert run("gptq", normal(8, 128), "nvfp4", stats_of(correlated(rows, 128)))[0][1].method == "gptq"
        assert run("gptq", normal(8, 128), "nvfp4", stats_of(correlated(128, 128)), starved="rtn")[0][1].method == "gptq"

    @pytest.mark.parametrize("bad", ["indefinite", "nan"])
    def test_a_matrix_without_a_factor(self, bad):
        """CAL-02: still failing after the whole schedule."""
        gram = torch.eye(128, dtype=torch.float64)
        gram[0, 1] = gram[1, 0] = 5.0 if bad == "indefinite" else math.nan
        stats = GramState(width=128, tokens=300, weight=300.0, gram=gram * 300, absolute=torch.ones(128, dtype=torch.float64))
        self.fell(normal(8, 128), stats, "no damping up to 1" if bad == "indefinite" else "NaN or infinity")

    def test_in_a_batch_only_the_one_falls_back(self):
        spec = FORMATS["mxfp4"]
        stats = [stats_of(correlated(300, 128)), None, stats_of(correlated(300, 128, seed=4))]
        groups = [([Member.of(f"e.{number}", normal(8, 128, seed=number), spec)], stats[number]) for number in range(3)]
        batch = METHODS["gptq"].batch
        assert batch is not None
        assert [(entry.name, entry.method) for ((_, entry),) in batch(groups, QuantizerOptions())] == [
            ("e.0", "gptq"),
            ("e.1", "rtn"),
            ("e.2", "gptq"),
        ]
        assert batch([], QuantizerOptions()) == []


class TestSingular:
    """CAL-02 through the quantizer: 32 tokens of 128 features; column 17 zero, column 18 all 1e-25, columns 40 and 41 the same."""

    def inputs(self, case: str, rows: int) -> Tensor:
        x = correlated(rows, 128)
        if case in ("b", "bcd"):
            x[:, 17] = 0.0
        if case in ("c", "bcd"):
            x[:, 18] = 1e-25
        if case in ("d", "bcd"):
            x[:, 41] = x[:, 40]
        return x

    @pytest.mark.parametrize("case", ["a", "b", "c", "d", "bcd"])
    @pytest.mark.parametrize("damping", [0.0, 0.01])
    @pytest.mark.parametrize("rows", [32, 400])
    @pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "int4-g64"])
    def test_every_case_is_finite_and_on_the_record(self, case, damping, rows, name):
        ((tensor, entry),) = run("gptq", normal(16, 128), name, stats_of(self.inputs(case, rows)), damping=damping)
        tensor.validate()
        assert bool(torch.isfinite(tensor.dequantize()).all())
        assert entry.method == "gptq"
        assert entry.dead == {"b": 1, "c": 1, "bcd": 2}.get(case, 0)
        assert entry.rank == min(rows, 128 - entry.dead)
        # Two equal columns alone may pass undamped: their float32 products can differ in the last bit.
        assert entry.retries > 0 if damping == 0.0 and rows == 32 else entry.retries == 0 or "d" in case
        assert entry.damping > 0.0 if entry.retries else entry.damping == damping
        assert entry.error_after <= entry.error_before

    @pytest.mark.parametrize("scales", ["amax", "hessian"])
    @pytest.mark.parametrize("refine", [0, 3])
    @pytest.mark.parametrize("act_order", [False, True])
    @pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "int4-g32"])
    def test_dead_columns_never_influence_the_others(self, scales, refine, act_order, name):
        """The same weight with other numbers in the dead columns, and with none, gives the same scales and the same codes everywhere else.

        A live column of each block holds the block's maximum: which scales exist at all is decided by that (its own maximum is a block's property).
        """
        spec, stats = FORMATS[name], stats_of(self.inputs("bcd", 400))
        weight = normal(32, 128).clamp(-3, 3)
        weight.view(32, -1, spec.block)[:, :, -1] = 4.0
        live = torch.tensor([column for column in range(128) if column not in (17, 18)])
        found = []
        for dead in (weight[:, 17:19], normal(32, 2, seed=9).clamp(-3, 3), torch.zeros(32, 2)):
            given = weight.clone()
            given[:, 17:19] = dead
            ((tensor, _),) = run("gptq", given, name, stats, scales=scales, refine=refine, act_order=act_order)
            found.append((tensor.scales, tensor.dequantize()[:, live]))
            # "Rounded as they are": under the scale that its block got.
            step = (spec.grid.decode(tensor.scales) * tensor.tensor_scale).repeat_interleave(spec.block, -1)[:, 17:19]
            nearest = spec.codes.decode(spec.codes.round_to_codes(dead / step)) * step
            torch.testing.assert_close(tensor.dequantize()[:, 17:19], nearest, rtol=2.0**-22, atol=0)
        for other in found[1:]:
            assert torch.equal(found[0][0], other[0])
            assert torch.equal(found[0][1], other[1])

    def test_a_block_of_dead_columns_is_fitted_to_its_weights(self):
        """The scale of a block that no input reaches is that of the smallest weight error, not the largest of the candidates."""
        x = correlated(400, 128)
        x[:, :16] = 0.0
        weight = normal(32, 128)
        ((tensor, _),) = run("gptq", weight, "nvfp4", stats_of(x), refine=0)
        ((expected, _),) = run("mse", weight, "nvfp4", None)
        assert torch.equal(tensor.scales[:, 0], expected.scales[:, 0])
        assert torch.equal(tensor.dequantize()[:, :16], expected.dequantize()[:, :16])


def outcome(method: str, name: str, **options: object) -> bytes:
    """Planes of a fixed case as bytes, of AWQ its factors: 256 correlated columns, enough rows for all but the option `starved`."""
    rows = 60 if "starved" in options else 400
    if choose := METHODS[method].choose:
        # Outlier channels, one in most blocks, with small weights: what AWQ is for.
        outlier = torch.arange(256) % 37 == 0
        members = [Member.of("w", normal(16, 256) * torch.where(outlier, 0.1, 1.0), FORMATS[name])]
        stats = stats_of(normal(rows, 256, seed=2) * torch.where(outlier, 40.0, 1.0))
        choice = choose(lambda: [(members, stats)], torch.arange(256), QuantizerOptions(scales="amax", **options))  # type: ignore[arg-type]
        assert choice.channels is not None
        return choice.channels.numpy().tobytes()
    ((tensor, _),) = run(method, normal(16, 256), name, stats_of(correlated(rows, 256)), **options)
    return tensor.codes.numpy().tobytes() + tensor.scales.numpy().tobytes()


OPTIONS: dict[str, tuple[str, str, tuple[object, ...]]] = {
    # field: (method, format, values that must all give different planes)
    "scale_rule": ("rtn", "mxfp4", (None, "floor", "ceil")),
    "scales": ("gptq", "nvfp4", ("amax", "mse", "hessian")),
    "refine": ("gptq", "nvfp4", (0, 1, 2)),
    "damping": ("gptq", "nvfp4", (0.0, 0.01, 1.0)),
    "act_order": ("gptq", "nvfp4", (False, True)),
    "starved": ("gptq", "nvfp4", ("damp", "rtn")),
    "awq_grid": ("awq", "nvfp4", (2, 20)),
    "awq_block_constant": ("awq", "nvfp4", (False, True)),
}


class TestOptions:
    @pytest.mark.parametrize("field", list(QuantizerOptions.model_fields))
    def test_every_option_changes_a_result(self, field):
        """CAL-01: an option that was accepted and wired to nothing."""
        method, name, values = OPTIONS[field]
        assert len({outcome(method, name, **{field: value}) for value in values}) == len(values)

    @pytest.mark.parametrize("method", ["rtn", "gptq"])
    def test_the_scale_rule_reaches_every_method_that_takes_the_maximum(self, method):
        assert outcome(method, "mxfp4", scales="amax") != outcome(method, "mxfp4", scales="amax", scale_rule="ceil")

    def test_unknown_rules_and_values_are_refused(self):
        with pytest.raises(UnknownName, match="known: nearest"):
            outcome("rtn", "nvfp4", scale_rule="floor")
        for values in ({"damping": -0.1}, {"refine": -1}, {"scales": "best"}, {"starved": "drop"}, {"groups": 3}):
            with pytest.raises(ConfigError):
                QuantizerOptions.load(values)

    def test_methods_say_whether_they_need_rows(self):
        assert {name: METHODS[name].needs_stats for name in METHODS} == {"rtn": False, "mse": False, "awq": True, "gptq": True}
        with pytest.raises(UnknownName, match="did you mean 'gptq'"):
            METHODS["gptr"]

    def test_amax_scales_are_those_of_the_maximum(self):
        spec, weight = FORMATS["nvfp4"], normal(4, 32)
        expected, _ = rtn_planes(weight, spec)
        assert torch.equal(amax_scales(Member.of("w", weight, spec), QuantizerOptions()), expected.scales)
