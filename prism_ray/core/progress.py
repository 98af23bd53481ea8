"""Progress as plain log lines at fixed intervals: readable in `ray job logs`, in a file, and in a terminal alike."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class Progress:
    """Print `label done/total (rate, remaining) key=value …` at most once every `every_s` seconds, and at the end.

    A bar that needs a terminal vanishes or floods a job log; a line does neither (field case RAY-06).
    """

    def __init__(self, label: str, total: int, *, every_s: float = 5.0, stream: TextIO | None = None, start: int = 0):
        self.label, self.total, self.every_s = label, total, every_s
        self.stream = stream or sys.stderr
        self.started = time.monotonic()
        self.first = start
        self.last_print = float("-inf")

    def update(self, done: int, **values: float | str) -> None:
        now = time.monotonic()
        if done < self.total and now - self.last_print < self.every_s:
            return
        self.last_print = now
        elapsed = max(now - self.started, 1e-9)
        rate = (done - self.first) / elapsed
        remaining = (self.total - done) / rate if rate > 0 else float("nan")
        shown = " ".join(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in values.items())
        print(f"{self.label} {done}/{self.total} ({rate:.2f}/s, {remaining:.0f} s left) {shown}".rstrip(), file=self.stream, flush=True)
