"""The local head: loopback only, token authentication on, nothing left behind."""

from __future__ import annotations

import ipaddress
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from prism_ray.dist.local import LocalHead, run_on_local_head, start, stop

pytestmark = pytest.mark.ray

ASK = """
import json, ray
ray.init("auto", log_to_driver=False)
answer = ray.get(ray.remote(lambda: __import__("prism_ray").__version__).remote())
import importlib
modules = ["prism_ray", "prism_kernels", "tune_spaces", "serve_apps"]
found = ray.get(ray.remote(lambda: [importlib.import_module(name).__name__ for name in modules]).remote())
print(json.dumps({"version": answer, "modules": found, "addresses": [node["NodeManagerAddress"] for node in ray.nodes()]}))
"""


def family(head: LocalHead) -> list[psutil.Process]:
    parent = psutil.Process(head.pid)
    found = {process.pid: process for process in [parent, *parent.children(recursive=True)]}
    for process in psutil.process_iter(["cmdline"]):
        if any(str(head.folder) in part for part in process.info["cmdline"] or ()):
            found |= {each.pid: each for each in [process, *process.children(recursive=True)]}
    return list(found.values())


def test_every_listener_is_on_the_loopback_and_tasks_import_the_packages(head: LocalHead):
    done = subprocess.run([sys.executable, "-c", ASK], env=head.env, capture_output=True, text=True, timeout=180, check=True)
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    assert answer["addresses"] == ["127.0.0.1"]
    assert answer["modules"] == ["prism_ray", "prism_kernels", "tune_spaces", "serve_apps"]
    listening = [
        connection.laddr.ip
        for process in family(head)
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) > 5
    outside = [ip for ip in listening if not (ipaddress.ip_address(ip).is_loopback or ip == "::ffff:127.0.0.1")]
    assert not outside, f"listening on {outside}"


def test_a_client_without_the_token_is_refused(head: LocalHead):
    env = head.env | {"RAY_AUTH_TOKEN": "0" * 64}
    ray = [sys.executable, "-m", "ray.scripts.scripts", "job", "list", "--address", head.dashboard]
    assert subprocess.run(ray, env=env, capture_output=True, timeout=120, check=False).returncode != 0
    assert subprocess.run(ray, env=head.env, capture_output=True, timeout=120, check=False).returncode == 0


def test_the_exit_code_is_the_commands_and_no_process_stays(tmp_path: Path):
    note = tmp_path / "address"
    script = f"import os, pathlib; pathlib.Path({str(note)!r}).write_text(os.environ['RAY_ADDRESS']); raise SystemExit(7)"
    assert run_on_local_head([sys.executable, "-c", script]) == 7
    port = note.read_text().rpartition(":")[2]
    # The head's port stands on the command line of each of its processes.
    left = [
        process.info["cmdline"]
        for process in psutil.process_iter(["cmdline"])
        if any(port in part for part in process.info["cmdline"] or ())
    ]
    assert not left


def test_a_signal_ends_the_head_and_the_command_with_it(tmp_path: Path):
    """SIGINT, and as in a background shell, which starts commands with it ignored; SIGTERM and SIGHUP share its handler."""
    number = signal.SIGINT
    note = tmp_path / "address"
    script = f"import os, pathlib, time; pathlib.Path({str(note)!r}).write_text(os.environ['RAY_ADDRESS']); time.sleep(600)"
    command = [sys.executable, "-m", "prism_ray.cli.main", "local", "--", sys.executable, "-c", script]
    process = subprocess.Popen(["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *command], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (note.is_file() and note.read_text()) and time.monotonic() < deadline:
        time.sleep(0.2)
    port = note.read_text().rpartition(":")[2]
    process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number
    left = [
        entry.info["cmdline"] for entry in psutil.process_iter(["cmdline"]) if any(port in part for part in entry.info["cmdline"] or ())
    ]
    assert not left
    assert not any(str(note) in " ".join(entry.info["cmdline"] or ()) for entry in psutil.process_iter(["cmdline"]))


def test_two_heads_live_side_by_side_and_one_survives_the_others_end(head: LocalHead):
    second = start(num_cpus=1)
    assert second.address != head.address
    stop(second)
    assert not second.folder.exists()
    done = subprocess.run([sys.executable, "-c", ASK], env=head.env, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
