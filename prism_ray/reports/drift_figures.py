"""The readings of a drift run in report order, and their plots as Plotly figures: the parts of the bound, and bound against gap.

Names that came from outside are escaped, because Plotly reads a little HTML in its texts.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from prism_ray.core.errors import DataError
from prism_ray.reports.plotting import MUTED, OKABE_ITO, SYMBOLS, legend, say, style
from prism_ray.reports.text import MISSING, count, fixed, number, percent, short

AXES = ("scale", "shape", "head")
# Neighbours in the stack differ in lightness too, for a print in grey.
AXIS_COLORS = {"scale": "#E69F00", "shape": "#0072B2", "head": "#CC79A7"}
# Colour and symbol change at each step, and 7 and 8 have no common factor: 56 variants look different.
POINT_COLORS = OKABE_ITO[1:] + OKABE_ITO[:1]
LINE, SAFE = "#a3001e", "rgba(0, 158, 115, 0.12)"
STATUSES = ("drifted", "within noise", "identical")
REQUIRED = ("variant", "benchmark", "samples", "tokens", "bound", "delta_ce")
ENTRY_WIDTH = 170


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One (variant, benchmark): its row of the table, its entry in drift.json (empty where there is none), and the lines that it fails."""

    variant: str
    benchmark: str
    row: Mapping[str, Any]
    result: Mapping[str, Any]
    fails: tuple[str, ...]

    def get(self, column: str) -> float | None:
        """A finite number of the row, else None."""
        return number(self.row, column)

    def word(self, column: str) -> str:
        """A text of the row, empty where it is missing."""
        value = self.row.get(column)
        return value if isinstance(value, str) else ""

    def part(self, *path: str) -> Mapping[str, Any]:
        """A dict inside drift.json's entry, empty where a step of the path is missing or null."""
        found: Any = self.result
        for step in path:
            found = found.get(step) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    @property
    def bound(self) -> float | None:
        """B at W = I."""
        return self.get("bound")

    @property
    def gap(self) -> float | None:
        """|R_T - R_P|."""
        signed = self.get("delta_ce")
        return None if signed is None else abs(signed)

    @property
    def above_noise(self) -> bool:
        """Whether the gap is at least twice its standard error; an unknown error tells nothing from noise."""
        gap, error = self.gap, self.get("delta_ce_se")
        return gap is not None and error is not None and gap > 0 and gap >= 2 * error

    @property
    def shares(self) -> dict[str, float] | None:
        """Part of B by axis; None where B is 0 or the shares were not given."""
        given = self.part("bounds", "identity", "shares")
        found = {axis: value for axis in AXES if (value := number(given, axis)) is not None}
        return found if len(found) == len(AXES) else None

    @property
    def placed(self) -> bool:
        """Whether the point (B, gap) has a place on two logarithmic axes."""
        return (self.bound or 0) > 0 and (self.gap or 0) > 0


def require_columns(frame: pd.DataFrame, columns: Sequence[str], name: str) -> None:
    """DataError names the first of `columns` that a frame lacks."""
    for column in columns:
        if column not in frame.columns:
            raise DataError(f"column '{column}' is missing", where=name, remedy=f"give at least {', '.join(columns)}")


def readings(table: pd.DataFrame, summary: Mapping[str, Any]) -> list[Reading]:
    """All rows, grouped by variant, the worst variant first and within a variant its worst benchmark.

    Worse is drifted before within noise before identical, then the larger B. DataError names a missing column.
    """
    require_columns(table, REQUIRED, "drift table")
    nested = {}
    for result in summary.get("results") or []:
        row = result.get("row") or {}
        nested[str(row.get("variant")), str(row.get("benchmark"))] = result
    lines = [str(line) for line in summary.get("failures") or []]
    found = []
    for record in table.to_dict("records"):
        variant, benchmark = str(record["variant"]), str(record["benchmark"])
        fails = tuple(line for line in lines if line.startswith(f"{variant} on {benchmark}: "))
        row = {str(column): value for column, value in record.items()}
        found.append(Reading(variant=variant, benchmark=benchmark, row=row, result=nested.get((variant, benchmark), {}), fails=fails))
    worst: dict[str, tuple[int, float]] = {}
    for reading in found:
        worst[reading.variant] = min(worst.get(reading.variant, (len(STATUSES), 0.0)), _badness(reading))
    order = {variant: place for place, variant in enumerate(sorted(worst, key=lambda name: worst[name]))}
    return sorted(found, key=lambda reading: (order[reading.variant], _badness(reading)))


