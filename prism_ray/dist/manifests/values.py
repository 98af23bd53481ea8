"""The account-specific values of cluster/, as one strict config read from one YAML file.

A value goes into YAML text, so its characters are limited to those that cannot end a scalar, start a comment, a mapping or a command. Names that contain
`example` are placeholders of the shipped file. Ray's version is no value: it is read from the locks in requirements/, so that no manifest can name another.
Refuses unknown keys, wrong types, sizes that contradict each other, and files that are no YAML mapping.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

import yaml
from pydantic import AfterValidator, Field, model_validator

from prism_ray.core.config import Config, suggest
from prism_ray.core.errors import ConfigError

PYTHON = "3.11"
"""The Python of the locks, of the images and of everybody who submits to them."""
PROFILES = ("cpu", "gpu")
PLACEHOLDER_WORD = "example"
SECTIONS = ("aws", "gcp", "kubernetes")
ALLOWED = re.compile(r"[A-Za-z0-9/](?:[A-Za-z0-9._:/@+=,-]*[A-Za-z0-9/_=+-])?")
C = TypeVar("C", bound=Config)
DNS_LABEL = re.compile(r"[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?")


def _scalar(value: str) -> str:
    if not ALLOWED.fullmatch(value):
        raise ValueError("only letters, digits and . _ : / @ + = , - may be in a manifest's value, and no punctuation at its ends")
    return value


def _dns_label(value: str) -> str:
    # KubeRay appends to it; Kubernetes takes 63 characters in all.
    if not DNS_LABEL.fullmatch(value):
        raise ValueError("must be at most 40 lowercase letters, digits and '-', and begin with a letter")
    return value


Scalar = Annotated[str, AfterValidator(_scalar)]
DnsLabel = Annotated[str, AfterValidator(_dns_label)]


class Images(Config):
    """registry: where images are pushed; build: name of one build, never given twice."""

    registry: Scalar
    build: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]{1,40}$")]


class Node(Config):
    """One machine, or what a pod asks of one. instance: the type's name in the price table."""

    instance: Scalar
    cpus: int = Field(ge=1)
    memory_gib: int = Field(ge=1)


class GpuNodes(Node):
    """GPU machines of two groups that differ in market alone; each starts at 0."""

    gpus: int = Field(ge=1)
    max_spot: int = Field(ge=0)
    max_on_demand: int = Field(ge=0)

    @model_validator(mode="after")
    def _some(self) -> Self:
        if not self.max_spot + self.max_on_demand:
            raise ValueError("max_spot and max_on_demand are both 0, so no GPU would ever come")
        return self


class CpuNodes(Node):
    """CPU workers from 0 to max_nodes."""

    max_nodes: int = Field(ge=1)


class Aws(Config):
    """nfs: export that all nodes mount at /shared."""

    region: Scalar
    zones: Scalar
    ami: Scalar
    nfs: Scalar
    root_disk_gib: int = Field(ge=100)
    head: Node
    gpu: GpuNodes


class Gcp(Config):
    """nfs: export that all nodes mount at /shared."""

    project: Scalar
    region: Scalar
    zone: Scalar
    image: Scalar
    nfs: Scalar
    root_disk_gib: int = Field(ge=100)
    head: Node
    gpu: GpuNodes


class Kubernetes(Config):
    """provider: whose prices count. shm_gib: memory of a GPU pod that its object store may take."""

    provider: Literal["aws", "gcp"]
    namespace: DnsLabel
    shared_claim: DnsLabel
    redis: Scalar
    gpu_label: Scalar
    gpu_value: Scalar
    spot_label: Scalar
    spot_value: Scalar
    shm_gib: int = Field(ge=1)
    scratch_gib: int = Field(ge=1)
    head: Node
    gpu: GpuNodes
    cpu: CpuNodes

    @model_validator(mode="after")
    def _memory(self) -> Self:
        if self.shm_gib >= self.gpu.memory_gib:
            raise ValueError(f"shm_gib {self.shm_gib} counts as the pod's memory, of which there are {self.gpu.memory_gib} GiB")
        return self


class SweepJob(Config):
    """space: module:function of tune_spaces; model: any source that all nodes reach."""

    space: Scalar
    model: Scalar
    deadline_hours: int = Field(ge=1, le=24 * 14)


class CalibrateJob(Config):
    """data: calibration text as a URI; out: name of the folder to write below /shared/models."""

    model: Scalar
    data: Scalar
    out: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    workers: int = Field(ge=1)
    deadline_hours: int = Field(ge=1, le=24 * 14)


