"""Our checkpoints against the compressed-tensors package itself, in both directions, and byte-identical round trips (FMT-01, FMT-02).

Their dequantization is bf16(fl(c * fl(s / g))) where g is the stored divisor; ours is bf16(fl(c * s * t)) with t = fl(1 / g) and c * s exact. Each has at
most two float32 roundings, so before the last rounding they differ by less than 4 * 2^-24 relative, a thousandth of a bfloat16 step: after
it they are the same number or neighbours. MXFP4 and the integer formats have no g: each weight is one product, rounded at most once, and equality is
demanded bit for bit.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from prism_ray.calibrate.quantize import quantize_to_folder
from prism_ray.core.errors import CheckpointError, FormatError
from prism_ray.formats import compressed_tensors as convention
from prism_ray.formats import e2m1
from prism_ray.formats.checkpoint import load_quantized_model, read_quantized
from prism_ray.formats.config_groups import format_of_config, formats_of_modules, quantization_config
from prism_ray.formats.modules import quantized_modules
from prism_ray.formats.policy import DEFAULT_IGNORE, QuantPolicy, make_plan
from prism_ray.formats.spec import FORMATS, FormatSpec
from prism_ray.formats.tensor import QuantTensor
from prism_ray.models.tiny import tiny_llama, tiny_qwen3_moe, tiny_tokenizer
from prism_ray.quantizers.rtn import rtn, tensor_scale_for

every = pytest.mark.parametrize("name", list(FORMATS))


def llama(seed: int = 0):
    """128 columns everywhere, which every format divides."""
    return tiny_llama(seed=seed, hidden_size=128)


@pytest.fixture(autouse=True)
def _their_rounding_without_a_compiler():
    # compressed-tensors decorates its E2M1 cast with torch.compile; eager gives the same numbers without waiting for a C++ compiler.
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.fixture(scope="module", params=[(name, model) for name in FORMATS for model in ("llama", "moe")], ids="-".join)
def folder(request, tmp_path_factory) -> tuple[FormatSpec, Path]:
    name, kind = request.param
    model = llama(seed=1) if kind == "llama" else tiny_qwen3_moe(seed=1, hidden_size=128, moe_intermediate_size=128)
    path = tmp_path_factory.mktemp("quantized") / "model"
    quantize_to_folder(model, tiny_tokenizer(), QuantPolicy(format=name), path)
    return FORMATS[name], path


def scheme_of(folder: Path) -> tuple[QuantizationConfig, QuantizationScheme]:
    config = QuantizationConfig.model_validate(json.loads((folder / "config.json").read_text())["quantization_config"])
    return config, config.config_groups["group_0"]


def scheme_for(name: str) -> QuantizationScheme:
    plan = make_plan(llama(), QuantPolicy(format=name))
    return QuantizationConfig.model_validate(quantization_config(plan)).config_groups["group_0"]


def compressor(name: str) -> BaseCompressor:
    return BaseCompressor.get_value_from_registry(FORMATS[name].checkpoint_format)


def ordered(x: torch.Tensor) -> torch.Tensor:
    """bfloat16 numbers as integers in numeric order, so that a difference counts representable steps."""
    raw = x.view(torch.int16).to(torch.int32)
    return torch.where(raw < 0, -(raw & 0x7FFF), raw)


def local(tensors: dict[str, torch.Tensor], module: str) -> dict[str, torch.Tensor]:
    """A module's tensors under their own names, as the package's compressors take them."""
    return {key.removeprefix(f"{module}."): value for key, value in tensors.items() if key.startswith(f"{module}.")}


def test_the_package_accepts_our_config(folder):
    spec, path = folder
    config, scheme = scheme_of(path)
    assert config.quant_method == "compressed-tensors" and config.format == spec.checkpoint_format
    assert config.quantization_status.value == "compressed"
    assert scheme.format == spec.checkpoint_format and scheme.targets == ["Linear"] and scheme.input_activations is None
    weights = scheme.weights
    kind = "float" if spec.is_fp4 else "int"
    assert (weights.num_bits, weights.type, weights.group_size, weights.symmetric, weights.dynamic) == (4, kind, spec.block, True, False)
    assert weights.scale_dtype == (spec.checkpoint_scale_dtype if spec.is_fp4 else None)
    assert "lm_head" in config.ignore
    assert compressor(spec.name).can_compress(torch.nn.Linear, scheme)
    other = next(FORMATS[name] for name in FORMATS if FORMATS[name].checkpoint_format != spec.checkpoint_format)
    assert not compressor(other.name).can_compress(torch.nn.Linear, scheme)


def test_the_package_decompresses_our_folder_to_our_weights(folder):
    spec, path = folder
    _, scheme = scheme_of(path)
    read_spec, quantized, _ = read_quantized(path)
    tensors = load_file(path / "model.safetensors")
    assert read_spec is spec and len(quantized) >= 14
    differing = total = 0
    for name, tensor in quantized.items():
        theirs = compressor(spec.name).decompress(local(tensors, name), scheme)["weight"]
        ours = tensor.dequantize(torch.bfloat16)
        assert theirs.dtype == torch.bfloat16 and theirs.shape == ours.shape
        steps = (ordered(theirs) - ordered(ours)).abs()
        assert steps.max() <= (1 if spec.has_tensor_scale else 0), name
        differing += int((steps > 0).sum())
        total += ours.numel()
    # A relative difference below 2^-22 crosses a rounding boundary of an 8-bit significand (2^-9 half a step) with probability below
    # 2^-22 / 2^-9 = 1e-4 on average; ten times that would be another convention.
    assert differing <= 1e-3 * total


@every
def test_transformers_loads_our_folder_through_the_package(name, tmp_path):
    """What a user of the folder without prism-ray gets: dense Linear layers in bfloat16."""
    quantize_to_folder(llama(seed=2), tiny_tokenizer(), QuantPolicy(format=name), tmp_path / "q")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.bfloat16)
    ours = load_quantized_model(tmp_path / "q")
    with torch.no_grad():
        ids = torch.tensor([[1, 5, 9, 40, 200, 7]])
        a, b = theirs(ids).logits, ours(ids).logits  # their first forward decompresses
    for path, module in quantized_modules(ours):
        steps = (ordered(theirs.get_submodule(path).weight.detach()) - ordered(module.dequantize(torch.bfloat16))).abs()
        assert steps.max() <= (1 if FORMATS[name].has_tensor_scale else 0), path
    for key, value in ours.named_parameters():
        assert torch.equal(theirs.get_parameter(key), value), key
    # Weights that differ by a step in at most 1e-3 of the places change logits by far less than their spread.
    assert torch.equal(a, b) if not FORMATS[name].has_tensor_scale else (a - b).abs().max() < 0.05 * b.abs().max()


@every
def test_every_code_and_scale_byte_means_the_same_to_the_package(name):
    """All pairs of codes under all scale bytes that the package's bfloat16 arithmetic can hold."""
    spec = FORMATS[name]
    if spec.grid.width == 1:
        legal = torch.arange(256, dtype=torch.uint8)[:, None]
        legal = legal[~spec.grid.illegal(legal).squeeze(-1)]
    else:
        legal = torch.arange(0, 0x7F80, 61, dtype=torch.int32).to(torch.int16).view(torch.uint8).reshape(-1, 2)
    if name == "mxfp4":
        legal = legal[1:252]  # 6 * 2^124 is the last that no code takes to infinity; 2^-127 is subnormal
    codes = torch.arange(256, dtype=torch.uint8).expand(len(legal), 256).contiguous()
    scales = legal.repeat(1, 512 // spec.block)
    scale, divisor = tensor_scale_for(torch.tensor(2688.0), spec)  # divisor 1: exact on both sides
    tensor = QuantTensor(codes=codes, scales=scales, tensor_scale=scale, format=spec, divisor=divisor)
    stored = local(convention.to_checkpoint("layer", tensor), "layer")
    theirs = compressor(name).decompress(stored, scheme_for(name))["weight"]
    assert torch.equal(theirs.view(torch.int16), tensor.dequantize(torch.bfloat16).view(torch.int16))


@every
def test_the_package_compresses_the_same_weight_under_our_scales_to_our_bytes(name):
    """Their quotient is w / fl(s / g), ours w / fl(s * t): at most 4 * 2^-24 apart, so only a weight that close to a tie may differ."""
    spec = FORMATS[name]
    w = torch.randn(64, 512, generator=torch.Generator().manual_seed(2)) * 0.05
    tensor, _ = rtn(w, spec)
    state = {"weight": w, "weight_scale": scales_for(spec, spec.grid.decode(tensor.scales))}
    if tensor.divisor is not None:
        state["weight_global_scale"] = tensor.divisor.reshape(1)
    compressed = compressor(name).compress(state, scheme_for(name))
    ours = local(convention.to_checkpoint("layer", tensor), "layer")
    assert set(compressed) == set(ours)
    for key in ours.keys() - {"weight_packed"}:
        assert compressed[key].dtype == ours[key].dtype and torch.equal(compressed[key].view(torch.uint8), ours[key].view(torch.uint8)), key
    step = spec.grid.decode(tensor.scales).to(torch.float64) * tensor.tensor_scale.to(torch.float64)
    quotient = (w.to(torch.float64) / step.repeat_interleave(spec.block, dim=-1)).abs()
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    near = (
        ((quotient[..., None] - ties).abs() < ties * 2.0**-22).any(-1) if spec.has_tensor_scale else torch.zeros_like(w, dtype=torch.bool)
    )
    theirs = compressed["weight_packed"].view(torch.uint8)
    if name.startswith("int3"):  # as INT4 codes the package keeps what lies beyond int3's ends: 3.5 rounds to 4
        theirs = e2m1.pack(e2m1.unpack(theirs).clamp(4, 11))
    same = e2m1.unpack(theirs) == e2m1.unpack(ours["weight_packed"].view(torch.uint8))
    assert (same | near).all() and near.sum() <= 2


def scales_for(spec: FormatSpec, values: torch.Tensor) -> torch.Tensor:
    """Scales as the package's compressor wants them: it casts those of the FP4 formats itself."""
    return values if spec.is_fp4 else values.to(torch.bfloat16)


@every
def test_ties_and_negative_values_round_as_the_package_rounds(name):
    spec = FORMATS[name]
    if spec.is_fp4:
        values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6.0])
    else:
        values = torch.arange(-16, 16) / 2 if spec.codes.name == "int4" else torch.arange(-8, 7) / 2
        values = torch.cat([values, values[: 128 - len(values) * (128 // len(values))]])
    w = values.repeat(128 // len(values) + 1)[:128].reshape(1, 128)
    state = {"weight": w, "weight_scale": scales_for(spec, torch.ones(1, 128 // spec.block))}
    if spec.has_tensor_scale:
        state["weight_global_scale"] = torch.ones(1)
    theirs = compressor(name).compress(state, scheme_for(name))["weight_packed"]
    assert torch.equal(e2m1.pack(spec.codes.round_to_codes(w)), theirs.view(torch.uint8))


@every
def test_a_checkpoint_that_the_package_compressed_is_read_and_written_back_byte_for_byte(name, tmp_path):
    """Scales and global scale from the package's own observers' functions, from end to end without our quantizer."""
    spec = FORMATS[name]
    scheme = scheme_for(name)
    tensors, dense = {}, {}
    for index, module in enumerate(("model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj")):
        w = torch.randn(32, 128, generator=torch.Generator().manual_seed(index)) * 10.0 ** (-index)
        blocks = w.reshape(32, -1, spec.block)
        divisor = generate_gparam(w.min(), w.max()) if spec.has_tensor_scale else None
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=divisor)
        state = {"weight": w, "weight_scale": scales_for(spec, scale)} | ({} if divisor is None else {"weight_global_scale": divisor})
        compressed = compressor(name).compress(state, scheme)
        dense[module] = compressor(name).decompress(dict(compressed), scheme)["weight"]
        tensors |= {f"{module}.{key}": value.contiguous() for key, value in compressed.items()}
    tensors["model.norm.weight"] = torch.ones(128)
    save_file(tensors, tmp_path / "model.safetensors")
    plan = make_plan(llama(), QuantPolicy(format=name))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": quantization_config(plan)}))

    read_spec, quantized, plain = read_quantized(tmp_path)
    assert read_spec is FORMATS[name.replace("int3", "int4")] and set(quantized) == set(dense) and set(plain) == {"model.norm.weight"}
    for module, tensor in quantized.items():
        steps = (ordered(dense[module]) - ordered(tensor.dequantize(torch.bfloat16))).abs()
        assert steps.max() <= (1 if spec.has_tensor_scale else 0)
    assert_same_bytes(rewritten(tmp_path), tensors)


def rewritten(folder: Path) -> dict[str, torch.Tensor]:
    """What our writer gives for what our reader read."""
    _, quantized, plain = read_quantized(folder)
    out = dict(plain)
    for module, tensor in quantized.items():
        out |= convention.to_checkpoint(module, tensor)
    return out


def assert_same_bytes(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        assert ours[key].dtype == value.dtype and ours[key].shape == value.shape, key
        assert torch.equal(ours[key].contiguous().view(torch.uint8), value.contiguous().view(torch.uint8)), key


def test_reading_and_writing_our_own_folder_is_byte_identical(folder, tmp_path):
    _, path = folder
    original = load_file(path / "model.safetensors")
    assert_same_bytes(rewritten(path), original)
    # Also through fused experts, the form that models hold: fuse, split again.
    _, quantized, plain = read_quantized(path)
    fused = dict(plain)
    for name, tensor in convention.fuse_experts(quantized).items():
        fused |= convention.to_checkpoint(name, tensor)
    assert_same_bytes(fused, original)
    save_file({name: fused[name].contiguous() for name in sorted(fused)}, tmp_path / "again.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "again.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()


def test_global_scales_of_a_thousand_maxima_survive_read_and_write(tmp_path):
    """1 / (1 / g) is not always g in float32: the divisor itself must come back. Maxima from 1e-30 to 1e30 and from a foreign writer alike."""
    generator = torch.Generator().manual_seed(3)
    amax = 10 ** (torch.rand(1000, generator=generator, dtype=torch.float64) * 60 - 30)
    divisors = (2688.0 / amax).to(torch.float32)
    lossy = 0
    for divisor in divisors:
        stored = {"m.weight_packed": torch.zeros(1, 16, dtype=torch.uint8), "m.weight_scale": torch.zeros(1, 2).to(torch.float8_e4m3fn)}
        stored["m.weight_global_scale"] = divisor.reshape(1)
        tensor = convention.from_checkpoint("m", stored, FORMATS["nvfp4"])
        assert tensor.tensor_scale == 1.0 / divisor
        assert torch.equal(convention.to_checkpoint("m", tensor)["m.weight_global_scale"], divisor.reshape(1))
        lossy += int(1.0 / (1.0 / divisor) != divisor)
    assert lossy > 50  # the reciprocal alone would have changed these
    for value in amax[:200].to(torch.float32):
        scale, divisor = tensor_scale_for(value, FORMATS["nvfp4"])
        assert divisor is not None and torch.equal(scale, 1.0 / divisor) and divisor == generate_gparam(-value, value)[0]


@pytest.mark.parametrize(("amax", "divisor"), [(0.75, 3584.0), (2688.0, 1.0)])
def test_fmt02_the_stored_scalar_is_the_divisor(amax, divisor):
    w = torch.zeros(2, 32)
    w[0, 0] = -amax
    tensor, _ = rtn(w, FORMATS["nvfp4"])
    stored = convention.to_checkpoint("m", tensor)["m.weight_global_scale"]
    assert stored.shape == (1,) and stored.dtype == torch.float32 and stored.item() == divisor
    assert stored.item() == generate_gparam(w.min(), w.max()).item()
    assert tensor.dequantize()[0, 0].item() == pytest.approx(-amax, rel=2**-23)


def test_a_tensor_scale_without_a_float32_reciprocal_is_refused_instead_of_changed():
    scale = next(value for value in torch.linspace(1, 2, 1000).unbind() if 1.0 / (1.0 / value) != value)  # several in every binade
    tensor = QuantTensor(
        codes=torch.zeros(1, 8, dtype=torch.uint8),
        scales=torch.zeros(1, 1, dtype=torch.uint8),
        tensor_scale=scale,
        format=FORMATS["nvfp4"],
    )
    with pytest.raises(FormatError, match="m: tensor scale has no float32 reciprocal"):
        convention.to_checkpoint("m", tensor)


@every
def test_missing_misshapen_and_illegal_tensors_are_named(name):
    spec = FORMATS[name]
    tensor, _ = rtn(torch.randn(4, 256, generator=torch.Generator().manual_seed(4)), spec)
    stored = convention.to_checkpoint("m", tensor)
    assert convention.from_checkpoint("m", stored, spec).scales.equal(tensor.scales)
    assert convention.from_checkpoint("m", stored, spec).codes.equal(tensor.codes)
    for key in stored:
        with pytest.raises(CheckpointError, match=f"m: tensor '{key}' is missing"):
            convention.from_checkpoint("m", {other: value for other, value in stored.items() if other != key}, spec)
    with pytest.raises(CheckpointError, match="m: scales have shape"):
        convention.from_checkpoint("m", {**stored, "m.weight_scale": stored["m.weight_scale"][:, :1]}, spec)
    with pytest.raises(CheckpointError, match=r"'m\.weight_scale' has dtype torch\.int8"):
        convention.from_checkpoint("m", {**stored, "m.weight_scale": stored["m.weight_scale"].view(torch.int8)}, spec)
    illegal = torch.full_like(tensor.scales, 0xFF).view(spec.checkpoint_scale_dtype)
    with pytest.raises(FormatError, match="m: scale byte 0xFF"):
        convention.from_checkpoint("m", {**stored, "m.weight_scale": illegal}, spec)
    for part, meaning in (("weight_zero_point", "asymmetric codes"), ("weight_g_idx", "columns permuted by activation order")):
        with pytest.raises(CheckpointError, match=rf"m: 'm\.{part}' means {meaning}, which cannot be read"):
            convention.from_checkpoint("m", {**stored, f"m.{part}": torch.zeros(4, 1)}, spec)
    if not spec.is_fp4:
        with pytest.raises(CheckpointError, match=r"m: 'm\.weight_shape' says \[4, 128\], the codes hold \[4, 256\]"):
            convention.from_checkpoint("m", {**stored, "m.weight_shape": torch.tensor([4, 128])}, spec)
        with pytest.raises(CheckpointError, match=r"'m\.weight_packed' has dtype torch\.uint8, pack-quantized stores torch\.int32"):
            convention.from_checkpoint("m", {**stored, "m.weight_packed": tensor.codes}, spec)
    if spec.has_tensor_scale:
        for value in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(FormatError, match="m: tensor scale is not a positive finite number"):
                convention.from_checkpoint("m", {**stored, "m.weight_global_scale": torch.tensor([value])}, spec)
        with pytest.raises(CheckpointError, match=r"'m\.weight_global_scale' has shape \[4\] and dtype torch\.float32, expected one"):
            convention.from_checkpoint("m", {**stored, "m.weight_global_scale": torch.ones(4)}, spec)


def expert_linears(spec: FormatSpec) -> dict[str, QuantTensor]:
    gate_up, _ = rtn(torch.randn(3, 64, 128, generator=torch.Generator().manual_seed(5)), spec)
    down, _ = rtn(torch.randn(3, 64, 128, generator=torch.Generator().manual_seed(6)), spec)
    stored = convention.to_checkpoint("l.mlp.experts.gate_up_proj", gate_up) | convention.to_checkpoint("l.mlp.experts.down_proj", down)
    return {module: convention.from_checkpoint(module, stored, spec) for module in convention.module_names(stored)}


@every
def test_experts_are_stored_one_by_one_and_fused_again(name):
    linears = expert_linears(FORMATS[name])
    assert len(linears) == 9 and linears["l.mlp.experts.2.gate_proj"].shape == (32, 128)
    fused = convention.fuse_experts({**linears, "l.q_proj": linears["l.mlp.experts.0.down_proj"]})
    assert {key: value.shape for key, value in fused.items()} == {
        "l.q_proj": (64, 128),
        "l.mlp.experts.gate_up_proj": (3, 64, 128),
        "l.mlp.experts.down_proj": (3, 64, 128),
    }
    gate_up, _ = rtn(torch.randn(3, 64, 128, generator=torch.Generator().manual_seed(5)), FORMATS[name])
    for field in ("codes", "scales", "tensor_scale"):
        assert torch.equal(getattr(fused["l.mlp.experts.gate_up_proj"], field), getattr(gate_up, field))


@every
def test_fmt06_a_missing_expert_or_part_is_named(name):
    linears = expert_linears(FORMATS[name])
    without = {key: value for key, value in linears.items() if ".1." not in key}
    with pytest.raises(CheckpointError, match=r"l\.mlp\.experts: experts \[1\] are missing"):
        convention.fuse_experts(without)
    for part in ("down_proj", "gate_proj", "up_proj"):
        without = {key: value for key, value in linears.items() if key != f"l.mlp.experts.2.{part}"}
        with pytest.raises(CheckpointError, match=f"l.mlp.experts: expert 2 has no '{part}'"):
            convention.fuse_experts(without)
    without = {key: value for key, value in linears.items() if key != "l.mlp.experts.0.gate_proj"}
    with pytest.raises(CheckpointError, match=r"l\.mlp\.experts: expert 0 has no 'gate_proj'"):
        convention.fuse_experts(without)


def test_fmt05_gate_and_up_of_different_tensor_scales_are_not_fused():
    linears = expert_linears(FORMATS["nvfp4"])
    up = linears["l.mlp.experts.1.up_proj"]
    linears["l.mlp.experts.1.up_proj"] = QuantTensor(codes=up.codes, scales=up.scales, tensor_scale=up.tensor_scale * 2, format=up.format)
    with pytest.raises(CheckpointError, match="gate_proj and up_proj of expert 1 have different tensor scales"):
        convention.fuse_experts(linears)


@pytest.mark.parametrize(
    "config",
    [{}, {"quant_method": "gptq", "format": "nvfp4-pack-quantized"}, {"quant_method": "compressed-tensors", "format": "int-quantized"}],
)
def test_other_quantizations_are_refused_and_the_readable_ones_listed(config):
    with pytest.raises(
        CheckpointError,
        match=r"folder: quantization .* cannot be read; readable: nvfp4-pack-quantized, mxfp4-pack-quantized, pack-quantized$",
    ):
        format_of_config(config, "folder")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bits": 8}, "integers of 8 bits"),
        ({"num_bits": 3}, "integers of 3 bits"),
        ({"type": "float"}, "codes of type float"),
        ({"symmetric": False}, "zero points"),
        ({"actorder": "group"}, "columns permuted by activation order"),
        ({"actorder": True}, "columns permuted by activation order"),
        ({"strategy": "channel", "group_size": None}, "strategy channel"),
        ({"group_size": 256}, "a group size of 256"),
    ],
)
def test_integer_checkpoints_of_other_kinds_are_refused_by_name(change, message):
    config = quantization_config(make_plan(llama(), QuantPolicy(format="int4-g64")))
    weights = config["config_groups"]["group_0"]["weights"]
    assert format_of_config(config, "folder") is FORMATS["int4-g64"]
    weights["actorder"] = "static"  # orders the calibration only, not the columns
    assert format_of_config(config, "folder") is FORMATS["int4-g64"]
    weights |= change
    with pytest.raises(
        CheckpointError, match=f"folder: pack-quantized checkpoint with {message}.* cannot be read; readable: symmetric 4-bit"
    ):
        format_of_config(config, "folder")


MIXED = {"*.layers.0.self_attn.*": "int4-g32", "*.layers.1.mlp.*": "int3-g64", "*.layers.1.self_attn.*": "mxfp4"}


def test_several_formats_in_one_checkpoint_are_read_by_us_and_by_transformers(tmp_path):
    """One config group per checkpoint format and group size, `mixed-precision` at the top; the default group is the one with most weights."""
    model = llama(seed=3)
    quantize_to_folder(model, tiny_tokenizer(), QuantPolicy(overrides=MIXED), tmp_path / "q")
    config = QuantizationConfig.model_validate(json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"])
    assert config.format == "mixed-precision" and len(config.config_groups) == 4
    assert [scheme.targets for scheme in config.config_groups.values()].count(["Linear"]) == 1
    _, quantized, _ = read_quantized(tmp_path / "q")
    found = {name: tensor.format.name for name, tensor in quantized.items()}
    assert found["model.layers.0.self_attn.k_proj"] == "int4-g32" and found["model.layers.0.mlp.up_proj"] == "nvfp4"
    assert found["model.layers.1.mlp.down_proj"] == "int3-g64" and found["model.layers.1.self_attn.o_proj"] == "mxfp4"
    ours = load_quantized_model(tmp_path / "q")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.bfloat16)
    with torch.no_grad():
        theirs(torch.tensor([[1, 5]]))  # the first forward decompresses
    for path, module in quantized_modules(ours):
        steps = (ordered(theirs.get_submodule(path).weight.detach()) - ordered(module.dequantize(torch.bfloat16))).abs()
        assert steps.max() <= (1 if module.format.has_tensor_scale else 0), path
    assert_same_bytes(rewritten(tmp_path / "q"), load_file(tmp_path / "q" / "model.safetensors"))


def test_experts_of_another_format_than_the_rest_are_read_by_us_and_by_transformers(tmp_path):
    """Experts are named by one expression a layer; transformers takes the group whose expression speaks of experts for all of them."""
    model = tiny_qwen3_moe(seed=4, hidden_size=128, moe_intermediate_size=128)
    quantize_to_folder(model, tiny_tokenizer(), QuantPolicy(overrides={"*.experts.*": "int4-g64"}), tmp_path / "q")
    ours = load_quantized_model(tmp_path / "q")
    formats = {path: module.format.name for path, module in quantized_modules(ours)}
    assert formats["model.layers.1.mlp.experts.down_proj"] == "int4-g64" and formats["model.layers.1.self_attn.q_proj"] == "nvfp4"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.bfloat16)
    for layer in range(2):
        for leaf in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{layer}.mlp.experts.{leaf}"
            assert torch.equal(theirs.get_parameter(name), ours.get_submodule(name).quant_tensor().dequantize(torch.bfloat16)), name


def test_a_packed_module_that_no_group_targets_is_refused():
    config = quantization_config(make_plan(llama(), QuantPolicy(overrides=MIXED)))
    for group in config["config_groups"].values():
        if group["targets"] == ["Linear"]:
            group["targets"] = ["re:.*mlp.*"]
    assert formats_of_modules(config, ["model.layers.0.mlp.up_proj"], "f")["model.layers.0.mlp.up_proj"] is FORMATS["nvfp4"]
    with pytest.raises(CheckpointError, match=r"f: no group of the quantization config targets 'lm_head'"):
        formats_of_modules(config, ["lm_head"], "f")


def test_fmt05_fmt09_a_plan_that_splits_a_fused_group_has_no_checkpoint():
    for policy in (QuantPolicy(overrides={"*.q_proj": "mxfp4"}), QuantPolicy(ignore=(*DEFAULT_IGNORE, "*.q_proj"))):
        with pytest.raises(
            FormatError, match=r"model\.layers\.0\.self_attn: projections that are served as one matrix .*q_proj .*k_proj nvfp4"
        ):
            quantization_config(make_plan(llama(), policy))
