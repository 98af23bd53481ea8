"""The plots of the sweep report, as Plotly figures: heat map, Pareto plot, learning curves.

Names that came from outside are escaped, because Plotly reads a little HTML in its texts.
"""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from prism_ray.reports.plotting import DASHES, MUTED, colors, legend, say, style, symbols
from prism_ray.reports.sweep import accuracy_interval, best_trial, good_trials, pareto
from prism_ray.reports.text import accuracy_cell, count, fixed, number, short, strength, with_error

BASE, FRONT, EMPTY = "#B00020", "#b6bcc6", "#eef0f3"
STATE_WORDS = {"stopped_early": "stopped early", "never_reported": "never reported"}


def task_metric(trials: pd.DataFrame) -> tuple[str, str, str]:
    """(accuracy column, n column, words): the test set's, or the validation set's where no good trial was tested."""
    if good_trials(trials)["test_accuracy"].notna().any():
        return "test_accuracy", "test_n", "test accuracy"
    return "validation_accuracy", "validation_n", "validation accuracy"


def heat_map(trials: pd.DataFrame) -> go.Figure:
    """lambda x rank, one panel a format and penalty; of several trials in a cell, the one with the best validation accuracy."""
    value, n, words = task_metric(trials)
    panels = _panels(trials)
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    titles = [panel.title for panel in panels]
    figure = make_subplots(rows, columns, subplot_titles=titles, horizontal_spacing=0.08, vertical_spacing=min(0.28, 0.5 / rows))
    ranks = sorted(trials["rank"].dropna().unique())
    for index, panel in enumerate(panels):
        place = {"row": index // columns + 1, "col": index % columns + 1}
        table = panel.trials
        grid = [[_cell(table[(table["rank"] == r) & (table["lambda_"] == s)], value, n, words) for s in panel.strengths] for r in ranks]
        shared = {"x": list(range(len(panel.strengths))), "y": list(range(len(ranks))), "xgap": 2, "ygap": 2, "texttemplate": "%{text}"}
        missing = go.Heatmap(
            **shared,
            z=[[0 if cell.value is None else None for cell in line] for line in grid],
            text=[[cell.text if cell.value is None else "" for cell in line] for line in grid],
            textfont={"size": 11, "color": MUTED},
            colorscale=[[0, EMPTY], [1, EMPTY]],
            showscale=False,
            hoverinfo="skip",
        )
        measured = go.Heatmap(
            **shared,
            z=[[cell.value for cell in line] for line in grid],
            text=[["" if cell.value is None else cell.text for cell in line] for line in grid],
            customdata=[[cell.hover for cell in line] for line in grid],
            hovertemplate="%{customdata}<extra></extra>",
            coloraxis="coloraxis",
            hoverongaps=False,
        )
        figure.add_trace(missing, **place)
        figure.add_trace(measured, **place)
        # Positions with tick texts: on a category axis Plotly reads a number-like name such as "32" as a position.
        _cells_axis(figure.update_xaxes, "lambda", [strength(s) for s in panel.strengths], place)
        _cells_axis(figure.update_yaxes, "rank" if place["col"] == 1 else "", [str(rank) for rank in ranks], place)
    style(figure, rows * (150 + 62 * max(2, len(ranks))))
    values = pd.to_numeric(good_trials(trials)[value], errors="coerce").dropna()
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    pad = max(0.01, 0.05 * (high - low))
    figure.update_xaxes(showgrid=False, ticks="")
    figure.update_yaxes(showgrid=False, ticks="")
    figure.update_layout(
        coloraxis={
            "colorscale": "Cividis",
            "cmin": max(0.0, low - pad),
            "cmax": min(1.0, high + pad),
            "showscale": bool(len(values)),
            "colorbar": {"title": {"text": words, "side": "right"}, "thickness": 12, "outlinewidth": 0},
        },
    )
    return figure


def pareto_plot(trials: pd.DataFrame, best_id: str | None) -> go.Figure:
    """Task accuracy (Wilson 95 %) against what the base lost (± 1 SE), one panel a format, the base marked at no loss."""
    value, n, words = task_metric(trials)
    good = good_trials(trials)
    good = good[good[value].notna() & good["delta_ce"].notna()]
    formats = sorted(good["format"].unique()) or [""]
    figure = make_subplots(
        1,
        len(formats),
        shared_yaxes=True,
        subplot_titles=[html.escape(f) for f in formats],
        x_title="ΔR, nats per answer token (right: the base lost more)",
        horizontal_spacing=0.03,
    )
    palette, shapes = colors(trials), symbols(trials)
    for column, name in enumerate(formats, start=1):
        table = good[good["format"] == name]
        front = pareto(table) if value == "test_accuracy" else table.iloc[:0]
        if len(front):
            # The staircase of what is attainable: a worse accuracy at the same loss is always to be had.
            line = {"color": FRONT, "width": 2.5, "shape": "hv"}
            points = go.Scatter(x=front["delta_ce"], y=front[value], mode="lines", line=line, hoverinfo="skip", showlegend=False)
            figure.add_trace(points, row=1, col=column)
        for s, group in table.groupby("lambda_"):
            figure.add_trace(_points(group, float(s), palette, shapes, value, n), row=1, col=column)
        _mark_base(figure, table, column)
        winner = table[table["trial_id"] == best_id]
        if len(winner):
            spot = {
                "x": float(winner["delta_ce"].iloc[0]),
                "y": float(winner[value].iloc[0]),
                "showarrow": True,
                "arrowhead": 0,
                "arrowcolor": MUTED,
            }
            figure.add_annotation(**spot, text="<b>chosen</b>", ax=34, ay=34, font={"size": 12}, bgcolor="white", row=1, col=column)
    for s in sorted(good["lambda_"].dropna().unique()):
        legend(figure, f"lambda {strength(s)}", "lambda", marker={"color": palette[float(s)], "size": 10})
    for rank, symbol in shapes.items():
        legend(figure, f"rank {rank}", "rank", marker={"color": "#6b7280", "size": 10, "symbol": symbol})
    if (good["penalty"] == "replay").any():
        legend(figure, "replay penalty", "rank", marker={"color": "#6b7280", "size": 10, "symbol": "circle-open"})
    legend(figure, "base (no adapter)", "base", marker={"color": BASE, "size": 12, "symbol": "star"})
    legend(figure, "Pareto front", "base", mode="lines", line={"color": FRONT, "width": 2.5})
    style(figure, 520)
    for column in range(2, len(formats) + 1):
        figure.update_xaxes(matches="x", row=1, col=column)
    figure.update_xaxes(zeroline=True, zerolinecolor="#c5c9d0", tickformat="+.3~f")
    figure.update_yaxes(title_text=words, row=1, col=1)
    figure.update_layout(legend={"tracegroupgap": 14})
    if good.empty:
        figure.update_layout(showlegend=False, height=120)
        figure.layout.annotations = ()
        say(figure, "no good trial has both a task accuracy and a benchmark reading")
    return figure


CURVES = (
    ("validation_accuracy", "validation accuracy", "linear"),
    ("validation_loss", "validation loss", "linear"),
    ("task_loss", "training task loss", "linear"),
    ("drift", "1 − Ω on the reference set", "log"),
    ("delta_rho", "Δρ on the reference set", "linear"),
    ("penalty_value", "penalty value (lambda > 0)", "log"),
)


def curves(trials: pd.DataFrame, history: pd.DataFrame, best_id: str | None) -> go.Figure:
    """Every trial's curves; the chosen one thick, one that did not end good thin and ending in a cross."""
    figure = make_subplots(2, 3, subplot_titles=[title for _, title, _ in CURVES], horizontal_spacing=0.06, vertical_spacing=0.17)
    palette = colors(trials)
    styles = {key: DASHES[index % len(DASHES)] for index, key in enumerate(_line_kinds(trials))}
    # A logarithmic axis has no place for 0: the penalty of lambda = 0, an Omega of exactly 1.
    table = history.assign(drift=(1 - history["omega"]), penalty_value=history["penalty_value"].where(history["penalty_value"] > 0))
    table["drift"] = table["drift"].where(table["drift"] > 0)
    runs = {str(key): run.sort_values("step") for key, run in table.groupby("trial_id")}
    # The chosen one last, so that it lies on top.
    for _, trial in trials.assign(top=trials["trial_id"] == best_id).sort_values("top", kind="stable").iterrows():
        run = runs.get(str(trial["trial_id"]))
        if run is None:
            continue
        chosen, good = trial["trial_id"] == best_id, trial["state"] == "good"
        color = palette.get(float(trial["lambda_"]), MUTED)
        line = {"color": color, "width": 3 if chosen else 1.4 if good else 1, "dash": styles[_line_kind(trial)]}
        for index, (column, _, _) in enumerate(CURVES):
            seen = run[run[column].abs() < math.inf]
            if seen.empty:
                continue
            few = column.startswith("validation")
            last = [0] * (len(seen) - 1) + [9]
            marker = (
                {"size": 5 if few else 3, "color": color} if good else {"size": last, "symbol": "x", "color": color, "line": {"width": 0}}
            )
            figure.add_trace(
                go.Scatter(
                    x=seen["step"],
                    y=seen[column],
                    mode="lines" if good and not few else "lines+markers",
                    line=line,
                    marker=marker,
                    opacity=1.0 if chosen or good else 0.65,
                    name=_trial_label(trial),
                    legendgroup=strength(number(trial, "lambda_")),
                    showlegend=False,
                    hovertemplate="%{fullData.name}<br>step %{x}: %{y:.5g}<extra></extra>",
                ),
                row=index // 3 + 1,
                col=index % 3 + 1,
            )
    for s in sorted(trials["lambda_"].dropna().unique()):
        legend(figure, f"lambda {strength(s)}", strength(s), mode="lines", line={"color": palette[float(s)], "width": 2.5})
    if len(styles) > 1:
        for key, dash in styles.items():
            legend(figure, html.escape(key), key, mode="lines", line={"color": MUTED, "width": 1.6, "dash": dash}, legend="legend2")
    style(figure, 640)
    for index, (column, _, kind) in enumerate(CURVES):
        place = {"row": index // 3 + 1, "col": index % 3 + 1}
        figure.update_xaxes(title_text="step" if index >= 3 else None, rangemode="tozero", **place)
        if not (table[column].abs() < math.inf).any():
            figure.update_xaxes(visible=False, **place)
            figure.update_yaxes(visible=False, **place)
            across, up = (next(figure.select_xaxes(**place)).domain, next(figure.select_yaxes(**place)).domain)
            spot = {"xref": "paper", "yref": "paper", "x": sum(across) / 2, "y": sum(up) / 2, "showarrow": False}
            figure.add_annotation(**spot, text="not measured", font={"color": MUTED})
        elif kind == "log":
            figure.update_yaxes(type="log", tickformat=".0e", dtick=1, minor={"ticks": "outside", "ticklen": 3}, **place)
    row = {"orientation": "h", "x": 0, "yanchor": "top", "itemwidth": 40}
    figure.update_layout(hovermode="closest", legend={**row, "y": -0.11}, legend2={**row, "y": -0.165})
    return figure


class _Panel(NamedTuple):
    title: str
    trials: pd.DataFrame
    strengths: list[float]


class _Cell(NamedTuple):
    value: float | None
    text: str
    hover: str


def _panels(trials: pd.DataFrame) -> list[_Panel]:
    """One a format and penalty. lambda = 0 has no penalty, so that it belongs to every penalty's panel of its format."""
    plain = trials["lambda_"] == 0
    penalties = sorted(trials["penalty"][trials["lambda_"] > 0].unique(), key=lambda name: (name != "shape", name)) or [""]
    found = []
    for name in sorted(trials["format"].unique()):
        for penalty in penalties:
            mine = plain | (trials["penalty"] == penalty) if penalty else plain
            title = html.escape(f"{name}, {penalty} penalty" if len(penalties) > 1 else str(name))
            found.append(_Panel(title, trials[(trials["format"] == name) & mine], sorted(trials["lambda_"][mine].dropna().unique())))
    return found or [_Panel("", trials, [])]


def _cells_axis(update: Callable[..., object], title: str, labels: list[str], place: dict[str, int]) -> None:
    ticks = {"tickmode": "array", "tickvals": list(range(len(labels))), "ticktext": labels}
    update(**ticks, range=[-0.5, max(len(labels), 1) - 0.5], title_text=title, **place)


def _cell(table: pd.DataFrame, value: str, n: str, words: str) -> _Cell:
    """The trial of one heat-map cell with the best validation accuracy, or what became of the cell's trials."""
    best = best_trial(table)
    if best is None:
        best = best_trial(table, value)
    found = None if best is None else number(best, value)
    if best is None or found is None:
        states = Counter(STATE_WORDS.get(s, s) for s in table["state"])
        ends = "<br>".join(f"{k} {s}" if k > 1 else s for s, k in states.items())
        return _Cell(None, ("not tested" if best is not None else ends) or "not run", "")
    size = number(best, n)
    hover = f"{_trial_label(best)}<br>{words} {accuracy_cell(found, size)}, n = {count(size)}<br>best by validation of {len(table)} here"
    return _Cell(found, accuracy_cell(found, size).replace(" ± ", "<br>± "), hover)


def _points(group: pd.DataFrame, s: float, palette: dict[float, str], shapes: dict[int, str], value: str, n: str) -> go.Scatter:
    intervals = [accuracy_interval(a, size) for a, size in zip(group[value], group[n], strict=True)]
    up = [0.0 if i is None else i.high - a for i, a in zip(intervals, group[value], strict=True)]
    down = [0.0 if i is None else a - i.low for i, a in zip(intervals, group[value], strict=True)]
    hover = [
        f"{_trial_label(row)}<br>{accuracy_cell(number(row, value), number(row, n))}, n = {count(number(row, n))}"
        f"<br>lost {with_error(number(row, 'delta_ce'), number(row, 'delta_ce_se'), plus=True)} nats"
        f"<br>1 − Ω {short(number(row, 'one_minus_omega'))}, Δρ {fixed(number(row, 'delta_rho'), 4, plus=True)}"
        for _, row in group.iterrows()
    ]
    marks = [
        shapes.get(rank, "circle") + ("-open" if p == "replay" else "") for rank, p in zip(group["rank"], group["penalty"], strict=True)
    ]
    bars = {"thickness": 1, "width": 0, "color": palette[s]}
    return go.Scatter(
        x=group["delta_ce"],
        y=group[value],
        mode="markers",
        marker={"color": palette[s], "symbol": marks, "size": 10, "line": {"width": 1.5, "color": palette[s]}},
        error_y=dict(type="data", symmetric=False, array=up, arrayminus=down, **bars),
        error_x=dict(type="data", array=group["delta_ce_se"].fillna(0.0), **bars),
        customdata=hover,
        hovertemplate="%{customdata}<extra></extra>",
        showlegend=False,
    )


def _mark_base(figure: go.Figure, table: pd.DataFrame, column: int) -> None:
    known = table[table["base_test_accuracy"].notna()]
    if known.empty:
        return
    base, n = float(known["base_test_accuracy"].iloc[0]), number(known.iloc[0], "test_n")
    interval = accuracy_interval(base, math.nan if n is None else n)
    error = None
    if interval is not None:
        bounds = {"array": [interval.high - base], "arrayminus": [base - interval.low]}
        error = dict(type="data", symmetric=False, thickness=1, width=0, color="#B00020", **bounds)
    point = go.Scatter(
        x=[0.0],
        y=[base],
        mode="markers",
        marker={"color": BASE, "size": 13, "symbol": "star"},
        error_y=error,
        hovertemplate=f"base: {accuracy_cell(base, n)}, n = {count(n)}<extra></extra>",
        showlegend=False,
    )
    figure.add_trace(point, row=1, col=column)


def _trial_label(trial: pd.Series) -> str:
    state = trial["state"]
    ending = "" if state == "good" else f" ({STATE_WORDS.get(state, state)})"
    penalty = f" {trial['penalty']}" if trial["penalty"] else ""
    size = f"lambda {strength(number(trial, 'lambda_'))}{penalty}, rank {count(number(trial, 'rank'))}"
    return html.escape(f"{trial['trial_id']}: {trial['format']}, {size}, lr {strength(number(trial, 'learning_rate'))}{ending}")


def _line_kind(trial: pd.Series) -> str:
    replay = trial["penalty"] == "replay" and (number(trial, "lambda_") or 0) > 0
    return f"{trial['format']}, replay" if replay else str(trial["format"])


def _line_kinds(trials: pd.DataFrame) -> list[str]:
    return sorted({_line_kind(trial) for _, trial in trials.iterrows()})
