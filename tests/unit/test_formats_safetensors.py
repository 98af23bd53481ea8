"""prism_ray.formats.safetensors_io: odd and damaged shards are refused by name before any tensor is read (ADP-06)."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch

from prism_ray.core.errors import CheckpointError, ModelError
from prism_ray.formats.safetensors_io import check_safetensors, read_safetensors_header, read_tensors, shard_map, write_shard

TENSORS = {"a": torch.arange(12, dtype=torch.float32).reshape(3, 4), "b": torch.arange(8, dtype=torch.uint8)}


@pytest.fixture
def shard(tmp_path) -> Path:
    write_shard(tmp_path / "model.safetensors", TENSORS)
    return tmp_path / "model.safetensors"


def with_header(path: Path, header: object, data: bytes = b"\0" * 56) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(start: int, stop: int) -> dict:
    return {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}


def test_a_good_shard_passes_and_reads_back(shard):
    assert set(read_safetensors_header(shard)) == {"a", "b"}
    found = dict(read_tensors(shard.parent))
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


def test_transposed_tensors_are_written_by_value(tmp_path):
    write_shard(tmp_path / "model.safetensors", {"t": TENSORS["a"].T})
    assert torch.equal(dict(read_tensors(tmp_path))["t"], TENSORS["a"].T)


@pytest.mark.parametrize("share", [0.9, 0.5, 0.02])
def test_a_cut_file_names_itself_and_the_sizes(shard, share):
    size = shard.stat().st_size
    os.truncate(shard, int(size * share))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*bytes"):
        check_safetensors(shard)


def test_an_empty_file(shard):
    os.truncate(shard, 0)
    with pytest.raises(CheckpointError, match="0 bytes found"):
        check_safetensors(shard)


def test_sixteen_extra_bytes(shard):
    shard.write_bytes(shard.read_bytes() + b"\0" * 16)
    with pytest.raises(CheckpointError, match="bytes follow the last tensor"):
        check_safetensors(shard)


def test_an_impossible_header_length(shard):
    shard.write_bytes(struct.pack("<Q", 1 << 40) + shard.read_bytes()[8:])
    with pytest.raises(CheckpointError, match=f"a header of {1 << 40} bytes announced"):
        check_safetensors(shard)


def test_overlapping_and_gapped_offsets_name_the_tensor(shard):
    with_header(shard, {"a": entry(0, 48), "b": entry(40, 56)})
    with pytest.raises(CheckpointError, match="tensor 'b' overlaps the tensor before it .begins at 40, expected 48"):
        check_safetensors(shard)
    with_header(shard, {"a": entry(0, 40), "b": entry(48, 56)})
    with pytest.raises(CheckpointError, match="tensor 'b' leaves a gap before it .begins at 48, expected 40"):
        check_safetensors(shard)


@pytest.mark.parametrize(
    "header", [[1, 2], {"a": 3}, {"a": {"dtype": "U8"}}, {"a": {"data_offsets": [0]}}, {"a": {"data_offsets": ["0", "56"]}}]
)
def test_a_header_of_another_structure(shard, header):
    with_header(shard, header)
    with pytest.raises(CheckpointError, match="no table of tensors"):
        check_safetensors(shard)


def test_a_header_that_is_no_json(shard):
    shard.write_bytes(struct.pack("<Q", 20) + b"x" * 60)
    with pytest.raises(CheckpointError, match="no table of tensors"):
        check_safetensors(shard)


def test_a_missing_file(tmp_path):
    with pytest.raises(ModelError, match="holds no model.safetensors"):
        shard_map(tmp_path)


def index(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)


def test_two_of_three_shards(tmp_path):
    for number in (1, 3):
        write_shard(tmp_path / f"part-{number}.safetensors", {f"t{number}": TENSORS["a"]})
    index(tmp_path, json.dumps({"weight_map": {f"t{number}": f"part-{number}.safetensors" for number in (1, 2, 3)}}))
    with pytest.raises(CheckpointError, match="names the shard 'part-2.safetensors', which is not there"):
        shard_map(tmp_path)
    write_shard(tmp_path / "part-2.safetensors", {"other": TENSORS["a"]})
    with pytest.raises(CheckpointError, match="part-2.safetensors holds 't2', which it does not"):
        shard_map(tmp_path)


@pytest.mark.parametrize("text", ['{"weight_map": {"a"', "[]", "{}", '{"weight_map": 3}'])
def test_a_broken_index_is_named(tmp_path, text):
    write_shard(tmp_path / "part-1.safetensors", TENSORS)
    index(tmp_path, text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        shard_map(tmp_path)
