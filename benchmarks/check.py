"""Whether a result is right: against the definition in float64, at a sample of rows.

The gradient that comes back is zero except at these rows. So the gradients of all inputs, keys and values of any
length among them, are known exactly from a few rows of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import Case, Inputs, Peer, Reference

ROWS = 48


class WrongResult(Exception):
    """A result that differs from the definition; no time is printed for it."""


def rows_of(length: int) -> Tensor:
    """Return the rows to compare: the first, the last and some between, always the same."""
    order = torch.randperm(length, generator=torch.Generator().manual_seed(7))[:ROWS]
    return torch.cat([order, torch.tensor([0, length - 1])]).unique()


def leaves(x: Inputs) -> list[Tensor]:
    return [tensor for tensor in x.values() if tensor.requires_grad]


def relative_error(actual: Tensor, right: Tensor) -> float:
    return float((actual.double() - right).norm() / right.norm().clamp(min=1e-300))


def check(case: Case, peer: Peer | None, call: Callable[[], Any], x: Inputs, expected: dict) -> float:
    """The relative error of one competitor, or WrongResult. `expected` remembers references between competitors."""
    reference: Reference = peer.reference if peer is not None and peer.reference else case.reference
    output = call() if peer is None else peer.view(call())
    rows = rows_of(output.shape[2])
    if reference not in expected:
        expected[reference] = _expected(reference, x, rows, case.backward)
    right, gradients = expected[reference]
    computed = [output[:, :, rows]]
    if case.backward:
        seed = torch.zeros_like(output)
        seed[:, :, rows] = _seed(right).to(seed)
        computed += torch.autograd.grad(output, leaves(x), seed, allow_unused=True, materialize_grads=True)
    tolerance = (peer.tolerance if peer is not None else None) or case.tolerance
    worst = 0.0
    for name, ours, exact in zip(("output", *_names(x)), computed, (right, *gradients), strict=False):
        error = relative_error(ours.detach(), exact)
        if case.dropout:
            if name in ("output", "v"):  # noise of known size around the output without dropout
                error = abs(error / math.sqrt(case.dropout / (1 - case.dropout)) - 1)
            else:
                continue
        if not error <= tolerance:
            raise WrongResult(f"{name} is off by {error:.1e} (relative), more than {tolerance:.0e}")
        worst = max(worst, error)
    return worst


def _names(x: Inputs) -> list[str]:
    return [name for name, tensor in x.items() if tensor.requires_grad]


def _seed(right: Tensor) -> Tensor:
    return torch.randn(right.shape, generator=torch.Generator().manual_seed(11), dtype=torch.float64)


def _expected(reference: Reference, x: Inputs, rows: Tensor, backward: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    exact = {
        name: t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        for name, t in x.items()
    }
    with torch.set_grad_enabled(backward):
        right = reference(exact, rows)
    gradients = (
        torch.autograd.grad(right, leaves(exact), _seed(right), allow_unused=True, materialize_grads=True)
        if backward
        else ()
    )
    return right.detach(), gradients
