"""From a TrainConfig to a finished, evaluated adapter folder; what a Ray Train worker and the command line both call."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model

from prism_ray.adapters.baselines.merge import BaselineMerge
from prism_ray.adapters.merge import MergeReport, write_scale_plane
from prism_ray.adapters.methods import (
    ADAPTER_METHODS,
    SCALE_QLORA,
    AdapterSettings,
    Budget,
    budget,
    load_adapter_model,
    matched,
    require_format,
    target_shapes,
)
from prism_ray.core.compute import compute_dtype
from prism_ray.core.digests import sha256_tensors
from prism_ray.core.errors import FingerprintMismatch
from prism_ray.core.files import atomic_folder
from prism_ray.core.manifest import write_manifest
from prism_ray.formats.checkpoint import load_quantized_model
from prism_ray.formats.modules import quantized_modules
from prism_ray.formats.spec import FORMATS
from prism_ray.models.load import load_tokenizer
from prism_ray.training.backends import VALUE, Backend, InferenceBackend, LocalBackend, State
from prism_ray.training.base import base_manifest, prepare_base
from prism_ray.training.checkpoint import save_adapter
from prism_ray.training.config import TrainConfig
from prism_ray.training.data import Batch, collate
from prism_ray.training.dataset import RunData, load_run_data
from prism_ray.training.evaluate import Accuracy, answer_loss, label_accuracy, measure_drift
from prism_ray.training.loop import Report, Trainer, TrainResult
from prism_ray.training.objective import Objective
from prism_ray.training.posthoc import merge_posthoc

ADAPTER = "default"
BASELINE_KIND = "baseline-adapter"
STAT_ROWS, STAT_BATCH = 128, 8
"""Training rows whose inputs a re-quantizing merge sees, and how many a batch."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What a run was built from: base folder, PEFT model, data and back end of this rank; budget: rank and parameter counts, where a run was built to train."""

    config: TrainConfig
    base: Path
    model: Any
    data: RunData
    backend: Backend
    budget: Budget | None = None


def build(config: TrainConfig, *, device: str = "cpu", make_backend: Callable[[Objective], Backend] | None = None) -> RunContext:
    """Load base, adapter and data, and make the back end. Every input is checked before the first step."""
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    dtype = compute_dtype(config.dtype, device)
    chosen = ADAPTER_METHODS[config.adapter.method]
    require_format(config.adapter.method, FORMATS[config.format])
    base = prepare_base(config.model, config.format)
    data = load_run_data(config, load_tokenizer(str(base)))
    model = load_quantized_model(base, dtype=dtype, device=device)
    manifest = base_manifest(base)
    settings = AdapterSettings(
        rank=config.adapter.rank,
        alpha=config.adapter.alpha,
        target_modules=config.adapter.target_modules,
        code_plane=manifest["code_plane"],
        scale_plane=manifest["scale_plane"],
        scale_rule=manifest.get("scale_rule"),
        experts=config.adapter.experts,
    )
    shapes = target_shapes(model, settings.target_modules)
    found = budget(config.adapter.method, shapes.values(), settings.rank, match=config.adapter.match_parameters)
    peft_model = get_peft_model(model, chosen.build(model, matched(settings, found)), adapter_name=ADAPTER)
    objective = Objective(peft_model, dtype)
    backend = make_backend(objective) if make_backend else LocalBackend(objective, config.optimizer)
    return RunContext(config=config, base=base, model=peft_model, data=data, backend=backend, budget=found)


def train(context: RunContext, *, report: Report | None = None, resume: Path | None = None, quiet: bool = False) -> TrainResult:
    """Run the loop of a built context. Raises FingerprintMismatch should training have changed a code byte."""
    _, before = code_shard(context.model)
    result = Trainer(context.config, context.backend, context.data, report=report, resume=resume, quiet=quiet).run()
    if code_shard(context.model)[1] != before:
        raise FingerprintMismatch("training changed the code plane", where=str(context.base), remedy="report this: codes are frozen")
    return result


