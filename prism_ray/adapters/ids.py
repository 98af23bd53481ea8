"""Adapter ids: the one pattern that a name from a client must match before anything looks it up (field case ADP-07)."""

from __future__ import annotations

import re

from prism_ray.core.errors import ConfigError

MAX_ID_LENGTH = 128
_ID = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{MAX_ID_LENGTH - 1}}}", re.ASCII)


def require_adapter_id(name: object) -> str:
    """`name` when it is 1 to 128 of `A-Z a-z 0-9 . _ -` without a leading dot; else ConfigError.

    The message repeats neither the name nor any path: it may go to the client that sent it. An id is looked up in a registry, never joined to a path.
    """
    if not isinstance(name, str) or _ID.fullmatch(name) is None:
        raise ConfigError(
            f"not a legal adapter id (1 to {MAX_ID_LENGTH} letters, digits, '.', '_' or '-', not beginning with a dot)",
            where="adapter id",
            remedy="use the id under which the adapter was published",
        )
    return name
