"""Calls of compiled kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def run_kernel(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Run this many programs of a kernel."""
    if programs:
        kernel[(programs,)](*arguments, **constants)


launch: Callable[..., None] = run_kernel
"""Replaced to compile kernels without running them."""
