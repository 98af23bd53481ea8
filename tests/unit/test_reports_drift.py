"""The drift report on tables made by hand: numbers, noise, order, the plots, and that nothing is loaded from outside.

To look at the report of a made run:
    python tests/unit/test_reports_drift.py FOLDER [few|one|many|full|hostile]
"""

import functools
import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from prism_ray.core.errors import DataError
from prism_ray.reports.drift import MOST, headline, write_drift_report
from prism_ray.reports.drift_figures import (
    AXES,
    AXIS_COLORS,
    above_bound,
    axis_bars,
    bound_scatter,
    clip,
    left_out,
    marks,
    readings,
)

NAN = math.nan
K_FEAT = 1.6
HOSTILE = "<script>alert('x')</script> & </table>"


def make_reading(variant, benchmark, **values):
    """(row of the table, entry of drift.json's results); B = 4, three quarters of it shape, |dR| = 0.05 ± 0.01."""
    row = {"variant": variant, "benchmark": benchmark, "samples": 60, "tokens": 270, "delta_ce": 0.05, "delta_ce_se": 0.01}
    row |= {"rho_target": 8.0, "rho_proxy": 8.25, "omega": 0.94, "one_minus_omega": 0.06, "channel_one_minus_omega": 0.08}
    row |= {"delta": 3.0, "gamma": 1.0, "bound": 4.0, "bound_low": 3.8, "bound_high": 4.3, "bound_sequence": 3.9, "delta_ce_sequence": 0.04}
    row |= {"feature_range": 1.2, "head_range": 0.3, "bound_range": 1.5}
    row |= {"k_feat": K_FEAT, "dominant": "shape", "status": "drifted", "agreement": 0.96, "kl": 0.037, "truncated": 0, "dropped": 0}
    row |= {"one_minus_omega_nuclear": 0.012, "delta_nuclear": 2.01, "gamma_nuclear": 5.98, "bound_nuclear": 7.99}
    row |= {"routing_flips": None, "floor_routing_flips": None}
    nested = {name: values.pop(name) for name in NESTED if name in values}
    row |= values
    result = {
        "row": row,
        "bounds": {"identity": {"shares": {"scale": 0.05, "shape": 0.70, "head": 0.25}}},
        "interval": {"low": row["bound_low"], "high": row["bound_high"], "n": row["samples"], "replicates": 1000},
        "axes": {
            axis: {
                "axis": axis,
                "value": v,
                "floor_mean": m,
                "floor_sd": m / 2,
                "floor_largest": 2 * m,
                "layouts": 5,
                "distinguishable": above,
            }
            for axis, v, m, above in (("scale", 0.25, 1e-8, True), ("shape", 0.06, 1.5e-4, True), ("head", 1e-9, 2e-9, False))
        },
        "classes": None,
        "direction": None,
        "transfer": None,
        "agreement_splits": [
            {"score": s, "percentile": p, "n_low": 6, "n_high": 54, "low": low, "high": 0.625, "se": 0.0625, "separation": 0.625 - low}
            for s, low in (("agreement", 0.25), ("confidence", 0.5625))
            for p in (10, 25)
        ],
        "dropped": {},
        "verdict": {"status": row["status"], "axis": "shape", "share": 0.7, "text": f"{variant} on {benchmark}: paragraph."},
    }
    return row, result | nested


NESTED = ("bounds", "interval", "axes", "classes", "direction", "transfer", "agreement_splits", "verdict")


def make_direction(cosine=0.9175, verdict="within noise", **values):
    null = {"mean": 0.2423, "sd": 0.0595, "n_a": 30, "n_b": 28, "splits": 200}
    separation = {"d": 64, "kappa": 0.8053, "n": 29.0, "floor": 0.1676}
    test = {"cosine": cosine, "own_null": null, "base_null": null | {"mean": 0.2061}, "base": separation, "floor": 0.1676}
    return test | {"verdict": verdict, "subspace_gain": 1.07} | values


