"""How fast this machine is, at the sizes of a model: what a plan divides its FLOPs and bytes by.

Ranks of one thread are timed by the seconds that they compute, which others on the machine do not stretch.
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
from regard.masks import Mask
from regard.scores import Score

SECONDS = 0.4  # for each of the speeds
ALL_REDUCE_BYTES = 1 << 24  # bytes that two processes add up


def measure_compute(model: ModelShape, machine: Machine, sequence: int) -> Machine:
    """The machine with the speeds of one rank that is alone on it."""
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
    """The machine with the bandwidth and latency between two processes on it, whose wire is work for their cores."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "regard.distributed.speed"], capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"two processes could not be started: {(done.stderr.strip() or '?').splitlines()[-1]}")
    return replace(machine, **json.loads(done.stdout))


def _matmul_flops(model: ModelShape, tokens: int) -> float:
    """FLOP/s of a layer's largest product, forward and backward."""
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
    assert isinstance(attend.score, Score)
    assert attend.mask is None or isinstance(attend.mask, Mask)
    count = visited_entries(attend.mask, Frame(1, layer.H, tokens, tokens, 0))
    flops = forward_flops(count, attend.score, layer.D, layer.E) + backward_flops(count, attend.score, layer.D, layer.E)
    attend = Attention(attend.score, attend.mask)
    return flops / _median_seconds(lambda: attend(q, k, v).backward(back))


def _memory_bandwidth() -> float:
    """Bytes/s of an elementwise operation on more than a cache holds."""
    x, y = torch.ones(1 << 24), torch.empty(1 << 24)
    return 2 * x.nbytes / _median_seconds(lambda: torch.mul(x, 2.0, out=y))


def _median_seconds(call: Callable[[], Any]) -> float:
    """Seconds of one call, the median of several."""
    now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    call()
    taken: list[float] = []
    while sum(taken) < SECONDS:
        start = now()
        call()
        taken.append(now() - start)
    return statistics.median(taken)


def benchmark_communication() -> dict[str, float]:
    """Bytes/s that each process of a group sends while they add up a tensor, and seconds of a message."""
    ranks = dist.get_world_size()
    found = {}
    for name, tensor, times in (("bandwidth", torch.ones(ALL_REDUCE_BYTES // 4), 5), ("latency", torch.ones(1), 50)):
        dist.all_reduce(tensor)
        taken = []
        for _ in range(times):
            dist.barrier()
            start = time.process_time()
            dist.all_reduce(tensor)
            taken.append(time.process_time() - start)
        seconds = max(statistics.median(taken), 1e-6)
        found[name] = (
            2 * (ranks - 1) / ranks * ALL_REDUCE_BYTES / seconds if name == "bandwidth" else seconds / (2 * (ranks - 1))
        )
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    speeds = benchmark_communication()
    if dist.get_rank() == 0:
        print(json.dumps(speeds))
    dist.destroy_process_group()
