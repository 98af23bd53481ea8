"""The store on S3: a real S3 server (moto's) in a process of its own on the loopback, spoken to over HTTP by s3fs.

The server answers one request at a time: moto looks for a key and then writes it in two steps, where S3 itself does both at once.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("s3fs", reason="needs the s3 extra")
pytest.importorskip("moto", reason="needs requirements/dev.txt")

from prism_ray.adapters.scale_plane import SCALE_PLANE_NAME
from prism_ray.adapters.store import AdapterStore
from prism_ray.adapters.store.objects import object_path
from prism_ray.cli.main import run
from prism_ray.core.errors import CheckpointError, ConfigError, EnvironmentFault
from tests.unit._adapter_folders import make_adapter, make_base

SERVER = """
import sys, threading
from moto.moto_server import threaded_moto_server as module
from moto.server import ThreadedMotoServer

lock = threading.Lock()

class OneAtATime(module.DomainDispatcherApplication):
    def __call__(self, environ, start_response):
        if sys.argv[1] == "careless":
            environ.pop("HTTP_IF_NONE_MATCH", None)
        with lock:
            return super().__call__(environ, start_response)

module.DomainDispatcherApplication = OneAtATime
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


def serve(kind: str):
    """(process, options for fsspec) of a running server; it ends when its standard input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    port = process.stdout.readline().strip()
    assert port.isdigit(), "the S3 server did not start"
    return process, {"endpoint_url": f"http://127.0.0.1:{port}", "key": "test", "secret": "test"}


@pytest.fixture(scope="module")
def options():
    import fsspec

    process, found = serve("honest")
    fsspec.filesystem("s3", **found).mkdir("adapters")
    yield found
    process.communicate(timeout=30)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [make_adapter(base, folder / f"a{seed}", seed) for seed in (1, 2)]


@pytest.fixture
def store(options, request) -> AdapterStore:
    return AdapterStore(f"s3://adapters/{request.node.name}", storage_options=options)


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_publish_pull_history_and_rollback(store, base, adapters, tmp_path):
    record = store.publish_base(base)
    for folder in adapters:
        assert store.publish(folder, "a").files[SCALE_PLANE_NAME]["encoding"] == "patch"
    store.rollback("a", 1, expected=2)
    store.pull("a", tmp_path / "one")
    store.pull("a@2", tmp_path / "two")
    store.pull_base(record.code_plane, record.scale_plane, tmp_path / "base")
    assert content(tmp_path / "one") == content(adapters[0]) and content(tmp_path / "two") == content(adapters[1])
    assert content(tmp_path / "base") == content(base)
    assert [(event.event, event.version) for event in store.history("a")] == [("publish", 1), ("publish", 2), ("rollback", 1)]
    assert [event.reference for event in store.list()] == ["a@1"] and store.diff("a@1", "a@2").changed > 0


def test_create_is_exclusive(store):
    assert store.backend.create("x/y", b"one") and not store.backend.create("x/y", b"two")
    assert store.backend.read("x/y") == b"one"
    # A put that is repeated because its answer was lost meets its own bytes.
    assert store.backend.create("x/y", b"one")
    store.backend.require_exclusive_create()
    assert store.backend.names("probe") == []


def test_a_corrupted_object_is_named(store, adapters, tmp_path):
    event = store.publish(adapters[0], "a")
    store.backend.put(object_path(event.files[SCALE_PLANE_NAME]["object"]), b"other")
    with pytest.raises(CheckpointError, match="corrupted"):
        store.pull("a", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_gc_goes_by_the_servers_clock(store, adapters, tmp_path):
    store.publish(adapters[0], "a")
    orphan = "ab" * 32
    store.backend.put(object_path(orphan), b"x")
    found = store.gc()
    assert (found.removed, found.young) == ((), 1) and store.backend.names("gc") == []
    store.pull("a", tmp_path / "out")


def _publish_many(url: str, options: dict, folder: Path, who: str) -> None:
    for _ in range(3):
        AdapterStore(url, storage_options=options).publish(folder, "a", who=who)


def test_two_writers_at_once_lose_nothing(store, options, adapters, tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [
        context.Process(target=_publish_many, args=(store.backend.url, options, adapters[index], f"writer{index}")) for index in (0, 1)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
        assert writer.exitcode == 0
    events = store.history("a")
    assert [event.version for event in events] == [1, 2, 3, 4, 5, 6]
    assert sorted(event.who for event in events) == ["writer0"] * 3 + ["writer1"] * 3
    for event in events:
        store.pull(event.reference, tmp_path / str(event.version))
        assert content(tmp_path / str(event.version)) == content(adapters[int(event.who[-1])])


def test_a_server_that_ignores_the_condition_is_refused(adapters):
    import fsspec

    process, found = serve("careless")
    try:
        fsspec.filesystem("s3", **found).mkdir("adapters")
        store = AdapterStore("s3://adapters/store", storage_options=found)
        with pytest.raises(EnvironmentFault, match="ignores conditional writes"):
            store.publish(adapters[0], "a")
        assert store.list() == () and store.backend.files("") == {}
    finally:
        process.communicate(timeout=30)


def test_what_is_not_there(store, adapters, tmp_path, options):
    with pytest.raises(ConfigError, match="no adapter"):
        store.show("a")
    with pytest.raises(EnvironmentFault) as caught:
        AdapterStore("s3://no-such-bucket-here/x", storage_options=options).publish(adapters[0], "a")
    assert "\n" not in str(caught.value)


def test_the_command_line_takes_the_endpoint_from_the_environment(options, adapters, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint_url"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    url = "s3://adapters/command-line"
    assert run(["adapter", "publish", str(adapters[0]), "a", "--store", url]) == 0
    assert run(["adapter", "pull", "a@1", str(tmp_path / "out"), "--store", url]) == 0
    assert content(tmp_path / "out") == content(adapters[0])
    assert "a@1" in capsys.readouterr().out
