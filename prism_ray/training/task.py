"""The declared task format: where the rows are, how a row becomes a prompt and an answer, which answers are allowed.

A `TaskConfig` names locations, a prompt template of {column} fields and an answer column; `load_splits` turns it into `Example`s and
counts. A location is a local path or any fsspec URL (.jsonl, .json, .csv, .parquet, .txt for plain text; .gz and the like are unpacked),
`datasets:<id>[:split]` with <id> = name, org/name, org/name/config or a local folder, or `demo:...` (see demo.py).

Row numbers in messages and example ids are 1-based counts of data rows; for text files the line in the file stands beside them.
Refused, each as one DataError line with the file and, where there is one, the row: a file that is missing, empty, header-only or not
readable in its format, a broken JSON line, a ragged CSV row, a missing or null column, an empty answer, a label outside the set.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from prism_ray.core.config import Config, suggest
from prism_ray.core.errors import DataError
from prism_ray.core.rows import FileFormat, Row, Table, format_of, read_table

# English prose averages about 1.3 tokens a word in the vocabularies in use; 0.7 leaves some room.
WORDS_PER_TOKEN = 0.7


_TEMPLATE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


class TaskConfig(Config):
    """One task: locations, template, answer, label set, sizes. Without `labels` it is a free-form generation task."""

    name: str = Field(min_length=1)
    train: str | None = None
    test: str | None = None
    validation: str | None = None
    validation_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Part of train that is held out for validation where no `validation` location is given; 0 for none."""
    test_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Part of train that is held out for test where no `test` location is given; 0 for none."""
    format: FileFormat = "auto"
    columns: tuple[str, ...] | None = None
    """Column names of CSV files that have no header line."""
    prompt: str
    """Template with {column} fields; literal braces are doubled."""
    answer: str = Field(min_length=1)
    """The column that holds the answer or label."""
    labels: tuple[str, ...] | None = None
    """Allowed raw values of the answer column; an example's `label` is the position in here."""
    label_names: dict[str, str] = Field(default_factory=dict)
    """Raw value -> text that the model shall produce; values that are not in here stand for themselves."""
    other_labels: Literal["error", "drop"] = "error"
    max_train: int | None = Field(default=None, ge=1)
    max_validation: int | None = Field(default=None, ge=1)
    max_test: int | None = Field(default=None, ge=1)
    seed: int = 0
    answer_prefix: str = " "
    """Text between prompt and answer; not used with `chat`, where the chat template ends the prompt. See `separator`."""
    chat: bool = False
    """Render the prompt as a user message through the tokenizer's chat template."""
    max_tokens: int = Field(default=512, ge=2)
    """Longest tokenized example; longer prompts lose their beginning, and are counted."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not template_fields(self.prompt):
            raise ValueError("prompt has no {column} field, so every prompt would be the same")
        if self.columns is not None and len(set(self.columns)) != len(self.columns):
            raise ValueError("columns names one column twice")
        if self.labels is not None:
            if len(self.labels) < 2 or len(set(self.labels)) != len(self.labels):
                raise ValueError("labels must be two or more different values")
            texts = self.label_texts
            if len(set(texts)) != len(texts) or not all(text.strip() for text in texts):
                raise ValueError("label_names gives two labels the same text, or an empty one")
        return self

    @property
    def label_texts(self) -> tuple[str, ...]:
        """The texts of the labels, in label order; empty for a generation task."""
        return tuple(self.label_names.get(label, label) for label in self.labels or ())

    @property
    def separator(self) -> str:
        """What stands between prompt and answer when tokenized: `answer_prefix`, nothing after a chat template."""
        return "" if self.chat else self.answer_prefix


class TextConfig(Config):
    """Text, or prompt and answer pairs, that measure or hold a model's general ability.

    With `prompt` and `answer` each row is a pair whose answer is scored; without, the text of `column` (or a .txt file) is cut
    into windows of about `max_tokens` and all of it is scored.
    """

    name: str = Field(default="text", min_length=1)
    location: str
    format: FileFormat = "auto"
    columns: tuple[str, ...] | None = None
    column: str = Field(default="text", min_length=1)
    prompt: str | None = None
    answer: str | None = None
    answer_prefix: str = " "
    max_examples: int | None = Field(default=None, ge=1)
    max_tokens: int = Field(default=256, ge=2)
    seed: int = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.prompt is None) != (self.answer is None):
            raise ValueError("prompt and answer belong together; give both, or none for plain text")
        if self.prompt is not None and not template_fields(self.prompt):
            raise ValueError("prompt has no {column} field, so every prompt would be the same")
        return self

    @property
    def separator(self) -> str:
        """What stands between prompt and answer when tokenized; nothing before plain text."""
        return self.answer_prefix if self.prompt is not None else ""


class ReferenceConfig(TextConfig):
    """The fixed text on which the shape regularizer compares features (and replay computes its loss)."""

    name: str = Field(default="reference", min_length=1)
    location: str = "demo:reference"
    max_tokens: int = Field(default=128, ge=2)


class BenchmarkConfig(TextConfig):
    """A held-out benchmark that tells what tuning lost of the base."""

    name: str = Field(default="benchmark", min_length=1)


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt and its answer. id: '<location's split>-<row>', row 1-based; label: position in the label set, or None."""

    id: str
    prompt: str
    answer: str
    label: int | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """What happened to the rows, by the split whose location they came from."""

    rows: Mapping[str, int]
    """Data rows read."""
    dropped: Mapping[str, int]
    """Rows left out because their label is outside the set (`other_labels='drop'`)."""
    validation_in_train: int
    """Validation examples removed because train has the same prompt."""
    test_in_train: int
    """Test examples (kept) whose prompt also stands in train or validation: above 0 the test metric is too good."""


