"""vLLM's outputs as deltas. Text and stop texts are ours (`detokenize`), so both engines cut and show the same; vLLM only counts tokens and end tokens.

A stop text ends the sequence here: what vLLM generated beyond it in the same output is dropped, and the caller aborts the request, as vLLM's own front end does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prism_ray.engines.detokenize import StopTexts, TextStream
from prism_ray.engines.protocol import Delta, EngineStopped, FinishReason, Sampling, TokenLogprob


class Running:
    """One running sequence: its plane, its text so far, and whether it was told to end."""

    def __init__(self, plane: str, sampling: Sampling, tokenizer: Any):
        self.plane = plane
        self.started = self.aborted = False
        self._logprobs = sampling.logprobs
        self._text = None if tokenizer is None else TextStream(tokenizer)
        self._stops = StopTexts(sampling.stop)

    def delta(self, output: Any) -> Delta:
        """What one of vLLM's outputs adds. Raises EngineStopped for an end that is no end."""
        part = output.outputs[0]
        finish: FinishReason | None = part.finish_reason
        if finish not in (None, "stop", "length", "abort"):
            raise EngineStopped(f"vLLM ended the sequence: {finish}", where=str(output.request_id)[:64])
        tokens, text, found = list(part.token_ids), "", False
        for position, token in enumerate(tokens):
            shown, found = self._stops.push("" if self._text is None else self._text.push(token))
            text += shown
            if found:
                tokens, finish = tokens[: position + 1], "stop"
                break
        if finish is not None and not found:
            text += self._stops.flush()
        cached = 0 if self.started else output.num_cached_tokens or 0
        self.started = True
        return Delta(token_ids=tuple(tokens), text=text, logprobs=self._top(tokens, part.logprobs), finish=finish, cached_tokens=cached)

    def last(self) -> Delta:
        """The end of a sequence that was told to end before vLLM knew of it."""
        return Delta(token_ids=(), text=self._stops.flush(), finish="abort")

    def _top(self, tokens: list[int], found: Any) -> tuple[TokenLogprob, ...]:
        if self._logprobs is None or not found:
            return ()
        return tuple(token_logprob(token, candidates, self._logprobs) for token, candidates in zip(tokens, found, strict=False))


def token_logprob(token: int, candidates: Mapping[int, Any], top: int) -> TokenLogprob:
    """From vLLM's table of a token: the chosen one and the best, in any order; a rank counts the tokens that are at least as probable."""
    # Of equal candidates the chosen one stands first, as greedy choice took it.
    best = sorted(candidates.items(), key=lambda item: (-item[1].logprob, item[0] != token))[:top]
    return TokenLogprob(
        token_id=token, logprob=float(candidates[token].logprob), top=tuple((int(i), float(entry.logprob)) for i, entry in best)
    )
