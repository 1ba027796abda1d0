"""Masks that come as tensors, read as descriptions: who may look, and what there is to add besides.

What was read is remembered by the content of the tensor, since every layer is given the same. A version counter is not
enough: writes through `.data`, numpy or `torch.distributed` do not count. Where torch is tracing, values cannot be
read, and all is added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.cache import CACHE
from regard.fingerprint import fingerprint
from regard.geometry import pad_leading
from regard.integrations.pattern import NO_MASK, Pattern
from regard.masks import Mask, causal, dense, padding

Masks = tuple[Mask, ...]


def read_keep_mask(mask: Tensor) -> tuple[Pattern, Tensor | None]:
    """A mask (..., Q, K) in which True permits, or whose numbers are added: who may look, and what is added if any is.

    Of numbers, the least of their dtype and what lies near it mean no.

    >>> import torch
    >>> from regard.integrations.dense_masks import read_keep_mask
    >>> pattern, added = read_keep_mask(torch.ones(4, 4, dtype=torch.bool).tril())
    >>> pattern.mask, pattern.offset, added
    (causal(), 0, None)
    """
    if tracing():
        return _without_values(mask, mask)
    return _cached(mask, _pattern_of)


def read_ignore_mask(mask: Tensor) -> tuple[Pattern, Tensor | None]:
    """The same where True forbids."""
    if tracing():
        return _without_values(mask, ~mask if mask.dtype == torch.bool else mask)
    return _cached(mask, _pattern_of_complement)


def read_key_ignore_mask(mask: Tensor) -> tuple[Masks, Tensor | None]:
    """Of keys (B, K) where True forbids, or whose numbers are added: masks that are all to hold, and what is added."""
    if tracing():
        pattern, added = read_ignore_mask(mask[:, None, None, :])
        return () if pattern.mask is None else (pattern.mask,), None if added is None else added[:, 0, 0]
    return _cached(mask, _keys_of)


def tracing() -> bool:
    """Whether values cannot be read, since torch looks for a graph, or runs many calls at once."""
    functional = torch._C._functorch.peek_interpreter_stack() is not None
    return torch.compiler.is_compiling() or functional


def _cached(mask: Tensor, read: Callable[[Tensor], tuple[Any, bool]]) -> tuple[Any, Tensor | None]:
    content = fingerprint(mask)
    known = None if content is None else ("read", read.__name__, content)
    owner = mask if mask._base is None else mask._base  # a view is often made for one call
    found, more = CACHE.get_or_build(known, lambda: read(mask.detach()), owner=owner)
    more = more or mask.requires_grad
    if more and found is not NO_MASK and found != ():
        mask = mask.masked_fill(
            _hidden(mask.detach()), 0.0
        )  # what is hidden needs no number, and -inf spoils gradients
    return found, mask if more else None


def _without_values(mask: Tensor, permits: Tensor) -> tuple[Pattern, Tensor | None]:
    if mask.dtype == torch.bool:
        return Pattern(dense(permits)), None
    return NO_MASK, mask.masked_fill(_hidden(mask), float("-inf"))


def _pattern_of(mask: Tensor) -> tuple[Pattern, bool]:
    allowed, more = _split(mask)
    return _pattern(allowed), more


def _pattern_of_complement(mask: Tensor) -> tuple[Pattern, bool]:
    return _pattern_of(~mask if mask.dtype == torch.bool else mask)


def _keys_of(mask: Tensor) -> tuple[Masks, bool]:
    allowed, more = _split(~mask if mask.dtype == torch.bool else mask)
    return key_masks(allowed), more


def _split(mask: Tensor) -> tuple[Tensor, bool]:
    """Who may look, and whether there is more to the mask than that."""
    if mask.dtype == torch.bool:
        return mask, False
    hidden = _hidden(mask)
    return ~hidden, bool((mask.masked_fill(hidden, 0.0) != 0).any())


def _hidden(mask: Tensor) -> Tensor:
    return mask <= torch.finfo(mask.dtype).min / 2


def _pattern(allowed: Tensor) -> Pattern:
    """The pattern of a bool tensor; a causal one, the commonest of all, is recognised."""
    if bool(allowed.all()):
        return NO_MASK
    allowed = pad_leading(allowed)
    queries, keys = allowed.shape[2:]
    offset = int(allowed[0, 0, 0].sum()) - 1
    if queries > 1 and keys > 1 and _is_causal(allowed, offset):
        return Pattern(causal(), offset)
    return Pattern(dense(allowed).snapshot())


def _is_causal(allowed: Tensor, offset: int) -> bool:
    queries, keys = allowed.shape[2:]
    j = torch.arange(keys, device=allowed.device)
    for rows in torch.arange(offset, offset + queries, device=allowed.device).split(max(1, (1 << 20) // keys)):
        part = allowed[:, :, int(rows[0]) - offset : int(rows[-1]) - offset + 1]
        if not bool((part == (j <= rows[:, None])).all()):
            return False
    return True


def key_masks(keys: Tensor) -> Masks:
    """The masks whose `&` lets everybody see the keys that are True, (B, K); none if all are.

    >>> import torch
    >>> from regard.integrations.dense_masks import seen
    >>> key_masks(torch.tensor([[True, True, False], [True, True, True]]))
    (padding([2, 3]),)
    >>> key_masks(torch.tensor([[False, True, True], [True, True, True]]))
    (~padding([1, 0]),)
    """
    count, length = keys.sum(-1), keys.shape[-1]
    if bool((count == length).all()):
        return ()
    bits = keys.to(torch.uint8)
    start = torch.where(count > 0, bits.argmax(-1), 0)
    stop = torch.where(count > 0, length - bits.flip(-1).argmax(-1), 0)
    if not torch.equal(stop - start, count):
        return (dense(keys[:, None, None, :]).snapshot(),)  # there are holes
    ends = () if bool((stop == length).all()) else (padding(stop).snapshot(),)
    return (*ends, ~padding(start).snapshot()) if bool(start.any()) else ends


def intersect(parts: Masks) -> Mask | None:
    """The `&` of masks; None of none."""
    if not parts:
        return None
    mask, *rest = parts
    for part in rest:
        mask = mask & part
    return mask
