"""Sequences sharded over processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor


class Sharding(Protocol):
    """Processes that hold different tokens of the same sequences, and joint computation with them."""

    def attend(
        self, attend: Any, query: Tensor, key: Tensor, value: Tensor, *, engine: str | None, return_lse: bool
    ) -> Any:
        """Compute the `Attention` over the tokens of all processes, for the queries of this one."""

    def to_local(self, x: Tensor, dim: int) -> Tensor:
        """Return the tokens of this process, given the whole."""

    def full_tensor(self, x: Tensor, dim: int) -> Tensor:
        """Return the tokens of all processes, given those of this one."""

    def positions(self, count: int, device: torch.device) -> Tensor:
        """Return the positions of the `count` tokens of this process."""


_current: Sharding | None = None  # per process, not per thread: autograd uses its own threads


def current_sharding() -> Sharding | None:
    """Return the current sharding, if any."""
    return _current


@contextmanager
def use_sharding(sharding: Sharding | None) -> Iterator[None]:
    """Shard sequences like this within the context, or not at all with None."""
    global _current
    before, _current = _current, sharding
    try:
        yield
    finally:
        _current = before
