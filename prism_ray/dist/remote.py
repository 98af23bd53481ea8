"""Functions that the sweep's driver runs in tasks on worker nodes, over plain values. Their imports are theirs: the driver does not pay for them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from prism_ray.training.config import TrainConfig


def prepare_format(data: dict[str, Any], rank: int, gpu: bool) -> dict[str, Any]:
    """Base folder, fingerprints, sizes and metrics of one format; refuses a rank above the number of scale blocks."""
    import torch
    from peft import get_peft_model

    from prism_ray.adapters.methods import ADAPTER_METHODS, AdapterSettings, budget, target_shapes
    from prism_ray.formats.checkpoint import load_quantized_model
    from prism_ray.models.load import load_tokenizer
    from prism_ray.training.base import base_manifest, prepare_base
    from prism_ray.training.dataset import load_run_data
    from prism_ray.training.run import evaluate_checkpoint

    config = TrainConfig.load(data)
    base = prepare_base(config.model, config.format)
    model = load_quantized_model(base, dtype=torch.bfloat16)
    chosen, adapter = ADAPTER_METHODS[config.adapter.method], config.adapter
    settings = AdapterSettings(rank=rank, alpha=adapter.alpha, target_modules=adapter.target_modules, experts=adapter.experts)
    # Injection is what refuses a rank above the number of scale blocks.
    get_peft_model(model, chosen.build(model, settings))
    shapes = target_shapes(model, adapter.target_modules).values()
    parameters = budget(adapter.method, shapes, rank, match=adapter.match_parameters).parameters
    del model
    manifest = base_manifest(base)
    size = sum(path.stat().st_size for path in base.iterdir())
    metrics = evaluate_checkpoint(config, base, device="cuda" if gpu else "cpu")
    return {
        "folder": str(base),
        "code_plane": manifest["code_plane"],
        "scale_plane": manifest["scale_plane"],
        "bytes": size,
        "parameters_per_rank": parameters // rank,
        "notes": list(load_run_data(config, load_tokenizer(str(base))).notes),
        "metrics": {key: value for key, value in metrics.items() if math.isfinite(value)},
    }


def ship_merge(data: dict[str, Any], base: str, adapter: str, out: str, gpu: bool) -> dict[str, Any]:
    """`merge_best` over plain values, for a remote task."""
    from prism_ray.training.run import merge_best

    return merge_best(TrainConfig.load(data), Path(base), Path(adapter), Path(out), device="cuda" if gpu else "cpu")
