"""What the loop needs of a training back end, and the one that needs neither Ray nor DeepSpeed.

A back end owns the optimizer of an `Objective`'s trainable parameters and the communication between workers. Its state is exported as full,
named float32 tensors on every rank (ZeRO shards gathered), so a checkpoint is independent of the number of workers and of the ZeRO stage, and holds
no pickle.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from prism_ray.adapters.scale_qlora.model import trainable_parameters
from prism_ray.training.config import OptimizerConfig
from prism_ray.training.objective import Objective

VALUE, FIRST_MOMENT, SECOND_MOMENT = "value", "exp_avg", "exp_avg_sq"
State = dict[str, dict[str, torch.Tensor]]
"""Trainable parameter name -> {value, exp_avg, exp_avg_sq}: float32, full shapes, on the CPU."""


class Backend(Protocol):
    """One optimizer over one Objective, on one rank of `world`."""

    rank: int
    world: int
    objective: Objective

    def run(self, mode: str, batch: Any) -> Any:
        """objective(mode, batch) the way the back end wants it called."""

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate gradients of a *summed* loss: over micro batches and workers the gradients add up, nothing is averaged."""

    def step(self, learning_rate: float) -> float:
        """Clip, update, zero the gradients; returns the gradient norm before clipping, over all workers (NaN where unknown)."""

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over workers."""

    def export_state(self) -> State:
        """Full state on every rank; a collective."""

    def import_state(self, state: State, step: int) -> None:
        """Inverse of `export_state` after `step` updates; a collective."""


def new_optimizer(parameters: list[torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW as every back end uses it."""
    return torch.optim.AdamW(parameters, lr=config.learning_rate, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay)


class LocalBackend:
    """A single process with plain PyTorch."""

    rank = 0
    world = 1

    def __init__(self, objective: Objective, config: OptimizerConfig):
        self.objective = objective
        self.parameters = trainable_parameters(objective.model)
        self.max_grad_norm = config.max_grad_norm
        self.optimizer = new_optimizer(list(self.parameters.values()), config)

    def run(self, mode: str, batch: Any) -> Any:
        return self.objective(mode, batch)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self, learning_rate: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        limit = self.max_grad_norm or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), limit))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def export_state(self) -> State:
        return {name: plain_state(parameter, self.optimizer) for name, parameter in self.parameters.items()}

    def import_state(self, state: State, step: int) -> None:
        for name, parameter in self.parameters.items():
            load_plain_state(parameter, self.optimizer, state[name], step)


class InferenceBackend:
    """A single process that only evaluates: a base or a merged checkpoint without an adapter."""

    rank = 0
    world = 1

    def __init__(self, objective: Objective):
        self.objective = objective

    def run(self, mode: str, batch: Any) -> Any:
        return self.objective(mode, batch)

    def backward(self, loss: torch.Tensor) -> None:
        raise RuntimeError("an InferenceBackend does not train")

    def step(self, learning_rate: float) -> float:
        raise RuntimeError("an InferenceBackend does not train")

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def export_state(self) -> State:
        return {}

    def import_state(self, state: State, step: int) -> None:
        raise RuntimeError("an InferenceBackend does not train")


def plain_state(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Value and moments of an unsharded parameter; zero moments before the first step."""
    moments = optimizer.state.get(parameter, {})
    zeros = torch.zeros_like(parameter, dtype=torch.float32)
    out = {VALUE: parameter.detach(), **{key: moments.get(key, zeros) for key in (FIRST_MOMENT, SECOND_MOMENT)}}
    return {key: value.detach().to("cpu", torch.float32, copy=True) for key, value in out.items()}


def load_plain_state(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer, state: dict[str, torch.Tensor], step: int) -> None:
    """Inverse of `plain_state`."""
    with torch.no_grad():
        parameter.copy_(state[VALUE])
    moments = {key: state[key].to(parameter.device, copy=True) for key in (FIRST_MOMENT, SECOND_MOMENT)}
    optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments} if step else {}
