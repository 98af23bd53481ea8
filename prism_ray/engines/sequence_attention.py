"""Attention over packed sequences, one sequence at a time.

Continuous batching packs the tokens of a step into one row [1, heads, T, d] and keeps keys and values in paged blocks. transformers' own SDPA path multiplies
all queries with all keys and masks the product: its cost grows with the square of the number of sequences, and the blocks in which the softmax is summed, hence
the last bits, depend on who else is in the batch. Here each sequence attends to its own keys only:

    out_i = softmax(q_i k_i' * scaling + causal) v_i,   q_i [Q_i, d], k_i, v_i [K_i, d];  query j sees keys t with 0 <= (K_i - Q_i + j) - t < window

so a sequence's attention has the same bits in every batch. Registered with transformers under `NAME`; an ordinary forward (no paged cache) goes through it too.
Attention sinks and logit soft-capping are computed in plain torch, softmax in float32; other extras of an architecture are refused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from prism_ray.core.errors import ModelError

NAME = "prism_sequences"
_thread = threading.local()


@contextmanager
def packed_step() -> Iterator[None]:
    """Around a forward over packed tokens: no mask is built, and attention without its paged cache is an error instead of a wrong answer."""
    _thread.packed = True
    try:
        yield
    finally:
        _thread.packed = False


def _packed() -> bool:
    return getattr(_thread, "packed", False)


def attend_sequences(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers: query [B, H, Q, d], key and value [B, Hkv, K, d] -> [B, Q, H, d]."""
    if kwargs.get("position_bias") is not None:
        raise ModelError("attention with a position bias", where=type(module).__name__, remedy="serve it with another engine")
    if cache is None:
        if _packed():
            raise ModelError("the model does not pass the paged cache to its attention", where=type(module).__name__)
        out = _attend(module, query, key, value, attention_mask, attention_mask is None and query.shape[2] > 1, scaling, softcap)
        return out.transpose(1, 2).contiguous(), None
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    queries, keys = kwargs["cu_seq_lens_q"].tolist(), kwargs["cu_seq_lens_k"].tolist()
    out = query.new_empty((query.shape[0], query.shape[1], query.shape[2], value.shape[-1]))
    for (a, b), (c, d) in zip(pairwise(queries), pairwise(keys), strict=True):
        mask, causal = _visible(b - a, d - c, sliding_window, query.device)
        out[:, :, a:b] = _attend(module, query[:, :, a:b], key[:, :, c:d], value[:, :, c:d], mask, causal, scaling, softcap)
    return out.transpose(1, 2).contiguous(), None


def _visible(queries: int, keys: int, window: int | None, device: torch.device) -> tuple[torch.Tensor | None, bool]:
    """(mask [Q, K] or None, whether plain causal does) of a sequence whose queries are its last tokens."""
    limited = window is not None and keys > window
    if not limited and (queries == 1 or queries == keys):
        return None, queries > 1
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)[None, :]
    seen = distance >= 0
    return (seen & (distance < window) if window is not None else seen), False


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    sinks = getattr(module, "sinks", None)
    groups = query.shape[1] // key.shape[1]
    if sinks is None and softcap is None:
        return nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=groups > 1
        )
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = (query @ key.transpose(2, 3)).float() * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(dim=-1)
    return (weights if sinks is None else weights[..., :-1]).to(value.dtype) @ value


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    return None if _packed() else sdpa_mask(*args, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(NAME, attend_sequences)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
