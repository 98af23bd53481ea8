"""Feedback exposure: which quantized component of a looped model enters its recurrence without an identity path around it (looped-quantization, section 3).

With s_{t+1} = F(s_t, e) and T steps, everything is read from forward passes of the model itself, by hooks at the loop's entry and exit (models.loops.LoopSpec):

- *agreement*: share of real tokens whose most likely next token stays the base's after T steps when one component alone is quantized;
- *injection*: the state fed back is clean_t + λ (perturbed_t - clean_t); λ = 1 is the quantized rollout, λ = 0 takes the error of earlier steps out and leaves each
  step's own. Reported with the final state's relative error ||s'_T - s_T|| / ||s_T|| over real tokens (App. E);
- *radius*: spectral radius of d s_{t+1} / d s_t at the last state, for one position (below);
- *perturbations* of the rounding error's own Frobenius norm, rank 4 and Gaussian, in its place (App. F);
- *sensitivities* of each projection: ablation, random-direction gain, Hessian trace (App. G). The last two do not see where an error enters, and mislead;
- *proxy*: tr(D H_t D') with D = Q(W) - W and H_t the inputs' second moment at step t of the base trajectory, beside tr(W H_t W') (App. J).

The Jacobian of a causal model is block lower triangular over positions, so its spectral radius is the largest of the diagonal blocks'. One block, [h, h], is measured: that of
each sequence's last real token. Power iteration by forward-mode derivatives; the estimate is the geometric mean growth over the second half of the iterations, where a
complex dominant pair makes single growths oscillate.

A Quantize is a function weight [O, I] -> weight of the same shape and dtype; `round_int` is one. Intervals are Wilson's at 95 % over tokens as if they were
independent; tokens of one text are not, so they are the narrowest that could be right.

Legend: B sequences, L positions, h state width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from prism_ray.core.errors import DataError, FormatError, ModelError
from prism_ray.models.loops import Batch, LoopSpec, run_loop
from prism_ray.risk.transfer import Estimate, wilson

Quantize = Callable[[Tensor], Tensor]
Kind = Literal["rounding", "rank4", "gaussian"]
FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
RANK = 4
GAIN_DRAWS = 64
STARTS, ITERATIONS = 3, 60


def round_int(weight: Tensor, bits: int = 4, group: int | None = None) -> Tensor:
    """Symmetric round to nearest at one float32 scale per row, or per `group` consecutive columns: scale = max|w| / (2^(bits-1) - 1), zero for a zero group."""
    columns = weight.shape[-1]
    size = columns if group is None else group
    if columns % size:
        raise FormatError(f"{columns} columns do not divide into groups of {size}", where="round_int", remedy="choose a divisor")
    top = 2 ** (bits - 1) - 1
    blocks = weight.to(torch.float32).reshape(*weight.shape[:-1], columns // size, size)
    scale = blocks.abs().amax(dim=-1, keepdim=True) / top
    codes = torch.where(scale > 0, blocks / torch.where(scale > 0, scale, 1.0), torch.zeros_like(blocks)).round().clamp(-top, top)
    return (codes * scale).reshape(weight.shape).to(weight.dtype)


# --- weights and hooks ---


def component_linears(model: nn.Module, spec: LoopSpec) -> dict[str, list[str]]:
    """Linear modules by component, in the order of the model; `both` is adapter and core. Components without one are left out."""
    found: dict[str, list[str]] = {"adapter": [], "core": [], "prelude": [], "coda": []}
    for name, module in model.named_modules():
        part = spec.component(name)
        if part is not None and isinstance(module, nn.Linear):
            found[part].append(name)
    if found["adapter"]:
        found["both"] = found["adapter"] + found["core"]
    return {part: names for part, names in found.items() if names}


@contextmanager
def replaced(model: nn.Module, names: Sequence[str], change: Quantize) -> Iterator[None]:
    """Within the block the named Linear modules hold change(weight); their own storage comes back after it, whatever happens."""
    linears: list[Any] = [model.get_submodule(name) for name in names]
    before = [linear.weight.data for linear in linears]
    try:
        for linear, weight in zip(linears, before, strict=True):
            linear.weight.data = change(weight)
        yield
    finally:
        for linear, weight in zip(linears, before, strict=True):
            linear.weight.data = weight


class LoopTap:
    """Sees, and may change, the state at the loop's entry; keeps the entry states and the last exit output of one forward pass.

    change: (step, state [B, L, h]) -> the state to feed instead.
    """

    def __init__(self, model: nn.Module, spec: LoopSpec, change: Callable[[int, Tensor], Tensor] | None = None):
        self._entry, self._exit = model.get_submodule(spec.entry), model.get_submodule(spec.exit)
        self._width, self._change = spec.state_width, change
        self.states: list[Tensor] = []
        self.last: Tensor | None = None

    def __enter__(self) -> Self:
        self._handles = [
            self._entry.register_forward_pre_hook(self._at_entry, with_kwargs=True),
            self._exit.register_forward_hook(self._at_exit),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def final(self) -> Tensor:
        """s_T [B, L, h]; ModelError where the exit module was not called."""
        if self.last is None:
            raise ModelError("the loop's exit was not called in a forward pass", where=type(self._exit).__name__)
        return self.last

    def _at_entry(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x: Tensor = args[0] if args else kwargs["hidden_states"]
        width = x.shape[-1] if self._width is None else self._width
        state = x[..., :width]
        if self._change is not None:
            state = self._change(len(self.states), state)
            x = torch.cat([state, x[..., width:]], dim=-1)
        self.states.append(state)
        return ((x, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": x})

    def _at_exit(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        self.last = output[0] if isinstance(output, tuple) else output


def real_tokens(batch: Batch) -> Tensor:
    """Mask bool [B, L] of tokens that are not padding."""
    mask = batch.get("attention_mask")
    return torch.ones_like(batch["input_ids"], dtype=torch.bool) if mask is None else mask != 0


@torch.no_grad()
def top_tokens(model: nn.Module, spec: LoopSpec, batches: Sequence[Batch]) -> Tensor:
    """The most likely next token at each real position of all batches, int64 [n]."""
    if not batches:
        raise DataError("no batch to measure on", where="exposure", remedy="give at least one")
    return torch.cat([run_loop(model, spec, batch).logits.argmax(dim=-1)[real_tokens(batch)] for batch in batches])


def agreement(base: Tensor, other: Tensor) -> Estimate:
    """Share of equal tokens of two results of `top_tokens`."""
    return wilson(int((base == other).sum()), base.numel())


# --- the readings ---


def component_agreement(
    model: nn.Module, spec: LoopSpec, batches: Sequence[Batch], quantize: Quantize, *, base: Tensor | None = None
) -> dict[str, Estimate]:
    """Agreement with the base at the last step, each component quantized alone. base: its top tokens, where they are known already."""
    base = top_tokens(model, spec, batches) if base is None else base
    found = {}
    for part, names in component_linears(model, spec).items():
        with replaced(model, names, quantize):
            found[part] = agreement(base, top_tokens(model, spec, batches))
    return found


@dataclass(frozen=True, kw_only=True)
class InjectionPoint:
    """One λ. relative_error: of the final state against the clean one, over real tokens of all batches."""

    fraction: float
    relative_error: float
    agreement: Estimate


@torch.no_grad()
def injection_curve(
    model: nn.Module,
    spec: LoopSpec,
    batches: Sequence[Batch],
    quantize: Quantize,
    *,
    component: str = "adapter",
    fractions: Sequence[float] = FRACTIONS,
) -> list[InjectionPoint]:
    """Quantize one component and feed back only the fraction λ of the error that the state carries into a step."""
    names = component_linears(model, spec).get(component)
    if names is None:
        raise ModelError(f"has no component '{component}' with linear weights", where=spec.family)
    clean: list[tuple[LoopTap, Tensor]] = []
    for batch in batches:
        with LoopTap(model, spec) as tap:
            clean.append((tap, run_loop(model, spec, batch).logits.argmax(dim=-1)))
    points = []
    with replaced(model, names, quantize):
        for fraction in fractions:
            error, norm, equal, count = 0.0, 0.0, 0, 0
            for batch, (base, top) in zip(batches, clean, strict=True):
                real = real_tokens(batch)
                with LoopTap(model, spec, _feed_back(base.states, fraction)) as tap:
                    now = run_loop(model, spec, batch).logits.argmax(dim=-1)
                error += float((tap.final - base.final)[real].double().square().sum())
                norm += float(base.final[real].double().square().sum())
                equal += int((now == top)[real].sum())
                count += int(real.sum())
            points.append(
                InjectionPoint(fraction=fraction, relative_error=(error / norm) ** 0.5 if norm else 0.0, agreement=wilson(equal, count))
            )
    return points


def _feed_back(clean: Sequence[Tensor], fraction: float) -> Callable[[int, Tensor], Tensor]:
    # At λ = 1 the sum would round where the rollout does not.
    return lambda step, state: state if fraction == 1 else clean[step] + fraction * (state - clean[step])


@dataclass(frozen=True, kw_only=True)
class SpectralRadius:
    """rows: estimate of each sequence, the mean over starts. spread: largest minus smallest start, of the sequence where that is largest."""

    estimate: float
    rows: tuple[float, ...]
    spread: float


@torch.no_grad()
def spectral_radius(
    model: nn.Module,
    spec: LoopSpec,
    batch: Batch,
    *,
    at: Tensor | None = None,
    starts: int = STARTS,
    iterations: int = ITERATIONS,
    seed: int = 0,
) -> SpectralRadius:
    """Local spectral radius of the per-step state Jacobian at each sequence's last real token; the mean over sequences is the estimate.

    at: states [B, L, h] to linearize at, default the model's own after all its steps; the base's there compares two models at one point.
    The model should be float32: growths of bfloat16 tangents are rounded to three digits.
    """
    if at is None:
        with LoopTap(model, spec) as tap:
            run_loop(model, spec, batch)
        at = tap.final
    many = {name: value.repeat(starts, *[1] * (value.ndim - 1)) for name, value in batch.items()}
    fixed = at.repeat(starts, 1, 1)
    real = real_tokens(many)
    row = torch.arange(len(fixed), device=fixed.device)
    place = real.shape[1] - 1 - real.flip(1).to(torch.int64).argmax(dim=1)

    def step(z: Tensor) -> Tensor:
        state = fixed.index_put((row, place), z)
        with LoopTap(model, spec, lambda number, found: state if number == 0 else found) as tap:
            run_loop(model, spec, many, steps=1)
        return tap.final[row, place]

    generator = torch.Generator().manual_seed(seed)
    z = fixed[row, place]
    v = torch.randn(z.shape, generator=generator, device="cpu").to(z)
    growths = []
    # The fused CPU attention has no forward-mode derivative; the plain one has.
    with sdpa_kernel(SDPBackend.MATH):
        for _iteration in range(iterations):
            v = v / v.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(v.dtype).tiny)
            v = torch.func.jvp(step, (z,), (v,))[1]
            growths.append(v.norm(dim=-1))
    kept = torch.stack(growths[iterations // 2 :]).double()
    found = kept.log().mean(dim=0).exp().reshape(starts, -1)
    rows = found.mean(dim=0)
    spread = (found.amax(dim=0) - found.amin(dim=0)).max()
    return SpectralRadius(estimate=float(rows.mean()), rows=tuple(rows.tolist()), spread=float(spread))


def radius_pair(
    model: nn.Module, spec: LoopSpec, batch: Batch, names: Sequence[str], quantize: Quantize, *, iterations: int = ITERATIONS
) -> tuple[SpectralRadius, SpectralRadius]:
    """Spectral radius of the base and with the named modules quantized, both at the base's last state, so that only the weights differ."""
    with torch.no_grad(), LoopTap(model, spec) as tap:
        run_loop(model, spec, batch)
    base = spectral_radius(model, spec, batch, at=tap.final, iterations=iterations)
    with replaced(model, names, quantize):
        return base, spectral_radius(model, spec, batch, at=tap.final, iterations=iterations)


