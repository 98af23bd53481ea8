"""The matrix kernels: their interpreter runs (in a process of its own), the CPU path that users run, what torch's tools see, and what is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import prism_kernels
import pytest
import torch
from prism_kernels import cpu
from prism_kernels.cpu import DequantCache, linear_cpu, multi_plane_linear_cpu
from prism_kernels.formats import decode_codes, decode_scales, decode_weight
from prism_kernels.grouped import grouped_fp4_matmul, grouped_fp4_matmul_ref
from prism_kernels.matmul import DECODE_TILES, Tile, fp4_matmul, fp4_matmul_ref
from prism_kernels.multi_plane import multi_plane_matmul
from prism_kernels.swap import swap_planes
from torch.nn.functional import linear

from prism_ray.formats import e2m1
from prism_ray.formats.spec import FORMATS
from prism_ray.formats.tensor import QuantTensor

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("nvfp4", "mxfp4")


def quantized(name: str, rows: int, columns: int, seed: int = 0, factor: float = 0.37) -> QuantTensor:
    generator = torch.Generator().manual_seed(seed)
    low, high = (1, 100) if name == "nvfp4" else (110, 135)
    return QuantTensor(
        codes=torch.randint(0, 256, (rows, columns // 2), generator=generator).to(torch.uint8),
        scales=torch.randint(low, high, (rows, columns // FORMATS[name].block), generator=generator).to(torch.uint8),
        tensor_scale=torch.tensor(factor if name == "nvfp4" else 1.0),
        format=FORMATS[name],
    )


def tokens(count: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_kernels_under_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/interpreted_matmul.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found and int(found[1]) > 50, done.stdout[-500:]
    assert "skipped" not in done.stdout


def test_the_package_needs_neither_triton_nor_prism_ray():
    script = """
import sys
for absent in ("triton", "prism_ray", "ray", "vllm"):
    sys.modules[absent] = None
import torch, prism_kernels
assert set(dir(prism_kernels)) >= {"fp4_matmul", "multi_plane_matmul", "grouped_fp4_matmul", "swap_planes"}
codes, scales = torch.full((4, 8), 0x22, dtype=torch.uint8), torch.full((4, 1), 0x38, dtype=torch.uint8)
y = prism_kernels.fp4_matmul(torch.ones(2, 16), codes, scales, 0.5)
assert (y == 8).all(), y
from prism_kernels import grouped, layouts, multi_plane, swap
from prism_kernels.matmul import fp4_matmul_kernel
try:
    fp4_matmul_kernel[(1,)](1)
except ImportError as error:
    assert "pip install" in str(error)
else:
    raise AssertionError
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "kernels")}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_decoding_is_that_of_the_formats():
    packed = torch.arange(256).to(torch.uint8)
    assert torch.equal(decode_codes(packed), e2m1.decode(e2m1.unpack(packed)))
    for name, legal in (("nvfp4", 127), ("mxfp4", 255)):
        data = torch.arange(256).to(torch.uint8)
        assert torch.equal(decode_scales(data, name)[:legal], FORMATS[name].grid.decode(data)[:legal])
        assert decode_scales(data, name).isnan().tolist() == FORMATS[name].grid.illegal(data).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_cpu_weight_is_the_dequantized_tensor(name, dtype, monkeypatch):
    monkeypatch.setattr(cpu, "CHUNK_BYTES", 5 * 96 * 4)  # several chunks, the last one short
    weight = quantized(name, 37, 96)
    got = linear_cpu(torch.eye(96, dtype=dtype), weight.codes, weight.scales, weight.tensor_scale, name)
    assert torch.equal(got, weight.dequantize(dtype).T)
    assert torch.equal(cpu.decode_linear(weight.codes, weight.scales, float(weight.tensor_scale), name, dtype), weight.dequantize(dtype))


