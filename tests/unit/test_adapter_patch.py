"""prism_ray.adapters.patch, residual and chunks: planes come back to the byte, the smallest coding wins, a wrong base or a damaged patch is refused."""

from __future__ import annotations

import hashlib
import json
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_ray.adapters import chunks, residual
from prism_ray.adapters import patch as patches
from prism_ray.adapters.chunks import ChunkIndex, chunks_of
from prism_ray.adapters.patch import Factors, decode_patch, encode_patch, read_patch, weight_planes
from prism_ray.adapters.qast import effective_scales
from prism_ray.core.errors import CheckpointError, FingerprintMismatch, FormatError, PrismError
from prism_ray.formats.spec import FORMATS
from prism_ray.formats.tensor import QuantTensor

KINDS = ("prefix", "dense", "mask", "gaps", "packed")
NVFP4, MXFP4 = FORMATS["nvfp4"], FORMATS["mxfp4"]


def random_base(
    seed: int = 0, rows: int = 64, groups: int = 16, layers: int = 3, low: int = 60, high: int = 110
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer{index}": torch.randint(low, high, (rows, groups), generator=generator, dtype=torch.uint8) for index in range(layers)}


def random_factors(base, spec=NVFP4, rank: int = 2, strength: float = 0.3, seed: int = 1) -> Factors:
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for name, plane in base.items():
        a = torch.randn(*plane.shape[:-2], rank, plane.shape[-1], generator=generator)
        b = torch.randn(*plane.shape[:-1], rank, generator=generator) * strength
        layers[name] = (a, b, 0.5)
    return Factors(layers=layers, format=spec)


def planes_of(base, factors: Factors) -> dict[str, torch.Tensor]:
    return {name: effective_scales(base[name], a, b, scaling, factors.format) for name, (a, b, scaling) in factors.layers.items()}


def same(first, second) -> bool:
    return set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_every_coding_gives_the_target_back(kind, data):
    size = data.draw(st.integers(1, 700))
    seed = data.draw(st.integers(0, 2**31))
    share = data.draw(st.sampled_from([0.0, 0.003, 0.2, 1.0]))
    generator = np.random.default_rng(seed)
    prediction = generator.integers(0, 256, size, dtype=np.uint8)
    target = prediction.copy()
    moved = generator.random(size) < share
    target[moved] = generator.integers(0, 256, int(moved.sum()), dtype=np.uint8)
    kinds, payload = residual.encode_residual(prediction, target, level=1, kinds=(kind,))
    assert kinds == (["same"] if np.array_equal(prediction, target) else [kind])
    assert np.array_equal(residual.decode_residual(prediction, kinds, payload), target)


def test_gaps_of_255_and_more_and_a_change_in_the_last_byte():
    prediction = np.zeros(2000, np.uint8)
    for positions in ([0], [254], [255], [256], [0, 255, 511, 1999], [509, 510, 1999]):
        target = prediction.copy()
        target[positions] = 7
        kinds, payload = residual.encode_residual(prediction, target, kinds=("gaps",))
        assert np.array_equal(residual.decode_residual(prediction, kinds, payload), target)


def test_segments_are_coded_apart(monkeypatch):
    monkeypatch.setattr(residual, "SEGMENT_BYTES", 100)
    prediction = np.arange(250, dtype=np.uint8)
    target = prediction.copy()
    target[120] += 1
    target[200:250] = np.random.default_rng(0).integers(0, 256, 50, dtype=np.uint8)
    kinds, payload = residual.encode_residual(prediction, target)
    assert len(kinds) == 3 and kinds[0] == "same" and kinds[1] != "same"
    assert np.array_equal(residual.decode_residual(prediction, kinds, payload), target)


def test_packed_comes_close_to_the_entropy_of_single_steps():
    generator = np.random.default_rng(3)
    size, share = 200_000, 0.2
    prediction = generator.integers(60, 110, size, dtype=np.uint8)
    steps = generator.choice(np.array([0, 1, 255], np.uint8), size, p=[1 - share, share / 2, share / 2])
    _, payload = residual.encode_residual(prediction, prediction + steps)
    entropy = -((1 - share) * math.log2(1 - share) + share * math.log2(share / 2)) * size / 8
    # Huffman on 4 symbols a byte loses at most 1 bit in 4, in practice a few hundredths; a tenth leaves room for the tables.
    assert entropy * 0.99 < len(payload) < entropy * 1.1
    plain = len(residual.encode_residual(prediction, prediction + steps, kinds=("prefix",))[1])
    assert len(payload) < plain / 1.5


@pytest.mark.parametrize("spec", [NVFP4, MXFP4], ids=["nvfp4", "mxfp4"])
@pytest.mark.parametrize("with_factors", [False, True])
def test_a_plane_comes_back_to_the_byte(spec, with_factors):
    base = random_base(rows=48, groups=24)
    factors = random_factors(base, spec, strength=1.5)
    target = planes_of(base, factors)
    assert not same(base, target)
    patch = encode_patch(base, target, factors=factors if with_factors else None)
    assert same(decode_patch(patch, base), target)
    info = read_patch(patch)
    assert info.bytes == len(patch) and info.plane_bytes == sum(plane.numel() for plane in target.values())
    assert info.bytes < info.plane_bytes


def test_the_smallest_prediction_wins():
    wide = random_base(rows=512, groups=256, layers=1)
    # Nearly everything moves: the differences cost much, a few bits for each factor and the bytes that their rounding moves little.
    factors = random_factors(wide, rank=8, strength=0.3)
    target = planes_of(wide, factors)
    low_rank = encode_patch(wide, target, factors=factors)
    plain = encode_patch(wide, target)
    assert read_patch(low_rank).model == "narrow" and read_patch(low_rank).factored == 1
    assert len(low_rank) < len(plain) / 2 and same(decode_patch(low_rank, wide), target)
    # A single changed byte: factors cannot pay.
    one = {name: plane.clone() for name, plane in wide.items()}
    one["layer0"][3, 5] += 1
    patch = encode_patch(wide, one, factors=factors)
    assert read_patch(patch).model == "base" and len(patch) < 500


def test_exact_factors_are_taken_when_they_are_smallest_and_never_when_they_miss_a_byte(monkeypatch):
    monkeypatch.setattr(patches, "NARROW_BITS", ())
    base = random_base(rows=512, groups=256, layers=1)
    factors = random_factors(base, rank=1, strength=1.0)
    target = planes_of(base, factors)
    patch = encode_patch(base, target, factors=factors)
    assert read_patch(patch).model == "factors" and set(read_patch(patch).kinds) == {"same"}
    assert same(decode_patch(patch, base), target)
    target["layer0"][0, 0] ^= 1
    missed = encode_patch(base, target, factors=factors)
    assert read_patch(missed).model == "base" and same(decode_patch(missed, base), target)


def test_factors_that_are_wrong_or_not_finite_cost_bytes_only():
    base = random_base()
    target = planes_of(base, random_factors(base))
    for factors in (
        random_factors(base, seed=9),
        Factors(layers={name: (torch.full((1, 16), math.nan), torch.ones(64, 1), 1.0) for name in base}, format=NVFP4),
    ):
        assert same(decode_patch(encode_patch(base, target, factors=factors), base), target)


def test_layers_that_the_target_lacks_and_fused_experts():
    base = random_base() | {"experts": torch.randint(60, 110, (4, 16, 8), generator=torch.Generator().manual_seed(5), dtype=torch.uint8)}
    factors = random_factors({"experts": base["experts"], "layer1": base["layer1"]})
    target = planes_of(base, factors)
    restored = decode_patch(encode_patch(base, target, factors=factors), base)
    assert set(restored) == {"experts", "layer1"} and same(restored, target)
    assert decode_patch(encode_patch(base, {}), base) == {}


def test_a_wrong_base_is_refused():
    base = random_base()
    patch = encode_patch(base, planes_of(base, random_factors(base)))
    other = {name: plane.clone() for name, plane in base.items()}
    other["layer2"][0, 0] ^= 1
    with pytest.raises(FingerprintMismatch, match="another base plane"):
        decode_patch(patch, other)
    with pytest.raises(FingerprintMismatch):
        decode_patch(patch, {name: base[name] for name in ("layer0", "layer1")})


def test_every_cut_and_every_flipped_bit_is_refused():
    base = random_base(rows=8, layers=2)
    patch = encode_patch(base, planes_of(base, random_factors(base)))
    for length in range(len(patch)):
        with pytest.raises(CheckpointError):
            decode_patch(patch[:length], base)
    for position in range(len(patch)):
        damaged = bytearray(patch)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(CheckpointError):
            decode_patch(bytes(damaged), base)
    with pytest.raises(CheckpointError):
        decode_patch(patch + b"\0", base)


def resealed(header: dict, body: bytes) -> bytes:
    return patches._pack(header, body)


def test_a_forged_patch_whose_own_digest_holds_is_a_one_line_error():
    """Somebody who can write the trailing SHA-256 still gets no traceback, no wrong plane and no bomb."""
    base = random_base(rows=8, layers=2)
    factors = random_factors(base, strength=2.0)
    patch = encode_patch(base, planes_of(base, factors))
    header, body = patches._unpack(patch)
    bomb = struct.pack("<I", 60) + residual.compress(bytes(1 << 26))[:60]
    forgeries = [
        (header | {"result_sha256": "0" * 64}, body),
        (header | {"layers": ["nowhere"]}, body),
        (header | {"layers": 3}, body),
        (header | {"kinds": ["unknown"]}, body),
        (header | {"kinds": []}, body),
        (header | {"kinds": ["mask"]}, body),
        (header | {"kinds": ["prefix"]}, bomb),
        (header | {"model": {"kind": "factors"}}, body),
        (header | {"model": {"kind": "narrow", "format": "nvfp4", "scaling": {"layer0": 1.0}}}, body),
        (header | {"model": 7}, body),
        (header | {"factor_bytes": 10**12, "factor_size": 10**12}, body),
        (header | {"factor_bytes": "many"}, body),
        (header, body[:-1]),
        (header, body + b"\0\0\0\0"),
    ]
    for fields, data in forgeries:
        with pytest.raises(PrismError) as caught:
            decode_patch(resealed(fields, data), base)
        assert "\n" not in str(caught.value)


def test_a_patch_of_a_newer_format_says_so():
    base = random_base(layers=1)
    patch = bytearray(encode_patch(base, base))
    patch[7] = 2
    sealed = bytes(patch[:-32]) + hashlib.sha256(bytes(patch[:-32])).digest()
    with pytest.raises(CheckpointError, match="update prism-ray"):
        decode_patch(sealed, base)


def test_planes_that_do_not_fit_are_refused():
    base = random_base(layers=1)
    with pytest.raises(FormatError, match="no such layer"):
        encode_patch(base, {"other": base["layer0"]})
    with pytest.raises(FormatError, match="layer0"):
        encode_patch(base, {"layer0": base["layer0"][:-1]})


def test_a_weight_space_patch_holds_codes_and_scales():
    generator = torch.Generator().manual_seed(0)

    def tensor(codes: torch.Tensor, scales: torch.Tensor) -> QuantTensor:
        return QuantTensor(codes=codes, scales=scales, tensor_scale=torch.ones(()), format=NVFP4)

    codes = torch.randint(0, 256, (32, 64), generator=generator, dtype=torch.uint8)
    scales = torch.randint(60, 100, (32, 8), generator=generator, dtype=torch.uint8)
    moved = torch.where(torch.rand(codes.shape, generator=generator) < 0.1, codes ^ 1, codes)
    base, merged = weight_planes({"w": tensor(codes, scales)}), weight_planes({"w": tensor(moved, scales + 1)})
    patch = encode_patch(base, merged)
    assert same(decode_patch(patch, base), merged) and set(base) == {"w.codes", "w.scales"}
    only_scales = encode_patch(base, weight_planes({"w": tensor(codes, scales + 1)}))
    assert len(only_scales) < len(patch)


def test_the_header_is_json_without_paths():
    base = random_base(layers=1)
    header, _ = patches._unpack(encode_patch(base, base))
    assert json.loads(json.dumps(header)) == header and header["layers"] is None


# --- chunks --------------------------------------------------------------------------------------------------------------------


def gear_ends(data: bytes) -> list[int]:
    """Ends of chunks by the definition, byte by byte."""
    table = [int.from_bytes(hashlib.shake_256(b"prism-ray gear table").digest(1024)[4 * i : 4 * i + 4], "little") for i in range(256)]
    ends, begin, value = [], 0, 0
    for index, byte in enumerate(data):
        value = ((value << 1) + table[byte]) & 0xFFFFFFFF
        length = index + 1 - begin
        if (length >= chunks.LEAST_BYTES and value & int(chunks._MASK) == 0) or length == chunks.MOST_BYTES:
            ends.append(index + 1)
            begin = index + 1
    return ends if begin == len(data) else [*ends, len(data)]


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 256)
    monkeypatch.setattr(chunks, "LEAST_BYTES", 64)
    monkeypatch.setattr(chunks, "MOST_BYTES", 1024)
    monkeypatch.setattr(chunks, "_MASK", np.uint32(255 << 24))


