"""Apply a scale plane to a checkpoint folder, and take it back. Codes are never written. (A live model: `adapters.live`.)

The folder is replaced as a whole (`adapters.generation`): a kill at any point leaves it fully old or fully new. The new one holds the base's files, the shards
in which scale bytes differ, and `applied/`: the on-grid delta against the base, what it was made from, and the base's own manifest. Before the switch
it is read again: its scales must be the plane's, and an audit against the old folder must find no other difference.

An adapter over an applied adapter replaces it: the delta is always against the base. `rollback` puts the old bytes back, from the delta or from a base
checkpoint; the SHA-256 of the scale plane and of every shard must be what they were, and the manifest returns byte for byte (field case ADP-02).
Tensor scales stay untouched, so projections that share one still do (field case FMT-05), and the base's scale rule stays in the manifest (FMT-03).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from prism_ray.adapters.admission import admit
from prism_ray.adapters.audit import audit
from prism_ray.adapters.folder import read_json
from prism_ray.adapters.generation import Step, ignore_step, locked, next_generation, stage
from prism_ray.adapters.ids import require_adapter_id
from prism_ray.adapters.planes import BasePlanes, OnGridDelta, ScalePlane
from prism_ray.core.config import Config
from prism_ray.core.digests import sha256_file
from prism_ray.core.errors import CheckpointError, FingerprintMismatch, ModelError
from prism_ray.core.files import write_json
from prism_ray.core.manifest import MANIFEST_NAME, read_manifest
from prism_ray.formats import compressed_tensors as convention
from prism_ray.formats.checkpoint import KIND, read_quantized

# A folder of its own: engines load every *.safetensors that lies beside the shards.
APPLIED = "applied"
STATE_NAME, DELTA_NAME, BASE_MANIFEST_NAME = "state.json", "delta.safetensors", "base_manifest.json"
SCALES_ONLY = ("identical", "scale_plane", "illegal_scale")  # the last: a plane may have had a 0 where the base has a scale
Probe = Callable[[Path], torch.Tensor]


class AppliedState(Config):
    """`applied/state.json`. adapter: its id; the fingerprints of the codes and of the scales before and after; changed: bytes against the base;
    base_files: shard -> SHA-256 before the apply; delta: SHA-256 of the delta's file."""

    adapter: str
    code_plane: str
    base_scale_plane: str
    scale_plane: str
    changed: int
    base_files: dict[str, str]
    delta: str


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A folder as apply and rollback see it. scales: the bytes that lie there; base: its planes with the base's scales; state: None for a base."""

    folder: Path
    scales: Mapping[str, torch.Tensor]
    base: BasePlanes
    state: AppliedState | None


def read_state(folder: Path | str) -> AppliedState | None:
    """What is applied to a checkpoint folder; None for a base."""
    path = Path(folder) / APPLIED / STATE_NAME
    return AppliedState.load(read_json(path)) if path.is_file() else None


def open_checkpoint(folder: Path | str) -> Checkpoint:
    """Read a folder; with an adapter applied, its base's scales are restored in memory from the delta and verified. Raises CheckpointError,
    FingerprintMismatch."""
    folder = Path(folder)
    if (folder / MANIFEST_NAME).is_file():
        read_manifest(folder, KIND)
    state = read_state(folder)
    base = BasePlanes.from_checkpoint(folder)
    scales = base.scales().tensors
    if state is not None:
        path = folder / APPLIED / DELTA_NAME
        if sha256_file(path) != state.delta:
            raise CheckpointError("SHA-256 differs from state.json's", where=str(path), remedy="roll back from the base checkpoint")
        base = base.with_scales(OnGridDelta.read(path).inverse().applied_to(scales, str(folder)))
        _require_plane(base.scale_plane, state, folder)
    return Checkpoint(folder=folder, scales=scales, base=base, state=state)


def _require_plane(found: str, state: AppliedState, folder: Path) -> None:
    if found != state.base_scale_plane:
        raise FingerprintMismatch(
            f"the restored scale plane is {found[:12]}, the base's was {state.base_scale_plane[:12]}",
            where=str(folder),
            remedy="roll back from the base checkpoint that the adapter was applied to",
        )


