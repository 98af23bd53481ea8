"""Metrics of serving, independent of who collects them: `prometheus_client` here, Ray's own metrics in `dist`.

    metrics = ServingMetrics(PrometheusMetrics())
    metrics.answered("acme/support", prompt=12, generated=40)

Label sets are bounded (field case SRV-08): a request label is one of this module's own, a tenant is one of the key file, and the adapters beyond the first
`MAX_ADAPTERS` share the label "other". The series of an adapter go when it is unloaded, which frees its label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from prism_ray.core.optional import require
from prism_ray.engines.plane_cache import PlaneCacheStats
from prism_ray.engines.protocol import EngineStats

MAX_ADAPTERS = 256
OTHER = "other"
LATENCY_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Series(Protocol):
    """One metric. labels: a value for each label name that it was made with."""

    def add(self, value: float, labels: Mapping[str, str]) -> None:
        """Count up; of a counter."""

    def set(self, value: float, labels: Mapping[str, str]) -> None:
        """Of a gauge."""

    def observe(self, value: float, labels: Mapping[str, str]) -> None:
        """Of a histogram."""

    def remove(self, labels: Mapping[str, str]) -> None:
        """Forget the series of these labels; nothing where there is none."""


class Metrics(Protocol):
    """Makes metrics. name: of the Prometheus form, counters without `_total`; labels: names."""

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Series:
        """Only grows."""

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> Series:
        """A value as of now."""

    def histogram(self, name: str, help: str, bounds: Sequence[float], labels: Sequence[str] = ()) -> Series:
        """Counts by upper bounds."""


class PrometheusMetrics:
    """Metrics of `prometheus_client`, in a registry of their own; `render` is what a scrape gets."""

    def __init__(self) -> None:
        self._client = require("prometheus_client", "serve")
        self.registry = self._client.CollectorRegistry()

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Series:
        return _PrometheusSeries(self._client.Counter(name, help, labels, registry=self.registry), labels)

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> Series:
        return _PrometheusSeries(self._client.Gauge(name, help, labels, registry=self.registry), labels)

    def histogram(self, name: str, help: str, bounds: Sequence[float], labels: Sequence[str] = ()) -> Series:
        return _PrometheusSeries(self._client.Histogram(name, help, labels, buckets=tuple(bounds), registry=self.registry), labels)

    def render(self) -> bytes:
        """The text exposition format."""
        return bytes(self._client.generate_latest(self.registry))


class _PrometheusSeries:
    def __init__(self, metric: Any, labels: Sequence[str]):
        self._metric, self._labels = metric, tuple(labels)

    def _of(self, labels: Mapping[str, str]) -> Any:
        return self._metric.labels(**labels) if self._labels else self._metric

    def add(self, value: float, labels: Mapping[str, str]) -> None:
        self._of(labels).inc(value)

    def set(self, value: float, labels: Mapping[str, str]) -> None:
        self._of(labels).set(value)

    def observe(self, value: float, labels: Mapping[str, str]) -> None:
        self._of(labels).observe(value)

    def remove(self, labels: Mapping[str, str]) -> None:
        try:
            self._metric.remove(*(labels[name] for name in self._labels))
        except KeyError:  # older releases of the client raise for a series that is not there
            return


class BoundedLabels:
    """At most `limit` values of a label at a time; the others are `OTHER`."""

    def __init__(self, limit: int):
        self._limit = limit
        self._known: set[str] = set()

    def of(self, value: str) -> str:
        """The label for a value."""
        if value not in self._known:
            if len(self._known) >= self._limit:
                return OTHER
            self._known.add(value)
        return value

    def release(self, value: str) -> bool:
        """Free a value's label; False where it had none of its own."""
        if value not in self._known:
            return False
        self._known.remove(value)
        return True


class _Totals:
    """Counters that follow totals kept elsewhere. A total that fell belongs to a new process or engine, and is counted from zero."""

    def __init__(self, counters: Mapping[str, Series]):
        self._counters = counters
        self._seen = dict.fromkeys(counters, 0)

    def follow(self, totals: Any) -> None:
        for name, counter in self._counters.items():
            now, seen = int(getattr(totals, name)), self._seen[name]
            counter.add(now - seen if now >= seen else now, {})
            self._seen[name] = now


