"""Tensors of a checkpoint folder by name, only those asked for, dequantized on load.

`TensorSource(folder)` reads the shards' headers once and keeps a few memory-mapped files open. A *weight* is what the folder's quantization_config makes of
one or several stored tensors, under the name of the unquantized tensor:

| quant_method | stored | weight |
|---|---|---|
| none | bfloat16, float16, float32, integers | the tensor |
| fp8 (DeepSeek) | N.weight float8_e4m3fn [O, I], N.weight_scale_inv or N.scale, one number per block of weight_block_size (128 x 128; the last blocks may be smaller) or one for all: float32, bfloat16, or E8M0 (also as uint8) | w * s in float32 |
| fp8, experts of DeepSeek-V4 | N.weight int8 [O, I/2] (two E2M1 codes a byte), N.scale E8M0 [O, I/32] | as MXFP4 |
| mxfp4 (gpt-oss) | see `gpt_oss` | [E, I, O], as transformers holds it |
| compressed-tensors, modelopt | see those modules | [O, I] |

`parameters.load_block` fills a module from a source by the names of transformers.

Every result owns its memory: a view of the file would be shared by all who read it. Errors are CheckpointErrors that name file and tensor. A source is for
one thread; it pickles as its folder. Refuses: other quantization methods, float8 without a scale, scales that are negative or not finite.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from prism_ray.core.errors import CheckpointError, FormatError, PrismError, one_line
from prism_ray.formats import compressed_tensors, config_groups, gpt_oss, modelopt
from prism_ray.formats.fp8 import FP8_BLOCK, fp8_dequantize, packed_fp4
from prism_ray.formats.safetensors_io import REWRITE, check_safetensors, read_safetensors_header
from prism_ray.formats.spec import MXFP4, FormatSpec

if TYPE_CHECKING:
    from prism_ray.formats.parameters import ParameterMap

# Scales of activations and of the key-value cache: part of no weight, and of no parameter of a full-precision model.
_AUXILIARY = re.compile(r"\.(input_scale|input_global_scale|activation_scale|[kqv]_scale|kv_scale|output_scale)$")
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
        from prism_ray.formats.parameters import ParameterMap, meta_model

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
                out = packed_fp4(first, others[0], name).dequantize(dtype)
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
