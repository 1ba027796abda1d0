"""A validated attention call without its tensors: the interface between descriptions and engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.arguments import check_layout
from regard.geometry import Frame, format_shape
from regard.masks import Mask
from regard.normalizations import DEFAULT_NORMALIZATION, Normalization, Softmax
from regard.positions.biases import Bias, is_built_in
from regard.quantized import QuantizedTensor
from regard.scores import BUILT_IN, Score

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Problem:
    """Sizes, dtype and description of one call. Engines take it together with 4-D query, key and value."""

    frame: Frame
    G: int
    D: int
    E: int
    dtype: torch.dtype
    device: torch.device
    score: Score
    mask: Mask | None
    bias: Bias | None
    temperature: float
    sink: float | Tensor | None
    dropout: float
    grad: bool  # whether anything requires grad
    lse: bool  # whether the log-sum-exp is requested
    max_logit: bool = False  # whether the largest logit of each query is requested
    tangent: bool = False  # whether any tensor has a tangent, or may have one inside a torch.func transform
    torch_only: bool = False  # whether only torch's own operators provide all derivatives that may be requested
    direct: bool = True  # whether the kernels may read the tensors in place, see `tensor_memory.is_direct`
    broadcasts: bool = False  # whether query, key or value has a batch axis of 1 that broadcasts
    sharded: bool = False  # whether one of the tensors is a DTensor
    normalization: Normalization = DEFAULT_NORMALIZATION
    memo: dict = field(default_factory=dict, init=False)  # cache for engines

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of sums: at least float32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def empty(self) -> bool:
        """Whether an axis has no entries."""
        frame = self.frame
        return not all((frame.B, frame.H, frame.Q, frame.K, self.D))

    @property
    def scale(self) -> float | Tensor:
        return self.score.scale_for(self.D)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the description that may require grad; a modifier may close over more."""
        own = self.score.tensors() + (self.bias.tensors() if self.bias is not None else ())
        return own + self.normalization.tensors() + ((self.sink,) if isinstance(self.sink, Tensor) else ())

    @property
    def softmax(self) -> bool:
        """Whether the weights are a softmax."""
        return isinstance(self.normalization, Softmax)

    @property
    def custom(self) -> bool:
        """Whether score or bias is user code, which may use any tensors and draw random numbers."""
        return type(self.score) not in BUILT_IN or not (self.bias is None or is_built_in(self.bias))

    @property
    def unpredictable(self) -> bool:
        """Whether user code that a backward pass calls again may return something else, and cannot be asked whether."""
        return self.custom or (self.mask is not None and self.mask.content() is None)

    def closes_over_trainable(self) -> bool:
        """Whether score or bias uses tensors that require grad and are not among `tensors`."""
        parts = [part for part in (self.score, self.bias) if part is not None]
        return self.custom and any(part.closes_over_trainable(self.device) for part in parts)

    @property
    def in_transform(self) -> bool:
        """Whether a torch.func transform such as vmap is running."""
        if torch.compiler.is_compiling():
            return False
        return torch._C._functorch.peek_interpreter_stack() is not None


RunFunction = Callable[[Problem, Tensor, Tensor, Tensor, "Tensor | None"], tuple[Any, ...]]


@dataclass(frozen=True)
class Engine:
    """One way to compute a problem.

    `why_not(problem)` returns the reasons why it does not support the problem, `why_avoid(problem)` the reasons why it
    should not be picked automatically. `run(problem, query, key, value, seed)` returns the output (B, H, Q, E) and the
    log-sum-exp (B, H, Q), or None if the engine has none; with
    `problem.max_logit` also the largest logits (B, H, Q). `peak_bytes(problem)` is the memory beyond inputs and output.
    `dense(problem)` is whether it also computes the tiles that the mask leaves empty. `fallback(problem)` says when it
    hands a call, or a derivative, over to another engine; it is empty if that cannot happen. `remarks(problem)` says
    what a user should know before relying on it.
    """

    name: str
    why_not: Callable[[Problem], list[str]]
    why_avoid: Callable[[Problem], list[str]]
    run: RunFunction
    peak_bytes: Callable[[Problem], int]
    dense: Callable[[Problem], bool]
    fallback: Callable[[Problem], list[str]] = lambda problem: []
    remarks: Callable[[Problem], list[str]] = lambda problem: []