def make_transfer():
    estimate = {"value": 0.75, "low": 0.5671, "high": 0.8789, "n": 29}
    return {
        "kind": "translation",
        "remedy": "recalibrate the threshold",
        "n_fit": 29,
        "n_eval": 30,
        "regression": {"slope": 0.972, "slope_se": 0.033, "shift": 0.428, "shift_se": 0.084, "r2": 0.913, "n": 30},
        "auroc_base": estimate,
        "auroc_variant": estimate | {"value": 0.8125},
        "auroc_change": 0.0625,
        "auroc_change_se": 0.031,
        "accuracy_base": estimate | {"value": 0.7},
        "accuracy_transferred": estimate | {"value": 0.6},
        "accuracy_recalibrated": estimate | {"value": 0.8},
    }


def make_samples(made, count=20, seed=0):
    """`count` samples a reading, by falling residual of which six tenths are scale and eight tenths shape (squares add up)."""
    residual = np.sort(np.random.default_rng(seed).uniform(0.1, 9.0, (len(made), count)))[:, ::-1].ravel()
    columns = {name: np.repeat([row[name] for row, _ in made], count) for name in ("variant", "benchmark")}
    columns |= {"sample": [f"{row['benchmark']}-{i}" for row, _ in made for i in range(count)], "tokens": 5, "residual": residual}
    columns |= {"scale_residual": residual * 0.6, "shape_residual": residual * 0.8, "ce_target": 2.0, "ce_proxy": 2.0 + residual / 100}
    return pd.DataFrame(columns | {"agreement": 0.9, "kl": residual / 50, "rank": list(range(1, count + 1)) * len(made)})


def make_summary(made, **values):
    data = [{"name": name, "location": f"{name}.jsonl"} for name in dict.fromkeys(row["benchmark"] for row, _ in made)]
    config = {"base": "models/base", "data": data, "max_bound": None, "fail_on": [], "seed": 17}
    summary = {"version": "0.1.0", "command": "prism-ray drift base v", "config": config, "results": [result for _, result in made]}
    return summary | {"ranking": [], "failures": [], "passed": True} | values


def make_ranking(benchmarks, n):
    entry = {name: {"r": 0.5 + i / 20, "low": -0.125, "high": 0.875, "n": n} for i, name in enumerate(benchmarks)}
    row = {"reading": "bound", "what": "shape, scale and head, W = I", "mean": 0.55, "sem": 0.0625, "benchmarks": entry}
    return [row, row | {"reading": "delta", "what": "shape and scale, W = I", "mean": None, "sem": None}]


