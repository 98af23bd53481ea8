"""The one place where PEFT is extended by methods of our own.

`register_peft_method` accepts only names that `PeftType` already has, and Python enums are closed: a member is added here, by the enum's own machinery for
str-valued members. Everything else goes through PEFT's public registration.

A prefix must not be part of another method's: PEFT finds the tensors of a method by substring, and LoRA's is "lora_".
"""

from __future__ import annotations

from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils.peft_types import PeftType, register_peft_method


def peft_type(name: str) -> PeftType:
    """The member of a method called `name` in lower case, added on first use."""
    member = name.upper()
    if member not in PeftType.__members__:
        added = str.__new__(PeftType, member)
        added._name_ = member
        added._value_ = member
        PeftType._member_map_[member] = added
        PeftType._value2member_map_[member] = added
        PeftType._member_names_.append(member)
    return PeftType._member_map_[member]  # type: ignore[return-value]


def register(name: str, config_cls: type, model_cls: type, prefix: str) -> None:
    """Register a method with PEFT; a second call does nothing."""
    if peft_type(name) not in PEFT_TYPE_TO_CONFIG_MAPPING:
        register_peft_method(name=name, config_cls=config_cls, model_cls=model_cls, prefix=prefix)
