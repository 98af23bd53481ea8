"""Format specifications: data, not code. Everything that differs between NVFP4, MXFP4 and the integer groups is a field here.

Nothing infers a format from a dtype or a shape: a tensor carries its `FormatSpec`, a manifest its name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from prism_ray.core.errors import FormatError
from prism_ray.core.registry import Registry
from prism_ray.formats.codes import E2M1, INT3, INT4, CodeGrid
from prism_ray.formats.grids import BF16, E4M3, E8M0, ScaleGrid


@dataclass(frozen=True, kw_only=True)
class FormatSpec:
    """One weight format: 4-bit codes of the grid `codes` with block scales on `grid`.

    name: registry key and manifest value. block: columns that share a scale. has_tensor_scale: a float32 scalar multiplies every scale.
    amax_rule: the default rule from block maximum to scale byte. checkpoint_format: `quantization_config.format` of compressed-tensors.
    checkpoint_scale_dtype: dtype that checkpoint stores the scale bytes under.
    """

    name: str
    block: int
    codes: CodeGrid
    grid: ScaleGrid
    has_tensor_scale: bool
    amax_rule: str
    checkpoint_format: str
    checkpoint_scale_dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.has_tensor_scale and self.grid.width != 1:
            raise FormatError("a tensor scale would round a code times a two-byte scale twice in bfloat16", where=self.name)

    @property
    def is_fp4(self) -> bool:
        """Whether the codes are E2M1: the formats that scale adapters are made for."""
        return self.codes.name == E2M1.name

    def blocks(self, columns: int, where: str = "") -> int:
        """Number of scale blocks in a row of `columns`; raises FormatError with both numbers when they do not divide."""
        if columns % self.block:
            fitting = [other for other in FORMATS if columns % FORMATS[other].block == 0]
            raise FormatError(
                f"{columns} columns do not divide into {self.name} blocks of {self.block}",
                where=where,
                remedy=f"formats that fit: {', '.join(fitting)}" if fitting else "exclude the layer: no format fits",
            )
        return columns // self.block


FORMATS: Registry[FormatSpec] = Registry("format")

NVFP4 = FORMATS.add(
    "nvfp4",
    FormatSpec(
        name="nvfp4",
        block=16,
        codes=E2M1,
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
        codes=E2M1,
        grid=E8M0(),
        has_tensor_scale=False,
        amax_rule="even",
        checkpoint_format="mxfp4-pack-quantized",
        checkpoint_scale_dtype=torch.uint8,
    ),
)


def _integer(codes: CodeGrid, block: int) -> FormatSpec:
    """Groups of `block` signed integers under one bfloat16 scale. int3 is stored as the int4 codes that it is a part of."""
    name = f"{codes.name}-g{block}"
    spec = FormatSpec(
        name=name,
        block=block,
        codes=codes,
        grid=BF16(),
        has_tensor_scale=False,
        amax_rule="nearest",
        checkpoint_format="pack-quantized",
        checkpoint_scale_dtype=torch.bfloat16,
    )
    return FORMATS.add(name, spec)


INTEGER_FORMATS = tuple(_integer(codes, block) for codes, block in ((INT4, 32), (INT4, 64), (INT4, 128), (INT3, 64), (INT3, 128)))
FP4_FORMATS = tuple(name for name in FORMATS if FORMATS[name].is_fp4)
