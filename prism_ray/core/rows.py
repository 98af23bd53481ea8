"""Tables of rows from files, fsspec URLs, the datasets library and the demo; every fault is one DataError line with file and row.

A location is a local path or any fsspec URL (.jsonl, .json, .csv, .parquet, .txt for plain text; .gz and the like are unpacked), `datasets:<id>[:split]`,
or a scheme of GENERATED (`demo:...`, once prism_ray.training.demo is imported). Row numbers are 1-based counts of data rows; for text files the line in the file stands beside them.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from prism_ray.core.config import suggest
from prism_ray.core.errors import DataError
from prism_ray.core.optional import require

FileFormat = Literal["auto", "jsonl", "csv", "parquet", "text"]
_SUFFIXES: dict[str, FileFormat] = {".jsonl": "jsonl", ".json": "jsonl", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
_COMPRESSED = {".gz", ".bz2", ".xz", ".zip", ".zst"}

GENERATED: dict[str, Callable[[str], Sequence[Any]]] = {}
"""Scheme of a location -> function that makes its rows; filled by the package that generates them."""


@dataclass(frozen=True, slots=True)
class Row:
    """One data row: 1-based number, line in the file (None where there are none), values by column."""

    location: str
    number: int
    line: int | None
    values: Mapping[str, Any]

    def text(self, column: str) -> str:
        """A column's value as text; DataError when it is absent, null, or not a single value."""
        if column not in self.values:
            raise self.error(f"no column '{column}'", _columns_remedy(column, self.values))
        value = self.values[column]
        if value is None or (isinstance(value, float) and math.isnan(value)):
            raise self.error(f"column '{column}' is null")
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, (str, int, float)):
            return str(value)
        raise self.error(f"column '{column}' holds a {type(value).__name__}, not text or a number")

    def error(self, what: str, remedy: str = "") -> DataError:
        """A DataError whose `where` is the file, row and line."""
        line = f" (line {self.line})" if self.line is not None else ""
        return DataError(what, where=f"{self.location}, row {self.number}{line}", remedy=remedy)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of one location. columns: the fixed columns of the file, None where each row has its own (JSON lines)."""

    location: str
    columns: tuple[str, ...] | None
    source: Callable[[], Iterator[Row]]

    def rows(self, needed: Sequence[str]) -> Iterator[Row]:
        """The rows, after a check that the file has the needed columns; DataError when there is no row at all."""
        for column in needed:
            if self.columns is not None and column not in self.columns:
                raise DataError(f"no column '{column}'", where=self.location, remedy=_columns_remedy(column, self.columns))
        empty = True
        for row in self.source():
            empty = False
            yield row
        if empty:
            raise DataError("has a header but no rows" if self.columns else "has no rows", where=self.location)


def read_table(location: str, format: FileFormat = "auto", columns: tuple[str, ...] | None = None) -> Table:
    """Open a location of any kind as a table; DataError when it cannot be read or is empty."""
    if (scheme := location.partition(":")[0]) in GENERATED:
        return _records(location, GENERATED[scheme](location))
    if location.startswith("datasets:"):
        return _read_datasets(location)
    kind = format_of(location) if format == "auto" else format
    if columns is not None and kind != "csv":
        raise DataError("'columns' is for CSV files without a header", where=location, remedy="leave columns out")
    data = _read_bytes(location)
    if kind == "parquet":
        return _read_parquet(location, data)
    text, first_line = _decode(location, data)
    if kind == "csv":
        return _read_csv(location, text, first_line, columns)
    if kind == "jsonl":
        return _read_json(location, text, first_line)
    return _records(location, [{"text": text}])


def _columns_remedy(column: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    near = suggest(column, known)
    listed = ", ".join(known) or "none"
    return f"{near + ' ' if near.startswith('did') else ''}columns here: {listed if len(listed) < 300 else listed[:300] + '…'}"


def format_of(location: str) -> FileFormat:
    path = location.split("::", 1)[0]
    if path.startswith(("http://", "https://")):
        path = re.split(r"[?#]", path, maxsplit=1)[0]
    suffixes = [suffix.lower() for suffix in PurePosixPath(path).suffixes]
    while suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    if not suffixes or suffixes[-1] not in _SUFFIXES:
        known = ", ".join(_SUFFIXES)
        raise DataError("cannot tell the format from the name", where=location, remedy=f"use one of {known}, or set format")
    return _SUFFIXES[suffixes[-1]]


def _read_bytes(location: str) -> bytes:
    fsspec = require("fsspec", "train")
    path = location if "://" in location else str(Path(location).expanduser())
    try:
        with fsspec.open(path, "rb", compression="infer") as file:
            data: bytes = file.read()
    except FileNotFoundError:
        raise DataError("file does not exist", where=location, remedy="check the path") from None
    except IsADirectoryError:
        raise DataError("is a folder, not a file", where=location, remedy="name a file in it") from None
    except (OSError, EOFError, ValueError, ImportError, zlib.error) as error:
        raise DataError(f"cannot be read ({type(error).__name__}: {_first_line(error)})", where=location) from None
    if not data:
        raise DataError("file is empty (0 bytes)", where=location)
    return data


def _decode(location: str, data: bytes) -> tuple[str, int]:
    """UTF-8 text without byte order mark and blank first lines, and the line number of what is left."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"not UTF-8 text (line {line})", where=location, remedy="save it as UTF-8") from None
    # The mark can also stand after blank lines, as in TruthfulQA.csv.
    blank = re.match(r"(?:[ \t\r]*\n|\ufeff)*", text)
    skipped = blank[0] if blank else ""
    if not text[len(skipped) :].strip():
        raise DataError("file is empty (only blank lines)", where=location)
    return text[len(skipped) :], skipped.count("\n") + 1


