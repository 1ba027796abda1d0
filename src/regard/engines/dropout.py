"""Which weights dropout keeps: a hash of a seed and a place, so that every engine, forward and backward, agrees."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from regard.geometry import Indices
from regard.hashing import LOW, hash32, signed


def draw_seed(device: torch.device) -> Tensor:
    """A seed from torch's generator."""
    return torch.randint(2**62, (), dtype=torch.int64, device=device)


def threshold_and_scale(dropout: float) -> tuple[int, float]:
    """A weight is kept if its 32 bits are at least the threshold, and is then multiplied by the scale.

    The scale is the inverse of the share that the threshold keeps, so the mean is that without dropout at any share.

    >>> from regard.engines.dropout import threshold_and_scale
    >>> threshold_and_scale(0.75)
    (3221225472, 4.0)
    """
    threshold = min(round(dropout * 2**32), 2**32 - 1)
    return threshold, 2**32 / (2**32 - threshold)


def dropout_factors(seed: Tensor, dropout: float, at: Indices) -> Tensor:
    """What the weights at these places are multiplied by: 0, or the scale of `threshold_and_scale`."""
    threshold, scale = threshold_and_scale(dropout)
    frame = at.frame
    row = hash32(seed + signed(0x9E3779B97F4A7C15) * ((at.b * frame.H + at.h) * frame.Q + at.i + 1))
    bits = (row + at.j * 0x9E3779B9) & LOW
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        bits = ((bits ^ (bits >> shift)) * factor) & LOW
    bits = bits ^ (bits >> 15)
    return (bits >= threshold).to(torch.float64) * scale


class RandomState:
    """The state of torch's default generators, of the CPU and of a device, so that the same numbers are drawn again."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.state = device, torch.get_rng_state()
        self.of_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Within, numbers are drawn from that state on; afterwards the generators are as they were before."""
        devices = [] if self.of_device is None else [self.device]
        with torch.random.fork_rng(devices, device_type=self.device.type):
            torch.set_rng_state(self.state)
            if self.of_device is not None:
                torch.get_device_module(self.device).set_rng_state(self.of_device, self.device)
            yield
