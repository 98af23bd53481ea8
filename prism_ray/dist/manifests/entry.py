"""Whether what a manifest starts is there: a job's script and its arguments, an application's import path. Nothing is imported and nothing runs.

Images hold the repository's jobs at IMAGE_ROOT; a script's arguments go through the same command line as in the job, up to the point where it would start.
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml

from prism_ray.core.errors import ConfigError, PrismError
from prism_ray.dist.manifests.render import Manifest
from prism_ray.dist.manifests.rules import Finding

IMAGE_ROOT = "/opt/prism-ray"
"""Where the images have the repository; Dockerfiles are held to it."""

ParseArguments = Callable[[list[str]], None]


def entry_findings(manifest: Manifest, root: Path, parse: ParseArguments) -> Iterator[Finding]:
    """Findings about a job's entrypoint or a service's applications."""
    if manifest.kind == "RayJob":
        yield from _entrypoint(manifest, root, parse)
    elif manifest.kind == "RayService":
        yield from _applications(manifest, root)


def _entrypoint(manifest: Manifest, root: Path, parse: ParseArguments) -> Iterator[Finding]:
    where = f"{manifest.name} spec.entrypoint"
    words = shlex.split(manifest.tree["spec"]["entrypoint"])
    script = words[1].removeprefix(f"{IMAGE_ROOT}/") if len(words) > 1 else ""
    if not words or words[0] != "python" or not script.startswith("jobs/"):
        yield Finding(where=where, what=f"is not 'python {IMAGE_ROOT}/jobs/<script> …'", remedy="start a script of jobs/")
        return
    if not (root / script).is_file():
        yield Finding(where=where, what=f"there is no {script}", remedy="name a script of jobs/")
        return
    try:
        parse(script_arguments(root / script, words[2:]))
    except PrismError as error:
        yield Finding(where=where, what=f"{script} would refuse its arguments ({error})", remedy="mend the entrypoint or the values")


def script_arguments(script: Path, given: list[str]) -> list[str]:
    """What a script of jobs/ passes to the command line: the list in its `run([...])`, with the given words where it says *sys.argv[1:]."""
    calls = [
        node
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "run"
        and node.args
        and isinstance(node.args[0], ast.List)
    ]
    if len(calls) != 1:
        raise ConfigError("calls run([...]) not exactly once", where=str(script), remedy="keep jobs to one call of the command line")
    words: list[str] = []
    for item in calls[0].args[0].elts:  # type: ignore[attr-defined]
        if isinstance(item, ast.Starred):
            words += given
        elif isinstance(item, ast.Constant) and isinstance(item.value, str):
            words.append(item.value)
        else:
            raise ConfigError(
                "passes something other than texts and sys.argv", where=str(script), remedy="keep jobs to one call of the command line"
            )
    return words


def applications(manifest: Manifest) -> list[tuple[str, str]]:
    """(name, import path) of every application of a service."""
    config = yaml.safe_load(manifest.tree["spec"]["serveConfigV2"])
    return [(str(entry.get("name")), str(entry.get("import_path"))) for entry in config.get("applications", [])]


def _applications(manifest: Manifest, root: Path) -> Iterator[Finding]:
    found = applications(manifest)
    if not found:
        yield Finding(where=f"{manifest.name} spec.serveConfigV2", what="has no application", remedy="add one")
    for name, path in found:
        reason = unresolved(path, root)
        if reason:
            yield Finding(
                where=f"{manifest.name} application {name}", what=f"import path '{path}': {reason}", remedy="name a function of serve_apps/"
            )


def unresolved(path: str, root: Path) -> str:
    """Why `package.module:name` cannot be imported from the repository; empty where it can. The file is parsed, not imported."""
    module, separator, name = path.partition(":")
    if not separator or not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        return "is not of the form package.module:name"
    base = root.joinpath(*module.split("."))
    file = next((each for each in (base.with_suffix(".py"), base / "__init__.py") if each.is_file()), None)
    if file is None:
        return f"there is no {base.with_suffix('.py').relative_to(root)}"
    body = ast.parse(file.read_text(encoding="utf-8")).body
    names = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    names |= {target.id for node in body if isinstance(node, ast.Assign) for target in node.targets if isinstance(target, ast.Name)}
    return "" if name in names else f"{file.relative_to(root)} defines no {name}"
