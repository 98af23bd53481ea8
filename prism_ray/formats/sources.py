"""Tensors of a checkpoint folder by name, only those asked for, dequantized on load; and one decoder block filled from them.

`TensorSource(folder)` reads the shards' headers once and keeps a few memory-mapped files open. A *weight* is what the folder's quantization_config makes of
one or several stored tensors, under the name of the unquantized tensor:

| quant_method | stored | weight |
|---|---|---|
| none | bfloat16, float16, float32, integers | the tensor |
| fp8 (DeepSeek) | N.weight float8_e4m3fn [O, I], N.weight_scale_inv or N.scale, one number per block of weight_block_size (128 x 128; the last blocks may be smaller) or one for all: float32, bfloat16, or E8M0 (also as uint8) | w * s in float32 |
| fp8, experts of DeepSeek-V4 | N.weight int8 [O, I/2] (two E2M1 codes a byte), N.scale E8M0 [O, I/32] | as MXFP4 |
| mxfp4 (gpt-oss) | see `gpt_oss` | [E, I, O], as transformers holds it |
| compressed-tensors, modelopt | see those modules | [O, I] |

`load_block` fills the parameters of a module by the names of transformers, whose own tables (`conversion_mapping`) say which tensors of the files
make which parameter: `experts.3.gate_proj.weight` (or w1, w3, …) of the files are slices of its fused `experts.gate_up_proj` [E, 2F, H].

Every result owns its memory: a view of the file would be shared by all who read it. Errors are CheckpointErrors that name file and tensor. A source is for
one thread; it pickles as its folder. Refuses: other quantization methods, float8 without a scale, scales that are negative or not finite.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from prism_ray.core.errors import CheckpointError, FormatError, ModelError, PrismError, one_line
from prism_ray.formats import compressed_tensors, config_groups, gpt_oss, modelopt
from prism_ray.formats.grids import require_legal
from prism_ray.formats.safetensors_io import REWRITE, check_safetensors, read_safetensors_header
from prism_ray.formats.spec import MXFP4, FormatSpec
from prism_ray.formats.tensor import QuantTensor

FP8_BLOCK = (128, 128)
# Scales of activations and of the key-value cache: part of no weight, and of no parameter of a full-precision model.
_AUXILIARY = re.compile(r"\.(input_scale|input_global_scale|activation_scale|[kqv]_scale|kv_scale|output_scale)$")
# Old Llama files hold the rotary frequencies, which the model computes.
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$")
_FLOAT8, _FLOAT8_SCALE = ("F8_E4M3", "F8_E5M2"), "F8_E8M0"
_PACKED = ("I8", "F4")
_COMPRESSED = tuple(f".{part}" for part in (compressed_tensors.CODES, compressed_tensors.SCALES, compressed_tensors.DIVISOR))
INCOMPLETE = "the checkpoint is incomplete: copy or write it again"


@dataclass(frozen=True)
class _Entry:
    """One weight: how it is stored (kind), in which tensors of the files, and its dequantized shape."""

    kind: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]


class TensorSource:
    """The weights of a checkpoint folder by name. folder: a Hugging Face folder of safetensors; max_open: files kept open."""

    def __init__(self, folder: Path | str, *, max_open: int = 8):
        # Not at import time: `checkpoint` may come to read through this module.
        from prism_ray.formats.checkpoint import read_config

        self.folder = Path(folder)
        self.config = read_config(self.folder)
        self._max_open = max_open
        self._open: OrderedDict[str, Any] = OrderedDict()
        self._headers, self._files = _headers(self.folder)
        self._settings: dict[str, Any] = self.config.get("quantization_config") or {}
        self._specs: dict[str, FormatSpec] = {}
        self._entries, used = self._quantized_entries()
        spare = {name for name in self._headers if name not in used and self.quantized_by and _AUXILIARY.search(name)}
        self.auxiliary = tuple(sorted(spare))
        for name, header in self._headers.items():
            if name not in used and name not in spare:
                self._entries[name] = self._plain_entry(name, header)

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorSource, (self.folder,)

    @property
    def quantized_by(self) -> str | None:
        """quant_method of the folder, or None."""
        method = self._settings.get("quant_method")
        if method is None and (self.folder / modelopt.CONFIG_NAME).is_file():
            method = "modelopt"
        return None if method is None else str(method)

    def names(self) -> list[str]:
        """Names of all weights, sorted."""
        return sorted(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the dequantized weight, from the header alone."""
        return self._entry(name).shape

    def dtype(self, name: str) -> str:
        """Storage type of the weight's main tensor as safetensors names it (BF16, F8_E4M3, U8, …)."""
        return str(self._headers[self._entry(name).parts[0]]["dtype"])

    def nbytes(self, name: str) -> int:
        """Bytes in the files, scales included."""
        spans = (self._headers[part]["data_offsets"] for part in self._entry(name).parts)
        return sum(end - begin for begin, end in spans)

    def get(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight in float32 or bfloat16; integer tensors stay what they are."""
        return self._load(name, dtype, None)

    def expert(self, name: str, index: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """weight[index] of a fused parameter [E, …], reading that part of the file only."""
        shape = self.shape(name)
        if len(shape) != 3 or not 0 <= index < shape[0]:
            raise CheckpointError(f"has shape {list(shape)}, so no expert {index}", where=f"{self.folder}: {name}")
        return self._load(name, dtype, index)

    @cached_property
    def parameters(self) -> ParameterMap:
        """Which weights make which parameter of the transformers model of this folder."""
        return ParameterMap.of(self, meta_model(self.folder))

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise CheckpointError(f"tensor '{name}' is missing", where=str(self.folder), remedy=INCOMPLETE)
        return self._entries[name]

    def _plain_entry(self, name: str, header: Mapping[str, Any]) -> _Entry:
        stored = str(header["dtype"])
        packed = name.endswith(".weight") and stored in ("U8", *_PACKED)
        if stored in (*_FLOAT8, _FLOAT8_SCALE) or packed:
            raise CheckpointError(
                f"tensor '{name}' is stored as {stored}, and no scale for it is in the files", where=self._path(name), remedy=INCOMPLETE
            )
        return _Entry("plain", (name,), tuple(header["shape"]))

    def _quantized_entries(self) -> tuple[dict[str, _Entry], set[str]]:
        """Weights of several tensors, and the names of all tensors that they use."""
        method, where = self.quantized_by, str(self.folder)
        if method is None:
            return {}, set()
        if method == "fp8":
            entries = self._fp8_entries()
        elif method == "mxfp4":
            entries = {name: self._gpt_oss_entry(name) for name in gpt_oss.parameter_names(self._headers)}
        elif method in ("modelopt", "modelopt_fp4"):
            configs = modelopt.read_configs(self.folder)
            parts = (modelopt.CODES, modelopt.SCALES, modelopt.FACTOR)
            modules = modelopt.require_complete(self._headers, where)
            modelopt.require_excluded_plain(*configs, modules, where)
            entries = {f"{name}.weight": self._packed_entry("modelopt", name, parts) for name in modules}
        elif method == "compressed-tensors":
            packed = sorted({name.rsplit(".", 1)[0] for name in self._headers if name.endswith(_COMPRESSED)})
            refused = [name for name in self._headers if name.rsplit(".", 1)[-1] in compressed_tensors.REFUSED]
            if refused:
                meaning = compressed_tensors.REFUSED[refused[0].rsplit(".", 1)[-1]]
                raise CheckpointError(f"'{refused[0]}' means {meaning}, which cannot be read", where=where, remedy="quantize it without")
            config_groups.require_ignored_plain(self._settings, packed, where)
            self._specs = config_groups.formats_of_modules(self._settings, packed, where)
            entries = {
                f"{name}.weight": self._packed_entry("compressed", name, compressed_tensors.parts_of(spec))
                for name, spec in self._specs.items()
            }
        else:
            readable = "fp8, mxfp4, modelopt, compressed-tensors"
            raise CheckpointError(f"quantization '{method}' cannot be read", where=where, remedy=f"readable: {readable}")
        return entries, {part for entry in entries.values() for part in entry.parts}

    def _require(self, part: str) -> tuple[int, ...]:
        if part not in self._headers:
            raise CheckpointError(f"tensor '{part}' is missing", where=str(self.folder), remedy=INCOMPLETE)
        return tuple(self._headers[part]["shape"])

    def _packed_entry(self, kind: str, module: str, parts: tuple[str, ...]) -> _Entry:
        names = tuple(f"{module}.{part}" for part in parts)
        shape, *_ = [self._require(name) for name in names]
        # Two codes a byte; integer formats store bytes four at a time.
        codes = 2 * (4 if self._headers[names[0]]["dtype"] == "I32" else 1)
        return _Entry(kind, names, (*shape[:-1], shape[-1] * codes))

    def _gpt_oss_entry(self, name: str) -> _Entry:
        blocks, scales = (self._require(f"{name}{end}") for end in (gpt_oss.BLOCKS, gpt_oss.SCALES))
        gpt_oss.check_shapes(name, blocks, scales)
        return _Entry("gpt-oss", (f"{name}{gpt_oss.BLOCKS}", f"{name}{gpt_oss.SCALES}"), (blocks[0], blocks[2] * MXFP4.block, blocks[1]))

    def _fp8_entries(self) -> dict[str, _Entry]:
        entries: dict[str, _Entry] = {}
        for scale in self._headers:
            if scale.endswith("_scale_inv"):
                weight = scale.removesuffix("_scale_inv")
                self._require(weight)
            elif scale.endswith(".scale") and self._headers.get(f"{scale[:-6]}.weight", {}).get("dtype") in (*_FLOAT8, *_PACKED):
                weight = f"{scale[:-6]}.weight"
            else:
                continue
            stored, shape = self._headers[weight]["dtype"], tuple(self._headers[weight]["shape"])
            if stored in _PACKED:
                entries[weight] = _Entry("fp4", (weight, scale), (*shape[:-1], shape[-1] * 2) if stored == "I8" else shape)
            elif stored in _FLOAT8:
                entries[weight] = _Entry("fp8", (weight, scale), shape)
            else:
                raise CheckpointError(f"tensor '{weight}' is stored as {stored}, but has the scale '{scale}'", where=self._path(weight))
        return entries

    def _load(self, name: str, dtype: torch.dtype, index: int | None) -> torch.Tensor:
        entry = self._entry(name)
        if dtype not in (torch.float32, torch.bfloat16):
            raise FormatError(f"weights are read as float32 or bfloat16, not {dtype}", where=name)
        tensors = {part: self._read(part, index) for part in entry.parts}
        first, *others = tensors.values()
        with _located(self._path(entry.parts[0])):
            if entry.kind == "plain":
                out = first.to(dtype, copy=True) if first.is_floating_point() else first.clone()
            elif entry.kind == "fp8":
                block = tuple(self._settings.get("weight_block_size") or FP8_BLOCK)
                out = fp8_dequantize(first, others[0], block, name, dtype)
            elif entry.kind == "fp4":
                out = _packed_fp4(first, others[0], name).dequantize(dtype)
            elif entry.kind == "gpt-oss":
                out = gpt_oss.parameter(gpt_oss.from_checkpoint(name, tensors).tensor, dtype)
            elif entry.kind == "modelopt":
                out = modelopt.from_checkpoint(name.removesuffix(".weight"), tensors).dequantize(dtype)
            else:
                module = name.removesuffix(".weight")
                out = compressed_tensors.from_checkpoint(module, tensors, self._specs[module]).dequantize(dtype)
        return out if index is None else out[0]

    def _path(self, part: str) -> str:
        return str(self.folder / self._files[part])

    def _read(self, part: str, index: int | None) -> torch.Tensor:
        """A stored tensor, or its slice [index:index + 1], as a view of the file."""
        file = self._files[part]
        try:
            if file not in self._open:
                self._open[file] = safe_open(self.folder / file, framework="pt").__enter__()
            self._open.move_to_end(file)
            while len(self._open) > self._max_open:
                self._open.popitem(last=False)[1].__exit__(None, None, None)
            handle = self._open[file]
            tensor: torch.Tensor = handle.get_tensor(part) if index is None else handle.get_slice(part)[index : index + 1]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"tensor '{part}' cannot be read ({one_line(error)})", where=self._path(part), remedy=REWRITE) from None
        return tensor

    def close(self) -> None:
        """Close the open files; the next read opens its file again."""
        while self._open:
            self._open.popitem()[1].__exit__(None, None, None)


def _headers(folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """(header entry, file name) of every tensor of a folder; a shard that is damaged is named with the first tensor that does not lie in it whole."""
    headers: dict[str, dict[str, Any]] = {}
    files: dict[str, str] = {}
    try:
        shards = check_safetensors(folder)
    except CheckpointError as error:
        cut = _first_cut(Path(error.where))
        raise CheckpointError(error.what + (f"; first cut tensor '{cut}'" if cut else ""), where=error.where, remedy=error.remedy) from None
    for shard in shards:
        for name, header in read_safetensors_header(shard).items():
            headers[name] = header
            files[name] = shard.name
    return headers, files


def _first_cut(path: Path) -> str | None:
    """Name of the first tensor that ends behind the end of a safetensors file, where its header can still be read."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length < size else {}
        ends = {name: int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None
    cut = [(end, name) for name, end in ends.items() if end > size - 8 - length]
    return min(cut)[1] if cut else None


@contextmanager
def _located(path: str) -> Iterator[None]:
    """Put the file before the tensor that a reader's own error names."""
    try:
        yield
    except PrismError as error:
        raise CheckpointError(error.what, where=f"{path}: {error.where}", remedy=error.remedy or REWRITE) from None


def _scale_values(scale: torch.Tensor, name: str) -> torch.Tensor:
    """Block scales as float32; E8M0 bytes, typed or as uint8, are powers of two."""
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        data = scale.view(torch.uint8)
        require_legal(MXFP4.grid, data.reshape(-1, data.shape[-1] if data.ndim else 1), name)
        return MXFP4.grid.decode(data)
    values = scale.to(torch.float32)
    if not bool((torch.isfinite(values) & (values >= 0)).all()):
        raise CheckpointError("a scale is negative or not finite", where=name, remedy=REWRITE)
    return values


def fp8_dequantize(
    weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, ...], name: str, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """W[..., o, i] = weight[..., o, i] * scale[..., o // block[0], i // block[1]], multiplied in float32 and rounded once to dtype.

    weight: float8 [..., O, I]. scale: [..., ceil(O / block[0]), ceil(I / block[1])], or one number (or one a matrix) for the whole.
    """
    rows, columns = weight.shape[-2:] if weight.ndim > 1 else (1, weight.shape[-1])
    expected = (*weight.shape[:-2], math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    # E4M3 has one NaN and no infinity; in E5M2 all magnitudes from 0x7C on are neither.
    if int((weight.view(torch.uint8) & 0x7F).max()) >= (0x7F if weight.dtype == torch.float8_e4m3fn else 0x7C):
        raise CheckpointError("a weight is not finite", where=name, remedy=REWRITE)
    values = _scale_values(scale, name)
    if values.numel() == math.prod(weight.shape[:-2]) and tuple(values.shape) != expected:
        return (weight.to(torch.float32) * values.reshape(*weight.shape[:-2], 1, 1)).to(dtype).reshape(weight.shape)
    if tuple(values.shape) != expected:
        raise CheckpointError(
            f"the scales have shape {list(values.shape)}, a weight {list(weight.shape)} in blocks of {list(block)} needs {list(expected)}",
            where=name,
        )
    out = torch.empty(weight.shape, dtype=dtype)
    flat, flat_out = weight.reshape(-1, rows, columns), out.view(-1, rows, columns)
    for matrix, scales, target in zip(flat, values.reshape(-1, *expected[-2:]), flat_out, strict=True):
        wide = scales.repeat_interleave(block[1], dim=1)[:, :columns]
        # Band by band: a whole float32 copy of a large matrix is never alive beside its result.
        for band in range(expected[-2]):
            span = slice(band * block[0], (band + 1) * block[0])
            target[span] = matrix[span].to(torch.float32) * wide[band]
    return out


def _packed_fp4(weight: torch.Tensor, scale: torch.Tensor, name: str) -> QuantTensor:
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise CheckpointError(f"scales of packed FP4 have dtype {scale.dtype}, expected E8M0", where=name)
    tensor = QuantTensor(
        codes=weight.view(torch.uint8), scales=scale.view(torch.uint8), tensor_scale=torch.ones(weight.shape[:-2]), format=MXFP4
    )
    tensor.validate(name)
    return tensor


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
