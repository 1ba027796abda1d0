"""The exchange of heads (Ulysses): from the local tokens of all heads to all tokens of the local heads, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.distributed.communication import Communicator
from regard.distributed.layout import Layout
from regard.distributed.ring import ShardedCall
from regard.geometry import CallSlice


def attend_by_heads(
    call: ShardedCall, query: Tensor, key: Tensor, value: Tensor, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Output (B, H, Q_r, E), and log-sum-exp (B, H, Q_r) if `return_lse` is set, else None."""
    comm, plan, frame = call.comm, call.plan, call.frame
    count = frame.H // comm.ranks
    heads = slice(comm.rank * count, (comm.rank + 1) * count)
    query, key, value = _ToHeads.apply(comm, (plan.queries, plan.keys, plan.keys), query, key, value)
    output, lse = call.compute(call.attend, CallSlice(heads, slice(0, frame.Q), slice(0, frame.K)), query, key, value)
    (output,) = _ToTokens.apply(comm, (plan.queries,), output)
    if not return_lse:
        return output, None
    (lse,) = _ToTokens.apply(comm, (plan.queries,), lse.unsqueeze(-1))
    return output, lse.squeeze(-1)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, layouts: tuple[Layout, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.given = comm, layouts
        return _to_heads(comm, layouts, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        comm, layouts = ctx.given
        return None, None, *_to_tokens(comm, layouts, grads)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, layouts: tuple[Layout, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.given = comm, layouts
        return _to_tokens(comm, layouts, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        comm, layouts = ctx.given
        return None, None, *_to_heads(comm, layouts, grads)


def _to_heads(comm: Communicator, layouts: tuple[Layout, ...], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """(B, heads, local tokens, ...) to (B, local heads, tokens, ...)."""
    parts = list(zip(*(x.chunk(comm.ranks, 1) for x in tensors), strict=True))
    shapes = [
        [
            (len(x), x.shape[1] // comm.ranks, layout.lengths[r], x.shape[3])
            for x, layout in zip(tensors, layouts, strict=True)
        ]
        for r in range(comm.ranks)
    ]
    received = comm.all_to_all(parts, shapes)
    return tuple(layout.join([tensors[n] for tensors in received], 2) for n, layout in enumerate(layouts))


def _to_tokens(comm: Communicator, layouts: tuple[Layout, ...], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """(B, local heads, tokens, ...) to (B, heads, local tokens, ...)."""
    parts = [[layout.own(x, 2, r) for x, layout in zip(tensors, layouts, strict=True)] for r in range(comm.ranks)]
    shape = [(*x.shape[:2], layout.lengths[comm.rank], x.shape[3]) for x, layout in zip(tensors, layouts, strict=True)]
    received = comm.all_to_all(parts, [shape] * comm.ranks)
    return tuple(torch.cat([tensors[n] for tensors in received], 1) for n in range(len(tensors)))
