"""The ring: keys and values go from rank to rank while each computes with what it has.

At step s, rank r sends its keys to rank r + s and has those of rank r - s: every rank sends and receives once a step,
and what no query of a rank may see is not sent to it. The next shard is on its way while one is computed with, so a
rank holds two of other ranks at most. Backward sends the shards again, and their gradients back.

A part of the keys gives output o and log-sum-exp l, all of them O and L. With w = exp(l - L), O is the sum of w o, so
the gradients of a part are those of (o, l) by (w dO, w (dO · (o - O) + dL)): each is computed by the engines, alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.attention import Attention
from regard.distributed.layout import Span
from regard.distributed.part import part_of
from regard.distributed.plan import Block, Plan, Sizes
from regard.distributed.wire import Posted, Wire, cut
from regard.engines import merge
from regard.engines.tiled import with_leaves
from regard.geometry import Frame, Part

_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, eq=False)
class Call:
    """One call, as all ranks know it."""

    attend: Attention
    frame: Frame  # of the whole
    sizes: Sizes
    plan: Plan
    wire: Wire
    engine: str | None
    tensors: tuple[Tensor, ...]  # the description's own
    seed: int  # of this rank's dropout

    def compute(self, attend: Attention, part: Part, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a part of the call."""
        own = part_of(attend, self.frame, part)
        place = (part.heads.start * self.frame.Q + part.rows.start) * self.frame.K + part.columns.start
        with _seeded(self.seed + _GOLDEN * (place + 1)) if own.dropout else nullcontext():
            return own.here(*tensors, engine=self.engine, return_lse=True)


