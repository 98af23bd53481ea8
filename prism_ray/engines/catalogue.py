"""Which version a name means, read from the adapter store and remembered for a moment.

    refresh_s   age at which an answer is looked up again: a publication, rollback, pin or unload by another process holds here after at most that time
    stale_s     for how long an old answer stands in while the store cannot be reached; resident adapters are served on through an outage
    bound       at most `entries` names are remembered, also names that do not exist

One lookup serves all who wait for it. Lookups run in threads of their own, so a slow store takes none from others.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from prism_ray.adapters.ids import require_adapter_id
from prism_ray.adapters.store import AdapterStore, Event
from prism_ray.adapters.store.records import Log
from prism_ray.core.errors import EnvironmentFault, PrismError
from prism_ray.engines.serving_log import Directive, ServingLog

log = logging.getLogger(__name__)

V = TypeVar("V")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A name. event: publication of the version that the bare name means; current, latest: of the store."""

    event: Event
    current: int
    latest: int
    directive: Directive

    @property
    def version(self) -> int:
        """What the bare name means."""
        return self.event.version


@dataclass
class _Kept(Generic[V]):
    value: V
    since: float


class _Memo(Generic[V]):
    """Values by key, looked up in threads, one lookup a key at a time."""

    def __init__(self, threads: ThreadPoolExecutor, refresh_s: float, stale_s: float, entries: int):
        self._threads, self._refresh_s, self._stale_s, self._size = threads, refresh_s, stale_s, entries
        self._kept: OrderedDict[tuple[str, ...], _Kept[V]] = OrderedDict()
        self._running: dict[tuple[str, ...], asyncio.Future[V]] = {}

    async def get(self, key: tuple[str, ...], look_up: Callable[[], V]) -> V:
        loop = asyncio.get_running_loop()
        kept = self._kept.get(key)
        if kept is not None and loop.time() - kept.since < self._refresh_s:
            self._kept.move_to_end(key)
            return kept.value
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = asyncio.ensure_future(self._look_up(key, look_up))
            running.add_done_callback(lambda done: self._ended(key, done))
        try:
            return await asyncio.shield(running)
        except EnvironmentFault as error:
            if kept is None or loop.time() - kept.since > self._stale_s:
                raise
            log.warning("the store cannot be reached, what it said before stands: %s", error)
            return kept.value

    async def _look_up(self, key: tuple[str, ...], look_up: Callable[[], V]) -> V:
        loop = asyncio.get_running_loop()
        began = loop.time()
        value = await loop.run_in_executor(self._threads, look_up)
        # Somebody who dropped the key meanwhile wants a lookup that began later.
        if self._running.get(key) is asyncio.current_task():
            self._kept[key] = _Kept(value, began)
            self._kept.move_to_end(key)
            while len(self._kept) > self._size:
                self._kept.popitem(last=False)
        return value

    def _ended(self, key: tuple[str, ...], done: asyncio.Future[V]) -> None:
        if self._running.get(key) is done:
            del self._running[key]
        if not done.cancelled():
            done.exception()  # whoever waited has it; without waiters it is not worth a warning

    def drop(self, key: tuple[str, ...]) -> None:
        self._kept.pop(key, None)
        self._running.pop(key, None)


class Catalogue:
    """Names and versions of the adapters of one base. code_plane, scale_plane: its fingerprints; adapters of other bases do not exist here."""

    def __init__(
        self,
        store: AdapterStore,
        code_plane: str,
        scale_plane: str,
        *,
        refresh_s: float = 2.0,
        stale_s: float = 600.0,
        entries: int = 10_000,
    ):
        self.store, self.log = store, ServingLog(store.backend)
        self._base = (code_plane, scale_plane)
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="catalogue")
        self._names: _Memo[Entry | None] = _Memo(self._threads, refresh_s, stale_s, entries)
        self._versions: _Memo[Event | None] = _Memo(self._threads, refresh_s, stale_s, entries)
        self._lists: _Memo[list[str]] = _Memo(self._threads, refresh_s, stale_s, entries)

    async def entry(self, tenant: str, name: str) -> Entry | None:
        """A name of a tenant, None where it has none for this base. Raises CheckpointError for a damaged log, EnvironmentFault without the store."""
        return await self._names.get((tenant, name), lambda: self._look_up(tenant, name))

    async def version(self, tenant: str, name: str, version: int) -> Event | None:
        """The publication of a version, None where there is none for this base."""
        return await self._versions.get((tenant, name, str(version)), lambda: self._publication(tenant, name, version))

    async def entries(self, tenant: str) -> list[Entry]:
        """All names of a tenant for this base, by name. A damaged one is left out and logged."""
        require_adapter_id(tenant)
        names = await self._lists.get((tenant,), lambda: self.store.backend.names(f"tenants/{tenant}"))
        found = await asyncio.gather(*(self.entry(tenant, name) for name in names), return_exceptions=True)
        for name, result in zip(names, found, strict=True):
            if isinstance(result, PrismError):
                log.error("adapter %s/%s is left out: %s", tenant, name, result)
            elif isinstance(result, BaseException):
                raise result
        return [result for result in found if isinstance(result, Entry)]

    async def run(self, work: Callable[[], V]) -> V:
        """Store work in the catalogue's threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def drop(self, tenant: str, name: str) -> None:
        """Look the name up again when it is next asked for."""
        self._names.drop((tenant, name))
        self._lists.drop((tenant,))

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _look_up(self, tenant: str, name: str) -> Entry | None:
        log = Log(self.store.backend, require_adapter_id(tenant), require_adapter_id(name))
        head = log.head()
        if head is None:
            return None
        directive = self.log.last(tenant, name)
        event = log.publication(directive.pinned or head.version)
        if event is None or not self._ours(event):
            return None
        return Entry(event=event, current=head.version, latest=head.latest, directive=directive)

    def _publication(self, tenant: str, name: str, version: int) -> Event | None:
        event = Log(self.store.backend, require_adapter_id(tenant), require_adapter_id(name)).publication(version)
        return event if event is not None and self._ours(event) else None

    def _ours(self, event: Event) -> bool:
        return (event.identity.get("base_code_plane"), event.identity.get("base_scale_plane")) == self._base
