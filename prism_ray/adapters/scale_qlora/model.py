"""`ScaleQLoraModel`: PEFT's tuner class for Scale-QLoRA."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTuner, check_target_module_exists
from torch import nn

from prism_ray.adapters.scale_qlora.config import ScaleQLoraConfig
from prism_ray.adapters.scale_qlora.layer import ScaleQLoraLinear, require_fit
from prism_ray.adapters.scale_qlora.register import PREFIX
from prism_ray.core.errors import ModelError
from prism_ray.formats.modules import FP4Linear, quantized_modules


class ScaleQLoraModel(BaseTuner):
    """Injects `ScaleQLoraLinear` over the FP4Linear modules of a quantized transformers model."""

    prefix = PREFIX
    tuner_layer_cls = ScaleQLoraLinear
    target_module_mapping: dict[str, list[str]] = {}  # noqa: RUF012 (PEFT reads it as a class attribute)

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """As PEFT's; with target_modules None every FP4Linear is a target, and the grid is taken from the targets.

        Every target is checked before the first one is changed.
        """
        config: ScaleQLoraConfig = self.peft_config[adapter_name]  # type: ignore[assignment]
        linears = {name: module for name, module in quantized_modules(model) if isinstance(module, FP4Linear)}
        if not linears:
            raise ModelError(
                "the model has no FP4 linear layer, so there are no scales to adapt", remedy="quantize it first (prism-ray quantize)"
            )
        if config.target_modules is None:
            # Short names where only FP4 layers have them; a layer kept in full precision may share its name with quantized ones.
            others = {_leaf(name) for name, _ in model.named_modules() if name.removesuffix(".base_layer") not in linears}
            config.target_modules = {name if _leaf(name) in others else _leaf(name) for name in linears}
        self._check_targets(model, config)
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        grids = {
            module.base_layer.format.grid.name
            for module in model.modules()
            if isinstance(module, ScaleQLoraLinear) and adapter_name in module.qast_A
        }
        if config.grid is None and len(grids) == 1:
            config.grid = grids.pop()

    @staticmethod
    def _check_targets(model: nn.Module, config: ScaleQLoraConfig) -> None:
        tuned = ""
        for name, module in model.named_modules():
            if (tuned and name.startswith(tuned)) or not name or not check_target_module_exists(config, name):
                continue
            if isinstance(module, ScaleQLoraLinear):
                tuned, module = f"{name}.", module.base_layer
            if not isinstance(module, FP4Linear):
                raise ModelError(
                    f"target is a {type(module).__name__}, not a quantized linear layer", where=name, remedy="target FP4 layers only"
                )
            require_fit(module, config, name)

    @staticmethod
    def _prepare_adapter_config(peft_config: Any, model_config: dict) -> Any:
        return peft_config

    def _create_and_replace(
        self,
        peft_config: Any,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        if isinstance(target, ScaleQLoraLinear):
            target.update_layer(adapter_name, peft_config, inference_mode=peft_config.inference_mode)
            return
        assert isinstance(target, FP4Linear)  # _check_targets
        layer = ScaleQLoraLinear(target, adapter_name, peft_config, current_key)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)
        setattr(parent, target_name, layer)

    def _replace_module(self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module) -> None:
        # PEFT's own copies `weight` from child to new module; planes have none, and an unloaded base layer already is the new module.
        setattr(parent, child_name, new_module)

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """False: a correction of scales is no low-rank weight update."""
        return False


def _leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def trainable_parameters(model: nn.Module) -> dict[str, torch.nn.Parameter]:
    """Name -> parameter of everything that requires a gradient, in model order."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
