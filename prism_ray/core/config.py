"""Strict, frozen configuration objects.

One pydantic base class for every config of the project: unknown keys are refused with the nearest valid name, values are
type-checked, instances are immutable. A variant is made by `with_overrides({"train.learning_rate": "1e-3"})`, which is also what the
command line's `key=value` arguments go through.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from prism_ray.core.errors import ConfigError


class Config(BaseModel):
    """Base of every config: frozen, keyword-only, no unknown keys, finite floats."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False, protected_namespaces=())

    def __init__(self, **values: Any):
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _one_line(type(self), error) from None

    @classmethod
    def load(cls, values: Mapping[str, Any]) -> Self:
        """Build from plain data (parsed JSON); raises ConfigError naming the field."""
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able data; `load` of it gives an equal object."""
        return json.loads(self.model_dump_json())

    def with_overrides(self, overrides: Mapping[str, Any] | Iterable[str]) -> Self:
        """A copy with dotted keys replaced.

        overrides: {"train.steps": 10}, values as they are, or ["train.steps=10"], where the text behind = is read as JSON if it parses (numbers, lists,
        true, null) and kept as text if not. Unknown keys raise ConfigError with the nearest valid name.
        """
        pairs = overrides.items() if isinstance(overrides, Mapping) else [_split(item) for item in overrides]
        data = self.to_dict()
        for key, value in pairs:
            *parents, leaf = key.split(".")
            node: Any = data
            owner: Any = self
            for name in parents:
                owner = _child(owner, name, key)
                if node.get(name) is None:
                    raise ConfigError(f"'{name}' is not set, so '{key}' cannot be changed", where=key, remedy=f"set {name} first")
                node = node[name]
                # An earlier override of this call may have filled what was not set; its names are checked when the whole is loaded.
                owner = node if owner is None else owner
            _child(owner, leaf, key)
            node[leaf] = value
        return type(self).load(data)


def _split(item: str) -> tuple[str, Any]:
    key, separator, text = item.partition("=")
    if not separator or not key:
        raise ConfigError(f"'{item}' is not of the form key=value", where=item, remedy="write for example train.steps=40")
    try:
        return key, json.loads(text)
    except ValueError:
        return key, text


def _child(owner: Any, name: str, key: str) -> Any:
    """Field `name` of a config (or entry of a mapping), refusing unknown names with the nearest valid one."""
    if isinstance(owner, Mapping):
        return owner.get(name)
    fields = type(owner).model_fields if isinstance(owner, Config) else {}
    if name not in fields:
        raise ConfigError(f"unknown option '{key}'", where=key, remedy=suggest(name, dotted_names(owner) if fields else []))
    return getattr(owner, name)


def dotted_names(config: Config) -> list[str]:
    """The names of a config's own fields, sorted."""
    return sorted(type(config).model_fields)


def suggest(name: str, known: Iterable[str]) -> str:
    """'did you mean X?' for the nearest of the known names, else the list of them."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known) or 'none'}"


def _one_line(cls: type[Config], error: ValidationError) -> ConfigError:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or cls.__name__
    if first["type"] == "extra_forbidden":
        return ConfigError(
            f"unknown option '{where}' of {cls.__name__}", where=where, remedy=suggest(where.split(".")[-1], sorted(cls.model_fields))
        )
    value = first.get("input")
    shown = f" (got {value!r})" if isinstance(value, (str, int, float, bool)) else ""
    message = first["msg"].removeprefix("Value error, ")
    return ConfigError(f"{message}{shown}", where=where)
