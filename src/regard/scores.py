"""Scores: how well a query (b, h, q, D) matches a key (b, h, k, D), computed tile by tile."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor

from regard.arguments import describe_value
from regard.description import Description
from regard.geometry import CallSlice, Indices, broadcasts, format_shape

Modifier = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(eq=False)
class Score(Description):
    """Base class of scores. Tensor fields may require grad."""

    def tile(self, query: Tensor, key: Tensor, at: Indices) -> Tensor:
        """Return the scores (b, h, q, k) of query (b, h, q, D) and key (b, h, k, D)."""
        raise NotImplementedError

    def scale_for(self, d_head: int) -> float | Tensor:
        """Return the factor of the products of queries and keys of width `d_head`."""
        return 1.0

    def narrow(self, part: CallSlice) -> Score:
        """Return the score for a slice of a call, with heads and positions counted from the start of the slice."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot be used on a slice of a call, as in a WindowCache or a shared sequence: "
            "define narrow(part), which returns the score with heads and positions counted from the start of the slice"
        )

    def check(self, heads: int, d_head: int) -> None:
        """Raise if the score does not fit H heads of width D."""


def _check_scale_type(scale: object) -> None:
    if isinstance(scale, Tensor) and not scale.is_floating_point():
        raise TypeError(
            "scale must be a number or a floating-point tensor, one or per head, but is a tensor of "
            f"{scale.dtype}; convert with scale.float()"
        )


@dataclass(eq=False, repr=False)
class Dot(Score):
    """Scaled dot product: `scale * q · k`; `scale` is a number or a tensor (one or per head), by default `1/sqrt(D)`.

    With `softcap` c the score is `c * tanh(scale * q · k / c)`.

    >>> import regard as rg
    >>> rg.Dot(), rg.Dot(scale=0.5, softcap=30.0)
    (Dot(), Dot(scale=0.5, softcap=30.0))
    """

    scale: float | Tensor | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        _check_scale_type(self.scale)
        if self.softcap is None:
            return
        if isinstance(self.softcap, bool) or not isinstance(self.softcap, int | float):
            raise TypeError(
                f"softcap must be a positive number, but is {type(self.softcap).__name__}; leave it out for none"
            )
        if not 0 < self.softcap < math.inf:
            raise ValueError(f"softcap must be a positive number, but is {self.softcap}; leave it out for none")

    def tile(self, query: Tensor, key: Tensor, at: Indices) -> Tensor:
        scores = (query * _per_head(self.scale_for(query.shape[-1]), at, query)) @ key.mT
        return scores if self.softcap is None else self.softcap * (scores / self.softcap).tanh()

    def scale_for(self, d_head: int) -> float | Tensor:
        return 1 / math.sqrt(max(d_head, 1)) if self.scale is None else self.scale

    def narrow(self, part: CallSlice) -> Score:
        return self.replace(scale=_select_scale(self.scale, part))

    def check(self, heads: int, d_head: int) -> None:
        _check_scale(self.scale, heads)

    def __repr__(self) -> str:
        return _format_call("Dot", scale=self.scale, softcap=self.softcap)


DEFAULT_SCORE = Dot()
"""Sentinel for the default score. Every description gets a `Dot` of its own: a shared module would share its hooks."""


@dataclass(eq=False, repr=False)
class Cosine(Score):
    """Cosine similarity of query and key, times `scale` (one number or one per head, by default 1).

    >>> import regard as rg
    >>> rg.Cosine(scale=10.0)
    Cosine(scale=10.0)
    """

    scale: float | Tensor | None = None

    def __post_init__(self) -> None:
        _check_scale_type(self.scale)

    def tile(self, query: Tensor, key: Tensor, at: Indices) -> Tensor:
        scale = _per_head(self.scale_for(query.shape[-1]), at, query)
        return (F.normalize(query, dim=-1) * scale) @ F.normalize(key, dim=-1).mT

    def scale_for(self, d_head: int) -> float | Tensor:
        return 1.0 if self.scale is None else self.scale

    def narrow(self, part: CallSlice) -> Score:
        return self.replace(scale=_select_scale(self.scale, part))

    def check(self, heads: int, d_head: int) -> None:
        _check_scale(self.scale, heads)

    def __repr__(self) -> str:
        return _format_call("Cosine", scale=self.scale)