def perturbation(weight: Tensor, quantize: Quantize, kind: Kind, generator: torch.Generator) -> Tensor:
    """The rounded weight, or the weight with a random error of the same Frobenius norm: G1 G2 with `RANK` inner columns, or Gaussian entries."""
    changed = quantize(weight)
    if kind == "rounding":
        return changed
    shape = weight.shape
    if kind == "rank4":
        left, right = (torch.randn(size, generator=generator, dtype=torch.float64) for size in ((shape[0], RANK), (RANK, shape[1])))
        noise = left @ right
    else:
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    size = (changed.double() - weight.double()).norm()
    return (weight.double() + noise.to(weight.device) * (size / noise.norm())).to(weight.dtype)


def _perturbation(quantize: Quantize, kind: Kind, generator: torch.Generator) -> Quantize:
    return lambda weight: perturbation(weight, quantize, kind, generator)


def perturbation_agreement(
    model: nn.Module,
    spec: LoopSpec,
    batches: Sequence[Batch],
    quantize: Quantize,
    *,
    components: Sequence[str] = ("adapter", "core"),
    seeds: Sequence[int] = (0, 1, 2),
    base: Tensor | None = None,
) -> dict[tuple[Kind, str], Estimate]:
    """Agreement by (kind, component); random kinds are pooled over seeds, rounding is deterministic and runs once."""
    base = top_tokens(model, spec, batches) if base is None else base
    linears = component_linears(model, spec)
    found: dict[tuple[Kind, str], Estimate] = {}
    kinds: tuple[Kind, ...] = ("rounding", "rank4", "gaussian")
    for part in components:
        for kind in kinds if part in linears else ():
            equal = count = 0
            for seed in seeds[:1] if kind == "rounding" else seeds:
                generator = torch.Generator().manual_seed(seed)
                with replaced(model, linears[part], _perturbation(quantize, kind, generator)):
                    equal += int((top_tokens(model, spec, batches) == base).sum())
                count += base.numel()
            found[kind, part] = wilson(equal, count)
    return found


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """One projection. ablation: share of tokens whose top-1 changes when it alone is quantized. gain: mean ||W d|| / ||d|| over random directions d. trace: sum of squared
    inputs over real tokens and steps of the base trajectory, tr(H). proxy, reference: per step, tr(D H_t D') and tr(W H_t W')."""

    name: str
    component: str
    ablation: float
    gain: float
    trace: float
    proxy: tuple[float, ...]
    reference: tuple[float, ...]

    @property
    def proxy_spread(self) -> float:
        """Largest over smallest step of the proxy; 1 says that its magnitude does not tell the steps apart. Infinite where a step has none."""
        return max(self.proxy) / min(self.proxy) if min(self.proxy) > 0 else float("inf")

    @property
    def first_share(self) -> float:
        """Step 0's part of the sum over steps; 1 / T where all steps are alike, 0 where nothing was rounded."""
        total = sum(self.proxy)
        return self.proxy[0] / total if total > 0 else 0.0


