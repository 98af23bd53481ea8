"""vLLM's quantization method `prism_fp4`: loads compressed-tensors NVFP4 and MXFP4 checkpoints into linears that take a scale plane for each token.

| tensor of the checkpoint | parameter | dtype, shape |
|---|---|---|
| N.weight_packed | ModelWeightParameter | uint8 [O, I/2], two E2M1 codes a byte, low nibble first |
| N.weight_scale | GroupQuantScaleParameter | float8_e4m3fn [O, I/16], or uint8 [O, I/32] |
| N.weight_global_scale | PerTensorScaleParameter | float32 [parts], the reciprocal tensor scale of each stacked part; NVFP4 only |

vLLM's loaders stack q/k/v and gate/up. After loading, codes and scale bytes stay as they are; `vllm_planes.PlanedLinear` multiplies with them. Classes are made
on demand: this module imports without vLLM.

Refused: other formats, parts of one stack in different formats, quantized experts and a quantized output head (the transformers engine serves those),
tensor parallelism (a plane is stacked for one rank).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from prism_ray.core.errors import CheckpointError, ModelError, PrismError
from prism_ray.engines.vllm_planes import PlanedLinear, Product, plain_product, spans_of
from prism_ray.formats.config_groups import CLASS, METHOD, format_of_config, formats_of_modules, ignored_by
from prism_ray.formats.spec import FORMATS, FP4_FORMATS, FormatSpec

NAME = "prism_fp4"
OTHER_ENGINE = "serve it with the transformers engine"


def takes_over(config: Mapping[str, Any], user: str | None, *, cpu: bool) -> bool:
    """Whether a checkpoint's quantization config is ours to load: always when asked for by name, on a CPU whenever all of its groups are FP4."""
    if user not in (None, NAME, METHOD) or config.get("quant_method") != METHOD:
        return False
    known = {FORMATS[name].checkpoint_format for name in FP4_FORMATS}
    groups = (config.get("config_groups") or {"": {}}).values()
    fits = all((group.get("format") or config.get("format")) in known and group.get("input_activations") is None for group in groups)
    return user == NAME or (cpu and fits)


def format_of_members(config: Mapping[str, Any], members: Sequence[str], where: str) -> FormatSpec | None:
    """The one format of the parts of a stack; None where they are in full precision. Raises CheckpointError for several, or one that is not FP4."""
    ignored = {name for entry in config.get("ignore") or [] for name in ignored_by(str(entry), members)}
    found: dict[str, FormatSpec | None] = dict.fromkeys(ignored)
    try:
        found |= formats_of_modules(config, [name for name in members if name not in ignored], where)
    except CheckpointError:
        # No group targets it by name, and none targets the class.
        if any(CLASS in (group.get("targets") or ()) for group in (config.get("config_groups") or {}).values()):
            raise
        return None
    kinds = {None if spec is None else spec.name for spec in found.values()}
    if len(kinds) > 1:
        raise CheckpointError(
            f"parts that are served as one matrix have formats {sorted(map(str, kinds))}", where=where, remedy="quantize them alike"
        )
    spec = next(iter(found.values()))
    if spec is not None and not spec.is_fp4:
        raise CheckpointError(
            f"is {spec.name}; {NAME} reads {', '.join(FP4_FORMATS)}", where=where, remedy="load it with vLLM's own method"
        )
    return spec


