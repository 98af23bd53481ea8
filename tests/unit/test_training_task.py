"""prism_ray.training.task: reading, checking, splitting; every bad input is one line that names the place."""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_ray.core.errors import ConfigError, DataError
from prism_ray.training.task import (
    BenchmarkConfig,
    Example,
    ReferenceConfig,
    TaskConfig,
    _cap,
    _hold_out,
    _normal,
    load_benchmark,
    load_reference,
    load_splits,
    template_fields,
)

REAL_DATA = Path(os.environ.get("PRISM_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")


def real(name: str) -> str:
    path = REAL_DATA / name
    if not path.exists():
        pytest.skip(f"real data {path} is not here (set PRISM_DATA)")
    return str(path)


def write(path: Path, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def jsonl(path: Path, rows: list[Any]) -> str:
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def task(train: str | None, **options: Any) -> TaskConfig:
    options = {"name": "t", "prompt": "Q: {q}\nA:", "answer": "a", "validation_fraction": 0, **options}
    return TaskConfig(train=train, **options)


def message(config: TaskConfig) -> str:
    with pytest.raises(DataError) as caught:
        load_splits(config)
    text = str(caught.value)
    assert "\n" not in text
    return text


ROWS = [{"q": f"question {number}", "a": "yes" if number % 2 else "no"} for number in range(1, 21)]


# --- formats --------------------------------------------------------------------------------------------------------------------


def test_all_formats_give_the_same_examples(tmp_path: Path) -> None:
    lines = "q,a\n" + "".join(f"{row['q']},{row['a']}\n" for row in ROWS)
    locations = [
        jsonl(tmp_path / "t.jsonl", ROWS),
        write(tmp_path / "array.json", json.dumps(ROWS, indent=1)),
        write(tmp_path / "t.csv", lines),
        write(tmp_path / "bom.csv", "\n \n\ufeff" + lines.replace("\n", "\r\n")),
        write(tmp_path / "t.csv.gz", gzip.compress(lines.encode())),
        (tmp_path / "t.csv").as_uri(),
    ]
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "t.parquet")
    locations.append(str(tmp_path / "t.parquet"))
    results = [load_splits(task(location, labels=("no", "yes"))).train for location in locations]
    assert results[0][0] == Example("train-1", "Q: question 1\nA:", "yes", 1)
    assert len(results[0]) == 20
    assert all(result == results[0] for result in results)


def test_fsspec_url_and_explicit_format(tmp_path: Path) -> None:
    import fsspec

    with fsspec.open("memory://bucket/rows", "wt") as file:
        file.write('{"q": "x", "a": 3}\n')
    assert load_splits(task("memory://bucket/rows", format="jsonl")).train == [Example("train-1", "Q: x\nA:", "3", None)]


def test_datasets_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    jsonl(folder / "train.jsonl", ROWS)
    jsonl(folder / "test.jsonl", ROWS[:3])
    splits = load_splits(task(f"datasets:{folder}", test=f"datasets:{folder}:test"))
    assert (len(splits.train), len(splits.test), splits.counts.test_in_train) == (20, 3, 3)
    assert splits.train[1] == Example("train-2", "Q: question 2\nA:", "no", None)
    assert "datasets cannot load it" in message(task(f"datasets:{folder}:nosplit"))
    assert f"datasets:{folder}: no column 'z'; columns here: q, a" in message(task(f"datasets:{folder}", answer="z"))
    assert "not of the form datasets:<id>" in message(task("datasets:a/b/c/d"))


def test_datasets_ids_and_class_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    calls: list[tuple[Any, ...]] = []
    features = datasets.Features({"q": datasets.Value("string"), "a": datasets.ClassLabel(names=["cold", "hot"])})
    data = datasets.Dataset.from_dict({"q": ["ice", "fire"], "a": [0, 1]}, features=features)

    def load(identifier: str, config: str | None, split: str) -> Any:
        calls.append((identifier, config, split))
        return data

    monkeypatch.setattr(datasets, "load_dataset", load)
    for location in ("datasets:plain", "datasets:org/name:validation", "datasets:org/name/config:train[:10]"):
        splits = load_splits(task(location, labels=("hot", "cold")))
    assert [(example.answer, example.label) for example in splits.train] == [("cold", 1), ("hot", 0)]
    assert calls[:2] == [("plain", None, "train"), ("org/name", None, "validation")]
    assert calls[2] == ("org/name", "config", "train[:10]")


def test_csv_without_header_and_quoted_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", '"1","two\nlines","x, y"\n\n"2","b","c"\n')
    config = task(path, columns=("class", "title", "text"), prompt="{title}|{text}", answer="class", labels=("1", "2"))
    assert [(item.prompt, item.label) for item in load_splits(config).train] == [("two\nlines|x, y", 0), ("b|c", 1)]
    bad = write(tmp_path / "bad.csv", '"1","two\nlines","x, y"\n\n"2","b"\n')
    assert "bad.csv, row 2 (line 4): 2 cells where 3 columns" in message(config.with_overrides({"train": bad}))
    header = write(tmp_path / "header.csv", "class,title,text\n1,b,c\n")
    assert "the first line is the header itself" in message(config.with_overrides({"train": header}))


def test_values_of_other_types_and_braces(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", [{"a b": "{x} {{", "n": 1.5, "a": True}])
    config = task(path, prompt="{{{a b}}} {n}")
    assert load_splits(config).train == [Example("train-1", "{{x} {{} 1.5", "true", None)]
    assert "holds a list" in message(task(jsonl(tmp_path / "l.jsonl", [{"q": [1], "a": "x"}])))
    assert "column 'q' is null" in message(task(jsonl(tmp_path / "n.jsonl", [{"q": None, "a": "x"}])))


def test_json_strings_may_hold_unicode_line_separators(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", '{"q": "a\u2028b\x85c", "a": "x"}\n\n{"q": "d", "a": "y"}\n')
    assert [example.id for example in load_splits(task(path)).train] == ["train-1", "train-2"]


# --- bad input ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("t.csv", "q,a\nx,yes\ny\n", "t.csv, row 2 (line 3): 1 cells where 2 columns (q, a) are expected"),
        ("t.csv", "q,a\nx,yes,z\n", "t.csv, row 1 (line 2): 3 cells"),
        ("t.csv", "q,label\nx,yes\n", "t.csv: no column 'a'; columns here: q, label"),
        ("t.csv", "question,a\nx,yes\n", "t.csv: no column 'q'; columns here: question, a"),
        ("t.csv", "q,a\n", "t.csv: has a header but no rows"),
        ("t.csv", "", "t.csv: file is empty (0 bytes)"),
        ("t.csv", "\n\n\ufeff \n", "t.csv: file is empty (only blank lines)"),
        ("t.csv", "q,a,q\nx,y,z\n", "header names column 'q' twice"),
        ("t.csv", 'q,a\nx,"yes\n', "t.csv, line 2: broken CSV"),
        ("t.csv", "q,a\nx,\n", "t.csv, row 1 (line 2): the answer (column 'a') is empty"),
        ("t.csv", "q,a\nx,  \n", "the answer (column 'a') is empty"),
        ("t.csv", "q,a\nx,yes\n,\n", "t.csv, row 2 (line 3): the answer"),
        ("t.csv", b"q,a\nx,caf\xe9\n", "t.csv: not UTF-8 text (line 2)"),
        ("t.csv", "q,a\nx,yes\nz,maybe\n", "t.csv, row 2 (line 3): label 'maybe' is not among the 2 labels"),
        ("t.csv", "q,a\nx,yess\n", "did you mean 'yes'?"),
        ("t.jsonl", '{"q": "x", "a": "yes"}\n\n{"q": "y", \n', "t.jsonl, row 2 (line 3): broken JSON"),
        ("t.jsonl", '{"q": "x", "a": "yes"}\n{"q": "y"}\n', "t.jsonl, row 2 (line 2): no column 'a'; columns here: q"),
        ("t.jsonl", '{"question": "x", "a": "yes"}\n', "t.jsonl, row 1 (line 1): no column 'q'; columns here: question, a"),
        ("t.jsonl", '"text"\n', "row 1 (line 1): holds a str, not a JSON object"),
        ("t.jsonl", "", "t.jsonl: file is empty"),
        ("t.json", "[{]", "t.json: broken JSON array"),
        ("t.json", "[]", "t.json: has no rows"),
        ("t.parquet", b"PAR1 but not really", "t.parquet: not a readable Parquet file"),
        ("t.parquet", b"", "t.parquet: file is empty"),
        ("t.csv.gz", b"not gzip", "t.csv.gz: cannot be read"),
        ("t.dat", "x", "t.dat: cannot tell the format from the name"),
    ],
)
def test_bad_file(tmp_path: Path, name: str, content: str | bytes, expected: str) -> None:
    path = write(tmp_path / name, content)
    found = message(task(path, labels=("yes", "no")))
    assert expected in found
    assert str(tmp_path) in found


def test_places_that_are_no_files(tmp_path: Path) -> None:
    assert "absent.csv: file does not exist" in message(task(str(tmp_path / "absent.csv")))
    (tmp_path / "folder.csv").mkdir()
    assert "is a folder" in message(task(str(tmp_path / "folder.csv")))
    assert "cannot be read" in message(task("nosuchscheme://x/t.csv"))
    assert "no train location" in message(task(None))
    assert "'columns' is for CSV" in message(task(jsonl(tmp_path / "t.jsonl", ROWS), columns=("q", "a")))
    assert load_splits(task(None, test=jsonl(tmp_path / "e.jsonl", ROWS)), require_train=False).train == []


def test_parquet_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["x"], "a": ["y"]}), tmp_path / "t.parquet")
    assert "t.parquet: no column 'q'; columns here: text, a" in message(task(str(tmp_path / "t.parquet")))
    pq.write_table(pa.table({"q": pa.array([], pa.string()), "a": pa.array([], pa.string())}), tmp_path / "none.parquet")
    assert "has a header but no rows" in message(task(str(tmp_path / "none.parquet")))
    pq.write_table(pa.table({"q": ["x", "y"], "a": ["u", None]}), tmp_path / "null.parquet")
    assert "null.parquet, row 2: column 'a' is null" in message(task(str(tmp_path / "null.parquet")))
    data = (tmp_path / "t.parquet").read_bytes()
    write(tmp_path / "cut.parquet", data[: len(data) * 9 // 10])
    assert "not a readable Parquet file" in message(task(str(tmp_path / "cut.parquet")))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"prompt": "no field"}, "no {column} field"),
        ({"prompt": "{q} {"}, "single '{' at character 4"),
        ({"prompt": "{q}}"}, "single '}'"),
        ({"prompt": "{q!r}"}, "not a plain {column} name"),
        ({"prompt": "{}"}, "not a plain {column} name"),
        ({"prompt": "{q[0]}"}, "not a plain {column} name"),
        ({"labels": ("x",)}, "two or more different"),
        ({"labels": ("x", "x")}, "two or more different"),
        ({"labels": ("x", "y"), "label_names": {"x": "y"}}, "two labels the same text"),
        ({"columns": ("x", "x")}, "names one column twice"),
        ({"max_train": 0}, "max_train"),
        ({"validation_fraction": 1}, "validation_fraction"),
        ({"lables": ("x", "y")}, "did you mean 'labels'?"),
    ],
)
def test_bad_config(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)) as caught:
        task("x.csv", **options)
    assert "\n" not in str(caught.value)


