"""prism_ray.adapters.store on a local folder and in memory: versions, pointer, history, tenants, integrity, collector, concurrent writers (SRV-05)."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import secrets
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from prism_ray.adapters.patch import read_patch
from prism_ray.adapters.scale_plane import ADAPTER_NAME, SCALE_PLANE_NAME
from prism_ray.adapters.store import AdapterStore, collect, parse_reference
from prism_ray.adapters.store.backend import Backend
from prism_ray.adapters.store.bases import folder_scales, record_path, stored_scales
from prism_ray.adapters.store.objects import object_path
from prism_ray.adapters.store.records import Log, encode_record
from prism_ray.cli.main import run
from prism_ray.core.errors import CheckpointError, ConfigError, EnvironmentFault, FingerprintMismatch, FormatError, ModelError, PrismError
from prism_ray.core.manifest import MANIFEST_NAME, write_manifest
from tests.unit._adapter_folders import make_adapter, make_base


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [make_adapter(base, folder / f"a{seed}", seed) for seed in (1, 2, 3)]


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path) -> AdapterStore:
    return AdapterStore(tmp_path / "store" if request.param == "local" else f"memory://{secrets.token_hex(8)}")


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def damage(store: AdapterStore, relative: str, change=lambda data: data[:-1] + bytes([data[-1] ^ 1])) -> None:
    store.backend.put(relative, change(store.backend.read(relative)))


# --- publish, pull, versions ---------------------------------------------------------------------------------------------------


def test_what_is_pulled_is_what_was_published_to_the_byte(store, base, adapters, tmp_path):
    store.publish_base(base)
    event = store.publish(adapters[0], "summaries", who="ann", note="first")
    assert event.reference == "summaries@1" and (event.who, event.note, event.metrics) == ("ann", "first", {"accuracy": 0.1})
    pulled = store.pull("summaries", tmp_path / "out")
    assert content(tmp_path / "out") == content(adapters[0]) and pulled.version == 1
    plane = store.scale_plane("summaries@1")
    expected = load_file(adapters[0] / SCALE_PLANE_NAME)
    assert set(plane) == set(expected) and all(torch.equal(plane[name], expected[name]) for name in plane)


def test_without_its_base_the_plane_is_kept_raw(store, adapters, tmp_path):
    event = store.publish(adapters[0], "a")
    assert {entry["encoding"] for entry in event.files.values()} == {"raw"}
    store.pull("a@1", tmp_path / "out")
    assert content(tmp_path / "out") == content(adapters[0])


def test_with_its_base_the_plane_is_a_patch_and_the_codes_are_stored_once(store, base, adapters):
    record = store.publish_base(base)
    before = store.stored_bytes()
    for folder in adapters:
        entry = store.publish(folder, folder.name).files[SCALE_PLANE_NAME]
        assert entry["encoding"] == "patch"
        patch = store.objects.read(entry["object"], "test")
        assert read_patch(patch).bytes < entry["bytes"]
    added = store.stored_bytes() - before
    folders = sum(path.stat().st_size for folder in adapters for path in folder.iterdir())
    checkpoint = sum(path.stat().st_size for path in base.iterdir())
    assert added < folders and before <= checkpoint + 8 and record.code_plane in {b.code_plane for b in store.list_bases()}


def test_versions_count_from_one_and_stay_what_they_are(store, adapters, tmp_path):
    for number, folder in enumerate(adapters, start=1):
        assert store.publish(folder, "a").version == number
    assert store.show("a").version == 3
    for number, folder in enumerate(adapters, start=1):
        store.pull(f"a@{number}", tmp_path / str(number))
        assert content(tmp_path / str(number)) == content(folder)
    with pytest.raises(ConfigError, match="no version 4"):
        store.show("a@4")


def test_rollback_moves_the_pointer_and_is_itself_in_the_history(store, adapters, tmp_path):
    for folder in adapters:
        store.publish(folder, "a")
    event = store.rollback("a", 1, who="ben", note="3 is worse")
    assert (event.event, event.version, event.latest) == ("rollback", 1, 3) and store.show("a").version == 1
    store.pull("a", tmp_path / "one")
    assert content(tmp_path / "one") == content(adapters[0])
    assert store.publish(adapters[1], "a").version == 4 and store.show("a").version == 4
    assert [(line.event, line.version) for line in store.history("a")] == [
        ("publish", 1),
        ("publish", 2),
        ("publish", 3),
        ("rollback", 1),
        ("publish", 4),
    ]
    assert store.history("a")[3].who == "ben" and store.history("a")[3].note == "3 is worse"
    # Versions published after rollbacks are found too.
    assert [store.show(f"a@{number}").version for number in (1, 2, 3, 4)] == [1, 2, 3, 4]


def test_rollback_is_a_compare_and_swap(store, adapters):
    store.publish(adapters[0], "a")
    store.publish(adapters[1], "a")
    with pytest.raises(ConfigError, match="version 2 is current, not 1"):
        store.rollback("a", 1, expected=1)
    with pytest.raises(ConfigError, match="no version 3"):
        store.rollback("a", 3)
    assert [line.event for line in store.history("a")] == ["publish", "publish"]
    store.rollback("a", 1, expected=2)
    assert store.show("a").version == 1


def test_a_rollback_that_a_publication_overtakes_is_refused(store, adapters, monkeypatch):
    store.publish(adapters[0], "a")
    store.publish(adapters[0], "a")
    other = AdapterStore(store.backend.url)
    real, calls = Log.head, []

    def head(log):
        found = real(log)
        calls.append(found.version)
        if len(calls) == 2:  # rollback has looked once at what is current and now builds its event
            monkeypatch.setattr(Log, "head", real)
            other.publish(adapters[1], "a")
        return found

    monkeypatch.setattr(Log, "head", head)
    with pytest.raises(ConfigError, match="version 3 is current, not 2"):
        store.rollback("a", 1)
    assert store.show("a").version == 3


def test_list_and_tenants(store, adapters):
    store.publish(adapters[0], "b", tenant="acme")
    store.publish(adapters[0], "a", tenant="acme")
    store.publish(adapters[1], "a", tenant="other")
    assert [event.name for event in store.list("acme")] == ["a", "b"]
    assert [(event.tenant, event.name) for event in store.list(None)] == [("acme", "a"), ("acme", "b"), ("other", "a")]
    assert store.list("nobody") == ()
    assert store.show("a", tenant="acme").digest != store.show("a", tenant="other").digest


def test_a_foreign_adapter_and_a_missing_one_are_the_same_error(store, adapters, tmp_path):
    store.publish(adapters[0], "secret", tenant="acme")
    for call in (
        lambda name: store.show(name, tenant="other"),
        lambda name: store.pull(name, tmp_path / "out", tenant="other"),
        lambda name: store.history(name, tenant="other"),
        lambda name: store.rollback(name, 1, tenant="other"),
        lambda name: store.diff(name, name, tenant="other"),
        lambda name: store.scale_plane(name, tenant="other"),
    ):
        messages = set()
        for name in ("secret", "absent"):
            with pytest.raises(ConfigError) as caught:
                call(name)
            messages.add(str(caught.value).replace(name, "NAME"))
        assert len(messages) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "a/../../b", "%2e%2e/x", "a" * 300, "a\0b", "", ".", "..", "a b", "a@b", "ä"]
)
def test_names_and_tenants_that_are_no_names_never_reach_the_storage(tmp_path, adapters, name):
    store = AdapterStore(tmp_path / "store")
    for call in (
        lambda: store.publish(adapters[0], name),
        lambda: store.show(name),
        lambda: store.publish(adapters[0], "a", tenant=name),
        lambda: store.list(name),
        lambda: store.rollback(name, 1),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        assert len(name) < 3 or name not in str(caught.value)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("text", ["a@0", "a@-1", "a@01", "a@1.0", "a@", "a@1@2", "@1", "a@１"])
def test_references_that_are_none(text):
    with pytest.raises(ConfigError):
        parse_reference(text)


# --- admission -----------------------------------------------------------------------------------------------------------------


def corrupt_plane(folder: Path) -> None:
    data = bytearray((folder / SCALE_PLANE_NAME).read_bytes())
    data[-1] ^= 1
    (folder / SCALE_PLANE_NAME).write_bytes(data)


def edit_manifest(**fields):
    def change(folder: Path) -> None:
        path = folder / MANIFEST_NAME
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def illegal_scale(folder: Path) -> None:
    path = folder / SCALE_PLANE_NAME
    data = bytearray(path.read_bytes())
    data[-1] = 0x7F  # NaN of E4M3
    path.write_bytes(data)
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    manifest["files"][SCALE_PLANE_NAME]["sha256"] = hashlib.sha256(data).hexdigest()
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))


FAULTS = {
    "no manifest": lambda folder: (folder / MANIFEST_NAME).unlink(),
    "plane changed": corrupt_plane,
    "plane missing": lambda folder: (folder / SCALE_PLANE_NAME).unlink(),
    "truncated": lambda folder: (folder / ADAPTER_NAME).write_bytes((folder / ADAPTER_NAME).read_bytes()[:-9]),
    "pickle": lambda folder: (folder / "adapter_model.bin").write_bytes(b"x"),
    "program": lambda folder: (folder / "modeling.py").write_text("import os"),
    "surplus": lambda folder: (folder / "notes.txt").write_text("x"),
    "link": lambda folder: (folder / "notes.txt").symlink_to("/etc/hostname"),
    "other kind": edit_manifest(kind="quantized-model"),
    "no base": edit_manifest(base_code_plane=None),
    "base is a path": edit_manifest(base_scale_plane="../../x"),
    "unknown format": edit_manifest(format="nvfp5"),
    "names a path": edit_manifest(files={"../x": {"sha256": "0" * 64, "bytes": 1}}),
    "files is a list": edit_manifest(files=[1]),
    "illegal scale": illegal_scale,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_admission_refuses_leaves_the_store_untouched(tmp_path, adapters, fault):
    shutil.copytree(adapters[0], tmp_path / "adapter")
    FAULTS[fault](tmp_path / "adapter")
    store = AdapterStore(tmp_path / "store")
    with pytest.raises((CheckpointError, ModelError, ConfigError, FormatError)) as caught:
        store.publish(tmp_path / "adapter", "a")
    assert "\n" not in str(caught.value) and not (tmp_path / "store").exists()


def test_an_adapter_with_layers_that_its_base_does_not_have_is_refused(tmp_path, base, adapters):
    store = AdapterStore(tmp_path / "store")
    store.publish_base(base)
    other = make_base(tmp_path / "moe", "moe")
    folder = make_adapter(other, tmp_path / "adapter", experts=[1])
    manifest = json.loads((adapters[0] / MANIFEST_NAME).read_text())
    edit_manifest(**{key: manifest[key] for key in ("base_code_plane", "base_scale_plane")})(folder)
    with pytest.raises(FormatError, match="no such"):
        store.publish(folder, "a")
    assert store.list() == ()


# --- bases ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "moe"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_a_base_comes_back_to_the_byte_and_shares_its_codes_with_a_merge(tmp_path, kind, format):
    folder = make_base(tmp_path / "base", kind, format)
    store = AdapterStore(tmp_path / "store")
    record = store.publish_base(folder)
    assert store.publish_base(folder) == record
    store.pull_base(record.code_plane, record.scale_plane, tmp_path / "out")
    assert content(tmp_path / "out") == content(folder)
    scales, expected = stored_scales(store.objects, record), folder_scales(folder)
    assert set(scales) == set(expected) and all(torch.equal(scales[name], expected[name]) for name in scales)
    with pytest.raises(ConfigError, match="no base"):
        store.pull_base(record.scale_plane, record.code_plane, tmp_path / "other")


def test_adapters_of_some_experts_come_back_to_the_byte(tmp_path):
    base = make_base(tmp_path / "base", "moe")
    whole = make_adapter(base, tmp_path / "whole", seed=1)
    some = make_adapter(base, tmp_path / "some", seed=2, experts=[1])
    assert any(name.endswith(".experts") for name in load_file(some / SCALE_PLANE_NAME))
    store = AdapterStore(tmp_path / "store")
    store.publish_base(base)
    for folder in (whole, some):
        event = store.publish(folder, folder.name)
        assert event.files[SCALE_PLANE_NAME]["encoding"] == "patch"
        store.pull(folder.name, tmp_path / "out", replace=True)
        assert content(tmp_path / "out") == content(folder)
    plane, scales = store.scale_plane("some"), folder_scales(base)
    fused = [name for name in plane if plane[name].ndim == 3]
    assert fused and all(torch.equal(plane[name][0], scales[name][0]) and not torch.equal(plane[name], scales[name]) for name in fused)


def test_a_base_whose_manifest_lies_is_refused(tmp_path, base):
    shutil.copytree(base, tmp_path / "base")
    edit_manifest(code_plane="0" * 64)(tmp_path / "base")
    with pytest.raises(FingerprintMismatch, match="code_plane"):
        AdapterStore(tmp_path / "store").publish_base(tmp_path / "base")


# --- integrity -----------------------------------------------------------------------------------------------------------------


def test_a_corrupted_object_is_named_and_never_used(store, base, adapters, tmp_path):
    store.publish_base(base)
    event = store.publish(adapters[0], "a")
    for file, entry in event.files.items():
        path = object_path(entry["object"])
        good = store.backend.read(path)
        damage(store, path)
        with pytest.raises(CheckpointError, match="corrupted") as caught:
            store.pull("a", tmp_path / "out")
        assert entry["object"][:12] in str(caught.value) and file in str(caught.value) and not (tmp_path / "out").exists()
        store.backend.delete(path)
        with pytest.raises(CheckpointError, match="missing"):
            store.pull("a", tmp_path / "out")
        store.backend.put(path, good)
    damage(store, object_path(event.files[SCALE_PLANE_NAME]["object"]))
    with pytest.raises(CheckpointError, match="corrupted"):
        store.scale_plane("a")
    store.publish(adapters[0], "a")  # heals it
    store.pull("a@1", tmp_path / "out")


def test_a_damaged_base_plane_is_refused_before_a_patch_is_applied(store, base, adapters, tmp_path):
    record = store.publish_base(base)
    store.publish(adapters[0], "a")
    shard = next(entry for entry in record.files.values() if "parts" in entry)
    damage(store, object_path(shard["parts"]["scales"]["object"]))
    with pytest.raises(CheckpointError, match="corrupted"):
        AdapterStore(store.backend.url).pull("a", tmp_path / "out")


def test_edited_records_and_histories_do_not_verify(store, adapters):
    for _ in range(3):
        store.publish(adapters[0], "a")
    log = store._log("default", "a")
    first = f"{log.folder}/00000001.json"
    good = store.backend.read(first)
    store.backend.put(first, good.replace(b'"version": 1', b'"version": 2'))
    with pytest.raises(CheckpointError, match="record is corrupted"):
        store.history("a")
    # A whole record in the place of another, with a SHA-256 of its own: the chain tells.
    fields = json.loads(good) | {"who": "mallory"}
    fields.pop("sha256")
    store.backend.put(first, encode_record(fields))
    assert store.show("a@1").who == "mallory"
    with pytest.raises(CheckpointError, match="not the one that event 2 followed"):
        store.history("a")
    store.backend.put(first, store.backend.read(f"{log.folder}/00000002.json"))
    with pytest.raises(CheckpointError, match="of another name"):
        store.history("a")
    store.backend.delete(first)
    with pytest.raises(CheckpointError, match="event 1 is missing"):
        store.show("a")
    store.backend.put(first, b"not json")
    with pytest.raises(CheckpointError, match="no record"):
        store.history("a")


@pytest.mark.parametrize("name", ["../outside.json", "/outside.json", "a/../../outside.json"])
def test_a_forged_record_cannot_write_outside_the_pulled_folder(tmp_path, base, adapters, name):
    store = AdapterStore(tmp_path / "store")
    store.publish(adapters[0], "a")
    record = store.publish_base(base)
    for path in (f"{store._log('default', 'a').folder}/00000001.json", record_path(record.code_plane, record.scale_plane)):
        fields = json.loads(store.backend.read(path))
        fields.pop("sha256")
        fields["files"][name] = next(entry for entry in fields["files"].values() if entry.get("object") == entry["sha256"])
        store.backend.put(path, encode_record(fields))
    with pytest.raises(CheckpointError, match="no plain name"):
        store.pull("a", tmp_path / "deep" / "out")
    with pytest.raises(CheckpointError, match="no plain name"):
        store.pull_base(record.code_plane, record.scale_plane, tmp_path / "deep" / "out")
    assert list((tmp_path / "deep").iterdir()) == [] and not list(tmp_path.rglob("outside.json"))


def test_the_read_cache_is_verified_too(tmp_path, adapters):
    store = AdapterStore(tmp_path / "store", cache=tmp_path / "cache")
    event = store.publish(adapters[0], "a")
    store.pull("a", tmp_path / "one")
    digest = event.files[SCALE_PLANE_NAME]["object"]
    cached = tmp_path / "cache" / object_path(digest)
    assert cached.is_file()
    cached.write_bytes(b"other")
    store.pull("a", tmp_path / "two")
    assert content(tmp_path / "two") == content(adapters[0])
    # From the cache alone, as long as its bytes are right.
    store.backend.delete(object_path(digest))
    store.pull("a", tmp_path / "three")
    assert content(tmp_path / "three") == content(adapters[0])


def test_a_newer_store_is_refused(store, adapters):
    store.publish(adapters[0], "a")
    path = f"{store._log('default', 'a').folder}/00000001.json"
    store.backend.put(path, store.backend.read(path).replace(b'"format_version": "1.0"', b'"format_version": "2.0"'))
    with pytest.raises(CheckpointError, match="update prism-ray"):
        store.show("a")


# --- diff ----------------------------------------------------------------------------------------------------------------------


def test_diff_counts_changed_blocks_of_each_layer(store, base, adapters):
    store.publish_base(base)
    for folder in adapters[:2]:
        store.publish(folder, "a")
    found = store.diff("a@1", "a@2")
    planes = [load_file(folder / SCALE_PLANE_NAME) for folder in adapters[:2]]
    for name, layer in found.layers.items():
        first, second = planes[0][name].int(), planes[1][name].int()
        assert (layer.changed, layer.blocks) == (int((first != second).sum()), first.numel())
        assert layer.steps == int((first - second).abs().sum()) and not layer.only
    assert found.changed == sum(layer.changed for layer in found.layers.values()) > 0 and set(found.layers) == set(planes[0])
    assert store.diff("a@1", "a@1").changed == 0


def test_diff_takes_the_bases_scales_for_a_layer_that_one_version_lacks(tmp_path, base, adapters):
    narrow = make_adapter(base, tmp_path / "narrow", 1, target_modules=["q_proj"])
    for with_base in (True, False):
        store = AdapterStore(tmp_path / f"store{with_base}")
        if with_base:
            store.publish_base(base)
        store.publish(adapters[0], "wide")
        store.publish(narrow, "narrow")
        found = store.diff("wide", "narrow")
        name = next(name for name in found.layers if "v_proj" in name)
        plane, plain = load_file(adapters[0] / SCALE_PLANE_NAME)[name], folder_scales(base)[name]
        if with_base:
            assert (found.layers[name].changed, found.layers[name].only) == (int((plane != plain).sum()), "")
        else:
            assert (found.layers[name].changed, found.layers[name].only) == (plane.numel(), "wide@1")


def test_versions_over_different_code_planes_are_not_compared(store, adapters, tmp_path):
    other = make_base(tmp_path / "other", format="mxfp4")
    store.publish(adapters[0], "a")
    store.publish(make_adapter(other, tmp_path / "adapter"), "b")
    with pytest.raises(FingerprintMismatch, match="different code planes"):
        store.diff("a", "b")


# --- collector -----------------------------------------------------------------------------------------------------------------


def age(store: AdapterStore, seconds: float) -> None:
    """Make every object of a local store older."""
    for path in Path(store.backend.root, "objects").rglob("*"):
        if path.is_file():
            info = path.stat()
            os.utime(path, (info.st_atime - seconds, info.st_mtime - seconds))


def orphan(store: AdapterStore, data: bytes = b"orphan") -> str:
    digest = hashlib.sha256(data).hexdigest()
    store.objects.put(digest, data)
    return digest


def test_gc_takes_what_nothing_names_and_what_is_old_enough(tmp_path, base, adapters):
    store = AdapterStore(tmp_path / "store", grace_s=100)
    store.publish_base(base)
    store.publish(adapters[0], "a")
    old = orphan(store)
    age(store, 1000)
    young = orphan(store, b"young")
    dry = store.gc(dry_run=True)
    assert dry.removed == (old,) and store.objects.present(old)
    found = store.gc()
    assert (found.removed, found.young, found.removed_bytes) == ((old,), 1, len(b"orphan"))
    assert store.objects.present(young) and not store.objects.present(old)
    store.pull("a", tmp_path / "out")
    assert content(tmp_path / "out") == content(adapters[0])
    assert not list(Path(store.backend.root, "gc").iterdir())


def test_gc_removes_temporaries_of_killed_writers(tmp_path, adapters):
    store = AdapterStore(tmp_path / "store", grace_s=100)
    store.publish(adapters[0], "a")
    left = tmp_path / "store" / "objects" / "sha256" / "ab" / ".tmp-killed"
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(b"half")
    assert store.gc().removed == ()
    age(store, 1000)
    assert len(store.gc().removed) == 1 and not left.exists()


def test_the_grace_period_is_the_stores_not_the_callers(tmp_path, adapters):
    AdapterStore(tmp_path / "store", grace_s=5000).publish(adapters[0], "a")
    store = AdapterStore(tmp_path / "store", grace_s=1)
    orphan(store)
    age(store, 1000)
    assert store.grace_s == 5000 and store.gc().removed == ()


def test_an_old_orphan_that_a_publication_takes_up_again_survives_a_running_gc(tmp_path, adapters, monkeypatch):
    """The collector has made its list; then the publication writes the same object; the collector looks again before it deletes."""
    store = AdapterStore(tmp_path / "store", grace_s=100)
    publisher = AdapterStore(tmp_path / "store")
    store.publish(adapters[1], "other")
    digests = [orphan(store, (adapters[0] / name).read_bytes()) for name in (SCALE_PLANE_NAME, ADAPTER_NAME)]
    age(store, 1000)
    real, started = Backend.files, []

    def files(backend, relative):
        found = real(backend, relative)
        monkeypatch.setattr(Backend, "files", real)
        # Publish between the collector's list and its first deletion; the publication waits for the lease, so it runs beside.
        thread = threading.Thread(target=publisher.publish, args=(adapters[0], "a"))
        thread.start()
        started.append(thread)
        while not all(time.time() - backend.entry(object_path(digest)).modified < 500 for digest in digests):
            time.sleep(0.01)
        return found

    monkeypatch.setattr(Backend, "files", files)
    found = store.gc()
    started[0].join(60)
    assert not started[0].is_alive() and not set(found.removed) & set(digests)
    store.pull("a", tmp_path / "out")
    assert content(tmp_path / "out") == content(adapters[0])


def test_an_object_deleted_between_write_and_record_is_written_again(tmp_path, adapters, monkeypatch):
    """The last window: the collector checked the time, the publication wrote, the collector deletes."""
    store = AdapterStore(tmp_path / "store")
    digest = hashlib.sha256((adapters[0] / ADAPTER_NAME).read_bytes()).hexdigest()
    real = collect.wait_for_collectors

    def deleting(backend):
        backend.delete(object_path(digest))
        real(backend)

    monkeypatch.setattr(collect, "wait_for_collectors", deleting)
    store.publish(adapters[0], "a")
    monkeypatch.undo()
    store.pull("a", tmp_path / "out")
    assert content(tmp_path / "out") == content(adapters[0])


def test_a_publication_waits_for_a_collector_and_not_for_a_dead_one(tmp_path, adapters, monkeypatch):
    store = AdapterStore(tmp_path / "store")
    lease = "gc/" + secrets.token_hex(16)
    store.backend.create(lease, b"1")
    thread = threading.Thread(target=store.publish, args=(adapters[0], "a"))
    thread.start()
    thread.join(1.0)
    assert thread.is_alive() and store.list() == ()
    store.backend.delete(lease)
    thread.join(60)
    assert not thread.is_alive() and store.show("a").version == 1
    store.backend.create(lease, b"1")
    os.utime(Path(store.backend.root, lease), (0, 0))
    store.publish(adapters[0], "a")
    assert store.backend.entry(lease) is None


def _publish_all(url: str, folders: list[str], name: str, who: str) -> None:
    store = AdapterStore(url)
    for folder in folders:
        store.publish(folder, name, who=who, note=Path(folder).name)


def test_writers_and_collectors_at_once_lose_nothing(tmp_path, base, adapters):
    """Two processes publish under one name what lies in the store as old orphans, while a collector that may take those runs over and over."""
    store = AdapterStore(tmp_path / "store", grace_s=100)
    store.publish_base(base)
    folders = []
    for number in range(8):
        folder = Path(shutil.copytree(adapters[number % 2], tmp_path / f"adapter{number}"))
        manifest = json.loads((folder / MANIFEST_NAME).read_text())
        (folder / "README.md").write_text(f"adapter {number}")
        write_manifest(
            folder,
            manifest["kind"],
            **{key: value for key, value in manifest.items() if key not in ("kind", "format_version", "producer", "files")},
        )
        for path in folder.iterdir():
            store.objects.put(hashlib.sha256(path.read_bytes()).hexdigest(), path)
        folders.append(str(folder))
    age(store, 1000)
    context = multiprocessing.get_context("fork")
    writers = [
        context.Process(target=_publish_all, args=(str(tmp_path / "store"), folders[index::2], "a", f"writer{index}")) for index in (0, 1)
    ]
    for writer in writers:
        writer.start()
    removed = 0
    while any(writer.is_alive() for writer in writers):
        removed += len(store.gc().removed)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    events = store.history("a")
    assert removed > 0 and [event.version for event in events] == list(range(1, 9))
    assert sorted(event.note for event in events) == [f"adapter{number}" for number in range(8)]
    for event in events:
        store.pull(event.reference, tmp_path / "out", replace=True)
        assert content(tmp_path / "out") == content(tmp_path / event.note)


def test_threads_on_one_memory_store_get_a_version_each(adapters):
    url = f"memory://{secrets.token_hex(8)}"
    threads = [threading.Thread(target=_publish_all, args=(url, [str(adapters[0])] * 3, "a", f"t{index}")) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [event.version for event in AdapterStore(url).history("a")] == list(range(1, 13))


def _publish_and_die(url: str, folder: str, steps: int) -> None:
    """Publish and die, as by kill -9, at the `steps`-th write."""
    left = [steps]

    def count(function):
        def wrapped(*arguments, **options):
            left[0] -= 1
            if left[0] < 0:
                os._exit(9)
            return function(*arguments, **options)

        return wrapped

    Backend.put, Backend.create = count(Backend.put), count(Backend.create)
    AdapterStore(url).publish(folder, "a")


def test_a_killed_publication_leaves_no_version(tmp_path, adapters):
    store = AdapterStore(tmp_path / "store", grace_s=100)
    store.publish(adapters[0], "a")
    context = multiprocessing.get_context("fork")
    codes = []
    for steps in range(0, 12, 2):
        writer = context.Process(target=_publish_and_die, args=(str(tmp_path / "store"), str(adapters[1]), steps))
        writer.start()
        writer.join()
        codes.append(writer.exitcode)
        assert [event.version for event in store.history("a")] == list(range(1, 2 + codes.count(0)))
    assert codes[0] == 9 and codes.count(0) >= 1
    age(store, 1000)
    store.gc()
    store.pull("a@1", tmp_path / "out")
    assert content(tmp_path / "out") == content(adapters[0])


# --- backends ------------------------------------------------------------------------------------------------------------------


def test_a_backend_without_exclusive_create_is_refused():
    with pytest.raises(ConfigError, match="no exclusive create"):
        AdapterStore("http://127.0.0.1:1/store")
    with pytest.raises(ConfigError):
        AdapterStore("nonsense://x")


def test_storage_faults_are_one_line(tmp_path, adapters):
    (tmp_path / "file").write_text("x")
    with pytest.raises(PrismError) as caught:
        AdapterStore(tmp_path / "file" / "store").publish(adapters[0], "a")
    assert isinstance(caught.value, EnvironmentFault) and "\n" not in str(caught.value)


def test_create_is_exclusive_on_every_backend(store):
    assert store.backend.create("x/y", b"one") and not store.backend.create("x/y", b"two")
    assert store.backend.read("x/y") == b"one" and store.backend.names("x") == ["y"] and store.backend.names("none") == []


# --- command line --------------------------------------------------------------------------------------------------------------


def test_the_verbs(tmp_path, base, adapters, capsys, monkeypatch):
    monkeypatch.setenv("PRISM_RAY_STORE", str(tmp_path / "store"))

    def say(*arguments: str) -> str:
        assert run(["adapter", *arguments]) == 0
        return capsys.readouterr().out

    assert "no adapters" in say("list")
    assert "base" in say("publish-base", str(base))
    assert say("publish", str(adapters[0]), "a", "--note", "one", "--who", "ann").startswith("a@1")
    assert say("publish", str(adapters[1]), "a", "--base", str(base)).startswith("a@2")
    assert "a@2\t2 version(s)" in say("list") and "default/a@2" in say("list", "--all-tenants")
    assert json.loads(say("show", "a@1"))["who"] == "ann"
    assert "blocks differ" in say("diff", "a@1", "a@2")
    assert "a@1 is current" in say("revert", "a", "1", "--expected", "2")
    lines = say("history", "a").splitlines()
    assert len(lines) == 3 and "publish a@1" in lines[0] and "one" in lines[0] and "rollback a@1" in lines[2]
    assert "files verified" in say("pull", "a", str(tmp_path / "out"))
    assert content(tmp_path / "out") == content(adapters[0])
    assert "0 objects" in say("gc", "--dry-run")
    for wrong in (["show", "b"], ["pull", "a", str(tmp_path / "out")], ["revert", "a", "9"], ["show", "../x"]):
        assert run(["adapter", *wrong]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
