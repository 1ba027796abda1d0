"""The peak of the machine: fused multiply-adds in registers, and reads of memory."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

import regard
from regard.engines import native

SOURCE = r"""
#include <omp.h>

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
typedef float V __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));

static void keep(float* sink, const V* sums, int count) {
    for (int i = 0; i < count; ++i)
        for (int lane = 0; lane < WIDTH; ++lane) *sink += sums[i][lane];
}

// rounds times 12 independent chains of multiply-adds on each thread; returns the number of operations
extern "C" double multiply_add(long rounds, int threads, float* sink) {
#pragma omp parallel num_threads(threads)
    {
        V sums[12] = {}, a = {}, b = {};
        a += 0.999f, b += 0.001f;
        for (int i = 0; i < 12; ++i) sums[i] += i + *sink;  // chains that no compiler can find to be one
        for (long n = 0; n < rounds; ++n) {
#pragma GCC unroll 12
            for (int i = 0; i < 12; ++i) sums[i] = sums[i] * a + b;
        }
#pragma omp critical
        keep(sink, sums, 12);
    }
    return 2.0 * 12 * WIDTH * rounds * threads;
}

// Four streams on each thread: one alone does not keep the memory busy.
extern "C" void read(const float* data, long count, int threads, float* sink) {
#pragma omp parallel num_threads(threads)
    {
        V sums[8] = {};
        const long blocks = count / (8 * WIDTH), stream = blocks / (4 * threads);
        const V* first = reinterpret_cast<const V*>(data) + 8 * 4 * stream * omp_get_thread_num();
        for (long n = 0; n < stream; ++n)
            for (int s = 0; s < 4; ++s) {
                const V* from = first + 8 * (s * stream + n);
#pragma GCC unroll 8
                for (int i = 0; i < 8; ++i) sums[i] += from[i];
            }
#pragma omp critical
        keep(sink, sums, 8);
    }
}
"""


@cache
def _library() -> ctypes.CDLL | None:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    folder = Path(tempfile.mkdtemp(prefix="regard-bench-"))
    (folder / "peak.cpp").write_text(SOURCE)
    command = [compiler, "-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-shared", "-fPIC"]
    compiled = subprocess.run(
        [*command, str(folder / "peak.cpp"), "-o", str(folder / "peak.so")], capture_output=True, check=False
    )
    if compiled.returncode:
        return None
    library = ctypes.CDLL(str(folder / "peak.so"))
    shutil.rmtree(folder)
    library.multiply_add.restype = ctypes.c_double
    library.multiply_add.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p]
    library.read.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_void_p]
    return library


def peak_name() -> str:
    return "FMA peak" if _library() is not None else "torch GEMM (no compiler to measure the FMA peak with)"


def peak_call(threads: int) -> tuple[Callable[[], object], float]:
    """A call that runs at the machine's peak, and how many operations it makes."""
    library = _library()
    if library is None:
        a = torch.randn(1024, 1024)
        return lambda: a @ a, 2.0 * 1024**3
    sink, rounds = torch.zeros(1), 400_000
    flops = library.multiply_add(1, threads, sink.data_ptr()) * rounds
    return lambda: library.multiply_add(rounds, threads, sink.data_ptr()), flops


def read_call(tensors: list[Tensor], threads: int) -> Callable[[], object]:
    """A call that reads contiguous float32 tensors once, as fast as the machine lets it."""
    library = _library()
    if library is None:
        return lambda: [tensor.sum() for tensor in tensors]
    sink = torch.zeros(1)
    return lambda: [library.read(t.data_ptr(), t.numel(), threads, sink.data_ptr()) for t in tensors]


def describe() -> dict[str, str]:
    """The machine, and the versions of all competitors."""
    names = ["torch", "numpy", "onnxruntime", "openvino", "jax", "x-transformers", "local-attention", "transformers"]
    names += ["linear-attention-transformer", "performer-pytorch"]
    facts = {"cpu": _cpu(), "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}"}
    facts["regard"] = f"{regard.__version__} ({native.why_missing() or native.build_info()['instruction set']})"
    for name in names:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = "not installed"
    return facts


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()
