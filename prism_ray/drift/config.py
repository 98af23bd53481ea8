"""What a drift run compares, on which data, and when it fails."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from prism_ray.core.compute import DtypeName
from prism_ray.core.config import Config
from prism_ray.risk.bound import Alignment
from prism_ray.training.task import BenchmarkConfig

FailOn = Literal["rotation", "scale", "shape", "head", "drift"]


class DriftConfig(Config):
    """One run of `prism-ray drift`: a base, variants, benchmarks."""

    base: str
    variants: tuple[str, ...] = Field(min_length=1)
    """Model sources: folder, GGUF file, hub id, `pypi:…`, or `adapter-folder@base` (the part behind @ is optional and stands for the base)."""
    names: tuple[str, ...] | None = None
    """Names of the variants in tables; default: the last part of each source."""
    data: tuple[BenchmarkConfig, ...] = Field(min_length=1)
    dtype: DtypeName = "auto"
    max_batch: int = Field(default=16, ge=1)
    max_batch_tokens: int = Field(default=2048, ge=1)
    threads: int = Field(default=0, ge=0)
    """torch threads of a process; 0 leaves torch's own choice."""
    alignments: tuple[Alignment, ...] = ("identity", "nuclear")
    floor_samples: int = Field(default=32, ge=0)
    """Samples of each benchmark on which the base is run against itself in other layouts; 0 for no floor."""
    splits: int = Field(default=200, ge=2)
    """Random splits of the split-half null."""
    max_dropped: int = Field(default=0, ge=0)
    """Samples that may be left out of both models for NaN or infinite features; more of them stop the run."""
    max_bound: float | None = Field(default=None, gt=0)
    """Fail above this bound, in nats a token."""
    fail_on: tuple[FailOn, ...] = ()
    """Fail where the class direction shows rotation, or where the named axis dominates and clears its floor (`drift`: any axis)."""
    seed: int = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.names is not None and len(self.names) != len(self.variants):
            raise ValueError(f"{len(self.names)} names for {len(self.variants)} variants")
        for what, values in (("variant name", self.variant_names), ("data name", tuple(entry.name for entry in self.data))):
            if len(set(values)) != len(values):
                twice = next(value for value in values if values.count(value) > 1)
                raise ValueError(f"{what} '{twice}' stands twice; give names that differ")
        return self

    @property
    def variant_names(self) -> tuple[str, ...]:
        """One name a variant."""
        return self.names or tuple(default_name(source) for source in self.variants)


def default_name(source: str) -> str:
    """The last part of a source: folder or file name, or the hub id's own name."""
    adapter = source.rsplit("@", 1)[0] if "@" in source and not source.startswith("pypi:") else source
    return adapter.rstrip("/").rsplit("/", 1)[-1] or source
