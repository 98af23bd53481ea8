"""What a merge did, layer by layer, measured on the written files (field case ADP-01).

Of every corrected weight four scale planes are compared: s0 of the base, s of the unmerged forward, the real-valued correction before its rounding
(`real`), and w as it was read back from disk. With |.| the sum of absolute values over the layer's blocks

    lost_at_rounding = |real - grid(real)| / |real - s0|     what the grid costs; with QAST the training paid it, and has seen it
    lost_at_merge    = |s - w| / |s - s0|                    what only the merge lost: 0 with QAST, and the same cost, unseen, without
    swallowed        = share of the corrected blocks whose byte is still the base's

E8M0 steps are a factor of two, so a plane of it may swallow every correction of a small adapter; the forward under QAST then is the base's too, and so is
the merged checkpoint. That is exact and useless, hence a number of its own with a limit of its own.

`output_errors` runs a probe batch through the unmerged model and gives each layer's input to its merged weight as well: |y - y'| / |y|, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from prism_ray.adapters.qast import corrected_scales
from prism_ray.adapters.scale_plane import base_model
from prism_ray.adapters.scale_qlora.experts import Observer, ScaleQLoraExperts
from prism_ray.adapters.scale_qlora.layer import Correction, ScaleQLoraLayer
from prism_ray.formats.tensor import QuantTensor

# Input ids, keyword arguments of the model, or a function that runs the model it is given.
Probe = torch.Tensor | Mapping[str, Any] | Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class LayerMerge:
    """blocks: scale blocks of the weights that the adapter corrects; changed: blocks whose byte the merge changed; clamped: corrected scales outside the
    grid's range before the clip; corrected: blocks whose correction is not zero (zero scales, which stay zero, count in neither). swallowed,
    lost_at_rounding, lost_at_merge: see the module. max_abs_dw: largest |merged - unmerged forward| weight, measured on the written file. output_error:
    relative error of the output on the probe batch, None where none was given or reached the layer. experts: those with a changed byte, None for a linear."""

    blocks: int
    changed: int
    clamped: int
    corrected: int
    swallowed: float
    lost_at_rounding: float
    lost_at_merge: float
    max_abs_dw: float
    output_error: float | None = None
    experts: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class MergeReport:
    """Per layer and in total; with QAST `max_abs_dw` must be exactly 0.0. swallowed: share of all corrected blocks; output_error: the largest of a layer.
    rest_identical: whether every scale byte outside the adapter's layers is the base's."""

    layers: dict[str, LayerMerge]
    max_abs_dw: float
    changed: int
    blocks: int
    corrected: int
    swallowed: float
    output_error: float | None
    code_plane: str
    scale_plane: str
    codes_identical: bool
    rest_identical: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a manifest."""
        return asdict(self)


def stitched(parts: list[str], tensors: Mapping[str, QuantTensor]) -> QuantTensor:
    """One weight from the Linear weights that a checkpoint stores it as, one above the other."""
    pieces = [tensors[part] for part in parts]
    return QuantTensor(
        codes=torch.cat([piece.codes for piece in pieces]),
        scales=torch.cat([piece.scales for piece in pieces]),
        tensor_scale=pieces[0].tensor_scale,
        format=pieces[0].format,
        divisor=pieces[0].divisor,
    )


