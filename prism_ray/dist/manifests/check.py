"""Everything about cluster/ that can be known without a cloud account: `prism-ray cluster check`.

In order: the manifests' schemas (Ray's own for the launcher and for Serve, ours for KubeRay, and Ray's reading of a RayCluster, which its autoscaler would do); the rules; entry points; image definitions;
runtime environments; the versions of locks, project file and installed Ray; the job package; prices. A manifest that fails its schema is asked nothing more.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import ray
import yaml

from prism_ray.core.errors import ConfigError, ResourceError, one_line
from prism_ray.core.workdir import check_package
from prism_ray.dist.manifests.costs import Cost, Prices, cost
from prism_ray.dist.manifests.entry import IMAGE_ROOT, ParseArguments, entry_findings
from prism_ray.dist.manifests.render import Manifest, render_all
from prism_ray.dist.manifests.rules import RULES, SECRETS, Finding
from prism_ray.dist.manifests.schema import SPECS, kuberay_schema, schema_errors
from prism_ray.dist.manifests.values import PROFILES, PYTHON, Values, pinned, read_yaml

# What Ray's launcher, KubeRay's probes and the compilers of Triton and DeepSpeed run inside a container.
IMAGE_PACKAGES = ("build-essential", "openssh-client", "rsync", "wget")


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The outcome. manifests: rendered; left_out: names for which the values have no section; package: table of what a job uploads."""

    manifests: list[Manifest]
    left_out: list[str]
    findings: list[Finding]
    costs: list[Cost]
    package: str


def check(source: Path, values: Values, prices: Prices, root: Path, parse: ParseArguments, *, limit_bytes: int) -> Checked:
    """Check a folder like cluster/. root: the repository, for locks, jobs and applications. Raises ConfigError only for input that cannot be read at all."""
    manifests, left_out = render_all(source, values, root)
    version = pinned(root, "ray")
    findings = [*_versions(root, version), *_images(source), *_environments(source)]
    costs = []
    for manifest in manifests:
        wrong, readable = manifest_findings(manifest, root, version, parse)
        findings += wrong
        try:
            costs += [cost(manifest, prices, _provider(manifest, values))] if readable else []
        except ConfigError as error:
            findings.append(Finding(where=f"{manifest.name} {error.where}", what=error.what, remedy=error.remedy))
    try:
        package = check_package(root, limit_bytes)
    except ResourceError as error:
        package = ""
        findings.append(Finding(where=f"job package {error.where}", what=error.what, remedy=error.remedy))
    return Checked(manifests=manifests, left_out=left_out, findings=findings, costs=costs, package=package)


def manifest_findings(manifest: Manifest, root: Path, version: str, parse: ParseArguments) -> tuple[list[Finding], bool]:
    """What is wrong with one manifest, and whether it passed its schema, so that the rest could be asked. version: Ray's, of the locks."""
    wrong = list(_schema(manifest))
    if wrong:
        return wrong, False
    found = [finding for rule in RULES for finding in rule(manifest, version)]
    return found + list(entry_findings(manifest, root, parse)), True


def _provider(manifest: Manifest, values: Values) -> str:
    if manifest.is_launcher:
        return str(manifest.tree["provider"]["type"])
    return values.kubernetes.provider if values.kubernetes else ""


def _schema(manifest: Manifest) -> Iterator[Finding]:
    if manifest.is_launcher:
        yield from _launcher_schema(manifest)
        return
    if manifest.kind not in SPECS:
        yield Finding(where=manifest.name, what=f"is of kind '{manifest.kind}'", remedy=f"known: {', '.join(SPECS)}")
        return
    wrong = [
        Finding(where=f"{manifest.name} {place}".strip(), what=what, remedy="see prism_ray/dist/manifests/schema.py")
        for place, what in schema_errors(manifest.tree, kuberay_schema(manifest.kind))
    ]
    yield from wrong
    if not wrong:
        yield from _as_the_autoscaler_reads_it(manifest)
        if manifest.kind == "RayService":
            yield from _serve_schema(manifest)


def _launcher_schema(manifest: Manifest) -> Iterator[Finding]:
    """`ray up`'s own preparation and schema, and what the schema leaves open but the rules read."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    needed = ("docker", "available_node_types", "head_node_type", "head_start_ray_commands", "worker_start_ray_commands", "max_workers")
    missing = [name for name in needed if name not in manifest.tree]
    if missing:
        yield Finding(where=manifest.name, what=f"lacks {', '.join(missing)}", remedy="state it; Ray's defaults are for another cluster")
        return
    try:
        validate_config(prepare_config(copy.deepcopy(manifest.tree)))
    except jsonschema.ValidationError as error:
        place = ".".join(str(part) for part in error.absolute_path)
        yield Finding(
            where=f"{manifest.name} {place}".strip(), what=one_line(ValueError(error.message)), remedy="see Ray's cluster YAML reference"
        )
    except (ValueError, RuntimeError, KeyError, TypeError, AttributeError, AssertionError) as error:
        yield Finding(where=manifest.name, what=f"Ray refuses it ({one_line(error)})", remedy="see Ray's cluster YAML reference")


def _as_the_autoscaler_reads_it(manifest: Manifest) -> Iterator[Finding]:
    """Ray's autoscaler turns a RayCluster into its own config and validates that; here it does so beforehand."""
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    from prism_ray.dist.manifests.groups import cluster_spec

    try:
        _derive_autoscaling_config_from_ray_cr({"metadata": manifest.tree["metadata"], "spec": copy.deepcopy(cluster_spec(manifest))})
    except (ValueError, RuntimeError, KeyError, TypeError, jsonschema.ValidationError) as error:
        yield Finding(where=manifest.name, what=f"Ray's autoscaler refuses it ({one_line(error)})", remedy="mend the group it names")


