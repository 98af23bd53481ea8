"""The OpenAI-compatible HTTP application, a plain ASGI one: uvicorn runs it in one process, a Ray Serve ingress in many.

    app = make_app(backend, Tenancy.load("keys.yaml"), Limits(), metrics=metrics, exposition=render)

| route | |
|---|---|
| /v1/models, /v1/completions, /v1/chat/completions | as the official `openai` client speaks them |
| /v1/score | log-likelihoods of given choices |
| /v1/adapters | management, see `management` |
| /healthz, /readyz | the process lives; the base is loaded and the engine steps. Without a key |
| /metrics | Prometheus text, for keys of the scope `admin` |
| /openapi.json | this API |

Nothing here imports Ray; what is behind is an `api.backend.Backend`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from prism_ray import __version__
from prism_ray.engines.api import chat, completions, management, models, schemas, scoring
from prism_ray.engines.api.backend import Backend
from prism_ray.engines.api.errors import ApiError
from prism_ray.engines.api.exchange import Call, Exchange, Handler, Limits, Service
from prism_ray.engines.metrics import ServingMetrics
from prism_ray.engines.tenancy import Scope, Tenancy

SCHEMAS = "#/components/schemas/"


def make_app(
    backend: Backend,
    tenancy: Tenancy,
    limits: Limits | None = None,
    *,
    metrics: ServingMetrics | None = None,
    exposition: Callable[[], bytes] | None = None,
    on_start: Callable[[], Any] | None = None,
    on_stop: Callable[[], Any] | None = None,
) -> FastAPI:
    """The application. exposition: the text of /metrics, None where something else exports them. on_start, on_stop: coroutine functions around its life."""
    service = Service(backend=backend, tenancy=tenancy, limits=limits or Limits(), metrics=metrics, exposition=exposition)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if on_start is not None:
            await on_start()
        try:
            yield
        finally:
            service.close()
            if on_stop is not None:
                await on_stop()

    app = FastAPI(
        title="prism-ray",
        version=__version__,
        description="Completions, scores and management of adapters over one 4-bit base.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    _routes(app, service)
    app.add_exception_handler(HTTPException, _http_error)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _routes(app: FastAPI, service: Service) -> None:
    def add(
        method: str, path: str, name: str, handler: Handler, scope: Scope | None = "infer", body: type[schemas.Request] | None = None
    ) -> None:
        async def endpoint(request: Request) -> Response:
            return Exchange(service, name, handler, scope=scope)

        parameters = [part[1:-1].split(":")[0] for part in path.split("/") if part.startswith("{")]
        extra: dict[str, Any] = {
            "parameters": [{"name": each, "in": "path", "required": True, "schema": {"type": "string"}} for each in parameters]
        }
        if body is not None:
            content = {"application/json": {"schema": {"$ref": SCHEMAS + body.__name__}}}
            extra["requestBody"] = {"required": True, "content": content}
        summary = (handler.__doc__ or name).splitlines()[0]
        app.add_api_route(
            path, endpoint, methods=[method], name=name, summary=summary, response_model=None, openapi_extra=extra, operation_id=name
        )

    add("POST", "/v1/completions", "completions", completions.completions, body=schemas.CompletionRequest)
    add("POST", "/v1/chat/completions", "chat", chat.chat, body=schemas.ChatRequest)
    add("POST", "/v1/score", "score", scoring.score, body=schemas.ScoreRequest)
    add("GET", "/v1/models", "models", models.list_models)
    add("GET", "/v1/models/{model:path}", "model", models.show_model)
    add("GET", "/v1/adapters", "adapters", management.list_adapters)
    add("POST", "/v1/adapters", "publish", management.publish, "manage", schemas.PublishRequest)
    add("POST", "/v1/adapters/{name:path}/pin", "pin", management.pin, "manage", schemas.PinRequest)
    add("POST", "/v1/adapters/{name:path}/rollback", "rollback", management.rollback, "manage", schemas.RollbackRequest)
    add("GET", "/v1/adapters/{name:path}", "adapter", management.show_adapter)
    add("DELETE", "/v1/adapters/{name:path}", "unload", management.unload, "manage")
    add("GET", "/healthz", "healthz", _healthz, None)
    add("GET", "/readyz", "readyz", _readyz, None)
    add("GET", "/metrics", "metrics", _metrics, "admin")


async def _healthz(call: Call) -> None:
    """The process lives."""
    await call.json({"status": "ok"})


async def _readyz(call: Call) -> None:
    """The base is loaded and the engine steps."""
    missing = await call.service.backend.ready()
    await call.json({"status": missing or "ready"}, status=503 if missing else 200)


async def _metrics(call: Call) -> None:
    """Prometheus text."""
    if call.service.exposition is None:
        raise ApiError(404, "Metrics are exported elsewhere.", code="not_found")
    await call.data(call.service.exposition(), "text/plain; version=0.0.4; charset=utf-8")


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router itself refuses, in the same words as everything else."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        answer = ApiError(404, "There is no such route.", code="not_found")
    elif error.status_code == 405:
        answer = ApiError(405, "The route does not have this method.", code="method_not_allowed")
    else:
        answer = ApiError(error.status_code, "The request cannot be handled.", code="http_error")
    return JSONResponse(answer.body, answer.status, headers=dict(error.headers or {}))


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document with the request bodies, which are validated by the handlers and so unknown to FastAPI."""
    if app.openapi_schema is None:
        document = FastAPI.openapi(app)
        bodies = (
            schemas.CompletionRequest,
            schemas.ChatRequest,
            schemas.ScoreRequest,
            schemas.PublishRequest,
            schemas.PinRequest,
            schemas.RollbackRequest,
        )
        _, definitions = models_json_schema([(body, "validation") for body in bodies], ref_template=SCHEMAS + "{model}")
        components = document.setdefault("components", {})
        components.setdefault("schemas", {}).update(definitions["$defs"])
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return app.openapi_schema or {}
