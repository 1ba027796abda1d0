"""The triton engine: the problems that its kernels support, and their preparation."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from regard.engines import lowering
from regard.engines.derivatives import apply, outside_transforms
from regard.engines.lowering import LoweredConstants, LoweredTensors, add_shaw_values, in_float32, lower
from regard.engines.problem import Engine, Problem
from regard.engines.triton.arguments import NO_LAYOUT, Layout
from regard.engines.triton.attention import forward
from regard.engines.triton.availability import why_not_on
from regard.engines.triton.layout import layout_parts
from regard.engines.triton.operator import TritonOperator
from regard.engines.triton.registration import run_operator
from regard.positions.biases import Shaw
from regard.scores import Dot

MAX_WIDTH = 256
MAX_SIZE = 2**31 - 1 - 1024  # the kernels index keys and queries with 32 bits


def run(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, seed: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    if (problem.grad or problem.tangent) and (wide := in_float32(problem)) is not None:
        output, lse = run(wide, query.to(wide.dtype), key.to(wide.dtype), value.to(wide.dtype), seed)
        return output.to(problem.dtype), lse
    x, shaw, fixed, layout = prepare(problem, query, key, value, seed)
    if torch.compiler.is_compiling():
        output, lse, mass = run_operator(x, fixed, layout)
    elif problem.grad or problem.tangent or problem.in_transform:
        output, lse, mass = apply(TritonOperator(fixed, layout), *x)
    else:
        output, lse, mass = forward(x, fixed, layout)
    return add_shaw_values(problem, shaw, output, mass), lse


def prepare(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, seed: Tensor | None
) -> tuple[LoweredTensors, Shaw | None, LoweredConstants, Layout]:
    """Lower a problem, and upload the layout of its mask."""
    x, shaw, scale = lower(problem, query, key, value)
    layout, strides = NO_LAYOUT, (0, 0)
    if problem.mask is not None:
        *axes, offsets = problem.frame.cache_key()
        # Sizes as ints: tracing specialises symbolic ones, since the mask layout depends on them.
        frame_key = (*map(operator.index, axes), tuple(map(operator.index, offsets)))
        rows, keys, strides, key_strides = layout_parts(problem.mask, frame_key, query.device)
        layout = Layout(rows, keys, key_strides)
    offset, radius, wants = None, 0, 0
    if shaw is not None:
        with outside_transforms():
            offset = torch.tensor(problem.frame.offsets(), device=query.device).expand(problem.frame.B).contiguous()
        radius, wants = shaw.reach, int(shaw.values is not None)
    softcap = problem.score.softcap if isinstance(problem.score, Dot) else None
    numbers = (scale, softcap or 0.0, problem.temperature, problem.dropout, 0.0, 0.0)
    return x, shaw, LoweredConstants(layout.rows, offset, seed, numbers, (radius, wants, *strides), problem), layout


def why_not(problem: Problem) -> list[str]:
    reasons, frame = [], problem.frame
    if reason := why_not_on(problem.device):
        reasons.append(reason)
    if problem.dtype == torch.float64:
        reasons.append("its kernels compute in float32, not in float64")
    for axis, n in {"D": problem.D, "E": problem.E}.items():
        if n > MAX_WIDTH:
            reasons.append(f"its kernels support widths up to {MAX_WIDTH}, but {axis} is {n}")
    if problem.max_logit:
        reasons.append("its kernels do not return the largest logits")
    if not problem.E:
        reasons.append("the values have no columns")
    for axis, n in {"B": frame.B, "H": frame.H, "Q": frame.Q, "K": frame.K}.items():
        if n > MAX_SIZE:
            reasons.append(f"its kernels index up to {MAX_SIZE:,} along an axis, but {axis} is {n:,}")
    if problem.sharded:
        reasons.append("its kernels have no rule for DTensor; pass the local shard, .to_local()")
    elif not problem.direct and not torch.compiler.is_compiling():
        reasons.append("its kernels read memory, and a tensor is not plain")
    return reasons + lowering.why_not(problem)


def why_avoid(problem: Problem) -> list[str]:
    if problem.device.type == "cpu":
        return ["on a CPU it runs in Triton's interpreter, which is for tests"]
    return []


def peak_bytes(problem: Problem) -> int:
    return 4 * problem.frame.B * problem.frame.H * problem.frame.Q  # the log-sum-exp


def fallback(problem: Problem) -> list[str]:
    return ["tiled computes second derivatives"] if problem.grad else []


def remarks(problem: Problem) -> list[str]:
    if problem.device.type == "cpu":
        return []
    return ["not run on a GPU by its authors, only in an interpreter and compiled; see `regard check --device`"]


ENGINE = Engine("triton", why_not, why_avoid, run, peak_bytes, lambda problem: False, fallback, remarks)
