"""prism_ray.adapters.fixed_point: the exact search and its verdicts against brute force in numpy, the fixed rules by hand, ties."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model

from prism_ray.adapters import fixed_point
from prism_ray.adapters.fixed_point import (
    NO,
    SEARCH,
    TIED,
    UNIQUE,
    Blocks,
    blocks_of,
    ceiling_bytes,
    legal_scales,
    nearest_values,
    rule_test,
    rules_of,
    search,
    search_test,
)
from prism_ray.core.errors import FormatError, UnknownName
from prism_ray.formats.spec import FORMATS, FP4_FORMATS
from prism_ray.formats.tensor import QuantTensor
from prism_ray.models.tiny import tiny_llama
from prism_ray.quantizers.rtn import rtn
from prism_ray.quantizers.scales import search_scales

LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def brute(weight: np.ndarray, base: np.ndarray, spec, factor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(smallest cost [N], verdict [N]) over every legal byte and every level, without the window, the nearest-level search or the margins of the code.

    Costs are float64 sums: exact where weights are small dyadic numbers and the tensor scale is 1, as in the tests that compare verdicts of ties.
    """
    costs, verdicts = [], []
    _, scales = legal_scales(spec)
    for w, q0, t in zip(weight.astype(np.float64), base.astype(np.float64), factor, strict=True):
        own = ((w - q0) ** 2).sum()
        best, tied = math.inf, False
        for scale in scales.numpy():
            # Multiplied in float32 in the order of QuantTensor.dequantize; E8M0's largest scales overflow there.
            with np.errstate(over="ignore"):
                level = ((LEVELS.astype(np.float32) * np.float32(scale)) * np.float32(t)).astype(np.float64)
            signed = np.concatenate([level, -level])
            errors = (w[:, None] - signed[None, :]) ** 2
            least = errors.min(1)
            cost = least.sum()
            best = min(best, cost)
            if cost == own:
                choices = [np.unique(signed[errors[i] == least[i]] + 0.0) for i in range(len(w))]
                tied |= any(len(choice) > 1 or choice[0] != q0[i] for i, choice in enumerate(choices))
        costs.append(best)
        verdicts.append(NO if best < own else TIED if tied else UNIQUE)
    return np.array(costs), np.array(verdicts)


def base_of(name: str, seed: int, rows: int = 4, columns: int = 64, spread: float = 0.02) -> QuantTensor:
    generator = torch.Generator().manual_seed(seed)
    return rtn(torch.randn(rows, columns, generator=generator) * spread, FORMATS[name])[0]


def mx_block(values: list[float]) -> torch.Tensor:
    """One MXFP4 block [1, 32] that begins with `values`."""
    return torch.tensor([values + [0.0] * (32 - len(values))])


def judged(base: torch.Tensor, weight: torch.Tensor, byte: int = 127) -> Blocks:
    """Blocks of MXFP4 under scale 1."""
    count = len(base)
    scales = torch.full((count,), byte, dtype=torch.uint8)
    return Blocks(base=base, adapted=weight, scales=scales, factor=torch.ones(count), spec=FORMATS["mxfp4"])


@settings(max_examples=25, deadline=None)
@given(name=st.sampled_from(FP4_FORMATS), seed=st.integers(0, 1 << 30), size=st.floats(0, 0.4), power=st.integers(-60, 60))
def test_the_search_is_the_brute_force_minimum(name, seed, size, power):
    generator = torch.Generator().manual_seed(seed)
    base = base_of(name, seed, rows=1, columns=64, spread=2.0**power)
    weight = base.dequantize()
    blocks = blocks_of(base, torch.randn(weight.shape, generator=generator) * weight.std() * size)
    found = search(blocks.adapted, blocks.factor, blocks.spec, blocks.base)
    cost, verdict = brute(blocks.adapted.numpy(), blocks.base.numpy(), blocks.spec, blocks.factor.numpy())
    # Both costs are float64 sums of B squares: each errs by at most (B + 2) 2^-53 of itself.
    np.testing.assert_allclose(found.cost.numpy(), cost, rtol=(blocks.spec.block + 2) * 2.0**-52)
    assert found.base is not None and found.base.tolist() == verdict.tolist()
    # What is reported is reachable: values under the reported byte cost the reported cost.
    scale = blocks.spec.grid.decode(found.scales)
    assert torch.equal(nearest_values(blocks.adapted, scale, blocks.factor), found.values)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 30), name=st.sampled_from(FP4_FORMATS))
