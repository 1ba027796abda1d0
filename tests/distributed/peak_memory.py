"""Peak memory of a rank in a training step, including inputs."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import regard as rg
import regard.distributed as rd

HEADS, WIDTH = 4, 64


class LiveBytes(TorchDispatchMode):
    """Count the bytes of all live tensors, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.now = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (key := (room := tensor.untyped_storage())._cdata) not in self.known:
                self.known.add(key)
                self.now += room.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(room, self._freed, key, room.nbytes())
        return result

    def _freed(self, key: int, size: int) -> None:
        self.known.remove(key)
        self.now -= size


def step(group: dist.ProcessGroup, ranks: int, length: int, method: str) -> None:
    """One training step in which every rank needs all keys."""
    q, k, v = (torch.randn(1, HEADS, length // ranks, WIDTH, requires_grad=True) for _ in range(3))
    everywhere = [place + edge for place in range(0, length, length // 8) for edge in (0, length // 8 - 1)]
    mask = rg.causal() & rg.window(63, 0) | rg.global_tokens(everywhere)
    rd.attention(q, k, v, mask=mask, method=method, group=group).sum().backward()


def memory(rank: int, length: int) -> dict[tuple[int, str], int]:
    """Peak bytes by number of ranks and method."""
    results = {}
    for ranks in (1, 2, 4):
        group = dist.new_group(list(range(ranks)))
        for method in ("ring", "heads"):
            if rank < ranks:
                step(group, ranks, length, method)  # fills the caches of masks
                with LiveBytes() as held:
                    step(group, ranks, length, method)
                results[ranks, method] = held.peak
        dist.barrier()
    return results