def install(context: RunContext, values: dict[str, torch.Tensor]) -> None:
    """Put adapter values (by parameter name) into the model of every rank, through the back end."""
    zeros: State = {
        name: {VALUE: value, "exp_avg": torch.zeros_like(value), "exp_avg_sq": torch.zeros_like(value)} for name, value in values.items()
    }
    context.backend.import_state(zeros, 1)


def code_shard(model: Any) -> tuple[int, str]:
    """(bytes, SHA-256) of the codes that this worker holds: its partition under ZeRO-3, the whole code plane elsewhere."""
    held = {name: getattr(module.codes, "ds_tensor", module.codes).data for name, module in quantized_modules(model)}
    digest = sha256_tensors((name, tensor.reshape(-1).view(torch.uint8)) for name, tensor in held.items())
    return sum(tensor.numel() * tensor.element_size() for tensor in held.values()), digest


def final_metrics(context: RunContext) -> dict[str, float]:
    """Test metric with n, and drift on the held-out benchmark with its null, of the adapter that the model holds. A collective."""
    context.backend.objective.eval()
    out = task_metrics(context, "test")
    if context.data.benchmark:
        drift = measure_drift(context.backend, context.data.benchmark, context.data.pad_id, max_tokens=context.config.eval_batch_tokens)
        moments = drift.moments
        out |= {
            "benchmark_ce_base": moments.ce_target / moments.tokens,
            "benchmark_ce": moments.ce_proxy / moments.tokens,
            "delta_ce": moments.delta_ce,
            "delta_ce_se": moments.delta_ce_se,
            "benchmark_tokens": float(moments.tokens),
            "benchmark_examples": float(moments.examples),
            "benchmark_one_minus_omega": moments.one_minus_omega,
            "one_minus_omega_null": drift.null.one_minus_omega,
            "rho_base": moments.rho_target,
            "rho": moments.rho_proxy,
            "benchmark_delta_rho": moments.rho_proxy - moments.rho_target,
            "scale_term": moments.scale_term,
            "shape_term": moments.shape_term,
        }
    return out


def task_metrics(context: RunContext, split: str) -> dict[str, float]:
    """{split}_accuracy, {split}_correct, {split}_n, {split}_loss of the model as it is (adapter on, off or merged)."""
    data, config = context.data, context.config
    if data.labels:
        groups, labels = getattr(data, f"{split}_groups"), getattr(data, f"{split}_labels")
        if not groups:
            return {}
        packed = config.scoring == "packed"
        found: Accuracy = label_accuracy(context.backend, groups, labels, data.pad_id, max_tokens=config.eval_batch_tokens, packed=packed)
        return {
            f"{split}_accuracy": found.value,
            f"{split}_correct": float(found.correct),
            f"{split}_n": float(found.n),
            f"{split}_loss": found.loss,
        }
    items = getattr(data, split)
    if not items:
        return {}
    loss, _ = answer_loss(context.backend, items, data.pad_id, max_tokens=config.eval_batch_tokens)
    return {f"{split}_accuracy": math.nan, f"{split}_n": float(len(items)), f"{split}_loss": loss}


def write_adapter(context: RunContext, result: TrainResult, folder: Path, metrics: dict[str, float], *, replace: bool = True) -> None:
    """Write the best adapter with its scale plane (of methods that have one), metrics and manifest; rank 0 only."""
    with atomic_folder(folder, replace=replace) as temporary:
        save_adapter(context.model, result.best, temporary)
        (temporary / "train_config.json").write_text(json.dumps(context.config.to_dict(), indent=2, sort_keys=True) + "\n")
        finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
        fields: dict[str, Any] = {"metrics": finite, "progress": asdict(result.progress), "base": str(context.base)}
        if ADAPTER_METHODS[context.config.adapter.method].scale_plane:
            write_scale_plane(context.model, temporary, adapter=ADAPTER, **fields)
            return
        manifest = base_manifest(context.base)
        identity = {"method": context.config.adapter.method, "format": context.config.format}
        if context.budget is not None:
            identity |= asdict(context.budget)
        planes = {f"base_{name}": manifest[name] for name in ("code_plane", "scale_plane")}
        write_manifest(temporary, BASELINE_KIND, **identity, **planes, **fields)


