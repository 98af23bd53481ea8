"""One decoder block of a model at a time: the model on meta, the block filled from the checkpoint, its input taken from outside.

`Skeleton` builds a causal language model without weights, fills what lies outside the decoder blocks (embedding, norms, head), and puts a pass-through in the place of every block. To run block i
on a chunk, the model's own forward is called with the chunk's token ids: it computes masks, positions and whatever else the family hands to its blocks, every pass-through before i
returns its input, and the one at i runs the real block on the stored input and ends the forward. So no family needs code here for what its blocks are called with.

Refuses: models whose blocks are called more than once in a forward (looped ones: `calibrate.whole`), blocks that return something else than one tensor of hidden states.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prism_ray.calibrate.text import Chunk
from prism_ray.core.errors import ModelError
from prism_ray.formats.parameters import load_block, meta_model
from prism_ray.formats.policy import QuantPlan, QuantPolicy, make_plan
from prism_ray.formats.sources import TensorSource
from prism_ray.hessian.capture import use_our_experts
from prism_ray.models.families import decoder_layers, split_head


class _Stop(Exception):
    """Ends a forward when its block is done."""

    def __init__(self, output: Tensor):
        self.output = output


class _Place(nn.Module):
    """Stands for block `index`: passes its input on, or runs the block that `Skeleton` has loaded."""

    def __init__(self, owner: Skeleton, index: int, block: nn.Module):
        super().__init__()
        # Not registered as submodules: the owner holds the model that holds this.
        self.__dict__["owner"], self.__dict__["block"], self.index = owner, block, index

    def __getattr__(self, name: str) -> Any:
        # Models read attributes of their blocks (attention_type, layer_type, …).
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["block"], name)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        owner = self.__dict__["owner"]
        if self.index < owner.target:
            return owner.given if owner.target == owner.layers == self.index + 1 else hidden
        assert self.index == owner.target, "a forward went past its block"
        if owner.block is None:
            raise _Stop(hidden)
        output = owner.block(hidden if owner.given is None else owner.given, *args, **kwargs)
        raise _Stop(output[0] if isinstance(output, tuple) else output)


class Skeleton:
    """A model's frame with one block in it.

    folder: a Hugging Face folder (any layout that `formats.sources` reads). dtype: of weights and computation. `layers`: number of decoder blocks; `prefix(i)`: block i's path in the model.
    """

    def __init__(self, folder: Path | str, dtype: torch.dtype):
        self.source = TensorSource(folder)
        self.dtype = dtype
        self.model: Any = meta_model(folder)
        self.model.eval()
        self.model.tie_weights()
        use_our_experts(self.model)
        self.language_model = split_head(self.model)
        held = decoder_layers(self.language_model.backbone)
        self._path = next(name for name, module in self.model.named_modules() if module is held)
        self._meta = list(held)
        self.layers = len(self._meta)
        self.target = -1
        self.block: nn.Module | None = None
        self.given: Tensor | None = None
        for index, block in enumerate(self._meta):
            held[index] = _Place(self, index, block)
        self._fill_frame()

    def _fill_frame(self) -> None:
        """Load every module outside the decoder blocks. A tied head is the embedding's own storage."""
        for name, module in list(self.model.named_modules()):
            inside = name == self._path or name.startswith(f"{self._path}.")
            if inside or not list(module.named_parameters(recurse=False)):
                continue
            if module is self.language_model.head and self._declared_tied():
                continue
            load_block(self.source, module, name, self.dtype)
        if self._declared_tied():
            self.language_model.head.weight = self.model.get_input_embeddings().weight

    def _declared_tied(self) -> bool:
        return bool(getattr(self.model.config.get_text_config(), "tie_word_embeddings", False))

    def plan(self, policy: QuantPolicy) -> QuantPlan:
        """The plan of the whole model, made on shapes alone."""
        return make_plan(meta_model(self.source.folder), policy)

    def prefix(self, index: int) -> str:
        """Module path of a block, such as model.layers.3."""
        return f"{self._path}.{index}"

    @contextmanager
    def loaded(self, index: int) -> Iterator[nn.Module]:
        """Block `index` with its weights; they are dropped on exit."""
        block = copy.deepcopy(self._meta[index])
        load_block(self.source, block, self.prefix(index), self.dtype)
        block.eval()
        self.block, self.target = block, index
        try:
            yield block
        finally:
            self.block, self.target = None, -1

    @torch.no_grad()
    def embed(self, chunk: Chunk) -> Tensor:
        """What the first block gets for a chunk."""
        self.target, self.block = 0, None
        try:
            return self._forward(chunk, None)
        finally:
            self.target = -1

    @torch.no_grad()
    def run(self, chunk: Chunk, hidden: Tensor) -> Tensor:
        """The loaded block's output for a chunk whose input is `hidden`."""
        return self._forward(chunk, hidden)

    def _forward(self, chunk: Chunk, hidden: Tensor | None) -> Tensor:
        self.given = hidden
        # Without padding there is no mask to give: the attention is then the plain causal one, which is also the fastest.
        mask = None if bool(chunk.mask.all()) else chunk.mask.to(torch.int64)
        try:
            output = self.language_model.backbone(input_ids=chunk.input_ids, attention_mask=mask, use_cache=False)
        except _Stop as stop:
            if not isinstance(stop.output, Tensor):
                raise ModelError("its block returns no tensor of hidden states", where=type(self.model).__name__) from None
            return stop.output
        finally:
            self.given = None
        if self.target != self.layers:
            raise ModelError("its forward pass never reached the block", where=type(self.model).__name__)
        last: Tensor = output.last_hidden_state
        return last

    @torch.no_grad()
    def finish(self, chunk: Chunk, hidden: Tensor) -> Tensor:
        """The head's input [B, T, hidden] for what the last block gave for a chunk: the final norm, and whatever else the family does there."""
        self.target = self.layers
        try:
            return self._forward(chunk, hidden)
        finally:
            self.target = -1

    def logits(self, chunk: Chunk, hidden: Tensor) -> Tensor:
        """The model's logits [B, T, vocab] for what the last block gave for a chunk."""
        with torch.no_grad():
            return self.language_model.logits(self.finish(chunk, hidden))
