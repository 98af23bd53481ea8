"""The naive merge: W0 + scaling * B A of a LoRA, quantized again by RTN, weight-MSE, AWQ or GPTQ (scale-qlora §2, §5.3).

What a tool does that knows nothing of the adapter: the merged model in full precision is quantized as a whole, every scale and code chosen anew, and no training ever saw the result. Block
after block, in memory:

    1  GPTQ and AWQ: rows of the task's training examples that reach each weight (`hessian.capture`), through the blocks before as they are quantized
    2  AWQ: factors for the block's places (`calibrate.fold`), folded into norms and rows before
    3  planes of every quantized weight; those that are served as one matrix share a tensor scale (field case FMT-05)
    4  what leaves the block with its new weights enters the next one

A weight that no training row reaches, or that lies outside the blocks (a quantized head), is rounded to nearest; its record says so. The merged model is held in float32 while this runs:
for models that do not fit, write it out and use `prism-ray quantize`.

Refuses: methods with statistics without rows, looped models, experts that a family holds transposed. Legend: B sequences, S length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prism_ray.adapters.baselines.lora import lora_weights
from prism_ray.adapters.baselines.merge import BaselineMerge, Wanted, write_merge
from prism_ray.adapters.scale_plane import base_model
from prism_ray.calibrate.fold import Folding, fold_block
from prism_ray.calibrate.units import Unit, apply_planes, make_units, solve
from prism_ray.core.errors import DataError, ModelError
from prism_ray.formats.checkpoint import load_quantized_model
from prism_ray.formats.modules import FP4Linear, quantized_modules
from prism_ray.formats.spec import FORMATS
from prism_ray.formats.tensor import QuantTensor
from prism_ray.hessian.capture import Capture, InputGroup, use_our_experts
from prism_ray.hessian.state import GramState
from prism_ray.models.families import decoder_layers, split_head
from prism_ray.models.loops import find_loop
from prism_ray.quantizers.base import Factors, QuantizerOptions, TensorRecord
from prism_ray.quantizers.methods import METHODS
from prism_ray.training.data import Batch

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of one call of a block."""
Solved = dict[str, tuple[QuantTensor, Factors, TensorRecord]]
"""Weight (experts as name.<number>) -> planes, what was folded into it, record."""


def merge_posthoc(
    model: Any,
    base_folder: Path | str,
    out: Path | str,
    *,
    method: str = "rtn",
    batches: Sequence[Batch] = (),
    options: QuantizerOptions | None = None,
    adapter: str = "default",
    replace: bool = False,
) -> BaselineMerge:
    """Merge the LoRA `adapter` of a PEFT model into a copy of its base's checkpoint; returns what that lost.

    batches: of training rows, for methods that need statistics. options: of the quantizer. Raises UnknownName, DataError without rows, ModelError, FingerprintMismatch.
    """
    chosen, options = METHODS[method], options or QuantizerOptions()
    if chosen.needs_stats and not batches:
        raise DataError(f"method '{method}' needs training rows", where="batches", remedy="give batches of the task")
    # Names, not weights: one layer's W and W0 are made again when they are compared.
    formats = {name: module.format.name for name, module in quantized_modules(base_model(model))}
    dense = merged_dense(model, base_folder, adapter)
    if find_loop(dense) is not None:
        raise ModelError(
            "a looped model is quantized on its rollout", where=type(dense).__name__, remedy="write it out, use prism-ray quantize"
        )
    walk = _Walk(dense, formats, method, options)
    walk.run(batches if chosen.needs_stats else ())
    planes = {name: walk.planes(name) for name in formats}
    records = {name: _plain_record(record) for name, (_, _, record) in walk.solved.items()}
    factors = {name: found for name, (_, found, _) in walk.solved.items()}
    wanted = (Wanted(name=name, base=base, weight=weight, factors=factors[name]) for name, base, weight in lora_weights(model, adapter))
    return write_merge(
        model, base_folder, out, planes, wanted, method="qlora", rule=method, plain=walk.plain, records=records, replace=replace
    )


@torch.no_grad()
def merged_dense(model: Any, base_folder: Path | str, adapter: str = "default") -> Any:
    """The merged model in float32, no planes left in it: what a naive merge holds before it quantizes."""
    dense = load_quantized_model(base_folder, dtype=torch.float32)
    merged = {name: weight for name, _, weight in lora_weights(model, adapter)}
    for name, module in list(quantized_modules(dense)):
        parent = dense.get_submodule(name.rpartition(".")[0])
        leaf = name.rpartition(".")[2]
        weight = merged.pop(name).cpu() if name in merged else module.dequantize(torch.float32)
        if not isinstance(module, FP4Linear):
            if getattr(parent, "is_transposed", False):
                raise ModelError("its family holds experts transposed", where=name, remedy="write the model out, use prism-ray quantize")
            delattr(parent, leaf)
            parent.register_parameter(leaf, nn.Parameter(weight, requires_grad=False))
            continue
        linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if module.bias is not None:
            linear.bias = nn.Parameter(module.bias.detach().to(torch.float32), requires_grad=False)
        setattr(parent, leaf, linear)
    use_our_experts(dense)
    return dense.eval()


