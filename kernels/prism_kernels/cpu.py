"""FP4 linears on a CPU: torch, no Triton. The path of the serving engine there, and of every public function on CPU tensors.

A weight is decoded in chunks of rows that stay in the processor's cache, and each chunk is multiplied at once: the bfloat16 weight never exists as a whole,
and its memory is the codes and one plane. The decoded weight is e2m1(code) * scale * tensor_scale in x's dtype, rounded once: bit for bit what
`QuantTensor.dequantize` gives, so this path and a dequantized model agree. (float16 is decoded in float32 and then rounded.)

`DequantCache` keeps decoded weights under a byte budget, least recently used out first, for a model that is served again and again where memory allows.
`multi_plane_linear_cpu` serves a batch of tenants: tokens are grouped by plane, and each group is multiplied as it would be alone, so a token's result
depends on no other tenant's tokens. (Like any linear it may depend, in the last bit, on how many tokens its own group has: libraries choose their loops by
shape.) Codes are decoded once for all planes of a chunk.

Legend: O rows, I columns, G = I / block scale blocks, T tokens, M planes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from prism_kernels.dispatch import require
from prism_kernels.formats import decode_codes, decode_scales, require_input, require_weight, tensor_scale_of

CHUNK_BYTES = 1 << 20  # decoded bytes a step: within a core's second-level cache, and enough rows that a call's overhead does not count


@dataclass(frozen=True)
class _Entry:
    """A cached weight. The planes are held so that their memory cannot be given to another tensor while their addresses are the key."""

    weight: torch.Tensor
    planes: tuple[torch.Tensor, ...]

    @property
    def size_bytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()


class DequantCache:
    """Decoded weights under a byte budget, least recently used out first.

    A weight is found by the address, shape and version of its codes and scales: torch counts a tensor's in-place changes, so a plane that `swap_planes`
    changed is decoded anew. Tensors made under torch.inference_mode have no such count; they are cached only under a `key` of the caller's, which
    must change with the plane (a digest, an adapter version). Not thread-safe: one cache a worker, as one model a worker.
    `hits`, `misses`, `evictions`, `refused` (weights larger than the budget, or without a usable key) count since construction.
    """

    def __init__(self, budget_bytes: int) -> None:
        require(budget_bytes >= 0, f"budget_bytes is {budget_bytes}, must not be negative")
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.hits = self.misses = self.evictions = self.refused = 0
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(
        self, codes: torch.Tensor, scales: torch.Tensor, rest: Hashable, make: Callable[[], torch.Tensor], key: Hashable = None
    ) -> torch.Tensor | None:
        """The cached weight, made and kept on a miss; None where it will not be kept, so that the caller goes by chunks.

        rest: what else the weight depends on (format, tensor scale, dtype). key: names the plane in place of its address and version.
        """
        identity = _identity(codes, scales, key)
        if identity is None:
            self.refused += 1
            return None
        name = (identity, rest)
        if name in self._entries:
            self.hits += 1
            self._entries.move_to_end(name)
            return self._entries[name].weight
        if codes.numel() * 2 * rest_itemsize(rest) > self.budget_bytes:
            self.refused += 1
            return None
        self.misses += 1
        entry = _Entry(make(), (codes,) if key is not None else (codes, scales))
        while self._entries and self.used_bytes + entry.size_bytes > self.budget_bytes:
            self._remove(next(iter(self._entries)))
            self.evictions += 1
        self._entries[name] = entry
        self.used_bytes += entry.size_bytes
        return entry.weight

    def drop(self, codes: torch.Tensor) -> int:
        """Forget every weight of these codes, and let go of its planes; returns how many. Call it when a layer or a plane is taken out of service."""
        names = [name for name, entry in self._entries.items() if entry.planes[0].data_ptr() == codes.data_ptr()]
        for name in names:
            self._remove(name)
        return len(names)

    def forget(self, key: Hashable) -> int:
        """Forget every weight that was cached under a `key`; returns how many."""
        names = [name for name in self._entries if isinstance(name, tuple) and name[0][-1] == key]  # type: ignore[index]
        for name in names:
            self._remove(name)
        return len(names)

    def clear(self) -> None:
        """Forget everything; the counters stay."""
        self._entries.clear()
        self.used_bytes = 0

    def _remove(self, name: Hashable) -> None:
        self.used_bytes -= self._entries.pop(name).size_bytes


def rest_itemsize(rest: Hashable) -> int:
    """Bytes of one decoded number, from the dtype that stands first in `rest`."""
    assert isinstance(rest, tuple) and isinstance(rest[0], torch.dtype)
    return rest[0].itemsize


def _identity(codes: torch.Tensor, scales: torch.Tensor, key: Hashable) -> Hashable:
    """What a cached weight is found by; None where a change in place could not be seen."""
    if key is not None:
        return (codes.data_ptr(), tuple(codes.shape), key)
    if codes.is_inference() or scales.is_inference():
        return None
    return tuple((plane.data_ptr(), tuple(plane.shape), plane.stride(), plane._version) for plane in (codes, scales))


def scaled(values: torch.Tensor, scales: torch.Tensor, tensor_scale: float, format: str, dtype: torch.dtype) -> torch.Tensor:
    """Decoded codes [O, I] (float32 or bfloat16; not changed) times one plane's scales [O, G] and the tensor scale, in `dtype`."""
    blocks = values.view(*scales.shape, -1) * decode_scales(scales, format).to(values.dtype).unsqueeze(-1)
    weight = blocks.view(values.shape)
    return (weight if tensor_scale == 1.0 else weight.mul_(tensor_scale)).to(dtype)


