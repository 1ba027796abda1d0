"""Records of small models, and of attention with given logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import regard as rg
from regard.view import Record, capture

PAIR = rg.models.TransformerConfig(vocabulary=100, d_model=32, layers=2, heads=4, d_hidden=64)


class Attends(nn.Module):
    """A module that attends from queries (H, Q, D) to keys (G, K, D)."""

    def __init__(self, attend: rg.Attention) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, query: Tensor, source: Tensor | None = None) -> Tensor:
        key = query if source is None else source
        return self.attend(query, key, key)


def attended(attend: rg.Attention, query: Tensor, key: Tensor | None = None) -> Record:
    model = Attends(attend)
    with capture(model) as record:
        model(query, key)
    return record


def of_logits(logits: Tensor, mask: rg.Mask | None = None, **description: Any) -> Record:
    """Return a record of attention with the logits (H, Q, K)."""
    heads, queries, keys = logits.shape
    attend = rg.Attention(score=rg.Dot(scale=0.0), mask=mask, bias=logits[None], **description)
    return attended(
        attend, torch.zeros(1, heads, queries, 4), None if queries == keys else torch.zeros(1, heads, keys, 4)
    )


def translated() -> Record:
    torch.manual_seed(0)
    model = rg.models.Transformer(PAIR).eval()
    with capture(model) as record:
        model(torch.randint(5, 100, (1, 9)), torch.randint(5, 100, (1, 7)))
    return record
