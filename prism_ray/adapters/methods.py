"""The adapter methods that one training loop trains: what each needs to be built, matched, loaded and merged. A method is an `AdapterMethod` and a registry line.

| method | trained parameters of a weight [O, I] in G = I / block scale blocks | merge |
|---|---|---|
| scale-qlora | r (O + G) | exact: scale bytes |
| scale-qlora-no-qast | r (O + G) | rounds scales that training never saw rounded |
| qlora | r (O + I) | re-quantizes the weight: `training.posthoc` |
| qat-lora | r (O + I) | exact: codes and scale bytes |
| peqa | O | rounds |
| peqa-block | O G | rounds |

*Matched counts* (scale-qlora §4): the rank of a baseline whose parameter count is nearest that of Scale-QLoRA at the configured rank, over the same layers; the smaller of two. alpha / rank stays. PEQA's count is
what it is; both counts are reported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn

from prism_ray.adapters.baselines import PeqaBlockConfig, PeqaConfig, QatLoraConfig, lora_config
from prism_ray.adapters.baselines.lora import load_lora_config
from prism_ray.adapters.baselines.merge import merge_baseline
from prism_ray.adapters.baselines.tuner import default_targets
from prism_ray.adapters.merge import merge_to_folder
from prism_ray.adapters.scale_qlora import ScaleQLoraConfig
from prism_ray.core.errors import GridMismatch, ModelError
from prism_ray.core.registry import Registry
from prism_ray.formats.modules import FP4Linear, QuantizedModule, quantized_modules
from prism_ray.formats.spec import FormatSpec

TASK = "CAUSAL_LM"
Shape = tuple[int, int, int]
"""(O, I, G) of a weight."""


class MergeReport(Protocol):
    """What every merge reports."""

    @property
    def max_abs_dw(self) -> float: ...
    @property
    def codes_identical(self) -> bool: ...
    def to_dict(self) -> dict[str, Any]: ...


Merge = Callable[[Any, Path, Path], MergeReport]


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """What a config is built from. code_plane, scale_plane: fingerprints of the base; scale_rule: how its scales were made, None for the format's rule.
    experts: which experts of the targeted expert weights Scale-QLoRA trains, None for all of them."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...] | None = None
    code_plane: str | None = None
    scale_plane: str | None = None
    scale_rule: str | None = None
    experts: tuple[int, ...] | None = None

    @property
    def common(self) -> dict[str, Any]:
        """What all our own configs take."""
        targets = None if self.target_modules is None else list(self.target_modules)
        return {"target_modules": targets, "code_plane": self.code_plane, "scale_plane": self.scale_plane, "task_type": TASK}


@dataclass(frozen=True, kw_only=True)
class AdapterMethod:
    """build: the PEFT config for a quantized model. count: trained parameters of a weight at a rank. ranked: whether the rank matters. fp4_only: whether it needs E2M1 codes.
    scale_plane: whether its folder carries a scale plane. merge: (model, base folder, output) -> report, None where the weight is re-quantized."""

    build: Callable[[nn.Module, AdapterSettings], PeftConfig]
    count: Callable[[Shape, int], int]
    ranked: bool = True
    fp4_only: bool = True
    scale_plane: bool = False
    merge: Merge | None = None


ADAPTER_METHODS: Registry[AdapterMethod] = Registry("adapter method")


def _scale_qlora(qast: bool) -> Callable[[nn.Module, AdapterSettings], PeftConfig]:
    def build(model: nn.Module, settings: AdapterSettings) -> PeftConfig:
        experts = None if settings.experts is None else list(settings.experts)
        return ScaleQLoraConfig(r=settings.rank, alpha=settings.alpha, qast=qast, experts=experts, **settings.common)

    return build


def _qlora(model: nn.Module, settings: AdapterSettings) -> PeftConfig:
    targets = default_targets(model) if settings.target_modules is None else list(settings.target_modules)
    if found := [name for name, module in _targeted(model, settings.target_modules) if not isinstance(module, FP4Linear)]:
        raise ModelError("PEFT's LoRA cannot adapt experts held as planes", where=found[0], remedy="take them out of target_modules")
    # Bases of LoRA are told apart by name only: PEFT's config has no place for fingerprints.
    return lora_config(r=settings.rank, lora_alpha=settings.alpha, target_modules=targets, task_type=TASK)


def _qat_lora(model: nn.Module, settings: AdapterSettings) -> PeftConfig:
    return QatLoraConfig(r=settings.rank, alpha=settings.alpha, scale_rule=settings.scale_rule, **settings.common)


def _merge_scales(model: Any, base: Path, out: Path) -> MergeReport:
    return merge_to_folder(model, base, out, replace=True)


def _merge_unseen(model: Any, base: Path, out: Path) -> MergeReport:
    # Its loss is what one wants to know.
    return merge_to_folder(model, base, out, tolerance=float("inf"), max_swallowed=1.0, replace=True)


