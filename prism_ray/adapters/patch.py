"""Patches: a byte plane as its difference from a base plane that the receiver has (scale-qlora §5.2, B.4).

A plane is {layer: uint8 [..., O, G]}. The patch predicts the target and stores what the prediction leaves (`residual`); of three predictions the one with
the smallest patch is taken:

| prediction | what the patch holds besides the residual |
|---|---|
| base | nothing: the bytes of the base plane |
| factors | A [r, G] and B [O, r] as the adapter stores them; the plane is `qast.effective_scales` of them, and the residual empty |
| narrow | A and B rounded to 4 to 8 bits times a power of two for each rank; the residual mends the few bytes that this moves |

`factors` is taken only where it gives the target byte for byte. Narrow factors have the width, layer by layer, at which they and the residual together
have the least zeroth-order entropy; a layer that is cheaper without them is predicted by its base. They are integers times powers of two, so their
product is exact in float64 and every machine predicts the same bytes. The same function makes the patch of a weight-space merge from planes that hold codes and scales (`weight_planes`).

File: magic, header length, JSON header, factors and residual as zstd frames, and the SHA-256 of all that. The header has the SHA-256 of the base plane and of the
result: a patch that is cut, changed, or put on another base is refused, and a result with another SHA-256 is never returned.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from prism_ray.adapters.qast import effective_scales
from prism_ray.adapters.residual import LEVEL, Bytes, compress, decode_residual, decompress, encode_residual
from prism_ray.core.digests import sha256_tensors
from prism_ray.core.errors import CheckpointError, FingerprintMismatch, FormatError, one_line
from prism_ray.formats.spec import FORMATS, FormatSpec
from prism_ray.formats.tensor import QuantTensor

MAGIC = b"PRPATCH\x01"
MAJOR, MINOR = 1, 0
NARROW_BITS = (8, 7, 6, 5, 4)
_DIGEST_BYTES = 32
_MOST_HEADER_BYTES = 1 << 26
_FETCH = "fetch the patch again"
Plane = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Factors:
    """What an adapter trained: layer -> (A [r, G], B [O, r], scaling), and the format whose grid its scales are on."""

    layers: Mapping[str, tuple[torch.Tensor, torch.Tensor, float]]
    format: FormatSpec


@dataclass(frozen=True, kw_only=True)
class PatchInfo:
    """The header of a patch. model: base, factors or narrow; factored: layers predicted from factors; kinds: coding of each residual segment;
    plane_bytes: bytes of the target."""

    model: str
    factored: int
    kinds: tuple[str, ...]
    bytes: int
    plane_bytes: int
    base_sha256: str
    result_sha256: str


def encode_patch(
    base: Plane, target: Plane, *, factors: Factors | None = None, level: int = LEVEL, kinds: tuple[str, ...] | None = None
) -> bytes:
    """The smallest patch that makes `target` of `base`. kinds: residual codings to choose from, all by default.

    Every layer of `target` must be in `base` with its shape; layers that `target` lacks are not in the result. Raises FormatError otherwise.
    """
    _require_planes(base, target)
    names = sorted(target)
    wanted, plain = _flat(target, names), _flat(base, names)
    common: dict[str, Any] = {
        "format_version": f"{MAJOR}.{MINOR}",
        "base_sha256": sha256_tensors(base.items()),
        "result_sha256": sha256_tensors(target.items()),
        "layers": None if names == sorted(base) else names,
        "plane_bytes": len(wanted),
    }

    def patch(model: dict[str, Any], stored: bytes, prediction: Bytes) -> bytes:
        segments, residual = encode_residual(prediction, wanted, level=level, kinds=kinds)
        body = compress(stored, level) if stored else b""
        return _pack(common | {"model": model, "kinds": segments, "factor_bytes": len(body), "factor_size": len(stored)}, body + residual)

    found = [patch({"kind": "base"}, b"", plain)]
    for model, tensors in _models(factors, base, target) if factors is not None else []:
        prediction = _predict(model, tensors, base, names)
        if model["kind"] == "narrow" or np.array_equal(prediction, wanted):
            found.append(patch(model, save(tensors), prediction))
    smallest = min(found, key=len)
    # Proved on the bytes that are handed out, not on the parts they were made of.
    decode_patch(smallest, base)
    return smallest


def decode_patch(data: bytes, base: Plane) -> dict[str, torch.Tensor]:
    """The target plane. Raises CheckpointError for a truncated, changed or newer patch, FingerprintMismatch for another base than it was made for."""
    header, body = _unpack(data)
    if sha256_tensors(base.items()) != header["base_sha256"]:
        raise FingerprintMismatch("the patch was made for another base plane", where="patch", remedy="use the base that it was made for")
    try:
        names = sorted(base) if header["layers"] is None else [str(name) for name in header["layers"]]
        stored = int(header["factor_bytes"])
        model = dict(header["model"])
        tensors = load(decompress(body[:stored], int(header["factor_size"]))) if stored else {}
        prediction = _predict(model, tensors, base, names)
        flat = decode_residual(prediction, [str(kind) for kind in header["kinds"]], body[stored:])
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError, SafetensorError) as error:
        raise CheckpointError(f"is no patch of ours ({one_line(error)})", where="patch", remedy=_FETCH) from None
    result: dict[str, torch.Tensor] = {}
    position = 0
    for name in names:
        size = base[name].numel()
        result[name] = torch.from_numpy(flat[position : position + size].copy()).reshape(base[name].shape)
        position += size
    if sha256_tensors(result.items()) != header["result_sha256"]:
        raise CheckpointError("the result has another SHA-256 than the patch says", where="patch", remedy=_FETCH)
    return result


def read_patch(data: bytes) -> PatchInfo:
    """What a patch says of itself, after its SHA-256 was checked."""
    header, _ = _unpack(data)
    try:
        model = header["model"]
        return PatchInfo(
            model=str(model["kind"]),
            factored=len(model.get("scaling", ())),
            kinds=tuple(str(kind) for kind in header["kinds"]),
            bytes=len(data),
            plane_bytes=int(header["plane_bytes"]),
            base_sha256=str(header["base_sha256"]),
            result_sha256=str(header["result_sha256"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"is no patch of ours ({one_line(error)})", where="patch", remedy=_FETCH) from None


def weight_planes(tensors: Mapping[str, QuantTensor]) -> dict[str, torch.Tensor]:
    """Codes and scales of quantized weights as one plane, for patches of merges that change both."""
    return {f"{name}.{part}": getattr(tensor, part) for name, tensor in tensors.items() for part in ("codes", "scales")}


def _require_planes(base: Plane, target: Plane) -> None:
    for name, tensor in target.items():
        if name not in base:
            raise FormatError("the base plane has no such layer", where=name, remedy="use the base that the adapter was trained on")
        if tensor.shape != base[name].shape or tensor.dtype != torch.uint8 or base[name].dtype != torch.uint8:
            raise FormatError(
                f"the base plane has {base[name].dtype} {list(base[name].shape)}, the target {tensor.dtype} {list(tensor.shape)}",
                where=name,
                remedy="use the base that the adapter was trained on",
            )


def _flat(plane: Plane, names: list[str]) -> Bytes:
    parts = [plane[name].detach().cpu().contiguous().reshape(-1).numpy() for name in names]
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)


def _models(factors: Factors, base: Plane, target: Plane) -> list[tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    """(header entry, tensors) of the predictions by factors: as they are stored, and narrowed."""
    layers = {name: factors.layers[name] for name in sorted(target) if name in factors.layers}
    if not layers:
        return []
    exact: dict[str, torch.Tensor] = {}
    narrow: dict[str, torch.Tensor] = {}
    for name, (a, b, scaling) in layers.items():
        exact |= {f"{name}.A": a.detach().cpu().contiguous(), f"{name}.B": b.detach().cpu().contiguous()}
        if bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
            narrow |= _narrowest(name, factors.format, base[name].cpu(), target[name].cpu(), a, b, scaling)
    scalings = {name: scaling for name, (_, _, scaling) in layers.items()}
    out: list[tuple[dict[str, Any], dict[str, torch.Tensor]]] = [
        ({"kind": "factors", "format": factors.format.name, "scaling": scalings}, exact)
    ]
    if narrow:
        kept = {name: scaling for name, scaling in scalings.items() if f"{name}.A" in narrow}
        out.append(({"kind": "narrow", "format": factors.format.name, "scaling": kept}, narrow))
    return out


def _narrowest(
    name: str, spec: FormatSpec, base: torch.Tensor, target: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float
) -> dict[str, torch.Tensor]:
    """The narrow factors of one layer that cost least together with their residual; none where the base alone costs less."""
    least, best = _entropy_bytes(target - base), {}
    for bits in NARROW_BITS:
        tensors = dict(zip(("A", "a", "B", "b"), (*_narrow(a, bits, -1), *_narrow(b, bits, -2)), strict=True))
        predicted = effective_scales(base, _widen(tensors, "A"), _widen(tensors, "B"), scaling, spec)
        cost = _entropy_bytes(target - predicted) + sum(_entropy_bytes(tensor) for tensor in tensors.values())
        if cost < least:
            least, best = cost, {f"{name}.{part}": tensor for part, tensor in tensors.items()}
    return best


def _entropy_bytes(values: torch.Tensor) -> float:
    """Zeroth-order entropy of a tensor of bytes, in bytes: what an ideal coder of single symbols needs."""
    counts = torch.bincount(values.contiguous().view(torch.uint8).reshape(-1).int(), minlength=256).double()
    share = counts[counts > 0] / max(values.numel(), 1)
    return float(-(share * share.log2()).sum() * values.numel() / 8)


def _widen(tensors: Mapping[str, torch.Tensor], part: str) -> torch.Tensor:
    """Narrow factors as float64, exactly."""
    return tensors[part].double() * torch.exp2(tensors[part[:-1] + part[-1].lower()].double())


def _narrow(factor: torch.Tensor, bits: int, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(integers int8 of the factor's shape, exponents int8 with `axis` of length 1): factor ~ integers * 2^exponents."""
    factor = factor.detach().cpu().to(torch.float64)
    largest = factor.abs().amax(axis, keepdim=True)
    limit = 2 ** (bits - 1) - 1
    exponents = torch.where(largest > 0, torch.ceil(torch.log2(largest / limit)), torch.zeros_like(largest)).clamp(-127, 127)
    integers = (factor / torch.exp2(exponents)).round().clamp(-limit, limit)
    return integers.to(torch.int8), exponents.to(torch.int8)


