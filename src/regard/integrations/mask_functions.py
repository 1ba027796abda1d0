"""Transformers' mask functions, read as masks: what `create_causal_mask` and its siblings hand to an implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from regard.integrations.dense_masks import intersect, key_masks
from regard.masks import Mask, causal, documents, window
from regard.masks.patterns import Causal, Window

FAR = 2**31 - 1  # farther than any key


class UnknownMaskFunction(LookupError):
    """A mask function that is nobody's here: only its bits tell."""


def to_masks(function: Callable[..., Any], keys: int, first: int) -> tuple[Mask, ...]:
    """The masks whose `&` the function is, over `keys` keys from `first` on; none if it forbids nothing."""
    if function is masking_utils.causal_mask_function:
        return (causal(),)
    if function is masking_utils.bidirectional_mask_function:
        return ()
    kind, held = _closure(function)
    if kind == "and_masks":
        return tuple(part for one in held["mask_functions"] for part in to_masks(one, keys, first))
    if kind == "or_masks":
        each = [intersect(to_masks(one, keys, first)) for one in held["mask_functions"]]
        if any(mask is None for mask in each):
            return ()
        either = each[0]
        for mask in each[1:]:
            either = either | mask  # type: ignore[operator]
        return (either,)  # type: ignore[return-value]
    if kind == "sliding_window_overlay" and held["sliding_window"] == 0:  # such a mask is built, but in no use
        return (~causal(),)
    if kind == "sliding_window_overlay":
        return (window(held["sliding_window"] - 1, FAR),)
    if kind == "sliding_window_bidirectional_overlay":
        return (window(held["sliding_window"], held["sliding_window"]),)
    if kind == "chunked_overlay":
        at = torch.arange(first, first + keys, device=held["left_padding"].device)
        return (documents((at - held["left_padding"][:, None]) // held["chunk_size"]),)
    if kind == "packed_sequence_mask_function":
        return (documents(_cut(held["packed_sequence_mask"], keys, first)),)
    if kind == "blockwise_overlay":
        ids = _cut(held["block_sequence_ids"], keys, first)
        return documents(ids), *key_masks(ids >= 0)
    if kind == "padding_mask_function":
        return key_masks(_cut(held["padding_mask"], keys, first).bool())
    raise UnknownMaskFunction(kind)


def combine(parts: tuple[Mask, ...], queries: int, keys: int, offset: int) -> Mask | None:
    """The `&` of the parts without those that forbid nothing at this size; None if nothing is left."""
    if any(isinstance(part, Causal) for part in parts):
        parts = tuple(window(part.before, 0) if isinstance(part, Window) else part for part in parts)
        if any(isinstance(part, Window) for part in parts):
            parts = tuple(part for part in parts if not isinstance(part, Causal))
    last = offset + queries - 1
    idle = [
        (isinstance(part, Causal) and offset >= keys - 1)
        or (isinstance(part, Window) and last - part.before <= 0 and offset + part.after >= keys - 1)
        for part in parts
    ]
    return intersect(tuple(part for part, forbids_nothing in zip(parts, idle, strict=True) if not forbids_nothing))


def _closure(function: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """The maker of a mask function, and what it holds."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    if code is None or getattr(function, "__module__", None) != masking_utils.__name__:
        raise UnknownMaskFunction(repr(function))
    held = dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True))
    return function.__qualname__.split(".")[0], held


def _cut(ids: Tensor, keys: int, first: int) -> Tensor:
    if ids.shape[-1] < first + keys:
        raise UnknownMaskFunction(f"{ids.shape[-1]} positions for {keys} keys from {first} on")
    return ids[:, first : first + keys]
