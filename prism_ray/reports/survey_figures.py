"""Plots of a survey, from the content of survey.json: rank by step, tokens by expert, error fed back against what it costs.

Names that came from outside are escaped, because Plotly reads a little HTML in its texts.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from prism_ray.reports.plotting import DASHES, MUTED, OKABE_ITO, SYMBOLS, say, style

COLORS = OKABE_ITO[1:] + OKABE_ITO[:1]
LINES = 24
"""Lines of the plot by step at most: the largest gains; the table has all."""
NAME = 44
BINS = 40


def tail(name: str, size: int = NAME) -> str:
    """A module path of at most `size` characters, its end kept, escaped."""
    return html.escape(name if len(name) <= size else f"…{name[-(size - 1) :]}")


def _empty(words: str) -> go.Figure:
    figure = go.Figure()
    style(figure, 120)
    say(figure, words)
    return figure


def rank_by_step(layers: Sequence[Mapping[str, Any]]) -> go.Figure:
    """One line a layer that is called more than once, its rank over all steps as a point behind the last; a bar a layer where none is."""
    read = [layer for layer in layers if layer["steps"]]
    looped = sorted((layer for layer in read if layer["calls"] > 1), key=lambda layer: -(layer["gain"] or 0.0))[:LINES]
    if not read:
        return _empty("no rank was read")
    return _lines(looped) if looped else _bars(read)


def _lines(layers: Sequence[Mapping[str, Any]]) -> go.Figure:
    figure = go.Figure()
    most = max(layer["calls"] for layer in layers)
    for index, layer in enumerate(layers):
        color = COLORS[index % len(COLORS)]
        ranks = [step["rank"] for step in layer["steps"]]
        words = f"<b>{html.escape(layer['name'])}</b><br>%{{x}}: rank %{{y}} of {layer['width']:,}<br>n = {layer['steps'][0]['n']:,} rows a step"
        look = {"color": color, "dash": DASHES[index // len(COLORS) % len(DASHES)]}
        figure.add_scatter(
            x=[*range(len(ranks)), most],
            y=[*ranks, layer["accumulated"]["rank"]],
            mode="lines+markers",
            name=tail(layer["name"]),
            line=look,
            marker={"symbol": [*["circle"] * len(ranks), SYMBOLS[2]], "size": [*[6] * len(ranks), 9]},
            hovertemplate=words + "<extra></extra>",
        )
    style(figure, max(380, 90 + 19 * len(layers)))
    every = max(1, most // 12)
    ticks = list(range(0, most, every))
    figure.update_xaxes(title="loop step", tickvals=[*ticks, most], ticktext=[*map(str, ticks), "all"])
    figure.update_yaxes(title="rank above the threshold", rangemode="tozero")
    figure.update_layout(showlegend=True, legend={"font": {"size": 11}})
    return figure


def _bars(layers: Sequence[Mapping[str, Any]]) -> go.Figure:
    figure = go.Figure()
    names = [f"{index + 1}" for index in range(len(layers))]
    bound = [layer["accumulated"]["bound"] for layer in layers]
    words = [
        f"<b>{html.escape(layer['name'])}</b><br>rank {layer['accumulated']['rank']:,} of {layer['width']:,}, n = {layer['accumulated']['n']:,} rows"
        for layer in layers
    ]
    figure.add_bar(x=names, y=bound, name="bound min(n, columns)", marker_color="#d5d9e0", hovertext=words, hoverinfo="text")
    ranks = [layer["accumulated"]["rank"] for layer in layers]
    figure.add_bar(x=names, y=ranks, name="rank", marker_color=COLORS[0], hovertext=words, hoverinfo="text")
    style(figure, 340)
    figure.update_layout(barmode="overlay", showlegend=True, legend={"orientation": "h", "y": 1.12})
    figure.update_xaxes(title="input, in module order", type="category", nticks=min(20, len(layers)))
    figure.update_yaxes(title="rank above the threshold", rangemode="tozero")
    return figure


def expert_tokens(experts: Sequence[Mapping[str, Any]]) -> go.Figure:
    """How many experts got how many tokens, a panel for each width of projection, the width as a line: left of it an expert is starved."""
    widths = sorted({expert["width"] for expert in experts})
    if not widths:
        return _empty("the model has no fused experts")
    titles = [
        f"{', '.join(sorted({_leaf(e['projection']) for e in experts if e['width'] == width}))}: {width:,} columns" for width in widths
    ]
    figure = make_subplots(1, len(widths), subplot_titles=[html.escape(title) for title in titles])
    for column, width in enumerate(widths, start=1):
        here = [expert for expert in experts if expert["width"] == width]
        top = max(width, *(expert["tokens"] for expert in here)) + 1
        size = -(-top // BINS)
        for state, color in (("untouched", "#a3001e"), ("starved", "#E69F00"), ("fed", COLORS[0])):
            tokens = [expert["tokens"] for expert in here if _state(expert) == state]
            figure.add_histogram(
                x=tokens,
                xbins={"start": 0, "end": top + size, "size": size},
                name=state,
                legendgroup=state,
                showlegend=column == 1,
                marker_color=color,
                hovertemplate=f"%{{y}} {state}, %{{x}} tokens<extra></extra>",
                row=1,
                col=column,
            )
        figure.add_vline(x=width, line={"color": MUTED, "dash": "dash", "width": 1}, row=1, col=column)
    style(figure, 340)
    figure.update_layout(barmode="stack", showlegend=True, legend={"orientation": "h", "y": 1.2})
    figure.update_xaxes(title="tokens of an expert")
    figure.update_yaxes(tickformat="d", nticks=6)
    figure.update_yaxes(title="experts", col=1)
    return figure


def _leaf(projection: str) -> str:
    return projection.rpartition(".")[2]


def _state(expert: Mapping[str, Any]) -> str:
    return "untouched" if expert["untouched"] else "starved" if expert["starved"] else "fed"


def injection(exposure: Mapping[str, Mapping[str, Any]]) -> go.Figure:
    """Agreement with the base and relative error of the final state, against the part λ of earlier steps' error that is fed back."""
    if not exposure:
        return _empty("feedback exposure was not measured")
    figure = make_subplots(1, 2, subplot_titles=["top tokens kept", "relative error of the final state"])
    for index, (scheme, reading) in enumerate(exposure.items()):
        points = reading["injection"]
        fractions = [point["fraction"] for point in points]
        kept = [point["agreement"] for point in points]
        shared: dict[str, Any] = {
            "mode": "lines+markers",
            "name": html.escape(scheme),
            "legendgroup": scheme,
            "line": {"color": COLORS[index % len(COLORS)]},
            "marker": {"symbol": SYMBOLS[index % len(SYMBOLS)], "size": 8},
        }
        bars = {
            "type": "data",
            "symmetric": False,
            "array": [k["high"] - k["value"] for k in kept],
            "arrayminus": [k["value"] - k["low"] for k in kept],
            "thickness": 1,
        }
        n = f"n = {kept[0]['n']:,} tokens"
        figure.add_scatter(
            x=fractions,
            y=[k["value"] for k in kept],
            error_y=bars,
            hovertemplate=f"λ = %{{x}}: %{{y:.1%}}, {n}<extra>{html.escape(scheme)}</extra>",
            row=1,
            col=1,
            **shared,
        )
        errors = [point["relative_error"] for point in points]
        hover = f"λ = %{{x}}: %{{y:.3g}}, {n}<extra>{html.escape(scheme)}</extra>"
        figure.add_scatter(x=fractions, y=errors, showlegend=False, hovertemplate=hover, row=1, col=2, **shared)
    style(figure, 360)
    figure.update_layout(showlegend=True, legend={"orientation": "h", "y": 1.2})
    figure.update_xaxes(title="λ: part of earlier steps' error fed back")
    figure.update_yaxes(tickformat=".0%", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(rangemode="tozero", row=1, col=2)
    return figure
