"""What a survey reads and how: its settings, the weights that it covers, and each input's place in memory.

Inputs are surveyed in passes over the data whose states together take at most `memory_bytes`; one eigendecomposition takes about four float64 [I, I] beside them. An
input wider than `max_width`, or whose states alone pass the budget, is read from evenly spaced rows instead: so few that all its steps together have at most max_width rows.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field
from torch import Tensor, nn

from prism_ray.calibrate.exposure import ITERATIONS
from prism_ray.calibrate.text import TextData
from prism_ray.core.compute import DtypeName
from prism_ray.core.config import Config
from prism_ray.core.errors import ModelError
from prism_ray.formats.policy import LARGE_SHARE, QuantPolicy, expert_parameters
from prism_ray.hessian.capture import InputGroup
from prism_ray.hessian.survey import THRESHOLD


class SurveyConfig(Config):
    """model: any source of models.source. steps: recurrence depth of a looped model, its own where None. ignore: globs of modules beside the policy's own.

    exposure_samples: samples for the feedback exposure, 0 for none. radius_iterations: of its spectral radius. max_width, memory_bytes: see the module's docstring.
    """

    model: str
    data: TextData
    steps: int | None = Field(default=None, ge=1)
    ignore: tuple[str, ...] = ()
    dtype: DtypeName = "auto"
    max_width: int = Field(default=2048, ge=2)
    memory_bytes: int = Field(default=4 * 2**30, ge=2**20)
    threshold: float = Field(default=THRESHOLD, gt=0.0, lt=1.0)
    exposure_samples: int = Field(default=8, ge=0)
    radius_iterations: int = Field(default=ITERATIONS, ge=2)


def planned(model: nn.Module, ignore: Sequence[str] = ()) -> tuple[list[str], list[tuple[str, str, int]]]:
    """(Linear modules and fused expert parameters in module order, what is left out as (name, reason, bytes)). ModelError where nothing is left.

    Left out is named where it is a Linear, a fused expert, or any other matrix of more than LARGE_SHARE of the model that the ignore patterns do not name.
    """
    policy, extra = QuantPolicy(), tuple(ignore)
    names: list[str] = []
    left_out: list[tuple[str, str, int]] = []
    covered: set[int] = set()
    for path, module in model.named_modules():
        found = [(path, module.weight)] if isinstance(module, nn.Linear) else []
        found += [(f"{path}.{leaf}", getattr(module, leaf)) for leaf in expert_parameters(module)]
        for name, weight in found:
            covered.add(id(weight))
            if policy.format_of(name) is None or any(fnmatch.fnmatch(name, pattern) for pattern in extra):
                left_out.append((name, "ignored by the policy", weight.numel() * weight.element_size()))
            else:
                names.append(name)
    total = sum(parameter.numel() for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        known = id(parameter) in covered or parameter.ndim < 2 or policy.format_of(name.removesuffix(".weight")) is None
        if not known and parameter.numel() > LARGE_SHARE * total:
            left_out.append((name, "neither a Linear nor fused experts", parameter.numel() * parameter.element_size()))
    if not names:
        raise ModelError(
            "has no full-precision linear weight to survey", where=type(model).__name__, remedy="give the model before quantization"
        )
    return names, left_out


def held_at(model: nn.Module, name: str) -> Any:
    """The module or parameter of a path."""
    parent, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(parent), leaf)


def size_of(model: nn.Module, name: str) -> int:
    """Bytes of a weight."""
    held = held_at(model, name)
    weight: Tensor = getattr(held, "weight", held)
    return weight.numel() * weight.element_size()


def top_k_of(model: Any) -> int | None:
    """Experts that a token is routed to, None where the config does not say."""
    config = model.config.get_text_config()
    found = (getattr(config, name, None) for name in ("num_experts_per_tok", "experts_per_token", "top_k_experts"))
    return next((value for value in found if isinstance(value, int)), None)


@dataclass(frozen=True, kw_only=True)
class Share:
    """A group's place in memory. limit: rows kept of a step or an expert, None for all, 0 for counts alone. size: bytes at most. reason: of the limit."""

    group: InputGroup
    calls: int
    limit: int | None
    size: int
    reason: str


def share_of(group: InputGroup, calls: int, tokens: int, top_k: int | None, config: SurveyConfig) -> Share:
    """How a group is read. tokens: in all samples; a group of experts gets top_k rows of each a call, all experts where unknown."""
    width = group.width
    slots = group.experts or (calls + 2 if calls > 1 else 2)
    if group.experts:
        # Below I / 2 rows a state takes 4 I a row; a Gram matrix of 8 I^2 is made at I / 2, so it is at most 16 I a row.
        full = min(slots * 8 * width**2, 16 * width * tokens * calls * min(group.experts, top_k or group.experts))
    else:
        full = slots * min(8 * width**2, 16 * width * tokens)
    if width <= config.max_width and full <= config.memory_bytes:
        return Share(group=group, calls=calls, limit=None, size=full, reason="")
    steps = group.experts or calls
    # While a sample is thinned out its old and its new rows are held: 8 bytes a value instead of 4.
    affordable = config.memory_bytes // (8 * width * steps)
    limit = min(config.max_width // (1 if group.experts else calls), affordable)
    cause = f"{width} columns > max_width {config.max_width}" if width > config.max_width else f"its states would take {full:,} bytes"
    if limit < 2:
        return Share(group=group, calls=calls, limit=0, size=0, reason=f"{cause}, and not two rows of each fit: counts and traces alone")
    of = "an expert" if group.experts else "a step"
    return Share(
        group=group, calls=calls, limit=limit, size=8 * width * steps * limit, reason=f"{cause}: at most {limit} evenly spaced rows of {of}"
    )


def passes(shares: Sequence[Share], memory: int) -> Iterator[list[Share]]:
    """Runs of groups in module order whose states fit together."""
    wave: list[Share] = []
    for share in shares:
        if wave and sum(other.size for other in wave) + share.size > memory:
            yield wave
            wave = []
        wave.append(share)
    if wave:
        yield wave
