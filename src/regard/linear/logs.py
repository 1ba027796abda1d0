"""Linear attention by logarithms of features, every sum relative to its largest term.

Nothing overflows, a row that sees a key never divides by zero, and a key does not affect the precision of queries that
may not see it. Causal calls use kernels if they are as accurate on the features themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.engines import derivatives, native
from regard.engines.tensor_memory import is_direct
from regard.linear.features import Favor, apply_features, count_features, elu_logs, feature_logs, lowest
from regard.linear.recurrence import kernels_for, run_recurrence, why_not_kernels

_CHUNK = 64  # tokens within a chunk interact by products, chunks by states; a power of two


class LogState(NamedTuple):
    """Sums (..., M, E + 1) over keys, in units of exp(scale), (..., M, 1)."""

    scale: Tensor
    sums: Tensor


def attend(
    features: str | Favor, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, causal: bool
) -> Tensor:
    """Attend from query (B, H, Q, D) to key (B, G, K, D) and value (B, G, K, E); the last query is at the last key.

    real: which keys are not padding, (B or 1, 1, K, 1).
    """
    Q, K = query.shape[-2], key.shape[-2]
    if causal and (fused := _run_kernel(features, query, key, value, real)) is not None:
        return fused
    queries, keys, values = _logs(features, query, key, value, real)
    if not causal:
        read = _read_all(queries, _gather(keys, values))
    else:
        start, blind = max(K - Q, 0), max(Q - K, 0)  # keys before the first query, queries before the first key
        past = _gather(keys[:, :, :start], values[:, :, :start]) if start else None
        read = _causal(queries[:, :, blind:], keys[:, :, start:], values[:, :, start:], past)
        read = F.pad(read, (0, 0, 0, 0, blind, 0))
    return _output(read, query)


def attend_after(
    features: str | Favor, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, past: LogState | None
) -> tuple[Tensor, LogState]:
    """Continue a causal call after the past; also return the state after the new tokens."""
    queries, keys, values = _logs(features, query, key, value, real)
    new = _gather(keys, values)
    joined = new if past is None else _join(past, new)
    if query.shape[-2] == 1 and real is None:  # the token sees the whole state, so that one read is enough
        return _output(_read_all(queries, joined), query), joined
    return _output(_causal(queries, keys, values, past), query), joined


def _run_kernel(features: str | Favor, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor | None:
    """Compute the causal call by kernels, or return None if they do not apply.

    They sum features, not logarithms. A query may be scaled by its largest feature, because the factor
    cancels; keys share one scale, and those far below it would be lost. So it is used only for features well
    within the range of float32, with full precision in every sum that they dominate.
    """
    Q, K = q.shape[-2], k.shape[-2]
    if not 0 < K <= Q or why_not_kernels(q, k, v, features=count_features(features, q.shape[-1])):
        return None
    queries, keys, values = q[:, :, Q - K :], k, v
    if real is not None:
        keys, values = torch.where(real, keys, 0), torch.where(real, values, 0)
    elu = not isinstance(features, Favor)
    if isinstance(features, Favor):
        dtype = torch.promote_types(q.dtype, torch.float32)
        queries, keys, values = (
            features.logs(queries.to(dtype)),
            features.logs(keys.to(dtype)),
            values.to(dtype),
        )
        fits = _in_range(keys, -40, 30)
        if fits:
            queries, keys = (queries - queries.detach().amax(-1, keepdim=True)).exp(), keys.exp()
    else:
        fits = _in_range(queries, -20, 1e4) and _in_range(keys, -20, 1e4)
    if not fits:
        return None
    on_cpu = kernels_for(q.device) is native
    if elu and not on_cpu:  # the other kernels take features only
        dtype = torch.promote_types(q.dtype, torch.float32)
        queries, keys = apply_features(features, queries.to(dtype), keys.to(dtype), True)
        values, elu = values.to(dtype), False
    if real is not None:  # elu maps the lowest number to the feature 0
        keys = torch.where(real, keys, torch.finfo(keys.dtype).min if elu else 0)
    if on_cpu:
        output, _ = derivatives.apply(_NativeOperator(elu), queries, keys, values)
    else:
        sums, _ = run_recurrence(queries, keys, F.pad(values, (0, 1), value=1.0), None, None, None)
        output = _divide(sums)
    output = F.pad(output, (0, 0, Q - K, 0)) if K < Q else output
    return output.to(q.dtype)


def _logs(features: str | Favor, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return log features of queries (B, G, Q, H / G, M), keys (B, G, K, M), and (value, 1), (B, G, K, E + 1)."""
    logs: Callable[[Tensor], Tensor] = features.logs if isinstance(features, Favor) else elu_logs
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if real is not None:  # before further computation, so that a NaN reaches no gradient
        k, v = torch.where(real, k, 0), torch.where(real, v, 0)
    keys, values = logs(k), F.pad(v, (0, 1), value=1.0)
    if real is not None:
        keys, values = torch.where(real, keys, lowest(keys)), torch.where(real, values, 0)
    return logs(q).unflatten(1, (k.shape[1], -1)).transpose(2, 3), keys, values