@dataclass(frozen=True, slots=True)
class Splits:
    """The examples of a task in file order; validation shares no prompt with train."""

    train: list[Example]
    validation: list[Example]
    test: list[Example]
    counts: Counts

    def describe(self) -> str:
        """One line for a log: sizes, dropped rows, repeated prompts."""
        sizes = f"{len(self.train)} train, {len(self.validation)} validation, {len(self.test)} test examples"
        read = ", ".join(f"{count} {split}" for split, count in self.counts.rows.items())
        return (
            f"{sizes} (rows read: {read}; dropped for their label: {sum(self.counts.dropped.values())}; "
            f"validation also in train, removed: {self.counts.validation_in_train}; test also in train: {self.counts.test_in_train})"
        )


def load_splits(task: TaskConfig, *, require_train: bool = True) -> Splits:
    """Read, check, split and cap the examples of a task; the same task gives the same lists on every machine.

    Without a validation (test) location a seeded, label-proportional part of train is held out, equal prompts always together. The held
    out parts are drawn before the caps, so they do not depend on `max_train`. Caps take equally many of each label as far as they reach,
    and a smaller cap is a subset of a larger one. With `require_train=False` a task without train location gives an empty train list.
    Raises DataError for every bad input named in the module's docstring, and where no train location is given.
    """
    if task.train is None and require_train:
        raise DataError(
            f"task '{task.name}' has no train location", where="train", remedy="set train to a file, datasets:<id> or demo:tickets"
        )
    rows: dict[str, int] = {}
    dropped: dict[str, int] = {}
    loaded: dict[str, list[Example]] = {"train": [], "validation": [], "test": []}
    for split in loaded:
        location: str | None = getattr(task, split)
        if location is not None:
            loaded[split], rows[split], dropped[split] = _load(task, split, location)
    train, validation, test = loaded["train"], loaded["validation"], loaded["test"]
    if task.test is None and train and task.test_fraction > 0:
        train, test = _hold_out(train, task.test_fraction, task, "test")
    removed = 0
    if task.validation is not None:
        seen = {_normal(example.prompt) for example in train}
        kept = [example for example in validation if _normal(example.prompt) not in seen]
        removed = len(validation) - len(kept)
        if not kept:
            raise DataError("every validation example is also in train", where=task.validation, remedy="give other rows, or leave it out")
        validation = kept
    elif train and task.validation_fraction > 0:
        train, validation = _hold_out(train, task.validation_fraction, task, "validation")
    train = _cap(train, task.max_train, task.seed, "train")
    validation = _cap(validation, task.max_validation, task.seed, "validation")
    test = _cap(test, task.max_test, task.seed, "test")
    seen = {_normal(example.prompt) for example in itertools.chain(train, validation)}
    repeated = sum(_normal(example.prompt) in seen for example in test)
    return Splits(train, validation, test, Counts(rows, dropped, removed, repeated))


