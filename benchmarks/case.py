"""A benchmark case: inputs, our call, the calls of peers, the definition in plain torch, and targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Tensor]
Reference = Callable[[Inputs, Tensor], Tensor]  # inputs and row indices -> output (B, H, rows, E)


def unchanged(output: Any) -> Tensor:
    return output


@dataclass(frozen=True)
class Peer:
    """Another library's way to compute a case.

    `build(inputs, threads)` gives the call to be timed; what it converts beforehand is not timed. `view` turns the
    call's result into a tensor (B, H, Q, E). A peer that computes another function brings its own `reference`.
    `share` is the part of its time that ours is compared with.
    """

    name: str
    build: Callable[[Inputs, int], Callable[[], Any]]
    view: Callable[[Any], Tensor] = unchanged
    reference: Reference | None = None
    share: float | Callable[[], float] = 1.0
    tolerance: float | None = None
    ours: bool = False  # another call of regard, such as the same without a bias


@dataclass(frozen=True)
class Target:
    """Peer time / our time is at least this, or our time / peer time at most that."""

    peer: str
    at_least: float = 0.0
    at_most: float = 0.0

    def met(self, ratio: float) -> bool:
        return ratio >= self.at_least if self.at_least else 1 / ratio <= self.at_most


@dataclass(frozen=True)
class Case:
    name: str
    row: str  # of the table of targets
    inputs: Callable[[], Inputs]
    ours: Callable[[Inputs], Tensor]
    reference: Reference
    peers: tuple[Peer, ...] = ()
    targets: tuple[Target, ...] = ()
    backward: bool = False
    flops: float = 0.0  # of the definition, without what the mask leaves out
    reads: bool = False  # whether reading the keys and values is what takes the time
    tolerance: float = 1e-5  # relative error against float64
    dropout: float = 0.0
    linear_memory: bool = False  # whether memory must be O(N)
    quick: bool = False
    smallest: bool = False  # a call whose memory says nothing: very short, or a model that is held anyway
    threads: int = 0  # the only number of threads at which it is measured; 0 for all


def torch_peer(name: str, function: Callable[[Inputs], Tensor], **options: Any) -> Peer:
    """A peer whose inputs and output are torch tensors."""
    return Peer(name, lambda x, threads: lambda: function(x), **options)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, std: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std).to(dtype)


def qkv(B: int, H: int, N: int, D: int, *, Q: int | None = None, dtype: torch.dtype = torch.float32) -> Inputs:
    return {
        "q": normal(B, H, N if Q is None else Q, D, seed=1, dtype=dtype),
        "k": normal(B, H, N, D, seed=2, dtype=dtype),
        "v": normal(B, H, N, D, seed=3, dtype=dtype),
    }
