"""The look of the plots: one palette, one style, shared by every figure of a report.

Colour is the regularizer strength: the Okabe-Ito palette, which the common colour-vision deficiencies can tell apart, black for
lambda = 0; with more strengths than it has colours, steps of cividis. Marker shape is the rank.
"""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

FONT = {"family": "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', Arial, sans-serif", "size": 13, "color": "#222"}
GRID, MUTED = "#e4e6ea", "#6b7280"
OKABE_ITO = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")


def colors(trials: pd.DataFrame) -> dict[float, str]:
    strengths = [float(s) for s in sorted(trials["lambda_"].dropna().unique())]
    if len(strengths) <= len(OKABE_ITO):
        # Black is lambda = 0 alone, so that "no regularizer" looks the same in every report.
        return dict(zip(strengths, OKABE_ITO[0 if 0.0 in strengths else 1 :] + OKABE_ITO[:1], strict=False))
    return dict(zip(strengths, sample_colorscale("Cividis", [i / len(strengths) for i in range(len(strengths))]), strict=True))


def symbols(trials: pd.DataFrame) -> dict[int, str]:
    ranks = sorted(int(rank) for rank in trials["rank"].dropna().unique())
    return {rank: SYMBOLS[index % len(SYMBOLS)] for index, rank in enumerate(ranks)}


def legend(figure: go.Figure, name: str, group: str, mode: str = "markers", **style: object) -> None:
    figure.add_trace(go.Scatter(x=[None], y=[None], mode=mode, name=name, legendgroup=group, hoverinfo="skip", **style), row=1, col=1)


def say(figure: go.Figure, text: str) -> None:
    figure.add_annotation(text=text, xref="paper", yref="paper", x=0.5, y=0.5, showarrow=False, font={"color": MUTED, "size": 14})
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)


def style(figure: go.Figure, height: int) -> None:
    figure.update_layout(
        template="none",
        font=FONT,
        height=height,
        margin={"l": 64, "r": 16, "t": 36, "b": 52},
        paper_bgcolor="white",
        plot_bgcolor="white",
        hoverlabel={"bgcolor": "white", "bordercolor": "#9ca3af", "font": {"size": 12, "color": "#222"}, "align": "left"},
    )
    figure.update_xaxes(
        gridcolor=GRID, zeroline=False, linecolor="#9ca3af", showline=True, ticks="outside", ticklen=4, title_font_size=13, title_standoff=8
    )
    figure.update_yaxes(
        gridcolor=GRID, zeroline=False, linecolor="#9ca3af", showline=True, ticks="outside", ticklen=4, title_font_size=13, title_standoff=8
    )
    # The titles that make_subplots adds are annotations, of a larger size.
    figure.update_annotations(font_size=13, selector={"font.size": 16})