def _decoded_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def decode_linear(codes: torch.Tensor, scales: torch.Tensor, tensor_scale: float, format: str, dtype: torch.dtype) -> torch.Tensor:
    """The whole weight [O, I] in `dtype`, made chunk by chunk so that no second copy of it is needed."""
    weight = torch.empty((codes.shape[0], codes.shape[1] * 2), dtype=dtype, device=codes.device)
    for start, stop in _chunks(codes, dtype):
        values = decode_codes(codes[start:stop], _decoded_dtype(dtype))
        weight[start:stop] = scaled(values, scales[start:stop], tensor_scale, format, dtype)
    return weight


def _chunks(codes: torch.Tensor, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Row ranges of about CHUNK_BYTES decoded bytes."""
    rows = max(1, CHUNK_BYTES // max(1, codes.shape[1] * 2 * _decoded_dtype(dtype).itemsize))
    return [(start, min(start + rows, codes.shape[0])) for start in range(0, codes.shape[0], rows)]


def linear_cpu(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    tensor_scale: torch.Tensor | float = 1.0,
    format: str = "nvfp4",
    bias: torch.Tensor | None = None,
    *,
    cache: DequantCache | None = None,
    key: Hashable = None,
) -> torch.Tensor:
    """linear(x [T, I], weight, bias) in x's dtype with the weight decoded on the way; codes uint8 [O, I/2], scales uint8 [O, G].

    cache: where decoded weights are kept; key: the plane's name there (see DequantCache). Shapes and dtypes that do not fit raise ValueError.
    """
    index = torch.zeros(x.shape[0] if x.ndim else 0, dtype=torch.int32)
    keys = None if key is None else [key]
    return multi_plane_linear_cpu(x, codes, [scales], index, tensor_scale, format, bias, cache=cache, keys=keys)


def multi_plane_linear_cpu(
    x: torch.Tensor,
    codes: torch.Tensor,
    planes: torch.Tensor | Sequence[torch.Tensor],
    plane_index: torch.Tensor,
    tensor_scale: torch.Tensor | float = 1.0,
    format: str = "nvfp4",
    bias: torch.Tensor | None = None,
    *,
    cache: DequantCache | None = None,
    keys: Sequence[Hashable] | None = None,
) -> torch.Tensor:
    """y [T, O] in x's dtype: token t is multiplied with the codes under planes[plane_index[t]]; -1 is planes[0], the base.

    planes: uint8 [M, O, G], or M tensors [O, G]. plane_index: int32 or int64 [T]; one outside -1 .. M-1 raises ValueError.
    keys: one name a plane for `cache`. Only planes that some token names are decoded; a token's row is bit for bit that of a call with its own group alone.
    """
    members = list(planes.unbind(0)) if isinstance(planes, torch.Tensor) and planes.ndim == 3 else list(planes)
    require(len(members) > 0, "there is no plane")
    for plane in members:
        require_weight(codes, plane, format)
    require_input(x, codes.shape[1] * 2, bias, (codes.shape[0],))
    require(keys is None or len(keys) == len(members), f"there are {len(keys or ())} keys for {len(members)} planes")
    groups = _groups(plane_index, x.shape[0], len(members))
    factor = float(tensor_scale_of(tensor_scale, torch.device("cpu")))
    added = None if bias is None else bias.to(x.dtype)
    rest = (x.dtype, format, factor)
    y = x.new_empty((x.shape[0], codes.shape[0]))
    chunked: list[tuple[int, torch.Tensor]] = []
    for m, tokens in groups:
        weight = None
        if cache is not None:
            make = _maker(codes, members[m], factor, format, x.dtype)
            weight = cache.get(codes, members[m], rest, make, None if keys is None else keys[m])
        if weight is None:
            chunked.append((m, tokens))
        else:
            y[tokens] = linear(x[tokens], weight, added)
    if chunked:
        inputs = [x[tokens] for _, tokens in chunked]
        for start, stop in _chunks(codes, x.dtype):
            values = decode_codes(codes[start:stop], _decoded_dtype(x.dtype))
            part = None if added is None else added[start:stop]
            for (m, tokens), rows in zip(chunked, inputs, strict=True):
                weight = scaled(values, members[m][start:stop], factor, format, x.dtype)
                y[tokens, start:stop] = linear(rows, weight, part)
    return y


def _maker(codes: torch.Tensor, scales: torch.Tensor, factor: float, format: str, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    return lambda: decode_linear(codes, scales, factor, format, dtype)


def _groups(plane_index: torch.Tensor, tokens: int, planes: int) -> list[tuple[int, torch.Tensor]]:
    """(plane, its tokens in order) for every plane that some token names."""
    require(plane_index.dtype in (torch.int32, torch.int64), f"plane_index is {plane_index.dtype}, expected int32 or int64")
    require(tuple(plane_index.shape) == (tokens,), f"plane_index has shape {list(plane_index.shape)}, expected [{tokens}]")
    bad = ((plane_index < -1) | (plane_index >= planes)).nonzero().flatten()
    if bad.numel():
        raise ValueError(f"token {int(bad[0])} names plane {int(plane_index[bad[0]])}; there are {planes}, and -1 for the base")
    index = plane_index.clamp(min=0)
    return [(int(m), (index == m).nonzero().squeeze(1)) for m in index.unique()]
