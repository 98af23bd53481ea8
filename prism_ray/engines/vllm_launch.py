"""Start vLLM with prism-ray's quantization method and worker: settings, engine arguments, environment.

vLLM's processes read their environment: a worker of its CPU build would pin itself to the first cores, which replicas of one node would then share, so it is told
not to where nothing else was set. LoRA is enabled for its bookkeeping alone: requests with an adapter's identity, slots in the scheduler, hashes; see `vllm_worker`.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from prism_ray.core.config import Config
from prism_ray.core.errors import EnvironmentFault
from prism_ray.core.optional import require
from prism_ray.engines.vllm_quant import NAME
from prism_ray.engines.vllm_worker import SETTINGS

WORKER = "prism_ray.engines.vllm_worker.PlaneWorker"
PLUGINS, PLUGIN = "vllm.general_plugins", "prism_ray"


class VllmSettings(Config):
    """max_planes: resident at once, besides the base. max_sequences, batch_tokens: of one step. max_length: of one sequence, default the model's own.
    page_tokens: of the prefix cache: a prefix is shared by whole pages. cache_bytes: of the key-value cache. weight_cache_bytes: decoded weights that are kept
    on a CPU, 0 for none. threads: of the worker on a CPU, default one a core."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    max_planes: int = Field(default=32, ge=1)
    max_sequences: int = Field(default=64, ge=1)
    batch_tokens: int = Field(default=2048, ge=16)
    max_length: int | None = Field(default=None, ge=2)
    page_tokens: int = Field(default=32, ge=1)
    cache_bytes: int = Field(default=1 << 30, ge=1 << 20)
    weight_cache_bytes: int = Field(default=2 << 30, ge=0)
    max_logprobs: int = Field(default=20, ge=0)
    threads: int | None = Field(default=None, ge=1)


def require_plugin() -> None:
    """Raise EnvironmentFault where vLLM is not installed, or its processes would not find our entry point."""
    require("vllm", "cpu")
    if PLUGIN not in {point.name for point in entry_points(group=PLUGINS)}:
        raise EnvironmentFault(f"the entry point '{PLUGIN}' of {PLUGINS} is missing", remedy="install prism-ray again")


def launch(folder: Path, settings: VllmSettings, *, with_tokenizer: bool) -> Any:
    """An AsyncLLM whose workers hold planes. Takes as long as three processes need to import vLLM, and to load the base."""
    # Read by the processes that vLLM starts. A worker pinned to the first cores would share them with its node's other replicas.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if settings.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=str(folder),
        dtype=settings.dtype,
        quantization=NAME,
        worker_cls=WORKER,
        enable_lora=True,
        max_loras=settings.max_planes,
        max_cpu_loras=settings.max_planes,
        # Planes are chosen in Python at each linear; vLLM compiles nothing on a CPU with adapters enabled either.
        enforce_eager=True,
        max_model_len=settings.max_length,  # type: ignore[arg-type]  # None: the model's own
        max_num_seqs=settings.max_sequences,
        max_num_batched_tokens=settings.batch_tokens,
        enable_prefix_caching=True,
        block_size=settings.page_tokens,
        kv_cache_memory_bytes=settings.cache_bytes,
        max_logprobs=settings.max_logprobs,
        skip_tokenizer_init=not with_tokenizer,
        additional_config={SETTINGS: {"weight_cache_bytes": settings.weight_cache_bytes}},
        disable_log_stats=True,
    )
    return AsyncLLM.from_engine_args(arguments)


def end_tokens(llm: Any) -> frozenset[int]:
    """End of sequence ids of the generation config, or else of the model's."""
    config = llm.model_config
    found = config.try_get_generation_config().get("eos_token_id")
    found = getattr(config.hf_text_config, "eos_token_id", None) if found is None else found
    return frozenset([found] if isinstance(found, int) else found or ())
