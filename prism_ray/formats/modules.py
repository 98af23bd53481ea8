"""Modules that hold quantized weights: `FP4Linear` and the expert stack `FP4Experts`.

Both keep packed planes only. A dequantized weight lives inside one call: forward builds it, multiplies and drops it; backward builds it
again for the gradient of the input. So the memory of a model is its planes plus one layer.

Planes keep their bytes under `.to(dtype)`. Codes and scales are uint8 buffers by default. DeepSpeed ZeRO-3 shards parameters only, of a float dtype, so
`set_code_storage(model, "parameter")` re-registers the same code bytes as a frozen bfloat16-typed parameter [O, I/4] (bytes viewed, never
converted); its module reads the bytes back through a view.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from prism_ray.core.errors import FormatError
from prism_ray.formats.spec import FormatSpec
from prism_ray.formats.tensor import QuantTensor, dequantize

CodeStorage = Literal["buffer", "parameter"]


class QuantizedModule(nn.Module):
    """Planes of one quantized weight of shape [..., O, I]; subclasses say how it is used."""

    codes: torch.Tensor
    scales: torch.Tensor
    tensor_scale: torch.Tensor
    divisor: torch.Tensor | None

    def __init__(self, tensor: QuantTensor):
        super().__init__()
        self.format: FormatSpec = tensor.format
        self.register_buffer("codes", tensor.codes)
        self.register_buffer("scales", tensor.scales)
        self.register_buffer("tensor_scale", tensor.tensor_scale)
        self.register_buffer("divisor", tensor.divisor)
        self._shape = tensor.shape
        # A Python float: reading the 0-dim buffer in every forward would wait for the device.
        self._factor = float(tensor.tensor_scale) if tensor.tensor_scale.ndim == 0 else None

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizedModule:
        # `model.to(dtype)` (which DeepSpeed and training loops call) casts float buffers and parameters: a rounded tensor scale is another weight,
        # and code bytes behind a bfloat16 type would be converted as if they were numbers. Planes follow the device only.
        before = {name: value.data for name in ("codes", "tensor_scale", "divisor") if (value := getattr(self, name)) is not None}
        super()._apply(fn, recurse)
        for name, data in before.items():
            current = getattr(self, name)
            if current.dtype != data.dtype:
                data = torch.empty_like(data, device=current.device) if data.is_meta else data.to(current.device)
                setattr(self, name, nn.Parameter(data, requires_grad=False) if isinstance(current, nn.Parameter) else data)
        return self

    @property
    def factor(self) -> float:
        """The tensor scale of a 2-D weight as a Python float."""
        return float(self.tensor_scale) if self._factor is None else self._factor

    @property
    def code_bytes(self) -> torch.Tensor:
        """The packed codes as uint8 [..., O, I/2], whichever way they are stored."""
        codes = self.codes
        return codes if codes.dtype == torch.uint8 else codes.detach().view(torch.uint8)

    def quant_tensor(self) -> QuantTensor:
        """The planes as a QuantTensor (views, no copy)."""
        return QuantTensor(
            codes=self.code_bytes, scales=self.scales, tensor_scale=self.tensor_scale, format=self.format, divisor=self.divisor
        )

    def dequantize(self, dtype: torch.dtype, scale: torch.Tensor | None = None) -> torch.Tensor:
        """The weight in `dtype`; scale: decoded float32 scales to use instead of the base plane's."""
        scale = self.format.grid.decode(self.scales) if scale is None else scale
        factor = self.tensor_scale if self._factor is None else self._factor
        return dequantize(self.code_bytes, self.format.codes, scale, factor, dtype)

    def set_code_storage(self, storage: CodeStorage) -> None:
        """Hold the codes as a uint8 buffer or as a frozen bfloat16-typed parameter; the bytes stay the same."""
        data = self.code_bytes.clone() if isinstance(self.codes, nn.Parameter) else self.codes
        if storage == "parameter" and data.shape[-1] % 2:
            raise FormatError(f"{data.shape[-1]} code bytes a row cannot be viewed as bfloat16")
        del self.codes
        if storage == "buffer":
            self.register_buffer("codes", data)
        else:
            self.register_parameter("codes", nn.Parameter(data.contiguous().view(torch.bfloat16), requires_grad=False))


class FP4Linear(QuantizedModule):
    """y = x W' + bias with W [O, I] held as planes of any registered format. Forward computes in the dtype of `x` (float32 or bfloat16)."""

    bias: torch.Tensor | None

    def __init__(self, tensor: QuantTensor, bias: torch.Tensor | None = None):
        super().__init__(tensor)
        self.out_features, self.in_features = tensor.shape
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = _FrozenLinear.apply(x, self)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, format={self.format.name}, bias={self.bias is not None}"


class _FrozenLinear(torch.autograd.Function):
    """x @ W' without keeping W: backward dequantizes again, and a frozen weight needs no saved input either."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: FP4Linear) -> torch.Tensor:
        ctx.module = module
        return torch.nn.functional.linear(x, module.dequantize(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] @ ctx.module.dequantize(grads[0].dtype), None


class FP4Experts(QuantizedModule):
    """A fused expert weight [E, O, I] as planes, indexable by expert.

    Takes the place of the 3-D parameter of a transformers experts module, whose eager forward reads `self.gate_up_proj[expert]`: only the experts
    that a batch hits are dequantized, one at a time. `compute_dtype` is the dtype of the slices.
    """

    def __init__(self, tensor: QuantTensor, compute_dtype: torch.dtype):
        super().__init__(tensor)
        self.compute_dtype = compute_dtype

    def __getitem__(self, expert: int | torch.Tensor) -> torch.Tensor:
        return self.quant_tensor()[int(expert)].dequantize(self.compute_dtype)

    def extra_repr(self) -> str:
        return f"shape={list(self._shape)}, format={self.format.name}"


def quantized_modules(model: nn.Module) -> Iterator[tuple[str, QuantizedModule]]:
    """(name, module) of every quantized weight; the name is the module's path, without PEFT's `base_layer`."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            yield name.removesuffix(".base_layer"), module


def set_code_storage(model: nn.Module, storage: CodeStorage) -> None:
    """Apply QuantizedModule.set_code_storage to every quantized weight of a model."""
    for _, module in quantized_modules(model):
        module.set_code_storage(storage)


def planes(model: nn.Module) -> dict[str, QuantTensor]:
    """Every quantized weight of a model by name, for fingerprints and writers (views, no copy)."""
    return {name: module.quant_tensor() for name, module in quantized_modules(model)}
