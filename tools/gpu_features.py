"""Compile the Triton kernels for every feature once, without a GPU: the interpreter accepts what a compiler refuses.

python -m tools.gpu_features                # to machine code
python -m tools.gpu_features --parse        # to Triton's own representation only, in about a minute
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

import regard as rg
from regard.engines.problem import Problem
from regard.engines.triton import attention, inspection, launch
from regard.engines.triton.attention import forward
from regard.engines.triton.engine import prepare
from regard.engines.triton.forward_mode import jvp
from regard.engines.triton.gradients import backward
from tools.gpu_compile import TARGETS, compiled_for, draw_recurrence, run_recurrence

H, N = 2, 300
Shape = tuple[int, int, int, int]  # B, heads, tokens, width


def some() -> rg.Mask:
    return rg.where(lambda b, h, p, j: (p * 7 + j * 3 + h + b) % 5 < 2)


def table(*shape: int) -> Tensor:
    return torch.zeros(*shape, requires_grad=True)


def square(width: int) -> tuple[Shape, Shape]:
    return (1, H, N, width), (1, H, N, width)


FEW: tuple[Shape, Shape] = (2, 4, 1, 64), (2, 2, 4096, 64)
# A size of 1 is known when compiling, so these are kernels of their own.
ONE_QUERY: tuple[Shape, Shape] = (1, 1, 1, 8), (1, 1, N, 8)
ONE_KEY: tuple[Shape, Shape] = (1, 1, N, 1), (1, 1, 1, 1)

# Description, shapes of query and key (and value), dtype
FEATURES: dict[str, tuple[Callable[[], dict[str, Any]], tuple[Shape, Shape], torch.dtype]] = {
    "few queries": (lambda: {"sink": table(4)}, FEW, torch.bfloat16),
    "few queries, tiles": (lambda: {"mask": some(), "bias": rg.alibi(4)}, FEW, torch.float16),
    "by distance": (lambda: {"mask": rg.causal(), "bias": rg.relative(table(15, H))}, square(64), torch.bfloat16),
    "dense bias": (lambda: {"mask": some(), "bias": table(1, H, N, N)}, square(64), torch.float16),
    "bias for keys": (lambda: {"mask": rg.causal(), "bias": table(1, 1, 1, N)}, square(80), torch.bfloat16),
    "shaw": (lambda: {"bias": rg.shaw(table(5, 64), table(5, 64)), "dropout": 0.5}, square(64), torch.float32),
    "one distance": (lambda: {"bias": rg.shaw(table(1, 64), table(1, 64))}, square(64), torch.float32),
    "cap and sink": (
        lambda: {"mask": rg.padding([50]), "score": rg.Dot(softcap=2.0), "sink": table(H)}, square(256), torch.bfloat16,
    ),
    "additive": (lambda: {"mask": rg.window(9, 0), "score": rg.Additive(table(H, 17))}, square(17), torch.float16),
    "one query": (lambda: {"mask": rg.causal(), "bias": table(1, 1, 1, N)}, ONE_QUERY, torch.bfloat16),
    "one query, tiles": (lambda: {"mask": some(), "bias": rg.relative(table(15, 1))}, ONE_QUERY, torch.float16),
    "one key": (lambda: {"mask": some(), "bias": table(1, 1, N, 1), "dropout": 0.1}, ONE_KEY, torch.float32),
}  # fmt: skip

# Decay and beta, tokens, D, E, dtype
RECURRENCES: dict[str, tuple[tuple[str | None, bool], tuple[int, int, int], torch.dtype]] = {
    "linear": ((None, False), (N, 64, 65), torch.float32),
    "delta rule": ((None, True), (N, 128, 128), torch.bfloat16),
    "decay per head": (("head", False), (N, 256, 257), torch.float16),
    "gated delta rule": (("head", True), (N, 64, 128), torch.bfloat16),
    "decay per channel": (("channel", True), (N, 80, 48), torch.bfloat16),
    "one token": (("channel", True), (1, 64, 64), torch.float32),
    "one of all": (("head", True), (1, 1, 1), torch.float16),
}


class ParsedOnly(Exception):
    """Raised instead of compiling further."""


@contextmanager
def parsing() -> Iterator[None]:
    """Stop after the representation that Triton makes of the source, which finds errors of types and shapes."""
    from triton.backends.nvidia.compiler import CUDABackend

    def stop(*arguments: Any, **options: Any) -> None:
        raise ParsedOnly

    before, CUDABackend.make_ttgir = CUDABackend.make_ttgir, staticmethod(stop)
    try:
        yield
    finally:
        CUDABackend.make_ttgir = before


def ignore_stop(inner: Callable[..., None]) -> Callable[..., None]:
    def launch_kernel(device: torch.device, kernel: Any, *arguments: Any, **constants: Any) -> None:
        try:
            inner(device, kernel, *arguments, **constants)
        except ParsedOnly:
            print(f"  {kernel.fn.__name__}", flush=True)

    return launch_kernel


@contextmanager
def compiling(target: str, parse: bool) -> Iterator[None]:
    """Compile the kernels of calls within the context, and print them."""
    with compiled_for(target) as result, parsing() if parse else nullcontext():
        if parse:
            launch.launch = ignore_stop(launch.launch)
        yield
    for kernel, compiled in result:
        print(f"  {kernel}: {compiled.metadata.shared} bytes of shared memory", flush=True)


def compile_feature(target: str, name: str, parse: bool) -> None:
    """Compile forward, backward, forward mode and inspection."""
    describe, (of_query, of_key), dtype = FEATURES[name]
    query, key, value = (torch.zeros(shape, dtype=dtype) for shape in (of_query, of_key, of_key))
    problem = rg.Attention(**describe()).problem(query, key, value, return_lse=True)
    seed = torch.zeros((), dtype=torch.int64) if problem.dropout else None
    x, _, fixed, layout = prepare(problem, query, key, value, seed)
    lse = torch.zeros(query.shape[:3])
    mass = torch.zeros((*query.shape[:3], 2 * fixed.sizes[0] + 1) if fixed.sizes[1] else (0,))
    given = [tensor is not None for tensor in x]
    with compiling(target, parse):
        forward(x, fixed, layout)
        backward(x, fixed, layout, (query, lse, mass), (query, lse, mass if fixed.sizes[1] else None), given)
        jvp(x, fixed, layout, list(x))
        inspect_all(problem, query, key)


def compile_recurrence(target: str, name: str, parse: bool) -> None:
    """Compile forward and backward of linear attention."""
    kind, (tokens, d, e), dtype = RECURRENCES[name]
    inputs = draw_recurrence(1 if tokens == 1 else H, tokens, d, e, kind, dtype, state=True)
    with compiling(target, parse):
        run_recurrence(inputs)


def inspect_all(problem: Problem, query: Tensor, key: Tensor) -> None:
    """Compile statistics, the largest weights, weights and a map."""
    with torch.no_grad():
        inspection.statistics(problem, query, key, 4, torch.tensor([0]))
        inspection.weights(problem, query, key, torch.tensor([0]), torch.tensor([0]), torch.arange(key.shape[2]))
        inspection.pooled_weights(problem, query, key, (8, 9))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=TARGETS, default="sm_90", help="the target")
    parser.add_argument("--parse", action="store_true", help="do not compile to machine code")
    chosen = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET"):
        raise SystemExit("unset TRITON_INTERPRET: the interpreter compiles nothing")
    attention.processors = lambda device: 100  # type: ignore[assignment]  # for the number of parts of few queries
    failed = 0
    features = [(name, compile_feature) for name in FEATURES] + [(name, compile_recurrence) for name in RECURRENCES]
    for name, compile_one in features:
        print(name, flush=True)
        try:
            compile_one(chosen.only, name, chosen.parse)
        except Exception as error:  # the others are compiled too
            failed += 1
            print(f"  FAILED: {type(error).__name__}: {error}", flush=True)
    print(f"{failed} of {len(features)} features failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
