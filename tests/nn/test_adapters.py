"""Linear layers inside of modules are called as modules: hooks see them, and adapters can replace them."""

import copy

import pytest
import torch
from torch import nn

import regard as rg
from regard.engines import native

X, SOURCE = torch.randn(2, 5, 32), torch.randn(2, 7, 32)


class Adapter(nn.Module):
    """A low-rank addition to a linear layer, with the attributes of the layer, as in `peft`."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base
        self.down, self.up = torch.randn(rank, base.in_features), torch.randn(base.out_features, rank)
        self.in_features, self.out_features = base.in_features, base.out_features

    @property
    def weight(self):
        return self.base.weight

    @property
    def bias(self):
        return self.base.bias

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


def disentangled(layer):
    relative = rg.nn.RelativeEmbedding(32, span=4, max_distance=4)
    context = rg.nn.LayerContext().with_relative(relative(5))
    return layer(X, context=context)


def across_layers(layers):
    context = rg.nn.LayerContext()
    return layers[1](layers[0](X, context=context), context=context)


def layers_that_share_keys():
    first = rg.nn.MultiHeadAttention(32, 4)
    return nn.ModuleList([first, rg.nn.CrossLayerAttention(first)])


LAYERS = {
    "self": (lambda: rg.nn.MultiHeadAttention(32, 4, rotary=rg.nn.Rotary()), lambda layer: layer(X)),
    "norms": (
        lambda: rg.nn.MultiHeadAttention(32, 4, query_norm=nn.RMSNorm(8), key_norm=nn.RMSNorm(8)),
        lambda layer: layer(X),
    ),
    "cross": (lambda: rg.nn.MultiHeadAttention(32, 4), lambda layer: layer(X, SOURCE)),
    "source": (lambda: rg.nn.MultiHeadAttention(32, 4, d_source=16), lambda layer: layer(X, SOURCE[..., :16])),
    "key positions": (
        lambda: rg.nn.MultiHeadAttention(32, 4),
        lambda layer: layer(X, context=rg.nn.LayerContext(query_position=X, key_position=X)),
    ),
    "disentangled": (lambda: rg.nn.MultiHeadAttention(32, 4), disentangled),
    "across layers": (layers_that_share_keys, across_layers),
    "gate": (lambda: rg.nn.MultiHeadAttention(32, 4, gate=rg.nn.OutputGate(32, 32)), lambda layer: layer(X)),
    "latent": (lambda: rg.nn.LatentAttention(32, 4, d_latent=8, d_query_latent=8), lambda layer: layer(X)),
    "differential": (lambda: rg.nn.DifferentialAttention(32, 2), lambda layer: layer(X)),
    "talking heads": (lambda: rg.nn.TalkingHeadsAttention(32, 4), lambda layer: layer(X)),
    "feed-forward": (lambda: rg.nn.FeedForward(32, 64), lambda layer: layer(X)),
    "gated": (lambda: rg.nn.GatedFeedForward(32, 64), lambda layer: layer(X)),
    "experts": (
        lambda: rg.nn.Experts(32, 64, count=4, per_token=2, shared=rg.nn.FeedForward(32, 64), shared_gate=True),
        lambda layer: layer(X),
    ),
    "delta": (lambda: rg.nn.GatedDeltaNet(32, heads=2), lambda layer: layer(X)),
}  # fmt: skip


def linear_layers(module):
    return {name: part for name, part in module.named_modules() if type(part) is nn.Linear}


@pytest.mark.parametrize("name", LAYERS)
def test_hooks_of_linear_layers_are_called(name):
    build, call = LAYERS[name]
    torch.manual_seed(0)
    layer, seen = build().eval(), set()
    torch.manual_seed(1)
    before = call(layer)
    for part, module in linear_layers(layer).items():
        module.register_forward_hook(lambda *_, part=part: seen.add(part))
    torch.manual_seed(1)
    torch.testing.assert_close(call(layer), before)
    assert seen == linear_layers(layer).keys()


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("frozen", [False, True])
@torch.no_grad()
def test_adapters_add_to_linear_layers(name, frozen):
    if frozen and native.why_missing():
        pytest.skip("needs the compiled library")
    build, call = LAYERS[name]
    torch.manual_seed(0)
    layer = build().eval()
    merged = copy.deepcopy(layer)
    if frozen:
        rg.nn.freeze(layer)
    for part, module in linear_layers(layer).items():
        adapter = Adapter(module)
        layer.set_submodule(part, adapter)
        merged.get_submodule(part).weight += adapter.up @ adapter.down
    torch.manual_seed(1)
    output = call(layer)
    torch.manual_seed(1)
    torch.testing.assert_close(output, call(merged), rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(bool(native.why_missing()), reason="needs the compiled library")
@pytest.mark.parametrize("place", ["attention.qkv", "attention.output", "feedforward.up", "feedforward.output"])
@torch.no_grad()
def test_a_frozen_stack_runs_modules_that_replace_linear_layers(place):
    blocks = [
        rg.nn.Block(rg.nn.MultiHeadAttention(32, 4), rg.nn.FeedForward(32, 64), residual=lambda: rg.nn.PreNorm(32))
        for _ in range(2)
    ]
    stack = rg.nn.Encoder(blocks).eval()
    merged = copy.deepcopy(stack)
    rg.nn.freeze(stack)
    base = stack.layers[1].get_submodule(place)
    adapter = nn.Sequential(base, nn.Tanh())  # without the attributes of a linear layer
    stack.layers[1].set_submodule(place, adapter)
    merged.layers[1].set_submodule(place, nn.Sequential(merged.layers[1].get_submodule(place), nn.Tanh()))
    torch.testing.assert_close(stack(X), merged(X), rtol=1e-4, atol=1e-4)
