"""One real Ray head on the loopback for all tests of this folder, and tiny models to run on it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest

from prism_ray.dist.local import LocalHead, start, stop
from prism_ray.models.tiny import save_tiny

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "train.task.max_train=64", "train.task.max_validation=16", "train.task.max_test=24", "train.benchmark.max_examples=10", "train.steps=6", "train.eval_every=3",
)  # fmt: skip


@pytest.fixture(scope="session")
def head() -> Iterator[LocalHead]:
    """A running head; stopped, with everything it started, at the end."""
    running = start(num_cpus=2)
    yield running
    stop(running)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny random Llama."""
    return str(save_tiny(tmp_path_factory.mktemp("tiny") / "model"))


@dataclass(frozen=True)
class Sweep:
    """A finished command of the sweep and what it wrote."""

    folder: Path
    code: int
    output: str

    @property
    def trials(self) -> pd.DataFrame:
        return pd.read_parquet(self.folder / "trials.parquet")

    @property
    def history(self) -> pd.DataFrame:
        return pd.read_parquet(self.folder / "history.parquet")

    @property
    def base(self) -> dict:
        return json.loads((self.folder / "base.json").read_text())


def sweep_command(*arguments: str) -> list[str]:
    """The command line of a sweep in a process of its own."""
    return [sys.executable, str(ROOT / "jobs" / "sweep_pqt.py"), *arguments]


def run_sweep(head: LocalHead, storage: Path, name: str, *arguments: str, timeout: int = 420) -> Sweep:
    """Run a sweep as a driver process on the head and wait for it."""
    done = subprocess.run(
        sweep_command(*arguments, f"name={name}", f"storage={storage}"),
        env=head.env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Sweep(storage / name, done.returncode, done.stdout + done.stderr)