def test_config_round_trip_and_properties() -> None:
    config = task("x.csv", labels=("a", "b"), label_names={"b": "B side"}, chat=True)
    assert TaskConfig.load(config.to_dict()) == config
    assert config.label_texts == ("a", "B side")
    assert (config.separator, config.with_overrides(["chat=false"]).separator) == ("", " ")
    assert template_fields("{b}{{x}}{a}{b}") == ("b", "a")


# --- splits ---------------------------------------------------------------------------------------------------------------------


def test_label_names_and_dropping(tmp_path: Path) -> None:
    rows = [{"q": f"q{number}", "a": label} for number, label in enumerate(["x", "y", "other", "x", "y"])]
    config = task(jsonl(tmp_path / "t.jsonl", rows), labels=("y", "x"), label_names={"x": "ex"}, other_labels="drop")
    splits = load_splits(config)
    assert [(item.id, item.answer, item.label) for item in splits.train] == [
        ("train-1", "ex", 1),
        ("train-2", "y", 0),
        ("train-4", "ex", 1),
        ("train-5", "y", 0),
    ]
    assert (splits.counts.rows, splits.counts.dropped) == ({"train": 5}, {"train": 1})
    assert "dropped for their label: 1" in splits.describe()
    assert "no row has the label 'z'" in message(config.with_overrides({"labels": ["x", "y", "z"]}))
    assert "none of the 5 rows has a label" in message(config.with_overrides({"labels": ["v", "w"]}))


