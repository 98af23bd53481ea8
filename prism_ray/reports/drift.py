"""drift.html: how far each variant drifted from the base, along which axis, above which noise, and what to do, for whoever releases one.

`write_drift_report` turns the tables of a drift run and the content of its drift.json into the page of `drift_template.py`, one
self-contained file: plotly.js is inlined once (about 5 MB), nothing is loaded from the network, and whatever came from outside is escaped.
Flat numbers are read from the table, nested ones (floors, directions, transfer, agreement) from the summary's results of the same variant
and benchmark.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from jinja2 import Environment, StrictUndefined
from plotly.offline import get_plotlyjs

from prism_ray.core.files import atomic_path
from prism_ray.reports.drift_figures import (
    AXES,
    STATUSES,
    Reading,
    above_bound,
    axis_bars,
    bound_scatter,
    bound_words,
    clip,
    gap_words,
    left_out,
    readings,
    require_columns,
)
from prism_ray.reports.drift_template import PAGE
from prism_ray.reports.html import plot_div, provenance
from prism_ray.reports.text import MISSING, count, fixed, number, percent, short, with_error

REPORT_NAME = "drift.html"
PLACED = {"results", "ranking", "failures", "passed"}
MOST = 15
"""Inputs shown of each variant."""
FOLD_ABOVE, FOLD_READINGS_ABOVE = 24, 60
"""Rows above which a table is folded; the table of all readings, being what one came for, later than the others."""
OPEN_UP_TO = 6
"""Readings up to which all paragraphs are open, and not the worst variant's alone."""
LEVELS = {"drifted": "warn", "within noise": "ok", "identical": "ok"}
ALIGNMENTS = {"nuclear": "W = W_N (nuclear)", "joint": "W optimized (joint)"}


