"""Whole quantized models on disk: a Hugging Face folder in the compressed-tensors convention, written and loaded shard by shard.

Writing goes to a temporary folder that is renamed when complete; `manifest.json` comes last and holds the fingerprints of both planes. Loading
builds the architecture without weights, puts `FP4Linear` and `FP4Experts` where the checkpoint has planes, and then checks that every parameter of
the model was filled and every tensor of the checkpoint was used: nothing is invented, nothing is left over (field case FMT-06).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prism_ray.core.errors import CheckpointError, ModelError, one_line
from prism_ray.core.files import atomic_folder, require_disk
from prism_ray.core.manifest import MANIFEST_NAME, read_manifest, write_manifest
from prism_ray.formats import compressed_tensors as convention
from prism_ray.formats.config_groups import (
    default_format,
    format_of_config,
    formats_of_modules,
    narrowed,
    quantization_config,
    require_ignored_plain,
)
from prism_ray.formats.e2m1 import PACKING
from prism_ray.formats.modules import FP4Experts, FP4Linear, QuantizedModule, planes
from prism_ray.formats.policy import QuantPlan
from prism_ray.formats.safetensors_io import REWRITE, read_tensors, write_shards
from prism_ray.formats.spec import FORMATS, FormatSpec
from prism_ray.formats.tensor import QuantTensor, code_plane_fingerprint, scale_plane_fingerprint

KIND = "quantized-model"


def save_quantized(
    model: nn.Module,
    plan: QuantPlan,
    folder: Path | str,
    *,
    tokenizer: Any = None,
    details: dict[str, Any] | None = None,
    replace: bool = False,
) -> dict[str, Any]:
    """Write a quantized transformers model as a compressed-tensors folder; returns its manifest.

    details: extra manifest fields (reports, source). Raises FileExistsError without `replace`, ResourceError when the disk is too small, CheckpointError with
    the linter's first finding; the folder appears only without one.
    """
    quantized, stored = planes(model), convention.stored_parts(model)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in quantized.items():
        tensors |= convention.to_checkpoint(name, tensor, stored)
    tensors |= _plain_tensors(model)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    require_disk(folder, int(total * 1.05), "the quantized checkpoint")
    config = quantization_config(plan, stored)
    spec = FORMATS[default_format(plan)]
    with atomic_folder(folder, replace=replace) as temporary:
        model.config.save_pretrained(temporary)  # type: ignore[union-attr, operator]
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(temporary)  # type: ignore[union-attr, operator]
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        _edit_config(temporary / "config.json", quantization_config=config)
        write_shards(temporary, tensors)
        fields = {
            "format": spec.name,
            "packing": PACKING,
            "scale_rule": plan.policy.scale_rule or spec.amax_rule,
            "plan": [{"tensor": entry.name, "shape": list(entry.shape), "format": entry.format} for entry in plan.entries],
            "code_plane": code_plane_fingerprint(quantized),
            "scale_plane": scale_plane_fingerprint(quantized),
            "kept": [{"tensor": name, "reason": reason, "bytes": size} for name, reason, size in plan.kept],
            **(details or {}),
        }
        manifest = write_manifest(temporary, KIND, **fields)
        from prism_ray.formats.lint import lint_checkpoint  # it reads folders through this module

        if findings := lint_checkpoint(temporary):
            raise CheckpointError(
                f"the written checkpoint contradicts its plan ({len(findings)} finding(s)): {findings[0]}",
                where=str(folder),
                remedy="nothing was released; mend the model or the policy and write again",
            )
        return manifest


def _plain_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers that are not planes, once per storage: the second name of a tied weight is left out."""
    # The planes are told by name: codes may be a buffer or a parameter (set_code_storage).
    inside = {
        id(getattr(module, part))
        for module in model.modules()
        if isinstance(module, QuantizedModule)
        for part in ("codes", "scales", "tensor_scale", "divisor")
    }
    # A tied head repeats the embedding's storage; transformers ties them again on load, as config.tie_word_embeddings says.
    seen: set[tuple[int, int]] = set()
    out: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) in inside:
            continue
        key = (value.data_ptr(), value.numel())
        if key not in seen:
            seen.add(key)
            out[name] = value.detach()
    return out


def _edit_config(path: Path, **fields: Any) -> None:
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | fields, indent=2, sort_keys=True) + "\n")


