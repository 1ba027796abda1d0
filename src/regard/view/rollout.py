"""Attention rollout: the share of every input token in each position after several layers."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.view.captured_attention import Kind
from regard.view.record import Record
from regard.view.uncaptured import container, shorten


def rollout(record: Record, kind: Kind | None = None, size: int = 512, batch: int | None = None) -> Tensor:
    """Return the rollout after each layer, (L, n, n), by the rule of Abnar & Zuidema (2020); rows sum to 1.

        rollout_l = (mean over heads of weights_l + identity) / 2  @  rollout_(l - 1)

    The identity represents the residual connection. kind: encoder or decoder, by default the one with more layers.
    size: up to so many tokens the result is exact. Longer sequences use maps pooled to size x size, which assumes that
    mass is spread evenly within a band of tokens, so the result is an estimate.
    """
    stacks: dict[Kind, list] = {"encoder": [], "decoder": []}
    for captured in record.attentions:
        if captured.kind != "cross" and captured.Q == captured.K:
            stacks[captured.kind].append(captured)
    kind = kind or ("encoder" if len(stacks["encoder"]) >= len(stacks["decoder"]) else "decoder")
    stack = stacks.get(kind, [])
    stack = [captured for captured in stack if captured.K == stack[0].K]
    if not stack:
        raise ValueError(
            f"rollout needs self-attention with as many queries as keys, but no such {kind} layer was captured"
        )
    if missing := missing_layers(record, stack[0].name):
        raise ValueError(f"rollout needs the attention of every layer, but not in the record: {shorten(missing)}")
    n = min(size, stack[0].K)
    edges = torch.arange(n + 1) * stack[0].K // n
    rolled, layers = torch.eye(n), []
    for captured in stack:
        mass = captured.map((n, n), batch).mean(0) * edges.diff()  # (n, n), of a band of keys
        step = 0.5 * mass + 0.5 * torch.eye(n)
        rolled = (
            step / step.sum(-1, keepdim=True) @ rolled
        )  # rows with a sink or without visible keys sum to less than 1
        layers.append(rolled)
    return torch.stack(layers)


def missing_layers(record: Record, name: str) -> list[str]:
    """Return the modules that are not in the record and belong to the same stack of layers as an attention."""
    return [each for each in record.uncaptured if container(each) == container(name)]