@dataclass(eq=False, repr=False)
class Additive(Score):
    """Additive (Bahdanau) score `weight · tanh(q + k)` of projected q and k; weight (D,) or (H, D).

    >>> import regard as rg, torch
    >>> rg.Additive(torch.ones(64))
    Additive((64,))
    """

    weight: Tensor

    def __post_init__(self) -> None:
        _check_floats("Additive: weight", self.weight, "(D,) or (H, D)")

    def tile(self, query: Tensor, key: Tensor, at: Indices) -> Tensor:
        weight = at.per_head(self.weight.to(query), axes=1)  # (D,) or (h, 1, 1, D)
        hidden = (query.unsqueeze(-2) + key.unsqueeze(-3)).tanh()  # (b, h, q, k, D)
        return (hidden @ weight) if weight.dim() == 1 else (hidden @ weight.mT).squeeze(-1)

    def narrow(self, part: CallSlice) -> Score:
        return self.replace(weight=_select_heads(self.weight, 1, part))

    def check(self, heads: int, d_head: int) -> None:
        if not _fits(self.weight, (d_head,), heads):
            raise ValueError(
                f"Additive: weight must be (D,) or (H, D) with H = {heads} and D = {d_head}, "
                f"but is {format_shape(self.weight)}"
            )

    def __repr__(self) -> str:
        return f"Additive({format_shape(self.weight)})"


@dataclass(eq=False, repr=False)
class Bilinear(Score):
    """Bilinear (Luong's general) score `q · matrix · k`; matrix (D, D) or (H, D, D).

    >>> import regard as rg, torch
    >>> rg.Bilinear(torch.eye(64))
    Bilinear((64, 64))
    """

    matrix: Tensor

    def __post_init__(self) -> None:
        _check_floats("Bilinear: matrix", self.matrix, "(D, D) or (H, D, D)")

    def tile(self, query: Tensor, key: Tensor, at: Indices) -> Tensor:
        return self.project(query, at) @ key.mT

    def project(self, query: Tensor, at: Indices) -> Tensor:
        """Return the queries whose dot product with a key is the score."""
        matrix = at.per_head(self.matrix.to(query), axes=2)  # (D, D) or (h, 1, 1, D, D)
        return query @ (matrix if matrix.dim() == 2 else matrix.squeeze(-3).squeeze(-3))

    def narrow(self, part: CallSlice) -> Score:
        return self.replace(matrix=_select_heads(self.matrix, 2, part))

    def check(self, heads: int, d_head: int) -> None:
        if not _fits(self.matrix, (d_head, d_head), heads):
            raise ValueError(
                f"Bilinear: matrix must be (D, D) or (H, D, D) with H = {heads} and D = {d_head}, "
                f"but is {format_shape(self.matrix)}"
            )

    def __repr__(self) -> str:
        return f"Bilinear({format_shape(self.matrix)})"


@dataclass(eq=False, repr=False)
class Modified(Score):
    """A score transformed by a function of the tensors `(score, b, h, q_index, k_index)`.

    `q_index` is the position of the query among the keys, `offset + i`. The function runs on tiles. Autograd
    differentiates it, including with respect to tensors that it closes over. `score=function` is short for this class.
    A function with parameters must be an `nn.Module`: torch does not register the tensors that a plain function closes
    over.

    >>> import regard as rg
    >>> def nearer_is_better(score, b, h, q_index, k_index):
    ...     return score - 0.1 * (q_index - k_index).abs()
    >>> rg.Modified(nearer_is_better)
    Modified(nearer_is_better)
    """

    function: Modifier
    score: Score = DEFAULT_SCORE

    def __post_init__(self) -> None:
        if not callable(self.function) or isinstance(self.function, Score):
            raise TypeError(
                "Modified: function must be a function of (score, b, h, q_index, k_index), "
                f"but is {type(self.function).__name__}; pass the score to modify as the second argument"
            )
        if self.score is DEFAULT_SCORE:
            self._set("score", Dot())
        if not isinstance(self.score, Score):
            raise TypeError(f"Modified: score must be a score such as Dot(), but is {type(self.score).__name__}")

    def tile(self, query: Tensor, key: Tensor, at: Indices) -> Tensor:
        scores = self.score.tile(query, key, at)
        modified = self.function(scores, at.b, at.h, at.p, at.j)
        if not isinstance(modified, Tensor) or modified.shape != scores.shape:
            actual = (
                f"a tensor of shape {format_shape(modified)}"
                if isinstance(modified, Tensor)
                else type(modified).__name__
            )
            raise TypeError(
                "score: the function must return a tensor of the shape of its first argument, "
                f"{format_shape(scores)}, but returned {actual}"
            )
        return modified.to(scores.dtype)

    def closes_over_trainable(self, device: torch.device) -> bool:
        modified = self._trial_call(device)
        return (isinstance(modified, Tensor) and modified.requires_grad) or super().closes_over_trainable(device)

    def closes_over_tangent(self, device: torch.device) -> bool:
        if super().closes_over_tangent(device) or forward_ad._current_level < 0:
            return forward_ad._current_level >= 0
        modified = self._trial_call(device)
        return isinstance(modified, Tensor) and forward_ad.unpack_dual(modified).tangent is not None

    def _trial_call(self, device: torch.device) -> object:
        """Call the function on one score, with the random state restored afterwards."""
        b, h, p, j = torch.zeros(4, 1, 1, 1, 1, dtype=torch.int64, device=device)
        score = torch.zeros(1, 1, 1, 1, device=device)
        if torch.compiler.is_compiling():
            return self.function(score, b, h, p, j)
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
            return self.function(score, b, h, p, j)

    def scale_for(self, d_head: int) -> float | Tensor:
        return self.score.scale_for(d_head)

    def narrow(self, part: CallSlice) -> Score:
        function, top, left = self.function, part.heads.start, part.columns.start

        def shifted(scores: Tensor, b: Tensor, h: Tensor, p: Tensor, j: Tensor) -> Tensor:
            return function(scores, b, h + top, p + left, j + left)

        return self.replace(function=shifted if top or left else function, score=self.score.narrow(part))

    def check(self, heads: int, d_head: int) -> None:
        self.score.check(heads, d_head)

    def __repr__(self) -> str:
        name = getattr(self.function, "__name__", None) or repr(
            self.function
        )  # the repr of a method would include its module
        return f"Modified({name})" if repr(self.score) == "Dot()" else f"Modified({name}, {self.score!r})"


