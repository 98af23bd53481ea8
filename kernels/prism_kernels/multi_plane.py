"""multi_plane_matmul: one code plane, M resident scale planes, and a plane for each token.

    y[t, o] = tensor_scale * sum_k x[t, k] * e2m1(c[o, k]) * s[p(t), o, k // block] + b[o]

planes[0] is the base by convention; index -1, a token without an adapter, means planes[0] too. A tile of codes is read and decoded once, then scaled once for
each plane that the tile's tokens name, and multiplied with the tokens of that plane, the others being zero (float16 with MXFP4: each token's own scales are
gathered and multiply the unscaled partial sums). Tokens of more than one tile are sorted by plane first, so most tiles need one plane. Zeros add nothing:
a token's result has the bits of `fp4_matmul` under its plane alone with the same tile (finite x and weights: 0 * inf is NaN).

Bytes bound what is possible: M planes cost I * O * (1/2 + M / block) bytes, so eight NVFP4 planes read 16/9 of the bytes of one, MXFP4 24/17.
Legend: O rows, I columns, G = I / block scale blocks, T tokens, M planes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace

import torch

from prism_kernels.cpu import multi_plane_linear_cpu
from prism_kernels.dispatch import require, use_triton
from prism_kernels.formats import FLOATS, decode_weight, kernel_format, require_input, require_weight, tensor_scale_of
from prism_kernels.matmul import Tile, choose_tile, launch

Planes = torch.Tensor | Sequence[torch.Tensor]

# The loop over planes keeps a tile of codes in registers: larger tiles spill.
PLANE_TILES = (Tile(8, 64, 128, splits=4), Tile(16, 64, 128, splits=4), Tile(64, 64, 64))


def choose_plane_tile(tokens: int, rows: int, columns: int) -> Tile:
    """The tile for a shape; the same on every device and in every process."""
    return replace(choose_tile(tokens, rows, columns), rows=64) if tokens <= 16 else PLANE_TILES[2]


def plane_addresses(members: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64 [M] on the planes' device: the address of each. The planes must outlive every launch that uses it."""
    return torch.tensor([plane.data_ptr() for plane in members], dtype=torch.int64).to(members[0].device, non_blocking=True)


def token_order(plane_index: torch.Tensor, tile: Tile) -> torch.Tensor | None:
    """int32 [T]: tokens sorted by plane, or None where they fit one tile and their order does not matter."""
    if plane_index.shape[0] <= tile.tokens:
        return None
    return torch.argsort(plane_index.clamp(min=0), stable=True).to(torch.int32)


@torch.library.custom_op("prism_kernels::multi_plane_matmul", mutates_args=())
def _multi_plane_matmul(
    x: torch.Tensor,
    codes: torch.Tensor,
    planes: Sequence[torch.Tensor],
    plane_index: torch.Tensor,
    tensor_scale: torch.Tensor,
    format: str,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    tile: Sequence[int],
) -> torch.Tensor:
    stacked = planes[0].ndim == 3
    if not use_triton(x):
        return multi_plane_linear_cpu(x, codes, planes[0] if stacked else planes, plane_index, tensor_scale, format, bias).to(out_dtype)
    shape = Tile(*tile) if tile else choose_plane_tile(x.shape[0], codes.shape[0], x.shape[1])
    members = [plane.contiguous() for plane in planes]  # named, so that copies live until the kernel is launched
    table = members[0] if stacked else plane_addresses(members)
    index = plane_index.contiguous()
    contiguous = None if bias is None else bias.contiguous()
    return launch(
        x.contiguous(),
        codes.contiguous(),
        table,
        index,
        token_order(index, shape),
        tensor_scale,
        kernel_format(format),
        contiguous,
        out_dtype,
        shape,
    )


@_multi_plane_matmul.register_fake
def _(x, codes, planes, plane_index, tensor_scale, format, bias, out_dtype, tile):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[0], codes.shape[0]), dtype=out_dtype)


def require_planes(codes: torch.Tensor, planes: Planes, format: str, *, experts: bool = False) -> list[torch.Tensor]:
    """[the stack] or the M single planes, checked against the codes; ValueError otherwise."""
    if isinstance(planes, torch.Tensor):
        require(
            planes.ndim == codes.ndim + 1 and planes.shape[0] > 0,
            f"planes have shape {list(planes.shape)}, expected [M, *scales] with M > 0",
        )
        require_weight(codes, planes[0], format, experts=experts)
        return [planes]
    require(len(planes) > 0, "there is no plane")
    for plane in planes:
        require_weight(codes, plane, format, experts=experts)
    return list(planes)


def require_index(plane_index: torch.Tensor, tokens: int) -> None:
    """Raise ValueError unless plane_index is int32 or int64 [T]."""
    require(plane_index.dtype in (torch.int32, torch.int64), f"plane_index is {plane_index.dtype}, expected int32 or int64")
    require(tuple(plane_index.shape) == (tokens,), f"plane_index has shape {list(plane_index.shape)}, expected [{tokens}]")


def multi_plane_matmul(
    x: torch.Tensor,
    codes: torch.Tensor,
    planes: Planes,
    plane_index: torch.Tensor,
    tensor_scale: torch.Tensor | float = 1.0,
    format: str = "nvfp4",
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """y [T, O] in `out_dtype` (x's own unless given): token t under planes[plane_index[t]], accumulated in float32.

    x [T, I] bfloat16, float16 or float32; codes uint8 [O, I/2]; planes uint8 [M, O, G], or a list of M planes [O, G] that may lie anywhere (its table of
    addresses is copied to the device in every call: inside a CUDA graph pass a stack). plane_index int32 or int64 [T], -1 for planes[0].
    Shapes and dtypes that do not fit raise ValueError. An index outside -1 .. M-1 raises ValueError on a CPU; on a GPU, where a look would wait for the
    device, the rows of such tokens are NaN. The other arguments: see `fp4_matmul`.
    """
    members = require_planes(codes, planes, format)
    require_weight(codes, members[0][0] if members[0].ndim == 3 else members[0], format)
    require_input(x, codes.shape[1] * 2, bias, (codes.shape[0],))
    require_index(plane_index, x.shape[0])
    dtype = x.dtype if out_dtype is None else out_dtype
    require(dtype in FLOATS, f"out_dtype is {dtype}, expected bfloat16, float16 or float32")
    scale = tensor_scale_of(tensor_scale, x.device)
    return _multi_plane_matmul(x, codes, members, plane_index, scale, format, bias, dtype, list(astuple(tile)) if tile else [])


def multi_plane_matmul_ref(
    x: torch.Tensor,
    codes: torch.Tensor,
    planes: Planes,
    plane_index: torch.Tensor,
    tensor_scale: torch.Tensor | float = 1.0,
    format: str = "nvfp4",
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The same in plain torch and float32, token by token."""
    factor = tensor_scale_of(tensor_scale, x.device)
    y = x.new_empty((x.shape[0], codes.shape[0]), dtype=torch.float32)
    for t, m in enumerate(plane_index.clamp(min=0).tolist()):
        y[t] = (decode_weight(codes, planes[m], format) @ x[t].float()) * factor
    return (y if bias is None else y + bias.float()).to(out_dtype or x.dtype)
