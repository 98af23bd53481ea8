"""The shared data sets as files of `prompt` and `answer` rows, seeded and capped, for the reproduction jobs.

    python jobs/reproduce/shared_data.py OUT [--samples 512] [--sets gsm8k,bbq]

The sets lie in the folder `PRISM_DATA`, default ../shared/data beside the repository; a set that is not there is left out and named. Short answers
(classification, multiple choice) are scored on the answer alone; WikiText-2 is scored whole, as text.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from prism_ray.core.errors import DataError
from prism_ray.training.task import BenchmarkConfig

Pair = tuple[str, str]


def data_root() -> Path:
    """Where the shared sets lie."""
    return Path(os.environ.get("PRISM_DATA") or Path(__file__).resolve().parents[2].parent / "shared" / "data")


def banking77(folder: Path) -> Iterator[Pair]:
    with (folder / "test.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            yield f"Query: {row['text'].strip()}\nIntent:", row["category"].replace("_", " ")


def clinc150(folder: Path) -> Iterator[Pair]:
    for text, label in json.loads((folder / "data_full.json").read_text(encoding="utf-8"))["test"]:
        yield f"Query: {text}\nIntent:", label.replace("_", " ")


def agnews(folder: Path) -> Iterator[Pair]:
    classes = (folder / "classes.txt").read_text(encoding="utf-8").split("\n")
    with (folder / "test.csv").open(encoding="utf-8", newline="") as file:
        for label, title, description in csv.reader(file):
            yield f"{title}. {description}\nTopic:", classes[int(label) - 1].strip()


def gsm8k(folder: Path) -> Iterator[Pair]:
    for line in (folder / "test.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield f"Question: {row['question']}\nAnswer:", row["answer"]


def bbq(folder: Path) -> Iterator[Pair]:
    for name in ("Age", "Religion"):
        for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            choices = [row[f"ans{place}"] for place in range(3)]
            listed = "\n".join(f"({'abc'[place]}) {choice}" for place, choice in enumerate(choices))
            yield f"{row['context']} {row['question']}\n{listed}\nAnswer:", choices[int(row["label"])]


def truthfulqa(folder: Path) -> Iterator[Pair]:
    lines = (folder / "TruthfulQA.csv").read_text(encoding="utf-8-sig").lstrip("\r\n")
    for row in csv.DictReader(lines.splitlines()):
        yield f"Q: {row['Question']}\nA:", row["Best Answer"]


def wikitext2(folder: Path) -> Iterator[Pair]:
    # One article paragraph a sample; section headings and empty lines are no text to score.
    for line in (folder / "test.txt").read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if len(text.split()) >= 20 and not text.startswith("="):
            yield "", " ".join(text.split()[:90])


SETS: dict[str, Callable[[Path], Iterator[Pair]]] = {
    reader.__name__: reader for reader in (banking77, clinc150, agnews, gsm8k, bbq, truthfulqa, wikitext2)
}


def write_sets(out: Path, samples: int, names: list[str] | None = None, seed: int = 0) -> list[BenchmarkConfig]:
    """Write <set>.jsonl of at most `samples` seeded rows each; returns their configs. DataError when none of the sets is there."""
    out.mkdir(parents=True, exist_ok=True)
    found: list[BenchmarkConfig] = []
    for name in names or list(SETS):
        folder = data_root() / name
        if not folder.is_dir():
            print(f"{name}: not there, left out", file=sys.stderr)
            continue
        rows = list(SETS[name](folder))
        random.Random(f"{name} {seed}").shuffle(rows)
        path = out / f"{name}.jsonl"
        if name == "wikitext2":
            path.write_text("".join(json.dumps({"text": text}) + "\n" for _, text in rows[:samples]), encoding="utf-8")
            found.append(BenchmarkConfig(name=name, location=str(path), max_tokens=256))
            continue
        path.write_text(
            "".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows[:samples]), encoding="utf-8"
        )
        found.append(BenchmarkConfig(name=name, location=str(path), prompt="{prompt}", answer="answer", max_tokens=512))
    if not found:
        raise DataError("holds none of the shared sets", where=str(data_root()), remedy="set PRISM_DATA")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--sets", default=None, help="comma-separated, default all")
    options = parser.parse_args()
    for config in write_sets(options.out, options.samples, options.sets.split(",") if options.sets else None):
        print(f"{config.name}: {config.location}")