class ServingMetrics:
    """What serving reports. adapter: "tenant/name", or "base"."""

    def __init__(self, metrics: Metrics, *, max_adapters: int = MAX_ADAPTERS):
        self._adapters = BoundedLabels(max_adapters)
        self._requests = metrics.counter("prism_requests", "HTTP requests", ("route", "status", "tenant"))
        self._seconds = metrics.histogram("prism_request_seconds", "From the request to the end of its answer", LATENCY_S, ("route",))
        self._first = metrics.histogram("prism_first_token_seconds", "From the request to the first token", LATENCY_S, ("route",))
        self._cancelled = metrics.counter("prism_cancelled_requests", "Requests whose client went away", ("route",))
        self._answers = metrics.counter("prism_adapter_requests", "Answered requests", ("adapter",))
        self._tokens = metrics.counter("prism_adapter_tokens", "Tokens of answered requests", ("adapter", "kind"))
        names = {
            "loads": "Planes made resident",
            "hits": "Requests that found their plane resident",
            "evictions": "Planes dropped for others",
            "unloads": "Planes dropped on request",
            "failures": "Loads that failed",
            "busy": "Requests told to come again, all planes being in use",
        }
        self._cache = _Totals({name: metrics.counter(f"prism_plane_{name}", help) for name, help in names.items()})
        names = {
            "prompt_tokens": "Prompt tokens",
            "generated_tokens": "Generated tokens",
            "cache_hit_tokens": "Prompt tokens from the prefix cache",
            "aborted": "Sequences ended before their time",
        }
        self._engine = _Totals({name: metrics.counter(f"prism_engine_{name}", help) for name, help in names.items()})
        self._gauges = {
            name: metrics.gauge(f"prism_{name}", help)
            for name, help in {
                "planes_resident": "Resident planes, the base's not counted",
                "planes_resident_bytes": "Bytes of their scales",
                "planes_pinned": "Planes that requests hold",
                "planes_loading": "Loads under way",
                "sequences_running": "Running sequences",
                "sequences_waiting": "Waiting sequences",
            }.items()
        }

    def request(self, route: str, status: int, tenant: str, seconds: float) -> None:
        """The end of a request."""
        self._requests.add(1, {"route": route, "status": str(status), "tenant": tenant})
        self._seconds.observe(seconds, {"route": route})

    def first_token(self, route: str, seconds: float) -> None:
        """A first token."""
        self._first.observe(seconds, {"route": route})

    def cancelled(self, route: str) -> None:
        """A client that went away."""
        self._cancelled.add(1, {"route": route})

    def answered(self, adapter: str, *, prompt: int, generated: int) -> None:
        """Tokens of a request, also of one that was cut short."""
        label = self._adapters.of(adapter)
        self._answers.add(1, {"adapter": label})
        self._tokens.add(prompt, {"adapter": label, "kind": "prompt"})
        self._tokens.add(generated, {"adapter": label, "kind": "generated"})

    def forget(self, adapter: str) -> None:
        """Remove the series of an adapter that is not served any more."""
        if self._adapters.release(adapter):
            self._answers.remove({"adapter": adapter})
            for kind in ("prompt", "generated"):
                self._tokens.remove({"adapter": adapter, "kind": kind})

    def state(self, engine: EngineStats, cache: PlaneCacheStats | None) -> None:
        """Gauges and totals as of now."""
        self._engine.follow(engine)
        values = {"sequences_running": engine.running, "sequences_waiting": engine.waiting}
        if cache is not None:
            self._cache.follow(cache)
            values |= {"planes_resident": cache.resident, "planes_resident_bytes": cache.resident_bytes}
            values |= {"planes_pinned": cache.pinned, "planes_loading": cache.loading}
        for name, value in values.items():
            self._gauges[name].set(value, {})
