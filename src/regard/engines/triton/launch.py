"""Calls of compiled kernels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def run_kernel(device: torch.device, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Run this many programs of a kernel on the device of its tensors, which need not be the current one."""
    if programs:
        with current_device(device):
            kernel[(programs,)](*arguments, **constants)


def current_device(device: torch.device) -> AbstractContextManager:
    """Make a device the current one, for which Triton compiles and runs."""
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


launch: Callable[..., None] = run_kernel
"""Replaced to compile kernels without running them."""
