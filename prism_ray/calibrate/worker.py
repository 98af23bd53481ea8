"""What one worker of the layer-streamed pass does: all its input and output is files, so that any other worker can do it again.

The work folder:

    chunks.safetensors        token ids and masks of every chunk
    activations/<i>/<c>.safetensors   what enters block i for chunk c (after the last block: what enters the final norm)
    blocks/<i>/part-<n>.safetensors, .json    planes and records of the block's units; block.json comes last and names them

A worker holds the model's frame and, while it works on a block, the block. Lanes are consecutive chunks; a lane's sums are made in chunk order by whoever has it, and whole
subtrees of lanes are merged here before they are sent (`hessian.state.lane_nodes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from prism_ray.calibrate.fold import Folding, fold_block
from prism_ray.calibrate.skeleton import Skeleton
from prism_ray.calibrate.text import Chunk
from prism_ray.calibrate.units import Unit, apply_planes, make_units, read_plain, read_planes, solve, write_part
from prism_ray.core.errors import DataError, ModelError
from prism_ray.core.files import atomic_path
from prism_ray.formats.tensor import QuantTensor
from prism_ray.hessian.capture import Capture, InputGroup, NonFinite
from prism_ray.hessian.state import GramState, lane_nodes, reduce_lanes
from prism_ray.quantizers.base import QuantizerOptions, TensorRecord
from prism_ray.quantizers.methods import METHODS

CHUNKS = "chunks.safetensors"
Node = tuple[int, int]
NodeStates = dict[Node, dict[str, GramState]]


class BadSample(DataError):
    """A sample makes an input that is not finite. sample: its number."""

    def __init__(self, what: str, *, where: str = "", remedy: str = "", sample: int = -1):
        super().__init__(what, where=where, remedy=remedy)
        self.sample = sample

    def __reduce__(self) -> tuple[Any, ...]:
        return _bad_sample, (self.what, self.where, self.remedy, self.sample)


def _bad_sample(what: str, where: str, remedy: str, sample: int) -> BadSample:
    return BadSample(what, where=where, remedy=remedy, sample=sample)


def write_chunks(path: Path, chunks: Sequence[Chunk]) -> None:
    """Store chunks in one file."""
    tensors: dict[str, Tensor] = {}
    for chunk in chunks:
        tensors |= {
            f"{chunk.index}.input_ids": chunk.input_ids,
            f"{chunk.index}.mask": chunk.mask,
            f"{chunk.index}.first": torch.tensor(chunk.first),
        }
    with atomic_path(path) as temporary:
        save_file(tensors, str(temporary))


def read_chunks(path: Path) -> list[Chunk]:
    """Chunks by number."""
    tensors = load_file(path)
    return [
        Chunk(index=index, first=int(tensors[f"{index}.first"]), input_ids=tensors[f"{index}.input_ids"], mask=tensors[f"{index}.mask"])
        for index in range(len(tensors) // 3)
    ]


class BlockWorker:
    """folder: the model. work: the work folder, which every worker sees. formats: format name of each planned weight, by path in the model."""

    def __init__(
        self,
        folder: Path | str,
        work: Path | str,
        dtype: torch.dtype,
        formats: Mapping[str, str],
        lanes: Sequence[range],
        dropped: Sequence[int] = (),
    ):
        self.work = Path(work)
        self.skeleton = Skeleton(folder, dtype)
        self.chunks = read_chunks(self.work / CHUNKS)
        self.lanes = list(lanes)
        self.dropped = set(dropped)
        self._formats = dict(formats)
        self._open: AbstractContextManager[nn.Module] | None = None
        self._index = -1
        self.block: nn.Module | None = None

    def formats_of(self, index: int) -> dict[str, str]:
        """Planned weights of a block by path below it; of the head where index is the number of blocks."""
        if index == self.skeleton.layers:
            inside = f"{self.skeleton.prefix(0).rpartition('.')[0]}."
            return {name: chosen for name, chosen in self._formats.items() if not name.startswith(inside)}
        prefix = f"{self.skeleton.prefix(index)}."
        return {name.removeprefix(prefix): chosen for name, chosen in self._formats.items() if name.startswith(prefix)}

    def open(self, index: int) -> nn.Module:
        """Load a block unless it is loaded already; the one before is dropped."""
        if self._index != index or self.block is None:
            self.close()
            if index == self.skeleton.layers:
                self.block, self._index = self.skeleton.model, index
            else:
                self._open = self.skeleton.loaded(index)
                self.block, self._index = self._open.__enter__(), index
        return self.block

    def close(self) -> None:
        """Drop the loaded block."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open, self.block, self._index = None, None, -1

    def prefix(self, index: int) -> str:
        """Path of a block, empty for the head."""
        return "" if index == self.skeleton.layers else self.skeleton.prefix(index)

    def kept(self, chunk: Chunk) -> Tensor:
        """Rows of a chunk that are not dropped, int64."""
        return torch.tensor([row for row in range(chunk.mask.shape[0]) if chunk.first + row not in self.dropped], dtype=torch.int64)

    def part(self, number: int) -> Chunk | None:
        """A chunk without its dropped samples, None where nothing is left."""
        chunk = self.chunks[number]
        rows = self.kept(chunk)
        if not len(rows):
            return None
        return Chunk(index=number, first=chunk.first, input_ids=chunk.input_ids[rows], mask=chunk.mask[rows])

    def activation_path(self, index: int, number: int) -> Path:
        """Where the input of block `index` for a chunk lies."""
        return self.work / "activations" / f"{index:04d}" / f"{number:06d}.safetensors"

    def _store(self, index: int, number: int, hidden: Tensor) -> None:
        path = self.activation_path(index, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            save_file({"hidden": hidden.contiguous()}, str(temporary))

    def hidden(self, index: int, number: int) -> Tensor:
        """The stored input of block `index` for a chunk."""
        return load_file(self.activation_path(index, number))["hidden"]

    def embed(self, numbers: Sequence[int]) -> int:
        """Write the first block's inputs of chunks; the number of tokens."""
        from prism_ray.calibrate.whole import refuse_recurrence  # it works on the same folder, and so imports this module

        tokens = 0
        for number in numbers:
            if (chunk := self.part(number)) is not None:
                if not tokens:
                    refuse_recurrence(self.skeleton, chunk)
                self._store(0, number, self.skeleton.embed(chunk))
                tokens += int(chunk.mask.sum())
        return tokens

    def collect(self, index: int, start: int, stop: int) -> tuple[list[InputGroup], NodeStates]:
        """States of the lanes start .. stop - 1 for a block's weights, merged to the nodes of the tree that these lanes fill."""
        block = self.open(index)
        names = list(self.formats_of(index))
        nodes: NodeStates = {}
        groups: list[InputGroup] = []
        for node in lane_nodes(start, stop, len(self.lanes)):
            parts: dict[Node, dict[str, GramState]] = {}
            for lane in range(*node):
                with Capture(block, names) as capture:
                    for number in self.lanes[lane]:
                        self._collect_chunk(capture, index, number)
                groups = capture.groups or groups
                if capture.missed and capture.groups:
                    raise ModelError(
                        f"{len(capture.missed)} planned weight(s) were not called in a forward pass, first '{capture.missed[0]}'",
                        where=self.prefix(index),
                        remedy="exclude them from the plan, or report the family",
                    )
                parts[lane, lane + 1] = capture.states
            keys = sorted({key for states in parts.values() for key in states})
            nodes[node] = {key: _merge_node(parts, node, key) for key in keys}
        return groups, nodes

    def _collect_chunk(self, capture: Capture, index: int, number: int) -> None:
        chunk = self.part(number)
        if chunk is None:
            return
        hidden = self.hidden(index, number)
        try:
            with torch.no_grad(), capture.batch(chunk.mask):
                self._forward(index, chunk, hidden)
        except NonFinite as fault:
            sample = self._bad_sample(index, chunk, hidden)
            raise BadSample(fault.what, where=f"{self.prefix(index)}.{fault.where}, sample {sample}", sample=sample) from None

    def _forward(self, index: int, chunk: Chunk, hidden: Tensor) -> Tensor:
        return self.skeleton.logits(chunk, hidden) if index == self.skeleton.layers else self.skeleton.run(chunk, hidden)

    def _bad_sample(self, index: int, chunk: Chunk, hidden: Tensor) -> int:
        """The first sample of a chunk that makes an input that is not finite, each run alone."""
        assert self.block is not None
        kept = self.kept(self.chunks[chunk.index]).tolist()
        for row, original in enumerate(kept):
            alone = Chunk(
                index=chunk.index, first=chunk.first + original, input_ids=chunk.input_ids[row : row + 1], mask=chunk.mask[row : row + 1]
            )
            try:
                with Capture(self.block, list(self.formats_of(index))) as capture, torch.no_grad(), capture.batch(alone.mask):
                    self._forward(index, alone, hidden[row : row + 1])
            except NonFinite:
                return chunk.first + int(original)
        return chunk.first + int(kept[0])

    def units(self, index: int, groups: Sequence[InputGroup]) -> list[Unit]:
        """Units of a block."""
        return make_units(self.open(index), groups)

    def solve(
        self,
        index: int,
        units: Sequence[tuple[int, Unit]],
        states: Mapping[Node, Mapping[str, GramState]],
        method: str,
        options: QuantizerOptions,
    ) -> list[dict[str, Any]]:
        """Merge the states of units, quantize them, write their parts (numbered); a summary a unit."""
        block = self.open(index)
        folding = self._folding(index, [part for _, unit in units for part in unit.parts or (unit,)], states, method, options)
        folder = self.work / "blocks" / f"{index:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        done: list[dict[str, Any]] = []
        for number, unit in units:
            solved: list[tuple[str, QuantTensor, TensorRecord]] = []
            held = 0
            for part in unit.parts or (unit,):
                merged = {key: merge(states, key, len(self.lanes)) for key in part.keys}
                present = {key: state for key, state in merged.items() if state is not None}
                solved += solve(part, block, self.prefix(index), self.formats_of(index), present, method, options, folding.factors)
                held += sum(state.nbytes for state in present.values())
            path = folder / f"part-{number:04d}.safetensors"
            write_part(path, solved, folding.plain if number == units[0][0] else None)
            done.append({"part": path.name, "weights": len(solved), "state_bytes": held})
        return done

    def _folding(
        self, index: int, units: Sequence[Unit], states: Mapping[Node, Mapping[str, GramState]], method: str, options: QuantizerOptions
    ) -> Folding:
        """Factors of a block's weights where the method chooses any; the places for them are tried on the first sample."""
        if METHODS[method].choose is None:
            return Folding()
        chunk = next(chunk for number in range(len(self.chunks)) if (chunk := self.part(number)) is not None)
        alone = Chunk(index=chunk.index, first=chunk.first, input_ids=chunk.input_ids[:1], mask=chunk.mask[:1])
        hidden = self.hidden(index, chunk.index)[:1]

        def run() -> Tensor:
            return self._forward(index, alone, hidden)[alone.mask]

        def stats(key: str) -> GramState | None:
            return merge(states, key, len(self.lanes))

        return fold_block(self.open(index), self.prefix(index), units, self.formats_of(index), stats, run, method, options)

    def propagate(self, index: int, numbers: Sequence[int]) -> None:
        """Write the next block's inputs of chunks, through the quantized block."""
        block = self.open(index)
        folder = self.work / "blocks" / f"{index:04d}"
        apply_planes(block, read_planes(folder, self.formats_of(index)), read_plain(folder))
        for number in numbers:
            if (chunk := self.part(number)) is not None:
                self._store(index + 1, number, self.skeleton.run(chunk, self.hidden(index, number)))
        self.close()


def _merge_node(parts: Mapping[Node, Mapping[str, GramState]], node: Node, key: str) -> GramState:
    """One state of a node whose lanes are all here."""
    lanes = [parts[lane, lane + 1].get(key) for lane in range(*node)]

    def merged(low: int, high: int) -> GramState | None:
        if high - low == 1:
            return lanes[low]
        size = 1 << ((high - low - 1).bit_length() - 1)
        return _plus(merged(low, low + size), merged(low + size, high))

    found = merged(0, len(lanes))
    assert found is not None
    return found


def _plus(left: GramState | None, right: GramState | None) -> GramState | None:
    return right if left is None else left if right is None else left + right


def merge(states: Mapping[Node, Mapping[str, GramState]], key: str, lanes: int) -> GramState | None:
    """The state of a key over all lanes; None where no row reached it. DataError when a lane is missing or there twice (field cases CAL-05, CAL-06)."""
    if not lanes:
        return None
    width = next((found[key].width for found in states.values() if key in found), None)
    if width is None:
        reduce_lanes({node: GramState(width=1) for node in states}, lanes)
        return None
    merged = reduce_lanes({node: found.get(key) or GramState(width=width) for node, found in states.items()}, lanes)
    return merged if merged.tokens else None


Say = Callable[[str], None]
