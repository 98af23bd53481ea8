"""Calibration text to token windows: packed from a token stream, or one sample a row.

*packed* (default): the texts of all rows, one after the other with the end-of-text token between rows, are cut into windows of `length` tokens; no padding, no special tokens in front. A
single plain-text file is one row: its first `samples * length` tokens are the windows. *rows*: each row is a sample of its own, cut at `length` (how many were cut is
counted), padded within its chunk.

A *chunk* is `chunk` consecutive samples: the unit of every forward pass and of every file of activations, fixed by the data alone, so that neither the number of workers nor
their order changes a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from prism_ray.core.config import Config
from prism_ray.core.errors import DataError
from prism_ray.core.rows import FileFormat, read_table


class TextData(Config):
    """location: see core.rows. column: the text column of tables. samples: windows or rows, at most. length: tokens of a sample, at most. chunk: samples of one forward
    pass. mode: see above."""

    location: str
    column: str = "text"
    format: FileFormat = "auto"
    samples: int = Field(default=128, ge=1)
    length: int = Field(default=512, ge=8)
    chunk: int = Field(default=8, ge=1)
    mode: Literal["packed", "rows"] = "packed"


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Token lists in order. cut: rows that were longer than the length. short: whether the text ended before `samples` windows were full."""

    tokens: tuple[tuple[int, ...], ...]
    cut: int = 0
    short: bool = False

    @property
    def total(self) -> int:
        """Tokens in all samples."""
        return sum(map(len, self.tokens))


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """input_ids int64 [B, T], mask bool [B, T] (true where a token is), first: number of its first sample."""

    index: int
    first: int
    input_ids: Tensor
    mask: Tensor


def read_texts(data: TextData) -> Iterator[str]:
    """The texts of a location in order."""
    for row in read_table(data.location, data.format).rows((data.column,) if data.format not in ("auto", "text") else ()):
        yield row.text(data.column)


def make_samples(texts: Iterable[str], tokenizer: Any, data: TextData) -> Samples:
    """Tokenize and window texts. DataError when not one sample comes out."""
    return window((tokenize(text, tokenizer, data) for text in texts), tokenizer.eos_token_id, data)


def tokenize(text: str, tokenizer: Any, data: TextData) -> list[int]:
    """Token ids of one text: packed ones without special tokens and no further than all samples need, rows as the tokenizer gives them."""
    if data.mode == "rows":
        found: list[int] = tokenizer(text)["input_ids"]
        return found
    ids: list[int] = []
    for piece in _pieces(text):
        ids += tokenizer(piece, add_special_tokens=False)["input_ids"]
        if len(ids) >= data.samples * data.length:
            break
    return ids


def window(token_lists: Iterable[Sequence[int]], eos: int | None, data: TextData) -> Samples:
    """Samples of tokenized texts, in order; stops reading when there are enough. DataError when not one sample comes out."""
    made = _packed(token_lists, eos, data) if data.mode == "packed" else _rows(token_lists, data)
    if not made.tokens:
        raise DataError(f"gives no window of {data.length} tokens", where=data.location, remedy="give more text or a smaller length")
    return made


def _packed(token_lists: Iterable[Sequence[int]], eos: int | None, data: TextData) -> Samples:
    wanted = data.samples * data.length
    stream: list[int] = []
    for ids in token_lists:
        if stream and eos is not None:
            stream.append(eos)
        stream += ids
        if len(stream) >= wanted:
            break
    full = min(len(stream), wanted) // data.length
    windows = tuple(tuple(stream[start * data.length : (start + 1) * data.length]) for start in range(full))
    return Samples(tokens=windows, short=full < data.samples)


PIECE_CHARACTERS = 1 << 20


def _pieces(text: str) -> Iterator[str]:
    """A long text in pieces cut at line ends, so that a corpus is not tokenized far beyond what is wanted."""
    start = 0
    while start < len(text):
        stop = start + PIECE_CHARACTERS
        if stop < len(text):
            newline = text.find("\n", stop)
            stop = len(text) if newline < 0 else newline + 1
        yield text[start:stop]
        start = stop


def _rows(token_lists: Iterable[Sequence[int]], data: TextData) -> Samples:
    tokens: list[tuple[int, ...]] = []
    cut = 0
    for ids in token_lists:
        if not len(ids):
            continue
        cut += len(ids) > data.length
        tokens.append(tuple(ids[: data.length]))
        if len(tokens) == data.samples:
            break
    return Samples(tokens=tuple(tokens), cut=cut, short=len(tokens) < data.samples)


def make_chunks(samples: Sequence[Sequence[int]], chunk: int, pad: int) -> list[Chunk]:
    """Chunks of consecutive samples, padded on the right to the longest of the chunk."""
    chunks: list[Chunk] = []
    for index, first in enumerate(range(0, len(samples), chunk)):
        part = samples[first : first + chunk]
        longest = max(map(len, part))
        ids = torch.full((len(part), longest), pad, dtype=torch.int64)
        mask = torch.zeros(len(part), longest, dtype=torch.bool)
        for row, tokens in enumerate(part):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = True
        chunks.append(Chunk(index=index, first=first, input_ids=ids, mask=mask))
    return chunks


def lane_of(chunks: int, lanes: int) -> list[range]:
    """Chunk numbers of each lane: consecutive ones, as even as they go; never more lanes than chunks."""
    lanes = min(lanes, chunks)
    return [range(lane * chunks // lanes, (lane + 1) * chunks // lanes) for lane in range(lanes)]
