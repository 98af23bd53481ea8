"""Scale-QLoRA's place among PEFT's methods."""

from __future__ import annotations

from peft.utils.peft_types import PeftType

from prism_ray.adapters import peft_types

NAME = "scale_qlora"
PREFIX = "qast_"


def peft_type() -> PeftType:
    """PeftType.SCALE_QLORA, added on first use."""
    return peft_types.peft_type(NAME)


def register() -> None:
    """Register the method with PEFT; a second call does nothing."""
    from prism_ray.adapters.scale_qlora.config import ScaleQLoraConfig
    from prism_ray.adapters.scale_qlora.model import ScaleQLoraModel

    peft_types.register(NAME, ScaleQLoraConfig, ScaleQLoraModel, PREFIX)