def _in_range(x: Tensor, low: float, high: float) -> bool:
    """Whether all finite values are between the two."""
    least, greatest = x.detach().aminmax()
    if not bool((greatest - least).isfinite()):
        least, greatest = torch.where(x.isfinite(), x, 0).detach().aminmax()
    return bool((low < least) & (greatest < high))


@dataclass(frozen=True)
class _NativeOperator(derivatives.Operator):
    """The fused kernel on queries (B, H, N, M), keys (B, G, N, M) and values (B, G, N, E)."""

    elu: bool
    outputs = 1  # the second result is the norm

    def compute(self, tensors: derivatives.Tensors) -> tuple[Tensor, ...]:
        queries, keys, values = tensors
        return native.linear_forward(queries, keys, values, self.elu)

    def gradients(
        self,
        tensors: derivatives.Tensors,
        results: derivatives.Tensors,
        grads: derivatives.Tensors,
        wanted: Sequence[bool],
    ) -> derivatives.Tensors:
        (queries, keys, values), (output, norm), (grad,) = tensors, results, grads
        if grad is None:
            return None, None, None
        if not is_direct((*tensors, *results, grad)):
            with torch.enable_grad():
                leaves = [tensor.detach().requires_grad_() for tensor in tensors]
                return torch.autograd.grad(_attend_by_logs(self.elu, *leaves), leaves, grad)
        return native.linear_backward(queries, keys, values, self.elu, output, norm, grad)

    def tangents(self, tensors: derivatives.Tensors, tangents: derivatives.Tensors) -> tuple[Tensor, ...]:
        moved = derivatives.push_forward(lambda given: self.differentiable(given, True), tensors, tangents)
        return *self.compute(tensors), *moved[self.outputs :]

    def differentiable(self, tensors: derivatives.Tensors, save: bool) -> tuple[Tensor, ...]:
        return (_attend_by_logs(self.elu, *tensors),)


