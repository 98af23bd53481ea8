"""Text from tokens as they come: whole characters only, and nothing that could still become a stop text.

A token may end inside a UTF-8 character; a decoder then shows U+FFFD at the end, one for the whole rest or one a byte, at most three. These are held back until
the character is complete, and dropped where the sequence ends before. U+FFFD further left stand for bytes that no character begins with, and stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BROKEN = "�"
HELD = 3
LONGEST_WAIT = 64


class TextStream:
    """Incremental decoding with a tokenizer of transformers. Two windows of tokens are decoded in each step, so the cost does not grow with the text."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._read = self._sent = 0

    def push(self, token: int) -> str:
        """The text that the token completes; may be empty."""
        self._ids.append(token)
        fresh = self._decode(self._ids[self._start :])[len(self._decode(self._ids[self._start : self._read])) :]
        held = min(HELD, len(fresh) - len(fresh.rstrip(BROKEN)))
        if len(self._ids) - self._read > LONGEST_WAIT:
            held = 0
        ready = fresh[: len(fresh) - held]
        out = ready[self._sent :]
        if held:
            self._sent = max(self._sent, len(ready))
        else:
            # Tokens before the window are not needed again; the last ones stay as context, because some decoders treat the first token apart.
            self._ids = self._ids[self._read :]
            self._start, self._read, self._sent = 0, len(self._ids), 0
        return out

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) if ids else ""


class StopTexts:
    """Cuts a text at the first of some stop texts, across the borders of its pieces."""

    def __init__(self, stops: Sequence[str]):
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is safe to show, whether a stop text was found)."""
        if not self._stops:
            return text, False
        self._held += text
        found = [position for stop in self._stops if (position := self._held.find(stop)) >= 0]
        if found:
            out, self._held = self._held[: min(found)], ""
            return out, True
        keep = max(self._overlap(stop) for stop in self._stops)
        split = len(self._held) - keep
        out, self._held = self._held[:split], self._held[split:]
        return out, False

    def flush(self) -> str:
        """What was held back and now will not become a stop text."""
        out, self._held = self._held, ""
        return out

    def _overlap(self, stop: str) -> int:
        """Longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((length for length in range(longest, 0, -1) if self._held.endswith(stop[:length])), 0)
