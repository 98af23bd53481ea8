"""Optional imports: an error at use, naming the extra to install."""

from __future__ import annotations

import importlib
from types import ModuleType

from prism_ray.core.errors import EnvironmentFault


def require(module: str, extra: str) -> ModuleType:
    """Import `module`, or raise EnvironmentFault that says which extra of prism-ray brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and module.split(".")[0] != error.name.split(".")[0]:
            raise
        raise EnvironmentFault(f"package '{module.split('.')[0]}' is not installed", remedy=f"pip install 'prism-ray[{extra}]'") from None
