"""Where a block can take factors of a weight's input channels, and what becomes of its tensors when it does.

A *place* is what makes the input x of some weights and can make x / s instead: a norm (its weight and bias divided by s), or rows of the weight before (divided by s, its bias too). All
weights that read the place are multiplied by s along their columns, those that are not quantized (a router) as well, so that the block computes what it computed:

| place | read by | channel behind a column |
|---|---|---|
| a norm | q, k, v; gate, up, router, every expert's gate and up | the column |
| rows of up_proj, or the up half of gate_up_proj, an expert each | down_proj | the column |
| rows of v_proj | o_proj | its head's key-value head: query heads that share one share its factors |
| value rows of kv_b_proj (multi-head latent attention) | o_proj | the value row of its head |

`NORMS` and `ROWS` are the architecture map: names alone, and names mean different things in different families. So every place is *tried* on the block at hand before it is used (`holds`): with
random powers of two as factors nothing is rounded, and the block's output must be the same to the last bit, and another one while only one side is multiplied. Rows are tried with factors
from 2^-12 to 2^12: a clamp, or a 1 that is added (gpt_oss), shows. Norms that multiply by 1 + weight (gemma) are told by what they do with a weight of zeros. A place that fails is not used; what it would have
served is rounded as it is, on the record.

All factors are chosen from the weights and statistics of the block as it was; then they are folded together (a weight may have factors on both sides), in float32, and what is quantized is rounded from
there. Plain tensors are stored as a checkpoint holds them (STORED): the factor of a norm's channel is off by at most 2^-9 of itself, as every bfloat16 weight is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from prism_ray.calibrate.units import Unit, weight_of
from prism_ray.core.errors import ModelError
from prism_ray.formats.spec import FORMATS
from prism_ray.hessian.state import GramState
from prism_ray.quantizers.awq import NO_PLACE
from prism_ray.quantizers.base import Choice, Factors, Groups, Member, QuantizerOptions
from prism_ray.quantizers.methods import METHODS

STORED = torch.bfloat16
"""Dtype of plain tensors in a checkpoint."""
NORM_OCTAVES, ROW_OCTAVES = 1, 12
"""Factors of a trial lie in 2^-n .. 2^n. 2 - 1 and 1/2 - 1 are exact in every dtype, which norms of 1 + weight need; rows go far enough to reach any clamp."""

_FEED_FORWARD = (
    *("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj", "mlp.gate", "mlp.router", "mlp.experts.gate_up_proj", "mlp.shared_expert_gate"),
    *("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
)
_MIXER = (
    *(
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.qkv_proj",
        "self_attn.q_a_proj",
        "self_attn.kv_a_proj_with_mqa",
    ),
    *("self_attn.kv_proj", "self_attn.compressor.kv_proj", "self_attn.compressor.gate_proj", "self_attn.compressor.indexer.kv_proj"),
    *("self_attn.compressor.indexer.gate_proj", "self_attn.compressor.indexer.scorer.weights_proj"),
    *("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_b", "linear_attn.in_proj_a"),
)
NORMS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("input_layernorm", _MIXER),
    ("pre_feedforward_layernorm", _FEED_FORWARD),
    ("post_attention_layernorm", _FEED_FORWARD),
    ("self_attn.q_a_layernorm", ("self_attn.q_b_proj",)),
    ("self_attn.q_a_norm", ("self_attn.q_b_proj", "self_attn.compressor.indexer.q_b_proj")),
    ("self_attn.kv_a_layernorm", ("self_attn.kv_b_proj",)),
    ("model.norm", ("lm_head",)),
)
"""(norm, what may read it), paths below the block. What a block lacks is passed over."""

RowSource = Callable[[Any, int, int], Tensor | None]


def _same(parent: Any, rows: int, columns: int) -> Tensor | None:
    return torch.arange(columns) if rows == columns else None


def _upper(parent: Any, rows: int, columns: int) -> Tensor | None:
    if rows != 2 * columns:
        return None
    return columns + torch.arange(columns) if getattr(parent, "is_concatenated", True) else 2 * torch.arange(columns) + 1


def _value_heads(parent: Any, rows: int, columns: int) -> Tensor | None:
    size = int(getattr(parent, "head_dim", 0) or 0)
    if not size or rows % size or columns % rows:
        return None
    column = torch.arange(columns)
    return column // size // (columns // rows) * size + column % size


def _latent_values(parent: Any, rows: int, columns: int) -> Tensor | None:
    value, key = int(getattr(parent, "v_head_dim", 0)), int(getattr(parent, "qk_nope_head_dim", 0))
    if not value or columns % value or rows != columns // value * (key + value):
        return None
    column = torch.arange(columns)
    return column // value * (key + value) + key + column % value


ROWS: tuple[tuple[str, str, RowSource], ...] = (
    ("up_proj", "down_proj", _same),
    ("gate_up_proj", "down_proj", _upper),
    ("w3", "w2", _same),
    ("v_proj", "o_proj", _value_heads),
    ("kv_b_proj", "o_proj", _latent_values),
)
"""(weight before, weight, row behind each column), leaf names below one parent."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """maker: path of a norm, or of a weight whose rows are meant. readers: weight paths. source: int64 [I], channel of the maker behind each column of a reader.
    norm: whether the maker is one. offset: what it adds to its weight. experts: number of experts that have factors of their own; 0 for one set."""

    maker: str
    readers: tuple[str, ...]
    source: Tensor
    norm: bool = False
    offset: float = 0.0
    experts: int = 0


@dataclass(frozen=True, kw_only=True)
class Folding:
    """factors: of planned weights by path below the block, experts as `name.<expert>`. plain: new values of plain tensors by parameter path, dtype STORED."""

    factors: Mapping[str, Factors] = field(default_factory=dict)
    plain: Mapping[str, Tensor] = field(default_factory=dict)


Run = Callable[[], Tensor]


def fold_block(
    block: nn.Module,
    prefix: str,
    units: Sequence[Unit],
    formats: Mapping[str, str],
    stats: Callable[[str], GramState | None],
    run: Run,
    method: str,
    options: QuantizerOptions,
) -> Folding:
    """Factors of a block's weights as a method chooses them, one place after the other; the block stays as it is.

    units: all of the block. formats: format name of each planned weight by path. stats: the state of a key. run: the block's output on some input.
    ModelError when a planned weight is in no unit: its factors would not be chosen.
    """
    group = {name: unit.group for unit in units for name in unit.members}
    held = {(name, expert) for unit in units for name in unit.members for expert in unit.experts or (None,)}
    if missing := [name for name in formats for expert in _experts(block, name) if (name, expert) not in held]:
        raise ModelError(
            f"'{missing[0]}' is solved by another owner", where=prefix, remedy=f"method '{method}' needs a block's units together"
        )
    choose = METHODS[method].choose
    assert choose is not None
    made = _Made(block, formats)
    for place in find_places(block, formats, run):
        for expert in range(place.experts) if place.experts else (None,):
            groups = _reading(block, prefix, place, expert, formats, group, stats)
            made.add(place, expert, choose(groups, place.source, options))
    return made.folding()


def _reading(
    block: nn.Module,
    prefix: str,
    place: Place,
    expert: int | None,
    formats: Mapping[str, str],
    group: Mapping[str, str],
    stats: Callable[[str], GramState | None],
) -> Groups:
    """The planned weights that read a place, those of one state together; a fused weight's experts apart."""
    states: dict[str, list[tuple[str, int | None]]] = {}
    dotted = f"{prefix}." if prefix else ""
    for name in place.readers:
        if name not in formats:
            continue
        for number in _experts(block, name) if expert is None else (expert,):
            states.setdefault(group[name] if number is None else f"{group[name]}.{number}", []).append((name, number))

    def groups() -> Iterator[tuple[list[Member], GramState | None]]:
        for key, names in states.items():
            yield (
                [Member.of(f"{dotted}{name}", weight_of(block, name, number), FORMATS[formats[name]]) for name, number in names],
                stats(key),
            )

    return groups


