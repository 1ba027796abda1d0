"""Multi-head latent attention against its definition; caches, padding, packing, frozen and captured layers."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import Tensor

import regard as rg
import regard.view
from tests.nn.test_positions_and_caches import MASKS, STEPS, N, close, seen_so_far, spans

H = 4
BIASES = {"none": None, "alibi": rg.alibi(H), "relative": rg.relative(torch.linspace(-1, 1, 7 * H).double().view(7, H))}


def build(mask: str = "causal", **options: object) -> rg.nn.LatentAttention:
    torch.manual_seed(0)
    attend = options.pop("attend", rg.Attention(mask=MASKS[mask], bias=BIASES[str(options.pop("bias_kind", "none"))]))
    sizes = {"d_latent": 6, "d_query_latent": 10, "d_head": 6, "d_rotary": 4, "d_value": 5}
    layer = rg.nn.LatentAttention(16, H, attend=attend, **(sizes | options)).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for norm in (layer.norm, layer.query_norm):
            if norm is not None:
                norm.weight.uniform_(0.5, 1.5)
    return layer.eval()


def rotate(x: Tensor, position: int) -> Tensor:
    """Rotate pairs of neighbours of x (d,) by the angles of its position."""
    out = []
    for pair in range(len(x) // 2):
        angle = position * 10000.0 ** (-2 * pair / len(x))
        a, b = x[2 * pair], x[2 * pair + 1]
        out += [a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)]
    return torch.stack(out)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def definition(layer: rg.nn.LatentAttention, x: Tensor, allowed: Tensor) -> Tensor:
    """Head by head and token by token, for one sequence x (N, d_model) and a mask (N, N)."""
    inputs = x
    if layer.query_down is not None:
        assert layer.query_norm is not None
        inputs = rms(x @ layer.query_down.weight.T, layer.query_norm.weight)
    queries = inputs @ layer.query.weight.T
    down = x @ layer.down.weight.T
    latents = rms(down[:, : layer.d_latent], layer.norm.weight)
    d_query, d_up = layer.d_head + layer.d_rotary, layer.d_head + layer.d_value
    heads = []
    for h in range(layer.heads):
        up = layer.up[h * d_up : (h + 1) * d_up]
        q = queries[:, h * d_query : (h + 1) * d_query]
        q = torch.stack([torch.cat([row[: layer.d_head], rotate(row[layer.d_head :], n)]) for n, row in enumerate(q)])
        k = torch.stack(
            [torch.cat([up[: layer.d_head] @ latents[n], rotate(down[n, layer.d_latent :], n)]) for n in range(len(x))]
        )
        scores = (q @ k.T / math.sqrt(d_query)).masked_fill(~allowed, -math.inf)
        heads.append(scores.softmax(-1) @ (latents @ up[layer.d_head :].T))
    return torch.cat(heads, -1) @ layer.output.weight.T


@pytest.mark.parametrize("absorb", [False, True, None])
@pytest.mark.parametrize("compressed", [8, None])
def test_both_forms_and_their_gradients_equal_the_definition(absorb: bool | None, compressed: int | None) -> None:
    layer = build(absorb=absorb, d_query_latent=compressed)
    x = torch.randn(1, 9, 16, dtype=torch.float64, requires_grad=True)
    expected = definition(layer, x[0], torch.ones(9, 9).tril().bool())[None]
    actual = layer(x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    inputs, upstream = (x, *layer.parameters()), torch.randn_like(actual)
    for ours, theirs in zip(*(torch.autograd.grad(y, inputs, upstream) for y in (actual, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("mask", MASKS)
@torch.no_grad()
def test_it_decodes_the_same_as_a_full_pass_in_every_form(mask: str, bias: str) -> None:
    x = torch.randn(2, N, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    for steps in STEPS:
        expected = build(mask, bias_kind=bias, absorb=False)(x, mask=seen_so_far(steps))
        for absorb in (False, True, None):
            layer = build(mask, bias_kind=bias, absorb=absorb)
            cache = layer.cache()
            close(torch.cat([layer(x[:, at], cache=cache) for at in spans(steps)], 1), expected)
            assert cache.seen_tokens == N
            held = sum(tensor.shape[1] * tensor.shape[3] for tensor in cache._held)
            assert held == layer.d_latent + layer.d_rotary, "the cache holds one latent and one rotated key per token"


@pytest.mark.parametrize("absorb", [False, True])
def test_padding_and_packing_equal_separate_calls(absorb: bool) -> None:
    layer, x = build(absorb=absorb), torch.randn(2, 8, 16, dtype=torch.float64)
    short = layer(x[1:, :5])
    padded = x.clone()
    padded[1, 5:] = torch.nan
    torch.testing.assert_close(layer(padded, mask=rg.padding([8, 5]))[1:, :5], short)
    left = torch.cat([torch.full_like(x[1:, :3], torch.nan), x[1:, :5]], 1)
    context = rg.nn.LayerContext(~rg.padding([3]), positions=(torch.arange(8) - 3).clamp(min=0))
    torch.testing.assert_close(layer(left, context=context)[:, 3:], short)
    packed = rg.pack([x[0], x[1, :5]])
    both = layer(packed.values[None], mask=packed.mask, positions=packed.positions)[0].split(packed.lengths)
    torch.testing.assert_close(both[0], layer(x[:1])[0])
    torch.testing.assert_close(both[1], short[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@torch.no_grad()
def test_a_cache_in_fewer_bytes_is_near_in_both_forms(dtype: torch.dtype) -> None:
    x = torch.randn(1, 20, 16)
    actual = []
    for absorb in (False, True):
        layer = build(absorb=absorb).float()
        cache = layer.cache(dtype=dtype)
        actual.append(torch.cat([layer(part, cache=cache) for part in x.split(7, 1)], 1))
        assert (actual[-1] - layer(x)).abs().max() < 0.05 * layer(x).abs().max()
    torch.testing.assert_close(*actual, rtol=0, atol=1e-5)


@torch.no_grad()
def test_copied_saved_and_compiled_layers_are_the_same() -> None:
    layer, x = build().float(), torch.randn(1, 5, 16)
    expected = layer(x)
    assert "up" in layer.state_dict()
    assert "Rotary" not in repr(layer)
    assert repr(layer).startswith("LatentAttention(")
    torch.testing.assert_close(copy.deepcopy(layer)(x), expected)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = rg.nn.LatentAttention(16, H, d_latent=6, d_query_latent=10, d_head=6, d_rotary=4, d_value=5,
                                  attend=rg.Attention(mask=rg.causal()))  # fmt: skip
    other.load_state_dict(torch.load(file))
    torch.testing.assert_close(other(x), expected)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = rg.nn.Encoder(
            [
                rg.nn.Block(build().float(), rg.nn.FeedForward(16, 16), residual=lambda: rg.nn.PreNorm(16))
                for _ in range(2)
            ]
        )

    def forward(self, x: Tensor, cache: list | None = None) -> Tensor:
        return self.stack(x, cache=cache)


@torch.no_grad()
def test_a_record_of_a_generation_has_the_weights_of_a_full_pass() -> None:
    model, x = Model().eval(), torch.randn(1, 9, 16)
    with rg.view.capture(model) as whole:
        model(x)
    assert len(whole.attentions) == 2
    cache = model.stack.cache()
    with rg.view.capture(model) as steps:
        for part in x.split([6, 1, 2], 1):
            model(part, cache)
    for layer in range(2):
        torch.testing.assert_close(steps.weights(layer, head=1), whole.weights(layer, head=1))


def test_unsupported_options_raise() -> None:
    x = torch.randn(1, 4, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"LatentAttention needs the score Dot\(\), got Cosine"):
        build(attend=rg.Attention(score=rg.Cosine()))
    shaw = rg.shaw(torch.zeros(5, 10, dtype=torch.float64))
    with pytest.raises(ValueError, match="may depend on queries or values"):
        build()(x, bias=shaw)
    with pytest.raises(ValueError, match="may depend on queries or values"):
        build(attend=rg.Attention(bias=shaw + rg.alibi(H)))(x)
    with pytest.raises(ValueError, match="d_rotary must be even"):
        build(d_rotary=3)
    with pytest.raises(ValueError, match="rotary rotates 2 channels, but d_rotary = 4"):
        build(rotary=rg.nn.Rotary(d_rotary=2))
    with pytest.raises(TypeError, match="cache must be a Cache, got CrossCache"):
        build()(x, cache=rg.nn.CrossCache())
    with pytest.raises(ValueError, match="does not support the query_position"):
        build()(x, context=rg.nn.LayerContext(query_position=x))
    with pytest.raises(ValueError, match="positions are used by rotary embeddings only"):
        build(rotary=None)(x, positions=torch.arange(4))
    with pytest.raises(ValueError, match="is not a multiple of heads = 3"):
        rg.nn.LatentAttention(16, 3, d_latent=4)
