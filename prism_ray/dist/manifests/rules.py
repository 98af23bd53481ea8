"""What every manifest must hold, one function a rule. A rule yields findings and raises nothing; it is asked only when the schemas have passed.

Rules: versions agree (image tag, rayVersion, lock); the head takes no work; GPU groups start at 0 and end somewhere; idle nodes go; objects spill to a mounted folder; ports stay closed and
tokens on; no secret, no Python and no moving tag anywhere; jobs end and are shut down; files are called what they are.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from prism_ray.dist.manifests.groups import cluster_spec, groups
from prism_ray.dist.manifests.render import Manifest
from prism_ray.dist.manifests.values import PYTHON

TAG = re.compile(r"(?P<ray>\d+\.\d+\.\d+)-py(?P<python>\d+)-(?P<build>[A-Za-z0-9_.]+)")
FILE_NAME = re.compile(r"kuberay/ray-(cluster|job|service)\.[a-z0-9-]+\.yaml|launcher/[a-z0-9-]+\.yaml")
# Shapes of credentials; names of variables that hold one.
SECRETS = re.compile(
    r"AKIA[0-9A-Z]{16}|ASIA[0-9A-Z]{16}|-----BEGIN [A-Z ]*PRIVATE KEY|\bhf_[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bsk-[A-Za-z0-9_-]{20,}|\bAIza[0-9A-Za-z_-]{30,}"
)
SECRET_NAME = re.compile(r"(?i)(password|passwd|secret|token|api_?key|credentials?)$")
PYTHON_COMMAND = re.compile(r"\bpython[0-9.]*\s+(-\s*<<|-c\b|<<)")
HEALTH = ("RAY_health_check_period_ms", "RAY_health_check_timeout_ms", "RAY_health_check_failure_threshold")
LOGS = ("RAY_ROTATION_MAX_BYTES", "RAY_ROTATION_BACKUP_COUNT")
EXCLUDED = (".git", ".venv", "runs", "*.safetensors", "*.gguf", "*.parquet")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong: where, what, and how to mend it."""

    where: str
    what: str
    remedy: str

    def line(self) -> str:
        """For people."""
        return f"{self.where}: {self.what}; {self.remedy}"


Rule = Callable[[Manifest, str], Iterator[Finding]]


def versions(manifest: Manifest, ray: str) -> Iterator[Finding]:
    """Image tag == rayVersion == the lock's Ray, and the locks' Python."""
    if not manifest.is_launcher and cluster_spec(manifest)["rayVersion"] != ray:
        found = cluster_spec(manifest)["rayVersion"]
        yield Finding(where=f"{manifest.name} rayVersion", what=f"is {found}, the lock pins {ray}", remedy='write "${ray_version}"')
    for place, image in images(manifest.tree):
        tag = TAG.fullmatch(image.rpartition("/")[2].partition(":")[2])
        where = f"{manifest.name} {place}"
        if tag is None:
            yield Finding(where=where, what=f"'{image}' has no tag of the form <Ray>-py<Python>-<build>", remedy='write "${image_gpu}"')
        elif tag["ray"] != ray:
            yield Finding(where=where, what=f"its tag says Ray {tag['ray']}, the lock pins {ray}", remedy='write "${image_gpu}"')
        elif tag["python"] != PYTHON.replace(".", ""):
            yield Finding(
                where=where, what=f"its tag says Python {tag['python']}, the locks are for {PYTHON}", remedy='write "${image_gpu}"'
            )
    # A driver pickles with its own torch: nodes of one cluster with different images would disagree on it.
    different = {group.image for group in groups(manifest)}
    if len(different) > 1:
        yield Finding(
            where=manifest.name, what=f"nodes have {len(different)} images: {', '.join(sorted(different))}", remedy="one image a cluster"
        )


