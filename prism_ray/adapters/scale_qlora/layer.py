"""`ScaleQLoraLinear`: an FP4Linear whose scales are corrected and rounded in every forward pass; `ScaleQLoraLayer`: what it shares with experts.

Forward  s = effective_scales(s0, A, B);  W = codes * s * t;  y = x W'.
Backward dL/dx = dy W;  dL/ds [O, G] = t * sum over a block of codes * (dy' x);  then the straight-through rule of `qast`.

Only x, A, B and the rounded scale bytes with their clip mask are kept between the two (x is shared by q/k/v and gate/up, as autograd keeps it for any
linear). W and the [O, I] product dy' x live inside one call, so the extra memory of a step is one layer's, whatever the depth. A and B stay float32.

Without QAST s = clipped_scales(s0, A, B) in float32; W is then made in float32 and cast once, for a scale in bfloat16 would be rounded after all.

Legend: T tokens, O out, I in, G = I / block, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import nn

from prism_ray.adapters.qast import clipped_scales, effective_scales, require_finite, round_scales, straight_through
from prism_ray.adapters.scale_qlora.config import ScaleQLoraConfig
from prism_ray.core.errors import ConfigError, GridMismatch
from prism_ray.formats.modules import FP4Linear, QuantizedModule
from prism_ray.formats.spec import FormatSpec
from prism_ray.formats.tensor import apply_scales, unscaled


class Planes(Protocol):
    """One weight [O, I] as planes: an FP4Linear, or one expert of FP4Experts."""

    @property
    def format(self) -> FormatSpec: ...
    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...
    @property
    def factor(self) -> float: ...
    @property
    def code_bytes(self) -> torch.Tensor: ...
    @property
    def scales(self) -> torch.Tensor: ...
    def dequantize(self, dtype: torch.dtype, scale: torch.Tensor | None = None) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What an adapter does to one weight [O, I]: planes, its base scale bytes uint8 [O, G], factors A [r, G] and B [O, r]; expert: its number, or None."""

    planes: Planes
    base: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    qast: bool
    expert: int | None = None

    def scale_bytes(self) -> torch.Tensor:
        """What a merge writes."""
        return effective_scales(self.base, self.a, self.b, self.scaling, self.planes.format)

    def forward_scales(self) -> torch.Tensor:
        """float32 [O, G]: what the unmerged forward multiplies by."""
        return self.planes.format.grid.decode(self.scale_bytes()) if self.qast else self.real_scales()

    def real_scales(self) -> torch.Tensor:
        """float32 [O, G]: the clipped correction before the rounding."""
        return clipped_scales(self.base, self.a, self.b, self.scaling, self.planes.format)[0]

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        """The unmerged forward's weight."""
        return dense(self.planes, dtype, self.forward_scales(), self.qast)


def dense(planes: Planes, dtype: torch.dtype, scale: torch.Tensor, on_grid: bool) -> torch.Tensor:
    """The weight under decoded float32 scales; those off the grid need float32 until the one rounding at the end."""
    return planes.dequantize(dtype, scale) if on_grid else planes.dequantize(torch.float32, scale).to(dtype)


def require_fit(base_layer: QuantizedModule, config: ScaleQLoraConfig, name: str) -> None:
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
            f"rank {config.r} exceeds the {groups} scale blocks of a row ({groups * spec.block} columns, {spec.name} block {spec.block})",
            where=name or "r",
            remedy=f"use a rank of at most {groups}, or leave the layer out",
        )
    if config.grid not in (None, spec.grid.name):
        raise GridMismatch(
            f"adapter was trained on grid {config.grid}, this weight has {spec.grid.name} scales",
            where=name,
            remedy="train it again on this format",
        )


