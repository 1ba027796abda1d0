"""The `Attention` description and the methods that run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from regard import arguments
from regard.arguments import Index
from regard.description import Description, snapshot
from regard.engines import native
from regard.engines.autocast import autocast, autocast_enabled, no_autocast
from regard.engines.derivatives import transform_state
from regard.engines.dropout import draw_seed
from regard.engines.inspection import Statistics
from regard.engines.plans import Plan, Plans
from regard.engines.problem import Problem, batch_size, broadcast_batch, check_description_tensor, check_tensors
from regard.engines.select import Explanation, explain, select, select_inspection
from regard.engines.tensor_memory import is_direct, is_sharded
from regard.geometry import CallSlice, Frame, broadcasts, format_shape, pad_leading
from regard.masks import Mask, dense
from regard.normalizations import DEFAULT_NORMALIZATION, Normalization, Softmax, check_normalization
from regard.positions.biases import Bias, dense_bias, is_built_in
from regard.quantized import QuantizedTensor, dequantize, is_one_batch
from regard.scores import BUILT_IN, DEFAULT_SCORE, Score, to_score
from regard.sharding import current_sharding

Keys = Tensor | QuantizedTensor  # what keys and values may be
OBSERVERS: ContextVar[tuple[Callable[[Attention, Tensor, Tensor, Tensor], None], ...]] = ContextVar(
    "observers", default=()
)
"""Observers called on every eager attention call with its description, query, key and value."""
INTERVENTION: ContextVar[Callable[[Attention, Tensor, Tensor, bool], tuple[Attention, Tensor | None]] | None] = (
    ContextVar("intervention", default=None)
)
"""Called on every eager attention call with its description, query, key, and whether the previous call asks again.

