"""Server-sent events: one `data:` line of JSON an event, and `[DONE]` at the end of a whole answer."""

from __future__ import annotations

import json
from typing import Any

MEDIA_TYPE = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """An event. JSON without line breaks, so one line always does."""
    return b"data: " + json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"
