"""Whether sequences are shared with other processes, and with whom."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor


class Sharding(Protocol):
    """Other processes that hold other tokens of the same sequences, and how one computes together with them."""

    def attend(
        self, attend: Any, query: Tensor, key: Tensor, value: Tensor, *, engine: str | None, return_lse: bool
    ) -> Any:
        """What the `Attention` gives over the tokens of all processes, for the queries of this one."""

    def to_local(self, x: Tensor, dim: int) -> Tensor:
        """The tokens of this process, from the whole."""

    def full_tensor(self, x: Tensor, dim: int) -> Tensor:
        """The tokens of all processes, from those of this one."""

    def positions(self, count: int, device: torch.device) -> Tensor:
        """Where the tokens of this process stand, if it has so many."""


_current: Sharding | None = None  # of the process, not of a thread: autograd computes in threads of its own


def current_sharding() -> Sharding | None:
    """With whom the sequences are shared, if with anybody."""
    return _current


@contextmanager
def use_sharding(sharding: Sharding | None) -> Iterator[None]:
    """Within, sequences are shared like this, or not at all."""
    global _current
    before, _current = _current, sharding
    try:
        yield
    finally:
        _current = before