def apply_adapter(
    folder: Path | str,
    adapter: Path | str,
    *,
    adapter_id: str | None = None,
    probe: Probe | None = None,
    step: Step = ignore_step,
    **admission: Any,
) -> AppliedState:
    """Admit an adapter folder (`admission`: options of `admission.admit`) and write its plane into a checkpoint folder.

    adapter_id: recorded name, default the adapter folder's. probe: a forward of a checkpoint folder; the same output before and after is refused. Raises what
    `admit` raises, ModelError for a probe without difference; the folder is untouched then.
    """
    name = require_adapter_id(Path(adapter).resolve().name if adapter_id is None else adapter_id)
    return _apply(folder, lambda base: admit(adapter, base, **admission).plane, name, probe, step)


def apply_plane(
    folder: Path | str, plane: ScalePlane, *, adapter_id: str, probe: Probe | None = None, step: Step = ignore_step
) -> AppliedState:
    """Write a scale plane that is trusted to belong to this base; layers, shapes and bytes are checked all the same."""
    return _apply(folder, lambda base: plane, require_adapter_id(adapter_id), probe, step)


def _apply(folder: Path | str, chosen: Callable[[BasePlanes], ScalePlane], name: str, probe: Probe | None, step: Step) -> AppliedState:
    with locked(folder) as path:
        checkpoint = open_checkpoint(path)
        base = checkpoint.base
        base_scales = base.scales().tensors
        plane = chosen(base).by_linear(base_scales)
        plane.require_fit(base.quantized, name)
        step("admitted")
        wanted = dict(base_scales) | dict(plane.tensors)
        with next_generation(path, step) as work:
            shards = _stage(checkpoint, work, wanted, step)
            state = _write_applied(checkpoint, work, plane, wanted, name, shards)
            step("delta")
            if (path / MANIFEST_NAME).is_file():
                _write_manifest(checkpoint, work, state, shards)
            step("manifest")
            _require_written(path, work, wanted)
            if probe is not None and torch.equal(probe(path), probe(work)):
                raise ModelError("the probe's output is the same before and after", where=name, remedy="check the adapter's layers")
            step("checked")
        return state


def _stage(checkpoint: Checkpoint, work: Path, wanted: Mapping[str, torch.Tensor], step: Step) -> list[str]:
    changed = {name: data for name, data in wanted.items() if not torch.equal(data, checkpoint.scales[name])}
    tensors = {f"{name}.{convention.SCALES}": data for name, data in changed.items()}
    return stage(checkpoint.folder, work, tensors, frozenset({APPLIED, MANIFEST_NAME}), step)


def _write_applied(
    checkpoint: Checkpoint, work: Path, plane: ScalePlane, wanted: Mapping[str, torch.Tensor], name: str, shards: list[str]
) -> AppliedState:
    delta = OnGridDelta.between(checkpoint.base.scales().tensors, plane.tensors)
    known = checkpoint.state.base_files if checkpoint.state is not None else {}
    (work / APPLIED).mkdir()
    delta.write(work / APPLIED / DELTA_NAME)
    state = AppliedState(
        adapter=name,
        code_plane=checkpoint.base.code_plane,
        base_scale_plane=checkpoint.base.scale_plane,
        scale_plane=checkpoint.base.with_scales(wanted).scale_plane,
        changed=delta.changed,
        base_files={**known, **{shard: sha256_file(checkpoint.folder / shard) for shard in shards if shard not in known}},
        delta=sha256_file(work / APPLIED / DELTA_NAME),
    )
    write_json(work / APPLIED / STATE_NAME, state.to_dict())
    kept = checkpoint.folder / (MANIFEST_NAME if checkpoint.state is None else f"{APPLIED}/{BASE_MANIFEST_NAME}")
    if kept.is_file():
        shutil.copyfile(kept, work / APPLIED / BASE_MANIFEST_NAME)
    return state


