"""Shared places: the real data sets, a scratch cache, and the environment every test runs in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# The suite shares two cores with the workers it starts; spinning threads cost more there than they bring to tiny models.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Folder of the real data sets; tests that need one are skipped where it is absent."""
    folder = Path(os.environ.get("PRISM_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder} (set PRISM_DATA)")
    return folder
