"""One trial: a Ray Train run with DeepSpeed (or plain PyTorch) workers, reporting to Ray Tune.

Metrics of every step are reported, checkpoints with every evaluation. A worker that dies is replaced by Ray Train, which starts the group again from the
last reported checkpoint; a trial whose driver died finds its Train run again by name, and goes on from the same checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

# Read by ray.train when it is imported, in the trial's process as in the driver's.
os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")

import ray.train
import ray.tune
from ray.train.torch import TorchConfig, TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback

from prism_ray.core.errors import PrismError, ResourceError
from prism_ray.core.files import write_json
from prism_ray.dist.cluster import free_resources, worker_bundle
from prism_ray.dist.config import SweepConfig
from prism_ray.training.backends import Backend, LocalBackend
from prism_ray.training.checkpoint import latest_complete
from prism_ray.training.config import TrainConfig
from prism_ray.training.loop import selection_metric
from prism_ray.training.objective import Objective
from prism_ray.training.run import build, code_shard, final_metrics, install, train, write_adapter

METRIC = "validation_metric"
RUNG = "rung"
FINAL = "final"
USER_ERROR = "user_error"
ADAPTER_FOLDER = "adapter"
FINAL_FILE = "final.json"


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


def run_trial(values: dict[str, Any], sweep: dict[str, Any] | None = None) -> None:
    """The Tune trainable. values: {"point": a grid point}. Errors of the user's making arrive as one line."""
    config = SweepConfig.load(sweep or {})
    scaling = config.scaling
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(scaling.pending_timeout_s)
    trial = ray.tune.get_context().get_trial_id()
    # With Train V2 switched on these names are V2's, which type checkers cannot know.
    v2: Any = ray.train
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"train": config.trial_config(values["point"]).to_dict(), "gpu": scaling.gpus_per_worker > 0},
        torch_config=TorchConfig(backend="nccl" if scaling.gpus_per_worker else "gloo"),
        scaling_config=v2.ScalingConfig(
            num_workers=scaling.workers,
            use_gpu=scaling.gpus_per_worker > 0,
            resources_per_worker=worker_bundle(scaling),
        ),
        run_config=v2.RunConfig(
            name=f"trial-{trial}",
            storage_path=f"{config.storage.rstrip('/')}/{config.name}/train",
            failure_config=v2.FailureConfig(
                max_failures=config.max_failures,
                # Ray's default retries a group that finds no resources for ever; after the second time-out that is an error.
                controller_failure_limit=1,
            ),
            checkpoint_config=v2.CheckpointConfig(num_to_keep=config.keep_checkpoints),
            callbacks=[TuneReportCallback()],
            # Its INFO lines repeat every reported metric, which Tune's loggers already write.
            logging_config=v2.LoggingConfig(log_level="WARNING"),
        ),
    )
    try:
        trainer.fit()
    except Exception as error:
        if "WorkerGroupStartupTimeout" not in f"{type(error).__name__} {error!r}":
            raise
        raise ResourceError(
            f"{scaling.workers} worker(s) of {worker_bundle(scaling)} found no place within {scaling.pending_timeout_s} s; free now: {free_resources()}",
            where="scaling",
            remedy="lower workers or their resources, raise pending_timeout_s, or let the cluster grow",
        ) from error
