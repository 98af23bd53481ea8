"""POST /v1/chat/completions: messages through the tokenizer's chat template, and the answer as a chat completion or its chunks."""

from __future__ import annotations

from typing import Any

from prism_ray.engines.api.answers import Answer, answer, answer_tokens, sampling, shown_logprob
from prism_ray.engines.api.exchange import Call
from prism_ray.engines.api.schemas import ChatRequest, parse
from prism_ray.engines.api.text import Tokens
from prism_ray.engines.protocol import Delta, TokenLogprob


async def chat(call: Call) -> None:
    """The route's handler."""
    request = parse(ChatRequest, call.body)
    target = await call.service.backend.resolve(request.model, call.caller.sees)
    prompt = await call.service.tokenize(lambda tokens: tokens.encode_chat(request.messages))
    asked = [value for value in (request.max_completion_tokens, request.max_tokens) if value is not None]
    room = answer_tokens(call, len(prompt), min(asked) if asked else None, None)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    tokens = call.service.tokens
    await answer(call, request, target, prompt, sampling(request, room, logprobs, tokens.end), ChatForm(tokens))


class ChatForm:
    """See `answers.Form`."""

    prefix = "chatcmpl"

    def __init__(self, tokens: Tokens):
        self._tokens = tokens

    def opening(self, answer: Answer) -> dict[str, Any] | None:
        return self._chunk(answer, {"role": "assistant", "content": "", "refusal": None}, None, None)

    def chunk(self, answer: Answer, delta: Delta) -> dict[str, Any]:
        logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
        content = {"content": delta.text} if delta.text or logprobs else {}
        return self._chunk(answer, content, logprobs, delta.finish)

    def closing(self, answer: Answer) -> dict[str, Any]:
        return self._head(answer, "chat.completion.chunk") | {"choices": [], "usage": answer.usage}

    def whole(self, answer: Answer) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "".join(answer.text), "refusal": None},
            "logprobs": self._logprobs(answer.logprobs) if answer.logprobs else None,
            "finish_reason": answer.finish,
        }
        return self._head(answer, "chat.completion") | {"choices": [choice], "usage": answer.usage}

    @staticmethod
    def _head(answer: Answer, kind: str) -> dict[str, Any]:
        head = {"id": answer.id, "object": kind, "created": answer.created, "model": answer.model}
        return head | {"system_fingerprint": answer.fingerprint}

    def _chunk(self, answer: Answer, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self._head(answer, "chat.completion.chunk") | {"choices": [choice]}

    def _logprobs(self, logprobs: list[TokenLogprob] | tuple[TokenLogprob, ...]) -> dict[str, Any]:
        content = [
            self._one(each.token_id, each.logprob) | {"top_logprobs": [self._one(token, value) for token, value in each.top]}
            for each in logprobs
        ]
        return {"content": content, "refusal": None}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self._tokens.show(token)
        return {"token": text, "logprob": shown_logprob(logprob), "bytes": data}
