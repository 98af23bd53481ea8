"""Admission of adapter folders against a checkpoint: what belongs, what does not, what is hostile (field cases ADP-03, ADP-04, ADP-06, ADP-07)."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from prism_ray.adapters.admission import admit, load_adapter
from prism_ray.adapters.audit_log import append_entry, read_entries
from prism_ray.adapters.planes import BasePlanes
from prism_ray.adapters.scale_plane import ADAPTER_NAME, PEFT_PREFIX, SCALE_PLANE_NAME
from prism_ray.core.errors import (
    CheckpointError,
    ConfigError,
    FingerprintMismatch,
    FormatError,
    GridMismatch,
    ModelError,
    PrismError,
    ResourceError,
)
from prism_ray.core.manifest import MANIFEST_NAME
from prism_ray.formats.checkpoint import load_quantized_model
from prism_ray.models.tiny import tiny_llama, tiny_qwen3_moe
from tests.unit._fuzzed_folders import edit_json, fuzz, make_adapter, make_base, sign, tree_digest

CONFIG = "adapter_config.json"
SMALL = {"hidden_size": 32, "num_layers": 1, "intermediate_size": 32}
LAYER = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("folders")
    base = make_base(root / "base")
    return base, make_adapter(base, root / "adapter")


@pytest.fixture(scope="module")
def base(folders) -> BasePlanes:
    return BasePlanes.from_checkpoint(folders[0])


@pytest.fixture
def adapter(folders, tmp_path) -> Path:
    return shutil.copytree(folders[1], tmp_path / "adapter")


def refused(adapter: Path, base: BasePlanes, kind: type[PrismError], text: str, **options) -> None:
    with pytest.raises(kind) as caught:
        admit(adapter, base, **options)
    assert text in str(caught.value), str(caught.value)
    assert str(caught.value).isprintable()


def retensor(adapter: Path, name: str, change) -> None:
    """Change the tensors of a file and let the manifest vouch for it."""
    tensors = load_file(adapter / name)
    change(tensors)
    save_file(tensors, adapter / name)
    sign(adapter)


def test_the_right_adapter_is_admitted_with_its_bytes_counted(adapter, base):
    admitted = admit(adapter, base)
    plane = load_file(adapter / SCALE_PLANE_NAME)
    assert all(torch.equal(admitted.plane.tensors[name], data) for name, data in plane.items())
    assert admitted.plane.tensors.keys() == plane.keys()
    changed = {name: int((data != base.quantized[name].scales).sum()) for name, data in plane.items()}
    assert admitted.changed == sum(changed.values()) > 0
    assert admitted.blocks == sum(data.numel() for data in plane.values())
    assert admitted.unchanged == () == admitted.overridden


# ADP-03


def test_an_adapter_of_another_quantization_is_refused_and_the_override_is_logged(adapter, base, tmp_path):
    other = BasePlanes.from_checkpoint(make_base(tmp_path / "other", tiny_llama(seed=1, **SMALL)))
    refused(
        adapter, other, FingerprintMismatch, f"the adapter's code_plane is {base.code_plane[:12]}, the base has {other.code_plane[:12]}"
    )
    log = tmp_path / "audit.jsonl"
    with pytest.raises(ConfigError, match="an override is written to an audit log"):
        admit(adapter, other, allow_mismatch="ticket 7")
    refused(adapter, other, FingerprintMismatch, "code_plane", audit_log=log)
    admitted = admit(adapter, other, allow_mismatch="ticket 7", audit_log=log)
    assert [line.split(" is ")[0] for line in admitted.overridden] == ["the adapter's code_plane", "the adapter's scale_plane"] * 2
    first, second = read_entries(log)
    assert (first["event"], first["error"], second["event"]) == ("refused", "FingerprintMismatch", "overridden")
    assert second["reason"] == "ticket 7" and second["adapter"] == "adapter" and second["mismatches"] == list(admitted.overridden)
    assert second["base_code_plane"] == other.code_plane and second["time"] >= first["time"]


def test_an_override_without_a_log_that_can_be_written_admits_nothing(adapter, base, tmp_path):
    sign(adapter, base_code_plane="0" * 64)
    with pytest.raises(ResourceError, match="the audit log cannot be written"):
        admit(adapter, base, allow_mismatch="ticket 7", audit_log=tmp_path / "no" / "audit.jsonl")


@pytest.mark.parametrize("field", ["base_code_plane", "base_scale_plane", "scale_rule", "tokenizer", "rounding"])
def test_each_part_of_the_identity_is_compared(adapter, base, field):
    assert json.loads((adapter / MANIFEST_NAME).read_text())[field]
    sign(adapter, **{field: "0" * 64})
    refused(adapter, base, FingerprintMismatch, f"the adapter's {field.removeprefix('base_')} is 000000000000, the base has ")


def test_what_older_manifests_do_not_say_is_not_compared_but_fingerprints_are_needed(adapter, base):
    sign(adapter, scale_rule=None, tokenizer=None, rounding=None)
    assert admit(adapter, base).changed > 0
    sign(adapter, base_code_plane=None)
    refused(adapter, base, CheckpointError, "the manifest says no 'base_code_plane'")


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"grid": "e8m0", "rounding": None}, GridMismatch, "adapter was trained on grid 'e8m0', the base has e4m3 scales"),
        ({"block": 32}, FormatError, "adapter is for 'nvfp4' in blocks of 32, the base has nvfp4 in blocks of 16"),
        ({"format": "mxfp4"}, FormatError, "adapter is for 'mxfp4'"),
        ({"base_code_plane": 7}, CheckpointError, "'base_code_plane' is no text"),
        ({"kind": "quantized-model"}, CheckpointError, "expected a 'scale-adapter'"),
        ({"format_version": "2.0"}, CheckpointError, "format version '2.0' is not readable"),
    ],
)
def test_format_block_and_grid_are_never_overridden(adapter, base, tmp_path, fields, kind, text):
    sign(adapter, **fields)
    refused(adapter, base, kind, text)
    refused(adapter, base, kind, text, allow_mismatch="ticket 7", audit_log=tmp_path / "log")


# ADP-04


def test_keys_under_another_prefix_are_refused_with_the_first_few(adapter, base):
    def rename(tensors):
        for name in list(tensors):
            tensors[name.replace("model.layers", "model.language_model.layers")] = tensors.pop(name)

    retensor(adapter, SCALE_PLANE_NAME, rename)
    refused(
        adapter,
        base,
        CheckpointError,
        "7 of 7 layer(s) belong to no quantized layer of the base: 'model.language_model.layers.0.mlp.down_proj'",
    )


def test_an_adapter_of_a_deeper_model_is_refused_and_one_of_a_shallower_too(folders, tmp_path):
    deep = make_base(tmp_path / "deep", tiny_llama(hidden_size=32, num_layers=2, intermediate_size=32))
    allow = {"allow_mismatch": "depth", "audit_log": tmp_path / "log"}
    refused(
        make_adapter(deep, tmp_path / "deep-adapter"), BasePlanes.from_checkpoint(folders[0]), CheckpointError, "'model.layers.1.", **allow
    )
    refused(
        folders[1],
        BasePlanes.from_checkpoint(deep),
        CheckpointError,
        "the config targets 14 layer(s), the adapter holds no 'model.layers.1.",
        **allow,
    )


def test_a_layer_that_the_config_targets_and_the_plane_lacks_is_named(adapter, base):
    retensor(adapter, SCALE_PLANE_NAME, lambda tensors: tensors.pop(LAYER))
    refused(adapter, base, CheckpointError, f"the config targets 7 layer(s), the adapter holds no '{LAYER}'")


def test_factors_and_plane_must_be_of_the_same_layers_shapes_and_bytes(adapter, base, tmp_path):
    def copy() -> Path:
        return shutil.copytree(adapter, tmp_path / str(random.random()))

    key = f"{PEFT_PREFIX}{LAYER}.qast_"
    for part, shape in (("A", (3, 2)), ("B", (32, 3)), ("A", (0,))):
        folder = copy()
        retensor(folder, ADAPTER_NAME, lambda tensors, part=part, shape=shape: tensors.update({key + part: torch.zeros(shape)}))
        refused(folder, base, CheckpointError, f"is torch.float32 {list(shape)}, rank 2 on this base needs")
    folder = copy()
    retensor(folder, ADAPTER_NAME, lambda tensors: tensors.pop(key + "A"))
    refused(folder, base, CheckpointError, f"tensor(s) missing: '{key}A'")
    folder = copy()
    retensor(folder, ADAPTER_NAME, lambda tensors: [tensors.pop(key + "A"), tensors.pop(key + "B")])
    refused(folder, base, CheckpointError, f"factors and scale plane are of different layers: '{LAYER}'")
    folder = copy()
    retensor(folder, ADAPTER_NAME, lambda tensors: tensors[key + "B"].fill_(float("nan")))
    refused(folder, base, FormatError, "adapter factors hold NaN or infinity")
    folder = copy()
    retensor(folder, SCALE_PLANE_NAME, lambda tensors: tensors[LAYER].view(-1)[:1].bitwise_xor_(1))
    refused(folder, base, CheckpointError, f"the scale plane is not what the factors give on this base: '{LAYER}'")


def test_an_adapter_that_changes_nothing_is_an_error_unless_declared(folders, base, tmp_path):
    empty = make_adapter(folders[0], tmp_path / "empty", spread=0.0)
    refused(empty, base, CheckpointError, "the adapter changes nothing")
    assert admit(empty, base, allow_no_change=True).changed == 0


def test_a_layer_without_effect_is_reported(adapter, base):
    (adapter / ADAPTER_NAME).unlink()
    retensor(adapter, SCALE_PLANE_NAME, lambda tensors: tensors[LAYER].copy_(base.quantized[LAYER].scales))
    assert admit(adapter, base).unchanged == (LAYER,)


def test_an_adapter_of_some_experts_is_admitted_and_one_expert_off_is_not(tmp_path):
    folder = make_base(tmp_path / "moe", tiny_qwen3_moe(hidden_size=32, num_layers=1))
    adapter = make_adapter(folder, tmp_path / "adapter", target_modules=["gate_up_proj", "q_proj"], experts=[1, 2])
    base = BasePlanes.from_checkpoint(folder)
    names = {name.split(".mlp.")[-1] for name in admit(adapter, base).plane.tensors}
    assert names == {"model.layers.0.self_attn.q_proj", *(f"experts.{n}.{part}" for n in (1, 2) for part in ("gate_proj", "up_proj"))}
    loaded = load_adapter(load_quantized_model(folder, dtype=torch.float32), adapter, allow_no_change=False)
    assert loaded(torch.arange(6).reshape(1, 6)).logits.isfinite().all()
    gate_up = "model.layers.0.mlp.experts.gate_up_proj"
    retensor(adapter, SCALE_PLANE_NAME, lambda tensors: tensors.update({f"{gate_up}.experts": torch.tensor([0, 2], dtype=torch.int32)}))
    refused(adapter, base, CheckpointError, "factors and scale plane are of different layers: 'model.layers.0.mlp.experts.0.gate_proj'")


def test_a_probe_confirms_a_difference_in_the_live_model(folders, adapter):
    ids = torch.arange(8).reshape(1, 8)

    def model():
        return load_quantized_model(folders[0], dtype=torch.float32)

    assert load_adapter(model(), adapter, probe=lambda live: live(ids).logits) is not None
    with pytest.raises(ModelError, match="the probe's output is the same with and without the adapter"):
        load_adapter(model(), adapter, probe=lambda live: live(ids).logits.isfinite())


# ADP-06


def test_a_truncated_file_says_both_sizes_and_another_byte_both_digests(adapter, base):
    path = adapter / SCALE_PLANE_NAME
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 9 // 10])
    refused(adapter, base, CheckpointError, f"{SCALE_PLANE_NAME}: {len(data) * 9 // 10} bytes found, {len(data)} expected")
    expected = json.loads((adapter / MANIFEST_NAME).read_text())["files"][SCALE_PLANE_NAME]["sha256"][:16]
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    refused(adapter, base, CheckpointError, f" found, {expected} expected")


def overlapping(data: bytes) -> bytes:
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    second = sorted((entry["data_offsets"], name) for name, entry in header.items() if name != "__metadata__")[1]
    header[second[1]]["data_offsets"] = [second[0][0] - 1, second[0][1] - 1]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda data: data[: len(data) * 9 // 10], "the file is truncated"),
        (lambda data: data + b"\0" * 16, "bytes follow the last tensor"),
        (lambda data: struct.pack("<Q", 1 << 40) + data[8:], f"a header of {1 << 40} bytes announced"),
        (overlapping, "overlaps the tensor before it"),
        (lambda data: b"", "0 bytes found"),
    ],
    ids=["cut", "trailing", "header", "overlap", "empty"],
)
@pytest.mark.parametrize("name", [SCALE_PLANE_NAME, ADAPTER_NAME])
def test_an_odd_file_is_refused_even_when_the_manifest_vouches_for_it(adapter, base, name, damage, text):
    path = adapter / name
    path.write_bytes(damage(path.read_bytes()))
    refused(adapter, base, CheckpointError, "")  # by size or digest
    sign(adapter)
    refused(adapter, base, CheckpointError, text)


def test_two_of_three_files_are_refused_by_name(adapter, base):
    (adapter / SCALE_PLANE_NAME).unlink()
    refused(adapter, base, CheckpointError, f"{SCALE_PLANE_NAME}: is listed in the manifest and missing")
    sign(adapter)
    refused(adapter, base, CheckpointError, f"holds no {SCALE_PLANE_NAME}")


def test_two_of_three_shards_of_a_base_are_refused(folders, tmp_path):
    base = shutil.copytree(folders[0], tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    shards: dict[str, dict[str, torch.Tensor]] = {f"model-{n}-of-3.safetensors": {} for n in (1, 2, 3)}
    weight_map = {}
    for index, (name, tensor) in enumerate(tensors.items()):
        shard = list(shards)[index % 3]
        shards[shard][name] = tensor
        weight_map[name] = shard
    for shard, held in shards.items():
        save_file(held, base / shard)
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (base / "model.safetensors").unlink()
    (base / MANIFEST_NAME).unlink()
    assert BasePlanes.from_checkpoint(base).code_plane == BasePlanes.from_checkpoint(folders[0]).code_plane
    (base / "model-2-of-3.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names the shard 'model-2-of-3\.safetensors', which is not there"):
        BasePlanes.from_checkpoint(base)


# ADP-07


def test_pickle_is_refused_by_name_and_never_opened(tmp_path, base):
    folder = tmp_path / "adapter"
    folder.mkdir()
    os.mkfifo(folder / "adapter_model.bin")  # opening it would block for ever
    refused(folder, base, ModelError, "holds only 'adapter_model.bin': pickled weights run code when loaded and are not read")
    with pytest.raises(ModelError, match=r"no adapter_config\.json"):
        load_adapter(None, folder)


@pytest.mark.parametrize("name", [CONFIG, MANIFEST_NAME, ADAPTER_NAME, SCALE_PLANE_NAME])
def test_a_link_out_of_the_folder_a_pipe_and_a_folder_are_refused(adapter, base, name, tmp_path):
    outside = tmp_path / "outside"
    os.replace(adapter / name, outside)
    (adapter / name).symlink_to(outside)
    refused(adapter, base, CheckpointError, f"'{name}' is a link that leads out of the folder")
    (adapter / name).unlink()
    os.mkfifo(adapter / name)
    refused(adapter, base, CheckpointError, f"'{name}' is no regular file")
    (adapter / name).unlink()
    (adapter / name).mkdir()
    refused(adapter, base, CheckpointError, f"'{name}' is no regular file")


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../outside", "a\\b", "", "a\nb", "x" * 300, "."])
def test_a_manifest_cannot_name_a_file_outside(adapter, base, name, tmp_path):
    (tmp_path / "outside").write_text("secret")
    manifest = json.loads((adapter / MANIFEST_NAME).read_text())
    manifest["files"][name] = {"bytes": 6, "sha256": "0" * 64}
    (adapter / MANIFEST_NAME).write_text(json.dumps(manifest))
    refused(adapter, base, CheckpointError, "which is no plain name")


def test_links_within_a_hub_snapshot_are_its_files(adapter, base, tmp_path):
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in adapter.iterdir():
        os.replace(path, blobs / path.name)
        (snapshot / path.name).symlink_to(Path("..") / ".." / "blobs" / path.name)
    assert admit(snapshot, base).changed > 0


def test_a_folder_outside_the_root_is_refused_without_its_path(adapter, base, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "tenant").symlink_to(adapter)
    for folder in (adapter, root / "tenant", root / ".." / "adapter"):
        with pytest.raises(ModelError, match="lies outside the folder that adapters are served from") as caught:
            admit(folder, base, root=root)
        assert str(tmp_path) not in str(caught.value)
    shutil.copytree(adapter, root / "own")
    assert admit(root / "own", base, root=root).changed > 0


@pytest.mark.parametrize(
    "fields",
    [
        {"auto_map": {"AutoModel": "code.Model"}},
        {"trust_remote_code": True},
        {"auto_mapping": {"base_model_class": "Model", "parent_library": "os"}},
        {"auto_mapping": {"base_model_class": "a b", "parent_library": "transformers.models.llama"}},
        {"runtime_config": {"deep": [{"custom_code": "x.py"}]}},
    ],
)
def test_a_config_that_asks_for_code_is_refused(adapter, base, fields):
    edit_json(adapter / CONFIG, **fields)
    sign(adapter)
    refused(adapter, base, ModelError, "asks for code to be loaded")


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"peft_type": "LORA"}, ModelError),
        ({"r": "2"}, ModelError),
        ({"r": True}, ModelError),
        ({"r": 1 << 40}, ModelError),
        ({"r": 0}, ConfigError),
        ({"alpha": 10**400}, ModelError),
        ({"qast": 1}, ModelError),
        ({"target_modules": [3]}, ModelError),
        ({"target_modules": "("}, ModelError),
        ({"experts": [2, 1]}, ConfigError),
        ({"experts": {"a": ["b", 1]}}, PrismError),
        ({"grid": "e8m0"}, GridMismatch),
    ],
)
def test_a_config_of_wrong_types_or_values_is_refused(adapter, base, fields, kind):
    edit_json(adapter / CONFIG, **fields)
    sign(adapter)
    refused(adapter, base, kind, "")


@pytest.mark.parametrize("text", ["[" * 100_000, "null", "[]", '{"a": NaN}', "\ufeff{}", "9" * 5000, ""])
@pytest.mark.parametrize("name", [CONFIG, MANIFEST_NAME])
def test_json_that_is_none_is_refused(adapter, base, name, text):
    (adapter / name).write_text(text)
    if name == CONFIG:
        sign(adapter)
    refused(adapter, base, CheckpointError, name)


def test_a_file_that_the_manifest_does_not_list_is_not_trusted(adapter, base):
    manifest = json.loads((adapter / MANIFEST_NAME).read_text())
    del manifest["files"][ADAPTER_NAME]
    (adapter / MANIFEST_NAME).write_text(json.dumps(manifest))
    refused(adapter, base, CheckpointError, "is not in the manifest, so nobody vouches for it")


# The log


def test_the_audit_log_only_grows_and_survives_a_torn_line(tmp_path):
    log = tmp_path / "audit.jsonl"
    append_entry(log, "one", note="a\nb")
    with open(log, "ab") as file:
        file.write(b'{"event": "to')
    append_entry(log, "two")
    assert [json.loads(line)["event"] for line in log.read_text().splitlines() if line.endswith("}")] == ["one", "two"]
    with pytest.raises(CheckpointError, match="line 2 is no audit entry"):
        read_entries(log)
    (tmp_path / "link").symlink_to(log)
    with pytest.raises(ResourceError):
        append_entry(tmp_path / "link", "three")


# Fuzz: a part of jobs/reproduce/fuzz_adapters.py's run


def test_mutated_folders_never_crash_admission_and_never_apply_in_part(tmp_path):
    result = fuzz.run(tmp_path, files=500, seed=7, apply_every=25)
    assert sum(result["outcomes"].values()) == 500
    assert 0 < result["outcomes"].pop("admitted") < 100  # mutations of what no check reads: metrics, README.md, header metadata
    assert len(result["outcomes"]) >= 4  # checks behind the hashes are reached


def test_the_fuzz_sees_a_crash_a_second_line_and_a_partial_apply(tmp_path, monkeypatch):
    def crash(folder, base):
        raise KeyError("x")

    def two_lines(folder, base):
        raise CheckpointError("a\nb")

    def partial(checkpoint, folder):
        (checkpoint / "config.json").write_text("{}")
        raise CheckpointError("refused")

    for number, (name, broken) in enumerate((("admit", crash), ("admit", two_lines), ("apply_adapter", partial))):
        with monkeypatch.context() as patch:
            patch.setattr(fuzz, name, broken)
            work = tmp_path / str(number)
            work.mkdir()
            with pytest.raises(fuzz.Broken):
                fuzz.run(work, files=3, seed=0, apply_every=2)
    assert tree_digest(tmp_path)
