"""Which tensors of a model are quantized, to what: one policy object drives the plan, the writer and the checkpoint's config.

A plan is made, and every shape checked, before any weight is read: all offending layers are listed at once with their columns, block and
the formats that fit (field case CAL-08). Large parameters that no rule mentions fail the plan instead of staying full precision unnoticed
(field case CAL-04).

*Experts held transposed* [E, I, O] with gate and up interleaved (gpt-oss) are planned as [E, O, I] and written in that family's own layout (`formats.gpt_oss`),
which holds every expert in mxfp4 and nothing else quantized. So `QuantPolicy(format="mxfp4")` quantizes the experts of such a model, and lists its Linear modules as
kept; a policy that asks for more, for less or for another format is refused.

A Linear whose class has a forward of its own (the block-diagonal output projection of deepseek_v4) is kept and listed too: nothing here computes it from planes. An override that
names it is refused.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass

from pydantic import Field
from torch import Tensor, nn

from prism_ray.core.config import Config
from prism_ray.core.errors import FormatError, ModelError
from prism_ray.formats.grids import require_rule
from prism_ray.formats.spec import FORMATS

# The last two are the stream mixers of hyper-connections.
DEFAULT_IGNORE = ("lm_head", "*.lm_head", "*embed*", "*norm*", "*router*", "*.gate", "*.shared_expert_gate", "*_hc.fn", "*.hc_head.*")
LARGE_SHARE = 0.01
COMPRESSED, GPT_OSS = "compressed-tensors", "gpt-oss-mxfp4"
"""Checkpoint layouts, as manifests name them."""


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

    def override_of(self, name: str) -> str | None:
        """Format name of the first override that matches a module, or None."""
        return next((chosen for pattern, chosen in self.overrides.items() if fnmatch.fnmatch(name, pattern)), None)

    def format_of(self, name: str) -> str | None:
        """Format name for a module, or None where it is ignored."""
        if (chosen := self.override_of(name)) is not None:
            return chosen
        return None if any(fnmatch.fnmatch(name, pattern) for pattern in self.ignore) else self.format


@dataclass(frozen=True, kw_only=True)
class PlanEntry:
    """One weight to quantize: module path (for experts the path of the 3-D parameter), shape [O, I] or [E, O, I], format name.

    transposed: the model holds it as [E, I, O], with gate and up interleaved.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    transposed: bool = False


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

    @property
    def layout(self) -> str:
        """The checkpoint layout that holds this plan: COMPRESSED or GPT_OSS."""
        return GPT_OSS if any(entry.transposed for entry in self.entries) else COMPRESSED


def expert_parameters(module: nn.Module) -> list[str]:
    """Names of the fused 3-D expert parameters of a transformers experts module, empty for any other module."""
    names = [name for name in ("gate_up_proj", "down_proj", "up_proj") if isinstance(getattr(module, name, None), nn.Parameter)]
    return [name for name in names if getattr(module, name).ndim == 3]


def make_plan(model: nn.Module, policy: QuantPolicy) -> QuantPlan:
    """Walk a model's Linear modules and fused experts. Raises UnknownName (format, rule), FormatError (shapes) or ModelError (coverage, layout)."""
    walk = _Walk(model, policy)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            walk.linear(name, module)
        else:
            for fused in expert_parameters(module):
                walk.consider(f"{name}.{fused}", getattr(module, fused), "experts", transposed=name in walk.transposed)
    if walk.offending:
        raise FormatError(
            f"{len(walk.offending)} layer(s) do not divide into blocks: {', '.join(walk.offending)}",
            remedy="override their format or set keep_indivisible",
        )
    walk.rest()
    if not walk.entries:
        raise ModelError("the policy quantizes nothing", remedy="check its ignore patterns against the module names")
    plan = QuantPlan(policy=policy, entries=tuple(walk.entries), kept=tuple(walk.kept))
    if walk.transposed:
        _require_gpt_oss(plan)
    return plan