@torch.no_grad()
def sensitivities(
    model: nn.Module,
    spec: LoopSpec,
    batches: Sequence[Batch],
    quantize: Quantize,
    *,
    components: Sequence[str] = ("adapter", "core"),
    base: Tensor | None = None,
    seed: int = 0,
) -> list[Sensitivity]:
    """The three readings and the per-step proxy of every projection of the components, in the order of the model."""
    base = top_tokens(model, spec, batches) if base is None else base
    linears = component_linears(model, spec)
    names = [name for part in components for name in linears.get(part, [])]
    sums = _input_sums(model, spec, batches, names, quantize)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for name in names:
        with replaced(model, [name], quantize):
            changed = 1 - agreement(base, top_tokens(model, spec, batches)).value
        weight: Any = model.get_submodule(name).weight
        directions = torch.randn(GAIN_DRAWS, weight.shape[1], generator=generator, device="cpu").to(weight.device)
        gain = (directions @ weight.float().T).norm(dim=1) / directions.norm(dim=1)
        trace, proxy, reference = (tuple(sums[name][:, column].tolist()) for column in range(3))
        found.append(
            Sensitivity(
                name=name,
                component=spec.component(name) or "",
                ablation=changed,
                gain=float(gain.mean()),
                trace=sum(trace),
                proxy=proxy,
                reference=reference,
            )
        )
    return found


