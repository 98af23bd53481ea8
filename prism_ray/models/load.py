"""Load a tokenizer or a model from any source, with the weights' files checked before a byte of them is used.

A safetensors file is 8 bytes little-endian header length N, N bytes of JSON ({name: {dtype, shape, data_offsets: [begin, end]}}), then the
data. `check_safetensors` reads only the headers: N within the file, offsets inside the data, contiguous and without gaps from 0, each as
long as its dtype and shape say, the last one ending where the file ends; an index must name shards that exist and hold its tensors.
Refuses: pickled weights, remote code, tensors that the architecture needs and the files lack.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from prism_ray.core.errors import CheckpointError, EnvironmentFault, ModelError
from prism_ray.models.source import one_line, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
# The safetensors library's own limit; a larger length is a damaged file, not a large header.
MAX_HEADER_BYTES = 100_000_000
REWRITE = "copy or download it again"

_DTYPE_BITS = {
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


def load_tokenizer(spec: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; where it has no padding token the end-of-text token pads.

    Raises what `resolve` raises, and ModelError when the folder holds no tokenizer that can be read.
    """
    from transformers import AutoTokenizer

    folder = resolve(str(spec))
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")):
        # transformers 5 would build an empty tokenizer from the model type alone.
        raise ModelError("the folder holds no tokenizer", where=str(folder), remedy="copy tokenizer.json and tokenizer_config.json into it")
    with _loading(folder, "its tokenizer cannot be loaded", ModelError):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise ModelError("the tokenizer has neither a padding nor an end-of-text token", where=str(folder), remedy="set pad_token")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(spec: str | Path, *, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu") -> PreTrainedModel:
    """A causal language model in eval mode with weights of `dtype` on `device`; 4-bit checkpoints come as their quantized modules.

    Raises what `resolve` raises; ModelError for an unknown or non-causal architecture and for a folder without safetensors;
    CheckpointError naming the file that is truncated or inconsistent, or the tensors that are missing; EnvironmentFault for a device
    or a quantization package that is not there.
    """
    folder = resolve(str(spec))
    config = read_config(folder)
    _require_device(device)
    check_safetensors(folder)
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict) and quantization.get("quant_method") == "compressed-tensors":
        from prism_ray.formats.checkpoint import load_quantized_model

        return load_quantized_model(folder, dtype=dtype, device=str(device))
    model: Any = _load_plain(folder, dtype)
    return model.to(device).eval()


def _load_plain(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    with _loading(folder / "config.json", "transformers does not know this architecture", ModelError):
        config = AutoConfig.from_pretrained(folder, **options)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"'{config.model_type}' is no causal language model", where=str(folder / "config.json"), remedy="use a text-generation model"
        )
    with _loading(folder, "its weights cannot be loaded", CheckpointError):
        options |= {"config": config, "dtype": dtype, "use_safetensors": True, "output_loading_info": True}
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        # transformers would fill them with random numbers and only warn.
        raise CheckpointError(
            f"{len(missing)} tensors that {type(model).__name__} needs are not in the files, for example {missing[0]}",
            where=str(folder),
            remedy=REWRITE,
        )
    return model


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a model folder; ModelError when it is missing, no JSON, or names no model_type."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot be read ({error.strerror})", where=str(path), remedy=REWRITE) from None
    except ValueError as error:
        raise ModelError(f"is not valid JSON ({one_line(error)})", where=str(path), remedy=REWRITE) from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError("names no model_type, so it is no model's config", where=str(path), remedy="give a Hugging Face model folder")
    return config


def check_safetensors(path: Path | str) -> list[Path]:
    """Check the headers of a model folder's shards, of an index's shards, or of one safetensors file; returns the files checked.

    Reads headers only, so it costs milliseconds for any size. In a folder `model.safetensors` comes before the index, as in transformers.
    Raises CheckpointError naming the file and what is wrong with it, ModelError for a folder without safetensors weights.
    """
    path = Path(path)
    if path.is_dir():
        single, index = path / SINGLE_NAME, path / INDEX_NAME
        if not single.is_file() and not index.is_file():
            pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
            found = f" (only {pickled[0]}, and pickled weights are not loaded)" if pickled else ""
            raise ModelError(f"the folder holds no {SINGLE_NAME} and no {INDEX_NAME}{found}", where=str(path), remedy=REWRITE)
        path = single if single.is_file() else index
    if path.name.endswith(".json"):
        return _check_index(path)
    read_safetensors_header(path)
    return [path]


