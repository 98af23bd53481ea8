"""Which dtype this machine multiplies fast in."""

from __future__ import annotations

from typing import Literal

import torch

DtypeName = Literal["auto", "float32", "bfloat16"]


def compute_dtype(name: DtypeName, device: str = "cpu") -> torch.dtype:
    """Resolve a dtype name; `auto` is bfloat16 on accelerators and on CPUs with bfloat16 instructions, else float32.

    A CPU without AVX512-BF16 or AMX emulates bfloat16 products, several times slower than float32 (jobs/bench/cpu_products.py measures it).
    """
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    if device != "cpu":
        return torch.bfloat16
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32