def _write_manifest(checkpoint: Checkpoint, work: Path, state: AppliedState, shards: list[str]) -> None:
    """The base's manifest under the new plane. Unchanged files were verified when the checkpoint was opened: their entries are taken over."""
    entries = read_json(checkpoint.folder / MANIFEST_NAME)["files"]
    files = {name: entry for name, entry in entries.items() if not name.startswith(f"{APPLIED}/")}
    for name in [*shards, *(f"{APPLIED}/{part}" for part in (STATE_NAME, DELTA_NAME, BASE_MANIFEST_NAME))]:
        files[name] = _entry(work / name)
    fields = {
        "files": files,
        "scale_plane": state.scale_plane,
        "base_scale_plane": state.base_scale_plane,
        "applied_adapter": state.adapter,
    }
    write_json(work / MANIFEST_NAME, read_json(work / APPLIED / BASE_MANIFEST_NAME) | fields)


def _entry(path: Path) -> dict[str, Any]:
    return {"sha256": sha256_file(path), "bytes": path.stat().st_size}


def _require_written(folder: Path, work: Path, wanted: Mapping[str, torch.Tensor]) -> None:
    """Read the new generation again: the scales that were asked for, and nothing else, differ from the folder."""
    _, written, _ = read_quantized(work)
    wrong = [name for name, data in wanted.items() if not torch.equal(written[name].scales, data.cpu())]
    report = audit(work, folder)
    if wrong or report.verdict not in SCALES_ONLY:
        what = f"scales of {wrong[0]} were not written" if wrong else str(report.findings[0])
        raise CheckpointError(
            f"the new generation is not what was asked for: {what}", where=str(folder), remedy="nothing was changed; check the disk"
        )


def rollback(folder: Path | str, *, base: Path | str | None = None, step: Step = ignore_step) -> str:
    """Put the base's scale bytes back; returns the restored scale plane's fingerprint. The folder is then, file for file, what it was before the apply.

    base: a checkpoint folder to take the bytes from instead of the delta; it also restores a folder that `merge` wrote. Raises ModelError when nothing is
    applied and no base is given, CheckpointError or FingerprintMismatch when the bytes would not be the base's; the folder is untouched then.
    """
    with locked(folder) as path:
        state = read_state(path)
        if base is None:
            if state is None:
                raise ModelError("no adapter is applied", where=str(folder), remedy="give the base checkpoint to restore a merged folder")
            checkpoint = open_checkpoint(path)
        else:
            checkpoint = _from_base(path, Path(base), state)
        wanted = checkpoint.base.scales().tensors
        step("admitted")
        with next_generation(path, step) as work:
            shards = _stage(checkpoint, work, wanted, step)
            _restore_manifest(path, work, shards, base if state is None else None)
            step("manifest")
            _require_written(path, work, wanted)
            for shard, digest in (state.base_files if state is not None else {}).items():
                if sha256_file(work / shard) != digest:
                    raise CheckpointError("the restored shard is not the base's", where=str(path / shard), remedy="copy the base again")
            step("checked")
        return checkpoint.base.scale_plane


def _from_base(path: Path, base: Path, state: AppliedState | None) -> Checkpoint:
    """The folder with the scales of a base checkpoint, after an audit: codes, tensor scales and plain tensors must be the base's."""
    report = audit(path, base)
    if report.verdict not in SCALES_ONLY:
        raise FingerprintMismatch(
            f"is not a scale plane over {base.name}: {report.findings[0]}", where=str(path), remedy="give its own base"
        )
    source = BasePlanes.from_checkpoint(base)
    if state is not None:
        _require_plane(source.scale_plane, state, path)
    return Checkpoint(folder=path, scales=ScalePlane.stored(path).tensors, base=source, state=state)


def _restore_manifest(path: Path, work: Path, shards: list[str], base: Path | str | None) -> None:
    """The manifest that the apply kept, byte for byte; for a merged folder the base's, with the shards' own digests."""
    kept = path / APPLIED / BASE_MANIFEST_NAME
    if base is None:
        if kept.is_file():
            shutil.copyfile(kept, work / MANIFEST_NAME)
            read_manifest(work, KIND)
        return
    source = Path(base) / MANIFEST_NAME
    if source.is_file():
        manifest = read_json(source)
        manifest["files"] |= {shard: _entry(work / shard) for shard in shards}
        write_json(work / MANIFEST_NAME, manifest)
        read_manifest(work, KIND)
