"""The loop: what a step computes, that it repeats and resumes to the byte, stops, keeps the best, and says when it diverged.

Tolerance of float32 sums in another order: a running error bound, n u with u = 2^-24 and n = 8 * 128 roundings (one layer: seven products one after the
other and the head, each summing at most 128 terms) plus the tokens of the batch, relative to the largest number of the kind.
"""

from __future__ import annotations

import dataclasses
import math
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import get_peft_model

from prism_ray.adapters.scale_qlora import ScaleQLoraConfig
from prism_ray.calibrate.quantize import quantize_model
from prism_ray.core.errors import ConfigError
from prism_ray.formats.policy import QuantPolicy
from prism_ray.models.tiny import tiny_llama
from prism_ray.training.backends import VALUE, LocalBackend
from prism_ray.training.checkpoint import KIND
from prism_ray.training.config import OptimizerConfig, RegularizerConfig, TrainConfig
from prism_ray.training.data import Encoded, collate
from prism_ray.training.dataset import RunData
from prism_ray.training.loop import Trainer, TrainResult, learning_rate
from prism_ray.training.objective import Objective
from prism_ray.training.task import TaskConfig

ROUNDING = (8 * 128 + 100) * 2.0**-24
PAD, LABELS = 286, (100, 120, 140)
TASK = TaskConfig(name="t", train="unused.jsonl", prompt="{t}", answer="a")


def sequences(count: int, seed: int) -> list[tuple[list[int], int]]:
    """(prompt, class): ragged prompts whose first token tells the class."""
    generator = random.Random(seed)
    return [
        ([10 + index % 3, *(generator.randrange(20, 90) for _ in range(generator.randrange(2, 7)))], index % 3) for index in range(count)
    ]


def data(labels: bool = True) -> RunData:
    # Answers of 2 to 5 tokens: a mean of means over sequences or batches is another number than the mean over tokens.
    train = [
        Encoded([*prompt, LABELS[kind], *range(260, 260 + i % 4), 5], len(prompt), f"t{i}")
        for i, (prompt, kind) in enumerate(sequences(24, 0))
    ]
    held = sequences(9, 1)
    validation = [Encoded([*prompt, LABELS[kind], 5], len(prompt), f"v{i}") for i, (prompt, kind) in enumerate(held)]
    groups = [[Encoded([*prompt, token], len(prompt), "v") for token in LABELS] for prompt, _ in held]
    reference = [Encoded([random.Random(i).randrange(150, 250) for _ in range(6 + i)], 0, f"r{i}") for i in range(4)]
    return RunData(
        train=train,
        validation=validation,
        validation_groups=groups if labels else [],
        validation_labels=[kind for _, kind in held] if labels else [],
        test=[],
        test_groups=[],
        test_labels=[],
        benchmark=[],
        reference=reference,
        labels=("a", "b", "c") if labels else (),
        pad_id=PAD,
        notes=(),
    )


def settings(**options: Any) -> TrainConfig:
    optimizer = {"learning_rate": 0.05, "warmup_steps": 0, "schedule": "constant"} | options.pop("optimizer", {})
    regularizer = {"batch": None, "observe_every": 1} | options.pop("regularizer", {})
    defaults: dict[str, Any] = {
        "steps": 4,
        "batch_size": 8,
        "micro_batch_size": 8,
        "eval_every": 100,
        "dtype": "float32",
        "selection": "accuracy",
    }
    return TrainConfig(
        task=TASK, optimizer=OptimizerConfig(**optimizer), regularizer=RegularizerConfig(**regularizer), **(defaults | options)
    )


def fresh(config: TrainConfig, seed: int = 0) -> LocalBackend:
    model = tiny_llama(num_layers=1)
    quantize_model(model, QuantPolicy())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft_model = get_peft_model(model, ScaleQLoraConfig(r=2, alpha=4.0, task_type="CAUSAL_LM"))
    return LocalBackend(Objective(peft_model, torch.float32), config.optimizer)


class Recorder:
    """A report callback that keeps the metrics, and copies of the checkpoints."""

    def __init__(self, keep: Path | None = None):
        self.keep, self.rows, self.checkpoints = keep, [], {}

    def __call__(self, metrics: dict[str, Any], folder: Path | None) -> None:
        self.rows.append(dict(metrics))
        if folder is not None and self.keep is not None:
            step = int(metrics["step"])
            self.checkpoints[step] = Path(shutil.copytree(folder, self.keep / str(step)))


def run(config: TrainConfig, *, seed: int = 0, report: Recorder | None = None, **options: Any) -> tuple[TrainResult, LocalBackend]:
    backend = fresh(config, seed)
    return Trainer(config, backend, data(options.pop("labels", True)), report=report, quiet=True, **options).run(), backend


