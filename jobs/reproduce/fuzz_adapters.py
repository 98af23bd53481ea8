"""Mutated adapter folders against admission and apply: no crash, no partial apply, every refusal one line; one JSON object of counts.

    python jobs/reproduce/fuzz_adapters.py [--files 5000] [--seed 0] [--apply-every 20]

A tiny base and a tiny adapter are written once. Each round mutates one to three times: bytes flipped, zeroed, repeated, cut or appended; a safetensors header's
length, names, dtypes, shapes and offsets edited; values of the JSON files replaced by hostile ones; files removed, or replaced by a link to outside,
a folder or a pipe. Half of the rounds then give the manifest the mutated files' new sizes and digests, so that what lies behind the hashes is reached.

`admit` must raise a PrismError of one printable line or return a plane whose bytes are legal; every `--apply-every`-th round runs `apply_adapter` on the checkpoint
folder, which must then be the old one byte for byte, or the new one that rolls back to it. Exits with 1 at the first round that breaks this, and names it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model

from prism_ray.adapters.admission import admit
from prism_ray.adapters.apply import apply_adapter, rollback
from prism_ray.adapters.folder import CONFIG_NAME
from prism_ray.adapters.planes import BasePlanes
from prism_ray.adapters.scale_plane import ADAPTER_NAME, SCALE_PLANE_NAME, adapter_layers, write_scale_plane
from prism_ray.adapters.scale_qlora import ScaleQLoraConfig
from prism_ray.calibrate.quantize import quantize_to_folder
from prism_ray.core.digests import sha256_file
from prism_ray.core.errors import PrismError
from prism_ray.core.manifest import MANIFEST_NAME
from prism_ray.formats.checkpoint import load_quantized_model
from prism_ray.formats.grids import require_legal
from prism_ray.formats.modules import planes
from prism_ray.formats.policy import QuantPolicy
from prism_ray.formats.tensor import code_plane_fingerprint, scale_plane_fingerprint
from prism_ray.models.tiny import tiny_llama, tiny_tokenizer

FILES = (CONFIG_NAME, MANIFEST_NAME, ADAPTER_NAME, SCALE_PLANE_NAME)
HOSTILE: tuple[Any, ...] = (
    *(
        None,
        True,
        -1,
        0,
        3,
        1 << 40,
        1 << 70,
        1e308,
        0.5,
        "",
        "a\nb",
        "\x00",
        "\ud800",
        "../../etc/passwd",
        "/etc/passwd",
        "e8m0",
        "mxfp4",
        "x" * 5000,
    ),
    *([], {}, [[]], [None], {"": {}}, ["q_proj"], [1, 2], {"auto_map": {"A": "b.C"}}, "(a+)+$", "["),
)
NAMES = (
    "",
    "a",
    "__metadata__",
    "../x",
    "a\nb",
    "model.layers.0.mlp.up_proj",
    "base_model.model.model.layers.9.mlp.up_proj.qast_A",
    "\x1b[31m",
    "é",
)


def make_base(folder: Path, model: Any = None, format: str = "nvfp4") -> Path:
    """A tiny quantized checkpoint."""
    model = tiny_llama(hidden_size=32, num_layers=1, intermediate_size=32) if model is None else model
    quantize_to_folder(model, tiny_tokenizer(), QuantPolicy(format=format), folder)
    return folder


def make_adapter(base: Path, folder: Path, seed: int = 0, *, spread: float = 0.5, **options: Any) -> Path:
    """A random adapter of a checkpoint, as training writes one; `spread` is the deviation of B."""
    model = load_quantized_model(base, dtype=torch.float32)
    found = planes(model)
    identity = {"code_plane": code_plane_fingerprint(found), "scale_plane": scale_plane_fingerprint(found)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft = get_peft_model(model, ScaleQLoraConfig(r=2, alpha=2.0, **identity, **options))
        for layer in adapter_layers(peft).values():
            torch.nn.init.normal_(layer.qast_B["default"], std=spread)
    peft.save_pretrained(folder)
    write_scale_plane(peft, folder, base_folder=base)
    return folder


def tree_digest(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a folder."""
    return {str(path.relative_to(folder)): sha256_file(path) for path in sorted(folder.rglob("*")) if path.is_file()}


