"""Locating NaN and infinity: the first layer whose output or gradient is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from regard.nn import Packed


def find_nonfinite_layer(model: nn.Module, compute: Callable[[], Any]) -> str:
    """Repeat a computation with hooks, and name the first layer whose output is not finite."""
    weights = [name for name, weight in model.named_parameters() if not _finite(weight)]
    layers: list[str] = []
    hooks = []

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not layers and not all(bool(torch.isfinite(part).all()) for part in floats(output)):
                layers.append(name)

        return hook

    for name, module in model.named_modules():
        if name and type(module).forward is not nn.Module.forward:  # skip the model itself and modules without forward
            hooks.append(module.register_forward_hook(watch(name), with_kwargs=True))
    try:
        with torch.no_grad():
            compute()
    finally:
        for hook in hooks:
            hook.remove()
    if weights:
        return f"the weight {weights[0]}"
    return f"the layer {layers[0]}" if layers else "the loss itself, after the last layer"


def find_nonfinite_gradient(model: nn.Module) -> str:
    """Name the last weight, and so the first in backward order, whose gradient is not finite."""
    for name, weight in reversed(list(model.named_parameters())):
        if weight.grad is not None and not _finite(weight.grad):
            return f"the gradient of {name}"
    return "the norm of the gradients"


def _finite(tensor: Tensor) -> bool:
    """Whether a tensor is finite; of a sharded one only the local shard, without communication."""
    local = getattr(tensor, "to_local", lambda: tensor)()
    return bool(torch.isfinite(local).all())


def floats(value: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors within a value."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Packed):
        yield from floats(value.values)
    elif isinstance(value, dict):
        for part in value.values():
            yield from floats(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from floats(part)
