"""What the HTTP application needs from what is behind it: one process (`engines.local_backend`) or a Ray Serve deployment (`dist`).

    resolve     model name -> Target, by the tenants that the caller sees; no engine work, and the same UnknownModel for a foreign and a missing adapter
    generate    pieces of an answer; the plane is loaded and pinned before the first, and let go when the iterator closes, however it closes
    manage      publish, pin, roll back, unload: changes are in the store's log, so every process that serves the store follows

Every piece says by content hash which plane it is from. Every type here is plain data, so a remote backend can send it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from prism_ray.core.errors import PrismError
from prism_ray.engines.protocol import BaseInfo, Delta, Generation, Score, Scoring


class UnknownModel(PrismError):
    """There is no such model for this caller."""

    def __init__(self, what: str = "no such model", *, where: str = "", remedy: str = ""):
        super().__init__(what, where=where, remedy=remedy)


class AdapterBroken(PrismError):
    """The adapter is registered and cannot be served now. The message is for the log: it may name files."""


class AdapterRefused(PrismError):
    """A management call would serve an adapter that does not fit this base or changes nothing; nothing was changed. The message may go to the client."""


class Conflict(PrismError):
    """A management call contradicts the present state."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a model name means now. version 0: the base itself, whose tenant is empty."""

    name: str
    tenant: str = ""
    version: int = 0

    @property
    def model(self) -> str:
        """`name@n`, or the base's name."""
        return f"{self.name}@{self.version}" if self.version else self.name

    @property
    def label(self) -> str:
        """Of metrics and logs."""
        return f"{self.tenant}/{self.name}" if self.version else "base"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A delta. plane: content hash of the scales that it was computed with."""

    plane: str
    delta: Delta


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Scores of a request's choices, and the content hash of the plane."""

    plane: str
    scores: tuple[Score, ...]


@dataclass(frozen=True, kw_only=True)
class AdapterInfo:
    """An adapter as management sees it. version: served under the bare name; current, latest: of the store; pinned: 0 for none; served: not unloaded.
    resident: versions whose planes this process holds; draining: those that running requests still hold after an unload."""

    tenant: str
    name: str
    version: int
    current: int
    latest: int
    pinned: int
    served: bool
    created: int
    digest: str
    bytes: int
    note: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)
    resident: tuple[int, ...] = ()
    draining: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Change:
    """A line of an adapter's history, of the store's log or of serving's."""

    action: str
    version: int
    who: str
    when: str
    note: str = ""


class Backend(Protocol):
    """See the module docstring. All methods may be called from one asyncio loop."""

    @property
    def name(self) -> str:
        """The base's model name."""

    @property
    def base(self) -> BaseInfo:
        """The base. Raises EngineStopped while it is not loaded."""

    @property
    def tokenizer(self) -> Any:
        """Of the base, None where it has none."""

    async def ready(self) -> str:
        """Empty when a request would be served; else what is missing."""

    async def resolve(self, model: str, sees: Sequence[str]) -> Target:
        """Raises UnknownModel, AdapterBroken."""

    def generate(self, target: Target, request: Generation) -> AsyncIterator[Piece]:
        """Raises PlaneBusy, AdapterBroken, RequestRefused, EngineStopped before the first piece; EngineStopped also later. `request.plane` is set here."""

    async def score(self, target: Target, request: Scoring) -> Scored:
        """Raises as `generate` does."""

    async def adapters(self, tenants: Sequence[str]) -> list[AdapterInfo]:
        """Adapters of this base that the tenants own, by tenant and name, unloaded ones too; broken ones are left out."""

    async def show(self, tenant: str, name: str) -> tuple[AdapterInfo, list[Change]]:
        """An adapter and its history, oldest first. Raises UnknownModel."""

    async def publish(self, tenant: str, reference: str, *, who: str, allow_no_change: bool = False) -> AdapterInfo:
        """Check a version of the store against the base, prove by a forward that it differs from it, make it current and serve it.

        Raises UnknownModel, AdapterRefused; what was served before is served on then.
        """

    async def pin(self, tenant: str, name: str, version: int, *, who: str) -> AdapterInfo:
        """Serve a version whatever is published; 0 ends it. Raises UnknownModel, AdapterRefused."""

    async def rollback(self, tenant: str, name: str, version: int, *, who: str, expected: int | None = None) -> AdapterInfo:
        """Make a version current in the store. Raises UnknownModel, AdapterRefused, Conflict for a pinned name or where another than `expected` is current."""

    async def unload(self, tenant: str, name: str, *, who: str) -> AdapterInfo:
        """Serve the adapter no more: requests that run end, new ones get UnknownModel until it is published again. Raises UnknownModel."""