class _Walk:
    """One pass over the blocks of a merged model."""

    def __init__(self, dense: Any, formats: Mapping[str, str], method: str, options: QuantizerOptions):
        self.dense, self.formats, self.method, self.options = dense, formats, method, options
        self.solved: Solved = {}
        self.plain: dict[str, Tensor] = {}
        layers = decoder_layers(split_head(dense).backbone)
        paths = {id(module): name for name, module in dense.named_modules()}
        self.blocks = [(paths[id(layer)], layer) for layer in layers]

    @torch.no_grad()
    def run(self, batches: Sequence[Batch]) -> None:
        """Quantize every weight; without batches, without statistics."""
        calls = self._calls(batches)
        masks = [batch.attention_mask.to(torch.bool) for batch in batches]
        for index, (prefix, block) in enumerate(self.blocks):
            names = self._names(prefix)
            inputs = calls[index] if batches else []
            groups, states = self._collect(block, names, inputs, masks)
            units = make_units(block, groups)
            self._solve(prefix, block, names, units, states, inputs, masks)
            if batches and index + 1 < len(self.blocks):
                calls[index + 1] = [
                    ((_hidden(block(*args, **kwargs)), *following[0][1:]), following[1])
                    for (args, kwargs), following in zip(inputs, calls[index + 1], strict=True)
                ]
            calls[index] = []
        inside = tuple(f"{prefix}." for prefix, _ in self.blocks)
        rest = {name: chosen for name, chosen in self.formats.items() if not name.startswith(inside)}
        if rest:
            units = make_units(self.dense, self._unreached(self.dense, rest, []))
            self._solve("", self.dense, rest, units, {}, [], [])

    def _names(self, prefix: str) -> dict[str, str]:
        """Format names of a block's weights by path below it."""
        return {name.removeprefix(f"{prefix}."): chosen for name, chosen in self.formats.items() if name.startswith(f"{prefix}.")}

    def _calls(self, batches: Sequence[Batch]) -> list[list[Call]]:
        """The arguments that each block is called with, a batch each; hidden states of later blocks are replaced when they are known."""
        calls: list[list[Call]] = [[] for _ in self.blocks]

        def record(index: int) -> Any:
            # Only the first block's input is needed; keeping the others' would hold every activation of the model.
            return lambda module, args, kwargs: calls[index].append((args if index == 0 else (args[0][:0], *args[1:]), kwargs))

        hooks = [block.register_forward_pre_hook(record(index), with_kwargs=True) for index, (_, block) in enumerate(self.blocks)]
        try:
            for batch in batches:
                split_head(self.dense).backbone(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return calls

    def _collect(
        self, block: nn.Module, names: Mapping[str, str], inputs: Sequence[Call], masks: Sequence[Tensor]
    ) -> tuple[list[InputGroup], dict[str, GramState]]:
        """Groups of a block's weights with their states; without inputs every weight is a group of its own without rows."""
        if not inputs:
            return self._unreached(block, names, []), {}
        with Capture(block, list(names)) as capture:
            for (args, kwargs), mask in zip(inputs, masks, strict=True):
                with capture.batch(mask):
                    block(*args, **kwargs)
        missed = {name: names[name] for name in capture.missed}
        return [*capture.groups, *self._unreached(block, missed, capture.groups)], capture.states

    @staticmethod
    def _unreached(block: nn.Module, names: Mapping[str, str], groups: Sequence[InputGroup]) -> list[InputGroup]:
        """A group for each weight that no forward pass called."""
        found = []
        for name in names:
            held = getattr(block.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            weight: Any = held.weight if isinstance(held, nn.Module) else held
            found.append(InputGroup(name=name, members=(name,), width=weight.shape[-1], experts=weight.shape[0] if weight.ndim == 3 else 0))
        return found

    def _solve(
        self,
        prefix: str,
        block: nn.Module,
        names: Mapping[str, str],
        units: Sequence[Unit],
        states: Mapping[str, GramState],
        inputs: Sequence[Call],
        masks: Sequence[Tensor],
    ) -> None:
        """Planes of a block's weights; its weights become what the planes mean."""
        folding = Folding()
        if METHODS[self.method].choose is not None and inputs:
            (args, kwargs), mask = inputs[0], masks[0]
            folding = fold_block(
                block, prefix, units, names, states.get, lambda: _hidden(block(*args, **kwargs))[mask], self.method, self.options
            )
        solved = [
            entry for unit in units for entry in solve(unit, block, prefix, names, states, self.method, self.options, folding.factors)
        ]
        dotted = f"{prefix}." if prefix else ""
        for name, tensor, record in solved:
            self.solved[f"{dotted}{name}"] = (tensor, folding.factors.get(name, Factors()), record)
        apply_planes(block, {name: self.planes(f"{dotted}{name}") for name in names}, folding.plain)
        self.plain |= {f"{dotted}{path}": value for path, value in folding.plain.items()}

    def planes(self, name: str) -> QuantTensor:
        """Planes of a weight, of a fused one [E, O, I]."""
        if name in self.solved:
            return self.solved[name][0]
        parts = [self.solved[f"{name}.{expert}"][0] for expert in range(sum(key.rpartition(".")[0] == name for key in self.solved))]
        divisors = [part.divisor for part in parts if part.divisor is not None]
        return QuantTensor(
            codes=torch.stack([part.codes for part in parts]),
            scales=torch.stack([part.scales for part in parts]),
            tensor_scale=torch.stack([part.tensor_scale for part in parts]),
            format=FORMATS[self.formats[name]],
            divisor=torch.stack(divisors) if divisors else None,
        )


def _plain_record(record: TensorRecord) -> dict[str, Any]:
    """A record as JSON has it: None where there is no number."""
    return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in asdict(record).items()}


def _hidden(output: Any) -> Tensor:
    """The hidden states [B, S, H] that a block returns, alone or first of a tuple."""
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found
