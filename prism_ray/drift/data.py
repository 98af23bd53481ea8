"""Benchmarks as encoded samples and a fixed batch plan, the same for every model and every number of workers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prism_ray.core.errors import DataError
from prism_ray.drift.reader import Side
from prism_ray.training.data import Encoded, batches_by_length, encode_all
from prism_ray.training.task import BenchmarkConfig, load_benchmark

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CLASS_SAMPLES = 8
"""Samples that each of two answers needs for a class direction."""


@dataclass(frozen=True)
class Benchmark:
    """name; items and their answers' texts; batches: index lists; truncated: samples that lost tokens to max_tokens."""

    name: str
    items: list[Encoded]
    answers: list[str]
    batches: list[list[int]]
    truncated: int

    @property
    def tokens(self) -> int:
        """Scored tokens of all samples."""
        return sum(item.answer_tokens for item in self.items)

    @property
    def classes(self) -> tuple[str, str] | None:
        """The two most frequent answers where each has enough samples and the answers repeat; None for free text."""
        common = Counter(self.answers).most_common(2)
        if len(common) < 2 or common[1][1] < CLASS_SAMPLES:
            return None
        return common[0][0], common[1][0]


def load(config: BenchmarkConfig, tokenizer: PreTrainedTokenizerBase, *, max_batch: int, max_batch_tokens: int) -> Benchmark:
    """Read, encode and plan a benchmark. DataError names the file and row of bad input, and the sample of an empty answer."""
    examples = load_benchmark(config)
    # A pair's answer ends where it ends; plain text has no end of its own, its windows are cut.
    encoded = encode_all(
        examples, tokenizer, answer_prefix=config.separator, max_tokens=config.max_tokens, add_eos=config.prompt is not None
    )
    if not encoded.items:
        raise DataError("holds no sample", where=config.location)
    return Benchmark(
        name=config.name,
        items=encoded.items,
        answers=[example.answer for example in examples],
        batches=list(batches_by_length(encoded.items, max_batch, max_batch_tokens)),
        truncated=encoded.truncated_prompts + encoded.truncated_answers,
    )


def floor_plan(benchmark: Benchmark, samples: int) -> list[list[int]]:
    """Whole batches of the plan, long and short ones in turn, that hold at least `samples` samples (or all of them)."""
    plan: list[list[int]] = []
    for batch in spread_batches(benchmark.batches):
        if sum(map(len, plan)) >= samples:
            break
        plan.append(batch)
    return plan


def other_layouts(plan: list[list[int]], seed: int) -> Iterator[tuple[str, Side, list[list[int]]]]:
    """(name, padding side, batches) of the samples of `plan` in other shapes.

    One at a time, thirds, left padding, shuffled over batches, left padding of shuffled pairs: each rounds differently.
    """
    flat = [index for batch in plan for index in batch]
    shuffled = flat[:]
    random.Random(f"prism-ray layout {seed}").shuffle(shuffled)
    third = [
        batch[start : start + size] for batch in plan for size in [max(1, -(-len(batch) // 3))] for start in range(0, len(batch), size)
    ]
    width = max(map(len, plan))
    yield "one at a time", "right", [[index] for index in flat]
    yield "a third of the batch", "right", third
    yield "left padding", "left", plan
    yield "shuffled", "right", [shuffled[start : start + width] for start in range(0, len(shuffled), width)]
    yield "pairs, left padding", "left", [shuffled[start : start + 2] for start in range(0, len(shuffled), 2)]


def spread_batches(batches: list[list[int]]) -> list[list[int]]:
    """The batches in an order that alternates long and short ones, so that any leading part is a fair sample of lengths."""
    order = sorted(range(len(batches)), key=lambda place: (_bit_reversed(place, len(batches)), place))
    return [batches[place] for place in order]


def _bit_reversed(place: int, count: int) -> int:
    bits = max(1, (count - 1).bit_length())
    return int(format(place, f"0{bits}b")[::-1], 2)
