"""Scale planes apart from their codes: reading, fit against a base, the on-grid delta, adapter ids (field cases ADP-02, ADP-04, ADP-07, FMT-03, FMT-04)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from prism_ray.adapters.folder import printable_text
from prism_ray.adapters.ids import MAX_ID_LENGTH, require_adapter_id
from prism_ray.adapters.planes import BasePlanes, OnGridDelta, ScalePlane, expert_parts, name_some
from prism_ray.adapters.scale_plane import tokenizer_digest
from prism_ray.core.digests import sha256_file
from prism_ray.core.errors import CheckpointError, ConfigError, FormatError
from prism_ray.core.manifest import read_manifest
from prism_ray.formats.checkpoint import KIND, load_quantized_model
from prism_ray.formats.spec import FORMATS
from prism_ray.formats.tensor import QuantTensor
from prism_ray.models.tiny import tiny_qwen3_moe
from tests.unit._fuzzed_folders import make_adapter, make_base


def tensor(name: str = "nvfp4", rows: int = 4, seed: int = 0) -> QuantTensor:
    spec = FORMATS[name]
    generator = torch.Generator().manual_seed(seed)
    return QuantTensor(
        codes=torch.randint(0, 256, (rows, 32), dtype=torch.uint8, generator=generator),
        scales=torch.randint(1, 120, (rows, 64 // spec.block), dtype=torch.uint8, generator=generator),
        tensor_scale=torch.tensor(0.5 if spec.has_tensor_scale else 1.0),
        format=spec,
    )


@pytest.mark.parametrize(
    "name", ["", ".hidden", "..", "../../etc/passwd", "/etc/passwd", "a/../../b", "%2e%2e/x", "a" * 300, "a\0b", "a b", "a\n", "é", None, 3]
)
def test_an_id_that_could_be_a_path_is_refused_without_repeating_it(name):
    with pytest.raises(ConfigError) as caught:
        require_adapter_id(name)
    assert str(caught.value).isprintable()
    assert not isinstance(name, str) or len(name) < 3 or name not in str(caught.value)


@pytest.mark.parametrize("name", ["a", "Billing-v2.1_fr", "-x", "_", "a..b", "9" * MAX_ID_LENGTH])
def test_a_plain_id_is_returned(name):
    assert require_adapter_id(name) == name


def test_an_id_one_longer_than_the_limit_is_refused():
    with pytest.raises(ConfigError):
        require_adapter_id("9" * (MAX_ID_LENGTH + 1))


@pytest.mark.parametrize(
    ("name", "byte", "legal"),
    [
        ("nvfp4", 0x7E, True),
        ("nvfp4", 0x7F, False),  # NaN
        ("nvfp4", 0x80, False),  # minus zero
        ("nvfp4", 0xFF, False),
        ("mxfp4", 0xFE, True),
        ("mxfp4", 0xFF, False),  # NaN
        ("mxfp4", 0x80, True),  # 2: E8M0 has no sign
    ],
)
def test_a_byte_that_the_grid_forbids_is_named(name, byte, legal):
    base = tensor(name)
    scales = base.scales.clone()
    scales[2, 1] = byte
    plane = ScalePlane({"x": scales})
    if legal:
        plane.require_fit({"x": base}, "here")
        return
    with pytest.raises(FormatError, match=rf"x: scale byte 0x{byte:02X} at \[2, 1\] is not legal on grid {base.format.grid.name}"):
        plane.require_fit({"x": base}, "here")


def test_a_scale_over_a_zero_block_is_refused_and_a_zero_over_a_scale_is_not():
    base = tensor()
    zeroed = base.scales.clone()
    zeroed[1, 2] = 0
    ScalePlane({"x": zeroed}).require_fit({"x": base}, "here")
    with pytest.raises(FormatError, match=r"the scale at \[1, 2\] is 0 in the base and not in the plane"):
        ScalePlane({"x": base.scales}).require_fit({"x": base.with_scales(zeroed)}, "here")


def test_a_plane_that_does_not_fit_is_refused_by_name_and_shape():
    base = {"x": tensor()}
    with pytest.raises(CheckpointError, match=r"here: 5 of 5 layer\(s\) .*: 'a', 'b', 'c' and 2 more"):
        ScalePlane(dict.fromkeys("edcba", base["x"].scales)).require_fit(base, "here")
    with pytest.raises(CheckpointError, match=r"x: scales are torch.uint8 \[3, 4\], the base has torch.uint8 \[4, 4\]"):
        ScalePlane({"x": base["x"].scales[:3]}).require_fit(base, "here")
    with pytest.raises(CheckpointError, match="scales are torch.int32"):
        ScalePlane({"x": base["x"].scales.int()}).require_fit(base, "here")
    with pytest.raises(CheckpointError, match="holds no layer"):
        ScalePlane({}).require_fit(base, "here")


def test_hostile_names_are_shown_on_one_line():
    assert name_some(["a\nb", "\x1b[2J", "\ud800"]).isprintable()
    assert len(name_some(["x" * 10_000])) < 100
    assert printable_text("a\nb \x00 \x1b[2J \ud800 é") == "a b \\x00 \\x1b[2J \\ud800 \\xe9"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 40))
def test_a_delta_goes_forth_and_back_byte_for_byte(tmp_path_factory, seed, count):
    generator = torch.Generator().manual_seed(seed)
    old = {name: torch.randint(0, 256, (5, 4), dtype=torch.uint8, generator=generator) for name in ("a", "b.c")}
    new = {name: data.clone() for name, data in old.items()}
    for data in new.values():
        where = torch.randint(0, 20, (count,), generator=generator)
        data.view(-1)[where] = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    delta = OnGridDelta.between(old, new)
    assert delta.changed == sum(int((old[name] != new[name]).sum()) for name in old)
    path = tmp_path_factory.mktemp("delta") / "delta.safetensors"
    delta.write(path)
    read = OnGridDelta.read(path)
    assert all(torch.equal(data, new[name]) for name, data in {**old, **read.applied_to(old, "")}.items())
    assert all(torch.equal(data, old[name]) for name, data in {**new, **read.inverse().applied_to(new, "")}.items())


def test_a_delta_on_bytes_that_changed_since_is_refused():
    old, new = {"a": torch.tensor([[1, 2]], dtype=torch.uint8)}, {"a": torch.tensor([[1, 3]], dtype=torch.uint8)}
    delta = OnGridDelta.between(old, new)
    for other in ({"a": new["a"]}, {}, {"a": old["a"][:, :1]}):
        with pytest.raises(CheckpointError, match="w: a: bytes under the on-grid delta are not those"):
            delta.applied_to(other, "w")


@pytest.mark.parametrize("fault", ["missing", "dtype", "length", "stray", "negative", "two"])
def test_a_damaged_delta_file_is_refused(tmp_path, fault):
    old = {"a": torch.zeros(2, 4, dtype=torch.uint8)}
    OnGridDelta.between(old, {"a": torch.ones(2, 4, dtype=torch.uint8)}).write(tmp_path / "d.safetensors")
    tensors = load_file(tmp_path / "d.safetensors")
    if fault == "missing":
        del tensors["a.old"]
    elif fault == "dtype":
        tensors["a.new"] = tensors["a.new"].int()
    elif fault == "length":
        tensors["a.new"] = tensors["a.new"][:3]
    elif fault == "stray":
        tensors["a.extra"] = tensors["a.new"].clone()
    elif fault == "negative":
        tensors["a.position"][0] = -1
    else:
        tensors["a.position"] = tensors["a.position"].reshape(2, 4)
    save_file(tensors, tmp_path / "d.safetensors")
    with pytest.raises(CheckpointError):
        OnGridDelta.read(tmp_path / "d.safetensors").applied_to(old, "w")


def test_the_identity_of_a_folder_is_taken_from_its_bytes_and_is_that_of_the_live_model(tmp_path):
    folder = make_base(tmp_path / "base")
    stored, live = BasePlanes.from_checkpoint(folder), BasePlanes.from_model(load_quantized_model(folder))
    manifest = read_manifest(folder, KIND)
    assert (
        (stored.code_plane, stored.scale_plane) == (manifest["code_plane"], manifest["scale_plane"]) == (live.code_plane, live.scale_plane)
    )
    assert stored.scale_rule == manifest["scale_rule"] == "nearest"
    assert stored.tokenizer == tokenizer_digest(folder) == sha256_file(folder / "tokenizer.json")
    assert tokenizer_digest(tmp_path) is None
    assert live.quantized.keys() == stored.quantized.keys()
    again = stored.with_scales(stored.scales().tensors)
    assert again.scale_plane == stored.scale_plane


def test_a_plane_of_some_experts_is_cut_into_the_linears_of_the_base(tmp_path):
    folder = make_base(tmp_path / "base", tiny_qwen3_moe(hidden_size=32, num_layers=1))
    base = BasePlanes.from_checkpoint(folder)
    assert base.quantized.keys() == BasePlanes.from_model(load_quantized_model(folder)).quantized.keys()
    gate_up = "model.layers.0.mlp.experts.gate_up_proj"
    assert expert_parts(base.quantized)[gate_up][3] == [f"model.layers.0.mlp.experts.3.{part}" for part in ("gate_proj", "up_proj")]
    adapter = make_adapter(folder, tmp_path / "adapter", target_modules=["gate_up_proj"], experts=[1, 3])
    stored = ScalePlane.read(adapter)
    assert stored.layers() == {gate_up}
    plane = stored.by_linear(base.scales().tensors)
    plane.require_fit(base.quantized, "here")
    assert plane.tensors.keys() == {f"model.layers.0.mlp.experts.{expert}.{part}" for expert in (1, 3) for part in ("gate_proj", "up_proj")}
    rows = base.quantized["model.layers.0.mlp.experts.1.gate_proj"].scales.shape[0]
    assert torch.equal(plane.tensors["model.layers.0.mlp.experts.3.up_proj"], stored.tensors[gate_up][1, rows:])


def test_a_fused_plane_of_another_shape_or_number_is_refused(tmp_path):
    base = BasePlanes.from_checkpoint(make_base(tmp_path / "base", tiny_qwen3_moe(hidden_size=32, num_layers=1)))
    name = "model.layers.0.mlp.experts.down_proj"
    part = base.quantized["model.layers.0.mlp.experts.0.down_proj"].scales
    whole = torch.stack([part] * 4)
    assert len(ScalePlane({name: whole}).by_linear(base.scales().tensors).tensors) == 4
    for wrong in ({name: whole[:3]}, {name: whole[:, 1:]}, {name: part}, {f"{name}.experts": torch.tensor([0], dtype=torch.int32)}):
        with pytest.raises(CheckpointError, match="belong to no quantized layer"):
            ScalePlane(wrong).by_linear(base.scales().tensors).require_fit(base.quantized, "here")
    for numbers in ([0, 4], [1, 0], [-1, 2]):
        table = {name: whole[:2], f"{name}.experts": torch.tensor(numbers, dtype=torch.int32)}
        with pytest.raises(CheckpointError, match="no ascending list of experts"):
            ScalePlane(table).by_linear(base.scales().tensors)
