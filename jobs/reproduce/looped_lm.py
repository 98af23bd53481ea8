"""A looped language model trained on the CPU, and what 4- and 3-bit rounding does to it: windows of the trajectory, ranks by step, exposure by component.

    python jobs/reproduce/looped_lm.py OUT [--steps 600] [--seeds 0,1,2] [--loops 8] [--state-std 0.1] [--windows 128] [--calibration 64]

Per seed: train `prism_ray.models.looped` on WikiText-2's validation text with the tiny byte-level tokenizer, every step at the full recurrence depth (trained at random depths the loop
learns to contract, and then nothing that enters it matters), and save it to OUT/seed-<n> with its loss curve. Then, on the start of the test text:

- *windows*: perplexity per token of the base, of round to nearest, and of GPTQ by `calibrate.whole` with the Hessian of each window, at INT4 and INT3 in groups of 64 (GPTQ's formats have
  groups only), by the paper's plain sweep (refine 0) and with two passes of descent (refine 2). Standard errors are over test windows (delta method); differences of
  two columns are paired by window, in nats per token, with 95 % intervals; over seeds Student's interval of the seeds' means;
- *ranks*: thresholded rank at 1e-3 of the largest eigenvalue for the inputs of adapter and core, by step and accumulated;
- *rounding*: perplexity by round to nearest with one scale a row or a group of 64, and the agreement with the base for each component alone;
- *exposure* at INT4 a row, and the advice.

Calibration windows are drawn from the training text. The text lies in PRISM_DATA (see shared_data.py). A summary of each seed is printed; everything goes to OUT/results.json. A
model that is in OUT already is loaded, not trained again.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import tempfile
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
from prism_ray.calibrate.config import CalibrateConfig
from prism_ray.calibrate.exposure import component_agreement, component_linears, replaced, round_int
from prism_ray.calibrate.text import Chunk, make_chunks
from prism_ray.calibrate.whole import WholePass
from prism_ray.core.errors import DataError
from prism_ray.core.files import atomic_folder, write_json
from prism_ray.core.progress import Progress
from prism_ray.formats.policy import QuantPolicy, make_plan
from prism_ray.hessian.survey import StepCapture, spectrum
from prism_ray.hessian.windows import Window, WindowName
from prism_ray.models.load import load_model
from prism_ray.models.looped import PrismLoopedForCausalLM, looped_lm
from prism_ray.models.loops import count_calls, find_loop, run_loop
from prism_ray.models.tiny import tiny_tokenizer
from prism_ray.quantizers.base import QuantizerOptions

LENGTH = 64
BATCH = 8
RATE = 3e-3
WARMUP = 40
EXPOSURE_WINDOWS = 8
VARIANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "int4": partial(round_int, bits=4),
    "int4-g64": partial(round_int, bits=4, group=64),
    "int3": partial(round_int, bits=3),
    "int3-g64": partial(round_int, bits=3, group=64),
}
FORMATS = ("int4-g64", "int3-g64")
WINDOWS: tuple[WindowName, ...] = ("first", "all", "last", "skip-first", "equal-row", "alpha")
REFINE = (0, 2)
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Two-sided 95 % quantile of Student's distribution for the mean of n values, n - 1 degrees of freedom."""


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


def train(tokens: Tensor, steps: int, seed: int, loops: int, state_std: float) -> tuple[PrismLoopedForCausalLM, list[float]]:
    """AdamW with warmup and cosine decay on random windows, at full depth; returns the model and the loss of every step. Windows depend on (seed, step) alone."""
    model = looped_lm(seed, num_loops=loops, state_std=state_std).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
    )
    losses: list[float] = []
    bar = Progress(f"train seed {seed}", steps)
    for step in range(steps):
        ids = drawn(tokens, BATCH, seed * 1_000_003 + step)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        bar.update(step + 1, loss=losses[-1])
    return model.eval(), losses


def drawn(tokens: Tensor, count: int, seed: int) -> Tensor:
    """Windows at seeded random places, int64 [count, LENGTH]."""
    starts = torch.randint(0, tokens.numel() - LENGTH, (count,), generator=torch.Generator().manual_seed(seed))
    return tokens[starts[:, None] + torch.arange(LENGTH)]


def windows(tokens: Tensor, count: int) -> list[dict[str, Tensor]]:
    """The first `count` windows as batches of BATCH."""
    rows = tokens[: count * LENGTH].view(count, LENGTH)
    return [{"input_ids": part} for part in rows.split(BATCH)]


