"""One rank of the DeepSpeed tests: runs a list of training jobs and writes what it measured. `python _deepspeed_worker.py jobs.json`

Started with the environment of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT). Every job builds a model and an engine of its own; the
file is {"out": folder, "eps": Adam's epsilon, "jobs": [{"name", "config", "resume": checkpoint folder or null}]}. Rank 0 writes into `out`/<name>: result.json, state.safetensors
(`export_state` at the end), checkpoint-<step>, adapter; every rank writes rank-<rank>.json.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from prism_ray.adapters.merge import base_planes
from prism_ray.formats.modules import quantized_modules
from prism_ray.formats.tensor import code_plane_fingerprint
from prism_ray.training import deepspeed_backend
from prism_ray.training.backends import VALUE, State
from prism_ray.training.checkpoint import save_adapter
from prism_ray.training.config import TrainConfig
from prism_ray.training.deepspeed_backend import DeepSpeedBackend
from prism_ray.training.loop import Trainer
from prism_ray.training.run import RunContext, build, final_metrics


def run_job(job: dict[str, Any], out: Path) -> None:
    config = TrainConfig.load(job["config"])
    folder = out / job["name"]
    folder.mkdir(parents=True, exist_ok=True)
    context = build(config, make_backend=lambda objective: DeepSpeedBackend(objective, config))
    backend: Any = context.backend
    codes = [module.codes for _, module in quantized_modules(context.model)]
    before = fingerprint(context, codes)
    found: dict[str, Any] = {"code_bytes": sum(held_bytes(code) for code in codes), "fresh_export": shapes(backend.export_state())}
    curve: list[dict[str, float]] = []

    def report(metrics: dict[str, Any], checkpoint: Path | None) -> None:
        curve.append({key: float(value) for key, value in metrics.items()})
        if checkpoint is not None:
            shutil.copytree(checkpoint, folder / f"checkpoint-{int(metrics['step'])}")

    resume = Path(job["resume"]) if job["resume"] else None
    result = Trainer(config, backend, context.data, report=report, resume=resume, quiet=True).run()
    found |= {"curve": curve, "metrics": final_metrics(context), "resumed_at": result.progress.resumed_at}
    state = backend.export_state()
    found["code_hash"] = [before, fingerprint(context, codes)]
    found["optimizer_numel"] = optimizer_numel(backend)
    found["trainable"] = sorted(backend.parameters)
    found["round_trip"] = round_trip(backend, state, config.steps)
    (folder / f"rank-{backend.rank}.json").write_text(json.dumps(found))
    if backend.rank == 0:
        save_adapter(context.model, result.best, folder / "adapter")
        save_file({f"{kind}:{name}": value for name, entry in state.items() for kind, value in entry.items()}, folder / "state.safetensors")
    backend.engine.destroy()
    dist.barrier()


def soften(module: Any, eps: float) -> None:
    """Give the optimizers that a back-end module makes another epsilon; why, says test_deepspeed_backend.py."""
    original = module.new_optimizer

    def new_optimizer(*args: Any) -> torch.optim.AdamW:
        optimizer = original(*args)
        for group in optimizer.param_groups:
            group["eps"] = eps
        return optimizer

    module.new_optimizer = new_optimizer


def held_bytes(code: torch.Tensor) -> int:
    """Bytes of a code tensor that this worker keeps between passes."""
    kept = getattr(code, "ds_tensor", code)
    return kept.numel() * kept.element_size()


def fingerprint(context: RunContext, codes: list[torch.Tensor]) -> str:
    import deepspeed

    gather = deepspeed.zero.GatheredParameters(codes) if hasattr(codes[0], "ds_tensor") else nullcontext()
    with gather:
        return code_plane_fingerprint(base_planes(context.model))


def shapes(state: State) -> dict[str, list[int]]:
    return {name: list(entry[VALUE].shape) for name, entry in state.items()}


def optimizer_numel(backend: Any) -> int:
    """Elements of first moments on this worker."""
    return sum(values["exp_avg"].numel() for values in backend._inner().state.values())


def round_trip(backend: Any, state: State, step: int) -> dict[str, bool]:
    """Import another state over the trained one, export it, and put the old one back."""
    other = {name: {key: value * 0.5 + 0.25 for key, value in entry.items()} for name, entry in state.items()}
    backend.import_state(other, step + 7)
    changed = backend.export_state()
    steps = {float(values["step"]) for values in backend._inner().state.values()}
    backend.import_state(state, step)
    back = backend.export_state()
    return {
        "changed": all(torch.equal(changed[name][key], other[name][key]) for name in other for key in other[name]),
        "back": all(torch.equal(back[name][key], state[name][key]) for name in state for key in state[name]),
        "step": steps == {float(step + 7)},
    }


def main(path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    jobs = json.loads(Path(path).read_text())
    soften(deepspeed_backend, jobs["eps"])
    for job in jobs["jobs"]:
        run_job(job, Path(jobs["out"]))
        if dist.get_rank() == 0:
            print("done", job["name"], flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
