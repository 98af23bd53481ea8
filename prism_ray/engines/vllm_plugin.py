"""Entry point `vllm.general_plugins`: makes prism-ray's FP4 checkpoints loadable in vLLM, in every process that vLLM starts.

It registers the quantization method `prism_fp4` (`vllm_quant`), which takes over compressed-tensors NVFP4 and MXFP4 checkpoints on a CPU, where vLLM itself runs
none, and on request (`quantization="prism_fp4"`) elsewhere. Planes per request need the worker of `vllm_worker` besides; `vllm_engine` asks for both.
Importing this module imports no vLLM; registering twice is registering once.
"""

from __future__ import annotations


def register() -> None:
    """Called by vLLM in its front end, its engine core and each worker."""
    from vllm.model_executor.layers.quantization import register_quantization_config

    from prism_ray.engines.vllm_quant import NAME, config_class

    register_quantization_config(NAME)(config_class())
