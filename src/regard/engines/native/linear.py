"""Causal linear attention, and products with packed weights."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from regard.engines.native.attention import empty_results
from regard.engines.native.binding import (
    DTYPES,
    LINEAR,
    LINEAR_GRADIENT,
    LINEAR_RESULT,
    PACKED_LINEAR,
    call,
    library,
    prefer_large_pages,
    tensor_fields,
)
from regard.engines.weight_formats import FORMATS, PanelLayout


def _packed_linear(query: Tensor, key: Tensor, value: Tensor, elu: bool) -> bytes:
    (B, H, N, M), (_, G, _, E) = query.shape, value.shape
    places = (n for tensor in (query, key, value) for n in tensor_fields(tensor))
    return LINEAR.pack(B, H, G, N, M, E, DTYPES[query.dtype], torch.get_num_threads(), elu, 0, *places)


def linear_forward(query: Tensor, key: Tensor, value: Tensor, elu: bool) -> tuple[Tensor, Tensor]:
    """Return output (B, H, N, E) and denominator (B, H, N).

    query (B, H, N, M), key (B, G, N, M), value (B, G, N, E). Query and key are features, or with `elu` their inputs.
    """
    output, norm, _ = empty_results(query, value, (0, 0))
    places = LINEAR_RESULT.pack(*tensor_fields(prefer_large_pages(output)), *tensor_fields(norm))
    call("regard_linear_forward", _packed_linear(query, key, value, elu), places)
    return output, norm


def linear_backward(
    query: Tensor, key: Tensor, value: Tensor, elu: bool, output: Tensor, norm: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, given that of the output."""
    dq, dk, dv = (
        prefer_large_pages(torch.empty_like(t, memory_format=torch.contiguous_format)) for t in (query, key, value)
    )
    places = (n for tensor in (output, norm, grad, dq, dk, dv) for n in tensor_fields(tensor))
    call("regard_linear_backward", _packed_linear(query, key, value, elu), LINEAR_GRADIENT.pack(*places))
    return dq, dk, dv


@cache
def panel_rows() -> int:
    """Return the number of rows of a weight per panel of the packed form."""
    kernels = library()
    return 1 if isinstance(kernels, str) else kernels.regard_packed_bytes(1, 1, FORMATS["float32"]) // 4


def multiply(x: Tensor, panels: Tensor, layout: PanelLayout, bias: Tensor | None, out: Tensor, first: int) -> None:
    """Multiply x (M, K) by the rows of a packed weight from `first`, the start of a panel, and add the bias."""
    (M, K), N = x.shape, out.shape[-1]
    address = panels.data_ptr() + (panels.stride(0) * panels.itemsize * first // panel_rows() if first else 0)
    given = PACKED_LINEAR.pack(
        M, N, K, x.stride(0) if M > 1 else K, 0, N, x.data_ptr(), address,
        0 if bias is None else bias.data_ptr() + 4 * first, 0, out.data_ptr(), layout.factor, FORMATS[layout.format], 0,
        torch.get_num_threads(), bias is not None, 0, 0,
    )  # fmt: skip
    call("regard_multiply", given)