def test_validation_location_never_overlaps(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "train.jsonl", ROWS)
    mixed = jsonl(tmp_path / "mixed.jsonl", [{"q": "QUESTION  3", "a": "yes"}, {"q": "new", "a": "no"}])
    splits = load_splits(task(train, validation=mixed, test=mixed))
    assert [item.id for item in splits.validation] == ["validation-2"]
    assert splits.counts.validation_in_train == 1
    assert splits.counts.test_in_train == 2
    assert "every validation example is also in train" in message(task(train, validation=train))


def test_one_prompt_cannot_be_split(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", [{"q": "same", "a": "x"}, {"q": "Same ", "a": "x"}])
    assert "at least 2 different prompts" in message(task(path, validation_fraction=0.5))


def test_split_is_seeded_and_before_the_caps(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", ROWS)
    config = task(path, validation_fraction=0.2, test_fraction=0.25, labels=("yes", "no"))
    first, again = load_splits(config), load_splits(config)
    assert first == again
    assert (len(first.train), len(first.validation), len(first.test)) == (12, 3, 5)
    capped = load_splits(config.with_overrides({"max_train": 6, "max_validation": 2}))
    assert Counter(item.label for item in capped.train) == {0: 3, 1: 3}
    assert set(capped.validation) <= set(first.validation) and capped.test == first.test
    assert load_splits(config.with_overrides({"seed": 1})).validation != first.validation
    ids = [item.id for part in (first.train, first.validation, first.test) for item in part]
    assert sorted(ids) == sorted(f"train-{number}" for number in range(1, 21))


examples = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), min_size=2, max_size=60).map(
    lambda pairs: [Example(f"train-{row}", f"p{prompt}", "a", label) for row, (prompt, label) in enumerate(pairs, start=1)]
)


