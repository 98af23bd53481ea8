"""prism_ray.formats.modules: planes in modules survive casts, moves and both storages; forward is the dense product with the dequantized weight."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from prism_ray.core.errors import FormatError
from prism_ray.formats.modules import FP4Experts, FP4Linear, QuantizedModule, planes, quantized_modules, set_code_storage
from prism_ray.formats.spec import FORMATS
from prism_ray.formats.tensor import QuantTensor
from prism_ray.quantizers.rtn import rtn

both = pytest.mark.parametrize("name", list(FORMATS))
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def weight(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.1


def modules(name: str) -> nn.ModuleDict:
    linear, _ = rtn(weight(48, 128), FORMATS[name])
    experts, _ = rtn(weight(3, 32, 128, seed=1) * torch.tensor([1.0, 10.0, 0.1])[:, None, None], FORMATS[name])
    return nn.ModuleDict({"linear": FP4Linear(linear, weight(48, seed=2)), "experts": FP4Experts(experts, torch.float32)})


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    # Bytes, not values: codes viewed as bfloat16 hold NaN patterns.
    def raw(value: torch.Tensor) -> torch.Tensor:
        return value.reshape(-1).contiguous().view(torch.uint8)

    return a.keys() == b.keys() and all(a[key].dtype == b[key].dtype and torch.equal(raw(a[key]), raw(b[key])) for key in a)


@both
@dtypes
def test_a_linear_is_the_dense_product_with_the_dequantized_weight(name, dtype):
    module = modules(name)["linear"]
    x = weight(2, 5, 128, seed=3).to(dtype)
    expected = nn.functional.linear(x, module.quant_tensor().dequantize(dtype)) + module.bias.to(dtype)
    assert torch.equal(module(x), expected) and module(x).dtype == dtype
    module.bias = None
    assert torch.equal(module(x), nn.functional.linear(x, module.quant_tensor().dequantize(dtype)))


@both
@dtypes
def test_an_expert_by_index_is_its_slice(name, dtype):
    tensor, _ = rtn(weight(3, 32, 128), FORMATS[name])
    module = FP4Experts(tensor, dtype)
    for expert in range(3):
        assert torch.equal(module[expert], tensor.dequantize(dtype)[expert])
        assert torch.equal(module[torch.tensor(expert)], module[expert])


@both
def test_other_scales_can_be_dequantized_without_touching_the_planes(name):
    module = modules(name)["linear"]
    spec = FORMATS[name]
    other = spec.grid.decode(module.scales.flip(0))
    expected = module.quant_tensor().with_scales(module.scales.flip(0)).dequantize()
    before = state(module)
    assert torch.equal(module.dequantize(torch.float32, other), expected)
    assert same(state(module), before)


@both
@pytest.mark.parametrize("storage", ["buffer", "parameter"])
@pytest.mark.parametrize(
    "cast",
    [
        lambda module: module.to(torch.bfloat16),
        lambda module: module.to(torch.float16),
        lambda module: module.bfloat16().float(),
        lambda module: module.double(),
        lambda module: module.to("cpu", torch.bfloat16),
    ],
    ids=["bfloat16", "float16", "there-and-back", "double", "device-and-dtype"],
)
def test_casting_a_model_changes_no_plane(name, storage, cast):
    """DeepSpeed and many training loops cast whole models; tensor scales and code bytes behind a float dtype must not follow."""
    tree = modules(name)
    tree["linear"].bias = None
    set_code_storage(tree, storage)
    before, whole = state(tree), {key: tensor.dequantize() for key, tensor in planes(tree).items()}
    cast(tree)
    assert same(state(tree), before)
    assert all(torch.equal(tensor.dequantize(), whole[key]) for key, tensor in planes(tree).items())
    assert torch.equal(tree["experts"][1], whole["experts"][1])


@both
def test_a_cast_still_reaches_the_bias(name):
    tree = modules(name).to(torch.bfloat16)
    assert tree["linear"].bias.dtype == torch.bfloat16 and tree["linear"].tensor_scale.dtype == torch.float32


@both
def test_moving_to_the_meta_device_moves_every_plane(name):
    tree = modules(name).to("meta")
    assert all(value.is_meta for value in tree.state_dict().values())


@both
def test_code_storage_keeps_bytes_and_outputs(name):
    tree = modules(name)
    x = weight(5, 128, seed=3)
    before, y, slices = state(tree), tree["linear"](x), tree["experts"][2]
    set_code_storage(tree, "parameter")
    stored = dict(tree.named_parameters())
    assert stored["linear.codes"].shape == (48, 32) and stored["experts.codes"].shape == (3, 32, 32)
    assert not any(stored[key].requires_grad or stored[key].dtype != torch.bfloat16 for key in ("linear.codes", "experts.codes"))
    assert torch.equal(tree["linear"](x), y) and torch.equal(tree["experts"][2], slices)
    clone = copy.deepcopy(tree)
    with torch.no_grad():
        clone["linear"].codes.zero_()
    assert not torch.equal(clone["linear"](x), y)
    clone.load_state_dict(tree.state_dict())
    assert torch.equal(clone["linear"](x), y)
    for _ in range(2):
        set_code_storage(tree, "parameter")  # twice is once
    set_code_storage(tree, "buffer")
    assert same(state(tree), before) and "linear.codes" not in dict(tree.named_parameters())
    set_code_storage(tree, "buffer")
    assert same(state(tree), before)


def test_every_code_byte_pair_survives_as_a_parameter():
    """65,536 bfloat16 patterns: infinities, NaNs with any payload, subnormals."""
    pairs = torch.arange(1 << 16, dtype=torch.int32)
    codes = torch.stack([pairs & 255, pairs >> 8], dim=-1).to(torch.uint8).reshape(256, 512)
    tensor = QuantTensor(
        codes=codes, scales=torch.full((256, 64), 0x38, dtype=torch.uint8), tensor_scale=torch.tensor(1.0), format=FORMATS["nvfp4"]
    )
    module = FP4Linear(tensor)
    module.set_code_storage("parameter")
    clone = copy.deepcopy(module)
    clone.load_state_dict({key: value.clone() for key, value in module.state_dict().items()})
    assert torch.equal(clone.code_bytes, codes) and torch.equal(clone.dequantize(torch.float32), tensor.dequantize())


def test_a_row_of_an_odd_number_of_code_bytes_cannot_be_a_parameter():
    # No registered format has such a row, as blocks are 16 or 32 columns; the check guards the next one.
    module = modules("nvfp4")["linear"]
    module.codes = module.codes[:, :63]
    with pytest.raises(FormatError, match="63 code bytes a row cannot be viewed as bfloat16"):
        module.set_code_storage("parameter")


@both
def test_planes_names_modules_by_path_and_views_their_storage(name):
    tree = nn.ModuleDict({"body": modules(name), "dense": nn.Linear(4, 4)})
    found = planes(tree)
    assert set(found) == {"body.linear", "body.experts"} == {path for path, _ in quantized_modules(tree)}
    assert found["body.linear"].codes.data_ptr() == tree["body"]["linear"].codes.data_ptr()
    assert all(isinstance(module, QuantizedModule) for _, module in quantized_modules(tree))


@both
def test_no_gradient_reaches_planes_and_the_input_gradient_is_the_dense_one(name):
    module = modules(name)["linear"]
    x = weight(5, 128, seed=3).requires_grad_()
    module(x).square().sum().backward()
    dense = x.detach().clone().requires_grad_()
    (nn.functional.linear(dense, module.quant_tensor().dequantize()) + module.bias).square().sum().backward()
    assert torch.equal(x.grad, dense.grad)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_the_representation_says_what_it_is():
    tree = modules("mxfp4")
    assert repr(tree["linear"]) == "FP4Linear(in_features=128, out_features=48, format=mxfp4, bias=True)"
    assert repr(tree["experts"]) == "FP4Experts(shape=[3, 32, 128], format=mxfp4)"
