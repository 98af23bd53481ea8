"""/v1/adapters: what is served under a name. A version comes from the adapter store by its reference; no path of a client is ever opened.

    GET  /v1/adapters                    the adapters that the key reaches
    GET  /v1/adapters/{name}             one, with its history
    POST /v1/adapters                    publish: check a version, prove that it differs from the base, make it current, serve it
    POST /v1/adapters/{name}/pin         hold a version, or with null let the store decide again
    POST /v1/adapters/{name}/rollback    make an older version current
    DELETE /v1/adapters/{name}           unload: requests that run end, new ones find no such model

Reading needs any key, changing the scope `manage`. `?tenant=` names another tenant than the key's, for the scope `admin`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from prism_ray.engines.api.backend import AdapterInfo, UnknownModel
from prism_ray.engines.api.errors import PERMISSION, ApiError
from prism_ray.engines.api.exchange import Call
from prism_ray.engines.api.schemas import PinRequest, PublishRequest, RollbackRequest, parse


async def list_adapters(call: Call) -> None:
    """GET /v1/adapters."""
    tenants = [_tenant(call)] if "tenant" in call.query else call.caller.sees
    found = await call.service.backend.adapters(tenants)
    await call.json({"object": "list", "data": [_shown(info) for info in found]})


async def show_adapter(call: Call) -> None:
    """GET /v1/adapters/{name}: the tenant's own, else the first that it sees."""
    tenants = [_tenant(call)] if "tenant" in call.query else call.caller.sees
    for tenant in tenants:
        try:
            info, changes = await call.service.backend.show(tenant, call.params["name"])
        except UnknownModel:
            continue
        # Who changed a shared adapter is its owner's business.
        history = [asdict(change) for change in changes] if tenant == _tenant(call) else []
        await call.json(_shown(info) | {"history": history})
        return
    raise UnknownModel


async def publish(call: Call) -> None:
    """POST /v1/adapters."""
    request = parse(PublishRequest, call.body)
    info = await call.service.backend.publish(
        _tenant(call), request.reference, who=call.caller.who, allow_no_change=request.allow_no_change
    )
    await call.json(_shown(info))


async def pin(call: Call) -> None:
    """POST /v1/adapters/{name}/pin."""
    request = parse(PinRequest, call.body)
    info = await call.service.backend.pin(_tenant(call), call.params["name"], request.version or 0, who=call.caller.who)
    await call.json(_shown(info))


async def rollback(call: Call) -> None:
    """POST /v1/adapters/{name}/rollback."""
    request = parse(RollbackRequest, call.body)
    backend = call.service.backend
    info = await backend.rollback(_tenant(call), call.params["name"], request.version, who=call.caller.who, expected=request.expected)
    await call.json(_shown(info))


async def unload(call: Call) -> None:
    """DELETE /v1/adapters/{name}."""
    info = await call.service.backend.unload(_tenant(call), call.params["name"], who=call.caller.who)
    await call.json(_shown(info) | {"deleted": True})


def _tenant(call: Call) -> str:
    """Whose adapters are meant."""
    wanted = call.query.get("tenant", call.caller.tenant)
    if wanted != call.caller.tenant and not call.caller.may("admin"):
        raise ApiError(403, "This API key may not act for another tenant.", PERMISSION, "tenant", "insufficient_scope")
    return wanted


def _shown(info: AdapterInfo) -> dict[str, Any]:
    fields = asdict(info)
    fields |= {"pinned": info.pinned or None, "resident": list(info.resident), "draining": list(info.draining)}
    return {"id": info.name, "object": "adapter", **fields}
