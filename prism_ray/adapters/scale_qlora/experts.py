"""`ScaleQLoraExperts`: the tuner layer over the fused experts of one layer, FP4Experts with codes [E, O, I/2] and scales [E, O, G].

Factors A [E', r, G] and B [E', O, r] of the E' experts that an adapter trains, ascending; an adapter of some experts holds and stores only those.
Every expert is corrected by the same function as a linear layer, alone; its gradient reaches its own rows of A and B, and an expert without a token gets zero.

transformers' eager experts forward asks `self.gate_up_proj[e]` for each expert that the batch hits and hands the result to `F.linear`, which would keep every
dense weight until the backward pass. Where gradients are wanted the answer is therefore a `LazyWeight`: F.linear of it is `CorrectedLinear`, which keeps bytes
and builds the weight again. So one expert's weight is alive at a time, in both directions, for trained and untouched experts alike.

The rows of A and B are taken with one `unbind` in each forward pass of the experts module (hooks on it say when one begins and ends): indexing per expert
would write a gradient of the size of all experts for every one that is hit. Where a pass hits no trained expert the factors still get their zero gradient
(`_Join`), so that data-parallel workers, whose tokens go elsewhere, agree on what is reduced.

Refuses: experts that a family holds transposed (gpt-oss), which are no planes in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from prism_ray.adapters.scale_qlora.config import ScaleQLoraConfig
from prism_ray.adapters.scale_qlora.layer import CorrectedLinear, Correction, ScaleQLoraLayer
from prism_ray.core.errors import ModelError
from prism_ray.formats.modules import FP4Experts
from prism_ray.formats.spec import FormatSpec
from prism_ray.formats.tensor import dequantize

# expert, its input rows [T, I], its output [T, O]
Observer = Callable[[int, torch.Tensor, torch.Tensor], None]


class ExpertPlanes:
    """One expert of FP4Experts, read from the module at each use: ZeRO-3 swaps the codes behind it, a merge the scales."""

    def __init__(self, module: FP4Experts, expert: int, factor: float):
        self.module, self.expert, self.factor = module, expert, factor
        self.out_features, groups = module.scales.shape[-2:]
        self.in_features = groups * module.format.block

    @property
    def format(self) -> FormatSpec:
        return self.module.format

    @property
    def code_bytes(self) -> torch.Tensor:
        return self.module.code_bytes[self.expert]

    @property
    def scales(self) -> torch.Tensor:
        return self.module.scales[self.expert]

    def dequantize(self, dtype: torch.dtype, scale: torch.Tensor | None = None) -> torch.Tensor:
        """The weight [O, I]; scale: decoded float32 scales to use instead of the base plane's."""
        scale = self.format.grid.decode(self.scales) if scale is None else scale
        return dequantize(self.code_bytes, self.format.codes, scale, self.factor, dtype)


class LazyWeight:
    """A weight [O, I] as far as `F.linear` goes; any other operation on it is refused by name."""

    def __init__(self, multiply: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, int], name: str):
        self.multiply, self.shape, self.name = multiply, torch.Size(shape), name

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> torch.Tensor:
        call = dict(zip(("input", "weight", "bias"), args, strict=False)) | (kwargs or {})
        weight = call.get("weight")
        if func is not torch.nn.functional.linear or not isinstance(weight, cls):
            name = next((value.name for value in (*args, *call.values()) if isinstance(value, cls)), "")
            raise ModelError(
                f"the experts forward calls {getattr(func, '__name__', func)} on a weight under training; only F.linear is known",
                where=name,
                remedy="train the other layers (target_modules)",
            )
        y = weight.multiply(call["input"])
        return y if call.get("bias") is None else y + call["bias"].to(y.dtype)


