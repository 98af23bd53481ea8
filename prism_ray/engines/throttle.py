"""Limits of a tenant: requests a second by a token bucket, and requests at a time.

    bucket   at most `burst` tokens, refilled at `requests_per_second`; a request takes one, and is told when the next comes
    gate     refuses at once and queues nothing, so one tenant's wait never holds another's place (field case SRV-09)

Counts are those of one process: a front of several processes divides the limits by their number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from prism_ray.core.errors import PrismError
from prism_ray.engines.tenancy import Caller, TenantLimits


class TooManyRequests(PrismError):
    """A limit of the tenant is reached; the request may come again after `retry_after` seconds."""

    def __init__(self, what: str, *, where: str = "", remedy: str = "", retry_after: float = 1.0):
        super().__init__(what, where=where, remedy=remedy)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        return _too_many, (self.what, self.where, self.remedy, self.retry_after)


def _too_many(what: str, where: str, remedy: str, retry_after: float) -> TooManyRequests:
    return TooManyRequests(what, where=where, remedy=remedy, retry_after=retry_after)


class TokenBucket:
    """rate: tokens a second; burst: the most that it holds. It begins full."""

    def __init__(self, rate: float, burst: int, now: float):
        self._rate, self._burst = rate, burst
        self._tokens, self._then = float(burst), now

    def take(self, now: float) -> float:
        """Take a token and return 0, or take none and return the seconds until there is one."""
        self._tokens = min(float(self._burst), self._tokens + max(0.0, now - self._then) * self._rate)
        self._then = now
        if self._tokens >= 1:
            self._tokens -= 1
            return 0.0
        return (1 - self._tokens) / self._rate


@dataclass(eq=False)
class _State:
    limits: TenantLimits
    bucket: TokenBucket | None
    running: int = 0


class TenantGate:
    """Requests of all tenants pass here."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._states: dict[str, _State] = {}

    @contextmanager
    def enter(self, caller: Caller) -> Iterator[None]:
        """Count a request while the block runs. Raises TooManyRequests."""
        state = self._state(caller)
        limits = caller.limits
        if limits.concurrent is not None and state.running >= limits.concurrent:
            raise TooManyRequests(f"{state.running} requests run, which is the tenant's limit", remedy="wait for one to end")
        if state.bucket is not None and (wait := state.bucket.take(self._clock())) > 0:
            raise TooManyRequests(f"over {limits.requests_per_second:g} requests a second", remedy="send them slower", retry_after=wait)
        state.running += 1
        try:
            yield
        finally:
            state.running -= 1

    def running(self, tenant: str) -> int:
        """Requests of a tenant that run now."""
        return self._states[tenant].running if tenant in self._states else 0

    def _state(self, caller: Caller) -> _State:
        state = self._states.get(caller.tenant)
        if state is None:
            state = self._states[caller.tenant] = _State(caller.limits, self._bucket(caller.limits))
        elif state.limits != caller.limits:
            state.limits, state.bucket = caller.limits, self._bucket(caller.limits)
        return state

    def _bucket(self, limits: TenantLimits) -> TokenBucket | None:
        return None if limits.requests_per_second is None else TokenBucket(limits.requests_per_second, limits.burst, self._clock())
