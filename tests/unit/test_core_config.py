"""prism_ray.core.config, registry, errors: strictness, overrides, nearest names; every user error is one line and survives pickling."""

from __future__ import annotations

import math
import pickle

import pytest
from pydantic import Field

from prism_ray.core import errors
from prism_ray.core.config import Config, suggest
from prism_ray.core.errors import ConfigError, EnvironmentFault, PrismError, UnknownName
from prism_ray.core.optional import require
from prism_ray.core.registry import Registry


class Train(Config):
    learning_rate: float = Field(default=1e-3, gt=0)
    steps: int = 10
    ranks: tuple[int, ...] = (4, 8)
    resume: bool = False
    note: str | None = None


class Run(Config):
    model: str
    train: Train = Field(default_factory=Train)
    reference: Train | None = None
    overrides: dict[str, str] = Field(default_factory=dict)


def test_a_config_is_frozen_keyword_only_and_equal_by_value():
    run = Run(model="tiny")
    assert run == Run(model="tiny", train=Train()) and run != Run(model="other")
    with pytest.raises(Exception, match="frozen"):
        run.model = "x"
    with pytest.raises(TypeError):
        Run("tiny")


def test_plain_data_gives_the_same_object_back():
    run = Run(model="tiny", train=Train(ranks=(1, 2), note="a"), overrides={"*.q": "mxfp4"})
    assert Run.load(run.to_dict()) == run
    assert run.to_dict()["train"]["ranks"] == [1, 2]


@pytest.mark.parametrize(
    ("override", "read", "expected"),
    [
        ("model=llama", lambda run: run.model, "llama"),
        ("train.learning_rate=1e-4", lambda run: run.train.learning_rate, 1e-4),
        ("train.steps=40", lambda run: run.train.steps, 40),
        ("train.ranks=[2, 16]", lambda run: run.train.ranks, (2, 16)),
        ("train.resume=true", lambda run: run.train.resume, True),
        ("train.note=null", lambda run: run.train.note, None),
        ("train.note=a=b c", lambda run: run.train.note, "a=b c"),
        ("train.note=", lambda run: run.train.note, ""),
        ('train={"steps": 3}', lambda run: run.train, Train(steps=3)),
        ('overrides={"a": "b"}', lambda run: run.overrides, {"a": "b"}),
        ("overrides.layer=mxfp4", lambda run: run.overrides, {"layer": "mxfp4"}),
        ('reference={"steps": 7}', lambda run: run.reference, Train(steps=7)),
    ],
)
def test_overrides_from_text(override, read, expected):
    run = Run(model="tiny", train=Train(note="x"))
    changed = run.with_overrides([override])
    assert read(changed) == expected
    assert run.train == Train(note="x") and run.model == "tiny"  # the original is unchanged


def test_overrides_from_a_mapping_apply_together_and_a_later_one_wins():
    run = Run(model="tiny").with_overrides({"train.steps": 5, "train.note": "x", "reference": {"steps": 1}})
    assert run.train == Train(steps=5, note="x") and run.reference == Train(steps=1)
    assert Run(model="tiny").with_overrides(["train.steps=5", "train.steps=6"]).train.steps == 6


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.learning_rat=1", r"train\.learning_rat: unknown option 'train\.learning_rat'; did you mean 'learning_rate'\?"),
        ("trian.steps=1", r"unknown option 'trian\.steps'; did you mean 'train'\?"),
        ("zzz=1", "unknown option 'zzz'; known: model, overrides, reference, train"),
        ("train.steps.more=1", "unknown option"),
        ("reference.steps=1", "'reference' is not set, so 'reference.steps' cannot be changed; set reference first"),
        ("train.steps", "'train.steps' is not of the form key=value"),
        ("=3", "'=3' is not of the form key=value"),
        ("train.steps=many", r"steps: .*integer.*\(got 'many'\)"),
        ("train.steps=1.5", r"steps: .*\(got 1\.5\)"),
        ("train.learning_rate=-1", r"learning_rate: .*greater than 0 \(got -1\)"),
        ('train={"step": 3}', r"unknown option 'step' of Train; did you mean 'steps'\?"),
        ("train.learning_rate=NaN", "learning_rate"),
        ("train.learning_rate=Infinity", "learning_rate"),
    ],
)
def test_bad_overrides_are_one_line_with_the_nearest_name(override, message):
    with pytest.raises(ConfigError, match=message) as raised:
        Run(model="tiny").with_overrides([override])
    assert "\n" not in str(raised.value)


def test_constructing_with_wrong_values_names_the_field():
    with pytest.raises(ConfigError, match=r"model: Field required"):
        Run()
    with pytest.raises(ConfigError, match=r"unknown option 'modle' of Run; did you mean 'model'\?"):
        Run(model="x", modle="y")
    for value in (math.nan, math.inf):
        with pytest.raises(ConfigError, match="learning_rate"):
            Train(learning_rate=value)
    with pytest.raises(ConfigError, match=r"steps: .*got 'x'"):
        Run(model="a", train={"steps": "x"})


def test_suggest():
    assert suggest("nvpf4", ["mxfp4", "nvfp4"]) == "did you mean 'nvfp4'?"
    assert suggest("zz", ["a", "b"]) == "known: a, b"
    assert suggest("zz", []) == "known: none"


ERRORS = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, PrismError)]


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_errors_survive_pickling_with_all_their_parts(cls):
    error = cls("no such row", where="data.csv:3", remedy="mend it")
    assert str(error) == "data.csv:3: no such row; mend it"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls and str(again) == str(error)
    assert (again.what, again.where, again.remedy) == ("no such row", "data.csv:3", "mend it")


def test_an_error_without_place_or_remedy():
    assert str(PrismError("broken")) == "broken"
    assert str(PrismError("broken", where="x")) == "x: broken"
    assert issubclass(UnknownName, ConfigError) and issubclass(errors.GridMismatch, errors.FormatError) and len(ERRORS) >= 12


def test_a_registry_refuses_duplicates_and_names_what_it_knows():
    registry: Registry[int] = Registry("format")
    assert registry.add("nvfp4", 1) == 1 and registry.add("mxfp4", 2) == 2
    assert registry["mxfp4"] == 2 and list(registry) == ["nvfp4", "mxfp4"] and "nvfp4" in registry and "x" not in registry
    with pytest.raises(ValueError, match="format 'nvfp4' is registered twice"):
        registry.add("nvfp4", 3)
    assert registry["nvfp4"] == 1
    with pytest.raises(UnknownName, match=r"unknown format 'nvfp5'; did you mean 'nvfp4'\?"):
        registry["nvfp5"]
    with pytest.raises(UnknownName, match="unknown format 'zz'; known: mxfp4, nvfp4"):
        registry["zz"]


def test_an_optional_import_says_which_extra_brings_it(tmp_path, monkeypatch):
    assert require("json", "any") is __import__("json")
    with pytest.raises(EnvironmentFault, match=r"package 'no_such_pkg' is not installed; pip install 'prism-ray\[gpu\]'"):
        require("no_such_pkg.sub", "gpu")
    # A package that is there but lacks one of its own is another fault, and keeps its own message.
    (tmp_path / "half_there.py").write_text("import missing_inside\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="missing_inside"):
        require("half_there", "gpu")