@pytest.mark.parametrize("size", [0, 1, 31, 63, 64, 5000, 20_000])
def test_content_defined_ends_are_those_of_the_definition(tmp_path, small_chunks, monkeypatch, size):
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes() + b"\0" * (size // 2)
    (tmp_path / "f").write_bytes(data)
    for block in (1 << 20, 1500):  # the ends do not depend on how the file is read
        monkeypatch.setattr(chunks, "_READ_BYTES", block)
        found = list(chunks_of(tmp_path / "f", "content"))
        assert b"".join(found) == data
        ends = [int(end) for end in np.cumsum([len(chunk) for chunk in found])]
        assert ends == (gear_ends(data) if data else [])


def test_an_insertion_moves_fixed_chunks_and_leaves_content_defined_ones(tmp_path, small_chunks):
    data = np.random.default_rng(1).integers(0, 256, 50_000, dtype=np.uint8).tobytes()
    (tmp_path / "a").write_bytes(data)
    (tmp_path / "b").write_bytes(data[:100] + b"inserted" + data[100:])
    new = {}
    for method in ("fixed", "content"):
        index = ChunkIndex(method)
        first = index.add([tmp_path / "a"])
        assert (first.bytes, first.unique_bytes) == (50_000, 50_000) and first.chunks == first.unique_chunks
        new[method] = index.add([tmp_path / "b"]).unique_bytes
        assert index.add([tmp_path / "a", tmp_path / "b"]).unique_bytes == 0
    assert new["fixed"] > 49_000 and new["content"] < 3000


def test_fixed_chunks_are_64_kib(tmp_path):
    (tmp_path / "f").write_bytes(bytes(150_000))
    assert [len(chunk) for chunk in chunks_of(tmp_path / "f")] == [65536, 65536, 150_000 - 131072]
    found = ChunkIndex().add([tmp_path / "f"])
    assert (found.chunks, found.unique_chunks, found.unique_bytes) == (3, 2, 150_000 - 65536)
