"""Single runs: functions that return a full TrainConfig. Names carry model, task, format, hardware."""

from __future__ import annotations

from prism_ray.training.config import AdapterConfig, OptimizerConfig, RegularizerConfig, TrainConfig
from prism_ray.training.demo import demo_benchmark, demo_reference, demo_task
from prism_ray.training.task import BenchmarkConfig, ReferenceConfig, TaskConfig


def demo() -> TrainConfig:
    """SmolLM2-135M on the generated ticket task: minutes on two CPU cores, no data needed."""
    return TrainConfig(
        task=demo_task(train=320, validation=24, test=64, distractors=10),
        benchmark=demo_benchmark(max_examples=40),
        adapter=AdapterConfig(rank=8),
        regularizer=RegularizerConfig(reference=demo_reference(max_tokens=64), batch=2),
        optimizer=OptimizerConfig(learning_rate=2e-2, warmup_steps=1),
        steps=12,
        batch_size=10,
        micro_batch_size=10,
        eval_every=6,
    )


BANKING_INTENTS = (
    "activate_my_card",
    "card_arrival",
    "card_swallowed",
    "change_pin",
    "exchange_rate",
    "lost_or_stolen_card",
    "passcode_forgotten",
    "terminate_account",
    "top_up_failed",
    "verify_my_identity",
)


def banking77_10_intents_2cpu(folder: str = "../shared/data/banking77", text: str = "../shared/data/wikitext2/valid.txt") -> TrainConfig:
    """SmolLM2-135M on ten intents of Banking77; reference text from WikiText-2, benchmark the demo quiz."""
    task = TaskConfig(
        name="banking77, 10 intents",
        train=f"{folder}/train.csv",
        test=f"{folder}/test.csv",
        prompt="Query: {text}\nIntent:",
        answer="category",
        labels=BANKING_INTENTS,
        label_names={name: name.replace("_", " ") for name in BANKING_INTENTS},
        other_labels="drop",
        max_train=480,
        max_validation=60,
        max_test=200,
        max_tokens=96,
    )
    return demo().with_overrides(
        {
            "task": task.to_dict(),
            "benchmark": BenchmarkConfig(**demo_benchmark(max_examples=60).to_dict()).to_dict(),
            "regularizer.reference": ReferenceConfig(name="wikitext2 valid", location=text, max_tokens=64, max_examples=32).to_dict(),
            "optimizer": OptimizerConfig(learning_rate=5e-3, warmup_steps=3).to_dict(),
            "steps": 20,
            "batch_size": 16,
            "micro_batch_size": 16,
            "eval_every": 10,
        }
    )