@functools.cache
def make_run(case="few"):
    """(table, samples, summary).

    one: 1 variant x 1 benchmark with nothing optional; few: 4 x 2 with everything; hostile: `few` with an attacker's names;
    many: 40 x 3; full: 40 x 7.
    """
    if case == "one":
        made = [make_reading("v", "text")]
        return frame(made), make_samples(made), make_summary(made)
    if case in ("many", "full"):
        random = np.random.default_rng(0)
        benchmarks = ["arc_challenge", "mmlu", "squad", "trivia_qa", "gsm8k", "hellaswag_validation", "wikitext-103-raw"][
            : 7 if case == "full" else 3
        ]
        made = []
        for place in range(40):
            suffix = "-with-a-long-suffix-of-a-hub-name" if place % 9 == 0 else ""
            name = f"{('gguf-q', 'gptq-', 'nvfp4-', 'lora-r')[place % 4]}{place}{suffix}"
            for benchmark in benchmarks:
                bound = float(10 ** random.uniform(0, 2.4))
                parts = random.dirichlet((1, 3, 1))
                gap = float(bound * 10 ** random.normal(-3, 0.5))
                values = {
                    "bound": bound,
                    "bound_low": bound * 0.95,
                    "bound_high": bound * 1.06,
                    "delta_ce": gap * random.choice((1, 1, -1)),
                }
                values |= {"delta_ce_se": 0.003, "bounds": {"identity": {"shares": dict(zip(AXES, map(float, parts), strict=True))}}}
                values |= {"dominant": AXES[int(parts.argmax())], "direction": make_direction(), "transfer": make_transfer()}
                values |= {"classes": ["yes", "no"], "direction_verdict": "within noise", "rho_target": 137.58, "rho_proxy": 137.58 + gap}
                made.append(make_reading(name, benchmark, **values))
        return frame(made), make_samples(made), make_summary(made, ranking=make_ranking(benchmarks, 40))
    evil = HOSTILE if case == "hostile" else ""
    turned = make_direction(0.0612, "rotation")
    made = [
        make_reading(
            f"mild{evil}", f"text{evil}", bound=2.0, delta_ce=-0.0125, delta_ce_se=0.01, routing_flips=0.0123, floor_routing_flips=1e-5
        ),
        make_reading(f"mild{evil}", "colours", bound=3.0, delta_ce_se=0.03, dropped=1, truncated=3),
        make_reading("same", f"text{evil}", **IDENTICAL),
        make_reading("same", "colours", **IDENTICAL),
        make_reading(
            "noise", f"text{evil}", bound=1e-6, bound_low=NAN, bound_high=NAN, status="within noise", delta_ce=3.25e-7, delta_ce_se=1e-7
        ),
        make_reading("noise", "colours", bound=2e-6, status="within noise", delta_ce=None, delta_ce_se=None, one_minus_omega=None),
        make_reading("worst", f"text{evil}", bound=9.521, bound_low=9.317, bound_high=9.725, delta_ce=0.4182, delta_ce_se=0.0218),
        make_reading(
            "worst",
            "colours",
            classes=["red", f"green{evil}"],
            direction=turned,
            direction_verdict="rotation",
            transfer=make_transfer(),
        ),
    ]
    made[1][1]["dropped"] = {f"sample-7{evil}": f"base{evil}"}
    samples = make_samples(made)
    samples.loc[samples["variant"] == "same", ["residual", "scale_residual", "shape_residual", "kl"]] = 0.0
    samples.loc[samples["variant"] == "noise", "residual"] = 0.0
    if evil:
        samples["sample"] += evil
    failures = [f"worst on text{evil}: B = 9.521 nats is above max_bound 5"]
    summary = make_summary(made, ranking=make_ranking([f"text{evil}", "colours"], 4), failures=failures, passed=False)
    summary["config"]["max_bound"] = 5.0
    summary["command"] += evil
    return frame(made), samples, summary


IDENTICAL = {
    "bound": 0.0,
    "bound_low": 0.0,
    "bound_high": 0.0,
    "delta_ce": 0.0,
    "delta_ce_se": 0.0,
    "dominant": None,
    "status": "identical",
} | {"bounds": {"identity": {"shares": dict.fromkeys(AXES)}}}


def frame(made):
    return pd.DataFrame([row for row, _ in made])


class Page(HTMLParser):
    """What a browser would see: tags with attributes, the text outside script and style, and the cells of every table row."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.open, self.rows = [], [], [], []
        self.cell = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.cell = True

    def handle_endtag(self, tag):
        if self.open and tag == self.open[-1]:
            self.open.pop()
        if tag in ("td", "th"):
            self.cell = False

    def handle_data(self, data):
        if not self.open:
            self.texts.append(data)
            if self.cell:
                self.rows[-1][-1] += f" {data.strip()}" if data.strip() else ""

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())

    def starting(self, *cells):
        """The rows that begin with these cells, in page order."""
        return [[cell.strip() for cell in row] for row in self.rows if [cell.strip() for cell in row[: len(cells)]] == list(cells)]


@pytest.fixture
def light(monkeypatch):
    """Leave plotly.js out of the pages: 5 MB that the parser would crawl through."""
    monkeypatch.setattr("prism_ray.reports.drift.get_plotlyjs", lambda: "/* plotly.js v0 */")


def report(folder, table, samples, summary):
    text = write_drift_report(folder, table, samples, summary).read_text(encoding="utf-8")
    return text, Page(text)


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """The page of the run `few`, which several tests read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prism_ray.reports.drift.get_plotlyjs", lambda: "/* plotly.js v0 */")
        return report(tmp_path_factory.mktemp("few"), *make_run("few"))[1]


