"""The sweep: prepare the bases, run the grid on Ray Tune with ASHA, judge every trial, merge the best, write the result.

    storage/name/
      base.json                      fingerprints and base metrics per format
      sweep.json                     the whole config; from here on the sweep can be resumed
      progress.log                   one line per evaluation and per finished trial, readable after a reconnect
      tune/, train/                  Ray Tune's experiment, and one Ray Train run per trial
      trials.parquet, trials.csv, history.parquet, report.html
      best/adapter, best/merged      the best adapter and its merged checkpoint

A trial is good when it ended by itself with a finite metric; NaN never wins, and fewer good trials than `required_good` fail the sweep (field case RAY-03).
"""

from __future__ import annotations

import json
import math
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import ray
import ray.train
import ray.tune
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from prism_ray import __version__
from prism_ray.core.errors import ConfigError, PrismError, ResourceError, SweepFailed
from prism_ray.core.files import atomic_folder, require_disk, write_json
from prism_ray.dist import cluster, remote
from prism_ray.dist.cluster import TRIAL_CPUS, check_feasible, unwrap, worker_bundle
from prism_ray.dist.config import SweepConfig
from prism_ray.dist.progress import ProgressLog
from prism_ray.dist.trial import ADAPTER_FOLDER, FINAL, METRIC, RUNG, USER_ERROR, run_trial

CONFIG_FILE, BASE_FILE, LOG_FILE = "sweep.json", "base.json", "progress.log"
KILLED = (
    "RayActorError",
    "ActorDiedError",
    "WorkerHealthCheckFailedError",
    "WorkerCrashedError",
    "NodeDiedError",
    "OutOfMemoryError",
    "LocalRayletDiedError",
)
# Adapter, two Adam moments, a second copy of the values and the best adapter so far, float32 each.
CHECKPOINT_COPIES = 5


def sweep_folder(config: SweepConfig) -> Path:
    """Absolute folder of a sweep."""
    return Path(config.storage).expanduser().absolute() / config.name


