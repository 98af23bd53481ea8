"""Which tensors of a model are quantized, to what: one policy object drives the plan, the writer and the checkpoint's config.

A plan is made, and every shape checked, before any weight is read: all offending layers are listed at once with their columns, block and
the formats that fit (field case CAL-08). Large parameters that no rule mentions fail the plan instead of staying full precision unnoticed
(field case CAL-04).
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from pydantic import Field
from torch import Tensor, nn

from prism_ray.core.config import Config
from prism_ray.core.errors import FormatError, ModelError
from prism_ray.formats.grids import require_rule
from prism_ray.formats.spec import FORMATS

DEFAULT_IGNORE = ("lm_head", "*.lm_head", "*embed*", "*norm*", "*router*", "*.gate", "*.shared_expert_gate")
LARGE_SHARE = 0.01


class QuantPolicy(Config):
    """format: default format name. scale_rule: block-scale rule, default the format's own. ignore: globs over module names that stay as they are.
    overrides: glob -> format name, first match wins, before the default. keep_indivisible: leave layers whose columns do not divide in
    full precision (reported with their bytes) instead of refusing. untie: quantizing a tied lm_head stores it as a tensor of its own."""

    format: str = "nvfp4"
    scale_rule: str | None = None
    ignore: tuple[str, ...] = DEFAULT_IGNORE
    overrides: dict[str, str] = Field(default_factory=dict)
    keep_indivisible: bool = False
    untie: bool = False

    def format_of(self, name: str) -> str | None:
        """Format name for a module, or None where it is ignored."""
        for pattern, chosen in self.overrides.items():
            if fnmatch.fnmatch(name, pattern):
                return chosen
        return None if any(fnmatch.fnmatch(name, pattern) for pattern in self.ignore) else self.format


@dataclass(frozen=True, kw_only=True)
class PlanEntry:
    """One weight to quantize: module path (for experts the path of the 3-D parameter), shape [O, I] or [E, O, I], format name."""

    name: str
    shape: tuple[int, ...]
    format: str


@dataclass(frozen=True, kw_only=True)
class QuantPlan:
    """What will be quantized, and what stays with its reason and bytes."""

    policy: QuantPolicy
    entries: tuple[PlanEntry, ...]
    kept: tuple[tuple[str, str, int], ...]

    @property
    def ignored_linears(self) -> list[str]:
        """Names of Linear modules that stay, for the checkpoint's ignore list."""
        return sorted(name for name, reason, _ in self.kept if reason.startswith("linear"))


def expert_parameters(module: nn.Module) -> list[str]:
    """Names of the fused 3-D expert parameters of a transformers experts module, empty for any other module."""
    names = [name for name in ("gate_up_proj", "down_proj", "up_proj") if isinstance(getattr(module, name, None), nn.Parameter)]
    return [name for name in names if getattr(module, name).ndim == 3]


def make_plan(model: nn.Module, policy: QuantPolicy) -> QuantPlan:
    """Walk a model's Linear modules and fused experts. Raises UnknownName (format, rule), FormatError (shapes) or ModelError (coverage)."""
    entries: list[PlanEntry] = []
    kept: list[tuple[str, str, int]] = []
    offending: list[str] = []
    planned: set[int] = set()

    def consider(name: str, weight: Tensor, kind: str) -> None:
        chosen = policy.format_of(name)
        planned.add(id(weight))
        if chosen is None:
            kept.append((name, f"{kind}: ignored", _bytes(weight)))
            return
        columns = weight.shape[-1]
        require_rule(FORMATS[chosen].grid, policy.scale_rule or FORMATS[chosen].amax_rule)
        try:
            FORMATS[chosen].blocks(columns)
        except FormatError as error:
            if policy.keep_indivisible:
                kept.append((name, f"{kind}: {error.what}", _bytes(weight)))
            else:
                offending.append(f"{name} ({columns} columns, {chosen} block {FORMATS[chosen].block}; {error.remedy})")
            return
        entries.append(PlanEntry(name=name, shape=tuple(weight.shape), format=chosen))

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            consider(name, module.weight, "linear")
        elif expert_parameters(module):
            if getattr(module, "is_transposed", False):
                raise ModelError(
                    f"experts of {type(module).__name__} are stored transposed and interleaved, which has no reader or writer yet",
                    where=name,
                )
            for fused in expert_parameters(module):
                consider(f"{name}.{fused}", getattr(module, fused), "experts")
    if offending:
        raise FormatError(
            f"{len(offending)} layer(s) do not divide into blocks: {', '.join(offending)}",
            remedy="override their format or set keep_indivisible",
        )
    total = sum(parameter.numel() for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        if id(parameter) in planned:
            continue
        known = policy.format_of(name.removesuffix(".weight")) is None or parameter.ndim < 2
        if not known and parameter.numel() > LARGE_SHARE * total:
            raise ModelError(
                f"parameter of {parameter.numel():,} values ({parameter.numel() / total:.1%} of the model) is neither quantized nor ignored",
                where=name,
                remedy="add it to ignore, or report the model family",
            )
        kept.append((name, "not a linear weight", _bytes(parameter)))
    if not entries:
        raise ModelError("the policy quantizes nothing", remedy="check its ignore patterns against the module names")
    return QuantPlan(policy=policy, entries=tuple(entries), kept=tuple(kept))


def _bytes(parameter: Tensor) -> int:
    return parameter.numel() * parameter.element_size()
