"""A finished pass to a checkpoint: the model's frame with planes where the plan has them, plain tensors that the pass has folded factors into, and the source's tensors everywhere else.

The plan's layout says how it is written: compressed-tensors, or gpt-oss's own for a family that holds its experts transposed.

Planes are memory-mapped from the work folder and plain tensors from the source, so the memory is the page cache's, not the process's.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prism_ray.calibrate.units import read_plain, read_planes, read_records
from prism_ray.calibrate.whole import stored_formats
from prism_ray.core.errors import CheckpointError
from prism_ray.formats import gpt_oss
from prism_ray.formats.checkpoint import install, save_quantized
from prism_ray.formats.modules import QuantizedModule
from prism_ray.formats.parameters import load_parameters, meta_model
from prism_ray.formats.policy import GPT_OSS, QuantPlan
from prism_ray.formats.sources import TensorSource
from prism_ray.formats.spec import MXFP4
from prism_ray.formats.tensor import QuantTensor
from prism_ray.models.families import decoder_layers, split_head
from prism_ray.models.load import load_tokenizer
from prism_ray.models.loops import find_loop


def quantized_model(folder: Path | str, work: Path | str, plan: QuantPlan, dtype: torch.dtype) -> Any:
    """The quantized model of a finished work folder. dtype: of what is not quantized. CheckpointError names a planned weight without planes.

    Experts that the family holds transposed come dequantized, in `dtype`: its forward multiplies by [I, O].
    """
    source, model = TensorSource(folder), _frame(folder)
    transposed = {entry.name for entry in plan.entries if entry.transposed}
    planes, changed = _finished(model, Path(work), plan, dtype)
    for name, tensor in planes.items():
        if name in transposed:
            owner = model.get_submodule(name.rpartition(".")[0])
            setattr(owner, name.rpartition(".")[2], nn.Parameter(gpt_oss.parameter(tensor, dtype), requires_grad=False))
        else:
            install(model, name, tensor, dtype, bias=_bias(model, source, name, dtype, changed))
    if "lm_head" in planes:
        model.config.tie_word_embeddings = False
    if unknown := sorted(set(changed) - set(model.state_dict())):
        raise CheckpointError("was changed by the pass and is no tensor of the model", where=unknown[0], remedy="run the pass again")
    _fill(model, source, dtype, changed)
    model.config._experts_implementation = "eager"
    return model.eval()


def _frame(folder: Path | str) -> Any:
    model = meta_model(folder)
    model.tie_weights()
    return model


def _finished(model: Any, work: Path, plan: QuantPlan, dtype: torch.dtype) -> tuple[dict[str, QuantTensor], dict[str, torch.Tensor]]:
    """(planes of every planned weight, plain tensors that the pass has changed) by name in the model."""
    formats = {entry.name: entry.format for entry in plan.entries}
    planes: dict[str, QuantTensor] = {}
    changed: dict[str, torch.Tensor] = {}
    for place, prefix, names in _stages(model, work, formats):
        changed |= {prefix + name: value.to(dtype) for name, value in read_plain(place).items()}
        planes |= {prefix + name: tensor for name, tensor in read_planes(place, names).items()}
    for name in formats:
        if name not in planes or not planes[name].codes.numel():
            raise CheckpointError("has no planes in the work folder", where=name, remedy="run the pass again")
    return planes, changed


def _stages(model: Any, work: Path, formats: Mapping[str, str]) -> Iterator[tuple[Path, str, dict[str, str]]]:
    """(folder, prefix of its names, format of each planned weight in it) of every finished stage: a block, or a stage of a looped model."""
    if find_loop(model) is not None:
        for place in sorted((work / "blocks").glob("[0-9]*")):
            yield place, "", stored_formats(place, formats)
        return
    held = decoder_layers(split_head(model).backbone)
    path = next(name for name, module in model.named_modules() if module is held)
    for index in range(len(held) + 1):
        prefix = f"{path}.{index}." if index < len(held) else ""
        names = {
            name.removeprefix(prefix): chosen
            for name, chosen in formats.items()
            if (name.startswith(prefix) if prefix else not name.startswith(f"{path}."))
        }
        if names:
            yield work / "blocks" / f"{index:04d}", prefix, names


def _bias(
    model: nn.Module, source: TensorSource, name: str, dtype: torch.dtype, changed: Mapping[str, torch.Tensor]
) -> torch.Tensor | None:
    if f"{name}.bias" in changed:
        return changed[f"{name}.bias"]
    parameter = dict(model.named_parameters()).get(f"{name}.bias")
    return None if parameter is None else next(iter(load_parameters(source, {f"{name}.bias": parameter}, dtype)))[1]


def _fill(model: Any, source: TensorSource, dtype: torch.dtype, changed: Mapping[str, torch.Tensor]) -> None:
    """Fill every parameter that is still on meta and every stored buffer, `changed` ones with their new values, others from the source; a tied head is left to the model."""
    tied = split_head(model).tied if not isinstance(model.get_output_embeddings(), QuantizedModule) else False
    head = {id(model.get_output_embeddings().weight)} - {id(model.get_input_embeddings().weight)} if tied else set()
    inside = {id(buffer) for module in model.modules() if isinstance(module, QuantizedModule) for buffer in module.buffers()}
    # The buffers of a model on meta are real, and hold what its constructor left there: routing biases of zero, expert numbers of zero.
    wanted = {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if (tensor.is_meta or not isinstance(tensor, nn.Parameter)) and id(tensor) not in head | inside
    }
    seen: set[int] = set()
    once = {name: tensor for name, tensor in wanted.items() if not (id(tensor) in seen or seen.add(id(tensor)))}  # type: ignore[func-returns-value]
    kept = {name: tensor for name, tensor in once.items() if name not in changed}
    values = [(name, changed[name]) for name in once if name in changed]
    for name, value in itertools.chain(values, load_parameters(source, kept, dtype)):
        owner = model.get_submodule(name.rpartition(".")[0])
        leaf = name.rpartition(".")[2]
        setattr(owner, leaf, nn.Parameter(value, requires_grad=False) if isinstance(once[name], nn.Parameter) else value)
    if tied:
        model.tie_weights()
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def write_checkpoint(
    folder: Path | str, work: Path | str, plan: QuantPlan, out: Path | str, *, details: dict[str, Any] | None = None, replace: bool = False
) -> dict[str, Any]:
    """Write the checkpoint of a finished pass, in the plan's layout, with every weight's record; returns its manifest."""
    records = [record for block in sorted((Path(work) / "blocks").glob("[0-9]*")) for record in read_records(block)]
    fields = {"reports": {record["name"]: record for record in records}, **(details or {})}
    if plan.layout == GPT_OSS:
        return _write_gpt_oss(folder, Path(work), plan, out, fields, replace)
    model = quantized_model(folder, work, plan, torch.bfloat16)
    return save_quantized(model, plan, out, tokenizer=load_tokenizer(folder), details=fields, replace=replace)


def _write_gpt_oss(
    folder: Path | str, work: Path, plan: QuantPlan, out: Path | str, fields: dict[str, Any], replace: bool
) -> dict[str, Any]:
    """Planes as they are, rows interleaved as the family holds them; no expert is dequantized."""
    model = _frame(folder)
    planes, changed = _finished(model, work, plan, torch.bfloat16)
    for name in planes:
        delattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
    _fill(model, TensorSource(folder), torch.bfloat16, changed)
    seen: set[int] = set()
    held = model.state_dict(keep_vars=True).items()
    plain = {name: value.detach() for name, value in held if not (id(value) in seen or seen.add(id(value)))}  # type: ignore[func-returns-value]
    experts = {
        name: gpt_oss.ExpertWeight(
            tensor=tensor, rows="interleaved" if name.endswith(gpt_oss.PAIRED) else "single", bias=plain.pop(f"{name}{gpt_oss.BIAS}", None)
        )
        for name, tensor in planes.items()
    }
    details = {
        "scale_rule": plan.policy.scale_rule or MXFP4.amax_rule,
        "plan": [{"tensor": entry.name, "shape": list(entry.shape), "format": entry.format} for entry in plan.entries],
        "kept": [{"tensor": name, "reason": reason, "bytes": size} for name, reason, size in plan.kept],
        **fields,
    }
    beside = [part for part in (load_tokenizer(folder), model.generation_config) if part is not None]
    config = json.loads(model.config.to_json_string())
    return gpt_oss.write_quantized(out, experts, plain, config, details=details, beside=beside, replace=replace)