def load_sweep(folder: Path) -> SweepConfig:
    """The config that a sweep was started with; ConfigError where there is no sweep."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ConfigError("there is no sweep to resume", where=str(folder), remedy="check storage and name, or leave --resume out")
    return SweepConfig.load(json.loads(path.read_text()))


def run_sweep(config: SweepConfig, *, resume: bool = False, command: str = "") -> Path:
    """Run (or resume) a sweep on the connected cluster; returns the report's path.

    resume: trials that ended stay as they are, the others go on from their last checkpoint. Raises PrismError for bad input before any trial starts, and
    SweepFailed, after everything was written, when fewer trials than required are good.
    """
    folder = sweep_folder(config)
    if "://" in config.storage:
        raise ConfigError(
            "results are written to a folder that all nodes share", where="storage", remedy="mount the bucket, or use a shared file system"
        )
    config = config.with_overrides({"storage": str(folder.parent)})
    if resume:
        _require_same(load_sweep(folder), config)
    elif (folder / CONFIG_FILE).exists():
        raise ConfigError(
            "a sweep of this name exists already", where=str(folder), remedy="resume it with --resume, or choose another name"
        )
    slots = check_feasible(config.scaling)
    started = datetime.now(UTC)
    if resume:
        bases = json.loads((folder / BASE_FILE).read_text())
    else:
        bases = _prepare(config, folder)
        write_json(folder / BASE_FILE, bases)
        # Last, so that a sweep that its input stopped has left nothing that would have to be resumed.
        write_json(folder / CONFIG_FILE, config.to_dict())
    # Here and not at the top: a refused sweep should not wait for plotting packages.
    from prism_ray.reports.html import write_report
    from prism_ray.reports.sweep import best_trial, gating, write_tables

    log = ProgressLog(folder / LOG_FILE, config)
    log.line(f"sweep {config.name}: {config.trials} trials, {slots} at once" + (" (resumed)" if resume else ""))
    results = _tune(config, folder, slots, resume, log)
    trials, history = collect(config, results, bases)
    by_loss = config.train.selection == "loss" or not config.train.task.labels
    best = best_trial(trials, "validation_loss", mode="min") if by_loss else best_trial(trials)
    summary: dict[str, Any] = {
        "name": config.name,
        "started": started.isoformat(timespec="seconds"),
        "model": config.train.model,
        "task": config.train.task.name,
        "formats": list(config.space.format),
        "required_good": config.required_good,
        "selection": "loss" if by_loss else "accuracy",
        "command": command,
        "seeds": [config.train.seed],
        "versions": {"prism-ray": __version__, "ray": ray.__version__, **_versions()},
        "best_trial_id": None if best is None else best["trial_id"],
        "best": None,
        "gating": [reading.to_dict() for reading in gating(trials)],
    }
    if best is not None:
        log.line(f"best trial: {best['trial_id']}")
        summary["best"] = _ship(config, best, bases, folder)
    summary["finished"] = datetime.now(UTC).isoformat(timespec="seconds")
    write_tables(folder, trials, history)
    report = write_report(folder, trials, history, summary)
    good = int((trials["state"] == "good").sum())
    log.line(f"{good} of {len(trials)} trials good, report: {report}")
    print(_states(trials), flush=True)
    if good < config.required_good:
        raise SweepFailed(
            f"{good} of {len(trials)} trials are good, {config.required_good} required",
            where=str(folder),
            remedy=f"see the reasons in {folder / 'trials.csv'}",
        )
    return report


def _require_same(old: SweepConfig, new: SweepConfig) -> None:
    """A resumed sweep keeps its space and its run; resources and limits may change."""
    for name in ("train", "space"):
        if getattr(old, name) != getattr(new, name):
            raise ConfigError(
                f"'{name}' differs from the sweep that is to be resumed",
                where=str(sweep_folder(new)),
                remedy="give the same space and overrides, or start a new sweep",
            )


def _versions() -> dict[str, str]:
    import peft
    import torch
    import transformers

    return {"torch": str(torch.__version__), "transformers": transformers.__version__, "peft": peft.__version__}


def _remote(function: Any, config: SweepConfig, *args: Any) -> Any:
    """Run a function in a task on a worker node (the head node does no model work), and raise its PrismError as such.

    ResourceError, with the bundle and what is free, when no node offers the bundle within `pending_timeout_s`: Ray itself would wait for ever.
    """
    scaling = config.scaling
    bundle = worker_bundle(scaling)
    group = placement_group([bundle])
    try:
        if not group.wait(timeout_seconds=scaling.pending_timeout_s):
            raise ResourceError(
                f"no node could hold {bundle} within {scaling.pending_timeout_s} s; free now: {cluster.free_resources()}",
                where="scaling",
                remedy="lower cpus_per_worker or gpus_per_worker, raise pending_timeout_s, or let the cluster grow",
            )
        task = ray.remote(num_cpus=scaling.cpus_per_worker, num_gpus=scaling.gpus_per_worker, max_retries=2)(function)
        return ray.get(task.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group)).remote(*args))
    except ray.exceptions.RayError as error:
        inner = unwrap(error)
        raise (inner if isinstance(inner, PrismError) else error) from None
    finally:
        remove_placement_group(group)


def _prepare(config: SweepConfig, folder: Path) -> dict[str, dict[str, Any]]:
    """Quantize and score the base of every format once; bad data, models and ranks end here, before any trial."""
    bases: dict[str, dict[str, Any]] = {}
    for name in config.space.format:
        print(f"preparing the {name} base of {config.train.model}", flush=True)
        bases[name] = _remote(
            remote.prepare_format,
            config,
            config.train.with_overrides({"format": name}).to_dict(),
            max(config.space.rank),
            config.scaling.gpus_per_worker > 0,
        )
    for note in next(iter(bases.values()))["notes"]:
        print(note, flush=True)
    parameters = max(entry["parameters_per_rank"] for entry in bases.values()) * max(config.space.rank)
    needed = parameters * 4 * CHECKPOINT_COPIES * (config.keep_checkpoints + 1) * config.trials
    if config.merge_best:
        needed += max(entry["bytes"] for entry in bases.values())
    require_disk(folder, int(needed * 1.1), f"checkpoints of {config.trials} trials")
    return bases


def _tune(config: SweepConfig, folder: Path, slots: int, resume: bool, log: ProgressLog) -> ray.tune.ResultGrid:
    evaluations = -(-config.train.steps // config.train.eval_every)
    # Steps between evaluations report no metric; ASHA ignores those results, the check would refuse them.
    os.environ["TUNE_DISABLE_STRICT_METRIC_CHECKING"] = "1"
    # The result boxes of Tune's newer output ignore verbose=0 and flood a job log; `ProgressLog` prints a line instead.
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    trainable = ray.tune.with_resources(ray.tune.with_parameters(run_trial, sweep=config.to_dict()), {"CPU": TRIAL_CPUS})
    experiment = folder / "tune"
    if resume and (experiment / "tuner.pkl").is_file():
        tuner = ray.tune.Tuner.restore(str(experiment), trainable, resume_unfinished=True, resume_errored=True)
        tuner._local_tuner._run_config.callbacks = [log]  # type: ignore[union-attr]
        return tuner.fit()
    scheduler: Any = FIFOScheduler()
    if config.asha.enabled and evaluations > config.asha.grace_evals:
        scheduler = AsyncHyperBandScheduler(
            time_attr=RUNG, max_t=evaluations + 2, grace_period=config.asha.grace_evals, reduction_factor=config.asha.reduction_factor
        )
    tuner = ray.tune.Tuner(
        trainable,
        param_space={"point": ray.tune.grid_search(config.points())},
        tune_config=ray.tune.TuneConfig(
            metric=METRIC,
            mode="max",
            scheduler=scheduler,
            max_concurrent_trials=slots,
            trial_dirname_creator=_trial_name,
            trial_name_creator=_trial_name,
        ),
        run_config=ray.tune.RunConfig(name="tune", storage_path=str(folder), callbacks=[log], verbose=0),
    )
    return tuner.fit()


def _trial_name(trial: Any) -> str:
    point = trial.config["point"]
    return f"{trial.trial_id}-{point['format']}-r{point['rank']}-l{point['strength']:g}-lr{point['learning_rate']:g}"


def collect(config: SweepConfig, results: ray.tune.ResultGrid, bases: dict[str, dict[str, Any]]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(trials, history): every trial with state and reason, and its curves."""
    rows: list[dict[str, Any]] = []
    curves: list[pd.DataFrame] = []
    for result in (results[index] for index in range(len(results))):
        metrics = result.metrics or {}
        point = (result.config or metrics.get("config") or {})["point"]
        trial_id = str(metrics.get("trial_id") or Path(result.path).name.split("-")[0])
        state, reason = judge(metrics, result.error)
        base = bases[point["format"]]["metrics"]
        numbers = {name: float(metrics.get(name, math.nan)) for name in NUMBERS}
        checkpoint = metrics.get("checkpoint_path")
        rows.append(
            {
                "trial_id": trial_id,
                "state": state,
                "reason": reason,
                "format": point["format"],
                "rank": int(point["rank"]),
                "lambda_": float(point["strength"]),
                "penalty": config.train.regularizer.kind,
                "learning_rate": float(point["learning_rate"]),
                "steps": int(metrics.get("step", 0)),
                "best_step": int(metrics.get("best_step", -1)),
                "resumes": int(metrics.get("resumes", 0)),
                "workers": config.scaling.workers,
                "code_bytes_per_worker": int(metrics.get("code_bytes_per_worker", 0)),
                "trainable_parameters": int(metrics.get("trainable_parameters", 0)),
                **numbers,
                "base_test_accuracy": float(base.get("test_accuracy", math.nan)),
                "one_minus_omega": float(metrics.get("benchmark_one_minus_omega", math.nan)),
                "delta_rho": float(metrics.get("benchmark_delta_rho", math.nan)),
                "adapter_path": str(Path(checkpoint) / ADAPTER_FOLDER) if state == "good" and checkpoint else "",
            }
        )
        if result.metrics_dataframe is not None and "loss" in result.metrics_dataframe:
            frame = result.metrics_dataframe
            frame = frame[frame["loss"].notna()].drop_duplicates("step", keep="last").sort_values("step")
            curve = pd.DataFrame({"trial_id": trial_id, "step": frame["step"].astype(int)})
            for target, source in CURVES.items():
                curve[target] = frame[source].astype(float) if source in frame else math.nan
            curves.append(curve)
    empty = pd.DataFrame({name: pd.Series(dtype=float) for name in ("trial_id", "step", *CURVES)})
    return pd.DataFrame(rows), pd.concat(curves, ignore_index=True) if curves else empty


