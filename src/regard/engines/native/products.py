"""Causal linear attention, and products with weights."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from regard.engines.native.attend import results
from regard.engines.native.binding import (
    DTYPES,
    LINEAR,
    LINEAR_GRADIENT,
    LINEAR_RESULT,
    PRODUCT,
    STALE,
    call,
    error,
    fresh,
    library,
    place,
)


def _packed_linear(query: Tensor, key: Tensor, value: Tensor, elu: bool) -> bytes:
    (B, H, N, M), (_, G, _, E) = query.shape, value.shape
    places = (n for tensor in (query, key, value) for n in place(tensor))
    return LINEAR.pack(B, H, G, N, M, E, DTYPES[query.dtype], torch.get_num_threads(), elu, 0, *places)


def linear_forward(query: Tensor, key: Tensor, value: Tensor, elu: bool) -> tuple[Tensor, Tensor]:
    """Output (B, H, N, E) and its denominator (B, H, N) of query (B, H, N, M), key (B, G, N, M), value (B, G, N, E).

    Query and key are features, or with `elu` what is to become them.
    """
    output, norm, _ = results(query, value, (0, 0))
    places = LINEAR_RESULT.pack(*place(fresh(output)), *place(norm))
    call("regard_linear_forward", _packed_linear(query, key, value, elu), places)
    return output, norm


def linear_backward(
    query: Tensor, key: Tensor, value: Tensor, elu: bool, output: Tensor, norm: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, given that of the output."""
    dq, dk, dv = (fresh(torch.empty_like(t, memory_format=torch.contiguous_format)) for t in (query, key, value))
    places = (n for tensor in (output, norm, grad, dq, dk, dv) for n in place(tensor))
    call("regard_linear_backward", _packed_linear(query, key, value, elu), LINEAR_GRADIENT.pack(*places))
    return dq, dk, dv


@cache
def panel_rows() -> int:
    """How many rows of a weight lie side by side: parts of a weight begin at multiples of it."""
    found = library()
    return 1 if isinstance(found, str) else found.regard_packed_size(1, 1)


def lay_out(weight: Tensor) -> Tensor:
    """A float32 weight (N, K) as `multiply` reads it."""
    found, (N, K) = library(), weight.shape
    assert not isinstance(found, str)
    if (size := found.regard_packed_size(N, K)) < 0:
        raise error(size)
    numbers = torch.empty(size)
    call("regard_pack_weight", weight.data_ptr(), weight.stride(0), N, K, numbers.data_ptr())
    return numbers


def multiply(x: Tensor, weight: Tensor, laid: Tensor, bias: Tensor | None, out: Tensor, first: int) -> bool:
    """out (..., N) = x (M, K) times the rows of a weight from `first` on, plus the bias of these rows.

    False, and nothing computed, where the weight is no longer what was laid out.
    """
    (M, K), N = x.shape, out.shape[-1]
    given = PRODUCT.pack(
        M, N, K, x.stride(0) if M > 1 else K, weight.stride(0), N, x.data_ptr(),
        weight.data_ptr() + 4 * first * weight.stride(0), laid.data_ptr() + 4 * first * K,
        0 if bias is None else bias.data_ptr() + 4 * first, out.data_ptr(), torch.get_num_threads(), 0,
    )  # fmt: skip
    found = library()
    assert not isinstance(found, str)
    if (status := found.regard_multiply(given)) not in (0, STALE):
        raise error(status)
    return status == 0
