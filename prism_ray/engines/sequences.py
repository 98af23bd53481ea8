"""What runs: one generation with its sampler and its text, one scoring request with its slices."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from prism_ray.engines.detokenize import StopTexts, TextStream
from prism_ray.engines.protocol import Delta, FinishReason, Generation, Score
from prism_ray.engines.sampling import TokenSampler


@dataclass(eq=False, kw_only=True)
class Sequence:
    """One running generation. stops: token ids that end it. outputs: what the consumer reads, filled on the event loop. done: its last output is there."""

    request: Generation
    stops: frozenset[int]
    sampler: TokenSampler
    text: TextStream | None
    stop_texts: StopTexts
    outputs: asyncio.Queue[Delta | Exception] = field(default_factory=asyncio.Queue)
    generated: int = 0
    cached_tokens: int = 0
    ended: bool = False
    done: bool = False

    def advance(self, logits: torch.Tensor) -> tuple[int, Delta]:
        """The next token and what it adds."""
        token, logprob = self.sampler.choose(logits)
        self.generated += 1
        finish: FinishReason | None = None
        text, found = self.stop_texts.push(self.text.push(token) if self.text is not None else "")
        if found or token in self.stops:
            finish = "stop"
        elif self.generated >= self.request.sampling.max_tokens:
            finish = "length"
        if finish is not None and not found:
            text += self.stop_texts.flush()
        cached = self.cached_tokens if self.generated == 1 else 0
        logprobs = () if logprob is None else (logprob,)
        return token, Delta(token_ids=(token,), text=text, logprobs=logprobs, finish=finish, cached_tokens=cached)


Output = tuple[Sequence, Delta | Exception]


@dataclass(eq=False)
class ScoreJob:
    """Slices of a scoring request. cancelled: nobody waits any more."""

    slices: Generator[None, None, list[Score]]
    result: Future[list[Score]] = field(default_factory=Future)
    cancelled: bool = False

    def require_added(self, added: Future[None]) -> None:
        """The end of the command that queued it: where that failed, so did the job."""
        if (error := added.exception()) is not None:
            self.result.set_exception(error)
