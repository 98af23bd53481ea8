"""Choosing the next token of one sequence, whatever else is in the batch.

Logits [V] in float32. temperature 0: the largest logit, the first of equal ones. Otherwise transformers' own warpers in its order (temperature, top_k, top_p)
and one draw from a generator of the request's own: the same seed gives the same draws in every batch. Log-probabilities are of the distribution before any
warper. Logits that are not finite numbers (a damaged plane) end this sequence, not the step.
"""

from __future__ import annotations

import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from prism_ray.core.errors import ModelError
from prism_ray.engines.protocol import Sampling, TokenLogprob


class TokenSampler:
    """The sampler of one request."""

    def __init__(self, sampling: Sampling):
        self._top = sampling.logprobs
        self._warpers: LogitsProcessorList | None = None
        # Logits divided by less overflow to infinity, and their softmax is NaN.
        if sampling.temperature >= 1e-6:
            self._warpers = LogitsProcessorList()
            if sampling.temperature != 1.0:
                self._warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
            if sampling.top_k > 0:
                self._warpers.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1.0:
                self._warpers.append(TopPLogitsWarper(sampling.top_p))
            self._generator = torch.Generator()
            if sampling.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(sampling.seed)

    def choose(self, logits: torch.Tensor) -> tuple[int, TokenLogprob | None]:
        """(token, its log-probability where asked for). Raises ModelError for logits that are not finite."""
        logits = logits.float()
        if not bool(torch.isfinite(logits).all()):
            raise ModelError("the logits are not finite numbers", where="generation", remedy="check the scale plane of this request")
        if self._warpers is None:
            token = int(logits.argmax())
        else:
            scores = self._warpers(None, logits.unsqueeze(0))  # type: ignore[arg-type]
            token = int(torch.multinomial(scores.softmax(-1).cpu(), 1, generator=self._generator))
        return token, None if self._top is None else _logprob(logits, token, self._top)


def _logprob(logits: torch.Tensor, token: int, top: int) -> TokenLogprob:
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(min(top, logprobs.shape[0])) if top else None
    pairs = () if best is None else tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprob(token_id=token, logprob=float(logprobs[token]), top=pairs)
