"""Controls of feedback exposure outside transformers: IIR filters and a Mamba layer (looped-quantization, App. M and N).

*Filters.* x_{t+1} = A x_t + B u_t, y_t = C x_t + D u_t. The poles are the eigenvalues of A: rounding A moves them, and past radius 1 the output grows without bound;
rounding B, C or D cannot. A is the companion matrix of the denominator (scipy.signal.tf2ss), whose poles are the roots of a polynomial with rounded coefficients. Rounding
is symmetric with one scale a matrix, step max|A| / (2^(bits-1) - 1), as fixed point of that many bits.

*Mamba.* h_t = exp(Δ_t A) h_{t-1} + Δ_t B_t x_t from h_{-1} = 0, A = -exp(A_log). A_log multiplies the state and only the state, so its error cannot be seen at t = 0 and grows with the
scan; in_proj, x_proj and dt_proj shape what enters; out_proj reads after the state, and leaves this layer's states as they are, bit for bit. With an identity path
of share α the transition is (1 - α) exp(Δ_t A) + α I: the part that A_log perturbs shrinks by 1 - α (Table 21).

Divergence at t is ||h'_t - h_t|| over channels and states, the mean over sequences; `relative` divides by ||h_t||.

Legend: B sequences, L time, d inner width, N state size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from scipy import signal
from torch import Tensor
from torch.nn import functional

from prism_ray.calibrate.exposure import round_int
from prism_ray.core.errors import ConfigError, UnknownName

Matrix = Literal["A", "B", "C", "D"]
MATRICES: tuple[Matrix, ...] = ("A", "B", "C", "D")
BITS = (4, 6, 8, 10, 12, 16)
MAMBA_PARTS = ("A_log", "in_proj", "x_proj", "dt_proj", "out_proj")
ALPHAS = (0.0, 0.05, 0.1, 0.15, 0.25, 0.35, 0.5)


@dataclass(frozen=True, kw_only=True)
class FilterDesign:
    """A digital filter by its design call. arguments: of scipy.signal's function `kind`; frequencies are fractions of the Nyquist frequency."""

    name: str
    kind: Literal["butter", "cheby1", "cheby2", "ellip"]
    arguments: tuple[Any, ...]

    def state_space(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """A [n, n], B [n, 1], C [1, n], D [1, 1] in controller-companion form, float64."""
        numerator, denominator = getattr(signal, self.kind)(*self.arguments)
        a, b, c, d = signal.tf2ss(numerator, denominator)
        return a, b, c, d


def fixed_point(matrix: np.ndarray, bits: int) -> np.ndarray:
    """Symmetric rounding to 2^bits - 1 levels, one step for the whole matrix; a zero matrix stays zero."""
    if bits < 2:
        raise ConfigError(f"bits is {bits}, expected at least 2", where="fixed_point")
    step = np.abs(matrix).max(initial=0.0) / (2 ** (bits - 1) - 1)
    return np.rint(matrix / step) * step if step > 0 else matrix.copy()


@dataclass(frozen=True, kw_only=True)
class FilterRow:
    """Largest pole radius of one design with one matrix rounded; matrix None, bits 0: the filter as designed."""

    design: str
    matrix: Matrix | None
    bits: int
    radius: float

    @property
    def stable(self) -> bool:
        """All poles strictly inside the unit circle."""
        return self.radius < 1.0


def quantized_system(design: FilterDesign, matrix: Matrix | None, bits: int) -> dict[str, np.ndarray]:
    """The four matrices with one of them rounded."""
    system = dict(zip(MATRICES, design.state_space(), strict=True))
    if matrix is not None:
        system[matrix] = fixed_point(system[matrix], bits)
    return system


def pole_radius(system: dict[str, np.ndarray]) -> float:
    """Largest magnitude of an eigenvalue of A."""
    return float(np.abs(np.linalg.eigvals(system["A"])).max())


def filter_table(designs: Sequence[FilterDesign], bits: Sequence[int] = BITS) -> list[FilterRow]:
    """Every design as it is, and with each matrix rounded alone at each precision."""
    rows = []
    for design in designs:
        rows.append(FilterRow(design=design.name, matrix=None, bits=0, radius=pole_radius(quantized_system(design, None, 0))))
        for matrix in MATRICES:
            for width in bits:
                radius = pole_radius(quantized_system(design, matrix, width))
                rows.append(FilterRow(design=design.name, matrix=matrix, bits=width, radius=radius))
    return rows


DESIGNS = (
    FilterDesign(name="butterworth-5 lowpass 0.12", kind="butter", arguments=(5, 0.12)),
    FilterDesign(name="chebyshev1-6 lowpass 0.1, 1 dB", kind="cheby1", arguments=(6, 1, 0.1)),
    FilterDesign(name="elliptic-4 lowpass 0.1, 0.5/60 dB", kind="ellip", arguments=(4, 0.5, 60, 0.1)),
    FilterDesign(name="butterworth-2 bandpass 0.05-0.1", kind="butter", arguments=(2, (0.05, 0.1), "bandpass")),
)
"""Narrow filters, whose poles lie close together near the unit circle, where a coefficient's rounding moves them most: at 10 bits and below A's rounding makes all four
unstable; at 12 all but the sixth-order Chebyshev are stable, and that one is unstable at 16 too."""


# --- Mamba ---


@torch.no_grad()
def mamba_states(mixer: Any, x: Tensor, *, alpha: float = 0.0) -> tuple[Tensor, Tensor]:
    """(h [L, B, d, N], output [B, L, hidden]) of a transformers MambaMixer on its inputs x [B, L, hidden], by the recurrence written out.

    alpha: share of the identity in the transition (module docstring); at 0 the output is the module's own.
    """
    length = x.shape[1]
    inner, gate = mixer.in_proj(x).transpose(1, 2).chunk(2, dim=1)
    inner = mixer.act(mixer.conv1d(inner)[..., :length])
    parts = mixer.x_proj(inner.transpose(1, 2)).split([mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size], dim=-1)
    step = functional.softplus(mixer.dt_proj(parts[0]))
    transition = -torch.exp(mixer.A_log.float())
    state = x.new_zeros(x.shape[0], *mixer.A_log.shape)
    states, outputs = [], []
    for t in range(length):
        decay = torch.exp(step[:, t, :, None] * transition)
        state = ((1 - alpha) * decay + alpha) * state + step[:, t, :, None] * parts[1][:, t, None, :] * inner[:, :, t, None]
        states.append(state)
        outputs.append((state @ parts[2][:, t, :, None])[..., 0] + mixer.D * inner[:, :, t])
    mixed = torch.stack(outputs, dim=-1) * mixer.act(gate)
    return torch.stack(states), mixer.out_proj(mixed.transpose(1, 2))


def mamba_parameter(mixer: Any, part: str) -> Tensor:
    """The tensor of a part: A_log itself, or a projection's weight."""
    if part not in MAMBA_PARTS:
        raise UnknownName(f"a Mamba layer has no part '{part}' to perturb", where="mamba", remedy=f"known: {', '.join(MAMBA_PARTS)}")
    return mixer.A_log if part == "A_log" else getattr(mixer, part).weight


@contextmanager
def perturbed(mixer: Any, part: str, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within the block the part holds change(its values)."""
    parameter = mamba_parameter(mixer, part)
    before = parameter.data
    try:
        parameter.data = change(before)
        yield
    finally:
        parameter.data = before


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """State divergence over time, float64 [L]: absolute, and relative to the state's norm. seeds pooled by the mean."""

    part: str
    kind: Literal["int4", "gaussian"]
    absolute: Tensor
    relative: Tensor

    @property
    def growth(self) -> float:
        """Mean absolute divergence of the last quarter of the scan over that of the first quarter; NaN where nothing diverged."""
        quarter = max(1, len(self.absolute) // 4)
        first = float(self.absolute[:quarter].mean())
        return float(self.absolute[-quarter:].mean()) / first if first > 0 else float("nan")


def mamba_divergence(mixer: Any, x: Tensor, *, bits: int = 4, seeds: Sequence[int] = (0, 1, 2), alpha: float = 0.0) -> list[Divergence]:
    """Every part rounded to `bits` (one scale a row), and with Gaussian noise whose Frobenius norm is the median of the parts' rounding errors."""
    base, _ = mamba_states(mixer, x, alpha=alpha)
    errors = {part: (round_int(values, bits) - values).norm() for part in MAMBA_PARTS for values in [mamba_parameter(mixer, part).data]}
    norm = torch.stack(list(errors.values())).median()
    found = []
    for part in MAMBA_PARTS:
        with perturbed(mixer, part, lambda values: round_int(values, bits)):
            found.append(_divergence(part, "int4", base, [mamba_states(mixer, x, alpha=alpha)[0]]))
        noisy = []
        for seed in seeds:
            with perturbed(mixer, part, _gaussian(norm, seed)):
                noisy.append(mamba_states(mixer, x, alpha=alpha)[0])
        found.append(_divergence(part, "gaussian", base, noisy))
    return found


def _gaussian(norm: Tensor, seed: int) -> Callable[[Tensor], Tensor]:
    """Add seeded Gaussian noise of that Frobenius norm."""

    def change(values: Tensor) -> Tensor:
        noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(seed)).to(values)
        return values + noise * (norm / noise.norm())

    return change


def _divergence(part: str, kind: Literal["int4", "gaussian"], base: Tensor, others: Sequence[Tensor]) -> Divergence:
    size = base.double().flatten(2).norm(dim=-1)
    apart = torch.stack([(other - base).double().flatten(2).norm(dim=-1) for other in others]).mean(dim=0)
    # A state of norm 0 (no input yet) that did not move has no relative error; 0 / 0 would hide the rest of the mean.
    relative = torch.where(size > 0, apart / size.clamp(min=torch.finfo(torch.float64).tiny), torch.zeros_like(size))
    return Divergence(part=part, kind=kind, absolute=apart.mean(dim=-1), relative=relative.mean(dim=-1))


def identity_sweep(mixer: Any, x: Tensor, *, alphas: Sequence[float] = ALPHAS, bits: int = 4) -> list[tuple[float, float, float]]:
    """(α, mean absolute, mean relative divergence over time) with A_log rounded, base and rounded layer both with identity share α."""
    rows = []
    for alpha in alphas:
        base, _ = mamba_states(mixer, x, alpha=alpha)
        with perturbed(mixer, "A_log", lambda values: round_int(values, bits)):
            found = _divergence("A_log", "int4", base, [mamba_states(mixer, x, alpha=alpha)[0]])
        rows.append((alpha, float(found.absolute.mean()), float(found.relative.mean())))
    return rows


def mamba_inputs(model: Any, input_ids: Tensor, layer: int) -> tuple[Any, Tensor]:
    """(mixer, its input [B, L, hidden]) of one layer of a transformers Mamba model in a forward pass on `input_ids`."""
    mixer = model.backbone.layers[layer].mixer
    seen: list[Tensor] = []
    handle = mixer.register_forward_pre_hook(
        lambda _module, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    try:
        with torch.no_grad():
            model(input_ids=input_ids, use_cache=False)
    finally:
        handle.remove()
    return mixer, seen[0].detach()
