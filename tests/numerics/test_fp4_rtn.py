"""RTN and dequantization of every format against float64 references written here: hand-worked blocks, exhaustive products, optimal codes, FMT-04."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from prism_ray.core.errors import FormatError, UnknownName
from prism_ray.formats import e2m1
from prism_ray.formats.spec import FORMATS, FP4_FORMATS, INTEGER_FORMATS, FormatSpec
from prism_ray.formats.tensor import QuantTensor
from prism_ray.quantizers.rtn import QUANTIZERS, rtn, tensor_scale_for

NVFP4, MXFP4 = FORMATS["nvfp4"], FORMATS["mxfp4"]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
every = pytest.mark.parametrize("name", list(FORMATS))
both = pytest.mark.parametrize("name", FP4_FORMATS)
integers = pytest.mark.parametrize("name", [spec.name for spec in INTEGER_FORMATS])


def weight(*shape: int, seed: int = 0, std: float = 0.05) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std


def elements(spec: FormatSpec) -> torch.Tensor:
    """The 16 code values in float64, stated here: E2M1's table, or offset binary around 8."""
    return E2M1 if spec.codes.name == "e2m1" else torch.arange(16, dtype=torch.float64) - 8


def legal_elements(spec: FormatSpec) -> torch.Tensor:
    """The values that a code plane of the format may hold."""
    return elements(spec)[4:12] if spec.codes.name == "int3" else elements(spec)


