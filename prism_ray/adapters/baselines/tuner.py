"""PEFT's tuner classes of the baselines, and the targets that a method has where none are named."""

from __future__ import annotations

from typing import Any, ClassVar

from peft.tuners.tuners_utils import BaseTuner, check_target_module_exists
from torch import nn

from prism_ray.adapters.baselines.config import BaselineConfig
from prism_ray.adapters.baselines.layer import BaselineExperts, BaselineLayer, BaselineLinear, require_fit
from prism_ray.adapters.baselines.rules import Peqa, PeqaBlock, QatLora, Rule
from prism_ray.core.errors import ModelError
from prism_ray.formats.modules import FP4Experts, FP4Linear, QuantizedModule, quantized_modules


def default_targets(model: nn.Module, *, experts: bool = False) -> set[str]:
    """Names for `target_modules` that mean every FP4Linear (and FP4Experts): short ones where only such layers have them.

    ModelError where the model has none.
    """
    wanted = QuantizedModule if experts else FP4Linear
    targets = {name for name, module in quantized_modules(model) if isinstance(module, wanted)}
    if not targets:
        raise ModelError("the model has no FP4 linear layer, so there is nothing to adapt", remedy="quantize it first (prism-ray quantize)")
    # A layer kept in full precision may share its name with quantized ones.
    others = {_leaf(name) for name, _ in model.named_modules() if name.removesuffix(".base_layer") not in targets}
    return {name if _leaf(name) in others else _leaf(name) for name in targets}


class BaselineModel(BaseTuner):
    """Injects `BaselineLinear` over FP4Linear modules and `BaselineExperts` over FP4Experts modules of a quantized transformers model."""

    tuner_layer_cls = BaselineLayer
    target_module_mapping: dict[str, list[str]] = {}  # noqa: RUF012 (PEFT reads it as a class attribute)
    rule: ClassVar[type[Rule]]

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """As PEFT's, with every target checked before the first one is changed; the grid is taken from the targets."""
        config: BaselineConfig = self.peft_config[adapter_name]  # type: ignore[assignment]
        if config.target_modules is None:
            config.target_modules = default_targets(model, experts=config.experts)
        self._check_targets(model, config)
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        layers = [module for module in model.modules() if isinstance(module, BaselineLayer) and adapter_name in module.rules]
        grids = {layer.base_layer.format.grid.name for layer in layers}
        if config.grid is None and len(grids) == 1:
            config.grid = grids.pop()

    @staticmethod
    def _check_targets(model: nn.Module, config: BaselineConfig) -> None:
        tuned = ""
        for name, module in model.named_modules():
            if (tuned and name.startswith(tuned)) or not name or not check_target_module_exists(config, name):
                continue
            if isinstance(module, BaselineLayer):
                tuned, module = f"{name}.", module.base_layer
            if not isinstance(module, QuantizedModule):
                raise ModelError(
                    f"target is a {type(module).__name__}, not a quantized linear layer", where=name, remedy="target FP4 layers only"
                )
            require_fit(module, config, name)
            parent = model.get_submodule(name.rpartition(".")[0])
            if isinstance(module, FP4Experts) and getattr(parent, "is_transposed", False):
                raise ModelError("its family holds experts transposed, which cannot be adapted", where=name, remedy="leave them out")

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
        if isinstance(target, BaselineLayer):
            target.update_layer(adapter_name, peft_config, inference_mode=peft_config.inference_mode)
            return
        rule = type(self).rule
        layer: BaselineLayer
        if isinstance(target, FP4Experts):
            layer = BaselineExperts(target, adapter_name, peft_config, rule, current_key)
            layer.attach(parent)
        else:
            assert isinstance(target, FP4Linear)  # _check_targets
            layer = BaselineLinear(target, adapter_name, peft_config, rule, current_key)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)
        setattr(parent, target_name, layer)

    def _replace_module(self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module) -> None:
        if isinstance(child, BaselineExperts):
            child.detach()
        # PEFT's own copies `weight` from child to new module; planes have none, and an unloaded base layer already is the new module.
        setattr(parent, child_name, new_module)

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """False: these are no low-rank updates added to the output."""
        return False


class QatLoraModel(BaselineModel):
    """QAT-LoRA."""

    prefix = "qat_"
    rule = QatLora


class PeqaModel(BaselineModel):
    """PEQA."""

    prefix = "peqa_"
    rule = Peqa


class PeqaBlockModel(BaselineModel):
    """PEQA-block."""

    prefix = "peqablock_"
    rule = PeqaBlock


def _leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]