@functools.cache
def ordered(case="few"):
    table, _, summary = make_run(case)
    return readings(table, summary), list(dict.fromkeys(table["benchmark"]))


# --- readings


def test_variants_are_ordered_by_their_worst_reading_and_keep_together():
    found, _ = ordered()
    assert [(r.variant, r.benchmark) for r in found] == [
        ("worst", "text"),
        ("worst", "colours"),
        ("mild", "colours"),
        ("mild", "text"),
        ("noise", "colours"),
        ("noise", "text"),
        ("same", "text"),
        ("same", "colours"),
    ]
    assert found[0].fails == ("worst on text: B = 9.521 nats is above max_bound 5",)
    assert found[1].fails == ()


def test_a_gap_is_above_noise_from_two_of_its_own_errors():
    table = frame(
        [
            make_reading(f"v{i}", "b", delta_ce=gap, delta_ce_se=se)
            for i, (gap, se) in enumerate([(0.02, 0.01), (-0.0199, 0.01), (0.1, NAN), (0, 0)])
        ]
    )
    assert {r.variant: r.above_noise for r in readings(table, {})} == {"v0": True, "v1": False, "v2": False, "v3": False}


def test_a_missing_column_is_named_and_nothing_is_written(tmp_path):
    table, samples, summary = make_run("one")
    with pytest.raises(DataError, match="drift table: column 'bound' is missing"):
        write_drift_report(tmp_path, table.drop(columns="bound"), samples, summary)
    with pytest.raises(DataError, match="drift samples: column 'residual' is missing"):
        write_drift_report(tmp_path, table, samples.drop(columns="residual"), summary)
    assert list(tmp_path.iterdir()) == []


# --- figures


def test_the_scatter_has_the_line_the_safe_zone_and_hollow_markers_below_noise():
    found, benchmarks = ordered()
    figure = bound_scatter(found, benchmarks, {"text": "Spearman 0.50"})
    lines = [t for t in figure.data if t.name == "y = x" and t.x[0] is not None]
    zones = [t for t in figure.data if t.name == "safe zone"]
    assert len(lines) == len(zones) == 2  # one a panel
    for line, zone in zip(lines, zones, strict=True):
        assert list(line.x) == list(line.y) and line.line.dash == "dash"
        # The corner off the line lies below it.
        assert [(x, y) for x, y in zip(zone.x, zone.y, strict=True) if x != y] == [(line.x[1], line.x[0])]
        assert zone.fill == "toself"
    points = {(t.legendgroup, t.x[0]): t for t in figure.data if t.customdata is not None}
    symbols = {key: point.marker.symbol.endswith("-open") for key, point in points.items()}
    # 0.0125 ± 0.01 and 0.05 ± 0.03 are below two errors; signs do not matter on |dR|.
    assert symbols == {("worst", 9.521): False, ("worst", 4.0): False, ("mild", 2.0): True, ("mild", 3.0): True, ("noise", 1e-6): False}
    assert points["mild", 2.0].y == (0.0125,)
    assert points["worst", 9.521].error_y.array == (0.0218,)
    assert points["worst", 9.521].error_x.array[0] == pytest.approx(0.204) and points["worst", 9.521].error_x.arrayminus[
        0
    ] == pytest.approx(0.204)
    for axis in ("xaxis", "xaxis2", "yaxis", "yaxis2"):
        assert figure.layout[axis].type == "log"
    low, high = figure.layout.xaxis.range
    assert low < math.log10(1e-6) and high > math.log10(9.521)
    assert figure.layout.yaxis.range[1] > low  # the line enters the panels
    assert [a.text for a in figure.layout.annotations] == ["text<br>Spearman 0.50", "colours"]


