"""Loading: damaged safetensors are named before a weight is used, unknown architectures and missing tensors are one-line errors."""

import json
import shutil
import struct

import pytest
import torch
from safetensors.torch import save_file

from prism_ray.core.errors import CheckpointError, EnvironmentFault, ModelError
from prism_ray.formats.safetensors_io import check_safetensors, read_safetensors_header
from prism_ray.models.load import load_model, load_tokenizer
from prism_ray.models.tiny import save_tiny, tiny_llama


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("load") / "model")


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


@pytest.fixture
def sharded(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    return tmp_path / "sharded"


def weights(folder):
    return folder / "model.safetensors"


def rewrite_header(path, change):
    """Parse a file's header, let `change` edit it, write it back before the same data."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def edit_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def one_line(caught):
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_good_files_pass_and_are_listed(folder, sharded):
    assert check_safetensors(folder) == [weights(folder)]
    assert check_safetensors(weights(folder)) == [weights(folder)]
    shards = check_safetensors(sharded)
    assert len(shards) > 2 and shards == sorted(sharded.glob("*.safetensors"))
    assert check_safetensors(sharded / "model.safetensors.index.json") == shards


def test_every_dtype_and_odd_shapes_pass(tmp_path):
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
    dtypes += [torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.complex64, torch.uint16, torch.uint32]
    tensors = {str(dtype): torch.zeros(3, 5).to(dtype) for dtype in dtypes}
    tensors |= {"scalar": torch.tensor(1.0), "empty": torch.zeros(0, 4), "also_empty": torch.zeros(4, 0, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "all.safetensors", metadata={"format": "pt"})
    assert read_safetensors_header(tmp_path / "all.safetensors").keys() == tensors.keys()


@pytest.mark.parametrize("fraction", [0.9, 0.999, 0.01, 0.0])
def test_a_truncated_file_is_named(folder, fraction):
    data = weights(folder).read_bytes()
    weights(folder).write_bytes(data[: int(len(data) * fraction)])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*(truncated|bytes found)") as caught:
        load_model(folder)
    assert "copy or download it again" in one_line(caught)


def test_truncation_at_any_byte_is_noticed(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.arange(4.0), "b": torch.ones(3, dtype=torch.uint8)}, path)
    data = path.read_bytes()
    check_safetensors(path)
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            check_safetensors(path)


def test_trailing_bytes_are_refused(folder):
    with open(weights(folder), "ab") as file:
        file.write(bytes(16))
    with pytest.raises(CheckpointError, match="bytes follow the last tensor"):
        check_safetensors(folder)


@pytest.mark.parametrize("length", [2**40, 2**64 - 1, 10**8 + 1])
def test_an_absurd_header_length_is_refused_without_reading_it(folder, length):
    data = weights(folder).read_bytes()
    weights(folder).write_bytes(struct.pack("<Q", length) + data[8:])
    with pytest.raises(CheckpointError, match=f"a header of {length} bytes announced"):
        check_safetensors(folder)


@pytest.mark.parametrize(
    ("name", "offsets", "message"),
    [
        ("b", [8, 24], "tensor 'b' overlaps the tensor before it"),
        ("b", [20, 36], "tensor 'b' leaves a gap before it"),
        ("b", [16, 8], "ends at 8, before it begins at 16"),
        ("b", [16, 28], "occupies 12 bytes, its dtype and shape say 16"),
        ("a", [-16, 16], "begins at -16, expected 0"),
        ("a", ["x", 16], "no table of tensors"),
        ("a", [0], "no table of tensors"),
        ("a", [0, 1e999], "no table of tensors"),
        ("a", None, "no table of tensors"),
    ],
)
def test_wrong_offsets_are_refused(tmp_path, name, offsets, message):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(4), "b": torch.zeros(4)}, path)
    rewrite_header(path, lambda header: header[name].update(data_offsets=offsets))
    with pytest.raises(CheckpointError, match=message) as caught:
        check_safetensors(path)
    assert "a.safetensors" in one_line(caught)


@pytest.mark.parametrize(
    "header", [b"not json", b"[]", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]}}', b"\xff\xfe"]
)
def test_a_header_that_is_no_table_is_refused(tmp_path, header):
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CheckpointError, match="no table of tensors"):
        check_safetensors(path)


def test_an_index_that_names_a_missing_shard_is_refused(sharded):
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(CheckpointError, match=f"index.json: names the shard '{victim.name}', which is not there"):
        load_model(sharded)


def test_a_truncated_shard_is_named(sharded):
    victim = max(sharded.glob("*.safetensors"))
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=victim.name):
        check_safetensors(sharded)


def test_an_index_that_contradicts_its_shards_is_refused(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shard = index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps({"weight_map": index["weight_map"] | {"model.extra": shard}}))
    with pytest.raises(CheckpointError, match=f"says that {shard} holds 'model.extra', which it does not"):
        check_safetensors(sharded)
    path.write_text(json.dumps({"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(CheckpointError, match="no file name of this folder"):
        check_safetensors(sharded)
    for text in ("{}", "[1]", "{", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": ["b"]}}'):
        path.write_text(text)
        with pytest.raises(CheckpointError, match="is no index of safetensors shards"):
            check_safetensors(sharded)


def test_a_sharded_model_loads_like_a_single_file(sharded):
    ids = torch.arange(6).reshape(1, 6)
    assert torch.equal(load_model(sharded, dtype=torch.float32)(ids).logits, tiny_llama()(ids).logits)


def test_dtype_device_and_eval_mode(folder):
    model = load_model(folder)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16} and not model.training
    assert {weight.device.type for weight in load_model(str(folder), device="cpu").parameters()} == {"cpu"}


def test_a_device_that_is_not_there_is_refused_before_loading(folder):
    with pytest.raises(EnvironmentFault, match="device 'nonsense' cannot be used") as caught:
        load_model(folder, device="nonsense")
    one_line(caught)


def test_an_unknown_architecture_is_refused(folder):
    edit_config(folder, model_type="florp", architectures=["FlorpForCausalLM"])
    with pytest.raises(ModelError, match=r"config\.json: transformers does not know this architecture .*florp") as caught:
        load_model(folder)
    one_line(caught)


def test_an_architecture_that_generates_no_text_is_refused(folder):
    edit_config(folder, model_type="t5", architectures=["T5ForConditionalGeneration"])
    with pytest.raises(ModelError, match="'t5' is no causal language model"):
        load_model(folder)


@pytest.mark.parametrize(("text", "message"), [("{", "not valid JSON"), ("[]", "names no model_type"), ('{"a": 1}', "names no model_type")])
def test_a_config_that_is_none_is_refused(folder, text, message):
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        load_model(folder)


def test_missing_tensors_are_refused_instead_of_drawn_at_random(folder):
    edit_config(folder, num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"9 tensors that LlamaForCausalLM needs are not in the files, for example model\.layers\.2"):
        load_model(folder)


def test_a_shape_that_contradicts_the_config_is_refused(folder):
    edit_config(folder, intermediate_size=96)
    with pytest.raises(CheckpointError, match="weights cannot be loaded") as caught:
        load_model(folder)
    one_line(caught)


def test_pickled_weights_are_refused(folder):
    weights(folder).unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only pytorch_model\.bin, and pickled weights are not loaded"):
        load_model(folder)


def test_remote_code_is_never_run(folder, tmp_path):
    marker = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nfrom transformers import LlamaConfig as C, LlamaForCausalLM as M\n")
    edit_config(folder, model_type="florp", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    with pytest.raises(ModelError):
        load_model(folder)
    assert not marker.exists()


def test_a_quantization_package_that_is_not_installed_is_named(folder):
    edit_config(folder, quantization_config={"quant_method": "aqlm", "in_group_size": 8})
    with pytest.raises((EnvironmentFault, CheckpointError)) as caught:
        load_model(folder)
    assert "aqlm" in one_line(caught).lower()


def test_a_folder_without_tokenizer_is_refused(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelError, match="the folder holds no tokenizer"):
        load_tokenizer(folder)


def test_a_damaged_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(ModelError, match="its tokenizer cannot be loaded") as caught:
        load_tokenizer(folder)
    one_line(caught)


def test_the_end_token_pads_where_there_is_no_padding_token(folder):
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["pad_token"]
    path.write_text(json.dumps(config))
    assert load_tokenizer(folder).pad_token == "</s>"
    del config["eos_token"]
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match="neither a padding nor an end-of-text token"):
        load_tokenizer(folder)


def test_the_users_progress_bar_setting_survives(folder):
    from transformers.utils import logging

    assert logging.is_progress_bar_enabled()
    load_model(folder)
    assert logging.is_progress_bar_enabled()