def _predict(model: dict[str, Any], tensors: Mapping[str, torch.Tensor], base: Plane, names: list[str]) -> Bytes:
    """The predicted plane, flat; a layer without factors is predicted by the base."""
    if model["kind"] == "base":
        return _flat(base, names)
    if model["kind"] not in ("factors", "narrow"):
        raise ValueError(f"unknown prediction '{model['kind']}'")
    spec = FORMATS[model["format"]]
    predicted: dict[str, torch.Tensor] = {}
    for name in names:
        scaling = model["scaling"].get(name)
        if scaling is None:
            predicted[name] = base[name]
            continue
        if not math.isfinite(scaling):
            raise ValueError(f"scaling of '{name}' is not finite")
        a, b = tensors[f"{name}.A"], tensors[f"{name}.B"]
        if model["kind"] == "narrow":
            a, b = _widen(tensors, f"{name}.A"), _widen(tensors, f"{name}.B")
        predicted[name] = effective_scales(base[name].cpu(), a, b, float(scaling), spec)
        if predicted[name].shape != base[name].shape:
            raise ValueError(f"factors of '{name}' have other shapes than the plane")
    return _flat(predicted, names)


def _pack(header: dict[str, Any], body: bytes) -> bytes:
    text = compress(json.dumps(header, sort_keys=True, separators=(",", ":")).encode())
    whole = MAGIC + struct.pack("<I", len(text)) + text + body
    return whole + hashlib.sha256(whole).digest()


