"""Which part of a model is called several times in one forward pass: families with a known recurrence, and a check for unknown ones.

A looped model has an *entry*, the module whose first input carries the recurrent state s_t at every step, and an *exit*, the module whose output is s_{t+1}:

| family | entry | state in its input | exit | steps |
|---|---|---|---|---|
| prism_looped | model.adapter | first h of 2h columns, [s ; e] | last block of model.core | config.num_loops, forward(num_loops=n) |
| Huginn (huginn_raven) | transformer.adapter | first h of 2h columns | last block of transformer.core_block | config.mean_recurrence, forward(num_steps=[0, n]) |
| Ouro (ouro) | model.layers.0 | all of it | model.norm | config.total_ut_steps, kept by the backbone too |

Families are told by config.model_type and by the modules' names, so remote code is neither imported nor needed; where a type matches and the modules do not, the
model is refused by name. Huginn draws its initial state in every call: `run_loop` seeds the global generator for the call and puts its state back.

A model of no known family may loop all the same. `count_calls` counts what each module is called in one small forward pass, and `unknown_recurrence` names the
outermost modules with linear weights that were called more than once; whoever needs the steps refuses such a model by `require_known_loop`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prism_ray.core.errors import ModelError
from prism_ray.models.families import unwrap

Batch = Mapping[str, Tensor]
"""input_ids int64 [B, L] and, where sequences differ in length, attention_mask [B, L]."""
RUN_SEED = 0


@dataclass(frozen=True, kw_only=True)
class LoopSpec:
    """Where a model recurs. Names are module paths in the model; prefixes name a block or a Linear and all that is below it.

    adapter: Linear modules at the loop entry that no identity path goes around, empty where the loop has none. core: blocks of the recurrence.
    state_width: leading columns of the entry's input that are the state, None for all. steps: the deployed recurrence depth. keyword: forward keyword that sets the steps of
    one call, "" where it is the backbone's attribute `attribute`.
    """

    family: str
    adapter: tuple[str, ...]
    core: tuple[str, ...]
    prelude: tuple[str, ...]
    coda: tuple[str, ...]
    entry: str
    exit: str
    state_width: int | None
    steps: int
    keyword: str = ""
    attribute: str = ""

    def component(self, name: str) -> str | None:
        """adapter, core, prelude or coda, whichever holds the module `name`; None outside of them (embedding, norm, head)."""
        for part in ("adapter", "core", "prelude", "coda"):
            if any(name == prefix or name.startswith(f"{prefix}.") for prefix in getattr(self, part)):
                return part
        return None


def find_loop(model: nn.Module) -> LoopSpec | None:
    """The recurrence of a model of a known family, None for any other model; ModelError where the family matches and the modules do not."""
    inner: Any = unwrap(model)
    kind = str(getattr(getattr(inner, "config", None), "model_type", ""))
    for start, finder in FAMILIES.items():
        if kind.startswith(start):
            found = finder(inner)
            missing = [path for path in (*found.adapter, *found.core, found.entry, found.exit) if not _has(inner, path)]
            if missing or not found.core or found.steps < 1:
                what = f"module '{missing[0]}' is not there" if missing else f"{len(found.core)} core blocks, {found.steps} steps"
                raise ModelError(f"is a looped model of type '{kind}' whose layout is not known: {what}", where=type(inner).__name__)
            return found
    return None


def _prism(model: Any) -> LoopSpec:
    return _with_adapter(
        model, "prism_looped", "model", "core", _field(model, "num_loops"), _field(model, "hidden_size"), keyword="num_loops"
    )


def _huginn(model: Any) -> LoopSpec:
    width = _field(model, "n_embd", "hidden_size")
    return _with_adapter(model, "huginn", "transformer", "core_block", _field(model, "mean_recurrence"), width, keyword="num_steps")


def _with_adapter(model: Any, family: str, backbone: str, core: str, steps: int, width: int, *, keyword: str) -> LoopSpec:
    blocks = _blocks(model, f"{backbone}.{core}")
    return LoopSpec(
        family=family,
        adapter=(f"{backbone}.adapter",),
        core=blocks,
        prelude=_blocks(model, f"{backbone}.prelude"),
        coda=_blocks(model, f"{backbone}.coda"),
        entry=f"{backbone}.adapter",
        exit=blocks[-1] if blocks else "",
        state_width=width,
        steps=steps,
        keyword=keyword,
    )


def _ouro(model: Any) -> LoopSpec:
    blocks = _blocks(model, "model.layers")
    return LoopSpec(
        family="ouro",
        adapter=(),
        core=blocks,
        prelude=(),
        coda=(),
        entry=blocks[0] if blocks else "",
        exit="model.norm",
        state_width=None,
        steps=_field(model, "total_ut_steps"),
        attribute="total_ut_steps",
    )


FAMILIES: dict[str, Callable[[Any], LoopSpec]] = {"prism_looped": _prism, "huginn": _huginn, "raven": _huginn, "ouro": _ouro}
"""Start of config.model_type -> how the recurrence lies in such a model."""


def _blocks(model: Any, path: str) -> tuple[str, ...]:
    return tuple(f"{path}.{index}" for index in range(len(model.get_submodule(path)))) if _has(model, path) else ()


def _has(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return path != ""


def _field(model: Any, *names: str) -> int:
    for name in names:
        if isinstance(value := getattr(model.config, name, None), int):
            return value
    raise ModelError(f"its config has no number '{names[0]}'", where=type(model).__name__, remedy="load it with its own config")


def run_loop(model: nn.Module, spec: LoopSpec | None, batch: Batch, *, steps: int | None = None, seed: int = RUN_SEED) -> Any:
    """One forward pass at `steps` recurrences (default the deployed depth); the same seed gives the same initial state in families that draw it."""
    inner: Any = unwrap(model)
    keywords: dict[str, Any] = {}
    count = steps if steps is not None or spec is None else spec.steps
    if spec is not None and spec.keyword:
        # Huginn takes the pair (steps without gradient, steps with): forward-mode derivatives stop at no_grad, so all are of the second kind.
        keywords[spec.keyword] = torch.tensor([0, count]) if spec.keyword == "num_steps" else count
    with torch.random.fork_rng(devices=_cuda_devices(inner)), _attribute(inner, spec, count):
        torch.manual_seed(seed)
        return model(**batch, use_cache=False, **keywords)


@contextmanager
def _attribute(inner: Any, spec: LoopSpec | None, count: int | None) -> Iterator[None]:
    if spec is None or not spec.attribute:
        yield
        return
    places = [place for place in (inner.config, getattr(inner, "base_model", None)) if hasattr(place, spec.attribute)]
    before = [getattr(place, spec.attribute) for place in places]
    try:
        for place in places:
            setattr(place, spec.attribute, count)
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            setattr(place, spec.attribute, value)


def _cuda_devices(model: nn.Module) -> list[torch.device]:
    return [device for device in {parameter.device for parameter in model.parameters()} if device.type == "cuda"]


@torch.no_grad()
def count_calls(model: nn.Module, batch: Batch | None = None) -> dict[str, int]:
    """How often each module is called in one forward pass; a batch of one token by default. Modules that are not called are not listed."""
    inner: Any = unwrap(model)
    calls: Counter[str] = Counter()
    handles = []
    for name, module in inner.named_modules():
        if name:
            handles.append(module.register_forward_pre_hook(lambda _module, _args, name=name: calls.update([name])))
    if batch is None:
        batch = {"input_ids": torch.zeros(1, 1, dtype=torch.long, device=next(inner.parameters()).device)}
    try:
        inner(**batch, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return dict(calls)


def unknown_recurrence(model: nn.Module, batch: Batch | None = None) -> tuple[str, ...]:
    """Outermost modules with linear weights that one forward pass calls more than once, in a model of no known looped family; empty in a plain model."""
    if find_loop(model) is not None:
        return ()
    inner = unwrap(model)
    calls = count_calls(model, batch)
    repeated = [name for name, module in inner.named_modules() if calls.get(name, 0) > 1 and _has_linear(module)]
    return tuple(name for name in repeated if not any(name.startswith(f"{outer}.") for outer in repeated))


def _has_linear(module: nn.Module) -> bool:
    return any(isinstance(inside, nn.Linear) for inside in module.modules())


def require_known_loop(model: nn.Module, batch: Batch | None = None) -> LoopSpec | None:
    """`find_loop`, refusing a model that recurs in a way that no family describes (ModelError names the repeated module and its calls)."""
    spec = find_loop(model)
    if spec is None and (names := unknown_recurrence(model, batch)):
        calls = count_calls(model, batch)[names[0]]
        raise ModelError(
            f"calls '{names[0]}' {calls} times in one forward pass, and its recurrence is of no known family",
            where=type(unwrap(model)).__name__,
            remedy=f"known: {', '.join(FAMILIES)}; add the family to prism_ray/models/loops.py",
        )
    return spec
