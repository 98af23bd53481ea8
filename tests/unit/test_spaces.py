"""Spaces: functions that return full configs, found by name, overridden by key=value."""

from __future__ import annotations

import inspect

import pytest

from prism_ray.cli.spaces import load_space
from prism_ray.core.errors import ConfigError
from prism_ray.dist.config import SearchSpace, SweepConfig
from prism_ray.training.config import TrainConfig
from tune_spaces import pqt, runs

SWEEPS = [name for name, value in vars(pqt).items() if inspect.isfunction(value) and value.__module__ == pqt.__name__]
RUNS = [name for name, value in vars(runs).items() if inspect.isfunction(value) and value.__module__ == runs.__name__]


@pytest.mark.parametrize("name", SWEEPS)
def test_every_sweep_space_is_a_whole_config_that_survives_json(name: str):
    config = load_space(f"pqt:{name}", SweepConfig, [])
    assert SweepConfig.load(config.to_dict()) == config
    assert len(config.points()) == config.trials
    trial = config.trial_config(config.points()[-1])
    assert trial.adapter.rank == config.space.rank[-1]
    assert trial.regularizer.strength == config.space.strength[-1]
    assert trial.format == config.space.format[-1]


@pytest.mark.parametrize("name", RUNS)
def test_every_run_is_a_whole_config(name: str):
    config = load_space(f"runs:{name}", TrainConfig, ["steps=3"])
    assert config.steps == 3
    assert TrainConfig.load(config.to_dict()) == config


def test_the_default_space_is_the_papers_lambda_grid():
    assert SearchSpace().strength == (0.0, 0.01, 0.05, 0.1, 0.5, 1.0)


@pytest.mark.parametrize(
    ("space", "overrides", "expected"),
    [
        ("pqt", [], "is not of the form module:function"),
        ("pqt:full_gird", [], "did you mean 'full_grid'?"),
        ("nowhere:x", [], "there is no module 'nowhere'"),
        ("runs:demo", [], "returns a TrainConfig, not a SweepConfig"),
        ("pqt:quickstart", ["space.ranks=[4]"], "did you mean 'rank'?"),
        ("pqt:quickstart", ["train.optimizer.learning_rat=1"], "did you mean 'learning_rate'?"),
        ("pqt:quickstart", ["train.steps=many"], "valid integer"),
        ("pqt:quickstart", ["train.steps=0"], "greater than or equal to 1"),
        ("pqt:quickstart", ["space.strength=[-1]"], "strength must be 0 or more"),
        ("pqt:quickstart", ["space.rank=[4,4]"], "rank must list one or more different values"),
        ("pqt:quickstart", ['space.learning_rate={"mxfp4":[1]}'], "formats that the sweep does not have: mxfp4"),
        ("pqt:quickstart", ["train.batch_size=7", "train.micro_batch_size=2"], "is not a multiple"),
        ("pqt:quickstart", ["train.steps"], "is not of the form key=value"),
        ("pqt:quickstart", ["name=a/b"], "match pattern"),
    ],
)
def test_bad_spaces_and_overrides_are_one_line(space: str, overrides: list[str], expected: str):
    with pytest.raises(ConfigError) as caught:
        load_space(space, SweepConfig, overrides)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_each_format_has_its_own_rates_and_others_take_the_runs():
    config = pqt.quickstart().with_overrides(
        {"space.format": ["nvfp4", "mxfp4"], "space.learning_rate": {"mxfp4": [0.1, 0.2]}, "train.optimizer.learning_rate": 0.003}
    )
    assert config.rates("nvfp4") == (0.003,)
    assert config.rates("mxfp4") == (0.1, 0.2)
    assert config.trials == 2 * 2 * 3
