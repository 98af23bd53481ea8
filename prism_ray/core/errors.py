"""Every mistake a user can make, as an exception of its own.

A `PrismError` carries one line: what was wrong, where (file, tensor, row, option), and how to mend it. Command lines print
that line and exit with `EXIT_USER_ERROR`; a traceback is for our own faults only. Code that raises one of these has
written nothing yet, or has put back what was there.
"""

from __future__ import annotations

from typing import Any

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USER_ERROR = 2


class PrismError(Exception):
    """What was wrong, where, and how to mend it, in one line."""

    def __init__(self, what: str, *, where: str = "", remedy: str = ""):
        self.what, self.where, self.remedy = what, where, remedy
        super().__init__(": ".join(part for part in (where, what) if part) + (f"; {remedy}" if remedy else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray and torch.distributed pickle exceptions across processes; keyword-only arguments would be lost.
        return _rebuild, (type(self), self.what, self.where, self.remedy)


def _rebuild(cls: type[PrismError], what: str, where: str, remedy: str) -> PrismError:
    return cls(what, where=where, remedy=remedy)


class ConfigError(PrismError):
    """An option has an unknown name, a wrong type, or a value outside its range."""


class UnknownName(ConfigError):
    """A registry (formats, quantizers, methods, spaces) has no entry of that name."""


class DataError(PrismError):
    """A data file cannot be used: a missing column, an empty file, a label outside the set, a broken row."""


class ModelError(PrismError):
    """A model source is no model, or a model is of a kind that cannot be handled."""


class CheckpointError(PrismError):
    """A checkpoint file is truncated, incomplete, or contradicts its own manifest."""


class FormatError(PrismError):
    """A tensor cannot be stored in the asked format, or stored bytes are illegal in it."""


class GridMismatch(FormatError):
    """An adapter trained on one scale grid meets a target on another."""


class FingerprintMismatch(PrismError):
    """An artifact belongs to another code plane or base scale plane."""


class MergeLoss(PrismError):
    """A merge would lose more of the correction than the caller allowed."""


class ResourceError(PrismError):
    """Not enough disk, memory, CPUs or GPUs for what was asked; the message carries the arithmetic."""


class EnvironmentFault(PrismError):
    """Something outside is missing: an optional package, a compiler, a Ray cluster, the network."""


class SweepFailed(PrismError):
    """A sweep ended with fewer good trials than required."""


class CalibrationFailed(PrismError):
    """A calibration ended with more fallbacks, starved experts or dropped samples than allowed."""


def one_line(error: BaseException) -> str:
    """An exception's text as one line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