@settings(max_examples=80, deadline=None)
@given(examples, st.floats(0.01, 0.99), st.integers(0, 5))
def test_hold_out_parts_the_prompts(items: list[Example], fraction: float, seed: int) -> None:
    groups = len({item.prompt for item in items})
    if groups < 2:
        return
    kept, held = _hold_out(items, fraction, task("x.csv", seed=seed), "validation")
    assert sorted([*kept, *held], key=lambda item: int(item.id[6:])) == items
    assert kept and held
    assert not {_normal(item.prompt) for item in kept} & {_normal(item.prompt) for item in held}
    assert len({item.prompt for item in held}) == min(max(1, round(fraction * groups)), groups - 1)


@settings(max_examples=80, deadline=None)
@given(examples, st.integers(1, 60), st.integers(0, 5))
def test_caps_are_balanced_and_nested(items: list[Example], limit: int, seed: int) -> None:
    chosen = _cap(items, limit, seed, "train")
    assert len(chosen) == min(limit, len(items))
    assert set(chosen) <= set(_cap(items, limit + 1, seed, "train"))
    have, took = Counter(item.label for item in items), Counter(item.label for item in chosen)
    # A label that could still give examples has at most one less than any other.
    open_labels = [label for label in have if took[label] < have[label]]
    assert all(took[label] >= max(took.values()) - 1 for label in open_labels)


def test_hold_out_keeps_the_proportions() -> None:
    items = [Example(f"train-{row}", f"p{row}", "a", 0 if row % 5 else 1) for row in range(1, 201)]
    _, held = _hold_out(items, 0.2, task("x.csv"), "validation")
    assert Counter(item.label for item in held) == {0: 32, 1: 8}


# --- text -----------------------------------------------------------------------------------------------------------------------


def test_plain_text_windows(tmp_path: Path) -> None:
    long = " ".join(f"w{number}" for number in range(25))
    path = write(tmp_path / "t.txt", f"\ufeff = Title = \n \nshort one\n\nanother\nline\n\n\n{long}\n")
    # Budget: int(20 * 0.7) = 14 words; 3 + 2 + 2 fit together, 25 words are cut into 12 + 13.
    found = load_benchmark(BenchmarkConfig(name="b", location=path, max_tokens=20))
    assert [item.id for item in found] == ["b-1", "b-2", "b-3"]
    assert found[0] == Example("b-1", "", "= Title =\nshort one\nanother line", None)
    assert " ".join(item.answer for item in found[1:]) == long
    assert [len(item.answer.split()) for item in found[1:]] == [12, 13]


