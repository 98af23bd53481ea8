"""What a Ray Train worker of a trial does: build, resume, train, measure, write, report."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import ray.train

from prism_ray.core.errors import PrismError
from prism_ray.core.files import write_json
from prism_ray.dist.trial import ADAPTER_FOLDER, FINAL, FINAL_FILE, METRIC, RUNG, USER_ERROR
from prism_ray.training.backends import Backend, LocalBackend
from prism_ray.training.checkpoint import latest_complete
from prism_ray.training.config import TrainConfig
from prism_ray.training.loop import selection_metric
from prism_ray.training.objective import Objective
from prism_ray.training.run import build, code_shard, final_metrics, install, train, write_adapter


def train_worker(payload: dict[str, Any]) -> None:
    """What every Ray Train worker runs. payload: {"train": TrainConfig data, "gpu": bool}.

    A PrismError ends the run with a report instead of an exception: a restart would only meet it again (`max_failures` is for dying workers).
    """
    try:
        _train_worker(payload)
    except PrismError as error:
        _report({USER_ERROR: str(error), FINAL: 1.0}, None)


def _train_worker(payload: dict[str, Any]) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    config = TrainConfig.load(payload["train"])
    device = "cuda" if payload["gpu"] else "cpu"

    def make_backend(objective: Objective) -> Backend:
        if config.backend == "deepspeed":
            from prism_ray.training.deepspeed_backend import DeepSpeedBackend

            return DeepSpeedBackend(objective, config, device)
        return LocalBackend(objective, config.optimizer)

    context = build(config, device=device, make_backend=make_backend)
    if context.backend.rank == 0:
        for note in context.data.notes:
            print(note, flush=True)
    checkpoint = ray.train.get_checkpoint()
    rung = 0
    with tempfile.TemporaryDirectory(prefix="prism-resume-") as name:
        resume = None
        if checkpoint is not None:
            with checkpoint.as_directory() as source:
                shutil.copytree(source, name, dirs_exist_ok=True)
            if (Path(name) / FINAL_FILE).is_file():
                # The run had ended and only its driver did not hear of it.
                _report(json.loads((Path(name) / FINAL_FILE).read_text()), Path(name) if context.backend.rank == 0 else None)
                return
            resume = latest_complete([Path(name)])

        def report(metrics: dict[str, Any], folder: Path | None) -> None:
            nonlocal rung
            shown = _finite(metrics)
            if "validation_n" in metrics:
                rung = -(-int(metrics["step"]) // config.eval_every)
                shown |= {RUNG: rung, METRIC: selection_metric(config, metrics)}
            _report(shown, folder)

        result = train(context, report=report, resume=resume)
    values: dict[str, Any] = {
        "step": float(result.progress.step),
        "best_step": float(result.progress.best_step),
        FINAL: 1.0,
        RUNG: rung + 1,
    }
    values |= {
        "train_seconds": result.progress.seconds,
        "train_tokens": float(result.progress.tokens),
        "tokens_per_second": result.progress.tokens / max(result.progress.seconds, 1e-9),
        "resumes": float(len(result.progress.resumed_at)),
    }
    if result.diverged or not result.best:
        _report(values | {"diverged": 1.0}, None)
        return
    install(context, result.best)
    best = next(row for row in result.progress.history if row["step"] == result.progress.best_step)
    values["code_bytes_per_worker"] = float(code_shard(context.model)[0])
    values |= {METRIC: selection_metric(config, best), "trainable_parameters": float(sum(value.numel() for value in result.best.values()))}
    values |= {key: best[key] for key in best if key.startswith("validation_") or key in ("omega", "one_minus_omega", "delta_rho")}
    values |= final_metrics(context)
    with tempfile.TemporaryDirectory(prefix="prism-final-") as name:
        folder = None
        if context.backend.rank == 0:
            folder = Path(name)
            write_adapter(context, result, folder / ADAPTER_FOLDER, values)
            write_json(folder / FINAL_FILE, _finite(values))
        _report(_finite(values), folder)


def _finite(metrics: dict[str, Any]) -> dict[str, Any]:
    """NaN never reaches a scheduler; an absent value is an absent key."""
    return {key: value for key, value in metrics.items() if not isinstance(value, float) or math.isfinite(value)}


def _report(metrics: dict[str, Any], folder: Path | None) -> None:
    ray.train.report(metrics, checkpoint=None if folder is None else ray.train.Checkpoint.from_directory(str(folder)))
