"""Values put into the manifests: `${name}` in YAML text becomes a scalar, and nothing else can change.

Text is replaced, so comments and order stay. Then two trees are compared: the rendered text, parsed, and the template, parsed first and replaced scalar by
scalar. Only when they are equal did no value break out of its place, and is every number a number and every text a text; otherwise the file is refused.
All files are written, or none.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from prism_ray.core.config import suggest
from prism_ray.core.errors import ConfigError
from prism_ray.core.files import atomic_folder, write_json
from prism_ray.dist.manifests.values import PLACEHOLDER_WORD, SECTIONS, Values, placeholders

FOLDERS = ("launcher", "kuberay")
RECORD = "rendered.json"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The same safe loader, in C where PyYAML has it: some ten times faster."""
PLACEHOLDER = re.compile(r"\$\{([^}\n]*)\}")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One rendered file. name: path below cluster/; text: with comments; tree: parsed; used: placeholders that it takes."""

    name: str
    text: str
    tree: dict[str, Any]
    used: frozenset[str] = field(default=frozenset())

    @property
    def is_launcher(self) -> bool:
        """Whether `ray up` reads it; else kubectl does."""
        return self.name.startswith("launcher/")

    @property
    def kind(self) -> str:
        """RayCluster, RayJob, RayService, or launcher."""
        return "launcher" if self.is_launcher else str(self.tree.get("kind"))


def render_text(text: str, values: Mapping[str, str | int], where: str) -> tuple[str, dict[str, Any], frozenset[str]]:
    """A template's text, the tree it parses to, and the names used. ConfigError for an unknown name and for a value that would change the structure."""
    used = []
    for number, line in enumerate(text.splitlines(), 1):
        for name in PLACEHOLDER.findall(line):
            if name not in values:
                raise ConfigError(f"nothing is known as '{name}'", where=f"{where}:{number}", remedy=suggest(name, sorted(values)))
            used.append(name)
    rendered = PLACEHOLDER.sub(lambda found: str(values[found[1]]), text)
    template, tree = (_parse(part, where) for part in (text, rendered))
    if _replace(template, values) != tree:
        raise ConfigError(
            "a value changes more than its own place", where=where, remedy='write text placeholders as "${name}" and numbers as ${name}'
        )
    return rendered, tree, frozenset(used)


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        tree = yaml.load(text, Loader=LOADER)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"is no YAML ({getattr(error, 'problem', error)})", where=f"{where}{line}", remedy="mend the line") from None
    if not isinstance(tree, dict):
        raise ConfigError("must hold one YAML mapping", where=where, remedy="one manifest a file")
    return tree


def _replace(tree: Any, values: Mapping[str, str | int]) -> Any:
    if isinstance(tree, dict):
        return {_replace(key, values): _replace(value, values) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_replace(item, values) for item in tree]
    if not isinstance(tree, str):
        return tree
    whole = PLACEHOLDER.fullmatch(tree)
    return values[whole[1]] if whole else PLACEHOLDER.sub(lambda found: str(values[found[1]]), tree)


def templates(source: Path) -> list[Path]:
    """The manifests below cluster/, sorted; ConfigError where there are none."""
    found = sorted(path for folder in FOLDERS for path in (source / folder).glob("*.yaml"))
    if not found:
        raise ConfigError(
            f"has no manifest in {' or '.join(FOLDERS)}", where=str(source), remedy="run in the repository's root, or give --source"
        )
    return found


def render_all(source: Path, values: Values, root: Path) -> tuple[list[Manifest], list[str]]:
    """Every manifest whose sections the values have, and the names of those left out."""
    known = placeholders(values, root)
    absent = {name for name in SECTIONS if getattr(values, name) is None}
    made, left_out = [], []
    for path in templates(source):
        name = path.relative_to(source).as_posix()
        text = path.read_text(encoding="utf-8")
        if absent & {used.partition(".")[0] for used in PLACEHOLDER.findall(text)}:
            left_out.append(name)
            continue
        rendered, tree, used = render_text(text, known, name)
        made.append(Manifest(name=name, text=rendered, tree=tree, used=used))
    return made, left_out


def refuse_examples(manifests: Iterable[Manifest], values: Values, root: Path, where: str) -> None:
    """ConfigError when a value that a manifest takes is still the shipped placeholder."""
    known = placeholders(values, root)
    for name in sorted({name for manifest in manifests for name in manifest.used}):
        if PLACEHOLDER_WORD in str(known[name]):
            plain = "image.registry" if name.startswith("image_") else name
            raise ConfigError(
                f"'{plain}' is still the placeholder '{known[plain]}'",
                where=where,
                remedy="put in your own value, or leave out the section that you do not use",
            )


def write_manifests(manifests: Iterable[Manifest], out: Path, *, replace: bool = False) -> list[Path]:
    """Write rendered manifests and a record of their digests below `out`; all or nothing.

    replace: only a folder that holds nothing but what an earlier call wrote.
    """
    if out.exists():
        _require_own(out, replace)
    manifests = list(manifests)
    record = {}
    with atomic_folder(out, replace=replace) as folder:
        for manifest in manifests:
            path = folder / manifest.name
            path.parent.mkdir(exist_ok=True)
            text = f"# Rendered from cluster/{manifest.name}: edit the values, not this file.\n{manifest.text}"
            path.write_text(text, encoding="utf-8")
            record[manifest.name] = hashlib.sha256(text.encode()).hexdigest()
        write_json(folder / RECORD, {"files": record})
    return [out / manifest.name for manifest in manifests]


def _require_own(out: Path, replace: bool) -> None:
    if not replace:
        raise ConfigError("exists already", where=str(out), remedy="choose another folder, or give --replace")
    record = out / RECORD
    try:
        own = {RECORD, *yaml.safe_load(record.read_text(encoding="utf-8"))["files"]}
    except (OSError, yaml.YAMLError, TypeError, KeyError):
        raise ConfigError("was not written by this command", where=str(out), remedy="choose another folder") from None
    foreign = sorted(
        path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file() and path.relative_to(out).as_posix() not in own
    )
    if foreign:
        raise ConfigError(f"also holds '{foreign[0]}', which this command did not write", where=str(out), remedy="choose another folder")
