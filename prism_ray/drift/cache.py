"""The base's features on disk: written once a benchmark, read by every variant, so that memory does not grow with samples or variants."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from prism_ray.core.files import require_disk
from prism_ray.drift.data import Benchmark
from prism_ray.drift.reader import Features


class FeatureCache:
    """float32 [n, d] features, and int16 [n, L, k] experts for a sparse model, in files of a folder, batch after batch."""

    def __init__(self, folder: Path, benchmark: Benchmark):
        self.folder = folder
        self.offsets = [0]
        for batch in benchmark.batches:
            self.offsets.append(self.offsets[-1] + sum(benchmark.items[index].answer_tokens for index in batch))
        self._hidden: np.memmap | None = None
        self._experts: np.memmap | None = None

    def write(self, number: int, features: Features) -> None:
        """Store the features of one batch."""
        if self._hidden is None:
            size = self.offsets[-1] * features.hidden.shape[1] * 4
            require_disk(self.folder, size, "the base's features")
            self._hidden = np.memmap(self.folder / "hidden", np.float32, "w+", shape=(self.offsets[-1], features.hidden.shape[1]))
            if features.experts is not None:
                shape = (self.offsets[-1], *features.experts.shape[1:])
                self._experts = np.memmap(self.folder / "experts", np.int16, "w+", shape=shape)
        place = slice(self.offsets[number], self.offsets[number + 1])
        self._hidden[place] = features.hidden.cpu().numpy()
        if self._experts is not None and features.experts is not None:
            self._experts[place] = features.experts.cpu().numpy()

    def read(self, number: int) -> Features:
        """The features of one batch, copied into memory."""
        assert self._hidden is not None, "read before write"
        place = slice(self.offsets[number], self.offsets[number + 1])
        experts = None if self._experts is None else torch.from_numpy(np.array(self._experts[place]))
        return Features(torch.from_numpy(np.array(self._hidden[place])), experts)
