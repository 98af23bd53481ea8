"""Engine layouts of scale planes against definitions written out a byte at a time, their inverses, and patches of planes that lie in them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from prism_kernels.formats import decode_scales
from prism_kernels.layouts import LAYOUTS, from_layout, layout_shape, linear_bytes, marlin_bytes, marlin_factor, places, to_layout
from prism_kernels.swap import swap_planes, swap_planes_ref


def plane(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 127, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def swizzled_by_hand(scales: torch.Tensor) -> torch.Tensor:
    """cuBLAS's figure read out loud: rows in tiles of 128, blocks in tiles of 4; a tile is 32 lines of 16 bytes, four rows' words side by side."""
    rows, blocks = scales.shape
    out = []
    for tile_row in range(-(-rows // 128)):
        for tile_block in range(-(-blocks // 4)):
            for line in range(32):
                for quarter in range(4):
                    for g in range(4):
                        row, block = tile_row * 128 + quarter * 32 + line, tile_block * 4 + g
                        out.append(int(scales[row, block]) if row < rows and block < blocks else 0)
    return torch.tensor(out, dtype=torch.uint8).reshape(-(-rows // 128) * 128, -(-blocks // 4) * 4)


def marlin_by_hand(scales: torch.Tensor) -> torch.Tensor:
    """vLLM's two steps as lists: the order of its scale permutation, then [0, 2, 1, 3] in every four."""
    rows, blocks = scales.shape
    order = (
        [i + 8 * j for i in range(8) for j in range(8)]
        if blocks > 1
        else [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    )
    lines = []
    for g in range(blocks):
        line = []
        for start in range(0, rows, len(order)):
            line += [int(scales[start + source, g]) for source in order]
        lines.append([line[start + i] for start in range(0, rows, 4) for i in (0, 2, 1, 3)])
    return torch.tensor(lines, dtype=torch.uint8)


@pytest.mark.parametrize(("rows", "blocks"), [(100, 5), (128, 4), (256, 12), (1, 1), (129, 8)])
def test_swizzled(rows, blocks):
    scales = plane(rows, blocks)
    assert torch.equal(to_layout(scales, "swizzled"), swizzled_by_hand(scales))


@pytest.mark.parametrize(("rows", "blocks"), [(64, 2), (192, 7), (32, 1), (96, 1)])
def test_marlin(rows, blocks):
    scales = plane(rows, blocks)
    assert torch.equal(to_layout(scales, "marlin"), marlin_by_hand(scales))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(64, 3), (2, 3, 128, 5), (192, 1)])
def test_round_trip_moves_every_byte(layout, shape):
    scales = plane(*shape)
    data = to_layout(scales, layout)
    assert data.shape[-2:] == layout_shape(*shape[-2:], layout)
    assert torch.equal(from_layout(data, *shape[-2:], layout), scales)
    position = torch.arange(shape[-2] * shape[-1])
    assert places(position, *shape[-2:], layout).unique().numel() == position.numel()
    if layout != "linear" and shape[-1] > 1:
        assert not torch.equal(data.flatten()[: scales.numel()], scales.flatten())


