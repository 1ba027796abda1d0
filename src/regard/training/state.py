"""All of a training that a checkpoint holds, as named tensors: plain, DDP and FSDP models alike."""

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

FULL_ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)  # only the first process gets it
FULL = StateDictOptions(full_state_dict=True)
SHARDED = StateDictOptions()  # the part that this process has


class WeightAverage:
    """A moving average of weights. It begins fast, so that the first steps are soon forgotten."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.values = [weight.detach().clone() for weight in self.weights]

    def update(self, step: int) -> None:
        """After step 1, 2, ..."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.values, [weight.detach() for weight in self.weights], 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within, the model has the average for its weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """In place: FSDP holds on to the memory of its weights."""
        for weight, value in zip(self.weights, self.values, strict=True):
            before = weight.detach().clone()
            weight.copy_(value)
            value.copy_(before)


def shard(objective: nn.Module) -> None:
    """Share the weights, their gradients and the optimizer's memory among all processes: FSDP2.

    A block is gathered when it is computed, and let go after; what is in no block is gathered at the beginning.
    """
    mesh = init_device_mesh(next(objective.parameters()).device.type, (dist.get_world_size(),))
    for module in list(objective.modules()):
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    fully_shard(objective, mesh=mesh)


def sharing(ranks: int, device: torch.device, how: str | None = None) -> Callable[[], AbstractContextManager[None]]:
    """What makes models compute on sequences that each `ranks` processes share, this one with its neighbours."""
    mesh = init_device_mesh(device.type, (dist.get_world_size() // ranks, ranks), mesh_dim_names=("data", "sequence"))
    return partial(sequence, mesh["sequence"].get_group(), layout="balanced", how=how)


def weights(objective: nn.Module, options: StateDictOptions = FULL_ON_RANK_0) -> dict[str, Tensor]:
    """The weights of the model within an objective, by the model's own names."""
    found: dict[str, Any] = get_model_state_dict(objective, options=options)
    return {name.removeprefix("model."): value.contiguous() for name, value in found.items()}


def capture(
    objective: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: WeightAverage | None,
    options: StateDictOptions = FULL_ON_RANK_0,
) -> dict[str, Tensor]:
    """Weights, the optimizer's memory and the average, as one flat table: whole in the first process, or its
    `SHARDED`."""
    tensors = {f"model.{name}": value for name, value in weights(objective, options).items()}
    found: Any = get_optimizer_state_dict(objective, optimizer, options=options)
    for name, parts in found.get("state", {}).items():
        tensors |= {f"optimizer.{part}.{name}": value.contiguous() for part, value in parts.items()}
    if average is not None:
        with average.applied():
            tensors |= {f"average.{name}": value.clone() for name, value in weights(objective, options).items()}
    return tensors


def restore(
    tensors: dict[str, Tensor], objective: nn.Module, optimizer: torch.optim.Optimizer, average: WeightAverage | None
) -> None:
    """What `capture` gave, back in its places: whole tensors, or this process's own."""
    options = SHARDED if any(isinstance(value, DTensor) for value in tensors.values()) else FULL

    def part(prefix: str) -> dict[str, Any]:
        return {f"model.{name.removeprefix(prefix)}": tensors[name] for name in tensors if name.startswith(prefix)}

    if average is not None:
        with average.applied():
            set_model_state_dict(objective, part("average."), options=options)
    set_model_state_dict(objective, part("model."), options=options)
    state: Any = get_optimizer_state_dict(objective, optimizer, options=options)  # for the groups, and the names
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            which, _, weight = rest.partition(".")
            state["state"][weight][which] = value
    set_optimizer_state_dict(objective, optimizer, state, options=options)