def _input_sums(model: nn.Module, spec: LoopSpec, batches: Sequence[Batch], names: Sequence[str], quantize: Quantize) -> dict[str, Tensor]:
    """Per module float64 [T, 3]: sums over real tokens of |x|^2, |D x|^2 and |W x|^2 at each step (the k-th call of a forward pass is step k)."""
    sums = {name: torch.zeros(spec.steps, 3, dtype=torch.float64) for name in names}
    calls = dict.fromkeys(names, 0)
    real = torch.empty(0)

    def hook(name: str, error: Tensor) -> Callable[..., None]:
        def see(module: Any, args: tuple[Tensor, ...]) -> None:
            x = args[0][real].float()
            parts = (x, x @ error.T, x @ module.weight.float().T)
            sums[name][calls[name]] += torch.stack([part.double().square().sum() for part in parts]).cpu()
            calls[name] += 1

        return see

    handles = []
    for name in names:
        linear: Any = model.get_submodule(name)
        error = (quantize(linear.weight.data).float() - linear.weight.data.float()).detach()
        handles.append(linear.register_forward_pre_hook(hook(name, error)))
    try:
        for batch in batches:
            real = real_tokens(batch)
            calls.update(dict.fromkeys(names, 0))
            run_loop(model, spec, batch)
    finally:
        for handle in handles:
            handle.remove()
    return sums
