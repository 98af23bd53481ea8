"""One HTTP exchange, from the key to the last byte, as an ASGI response that runs the handler itself.

    order      key (401), scope (403), limits of the tenant (429), body (413, 408), then the handler under the deadline (504)
    client     its going away cancels the handler wherever it waits: loading a plane, generating, or writing; what the handler holds is let go (field case SRV-10)
    errors     before the first byte an OpenAI-style body with its status; in a stream that has begun an event with the error, and the stream ends without [DONE]
    counted    in the tenant's limits until the last byte; in the metrics once, by route and status; a client that went away as 499

A body over the limit is read to its end where that is near, since a client that is still writing would meet a reset instead of the answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from pydantic import Field
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from prism_ray.core.config import Config
from prism_ray.engines.api import sse
from prism_ray.engines.api.backend import Backend, Target
from prism_ray.engines.api.errors import PERMISSION, ApiError, ClientGone, bad_request, of_exception, too_large
from prism_ray.engines.api.text import Tokens
from prism_ray.engines.metrics import ServingMetrics
from prism_ray.engines.tenancy import Caller, Tenancy
from prism_ray.engines.tenancy import Scope as KeyScope
from prism_ray.engines.throttle import TenantGate

log = logging.getLogger(__name__)

T = TypeVar("T")
DRAIN = 16
CLIENT_GONE = 499
FAIL_S = 5.0


class Limits(Config):
    """Of a request. max_tokens: of an answer; max_prompt_tokens: None for what the model allows; body_s: to read the body; deadline_s: for everything after it."""

    body_bytes: int = Field(default=1 << 20, ge=1)
    body_s: float = Field(default=30.0, gt=0)
    deadline_s: float = Field(default=300.0, gt=0)
    max_tokens: int = Field(default=4096, ge=1)
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    tokenizer_threads: int = Field(default=2, ge=1)


@dataclass(kw_only=True)
class Service:
    """What all exchanges share."""

    backend: Backend
    tenancy: Tenancy
    limits: Limits
    metrics: ServingMetrics | None = None
    exposition: Callable[[], bytes] | None = None
    gate: TenantGate = field(default_factory=TenantGate)
    _tokens: Tokens | None = None

    def __post_init__(self) -> None:
        # Threads of their own: a slow store or a cold load takes none from prompts for resident planes.
        self._threads = ThreadPoolExecutor(self.limits.tokenizer_threads, thread_name_prefix="tokenizer")

    @property
    def tokens(self) -> Tokens:
        """The base's tokenizer."""
        if self._tokens is None:
            self._tokens = Tokens(self.backend.tokenizer)
        return self._tokens

    async def tokenize(self, work: Callable[[Tokens], T]) -> T:
        """Tokenizer work, off the event loop."""
        tokens = self.tokens
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(tokens))

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class Call:
    """What a handler has: the caller, the body, and how to answer."""

    def __init__(self, service: Service, route: str, request_id: str, params: Mapping[str, str], send: Send):
        self.service, self.route, self.request_id, self.params = service, route, request_id, params
        self.caller: Caller
        self.body = b""
        self.query: Mapping[str, str] = {}
        self.status = 0
        self.read = self.streaming = self.finished = False
        self.began = time.monotonic()
        self._send = send

    @property
    def salt(self) -> str:
        """The salt of the tenant's caches."""
        return self.service.tenancy.salt(self.caller)

    async def json(self, body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Answer with JSON."""
        data = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        await self.data(data, "application/json", status=status, headers=headers)

    async def data(self, data: bytes, media_type: str, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Answer with bytes."""
        await self._start(status, {"content-type": media_type, "content-length": str(len(data)), **(headers or {})})
        self.finished = True
        await self._send({"type": "http.response.body", "body": data})

    async def begin_stream(self, headers: Mapping[str, str]) -> None:
        """Start server-sent events."""
        await self._start(200, {"content-type": sse.MEDIA_TYPE, "cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        self.streaming = True

    async def event(self, data: bytes) -> None:
        """Send events of `sse`."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_stream(self, data: bytes = b"") -> None:
        """Send the last bytes."""
        self.finished = True
        await self._send({"type": "http.response.body", "body": data})

    async def fail(self, error: ApiError) -> None:
        """Answer with an error, in whatever state the answer is."""
        if self.finished:
            return
        if self.streaming:
            self.status = error.status
            await self.end_stream(sse.event(error.body))
        elif not self.status:
            await self.json(error.body, status=error.status, headers=error.headers)

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        found = {"x-request-id": self.request_id, **headers}
        raw = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in found.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})


Handler = Callable[[Call], Awaitable[None]]


def identity_headers(target: Target, plane: str) -> dict[str, str]:
    """Which plane answered."""
    adapter = {"x-prism-adapter": target.name, "x-prism-adapter-version": str(target.version)} if target.version else {}
    return adapter | {"x-prism-plane": plane}


class Exchange(Response):
    """See the module docstring. scope: that the key must have; None lets everybody in."""

    def __init__(self, service: Service, route: str, handler: Handler, *, scope: KeyScope | None = "infer"):
        super().__init__()
        self._service, self._route, self._handler, self._key_scope = service, route, handler, scope

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(self._service, self._route, f"req-{secrets.token_hex(12)}", scope.get("path_params") or {}, send)
        tenant = "-"
        try:
            if self._key_scope is None:
                await self._bounded(call, receive)
                return
            call.caller = self._service.tenancy.authenticate(Headers(scope=scope).get("authorization"))
            tenant = call.caller.tenant
            if not call.caller.may(self._key_scope):
                raise ApiError(403, f"This API key lacks the scope '{self._key_scope}'.", PERMISSION, None, "insufficient_scope")
            with self._service.gate.enter(call.caller):
                call.query = _query(scope)
                call.body = await self._read(call, receive, Headers(scope=scope))
                await self._bounded(call, receive)
        except ClientGone:
            call.status = CLIENT_GONE
        except asyncio.CancelledError:
            call.status = CLIENT_GONE
            raise
        except Exception as error:  # noqa: BLE001 (whatever a handler raises, the client gets an answer and the log the reason)
            await self._refuse(call, error, receive)
        finally:
            self._account(call, tenant)

    async def _refuse(self, call: Call, error: Exception, receive: Receive) -> None:
        answer = of_exception(error, call.request_id)
        try:
            # A client that does not read must not keep this exchange for ever.
            async with asyncio.timeout(FAIL_S):
                if not call.read:
                    await self._discard(receive)
                await while_connected(receive, call.fail(answer), lambda: call.finished)
        except ClientGone:
            call.status = CLIENT_GONE
        except Exception as second:  # noqa: BLE001 (servers raise errors of their own for a connection that is gone)
            log.error("%s: the error could not be sent: %r", call.request_id, second)

    async def _bounded(self, call: Call, receive: Receive) -> None:
        async with asyncio.timeout(self._service.limits.deadline_s):
            await while_connected(receive, self._handle(call), lambda: call.finished)

    async def _handle(self, call: Call) -> None:
        await self._handler(call)

    async def _discard(self, receive: Receive) -> None:
        size, more = 0, True
        while more and size <= DRAIN * self._service.limits.body_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)

    async def _read(self, call: Call, receive: Receive, headers: Headers) -> bytes:
        limit = self._service.limits.body_bytes
        call.read = True
        declared = headers.get("content-length", "")
        over = declared.isdigit() and int(declared[:18]) > limit
        if over and int(declared[:18]) > DRAIN * limit:
            raise too_large(limit)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._service.limits.body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    size += len(message.get("body", b""))
                    over = over or size > limit
                    if size > DRAIN * limit:
                        break
                    if not over:
                        parts.append(message.get("body", b""))
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise ApiError(408, "The request body did not arrive in time.", code="request_timeout") from None
        if over:
            raise too_large(limit)
        return b"".join(parts)

    def _account(self, call: Call, tenant: str) -> None:
        seconds = time.monotonic() - call.began
        if self._key_scope is not None:
            log.info("%s %s tenant=%s status=%d %.3f s", call.request_id, call.route, tenant, call.status, seconds)
        metrics = self._service.metrics
        if metrics is not None:
            metrics.request(call.route, call.status, tenant, seconds)
            if call.status == CLIENT_GONE:
                metrics.cancelled(call.route)


def _query(scope: Scope) -> dict[str, str]:
    try:
        return dict(parse_qsl(bytes(scope.get("query_string", b"")).decode("latin-1"), keep_blank_values=True, max_num_fields=16))
    except ValueError:
        raise bad_request("The query string has too many fields.") from None


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T], finished: Callable[[], bool]) -> T:
    """The result of `work`; raises ClientGone, after `work` was cancelled and has ended, when the client closes the connection before `finished`."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and not finished():
            task.cancel()
            await asyncio.wait({task})
            if task.cancelled() or task.exception() is not None:
                raise ClientGone
        return await task
    finally:
        # Whoever cancels this cancels the work; it must have let go of what it holds before anybody goes on.
        watch.cancel()
        task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    message: Message = {}
    while message.get("type") != "http.disconnect":
        message = await receive()
