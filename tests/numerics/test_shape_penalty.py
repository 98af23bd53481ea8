"""shape_penalty against float64 autograd of 1 - Omega, whole and spread over workers whose surrogate gradients must add up.

Tolerance: the surrogate is float32. d/dz = -z_0 / D + (a / (D b)) z with D = N_0 sqrt(b): coefficients from float64 sums, rounded once (u = 2^-24), one
product and one addition each: 4 u (|z_0| / D + |a| |z| / (D b)) per element. The two terms nearly cancel when z ~ z_0, hence absolute, not relative.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from prism_ray.risk.shape import delta_rho, omega, shape_penalty

U = 2.0**-24
N, D = 48, 32


def features(noise: float, seed: int = 0, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(N, D, generator=generator)
    return base, (scale * (base + noise * torch.randn(N, D, generator=generator))).requires_grad_()


def reference(base: torch.Tensor, now: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(1 - Omega, its gradient, allowed error of the gradient), float64."""
    z0, z = base.double(), now.detach().double().requires_grad_()
    value = 1 - (z0 * z).sum() / (z0.norm() * z.norm())
    (gradient,) = torch.autograd.grad(value, z)
    a, b = float((z0 * z.detach()).sum()), float(z.detach().square().sum())
    denominator = float(z0.norm()) * math.sqrt(b)
    allowed = 4 * U * (z0.abs() / denominator + abs(a) * z.detach().abs() / (denominator * b))
    return value.detach(), gradient, allowed


cases = pytest.mark.parametrize(("noise", "scale"), [(2.0, 1.0), (0.3, 1.0), (0.3, 1.7), (1e-3, 1.0), (0.3, 1e-4)])


def spread(base: torch.Tensor, now: torch.Tensor, edges: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Gradient of the sum of the workers' surrogates, and each worker's sums: every worker reduces what all have handed in."""
    pieces = [(base[start:end], now[start:end]) for start, end in itertools.pairwise(edges)]
    handed: list[torch.Tensor] = []
    for base_part, now_part in pieces:
        shape_penalty(base_part, now_part, lambda sums: handed.append(sums.clone()) or sums)
    total = torch.stack(handed).sum(0)
    results = [shape_penalty(base_part, now_part, lambda _: total) for base_part, now_part in pieces]
    gradient = torch.zeros_like(now)
    for surrogate, _ in results:
        (part,) = torch.autograd.grad(surrogate, now)
        gradient += part
    return gradient, [sums for _, sums in results]


@cases
def test_value_and_gradient_of_one_worker(noise, scale):
    base, now = features(noise, scale=scale)
    surrogate, sums = shape_penalty(base, now)
    (gradient,) = torch.autograd.grad(surrogate, now)
    value, wanted, allowed = reference(base, now)
    # a and N_0 sqrt(b) are sums of N D float64 terms: N D 2^-53 relative each.
    assert 1 - omega(sums) == pytest.approx(float(value), abs=4 * N * D * 2.0**-53)
    assert sums.tolist()[3] == N
    assert ((gradient.double() - wanted).abs() <= allowed).all()
    if noise >= 0.3:
        assert wanted.abs().max() > 100 * allowed.max(), "the gradient must stand above its tolerance"


@cases
@pytest.mark.parametrize("edges", [[0, 48], [0, 24, 48], [0, 5, 48], [0, 16, 32, 48], [0, 1, 40, 48], [0, 48, 48], [0, 0, 20, 48]], ids=str)
def test_surrogates_of_all_workers_add_up(noise, scale, edges):
    """Also with workers that hold no row: [0, 48, 48] has an empty second one, [0, 0, 20, 48] an empty first one."""
    base, now = features(noise, scale=scale)
    gradient, sums = spread(base, now, edges)
    value, wanted, allowed = reference(base, now)
    # The order of the float64 sums is the only other difference; it is far below the float32 rounding.
    assert ((gradient.double() - wanted).abs() <= allowed).all()
    for found in sums:
        assert 1 - omega(found) == pytest.approx(float(value), abs=4 * N * D * 2.0**-53)
        assert float(found[3]) == N


def test_a_mean_of_each_workers_own_penalty_would_be_another_objective():
    """What the reduction is for: the gradient of the mean of two local 1 - Omega differs far beyond the tolerance."""
    base, now = features(0.5)
    with torch.no_grad():
        now[24:] *= 5
    locals_ = [1 - (base[part] * now[part]).sum() / (base[part].norm() * now[part].norm()) for part in (slice(0, 24), slice(24, 48))]
    (mean_gradient,) = torch.autograd.grad(sum(locals_) / 2, now)
    _, wanted, allowed = reference(base, now)
    assert (mean_gradient.double() - wanted).abs().max() > 100 * allowed.max()
    gradient, _ = spread(base, now, [0, 24, 48])
    assert ((gradient.double() - wanted).abs() <= allowed).all()


def test_delta_rho_is_the_change_of_the_rms_norm():
    base, now = features(0.3, scale=1.7)
    _, sums = shape_penalty(base, now)
    wanted = float(now.detach().double().norm() - base.double().norm()) / math.sqrt(N)
    assert delta_rho(sums) == pytest.approx(wanted, rel=N * D * 2.0**-53 * 10)


def test_scaling_the_features_costs_nothing():
    """1 - Omega sees shape only: 1.5 Z_0 has penalty 0 and gradient 0 up to rounding."""
    base, _ = features(0.0)
    now = (1.5 * base).requires_grad_()
    surrogate, sums = shape_penalty(base, now)
    (gradient,) = torch.autograd.grad(surrogate, now)
    _, _, allowed = reference(base, now)
    assert abs(1 - omega(sums)) <= 4 * N * D * 2.0**-53
    assert (gradient.abs() <= allowed).all()


def test_bfloat16_features_are_compared_in_float32():
    base, now = features(0.3)
    low = now.detach().bfloat16().requires_grad_()
    surrogate, sums = shape_penalty(base, low)
    (gradient,) = torch.autograd.grad(surrogate, low)
    value, wanted, allowed = reference(base, low)
    assert gradient.dtype == torch.bfloat16
    assert 1 - omega(sums) == pytest.approx(float(value), abs=4 * N * D * 2.0**-53)
    assert ((gradient.double() - wanted).abs() <= allowed + 2.0**-8 * wanted.abs() + 2.0**-8 * allowed).all()


def test_the_base_gets_no_gradient():
    base, now = features(0.3)
    base.requires_grad_()
    surrogate, _ = shape_penalty(base, now)
    assert torch.autograd.grad(surrogate, base, allow_unused=True) == (None,)
