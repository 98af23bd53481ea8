"""Settings of a calibration run: model, policy, method, text, window, and what may go wrong before it stops."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from prism_ray.calibrate.text import TextData
from prism_ray.core.compute import DtypeName
from prism_ray.core.config import Config
from prism_ray.formats.policy import QuantPolicy
from prism_ray.hessian.windows import Window
from prism_ray.quantizers.base import QuantizerOptions


class CalibrateConfig(Config):
    """One run.

    model: any source of models.source. method: a name of quantizers.METHODS. data: calibration text; None only for methods that need none. dtype: of weights
    and activations while calibrating. window, recollect: looped models only, which steps count and how often the recurrence is collected again on its quantized rollout. lanes: fixed pieces of the data that are summed by themselves: at most as many workers share the forward passes.
    nonfinite: stop at a sample that makes NaN or infinity, or drop it for all layers and start again. max_dropped, max_fallback_share, max_starved_share: shares of samples
    and of weights (an expert counts as one) above which the run fails.
    """

    model: str
    policy: QuantPolicy = QuantPolicy()
    method: str = "gptq"
    options: QuantizerOptions = QuantizerOptions()
    data: TextData | None = None
    window: Window = Window()
    recollect: int = Field(default=0, ge=0, le=10)
    dtype: DtypeName = "auto"
    lanes: int = Field(default=8, ge=1, le=4096)
    nonfinite: Literal["stop", "drop"] = "stop"
    max_dropped: float = Field(default=0.05, ge=0.0, le=1.0)
    max_fallback_share: float = Field(default=0.1, ge=0.0, le=1.0)
    max_starved_share: float = Field(default=1.0, ge=0.0, le=1.0)