def test_points_without_a_logarithm_are_counted_and_not_drawn():
    found, benchmarks = ordered()
    # same twice (B = 0), noise on colours (no gap).
    assert left_out(found) == 3
    figure = bound_scatter(found, benchmarks, {})
    assert sum(t.customdata is not None for t in figure.data) == 5
    none = bound_scatter([r for r in found if r.variant == "same"], benchmarks, {})
    assert len(none.data) == 0 and none.layout.annotations[0].text == "no reading has both B and |ΔR| above 0"


def test_a_point_above_the_line_is_called_out(tmp_path, light):
    made = [make_reading("broken", "b", bound=0.01, delta_ce=-0.5, bound_low=0.009, bound_high=0.011), make_reading("fine", "b")]
    assert [r.variant for r in above_bound(readings(frame(made), make_summary(made)))] == ["broken"]
    text = report(tmp_path, frame(made), make_samples(made), make_summary(made))[1].text
    assert "Above the line, which the bound forbids: broken on b: |ΔR| 0.5000 ± 0.0100, B 0.01000 (0.009000 to 0.01100)" in text
    assert "No point lies above" not in text


def test_the_bars_are_shares_of_b_and_the_buttons_change_the_unit():
    found, benchmarks = ordered()
    figure = axis_bars(found, benchmarks)
    bars = [t for t in figure.data if t.type == "bar"]
    assert [b.name for b in bars] == [*AXES, *AXES]
    assert {b.name: b.marker.color for b in bars} == AXIS_COLORS
    assert figure.layout.barmode == "stack"
    # text: worst 9.521, mild 2, noise 1e-6; same has no shares.
    shape = bars[1]
    assert shape.x == pytest.approx([0.7 * 9.521, 0.7 * 2.0, 0.7e-6])
    assert [figure.layout.yaxis.ticktext[place] for place in shape.y] == ["worst", "mild", "noise"]
    whiskers, labels = figure.data[3:5]
    assert whiskers.x == (9.521, 2.0, 1e-6, 0.0)
    assert whiskers.error_x.array == pytest.approx([0.204, 2.3, 0.0, 0.0])
    # Behind the interval, or it would lie on it.
    assert labels.x == pytest.approx((9.725, 4.3, 1e-6, 0.0))
    assert [text.strip() for text in labels.text] == ["9.521", "2", "1.000e-06", "0, identical"]
    nats, shares = figure.layout.updatemenus[0].buttons
    drawn, layout, traces = shares.args
    assert len(drawn["x"]) == len(traces) == 10
    assert [drawn["x"][i][0] for i in range(3)] == pytest.approx([5, 70, 25])
    assert drawn["x"][3] == drawn["x"][4] == [None] * 4  # no interval of a share
    assert layout["xaxis.range"] == layout["xaxis2.range"] == [0, 100]
    assert [list(x) for x in nats.args[0]["x"]] == [list(figure.data[i].x) for i in traces]


def test_figures_of_one_reading_and_of_none():
    found, benchmarks = ordered("one")
    assert sum(t.type == "bar" for t in axis_bars(found, benchmarks).data) == 3
    assert sum(t.customdata is not None for t in bound_scatter(found, benchmarks, {}).data) == 1
    bare = readings(frame([make_reading("v", "b")]), {})
    assert axis_bars(bare, ["b"]).layout.annotations[0].text == "no variant has a bound above 0 with its parts"


def test_forty_variants_look_different_and_fit():
    found, benchmarks = ordered("many")
    looks = marks([r.variant for r in found])
    assert len(looks) == len(set(looks.values())) == 40
    figure = bound_scatter(found, benchmarks, {})
    assert sum(t.customdata is not None for t in figure.data) == 120
    bars = axis_bars(found, benchmarks)
    assert bars.layout.height < 1200
    assert max(len(name) for name in bars.layout.yaxis.ticktext) <= 30


def test_seven_benchmarks_make_two_rows_and_no_empty_panel():
    made = [make_reading("v", f"b{place}") for place in range(7)]
    names = [f"b{place}" for place in range(7)]
    layout = bound_scatter(readings(frame(made), {}), names, {}).layout
    panels = [name for name in layout.to_plotly_json() if name.startswith("xaxis")]
    assert len(panels) == 7
    assert len({layout[name].domain for name in panels}) == 4


