# mypy: disable-error-code="no-untyped-def"
"""grouped_fp4_matmul: the fused experts of a mixture, tokens sorted by expert, with a plane for each token where tenants share them.

    y[t, o] = tensor_scale[e] * sum_k x[t, k] * e2m1(c[e, o, k]) * s[p(t), e, o, k // block] + b[e, o],   e = e(t)

offsets [E + 1] say which tokens are whose: offsets[e] .. offsets[e + 1] - 1 are expert e's, ascending from 0 to T; an expert may have none. The number of
token tiles is not known on the host without waiting for the device, so the grid holds their largest possible number, T / tokens + E; each program counts
through the offsets to find its expert and rows, and the surplus ones end at once. No host synchronization, so a call can be captured in a CUDA graph.

Legend: E experts, O rows, I columns, G = I / block scale blocks, T tokens, M planes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from itertools import pairwise

import torch

from prism_kernels.cpu import multi_plane_linear_cpu
from prism_kernels.dispatch import kernel_dtype, require, tl, triton, use_triton
from prism_kernels.formats import FLOATS, KernelFormat, decode_weight, kernel_format, require_input, require_weight, tensor_scale_of
from prism_kernels.matmul import Tile, load_planes, scales_sums, store_tile, tile_product, triton_dtype
from prism_kernels.multi_plane import PLANE_TILES, Planes, plane_addresses, require_index, require_planes

GROUPED_TILES = (
    Tile(8, 64, 128),
    Tile(16, 64, 128),
    Tile(64, 128, 64),
    Tile(128, 128, 64, warps=8),
)


def choose_grouped_tile(tokens: int, experts: int, planes: bool = False) -> Tile:
    """The tile for the mean number of tokens an expert; the same on every device and in every process. With planes, one of PLANE_TILES."""
    mean = -(-tokens // max(experts, 1))
    if planes:
        return replace(PLANE_TILES[0 if mean <= 8 else 1 if mean <= 32 else 2], splits=1)
    if mean <= 8:
        return GROUPED_TILES[0]
    if mean <= 32:
        return GROUPED_TILES[1]
    return GROUPED_TILES[2]


@triton.jit
def grouped_kernel(
    x_ptr, codes_ptr, planes_ptr, plane_stride, plane_ptr, offsets_ptr, y_ptr, tensor_scale_ptr, bias_ptr,
    n_tokens, n_experts, n_rows, n_columns, n_planes,
    PLANES: tl.constexpr, POINTERS: tl.constexpr, E8M0: tl.constexpr, BLOCK: tl.constexpr, SCALED_SUMS: tl.constexpr, HAS_BIAS: tl.constexpr,
    COMPUTE: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Programs (row tile, token tile). EXPERTS: a power of two of at least E."""
    pid = tl.program_id(1)
    expert_ids = tl.arange(0, EXPERTS)
    known = expert_ids < n_experts
    starts = tl.load(offsets_ptr + expert_ids, mask=known, other=0).to(tl.int32)
    ends = tl.load(offsets_ptr + expert_ids + 1, mask=known, other=0).to(tl.int32)
    tiles = (ends - starts + BLOCK_T - 1) // BLOCK_T
    last_tile = tl.cumsum(tiles, axis=0)
    expert = tl.sum((known & (last_tile <= pid)).to(tl.int32), axis=0)
    if expert < n_experts:
        mine = expert_ids == expert
        start = tl.sum(tl.where(mine, starts, 0), axis=0)
        end = tl.sum(tl.where(mine, ends, 0), axis=0)
        tile = pid - tl.sum(tl.where(mine, last_tile - tiles, 0), axis=0)
        tokens = start + tile * BLOCK_T + tl.arange(0, BLOCK_T)
        token_mask = tokens < end
        rows = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
        plane = tl.zeros((BLOCK_T,), dtype=tl.int32)
        if PLANES:
            plane = load_planes(plane_ptr, tokens, token_mask, n_planes)
        weight = expert.to(tl.int64) * n_rows
        acc = tile_product(
            x_ptr, codes_ptr + weight * (n_columns // 2), planes_ptr, plane_stride, weight * (n_columns // BLOCK), tokens, token_mask, plane, rows,
            n_rows, n_columns, n_planes, 0, n_columns,
            PLANES, POINTERS, E8M0, BLOCK, SCALED_SUMS, COMPUTE, BLOCK_T, BLOCK_O, BLOCK_K,
        )  # fmt: skip
        store_tile(
            acc, y_ptr, y_ptr, tl.load(tensor_scale_ptr + expert), bias_ptr + weight, tokens, token_mask, rows, n_tokens, n_rows, 0,
            E8M0, HAS_BIAS, 1,
        )  # fmt: skip


def launch_grouped(
    x: torch.Tensor,
    codes: torch.Tensor,
    planes: torch.Tensor,
    plane_index: torch.Tensor | None,
    offsets: torch.Tensor,
    tensor_scale: torch.Tensor,
    spec: KernelFormat,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    tile: Tile,
) -> torch.Tensor:
    """Run `grouped_kernel`. planes: scales [E, O, G], a stack [M, E, O, G], or int64 addresses [M]. Tensors are contiguous here."""
    (n_tokens, n_columns), (n_experts, n_rows) = x.shape, codes.shape[:2]
    tile = replace(tile, splits=1).check(spec, x.dtype)
    pointers = planes.dtype == torch.int64
    inputs = x.to(kernel_dtype(x.dtype))
    # Rows that no expert owns would stay as they are: NaN there shows offsets that do not end at T.
    y = torch.full((n_tokens, n_rows), torch.nan, dtype=kernel_dtype(out_dtype), device=x.device)
    grid = (triton.cdiv(n_rows, tile.rows), triton.cdiv(n_tokens, tile.tokens) + n_experts)
    if n_tokens and n_rows:
        grouped_kernel[grid](
            inputs, codes, planes, 0 if pointers else n_experts * n_rows * (n_columns // spec.block), plane_index, offsets, y, tensor_scale,
            y if bias is None else bias.to(kernel_dtype(bias.dtype)), n_tokens, n_experts, n_rows, n_columns, planes.shape[0],
            PLANES=plane_index is not None, POINTERS=pointers, E8M0=spec.e8m0, BLOCK=spec.block, SCALED_SUMS=scales_sums(spec, x.dtype),
            HAS_BIAS=bias is not None, COMPUTE=triton_dtype(inputs.dtype), EXPERTS=triton.next_power_of_2(n_experts),
            BLOCK_T=tile.tokens, BLOCK_O=tile.rows, BLOCK_K=tile.columns, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip
    return y.to(out_dtype)


def _grouped_cpu(
    x: torch.Tensor,
    codes: torch.Tensor,
    planes: Sequence[torch.Tensor],
    plane_index: torch.Tensor | None,
    offsets: torch.Tensor,
    tensor_scale: torch.Tensor,
    format: str,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Expert by expert through the CPU path of one linear."""
    bounds = offsets.tolist()
    require(
        bounds[0] == 0 and bounds[-1] == x.shape[0] and bounds == sorted(bounds),
        f"offsets must ascend from 0 to {x.shape[0]}, got {bounds}",
    )
    index = torch.zeros(x.shape[0], dtype=torch.int32) if plane_index is None else plane_index
    members = list(planes[0].unbind(0)) if planes[0].ndim == 4 else list(planes)
    y = x.new_empty((x.shape[0], codes.shape[1]))
    for e, (start, stop) in enumerate(pairwise(bounds)):
        if stop > start:
            y[start:stop] = multi_plane_linear_cpu(
                x[start:stop],
                codes[e],
                [plane[e] for plane in members],
                index[start:stop],
                tensor_scale[e],
                format,
                None if bias is None else bias[e],
            )
    return y


@torch.library.custom_op("prism_kernels::grouped_fp4_matmul", mutates_args=())
def _grouped_fp4_matmul(
    x: torch.Tensor,
    codes: torch.Tensor,
    planes: Sequence[torch.Tensor],
    plane_index: torch.Tensor | None,
    offsets: torch.Tensor,
    tensor_scale: torch.Tensor,
    format: str,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    tile: Sequence[int],
) -> torch.Tensor:
    if not use_triton(x):
        return _grouped_cpu(x, codes, planes, plane_index, offsets, tensor_scale, format, bias).to(out_dtype)
    members = [plane.contiguous() for plane in planes]  # named, so that copies live until the kernel is launched
    single = members[0].ndim == 4 or plane_index is None
    return launch_grouped(
        x.contiguous(),
        codes.contiguous(),
        members[0] if single else plane_addresses(members),
        None if plane_index is None else plane_index.contiguous(),
        offsets.contiguous(),
        tensor_scale,
        kernel_format(format),
        None if bias is None else bias.contiguous(),
        out_dtype,
        Tile(*tile) if tile else choose_grouped_tile(x.shape[0], codes.shape[0], plane_index is not None),
    )


@_grouped_fp4_matmul.register_fake
def _(x, codes, planes, plane_index, offsets, tensor_scale, format, bias, out_dtype, tile):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[0], codes.shape[1]), dtype=out_dtype)


def grouped_fp4_matmul(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: Planes,
    offsets: torch.Tensor,
    tensor_scale: torch.Tensor | float = 1.0,
    format: str = "nvfp4",
    bias: torch.Tensor | None = None,
    *,
    plane_index: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """y [T, O] in `out_dtype` (x's own unless given): each token under its expert's weight, accumulated in float32.

    x [T, I] sorted by expert; codes uint8 [E, O, I/2]; scales uint8 [E, O, G], or with plane_index a stack [M, E, O, G] or a list of M planes [E, O, G].
    offsets int32 or int64 [E + 1], ascending from 0 to T (ValueError on a CPU; on a GPU rows that no expert owns are NaN). tensor_scale: float32 [E],
    or one number for all. bias: float [E, O]. plane_index int32 or int64 [T] as in `multi_plane_matmul`. At most 1024 experts. Shapes and dtypes that do
    not fit raise ValueError.
    """
    if plane_index is None:
        require(isinstance(scales, torch.Tensor), "a list of planes needs a plane_index")
        assert isinstance(scales, torch.Tensor)
        require_weight(codes, scales, format, experts=True)
        members = [scales]
    else:
        members = require_planes(codes, scales, format, experts=True)
        require_index(plane_index, x.shape[0] if x.ndim else 0)
    experts = codes.shape[0]
    require(1 <= experts <= 1024, f"there are {experts} experts, the kernel takes 1 to 1024")
    require_input(x, codes.shape[2] * 2, bias, (experts, codes.shape[1]))
    require(offsets.dtype in (torch.int32, torch.int64), f"offsets are {offsets.dtype}, expected int32 or int64")
    require(tuple(offsets.shape) == (experts + 1,), f"offsets have shape {list(offsets.shape)}, expected [{experts + 1}]")
    dtype = x.dtype if out_dtype is None else out_dtype
    require(dtype in FLOATS, f"out_dtype is {dtype}, expected bfloat16, float16 or float32")
    scale = tensor_scale_of(tensor_scale, x.device, experts)
    return _grouped_fp4_matmul(x, codes, members, plane_index, offsets, scale, format, bias, dtype, list(astuple(tile)) if tile else [])


def grouped_fp4_matmul_ref(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: Planes,
    offsets: torch.Tensor,
    tensor_scale: torch.Tensor | float = 1.0,
    format: str = "nvfp4",
    bias: torch.Tensor | None = None,
    *,
    plane_index: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The same in plain torch and float32, token by token."""
    factors = tensor_scale_of(tensor_scale, x.device, codes.shape[0])
    y = x.new_empty((x.shape[0], codes.shape[1]), dtype=torch.float32)
    bounds = offsets.tolist()
    for e, (start, stop) in enumerate(pairwise(bounds)):
        for t in range(start, stop):
            plane = scales if plane_index is None else scales[max(int(plane_index[t]), 0)]
            y[t] = (decode_weight(codes[e], plane[e], format) @ x[t].float()) * factors[e]
            y[t] += 0 if bias is None else bias[e].float()
    return y.to(out_dtype or x.dtype)
