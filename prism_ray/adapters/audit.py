"""Audit: is this folder the base under some scale plane, or something else? Bytes are compared, no model is run (scale-qlora B.5).

Both folders are compressed-tensors checkpoints. Tensors are read one at a time, memory-mapped, and compared in pieces of 64 MiB, so memory stays small at any
size. What differs decides the verdict, the gravest first:

| verdict | what was found |
|---|---|
| `tensors` | a tensor is missing or surplus, or has another dtype or shape, or the config says another format |
| `codes` | a code differs: tampering, or another quantization; the first is named by tensor, expert, row, block and column |
| `tensor_scale` | a global scale differs: another base, or an inverted convention (field case FMT-02) |
| `plain` | a tensor that is not quantized differs |
| `illegal_scale` | a scale byte that no adapter can write: NaN, negative, or a scale where the base has 0 |
| `scale_plane` | only scale bytes differ, all legal: the base under another plane |
| `identical` | nothing |

Column is the index of a code in its row, block that of its scale.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from prism_ray.formats import compressed_tensors as convention
from prism_ray.formats.checkpoint import read_config
from prism_ray.formats.config_groups import formats_of_modules
from prism_ray.formats.safetensors_io import read_safetensors_header, shard_map
from prism_ray.formats.spec import FormatSpec

GRAVITY = ("tensors", "codes", "tensor_scale", "plain", "illegal_scale", "scale_plane")
HARMLESS = ("identical", "scale_plane")
CHUNK = 64 << 20
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One tensor that differs. kind: a verdict of the module docstring; tensor: its name; what: one line.

    expert, row, block, column: of the first difference, None where they do not apply; count: codes or scales that differ (bytes for other tensors).
    """

    kind: str
    tensor: str
    what: str
    expert: int | None = None
    row: int | None = None
    block: int | None = None
    column: int | None = None
    count: int = 0

    def __str__(self) -> str:
        place = [f"{key} {getattr(self, key)}" for key in ("expert", "row", "block", "column") if getattr(self, key) is not None]
        return f"{self.kind}: {self.tensor}: {self.what}" + (f" (first at {', '.join(place)})" if place else "")


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """verdict: the gravest finding's kind, or `identical`; findings in order of gravity, then of name; tensors, code_bytes: how much was compared."""

    verdict: str
    findings: tuple[Finding, ...]
    tensors: int
    code_bytes: int

    @property
    def code_plane_intact(self) -> bool:
        """Whether the folder is the base under a legal scale plane, the base's own included."""
        return self.verdict in HARMLESS

    def count(self, kind: str) -> int:
        """Differing codes, scales or bytes over all findings of a kind."""
        return sum(finding.count for finding in self.findings if finding.kind == kind)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


class _Folder:
    """Tensors of a checkpoint by name, opened shard by shard."""

    def __init__(self, folder: Path):
        self.path = folder
        self.files = shard_map(folder)
        self.headers = {file: read_safetensors_header(folder / file) for file in set(self.files.values())}
        self.config = read_config(folder).get("quantization_config") or {}
        self._open: dict[str, Any] = {}

    def layout(self, name: str) -> tuple[str, list[int]]:
        """(dtype, shape) as the header says."""
        entry = self.headers[self.files[name]][name]
        return entry["dtype"], entry["shape"]

    def data(self, name: str) -> torch.Tensor:
        """The bytes of a tensor, flat."""
        file = self.files[name]
        if file not in self._open:
            self._open[file] = safe_open(self.path / file, framework="pt")
        tensor = self._open[file].get_tensor(name).contiguous()
        return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def audit(folder: Path | str, base: Path | str) -> AuditReport:
    """Compare a checkpoint folder with the base checkpoint byte by byte. Raises CheckpointError or ModelError for a folder that cannot be read."""
    found, wanted = _Folder(Path(folder)), _Folder(Path(base))
    findings = list(_tables(found, wanted))
    packed = convention.module_names(wanted.files)
    formats = formats_of_modules(wanted.config, packed, str(base))
    common = sorted(name for name in wanted.files if name in found.files and found.layout(name) == wanted.layout(name))
    code_bytes = 0
    for name in common:
        old, new = wanted.data(name), found.data(name)
        module, _, part = name.rpartition(".")
        spec = formats.get(module)
        code_bytes += old.numel() if part == convention.CODES else 0
        finding = _compare(name, part, spec, wanted.layout(name)[1], old, new)
        findings += [finding] if finding else []
    findings.sort(key=lambda finding: (GRAVITY.index(finding.kind), finding.tensor))
    return AuditReport(
        verdict=findings[0].kind if findings else "identical", findings=tuple(findings), tensors=len(common), code_bytes=code_bytes
    )