class ScaleQLoraExperts(ScaleQLoraLayer):
    """The tuner layer of one fused expert weight, indexable by expert as FP4Experts is."""

    base_layer: FP4Experts

    def __init__(self, base_layer: FP4Experts, adapter_name: str, config: ScaleQLoraConfig, name: str = ""):
        super().__init__(base_layer, adapter_name, config, name)
        # Python floats: reading them in every forward would wait for the device.
        self._factors: list[float] = base_layer.tensor_scale.tolist()
        self._rows: tuple[str, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]] | None = None
        self._inside = self._used = False
        self._hooks: list[RemovableHandle] = []
        self.observer: Observer | None = None

    def _leading(self, adapter_name: str, config: ScaleQLoraConfig) -> tuple[int, ...]:
        self.experts[adapter_name] = list(config.experts_of(self.name, self.base_layer.scales.shape[0]))
        return (len(self.experts[adapter_name]),)

    def attach(self, parent: nn.Module) -> None:
        """Learn from hooks on the experts module when a forward pass begins and ends."""
        self._hooks = [parent.register_forward_pre_hook(self._begin), parent.register_forward_hook(self._end, always_call=True)]

    def detach(self) -> None:
        """Take the hooks off again."""
        while self._hooks:
            self._hooks.pop().remove()

    def _begin(self, *_: Any) -> None:
        self._rows, self._inside, self._used = None, True, False

    def _end(self, module: nn.Module, args: Any, output: Any) -> Any:
        rows, used = self._rows, self._used
        self._rows, self._inside, self._used = None, False, False
        if rows is None or used or not isinstance(output, torch.Tensor):
            return None
        factors = [factor for factor in (self.qast_A[rows[0]], self.qast_B[rows[0]]) if factor.requires_grad]
        return _Join.apply(output, *factors) if factors else None

    def _rows_of(self, adapter_name: str) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """The rows of A and of B, split once in a forward pass."""
        if self._rows is None or self._rows[0] != adapter_name:
            rows = tuple(factors.unbind(0) for factors in (self.qast_A[adapter_name], self.qast_B[adapter_name]))
            if not self._inside:
                return rows[0], rows[1]
            self._rows = (adapter_name, rows[0], rows[1])
        return self._rows[1:]

    def _planes(self, expert: int) -> ExpertPlanes:
        return ExpertPlanes(self.base_layer, expert, self._factors[expert])

    def __getitem__(self, expert: int | torch.Tensor) -> torch.Tensor | LazyWeight:
        index, name = int(expert), self._in_use()
        if name is None:
            return self.base_layer[index]
        row = self.experts[name].index(index) if index in self.experts[name] else None
        if not torch.is_grad_enabled() and self.observer is None:
            return self.base_layer[index] if row is None else self._correction(name, row).weight(self.base_layer.compute_dtype)
        planes = self._planes(index)
        # Also for an untouched expert: ZeRO-3 gathers the factors in every worker or in none.
        rows_a, rows_b = self._rows_of(name)

        def multiply(x: torch.Tensor) -> torch.Tensor:
            if row is None:
                y = _Frozen.apply(x, planes)
            else:
                self._used = True
                held = (self.qast_A[name], self.qast_B[name], row)
                y = CorrectedLinear.apply(x, rows_a[row], rows_b[row], planes, self.scaling[name], self.qast[name], held)
            if self.observer is not None:
                self.observer(index, x, y)
            return y

        return LazyWeight(multiply, (planes.out_features, planes.in_features), self.name)

    def _correction(self, adapter_name: str, row: int) -> Correction:
        expert = self.experts[adapter_name][row]
        return Correction(
            planes=self._planes(expert),
            base=self.base_scales[expert],
            a=self.qast_A[adapter_name].detach()[row],
            b=self.qast_B[adapter_name].detach()[row],
            scaling=self.scaling[adapter_name],
            qast=self.qast[adapter_name],
            expert=expert,
        )

    def corrections(self, adapter_name: str) -> Iterator[Correction]:
        for row in range(len(self.experts[adapter_name])):
            yield self._correction(adapter_name, row)

    def scale_bytes(self, adapter_name: str) -> torch.Tensor:
        """uint8 [E, O, G]: experts that the adapter does not train keep the base's bytes."""
        out = self.base_scales.clone()
        for correction in self.corrections(adapter_name):
            out[correction.expert] = correction.scale_bytes()
        return out


class _Frozen(torch.autograd.Function):
    """x W' of an expert that is not trained, without keeping W."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, planes: ExpertPlanes) -> torch.Tensor:
        ctx.planes = planes
        return torch.nn.functional.linear(x, planes.dequantize(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] @ ctx.planes.dequantize(grads[0].dtype), None


class _Join(torch.autograd.Function):
    """y as it is, with zero gradients for factors that had no part in it."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, *factors: torch.Tensor) -> torch.Tensor:
        ctx.shapes = [(factor.shape, factor.dtype, factor.device) for factor in factors]
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads[0], *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.shapes)


def prune_experts(model: nn.Module, adapter: str = "default") -> dict[str, list[int]]:
    """Drop the experts that training never reached (B still exactly zero) from an adapter, so that they are not stored; name -> experts that stay.

    The factors become new parameters: call it after training, before saving. The adapter's config then names the experts of every weight.
    """
    layers = [module for module in model.modules() if isinstance(module, ScaleQLoraExperts) and adapter in module.qast_A]
    kept: dict[str, list[int]] = {}
    for layer in layers:
        b = layer.qast_B[adapter].detach()
        rows = [row for row in range(b.shape[0]) if bool((b[row] != 0).any())]
        for factors in (layer.qast_A, layer.qast_B):
            old = factors[adapter]
            factors[adapter] = nn.Parameter(old.detach()[rows].clone(), requires_grad=old.requires_grad)
        kept[layer.name] = layer.experts[adapter] = [layer.experts[adapter][row] for row in rows]
    if layers:
        model.peft_config[adapter].experts = kept  # type: ignore[union-attr, index]
    return kept
