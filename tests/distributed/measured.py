"""How much memory a rank needs beyond what it holds, at a length of the whole sequence."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

import regard as rg
import regard.distributed as rd

HEADS, WIDTH = 4, 64


@contextmanager
def peak() -> Iterator[list[float]]:
    """The most megabytes that the process has grown by within."""

    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

    grown, base, going = [0.0], resident(), True

    def watch() -> None:
        while going:
            grown[0] = max(grown[0], resident() - base)
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield grown
    finally:
        going = False
        thread.join()


def step(group: dist.ProcessGroup, ranks: int, length: int, how: str) -> None:
    """One step of training, inputs and all; every rank needs the keys of all."""
    q, k, v = torch.randn(3, 1, HEADS, length // ranks, WIDTH, requires_grad=True)
    everywhere = [place + edge for place in range(0, length, length // 8) for edge in (0, length // 8 - 1)]
    mask = rg.causal() & rg.window(63, 0) | rg.global_tokens(everywhere)
    rd.attention(q, k, v, mask=mask, how=how, group=group).sum().backward()


def memory(rank: int, length: int) -> dict[tuple[int, str], float]:
    """Megabytes by the number of ranks and the way."""
    found = {}
    for ranks in (4, 2, 1):  # a process keeps what it had: the least first
        group = dist.new_group(list(range(ranks)))
        for how in ("ring", "heads"):
            if rank < ranks:
                step(group, ranks, 256, how)
                with peak() as grown:
                    step(group, ranks, length, how)
                found[ranks, how] = grown[0]
        dist.barrier()
    return found
