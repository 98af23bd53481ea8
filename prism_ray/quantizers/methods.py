"""The registered quantizers: a new one is a module, a test module and a line here."""

from __future__ import annotations

from prism_ray.core.registry import Registry
from prism_ray.quantizers.awq import awq, choose
from prism_ray.quantizers.base import Method
from prism_ray.quantizers.gptq import gptq, gptq_batch
from prism_ray.quantizers.simple import mse, rtn

METHODS: Registry[Method] = Registry("method")
METHODS.add("rtn", Method(run=rtn, needs_stats=False))
METHODS.add("mse", Method(run=mse, needs_stats=False))
METHODS.add("awq", Method(run=awq, needs_stats=True, choose=choose))
METHODS.add("gptq", Method(run=gptq, needs_stats=True, batch=gptq_batch))
