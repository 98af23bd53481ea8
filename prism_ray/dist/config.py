"""A sweep as one typed value; imports nothing heavy, so that `tune_spaces` stays light."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from prism_ray.core.config import Config
from prism_ray.training.config import TrainConfig


class SearchSpace(Config):
    """The grid of a sweep: every combination is one trial.

    strength: lambda of the regularizer. learning_rate: per format, since the coarse E8M0 grid wants its own; formats without an entry use the run's.
    """

    strength: tuple[float, ...] = (0.0, 0.01, 0.05, 0.1, 0.5, 1.0)
    rank: tuple[int, ...] = (4, 8, 16)
    format: tuple[str, ...] = ("nvfp4",)
    learning_rate: dict[str, tuple[float, ...]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("strength", "rank", "format"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{name} must list one or more different values")
        if min(self.rank) < 1:
            raise ValueError("rank must be 1 or more")
        if min(self.strength) < 0:
            raise ValueError("strength must be 0 or more")
        unknown = set(self.learning_rate) - set(self.format)
        if unknown:
            raise ValueError(f"learning_rate names formats that the sweep does not have: {', '.join(sorted(unknown))}")
        return self


class ScalingConfig(Config):
    """What one trial takes: `workers` Ray Train workers with cpus and gpus each, at most `concurrent` trials at once.

    pending_timeout_s: how long a trial's workers may wait for resources before that is an error. autoscaling: the cluster may grow, so what it lacks
    now is no reason to refuse.
    """

    workers: int = Field(default=1, ge=1)
    cpus_per_worker: float = Field(default=1.0, gt=0)
    gpus_per_worker: float = Field(default=0.0, ge=0)
    concurrent: int = Field(default=2, ge=1)
    autoscaling: bool = False
    pending_timeout_s: int = Field(default=300, ge=1)


class AshaConfig(Config):
    """Asynchronous successive halving on the validation metric; grace_evals: evaluations before a trial may be stopped."""

    enabled: bool = True
    grace_evals: int = Field(default=1, ge=1)
    reduction_factor: float = Field(default=3.0, gt=1)


class SweepConfig(Config):
    """A sweep: the run that all trials share, the space, the resources, the rules.

    storage: folder (or any URI that Ray's storage takes) shared by the cluster; the sweep lives in storage/name. max_failures: worker deaths a trial may
    recover from. required_good: trials that must end well for the sweep to succeed. keep_checkpoints: per trial.
    """

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    train: TrainConfig
    space: SearchSpace = SearchSpace()
    scaling: ScalingConfig = ScalingConfig()
    asha: AshaConfig = AshaConfig()
    storage: str = "runs"
    max_failures: int = Field(default=2, ge=0)
    required_good: int = Field(default=1, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)
    merge_best: bool = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.required_good > self.trials:
            raise ValueError(f"required_good is {self.required_good}, but the space has only {self.trials} trials")
        return self

    @property
    def trials(self) -> int:
        """Number of trials of the grid."""
        rates = sum(len(self.rates(name)) for name in self.space.format)
        return len(self.space.strength) * len(self.space.rank) * rates

    def rates(self, format_name: str) -> tuple[float, ...]:
        """Learning rates to try for a format."""
        return self.space.learning_rate.get(format_name) or (self.train.optimizer.learning_rate,)

    def points(self) -> list[dict[str, float | int | str]]:
        """The grid in order: format, rank, learning_rate, strength of each trial."""
        return [
            {"format": name, "rank": rank, "learning_rate": rate, "strength": strength}
            for name in self.space.format
            for rate in self.rates(name)
            for rank in self.space.rank
            for strength in self.space.strength
        ]

    def trial_config(self, point: dict[str, float | int | str]) -> TrainConfig:
        """The run of one grid point."""
        return self.train.with_overrides(
            {
                "format": point["format"],
                "adapter.rank": point["rank"],
                "optimizer.learning_rate": point["learning_rate"],
                "regularizer.strength": point["strength"],
            }
        )
