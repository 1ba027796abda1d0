"""Models without memory: what a configuration describes, before anything is allocated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

MAX_TENSORS = 100_000  # of a model, where no file says how many there are
MAX_REPEATS = 1_000  # of one layer whose weights several share, as ALBERT's do


def build_on_meta(build: Callable[[], nn.Module], *, tensor_count: int | None = None) -> nn.Module:
    """The model that `build` returns, on the device "meta", where tensors have shapes and no memory.

    tensor_count: tensors of the file that is to fill it. One of ours is put together of at least one of theirs, but for
        those
    that are zero or tied, so that a configuration that describes many more is wrong: building stops there.

    >>> from torch import nn
    >>> from regard.models.build_on_meta import build_on_meta
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
                f"the configuration repeats layers that share weights {repeat} times; at most {MAX_REPEATS} are read"
            )
    return model


@contextmanager
def _limit_parameters(max_parameters: int, tensor_count: int | None) -> Iterator[None]:
    """Within, this thread may register so many parameters."""
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
