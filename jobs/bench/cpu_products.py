"""What decides the CPU paths: float32 against bfloat16 products, and three ways to multiply a weight by its block scales; side by side in one run.

    python jobs/bench/cpu_products.py

Prints one JSON object of medians in milliseconds and their ratios, for a layer of SmolLM2-135M's size (1536 x 576).
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch

OUT, IN, BLOCK = 1536, 576, 16


def median_ms(functions: dict[str, Callable[[], object]], rounds: int = 5) -> dict[str, float]:
    """Median milliseconds of each function, the functions taking turns."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 2):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            if number > 1:
                times[name].append(1e3 * (time.perf_counter() - started))
    return {name: round(statistics.median(values), 3) for name, values in times.items()}


def products(tokens: int) -> dict[str, float]:
    """Forward, gradient of the input and gradient of the weight in both dtypes, and the ratio bfloat16 / float32 of each."""
    made = {
        dtype: (torch.randn(tokens, IN).to(dtype), torch.randn(tokens, OUT).to(dtype), torch.randn(OUT, IN).to(dtype))
        for dtype in (torch.float32, torch.bfloat16)
    }
    functions: dict[str, Callable[[], object]] = {}
    for dtype, (x, grad, weight) in made.items():
        name = str(dtype).removeprefix("torch.")
        functions[f"{name} forward"] = lambda x=x, weight=weight: torch.nn.functional.linear(x, weight)
        functions[f"{name} input gradient"] = lambda grad=grad, weight=weight: grad @ weight
        functions[f"{name} weight gradient"] = lambda grad=grad, x=x: grad.T @ x
    found = median_ms(functions)
    for kind in ("forward", "input gradient", "weight gradient"):
        found[f"ratio {kind}"] = round(found[f"bfloat16 {kind}"] / found[f"float32 {kind}"], 1)
    return found


def scalings() -> dict[str, float]:
    """Broadcast product over blocks, against a materialized expansion and a flat product."""
    weight, scale = torch.randn(OUT, IN // BLOCK, BLOCK), torch.rand(OUT, IN // BLOCK)
    found = median_ms(
        {
            "broadcast": lambda: weight.mul(scale.unsqueeze(-1)),
            "expanded": lambda: weight.mul(scale.unsqueeze(-1).expand_as(weight).contiguous()),
            "repeated": lambda: weight.mul(scale.repeat_interleave(BLOCK, 1).view_as(weight)),
        }
    )
    return found | {"ratio broadcast / expanded": round(found["broadcast"] / found["expanded"], 1)}


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "cpu": torch.backends.cpu.get_cpu_capability(),
                "threads": torch.get_num_threads(),
                "512 tokens": products(512),
                "4096 tokens": products(4096),
                "scales": scalings(),
            },
            indent=2,
        )
    )
