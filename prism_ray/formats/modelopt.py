"""The NVIDIA ModelOpt checkpoint layout of NVFP4 (`quant_method` "modelopt"), read and written, converted here and nowhere else.

For a Linear called N the checkpoint holds

| tensor | dtype, shape | ours |
|---|---|---|
| N.weight | uint8 [O, I/2], low nibble = even column | codes, same bytes |
| N.weight_scale | float8_e4m3fn [O, I/16], linear and unpadded | scales, same bytes |
| N.weight_scale_2 | float32 [] (or [1]): the scale itself, amax / 2688 | tensor_scale, same bytes |
| N.input_scale | float32, of the activations; absent where only weights are quantized | kept beside the weight |

The scalar *multiplies*, compressed-tensors' `weight_global_scale` divides: the name decides, never the value (field case FMT-02). Fused experts
[E, O, I] are stored per expert, as in `compressed_tensors`. Two files say the same thing in two ways: `hf_quant_config.json` (producer; quantization:
quant_algo, group_size, kv_cache_quant_algo, exclude_modules) and `quantization_config` of config.json (quant_algo, config_groups, ignore).

Weight-only is a declared mode: quant_algo W4A16_NVFP4, or no `input_scale` anywhere. An `input_scale` that some modules have and some lack is an error
with the names (field case FMT-06): nothing stands in for it. Refuses by name: other algorithms (MXFP4, FP8, MIXED_PRECISION, NVFP4_AWQ,
NVFP4_SVD …), activation smoothing (`pre_quant_scale`), compressed-tensors' names in a ModelOpt folder, padded scales, NaN bytes, subnormal scalars.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from prism_ray import __version__
from prism_ray.core.errors import CheckpointError, FormatError, one_line
from prism_ray.core.files import atomic_folder, require_disk, write_json
from prism_ray.core.manifest import write_manifest
from prism_ray.formats.compressed_tensors import DIVISOR, split_experts
from prism_ray.formats.e2m1 import PACKING
from prism_ray.formats.policy import QuantPlan
from prism_ray.formats.safetensors_io import REWRITE, read_tensors, write_shards
from prism_ray.formats.spec import NVFP4, FormatSpec
from prism_ray.formats.tensor import QuantTensor, code_plane_fingerprint, scale_plane_fingerprint

CODES, SCALES, FACTOR, INPUT = "weight", "weight_scale", "weight_scale_2", "input_scale"
CONFIG_NAME = "hf_quant_config.json"
ALGORITHM, WEIGHT_ONLY = "NVFP4", "W4A16_NVFP4"
INCOMPLETE = "the checkpoint is incomplete: write it again"
_FOREIGN = (DIVISOR, "weight_packed", "pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b")
_EXPERT = re.compile(r"^(?P<experts>.*\.experts)\.(?P<index>\d+)\.(?P<part>.+)$")


@dataclass(frozen=True, kw_only=True)
class ModelOptCheckpoint:
    """What a ModelOpt folder holds.

    quantized: weights by the path of their Linear (experts one by one; `compressed_tensors.fuse_experts` fuses them). plain: every other tensor.
    input_scales: activation scales by Linear, empty where only weights are quantized. config: `quantization_config` of config.json, quant_config:
    hf_quant_config.json; each is None where the folder has none. scalar_shape: shape the scalars were stored in.
    """

    quantized: dict[str, QuantTensor]
    plain: dict[str, torch.Tensor]
    config: dict[str, Any] | None
    quant_config: dict[str, Any] | None
    input_scales: dict[str, torch.Tensor] = field(default_factory=dict)
    scalar_shape: tuple[int, ...] = ()
    spec: FormatSpec = NVFP4

    @property
    def weight_only(self) -> bool:
        """Whether the activations stay as they are."""
        return not self.input_scales or _algorithm(self.config, self.quant_config, "") == WEIGHT_ONLY

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor under its checkpoint name."""
        out = dict(self.plain)
        for name, tensor in self.quantized.items():
            out |= to_checkpoint(name, tensor, scalar_shape=self.scalar_shape)
        return out | {f"{name}.{INPUT}": scale for name, scale in self.input_scales.items()}


