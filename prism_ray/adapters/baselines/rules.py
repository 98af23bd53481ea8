"""What a baseline does to one weight, as arithmetic on its planes: `QatLora`, `Peqa`, `PeqaBlock`.

| rule | trained | weight of the unmerged forward | a merge writes |
|---|---|---|---|
| QatLora | A [r, I], B [O, r] | grid(W0 + scaling * B A) | those codes and scales: exact |
| Peqa | d [O] | W0 * (1 + d) | codes verbatim, scale bytes grid(s0 * (1 + d)): a row's factor fits no native format but through its block scales |
| PeqaBlock | d [O, G] | codes * s0 * (1 + d) * t | codes verbatim, scale bytes grid(s0 * (1 + d)) |

d is relative to the base scale, so that one learning rate fits all blocks, and starts at zero. A scale of zero stays zero.

*Gradients.* QatLora: straight through the whole quantizer, so dA = scaling * B' dW and dB = scaling * dW A' with dW = dy' x, without ever forming dW [O, I]. Peqa: dd = sum over tokens of dy * (x W0').
PeqaBlock: dd = s0 t * sum over a block of codes * (dy' x), as for Scale-QLoRA.

*Kept between forward and backward.* QatLora: x and W' (rounding again would cost what the forward cost). Peqa: x W0' in the dtype of x. PeqaBlock: x; W' is made again.

Legend: T tokens, O out, I in, G = I / block, r rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from prism_ray.adapters.baselines.config import BaselineConfig, QatLoraConfig
from prism_ray.adapters.baselines.fake_quant import fake_quantize, requantized
from prism_ray.adapters.scale_qlora.layer import Planes, dense
from prism_ray.core.errors import ConfigError
from prism_ray.formats.tensor import unscaled


class Rule(Protocol):
    """One baseline with the settings of one adapter. names: of its parameters."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @classmethod
    def of(cls, config: BaselineConfig) -> Rule:
        """The rule of an adapter."""

    def initial(
        self, rows: int, columns: int, groups: int, leading: tuple[int, ...], device: torch.device, where: str
    ) -> tuple[Tensor, ...]:
        """Parameters, float32, of a weight [*leading, O, I] that start at the base."""

    def multiply(self, x: Tensor, planes: Planes, parameters: tuple[Tensor, ...]) -> Tensor:
        """x W' [.., O]."""

    def weight(self, planes: Planes, parameters: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """W' [O, I]."""

    def planes(self, planes: Planes, parameters: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """(codes uint8 [O, I/2], scale bytes uint8 [O, G]) that a merge writes."""


@dataclass(frozen=True, kw_only=True)
class QatLora:
    """See the module docstring."""

    r: int
    scaling: float
    scale_rule: str | None = None
    names: tuple[str, ...] = ("qat_A", "qat_B")

    @classmethod
    def of(cls, config: BaselineConfig) -> QatLora:
        assert isinstance(config, QatLoraConfig)
        return cls(r=config.r, scaling=config.scaling, scale_rule=config.scale_rule)

    def initial(
        self, rows: int, columns: int, groups: int, leading: tuple[int, ...], device: torch.device, where: str
    ) -> tuple[Tensor, ...]:
        if self.r > min(rows, columns):
            raise ConfigError(
                f"rank {self.r} exceeds the smaller side of a weight {rows} x {columns}", where=where, remedy="use a smaller rank"
            )
        a = torch.empty(*leading, self.r, columns, device=device)
        # As PEFT's LoRA: kaiming_uniform with a = sqrt(5) over the columns is U(-1/sqrt(I), 1/sqrt(I)).
        nn.init.uniform_(a, -1 / math.sqrt(columns), 1 / math.sqrt(columns))
        return a, torch.zeros(*leading, rows, self.r, device=device)

    def multiply(self, x: Tensor, planes: Planes, parameters: tuple[Tensor, ...]) -> Tensor:
        y: Tensor = _FakeQuantized.apply(x, *parameters, planes, self)
        return y

    def weight(self, planes: Planes, parameters: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        a, b = parameters
        return fake_quantize(planes, a.detach(), b.detach(), self.scaling, dtype, self.scale_rule)

    def planes(self, planes: Planes, parameters: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        a, b = parameters
        return requantized(planes, a, b, self.scaling, self.scale_rule)


class _FakeQuantized(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, planes: Planes, rule: QatLora) -> Tensor:
        weight = fake_quantize(planes, a, b, rule.scaling, x.dtype, rule.scale_rule)
        ctx.save_for_backward(x, a, b, weight)
        ctx.scaling = rule.scaling
        return nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b, weight = ctx.saved_tensors
        grad_y, rows = grads[0].flatten(0, -2), x.flatten(0, -2)
        grad_a = grad_b = grad_x = None
        if ctx.needs_input_grad[1]:
            grad_a = ((grad_y @ b.to(x.dtype)).T @ rows).to(a.dtype).mul_(ctx.scaling)
        if ctx.needs_input_grad[2]:
            grad_b = (grad_y.T @ (rows @ a.to(x.dtype).T)).to(b.dtype).mul_(ctx.scaling)
        if ctx.needs_input_grad[0]:
            grad_x = grads[0] @ weight
        return grad_x, grad_a, grad_b, None, None


def _grown(planes: Planes, delta: Tensor) -> Tensor:
    """s0 * (1 + d), float64 [O, G]; d broadcasts."""
    return planes.format.grid.decode(planes.scales).to(torch.float64) * (1.0 + delta.detach().to(torch.float64))


def _rounded(planes: Planes, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Codes as they are, and s0 * (1 + d) on the grid; a scale that is not zero stays above zero."""
    grid, real = planes.format.grid, _grown(planes, delta)
    data = real.clamp(grid.smallest, grid.largest).to(torch.float32).masked_fill_(grid.decode(planes.scales) == 0, 0.0)
    return planes.code_bytes, grid.encode(data)


@dataclass(frozen=True, kw_only=True)
class Peqa:
    """See the module docstring."""

    names: tuple[str, ...] = ("peqa_delta",)

    @classmethod
    def of(cls, config: BaselineConfig) -> Peqa:
        return cls()

    def initial(
        self, rows: int, columns: int, groups: int, leading: tuple[int, ...], device: torch.device, where: str
    ) -> tuple[Tensor, ...]:
        return (torch.zeros(*leading, rows, device=device),)

    def multiply(self, x: Tensor, planes: Planes, parameters: tuple[Tensor, ...]) -> Tensor:
        y: Tensor = _RowScaled.apply(x, parameters[0], planes)
        return y

    def weight(self, planes: Planes, parameters: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return planes.dequantize(torch.float32).mul_(1.0 + parameters[0].detach()[:, None]).to(dtype)

    def planes(self, planes: Planes, parameters: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        return _rounded(planes, parameters[0][:, None])


class _RowScaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor, planes: Planes) -> Tensor:
        y = nn.functional.linear(x, planes.dequantize(x.dtype))
        ctx.save_for_backward(y, delta)
        ctx.planes = planes
        return (y * (1.0 + delta)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y, delta = ctx.saved_tensors
        grad_x = grad_delta = None
        if ctx.needs_input_grad[1]:
            grad_delta = (grads[0].to(delta.dtype) * y).flatten(0, -2).sum(0)
        if ctx.needs_input_grad[0]:
            grad_x = (grads[0] * (1.0 + delta)).to(grads[0].dtype) @ ctx.planes.dequantize(grads[0].dtype)
        return grad_x, grad_delta, None


@dataclass(frozen=True, kw_only=True)
class PeqaBlock:
    """See the module docstring."""

    names: tuple[str, ...] = ("peqablock_delta",)

    @classmethod
    def of(cls, config: BaselineConfig) -> PeqaBlock:
        return cls()

    def initial(
        self, rows: int, columns: int, groups: int, leading: tuple[int, ...], device: torch.device, where: str
    ) -> tuple[Tensor, ...]:
        return (torch.zeros(*leading, rows, groups, device=device),)

    def multiply(self, x: Tensor, planes: Planes, parameters: tuple[Tensor, ...]) -> Tensor:
        y: Tensor = _BlockScaled.apply(x, parameters[0], planes)
        return y

    def weight(self, planes: Planes, parameters: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return dense(planes, dtype, _block_scales(planes, parameters[0].detach()), on_grid=False)

    def planes(self, planes: Planes, parameters: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        return _rounded(planes, parameters[0])


def _block_scales(planes: Planes, delta: Tensor) -> Tensor:
    return planes.format.grid.decode(planes.scales) * (1.0 + delta)


class _BlockScaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor, planes: Planes) -> Tensor:
        ctx.save_for_backward(x, delta)
        ctx.planes = planes
        return nn.functional.linear(x, dense(planes, x.dtype, _block_scales(planes, delta), on_grid=False))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, delta = ctx.saved_tensors
        planes: Planes = ctx.planes
        grad_x = grad_delta = None
        if ctx.needs_input_grad[1]:
            outer = grads[0].flatten(0, -2).T @ x.flatten(0, -2)
            outer.mul_(unscaled(planes.code_bytes, planes.format.codes, outer.dtype))
            grad_delta = outer.view(*delta.shape, planes.format.block).sum(-1, dtype=delta.dtype)
            grad_delta.mul_(planes.format.grid.decode(planes.scales)).mul_(planes.factor)
        if ctx.needs_input_grad[0]:
            grad_x = grads[0] @ dense(planes, x.dtype, _block_scales(planes, delta), on_grid=False)
        return grad_x, grad_delta, None
