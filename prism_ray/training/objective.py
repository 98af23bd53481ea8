"""The module that every back end trains: a causal language model with its loss, features and label scores.

All passes go through `forward(mode=…)`, because DeepSpeed gathers ZeRO-3 parameters around the forward of the module it wraps. The head is applied to
scored positions only, in chunks whose logits are recomputed in the backward pass: nothing of size [batch, seq, vocab] ever exists.

Legend: B sequences, S length, n scored positions, d hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from prism_ray.models.families import split_head
from prism_ray.training.data import Batch
from prism_ray.training.scoring import PackedCandidates

HEAD_CHUNK = 512


class Objective(nn.Module):
    """Wraps a transformers or PEFT causal language model; `dtype` is the dtype it computes in."""

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.model = model
        self.dtype = dtype
        self._parts = split_head(model)

    def forward(self, mode: str, batch: Any) -> Any:
        """mode `hidden`: hidden [n, d] of a Batch; `features`: (hidden [n, d], ce [n]); `scores`: log-likelihoods [B, C] of PackedCandidates."""
        if mode == "hidden":
            return self.hidden(batch)
        if mode == "features":
            return self.features(batch)
        if mode == "scores":
            return self.scores(batch)
        raise ValueError(f"unknown mode {mode}")

    def hidden(self, batch: Batch) -> torch.Tensor:
        """Head inputs [n, d] at the scored positions of a batch, row-major; the head is not applied."""
        output = self._parts.backbone(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
        return output.last_hidden_state[batch.answer_mask]

    def features(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """`hidden`, and float32 cross-entropies [n] there."""
        hidden = self.hidden(batch)
        return hidden, self._cross_entropy(hidden, batch.targets)

    def scores(self, packed: PackedCandidates) -> torch.Tensor:
        """Summed log-likelihoods float32 [B, C] of every candidate answer."""
        output = self._parts.backbone(
            input_ids=packed.input_ids, position_ids=packed.position_ids, attention_mask=packed.additive_mask(self.dtype), use_cache=False
        )
        hidden = output.last_hidden_state[packed.positions[:, 0], packed.positions[:, 1]]
        ce = self._cross_entropy(hidden, packed.targets)
        total = torch.zeros(packed.input_ids.shape[0] * packed.candidates, dtype=torch.float32, device=ce.device)
        return total.index_add_(0, packed.owner.to(ce.device), -ce).view(-1, packed.candidates)

    def _cross_entropy(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        pieces = []
        for rows, wanted in zip(hidden.split(HEAD_CHUNK), targets.split(HEAD_CHUNK), strict=True):
            if torch.is_grad_enabled() and rows.requires_grad and hidden.shape[0] > HEAD_CHUNK:
                pieces.append(checkpoint(self._chunk, rows, wanted, use_reentrant=False))
            else:
                pieces.append(self._chunk(rows, wanted))
        return torch.cat(pieces)

    def _chunk(self, rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self._parts.logits(rows).float(), wanted, reduction="none")
