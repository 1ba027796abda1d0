"""The information for bug reports."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from regard.engines import native


def run_info(**environment: str) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "regard.info"], capture_output=True, text=True, check=True, timeout=120,
        env={**os.environ, **environment},
    )  # fmt: skip
    return {line[:16].strip(): line[17:] for line in done.stdout.splitlines()}


def test_it_reports_versions_engines_and_instruction_set() -> None:
    info = run_info()
    assert info["torch"] == torch.__version__
    assert info["engines"].startswith("native, ")
    assert native.why_missing() or info["instruction set"] in info["compiled for"].split()


def test_it_reports_why_the_kernels_are_missing() -> None:
    info = run_info(REGARD_LIBRARY="/nowhere/_native.so")
    assert "does not load" in info["native"]
    assert "instruction set" not in info


def test_it_reports_how_bfloat16_numbers_are_multiplied() -> None:
    for isa in native.build_info().get("compiled for", "").split():
        info = run_info(REGARD_ISA=isa)  # one that the CPU lacks is not taken
        own = info["instruction set"] in ("amx", "avx512bf16", "neonbf16")
        assert info["bfloat16"] == ("multiplied by the CPU's own instructions" if own else "multiplied as float32")
