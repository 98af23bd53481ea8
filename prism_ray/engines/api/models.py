"""GET /v1/models and /v1/models/{model}: the base, and the adapters that the caller's key reaches, each under its bare name.

A name of the caller's own hides a shared one. The objects are OpenAI's with three more fields: `version`, `parent` (the base's name) and `digest`.
"""

from __future__ import annotations

from typing import Any

from prism_ray.engines.api.backend import AdapterInfo
from prism_ray.engines.api.exchange import Call


async def list_models(call: Call) -> None:
    """GET /v1/models."""
    backend = call.service.backend
    found: dict[str, AdapterInfo] = {}
    for info in await backend.adapters(call.caller.sees):
        found.setdefault(info.name, info)
    served = [_adapter(info, backend.name) for _, info in sorted(found.items()) if info.served and info.name != backend.name]
    await call.json({"object": "list", "data": [_base(call), *served]})


async def show_model(call: Call) -> None:
    """GET /v1/models/{model}: any name that a request may use."""
    backend = call.service.backend
    target = await backend.resolve(call.params["model"], call.caller.sees)
    if not target.version:
        await call.json(_base(call))
        return
    info, _ = await backend.show(target.tenant, target.name)
    await call.json(_adapter(info, backend.name) | {"id": call.params["model"], "version": target.version})


def _base(call: Call) -> dict[str, Any]:
    backend = call.service.backend
    base = {"id": backend.name, "object": "model", "created": 0, "owned_by": "prism-ray"}
    return base | {"version": 0, "parent": None, "digest": backend.base.scale_plane}


def _adapter(info: AdapterInfo, base: str) -> dict[str, Any]:
    model = {"id": info.name, "object": "model", "created": info.created, "owned_by": info.tenant}
    return model | {"version": info.version, "parent": base, "digest": info.digest}
