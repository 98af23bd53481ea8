"""survey.html: what calibration sees of a model's inputs, for whoever decides how to quantize it.

`write_survey_report` turns the content of survey.json into one self-contained page: plotly.js is inlined once (about 5 MB), nothing is loaded from the network, and
whatever came from outside is escaped. Every rank stands beside its n, every overlap beside the overlap of two halves of the samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from plotly.offline import get_plotlyjs

from prism_ray.core.files import atomic_path
from prism_ray.reports.html import plot_div, provenance
from prism_ray.reports.survey_figures import LINES, expert_tokens, injection, rank_by_step
from prism_ray.reports.survey_template import PAGE
from prism_ray.reports.text import MISSING, count, fixed, number, percent, short

REPORT_NAME = "survey.html"
PLACED = {"layers", "experts", "exposure", "findings", "left_out", "summary", "text"}
FOLD_ABOVE = 40
MOST_EXPERTS = 60
"""Experts shown, the fewest tokens first; survey.parquet has all."""


def write_survey_report(folder: Path, survey: Mapping[str, Any]) -> Path:
    """Write survey.html into `folder` atomically and return its path. survey: the content of survey.json."""
    experts = sorted(survey["experts"], key=lambda expert: (expert["tokens"] / expert["width"], expert["projection"], expert["expert"]))
    looped = any(layer["calls"] > 1 for layer in survey["layers"])
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    page = environment.from_string(PAGE).render(
        title=f"prism-ray survey of {_name(survey)}",
        plotly_js=get_plotlyjs(),
        headline=headline(survey),
        findings=survey["findings"],
        fold_above=FOLD_ABOVE,
        threshold=f"{survey['threshold']:g}",
        looped=looped,
        lines=LINES,
        layers=[_layer(layer) for layer in survey["layers"]],
        steps=plot_div(rank_by_step(survey["layers"]), "rank-by-step"),
        experts=[_expert(expert) for expert in experts[:MOST_EXPERTS]],
        experts_total=len(experts),
        tokens=plot_div(expert_tokens(survey["experts"]), "expert-tokens") if experts else "",
        schemes=[_scheme(name, reading) for name, reading in survey["exposure"].items()],
        injection=plot_div(injection(survey["exposure"]), "injection") if survey["exposure"] else "",
        exposure_samples=survey["exposure_samples"],
        no_exposure=survey["no_exposure"],
        left_out=[(name, reason, count(size)) for name, reason, size in survey["left_out"]],
        provenance=provenance(survey, PLACED),
    )
    path = Path(folder) / REPORT_NAME
    with atomic_path(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return path


def _name(survey: Mapping[str, Any]) -> str:
    return str((survey.get("config") or {}).get("model") or "a model").rstrip("/").rsplit("/", 1)[-1]


def headline(survey: Mapping[str, Any]) -> dict[str, Any]:
    """level: warn where a finding asks for something else than plain quantization; title, sentences."""
    kinds = {finding["kind"] for finding in survey["findings"]}
    acts = {finding["action"] for finding in survey["findings"] if finding["kind"] == "component"}
    words = [
        ("keep an exposed component in bf16", "keep-bf16" in acts),
        ("rotate an exposed component", "rotate" in acts),
        ("sum Hessians over all steps", "blind" in kinds or "trajectory" in acts),
        ("give more rows", bool(kinds & {"rank-bound", "starved"})),
        ("record fallbacks for empty experts", "untouched" in kinds),
    ]
    asked = [text for text, holds in words if holds]
    title = f"{asked[0][0].upper()}{asked[0][1:]}" + "".join(f", {text}" for text in asked[1:]) if asked else "Nothing stands out"
    return {"level": "warn" if asked else "ok", "title": title, "sentences": [survey["summary"]]}


def _layer(layer: Mapping[str, Any]) -> dict[str, Any]:
    whole, steps = layer["accumulated"], layer["steps"]
    between = layer["overlap"]
    return {
        "name": layer["name"],
        "members": ", ".join(member.rpartition(".")[2] for member in layer["members"]),
        "component": layer["component"],
        "width": count(layer["width"]),
        "calls": layer["calls"],
        "tokens": count(layer["tokens"]),
        "n": count(steps[0]["n"]) if steps else MISSING,
        "first": count(steps[0]["rank"]) if steps else MISSING,
        "last": count(steps[-1]["rank"]) if steps else MISSING,
        "rank": MISSING if whole is None else count(whole["rank"]),
        "effective": MISSING if whole is None else short(whole["effective"]),
        "gain": fixed(number(layer, "gain"), 2),
        "overlap": MISSING if between is None else percent(between["value"]),
        "chance": "" if between is None else f"chance {percent(between['chance'])}",
        "floors": [
            MISSING if layer[name] is None else percent(layer[name]["value"])
            for name in (("floor_first", "floor_last") if layer["calls"] > 1 else ("floor_first",))
        ],
        "shifted": {True: "yes", False: "no", None: MISSING}[layer["shifted"]],
        "blind": layer["blind"],
        "trace": short(sum(layer["trace"])),
        "note": "; ".join(note for note in (layer["limited"], *layer["notes"]) if note),
    }


def _expert(expert: Mapping[str, Any]) -> dict[str, Any]:
    state, level = ("untouched", "bad") if expert["untouched"] else ("starved", "warn") if expert["starved"] else ("", "")
    rank = expert["rank"]
    return {
        "name": expert["projection"],
        "expert": expert["expert"],
        "width": count(expert["width"]),
        "tokens": count(expert["tokens"]),
        "share": percent(expert["share"]),
        "bound": count(expert["bound"]),
        "rank": MISSING if rank is None else count(rank["rank"]),
        "n": MISSING if rank is None else count(rank["n"]),
        "state": state,
        "level": level,
        "note": expert["limited"],
    }


def _estimate(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return MISSING
    return f"{percent(found['value'])} [{percent(found['low'])}, {percent(found['high'])}]"


def _scheme(name: str, reading: Mapping[str, Any]) -> dict[str, Any]:
    n = next(iter(reading["agreement"].values()))["n"]
    kinds = list(dict.fromkeys(row["kind"] for row in reading["perturbations"]))
    decisions = reading["advice"]["decisions"]
    return {
        "name": name,
        "detail": reading["detail"],
        "n": count(n),
        "text": reading["advice"]["text"],
        "components": [
            {"name": part, "agreement": _estimate(found), "action": decisions[part]["action"] if part in decisions else ""}
            for part, found in reading["agreement"].items()
        ],
        "rotated": _estimate(reading["rotated"]),
        "radius": [_radius(reading[key]) for key in ("radius_base", "radius_quantized")],
        "kinds": [{"name": kind, "cells": _perturbed(reading["perturbations"], kind)} for kind in kinds],
        "sensitivities": [_sensitivity(row) for row in reading["sensitivities"]],
        "steps": reading["steps"],
    }


def _radius(found: Mapping[str, Any]) -> str:
    return f"{fixed(found['estimate'], 3)} (spread of starts {short(found['spread'], 2)}, n = {len(found['rows'])} sequences)"


def _perturbed(rows: Sequence[Mapping[str, Any]], kind: str) -> list[str]:
    found = {row["component"]: _estimate(row) for row in rows if row["kind"] == kind}
    return [found.get(part, MISSING) for part in ("adapter", "core")]


def _sensitivity(row: Mapping[str, Any]) -> dict[str, str]:
    total, reference = sum(row["proxy"]), sum(row["reference"])
    return {
        "name": row["name"],
        "component": row["component"],
        "ablation": percent(row["ablation"]),
        "gain": short(row["gain"]),
        "trace": short(row["trace"]),
        "proxy": short(total),
        "relative": short(total / reference if reference else None),
        "spread": short(number(row, "proxy_spread")),
        "first": percent(row["first_share"]),
    }
