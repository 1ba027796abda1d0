"""Gradients of a call on a shard of the keys, given output and log-sum-exp over all keys.

A weight is exp(logit - lse) regardless of other keys, so a shard needs no separate forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.engines import native, tiled
from regard.engines.problem import Problem
from regard.positions.biases import Shaw


def shard_gradients(
    problem: Problem, tensors: Sequence[Tensor], seed: Tensor | None, inputs: Sequence[Tensor], output: Tensor,
    lse: Tensor, grad_output: Tensor, grad_lse: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of `inputs`, from which query, key, value (the `tensors`) and the description are computed.

    Output (B, H, Q, E), lse (B, H, Q) and their gradients are over all keys. The problem has no sink: it belongs to the
    code that merges the shards.
    """
    given = output, lse, grad_output, grad_lse
    values = problem.bias is not None and any(
        isinstance(p, Shaw) and p.values is not None for p in problem.bias.parts()
    )
    if values or native.why_not(problem):  # the mass by distance that Shaw's values need covers these keys only
        differentiated = [*tensors, *problem.tensors]
        wanted = [tensor.requires_grad for tensor in differentiated]
        gradients = tiled.gradients(problem, seed, [tensor.detach() for tensor in differentiated], wanted, *given)
    else:
        with torch.enable_grad():
            differentiated, gradients = native.gradients(problem, tensors, seed, *given)  # type: ignore[assignment]
    pairs = [
        (x, grad) for x, grad in zip(differentiated, gradients, strict=True) if grad is not None and x.requires_grad
    ]
    outputs, by = [x for x, _ in pairs], [grad for _, grad in pairs]
    if not outputs:
        return (None,) * len(inputs)
    return torch.autograd.grad(outputs, list(inputs), by, allow_unused=True)
