"""Validation and printing of the arguments of masks."""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from regard.geometry import format_shape


def short_repr(value: int | Tensor) -> str:
    """Format a value for a mask's repr: few numbers in full, many as their shape."""
    if not isinstance(value, Tensor):
        return str(value)
    return str(value.tolist()) if value.numel() <= 8 and not value.is_floating_point() else format_shape(value)


def check_int(name: str, value: object, least: int) -> int:
    """Check for an integer of at least `least` and return it as an int."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or operator.index(value) < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, but is {value!r}")
    value = operator.index(value)
    if value >= 2**31:
        raise ValueError(f"{name} must be below 2**31, where positions overflow, but is {value}")
    return value


def check_int_tensor(name: str, value: Any, form: str) -> Tensor:
    """Convert to a tensor and check that it holds integers."""
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be {form}, but is {type(value).__name__}") from None
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name} must be {form}, but is {tensor.dtype} of shape {format_shape(tensor)}")
    return tensor.detach().to(torch.int64)
