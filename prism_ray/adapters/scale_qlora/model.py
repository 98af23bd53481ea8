"""`ScaleQLoraModel`: PEFT's tuner class for Scale-QLoRA."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTuner, check_target_module_exists
from torch import nn

from prism_ray.adapters.scale_qlora.config import ScaleQLoraConfig
from prism_ray.adapters.scale_qlora.experts import ScaleQLoraExperts
from prism_ray.adapters.scale_qlora.layer import ScaleQLoraLayer, ScaleQLoraLinear, require_fit
from prism_ray.adapters.scale_qlora.register import PREFIX
from prism_ray.core.errors import ModelError
from prism_ray.formats.modules import FP4Experts, FP4Linear, QuantizedModule, quantized_modules


class ScaleQLoraModel(BaseTuner):
    """Injects `ScaleQLoraLinear` over FP4Linear modules and `ScaleQLoraExperts` over FP4Experts modules of a quantized transformers model."""

    prefix = PREFIX
    tuner_layer_cls = ScaleQLoraLayer
    target_module_mapping: dict[str, list[str]] = {}  # noqa: RUF012 (PEFT reads it as a class attribute)

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """As PEFT's; with target_modules None every FP4Linear is a target (and every FP4Experts, where the config has `experts`), and the grid is taken
        from the targets. Every target is checked before the first one is changed.
        """
        config: ScaleQLoraConfig = self.peft_config[adapter_name]  # type: ignore[assignment]
        wanted = FP4Linear if config.experts is None else QuantizedModule
        if config.target_modules is None:
            targets = {name: module for name, module in quantized_modules(model) if isinstance(module, wanted)}
            if not targets:
                raise ModelError(
                    "the model has no FP4 linear layer, so there are no scales to adapt", remedy="quantize it first (prism-ray quantize)"
                )
            # Short names where only FP4 layers have them; a layer kept in full precision may share its name with quantized ones.
            others = {_leaf(name) for name, _ in model.named_modules() if name.removesuffix(".base_layer") not in targets}
            config.target_modules = {name if _leaf(name) in others else _leaf(name) for name in targets}
        self._check_targets(model, config)
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        grids = {
            module.base_layer.format.grid.name
            for module in model.modules()
            if isinstance(module, ScaleQLoraLayer) and adapter_name in module.qast_A
        }
        if config.grid is None and len(grids) == 1:
            config.grid = grids.pop()

    @staticmethod
    def _check_targets(model: nn.Module, config: ScaleQLoraConfig) -> None:
        for path, module in model.named_modules():
            if isinstance(module, (QuantizedModule, ScaleQLoraLayer, nn.ParameterDict)):
                continue
            for leaf, parameter in module.named_parameters(recurse=False):
                if parameter.ndim == 3 and check_target_module_exists(config, f"{path}.{leaf}"):
                    raise ModelError(
                        f"target is a {parameter.dtype} tensor of {parameter.shape[0]} experts, not FP4 planes",
                        where=f"{path}.{leaf}",
                        remedy="quantize them; experts that a family holds transposed (gpt-oss) cannot be adapted",
                    )
        tuned, trained = "", False
        for name, module in model.named_modules():
            if (tuned and name.startswith(tuned)) or not name or not check_target_module_exists(config, name):
                continue
            if isinstance(module, ScaleQLoraLayer):
                tuned, module = f"{name}.", module.base_layer
            if not isinstance(module, QuantizedModule):
                raise ModelError(
                    f"target is a {type(module).__name__}, not a quantized linear layer", where=name, remedy="target FP4 layers only"
                )
            require_fit(module, config, name)
            if isinstance(module, FP4Experts):
                trained = True
                if getattr(model.get_submodule(name.rpartition(".")[0]), "is_transposed", False):
                    raise ModelError("its family holds experts transposed, which cannot be adapted", where=name, remedy="leave them out")
                config.experts_of(name, module.scales.shape[0])
        if config.experts is not None and not trained:
            raise ModelError(
                "no target is an expert weight",
                where="experts",
                remedy="name one in target_modules (gate_up_proj, down_proj), or leave experts out",
            )

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
        if isinstance(target, ScaleQLoraLayer):
            target.update_layer(adapter_name, peft_config, inference_mode=peft_config.inference_mode)
            return
        layer: ScaleQLoraLayer
        if isinstance(target, FP4Experts):
            layer = ScaleQLoraExperts(target, adapter_name, peft_config, current_key)
            layer.attach(parent)
        else:
            assert isinstance(target, FP4Linear)  # _check_targets
            layer = ScaleQLoraLinear(target, adapter_name, peft_config, current_key)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)
        setattr(parent, target_name, layer)

    def _replace_module(self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module) -> None:
        if isinstance(child, ScaleQLoraExperts):
            child.detach()
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
