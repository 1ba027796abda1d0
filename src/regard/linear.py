"""Linear attention: a feature map instead of the softmax, in O(n) time and memory.

    output_i = sum_j f(q_i)·f(k_j) v_j / sum_j f(q_i)·f(k_j)

The sums over j are computed first, into a state of M x E numbers (M features), which the queries then read. Features
are represented by logarithms, and every sum is relative to its largest term. So nothing overflows, a row that sees a
key never divides by zero, and a key does not affect the precision of queries that may not see it.

On a CPU, causal calls use a fused kernel if it is as accurate on the features themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.arguments import check_layout
from regard.engines import derivatives, native
from regard.engines.problem import batch_size, broadcast_batch
from regard.engines.tensor_memory import is_direct
from regard.geometry import Frame, format_shape, pad_leading
from regard.masks.algebra import And, Mask
from regard.masks.patterns import Causal, Padding

_CHUNK = 64  # tokens within a chunk interact by products, chunks by states; a power of two
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class LinearState(NamedTuple):
    """State of `LinearAttention.step` for all keys and values so far: O(M·E), independent of their number.

    scale `(B, G, M, 1)`: the largest logarithm of each feature.
    sums `(B, G, M, E + 1)`: the sum over keys of feature times (value, 1), in units of exp(scale).

    >>> import regard as rg
    >>> out, state = rg.LinearAttention().step(*torch.randn(3, 1, 2, 1, 4))
    >>> state.scale.shape, state.sums.shape
    (torch.Size([1, 2, 4, 1]), torch.Size([1, 2, 4, 5]))
    """

    scale: Tensor
    sums: Tensor


@dataclass(frozen=True, repr=False)
class Favor:
    """The features returned by `favor`."""

    count: int
    seed: int

    def __post_init__(self) -> None:
        for name, least, most in (("count", 1, 2**31 - 1), ("seed", 0, 2**32 - 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be a whole number, but is {value!r}; try favor(256, seed=0)")
            if not least <= value <= most:
                raise ValueError(f"{name} must be from {least} to {most}, but is {value}; try favor(256, seed=0)")

    def __repr__(self) -> str:
        return f"favor({self.count}, seed={self.seed})"

    def logs(self, x: Tensor) -> Tensor:
        """Return the logarithms of the features: (..., D) -> (..., count)."""
        x = x * x.shape[-1] ** -0.25
        return x @ _directions(self.count, x.shape[-1], self.seed).to(x).T - x.square().sum(-1, keepdim=True) / 2


def favor(count: int, seed: int = 0) -> Favor:
    """Performer's FAVOR+: `count` positive orthogonal random features of the softmax kernel exp(q·k / sqrt(D)).

        f(x)_r = exp(w_r·x' - |x'|^2 / 2)        x' = x / D^(1/4), w_r ~ N(0, I), orthogonal in blocks of D

    The directions w depend on `seed` only and do not use torch's generator. The error decreases like 1/sqrt(count)
    for small logits and grows steeply with them; beyond a spread of about 1, more features hardly help. Measured as
    |output - softmax| / |softmax| for 512 normal queries, keys and values, D = 64, median of 21 seeds:

    | standard deviation of q and k (of the logits) | count 64 | 256 | 1024 | 4096 |
    | --- | --- | --- | --- | --- |
    | 0.25 (0.06) | 0.12 | 0.059 | 0.030 | 0.015 |
    | 0.5 (0.25) | 0.73 | 0.44 | 0.27 | 0.14 |
    | 1 (1) | 3.5 | 3.2 | 3.1 | 2.8 |

    >>> import regard as rg
    >>> rg.LinearAttention(rg.favor(256, seed=0), mask=rg.causal())
    LinearAttention(features=favor(256, seed=0), mask=causal())
    """
    return Favor(count, seed)


@dataclass(frozen=True)
class LinearAttention:
    """Attention in O(n) time and memory: a feature map instead of the softmax.

        output_i = sum_j f(q_i)·f(k_j) v_j / sum_j f(q_i)·f(k_j)        over the keys j that query i may see

    features: `"elu"`, f(x) = elu(x) + 1 of the Linear Transformer, or `favor(count, seed)`, which approximates softmax.
    mask: None, `causal()`, `padding(lengths)` or both with `&`. The last query is at the last key.

    Maps q `(B, H, Q, D)`, k `(B, G, K, D)`, v `(B, G, K, E)` to `(B, H, Q, E)`; tensors of two and three axes work too.
    Sums are at least float32. A query without visible keys gets 0.

    >>> import regard as rg
    >>> attend = rg.LinearAttention("elu", mask=rg.causal())
    >>> attend(torch.randn(2, 8, 100, 64), torch.randn(2, 2, 100, 64), torch.randn(2, 2, 100, 32)).shape
    torch.Size([2, 8, 100, 32])
    """

    features: str | Favor = "elu"
    mask: Mask | None = None

    def __post_init__(self) -> None:
        if self.features != "elu" and not isinstance(self.features, Favor):
            kind = ValueError if isinstance(self.features, str) else TypeError
            raise kind(f"features must be 'elu' or favor(count, seed), but is {self.features!r}")
        if self.mask is not None and not isinstance(self.mask, Mask):
            raise TypeError(
                f"mask must be a mask or None, but is {type(self.mask).__name__}; use causal(), padding(lengths) "
                "or both with &"
            )
        unfit = [part for part in self._masks if not isinstance(part, Causal | Padding)]
        if unfit:
            raise ValueError(
                f"mask must be composed of causal() and padding(lengths) for linear attention, but has {unfit[0]!r}; "
                "regard.attention supports every mask"
            )

    @property
    def _masks(self) -> tuple[Mask, ...]:
        if self.mask is None:
            return ()
        mask = self.mask.snapshot()
        return mask.parts if isinstance(mask, And) else (mask,)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        _check(q, k, v)
        q, k, v = broadcast_batch(q, k, v)
        Q, K = q.shape[-2], k.shape[-2]
        causal = any(isinstance(part, Causal) for part in self._masks)
        with torch.autocast(q.device.type, enabled=False):
            if causal and (fused := self._fused(q, k, v)) is not None:
                return fused
            queries, keys, values = self._logs(q, k, v)
            if not causal:
                read = _read_all(queries, _gather(keys, values))
            else:
                start, blind = max(K - Q, 0), max(Q - K, 0)  # keys before the first query, queries before the first key
                past = _gather(keys[:, :, :start], values[:, :, :start]) if start else None
                read = _causal(queries[:, :, blind:], keys[:, :, start:], values[:, :, start:], past)
                read = F.pad(read, (0, 0, 0, 0, blind, 0))
            return _output(read, q)

    def step(self, q: Tensor, k: Tensor, v: Tensor, state: LinearState | None = None) -> tuple[Tensor, LinearState]:
        """Continue a causal call: return the output for the next tokens, and the new state.

        Shapes are those of a call with Q = K = 1, or more for a whole prompt. Starting from `None`, the outputs are
        those of the causal call on all tokens.

        >>> import regard as rg
        >>> attend, (q, k, v) = rg.LinearAttention(mask=rg.causal()), torch.randn(3, 1, 2, 5, 4)
        >>> out, state = attend.step(q[:, :, :4], k[:, :, :4], v[:, :, :4])
        >>> out, state = attend.step(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], state)
        >>> torch.allclose(out, attend(q, k, v)[:, :, 4:], atol=1e-6)
        True
        """
        if any(isinstance(part, Padding) for part in self._masks):
            raise ValueError(f"mask must be None or causal() for step, but is {self.mask!r}; pass the real tokens only")
        _check(q, k, v)
        q, k, v = broadcast_batch(q, k, v)
        if q.shape[-2] != k.shape[-2]:
            raise ValueError(
                f"q and k must have the same number of tokens in step, but are {format_shape(q)} and "
                f"{format_shape(k)}; "
                "earlier keys are in the state"
            )
        with torch.autocast(q.device.type, enabled=False):
            queries, keys, values = self._logs(q, k, v)
            new = _gather(keys, values)
            _check_state(state, new)
            joined = new if state is None else _join(state, new)
            if q.shape[-2] == 1:  # the token sees the whole state, so that one read is enough
                return _output(_read_all(queries, joined), q), joined
            return _output(_causal(queries, keys, values, state), q), joined

    def _fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """Compute the causal call by the fused kernel, or return None if the kernel does not apply.

        The kernel sums features, not logarithms. A query may be scaled by its largest feature, because the factor
        cancels; keys share one scale, and those far below it would be lost. So it is used only for features well
        within the range of float32, with full precision in every sum that they dominate.
        """
        Q, K, tracing = q.shape[-2], k.shape[-2], torch.compiler.is_compiling()
        if tracing or q.device.type != "cpu" or not 0 < K <= Q or not q.numel() * v.numel() or native.why_missing():
            return None
        if (
            derivatives.active_transforms()
            or derivatives.tangents_of((q, k, v)) is not None
            or not is_direct((q, k, v))
        ):
            return None  # torch's operators support all modes, and subclasses and modes see them
        queries, keys, values = pad_leading(q)[:, :, Q - K :], pad_leading(k), pad_leading(v)
        real = self._real(pad_leading(q), keys)
        if real is not None:
            keys, values = torch.where(real, keys, 0), torch.where(real, values, 0)
        elu = not isinstance(self.features, Favor)
        if isinstance(self.features, Favor):
            dtype = torch.promote_types(q.dtype, torch.float32)
            queries, keys, values = (
                self.features.logs(queries.to(dtype)),
                self.features.logs(keys.to(dtype)),
                values.to(dtype),
            )
            fits = _in_range(keys, -40, 30)
            if fits:
                queries, keys = (queries - queries.detach().amax(-1, keepdim=True)).exp(), keys.exp()
        else:
            fits = _in_range(queries, -20, 1e4) and _in_range(keys, -20, 1e4)
        if not fits:
            return None
        if real is not None:  # elu maps the lowest number to the feature 0
            keys = torch.where(real, keys, torch.finfo(keys.dtype).min if elu else 0)
        output, _ = derivatives.apply(_NativeOperator(elu), queries, keys, values)
        output = F.pad(output, (0, 0, Q - K, 0)) if K < Q else output
        return output.reshape(*q.shape[:-1], v.shape[-1]).to(q.dtype)

    def _logs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log features of queries (B, G, Q, H / G, M), keys (B, G, K, M), and (value, 1), (B, G, K, E + 1)."""
        logs: Callable[[Tensor], Tensor] = self.features.logs if isinstance(self.features, Favor) else _elu_logs
        dtype = torch.promote_types(q.dtype, torch.float32)
        q, k, v = pad_leading(q).to(dtype), pad_leading(k).to(dtype), pad_leading(v).to(dtype)
        real = self._real(q, k)
        if real is not None:  # before further computation, so that a NaN reaches no gradient
            k, v = torch.where(real, k, 0), torch.where(real, v, 0)
        keys, values = logs(k), F.pad(v, (0, 1), value=1.0)
        if real is not None:
            keys, values = torch.where(real, keys, _lowest(keys)), torch.where(real, values, 0)
        return logs(q).unflatten(1, (k.shape[1], -1)).transpose(2, 3), keys, values

    def _real(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Return which keys are not padding, (B or 1, 1, K, 1)."""
        real = None
        frame = Frame(q.shape[0], q.shape[1], q.shape[2], k.shape[2], k.shape[2] - q.shape[2])
        for part in self._masks:
            part.check(frame)
            if isinstance(part, Padding):
                lengths = torch.as_tensor(part.lengths, device=k.device).reshape(-1, 1, 1, 1)
                below = torch.arange(k.shape[2], device=k.device)[:, None] < lengths
                real = below if real is None else real & below
        return real


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

    def differentiable(self, tensors: derivatives.Tensors, save: bool) -> tuple[Tensor, ...]:
        return (_attend_by_logs(self.elu, *tensors),)


def _attend_by_logs(elu: bool, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute the kernel's result in a form that can be differentiated twice."""
    dtype = torch.promote_types(queries.dtype, torch.float32)
    logs = _elu_logs if elu else _feature_logs
    rows, keys = logs(queries.to(dtype)), logs(keys.to(dtype))
    rows = rows.unflatten(1, (keys.shape[1], -1)).transpose(2, 3)
    return _output(_causal(rows, keys, F.pad(values.to(dtype), (0, 1), value=1.0), None), queries)


def _feature_logs(x: Tensor) -> Tensor:
    return torch.where(x > 0, torch.where(x > 0, x, 1).log(), _lowest(x))


def _gather(keys: Tensor, values: Tensor) -> LinearState:
    """Return the state of keys (..., K, M) and values (..., K, E + 1)."""
    if keys.shape[-2] == 0:
        return _empty_state(keys, values)
    scale = keys.detach().amax(-2, keepdim=True)
    return LinearState(scale.mT, (keys - scale).exp().mT @ values)


def _empty_state(keys: Tensor, values: Tensor) -> LinearState:
    """Return the state of no keys."""
    shape = (*keys.shape[:-2], keys.shape[-1])
    return LinearState(keys.new_full((*shape, 1), _lowest(keys)), keys.new_zeros((*shape, values.shape[-1])))


def _join(a: LinearState, b: LinearState) -> LinearState:
    scale = torch.maximum(a.scale, b.scale)
    return LinearState(scale, a.sums * (a.scale - scale).exp() + b.sums * (b.scale - scale).exp())


def _read(state: LinearState, queries: Tensor) -> LinearState:
    """Read a state with queries (..., N, M): sums over its keys (..., N, E + 1), scale (..., N, 1)."""
    queries = queries + state.scale.mT
    scale = queries.detach().amax(-1, keepdim=True)
    return LinearState(scale, (queries - scale).exp() @ state.sums)


def _attend_block(queries: Tensor, keys: Tensor, values: Tensor) -> LinearState:
    """Compute `_read(_gather(keys, values), queries)` by products of queries and keys: less work for few keys."""
    top = keys.detach().amax(-2, keepdim=True)
    queries = queries + top
    scale = queries.detach().amax(-1, keepdim=True)
    return LinearState(scale, (queries - scale).exp() @ (keys - top).exp().mT @ values)


def _read_all(queries: Tensor, state: LinearState) -> Tensor:
    """Read one state with queries (B, G, N, R, M): sums (B, G, N, R, E + 1)."""
    return _read(state, queries.flatten(2, 3)).sums.unflatten(2, queries.shape[2:4])


def _causal(queries: Tensor, keys: Tensor, values: Tensor, past: LinearState | None) -> Tensor:
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
        met = LinearState(*(x.unflatten(3, (block, rows)) for x in _attend_block(q.flatten(3, 4), k, v)))
        left, right = (LinearState(*half) for half in zip(*(_halves(x, block) for x in state), strict=True))
        right = _join(right, met)
        state = LinearState(*(torch.stack(pair, 3).flatten(2, 4) for pair in zip(left, right, strict=True)))
        block *= 2

    if past is not None or length > size:
        q, k, v = (x.unflatten(2, (-1, size)) for x in (queries, keys, values))
        past = _empty_state(keys, values) if past is None else past
        far = _read(_prefix_states(_gather(k, v), past), q.flatten(3, 4))
        state = _join(state, _map_state(lambda x: x.unflatten(3, (size, rows)).flatten(2, 3), far))
    return state.sums[:, :, :length]


def _prefix_states(states: LinearState, past: LinearState) -> LinearState:
    """Return, for every state along axis 2, the past joined with all earlier states, in O(log n) steps."""
    count = states.scale.shape[2]
    if count <= 1:
        return _map_state(lambda x: x.unsqueeze(2)[:, :, :count], past)
    if count % 2:  # padding at the end affects no other state
        states = _map_state(lambda x: F.pad(x, (0, 0, 0, 0, 0, 1)), states)
    left, right = _map_state(lambda x: x[:, :, 0::2], states), _map_state(lambda x: x[:, :, 1::2], states)
    pairs = _prefix_states(_join(left, right), past)
    both = zip(pairs, _join(pairs, left), strict=True)
    return LinearState(*(torch.stack(pair, 3).flatten(2, 3)[:, :, :count] for pair in both))


def _output(sums: Tensor, q: Tensor) -> Tensor:
    """Convert sums (B, G, Q, H / G, E + 1) to the output, in the shape and dtype of q."""
    value, weight = sums[..., :-1], sums[..., -1:]
    output = (value / torch.where(weight == 0, 1, weight)).transpose(2, 3).flatten(1, 2)
    return output.reshape(*q.shape[:-1], value.shape[-1]).to(q.dtype)


def _map_state(function: Callable[[Tensor], Tensor], state: LinearState) -> LinearState:
    return LinearState(function(state.scale), function(state.sums))


def _halves(x: Tensor, block: int) -> tuple[Tensor, ...]:
    """Split (B, G, N, ...) into pairs of adjacent blocks: twice (B, G, N / 2 / block, block, ...)."""
    return x.unflatten(2, (-1, 2, block)).unbind(3)


def _lowest(x: Tensor) -> float:
    """Return the lowest finite number, which replaces -inf where a difference of two must be 0."""
    return torch.finfo(x.dtype).min / 4


def _elu_logs(x: Tensor) -> Tensor:
    """log(elu(x) + 1)"""
    return torch.where(x > 0, F.relu(x).log1p(), x)


def _directions(count: int, d_head: int, seed: int) -> Tensor:
    with derivatives.outside_transforms():
        return _draw_directions(count, d_head, seed)


# Like torch.compiler.assume_constant_result, without importing the whole compiler.
_directions._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=64)
def _draw_directions(count: int, d_head: int, seed: int) -> Tensor:
    """Return directions (count, d_head): orthogonal in blocks of `d_head`, each with the norm of a normal vector."""
    random = np.random.RandomState(seed)  # numpy guarantees that this stream never changes
    blocks = []
    for _ in range(-(-count // d_head)):
        rotation, upper = np.linalg.qr(random.standard_normal((d_head, d_head)))
        blocks.append((rotation * np.sign(np.diag(upper))).T)  # signs make it uniform and reproducible
    lengths = np.linalg.norm(random.standard_normal((count, d_head)), axis=1, keepdims=True)
    return torch.from_numpy(np.concatenate(blocks)[:count] * lengths)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, but is {type(x).__name__}; try torch.as_tensor({name})")
        check_layout(name, x)
        if x.dtype not in _DTYPES:
            raise TypeError(
                f"{name} must be float32, float64, bfloat16 or float16, but is {x.dtype}; try {name}.float()"
            )
        if x.dim() not in (2, 3, 4):
            raise ValueError(f"{name} must have 2, 3 or 4 axes (B, H, N, D), but has the shape {format_shape(x)}")
        if x.dim() != q.dim():
            raise ValueError(f"{name} must have as many axes as q, {q.dim()}, but has the shape {format_shape(x)}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have the dtype of q, {q.dtype}, but is {x.dtype}; try {name}.to(q.dtype)")
        if x.device != q.device:
            raise ValueError(
                f"{name} must be on the device of q, {q.device}, but is on {x.device}; try {name}.to(q.device)"
            )
    (_, H, _, D), (_, G, K, _) = pad_leading(q).shape, pad_leading(k).shape
    if D == 0 or k.shape[-1] != D:
        raise ValueError(
            f"k must have the width of q, at least 1, but q is {format_shape(q)} and k is {format_shape(k)}"
        )
    if v.shape[-2] != K:
        raise ValueError(f"v must have one row per key, {K}, but k is {format_shape(k)} and v is {format_shape(v)}")
    if pad_leading(v).shape[1] != G:
        raise ValueError(f"v must have the heads of k, {G}, but k is {format_shape(k)} and v is {format_shape(v)}")
    if G == 0 or H % G:
        raise ValueError(
            f"q must have a multiple of the heads of k, but has H = {H} for G = {G}; "
            "each key head serves H / G query heads"
        )
    if any(pad_leading(x).shape[0] not in (1, batch_size(q, k, v)) for x in (q, k, v)):
        raise ValueError(
            "q, k and v must have the same batch size, or 1 where it is shared, but are "
            f"{format_shape(q)}, {format_shape(k)} and {format_shape(v)}"
        )


def _check_state(state: LinearState | None, new: LinearState) -> None:
    if state is None:
        return
    if not isinstance(state, LinearState):
        raise TypeError(f"state must be a state returned by step, or None, but is {type(state).__name__}")
    if state.sums.shape != new.sums.shape or state.scale.shape != new.scale.shape:
        raise ValueError(
            f"state must fit this call: sums of shape {format_shape(new.sums)}, but they are "
            f"{format_shape(state.sums)}; "
            "a state can only be used with the batch, heads, widths and features that created it"
        )
    if state.sums.dtype != new.sums.dtype:
        raise TypeError(f"state must be {new.sums.dtype} for this call, but is {state.sums.dtype}; start from None")
