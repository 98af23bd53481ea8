"""Block-scaled float8 weights as DeepSeek stores them, and its packed FP4 experts.

    w[o, i] = weight[o, i] * s[o // R, i // C]        weight float8_e4m3fn or e5m2 [..., O, I], blocks of R x C (128 x 128), s float32, bfloat16 or E8M0

Products are taken in float32. Refuses weights that are not finite, scales that are negative or not finite, and scales of another shape.
"""

from __future__ import annotations

import math

import torch

from prism_ray.core.errors import CheckpointError
from prism_ray.formats.grids import require_legal
from prism_ray.formats.safetensors_io import REWRITE
from prism_ray.formats.spec import MXFP4
from prism_ray.formats.tensor import QuantTensor

FP8_BLOCK = (128, 128)
"""Rows and columns of a block where the config names none."""


def fp8_dequantize(
    weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, ...], name: str, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """W[..., o, i] = weight[..., o, i] * scale[..., o // block[0], i // block[1]], multiplied in float32 and rounded once to dtype.

    weight: float8 [..., O, I]. scale: [..., ceil(O / block[0]), ceil(I / block[1])], or one number (or one a matrix) for the whole.
    """
    rows, columns = weight.shape[-2:] if weight.ndim > 1 else (1, weight.shape[-1])
    expected = (*weight.shape[:-2], math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    # E4M3 has one NaN and no infinity; in E5M2 all magnitudes from 0x7C on are neither.
    if int((weight.view(torch.uint8) & 0x7F).max()) >= (0x7F if weight.dtype == torch.float8_e4m3fn else 0x7C):
        raise CheckpointError("a weight is not finite", where=name, remedy=REWRITE)
    values = _scale_values(scale, name)
    if values.numel() == math.prod(weight.shape[:-2]) and tuple(values.shape) != expected:
        return (weight.to(torch.float32) * values.reshape(*weight.shape[:-2], 1, 1)).to(dtype).reshape(weight.shape)
    if tuple(values.shape) != expected:
        raise CheckpointError(
            f"the scales have shape {list(values.shape)}, a weight {list(weight.shape)} in blocks of {list(block)} needs {list(expected)}",
            where=name,
        )
    out = torch.empty(weight.shape, dtype=dtype)
    flat, flat_out = weight.reshape(-1, rows, columns), out.view(-1, rows, columns)
    for matrix, scales, target in zip(flat, values.reshape(-1, *expected[-2:]), flat_out, strict=True):
        wide = scales.repeat_interleave(block[1], dim=1)[:, :columns]
        # Band by band: a whole float32 copy of a large matrix is never alive beside its result.
        for band in range(expected[-2]):
            span = slice(band * block[0], (band + 1) * block[0])
            target[span] = matrix[span].to(torch.float32) * wide[band]
    return out


def packed_fp4(weight: torch.Tensor, scale: torch.Tensor, name: str) -> QuantTensor:
    """Codes int8 or uint8 [..., O, I/2] with E8M0 scales [..., O, I/32], as DeepSeek-V4 stores its experts. Raises CheckpointError for other scales."""
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise CheckpointError(f"scales of packed FP4 have dtype {scale.dtype}, expected E8M0", where=name)
    tensor = QuantTensor(
        codes=weight.view(torch.uint8), scales=scale.view(torch.uint8), tensor_scale=torch.ones(weight.shape[:-2]), format=MXFP4
    )
    tensor.validate(name)
    return tensor


def _scale_values(scale: torch.Tensor, name: str) -> torch.Tensor:
    """Block scales as float32; E8M0 bytes, typed or as uint8, are powers of two."""
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        data = scale.view(torch.uint8)
        require_legal(MXFP4.grid, data.reshape(-1, data.shape[-1] if data.ndim else 1), name)
        return MXFP4.grid.decode(data)
    values = scale.to(torch.float32)
    if not bool((torch.isfinite(values) & (values >= 0)).all()):
        raise CheckpointError("a scale is negative or not finite", where=name, remedy=REWRITE)
    return values
