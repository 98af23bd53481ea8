"""`ScaleQLoraLinear`: an FP4Linear whose scales are corrected and rounded in every forward pass.

Forward  s = effective_scales(s0, A, B);  W = codes * s * t;  y = x W'.
Backward dL/dx = dy W;  dL/ds [O, G] = t * sum over a block of codes * (dy' x);  then the straight-through rule of `qast`.

Only x, A, B and the rounded scale bytes with their clip mask are kept between the two (x is shared by q/k/v and gate/up, as autograd keeps it for any
linear). W and the [O, I] product dy' x live inside one call, so the extra memory of a step is one layer's, whatever the depth. A and B stay float32.

Legend: T tokens, O out, I in, G = I / block, r rank.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import nn

from prism_ray.adapters.qast import effective_scales, require_finite, round_scales, straight_through
from prism_ray.adapters.scale_qlora.config import ScaleQLoraConfig
from prism_ray.core.errors import ConfigError, GridMismatch
from prism_ray.formats.modules import FP4Linear
from prism_ray.formats.tensor import apply_scales, unscaled


def require_fit(base_layer: FP4Linear, config: ScaleQLoraConfig, name: str) -> None:
    """Raise ConfigError for a rank above the layer's number of scale blocks, GridMismatch for an adapter of another grid or a format that is not FP4;
    `name` is the layer."""
    spec = base_layer.format
    if not spec.is_fp4:
        raise GridMismatch(
            f"scale adapters are for FP4 formats, this weight is {spec.name}", where=name, remedy="quantize the base as nvfp4 or mxfp4"
        )
    groups = base_layer.scales.shape[-1]
    if config.r > groups:
        raise ConfigError(
            f"rank {config.r} exceeds the {groups} scale blocks of a row ({base_layer.in_features} columns, {spec.name} block {spec.block})",
            where=name or "r",
            remedy=f"use a rank of at most {groups}, or leave the layer out",
        )
    if config.grid not in (None, spec.grid.name):
        raise GridMismatch(
            f"adapter was trained on grid {config.grid}, this weight has {spec.grid.name} scales",
            where=name,
            remedy="train it again on this format",
        )


class ScaleQLoraLinear(nn.Module, BaseTunerLayer):
    """PEFT tuner layer over one FP4Linear; any number of named adapters, one active at a time."""

    adapter_layer_names = ("qast_A", "qast_B")
    other_param_names = ("r", "scaling")

    def __init__(self, base_layer: FP4Linear, adapter_name: str, config: ScaleQLoraConfig, name: str = ""):
        super().__init__()
        self.base_layer = base_layer
        self.in_features, self.out_features = base_layer.in_features, base_layer.out_features
        self.name = name
        self.r: dict[str, int] = {}
        self.scaling: dict[str, float] = {}
        self.qast_A = nn.ParameterDict()
        self.qast_B = nn.ParameterDict()
        self._disable_adapters = False
        self.merged_adapters: list[str] = []
        self._unmerged_scales: list[torch.Tensor] = []
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, config)

    def update_layer(self, adapter_name: str, config: ScaleQLoraConfig, inference_mode: bool = False) -> None:
        """Add an adapter with A ~ U(-1/sqrt(G), 1/sqrt(G)) and B = 0, so that it starts as the base, bit for bit.

        Raises ConfigError for a rank above the number of scale blocks, GridMismatch for an adapter of another grid.
        """
        require_fit(self.base_layer, config, self.name)
        groups = self.base_layer.scales.shape[-1]
        device = self.base_layer.scales.device
        a = torch.empty(config.r, groups, dtype=torch.float32, device=device)
        nn.init.uniform_(a, -1 / math.sqrt(groups), 1 / math.sqrt(groups))
        self.r[adapter_name], self.scaling[adapter_name] = config.r, config.scaling
        self.qast_A[adapter_name] = nn.Parameter(a)
        self.qast_B[adapter_name] = nn.Parameter(torch.zeros(self.out_features, config.r, dtype=torch.float32, device=device))
        self.set_adapter(self.active_adapters, inference_mode=inference_mode)

    def active_name(self) -> str | None:
        """The one active adapter that this layer holds, or None; several raise ConfigError."""
        names = [name for name in self.active_adapters if name in self.qast_A]
        if len(names) > 1:
            raise ConfigError(
                f"adapters {names} are active at once", where=self.name, remedy="a scale plane has one correction: activate one"
            )
        return names[0] if names else None

    @property
    def base_scales(self) -> torch.Tensor:
        """The scale bytes uint8 [O, G] of the base, also while an adapter is merged over them."""
        return self._unmerged_scales[0] if self.merged_adapters else self.base_layer.scales

    def scale_bytes(self, adapter_name: str) -> torch.Tensor:
        """The on-grid scale bytes uint8 [O, G] of an adapter: what the forward uses and what a merge writes."""
        with torch.no_grad():
            a, b = self.qast_A[adapter_name], self.qast_B[adapter_name]
            return effective_scales(self.base_scales, a, b, self.scaling[adapter_name], self.base_layer.format)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        name = None if self.disable_adapters or self.merged else self.active_name()
        if self.disable_adapters and self.merged:
            self.unmerge()
        if name is None:
            return self.base_layer(x)
        y = _ScaleQLora.apply(x, self.qast_A[name], self.qast_B[name], self.base_layer, self.scaling[name])
        return y if self.base_layer.bias is None else y + self.base_layer.bias.to(y.dtype)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Write the adapter's scale bytes into the base layer; the replaced bytes are kept, so `unmerge` restores them exactly."""
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.qast_A]
        if len(names) + len(self.merged_adapters) > 1:
            raise ConfigError(
                f"cannot merge {names} over {self.merged_adapters}",
                where=self.name,
                remedy="a scale plane takes one correction: unmerge first",
            )
        for name in names:
            require_finite(self.name, self.qast_A[name], self.qast_B[name])
            data = self.scale_bytes(name)
            self._unmerged_scales.append(self.base_layer.scales)
            self.base_layer.scales = data
            self.merged_adapters.append(name)

    def unmerge(self) -> None:
        """Put back the scale bytes that `merge` replaced."""
        while self.merged_adapters:
            self.merged_adapters.pop()
            self.base_layer.scales = self._unmerged_scales.pop()

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """False: a correction of scales is no low-rank weight update."""
        return False


