"""A looped language model trained on the CPU, and what rounding does to it by component: perplexity, agreement, advice.

    python jobs/reproduce/looped_lm.py OUT [--steps 600] [--seeds 0,1,2] [--loops 8]

Per seed: train `prism_ray.models.looped` on WikiText-2's validation text with the tiny byte-level tokenizer, save it to OUT/seed-<n> with its loss curve, and measure
on the start of the test text the perplexity per token of the base and of INT4 and INT3, one scale a row or a group of 64, round to nearest on every projection of adapter, core,
prelude and coda; then agreement with the base for each component alone, and the advice. The text lies in PRISM_DATA (see shared_data.py). One JSON object
per seed is printed and written to OUT/results.json; a model that is in OUT already is loaded, not trained again.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from shared_data import data_root
from torch import Tensor
from torch.nn import functional

from prism_ray.calibrate.advice import advise, measure_exposure
from prism_ray.calibrate.exposure import component_agreement, component_linears, replaced, round_int
from prism_ray.core.errors import DataError
from prism_ray.core.files import atomic_folder, write_json
from prism_ray.core.progress import Progress
from prism_ray.models.load import load_model
from prism_ray.models.looped import PrismLoopedForCausalLM, looped_lm
from prism_ray.models.loops import find_loop, run_loop
from prism_ray.models.tiny import tiny_tokenizer

LENGTH = 64
BATCH = 8
RATE = 3e-3
WARMUP = 40
TEST_WINDOWS = 64
EXPOSURE_WINDOWS = 8
VARIANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "int4": partial(round_int, bits=4),
    "int4-g64": partial(round_int, bits=4, group=64),
    "int3": partial(round_int, bits=3),
    "int3-g64": partial(round_int, bits=3, group=64),
}


def tokens_of(name: str) -> Tensor:
    """A split of WikiText-2 as token ids int64 [n]."""
    path = data_root() / "wikitext2" / f"{name}.txt"
    if not path.is_file():
        raise DataError("is not there", where=str(path), remedy="set PRISM_DATA")
    return torch.tensor(tiny_tokenizer()(path.read_text(encoding="utf-8"), add_special_tokens=False).input_ids)


def unigram_entropy(tokens: Tensor) -> float:
    """Nats per token of the best model that ignores context, fitted on the tokens themselves."""
    share = tokens.bincount().double() / tokens.numel()
    return float(torch.special.entr(share).sum())


def train(tokens: Tensor, steps: int, seed: int, loops: int) -> tuple[PrismLoopedForCausalLM, list[float]]:
    """AdamW with warmup and cosine decay on random windows; returns the model and the loss of every step.

    Each step runs a number of loops drawn from 1 to `loops`, as Huginn trains, which costs about half of the full depth. Windows and depth depend on (seed, step) alone.
    """
    model = looped_lm(seed, num_loops=loops).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
    )
    losses: list[float] = []
    bar = Progress(f"train seed {seed}", steps)
    for step in range(steps):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(0, tokens.numel() - LENGTH, (BATCH,), generator=generator)
        ids = tokens[starts[:, None] + torch.arange(LENGTH)]
        depth = int(torch.randint(1, loops + 1, (), generator=generator))
        loss = model(input_ids=ids, labels=ids, num_loops=depth).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        bar.update(step + 1, loss=losses[-1])
    return model.eval(), losses


def windows(tokens: Tensor, count: int) -> list[dict[str, Tensor]]:
    """The first `count` windows as batches of BATCH."""
    rows = tokens[: count * LENGTH].view(count, LENGTH)
    return [{"input_ids": part} for part in rows.split(BATCH)]


@torch.no_grad()
def perplexity(model: PrismLoopedForCausalLM, batches: Sequence[dict[str, Tensor]]) -> float:
    """exp of the mean cross-entropy per predicted token, at the deployed recurrence depth."""
    spec = find_loop(model)
    total, count = 0.0, 0
    for batch in batches:
        ids = batch["input_ids"]
        logits = run_loop(model, spec, batch).logits[:, :-1]
        total += float(functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))
        count += ids[:, 1:].numel()
    return math.exp(total / count)


def rtn_rows(model: PrismLoopedForCausalLM, test: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """Perplexity of the base and of each variant by round to nearest."""
    spec = find_loop(model)
    assert spec is not None
    linears = component_linears(model, spec)
    names = linears["both"] + linears["prelude"] + linears["coda"]
    rows = {"base": perplexity(model, test)}
    for variant, quantize in VARIANTS.items():
        with replaced(model, names, quantize):
            rows[variant] = perplexity(model, test)
    return rows


def exposure_rows(model: PrismLoopedForCausalLM, test: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
    """Agreement of each component alone for every variant, and all readings with the advice at per-row INT4."""
    spec = find_loop(model)
    assert spec is not None
    shares = {
        variant: {part: asdict(found) for part, found in component_agreement(model, spec, test, quantize).items()}
        for variant, quantize in VARIANTS.items()
    }
    exposure = measure_exposure(model, test, VARIANTS["int4"])
    advice = advise(exposure, component_linears(model, spec))
    return {"agreement": shares, "exposure": exposure.to_dict(), "advice": advice.to_dict()}


def trained(out: Path, tokens: Tensor, steps: int, seed: int, loops: int) -> tuple[PrismLoopedForCausalLM, list[float]]:
    """The model of a seed, from OUT or trained and saved there."""
    folder = out / f"seed-{seed}"
    if not folder.is_dir():
        model, losses = train(tokens, steps, seed, loops)
        with atomic_folder(folder) as temporary:
            model.save_pretrained(temporary)
            tiny_tokenizer().save_pretrained(temporary)
            (temporary / "loss.json").write_text(json.dumps(losses))
    model: Any = load_model(folder, dtype=torch.float32)
    losses = json.loads((folder / "loss.json").read_text())
    if len(losses) != steps or model.config.num_loops != loops:
        found = f"a model of {len(losses)} steps and {model.config.num_loops} loops, not {steps} and {loops}"
        raise DataError(f"holds {found}", where=str(folder), remedy="give another OUT")
    return model, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--loops", type=int, default=8)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    train_tokens, test_tokens = tokens_of("valid"), tokens_of("test")
    test = windows(test_tokens, TEST_WINDOWS)
    results = []
    for seed in [int(text) for text in options.seeds.split(",")]:
        model, losses = trained(options.out, train_tokens, options.steps, seed, options.loops)
        row: dict[str, Any] = {
            "seed": seed,
            "steps": len(losses),
            "unigram_entropy": unigram_entropy(train_tokens),
            "last_loss": sum(losses[-20:]) / len(losses[-20:]),
            "perplexity": rtn_rows(model, test),
        }
        row |= exposure_rows(model, test[: EXPOSURE_WINDOWS // BATCH])
        results.append(row)
        print(json.dumps({key: value for key, value in row.items() if key != "exposure"}, indent=1), flush=True)
    write_json(options.out / "results.json", results)


if __name__ == "__main__":
    main()
