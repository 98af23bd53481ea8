"""Scale-QLoRA over fused experts: exact start, gradient, memory, partial experts on disk, and a merge that is the unmerged model to the bit."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import GptOssConfig, GptOssForCausalLM, MixtralConfig, MixtralForCausalLM

from prism_ray.adapters.merge import SCALE_PLANE_NAME, adapter_layers, base_planes, merge_to_folder, write_scale_plane
from prism_ray.adapters.scale_plane import read_scale_plane
from prism_ray.adapters.scale_qlora import ScaleQLoraConfig, ScaleQLoraExperts, ScaleQLoraLinear, prune_experts
from prism_ray.adapters.scale_qlora.model import trainable_parameters
from prism_ray.calibrate.quantize import quantize_to_folder
from prism_ray.core.errors import CheckpointError, ConfigError, FingerprintMismatch, ModelError
from prism_ray.core.manifest import read_manifest
from prism_ray.formats import e2m1
from prism_ray.formats.checkpoint import KIND, load_quantized_model, read_quantized
from prism_ray.formats.modules import FP4Experts, FP4Linear, set_code_storage
from prism_ray.formats.policy import QuantPolicy
from prism_ray.formats.spec import FP4_FORMATS
from prism_ray.formats.tensor import code_plane_fingerprint, scale_plane_fingerprint
from prism_ray.hessian.capture import use_our_experts
from prism_ray.models.tiny import TINY_VOCAB_SIZE, tiny_qwen3_moe, tiny_tokenizer

IDS = torch.tensor([[1, 5, 9, 40, 200, 7], [3, 3, 3, 250, 11, 0]])
EXPERT_WEIGHTS = ["gate_up_proj", "down_proj"]
FIRST = "model.layers.0.mlp.experts"
both = pytest.mark.parametrize("name", FP4_FORMATS)


def tiny_mixtral() -> MixtralForCausalLM:
    sizes = {"vocab_size": TINY_VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, initializer_range=0.1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MixtralForCausalLM(config).eval()


BUILD = {"qwen3_moe": tiny_qwen3_moe, "mixtral": tiny_mixtral}


@pytest.fixture(scope="module", params=[(name, family) for name in FP4_FORMATS for family in BUILD], ids="-".join)
def base(request, tmp_path_factory) -> Path:
    name, family = request.param
    folder = tmp_path_factory.mktemp("base") / "model"
    quantize_to_folder(BUILD[family](), tiny_tokenizer(), QuantPolicy(format=name), folder)
    return folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    quantize_to_folder(tiny_qwen3_moe(), tiny_tokenizer(), QuantPolicy(), folder)
    return folder


def loaded(folder: Path, dtype: torch.dtype = torch.float32):
    return load_quantized_model(folder, dtype=dtype)


def train(model, adapter: str = "default", seed: int = 0) -> None:
    """Stand in for training: factors that move bytes of every expert, also where a row has one block (A is bounded away from zero)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in adapter_layers(model, adapter).values():
            layer.qast_A[adapter].copy_(torch.rand(layer.qast_A[adapter].shape, generator=generator) * 0.5 + 0.5)
            layer.qast_B[adapter].copy_(torch.randn(layer.qast_B[adapter].shape, generator=generator) * 0.7)


def adapted(folder: Path, dtype: torch.dtype = torch.float32, rank: int = 1, **options) -> PeftModel:
    options = {"target_modules": EXPERT_WEIGHTS} | options
    model = get_peft_model(loaded(folder, dtype), ScaleQLoraConfig(r=rank, alpha=1.0, **options))
    train(model)
    return model.eval()


def expert_layers(model, adapter: str = "default") -> dict[str, ScaleQLoraExperts]:
    return {name: layer for name, layer in adapter_layers(model, adapter).items() if isinstance(layer, ScaleQLoraExperts)}


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(input_ids=IDS).logits


