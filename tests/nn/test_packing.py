"""Packed batches: the results of padded batches, at the cost of the sequences alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import regard as rg
from regard.nn import (
    AttentionPooling,
    Block,
    Decoder,
    Encoder,
    FeedForward,
    First,
    LayerContext,
    Max,
    Mean,
    MultiHeadAttention,
    PostNorm,
    RelativeBias,
    Rotary,
)

LENGTHS = (5, 1, 9, 3)


def block(cross: bool = False, **attend) -> Block:
    own = MultiHeadAttention(16, heads=2, rotary=Rotary(), attend=rg.Attention(**attend))
    other = MultiHeadAttention(16, heads=2, attend=rg.Attention(offset=0)) if cross else None
    return Block(own, FeedForward(16, 32), cross=other, residual=lambda: PostNorm(16))


def padded(packed: rg.Packed) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(rg.unpack(packed), batch_first=True)


def test_unpack_inverts_pack() -> None:
    sequences = [torch.randn(n, 3) for n in LENGTHS]
    packed = rg.pack(sequences)
    assert packed.lengths == LENGTHS
    assert len(packed) == 4
    assert packed.positions.tolist() == [*range(5), 0, *range(9), *range(3)]
    for ours, came in zip(rg.unpack(packed), sequences, strict=True):
        assert torch.equal(ours, came)


@pytest.mark.parametrize("mask", [None, rg.causal(), rg.causal() & rg.window(2, 0)])
@pytest.mark.parametrize("relative", [False, True])
def test_packed_batches_match_padded_ones_and_their_gradients(mask, relative: bool) -> None:
    torch.manual_seed(0)
    encoder = Encoder([block(mask=mask) for _ in range(2)], bias=RelativeBias(2) if relative else None)
    packed = rg.pack([torch.randn(n, 16) for n in LENGTHS])
    ours = encoder(packed.values[None], context=LayerContext(packed.mask, positions=packed.positions))[0]
    real = torch.arange(9) < torch.tensor(LENGTHS)[:, None]
    theirs = encoder(padded(packed), mask=rg.padding(LENGTHS))[real]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    for actual, their in zip(
        torch.autograd.grad(ours.square().sum(), list(encoder.parameters())),
        torch.autograd.grad(theirs.square().sum(), list(encoder.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(actual, their, rtol=1e-4, atol=1e-4)


def test_packed_targets_attend_to_their_own_sources() -> None:
    torch.manual_seed(0)
    decoder = Decoder([block(cross=True, mask=rg.causal()) for _ in range(2)])
    target, source = (rg.pack([torch.randn(n, 16) for n in lengths]) for lengths in (LENGTHS, (2, 7, 4, 6)))
    shared = LayerContext(target.mask, positions=target.positions)
    ours = decoder(target.values[None], source.values[None], context=shared, source_mask=target.cross_mask(source))[0]
    real = torch.arange(9) < torch.tensor(LENGTHS)[:, None]
    theirs = decoder(padded(target), padded(source), source_mask=rg.padding((2, 7, 4, 6)))[real]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_a_thousand_sentences_cost_about_the_sum_of_their_squares() -> None:
    lengths = np.random.default_rng(0).integers(10, 31, 1000)
    packed = rg.pack([torch.zeros(n) for n in lengths])
    intervals = packed.mask.intervals(rg.geometry.Frame(1, 1, len(packed.values), len(packed.values), 0))
    assert intervals is not None  # so that the kernels skip by six rows and sixteen keys
    assert int((intervals[1] - intervals[0]).sum()) == int((lengths**2).sum())
    x = torch.empty(1, 1, len(packed.values), 8)
    assert rg.Attention(mask=packed.mask).explain(x, x, x).tiles[0] < 4 * len(packed.values) / 64


@pytest.mark.parametrize("pooling", [Mean(), Max(), First(), AttentionPooling(6)])
def test_poolings_of_padded_and_packed_batches_agree(pooling: nn.Module) -> None:
    packed = rg.pack([torch.randn(n, 6) for n in LENGTHS])
    real = torch.arange(9) < torch.tensor(LENGTHS)[:, None]
    filled = padded(packed)
    filled[~real] = 99.0
    torch.testing.assert_close(pooling(packed), pooling(filled, real), rtol=0, atol=1e-5)
    alone = torch.cat([pooling(sequence[None]) for sequence in rg.unpack(packed)])
    torch.testing.assert_close(pooling(packed), alone, rtol=0, atol=1e-5)


def test_invalid_inputs_of_packing_raise() -> None:
    with pytest.raises(TypeError, match="list of at least one tensor"):
        rg.pack(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="differ in n only"):
        rg.pack([torch.zeros(2, 3), torch.zeros(2, 4)])
    with pytest.raises(TypeError, match=r"must be a batch built by regard\.pack"):
        rg.unpack([torch.zeros(2)])
    with pytest.raises(ValueError, match="same number of sequences, got 1 and 2"):
        rg.pack([[1], [2]]).cross_mask(rg.pack([[1]]))
    with pytest.raises(ValueError, match="sum to the 3 packed tokens, but sum to 2"):
        rg.Packed(torch.zeros(3), (1, 1))
