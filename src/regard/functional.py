"""`attention`, the call without a description object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from regard import arguments
from regard.attention import Attention, Keys
from regard.cache import CACHE
from regard.masks import Mask
from regard.normalizations import DEFAULT_NORMALIZATION, Normalization
from regard.positions.biases import Bias
from regard.scores import DEFAULT_SCORE, Score


class AttentionOptions(TypedDict, total=False):
    """Keyword arguments of `attention` besides its tensors, for type checkers."""

    score: Score | Callable[..., Tensor]
    mask: Mask | Tensor | None
    bias: Bias | Tensor | None
    offset: int | Sequence[int] | Tensor | None
    temperature: float
    sink: float | Tensor | None
    dropout: float
    normalization: Normalization
    engine: str | None


@overload
def attention(
    query: Tensor,
    key: Keys,
    value: Keys,
    *,
    return_lse: Literal[False] = False,
    return_max: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...
@overload
def attention(
    query: Tensor, key: Keys, value: Keys, *, return_lse: Literal[True], **options: Unpack[AttentionOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    query: Tensor, key: Keys, value: Keys, *, return_max: Literal[True], **options: Unpack[AttentionOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    query: Tensor,
    key: Keys,
    value: Keys,
    *,
    return_lse: bool,
    return_max: bool = False,
    **options: Unpack[AttentionOptions],
) -> Any: ...
def attention(
    query: Tensor,
    key: Keys,
    value: Keys,
    *,
    score: Score | Callable[..., Tensor] = DEFAULT_SCORE,
    mask: Mask | Tensor | None = None,
    bias: Bias | Tensor | None = None,
    offset: int | Sequence[int] | Tensor | None = None,
    temperature: float = 1.0,
    sink: float | Tensor | None = None,
    dropout: float = 0.0,
    normalization: Normalization = DEFAULT_NORMALIZATION,
    engine: str | None = None,
    return_lse: bool = False,
    return_max: bool = False,
    **unknown: Any,
) -> Any:
    """`softmax(q kᵀ / sqrt(D)) v`, or any other attention: the same as `Attention(...)(query, key, value)`.

    >>> import regard as rg, torch
    >>> q, k, v = torch.randn(3, 1, 8, 100, 64)
    >>> rg.attention(q, k, v, mask=rg.causal() & rg.window(9, 0), bias=rg.alibi(heads=8)).shape
    torch.Size([1, 8, 100, 64])
    """
    if unknown:
        arguments.reject_keywords("attention", unknown)
    plain = score is DEFAULT_SCORE and bias is None and (sink is None or type(sink) in (int, float))
    plain = plain and (offset is None or type(offset) is int) and normalization is DEFAULT_NORMALIZATION
    if plain and (mask is None or isinstance(mask, Mask)) and not torch.compiler.is_compiling():
        attend = _plain_attention(mask, offset, temperature, sink, dropout)
    else:
        attend = Attention(score, mask, bias, offset, temperature, sink, dropout, normalization)
    return attend.forward(query, key, value, engine=engine, return_lse=return_lse, return_max=return_max)


def _plain_attention(mask: Mask | None, offset: Any, temperature: float, sink: Any, dropout: float) -> Attention:
    """Return a cached description whose only tensors are those of its mask."""
    if mask is None or mask.small:
        return _small_attention(mask, offset, temperature, sink, dropout)
    snapshot = mask.snapshot()
    content, numbers = snapshot.content(), (offset, temperature, sink, dropout)
    known = None if content is None else ("attention", content, numbers, tuple(map(type, numbers)))
    return CACHE.get_or_build(
        known, lambda: Attention(DEFAULT_SCORE, snapshot, None, offset, temperature, sink, dropout), owner=mask
    )


@lru_cache(maxsize=64, typed=True)
def _small_attention(mask: Mask | None, offset: Any, temperature: float, sink: Any, dropout: float) -> Attention:
    """Return a cached description without tensors, whose size is negligible; its plans are in the cache."""
    return Attention(DEFAULT_SCORE, mask, None, offset, temperature, sink, dropout)
