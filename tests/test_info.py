"""What one would paste into a bug report."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from regard.engines import native


def told(**environment: str) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "regard.info"], capture_output=True, text=True, check=True, timeout=120,
        env={**os.environ, **environment},
    )  # fmt: skip
    return {line[:16].strip(): line[17:] for line in done.stdout.splitlines()}


def test_it_tells_versions_engines_and_what_the_kernels_run_on() -> None:
    found = told()
    assert found["torch"] == torch.__version__
    assert found["engines"].startswith("native, ")
    assert native.why_missing() or found["instruction set"] in found["compiled for"].split()


def test_it_tells_why_there_are_no_kernels() -> None:
    found = told(REGARD_LIBRARY="/nowhere/_native.so")
    assert "does not load" in found["native"]
    assert "instruction set" not in found
