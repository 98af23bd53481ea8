"""The matrix kernels under Triton's interpreter, on CPU tensors. Run by tests/unit/test_kernels_matmul.py in a process of its own, since TRITON_INTERPRET
must be set before prism_kernels is imported: TRITON_INTERPRET=1 pytest tests/kernels/interpreted_matmul.py

Two kinds of inputs. *Exact* ones (small integers, scales and tensor scales that are powers of two): every product and every partial sum is a multiple of one
unit and below 2^24 of it, so float32 sums are exact in any order and kernel and reference must agree bit for bit. *Real* ones: a float32 sum of n products
differs from the exact one by at most (n - 1) u sum |x w| whatever its order (u = 2^-24; Higham, Accuracy and Stability, eq. 3.5), tensor scale and bias round
twice more, and the reference has the same error: 2 (n + 2) u (sum |x w| + |b|), and one rounding of the result to its dtype on either side.
"""

from __future__ import annotations

import pytest
import torch
from prism_kernels import dispatch, formats
from prism_kernels.dispatch import tl, triton
from prism_kernels.grouped import grouped_fp4_matmul, grouped_fp4_matmul_ref
from prism_kernels.matmul import Tile, choose_tile, fp4_matmul, fp4_matmul_ref
from prism_kernels.multi_plane import multi_plane_matmul, multi_plane_matmul_ref
from prism_kernels.swap import swap_planes, swap_planes_ref

from prism_ray.formats import e2m1
from prism_ray.formats.spec import FORMATS
from prism_ray.formats.tensor import QuantTensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TILES = (Tile(8, 32, 64), Tile(16, 16, 32, splits=2), Tile(8, 16, 128, splits=3))
NAMES = ("nvfp4", "mxfp4")
UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def test_the_interpreter_is_on():
    assert dispatch.INTERPRETED
    assert dispatch.use_triton(torch.zeros(1))


def planes(name: str, shape: tuple[int, ...], seed: int, *, exact: bool = True) -> torch.Tensor:
    """Scale bytes: powers of two from 1/2 to 4, or any of middle size."""
    generator = torch.Generator().manual_seed(seed)
    if exact:
        exponent = torch.randint(-1, 3, shape, generator=generator)
        return ((exponent + 7) * 8 if name == "nvfp4" else exponent + 127).to(torch.uint8)
    low, high = (1, 100) if name == "nvfp4" else (118, 132)
    return torch.randint(low, high, shape, generator=generator).to(torch.uint8)


