"""The one place where PEFT is extended.

`register_peft_method` accepts only names that `PeftType` already has, and Python enums are closed: the member is added here, by the enum's own
machinery for str-valued members. Everything else goes through PEFT's public registration.
"""

from __future__ import annotations

from peft.utils.peft_types import PeftType, register_peft_method

NAME = "scale_qlora"
MEMBER = NAME.upper()
PREFIX = "qast_"


def peft_type() -> PeftType:
    """PeftType.SCALE_QLORA, added on first use."""
    if MEMBER not in PeftType.__members__:
        member = str.__new__(PeftType, MEMBER)
        member._name_ = MEMBER
        member._value_ = MEMBER
        PeftType._member_map_[MEMBER] = member
        PeftType._value2member_map_[MEMBER] = member
        PeftType._member_names_.append(MEMBER)
    return PeftType._member_map_[MEMBER]  # type: ignore[return-value]


def register() -> None:
    """Register the method with PEFT; a second call does nothing."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    from prism_ray.adapters.scale_qlora.config import ScaleQLoraConfig
    from prism_ray.adapters.scale_qlora.model import ScaleQLoraModel

    if peft_type() not in PEFT_TYPE_TO_CONFIG_MAPPING:
        # The prefix must not contain "lora_": PEFT finds the tensors of a method by substring, and LoRA's is "lora_".
        register_peft_method(name=NAME, config_cls=ScaleQLoraConfig, model_cls=ScaleQLoraModel, prefix=PREFIX)