def _badness(reading: Reading) -> tuple[int, float]:
    status = reading.word("status")
    return STATUSES.index(status) if status in STATUSES else len(STATUSES), -(reading.bound or 0.0)


def clip(name: str, size: int = 34) -> str:
    """A name of at most `size` characters, shortened in the middle: variants differ at either end."""
    if len(name) <= size:
        return name
    tail = (size - 1) // 2
    return f"{name[: size - 1 - tail]}…{name[-tail:]}"


def gap_words(reading: Reading, *, signed: bool = False) -> str:
    """`0.0444 ± 0.0127`, small gaps with significant digits instead of zeros."""
    gap, error = reading.get("delta_ce") if signed else reading.gap, reading.get("delta_ce_se")
    if gap is None:
        return MISSING
    if gap == 0:
        # Exactly equal losses, which 0.0000 would not say.
        return f"0 ± {'?' if error is None else short(error, 2)}"
    if abs(gap) < 1e-3:
        return f"{'+' if signed and gap > 0 else ''}{short(gap, 2)} ± {'?' if error is None else short(error, 2)}"
    return f"{fixed(gap, 4, plus=signed)} ± {'?' if error is None else fixed(error, 4)}"


def bound_words(reading: Reading) -> str:
    """`4.54 (4.37 to 4.712)`: B with its bootstrap interval."""
    low, high = reading.get("bound_low"), reading.get("bound_high")
    interval = "" if low is None or high is None else f" ({short(low, 4)} to {short(high, 4)})"
    return short(reading.bound, 4) + interval


def describe(reading: Reading) -> str:
    """Everything about a reading, for pointing at it."""
    shares = reading.shares
    parts = "" if shares is None else "<br>" + ", ".join(f"{axis} {percent(shares[axis])}" for axis in AXES)
    noise = "" if reading.above_noise else " (below 2 SE)"
    return (
        f"<b>{html.escape(reading.variant)}</b> on {html.escape(reading.benchmark)}: {html.escape(reading.word('status')) or 'not judged'}"
        f"<br>B {bound_words(reading)} nats, 95 % bootstrap interval{parts}"
        f"<br>|ΔR| {gap_words(reading)} nats a token{noise}, ΔR {gap_words(reading, signed=True)}"
        f"<br>1 − Ω {short(reading.get('one_minus_omega'))}, ρ_T {fixed(reading.get('rho_target'))}, ρ_P {fixed(reading.get('rho_proxy'))}"
        f"<br>δ {short(reading.get('delta'))}, γ {short(reading.get('gamma'))}"
        f"<br>n = {count(reading.get('samples'))} samples, {count(reading.get('tokens'))} scored tokens"
    )