def test_verdicts_of_exact_ties(seed, name):
    """Corrections that are whole eighths under a tensor scale of 1: midpoints and equal costs are common and float64 sums exact."""
    generator = torch.Generator().manual_seed(seed)
    spec = FORMATS[name]
    codes = torch.randint(0, 16, (3, spec.block), generator=generator)
    base = spec.codes.decode(codes.to(torch.uint8))
    moves = torch.randint(-4, 5, base.shape, generator=generator) * (torch.rand(base.shape, generator=generator) < 0.2)
    weight = base + moves / 8
    factor = torch.ones(3)
    found = search(weight, factor, spec, base)
    _, verdict = brute(weight.numpy(), base.numpy(), spec, factor.numpy())
    assert found.base is not None and found.base.tolist() == verdict.tolist()


@pytest.mark.parametrize(("move", "verdict"), [(0.25, TIED), (0.25 - 2**-20, UNIQUE), (0.25 + 2**-20, NO), (0.0, UNIQUE)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_weight_between_two_codes_is_a_tie(move, verdict, sign):
    """1.25 lies exactly between the codes 1 and 1.5; 6 with 0.5 beside it has no other scale."""
    base = sign * mx_block([6.0, 1.0, 0.5])
    found = search_test(judged(base, base + sign * mx_block([0.0, move])))
    assert (found.returned, found.tied) == (int(verdict != NO), int(verdict == TIED))


@pytest.mark.parametrize("move", [-0.25, 0.25])
def test_a_tie_is_seen_from_both_of_its_sides(move):
    base = mx_block([6.0, 1.5 if move < 0 else 1.0, 0.5])
    assert search_test(judged(base, base + mx_block([0.0, move]))).tied == 1


def test_two_bytes_of_one_weight_are_one_weight():
    """6, 3, 1 under scale 1 is 3, 1.5, 0.5 under scale 2: the ceiling rule stores another byte and gives the base back."""
    base = mx_block([6.0, 3.0, 1.0])
    result = rule_test(judged(base, base + mx_block([0.125])), "ceiling")
    assert (result.returned, result.same_scale) == (1, 0)
    found = search_test(judged(base, base + mx_block([0.125])))
    assert (found.returned, found.tied, found.same_scale) == (1, 0, 0)


def test_the_ceiling_rule_moves_a_block_that_its_maximum_outgrows():
    """0.5 under scale 2 is a quarter, a tie that goes to 0: the bump loses it. Worked by hand: w = (6.125, 0.5) -> (6, 0)."""
    base = mx_block([6.0, 0.5])
    blocks = judged(base, base + mx_block([0.125]))
    bumped, kept = rule_test(blocks, "ceiling"), rule_test(blocks, "even")
    assert (bumped.returned, kept.returned) == (0, 1)
    assert bumped.moved == 0.0 and bumped.wanted == 0.125**2
    assert bumped.lost == 0.125**2 + 0.25
    assert bumped.missed == math.sqrt(0.125**2 + 0.25) / 0.125 and kept.missed == 1.0
    assert rule_test(judged(base, base - mx_block([0.125])), "ceiling").returned == 1


@pytest.mark.parametrize("name", FP4_FORMATS)
def test_without_a_correction_the_base_is_unique_and_the_rules_return_it(name):
    base = base_of(name, 3, rows=16, columns=256)
    blocks = blocks_of(base, torch.zeros(base.shape))
    found = search_test(blocks)
    assert (found.test, found.returned, found.tied, found.blocks) == (SEARCH, found.blocks, 0, base.scales.numel())
    assert math.isnan(found.kept) and math.isnan(found.missed)
    rule = {"nvfp4": "amax/6", "mxfp4": "even"}[name]
    assert rule_test(blocks, rule).returned == found.blocks
    assert rule_test(blocks, rule).same_scale == found.blocks
    assert rule_test(blocks, "ceiling").returned == found.blocks


@pytest.mark.parametrize("name", FP4_FORMATS)
def test_the_search_costs_no_more_than_the_quantizers_own(name):
    base = base_of(name, 5, rows=8, columns=128)
    delta = torch.randn(base.shape, generator=torch.Generator().manual_seed(1)) * 0.003
    blocks = blocks_of(base, delta)
    data = search_scales(base.dequantize() + delta, base.format, base.tensor_scale, base.format.amax_rule)
    other = nearest_values(blocks.adapted, base.format.grid.decode(data).flatten(), blocks.factor)
    cost = search(blocks.adapted, blocks.factor, blocks.spec).cost
    assert bool((cost <= fixed_point.squared_error(blocks.adapted, other)).all())
    assert bool((cost < fixed_point.squared_error(blocks.adapted, other)).any()) == (name == "nvfp4")


def test_the_ceiling_is_the_ocp_ceil_rule_on_e8m0():
    spec = FORMATS["mxfp4"]
    amax = torch.cat([torch.tensor([0.0, 2.0**-140, 4.0, 6.0, 6.5, 7.0, 3e38]), torch.logspace(-38, 38, 2000)])
    assert torch.equal(ceiling_bytes(amax, torch.ones_like(amax), spec), spec.grid.encode_amax(amax, "ceil", 6.0))


@settings(max_examples=50, deadline=None)
@given(amax=st.floats(0, 1e4, width=32), factor=st.floats(2**-20, 4, width=32))
def test_the_ceiling_is_the_smallest_scale_that_does_not_clip_on_e4m3(amax, factor):
    spec = FORMATS["nvfp4"]
    data, values = legal_scales(spec)
    byte = ceiling_bytes(torch.tensor([amax]), torch.tensor([factor]), spec)
    reach = values * 6 * torch.tensor(factor)
    fits = (reach >= amax).nonzero().flatten()
    assert int(byte) == int(data[int(fits[0])] if len(fits) else data[-1])


@pytest.mark.parametrize("name", FP4_FORMATS)
def test_blocks_that_are_zero_or_far_below_the_grid(name):
    base = base_of(name, 0, rows=2, columns=64)
    codes = torch.zeros_like(base.codes)
    zero = QuantTensor(codes=codes, scales=base.scales, tensor_scale=base.tensor_scale, format=base.format)
    nothing = search_test(blocks_of(zero, torch.zeros(zero.shape)))
    assert (nothing.returned, nothing.tied) == (nothing.blocks, 0)
    tiny = search_test(blocks_of(zero, torch.full(zero.shape, 1e-30)))
    # NVFP4 has no scale that small, so zero is the best there is; E8M0 reaches it.
    assert tiny.returned == (tiny.blocks if name == "nvfp4" else 0)


@pytest.mark.parametrize("name", FP4_FORMATS)
def test_sums_over_parts_and_experts_are_those_of_the_whole(name):
    experts = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(2)) * torch.tensor([1.0, 0.01]).view(2, 1, 1)
    base = rtn(experts, FORMATS[name])[0]
    delta = torch.randn(base.shape, generator=torch.Generator().manual_seed(3)) * experts.std(dim=(1, 2), keepdim=True) * 0.05
    count = base.scales.numel()
    whole = search_test(blocks_of(base, delta))
    halves = [search_test(blocks_of(base, delta, index)) for index in torch.arange(count).chunk(3)]
    total = halves[0] + halves[1] + halves[2]
    for key in ("blocks", "returned", "same_scale", "tied"):
        assert getattr(total, key) == getattr(whole, key)
    assert 0 < whole.returned < whole.blocks
    # Sums of the same float64 terms in another order, all of one sign in `wanted`.
    assert total.wanted == pytest.approx(whole.wanted, rel=1e-12) and total.kept == pytest.approx(whole.kept, abs=1e-9)
    alone = [search_test(blocks_of(base[expert], delta[expert])) for expert in range(2)]
    assert (alone[0] + alone[1]).returned == whole.returned
    assert whole.share.low <= whole.share.value <= whole.share.high


def test_pieces_do_not_change_the_result(monkeypatch):
    base = base_of("nvfp4", 7, rows=6, columns=96)
    blocks = blocks_of(base, torch.randn(base.shape, generator=torch.Generator().manual_seed(0)) * 0.002)
    whole = search(blocks.adapted, blocks.factor, blocks.spec, blocks.base)
    monkeypatch.setattr(fixed_point, "PIECE", 16 * 5)
    cut = search(blocks.adapted, blocks.factor, blocks.spec, blocks.base)
    for key in ("scales", "values", "cost", "base"):
        assert torch.equal(getattr(whole, key), getattr(cut, key))


def test_a_large_correction_is_kept_and_a_small_one_is_not():
    base = base_of("nvfp4", 1, rows=32, columns=256)
    delta = torch.randn(base.shape, generator=torch.Generator().manual_seed(0)) * 0.02
    small, large = (search_test(blocks_of(base, delta * size)) for size in (1e-3, 1.0))
    assert small.share.value == 1.0 and small.kept == 0.0 and small.missed == 1.0
    assert large.share.value < 0.01 and large.kept == pytest.approx(1.0, abs=0.05) and large.missed < 0.2


def test_the_scalar_derived_again_returns_no_block_exactly():
    base = base_of("nvfp4", 1)
    blocks = blocks_of(base, torch.zeros(base.shape))
    assert rule_test(blocks, "amax/6", blocks.factor * 1.01).returned == 0
    assert rule_test(blocks, "amax/6", blocks.factor).returned == blocks.scales.numel()


def test_refusals():
    integer = rtn(torch.randn(2, 64), FORMATS["int4-g64"])[0]
    with pytest.raises(FormatError, match="int4-g64"):
        blocks_of(integer, torch.zeros(2, 64))
    base = base_of("nvfp4", 0)
    with pytest.raises(FormatError, match="shape"):
        blocks_of(base, torch.zeros(1, 64))
    with pytest.raises(FormatError, match="NaN"):
        blocks_of(base, torch.full(base.shape, math.nan))
    with pytest.raises(UnknownName, match="floor"):
        rule_test(blocks_of(base, torch.zeros(base.shape)), "floor")
    assert rules_of(FORMATS["nvfp4"]) == ["amax/6", "ceiling"] and rules_of(FORMATS["mxfp4"]) == ["amax/6", "ceiling", "even", "floor"]


# --- jobs/reproduce/why_naive_merges.py ---


@pytest.fixture(scope="module")
def job():
    """jobs/reproduce/why_naive_merges.py, which is no package."""
    path = Path(__file__).resolve().parents[2] / "jobs" / "reproduce" / "why_naive_merges.py"
    spec = importlib.util.spec_from_file_location("why_naive_merges", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("rslora", [False, True])
def test_the_job_reads_the_update_that_peft_would_merge(job, tmp_path, rslora):
    model = get_peft_model(
        tiny_llama(), LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"], init_lora_weights=False, use_rslora=rslora)
    )
    model.save_pretrained(tmp_path)
    layer = model.get_base_model().model.layers[1].self_attn.q_proj
    base = rtn(layer.base_layer.weight.detach(), FORMATS["nvfp4"])[0]
    update = job.trained_update(tmp_path)
    # Products of rank 4 in float32, in another order of the scaling.
    torch.testing.assert_close(update("model.layers.1.self_attn.q_proj", base), layer.get_delta_weight("default"), rtol=1e-5, atol=1e-8)
    assert update("model.layers.1.self_attn.k_proj", base) is None


def test_the_job_draws_every_block_at_most_once_and_scales_its_update(job):
    layers = {"a": base_of("nvfp4", 0), "b": base_of("nvfp4", 1, rows=2)}
    counts = {name: tensor.scales.numel() for name, tensor in layers.items()}
    found = dict(job.drawn(layers, 10, 0))
    assert sum(len(index) for index in found.values()) == 10
    assert all(len(set(index.tolist())) == len(index) and int(index.max()) < counts[name] for name, index in found.items())
    every = dict(job.drawn(layers, 10**6, 0))
    assert {name: index.tolist() for name, index in every.items()} == {name: list(range(count)) for name, count in counts.items()}
    delta = job.random_update(0.02, 3, 0)("a", layers["a"])
    assert float(delta.norm() / layers["a"].dequantize().norm()) == pytest.approx(0.02, rel=1e-5)
    assert int(torch.linalg.matrix_rank(delta, rtol=1e-4)) == 3
    results = job.measure(layers, job.random_update(1e-4, 3, 0), 10**6, 0)
    assert results[SEARCH].blocks == sum(counts.values()) and results[SEARCH].share.value == 1.0
    assert set(results) == {SEARCH, "amax/6", "ceiling", job.AGAIN}