def test_text_column(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", [{"text": "keep  this"}, {"text": " ".join("abcdefgh")}])
    found = load_reference(ReferenceConfig(location=path, max_tokens=6))
    assert [(item.id, item.answer) for item in found] == [
        ("reference-1", "keep  this"),
        ("reference-2.1", "a b c d"),
        ("reference-2.2", "e f g h"),
    ]
    assert len(load_reference(ReferenceConfig(location=path, max_tokens=6, max_examples=2))) == 2
    with pytest.raises(DataError, match="no column 'body'; columns here: text"):
        load_benchmark(BenchmarkConfig(location=path, column="body"))
    with pytest.raises(DataError, match=r"row 1 \(line 1\): column 'text' is empty"):
        load_benchmark(BenchmarkConfig(location=jsonl(tmp_path / "e.jsonl", [{"text": " "}])))


def test_pairs(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", [{"q": "1+1", "a": " 2 "}, {"q": "1+2", "a": ""}])
    config = BenchmarkConfig(location=path, prompt="{q}=", answer="a")
    with pytest.raises(DataError, match=r"row 2 \(line 2\): column 'a' is empty"):
        load_benchmark(config)
    jsonl(tmp_path / "t.jsonl", [{"q": "1+1", "a": " 2 "}])
    assert load_benchmark(config) == [Example("benchmark-1", "1+1=", "2", None)]
    assert (config.separator, BenchmarkConfig(location=path).separator) == (" ", "")
    with pytest.raises(ConfigError, match="belong together"):
        BenchmarkConfig(location=path, prompt="{q}")


# --- real data ------------------------------------------------------------------------------------------------------------------


def test_real_banking77() -> None:
    train, test = real("banking77/train.csv"), real("banking77/test.csv")
    with open(train, encoding="utf-8", newline="") as file:
        per_label = Counter(row["category"] for row in csv.DictReader(file))
    labels = tuple(sorted(per_label))[:10]
    names = {label: label.replace("_", " ") for label in labels}
    config = TaskConfig(
        name="banking10",
        train=train,
        test=test,
        prompt="Message: {text}\nIntent:",
        answer="category",
        labels=labels,
        label_names=names,
        other_labels="drop",
        max_train=200,
    )
    splits = load_splits(config)
    assert splits.counts.rows == {"train": 10_003, "test": 3_080}
    assert splits.counts.dropped["train"] == 10_003 - sum(per_label[label] for label in labels)
    assert len(splits.test) == 400
    assert set(Counter(item.label for item in splits.train).values()) == {20}
    assert all(item.answer == names[labels[item.label or 0]] for item in splits.train)
    assert "is not among the 10 labels" in message(config.with_overrides({"other_labels": "error"}))


def test_real_agnews() -> None:
    config = TaskConfig(
        name="agnews",
        train=real("agnews/test.csv"),
        columns=("class", "title", "description"),
        prompt="{title}. {description}\nTopic:",
        answer="class",
        labels=("1", "2", "3", "4"),
        label_names={"1": "World", "2": "Sports", "3": "Business", "4": "Sci/Tech"},
        test_fraction=0.2,
    )
    splits = load_splits(config)
    assert len(splits.train) + len(splits.validation) + len(splits.test) == splits.counts.rows["train"] == 7600
    assert splits.counts.test_in_train == 0
    assert max(Counter(item.label for item in splits.test).values()) <= 385


def test_real_gsm8k() -> None:
    config = task(real("gsm8k/train.jsonl"), test=real("gsm8k/test.jsonl"), prompt="{question}\nAnswer:", answer="answer", max_test=50)
    splits = load_splits(config)
    assert (len(splits.train), len(splits.test)) == (7473, 50)
    assert all(item.label is None and "####" in item.answer for item in splits.test)


def test_real_truthfulqa() -> None:
    config = task(real("truthfulqa/TruthfulQA.csv"), prompt="[{Type}] {Question}", answer="Best Answer", validation_fraction=0.1)
    splits = load_splits(config)
    assert splits.counts.rows == {"train": 817}
    assert splits.train[0].prompt.startswith("[Adversarial] ")
    assert "columns here: Type, Category, Question" in message(config.with_overrides({"answer": "best"}))


def test_real_bbq() -> None:
    prompt = "{context} {question}\nA: {ans0}\nB: {ans1}\nC: {ans2}\nAnswer:"
    config = task(real("bbq/Age.jsonl"), prompt=prompt, answer="label", labels=("0", "1", "2"), label_names={"0": "A", "1": "B", "2": "C"})
    splits = load_splits(config)
    assert len(splits.train) == 3680
    assert {item.answer for item in splits.train} == {"A", "B", "C"}
    assert "holds a dict" in message(config.with_overrides({"prompt": "{answer_info}"}))


def test_real_clinc150_is_refused_in_one_line() -> None:
    assert "data_full.json" in message(task(real("clinc150/data_full.json")))


def test_real_wikitext() -> None:
    config = BenchmarkConfig(name="wikitext2", location=real("wikitext2/valid.txt"), max_tokens=256, max_examples=100)
    found = load_benchmark(config)
    assert len(found) == 100
    words = [len(item.answer.split()) for item in load_benchmark(config.with_overrides({"max_examples": None}))]
    assert max(words) <= 179
    assert sum(words) == len(Path(config.location).read_text(encoding="utf-8").split())
