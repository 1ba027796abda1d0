"""Measure the speed of this machine at the sizes of a model, for `regard plan`.

Single-threaded ranks are timed in CPU seconds, so that other processes on the machine have no influence.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from regard.attention import Attention
from regard.distributed.cost import Machine, ModelShape
from regard.engines.cost import backward_flops, forward_flops, visited_entries
from regard.geometry import Frame

SECONDS = 0.4  # per measurement
ALL_REDUCE_BYTES = 1 << 24  # size of the measured all-reduce


def measure_compute(model: ModelShape, machine: Machine, sequence: int) -> Machine:
    """Set the speeds of one rank that is alone on the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(machine.threads)
    try:
        return replace(
            machine,
            flops=_matmul_flops(model, min(sequence, 1024)),
            attention=_attention_flops(model, min(sequence, 1024)),
            touched=_memory_bandwidth(),
        )
    finally:
        torch.set_num_threads(before)


def measure_communication(machine: Machine) -> Machine:
    """Set the bandwidth and latency between two processes on this machine, which cost CPU time."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "regard.distributed.speed"], capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"two processes could not be started: {(done.stderr.strip() or '?').splitlines()[-1]}")
    return replace(machine, **json.loads(done.stdout))


def _matmul_flops(model: ModelShape, tokens: int) -> float:
    """FLOP/s of the largest matrix product of a layer, forward and backward."""
    rows, columns = max((shape for shape in model.layers[0].weights if len(shape) == 2), key=lambda shape: shape[0])
    x, weight = torch.randn(tokens, columns, requires_grad=True), torch.randn(rows, columns, requires_grad=True)
    back = torch.randn(tokens, rows)
    return 6 * tokens * rows * columns / _median_seconds(lambda: (x @ weight.T).backward(back))


def _attention_flops(model: ModelShape, tokens: int) -> float:
    layer = model.layers[0]
    attend = layer.attend
    q, k = (torch.randn(1, heads, tokens, layer.D, requires_grad=True) for heads in (layer.H, layer.G))
    v = torch.randn(1, layer.G, tokens, layer.E, requires_grad=True)
    back = torch.randn(1, layer.H, tokens, layer.E)
    count = visited_entries(attend.mask, Frame(1, layer.H, tokens, tokens, 0))
    flops = forward_flops(count, attend.score, layer.D, layer.E) + backward_flops(count, attend.score, layer.D, layer.E)
    attend = Attention(attend.score, attend.mask, normalization=attend.normalization)
    return flops / _median_seconds(lambda: attend(q, k, v).backward(back))


def _memory_bandwidth() -> float:
    """Bytes/s of an elementwise operation on tensors larger than the caches."""
    x, y = torch.ones(1 << 24), torch.empty(1 << 24)
    return 2 * x.nbytes / _median_seconds(lambda: torch.mul(x, 2.0, out=y))


def _median_seconds(call: Callable[[], Any]) -> float:
    """The median duration of a call in seconds."""
    now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    call()
    durations: list[float] = []
    while sum(durations) < SECONDS:
        start = now()
        call()
        durations.append(now() - start)
    return statistics.median(durations)


def benchmark_communication() -> dict[str, float]:
    """Bytes/s that each process sends in an all-reduce, and seconds per message."""
    ranks = dist.get_world_size()
    speeds = {}
    for name, tensor, times in (("bandwidth", torch.ones(ALL_REDUCE_BYTES // 4), 5), ("latency", torch.ones(1), 50)):
        dist.all_reduce(tensor)
        durations = []
        for _ in range(times):
            dist.barrier()
            start = time.process_time()
            dist.all_reduce(tensor)
            durations.append(time.process_time() - start)
        seconds = max(statistics.median(durations), 1e-6)
        speeds[name] = (
            2 * (ranks - 1) / ranks * ALL_REDUCE_BYTES / seconds if name == "bandwidth" else seconds / (2 * (ranks - 1))
        )
    return speeds


if __name__ == "__main__":
    dist.init_process_group("gloo")
    speeds = benchmark_communication()
    if dist.get_rank() == 0:
        print(json.dumps(speeds))
    dist.destroy_process_group()