class _Made:
    """Factors chosen so far: columns [I] or [E, I] and rows [O] or [E, O] of weights, quantized or not, by path; of norms [P]."""

    def __init__(self, block: nn.Module, formats: Mapping[str, str]):
        self._block, self._formats = block, formats
        self._columns: dict[str, Tensor] = {}
        self._rows: dict[str, Tensor] = {}
        self._norms: dict[str, tuple[Tensor, float]] = {}
        self._chosen: dict[str, tuple[float, str]] = {}

    def add(self, place: Place, expert: int | None, choice: Choice) -> None:
        """Take what was chosen for a place."""
        for name in place.readers:
            self._chosen[name if expert is None else f"{name}.{expert}"] = choice.alpha, choice.reason
        if choice.channels is None:
            return
        if place.norm:
            self._norms[place.maker] = choice.channels, place.offset
        else:
            held, transposed = parameter_of(self._block, place.maker)
            size = held.shape[-1] if transposed else held.shape[-2]
            rows = self._rows.setdefault(place.maker, torch.ones((place.experts, size) if place.experts else (size,)))
            (rows if expert is None else rows[expert])[place.source] = 1.0 / choice.channels[place.source]
        for name in place.readers:
            shape = (place.experts, len(place.source)) if place.experts else (len(place.source),)
            columns = self._columns.setdefault(name, torch.ones(shape))
            (columns if expert is None else columns[expert]).copy_(choice.channels[place.source])

    def folding(self) -> Folding:
        """What the solve needs: factors of planned weights, values of everything else."""
        factors: dict[str, Factors] = {}
        for name in self._formats:
            for expert in _experts(self._block, name):
                factors[name if expert is None else f"{name}.{expert}"] = self._factors(name, expert)
        plain: dict[str, Tensor] = {}
        for name in dict.fromkeys([*self._columns, *self._rows]):
            if name not in self._formats:
                held, transposed = parameter_of(self._block, name)
                scaled = _times(held.to(torch.float32), transposed, self._columns.get(name), self._rows.get(name))
                plain[_weight_path(self._block, name)] = scaled.to(STORED)
            bias, path = _bias_of(self._block, name)
            if bias is not None and name in self._rows:
                plain[path] = (bias.to(torch.float32) * self._rows[name]).to(STORED)
        for name, (channels, offset) in self._norms.items():
            norm: Any = self._block.get_submodule(name)
            plain[f"{name}.weight"] = ((norm.weight.to(torch.float32) + offset) / channels - offset).to(STORED)
            if getattr(norm, "bias", None) is not None:
                plain[f"{name}.bias"] = (norm.bias.to(torch.float32) / channels).to(STORED)
        return Folding(factors=factors, plain={path: value.detach() for path, value in plain.items()})

    def _factors(self, name: str, expert: int | None) -> Factors:
        def of(found: Mapping[str, Tensor]) -> Tensor | None:
            factors = found.get(name)
            if factors is not None and factors.ndim == 2 and expert is not None:
                factors = factors[expert]
            # An expert for which none were chosen has ones beside those of others.
            return None if factors is None or bool((factors == 1).all()) else factors

        alpha, reason = self._chosen.get(name) or self._chosen.get(f"{name}.{expert}") or (float("nan"), NO_PLACE)
        return Factors(columns=of(self._columns), rows=of(self._rows), alpha=alpha, reason=reason)


