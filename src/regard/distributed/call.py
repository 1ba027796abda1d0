"""Attention over a sequence of which every rank holds a part."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.attention import Attention
from regard.distributed.heads import by_heads
from regard.distributed.layout import Layout, named
from regard.distributed.part import digest, tensors_of, whole_frame
from regard.distributed.plan import Sizes, plan
from regard.distributed.ring import Call, ring
from regard.distributed.wire import Wire
from regard.engines.derivatives import may_have_tangent
from regard.engines.dropout import draw_seed
from regard.engines.problem import FLOATS, check_tensors
from regard.geometry import lead
from regard.masks import Mask

CARD = ("queries", "keys", "B", "H", "G", "D", "E", "axes", "dtype", "requires_grad", "how", "layout", "description")


def attend_over(
    wire: Wire, attend: Attention, query: Tensor, key: Tensor, value: Tensor, *, layout: str, how: str | None,
    engine: str | None, return_lse: bool,
) -> Any:  # fmt: skip
    """The same for a description, over a wire."""
    attend = attend.snapshot()
    check_tensors(query, key, value)
    shape = query.shape[:-1]
    query, key, value = lead(query), lead(key), lead(value)
    (B, H, _, D), (_, G, _, E) = query.shape, value.shape
    tensors = tuple(tensors_of(attend, query.device))
    if any(map(may_have_tangent, (query, key, value, *tensors))):
        raise NotImplementedError(
            "a shared sequence has no forward mode: tangents do not travel between processes; compute the tangent of "
            "whole sequences, outside of regard.distributed.sequence"
        )
    grads = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (query, key, value, *tensors)]
    card = (
        query.shape[2], key.shape[2], B, H, G, D, E, len(shape), FLOATS.index(query.dtype),
        sum(bit << n for n, bit in enumerate((*grads[:3], any(grads[3:])))),
        digest(how), digest(named(layout)), digest(attend),
    )  # fmt: skip
    cards = wire.cards(card, query.device)
    _agree(wire, cards)
    queries, keys = (Layout.of([card[n] for card in cards], layout) for n in (0, 1))
    frame = whole_frame(attend, B, H, queries.length, keys.length)
    attend.check(frame, D, E)
    assert attend.mask is None or isinstance(attend.mask, Mask)
    sizes = Sizes(B, H, G, D, E, query.element_size(), any(grads), grads[1] or grads[2])
    found = plan(attend.mask, frame, queries, keys)
    seed = int(draw_seed(torch.device("cpu"))) if attend.dropout else 0
    call = Call(attend, frame, sizes, found, wire, engine, tensors, seed)
    lse: Tensor | None
    if found.choose(how, sizes) == "ring":
        output, lse = ring(call, query, key, value)
    else:
        output, lse = by_heads(call, query, key, value, return_lse)
    output = output.reshape(*shape, E)
    return (output, lse.reshape(shape)) if return_lse and lse is not None else output


def _agree(wire: Wire, cards: list[list[int]]) -> None:
    """Raise, on every rank alike, unless all ranks make the same call."""
    for name, *values in zip(CARD[2:], *(card[2:] for card in cards), strict=True):
        if len(set(values)) > 1:
            told = "differs" if name in ("how", "layout", "description") else f"is {values}"
            raise ValueError(
                f"all {wire.ranks} ranks must make the same call, each with its own tokens, but {name} {told}"
            )