def exceeds(needed: int, limit: int) -> bool:
    """Whether an engine exceeds its memory limit; never with symbolic sizes, since a graph has one engine for all."""
    if torch.compiler.is_exporting() and isinstance(needed, torch.SymInt):
        return False
    return needed > limit


def check_tensors(query: Tensor, key: Tensor, value: Tensor | None) -> None:
    """Raise unless query, key and value have compatible types and shapes."""
    named = {"query": query, "key": key} | ({} if value is None else {"value": value})
    for name, tensor in named.items():
        _check_tensor(name, tensor)
    if len({tensor.dim() for tensor in named.values()}) > 1:
        raise ValueError(f"{_join_names(named)} must have the same number of axes, but are {_format_shapes(named)}")
    for attribute in ("dtype", "device"):
        if len({getattr(tensor, attribute) for tensor in named.values()}) > 1:
            actual = ", ".join(f"{name} {getattr(tensor, attribute)}" for name, tensor in named.items())
            raise TypeError(f"{_join_names(named)} must share one {attribute}, but are {actual}; convert with .to(...)")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query and key must have the same width D, but query is {format_shape(query)} and key "
            f"{format_shape(key)}; "
            "project one of them to the other's width"
        )
    if value is not None and value.shape[-2] != key.shape[-2]:
        raise ValueError(f"value must have one row for each of the {key.shape[-2]} keys, but is {format_shape(value)}")
    if query.dim() == 4 and any(tensor.shape[0] not in (1, batch_size(*named.values())) for tensor in named.values()):
        raise ValueError(
            f"{_join_names(named)} must have the same batch axis B, or 1 where it is shared, but are "
            f"{_format_shapes(named)}"
        )
    if query.dim() >= 3:
        heads, shared = query.shape[-3], key.shape[-3]
        if value is not None and value.shape[-3] != shared:
            raise ValueError(f"key and value must have the same number of heads G, but are {_format_shapes(named)}")
        if heads != shared and (shared == 0 or heads % shared):
            raise ValueError(
                f"query heads H must be a multiple of key/value heads G, not {heads} and {shared} "
                f"({_format_shapes(named)})"
            )


def check_description_tensor(tensor: Tensor, query: Tensor) -> None:
    """Raise unless a tensor of the description can be used with this query."""
    check_layout("a tensor of the description", tensor, sequences=False)
    if query.is_cpu and not tensor.is_cpu:
        raise ValueError(
            f"the tensors of the description must be on the device of the query, {query.device}, but one of shape "
            f"{format_shape(tensor)} is on {tensor.device}; move the description, as in attend.to(query.device)"
        )


def batch_size(*tensors: Tensor) -> int:
    """Return the common batch size of tensors, some of which may have a batch of 1 or no batch axis."""
    return next((tensor.shape[0] for tensor in tensors if tensor.dim() == 4 and tensor.shape[0] != 1), 1)


def broadcast_batch(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Expand 4-D tensors with a batch of 1 to the common batch size, as views."""
    if tensors[0].dim() < 4:
        return tensors
    batch = batch_size(*tensors)
    return tuple(tensor if tensor.shape[0] == batch else tensor.expand(batch, -1, -1, -1) for tensor in tensors)


def _check_tensor(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        convert = f"{name}.dequantize()" if isinstance(tensor, QuantizedTensor) else "torch.as_tensor"
        raise TypeError(f"{name} must be a torch.Tensor, but is {type(tensor).__name__}; use {convert}")
    check_layout(name, tensor)
    if tensor.dtype not in FLOATS:
        raise TypeError(
            f"{name} must be float32, float64, bfloat16 or float16, but is {tensor.dtype}; convert with {name}.float()"
        )
    if not 2 <= tensor.dim() <= 4:
        raise ValueError(
            f"{name} must have two to four axes, (N, D), (heads, N, D) or (B, heads, N, D), "
            f"but is {format_shape(tensor)}"
        )


def _join_names(named: dict[str, Tensor]) -> str:
    *first, last = named
    return f"{', '.join(first)} and {last}"


def _format_shapes(named: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {format_shape(tensor)}" for name, tensor in named.items())
