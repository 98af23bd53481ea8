"""DeepSpeed as a back end: ZeRO 0 to 3 on CPUs and GPUs from one config.

The adapter factors are float32 and the frozen tensors keep their dtype, so neither fp16 nor bf16 mode is switched on: DeepSpeed then casts nothing, and code
bytes viewed as bfloat16 parameters (`set_code_storage`) are gathered and partitioned as the bytes they are. For ZeRO-3 the code plane is stored that way,
so it is sharded with the rest; in the other stages it stays a uint8 buffer outside the engine's reach (field case RAY-02).
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import torch
import torch.distributed as dist

from prism_ray.adapters.scale_qlora.model import trainable_parameters
from prism_ray.core.errors import EnvironmentFault
from prism_ray.core.optional import require
from prism_ray.formats.modules import set_code_storage
from prism_ray.training.backends import FIRST_MOMENT, SECOND_MOMENT, VALUE, State, load_plain_state, new_optimizer, plain_state
from prism_ray.training.config import TrainConfig
from prism_ray.training.objective import Objective


def check_toolchain(device: str) -> None:
    """Raise EnvironmentFault when DeepSpeed would fail later for want of a compiler: on CPUs it builds one extension at first use."""
    if device == "cpu" and not any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")):
        raise EnvironmentFault(
            "DeepSpeed builds a C++ extension at first use, and no C++ compiler is on PATH",
            remedy="install g++ (apt-get install g++), or set backend=local",
        )


class DeepSpeedBackend:
    """An initialized torch.distributed process group is required; each rank builds its own."""

    def __init__(self, objective: Objective, config: TrainConfig, device: str = "cpu"):
        check_toolchain(device)
        if device == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        deepspeed = require("deepspeed", "train")
        self.objective, self.rank, self.world = objective, dist.get_rank(), dist.get_world_size()
        self.stage = config.zero_stage
        self.micro_batches = max(1, config.batch_size // (config.micro_batch_size * self.world))
        if self.stage == 3:
            set_code_storage(objective.model, "parameter")
        self.parameters = trainable_parameters(objective.model)
        optimizer = new_optimizer(list(self.parameters.values()), config.optimizer)
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=objective,
            model_parameters=list(self.parameters.values()),
            optimizer=optimizer,
            dist_init_required=False,
            config=self._settings(config, objective),
        )
        if self.stage:
            self._make_moments()

    def _make_moments(self) -> None:
        """Zero Adam moments of this worker's flat partitions, as AdamW itself makes them in its first step.

        DeepSpeed's getters and setters of optimizer state find nothing before that step, so a fresh engine could not take over a checkpoint.
        """
        flat = self.optimizer.fp32_partitioned_groups_flat if self.stage == 3 else self.optimizer.single_partition_of_fp32_groups
        for partition in flat:
            self._inner().state[partition] = {
                "step": torch.tensor(0.0),
                FIRST_MOMENT: torch.zeros_like(partition, requires_grad=False),
                SECOND_MOMENT: torch.zeros_like(partition, requires_grad=False),
            }
        if self.stage < 3:
            from deepspeed.utils import lazy_init_hp_params_optimizer_state

            for group, partition in zip(self.optimizer.bit16_groups, flat, strict=True):
                lazy_init_hp_params_optimizer_state(group, partition, self._inner().state)

    def _settings(self, config: TrainConfig, objective: Objective) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": config.micro_batch_size,
            "gradient_accumulation_steps": self.micro_batches,
            "gradient_clipping": config.optimizer.max_grad_norm,
            "zero_optimization": {"stage": self.stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
            "wall_clock_breakdown": False,
        }
        if self.stage == 3:
            # Everything is partitioned, the small factors too; a threshold would leave them replicated.
            settings["zero_optimization"] |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 5_000_000}
        return settings

    def run(self, mode: str, batch: Any) -> Any:
        return self.engine(mode, batch)

    def backward(self, loss: torch.Tensor) -> None:
        # The engine averages over workers and micro batches; the loop hands in sums.
        self.engine.backward(loss * (self.world * self.micro_batches))
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()

    def step(self, learning_rate: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if self.stage == 0:
            # The engine reports a norm for its own optimizers only; gradients are reduced at this point.
            norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in self.parameters.values() if parameter.grad is not None])
            self.engine.step()
            return float(norm)
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        if self.world > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def export_state(self) -> State:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if self.stage == 0:
            return {name: plain_state(parameter, self._inner()) for name, parameter in self.parameters.items()}
        out: State = {}
        for name, parameter in self.parameters.items():
            value = safe_get_full_fp32_param(parameter)
            entry = {VALUE: value}
            for key in (FIRST_MOMENT, SECOND_MOMENT):
                entry[key] = safe_get_full_optimizer_state(parameter, key)
            shape = getattr(parameter, "ds_shape", parameter.shape)
            out[name] = {key: tensor.detach().to("cpu", torch.float32, copy=True).view(shape) for key, tensor in entry.items()}
        return out

    def import_state(self, state: State, step: int) -> None:
        from deepspeed import utils

        if self.stage == 0:
            for name, parameter in self.parameters.items():
                load_plain_state(parameter, self._inner(), state[name], step)
            return
        set_value, set_moment = utils.safe_set_full_fp32_param, utils.safe_set_full_optimizer_state
        if self.stage == 3:
            # The setters of full values do not know the padding of a ZeRO-3 partition: one that the workers do not divide evenly is out of range there.
            set_value, set_moment = utils.safe_set_local_fp32_param, utils.safe_set_local_optimizer_state
        for name, parameter in self.parameters.items():
            wanted = {key: self._partition(parameter, value) if self.stage == 3 else value for key, value in state[name].items()}
            set_value(parameter, wanted[VALUE].to(parameter.device))
            for key in (FIRST_MOMENT, SECOND_MOMENT):
                set_moment(parameter, wanted[key].to(parameter.device), key)
        for values in self._inner().state.values():
            values["step"] = torch.tensor(float(step))
        self._refresh(state)

    def _partition(self, parameter: Any, value: torch.Tensor) -> torch.Tensor:
        """This worker's slice of a full value under ZeRO-3, zeros behind the end."""
        size = parameter.ds_tensor.numel()
        flat = torch.zeros(size * self.world, dtype=value.dtype)
        flat[: value.numel()] = value.flatten()
        return flat[size * self.rank : size * (self.rank + 1)]

    def _refresh(self, state: State) -> None:
        """Bring the parameters that the forward reads in line with the master copies that were just set."""
        if self.stage == 3:
            import deepspeed

            with deepspeed.zero.GatheredParameters(list(self.parameters.values()), modifier_rank=0):
                if self.rank == 0:
                    for name, parameter in self.parameters.items():
                        parameter.data.copy_(state[name][VALUE])
        else:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(state[name][VALUE])

    def _inner(self) -> torch.optim.Optimizer:
        """The AdamW inside whatever DeepSpeed wrapped it in."""
        return getattr(self.optimizer, "optimizer", self.optimizer)