class Serve(Config):
    """base: folder of the 4-bit base; store: where adapters are."""

    base: Scalar
    store: Scalar


class Jobs(Config):
    """What the shipped jobs and endpoints run."""

    sweep: SweepJob
    calibrate: CalibrateJob
    serve: Serve


class Values(Config):
    """Everything that the manifests take from the user. A section of SECTIONS that is absent leaves its manifests out."""

    name: DnsLabel
    image: Images
    idle_minutes: int = Field(ge=1, le=60)
    jobs: Jobs
    aws: Aws | None = None
    gcp: Gcp | None = None
    kubernetes: Kubernetes | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if all(getattr(self, name) is None for name in SECTIONS):
            raise ValueError(f"none of the sections {', '.join(SECTIONS)} is there")
        return self


def read_yaml(path: Path) -> dict[str, Any]:
    """A file that holds one YAML mapping; ConfigError, with its line, for anything else."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})", where=str(path), remedy="give an existing file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"is no YAML ({reason})", where=where, remedy="mend the line") from None
    if not isinstance(tree, dict):
        raise ConfigError("must hold one YAML mapping", where=str(path), remedy="see cluster/values.example.yaml")
    return tree


def load_config(kind: type[C], path: Path, example: str) -> C:
    """A config from a YAML file; its errors name the file and the key."""
    tree = read_yaml(path)
    if any(not isinstance(key, str) for key in tree):
        raise ConfigError("has a key that is no text", where=str(path), remedy=f"see {example}")
    return _load(kind, tree, f"{path}: ", example)


def _load(kind: type[C], tree: dict[str, Any], prefix: str, example: str) -> C:
    """Inner sections first, so that an error names its section as well as its key."""
    for name, value in tree.items():
        # Before what is missing: a misspelt name is both, and this is the one that says how it is spelt.
        if name not in kind.model_fields:
            raise ConfigError("there is no such value", where=f"{prefix}{name}", remedy=suggest(str(name), sorted(kind.model_fields)))
        inner = _section(kind, name)
        if inner is not None and isinstance(value, dict):
            _load(inner, value, f"{prefix}{name}.", example)
    try:
        return kind.load(tree)
    except ConfigError as error:
        own = "" if error.where == kind.__name__ else error.where
        raise ConfigError(error.what, where=f"{prefix}{own}".rstrip(".: "), remedy=error.remedy or f"see {example}") from None


def _section(kind: type[Config], name: str) -> type[Config] | None:
    """The config class of a field, whether it may be absent or not."""
    info = kind.model_fields.get(name)
    choices = () if info is None else (info.annotation, *get_args(info.annotation))
    return next((choice for choice in choices if isinstance(choice, type) and issubclass(choice, Config)), None)


def load_values(path: Path) -> Values:
    """Values from a file."""
    return load_config(Values, path, "cluster/values.example.yaml")


def pinned(root: Path, package: str, profile: str = "cpu") -> str:
    """The version of a package in a profile's lock."""
    lock = root / "requirements" / f"{profile}.txt"
    try:
        text = lock.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})", where=str(lock), remedy="run in the repository's root") from None
    found = re.search(rf"^{re.escape(package)}==(\S+)$", text, re.MULTILINE)
    if not found:
        raise ConfigError(f"does not pin {package}", where=str(lock), remedy="renew the lock (requirements/README.md)")
    return found[1]


def placeholders(values: Values, root: Path) -> dict[str, str | int]:
    """Dotted name to scalar: every value, and what follows from the values and the locks."""
    ray = pinned(root, "ray")
    flat: dict[str, str | int] = dict(_flatten(values.to_dict()))
    flat |= {"ray_version": ray, "idle_seconds": 60 * values.idle_minutes}
    tag = f"{ray}-py{PYTHON.replace('.', '')}-{values.image.build}"
    flat |= {f"image_{profile}": f"{values.image.registry}/prism-ray-{profile}:{tag}" for profile in PROFILES}
    for name in ("sweep", "calibrate"):
        flat[f"jobs.{name}.deadline_seconds"] = 3600 * int(getattr(values.jobs, name).deadline_hours)
    for name in SECTIONS:
        section = getattr(values, name)
        if section is not None:
            flat[f"{name}.gpu.max_nodes"] = section.gpu.max_spot + section.gpu.max_on_demand
    return flat


def _flatten(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, str | int]]:
    found: list[tuple[str, str | int]] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            found += _flatten(value, f"{prefix}{key}.")
        elif value is not None:
            found.append((f"{prefix}{key}", value))
    return found
