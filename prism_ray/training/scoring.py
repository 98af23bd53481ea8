"""Label scores: the log-likelihood of every candidate answer after a prompt, in one forward pass an example.

`packed` lays the candidates of an example behind its prompt once, each as a branch that sees the prompt and itself: a block mask and repeated
position ids make every branch's features equal to those of prompt + candidate alone, for models whose layers mix tokens by attention only. With ten labels
that is about four times fewer tokens than scoring prompt + candidate ten times, which `plain` does for any model.

Legend: B examples, S packed length, C candidates, n scored tokens, d hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from prism_ray.training.data import Encoded


@dataclass(frozen=True, slots=True)
class PackedCandidates:
    """input_ids, position_ids: int64 [B, S]; allowed: bool [B, 1, S, S], query x key; positions: int64 [n, 2] (row, column) whose features predict
    `targets` [n]; owner: int64 [n], row * C + candidate."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    allowed: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    owner: torch.Tensor
    candidates: int

    def additive_mask(self, dtype: torch.dtype) -> torch.Tensor:
        """The mask as attention adds it: 0 where allowed, the dtype's minimum elsewhere."""
        return torch.zeros(self.allowed.shape, dtype=dtype).masked_fill_(~self.allowed, torch.finfo(dtype).min)


def pack_candidates(groups: Sequence[Sequence[Encoded]], pad_id: int) -> PackedCandidates:
    """Pack B examples, each a group of C encoded candidates that share their prompt tokens."""
    rows = [_pack_one(group) for group in groups]
    size = max(len(row[0]) for row in rows)
    count = len(groups[0])
    ids = torch.full((len(rows), size), pad_id, dtype=torch.int64)
    places = torch.zeros((len(rows), size), dtype=torch.int64)
    # A padding query sees itself only: a row without any allowed key would be NaN in softmax.
    allowed = torch.eye(size, dtype=torch.bool).repeat(len(rows), 1, 1)
    positions: list[tuple[int, int]] = []
    targets: list[int] = []
    owner: list[int] = []
    for row, (tokens, place, branch, scored) in enumerate(rows):
        length = len(tokens)
        ids[row, :length], places[row, :length] = torch.tensor(tokens), torch.tensor(place)
        marks = torch.tensor(branch)
        causal = torch.tensor(place).unsqueeze(1) >= torch.tensor(place).unsqueeze(0)
        allowed[row, :length, :length] = causal & ((marks.unsqueeze(0) == -1) | (marks.unsqueeze(0) == marks.unsqueeze(1)))
        for column, target, candidate in scored:
            positions.append((row, column))
            targets.append(target)
            owner.append(row * count + candidate)
    return PackedCandidates(ids, places, allowed.unsqueeze(1), torch.tensor(positions), torch.tensor(targets), torch.tensor(owner), count)


def _pack_one(group: Sequence[Encoded]) -> tuple[list[int], list[int], list[int], list[tuple[int, int, int]]]:
    """Tokens, position ids and branch marks (-1: prompt) of one example, and its scored (column, target, candidate)."""
    shared = max(1, min(item.prompt_tokens for item in group))
    tokens = list(group[0].input_ids[:shared])
    place = list(range(shared))
    branch = [-1] * shared
    scored: list[tuple[int, int, int]] = []
    for candidate, item in enumerate(group):
        start = len(tokens)
        tail = item.input_ids[shared:]
        tokens += tail
        place += range(shared, shared + len(tail))
        branch += [candidate] * len(tail)
        for offset, target in enumerate(tail):
            # Where prompts of candidates split before the answer, only tokens after the candidate's own boundary count.
            if shared + offset >= max(item.prompt_tokens, 1):
                scored.append((shared - 1 if offset == 0 else start + offset - 1, target, candidate))
    return tokens, place, branch, scored