class _Walk:
    """What is planned, kept and offending so far."""

    def __init__(self, model: nn.Module, policy: QuantPolicy):
        self.model, self.policy = model, policy
        self.entries: list[PlanEntry] = []
        self.kept: list[tuple[str, str, int]] = []
        self.offending: list[str] = []
        self.seen: set[int] = set()
        self.transposed = _transposed(model)
        frame = any(parameter.is_meta for parameter in model.parameters())
        strict = (getattr(model, "_keep_in_fp32_modules_strict", None) or ()) if frame else ()
        self._wide = [re.compile(pattern.replace("*", ".*")) for pattern in strict]

    def linear(self, name: str, module: nn.Linear) -> None:
        """Plan a Linear, or keep one that the layout or its class rules out."""
        asked = self.policy.override_of(name)
        own = type(module).forward is not nn.Linear.forward
        if self.policy.format_of(name) is None or not (own or (self.transposed and asked is None)):
            self.consider(name, module.weight, "linear")
            return
        if asked is not None:
            raise ModelError(
                f"is to be {asked}, but {type(module).__name__} has a forward of its own, which nothing computes from planes",
                where=name,
                remedy="take it out of overrides",
            )
        reason = f"{type(module).__name__} has a forward of its own" if own else f"{GPT_OSS} holds experts only"
        self.seen.add(id(module.weight))
        self.kept.append((name, f"linear: {reason}", self._bytes(name, module.weight)))

    def consider(self, name: str, weight: Tensor, kind: str, *, transposed: bool = False) -> None:
        """Plan a weight in the format that the policy has for it; transposed: weight is [E, I, O]."""
        chosen = self.policy.format_of(name)
        self.seen.add(id(weight))
        if chosen is None:
            self.kept.append((name, f"{kind}: ignored", self._bytes(name, weight)))
            return
        shape = (weight.shape[0], weight.shape[2], weight.shape[1]) if transposed else tuple(weight.shape)
        require_rule(FORMATS[chosen].grid, self.policy.scale_rule or FORMATS[chosen].amax_rule)
        try:
            FORMATS[chosen].blocks(shape[-1])
        except FormatError as error:
            if self.policy.keep_indivisible:
                self.kept.append((name, f"{kind}: {error.what}", self._bytes(name, weight)))
            else:
                self.offending.append(f"{name} ({shape[-1]} columns, {chosen} block {FORMATS[chosen].block}; {error.remedy})")
            return
        self.entries.append(PlanEntry(name=name, shape=shape, format=chosen, transposed=transposed))

    def rest(self) -> None:
        """Keep every other parameter, and the buffers that are stored. Raises ModelError for a large parameter that no rule mentions."""
        total = sum(parameter.numel() for parameter in self.model.parameters())
        for name, parameter in self.model.named_parameters():
            if id(parameter) in self.seen:
                continue
            known = self.policy.format_of(name.removesuffix(".weight")) is None or parameter.ndim < 2
            if not known and parameter.numel() > LARGE_SHARE * total:
                raise ModelError(
                    f"parameter of {parameter.numel():,} values ({parameter.numel() / total:.1%} of the model) is neither quantized nor ignored",
                    where=name,
                    remedy="add it to ignore, or report the model family",
                )
            self.kept.append((name, "not a linear weight", self._bytes(name, parameter)))
        stored = self.model.state_dict(keep_vars=True)
        self.kept += [(name, "buffer", self._bytes(name, buffer)) for name, buffer in self.model.named_buffers() if name in stored]

    def _bytes(self, name: str, parameter: Tensor) -> int:
        """Bytes as loaded: transformers loads some tensors of a family in float32 whatever dtype is asked for, which a model on meta does not show."""
        wide = parameter.is_floating_point() and any(pattern.search(name) for pattern in self._wide)
        return parameter.numel() * (4 if wide else parameter.element_size())


def _transposed(model: nn.Module) -> set[str]:
    """Paths of the experts modules that are held transposed. Raises ModelError for those whose rows gpt-oss's layout does not hold."""
    found = {name for name, module in model.named_modules() if expert_parameters(module) and getattr(module, "is_transposed", False)}
    for name in sorted(found):
        module = model.get_submodule(name)
        interleaved = not getattr(module, "is_concatenated", True)
        if not interleaved or expert_parameters(module) != ["gate_up_proj", "down_proj"]:
            raise ModelError(
                f"experts of {type(module).__name__} are stored transposed and are no interleaved pairs of gate and up, which has no writer",
                where=name,
                remedy="quantize another family",
            )
    return found


def _require_gpt_oss(plan: QuantPlan) -> None:
    """Raise ModelError naming the first weight that gpt-oss's layout cannot hold as planned, with the policy that works."""
    faults = [f"'{name}' stays ({reason})" for name, reason, _ in plan.kept if reason.startswith("experts")]
    faults += [f"'{entry.name}' is to be {entry.format}" for entry in plan.entries if not entry.transposed or entry.format != "mxfp4"]
    if faults:
        raise ModelError(
            f"the {GPT_OSS} layout holds every expert in mxfp4 and nothing else quantized, but {faults[0]}, and {len(faults)} such weight(s) in all",
            remedy='use QuantPolicy(format="mxfp4"), without overrides and without experts in ignore (--format mxfp4)',
        )
