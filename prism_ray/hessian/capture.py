"""Rows that reach a block's weights during a forward pass, added to one GramState for each distinct input.

*Groups*: modules that are called with the very same tensor (q/k/v, gate/up) share one state; which they are is seen in the first forward, not read from
names. *Masks*: `Capture.batch(mask)` says which positions are tokens; padding never counts, also where a module flattens [batch, time]. *Steps*: a module that is called several times in
a forward has its calls numbered, and the window says which count. *Experts*: the fused 3-D experts of transformers are called through the interface that transformers has for it
(`ALL_EXPERTS_FUNCTIONS`), so that expert e sees exactly its routed rows: its gate_up projection the hidden states, its down projection what comes out of the gate.

A row that counts and is not finite raises NonFinite with the module and the sample's place in the batch, at the first module that sees it. The sums of the pass are dropped
then: modules before that one hold part of the sample (field case CAL-10).

Legend: B batch, T time, I input width, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from prism_ray.core.errors import DataError, ModelError
from prism_ray.hessian.state import GramState
from prism_ray.hessian.windows import Window

EXPERTS = "prism_ray"
"""Name of our experts function in transformers' interface."""


class NonFinite(DataError):
    """An input of a module holds NaN or infinity. row: its place in the batch [B]."""

    def __init__(self, what: str, *, where: str = "", remedy: str = "", row: int = -1):
        super().__init__(what, where=where, remedy=remedy)
        self.row = row


@dataclass(frozen=True, kw_only=True)
class InputGroup:
    """What shares one input. name: its leader's module path, or `<experts>.gate_up_proj`. members: weights, in module order. experts: number of experts of a fused
    projection, 0 for Linear modules; its states are called `name.<expert>`."""

    name: str
    members: tuple[str, ...]
    width: int
    experts: int = 0

    @property
    def states(self) -> list[str]:
        """Keys of the group's states."""
        return [self.name] if not self.experts else [f"{self.name}.{expert}" for expert in range(self.experts)]