def parameter_of(block: nn.Module, name: str) -> tuple[Tensor, bool]:
    """The tensor of a weight path, [O, I] or [E, O, I], and whether it is stored as [E, I, O]."""
    parent = block.get_submodule(name.rpartition(".")[0])
    held = getattr(parent, name.rpartition(".")[2])
    if isinstance(held, nn.Module):
        return held.weight.data, False  # type: ignore[return-value, union-attr]
    return held.data, bool(getattr(parent, "is_transposed", False))


def _experts(block: nn.Module, name: str) -> Sequence[int | None]:
    """Numbers of the experts of a fused weight; None alone for any other."""
    held, _ = parameter_of(block, name)
    return range(held.shape[0]) if held.ndim == 3 else (None,)


def _weight_path(block: nn.Module, name: str) -> str:
    held = getattr(block.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
    return f"{name}.weight" if isinstance(held, nn.Module) else name


def _bias_of(block: nn.Module, name: str) -> tuple[Tensor | None, str]:
    """The bias of a weight path and its own path: [O], or [E, O] beside a fused parameter."""
    parent, _, leaf = name.rpartition(".")
    owner: Any = block.get_submodule(parent)
    held = getattr(owner, leaf)
    found, path = (held.bias, f"{name}.bias") if isinstance(held, nn.Linear) else (getattr(owner, f"{leaf}_bias", None), f"{name}_bias")
    return (None if found is None else found.data), path


def _times(held: Tensor, transposed: bool, columns: Tensor | None, rows: Tensor | None) -> Tensor:
    """A stored weight times factors of its columns [I] or [E, I] and rows [O] or [E, O]."""
    for factors, along_rows in ((columns, False), (rows, True)):
        if factors is not None:
            held = held * factors.to(held.dtype).unsqueeze(-1 if along_rows != transposed else -2)
    return held


def find_places(block: nn.Module, formats: Mapping[str, str], run: Run) -> list[Place]:
    """Places of a block that its planned weights read, each tried; a weight reads one place at most."""
    served: set[str] = set()
    found: list[Place] = []
    for place in _candidates(block, formats):
        if not served & set(place.readers) and holds(place, block, run):
            found.append(place)
            served |= set(place.readers)
    return found


def _candidates(block: nn.Module, formats: Mapping[str, str]) -> Iterator[Place]:
    for norm, names in NORMS:
        readers = tuple(name for name in names if _exists(block, name))
        if not _exists(block, norm) or not set(readers) & set(formats):
            continue
        held, transposed = parameter_of(block, readers[0])
        width = held.shape[-2] if transposed else held.shape[-1]
        offset = norm_offset(block.get_submodule(norm), width)
        if offset is not None:
            yield Place(maker=norm, readers=readers, source=torch.arange(width), norm=True, offset=offset)
    for name in formats:
        parent, _, leaf = name.rpartition(".")
        held, transposed = parameter_of(block, name)
        columns = held.shape[-2] if transposed else held.shape[-1]
        for maker, reader, rule in ROWS:
            before = f"{parent}.{maker}"
            if leaf != reader or not _exists(block, before):
                continue
            made, made_transposed = parameter_of(block, before)
            source = rule(block.get_submodule(parent), made.shape[-1] if made_transposed else made.shape[-2], columns)
            if source is not None and made.ndim == held.ndim:
                yield Place(maker=before, readers=(name,), source=source, experts=held.shape[0] if held.ndim == 3 else 0)


def _exists(block: nn.Module, name: str) -> bool:
    """Whether a path leads to a module with a weight or to a parameter."""
    found: Any = block
    for part in name.split("."):
        found = getattr(found, part, None)
    return isinstance(found, nn.Parameter) or (isinstance(found, nn.Module) and isinstance(getattr(found, "weight", None), nn.Parameter))


@torch.no_grad()
def norm_offset(norm: Any, width: int) -> float | None:
    """0 for a norm that multiplies by its weight, 1 for one that multiplies by 1 + weight, None for anything else.

    Read from its output on random rows for weights of zeros and ones.
    """
    names = {name for name, _ in norm.named_parameters()}
    if not {"weight"} <= names <= {"weight", "bias"} or norm.weight.shape != (width,):
        return None
    kept = _kept(norm)
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(0)).to(norm.weight)
    outputs: list[Tensor] = []
    for value in (0.0, 1.0):
        for parameter, _ in kept:
            parameter.zero_()
        norm.weight.fill_(value)
        outputs.append(norm(x))
    _restore(kept)
    zeros, ones = outputs
    if not bool(zeros.any()):
        return 0.0 if bool(ones.any()) else None
    return 1.0 if torch.equal(ones, 2 * zeros) else None


