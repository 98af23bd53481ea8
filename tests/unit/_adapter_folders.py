"""Adapter folders over tiny bases, for the tests of the store and of patches."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftModel, get_peft_model

from prism_ray.adapters.scale_plane import adapter_layers, write_scale_plane
from prism_ray.adapters.scale_qlora import ScaleQLoraConfig
from prism_ray.calibrate.quantize import quantize_to_folder
from prism_ray.formats.checkpoint import load_quantized_model
from prism_ray.formats.policy import QuantPolicy
from prism_ray.models.tiny import tiny_llama, tiny_qwen3_moe, tiny_tokenizer

BUILD = {"llama": tiny_llama, "moe": tiny_qwen3_moe}


def make_base(folder: Path, kind: str = "llama", format: str = "nvfp4") -> Path:
    """A quantized tiny checkpoint."""
    quantize_to_folder(BUILD[kind](), tiny_tokenizer(), QuantPolicy(format=format), folder, source="tiny")
    return folder


def adapted(base: Path, seed: int = 0, strength: float = 0.5, **options) -> PeftModel:
    """The loaded base under an adapter whose factors move a good share of the scales."""
    torch.manual_seed(seed)  # A is drawn from the global generator
    config = ScaleQLoraConfig(r=2, alpha=2.0, **options)
    model = get_peft_model(load_quantized_model(base, dtype=torch.float32), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in adapter_layers(model).values():
            layer.qast_B["default"].copy_(torch.randn(layer.qast_B["default"].shape, generator=generator) * strength)
    return model.eval()


def make_adapter(base: Path, folder: Path, seed: int = 0, strength: float = 0.5, metrics: dict | None = None, **options) -> Path:
    """A published-looking adapter folder: factors, config, scale plane, manifest."""
    model = adapted(base, seed, strength, **options)
    model.save_pretrained(folder)
    write_scale_plane(model, folder, metrics=metrics or {"accuracy": seed / 10})
    return folder