def moved(backend: LocalBackend, seed: int = 7, size: float = 0.3) -> None:
    """Give B values, so that the adapter is off the base and A has a gradient."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in backend.parameters.items():
            if "qast_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)


class Frozen(LocalBackend):
    """Keeps the gradients of a step instead of taking it."""

    def step(self, learning_rate: float) -> float:
        self.grads = {name: parameter.grad.clone() for name, parameter in self.parameters.items()}
        self.optimizer.zero_grad(set_to_none=True)
        return 0.0


def gradients(config: TrainConfig) -> tuple[dict[str, float], dict[str, torch.Tensor], Frozen]:
    local = fresh(config)
    moved(local)
    backend = Frozen(local.objective, config.optimizer)
    trainer = Trainer(config, backend, data(), quiet=True)
    trainer._cache_base_features()
    return trainer._step(0), backend.grads, backend


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], rounding: float = ROUNDING) -> None:
    largest = max(float(value.abs().max()) for value in wanted.values())
    assert largest > 1e-3
    for name, value in wanted.items():
        assert (found[name] - value).abs().max() <= rounding * largest, name


# --- one step --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shape", "replay"])
@pytest.mark.parametrize("micro", [1, 2, 4, 8])
def test_a_step_is_the_same_however_it_is_cut(micro, kind):
    whole_values, whole, _ = gradients(settings(regularizer={"kind": kind, "strength": 0.5}))
    values, grads, _ = gradients(settings(regularizer={"kind": kind, "strength": 0.5}, micro_batch_size=micro))
    close(grads, whole)
    for key in ("loss", "task_loss", "penalty"):
        assert values[key] == pytest.approx(whole_values[key], rel=ROUNDING, abs=0 if key != "penalty" else ROUNDING), key
    assert values["tokens"] == whole_values["tokens"]


@pytest.mark.parametrize("kind", ["shape", "replay"])
def test_loss_and_gradient_against_the_formula(kind):
    """L = sum CE / tokens + strength * (1 - Omega) or the mean CE of the reference set, by autograd over the formula itself, an example a call."""
    config = settings(regularizer={"kind": kind, "strength": 0.5}, micro_batch_size=4)
    values, grads, backend = gradients(config)
    objective, items = backend.objective, data()
    chosen = Trainer(config, backend, items, quiet=True).sampler.indices(0)
    ce = torch.cat([objective("features", collate([items.train[index]], PAD))[1] for index in chosen])
    reference = [objective("features", collate([item], PAD)) for item in items.reference]
    with torch.no_grad(), objective.model.disable_adapter():
        base = torch.cat([objective("hidden", collate([item], PAD)) for item in items.reference])
    now = torch.cat([part[0] for part in reference])
    shape = 1 - (base * now).sum() / (base.norm() * now.norm())
    replay = torch.cat([part[1] for part in reference]).mean()
    wanted = ce.mean() + 0.5 * (shape if kind == "shape" else replay)
    counts = [items.train[index].answer_tokens for index in chosen]
    assert len(ce) == sum(counts) and len(set(counts)) > 1
    assert values["task_loss"] == pytest.approx(float(ce.mean().detach()), rel=ROUNDING)
    assert values["one_minus_omega"] == pytest.approx(float(shape.detach()), abs=ROUNDING)
    assert float(shape.detach()) > 1e-3, "the adapter must be off the base"
    assert values["penalty"] == pytest.approx(float((shape if kind == "shape" else replay).detach()), rel=ROUNDING, abs=ROUNDING)
    assert values["loss"] == pytest.approx(float(wanted.detach()), rel=2 * ROUNDING)
    parts = torch.autograd.grad(wanted, list(backend.parameters.values()))
    close(grads, dict(zip(backend.parameters, parts, strict=True)))


def test_without_strength_the_drift_is_only_observed():
    plain, alone, _ = gradients(settings(regularizer={"observe_every": 0}))
    observed, grads, _ = gradients(settings(regularizer={"observe_every": 1}))
    assert all(torch.equal(grads[name], alone[name]) for name in alone)
    assert math.isnan(plain["one_minus_omega"]) and observed["one_minus_omega"] > 1e-3
    assert observed["loss"] == observed["task_loss"] == plain["loss"]


def test_learning_rate_by_hand():
    config = settings(steps=7, optimizer={"learning_rate": 0.4, "warmup_steps": 3, "schedule": "cosine"})
    # Warm-up quarters; then 0.4 (0.1 + 0.45 (1 + cos(pi k / 4))), k = 0 .. 3.
    wanted = [0.1, 0.2, 0.3, 0.4, 0.4 * (0.1 + 0.45 * (1 + math.sqrt(0.5))), 0.22, 0.4 * (0.1 + 0.45 * (1 - math.sqrt(0.5)))]
    assert [learning_rate(config, step) for step in range(7)] == pytest.approx(wanted, rel=1e-12)
    constant = config.with_overrides({"optimizer.schedule": "constant"})
    assert [learning_rate(constant, step) for step in range(7)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4, 0.4])
    assert learning_rate(settings(steps=1), 0) == 0.05


def test_the_first_update_by_hand():
    """AdamW after clipping: B - lr g / (|g| + 1e-8), g scaled to the norm limit; A - lr * 0, since B = 0 gives A no gradient."""
    config = settings(steps=1, optimizer={"learning_rate": 0.25, "max_grad_norm": 0.1})
    backend = fresh(config)
    before = {name: parameter.detach().clone() for name, parameter in backend.parameters.items()}
    frozen = Frozen(backend.objective, config.optimizer)
    trainer = Trainer(config, frozen, data(), quiet=True)
    trainer._cache_base_features()
    trainer._step(0)
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in frozen.grads.values()))
    assert norm > 0.1
    result = Trainer(config, backend, data(), quiet=True).run()
    assert result.last["grad_norm"] == pytest.approx(norm, rel=ROUNDING)
    for name, parameter in backend.parameters.items():
        grad = frozen.grads[name].double() * 0.1 / norm
        wanted = before[name].double() - 0.25 * grad / (grad.abs() + 1e-8)
        # d/dg of g / (|g| + e) is at most 1 / e: a relative rounding of 8 u in g moves the update by at most lr * 8 u.
        assert (parameter.detach() - wanted).abs().max() <= 0.25 * 16 * 2.0**-24 + 1e-7


@pytest.mark.parametrize(("world", "micro"), [(3, 2), (2, 8)])
def test_a_batch_that_the_workers_cannot_share_is_refused(world, micro):
    config = settings(micro_batch_size=micro)
    with pytest.raises(ConfigError, match="does not divide into"):
        Trainer(config, SimpleNamespace(rank=0, world=world), data(), quiet=True)
    with pytest.raises(ConfigError, match="multiple of micro_batch_size"):
        settings(micro_batch_size=3)


# --- whole runs --------------------------------------------------------------------------------------------------------------------


def test_training_learns_and_the_penalty_keeps_the_base():
    """Same seed, same batches; the only difference is the strength. Both effects are far above rounding: the factors asked for are 2 and more."""
    free, backend = run(settings(steps=24))
    held, _ = run(settings(steps=24, regularizer={"strength": 3.0}))
    replayed, _ = run(settings(steps=24, regularizer={"strength": 3.0, "kind": "replay"}))
    recorder = Recorder()
    run(settings(steps=1), report=recorder)
    start = recorder.rows[0]["task_loss"]
    assert free.last["task_loss"] < 0.5 * start
    assert free.last["one_minus_omega"] > 1e-3
    assert held.last["one_minus_omega"] < 0.5 * free.last["one_minus_omega"]
    assert held.last["task_loss"] < start
    assert held.last["loss"] == pytest.approx(held.last["task_loss"] + 3.0 * held.last["one_minus_omega"], rel=1e-12)
    # Replay lowers the loss on the reference text itself, which the shape penalty does not ask for.
    items, objective = data().reference, backend.objective
    with torch.no_grad(), objective.model.disable_adapter():
        base_ce = float(torch.cat([objective("features", collate([item], PAD))[1] for item in items]).mean())
    assert replayed.last["penalty"] < 0.9 * base_ce
    assert not any(result.diverged for result in (free, held, replayed))


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def values(backend: LocalBackend) -> dict[str, torch.Tensor]:
    return {f"{name} {key}": value for name, entry in backend.export_state().items() for key, value in entry.items()}


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    clean = [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in rows]
    return [{key: None if isinstance(value, float) and math.isnan(value) else value for key, value in row.items()} for row in clean]


RESUME = {"regularizer": {"strength": 0.5, "batch": 2}, "steps": 8, "eval_every": 3, "optimizer": {"schedule": "cosine", "warmup_steps": 2}}


def test_two_runs_are_byte_equal():
    first, second = Recorder(), Recorder()
    one, backend_one = run(settings(**RESUME), report=first)
    two, backend_two = run(settings(**RESUME), report=second)
    assert same(one.best, two.best) and same(values(backend_one), values(backend_two))
    assert timeless(first.rows) == timeless(second.rows)
    other, _ = run(settings(**RESUME, seed=1))
    assert not same(one.best, other.best)


@pytest.mark.parametrize("at", [3, 6])
def test_a_resumed_run_is_byte_equal_to_an_undisturbed_one(tmp_path, at):
    """The resumed process starts from another initial adapter: everything must come from the checkpoint."""
    whole, rest = Recorder(tmp_path), Recorder()
    result, backend = run(settings(**RESUME), report=whole)
    assert sorted(whole.checkpoints) == [3, 6, 8]
    resumed, again = run(settings(**RESUME), seed=99, report=rest, resume=whole.checkpoints[at])
    assert same(resumed.best, result.best) and same(values(again), values(backend))
    assert [row["step"] for row in rest.rows] == list(range(at + 1, 9))
    assert timeless(rest.rows) == timeless(whole.rows[at:])
    assert resumed.progress.resumed_at == [at] and result.progress.resumed_at == []
    assert timeless(resumed.progress.history) == timeless(result.progress.history)
    for name in ("step", "best_step", "best_metric", "best_loss", "stale", "tokens"):
        assert getattr(resumed.progress, name) == getattr(result.progress, name), name


def test_a_resumed_run_remembers_the_best_and_its_patience(monkeypatch, tmp_path):
    """The best stands at step 1; two worse evaluations lie on either side of the interruption, and the third ends the run."""
    accuracies, losses = [0.9, 0.5, 0.5, 0.5, 0.95], [1.0] * 5
    options = {"steps": 5, "eval_every": 1, "patience": 3}
    scripted(monkeypatch, accuracies, losses)
    recorder = Recorder(tmp_path)
    whole, _ = run(settings(**options), report=recorder)
    assert (whole.progress.step, whole.progress.best_step) == (4, 1)
    scripted(monkeypatch, accuracies[2:], losses[2:])
    resumed, _ = run(settings(**options), seed=99, resume=recorder.checkpoints[2])
    assert (resumed.progress.step, resumed.progress.best_step, resumed.progress.best_metric, resumed.progress.stale) == (4, 1, 0.9, 3)
    assert same(resumed.best, whole.best)


def test_a_run_resumed_at_its_end_has_nothing_to_do(tmp_path):
    whole, rest = Recorder(tmp_path), Recorder()
    result, _ = run(settings(**RESUME), report=whole)
    again, _ = run(settings(**RESUME), report=rest, resume=whole.checkpoints[8])
    assert rest.rows == [] and not again.diverged and same(again.best, result.best)


def test_the_report_sees_every_step_and_every_evaluation(tmp_path):
    recorder = Recorder(tmp_path)
    run(settings(steps=7, eval_every=3), report=recorder)
    assert [row["step"] for row in recorder.rows] == list(range(1, 8))
    wanted = {"loss", "task_loss", "penalty", "omega", "one_minus_omega", "delta_rho", "tokens_per_second", "learning_rate", "grad_norm"}
    assert all(wanted <= row.keys() for row in recorder.rows)
    assert [row["step"] for row in recorder.rows if "validation_loss" in row] == [3, 6, 7] == sorted(recorder.checkpoints)
    sparse = Recorder()
    run(settings(steps=7, eval_every=3, report_every=2), report=sparse)
    assert [row["step"] for row in sparse.rows] == [2, 3, 4, 6, 7]


def test_a_checkpoint_is_complete_when_it_is_reported_and_gone_afterwards():
    from prism_ray.core.manifest import read_manifest

    seen: list[Path] = []

    def report(metrics: dict[str, Any], folder: Path | None) -> None:
        if folder is not None:
            assert read_manifest(folder, KIND)["step"] == metrics["step"]
            seen.append(folder)

    run(settings(steps=2, eval_every=1), report=report)
    assert len(seen) == 2 and not any(folder.exists() for folder in seen)


def scripted(monkeypatch, accuracies: list[float], losses: list[float]) -> None:
    rows = iter(zip(accuracies, losses, strict=True))

    def validate(self: Trainer) -> dict[str, float]:
        accuracy, loss = next(rows)
        return {"validation_accuracy": accuracy, "validation_n": 9.0, "validation_loss": loss}

    monkeypatch.setattr(Trainer, "validate", validate)


@pytest.mark.parametrize(
    ("accuracies", "losses", "best", "steps"),
    [
        ([0.5, 0.8, 0.7, 0.6, 0.9], [1.0, 1.0, 1.0, 1.0, 1.0], 2, 4),  # two evaluations without a better one
        ([0.5, 0.5, 0.5, 0.5, 0.5], [1.0, 0.9, 0.95, 0.9, 0.1], 2, 4),  # ties go by loss; an equal loss is no improvement
        ([0.1, 0.2, 0.3, 0.4, 0.5], [1.0, 2.0, 3.0, 4.0, 5.0], 5, 5),  # accuracy decides before the loss
    ],
)
def test_early_stopping_keeps_the_best(monkeypatch, tmp_path, accuracies, losses, best, steps):
    scripted(monkeypatch, accuracies, losses)
    recorder = Recorder(tmp_path)
    result, backend = run(settings(steps=5, eval_every=1, patience=2), report=recorder)
    assert (result.progress.step, result.progress.best_step) == (steps, best)
    assert result.progress.best_metric == accuracies[best - 1]
    from prism_ray.training.checkpoint import load_checkpoint

    state, kept, _ = load_checkpoint(recorder.checkpoints[best])
    assert same(result.best, {name: entry[VALUE] for name, entry in state.items()}) and same(result.best, kept or {})
    if best < steps:
        assert not same(result.best, {name: entry[VALUE] for name, entry in backend.export_state().items()})


def test_selection_by_loss_keeps_another_step_than_by_accuracy(monkeypatch):
    for selection, best, metric in (("accuracy", 2, 0.8), ("loss", 3, -0.5)):
        scripted(monkeypatch, [0.5, 0.8, 0.7], [1.0, 2.0, 0.5])
        result, _ = run(settings(steps=3, eval_every=1, selection=selection))
        assert (result.progress.best_step, result.progress.best_metric) == (best, metric)


def test_without_patience_nothing_stops(monkeypatch):
    scripted(monkeypatch, [0.9, 0.1, 0.1, 0.1], [1.0] * 4)
    result, _ = run(settings(steps=4, eval_every=1))
    assert (result.progress.step, result.progress.best_step, result.progress.stale) == (4, 1, 3)


def test_a_task_without_labels_goes_by_its_loss():
    recorder = Recorder()
    result, backend = run(settings(steps=6, eval_every=2), report=recorder, labels=False)
    rows = [row for row in recorder.rows if "validation_loss" in row]
    assert all(math.isnan(row["validation_accuracy"]) and row["validation_n"] == 9 for row in rows)
    best = min(rows, key=lambda row: row["validation_loss"])
    assert result.progress.best_step == best["step"] and result.progress.best_metric == -best["validation_loss"]
    if best["step"] == 6:
        with torch.no_grad():
            ce = torch.cat([backend.objective("features", collate([item], PAD))[1] for item in data().validation])
        assert best["validation_loss"] == pytest.approx(float(ce.mean()), rel=ROUNDING)


def test_no_reference_set_is_fine():
    result = Trainer(settings(), fresh(settings()), dataclasses.replace(data(), reference=[]), quiet=True).run()
    assert result.progress.step == 4 and math.isnan(result.last["one_minus_omega"])


# --- divergence --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eval_every", [1, 100])
def test_an_absurd_learning_rate_is_reported_as_diverged(eval_every):
    """Each step multiplies the factors by 1 - lr * decay = -1e38: they overflow in the second. A rate alone does not do it, the scale clamp holds.

    With an evaluation after every step the factors are infinite before a loss shows it.
    """
    recorder = Recorder()
    config = settings(steps=30, eval_every=eval_every, optimizer={"learning_rate": 1e20, "weight_decay": 1e18, "max_grad_norm": 0.0})
    result, _ = run(config, report=recorder)
    assert result.diverged and result.progress.step < 30
    assert recorder.rows[-1]["diverged"] == 1.0 and not any("diverged" in row for row in recorder.rows[:-1])
    assert all(bool(torch.isfinite(value).all()) for value in result.best.values())
    assert result.progress.best_metric is None or math.isfinite(result.progress.best_metric)


def test_a_validation_that_is_not_finite_never_becomes_the_best(monkeypatch):
    """argmax over NaN scores still picks a label, so the accuracy alone looks like a number."""
    scripted(monkeypatch, [0.4, 0.9], [1.0, math.nan])
    result, _ = run(settings(steps=4, eval_every=1))
    assert result.diverged and result.progress.step == 2
    assert (result.progress.best_step, result.progress.best_metric) == (1, 0.4)


def test_a_loss_of_nan_ends_the_run(monkeypatch):
    backend = fresh(settings())
    original = backend.run

    def poisoned(mode: str, batch: Any) -> Any:
        found = original(mode, batch)
        return (found[0], found[1] * math.nan) if mode == "features" else found

    monkeypatch.setattr(backend, "run", poisoned)
    result = Trainer(settings(), backend, data(), quiet=True).run()
    assert result.diverged and result.progress.step == 1 and result.best == {}