def test_dirty_padding_is_refused():
    data = to_layout(plane(100, 5), "swizzled")
    data[-1, -1] = 3
    with pytest.raises(ValueError, match="padding"):
        from_layout(data, 100, 5, "swizzled")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: to_layout(plane(65, 2), "marlin"), "65 rows do not divide by 64"),
        (lambda: to_layout(plane(64, 2), "cutlass"), "known: linear, swizzled, marlin"),
        (lambda: to_layout(plane(64, 2).float(), "swizzled"), "expected uint8"),
        (lambda: from_layout(plane(100, 5), 100, 5, "swizzled"), r"is \[128, 8\] in layout swizzled"),
    ],
)
def test_what_layouts_refuse(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_marlin_bytes_round_trip_every_scale_that_has_one():
    # With factor 1 the subnormal E4M3 scales, below 2^-6, have no byte; 8 .. 126 are the normal ones, and 0 stays 0.
    data = torch.cat([torch.tensor([0]), torch.arange(8, 127)]).to(torch.uint8)[None]
    recoded = marlin_bytes(data, 1.0)
    assert recoded[0, 0] == 0
    # 1.0 = byte 0x38: float16(128) is exponent 22, mantissa 0: 22 * 8.
    assert recoded[0, data[0].tolist().index(0x38)] == 22 * 8
    assert (recoded[0, 1:] >= 128).all(), "Marlin reads the top bit as part of the exponent and wants it set"
    assert torch.equal(linear_bytes(recoded, 1.0), data)


def test_marlin_factor_saves_small_scales():
    small = torch.tensor([[1, 7, 16]], dtype=torch.uint8)  # subnormals 2^-9 and 7 * 2^-9, and 2^-5
    factor = marlin_factor(small)
    assert factor == 2.0**13  # 448 * 2^5 = 14336 = 2^13.8
    recoded = marlin_bytes(small, factor)
    assert torch.equal(linear_bytes(recoded, factor), small)
    values = (recoded.to(torch.int16) << 7).view(torch.float16).float() / 128
    assert torch.equal(values, decode_scales(small, "nvfp4") * factor)
    assert marlin_factor(torch.zeros(2, 2, dtype=torch.uint8)) == 1.0


@pytest.mark.parametrize(
    ("data", "factor", "message"),
    [([1, 120], 1.0, "1 scales are below"), ([120, 56], 2.0, "1 scales are above"), ([0x7F, 56], 1.0, "not legal")],
)
def test_marlin_bytes_refuses_what_would_be_lost(data, factor, message):
    with pytest.raises(ValueError, match=message):
        marlin_bytes(torch.tensor([data], dtype=torch.uint8), factor)


def test_marlin_is_what_vllm_does():
    """In a process of its own: vLLM's import takes seconds and changes the process."""
    script = """
import sys, torch
try:
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_permute_scales
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import mxfp4_marlin_process_scales, nvfp4_marlin_process_scales
except Exception as error:
    print(error); sys.exit(77)
from prism_kernels.layouts import marlin_bytes, marlin_factor, to_layout
torch.manual_seed(0)
for rows, blocks, low in ((64, 4, 8), (192, 6, 1), (128, 1, 8)):
    scales = torch.randint(low, 100 if low == 1 else 127, (rows, blocks)).to(torch.uint8)
    value = scales.view(torch.float8_e4m3fn).to(torch.bfloat16)
    permuted = marlin_permute_scales(value.T.contiguous(), blocks * 16, rows, 16)
    theirs, factor = nvfp4_marlin_process_scales(permuted)
    assert factor == marlin_factor(scales), (factor, marlin_factor(scales))
    keep = scales if low == 8 else torch.where(scales.view(torch.float8_e4m3fn).float() * factor < 2**-6, torch.full_like(scales, 60), scales)
    theirs = nvfp4_marlin_process_scales(marlin_permute_scales(keep.view(torch.float8_e4m3fn).to(torch.bfloat16).T.contiguous(), blocks * 16, rows, 16), factor)[0]
    assert torch.equal(theirs.view(torch.uint8), to_layout(marlin_bytes(keep, factor), "marlin"))
    mx = torch.randint(1, 250, (rows, blocks)).to(torch.uint8)
    permuted = marlin_permute_scales(mx.view(torch.float8_e8m0fnu).to(torch.bfloat16).T.contiguous(), blocks * 32, rows, 32)
    assert torch.equal(mxfp4_marlin_process_scales(permuted).view(torch.uint8), to_layout(mx, "marlin"))
print("equal")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == 77:
        pytest.skip(f"vLLM does not import here: {done.stdout.strip()[-200:]}")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.strip().endswith("equal")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_patch_of_a_resident_plane_is_the_layout_of_the_patched_plane(layout):
    base, rows, blocks = plane(128, 6), 128, 6
    positions = torch.randperm(rows * blocks, generator=torch.Generator().manual_seed(1))[:200].sort().values
    values = plane(200, seed=2)
    resident, patched = to_layout(base, layout), base.clone()
    previous = swap_planes(resident, positions, values, layout=layout, shape=(rows, blocks))
    assert torch.equal(previous, swap_planes_ref(patched, positions, values))
    assert torch.equal(resident, to_layout(patched, layout))
    swap_planes(resident, positions.int(), previous, layout=layout, shape=(rows, blocks))
    assert torch.equal(resident, to_layout(base, layout)), "rollback restores every byte"
    assert swap_planes(resident, positions[:0], values[:0], layout=layout, shape=(rows, blocks)).numel() == 0


@pytest.mark.parametrize(
    ("positions", "values", "options", "message"),
    [
        ([3, 1], [1, 2], {}, "ascend strictly"),
        ([1, 1], [1, 2], {}, "ascend strictly"),
        ([-1, 1], [1, 2], {}, "from -1 to 1"),
        ([0, 24], [1, 2], {}, "the plane has 24 bytes"),
        ([0, 1], [1, 0x7F], {}, "1 bytes that are no nvfp4 scale"),
        ([0, 1], [1, 255], {"format": "mxfp4"}, "no mxfp4 scale"),
        ([0, 1], [1], {}, "two vectors of one length"),
        ([0, 1], [1, 2], {"layout": "swizzled"}, "needs shape"),
        ([0, 1], [1, 2], {"layout": "swizzled", "shape": (6, 4)}, "has 512 bytes in layout swizzled"),
        ([0, 1], [1, 2], {"format": "int4"}, "known: nvfp4, mxfp4"),
    ],
)
def test_a_bad_patch_is_refused_whole(positions, values, options, message):
    resident = plane(6, 4)
    before = resident.clone()
    with pytest.raises(ValueError, match=message):
        swap_planes(resident, torch.tensor(positions), torch.tensor(values, dtype=torch.uint8), **options)
    assert torch.equal(resident, before)


def test_unchecked_positions_outside_are_left_out_of_every_layout():
    # 100 x 5 has padding when swizzled: position 500 would land in it.
    resident = to_layout(plane(100, 5), "swizzled")
    before = resident.clone()
    values = torch.tensor([9, 9], dtype=torch.uint8)
    previous = swap_planes(resident, torch.tensor([-1, 500]), values, layout="swizzled", shape=(100, 5), check=False)
    assert torch.equal(resident, before)
    assert previous.tolist() == [0, 0]


def test_swap_is_seen_by_torchs_tools():
    resident = plane(6, 4)
    version = resident._version
    swap_planes(resident, torch.tensor([2]), torch.tensor([5], dtype=torch.uint8))
    assert resident._version > version, "caches that watch the version see the change"
    torch.library.opcheck(torch.ops.prism_kernels.swap_bytes, (plane(6, 4), torch.tensor([0, 5]), plane(2)))
