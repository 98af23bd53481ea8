"""Serving in one process: an adapter store, a plane cache and an engine behind the HTTP application (`api.backend.Backend`).

model name     the base's name; `name` or `name@n` of an adapter of a tenant that the caller sees, its own before others'; anything else is UnknownModel
load           version from the store, its base and bytes checked, in a thread; a plane without any change is refused unless it was declared
broken         a load that failed is not tried again for `broken_s`, so a broken adapter that is asked for all the time costs the others nothing
prove          before a management call serves a version, a forward on a fixed prompt must differ from the base's (field case ADP-04)
ready          the engine has stepped since the last question, or generates a token now
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from pydantic import Field

from prism_ray.adapters.admission import NO_CHANGE
from prism_ray.adapters.ids import require_adapter_id
from prism_ray.adapters.planes import BasePlanes
from prism_ray.adapters.store import AdapterStore, Event, parse_reference
from prism_ray.core.config import Config
from prism_ray.core.errors import (
    CheckpointError,
    ConfigError,
    FingerprintMismatch,
    FormatError,
    ModelError,
    PrismError,
    ResourceError,
    one_line,
)
from prism_ray.engines.api.backend import AdapterBroken, AdapterInfo, AdapterRefused, Change, Conflict, Piece, Scored, Target, UnknownModel
from prism_ray.engines.catalogue import Catalogue, Entry
from prism_ray.engines.loading import plane_from_store
from prism_ray.engines.metrics import ServingMetrics
from prism_ray.engines.plane_cache import PlaneBusy, PlaneCache, PlaneCacheStats
from prism_ray.engines.protocol import BASE, BaseInfo, Delta, Engine, EngineStopped, Generation, Plane, Sampling, Scoring
from prism_ray.formats.checkpoint import read_quantized

log = logging.getLogger(__name__)

PROBE_TOKENS, PROBE_CHOICES = 8, 4
UNFIT = (FormatError, CheckpointError, FingerprintMismatch, ModelError, ResourceError)


class LocalSettings(Config):
    """capacity_bytes: of all resident planes. refresh_s: how long a name's version is remembered. unload_s: how long an unload waits for running requests
    before it answers; they end anyway. See `plane_cache` for wait_s, fair_s, `catalogue` for stale_s."""

    capacity_bytes: int = Field(default=1 << 30, ge=0)
    wait_s: float = Field(default=30.0, gt=0)
    fair_s: float = Field(default=1.0, ge=0)
    loaders: int = Field(default=4, ge=1)
    refresh_s: float = Field(default=2.0, ge=0)
    stale_s: float = Field(default=600.0, ge=0)
    broken_s: float = Field(default=5.0, ge=0)
    unload_s: float = Field(default=5.0, ge=0)
    ready_s: float = Field(default=5.0, gt=0)


@dataclass(frozen=True)
class PlaneKey:
    """A version of an adapter."""

    tenant: str
    name: str
    version: int

    def __str__(self) -> str:
        return f"{self.tenant}/{self.name}@{self.version}"


class LocalBackend:
    """An `api.backend.Backend` and the owner of its engine, from `start` to `stop`. folder: of the base that the engine opens. name: the base's model name, its
    folder's by default. store: None serves the base alone."""

    def __init__(
        self,
        engine: Engine,
        folder: Path | str,
        store: AdapterStore | None = None,
        *,
        name: str | None = None,
        settings: LocalSettings | None = None,
        metrics: ServingMetrics | None = None,
    ):
        self.engine, self.settings, self.metrics = engine, settings or LocalSettings(), metrics
        self._folder, self._store = Path(folder), store
        self._name = name or self._folder.name
        self._planes: BasePlanes | None = None
        self._catalogue: Catalogue | None = None
        self._cache: PlaneCache[PlaneKey] | None = None
        self._broken: dict[PlaneKey, tuple[float, Exception]] = {}
        self._no_change: set[PlaneKey] = set()
        self._draining: dict[PlaneKey, asyncio.Task[bool]] = {}
        self._count = 0
        self._stepped = (-1, -1.0)

    # --- life -----------------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine and open the base's planes, which share the engine's mapped pages."""
        await self.engine.start()
        info, settings = self.engine.base, self.settings
        self._cache = PlaneCache(
            self.engine,
            self._load,
            settings.capacity_bytes,
            wait_s=settings.wait_s,
            fair_s=settings.fair_s,
            loaders=settings.loaders,
        )
        if self._store is None:
            return
        _, quantized, _ = await asyncio.to_thread(read_quantized, self._folder)
        # The engine took the fingerprints from the same bytes; to take them again would read a large base twice.
        self._planes = BasePlanes(where=str(self._folder), quantized=quantized, code_plane=info.code_plane, scale_plane=info.scale_plane)
        self._catalogue = Catalogue(self._store, info.code_plane, info.scale_plane, refresh_s=settings.refresh_s, stale_s=settings.stale_s)

    async def stop(self) -> None:
        """End the engine and what waits for it."""
        for task in list(self._draining.values()):
            task.cancel()
        await asyncio.gather(*self._draining.values(), return_exceptions=True)
        if self._catalogue is not None:
            self._catalogue.close()
        await self.engine.stop()

    @property
    def name(self) -> str:
        """The base's model name."""
        return self._name

    @property
    def base(self) -> BaseInfo:
        """The base."""
        return self.engine.base

    @property
    def tokenizer(self) -> Any:
        """Of the base."""
        return self.engine.tokenizer

    async def ready(self) -> str:
        """Empty when the engine steps."""
        try:
            before = self._steps()
            if before != self._stepped[0] and self.engine.stats().running:
                self._stepped = (before, self._now())
                return ""
            async with asyncio.timeout(self.settings.ready_s):
                async with aclosing(self._deltas(self._probe())) as deltas:
                    async for _ in deltas:
                        pass
        except TimeoutError:
            if self._steps() == before:
                return f"the engine has not stepped for {self.settings.ready_s:g} s"
        except PrismError as error:
            log.warning("not ready: %s", error)
            return "the engine does not run"
        return ""

    def _steps(self) -> int:
        self.engine.base  # noqa: B018 (raises while there is none)
        stats = self.engine.stats()
        return stats.prompt_tokens + stats.generated_tokens

    def _probe(self) -> Generation:
        sampling = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
        return Generation(request_id=self._id("ready"), prompt=[0], sampling=sampling, salt="prism-ray ready")

    def cache_stats(self) -> PlaneCacheStats | None:
        """Of the plane cache, None before the start."""
        return None if self._cache is None else self._cache.stats()

    def observe(self) -> None:
        """Bring the metrics up to date."""
        if self.metrics is not None:
            self.metrics.state(self.engine.stats(), self.cache_stats())

    # --- requests -------------------------------------------------------------------------------------------------------------

    async def resolve(self, model: str, sees: Sequence[str]) -> Target:
        """What a model name means for who sees these tenants."""
        if model == self._name:
            return Target(name=self._name)
        try:
            wanted = parse_reference(model)
        except ConfigError:
            raise UnknownModel from None
        for tenant in sees:
            try:
                entry = await self._of_store().entry(tenant, wanted.name)
                if entry is None:
                    continue
                if not entry.directive.served:
                    break
                version = wanted.version or entry.version
                if version == entry.version or await self._of_store().version(tenant, wanted.name, version) is not None:
                    return Target(tenant=tenant, name=wanted.name, version=version)
            except (PrismError, OSError) as error:
                if isinstance(error, UnknownModel):
                    raise
                raise AdapterBroken(one_line(error), where=f"{tenant}/{wanted.name}") from error
            # A name of its own hides a shared one of that name in all its versions.
            break
        raise UnknownModel

    async def generate(self, target: Target, request: Generation) -> AsyncIterator[Piece]:
        """Pieces of an answer; see the protocol."""
        async with self._pinned(target) as (digest, plane), aclosing(self._deltas(replace(request, plane=digest))) as deltas:
            async for delta in deltas:
                yield Piece(plane=plane, delta=delta)

    def _deltas(self, request: Generation) -> AsyncGenerator[Delta]:
        # The protocol says AsyncIterator; closing one is what aborts, so every engine's is a generator.
        return cast("AsyncGenerator[Delta]", self.engine.generate(request))

    async def score(self, target: Target, request: Scoring) -> Scored:
        """Scores; see the protocol."""
        async with self._pinned(target) as (digest, plane):
            return Scored(plane=plane, scores=tuple(await self.engine.score(replace(request, plane=digest))))

    @asynccontextmanager
    async def _pinned(self, target: Target) -> AsyncIterator[tuple[str, str]]:
        """(digest for the engine, content hash for the client) of a resident plane."""
        if not target.version:
            yield BASE, self.engine.base.scale_plane
            return
        async with AsyncExitStack() as stack:
            digest = await self._pin(stack, PlaneKey(target.tenant, target.name, target.version))
            yield digest, digest

    async def _pin(self, stack: AsyncExitStack, key: PlaneKey) -> str:
        if (found := self._broken.get(key)) is not None:
            if self._now() < found[0]:
                raise AdapterBroken(one_line(found[1]), where=str(key)) from found[1]
            del self._broken[key]
        try:
            return await stack.enter_async_context(self._of_cache().pin(key))
        except (PlaneBusy, EngineStopped):
            raise
        except (PrismError, OSError, ValueError, RuntimeError, KeyError) as error:
            while len(self._broken) >= 1000:
                del self._broken[next(iter(self._broken))]
            self._broken[key] = (self._now() + self.settings.broken_s, error)
            raise AdapterBroken(one_line(error), where=str(key)) from error

    def _load(self, key: PlaneKey) -> Plane:
        """In a thread of the plane cache."""
        assert self._store is not None and self._planes is not None  # keys come from the catalogue
        plane = plane_from_store(self._store, f"{key.name}@{key.version}", self._planes, tenant=key.tenant)
        quantized = self._planes.quantized
        if key not in self._no_change and all((data == quantized[name].scales).all() for name, data in plane.scales.items()):
            declared = key.version in self._of_store().log.last(key.tenant, key.name).no_change
            if not declared:
                raise CheckpointError(NO_CHANGE, where=str(key), remedy="publish it with allow_no_change, or train it")
        return plane

    # --- management -------------------------------------------------------------------------------------------------------------

    async def adapters(self, tenants: Sequence[str]) -> list[AdapterInfo]:
        """Adapters of the tenants; see the protocol."""
        if self._catalogue is None:
            return []
        found = await asyncio.gather(*(self._catalogue.entries(tenant) for tenant in tenants))
        return [self._info(entry) for entries in found for entry in entries]

    async def show(self, tenant: str, name: str) -> tuple[AdapterInfo, list[Change]]:
        """An adapter and its history."""
        entry = await self._entry(tenant, name)
        catalogue = self._of_store()
        events = await catalogue.run(lambda: catalogue.store.history(name, tenant=tenant))
        directives = await catalogue.run(lambda: catalogue.log.history(tenant, name))
        changes = [Change(action=event.event, version=event.version, who=event.who, when=event.when, note=event.note) for event in events]
        changes += [Change(action=each.action, version=each.pinned, who=each.who, when=each.when) for each in directives]
        return self._info(entry), sorted(changes, key=lambda change: datetime.fromisoformat(change.when))

    async def publish(self, tenant: str, reference: str, *, who: str, allow_no_change: bool = False) -> AdapterInfo:
        """Check, prove, make current, serve; see the protocol."""
        try:
            wanted = parse_reference(reference)
        except ConfigError:
            raise UnknownModel from None
        catalogue = self._of_store()
        catalogue.drop(tenant, wanted.name)
        entry = await self._entry(tenant, wanted.name)
        version = wanted.version or entry.current
        await self._prove(tenant, wanted.name, version, allow_no_change)
        changes: dict[str, Any] = {"served": True, "pinned": 0}
        if allow_no_change:
            changes["no_change"] = tuple(sorted({*entry.directive.no_change, version}))
        if version != entry.current:
            await self._rollback(tenant, wanted.name, version, who, entry.current)
        await catalogue.run(lambda: catalogue.log.append(tenant, wanted.name, "publish", who=who, **changes))
        return await self._changed(tenant, wanted.name)

    async def pin(self, tenant: str, name: str, version: int, *, who: str) -> AdapterInfo:
        """Hold a version; see the protocol."""
        entry = await self._entry(tenant, name)
        if version:
            await self._prove(tenant, name, version, version in entry.directive.no_change)
        catalogue = self._of_store()
        action = "pin" if version else "unpin"
        await catalogue.run(lambda: catalogue.log.append(tenant, name, action, who=who, pinned=version))
        return await self._changed(tenant, name)

    async def rollback(self, tenant: str, name: str, version: int, *, who: str, expected: int | None = None) -> AdapterInfo:
        """Make a version current; see the protocol."""
        self._of_store().drop(tenant, name)
        entry = await self._entry(tenant, name)
        if entry.directive.pinned:
            raise Conflict(f"version {entry.directive.pinned} is pinned", where=name, remedy="unpin it first")
        await self._prove(tenant, name, version, version in entry.directive.no_change)
        await self._rollback(tenant, name, version, who, entry.current if expected is None else expected)
        return await self._changed(tenant, name)

    async def unload(self, tenant: str, name: str, *, who: str) -> AdapterInfo:
        """Serve it no more, and let its planes go; see the protocol."""
        entry = await self._entry(tenant, name)
        catalogue, cache = self._of_store(), self._of_cache()
        await catalogue.run(lambda: catalogue.log.append(tenant, name, "unload", who=who, served=False))
        catalogue.drop(tenant, name)
        for key in [key for key in cache.resident() if (key.tenant, key.name) == (tenant, name) and key not in self._draining]:
            self._drain(key)
        mine = {task for key, task in self._draining.items() if (key.tenant, key.name) == (tenant, name)}
        if mine:
            await asyncio.wait(mine, timeout=self.settings.unload_s)
        if self.metrics is not None:
            self.metrics.forget(f"{tenant}/{name}")
        return self._info(await catalogue.entry(tenant, name) or entry)

    def _drain(self, key: PlaneKey) -> None:
        task = self._draining[key] = asyncio.create_task(self._of_cache().unload(key))
        task.add_done_callback(lambda done: self._drained(key, done))

    def _drained(self, key: PlaneKey, done: asyncio.Task[bool]) -> None:
        del self._draining[key]
        if not done.cancelled() and (error := done.exception()) is not None:
            log.error("unloading %s: %s", key, one_line(error))
        if self.metrics is not None:  # requests that ended meanwhile may have made the series again
            self.metrics.forget(f"{key.tenant}/{key.name}")

    async def _rollback(self, tenant: str, name: str, version: int, who: str, expected: int) -> None:
        catalogue = self._of_store()
        try:
            await catalogue.run(lambda: catalogue.store.rollback(name, version, tenant=tenant, expected=expected, who=who))
        except ConfigError:
            raise Conflict(
                f"another version than {expected} is current", where=name, remedy="look at the history and decide again"
            ) from None

    async def _changed(self, tenant: str, name: str) -> AdapterInfo:
        self._of_store().drop(tenant, name)
        return self._info(await self._entry(tenant, name))

    async def _prove(self, tenant: str, name: str, version: int, allow_no_change: bool) -> None:
        """Load a version and compare its answers with the base's. Raises UnknownModel, AdapterRefused, PlaneBusy."""
        if await self._of_store().version(tenant, name, version) is None:
            raise UnknownModel
        key = PlaneKey(tenant, name, version)
        self._broken.pop(key, None)
        if allow_no_change:
            self._no_change.add(key)
        try:
            target = Target(tenant=tenant, name=name, version=version)
            changed, base = [await self.score(each, self._question()) for each in (target, Target(name=self._name))]
        except AdapterBroken as error:
            log.error("%s is refused: %s", key, error)
            cause = error.__cause__
            if not isinstance(cause, UNFIT):
                raise
            raise AdapterRefused(_reason(cause), where=target.model, remedy="publish a version for this base") from error
        finally:
            self._no_change.discard(key)
        if changed.scores == base.scores and not allow_no_change:
            raise AdapterRefused(
                "it answers exactly as the base does", where=target.model, remedy="train it, or declare it with allow_no_change"
            )

    def _question(self) -> Scoring:
        """Fixed tokens spread over the vocabulary."""
        size = self.base.vocab_size
        room = max(1, min(PROBE_TOKENS, self.base.max_length - 2))
        prompt = [(7919 * position + 13) % size for position in range(room)]
        choices = [
            [(104729 * choice + 31) % size, (1299709 * choice + 7) % size][: self.base.max_length - room] for choice in range(PROBE_CHOICES)
        ]
        return Scoring(request_id=self._id("prove"), prompt=prompt, choices=choices, salt="prism-ray prove")

    async def _entry(self, tenant: str, name: str) -> Entry:
        try:
            require_adapter_id(tenant)
            require_adapter_id(name)
        except ConfigError:
            raise UnknownModel from None
        entry = await self._of_store().entry(tenant, name)
        if entry is None:
            raise UnknownModel
        return entry

    def _info(self, entry: Entry) -> AdapterInfo:
        event: Event = entry.event
        resident = {} if self._cache is None else self._cache.resident()
        mine = [key for key in resident if (key.tenant, key.name) == (event.tenant, event.name)]
        return AdapterInfo(
            tenant=event.tenant,
            name=event.name,
            version=entry.version,
            current=entry.current,
            latest=entry.latest,
            pinned=entry.directive.pinned,
            served=entry.directive.served,
            created=int(datetime.fromisoformat(event.when).timestamp()),
            digest=event.digest,
            bytes=event.bytes,
            note=event.note,
            metrics=event.metrics,
            resident=tuple(sorted(key.version for key in mine)),
            draining=tuple(sorted(key.version for key in self._draining if (key.tenant, key.name) == (event.tenant, event.name))),
        )

    # --- inside -----------------------------------------------------------------------------------------------------------------

    def _of_store(self) -> Catalogue:
        if self._catalogue is None:
            raise UnknownModel
        return self._catalogue

    def _of_cache(self) -> PlaneCache[PlaneKey]:
        if self._cache is None:
            raise EngineStopped("the engine is not started")
        return self._cache

    def _id(self, what: str) -> str:
        self._count += 1
        return f"{what}-{self._count}"

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _reason(error: Exception) -> str:
    """What is wrong with an adapter, without a place on this machine."""
    text = error.what if isinstance(error, PrismError) else one_line(error)
    return text if "/" not in text and "\\" not in text else "its files do not hold together"
