"""What to ship, in plain words: the first thing on the sweep report.

Sentences only, no markup. Each says its n, and says when a difference is within the noise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import pandas as pd

from prism_ray.reports.gating import GatingReading
from prism_ray.reports.sweep import Interval, accuracy_interval, good_trials
from prism_ray.reports.text import accuracy_sentence, count, fixed, number, strength, with_error


class Headline(NamedTuple):
    """level: ok (ship it), warn (a best trial, with a reservation), bad (nothing to ship)."""

    level: Literal["ok", "warn", "bad"]
    title: str
    sentences: list[str]


def headline(trials: pd.DataFrame, best: pd.Series | None, readings: Sequence[GatingReading], summary: Mapping[str, Any]) -> Headline:
    good = good_trials(trials)
    required = number(summary, "required_good")
    states = _states(trials)
    enough = required is None or len(good) >= required
    tally = f"{len(good)} of {len(trials)} trials good{f' ({states})' if states else ''}"
    tally += f"; required: {required:.0f}." if required is not None else "."
    if best is None:
        why = "No trial finished good" if good.empty else "No good trial has a finite validation accuracy"
        return Headline("bad", "Nothing to ship", [f"{why}: {tally}", *_reasons(trials)])

    level: Literal["ok", "warn", "bad"] = "ok" if enough else "bad"
    chosen = f"lambda = {strength(number(best, 'lambda_'))}"
    if (number(best, "lambda_") or 0) > 0 and best["penalty"]:
        chosen += f" ({best['penalty']})"
    title = f"{chosen}, rank {count(number(best, 'rank'))}, {best['format']}"
    tuned, n, base = number(best, "test_accuracy"), number(best, "test_n"), number(best, "base_test_accuracy")
    sentences = [f"Trial {best['trial_id']} {_why(best, summary)}"]
    gain, clear = _gain(tuned, base, n)
    sentences.append(gain)
    sentences.append(_loss(best))
    if not clear:
        level = "warn" if enough else "bad"
    sentences.append(_rivals(good, best))
    for reading in readings:
        if reading.format == best["format"]:
            sentences.append(f"Regularizer, from the lambda = 0 trials of {reading.format}: {reading.verdict}.")
            sentences.append(_measured(reading))
    if enough:
        sentences.append(tally)
        lead = "Ship" if clear else "Best, but not clearly better than the base:"
    else:
        sentences.insert(0, f"The sweep FAILED: {tally}")
        lead = "Too few good trials; best so far:"
    return Headline(level, f"{lead} {title}", [sentence for sentence in sentences if sentence])


def _why(best: pd.Series, summary: Mapping[str, Any]) -> str:
    """What made this trial the best: summary['selection'] is 'loss' or 'accuracy' (default)."""
    accuracy = accuracy_sentence(*_validation(best))
    if summary.get("selection") == "loss":
        return f"has the lowest validation log-loss, {fixed(number(best, 'validation_loss'))} nats; its validation accuracy: {accuracy}."
    return f"has the best validation accuracy: {accuracy}."


def _validation(trial: pd.Series) -> tuple[float | None, float | None]:
    return number(trial, "validation_accuracy"), number(trial, "validation_n")


def _interval(accuracy: float | None, n: float | None) -> Interval | None:
    return None if accuracy is None or n is None else accuracy_interval(accuracy, n)


def _gain(tuned: float | None, base: float | None, n: float | None) -> tuple[str, bool]:
    """The sentence about tuned against base, and whether tuned is above it with intervals apart."""
    after, before = _interval(tuned, n), _interval(base, n)
    text = f"On the test set it reaches {accuracy_sentence(tuned, n)}; the base has {accuracy_sentence(base, n)}."
    if after is None or before is None:
        return f"{text} Without both and their n, the gain cannot be judged.", False
    if after.overlaps(before):
        return f"{text} The intervals overlap: no gain over the base is established.", False
    if after.low < before.low:
        return f"{text} The base is better: do not ship this.", False
    return f"{text} The intervals do not overlap.", True


def _loss(best: pd.Series) -> str:
    change, se = number(best, "delta_ce"), number(best, "delta_ce_se")
    if change is None:
        return "What the base lost on the held-out benchmark was not measured."
    size = f"{count(number(best, 'benchmark_tokens'))} answer tokens in {count(number(best, 'benchmark_examples'))} examples"
    amount = f"{with_error(change, se, plus=True)} nats per answer token (± 1 SE, n = {size})"
    if se is not None and abs(change) <= 2 * se:
        return f"On the held-out benchmark the base's cross-entropy changed by {amount}: within the noise of 2 SE."
    verb = "The base lost" if change > 0 else "The base lost nothing"
    return f"{verb} on the held-out benchmark: {amount}."


def _rivals(good: pd.DataFrame, best: pd.Series) -> str:
    """Who is as good within the validation noise, and which of them damages the base least."""
    own = _interval(*_validation(best))
    if own is None:
        return ""
    others = good[(good["format"] == best["format"]) & (good["trial_id"] != best["trial_id"])]
    near = [row for _, row in others.iterrows() if (i := _interval(*_validation(row))) is not None and i.overlaps(own)]
    if others.empty:
        return ""
    if not near:
        return f"None of the {len(others)} other good {best['format']} trials has a validation interval that overlaps its own."
    some = f"{len(near)} of the {len(others)}"
    text = f"{some} other good {best['format']} trials cannot be told apart from it by validation (intervals overlap)"
    mine = number(best, "delta_ce")
    gentler = [(loss, row) for row in near if (loss := number(row, "delta_ce")) is not None and mine is not None and loss < mine]
    if not gentler:
        return f"{text}; none of them loses less of the base."
    loss, row = min(gentler, key=lambda pair: pair[0])
    return (
        f"{text}; of these, {row['trial_id']} (lambda = {strength(number(row, 'lambda_'))}, rank {count(number(row, 'rank'))}, "
        f"learning rate {strength(number(row, 'learning_rate'))}) "
        f"loses the least of the base: {with_error(loss, number(row, 'delta_ce_se'), plus=True)} against {fixed(mine, plus=True)} nats."
    )


def _measured(reading: GatingReading) -> str:
    """The largest measured effect of a lambda > 0 that is above its noise."""
    clear = [e for e in reading.effects if e.above_noise]
    if not reading.effects:
        return ""
    if not clear:
        return "Measured in this sweep: no lambda > 0 changed the mean |ΔR| by more than 2 SE."
    effect = min(clear, key=lambda e: e.change)
    verb = "lowered" if effect.change < 0 else "raised"
    compared = f"{effect.pairs} matched pairs" if effect.pairs > 1 else f"{effect.trials} trial{'s' if effect.trials > 1 else ''}"
    return (
        f"Measured in this sweep: lambda = {strength(effect.lambda_)} ({effect.penalty}) {verb} the mean |ΔR| by "
        f"{with_error(abs(effect.change), effect.change_se)} nats (n = {compared})."
    )


def _states(trials: pd.DataFrame) -> str:
    bad = Counter(state.replace("_", " ") for state in trials["state"] if state != "good")
    return ", ".join(f"{k} {state}" for state, k in bad.most_common())


def _reasons(trials: pd.DataFrame) -> list[str]:
    """The commonest reasons first, at most five lines."""
    bad = trials[trials["state"] != "good"]
    found = Counter(f"{state.replace('_', ' ')}: {reason}" for state, reason in zip(bad["state"], bad["reason"], strict=True) if reason)
    return [f"{reason} ({k} trial{'s' if k > 1 else ''})" for reason, k in found.most_common(5)]
