"""Scale-QLoRA as a PEFT method; importing this package registers it."""

from prism_ray.adapters.scale_qlora.config import ScaleQLoraConfig
from prism_ray.adapters.scale_qlora.experts import ScaleQLoraExperts, prune_experts
from prism_ray.adapters.scale_qlora.layer import ScaleQLoraLayer, ScaleQLoraLinear
from prism_ray.adapters.scale_qlora.model import ScaleQLoraModel
from prism_ray.adapters.scale_qlora.register import register

register()

__all__ = ["ScaleQLoraConfig", "ScaleQLoraExperts", "ScaleQLoraLayer", "ScaleQLoraLinear", "ScaleQLoraModel", "prune_experts"]
