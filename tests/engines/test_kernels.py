"""The kernels against plain loops in C++, on every instruction set of this CPU: tests/kernels/kernels_test.cpp."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from regard.engines import native

SOURCE = Path(__file__).parents[1] / "kernels/kernels_test.cpp"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("the tests of the kernels in C++ need Linux and a C++ compiler")
    path = tmp_path_factory.mktemp("kernels") / "kernels_test"
    options = ["-std=c++20", "-O2", "-rdynamic", "-pthread"]
    subprocess.run([compiler, *options, str(SOURCE), "-o", str(path), "-ldl"], check=True)
    return path


@pytest.mark.parametrize("isa", native.build_info().get("compiled for", "").split())
def test_kernels_agree_with_plain_loops(program: Path, isa: str) -> None:
    result = subprocess.run([program, native.build_info()["native"], isa], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    if "skipped" in result.stdout:
        pytest.skip(result.stdout.strip())
    assert " 0 failures" in result.stdout
