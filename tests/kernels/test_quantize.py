"""quantize_rtn against prism_ray.quantizers.rtn, byte by byte; everything here is exact.

The same tests run twice: here on the CPU path, and in a process of its own under Triton's interpreter (`test_under_the_interpreter`), since TRITON_INTERPRET
must be set before prism_kernels is imported.
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
from prism_kernels.quantize import RTN_TILES, RULES, RtnPlanes, RtnTile, quantize_rtn, quantize_rtn_ref

from prism_ray.formats.spec import FORMATS
from prism_ray.quantizers.rtn import rtn

CASES = [(name, rule) for name, rules in RULES.items() for rule in rules]


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


def same_as_the_library(
    weight: torch.Tensor, name: str, rule: str | None = None, amax: torch.Tensor | None = None, tile: RtnTile | None = None
) -> RtnPlanes:
    expected, _ = rtn(weight, FORMATS[name], scale_rule=rule, amax=amax)
    got = quantize_rtn(weight, name, scale_rule=rule, amax=amax, tile=tile)
    for planes in (got, quantize_rtn_ref(weight, name, scale_rule=rule, amax=amax)):
        assert torch.equal(planes.scales, expected.scales)
        assert torch.equal(planes.codes, expected.codes)
        assert torch.equal(planes.tensor_scale, expected.tensor_scale)
        assert (planes.divisor is None) == (expected.divisor is None)
        assert planes.divisor is None or torch.equal(planes.divisor, expected.divisor)
    assert int(got.scales.max()) < KERNEL_FORMATS[name].illegal_from
    return got


def test_rules_are_the_librarys():
    for name, rules in RULES.items():
        assert sorted(rules) == sorted(FORMATS[name].grid.amax_rules)
        assert rules[0] == FORMATS[name].amax_rule


def test_hand_worked_nvfp4_block():
    # amax 2688 makes the tensor scale 1; the second block's maximum 6 makes its scale 1 (byte 0x38). Codes 1, 2, 3, 4, 5, 6, 7, 1, ... low nibble first (FMT-01);
    # then every tie of the grid, which goes to the even code, and the two zeros.
    first = torch.full((16,), 2688.0)
    second = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6, 0.5, -0.5, -6, 0.25, 0.75, 1.25, -1.75, 2.5, 3.5])
    third = torch.tensor([6.0, 5, -5, 0.2499, 0.2501, 0.0, -0.0, -0.1, 1.2499, 1.2501, 4.999, 5.001, -3.5, -2.5, -0.75, -0.25])
    got = same_as_the_library(torch.cat([first, second, third])[None], "nvfp4")
    assert got.tensor_scale.item() == 1.0
    assert got.scales.tolist() == [[0x7E, 0x38, 0x38]]
    codes = torch.stack([got.codes & 15, got.codes >> 4], dim=-1).flatten()
    assert got.codes[0, 8] == 0x21
    assert codes[16:32].tolist() == [1, 2, 3, 4, 5, 6, 7, 1, 9, 15, 0, 2, 2, 12, 4, 6]
    assert codes[32:].tolist() == [7, 6, 14, 0, 1, 0, 8, 8, 2, 3, 6, 7, 14, 12, 10, 8]


@pytest.mark.parametrize(("rule", "exponents"), [("floor", [0, 0, 0, 0]), ("even", [0, 0, 0, 1]), ("ceil", [0, 0, 1, 1])])
def test_hand_worked_e8m0_rules(rule, exponents):
    # FMT-03: maxima 4, 6, 6.5, 7.
    weight = torch.zeros(4, 32)
    weight[:, 5] = torch.tensor([4.0, -6.0, 6.5, 7.0])
    got = same_as_the_library(weight, "mxfp4", rule)
    assert (got.scales[:, 0].int() - 127).tolist() == exponents


@pytest.mark.parametrize(("name", "rule"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_random_weights(name, rule, dtype):
    block = FORMATS[name].block
    for shape, seed in (((1, block), 0), ((7, 3 * block), 1), ((33, 320), 2), ((3, 5, 2 * block), 3), ((1, 2, block), 4)):
        weight = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        same_as_the_library(weight, name, rule)


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_every_binade_and_every_rounding_boundary(name, rule):
    """Maxima over all of float32's exponents, subnormal ones too, with mantissas at and beside each rule's boundaries; other values are parts of them."""
    block = FORMATS[name].block
    mantissa = torch.tensor([0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF])
    bits = (torch.arange(255)[:, None] << 23) + mantissa
    maxima = bits.flatten().to(torch.int32).view(torch.float32)
    part = torch.tensor([1.0, -1, 0.5, 0, -0.0, 0.75, 1 / 3, -0.125, 1 / 6, 1 / 12, 1 / 24, -1 / 24, 0.9, 0.7, 5 / 6, 5 / 12])
    weight = maxima[:, None] * part.repeat(block // 16)
    tile = RtnTile(512, block)
    if name == "mxfp4":
        same_as_the_library(weight, name, rule, tile=tile)
    # NVFP4's scales span 18 binades below the tensor's maximum: every window of them.
    for low in range(0, 255, 17) if name == "nvfp4" else ():
        window = weight[low * 9 : (low + 22) * 9]
        same_as_the_library(window, name, rule, tile=tile)


def test_every_e4m3_byte_is_reached_and_ties_go_to_even():
    # Tensor scale 1 (amax 2688); block maxima 6 times each scale, and 6 times each midpoint between two: exact in float32.
    values = FORMATS["nvfp4"].grid.decode(torch.arange(127, dtype=torch.uint8))
    maxima = torch.cat([values, (values[:-1] + values[1:]) / 2]) * 6
    weight = torch.zeros(len(maxima), 16)
    weight[:, 3] = maxima
    got = same_as_the_library(weight, "nvfp4", amax=torch.tensor(2688.0))
    assert got.scales[:127, 0].tolist() == list(range(127))
    assert got.scales[127:, 0].tolist() == [(n + 1) // 2 * 2 for n in range(126)]


@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_degenerate_blocks(name):
    # FMT-04: zero, subnormal scale, scale byte 0, negative zeros, the tensor's maximum.
    block = FORMATS[name].block
    weight = torch.zeros(6, block)
    weight[1, 0], weight[2, 0], weight[3, 0], weight[4] = 0.5, 0.5e-5, -1e-6, -0.0
    weight[5, 1] = 2.0**-140
    got = same_as_the_library(weight, name)
    value = decode_weight(got.codes, got.scales, name) * got.tensor_scale
    assert not value[0].any() and not value[4].any()
    assert got.scales.max() < KERNEL_FORMATS[name].illegal_from
    if name == "nvfp4":
        assert got.scales[3, 0] == 0 and not got.codes[3].any()
        assert 0 < got.scales[2, 0] < 8  # a subnormal scale


@pytest.mark.parametrize("name", KERNEL_FORMATS)
@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-38, 1e-30, 1e30, 3.4e38])
def test_tensors_at_the_ends_of_float32(name, scale):
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).clamp(-1, 1) * scale
    same_as_the_library(weight, name)
    batch = torch.stack([weight, torch.ones(4, 64), torch.zeros(4, 64)])
    same_as_the_library(batch, name)


@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_a_given_maximum(name):
    weight = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(2))
    same_as_the_library(weight, name, amax=torch.tensor([8.0, 100.0]))
    same_as_the_library(weight[0], name, amax=torch.tensor(8.0))


@pytest.mark.parametrize("tile", RTN_TILES)
@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_every_tile_of_the_space_gives_the_same_bytes(name, tile):
    same_as_the_library(torch.randn(35, 288, generator=torch.Generator().manual_seed(3)), name, tile=tile)


def test_empty_weights_and_strides():
    assert quantize_rtn(torch.zeros(0, 32)).scales.shape == (0, 2)
    weight = torch.randn(64, 6, generator=torch.Generator().manual_seed(4)).T
    same_as_the_library(weight, "nvfp4")


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("do not divide", lambda: quantize_rtn(torch.zeros(2, 24))),
        ("no scale rule 'even'", lambda: quantize_rtn(torch.zeros(2, 32), scale_rule="even")),
        ("no kernel", lambda: quantize_rtn(torch.zeros(2, 32), "int4-g32")),
        ("2 or 3 dimensions", lambda: quantize_rtn(torch.zeros(32))),
        ("float64", lambda: quantize_rtn(torch.zeros(2, 32, dtype=torch.float64))),
        ("NaN or infinity", lambda: quantize_rtn(torch.tensor([[float("nan")] + [0.0] * 31]))),
        ("NaN or infinity", lambda: quantize_rtn(torch.tensor([[0.0] * 31 + [float("-inf")]]))),
        ("does not bound", lambda: quantize_rtn(torch.ones(2, 32), amax=torch.tensor(0.5))),
        ("does not bound", lambda: quantize_rtn(torch.ones(2, 32), amax=torch.ones(1))),
    ],
)
def test_refusals(message, call):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter needs real tensors, as a compiler never has")
def test_torchs_tools_see_the_operator():
    torch.library.opcheck(torch.ops.prism_kernels.quantize_rtn.default, (torch.randn(1, 3, 64), torch.ones(1), "nvfp4", "nearest", []))