NUMBERS = (
    "train_seconds", "tokens_per_second", "validation_accuracy", "validation_n", "validation_loss", "test_accuracy", "test_n", "test_loss", "benchmark_ce_base",
    "benchmark_ce", "delta_ce", "delta_ce_se", "benchmark_tokens", "benchmark_examples", "one_minus_omega_null", "rho_base", "rho", "scale_term", "shape_term",
)  # fmt: skip
CURVES = {
    "loss": "loss",
    "task_loss": "task_loss",
    "penalty_value": "penalty",
    "omega": "omega",
    "delta_rho": "delta_rho",
    "learning_rate": "learning_rate",
    "tokens_per_second": "tokens_per_second",
    "validation_accuracy": "validation_accuracy",
    "validation_loss": "validation_loss",
}


def judge(metrics: dict[str, Any], error: BaseException | None) -> tuple[str, str]:
    """(state, reason) of a trial from its last metrics and its error; see reports.sweep for the states."""
    if error is not None:
        inner = unwrap(error)
        text = (str(inner).strip() or type(inner).__name__).splitlines()
        reason = f"{type(inner).__name__}: {text[0]}" if not isinstance(inner, PrismError) else text[0]
        if any(name in str(error) or name == type(inner).__name__ for name in KILLED):
            return "killed", reason
        return "error", reason
    if metrics.get(USER_ERROR):
        return "error", str(metrics[USER_ERROR])
    if metrics.get("diverged"):
        return "diverged", f"loss became NaN or infinite at step {int(metrics.get('step', 0))}"
    if metrics.get(FINAL):
        return ("good", "") if math.isfinite(float(metrics.get(METRIC, math.nan))) else ("diverged", "validation metric is not finite")
    if METRIC in metrics or "loss" in metrics:
        return "stopped_early", f"stopped by the scheduler after step {int(metrics.get('step', 0))}"
    return "never_reported", "ended without reporting a metric"


