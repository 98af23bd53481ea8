"""prism_ray.adapters.deploy_rules: each rule by hand, identity on the grid, unbiased and seeded stochastic rounding, whole folders."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from prism_ray.adapters.deploy_rules import RULES, SLACK, changes, deploy_folder, requantize, spread
from prism_ray.calibrate.quantize import quantize_to_folder
from prism_ray.core.errors import CheckpointError, FormatError, UnknownName
from prism_ray.core.manifest import read_manifest
from prism_ray.formats import e2m1
from prism_ray.formats.checkpoint import KIND, load_quantized_model, read_quantized
from prism_ray.formats.fusion import fused_groups
from prism_ray.formats.lint import lint_checkpoint
from prism_ray.formats.policy import QuantPolicy
from prism_ray.formats.spec import FORMATS, FP4_FORMATS
from prism_ray.models.tiny import tiny_llama, tiny_qwen3_moe, tiny_tokenizer
from prism_ray.quantizers.rtn import rtn

FIVE = ("nearest", "toward-zero", "stochastic", "whole-tensor", "saved-scalar")
BUILD = {"llama": tiny_llama, "moe": tiny_qwen3_moe}


@pytest.fixture(scope="module", params=[(name, kind) for name in FP4_FORMATS for kind in BUILD], ids="-".join)
def base(request, tmp_path_factory):
    name, kind = request.param
    folder = tmp_path_factory.mktemp("base") / "model"
    quantize_to_folder(BUILD[kind](), tiny_tokenizer(), QuantPolicy(format=name), folder)
    return folder


def weight_of(seed: int = 0, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (8, 128)), generator=torch.Generator().manual_seed(seed)) * 0.05


def mx_row(values: list[float]) -> torch.Tensor:
    return torch.tensor([values + [0.0] * (32 - len(values))])


def test_the_five_rules():
    assert tuple(RULES) == FIVE


@pytest.mark.parametrize("name", FP4_FORMATS)
@pytest.mark.parametrize("shape", [(8, 128), (3, 4, 64)])
def test_nearest_is_rtn_to_the_byte(name, shape):
    weight = weight_of(1, *shape)
    wanted, _ = rtn(weight, FORMATS[name])
    found = requantize(weight, FORMATS[name], "nearest")
    assert torch.equal(found.codes, wanted.codes) and torch.equal(found.scales, wanted.scales)
    assert torch.equal(found.tensor_scale, wanted.tensor_scale)
    if wanted.divisor is not None:
        assert torch.equal(found.divisor, wanted.divisor)


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        ("nearest", [6.0, -4.0, 1.0, -0.0, 0.0, -1.5]),
        ("toward-zero", [4.0, -3.0, 0.5, -0.0, 0.0, -1.5]),
    ],
)
def test_codes_by_hand(rule, wanted):
    """Scale 1 by the `even` rule: 5.9 < 7. A weight on the grid (-1.5) stays under both."""
    found = requantize(mx_row([5.9, -3.9, 0.99, -0.2, 0.0, -1.5]), FORMATS["mxfp4"], rule)
    assert found.scales.tolist() == [[127]]
    values = found.dequantize()[0, :6]
    assert values.tolist() == wanted
    assert torch.signbit(values).tolist() == [value < 0 or str(value) == "-0.0" for value in wanted]


@pytest.mark.parametrize("name", FP4_FORMATS)
@pytest.mark.parametrize("rule", [rule for rule in FIVE if rule != "whole-tensor"])
@pytest.mark.parametrize("shape", [(8, 128), (2, 4, 64)])
def test_an_artifact_whose_maxima_are_codes_of_six_is_left_as_it_is(name, rule, shape):
    """RTN's own blocks hold a code 6 under E4M3 scales; under E8M0 the `even` rule finds the same exponent for the rounded maximum, 4 or 6.

    The quotient w / (s t) is often a rounding below the code, where truncating it would change the weight."""
    stored, _ = rtn(weight_of(3, *shape), FORMATS[name])
    new = requantize(stored.dequantize(), stored.format, rule, saved=stored)
    change = changes(stored, new)
    assert change.codes == 0 and change.scales == 0
    # A derived scalar, 1 / (2688 / amax), may miss the stored one by its last bit.
    assert change.relative <= 2**-23 if change.scalar else change.identity and change.weights == 0
    assert change.identity or (name, rule) != ("nvfp4", "saved-scalar")


@pytest.mark.parametrize("rule", ["toward-zero", "stochastic"])
def test_a_scalar_off_by_its_last_bits_truncates_nothing(rule):
    """A few bits up, every weight lies a rounding below its code: half a SLACK, within which it still counts as on it."""
    stored, _ = rtn(weight_of(3), FORMATS["nvfp4"])
    new = requantize(stored.dequantize(), stored.format, rule, amax=stored.dequantize().abs().max() * (1 + 2**-21))
    assert new.tensor_scale > stored.tensor_scale and changes(stored, new).codes == 0


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 30), name=st.sampled_from(FP4_FORMATS), power=st.integers(-30, 30))
def test_truncation_never_grows_and_stochastic_takes_a_neighbour(seed, name, power):
    weight = weight_of(seed, 2, 64) * 2.0**power
    spec = FORMATS[name]
    low = requantize(weight, spec, "toward-zero")
    random = requantize(weight, spec, "stochastic", seed=seed)
    assert torch.equal(low.scales, random.scales) and torch.equal(low.scales, requantize(weight, spec, "nearest").scales)
    assert bool((low.dequantize().abs() <= weight.abs() * (1 + SLACK)).all())
    below, found = (e2m1.unpack(tensor.codes) & 7 for tensor in (low, random))
    assert bool(((found == below) | (found == below + 1)).all())
    assert bool((e2m1.unpack(random.codes) >> 3 == torch.signbit(weight).to(torch.uint8)).all())


@pytest.mark.parametrize("name", FP4_FORMATS)
def test_stochastic_rounding_is_unbiased_and_seeded(name):
    spec, draws = FORMATS[name], 400
    weight = weight_of(4, 1, 64)
    found = torch.stack([requantize(weight, spec, "stochastic", seed=seed, name="q").dequantize() for seed in range(draws)]).double()
    low = requantize(weight, spec, "toward-zero").dequantize()
    step = spec.grid.decode(requantize(weight, spec, "nearest").scales) * requantize(weight, spec, "nearest").tensor_scale
    inside = weight.abs() < (6 * step).repeat_interleave(spec.block, -1)
    # A gap is at most 2 steps, a Bernoulli's deviation at most half of it: the mean over draws has at most step / sqrt(draws); 5 of them.
    bound = 5 * step.repeat_interleave(spec.block, -1).double() / math.sqrt(draws)
    assert bool(((found.mean(0) - weight).abs() < bound)[inside].all())
    assert not bool(((low - weight).abs() < bound)[inside].all())
    again = requantize(weight, spec, "stochastic", seed=7, name="q")
    assert torch.equal(again.codes, requantize(weight, spec, "stochastic", seed=7, name="q").codes)
    assert not torch.equal(again.codes, requantize(weight, spec, "stochastic", seed=8, name="q").codes)
    assert not torch.equal(again.codes, requantize(weight, spec, "stochastic", seed=7, name="k").codes)


@pytest.mark.parametrize("name", FP4_FORMATS)
def test_whole_tensor_has_one_scale_made_for_the_maximum(name):
    weight = weight_of(5, 2, 4, 64) * torch.tensor([1.0, 0.01]).view(2, 1, 1)
    found = requantize(weight, FORMATS[name], "whole-tensor")
    for expert in range(2):
        assert len(set(found.scales[expert].flatten().tolist())) == 1
        amax = weight[expert].abs().max()
        step = found.format.grid.decode(found.scales[expert])[0, 0] * found.tensor_scale[expert]
        # NVFP4's scalar makes it amax / 6 up to rounding; the `even` rule of MXFP4 lies between amax / 7 and amax / 3.5.
        assert float(6 * step) == pytest.approx(float(amax), rel=1e-6) if name == "nvfp4" else amax / 7 <= step <= amax / 3.5
    # Blocks of the small rows lose more under the whole tensor's scale than under their own.
    near = requantize(weight, FORMATS[name], "nearest")
    assert changes(near, found, weight).relative > changes(near, near, weight).relative


def test_the_saved_scalar_is_the_artifacts():
    weight, spec = weight_of(6), FORMATS["nvfp4"]
    stored, _ = rtn(weight, spec)
    doubled = requantize(weight * 2, spec, "saved-scalar", saved=stored)
    assert torch.equal(doubled.tensor_scale, stored.tensor_scale) and torch.equal(doubled.divisor, stored.divisor)
    # Scales above 448 are clamped under a scalar that was made for half of them, never NaN.
    doubled.validate()
    assert int(doubled.scales.max()) == 0x7E and int((doubled.scales == 0x7E).sum()) >= 1
    with pytest.raises(FormatError, match="tensor scale"):
        requantize(weight, spec, "saved-scalar")
    plain = requantize(weight, FORMATS["mxfp4"], "saved-scalar")
    assert torch.equal(plain.codes, requantize(weight, FORMATS["mxfp4"], "nearest").codes)


@pytest.mark.parametrize("name", FP4_FORMATS)
@pytest.mark.parametrize("rule", FIVE)
def test_zero_weights_stay_zero(name, rule):
    stored, _ = rtn(torch.zeros(2, 64), FORMATS[name])
    new = requantize(torch.zeros(2, 64), FORMATS[name], rule, saved=stored)
    new.validate()
    assert not bool(new.dequantize().any())
    assert changes(stored, new).relative == 0.0


def test_changes_counts_codes_not_bytes():
    stored, _ = rtn(weight_of(7, 1, 32), FORMATS["mxfp4"])
    codes = stored.codes.clone()
    codes[0, 0] ^= 0x11  # both codes of one byte
    codes[0, 3] ^= 0x70
    new = type(stored)(codes=codes, scales=stored.scales, tensor_scale=stored.tensor_scale, format=stored.format)
    change = changes(stored, new)
    assert (change.codes, change.scales, change.scalar, change.identity) == (3, 0, False, False)
    assert change.weights == 3 and change.max_abs_dw == float((new.dequantize() - stored.dequantize()).abs().max())
    assert spread({"a": 0.9, "b": 0.4, "c": 0.7}) == pytest.approx(0.5)


@pytest.mark.parametrize("rule", FIVE)
def test_a_folder_under_every_rule_loads_and_says_what_it_is(base, tmp_path, rule):
    report = deploy_folder(base, tmp_path / "out", rule, seed=3)
    assert lint_checkpoint(tmp_path / "out") == []
    manifest = read_manifest(tmp_path / "out", KIND)
    assert manifest["deploy"]["rule"] == rule and manifest["deploy"]["seed"] == 3 and manifest["code_plane"] == report.code_plane
    before, after = read_manifest(base, KIND), read_quantized(tmp_path / "out")[1]
    # What the writer makes of RTN's own artifact: all but one scale for a tensor give the codes back.
    assert (report.codes_changed == 0 and report.code_plane == before["code_plane"]) == (rule != "whole-tensor")
    for group in fused_groups(after):
        assert len({float(after[name].tensor_scale) for name in group}) == 1
    logits = load_quantized_model(tmp_path / "out", dtype=torch.float32)(input_ids=torch.tensor([[1, 5, 9]])).logits
    assert bool(torch.isfinite(logits).all())
    if rule == "saved-scalar":
        assert report.identity and report.scale_plane == before["scale_plane"]


def test_a_trained_scale_plane_meets_rules_that_change_it(base, tmp_path):
    """Scales moved off what amax derives: a rule re-derives the scalar and with it codes; read as it is the artifact is what it was."""
    moved = tmp_path / "moved"
    shutil.copytree(base, moved)
    (moved / "manifest.json").unlink()
    tensors = load_file(moved / "model.safetensors")
    for key, value in tensors.items():
        if key.endswith("weight_scale"):
            data = value.view(torch.uint8)
            data[: len(data) // 2] -= 1
    save_file(tensors, moved / "model.safetensors", metadata={"format": "pt"})
    same = deploy_folder(moved, tmp_path / "saved", "saved-scalar")
    assert same.identity
    whole = deploy_folder(moved, tmp_path / "whole", "whole-tensor")
    assert whole.codes_changed > 0 and whole.scales_changed > 0.5 and not whole.identity


def test_a_full_precision_source_takes_its_template(tmp_path):
    model = tiny_llama()
    template, dense = tmp_path / "template", tmp_path / "dense"
    quantize_to_folder(tiny_llama(), tiny_tokenizer(), QuantPolicy(), template)
    model.save_pretrained(dense)
    report = deploy_folder(dense, tmp_path / "out", "nearest", template=template)
    # RTN of the same weights: every plane is the template's.
    assert report.identity and report.code_plane == read_manifest(template, KIND)["code_plane"]
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.add_(0.05)
        model.model.norm.weight.mul_(2)
    model.save_pretrained(dense)
    report = deploy_folder(dense, tmp_path / "other", "nearest", template=template)
    assert not report.layers["model.layers.0.mlp.up_proj"].identity and report.layers["model.layers.1.mlp.up_proj"].identity
    _, _, plain = read_quantized(tmp_path / "other")
    assert torch.equal(plain["model.norm.weight"].float(), model.model.norm.weight)
    with pytest.raises(CheckpointError, match="is missing"):
        deploy_folder(template, tmp_path / "none", "nearest", template=template)
    assert not (tmp_path / "none").exists()


def test_refusals(base, tmp_path):
    with pytest.raises(UnknownName, match="nearst"):
        deploy_folder(base, tmp_path / "out", "nearst")
    with pytest.raises(UnknownName, match="scale rule"):
        deploy_folder(base, tmp_path / "out", "nearest", scale_rule="up")
    with pytest.raises(FormatError, match="int4-g32"):
        requantize(weight_of(), FORMATS["int4-g32"], "nearest", name="layer")
    with pytest.raises(FormatError, match="NaN"):
        requantize(torch.full((1, 32), math.nan), FORMATS["mxfp4"], "nearest")
    with pytest.raises(FormatError, match="blocks"):
        requantize(weight_of(0, 2, 40), FORMATS["mxfp4"], "nearest")
    deploy_folder(base, tmp_path / "out", "nearest")
    with pytest.raises(FileExistsError):
        deploy_folder(base, tmp_path / "out", "nearest")
    deploy_folder(base, tmp_path / "out", "toward-zero", replace=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
