"""prism_ray.training.demo: the generated task is varied, split cleanly, and not solved by counting words."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from pathlib import Path

import pytest

from prism_ray.core.errors import DataError
from prism_ray.training import demo_text
from prism_ray.training.demo import INTENTS, demo_benchmark, demo_reference, demo_rows, demo_task, tickets, write_demo
from prism_ray.training.task import Example, load_benchmark, load_reference, load_splits

KEYWORDS = {
    "disk full": "disk space full volume storage partition drive capacity",
    "certificate expired": "certificate cert tls expired https ssl x509",
    "slow query": "query queries slow sql index select rows",
    "out of memory": "memory ram oom heap leak killed swap",
    "network timeout": "network timeout timeouts connection ping packets socket",
    "access denied": "access permission permissions role denied rights 403 log",
    "failed deployment": "deployment deployed rollout release pipeline build",
    "backup failed": "backup backups snapshot dump restore archive",
}


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower())


def accuracy(examples: list[Example], guess: dict[str, int]) -> float:
    return sum(guess[item.prompt] == item.label for item in examples) / len(examples)


def test_task_loads_balanced_and_repeatable() -> None:
    splits = load_splits(demo_task())
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (640, 96, 240)
    assert Counter(item.label for item in splits.test) == dict.fromkeys(range(8), 30)
    assert splits.counts.test_in_train == 0 and splits.counts.validation_in_train == 0
    assert load_splits(demo_task()) == splits
    assert load_splits(demo_task(seed=1)).train != splits.train
    assert {item.answer for item in splits.train} == set(INTENTS)


def test_thousands_of_distinct_texts_with_stable_beginning() -> None:
    many = tickets("train", 6000)
    assert len({row["text"] for row in many}) == 6000
    assert tickets("train", 100) == many[:100]
    assert max(len(words(row["text"])) for row in many) < 70


def test_splits_share_no_template_and_every_slot_exists() -> None:
    fields: set[str | None] = set()
    seen: list[str] = []
    for splits in demo_text.CORES.values():
        for templates in splits.values():
            seen += templates
    assert len(seen) == len(set(seen)) == 8 * 18
    parts = [
        *seen,
        *demo_text.OPENERS,
        *demo_text.CLOSERS,
        *demo_text.CONTEXT,
        *(t for group in demo_text.DISTRACTORS.values() for t in group),
    ]
    for template in parts:
        fields |= {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    assert fields == set(demo_text.SLOTS)
    assert set(demo_text.CORES) == set(demo_text.DISTRACTORS) == set(KEYWORDS)
    texts = {split: {" ".join(words(row["text"])) for row in tickets(split, 2000)} for split in ("train", "validation", "test")}
    assert not texts["train"] & texts["test"] and not texts["train"] & texts["validation"] and not texts["validation"] & texts["test"]


def test_counting_keywords_is_not_enough() -> None:
    splits = load_splits(demo_task())
    guess: dict[str, int] = {}
    for item in splits.test:
        scores = [sum(word in KEYWORDS[intent].split() for word in words(item.prompt)) for intent in INTENTS]
        guess[item.prompt] = max(range(8), key=scores.__getitem__)
    assert accuracy(splits.test, guess) < 0.6
    # Nor is a bag of words learned from train (naive Bayes), though it is far above the 1/8 of chance: the task can be learned.
    counts = [Counter[str]() for _ in INTENTS]
    for item in splits.train:
        counts[item.label or 0].update(words(item.prompt))
    size = len(set().union(*counts))
    for item in splits.test:
        logs = [sum(math.log((c[word] + 1) / (c.total() + size)) for word in words(item.prompt)) for c in counts]
        guess[item.prompt] = max(range(8), key=logs.__getitem__)
    assert 0.4 < accuracy(splits.test, guess) < 0.85


def test_write_demo(tmp_path: Path) -> None:
    config = write_demo(tmp_path / "demo", 3, train=40, validation=16, test=24)
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == ["test.jsonl", "train.jsonl", "validation.jsonl"]
    from_files, direct = load_splits(config), load_splits(demo_task(seed=3, train=40, validation=16, test=24))
    assert from_files == direct


def test_reference_and_benchmark() -> None:
    reference = load_reference(demo_reference())
    assert len(reference) == 32 and len({item.answer for item in reference}) == 32
    assert all(item.prompt == "" and 40 <= len(item.answer.split()) <= 80 for item in reference)
    quiz = load_benchmark(demo_benchmark())
    assert len(quiz) >= 150 and len({item.prompt for item in quiz}) == len(quiz)
    assert all(item.prompt.endswith("?\nAnswer:") and 1 <= len(item.answer.split()) <= 3 for item in quiz)
    assert len(load_benchmark(demo_benchmark(max_examples=50))) == 50


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("demo:ticket", "no demo set 'ticket'; did you mean 'tickets'?"),
        ("demo:tickets?split=dev", "no split 'dev'"),
        ("demo:tickets?row=5", "no parameter 'row'; did you mean 'rows'?"),
        ("demo:tickets?rows=many", "rows is 'many', not a whole number"),
        ("demo:tickets?rows=0", "rows is 0, allowed are 1 to"),
        ("demo:tickets?rows", "not of the form key=value"),
        ("demo:reference?rows=3", "has no parameter 'rows'"),
    ],
)
def test_bad_location(location: str, expected: str) -> None:
    with pytest.raises(DataError, match=re.escape(expected)) as caught:
        demo_rows(location)
    assert "\n" not in str(caught.value)
