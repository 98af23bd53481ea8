"""Calibration text to windows and chunks: what is packed, what is cut, what is counted."""

from __future__ import annotations

import json

import pytest

from prism_ray.calibrate.text import TextData, lane_of, make_chunks, make_samples, read_texts, tokenize, window
from prism_ray.core.errors import ConfigError, DataError
from prism_ray.models.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def data(location="", **options) -> TextData:
    return TextData(location=str(location), **({"samples": 4, "length": 8} | options))


def test_one_text_is_cut_into_windows_of_its_own_token_stream(tmp_path):
    text = "the rain in the town is on a street\n" * 4
    (tmp_path / "t.txt").write_text(text)
    settings = data(tmp_path / "t.txt")
    made = make_samples(read_texts(settings), TOKENIZER, settings)
    stream = TOKENIZER(next(read_texts(settings)), add_special_tokens=False)["input_ids"]
    assert [token for window_ in made.tokens for token in window_] == stream[:32]
    assert [len(window_) for window_ in made.tokens] == [8] * 4 and not made.short and made.total == 32


def test_rows_are_joined_by_the_end_of_text_token(tmp_path):
    rows = ["one two", "three", "four five six"]
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    settings = data(tmp_path / "t.jsonl", samples=1, length=10)
    made = make_samples(read_texts(settings), TOKENIZER, settings)
    expected: list[int] = []
    for row in rows:
        expected += ([TOKENIZER.eos_token_id] if expected else []) + TOKENIZER(row, add_special_tokens=False)["input_ids"]
    assert list(made.tokens[0]) == expected[:10] and TOKENIZER.eos_token_id in made.tokens[0]


def test_a_text_that_ends_early_is_told_and_too_little_is_refused():
    settings = data("here.txt", samples=4, length=8)
    made = window([list(range(20))], 0, settings)
    assert len(made.tokens) == 2 and made.short
    with pytest.raises(DataError, match=r"here\.txt: gives no window of 8 tokens"):
        window([[1, 2, 3]], 0, settings)


def test_rows_mode_counts_what_it_cuts_and_skips_empty_rows():
    settings = data(mode="rows", samples=3, length=8)
    made = window([[1] * 12, [], [2] * 8, [3], [4]], 0, settings)
    assert [len(row) for row in made.tokens] == [8, 8, 1] and made.cut == 1 and not made.short


def test_a_long_text_is_tokenized_no_further_than_needed(monkeypatch):
    monkeypatch.setattr("prism_ray.calibrate.text.PIECE_CHARACTERS", 64)
    text = "a short line\n" * 500
    settings = data(samples=2, length=8)
    ids = tokenize(text, TOKENIZER, settings)
    assert 16 <= len(ids) < 64
    # Pieces end at line ends, so a word is never cut.
    assert TOKENIZER.decode(ids).count("a short line") >= 4


def test_chunks_hold_consecutive_samples_padded_on_the_right():
    chunks = make_chunks([[5] * 3, [6] * 5, [7]], 2, pad=0)
    assert [chunk.first for chunk in chunks] == [0, 2]
    assert chunks[0].input_ids.tolist() == [[5, 5, 5, 0, 0], [6] * 5]
    assert chunks[0].mask.tolist() == [[True] * 3 + [False] * 2, [True] * 5]
    assert chunks[1].mask.shape == (1, 1)


@pytest.mark.parametrize("chunks", [1, 2, 5, 8, 9, 100])
@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_lanes_partition_the_chunks(chunks, lanes):
    found = lane_of(chunks, lanes)
    assert [number for lane in found for number in lane] == list(range(chunks))
    assert len(found) == min(lanes, chunks) and max(map(len, found)) - min(map(len, found)) <= 1


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="length"):
        data(length=0)
