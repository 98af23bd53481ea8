"""`quantization_config` of a compressed-tensors checkpoint: written from a plan, and read back as a format per module.

One config group per (checkpoint format, group size). The group with most weights targets the class `Linear`; the others name their modules, and win because
the convention takes exact names before regular expressions before classes. Experts are named by one expression per layer. A checkpoint with several
checkpoint formats says `mixed-precision` at its top, and every group its own format (compressed-tensors 0.17).

int3 formats are written as the int4 codes they are; only a manifest of ours says that the range is narrower. Refused by name: zero points, columns
permuted by activation order (`actorder` group, `weight_g_idx`), integers of a width other than 4, groups that no registered format has.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from prism_ray.core.errors import CheckpointError
from prism_ray.formats.codes import INT4
from prism_ray.formats.fusion import require_uniform
from prism_ray.formats.policy import PlanEntry, QuantPlan
from prism_ray.formats.spec import FORMATS, FormatSpec

FUSED_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",), "up_proj": ("up_proj",)}
METHOD, MIXED, PACKED = "compressed-tensors", "mixed-precision", "pack-quantized"
CLASS = "Linear"


def quantization_config(plan: QuantPlan, parts: Mapping[str, tuple[str, ...]] = FUSED_PARTS) -> dict[str, Any]:
    """The `quantization_config` of config.json. parts: names of the Linear modules that fused experts are stored as.

    Raises FormatError when projections that are served as one matrix have different formats."""
    formats: dict[str, str | None] = {entry.name: entry.format for entry in plan.entries}
    require_uniform(formats | dict.fromkeys(plan.ignored_linears))
    groups: dict[tuple[str, int], list[PlanEntry]] = {}
    for entry in plan.entries:
        spec = FORMATS[entry.format]
        groups.setdefault((spec.checkpoint_format, spec.block), []).append(entry)
    # Stable: of two groups of one size the first planned is the default.
    ordered = sorted(groups.values(), key=len, reverse=True)
    written = {}
    for position, entries in enumerate(ordered):
        spec = FORMATS[entries[0].format]
        targets = [CLASS] if position == 0 else [_target(entry, parts) for entry in entries]
        written[f"group_{position}"] = {"targets": targets, "format": spec.checkpoint_format, "weights": _weights(spec)}
    stored = {checkpoint_format for checkpoint_format, _ in groups}
    return {
        "quant_method": METHOD,
        "format": stored.pop() if len(stored) == 1 else MIXED,
        "quantization_status": "compressed",
        "config_groups": written,
        "ignore": plan.ignored_linears,
    }


def default_format(plan: QuantPlan) -> str:
    """The format that most entries of a plan have."""
    return Counter(entry.format for entry in plan.entries).most_common(1)[0][0]


def _target(entry: PlanEntry, parts: Mapping[str, tuple[str, ...]]) -> str:
    """How a config group names a weight: a Linear by its name, fused experts by an expression over the modules they are stored as."""
    if len(entry.shape) == 2:
        return entry.name
    prefix, _, parameter = entry.name.rpartition(".")
    return rf"re:^{re.escape(prefix)}\.\d+\.({'|'.join(parts[parameter])})$"


def _weights(spec: FormatSpec) -> dict[str, Any]:
    integer = spec.checkpoint_format == PACKED
    return {
        "num_bits": 4,
        "type": "int" if integer else "float",
        "symmetric": True,
        "dynamic": False,
        "strategy": "tensor_group" if spec.has_tensor_scale else "group",
        "group_size": spec.block,
        # The integer formats leave it out, as the convention's own presets do: their scales have the dtype of the model's weights.
        **({} if integer else {"scale_dtype": str(spec.checkpoint_scale_dtype)}),
        "observer": "memoryless_minmax",
    }


def format_of_config(config: Mapping[str, Any], where: str) -> FormatSpec:
    """The FormatSpec of most weights of a checkpoint: of its `Linear` group. Raises CheckpointError for what cannot be read."""
    groups = _groups(config, where)
    return next((spec for targets, spec in groups if CLASS in targets), groups[0][1])


def formats_of_modules(config: Mapping[str, Any], modules: Iterable[str], where: str) -> dict[str, FormatSpec]:
    """The FormatSpec of every packed module. Raises CheckpointError naming a module that no group targets, or a group that cannot be read."""
    groups = _groups(config, where)
    exact = {target: spec for targets, spec in reversed(groups) for target in targets if not target.startswith("re:")}
    patterns = [(re.compile(target[3:]), spec) for targets, spec in groups for target in targets if target.startswith("re:")]
    out: dict[str, FormatSpec] = {}
    for name in modules:
        found = exact.get(name) or next((spec for pattern, spec in patterns if pattern.match(name)), None) or exact.get(CLASS)
        if found is None:
            raise CheckpointError(
                f"no group of the quantization config targets '{name}', which is packed", where=where, remedy="write the checkpoint again"
            )
        out[name] = found
    return out


def _groups(config: Mapping[str, Any], where: str) -> list[tuple[list[str], FormatSpec]]:
    """(targets, format) of every config group; a config without groups is one group of all Linear modules."""
    method, top = config.get("quant_method"), config.get("format")
    groups = config.get("config_groups") or {"": {"targets": [CLASS]}}
    out = []
    for group in groups.values():
        found = group.get("format") or top
        if method != METHOD or found not in {FORMATS[name].checkpoint_format for name in FORMATS}:
            known = ", ".join(dict.fromkeys(FORMATS[name].checkpoint_format for name in FORMATS))
            raise CheckpointError(f"quantization '{method}' format '{found}' cannot be read", where=where, remedy=f"readable: {known}")
        if found == PACKED:
            spec = _integer_format(group.get("weights") or {}, where)
        else:
            spec = next(FORMATS[name] for name in FORMATS if FORMATS[name].checkpoint_format == found)
        out.append(([str(target) for target in group.get("targets") or [CLASS]], spec))
    return out


def _integer_format(weights: Mapping[str, Any], where: str) -> FormatSpec:
    """The int4 format of a pack-quantized group's weight settings."""
    sizes = {FORMATS[name].block: FORMATS[name] for name in FORMATS if FORMATS[name].codes.name == INT4.name}
    group, order = weights.get("group_size"), weights.get("actorder")
    faults = {
        f"integers of {weights.get('num_bits')} bits": weights.get("num_bits") != 4,
        f"codes of type {weights.get('type')}": weights.get("type", "int") != "int",
        "zero points (asymmetric codes)": not weights.get("symmetric", True),
        "columns permuted by activation order (actorder group)": order in (True, "group", "dynamic"),
        f"strategy {weights.get('strategy')}": weights.get("strategy") not in (None, "group"),
        f"a group size of {group}": group not in sizes,
    }
    for fault, present in faults.items():
        if present:
            raise CheckpointError(
                f"pack-quantized checkpoint with {fault} cannot be read",
                where=where,
                remedy=f"readable: symmetric 4-bit groups of {', '.join(map(str, sorted(sizes)))}",
            )
    return sizes[group]  # type: ignore[index]


