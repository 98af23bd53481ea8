"""One generated answer, whole or as a stream, in the words of either route (`chat`, `completions`).

    1. model name -> target; prompt -> tokens; both fit the limits, or the request ends here
    2. the first piece is waited for before the first byte goes out: everything that can be refused is refused with its status
    3. pieces become chunks as they come, or one answer at the end; every piece must be of one plane

An answer that an engine aborts was not finished, and is an error: it never looks like one that ended by itself.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from prism_ray.engines.api import sse
from prism_ray.engines.api.backend import Piece, Target
from prism_ray.engines.api.errors import bad_request
from prism_ray.engines.api.exchange import Call, identity_headers
from prism_ray.engines.api.schemas import Sampled
from prism_ray.engines.api.text import context_error
from prism_ray.engines.protocol import Delta, EngineStopped, Generation, Sampling, TokenLogprob

LOWEST = -9999.0
"""Shown for a log-probability of minus infinity, which JSON does not have."""

COLDEST = 1e-6
"""Temperatures below are 0: logits divided by less leave the range of float32."""


@dataclass(kw_only=True)
class Answer:
    """What is known of an answer so far."""

    id: str
    model: str
    created: int
    prompt_tokens: int
    plane: str = ""
    generated: int = 0
    cached: int = 0
    finish: str | None = None
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def take(self, piece: Piece) -> Delta:
        """Count a piece. Raises EngineStopped for an aborted answer."""
        delta = piece.delta
        if self.plane not in ("", piece.plane):
            raise RuntimeError(f"an answer of plane {self.plane[:12]} went on with plane {piece.plane[:12]}")
        if delta.finish == "abort":
            raise EngineStopped("the engine ended the answer")
        self.plane = piece.plane
        self.generated += len(delta.token_ids)
        self.cached += delta.cached_tokens
        self.finish = delta.finish
        return delta

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens, as the API counts them."""
        return usage(self.prompt_tokens, self.generated, self.cached)

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint`: what the answer depends on besides the request."""
        return f"fp_{self.plane[:16]}"


def usage(prompt: int, generated: int, cached: int) -> dict[str, Any]:
    """The usage object."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Form(Protocol):
    """How a route writes an answer. prefix: of its id."""

    prefix: str

    def opening(self, answer: Answer) -> dict[str, Any] | None:
        """A chunk before all others."""

    def chunk(self, answer: Answer, delta: Delta) -> dict[str, Any]:
        """A chunk with new text, log-probabilities or the finish reason."""

    def closing(self, answer: Answer) -> dict[str, Any]:
        """The chunk with the usage."""

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The answer in one."""


def shown_logprob(value: float) -> float:
    """A log-probability for JSON."""
    return max(value, LOWEST)


def sampling(request: Sampled, max_tokens: int, logprobs: int | None, end: tuple[int, ...]) -> Sampling:
    """The engine's parameters. top_p 0 means the likeliest token, which is what temperature 0 is, and what a temperature near it comes to."""
    greedy = request.top_p == 0 or (request.temperature is not None and request.temperature < COLDEST)
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    ends = () if request.ignore_eos else end
    return Sampling(
        max_tokens=max_tokens,
        temperature=0.0 if greedy else 1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if greedy or request.top_p is None else request.top_p,
        top_k=request.top_k or 0,
        seed=request.seed,
        stop=tuple(stop),
        stop_token_ids=tuple(dict.fromkeys([*(request.stop_token_ids or ()), *ends])),
        logprobs=logprobs,
        ignore_eos=bool(request.ignore_eos),
    )


def answer_tokens(call: Call, prompt: int, wanted: int | None, default: int | None) -> int:
    """How many tokens the answer may have. default: where the request says none, None for what is left of the context. Raises ApiError 400."""
    limits, context = call.service.limits, call.service.backend.base.max_length
    if prompt == 0:
        raise bad_request("The prompt is empty.", "prompt", "invalid_value")
    if limits.max_prompt_tokens is not None and prompt > limits.max_prompt_tokens:
        raise bad_request(f"The prompt has {prompt} tokens, at most {limits.max_prompt_tokens} are allowed.", "prompt", "prompt_too_long")
    if wanted is not None and wanted > limits.max_tokens:
        raise bad_request(f"At most {limits.max_tokens} tokens can be asked for.", "max_tokens", "max_tokens_too_large")
    left = context - prompt
    if left < max(1, wanted or 1):
        raise context_error(prompt, wanted or 1, context)
    return wanted or min(left, limits.max_tokens, default or left)


async def answer(call: Call, request: Sampled, target: Target, prompt: list[int], settings: Sampling, form: Form) -> None:
    """Generate and send."""
    name = f"{form.prefix}-{secrets.token_hex(12)}"
    work = Generation(request_id=name, prompt=prompt, sampling=settings, salt=call.salt)
    result = Answer(id=name, model=target.model, created=int(time.time()), prompt_tokens=len(prompt))
    pieces = cast("AsyncGenerator[Piece]", call.service.backend.generate(target, work))
    try:
        async with aclosing(pieces):
            if request.stream:
                options = request.stream_options
                await _stream(call, target, pieces, result, form, bool(options and options.include_usage))
            else:
                await _whole(call, target, pieces, result, form)
    finally:
        if call.service.metrics is not None and result.plane:
            call.service.metrics.answered(target.label, prompt=result.prompt_tokens, generated=result.generated)


def _first(call: Call, result: Answer) -> None:
    if call.service.metrics is not None and not result.plane:
        call.service.metrics.first_token(call.route, time.monotonic() - call.began)


async def _whole(call: Call, target: Target, pieces: AsyncGenerator[Piece], result: Answer, form: Form) -> None:
    async for piece in pieces:
        _first(call, result)
        delta = result.take(piece)
        result.text.append(delta.text)
        result.logprobs += delta.logprobs
    if result.finish is None:
        raise EngineStopped("the answer has no end")
    await call.json(form.whole(result), headers=identity_headers(target, result.plane))


async def _stream(call: Call, target: Target, pieces: AsyncGenerator[Piece], result: Answer, form: Form, include_usage: bool) -> None:
    def written(chunk: dict[str, Any]) -> bytes:
        # With include_usage every chunk has the field, and only the last one a value.
        return sse.event({"usage": None, **chunk} if include_usage else chunk)

    async for piece in pieces:
        _first(call, result)
        delta = result.take(piece)
        if not call.streaming:
            await call.begin_stream(identity_headers(target, result.plane))
            if (opening := form.opening(result)) is not None:
                await call.event(written(opening))
        if delta.text or delta.logprobs or delta.finish:
            await call.event(written(form.chunk(result, delta)))
    if result.finish is None:
        raise EngineStopped("the answer has no end")
    await call.end_stream((sse.event(form.closing(result)) if include_usage else b"") + sse.DONE)
