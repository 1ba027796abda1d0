"""Descriptions of calls, remembered with their plans where calls can share them: over layers, and over passes."""

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
    """Who may look at whom, and where the queries stand; `mask=None` lets everybody look at everything.

    The mask is a snapshot: what is written into its tensors afterwards is for the next pass.
    `attentions` remembers the descriptions made of it, so that all layers of a model share one, and its plans. A
    `transient` pattern lives as long as one pass through a model.
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
    """The attention over a pattern.

    >>> import regard as rg
    >>> from regard.integrations.pattern import Pattern, build_attention
    >>> pattern = Pattern(rg.causal(), offset=0)
    >>> build_attention(pattern, scale=0.5) is build_attention(pattern, scale=0.5)
    True
    """
    if torch.jit.is_tracing():
        raise NotImplementedError(
            "torch.jit.trace does not see what regard computes; use torch.compile, or go back to torch's attention, "
            'as by model.set_attn_implementation("sdpa"), before tracing'
        )
    if torch.compiler.is_compiling() or isinstance(scale, Tensor):
        return _make(pattern.mask, pattern.offset, scale, softcap, dropout, bias, sink)
    asked = scale, softcap, dropout, id(bias), id(sink)
    if (known := pattern.attentions.get(asked)) is not None:
        return known[0]
    plain = bias is None and sink is None
    mask, offset = pattern.mask, pattern.offset
    content = None
    if plain and size_of(mask) <= SHARED_BYTES:  # from one pass to the next
        content = "all" if mask is None else mask.content()
    numbers = (offset, scale, softcap, dropout)
    cache_key = None if content is None else ("described", content, numbers, tuple(map(type, numbers)))
    made = CACHE.get_or_build(cache_key, lambda: _make(mask, offset, scale, softcap, dropout, bias, sink))
    if plain or pattern.transient:  # nothing that lasts holds a pass's tensors
        pattern.attentions[asked] = made, bias, sink  # held, so that their ids stay theirs
    return made


def _make(
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