def ring(call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output (B, H, Q_r, E) and log-sum-exp (B, H, Q_r)."""
    if call.sizes.grad:
        return _Ring.apply(call, query, key, value, *call.tensors)
    return _forward(call, query, key, value)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value, *_ = tensors
        output, lse = _forward(call, query, key, value)
        ctx.call = call
        ctx.save_for_backward(output, lse, *tensors)
        return output, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        output, lse, *tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        found = _gradients(ctx.call, tensors, wanted, output, lse, *grads)
        return None, *(grad if want else None for grad, want in zip(found, wanted, strict=True))


def _forward(call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    rank, real = call.wire.rank, _real(query)
    attend, own = replace(call.attend, sink=None), call.plan.queries.spans[rank]
    output = query.new_zeros((*query.shape[:3], value.shape[3]), dtype=real)
    lse = _sink(call, output)  # a shard that takes weight and has no value
    for _, source, held in _arrivals(call, key, value):
        for block in call.plan.blocks[rank][source]:
            rows, columns = _within(own, block.rows), _columns(call, source, block)
            inputs = query[:, :, rows], held[0][:, :, columns], held[1][:, :, columns]
            part, part_lse = call.compute(attend, _part(call, block), *inputs)
            merged = merge([output[:, :, rows], part.to(real)], [lse[:, :, rows], part_lse])
            output[:, :, rows], lse[:, :, rows] = merged
    return output.to(query.dtype), lse


def _gradients(
    call: Call, tensors: Sequence[Tensor], wanted: Sequence[bool], output: Tensor, lse: Tensor, grad_output: Tensor,
    grad_lse: Tensor,
) -> list[Tensor]:  # fmt: skip
    """The gradients of query, key, value and the description's tensors, in this order."""
    query, key, value, *_ = tensors
    rank, real = call.wire.rank, lse.dtype
    sums = [torch.zeros_like(tensor, dtype=real) for tensor in tensors]
    leaves: dict[int, Tensor] = {}
    attend = replace(
        call.attend,
        score=with_leaves(call.attend.score, leaves),
        bias=with_leaves(call.attend.bias, leaves),
        sink=None,
    )
    learned = [leaves.get(id(tensor), tensor) for tensor in call.tensors]
    whole = output.to(real), lse, grad_output.to(real), grad_lse
    returning: Return | None = None
    for step, source, held in _arrivals(call, key, value):
        k_grad, v_grad = (torch.zeros_like(x, dtype=real) for x in held)
        for block in call.plan.blocks[rank][source]:
            rows, columns = _within(call.plan.queries.spans[rank], block.rows), _columns(call, source, block)
            inputs = [query[:, :, rows], held[0][:, :, columns], held[1][:, :, columns]]
            inputs = [x.detach().requires_grad_(want) for x, want in zip(inputs, wanted, strict=False)] + learned
            with torch.enable_grad():
                part, part_lse = call.compute(attend, _part(call, block), *inputs[:3])
            pairing = _pairing(part.detach(), part_lse.detach(), *(x[:, :, rows] for x in whole))
            asked = [n for n, x in enumerate(inputs) if x.requires_grad]
            found = torch.autograd.grad(
                (part, part_lse), [inputs[n] for n in asked], pairing, allow_unused=True, retain_graph=bool(learned)
            )
            targets = [sums[0][:, :, rows], k_grad[:, :, columns], v_grad[:, :, columns], *sums[3:]]
            for n, grad in zip(asked, found, strict=True):
                if grad is not None:
                    targets[n] += grad
        if returning is not None:
            returning.add(sums)
            returning = None
        if not step:
            _add(call, rank, (k_grad, v_grad), sums)
        elif call.sizes.grad_keys:
            returning = _give_back(call, step, source, (k_grad, v_grad), key, value)
    if returning is not None:
        returning.add(sums)
    _sink_gradient(call, tensors, sums, *whole)
    return [total.to(tensor.dtype) for total, tensor in zip(sums, tensors, strict=True)]


def _pairing(
    part: Tensor, part_lse: Tensor, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """What the output and log-sum-exp of a part of the keys are to be differentiated by."""
    share = (part_lse - lse).exp().masked_fill(part_lse == float("-inf"), 0.0)
    rest = (grad_output * (part.to(output) - output)).sum(-1) + grad_lse
    return (share.unsqueeze(-1) * grad_output).to(part.dtype), share * rest


def _arrivals(call: Call, key: Tensor, value: Tensor) -> Iterator[tuple[int, int, tuple[Tensor, Tensor]]]:
    """Step, rank and its keys and values that this rank needs, own ones first; the next are always on their way."""
    wire, plan = call.wire, call.plan
    spans = plan.keys.spans[wire.rank]

    def begin(step: int) -> tuple[Posted, Tensor]:
        target, source = (wire.rank + step) % wire.ranks, (wire.rank - step) % wire.ranks
        needed = plan.pieces[target][wire.rank]
        out = torch.cat([_take(x, spans, needed).reshape(-1) for x in (key, value)])
        room = key.new_empty(sum(prod(shape) for shape in _shapes(call, plan.count(wire.rank, source))))
        return wire.post((target, out), (source, room), tag=2 * step), room

    held = tuple(_take(x, spans, plan.pieces[wire.rank][wire.rank]) for x in (key, value))
    coming = begin(1) if wire.ranks > 1 else None
    yield 0, wire.rank, held  # type: ignore[misc]
    for step in range(1, wire.ranks):
        assert coming is not None
        posted, room = coming
        posted.wait()
        coming = begin(step + 1) if step + 1 < wire.ranks else None
        source = (wire.rank - step) % wire.ranks
        k, v = cut(room, _shapes(call, plan.count(wire.rank, source)))
        yield step, source, (k, v)


@dataclass(frozen=True, eq=False)
class Return:
    """Gradients of keys and values on their way: of another rank's to it, and of this rank's from another."""

    call: Call
    posted: Posted
    target: int
    room: Tensor

    def add(self, sums: Sequence[Tensor]) -> None:
        self.posted.wait()
        k, v = cut(self.room, _shapes(self.call, self.call.plan.count(self.target, self.call.wire.rank)))
        _add(self.call, self.target, (k, v), sums)


def _give_back(call: Call, step: int, source: int, grads: tuple[Tensor, Tensor], key: Tensor, value: Tensor) -> Return:
    wire = call.wire
    target = (wire.rank + step) % wire.ranks
    out = torch.cat([grad.reshape(-1) for grad in grads]).to(key.dtype)
    room = key.new_empty(sum(prod(shape) for shape in _shapes(call, call.plan.count(target, wire.rank))))
    return Return(call, wire.post((source, out), (target, room), tag=2 * step + 1), target, room)


def _add(call: Call, target: int, grads: tuple[Tensor, Tensor], sums: Sequence[Tensor]) -> None:
    """Add the gradients of those of this rank's keys that another (or this one) has used."""
    first, spans = 0, call.plan.keys.spans[call.wire.rank]
    for a, b in call.plan.pieces[target][call.wire.rank]:
        for total, grad in zip(sums[1:3], grads, strict=True):
            total[:, :, _within(spans, (a, b))] += grad[:, :, first : first + b - a]
        first += b - a


def _sink(call: Call, output: Tensor) -> Tensor:
    """The log-sum-exp before any key is seen, (B, H, Q_r): the sink's logit, or -inf."""
    sink = float("-inf") if call.attend.sink is None else call.attend.sink
    logit = torch.as_tensor(sink, dtype=output.dtype, device=output.device).detach().reshape(-1, 1)
    return logit.expand(output.shape[:3]).clone()


def _sink_gradient(
    call: Call, tensors: Sequence[Tensor], sums: Sequence[Tensor], output: Tensor, lse: Tensor, grad_output: Tensor,
    grad_lse: Tensor,
) -> None:  # fmt: skip
    sink = call.attend.sink
    if not isinstance(sink, Tensor):
        return
    nothing = output.new_zeros(())
    _, by = _pairing(nothing, _sink(call, output), output, lse, grad_output, grad_lse)
    total = sums[3 + [id(tensor) for tensor in call.tensors].index(id(sink))]
    by_head = by.sum((0, 2))
    total += (by_head if sink.numel() > 1 else by_head.sum()).reshape(total.shape)


def _shapes(call: Call, count: int) -> list[tuple[int, ...]]:
    """The shapes of so many keys and values."""
    sizes = call.sizes
    return [(sizes.B, sizes.G, count, sizes.D), (sizes.B, sizes.G, count, sizes.E)]


def _part(call: Call, block: Block) -> Part:
    return Part(slice(0, call.frame.H), slice(*block.rows), slice(*block.columns))


def _columns(call: Call, source: int, block: Block) -> slice:
    """Where a block's keys are among those that came from a rank."""
    return _within(call.plan.pieces[call.wire.rank][source], block.columns)


def _within(spans: Sequence[Span], span: Span) -> slice:
    """Where a span of the sequence lies in a tensor that has some spans end to end."""
    first = 0
    for a, b in spans:
        if a <= span[0] and span[1] <= b:
            return slice(first + span[0] - a, first + span[1] - a)
        first += b - a
    raise AssertionError(f"{span} is in none of {spans}")


def _take(x: Tensor, spans: Sequence[Span], pieces: Sequence[Span]) -> Tensor:
    """Some pieces (B, G, n, ...) of what a rank holds."""
    found = [x[:, :, _within(spans, piece)] for piece in pieces]
    return found[0] if len(found) == 1 else torch.cat(found, 2) if found else x[:, :, :0]


def _real(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Within, torch's generator begins from a seed; behind, it is where it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed % 2**63)
        yield
