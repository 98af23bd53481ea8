"""qast_scales, scale_grad, grad_input and scale_linear against their references, prism_ray's own forward and backward, and float64.

The same tests run twice: here on the CPU path, and in a process of its own under Triton's interpreter (`test_under_the_interpreter`), since TRITON_INTERPRET
must be set before prism_kernels is imported.

Inputs of sums are of two kinds. *Exact*: small integers, every partial sum below 2^24, so float32 sums are exact in any order and bits must agree. *Real*: a
float32 sum of n products differs from the exact one by at most n u sum |products| (u = 2^-24; Higham, eq. 3.5), whatever its order.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from prism_kernels.dispatch import INTERPRETED
from prism_kernels.formats import FORMATS as KERNEL_FORMATS
from prism_kernels.formats import decode_weight
from prism_kernels.qast import ScaleLinear, qast_scales, qast_scales_ref, scale_linear, straight_through
from prism_kernels.scale_gradient import GRAD_TILES, GradTile, grad_input, grad_input_ref, scale_grad, scale_grad_ref

from prism_ray.adapters import qast as library
from prism_ray.formats.spec import FORMATS

NAMES = ("nvfp4", "mxfp4")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SMALL = GradTile(16, 32, 16)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_bytes(shape: tuple[int, ...], low: int, high: int, seed: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=generator(seed)).to(torch.uint8)


def integers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=generator(seed)).to(dtype)


@pytest.mark.skipif(INTERPRETED, reason="this is the inner run")
@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed")
def test_under_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).resolve())],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]


def all_bytes(name: str) -> torch.Tensor:
    """Every legal scale byte once, as [1, n]."""
    return torch.arange(KERNEL_FORMATS[name].illegal_from, dtype=torch.uint8)[None]


def same_as_the_library(
    base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    got = qast_scales(base, a, b, scaling, name)
    for expected in (library.round_scales(base, a, b, scaling, FORMATS[name]), qast_scales_ref(base, a, b, scaling, name)):
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])
    return got


@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_adapter_gives_every_byte_back(name):
    base = all_bytes(name)
    data, inside = same_as_the_library(base, torch.rand(3, base.shape[1]), torch.zeros(1, 3), 2.0, name)
    assert torch.equal(data, base)
    assert torch.equal(inside, base > 0 if name == "nvfp4" else torch.ones_like(inside))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("factor", [-1.0, 0.0, 2.0**-12, 0.25, 1 / 2**0.5, 0.75, 1.0625, 1.1875, 2**0.5, 1.5, 3.0, 2.0**9, 2.0**250])
def test_every_byte_times_a_factor(name, factor):
    # delta = factor - 1 through rank 1: ties of the grid (1.0625 and 1.1875 on E4M3), subnormal scales, underflow, the 448 ceiling, a sign change.
    base = all_bytes(name)
    a = torch.full((1, base.shape[1]), factor - 1.0, dtype=torch.float64)
    data, inside = same_as_the_library(base, a, torch.ones(1, 1, dtype=torch.float64), 1.0, name)
    grid = FORMATS[name].grid
    product = grid.decode(base).double() * factor
    assert torch.equal(data, grid.encode(product.clamp(grid.smallest, grid.largest).float().masked_fill(grid.decode(base) == 0, 0.0)))
    assert not inside[(product < grid.smallest) | (product > grid.largest)].any()


@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_beside_every_boundary(name):
    # The float32 neighbours of every number half way between two scales, reached through A in float64: base scale 1, factor the number itself.
    grid = FORMATS[name].grid
    values = grid.decode(all_bytes(name)[0]).double()
    middle = (values[:-1] + values[1:]) / 2 if name == "nvfp4" else values[1:] * 2**-0.5
    middle = middle.float()
    wanted = torch.cat([middle.nextafter(torch.tensor(0.0)), middle, middle.nextafter(torch.tensor(torch.inf))])
    wanted = wanted[(wanted >= 2.0**-28) & (wanted <= 2.0**28)].double()  # where 1 + (wanted - 1) is exact in float64
    one = grid.encode(torch.ones(1))
    base = one.expand(1, len(wanted)).contiguous()
    a = (wanted - 1.0)[None]
    assert torch.equal(a + 1.0, wanted[None])
    data, _ = same_as_the_library(base, a, torch.ones(1, 1, dtype=torch.float64), 1.0, name)
    clamped = wanted.clamp(grid.smallest, grid.largest).float()
    assert torch.equal(data[0], grid.encode(clamped))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 3, 2), (33, 65, 7), (40, 130, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_that_do_not_divide_the_tile(name, shape, dtype):
    rows, blocks, rank = shape
    base = random_bytes((rows, blocks), 0, KERNEL_FORMATS[name].illegal_from, 1)
    a, b = torch.randn(rank, blocks, generator=generator(2)).to(dtype), torch.randn(rows, rank, generator=generator(3)).to(dtype)
    data, _ = same_as_the_library(base, a, b, 1 / 3, name)
    assert not FORMATS[name].grid.illegal(data).any()
    assert rows * blocks == 1 or not torch.equal(data, base)


@pytest.mark.parametrize("name", NAMES)
def test_experts_are_computed_one_at_a_time(name):
    base = random_bytes((3, 6, 5), 1, 100, 4)
    a, b = torch.randn(3, 2, 5, generator=generator(5)), torch.randn(3, 6, 2, generator=generator(6))
    data, inside = qast_scales(base, a, b, 0.5, name)
    assert torch.equal(data, library.effective_scales(base, a, b, 0.5, FORMATS[name]))
    assert torch.equal(data, qast_scales_ref(base, a, b, 0.5, name)[0])
    for e in range(3):
        alone = same_as_the_library(base[e], a[e], b[e], 0.5, name)
        assert torch.equal(data[e], alone[0]) and torch.equal(inside[e], alone[1])


@pytest.mark.parametrize("name", NAMES)
def test_zero_scales_stay_zero_and_nan_shows(name):
    base = torch.tensor([[0, 40, 60]], dtype=torch.uint8)
    huge = qast_scales(base, torch.full((1, 3), 3e38), torch.full((1, 1), 3e38), 1.0, name)[0]
    assert huge.tolist() == [[0, 0x7E, 0x7E] if name == "nvfp4" else [254, 254, 254]]
    data, inside = qast_scales(base, torch.full((1, 3), torch.nan), torch.ones(1, 1), 1.0, name)
    assert FORMATS[name].grid.illegal(data).tolist() == [[name == "mxfp4", True, True]]
    assert not inside.any()


def blocks_of(name: str) -> int:
    return KERNEL_FORMATS[name].block


@pytest.mark.parametrize("name", NAMES)
def test_scale_grad_of_a_hand_worked_block(name):
    block = blocks_of(name)
    # Codes 1, 2, 3, ... over the block (FMT-01: an order that no other nibble order shares); one token with dy = (2, 0), x = 1, 2, 3, ...
    codes = torch.arange(1, block + 1, dtype=torch.uint8) % 16
    packed = (codes[0::2] | codes[1::2] << 4)[None].repeat(2, 1)
    x = torch.arange(1.0, block + 1)[None]
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    expected = 2 * 0.25 * (values[codes.long()] * x[0]).sum()
    for dtype in DTYPES:
        got = scale_grad(torch.tensor([[2.0, 0.0]], dtype=dtype), x.to(dtype), packed, 0.25, name)
        assert got.tolist() == [[expected.item()], [0.0]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 17, 3), (16, 16, 2), (37, 40, 5)])
def test_scale_grad_is_exact_on_integers(name, dtype, shape):
    tokens, rows, groups = shape
    columns = groups * blocks_of(name)
    dy, x = integers((tokens, rows), dtype, 1), integers((tokens, columns), dtype, 2)
    codes = random_bytes((rows, columns // 2), 0, 256, 3)
    expected = scale_grad_ref(dy, x, codes, 0.5, name)
    assert expected.shape == (rows, groups)
    for tile in (SMALL, GradTile(32, 64, 32), None):
        assert torch.equal(scale_grad(dy, x, codes, 0.5, name, tile=tile), expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_grad_of_real_inputs(name, dtype):
    tokens, rows, columns = 29, 20, 3 * blocks_of(name)
    dy, x = (torch.randn(tokens, n, generator=generator(n)).to(dtype) for n in (rows, columns))
    codes = random_bytes((rows, columns // 2), 0, 256, 3)
    values = decode_weight(codes, torch.full((rows, 3), 0x38 if name == "nvfp4" else 127, dtype=torch.uint8), name).double()
    exact = ((dy.double().T @ x.double()) * values).unflatten(1, (3, -1)).sum(-1) * 0.37
    magnitude = ((dy.double().abs().T @ x.double().abs()) * values.abs()).unflatten(1, (3, -1)).sum(-1) * 0.37
    # tokens * block products, one product with the code (exact up to one rounding) and the tensor scale, which is itself rounded to float32.
    allowed = (tokens + blocks_of(name) + 3) * 2.0**-24 * magnitude
    for got in (scale_grad(dy, x, codes, 0.37, name, tile=SMALL), scale_grad_ref(dy, x, codes, 0.37, name)):
        assert bool(((got.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("name", NAMES)
def test_scale_grad_of_experts(name):
    columns = 2 * blocks_of(name)
    dy, x = integers((9, 5), torch.float32, 1), integers((9, columns), torch.float32, 2)
    codes = random_bytes((4, 5, columns // 2), 0, 256, 3)
    scale = torch.tensor([1.0, 0.5, 2.0, 4.0])
    offsets = torch.tensor([0, 4, 4, 5, 9])  # the second has no tokens, the third one
    for dtype in (torch.int32, torch.int64):
        got = scale_grad(dy, x, codes, scale, name, offsets=offsets.to(dtype), tile=SMALL)
        assert torch.equal(got, scale_grad_ref(dy, x, codes, scale, name, offsets=offsets))
    assert not got[1].any()
    assert torch.equal(got[2], scale_grad(dy[4:5], x[4:5], codes[2], 2.0, name, tile=SMALL))
    one = scale_grad(dy, x, codes[:1], 1.0, name, offsets=torch.tensor([0, 9]))
    assert torch.equal(one[0], scale_grad(dy, x, codes[0], 1.0, name))


def test_no_tokens_and_no_rows_give_zeros():
    codes = random_bytes((3, 16), 0, 256, 1)
    assert torch.equal(scale_grad(torch.zeros(0, 3), torch.zeros(0, 32), codes), torch.zeros(3, 2))
    assert scale_grad(torch.zeros(2, 0), torch.zeros(2, 32), codes[:0]).shape == (0, 2)
    assert grad_input(torch.zeros(0, 3), codes, torch.zeros(3, 2, dtype=torch.uint8)).shape == (0, 32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (17, 40, 3)])
def test_grad_input_is_exact_on_integers(name, dtype, shape):
    tokens, rows, groups = shape
    columns = groups * blocks_of(name)
    # Scales 0.5, 1, 2: products are multiples of 1/4, sums of 40 below 2^13 and then exact in float32; one rounding to dtype on either side.
    scales = ((random_bytes((rows, groups), 6, 9, 1) << 3) if name == "nvfp4" else random_bytes((rows, groups), 126, 129, 1)).to(
        torch.uint8
    )
    codes = random_bytes((rows, columns // 2), 0, 256, 2)
    dy = integers((tokens, rows), dtype, 3)
    expected = grad_input_ref(dy, codes, scales, 0.5, name)
    for tile in (SMALL, GradTile(32, 32, 32), None):
        assert torch.equal(grad_input(dy, codes, scales, 0.5, name, tile=tile), expected)


@pytest.mark.parametrize("name", NAMES)
def test_grad_input_decodes_every_code_under_every_scale(name):
    # Up to 2^125: six times it is finite, and so no zero of dy meets an infinity.
    scales = all_bytes(name).T[:253].contiguous()
    rows, block = len(scales), blocks_of(name)
    order = torch.arange(block, dtype=torch.uint8) % 16
    codes = (order[0::2] | order[1::2] << 4)[None].repeat(rows, 1)
    got = grad_input(torch.eye(rows), codes, scales, 1.0, name, tile=GradTile(128, 32, 32))
    assert torch.equal(got, decode_weight(codes, scales, name))


def layer(name: str, seed: int) -> tuple[torch.Tensor, ...]:
    block = blocks_of(name)
    codes = random_bytes((24, 2 * block), 0, 256, seed)
    base = random_bytes((24, 4), *((0, 127) if name == "nvfp4" else (124, 131)), seed + 1)
    return codes, base, torch.randn(3, 4, generator=generator(seed)) * 0.3, torch.randn(24, 3, generator=generator(seed + 2)) * 0.3


@pytest.mark.parametrize("name", NAMES)
def test_scale_linear_is_the_librarys_layer(name):
    """Forward and gradients of CorrectedLinear in float32, within the sums' rounding; scale bytes, and so W, are the same bytes."""
    from prism_ray.adapters.scale_qlora.layer import CorrectedLinear
    from prism_ray.formats.modules import FP4Linear
    from prism_ray.formats.tensor import QuantTensor

    codes, base, a, b = layer(name, 1)
    factor = torch.tensor(0.01 if name == "nvfp4" else 1.0)
    planes = FP4Linear(QuantTensor(codes=codes, scales=base, tensor_scale=factor, format=FORMATS[name]))
    x = torch.randn(2, 5, codes.shape[1] * 2, generator=generator(9))
    seen = torch.randn(2, 5, 24, generator=generator(10))
    results = []
    for ours in (False, True):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, a, b)]
        y = scale_linear(*leaves, codes, base, factor, 1.5, name) if ours else CorrectedLinear.apply(*leaves, planes, 1.5, True, None)
        (y * seen).sum().backward()
        results.append((y.detach(), *(leaf.grad for leaf in leaves)))
    # Every result is a chain of at most four float32 sums of at most 128 terms: relative to the norm of the result, 4 * 128 * 2^-24 and a condition
    # number sum|.| / |sum .| that random signs keep below sqrt(128) * 4.
    for theirs, ours_ in zip(*results, strict=True):
        assert float((theirs - ours_).norm() / theirs.norm()) <= 4 * 128 * 2.0**-24 * 48
        assert theirs.abs().max() > 0