BUILT_IN = (Dot, Cosine, Additive, Bilinear)
"""The scores that the kernels support. Compared by exact type, since a subclass may compute anything."""


def to_score(value: Any) -> Score:
    """Convert the argument `score`: a score, or a function that modifies `Dot()`.

    >>> to_score(max)
    Modified(max)
    """
    if value is DEFAULT_SCORE:
        return Dot()
    if isinstance(value, Score):
        return value
    if not callable(value) or isinstance(value, type):
        raise TypeError(
            "score must be Dot(), Cosine(), Additive(weight), Bilinear(matrix) or a function of "
            f"(score, b, h, q_index, k_index), but is {describe_value(value)}"
        )
    return Modified(value, Dot())


def _per_head(scale: float | Tensor, at: Indices, like: Tensor) -> float | Tensor:
    return at.per_head(scale.to(like).reshape(-1)) if isinstance(scale, Tensor) else scale


def _select_scale(scale: float | Tensor | None, part: CallSlice) -> float | Tensor | None:
    return scale.reshape(-1)[part.heads] if isinstance(scale, Tensor) and scale.numel() > 1 else scale


def _select_heads(tensor: Tensor, axes: int, part: CallSlice) -> Tensor:
    """Select the heads of a slice from a tensor with one entry (of `axes` axes) per head, or one for all heads."""
    return tensor if tensor.dim() <= axes or len(tensor) == 1 else tensor[part.heads]


def _fits(tensor: Tensor, shape: tuple[int, ...], heads: int) -> bool:
    """Whether a tensor has this shape, optionally with a leading axis of 1 or `heads`."""
    extra = tensor.dim() - len(shape)
    entry = all(n == size for n, size in zip(tensor.shape[extra:], shape, strict=True)) if extra in (0, 1) else False
    return entry and (extra == 0 or tensor.shape[0] == 1 or tensor.shape[0] == heads)


def _check_floats(name: str, tensor: Tensor, form: str) -> None:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        actual = f"{tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name} must be a floating-point tensor {form}, but is {actual}")


def _check_scale(scale: float | Tensor | None, heads: int) -> None:
    if isinstance(scale, Tensor):
        if not broadcasts(scale.numel(), heads):
            raise ValueError(
                f"scale must be one number or one for each of the {heads} heads, but is {format_shape(scale)}"
            )
    elif scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise TypeError(f"scale must be a number or a tensor, one or per head, but is {type(scale).__name__}")


def _format_call(name: str, **values: object) -> str:
    shown = (f"{k}={format_shape(v) if isinstance(v, Tensor) else v!r}" for k, v in values.items() if v is not None)
    return f"{name}({', '.join(shown)})"