@torch.no_grad()
def losses_of(model: Any, batches: Sequence[dict[str, Tensor]]) -> Tensor:
    """Mean cross-entropy per predicted token of each window, float64 [windows], at the deployed recurrence depth."""
    spec = find_loop(model)
    found = []
    for batch in batches:
        ids = batch["input_ids"]
        logits = run_loop(model, spec, batch).logits[:, :-1]
        found.append(functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").double().mean(-1))
    return torch.cat(found)


def perplexity(losses: Tensor) -> dict[str, float]:
    """exp of the mean loss, and its standard error over windows."""
    value = math.exp(float(losses.mean()))
    return {"perplexity": value, "error": value * float(losses.std()) / math.sqrt(len(losses))}


def paired(one: Tensor, other: Tensor) -> dict[str, float]:
    """Mean of one - other over windows in nats per token, with its 95 % interval."""
    gap = one - other
    mean, half = float(gap.mean()), 1.96 * float(gap.std()) / math.sqrt(len(gap))
    return {"mean": mean, "low": mean - half, "high": mean + half}


# --- windows of the trajectory ---


def gptq_model(model: PrismLoopedForCausalLM, chunks: Sequence[Chunk], form: str, window: WindowName, refine: int) -> Any:
    """A copy of the model with the weights that GPTQ gives under a window."""
    policy = QuantPolicy(format=form)
    config = CalibrateConfig(model="looped", policy=policy, window=Window(name=window), options=QuantizerOptions(refine=refine))
    quantized, spec = copy.deepcopy(model), find_loop(model)
    assert spec is not None
    with tempfile.TemporaryDirectory() as work:
        plan = make_plan(quantized, policy)
        WholePass(quantized, spec, plan, config, work, chunks=chunks, lanes=[range(len(chunks))], say=lambda _: None).run()
    return quantized


def window_rows(model: PrismLoopedForCausalLM, chunks: Sequence[Chunk], test: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
    """Perplexities by format and column, and the paired differences that the question is about."""
    base = losses_of(model, test)
    rows: dict[str, Any] = {"base": perplexity(base), "formats": {}}
    bar = Progress("windows", len(FORMATS) * len(REFINE) * len(WINDOWS))
    for form in FORMATS:
        with replaced(model, quantized_linears(model), VARIANTS[form]):
            found = {"rtn": losses_of(model, test)}
        gaps = {}
        for refine in REFINE:
            for window in WINDOWS:
                found[f"{window}/{refine}"] = losses_of(gptq_model(model, chunks, form, window, refine), test)
                bar.update(len(rows["formats"]) * len(REFINE) * len(WINDOWS) + len(found) - 1)
            whole = found[f"all/{refine}"]
            gaps |= {f"all-{other}/{refine}": paired(whole, found[key]) for other, key in (("first", f"first/{refine}"), ("rtn", "rtn"))}
        rows["formats"][form] = {"perplexity": {name: perplexity(losses) for name, losses in found.items()}, "paired": gaps}
    return rows


def quantized_linears(model: PrismLoopedForCausalLM) -> list[str]:
    """The Linear modules of prelude, adapter, core and coda."""
    spec = find_loop(model)
    assert spec is not None
    linears = component_linears(model, spec)
    return linears["both"] + linears["prelude"] + linears["coda"]


@torch.no_grad()
def rank_rows(model: PrismLoopedForCausalLM, chunks: Sequence[Chunk]) -> dict[str, Any]:
    """Thresholded rank of each distinct input of adapter and core: by step, and accumulated over all of them."""
    spec = find_loop(model)
    assert spec is not None
    rows: dict[str, Any] = {}
    with StepCapture(model, component_linears(model, spec)["both"], steps=count_calls(model)) as capture:
        for chunk in chunks:
            with capture.batch(chunk.mask):
                run_loop(model, spec, {"input_ids": chunk.input_ids})
        for group in capture.groups:
            states = [state for _, state in sorted(capture.states_of(group.name).items())]
            ranks, whole = [spectrum([state]).rank for state in states], spectrum(states)
            rows[group.name] = {"width": group.width, "rows": states[0].tokens, "ranks": ranks, "accumulated": whole.rank}
    return rows


def over_seeds(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean paired differences over seeds with Student's 95 % interval; none for a single seed."""
    if len(results) not in STUDENT:
        return {}
    found: dict[str, Any] = {}
    for form in FORMATS:
        for key in results[0]["windows"]["formats"][form]["paired"]:
            means = torch.tensor([row["windows"]["formats"][form]["paired"][key]["mean"] for row in results], dtype=torch.float64)
            half = STUDENT[len(means)] * float(means.std()) / math.sqrt(len(means))
            found[f"{form} {key}"] = {"mean": float(means.mean()), "low": float(means.mean()) - half, "high": float(means.mean()) + half}
    return found


def table(row: dict[str, Any]) -> str:
    """A seed's windows and ranks as Markdown."""
    rows = row["windows"]
    lines = [
        f"seed {row['seed']}: base {_shown(rows['base'])}",
        "",
        f"| format | refine | rtn | {' | '.join(WINDOWS)} |",
        "|---" * (len(WINDOWS) + 3) + "|",
    ]
    gaps = []
    for form, found in rows["formats"].items():
        for refine in REFINE:
            cells = [_shown(found["perplexity"][key]) for key in ("rtn", *(f"{window}/{refine}" for window in WINDOWS))]
            lines.append(f"| {form} | {refine} | {' | '.join(cells)} |")
        gaps += [f"{form} {key}: {gap['mean']:+.4f} [{gap['low']:+.4f}, {gap['high']:+.4f}]" for key, gap in found["paired"].items()]
    ranks = [f"{name} ({found['width']} columns): {found['ranks']}, all {found['accumulated']}" for name, found in row["ranks"].items()]
    return "\n".join([*lines, "", *gaps, "", *ranks])


def _shown(found: dict[str, float]) -> str:
    return f"{found['perplexity']:.3f} ± {found['error']:.3f}"


# --- rounding and exposure ---


def rtn_rows(model: PrismLoopedForCausalLM, test: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """Perplexity of the base and of each variant by round to nearest."""
    rows = {"base": perplexity(losses_of(model, test))["perplexity"]}
    for variant, quantize in VARIANTS.items():
        with replaced(model, quantized_linears(model), quantize):
            rows[variant] = perplexity(losses_of(model, test))["perplexity"]
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


def trained(out: Path, tokens: Tensor, steps: int, seed: int, loops: int, state_std: float) -> tuple[PrismLoopedForCausalLM, list[float]]:
    """The model of a seed, from OUT or trained and saved there."""
    folder = out / f"seed-{seed}"
    if not folder.is_dir():
        model, losses = train(tokens, steps, seed, loops, state_std)
        with atomic_folder(folder) as temporary:
            model.save_pretrained(temporary)
            tiny_tokenizer().save_pretrained(temporary)
            (temporary / "loss.json").write_text(json.dumps(losses))
    model: Any = load_model(folder, dtype=torch.float32)
    losses = json.loads((folder / "loss.json").read_text())
    found, wanted = (len(losses), model.config.num_loops, model.config.state_std), (steps, loops, state_std)
    if found != wanted:
        raise DataError(f"holds a model of (steps, loops, state_std) {found}, not {wanted}", where=str(folder), remedy="give another OUT")
    return model, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--loops", type=int, default=8)
    parser.add_argument("--state-std", type=float, default=0.1)
    parser.add_argument("--windows", type=int, default=128, help="test windows of 64 tokens")
    parser.add_argument("--calibration", type=int, default=64, help="calibration windows of 64 tokens")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    train_tokens, test_tokens = tokens_of("valid"), tokens_of("test")
    test = windows(test_tokens, options.windows)
    results = []
    for seed in [int(text) for text in options.seeds.split(",")]:
        model, losses = trained(options.out, train_tokens, options.steps, seed, options.loops, options.state_std)
        # Far from every training step's seed.
        calibration = drawn(train_tokens, options.calibration, 7 + seed * 1_000_003 + 500_000)
        chunks = make_chunks(calibration.tolist(), BATCH, 0)
        row: dict[str, Any] = {
            "seed": seed,
            "steps": len(losses),
            "unigram_entropy": unigram_entropy(train_tokens),
            "last_loss": sum(losses[-20:]) / len(losses[-20:]),
            "windows": window_rows(model, chunks, test),
            "ranks": rank_rows(model, chunks),
            "rounding": rtn_rows(model, test),
        }
        row |= exposure_rows(model, test[: EXPOSURE_WINDOWS // BATCH])
        results.append(row)
        print(table(row), flush=True)
        shown = {key: row[key] for key in ("last_loss", "rounding", "agreement")} | {"radius": row["exposure"]["radius_base"]}
        print(json.dumps(shown), flush=True)
        write_json(options.out / "results.json", {"seeds": results, "over_seeds": over_seeds(results)})
    print(json.dumps(over_seeds(results), indent=1), flush=True)


if __name__ == "__main__":
    main()