@pytest.mark.parametrize("name", NAMES)
def test_straight_through_is_the_librarys(name):
    codes, base, a, b = layer(name, 3)
    del codes
    grad = torch.randn(24, 4, generator=generator(4))
    inside = torch.rand(24, 4, generator=generator(5)) > 0.3
    ours = straight_through(grad, base, inside, a, b, 1.5, name)
    theirs = library.straight_through(grad, base, inside, a, b, 1.5, FORMATS[name])
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bias_dtypes_and_frozen_factors(dtype):
    codes, base, a, b = layer("nvfp4", 5)
    x = torch.randn(3, codes.shape[1] * 2, generator=generator(1)).to(dtype).requires_grad_()
    bias = torch.zeros(24, dtype=dtype, requires_grad=True)
    y = scale_linear(x, a, b, codes, base, 0.01, 1.0, "nvfp4", bias)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == bias.grad.dtype == dtype
    assert bias.grad.tolist() == [3.0] * 24
    assert a.grad is None and b.grad is None


@pytest.mark.skipif(INTERPRETED, reason="the interpreter needs real tensors, as a compiler never has")
def test_torchs_tools_see_the_operators():
    codes, base, a, b = layer("nvfp4", 7)
    factor, x, dy = torch.ones(1), torch.randn(4, codes.shape[1] * 2), torch.randn(4, 24)
    operators = torch.ops.prism_kernels
    for operator, arguments in (
        (operators.qast_scales.default, (base, a, b, 0.5, "nvfp4")),
        (operators.scale_grad.default, (dy, x, codes, factor, None, 16, [])),
        (operators.grad_input.default, (dy, codes, base, factor, "nvfp4", [])),
    ):
        torch.library.opcheck(operator, arguments)
    compiled = torch.compile(scale_linear, backend="aot_eager", fullgraph=True)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, a, b)]
    again = [tensor.clone().requires_grad_() for tensor in (x, a, b)]
    compiled(*leaves, codes, base, factor, 0.5).sum().backward()
    scale_linear(*again, codes, base, factor, 0.5).sum().backward()
    for one, other in zip(leaves, again, strict=True):
        assert torch.equal(one.grad, other.grad)


