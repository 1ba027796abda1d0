"""Gradients of a call whose keys are some of many, by the output and log-sum-exp over all of them.

A weight is exp(logit - lse) whatever other keys there are, so a part of the keys needs no forward pass of its own.
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
    """The gradients of `inputs`, of which query, key, value (the `tensors`) and the description were made.

    Output (B, H, Q, E) and lse (B, H, Q) are over all keys, the gradients are theirs. The problem has no sink: who
    merges the parts has it.
    """
    given = output, lse, grad_output, grad_lse
    values = problem.bias is not None and any(
        isinstance(p, Shaw) and p.values is not None for p in problem.bias.parts()
    )
    if values or native.why_not(problem):  # the mass by distance that Shaw's values need is over these keys alone
        made = [*tensors, *problem.tensors]
        wanted = [tensor.requires_grad for tensor in made]
        found = tiled.gradients(problem, seed, [tensor.detach() for tensor in made], wanted, *given)
    else:
        with torch.enable_grad():
            made, found = native.gradients(problem, tensors, seed, *given)  # type: ignore[assignment]
    pairs = [(x, grad) for x, grad in zip(made, found, strict=True) if grad is not None and x.requires_grad]
    outputs, by = [x for x, _ in pairs], [grad for _, grad in pairs]
    if not outputs:
        return (None,) * len(inputs)
    return torch.autograd.grad(outputs, list(inputs), by, allow_unused=True)
