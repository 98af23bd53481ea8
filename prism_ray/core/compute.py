"""Which dtype this machine multiplies fast in."""

from __future__ import annotations

from typing import Literal

import torch

DtypeName = Literal["auto", "float32", "bfloat16"]


def compute_dtype(name: DtypeName, device: str = "cpu") -> torch.dtype:
    """Resolve a dtype name; `auto` is bfloat16 on accelerators and on CPUs with bfloat16 instructions, else float32.

    A CPU without AVX512-BF16 or AMX emulates bfloat16 products: measured 7 to 40 times slower than float32 (docs/LOG.md, 2026-11-30).
    """
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    if device != "cpu":
        return torch.bfloat16
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32
