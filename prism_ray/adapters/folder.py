"""An adapter folder from anywhere, read as hostile input: what must hold before one of its tensors is looked at (field cases ADP-06, ADP-07).

Checked in this order: the folder is one, and lies under `root`; every file that is read resolves inside the folder and is a regular file (a pipe would
block, a link could read anything); weights are safetensors, never pickle; the manifest is JSON of our kind and version with well-formed entries; every file
it lists has its size and SHA-256; the config asks for no code and has sane types.

Every refusal is a PrismError of one line. Nothing is executed, and text from a file reaches a message only in ASCII.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from prism_ray.adapters.scale_plane import ADAPTER_KIND, ADAPTER_NAME, SCALE_PLANE_NAME
from prism_ray.adapters.scale_qlora import ScaleQLoraConfig
from prism_ray.core.digests import sha256_file
from prism_ray.core.errors import CheckpointError, ModelError, one_line
from prism_ray.core.manifest import MAJOR, MANIFEST_NAME
from prism_ray.formats.safetensors_io import REWRITE, read_safetensors_header

CONFIG_NAME = "adapter_config.json"
MAX_JSON_BYTES = 16 << 20
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
REMOTE_CODE = ("auto_mapping", "auto_map", "trust_remote_code", "custom_code", "custom_pipelines")


@dataclass(frozen=True, kw_only=True)
class AdapterFolder:
    """path: as given; manifest: None where the folder has none; config: adapter_config.json, None where there is none."""

    path: Path
    manifest: dict[str, Any] | None
    config: dict[str, Any] | None

    def field(self, name: str) -> str | None:
        """A text of the manifest, None where it is missing; CheckpointError for another type."""
        value = (self.manifest or {}).get(name)
        if value is not None and not isinstance(value, str):
            raise CheckpointError(f"'{name}' is no text", where=str(self.path / MANIFEST_NAME), remedy=REWRITE)
        return value

    def peft_config(self) -> ScaleQLoraConfig:
        """The Scale-QLoRA config, from the keys that it knows; ModelError for another method or wrong types."""
        path = self.path / CONFIG_NAME
        if self.config is None:
            raise ModelError(
                f"no {CONFIG_NAME}, so this is no adapter folder", where=str(self.path), remedy="give the folder that training wrote"
            )
        values = self.config
        if values.get("peft_type") != "SCALE_QLORA":
            raise ModelError(f"holds a {printable(values.get('peft_type'))} adapter, not a Scale-QLoRA one", where=str(path))
        names = (str, list, type(None))
        kinds: dict[str, tuple[type, ...]] = {
            "r": (int,),
            "alpha": (int, float),
            "qast": (bool,),
            "experts": (str, list, dict, type(None)),
            "target_modules": names,
            "exclude_modules": names,
            "layers_to_transform": (int, list, type(None)),
            "layers_pattern": names,
            **dict.fromkeys(("grid", "code_plane", "scale_plane", "task_type", "base_model_name_or_path"), (str, type(None))),
        }
        found = {key: values[key] for key in kinds if key in values}
        for key, value in found.items():
            inner = value if isinstance(value, list) else []
            item = int if key in ("layers_to_transform", "experts") else str
            right = isinstance(value, kinds[key]) and (key == "qast" or not isinstance(value, bool))
            if not right or not all(isinstance(entry, item) for entry in inner):
                raise ModelError(f"'{key}' is {printable(value)}, which is of a wrong type", where=str(path), remedy=REWRITE)
            if isinstance(value, (int, float)) and (not math.isfinite(value) if isinstance(value, float) else abs(value) > 1 << 31):
                raise ModelError(f"'{key}' is {printable(value)}, outside any sensible range", where=str(path), remedy=REWRITE)
        try:
            for pattern in _patterns(found):
                re.compile(pattern)
            return ScaleQLoraConfig(**found)
        except (ValueError, TypeError, re.error, RecursionError) as error:
            raise ModelError(f"is no Scale-QLoRA config ({printable_text(one_line(error))})", where=str(path), remedy=REWRITE) from None

    def has(self, name: str) -> bool:
        """Whether a file is there; CheckpointError for one that leads out of the folder or is no regular file."""
        return inside(self.path, name) is not None


def open_adapter(
    folder: Path | str, *, root: Path | str | None = None, manifest_required: bool = True, config_required: bool = False
) -> AdapterFolder:
    """Read and check a folder; see the module docstring. root: folder that the adapter must lie in after links are resolved.

    Raises ModelError where this is no adapter folder, CheckpointError for files that are damaged, changed or out of place.
    """
    folder = Path(folder)
    try:
        is_folder, resolved = folder.is_dir(), folder.resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"cannot be looked at ({one_line(error)})", where="adapter folder", remedy="give a folder") from None
    if root is not None and not resolved.is_relative_to(Path(root).resolve()):
        raise ModelError("lies outside the folder that adapters are served from", where=folder.name, remedy="publish it there")
    if not is_folder:
        raise ModelError("is no folder", where=str(folder), remedy="give the folder that training wrote")
    if config_required and inside(folder, CONFIG_NAME) is None:
        raise ModelError(f"no {CONFIG_NAME}, so this is no adapter folder", where=str(folder), remedy="give the folder that training wrote")
    _require_safetensors(folder)
    manifest = _read_manifest(folder) if inside(folder, MANIFEST_NAME) else None
    if manifest is None and manifest_required:
        raise CheckpointError(f"no {MANIFEST_NAME}, so the folder is incomplete", where=str(folder), remedy="write it again")
    config = read_json(folder / CONFIG_NAME) if inside(folder, CONFIG_NAME) else None
    if config is not None:
        _require_no_code(config, str(folder / CONFIG_NAME))
    if manifest is not None:
        _verify(folder, manifest)
    for name in (ADAPTER_NAME, SCALE_PLANE_NAME):
        if inside(folder, name):
            _checked_header(folder / name)
    return AdapterFolder(path=folder, manifest=manifest, config=config)


def _patterns(values: Mapping[str, Any]) -> list[str]:
    """The entries of a config that PEFT takes for regular expressions."""
    layers = values.get("layers_pattern") or []
    names = [values.get(key) for key in ("target_modules", "exclude_modules")]
    return [*(name for name in names if isinstance(name, str)), *([layers] if isinstance(layers, str) else layers)]


def printable(value: object) -> str:
    """A value from a file as short ASCII on one line."""
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of at most 16 MiB without NaN and infinity; CheckpointError otherwise."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ValueError(f"{size} bytes, at most {MAX_JSON_BYTES} are read")
        value = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
        raise CheckpointError(f"is not valid JSON ({printable_text(reason)})", where=str(path), remedy=REWRITE) from None
    if not isinstance(value, dict):
        raise CheckpointError("holds no JSON object", where=str(path), remedy=REWRITE)
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def inside(folder: Path, name: str) -> Path | None:
    """The file `name` of `folder`, None where there is none; CheckpointError for one outside it or not regular.

    Hugging Face's cache keeps a snapshot as links into the repository's `blobs`; those count as inside.
    """
    parts = PurePosixPath(name).parts
    legal = name.isprintable() and name.isascii() and "\\" not in name and 0 < len(name) <= 255
    if not legal or not parts or parts[0] == "/" or ".." in parts:
        raise CheckpointError(f"names the file {printable(name)}, which is no plain name", where=str(folder), remedy=REWRITE)
    path = folder / name
    try:
        resolved, home = path.resolve(), folder.resolve()
        roots = [home, *([home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [])]
        if not any(resolved.is_relative_to(root) for root in roots):
            raise CheckpointError(
                f"'{name}' is a link that leads out of the folder", where=str(folder), remedy="copy the file itself there"
            )
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"'{name}' cannot be looked at ({type(error).__name__})", where=str(folder), remedy=REWRITE) from None
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"'{name}' is no regular file", where=str(folder), remedy=REWRITE)
    return path


def _require_safetensors(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir())
    pickled = [name for name in names if name.lower().endswith(PICKLED)]
    if pickled and ADAPTER_NAME not in names and SCALE_PLANE_NAME not in names:
        raise ModelError(
            f"holds only {printable(pickled[0])}: pickled weights run code when loaded and are not read",
            where=str(folder),
            remedy=f"save the adapter as {ADAPTER_NAME}",
        )


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST_NAME
    manifest = read_json(path)
    if manifest.get("kind") != ADAPTER_KIND:
        raise CheckpointError(f"holds a {printable(manifest.get('kind'))}, expected a '{ADAPTER_KIND}'", where=str(path))
    version = manifest.get("format_version")
    if not isinstance(version, str) or version.split(".")[0] != str(MAJOR):
        raise CheckpointError(
            f"format version {printable(version)} is not readable by this release (reads {MAJOR}.x)",
            where=str(path),
            remedy="update prism-ray",
        )
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise CheckpointError("lists no files", where=str(path), remedy=REWRITE)
    for name, entry in files.items():
        sane = isinstance(entry, dict) and type(entry.get("bytes")) is int and isinstance(entry.get("sha256"), str)
        if not sane:
            raise CheckpointError(f"has no size and SHA-256 for {printable(name)}", where=str(path), remedy=REWRITE)
    return manifest


def _verify(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Sizes first: a truncated file is told without hashing gigabytes."""
    files: dict[str, dict[str, Any]] = manifest["files"]
    for name, entry in files.items():
        path = inside(folder, name)
        if path is None:
            raise CheckpointError("is listed in the manifest and missing", where=str(folder / name), remedy=REWRITE)
        found = path.stat().st_size
        if found != entry["bytes"]:
            raise CheckpointError(
                f"{found} bytes found, {entry['bytes']} expected: the file is truncated or changed", where=str(path), remedy=REWRITE
            )
    for name, entry in files.items():
        digest = sha256_file(folder / name)
        if digest != entry["sha256"]:
            raise CheckpointError(
                f"SHA-256 {digest[:16]} found, {printable(entry['sha256'][:16])[1:-1]} expected: the SHA-256 differs from the manifest",
                where=str(folder / name),
                remedy=REWRITE,
            )
    for name in (CONFIG_NAME, ADAPTER_NAME, SCALE_PLANE_NAME):
        if name not in files and inside(folder, name):
            raise CheckpointError("is not in the manifest, so nobody vouches for it", where=str(folder / name), remedy=REWRITE)


