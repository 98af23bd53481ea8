"""The content-addressed store of bases and adapters; see `api`."""

from prism_ray.adapters.store.api import AdapterStore
from prism_ray.adapters.store.bases import Base
from prism_ray.adapters.store.collect import Collected
from prism_ray.adapters.store.compare import LayerDiff, PlaneDiff
from prism_ray.adapters.store.ids import DEFAULT_TENANT, Reference, parse_reference
from prism_ray.adapters.store.records import Event

__all__ = [
    "DEFAULT_TENANT",
    "AdapterStore",
    "Base",
    "Collected",
    "Event",
    "LayerDiff",
    "PlaneDiff",
    "Reference",
    "parse_reference",
]
