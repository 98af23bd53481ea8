"""Variants of one base for the reproductions: integer round-to-nearest, FP4, GGUF block formats, fp16, a perturbed model.

`make(name, base)` returns a model in memory. Names:

    int<bits>-g<group>[+head]   symmetric round-to-nearest in groups along the input, bf16 scales
    nvfp4[+head], mxfp4         prism_ray's own formats
    Q8_0 … Q4_0[+head]          the gguf package's quantizers, dequantized again: what a loader of that file computes with
    fp16                        weights through float16
    lora-<std>                  a rank-32 random update of the attention projections, of `std` times each weight's own deviation

`+head` quantizes the output head in the same way; where it is tied, the embedding is given a copy of its own first and stays as it was, so that
only the head's axis is touched by it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import gguf
import torch
from torch import nn

from prism_ray.core.errors import UnknownName
from prism_ray.formats.spec import FORMATS
from prism_ray.models.families import decoder_layers, split_head
from prism_ray.quantizers.rtn import rtn

PTQ = (
    *(f"int{bits}-g{group}" for bits in (8, 6, 5, 4, 3, 2) for group in (32, 64)),
    "int6-g64+head", "int4-g64+head", "int3-g64+head",
    "nvfp4", "nvfp4+head", "mxfp4",
    *(f"{kind}{head}" for kind in ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0") for head in ("", "+head")),
    "fp16", "lora-0.05",
)  # fmt: skip


def rounding(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Weight [O, I] to its quantized and dequantized self, float32. UnknownName for a name that is none of the above."""
    if found := re.fullmatch(r"int(\d)-g(\d+)", name):
        bits, group = int(found[1]), int(found[2])
        return lambda weight: round_int(weight, bits, group)
    if name in FORMATS:
        return lambda weight: rtn(weight, FORMATS[name])[0].dequantize()
    if name == "fp16":
        return lambda weight: weight.to(torch.float16).to(torch.float32)
    kind = getattr(gguf.GGMLQuantizationType, name, None)
    if kind is None:
        raise UnknownName(f"there is no variant '{name}'", where="variants", remedy=f"known: {', '.join(PTQ)}")
    return lambda weight: torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind))


def round_int(weight: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Symmetric integers of `bits` in groups of `group` columns: scale amax / (2^(bits-1) - 1) in bf16, ties to even."""
    blocks = weight.reshape(weight.shape[0], -1, group)
    largest = 2 ** (bits - 1) - 1
    scale = (blocks.abs().amax(-1, keepdim=True) / largest).to(torch.bfloat16).to(torch.float32).clamp_(min=1e-30)
    return ((blocks / scale).round_().clamp_(-largest - 1, largest) * scale).reshape(weight.shape)


@torch.no_grad()
def make(name: str, base: nn.Module) -> Any:
    """A copy of `base` (float32) with the variant's weights; `base` itself for the name `base`."""
    if name == "base":
        return base
    model: Any = copy.deepcopy(base)
    if name.startswith("lora-"):
        _perturb(model, float(name.removeprefix("lora-")))
        return model
    kind, _, head = name.partition("+")
    apply = rounding(kind)
    for layer in decoder_layers(split_head(model).backbone):
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(apply(module.weight.float().contiguous()))
    if head:
        output = model.get_output_embeddings()
        if output.weight is model.get_input_embeddings().weight:
            output.weight = nn.Parameter(output.weight.detach().clone(), requires_grad=False)
            model.config.tie_word_embeddings = False
        output.weight.copy_(apply(output.weight.float().contiguous()))
    return model


def _perturb(model: Any, size: float, rank: int = 32) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")):
            left = torch.randn(parameter.shape[0], rank, generator=generator)
            right = torch.randn(rank, parameter.shape[1], generator=generator)
            update = left @ right
            parameter += size * parameter.std() / update.std() * update
