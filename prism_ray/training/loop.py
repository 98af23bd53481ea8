"""The one training loop: answer cross-entropy, optional shape or replay regularizer, validation early stopping, resume.

    L = CE(task) + strength * (1 - Omega(Z_0^ref, Z_t^ref))        kind = shape    (prism-risk-bound §3.5, eq. 8)
    L = CE(task) + strength * CE(reference)                        kind = replay   (its baseline)

Every mean is over the whole optimizer step: the cross-entropy of a step is its summed loss over the answer tokens of all micro batches and all
workers, divided by their number, however they are cut (field case CAL-06's mean of means cannot occur). The order of examples is a function of the
step, so a resumed run sees the batches that an undisturbed one would have seen, with any number of workers.

The adapter of the best validation metric (`TrainConfig.selection`) is the result; ties go to the lower loss, then to the earlier step.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from prism_ray.core.errors import ConfigError
from prism_ray.core.progress import Progress as ProgressLine
from prism_ray.risk.shape import delta_rho, omega, shape_penalty
from prism_ray.training.backends import VALUE, Backend, State
from prism_ray.training.checkpoint import Progress, load_checkpoint, save_checkpoint
from prism_ray.training.config import TrainConfig
from prism_ray.training.data import Batch, StepSampler, batches_by_length, collate, shard
from prism_ray.training.dataset import RunData
from prism_ray.training.evaluate import Accuracy, answer_loss, label_accuracy

Report = Callable[[dict[str, Any], Path | None], None]
"""Called on every rank after each step with its metrics and, on rank 0 after an evaluation, a complete checkpoint folder that is deleted when the call
returns."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """progress: steps, best step and history; best: parameter name -> value of the best adapter; diverged: the loss became NaN or infinite;
    last: metrics of the last step."""

    progress: Progress
    best: dict[str, torch.Tensor]
    diverged: bool
    last: dict[str, float]


class Trainer:
    """One run on one rank. `report` receives metrics and checkpoints; `resume` is a checkpoint folder."""

    def __init__(
        self,
        config: TrainConfig,
        backend: Backend,
        data: RunData,
        *,
        report: Report | None = None,
        resume: Path | None = None,
        quiet: bool = False,
    ):
        self.config, self.backend, self.data = config, backend, data
        self.report = report
        self.resume = resume
        if config.batch_size % (config.micro_batch_size * backend.world):
            raise ConfigError(
                f"batch_size {config.batch_size} does not divide into {backend.world} workers of micro batches of {config.micro_batch_size}",
                where="micro_batch_size",
                remedy=f"use a divisor of {config.batch_size // backend.world}",
            )
        self.sampler = StepSampler(len(data.train), config.batch_size, config.seed)
        regularizer = config.regularizer
        size = min(regularizer.batch or len(data.reference), len(data.reference)) if data.reference else 0
        self.reference_sampler = StepSampler(len(data.reference), size, config.seed + 1) if size else None
        self.base_features: list[torch.Tensor] = []
        self.line = None if quiet or backend.rank else ProgressLine("train", config.steps, every_s=20.0)

    def run(self) -> TrainResult:
        """Train to the end, or to early stopping, or to divergence."""
        progress = Progress()
        best: dict[str, torch.Tensor] = {}
        if self.resume is not None:
            state, found, progress = load_checkpoint(self.resume)
            self.backend.import_state(state, progress.step)
            best = found or {}
            progress.resumed_at.append(progress.step)
        self._cache_base_features()
        last: dict[str, float] = {}
        self.backend.objective.train()
        while progress.step < self.config.steps and not self._stopped(progress):
            started = time.monotonic()
            last = self._step(progress.step)
            progress.step += 1
            progress.seconds += time.monotonic() - started
            progress.tokens += int(last.pop("tokens"))
            last |= {"step": float(progress.step), "tokens_per_second": progress.tokens / progress.seconds}
            if not math.isfinite(last["loss"]):
                return self._diverged(progress, best, last)
            if self.line:
                self.line.update(
                    progress.step, loss=last["loss"], one_minus_omega=last["one_minus_omega"], tokens_per_second=last["tokens_per_second"]
                )
            if progress.step % self.config.eval_every == 0 or progress.step == self.config.steps:
                state = self.backend.export_state()
                # A NaN factor need not show in the loss: attention on a CPU has been seen to turn NaN queries into finite outputs.
                if not all(bool(torch.isfinite(entry[VALUE]).all()) for entry in state.values()):
                    return self._diverged(progress, best, last)
                measured = self.validate()
                # Nor in the accuracy: argmax over NaN scores still picks a label, and a run that once kept such a score would never find a better one.
                if not math.isfinite(measured["validation_loss"]):
                    return self._diverged(progress, best, last)
                best = self._keep(progress, best, last | measured, state)
            elif progress.step % self.config.report_every == 0:
                self._tell(last, None)
        return TrainResult(progress=progress, best=best, diverged=False, last=last)

    def _diverged(self, progress: Progress, best: dict[str, torch.Tensor], last: dict[str, float]) -> TrainResult:
        self._tell(last | {"diverged": 1.0}, None)
        return TrainResult(progress=progress, best=best, diverged=True, last=last)

    def _stopped(self, progress: Progress) -> bool:
        return bool(self.config.patience) and progress.stale >= self.config.patience

    def _step(self, step: int) -> dict[str, float]:
        """One optimizer update; returns loss, task_loss, penalty, one_minus_omega, omega, delta_rho, learning_rate, grad_norm, tokens."""
        config, backend = self.config, self.backend
        whole = self.sampler.indices(step)
        answer_tokens = sum(self.data.train[index].answer_tokens for index in whole)
        tokens = sum(len(self.data.train[index].input_ids) for index in whole)
        mine = shard(whole, backend.rank, backend.world)
        task = torch.zeros(1, dtype=torch.float64)
        penalty: dict[str, float] = {}
        for first in range(0, len(mine), config.micro_batch_size):
            batch = self._collate(mine[first : first + config.micro_batch_size])
            _, ce = backend.run("features", batch)
            loss = ce.sum() / answer_tokens
            task += loss.detach().double().cpu()
            if first == 0 and self.reference_sampler:
                extra, penalty = self._penalty(step)
                loss = loss if extra is None else loss + extra
            backend.backward(loss)
        rate = learning_rate(config, step)
        norm = backend.step(rate)
        task_loss = float(backend.all_reduce(task))
        shown = {"penalty": math.nan, "omega": math.nan, "one_minus_omega": math.nan, "delta_rho": math.nan} | penalty
        added = config.regularizer.strength * shown["penalty"] if config.regularizer.strength else 0.0
        return {
            "loss": task_loss + added,
            "task_loss": task_loss,
            **shown,
            "learning_rate": rate,
            "grad_norm": norm,
            "tokens": float(tokens),
        }

    def _penalty(self, step: int) -> tuple[torch.Tensor | None, dict[str, float]]:
        """(term to add to this worker's loss, values) of the reference batch of a step; without strength it is only observed, now and then."""
        regularizer, backend = self.config.regularizer, self.backend
        active = regularizer.strength > 0
        if not active and not (regularizer.observe_every and step % regularizer.observe_every == 0):
            return None, {}
        assert self.reference_sampler is not None
        whole = self.reference_sampler.indices(step)
        # A worker without a row of its own runs the first one and counts nothing: passes are collectives.
        mine = shard(whole, backend.rank, backend.world)
        batch = collate([self.data.reference[index] for index in mine or whole[:1]], self.data.pad_id)
        replayed = regularizer.kind == "replay"
        with torch.set_grad_enabled(active):
            hidden, ce = backend.run("features", batch) if replayed else (backend.run("hidden", batch), None)
            kept = hidden if mine else hidden[:0]
            base = torch.cat([self.base_features[index] for index in mine or whole[:1]])[: kept.shape[0]].to(hidden.device)
            surrogate, sums = shape_penalty(base, kept, backend.all_reduce)
            # Adding zero times the features keeps a worker without rows in the graph, hence in the collectives of its backward pass.
            term = surrogate + 0.0 * hidden.sum()
            if ce is not None:
                tokens = sum(self.data.reference[index].answer_tokens for index in whole)
                term = ce.sum() * ((1.0 if mine else 0.0) / tokens)
        values = {"omega": omega(sums), "one_minus_omega": 1.0 - omega(sums), "delta_rho": delta_rho(sums)}
        values["penalty"] = float(backend.all_reduce(term.detach().double().cpu().reshape(1))) if replayed else values["one_minus_omega"]
        return (regularizer.strength * term if active else None), values

    @torch.no_grad()
    def _cache_base_features(self) -> None:
        """Head inputs of the base (adapter off) on every reference sequence, once, on every rank."""
        if not self.reference_sampler:
            return
        model: Any = self.backend.objective.model
        self.backend.objective.eval()
        with model.disable_adapter():
            found: dict[int, torch.Tensor] = {}
            for indices in batches_by_length(self.data.reference, 16, self.config.eval_batch_tokens):
                batch = collate([self.data.reference[index] for index in indices], self.data.pad_id)
                hidden = self.backend.run("hidden", batch).float().cpu()
                found |= dict(zip(indices, hidden.split(batch.answer_mask.sum(dim=1).tolist()), strict=True))
            self.base_features = [found[index] for index in range(len(self.data.reference))]

    def _collate(self, indices: list[int]) -> Batch:
        return collate([self.data.train[index] for index in indices], self.data.pad_id)

    def validate(self) -> dict[str, float]:
        """Validation accuracy (tasks with labels) and loss, with n."""
        self.backend.objective.eval()
        data, config = self.data, self.config
        if data.labels:
            found: Accuracy = label_accuracy(
                self.backend,
                data.validation_groups,
                data.validation_labels,
                data.pad_id,
                max_tokens=config.eval_batch_tokens,
                packed=config.scoring == "packed",
            )
            out = {"validation_accuracy": found.value, "validation_n": float(found.n), "validation_loss": found.loss}
        else:
            loss, _ = answer_loss(self.backend, data.validation, data.pad_id, max_tokens=config.eval_batch_tokens)
            out = {"validation_accuracy": math.nan, "validation_n": float(len(data.validation)), "validation_loss": loss}
        self.backend.objective.train()
        return out

    def _keep(self, progress: Progress, best: dict[str, torch.Tensor], row: dict[str, float], state: State) -> dict[str, torch.Tensor]:
        """Enter an evaluated step into `progress`, checkpoint it, report it; returns the values of the best adapter so far."""
        metric = selection_metric(self.config, row)
        better = progress.best_metric is None or (metric, -row["validation_loss"]) > (
            progress.best_metric,
            -(progress.best_loss or 0.0),
        )
        if better:
            progress.best_metric, progress.best_loss, progress.best_step, progress.stale = (
                metric,
                row["validation_loss"],
                progress.step,
                0,
            )
            best = {name: entry[VALUE].clone() for name, entry in state.items()}
        else:
            progress.stale += 1
        progress.history.append({key: value for key, value in row.items() if math.isfinite(value)})
        with tempfile.TemporaryDirectory(prefix="prism-checkpoint-") as name:
            folder = None
            if self.backend.rank == 0:
                folder = Path(name)
                save_checkpoint(self.backend.objective.model, state, best, progress, folder)
            self._tell(row | {"best_metric": progress.best_metric or 0.0, "best_step": float(progress.best_step)}, folder)
        return best

    def _tell(self, metrics: dict[str, Any], folder: Path | None) -> None:
        if self.report is not None:
            self.report(metrics, folder)


def selection_metric(config: TrainConfig, measured: dict[str, float]) -> float:
    """The number whose highest value is best: accuracy where the run selects by it and the task has labels, else the negative validation loss."""
    accuracy = measured.get("validation_accuracy", math.nan)
    return accuracy if config.selection == "accuracy" and math.isfinite(accuracy) else -measured["validation_loss"]


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of a 0-based step: linear warm-up, then constant, or a cosine down to a tenth."""
    optimizer = config.optimizer
    if step < optimizer.warmup_steps:
        return optimizer.learning_rate * (step + 1) / (optimizer.warmup_steps + 1)
    if optimizer.schedule == "constant":
        return optimizer.learning_rate
    share = (step - optimizer.warmup_steps) / max(1, config.steps - optimizer.warmup_steps)
    return optimizer.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share)))
