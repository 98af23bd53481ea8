"""POST /v1/score: the log-likelihood of each of several choices behind a prompt, for tenants that classify.

    answer   choices[i] = {index, logprob: sum of log p(token | before), tokens, probability: softmax of the sums over the choices}, best: index of the largest sum

Choices whose tokens begin at one place share one engine request; a choice that merges with the prompt's last word begins earlier, and has its own.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence

from prism_ray.engines.api.answers import answer_tokens, shown_logprob, usage
from prism_ray.engines.api.exchange import Call, identity_headers
from prism_ray.engines.api.schemas import ScoreRequest, parse
from prism_ray.engines.api.text import Tokens
from prism_ray.engines.protocol import Score, Scoring

Pairs = list[tuple[list[int], list[int]]]


async def score(call: Call) -> None:
    """The route's handler."""
    request = parse(ScoreRequest, call.body)
    target = await call.service.backend.resolve(request.model, call.caller.sees)
    pairs = await call.service.tokenize(lambda tokens: _pairs(tokens, request))
    for before, choice in pairs:
        answer_tokens(call, len(before), max(1, len(choice)), None)
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, (before, _) in enumerate(pairs):
        groups.setdefault(tuple(before), []).append(index)
    found: dict[int, Score] = {}
    plane = ""
    name = f"score-{secrets.token_hex(12)}"
    for number, (start, members) in enumerate(groups.items()):
        work = Scoring(request_id=f"{name}-{number}", prompt=list(start), choices=[pairs[index][1] for index in members], salt=call.salt)
        scored = await call.service.backend.score(target, work)
        if plane not in ("", scored.plane):
            raise RuntimeError(f"scores of planes {plane[:12]} and {scored.plane[:12]} in one answer")
        plane = scored.plane
        found |= dict(zip(members, scored.scores, strict=True))
    scores = [found[index] for index in range(len(pairs))]
    prompt, tokens = max(len(before) for before in groups), sum(each.tokens for each in scores)
    if call.service.metrics is not None:
        call.service.metrics.answered(target.label, prompt=prompt, generated=0)
    body = {
        "id": name,
        "object": "score",
        "created": int(time.time()),
        "model": target.model,
        "system_fingerprint": f"fp_{plane[:16]}",
        "choices": [
            {"index": index, "logprob": shown_logprob(each.logprob), "tokens": each.tokens, "probability": share}
            for index, (each, share) in enumerate(zip(scores, softmax([each.logprob for each in scores]), strict=True))
        ],
        "best": max(range(len(scores)), key=lambda index: scores[index].logprob),
        "usage": usage(prompt + tokens, 0, 0),
    }
    await call.json(body, headers=identity_headers(target, plane))


def softmax(values: Sequence[float]) -> list[float]:
    """exp(v) / sum exp(v); equal shares where all are minus infinity."""
    top = max(values)
    if top == -math.inf:
        return [1 / len(values)] * len(values)
    terms = [math.exp(value - top) for value in values]
    return [term / sum(terms) for term in terms]


def _pairs(tokens: Tokens, request: ScoreRequest) -> Pairs:
    choices = request.choices
    if request.messages is not None:
        return tokens.encode_choices(tokens.render(request.messages), [str(choice) for choice in choices], special=False)
    if isinstance(request.prompt, str):
        return tokens.encode_choices(request.prompt, [str(choice) for choice in choices], special=True)
    return [(list(request.prompt or ()), [token for token in choice if isinstance(token, int)]) for choice in choices]