class Mutator:
    """Mutates the files of one adapter folder and puts them back. dice: the source of every choice."""

    def __init__(self, folder: Path, dice: random.Random):
        self.folder, self.dice = folder, dice
        self.original = {path.name: path.read_bytes() for path in folder.iterdir()}  # PEFT's README.md too

    def restore(self) -> None:
        """The folder as it was."""
        for path in list(self.folder.iterdir()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name not in self.original or path.is_symlink() or not path.is_file() or path.read_bytes() != self.original[path.name]:
                path.unlink()
        for name, data in self.original.items():
            if not (self.folder / name).exists():
                (self.folder / name).write_bytes(data)

    def mutate(self) -> str:
        """One to three mutations, then perhaps a manifest that vouches for them; returns what was done."""
        done = [self._one() for _ in range(self.dice.choice((1, 1, 2, 3)))]
        if self.dice.random() < 0.5:
            done.append(self._sign())
        return ", ".join(done)

    def _one(self) -> str:
        name = self.dice.choice(FILES)
        path = self.folder / name
        if not path.is_file() or path.is_symlink():
            return "nothing"
        special: Callable[[bytes], bytes] = self._header if name.endswith(".safetensors") else self._json
        change = self.dice.choice((self._flip, self._zero, self._cut, self._append, self._repeat, special, special, special, special, None))
        if change is None:
            return f"{self._replace(path)} {name}"
        path.write_bytes(change(path.read_bytes()))
        return f"{change.__name__[1:]} {name}"

    def _flip(self, data: bytes) -> bytes:
        out = bytearray(data)
        for _ in range(self.dice.choice((1, 1, 2, 8)) if out else 0):
            # Headers and JSON lie in front: half of the flips go there.
            end = len(out) if self.dice.random() < 0.5 else min(len(out), 2000)
            out[self.dice.randrange(end)] ^= 1 << self.dice.randrange(8)
        return bytes(out)

    def _zero(self, data: bytes) -> bytes:
        start = self.dice.randrange(len(data) + 1)
        stop = min(len(data), start + self.dice.choice((1, 8, 300)))
        return data[:start] + self.dice.choice((b"\0", b"\xff")) * (stop - start) + data[stop:]

    def _cut(self, data: bytes) -> bytes:
        return data[: self.dice.choice((0, 4, 8, len(data) * 9 // 10, max(0, len(data) - 1), self.dice.randrange(len(data) + 1)))]

    def _append(self, data: bytes) -> bytes:
        return data + self.dice.randbytes(self.dice.choice((1, 16, 4096)))

    def _repeat(self, data: bytes) -> bytes:
        start = self.dice.randrange(len(data) + 1)
        return data[:start] + data[start : start + 64] + data[start:]

    def _header(self, data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        if self.dice.random() < 0.2:
            edited = self.dice.choice((0, 1, length - 1, length + 1, 1 << 40, (1 << 64) - 1)) % (1 << 64)
            return edited.to_bytes(8, "little") + data[8:]
        try:
            header = json.loads(data[8 : 8 + length])
            name = self.dice.choice([key for key in header if key != "__metadata__"])
            entry = header[name]
            kind = self.dice.choice(("dtype", "shape", "data_offsets", "rename", "remove", "entry", "overlap", "swap"))
            if kind == "rename":
                header[self.dice.choice(NAMES)] = header.pop(name)
            elif kind == "remove":
                del header[name]
            elif kind == "entry":
                header[name] = self._hostile()
            elif kind == "overlap":
                entry["data_offsets"] = [max(0, entry["data_offsets"][0] - 1), entry["data_offsets"][1]]
            elif kind == "swap":
                other = self.dice.choice([key for key in header if key != "__metadata__"])
                header[name], header[other] = header[other], header[name]
            elif kind == "shape":
                entry["shape"] = self.dice.choice(
                    (entry["shape"][::-1], [*entry["shape"], 1], [1, *entry["shape"]], [0], [-1], self._hostile())
                )
            else:
                entry[kind] = self.dice.choice(("U8", "F8_E4M3", "I8", "BOOL", "F32", "X9", self._hostile()))
            text = json.dumps(header).encode("utf-8", "surrogatepass")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            return self._flip(data)
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    def _json(self, data: bytes) -> bytes:
        if self.dice.random() < 0.1:
            return self.dice.choice((b"[" * 100_000, b"null", b"[]", b'"x"', b"{}", b'{"files": NaN}', b"\xff\xfe", b"9" * 10_000))
        try:
            value = json.loads(data)
            node, key = value, self.dice.choice(sorted(value))
            while isinstance(node[key], dict) and node[key] and self.dice.random() < 0.7:
                node, key = node[key], self.dice.choice(sorted(node[key]))
            kind = self.dice.choice(("set", "set", "set", "delete", "rename", "code"))
            if kind == "set":
                node[key] = self._hostile()
            elif kind == "delete":
                del node[key]
            elif kind == "rename":
                node[self.dice.choice(NAMES)] = node.pop(key)
            else:
                node[self.dice.choice(("auto_map", "auto_mapping", "trust_remote_code"))] = self.dice.choice(
                    (True, {"AutoModel": "x.Y"}, "code.py")
                )
            return json.dumps(value).encode("utf-8", "surrogatepass")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            return self._flip(data)

    def _hostile(self) -> Any:
        return self.dice.choice(HOSTILE)

    def _replace(self, path: Path) -> str:
        kind = self.dice.choice(("remove", "link", "folder", "pipe", "pickle"))
        path.unlink()
        if kind == "link":
            path.symlink_to("/etc/passwd")
        elif kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "pickle":
            (self.folder / "adapter_model.bin").write_bytes(b"\x80\x04.")
        return kind

    def _sign(self) -> str:
        path = self.folder / MANIFEST_NAME
        if not path.is_file() or path.is_symlink():
            return "unsigned"
        try:
            manifest = json.loads(path.read_bytes())
            for name in list(manifest["files"]):
                file = self.folder / name
                if not file.exists():
                    del manifest["files"][name]
                elif file.is_file() and not file.is_symlink():
                    manifest["files"][name] = {"sha256": sha256_file(file), "bytes": file.stat().st_size}
            path.write_bytes(json.dumps(manifest).encode())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return "unsigned"
        return "signed"


class Broken(Exception):
    """A round that neither refused in one line nor applied as a whole."""


def run(work: Path, files: int, seed: int, apply_every: int) -> dict[str, Any]:
    """Fuzz `files` rounds in the empty folder `work`; raises Broken."""
    checkpoint = make_base(work / "base")
    folder = make_adapter(checkpoint, work / "adapter")
    base = BasePlanes.from_checkpoint(checkpoint)
    before = tree_digest(checkpoint)
    mutator = Mutator(folder, random.Random(seed))
    outcomes: Counter[str] = Counter()
    for number in range(files):
        done = mutator.mutate()
        whole = number % apply_every == 0
        try:
            if whole:
                apply_adapter(checkpoint, folder)
                rollback(checkpoint)
            else:
                admitted = admit(folder, base)
                for name, data in admitted.plane.tensors.items():
                    require_legal(base.quantized[name].format.grid, data, name)
            outcomes["admitted"] += 1
        except PrismError as error:
            text = str(error)
            if not text.isprintable():
                raise Broken(f"round {number} ({done}): not one printable line: {text!a}") from error
            outcomes[type(error).__name__] += 1
        except Exception as error:
            raise Broken(f"round {number} ({done}): {type(error).__name__}: {error}") from error
        if whole and (tree_digest(checkpoint) != before or sorted(path.name for path in work.iterdir()) != _expected(work)):
            raise Broken(f"round {number} ({done}): the checkpoint folder is neither old nor whole")
        mutator.restore()
    admit(folder, base)  # the folder that was restored is still a good one
    return {"files": files, "seed": seed, "applies": -(-files // apply_every), "outcomes": dict(sorted(outcomes.items()))}


def _expected(work: Path) -> list[str]:
    """Names that may lie beside the checkpoint: nothing temporary but the lock."""
    return sorted(path.name for path in work.iterdir() if path.name in ("base", "adapter") or path.name.startswith(".tmp-lock"))


def main() -> int:
    """Parse the options, fuzz, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--apply-every", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        try:
            print(json.dumps(run(Path(work), options.files, options.seed, options.apply_every), indent=2))
        except Broken as error:
            print(f"broken: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