def narrowed(found: FormatSpec, named: str, where: str) -> FormatSpec:
    """The format that a manifest names for a weight stored as `found`: the same, or one that the checkpoint stores alike (int3 as int4)."""
    spec = FORMATS[named]
    if (spec.checkpoint_format, spec.block) != (found.checkpoint_format, found.block):
        raise CheckpointError(f"the manifest says {named}, the config {found.name}", where=where, remedy="write the checkpoint again")
    return spec


def require_ignored_plain(config: Mapping[str, Any], packed: Iterable[str], where: str) -> None:
    """Raise CheckpointError when the config's ignore list names a module whose weight is packed (field case FMT-09): a loader that believes the config
    would read codes as numbers, or keep random weights.

    packed: names of packed modules. Entries are exact names or, with the prefix `re:`, regular expressions that match from the start of a name.
    """
    for entry in config.get("ignore") or []:
        for name in ignored_by(str(entry), packed):
            raise CheckpointError(
                f"the config's ignore list has '{entry}', but the files hold '{name}' packed",
                where=where,
                remedy="one of the two is wrong: write the checkpoint again, or mend quantization_config.ignore",
            )


def ignored_by(entry: str, names: Iterable[str]) -> list[str]:
    """The names that an entry of an ignore list matches."""
    pattern = re.compile(entry[3:] if entry.startswith("re:") else f"{re.escape(entry)}$")
    return [name for name in names if pattern.match(name)]
