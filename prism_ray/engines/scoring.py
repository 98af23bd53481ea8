"""Teacher-forced log-likelihood of continuations, in slices between the steps of a batch.

    score(c) = sum_i log p(c_i | prompt, c_1 .. c_{i-1})

The prompt goes through the model once, a chunk at a time, into a cache of its own; the choices follow from copies of it, padded on the right (causal attention
does not look there). A slice is one forward of at most `chunk` tokens, so a long prompt does not hold up running streams. The rows of a slice come from one request:
a score has the same bits whatever else the engine does.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from typing import Any

import torch

from prism_ray.engines.planes_linear import PlaneStep
from prism_ray.engines.protocol import Score, Scoring


def score_slices(model: Any, step: PlaneStep, request: Scoring, chunk: int) -> Generator[None, None, list[Score]]:
    """Run one slice at each `next`; returns the scores. Between two slices the step may be set to anything else."""
    prompt = list(request.prompt)
    past: Any = None
    # The prompt's own logits are not wanted: over a large vocabulary they would be most of the work.
    keep = {"logits_to_keep": 1} if getattr(model, "_supports_logits_to_keep", lambda: False)() else {}
    for start in range(0, len(prompt) - 1, chunk):
        step.uniform(request.plane)
        ids = torch.tensor([prompt[start : min(start + chunk, len(prompt) - 1)]], device=model.device)
        past = model(input_ids=ids, past_key_values=past, use_cache=True, **keep).past_key_values
        yield
    out: list[Score] = []
    for group in _groups(request.choices, chunk):
        step.uniform(request.plane)
        out += _score_group(model, prompt[-1], group, past)
        yield
    return out


def _groups(choices: Sequence[Sequence[int]], chunk: int) -> list[list[Sequence[int]]]:
    """Choices in order, cut where the padded batch would exceed `chunk` tokens; a single choice may be longer."""
    groups: list[list[Sequence[int]]] = []
    for choice in choices:
        width = max(len(choice), *(len(other) for other in groups[-1])) if groups else 0
        if groups and (len(groups[-1]) + 1) * width <= chunk:
            groups[-1].append(choice)
        else:
            groups.append([choice])
    return groups


def _score_group(model: Any, last: int, choices: list[Sequence[int]], past: Any) -> list[Score]:
    width = max(len(choice) for choice in choices)
    rows = [[last, *choice[:-1]] + [0] * (width - len(choice)) for choice in choices]
    cache = copy.deepcopy(past)
    if cache is not None and len(choices) > 1:
        cache.batch_repeat_interleave(len(choices))
    logits = model(input_ids=torch.tensor(rows, device=model.device), past_key_values=cache, use_cache=cache is not None).logits
    scores = []
    for row, choice in enumerate(choices):
        logprobs = logits[row, : len(choice)].float().log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(list(choice), device=logits.device)[:, None])
        scores.append(Score(logprob=float(chosen.double().sum()), tokens=len(choice)))
    return scores
