"""Everything a run reads, tokenized once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prism_ray.core.errors import DataError
from prism_ray.training.config import TrainConfig
from prism_ray.training.data import Encoded, encode_all, encode_candidates
from prism_ray.training.task import Example, TaskConfig, TextConfig, load_benchmark, load_reference, load_splits


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Encoded splits. *_groups: per example the encoded candidates of every label; labels: the label texts, empty for a generation task; notes: what was
    dropped or truncated, for the log."""

    train: list[Encoded]
    validation: list[Encoded]
    validation_groups: list[list[Encoded]]
    validation_labels: list[int]
    test: list[Encoded]
    test_groups: list[list[Encoded]]
    test_labels: list[int]
    benchmark: list[Encoded]
    reference: list[Encoded]
    labels: tuple[str, ...]
    pad_id: int
    notes: tuple[str, ...]


def load_run_data(config: TrainConfig, tokenizer: Any) -> RunData:
    """Read and encode task, benchmark and reference set. Raises DataError naming file and row."""
    task = config.task
    splits = load_splits(task)
    if not splits.validation:
        raise DataError(
            f"task '{task.name}' has no validation examples", where="validation_fraction", remedy="set validation, or a fraction above 0"
        )
    notes = [splits.describe()]
    encoded = {}
    for name in ("train", "validation", "test"):
        found = encode_all(getattr(splits, name), tokenizer, answer_prefix=task.separator, max_tokens=task.max_tokens, chat=task.chat)
        encoded[name] = found.items
        if found.truncated_prompts or found.truncated_answers:
            notes.append(
                f"{name}: {found.truncated_prompts} prompts and {found.truncated_answers} answers truncated to {task.max_tokens} tokens"
            )
    labels = task.label_texts
    return RunData(
        **encoded,
        validation_groups=_groups(splits.validation, task, tokenizer),
        validation_labels=_labels(splits.validation),
        test_groups=_groups(splits.test, task, tokenizer),
        test_labels=_labels(splits.test),
        benchmark=_texts(config.benchmark, load_benchmark(config.benchmark), tokenizer) if config.benchmark else [],
        reference=_texts(config.regularizer.reference, load_reference(config.regularizer.reference), tokenizer),
        labels=labels,
        pad_id=tokenizer.pad_token_id,
        notes=tuple(notes),
    )


def _groups(examples: Sequence[Example], task: TaskConfig, tokenizer: Any) -> list[list[Encoded]]:
    if not task.labels:
        return []
    options: dict[str, Any] = {"answer_prefix": task.separator, "max_tokens": task.max_tokens, "chat": task.chat}
    return [encode_candidates(example, task.label_texts, tokenizer, **options) for example in examples]


def _labels(examples: Sequence[Example]) -> list[int]:
    return [example.label for example in examples if example.label is not None]


def _texts(config: TextConfig, examples: Sequence[Example], tokenizer: Any) -> list[Encoded]:
    return encode_all(examples, tokenizer, answer_prefix=config.separator, max_tokens=config.max_tokens, add_eos=False).items