def _serve_schema(manifest: Manifest) -> Iterator[Finding]:
    from ray.serve.schema import ServeDeploySchema

    where = f"{manifest.name} spec.serveConfigV2"
    try:
        ServeDeploySchema.model_validate(yaml.safe_load(manifest.tree["spec"]["serveConfigV2"]))
    except yaml.YAMLError as error:
        yield Finding(where=where, what=f"is no YAML ({one_line(error)})", remedy="mend the text")
    except ValueError as error:
        yield Finding(where=where, what=f"Ray Serve refuses it ({one_line(error)})", remedy="see Ray Serve's config reference")


def _versions(root: Path, version: str) -> Iterator[Finding]:
    """One Ray everywhere: both locks, the project file, and the client that would submit."""
    other = pinned(root, "ray", "gpu")
    if other != version:
        yield Finding(
            where="requirements/gpu.txt", what=f"pins Ray {other}, requirements/cpu.txt {version}", remedy="renew the locks together"
        )
    project = root / "pyproject.toml"
    found = re.search(r"ray\[[a-z,]*\]==([0-9.]+)", project.read_text(encoding="utf-8")) if project.is_file() else None
    if found and found[1] != version:
        yield Finding(where="pyproject.toml", what=f"asks for Ray {found[1]}, the locks pin {version}", remedy="change both")
    if ray.__version__ != version:
        yield Finding(where="this environment", what=f"has Ray {ray.__version__}, the locks pin {version}", remedy="make env")


def _images(source: Path) -> Iterator[Finding]:
    for profile in PROFILES:
        path = source / "images" / f"{profile}.Dockerfile"
        if not path.is_file():
            yield Finding(where=f"images/{profile}.Dockerfile", what="is missing", remedy="both profiles need an image")
            continue
        for what, remedy in image_faults(path.read_text(encoding="utf-8"), profile, source.resolve().parent):
            yield Finding(where=f"images/{profile}.Dockerfile", what=what, remedy=remedy)


def image_faults(text: str, profile: str, root: Path) -> Iterator[tuple[str, str]]:
    """(what, remedy) of an image definition: base, lock, parts of the repository, user, tools."""
    lines = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", text)).splitlines()
    bases = [line.split()[1] for line in lines if line.startswith("FROM ")]
    if len(bases) != 1 or not re.fullmatch(rf"python:{re.escape(PYTHON)}\.\d+-slim-[a-z]+", bases[0]):
        yield f"its base is {bases}", f"start from python:{PYTHON}.<patch>-slim-<release>"
    body = "\n".join(lines)
    if f"--no-deps --no-build-isolation -r requirements/{profile}.txt" not in body:
        yield f"does not install requirements/{profile}.txt as it stands", "pip install --no-deps --no-build-isolation -r it"
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1] if not word.startswith("--")]
    yield from ((f"copies {name}, which is not there", "name an existing file") for name in copied if not (root / name).exists())
    yield from (
        (f"does not copy {name}", "jobs and applications run from the image")
        for name in ("prism_ray", "kernels", "jobs", "tune_spaces", "serve_apps")
        if name not in copied
    )
    if f"WORKDIR {IMAGE_ROOT}" not in lines:
        yield f"does not work in {IMAGE_ROOT}", f"entry points begin with {IMAGE_ROOT}/"
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    if not users or users[-1] in ("root", "0"):
        yield "runs as root", "end with USER ray"
    yield from (
        (f"lacks {name}", "add it to apt-get install") for name in IMAGE_PACKAGES if not re.search(rf"apt-get install[^&]*\b{name}\b", body)
    )
    if SECRETS.search(text):
        yield "holds a secret", "give it to the process that needs it, never to an image"


def _environments(source: Path) -> Iterator[Finding]:
    """Runtime environments: Ray's own validation, and no local or pip surprises."""
    from ray.runtime_env import RuntimeEnv

    for path in sorted(source.glob("runtime-env.*.yaml")):
        tree: dict[str, Any] = read_yaml(path)
        try:
            RuntimeEnv(**tree)
        except (ValueError, TypeError) as error:
            yield Finding(where=path.name, what=f"Ray refuses it ({one_line(error)})", remedy="see Ray's runtime environment reference")
        for name in sorted({"pip", "uv", "conda"} & set(tree)):
            yield Finding(where=path.name, what=f"installs by {name} at every start", remedy="put it into the image")
        missing = [name for name in (".git/", ".venv/") if name not in tree.get("excludes", [])]
        if missing:
            yield Finding(where=path.name, what=f"does not exclude {', '.join(missing)}", remedy="add them to excludes")
