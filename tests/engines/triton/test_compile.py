"""The kernels as a compiler for GPUs sees them, and where they run: without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from regard.engines import triton
from regard.engines.triton import attention, launch

pytestmark = pytest.mark.skipif(bool(triton.why_missing()), reason="triton is not installed")


def test_all_kernels_are_valid_for_a_compiler() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tools.gpu_features", "--parse"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bias_gradient_kernel" in done.stdout
    assert "linear_gradient_kernel" in done.stdout


def test_kernels_run_on_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Any] = []

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        steps.append(chosen)
        yield
        steps.append("left")

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda *arguments: steps.append((grid, arguments))

    monkeypatch.setattr(torch, "get_device_module", lambda chosen: SimpleNamespace(device=device))
    second = torch.device("cuda", 1)
    launch.run_kernel(second, Kernel(), 3, "x")
    launch.run_kernel(second, Kernel(), 0, "nothing to do")
    assert steps == [second, ((3,), ("x",)), "left"]


@pytest.mark.parametrize(
    ("backend", "arch", "expected"),
    [
        ("cuda", 80, "sm_80"),
        ("cuda", 89, "sm_80"),
        ("cuda", 90, "sm_90"),
        ("cuda", 103, "sm_100"),
        ("cuda", 120, "sm_80"),  # it has the tensor cores and the shared memory of sm_89
        ("hip", "gfx942", "gfx9"),
        ("xpu", "pvc", "sm_80"),
    ],
)
def test_blocks_are_those_of_the_architecture(backend: str, arch: int | str, expected: str) -> None:
    assert attention.architecture_of(backend, arch) == expected


def test_tf32_is_read_from_the_newer_setting_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "is_interpreted", lambda: False)
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        assert attention.product_precision() == "ieee"
        matmul.fp32_precision = "tf32"  # after this, reading the older `allow_tf32` raises
        assert attention.product_precision() == "tf32"
        matmul.fp32_precision = before
        matmul.allow_tf32 = True
        assert attention.product_precision() == "tf32"
    finally:
        matmul.allow_tf32 = False
        matmul.fp32_precision = before
