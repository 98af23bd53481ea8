"""The methods that Scale-QLoRA is compared with, as PEFT methods; importing this package registers them."""

from prism_ray.adapters.baselines.config import BaselineConfig, PeqaBlockConfig, PeqaConfig, QatLoraConfig
from prism_ray.adapters.baselines.layer import BaselineExperts, BaselineLayer, BaselineLinear
from prism_ray.adapters.baselines.lora import FP4LoraLinear, lora_config
from prism_ray.adapters.baselines.tuner import BaselineModel, PeqaBlockModel, PeqaModel, QatLoraModel
from prism_ray.adapters.peft_types import register

for _config, _model in ((QatLoraConfig, QatLoraModel), (PeqaConfig, PeqaModel), (PeqaBlockConfig, PeqaBlockModel)):
    register(_config.METHOD, _config, _model, _model.prefix)

__all__ = [
    "BaselineConfig",
    "BaselineExperts",
    "BaselineLayer",
    "BaselineLinear",
    "BaselineModel",
    "FP4LoraLinear",
    "PeqaBlockConfig",
    "PeqaBlockModel",
    "PeqaConfig",
    "PeqaModel",
    "QatLoraConfig",
    "QatLoraModel",
    "lora_config",
]
