"""Compile the Triton kernels without a GPU, and read registers, spills, shared memory and tensor-core use.

python -m tools.gpu_compile                 # all configurations
python -m tools.gpu_compile --only sm_90 --width 64 --case causal
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import regard as rg
from regard.engines.triton import inspection, launch, linear
from regard.engines.triton.attention import forward
from regard.engines.triton.engine import prepare
from regard.engines.triton.gradients import backward

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}  # bytes for a program
TENSOR_CORES = {
    "sm_80": r"mma\.sync",
    "sm_90": r"wgmma\.mma_async|mma\.sync",
    "sm_100": r"tcgen05\.mma|mma\.sync",
    "gfx942": r"v_mfma",
}
N = 512


def cases(width: int) -> dict[str, rg.Attention]:
    return {
        "plain": rg.Attention(),
        "causal": rg.Attention(mask=rg.causal()),
        "window + alibi": rg.Attention(mask=rg.causal() & rg.window(128, 0), bias=rg.alibi(2)),
        "tile table": rg.Attention(mask=rg.global_tokens([0, 1]) | rg.window(64, 64)),
        "dropout": rg.Attention(dropout=0.1),
        "additive": rg.Attention(score=rg.Additive(torch.randn(width))),
    }


LINEAR_CASES = {  # decay and whether there is a beta
    "linear": (None, False),
    "gated delta rule": ("head", True),
    "decay per channel": ("channel", False),
}


@dataclass
class Compiled:
    """What the compiler reports about a kernel."""

    target: str
    kernel: str
    case: str
    width: int
    registers: int
    spills: int  # bytes, on AMD registers
    shared: int
    tensor_cores: int  # instructions


class Driver:
    """A driver that has a target, and no device."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


