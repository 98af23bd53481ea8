"""Compile a Triton kernel for a GPU that is not there, and read what it needs of one.

`compile_kernel` runs Triton's compiler and its bundled ptxas for a compute capability given as a number, so a machine without a GPU can hold every launch shape of a kernel
to a target's limits: registers and spilled bytes a thread (the bundled `cuobjdump` on the cubin: Triton's kernels have no other use of a thread's stack frame
than registers that ptxas spilled), shared memory a block (Triton's metadata, which is what a launch asks for). `require_fits` is the check that tests and benches share.

Not under TRITON_INTERPRET=1, where kernels are Python functions that no compiler can read: compile in a process without it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prism_kernels.dispatch import HAS_TRITON, require

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes of shared memory that one block may ask for (CUDA C++ Programming Guide, technical specifications per compute capability)."""
TARGETS = tuple(SHARED_LIMIT)


@dataclass(frozen=True, kw_only=True)
class CompiledInfo:
    """What a compiled kernel needs. registers: a thread. shared_bytes: a block. spills: bytes of registers a thread keeps in local memory. cubin_bytes: size of the binary."""

    registers: int
    shared_bytes: int
    spills: int
    cubin_bytes: int


def compile_kernel(
    fn: Any, signature: Mapping[str, str], constexprs: Mapping[str, object], cc: int, num_warps: int = 4, num_stages: int = 3
) -> CompiledInfo:
    """Compile the `triton.jit` function `fn` for compute capability `cc` (80, 90, 100, 120) and report its needs.

    signature: Triton type of each argument by name ("*bf16", "i32", "constexpr"), with ":16" behind an integer that is always a multiple of 16, which a launch finds
    out by itself and which lets loads be wide; arguments named in `constexprs` may be left out. constexprs: value of each
    compile-time argument; a pointer that a launch passes as None is one. Pointers are taken as aligned to 16 bytes, as torch's allocations are.
    Raises ValueError for an unknown target, an argument without a type, and a function that is not compilable here.
    """
    require(HAS_TRITON, "compiling a kernel needs Triton; remedy: pip install 'triton>=3.6'")
    require(cc in SHARED_LIMIT, f"no target of compute capability {cc}; known: {', '.join(map(str, TARGETS))}")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as triton_compile

    require(
        hasattr(fn, "signature"), f"{getattr(fn, '__name__', fn)} is no compilable kernel; unset TRITON_INTERPRET before it is imported"
    )
    missing = [name for name in fn.arg_names if name not in constexprs and name not in signature]
    require(not missing, f"no type for the arguments {', '.join(missing)} of {fn.__name__}")
    types = {name: "constexpr" if name in constexprs else signature[name].removesuffix(":16") for name in fn.arg_names}
    multiples = {
        name for name in fn.arg_names if types[name].startswith("*") or (types[name] != "constexpr" and signature[name].endswith(":16"))
    }
    places = {(place,): constexprs[name] for place, name in enumerate(fn.arg_names) if name in constexprs}
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(fn.arg_names) if name in multiples}
    source = ASTSource(fn=fn, signature=types, constexprs=places, attrs=aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}
    compiled = triton_compile(source, target=GPUTarget("cuda", cc, 32), options=options)
    cubin = compiled.asm["cubin"]
    registers, spills = _resources(cubin)
    return CompiledInfo(registers=registers, shared_bytes=int(compiled.metadata.shared), spills=spills, cubin_bytes=len(cubin))


def require_fits(info: CompiledInfo, cc: int, name: str) -> None:
    """Raise ValueError where a kernel spills registers or asks for more shared memory than a block of the target may have."""
    require(info.spills == 0, f"{name} spills {info.spills} bytes a thread on sm_{cc}; use a smaller tile or more warps")
    limit = SHARED_LIMIT[cc]
    require(
        info.shared_bytes <= limit, f"{name} asks for {info.shared_bytes} bytes of shared memory, sm_{cc} has {limit}; use fewer stages"
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, bytes of spilled registers a thread) of the one kernel in a cubin."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
    require("REG" in usage, f"cuobjdump reported no registers: {said.strip()!r}")
    return usage["REG"], max(usage.get("STACK", 0), usage.get("LOCAL", 0))
