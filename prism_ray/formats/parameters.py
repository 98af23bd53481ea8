"""The parameters of a transformers model from the weights of a checkpoint folder: a whole module, one parameter, or one expert at a time.

transformers' own tables (`conversion_mapping`) say which tensors of the files make which parameter: `experts.3.gate_proj.weight` (or w1, w3, …) of the files
are slices of its fused `experts.gate_up_proj` [E, 2F, H]. Stacks of experts are filled slice by slice; every other conversion is transformers' own.

Errors are CheckpointErrors that name a parameter without a tensor, a tensor without a parameter, or a wrong shape.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prism_ray.core.errors import CheckpointError, FormatError, ModelError, one_line
from prism_ray.formats.safetensors_io import REWRITE
from prism_ray.formats.sources import INCOMPLETE, TensorSource

# Old Llama files hold the rotary frequencies, which the model computes.
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$")


def meta_model(folder: Path | str) -> Any:
    """The transformers model of a folder without weights, or None where transformers knows no causal language model of that type."""
    from accelerate import init_empty_weights
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError):
        return None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with init_empty_weights():
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Recipe:
    """How parameters come from the files: weights (names in the source) through a converter of transformers, or one weight as it is (None).

    patterns: the converter's source pattern of each weight. targets: the parameters that come out.
    """

    targets: tuple[str, ...]
    weights: tuple[str, ...]
    patterns: tuple[str, ...] = ()
    converter: Any = None

    @property
    def fused(self) -> bool:
        """Whether it stacks experts, with parts side by side: the one conversion that is done here, slice by slice."""
        if self.converter is None:
            return False
        steps = [(type(step).__name__, getattr(step, "dim", None)) for step in self.converter.operations]
        return steps in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])

    def table(self) -> list[dict[int, str]]:
        """For each part (gate, up) of a fused parameter: expert number -> weight."""
        found: dict[str, dict[int, str]] = {pattern: {} for pattern in self.converter.source_patterns}
        for name, pattern in zip(self.weights, self.patterns, strict=True):
            match = re.search(pattern.replace("*.", r"(\d+)\."), name)
            found[pattern][int(match[1]) if match else len(found[pattern])] = name
        return list(found.values())


@dataclass
class ParameterMap:
    """Parameter name -> Recipe for a whole checkpoint. surplus: (name as a parameter, name in the files) of weights with no place in the model.

    dtypes: parameters whose dtype does not follow the one asked for (integers, routing biases that transformers keeps in float32).
    tied: parameters that are another one under a second name.
    """

    recipes: dict[str, Recipe]
    surplus: list[tuple[str, str]] = field(default_factory=list)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    model: Any = None

    @classmethod
    def of(cls, source: TensorSource, model: Any) -> ParameterMap:
        """The map of a source for a transformers model (meta tensors suffice); model None: names are parameters' names already."""
        if model is None:
            return cls({name: Recipe((name,), (name,)) for name in source.names()})
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

        transforms = get_model_conversion_mapping(model)
        converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
        renamings: list[Any] = [entry for entry in transforms if not isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        state, base = model.state_dict(), model.base_model_prefix
        ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()] + [_COMPUTED]
        found: dict[str, tuple[Any, list[str], list[str]]] = {}
        surplus: list[tuple[str, str]] = []
        for name in sorted(source.names(), key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, base, state)
            if target not in state and name in state:
                target, pattern = name, None
            if target not in state:
                if not any(regex.search(name) or regex.search(target) for regex in ignored):
                    surplus.append((target, name))
                continue
            converter = None if pattern is None else by_pattern[pattern]
            _, names, patterns = found.setdefault(target, (converter, [], []))
            names.append(name)
            patterns.append(pattern or "")
        recipes: dict[str, Recipe] = {}
        for target, (converter, names, patterns) in found.items():
            targets: tuple[str, ...] = (target,)
            if converter is None and len(names) > 1:
                raise CheckpointError(f"'{names[0]}' and '{names[1]}' are both '{target}'", where=str(source.folder), remedy=REWRITE)
            if converter is not None:
                targets = tuple(target.replace(converter.target_patterns[0], other) for other in converter.target_patterns)
            recipe = Recipe(targets, tuple(names), tuple(patterns), converter)
            recipes |= dict.fromkeys(targets, recipe)
        return cls(recipes, surplus, _fixed_dtypes(model, state), dict(getattr(model, "all_tied_weights_keys", None) or {}), model)

    def recipe(self, name: str, source: TensorSource) -> Recipe:
        """The recipe of a parameter; CheckpointError where the files have nothing for it."""
        found = self.recipes.get(name) or self.recipes.get(self.tied.get(name, ""))
        if found is None:
            raise CheckpointError(f"no tensor for the parameter '{name}'", where=str(source.folder), remedy=INCOMPLETE)
        return found