def member_names(prefix: str, packed: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The parts that a module of vLLM stacks, itself where it stacks none."""
    parent, _, leaf = prefix.rpartition(".")
    return tuple(f"{parent}.{part}" if parent else part for part in packed.get(leaf) or [leaf])


def cpu_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """vLLM's product for dense weights on this processor (AMX, oneDNN or torch), packed once."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    holder: Any = torch.nn.Module()
    holder.weight = torch.nn.Parameter(weight, requires_grad=False)
    # Some of its products want the bias in float32 and convert the layer's own: a copy, the layer is shared by all planes.
    holder.bias = None if bias is None else torch.nn.Parameter(bias.detach().clone(), requires_grad=False)
    dispatch_cpu_unquantized_gemm(holder, remove_weight=False)
    if getattr(holder.cpu_linear, "__closure__", None):
        holder.weight = None  # packed: the closure holds what is needed
    return lambda x, added: holder.cpu_linear(x, holder.weight, None if added is None else holder.bias)


@lru_cache(maxsize=1)
def method_class() -> type[Any]:
    """The LinearMethodBase of quantized linears."""
    from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
    from vllm.model_executor.parameter import GroupQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter

    @register_weight_loader_v2_supported_method
    class PrismFP4LinearMethod(LinearMethodBase):
        """Holds one stack's format and its parts' names."""

        def __init__(self, spec: FormatSpec, name: str, members: tuple[str, ...]):
            self.spec, self.name, self.members = spec, name, members

        def create_weights(
            self,
            layer: torch.nn.Module,
            input_size_per_partition: int,
            output_partition_sizes: list[int],
            input_size: int,
            output_size: int,
            params_dtype: torch.dtype,
            **extra: Any,
        ) -> None:
            columns, rows = input_size_per_partition, sum(output_partition_sizes)
            if columns != input_size or getattr(layer, "tp_size", 1) != 1:
                raise ModelError("scale planes are stacked for one rank", where=self.name, remedy="use tensor_parallel_size 1")
            loader = extra["weight_loader"]
            layer.logical_widths = output_partition_sizes  # type: ignore[assignment]
            codes = torch.empty(rows, columns // 2, dtype=torch.uint8)
            layer.register_parameter("weight_packed", ModelWeightParameter(data=codes, input_dim=1, output_dim=0, weight_loader=loader))
            scales = torch.empty(rows, self.spec.blocks(columns, self.name), dtype=self.spec.checkpoint_scale_dtype)
            layer.register_parameter("weight_scale", GroupQuantScaleParameter(data=scales, input_dim=1, output_dim=0, weight_loader=loader))
            if self.spec.has_tensor_scale:
                divisors = torch.empty(len(output_partition_sizes), dtype=torch.float32)
                layer.register_parameter("weight_global_scale", PerTensorScaleParameter(data=divisors, weight_loader=loader))

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            widths: list[int] = layer.logical_widths  # type: ignore[assignment]
            factors = (1.0 / layer.weight_global_scale.data).tolist() if self.spec.has_tensor_scale else [1.0]  # type: ignore[operator, union-attr]
            codes: torch.Tensor = layer.weight_packed.data  # type: ignore[assignment, union-attr]
            scales: torch.Tensor = layer.weight_scale.data  # type: ignore[assignment, union-attr]
            cpu = codes.device.type == "cpu"
            layer.planed = PlanedLinear(  # type: ignore[assignment]
                name=self.name,
                members=self.members,
                codes=codes,
                scales=scales.view(torch.uint8),
                spans=spans_of(widths, factors),
                format=self.spec,
                bias=getattr(layer, "bias", None),
                product=cpu_product if cpu else plain_product,
            )

        def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            planed: PlanedLinear = layer.planed  # type: ignore[assignment]
            return planed(x.reshape(-1, x.shape[-1]), bias).reshape(*x.shape[:-1], -1)

    return PrismFP4LinearMethod


@lru_cache(maxsize=1)
def config_class() -> type[Any]:
    """The QuantizationConfig that vLLM knows as `prism_fp4`."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    class PrismFP4Config(QuantizationConfig):
        """`quantization_config` of a compressed-tensors checkpoint."""

        def __init__(self, config: dict[str, Any]):
            super().__init__()
            self.config = config
            format_of_config(config, NAME)

        def get_name(self) -> Any:
            return NAME

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return [torch.bfloat16, torch.float32]

        @classmethod
        def get_min_capability(cls) -> int:
            return 80

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> PrismFP4Config:
            return cls(config)

        @classmethod
        def override_quantization_method(cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None) -> Any:
            return NAME if takes_over(hf_quant_cfg, user_quant, cpu=current_platform.is_cpu()) else None

        def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
            def renamed(names: Sequence[str]) -> list[str]:
                return [hf_to_vllm_mapper.map_name(n) or n if "." in n and not n.startswith("re:") else n for n in names]

            groups = {
                key: {**group, "targets": renamed(group.get("targets") or [CLASS])}
                for key, group in (self.config.get("config_groups") or {"": {}}).items()
            }
            self.config = {**self.config, "ignore": renamed(self.config.get("ignore") or []), "config_groups": groups}

        def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
            if isinstance(layer, LinearBase):
                members = member_names(prefix, self.packed_modules_mapping)
                spec = format_of_members(self.config, members, prefix)
                return UnquantizedLinearMethod() if spec is None else method_class()(spec, prefix, members)
            if isinstance(layer, (RoutedExperts, ParallelLMHead)) and self._quantized(layer, prefix):
                kind = "output heads" if isinstance(layer, ParallelLMHead) else "experts"
                raise ModelError(f"quantized {kind} are not served by {NAME}", where=prefix, remedy=OTHER_ENGINE)
            return None

        def _quantized(self, layer: torch.nn.Module, prefix: str) -> bool:
            names = [prefix] if isinstance(layer, ParallelLMHead) else [f"{prefix}.0.down_proj"]
            try:
                return format_of_members(self.config, names, prefix) is not None
            except PrismError:
                return True

    return PrismFP4Config
