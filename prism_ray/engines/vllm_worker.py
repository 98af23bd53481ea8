"""The worker process of the vLLM engine: residency of planes, and the hook by which requests reach them.

vLLM carries an adapter's identity (`LoRARequest`: name, number, path) with each request through scheduling, the step's token-to-adapter mapping and the prefix
cache's hashes. A model runner hands that mapping to the object that its `load_lora_model` made. `PlaneWorker` (an engine argument of vLLM, `worker_cls`)
puts a `PlaneManager` there: it turns the mapping into a `Step` and nothing else. No layer is wrapped, no low-rank tensor is made, no adapter file is read in the
step loop, and a slot costs no memory on a CPU.

    attach_plane(number, digest, path)   maps a safetensors file of stacked scales {module name: uint8 [O, G]}; zero copies on a CPU
    detach_plane(number)                 drops the scales and the weights decoded under them
    plane_layout(names)                  {module: checkpoint names of its parts, in the order of the stack}

These come through `collective_rpc`, which runs between two steps. A number that is not attached raises: it never means the base.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from prism_ray.core.errors import ModelError
from prism_ray.engines.protocol import BASE
from prism_ray.engines.vllm_planes import KernelCache, PlanedLinear, Step
from prism_ray.engines.vllm_quant import OTHER_ENGINE

SETTINGS = "prism_ray"
"""Key of our settings in vLLM's `additional_config`."""


class PlaneManager:
    """What a model runner of vLLM asks of its LoRA manager, over planes.

    linears: by module name. slots: planes that fit the stacks on CUDA; 0 on a CPU, where planes are kept one by one.
    """

    is_enabled = True

    def __init__(self, linears: Sequence[PlanedLinear], *, cache_bytes: int, slots: int = 0, max_tokens: int = 0):
        self.linears = {linear.name: linear for linear in linears}
        device = linears[0].codes.device if linears else torch.device("cpu")
        on_cpu = device.type == "cpu"
        self.step = Step(None if on_cpu else torch.zeros(max_tokens, dtype=torch.int32, device=device))
        self.cache = KernelCache(cache_bytes if on_cpu else 0, self.step)
        self.digests: dict[int, str] = {}
        self._slots: list[str | None] = [None] * (0 if on_cpu else slots)
        self._dummies: set[int] = set()
        for linear in linears:
            linear.step, linear.cache = self.step, self.cache if on_cpu else None
            if not on_cpu:
                linear.stack = linear.scales.expand(slots + 1, *linear.scales.shape).contiguous()

    # --- planes -------------------------------------------------------------------------------------------------------------------

    def attach(self, number: int, digest: str, path: str) -> None:
        """Make the plane of a file resident; its tensors were checked by the engine."""
        scales = load_file(path)
        if self._slots:
            slot = self._slots.index(None)
            for name, linear in self.linears.items():
                assert linear.stack is not None
                linear.stack[slot + 1].copy_(scales.get(name, linear.scales))
            self._slots[slot] = digest
        else:
            for name, tensor in scales.items():
                self.linears[name].planes[digest] = tensor
        self.digests[number] = digest

    def detach(self, number: int) -> None:
        """Let go of a plane."""
        digest = self.digests.pop(number)
        for linear in self.linears.values():
            linear.planes.pop(digest, None)
        if digest in self._slots:
            self._slots[self._slots.index(digest)] = None
        self.cache.forget(digest)

    # --- what model runners call --------------------------------------------------------------------------------------------------

    def set_active_adapters(self, requests: set[Any], mapping: Any | None) -> None:
        """Before each step. mapping.index_mapping: a number for each token, 0 for none."""
        if mapping is None:
            return
        numbers, index = np.unique(np.asarray(mapping.index_mapping, dtype=np.int64), return_inverse=True)
        digests = [self._digest(int(number)) for number in numbers]
        distinct = list(dict.fromkeys(digests))
        self.step.set(distinct, np.array([distinct.index(digest) for digest in digests], dtype=np.int64)[index])
        self.cache.touch()
        if self.step.slots is not None:
            slots = np.array([0 if digest == BASE else self._slots.index(digest) + 1 for digest in digests], dtype=np.int32)
            filled = torch.from_numpy(slots[index])
            # Tokens that pad a step to a graph's size run on the base.
            self.step.slots[len(filled) :] = 0
            self.step.slots[: len(filled)].copy_(filled, non_blocking=True)

    def _digest(self, number: int) -> str:
        if number == 0 or number in self._dummies:
            return BASE
        if number not in self.digests:
            raise RuntimeError(f"no plane of number {number} is attached")
        return self.digests[number]

    def add_adapter(self, request: Any) -> bool:
        """Planes come through `attach` alone."""
        return request.lora_int_id in self.digests

    def remove_adapter(self, number: int) -> bool:
        """Planes go through `detach` alone."""
        self._dummies.discard(number)
        return False

    def pin_adapter(self, number: int) -> bool:
        """Resident planes stay until they are detached."""
        return number in self.digests

    def list_adapters(self) -> set[int]:
        """Numbers of the resident planes."""
        return set(self.digests)

    def remove_all_adapters(self) -> None:
        """End of the warm-up."""
        self._dummies.clear()

    @contextmanager
    def dummy_lora_cache(self) -> Iterator[None]:
        """Of the warm-up; there is nothing to keep."""
        yield

    def add_dummy_lora(self, request: Any, rank: int) -> bool:
        """A number of the warm-up, which runs on the base."""
        self._dummies.add(request.lora_int_id)
        return True

    def get_dummy_lora_warmup_rank(self, default_rank: int) -> int:
        """There are no ranks."""
        return default_rank

    def supports_tower_connector_lora(self) -> bool:
        """Planes are the language model's."""
        return False


