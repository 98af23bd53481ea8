"""What is left of a byte plane after a prediction of it, in as few bytes as the best of six codings needs.

Planes are cut into segments of 4 MiB, each coded on its own against the same span of the prediction, so memory stays bounded and a plane of a 100B model
costs what its parts cost. d = target - prediction mod 256.

| kind | streams, each a zstd frame |
|---|---|
| same | none: d is zero everywhere |
| prefix | the target, with the prediction as raw-content dictionary (what `zstd --patch-from` does) |
| dense | d |
| mask | one bit a byte: changed or not; the values of d that are not zero |
| gaps | distances between changed bytes, 255 meaning "255 and go on"; the values |
| packed | two bits a byte (0: d = 0, 1: +1, 2: -1, 3: other), four to a byte; the other values |

Scales of an FP4 grid that was trained move by few steps, so `packed` comes close to the entropy of {0, +1, -1}, below which no coding of single bytes goes.
All codings are tried at a fast level and the two smallest again at the level asked for; the smaller one is kept.
Every length is bounded by what the caller knows of the plane before anything is unpacked.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import zstandard

from prism_ray.core.errors import CheckpointError

Bytes = npt.NDArray[np.uint8]
SEGMENT_BYTES = 1 << 22
LEVEL = 19
_WINDOW_LOG = 24  # the prediction and the target of a segment, side by side
_TRIAL_LEVEL, _FINALISTS = 3, 2
_DAMAGED = "fetch the patch again"


def encode_residual(
    prediction: Bytes, target: Bytes, *, level: int = LEVEL, kinds: tuple[str, ...] | None = None
) -> tuple[list[str], bytes]:
    """(kind of each segment, payload) for two planes uint8 [N]. kinds: the codings to choose from, all by default."""
    chosen: list[str] = []
    out: list[bytes] = []
    for begin in range(0, len(target), SEGMENT_BYTES):
        span = slice(begin, begin + SEGMENT_BYTES)
        kind, data = _encode_segment(prediction[span], target[span], level, kinds or tuple(_CODINGS))
        chosen.append(kind)
        out.append(struct.pack("<I", len(data)) + data)
    return chosen, b"".join(out)


def decode_residual(prediction: Bytes, kinds: list[str], payload: bytes) -> Bytes:
    """The target uint8 [N]; the inverse of `encode_residual`. Raises CheckpointError for a payload that is not one."""
    if len(kinds) != -(-len(prediction) // SEGMENT_BYTES):
        raise _damaged(f"{len(kinds)} segments for {len(prediction)} bytes")
    target = np.empty_like(prediction)
    position = 0
    for index, kind in enumerate(kinds):
        span = slice(index * SEGMENT_BYTES, (index + 1) * SEGMENT_BYTES)
        data, position = _take(payload, position)
        if kind != "same" and kind not in _CODINGS:
            raise _damaged(f"unknown coding '{kind}'")
        target[span] = prediction[span] if kind == "same" else _CODINGS[kind][1](prediction[span], data)
    if position != len(payload):
        raise _damaged("bytes follow the last segment")
    return target


def _encode_segment(prediction: Bytes, target: Bytes, level: int, kinds: tuple[str, ...]) -> tuple[str, bytes]:
    if np.array_equal(prediction, target):
        return "same", b""
    if len(kinds) > _FINALISTS and level > _TRIAL_LEVEL:
        # The order of the codings hardly depends on the level, their time by a hundredfold.
        kinds = tuple(sorted(kinds, key=lambda kind: len(_CODINGS[kind][0](prediction, target, _TRIAL_LEVEL)))[:_FINALISTS])
    coded = [(kind, _CODINGS[kind][0](prediction, target, level)) for kind in kinds]
    return min(coded, key=lambda item: len(item[1]))


def compress(data: bytes, level: int = LEVEL) -> bytes:
    """One zstd frame that says how long its content is."""
    return zstandard.ZstdCompressor(level=level).compress(data)


def decompress(data: bytes, most: int, dictionary: bytes | None = None) -> bytes:
    """The content of a frame made by `compress`, of at most `most` bytes. Raises CheckpointError."""
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= most:
            raise _damaged(f"a stream announces {size} bytes, at most {most} are possible")
        raw = None if dictionary is None else zstandard.ZstdCompressionDict(dictionary, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
        return zstandard.ZstdDecompressor(dict_data=raw, max_window_size=1 << _WINDOW_LOG).decompress(data, max_output_size=max(size, 1))
    except zstandard.ZstdError as error:
        raise _damaged(f"a stream does not unpack ({error})") from None


def _join(*streams: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(stream)) + stream for stream in streams)


def _take(payload: bytes, position: int) -> tuple[bytes, int]:
    """The stream at `position` and where the next one begins."""
    if position + 4 > len(payload):
        raise _damaged("a stream is cut off")
    end = position + 4 + struct.unpack_from("<I", payload, position)[0]
    if end > len(payload):
        raise _damaged("a stream is cut off")
    return payload[position + 4 : end], end


def _pair(data: bytes, most_first: int, most_second: int) -> tuple[Bytes, Bytes]:
    first, position = _take(data, 0)
    second, position = _take(data, position)
    if position != len(data):
        raise _damaged("bytes follow the last stream")
    return np.frombuffer(decompress(first, most_first), np.uint8), np.frombuffer(decompress(second, most_second), np.uint8)


def _damaged(what: str) -> CheckpointError:
    return CheckpointError(what, where="patch", remedy=_DAMAGED)


def _sized(values: Bytes, size: int, what: str) -> Bytes:
    if len(values) != size:
        raise _damaged(f"{len(values)} {what}, expected {size}")
    return values


def _prefix(prediction: Bytes, target: Bytes, level: int) -> bytes:
    dictionary = zstandard.ZstdCompressionDict(prediction.tobytes(), dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    parameters = zstandard.ZstdCompressionParameters.from_level(
        level, window_log=_WINDOW_LOG, source_size=len(target), dict_size=len(prediction), enable_ldm=True
    )
    return zstandard.ZstdCompressor(dict_data=dictionary, compression_params=parameters).compress(target.tobytes())


def _unprefix(prediction: Bytes, data: bytes) -> Bytes:
    return _sized(np.frombuffer(decompress(data, len(prediction), prediction.tobytes()), np.uint8), len(prediction), "bytes")


def _dense(prediction: Bytes, target: Bytes, level: int) -> bytes:
    return compress((target - prediction).tobytes(), level)


def _undense(prediction: Bytes, data: bytes) -> Bytes:
    return prediction + _sized(np.frombuffer(decompress(data, len(prediction)), np.uint8), len(prediction), "differences")


def _mask(prediction: Bytes, target: Bytes, level: int) -> bytes:
    difference = target - prediction
    changed = difference != 0
    return _join(compress(np.packbits(changed).tobytes(), level), compress(difference[changed].tobytes(), level))


def _unmask(prediction: Bytes, data: bytes) -> Bytes:
    size = len(prediction)
    bits, values = _pair(data, -(-size // 8), size)
    changed = np.unpackbits(_sized(bits, -(-size // 8), "bytes of mask"), count=size).astype(bool)
    return _added(prediction, np.flatnonzero(changed), values)


def _gaps(prediction: Bytes, target: Bytes, level: int) -> bytes:
    difference = target - prediction
    positions = np.flatnonzero(difference)
    gaps = np.diff(positions, prepend=-1) - 1
    whole = gaps // 255
    coded = np.full(int((whole + 1).sum()), 255, np.uint8)
    coded[np.cumsum(whole + 1) - 1] = gaps % 255
    return _join(compress(coded.tobytes(), level), compress(difference[positions].tobytes(), level))


def _ungaps(prediction: Bytes, data: bytes) -> Bytes:
    # A gap of 255 k takes k bytes more than one of 0, and skips 255 k places: never more bytes than places.
    coded, values = _pair(data, 2 * len(prediction) + 1, len(prediction))
    ends = np.flatnonzero(coded != 255)
    positions = np.cumsum(coded, dtype=np.int64)[ends] + np.arange(len(ends))
    if len(positions) and positions[-1] >= len(prediction):
        raise _damaged("a change lies behind the plane's end")
    return _added(prediction, positions, values)


def _packed(prediction: Bytes, target: Bytes, level: int) -> bytes:
    difference = target - prediction
    symbols = _SYMBOLS[difference]
    padded = np.zeros(-(-len(symbols) // 4) * 4, np.uint8)
    padded[: len(symbols)] = symbols
    quads = padded.reshape(-1, 4)
    packed = quads[:, 0] | quads[:, 1] << 2 | quads[:, 2] << 4 | quads[:, 3] << 6
    return _join(compress(packed.tobytes(), level), compress(difference[symbols == 3].tobytes(), level))


def _unpacked(prediction: Bytes, data: bytes) -> Bytes:
    size = len(prediction)
    packed, others = _pair(data, -(-size // 4), size)
    _sized(packed, -(-size // 4), "bytes of symbols")
    symbols = np.stack([packed & 3, packed >> 2 & 3, packed >> 4 & 3, packed >> 6], axis=1).reshape(-1)[:size]
    target: Bytes = prediction + _STEPS[symbols]
    return _added(target, np.flatnonzero(symbols == 3), others)


def _added(prediction: Bytes, positions: npt.NDArray[np.int64], values: Bytes) -> Bytes:
    target = prediction.copy()
    target[positions] += _sized(values, len(positions), "values")
    return target


_SYMBOLS = np.full(256, 3, np.uint8)
_SYMBOLS[[0, 1, 255]] = [0, 1, 2]
_STEPS = np.array([0, 1, 255, 0], np.uint8)
_CODINGS: dict[str, tuple[Callable[[Bytes, Bytes, int], bytes], Callable[[Bytes, bytes], Bytes]]] = {
    "prefix": (_prefix, _unprefix),
    "dense": (_dense, _undense),
    "mask": (_mask, _unmask),
    "gaps": (_gaps, _ungaps),
    "packed": (_packed, _unpacked),
}
