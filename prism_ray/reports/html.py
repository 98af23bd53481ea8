"""report.html of a sweep: one self-contained file for the engineer who has to ship an adapter.

`write_report` turns the trial table, the step history and the run's summary into the page of `template.py`: what to ship, all trials
with their states, the heat map, the Pareto plot, the learning curves, the merge, the gating of App. H, and where it all came from.
plotly.js is inlined once (about 5 MB); nothing is loaded from the network. Whatever came from outside is escaped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from jinja2 import Environment, StrictUndefined
from plotly.io import to_html
from plotly.offline import get_plotlyjs

from prism_ray.core.files import atomic_path
from prism_ray.reports import figures
from prism_ray.reports.gating import HEADROOM, NULL_FACTOR, GatingReading, LambdaEffect, gating
from prism_ray.reports.headline import headline
from prism_ray.reports.sweep import best_trial, conform_history, conform_trials, good_trials, pareto
from prism_ray.reports.template import PAGE
from prism_ray.reports.text import MISSING, accuracy_cell, count, fixed, number, percent, short, strength, with_error

REPORT_NAME = "report.html"
# Shown elsewhere on the page than under provenance.
PLACED = {"best", "gating", "required_good"}
LEVELS = {True: "ok", False: "bad", None: "warn"}
WORDS = {True: "yes", False: "no", None: "not measured"}


def write_report(folder: Path | str, trials: pd.DataFrame, history: pd.DataFrame, summary: Mapping[str, Any]) -> Path:
    """Write report.html into `folder` atomically and return its path.

    trials, history: as `sweep.TRIAL_COLUMNS` and `sweep.HISTORY_COLUMNS` (DataError where they are not); any number may be missing.
    summary: name, started, finished, model, task, formats, required_good, command, best_trial_id, best, gating, versions, seeds. An
    absent key is left out of the page; without `gating` it is computed, without the key `best_trial_id` the best trial is looked up.
    """
    table, steps = conform_trials(trials), conform_history(history)
    best = _best(table, summary)
    best_id = None if best is None else str(best["trial_id"])
    readings = [GatingReading.load(dict(r)) for r in summary["gating"]] if summary.get("gating") else gating(table)
    chosen_first = table.assign(bad=table["state"] != "good").sort_values(["bad", "format", "lambda_", "rank", "learning_rate", "trial_id"])
    rows = [_trial(row, best_id, table) for _, row in chosen_first.iterrows()]
    front = [_trial(row, best_id, table) for _, group in table.groupby("format") for _, row in pareto(group).iterrows()]
    _, task_n, task_words = figures.task_metric(table)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    page = environment.from_string(PAGE).render(
        title=f"prism-ray sweep: {summary.get('name', Path(folder).name)}",
        plotly_js=get_plotlyjs(),
        headline=headline(table, best, readings, summary),
        trials=rows,
        sizes=_sizes(table),
        sizes_task=_n_words(table, task_n, "examples") or "n not recorded",
        task_words=task_words,
        heat_map=plot_div(figures.heat_map(table), "heat-map"),
        pareto_plot=plot_div(figures.pareto_plot(table, best_id), "pareto"),
        curves="" if steps.empty else plot_div(figures.curves(table, steps, best_id), "curves"),
        front=front,
        merge=_merge(summary.get("best") or {}),
        gating=[_gating(reading) for reading in readings],
        factor=f"{NULL_FACTOR:g}",
        headroom=f"{HEADROOM:g}",
        provenance=provenance(summary, PLACED),
    )
    path = Path(folder) / REPORT_NAME
    with atomic_path(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return path


def _best(table: pd.DataFrame, summary: Mapping[str, Any]) -> pd.Series | None:
    if "best_trial_id" not in summary:
        return best_trial(table)
    found = table[table["trial_id"] == str(summary["best_trial_id"])]
    return None if summary["best_trial_id"] is None or found.empty else found.iloc[0]


def plot_div(figure: go.Figure, name: str) -> str:
    """A figure as a div of the id `name`, without plotly.js, which the page carries once."""
    config = {"displayModeBar": False, "responsive": True}
    return to_html(figure, full_html=False, include_plotlyjs=False, include_mathjax=False, div_id=name, config=config)


def _one(table: pd.DataFrame, column: str) -> bool:
    """Whether all good trials have the same n, which is then said once instead of in every cell."""
    return good_trials(table)[column].dropna().nunique() == 1 and table[column].dropna().nunique() == 1


def _n_words(table: pd.DataFrame, column: str, words: str) -> str:
    values = table[column].dropna()
    if values.empty:
        return ""
    low, high = int(values.min()), int(values.max())
    return f"n = {low:,} {words}" if low == high else f"n = {low:,} to {high:,} {words}"


def _sizes(table: pd.DataFrame) -> str:
    named = {"validation": ("validation_n", "examples"), "test": ("test_n", "examples"), "ΔR": ("benchmark_tokens", "answer tokens")}
    parts = [f"{name}: {words}" for name, (column, unit) in named.items() if (words := _n_words(table, column, unit))]
    examples = _n_words(table, "benchmark_examples", "examples").removeprefix("n = ")
    return "; ".join(parts) + (f" in {examples}" if examples else "") + "." if parts else ""


def _trial(row: pd.Series, best_id: str | None, table: pd.DataFrame) -> dict[str, Any]:
    def get(name: str) -> float | None:
        return number(row, name)

    def size(name: str, value: str) -> str:
        return "" if get(value) is None or get(name) is None or _one(table, name) else count(get(name))

    seconds = get("train_seconds")
    return {
        "trial_id": row["trial_id"],
        "chosen": row["trial_id"] == best_id,
        "good": row["state"] == "good",
        "state": figures.STATE_WORDS.get(row["state"], row["state"]),
        "reason": row["reason"],
        "format": row["format"],
        "lambda_": strength(get("lambda_")),
        "penalty": row["penalty"] if (get("lambda_") or 0) > 0 else MISSING,
        "rank": count(get("rank")),
        "learning_rate": strength(get("learning_rate")),
        "steps": count(get("steps")),
        "time": MISSING if seconds is None else f"{seconds:,.0f} s" if seconds < 600 else f"{seconds / 60:,.0f} min",
        "speed": count(get("tokens_per_second")),
        "validation": accuracy_cell(get("validation_accuracy"), get("validation_n")),
        "validation_n": size("validation_n", "validation_accuracy"),
        "validation_loss": fixed(get("validation_loss")),
        "test": accuracy_cell(get("test_accuracy"), get("test_n")),
        "test_n": size("test_n", "test_accuracy"),
        "all_test_n": count(get("test_n")),
        "delta": with_error(get("delta_ce"), get("delta_ce_se"), plus=True),
        "delta_n": size("benchmark_tokens", "delta_ce"),
        "benchmark_tokens": count(get("benchmark_tokens")),
        "drift": short(get("one_minus_omega"), 2),
        "delta_rho": fixed(get("delta_rho"), plus=True),
    }


def _merge(best: Mapping[str, Any]) -> list[dict[str, str]]:
    """Rows (name, value, judgement, level) of what was measured on the re-read merged checkpoint; empty where nothing was merged."""
    if not best.get("merged_path"):
        return []

    def row(name: str, value: str, judgement: str = "", holds: bool | None = None) -> dict[str, str]:
        return {"name": name, "value": value, "judgement": judgement, "level": LEVELS[holds] if judgement else ""}

    rows = []
    worst = number(best, "max_abs_dw")
    if worst is None:
        rows.append(row("max |ΔW|", MISSING, "not measured"))
    else:
        words = "exact: every re-read weight equals the unmerged forward's" if worst == 0 else "NOT exact: do not ship this merge"
        rows.append(row("max |ΔW|, re-read from disk", f"{worst:g}", words, worst == 0))
    merged, unmerged, n = number(best, "merged_accuracy"), number(best, "test_accuracy"), number(best, "test_n")
    if merged is None or unmerged is None:
        rows.append(row("test accuracy, merged", accuracy_cell(merged, n), "not measured on both"))
    else:
        same = merged == unmerged
        value = f"{merged!r} merged, {unmerged!r} unmerged (n = {count(n)})"
        rows.append(row("test accuracy", value, "equal to the digit" if same else "differs", same))
    changed, total = number(best, "changed_scale_bytes"), number(best, "scale_bytes")
    if changed is not None:
        share = f" of {total:,.0f} ({percent(changed / total)})" if total else ""
        words = "" if changed else "the adapter changed nothing"
        rows.append(row("scale bytes changed", f"{changed:,.0f}{share}", words))
    rows.append(row("merged checkpoint", str(best["merged_path"])))
    if best.get("adapter_path"):
        rows.append(row("adapter", str(best["adapter_path"])))
    return rows


def _gating(reading: GatingReading) -> dict[str, Any]:
    trials = f"{reading.trials} trial{'' if reading.trials == 1 else 's'}"
    tokens = f"{trials}, {reading.tokens:,} tokens"

    def condition(name: str, value: str, against: str, holds: bool | None, n: str) -> dict[str, str]:
        return {
            "name": name,
            "reading": value,
            "against": against,
            "holds": WORDS[holds],
            "level": "" if holds is False else LEVELS[holds],
            "n": n,
        }

    drift = short(reading.mean_one_minus_omega)
    ratio = "" if reading.drift_ratio is None else f" (ratio {short(reading.drift_ratio)})"
    loss, error = reading.mean_abs_delta_r, reading.mean_abs_delta_r_se
    signed = fixed(reading.mean_delta_r, plus=True)
    lead, _, why = reading.verdict.partition(": ")
    return {
        "format": reading.format,
        "lead": lead,
        "why": why if why.startswith("n ") else why[:1].upper() + why[1:],
        "level": {"worth it": "ok", "not indicated": "", "undecided": "warn"}[reading.decision],
        "conditions": [
            condition("(i) mean 1 − Ω above its noise", drift, f"null {short(reading.null, 2)}{ratio}", reading.drift_above_noise, tokens),
            condition("(i) mean 1 − Ω has headroom", drift, f"≥ {HEADROOM:g}", reading.drift_has_headroom, tokens),
            condition(
                "(ii) shape term above scale term",
                short(reading.mean_shape_term),
                f"scale {short(reading.mean_scale_term)}",
                reading.shape_dominated,
                tokens,
            ),
            condition(
                f"(ii) mean |ΔR| above its noise, nats (mean ΔR {signed})",
                fixed(loss),
                "2 SE = " + (MISSING if error is None else fixed(2 * error)),
                reading.forgetting_above_noise,
                f"{trials}, {reading.examples:,} examples",
            ),
        ],
        "effects": [_effect(effect) for effect in reading.effects],
    }


def _effect(effect: LambdaEffect) -> dict[str, str]:
    relative, error = effect.relative_change, effect.relative_change_se
    matched = f"{effect.pairs} matched by rank and learning rate" if effect.pairs else "none matched: all against all"
    return {
        "penalty": effect.penalty,
        "lambda_": strength(effect.lambda_),
        "mean": with_error(effect.mean_abs_delta_r, effect.mean_abs_delta_r_se),
        "change": with_error(effect.change, effect.change_se, plus=True),
        "relative": MISSING
        if relative is None
        else f"{fixed(100 * relative, 0, plus=True)} ± {'?' if error is None else fixed(100 * error, 0)} %",
        "drift": short(effect.mean_one_minus_omega, 2),
        "above": "no" if not effect.above_noise else "helped" if effect.change < 0 else "hurt",
        "level": "" if not effect.above_noise else "ok" if effect.change < 0 else "bad",
        "n": f"{effect.trials} trial{'' if effect.trials == 1 else 's'}, {matched}",
    }


def provenance(summary: Mapping[str, Any], placed: Collection[str]) -> list[tuple[str, str]]:
    """Every key of the summary that the page does not show elsewhere (`placed`), dicts flattened with dots."""
    rows: list[tuple[str, str]] = []

    def add(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                add(f"{name}.{key}", inner)
        elif isinstance(value, (list, tuple)):
            rows.append((name, ", ".join(str(item) for item in value)))
        else:
            rows.append((name, MISSING if value is None else str(value)))

    for key, value in summary.items():
        if key not in placed:
            add(str(key), value)
    return rows