def _ship(config: SweepConfig, best: pd.Series, bases: dict[str, dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Copy the best adapter, merge it and measure the merge."""
    adapter = folder / "best" / "adapter"
    with atomic_folder(adapter, replace=True) as temporary:
        shutil.copytree(best["adapter_path"], temporary, dirs_exist_ok=True)
    out: dict[str, Any] = {
        "test_accuracy": float(best["test_accuracy"]),
        "test_n": float(best["test_n"]),
        "base_test_accuracy": float(best["base_test_accuracy"]),
        "adapter_path": str(adapter),
    }
    if config.merge_best:
        point = {
            "format": best["format"],
            "rank": int(best["rank"]),
            "learning_rate": float(best["learning_rate"]),
            "strength": float(best["lambda_"]),
        }
        merged = folder / "best" / "merged"
        measured = _remote(
            remote.ship_merge,
            config,
            config.trial_config(point).to_dict(),
            bases[best["format"]]["folder"],
            str(adapter),
            str(merged),
            config.scaling.gpus_per_worker > 0,
        )
        out |= measured | {"merged_path": str(merged), "merged_accuracy": measured.get("merged_test_accuracy", math.nan)}
        print(
            f"merged: max|dW| = {measured['max_abs_dw']}, {measured['changed_scale_bytes']} of {measured['scale_bytes']} scale bytes changed",
            flush=True,
        )
    return out


def _states(trials: pd.DataFrame) -> str:
    shown = trials[
        [
            "trial_id",
            "format",
            "rank",
            "lambda_",
            "learning_rate",
            "state",
            "steps",
            "validation_accuracy",
            "test_accuracy",
            "delta_ce",
            "reason",
        ]
    ]
    return shown.to_string(index=False, max_colwidth=80, float_format=lambda value: f"{value:.4g}")
