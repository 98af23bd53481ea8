"""Forward and custom backward of ScaleQLoraLinear and FP4Linear against float64 autograd with a straight-through rounding, and what they keep.

Tolerances are a running error bound, computed beside the value from absolute values (Higham, "Accuracy and Stability", 3.1): a chain of n
roundings of unit u is off by at most about n u sum |terms|. float32 (u = 2^-24): n = the lengths of all sums of the chain, plus 8 for the
single operations. bfloat16 (u = 2^-8): sums are accumulated in float32 and only stored in bfloat16, so n counts the stored intermediates.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from prism_ray.adapters.scale_qlora import ScaleQLoraConfig, ScaleQLoraLinear
from prism_ray.formats import e2m1
from prism_ray.formats.modules import FP4Linear, set_code_storage
from prism_ray.formats.spec import FORMATS, FP4_FORMATS
from prism_ray.quantizers.rtn import rtn

OUT, IN, RANK, TOKENS = 24, 64, 2, 6
both = pytest.mark.parametrize("name", FP4_FORMATS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def linear(name: str, rows: int = OUT, columns: int = IN, seed: int = 0, bias: bool = True) -> FP4Linear:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 0.2
    weight[0, :32] = 0  # zero scales on E4M3, which no correction may revive
    return FP4Linear(rtn(weight, FORMATS[name])[0], torch.randn(rows, generator=generator) if bias else None)


def tuned(name: str, seed: int = 0, **shape) -> ScaleQLoraLinear:
    layer = ScaleQLoraLinear(linear(name, seed=seed, **shape), "default", ScaleQLoraConfig(r=RANK, alpha=3.0))
    with torch.no_grad():
        # Large enough that some E4M3 scales meet the ceiling or the floor.
        generator = torch.Generator().manual_seed(seed + 1)
        layer.qast_A["default"].copy_(torch.randn(layer.qast_A["default"].shape, generator=generator))
        layer.qast_B["default"].copy_(torch.randn(layer.qast_B["default"].shape, generator=generator) * 0.4)
    return layer


def inputs(dtype: torch.dtype, *leading: int, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*leading, IN, generator=generator).to(dtype).requires_grad_()
    return x, torch.randn(*leading, OUT, generator=generator).to(dtype)


def reference(layer: ScaleQLoraLinear, x: torch.Tensor, grad_y: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """name -> (float64 value, sum of the absolute values of its terms) of y and the gradients, by autograd through x + (round(x) - x).detach()."""
    base, spec = layer.base_layer, layer.base_layer.format
    grid = spec.grid
    x64 = x.detach().to(torch.float64).requires_grad_()
    a = layer.qast_A["default"].detach().to(torch.float64).requires_grad_()
    b = layer.qast_B["default"].detach().to(torch.float64).requires_grad_()
    s0 = grid.decode(base.scales).to(torch.float64)
    real = (s0 * (1 + 1.5 * (b @ a))).clamp(grid.smallest, grid.largest)
    legal = torch.arange(256, dtype=torch.uint8)
    values = grid.decode(legal[~grid.illegal(legal)]).to(torch.float64)
    measure: Callable = (lambda v: v) if spec.name == "nvfp4" else torch.log2
    rounded = values[(measure(real.detach())[..., None] - measure(values)).abs().argmin(-1)]
    scale = torch.where(s0 == 0, 0.0, real + (rounded - real).detach())
    codes = e2m1.decode(e2m1.unpack(base.code_bytes)).to(torch.float64)
    weight = codes * scale.repeat_interleave(spec.block, -1) * base.tensor_scale.to(torch.float64)
    bias = base.bias.to(torch.float64)
    y = x64 @ weight.T + bias
    y.backward(grad_y.to(torch.float64))

    w, xs, gs = weight.detach().abs(), x64.detach().abs().reshape(-1, IN), grad_y.to(torch.float64).abs().reshape(-1, OUT)
    outer = (gs.T @ xs * codes.abs()).reshape(OUT, -1, spec.block).sum(-1)
    inner = outer * base.tensor_scale.to(torch.float64) * s0 * 1.5
    return {
        "y": (y.detach(), xs.reshape(x.shape) @ w.T + bias.abs()),
        "x": (x64.grad, (gs @ w).reshape(x.shape)),
        "a": (a.grad, b.detach().abs().T @ inner),
        "b": (b.grad, inner @ a.detach().abs().T),
    }


def roundings(quantity: str, spec, dtype: torch.dtype) -> float:
    """Bound on the number of roundings, in units of float32's u for float32 and of bfloat16's u for bfloat16."""
    lengths = {"y": IN, "x": OUT, "a": TOKENS + spec.block + OUT, "b": TOKENS + spec.block + IN // spec.block}[quantity]
    if dtype == torch.float32:
        return lengths + 8
    # y, x: weight, product, bias. a, b: dy' x, each product with a code, the sum over a block. Plus one for all float32 sums together.
    return 4


@both
@dtypes
@pytest.mark.parametrize("leading", [(TOKENS,), (2, 3)], ids=["2d", "3d"])
def test_scale_qlora_equals_float64_autograd(name, dtype, leading):
    layer = tuned(name)
    spec = FORMATS[name]
    x, grad_y = inputs(dtype, *leading)
    y = layer(x)
    y.backward(grad_y)
    found = {"y": y.detach(), "x": x.grad, "a": layer.qast_A["default"].grad, "b": layer.qast_B["default"].grad}
    unit = 2.0**-24 if dtype == torch.float32 else 2.0**-8
    assert found["y"].dtype == found["x"].dtype == dtype and found["a"].dtype == found["b"].dtype == torch.float32
    for quantity, (value, terms) in reference(layer, x, grad_y).items():
        assert found[quantity].shape == value.shape and value.abs().max() > 0
        bound = roundings(quantity, spec, dtype) * unit * terms
        worst = ((found[quantity].to(torch.float64) - value).abs() - bound).max()
        assert worst <= 0, (quantity, worst)


def test_the_cases_above_do_clamp_and_do_hold_zero_scales():
    layer = tuned("nvfp4")
    base, scale = layer.base_layer.scales, layer.scale_bytes("default")
    assert (base == 0).sum() == 2 and (scale[base == 0] == 0).all()
    assert (scale == 0x7E).any() and (scale[base != 0] == 1).any() and (scale != base).float().mean() > 0.5


@both
@dtypes
def test_fp4_linear_equals_float64_autograd(name, dtype):
    module = linear(name)
    x, grad_y = inputs(dtype, 2, 3)
    y = module(x)
    y.backward(grad_y)
    weight = module.quant_tensor().dequantize().to(torch.float64)  # one float32 rounding off the real weight
    y64 = x.detach().to(torch.float64) @ weight.T + module.bias.to(torch.float64)
    x64 = grad_y.to(torch.float64) @ weight
    unit, count = (2.0**-24, IN + 8) if dtype == torch.float32 else (2.0**-8, 4)
    terms = x.detach().to(torch.float64).abs() @ weight.abs().T + module.bias.abs().to(torch.float64)
    assert ((y.detach().to(torch.float64) - y64).abs() <= count * unit * terms).all()
    assert ((x.grad.to(torch.float64) - x64).abs() <= count * unit * (grad_y.to(torch.float64).abs() @ weight.abs())).all()
    assert module.bias.grad is None


@both
@dtypes
def test_forward_is_the_dense_product_with_the_merged_weight_bit_for_bit(name, dtype):
    layer = tuned(name)
    x, _ = inputs(dtype, 2, 3)
    merged = layer.base_layer.quant_tensor().with_scales(layer.scale_bytes("default"))
    expected = nn.functional.linear(x, merged.dequantize(dtype)) + layer.base_layer.bias.to(dtype)
    assert torch.equal(layer(x), expected)


@both
def test_only_the_wanted_gradients_are_computed(name):
    layer = tuned(name)
    x, grad_y = inputs(torch.float32, 4)
    layer(x.detach()).backward(grad_y)
    grads = layer.qast_A["default"].grad.clone(), layer.qast_B["default"].grad.clone()
    layer.zero_grad()
    layer.qast_A["default"].requires_grad_(False)
    layer(x).backward(grad_y)
    assert layer.qast_A["default"].grad is None and torch.equal(layer.qast_B["default"].grad, grads[1])
    layer.zero_grad()
    layer.requires_grad_(False)
    alone = x.detach().clone().requires_grad_()
    layer(alone).backward(grad_y)
    assert torch.equal(alone.grad, x.grad) and layer.qast_B["default"].grad is None


@both
@dtypes
def test_gradients_are_the_same_bits_through_gradient_checkpointing_and_parameter_codes(name, dtype):
    def run(wrap: bool, storage: str) -> list[torch.Tensor]:
        stack = nn.Sequential(tuned(name, rows=IN), nn.SiLU(), tuned(name, seed=3))
        set_code_storage(stack, storage)
        x, grad_y = inputs(dtype, 2, 3)
        y = checkpoint(stack, x, use_reentrant=False) if wrap else stack(x)
        y.backward(grad_y)
        return [y.detach(), x.grad, *(parameter.grad for parameter in stack.parameters() if parameter.requires_grad)]

    plain = run(False, "buffer")
    assert len(plain) == 6
    for other in (run(True, "buffer"), run(False, "parameter"), run(True, "parameter")):
        assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


@both
def test_gradients_are_deterministic_over_threads_of_float64_scales(name):
    runs = []
    for _ in range(2):
        layer = tuned(name)
        x, grad_y = inputs(torch.float32, 2, 3)
        layer(x).backward(grad_y)
        runs.append((x.grad, layer.qast_A["default"].grad, layer.qast_B["default"].grad))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@both
def test_descent_recovers_a_teachers_scales(name):
    """The straight-through gradient points the right way: an untrained adapter approaches one that made the targets."""
    teacher = tuned(name)
    student = ScaleQLoraLinear(linear(name), "default", ScaleQLoraConfig(r=RANK, alpha=3.0))
    x = torch.randn(256, IN, generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        target = teacher(x)
        start = (student(x) - target).square().mean().item()
    optimizer = torch.optim.Adam([student.qast_A["default"], student.qast_B["default"]], lr=0.03)
    torch.manual_seed(0)
    best = start
    for _ in range(150):
        loss = (student(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        best = min(best, loss.item())
    assert best < 0.5 * start


def stack_of(name: str, depth: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for index in range(depth):
        layers += [ScaleQLoraLinear(linear(name, 128, 128, index, bias=False), "default", ScaleQLoraConfig(r=RANK)), nn.SiLU()]
    return nn.Sequential(*layers)


@both
@dtypes
def test_the_graph_of_a_stack_holds_no_tensor_of_weight_size(name, dtype):
    """4 layers of 128 x 128 and 3 tokens: what autograd saves, and what the graph's nodes hold besides."""
    stack, saved = stack_of(name, 4), []
    x = torch.randn(3, 128).to(dtype).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = stack(x)
    assert saved and max(tensor.numel() for tensor in saved) < 128 * 128 / 8
    unique = {(tensor.data_ptr(), tensor.numel()): tensor.numel() * tensor.element_size() for tensor in saved}
    # Per layer: its input, the SiLU's input, A and B, and a byte and a mask per block.
    groups = 128 // FORMATS[name].block
    per_layer = 2 * 3 * 128 * x.element_size() + RANK * (groups + 128) * 4 + 2 * 128 * groups
    assert sum(unique.values()) <= 4 * per_layer
    nodes, seen = [y.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        held = [value for value in vars(node).values() if isinstance(value, torch.Tensor)] if hasattr(node, "__dict__") else []
        assert all(value.numel() < 128 * 128 / 8 for value in held), node
        nodes += [parent for parent, _ in node.next_functions]
    assert len(seen) >= 8


class LiveWeights(TorchDispatchMode):
    """The largest number of distinct live storages of at least `numel` elements, over all operations run under it."""

    def __init__(self, numel: int):
        super().__init__()
        self.numel, self.peak, self.made = numel, 0, []  # weak references; a WeakSet would compare tensors

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.numel() >= self.numel:
                self.made.append(weakref.ref(tensor))
        alive = [tensor for tensor in (weak() for weak in self.made) if tensor is not None]
        self.peak = max(self.peak, len({tensor.untyped_storage().data_ptr() for tensor in alive}))
        return out


@both
@dtypes
def test_weights_alive_in_a_step_do_not_grow_with_depth(name, dtype):
    peaks = []
    for depth in (1, 5):
        stack = stack_of(name, depth)
        x = torch.randn(3, 128).to(dtype).requires_grad_()
        gc.collect()
        with LiveWeights(128 * 128) as live:
            stack(x).sum().backward()
        peaks.append(live.peak)
        assert all(parameter.grad is not None for parameter in stack.parameters() if parameter.requires_grad)
    assert peaks[0] == peaks[1] > 0
