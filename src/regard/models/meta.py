"""Building models on the meta device, to check a configuration before allocating memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

MAX_TENSORS = 100_000  # per model, if the number of tensors in its file is not known
MAX_REPEATS = 1_000  # runs of a layer with shared weights, as in ALBERT


def build_on_meta(build: Callable[[], nn.Module], *, tensor_count: int | None = None) -> nn.Module:
    """Call `build` on the meta device, where tensors have shapes but no memory, and return the model.

    tensor_count: number of tensors in the checkpoint file. Except for zero or tied tensors, each of ours needs at
        least one of the file, so a configuration that describes many more is wrong: building stops early.

    >>> from torch import nn
    >>> from regard.models.meta import build_on_meta
    >>> build_on_meta(lambda: nn.Linear(10**9, 10**6)).weight.shape
    torch.Size([1000000, 1000000000])
    >>> build_on_meta(lambda: nn.Sequential(*(nn.Linear(1, 1) for _ in range(10**9))), tensor_count=2)
    Traceback (most recent call last):
    ValueError: the configuration describes a model of more than 104 tensors, but the file has 2
    """
    with (
        torch.device("meta"),
        _limit_parameters(MAX_TENSORS if tensor_count is None else 2 * tensor_count + 100, tensor_count),
    ):
        model = build()
    for module in model.modules():
        repeat: Any = getattr(module, "repeat", 1)
        if isinstance(repeat, int) and repeat > MAX_REPEATS:
            raise ValueError(
                f"the configuration repeats shared layers {repeat} times; at most {MAX_REPEATS} times are supported"
            )
    return model


@contextmanager
def _limit_parameters(max_parameters: int, tensor_count: int | None) -> Iterator[None]:
    """Limit the number of parameters that this thread can register inside the context."""
    count, thread = 0, threading.get_ident()

    def register(module: nn.Module, name: str, value: Any) -> None:
        nonlocal count
        count += value is not None and threading.get_ident() == thread
        if count > max_parameters:
            of_file = "" if tensor_count is None else f", but the file has {tensor_count}"
            raise ValueError(f"the configuration describes a model of more than {max_parameters} tensors{of_file}")

    hook = register_module_parameter_registration_hook(register)
    try:
        yield
    finally:
        hook.remove()