def _read_json(location: str, text: str, first_line: int) -> Table:
    if text.startswith("["):
        try:
            values = json.loads(text)
        except ValueError as error:
            raise DataError(f"broken JSON array ({error})", where=location) from None
        return _records(location, values)

    def source() -> Iterator[Row]:
        number = 0
        # Not splitlines(): it also cuts at U+2028 and form feeds, which JSON strings may contain.
        for line, content in enumerate(text.split("\n"), start=first_line):
            if not content.strip():
                continue
            number += 1
            try:
                values = json.loads(content)
            except ValueError as error:
                broken = Row(location, number, line, {})
                raise broken.error(f"broken JSON ({error})", "each line must be one complete JSON object") from None
            yield _object_row(location, number, line, values)

    return Table(location, None, source)


def _records(location: str, values: Sequence[Any]) -> Table:
    return Table(location, None, lambda: (_object_row(location, number, None, value) for number, value in enumerate(values, start=1)))


def _object_row(location: str, number: int, line: int | None, values: Any) -> Row:
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise Row(location, number, line, {}).error(f"holds a {kind}, not a JSON object", "each row must be {column: value}")
    return Row(location, number, line, values)


def _read_csv(location: str, text: str, first_line: int, columns: tuple[str, ...] | None) -> Table:
    def records() -> Iterator[tuple[int, list[str]]]:
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        line = first_line
        try:
            for cells in reader:
                if len(cells) > 1 or any(cell.strip() for cell in cells):
                    yield line, cells
                line = first_line + reader.line_num
        except csv.Error as error:
            raise DataError(f"broken CSV ({error})", where=f"{location}, line {line}") from None

    if columns is None:
        header = [cell.strip() for cell in next(records())[1]]
        if len(set(header)) != len(header):
            double = next(name for name in header if header.count(name) > 1)
            raise DataError(f"header names column '{double}' twice", where=location, remedy="set columns for a file without header")
        names: tuple[str, ...] = tuple(header)
    else:
        names = columns

    def source() -> Iterator[Row]:
        for number, (line, cells) in enumerate(records(), start=0 if columns is None else 1):
            if number == 0:
                continue
            if len(cells) != len(names):
                what = f"{len(cells)} cells where {len(names)} columns ({', '.join(names[:8])}) are expected"
                raise Row(location, number, line, {}).error(what, "quote cells that contain commas or quotes")
            if number == 1 and columns is not None and tuple(cells) == columns:
                raise DataError("the first line is the header itself", where=location, remedy="leave columns out")
            yield Row(location, number, line, dict(zip(names, cells, strict=True)))

    return Table(location, names, source)


def _read_parquet(location: str, data: bytes) -> Table:
    pyarrow = require("pyarrow", "train")
    parquet = require("pyarrow.parquet", "train")
    try:
        table = parquet.read_table(io.BytesIO(data))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"not a readable Parquet file ({_first_line(error)})", where=location, remedy="write or copy it again") from None
    names = tuple(table.column_names)

    def source() -> Iterator[Row]:
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in table.to_batches())
        return (Row(location, number, None, values) for number, values in enumerate(rows, start=1))

    return Table(location, names, source)


def _read_datasets(location: str) -> Table:
    """A split through the datasets library; class columns give their names, not their numbers."""
    datasets = require("datasets", "train")
    # The first colon: a split may hold more, as in train[:100].
    name, _, split = location.removeprefix("datasets:").partition(":")
    parts = [name] if name.startswith(("/", ".", "~")) else name.split("/")
    if not all(parts) or len(parts) > 3:
        raise DataError("not of the form datasets:<id>[/config][:split]", where=location)
    config = parts[2] if len(parts) == 3 else None
    identifier = str(Path(name).expanduser()) if len(parts) == 1 and name.startswith("~") else "/".join(parts[:2])
    try:
        data = datasets.load_dataset(identifier, config, split=split or "train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"datasets cannot load it ({type(error).__name__}: {_first_line(error)})", where=location) from None
    classes = {column: feature for column, feature in data.features.items() if isinstance(feature, datasets.ClassLabel)}

    def source() -> Iterator[Row]:
        for number, values in enumerate(data, start=1):
            named = {column: feature.int2str(values[column]) for column, feature in classes.items() if values[column] is not None}
            yield Row(location, number, None, {**values, **named})

    return Table(location, tuple(data.column_names), source)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
