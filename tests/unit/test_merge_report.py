"""The merge report: what rounding costs and who pays, swallowed corrections, output error on a probe, refusals; and the manifest of an adapter (ADP-01, ADP-03)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from peft import PeftConfig, PeftModel, get_peft_model
from torch import nn

from prism_ray.adapters import merge
from prism_ray.adapters.merge import ADAPTER_KIND, adapter_layers, merge_to_folder, write_scale_plane
from prism_ray.adapters.merge_report import measure_layer
from prism_ray.adapters.qast import clipped_scales, corrected_scales, effective_scales, round_scales
from prism_ray.adapters.scale_qlora import ScaleQLoraConfig, ScaleQLoraLinear
from prism_ray.calibrate.quantize import quantize_to_folder
from prism_ray.core.errors import ConfigError, MergeLoss
from prism_ray.core.manifest import read_manifest
from prism_ray.formats import e2m1
from prism_ray.formats.checkpoint import KIND, load_quantized_model, read_quantized
from prism_ray.formats.modules import FP4Linear
from prism_ray.formats.policy import QuantPolicy
from prism_ray.formats.spec import FORMATS, FP4_FORMATS
from prism_ray.models.tiny import tiny_llama, tiny_qwen3_moe, tiny_tokenizer
from prism_ray.quantizers.rtn import rtn

IDS = torch.tensor([[1, 5, 9, 40, 200, 7], [3, 3, 3, 250, 11, 0]])
both = pytest.mark.parametrize("name", FP4_FORMATS)


@pytest.fixture(scope="module", params=FP4_FORMATS)
def base(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    quantize_to_folder(tiny_llama(), tiny_tokenizer(), QuantPolicy(format=request.param), folder)
    return folder


@pytest.fixture(scope="module")
def moe(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    quantize_to_folder(tiny_qwen3_moe(), tiny_tokenizer(), QuantPolicy(), folder)
    return folder


def adapted(folder: Path, size: float = 0.3, dtype: torch.dtype = torch.float32, **options) -> PeftModel:
    """size: standard deviation of the correction of a scale, relative to it, about."""
    model = get_peft_model(load_quantized_model(folder, dtype=dtype), ScaleQLoraConfig(**({"r": 1, "alpha": 1.0} | options)))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in adapter_layers(model).values():
            layer.qast_A["default"].copy_(torch.rand(layer.qast_A["default"].shape, generator=generator) * 0.5 + 0.5)
            layer.qast_B["default"].copy_(torch.randn(layer.qast_B["default"].shape, generator=generator) * size)
    return model.eval()


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(input_ids=IDS).logits


def empty(folder: Path) -> bool:
    return not list(folder.iterdir())


@both
def test_rounding_the_clipped_scales_gives_the_effective_ones(name):
    spec = FORMATS[name]
    generator = torch.Generator().manual_seed(1)
    base = spec.grid.encode(torch.rand(64, 8, generator=generator) * 400)
    base[0, :2] = 0
    a, b = torch.randn(2, 8, generator=generator), torch.randn(64, 2, generator=generator)
    real, inside = clipped_scales(base, a, b, 0.7, spec)
    data, same = round_scales(base, a, b, 0.7, spec)
    raw = corrected_scales(base, a, b, 0.7, spec)
    expected = torch.where(spec.grid.decode(base) == 0, 0.0, raw.clamp(spec.grid.smallest, spec.grid.largest))
    assert real.dtype == torch.float32 and torch.equal(real, expected.float())
    assert torch.equal(inside, same) and torch.equal(data, spec.grid.encode(real)) and not inside.all()


@both
def test_experts_are_corrected_one_at_a_time_by_the_same_function(name):
    spec = FORMATS[name]
    generator = torch.Generator().manual_seed(2)
    base = spec.grid.encode(torch.rand(3, 16, 4, generator=generator))
    a, b = torch.randn(3, 2, 4, generator=generator), torch.randn(3, 16, 2, generator=generator)
    out = effective_scales(base, a, b, 0.5, spec)
    assert all(torch.equal(out[expert], effective_scales(base[expert], a[expert], b[expert], 0.5, spec)) for expert in range(3))
    assert effective_scales(base[:0], a[:0], b[:0], 0.5, spec).shape == (0, 16, 4)


def unrounded(name: str) -> ScaleQLoraLinear:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 64, generator=generator) * 0.2
    weight[0, :32] = 0
    module = FP4Linear(rtn(weight, FORMATS[name])[0], torch.randn(24, generator=generator))
    layer = ScaleQLoraLinear(module, "default", ScaleQLoraConfig(r=2, alpha=3.0, qast=False))
    with torch.no_grad():
        layer.qast_A["default"].copy_(torch.randn(layer.qast_A["default"].shape, generator=generator))
        layer.qast_B["default"].copy_(torch.randn(layer.qast_B["default"].shape, generator=generator) * 0.4)
    return layer


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_without_qast_forward_and_gradient_equal_float64_autograd_without_rounding(name, dtype):
    """float32: sums of 64, 24, 6 and 32 terms, some 130 roundings of 2^-24; of random terms, so a cancellation of at most sqrt(64) = 8 times: 6e-5.
    bfloat16: the stored intermediates (weight, product, sum over a block of 32, bias) are 4 roundings of 2^-8 each, cancelled as much: 0.13."""
    layer, spec = unrounded(name), FORMATS[name]
    base, grid = layer.base_layer, FORMATS[name].grid
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(6, 64, generator=generator).to(dtype).requires_grad_()
    grad_y = torch.randn(6, 24, generator=generator).to(dtype)
    y = layer(x)
    y.backward(grad_y)
    a, b = (factors["default"].detach().double().requires_grad_() for factors in (layer.qast_A, layer.qast_B))
    x64 = x.detach().double().requires_grad_()
    s0 = grid.decode(base.scales).double()
    scale = torch.where(s0 == 0, 0.0, (s0 * (1 + 1.5 * (b @ a))).clamp(grid.smallest, grid.largest))
    weight = e2m1.decode(e2m1.unpack(base.codes)).double() * scale.repeat_interleave(spec.block, -1) * base.tensor_scale.double()
    y64 = x64 @ weight.T + base.bias.double()
    y64.backward(grad_y.double())
    limit = 6e-5 if dtype == torch.float32 else 0.13
    for found, wanted in (
        (y.detach(), y64.detach()),
        (x.grad, x64.grad),
        (layer.qast_A["default"].grad, a.grad),
        (layer.qast_B["default"].grad, b.grad),
    ):
        assert (found.double() - wanted).abs().max() <= limit * wanted.abs().max()
    # No rounding of the scale itself: one rounding of the float32 weight, even in bfloat16.
    with torch.no_grad():
        dense = layer(torch.eye(64, dtype=dtype)) - base.bias.to(dtype) if dtype == torch.float32 else None
    correction = next(layer.corrections("default"))
    assert torch.equal(correction.weight(torch.bfloat16), correction.weight(torch.float32).to(torch.bfloat16))
    assert dense is None or (dense.T - correction.weight(torch.float32)).abs().max() <= 2.0**-23 * (
        dense.abs().max() + base.bias.abs().max()
    )


def test_the_flag_is_saved_and_loaded_and_an_untrained_adapter_is_the_base(base, tmp_path):
    model = get_peft_model(load_quantized_model(base, dtype=torch.float32), ScaleQLoraConfig(r=1, qast=False))
    assert torch.equal(logits(model), logits(load_quantized_model(base, dtype=torch.float32)))
    model = adapted(base, qast=False)
    assert not torch.equal(logits(model), logits(adapted(base)))  # unrounded
    model.save_pretrained(tmp_path)
    assert PeftConfig.from_pretrained(tmp_path).qast is False
    assert torch.equal(logits(PeftModel.from_pretrained(load_quantized_model(base, dtype=torch.float32), tmp_path)), logits(model))
    assert ScaleQLoraConfig().qast is True
    with pytest.raises(ConfigError, match="qast: must be true or false, got 1"):
        ScaleQLoraConfig(qast=1)


def test_an_adapter_without_qast_needs_a_tolerance_and_pays_for_rounding_at_the_merge(base, tmp_path):
    (tmp_path / "out").mkdir()
    model = adapted(base, qast=False)
    with pytest.raises(
        MergeLoss, match=r"max \|dW\| = .* on the written checkpoint, allowed 0; the adapter was trained without rounding"
    ) as raised:
        merge_to_folder(model, base, tmp_path / "out" / "merged")
    assert "\n" not in str(raised.value) and empty(tmp_path / "out")
    report = merge_to_folder(model, base, tmp_path / "out" / "merged", tolerance=10.0, probe=IDS)
    assert report.max_abs_dw > 0 and report.codes_identical and report.rest_identical
    assert all(layer.lost_at_merge == pytest.approx(layer.lost_at_rounding) and layer.lost_at_merge > 0 for layer in report.layers.values())
    assert report.output_error > 0
    merged = load_quantized_model(tmp_path / "out" / "merged", dtype=torch.float32)
    assert not torch.equal(logits(merged), logits(model))
    # The bytes are those that QAST would have used all along.
    assert torch.equal(logits(merged), logits(adapted(base)))
    # A little below what was measured is refused, exactly that is accepted.
    with pytest.raises(MergeLoss, match="allowed"):
        merge_to_folder(model, base, tmp_path / "out" / "again", tolerance=report.max_abs_dw * 0.999)
    merge_to_folder(model, base, tmp_path / "out" / "again", tolerance=report.max_abs_dw)


def test_the_two_losses_are_measured_apart(base, tmp_path):
    model = adapted(base)
    report = merge_to_folder(model, base, tmp_path / "merged")
    _, before, _ = read_quantized(base)
    for name, layer in adapter_layers(model).items():
        spec = before[name].format
        old = spec.grid.decode(before[name].scales).double()
        factors = layer.qast_A["default"].detach(), layer.qast_B["default"].detach()
        raw = corrected_scales(before[name].scales, *factors, 1.0, spec)
        real = torch.where(old == 0, 0.0, raw.clamp(spec.grid.smallest, spec.grid.largest).float().double())
        rounded = spec.grid.decode(layer.scale_bytes("default")).double()
        entry = report.layers[name]
        assert entry.lost_at_merge == 0.0
        assert entry.lost_at_rounding == pytest.approx(float((real - rounded).abs().sum() / (real - old).abs().sum()), rel=1e-12)
        corrected = (raw != old) & (old > 0)
        assert entry.corrected == int(corrected.sum())
        assert entry.swallowed == float((corrected & (layer.scale_bytes("default") == before[name].scales)).sum()) / entry.corrected
        assert entry.lost_at_rounding > 0 and 0 < entry.swallowed < 1
    assert report.corrected == sum(entry.corrected for entry in report.layers.values())
    unmoved = sum(entry.swallowed * entry.corrected for entry in report.layers.values())
    assert report.swallowed == pytest.approx(unmoved / report.corrected)
    assert report.output_error is None and all(entry.output_error is None for entry in report.layers.values())


@both
def test_adp01_numbers_in_a_report(name):
    """A scale of 1.0 times 1.05, 0.98 and 1.07 on E4M3: the first two move nothing, the third becomes 1.125; E8M0 moves none."""
    spec = FORMATS[name]
    layer = unrounded(name)
    layer.qast["default"], layer.scaling["default"] = True, 1.0
    layer.base_layer.scales.fill_(spec.grid.encode(torch.ones(1)).item())
    with torch.no_grad():
        layer.qast_A["default"].copy_(torch.tensor([[1.0], [0.0]]).expand(2, 64 // spec.block))
        layer.qast_B["default"].zero_()
        layer.qast_B["default"][:3, 0] = torch.tensor([0.05, -0.02, 0.07])
    old = {"layer": layer.base_layer.quant_tensor()}
    new = {"layer": old["layer"].with_scales(layer.scale_bytes("default"))}
    report, unmoved = measure_layer(layer, "default", {None: ["layer"]}, old, new)
    groups, moved = 64 // spec.block, name == "nvfp4"
    assert (report.blocks, report.corrected, report.clamped) == (24 * groups, 3 * groups, 0)
    assert (report.changed, unmoved) == ((groups, 2 * groups) if moved else (0, 3 * groups))
    assert report.swallowed == (2 / 3 if moved else 1.0) and report.max_abs_dw == report.lost_at_merge == 0.0
    # 0.05 and 0.02 are lost whole, and 1.07 is rounded by 0.055; in float32 scales near 1, hence 2^-23 of 0.02.
    assert report.lost_at_rounding == pytest.approx((0.05 + 0.02 + 0.055) / 0.14 if moved else 1.0, rel=1e-5)
    assert report.experts is None and report.output_error is None


def test_a_correction_that_the_grid_swallows_whole_is_refused_with_the_remedy(base, tmp_path):
    """1e-3 of a scale is below the half step of both grids: the merge would silently be the base."""
    (tmp_path / "out").mkdir()
    model = adapted(base, size=1e-3)
    with pytest.raises(
        MergeLoss, match=r"100\.0000% of \d+ scale corrections moved no byte: the merged checkpoint would be the base; train with"
    ) as raised:
        merge_to_folder(model, base, tmp_path / "out" / "merged")
    assert "\n" not in str(raised.value) and empty(tmp_path / "out")
    report = merge_to_folder(model, base, tmp_path / "out" / "merged", max_swallowed=1.0)
    assert (report.changed, report.swallowed) == (0, 1.0) and report.corrected > 0
    assert all(layer.lost_at_rounding == pytest.approx(1.0) and layer.lost_at_merge == 0.0 for layer in report.layers.values())


def test_the_share_that_may_be_swallowed_is_configurable(base, tmp_path):
    (tmp_path / "out").mkdir()
    model = adapted(base, size=0.2)
    share = merge_to_folder(model, base, tmp_path / "out" / "merged").swallowed
    assert 0 < share < 1
    merge_to_folder(model, base, tmp_path / "out" / "merged", max_swallowed=share, replace=True)
    with pytest.raises(MergeLoss, match=r"scale corrections moved no byte; train with .* or raise max_swallowed"):
        merge_to_folder(model, base, tmp_path / "out" / "other", max_swallowed=share * 0.999)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["merged"]


def test_e8m0_swallows_more_than_e4m3(tmp_path):
    shares = {}
    for name in FP4_FORMATS:
        quantize_to_folder(tiny_llama(), tiny_tokenizer(), QuantPolicy(format=name), tmp_path / name)
        shares[name] = merge_to_folder(adapted(tmp_path / name, size=0.2), tmp_path / name, tmp_path / f"{name}-merged").swallowed
    assert shares["mxfp4"] > 0.9 and shares["nvfp4"] < 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["ids", "mapping", "function"])
def test_the_output_error_of_a_probe_is_zero_with_qast(base, tmp_path, dtype, kind):
    probe = {"ids": IDS, "mapping": {"input_ids": IDS, "use_cache": False}, "function": lambda model: model(input_ids=IDS)}[kind]
    report = merge_to_folder(adapted(base, dtype=dtype), base, tmp_path / "merged", probe=probe, max_output_error=0.0)
    assert report.output_error == 0.0 and all(layer.output_error == 0.0 for layer in report.layers.values())


def test_the_output_error_is_that_of_each_layer_on_the_unmerged_activations(base, tmp_path):
    model = adapted(base, qast=False)
    report = merge_to_folder(model, base, tmp_path / "merged", tolerance=10.0, probe=IDS)
    _, written, _ = read_quantized(tmp_path / "merged")
    inputs: dict[str, torch.Tensor] = {}
    layers = adapter_layers(model)
    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda module, args, name=name: inputs.update({name: args[0]}))
    logits(model)
    for name, layer in layers.items():
        with torch.no_grad():
            y = layer(inputs[name]).double()
            off = nn.functional.linear(inputs[name], written[name].dequantize()).double() - y
        assert report.layers[name].output_error == pytest.approx(float(off.norm() / y.norm()), rel=1e-12) and off.norm() > 0
    assert report.output_error == max(layer.output_error for layer in report.layers.values())
    with pytest.raises(MergeLoss, match=r"relative output error .* at model\.layers\.\d.*, allowed .*; serve the adapter unmerged"):
        merge_to_folder(model, base, tmp_path / "other", tolerance=10.0, probe=IDS, max_output_error=report.output_error * 0.999)
    assert not (tmp_path / "other").exists()


def test_a_probe_sees_a_bias_and_the_experts_that_it_reaches(moe, tmp_path):
    model = adapted(moe, qast=False, target_modules=["gate_up_proj", "down_proj"], experts=[0, 1])
    report = merge_to_folder(model, moe, tmp_path / "merged", tolerance=10.0, probe=IDS)
    assert all(layer.output_error > 0 for layer in report.layers.values())
    assert len({layer.output_error for layer in report.layers.values()}) == len(report.layers)
    assert all(layer.observer is None for layer in adapter_layers(model).values())
    nothing = merge_to_folder(model, moe, tmp_path / "other", tolerance=10.0, probe=lambda model: None)
    assert nothing.output_error is None and all(layer.output_error is None for layer in nothing.layers.values())
    layer = unrounded("nvfp4")
    layer.qast["default"] = True
    holder = nn.ModuleDict({"layer": layer})
    weight = next(layer.corrections("default")).weight(torch.float32)
    found = merge.output_errors(holder, {"layer": layer}, "default", lambda *_: weight, lambda model: model["layer"](torch.randn(4, 64)))
    assert found == {"layer": 0.0}


def test_the_probe_runs_the_named_adapter_unmerged_and_puts_everything_back(base, tmp_path):
    model = adapted(base, qast=False)
    expected = merge_to_folder(model, base, tmp_path / "first", tolerance=10.0, probe=IDS).output_error
    model.add_adapter("other", ScaleQLoraConfig(r=1, alpha=1.0))
    model.set_adapter("other")
    model.merge_adapter(["other"])
    model.train()
    before = logits(model)
    flags = [(module.training, getattr(module, "merged_adapters", None)) for module in model.modules()]
    assert merge_to_folder(model, base, tmp_path / "second", tolerance=10.0, probe=IDS).output_error == expected
    assert [(module.training, getattr(module, "merged_adapters", None)) for module in model.modules()] == flags
    assert model.active_adapters == ["other"] and torch.equal(logits(model), before)
    with model.disable_adapter():
        assert merge_to_folder(model, base, tmp_path / "third", tolerance=10.0, probe=IDS).output_error == expected


def test_scales_changed_outside_the_adapters_layers_are_found(base, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    write = merge._rewrite

    def careless(source: Path, folder: Path, planes: dict[str, torch.Tensor]) -> None:
        _, tensors, _ = read_quantized(source)
        other = "model.layers.0.mlp.up_proj"
        write(source, folder, planes | {other: tensors[other].scales.clamp(min=1) - 1})

    monkeypatch.setattr(merge, "_rewrite", careless)
    with pytest.raises(MergeLoss, match="tensors that a merge never touches differ too; report this"):
        merge_to_folder(adapted(base, target_modules=["q_proj"]), base, tmp_path / "out" / "merged")
    assert empty(tmp_path / "out")


@pytest.mark.parametrize("qast", [True, False])
def test_manifests_name_rounding_rule_tokenizer_and_flag(base, tmp_path, qast):
    model = adapted(base, qast=qast)
    model.save_pretrained(tmp_path / "adapter")
    manifest = write_scale_plane(model, tmp_path / "adapter")
    spec = read_quantized(base)[0]
    expected = {
        "format": spec.name,
        "grid": spec.grid.name,
        "block": spec.block,
        "qast": qast,
        "rounding": {"e4m3": "nearest-even", "e8m0": "nearest-log2"}[spec.grid.name],
        "tokenizer": hashlib.sha256((base / "tokenizer.json").read_bytes()).hexdigest(),
        "scale_rule": read_manifest(base, KIND)["scale_rule"],
        "experts": {},
    }
    assert {key: manifest[key] for key in expected} == expected
    assert manifest == read_manifest(tmp_path / "adapter", ADAPTER_KIND)
    report = merge_to_folder(model, base, tmp_path / "merged", tolerance=10.0)
    merged = read_manifest(tmp_path / "merged", KIND)
    assert (merged["rounding"], merged["scale_rule"]) == (expected["rounding"], expected["scale_rule"])
    assert merged["merge"] == json.loads(json.dumps(report.to_dict()))


def test_a_base_without_tokenizer_or_folder_has_no_such_entries(base, tmp_path):
    model = adapted(base)
    model.save_pretrained(tmp_path / "adapter")
    (tmp_path / "bare").mkdir()
    assert not {"tokenizer", "scale_rule"} & set(write_scale_plane(model, tmp_path / "adapter", base_folder=tmp_path / "bare"))
    model.get_base_model().config._name_or_path = ""
    assert not {"tokenizer", "scale_rule"} & set(write_scale_plane(model, tmp_path / "adapter"))
    assert {"tokenizer", "scale_rule"} <= set(write_scale_plane(model, tmp_path / "adapter", base_folder=base))
