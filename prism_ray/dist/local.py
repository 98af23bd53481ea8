"""A Ray head on this machine for quickstarts and tests: loopback only, token authentication on, stopped by its own process ids.

`ray stop` ends every Ray process of the machine, other people's clusters too. Here the head runs as `ray start --head --block` in a session of its own; ending
that session ends this cluster and nothing else.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from prism_ray.core.errors import EnvironmentFault

HOST = "127.0.0.1"
START_TIMEOUT_S = 120


@dataclass(frozen=True, kw_only=True)
class LocalHead:
    """address: host:port of the GCS; dashboard: URL for `ray job submit`; pid: the head's supervising process; env: for everything that talks to it."""

    address: str
    dashboard: str
    pid: int
    folder: Path
    env: dict[str, str]


def environment() -> dict[str, str]:
    """Environment of head and clients: the interpreter's own scripts first, token authentication, no usage reports, Train V2."""
    scripts = str(Path(sys.executable).parent)
    env = dict(os.environ)
    env["PATH"] = scripts + os.pathsep + env.get("PATH", "")
    env |= {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1", "TOKENIZERS_PARALLELISM": "false"}
    # `ray start` replaces 127.0.0.1 by the machine's outer address, and then listens on every interface, unless clusters are switched off by this
    # variable, which Ray reads on every system whatever its name says.
    env["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    env.setdefault("DS_ACCELERATOR", "cpu")
    # transformers' loading bars flood a job log (field case RAY-06).
    env.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    env.pop("RAY_ADDRESS", None)
    return env


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on at this moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def start(*, num_cpus: float = 2, object_store_bytes: int = 200 << 20) -> LocalHead:
    """Start a head and wait until its job server answers. Raises EnvironmentFault with the end of its log when it does not."""
    ray = shutil.which("ray", path=environment()["PATH"])
    if ray is None:
        raise EnvironmentFault("the 'ray' command is not installed", remedy="pip install 'prism-ray[ray]'")
    env = environment()
    subprocess.run([ray, "get-auth-token", "--generate"], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    # Unix socket paths are limited to 107 bytes, so the folder's name stays short.
    folder = Path(tempfile.mkdtemp(prefix="prism-ray-"))
    port, dashboard, client, agent = free_ports(4)
    command = [
        ray, "start", "--head", "--block", f"--node-ip-address={HOST}", f"--port={port}", f"--dashboard-host={HOST}", f"--dashboard-port={dashboard}",
        f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}", f"--num-cpus={num_cpus:g}",
        f"--object-store-memory={object_store_bytes}", "--disable-usage-stats", f"--temp-dir={folder}",
    ]  # fmt: skip
    log = folder / "head.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, env=env, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )
    head = LocalHead(
        address=f"{HOST}:{port}",
        dashboard=f"http://{HOST}:{dashboard}",
        pid=process.pid,
        folder=folder,
        env=env | {"RAY_ADDRESS": f"{HOST}:{port}", "RAY_API_SERVER_ADDRESS": f"http://{HOST}:{dashboard}"},
    )
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if _answers(head.dashboard):
            return head
        time.sleep(0.3)
    tail = log.read_text(errors="replace").strip().splitlines()[-3:]
    stop(head)
    raise EnvironmentFault(f"the Ray head did not come up: {' | '.join(tail)}", where=head.address, remedy=f"see {log}")


def _answers(dashboard: str) -> bool:
    try:
        with urllib.request.urlopen(f"{dashboard}/api/version", timeout=2):
            return True
    except urllib.error.HTTPError as error:
        return error.code in (401, 403)  # it is up, and asks for the token
    except OSError:
        return False


def stop(head: LocalHead) -> None:
    """End the head and every process it started (workers run in sessions of their own), then remove its folder."""
    # More than once: while the head goes down its raylet may still start an agent or a worker.
    for _ in range(5):
        processes = _processes(head)
        if not processes:
            break
        for process in processes:
            _signal(process, signal.SIGTERM)
        _, alive = psutil.wait_procs(processes, timeout=10)
        for process in alive:
            _signal(process, signal.SIGKILL)
        psutil.wait_procs(alive, timeout=5)
    shutil.rmtree(head.folder, ignore_errors=True)


def _processes(head: LocalHead) -> list[psutil.Process]:
    """The head's supervising process, what it started, and every Ray process of its folder; no zombies."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter(["cmdline"]):
        if process.pid == head.pid or _belongs(process, head):
            try:
                found |= {each.pid: each for each in (process, *process.children(recursive=True)) if each.status() != psutil.STATUS_ZOMBIE}
            except psutil.NoSuchProcess:
                continue
    return list(found.values())


def _belongs(process: psutil.Process, head: LocalHead) -> bool:
    """Whether a Ray process was started for this head's folder."""
    return any(str(head.folder) in part for part in process.info["cmdline"] or ())


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


@contextmanager
def local_head(*, num_cpus: float = 2) -> Iterator[LocalHead]:
    """A head for the length of a block."""
    head = start(num_cpus=num_cpus)
    try:
        yield head
    finally:
        stop(head)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Turn signals that end a process into SystemExit, so that what was started is stopped. SIGINT too: a shell starts background commands with it ignored."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_on_local_head(command: Sequence[str], *, num_cpus: float = 2) -> int:
    """Run a command against a head of its own; returns the command's exit code. SIGINT, SIGTERM and SIGHUP end both, then this process."""
    with _ended_by_signals(), local_head(num_cpus=num_cpus) as head:
        print(f"Ray head on {head.address}, dashboard {head.dashboard}", flush=True)
        return subprocess.run(list(command), env=head.env, check=False).returncode