class Capture:
    """Collects states for the weights `names` (paths below `root`): Linear modules and fused expert parameters.

    After the passes: `groups`, `states` {key: GramState}, `calls` {module: calls of one forward}. Use as a context manager; hooks are gone on exit.
    """

    def __init__(self, root: nn.Module, names: Sequence[str], *, window: Window | None = None, steps: Mapping[str, int] | None = None):
        """steps: calls per forward of each module where it is not 1 (`models.loops.count_calls`), of fused experts under the name of their module; other counts
        than these are refused."""
        self.window = window or Window()
        self.states: dict[str, GramState] = {}
        self.calls: dict[str, int] = {}
        self._steps = dict(steps or {})
        self._leader: dict[str, str] = {}
        self._width: dict[str, int] = {}
        self._experts: dict[str, int] = {}
        self._inputs: list[tuple[Tensor, str]] = []
        self._order = list(names)
        self._mask: Tensor | None = None
        self._seen: dict[str, int] = {}
        self._hooks: list[Any] = []
        self._modules: list[nn.Module] = []
        try:
            for name in names:
                self._attach(root, name)
        except BaseException:
            self.close()
            raise

    def _attach(self, root: nn.Module, name: str) -> None:
        parent_name, _, leaf = name.rpartition(".")
        parent = root.get_submodule(parent_name)
        target = getattr(parent, leaf)
        if isinstance(target, nn.Module):
            self._hooks.append(target.register_forward_pre_hook(self._hook(name)))
            return
        if getattr(parent, "_prism_capture", None) not in (None, self):
            raise ModelError("its experts are captured by another pass already", where=parent_name)
        self._experts[name] = int(target.shape[0])
        if parent not in self._modules:
            parent._prism_capture = self  # type: ignore[assignment]
            parent._prism_name = parent_name  # type: ignore[assignment]
            self._modules.append(parent)

    def close(self) -> None:
        """Take all hooks away."""
        for hook in self._hooks:
            hook.remove()
        for module in self._modules:
            del module._prism_capture, module._prism_name
        self._hooks, self._modules = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def batch(self, mask: Tensor) -> Iterator[None]:
        """One forward pass over a batch whose tokens are where mask bool [B, T] is true."""
        # An integer mask would select rows by number.
        self._mask = mask.to(torch.bool)
        self.calls = {}
        try:
            yield
        finally:
            self._mask = None
            self._inputs = []
        for name, count in self.calls.items():
            if count != (expected := self._expected(name)):
                raise ModelError(f"was called {count} times in a forward pass, not {expected}", where=name, remedy="give the loop's steps")

    def _expected(self, name: str) -> int:
        """Calls of a module in one forward."""
        return self._steps.get(name, self._steps.get(name.rpartition(".")[0], 1) if name in self._experts else 1)

    @property
    def groups(self) -> list[InputGroup]:
        """Groups in module order; only modules that were called are in them."""
        members: dict[str, list[str]] = {}
        for name in self._order:
            if name in self._leader:
                members.setdefault(self._leader[name], []).append(name)
        return [
            InputGroup(name=leader, members=tuple(found), width=self._width[leader], experts=self._experts.get(leader, 0))
            for leader, found in members.items()
        ]

    @property
    def missed(self) -> list[str]:
        """Weights that no forward pass has called (field case CAL-04)."""
        return [name for name in self._order if name not in self._leader]

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if self._mask is None:
                return
            step = self.calls.get(name, 0)
            self.calls[name] = step + 1
            leader = self._leader_of(name, args[0])
            if leader == name:
                self._width[name] = args[0].shape[-1]
                self._add(name, name, self._tokens(args[0], name), step)

        return hook

    def _leader_of(self, name: str, x: Tensor) -> str:
        """The first module of this forward that was called with the same tensor; the same one in every forward."""
        # The tensors are kept until the forward ends, so that no later one can get the address of an earlier one.
        found = next((other for tensor, other in self._inputs if tensor is x), name)
        if found == name:
            self._inputs.append((x, name))
        known = self._leader.setdefault(name, found)
        if known != found:
            if known == name:
                # It led alone before; its own rows stay right, whoever else sees them.
                return name
            raise ModelError(f"shared its input with '{known}' in one forward pass and not in another", where=name)
        return known

    def _tokens(self, x: Tensor, name: str) -> Tensor:
        """Rows [R, I] of the tokens of an input [B, T, ..., I], [B * T, ..., I] or, with a place for heads, [B, 1, T, I]."""
        assert self._mask is not None
        mask = self._mask
        if x.shape[:2] == mask.shape:
            rows = x.flatten(0, 1)
        elif x.shape[0] == mask.numel():
            rows = x
        elif x.ndim == 4 and x.shape[1] == 1 and x[:, 0].shape[:2] == mask.shape:
            # The latent of deepseek's attention, which has one head before it is expanded.
            rows = x.flatten(0, 2)
        else:
            raise ModelError(f"its input {list(x.shape)} has no place for {list(mask.shape)} tokens", where=name)
        if not bool(mask.all()):
            rows = rows[mask.flatten()]
        return rows.reshape(-1, x.shape[-1])

    def _add(self, key: str, module: str, rows: Tensor, step: int, tokens: Tensor | None = None) -> None:
        """Count rows [R, I]; tokens: flattened positions [R] of routed rows, default all that the mask holds."""
        steps = self._expected(module)
        weight = self.window.weight(step, steps)
        offset = self._seen.get(f"{key} {step}", 0)
        self._seen[f"{key} {step}"] = offset + rows.shape[0]
        if weight == 0.0:
            return
        state = self.states.get(key) or GramState(width=rows.shape[-1])
        state = state.add(self.window.rows(rows, step, steps, offset), weight=weight, step=step)
        # The sum of magnitudes is finite exactly when every row is (float64 cannot overflow on float32 inputs).
        if state.absolute is not None and not bool(torch.isfinite(state.absolute).all()):
            raise self._fault(module, rows, tokens)
        self.states[key] = state

    def _fault(self, module: str, rows: Tensor, tokens: Tensor | None) -> NonFinite:
        """The error for rows of which one is not finite."""
        assert self._mask is not None
        self.states.clear()
        if tokens is None:
            tokens = self._mask.flatten().nonzero().flatten()
        bad = int((~torch.isfinite(rows.to(torch.float32))).any(-1).nonzero()[0])
        # A token of a 4-D input has several rows.
        place = int(tokens[bad * tokens.shape[0] // rows.shape[0]])
        return NonFinite("its input holds NaN or infinity", where=module, row=place // self._mask.shape[1])

    def experts(self, module: nn.Module, leaf: str, expert: int, rows: Tensor, tokens: Tensor) -> None:
        """Rows [R, I] that an expert's projection `leaf` got for the flattened positions `tokens` [R]; called by `experts_forward`."""
        if self._mask is None:
            return
        name = f"{module._prism_name}.{leaf}"
        if name not in self._experts:
            return
        self._leader[name] = name
        self._width[name] = rows.shape[-1]
        keep = self._mask.flatten()[tokens]
        if not bool(keep.all()):
            rows, tokens = rows[keep], tokens[keep]
        self._add(f"{name}.{expert}", name, rows, self.calls.get(name, 1) - 1, tokens)

    def experts_called(self, module: nn.Module, positions: int) -> None:
        """Count a call of an experts module with so many flattened positions."""
        if self._mask is None:
            return
        if positions != self._mask.numel():
            what = f"its input of {positions} rows has no place for {list(self._mask.shape)} tokens"
            raise ModelError(what, where=str(module._prism_name))
        for name in self._experts:
            if name.rpartition(".")[0] == module._prism_name:
                self.calls[name] = self.calls.get(name, 0) + 1
                self._leader.setdefault(name, name)


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of a transformers experts module, one expert at a time: hidden [N, H], index and weights [N, K] -> [N, H].

    Works on every layout that the interface describes (transposed or not, with and without gate and biases), and on expert weights held as FP4 planes.
    """
    capture: Capture | None = getattr(module, "_prism_capture", None)
    first = "gate_up_proj" if module.has_gate else "up_proj"
    out = torch.zeros_like(hidden_states)
    if capture is not None:
        capture.experts_called(module, hidden_states.shape[0])
        for leaf in (first, "down_proj"):
            capture._width.setdefault(f"{module._prism_name}.{leaf}", _expert_weight(module, leaf, 0).shape[-1])
    for expert in top_k_index.unique().tolist():
        if expert >= module.num_experts:
            continue  # transformers' mark for a slot that belongs to no expert of this process
        tokens, slot = torch.where(top_k_index == expert)
        rows = hidden_states[tokens]
        if capture is not None:
            capture.experts(module, first, expert, rows, tokens)
        inner = _expert_linear(module, first, expert, rows)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        if capture is not None:
            capture.experts(module, "down_proj", expert, inner, tokens)
        result = _expert_linear(module, "down_proj", expert, inner) * top_k_weights[tokens, slot, None]
        out.index_add_(0, tokens, result.to(out.dtype))
    return out


def _expert_weight(module: Any, leaf: str, expert: int) -> Tensor:
    """Weight [O, I] of one expert."""
    held = getattr(module, leaf)
    weight: Tensor = held[expert]
    # Planes are always [E, O, I]; a parameter is [E, I, O] where the family transposes.
    return weight.T if module.is_transposed and isinstance(held, Tensor) else weight


def _expert_linear(module: Any, leaf: str, expert: int, rows: Tensor) -> Tensor:
    bias = getattr(module, f"{leaf}_bias", None)
    return torch.nn.functional.linear(rows, _expert_weight(module, leaf, expert), None if bias is None else bias[expert])


def use_our_experts(model: Any) -> None:
    """Let a transformers model call `experts_forward` for its fused experts; models without any are left alone."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if EXPERTS not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)
    for part in {id(config): config for config in (model.config, model.config.get_text_config())}.values():
        part._experts_implementation = EXPERTS
