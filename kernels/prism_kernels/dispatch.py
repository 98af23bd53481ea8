"""Which path a call takes: a Triton kernel on CUDA tensors, plain torch everywhere else.

`triton` and `tl` are imported from here by every kernel module. Where Triton is not installed they are stand-ins under which a kernel's source can still be
read and decorated, so the package imports; launching such a kernel raises ImportError that names the package.

`TRITON_INTERPRET=1`, set before this package is imported, sends CPU tensors through the kernels too: Triton then runs them in Python. The interpreter has no
bfloat16 arithmetic (it stores the bits as integers), so bfloat16 tensors are computed in float32 there, which holds every product of the FP4 formats exactly.
"""

from __future__ import annotations

import os
from typing import Any

import torch

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:

    class _NotLaunchable:
        """A kernel whose launch says what is missing."""

        def __init__(self, function: Any) -> None:
            self.__name__ = function.__name__

        def __getitem__(self, grid: Any) -> Any:
            raise ImportError(f"kernel {self.__name__} needs Triton, which is not installed; remedy: pip install 'triton>=3.6'")

    class _NoTriton:
        """What the kernel sources need of the module `triton` at import."""

        @staticmethod
        def jit(function: Any = None, **_options: Any) -> Any:
            return _NotLaunchable if function is None else _NotLaunchable(function)

        @staticmethod
        def cdiv(a: int, b: int) -> int:
            return -(-a // b)

        @staticmethod
        def next_power_of_2(n: int) -> int:
            return 1 << max(n - 1, 0).bit_length()

    class _NoLanguage:
        """Stands for `triton.language`: a name of it (tl.float32, tl.constexpr(1)) may be mentioned, nothing can be computed with it."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _NoLanguage()

        def __call__(self, *arguments: Any, **_options: Any) -> Any:
            return arguments[0] if arguments else None

    triton, tl = _NoTriton(), _NoLanguage()
    HAS_TRITON = False

INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0") == "1"


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether kernels can be launched on this tensor: it is on a CUDA device and Triton is installed, or Triton interprets."""
    return HAS_TRITON and (tensor.is_cuda or INTERPRETED)


def kernel_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which a kernel sees tensors of `dtype`: itself, except for bfloat16 under the interpreter."""
    return torch.float32 if INTERPRETED and dtype == torch.bfloat16 else dtype


def require(condition: bool, message: str) -> None:
    """Raise ValueError with the one line `message` unless the condition holds."""
    if not condition:
        raise ValueError(message)