def test_what_is_kept_between_forward_and_backward():
    codes, base, a, b = layer("nvfp4", 8)
    kept: list[torch.Tensor] = []
    x = torch.randn(4, codes.shape[1] * 2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ScaleLinear.apply(x, a.requires_grad_(), b.requires_grad_(), None, codes, base, torch.ones(1), 1.0, "nvfp4")
    given = {tensor.data_ptr() for tensor in (x, a, b, codes, base)}
    own = sum(tensor.numel() * tensor.element_size() for tensor in kept if tensor.data_ptr() not in given and tensor.numel() > 1)
    assert own == 2 * base.numel()


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("uint8", lambda c, s, a, b: qast_scales(s.float(), a, b, 1.0)),
        ("no kernel", lambda c, s, a, b: qast_scales(s, a, b, 1.0, "int4-g32")),
        ("do not make a correction", lambda c, s, a, b: qast_scales(s, a, b[:3], 1.0)),
        ("do not make a correction", lambda c, s, a, b: qast_scales(s, a[:2], b, 1.0)),
        ("do not make a correction", lambda c, s, a, b: qast_scales(s[None], a, b, 1.0)),
        ("one dtype", lambda c, s, a, b: scale_grad(torch.zeros(2, 24).half(), torch.zeros(2, 64), c)),
        ("x has shape", lambda c, s, a, b: scale_grad(torch.zeros(2, 24), torch.zeros(3, 64), c)),
        ("dy has shape", lambda c, s, a, b: scale_grad(torch.zeros(2, 23), torch.zeros(2, 64), c)),
        ("no plane", lambda c, s, a, b: scale_grad(torch.zeros(2, 24), torch.zeros(2, 64), c[None])),
        (
            "offsets",
            lambda c, s, a, b: scale_grad(torch.zeros(2, 24), torch.zeros(2, 64), c[None], offsets=torch.zeros(5, dtype=torch.int32)),
        ),
        ("do not divide", lambda c, s, a, b: scale_grad(torch.zeros(2, 24), torch.zeros(2, 48), c[:, :24], format="mxfp4")),
        ("scales have shape", lambda c, s, a, b: grad_input(torch.zeros(2, 24), c, s[:, :2])),
        ("x has shape", lambda c, s, a, b: scale_linear(torch.zeros(2, 60), a, b, c, s)),
    ],
)
def test_refusals(message, call):
    with pytest.raises(ValueError, match=message) as caught:
        call(*layer("nvfp4", 1))
    assert "\n" not in str(caught.value)


def test_every_tile_of_the_space_runs():
    dy, x, codes = integers((70, 130), torch.float32, 1), integers((70, 160), torch.float32, 2), random_bytes((130, 80), 0, 256, 3)
    expected = scale_grad_ref(dy, x, codes)
    for tile in GRAD_TILES:
        assert torch.equal(scale_grad(dy, x, codes, tile=tile), expected)
