"""Selection as on a GPU, on a CPU with Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from regard.engines import native, triton


@contextmanager
def inspect_by_kernels() -> Iterator[list[str]]:
    """Select the kernels for inspection as on a GPU; yields the kernels that were called."""
    called: list[str] = []
    run = triton.launch.run_kernel

    def launch(device: torch.device, kernel: Any, *arguments: Any, **constants: Any) -> None:
        called.append(kernel.fn.__name__)
        run(device, kernel, *arguments, **constants)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native.inspection, "why_not", lambda problem, rows=None: ["as on a GPU"])
        patch.setattr(triton.engine, "why_avoid", lambda problem: [])
        patch.setattr(triton.launch, "launch", launch)
        yield called
