"""Sweep progress as plain lines, to the job's log and to a file that outlives the connection (field case RAY-06)."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ray.tune

from prism_ray.dist.config import SweepConfig
from prism_ray.dist.trial import FINAL, METRIC, RUNG


class ProgressLog(ray.tune.Callback):
    """One line per evaluation and per ended trial."""

    def __init__(self, path: Path, config: SweepConfig):
        self.path = path
        self.total = config.trials
        self.steps = config.train.steps
        self.ended: set[str] = set()

    def line(self, text: str) -> None:
        """Print a line and append it, with the time, to the file."""
        print(text, flush=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {text}\n")

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any) -> None:
        """An evaluation or the final measurement of a trial."""
        if RUNG in result and not result.get(FINAL):
            shown = " ".join(
                f"{key}={result[key]:.4g}" for key in ("loss", METRIC, "one_minus_omega", "tokens_per_second") if key in result
            )
            self.line(f"trial {trial} step {int(result['step'])}/{self.steps} {shown}")

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial that ended, by itself or by the scheduler."""
        self._end(trial, "ended")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial that failed for good."""
        self._end(trial, "FAILED")

    def _end(self, trial: Any, word: str) -> None:
        self.ended.add(trial.trial_id)
        last = trial.last_result or {}
        shown = " ".join(f"{key}={last[key]:.4g}" for key in ("test_accuracy", "delta_ce") if key in last)
        self.line(f"trial {trial} {word} at step {int(last.get('step', 0))} {shown} ({len(self.ended)}/{self.total})")
