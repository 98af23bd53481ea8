"""`ScaleQLoraConfig`: what a Scale-QLoRA adapter is, and which planes it belongs to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from peft.config import PeftConfig

from prism_ray.adapters.scale_qlora.register import peft_type
from prism_ray.core.errors import ConfigError


@dataclass
class ScaleQLoraConfig(PeftConfig):
    """A low-rank correction B A of the block scales of FP4 weights, rounded onto their grid in every forward pass (scale-qlora §3).

    r: rank, 1 .. number of scale blocks of the narrowest target. alpha: the correction is alpha / r * B A.
    target_modules: names or a regex as in PEFT; None targets every FP4Linear. grid: scale grid the adapter is trained on; filled in at injection, and
    refused on a target with another grid. code_plane, scale_plane: fingerprints of the base, filled in by the training code.
    """

    r: int = field(default=8, metadata={"help": "rank of the scale correction"})
    alpha: float = field(default=8.0, metadata={"help": "the correction is multiplied by alpha / r"})
    target_modules: list[str] | set[str] | str | None = field(default=None, metadata={"help": "names or regex; None: every FP4Linear"})
    exclude_modules: list[str] | set[str] | str | None = field(default=None, metadata={"help": "names or regex to leave out"})
    grid: str | None = field(default=None, metadata={"help": "scale grid of training: e4m3 or e8m0"})
    code_plane: str | None = field(default=None, metadata={"help": "SHA-256 of the base's code plane"})
    scale_plane: str | None = field(default=None, metadata={"help": "SHA-256 of the base's scale plane"})
    # PEFT's injection reads these two on every config.
    layers_to_transform: list[int] | int | None = field(default=None, metadata={"help": "layer indices, as in PEFT"})
    layers_pattern: list[str] | str | None = field(default=None, metadata={"help": "layer name pattern, as in PEFT"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = peft_type()
        if not isinstance(self.r, int) or isinstance(self.r, bool) or self.r < 1:
            raise ConfigError(
                f"rank must be a whole number of at least 1, got {self.r!r}", where="r", remedy="use 4, 8 or 16 to begin with"
            )
        if not isinstance(self.alpha, (int, float)) or isinstance(self.alpha, bool) or not math.isfinite(self.alpha):
            raise ConfigError(f"must be a finite number, got {self.alpha!r}", where="alpha", remedy="use the rank, or twice the rank")
        if isinstance(self.target_modules, list):
            self.target_modules = set(self.target_modules)
        if isinstance(self.exclude_modules, list):
            self.exclude_modules = set(self.exclude_modules)

    @property
    def scaling(self) -> float:
        """alpha / r."""
        return self.alpha / self.r