def _tables(found: _Folder, wanted: _Folder) -> Iterator[Finding]:
    """Differences that show without reading a tensor."""
    for name in sorted(wanted.files.keys() - found.files.keys()):
        yield Finding(kind="tensors", tensor=ascii(name)[1:-1], what="missing from the folder")
    for name in sorted(found.files.keys() - wanted.files.keys()):
        yield Finding(kind="tensors", tensor=ascii(name)[1:-1], what="not in the base")
    for name in sorted(found.files.keys() & wanted.files.keys()):
        (dtype, shape), (base_dtype, base_shape) = found.layout(name), wanted.layout(name)
        if (dtype, shape) != (base_dtype, base_shape):
            yield Finding(kind="tensors", tensor=name, what=f"{ascii(dtype)[1:-1]} {shape}, the base has {base_dtype} {base_shape}")
    if found.config != wanted.config:
        keys = sorted(key for key in found.config.keys() | wanted.config.keys() if found.config.get(key) != wanted.config.get(key))
        yield Finding(kind="tensors", tensor="config.json", what=f"quantization_config differs in {keys[0]!a}")


def _compare(name: str, part: str, spec: FormatSpec | None, shape: list[int], old: torch.Tensor, new: torch.Tensor) -> Finding | None:
    first, count = _difference(old, new)
    if first is None:
        return None
    if part == convention.CODES and spec is not None:
        return _code_finding(name, spec, shape, old, new, first)
    if part == convention.SCALES and spec is not None:
        return _scale_finding(name, spec, shape, old, new, first)
    if part == convention.DIVISOR and spec is not None:
        values = [float(data.view(torch.float32)[0]) for data in (new, old)]
        return Finding(kind="tensor_scale", tensor=name, what=f"global scale {values[0]:g}, the base has {values[1]:g}", count=count)
    return Finding(kind="plain", tensor=name, what=f"{count} byte(s) differ, first at byte {first}", count=count)


def _difference(old: torch.Tensor, new: torch.Tensor) -> tuple[int | None, int]:
    """(position of the first byte that differs, number of such bytes)."""
    first, count = None, 0
    for start in range(0, old.numel(), CHUNK):
        a, b = old[start : start + CHUNK], new[start : start + CHUNK]
        if torch.equal(a, b):
            continue
        where = a != b
        first = start + int(where.to(torch.uint8).argmax()) if first is None else first
        count += int(where.sum())
    return first, count


def _place(name: str, shape: list[int], row: int) -> tuple[int | None, int]:
    """(expert, row in it) of a flat row index: the expert stands in the name, or is the leading dimension of a fused tensor."""
    if len(shape) > 2:
        return divmod(row, shape[-2])
    match = _EXPERT.search(name)
    return (int(match[1]) if match else None), row


def _code_finding(name: str, spec: FormatSpec, shape: list[int], old: torch.Tensor, new: torch.Tensor, first: int) -> Finding:
    rows = 1
    for length in shape[:-1]:
        rows *= length
    row, position = divmod(first, old.numel() // rows)
    before, after = int(old[first]), int(new[first])
    high = (before & 15) == (after & 15)
    column = 2 * position + high
    expert, row = _place(name, shape, row)
    differs = 0
    for start in range(0, old.numel(), CHUNK):
        xor = old[start : start + CHUNK] ^ new[start : start + CHUNK]
        differs += int((xor & 15 != 0).sum()) + int((xor >> 4 != 0).sum())
    before, after = (before >> 4, after >> 4) if high else (before & 15, after & 15)
    return Finding(
        kind="codes",
        tensor=name,
        what=f"{differs} code(s) differ, the first is {after}, the base has {before}",
        expert=expert,
        row=row,
        block=column // spec.block,
        column=column,
        count=differs,
    )


def _scale_finding(name: str, spec: FormatSpec, shape: list[int], old: torch.Tensor, new: torch.Tensor, first: int) -> Finding:
    grid = spec.grid
    illegal = grid.illegal(new) | ((grid.decode(old) == 0) & (grid.decode(new) != 0))
    changed = (old.view(-1, grid.width) != new.view(-1, grid.width)).any(-1)
    kind, what = "scale_plane", f"{int(changed.sum())} of {changed.numel()} scale(s) differ, all legal on {grid.name}"
    index = first // grid.width
    if bool(illegal.any()):
        index = int(illegal.to(torch.uint8).argmax())
        value = bytes(new.view(-1, grid.width)[index].tolist()).hex()
        kind, what = "illegal_scale", f"{int(illegal.sum())} scale(s) no adapter on grid {grid.name} can write, the first is 0x{value}"
    row, block = divmod(index, shape[-1])
    expert, row = _place(name, shape, row)
    return Finding(kind=kind, tensor=name, what=what, expert=expert, row=row, block=block, count=int(changed.sum()))


def summary(report: AuditReport, *, shown: int = 5) -> Mapping[str, str]:
    """Verdict and the first findings as lines for people."""
    text = {
        "identical": "every byte is the base's",
        "scale_plane": "codes are the base's; a legal scale plane of its own",
        "illegal_scale": "codes are the base's; scales that no adapter writes",
        "plain": "codes are the base's; tensors that are not quantized differ",
        "tensor_scale": "codes are the base's; another tensor scale: made for another base",
        "codes": "codes are NOT the base's",
        "tensors": "not the same tensors as the base",
    }[report.verdict]
    lines = {"verdict": f"{report.verdict}: {text} ({report.tensors} tensors, {report.code_bytes} code bytes compared)"}
    lines |= {f"finding {number}": str(finding) for number, finding in enumerate(report.findings[:shown], start=1)}
    return lines
