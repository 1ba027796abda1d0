"""The float64 oracle: attention query by query, from the definition. It shares no code with the library."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def softmax_row(logits: Tensor, sink: float | Tensor | None) -> tuple[Tensor, Tensor]:
    """Return weights and log-sum-exp of one row; if all are -inf, the weights are 0."""
    rows = logits if sink is None else torch.cat([logits, torch.as_tensor(sink, dtype=logits.dtype).reshape(1)])
    if not len(rows) or bool((rows == -math.inf).all()):
        return torch.zeros_like(logits), torch.tensor(-math.inf, dtype=logits.dtype)
    return torch.softmax(rows, 0)[: len(logits)], torch.logsumexp(rows, 0)


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, score, allowed: Tensor, bias: Tensor, temperature=1.0, sink=None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, weights and log-sum-exp. `score(q, k, h)` is one number; allowed and bias are (B, H, Q, K)."""
    (B, H, Q, _), (_, G, K, E) = query.shape, value.shape
    output = torch.zeros(B, H, Q, E, dtype=torch.float64)
    weights = torch.zeros(B, H, Q, K, dtype=torch.float64)
    lse = torch.zeros(B, H, Q, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            g = h // (H // G)
            for i in range(Q):
                logits = torch.full((K,), -math.inf, dtype=torch.float64)
                for j in range(K):
                    if allowed[b, h, i, j]:
                        logits[j] = (score(query[b, h, i], key[b, g, j], h) + bias[b, h, i, j]) / temperature
                own = None if sink is None else torch.as_tensor(sink, dtype=torch.float64).reshape(-1).expand(H)[h]
                weights[b, h, i], lse[b, h, i] = softmax_row(logits, own)
                for j in range(K):
                    if allowed[b, h, i, j]:
                        output[b, h, i] += weights[b, h, i, j] * value[b, g, j]
    return output, weights, lse
