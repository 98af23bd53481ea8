"""The arithmetic of the baselines: fake quantization against the format's own rounding, forward and gradients against float64 autograd.

Tolerances: a chain of n float32 roundings of unit u = 2^-24 is off by at most about n u times the sum of the absolute values of its terms, computed beside
the value (Higham, "Accuracy and Stability", 3.1); n = the lengths of all sums of the chain, plus 8 for the single operations.
"""

from __future__ import annotations

import pytest
import torch

from prism_ray.adapters.baselines import PeqaBlockConfig, PeqaConfig, QatLoraConfig, fake_quant
from prism_ray.adapters.baselines.fake_quant import fake_quantize, requantized, round_e2m1_
from prism_ray.adapters.baselines.rules import Peqa, PeqaBlock, QatLora
from prism_ray.core.errors import ConfigError, FormatError
from prism_ray.formats import e2m1
from prism_ray.formats.modules import FP4Linear
from prism_ray.formats.spec import FORMATS, FP4_FORMATS
from prism_ray.formats.tensor import QuantTensor
from prism_ray.quantizers.rtn import rtn

OUT, IN, RANK, TOKENS, SCALING = 24, 64, 3, 6, 1.5
both = pytest.mark.parametrize("name", FP4_FORMATS)


def draw(*shape: int, seed: int, std: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std


def original() -> torch.Tensor:
    weight = draw(OUT, IN, seed=0, std=0.2)
    weight[0, :32] = 0  # a zero scale on E4M3, which no factor may revive
    return weight


def linear(name: str) -> FP4Linear:
    # A tensor scale with room above the weight's own maximum, so that W + BA does not meet the ceiling.
    return FP4Linear(rtn(original(), FORMATS[name], amax=original().abs().max() * 4)[0])


def factors(seed: int = 1, std: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiples of 1/64: every product and sum of B A is exact, in any order."""
    return tuple((draw(*shape, seed=seed + i, std=std) * 64).round() / 64 for i, shape in enumerate(((RANK, IN), (OUT, RANK))))  # type: ignore[return-value]


def test_the_rounding_is_the_formats_own():
    """Every tie, both sides of it, zeros, subnormals and numbers far outside."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0])
    near = torch.cat([ties, torch.nextafter(ties, torch.tensor(0.0)), torch.nextafter(ties, torch.tensor(9.0))])
    x = torch.cat([torch.linspace(-9, 9, 100001), near, -near, torch.tensor([0.0, -0.0, 1e-40, -1e-30, 1e30, 448.0])])
    assert torch.equal(round_e2m1_(x.clone()), e2m1.decode(e2m1.round_to_codes(x)))
    assert torch.isnan(round_e2m1_(torch.tensor([torch.nan, torch.inf, -torch.inf]))).all()


@both
def test_it_is_rounding_to_nearest_of_the_sum_to_the_byte(name):
    planes, (a, b) = linear(name), factors()
    weight = planes.dequantize(torch.float32).addmm_(b, a, alpha=SCALING)
    expected, _ = rtn(weight, FORMATS[name], amax=original().abs().max() * 4)
    assert torch.equal(expected.tensor_scale, planes.tensor_scale)
    codes, scales = requantized(planes, a, b, SCALING)
    assert torch.equal(codes, expected.codes) and torch.equal(scales, expected.scales)
    assert not torch.equal(codes, planes.codes) and not torch.equal(scales, planes.scales)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_forward_weight_is_what_the_written_planes_mean(name, dtype, monkeypatch):
    planes = linear(name)
    a, b = draw(RANK, IN, seed=3, std=0.3), draw(OUT, RANK, seed=4, std=0.3)
    codes, scales = requantized(planes, a, b, SCALING)
    written = QuantTensor(codes=codes, scales=scales, tensor_scale=planes.tensor_scale, format=planes.format)
    assert torch.equal(fake_quantize(planes, a, b, SCALING, dtype), written.dequantize(dtype))
    exact_a, exact_b = factors()
    whole = fake_quantize(planes, exact_a, exact_b, SCALING, dtype)
    monkeypatch.setattr(fake_quant, "PIECE", 5 * IN)  # 24 rows in pieces of 5
    assert torch.equal(fake_quantize(planes, exact_a, exact_b, SCALING, dtype), whole)


@both
def test_without_an_update_it_is_the_base(name):
    """Rounding to nearest leaves 6 (5.6 to 6.4 rounded) or, on E8M0, 4 or 6 as a block's largest code: the rule finds the same scale again."""
    planes = linear(name)
    zeros = torch.zeros(OUT, RANK)
    assert torch.equal(fake_quantize(planes, draw(RANK, IN, seed=3), zeros, 1.0, torch.float32), planes.dequantize(torch.float32))


def test_other_scale_rules_are_those_of_the_grid():
    planes, (a, b) = linear("mxfp4"), factors(std=0.4)
    weight = planes.dequantize(torch.float32).addmm_(b, a, alpha=SCALING)
    for rule in ("floor", "ceil"):
        expected, _ = rtn(weight, FORMATS["mxfp4"], scale_rule=rule)
        assert torch.equal(requantized(planes, a, b, SCALING, rule)[1], expected.scales), rule
    # A grid without the rule uses its format's; a name that no grid has is refused.
    assert torch.equal(requantized(linear("nvfp4"), a, b, SCALING, "floor")[1], requantized(linear("nvfp4"), a, b, SCALING)[1])
    with pytest.raises(ConfigError, match="round"):
        QatLoraConfig(scale_rule="round")


def test_nan_factors_are_seen():
    planes, (a, b) = linear("nvfp4"), factors()
    b[3, 0] = torch.nan
    assert torch.isnan(fake_quantize(planes, a, b, SCALING, torch.float32)[3]).any()
    with pytest.raises(FormatError):
        requantized(planes, a, b, SCALING)


# --- gradients -----------------------------------------------------------------------------------------------------------------------

CONFIGS = {"qat": QatLoraConfig(r=RANK, alpha=SCALING * RANK), "peqa": PeqaConfig(), "block": PeqaBlockConfig()}
RULES = {"qat": QatLora, "peqa": Peqa, "block": PeqaBlock}


def trained(kind: str, planes: FP4Linear) -> tuple[torch.Tensor, ...]:
    groups = planes.scales.shape[-1]
    shapes = {"qat": ((RANK, IN), (OUT, RANK)), "peqa": ((OUT,),), "block": ((OUT, groups),)}[kind]
    return tuple(draw(*shape, seed=10 + i, std=0.3).requires_grad_() for i, shape in enumerate(shapes))


def reference_weight(kind: str, planes: FP4Linear, parameters: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """W' in float64, differentiable; QAT straight through its quantizer, whose value is taken as it is."""
    base = planes.dequantize(torch.float32).to(torch.float64)
    if kind == "qat":
        a, b = parameters
        full = base + SCALING * b @ a
        value = fake_quantize(planes, a.detach().float(), b.detach().float(), SCALING, torch.float32).to(torch.float64)
        return full + (value - full).detach()
    (delta,) = parameters
    return base * (1 + (delta[:, None] if kind == "peqa" else delta.repeat_interleave(planes.format.block, -1)))


@both
@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_forward_and_gradients_are_those_of_float64_autograd(name, kind, dtype):
    """bfloat16: sums are accumulated in float32 and only stored in bfloat16, so n counts stored intermediates: weight, factors, products, results."""
    planes, rule = linear(name), RULES[kind].of(CONFIGS[kind])
    parameters = trained(kind, planes)
    x, grad_y = draw(2, TOKENS // 2, IN, seed=20).to(dtype).requires_grad_(), draw(2, TOKENS // 2, OUT, seed=21).to(dtype)
    y = rule.multiply(x, planes, parameters)
    y.backward(grad_y)
    x64 = x.detach().double().requires_grad_()
    held = tuple(p.detach().double().requires_grad_() for p in parameters)
    weight = reference_weight(kind, planes, held)
    expected = x64 @ weight.T
    expected.backward(grad_y.double())

    w, xs, gs = weight.detach().abs(), x64.detach().abs().flatten(0, 1), grad_y.double().abs().flatten(0, 1)
    unit = 2.0**-24 if dtype == torch.float32 else 2.0**-8
    outer = gs.T @ xs
    base = planes.dequantize(torch.float32).double().abs()
    if kind == "qat":
        a, b = (p.detach().abs() for p in held)
        bounds = (SCALING * b.T @ outer, SCALING * outer @ a.T)
    elif kind == "peqa":
        bounds = ((outer * base).sum(-1),)
    else:
        bounds = ((outer * base).view(OUT, -1, planes.format.block).sum(-1),)
    pairs = [(y, expected, (xs @ w.T).view_as(expected), IN), (x.grad, x64.grad, (gs @ w).view_as(x64), OUT)]
    pairs += [(p.grad, q.grad, bound, TOKENS + IN + OUT) for p, q, bound in zip(parameters, held, bounds, strict=True)]
    for found, wanted, bound, length in pairs:
        assert found is not None and wanted is not None
        assert wanted.abs().max() > 0
        roundings = length + RANK + 8 if dtype == torch.float32 else 5
        assert ((found.double() - wanted).abs() <= roundings * unit * bound + 1e-30).all()


@both
@pytest.mark.parametrize("kind", ["peqa", "block"])
def test_gradients_are_slopes(name, kind):
    """The output is linear in d, so a difference quotient in float64 is exact but for the float32 of the two weights: 2^-23 |W| |x| |dy| / 2h."""
    planes, rule = linear(name), RULES[kind].of(CONFIGS[kind])
    (delta,) = trained(kind, planes)
    x, grad_y = draw(TOKENS, IN, seed=20), draw(TOKENS, OUT, seed=21)
    (rule.multiply(x, planes, (delta,)) * grad_y).sum().backward()
    flat, h = delta.detach().flatten(), 0.25
    for place in range(0, flat.numel(), max(1, flat.numel() // 7)):
        values = []
        for sign in (1, -1):
            moved = flat.clone()
            moved[place] += sign * h
            weight = rule.weight(planes, (moved.view_as(delta),), torch.float32).double()
            values.append(float(((x.double() @ weight.T) * grad_y).sum()))
        bound = float((grad_y.double().abs().T @ x.double().abs() * planes.dequantize(torch.float32).double().abs() * 2).sum())
        assert abs((values[0] - values[1]) / (2 * h) - float(delta.grad.flatten()[place])) <= (TOKENS + IN + 16) * 2.0**-23 * bound / (
            2 * h
        )


@both
@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_forward_multiplies_by_is_the_weight(name, kind, dtype):
    planes, rule = linear(name), RULES[kind].of(CONFIGS[kind])
    parameters = trained(kind, planes)
    x = torch.eye(IN).to(dtype)
    y = rule.multiply(x, planes, parameters)
    assert y.dtype == dtype
    weight = rule.weight(planes, parameters, dtype)
    if (
        kind == "peqa" and dtype == torch.bfloat16
    ):  # the row factor multiplies a product that was rounded to bfloat16 before: two roundings of 2^-9
        assert ((y.T - weight).abs() <= 2.0**-7 * weight.abs()).all()
    else:
        assert torch.equal(y.T, weight)


@both
def test_frozen_codes_and_scales_that_stay_legal(name):
    planes = linear(name)
    grid = planes.format.grid
    wild = torch.full((OUT, planes.scales.shape[-1]), -3.0)
    wild[1] = 1e38
    for rule, delta in ((PeqaBlock(), wild), (Peqa(), wild[:, 0])):
        codes, scales = rule.planes(planes, (delta,))
        assert codes.data_ptr() == planes.codes.data_ptr()
        assert not grid.illegal(scales).any()
        zero = grid.decode(planes.scales) == 0
        assert (grid.decode(scales)[zero] == 0).all() and (grid.decode(scales)[~zero] >= grid.smallest).all()
    # No change is no change, and a factor of the grid is exact: 2 on both grids.
    assert torch.equal(Peqa().planes(planes, (torch.zeros(OUT),))[1], planes.scales)
    doubled = grid.decode(Peqa().planes(planes, (torch.ones(OUT),))[1])
    assert torch.equal(doubled, (grid.decode(planes.scales) * 2).clamp(max=grid.largest))


def test_a_rank_above_the_layer_is_refused():
    with pytest.raises(ConfigError, match="rank 30"):
        QatLora(r=30, scaling=1.0).initial(OUT, IN, 4, (), torch.device("cpu"), "q_proj")
    for bad in ({"r": 0}, {"r": True}, {"alpha": float("nan")}):
        with pytest.raises(ConfigError):
            QatLoraConfig(**bad)
