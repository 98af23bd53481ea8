"""The audit log: one JSON object a line, appended and synced, never rewritten. It takes overrides of admission and refusals.

Fields: `time` (UTC, ISO 8601), `event`, and what the caller adds. One `write` of a whole line on a file opened for appending keeps the lines of several
writers apart; a line cut by a crash is closed before the next one, and `read_entries` names it.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prism_ray.core.errors import CheckpointError, ResourceError


def append_entry(path: Path | str, event: str, **fields: Any) -> dict[str, Any]:
    """Append one entry and sync it; returns the entry. Raises ResourceError where the log cannot be written: then nothing may be overridden."""
    entry = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "event": event, **fields}
    line = json.dumps(entry, sort_keys=True, allow_nan=False).encode() + b"\n"
    try:
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        try:
            size = os.fstat(handle).st_size
            torn = size and os.pread(handle, 1, size - 1) != b"\n"
            os.write(handle, b"\n" + line if torn else line)
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise ResourceError(f"the audit log cannot be written ({error.strerror})", where=str(path), remedy="give another file") from None
    return entry


def read_entries(path: Path | str) -> list[dict[str, Any]]:
    """All entries, oldest first; CheckpointError naming the first line that is none."""
    entries: list[dict[str, Any]] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict) or "event" not in entry:
            raise CheckpointError(f"line {number} is no audit entry", where=str(path), remedy="it was cut by a crash, or edited")
        entries.append(entry)
    return entries