class _ScaleQLora(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, base: FP4Linear, scaling: float) -> torch.Tensor:
        data, inside = round_scales(base.scales, a, b, scaling, base.format)
        # The parameters themselves are saved, never views of them: ZeRO-3 swaps their data between forward and backward. The bytes and the
        # mask cost two bytes a block, an eighth of the codes; rounding again in backward would cost three more passes in float64.
        ctx.save_for_backward(x, a, b, data, inside)
        ctx.base, ctx.scaling = base, scaling
        return torch.nn.functional.linear(x, base.dequantize(x.dtype, base.format.grid.decode(data)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, a, b, data, inside = ctx.saved_tensors
        base: FP4Linear = ctx.base
        grad_y = grads[0].reshape(-1, base.out_features)
        grad_a = grad_b = grad_x = None
        weight = unscaled(base.code_bytes, base.format.codes, x.dtype)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            outer = (grad_y.T @ x.reshape(-1, base.in_features)).mul_(weight)
            grad_scale = outer.view(*data.shape, base.format.block).sum(-1, dtype=torch.float32).mul_(base.factor)
            del outer
            grad_a, grad_b = straight_through(grad_scale, base.scales, inside, a, b, ctx.scaling, base.format)
        if ctx.needs_input_grad[0]:
            grad_x = (grad_y @ apply_scales(weight, base.format.grid.decode(data), base.factor)).view_as(x)
        return grad_x, grad_a, grad_b, None, None
