"""prism_ray.engines.planes_linear and loading: the numbers of a plane are those of FP4Linear with its scales, groups do not see each other, one code plane a node."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from prism_ray.adapters.planes import BasePlanes, ScalePlane
from prism_ray.adapters.store.api import AdapterStore
from prism_ray.calibrate.quantize import quantize_to_folder
from prism_ray.core.errors import CheckpointError, FormatError, ModelError
from prism_ray.engines.detokenize import BROKEN, StopTexts, TextStream
from prism_ray.engines.loading import open_base, plane_from_folder, plane_from_store, plane_of
from prism_ray.engines.planes_linear import PlaneExperts, PlaneLinear, PlaneSet, PlaneStep
from prism_ray.engines.protocol import BASE, Plane
from prism_ray.engines.sequence_attention import attend_sequences
from prism_ray.formats.checkpoint import load_quantized_model
from prism_ray.formats.modules import FP4Linear
from prism_ray.formats.policy import QuantPolicy
from prism_ray.formats.spec import FORMATS
from prism_ray.formats.tensor import QuantTensor
from prism_ray.models.tiny import tiny_llama, tiny_qwen3_moe, tiny_tokenizer
from tests.engine_conformance import shifted_plane
from tests.unit._fuzzed_folders import make_adapter, make_base

ROWS, COLUMNS = 24, 64
CPU = torch.device("cpu")


def weight(name: str, seed: int = 0) -> QuantTensor:
    """A random legal weight; int4 scales are bfloat16 numbers near 1."""
    generator = torch.Generator().manual_seed(seed)
    spec = FORMATS[name]
    codes = torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8, generator=generator)
    if not spec.is_fp4:
        codes = torch.where((codes & 15) == 8, codes & 0xF0, codes)
        codes = torch.where((codes >> 4) == 8, codes & 0x0F, codes)
    scale = torch.tensor(0.37 if spec.has_tensor_scale else 1.0)
    return QuantTensor(codes=codes, scales=scales_of(name, seed), tensor_scale=scale, format=spec)


def scales_of(name: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 100)
    blocks = COLUMNS // FORMATS[name].block
    if name.startswith("int"):
        return (0.5 + torch.rand((ROWS, blocks), generator=generator)).bfloat16().view(torch.uint8)
    low, high = (40, 80) if name == "nvfp4" else (120, 130)
    return torch.randint(low, high, (ROWS, blocks), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("cache_bytes", [0, ROWS * COLUMNS * 4, 1 << 20], ids=["none", "one", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "int4-g32"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_each_plane_has_the_numbers_of_a_linear_with_its_scales(name, dtype, cache_bytes, bias):
    added = torch.randn(ROWS).to(dtype) if bias else None
    base = weight(name)
    linear = PlaneLinear(FP4Linear(base, added), PlaneStep(cache_bytes))
    linear.planes = {key: scales_of(name, seed) for key, seed in (("a", 1), ("b", 2))}
    x = torch.randn(11, COLUMNS, generator=torch.Generator().manual_seed(3)).to(dtype)
    for key in (BASE, "a", "b", "unknown here"):
        linear.step.uniform(key)
        reference = FP4Linear(base.with_scales(linear.planes.get(key, base.scales)), added)(x)
        assert torch.equal(linear(x), reference)
        assert torch.equal(linear(x[None]), reference[None])


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20], ids=["none", "all"])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "int4-g32"])
def test_groups_do_not_see_each_other(name, cache_bytes):
    """A mixed step gives every token the bits of a step with its own group alone, in whatever order the sequences are packed."""
    base = weight(name)
    linear = PlaneLinear(FP4Linear(base), PlaneStep(cache_bytes))
    linear.planes = {"a": scales_of(name, 1), "b": scales_of(name, 2)}
    x = torch.randn(16, COLUMNS, generator=torch.Generator().manual_seed(3))
    for packed in ([("a", 3), (BASE, 4), ("b", 9)], [("a", 3), ("b", 2), ("a", 5), ("none", 1), (BASE, 4), ("b", 1)]):
        linear.step.mixed(packed, None, CPU)
        found = linear(x)
        owner = [key if key in linear.planes else BASE for key, count in packed for _ in range(count)]
        for key in set(owner):
            rows = torch.tensor([index for index, other in enumerate(owner) if other == key])
            linear.step.uniform(key)
            assert torch.equal(found[rows], linear(x[rows]))


def test_rows_that_are_no_tokens_of_the_step_are_refused():
    linear = PlaneLinear(FP4Linear(weight("nvfp4")), PlaneStep())
    linear.planes = {"a": scales_of("nvfp4", 1)}
    linear.step.mixed([("a", 2), (BASE, 2)], None, CPU)
    with pytest.raises(ModelError, match="got 3 rows in a step of 4"):
        linear(torch.zeros(3, COLUMNS))
    linear.step.uniform(BASE)
    linear(torch.zeros(3, COLUMNS))


def test_an_output_head_sees_the_planes_of_its_rows():
    """Rows of the head follow the logits that were asked for: here sequence 1 first, and a padding row that repeats token 0."""
    step = PlaneStep()
    head = PlaneLinear(FP4Linear(weight("nvfp4")), step, head=True)
    head.planes = {"a": scales_of("nvfp4", 1)}
    positions = torch.tensor([1, 0], dtype=torch.int32)
    step.mixed([("a", 1), (BASE, 1)], positions, CPU)
    x = torch.randn(2, COLUMNS)
    found = head(x)
    for row, key in ((0, BASE), (1, "a")):
        step.uniform(key)
        assert torch.allclose(found[row], head(x[row : row + 1])[0], atol=1e-5)
        step.uniform("a" if key == BASE else BASE)
        assert not torch.allclose(found[row], head(x[row : row + 1])[0], atol=1e-2)


# --- whole models -----------------------------------------------------------------------------------------------------------------------

BUILD = {"dense": tiny_llama, "sparse": tiny_qwen3_moe}
IDS = torch.tensor([[1, 5, 9, 40, 200, 7, 3, 3, 250, 11]])


@pytest.fixture(scope="module", params=[("dense", "nvfp4"), ("sparse", "nvfp4"), ("sparse", "mxfp4")], ids="-".join)
def folder(request, tmp_path_factory) -> Path:
    kind, name = request.param
    path = tmp_path_factory.mktemp("base") / "model"
    quantize_to_folder(BUILD[kind](), tiny_tokenizer(), QuantPolicy(format=name), path, source="tiny")
    return path


def opened(folder: Path, cache_bytes: int = 1 << 20):
    step = PlaneStep(cache_bytes)
    loaded = open_base(folder, step, dtype=torch.float32)
    return loaded, PlaneSet(loaded.model, loaded.planes, step), step


@torch.no_grad()
def test_an_opened_model_is_the_loaded_model(folder):
    loaded, _, _ = opened(folder)
    reference = load_quantized_model(folder, dtype=torch.float32)
    assert torch.equal(loaded.model(input_ids=IDS).logits, reference(input_ids=IDS).logits)
    assert (loaded.info.code_plane, loaded.info.scale_plane) == (
        BasePlanes.from_model(reference).code_plane,
        BasePlanes.from_model(reference).scale_plane,
    )
    assert loaded.info.scale_bytes == sum(tensor.scales.numel() for tensor in loaded.planes.quantized.values())
    assert loaded.info.max_length == 512 and loaded.eos == {reference.config.eos_token_id}


@torch.no_grad()
@pytest.mark.parametrize("cache_bytes", [0, 1 << 22])
def test_a_mixed_step_of_a_whole_model(folder, cache_bytes):
    """Experts run by plane too: each half of the tokens has the bits of an experts pass with that half alone."""
    loaded, planes, step = opened(folder, cache_bytes)
    base = loaded.planes
    for key, seed in (("a", 1), ("b", 2)):
        planes.attach(key, shifted_plane(base, seed))
    mlp = loaded.model.model.layers[0].mlp
    x = torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(0))
    step.mixed([("a", 5), ("b", 3), (BASE, 4)], None, CPU)
    found = mlp(x)
    for key, rows in (("a", slice(0, 5)), ("b", slice(5, 8)), (BASE, slice(8, 12))):
        step.uniform(key)
        alone = mlp(x[:, rows])
        # The router's product has other row counts; its last bits may differ (float32, sums of 64 terms near 1).
        torch.testing.assert_close(found[:, rows], alone, rtol=1e-4, atol=1e-5)
        step.uniform("b" if key == "a" else "a")
        assert not torch.allclose(found[:, rows], mlp(x[:, rows]), rtol=1e-2, atol=1e-2)


@torch.no_grad()
def test_attach_and_detach_leave_the_model_as_it_was(folder):
    loaded, planes, step = opened(folder)
    before = loaded.model(input_ids=IDS).logits
    scales = shifted_plane(loaded.planes, 1)
    plane = plane_of(scales, loaded.planes, "test")
    del scales
    gc.collect()
    tensors = count_tensors()
    for _ in range(3):
        planes.attach(plane.digest, planes.fitted(plane))
        assert planes.resident == {plane.digest: plane.nbytes}
        step.uniform(plane.digest)
        assert not torch.allclose(loaded.model(input_ids=IDS).logits, before)
        planes.detach(plane.digest)
        step.uniform(BASE)
        assert torch.equal(loaded.model(input_ids=IDS).logits, before)
    gc.collect()
    assert planes.resident == {} and count_tensors() <= tensors + len(list(loaded.planes.quantized))  # the base's decoded weights
    assert not any(name[0][-1] == plane.digest for name in step.cache._entries)


def count_tensors() -> int:
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


def test_five_hundred_cycles_return_to_the_starting_tensors(folder):
    loaded, planes, _ = opened(folder)
    plane = plane_of(shifted_plane(loaded.planes, 1), loaded.planes, "test")
    gc.collect()
    before = count_tensors()
    for _ in range(500):
        planes.attach(plane.digest, plane.scales)
        planes.detach(plane.digest)
    gc.collect()
    assert count_tensors() == before and planes.resident == {}


def test_planes_that_do_not_fit_are_refused(folder):
    loaded, planes, _ = opened(folder)
    good = shifted_plane(loaded.planes, 1)
    name = min(good)
    for change in (
        {name: good[name][:-1].contiguous()},
        {name: good[name].int()},
        {name: torch.full_like(good[name], 255)},
        {"model.layers.7.mlp.up_proj": good[name]},
    ):
        scales = good | change
        with pytest.raises(FormatError):
            planes.fitted(Plane(digest=ScalePlane(scales).digest(), scales=scales))
    with pytest.raises(FormatError, match="digest"):
        planes.fitted(Plane(digest="0" * 64, scales=good))


def test_experts_are_not_stacked(folder):
    loaded, _, _ = opened(folder)
    for module in loaded.model.modules():
        if isinstance(module, PlaneExperts):
            part = module.experts[0][0]
            assert part.tensor.codes.data_ptr() == loaded.planes.quantized[part.name].codes.data_ptr()


def test_a_checkpoint_with_other_experts_is_refused(tmp_path):
    folder = tmp_path / "model"
    quantize_to_folder(tiny_qwen3_moe(), tiny_tokenizer(), QuantPolicy(), folder)
    (folder / "manifest.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": 64}))
    with pytest.raises(CheckpointError, match="experts of shape"):
        open_base(folder, PlaneStep())


# --- adapters -----------------------------------------------------------------------------------------------------------------------------


def test_planes_from_a_folder_and_from_a_store(tmp_path):
    base_folder = make_base(tmp_path / "base")
    adapter = make_adapter(base_folder, tmp_path / "adapter")
    base = BasePlanes.from_checkpoint(base_folder)
    direct = plane_from_folder(adapter, base, root=tmp_path)
    assert direct.digest == ScalePlane(direct.scales).digest() and set(direct.scales) <= set(base.quantized)
    store = AdapterStore(tmp_path / "store")
    store.publish_base(base_folder)
    event = store.publish(adapter, "adapter")
    stored = plane_from_store(store, f"adapter@{event.version}", base)
    assert stored.digest == direct.digest
    other = base.with_scales(shifted_plane(base, 5))
    with pytest.raises(FormatError, match="base_scale_plane"):
        plane_from_store(store, "adapter", other)


# --- one code plane a node ------------------------------------------------------------------------------------------------------------------

LAYERS, WIDTH, INNER = 2, 1024, 14336  # 2 * 3 * 1024 * 14336 / 2 + attention: 46 MB of codes, 51 MB with scales
REPLICA = """
import sys, json, torch
from prism_ray.engines.loading import open_base
from prism_ray.engines.planes_linear import PlaneSet, PlaneStep
def say(what): print(json.dumps(what), flush=True); sys.stdin.readline()
def run(folder):
    step = PlaneStep(0)
    loaded = open_base(folder, step, dtype=torch.bfloat16)
    PlaneSet(loaded.model, loaded.planes, step)
    with torch.no_grad():
        return loaded, float(loaded.model(input_ids=torch.tensor([[1, 2, 3]])).logits.float().sum())
