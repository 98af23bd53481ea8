"""Open a base for an engine, and read planes for it.

The base is a compressed-tensors folder. Its tensors are memory-mapped and stay so: codes and scales are views of the files' pages, experts are not stacked, and
tensors of the wanted dtype are not converted. R processes that open one folder on a node so share one copy of the code plane, measured by PSS; what
each adds is its buffers, key-value cache and decoded weights (`weight_cache_bytes`).

A plane is read from an adapter folder or a store, admitted against the base (`adapters.admission`), named by Linear, and identified by the SHA-256 of its bytes.
Refused: a model folder or adapter that does not hold together; see `formats.checkpoint` and `adapters.admission`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from prism_ray.adapters.admission import admit
from prism_ray.adapters.planes import BasePlanes, ScalePlane, expert_parts
from prism_ray.adapters.store.api import AdapterStore
from prism_ray.adapters.store.ids import DEFAULT_TENANT
from prism_ray.core.errors import CheckpointError, FormatError, ModelError, one_line
from prism_ray.core.manifest import MANIFEST_NAME, read_manifest
from prism_ray.engines.planes_linear import ExpertPart, PlaneExperts, PlaneStep
from prism_ray.engines.protocol import BaseInfo, Plane
from prism_ray.formats import compressed_tensors as convention
from prism_ray.formats.checkpoint import KIND, fill_plain, install, read_quantized, take_bias
from prism_ray.formats.tensor import QuantTensor


@dataclass(frozen=True, kw_only=True)
class LoadedBase:
    """model: in eval mode, its expert weights as PlaneExperts, its linears as FP4Linear. tokenizer: None where the folder has none. eos: end of sequence ids."""

    model: Any
    tokenizer: Any
    planes: BasePlanes
    info: BaseInfo
    eos: frozenset[int]


def open_base(
    folder: Path | str, step: PlaneStep, *, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", max_length: int | None = None
) -> LoadedBase:
    """The model of a quantized folder with its planes memory-mapped (on a CPU). max_length: at most the model's own positions."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(folder)
    if (folder / MANIFEST_NAME).is_file():
        read_manifest(folder, KIND)
    spec, linears, plain = read_quantized(folder)
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.config._experts_implementation = "eager"
    fused = convention.fused_names(linears)
    for name, tensor in linears.items():
        if fused[name] == name:
            install(model, name, tensor, dtype, bias=take_bias(model, name, plain))
    for name, experts in expert_parts(linears).items():
        _install_experts(model, name, [[_part(part, linears[part], device) for part in parts] for parts in experts], dtype, step)
    fill_plain(model, plain, dtype, folder)
    model = model.to(device).eval()
    planes = BasePlanes.of(linears, str(folder))
    text = model.config.get_text_config()
    positions = int(getattr(text, "max_position_embeddings", 0) or 0) or max_length
    if not positions:
        raise ModelError("the config says no max_position_embeddings", where=str(folder), remedy="set max_length")
    info = BaseInfo(
        model=folder.name,
        format=spec.name,
        code_plane=planes.code_plane,
        scale_plane=planes.scale_plane,
        max_length=min(positions, max_length or positions),
        vocab_size=int(text.vocab_size),
        scale_bytes=sum(tensor.scales.numel() for tensor in linears.values()),
    )
    return LoadedBase(model=model, tokenizer=open_tokenizer(folder), planes=planes, info=info, eos=_eos(model))


def _part(name: str, tensor: QuantTensor, device: str) -> ExpertPart:
    if device != "cpu":
        tensor = replace(tensor, codes=tensor.codes.to(device), scales=tensor.scales.to(device))
    return ExpertPart(name=name, tensor=tensor)


def _install_experts(model: Any, name: str, experts: list[list[ExpertPart]], dtype: torch.dtype, step: PlaneStep) -> None:
    """Put the parts in the place of the fused parameter `name`; the checks are those of `convention.fuse_experts` and `install`."""
    parent, _, leaf = name.rpartition(".")
    try:
        container = model.get_submodule(parent)
        shape = tuple(getattr(container, leaf).shape)
    except AttributeError:
        raise CheckpointError("the model has no such module", where=name, remedy="the checkpoint belongs to another architecture") from None
    for parts in experts:
        found = (len(experts), sum(part.tensor.shape[0] for part in parts), parts[0].tensor.shape[1])
        if found != shape:
            raise CheckpointError(
                f"experts of shape {list(found)} in the checkpoint, {list(shape)} in the model", where=name, remedy="write it again"
            )
        if any(not torch.equal(part.tensor.tensor_scale, parts[0].tensor.tensor_scale) for part in parts):
            raise CheckpointError("gate and up of an expert have different tensor scales", where=name, remedy="quantize them as one weight")
    delattr(container, leaf)
    setattr(container, leaf, PlaneExperts(experts, dtype, step))


def open_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"the tokenizer cannot be loaded ({one_line(error)})", where=str(folder), remedy="copy its files again") from None


def _eos(model: Any) -> frozenset[int]:
    found = getattr(model.generation_config, "eos_token_id", None)
    found = model.config.get_text_config().eos_token_id if found is None else found
    return frozenset([found] if isinstance(found, int) else found or ())


def plane_of(scales: Mapping[str, torch.Tensor], base: BasePlanes, where: str) -> Plane:
    """Scales by Linear or fused name as a plane of the base, checked. Raises FormatError, CheckpointError."""
    plane = ScalePlane(scales).by_linear({name: tensor.scales for name, tensor in base.quantized.items()})
    plane.require_fit(base.quantized, where)
    return Plane(digest=plane.digest(), scales=plane.tensors)


def plane_from_folder(folder: Path | str, base: BasePlanes, *, root: Path | str | None = None) -> Plane:
    """The plane of an adapter folder after every check of admission. root: folder that it must lie in."""
    plane = admit(folder, base, root=root).plane
    return Plane(digest=plane.digest(), scales=plane.tensors)


def plane_from_store(store: AdapterStore, reference: str, base: BasePlanes, *, tenant: str = DEFAULT_TENANT) -> Plane:
    """The plane of `name` or `name@version` in a store. Raises FormatError for an adapter of another base."""
    identity = store.show(reference, tenant=tenant).identity
    for field, found in (("base_code_plane", base.code_plane), ("base_scale_plane", base.scale_plane)):
        if identity.get(field) != found:
            raise FormatError(f"is made for another base ({field} differs)", where=reference, remedy="serve it from its own base")
    return plane_of(store.scale_plane(reference, tenant=tenant), base, reference)
