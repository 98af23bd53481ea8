"""Every launch shape of the training and calibration kernels compiles, without a GPU, for the targets that are served: no spill, and shared memory within a block's limit.

What is compiled is what the launches ask for; -s prints registers and shared memory. Variants that change no shape (other dtypes, masks, offsets) are compiled on one tile each.
Triton keeps the binaries in its cache, so only the first run compiles.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET", "0") == "1":
    pytest.skip("the interpreter has replaced the compiler in this process", allow_module_level=True)

from prism_kernels.compiling import SHARED_LIMIT, TARGETS, CompiledInfo, compile_kernel, require_fits
from prism_kernels.dispatch import tl
from prism_kernels.gptq import GPTQ_TILES, gptq_kernel
from prism_kernels.grams import GRAM_TILES, WIDE_GRAM_TILE, choose_gram_tile, gram_kernel
from prism_kernels.qast import QAST_TILE, qast_kernel
from prism_kernels.quantize import ROUND_UP_FROM, RTN_TILES, rtn_kernel
from prism_kernels.scale_gradient import GRAD_TILES, WIDE_GRAD_TILE, choose_grad_tile, grad_input_kernel, scale_grad_kernel

DTYPES = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
SIZES = {
    "n_rows": "i32:16",
    "n_columns": "i32:16",
    "n_blocks": "i32:16",
    "rank": "i32:16",
    "n_tokens": "i32",
    "first": "i32",
    "last": "i32",
}


def check(kernel: Any, pointers: dict[str, str], constants: dict[str, object], cc: int, warps: int = 4, stages: int = 3) -> CompiledInfo:
    info = compile_kernel(kernel, {**SIZES, **pointers}, constants, cc, num_warps=warps, num_stages=stages)
    print(f"{kernel.__name__} sm_{cc} {constants} {warps} warps: {info}")
    require_fits(info, cc, kernel.__name__)
    assert 0 < info.registers <= 255
    assert info.cubin_bytes > 0
    return info


@pytest.mark.parametrize("cc", TARGETS)
@pytest.mark.parametrize("e8m0", [False, True])
def test_qast(cc, e8m0):
    pointers = {"base_ptr": "*u8", "a_ptr": "*fp32", "b_ptr": "*fp32", "out_ptr": "*u8", "inside_ptr": "*u8", "scaling_bits": "i64"}
    check(qast_kernel, pointers, {"E8M0": e8m0, "BLOCK_O": QAST_TILE[0], "BLOCK_G": QAST_TILE[1]}, cc)


def scale_grad(tile, cc, dtype="bf16", block=16, offsets=False):
    pointers = {
        "dy_ptr": f"*{dtype}",
        "x_ptr": f"*{dtype}",
        "codes_ptr": "*u8",
        "tensor_scale_ptr": "*fp32",
        "out_ptr": "*fp32",
        "offsets_ptr": "*i32",
    }
    constants = {"OFFSETS": offsets, "BLOCK": block, "BLOCK_O": tile.rows, "BLOCK_I": tile.columns, "BLOCK_T": tile.depth}
    check(scale_grad_kernel, pointers, constants if offsets else {**constants, "offsets_ptr": None}, cc, tile.warps, tile.stages)


def grad_input(tile, cc, dtype="bf16", e8m0=False):
    pointers = {"dy_ptr": f"*{dtype}", "codes_ptr": "*u8", "scales_ptr": "*u8", "tensor_scale_ptr": "*fp32", "out_ptr": f"*{dtype}"}
    compute = tl.float32 if e8m0 and dtype == "fp16" else DTYPES[dtype]
    constants = {
        "E8M0": e8m0,
        "BLOCK": 32 if e8m0 else 16,
        "COMPUTE": compute,
        "BLOCK_T": tile.rows,
        "BLOCK_I": tile.columns,
        "BLOCK_O": tile.depth,
    }
    check(grad_input_kernel, pointers, constants, cc, tile.warps, tile.stages)


@pytest.mark.parametrize("cc", TARGETS)
@pytest.mark.parametrize("tile", GRAD_TILES)
def test_every_tile_of_scale_grad(tile, cc):
    scale_grad(tile, cc)


@pytest.mark.parametrize("cc", TARGETS)
@pytest.mark.parametrize("tile", GRAD_TILES)
def test_every_tile_of_grad_input(tile, cc):
    grad_input(tile, cc)


@pytest.mark.parametrize("cc", TARGETS)
def test_other_variants_of_the_backward(cc):
    scale_grad(GRAD_TILES[0], cc, "fp16", 32, True)
    scale_grad(WIDE_GRAD_TILE, cc, "fp32")
    grad_input(GRAD_TILES[0], cc, "bf16", True)
    grad_input(WIDE_GRAD_TILE, cc, "fp16", True)
    grad_input(WIDE_GRAD_TILE, cc, "fp32")


@pytest.mark.parametrize("cc", TARGETS)
@pytest.mark.parametrize("e8m0", [False, True])
@pytest.mark.parametrize("tile", RTN_TILES)
def test_every_tile_of_quantize_rtn(tile, e8m0, cc):
    pointers = {"weight_ptr": "*bf16", "tensor_scale_ptr": "*fp32", "codes_ptr": "*u8", "scales_ptr": "*u8"}
    rule = ROUND_UP_FROM["even" if e8m0 else "nearest"]
    constants = {"E8M0": e8m0, "BLOCK": 32 if e8m0 else 16, "UP_FROM": rule, "BLOCK_O": tile.rows, "BLOCK_I": tile.columns}
    check(rtn_kernel, pointers, constants, cc, tile.warps)


def gram(tile, cc, dtype="bf16", masked=False, weighted=False, offsets=False):
    pointers = {"x_ptr": f"*{dtype}", "mask_ptr": "*u8", "weight_ptr": "*fp32", "offsets_ptr": "*i32", "out_ptr": "*fp32"}
    absent = {"mask_ptr": masked, "weight_ptr": weighted, "offsets_ptr": offsets}
    constants = {"MASKED": masked, "WEIGHTED": weighted, "OFFSETS": offsets, "WIDE": dtype != "bf16", "COMPUTE": tl.bfloat16}
    constants |= {"SIDE": tile.side, "DEPTH": tile.depth, **{name: None for name, used in absent.items() if not used}}
    check(gram_kernel, pointers, constants, cc, tile.warps, tile.stages)


@pytest.mark.parametrize("cc", TARGETS)
@pytest.mark.parametrize(("tile", "weighted"), [*((tile, False) for tile in GRAM_TILES), *((tile, True) for tile in GRAM_TILES[:2])])
def test_every_tile_of_gram(tile, weighted, cc):
    gram(tile, cc, weighted=weighted, masked=weighted)


@pytest.mark.parametrize("cc", TARGETS)
def test_other_variants_of_gram(cc):
    gram(GRAM_TILES[0], cc, offsets=True)
    gram(WIDE_GRAM_TILE, cc, "fp16", weighted=True)
    gram(WIDE_GRAM_TILE, cc, "fp32")


@pytest.mark.parametrize("cc", TARGETS)
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("tile", GPTQ_TILES)
def test_every_tile_of_gptq_block(tile, block, cc):
    pointers = {"work_ptr": "*fp32", "steps_ptr": "*fp32", "upper_ptr": "*fp32", "error_ptr": "*fp32"}
    check(gptq_kernel, pointers, {"BLOCK": block, "BLOCK_O": tile.rows}, cc, tile.warps)


def test_chosen_tiles_are_of_the_spaces():
    for size in (1, 100, 1024, 1025, 4096, 16384):
        assert choose_gram_tile(size) in GRAM_TILES and choose_gram_tile(size, True) in GRAM_TILES[:2]
        assert choose_gram_tile(size, wide=True) == WIDE_GRAM_TILE
        assert choose_grad_tile(size, 4096) in GRAD_TILES and choose_grad_tile(4096, size) in GRAD_TILES


def test_the_check_can_fail():
    """Spills and too much shared memory are refused; a tile made for tensor cores does spill in full float32."""
    spilling = CompiledInfo(registers=255, shared_bytes=0, spills=8, cubin_bytes=1)
    with pytest.raises(ValueError, match="spills 8 bytes"):
        require_fits(spilling, 90, "kernel")
    too_much = CompiledInfo(registers=64, shared_bytes=SHARED_LIMIT[120] + 1, spills=0, cubin_bytes=1)
    require_fits(too_much, 90, "kernel")
    with pytest.raises(ValueError, match="shared memory"):
        require_fits(too_much, 120, "kernel")
    with pytest.raises(ValueError, match="spills"):
        grad_input(GRAD_TILES[0], 90, "fp32")


@pytest.mark.parametrize(
    ("message", "signature", "cc"), [("compute capability 70", {}, 70), ("no type for the arguments", {"work_ptr": "*fp32"}, 90)]
)
def test_refusals(message, signature, cc):
    with pytest.raises(ValueError, match=message):
        compile_kernel(gptq_kernel, signature, {"BLOCK": 16, "BLOCK_O": 64}, cc)
