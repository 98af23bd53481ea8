"""Training checkpoints: complete, re-opened before they are reported, independent of the number of workers.

    adapter_config.json, adapter_model.safetensors   the PEFT adapter as of this step
    trainer.safetensors                              Adam moments, and the best adapter so far, by parameter name
    trainer.json                                     step, best metric, evaluation history, how often the run was resumed
    manifest.json                                    written last; SHA-256 of each file

One rank writes; the values were gathered before (field case ADP-05). A folder without a valid manifest is an interrupted write and is passed over.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from prism_ray.core.errors import CheckpointError
from prism_ray.core.files import write_json
from prism_ray.core.manifest import read_manifest, write_manifest
from prism_ray.training.backends import FIRST_MOMENT, SECOND_MOMENT, VALUE, State

KIND = "training-checkpoint"
ADAPTER_FILE, TRAINER_FILE, PROGRESS_FILE = "adapter_model.safetensors", "trainer.safetensors", "trainer.json"
BEST = "best"


@dataclass
class Progress:
    """What a resumed run must know besides tensors. step: optimizer updates done; best_step/best_metric: of the kept adapter; stale: evaluations since;
    history: one row per evaluation; resumed_at: steps at which the run went on from a checkpoint; seconds: training time so far."""

    step: int = 0
    best_step: int = -1
    best_metric: float | None = None
    best_loss: float | None = None
    stale: int = 0
    seconds: float = 0.0
    tokens: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    resumed_at: list[int] = field(default_factory=list)


def save_adapter(model: Any, values: dict[str, torch.Tensor], folder: Path, adapter: str = "default") -> None:
    """Write a PEFT adapter folder from full parameter values (name in `model` -> tensor), and re-open it to compare.

    Raises CheckpointError, before anything is written, for values that are empty, not finite or not all of the adapter's (what a save without gathering
    gives, field case ADP-05), and afterwards when the file does not hold exactly these tensors.
    """
    path = folder / ADAPTER_FILE
    tensors = get_peft_model_state_dict(model, state_dict=dict(values), adapter_name=adapter, save_embedding_layers=False)
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    expected = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False).keys()
    if not expected or tensors.keys() != expected or len(tensors) != len(values):
        raise CheckpointError(f"{len(tensors)} tensors to write, the adapter has {len(expected)}", where=str(path))
    for name, tensor in tensors.items():
        if tensor.numel() == 0 or not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"adapter tensor '{name}' is empty or not finite", where=str(path), remedy="training diverged")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"format": "pt"})
    config = model.peft_config[adapter]
    mode = config.inference_mode
    config.inference_mode = True
    config.save_pretrained(str(folder))
    config.inference_mode = mode
    written = load_file(path)
    if written.keys() != tensors.keys() or not all(torch.equal(written[name], tensor) for name, tensor in tensors.items()):
        raise CheckpointError("the written adapter is not the one in memory", where=str(path))


def save_checkpoint(model: Any, state: State, best: dict[str, torch.Tensor] | None, progress: Progress, folder: Path) -> None:
    """Write a checkpoint folder; complete only when its manifest is there."""
    save_adapter(model, {name: entry[VALUE] for name, entry in state.items()}, folder)
    tensors = {f"{key}:{name}": entry[key] for name, entry in state.items() for key in (FIRST_MOMENT, SECOND_MOMENT)}
    tensors |= {f"{VALUE}:{name}": entry[VALUE] for name, entry in state.items()}
    tensors |= {f"{BEST}:{name}": value for name, value in (best or {}).items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / TRAINER_FILE)
    write_json(folder / PROGRESS_FILE, asdict(progress))
    write_manifest(folder, KIND, step=progress.step)
    read_manifest(folder, KIND)


def load_checkpoint(folder: Path) -> tuple[State, dict[str, torch.Tensor] | None, Progress]:
    """(state, best adapter values, progress) of a complete checkpoint; raises CheckpointError naming the file otherwise."""
    read_manifest(folder, KIND)
    tensors = load_file(folder / TRAINER_FILE)
    state: State = {}
    best: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        kind, _, name = key.partition(":")
        if kind == BEST:
            best[name] = tensor
        else:
            state.setdefault(name, {})[kind] = tensor
    progress = Progress(**json.loads((folder / PROGRESS_FILE).read_text()))
    return state, best or None, progress


def latest_complete(folders: list[Path]) -> Path | None:
    """The complete checkpoint with the highest step; incomplete or damaged ones are skipped (field case RAY-01)."""
    found: list[tuple[int, Path]] = []
    for folder in folders:
        try:
            found.append((int(read_manifest(folder, KIND)["step"]), folder))
        except CheckpointError:
            continue
    return max(found)[1] if found else None
