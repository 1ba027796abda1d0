"""Convert the mask functions of Transformers, which `create_causal_mask` and its siblings pass, to masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from regard.integrations.dense_masks import intersect, key_masks
from regard.masks import Mask, causal, documents, window
from regard.masks.patterns import Causal, Window

FAR = 2**31 - 1  # beyond any key


class UnknownMaskFunction(LookupError):
    """Raised for a mask function without a description; the caller evaluates it instead."""


def to_masks(function: Callable[..., Any], keys: int, first: int) -> tuple[Mask, ...]:
    """Masks whose intersection is the mask function, for `keys` keys starting at `first`; empty if it hides nothing."""
    if function is masking_utils.causal_mask_function:
        return (causal(),)
    if function is masking_utils.bidirectional_mask_function:
        return ()
    kind, closure = _closure(function)
    if kind == "and_masks":
        return tuple(part for one in closure["mask_functions"] for part in to_masks(one, keys, first))
    if kind == "or_masks":
        masks = [intersect(to_masks(one, keys, first)) for one in closure["mask_functions"]]
        if any(mask is None for mask in masks):
            return ()
        union = masks[0]
        for mask in masks[1:]:
            union = union | mask  # type: ignore[operator]
        return (union,)  # type: ignore[return-value]
    if (
        kind == "sliding_window_overlay" and closure["sliding_window"] == 0
    ):  # Transformers builds such a mask without using it
        return (~causal(),)
    if kind == "sliding_window_overlay":
        return (window(closure["sliding_window"] - 1, FAR),)
    if kind == "sliding_window_bidirectional_overlay":
        return (window(closure["sliding_window"], closure["sliding_window"]),)
    if kind == "chunked_overlay":
        at = torch.arange(first, first + keys, device=closure["left_padding"].device)
        return (documents((at - closure["left_padding"][:, None]) // closure["chunk_size"]),)
    if kind == "packed_sequence_mask_function":
        return (documents(_narrow(closure["packed_sequence_mask"], keys, first)),)
    if kind == "blockwise_overlay":
        ids = _narrow(closure["block_sequence_ids"], keys, first)
        return documents(ids), *key_masks(ids >= 0)
    if kind == "padding_mask_function":
        return key_masks(_narrow(closure["padding_mask"], keys, first).bool())
    raise UnknownMaskFunction(kind)


def combine(parts: tuple[Mask, ...], queries: int, keys: int, offset: int) -> Mask | None:
    """The intersection of the masks that hide something at this size; None if there are none."""
    if any(isinstance(part, Causal) for part in parts):
        parts = tuple(window(part.before, 0) if isinstance(part, Window) else part for part in parts)
        if any(isinstance(part, Window) for part in parts):
            parts = tuple(part for part in parts if not isinstance(part, Causal))
    last = offset + queries - 1
    hides_nothing = [
        (isinstance(part, Causal) and offset >= keys - 1)
        or (isinstance(part, Window) and last - part.before <= 0 and offset + part.after >= keys - 1)
        for part in parts
    ]
    return intersect(tuple(part for part, skip in zip(parts, hides_nothing, strict=True) if not skip))


def _closure(function: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """The name of the factory of a mask function, and the variables it closes over."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    if code is None or getattr(function, "__module__", None) != masking_utils.__name__:
        raise UnknownMaskFunction(repr(function))
    closure = dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True))
    return function.__qualname__.split(".")[0], closure


def _narrow(ids: Tensor, keys: int, first: int) -> Tensor:
    if ids.shape[-1] < first + keys:
        raise UnknownMaskFunction(f"{ids.shape[-1]} positions for {keys} keys starting at {first}")
    return ids[:, first : first + keys]
