"""Which projections a serving engine fuses into one matrix, and what that asks of a quantized model (field cases FMT-05, FMT-09).

An engine stacks q/k/v of one attention and gate/up of one feed-forward layer along their rows. The stack has one format, and for NVFP4 one global scale: where
the parts were stored with scales of their own, all but one part is multiplied by the wrong number. So a group is quantized to one format or not at all,
and its tensor scale is made from the group's maximum.

`FUSED` is the architecture map: leaf names, below one parent module. A name that no row mentions stays alone, as do the fused 3-D expert parameters of
transformers 5, whose gate and up share a tensor scale already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prism_ray.core.errors import FormatError

FUSED: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),  # llama, qwen, mistral, gemma and most others; a model whose keys are its values has no v_proj
    ("gate_proj", "up_proj"),  # feed-forward layers, and experts stored one by one
    ("w1", "w3"),  # gate and up of mixtral's experts, older names
    ("q_a_proj", "kv_a_proj_with_mqa"),  # multi-head latent attention of deepseek
    ("in_proj_qkv", "in_proj_z"),  # gated delta net of qwen3.5
    ("in_proj_b", "in_proj_a"),
)
_GROUP_OF = {leaf: group for group in FUSED for leaf in group}


def fused_groups(names: Iterable[str]) -> list[tuple[str, ...]]:
    """The names in groups that are served as one matrix, each in the order of `FUSED`, groups in the order of their first member; others alone."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        groups.setdefault((parent, _GROUP_OF.get(leaf, (leaf,))), []).append(name)
    return [tuple(sorted(found, key=lambda name: order.index(name.rpartition(".")[2]))) for (_, order), found in groups.items()]


def require_uniform(formats: Mapping[str, str | None]) -> None:
    """Raise FormatError for the first fused group whose members have several formats; None is full precision."""
    for group in fused_groups(formats):
        found = {formats[name] for name in group}
        if len(found) > 1:
            parts = ", ".join(f"{name.rpartition('.')[2]} {formats[name] or 'full precision'}" for name in group)
            raise FormatError(
                f"projections that are served as one matrix have different formats ({parts})",
                where=group[0].rpartition(".")[0] or group[0],
                remedy="give them one format in overrides, or ignore all of them",
            )
