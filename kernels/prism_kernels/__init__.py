"""Triton kernels of prism-ray, each beside its PyTorch reference; plain torch where there is no GPU. Needs torch alone, and Triton on a GPU.

A name is imported at its first use: `prism_kernels.fp4_matmul` does not import the training kernels, and nothing imports Triton before a kernel module does.
"""

from __future__ import annotations

import importlib
from typing import Any

# A function may not have its module's name: the module, once imported, would stand in its place.
_HOMES = {
    "compiling": ("CompiledInfo", "compile_kernel", "require_fits"),
    "cpu": ("DequantCache", "linear_cpu", "multi_plane_linear_cpu"),
    "formats": ("decode_codes", "decode_scales", "decode_weight"),
    "gptq": ("gptq_block", "gptq_block_ref"),
    "grams": ("fill_upper", "gram", "gram_ref"),
    "grouped": ("grouped_fp4_matmul", "grouped_fp4_matmul_ref"),
    "layouts": ("from_layout", "linear_bytes", "marlin_bytes", "marlin_factor", "to_layout"),
    "matmul": ("Tile", "fp4_matmul", "fp4_matmul_ref"),
    "multi_plane": ("multi_plane_matmul", "multi_plane_matmul_ref"),
    "qast": ("ScaleLinear", "qast_scales", "qast_scales_ref", "scale_linear"),
    "quantize": ("quantize_rtn", "quantize_rtn_ref"),
    "scale_gradient": ("grad_input", "grad_input_ref", "scale_grad", "scale_grad_ref"),
    "swap": ("swap_planes", "swap_planes_ref"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_MODULES)  # noqa: PLE0605 - names from the one table


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"prism_kernels.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'prism_kernels' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