def _merge_planes(model: Any, base: Path, out: Path) -> MergeReport:
    return merge_baseline(model, base, out, replace=True)


def _low_rank_scales(shape: Shape, rank: int) -> int:
    return rank * (shape[0] + shape[2])


def _low_rank_weight(shape: Shape, rank: int) -> int:
    return rank * (shape[0] + shape[1])


SCALE_QLORA = "scale-qlora"
ADAPTER_METHODS.add(SCALE_QLORA, AdapterMethod(build=_scale_qlora(True), count=_low_rank_scales, scale_plane=True, merge=_merge_scales))
ADAPTER_METHODS.add(
    "scale-qlora-no-qast", AdapterMethod(build=_scale_qlora(False), count=_low_rank_scales, scale_plane=True, merge=_merge_unseen)
)
ADAPTER_METHODS.add("qlora", AdapterMethod(build=_qlora, count=_low_rank_weight, fp4_only=False))
ADAPTER_METHODS.add("qat-lora", AdapterMethod(build=_qat_lora, count=_low_rank_weight, merge=_merge_planes))
ADAPTER_METHODS.add(
    "peqa",
    AdapterMethod(
        build=lambda model, settings: PeqaConfig(**settings.common), count=lambda shape, _: shape[0], ranked=False, merge=_merge_planes
    ),
)
ADAPTER_METHODS.add(
    "peqa-block",
    AdapterMethod(
        build=lambda model, settings: PeqaBlockConfig(**settings.common),
        count=lambda shape, _: shape[0] * shape[2],
        ranked=False,
        merge=_merge_planes,
    ),
)


def require_format(method: str, spec: FormatSpec) -> None:
    """Raise GridMismatch where a method cannot adapt a format."""
    if ADAPTER_METHODS[method].fp4_only and not spec.is_fp4:
        raise GridMismatch(
            f"adapter method {method} is for FP4 formats, not {spec.name}",
            where="format",
            remedy="use nvfp4 or mxfp4, or method qlora, which adapts any format",
        )


def _targeted(model: nn.Module, targets: Iterable[str] | None) -> list[tuple[str, QuantizedModule]]:
    """The quantized modules that `target_modules` means; None: every FP4Linear."""
    if targets is None:
        return [(name, module) for name, module in quantized_modules(model) if isinstance(module, FP4Linear)]
    wanted = ScaleQLoraConfig(target_modules=list(targets))
    return [(name, module) for name, module in quantized_modules(model) if check_target_module_exists(wanted, name)]


def target_shapes(model: nn.Module, targets: Iterable[str] | None) -> dict[str, Shape]:
    """The quantized weights that `target_modules` means, by name, experts as `name.<number>`; ModelError where there is none."""
    found: dict[str, Shape] = {}
    for name, module in _targeted(model, targets):
        *leading, rows, groups = module.scales.shape
        shape = (rows, groups * module.format.block, groups)
        found |= {f"{name}.{expert}": shape for expert in range(leading[0])} if leading else {name: shape}
    if not found:
        raise ModelError("no quantized layer has a name of this list", where="target_modules", remedy="use names such as q_proj")
    return found


@dataclass(frozen=True, kw_only=True)
class Budget:
    """rank: of the method (0 where it has none); parameters: what it trains; reference: what Scale-QLoRA trains at the configured rank."""

    rank: int
    parameters: int
    reference: int


def budget(method: str, shapes: Iterable[Shape], rank: int, *, match: bool) -> Budget:
    """Rank and counts of a method beside Scale-QLoRA at `rank`; match: choose the rank for the nearest count."""
    shapes = list(shapes)
    chosen = ADAPTER_METHODS[method]
    reference = sum(ADAPTER_METHODS[SCALE_QLORA].count(shape, rank) for shape in shapes)
    if match and chosen.ranked:
        # The count is linear in the rank; the smaller rank wins a tie.
        one = sum(chosen.count(shape, 1) for shape in shapes)
        rank = max(1, reference // one + (2 * (reference % one) > one))
    count = sum(chosen.count(shape, rank) for shape in shapes)
    return Budget(rank=rank if chosen.ranked else 0, parameters=count, reference=reference)


def matched(settings: AdapterSettings, found: Budget) -> AdapterSettings:
    """Settings with the rank of a budget, alpha / rank as it was."""
    if found.rank in (0, settings.rank):
        return settings
    return replace(settings, rank=found.rank, alpha=settings.alpha * found.rank / settings.rank)


def load_adapter_model(model: nn.Module, folder: Path | str, *, trainable: bool = False) -> PeftModel:
    """`PeftModel.from_pretrained` for an adapter folder of any method here."""
    kind = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8")).get("peft_type")
    config = load_lora_config(folder) if kind == "LORA" else None
    if config is not None:
        config.inference_mode = not trainable
    return PeftModel.from_pretrained(model, str(folder), config=config, is_trainable=trainable)