def exact(tensor: QuantTensor) -> torch.Tensor:
    """The real-valued weight in float64: code * scale * tensor_scale has at most 2 + 4 + 24 or 4 + 8 significant bits, so nothing is rounded."""
    codes = e2m1.unpack(tensor.codes)
    scale = tensor.format.grid.decode(tensor.scales).to(torch.float64).repeat_interleave(tensor.format.block, dim=-1)
    factor = tensor.tensor_scale.to(torch.float64)
    return elements(tensor.format)[codes.long()] * scale * factor.reshape(*factor.shape, 1, 1)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def all_codes_and_scales(name: str, tensor_scale: float) -> QuantTensor:
    """Every legal scale byte, each with every pair of codes that a byte can hold: [bytes, 512]."""
    spec = FORMATS[name]
    legal = torch.arange(256, dtype=torch.uint8)
    legal = legal[~spec.grid.illegal(legal)]
    codes = torch.arange(256, dtype=torch.uint8).expand(len(legal), 256).contiguous()
    scales = legal[:, None].expand(-1, 512 // spec.block).contiguous()
    return QuantTensor(codes=codes, scales=scales, tensor_scale=torch.tensor(tensor_scale), format=spec)


@pytest.mark.parametrize("tensor_scale", [1.0, 2.0**-10, 1 / 3, 2.7901786e-4, 1.1754944e-38, 1e30])
def test_nvfp4_dequantizes_every_code_under_every_scale_exactly(tensor_scale):
    tensor = all_codes_and_scales("nvfp4", tensor_scale)
    assert torch.equal(bits(tensor.dequantize()), bits(exact(tensor).to(torch.float32)))
    assert torch.equal(bits(tensor.dequantize(torch.bfloat16)), bits(tensor.dequantize().to(torch.bfloat16)))


def test_mxfp4_dequantizes_every_code_under_every_scale_exactly():
    tensor = all_codes_and_scales("mxfp4", 1.0)
    reference = exact(tensor)
    assert torch.equal(bits(tensor.dequantize()), bits(reference.to(torch.float32)))
    assert torch.equal(tensor.dequantize(torch.bfloat16).to(torch.float64), reference.to(torch.bfloat16).to(torch.float64))
    # Only 4 * 2^126, 6 * 2^126 and codes above 1.5 at 2^127 leave float32's range; everything else is exact, subnormals included.
    finite = tensor.dequantize().isfinite()
    assert torch.equal(tensor.dequantize().to(torch.float64)[finite], reference[finite])
    assert torch.equal(finite, reference.abs() < 2.0**128)


@integers
def test_integers_dequantize_every_code_under_every_scale_exactly(name):
    """All 2^15 non-negative bfloat16 scales, each with every pair of codes: exact in float32, rounded once in bfloat16."""
    spec = FORMATS[name]
    scales = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.uint8).reshape(-1, 2)
    codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(2).reshape(-1, spec.block // 2)  # every byte, two by two
    for start in range(0, len(scales), 4096):
        plane = scales[start : start + 4096]
        tensor = QuantTensor(
            codes=codes.reshape(1, -1).expand(len(plane), -1).contiguous(),
            scales=plane.repeat(1, codes.shape[0]),
            tensor_scale=torch.tensor(1.0),
            format=spec,
        )
        reference = exact(tensor)
        whole = tensor.dequantize()
        finite = reference.abs() < 2.0**128
        assert torch.equal(whole.isfinite(), finite) and torch.equal(whole.to(torch.float64)[finite], reference[finite])
        assert torch.equal(bits(tensor.dequantize(torch.bfloat16)), bits(whole.to(torch.bfloat16)))


def test_hand_worked_int4_and_int3_blocks():
    """Largest magnitude 7.5 steps (3.5 for int3): the positive end is half a step short, the negative one whole."""
    row = torch.zeros(1, 64)
    row[0, :12] = torch.tensor([7.5, -7.5, 1.5, 2.5, -1.5, -2.5, 0.5, -0.5, 0.75, 6.5, -0.25, 7.0])
    tensor, report = rtn(row * 0.25, FORMATS["int4-g64"])
    assert tensor.format.grid.decode(tensor.scales).tolist() == [[0.25]] and tensor.scales.tolist() == [[0x80, 0x3E]]
    expected = [7, -8, 2, 2, -2, -2, 0, 0, 1, 6, 0, 7] + [0] * 52
    assert torch.equal(tensor.dequantize(), torch.tensor([expected]) * 0.25)
    assert e2m1.unpack(tensor.codes)[0, :6].tolist() == [15, 0, 10, 10, 6, 6]
    assert (report.zero_blocks, report.flushed_blocks, report.clipped_blocks) == (0, 0, 0)
    row = torch.zeros(1, 64)
    row[0, :5] = torch.tensor([-3.5, 3.5, 2.5, 1.0, -0.5])
    tensor, _ = rtn(row, FORMATS["int3-g64"])
    assert tensor.format.grid.decode(tensor.scales).tolist() == [[1.0]]
    assert tensor.dequantize()[0, :5].tolist() == [-4, 3, 2, 1, 0] and e2m1.unpack(tensor.codes)[0, :5].tolist() == [4, 11, 10, 9, 8]


@integers
def test_degenerate_integer_blocks(name):
    """A zero block, one below the smallest scale, one in its subnormals, the largest float32."""
    spec = FORMATS[name]
    largest = torch.finfo(torch.float32).max
    tensor, report = rtn(block_rows([0.0, 2.0**-140, 2.0**-128, largest], spec.block), spec)
    tensor.validate("w")
    decoded = tensor.dequantize()
    assert not decoded[0].any() and not decoded[1].any() and decoded[2].any() and decoded[:3].isfinite().all()
    assert (report.zero_blocks, report.flushed_blocks) == (1, 1)


def test_a_code_outside_int3_is_refused_and_int4_takes_all():
    tensor, _ = rtn(weight(2, 64), FORMATS["int3-g64"])
    tensor.validate("w")
    for byte in (0xC8, 0x83, 0xF8):  # 12, 3 and 15 are codes of 4, -5 and 7
        codes = tensor.codes.clone()
        codes[1, 9] = byte
        broken = QuantTensor(codes=codes, scales=tensor.scales, tensor_scale=tensor.tensor_scale, format=tensor.format)
        with pytest.raises(FormatError, match=rf"w: code byte 0x{byte:02X} at \[1, 9\] holds a code outside int3"):
            broken.validate("w")
        QuantTensor(codes=codes, scales=tensor.scales, tensor_scale=tensor.tensor_scale, format=FORMATS["int4-g64"]).validate("w")


def test_fmt05_a_group_of_weights_shares_the_tensor_scale_of_its_maximum():
    """A given maximum takes the place of the weight's own; a smaller one, or one of another shape, is refused."""
    up = weight(16, 64)
    gate = up / up.abs().max() * 0.5
    alone, _ = rtn(gate, NVFP4)
    shared, report = rtn(gate, NVFP4, amax=torch.tensor(1.0), where="gate")
    assert torch.equal(shared.tensor_scale, tensor_scale_for(torch.tensor(1.0), NVFP4)[0]) and not torch.equal(shared.scales, alone.scales)
    # Half the range of scales is unused; scales keep 3 bits of mantissa, so the error stays where E4M3 rounding puts it: within 2^-4 of a block's maximum
    # beside E2M1's own 1/6.
    assert report.relative_error < 1 / 6
    assert (shared.dequantize() - gate).abs().max() <= 0.5 * (1 / 6 + 2.0**-4)
    for bad in (torch.tensor(0.49), torch.tensor([0.5])):
        with pytest.raises(FormatError, match="gate: the given maximum"):
            rtn(gate, NVFP4, amax=bad, where="gate")


@every
def test_bfloat16_is_the_rounded_float32_and_batched_is_per_expert(name):
    spec = FORMATS[name]
    # Experts of very different magnitude, so that a tensor scale of the wrong expert would show.
    stack = torch.stack([weight(24, 128, seed=expert) * 10.0**expert for expert in range(4)])
    batched, _ = rtn(stack, spec)
    for dtype in (torch.float32, torch.bfloat16):
        whole = batched.dequantize(dtype)
        assert whole.dtype == dtype and whole.shape == (4, 24, 128)
        assert torch.equal(bits(whole.to(torch.bfloat16)), bits(batched.dequantize().to(torch.bfloat16)))
        for expert in range(4):
            single, _ = rtn(stack[expert], spec)
            assert torch.equal(batched[expert].codes, single.codes) and torch.equal(batched[expert].scales, single.scales)
            assert torch.equal(batched[expert].tensor_scale, single.tensor_scale)
            assert torch.equal(bits(whole[expert]), bits(single.dequantize(dtype)))
            assert torch.equal(bits(whole[expert]), bits(batched[expert].dequantize(dtype)))


@every
def test_float16_is_refused_with_the_reason(name):
    tensor, _ = rtn(weight(4, 128), FORMATS[name])
    with pytest.raises(FormatError, match=r"float32 or bfloat16, not torch\.float16"):
        tensor.dequantize(torch.float16)


def test_hand_worked_nvfp4_blocks():
    """amax 2.625 = 2688 / 1024: divisor 1024, tensor scale 2^-10, everything a power of two or a short product."""
    first = [
        2.625,
        -2.625,
        0.4375,
        -0.4375,
        0.109375,
        0.21875,
        1.09375,
        2.1875,
        0.0,
        -0.0,
        1.75,
        -1.3125,
        0.875,
        0.65625,
        0.328125,
        0.546875,
    ]
    # 2.625 / 2^-10 / 6 = 448, byte 0x7E, step 448 / 1024 = 0.4375; in steps: 6 -6 1 -1 .25 .5 2.5 5 0 -0 4 -3 2 1.5 .75 1.25
    second = [0.75, 0.3125, -0.03125, 0.125, -0.4375, 0.625, 0.09375, -0.15625, 0.21875] + [0.0] * 7
    # 0.75 / 2^-10 / 6 = 128, byte 0x70, step 0.125; in steps: 6 2.5 -.25 1 -3.5 5 .75 -1.25 1.75
    tensor, report = rtn(torch.tensor([first + second]), NVFP4)
    assert tensor.divisor is not None and tensor.divisor.item() == 1024 and tensor.tensor_scale.item() == 2.0**-10
    assert tensor.scales.tolist() == [[0x7E, 0x70]]
    expected = [6, -6, 1, -1, 0, 0.5, 2, 4, 0, -0.0, 4, -3, 2, 1.5, 1, 1] + [6, 2, -0.0, 1, -4, 4, 1, -1, 2] + [0.0] * 7
    assert e2m1.decode(e2m1.unpack(tensor.codes)).tolist() == [expected]
    assert e2m1.unpack(tensor.codes)[0, [9, 18]].tolist() == [8, 8]
    steps = torch.tensor([0.4375] * 16 + [0.125] * 16)
    assert torch.equal(tensor.dequantize(), torch.tensor([expected]) * steps)
    assert (report.zero_blocks, report.flushed_blocks, report.clipped_blocks) == (0, 0, 0)


# FMT-03: block maxima 4, 6, 6.5 and 7 as one row of four MXFP4 blocks.
@pytest.mark.parametrize(
    ("rule", "scales", "decoded", "clipped"),
    [
        ("floor", [127] * 4, [4, 6, 6, 6], 2),
        ("even", [127, 127, 127, 128], [4, 6, 6, 8], 1),
        ("ceil", [127, 127, 128, 128], [4, 6, 6, 8], 0),
    ],
)
def test_mxfp4_scale_rules_on_a_row_and_the_rule_in_the_report(rule, scales, decoded, clipped):
    row = torch.zeros(1, 128)
    row[0, ::32] = torch.tensor([4.0, -6.0, 6.5, 7.0])
    tensor, report = rtn(row, MXFP4, scale_rule=rule)
    assert tensor.scales.tolist() == [scales]
    # 6.5 / 2 = 3.25 -> 3; 7 / 2 = 3.5, a tie, -> the even code of 4.
    assert tensor.dequantize()[0, ::32].abs().tolist() == decoded
    assert (report.scale_rule, report.clipped_blocks) == (rule, clipped)


@every
def test_the_default_rule_is_the_formats_and_an_unknown_one_is_refused(name):
    spec = FORMATS[name]
    assert rtn(weight(4, 128), spec)[1].scale_rule == spec.amax_rule
    with pytest.raises(UnknownName, match="no scale rule 'closest'"):
        rtn(weight(4, 128), spec, scale_rule="closest")


def block_rows(amaxes: list[float], block: int) -> torch.Tensor:
    """One row a block: a ramp whose largest magnitude is the given one."""
    ramp = torch.linspace(-1, 0.8, block)
    return torch.tensor(amaxes)[:, None] * ramp


def test_fmt04_degenerate_nvfp4_blocks():
    """Tensor amax 0.5: scales in units of the tensor scale are 448 * block amax / 0.5."""
    w = block_rows([0.5, 0.0, 0.5 / 1e5, 0.5 / 5e5], 16)
    tensor, report = rtn(w, NVFP4)
    # 448 / 1e5 = 4.48e-3 = 2.29 smallest steps -> 2; 448 / 5e5 = 8.96e-4 < 2^-10, half a smallest step -> 0.
    assert tensor.scales.flatten().tolist() == [0x7E, 0, 2, 0]
    decoded = tensor.dequantize()
    assert torch.equal(decoded[1], torch.zeros(16)) and torch.equal(decoded[3], torch.zeros(16))
    assert decoded[2].abs().max() > 0 and decoded.isfinite().all()
    assert (report.zero_blocks, report.flushed_blocks) == (1, 1)
    tensor.validate("w")


def test_fmt04_an_all_zero_nvfp4_tensor():
    tensor, report = rtn(torch.zeros(3, 32), NVFP4)
    assert tensor.tensor_scale.item() == 1.0 and tensor.divisor is not None and tensor.divisor.item() == 1.0
    assert not tensor.codes.any() and not tensor.scales.any() and not tensor.dequantize().any()
    assert (report.zero_blocks, report.flushed_blocks, report.relative_error) == (6, 0, 0.0)


def test_fmt04_an_expert_without_any_weight_beside_a_normal_one():
    tensor, report = rtn(torch.stack([weight(2, 16), torch.zeros(2, 16)]), NVFP4)
    assert tensor.tensor_scale[1].item() == 1.0 and tensor.tensor_scale.isfinite().all()
    assert not tensor.dequantize()[1].any() and tensor.dequantize()[0].any()
    assert report.zero_blocks == 2


def test_fmt04_degenerate_mxfp4_blocks():
    # E8M0 has no zero: the smallest scale is 2^-127, under which 2^-130 = 0.125 steps is lost, and 2^-128 = 0.5 steps is kept.
    tensor, report = rtn(block_rows([1.0, 0.0, 2.0**-130, 2.0**-128], 32), MXFP4)
    assert tensor.scales.flatten().tolist() == [125, 0, 0, 0]
    decoded = tensor.dequantize()
    assert not decoded[1].any() and not decoded[2].any()
    assert decoded[3].abs().max() == 2.0**-128
    assert (report.zero_blocks, report.flushed_blocks) == (1, 1)


@every
@pytest.mark.parametrize("exponent", range(-44, 38, 2))
def test_over_82_decades_no_byte_is_illegal_and_nothing_becomes_infinite(name, exponent):
    w = weight(8, 128, seed=exponent + 44, std=1.0) / 5 * 10.0**exponent
    spec = FORMATS[name]
    tensor, report = rtn(w, spec)
    tensor.validate("w")
    if spec.grid.width == 1:
        assert not ((tensor.scales == 0x7F) & (spec.grid.name == "e4m3")).any() and not (tensor.scales == 0xFF).any()
    assert tensor.dequantize().isfinite().all()
    if exponent >= -34:
        # Half the largest gap of E2M1 is 1/6 of a block's maximum; RTN of normal weights stays well below it. A uniform grid of step maximum / largest
        # gives step / sqrt(12) of a maximum of about 3 deviations (2.5 in the largest of 128): 0.12 for int4, 0.25 for int3.
        assert report.relative_error < (0.3 if spec.codes.name == "int3" else 1 / 6)


@every
@pytest.mark.parametrize("scale_rule", [None, "floor", "ceil"])
def test_every_code_is_optimal_under_the_stored_scale(name, scale_rule):
    """Brute force over the 16 codes in float64.

    step = fl(scale * t) and q = fl(x / step) are each off by at most 2^-24 relative, so the code is nearest to x / step' with step' within
    2^-23 of the stored step; by the triangle inequality its error exceeds the best one by at most 2 * 2^-23 * |x|. Powers of two lose nothing;
    bfloat16 scales have no t, and lose the rounding of the quotient alone.
    """
    spec = FORMATS[name]
    rule = scale_rule if scale_rule in spec.grid.amax_rules else None
    w = weight(32, 256, seed=3)
    w[0, :16] *= 1e-3
    tensor, _ = rtn(w, spec, scale_rule=rule)
    step = spec.grid.decode(tensor.scales).to(torch.float64) * tensor.tensor_scale.to(torch.float64)
    candidates = legal_elements(spec) * step.repeat_interleave(spec.block, dim=-1)[..., None]
    best = (w.to(torch.float64)[..., None] - candidates).abs().min(dim=-1).values
    chosen = (w.to(torch.float64) - exact(tensor)).abs()
    slack = w.abs().to(torch.float64) * 2.0**-22 if spec.grid.name != "e8m0" else 0.0
    assert (chosen <= best + slack).all()


@every
def test_rounding_the_scale_first_beats_quantizing_under_the_real_scale(name):
    """The naive order picks codes under amax / largest and rounds the scale afterwards: never better in any block, worse in total."""
    spec = FORMATS[name]
    w = weight(32, 256, seed=4)
    tensor, _ = rtn(w, spec)
    blocks = w.reshape(32, -1, spec.block)
    real = (blocks.abs().amax(-1, keepdim=True) / spec.codes.largest).clamp(min=1e-30)
    naive = QuantTensor(
        codes=e2m1.pack(spec.codes.round_to_codes(blocks / real).flatten(-2)),
        scales=tensor.scales,
        tensor_scale=tensor.tensor_scale,
        format=spec,
    )

    def errors(candidate: QuantTensor) -> torch.Tensor:
        return (w.to(torch.float64) - exact(candidate)).square().reshape(32, -1, spec.block).sum(-1)

    ours, theirs = errors(tensor), errors(naive)
    # Same slack as above, squared errors: 2 |e| * 2^-22 |x| summed over a block of |x| <= 0.3.
    assert (ours <= theirs + 2 * spec.block * 0.3**2 * 2.0**-22).all()
    # A bfloat16 scale moves by 2^-9 at most, of 2^-4 in E4M3: the order matters little there.
    assert ours.sum() < (0.99 if spec.is_fp4 else 1.0) * theirs.sum()


@every
def test_the_report_counts_what_the_planes_show(name):
    spec = FORMATS[name]
    w = weight(16, 128, seed=5)
    w[3] = 0
    tensor, report = rtn(w, spec)
    amax = w.reshape(16, -1, spec.block).abs().amax(-1).to(torch.float64)
    limit = spec.codes.largest * spec.grid.decode(tensor.scales).to(torch.float64) * tensor.tensor_scale.to(torch.float64)
    clipped = (amax > limit * (1 + 2**-19)).sum(), (amax > limit * (1 + 2**-21)).sum()
    assert clipped[0] <= report.clipped_blocks <= clipped[1] and report.clipped_blocks > 0
    assert report.zero_blocks == 128 // spec.block
    assert (report.method, report.rows, report.columns) == ("rtn", 16, 128)
    error = (w.to(torch.float64) - exact(tensor)).norm() / w.to(torch.float64).norm()
    # Both norms are float64; only w - q is rounded to float32, which for q near w is exact or off by 2^-24 of w, 2^-20 of the error.
    assert report.relative_error == pytest.approx(error.item(), rel=2**-20)


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_taken_at_their_value(name, dtype):
    w = weight(8, 128).to(dtype)
    low, _ = rtn(w, FORMATS[name])
    high, _ = rtn(w.to(torch.float32), FORMATS[name])
    assert torch.equal(low.codes, high.codes) and torch.equal(low.scales, high.scales) and torch.equal(low.tensor_scale, high.tensor_scale)


@every
def test_rtn_is_deterministic_and_independent_of_rows_and_layout(name):
    w = weight(64, 128, seed=6)
    first, _ = rtn(w, FORMATS[name])
    second, _ = rtn(w.T.contiguous().T, FORMATS[name])
    assert torch.equal(first.codes, second.codes) and torch.equal(first.scales, second.scales)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    shuffled, _ = rtn(w[order], FORMATS[name])
    assert torch.equal(shuffled.codes, first.codes[order]) and torch.equal(shuffled.scales, first.scales[order])


@both
def test_quantizing_the_dequantized_weight_gives_it_back(name):
    tensor, _ = rtn(weight(16, 128, seed=7), FORMATS[name])
    again, report = rtn(tensor.dequantize(), FORMATS[name])
    # A block's scale may come out smaller (its maximum need not be code 6), but then every value is still representable: E4M3 and E8M0 scales
    # times E2M1 codes; what is lost is at most the rounding of amax / 6 to the grid.
    if name == "mxfp4":
        assert torch.equal(again.dequantize(), tensor.dequantize())
    assert report.relative_error < rtn(weight(16, 128, seed=7), FORMATS[name])[1].relative_error


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_weights_are_refused_by_name(bad):
    w = weight(4, 128)
    w[2, 5] = bad
    for name in FORMATS:
        with pytest.raises(FormatError, match=r"layers\.3\.up: weight holds NaN or infinity"):
            rtn(w, FORMATS[name], where="layers.3.up")


def test_shapes_that_cannot_be_quantized_are_refused_by_name():
    with pytest.raises(FormatError, match="x: 48 columns do not divide"):
        rtn(weight(4, 48), MXFP4, where="x")
    for shape, rank in (((32,), 1), ((2, 2, 2, 32), 4)):
        with pytest.raises(FormatError, match=f"2 or 3 dimensions, got {rank}"):
            rtn(weight(*shape), NVFP4)


# FMT-02: the stored divisor is 2688 / amax, our multiplier its reciprocal.
@pytest.mark.parametrize(
    ("amax", "divisor", "multiplier"), [(0.75, 3584.0, 2.790178571428571e-4), (2688.0, 1.0, 1.0), (1.0, 2688.0, 1 / 2688)]
)
def test_tensor_scale_and_divisor(amax, divisor, multiplier):
    scale, stored = tensor_scale_for(torch.tensor(amax), NVFP4)
    assert stored is not None and stored.item() == divisor
    assert scale.item() == torch.tensor(multiplier, dtype=torch.float32).item()
    assert tensor_scale_for(torch.tensor(amax), MXFP4)[1] is None and tensor_scale_for(torch.tensor(amax), MXFP4)[0].item() == 1.0


@pytest.mark.parametrize("amax", [0.0, 2.0**-149, 2.0**-127, 3.4e38])
def test_the_tensor_scale_is_always_a_positive_finite_number_with_a_finite_reciprocal(amax):
    scale, stored = tensor_scale_for(torch.tensor(amax), NVFP4)
    assert stored is not None
    for value in (scale, stored, 1.0 / stored):
        assert value.isfinite() and value > 0


def test_rtn_is_the_registered_quantizer_and_unknown_ones_are_named():
    assert QUANTIZERS["rtn"] is rtn
    with pytest.raises(UnknownName, match=r"unknown quantizer 'rnt'.*rtn"):
        QUANTIZERS["rnt"]


def test_planes_of_the_wrong_shape_or_type_are_refused():
    good, _ = rtn(weight(4, 32), NVFP4)
    fields = {"codes": good.codes, "scales": good.scales, "tensor_scale": good.tensor_scale, "format": NVFP4}
    wrong = {
        "uint8, uint8 and float32": {"codes": good.codes.to(torch.int16)},
        "scales have shape": {"scales": good.scales[:, :1]},
        "tensor_scale has shape": {"tensor_scale": torch.ones(4)},
    }
    for message, change in wrong.items():
        with pytest.raises(FormatError, match=message):
            QuantTensor(**{**fields, **change})
    for value in (math.nan, math.inf, 0.0, -1.0):
        with pytest.raises(FormatError, match="w: tensor scale is not a positive finite number"):
            QuantTensor(**{**fields, "tensor_scale": torch.tensor(value)}).validate("w")
    with pytest.raises(FormatError, match=r"w: scale byte 0xFF at \[0, 0\]"):
        good.with_scales(torch.full_like(good.scales, 0xFF)).validate("w")


def test_fingerprints_change_with_any_byte_name_or_format_and_not_with_order():
    from prism_ray.formats.tensor import code_plane_fingerprint, scale_plane_fingerprint

    def planes(seed: int = 0) -> dict[str, QuantTensor]:
        return {name: rtn(weight(4, 32, seed=seed + index), NVFP4)[0] for index, name in enumerate(("a", "b"))}

    base = planes()
    code, scale = code_plane_fingerprint(base), scale_plane_fingerprint(base)
    assert code_plane_fingerprint(dict(reversed(base.items()))) == code
    assert scale_plane_fingerprint(dict(reversed(base.items()))) == scale
    flipped = {
        **base,
        "a": QuantTensor(codes=base["a"].codes ^ 1, scales=base["a"].scales, tensor_scale=base["a"].tensor_scale, format=NVFP4),
    }
    moved = {**base, "a": base["a"].with_scales(base["a"].scales ^ 1)}
    swapped = {"a": base["b"], "b": base["a"]}
    renamed = {"c": base["a"], "b": base["b"]}
    as_mxfp4 = {
        name: QuantTensor(codes=tensor.codes, scales=tensor.scales[:, :1], tensor_scale=torch.tensor(1.0), format=MXFP4)
        for name, tensor in base.items()
    }
    fingerprints = [code_plane_fingerprint(planes) for planes in (base, flipped, swapped, renamed, as_mxfp4)]
    assert len(set(fingerprints)) == 5
    assert code_plane_fingerprint(moved) == code and scale_plane_fingerprint(moved) != scale
    assert scale_plane_fingerprint(flipped) == scale
    assert all(a != b for a, b in itertools.pairwise(scale_plane_fingerprint(planes) for planes in (base, moved, swapped, renamed)))
