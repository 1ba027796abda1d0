"""Absolute positions: tables to add to the input."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def sinusoidal(
    length: int,
    d_model: int,
    *,
    base: float = 10000.0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The fixed table of "Attention Is All You Need", shape `(length, d_model)`.

        PE[pos, 2i] = sin(pos / base^(2i / d_model))        PE[pos, 2i + 1] = cos(pos / base^(2i / d_model))

    An odd width ends with a sine. The angles are computed in float64, so the table is exact to the last digit of
    `dtype` (by default torch's default dtype) at any length.

    >>> import regard as rg
    >>> table = rg.sinusoidal(length=50, d_model=8)
    >>> table.shape, table[0].tolist()
    (torch.Size([50, 8]), [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    """
    _check_size("length", length, least=0)
    _check_size("d_model", d_model, least=1)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating point dtype, but is {dtype}; try torch.float32")
    positions = torch.arange(length, dtype=torch.float64, device="cpu")
    if isinstance(base, bool) or not isinstance(base, (int, float)) or not 0 < base < math.inf:
        raise ValueError(f"base must be a positive number, but is {base!r}; try base=10000.0")
    frequencies = float(base) ** (-torch.arange(0, d_model, 2, dtype=torch.float64, device="cpu") / d_model)
    angles = positions[:, None] * frequencies  # (length, ceil(d_model / 2))
    table = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)
    return table[:, :d_model].to(dtype=dtype, device=torch.empty(0, device=device).device).contiguous()


def learned(length: int, d_model: int, *, std: float = 0.02) -> nn.Parameter:
    """A trainable table of positions: an `nn.Parameter` `(length, d_model)` drawn from N(0, std^2).

    >>> import regard as rg
    >>> table = rg.learned(length=512, d_model=64)
    >>> table.shape, table.requires_grad
    (torch.Size([512, 64]), True)
    """
    _check_size("length", length, least=0)
    _check_size("d_model", d_model, least=1)
    if isinstance(std, bool) or not isinstance(std, (int, float)):
        raise TypeError(f"std must be a number, but is {type(std).__name__}; try std=0.02")
    if not (math.isfinite(std) and std >= 0):
        raise ValueError(f"std must be finite and not negative, but is {std}; try std=0.02")
    return nn.Parameter(torch.empty(length, d_model).normal_(std=std))


def _check_size(name: str, value: int, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an integer, but is {type(value).__name__} {value!r}; try {name}=int(...)")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, but is {value}")