def images(tree: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """(dotted place, image) of every image in a tree."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            here = f"{place}.{key}".lstrip(".")
            if key in ("image", "head_image", "worker_image") and isinstance(value, str):
                yield here, value
            yield from images(value, here)
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from images(value, f"{place}.{number}")


def head_takes_no_work(manifest: Manifest, ray: str) -> Iterator[Finding]:
    """Ray schedules by what a node says it has: 0 CPUs and 0 GPUs, and no GPU that is paid for and idle."""
    for group in (group for group in groups(manifest) if group.head):
        where = f"{manifest.name} {group.where}"
        for flag, name, count in (("num-cpus", "CPU", group.cpus), ("num-gpus", "GPU", group.gpus)):
            if count != 0:
                yield Finding(where=where, what=f"Ray would count {count} {name} on the head", remedy=f"set its {name} to 0")
            if group.start.get(flag) != "0":
                yield Finding(where=where, what=f"the head starts without {flag}=0", remedy=f"add {flag}=0 to its start")
        if group.gpus_held:
            yield Finding(where=where, what=f"the head holds {group.gpus_held} GPU(s)", remedy="choose a machine without")
        if not manifest.is_launcher and group.environment.get("NVIDIA_VISIBLE_DEVICES") != "void":
            yield Finding(where=where, what="the head may see its node's GPUs", remedy="set NVIDIA_VISIBLE_DEVICES to void")


def scales_from_zero(manifest: Manifest, ray: str) -> Iterator[Finding]:
    """Workers from 0 to a stated maximum; nodes that are idle go."""
    workers = [group for group in groups(manifest) if not group.head]
    for group in workers:
        where = f"{manifest.name} {group.where}"
        if group.minimum:
            yield Finding(
                where=where, what=f"keeps {group.minimum} node(s) when nothing runs", remedy="set its minimum (and replicas) to 0"
            )
        if group.maximum is None:
            yield Finding(where=where, what="has no maximum", remedy="set one")
    if not any(group.maximum for group in workers):
        yield Finding(where=manifest.name, what="no group can grow", remedy="set a maximum above 0")
    if manifest.is_launcher:
        minutes = manifest.tree.get("idle_timeout_minutes")
        for name in ("max_workers", "idle_timeout_minutes"):
            if name not in manifest.tree:
                yield Finding(where=manifest.name, what=f"has no {name}", remedy="set it")
    else:
        minutes = cluster_spec(manifest)["autoscalerOptions"]["idleTimeoutSeconds"] / 60
    if minutes is not None and not 0 < minutes <= 60:
        yield Finding(where=manifest.name, what=f"idle nodes go after {minutes:g} minutes", remedy="set 1 to 60 minutes")


def markets(manifest: Manifest, ray: str) -> Iterator[Finding]:
    """Every group has a market and a machine type; GPU groups of a cluster are on both markets."""
    for group in groups(manifest):
        if group.market not in ("spot", "on_demand") or not group.instance:
            yield Finding(
                where=f"{manifest.name} {group.where}",
                what="has no machine type or market, so no price",
                remedy="add the annotations prism-ray/instance and prism-ray/market",
            )
    gpu = {group.market for group in groups(manifest) if group.gpus and not group.head}
    if gpu and gpu != {"spot", "on_demand"}:
        yield Finding(where=manifest.name, what=f"its GPU workers are all {gpu.pop()}", remedy="have a group on either market")


def spills_and_logs(manifest: Manifest, ray: str) -> Iterator[Finding]:
    """Objects spill to a mounted folder, never to a container's own layer; logs are bounded; the head's health checks are stated."""
    for group in groups(manifest):
        where = f"{manifest.name} {group.where}"
        folder = group.start.get("object-spilling-directory", "")
        if not any(folder == mount or folder.startswith(f"{mount}/") for mount in group.mounts):
            yield Finding(
                where=where,
                what=f"objects spill to '{folder}', which is no mounted folder",
                remedy="set object-spilling-directory below a mount",
            )
        wanted = (*LOGS, *HEALTH) if group.head else LOGS
        missing = [name for name in wanted if not group.environment.get(name, "").isdecimal()]
        if missing:
            yield Finding(where=where, what=f"does not set {', '.join(missing)}", remedy="add them to its environment")


def closed_and_signed(manifest: Manifest, ray: str) -> Iterator[Finding]:
    """Who reaches a job server can run anything: tokens are on, and a launcher's dashboard listens on the loopback alone."""
    if not manifest.is_launcher:
        return
    head = next(group for group in groups(manifest) if group.head)
    if head.environment.get("RAY_AUTH_MODE") != "token":
        yield Finding(where=f"{manifest.name} docker.run_options", what="tokens are off", remedy="add --env=RAY_AUTH_MODE=token")
    if head.start.get("dashboard-host") not in ("127.0.0.1", "localhost"):
        yield Finding(
            where=f"{manifest.name} head_start_ray_commands",
            what="the job server listens on the network",
            remedy="set --dashboard-host=127.0.0.1",
        )
    excluded = " ".join(str(pattern) for pattern in manifest.tree.get("rsync_exclude", []))
    missing = [name for name in EXCLUDED if name not in excluded]
    if missing:
        yield Finding(where=f"{manifest.name} rsync_exclude", what=f"does not name {', '.join(missing)}", remedy="add them")
    if any(manifest.tree.get(name) for name in ("setup_commands", "head_setup_commands", "worker_setup_commands")):
        yield Finding(
            where=f"{manifest.name} setup_commands", what="installs at start, so nodes may differ", remedy="put it into the image"
        )
    for name in ("setup_commands", "head_setup_commands", "worker_setup_commands"):
        if name not in manifest.tree:
            yield Finding(where=f"{manifest.name} {name}", what="is absent, so Ray's default installs another Ray", remedy="set it to []")


def jobs_end(manifest: Manifest, ray: str) -> Iterator[Finding]:
    """A job's cluster goes with it; the schema holds shutdownAfterJobFinishes and a deadline, this the retries."""
    if manifest.kind == "RayJob" and manifest.tree["spec"].get("backoffLimit", 0):
        yield Finding(
            where=f"{manifest.name} spec.backoffLimit",
            what="each retry starts a new cluster and a new deadline",
            remedy="set 0 and submit again",
        )


def plain_text_only(manifest: Manifest, ray: str) -> Iterator[Finding]:
    """No secret and no Python, not in nested text either."""
    for place, key, text in scalars(manifest.tree):
        where = f"{manifest.name} {place}"
        if SECRETS.search(text) or (SECRET_NAME.search(key) and not text.startswith("~/") and key not in ("name",)):
            yield Finding(where=where, what="looks like a secret", remedy="keep it in a Kubernetes Secret or a file of your own")
        if is_python(text):
            yield Finding(where=where, what="holds Python", remedy="put it into a file of the repository and name the file")


def scalars(tree: Any, place: str = "", key: str = "") -> Iterator[tuple[str, str, str]]:
    """(dotted place, nearest name, text) of every text in a tree; an environment entry's name is its variable's, `--env=NAME=value` counts as one."""
    if isinstance(tree, dict):
        named = tree.get("name") if set(tree) == {"name", "value"} else None
        for inner, value in tree.items():
            yield from scalars(value, f"{place}.{inner}".lstrip("."), str(named if named and inner == "value" else inner))
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from scalars(value, f"{place}.{number}", key)
    elif isinstance(tree, str):
        name, _, value = tree.removeprefix("--env=").partition("=")
        yield (place, name, value) if tree.startswith("--env=") else (place, key, tree)


def is_python(text: str) -> bool:
    """A command that feeds Python its program, or lines that are one: they parse, and import, define or decorate something."""
    if PYTHON_COMMAND.search(text):
        return True
    if not re.search(r"^\s*(import|from|def|class|@)", text, re.MULTILINE):
        return False
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return False
    return any(isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) for node in body)


def named_for_what_it_is(manifest: Manifest, ray: str) -> Iterator[Finding]:
    """ray-<kind>.<case>.yaml holds that kind."""
    found = FILE_NAME.fullmatch(manifest.name)
    if not found:
        yield Finding(where=manifest.name, what="is not called ray-<kind>.<case>.yaml", remedy="rename it")
    elif found[1] and f"Ray{found[1].capitalize()}" != manifest.kind:
        yield Finding(
            where=manifest.name,
            what=f"holds a {manifest.kind}",
            remedy=f"name it ray-{manifest.kind.removeprefix('Ray').lower()}.<case>.yaml",
        )


RULES: tuple[Rule, ...] = (
    named_for_what_it_is,
    versions,
    head_takes_no_work,
    scales_from_zero,
    markets,
    spills_and_logs,
    closed_and_signed,
    jobs_end,
    plain_text_only,
)