def _unpack(data: bytes) -> tuple[dict[str, Any], bytes]:
    """(header, body) after the patch's own SHA-256 was checked."""
    if len(data) < len(MAGIC) + 4 + _DIGEST_BYTES or data[: len(MAGIC) - 1] != MAGIC[:-1]:
        raise CheckpointError("is no patch", where="patch", remedy=_FETCH)
    if hashlib.sha256(data[:-_DIGEST_BYTES]).digest() != data[-_DIGEST_BYTES:]:
        raise CheckpointError("is truncated or changed: its SHA-256 differs", where="patch", remedy=_FETCH)
    if data[len(MAGIC) - 1] != MAGIC[-1]:
        raise CheckpointError(
            f"format version {data[len(MAGIC) - 1]} is not readable by this release (reads {MAJOR})",
            where="patch",
            remedy="update prism-ray",
        )
    length = struct.unpack_from("<I", data, len(MAGIC))[0]
    begin = len(MAGIC) + 4
    try:
        header = json.loads(decompress(data[begin : begin + length], _MOST_HEADER_BYTES))
    except ValueError as error:
        raise CheckpointError(f"its header is no JSON ({one_line(error)})", where="patch", remedy=_FETCH) from None
    if not isinstance(header, dict) or not {"base_sha256", "result_sha256", "layers", "model", "kinds", "factor_bytes"} <= set(header):
        raise CheckpointError("its header is incomplete", where="patch", remedy=_FETCH)
    return header, data[begin + length : -_DIGEST_BYTES]