def parameter_counts(context: RunContext) -> dict[str, float]:
    """trainable_parameters, scale_qlora_parameters and adapter_rank of a run beside Scale-QLoRA at the configured rank; empty for such a run itself."""
    found = context.budget
    if found is None or context.config.adapter.method == SCALE_QLORA:
        return {}
    return {
        "trainable_parameters": float(found.parameters),
        "scale_qlora_parameters": float(found.reference),
        "adapter_rank": float(found.rank),
    }


def evaluate_checkpoint(config: TrainConfig, folder: Path, *, device: str = "cpu") -> dict[str, float]:
    """Test metrics of a quantized checkpoint folder as it is: a base, or a merged adapter."""
    if config.threads:
        torch.set_num_threads(config.threads)
    dtype = compute_dtype(config.dtype, device)
    data = load_run_data(config, load_tokenizer(str(folder)))
    backend = InferenceBackend(Objective(load_quantized_model(folder, dtype=dtype, device=device), dtype))
    context = RunContext(config=config, base=folder, model=backend.objective.model, data=data, backend=backend)
    return task_metrics(context, "test")


def merge_best(
    config: TrainConfig, base: Path, adapter_folder: Path, out: Path, *, device: str = "cpu", quantizer: str = "rtn"
) -> dict[str, Any]:
    """Merge a trained adapter folder into `out`, measure max |dW| on the written file, and score both; returns the measurements.

    unmerged_* and merged_* come from the same examples in the same batches: their difference is the merge's alone. quantizer: how a merge is quantized that has to be (qlora), with
    statistics of the first training rows.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    dtype = compute_dtype(config.dtype, device)
    data = load_run_data(config, load_tokenizer(str(base)))
    model = load_adapter_model(load_quantized_model(base, dtype=dtype, device=device), adapter_folder)
    merge = ADAPTER_METHODS[config.adapter.method].merge
    if merge is None:
        report: Any = merge_posthoc(model, base, out, method=quantizer, batches=stat_batches(data), replace=True)
    else:
        report = merge(model, base, out)
    backend = InferenceBackend(Objective(model, dtype))
    unmerged = task_metrics(RunContext(config=config, base=base, model=model, data=data, backend=backend), "test")
    del model, backend
    merged = evaluate_checkpoint(config, out, device=device)
    return {
        **_merge_numbers(report),
        **{f"unmerged_{key}": value for key, value in unmerged.items()},
        **{f"merged_{key}": value for key, value in merged.items() if key.startswith("test")},
    }


def stat_batches(data: RunData) -> list[Batch]:
    """The first training rows, which a re-quantizing merge takes its statistics from."""
    rows = data.train[:STAT_ROWS]
    return [collate(rows[start : start + STAT_BATCH], data.pad_id) for start in range(0, len(rows), STAT_BATCH)]


def _merge_numbers(report: MergeReport | BaselineMerge) -> dict[str, Any]:
    out: dict[str, Any] = {"max_abs_dw": report.max_abs_dw, "codes_identical": report.codes_identical}
    if isinstance(report, MergeReport):
        return out | {"changed_scale_bytes": report.changed, "scale_bytes": report.blocks}
    return out | {
        "changed_scale_bytes": report.scale_bytes,
        "scale_bytes": sum(layer.of_scales for layer in report.layers.values()),
        "changed_code_bytes": report.code_bytes,
        "lost": report.lost,
        "returned": report.returned,
    }


def run_local(config: TrainConfig, folder: Path) -> dict[str, float]:
    """A whole run in this process: train, restore the best adapter, measure, write `folder`; returns the metrics."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    context = build(config)
    for note in context.data.notes:
        print(note)
    context.backend.objective.eval()
    with context.model.disable_adapter():
        base = {f"base_{key}": value for key, value in task_metrics(context, "test").items()}
    result = train(context)
    if result.diverged or not result.best:
        return base | result.last | {"diverged": 1.0}
    install(context, result.best)
    metrics = base | final_metrics(context) | parameter_counts(context)
    write_adapter(context, result, folder, metrics)
    return metrics
