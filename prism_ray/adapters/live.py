"""Swap the scale plane of a live model between two steps, and swap it back. Codes and tensor scales are not touched.

Everything that can fail comes first: layers, shapes, dtypes and bytes are checked, and every new buffer [.., O, G] is made on its device. Then

    pointer   the module's buffer is replaced; one assignment a layer, no byte moves; the old buffers are kept for the way back
    copy      the bytes are written into the buffer; addresses stay, so captured CUDA graphs stay valid; the on-grid delta is kept for the way back

Both are between steps only: a forward that runs meanwhile may see layers of both planes. `LiveSwap.rollback` restores the bytes and verifies their SHA-256.
Refused: a model with an adapter merged in place (its buffers are not the base's), a plane that does not fit, a probe without difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from prism_ray.adapters.planes import BasePlanes, LayerDelta, OnGridDelta, ScalePlane, cut_experts
from prism_ray.core.digests import sha256_tensors
from prism_ray.core.errors import CheckpointError, ConfigError, ModelError
from prism_ray.formats import compressed_tensors as convention
from prism_ray.formats.modules import QuantizedModule, planes, quantized_modules

Swap = Literal["pointer", "copy"]


@dataclass(kw_only=True)
class LiveSwap:
    """A plane that was checked and is ready on the model's devices. changed: scale bytes that differ; before, after: SHA-256 over the scales of the
    touched weights. `apply` and `rollback` may alternate any number of times; neither allocates."""

    how: Swap
    changed: int
    before: str
    after: str
    _modules: Mapping[str, QuantizedModule] = field(repr=False)
    _old: Mapping[str, torch.Tensor] = field(repr=False)
    _new: Mapping[str, torch.Tensor] = field(repr=False)
    _delta: OnGridDelta = field(repr=False)
    active: bool = False

    def apply(self) -> None:
        """Swap the plane in; a second call does nothing. Raises CheckpointError, nothing swapped, where buffers were replaced meanwhile."""
        if self.active:
            return
        self._require(self._old, self.before, verify=False)
        if self.how == "pointer":
            _point(self._modules, self._new)
        else:
            try:
                for name, data in self._new.items():
                    self._modules[name].scales.copy_(data)
            except BaseException:
                self._put_back()  # a device error or an interrupt between two layers
                raise
        self.active = True

    def rollback(self, *, verify: bool = True) -> None:
        """Swap the plane out; a second call does nothing. verify: compare SHA-256 of the scales before (they must be this swap's) and after.

        Raises CheckpointError where somebody else swapped meanwhile; the model is untouched then.
        """
        if not self.active:
            return
        self._require(self._new, self.after, verify=verify)
        if self.how == "pointer":
            _point(self._modules, self._old)
        else:
            self._put_back()
        self.active = False
        if verify and digest(self._modules) != self.before:
            raise CheckpointError("the restored scales are not the base's", where="rollback", remedy="load the checkpoint again")

    def _require(self, buffers: Mapping[str, torch.Tensor], sha256: str, *, verify: bool) -> None:
        moved = self.how == "pointer" and any(module.scales is not buffers[name] for name, module in self._modules.items())
        if moved or (verify and digest(self._modules) != sha256):
            raise CheckpointError(
                "the live scales are not those that this swap left", where="live swap", remedy="undo the later swap first"
            )

    def _put_back(self) -> None:
        for name, layer in self._delta.layers.items():
            self._modules[name].scales.view(-1)[layer.position] = layer.old


def prepare_swap(model: Any, plane: ScalePlane, *, how: Swap = "pointer", base: BasePlanes | None = None) -> LiveSwap:
    """Check a plane (by Linear or by fused name) against a live model and make its buffers; the model is untouched.

    base: what the plane is checked against, default the model's present planes; weights outside the plane keep their present scales.
    Raises ModelError, CheckpointError, FormatError.
    """
    if how not in ("pointer", "copy"):
        raise ConfigError(f"unknown swap '{how}'", where="how", remedy="known: pointer, copy")
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    where = type(inner).__name__
    if any(getattr(module, "merged_adapters", None) for module in inner.modules()):
        raise ModelError("an adapter is merged in place", where=where, remedy="unmerge it first")
    present = cut_experts(inner, planes(inner))
    plane = plane.by_linear({name: tensor.scales for name, tensor in present.items()})
    plane.require_fit(present if base is None else base.quantized, where)
    modules = dict(quantized_modules(inner))
    new = _fresh(modules, plane, set(present))
    touched = {name: modules[name] for name in new}
    old = {name: module.scales for name, module in touched.items()}
    if how == "copy" and not all(buffer.is_contiguous() for buffer in old.values()):
        raise ModelError("a scale buffer is not contiguous", where=where, remedy="swap by pointer")
    return LiveSwap(
        how=how,
        changed=OnGridDelta.between(old, new).changed,
        before=sha256_tensors(old.items()),
        after=sha256_tensors(new.items()),
        _modules=touched,
        _old=old if how == "pointer" else {},
        _new=new,
        _delta=_on_devices(OnGridDelta.between(old, new), touched) if how == "copy" else OnGridDelta({}),
    )


def swap_plane(
    model: Any,
    plane: ScalePlane,
    *,
    how: Swap = "pointer",
    base: BasePlanes | None = None,
    probe: Callable[[Any], torch.Tensor] | None = None,
) -> LiveSwap:
    """`prepare_swap` and apply; returns the way back. probe: a forward, run before and after; the same output is taken back and refused with ModelError."""
    swap = prepare_swap(model, plane, how=how, base=base)
    first = probe(model) if probe is not None else None
    swap.apply()
    if probe is not None and first is not None and torch.equal(first, probe(model)):
        swap.rollback()
        raise ModelError("the probe's output is the same before and after", where=type(model).__name__, remedy="check the plane's layers")
    return swap


def digest(modules: Mapping[str, QuantizedModule]) -> str:
    """SHA-256 over the scales of some quantized modules by name."""
    return sha256_tensors((name, module.scales) for name, module in modules.items())


def _fresh(modules: Mapping[str, QuantizedModule], plane: ScalePlane, present: set[str]) -> dict[str, torch.Tensor]:
    """New whole buffers, by module name, on their devices: the plane's pieces over a copy of what is there."""
    out: dict[str, torch.Tensor] = {}
    whole = convention.fused_names(present)
    for name in sorted(plane.tensors):
        target = name if name in modules else whole[name]
        if target not in out:
            out[target] = modules[target].scales.clone()
        if target == name:
            out[target].copy_(plane.tensors[name])
            continue
        expert = int(name.rsplit(".", 2)[1])
        rows = plane.tensors[name].shape[0]
        start = rows if name.endswith((".up_proj", ".w3")) and out[target].shape[1] == 2 * rows else 0
        out[target][expert, start : start + rows] = plane.tensors[name].to(out[target].device)
    return out


def _point(modules: Mapping[str, QuantizedModule], tensors: Mapping[str, torch.Tensor]) -> None:
    for name, module in modules.items():
        module.scales = tensors[name]


def _on_devices(delta: OnGridDelta, modules: Mapping[str, QuantizedModule]) -> OnGridDelta:
    layers: dict[str, LayerDelta] = {}
    for name, layer in delta.layers.items():
        device = modules[name].scales.device
        layers[name] = LayerDelta(position=layer.position.to(device), old=layer.old.to(device), new=layer.new)
    return OnGridDelta(layers)
