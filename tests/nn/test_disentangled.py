"""Disentangled attention against sums over all pairs of tokens."""

from __future__ import annotations

import math

import pytest
import torch

import regard as rg
from regard.nn import Block, Cache, Encoder, FeedForward, LayerContext, MultiHeadAttention, PreNorm, RelativeEmbedding


@pytest.mark.parametrize(("span", "most"), [(3, 3), (4, 9)])
def test_scores_are_sums_of_three_products(span: int, most: int) -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(12, 2).double()
    relative = RelativeEmbedding(12, span=span, max_distance=most).double()
    x = torch.randn(2, 11, 12, dtype=torch.float64, requires_grad=True)
    q, k, v = (part.unflatten(-1, (2, 6)).transpose(1, 2) for part in layer.qkv(x).chunk(3, -1))
    vectors, rows = relative(11)
    pos_q, pos_k, _ = (part.unflatten(-1, (2, 6)).transpose(0, 1) for part in layer.qkv(vectors).chunk(3, -1))
    scores = q.new_zeros(2, 2, 11, 11)
    for i in range(11):
        for j in range(11):
            to_position = (q[:, :, i] * pos_k[:, rows[i, j]]).sum(-1)
            from_position = (k[:, :, j] * pos_q[:, rows[i, j]]).sum(-1)
            scores[:, :, i, j] = ((q[:, :, i] * k[:, :, j]).sum(-1) + to_position + from_position) / math.sqrt(6)
    out = scores.softmax(-1) @ v
    expected = layer.output(out.transpose(1, 2).flatten(2))
    output = layer(x, context=LayerContext(relative=relative(11)))
    torch.testing.assert_close(output, expected)
    inputs = (x, *layer.parameters(), *relative.parameters())
    upstream = torch.randn_like(expected)
    for ours, theirs in zip(*(torch.autograd.grad(each, inputs, upstream) for each in (output, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_distances_are_on_a_logarithmic_scale() -> None:
    rows = RelativeEmbedding(4, span=8, max_distance=64)(100).rows[:, 0] - 8  # distance i of query i to key 0
    assert rows[:5].tolist() == [0, 1, 2, 3, 4]
    assert (rows.diff() >= 0).all()
    assert rows[63] == 7
    assert rows[99] == 7


def test_unsupported_calls_raise() -> None:
    x = torch.randn(1, 5, 12)
    relative = RelativeEmbedding(12, span=2, max_distance=2)
    context = LayerContext(relative=relative(5))
    with pytest.raises(ValueError, match="span must be at least 2, got 1"):
        RelativeEmbedding(12, span=1, max_distance=4)
    with pytest.raises(ValueError, match="without a cache"):
        MultiHeadAttention(12, 2)(x, context=context, cache=Cache())
    with pytest.raises(ValueError, match="equally many heads"):
        MultiHeadAttention(12, 2, kv_heads=1)(x, context=context)
    with pytest.raises(ValueError, match=r"needs the score Dot\(\) without a softcap"):
        MultiHeadAttention(12, 2, attend=rg.Attention(rg.Dot(softcap=2.0)))(x, context=context)
    block = Block(MultiHeadAttention(12, 2), FeedForward(12, 16), residual=lambda: PreNorm(12))
    encoder = Encoder([block], relative=relative)
    with pytest.raises(ValueError, match="without a cache"):
        encoder(x, cache=encoder.cache())
