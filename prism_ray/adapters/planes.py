"""Scale planes apart from their codes: the bytes an adapter brings, the base they are for, and the on-grid delta between two of them.

A `ScalePlane` is a set of scale bytes by Linear name, as a checkpoint names them: the experts of a fused weight [E, O, I] one by one, gate and up apart
(`experts.3.gate_proj`). An adapter that touches some experts holds those only. A file that names fused weights (`adapters.scale_plane`) is cut into these.

    on-grid delta:  { (p, old[p], new[p]) : old[p] != new[p] },  p = flat byte position in one layer's [O, G * width]      (scale-qlora B.3)

Nothing is subtracted: replacing old by new is the merge, new by old the rollback, and both give stored bytes (field case ADP-02). Positions are int64,
bytes uint8; the file is safetensors with three tensors a layer, `N.position`, `N.old`, `N.new`.

Refused: a layer the base does not have, another shape or dtype, a byte that is illegal on the grid (NaN, the sign bit of E4M3, 255 in E8M0), and a
byte that gives a scale to a block whose base scale is 0 (its codes are zero; field case FMT-04).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from prism_ray.adapters.folder import printable, printable_text
from prism_ray.adapters.scale_plane import EXPERTS, SCALE_PLANE_NAME, base_planes, require_numbers, tokenizer_digest
from prism_ray.core.digests import sha256_tensors
from prism_ray.core.errors import CheckpointError, FormatError, PrismError, one_line
from prism_ray.core.files import atomic_path
from prism_ray.core.manifest import MANIFEST_NAME, read_manifest
from prism_ray.formats import compressed_tensors as convention
from prism_ray.formats.checkpoint import KIND, read_quantized
from prism_ray.formats.config_groups import FUSED_PARTS
from prism_ray.formats.grids import require_legal
from prism_ray.formats.safetensors_io import REWRITE, read_safetensors_header, read_tensors
from prism_ray.formats.tensor import QuantTensor, code_plane_fingerprint, scale_plane_fingerprint

POSITION, OLD, NEW = "position", "old", "new"
NAMED = 3


@dataclass(frozen=True, kw_only=True)
class BasePlanes:
    """A base as admission sees it. quantized: every weight by Linear name, with the base's own scales; code_plane, scale_plane: fingerprints;
    scale_rule, tokenizer: of its manifest and tokenizer files, None where unknown; where: how messages call it."""

    where: str
    quantized: Mapping[str, QuantTensor]
    code_plane: str
    scale_plane: str
    scale_rule: str | None = None
    tokenizer: str | None = None

    @classmethod
    def from_checkpoint(cls, folder: Path | str) -> BasePlanes:
        """Memory-mapped planes of a compressed-tensors folder; the fingerprints are taken from the bytes, never from the manifest."""
        folder = Path(folder)
        _, quantized, _ = read_quantized(folder)
        manifest = read_manifest(folder, KIND, verify=False) if (folder / MANIFEST_NAME).is_file() else {}
        return cls.of(quantized, str(folder), scale_rule=manifest.get("scale_rule"), tokenizer=tokenizer_digest(folder))

    @classmethod
    def from_model(cls, model: torch.nn.Module) -> BasePlanes:
        """The planes of a live model (views), with the scales that it had before any adapter."""
        fused = base_planes(model)
        return cls(
            where=type(model).__name__,
            quantized=cut_experts(model, fused),
            code_plane=code_plane_fingerprint(fused),
            scale_plane=scale_plane_fingerprint(fused),
        )

    @classmethod
    def of(
        cls, quantized: dict[str, QuantTensor], where: str, *, scale_rule: str | None = None, tokenizer: str | None = None
    ) -> BasePlanes:
        """From planes by Linear name."""
        fused = convention.fuse_experts(quantized)
        return cls(
            where=where,
            quantized=quantized,
            code_plane=code_plane_fingerprint(fused),
            scale_plane=scale_plane_fingerprint(fused),
            scale_rule=scale_rule,
            tokenizer=tokenizer,
        )

    def with_scales(self, scales: Mapping[str, torch.Tensor]) -> BasePlanes:
        """The same codes under other scales for the layers in `scales`."""
        quantized = {name: tensor.with_scales(scales[name]) if name in scales else tensor for name, tensor in self.quantized.items()}
        return replace(self, quantized=quantized, scale_plane=scale_plane_fingerprint(convention.fuse_experts(quantized)))

    def scales(self) -> ScalePlane:
        """The whole scale plane."""
        return ScalePlane({name: tensor.scales for name, tensor in self.quantized.items()})


def cut_experts(model: torch.nn.Module, tensors: Mapping[str, QuantTensor]) -> dict[str, QuantTensor]:
    """Planes of a model by Linear name: fused experts become one entry for each expert and part (views, no copy)."""
    stored = convention.stored_parts(model) if any(len(tensor.shape) > 2 for tensor in tensors.values()) else FUSED_PARTS
    out: dict[str, QuantTensor] = {}
    for name, tensor in tensors.items():
        out |= {name: tensor} if len(tensor.shape) == 2 else dict(convention.split_experts(name, tensor, stored))
    return out


def read_planes_file(path: Path) -> dict[str, torch.Tensor]:
    """Tensors of one safetensors file after the header check; whatever is wrong with it raises CheckpointError in one line."""
    try:
        read_safetensors_header(path)
        return load_file(path)
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"cannot be read ({printable_text(one_line(error))})", where=str(path), remedy=REWRITE) from None
    except PrismError as error:
        # A header's own names may hold line breaks.
        raise CheckpointError(printable_text(error.what), where=str(path), remedy=error.remedy) from None


@dataclass(frozen=True)
class ScalePlane:
    """tensors: uint8 [O, G * width] by Linear name, or as `adapters.scale_plane` stores fused weights: [E', O, G * width] and the table `N.experts`."""

    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def read(cls, folder: Path | str) -> ScalePlane:
        """`scale_plane.safetensors` of an adapter folder."""
        return cls(read_planes_file(Path(folder) / SCALE_PLANE_NAME))

    @classmethod
    def from_checkpoint(cls, folder: Path | str) -> ScalePlane:
        """All scale bytes of a compressed-tensors folder."""
        return cls({name: tensor.scales for name, tensor in read_quantized(folder)[1].items()})

    @classmethod
    def stored(cls, folder: Path | str) -> ScalePlane:
        """As `from_checkpoint`, without asking whether the bytes are legal: what lies there, to be replaced."""
        suffix = f".{convention.SCALES}"
        found = {name.removesuffix(suffix): tensor for name, tensor in read_tensors(folder) if name.endswith(suffix)}
        return cls({name: tensor.contiguous().view(torch.uint8) for name, tensor in found.items()})

    def digest(self) -> str:
        """SHA-256 over names, shapes and bytes."""
        return sha256_tensors(self.tensors.items())

    def layers(self) -> set[str]:
        """Names of the weights, without the tables of experts."""
        return {name for name in self.tensors if name.removesuffix(EXPERTS) not in self.tensors or not name.endswith(EXPERTS)}

    def by_linear(self, names: Mapping[str, torch.Tensor]) -> ScalePlane:
        """The same plane with fused weights cut into the Linears of `names` (base name -> base scales); entries that do not fit stay for `require_fit`."""
        out = dict(self.tensors)
        whole = expert_parts(names)
        for name, tensor in self.tensors.items():
            if name in names or name not in whole or tensor.ndim != 3:
                continue
            table = self.tensors.get(f"{name}{EXPERTS}")
            if table is not None:
                require_numbers(table, len(whole[name]), f"{name}{EXPERTS}")
            numbers = table.tolist() if table is not None else list(range(len(whole[name])))
            rows = [names[part].shape[0] for part in whole[name][0]]
            if len(numbers) != tensor.shape[0] or sum(rows) != tensor.shape[1]:
                continue
            out.pop(name)
            out.pop(f"{name}{EXPERTS}", None)
            for index, expert in enumerate(numbers):
                out |= dict(zip(whole[name][expert], tensor[index].split(rows), strict=True))
        return ScalePlane(out)

    def require_fit(self, base: Mapping[str, QuantTensor], where: str) -> None:
        """Raise CheckpointError for surplus layers (the first few named), shapes or dtypes, FormatError for bytes that the grid or the base forbids."""
        surplus = sorted(set(self.tensors) - set(base))
        if surplus:
            raise CheckpointError(
                f"{len(surplus)} of {len(self.tensors)} layer(s) belong to no quantized layer of the base: {name_some(surplus)}",
                where=where,
                remedy="use the base it was trained on",
            )
        if not self.tensors:
            raise CheckpointError("the scale plane holds no layer", where=where, remedy="train it on at least one quantized layer")
        for name, data in self.tensors.items():
            old = base[name].scales
            if data.dtype != torch.uint8 or data.shape != old.shape:
                raise CheckpointError(
                    f"scales are {data.dtype} {list(data.shape)}, the base has torch.uint8 {list(old.shape)}",
                    where=name,
                    remedy="use the base it was trained on",
                )
            grid = base[name].format.grid
            require_legal(grid, data, name)
            revived = (grid.decode(old.cpu()) == 0) & (grid.decode(data.cpu()) != 0)
            if bool(revived.any()):
                raise FormatError(
                    f"the scale at {revived.nonzero()[0].tolist()} is 0 in the base and not in the plane",
                    where=name,
                    remedy="mask blocks of scale 0: their codes carry nothing",
                )


def expert_parts(names: Iterable[str]) -> dict[str, list[list[str]]]:
    """Fused weight -> for each expert, ascending, the Linears it is stored as, in the order in which they are stacked."""
    found: dict[str, dict[int, list[str]]] = {}
    for linear, whole in convention.fused_names(names).items():
        if linear != whole:
            found.setdefault(whole, {}).setdefault(int(linear.rsplit(".", 2)[1]), []).append(linear)
    return {whole: [sorted(experts[index], key=_is_up) for index in sorted(experts)] for whole, experts in found.items()}


def _is_up(name: str) -> bool:
    return name.endswith((".up_proj", ".w3"))


def name_some(names: list[str]) -> str:
    """The first few of some names, on one line; names from files may hold anything."""
    shown = ", ".join(printable(name) for name in names[:NAMED])
    return shown + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


@dataclass(frozen=True, kw_only=True)
class LayerDelta:
    """Changed bytes of one layer: position int64 [n] ascending, old and new uint8 [n]."""

    position: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor


@dataclass(frozen=True)
class OnGridDelta:
    """The changed bytes by Linear name; a layer without any is not in it."""

    layers: Mapping[str, LayerDelta]

    @classmethod
    def between(cls, old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> OnGridDelta:
        """What turns `old` into `new`; layers of `new` only."""
        layers: dict[str, LayerDelta] = {}
        for name in sorted(new):
            before, after = old[name].detach().cpu().reshape(-1), new[name].detach().cpu().reshape(-1)
            position = (before != after).nonzero().squeeze(-1)
            if position.numel():
                layers[name] = LayerDelta(position=position, old=before[position], new=after[position])
        return cls(layers)

    @property
    def changed(self) -> int:
        """Number of changed bytes."""
        return sum(layer.position.numel() for layer in self.layers.values())

    def inverse(self) -> OnGridDelta:
        """The delta of the way back."""
        return OnGridDelta({name: LayerDelta(position=layer.position, old=layer.new, new=layer.old) for name, layer in self.layers.items()})

    def applied_to(self, planes: Mapping[str, torch.Tensor], where: str) -> dict[str, torch.Tensor]:
        """New tensors of the changed layers. Raises CheckpointError where a byte is not the delta's old one: the planes were changed since."""
        out: dict[str, torch.Tensor] = {}
        for name, layer in self.layers.items():
            flat = planes[name].detach().cpu().clone().reshape(-1) if name in planes else torch.empty(0, dtype=torch.uint8)
            inside = layer.position.numel() == 0 or 0 <= int(layer.position.min()) <= int(layer.position.max()) < flat.numel()
            if not inside or not torch.equal(flat[layer.position], layer.old):
                raise CheckpointError(
                    "bytes under the on-grid delta are not those that it was made from",
                    where=f"{where}: {name}",
                    remedy="restore from the base's own scale plane",
                )
            flat[layer.position] = layer.new
            out[name] = flat.reshape(planes[name].shape)
        return out

    def write(self, path: Path | str) -> None:
        """Write the delta as one safetensors file, atomically."""
        tensors: dict[str, torch.Tensor] = {}
        for name, layer in self.layers.items():
            tensors |= {f"{name}.{POSITION}": layer.position, f"{name}.{OLD}": layer.old, f"{name}.{NEW}": layer.new}
        with atomic_path(path) as temporary:
            save_file(tensors, temporary)

    @classmethod
    def read(cls, path: Path | str) -> OnGridDelta:
        """Read and check a written delta; CheckpointError for anything that `write` would not have written."""
        tensors = read_planes_file(Path(path))
        names = sorted({name.rpartition(".")[0] for name in tensors})
        layers: dict[str, LayerDelta] = {}
        for name in names:
            position, old, new = (tensors.get(f"{name}.{part}") for part in (POSITION, OLD, NEW))
            if position is None or old is None or new is None or position.dtype != torch.int64 or {old.dtype, new.dtype} != {torch.uint8}:
                raise CheckpointError(f"is no on-grid delta of {name_some([name])}", where=Path(path).name, remedy="copy it again")
            if not position.ndim == old.ndim == new.ndim == 1 or not position.shape == old.shape == new.shape:
                raise CheckpointError(f"has uneven parts for {name_some([name])}", where=Path(path).name, remedy="copy it again")
            layers[name] = LayerDelta(position=position, old=old, new=new)
        if len(tensors) != 3 * len(layers):
            raise CheckpointError("holds tensors that belong to no on-grid delta", where=Path(path).name, remedy="copy it again")
        return cls(layers)