def _check_index(index: Path) -> list[Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards: dict[str, list[str]] = {}
        for tensor, shard in weight_map.items():
            if not isinstance(shard, str):
                raise TypeError(f"the shard of '{tensor}' is no text")
            shards.setdefault(shard, []).append(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"is no index of safetensors shards ({one_line(error)})", where=str(index), remedy=REWRITE) from None
    for shard, tensors in sorted(shards.items()):
        if Path(shard).name != shard:
            raise CheckpointError(f"names the shard '{shard}', which is no file name of this folder", where=str(index), remedy=REWRITE)
        if not (index.parent / shard).is_file():
            raise CheckpointError(f"names the shard '{shard}', which is not there", where=str(index), remedy="download the missing shard")
        absent = sorted(set(tensors) - read_safetensors_header(index.parent / shard).keys())
        if absent:
            raise CheckpointError(f"says that {shard} holds '{absent[0]}', which it does not", where=str(index), remedy=REWRITE)
    return [index.parent / shard for shard in sorted(shards)]


def read_safetensors_header(path: Path) -> dict[str, dict[str, Any]]:
    """The tensors of one safetensors file, {name: {dtype, shape, data_offsets}}, after checking them against the file's size."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise _damaged(path, f"{size} bytes found, a header of {length} bytes announced")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})", where=str(path), remedy=REWRITE) from None
    try:
        header = json.loads(text)
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        spans = sorted((*_span(entry), name) for name, entry in tensors.items())
        sizes = {name: _bits(entry) for name, entry in tensors.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _damaged(path, f"its header is no table of tensors ({one_line(error)})") from None
    _check_spans(path, spans, sizes, size - 8 - length)
    return tensors


def _check_spans(path: Path, spans: list[tuple[int, int, str]], sizes: dict[str, int | None], data_bytes: int) -> None:
    """Spans of tensors, sorted by begin, must tile [0, data_bytes) and have the sizes of their dtype and shape."""
    position = 0
    for begin, end, name in spans:
        if begin != position:
            fault = "overlaps the tensor before it" if begin < position else "leaves a gap before it"
            raise _damaged(path, f"tensor '{name}' {fault} (begins at {begin}, expected {position})")
        if end < begin:
            raise _damaged(path, f"tensor '{name}' ends at {end}, before it begins at {begin}")
        bits = sizes[name]
        if bits is not None and bits != 8 * (end - begin):
            raise _damaged(path, f"tensor '{name}' occupies {end - begin} bytes, its dtype and shape say {bits / 8:g}")
        position = end
    if position != data_bytes:
        fault = "the file is truncated" if position > data_bytes else "bytes follow the last tensor"
        raise _damaged(path, f"{data_bytes} bytes of data found, its header describes {position}: {fault}")


def _span(entry: dict[str, Any]) -> tuple[int, int]:
    begin, end = entry["data_offsets"]
    return int(begin), int(end)


def _bits(entry: dict[str, Any]) -> int | None:
    """Bits of one tensor, or None for a dtype newer than this table, whose size is then left to the safetensors library."""
    shape = [int(length) for length in entry["shape"]]
    if any(length < 0 for length in shape):
        raise ValueError("negative length in a shape")
    width = _DTYPE_BITS.get(entry["dtype"])
    return None if width is None else width * math.prod(shape)


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(what, where=str(path), remedy=REWRITE)


def _require_device(device: str | torch.device) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise EnvironmentFault(f"device '{device}' cannot be used ({one_line(error)})", remedy="use cpu") from None


@contextmanager
def _loading(where: Path, what: str, kind: type[ModelError | CheckpointError]) -> Iterator[None]:
    """One line instead of a library's traceback; no progress bars, which flood a job log (field case RAY-06)."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    except ImportError as error:
        raise EnvironmentFault(f"{what}: {one_line(error)}", where=str(where), remedy="install the package it names") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise kind(f"{what} ({one_line(error)})", where=str(where), remedy="use another model or write the folder again") from error
    finally:
        if bars:
            logging.enable_progress_bar()