def axis_bars(found: Sequence[Reading], benchmarks: Sequence[str]) -> go.Figure:
    """B of each variant as a stack of its scale, shape and head parts, a panel a benchmark; buttons change between nats and shares."""
    variants = list(dict.fromkeys(reading.variant for reading in found))
    if not any(reading.shares for reading in found):
        figure = go.Figure()
        style(figure, 120)
        say(figure, "no variant has a bound above 0 with its parts")
        return figure
    columns = min(8, len(benchmarks))
    rows = math.ceil(len(benchmarks) / columns)
    panel = 46 + max(2, len(variants)) * (30 if len(variants) <= 12 else 19)
    height = 150 + rows * panel + (rows - 1) * 70
    figure = make_subplots(
        rows,
        columns,
        shared_yaxes="all",
        subplot_titles=[html.escape(clip(name, 130 // columns)) for name in benchmarks],
        horizontal_spacing=0.1 / columns if columns > 1 else 0,
        vertical_spacing=80 / (height - 150) if rows > 1 else 0,
        specs=_specs(rows, columns, len(benchmarks)),
    )
    position = {variant: place for place, variant in enumerate(variants)}
    nats: list[list[float | None]] = []
    shares: list[list[float | None]] = []
    labelled = columns <= 3
    for index, benchmark in enumerate(benchmarks):
        place = {"row": index // columns + 1, "col": index % columns + 1}
        here = [reading for reading in found if reading.benchmark == benchmark]
        split = [(reading, parts) for reading in here if (parts := reading.shares) is not None and reading.bound is not None]
        for axis in AXES:
            nats.append([parts[axis] * (reading.bound or 0.0) for reading, parts in split])
            shares.append([100 * parts[axis] for _, parts in split])
            bar = go.Bar(
                x=nats[-1],
                y=[position[reading.variant] for reading, _ in split],
                orientation="h",
                name=axis,
                legendgroup=axis,
                showlegend=False,
                marker={"color": AXIS_COLORS[axis], "line": {"width": 0}},
                customdata=[describe(reading) for reading, _ in split],
                hovertemplate="%{customdata}<extra></extra>",
            )
            figure.add_trace(bar, **place)
        for trace in (_whiskers(here, position), _labels(here, position) if labelled else None):
            if trace is not None:
                figure.add_trace(trace, **place)
                nats.append(list(trace.x))
                # In shares every stack ends at 100 %: the interval belongs to nats.
                shares.append([None] * len(here))
    traces = list(range(len(nats)))
    for axis in AXES:
        legend(figure, axis, axis, marker={"color": AXIS_COLORS[axis], "size": 11, "symbol": "square"})
    style(figure, height)
    top = max((max(reading.get("bound_high") or 0.0, reading.bound or 0.0) for reading in found), default=1.0)
    upper = top * (1.14 + (0.1 * columns if labelled else 0))
    figure.update_xaxes(range=[0, upper], nticks=6 if columns < 4 else 4, rangemode="tozero")
    figure.update_xaxes(title_text="nats a token", row=rows)
    figure.update_yaxes(
        range=[len(variants) - 0.5, -0.5],
        tickmode="array",
        tickvals=list(range(len(variants))),
        ticktext=[html.escape(clip(name, 30)) for name in variants],
        ticks="",
        showgrid=False,
        automargin=True,
    )
    titles = [f"xaxis{'' if number == 1 else number}" for number in range(1, len(benchmarks) + 1)]
    bottom = titles[(rows - 1) * columns :]
    buttons = [
        _button(
            "nats", nats, traces, {f"{name}.range": [0, upper] for name in titles} | {f"{n}.title.text": "nats a token" for n in bottom}
        ),
        _button("shares", shares, traces, {f"{name}.range": [0, 100] for name in titles} | {f"{n}.title.text": "% of B" for n in bottom}),
    ]
    figure.update_layout(
        barmode="stack",
        bargap=0.3,
        margin={"t": 84, "b": 56},
        legend={"orientation": "h", "x": 0, "y": 1, "yref": "container", "yanchor": "top", "xanchor": "left"},
        updatemenus=[
            {
                "type": "buttons",
                "direction": "right",
                "buttons": buttons,
                "x": 1,
                "xanchor": "right",
                "y": 1 + 40 / (height - 140),
                "yanchor": "bottom",
                "pad": {"t": 0, "b": 0, "l": 0, "r": 0},
                "font": {"size": 12},
            }
        ],
    )
    return figure


def _button(label: str, x: list[list[float | None]], traces: list[int], layout: dict[str, Any]) -> dict[str, Any]:
    return {"label": label, "method": "update", "args": [{"x": x}, layout, traces]}


def _specs(rows: int, columns: int, panels: int) -> list[list[dict[str, Any] | None]]:
    """No axes where the last row has no panel."""
    return [[{} if row * columns + column < panels else None for column in range(columns)] for row in range(rows)]


def _whiskers(here: Sequence[Reading], position: Mapping[str, int]) -> go.Scatter:
    """B's bootstrap interval at the end of each stack."""
    spread = [_spread(reading.bound, reading.get("bound_low"), reading.get("bound_high")) for reading in here]
    bars = {"array": [high for _, high in spread], "arrayminus": [low for low, _ in spread]}
    return go.Scatter(
        x=[reading.bound for reading in here],
        y=[position[reading.variant] for reading in here],
        mode="markers",
        marker={"size": 1, "color": "#222"},
        error_x={"type": "data", "symmetric": False, "thickness": 1.2, "width": 3, "color": "#222", **bars},
        hoverinfo="skip",
        showlegend=False,
    )


def _labels(here: Sequence[Reading], position: Mapping[str, int]) -> go.Scatter:
    """B in figures, behind the interval."""
    return go.Scatter(
        x=[reading.bound if reading.bound is None else max(reading.bound, reading.get("bound_high") or 0.0) for reading in here],
        y=[position[reading.variant] for reading in here],
        mode="text",
        text=[f"  {short(reading.bound, 4)}" + (", identical" if reading.word("status") == "identical" else "") for reading in here],
        textposition="middle right",
        textfont={"size": 11, "color": MUTED},
        hoverinfo="skip",
        showlegend=False,
    )


def _spread(value: float | None, low: float | None, high: float | None) -> tuple[float, float]:
    """Lengths of an error bar below and above; 0 where an end is missing."""
    if value is None or low is None or high is None:
        return 0.0, 0.0
    return max(0.0, value - low), max(0.0, high - value)


def left_out(found: Sequence[Reading]) -> int:
    """Readings that have no place on logarithmic axes: B or |ΔR| is 0 or missing."""
    return sum(not reading.placed for reading in found)


def above_bound(found: Sequence[Reading]) -> list[Reading]:
    """Readings whose measured gap exceeds B, which the bound forbids."""
    return [reading for reading in found if reading.placed and (reading.gap or 0.0) > (reading.bound or 0.0)]


def marks(variants: Sequence[str]) -> dict[str, tuple[str, str]]:
    """(colour, symbol) by variant; the first 56 differ."""
    return {
        variant: (POINT_COLORS[place % len(POINT_COLORS)], SYMBOLS[place % len(SYMBOLS)])
        for place, variant in enumerate(dict.fromkeys(variants))
    }


def bound_scatter(found: Sequence[Reading], benchmarks: Sequence[str], subtitles: Mapping[str, str]) -> go.Figure:
    """|ΔR| (± 1 SE) against B (95 % interval) on logarithmic axes, a panel a benchmark, with y = x and the safe zone below it.

    Hollow: |ΔR| < 2 SE. subtitles: a second line of a benchmark's title.
    """
    shown = [reading for reading in found if reading.placed]
    if not shown:
        figure = go.Figure()
        style(figure, 120)
        say(figure, "no reading has both B and |ΔR| above 0")
        return figure
    benchmarks = [name for name in benchmarks if any(reading.benchmark == name for reading in shown)]
    variants = [reading.variant for reading in shown]
    looks = marks([reading.variant for reading in found])
    columns = min(4, len(benchmarks)) if len(benchmarks) != 5 else 3
    rows = math.ceil(len(benchmarks) / columns)
    entries = len(dict.fromkeys(variants)) + 4
    below = 70 + 21 * math.ceil(entries / max(1, 1080 // ENTRY_WIDTH))
    panel = 400 if columns < 3 else 300
    inner = rows * panel + (rows - 1) * 90
    titles = [html.escape(clip(name, 110 // columns)) + (f"<br>{subtitles[name]}" if subtitles.get(name) else "") for name in benchmarks]
    figure = make_subplots(
        rows,
        columns,
        subplot_titles=titles,
        horizontal_spacing=0.1 / columns if columns > 1 else 0,
        vertical_spacing=90 / inner if rows > 1 else 0,
        specs=_specs(rows, columns, len(benchmarks)),
    )
    bounds, gaps = [reading.bound or 1.0 for reading in shown], [reading.gap or 1.0 for reading in shown]
    # A decade at least, or a single point would have an axis without labels.
    pad = max(1.6, math.sqrt(10 * min(bounds) / max(bounds)))
    left, right, bottom = min(bounds) / pad, max(bounds) * pad, min(gaps) / 2
    # The line y = x enters at the left edge of every panel, however far below it the points lie.
    top = max(max(gaps) * 2, left * 2.2)
    ends = [min(left, bottom) / 10, max(right, top) * 10]
    for index, benchmark in enumerate(benchmarks):
        place = {"row": index // columns + 1, "col": index % columns + 1}
        safe = go.Scatter(
            x=[ends[0], ends[1], ends[1]],
            y=[ends[0], ends[1], ends[0]],
            mode="none",
            fill="toself",
            fillcolor=SAFE,
            hoverinfo="skip",
            showlegend=False,
            name="safe zone",
        )
        line = go.Scatter(
            x=ends,
            y=ends,
            mode="lines",
            line={"color": LINE, "width": 1.5, "dash": "dash"},
            hoverinfo="skip",
            showlegend=False,
            name="y = x",
        )
        # At once: a figure of hundreds of traces is slow to build one by one.
        points = [_point(reading, *looks[reading.variant]) for reading in shown if reading.benchmark == benchmark]
        traces = [safe, line, *points]
        figure.add_traces(traces, rows=[place["row"]] * len(traces), cols=[place["col"]] * len(traces))
    for variant in dict.fromkeys(variants):
        color, symbol = looks[variant]
        legend(figure, html.escape(clip(variant, 22)), html.escape(variant), marker={"color": color, "symbol": symbol, "size": 9})
    legend(figure, "|ΔR| below 2 SE", "noise", marker={"color": MUTED, "symbol": "circle-open", "size": 9})
    legend(figure, "y = x", "line", mode="lines", line={"color": LINE, "width": 1.5, "dash": "dash"})
    legend(figure, "safe: |ΔR| < B", "safe", marker={"color": "rgba(0, 158, 115, 0.35)", "symbol": "square", "size": 12})
    style(figure, inner + below + 64)
    figure.update_annotations(yshift=5, font_size=13 if columns < 4 else 12)
    figure.update_xaxes(type="log", range=[math.log10(left), math.log10(right)], matches="x", **_log_ticks(left, right))
    figure.update_yaxes(type="log", range=[math.log10(bottom), math.log10(top)], matches="y", **_log_ticks(bottom, top))
    for index in range(len(benchmarks)):
        place = {"row": index // columns + 1, "col": index % columns + 1}
        figure.update_yaxes(showticklabels=place["col"] == 1, title_text="|ΔR|, nats a token" if place["col"] == 1 else None, **place)
        figure.update_xaxes(title_text="B, nats a token" if index >= len(benchmarks) - columns else None, **place)
    figure.update_layout(
        margin={"t": 64, "b": below},
        legend={
            "orientation": "h",
            "x": 0,
            # Measured from the panels, so that a legend which wraps in a narrow window takes room from them instead of lying on the axis.
            "y": -64 / inner,
            "yanchor": "top",
            "entrywidth": ENTRY_WIDTH,
            "font": {"size": 12},
            "traceorder": "normal",
        },
        hovermode="closest",
    )
    return figure


def _log_ticks(low: float, high: float) -> dict[str, Any]:
    """At most about seven powers of ten; over few decades also 2 and 5, or a panel would have one label."""
    decades = math.log10(high / low)
    return {"dtick": max(1, math.ceil(decades / 7)) if decades > 2.5 else "D2", "tickformat": ".0e" if low < 1e-5 else "~g"}


def _point(reading: Reading, color: str, symbol: str) -> go.Scatter:
    bound, gap, error = reading.bound or 0.0, reading.gap or 0.0, reading.get("delta_ce_se") or 0.0
    low, high = _spread(bound, reading.get("bound_low"), reading.get("bound_high"))
    bars = {"type": "data", "symmetric": False, "thickness": 1, "width": 0, "color": color}
    return go.Scatter(
        x=[bound],
        y=[gap],
        mode="markers",
        marker={
            "color": color,
            "symbol": symbol if reading.above_noise else f"{symbol}-open",
            "size": 9,
            "line": {"width": 1.5, "color": color},
        },
        error_x={"array": [high], "arrayminus": [min(low, bound * (1 - 1e-9))], **bars},
        # A logarithmic axis has no place for an end at or below 0: the bar then leaves the panel at the bottom.
        error_y={"array": [error], "arrayminus": [min(error, gap * (1 - 1e-9))], **bars},
        name=html.escape(clip(reading.variant, 22)),
        legendgroup=html.escape(reading.variant),
        showlegend=False,
        customdata=[describe(reading)],
        hovertemplate="%{customdata}<extra></extra>",
    )
