"""Configs of the baselines: what Scale-QLoRA is compared with (scale-qlora §2, §4, App. A)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, get_args

from peft.config import PeftConfig

from prism_ray.adapters.peft_types import peft_type
from prism_ray.core.errors import ConfigError
from prism_ray.formats.grids import AmaxRule


@dataclass
class BaselineConfig(PeftConfig):
    """What every baseline has.

    target_modules: names or a regex as in PEFT; None targets every FP4Linear, and with `experts` every fused expert weight, all of its experts. grid: scale grid
    of training, filled in at injection and refused on a target with another. code_plane, scale_plane: fingerprints of the base, filled in by the training code.
    """

    METHOD: ClassVar[str] = ""

    target_modules: list[str] | set[str] | str | None = field(default=None, metadata={"help": "names or regex; None: every FP4Linear"})
    exclude_modules: list[str] | set[str] | str | None = field(default=None, metadata={"help": "names or regex to leave out"})
    experts: bool = field(default=False, metadata={"help": "adapt fused expert weights too, where target_modules is None"})
    grid: str | None = field(default=None, metadata={"help": "scale grid of training: e4m3 or e8m0"})
    code_plane: str | None = field(default=None, metadata={"help": "SHA-256 of the base's code plane"})
    scale_plane: str | None = field(default=None, metadata={"help": "SHA-256 of the base's scale plane"})
    # PEFT's injection reads these two on every config.
    layers_to_transform: list[int] | int | None = field(default=None, metadata={"help": "layer indices, as in PEFT"})
    layers_pattern: list[str] | str | None = field(default=None, metadata={"help": "layer name pattern, as in PEFT"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = peft_type(self.METHOD)
        if isinstance(self.target_modules, list):
            self.target_modules = set(self.target_modules)
        if isinstance(self.exclude_modules, list):
            self.exclude_modules = set(self.exclude_modules)


@dataclass
class QatLoraConfig(BaselineConfig):
    """A low-rank update of the weight, alpha / r * B A, whose sum with the base is rounded onto the native grid in every forward pass.

    r: rank, 1 .. the smaller side of the narrowest target. scale_rule: how a block's maximum gives its scale, default the format's; grids that do not have it use their format's.
    """

    METHOD: ClassVar[str] = "qat_lora"

    r: int = field(default=8, metadata={"help": "rank of the weight update"})
    alpha: float = field(default=8.0, metadata={"help": "the update is multiplied by alpha / r"})
    scale_rule: str | None = field(default=None, metadata={"help": "rule from block maximum to scale; None: the format's"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.r, int) or isinstance(self.r, bool) or self.r < 1:
            raise ConfigError(
                f"rank must be a whole number of at least 1, got {self.r!r}", where="r", remedy="use 4, 8 or 16 to begin with"
            )
        if not isinstance(self.alpha, (int, float)) or isinstance(self.alpha, bool) or not math.isfinite(self.alpha):
            raise ConfigError(f"must be a finite number, got {self.alpha!r}", where="alpha", remedy="use the rank, or twice the rank")
        if self.scale_rule is not None and self.scale_rule not in get_args(AmaxRule):
            raise ConfigError(
                f"no grid has a scale rule '{self.scale_rule}'", where="scale_rule", remedy=f"known: {', '.join(get_args(AmaxRule))}"
            )

    @property
    def scaling(self) -> float:
        """alpha / r."""
        return self.alpha / self.r


@dataclass
class PeqaConfig(BaselineConfig):
    """One trained factor an output row, over the base's scales (PEQA)."""

    METHOD: ClassVar[str] = "peqa"


@dataclass
class PeqaBlockConfig(BaselineConfig):
    """One trained factor a scale block, neither factored nor rounded while it is trained (PEQA-block)."""

    METHOD: ClassVar[str] = "peqa_block"
