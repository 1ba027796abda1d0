"""Set and graph layers, compared with their definitions in float64, packed and padded."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import regard as rg
from regard.nn import (
    CrossBlock,
    FeedForward,
    GraphAttention,
    InducedBlock,
    Last,
    MultiHeadAttention,
    PostNorm,
    SeedPooling,
)


def block(width: int = 12) -> CrossBlock:
    attention = MultiHeadAttention(width, heads=3, attend=rg.Attention(offset=0))
    return CrossBlock(attention, FeedForward(width, 20), residual=lambda: PostNorm(width)).double()


def plain(block: CrossBlock, x: Tensor, source: Tensor) -> Tensor:
    """Reference in plain torch for one x (Q, d_model) and one source (K, d_model)."""
    attention = block.cross
    assert isinstance(attention, MultiHeadAttention)
    wq, wk, wv = attention.qkv.weight.chunk(3)
    bq, bk, bv = attention.qkv.bias.chunk(3)
    q, k, v = (
        (F.linear(y, w, b)).unflatten(-1, (3, 4)).transpose(0, 1)
        for y, w, b in ((x, wq, bq), (source, wk, bk), (source, wv, bv))
    )
    mixed = ((q @ k.mT / 2).softmax(-1) @ v).transpose(0, 1).flatten(1)
    x = block.cross_residual.norm(x + attention.output(mixed))
    return block.feedforward_residual.norm(x + block.feedforward(x))


def test_induced_block_matches_its_definition() -> None:
    torch.manual_seed(0)
    layer, sets = InducedBlock(12, 4, block(), block()).double(), [torch.randn(n, 12).double() for n in (5, 1, 9)]
    pooled = rg.unpack(layer(rg.pack(sets)))
    for one, actual in zip(sets, pooled, strict=True):
        expected = plain(layer.spread, one, plain(layer.gather.block, layer.gather.seeds, one))
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_seed_pooling_matches_its_definition() -> None:
    torch.manual_seed(0)
    pooling, sets = SeedPooling(12, 3, block()).double(), [torch.randn(n, 12).double() for n in (5, 1, 9)]
    pooled = pooling(rg.pack(sets))
    assert pooled.shape == (3, 3, 12)
    for one, actual in zip(sets, pooled, strict=True):
        torch.testing.assert_close(actual, plain(pooling.block, pooling.seeds, one), rtol=0, atol=1e-12)


def test_padded_and_packed_sets_agree() -> None:
    torch.manual_seed(0)
    layer, pooling = InducedBlock(12, 4, block(), block()).double(), SeedPooling(12, 2, block()).double()
    sets = [torch.randn(n, 12).double() for n in (5, 1, 9)]
    padded = torch.full((3, 9, 12), torch.nan).double()
    mask = torch.arange(9) < torch.tensor([5, 1, 9])[:, None]
    padded[mask] = torch.cat(sets)
    torch.testing.assert_close(layer(padded, mask)[mask], layer(rg.pack(sets)).values, rtol=0, atol=1e-12)
    torch.testing.assert_close(pooling(padded, mask), pooling(rg.pack(sets)), rtol=0, atol=1e-12)


def test_the_last_real_token_is_pooled() -> None:
    x = torch.arange(24.0).view(2, 4, 3)
    mask = torch.tensor([[True, True, False, False], [False, True, True, True]])
    torch.testing.assert_close(Last()(x, mask), torch.stack((x[0, 1], x[1, 3])))
    torch.testing.assert_close(Last()(x), x[:, 3])
    torch.testing.assert_close(Last()(rg.pack([x[0, :2], x[1]])), torch.stack((x[0, 1], x[1, 3])))


def test_graph_attention_matches_its_definition() -> None:
    torch.manual_seed(0)
    layer, x = GraphAttention(12, heads=3).double(), torch.randn(1, 6, 12).double()
    near = torch.tensor([[0, 0, 1, 2, 2, 2, 4, 5], [0, 3, 2, 2, 4, 5, 0, 5]])  # node 3 has no neighbours
    q, k, v = layer.qkv(x[0]).unflatten(-1, (3, 3, 4)).permute(1, 2, 0, 3)  # (heads, N, 4)
    scores = torch.einsum("hd,hijd->hij", layer.weight, (q[:, :, None] + k[:, None]).tanh())
    neighbours = torch.zeros(6, 6).bool()
    neighbours[near[0], near[1]] = True
    weights = scores.masked_fill(~neighbours, -torch.inf).softmax(-1).nan_to_num(0.0)
    expected = layer.output((weights @ v).transpose(0, 1).flatten(1))
    torch.testing.assert_close(layer(x, mask=rg.edges(near))[0], expected, rtol=0, atol=1e-12)
