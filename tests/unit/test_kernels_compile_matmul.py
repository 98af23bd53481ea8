"""Every configuration of the matrix kernels compiles, without a GPU, for the targets that are served: no spill, and shared memory within a block's limit.

Triton keeps the cubins in its cache, so only the first run compiles. What is compiled is what `launch` asks for: the tiles of the spaces, in the dtype and format that are most used; the other formats and dtypes on one tile each, since they change the decoding, not the shape.
"""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET", "0") == "1":
    pytest.skip("the interpreter has replaced the compiler in this process", allow_module_level=True)

from prism_kernels.compiling import SHARED_LIMIT, TARGETS, compile_kernel
from prism_kernels.dispatch import tl
from prism_kernels.grouped import GROUPED_TILES, choose_grouped_tile, grouped_kernel
from prism_kernels.matmul import DECODE_TILES, PREFILL_TILES, Tile, choose_tile, finish_kernel, fp4_matmul_kernel
from prism_kernels.multi_plane import PLANE_TILES, choose_plane_tile
from prism_kernels.swap import swap_kernel

CODES = {"nvfp4": (False, 16), "mxfp4": (True, 32)}


def check(name: str, kernel, signature: dict[str, str], constants: dict[str, object], cc: int, warps: int = 4, stages: int = 3) -> None:
    full = {argument: "constexpr" if argument in constants else signature[argument] for argument in kernel.arg_names}
    info = compile_kernel(kernel, full, constants, cc, num_warps=warps, num_stages=stages)
    print(f"{name} sm_{cc}: {info.registers} registers, {info.shared_bytes} bytes shared, {info.spills} spills, cubin {info.cubin_bytes}")
    assert info.spills == 0, f"{name} spills {info.spills} bytes on sm_{cc}"
    assert info.shared_bytes <= SHARED_LIMIT[cc], f"{name} asks for {info.shared_bytes} bytes of shared memory on sm_{cc}"
    assert info.cubin_bytes > 0
    assert 0 < info.registers <= 255


# ":16": what a launch finds divisible by 16: columns always, since blocks are; rows in every layer whose width is.
def pointers(dtype: str, addresses: bool) -> dict[str, str]:
    return {
        "x_ptr": f"*{dtype}", "codes_ptr": "*u8", "planes_ptr": "*i64" if addresses else "*u8", "plane_stride": "i64:16", "plane_ptr": "*i32",
        "order_ptr": "*i32", "offsets_ptr": "*i32", "y_ptr": f"*{dtype}", "partial_ptr": "*fp32", "tensor_scale_ptr": "*fp32",
        "bias_ptr": f"*{dtype}", "n_tokens": "i32", "n_experts": "i32", "n_rows": "i32:16", "n_columns": "i32:16", "n_planes": "i32",
        "columns_a_split": "i32:16",
    }  # fmt: skip


def matmul(tile: Tile, cc: int, *, planes: bool, format: str = "nvfp4", dtype: str = "bf16", addresses: bool = False) -> None:
    e8m0, block = CODES[format]
    scaled_sums = e8m0 and dtype == "fp16"
    constants = {
        "PLANES": planes, "POINTERS": addresses, "ORDERED": planes, "E8M0": e8m0, "BLOCK": block, "SCALED_SUMS": scaled_sums, "HAS_BIAS": True,
        "SPLITS": tile.splits, "COMPUTE": {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[dtype], "BLOCK_T": tile.tokens,
        "BLOCK_O": tile.rows, "BLOCK_K": block if scaled_sums else tile.columns,
    }  # fmt: skip
    if not planes:
        constants |= {"plane_ptr": None, "order_ptr": None}
    name = f"fp4_matmul {format} {dtype} {'planes ' if planes else ''}{tile}"
    check(name, fp4_matmul_kernel, pointers(dtype, addresses), constants, cc, tile.warps, tile.stages)


def grouped(tile: Tile, cc: int, *, planes: bool) -> None:
    constants = {
        "PLANES": planes, "POINTERS": False, "E8M0": True, "BLOCK": 32, "SCALED_SUMS": False, "HAS_BIAS": True, "COMPUTE": tl.bfloat16,
        "EXPERTS": 128, "BLOCK_T": tile.tokens, "BLOCK_O": tile.rows, "BLOCK_K": tile.columns,
    }  # fmt: skip
    if not planes:
        constants |= {"plane_ptr": None}
    check(f"grouped mxfp4 {tile}", grouped_kernel, pointers("bf16", False), constants, cc, tile.warps, tile.stages)


@pytest.mark.parametrize("cc", TARGETS)
@pytest.mark.parametrize("tile", DECODE_TILES + PREFILL_TILES, ids=str)
def test_every_tile_of_fp4_matmul(tile, cc):
    matmul(tile, cc, planes=False)


@pytest.mark.parametrize("cc", TARGETS)
@pytest.mark.parametrize("tile", PLANE_TILES, ids=str)
def test_every_tile_of_multi_plane_matmul(tile, cc):
    matmul(tile, cc, planes=True)


@pytest.mark.parametrize("cc", TARGETS)
@pytest.mark.parametrize("case", ["fp16", "mxfp4", "mxfp4 fp16", "mxfp4 fp16 planes", "fp32", "addresses"])
def test_every_dtype_and_format_of_fp4_matmul(case, cc):
    matmul(
        Tile(16, 64, 128, splits=4) if case != "fp32" else Tile(16, 32, 32),
        cc,
        planes=case in ("addresses", "mxfp4 fp16 planes"),
        format="mxfp4" if "mxfp4" in case else "nvfp4",
        dtype="fp16" if "fp16" in case else "fp32" if case == "fp32" else "bf16",
        addresses=case == "addresses",
    )


@pytest.mark.parametrize("cc", TARGETS)
@pytest.mark.parametrize("tile", GROUPED_TILES, ids=str)
def test_every_tile_of_grouped_fp4_matmul(tile, cc):
    grouped(tile, cc, planes=False)


@pytest.mark.parametrize("cc", TARGETS)
def test_grouped_fp4_matmul_with_planes(cc):
    grouped(PLANE_TILES[2], cc, planes=True)


@pytest.mark.parametrize("cc", TARGETS)
def test_finish_and_swap(cc):
    constants = {"E8M0": False, "HAS_BIAS": True, "SPLITS": 4, "BLOCK_O": 256}
    check("finish", finish_kernel, pointers("bf16", False), constants, cc)
    signature = {
        "plane_ptr": "*u8",
        "positions_ptr": "*i64",
        "values_ptr": "*u8",
        "previous_ptr": "*u8",
        "n_changes": "i32",
        "n_bytes": "i64",
    }
    check("swap", swap_kernel, signature, {"BLOCK": 1024}, cc)


def test_the_chosen_tiles_are_compiled_ones():
    compiled = {(t.tokens, t.rows, t.columns, t.warps, t.stages) for t in DECODE_TILES + PREFILL_TILES}
    for tokens in (1, 8, 9, 16, 17, 64, 65, 4096):
        for rows in (64, 4096, 8192, 28672, 128256):
            tile = choose_tile(tokens, rows, 4096)
            assert (tile.tokens, tile.rows, tile.columns, tile.warps, tile.stages) in compiled
            plane_tile = choose_plane_tile(tokens, rows, 4096)
            assert (plane_tile.tokens, plane_tile.rows, plane_tile.columns) in {(t.tokens, t.rows, t.columns) for t in PLANE_TILES}
    assert {choose_grouped_tile(tokens, 128) for tokens in (1, 1024, 4096, 65536)} <= set(GROUPED_TILES)
