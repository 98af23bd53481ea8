"""A finished pass to a checkpoint: the model's frame with planes where the plan has them, plain tensors that the pass has folded factors into, and the source's tensors everywhere else.

Planes are memory-mapped from the work folder and plain tensors from the source, so the memory is the page cache's, not the process's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prism_ray.calibrate.units import read_plain, read_planes, read_records
from prism_ray.calibrate.whole import stored_formats
from prism_ray.core.errors import CheckpointError
from prism_ray.formats.checkpoint import install, save_quantized
from prism_ray.formats.modules import QuantizedModule
from prism_ray.formats.policy import QuantPlan
from prism_ray.formats.sources import TensorSource, load_parameters, meta_model
from prism_ray.models.families import decoder_layers, split_head
from prism_ray.models.load import load_tokenizer
from prism_ray.models.loops import find_loop


def quantized_model(folder: Path | str, work: Path | str, plan: QuantPlan, dtype: torch.dtype) -> Any:
    """The quantized model of a finished work folder. dtype: of what is not quantized. CheckpointError names a planned weight without planes."""
    source = TensorSource(folder)
    model = meta_model(folder)
    model.tie_weights()
    formats = {entry.name: entry.format for entry in plan.entries}
    changed: dict[str, torch.Tensor] = {}
    for place, prefix, names in _stages(model, Path(work), formats):
        planes = read_planes(place, names)
        changed |= {prefix + name: value.to(dtype) for name, value in read_plain(place).items()}
        for name, tensor in planes.items():
            if not tensor.codes.numel():
                raise CheckpointError("has no planes in the work folder", where=prefix + name, remedy="run the pass again")
            install(model, prefix + name, tensor, dtype, bias=_bias(model, source, prefix + name, dtype, changed))
    if "lm_head" in formats:
        model.config.tie_word_embeddings = False
    if unknown := sorted(set(changed) - set(model.state_dict())):
        raise CheckpointError("was changed by the pass and is no tensor of the model", where=unknown[0], remedy="run the pass again")
    _fill(model, source, dtype, changed)
    model.config._experts_implementation = "eager"
    return model.eval()


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
    """Fill every parameter and persistent buffer that is still on meta, `changed` ones with their new values, others from the source; a tied head is left to the model."""
    tied = split_head(model).tied if not isinstance(model.get_output_embeddings(), QuantizedModule) else False
    head = {id(model.get_output_embeddings().weight)} - {id(model.get_input_embeddings().weight)} if tied else set()
    wanted = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if tensor.is_meta and id(tensor) not in head}
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
    """Write the checkpoint of a finished pass with every weight's record; returns its manifest."""
    model = quantized_model(folder, work, plan, torch.bfloat16)
    records = [record for block in sorted((Path(work) / "blocks").glob("[0-9]*")) for record in read_records(block)]
    fields = {"reports": {record["name"]: record for record in records}, **(details or {})}
    return save_quantized(model, plan, out, tokenizer=load_tokenizer(folder), details=fields, replace=replace)
