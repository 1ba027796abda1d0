"""The reference: dense, in any dtype, on one screen. Every other engine is tested against it.

logits  = (score(q, k) + bias) / temperature, -inf where the mask is False
weights = softmax over keys of logits, including the sink, or another normalisation
output  = dropout(weights) @ v, plus the value part of a relative position scheme
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.engines.dropout import dropout_factors
from regard.engines.problem import Engine, Problem, exceeds
from regard.geometry import Indices
from regard.normalizations import Softmax
from regard.positions.biases import Bias
from regard.scores import Additive

DENSE_BYTES = 1 << 28  # above this, an engine without dense weights is preferred
CACHED_BYTES = 1 << 22  # the same where weights are read several times, as in the search for a threshold


def run(problem: Problem, query: Tensor, key: Tensor, value: Tensor, seed: Tensor | None) -> tuple[Any, ...]:
    at = problem.frame.indices(device=query.device)
    (query, key, value), bad = prepare_operands(problem, query, key, value)
    scores = logits(problem, query, key, at, problem.bias, bad)  # (B, H, Q, K)
    weights, lse = normalize(problem, scores, at)
    if seed is not None:
        weights = weights * dropout_factors(seed, problem.dropout, at).to(weights)
    output = weights @ value  # (B, H, Q, E)
    if problem.bias is not None and (more := problem.bias.aggregate(at, weights)) is not None:
        output = output + more
    output = output.to(problem.dtype)
    return (output, lse, max_logits(scores, lse)) if problem.max_logit and lse is not None else (output, lse)


def logits(
    problem: Problem, query: Tensor, key: Tensor, at: Indices, bias: Bias | None, bad: Tensor | None, full: bool = False
) -> Tensor:
    """Return the logits of queries (b, h, q, D) and keys (b, h, k, D) at these indices; `full` skips the mask.

    A visible key that is `bad` (not finite) makes the row NaN.
    """
    scores = problem.score.tile(query, key, at)
    if bias is not None:
        scores = scores + bias.tile(at, query, problem.scale)
    if problem.temperature != 1:
        scores = scores / problem.temperature
    if bad is not None:
        scores = scores.masked_fill(bad.unsqueeze(-2), float("nan"))
    if problem.mask is not None and not full:
        scores = scores.masked_fill(~problem.mask.allows(at), float("-inf"))
    return scores


def max_logits(logits: Tensor, lse: Tensor) -> Tensor:
    """Return the largest of the logits (..., q, k), without a gradient: -inf where there is none, NaN where lse is."""
    if not logits.shape[-1]:
        return torch.full_like(lse.detach(), float("-inf"))
    return logits.detach().amax(-1).masked_fill(lse.detach().isnan(), float("nan"))


def normalize(problem: Problem, logits: Tensor, at: Indices) -> tuple[Tensor, Tensor | None]:
    """Return the weights of whole rows of logits (..., q, k), and the log-sum-exp (..., q) of a softmax."""
    if isinstance(problem.normalization, Softmax):
        return softmax(logits, sink_logit(problem, at, logits))
    return problem.normalization.weights(logits, at), None


def softmax(logits: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return weights (..., q, k) and log-sum-exp (..., q); a row of only -inf has weights 0 and log-sum-exp -inf."""
    largest = (
        logits.detach().amax(-1, keepdim=True)
        if logits.shape[-1]
        else logits.new_full((*logits.shape[:-1], 1), float("-inf"))
    )
    if sink is not None:
        largest = largest.maximum(sink.detach())
    largest = largest.masked_fill(largest == float("-inf"), 0.0)
    weights = (logits - largest).exp()
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink - largest).exp()
    nothing = total == 0
    total = total.masked_fill(nothing, 1.0)
    return weights / total, (largest + total.log()).masked_fill(nothing, float("-inf")).squeeze(-1)


def prepare_operands(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
    """Return query, key and value in the compute dtype, with one key and value head per query head, and bad keys.

    With a mask, non-finite keys and values are replaced by 0, so that they cannot reach queries that may not attend to
    them, and marked in the last result: (B, H, K) bool.
    """
    query, key, value = (tensor.to(problem.compute_dtype) for tensor in (query, key, value))
    bad = None
    if problem.mask is not None:
        key, value, bad = replace_nonfinite(key, value)
    if (repeats := problem.frame.H // max(problem.G, 1)) > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        bad = None if bad is None else bad.repeat_interleave(repeats, 1)
    return (query, key, value), bad


def replace_nonfinite(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Replace non-finite keys and values by 0, and return which keys had such: (B, G, K)."""
    good_key, good_value = key.isfinite(), value.isfinite()
    bad = ~(good_key.all(-1) & good_value.all(-1))
    return torch.where(good_key, key, 0.0), torch.where(good_value, value, 0.0), bad


def sink_logit(problem: Problem, at: Indices, like: Tensor) -> Tensor | None:
    """Return the logit of the sink, broadcast to (b, h, q, 1)."""
    if problem.sink is None:
        return None
    sink = torch.as_tensor(problem.sink, dtype=like.dtype, device=like.device).reshape(-1)
    return at.per_head(sink) if len(sink) > 1 else sink


def why_not(problem: Problem) -> list[str]:
    return []


def why_avoid(problem: Problem) -> list[str]:
    if exceeds(needed := peak_bytes(problem), DENSE_BYTES if problem.softmax else CACHED_BYTES):
        return [f"its dense weights take {needed / 1e6:,.0f} MB"]
    return []


def peak_bytes(problem: Problem) -> int:
    frame = problem.frame
    itemsize = 8 if problem.compute_dtype == torch.float64 else 4
    hidden = problem.D if isinstance(problem.score, Additive) else 1
    return 3 * itemsize * hidden * frame.B * frame.H * frame.Q * frame.K


ENGINE = Engine("reference", why_not, why_avoid, run, peak_bytes, dense=lambda problem: True)
