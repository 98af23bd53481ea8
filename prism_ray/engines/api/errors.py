"""Errors as the OpenAI API sends them: {"error": {"message", "type", "param", "code"}} with an HTTP status.

What a client gets to read is written here or in an exception that is made for it; everything else becomes a fixed sentence, and the reason goes to the log
with the request's id. No message repeats a path of this machine or another tenant's name; the answer to a foreign and to a missing adapter is one constant.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

from prism_ray.core.errors import one_line
from prism_ray.engines.api.backend import AdapterBroken, AdapterRefused, Conflict, UnknownModel
from prism_ray.engines.plane_cache import PlaneBusy
from prism_ray.engines.protocol import EngineStopped, RequestRefused, UnknownPlane
from prism_ray.engines.tenancy import Unauthorized
from prism_ray.engines.throttle import TooManyRequests

log = logging.getLogger(__name__)

INVALID, AUTHENTICATION, PERMISSION = "invalid_request_error", "authentication_error", "permission_error"
RATE_LIMIT, SERVER = "rate_limit_error", "server_error"
RETRY_S = 1.0


class ClientGone(Exception):
    """The client closed the connection: there is nobody to answer."""


@dataclass(eq=False)
class ApiError(Exception):
    """An answer with an error. retry_after: seconds, as the header of that name, rounded up."""

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Its headers."""
        found = {} if self.retry_after is None else {"retry-after": str(max(1, math.ceil(self.retry_after)))}
        return found | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that no state of the server would serve."""
    return ApiError(400, message, INVALID, param, code)


def unknown_model() -> ApiError:
    """The one answer for a missing, a foreign and an illegal name."""
    return ApiError(404, "The model does not exist or you do not have access to it.", INVALID, "model", "model_not_found")


def too_large(limit: int) -> ApiError:
    """A body over the limit."""
    return ApiError(413, f"The request body is larger than {limit} bytes.", INVALID, None, "request_too_large")


def of_exception(error: BaseException, request_id: str) -> ApiError:
    """The answer to an exception; what the client must not read is logged."""
    match error:
        case ApiError():
            return error
        case Unauthorized():
            return ApiError(401, "Incorrect API key provided.", AUTHENTICATION, None, "invalid_api_key")
        case TooManyRequests():
            message = f"Rate limit reached: {error.what}. {error.remedy.capitalize()}."
            return ApiError(429, message, RATE_LIMIT, None, "rate_limit_exceeded", error.retry_after)
        case UnknownModel():
            return unknown_model()
        case RequestRefused():
            return bad_request(str(error), error.where or None)
        case AdapterRefused():
            return ApiError(422, f"The adapter is not served: {error.what}.", INVALID, "reference", "adapter_refused")
        case Conflict():
            return ApiError(409, f"{error.what.capitalize()}; {error.remedy}.", INVALID, None, "conflict")
        case PlaneBusy():
            return _busy("All adapter slots are in use. Try again later.", "adapter_slots_busy", error.retry_after)
        case AdapterBroken():
            log.error("%s: broken adapter: %s", request_id, error)
            return _busy("The adapter cannot be served at the moment.", "adapter_unavailable", None)
        case EngineStopped() | UnknownPlane():
            log.error("%s: %s", request_id, error)
            return _busy("The server cannot serve this request at the moment. Try again later.", "engine_unavailable", RETRY_S)
        case TimeoutError():
            return ApiError(504, "The request took longer than its deadline.", SERVER, None, "deadline_exceeded")
    log.error("%s: %s", request_id, one_line(error), exc_info=error)
    return ApiError(500, f"The server had an error while processing the request {request_id}.", SERVER, None, "internal_error")


def _busy(message: str, code: str, retry_after: float | None) -> ApiError:
    return ApiError(503, message, SERVER, None, code, retry_after)
