"""A served base for tests: a tiny quantized model, a store with adapters of three tenants, the transformers engine, the HTTP application under uvicorn.

Tenants: `acme` owns `own` (two versions) and `same`, `other` owns `theirs`, `public` is shared and owns `common` and `same`. The adapters answer differently.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn
from fastapi import FastAPI

from prism_ray.adapters.planes import BasePlanes
from prism_ray.adapters.store import AdapterStore
from prism_ray.engines.api.app import make_app
from prism_ray.engines.api.exchange import Limits
from prism_ray.engines.loading import plane_from_folder
from prism_ray.engines.local_backend import LocalBackend, LocalSettings
from prism_ray.engines.metrics import PrometheusMetrics, ServingMetrics
from prism_ray.engines.tenancy import KeyRecord, Tenancy, TenancyConfig, TenantConfig, TenantLimits, new_key
from prism_ray.engines.transformers_engine import TransformersEngine, TransformersSettings
from tests.unit._adapter_folders import make_adapter, make_base

ENGINE = TransformersSettings(dtype="float32", cache_tokens=4096, page_tokens=16, batch_tokens=64, weight_cache_bytes=8 << 20)
OWNED = {"own@1": ("acme", 0), "own@2": ("acme", 1), "same@1": ("acme", 2), "theirs@1": ("other", 3), "common@1": ("public", 4)}
SHARED_SAME = 5


@dataclass
class Material:
    """base: folder; folders: reference -> adapter folder; digests: reference -> content hash of its plane, computed from the folder."""

    base: Path
    folders: dict[str, Path] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    plane_bytes: int = 0

    def fill(self, url: str) -> AdapterStore:
        """A store at the URL with everything published."""
        store = AdapterStore(url)
        store.publish_base(self.base)
        for reference, (tenant, _) in OWNED.items():
            store.publish(self.folders[reference], reference.split("@")[0], tenant=tenant)
        store.publish(self.folders["public/same@1"], "same", tenant="public")
        return store


def make_material(folder: Path) -> Material:
    """Bases and adapter folders."""
    material = Material(make_base(folder / "base"))
    base = BasePlanes.from_checkpoint(material.base)
    seeds = {reference: seed for reference, (_, seed) in OWNED.items()} | {"public/same@1": SHARED_SAME}
    for reference, seed in seeds.items():
        path = make_adapter(material.base, folder / reference.replace("/", "-"), seed, strength=3.0)
        plane = plane_from_folder(path, base)
        material.folders[reference], material.digests[reference], material.plane_bytes = path, plane.digest, plane.nbytes
    return material


def make_tenancy(limits: TenantLimits | None = None, *, secret: bytes = b"test secret of the caches") -> tuple[Tenancy, dict[str, str]]:
    """(tenancy, key by tenant): acme's key manages, `root` is the operator, `reader` is acme's without management."""
    keys: dict[str, str] = {}
    records: dict[str, KeyRecord] = {}
    for name, scopes in {
        "acme": ("infer", "manage"),
        "other": ("infer",),
        "root": ("admin",),
        "reader": ("infer",),
        "public": ("manage",),
    }.items():
        keys[name], records[name] = new_key(scopes)
    tenants = [
        TenantConfig(id="acme", keys=(records["acme"], records["reader"])),
        TenantConfig(id="other", keys=(records["other"],)),
        TenantConfig(id="root", keys=(records["root"],)),
        TenantConfig(id="public", keys=(records["public"],)),
    ]
    config = TenancyConfig(format_version="1.0", tenants=tuple(tenants), shared=("public",), limits=limits or TenantLimits())
    return Tenancy(config, secret=secret), keys


class Server:
    """A backend and its application under uvicorn, in a thread with a loop of its own."""

    def __init__(
        self,
        material: Material,
        store: AdapterStore,
        settings: LocalSettings | None = None,
        limits: Limits | None = None,
        engine: Any = None,
    ):
        self.material, self.store = material, store
        self.registry = PrometheusMetrics()
        self.metrics = ServingMetrics(self.registry)
        self.engine = engine or TransformersEngine(material.base, ENGINE)
        chosen = settings or LocalSettings(refresh_s=0.0)
        self.backend = LocalBackend(self.engine, material.base, store, name="tiny", settings=chosen, metrics=self.metrics)
        self.tenancy, self.keys = make_tenancy()
        self.app = self.make_app(self.tenancy, limits, on_start=self._started, on_stop=self.backend.stop)
        config = uvicorn.Config(self.app, host="127.0.0.1", port=0, log_level="warning", lifespan="on", timeout_graceful_shutdown=2)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def make_app(self, tenancy: Tenancy, limits: Limits | None = None, **hooks: Callable[[], Any]) -> FastAPI:
        """A further application over the same backend."""

        def exposition() -> bytes:
            self.backend.observe()
            return self.registry.render()

        return make_app(self.backend, tenancy, limits, metrics=self.metrics, exposition=exposition, **hooks)

    async def _started(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self.backend.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Work on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def http(self, who: str = "acme") -> httpx.Client:
        headers = {"authorization": f"Bearer {self.keys[who]}"} if who else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60)

    def openai(self, who: str = "acme") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.keys[who], max_retries=0, timeout=60)

    def asgi(self, app: FastAPI, key: str, work: Callable[[httpx.AsyncClient], Coroutine[Any, Any, Any]]) -> Any:
        """Work with a client of an application without a socket, on the server's loop."""

        async def inside() -> Any:
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test", headers={"authorization": f"Bearer {key}"}) as client:
                return await work(client)

        return self.run(inside())

    def idle(self) -> bool:
        stats, cache = self.engine.stats(), self.backend.cache_stats()
        return not (stats.running or stats.waiting or any(stats.in_use.values()) or (cache and cache.pinned))

    def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        """Wait for a condition; it fails the test when it does not come."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "the condition did not come"
            time.sleep(0.005)
