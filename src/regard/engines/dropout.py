"""Dropout by a hash of a seed and an index, so that all engines, forward and backward, drop the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from regard.geometry import Indices
from regard.hashing import LOW, hash32, to_signed


def draw_seed(device: torch.device) -> Tensor:
    """Draw a seed from torch's generator."""
    return torch.randint(2**62, (), dtype=torch.int64, device=device)


def threshold_and_scale(dropout: float) -> tuple[int, float]:
    """Return threshold and scale: weights with 32 bits of at least the threshold are kept and scaled.

    The scale is the inverse of the fraction that the threshold keeps, so that the mean is unchanged.

    >>> from regard.engines.dropout import threshold_and_scale
    >>> threshold_and_scale(0.75)
    (3221225472, 4.0)
    """
    threshold = min(round(dropout * 2**32), 2**32 - 1)
    return threshold, 2**32 / (2**32 - threshold)


def dropout_factors(seed: Tensor, dropout: float, at: Indices) -> Tensor:
    """Return the factors of the weights at these indices: 0, or the scale of `threshold_and_scale`."""
    threshold, scale = threshold_and_scale(dropout)
    frame = at.frame
    row = hash32(seed + to_signed(0x9E3779B97F4A7C15) * ((at.b * frame.H + at.h) * frame.Q + at.i + 1))
    bits = (row + at.j * 0x9E3779B9) & LOW
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        bits = ((bits ^ (bits >> shift)) * factor) & LOW
    bits = bits ^ (bits >> 15)
    return (bits >= threshold).to(torch.float64) * scale


class RandomState:
    """The state of torch's default generators, for the CPU and a device, to draw the same numbers again."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.state = device, torch.get_rng_state()
        self.of_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Draw from the saved state within the context, and restore the generators afterwards."""
        devices = [] if self.of_device is None else [self.device]
        with torch.random.fork_rng(devices, device_type=self.device.type):
            torch.set_rng_state(self.state)
            if self.of_device is not None:
                torch.get_device_module(self.device).set_rng_state(self.of_device, self.device)
            yield