def _fixed_dtypes(model: Any, state: Mapping[str, torch.Tensor]) -> dict[str, torch.dtype]:
    """Dtypes that transformers does not change to the one asked for: those a module sets itself, and what a family keeps in float32."""
    strict = [re.compile(pattern.replace("*", ".*")) for pattern in getattr(model, "_keep_in_fp32_modules_strict", None) or ()]
    fixed = {name: tensor.dtype for name, tensor in state.items() if tensor.dtype != torch.bfloat16}
    return fixed | {name: torch.float32 for name in state if any(pattern.search(name) for pattern in strict)}


def load_block(source: TensorSource, module: nn.Module, prefix: str, dtype: torch.dtype, *, parameters: ParameterMap | None = None) -> int:
    """Fill every parameter and persistent buffer of a module (on meta or not) from the files; returns the bytes read.

    prefix: the module's path in the transformers model ("model.layers.3", "model.norm", "" for the whole). parameters: default that of the source's own
    model. Raises CheckpointError naming a parameter that the files lack, a tensor under the prefix that the module does not use, or a wrong shape.
    """
    parameters = source.parameters if parameters is None else parameters
    dotted = f"{prefix}." if prefix else ""
    wanted = {dotted + name: tensor for name, tensor in module.state_dict(keep_vars=True).items()}
    recipes = {name: parameters.recipe(name, source) for name in wanted}
    unused = [name for target, name in parameters.surplus if target.startswith(dotted)]
    unused += [entry.weights[0] for target, entry in parameters.recipes.items() if target.startswith(dotted) and target not in wanted]
    if unused:
        raise CheckpointError(
            f"{len(unused)} tensor(s) under '{prefix}' have no place in {type(module).__name__}: {', '.join(sorted(unused)[:4])}",
            where=str(source.folder),
            remedy="the checkpoint is of another architecture",
        )
    for name, value in load_parameters(source, wanted, dtype, parameters=parameters):
        owner = module.get_submodule(name.removeprefix(dotted).rpartition(".")[0])
        parameter = isinstance(wanted[name], nn.Parameter)
        setattr(owner, name.rpartition(".")[2], nn.Parameter(value, requires_grad=False) if parameter else value)
    left = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if left:
        raise ModelError(
            f"buffer '{left[0]}' is on meta and in no file",
            where=prefix,
            remedy="build the block with init_empty_weights(include_buffers=False)",
        )
    used = {weight for recipe in recipes.values() for weight in recipe.weights}
    return sum(source.nbytes(weight) for weight in used)


