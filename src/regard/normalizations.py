"""Normalisations: how the logits of a query become the weights of its keys.

A logit of -inf, where the mask is False, becomes a weight of 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.arguments import describe_value
from regard.description import Description
from regard.geometry import CallSlice, Indices, broadcasts, format_shape

SEARCH_ELEMENTS = 1 << 17  # of rows whose thresholds are searched together: they stay in the cache


class Normalization:
    """Base class of normalisations."""

    def weights(self, logits: Tensor, at: Indices) -> Tensor:
        """Return the weights of whole rows of logits (b, h, q, K), differentiable to third order at least."""
        raise NotImplementedError

    def once_differentiable(self, logits: Tensor, at: Indices) -> Tensor:
        """Return the weights, for a caller who needs no more than their gradients."""
        return self.weights(logits, at)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that may require grad."""
        return ()

    def narrow(self, part: CallSlice) -> Normalization:
        """Return the normalisation of a slice of a call, with heads counted from the start of the slice."""
        return self

    def check(self, heads: int) -> None:
        """Raise if it does not fit H heads."""


@dataclass(frozen=True, repr=False)
class Softmax(Normalization):
    """`exp(logit)`, divided by its sum over the keys and the sink: weights sum to 1 with the sink's. The default.

    >>> import regard as rg, torch
    >>> rg.Attention(normalization=rg.Softmax()).weights(torch.ones(1, 4), torch.ones(5, 4))
    tensor([[0.2000, 0.2000, 0.2000, 0.2000, 0.2000]])
    """

    def weights(self, logits: Tensor, at: Indices) -> Tensor:
        empty = (logits == float("-inf")).all(-1, keepdim=True)
        return torch.softmax(logits.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)

    def __repr__(self) -> str:
        return "Softmax()"


@dataclass(eq=False, repr=False)
class Sigmoid(Description, Normalization):
    """`1 / (1 + exp(-(logit + bias)))`: every key independently, between 0 and 1, with no sum over the keys.

    bias: a number, or a tensor of one or one per head that may require grad. Ramapuram et al. (2024, "Theory, analysis
    and best practices for sigmoid self-attention") use `-math.log(n)` for training sequences of n tokens, with which
    the weights of a new model sum to about 1. There is no default: a bias that followed the number of keys of a call
    would change with padding, and from step to step with a cache.

    >>> import math, regard as rg, torch
    >>> attend = rg.Attention(normalization=rg.Sigmoid(bias=-math.log(4)))
    >>> attend.weights(torch.zeros(1, 8), torch.zeros(4, 8))
    tensor([[0.2000, 0.2000, 0.2000, 0.2000]])
    """

    bias: float | Tensor

    def __post_init__(self) -> None:
        if isinstance(self.bias, Tensor) and self.bias.is_floating_point():
            return
        if isinstance(self.bias, bool) or not isinstance(self.bias, int | float):
            raise TypeError(
                "Sigmoid: bias must be a number or a floating-point tensor of one per head, but is "
                f"{describe_value(self.bias)}; for training sequences of n tokens use -math.log(n)"
            )
        if not abs(self.bias) < float("inf"):
            raise ValueError(f"Sigmoid: bias must be finite, but is {self.bias}")

    def weights(self, logits: Tensor, at: Indices) -> Tensor:
        bias = self.bias
        if isinstance(bias, Tensor):
            bias = at.per_head(bias.to(logits).reshape(-1))
        return (logits + bias).sigmoid()

    def narrow(self, part: CallSlice) -> Normalization:
        if not isinstance(self.bias, Tensor) or self.bias.numel() == 1:
            return self
        return self.replace(bias=self.bias.reshape(-1)[part.heads])

    def check(self, heads: int) -> None:
        if isinstance(self.bias, Tensor) and not broadcasts(self.bias.numel(), heads):
            raise ValueError(
                f"Sigmoid: bias must be one number or one for each of the {heads} heads, but is "
                f"{format_shape(self.bias)}"
            )

    def __repr__(self) -> str:
        return f"Sigmoid({format_shape(self.bias) if isinstance(self.bias, Tensor) else self.bias})"