def test_an_untrained_adapter_is_the_base_bit_for_bit(base):
    expected = logits(loaded(base))
    model = get_peft_model(loaded(base), ScaleQLoraConfig(r=1, experts="all"))
    layers = expert_layers(model)
    assert len(layers) == 4 and all(name.endswith(tuple(EXPERT_WEIGHTS)) for name in layers)
    assert torch.equal(logits(model), expected)
    assert torch.equal(model(input_ids=IDS).logits.detach(), expected)  # the path that keeps what backward needs
    layer = layers[f"{FIRST}.gate_up_proj"]
    groups = layer.base_layer.scales.shape[-1]
    assert layer.qast_A["default"].shape == (4, 1, groups) and layer.qast_B["default"].shape == (4, 64, 1)
    assert len(trainable_parameters(model)) == 2 * len(adapter_layers(model))
    # "all" takes the linear layers too.
    linears = [name for name, module in loaded(base).named_modules() if isinstance(module, FP4Linear)]
    assert sorted([*linears, *layers]) == sorted(adapter_layers(model))


def test_expert_weights_are_targets_only_where_they_are_named(qwen):
    model = get_peft_model(loaded(qwen), ScaleQLoraConfig(r=1))
    assert not any(isinstance(module, ScaleQLoraExperts) for module in model.modules())
    model = get_peft_model(loaded(qwen), ScaleQLoraConfig(r=1, target_modules=["down_proj", "q_proj"], layers_to_transform=[1]))
    assert sorted(adapter_layers(model)) == ["model.layers.1.mlp.experts.down_proj", "model.layers.1.self_attn.q_proj"]
    model = get_peft_model(loaded(qwen), ScaleQLoraConfig(r=1, experts=[2]))
    assert [layer.experts["default"] for layer in expert_layers(model).values()] == [[2]] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_training_and_serving_take_the_same_numbers(base, dtype):
    model = adapted(base, dtype)
    assert not torch.equal(logits(model), logits(loaded(base, dtype)))
    assert torch.equal(model(input_ids=IDS).logits.detach(), logits(model))
    use_our_experts(model.get_base_model())  # the forward that calibration runs experts through
    assert torch.equal(model(input_ids=IDS).logits.detach(), logits(model))


class Dense(nn.Module):
    """One experts module in float64 from the planes alone, with A and B as leaves and x + (round(x) - x).detach() as the rounding."""

    def __init__(self, experts: nn.Module):
        super().__init__()
        self.layers = {leaf: getattr(experts, leaf) for leaf in EXPERT_WEIGHTS}
        self.a = {leaf: layer.qast_A["default"].detach().double().requires_grad_() for leaf, layer in self.layers.items()}
        self.b = {leaf: layer.qast_B["default"].detach().double().requires_grad_() for leaf, layer in self.layers.items()}

    def weight(self, leaf: str, expert: int) -> torch.Tensor:
        layer = self.layers[leaf]
        planes, grid, block = layer.base_layer, layer.base_layer.format.grid, layer.base_layer.format.block
        s0 = grid.decode(planes.scales[expert]).double()
        scale = s0
        if expert in layer.experts["default"]:
            row = layer.experts["default"].index(expert)
            real = (s0 * (1 + self.b[leaf][row] @ self.a[leaf][row])).clamp(grid.smallest, grid.largest)
            rounded = grid.decode(layer.scale_bytes("default")[expert]).double()
            scale = torch.where(s0 == 0, 0.0, real + (rounded - real).detach())
        codes = e2m1.decode(e2m1.unpack(planes.codes[expert])).double()
        return codes * scale.repeat_interleave(block, -1) * planes.tensor_scale[expert].double()

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for token in range(x.shape[0]):
            for slot in range(index.shape[1]):
                expert = int(index[token, slot])
                gate, up = (self.weight("gate_up_proj", expert) @ x[token]).chunk(2)
                inner = self.weight("down_proj", expert) @ (nn.functional.silu(gate) * up)
                out[token] = out[token] + inner * weights[token, slot]
        return out