def test_clipped_names_keep_both_ends():
    assert clip("short") == "short"
    assert clip("abcdefghij", 7) == "abc…hij"


# --- the page


@pytest.mark.parametrize("case", ["few", "one"])
def test_the_page_is_one_file_that_loads_nothing(tmp_path, case):
    table, samples, summary = make_run(case)
    text, page = report(tmp_path, table, samples, summary)
    for tag, attributes in page.tags:
        assert not any(attributes.get(name) for name in ("src", "href", "srcset", "action", "data")), (tag, attributes)
        assert tag not in ("link", "iframe", "img", "base", "object", "embed")
    policy = next(a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'") and "http" not in policy
    assert text.count("plotly.js v") == 1  # its license banner: inlined once
    assert [path.name for path in tmp_path.iterdir()] == ["drift.html"]


def test_a_failed_write_leaves_the_old_page_and_no_temporary(tmp_path, light, monkeypatch):
    report(tmp_path, *make_run("one"))
    before = (tmp_path / "drift.html").read_bytes()

    def refuse(*_):
        raise OSError("disk full")

    monkeypatch.setattr("prism_ray.core.files.os.replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        write_drift_report(tmp_path, *make_run("few"))
    assert [path.name for path in tmp_path.iterdir()] == ["drift.html"]
    assert (tmp_path / "drift.html").read_bytes() == before


def test_the_sections_come_in_order(few):
    heads = (
        "Failed:",
        "What to do",
        "All readings (8)",
        "Other alignments",
        "Which axis drifted",
        "The bound against the measured gap",
        "Axes beside their floors",
        "Class directions",
        "Does a probe",
        "Agreement with the base",
        "Does the reading rank",
        "Inputs on which",
        "Expert routing",
        "Dropped and truncated",
        "Provenance",
    )
    places = [few.text.index(head) for head in heads]
    assert places == sorted(places)


def test_the_headline_fails_passes_or_says_that_nothing_was_asked():
    table, _, summary = make_run("few")
    found = readings(table, summary)
    shown = headline(found, summary)
    assert (shown.level, shown.title) == ("bad", "Failed: 1 threshold crossed by 4 variants on 2 benchmarks")
    assert shown.failures == summary["failures"]
    text = " ".join(shown.sentences)
    assert "Thresholds: B at most 5 nats a token." in text
    assert "Of 8 readings: 4 drifted, 2 within noise, 2 identical." in text
    assert (
        "Worst: worst on text, B = 9.521 (9.317 to 9.725) nats, 70 % shape; measured ΔR +0.4182 ± 0.0218 nats a token (n = 60 samples"
        in text
    )
    # worst twice and noise on text; mild is below two errors on both.
    assert "above twice its standard error in 3 of 8 readings, a loss in 3; the largest: worst on text" in text
    assert "rotation in 1 of 1 test." in text
    passed = headline(found, summary | {"failures": [], "passed": True})
    assert (passed.level, passed.title) == ("ok", "Passed: 4 variants on 2 benchmarks, no threshold crossed")
    undefined = [make_reading(f"v{i}", "b", direction_verdict=word) for i, word in enumerate(["rotation", "undefined", "within noise"])]
    shown = headline(readings(frame(undefined), {}), {})
    assert shown.sentences[-1] == "Class direction: rotation in 1 of 3 tests, no direction in 1."
    table, _, summary = make_run("one")
    assert headline(readings(table, summary), summary).level == "warn"
    same = [make_reading("v", "b", **IDENTICAL)]
    assert "identical to the base on every axis" in " ".join(headline(readings(frame(same), {}), {}).sentences)


def test_the_table_shows_the_numbers_of_the_table(few):
    main, other, floors = few.starting("worst", "text")[:3]
    assert main[2:] == [
        "60 270",
        "8.000",
        "8.250",
        "0.0600",
        "0.0800",
        "3",
        "1",
        "9.521 9.317 to 9.725",
        "0.4182 ± 0.0218 +0.4182",
        "shape 70 %",
        "drifted fails",
    ]
    assert other[2:] == ["0.0120", "2.01", "5.98", "7.99", "1.2", "0.300", "1.5", "3.9", "+0.0400", "60"]
    assert floors[2:] == [
        "0.250 5.0 %",
        "1.0e-08 ± 5.0e-09 largest 2.0e-08",
        "yes",
        "0.0600 70.0 %",
        "0.00015 ± 7.5e-05 largest 0.00030",
        "yes",
        "1.00e-09 25.0 %",
        "2.0e-09 ± 1.0e-09 largest 4.0e-09",
        "no",
        "5",
    ]
    mild = few.starting("mild", "text")[0]
    assert mild[10] == "0.0125 ± 0.0100 −0.0125, below 2 SE"
    noise = few.starting("noise", "colours")[0]
    assert noise[5] == "–" and noise[10] == "–"
    small = few.starting("noise", "text")[0]
    assert small[10] == "3.3e-07 ± 1.0e-07 +3.3e-07" and small[9] == "1.00e-06".replace("1.00", "1.000")
    same = few.starting("same", "text")[0]
    assert same[9:] == ["0 0 to 0", "0 ± 0", "–", "identical"]
    assert "3 of 8 readings have B or |ΔR| of 0 or missing" in few.text
    assert "No point lies above the line (n = 5)" in few.text
    assert "K_feat = 1.6" in few.text and "(1,000 resamples)" in few.text


def test_directions_and_transfer_show_their_noise(few):
    (direction,) = [row for row in few.starting("worst", "colours") if "'red' / 'green'" in row]
    # 0.2423 - 2 x 0.0595
    assert direction[3:] == [
        "30 / 28",
        "200",
        "0.0612",
        "0.2423 ± 0.0595 below 0.1233",
        "0.2061 ± 0.0595",
        "0.1676 κ 0.805",
        "rotation",
    ]
    (transfer,) = [row for row in few.starting("worst", "colours") if "0.972 ± 0.033" in row]
    interval = "0.567 to 0.879"
    assert transfer[2:] == [
        "30 29",
        "0.972 ± 0.033",
        "+0.428 ± 0.084",
        "0.913",
        f"0.750 {interval}",
        f"0.812 {interval}",
        "+0.062 ± 0.031",
        f"0.700 {interval}",
        f"0.600 {interval}",
        f"0.800 {interval}",
    ]
    assert "translation : recalibrate the threshold" in few.text
    assert "No class direction without two answers that repeat often enough: text." in few.text
    assert "Too few samples of a class were left: colours (3 of 4 variants)." in few.text


def test_agreement_ranking_routing_and_dropped(few):
    agreement = next(row for row in few.starting("mild", "colours") if "0.9600 KL 0.0370" in row)
    assert agreement[3:] == ["agreement", *["0.250, 0.625 6, 54", "+0.375 ± 0.062"] * 2]
    assert few.starting("", "", "", "confidence")[0][4:6] == ["0.562, 0.625 6, 54", "+0.062 ± 0.062"]
    interval = "−0.12 to 0.88, n = 4"
    assert few.starting("shape, scale and head, W = I") == [
        ["shape, scale and head, W = I", f"0.50 {interval}", f"0.55 {interval}", "0.55 ± 0.06"]
    ]
    assert few.starting("shape and scale, W = I")[0][-1] == "–"
    assert ["mild", "text", "1.23 %", "0.00100 %", "270"] in few.starting("mild", "text")
    assert ["mild", "colours", "1", "sample-7 (base)"] in few.starting("mild", "colours")
    assert "colours: 3 prompts and answers of 61 samples were cut to max_tokens" in few.text
    assert "config.data.text.location text.jsonl" in few.text and "config.seed 17" in few.text
    assert "prism-ray drift base v" in few.text and "0.1.0" in few.text


def test_the_inputs_are_the_largest_residuals_of_each_variant(few):
    _, samples, _ = make_run("few")
    own = samples[samples["variant"] == "worst"].sort_values("residual", ascending=False).head(MOST)
    shown = [[cell.strip() for cell in row] for row in few.rows if len(row) == 12 and "of 20" in row[2]]
    mine = shown[:MOST]
    assert [row[0] for row in mine] == list(own["sample"])
    first = own.iloc[0]
    assert mine[0] == [
        first["sample"],
        first["benchmark"],
        "1 of 20",
        "5",
        f"{first['residual']:.3g}",
        f"{0.6 * first['residual']:.3g}",
        f"{0.8 * first['residual']:.3g}",
        "2.000",
        f"{2 + first['residual'] / 100:.3f}",
        f"+{first['residual'] / 100:.4f}",
        "0.9000",
        f"{first['residual'] / 50:#.3g}",
    ]
    assert len(shown) == 2 * MOST  # worst and mild
    assert "noise 15 of 40 samples, by KL: the features are the base's on every one" in few.text
    assert "same features and outputs are the base's on all of 40 samples" in few.text


def test_hostile_text_stays_text(tmp_path, light, few):
    text, page = report(tmp_path, *make_run("hostile"))
    assert page.text.count(HOSTILE) > 20
    assert "<script>alert" not in text and "&lt;script&gt;alert" in text
    for tag in ("script", "table", "td"):
        assert sum(t == tag for t, _ in page.tags) == sum(t == tag for t, _ in few.tags)
    assert len(page.rows) == len(few.rows)
    # Plotly reads HTML in its texts: names reach it escaped, and its JSON holds no bare bracket.
    found, benchmarks = ordered("hostile")
    for figure in (bound_scatter(found, benchmarks, {}), axis_bars(found, benchmarks)):
        assert "<script" not in json.dumps(figure.to_plotly_json(), default=list)


def test_missing_is_an_en_dash_and_a_bare_summary_gives_a_page(tmp_path, light):
    row = {"variant": "v", "benchmark": "b", "samples": 3, "tokens": 9, "bound": NAN, "delta_ce": None}
    _, page = report(tmp_path, pd.DataFrame([row]), pd.DataFrame(), {})
    (main, _, floors) = page.starting("v", "b")[:3]
    assert main == ["v", "b", "3 9", *["–"] * 9, "not judged"]
    assert floors[2:] == ["–"] * 10
    assert not re.search(r"\b(nan|inf|None|NaN(?! or infinity))\b", page.text)
    assert "b: no verdict was given." in page.text and "No sample was given." in page.text
    assert "Fewer than four variants" in page.text and "No sample was dropped." in page.text
    _, page = report(tmp_path, *make_run("one"))
    assert "Measured, not judged" in page.text and "Fewer than four variants" in page.text
    assert "Does a probe" not in page.text and "Expert routing" not in page.text


def test_without_a_floor_the_status_says_so(tmp_path, light):
    blank = {axis: {"value": 0.1, "floor_mean": None, "floor_sd": None, "floor_largest": None, "layouts": 0} for axis in AXES}
    made = [make_reading("v", "b", axes=blank)]
    _, page = report(tmp_path, frame(made), make_samples(made), make_summary(made))
    main, _, floors = page.starting("v", "b")[:3]
    assert main[-1] == "drifted, no floor"
    assert floors[3:5] == ["–", "–"] and floors[-1] == "0"


def test_forty_variants_are_folded_and_all_there(tmp_path, light):
    table, samples, summary = make_run("many")
    text, page = report(tmp_path, table, samples, summary)
    assert "All readings (120)" in page.text
    assert len(text) < 6_000_000
    folded = re.findall(r"<details><summary>([^<]*) \((\d+)\)</summary>", text)
    assert ("Axes beside their floors", "120") in folded and ("Class directions", "120") in folded
    opened = [attributes for tag, attributes in page.tags if tag == "details" and "open" in attributes]
    assert len(opened) == 2  # the worst variant's verdicts and its inputs
    for variant in table["variant"].unique():
        assert len(page.starting(variant)) >= 3 * 4


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    print(write_drift_report(folder, *make_run(sys.argv[2] if len(sys.argv) > 2 else "few")))
