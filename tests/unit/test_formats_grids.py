"""prism_ray.formats.grids: decode of every byte, encode against a float64 brute force, the amax rules of FMT-03, no illegal byte (FMT-04)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from prism_ray.core.errors import FormatError, UnknownName
from prism_ray.formats.grids import BF16, E4M3, E8M0, require_legal
from prism_ray.formats.spec import FORMATS

GRIDS = [E4M3(), E8M0(), BF16()]
ALL_BYTES = torch.arange(256, dtype=torch.uint8)
E2M1_MAX = 6.0
by_name = pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)


def all_data(width: int) -> torch.Tensor:
    """Every pattern of `width` bytes, one scale a row: [256^width, width]."""
    return ALL_BYTES[:, None] if width == 1 else torch.cartesian_prod(ALL_BYTES, ALL_BYTES)


def magnitudes() -> torch.Tensor:
    """Positive float32 numbers: 40 random ones per decade over the whole range, subnormals, and the neighbours of every power of two."""
    generator = torch.Generator().manual_seed(0)
    decades = torch.arange(-45, 39, dtype=torch.float64)
    spread = (10 ** (decades[:, None] + torch.rand(84, 40, generator=generator, dtype=torch.float64))).flatten()
    powers = torch.ldexp(torch.ones(276, dtype=torch.float64), torch.arange(-148, 128)).to(torch.float32)
    near = torch.cat([powers, powers.nextafter(torch.tensor(0.0)), powers.nextafter(torch.tensor(math.inf))])
    special = torch.tensor([448.0, 460.0, 464.0, 464.0001, 5000.0, torch.finfo(torch.float32).max, 2.0**-9, 2.0**-10])
    found = torch.cat([spread.to(torch.float32), near, special])
    return found[torch.isfinite(found) & (found > 0)]


def test_e4m3_decodes_every_byte_as_torch_does():
    expected = ALL_BYTES.view(torch.float8_e4m3fn).to(torch.float32)
    assert torch.equal(E4M3().decode(ALL_BYTES).view(torch.int32), expected.view(torch.int32))


def test_e8m0_decodes_every_byte_as_torch_does_and_exactly():
    decoded = E8M0().decode(ALL_BYTES)
    expected = ALL_BYTES.view(torch.float8_e8m0fnu).to(torch.float32)
    assert torch.equal(decoded[:255], expected[:255])
    assert [math.ldexp(1.0, byte - 127) for byte in range(255)] == decoded[:255].tolist()
    assert math.isnan(decoded[255])


@by_name
def test_decode_keeps_the_shape(grid):
    assert grid.decode(ALL_BYTES.reshape(2, 16, 8)).shape == (2, 16, 8 // grid.width)
    assert grid.illegal(ALL_BYTES.reshape(2, 16, 8)).shape == (2, 16, 8 // grid.width)
    assert grid.encode(torch.ones(2, 3)).shape == (2, 3 * grid.width)


@by_name
def test_every_legal_scale_encodes_to_its_own_byte(grid):
    data = all_data(grid.width)
    legal = data[~grid.illegal(data).squeeze(-1)]
    values = grid.decode(legal)
    assert (values >= 0).all() and values.isfinite().all()
    assert torch.equal(grid.encode(values), legal)
    assert len(legal) == {"e4m3": 127, "e8m0": 255, "bf16": 0x7F80}[grid.name]


def test_bf16_encodes_to_the_nearest_value_ties_to_even_in_little_endian_bytes():
    """Integer reference on the bit pattern of a float32: half a step is 0x8000, an exact half goes to the even upper half."""
    x = torch.cat([magnitudes(), torch.tensor([1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 0.0, torch.finfo(torch.float32).max, math.inf])])
    raw = x.view(torch.int32).to(torch.int64)
    upper, lower = raw >> 16, raw & 0xFFFF
    expected = (upper + ((lower > 0x8000) | ((lower == 0x8000) & (upper % 2 == 1))).to(torch.int64)).clamp(max=0x7F7F)
    data = BF16().encode(x).reshape(-1, 2).to(torch.int64)
    assert torch.equal(data[:, 0] + 256 * data[:, 1], expected)
    assert BF16().encode(torch.tensor([1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8])).tolist() == [0x80, 0x3F, 0x80, 0x3F, 0x82, 0x3F]


def test_bf16_reads_slices_at_any_byte_and_negative_or_non_finite_scales_are_illegal():
    grid = BF16()
    data = torch.cat([torch.zeros(1, dtype=torch.uint8), grid.encode(torch.tensor([0.5, 3.0]))])
    assert grid.decode(data[1:]).tolist() == [0.5, 3.0]
    bad = torch.tensor([-1.0, -0.0, math.inf, math.nan, 0.0, 2.0], dtype=torch.bfloat16).view(torch.uint8)
    assert grid.illegal(bad).tolist() == [True, True, True, True, False, False]
    with pytest.raises(FormatError, match=r"w: scale byte 0xBF80 at \[0, 0\] is not legal on grid bf16"):
        require_legal(grid, bad[None], "w")


def test_e8m0_has_no_rule_for_codes_of_another_largest():
    with pytest.raises(FormatError, match=r"rules of grid e8m0 are those of E2M1 codes, whose largest is 6, not 7\.5"):
        E8M0().encode_amax(torch.ones(2), "even", 7.5)


@pytest.mark.parametrize("grid", [E4M3(), BF16()], ids=["e4m3", "bf16"])
def test_nearest_maps_the_maximum_to_the_largest_code(grid):
    amax = torch.tensor([7.5, 3.5, 6.0, 1.25])
    for largest in (7.5, 3.5, 6.0):
        assert torch.equal(grid.encode_amax(amax, "nearest", largest), grid.encode(amax / largest))


def test_e4m3_encodes_to_the_nearest_value_ties_to_even():
    """float64 brute force over the 127 legal values: the distances are exact, since both operands are float32 or shorter."""
    grid = E4M3()
    values = grid.decode(ALL_BYTES[:127]).to(torch.float64)
    middles = ((values[1:] + values[:-1]) / 2).to(torch.float32)  # five significant bits: exact
    x = torch.cat([magnitudes(), middles, middles.nextafter(torch.tensor(0.0)), middles.nextafter(torch.tensor(math.inf)), torch.zeros(1)])
    distance = (x.to(torch.float64).clamp(max=448)[:, None] - values).abs()
    nearest = distance == distance.min(dim=1, keepdim=True).values
    # Where two bytes are equally near, the even byte is the one with mantissa bit 0.
    even = torch.arange(127) % 2 == 0
    expected = torch.where(nearest.sum(1, keepdim=True) == 2, nearest & even, nearest)
    assert (expected.sum(1) == 1).all() and (nearest.sum(1) == 2).sum() >= 126
    assert torch.equal(grid.encode(x), expected.to(torch.uint8).argmax(1).to(torch.uint8))


def test_e8m0_encodes_to_the_nearest_power_in_the_log2_domain():
    """Exact without logarithms: 2^e is log2-nearest to x iff 2^(e-1/2) < x < 2^(e+1/2), that is 2^(2e-1) < x^2 < 2^(2e+1); integers decide."""
    grid = E8M0()
    # Also every float32 within 3 units of the irrational midpoint sqrt(2) 2^e, where a rounded comparison goes wrong.
    middle = torch.tensor(math.sqrt(0.5), dtype=torch.float32).view(torch.int32) + torch.arange(-3, 4, dtype=torch.int32)
    near = (middle.view(torch.float32) * torch.ldexp(torch.ones(241), torch.arange(-120, 121))[:, None]).flatten()
    x = torch.cat([magnitudes(), near])
    for number, byte in zip(x.tolist(), grid.encode(x).tolist(), strict=True):
        mantissa, exponent = math.frexp(number)  # number = mantissa * 2^exponent, mantissa in [0.5, 1)
        whole = int(mantissa * 2**53)
        expected = exponent - 1 if whole * whole < 2**105 else exponent  # whole^2 against 2^106 * 0.5
        assert byte == min(max(expected + 127, 0), 254), number.hex()


@pytest.mark.parametrize(("scale", "byte"), [(448.0, 0x7E), (460.0, 0x7E), (464.0, 0x7E), (5000.0, 0x7E), (math.inf, 0x7E), (0.0, 0)])
def test_e4m3_clamps_before_the_cast(scale, byte):
    assert E4M3().encode(torch.tensor([scale])).tolist() == [byte]


def test_e4m3_subnormal_scales():
    # Half of the smallest step ties to 0 (even); just above goes to 1; 1.5 steps ties to 2.
    step = 2.0**-9
    assert E4M3().encode(torch.tensor([step / 2, step * 0.5000001, step, 1.5 * step, 2.5 * step, 7 * step])).tolist() == [0, 1, 1, 2, 2, 7]


# FMT-03. scale = 2^(byte - 127)
@pytest.mark.parametrize(
    ("rule", "expected"), [("floor", [1.0, 1.0, 1.0, 1.0]), ("even", [1.0, 1.0, 1.0, 2.0]), ("ceil", [1.0, 1.0, 2.0, 2.0])]
)
def test_amax_rules(rule, expected):
    grid = E8M0()
    amax = torch.tensor([4.0, 6.0, 6.5, 7.0])
    assert grid.decode(grid.encode_amax(amax, rule, E2M1_MAX)).tolist() == expected
    # A rule looks at the mantissa only: the same table holds a million binades up or down.
    for shift in (-100, 20, 100):
        scaled = torch.ldexp(amax, torch.tensor(shift))
        assert grid.decode(grid.encode_amax(scaled, rule, E2M1_MAX)).tolist() == [math.ldexp(value, shift) for value in expected]


@pytest.mark.parametrize("rule", ["floor", "even", "ceil"])
def test_amax_rules_equal_their_definitions(rule):
    """floor: floor(log2 a) - 2; even: one up from mantissa 1.75; ceil: the smallest e with a / 2^e <= 6; all exact in integers."""
    grid = E8M0()
    x = magnitudes()
    for number, byte in zip(x.tolist(), grid.encode_amax(x, rule, E2M1_MAX).tolist(), strict=True):
        mantissa, exponent = math.frexp(number)
        if rule == "ceil":
            expected = exponent - 3 if mantissa * 8 <= 6 else exponent - 2
            assert math.ldexp(mantissa, exponent - expected) <= 6 < math.ldexp(mantissa, exponent - expected + 1)
        else:
            expected = exponent - 3 + (rule == "even" and mantissa * 2 >= 1.75)
        assert byte == min(max(expected + 127, 0), 254), number.hex()


@pytest.mark.parametrize("rule", ["floor", "even", "ceil"])
def test_amax_edges_never_give_byte_255(rule):
    largest = torch.finfo(torch.float32).max
    data = E8M0().encode_amax(torch.tensor([0.0, 2.0**-130, 2.0**-149, largest, math.inf]), rule, E2M1_MAX)
    # The largest float32 is just under 2^128: floor gives 2^125 (byte 252), the other two 2^126. Infinity would need byte 255: saturates.
    assert data.tolist() == [0, 0, 0, 252 if rule == "floor" else 253, 254]


def test_a_scale_above_the_e8m0_range_saturates():
    data = E8M0().encode(torch.tensor([2.0**127, torch.finfo(torch.float32).max, math.inf, 0.0, 2.0**-149]))
    assert data.tolist() == [254, 254, 254, 0, 0]


@by_name
def test_nan_gives_a_byte_that_is_refused(grid):
    data = grid.encode(torch.tensor([1.0, math.nan]))
    assert grid.illegal(data).tolist() == [False, True]
    for rule in grid.amax_rules:
        assert grid.illegal(grid.encode_amax(torch.tensor([1.0, math.nan]), rule, E2M1_MAX)).tolist() == [False, True]


@by_name
def test_no_number_encodes_to_an_illegal_byte(grid):
    x = torch.cat([magnitudes(), torch.tensor([0.0, math.inf])])
    assert not grid.illegal(grid.encode(x)).any()
    for rule in grid.amax_rules:
        assert not grid.illegal(grid.encode_amax(x, rule, E2M1_MAX)).any()


def test_illegal_bytes():
    assert ALL_BYTES[E4M3().illegal(ALL_BYTES)].tolist() == list(range(0x7F, 0x100))
    assert ALL_BYTES[E8M0().illegal(ALL_BYTES)].tolist() == [255]


def test_require_legal_names_tensor_row_and_block():
    data = torch.full((2, 3), 0x38, dtype=torch.uint8)
    require_legal(E4M3(), data, "layer.q_proj")
    data[1, 2] = 0x7F
    with pytest.raises(FormatError, match=r"layer\.q_proj: scale byte 0x7F at \[1, 2\]"):
        require_legal(E4M3(), data, "layer.q_proj")


@by_name
def test_an_unknown_rule_names_the_known_ones(grid):
    with pytest.raises(UnknownName, match=f"no scale rule 'round'.*{grid.amax_rules[0]}"):
        grid.encode_amax(torch.ones(1), "round", E2M1_MAX)


@pytest.mark.parametrize("name", list(FORMATS))
def test_specs_are_consistent_with_their_grids(name):
    spec = FORMATS[name]
    assert spec.name == name and spec.amax_rule in spec.grid.amax_rules
    data = all_data(spec.grid.width)
    legal = spec.grid.decode(data[~spec.grid.illegal(data).squeeze(-1)])
    assert legal.max() == spec.grid.largest and legal[legal > 0].min() == spec.grid.smallest


def test_a_column_count_that_does_not_divide_names_both_numbers_and_what_fits():
    with pytest.raises(FormatError, match=r"proj: 48 columns do not divide into mxfp4 blocks of 32; formats that fit: nvfp4"):
        FORMATS["mxfp4"].blocks(48, "proj")
    with pytest.raises(FormatError, match="no format fits"):
        FORMATS["nvfp4"].blocks(40)
    with pytest.raises(
        FormatError,
        match="x: 192 columns do not divide into int4-g128 blocks of 128; formats that fit: nvfp4, mxfp4, int4-g32, int4-g64, int3-g64",
    ):
        FORMATS["int4-g128"].blocks(192, "x")
    with pytest.raises(UnknownName, match="did you mean 'nvfp4'"):
        FORMATS["nvfp"]


def test_a_tensor_scale_over_two_byte_scales_cannot_be_registered():
    """Its product would be rounded twice in bfloat16."""
    with pytest.raises(FormatError, match="int4-g64: a tensor scale"):
        replace(FORMATS["int4-g64"], has_tensor_scale=True)
