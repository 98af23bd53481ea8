"""What is checked of an adapter folder before a byte of it is stored (field cases ADP-04 to ADP-07).

`adapters.folder.open_adapter` first: kind, sizes and SHA-256 of the manifest, no pickle, no path that leaves the folder, no code in the config. Then what a
store needs besides: nothing lies beside the files that the manifest lists, only kinds of files that an adapter has, factors and plane present, every
safetensors header sound, the plane uint8 and legal on its grid, and the fingerprints of a base.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from prism_ray.adapters.folder import CONFIG_NAME, inside, open_adapter, printable
from prism_ray.adapters.scale_plane import ADAPTER_NAME, EXPERTS, SCALE_PLANE_NAME
from prism_ray.adapters.store.ids import require_digest
from prism_ray.core.digests import sha256_file
from prism_ray.core.errors import CheckpointError
from prism_ray.core.manifest import MANIFEST_NAME
from prism_ray.formats.grids import require_legal
from prism_ray.formats.safetensors_io import check_safetensors, read_safetensors_header
from prism_ray.formats.spec import FORMATS

SUFFIXES = {".safetensors", ".json", ".md", ".txt", ".jinja"}
_IDENTITY = ("base_code_plane", "base_scale_plane", "format", "grid", "block", "rank", "alpha", "rounding", "qast", "base")


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """A folder that passed. files: name -> (SHA-256, bytes), the manifest's own included."""

    folder: Path
    manifest: dict[str, Any]
    files: dict[str, tuple[str, int]]

    @property
    def identity(self) -> dict[str, Any]:
        """What the manifest says of the base and the format."""
        return {key: self.manifest[key] for key in _IDENTITY if key in self.manifest}

    @property
    def metrics(self) -> dict[str, Any]:
        """The manifest's metrics, where it has some."""
        found = self.manifest.get("metrics")
        return found if isinstance(found, dict) else {}


def admit_folder(folder: Path | str) -> Admitted:
    """Check an adapter folder. Raises ModelError for no adapter folder, CheckpointError for everything else that is wrong with its files."""
    folder = Path(folder)
    opened = open_adapter(folder, config_required=True)
    manifest = opened.manifest
    assert manifest is not None  # open_adapter asks for one
    found = _files(folder)
    surplus = sorted(found - set(manifest["files"]) - {MANIFEST_NAME})
    if surplus:
        raise CheckpointError(
            f"{printable(surplus[0])} is not in the manifest", where=str(folder), remedy="remove it, or write the manifest again"
        )
    for name in (CONFIG_NAME, ADAPTER_NAME, SCALE_PLANE_NAME):
        if name not in manifest["files"]:
            raise CheckpointError(
                f"no {name}, so this is no complete adapter", where=str(folder), remedy="give the folder that training wrote"
            )
    for name in sorted(found):
        if name.endswith(".safetensors"):
            check_safetensors(folder / name)
    for key in ("base_code_plane", "base_scale_plane"):
        require_digest(opened.field(key), f"{folder / MANIFEST_NAME}, {key}")
    _require_plane(folder / SCALE_PLANE_NAME, opened.field("format"))
    path = folder / MANIFEST_NAME
    files = {name: (require_digest(entry["sha256"], f"{path}, SHA-256"), entry["bytes"]) for name, entry in manifest["files"].items()}
    return Admitted(folder=folder, manifest=manifest, files=files | {MANIFEST_NAME: (sha256_file(path), path.stat().st_size)})


def _files(folder: Path) -> set[str]:
    names = set()
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() and not path.is_symlink():
            continue
        if inside(folder, name) is None or path.suffix not in SUFFIXES:
            raise CheckpointError(
                f"{printable(name)} is of a kind that is not stored",
                where=str(folder),
                remedy=f"an adapter holds {', '.join(sorted(SUFFIXES))} files only",
            )
        names.add(name)
    return names


def _require_plane(path: Path, name: str | None) -> None:
    """Scale bytes uint8 [..., O, G], legal on the grid of the format, and expert numbers int32 beside them."""
    if name is None or name not in FORMATS:
        raise CheckpointError(
            f"format {printable(name)} is not known", where=str(path.parent / MANIFEST_NAME), remedy=f"known: {', '.join(FORMATS)}"
        )
    header = read_safetensors_header(path)
    for key, entry in header.items():
        numbers = key.endswith(EXPERTS) and key.removesuffix(EXPERTS) in header
        if entry["dtype"] != ("I32" if numbers else "U8") or len(entry["shape"]) not in ((1,) if numbers else (2, 3)):
            raise CheckpointError(
                f"tensor {printable(key)} is {entry['dtype']} {entry['shape']}, scale bytes are U8 [..., rows, blocks]",
                where=str(path),
                remedy="write the plane with prism-ray",
            )
    for key, tensor in load_file(path).items():
        if header[key]["dtype"] == "U8":
            require_legal(FORMATS[name].grid, tensor, f"{path}: {printable(key)}")
