"""Open anything that can be a base or a variant: model sources, FP4 checkpoints, merged checkpoints, PEFT adapters on a base, and a source quantized by
bitsandbytes while it loads, written `bnb-nf4:SOURCE`, `bnb-fp4:SOURCE` or `bnb-int8:SOURCE`, where that package is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from prism_ray.adapters.admission import load_adapter
from prism_ray.core.errors import EnvironmentFault, ModelError, one_line
from prism_ray.core.optional import require
from prism_ray.formats.modules import QuantizedModule
from prism_ray.formats.safetensors_io import check_safetensors
from prism_ray.models.families import split_head
from prism_ray.models.load import load_model, load_tokenizer
from prism_ray.models.source import resolve
from prism_ray.risk.head import LinearHead

ADAPTER_FILE = "adapter_config.json"
BITSANDBYTES: dict[str, dict[str, Any]] = {
    "bnb-nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "bnb-fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "bnb-int8": {"load_in_8bit": True},
}


def split_adapter(source: str, base: str) -> tuple[str | None, str]:
    """(adapter folder or None, model source). `adapter@model` names both; an adapter folder alone belongs on `base`."""
    if (Path(source).expanduser() / ADAPTER_FILE).is_file():
        return source, base
    folder, at, model = source.rpartition("@")
    if at and (Path(folder).expanduser() / ADAPTER_FILE).is_file():
        return folder, model
    return None, source


def open_variant(source: str, *, base: str, dtype: torch.dtype, device: str = "cpu") -> Any:
    """The model of a source in eval mode, without gradients; an adapter is applied, active, on its model.

    Raises what `load_model` and `load_adapter` raise; ModelError for a PEFT adapter that does not fit.
    """
    adapter, model_source = split_adapter(source, base)
    kind, _, inner = model_source.partition(":")
    if kind in BITSANDBYTES:
        model: Any = _load_bitsandbytes(BITSANDBYTES[kind], inner, dtype, device)
    else:
        model = load_model(model_source, dtype=dtype, device=device)
    if adapter is not None:
        model = _with_adapter(model, Path(adapter).expanduser())
    return model.eval().requires_grad_(False)


def _load_bitsandbytes(options: dict[str, Any], source: str, dtype: torch.dtype, device: str) -> Any:
    """Linear layers but the head quantized by bitsandbytes; EnvironmentFault where it is not installed."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    require("bitsandbytes", "bitsandbytes")
    folder = resolve(source)
    check_safetensors(folder)
    config = BitsAndBytesConfig(**options, **({"bnb_4bit_compute_dtype": dtype} if "load_in_4bit" in options else {}))
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, device_map={"": device}, quantization_config=config, local_files_only=True, use_safetensors=True
        )
    except (ValueError, ImportError, RuntimeError) as error:
        raise EnvironmentFault(
            f"bitsandbytes cannot quantize it ({one_line(error)})", where=source, remedy="use its version for this device"
        ) from None


def _with_adapter(model: Any, folder: Path) -> Any:
    from peft import PeftModel

    kind = json.loads((folder / ADAPTER_FILE).read_text(encoding="utf-8")).get("peft_type")
    if kind == "SCALE_QLORA":
        return load_adapter(model, folder)
    check_safetensors(folder / "adapter_model.safetensors")
    try:
        return PeftModel.from_pretrained(model, str(folder))
    except (ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"adapter does not fit its base ({one_line(error)})", where=str(folder), remedy="give adapter@its-base") from None


def linear_head(model: Any) -> LinearHead:
    """The head's numbers, dequantized where it is quantized; adapters on the head are refused (its difference would not be the head's alone)."""
    parts = split_head(model)
    head = parts.head
    if hasattr(head, "base_layer") and getattr(head, "active_adapters", None):
        raise ModelError(
            "an adapter sits on the output head", where=type(head).__name__, remedy="merge the adapter first, then compare the merged model"
        )
    weight = head.dequantize(torch.float32) if isinstance(head, QuantizedModule) else _plain_weight(head)
    bias = getattr(head, "bias", None)
    return LinearHead(weight=weight, bias=bias, scale=parts.logit_scale, softcap=parts.softcap)


def _plain_weight(head: Any) -> torch.Tensor:
    weight = head.weight
    if hasattr(weight, "quant_state") or hasattr(weight, "CB"):
        from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant  # type: ignore[import-not-found]

        if hasattr(weight, "quant_state"):
            return dequantize_4bit(weight.data, weight.quant_state).to(torch.float32)
        return int8_vectorwise_dequant(weight.CB, weight.SCB).to(torch.float32)
    return weight


def open_tokenizer(source: str, base: str) -> Any:
    """The tokenizer that a variant ships, or None where it ships none (then the base's is meant)."""
    adapter, model_source = split_adapter(source, base)
    if adapter is not None:
        return None
    kind, _, inner = model_source.partition(":")
    model_source = inner if kind in BITSANDBYTES else model_source
    try:
        return load_tokenizer(model_source)
    except ModelError as error:
        if "no tokenizer" in error.what:
            return None
        raise


def require_same_tokenizer(base: Any, variant: Any, where: str, texts: list[str]) -> None:
    """Raise ModelError when two tokenizers disagree: another vocabulary, or other ids on one of `texts`."""
    if variant is None:
        return
    if base.get_vocab() != variant.get_vocab():
        ours, theirs = len(base), len(variant)
        what = f"its tokenizer has {theirs} tokens, the base's {ours}" if ours != theirs else "its tokenizer maps tokens to other ids"
        raise ModelError(f"{what}: the same text is not the same input", where=where, remedy="compare variants that keep the tokenizer")
    for text in texts:
        if base(text)["input_ids"] != variant(text)["input_ids"]:
            raise ModelError(
                f"its tokenizer cuts '{text[:40]}' into other tokens than the base's",
                where=where,
                remedy="compare variants that keep the tokenizer",
            )
