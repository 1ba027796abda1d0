"""Masks built inside torch.func transforms, where every tensor is wrapped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard as rg

MASKS: dict[str, Callable[[], rg.Mask | Tensor | None]] = {
    "padding": lambda: rg.padding([2, 3]),
    "prefix": lambda: rg.prefix(torch.tensor([2, 1])),
    "documents": lambda: rg.documents([0, 0, 1, 1]),
    "ranges": lambda: rg.ranges([0, 0, 1, 1], [1, 2, 3, 4]),
    "edges": lambda: rg.edges(torch.tensor([[0, 1, 2], [0, 0, 1]])),
    "dense": lambda: torch.ones(4, 4).tril().bool(),
    "blocks": lambda: rg.blocks(torch.ones(2, 2).tril().bool(), 2),
    "global tokens": lambda: rg.global_tokens(torch.tensor([0, 2])),
    "random blocks": lambda: rg.random_blocks(1, 2),
    "key mask": lambda: rg.nn.key_mask(torch.arange(4) < torch.tensor([[4], [2]])),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_the_same_within_a_transform(name: str) -> None:
    q, k, v = torch.randn(3, 2, 1, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = MASKS[name]()

    def inside(q: Tensor) -> Tensor:
        return rg.attention(q, k, v, mask=MASKS[name]())

    leaf = q.clone().requires_grad_()
    expected = rg.attention(leaf, k, v, mask=mask)
    (grad,) = torch.autograd.grad(expected.sum(), leaf)
    along = torch.cos(q)
    out, tangent = torch.func.jvp(inside, (q,), (along,))
    torch.testing.assert_close(out, expected.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(tangent.sum(), (grad * along).sum(), rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.func.grad(lambda q: inside(q).sum())(q), grad, rtol=0, atol=1e-12)
