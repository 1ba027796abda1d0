"""Ring attention: keys and values are sent from rank to rank while each rank computes with the shard it has.

At step s, rank r sends its keys to rank r + s and computes with those of rank r - s. Keys that no query of a rank may
attend to are not sent to it. The next shard is transferred during the computation, so a rank holds at most two shards
of other ranks; a transfer has only some of the heads, so that two are small. Backward sends the shards again, and their
gradients back.

The keys of one shard give output o and log-sum-exp l, all keys give O and L. With w = exp(l - L), O is the sum of w o.
The weights of a shard are exp(logit - L), so its gradients follow from O and L alone. If a score function closes over
trainable tensors, they are the gradients of (o, l) with the cotangents (w dO, w (dO · (o - O) + dL)).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.attention import Attention
from regard.distributed.communication import Communicator, PendingTransfer
from regard.distributed.layout import Span
from regard.distributed.plan import Block, Plan, Sizes, portion
from regard.engines import merge_into, shard_gradients
from regard.engines.dropout import draw_seed
from regard.engines.tiled import replace_leaves
from regard.geometry import CallSlice, Frame

_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, eq=False)
class ShardedCall:
    """One call, with the information that all ranks share."""

    attend: Attention
    frame: Frame  # of the full call
    sizes: Sizes
    plan: Plan
    comm: Communicator
    engine: str | None
    tensors: tuple[Tensor, ...]  # of the description
    seed: int  # dropout seed of this rank

    def compute(self, attend: Attention, part: CallSlice, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a slice of the call."""
        narrowed = attend.narrow(self.frame, part)
        with self.seed_dropout(part):
            return narrowed.forward_local(*tensors, engine=self.engine, return_lse=True)

    @contextmanager
    def seed_dropout(self, part: CallSlice) -> Iterator[None]:
        """Seed dropout for a slice of the call; restore torch's generator on exit."""
        if not self.attend.dropout:
            yield
            return
        index = (part.heads.start * self.frame.Q + part.rows.start) * self.frame.K + part.columns.start
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed((self.seed + _GOLDEN * (index + 1)) % 2**63)
            yield


@dataclass(frozen=True)
class RingStep:
    """One step of the ring, for some query heads and the key/value heads (`kv_heads`) that they attend to."""

    heads: slice
    kv_heads: slice
    step: int
    tag: int


