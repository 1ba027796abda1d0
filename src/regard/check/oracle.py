"""The reference of the properties: the definition in float64, and errors in units of rounding."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard.check.targets.target import NotSupported


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q kᵀ / sqrt(D)) v in float64; a row without visible keys is 0. Differentiable.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 1, 4, 8)
    >>> exact(q, k, v).dtype
    torch.float64
    """
    q, k, v = q.double(), k.double(), v.double()
    logits = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    if mask is not None:
        logits = torch.where(mask, logits, -1e300)
    # torch.softmax raises if a loss that contains its tangent is differentiated
    weights = (logits - logits.detach().amax(-1, keepdim=True)).exp()
    weights = weights / weights.sum(-1, keepdim=True)
    return (weights if mask is None else torch.where(mask, weights, 0.0)) @ v


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference in units of the rounding of the dtype of `actual` (NaN if there is a NaN).

    >>> import torch
    >>> error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]))
    0.0
    """
    unit = torch.finfo(actual.dtype).eps * max(1.0, expected.detach().abs().max().item())
    return ((actual.detach().double() - expected.detach().double()).abs().max() / unit).item()


def gradients(output: Tensor, *inputs: Tensor, again: bool = False) -> tuple[Tensor, ...]:
    """Gradients of a weighted sum of the output, without symmetries that hide errors.

    again: keep the graph, to differentiate a second time.
    """
    weight = torch.linspace(-1.0, 2.0, output.numel(), dtype=torch.float64).reshape(output.shape)
    return torch.autograd.grad((output.double() * weight).sum(), inputs, create_graph=again)


def tangent(function: Callable[..., Tensor], inputs: Sequence[Tensor], directions: Sequence[Tensor | None]) -> Tensor:
    """The derivative of a function along directions, in forward mode with dual tensors; None is a constant input.

    >>> import torch
    >>> tangent(torch.sin, [torch.zeros(2)], [torch.ones(2)])
    tensor([1., 1.])
    """
    with forward_ad.dual_level():
        pairs = zip(inputs, directions, strict=True)
        output = function(*(x if along is None else forward_ad.make_dual(x, along) for x, along in pairs))
        along = forward_ad.unpack_dual(output).tangent
    assert along is not None, "the output has no tangent: derivatives of the inputs are dropped"
    return along


def peak_bytes(call: Callable[[], Tensor]) -> int:
    """The peak of the additional resident memory of this process during a call (Linux only)."""

    def status(name: str) -> int:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))

    if not os.access("/proc/self/clear_refs", os.W_OK):
        raise NotSupported("peak memory is read from /proc/self, which only Linux has")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status("VmRSS")
    call()
    return max(0, status("VmHWM") - before)


HELPERS = (error, exact, gradients, tangent, peak_bytes)
