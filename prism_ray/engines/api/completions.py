"""POST /v1/completions: a text or token ids, and what follows."""

from __future__ import annotations

from typing import Any

from prism_ray.engines.api.answers import Answer, answer, answer_tokens, sampling, shown_logprob
from prism_ray.engines.api.exchange import Call
from prism_ray.engines.api.schemas import CompletionRequest, parse
from prism_ray.engines.api.text import Tokens
from prism_ray.engines.protocol import Delta, TokenLogprob

DEFAULT_TOKENS = 16
"""Of an answer where the request says none, as the OpenAI API has it for this route."""


async def completions(call: Call) -> None:
    """The route's handler."""
    request = parse(CompletionRequest, call.body)
    asked = request.one_prompt
    target = await call.service.backend.resolve(request.model, call.caller.sees)
    prompt = await call.service.tokenize(lambda tokens: tokens.encode(asked))
    room = answer_tokens(call, len(prompt), request.max_tokens, DEFAULT_TOKENS)
    settings = sampling(request, room, request.logprobs, ())
    await answer(call, request, target, prompt, settings, CompletionForm(call.service.tokens))


class CompletionForm:
    """See `answers.Form`."""

    prefix = "cmpl"

    def __init__(self, tokens: Tokens):
        self._tokens = tokens
        self._offset = 0

    def opening(self, answer: Answer) -> dict[str, Any] | None:
        return None

    def chunk(self, answer: Answer, delta: Delta) -> dict[str, Any]:
        return self._with(answer, delta.text, self._logprobs(delta.logprobs) if delta.logprobs else None, delta.finish)

    def closing(self, answer: Answer) -> dict[str, Any]:
        return self._head(answer) | {"choices": [], "usage": answer.usage}

    def whole(self, answer: Answer) -> dict[str, Any]:
        logprobs = self._logprobs(answer.logprobs) if answer.logprobs else None
        return self._with(answer, "".join(answer.text), logprobs, answer.finish) | {"usage": answer.usage}

    @staticmethod
    def _head(answer: Answer) -> dict[str, Any]:
        head = {"id": answer.id, "object": "text_completion", "created": answer.created, "model": answer.model}
        return head | {"system_fingerprint": answer.fingerprint}

    def _with(self, answer: Answer, text: str, logprobs: dict[str, Any] | None, finish: str | None) -> dict[str, Any]:
        return self._head(answer) | {"choices": [{"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}]}

    def _logprobs(self, logprobs: list[TokenLogprob] | tuple[TokenLogprob, ...]) -> dict[str, Any]:
        """text_offset: where each token begins in the joined texts of the tokens, over all chunks."""
        shown = [self._tokens.show(each.token_id)[0] for each in logprobs]
        offsets = []
        for text in shown:
            offsets.append(self._offset)
            self._offset += len(text)
        tops = [{self._tokens.show(token)[0]: shown_logprob(value) for token, value in each.top} for each in logprobs]
        return {
            "tokens": shown,
            "token_logprobs": [shown_logprob(each.logprob) for each in logprobs],
            "top_logprobs": [top | {text: shown_logprob(each.logprob)} for top, text, each in zip(tops, shown, logprobs, strict=True)],
            "text_offset": offsets,
        }