class ScaleQLoraLayer(nn.Module, BaseTunerLayer):
    """PEFT tuner layer over one quantized module; any number of named adapters, one active at a time."""

    adapter_layer_names: tuple[str, ...] = ("qast_A", "qast_B")
    other_param_names: tuple[str, ...] = ("r", "scaling", "qast", "experts")
    base_layer: QuantizedModule

    def __init__(self, base_layer: QuantizedModule, adapter_name: str, config: ScaleQLoraConfig, name: str = ""):
        super().__init__()
        self.base_layer = base_layer
        self.name = name
        self.r: dict[str, int] = {}
        self.scaling: dict[str, float] = {}
        self.qast: dict[str, bool] = {}
        self.experts: dict[str, list[int]] = {}  # of expert layers: the experts of each adapter
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
        leading = self._leading(adapter_name, config)
        rows, groups = self.base_layer.scales.shape[-2:]
        device = self.base_layer.scales.device
        a = torch.empty(*leading, config.r, groups, dtype=torch.float32, device=device)
        nn.init.uniform_(a, -1 / math.sqrt(groups), 1 / math.sqrt(groups))
        self.r[adapter_name], self.scaling[adapter_name], self.qast[adapter_name] = config.r, config.scaling, config.qast
        self.qast_A[adapter_name] = nn.Parameter(a)
        self.qast_B[adapter_name] = nn.Parameter(torch.zeros(*leading, rows, config.r, dtype=torch.float32, device=device))
        self.set_adapter(self.active_adapters, inference_mode=inference_mode)

    def _leading(self, adapter_name: str, config: ScaleQLoraConfig) -> tuple[int, ...]:
        """Dimensions before [r, G] and [O, r] of the factors of an adapter that is being added."""
        return ()

    def corrections(self, adapter_name: str) -> Iterator[Correction]:
        """The weights that an adapter corrects, over the base scales, factors detached."""
        raise NotImplementedError

    def active_name(self) -> str | None:
        """The one active adapter that this layer holds, or None; several raise ConfigError."""
        names = [name for name in self.active_adapters if name in self.qast_A]
        if len(names) > 1:
            raise ConfigError(
                f"adapters {names} are active at once", where=self.name, remedy="a scale plane has one correction: activate one"
            )
        return names[0] if names else None

    def _in_use(self) -> str | None:
        """The adapter that a forward pass must apply itself: the active one, unless it is disabled or merged."""
        name = None if self.disable_adapters or self.merged else self.active_name()
        if self.disable_adapters and self.merged:
            self.unmerge()
        return name

    @property
    def base_scales(self) -> torch.Tensor:
        """The scale bytes uint8 [..., O, G] of the base, also while an adapter is merged over them."""
        return self._unmerged_scales[0] if self.merged_adapters else self.base_layer.scales

    def scale_bytes(self, adapter_name: str) -> torch.Tensor:
        """The on-grid scale bytes uint8 [..., O, G] of an adapter: what a merge writes and, with QAST, what the forward uses."""
        raise NotImplementedError

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


class ScaleQLoraLinear(ScaleQLoraLayer):
    """The tuner layer of one FP4Linear: A [r, G], B [O, r]."""

    base_layer: FP4Linear

    def __init__(self, base_layer: FP4Linear, adapter_name: str, config: ScaleQLoraConfig, name: str = ""):
        super().__init__(base_layer, adapter_name, config, name)
        self.in_features, self.out_features = base_layer.in_features, base_layer.out_features

    def corrections(self, adapter_name: str) -> Iterator[Correction]:
        a, b = self.qast_A[adapter_name].detach(), self.qast_B[adapter_name].detach()
        scaling, qast = self.scaling[adapter_name], self.qast[adapter_name]
        yield Correction(planes=self.base_layer, base=self.base_scales, a=a, b=b, scaling=scaling, qast=qast)

    def scale_bytes(self, adapter_name: str) -> torch.Tensor:
        return next(self.corrections(adapter_name)).scale_bytes()

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        name = self._in_use()
        if name is None:
            return self.base_layer(x)
        y = CorrectedLinear.apply(x, self.qast_A[name], self.qast_B[name], self.base_layer, self.scaling[name], self.qast[name], None)
        return y if self.base_layer.bias is None else y + self.base_layer.bias.to(y.dtype)


class CorrectedLinear(torch.autograd.Function):
    """y = x W' [T, O] of one corrected weight. held: None, or (A, B, index) where `a` and `b` are rows of the parameters A and B."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        planes: Planes,
        scaling: float,
        qast: bool,
        held: tuple[torch.Tensor, torch.Tensor, int] | None,
    ) -> torch.Tensor:
        rule = round_scales if qast else clipped_scales
        scales, inside = rule(planes.scales, a, b, scaling, planes.format)
        # The parameters themselves are saved, never views of them: ZeRO-3 swaps their data between forward and backward. The bytes and the
        # mask cost two bytes a block, an eighth of the codes; rounding again in backward would cost three more passes in float64.
        whole_a, whole_b, ctx.index = (a, b, None) if held is None else held
        ctx.save_for_backward(x, whole_a, whole_b, scales, inside)
        ctx.planes, ctx.scaling, ctx.qast = planes, scaling, qast
        decoded = planes.format.grid.decode(scales) if qast else scales
        return torch.nn.functional.linear(x, dense(planes, x.dtype, decoded, qast))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, a, b, scales, inside = ctx.saved_tensors
        if ctx.index is not None:
            a, b = a[ctx.index], b[ctx.index]
        planes: Planes = ctx.planes
        grad_y = grads[0].reshape(-1, planes.out_features)
        grad_a = grad_b = grad_x = None
        weight = unscaled(planes.code_bytes, planes.format.codes, x.dtype)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            outer = (grad_y.T @ x.reshape(-1, planes.in_features)).mul_(weight)
            grad_scale = outer.view(*scales.shape, planes.format.block).sum(-1, dtype=torch.float32).mul_(planes.factor)
            del outer
            grad_a, grad_b = straight_through(grad_scale, planes.scales, inside, a, b, ctx.scaling, planes.format)
        if ctx.needs_input_grad[0]:
            decoded = planes.format.grid.decode(scales) if ctx.qast else scales
            held = weight if ctx.qast else weight.to(torch.float32)  # off the grid: `dense`
            grad_x = (grad_y @ apply_scales(held, decoded, planes.factor).to(x.dtype)).view_as(x)
        return grad_x, grad_a, grad_b, None, None, None, None
