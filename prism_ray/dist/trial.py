"""One trial: a Ray Train run with DeepSpeed (or plain PyTorch) workers, reporting to Ray Tune.

Metrics of every step are reported, checkpoints with every evaluation. A worker that dies is replaced by Ray Train, which starts the group again from the
last reported checkpoint; a trial whose driver died finds its Train run again by name, and goes on from the same checkpoint.

This module is imported by three processes of a trial (Tune's actor, Train's controller, the worker) of which one trains: what training needs, six seconds of
imports, stands in `dist.worker` and is imported there only.
"""

from __future__ import annotations

import os
from typing import Any

# Read by ray.train when it is imported, in the trial's process as in the driver's.
os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")

import ray.train
import ray.tune
from ray.train.torch import TorchConfig, TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback

from prism_ray.core.errors import ResourceError
from prism_ray.dist.cluster import free_resources, worker_bundle
from prism_ray.dist.config import SweepConfig

METRIC = "validation_metric"
RUNG = "rung"
FINAL = "final"
USER_ERROR = "user_error"
ADAPTER_FOLDER = "adapter"
FINAL_FILE = "final.json"


def train_worker(payload: dict[str, Any]) -> None:
    """What every Ray Train worker runs; see `dist.worker.train_worker`."""
    from prism_ray.dist import worker

    worker.train_worker(payload)


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
        # Train wraps it in a ControllerError.
        if "WorkerGroupStartupTimeout" not in f"{error} {error!r} {getattr(error, 'controller_failure', None)!r}":
            raise
        raise ResourceError(
            f"{scaling.workers} worker(s) of {worker_bundle(scaling)} found no place within {scaling.pending_timeout_s} s; free now: {free_resources()}",
            where="scaling",
            remedy="lower workers or their resources, raise pending_timeout_s, or let the cluster grow",
        ) from error
