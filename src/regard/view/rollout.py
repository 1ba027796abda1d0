"""Attention rollout: what the tokens of the last layer are made of, by way of all layers."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.view.captured_attention import Kind
from regard.view.record import Record


def rollout(record: Record, kind: Kind | None = None, size: int = 512, batch: int = 0) -> Tensor:
    """(L, n, n): after each layer, how much of every token is in each, by Abnar & Zuidema's rule; rows sum to 1.

        rollout_l = (mean over heads of weights_l + identity) / 2  @  rollout_(l - 1)

    The identity stands for the residual connection. kind: encoder or decoder; the one with more layers unless told
    otherwise. Up to `size` tokens it is exact. Of more, it is the rollout of the maps pooled to size x size: within a
    band of tokens, mass is then assumed to be spread evenly, so it is an estimate.
    """
    stacks: dict[Kind, list] = {"encoder": [], "decoder": []}
    for captured in record.attentions:
        if captured.kind != "cross" and captured.Q == captured.K:
            stacks[captured.kind].append(captured)
    kind = kind or ("encoder" if len(stacks["encoder"]) >= len(stacks["decoder"]) else "decoder")
    stack = stacks.get(kind, [])
    stack = [captured for captured in stack if captured.K == stack[0].K]
    if not stack:
        raise ValueError(f"rollout needs layers of self-attention, but no whole {kind} was captured")
    n = min(size, stack[0].K)
    edges = torch.arange(n + 1) * stack[0].K // n
    through, found = torch.eye(n), []
    for captured in stack:
        mass = captured.map((n, n), batch).mean(0) * edges.diff()  # (n, n), of a band of keys
        step = 0.5 * mass + 0.5 * torch.eye(n)
        through = step / step.sum(-1, keepdim=True) @ through  # rows with a sink, or nothing to see, have less than 1
        found.append(through)
    return torch.stack(found)