def _attend_by_logs(elu: bool, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute the kernel's result in a form that can be differentiated twice."""
    dtype = torch.promote_types(queries.dtype, torch.float32)
    logs = elu_logs if elu else feature_logs
    rows, keys = logs(queries.to(dtype)), logs(keys.to(dtype))
    rows = rows.unflatten(1, (keys.shape[1], -1)).transpose(2, 3)
    return _output(_causal(rows, keys, F.pad(values.to(dtype), (0, 1), value=1.0), None), queries)


def _gather(keys: Tensor, values: Tensor) -> LogState:
    """Return the state of keys (..., K, M) and values (..., K, E + 1)."""
    if keys.shape[-2] == 0:
        return _empty_state(keys, values)
    scale = keys.detach().amax(-2, keepdim=True)
    return LogState(scale.mT, (keys - scale).exp().mT @ values)


def _empty_state(keys: Tensor, values: Tensor) -> LogState:
    """Return the state of no keys."""
    shape = (*keys.shape[:-2], keys.shape[-1])
    return LogState(keys.new_full((*shape, 1), lowest(keys)), keys.new_zeros((*shape, values.shape[-1])))


def _join(a: LogState, b: LogState) -> LogState:
    scale = torch.maximum(a.scale, b.scale)
    return LogState(scale, a.sums * (a.scale - scale).exp() + b.sums * (b.scale - scale).exp())


def _read_state(state: LogState, queries: Tensor) -> LogState:
    """Read a state with queries (..., N, M): sums over its keys (..., N, E + 1), scale (..., N, 1)."""
    queries = queries + state.scale.mT
    scale = queries.detach().amax(-1, keepdim=True)
    return LogState(scale, (queries - scale).exp() @ state.sums)


def _attend_block(queries: Tensor, keys: Tensor, values: Tensor) -> LogState:
    """Compute `_read(_gather(keys, values), queries)` by products of queries and keys: less work for few keys."""
    top = keys.detach().amax(-2, keepdim=True)
    queries = queries + top
    scale = queries.detach().amax(-1, keepdim=True)
    return LogState(scale, (queries - scale).exp() @ (keys - top).exp().mT @ values)


def _read_all(queries: Tensor, state: LogState) -> Tensor:
    """Read one state with queries (B, G, N, R, M): sums (B, G, N, R, E + 1)."""
    return _read_state(state, queries.flatten(2, 3)).sums.unflatten(2, queries.shape[2:4])


def _causal(queries: Tensor, keys: Tensor, values: Tensor, past: LogState | None) -> Tensor:
    """Attend with queries (B, G, N, R, M) to the past and the keys up to their own: sums (B, G, N, R, E + 1).

    Every key meets every later query of its chunk once: in blocks of 1, 2, 4 ... tokens, the right block of each pair
    attends to all of the left one. Earlier chunks are read from their joined state.
    """
    length, rows = queries.shape[2:4]
    size = 1
    while size < min(length, _CHUNK):
        size *= 2
    extra = -length % size
    queries = F.pad(queries, (0, 0, 0, 0, 0, extra))
    keys, values = F.pad(keys, (0, 0, 0, extra)), F.pad(values, (0, 0, 0, extra))

    state = _attend_block(queries, keys[:, :, :, None], values[:, :, :, None])  # each query's own key
    block = 1
    while block < size:
        (_, q), (k, _), (v, _) = (_halves(x, block) for x in (queries, keys, values))
        visited = LogState(*(x.unflatten(3, (block, rows)) for x in _attend_block(q.flatten(3, 4), k, v)))
        left, right = (LogState(*half) for half in zip(*(_halves(x, block) for x in state), strict=True))
        right = _join(right, visited)
        state = LogState(*(torch.stack(pair, 3).flatten(2, 4) for pair in zip(left, right, strict=True)))
        block *= 2

    if past is not None or length > size:
        q, k, v = (x.unflatten(2, (-1, size)) for x in (queries, keys, values))
        past = _empty_state(keys, values) if past is None else past
        far = _read_state(_prefix_states(_gather(k, v), past), q.flatten(3, 4))
        state = _join(state, _map_state(lambda x: x.unflatten(3, (size, rows)).flatten(2, 3), far))
    return state.sums[:, :, :length]


def _prefix_states(states: LogState, past: LogState) -> LogState:
    """Return, for every state along axis 2, the past joined with all earlier states, in O(log n) steps."""
    count = states.scale.shape[2]
    if count <= 1:
        return _map_state(lambda x: x.unsqueeze(2)[:, :, :count], past)
    if count % 2:  # padding at the end affects no other state
        states = _map_state(lambda x: F.pad(x, (0, 0, 0, 0, 0, 1)), states)
    left, right = _map_state(lambda x: x[:, :, 0::2], states), _map_state(lambda x: x[:, :, 1::2], states)
    pairs = _prefix_states(_join(left, right), past)
    both = zip(pairs, _join(pairs, left), strict=True)
    return LogState(*(torch.stack(pair, 3).flatten(2, 3)[:, :, :count] for pair in both))


def _output(sums: Tensor, q: Tensor) -> Tensor:
    """Convert sums (B, G, Q, H / G, E + 1) to the output, in the dtype of q."""
    return _divide(sums).transpose(2, 3).flatten(1, 2).to(q.dtype)


def _divide(sums: Tensor) -> Tensor:
    """Divide sums (..., E + 1) by the sum of weights in their last column."""
    value, weight = sums[..., :-1], sums[..., -1:]
    return value / torch.where(weight == 0, 1, weight)


def _map_state(function: Callable[[Tensor], Tensor], state: LogState) -> LogState:
    return LogState(function(state.scale), function(state.sums))


def _halves(x: Tensor, block: int) -> tuple[Tensor, ...]:
    """Split (B, G, N, ...) into pairs of adjacent blocks: twice (B, G, N / 2 / block, block, ...)."""
    return x.unflatten(2, (-1, 2, block)).unbind(3)
