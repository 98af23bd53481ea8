"""PEFT tuner layers of the baselines: `BaselineLinear` over an FP4Linear, `BaselineExperts` over the fused experts of one layer.

The layer holds named adapters, each with its parameters and a `Rule` (`baselines.rules`) that knows the arithmetic; one adapter is active at a time. `merge` puts the rule's planes
into the base layer and keeps the replaced ones, so `unmerge` gives the base back byte for byte, whatever the merge lost.

Experts are served one by one, as `scale_qlora.experts` does: transformers' eager forward asks for `gate_up_proj[e]` and gets a `LazyWeight`, so no dense weight is kept by autograd. The parameters of
all experts are split once in a forward pass; indexing per expert would write a gradient of the size of all experts for every one that is hit. An expert without a token has no
gradient in that pass.

Refuses: codes held as parameters (ZeRO-3) at a merge that changes them. Legend: E experts, O rows, I columns, G blocks a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from prism_ray.adapters.baselines.config import BaselineConfig
from prism_ray.adapters.baselines.rules import Rule
from prism_ray.adapters.scale_qlora.experts import ExpertPlanes, LazyWeight
from prism_ray.adapters.scale_qlora.layer import Planes
from prism_ray.core.errors import ConfigError, FormatError, GridMismatch, ModelError
from prism_ray.formats.modules import FP4Experts, FP4Linear, QuantizedModule


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """One weight [O, I] under one adapter, parameters detached. expert: its number in a fused weight, or None."""

    layer_planes: Planes
    parameters: tuple[Tensor, ...]
    rule: Rule
    expert: int | None = None

    def base(self) -> Tensor:
        """float32 W0."""
        return self.layer_planes.dequantize(torch.float32)

    def weight(self) -> Tensor:
        """float32 W' of the unmerged forward."""
        return self.rule.weight(self.layer_planes, self.parameters, torch.float32)

    def planes(self) -> tuple[Tensor, Tensor]:
        """(codes, scale bytes) that a merge writes."""
        return self.rule.planes(self.layer_planes, self.parameters)


def require_fit(base_layer: QuantizedModule, config: BaselineConfig, name: str) -> None:
    """Raise GridMismatch for a format that is not FP4, or an adapter of another grid; `name` is the layer."""
    spec = base_layer.format
    if not spec.is_fp4:
        raise GridMismatch(
            f"method {config.METHOD} is for FP4 formats, this weight is {spec.name}",
            where=name,
            remedy="quantize the base as nvfp4 or mxfp4",
        )
    if config.grid not in (None, spec.grid.name):
        raise GridMismatch(
            f"adapter was trained on grid {config.grid}, this weight has {spec.grid.name} scales",
            where=name,
            remedy="train it again on this format",
        )


class BaselineLayer(nn.Module, BaseTunerLayer):
    """What linear and expert layers share."""

    other_param_names: tuple[str, ...] = ("rules",)
    base_layer: QuantizedModule

    def __init__(self, base_layer: QuantizedModule, adapter_name: str, config: BaselineConfig, kind: type[Rule], name: str = ""):
        super().__init__()
        self.base_layer = base_layer
        self.name = name
        self._kind = kind
        self.rules: dict[str, Rule] = {}
        self.adapter_layer_names: tuple[str, ...] = kind.of(config).names
        for parameter in self.adapter_layer_names:
            setattr(self, parameter, nn.ParameterDict())
        self._disable_adapters = False
        self.merged_adapters: list[str] = []
        self._unmerged: list[tuple[Tensor, Tensor]] = []
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, config)

    def update_layer(self, adapter_name: str, config: BaselineConfig, inference_mode: bool = False) -> None:
        """Add an adapter that starts at the base."""
        require_fit(self.base_layer, config, self.name)
        rule = self._kind.of(config)
        *leading, rows, groups = self.base_layer.scales.shape
        columns = groups * self.base_layer.format.block
        values = rule.initial(rows, columns, groups, tuple(leading), self.base_layer.scales.device, self.name)
        self.rules[adapter_name] = rule
        for parameter, value in zip(rule.names, values, strict=True):
            getattr(self, parameter)[adapter_name] = nn.Parameter(value)
        self.set_adapter(self.active_adapters, inference_mode=inference_mode)

    def parameters_of(self, adapter_name: str) -> tuple[nn.Parameter, ...]:
        """The trained tensors of an adapter, in the order of its rule."""
        return tuple(getattr(self, parameter)[adapter_name] for parameter in self.rules[adapter_name].names)

    def adapted(self, adapter_name: str) -> Iterator[Adapted]:
        """The weights that an adapter changes, over the base's planes."""
        raise NotImplementedError

    def merged_planes(self, adapter_name: str) -> tuple[Tensor, Tensor]:
        """(codes uint8 [.., O, I/2], scale bytes uint8 [.., O, G]) of the whole weight after a merge. Raises FormatError for parameters that are not finite."""
        for parameter in self.parameters_of(adapter_name):
            if not bool(torch.isfinite(parameter).all()):
                raise FormatError("adapter parameters hold NaN or infinity", where=self.name, remedy="training diverged: use a lower rate")
        found = [weight.planes() for weight in self.adapted(adapter_name)]
        codes, scales = (list(part) for part in zip(*found, strict=True))
        return (codes[0], scales[0]) if self.base_layer.scales.ndim == 2 else (torch.stack(codes), torch.stack(scales))

    def in_use(self) -> str | None:
        """The adapter that a forward pass must apply itself: the active one, unless it is disabled or merged; several raise ConfigError."""
        if self.disable_adapters or self.merged:
            if self.disable_adapters and self.merged:
                self.unmerge()
            return None
        names = [name for name in self.active_adapters if name in self.rules]
        if len(names) > 1:
            raise ConfigError(f"adapters {names} are active at once", where=self.name, remedy="activate one")
        return names[0] if names else None

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Put the adapter's planes into the base layer; the replaced ones are kept, so `unmerge` restores them exactly."""
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.rules]
        if len(names) + len(self.merged_adapters) > 1:
            raise ConfigError(f"cannot merge {names} over {self.merged_adapters}", where=self.name, remedy="unmerge first")
        for name in names:
            codes, scales = self.merged_planes(name)
            if isinstance(self.base_layer.codes, nn.Parameter) and not torch.equal(codes, self.base_layer.code_bytes):
                raise ModelError("a merge changes codes that are held as parameters", where=self.name, remedy="merge without ZeRO-3")
            self._unmerged.append((self.base_layer.codes, self.base_layer.scales))
            self._put(codes, scales)
            self.merged_adapters.append(name)

    def unmerge(self) -> None:
        """Put back the planes that `merge` replaced."""
        while self.merged_adapters:
            self.merged_adapters.pop()
            self._put(*self._unmerged.pop())

    def _put(self, codes: Tensor, scales: Tensor) -> None:
        if not isinstance(self.base_layer.codes, nn.Parameter):
            self.base_layer.codes = codes
        self.base_layer.scales = scales

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """False: these are no low-rank updates added to the output."""
        return False