run(sys.argv[2])
say("ready")
loaded, total = run(sys.argv[1])
say(total)
"""


def big_base(folder: Path) -> int:
    """A base of random legal bytes, written without quantizing anything; returns its bytes of codes and scales."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=64,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    tensors, size = {}, 0
    generator = torch.Generator().manual_seed(0)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes = {f"self_attn.{name}_proj": (WIDTH, WIDTH) for name in "qkvo"}
        shapes |= {"mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH), "mlp.down_proj": (WIDTH, INNER)}
        for name, (rows, columns) in shapes.items():
            tensors[f"{prefix}.{name}.weight_packed"] = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
            scales = torch.randint(20, 50, (rows, columns // 16), dtype=torch.uint8, generator=generator)
            tensors[f"{prefix}.{name}.weight_scale"] = scales.view(torch.float8_e4m3fn)
            tensors[f"{prefix}.{name}.weight_global_scale"] = torch.tensor([64.0])
            size += rows * columns // 2 + rows * columns // 16
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = torch.ones(WIDTH, dtype=torch.bfloat16)
    tensors["model.norm.weight"] = torch.ones(WIDTH, dtype=torch.bfloat16)
    tensors["model.embed_tokens.weight"] = torch.randn(64, WIDTH, generator=generator).bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_config(folder, config)
    return size


def save_config(folder: Path, config) -> None:
    """config.json with the quantization entry that a real writer makes, taken from a tiny model."""
    tiny = folder.parent / "tiny"
    quantize_to_folder(tiny_llama(), tiny_tokenizer(), QuantPolicy(), tiny)
    entry = json.loads((tiny / "config.json").read_text())["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config.to_dict() | {"quantization_config": entry}))


def mapped(pid: int, path: Path) -> int:
    """Proportional bytes of one file's pages in a process: a page that n processes map counts 1/n in each."""
    return sum(entry.pss for entry in psutil.Process(pid).memory_maps(grouped=False) if entry.path == str(path))


def anonymous(pid: int) -> int:
    """Bytes of a process that no file backs: what it alone holds. Unlike a whole PSS it does not move when other programs map the same libraries."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="PSS is a Linux number")
def test_two_replicas_share_one_code_plane(tmp_path):
    """Both processes have run a forward over the whole code plane. Together they cost one code plane and small remainders, not two."""
    size = big_base(tmp_path / "base")
    assert size > 48 << 20
    # Large temporaries go back to the system when they are freed, so that what is measured is what is held.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 18), "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", REPLICA, str(tmp_path / "base"), str(tmp_path / "tiny")]
    replicas = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    try:
        answers = [[json.loads(replica.stdout.readline()) for replica in replicas]]
        before = sum(anonymous(replica.pid) for replica in replicas)
        for replica in replicas:
            replica.stdin.write("\n")
            replica.stdin.flush()
        answers.append([json.loads(replica.stdout.readline()) for replica in replicas])
        remainders = sum(anonymous(replica.pid) for replica in replicas) - before
        shared = sum(mapped(replica.pid, (tmp_path / "base" / "model.safetensors").resolve()) for replica in replicas)
    finally:
        for replica in replicas:
            replica.kill()
            replica.communicate()
    assert answers[0] == ["ready"] * 2 and answers[1][0] == answers[1][1]
    # The file's pages are there once: the codes and scales, all of them read, and the few tensors beside them.
    assert 0.95 * size <= shared <= size + (1 << 20), (shared, size)
    # Module objects and rotary tables: 0.03 of a code plane when this was written. Two private copies would make 2.0 in all.
    assert shared + remainders < 1.1 * size, (shared, remainders, size)


# --- attention, text ------------------------------------------------------------------------------------------------------------------------


class Attention(torch.nn.Module):
    num_key_value_groups = 2
    layer_idx = 0
    training = False


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_attention_by_sequence_against_float64(softcap, sinks, window):
    """Packed sequences with a past, against the formula written out for each query."""
    generator = torch.Generator().manual_seed(0)
    module = Attention()
    if sinks:
        module.sinks = torch.randn(4, generator=generator)
    lengths = [(1, 6), (4, 4), (3, 8)]  # (queries, keys)
    q = torch.randn(1, 4, sum(a for a, _ in lengths), 8, generator=generator)
    k, v = (torch.randn(1, 2, sum(b for _, b in lengths), 8, generator=generator) for _ in range(2))
    starts = [torch.tensor([0, *column]).cumsum(0) for column in zip(*lengths, strict=True)]

    class Cache:
        def update(self, key_states, value_states, layer_idx, kwargs):
            return k, v

    out, _ = attend_sequences(
        module,
        q,
        k,
        v,
        None,
        scaling=0.3,
        sliding_window=window,
        softcap=softcap,
        cache=Cache(),
        cu_seq_lens_q=starts[0],
        cu_seq_lens_k=starts[1],
    )
    for i, (queries, keys) in enumerate(lengths):
        for j in range(queries):
            for head in range(4):
                first, position = int(starts[1][i]), keys - queries + j
                seen = range(max(0, position - (window or keys) + 1), position + 1)
                query = q[0, head, int(starts[0][i]) + j].double()
                scores = torch.stack([query @ k[0, head // 2, first + t].double() * 0.3 for t in seen])
                scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                extra = torch.cat([scores, module.sinks[head].double()[None]]) if sinks else scores
                share = extra.softmax(0)[: len(scores)]
                expected = sum(s * v[0, head // 2, first + t].double() for s, t in zip(share, seen, strict=True))
                # float32 sums of at most 9 terms of size 1.
                torch.testing.assert_close(out[0, int(starts[0][i]) + j, head].double(), expected, atol=1e-5, rtol=1e-5)


TEXTS = ["plain words", "déjà vu", "日本語のテキスト", "👩‍👩‍👧 family", "mixed ß 漢 🙂 end", "a" * 300]


@pytest.mark.parametrize("text", TEXTS)
def test_text_streams_whole_characters(text):
    tokenizer = tiny_tokenizer()
    ids = tokenizer(text)["input_ids"]
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) == text and not any(BROKEN in piece for piece in pieces)
    for cut in range(len(ids)):
        stream = TextStream(tokenizer)
        shown = "".join(stream.push(token) for token in ids[:cut])
        assert text.startswith(shown) and shown == tokenizer.decode(ids[:cut]).rstrip(BROKEN)


def test_bytes_that_are_no_text_do_not_hold_back_what_follows():
    tokenizer = tiny_tokenizer()
    broken = tokenizer("é")["input_ids"][:1]
    for count in (1, 2, 5, 80):
        ids = broken * count + tokenizer("then this")["input_ids"]
        stream = TextStream(tokenizer)
        assert "".join(stream.push(token) for token in ids) == tokenizer.decode(ids)


def test_random_tokens_stream_to_their_decoded_text():
    tokenizer = tiny_tokenizer()
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        ids = torch.randint(0, len(tokenizer), (40,), generator=generator).tolist()
        stream = TextStream(tokenizer)
        shown = "".join(stream.push(token) for token in ids)
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        assert whole.startswith(shown) and len(whole) - len(shown) <= 3 and set(whole[len(shown) :]) <= {BROKEN}


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_stop_texts_in_pieces_of_any_size(size):
    text = "abcabdabcabcabe and more"
    for stops, expected in (
        (["abcabe"], "abcabdabc"),
        (["abd", "ca"], "ab"),
        (["zzz"], text),
        ([], text),
        ([""], text),
        (["e and more"], "abcabdabcabcab"),
    ):
        stream = StopTexts(stops)
        shown, found = "", False
        for start in range(0, len(text), size):
            piece, found = stream.push(text[start : start + size])
            shown += piece
            assert text.startswith(shown) and not any(stop and stop in shown for stop in stops)
            if found:
                break
        shown += "" if found else stream.flush()
        assert shown == expected and found == (expected != text)
