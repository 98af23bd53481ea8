"""gram against its reference, float64 and prism_ray.hessian.state.

The same tests run twice: here on the CPU path, and in a process of its own under Triton's interpreter (`test_under_the_interpreter`), since TRITON_INTERPRET
must be set before prism_kernels is imported.

*Exact* inputs are small integers and weights that are powers of two: partial sums are multiples of 1/4 below 2^20, exact in float32 in any order, so bits agree. *Real*
ones: a float32 sum of n products, each rounded once where there is a weight, is within (n + 2) u sum |w x x'| (u = 2^-24; Higham, eq. 3.5), whatever its order.
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
from prism_kernels.grams import GRAM_TILES, GramTile, fill_upper, gram, gram_ref

from prism_ray.hessian.state import GramState

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SMALL = GramTile(16, 16)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def integers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=generator(seed)).to(dtype)


def powers(rows: int, seed: int) -> torch.Tensor:
    return torch.ldexp(torch.ones(rows), torch.randint(-2, 3, (rows,), generator=generator(seed)))


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


def test_hand_worked():
    x = torch.tensor([[1.0, 2, 3], [0, -1, 4], [7, 7, 7]], dtype=torch.bfloat16)
    mask = torch.tensor([True, True, False])
    weight = torch.tensor([1.0, 2.0, 100.0])
    got = gram(x, mask=mask, weight=weight, tile=SMALL)
    assert got.tolist() == [[1.0, 0.0, 0.0], [2.0, 6.0, 0.0], [3.0, -2.0, 41.0]]
    assert fill_upper(got).tolist() == [[1.0, 2.0, 3.0], [2.0, 6.0, -2.0], [3.0, -2.0, 41.0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 33), (5, 16), (40, 50), (17, 81)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_exact_on_integers(dtype, shape, masked, weighted):
    x = integers(shape, dtype, 1)
    mask = torch.rand(shape[0], generator=generator(2)) > 0.4 if masked else None
    weight = powers(shape[0], 3) if weighted else None
    if mask is not None:
        x[~mask] = torch.nan  # padding may hold anything
    expected = gram_ref(x, mask=mask, weight=weight)
    assert not expected.triu(1).any() and torch.isfinite(expected).all()
    for tile in (SMALL, GramTile(32, 16), None):
        assert torch.equal(gram(x, mask=mask, weight=weight, tile=tile), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_real_inputs(dtype, weighted):
    x = torch.randn(50, 40, generator=generator(1)).to(dtype)
    weight = torch.randn(50, generator=generator(2)) if weighted else None
    exact = gram_ref(x, weight=weight, dtype=torch.float64)
    magnitude = gram_ref(x.abs(), weight=None if weight is None else weight.abs(), dtype=torch.float64)
    for got in (gram(x, weight=weight, tile=SMALL), gram_ref(x, weight=weight)):
        assert bool(((got.double() - exact).abs() <= 52 * 2.0**-24 * magnitude).all())


def test_three_parts_of_a_weighted_product_are_as_good_as_float32():
    """What the kernel does with weights on bfloat16, in torch: the parts add up to the float32 product exactly (24 bits in three pieces of 8)."""
    product = torch.randn(1000, generator=generator(3)) * torch.randn(1000, generator=generator(4)).bfloat16()
    high = product.bfloat16()
    rest = product - high.float()
    middle = rest.bfloat16()
    low = (rest - middle.float()).bfloat16()
    assert torch.equal(high.double() + middle.double() + low.double(), product.double())
    assert not torch.equal(high.double() + middle.double(), product.double())


def test_out_is_added_to_and_its_upper_triangle_left_alone():
    x = integers((9, 20), torch.float32, 1)
    held = torch.full((20, 20), torch.nan).triu(1) + torch.ones(20, 20).tril()
    got = gram(x, out=held, tile=SMALL)
    assert got is held
    lower = torch.tril_indices(20, 20)
    assert torch.equal(held[lower[0], lower[1]], (gram_ref(x) + 1)[lower[0], lower[1]])
    upper = torch.triu_indices(20, 20, 1)
    assert held[upper[0], upper[1]].isnan().all()


@pytest.mark.parametrize("masked", [False, True])
def test_experts(masked):
    x, weight = integers((11, 24), torch.bfloat16, 1), powers(11, 2)
    mask = torch.rand(11, generator=generator(3)) > 0.5 if masked else None
    offsets = torch.tensor([0, 4, 4, 5, 11])  # the second has no rows, the third one
    for dtype in (torch.int32, torch.int64):
        got = gram(x, mask=mask, weight=weight, offsets=offsets.to(dtype), tile=SMALL)
        assert torch.equal(got, gram_ref(x, mask=mask, weight=weight, offsets=offsets))
    assert got.shape == (4, 24, 24) and not got[1].any()
    alone = gram(x[5:], mask=None if mask is None else mask[5:], weight=weight[5:], tile=SMALL)
    assert torch.equal(got[3], alone)
    one = gram(x, offsets=torch.tensor([0, 11]), tile=SMALL)
    assert torch.equal(one[0], gram(x, tile=SMALL))


def test_is_the_librarys_state():
    x = integers((70, 30), torch.float32, 4)
    state = GramState(width=30).add(x, weight=0.5)
    ours = fill_upper(gram(x, weight=torch.full((70,), 0.5), tile=SMALL))
    assert torch.equal(ours.double(), state.matrix())


def test_more_tiles_than_a_rounded_square_root_can_name():
    """Every tile of a wide matrix is computed once: H of one row of ones and a marked column, 20 tiles a side."""
    x = torch.ones(1, 320)
    x[0, 77] = 3.0
    assert torch.equal(gram(x, tile=SMALL), gram_ref(x))


def test_nothing_to_add():
    assert not gram(torch.zeros(0, 5)).any()
    assert not gram(torch.randn(3, 5), mask=torch.zeros(3, dtype=torch.bool), tile=SMALL).any()
    assert gram(torch.zeros(3, 0)).shape == (0, 0)


@pytest.mark.parametrize("tile", GRAM_TILES)
def test_every_tile_of_the_space_runs(tile):
    x = integers((70, 150), torch.float32, 1)
    assert torch.equal(gram(x, tile=tile), gram_ref(x))


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("float64", lambda x: gram(x.double())),
        ("x has shape", lambda x: gram(x[None])),
        ("mask must be bool", lambda x: gram(x, mask=torch.ones(4))),
        ("mask must be bool", lambda x: gram(x, mask=torch.ones(3, dtype=torch.bool))),
        ("weight must be float", lambda x: gram(x, weight=torch.ones(3))),
        ("offsets are torch.float32", lambda x: gram(x, offsets=torch.ones(3))),
        ("expected contiguous float32", lambda x: gram(x, out=torch.zeros(8, 8, dtype=torch.float64))),
        ("expected contiguous float32", lambda x: gram(x, out=torch.zeros(7, 7))),
        ("expected contiguous float32", lambda x: gram(x, offsets=torch.tensor([0, 4]), out=torch.zeros(8, 8))),
    ],
)
def test_refusals(message, call):
    with pytest.raises(ValueError, match=message) as caught:
        call(torch.zeros(4, 8))
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter needs real tensors, as a compiler never has")
def test_torchs_tools_see_the_operator():
    arguments = (torch.randn(4, 6), torch.ones(4, dtype=torch.bool), torch.ones(4), None, torch.zeros(6, 6), [])
    torch.library.opcheck(torch.ops.prism_kernels.gram.default, arguments)
