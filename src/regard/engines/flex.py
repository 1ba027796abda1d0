"""torch's FlexAttention, for accelerators: the description lowered to its `mask_mod` and `score_mod`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from regard.engines import tiled
from regard.engines.derivatives import Tensors, differentiable_twice
from regard.engines.dot_product import as_dot
from regard.engines.problem import Engine, Problem
from regard.engines.reference import replace_nonfinite, sink_logit
from regard.geometry import Indices
from regard.masks import Mask
from regard.positions.biases import Bias, Diagonal, Shaw, Sum, is_built_in
from regard.scores import Bilinear, Cosine, Dot, Modified


def run(problem: Problem, query: Tensor, key: Tensor, value: Tensor, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    if not _has_double_backward(problem):
        return _attend(problem, query, key, value)

    def kernel(tensors: Tensors) -> tuple[Tensor, Tensor]:
        return _attend(tiled.with_tensors(problem, tensors[3:]), *tensors[:3])

    output, lse = differentiable_twice(kernel, tiled.TiledOperator(problem, None), query, key, value, *problem.tensors)
    return output, lse


def _has_double_backward(problem: Problem) -> bool:
    """Whether `tiled` provides the derivatives that torch's kernel lacks."""
    closed = problem.score.closes_over_trainable(problem.device)
    return problem.grad and not closed and not torch.compiler.is_compiling()


def fallback(problem: Problem) -> list[str]:
    return ["tiled computes second derivatives"] if _has_double_backward(problem) else []


def _attend(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

    frame, blocks, bad = problem.frame, None, None
    if problem.mask is not None:
        key, value, bad = replace_nonfinite(key, value)
        batch, heads = problem.mask.extent(frame)
        batch = max(batch, len(frame.offsets()))
        blocks = create_block_mask(
            _mask_mod(problem, problem.mask), batch if batch > 1 else None, heads if heads > 1 else None,
            frame.Q, frame.K, device=query.device,
        )  # fmt: skip
    modifier = _score_mod(problem, query, bad)
    query, key, scale = as_dot(problem, query, key)
    output, aux = _kernel(query.device.type)(
        query, key, value, score_mod=modifier, block_mask=blocks, scale=scale, enable_gqa=problem.G != frame.H,
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    lse = aux.lse.to(problem.compute_dtype)
    if problem.sink is not None:
        at = frame.indices(device=query.device)
        sink = sink_logit(problem, at, lse)
        assert sink is not None
        total = torch.logaddexp(lse.unsqueeze(-1), sink)
        output = (output * (lse.unsqueeze(-1) - total).exp()).to(problem.dtype)
        lse = total.squeeze(-1)
    return output, lse


@cache
def _kernel(device: str) -> Callable[..., Any]:
    """Compile FlexAttention; on a CPU it runs uncompiled, which is enough for tests."""
    from torch.nn.attention.flex_attention import flex_attention

    if device != "cpu":
        return torch.compile(flex_attention, dynamic=False)

    def eager(*arguments: Any, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            return flex_attention(*arguments, **options)

    return eager


def _indices(problem: Problem, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Indices:
    return Indices(problem.frame, b, h, i, j)


def _mask_mod(problem: Problem, mask: Mask) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    return lambda b, h, i, j: mask.allows(_indices(problem, b, h, i, j))


def _score_mod(problem: Problem, query: Tensor, bad: Tensor | None) -> Callable[..., Tensor]:
    """Build a score_mod that applies softcap, modifier, bias and temperature in the order of the definition."""
    score = problem.score
    modifier = score.function if isinstance(score, Modified) else None
    base = score.score if isinstance(score, Modified) else score
    softcap = base.softcap if isinstance(base, Dot) else None
    biases = [] if problem.bias is None else [_bias_lookup(problem, part, query) for part in problem.bias.parts()]
    repeats = problem.frame.H // problem.G

    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        at = _indices(problem, b, h, i, j)
        if softcap is not None:
            s = softcap * (s / softcap).tanh()
        if modifier is not None:
            s = modifier(s, b, h, at.p, j)
        for bias in biases:
            s = s + bias(at)
        s = s / problem.temperature
        return s if bad is None else torch.where(bad[b, h // repeats, j], float("nan"), s)

    return score_mod


def _bias_lookup(problem: Problem, bias: Bias, query: Tensor) -> Callable[[Indices], Tensor]:
    """Build a function that returns the bias of one entry; terms that depend on the query are precomputed."""
    if isinstance(bias, Diagonal):
        return lambda at: bias.along(at.h, at.j - at.p).to(problem.compute_dtype)
    if isinstance(bias, Shaw):
        table = bias.table(problem.frame.indices(device=query.device), query, problem.scale)
        return lambda at: table[at.b, at.h, at.i, (at.j - at.p).clamp(-bias.reach, bias.reach) + bias.reach]
    return lambda at: bias.tile(at, query, problem.scale)


def why_not(problem: Problem) -> list[str]:
    base = problem.score.score if isinstance(problem.score, Modified) else problem.score
    parts = problem.bias.parts() if isinstance(problem.bias, Bias | Sum) else ()
    reasons = []
    if problem.empty:
        reasons.append("an axis is empty")
    if not problem.softmax:
        reasons.append(f"its kernel computes a softmax, not {problem.normalization!r}")
    if problem.device.type == "meta":
        reasons.append("it reads values, and meta tensors have none")
    if type(base) not in (Dot, Cosine, Bilinear):
        reasons.append(f"its kernel supports dot products, not {base!r}")
    if problem.bias is not None and not is_built_in(problem.bias):
        reasons.append(f"its kernel does not support {problem.bias!r}")
    if problem.dropout:
        reasons.append("it has no dropout")
    if any(isinstance(part, Shaw) and part.values is not None for part in parts):
        reasons.append("it does not support the value part of shaw")
    if problem.device.type == "cpu" and problem.grad:
        reasons.append("FlexAttention cannot train on a CPU")
    if problem.tangent:
        reasons.append("its kernel has no forward mode")
    if problem.in_transform:
        reasons.append("it uses vmap internally, and does not nest in one")
    return reasons


def why_avoid(problem: Problem) -> list[str]:
    reasons = []
    if problem.device.type == "cpu":
        reasons.append("on a CPU it computes densely unless compiled, which takes many seconds")
    if torch.compiler.is_compiling():
        reasons.append("its block mask is not built under torch.compile")
    return reasons


def peak_bytes(problem: Problem) -> int:
    if problem.device.type != "cpu":
        return 0
    frame = problem.frame
    return 3 * torch.empty((), dtype=problem.compute_dtype).element_size() * frame.B * frame.H * frame.Q * frame.K


ENGINE = Engine("flex", why_not, why_avoid, run, peak_bytes, lambda problem: problem.device.type == "cpu", fallback)
