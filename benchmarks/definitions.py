"""What the cases mean, in plain torch that shares no code with the library: outputs at a few rows, from all keys."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.case import Inputs, Reference

Allowed = Callable[[Tensor, Tensor], Tensor]  # positions of queries (R, 1) and keys (K,) -> bool
Bias = Callable[[Inputs, Tensor, Tensor], Tensor]  # inputs and the same positions -> (H or 1, R, K)


def causal(i: Tensor, j: Tensor) -> Tensor:
    return j <= i


def window(before: int, after: int) -> Allowed:
    return lambda i, j: (j >= i - before) & (j <= i + after)


def neighborhood(side: int, width: int) -> Allowed:
    """The width x width positions of a square that are nearest to a position, inside the square."""

    def near(i: Tensor, j: Tensor) -> Tensor:
        first = (i - width // 2).clamp(0, side - width)
        return (j >= first) & (j < first + width)

    return lambda i, j: near(i // side, j // side) & near(i % side, j % side)


def same_sequence(ids: Tensor, *, causal: bool) -> Allowed:
    return lambda i, j: (ids[i] == ids[j]) & ((j <= i) | (not causal))


def softmax_attention(
    allowed: Allowed | None = None, bias: Bias | None = None, softcap: float = 0.0, shaw: bool = False
) -> Reference:
    """softmax(q kᵀ / sqrt(D) + bias) v, with a mask; the last query is at the position of the last key."""

    def reference(x: Inputs, rows: Tensor) -> Tensor:
        q, k, v = x["q"][:, :, rows], x["k"], x["v"]
        logits = q @ k.mT / q.shape[-1] ** 0.5
        i, j = rows[:, None] + (k.shape[2] - x["q"].shape[2]), torch.arange(k.shape[2])
        if softcap:
            logits = softcap * (logits / softcap).tanh()
        if bias is not None:
            logits = logits + bias(x, i, j)
        index = clip_distance(i, j, x["keys"].shape[0] // 2) if shaw else None
        if shaw:
            given = q @ x["keys"].T / q.shape[-1] ** 0.5  # (B, H, R, 2 * radius + 1)
            logits = logits + given.gather(-1, index.expand(*given.shape[:2], -1, -1))
        if allowed is not None:
            logits = logits.masked_fill(~allowed(i, j), -math.inf)
        weights = logits.softmax(-1)
        if not shaw:
            return weights @ v
        mass = torch.zeros(*weights.shape[:3], len(x["values"]), dtype=weights.dtype)
        mass = mass.scatter_add(-1, index.expand_as(weights), weights)
        return weights @ v + mass @ x["values"]

    return reference


def sigmoid_attention(bias: float) -> Reference:
    def reference(x: Inputs, rows: Tensor) -> Tensor:
        q, k, v = x["q"][:, :, rows].double(), x["k"].double(), x["v"].double()
        return ((q @ k.mT / q.shape[-1] ** 0.5 + bias).sigmoid() @ v).to(x["q"].dtype)

    return reference


def entmax_attention(alpha: float) -> Reference:
    """The threshold of each row by bisection, in float64."""

    def reference(x: Inputs, rows: Tensor) -> Tensor:
        q, k, v = x["q"][:, :, rows].double(), x["k"].double(), x["v"].double()
        logits = (alpha - 1) * q @ k.mT / q.shape[-1] ** 0.5
        low = logits.detach().amax(-1, keepdim=True) - 1
        high = low + 1
        for _ in range(60):
            middle = (low + high) / 2
            above = (logits.detach() - middle).clamp(min=0).pow(1 / (alpha - 1)).sum(-1, keepdim=True) > 1
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        weights = (logits - low).clamp(min=0).pow(1 / (alpha - 1))
        return (weights @ v).to(x["q"].dtype)

    return reference


def tangent(reference: Reference) -> Reference:
    """The tangent of another definition, for tangents `dq`, `dk`, `dv` of those inputs that have one."""

    def moved(x: Inputs, rows: Tensor) -> Tensor:
        names = [name for name in "qkv" if f"d{name}" in x]
        primals, tangents = tuple(x[name] for name in names), tuple(x[f"d{name}"] for name in names)
        call = lambda *given: reference(x | dict(zip(names, given, strict=True)), rows)  # noqa: E731
        return torch.func.jvp(call, primals, tangents)[1]

    return moved


def additive(x: Inputs, rows: Tensor) -> Tensor:
    q, k = x["q"][:, :, rows], x["k"]
    return ((q.unsqueeze(-2) + k.unsqueeze(-3)).tanh() @ x["weight"]).softmax(-1) @ x["v"]


def statistics(x: Inputs, rows: Tensor) -> Tensor:
    """Log-sum-exp, entropy, largest logit and mean distance: (B, H, R, 4)."""
    logits = x["q"][:, :, rows] @ x["k"].mT / x["q"].shape[-1] ** 0.5
    weights = logits.softmax(-1)
    away = (rows[:, None] - torch.arange(x["k"].shape[2])).abs()
    entropy = -(weights * weights.log()).sum(-1)
    return torch.stack([logits.logsumexp(-1), entropy, logits.amax(-1), (weights * away).sum(-1)], -1)


def layer(heads: int) -> Reference:
    """Projections, attention and projection, on tokens (1, B, N, d_model)."""

    def reference(x: Inputs, rows: Tensor) -> Tensor:
        q, k, v = (split_heads(t, heads) for t in (x["tokens"][0] @ x["inward"].T).chunk(3, -1))
        output = softmax_attention()({"q": q, "k": k, "v": v}, rows)
        return (output.transpose(1, 2).flatten(2) @ x["outward"].T).unsqueeze(0)

    return reference


def split_heads(tokens: Tensor, heads: int) -> Tensor:
    """(B, N, d_model) to (B, H, N, width / H)"""
    return tokens.unflatten(-1, (heads, -1)).transpose(1, 2)


# Linear attention


def linear_attention(
    queries: Callable, keys: Callable, *, bucket: int = 0, floor: float = 0.0, epsilon: float = 0.0
) -> Reference:
    """Causal, with features of queries and of keys; with a bucket, only the keys of earlier buckets are seen.

    `floor` is the least divisor, `epsilon` is added to the sums of the features of keys.
    """

    def reference(x: Inputs, rows: Tensor) -> Tensor:
        j = torch.arange(x["k"].shape[2])
        visible = j < (rows // bucket * bucket)[:, None] if bucket else j <= rows[:, None]
        query = queries(x["q"])[:, :, rows]
        weights = (query @ keys(x["k"]).mT) * visible
        divisor = weights.sum(-1, keepdim=True) + epsilon * query.sum(-1, keepdim=True)
        return weights @ x["v"] / divisor.clamp(min=max(floor, 1e-300))

    return reference


def gated_delta_rule(x: Inputs, rows: Tensor) -> Tensor:
    """Token by token, with queries divided by sqrt(D); the states between segments are all that is kept."""

    def segment(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for t in range(q.shape[2]):
            state = state * decay[:, :, t, None, None].exp()
            error = v[:, :, t] - (k[:, :, t, None] @ state)[:, :, 0]
            state = state + k[:, :, t, :, None] * (beta[:, :, t, None] * error)[:, :, None]
            outputs.append((q[:, :, t, None] @ state)[:, :, 0])
        return torch.stack(outputs, 2), state

    B, H, N, D = x["q"].shape
    state, outputs = x["q"].new_zeros(B, H, D, x["v"].shape[-1]), []
    for start in range(0, N, 64):
        part = [x[name][:, :, start : start + 64] for name in ("q", "k", "v", "decay", "beta")]
        output, state = checkpoint(segment, *part, state, use_reentrant=False)
        outputs.append(output)
    return torch.cat(outputs, 2)[:, :, rows] * D**-0.5


def elu(x: Tensor) -> Tensor:
    return F.elu(x) + 1


def favor(directions: Tensor, *, over: tuple[int, ...] | None = None, floor: float = 0.0) -> Callable[[Tensor], Tensor]:
    """exp(w·x - |x|² / 2) / sqrt(count), in units of the largest w·x over some axes; performer-pytorch adds a floor."""

    def features(x: Tensor) -> Tensor:
        x = x * x.shape[-1] ** -0.25
        logs = x @ directions.to(x).T
        half = x.square().sum(-1, keepdim=True) / 2
        largest = logs.detach().amax(over, keepdim=True) if over else 0
        return ((logs - half - largest).exp() + floor) * len(directions) ** -0.5

    return features


# Biases


def clip_distance(i: Tensor, j: Tensor, radius: int) -> Tensor:
    return (j - i).clamp(-radius, radius) + radius


def alibi(x: Inputs, i: Tensor, j: Tensor) -> Tensor:
    heads = x["q"].shape[1]
    slopes = 2.0 ** (-8 * (torch.arange(heads, dtype=torch.float64) + 1) / heads)
    return (-slopes[:, None, None] * (i - j).abs()).to(x["q"])


def relative(x: Inputs, i: Tensor, j: Tensor) -> Tensor:
    return x["table"][clip_distance(i, j, len(x["table"]) // 2)].movedim(-1, 0)


def t5(x: Inputs, i: Tensor, j: Tensor) -> Tensor:
    """32 buckets, half of them for keys behind the query; the far ones grow up to a distance of 128."""
    away = (j - i).abs()
    far = 8 + ((away.clamp(min=1).float() / 8).log() / math.log(128 / 8) * 8).long()
    bucket = torch.where(away < 8, away, far.clamp(max=15)) + 16 * (j > i)
    return x["table"][bucket].movedim(-1, 0)


def dense(x: Inputs, i: Tensor, j: Tensor) -> Tensor:
    return x["bias"][:, i.reshape(-1)]


def whole(bias: Bias) -> Callable[[Inputs], Tensor]:
    """A bias as a tensor (H, Q, K)."""

    def expand(x: Inputs) -> Tensor:
        length = x["q"].shape[2]
        return bias(x, torch.arange(length)[:, None], torch.arange(x["k"].shape[2]))

    return expand