def routed(model, index: list[list[int]], seed: int = 3) -> dict[str, Any]:
    """One pass through the first experts module with tokens sent where `index` says; inputs, output and its gradient."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(index), 64, generator=generator).requires_grad_()
    weights = torch.rand(len(index), len(index[0]), generator=generator)
    grad_y = torch.randn(len(index), 64, generator=generator)
    experts = model.get_base_model().get_submodule(FIRST)
    y = experts(x, torch.tensor(index), weights)
    y.backward(grad_y)
    return {"experts": experts, "x": x, "weights": weights, "grad_y": grad_y, "y": y.detach()}


INDEX = [[0, 2], [2, 0], [0, 1], [2, 1], [0, 2]]  # no token for expert 3


@pytest.mark.parametrize("experts", ["all", [0, 2, 3]], ids=["all", "some"])
def test_gradients_equal_float64_autograd_and_reach_routed_experts_alone(base, experts):
    """Two linears and SwiGLU in float32: sums of at most 64 + 2 * 32 + 5 tokens + 32 block terms each way, about 300 roundings of 2^-24 along any path;
    cancellation in the random sums costs at most the root of their lengths, 8 to 16: below 300 * 16 * 2^-24 = 3e-4 of the largest entry."""
    model = adapted(base, experts=experts)
    got = routed(model, INDEX)
    reference = Dense(got["experts"])
    x = got["x"].detach().double().requires_grad_()
    y = reference(x, torch.tensor(INDEX), got["weights"].double())
    y.backward(got["grad_y"].double())
    pairs = [(got["y"], y.detach()), (got["x"].grad, x.grad)]
    for leaf, layer in reference.layers.items():
        trained = layer.experts["default"]
        assert trained == ([0, 1, 2, 3] if experts == "all" else experts)
        for found, wanted in (
            (layer.qast_A["default"].grad, reference.a[leaf].grad),
            (layer.qast_B["default"].grad, reference.b[leaf].grad),
        ):
            assert found.shape == wanted.shape and found.dtype == torch.float32
            assert not found[trained.index(3)].any()  # exactly zero
            assert all(found[row].any() for row, expert in enumerate(trained) if expert != 3)
            pairs.append((found, wanted))
    for found, wanted in pairs:
        assert (found.double() - wanted).abs().max() <= 3e-4 * wanted.abs().max()


def test_a_pass_without_a_trained_expert_gives_zero_gradients_and_the_same_output(qwen):
    model = adapted(qwen, experts=[3])
    got = routed(model, INDEX)
    for layer in (getattr(got["experts"], leaf) for leaf in EXPERT_WEIGHTS):
        for factors in (layer.qast_A["default"], layer.qast_B["default"]):
            assert factors.grad is not None and not factors.grad.any()
    plain = loaded(qwen).get_submodule(FIRST)
    x = got["x"].detach().requires_grad_()
    y = plain(x, torch.tensor(INDEX), got["weights"])
    y.backward(got["grad_y"])
    assert torch.equal(got["y"], y.detach()) and torch.equal(got["x"].grad, x.grad)


def test_an_expert_is_the_linear_layer_of_its_planes_bit_for_bit(qwen):
    """The same bits as the layer that is checked against float64 elsewhere: output, and gradients of x, A and B."""
    model = adapted(qwen)
    layer = expert_layers(model)[f"{FIRST}.gate_up_proj"]
    linear = ScaleQLoraLinear(FP4Linear(layer.base_layer.quant_tensor()[2]), "default", ScaleQLoraConfig(r=1, alpha=1.0))
    with torch.no_grad():
        linear.qast_A["default"].copy_(layer.qast_A["default"][2])
        linear.qast_B["default"].copy_(layer.qast_B["default"][2])
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    both_x = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [nn.functional.linear(both_x[0], layer[torch.tensor(2)]), linear(both_x[1])]
    for y in outputs:
        y.square().sum().backward()
    assert torch.equal(*outputs) and torch.equal(both_x[0].grad, both_x[1].grad)
    for ours, theirs in ((layer.qast_A, linear.qast_A), (layer.qast_B, linear.qast_B)):
        assert torch.equal(ours["default"].grad[2], theirs["default"].grad)
        assert not ours["default"].grad[[0, 1, 3]].any()
    assert torch.equal(layer.scale_bytes("default")[2], linear.scale_bytes("default"))


def gradients(model, run) -> list[torch.Tensor]:
    model.zero_grad()
    run()
    return [parameter.grad.clone() for parameter in trainable_parameters(model).values()]


def test_checkpointing_parameter_codes_and_accumulation_give_the_same_bits(qwen):
    model = adapted(qwen, experts="all", target_modules=None)

    def step() -> None:
        model(input_ids=IDS).logits.square().sum().backward()

    plain = gradients(model, step)
    assert all(grad.isfinite().all() for grad in plain) and any(grad.any() for grad in plain)
    base_forward = model.get_base_model().model.layers[0].forward
    model.get_base_model().model.layers[0].forward = lambda *a, **k: checkpoint(base_forward, *a, use_reentrant=False, **k)
    assert all(torch.equal(*pair) for pair in zip(plain, gradients(model, step), strict=True))
    model.get_base_model().model.layers[0].forward = base_forward
    twice = gradients(model, lambda: (step(), step()))
    assert all(torch.equal(2 * one, two) for one, two in zip(plain, twice, strict=True))
    expected = logits(model)
    set_code_storage(model, "parameter")
    assert torch.equal(logits(model), expected)
    assert all(torch.equal(*pair) for pair in zip(plain, gradients(model, step), strict=True))


class Live(TorchDispatchMode):
    """Largest number of live float storages of exactly `numel` elements over what runs under it: dense expert weights."""

    def __init__(self, numels: set[int]):
        super().__init__()
        self.numels, self.peak, self.made = numels, 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.numel() in self.numels:
                self.made.append(weakref.ref(tensor))
        alive = [tensor for tensor in (weak() for weak in self.made) if tensor is not None]
        self.peak = max(self.peak, len({tensor.untyped_storage().data_ptr() for tensor in alive}))
        return out


@pytest.mark.parametrize("experts", ["all", [1]], ids=["all", "one"])
def test_dense_expert_weights_alive_in_a_step_do_not_grow_with_the_experts_hit(qwen, experts):
    """Weights of 64 x 64 and 64 x 32: a pass over four experts holds as many as a pass over one; autograd saves none."""
    model = adapted(qwen, experts=experts)
    peaks = []
    for index in ([[1]] * 5, [[0], [1], [2], [3], [1]]):
        saved: list[torch.Tensor] = []
        gc.collect()
        with Live({64 * 64, 64 * 32}) as live, torch.autograd.graph.saved_tensors_hooks(lambda t, s=saved: s.append(t) or t, lambda t: t):
            routed(model, index)
        peaks.append(live.peak)
        assert saved and max(tensor.numel() for tensor in saved) < 64 * 32
    assert peaks[0] == peaks[1] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("experts", ["all", [0, 3]], ids=["all", "some"])
def test_the_merged_checkpoint_is_the_unmerged_model_to_the_bit(base, tmp_path, dtype, experts):
    model = adapted(base, dtype, experts=experts, target_modules=None)
    report = merge_to_folder(model, base, tmp_path / "merged", probe=IDS)
    assert report.max_abs_dw == 0.0 and report.codes_identical and report.rest_identical and report.output_error == 0.0
    assert all(layer.lost_at_merge == 0.0 and layer.max_abs_dw == 0.0 for layer in report.layers.values())
    merged = loaded(tmp_path / "merged", dtype)
    assert torch.equal(logits(merged), logits(model)) and not torch.equal(logits(merged), logits(loaded(base, dtype)))
    _, before, _ = read_quantized(base)
    _, after, _ = read_quantized(tmp_path / "merged")
    trained = set(range(4)) if experts == "all" else set(experts)
    moved = {name for name in before if not torch.equal(before[name].scales, after[name].scales)}
    assert all(torch.equal(before[name].codes, after[name].codes) for name in before)
    assert {int(name.rsplit(".", 2)[1]) for name in moved if ".experts." in name} == trained
    assert report.changed == sum(int((before[name].scales != after[name].scales).sum()) for name in before)
    for name, layer in expert_layers(model).items():
        assert set(report.layers[name].experts) == trained
        assert torch.equal(base_planes(merged)[name].scales, layer.scale_bytes("default"))
    manifest = read_manifest(tmp_path / "merged", KIND)
    assert manifest["code_plane"] == read_manifest(base, KIND)["code_plane"] == code_plane_fingerprint(base_planes(model))
    assert manifest["scale_plane"] == scale_plane_fingerprint(base_planes(merged))


def test_an_expert_without_a_token_keeps_its_bytes_through_training(qwen):
    model = get_peft_model(loaded(qwen), ScaleQLoraConfig(r=2, target_modules=EXPERT_WEIGHTS))
    optimizer = torch.optim.AdamW(trainable_parameters(model).values(), lr=0.3)
    layers = {name: layer for name, layer in expert_layers(model).items() if name.startswith(FIRST)}
    codes = code_plane_fingerprint(base_planes(model))
    for _ in range(3):
        routed(model, INDEX)
        optimizer.step()
        optimizer.zero_grad()
    for layer in layers.values():
        moved = (layer.scale_bytes("default") != layer.base_scales).flatten(1).any(1).tolist()
        assert moved == [True, True, True, False]
    assert code_plane_fingerprint(base_planes(model)) == codes


def save(model: PeftModel, folder: Path, **fields: Any) -> dict[str, Any]:
    model.save_pretrained(folder)
    return write_scale_plane(model, folder, **fields)


def test_an_adapter_of_some_experts_stores_those_alone_and_reads_back_exactly(base, tmp_path):
    sizes = {}
    for label, experts in (("all", None), ("some", [1, 2])):
        model = adapted(base, experts=experts)
        manifest = save(model, tmp_path / label)
        factors, plane = load_file(tmp_path / label / "adapter_model.safetensors"), load_file(tmp_path / label / SCALE_PLANE_NAME)
        chosen = experts or [0, 1, 2, 3]
        for name, layer in expert_layers(model).items():
            assert factors[f"base_model.model.{name}.qast_B"].shape[0] == len(chosen)
            assert (
                plane[f"{name}.experts"].dtype == torch.int32 and plane[f"{name}.experts"].tolist() == chosen == manifest["experts"][name]
            )
            assert torch.equal(plane[name], layer.scale_bytes("default")[chosen])
        read = read_scale_plane(tmp_path / label, base_planes(loaded(base)))
        assert {name: tensor.tolist() for name, tensor in read.items()} == {
            name: layer.scale_bytes("default").tolist() for name, layer in expert_layers(model).items()
        }
        sizes[label] = [sum(tensor.numel() for tensor in tensors.values()) for tensors in (factors, plane)]
        again = PeftModel.from_pretrained(loaded(base), tmp_path / label)
        assert torch.equal(logits(again), logits(model))
        merge_to_folder(again, base, tmp_path / f"{label}-merged")
        assert torch.equal(logits(loaded(tmp_path / f"{label}-merged")), logits(model))
    assert sizes["some"][0] * 2 == sizes["all"][0]
    assert sizes["some"][1] * 2 == sizes["all"][1]  # the numbers of two experts, and of four, included


def test_only_experts_with_a_changed_byte_are_in_the_scale_plane(qwen, tmp_path):
    model = adapted(qwen)
    with torch.no_grad():
        for layer in expert_layers(model).values():
            layer.qast_B["default"][[0, 2]] = 0
        down = expert_layers(model)[f"{FIRST}.down_proj"]
        down.qast_B["default"].zero_()
    manifest = save(model, tmp_path / "adapter")
    plane = load_file(tmp_path / "adapter" / SCALE_PLANE_NAME)
    assert manifest["experts"][f"{FIRST}.gate_up_proj"] == [1, 3] and plane[f"{FIRST}.gate_up_proj"].shape[0] == 2
    assert manifest["experts"][f"{FIRST}.down_proj"] == [] and plane[f"{FIRST}.down_proj"].shape == (0, *down.base_scales.shape[1:])
    read = read_scale_plane(tmp_path / "adapter", base_planes(model))
    assert all(torch.equal(read[name], layer.scale_bytes("default")) for name, layer in expert_layers(model).items())


def test_pruning_drops_untouched_experts_and_changes_no_number(qwen, tmp_path):
    model = adapted(qwen)
    with torch.no_grad():
        expert_layers(model)[f"{FIRST}.gate_up_proj"].qast_B["default"][[0, 2]] = 0
        expert_layers(model)[f"{FIRST}.down_proj"].qast_B["default"].zero_()
    expected = logits(model)
    kept = prune_experts(model)
    assert kept[f"{FIRST}.gate_up_proj"] == [1, 3] and kept[f"{FIRST}.down_proj"] == []
    assert kept["model.layers.1.mlp.experts.down_proj"] == [0, 1, 2, 3]
    assert torch.equal(logits(model), expected) and torch.equal(model(input_ids=IDS).logits.detach(), expected)
    save(model, tmp_path / "adapter")
    assert load_file(tmp_path / "adapter" / "adapter_model.safetensors")[f"base_model.model.{FIRST}.gate_up_proj.qast_A"].shape[0] == 2
    again = PeftModel.from_pretrained(loaded(qwen), tmp_path / "adapter")
    assert torch.equal(logits(again), expected)
    merge_to_folder(again, qwen, tmp_path / "merged")
    assert torch.equal(logits(loaded(tmp_path / "merged")), expected)


def damage_numbers(tensors: dict[str, torch.Tensor], values: Any) -> None:
    tensors[f"{FIRST}.gate_up_proj.experts"] = torch.tensor(values, dtype=torch.int32)


FAULTS = {
    "twice": (lambda t: damage_numbers(t, [1, 1]), "no ascending list of experts below 4"),
    "descending": (lambda t: damage_numbers(t, [2, 1]), "no ascending list"),
    "negative": (lambda t: damage_numbers(t, [-1, 1]), "no ascending list"),
    "beyond": (lambda t: damage_numbers(t, [1, 4]), "no ascending list"),
    "fewer": (lambda t: damage_numbers(t, [1]), r"the base needs bytes \[1, 64, 4\]"),
    "no numbers": (lambda t: t.pop(f"{FIRST}.gate_up_proj.experts"), r"the base needs bytes \[4, 64, 4\]"),
    "another layer": (lambda t: t.update({"model.layers.9.x": torch.zeros(1, dtype=torch.uint8)}), "no quantized weight of the base"),
    "floats": (lambda t: t.update({f"{FIRST}.gate_up_proj": torch.zeros(2, 64, 4)}), "float32"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_scale_plane_that_does_not_fit_is_refused_in_one_line(qwen, tmp_path, fault):
    model = adapted(qwen, experts=[1, 2])
    save(model, tmp_path / "adapter")
    change, text = FAULTS[fault]
    tensors = load_file(tmp_path / "adapter" / SCALE_PLANE_NAME)
    change(tensors)
    save_file(tensors, tmp_path / "adapter" / SCALE_PLANE_NAME)
    with pytest.raises(CheckpointError, match=text) as raised:
        read_scale_plane(tmp_path / "adapter", base_planes(model))
    assert "\n" not in str(raised.value)


def test_factors_of_other_experts_get_no_scale_plane(qwen, tmp_path):
    adapted(qwen, experts=[1, 2]).save_pretrained(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"factors of '.*gate_up_proj' have shapes \[2, 1, 4\] and \[2, 64, 1\], unlike the model's"):
        write_scale_plane(adapted(qwen, experts=[1]), tmp_path / "adapter")


def test_merging_unmerging_and_unloading_in_place_are_byte_exact(base):
    model = adapted(base, experts=[0, 2])
    expected, plain = logits(model), logits(loaded(base))
    before = {name: tensor.scales.clone() for name, tensor in base_planes(model).items()}
    model.merge_adapter()
    assert torch.equal(logits(model), expected)
    assert torch.equal(model(input_ids=IDS).logits.detach(), expected)
    assert all(torch.equal(tensor.scales, before[name]) for name, tensor in base_planes(model).items())
    model.unmerge_adapter()
    assert torch.equal(logits(model), expected)
    with model.disable_adapter():
        assert torch.equal(logits(model), plain)
    twin = copy.deepcopy(model)
    experts = model.get_base_model().get_submodule(FIRST)
    assert experts._forward_pre_hooks and experts._forward_hooks
    merged = model.merge_and_unload()
    assert isinstance(experts.gate_up_proj, FP4Experts) and not experts._forward_pre_hooks and not experts._forward_hooks
    assert torch.equal(logits(merged), expected)
    # A copy has hooks of its own, which ask its own layers.
    for parameter in trainable_parameters(twin).values():
        parameter.grad = None
    routed(twin, INDEX)
    layer = expert_layers(twin)[f"{FIRST}.down_proj"]
    assert layer.qast_A["default"].grad.any() and layer._rows is None
    assert torch.equal(logits(twin), expected)
    assert torch.equal(logits(twin.unload()), plain)


def test_adapters_of_different_experts_switch_and_delete(qwen):
    model = adapted(qwen, experts=[0, 1])
    first = logits(model)
    model.add_adapter("second", ScaleQLoraConfig(r=2, alpha=2.0, target_modules=EXPERT_WEIGHTS, experts=[3]))
    train(model, "second", seed=4)
    assert torch.equal(logits(model), first)
    model.set_adapter("second")
    second = logits(model)
    assert not torch.equal(first, second)
    assert torch.equal(model(input_ids=IDS).logits.detach(), second)
    model.delete_adapter("default")
    model.set_adapter("second")
    assert torch.equal(logits(model), second)
    assert all(layer.experts == {"second": [3]} for layer in expert_layers(model, "second").values())


def test_another_base_of_the_same_family_is_refused(base, qwen, tmp_path):
    model = adapted(base)
    other = tmp_path / "other"
    tensors = load_file(base / "model.safetensors")
    key = next(name for name in tensors if ".experts.2." in name and name.endswith("weight_packed"))
    tensors[key][0, 0] ^= 1
    other.mkdir()
    (other / "config.json").write_bytes((base / "config.json").read_bytes())
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(FingerprintMismatch, match=r"experts\.\w+: codes of the model and of the checkpoint differ"):
        merge_to_folder(model, other, tmp_path / "merged")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"experts": [4]}, "expert 4 of 4; experts are 0 to 3"),
        ({"experts": {f"{FIRST}.down_proj": [0]}}, "does not name this weight"),
        ({"r": 5}, "rank 5 exceeds the"),
    ],
)
def test_an_adapter_that_does_not_fit_changes_nothing(qwen, options, text):
    model = loaded(qwen)
    with pytest.raises(ConfigError, match=text) as raised:
        get_peft_model(model, ScaleQLoraConfig(**({"r": 1, "target_modules": EXPERT_WEIGHTS} | options)))
    assert "\n" not in str(raised.value)
    assert not any(isinstance(module, ScaleQLoraExperts) for module in model.modules())


@pytest.mark.parametrize("experts", [[1, 0], [0, 0], [-1], [True], ["1"], [0.5], [], {}, "some", 3, {"x": None}, {"x": "all"}])
def test_experts_that_are_no_ascending_numbers_are_one_line(experts):
    with pytest.raises(ConfigError, match="experts: ") as raised:
        ScaleQLoraConfig(experts=experts)
    assert "\n" not in str(raised.value)


def test_experts_without_an_expert_weight_among_the_targets_are_refused(qwen):
    with pytest.raises(ModelError, match="experts: no target is an expert weight"):
        get_peft_model(loaded(qwen), ScaleQLoraConfig(r=1, target_modules=["q_proj"], experts=[0]))


def test_experts_held_transposed_or_in_full_precision_are_refused_by_name():
    sizes = {"vocab_size": TINY_VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = GptOssForCausalLM(GptOssConfig(**sizes, num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2))
    with pytest.raises(ModelError, match=r"experts\.gate_up_proj: target is a .* tensor of 4 experts, not FP4 planes; .*gpt-oss"):
        get_peft_model(model, ScaleQLoraConfig(r=1, target_modules=EXPERT_WEIGHTS))
    with pytest.raises(ModelError, match=r"experts\.gate_up_proj: target is a torch.float32 tensor of 4 experts"):
        get_peft_model(tiny_qwen3_moe(), ScaleQLoraConfig(r=1, target_modules=EXPERT_WEIGHTS))


def test_a_family_that_transposes_is_refused_where_planes_were_put_in_its_place(qwen):
    model = loaded(qwen)
    model.get_submodule(FIRST).is_transposed = True
    with pytest.raises(ModelError, match=rf"{FIRST}\.gate_up_proj: its family holds experts transposed"):
        get_peft_model(model, ScaleQLoraConfig(r=1, target_modules=EXPERT_WEIGHTS))


def test_a_forward_that_does_something_else_with_a_weight_is_refused_by_name(qwen):
    layer = expert_layers(adapted(qwen))[f"{FIRST}.down_proj"]
    with pytest.raises(ModelError, match=rf"{FIRST}\.down_proj: the experts forward calls matmul on a weight under training"):
        torch.matmul(torch.ones(2, 64), layer[0])
    bias = torch.randn(64)
    x = torch.randn(3, 32)
    with torch.no_grad():
        expected = nn.functional.linear(x, layer[0]) + bias
    assert torch.equal(nn.functional.linear(x, layer[0], bias), expected)
