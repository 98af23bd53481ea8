"""References to what a store holds: `name` (the current version) or `name@n` with n from 1.

Names and tenants match the one pattern of adapter ids, which has no separators and no leading dot, before they become part of a path (field case ADP-07).
Whatever else comes is refused without being repeated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from prism_ray.adapters.ids import require_adapter_id
from prism_ray.core.errors import ConfigError

_VERSION = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
DEFAULT_TENANT = "default"


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A name and, where one was given, the number of a version."""

    name: str
    version: int | None

    def __str__(self) -> str:
        return self.name if self.version is None else f"{self.name}@{self.version}"


def require_digest(value: object, what: str) -> str:
    """`value` as 64 hexadecimal digits; ConfigError otherwise. It becomes part of a path."""
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ConfigError("not a SHA-256 of 64 hexadecimal digits", where=what, remedy="take it from a manifest that prism-ray wrote")
    return value


def parse_reference(text: str) -> Reference:
    """`name` or `name@n`; ConfigError otherwise."""
    name, separator, version = text.partition("@") if isinstance(text, str) else ("", "", "")
    require_adapter_id(name)
    if separator and not _VERSION.fullmatch(version):
        raise ConfigError("not a version number", where=f"{name}@", remedy=f"write {name}@1, {name}@2, ..., or {name} for the current one")
    return Reference(name=name, version=int(version) if separator else None)
