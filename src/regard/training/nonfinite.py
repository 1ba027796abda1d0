"""Where numbers stopped being numbers: the first layer whose output, or whose gradient, is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from regard.nn import Packed


def find_nonfinite_layer(model: nn.Module, compute: Callable[[], Any]) -> str:
    """Compute again, watching every layer: the one that made what is not finite of what was."""
    weights = [name for name, weight in model.named_parameters() if not _finite(weight)]
    found: list[str] = []
    hooks = []

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not found and not all(bool(torch.isfinite(part).all()) for part in floats(output)):
                found.append(name)

        return hook

    for name, module in model.named_modules():
        if name and type(module).forward is not nn.Module.forward:  # the whole is no layer, nor is a description
            hooks.append(module.register_forward_hook(watch(name), with_kwargs=True))
    try:
        with torch.no_grad():
            compute()
    finally:
        for hook in hooks:
            hook.remove()
    if weights:
        return f"the weight {weights[0]}"
    return f"the layer {found[0]}" if found else "the loss itself, after the last layer"


def find_nonfinite_gradient(model: nn.Module) -> str:
    """The last weight, and so the first in backward order, whose gradient is not finite."""
    for name, weight in reversed(list(model.named_parameters())):
        if weight.grad is not None and not _finite(weight.grad):
            return f"the gradient of {name}"
    return "the norm of the gradients"


def _finite(tensor: Tensor) -> bool:
    """Of a tensor that processes share, the part that is here: nobody waits for others."""
    here = getattr(tensor, "to_local", lambda: tensor)()
    return bool(torch.isfinite(here).all())


def floats(value: Any) -> Iterator[Tensor]:
    """The tensors of real numbers within a value."""
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