def load_benchmark(config: TextConfig) -> list[Example]:
    """The examples of a benchmark or reference set: pairs, or (prompt '', answer = text) windows of plain text.

    A window has at most about `max_tokens` tokens, estimated as `WORDS_PER_TOKEN` words a token; the paragraphs of a .txt file are
    packed into windows, rows of a `column` are only cut. ids are '<name>-<row>', for cut rows '<name>-<row>.<part>'.
    Raises DataError as `load_splits` does.
    """
    examples: list[Example] = []
    if config.prompt is not None and config.answer is not None:
        table = _open(config.location, config.format, config.columns)
        for row in table.rows((*template_fields(config.prompt), config.answer)):
            prompt, answer = render(config.prompt, row), row.text(config.answer).strip()
            if not answer:
                raise row.error(f"column '{config.answer}' is empty")
            examples.append(Example(f"{config.name}-{row.number}", prompt, answer))
    else:
        examples = [Example(f"{config.name}-{number}", "", text) for number, text in _windows(config)]
    if not examples:
        raise DataError("holds no text", where=config.location)
    return _cap(examples, config.max_examples, config.seed, config.name)


def load_reference(config: ReferenceConfig) -> list[Example]:
    """The same as `load_benchmark`, under the name that a reader of a training loop looks for."""
    return load_benchmark(config)


def template_fields(template: str) -> tuple[str, ...]:
    """The {column} fields of a template in order of first use; ValueError for anything but plain names and doubled braces."""
    fields: dict[str, None] = {}
    for match in _TEMPLATE.finditer(template):
        name = match[1]
        if match[0] in ("{", "}"):
            raise ValueError(f"prompt has a single '{match[0]}' at character {match.start()}; write '{match[0] * 2}' for a literal one")
        if name is not None:
            if not name.strip() or any(mark in name for mark in "!:[]"):
                raise ValueError(f"prompt field '{match[0]}' is not a plain {{column}} name")
            fields[name] = None
    return tuple(fields)


def render(template: str, row: Row) -> str:
    """Fill a template from a row, each field once: braces inside the values stay as they are."""
    return _TEMPLATE.sub(lambda match: match[0][0] if match[1] is None else row.text(match[1]), template)


def _open(location: str, format: FileFormat, columns: tuple[str, ...] | None) -> Table:
    if location.startswith("demo:"):
        # It registers its scheme; it builds TaskConfigs from this module, so importing it at the top would be a circle.
        import prism_ray.training.demo  # noqa: F401
    return read_table(location, format, columns)


def _load(task: TaskConfig, split: str, location: str) -> tuple[list[Example], int, int]:
    """(examples, rows read, rows dropped for their label) of one location."""
    positions = {label: index for index, label in enumerate(task.labels or ())}
    examples: list[Example] = []
    rows = dropped = 0
    for row in _open(location, task.format, task.columns).rows((*template_fields(task.prompt), task.answer)):
        rows += 1
        raw = row.text(task.answer).strip()
        if not raw:
            raise row.error(f"the answer (column '{task.answer}') is empty")
        if task.labels is not None and raw not in positions:
            if task.other_labels == "error":
                near = suggest(raw, task.labels)
                hint = f"{near} or " if near.startswith("did") else ""
                raise row.error(
                    f"label '{raw}' is not among the {len(task.labels)} labels", f"{hint}set other_labels=drop to leave such rows out"
                )
            dropped += 1
            continue
        answer = task.label_names.get(raw, raw).strip()
        examples.append(Example(f"{split}-{row.number}", render(task.prompt, row), answer, positions.get(raw)))
    if not examples:
        raise DataError(f"none of the {rows} rows has a label of the set", where=location, remedy="check labels")
    if split == "train" and task.other_labels == "drop":
        # A misspelt label would otherwise vanish: its rows are dropped and nothing says so.
        found = {example.label for example in examples}
        for label, index in positions.items():
            if index not in found:
                raise DataError(f"no row has the label '{label}'", where=location, remedy="check its spelling, or take it out of labels")
    return examples, rows, dropped