def write_drift_report(folder: Path, table: pd.DataFrame, samples: pd.DataFrame, summary: Mapping[str, Any]) -> Path:
    """Write drift.html into `folder` atomically and return its path.

    table: one row a (variant, benchmark); samples: one row a (variant, benchmark, sample); summary: the content of drift.json. A missing
    number is an en dash. DataError where the table lacks a column that the page cannot do without.
    """
    found = readings(table, summary)
    benchmarks = list(dict.fromkeys(str(name) for name in table["benchmark"]))
    order = {variant: place for place, variant in enumerate(dict.fromkeys(reading.variant for reading in found))}
    alignments = [name for name in ALIGNMENTS if any(reading.get(f"bound_{name}") is not None for reading in found)]
    ranking = [dict(entry) for entry in summary.get("ranking") or []]
    agreements = [_agreement(reading) for reading in found]
    outside = left_out(found)
    scatter_words = (
        f"{outside} of {len(found)} readings have B or |ΔR| of 0 or missing, which a logarithmic axis has no place for." if outside else ""
    )
    above = above_bound(found)
    if not above and outside < len(found):
        scatter_words += f" No point lies above the line (n = {len(found) - outside})."
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    page = environment.from_string(PAGE).render(
        title=f"prism-ray drift from {_base(summary) or Path(folder).name}",
        plotly_js=get_plotlyjs(),
        fold_above=FOLD_ABOVE,
        fold_readings_above=FOLD_READINGS_ABOVE,
        headline=headline(found, summary),
        verdicts=_verdicts(found),
        rows=[_row(reading, order[reading.variant], alignments) for reading in found],
        k_feat=_common([reading.get("k_feat") for reading in found]),
        replicates=_replicates(found),
        alignments=[ALIGNMENTS[name] for name in alignments],
        axes=AXES,
        bars=plot_div(axis_bars(found, benchmarks), "axes"),
        scatter=plot_div(bound_scatter(found, benchmarks, _correlations(ranking)), "bound"),
        scatter_words=scatter_words.strip(),
        above=[f"{reading.variant} on {reading.benchmark}: |ΔR| {gap_words(reading)}, B {bound_words(reading)}" for reading in above],
        directions=[_direction(reading, order[reading.variant]) for reading in found if reading.part("direction")],
        no_direction=_no_direction(found, benchmarks),
        transfers=[_transfer(reading) for reading in found if reading.part("transfer")],
        percentiles=sorted({cell["percentile"] for entry in agreements for score in entry["scores"] for cell in score["cells"]}),
        agreements=agreements,
        ranking=[_ranking(entry, benchmarks) for entry in ranking],
        ranking_benchmarks=benchmarks,
        no_ranking="No ranking was given." if len(order) > 3 else "Fewer than four variants: a rank correlation would say nothing.",
        most=MOST,
        worst_inputs=_worst_inputs(samples, list(order)),
        flips=[_flips(reading) for reading in found if reading.get("routing_flips") is not None],
        truncated=_truncated(found, benchmarks),
        dropped=[_dropped(reading) for reading in found if reading.get("dropped") or reading.part("dropped")],
        provenance=provenance(_named_data(summary), PLACED),
    )
    path = Path(folder) / REPORT_NAME
    with atomic_path(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return path


def _base(summary: Mapping[str, Any]) -> str:
    """The last part of the base's source; the whole stands under provenance."""
    return str(_mapping(summary.get("config")).get("base") or "").rstrip("/").rsplit("/", 1)[-1]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


class DriftHeadline(NamedTuple):
    """level: ok (passed), bad (failed), warn (no threshold was set, so nothing could fail)."""

    level: str
    title: str
    failures: list[str]
    sentences: list[str]


def headline(found: Sequence[Reading], summary: Mapping[str, Any]) -> DriftHeadline:
    """Whether the run passes and why not, which variant is furthest from the base, and what was lost above the noise."""
    failures = [str(line) for line in summary.get("failures") or []]
    variants, benchmarks = len({r.variant for r in found}), len({r.benchmark for r in found})
    size = f"{_many(variants, 'variant')} on {_many(benchmarks, 'benchmark')}"
    thresholds = _thresholds(_mapping(summary.get("config")))
    if failures or summary.get("passed") is False:
        level, title = "bad", f"Failed: {_many(len(failures), 'threshold')} crossed by {size}"
    elif thresholds:
        level, title = "ok", f"Passed: {size}, no threshold crossed"
    else:
        level, title = "warn", f"Measured, not judged: {size}, no threshold set"
    sentences = [f"Thresholds: {'; '.join(thresholds)}." if thresholds else "Set --max-bound or --fail-on to have a run judged."]
    states = Counter(reading.word("status") or "not judged" for reading in found)
    named = [name for name in (*STATUSES, "not judged") if states[name]]
    if found:
        sentences.append(f"Of {_many(len(found), 'reading')}: {', '.join(f'{states[name]} {name}' for name in named)}.")
        sentences += [_furthest(found[0]), _lost(found)]
    rotated = Counter(reading.word("direction_verdict") for reading in found)
    tested = sum(number for word, number in rotated.items() if word)
    if tested:
        lost = f", no direction in {rotated['undefined']}" if rotated["undefined"] else ""
        sentences.append(f"Class direction: rotation in {rotated['rotation']} of {_many(tested, 'test')}{lost}.")
    return DriftHeadline(level, title, failures, sentences)


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _thresholds(config: Mapping[str, Any]) -> list[str]:
    limit = number(config, "max_bound")
    fail_on = config.get("fail_on") or ()
    words = [] if limit is None else [f"B at most {limit:g} nats a token"]
    return words + ([f"fails on {', '.join(str(name) for name in fail_on)}"] if fail_on else [])


def _sizes(reading: Reading) -> str:
    return f"n = {count(reading.get('samples'))} samples, {count(reading.get('tokens'))} tokens"


def _furthest(worst: Reading) -> str:
    if worst.word("status") == "identical":
        return "Every variant is identical to the base on every axis."
    axis, share = _dominant(worst)
    lead = (
        "No variant is distinguishable from the base against itself; the largest reading"
        if worst.word("status") == "within noise"
        else "Worst"
    )
    on = f", {share} {axis}" if axis != MISSING else ""
    return (
        f"{lead}: {worst.variant} on {worst.benchmark}, B = {bound_words(worst)} nats{on}; "
        f"measured ΔR {gap_words(worst, signed=True)} nats a token ({_sizes(worst)})."
    )


def _lost(found: Sequence[Reading]) -> str:
    """The largest measured loss that is above its noise."""
    clear = [reading for reading in found if reading.above_noise]
    worse = [reading for reading in clear if (reading.get("delta_ce") or 0.0) > 0]
    if not clear:
        return "No ΔR is above twice its standard error: these samples show neither loss nor gain."
    tally = f"ΔR is above twice its standard error in {len(clear)} of {_many(len(found), 'reading')}"
    if not worse:
        return f"{tally}, and a gain in each."
    most = max(worse, key=lambda reading: reading.get("delta_ce") or 0.0)
    return (
        f"{tally}, a loss in {len(worse)}; the largest: {most.variant} on {most.benchmark}, {gap_words(most, signed=True)} nats a token "
        f"({_sizes(most)})."
    )


def _dominant(reading: Reading) -> tuple[str, str]:
    """The dominant axis and its share of B, both missing where nothing drifted."""
    axis = reading.word("dominant")
    share = number(reading.part("bounds", "identity", "shares"), axis)
    return axis or MISSING, "" if share is None else f"{100 * share:.0f} %"


def _verdicts(found: Sequence[Reading]) -> list[dict[str, Any]]:
    """A block a variant: the paragraphs of its benchmarks."""
    few = len(found) <= OPEN_UP_TO
    shown: list[dict[str, Any]] = []
    for variant in dict.fromkeys(reading.variant for reading in found):
        own = [reading for reading in found if reading.variant == variant]
        worst = own[0]
        status = worst.word("status") or "not judged"
        axis, share = _dominant(worst)
        on = f", {share} {axis}" if axis != MISSING else ""
        where = f" on {worst.benchmark}" if len(own) > 1 else ""
        shown.append(
            {
                "variant": variant,
                "status": status,
                "level": LEVELS.get(status, ""),
                "fails": any(reading.fails for reading in own),
                "words": f"B {bound_words(worst)} nats{on}{where}, ΔR {gap_words(worst, signed=True)}",
                "texts": [str(reading.part("verdict").get("text") or f"{reading.benchmark}: no verdict was given.") for reading in own],
                "open": few or not shown,
            }
        )
    return shown


def _row(reading: Reading, order: int, alignments: Sequence[str]) -> dict[str, Any]:
    """A reading in the tables of all readings, of other alignments and of floors."""
    get = reading.get
    low, high = get("bound_low"), get("bound_high")
    status = reading.word("status") or "not judged"
    axes = reading.part("axes")
    layouts = sorted({int(n) for axis in AXES if (n := number(_mapping(axes.get(axis)), "layouts")) is not None})
    if status == "drifted" and layouts == [0]:
        status += ", no floor"
    axis, share = _dominant(reading)
    gap = get("delta_ce")
    note = gap_words(reading, signed=True).split(" ± ")[0] + ("" if reading.above_noise else ", below 2 SE") if gap else ""
    return {
        "variant": reading.variant,
        "benchmark": reading.benchmark,
        "order": order,
        "samples": count(get("samples")),
        "tokens": count(get("tokens")),
        "rho_target": fixed(get("rho_target")),
        "rho_proxy": fixed(get("rho_proxy")),
        "drift": short(get("one_minus_omega")),
        "channel": short(get("channel_one_minus_omega")),
        "delta": short(get("delta")),
        "gamma": short(get("gamma")),
        "bound": short(get("bound"), 4),
        "interval": "" if low is None or high is None else f"{short(low, 4)} to {short(high, 4)}",
        "gap": gap_words(reading),
        "gap_note": note,
        "gap_level": "" if not reading.above_noise else "bad" if (gap or 0.0) > 0 else "ok",
        "axis": axis,
        "share": share,
        "status": status,
        "level": LEVELS.get(reading.word("status"), ""),
        "fails": bool(reading.fails),
        "aligned": [
            {
                "drift": short(get(f"one_minus_omega_{name}")),
                "delta": short(get(f"delta_{name}")),
                "gamma": short(get(f"gamma_{name}")),
                "bound": short(get(f"bound_{name}"), 4),
            }
            for name in alignments
        ],
        "range": [short(get("feature_range")), short(get("head_range")), short(get("bound_range"), 4)],
        "bound_sequence": short(get("bound_sequence"), 4),
        "gap_sequence": _signed(get("delta_ce_sequence")),
        "floors": [_floor(reading, axis) for axis in AXES],
        "layouts": ", ".join(str(n) for n in layouts) or MISSING,
    }


def _signed(value: float | None) -> str:
    """With its sign, small ones with significant digits instead of zeros, exactly 0 as 0."""
    if value is None or value == 0:
        return MISSING if value is None else "0"
    return f"{'+' if value > 0 else ''}{short(value, 2)}" if abs(value) < 1e-3 else fixed(value, 4, plus=True)


def _floor(reading: Reading, axis: str) -> dict[str, str]:
    entry = reading.part("axes", axis)
    shares = reading.shares
    mean, sd, largest = (number(entry, name) for name in ("floor_mean", "floor_sd", "floor_largest"))
    above = entry.get("distinguishable")
    return {
        "value": short(number(entry, "value")),
        "share": "" if shares is None else percent(shares[axis]),
        "floor": MISSING if mean is None else f"{short(mean, 2)} ± {'?' if sd is None else short(sd, 2)}",
        "largest": "" if largest is None else f"largest {short(largest, 2)}",
        "above": {True: "yes", False: "no"}.get(above, MISSING) if isinstance(above, bool) else MISSING,
        "level": {True: "warn", False: "ok"}[above] if isinstance(above, bool) else "",
    }


def _common(values: Sequence[float | None]) -> str:
    """A number that is the base's and so the same everywhere; a range where it is not."""
    known = [value for value in values if value is not None]
    if not known:
        return MISSING
    low, high = short(min(known), 4), short(max(known), 4)
    return low if low == high else f"{low} to {high}"


def _replicates(found: Sequence[Reading]) -> str:
    made = sorted({int(n) for reading in found if (n := number(reading.part("interval"), "replicates")) is not None})
    return f" ({', '.join(f'{n:,}' for n in made)} resamples)" if made else ""


def _correlations(ranking: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Spearman of the bound by benchmark, for the panels' titles."""
    bound = next((entry for entry in ranking if entry.get("reading") == "bound"), {})
    found = {str(name): _spearman(entry) for name, entry in _mapping(bound.get("benchmarks")).items()}
    return {name: f"Spearman {value} ({noise})" for name, (value, noise) in found.items()}


def _spearman(entry: Any) -> tuple[str, str]:
    """(`0.74`, `−0.16 to 0.97, n = 7`)."""
    value, low, high = (number(_mapping(entry), name) for name in ("r", "low", "high"))
    interval = "" if low is None or high is None else f"{fixed(low, 2)} to {fixed(high, 2)}, "
    return fixed(value, 2), f"{interval}n = {count(number(_mapping(entry), 'n'))}"


def _ranking(entry: Mapping[str, Any], benchmarks: Sequence[str]) -> dict[str, Any]:
    cells = _mapping(entry.get("benchmarks"))
    return {
        "what": str(entry.get("what") or entry.get("reading")),
        "cells": [_spearman(cells.get(name)) for name in benchmarks],
        "mean": with_error(number(entry, "mean"), number(entry, "sem"), 2),
    }


def _direction(reading: Reading, order: int) -> dict[str, Any]:
    test, own, base = reading.part("direction"), reading.part("direction", "own_null"), reading.part("direction", "base_null")
    mean, sd = number(own, "mean"), number(own, "sd")
    verdict = str(test.get("verdict") or MISSING)
    n_a, n_b = number(own, "n_a"), number(own, "n_b")
    return {
        "variant": reading.variant,
        "benchmark": reading.benchmark,
        "order": order,
        "classes": " / ".join(repr(clip(str(name), 24)) for name in reading.result.get("classes") or ()) or MISSING,
        "n": count(n_a) if n_a == n_b else f"{count(n_a)} / {count(n_b)}",
        "splits": count(number(own, "splits")),
        "cosine": fixed(number(test, "cosine"), 4),
        "own": with_error(mean, sd, 4),
        "below": "" if mean is None or sd is None else f"below {fixed(mean - 2 * sd, 4)}",
        "base": with_error(number(base, "mean"), number(base, "sd"), 4),
        "floor": fixed(number(test, "floor"), 4),
        "kappa": f"κ {short(kappa)}" if (kappa := number(reading.part("direction", "base"), "kappa")) is not None else "",
        "verdict": verdict,
        "level": {"rotation": "bad", "within noise": "ok"}.get(verdict, "warn"),
    }


def _no_direction(found: Sequence[Reading], benchmarks: Sequence[str]) -> list[str]:
    """Why benchmarks have no direction test."""
    free, few = [], []
    for name in benchmarks:
        own = [reading for reading in found if reading.benchmark == name]
        untested = [reading for reading in own if not reading.part("direction")]
        if not untested:
            continue
        if not any(reading.result.get("classes") for reading in own):
            free.append(name)
        else:
            few.append(f"{name} ({len(untested)} of {len(own)} variants)")
    sentences = [f"No class direction without two answers that repeat often enough: {', '.join(free)}."] if free else []
    return sentences + ([f"Too few samples of a class were left: {', '.join(few)}."] if few else [])


def _transfer(reading: Reading) -> dict[str, Any]:
    moved, line = reading.part("transfer"), reading.part("transfer", "regression")
    return {
        "variant": reading.variant,
        "benchmark": reading.benchmark,
        "n": count(number(moved, "n_eval")),
        "n_fit": count(number(moved, "n_fit")),
        "slope": with_error(number(line, "slope"), number(line, "slope_se")),
        "shift": with_error(number(line, "shift"), number(line, "shift_se"), plus=True),
        "r2": fixed(number(line, "r2")),
        "estimates": [
            _estimate(moved.get(name))
            for name in ("auroc_base", "auroc_variant", "accuracy_base", "accuracy_transferred", "accuracy_recalibrated")
        ],
        "change": with_error(number(moved, "auroc_change"), number(moved, "auroc_change_se"), plus=True),
        "kind": str(moved.get("kind") or MISSING),
        "remedy": str(moved.get("remedy") or MISSING),
    }


def _estimate(value: Any) -> tuple[str, str]:
    estimate = _mapping(value)
    low, high = number(estimate, "low"), number(estimate, "high")
    return fixed(number(estimate, "value")), "" if low is None or high is None else f"{fixed(low)} to {fixed(high)}"


def _agreement(reading: Reading) -> dict[str, Any]:
    by_score: dict[str, list[dict[str, Any]]] = {}
    for entry in reading.result.get("agreement_splits") or ():
        low, high, separation, error = (number(entry, name) for name in ("low", "high", "separation", "se"))
        clear = separation is not None and error is not None and abs(separation) > 2 * error
        cell = {
            "percentile": int(number(entry, "percentile") or 0),
            "parts": f"{fixed(low)}, {fixed(high)}",
            "n": f"{count(number(entry, 'n_low'))}, {count(number(entry, 'n_high'))}",
            "separation": with_error(separation, error, plus=True),
            "level": "" if not clear else "ok" if (separation or 0.0) > 0 else "bad",
        }
        by_score.setdefault(str(entry.get("score")), []).append(cell)
    kl = reading.get("kl")
    return {
        "variant": reading.variant,
        "benchmark": reading.benchmark,
        "agreement": fixed(reading.get("agreement"), 4),
        "kl": "" if kl is None else f"KL {short(kl)}",
        "scores": [{"score": name, "cells": cells} for name, cells in by_score.items()],
    }


def _worst_inputs(samples: pd.DataFrame, variants: Sequence[str]) -> list[dict[str, Any]]:
    """The largest residuals of each variant, variants in report order; by KL where the features are the base's and only the head moved."""
    if samples.empty:
        return []
    require_columns(samples, ("variant", "benchmark", "sample", "residual"), "drift samples")
    samples = samples.reset_index(drop=True)
    names = samples["variant"].astype(str)
    ranked = {column: _finite(samples[column]) for column in ("residual", "kl") if column in samples}
    shown = []
    for variant in variants:
        own = samples[names == variant]
        if own.empty:
            continue
        found = [column for column, values in ranked.items() if (values[own.index] > 0).any()]
        words = f"features and outputs are the base's on all of {_many(len(own), 'sample')}"
        rows: list[dict[Any, Any]] = []
        if found:
            chosen = ranked[found[0]][own.index].dropna().sort_values(ascending=False, kind="stable").index[:MOST]
            rows = samples.loc[chosen].to_dict("records")
            by = "" if found[0] == "residual" else ", by KL: the features are the base's on every one"
            words = f"{len(rows)} of {_many(len(own), 'sample')}{by}"
        # Among equal residuals a rank means nothing.
        sizes = own["benchmark"].astype(str).value_counts() if found[:1] == ["residual"] else None
        shown.append({"variant": variant, "words": words, "samples": [_sample(row, sizes) for row in rows]})
    return shown


def _finite(column: pd.Series) -> pd.Series:
    numbers = pd.to_numeric(column, errors="coerce")
    return numbers.where(numbers.abs() < math.inf)


def _sample(row: Mapping[Any, Any], sizes: pd.Series | None) -> dict[str, str]:
    get = {str(column): number({"value": value}, "value") for column, value in row.items()}.get
    target, proxy = get("ce_target"), get("ce_proxy")
    return {
        "sample": str(row["sample"]),
        "benchmark": str(row["benchmark"]),
        "rank": MISSING if sizes is None else f"{count(get('rank'))} of {sizes[str(row['benchmark'])]:,}",
        "tokens": count(get("tokens")),
        "residual": short(get("residual")),
        "scale": short(get("scale_residual")),
        "shape": short(get("shape_residual")),
        "ce_target": fixed(target),
        "ce_proxy": fixed(proxy),
        "change": MISSING if target is None or proxy is None else _signed(proxy - target),
        "agreement": fixed(get("agreement"), 4),
        "kl": short(get("kl")),
    }


def _flips(reading: Reading) -> dict[str, str]:
    names = {"variant": reading.variant, "benchmark": reading.benchmark}
    flips, floor = (reading.get(name) for name in ("routing_flips", "floor_routing_flips"))
    return names | {"flips": _share(flips), "floor": _share(floor), "tokens": count(reading.get("tokens"))}


def _share(value: float | None) -> str:
    return MISSING if value is None else f"{short(100 * value)} %"


def _truncated(found: Sequence[Reading], benchmarks: Sequence[str]) -> list[str]:
    """One sentence a benchmark that lost tokens: cutting is the data's, the same for every variant."""
    sentences = []
    for name in benchmarks:
        own = [reading for reading in found if reading.benchmark == name]
        cut = max((reading.get("truncated") or 0.0 for reading in own), default=0.0)
        if cut:
            total = max((reading.get("samples") or 0.0) + (reading.get("dropped") or 0.0) for reading in own)
            sentences.append(
                f"{name}: {count(cut)} prompts and answers of {count(total)} samples were cut to max_tokens, for base and variants alike."
            )
    return sentences or ["No sample was cut to max_tokens."]


def _dropped(reading: Reading) -> dict[str, str]:
    found = [f"{sample} ({model})" for sample, model in reading.part("dropped").items()]
    more = f" and {len(found) - MOST} more" if len(found) > MOST else ""
    names = {"variant": reading.variant, "benchmark": reading.benchmark}
    return names | {"count": count(reading.get("dropped")), "words": ", ".join(found[:MOST]) + more if found else MISSING}


def _named_data(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The summary with the configuration's data sets under their names, so that each option gets a row."""
    config = _mapping(summary.get("config"))
    data = config.get("data")
    if not isinstance(data, (list, tuple)) or not all(isinstance(entry, Mapping) for entry in data):
        return dict(summary)
    named = {str(entry.get("name", place)): {k: v for k, v in entry.items() if k != "name"} for place, entry in enumerate(data)}
    return dict(summary) | {"config": dict(config) | {"data": named}}
