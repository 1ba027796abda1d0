"""Autocast, as torch's own attention applies it: tensors are cast at the entry, and engines run without it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_CPU = torch.device("cpu")


def autocast_enabled(tensor: object) -> bool:
    """Whether autocast is enabled on the device of a tensor; a value that is not a tensor counts as one on the CPU."""
    device = tensor.device if isinstance(tensor, Tensor) else _CPU
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast floats to the autocast dtype, as torch's own kernel does."""
    if not autocast_enabled(tensors[0]):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu")
    return tuple(
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in tensors
    )


def no_autocast(device: torch.device) -> AbstractContextManager:
    """Disable autocast, so that the arithmetic inside an engine keeps its dtype."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
