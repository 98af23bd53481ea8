"""Units of solving: what one owner quantizes at a time, who owns it, and how its planes are kept on disk.

A unit is an input group of Linear modules, or a run of experts of one fused projection; for a method that chooses factors to fold it is the whole block, because a weight is then rounded
under factors that other units' statistics have chosen. Owners are chosen greedily by cost, the dearest unit first, each to the worker with the
least so far (longest processing time first). Cost: I^3 / 3 for the factor and 2 O I^2 (1 + refine) for the sweep and its refinements, in multiplications, an expert each.

A solved unit is one safetensors file with `<weight>.codes`, `.scales`, `.tensor_scale` and, where the format has one, `.divisor`; experts are stored by
their number, `<weight>.<expert>`. Plain tensors of the block that factors were folded into are `plain.<parameter>`. Its records lie beside it as JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from prism_ray.core.files import atomic_path, write_json
from prism_ray.formats.fusion import fused_groups
from prism_ray.formats.modules import FP4Experts
from prism_ray.formats.spec import FORMATS
from prism_ray.formats.tensor import QuantTensor
from prism_ray.hessian.capture import InputGroup
from prism_ray.hessian.state import GramState
from prism_ray.quantizers.base import Factors, Member, QuantizerOptions, TensorRecord
from prism_ray.quantizers.methods import METHODS

EXPERTS_AT_ONCE = 8
"""Experts swept side by side: their float32 copies and factors are in memory together."""
PLAIN = "plain."
"""What the name of a plain tensor begins with in a part file; no weight below a block is called so."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """members: weight paths below the block (for experts the fused parameter). rows: output rows of all members. experts: numbers of the experts, empty for Linear modules.

    parts: units that are solved together, empty for one that is solved alone.
    """

    name: str
    group: str
    members: tuple[str, ...]
    width: int
    rows: int
    experts: tuple[int, ...] = ()
    parts: tuple[Unit, ...] = ()

    @property
    def keys(self) -> list[str]:
        """Keys of the states it needs."""
        if self.parts:
            return [key for part in self.parts for key in part.keys]
        return [f"{self.group}.{expert}" for expert in self.experts] if self.experts else [self.group]

    def cost(self, refine: int) -> float:
        """Multiplications of its solve."""
        if self.parts:
            return sum(part.cost(refine) for part in self.parts)
        one = self.width**3 / 3 + 2 * self.rows * self.width**2 * (1 + refine)
        return one * max(1, len(self.experts))


def make_units(block: nn.Module, groups: Sequence[InputGroup], *, together: bool = False) -> list[Unit]:
    """Units of a block in module order; experts in runs of EXPERTS_AT_ONCE. together: one unit of them all."""
    units: list[Unit] = []
    for group in groups:
        rows = sum(weight_of(block, name, 0 if group.experts else None).shape[0] for name in group.members)
        if not group.experts:
            units.append(Unit(name=group.name, group=group.name, members=group.members, width=group.width, rows=rows))
        for start in range(0, group.experts, EXPERTS_AT_ONCE):
            run = tuple(range(start, min(start + EXPERTS_AT_ONCE, group.experts)))
            name = f"{group.name}.{run[0]}-{run[-1]}"
            units.append(Unit(name=name, group=group.name, members=group.members, width=group.width, rows=rows, experts=run))
    if not together or not units:
        return units
    members = tuple(dict.fromkeys(name for unit in units for name in unit.members))
    width, rows = max(unit.width for unit in units), sum(unit.rows for unit in units)
    return [Unit(name="block", group="", members=members, width=width, rows=rows, parts=tuple(units))]


def assign(units: Sequence[Unit], workers: int, refine: int) -> list[list[Unit]]:
    """Units of each worker. The same for every run of the same units and workers."""
    loads = [0.0] * workers
    owned: list[list[Unit]] = [[] for _ in range(workers)]
    for unit in sorted(units, key=lambda unit: (-unit.cost(refine), unit.name)):
        owner = loads.index(min(loads))
        owned[owner].append(unit)
        loads[owner] += unit.cost(refine)
    return owned


def weight_of(block: nn.Module, name: str, expert: int | None) -> Tensor:
    """The weight [O, I] at a path below a block; expert: which one of a fused parameter."""
    parent = block.get_submodule(name.rpartition(".")[0])
    held = getattr(parent, name.rpartition(".")[2])
    if expert is None:
        weight: Tensor = held.weight
        return weight.data
    one: Tensor = held.data[expert]
    return one.T if getattr(parent, "is_transposed", False) else one


def solve(
    unit: Unit,
    block: nn.Module,
    prefix: str,
    formats: Mapping[str, str],
    states: Mapping[str, GramState],
    method: str,
    options: QuantizerOptions,
    factors: Mapping[str, Factors] | None = None,
) -> list[tuple[str, QuantTensor, TensorRecord]]:
    """Quantize a unit: (weight name below the block, planes, record), experts as `name.<expert>`.

    prefix: the block's path, for names in records. formats: format name of each weight path below the block. states: by key; a missing one is an
    expert that no row reached. factors: what is folded into each weight, by the names of the answer; none where one is missing.
    """
    chosen, factors = METHODS[method], factors or {}
    if not unit.experts:
        amax = _shared_amax(unit, block, formats, factors)
        members = [_member(block, prefix, name, None, formats[name], factors, amax.get(name)) for name in unit.members]
        # Members of one input may have several formats: each format is solved by itself.
        out: list[tuple[str, QuantTensor, TensorRecord]] = []
        for spec in dict.fromkeys(member.spec for member in members):
            same = [member for member in members if member.spec is spec]
            solved = chosen.run(same, states.get(unit.group), options)
            names = [name for name, member in zip(unit.members, members, strict=True) if member.spec is spec]
            out += [(name, tensor, record) for name, (tensor, record) in zip(names, solved, strict=True)]
        return out
    (name,) = unit.members
    groups = [
        ([_member(block, prefix, name, expert, formats[name], factors)], states.get(f"{unit.group}.{expert}")) for expert in unit.experts
    ]
    batches = chosen.batch(groups, options) if chosen.batch else [chosen.run(members, stats, options) for members, stats in groups]
    return [(f"{name}.{expert}", *batch[0]) for expert, batch in zip(unit.experts, batches, strict=True)]


def _member(
    block: nn.Module, prefix: str, name: str, expert: int | None, chosen: str, factors: Mapping[str, Factors], amax: Tensor | None = None
) -> Member:
    below = name if expert is None else f"{name}.{expert}"
    return Member.of(
        f"{prefix}.{below}" if prefix else below, _folded(block, name, expert, factors), FORMATS[chosen], amax, factors.get(below)
    )


def _folded(block: nn.Module, name: str, expert: int | None, factors: Mapping[str, Factors]) -> Tensor:
    weight = weight_of(block, name, expert)
    folded = factors.get(name if expert is None else f"{name}.{expert}")
    return weight if folded is None else folded.fold(weight)


def _shared_amax(unit: Unit, block: nn.Module, formats: Mapping[str, str], factors: Mapping[str, Factors]) -> dict[str, Tensor]:
    """Maximum of what each member is served with, wherever in the block that is (field case FMT-05)."""
    amax: dict[str, Tensor] = {}
    for group in fused_groups(formats):
        if len(group) > 1 and set(group) & set(unit.members) and FORMATS[formats[group[0]]].has_tensor_scale:
            largest = torch.stack([_folded(block, name, None, factors).abs().amax().float() for name in group]).amax()
            amax |= dict.fromkeys(group, largest)
    return amax


def write_part(path: Path, solved: Sequence[tuple[str, QuantTensor, TensorRecord]], plain: Mapping[str, Tensor] | None = None) -> None:
    """Write a unit's planes, the plain tensors that come with them, and its records, each file whole or not at all; the records last."""
    tensors = {f"{PLAIN}{name}": tensor.contiguous() for name, tensor in (plain or {}).items()}
    for name, tensor, _ in solved:
        parts = {"codes": tensor.codes, "scales": tensor.scales, "tensor_scale": tensor.tensor_scale, "divisor": tensor.divisor}
        tensors |= {f"{name}.{part}": value.contiguous() for part, value in parts.items() if value is not None}
    with atomic_path(path) as temporary:
        save_file(tensors, str(temporary))
    records = [asdict(record) for _, _, record in solved]
    write_json(path.with_suffix(".json"), [{key: _plain(value) for key, value in record.items()} for record in records])