def load_parameters(
    source: TensorSource, wanted: Mapping[str, torch.Tensor], dtype: torch.dtype, *, parameters: ParameterMap | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, value) of parameters and buffers by their names in the transformers model, one at a time.

    wanted: name -> a tensor of its shape and kind (on meta or not). Floating-point ones come in `dtype`, those that the family keeps in another one in that. Raises CheckpointError
    naming a parameter that the files lack or a wrong shape.
    """
    parameters = source.parameters if parameters is None else parameters
    ready: dict[str, torch.Tensor] = {}
    for name, tensor in wanted.items():
        recipe = parameters.recipe(name, source)
        if name not in ready:
            asked = parameters.dtypes.get(name, dtype if tensor.dtype.is_floating_point else tensor.dtype)
            ready |= _realize(source, recipe, name, asked, parameters.model, tuple(tensor.shape))
        value = ready.pop(name)
        if value.shape != tensor.shape:
            raise CheckpointError(
                f"'{recipe.weights[0]}' makes '{name}' {list(value.shape)}, the module needs {list(tensor.shape)}",
                where=str(source.folder),
                remedy="the checkpoint is of another architecture",
            )
        yield name, value


def load_expert(source: TensorSource, name: str, index: int, dtype: torch.dtype, *, parameters: ParameterMap | None = None) -> torch.Tensor:
    """One expert of the fused parameter `name` (…mlp.experts.gate_up_proj), as `load_block` would fill it, reading that expert only."""
    recipe = (source.parameters if parameters is None else parameters).recipe(name, source)
    if recipe.converter is None:
        return source.expert(recipe.weights[0], index, dtype)
    if not recipe.fused:
        raise FormatError("is no stack of experts in the files", where=name, remedy="read it whole with load_block")
    parts = recipe.table()
    if any(index not in part for part in parts):
        raise CheckpointError(f"expert {index} of '{name}' is missing", where=str(source.folder), remedy=INCOMPLETE)
    return torch.cat([source.get(part[index], dtype) for part in parts])


def _realize(
    source: TensorSource, recipe: Recipe, name: str, dtype: torch.dtype, model: Any, shape: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """The parameters that a recipe makes, by name; shape: that of the one asked for."""
    # Integer tensors are returned as they are stored; the float type asked of `get` does not matter for them.
    asked = dtype if dtype in (torch.float32, torch.bfloat16) else torch.float32
    if recipe.converter is None:
        value = source.get(recipe.weights[0], asked)
        return {name: value if value.is_floating_point() else value.to(dtype)}
    if recipe.fused:
        return {name: _fuse(source, recipe, name, asked, shape[0])}
    converter = copy.deepcopy(recipe.converter)
    for weight, pattern in zip(recipe.weights, recipe.patterns, strict=True):
        converter.add_tensor(recipe.targets[0], weight, pattern, source.get(weight, asked))
    try:
        made = converter.convert(recipe.targets[0], model=model, config=model.config)
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError) as error:
        raise CheckpointError(
            f"'{recipe.weights[0]}' cannot be converted to '{name}' ({one_line(error)})", where=str(source.folder), remedy=INCOMPLETE
        ) from None
    out = {target: value[0] if isinstance(value, list) else value for target, value in made.items()}
    if name not in out:
        raise CheckpointError(f"'{recipe.weights[0]}' gave {sorted(out)}, not '{name}'", where=str(source.folder))
    return out


def _fuse(source: TensorSource, recipe: Recipe, name: str, dtype: torch.dtype, experts: int) -> torch.Tensor:
    """Experts stacked into [E, rows of all parts, I], each written into its place: no second copy of the whole is ever alive."""
    parts = recipe.table()
    for part, pattern in zip(parts, recipe.converter.source_patterns, strict=True):
        missing = sorted(set(range(experts)) - set(part))
        if missing:
            raise CheckpointError(f"'{pattern}' of experts {missing} is missing for '{name}'", where=str(source.folder), remedy=INCOMPLETE)
        if len(part) > experts:
            raise CheckpointError(f"{len(part)} experts for '{name}', the module has {experts}", where=str(source.folder), remedy=REWRITE)
    rows = [source.shape(part[0])[0] for part in parts]
    out = torch.empty((experts, sum(rows), *source.shape(parts[0][0])[1:]), dtype=dtype)
    for position, part in enumerate(parts):
        start = sum(rows[:position])
        for expert, weight in part.items():
            piece = source.get(weight, dtype)
            if piece.shape != out[expert, start : start + rows[position]].shape:
                raise CheckpointError(f"tensor '{weight}' has shape {list(piece.shape)}, unlike expert 0", where=str(source.folder))
            out[expert, start : start + rows[position]] = piece
    return out