def read_config(folder: Path | str) -> dict[str, Any]:
    """The parsed config.json of a model folder; ModelError when it is missing, no JSON, or names no model_type."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ModelError("no config.json, so this is no model folder", where=str(folder), remedy="give a Hugging Face folder")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot be read ({error.strerror})", where=str(path), remedy=REWRITE) from None
    except ValueError as error:
        raise ModelError(f"is not valid JSON ({one_line(error)})", where=str(path), remedy=REWRITE) from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError("names no model_type, so it is no model's config", where=str(path), remedy="give a Hugging Face model folder")
    return config


def read_quantized(folder: Path | str) -> tuple[FormatSpec, dict[str, QuantTensor], dict[str, torch.Tensor]]:
    """(default format, quantized weights by Linear name, other tensors) of a compressed-tensors folder, memory-mapped. Experts are not fused.

    Each weight has the format that its config group says, or the narrower one (int3 within int4) that a manifest of ours names for it.
    """
    config = read_config(folder).get("quantization_config") or {}
    default = format_of_config(config, str(folder))
    tensors = dict(read_tensors(folder))
    names = convention.module_names(tensors)
    require_ignored_plain(config, names, str(folder))
    default, formats = _named_formats(folder, default, formats_of_modules(config, names, str(folder)))
    quantized = {name: convention.from_checkpoint(name, tensors, formats[name]) for name in names}
    used = {f"{name}.{part}" for name in names for part in convention.parts_of(formats[name])}
    return default, quantized, {name: tensor for name, tensor in tensors.items() if name not in used}


def _named_formats(folder: Path | str, default: FormatSpec, formats: dict[str, FormatSpec]) -> tuple[FormatSpec, dict[str, FormatSpec]]:
    """The formats that the config says, made exact by the plan of a manifest of ours where the folder has one."""
    if not (Path(folder) / MANIFEST_NAME).is_file():
        return default, formats
    manifest = read_manifest(folder, KIND, verify=False)
    planned = {entry["tensor"]: entry["format"] for entry in manifest.get("plan", [])}
    fused = convention.fused_names(formats)
    named = {name: narrowed(spec, planned.get(fused[name], spec.name), name) for name, spec in formats.items()}
    return narrowed(default, manifest.get("format", default.name), str(folder)), named


def load_quantized_model(folder: Path | str, *, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Any:
    """A transformers causal language model with its planes in `FP4Linear` and `FP4Experts` modules, in eval mode.

    dtype: of the tensors that are not quantized, and of the computation. A manifest, where there is one, is verified first.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(folder)
    if (folder / MANIFEST_NAME).is_file():
        read_manifest(folder, KIND)
    _, linears, plain = read_quantized(folder)
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    # The eager forward is the one that asks for one expert at a time, which FP4Experts answers.
    model.config._experts_implementation = "eager"
    for name, tensor in convention.fuse_experts(linears).items():
        install(model, name, tensor, dtype, bias=take_bias(model, name, plain))
    fill_plain(model, plain, dtype, folder)
    return model.to(device).eval()


def take_bias(model: nn.Module, name: str, plain: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Take the bias of a Linear out of `plain` where the model has one; a surplus one stays there and is refused with the other surplus."""
    wanted = dict(model.named_parameters()).get(f"{name}.bias")
    if wanted is None:
        return None
    bias = plain.pop(f"{name}.bias", None)
    if bias is None or bias.shape != wanted.shape:
        found = "is missing" if bias is None else f"has shape {list(bias.shape)}, the model needs {list(wanted.shape)}"
        raise CheckpointError(f"tensor '{name}.bias' {found}", where=name, remedy="the checkpoint is incomplete: write it again")
    return bias


def install(model: nn.Module, name: str, tensor: QuantTensor, dtype: torch.dtype, *, bias: torch.Tensor | None = None) -> None:
    """Put a quantized weight in the place of a Linear, or of a fused expert parameter, called `name`. Raises CheckpointError on a mismatch."""
    parent_name, _, leaf = name.rpartition(".")
    try:
        parent = model.get_submodule(parent_name)
        current = getattr(parent, leaf)
    except AttributeError:
        raise CheckpointError("the model has no such module", where=name, remedy="the checkpoint belongs to another architecture") from None
    shape = tuple(current.weight.shape) if isinstance(current, nn.Linear) else tuple(current.shape)
    if shape != tensor.shape:
        raise CheckpointError(f"shape {list(tensor.shape)} in the checkpoint, {list(shape)} in the model", where=name)
    if isinstance(current, nn.Linear):
        setattr(parent, leaf, FP4Linear(tensor, None if bias is None else bias.to(dtype)))
        return
    delattr(parent, leaf)
    setattr(parent, leaf, FP4Experts(tensor, dtype))


def fill_plain(model: Any, plain: dict[str, torch.Tensor], dtype: torch.dtype, folder: Path) -> None:
    """Assign the tensors that are not planes, tie what the config ties, and check that nothing is missing or left over."""
    values = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in plain.items()}
    for name, wanted in model.state_dict().items():
        if name in values and values[name].shape != wanted.shape:
            raise CheckpointError(
                f"tensor '{name}' has shape {list(values[name].shape)}, the model needs {list(wanted.shape)}",
                where=str(folder),
                remedy="the checkpoint is of another architecture",
            )
    result = model.load_state_dict(values, strict=False, assign=True)
    if result.unexpected_keys:
        raise CheckpointError(
            f"tensor '{result.unexpected_keys[0]}' has no place in the model",
            where=str(folder),
            remedy="the checkpoint is of another architecture",
        )
    model.tie_weights()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensor(s) missing, first '{missing[0]}'",
            where=str(folder),
            remedy="the checkpoint is incomplete: write it again",
        )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