Returns the description to compute instead, and factors (H,) of the heads' outputs or None; set by `regard.view.ablate`.
"""


@dataclass(eq=False, repr=False)
class Attention(Description):
    """Description of an attention: score, mask, bias and normalisation, independent of the engine that computes it.

        logits  = (score(q, k) + bias) / temperature, -inf where the mask is False
        weights = softmax of logits over keys (the sink adds a logit without a value)
        output  = dropout(weights) @ v

    Shapes: query (B, H, Q, D), key (B, G, K, D), value (B, G, K, E), output (B, H, Q, E); H is a multiple of G. Leading
    axes may be missing. Query `i` is at key position `offset + i`; by default the last query is at the last key.

    score: `Dot()`, `Cosine()`, `Additive(weight)`, `Bilinear(matrix)`, or a function (see `Modified`).
    mask: which keys each query may attend to, such as `causal() & padding(lengths)`; a bool tensor means
        `dense(tensor)`.
    bias: added to the scores, such as `alibi(heads)`; a tensor means `dense_bias(tensor)`.
    offset: an integer, or one per batch row.
    temperature: a positive number; for a learned temperature use the `scale` of the score.
    sink: a logit, shared or one per head.
    dropout: the fraction of weights to drop, in [0, 1); ignored after `.eval()`.
    normalization: `Softmax()`, `Sigmoid(bias)`, `Entmax(alpha)` or `ReLU(power)`; only softmax has a sink and
        a log-sum-exp.

    An `nn.Module`: its `nn.Parameter`s are parameters of every module that contains it, other tensors are buffers.

    >>> import regard as rg, torch
    >>> attend = rg.Attention(mask=rg.causal(), bias=rg.alibi(heads=2))
    >>> q, k, v = torch.randn(3, 1, 2, 16, 8)
    >>> attend(q, k, v).shape
    torch.Size([1, 2, 16, 8])
    >>> attend
    Attention(mask=causal(), bias=alibi(heads=2))
    """

    score: Score = DEFAULT_SCORE
    mask: Mask | None = None
    bias: Bias | None = None
    offset: int | Tensor | None = None
    temperature: float = 1.0
    sink: float | Tensor | None = None
    dropout: float = 0.0
    normalization: Normalization = None  # type: ignore[assignment]  # the default is Softmax()

    if TYPE_CHECKING:  # the constructor also accepts what `__post_init__` converts

        def __init__(
            self,
            score: Score | Callable[..., Tensor] = ...,
            mask: Mask | Tensor | None = None,
            bias: Bias | Tensor | None = None,
            offset: int | Sequence[int] | Tensor | None = None,
            temperature: float = 1.0,
            sink: float | Tensor | None = None,
            dropout: float = 0.0,
            normalization: Normalization = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        if (score := to_score(self.score)) is not self.score:
            self._set("score", score)
        if self.mask is not None and not isinstance(self.mask, Mask):
            self._set("mask", dense(self.mask))
        if self.bias is not None and not isinstance(self.bias, Bias):
            self._set("bias", dense_bias(self.bias))
        self._set("offset", arguments.check_offset(self.offset))
        arguments.check_temperature(self.temperature)
        arguments.check_dropout(self.dropout)
        arguments.check_sink(self.sink)
        if self.normalization is None:  # no default value: torch.compile cannot trace one that is no module
            self._set("normalization", DEFAULT_NORMALIZATION)
        check_normalization(self.normalization)
        if self.sink is not None and not isinstance(self.normalization, Softmax):
            raise ValueError(f"a sink takes weight in a softmax only, not in {self.normalization!r}; leave it out")
        object.__setattr__(self, "_plans", Plans())
        custom = type(self.score) not in BUILT_IN or not (self.bias is None or is_built_in(self.bias))
        object.__setattr__(self, "_custom", custom)
        object.__setattr__(self, "_holds_tensors", bool(self.tensors()))

    def narrow(self, frame: Frame, part: CallSlice) -> Attention:
        """Return the description of a slice of a call (heads, queries and keys) as a call in its own right."""
        sink = self.sink
        if isinstance(sink, Tensor) and sink.numel() > 1:
            sink = sink.reshape(-1)[part.heads]
        return self.replace(
            score=self.score.narrow(part),
            mask=None if self.mask is None else self.mask.narrow(frame, part),
            bias=None if self.bias is None else self.bias.narrow(part),
            offset=frame.offset + part.rows.start - part.columns.start,
            sink=sink,
            normalization=self.normalization.narrow(part),
        )

    def snapshot(self) -> Attention:
        """Return the description with copies of the tensors of its mask and offset; itself if it has none."""
        mask = None if self.mask is None else self.mask.snapshot()
        if mask is self.mask and not isinstance(self.offset, Tensor):
            return self
        return self.replace(mask=mask, offset=arguments.read_offset(self.offset))

    if TYPE_CHECKING:

        @overload
        def __call__(
            self,
            query: Tensor,
            key: Keys,
            value: Keys,
            *,
            engine: str | None = None,
            return_lse: Literal[False] = False,
            return_max: Literal[False] = False,
        ) -> Tensor: ...
        @overload
        def __call__(
            self, query: Tensor, key: Keys, value: Keys, *, engine: str | None = None, return_lse: Literal[True]
        ) -> tuple[Tensor, Tensor]: ...
        @overload
        def __call__(
            self, query: Tensor, key: Keys, value: Keys, *, engine: str | None = None, return_max: Literal[True]
        ) -> tuple[Tensor, Tensor]: ...
        @overload
        def __call__(
            self,
            query: Tensor,
            key: Keys,
            value: Keys,
            *,
            engine: str | None = None,
            return_lse: bool,
            return_max: bool = False,
        ) -> Any: ...
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def forward(
        self,
        query: Tensor,
        key: Keys,
        value: Keys,
        *,
        engine: str | None = None,
        return_lse: bool = False,
        return_max: bool = False,
        **unknown: Any,
    ) -> Any:
        """Return the output (B, H, Q, E), and with `return_lse=True` also the log-sum-exp (B, H, Q).

        With `return_max=True` the last result is the largest visible logit of each query, (B, H, Q), after scale, bias
        and temperature and without the sink: -inf for a query that sees no key. It has no gradient.

        `engine` forces an engine by name; by default the fastest engine that supports the call is used. Keys and values
        may be those of a cache in fewer bytes, `QuantizedTensor`.
        """
        if unknown:
            arguments.reject_keywords("Attention.forward", unknown)
        if not torch.compiler.is_compiling() and engine is None and not return_max and not _is_watched():
            result = self.__dict__["_plans"].repeat_last(query, key, value, self.mask, return_lse)
            if result is not None:
                return result if return_lse else result[0]
        if isinstance(key, QuantizedTensor) or isinstance(value, QuantizedTensor):
            return self._forward_quantized(query, key, value, engine, return_lse, return_max)
        if torch._C._is_any_autocast_enabled() and autocast_enabled(query):
            query, key, value = autocast(query, key, value)
            with no_autocast(query.device):
                return self.forward(query, key, value, engine=engine, return_lse=return_lse, return_max=return_max)
        if (sharding := current_sharding()) is not None:
            if not torch.compiler.is_compiling() and INTERVENTION.get() is not None:
                raise NotImplementedError(
                    "an ablation needs whole sequences: run it outside of regard.distributed.sequence"
                )
            if return_max:
                raise NotImplementedError(
                    "return_max needs whole sequences: call outside of regard.distributed.sequence"
                )
            check_tensors(query, key, value)
            query, key, value = broadcast_batch(query, key, value)
            attend = self if self.training else self.replace(dropout=0.0)
            return sharding.attend(attend, query, key, value, engine=engine, return_lse=return_lse)
        return self.forward_local(query, key, value, engine=engine, return_lse=return_lse, return_max=return_max)

    def _forward_quantized(
        self, query: Tensor, key: Any, value: Any, engine: str | None, return_lse: bool, return_max: bool
    ) -> Any:
        """Attend to quantized keys and values: the native engine reads them in place, others get them dequantized."""
        watched = torch.compiler.is_compiling() or return_max or OBSERVERS.get() or INTERVENTION.get() is not None
        watched = watched or torch._C._is_any_autocast_enabled() or current_sharding() is not None
        if not watched and type(key) is type(value) and is_one_batch(query, key, value):
            like = query.new_empty(())
            problem, chosen = self._plan(query, like.expand(key.shape), like.expand(value.shape), engine, return_lse)
            result = native.run_quantized(problem, query, (key, value)) if chosen is native.ENGINE else None
            if result is not None:
                return result if return_lse else result[0]
        key, value = dequantize(key, query.dtype), dequantize(value, query.dtype)
        return self.forward(query, key, value, engine=engine, return_lse=return_lse, return_max=return_max)

    def forward_local(
        self, query: Tensor, key: Tensor, value: Tensor, *, engine: str | None = None, return_lse: bool = False,
        return_max: bool = False,
    ) -> Any:  # fmt: skip
        """Attend to these tensors only, even inside a sequence shared with other processes."""
        if value is None:
            raise TypeError("value must be a torch.Tensor, got None; to get weights only, call weights(query, key)")
        if not torch.compiler.is_compiling() and INTERVENTION.get() is not None:
            attend, factors = self.intervene(query, key)
            token = INTERVENTION.set(None)  # `attend` is already changed
            try:
                result = attend.forward_local(
                    query, key, value, engine=engine, return_lse=return_lse, return_max=return_max
                )
            finally:
                INTERVENTION.reset(token)
            if factors is None:
                return result
            factors = factors[:, None, None] if query.dim() > 2 else factors
            if not isinstance(result, tuple):
                return result * factors.to(result)
            return result[0] * factors.to(result[0]), *result[1:]
        problem, chosen = self._plan(query, key, value, engine, return_lse, return_max)
        seed = draw_seed(query.device) if problem.dropout else None
        if query.dim() == 4:
            if problem.broadcasts:
                query, key, value = broadcast_batch(query, key, value)
            output, lse, *others = chosen.run(problem, query, key, value, seed)
        else:
            results = chosen.run(problem, pad_leading(query), pad_leading(key), pad_leading(value), seed)
            output = results[0].reshape(*query.shape[:-1], value.shape[-1])
            lse, *others = (x if x is None else x.reshape(query.shape[:-1]) for x in results[1:])
        if not (return_lse or others):
            return output
        return (output, lse, *others) if return_lse else (output, *others)

    def _plan(
        self, query: Tensor, key: Tensor, value: Tensor, engine: str | None, return_lse: bool, return_max: bool = False
    ) -> Plan:
        """Return the problem and its engine, cached unless a score or bias is user code, which may close over anything.

        Observers are called here; they are not part of a graph.
        """
        compiling = torch.compiler.is_compiling()
        if not compiling:
            self.notify_observers(query, key, value)
        if compiling or self.__dict__["_custom"]:
            problem = self.problem(query, key, value, return_lse=return_lse, return_max=return_max)
            return problem, select(problem, engine)
        offset = None
        if isinstance(self.offset, Tensor):
            arguments.check_unmapped(self.offset)
            offset = tuple(self.offset.flatten().tolist())
        plans: Plans = self.__dict__["_plans"]
        problem, chosen = plans.find(
            (query, key, value),
            self.tensors() if self.__dict__["_holds_tensors"] else (),
            None if self.mask is None else self.mask.snapshot(),
            (return_lse, return_max, self.training, offset),
            engine,
            lambda: self.problem(query, key, value, return_lse=return_lse, return_max=return_max),
            owner=self,
        )
        if engine is None and offset is None and not self.dropout and chosen is native.ENGINE:
            plans.last = native.find_packed_call(problem, query, key, value)
        return problem, chosen

    def notify_observers(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Call the observers. `forward` does this; only code that computes attention another way needs to call it."""
        if observers := OBSERVERS.get():
            query, key, value = broadcast_batch(query, key, value)
            for observer in observers:
                observer(self, query, key, value)

    def intervene(self, query: Tensor, key: Tensor, *, again: bool = False) -> tuple[Attention, Tensor | None]:
        """Return the description to compute instead of this one, and factors (H,) of the heads' outputs or None.

        Without an intervention, this description. `forward` does this; only code that computes attention another way
        needs to call it. again: the call is the one of which `forward` has just computed the output.
        """
        intervention = None if torch.compiler.is_compiling() else INTERVENTION.get()
        if intervention is None:
            return self, None
        query, key = broadcast_batch(query, key)
        return intervention(self, query, key, again)

    def weights(
        self, query: Tensor, key: Tensor, *, rows: Index = None, columns: Index = None, heads: Index = None
    ) -> Tensor:
        """Return the weights (B, H, Q, K), without dropout; `rows`, `columns` and `heads` compute only a part.

        Parts are slices, lists, index tensors or integers (an integer keeps its axis). Differentiable.

        >>> import regard as rg, torch
        >>> q, k = torch.randn(2, 1, 2, 64, 8)
        >>> rg.Attention(mask=rg.causal()).weights(q, k, rows=[5], columns=slice(0, 6)).shape
        torch.Size([1, 2, 1, 6])
        """
        query, key = autocast(query, key)
        problem = self._inspection_problem(query, key)
        query, key = broadcast_batch(query, key)
        frame = problem.frame
        axes = (("heads", heads, frame.H), ("rows", rows, frame.Q), ("columns", columns, frame.K))
        parts = [arguments.resolve_index(*axis) for axis in axes]
        with no_autocast(query.device):
            result = select_inspection(problem, parts).weights(
                problem, pad_leading(query), pad_leading(key), *(part.to(query.device) for part in parts)
            )
        return result.reshape(result.shape[4 - query.dim() :])

    def map(self, query: Tensor, key: Tensor, *, size: tuple[int, int] = (64, 64)) -> Tensor:
        """Return the exact weights averaged to `size`, (B, H, *size), in O((Q + K)·D + size) memory.

        Equals `torch.nn.functional.adaptive_avg_pool2d(weights, size)` without materialising the weights. Not
        differentiable: raises on a tensor with a tangent.

        >>> import regard as rg, torch
        >>> q, k = torch.randn(2, 1, 2, 1000, 8)
        >>> rg.Attention().map(q, k, size=(10, 10)).shape
        torch.Size([1, 2, 10, 10])
        """
        arguments.check_size(size)
        query, key = autocast(query, key)
        problem = self._nondifferentiable_problem("map", query, key)
        query, key = broadcast_batch(query, key)
        with torch.no_grad(), no_autocast(query.device):
            result = select_inspection(problem).pooled_weights(
                problem, pad_leading(query), pad_leading(key), (size[0], size[1])
            )
        return result.reshape(result.shape[4 - query.dim() :])

    def statistics(self, query: Tensor, key: Tensor, *, top: int = 4, mass_on: Index = None) -> Statistics:
        """Return row statistics: lse, entropy, max_logit, distance, top_keys, top_weights; in O(Q) memory.

        With `mass_on` (keys in the form of `columns` in `weights`), also `mass`: the total weight of these keys in each
        row. It is the last field of the tuple, None without `mass_on`. Not differentiable: raises on a tangent.

        >>> import regard as rg, torch
        >>> q, k = torch.randn(2, 1, 2, 1000, 8)
        >>> rows = rg.Attention(mask=rg.causal()).statistics(q, k, mass_on=[0, 1])
        >>> rows.entropy[0, 0, 0].item(), rows.mass[0, 0, 0].item()
        (0.0, 1.0)
        """
        arguments.check_top(top)
        query, key = autocast(query, key)
        problem = self._nondifferentiable_problem("statistics", query, key)
        query, key = broadcast_batch(query, key)
        chosen = (
            None if mass_on is None else arguments.resolve_index("mass_on", mass_on, problem.frame.K).to(query.device)
        )
        with torch.no_grad(), no_autocast(query.device):
            result = select_inspection(problem).statistics(problem, pad_leading(query), pad_leading(key), top, chosen)
        return Statistics(*(None if x is None else x.reshape(x.shape[4 - query.dim() :]) for x in result))  # type: ignore

    def explain(
        self, query: Tensor, key: Tensor, value: Tensor, *, engine: str | None = None, return_lse: bool = False
    ) -> Explanation:
        """Explain how the call would be computed, without running it: engine, reasons, tiles, FLOPs, bytes.

        >>> import regard as rg, torch
        >>> q, k, v = torch.randn(3, 1, 2, 16, 8)
        >>> rg.Attention(dropout=0.1).explain(q, k, v).engine != "sdpa"
        True
        """
        query, key, value = autocast(query, key, value)
        return explain(self.problem(query, key, value, return_lse=return_lse), repr(self), engine)

    def _inspection_problem(self, query: Tensor, key: Tensor) -> Problem:
        """Return the problem for an inspection, which needs whole sequences."""
        if current_sharding() is not None:
            raise ValueError(
                "weights, map and statistics need whole sequences: call them outside "
                "regard.distributed.sequence, on tensors joined by regard.distributed.gather"
            )
        return self.problem(query, key)

    def _nondifferentiable_problem(self, name: str, query: Tensor, key: Tensor) -> Problem:
        """Return the problem for an inspection that is not differentiable."""
        problem = self._inspection_problem(query, key)
        if problem.device.type == "meta":
            raise ValueError(f"{name} needs values, but meta tensors have none; pass tensors on another device")
        if problem.tangent:
            raise NotImplementedError(
                f"{name} is not differentiable, but got a tensor with a tangent; use weights, which is differentiable, "
                "or detach the tensors"
            )
        return problem

    def problem(
        self, query: Tensor, key: Tensor, value: Tensor | None = None, *, return_lse: bool = False,
        return_max: bool = False,
    ) -> Problem:  # fmt: skip
        """Check a call and return it as a `Problem` for the engines; without a value, for an inspection.

        >>> import regard as rg, torch
        >>> q, k, v = torch.randn(3, 1, 2, 16, 8)
        >>> rg.Attention(mask=rg.causal()).problem(q, k, v).frame
        Frame(B=1, H=2, Q=16, K=16, offset=0)
        """
        if torch._C._get_tracing_state() is not None and not torch.compiler.is_compiling():
            raise RuntimeError("torch.jit.trace cannot record an attention; use torch.export.export instead")
        check_tensors(query, key, value)
        shape, shared = (1,) * (4 - query.dim()) + tuple(query.shape), (1,) * (4 - key.dim()) + tuple(key.shape)
        batch = batch_size(query, key) if value is None else batch_size(query, key, value)
        if return_lse and not isinstance(self.normalization, Softmax):
            raise ValueError(
                f"the log-sum-exp belongs to a softmax, but the normalisation is {self.normalization!r}; outputs of "
                "Sigmoid and ReLU over shards of the keys add up without one"
            )
        if return_max and not isinstance(self.normalization, Softmax):
            raise ValueError(
                f"return_max is for a softmax, not for {self.normalization!r}; statistics has max_logit too"
            )
        score, bias, normalization = self.score, self.bias, self.normalization
        if not torch.compiler.is_compiling():
            score, bias, normalization = snapshot(score), snapshot(bias), snapshot(normalization)
        offset = shared[2] - shape[2] if self.offset is None else arguments.read_offset(self.offset)
        frame = Frame(batch, shape[1], shape[2], shared[2], offset)
        d_value = 0 if value is None else value.shape[-1]
        self.check(frame, shape[3], d_value)
        tensors = [t for t in (query, key, value, self.sink) if isinstance(t, Tensor)] + list(score.tensors())
        tensors += bias.tensors() if bias is not None else ()
        tensors += normalization.tensors()
        for tensor in tensors:
            check_description_tensor(tensor, query)
        custom = [part for part in (score, bias) if part is not None] if self.__dict__["_custom"] else []
        learned = any(t.requires_grad for t in tensors) or any(
            part.closes_over_trainable(query.device) for part in custom
        )
        tangent, torch_only, _ = transform_state(tensors)
        return Problem(
            frame=frame,
            G=shared[1],
            D=shape[3],
            E=d_value,
            dtype=query.dtype,
            device=query.device,
            score=score,
            mask=None if self.mask is None else self.mask.snapshot(),
            bias=bias,
            temperature=float(self.temperature),
            sink=self.sink,
            dropout=float(self.dropout) if self.training else 0.0,
            grad=learned and torch.is_grad_enabled(),
            lse=return_lse,
            max_logit=return_max,
            tangent=tangent or any(part.closes_over_tangent(query.device) for part in custom),
            torch_only=torch_only,
            direct=torch.compiler.is_compiling() or is_direct(tensors),
            sharded=is_sharded(tensors),
            broadcasts=any(t is not None and t.dim() == 4 and t.shape[0] != batch for t in (query, key, value)),
            normalization=normalization,
        )

    def check(self, frame: Frame, d_head: int, d_value: int) -> None:
        """Raise if the description does not fit a call of this size."""
        offset = frame.offset
        if isinstance(offset, Tensor) and len(offset) != frame.B:
            raise ValueError(
                f"offset must be one number or one for each of the {frame.B} batch rows, got {len(offset)}; "
                "pass an int if all rows share it"
            )
        self.score.check(frame.H, d_head)
        if self.mask is not None:
            self.mask.check(frame)
        if self.bias is not None:
            self.bias.check(frame, d_head, d_value)
        if isinstance(self.sink, Tensor) and not broadcasts(self.sink.numel(), frame.H):
            raise ValueError(
                f"sink must be one logit or one for each of the {frame.H} heads, but is {format_shape(self.sink)}"
            )
        self.normalization.check(frame.H)

    def __repr__(self) -> str:
        shown = []
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                shown.append(f"{field.name}={format_shape(value)}")
            elif value != field.default and repr(value) not in ("Dot()", "Softmax()"):
                shown.append(f"{field.name}={value!r}")
        return f"Attention({', '.join(shown)})"


Attention.__init__ = arguments.explain_torch_keywords("Attention")(Attention.__init__)  # type: ignore[method-assign]


def _is_watched() -> bool:
    """Whether something has to see or to change every call: observers, an intervention, a sharded sequence."""
    return bool(OBSERVERS.get()) or INTERVENTION.get() is not None or current_sharding() is not None
