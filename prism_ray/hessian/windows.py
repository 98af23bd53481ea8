"""Which invocations of a looped module count in its Hessian, and how much (looped-quantization §5, App. P).

A module that a model calls T times a forward sees T different inputs. With w_t the weight of step t (0 .. T - 1) the Hessian is the sum of w_t X_t' X_t:

| window | w_0 | w_t, 0 < t < T - 1 | w_(T-1) | rows of a step |
|---|---|---|---|---|
| first | 1 | 0 | 0 | all: the one-step baseline |
| all (default) | 1 | 1 | 1 | all |
| skip-first | 0 | 1 | 1 | all |
| last | 0 | 0 | 1 | all |
| alpha | alpha | 1 | 1 | all |
| equal-row | 1 | 1 | 1 | row r of the pass only at step r mod T: as many rows in all as one step has |

With T = 1 every window except `skip-first` is the plain Hessian, bit for bit (the one step is also the last); `skip-first` of one step has no rows and is refused.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from prism_ray.core.config import Config
from prism_ray.core.errors import ConfigError

WindowName = Literal["first", "all", "skip-first", "last", "alpha", "equal-row"]


class Window(Config):
    """name: a row of the table. alpha: weight of step 0 in the window `alpha`."""

    name: WindowName = "all"
    alpha: float = Field(default=0.15, ge=0.0)

    def weight(self, step: int, steps: int) -> float:
        """w of a step; ConfigError for skip-first of a module that is called once."""
        if self.name == "skip-first" and steps == 1:
            raise ConfigError("window 'skip-first' leaves no step of a module that is called once", where="window", remedy="use all")
        if self.name == "first":
            return float(step == 0)
        if self.name == "last":
            return float(step == steps - 1)
        if self.name == "skip-first":
            return float(step > 0)
        if self.name == "alpha":
            return self.alpha if step == 0 and steps > 1 else 1.0
        return 1.0

    def rows(self, x: Tensor, step: int, steps: int, offset: int) -> Tensor:
        """The rows of x [R, I] that count at a step; offset: rows of this step that the pass saw before."""
        return x[(step - offset) % steps :: steps] if self.name == "equal-row" and steps > 1 else x