@pytest.mark.parametrize("name", NAMES)
def test_cpu_linear_is_flinear_on_the_dequantized_weight(name):
    weight, bias = quantized(name, 40, 96), torch.randn(40)
    for dtype in (torch.float32, torch.bfloat16):
        x = tokens(5, 96, dtype)
        expected = linear(x, weight.dequantize(dtype), bias.to(dtype))
        assert torch.equal(linear_cpu(x, weight.codes, weight.scales, weight.tensor_scale, name, bias), expected)


def test_cpu_float16_rounds_the_weight_once():
    weight = quantized("nvfp4", 8, 32)
    got = linear_cpu(torch.eye(32, dtype=torch.float16), weight.codes, weight.scales, weight.tensor_scale, "nvfp4")
    assert torch.equal(got, weight.dequantize().to(torch.float16).T)


@pytest.mark.parametrize("budget", [0, 1 << 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_planes_have_the_bits_of_their_group_alone(dtype, budget, monkeypatch):
    monkeypatch.setattr(cpu, "CHUNK_BYTES", 16 * 96 * 4)
    weight, x = quantized("nvfp4", 40, 96), tokens(9, 96, dtype)
    planes = [weight.scales, *(quantized("nvfp4", 40, 96, seed).scales for seed in (5, 6, 7))]
    index = torch.tensor([2, -1, 0, 3, 2, 2, 0, -1, 3], dtype=torch.int32)
    cache = DequantCache(budget) if budget else None
    bias = torch.randn(40)
    y = multi_plane_linear_cpu(x, weight.codes, torch.stack(planes), index, 0.37, "nvfp4", bias, cache=cache)
    for m in (0, 2, 3):
        mine = index.clamp(min=0) == m
        assert torch.equal(
            y[mine], linear_cpu(x[mine], weight.codes, planes[m], 0.37, "nvfp4", bias, cache=DequantCache(budget) if budget else None)
        )
    # Another tenant's tokens leave a token's bits as they are.
    other = x.clone()
    other[index == 3] = 1e3
    again = multi_plane_linear_cpu(other, weight.codes, planes, index, 0.37, "nvfp4", bias, cache=DequantCache(budget) if budget else None)
    assert torch.equal(again[index == 2], y[index == 2])
    assert not torch.equal(again[index == 3], y[index == 3])
    assert multi_plane_linear_cpu(x[:0], weight.codes, planes, index[:0]).shape == (0, 40)


def test_cache_counts_evicts_and_sees_a_swap():
    weight, x = quantized("nvfp4", 32, 64), tokens(3, 64)
    planes = [quantized("nvfp4", 32, 64, seed).scales for seed in range(3)]
    cache = DequantCache(2 * 32 * 64 * 4)
    run = lambda m: linear_cpu(x, weight.codes, planes[m], 0.5, cache=cache)  # noqa: E731
    first = run(0)
    assert torch.equal(run(0), first)
    assert (cache.hits, cache.misses, cache.evictions, len(cache)) == (1, 1, 0, 1)
    run(1), run(0), run(2)
    assert (cache.hits, cache.misses, cache.evictions, len(cache)) == (2, 3, 1, 2)
    assert cache.used_bytes == cache.budget_bytes
    run(0)
    assert cache.hits == 3, "the least recently used plane, 1, was the one that went"
    byte = int(planes[0][0, 0]) + 8
    swap_planes(planes[0], torch.tensor([0]), torch.tensor([byte], dtype=torch.uint8))
    changed = run(0)
    assert not torch.equal(changed, first)
    assert torch.equal(changed, linear_cpu(x, weight.codes, planes[0], 0.5))
    assert cache.drop(weight.codes) == 2
    assert (len(cache), cache.used_bytes) == (0, 0)


def test_cache_refuses_what_it_cannot_hold_or_watch():
    weight, x = quantized("nvfp4", 32, 64), tokens(3, 64)
    small = DequantCache(100)
    assert torch.equal(linear_cpu(x, weight.codes, weight.scales, cache=small), linear_cpu(x, weight.codes, weight.scales))
    assert (small.refused, len(small)) == (1, 0)
    with torch.inference_mode():
        codes, scales = weight.codes.clone(), weight.scales.clone()
        cache = DequantCache(1 << 20)
        linear_cpu(x, codes, scales, cache=cache)
        assert (cache.refused, len(cache)) == (1, 0), "an inference tensor's changes cannot be seen"
        one = linear_cpu(x, codes, scales, cache=cache, key="adapter v1")
        scales += 1
        assert torch.equal(linear_cpu(x, codes, scales, cache=cache, key="adapter v1"), one)
        assert not torch.equal(linear_cpu(x, codes, scales, cache=cache, key="adapter v2"), one)
    with pytest.raises(ValueError, match="budget_bytes"):
        DequantCache(-1)


def test_cache_distinguishes_dtype_and_tensor_scale():
    weight, cache = quantized("nvfp4", 32, 64), DequantCache(1 << 20)
    for dtype in (torch.float32, torch.bfloat16):
        for factor in (0.5, 0.25):
            y = linear_cpu(torch.eye(64, dtype=dtype), weight.codes, weight.scales, factor, cache=cache)
            assert torch.equal(y, (decode_weight(weight.codes, weight.scales, "nvfp4") * factor).to(dtype).T)
    assert cache.misses == 4


@pytest.mark.parametrize("planes_", [False, True])
def test_grouped_on_a_cpu(planes_):
    weights = [quantized("mxfp4", 24, 64, seed) for seed in range(3)]
    codes, scales = torch.stack([w.codes for w in weights]), torch.stack([w.scales for w in weights])
    offsets, x = torch.tensor([0, 4, 4, 9]), tokens(9, 64)
    if planes_:
        scales, index = torch.stack([scales, scales + 1]), torch.tensor([0, 1, 1, 0, -1, 0, 1, 1, 0])
    else:
        index = None
    y = grouped_fp4_matmul(x, codes, scales, offsets, torch.tensor([1.0, 2.0, 0.5]), "mxfp4", plane_index=index)
    ref = grouped_fp4_matmul_ref(x, codes, scales, offsets, torch.tensor([1.0, 2.0, 0.5]), "mxfp4", plane_index=index)
    # Two float32 sums of 64 products, each within 63 u sum |x w|, and the tensor scale's own rounding: 2 * 65 u.
    size = grouped_fp4_matmul_ref(x.abs(), codes & 0x77, scales, offsets, torch.tensor([1.0, 2.0, 0.5]), "mxfp4", plane_index=index)
    assert ((y - ref).abs() <= 2 * 65 * 2.0**-24 * size).all()


def op_inputs():
    weight, x = quantized("nvfp4", 16, 32), tokens(3, 32)
    scale = torch.tensor([0.5])
    codes3, scales3 = weight.codes.expand(2, -1, -1).contiguous(), weight.scales.expand(2, -1, -1).contiguous()
    index = torch.tensor([0, 1, -1])
    ops = torch.ops.prism_kernels
    yield ops.fp4_matmul, (x, weight.codes, weight.scales, scale, "nvfp4", None, torch.bfloat16, [])
    yield ops.multi_plane_matmul, (x, weight.codes, [scales3], index, scale, "nvfp4", torch.zeros(16), torch.float32, [])
    yield ops.grouped_fp4_matmul, (x, codes3, [scales3], None, torch.tensor([0, 1, 3]), torch.ones(2), "nvfp4", None, torch.float32, [])


@pytest.mark.parametrize("which", range(3))
def test_operators_pass_torchs_own_check(which):
    op, arguments = list(op_inputs())[which]
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_operators_are_seen_by_torch_compile():
    weight, x = quantized("nvfp4", 16, 32), tokens(3, 32)
    planes, index = torch.stack([weight.scales, weight.scales + 1]), torch.tensor([0, 1, -1])

    def both(x: torch.Tensor) -> torch.Tensor:
        y = fp4_matmul(x, weight.codes, weight.scales, weight.tensor_scale)
        return y + multi_plane_matmul(x, weight.codes, planes, index, weight.tensor_scale)

    assert torch.equal(torch.compile(both, fullgraph=True, backend="aot_eager")(x), both(x))


def call(**changes):
    weight = quantized("nvfp4", 16, 32)
    arguments = {
        "x": tokens(3, 32),
        "codes": weight.codes,
        "scales": weight.scales,
        "tensor_scale": 1.0,
        "format": "nvfp4",
        "bias": None,
    } | changes
    return fp4_matmul(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "int4-g32"}, "known: nvfp4, mxfp4"),
        ({"x": torch.zeros(3, 32, dtype=torch.int32)}, "x is torch.int32"),
        ({"x": torch.zeros(3, 16)}, r"x has shape \[3, 16\], expected \[T, 32\]"),
        ({"x": torch.zeros(32)}, r"expected \[T, 32\]"),
        ({"codes": torch.zeros(16, 16)}, "planes must be uint8"),
        ({"codes": torch.zeros(16, 12, dtype=torch.uint8)}, "24 columns do not divide into nvfp4 blocks of 16"),
        ({"scales": torch.zeros(16, 3, dtype=torch.uint8)}, r"need \[16, 2\]"),
        ({"format": "mxfp4"}, r"need \[16, 1\]"),
        ({"bias": torch.zeros(3)}, r"bias has shape \[3\], expected \[16\]"),
        ({"tensor_scale": torch.ones(2)}, "tensor_scale has 2 elements"),
        ({"out_dtype": torch.int8}, "out_dtype is torch.int8"),
    ],
)
def test_what_fp4_matmul_refuses(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        call(**changes)
    assert "\n" not in str(caught.value)


def test_what_planes_and_experts_refuse():
    weight, x = quantized("nvfp4", 16, 32), tokens(3, 32)
    stack, index = weight.scales[None], torch.zeros(3, dtype=torch.int32)
    for planes, which, message in (
        (stack, torch.tensor([0, 1, 0]), "token 1 names plane 1; there are 1"),
        (stack, torch.tensor([0, 0, -2]), "token 2 names plane -2"),
        (stack, index[:2], r"expected \[3\]"),
        (stack, index.float(), "expected int32 or int64"),
        ([], index, "there is no plane"),
        (weight.scales, index, "expected"),
        ([weight.scales, weight.scales[:8]], index, r"need \[16, 2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            multi_plane_matmul(x, weight.codes, planes, which)
    codes, scales = weight.codes[None], weight.scales[None]
    for arguments, message in (
        ((x, codes, scales, torch.tensor([0, 2])), "ascend from 0 to 3"),
        ((x, codes, scales, torch.tensor([0, 1, 3])), r"expected \[2\]"),
        ((x, codes, scales, torch.tensor([0.0, 3.0])), "expected int32 or int64"),
        ((x, codes, [scales], torch.tensor([0, 3])), "needs a plane_index"),
        ((x, weight.codes, scales, torch.tensor([0, 3])), r"expected \[E, O, I/2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            grouped_fp4_matmul(*arguments)


def test_tiles_that_no_kernel_has():
    spec = prism_kernels.formats.FORMATS["nvfp4"]
    for tile, message in (
        (Tile(4, 64, 64), "tokens is 4"),
        (Tile(16, 48, 64), "rows is 48"),
        (Tile(16, 64, 16), "columns is 16"),
        (Tile(16, 64, 64, 0), "splits"),
    ):
        with pytest.raises(ValueError, match=message):
            tile.check(spec, torch.bfloat16)
    assert DECODE_TILES[0].check(spec, torch.bfloat16) == DECODE_TILES[0]
    assert DECODE_TILES[0].check(prism_kernels.formats.FORMATS["mxfp4"], torch.float16).columns == 32


def test_the_reference_itself():
    weight, x = quantized("nvfp4", 16, 32), tokens(3, 32)
    expected = x.double() @ weight.dequantize().double().T
    assert (fp4_matmul_ref(x, weight.codes, weight.scales, weight.tensor_scale) - expected).abs().max() <= 34 * 2.0**-24 * (
        x.double().abs() @ weight.dequantize().double().abs().T
    ).max()