def to_checkpoint(name: str, tensor: QuantTensor, *, scalar_shape: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    """Checkpoint tensors of one quantized weight; `name` is a Linear's path or the path of a fused expert parameter."""
    if tensor.format.name != NVFP4.name:
        raise FormatError(f"this layout holds nvfp4, not {tensor.format.name}", where=name, remedy="write compressed-tensors instead")
    if len(tensor.shape) == 2:
        return {
            f"{name}.{CODES}": tensor.codes,
            f"{name}.{SCALES}": tensor.scales.view(NVFP4.checkpoint_scale_dtype),
            f"{name}.{FACTOR}": tensor.tensor_scale.clone().reshape(scalar_shape),
        }
    out: dict[str, torch.Tensor] = {}
    for part, piece in split_experts(name, tensor):
        out |= to_checkpoint(part, piece, scalar_shape=scalar_shape)
    return out


def from_checkpoint(name: str, tensors: Mapping[str, torch.Tensor], spec: FormatSpec = NVFP4) -> QuantTensor:
    """One Linear's QuantTensor from its checkpoint tensors, validated. Raises CheckpointError naming a missing or misshapen tensor."""
    for part, dtype in ((CODES, torch.uint8), (SCALES, spec.checkpoint_scale_dtype), (FACTOR, torch.float32)):
        tensor = tensors.get(f"{name}.{part}")
        if tensor is None:
            raise CheckpointError(f"tensor '{name}.{part}' is missing", where=name, remedy=INCOMPLETE)
        if tensor.dtype != dtype:
            raise CheckpointError(f"'{name}.{part}' has dtype {tensor.dtype}, this layout stores {dtype}", where=name)
    factor = _scalar(f"{name}.{FACTOR}", tensors[f"{name}.{FACTOR}"])
    try:
        out = QuantTensor(
            codes=tensors[f"{name}.{CODES}"], scales=tensors[f"{name}.{SCALES}"].view(torch.uint8), tensor_scale=factor, format=spec
        )
    except FormatError as error:
        raise CheckpointError(error.what, where=name) from None
    out.validate(name)
    return out


def _scalar(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A scale factor as float32 []; kernels divide by it, so subnormal numbers are refused with zero, NaN and infinity."""
    if tensor.numel() != 1 or tensor.dtype != torch.float32:
        raise CheckpointError(f"has shape {list(tensor.shape)} and dtype {tensor.dtype}, expected one float32", where=name)
    value = tensor.reshape(())
    if not torch.finfo(torch.float32).tiny <= float(value) < float("inf"):
        raise CheckpointError(f"is {float(value):g}, which is no positive normal float32", where=name, remedy=REWRITE)
    return value


def module_names(tensors: Iterable[str]) -> list[str]:
    """Names of the quantized Linears among checkpoint tensor names: those with a block scale or a scalar, complete or not."""
    ends = (f".{SCALES}", f".{FACTOR}")
    return sorted({name.removesuffix(end) for name in tensors for end in ends if name.endswith(end)})


def require_complete(names: Iterable[str], where: str) -> list[str]:
    """`module_names` of a folder, after checking by names alone that every quantized Linear has all its tensors, that input scales are everywhere or
    nowhere, that no expert is missing, and that no tensor belongs to another layout. Raises CheckpointError with the names."""
    known = set(names)
    foreign = sorted(name for name in known if name.rsplit(".", 1)[-1] in _FOREIGN)
    if foreign:
        raise CheckpointError(
            f"'{foreign[0]}' is not of the plain NVFP4 layout", where=where, remedy="export the model again without it, as NVFP4"
        )
    modules = module_names(known)
    for name in modules:
        for part in (CODES, SCALES, FACTOR):
            if f"{name}.{part}" not in known:
                raise CheckpointError(f"tensor '{name}.{part}' is missing", where=where, remedy=INCOMPLETE)
    with_input = {name.removesuffix(f".{INPUT}") for name in known if name.endswith(f".{INPUT}")}
    lacking = [name for name in modules if name not in with_input]
    if with_input and lacking:
        raise CheckpointError(
            f"{len(lacking)} of {len(modules)} quantized modules have no {INPUT}: {', '.join(lacking[:8])}",
            where=where,
            remedy=f"calibrate them all, or remove every {INPUT} to declare the checkpoint weight-only",
        )
    surplus = sorted(with_input - set(modules))
    if surplus:
        raise CheckpointError(f"'{surplus[0]}.{INPUT}' belongs to no quantized module", where=where, remedy=INCOMPLETE)
    _require_experts(modules, where)
    return modules


def _require_experts(modules: list[str], where: str) -> None:
    """Experts are quantized all or none, each part for itself: missing ids are named (field case FMT-06)."""
    found: dict[tuple[str, str], set[int]] = {}
    for name in modules:
        if match := _EXPERT.match(name):
            found.setdefault((match["experts"], match["part"]), set()).add(int(match["index"]))
    ids: dict[str, set[int]] = {}
    for (experts, _), some in found.items():
        ids.setdefault(experts, set()).update(some)
    for (experts, part), some in found.items():
        missing = sorted(set(range(max(ids[experts]) + 1)) - some)
        if missing:
            raise CheckpointError(f"{part} of experts {missing} is missing", where=f"{where}: {experts}", remedy=INCOMPLETE)


def quantization_config(plan: QuantPlan, *, weight_only: bool = True) -> dict[str, Any]:
    """The `quantization_config` of config.json for a plan whose every entry is NVFP4; other formats raise FormatError."""
    _require_nvfp4(plan)
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4.block}
    group = {"weights": numbers} if weight_only else {"input_activations": dict(numbers), "weights": numbers}
    return {
        "quant_method": "modelopt",
        "quant_algo": WEIGHT_ONLY if weight_only else ALGORITHM,
        "config_groups": {"group_0": {**group, "targets": ["Linear"]}},
        "ignore": plan.ignored_linears,
        "producer": {"name": "prism-ray", "version": __version__},
    }


def quant_config(plan: QuantPlan, *, weight_only: bool = True) -> dict[str, Any]:
    """`hf_quant_config.json` for the same plan."""
    _require_nvfp4(plan)
    return {
        "producer": {"name": "prism-ray", "version": __version__},
        "quantization": {
            "quant_algo": WEIGHT_ONLY if weight_only else ALGORITHM,
            "kv_cache_quant_algo": None,
            "group_size": NVFP4.block,
            "exclude_modules": plan.ignored_linears,
        },
    }


def _require_nvfp4(plan: QuantPlan) -> None:
    names = sorted({entry.format for entry in plan.entries} - {NVFP4.name})
    if names:
        raise FormatError(f"a ModelOpt NVFP4 checkpoint cannot hold {', '.join(names)}", remedy="plan every layer as nvfp4")


def _algorithm(config: Mapping[str, Any] | None, quant_config: Mapping[str, Any] | None, where: str) -> str:
    """The one quant_algo of both files; CheckpointError where they contradict each other or name what cannot be read."""
    # Some exporters put the old nested form into config.json as well.
    inner = None if config is None else config.get("quantization", config)
    sections = [section for section in (inner, None if quant_config is None else quant_config.get("quantization")) if section is not None]
    algorithms = {str(section.get("quant_algo")).upper() for section in sections if isinstance(section, Mapping)}
    if len(algorithms) != 1:
        found = " and ".join(sorted(algorithms)) or "nothing"
        raise CheckpointError(f"config.json and {CONFIG_NAME} name {found} as quant_algo", where=where, remedy="mend one of the two files")
    algorithm = algorithms.pop()
    if algorithm not in (ALGORITHM, WEIGHT_ONLY):
        raise CheckpointError(
            f"ModelOpt quant_algo '{algorithm}' cannot be read", where=where, remedy=f"readable: {ALGORITHM}, {WEIGHT_ONLY}"
        )
    for section in sections:
        sizes = [
            section.get("group_size"),
            *(group.get("weights", {}).get("group_size") for group in section.get("config_groups", {}).values()),
        ]
        wrong = [size for size in sizes if size not in (None, NVFP4.block)]
        if wrong:
            raise CheckpointError(f"group_size {wrong[0]} is not NVFP4's {NVFP4.block}", where=where, remedy="export the model again")
    return algorithm


def read_configs(folder: Path | str) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """(`quantization_config` of config.json, hf_quant_config.json), each None where absent, after checking that they can be read and agree."""
    # Not at import time: `checkpoint` may dispatch to this module.
    from prism_ray.formats.checkpoint import read_config

    config = read_config(folder).get("quantization_config")
    path = Path(folder) / CONFIG_NAME
    quant_config = None
    if path.is_file():
        try:
            quant_config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"is not valid JSON ({one_line(error)})", where=str(path), remedy=REWRITE) from None
    method = None if config is None else str(config.get("quant_method"))
    if (config is None and quant_config is None) or (method is not None and method not in ("modelopt", "modelopt_fp4")):
        raise CheckpointError(f"quantization '{method}' is not ModelOpt's", where=str(folder), remedy="read it with its own reader")
    _algorithm(config, quant_config, str(folder))
    return config, quant_config


def excluded(config: Mapping[str, Any] | None, quant_config: Mapping[str, Any] | None) -> list[str]:
    """The exclude patterns (shell wildcards over module names) of both files."""
    patterns = [] if config is None else list(config.get("quantization", config).get("exclude_modules") or config.get("ignore") or [])
    return patterns + ([] if quant_config is None else list(quant_config.get("quantization", {}).get("exclude_modules") or []))


def require_excluded_plain(
    config: Mapping[str, Any] | None, quant_config: Mapping[str, Any] | None, modules: Iterable[str], where: str
) -> None:
    """Raise CheckpointError when an exclude pattern names a module that is packed (field case FMT-09)."""
    for pattern in excluded(config, quant_config):
        for name in modules:
            if fnmatch.fnmatchcase(name, pattern):
                raise CheckpointError(
                    f"the exclude list has '{pattern}', but the files hold '{name}' packed",
                    where=where,
                    remedy="one of the two is wrong: export the model again, or mend the list",
                )


def read_quantized(folder: Path | str) -> ModelOptCheckpoint:
    """Read and check a ModelOpt NVFP4 folder. Raises CheckpointError naming what is missing, foreign, or excluded and packed all the same (FMT-09)."""
    config, quant_config = read_configs(folder)
    tensors = dict(read_tensors(folder))
    modules = require_complete(tensors, str(folder))
    require_excluded_plain(config, quant_config, modules, str(folder))
    inputs = {name: tensors[f"{name}.{INPUT}"] for name in modules if f"{name}.{INPUT}" in tensors}
    for name, scale in inputs.items():
        _scalar(f"{name}.{INPUT}", scale)
    shapes = {tuple(tensors[f"{name}.{FACTOR}"].shape) for name in modules}
    if len(shapes) > 1:
        raise CheckpointError(f"{FACTOR} is stored in the shapes {sorted(shapes)}, expected one", where=str(folder), remedy=REWRITE)
    used = {f"{name}.{part}" for name in modules for part in (CODES, SCALES, FACTOR, INPUT)}
    for name, tensor in tensors.items():
        if name not in used and name.endswith(f".{CODES}") and tensor.dtype == torch.uint8:
            raise CheckpointError(f"tensor '{name.removesuffix(CODES)}{SCALES}' is missing", where=str(folder), remedy=INCOMPLETE)
    return ModelOptCheckpoint(
        quantized={name: from_checkpoint(name, tensors) for name in modules},
        plain={name: tensor for name, tensor in tensors.items() if name not in used},
        input_scales=inputs,
        config=config,
        quant_config=quant_config,
        scalar_shape=shapes.pop() if shapes else (),
    )


def write_quantized(
    folder: Path | str,
    checkpoint: ModelOptCheckpoint,
    config: Mapping[str, Any],
    *,
    details: dict[str, Any] | None = None,
    replace: bool = False,
) -> dict[str, Any]:
    """Write a ModelOpt NVFP4 folder (config.json, hf_quant_config.json, shards, manifest.json); returns its manifest.

    config: the model's config.json; its quantization_config is replaced. details: extra manifest fields. The same checks as for reading come first.
    Raises FileExistsError without `replace`, ResourceError when the disk is too small.
    """
    from prism_ray.formats.checkpoint import KIND

    algorithm = _algorithm(checkpoint.config, checkpoint.quant_config, str(folder))
    tensors = checkpoint.tensors()
    require_complete(tensors, str(folder))
    require_disk(folder, int(1.05 * sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())), "the quantized checkpoint")
    with atomic_folder(folder, replace=replace) as temporary:
        settings = {} if checkpoint.config is None else {"quantization_config": checkpoint.config}
        write_json(temporary / "config.json", {name: value for name, value in config.items() if name != "quantization_config"} | settings)
        if checkpoint.quant_config is not None:
            write_json(temporary / CONFIG_NAME, checkpoint.quant_config)
        write_shards(temporary, tensors)
        fields = {
            "format": NVFP4.name,
            "layout": f"modelopt-{algorithm.lower()}",
            "packing": PACKING,
            "code_plane": code_plane_fingerprint(checkpoint.quantized),
            "scale_plane": scale_plane_fingerprint(checkpoint.quantized),
            **(details or {}),
        }
        return write_manifest(temporary, KIND, **fields)