class BaselineLinear(BaselineLayer):
    """The tuner layer of one FP4Linear."""

    base_layer: FP4Linear

    def __init__(self, base_layer: FP4Linear, adapter_name: str, config: BaselineConfig, kind: type[Rule], name: str = ""):
        super().__init__(base_layer, adapter_name, config, kind, name)
        self.in_features, self.out_features = base_layer.in_features, base_layer.out_features

    def adapted(self, adapter_name: str) -> Iterator[Adapted]:
        parameters = tuple(parameter.detach() for parameter in self.parameters_of(adapter_name))
        yield Adapted(layer_planes=self.base_layer, parameters=parameters, rule=self.rules[adapter_name])

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        name = self.in_use()
        if name is None:
            y: Tensor = self.base_layer(x)
            return y
        y = self.rules[name].multiply(x, self.base_layer, self.parameters_of(name))
        return y if self.base_layer.bias is None else y + self.base_layer.bias.to(y.dtype)


class BaselineExperts(BaselineLayer):
    """The tuner layer of one fused expert weight, indexable by expert as FP4Experts is; it adapts all experts."""

    base_layer: FP4Experts

    def __init__(self, base_layer: FP4Experts, adapter_name: str, config: BaselineConfig, kind: type[Rule], name: str = ""):
        super().__init__(base_layer, adapter_name, config, kind, name)
        # Python floats: reading them in every forward would wait for the device.
        self._factors: list[float] = base_layer.tensor_scale.tolist()
        self._rows: tuple[str, list[tuple[Tensor, ...]]] | None = None
        self._inside = False
        self._hooks: list[RemovableHandle] = []

    def attach(self, parent: nn.Module) -> None:
        """Learn from hooks on the experts module when a forward pass begins and ends."""
        self._hooks = [parent.register_forward_pre_hook(self._begin), parent.register_forward_hook(self._end, always_call=True)]

    def detach(self) -> None:
        """Take the hooks off again."""
        while self._hooks:
            self._hooks.pop().remove()

    def _begin(self, *_: Any) -> None:
        self._rows, self._inside = None, True

    def _end(self, *_: Any) -> None:
        self._rows, self._inside = None, False

    def _rows_of(self, name: str) -> list[tuple[Tensor, ...]]:
        """Parameters by expert, split once in a forward pass."""
        if self._rows is not None and self._rows[0] == name:
            return self._rows[1]
        rows = list(zip(*(parameter.unbind(0) for parameter in self.parameters_of(name)), strict=True))
        if self._inside:
            self._rows = (name, rows)
        return rows

    def adapted(self, adapter_name: str) -> Iterator[Adapted]:
        rows = zip(*(parameter.detach().unbind(0) for parameter in self.parameters_of(adapter_name)), strict=True)
        for expert, parameters in enumerate(rows):
            planes = ExpertPlanes(self.base_layer, expert, self._factors[expert])
            yield Adapted(layer_planes=planes, parameters=parameters, rule=self.rules[adapter_name], expert=expert)

    def __getitem__(self, expert: int | Tensor) -> Tensor | LazyWeight:
        index, name = int(expert), self.in_use()
        if name is None:
            return self.base_layer[index]
        rule, planes = self.rules[name], ExpertPlanes(self.base_layer, index, self._factors[index])
        if not torch.is_grad_enabled():
            parameters = tuple(parameter[index] for parameter in self.parameters_of(name))
            return rule.weight(planes, parameters, self.base_layer.compute_dtype)
        row = self._rows_of(name)[index]
        return LazyWeight(lambda x: rule.multiply(x, planes, row), (planes.out_features, planes.in_features), self.name)
