"""Find a run or sweep by `module:function` and apply `key=value` overrides."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import TypeVar

from prism_ray.core.config import Config, suggest
from prism_ray.core.errors import ConfigError

C = TypeVar("C", bound=Config)


def load_space(name: str, kind: type[C], overrides: Sequence[str]) -> C:
    """Call the function `module:function` (module relative to tune_spaces where it has no dot) and override its config.

    Raises ConfigError for a module or function that does not exist, one that returns something else, and unknown keys.
    """
    module_name, separator, function_name = name.partition(":")
    if not separator or not module_name or not function_name:
        raise ConfigError(f"'{name}' is not of the form module:function", where="--space", remedy="write for example pqt:quickstart")
    candidates = [module_name] if "." in module_name else [f"tune_spaces.{module_name}", module_name]
    module = None
    for candidate in candidates:
        try:
            module = importlib.import_module(candidate)
            break
        except ModuleNotFoundError as error:
            if error.name is None or not candidate.startswith(error.name):
                raise
    if module is None:
        raise ConfigError(f"there is no module '{module_name}'", where="--space", remedy=f"tried {', '.join(candidates)}")
    spaces = sorted(
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and not key.startswith("_") and value.__module__ == module.__name__
    )
    if function_name not in spaces:
        raise ConfigError(
            f"module '{module.__name__}' has no space '{function_name}'", where="--space", remedy=suggest(function_name, spaces)
        )
    config = getattr(module, function_name)()
    if not isinstance(config, kind):
        raise ConfigError(f"'{name}' returns a {type(config).__name__}, not a {kind.__name__}", where="--space")
    return config.with_overrides(overrides)
