"""Naive QLoRA: PEFT's own LoRA over FP4Linear modules, whose base product dequantizes the weight in the forward pass.

PEFT's `LoraConfig` takes custom layer classes by module type; `FP4LoraLinear` is PEFT's `lora.Linear` in every respect but one: it refuses to merge in place, for there is no weight
to add to. What a merge of such an adapter is, and what it loses, is measured by `training.posthoc`.

The mapping of classes is not part of what PEFT saves, so a saved adapter, which is an ordinary LoRA adapter, is loaded with `load_lora_config`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear
from torch import Tensor, nn

from prism_ray.adapters.scale_plane import base_model
from prism_ray.core.errors import ModelError
from prism_ray.formats.modules import FP4Linear


class FP4LoraLinear(Linear):
    """PEFT's LoRA over one FP4Linear."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, **kwargs: Any):
        planes: FP4Linear = base_layer.get_base_layer() if isinstance(base_layer, Linear) else base_layer  # type: ignore[assignment]
        # PEFT puts new factors on the device of `weight` or `qweight`; planes have neither. An integer tensor says nothing about the dtype, so factors stay float32.
        planes.qweight = planes.code_bytes.new_empty(0)
        super().__init__(base_layer, adapter_name, config, **kwargs)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        assert isinstance(module, FP4Linear)
        return module.in_features, module.out_features

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Raises ModelError."""
        raise ModelError(
            "a LoRA over FP4 planes has no weight to merge into",
            where=type(self).__name__,
            remedy="use prism_ray.training.posthoc.merge_posthoc",
        )

    def unmerge(self) -> None:
        """Nothing is ever merged."""


def lora_config(**options: Any) -> LoraConfig:
    """A LoraConfig that wraps FP4Linear modules."""
    return with_fp4(LoraConfig(**options))


def with_fp4(config: LoraConfig) -> LoraConfig:
    """The same config, with the class for FP4Linear modules."""
    config._register_custom_module({FP4Linear: FP4LoraLinear})
    return config


def load_lora_config(folder: Path | str) -> LoraConfig:
    """The config of a saved adapter, for `PeftModel.from_pretrained(…, config=…)`."""
    return with_fp4(LoraConfig.from_pretrained(str(folder)))


def lora_weights(model: Any, adapter: str = "default") -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name in the base model, W0, W0 + delta), float32 [O, I], of every layer that holds the adapter; ModelError where none does."""
    found = False
    for name, module in base_model(model).named_modules():
        if isinstance(module, FP4LoraLinear) and adapter in module.lora_A:
            found = True
            held = module.get_base_layer()
            assert isinstance(held, FP4Linear)
            base = held.dequantize(torch.float32)
            with torch.no_grad():
                yield name, base, base + module.get_delta_weight(adapter).to(torch.float32)
    if not found:
        raise ModelError(f"the model holds no LoRA adapter called '{adapter}' over FP4 layers", where=adapter)
