"""Format specifications: data, not code. Everything that differs between NVFP4 and MXFP4 is a field here.

Nothing infers a format from a dtype or a shape: a tensor carries its `FormatSpec`, a manifest its name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from prism_ray.core.errors import FormatError
from prism_ray.core.registry import Registry
from prism_ray.formats.grids import E4M3, E8M0, ScaleGrid


@dataclass(frozen=True, kw_only=True)
class FormatSpec:
    """One weight format: E2M1 codes with block scales on `grid`.

    name: registry key and manifest value. block: columns that share a scale. has_tensor_scale: a float32 scalar multiplies every scale.
    amax_rule: the default rule from block maximum to scale byte. checkpoint_format: `quantization_config.format` of compressed-tensors.
    checkpoint_scale_dtype: dtype that checkpoint stores the scale bytes under.
    """

    name: str
    block: int
    grid: ScaleGrid
    has_tensor_scale: bool
    amax_rule: str
    checkpoint_format: str
    checkpoint_scale_dtype: torch.dtype

    def blocks(self, columns: int, where: str = "") -> int:
        """Number of scale blocks in a row of `columns`; raises FormatError with both numbers when they do not divide."""
        if columns % self.block:
            fitting = [other for other in FORMATS if columns % FORMATS[other].block == 0]
            raise FormatError(
                f"{columns} columns do not divide into {self.name} blocks of {self.block}",
                where=where,
                remedy=f"formats that fit: {', '.join(fitting)}" if fitting else "exclude the layer: no FP4 format fits",
            )
        return columns // self.block


FORMATS: Registry[FormatSpec] = Registry("format")

NVFP4 = FORMATS.add(
    "nvfp4",
    FormatSpec(
        name="nvfp4",
        block=16,
        grid=E4M3(),
        has_tensor_scale=True,
        amax_rule="nearest",
        checkpoint_format="nvfp4-pack-quantized",
        checkpoint_scale_dtype=torch.float8_e4m3fn,
    ),
)
MXFP4 = FORMATS.add(
    "mxfp4",
    FormatSpec(
        name="mxfp4",
        block=32,
        grid=E8M0(),
        has_tensor_scale=False,
        amax_rule="even",
        checkpoint_format="mxfp4-pack-quantized",
        checkpoint_scale_dtype=torch.uint8,
    ),
)
