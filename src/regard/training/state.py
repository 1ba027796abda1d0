"""State of a training as named tensors for checkpoints, for plain, DDP and FSDP models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from regard.distributed import sequence
from regard.nn import Block

FULL_ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)  # empty on other ranks
FULL = StateDictOptions(full_state_dict=True)
SHARDED = StateDictOptions()  # the shard of this process


class WeightAverage:
    """Exponential moving average of weights. The decay warms up, so that the first steps are soon forgotten."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.values = [weight.detach().clone() for weight in self.weights]

    def update(self, step: int) -> None:
        """Update after step 1, 2, ..."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.values, [weight.detach() for weight in self.weights], 1 - decay)

    @contextmanager
    def use_average(self) -> Iterator[None]:
        """A context in which the model has the averaged weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Swap in place, because FSDP keeps references to the memory of its weights."""
        for weight, value in zip(self.weights, self.values, strict=True):
            before = weight.detach().clone()
            weight.copy_(value)
            value.copy_(before)


def shard(objective: nn.Module) -> None:
    """Shard weights, gradients and optimizer state over all processes with FSDP2.

    The weights of a block are gathered while it is computed; weights outside of blocks are gathered at the start.
    """
    mesh = init_device_mesh(next(objective.parameters()).device.type, (dist.get_world_size(),))
    for module in list(objective.modules()):
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    fully_shard(objective, mesh=mesh)


def sequence_contexts(
    ranks: int, device: torch.device, method: str | None = None
) -> Callable[[], AbstractContextManager[None]]:
    """Return a context factory for models whose sequences are shared by `ranks` consecutive processes."""
    mesh = init_device_mesh(device.type, (dist.get_world_size() // ranks, ranks), mesh_dim_names=("data", "sequence"))
    return partial(sequence, mesh["sequence"].get_group(), layout="balanced", method=method)


def weights(objective: nn.Module, options: StateDictOptions = FULL_ON_RANK_0) -> dict[str, Tensor]:
    """Weights of the model within an objective, by their names in the model."""
    state: dict[str, Any] = get_model_state_dict(objective, options=options)
    return {name.removeprefix("model."): value.contiguous() for name, value in state.items()}


def capture(
    objective: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: WeightAverage | None,
    options: StateDictOptions = FULL_ON_RANK_0,
) -> dict[str, Tensor]:
    """Weights, optimizer state and average as a flat dict: full tensors on rank 0, or shards with `SHARDED`."""
    tensors = {f"model.{name}": value for name, value in weights(objective, options).items()}
    state: Any = get_optimizer_state_dict(objective, optimizer, options=options)
    for name, parts in state.get("state", {}).items():
        tensors |= {f"optimizer.{part}.{name}": value.contiguous() for part, value in parts.items()}
    if average is not None:
        with average.use_average():
            tensors |= {f"average.{name}": value.clone() for name, value in weights(objective, options).items()}
    return tensors


def restore(
    tensors: dict[str, Tensor], objective: nn.Module, optimizer: torch.optim.Optimizer, average: WeightAverage | None
) -> None:
    """Load the tensors of `capture`, full or sharded."""
    options = SHARDED if any(isinstance(value, DTensor) for value in tensors.values()) else FULL

    def part(prefix: str) -> dict[str, Any]:
        return {f"model.{name.removeprefix(prefix)}": tensors[name] for name in tensors if name.startswith(prefix)}

    if average is not None:
        with average.use_average():
            set_model_state_dict(objective, part("average."), options=options)
    set_model_state_dict(objective, part("model."), options=options)
    state: Any = get_optimizer_state_dict(objective, optimizer, options=options)  # a template with groups and names
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            which, _, weight = rest.partition(".")
            state["state"][weight][which] = value
    set_optimizer_state_dict(objective, optimizer, state, options=options)