@dataclass(frozen=True, repr=False)
class ReLU(Normalization):
    """`max(logit, 0) ** power`: every key independently, 0 for logits up to 0, with no sum over the keys.

    power: at least 1. Wortsman et al. (2023, "Replacing softmax with ReLU in vision transformers") divide by the number
    of keys L. Nothing is divided here: weights that followed the number of keys of a call would change with padding,
    and from step to step with a cache. For sequences of L tokens write `temperature=L ** (1 / power)`, which is the
    same: a temperature T divides these weights by `T ** power`.

    >>> import regard as rg, torch
    >>> attend = rg.Attention(rg.Dot(scale=1.0), normalization=rg.ReLU(power=2), temperature=4**0.5)
    >>> attend.weights(torch.tensor([[3.0]]), torch.tensor([[-1.0], [0.0], [1.0], [2.0]]))
    tensor([[0.0000, 0.0000, 2.2500, 9.0000]])
    """

    power: float = 1.0

    def __post_init__(self) -> None:
        _check_number("ReLU: power", self.power, "of at least 1")
        if not 1 <= self.power < float("inf"):
            raise ValueError(f"ReLU: power must be a number of at least 1, but is {self.power}")

    def weights(self, logits: Tensor, at: Indices) -> Tensor:
        return _positive_power(logits, float(self.power))

    def __repr__(self) -> str:
        return f"ReLU(power={self.power})"