@contextmanager
def compiled_for(name: str) -> Iterator[list[tuple[str, Any]]]:
    """Compile the kernels of calls within the context for a target; yields names and compiled kernels."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget("hip", name, 64) if name.startswith("gfx") else GPUTarget("cuda", int(name[3:]), 32)
    result: list[tuple[str, Any]] = []
    seen = []

    def compile_kernel(_: torch.device, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        kernel.device_caches.clear()
        seen.append(kernel)
        result.append((kernel.fn.__name__, kernel.warmup(*arguments, grid=(programs,), **constants)))

    driver.set_active(Driver(target))
    before, launch.launch = launch.launch, compile_kernel
    try:
        yield result
    finally:
        launch.launch = before
        for kernel in seen:
            kernel.device_caches.clear()


def compile_case(target: str, case: str, attend: rg.Attention, width: int, dtype: torch.dtype) -> list[Compiled]:
    query, key, value = (torch.zeros(1, 2, N, width, dtype=dtype) for _ in range(3))
    problem = attend.problem(query, key, value, return_lse=True)
    seed = torch.zeros((), dtype=torch.int64) if problem.dropout else None
    x, _, fixed, layout = prepare(problem, query, key, value, seed)
    wanted = [tensor is not None and name != "diagonal" for name, tensor in zip(x._fields, x, strict=True)]
    with compiled_for(target) as result:
        results = forward(x, fixed, layout)
        backward(x, fixed, layout, results, (results[0], None, None), wanted)
    return [measure(target, kernel, compiled, case, width) for kernel, compiled in result]


def draw_recurrence(
    heads: int, tokens: int, d: int, e: int, kind: tuple[str | None, bool], dtype: torch.dtype, state: bool = False
) -> linear.Inputs:
    """Return the inputs of a recurrence of linear attention, all zero."""
    shape = 1, heads, tokens
    decay = None if kind[0] is None else torch.zeros(shape if kind[0] == "head" else (*shape, d))
    return (
        torch.zeros(*shape, d, dtype=dtype), torch.zeros(*shape, d, dtype=dtype), torch.zeros(*shape, e, dtype=dtype),
        decay, torch.zeros(shape) if kind[1] else None, torch.zeros(1, heads, d, e) if state else None,
    )  # fmt: skip


def run_recurrence(inputs: linear.Inputs) -> None:
    """Forward and backward."""
    heads, state = inputs[0].shape[1], inputs[5]
    _, final, saved = linear.recurrence_forward(inputs, heads, True)
    linear.recurrence_backward(inputs, heads, saved, inputs[2], None if state is None else final)


def compile_linear(target: str, case: str, width: int, dtype: torch.dtype) -> list[Compiled]:
    inputs = draw_recurrence(2, N, width, width, LINEAR_CASES[case], dtype)
    with compiled_for(target) as result:
        run_recurrence(inputs)
    first = dict(reversed(result))  # the backward repeats kernels of the forward
    return [measure(target, kernel, first[kernel], case, width) for kernel in LINEAR_KERNELS]


def compile_inspection(target: str, case: str, attend: rg.Attention, width: int, dtype: torch.dtype) -> list[Compiled]:
    query, key = (torch.zeros(1, 2, N, width, dtype=dtype) for _ in range(2))
    problem, every = attend.problem(query, key), torch.arange(N)
    with compiled_for(target) as result, torch.no_grad():
        inspection.statistics(problem, query, key, 4)
        inspection.weights(problem, query, key, torch.arange(2), every, every)
        inspection.pooled_weights(problem, query, key, (64, 64))
    # The log-sum-exp of weights and maps comes from the kernel of the statistics too.
    kernels = dict(reversed(result))
    return [measure(target, kernel, kernels[kernel], case, width) for kernel in INSPECTION_KERNELS]


def measure(target: str, kernel: str, compiled: Any, case: str, width: int) -> Compiled:
    if target.startswith("gfx"):
        code = compiled.asm["amdgcn"]
        registers, spills = (
            int(re.findall(rf"\.{name}:\s+(\d+)", code)[0]) for name in ("vgpr_count", "vgpr_spill_count")
        )
    else:
        code = compiled.asm["ptx"]
        registers, spills = assemble(code)
    products = len(re.findall(TENSOR_CORES[target], code))
    return Compiled(target, kernel, case, width, registers, spills, compiled.metadata.shared, products)


def assemble(ptx: str) -> tuple[int, int]:
    """Return registers and bytes of spill stores, by ptxas."""
    from triton.backends.nvidia.compiler import get_ptxas

    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    program = get_ptxas(int(re.sub(r"\D", "", target[1]))).path
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [program, "-v", f"-arch={target[1]}", str(source), "-o", str(Path(folder) / "kernel.cubin")]
        run = subprocess.run(command, capture_output=True, text=True)
        printed = run.stderr + run.stdout
        if run.returncode:
            raise RuntimeError(f"{' '.join(command)}: {printed}")
    used, spilled = re.search(r"Used (\d+) registers", printed), re.search(r"(\d+) bytes spill stores", printed)
    assert used is not None
    return int(used[1]), int(spilled[1]) if spilled else 0


def faults(row: Compiled) -> list[str]:
    """Return the defects of a compiled kernel."""
    result = []
    if row.shared > SHARED[row.target]:
        result.append(f"takes {row.shared} bytes of shared memory of {SHARED[row.target]}")
    strict = row.target in ("sm_90", "sm_100") or (row.target == "sm_80" and row.kernel == "forward_kernel")
    if row.spills and strict:
        result.append(f"spills {row.spills} bytes")
    by_pairs = row.kernel == "pairs_kernel" and row.case == "decay per channel"
    without_products = row.kernel in INSPECTION_KERNELS and row.case == "additive"
    if not row.tensor_cores and not by_pairs and not without_products:
        result.append("uses no tensor cores")
    return result


KERNELS = {
    "forward_kernel": "forward",
    "query_gradient_kernel": "query gradient",
    "key_gradient_kernel": "key gradient",
}
LINEAR_KERNELS = {
    "pairs_kernel": "products of a chunk",
    "walk_kernel": "forward",
    "walk_back_kernel": "backward",
    "linear_gradient_kernel": "gradients of a chunk",
}


INSPECTION_KERNELS = {
    "statistics_kernel": "statistics",
    "top_kernel": "largest weights",
    "weights_kernel": "weights",
    "pool_kernel": "map",
}


def table(rows: list[Compiled], kernels: dict[str, str]) -> str:
    """Return a line for each GPU, case and width: registers, spilled bytes, shared memory, tensor-core instructions."""
    columns = ["GPU", "case", "width", *kernels.values()]
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
    by_kernel = {(row.target, row.case, row.width, row.kernel): row for row in rows}
    for target, case, width in dict.fromkeys(key[:3] for key in by_kernel):
        cells = [target, case, str(width)]
        for kernel in kernels:
            row = by_kernel[target, case, width, kernel]
            spilled = f"**{row.spills}**" if row.spills else "0"
            cells.append(f"{row.registers}, {spilled}, {row.shared / 1024:.0f} KB, {row.tensor_cores}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=TARGETS, help="one target")
    parser.add_argument("--width", type=int, choices=(64, 128), help="one width of heads")
    parser.add_argument("--case", help="one case")
    chosen = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET"):
        raise SystemExit("unset TRITON_INTERPRET: the interpreter compiles nothing")
    rows: list[Compiled] = []
    inspection_rows: list[Compiled] = []
    linear_rows: list[Compiled] = []
    failed = False

    def report(some: list[Compiled]) -> list[Compiled]:
        nonlocal failed
        for row in some:
            reasons = faults(row)
            failed = failed or bool(reasons)
            print(*vars(row).values(), "; ".join(reasons), flush=True)
        return some

    for target in TARGETS if chosen.only is None else (chosen.only,):
        for width in (64, 128) if chosen.width is None else (chosen.width,):
            for case, attend in cases(width).items():
                if chosen.case in (None, case):
                    rows += report(compile_case(target, case, attend, width, torch.bfloat16))
                    inspection_rows += report(compile_inspection(target, case, attend, width, torch.bfloat16))
            for case in LINEAR_CASES:
                if chosen.case in (None, case):
                    linear_rows += report(compile_linear(target, case, width, torch.bfloat16))
    print(table(rows, KERNELS))
    print(table(inspection_rows, INSPECTION_KERNELS))
    print(table(linear_rows, LINEAR_KERNELS))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
