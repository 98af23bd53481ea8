"""`ScaleQLoraConfig`: what a Scale-QLoRA adapter is, and which planes it belongs to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from peft.config import PeftConfig

from prism_ray.adapters.scale_qlora.register import peft_type
from prism_ray.core.errors import ConfigError

ALL = "all"


@dataclass
class ScaleQLoraConfig(PeftConfig):
    """A low-rank correction B A of the block scales of FP4 weights, rounded onto their grid in every forward pass (scale-qlora §3).

    r: rank, 1 .. number of scale blocks of the narrowest target. alpha: the correction is alpha / r * B A.
    target_modules: names or a regex as in PEFT, of linear layers and of fused expert weights (`gate_up_proj`, `down_proj`); None targets every
    FP4Linear. experts: which experts are trained: ascending numbers, for every targeted expert weight or by its name, in the order of the factors' first
    dimension; "all"; None: all of the weights that target_modules names. Where it is given and target_modules is None, every expert weight is a target too.
    qast: round the corrected scales in every forward pass; without it training uses them unrounded, and the merge loses what rounding costs.
    grid: scale grid the adapter is trained on; filled in at injection, and refused on a target with another grid. code_plane, scale_plane:
    fingerprints of the base, filled in by the training code.
    """

    r: int = field(default=8, metadata={"help": "rank of the scale correction"})
    alpha: float = field(default=8.0, metadata={"help": "the correction is multiplied by alpha / r"})
    target_modules: list[str] | set[str] | str | None = field(default=None, metadata={"help": "names or regex; None: every FP4Linear"})
    experts: list[int] | dict[str, list[int]] | str | None = field(
        default=None, metadata={"help": "experts to train; None: all of a target"}
    )
    qast: bool = field(default=True, metadata={"help": "round the scales in every forward pass"})
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
        if not isinstance(self.qast, bool):
            raise ConfigError(f"must be true or false, got {self.qast!r}", where="qast")
        self._check_experts()
        if isinstance(self.target_modules, list):
            self.target_modules = set(self.target_modules)
        if isinstance(self.exclude_modules, list):
            self.exclude_modules = set(self.exclude_modules)

    def _check_experts(self) -> None:
        tables: list[object] = list(self.experts.values()) if isinstance(self.experts, dict) else [self.experts]
        for numbers in tables:
            if (numbers is None or numbers == ALL) and not isinstance(self.experts, dict):
                continue
            if not isinstance(numbers, list) or not _ascending(numbers):
                raise ConfigError(
                    f"must be ascending expert numbers, each once, got {numbers!r}",
                    where="experts",
                    remedy="give a list such as [0, 3], or all",
                )
        if self.experts == [] or self.experts == {}:
            raise ConfigError("is empty, so no expert would be trained", where="experts", remedy="leave the expert weights out instead")

    def experts_of(self, name: str, count: int) -> list[int]:
        """The experts to train of the weight `name`, which has `count`; ConfigError for a number that it does not have, or a weight not in the table."""
        chosen = self.experts
        if isinstance(chosen, dict):
            if name not in chosen:
                raise ConfigError("the adapter's table of experts does not name this weight", where=name, remedy="add it to experts")
            chosen = chosen[name]
        if not isinstance(chosen, list):
            return list(range(count))
        if chosen and chosen[-1] >= count:
            raise ConfigError(f"expert {chosen[-1]} of {count}", where=name, remedy=f"experts are 0 to {count - 1}")
        return chosen

    @property
    def scaling(self) -> float:
        """alpha / r."""
        return self.alpha / self.r


def _ascending(numbers: list[object]) -> bool:
    whole = [number for number in numbers if isinstance(number, int) and not isinstance(number, bool) and number >= 0]
    return len(whole) == len(numbers) and whole == sorted(set(whole))