def _checked_header(path: Path) -> None:
    try:
        read_safetensors_header(path)
    except CheckpointError as error:
        # A header's own names may hold line breaks and worse.
        raise CheckpointError(printable_text(error.what), where=str(path), remedy=error.remedy) from None


def printable_text(text: str) -> str:
    """A message that quotes a file, in ASCII on one line."""
    line = " ".join(text.split())
    return one_line(ValueError("".join(letter if letter.isascii() and letter.isprintable() else ascii(letter)[1:-1] for letter in line)))


def _require_no_code(config: Mapping[str, Any], where: str) -> None:
    """Refuse entries, at any depth, that ask a loader to import or download code."""
    pending: list[Any] = [config]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            asked = [key for key in REMOTE_CODE if value.get(key) and not (key == "auto_mapping" and _own_class(value[key]))]
            if asked:
                raise ModelError(f"'{asked[0]}' asks for code to be loaded", where=where, remedy="remove the entry: adapters are data")
            pending += value.values()
        elif isinstance(value, list):
            pending += value


def _own_class(mapping: object) -> bool:
    """Whether an `auto_mapping` is the one that PEFT itself saves for a transformers model without task type: it names an installed class."""
    if not isinstance(mapping, dict) or mapping.keys() != {"base_model_class", "parent_library"}:
        return False
    name, library = mapping["base_model_class"], mapping["parent_library"]
    return isinstance(name, str) and name.isidentifier() and isinstance(library, str) and library.startswith("transformers.models.")
