"""Convert mask tensors to descriptions: a mask, and a bias if there is more to add.

Results are cached by the content of the tensor, because every layer gets the same one. A version counter is not enough:
writes through `.data`, numpy or `torch.distributed` do not increase it. While torch is tracing, values cannot be read,
and an additive mask becomes a bias.
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
    """Read a mask (..., Q, K), bool with True for visible entries, or additive: its pattern, and its bias or None.

    In an additive mask, numbers below half of the minimum of the dtype are hidden entries.

    >>> import torch
    >>> from regard.integrations.dense_masks import read_keep_mask
    >>> pattern, bias = read_keep_mask(torch.ones(4, 4, dtype=torch.bool).tril())
    >>> pattern.mask, pattern.offset, bias
    (causal(), 0, None)
    """
    if is_tracing():
        return _read_while_tracing(mask, mask)
    return _read_cached(mask, _pattern_of)


def read_ignore_mask(mask: Tensor) -> tuple[Pattern, Tensor | None]:
    """Read a mask like `read_keep_mask`, but with True for hidden entries."""
    if is_tracing():
        return _read_while_tracing(mask, ~mask if mask.dtype == torch.bool else mask)
    return _read_cached(mask, _pattern_of_complement)


def read_key_ignore_mask(mask: Tensor) -> tuple[Masks, Tensor | None]:
    """Read a mask of keys (B, K), with True for hidden keys, or an additive one: masks to intersect, and a bias or
    None."""
    if is_tracing():
        pattern, bias = read_ignore_mask(mask[:, None, None, :])
        return () if pattern.mask is None else (pattern.mask,), None if bias is None else bias[:, 0, 0]
    return _read_cached(mask, _keys_of)


def is_tracing() -> bool:
    """Whether values cannot be read, because torch is compiling or in a functorch transform."""
    functional = torch._C._functorch.peek_interpreter_stack() is not None
    return torch.compiler.is_compiling() or functional


def _read_cached(mask: Tensor, read: Callable[[Tensor], tuple[Any, bool]]) -> tuple[Any, Tensor | None]:
    content = fingerprint(mask)
    cache_key = None if content is None else ("read", read.__name__, content)
    owner = mask if mask._base is None else mask._base  # views often live for one call only
    description, has_bias = CACHE.get_or_build(cache_key, lambda: read(mask.detach()), owner=owner)
    has_bias = has_bias or mask.requires_grad
    if has_bias and description is not NO_MASK and description != ():
        # the pattern hides these entries, and -inf gives NaN gradients
        mask = mask.masked_fill(_hidden_entries(mask.detach()), 0.0)
    return description, mask if has_bias else None


def _read_while_tracing(mask: Tensor, allowed: Tensor) -> tuple[Pattern, Tensor | None]:
    if mask.dtype == torch.bool:
        return Pattern(dense(allowed)), None
    return NO_MASK, mask.masked_fill(_hidden_entries(mask), float("-inf"))


def _pattern_of(mask: Tensor) -> tuple[Pattern, bool]:
    allowed, has_bias = _split_entries(mask)
    return _pattern(allowed), has_bias


def _pattern_of_complement(mask: Tensor) -> tuple[Pattern, bool]:
    return _pattern_of(~mask if mask.dtype == torch.bool else mask)


def _keys_of(mask: Tensor) -> tuple[Masks, bool]:
    allowed, has_bias = _split_entries(~mask if mask.dtype == torch.bool else mask)
    return key_masks(allowed), has_bias


def _split_entries(mask: Tensor) -> tuple[Tensor, bool]:
    """The visible entries as a bool tensor, and whether the others have numbers to add."""
    if mask.dtype == torch.bool:
        return mask, False
    hidden = _hidden_entries(mask)
    return ~hidden, bool((mask.masked_fill(hidden, 0.0) != 0).any())


def _hidden_entries(mask: Tensor) -> Tensor:
    return mask <= torch.finfo(mask.dtype).min / 2


def _pattern(allowed: Tensor) -> Pattern:
    """The pattern of a bool tensor; a causal mask, the most common one, is recognised."""
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
    """Masks whose intersection shows the keys that are True (B, K) to all queries; empty if all are True.

    >>> import torch
    >>> from regard.integrations.dense_masks import key_masks
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
        return (dense(keys[:, None, None, :]).snapshot(),)  # the visible keys are not an interval
    ends = () if bool((stop == length).all()) else (padding(stop).snapshot(),)
    return (*ends, ~padding(start).snapshot()) if bool(start.any()) else ends


def intersect(parts: Masks) -> Mask | None:
    """The intersection of masks; None if there are none."""
    if not parts:
        return None
    mask, *rest = parts
    for part in rest:
        mask = mask & part
    return mask