def _plain(value: Any) -> Any:
    """JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Records of a block's folder in file order."""
    return [record for path in sorted(folder.glob("part-*.json")) for record in json.loads(path.read_text())]


def read_planes(folder: Path, formats: Mapping[str, str]) -> dict[str, QuantTensor]:
    """Planes of a block by weight path below it; experts stacked to [E, O, I]."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("part-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a safetensors handle is no mapping
    planes: dict[str, QuantTensor] = {}
    for name, chosen in formats.items():
        if f"{name}.codes" in tensors:
            planes[name] = _tensor(tensors, name, chosen)
            continue
        experts = [f"{name}.{number}" for number in range(sum(key.startswith(f"{name}.") and key.endswith(".codes") for key in tensors))]
        parts = [_tensor(tensors, expert, chosen) for expert in experts]
        divisors = [part.divisor for part in parts if part.divisor is not None]
        planes[name] = QuantTensor(
            codes=torch.stack([part.codes for part in parts]),
            scales=torch.stack([part.scales for part in parts]),
            tensor_scale=torch.stack([part.tensor_scale for part in parts]),
            format=FORMATS[chosen],
            divisor=torch.stack(divisors) if divisors else None,
        )
    return planes


def read_plain(folder: Path) -> dict[str, Tensor]:
    """Plain tensors that a block's solve has changed, by parameter path below it."""
    plain: dict[str, Tensor] = {}
    for path in sorted(folder.glob("part-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            plain |= {name.removeprefix(PLAIN): file.get_tensor(name) for name in file.keys() if name.startswith(PLAIN)}  # noqa: SIM118 - as above
    return plain


def _tensor(tensors: Mapping[str, Tensor], name: str, chosen: str) -> QuantTensor:
    return QuantTensor(
        codes=tensors[f"{name}.codes"],
        scales=tensors[f"{name}.scales"],
        tensor_scale=tensors[f"{name}.tensor_scale"],
        format=FORMATS[chosen],
        divisor=tensors.get(f"{name}.divisor"),
    )


@torch.no_grad()
def apply_planes(block: nn.Module, planes: Mapping[str, QuantTensor], plain: Mapping[str, Tensor] | None = None) -> None:
    """Put the dequantized weights, and the plain tensors that were changed with them, in the place of a block's own, in their dtype."""
    for name, value in (plain or {}).items():
        block.get_parameter(name).copy_(value)
    for name, tensor in planes.items():
        parent = block.get_submodule(name.rpartition(".")[0])
        held = getattr(parent, name.rpartition(".")[2])
        assert not isinstance(held, FP4Experts)
        if isinstance(held, nn.Module):
            held.weight.copy_(tensor.dequantize())  # type: ignore[operator, union-attr]
            continue
        for expert in range(held.shape[0]):
            weight = tensor[expert].dequantize()
            held[expert].copy_(weight.T if getattr(parent, "is_transposed", False) else weight)
