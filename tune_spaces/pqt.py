"""Post-quantization tuning sweeps: functions that return a full SweepConfig."""

from __future__ import annotations

from prism_ray.dist.config import AshaConfig, ScalingConfig, SearchSpace, SweepConfig
from tune_spaces import runs

TWO_CPU = ScalingConfig(workers=1, cpus_per_worker=0.95, concurrent=2)
"""Two trials side by side on two logical CPUs; the trials' own actors need the rest."""


def quickstart() -> SweepConfig:
    """Two strengths by two ranks of SmolLM2-135M on the demo task, DeepSpeed workers, two CPU cores, some eight minutes."""
    return SweepConfig(
        name="quickstart",
        train=runs.demo().with_overrides({"backend": "deepspeed", "threads": 1}),
        space=SearchSpace(strength=(0.0, 0.5), rank=(4, 8), format=("nvfp4",)),
        scaling=TWO_CPU,
        asha=AshaConfig(grace_evals=1, reduction_factor=4),
        storage="~/prism-ray-runs",
        required_good=1,
    )


def full_grid() -> SweepConfig:
    """The grid of the papers: six strengths, three ranks, both formats, each format with its own learning rates."""
    return quickstart().with_overrides(
        {
            "name": "full-grid",
            "space": SearchSpace(
                strength=(0.0, 0.01, 0.05, 0.1, 0.5, 1.0),
                rank=(4, 8, 16),
                format=("nvfp4", "mxfp4"),
                learning_rate={"nvfp4": (2e-3, 5e-3), "mxfp4": (1e-2, 3e-2)},
            ).to_dict(),
            "train.steps": 60,
        }
    )


def banking77_10_intents_2cpu() -> SweepConfig:
    """Ten intents of Banking77, both formats, two strengths by two ranks, two CPU cores."""
    return quickstart().with_overrides(
        {
            "name": "banking77-10",
            "train": runs.banking77_10_intents_2cpu().with_overrides({"backend": "deepspeed", "threads": 1}).to_dict(),
            "space": SearchSpace(
                strength=(0.0, 0.5), rank=(4, 8), format=("nvfp4", "mxfp4"), learning_rate={"nvfp4": (5e-3,), "mxfp4": (1e-2,)}
            ).to_dict(),
            "asha.enabled": False,
            "required_good": 8,
        }
    )


def llama_8b_nvfp4_8xh200() -> SweepConfig:
    """An 8B base on one node of eight GPUs: ZeRO-3 over four, two trials at once. Give train.model, train.task and storage."""
    return full_grid().with_overrides(
        {
            "name": "llama-8b-nvfp4",
            "train.zero_stage": 3,
            "train.threads": 0,
            "train.batch_size": 64,
            "train.micro_batch_size": 8,
            "train.eval_batch_tokens": 16384,
            "space.format": ["nvfp4"],
            "space.learning_rate": {"nvfp4": [1e-3, 2e-3]},
            "scaling": ScalingConfig(
                workers=4, cpus_per_worker=4, gpus_per_worker=1, concurrent=2, autoscaling=True, pending_timeout_s=1800
            ).to_dict(),
        }
    )