def ring(call: ShardedCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output (B, H, Q_r, E) and log-sum-exp (B, H, Q_r)."""
    if call.sizes.grad:
        return _Ring.apply(call, query, key, value, *call.tensors)
    return _forward(call, query, key, value)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: ShardedCall, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value, *_ = tensors
        output, lse = _forward(call, query, key, value)
        ctx.call = call
        ctx.save_for_backward(output, lse, *tensors)
        return output, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # once_differentiable would not raise for gradients without history
            raise NotImplementedError(
                "a sharded sequence has no second derivatives: call backward without create_graph, or compute them for "
                "full sequences, outside of regard.distributed.sequence"
            )
        output, lse, *tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        gradients = _gradients(ctx.call, tensors, wanted, output, lse, *grads)
        return None, *(grad if want else None for grad, want in zip(gradients, wanted, strict=True))


def _forward(call: ShardedCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    rank, real = call.comm.rank, _accumulation_dtype(query)
    attend, spans = replace(call.attend, sink=None), call.plan.queries.spans[rank]
    output = query.new_zeros((*query.shape[:3], value.shape[3]), dtype=real)
    lse = _sink(call, output)  # like a shard with a weight but no value
    for ring_step, source, kv in _arrivals(call, key, value):
        for block in call.plan.blocks[rank][source]:
            rows, columns = _locate(spans, block.rows), _columns(call, source, block)
            inputs = query[:, ring_step.heads, rows], kv[0][:, :, columns], kv[1][:, :, columns]
            results = call.compute(attend, _part(ring_step, block), *inputs)
            merge_into(output[:, ring_step.heads, rows], lse[:, ring_step.heads, rows], *results)
    return output.to(query.dtype), lse


def _gradients(
    call: ShardedCall, tensors: Sequence[Tensor], wanted: Sequence[bool], output: Tensor, lse: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor,
) -> list[Tensor]:  # fmt: skip
    """The gradients of query, key, value and the tensors of the description, in this order."""
    query, key, value, *_ = tensors
    rank, real = call.comm.rank, lse.dtype
    sums = [torch.zeros_like(tensor, dtype=real) for tensor in tensors]
    leaves: dict[int, Tensor] = {}
    attend = replace(
        call.attend,
        score=replace_leaves(call.attend.score, leaves),
        bias=replace_leaves(call.attend.bias, leaves),
        sink=None,
    )
    learned = [leaves.get(id(tensor), tensor) for tensor in call.tensors]
    whole = output, lse, grad_output, grad_lse
    returning: GradientReturn | None = None
    for ring_step, source, kv in _arrivals(call, key, value):
        shard_grads = [torch.zeros_like(x, dtype=real) for x in kv]
        for block in call.plan.blocks[rank][source]:
            rows, columns = _locate(call.plan.queries.spans[rank], block.rows), _columns(call, source, block)
            inputs = [query[:, ring_step.heads, rows], kv[0][:, :, columns], kv[1][:, :, columns]]
            inputs = [x.detach().requires_grad_(want) for x, want in zip(inputs, wanted, strict=False)] + learned
            trainable = [n for n, x in enumerate(inputs) if x.requires_grad]
            results = [x[:, ring_step.heads, rows] for x in whole]
            gradients = _block_gradients(
                call, attend, _part(ring_step, block), inputs[:3], results, [inputs[n] for n in trainable]
            )
            targets = [sums[0][:, ring_step.heads, rows], *(x[:, :, columns] for x in shard_grads), *sums[3:]]
            for n, grad in zip(trainable, gradients, strict=True):
                if grad is not None:
                    targets[n] += grad
        if returning is not None:
            returning.add(sums)
            returning = None
        if not ring_step.step:
            _add(call, rank, ring_step, shard_grads, sums)
        elif call.sizes.grad_keys:
            returning = _return_gradients(call, ring_step, source, [x.to(key.dtype) for x in shard_grads], key)
    if returning is not None:
        returning.add(sums)
    _sink_gradient(call, sums, *whole)
    return [total.to(tensor.dtype) for total, tensor in zip(sums, tensors, strict=True)]


def _block_gradients(
    call: ShardedCall, attend: Attention, part: CallSlice, tensors: Sequence[Tensor], whole: Sequence[Tensor],
    inputs: Sequence[Tensor],
) -> Sequence[Tensor | None]:  # fmt: skip
    """The gradients of `inputs` from one block of queries and keys."""
    device = whole[0].device
    with torch.enable_grad():
        narrowed = attend.narrow(call.frame, part)
        parts = [part for part in (narrowed.score, narrowed.bias) if part is not None]
        if not any(each.closes_over_trainable(device) for each in parts):
            seed = None
            if narrowed.dropout:
                with call.seed_dropout(part):
                    seed = draw_seed(device)
            return shard_gradients(narrowed.problem(*tensors, return_lse=True), tensors, seed, inputs, *whole)
        part_output, part_lse = call.compute(attend, part, *tensors)
    cotangents = _cotangents(part_output.detach(), part_lse.detach(), *whole)
    return torch.autograd.grad((part_output, part_lse), inputs, cotangents, allow_unused=True, retain_graph=True)


def _cotangents(
    part: Tensor, part_lse: Tensor, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """The cotangents of the output and log-sum-exp of one shard of the keys."""
    share = (part_lse - lse).exp().masked_fill(part_lse == float("-inf"), 0.0)
    rest = (grad_output.to(lse) * (part.to(lse) - output.to(lse))).sum(-1) + grad_lse
    return (share.unsqueeze(-1) * grad_output).to(part.dtype), share * rest


def _ring_steps(call: ShardedCall) -> list[RingStep]:
    """The steps of all transfers: for each portion of the heads, the local keys first."""
    sizes, ranks = call.sizes, call.comm.ranks
    per_group, count = sizes.H // max(1, sizes.G), max(1, sizes.G)
    if ranks > 1:
        count = portion(sizes, max(call.plan.keys.lengths), sum(tensor.nbytes for tensor in call.tensors))
    kv_heads = [slice(g, min(g + count, sizes.G)) for g in range(0, sizes.G, count)]
    return [
        RingStep(slice(per_group * some.start, per_group * some.stop), some, step, 4 * (n * ranks + step))
        for n, some in enumerate(kv_heads)
        for step in range(ranks)
    ]


def _arrivals(call: ShardedCall, key: Tensor, value: Tensor) -> Iterator[tuple[RingStep, int, list[Tensor]]]:
    """Yield each step with the source rank and its keys and values, while the next transfer is in progress."""
    comm, plan = call.comm, call.plan
    spans = plan.keys.spans[comm.rank]

    def start_transfer(ring_step: RingStep) -> tuple[PendingTransfer | None, list[Tensor]]:
        target, source = (comm.rank + ring_step.step) % comm.ranks, (comm.rank - ring_step.step) % comm.ranks
        out = [_select(x[:, ring_step.kv_heads], spans, plan.pieces[target][comm.rank]) for x in (key, value)]
        if not ring_step.step:
            return None, out
        buffers = _receive_buffers(call, ring_step, plan.count(comm.rank, source), key)
        return comm.post(target, out, source, buffers, ring_step.tag), buffers

    ring_steps = _ring_steps(call)
    transfer = start_transfer(ring_steps[0]) if ring_steps else None
    for ring_step, following in zip(ring_steps, [*ring_steps[1:], None], strict=True):
        assert transfer is not None
        posted, kv = transfer
        if posted is not None:
            posted.wait()
        del posted  # frees the send buffers
        transfer = start_transfer(following) if following is not None else None
        yield ring_step, (comm.rank - ring_step.step) % comm.ranks, kv


@dataclass(frozen=True, eq=False)
class GradientReturn:
    """Gradients of keys and values in transfer: those of another rank to it, and those of this rank back."""

    call: ShardedCall
    posted: PendingTransfer
    ring_step: RingStep
    target: int
    buffers: list[Tensor]

    def add(self, sums: Sequence[Tensor]) -> None:
        self.posted.wait()
        _add(self.call, self.target, self.ring_step, self.buffers, sums)


def _return_gradients(
    call: ShardedCall, ring_step: RingStep, source: int, grads: list[Tensor], key: Tensor
) -> GradientReturn:
    comm = call.comm
    target = (comm.rank + ring_step.step) % comm.ranks
    buffers = _receive_buffers(call, ring_step, call.plan.count(target, comm.rank), key)
    return GradientReturn(
        call, comm.post(source, grads, target, buffers, ring_step.tag + 2), ring_step, target, buffers
    )


def _add(call: ShardedCall, target: int, ring_step: RingStep, grads: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
    """Add the gradients of the keys and values of this rank that rank `target` has used."""
    first, spans = 0, call.plan.keys.spans[call.comm.rank]
    for a, b in call.plan.pieces[target][call.comm.rank]:
        for total, grad in zip(sums[1:3], grads, strict=True):
            total[:, ring_step.kv_heads, _locate(spans, (a, b))] += grad[:, :, first : first + b - a]
        first += b - a


def _sink(call: ShardedCall, output: Tensor) -> Tensor:
    """The initial log-sum-exp (B, H, Q_r): the logit of the sink, or -inf."""
    sink = float("-inf") if call.attend.sink is None else call.attend.sink
    logit = torch.as_tensor(sink, dtype=output.dtype, device=output.device).detach().reshape(-1, 1)
    return logit.expand(output.shape[:3]).clone()


def _sink_gradient(
    call: ShardedCall, sums: Sequence[Tensor], output: Tensor, lse: Tensor, grad_output: Tensor,
    grad_lse: Tensor,
) -> None:  # fmt: skip
    sink = call.attend.sink
    if not isinstance(sink, Tensor):
        return
    _, cotangent = _cotangents(lse.new_zeros(()), _sink(call, lse.unsqueeze(-1)), output, lse, grad_output, grad_lse)
    total = sums[3 + [id(tensor) for tensor in call.tensors].index(id(sink))]
    by_head = cotangent.sum((0, 2))
    total += (by_head if sink.numel() > 1 else by_head.sum()).reshape(total.shape)


def _receive_buffers(call: ShardedCall, ring_step: RingStep, count: int, like: Tensor) -> list[Tensor]:
    """Buffers for `count` keys and values."""
    sizes, kv_heads = call.sizes, ring_step.kv_heads.stop - ring_step.kv_heads.start
    return [like.new_empty(sizes.B, kv_heads, count, width) for width in (sizes.D, sizes.E)]


def _part(ring_step: RingStep, block: Block) -> CallSlice:
    return CallSlice(ring_step.heads, slice(*block.rows), slice(*block.columns))


def _columns(call: ShardedCall, source: int, block: Block) -> slice:
    """The slice of a block's keys in the keys received from a rank."""
    return _locate(call.plan.pieces[call.comm.rank][source], block.columns)


def _locate(spans: Sequence[Span], span: Span) -> slice:
    """The slice of a span of the sequence in a tensor that holds these spans in order."""
    first = 0
    for a, b in spans:
        if a <= span[0] and span[1] <= b:
            return slice(first + span[0] - a, first + span[1] - a)
        first += b - a
    raise AssertionError(f"{span} is in none of {spans}")


def _select(x: Tensor, spans: Sequence[Span], pieces: Sequence[Span]) -> Tensor:
    """Select pieces (B, G, n, ...) of the local keys or values."""
    parts = [x[:, :, _locate(spans, piece)] for piece in pieces]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2) if parts else x[:, :, :0]


def _accumulation_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
