"""A name -> entry table that refuses duplicates and names what it knows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from prism_ray.core.config import suggest
from prism_ray.core.errors import UnknownName

T = TypeVar("T")


class Registry(Generic[T]):
    """Explicit registry: `add` once per entry; an unknown name raises UnknownName that lists the nearest or all names."""

    def __init__(self, kind: str):
        self.kind = kind
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> T:
        if name in self._entries:
            raise ValueError(f"{self.kind} '{name}' is registered twice")
        self._entries[name] = entry
        return entry

    def __getitem__(self, name: str) -> T:
        try:
            return self._entries[name]
        except KeyError:
            raise UnknownName(f"unknown {self.kind} '{name}'", remedy=suggest(name, sorted(self._entries))) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries
