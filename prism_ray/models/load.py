"""Load a tokenizer or a model from any source, with the weights' files checked (formats.safetensors_io) before a byte of them is used.

Refuses: pickled weights, remote code, tensors that the architecture needs and the files lack.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from prism_ray.core.errors import CheckpointError, EnvironmentFault, ModelError, one_line
from prism_ray.formats.checkpoint import load_quantized_model, read_config
from prism_ray.formats.safetensors_io import REWRITE, check_safetensors
from prism_ray.models.source import resolve

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
    importlib.import_module("prism_ray.models.looped")  # registers its family with transformers' Auto classes
    config = read_config(folder)
    _require_device(device)
    check_safetensors(folder)
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict) and quantization.get("quant_method") == "compressed-tensors":
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