def _normal(prompt: str) -> str:
    """Prompts that differ only in case or white space count as the same."""
    return " ".join(prompt.casefold().split())


def _hold_out(examples: list[Example], fraction: float, task: TaskConfig, purpose: str) -> tuple[list[Example], list[Example]]:
    """(kept, held out): a seeded part, proportional over labels, with equal prompts on the same side; both in file order."""
    groups: dict[str, list[Example]] = {}
    for example in examples:
        groups.setdefault(_normal(example.prompt), []).append(example)
    if len(groups) < 2:
        raise DataError(
            f"a {purpose} part needs at least 2 different prompts in train", where=task.train or "train", remedy=f"set {purpose}"
        )
    strata: dict[int, list[str]] = {}
    for key, group in groups.items():
        strata.setdefault(-1 if group[0].label is None else group[0].label, []).append(key)
    order: list[tuple[float, int, str]] = []
    for label, keys in strata.items():
        random.Random(f"{task.seed} {purpose} {label}").shuffle(keys)
        # Spread each label evenly over [0, 1): any leading part of the sorted order has the labels in proportion.
        order += [((place + 0.5) / len(keys), label, key) for place, key in enumerate(keys)]
    count = min(max(1, round(fraction * len(groups))), len(groups) - 1)
    held = {key for _, _, key in sorted(order)[:count]}
    kept = [example for example in examples if _normal(example.prompt) not in held]
    return kept, [example for example in examples if _normal(example.prompt) in held]


def _cap(examples: list[Example], limit: int | None, seed: int, purpose: str) -> list[Example]:
    """At most `limit` examples in file order, seeded, taken from the labels in turn."""
    if limit is None or len(examples) <= limit:
        return examples
    by_label: dict[int, list[int]] = {}
    for place, example in enumerate(examples):
        by_label.setdefault(-1 if example.label is None else example.label, []).append(place)
    for label, places in by_label.items():
        random.Random(f"{seed} cap {purpose} {label}").shuffle(places)
    turns = itertools.zip_longest(*(places for _, places in sorted(by_label.items())))
    chosen = itertools.islice((place for turn in turns for place in turn if place is not None), limit)
    return [examples[place] for place in sorted(chosen)]


def _windows(config: TextConfig) -> Iterator[tuple[str, str]]:
    """(row number or row.part, text) of plain text, at most `max_tokens` * WORDS_PER_TOKEN words each."""
    budget = max(1, int(config.max_tokens * WORDS_PER_TOKEN))
    table = _open(config.location, config.format, config.columns)
    plain = config.format == "text" or (config.format == "auto" and _is_plain(config.location))
    column = "text" if plain else config.column
    for row in table.rows((column,)):
        text = row.text(column)
        if plain:
            paragraphs = [" ".join(part.split()) for part in re.split(r"\n[ \t\r]*\n", text)]
            pieces = _pack([part for part in paragraphs if part], budget)
            yield from ((str(number), piece) for number, piece in enumerate(pieces, start=1))
            continue
        if not text.strip():
            raise row.error(f"column '{column}' is empty")
        pieces = _cut(text.strip(), budget)
        yield from ((f"{row.number}.{part}" if len(pieces) > 1 else str(row.number), piece) for part, piece in enumerate(pieces, start=1))


def _is_plain(location: str) -> bool:
    return not location.startswith(("demo:", "datasets:")) and format_of(location) == "text"


def _cut(text: str, budget: int) -> list[str]:
    """Nearly equal runs of at most `budget` words; the text itself, white space included, where it is short enough."""
    words = text.split()
    if len(words) <= budget:
        return [text]
    count = math.ceil(len(words) / budget)
    edges = [len(words) * part // count for part in range(count + 1)]
    return [" ".join(words[start:end]) for start, end in itertools.pairwise(edges)]


def _pack(paragraphs: list[str], budget: int) -> list[str]:
    """Join neighbouring paragraphs while they fit the budget; cut those that alone do not."""
    windows: list[str] = []
    current: list[str] = []
    words = 0
    for piece in (piece for paragraph in paragraphs for piece in _cut(paragraph, budget)):
        length = len(piece.split())
        if current and words + length > budget:
            windows.append("\n".join(current))
            current, words = [], 0
        current.append(piece)
        words += length
    return [*windows, "\n".join(current)] if current else windows
