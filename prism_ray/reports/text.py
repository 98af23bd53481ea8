"""How the reports print numbers: one place, so that a table, a plot and a sentence never round differently. Missing is an en dash."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from prism_ray.reports.sweep import accuracy_interval

MISSING = "–"
MINUS = "−"


def number(row: Mapping[str, Any] | pd.Series, name: str) -> float | None:
    """A finite number of a row or dict, else None."""
    value = row.get(name)
    if value is None or isinstance(value, bool):
        return None
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) else None


def sign(text: str) -> str:
    return text.replace("-", MINUS) if text.startswith("-") else text


def fixed(value: float | None, digits: int = 3, *, plus: bool = False) -> str:
    if value is None:
        return MISSING
    return sign(f"{value + 0.0:{'+' if plus else ''},.{digits}f}")


def short(value: float | None, digits: int = 3) -> str:
    """A few significant digits: 1.2e-08, 0.034, 1,234."""
    if value is None:
        return MISSING
    if abs(value) >= 10**digits:
        return f"{value:,.0f}"
    # "#" keeps trailing zeros, so that 0.020 and 0.031 show the same precision; above 1 it would leave a bare point.
    return sign(f"{value:#.{digits}g}" if 0 < abs(value) < 1 else f"{value:.{digits}g}")


def count(value: float | None) -> str:
    return MISSING if value is None else f"{value:,.0f}"


def percent(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.1f} %"


def with_error(value: float | None, error: float | None, digits: int = 3, *, plus: bool = False) -> str:
    if value is None:
        return MISSING
    return f"{fixed(value, digits, plus=plus)} ± {'?' if error is None else fixed(error, digits)}"


def accuracy_cell(accuracy: float | None, n: float | None) -> str:
    """`0.842 ± 0.036`, the half-width of the Wilson interval."""
    if accuracy is None:
        return MISSING
    interval = accuracy_interval(accuracy, math.nan if n is None else n)
    return with_error(accuracy, None if interval is None else interval.half_width)


def accuracy_sentence(accuracy: float | None, n: float | None) -> str:
    """`84.2 % (95 % interval 80.3 to 87.5 %, n = 400)`."""
    if accuracy is None:
        return "not measured"
    interval = accuracy_interval(accuracy, math.nan if n is None else n)
    if interval is None or n is None:
        return f"{percent(accuracy)} (n not recorded)"
    return f"{percent(accuracy)} (95 % interval {100 * interval.low:.1f} to {100 * interval.high:.1f} %, n = {n:,.0f})"


def strength(value: float | None) -> str:
    """A lambda as its axis label."""
    return MISSING if value is None else f"{value:g}"
