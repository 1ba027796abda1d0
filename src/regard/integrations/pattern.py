"""Mask patterns, and the attention descriptions built from them, cached for all layers and forward passes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.attention import Attention
from regard.cache import CACHE, SHARED_BYTES, size_of
from regard.masks import Mask
from regard.scores import Dot


@dataclass(frozen=True, eq=False)
class Pattern:
    """A mask and the offset of its queries; `mask=None` hides nothing.

    The mask is a snapshot: later writes to its tensors do not change it.
    attentions: the descriptions built from the pattern, so that all layers of a model share one and its plans.
    transient: whether the pattern lives for one forward pass only.
    """

    mask: Mask | None = None
    offset: int | None = None
    transient: bool = False
    attentions: dict[tuple, tuple[Attention, Tensor | None, Tensor | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mask is not None and not torch.compiler.is_compiling():
            object.__setattr__(self, "mask", self.mask.snapshot())


NO_MASK = Pattern()


def build_attention(
    pattern: Pattern,
    *,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
) -> Attention:
    """The attention description of a pattern, shared by equal calls.

    >>> import regard as rg
    >>> from regard.integrations.pattern import Pattern, build_attention
    >>> pattern = Pattern(rg.causal(), offset=0)
    >>> build_attention(pattern, scale=0.5) is build_attention(pattern, scale=0.5)
    True
    """
    if torch.jit.is_tracing():
        raise NotImplementedError(
            "torch.jit.trace does not record the kernels of regard; use torch.compile, or switch to another attention "
            'before tracing, such as model.set_attn_implementation("sdpa")'
        )
    if torch.compiler.is_compiling() or isinstance(scale, Tensor):
        return _build(pattern.mask, pattern.offset, scale, softcap, dropout, bias, sink)
    arguments = scale, softcap, dropout, id(bias), id(sink)
    if (known := pattern.attentions.get(arguments)) is not None:
        return known[0]
    plain = bias is None and sink is None
    mask, offset = pattern.mask, pattern.offset
    content = None
    if plain and size_of(mask) <= SHARED_BYTES:  # shared between forward passes
        content = "all" if mask is None else mask.content()
    numbers = (offset, scale, softcap, dropout)
    cache_key = None if content is None else ("attention", content, numbers, tuple(map(type, numbers)))
    attend = CACHE.get_or_build(cache_key, lambda: _build(mask, offset, scale, softcap, dropout, bias, sink))
    if plain or pattern.transient:  # a permanent pattern must not hold the tensors of one pass
        pattern.attentions[arguments] = attend, bias, sink  # holds the tensors, so that their ids stay valid
    return attend


def _build(
    mask: Mask | None,
    offset: int | None,
    scale: float | Tensor | None,
    softcap: float | None,
    dropout: float,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
) -> Attention:
    scale = scale if scale is None or isinstance(scale, Tensor) else float(scale)
    return Attention(Dot(scale, softcap), mask, bias, offset, sink=sink, dropout=float(dropout))
