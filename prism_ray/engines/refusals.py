"""What no engine can serve, whatever its load: refused before the first token, with `RequestRefused`.

Lengths are in tokens; a prompt and what is to follow it fit the model together. NaN and infinity are out of every range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from prism_ray.engines.protocol import BaseInfo, Generation, RequestRefused, Scoring


def require_generation(request: Generation, base: BaseInfo, *, tokenizer: bool, running: bool, max_logprobs: int | None = None) -> None:
    """tokenizer: whether there is one, without which no stop text can be found; running: whether a request of this id runs. max_logprobs: default the vocabulary."""
    sampling = request.sampling
    ranges = {
        "max_tokens": sampling.max_tokens >= 1,
        "temperature": 0 <= sampling.temperature < math.inf,
        "top_p": 0 < sampling.top_p <= 1,
        "top_k": sampling.top_k >= 0,
        "seed": sampling.seed is None or -(2**63) <= sampling.seed < 2**63,
        "logprobs": sampling.logprobs is None or 0 <= sampling.logprobs <= (base.vocab_size if max_logprobs is None else max_logprobs),
        "stop": not sampling.stop or tokenizer,
    }
    wrong = next((name for name, fine in ranges.items() if not fine), None)
    if wrong is not None:
        raise RequestRefused(f"{getattr(sampling, wrong)!r} is out of range", where=wrong)
    _require_prompt(request.prompt, sampling.max_tokens, base)
    if running:
        raise RequestRefused("a request of this id is running", where=request.request_id[:64])


def require_scoring(request: Scoring, base: BaseInfo) -> None:
    """Every choice has a token, and the longest fits behind the prompt."""
    if not request.choices or any(len(choice) == 0 for choice in request.choices):
        raise RequestRefused("a choice is empty", where="choices", remedy="give one token at least for each")
    _require_prompt(request.prompt, max(len(choice) for choice in request.choices), base)
    for choice in request.choices:
        _require_ids(choice, base, "choices")


def _require_prompt(prompt: Sequence[int], more: int, base: BaseInfo) -> None:
    if len(prompt) == 0:
        raise RequestRefused("the prompt is empty", where="prompt", remedy="give one token at least")
    if len(prompt) + more > base.max_length:
        raise RequestRefused(
            f"{len(prompt)} prompt tokens and {more} more exceed the {base.max_length} of this model", where="prompt", remedy="shorten it"
        )
    _require_ids(prompt, base, "prompt")


def _require_ids(ids: Sequence[int], base: BaseInfo, where: str) -> None:
    wrong = next((token for token in ids if not 0 <= token < base.vocab_size), None)
    if wrong is not None:
        raise RequestRefused(f"token {wrong} is outside the vocabulary of {base.vocab_size}", where=where)
