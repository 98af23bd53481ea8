"""What the vLLM engine does without vLLM: planes by token, their memory, names and stacks, outputs."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from prism_ray.adapters.planes import BasePlanes, ScalePlane
from prism_ray.core.errors import CheckpointError, FormatError, ModelError, ResourceError
from prism_ray.engines.protocol import BASE, EngineStopped, Plane, Sampling
from prism_ray.engines.vllm_outputs import Running, token_logprob
from prism_ray.engines.vllm_planes import KernelCache, PlanedLinear, Span, Step, spans_of
from prism_ray.engines.vllm_quant import format_of_members, member_names, takes_over
from prism_ray.engines.vllm_stack import cache_salt, stacked, write_plane
from prism_ray.engines.vllm_worker import PlaneManager, layout_of
from prism_ray.formats.spec import FORMATS
from prism_ray.formats.tensor import QuantTensor
from prism_ray.models.tiny import tiny_tokenizer

COLUMNS = 64


def random_planes(format: str, rows: int, count: int, seed: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, COLUMNS // 2), generator=generator, dtype=torch.uint8)
    low, high = (0x20, 0x50) if format == "nvfp4" else (120, 131)
    shape = (rows, COLUMNS // FORMATS[format].block)
    return codes, [torch.randint(low, high, shape, generator=generator, dtype=torch.uint8) for _ in range(count)]


def linear(format: str = "nvfp4", name: str = "l", rows: tuple[int, ...] = (24, 8), seed: int = 0, **fields) -> PlanedLinear:
    codes, (scales, *_) = random_planes(format, sum(rows), 1, seed)
    factors = [0.5 + 0.25 * i for i in range(len(rows))] if FORMATS[format].has_tensor_scale else [1.0]
    members = tuple(f"{name}.{i}" for i in range(len(rows)))
    return PlanedLinear(
        name=name, members=members, codes=codes, scales=scales, spans=spans_of(rows, factors), format=FORMATS[format], **fields
    )


def manager(*linears: PlanedLinear, cache_bytes: int = 1 << 20) -> PlaneManager:
    return PlaneManager(linears, cache_bytes=cache_bytes)


def attach(planes: PlaneManager, number: int, digest: str, scales: dict[str, torch.Tensor], tmp_path) -> None:
    path = tmp_path / f"{number}.safetensors"
    save_file(scales, path)
    planes.attach(number, digest, str(path))
    path.unlink()


def test_spans_join_parts_under_one_number():
    assert spans_of([4, 2, 2], [0.5, 0.5, 0.25]) == (Span(0, 6, 0.5), Span(6, 8, 0.25))
    assert spans_of([4, 2], [1.0]) == (Span(0, 6, 1.0),)
    assert spans_of([1, 1, 1], [1.0, 2.0, 1.0]) == (Span(0, 1, 1.0), Span(1, 2, 2.0), Span(2, 3, 1.0))
    with pytest.raises(ValueError):
        spans_of([1, 1, 1], [1.0, 2.0])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.sets(st.sampled_from("abc")))
def test_groups_cover_every_token_once_under_its_own_plane(index, held):
    planes = [BASE, "a", "b", "c"]
    step = Step()
    step.set(planes, np.array(index))
    groups = step.groups(dict.fromkeys(held), len(index))
    wanted = [planes[i] if planes[i] in held else BASE for i in index]
    if len(groups) == 1:
        assert groups[0].tokens is None and set(wanted) == {groups[0].digest}
    else:
        found = {int(token): group.digest for group in groups for token in group.tokens}
        assert sum(len(group.tokens) for group in groups) == len(index) and [found[i] for i in range(len(index))] == wanted


def test_a_mixed_step_with_other_rows_is_refused():
    step = Step()
    step.set([BASE, "a"], np.array([0, 1, 1]))
    with pytest.raises(RuntimeError, match="4 rows in a step of 3"):
        step.groups({"a": None}, 4)
    assert step.groups({}, 4)[0].digest == BASE  # a linear that the plane does not touch may have any


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("cache_bytes", [0, 5000, 1 << 20], ids=["none kept", "some kept", "all kept"])
def test_each_token_runs_on_its_own_plane(format, cache_bytes, tmp_path):
    bias = torch.randn(32, generator=torch.Generator().manual_seed(3))
    layer = linear(format, bias=bias)
    planes = manager(layer, cache_bytes=cache_bytes)
    weights = {0: layer.weight(BASE, torch.float32)}
    for number, scales in enumerate(random_planes(format, 32, 3, 7)[1], start=1):
        attach(planes, number, f"plane {number}", {"l": scales}, tmp_path)
        weights[number] = layer.weight(f"plane {number}", torch.float32)
    x = torch.randn(9, COLUMNS, generator=torch.Generator().manual_seed(1))
    for tokens in ([2, 0, 1, 1, 3, 0, 2, 2, 1], [1] * 9, [0] * 9, [3, 3, 3, 0, 0, 0, 3, 3, 3]):
        planes.set_active_adapters(set(), SimpleNamespace(index_mapping=tuple(tokens)))
        for added in (bias, None):
            y = layer(x, added)
            wanted = torch.stack([torch.nn.functional.linear(x[i].double(), weights[n].double()) for i, n in enumerate(tokens)])
            wanted = wanted if added is None else wanted + added.double()
            # 64 products of float32 numbers: each sum is wrong by 64 * 2^-24 of its absolute terms at most.
            bound = 65 * 2.0**-24 * (x.abs().double() @ torch.stack(list(weights.values())).abs().amax(0).double().T + 3)
            assert bool(((y.double() - wanted).abs() <= bound).all())
    assert planes.cache.used_bytes <= cache_bytes
    assert (planes.cache.refused > 0) == (cache_bytes < 1 << 20)


def test_tensor_scales_of_a_stack_stay_apart():
    layer = linear(rows=(16, 8, 8))
    weight = layer.weight(BASE, torch.float32)
    spec = layer.format
    plain = spec.codes.decode(torch.stack([layer.codes & 15, layer.codes >> 4], -1).flatten(1))
    plain = plain * spec.grid.decode(layer.scales).repeat_interleave(spec.block, 1)
    assert torch.equal(weight, plain * torch.tensor([0.5] * 16 + [0.75] * 8 + [1.0] * 8)[:, None])


def test_the_kernel_cache_drops_whole_idle_planes_and_never_one_of_the_step():
    step = Step()
    cache = KernelCache(100, step)
    made = []

    def get(digest: str, layer: str, size: int = 30):
        return cache.get(digest, layer, size, lambda: made.append((digest, layer)) or (lambda x, bias: x))

    step.set(["a"], np.array([0]))
    assert get("a", "1") and get("a", "2") and cache.used_bytes == 60
    step.set(["b"], np.array([0]))
    assert get("b", "1") and cache.used_bytes == 90
    assert get("b", "2") and cache.used_bytes == 60  # a is idle and went as a whole
    step.set(["a", "b"], np.array([0, 1]))
    assert get("a", "1") and get("a", "2") is None and cache.refused == 1  # b is of the step
    assert get("b", "1") and cache.hits == 1
    cache.forget("b")
    cache.forget("never there")
    assert cache.used_bytes == 30 and made.count(("a", "1")) == 2
    assert get("a", "3", 101) is None


def test_recently_used_planes_stay_longest():
    step = Step()
    cache = KernelCache(90, step)
    for digest in ("a", "b", "c", "a", "d"):
        step.set([digest], np.array([0]))
        cache.touch()
        cache.get(digest, "1", 30, lambda: lambda x, bias: x)
    assert list(cache._planes) == ["c", "a", "d"]


def test_detach_lets_go_of_everything(tmp_path):
    layers = [linear(name="l", rows=(32,)), linear(name="m", rows=(32,), seed=1)]
    planes = manager(*layers)
    for cycle in range(1, 50):
        attach(planes, cycle, "a", {"m": random_planes("nvfp4", 32, 1, cycle)[1][0]}, tmp_path)
        planes.set_active_adapters(set(), SimpleNamespace(index_mapping=(0, cycle)))
        for layer in layers:
            layer(torch.ones(2, COLUMNS), None)
        assert "a" in layers[1].planes and "a" not in layers[0].planes
        planes.detach(cycle)
    assert not layers[1].planes and not planes.digests and planes.cache.used_bytes == 2 * 32 * COLUMNS * 4  # the base's, twice


def test_an_unknown_number_is_never_the_base():
    planes = manager(linear())
    with pytest.raises(RuntimeError, match="no plane of number 7"):
        planes.set_active_adapters(set(), SimpleNamespace(index_mapping=(0, 7)))
    with planes.dummy_lora_cache():
        planes.add_dummy_lora(SimpleNamespace(lora_int_id=7), 8)
    planes.set_active_adapters(set(), SimpleNamespace(index_mapping=(0, 7)))
    planes.remove_all_adapters()
    with pytest.raises(RuntimeError):
        planes.set_active_adapters(set(), SimpleNamespace(index_mapping=(0, 7)))
    assert not planes.add_adapter(SimpleNamespace(lora_int_id=7)) and not planes.remove_adapter(7) and not planes.pin_adapter(7)


def test_layout_names_the_parts_and_refuses_what_has_no_place():
    layers = [linear(name="model.qkv", rows=(8, 8))]
    names = ["hf.qkv.0", "hf.qkv.1"]
    mapper = SimpleNamespace(map_name=lambda name: name.replace("hf.", "model."))
    assert layout_of(layers, names, mapper) == {"model.qkv": names}
    assert layout_of(layers, ["model.qkv.1", "model.qkv.0"], None) == {"model.qkv": ["model.qkv.0", "model.qkv.1"]}
    with pytest.raises(ModelError, match="1 quantized weights have no linear, first 'hf.experts'"):
        layout_of(layers, [*names, "hf.experts"], mapper)
    with pytest.raises(ModelError, match="a stack has no weights"):
        layout_of(layers, names[:1], mapper)


def test_stacks_take_missing_parts_from_the_base():
    base = {name: torch.full((2, 3), value, dtype=torch.uint8) for value, name in enumerate("qkvo")}
    plane = {"k": torch.full((2, 3), 9, dtype=torch.uint8)}
    found = stacked({"qkv": ["q", "k", "v"], "o": ["o"]}, base, plane)
    assert set(found) == {"qkv"} and found["qkv"][:, 0].tolist() == [0, 0, 9, 9, 2, 2]


def plane_over_a_base() -> tuple[Plane, BasePlanes, dict[str, list[str]]]:
    base = {}
    for seed, name in enumerate(("m.q_proj", "m.k_proj", "m.o_proj")):
        codes, (scales,) = random_planes("nvfp4", 8, 1, seed)
        base[name] = QuantTensor(codes=codes, scales=scales, tensor_scale=torch.tensor(1.0), format=FORMATS["nvfp4"])
    scales = {"m.k_proj": random_planes("nvfp4", 8, 1, 9)[1][0]}
    plane = Plane(digest=ScalePlane(scales).digest(), scales=scales)
    return plane, BasePlanes.of(base, "base"), {"m.qk": ["m.q_proj", "m.k_proj"], "m.o": ["m.o_proj"]}


def test_a_written_plane_outlives_its_file():
    plane, base, layout = plane_over_a_base()
    path, size = write_plane(plane, base, layout)
    found = load_file(path)
    path.unlink()
    assert set(found) == {"m.qk"} and size == found["m.qk"].numel()
    assert torch.equal(found["m.qk"], torch.cat([base.quantized["m.q_proj"].scales, plane.scales["m.k_proj"]]))


@pytest.mark.parametrize("fault", ["digest", "shape", "surplus", "illegal"])
def test_a_plane_that_does_not_fit_is_not_written(fault, tmp_path, monkeypatch):
    plane, base, layout = plane_over_a_base()
    monkeypatch.setattr("prism_ray.engines.vllm_stack.SHARED_MEMORY", tmp_path)
    name, data = next(iter(plane.scales.items()))
    scales = {
        "digest": {name: data},
        "shape": {name: data[:4].clone()},
        "surplus": {name: data, "m.x": data.clone()},
        "illegal": {name: torch.full_like(data, 255)},
    }[fault]
    digest = "0" * 64 if fault == "digest" else ScalePlane(scales).digest()
    with pytest.raises(FormatError):
        write_plane(Plane(digest=digest, scales=scales), base, layout)
    assert not list(tmp_path.iterdir())


def test_without_room_in_shared_memory_the_temporary_folder_serves(tmp_path, monkeypatch):
    plane, base, layout = plane_over_a_base()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    free = {"/dev/shm": 0, str(tmp_path): 1 << 40}
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free.get(str(folder), 0)))
    path, _ = write_plane(plane, base, layout)
    assert path.parent == tmp_path
    free[str(tmp_path)] = 0
    with pytest.raises(ResourceError, match="no room"):
        write_plane(plane, base, layout)


@given(st.text(), st.text(), st.text(), st.text())
def test_no_two_pairs_of_salt_and_digest_share_a_key(salt, digest, other_salt, other_digest):
    same = (salt, digest) == (other_salt, other_digest)
    assert (cache_salt(salt, digest) == cache_salt(other_salt, other_digest)) == same


def config(*groups: dict, ignore: tuple[str, ...] = ("lm_head",), **fields) -> dict:
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": list(ignore),
        **fields,
    }


NVFP4 = {"targets": ["Linear"], "format": "nvfp4-pack-quantized"}
MXFP4 = {"targets": [r"re:^.*mlp\.(gate|up)_proj$"], "format": "mxfp4-pack-quantized"}
INT4 = {"targets": ["Linear"], "format": "pack-quantized", "weights": {"num_bits": 4, "group_size": 32, "symmetric": True, "type": "int"}}


@pytest.mark.parametrize(
    ("found", "user", "cpu", "expected"),
    [
        (config(NVFP4, MXFP4), None, True, True),
        (config(NVFP4), "compressed-tensors", True, True),
        (config(NVFP4), None, False, False),
        (config(NVFP4), "prism_fp4", False, True),
        (config(NVFP4), "modelopt_fp4", True, False),
        (config(INT4), None, True, False),
        (config(NVFP4, INT4), None, True, False),
        (config({**NVFP4, "input_activations": {"num_bits": 4}}), None, True, False),
        (config(NVFP4, quant_method="gptq"), "prism_fp4", True, False),
    ],
)
def test_whose_checkpoint_it_is(found, user, cpu, expected):
    assert takes_over(found, user, cpu=cpu) == expected


def test_one_format_for_the_parts_of_a_stack():
    found = config(NVFP4, MXFP4, ignore=("lm_head", "re:.*o_proj$"))
    assert format_of_members(found, ["l.q_proj", "l.k_proj"], "l").name == "nvfp4"
    assert format_of_members(found, ["mlp.gate_proj", "mlp.up_proj"], "mlp").name == "mxfp4"
    assert format_of_members(found, ["l.o_proj"], "l") is None and format_of_members(found, ["lm_head"], "") is None
    assert format_of_members(config({**NVFP4, "targets": ["l.q_proj"]}), ["l.k_proj"], "l") is None
    with pytest.raises(CheckpointError, match="parts that are served as one matrix"):
        format_of_members(found, ["mlp.up_proj", "mlp.down_proj"], "mlp")
    with pytest.raises(CheckpointError, match="prism_fp4 reads nvfp4, mxfp4"):
        format_of_members(config(INT4), ["l.q_proj"], "l")


def test_members_of_a_stack():
    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    assert member_names("m.0.qkv_proj", packed) == ("m.0.q_proj", "m.0.k_proj", "m.0.v_proj")
    assert member_names("m.0.o_proj", packed) == ("m.0.o_proj",) and member_names("head", {}) == ("head",)


def output(tokens: list[int], finish: str | None = None, cached: int | None = None, logprobs=None):
    part = SimpleNamespace(token_ids=tokens, finish_reason=finish, logprobs=logprobs)
    return SimpleNamespace(outputs=[part], num_cached_tokens=cached, request_id="r")


def test_deltas_hold_back_what_may_become_a_stop_text():
    tokenizer = tiny_tokenizer()
    ids = [tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in "QXYZ"]
    running = Running(BASE, Sampling(max_tokens=9, stop=("XYZ",)), tokenizer)
    deltas = [
        running.delta(output(ids[:2], cached=32)),
        running.delta(output(ids[2:3], cached=32)),
        running.delta(output([ids[3], ids[0]])),
    ]
    assert [delta.text for delta in deltas] == ["Q", "", ""] and [delta.cached_tokens for delta in deltas] == [32, 0, 0]
    assert deltas[-1].finish == "stop" and deltas[-1].token_ids == (ids[3],)
    running = Running(BASE, Sampling(max_tokens=9, stop=("XYZ",)), tokenizer)
    assert [running.delta(output(ids[:2])).text, running.delta(output(ids[2:3], "length")).text] == ["Q", "XY"]
    running = Running(BASE, Sampling(max_tokens=9, stop=("XYZ",)), tokenizer)
    assert running.delta(output(ids[1:3])).text == "" and running.last().text == "XY" and running.last().finish == "abort"


def test_an_end_that_is_no_end_is_an_error():
    with pytest.raises(EngineStopped, match="error"):
        Running(BASE, Sampling(max_tokens=9), None).delta(output([1], "error"))


def test_logprobs_best_first_and_the_chosen_first_among_equals():
    table = {
        5: SimpleNamespace(logprob=-2.0),
        7: SimpleNamespace(logprob=-1.0),
        3: SimpleNamespace(logprob=-1.0),
        9: SimpleNamespace(logprob=-4.0),
    }
    found = token_logprob(3, table, 2)
    assert (found.token_id, found.logprob, found.top) == (3, -1.0, ((3, -1.0), (7, -1.0)))
    assert token_logprob(9, table, 1).top == ((7, -1.0),)
    assert token_logprob(9, table, 0).top == () and token_logprob(9, table, 0).logprob == -4.0