def layout_of(linears: Sequence[PlanedLinear], names: Sequence[str], mapper: Any | None) -> dict[str, list[str]]:
    """Module name -> checkpoint names of its parts. names: the quantized Linears of the checkpoint; mapper: of the architecture, checkpoint name to vLLM's.

    Raises ModelError when a quantized Linear has no place: its planes would be ignored.
    """
    known = {(mapper.map_name(name) if mapper is not None else name) or name: name for name in names}
    out = {linear.name: [known.pop(member, "") for member in linear.members] for linear in linears}
    missing = sorted(known.values())
    if missing or any("" in parts for parts in out.values()):
        what = f"{len(missing)} quantized weights have no linear, first '{missing[0]}'" if missing else "a stack has no weights"
        raise ModelError(f"vLLM's model does not hold the checkpoint's linears: {what}", remedy=OTHER_ENGINE)
    return out


@lru_cache(maxsize=1)
def _worker_class() -> type[Any]:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker as Worker
    else:
        from vllm.v1.worker.gpu_worker import Worker  # type: ignore[assignment]

    class PlaneWorker(Worker):  # type: ignore[misc, valid-type]
        """vLLM's worker with a PlaneManager in the place of the LoRA manager."""

        def init_device(self) -> None:
            super().init_device()
            # The one method in which a model runner makes its LoRA manager; of the instance, so that other engines of the process keep theirs.
            self.model_runner.load_lora_model = self._load_planes  # type: ignore[method-assign]

        def _load_planes(self, model: torch.nn.Module, vllm_config: Any, device: torch.device) -> torch.nn.Module:
            linears = [module.planed for module in model.modules() if isinstance(getattr(module, "planed", None), PlanedLinear)]
            self.planes = PlaneManager(
                linears,  # type: ignore[arg-type]
                cache_bytes=int((vllm_config.additional_config or {}).get(SETTINGS, {}).get("weight_cache_bytes", 0)),
                slots=vllm_config.lora_config.max_loras,
                max_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            )
            self.model_runner.lora_manager = self.planes  # type: ignore[assignment]
            mapper = getattr(model, "hf_to_vllm_mapper", None)
            # Renames only: the full mapper sends q, k and v to the stack that they are loaded into.
            self._mapper = None if mapper is None else mapper.get_rename_mapper()
            return model

        def plane_layout(self, names: list[str]) -> dict[str, list[str]]:
            """See the module."""
            return layout_of(list(self.planes.linears.values()), names, self._mapper)

        def attach_plane(self, number: int, digest: str, path: str) -> int:
            """See the module; returns how many planes are resident."""
            self.planes.attach(number, digest, path)
            return len(self.planes.digests)

        def detach_plane(self, number: int) -> int:
            """See the module; returns how many planes are resident."""
            self.planes.detach(number)
            return len(self.planes.digests)

        def plane_memory(self) -> dict[str, int]:
            """What the planes cost in this process."""
            cache = self.planes.cache
            scales = sum(tensor.numel() for linear in self.planes.linears.values() for tensor in linear.planes.values())
            return {
                "planes": len(self.planes.digests),
                "scale_bytes": scales,
                "weight_bytes": cache.used_bytes,
                "weight_hits": cache.hits,
                "weight_misses": cache.misses,
                "weight_refused": cache.refused,
            }

    return PlaneWorker


def __getattr__(name: str) -> Any:
    """`PlaneWorker`, made at its first use: its base class is vLLM's for the platform."""
    if name == "PlaneWorker":
        return _worker_class()
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
