"""FlexAttention, uncompiled on a CPU."""

from __future__ import annotations

import pytest
import torch

import regard as rg

N, H, D = 33, 4, 8
DESCRIPTIONS = {
    "plain": {},
    "causal window": {"mask": rg.causal() & rg.window(7, 0)},
    "offset": {"mask": rg.causal(), "offset": 3},
    "an offset per batch row": {"mask": rg.causal(), "offset": [3, -2]},
    "padding": {"mask": rg.padding([5, 30])},
    "documents": {"mask": rg.documents(torch.arange(N) // 7)},
    "bigbird": {"mask": rg.bigbird(4)},
    "edges": {"mask": rg.edges(torch.tensor([[0, 1, 5, 9], [3, 1, 8, 9]]))},
    "blocks per head": {"mask": rg.blocks(torch.rand(H, 9, 9) < 0.5, 4)},
    "dense": {"mask": torch.rand(N, N) < 0.5},
    "where": {"mask": rg.where(lambda b, h, p, j: (p + j + h) % 2 == 0)},
    "alibi": {"bias": rg.alibi(H)},
    "t5 and a dense bias": {"bias": rg.t5(torch.randn(8, H)) + rg.dense_bias(torch.randn(N, N))},
    "relative": {"bias": rg.relative(torch.randn(9, H)), "temperature": 0.7},
    "shaw": {"bias": rg.shaw(torch.randn(9, D))},
    "softcap": {"score": rg.Dot(softcap=2.0)},
    "cosine with a scale a head": {"score": rg.Cosine(scale=torch.rand(H) + 1)},
    "bilinear": {"score": rg.Bilinear(torch.randn(D, D))},
    "modifier": {"score": lambda s, b, h, p, j: s - 0.1 * (p - j).abs()},
    "sink": {"sink": torch.randn(H), "mask": rg.causal()},
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_flex_equals_the_reference(name: str) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, H, N, D, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, N, D, dtype=torch.float64)
    ours = rg.attention(q, k, v, engine="flex", return_lse=True, **DESCRIPTIONS[name])
    theirs = rg.attention(q, k, v, engine="reference", return_lse=True, **DESCRIPTIONS[name])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_flex_reports_why_it_cannot_compute() -> None:
    q, k, v = (torch.randn(1, 1, 4, 4, requires_grad=True) for _ in range(3))
    with pytest.raises(ValueError, match="cannot train on a CPU"):
        rg.attention(q, k, v, engine="flex")
