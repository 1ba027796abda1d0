"""The state of linear attention, and checks of the arguments of a call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.arguments import check_layout
from regard.engines.problem import batch_size
from regard.geometry import broadcasts, format_shape, pad_leading
from regard.linear.recurrence import has_readable_values

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class LinearState(NamedTuple):
    """State of a causal `LinearAttention` after some tokens: O(M·E) numbers, independent of how many they were.

    sums `(B, H, M, E)`: the sum over keys of feature times value. If the attention normalizes, `(B, H, M, E + 1)`, with
        the sum of the features in the last column.
    scale `(B, G, M, 1)`: the largest logarithm of each feature; `sums` are in units of exp(scale). None where decays or
        the delta rule are used, or features are not positive.

    >>> import regard as rg
    >>> out, state = rg.LinearAttention().step(*torch.randn(3, 1, 2, 1, 4))
    >>> state.scale.shape, state.sums.shape
    (torch.Size([1, 2, 4, 1]), torch.Size([1, 2, 4, 5]))
    """

    sums: Tensor
    scale: Tensor | None = None


def check_tensors(query: Tensor, key: Tensor, value: Tensor, *, recurrent: bool) -> None:
    """Raise unless the tensors fit one another. recurrent: whether values may have more heads than keys."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        _check_tensor(name, x)
        if x.dim() not in (2, 3, 4):
            raise ValueError(f"{name} must have 2, 3 or 4 axes (B, H, N, D), but has the shape {format_shape(x)}")
        if x.dim() != query.dim():
            raise ValueError(
                f"{name} must have as many axes as query, {query.dim()}, but has the shape {format_shape(x)}"
            )
        if x.dtype != query.dtype:
            raise TypeError(
                f"{name} must have the dtype of query, {query.dtype}, but is {x.dtype}; try {name}.to(query.dtype)"
            )
        _check_device(name, x, query)
    (_, H, _, D), (_, G, K, _), heads = pad_leading(query).shape, pad_leading(key).shape, pad_leading(value).shape[1]
    if D == 0 or key.shape[-1] != D:
        raise ValueError(
            f"key must have the width of query, at least 1, but query is {format_shape(query)} and key is "
            f"{format_shape(key)}"
        )
    if value.shape[-2] != K:
        raise ValueError(
            f"value must have one row per key, {K}, but key is {format_shape(key)} and value is {format_shape(value)}"
        )
    if recurrent:
        most = max(H, G, heads)
        if not H or not G or not heads or most % H or most % G or most % heads:
            raise ValueError(
                f"the largest number of heads must be a multiple of the others, but query, key and value have {H}, {G} "
                f"and {heads}"
            )
    else:
        if heads != G:
            raise ValueError(
                f"value must have the heads of key, {G}, but key is {format_shape(key)} and value is "
                f"{format_shape(value)}"
            )
        if G == 0 or H % G:
            raise ValueError(
                f"query must have a multiple of the heads of key, but has H = {H} for G = {G}; "
                "each key head serves H / G query heads"
            )
    if any(pad_leading(x).shape[0] not in (1, batch_size(query, key, value)) for x in (query, key, value)):
        raise ValueError(
            "query, key and value must have the same batch size, or 1 where it is shared, but are "
            f"{format_shape(query)}, {format_shape(key)} and {format_shape(value)}"
        )


def check_same_length(query: Tensor, key: Tensor) -> None:
    if query.shape[-2] != key.shape[-2]:
        raise ValueError(
            "query and key must have the same number of tokens with a state, decay, beta or documents, but are "
            f"{format_shape(query)} and {format_shape(key)}; earlier keys are in the state"
        )


def expand_decay(decay: Tensor, query: Tensor, dims: int, heads: int, channels: int) -> Tensor:
    """Return decay as (B, H, N) or (B, H, N, M), float32 at least; axes of 1 are expanded.

    query: (B, H, N, D), which has `dims` axes in the call.
    """
    _check_tensor("decay", decay)
    _check_device("decay", decay, query)
    if decay.dim() not in (dims - 1, dims):
        raise ValueError(
            f"decay must be (B, H, N), or (B, H, N, D) for a decay per channel, but is {format_shape(decay)} for a "
            f"query of {dims} axes"
        )
    if has_readable_values(decay) and bool((decay > 0).any()):
        raise ValueError(
            "decay must be the logarithm of a factor from 0 to 1, so at most 0, but is up to "
            f"{float(decay.max()):.3g}; for a factor a pass a.log(), for a gate x pass logsigmoid(x)"
        )
    sizes = (query.shape[0], heads, query.shape[2])
    return _expand("decay", decay, query, (*sizes, channels) if decay.dim() == dims else sizes)


def expand_beta(beta: Tensor, query: Tensor, dims: int, heads: int) -> Tensor:
    """Return beta as (B, H, N), float32 at least; axes of 1 are expanded."""
    _check_tensor("beta", beta)
    _check_device("beta", beta, query)
    if beta.dim() != dims - 1:
        raise ValueError(
            f"beta must be (B, H, N), but is {format_shape(beta)} for a query of {dims} axes; try beta.squeeze(-1)"
        )
    return _expand("beta", beta, query, (query.shape[0], heads, query.shape[2]))


def check_state(state: LinearState | None, shape: tuple[int, ...], scaled: bool, like: Tensor) -> None:
    """Raise unless a state has sums of this shape, with a scale or without, and the dtype and device of `like`."""
    if state is None:
        return
    if not isinstance(state, LinearState):
        raise TypeError(
            f"state must be a LinearState returned by an earlier call, or None, but is {type(state).__name__}"
        )
    if tuple(state.sums.shape) != shape or (state.scale is None) == scaled:
        missing = " without a scale" if state.scale is None and scaled else ""
        raise ValueError(
            f"state must fit this call: sums of shape {shape}, but they are {tuple(state.sums.shape)}{missing}; "
            "a state can only be used with the batch, heads, widths and features that created it"
        )
    real = torch.promote_types(like.dtype, torch.float32)
    if state.sums.dtype != real:
        raise TypeError(f"state must be {real} for this call, but is {state.sums.dtype}; start from None")
    _check_device("state", state.sums, like)


def _expand(name: str, x: Tensor, query: Tensor, sizes: tuple[int, ...]) -> Tensor:
    x = pad_leading(x, len(sizes))
    if any(not broadcasts(given, size) for given, size in zip(x.shape, sizes, strict=True)):
        raise ValueError(f"{name} must be {sizes}, or 1 along axes where it is the same, but is {format_shape(x)}")
    return x.to(torch.promote_types(query.dtype, torch.float32)).expand(sizes)


def _check_tensor(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, but is {type(x).__name__}; try torch.as_tensor({name})")
    check_layout(name, x)
    if x.dtype not in _DTYPES:
        raise TypeError(f"{name} must be float32, float64, bfloat16 or float16, but is {x.dtype}; try {name}.float()")


def _check_device(name: str, x: Tensor, query: Tensor) -> None:
    if x.device != query.device:
        raise ValueError(
            f"{name} must be on the device of query, {query.device}, but is on {x.device}; try {name}.to(query.device)"
        )
