"""Quantize a model in place by a plan, one weight at a time, and write it.

The tie between lm_head and the embedding is found by storage and checked against the config before anything changes (field case CAL-09): quantizing
a tied head is refused unless the policy says `untie`, which gives the head planes of its own and leaves the embedding's bytes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prism_ray.core.errors import FormatError, ModelError
from prism_ray.core.progress import Progress
from prism_ray.formats.checkpoint import install, save_quantized
from prism_ray.formats.config_groups import quantization_config
from prism_ray.formats.fusion import fused_groups
from prism_ray.formats.policy import GPT_OSS, QuantPlan, QuantPolicy, make_plan
from prism_ray.formats.spec import FORMATS
from prism_ray.formats.tensor import QuantTensor
from prism_ray.models.families import split_head
from prism_ray.quantizers.rtn import QUANTIZERS, QuantReport

Quantizer = Callable[..., tuple[QuantTensor, QuantReport]]


def quantize_model(
    model: Any, policy: QuantPolicy, *, method: str = "rtn", progress: bool = False
) -> tuple[QuantPlan, dict[str, QuantReport]]:
    """Replace the planned weights of `model` by planes; returns the plan and a report per weight.

    method: a name in QUANTIZERS that needs no calibration data. Raises before the first change: FormatError (shapes), ModelError (ties, coverage,
    experts that are held transposed).
    """
    quantizer: Quantizer = QUANTIZERS[method]
    plan = make_plan(model, policy)
    if plan.layout == GPT_OSS:
        raise ModelError(
            f"its experts are held transposed, and a folder in the {GPT_OSS} layout is written block by block only",
            where=type(model).__name__,
            remedy="use prism-ray quantize",
        )
    if _untie(model, plan):
        plan = make_plan(model, policy)  # the embedding is a tensor of its own now, and listed as one that stays
    reports: dict[str, QuantReport] = {}
    groups = _shared_scales(plan)
    shared: dict[tuple[str, ...], torch.Tensor] = {}
    bar = Progress(f"quantize {policy.format}", len(plan.entries)) if progress else None
    for done, entry in enumerate(plan.entries, start=1):
        parent = model.get_submodule(entry.name.rpartition(".")[0])
        current = getattr(parent, entry.name.rpartition(".")[2])
        linear = isinstance(current, nn.Linear)
        weight = current.weight if linear else current
        options: dict[str, Any] = {"scale_rule": policy.scale_rule, "where": entry.name}
        if group := groups.get(entry.name):
            if group not in shared:  # at the first member, while all of them are still there
                shared[group] = _group_amax(model, group)
            options["amax"] = shared[group]
        tensor, reports[entry.name] = quantizer(weight.data, FORMATS[entry.format], **options)
        install(model, entry.name, tensor, weight.dtype, bias=current.bias.data if linear and current.bias is not None else None)
        if bar:
            bar.update(done)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.config._experts_implementation = "eager"
    return plan, reports


def _shared_scales(plan: QuantPlan) -> dict[str, tuple[str, ...]]:
    """Weight name -> the group it is served in, for groups of several weights of one format with a tensor scale (field case FMT-05)."""
    formats = {entry.name: entry.format for entry in plan.entries}
    groups = [group for group in fused_groups(formats) if len(group) > 1 and len({formats[name] for name in group}) == 1]
    return {name: group for group in groups for name in group if FORMATS[formats[name]].has_tensor_scale}


def _group_amax(model: Any, group: tuple[str, ...]) -> torch.Tensor:
    """The largest magnitude [] in the weights of a group, float32. Raises FormatError naming a weight that is not finite."""
    found = {name: model.get_submodule(name).weight.data.abs().amax().to(torch.float32) for name in group}
    for name, amax in found.items():
        if not bool(torch.isfinite(amax)):
            raise FormatError("weight holds NaN or infinity", where=name, remedy="repair the source checkpoint")
    return torch.stack(list(found.values())).amax()


def _untie(model: Any, plan: QuantPlan) -> bool:
    """Give a tied head that the plan quantizes a weight of its own; whether it did. Checks the tie against the config in any case."""
    language_model = split_head(model)
    head = next((name for name, module in model.named_modules() if module is language_model.head), "")
    if not language_model.tied or head not in {entry.name for entry in plan.entries}:
        return False
    if not plan.policy.untie:
        raise ModelError(
            f"'{head}' shares its weight with the embedding and is to be quantized", where=head, remedy="set untie=true, or ignore it"
        )
    head_module: Any = language_model.head
    head_module.weight = nn.Parameter(head_module.weight.detach().clone(), requires_grad=False)
    model.config.tie_word_embeddings = False
    return True


def quantize_to_folder(
    model: Any, tokenizer: Any, policy: QuantPolicy, folder: Path | str, *, method: str = "rtn", source: str = "", replace: bool = False
) -> dict[str, Any]:
    """Quantize `model` and write the checkpoint with its per-weight reports; returns the manifest.

    What the writer would refuse (a group of projections in several formats, an existing folder without `replace`) is refused before the first weight is
    quantized.
    """
    quantization_config(make_plan(model, policy))
    if Path(folder).exists() and not replace:
        raise FileExistsError(f"{folder} exists")
    with torch.no_grad():
        plan, reports = quantize_model(model, policy, method=method, progress=True)
    details = {"source": source, "method": method, "reports": {name: asdict(report) for name, report in reports.items()}}
    return save_quantized(model, plan, folder, tokenizer=tokenizer, details=details, replace=replace)