def _kept(module: nn.Module) -> list[tuple[Tensor, Tensor]]:
    return [(parameter, parameter.detach().clone()) for parameter in module.parameters()]


def _restore(kept: Sequence[tuple[Tensor, Tensor]]) -> None:
    for parameter, value in kept:
        parameter.copy_(value)


@torch.no_grad()
def holds(place: Place, block: nn.Module, run: Run) -> bool:
    """Whether folding at a place leaves the block's output as it is, and only folding both sides does.

    Weights are multiplied in place by powers of two and back, which loses nothing; a norm's few values are put back from a copy.
    """
    octaves = NORM_OCTAVES if place.norm else ROW_OCTAVES
    generator = torch.Generator().manual_seed(0)
    size = int(place.source.max()) + 1
    shape = (place.experts, size) if place.experts else (size,)
    channels = 2.0 ** torch.randint(-octaves, octaves + 1, shape, generator=generator).to(torch.float32)
    columns = channels[..., place.source]
    kept = _kept(block.get_submodule(place.maker)) if place.norm else []
    _divide(place, block, torch.ones_like(channels))
    before = run()
    _multiply(place, block, columns)
    one_side = run()
    _divide(place, block, channels)
    both = run()
    _multiply(place, block, 1.0 / columns)
    if place.norm:
        _restore(kept)
    else:
        _divide(place, block, 1.0 / channels)
    return torch.equal(before, both) and not torch.equal(before, one_side)


def _multiply(place: Place, block: nn.Module, columns: Tensor) -> None:
    for name in place.readers:
        held, transposed = parameter_of(block, name)
        held.mul_(columns.to(held.dtype).unsqueeze(-1 if transposed else -2))


def _divide(place: Place, block: nn.Module, channels: Tensor) -> None:
    """Divide what a place makes. A norm's weight becomes exactly 1 / channels first, because (offset + weight) / channels - offset may round."""
    if place.norm:
        norm: Any = block.get_submodule(place.maker)
        norm.weight.copy_(1.0 / channels - place.offset)
        if getattr(norm, "bias", None) is not None:
            norm.bias.div_(channels)
        return
    held, transposed = parameter_of(block, place.maker)
    size = held.shape[-1] if transposed else held.shape[-2]
    rows = torch.ones(*channels.shape[:-1], size)
    rows[..., place.source] = 1.0 / channels[..., place.source]
    held.mul_(rows.to(held.dtype).unsqueeze(-2 if transposed else -1))
    bias, _ = _bias_of(block, place.maker)
    if bias is not None:
        bias.mul_(rows.to(bias.dtype))
