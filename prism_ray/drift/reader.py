"""Read a model's features: one forward pass a batch, hidden states at the scored positions, routers' choices where there are experts.

Batches may be padded on either side; position ids are counted over real tokens, so that padding moves no position.

Legend: B sequences, S length, n scored positions, d hidden size, L router layers, k experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from prism_ray.models.families import split_head, unwrap
from prism_ray.training.data import Batch, Encoded, collate

Side = Literal["left", "right"]


@dataclass(frozen=True)
class Features:
    """hidden: float32 [n, d] at the scored positions, row-major; experts: int16 [n, L, k], sorted, or None for a dense model."""

    hidden: torch.Tensor
    experts: torch.Tensor | None


class FeatureReader:
    """Features of one model. Construction takes the model apart (ModelError where that cannot be done)."""

    def __init__(self, model: Any):
        self.parts = split_head(model)
        text = cast(Any, unwrap(model)).config.get_text_config()
        self.experts_per_token = int(getattr(text, "num_experts_per_tok", 0) or 0)
        self._routers = _routers(self.parts.backbone) if self.experts_per_token else []

    @torch.inference_mode()
    def read(self, batch: Batch) -> Features:
        """One forward pass; the head is not applied."""
        chosen: list[torch.Tensor] = []
        hooks = [router.register_forward_hook(lambda _module, _args, output: chosen.append(_scores(output))) for router in self._routers]
        try:
            positions = (batch.attention_mask.cumsum(dim=1) - 1).clamp_(min=0)
            output = self.parts.backbone(
                input_ids=batch.input_ids, attention_mask=batch.attention_mask, position_ids=positions, use_cache=False
            )
        finally:
            for hook in hooks:
                hook.remove()
        hidden = output.last_hidden_state[batch.answer_mask].to(torch.float32)
        return Features(hidden, self._top(chosen, batch) if chosen else None)

    def _top(self, chosen: list[torch.Tensor], batch: Batch) -> torch.Tensor:
        """The experts of every scored token, from router scores [B * S, E] of each layer."""
        flat = batch.answer_mask.reshape(-1)
        top = [scores.reshape(flat.numel(), -1)[flat].topk(self.experts_per_token, dim=-1).indices for scores in chosen]
        return torch.stack(top, dim=1).sort(dim=-1).values.to(torch.int16)


def layout(items: Sequence[Encoded], pad_id: int, side: Side = "right") -> Batch:
    """Collate with padding on `side`. Scored positions stand in the same order either way."""
    batch = collate(items, pad_id)
    if side == "right":
        return batch
    size = batch.input_ids.shape[1]
    moved = [torch.full_like(batch.input_ids, pad_id), torch.zeros_like(batch.attention_mask), torch.zeros_like(batch.answer_mask)]
    for row, item in enumerate(items):
        length = len(item.input_ids)
        for target, source in zip(moved, (batch.input_ids, batch.attention_mask, batch.answer_mask), strict=True):
            target[row, size - length :] = source[row, :length]
    return Batch(moved[0], moved[1], moved[2], batch.targets, batch.ids)


def _routers(backbone: torch.nn.Module) -> list[torch.nn.Module]:
    """The routers of transformers' sparse blocks: modules named `gate` or `router` beside `experts`."""
    found: list[torch.nn.Module] = []
    for _, block in backbone.named_modules():
        if isinstance(getattr(block, "experts", None), torch.nn.Module):
            router = getattr(block, "gate", None) or getattr(block, "router", None)
            if isinstance(router, torch.nn.Module):
                found.append(router)
    return found


def _scores(output: Any) -> torch.Tensor:
    """Router logits: the output itself, or the first of a tuple."""
    first = output[0] if isinstance(output, tuple) else output
    return first.detach()