def codes(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def integers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_hand_worked_block():
    # Columns 0 .. 7 hold 0, 0.5, 1, 1.5, 2, 3, 4, 6, columns 8 .. 15 their negatives; scale 0x40 = 2, second block 0x30 = 0.5; tensor scale 4.
    row = torch.arange(16, dtype=torch.uint8)
    packed = e2m1.pack(torch.cat([row, row])[None])
    scales = torch.tensor([[0x40, 0x30]], dtype=torch.uint8)
    x = torch.zeros(3, 32)
    x[0, 7] = 1.0  # 6 * 2 * 4
    x[1, 9] = 2.0  # -0.5 * 2 * 4 * 2
    x[2, 21], x[2, 31] = 1.0, 1.0  # (3 - 6) * 0.5 * 4
    y = fp4_matmul(x, packed, scales, 4.0, "nvfp4", torch.tensor([100.0]))
    assert y.flatten().tolist() == [148.0, 92.0, 94.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_all_codes_times_all_legal_scales(name, dtype):
    spec = FORMATS[name]
    # 2^126 * 6 and 2^127 * 2 are no float32 numbers: the last two E8M0 bytes are in the next test.
    data = torch.arange(127 if name == "nvfp4" else 253, dtype=torch.uint8)[:, None]
    row = torch.arange(16, dtype=torch.uint8).repeat(spec.block // 16)
    packed = e2m1.pack(row.expand(data.shape[0], -1))
    weight = QuantTensor(codes=packed, scales=data, tensor_scale=torch.tensor(1.0), format=spec).dequantize()
    y = fp4_matmul(torch.eye(spec.block, dtype=dtype), packed, data, 1.0, name, out_dtype=torch.float32, tile=Tile(32, 64, 32))
    assert torch.equal(y, weight.T)
    if name == "nvfp4":
        assert y.max() == 6 * 448
        assert weight[1, 1] == 2.0**-10  # half of the smallest subnormal scale


def test_the_largest_e8m0_scales():
    packed = e2m1.pack(torch.tensor([0, 1, 2, 3, 8, 9, 10, 11] * 4, dtype=torch.uint8).expand(2, -1))
    data = torch.tensor([[253], [254]], dtype=torch.uint8)
    weight = QuantTensor(codes=packed, scales=data, tensor_scale=torch.tensor(1.0), format=FORMATS["mxfp4"]).dequantize()
    for dtype in DTYPES:
        assert torch.equal(fp4_matmul(torch.eye(32, dtype=dtype), packed, data, 1.0, "mxfp4", out_dtype=torch.float32), weight.T)


@pytest.mark.parametrize(("name", "byte"), [("nvfp4", 0x7F), ("nvfp4", 0x80), ("nvfp4", 0xFF), ("mxfp4", 255)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_illegal_scale_is_nan(name, byte, dtype):
    block = FORMATS[name].block
    scales = torch.tensor([[byte], [0x38]], dtype=torch.uint8)
    y = fp4_matmul(torch.ones(1, block, dtype=dtype), codes((2, block // 2), 0), scales, 1.0, name)
    assert y[0].isnan().tolist() == [True, False]
    assert fp4_matmul_ref(torch.ones(1, block, dtype=dtype), codes((2, block // 2), 0), scales, 1.0, name)[0].isnan().tolist() == [
        True,
        False,
    ]


@triton.jit
def bits_kernel(packed_ptr, out_ptr, COMPUTE: tl.constexpr):
    packed = tl.load(packed_ptr + tl.arange(0, 256))
    bits = formats.e2m1_bits(tl.reshape(packed, (1, 256)), COMPUTE)
    tl.store(out_ptr + tl.arange(0, 512), tl.reshape(bits, (512,)))


def test_bfloat16_codes_and_factors_multiply_exactly():
    # The interpreter cannot multiply bfloat16; torch can. The kernel's own bits times the factors that it documents give value * scale * 2^-8.
    packed = torch.arange(256).to(torch.uint8)
    out = torch.empty(512, dtype=torch.bfloat16)
    bits_kernel[(1,)](packed, out, COMPUTE=tl.bfloat16)
    values = formats.decode_codes(packed)
    assert torch.equal(out.double() * 2.0**126, values.double())
    scales = formats.decode_scales(torch.arange(127).to(torch.uint8), "nvfp4")
    factor = (scales.double() * 2.0**118).to(torch.bfloat16)
    assert torch.equal(factor.double(), scales.double() * 2.0**118)
    product = out[:, None] * factor[None]
    assert product.dtype == torch.bfloat16
    assert torch.equal(product.double(), values.double()[:, None] * scales.double()[None] * 2.0**-8)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_exact_inputs_give_the_bits_of_the_reference(name, dtype, tile):
    # |sum| <= 160 * 3 * 6 * 4 = 11520, in units of 1/4: below 2^24, and the results are rounded once. Neither 21 nor 160 is a multiple of a tile.
    rows, columns = 21, 160
    c, s = codes((rows, columns // 2), 1), planes(name, (rows, columns // FORMATS[name].block), 2)
    bias = integers((rows,), dtype, 3)
    x = integers((9, columns), dtype, 4)
    y = fp4_matmul(x, c, s, 0.125, name, bias, tile=tile)
    assert y.dtype == dtype
    assert torch.equal(y, fp4_matmul_ref(x, c, s, 0.125, name, bias))
    assert torch.equal(fp4_matmul(x[:1], c, s, 0.125, name, tile=tile), fp4_matmul_ref(x[:1], c, s, 0.125, name))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_real_inputs_stay_within_the_derived_bound(name, dtype):
    rows, columns, tokens = 33, 192, 5
    c, s = codes((rows, columns // 2), 5), planes(name, (rows, columns // FORMATS[name].block), 6, exact=False)
    generator = torch.Generator().manual_seed(7)
    x, bias = torch.randn(tokens, columns, generator=generator).to(dtype), torch.randn(rows, generator=generator)
    y, ref = (f(x, c, s, 0.37, name, bias, out_dtype=torch.float32) for f in (fp4_matmul, fp4_matmul_ref))
    size = x.float().abs() @ formats.decode_weight(c, s, name).abs().T * 0.37 + bias.abs()
    bound = 2 * (columns + 2) * 2.0**-24 * size
    assert ((y - ref).abs() <= bound).all()
    rounded = fp4_matmul(x, c, s, 0.37, name, bias)
    assert ((rounded.float() - ref).abs() <= bound + UNIT_ROUNDOFF[dtype] * (ref.abs() + bound) * 1.01 + 2.0**-25).all()
    assert torch.equal(rounded, y.to(dtype)), "the sum is rounded once, on output"
    assert torch.equal(y, fp4_matmul(x, c, s, 0.37, name, bias, out_dtype=torch.float32)), "equal calls give equal bits"


def test_the_chosen_tile_serves_any_shape():
    c, s = codes((3, 8), 1), planes("nvfp4", (3, 1), 2)
    for tokens in (0, 1, 17):
        x = integers((tokens, 16), torch.float32, 3)
        assert torch.equal(fp4_matmul(x, c, s), fp4_matmul_ref(x, c, s))
    assert choose_tile(1, 4096, 4096) == choose_tile(8, 4096, 4096), "decoding steps of 1 and of 8 tokens sum in one order"
    assert choose_tile(1, 4096, 4096).splits > 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_many_planes_have_the_bits_of_each_alone(name, dtype):
    rows, columns, tokens, members = 20, 64, 11, 4
    c, p = codes((rows, columns // 2), 11), planes(name, (members, rows, columns // FORMATS[name].block), 12, exact=False)
    generator = torch.Generator().manual_seed(13)
    x, bias = torch.randn(tokens, columns, generator=generator).to(dtype), torch.randn(rows, generator=generator).to(dtype)
    index = torch.tensor([3, -1, 0, 1, 3, 3, 0, 1, 1, 3, -1], dtype=torch.int32)  # two tiles of tokens; plane 2 has none
    tile = Tile(8, 32, 32, splits=2)
    y = multi_plane_matmul(x, c, p, index, 0.37, name, bias, tile=tile)
    alone = torch.stack([fp4_matmul(x, c, p[m], 0.37, name, bias, tile=tile) for m in range(members)])
    assert torch.equal(y, alone[index.clamp(min=0).long(), torch.arange(tokens)])
    separate = [plane.clone() for plane in p]
    assert torch.equal(y, multi_plane_matmul(x, c, separate, index.long(), 0.37, name, bias, tile=tile))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_many_planes_equal_the_reference(name, dtype):
    rows, columns = 20, 64
    c, p = codes((rows, columns // 2), 21), planes(name, (3, rows, columns // FORMATS[name].block), 22)
    for index in ([2], [0, 2, 1, 2, -1], [1] * 11):
        x = integers((len(index), columns), dtype, len(index))
        which = torch.tensor(index)
        assert torch.equal(multi_plane_matmul(x, c, p, which, 0.5, name), multi_plane_matmul_ref(x, c, p, which, 0.5, name))


@pytest.mark.parametrize(("name", "dtype"), [("nvfp4", torch.float32), ("mxfp4", torch.float16)])
def test_a_plane_that_does_not_exist_is_nan(name, dtype):
    c, p = codes((16, 32), 1), planes(name, (2, 16, 64 // FORMATS[name].block), 2)
    x = integers((4, 64), dtype, 3)
    y = multi_plane_matmul(x, c, p, torch.tensor([1, 2, 0, -2]), 1.0, name)
    assert y[[1, 3]].isnan().all()
    assert torch.equal(y[[0, 2]], multi_plane_matmul_ref(x[[0, 2]], c, p, torch.tensor([1, 0]), 1.0, name))


@pytest.mark.parametrize("counts", [[5], [1], [0, 3, 0, 9, 0], [0, 0, 1]])
@pytest.mark.parametrize("name", NAMES)
def test_experts_equal_the_reference(name, counts):
    experts, rows, columns = len(counts), 19, 96
    c, s = codes((experts, rows, columns // 2), 31), planes(name, (experts, rows, columns // FORMATS[name].block), 32)
    offsets = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    x, bias = integers((int(offsets[-1]), columns), torch.float16, 33), integers((experts, rows), torch.float16, 34)
    factor = torch.tensor([0.5, 0.25, 1.0, 2.0, 4.0])[:experts]
    y = grouped_fp4_matmul(x, c, s, offsets, factor, name, bias)
    assert torch.equal(y, grouped_fp4_matmul_ref(x, c, s, offsets, factor, name, bias))


@pytest.mark.parametrize("name", NAMES)
def test_experts_with_planes_equal_each_expert_alone(name):
    experts, rows, columns, counts = 4, 12, 64, [3, 0, 11, 1]
    c = codes((experts, rows, columns // 2), 41)
    p = planes(name, (3, experts, rows, columns // FORMATS[name].block), 42, exact=False)
    offsets = torch.tensor([0, *counts]).cumsum(0)
    x = torch.randn(15, columns, generator=torch.Generator().manual_seed(43))
    index = torch.tensor([0, 2, 1, 1, 1, 0, 2, 2, -1, 0, 1, 2, 0, 1, 2], dtype=torch.int32)
    tile = Tile(8, 16, 32)
    y = grouped_fp4_matmul(x, c, p, offsets, 0.7, name, plane_index=index, tile=tile)
    assert torch.equal(y, grouped_fp4_matmul(x, c, [m.clone() for m in p], offsets, 0.7, name, plane_index=index, tile=tile))
    for e, (start, stop) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        alone = multi_plane_matmul(x[start:stop], c[e], p[:, e].contiguous(), index[start:stop], 0.7, name, tile=tile)
        assert torch.equal(y[start:stop], alone)


def test_rows_that_no_expert_owns_are_nan():
    c, s = codes((2, 16, 16), 1), planes("nvfp4", (2, 16, 2), 2)
    y = grouped_fp4_matmul(integers((4, 32), torch.float32, 3), c, s, torch.tensor([0, 1, 3]))
    assert y.isnan().any(1).tolist() == [False, False, False, True]
    assert grouped_fp4_matmul(integers((0, 32), torch.float32, 3), c, s, torch.tensor([0, 0, 0])).shape == (0, 16)


def test_swap_kernel():
    plane = planes("nvfp4", (50, 60), 1, exact=False)
    before, expected = plane.clone(), plane.clone()
    positions = torch.randperm(3000, generator=torch.Generator().manual_seed(2))[:1500].sort().values
    values = planes("nvfp4", (1500,), 3, exact=False)
    previous = swap_planes(plane, positions, values)
    assert torch.equal(previous, swap_planes_ref(expected, positions, values))
    assert torch.equal(plane, expected)
    assert not torch.equal(plane, before)
    assert torch.equal(swap_planes(plane, positions.int(), previous), values)
    assert torch.equal(plane, before), "swapping the previous bytes in restores the plane"


def test_swap_kernel_leaves_out_positions_outside():
    storage = torch.full((40,), 7, dtype=torch.uint8)
    plane = storage[8:24]
    previous = swap_planes(plane, torch.tensor([-1, 0, 15, 16, 1 << 40]), torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8), check=False)
    assert storage.tolist() == [7] * 8 + [2] + [7] * 14 + [3] + [7] * 16
    assert previous.tolist() == [0, 7, 7, 0, 0]