@dataclass
class _Sums:
    """Additive over the experts of a layer."""

    blocks: int = 0
    changed: int = 0
    clamped: int = 0
    corrected: int = 0
    unmoved: int = 0
    real: float = 0.0
    rounded_off: float = 0.0
    applied: float = 0.0
    merged_off: float = 0.0

    def add(self, correction: Correction, base: torch.Tensor, written: QuantTensor) -> None:
        """base: scale bytes [O, G] of the base checkpoint; written: the weight as read back."""
        grid = correction.planes.format.grid
        old, new = grid.decode(base).double(), grid.decode(written.scales).double()
        raw = corrected_scales(correction.base, correction.a, correction.b, correction.scaling, correction.planes.format).cpu()
        real, forward = correction.real_scales().cpu(), correction.forward_scales().cpu()
        moved, corrected = written.scales != base, (raw != old) & (old > 0)
        self.blocks += base.numel()
        self.changed += int(moved.sum())
        self.clamped += int((((raw > grid.largest) | (raw < grid.smallest)) & (old > 0)).sum())
        self.corrected += int(corrected.sum())
        self.unmoved += int((corrected & ~moved).sum())
        self.real += float((real - old).abs().sum())
        self.rounded_off += float((real - grid.decode(grid.encode(real))).double().abs().sum())
        self.applied += float((forward - old).abs().sum())
        self.merged_off += float((forward - new).abs().sum())


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def measure_layer(
    layer: ScaleQLoraLayer,
    adapter: str,
    parts: Mapping[int | None, list[str]],
    base: Mapping[str, QuantTensor],
    written: Mapping[str, QuantTensor],
    output_error: float | None = None,
) -> tuple[LayerMerge, int]:
    """(report, corrected blocks that did not move) of one layer. parts: expert (None for a linear) -> names of the stored weights."""
    sums, worst, experts = _Sums(), [], []
    for correction in layer.corrections(adapter):
        names = parts[correction.expert]
        old, new = stitched(names, base), stitched(names, written)
        before = sums.changed
        sums.add(correction, old.scales, new)
        worst.append((new.dequantize() - correction.weight(torch.float32).cpu()).abs().max())
        if sums.changed > before and correction.expert is not None:
            experts.append(correction.expert)
    report = LayerMerge(
        blocks=sums.blocks,
        changed=sums.changed,
        clamped=sums.clamped,
        corrected=sums.corrected,
        swallowed=_share(sums.unmoved, sums.corrected),
        lost_at_rounding=_share(sums.rounded_off, sums.real),
        lost_at_merge=_share(sums.merged_off, sums.applied),
        max_abs_dw=float(torch.stack(worst).max()) if worst else 0.0,  # keeps a NaN
        output_error=output_error,
        experts=tuple(experts) if isinstance(layer, ScaleQLoraExperts) else None,
    )
    return report, sums.unmoved


def output_errors(
    model: Any,
    layers: Mapping[str, ScaleQLoraLayer],
    adapter: str,
    weight: Callable[[str, int | None, torch.dtype], torch.Tensor],
    probe: Probe,
) -> dict[str, float]:
    """Layer -> relative error of its output with the merged weight, on the inputs that the unmerged model gives it.

    weight: (layer, expert or None, dtype) -> merged weight [O, I]. The adapter is the active one for this run, whatever was active, merged or disabled.
    Layers that the probe does not reach are left out.
    """
    sums: dict[str, list[float]] = {}

    def compare(name: str, expert: int | None, x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        merged = torch.nn.functional.linear(x, weight(name, expert, x.dtype).to(x.device))
        if bias is not None:
            merged = merged + bias.to(merged.dtype)
        found = sums.setdefault(name, [0.0, 0.0])
        found[0] += float((merged.double() - y.double()).square().sum())
        found[1] += float(y.double().square().sum())

    def expert_observer(name: str, trained: set[int]) -> Observer:
        return lambda expert, x, y: compare(name, expert, x, y) if expert in trained else None

    def linear_hook(name: str) -> Callable[[Any, Any, torch.Tensor], None]:
        return lambda module, args, y: compare(name, None, args[0], y, module.base_layer.bias)

    hooks = []
    with _unmerged(model, adapter), torch.no_grad():
        try:
            for name, layer in layers.items():
                if isinstance(layer, ScaleQLoraExperts):
                    layer.observer = expert_observer(name, set(layer.experts[adapter]))
                else:
                    hooks.append(layer.register_forward_hook(linear_hook(name)))
            _run(model, probe)
        finally:
            for hook in hooks:
                hook.remove()
            for layer in layers.values():
                if isinstance(layer, ScaleQLoraExperts):
                    layer.observer = None
    return {name: (off / norm) ** 0.5 if norm else off for name, (off, norm) in sums.items()}


def _run(model: Any, probe: Probe) -> None:
    if isinstance(probe, torch.Tensor):
        model(input_ids=probe)
    elif isinstance(probe, Mapping):
        model(**probe)
    else:
        probe(model)


@contextmanager
def _unmerged(model: Any, adapter: str) -> Iterator[None]:
    """The model in eval mode with `adapter` alone active and nothing merged in place; everything is put back afterwards."""
    modules = list(base_model(model).modules())
    layers = [module for module in modules if isinstance(module, ScaleQLoraLayer)]
    modes = [module.training for module in modules]
    held = [
        (layer, layer._active_adapter, layer._disable_adapters, layer.merged_adapters, layer._unmerged_scales, layer.base_layer.scales)
        for layer in layers
    ]
    try:
        for layer in layers:
            layer.base_layer.scales = layer.base_scales
            layer.merged_adapters, layer._unmerged_scales = [], []
            layer._active_adapter, layer._disable_adapters = [adapter], False
        for module in modules:
            module.training = False
        yield
    finally:
        for layer, active, disabled, merged, scales, data in held:
            layer._active_adapter, layer._disable_adapters = active, disabled
            layer.merged_adapters, layer._unmerged_scales, layer.base_layer.scales = merged, scales, data
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
