"""Attention on a sequence that is split over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.attention import Attention
from regard.distributed.communication import Communicator
from regard.distributed.description import description_digest, full_frame, learned_tensors
from regard.distributed.heads import attend_by_heads
from regard.distributed.layout import Layout, check_layout
from regard.distributed.plan import Sizes, plan
from regard.distributed.ring import ShardedCall, ring
from regard.engines.derivatives import may_have_tangent
from regard.engines.dropout import draw_seed
from regard.engines.problem import FLOATS, check_tensors
from regard.geometry import pad_leading
from regard.normalizations import Softmax

CALL_FIELDS = (
    "queries",
    "keys",
    "B",
    "H",
    "G",
    "D",
    "E",
    "axes",
    "dtype",
    "requires_grad",
    "method",
    "layout",
    "description",
)


def sharded_attention(
    comm: Communicator, attend: Attention, query: Tensor, key: Tensor, value: Tensor, *, layout: str,
    method: str | None, engine: str | None, return_lse: bool,
) -> Any:  # fmt: skip
    """Attention with a description and a communicator; see `regard.distributed.attention`."""
    attend = attend.snapshot()
    if not isinstance(attend.normalization, Softmax):
        raise NotImplementedError(
            "a sharded sequence merges shards of the keys by their log-sum-exp, which only a softmax has, not "
            f"{attend.normalization!r}; compute full sequences, outside of regard.distributed.sequence"
        )
    check_tensors(query, key, value)
    shape = query.shape[:-1]
    query, key, value = pad_leading(query), pad_leading(key), pad_leading(value)
    (B, H, _, D), (_, G, _, E) = query.shape, value.shape
    tensors = tuple(learned_tensors(attend, query.device))
    if any(map(may_have_tangent, (query, key, value, *tensors))):
        raise NotImplementedError(
            "a sharded sequence has no forward mode: tangents are not sent between processes; compute the tangent of "
            "full sequences, outside of regard.distributed.sequence"
        )
    grads = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (query, key, value, *tensors)]
    local_call = (
        query.shape[2], key.shape[2], B, H, G, D, E, len(shape), FLOATS.index(query.dtype),
        sum(bit << n for n, bit in enumerate((*grads[:3], any(grads[3:])))),
        description_digest(method), description_digest(check_layout(layout)), description_digest(attend),
    )  # fmt: skip
    calls = comm.all_gather_ints(local_call, query.device)
    _check_agreement(comm, calls)
    queries, keys = (Layout.of([each[n] for each in calls], layout) for n in (0, 1))
    frame = full_frame(attend, B, H, queries.length, keys.length)
    attend.check(frame, D, E)
    sizes = Sizes(B, H, G, D, E, query.element_size(), any(grads), grads[1] or grads[2])
    call_plan = plan(attend.mask, frame, queries, keys)
    seed = int(draw_seed(torch.device("cpu"))) if attend.dropout else 0
    call = ShardedCall(attend, frame, sizes, call_plan, comm, engine, tensors, seed)
    lse: Tensor | None
    if call_plan.choose(method, sizes) == "ring":
        output, lse = ring(call, query, key, value)
    else:
        output, lse = attend_by_heads(call, query, key, value, return_lse)
    output = output.reshape(*shape, E)
    return (output, lse.reshape(shape)) if return_lse and lse is not None else output


def _check_agreement(comm: Communicator, calls: list[list[int]]) -> None:
    """Raise on every rank unless all ranks make the same call."""
    for name, *values in zip(CALL_FIELDS[2:], *(call[2:] for call in calls), strict=True):
        if len(set(values)) > 1:
            difference = "differs" if name in ("method", "layout", "description") else f"is {values}"
            raise ValueError(
                f"all {comm.ranks} ranks must make the same call, each with its tokens, but {name} {difference}"
            )
