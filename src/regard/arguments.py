"""Validation of the arguments of the operator besides its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from regard.fingerprint import unwrap, without_transforms
from regard.geometry import format_shape

Index = int | slice | Sequence[int] | Tensor | None
"""Indices along an axis; None means all."""


def check_offset(value: Any) -> int | Tensor | None:
    """Check an offset: None, a number, or one whole number per batch row; return it as None, int or tensor."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if isinstance(value, np.integer):
        return int(value)
    try:
        tensor = unwrap(value) if isinstance(value, Tensor) else _constant(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"offset must be a whole number or one per batch row, but is {type(value).__name__}") from None
    check_layout("offset", tensor, sequences=False)
    if tensor.is_floating_point() or tensor.dtype == torch.bool or tensor.dim() > 1:
        raise TypeError(
            f"offset must be a whole number or one per batch row, but is {tensor.dtype} of shape {format_shape(tensor)}"
        )
    return tensor


def _constant(value: Any) -> Tensor:
    """Return numbers as a tensor that belongs to no torch.func transform, although one may be running."""
    if torch.compiler.is_compiling():
        return torch.as_tensor(value)
    with without_transforms():
        return torch.as_tensor(value)


def read_offset(value: Any) -> int | Tensor:
    """Return the offset as an int, or as a copy (B,) int64."""
    if not isinstance(value, Tensor):
        return value
    check_unmapped(value)
    return value.detach().to(torch.int64, copy=True).reshape(-1)


def check_unmapped(offset: Tensor) -> None:
    """Raise if vmap maps over the offset: mask layouts depend on its values."""
    if not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(offset):
        raise NotImplementedError(
            "offset is read as values, which a torch.func transform such as vmap hides; map over query, key and value "
            "with a fixed offset, or make the mapped axis the batch axis, with one offset per row"
        )


_TORCH = {
    "is_causal": "mask=rg.causal(), with offset=0 where Q and K differ, since torch aligns the first query and key",
    "attn_mask": "mask= for a bool tensor (True means may attend), bias= for a float tensor",
    "dropout_p": "dropout=",
    "scale": "score=rg.Dot(scale=...)",
    "enable_gqa": "no such argument: key and value may have fewer heads than the query",
}
_TORCH_MODULE = _TORCH | {
    "embed_dim": "d_model=",
    "num_heads": "heads=",
    "kdim": "d_source=",
    "vdim": "d_source=, which key and value share",
    "dropout": "attend=rg.Attention(dropout=...)",
    "scale": "attend=rg.Attention(score=rg.Dot(scale=...))",
    "add_zero_attn": "attend=rg.Attention(sink=0.0)",
    "add_bias_kv": "attend=rg.Attention(sink=...), a logit without a value",
    "batch_first": "no such argument: tokens are always (B, N, d_model)",
    "key_padding_mask": "mask=rg.padding(lengths), or mask=~key_padding_mask[:, None, None]: True means a real token",
    "need_weights": "regard.view.capture(), or layer.attend.weights(q, k)",
    "average_attn_weights": "regard.view.capture(), or layer.attend.weights(q, k)",
}
Function = TypeVar("Function", bound=Callable[..., Any])


def reject_keywords(name: str, unknown: Mapping[str, Any], ours: Mapping[str, str] = _TORCH) -> None:
    """Raise for unexpected keywords; for torch's, name ours."""
    for word in unknown:
        advice = f"; use {ours[word]}" if word in ours else ""
        raise TypeError(f"{name}() got an unexpected keyword argument {word!r}{advice}")


def explain_torch_keywords(name: str, *, module: bool = False) -> Callable[[Function], Function]:
    """Decorate a function so that torch's keywords raise an error that names ours."""
    ours = _TORCH_MODULE if module else _TORCH

    def decorate(function: Function) -> Function:
        @wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for word in kwargs:
                if word in ours:
                    reject_keywords(name, {word: None}, ours)
            return function(*args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorate


def check_layout(name: str, tensor: Tensor, *, sequences: bool = True) -> None:
    """Raise unless the tensor is dense, strided and floating-point. sequences: advise on joining sequences."""
    if tensor.is_nested:
        advice = "join its sequences along one axis with mask=rg.documents(ids), or pad them with rg.padding(lengths)"
        raise TypeError(
            f"{name} must be one dense tensor, but is nested; {advice if sequences else 'stack its parts, or pad them'}"
        )
    if tensor.is_quantized:
        raise TypeError(f"{name} must be floating-point, but is quantised ({tensor.dtype}); pass {name}.dequantize()")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, but has the layout {tensor.layout}; pass {name}.to_dense()")


def check_temperature(value: Any) -> None:
    if not _is_number(value):
        raise TypeError(
            f"temperature must be a number, but is {type(value).__name__}; "
            "for a learned temperature pass a tensor as the score's scale"
        )
    if not value > 0:
        raise ValueError(f"temperature must be positive, but is {value}; for near-argmax use a small positive number")
    if not 1e-30 <= value <= 1e30:
        raise ValueError(
            f"temperature must be between 1e-30 and 1e30, but is {value}: logits would overflow or vanish in float32"
        )


def check_dropout(value: Any) -> None:
    if not _is_number(value):
        raise TypeError(f"dropout must be a fraction in [0, 1), but is {type(value).__name__}; leave it out for none")
    if not 0 <= value < 1:
        raise ValueError(f"dropout must be a fraction in [0, 1), but is {value}")


def check_sink(value: Any) -> None:
    if value is None or (isinstance(value, Tensor) and value.is_floating_point()):
        return
    if not _is_number(value):
        raise TypeError(
            f"sink must be a logit, a number or a floating-point tensor of one per head, but is {describe_value(value)}"
        )
    if not value < math.inf:
        raise ValueError(f"sink must be a logit below infinity, but is {value}")


def check_size(value: Any) -> None:
    """Check the size of a map: rows and columns."""
    if (
        not isinstance(value, Sequence)
        or len(value) != 2
        or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in value)
    ):
        raise ValueError(f"size must be two whole numbers of at least 1, rows and columns, but is {value!r}")


def check_top(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"top must be a whole number of at least 0, but is {value!r}")


def resolve_index(name: str, index: Index, size: int) -> Tensor:
    """Return the indices (n,) along an axis of this size; negative ones count from its end."""
    everything = torch.arange(size, device="cpu")
    try:
        if index is None or isinstance(index, slice):
            return everything if index is None else torch.tensor(range(size)[index], dtype=torch.int64, device="cpu")
        chosen = torch.as_tensor(index, device="cpu")
        if not chosen.numel():
            return everything[:0]
        if isinstance(index, bool) or chosen.is_floating_point() or chosen.dim() > 1:
            raise TypeError
        return everything[chosen.reshape(-1)]
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be a number, a slice, a list or an index tensor, but is {index!r}") from None
    except IndexError:
        raise ValueError(f"{name} must be between {-size} and {size - 1}, but is {index!r}") from None


def describe_value(value: object) -> str:
    """Describe a value for an error message."""
    if isinstance(value, type):
        return f"the class {value.__name__}; create an instance with {value.__name__}()"
    return f"{value.dtype} of shape {format_shape(value)}" if isinstance(value, Tensor) else type(value).__name__


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
