"""Blocks and stacks: arrangements, initialisation, checkpointing, decoders with and without a cache."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard as rg
from regard.nn import (
    Block,
    Decoder,
    Encoder,
    FeedForward,
    GatedFeedForward,
    LayerContext,
    MultiHeadAttention,
    PostNorm,
    PreNorm,
    RelativeBias,
    SandwichNorm,
    UnitRMSNorm,
)


def stack(residual, layers: int = 2, width: int = 16, feedforward=FeedForward, **options) -> Encoder:
    return Encoder(
        [
            Block(MultiHeadAttention(width, heads=4), feedforward(width, 4 * width), residual=lambda: residual(width))
            for _ in range(layers)
        ],
        **options,
    )


@pytest.mark.parametrize("residual", [PreNorm, PostNorm, SandwichNorm])
@pytest.mark.parametrize("feedforward", [FeedForward, GatedFeedForward])
def test_activations_keep_their_variance_over_24_layers(residual, feedforward) -> None:
    torch.manual_seed(0)
    encoder, x = stack(residual, 24, 64, feedforward), torch.randn(4, 32, 64)
    variances = []
    for layer in encoder.layers:
        layer.register_forward_hook(lambda module, inputs, out: variances.append(float(out.var())))
    with torch.no_grad():
        encoder(x)
    assert len(variances) == 24
    assert min(variances) > 0.5
    assert max(variances) < 3


def test_residual_arrangements_match_their_definitions() -> None:
    torch.manual_seed(0)
    x, double = torch.randn(3, 8), lambda y: 2 * y + 1
    norm = lambda y: F.layer_norm(y, (8,))  # noqa: E731
    torch.testing.assert_close(PreNorm(8)(x, double), x + double(norm(x)))
    torch.testing.assert_close(PostNorm(8)(x, double), norm(x + double(x)))
    torch.testing.assert_close(SandwichNorm(8)(x, double), x + norm(double(norm(x))))


def test_unit_rms_norm_multiplies_by_one_plus_weight() -> None:
    norm, x = UnitRMSNorm(8), torch.randn(3, 8)
    nn.init.normal_(norm.weight)
    expected = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + norm.weight)
    torch.testing.assert_close(norm(x), expected)


def test_checkpointing_does_not_change_gradients() -> None:
    torch.manual_seed(0)
    encoder, x = stack(PreNorm, bias=RelativeBias(4)), torch.randn(2, 6, 16)
    plain = torch.autograd.grad(encoder(x, mask=rg.padding([6, 4])).square().sum(), list(encoder.parameters()))
    encoder.checkpointing = True
    again = torch.autograd.grad(encoder(x, mask=rg.padding([6, 4])).square().sum(), list(encoder.parameters()))
    for a, b in zip(plain, again, strict=True):
        torch.testing.assert_close(a, b)


def test_a_repeated_layer_runs_again_with_the_same_weights() -> None:
    encoder, x = stack(PostNorm, 1, repeat=3).eval(), torch.randn(2, 6, 16)
    (layer,) = encoder.layers
    torch.testing.assert_close(encoder(x), layer(layer(layer(x))))


def test_one_relative_bias_is_shared_by_all_layers_and_trained() -> None:
    encoder, x = stack(PreNorm, bias=RelativeBias(4)), torch.randn(2, 6, 16)
    without = stack(PreNorm)
    without.load_state_dict({k: v for k, v in encoder.state_dict().items() if not k.startswith("bias")})
    table = encoder.bias.table
    torch.testing.assert_close(encoder(x), without(x, context=LayerContext(bias=rg.t5(table))))
    encoder(x).square().sum().backward()
    assert table.grad is not None
    assert bool(table.grad.any())


def test_a_cached_decoder_matches_an_uncached_one() -> None:
    torch.manual_seed(0)
    blocks = [
        Block(
            MultiHeadAttention(16, heads=4, attend=rg.Attention(rg.Dot(scale=1.0), rg.causal())),
            FeedForward(16, 32, activation=torch.relu, bias=False),
            cross=MultiHeadAttention(16, heads=4, attend=rg.Attention(offset=0)),
            residual=lambda: PreNorm(16, nn.RMSNorm),
        )
        for _ in range(3)
    ]
    decoder = Decoder(blocks, norm=nn.RMSNorm(16), bias=RelativeBias(4, bidirectional=False)).eval()
    x, source, mask = torch.randn(2, 7, 16), torch.randn(2, 5, 16), rg.padding([5, 3])
    with torch.no_grad():
        expected, cache = decoder(x, source, source_mask=mask), decoder.cache()
        decoded = [decoder(x[:, :3], source, source_mask=mask, cache=cache)]
        decoded += [decoder(x[:, n : n + 1], source_mask=mask, cache=cache) for n in range(3, 7)]
    torch.testing.assert_close(torch.cat(decoded, 1), expected, rtol=0, atol=1e-5)


def test_unit_rms_norm_keeps_small_weights_in_bfloat16() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(50, 64).bfloat16(), (0.003 * torch.randn(64)).bfloat16()
    norm = rg.nn.UnitRMSNorm(64).bfloat16()
    with torch.no_grad():
        norm.weight.copy_(weight)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight.double())
    assert (norm(x) == exact.bfloat16()).double().mean() > 0.99