@dataclass(frozen=True, repr=False)
class Entmax(Normalization):
    """`max((alpha - 1) * logit - threshold, 0) ** (1 / (alpha - 1))`, with the threshold for which weights sum to 1.

    Weights of keys far below the best one are exactly 0. alpha: above 1, where it is softmax; 2 is sparsemax. From
    Peters, Niculae and Martins (2019, "Sparse sequence-to-sequence models").

    >>> import regard as rg, torch
    >>> attend = rg.Attention(rg.Dot(scale=1.0), normalization=rg.Entmax(alpha=2))
    >>> attend.weights(torch.tensor([[1.0]]), torch.tensor([[0.0], [1.0], [1.5]]))
    tensor([[0.0000, 0.2500, 0.7500]])
    """

    alpha: float = 1.5

    def __post_init__(self) -> None:
        _check_number("Entmax: alpha", self.alpha, "above 1")
        if not 1 < self.alpha < float("inf"):
            raise ValueError(f"Entmax: alpha must be above 1, but is {self.alpha}; in the limit of 1 it is Softmax()")

    def weights(self, logits: Tensor, at: Indices) -> Tensor:
        x, threshold = self._solve(logits)
        for _ in range(2):  # a step from an exact root doubles the order to which derivatives are right, from 0 on
            threshold = threshold + self._step(x, threshold)
        return _positive_power(x - threshold, self._power).to(logits.dtype)

    def once_differentiable(self, logits: Tensor, at: Indices) -> Tensor:
        weights: Tensor = _EntmaxOnce.apply(logits, self)
        return weights

    def __repr__(self) -> str:
        return f"Entmax(alpha={self.alpha})"

    @property
    def _power(self) -> float:
        return 1 / (self.alpha - 1)

    def _solve(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return (alpha - 1) * logits less the largest of each row, and the thresholds, which are constants.

        In float64 where powers are below 1, because they magnify the rounding of a threshold.
        """
        x = (logits.double() if self._power < 1 else logits) * (self.alpha - 1)
        if not x.shape[-1]:
            return x, x.new_zeros(*x.shape[:-1], 1)
        largest = x.detach().amax(-1, keepdim=True)
        x = x - largest.masked_fill(largest == float("-inf"), 0.0)
        with torch.no_grad():
            if _is_unread():
                return x, self._threshold(x.detach())
            rows = x.detach().flatten(0, -2).split(max(1, SEARCH_ELEMENTS // x.shape[-1]))
            thresholds = [self._threshold(some) for some in rows]
            return x, torch.cat(thresholds).reshape(*x.shape[:-1], 1)

    def _threshold(self, x: Tensor) -> Tensor:
        """Return the root of `sum(max(x - threshold, 0) ** power) = 1` for rows x whose largest entry is 0.

        Newton's method on the power-norm, which is convex for powers of at least 1 and approaches the root from below.
        For powers below 1, and after a step that leaves the bracket of the root, bisection.
        """
        low = x.new_full((*x.shape[:-1], 1), -1.0)  # the largest entry alone has a weight of 1
        high = torch.full_like(low, -(x.shape[-1] ** (1 - self.alpha)))  # and one of at least 1 / K
        threshold, close, bisects = low, 2 * torch.finfo(x.dtype).eps, self._power < 1
        unread = _is_unread()
        for _ in range(self._most_steps(x)):
            step = self._excess(x, threshold) if bisects else self._step(x, threshold)
            low, high = torch.where(step > 0, threshold, low), torch.where(step < 0, threshold, high)
            moved = (low + high) / 2
            if not bisects:
                newton = threshold + step
                moved = torch.where((newton >= low) & (newton <= high), newton, moved)
            moved = torch.where(step == 0, threshold, moved)
            going = ((moved - threshold).abs() > close * moved.abs()) & (high > low)
            threshold = moved
            if not unread and not bool(going.any()):  # a row with NaN does not go on
                break
        return threshold

    def _most_steps(self, x: Tensor) -> int:
        """Return how many steps reach full precision from any start.

        Slopes of the power-norm are between 1 and K, and a step of Newton's method on a convex function divides the
        product of its value and slope by 4. Bisection halves the distance.
        """
        digits, keys = 1 - math.log2(torch.finfo(x.dtype).eps), math.log2(max(x.shape[-1], 2))
        return 2 + math.ceil(digits + (self.alpha - 1) * keys if self._power < 1 else (digits + 2 * keys) / 2)

    def _excess(self, x: Tensor, threshold: Tensor) -> Tensor:
        """Return by how much the weights sum to more than 1; 0 for a row of only -inf."""
        total = _positive_power(x - threshold, self._power).sum(-1, keepdim=True)
        return (total - 1).masked_fill(total == 0, 0.0)

    def _step(self, x: Tensor, threshold: Tensor) -> Tensor:
        """Return Newton's step for a power-norm of 1, and 0 for a row of only -inf."""
        above = (x - threshold).relu()
        if self._power == 1:
            powers, slopes = above, above.sign()
        elif self._power == 2:
            powers, slopes = above.square(), above
        else:
            powers, slopes = _positive_power(above, self._power), _positive_power(above, self._power - 1)
        total, slope = powers.sum(-1, keepdim=True), slopes.sum(-1, keepdim=True)
        empty = slope == 0
        total, slope = total.masked_fill(empty, 1.0), slope.masked_fill(empty, 1.0)
        return (total - total.pow(2 - self.alpha)) / slope


class _EntmaxOnce(torch.autograd.Function):
    """The weights, with their Jacobian from their own values."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, entmax: Entmax) -> Tensor:
        x, threshold = entmax._solve(logits.detach())
        weights = _positive_power(x - threshold, entmax._power).to(logits.dtype)
        ctx.save_for_backward(weights)
        ctx.alpha = entmax.alpha
        return weights

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (weights,) = ctx.saved_tensors
        slope = _positive_power(weights, 2 - ctx.alpha)
        total = slope.sum(-1, keepdim=True)
        mean = (slope * grad).sum(-1, keepdim=True) / total.masked_fill(total == 0, 1.0)
        return slope * (grad - mean), None


def _is_unread() -> bool:
    """Whether values cannot be read: in a graph, or within a torch.func transform."""
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


def _positive_power(x: Tensor, power: float) -> Tensor:
    """Return `x ** power` where x is positive, 0 elsewhere, and NaN where x is NaN."""
    if power == 1:
        return x.relu()
    if power == 2:
        return x.relu().square()
    if power == 0:
        return torch.where(x > 0, 1.0, x.relu())
    hidden = x <= 0
    return x.masked_fill(hidden, 1.0).pow(power).masked_fill(hidden, 0.0)


def _check_number(name: str, value: object, which: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number {which}, but is {describe_value(value)}")


DEFAULT_NORMALIZATION = Softmax()


def check_normalization(value: object) -> None:
    """Raise unless a description may have this normalisation."""
    if not isinstance(value, Softmax | Sigmoid | Entmax | ReLU):
        raise TypeError(
            "normalization must be Softmax(), Sigmoid(bias), Entmax(alpha) or ReLU(power), but is "
            f"{describe_value(value)}"
        )
