"""The demo data: a generated task, a reference set and a held-out benchmark, all from texts written for this project.

Locations that `prism_ray.training.task` reads like files:

    demo:tickets?split=train&rows=640&seed=0    columns text, intent; `rows`, `seed` and `distractors` (percent of tickets with one, default
                                                60) optional, split one of train, validation, test
    demo:reference                              column text; 32 paragraphs of general prose
    demo:benchmark                              columns question, answer; short general knowledge, disjoint from the tickets

A ticket is [opener] [context or distractor] core [distractor] [closer], with slots filled, then noise (lower case, one or two typos). The
core alone decides the intent; distractors use the words of another intent while ruling it out. Row i depends on (seed, split, i) and the
rows before it only through the refusal of repeats, so a longer set starts with the shorter one. Splits share no core template.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from urllib.parse import parse_qsl

from prism_ray.core.config import suggest
from prism_ray.core.errors import DataError
from prism_ray.core.files import atomic_path
from prism_ray.core.rows import GENERATED
from prism_ray.training import demo_text
from prism_ray.training.task import BenchmarkConfig, ReferenceConfig, TaskConfig

INTENTS: tuple[str, ...] = tuple(demo_text.CORES)
DEFAULT_ROWS: dict[str, int] = {"train": 640, "validation": 96, "test": 240}
MAX_ROWS = 20_000
PROMPT = "Ticket: {text}\nProblem:"

_SLOT = re.compile(r"\{(\w+)\}")


def demo_rows(location: str) -> list[dict[str, str]]:
    """The rows of a `demo:` location; DataError for an unknown set, split or parameter, or a number out of range."""
    name, _, query = location.removeprefix("demo:").partition("?")
    known = {"tickets": _ticket_rows, "reference": _reference_rows, "benchmark": _benchmark_rows}
    if name not in known:
        raise DataError(f"no demo set '{name}'", where=location, remedy=suggest(name, sorted(known)))
    allowed = ("split", "rows", "seed", "distractors") if name == "tickets" else ()
    try:
        options = dict(parse_qsl(query, strict_parsing=True)) if query else {}
    except ValueError:
        raise DataError(f"'{query}' is not of the form key=value&key=value", where=location) from None
    for key in options:
        if key not in allowed:
            raise DataError(f"demo:{name} has no parameter '{key}'", where=location, remedy=suggest(key, allowed))
    return known[name](location, options)


GENERATED["demo"] = demo_rows


def tickets(split: str, rows: int, seed: int = 0, distractors: int = 60) -> list[dict[str, str]]:
    """`rows` distinct tickets {text, intent} with the intents in turn, so that any multiple of their number is balanced."""
    result: list[dict[str, str]] = []
    seen: set[str] = set()
    for index in range(rows):
        intent = INTENTS[index % len(INTENTS)]
        generator = random.Random(f"prism-ray tickets {seed} {split} {index}")
        text = _ticket(intent, split, generator, distractors)
        while text in seen:
            text = _ticket(intent, split, generator, distractors)
        seen.add(text)
        result.append({"text": text, "intent": intent})
    return result


def demo_task(*, seed: int = 0, train: int = 640, validation: int = 96, test: int = 240, distractors: int = 60) -> TaskConfig:
    """The ticket task over `demo:` locations, with that many rows a split; nothing is written. distractors: percent of tickets that also rule out another
    problem in its own words, which is what makes the task hard."""
    sizes = {"train": train, "validation": validation, "test": test}
    return _task(
        {split: f"demo:tickets?split={split}&rows={rows}&seed={seed}&distractors={distractors}" for split, rows in sizes.items()}, seed
    )


def write_demo(folder: Path | str, seed: int = 0, *, train: int = 640, validation: int = 96, test: int = 240) -> TaskConfig:
    """Write train.jsonl, validation.jsonl and test.jsonl (columns text, intent) into `folder` and return the task over them."""
    folder = Path(folder)
    locations: dict[str, str] = {}
    for split, rows in {"train": train, "validation": validation, "test": test}.items():
        path = folder / f"{split}.jsonl"
        lines = [json.dumps(row, ensure_ascii=False) for row in tickets(split, rows, seed)]
        with atomic_path(path) as temporary:
            temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
        locations[split] = str(path)
    return _task(locations, seed)


def demo_reference(*, max_tokens: int = 128) -> ReferenceConfig:
    """The 32 demo paragraphs as a reference set."""
    return ReferenceConfig(name="demo reference", location="demo:reference", max_tokens=max_tokens)


def demo_benchmark(*, max_examples: int | None = None) -> BenchmarkConfig:
    """The demo quiz as a held-out benchmark."""
    return BenchmarkConfig(
        name="demo benchmark",
        location="demo:benchmark",
        prompt="Question: {question}\nAnswer:",
        answer="answer",
        max_examples=max_examples,
    )


def _task(locations: dict[str, str], seed: int) -> TaskConfig:
    return TaskConfig(
        name="demo tickets",
        train=locations["train"],
        validation=locations["validation"],
        test=locations["test"],
        prompt=PROMPT,
        answer="intent",
        labels=INTENTS,
        seed=seed,
        max_tokens=256,
    )


def _ticket_rows(location: str, options: dict[str, str]) -> list[dict[str, str]]:
    split = options.get("split", "train")
    if split not in DEFAULT_ROWS:
        raise DataError(f"demo:tickets has no split '{split}'", where=location, remedy=suggest(split, DEFAULT_ROWS))
    numbers = {"rows": DEFAULT_ROWS[split], "seed": 0, "distractors": 60}
    for key in numbers:
        if key in options:
            try:
                numbers[key] = int(options[key])
            except ValueError:
                raise DataError(f"{key} is '{options[key]}', not a whole number", where=location) from None
    if not 1 <= numbers["rows"] <= MAX_ROWS:
        raise DataError(f"rows is {numbers['rows']}, allowed are 1 to {MAX_ROWS}", where=location)
    if not 0 <= numbers["distractors"] <= 100:
        raise DataError(f"distractors is {numbers['distractors']}, allowed are 0 to 100", where=location)
    return tickets(split, numbers["rows"], numbers["seed"], numbers["distractors"])


def _reference_rows(location: str, options: dict[str, str]) -> list[dict[str, str]]:
    paragraphs = re.split(r"\n\s*\n", demo_text.REFERENCE_TEXT.strip())
    return [{"text": " ".join(paragraph.split())} for paragraph in paragraphs]


def _benchmark_rows(location: str, options: dict[str, str]) -> list[dict[str, str]]:
    pairs = [line.partition("|") for line in demo_text.BENCHMARK_TEXT.strip().split("\n")]
    return [{"question": question, "answer": answer} for question, _, answer in pairs]


def _ticket(intent: str, split: str, generator: random.Random, distractors: int) -> str:
    parts: list[str] = []
    if generator.random() < 0.5:
        parts.append(generator.choice(demo_text.OPENERS))
    if generator.random() < 0.3:
        parts.append(generator.choice(demo_text.CONTEXT))
    core = generator.choice(demo_text.CORES[intent][split])
    distractor = generator.choice(demo_text.DISTRACTORS[generator.choice([other for other in INTENTS if other != intent])])
    draw = generator.random()
    share = distractors / 100
    parts += [distractor, core] if draw < share / 2 else [core, distractor] if draw < share else [core]
    if generator.random() < 0.4:
        parts.append(generator.choice(demo_text.CLOSERS))
    text = " ".join(_fill(part, generator) for part in parts)
    return _noise(text, generator)


def _fill(template: str, generator: random.Random) -> str:
    filled = _SLOT.sub(lambda match: generator.choice(demo_text.SLOTS[match[1]]), template)
    return filled[0].upper() + filled[1:]


def _noise(text: str, generator: random.Random) -> str:
    """Lower-case a fifth of the texts; swap, drop or double one or two letters inside words in three tenths of them."""
    if generator.random() < 0.2:
        text = text.lower()
    if generator.random() < 0.3:
        for _ in range(generator.choice((1, 1, 2))):
            # Inner letters of longer words only, so that names of hosts and numbers stay readable.
            places = [match.start() + 1 for match in re.finditer(r"[A-Za-z](?=[a-z]{4,})", text)]
            place, kind = generator.choice(places), generator.randrange(3)
            pair = text[place : place + 2]
            text = text[:place] + (pair[::-1], pair[1], pair[0] + pair)[kind] + text[place + 2 :]
    return text
