"""The differentiable shape penalty 1 - Omega(Z_0, Z_t) (prism-risk-bound §3.5, eq. 8), exact when its rows are spread over workers.

Omega = a / (N_0 sqrt(b)) with a = <Z_0, Z_t>, b = ||Z_t||^2, N_0 = ||Z_0||: not a mean over rows, so averaging each worker's own Omega would be
another objective. The sums a, b, N_0^2 are reduced without gradient first; each worker then returns a surrogate that is linear in its own a and b,

    - a_local / (N_0 sqrt(b)) + a b_local / (2 N_0 b^(3/2)),

whose gradients add up to that of 1 - Omega over all rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Reduce = Callable[[torch.Tensor], torch.Tensor]


def shape_penalty(z_base: torch.Tensor, z_now: torch.Tensor, reduce: Reduce | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(surrogate, sums): the surrogate scalar to differentiate and the float64 sums [a, b, N_0^2, n] over all workers.

    z_base, z_now: [n, d] of this worker's rows; reduce: adds a float64 vector over workers, None for one worker. The surrogate's *value* means
    nothing; read 1 - Omega from `omega(sums)`.
    """
    base, now = z_base.detach().to(torch.float32), z_now.to(torch.float32)
    inner, squared = (base * now).sum(), now.square().sum()
    local = torch.stack([(base.double() * now.detach().double()).sum(), now.detach().double().square().sum(), base.double().square().sum()])
    sums = torch.cat([local, torch.tensor([float(base.shape[0])], dtype=torch.float64, device=local.device)])
    if reduce is not None:
        sums = reduce(sums)
    a, b, base_squared = sums[0], sums[1], sums[2]
    denominator = (base_squared * b).sqrt()
    surrogate = -inner / denominator.float() + (a / (2 * denominator * b)).float() * squared
    return surrogate, sums


def omega(sums: torch.Tensor) -> float:
    """Omega from the sums of `shape_penalty`."""
    return float(sums[0] / (sums[1] * sums[2]).sqrt())


def delta_rho(sums: torch.Tensor) -> float:
    """rho_t - rho_0, the change of the RMS feature norm, from the same sums."""
    return float((sums[1] / sums[3]).sqrt() - (sums[2] / sums[3]).sqrt())
