"""Scale planes of one engine under a byte budget: loaded once, validated before they are visible, pinned while in use, evicted least recently used first.

    async with cache.pin(key) as digest:      # key: any hashable name of a version; digest: of the plane that the engine has attached
        async for delta in engine.generate(Generation(plane=digest, ...)): ...

    cold     one load for any number of waiting requests, in a thread; other keys load beside it, resident planes and the base go on
    failure  every waiter gets the error, nothing stays, the next request tries again
    full     unpinned planes go, least recently used first. Where all are pinned a load waits, in order of arrival. After `fair_s` it claims the least recently used
             planes: they take no new request and drain, so a cold plane starts within fair_s plus the longest request that runs on its victims, however
             busy those are (field case SRV-09). After `wait_s` the request gets `PlaneBusy`, and the claim is given back
    unload   no new request, drain, drop; a request that comes meanwhile waits and loads again

Two keys with the same bytes share one attached plane. State changes on the event loop only; every await is between consistent states.
Legend: resident = attached to the engine; pins = requests that hold a plane.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from prism_ray.core.errors import ConfigError, PrismError, ResourceError
from prism_ray.engines.protocol import Plane, PlaneInUse, UnknownPlane

K = TypeVar("K", bound=Hashable)
RECHECK_S = 0.05


class PlaneBusy(PrismError):
    """A plane could not be made resident in time; the request may come again after `retry_after` seconds."""

    def __init__(self, what: str, *, where: str = "", remedy: str = "", retry_after: float = 1.0):
        super().__init__(what, where=where, remedy=remedy)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        return _busy, (self.what, self.where, self.remedy, self.retry_after)


def _busy(what: str, where: str, remedy: str, retry_after: float) -> PlaneBusy:
    return PlaneBusy(what, where=where, remedy=remedy, retry_after=retry_after)


class Attaching(Protocol):
    """What the cache needs of an engine."""

    async def attach(self, plane: Plane) -> None:
        """Make a plane resident."""

    async def detach(self, digest: str) -> None:
        """Drop it."""


@dataclass(frozen=True, kw_only=True)
class PlaneCacheStats:
    """Totals since the start, and what is there now. hits: requests that found their plane resident; busy: requests that were told to come again."""

    loads: int
    hits: int
    evictions: int
    unloads: int
    failures: int
    busy: int
    resident: int
    resident_bytes: int
    pinned: int
    loading: int


@dataclass(eq=False, kw_only=True)
class _Entry(Generic[K]):
    """A resident plane under one key. claimed: for another plane; unloading: on request. Either way it takes no new pin."""

    key: K
    digest: str
    pins: int = 0
    claimed: bool = False
    unloading: bool = False

    @property
    def closed(self) -> bool:
        return self.claimed or self.unloading


class PlaneCache(Generic[K]):
    """load: key -> Plane, validated; called in a thread, at most `loaders` at a time. capacity_bytes: of the scales of all resident planes together."""

    def __init__(
        self,
        engine: Attaching,
        load: Callable[[K], Plane],
        capacity_bytes: int,
        *,
        wait_s: float = 30.0,
        fair_s: float = 1.0,
        retry_after: float = 1.0,
        loaders: int = 4,
    ):
        if capacity_bytes < 0 or wait_s <= 0 or fair_s < 0 or loaders < 1:
            raise ConfigError("capacity_bytes and fair_s must not be negative, wait_s and loaders must be positive", where="plane cache")
        self._engine, self._load, self.capacity_bytes = engine, load, capacity_bytes
        self._wait_s, self._fair_s, self._retry_after = wait_s, fair_s, retry_after
        self._entries: OrderedDict[K, _Entry[K]] = OrderedDict()
        self._loading: dict[K, asyncio.Task[_Entry[K]]] = {}
        self._waiting: Counter[K] = Counter()
        self._keys_of: Counter[str] = Counter()
        self._bytes_of: dict[str, int] = {}
        self._slots = asyncio.Semaphore(loaders)
        self._room = asyncio.Lock()  # loads that need room, in order of arrival; may be held for wait_s
        self._swap = asyncio.Lock()  # one attach or detach with its bookkeeping
        self._changed = asyncio.Event()
        self._totals: Counter[str] = Counter()

    # --- for requests -----------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def pin(self, key: K) -> AsyncIterator[str]:
        """The digest of the key's plane, resident until the block ends. Raises what `load` or `attach` raise, and PlaneBusy."""
        entry = await self._acquire(key)
        try:
            yield entry.digest
        finally:
            entry.pins -= 1
            self._signal()

    async def preload(self, keys: Iterable[K]) -> dict[K, Exception]:
        """Make planes resident side by side; returns what failed. Planes beyond the capacity push out earlier ones, as requests would."""
        wanted = list(dict.fromkeys(keys))
        results = await asyncio.gather(*(self._touch(key) for key in wanted), return_exceptions=True)
        return {key: result for key, result in zip(wanted, results, strict=True) if isinstance(result, Exception)}

    async def unload(self, key: K, *, wait_s: float | None = None) -> bool:
        """Drain and drop a key's plane; False where it is not resident. wait_s: how long to drain, None for as long as it takes; then PlaneBusy, and it stays."""
        until = None if wait_s is None else self._now() + wait_s
        while key in self._loading:
            if not await self._wait(until):
                raise self._refuse(key, "it is still loading")
        entry = self._entries.get(key)
        if entry is None:
            return False
        entry.unloading = True
        try:
            while self._entries.get(key) is entry:
                if not entry.pins and not self._waiting[key] and await self._drop(entry):
                    self._totals["unloads"] += 1
                    break
                if until is not None and self._now() >= until:
                    raise self._refuse(key, f"{entry.pins} request(s) hold it")
                # The engine may let go of a plane a moment after the last pin, and nothing here changes then.
                await self._wait(until if entry.pins else min(self._now() + RECHECK_S, until or math.inf))
        finally:
            entry.unloading = False
            self._signal()
        async with self._swap:  # an eviction that was faster has ended
            return True

    async def close(self) -> None:
        """Let running loads end and drop every plane, draining those in use."""
        while self._loading:
            await self._wait(None)
        for key in list(self._entries):
            await self.unload(key)

    def resident(self) -> dict[K, str]:
        """Key -> digest of what is resident, least recently used first."""
        return {key: entry.digest for key, entry in self._entries.items()}

    @property
    def resident_bytes(self) -> int:
        """Bytes of the scales of all resident planes."""
        return sum(self._bytes_of.values())

    def stats(self) -> PlaneCacheStats:
        """As of now; cheap."""
        names = ("loads", "hits", "evictions", "unloads", "failures", "busy")
        return PlaneCacheStats(
            **{name: self._totals[name] for name in names},
            resident=len(self._entries),
            resident_bytes=self.resident_bytes,
            pinned=sum(entry.pins > 0 for entry in self._entries.values()),
            loading=len(self._loading),
        )

    # --- making resident ----------------------------------------------------------------------------------------------------------

    async def _touch(self, key: K) -> None:
        async with self.pin(key):
            pass

    async def _acquire(self, key: K) -> _Entry[K]:
        until = self._now() + self._wait_s
        try:
            while (entry := self._entries.get(key)) is not None:
                if not entry.closed:
                    entry.pins += 1
                    self._entries.move_to_end(key)
                    self._totals["hits"] += 1
                    return entry
                if not await self._wait(until):
                    raise self._refuse(key, "its plane makes room for others")
            return await self._join_load(key, until)
        except PlaneBusy:
            self._totals["busy"] += 1
            raise

    async def _join_load(self, key: K, until: float) -> _Entry[K]:
        """Wait for the one load of a key and pin its plane. The plane cannot go in between: it has somebody waiting."""
        self._waiting[key] += 1
        try:
            task = self._loading.get(key)
            if task is None or task.done():
                task = self._loading[key] = asyncio.create_task(self._bring(key))
                task.add_done_callback(lambda done: self._loaded(key, done))
            # `wait` leaves the load alone: one request that gives up does not take the plane from the others.
            if not (await asyncio.wait({task}, timeout=max(0.0, until - self._now())))[0]:
                raise self._refuse(key, "its plane is still loading")
            entry = task.result()
            entry.pins += 1
            return entry
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]
            self._signal()

    def _loaded(self, key: K, task: asyncio.Task[_Entry[K]]) -> None:
        if self._loading.get(key) is task:
            del self._loading[key]
        if task.cancelled() or not isinstance(task.exception(), PlaneBusy | None):
            self._totals["failures"] += 1
        self._signal()

    async def _bring(self, key: K) -> _Entry[K]:
        async with self._slots:
            plane = await asyncio.to_thread(self._load, key)
            if plane.nbytes > self.capacity_bytes:
                raise ResourceError(
                    f"the plane has {plane.nbytes} bytes, all planes together may have {self.capacity_bytes}",
                    where=str(key),
                    remedy="raise the capacity of the plane cache",
                )
            async with self._room:
                while True:
                    await self._make_room(key, plane)
                    async with self._swap:
                        if (present := self._entries.get(key)) is not None:
                            return present  # an eviction that the engine did not allow put it back
                        if self._fits(plane):
                            return await self._attach(key, plane)

    async def _attach(self, key: K, plane: Plane) -> _Entry[K]:
        await self._engine.attach(plane)
        entry = self._entries[key] = _Entry(key=key, digest=plane.digest)
        self._keys_of[plane.digest] += 1
        self._bytes_of[plane.digest] = plane.nbytes
        self._totals["loads"] += 1
        return entry

    def _fits(self, plane: Plane) -> bool:
        return plane.digest in self._bytes_of or self.resident_bytes + plane.nbytes <= self.capacity_bytes

    async def _make_room(self, key: K, plane: Plane) -> None:
        """Evict until the plane fits; see "full" in the module docstring."""
        until, fair = self._now() + self._wait_s, self._now() + self._fair_s
        claimed: list[_Entry[K]] = []
        try:
            while not self._fits(plane):
                victim = next((entry for entry in self._entries.values() if self._free(entry)), None)
                if victim is not None:
                    if await self._drop(victim):
                        self._totals["evictions"] += 1
                    else:
                        await self._wait(self._now() + RECHECK_S)
                    continue
                if self._now() >= fair:
                    claimed, fair = self._claim(plane.nbytes), math.inf
                if self._now() >= until or not self._waiting[key]:
                    raise self._refuse(key, "all resident planes are in use")
                await self._wait(min(fair, until))
        finally:
            for entry in claimed:
                entry.claimed = False
            self._signal()

    def _free(self, entry: _Entry[K]) -> bool:
        return not entry.pins and not self._waiting[entry.key] and not entry.unloading

    def _claim(self, nbytes: int) -> list[_Entry[K]]:
        """Least recently used planes that together make room for `nbytes`; they take no new request."""
        claimed: list[_Entry[K]] = []
        missing = self.resident_bytes + nbytes - self.capacity_bytes
        for entry in self._entries.values():
            if missing <= 0:
                break
            if not entry.unloading:
                entry.claimed = True
                claimed.append(entry)
            missing -= self._bytes_of[entry.digest]
        return claimed

    async def _drop(self, entry: _Entry[K]) -> bool:
        """Take an entry out, and its plane out of the engine where no other key has it. False where the engine still runs on it: it stays.

        In a task of its own: who asked for it may be cancelled while the engine lets go.
        """
        return await asyncio.shield(asyncio.create_task(self._drop_now(entry)))

    async def _drop_now(self, entry: _Entry[K]) -> bool:
        async with self._swap:
            if self._entries.get(entry.key) is not entry or entry.pins or self._waiting[entry.key]:
                return False
            position = list(self._entries).index(entry.key)
            del self._entries[entry.key]
            if self._keys_of[entry.digest] == 1:
                try:
                    await self._engine.detach(entry.digest)
                except PlaneInUse:
                    self._restore(entry, position)
                    return False
                except UnknownPlane:
                    pass  # somebody else detached it: it is gone, which is what was asked for
                del self._bytes_of[entry.digest]
            self._keys_of[entry.digest] -= 1
            if not self._keys_of[entry.digest]:
                del self._keys_of[entry.digest]
        self._signal()
        return True

    def _restore(self, entry: _Entry[K], position: int) -> None:
        """Put an entry back where it was in the order of use."""
        later = list(self._entries)[position:]
        self._entries[entry.key] = entry
        for key in later:
            self._entries.move_to_end(key)

    # --- waiting ------------------------------------------------------------------------------------------------------------------

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _signal(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self, until: float | None) -> bool:
        """Wait for any change; False when `until` has come."""
        changed = self._changed
        try:
            async with asyncio.timeout_at(until):
                await changed.wait()
        except TimeoutError:
            return False
        return True

    def _refuse(self, key: K, what: str) -> PlaneBusy:
        return PlaneBusy(what, where=str(key), remedy=f"try again in {self._retry_after:g} s", retry_after=self._retry_after)
