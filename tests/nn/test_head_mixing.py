"""Differential attention, talking heads, gates and shared keys against their definitions, and in every use."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard as rg
import regard.view
from tests.nn.test_positions_and_caches import MASKS, STEPS, N, close, seen_so_far, spans

D = 16
HEADS = 4  # softmaxes of each layer


def with_noise(layer: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return layer.double().eval()


def differential(attend: rg.Attention, rotary: rg.nn.Rotary | None = None) -> rg.nn.DifferentialAttention:
    layer = rg.nn.DifferentialAttention(D, 2, kv_heads=1, d_head=6, lambda_init=0.4, attend=attend, rotary=rotary)
    return with_noise(layer)  # type: ignore[return-value]


def talking(attend: rg.Attention, rotary: rg.nn.Rotary | None = None) -> rg.nn.TalkingHeadsAttention:
    layer = rg.nn.TalkingHeadsAttention(D, HEADS, d_head=6, d_value=5, attend=attend, rotary=rotary)
    return with_noise(layer)  # type: ignore[return-value]


def gated(attend: rg.Attention, rotary: rg.nn.Rotary | None = None, per_head: bool = False) -> rg.nn.MultiHeadAttention:
    gate = rg.nn.OutputGate(D, HEADS if per_head else HEADS * 5, bias=True)
    layer = rg.nn.MultiHeadAttention(D, HEADS, kv_heads=2, d_head=6, d_value=5, attend=attend, rotary=rotary, gate=gate)
    return with_noise(layer)  # type: ignore[return-value]


def gated_per_head(attend: rg.Attention, rotary: rg.nn.Rotary | None = None) -> rg.nn.MultiHeadAttention:
    return gated(attend, rotary, per_head=True)


LAYERS: dict[str, Callable] = {
    "differential": differential, "talking": talking, "gated": gated, "gated per head": gated_per_head,
}  # fmt: skip
layers = pytest.mark.parametrize("name", LAYERS)


def affine(layer: torch.nn.Linear, x: Tensor) -> Tensor:
    return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)


def softmaxes(q: list[Tensor], k: list[Tensor], allowed: Tensor) -> list[Tensor]:
    return [
        (a @ b.T / math.sqrt(a.shape[1])).masked_fill(~allowed, -math.inf).softmax(-1)
        for a, b in zip(q, k, strict=True)
    ]


def define_differential(layer: rg.nn.DifferentialAttention, x: Tensor, allowed: Tensor) -> Tensor:
    d, out = layer.d_head, []
    q, k, v = affine(layer.qkv, x).split([4 * d, 2 * d, 2 * d], -1)
    a1, b1, a2, b2 = layer.lambdas
    share = torch.exp(a1 @ b1) - torch.exp(a2 @ b2) + 0.4
    for h in range(2):
        first, second = softmaxes(
            [q[:, 2 * h * d : (2 * h + 1) * d], q[:, (2 * h + 1) * d : (2 * h + 2) * d]], [k[:, :d], k[:, d:]], allowed
        )
        head = (first - share * second) @ v
        head = head / (head.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.norm.weight
        out.append(head * (1 - 0.4))
    return affine(layer.output, torch.cat(out, -1))


def define_talking(layer: rg.nn.TalkingHeadsAttention, x: Tensor, allowed: Tensor) -> Tensor:
    q, k, v = (part.chunk(HEADS, -1) for part in affine(layer.qkv, x).split([24, 24, 20], -1))
    scores = [a @ b.T / math.sqrt(6) for a, b in zip(q, k, strict=True)]
    mixed = [sum(layer.score_mix[h, g] * scores[g] for g in range(HEADS)) for h in range(HEADS)]
    weights = [score.masked_fill(~allowed, -math.inf).softmax(-1) for score in mixed]
    again = [sum(layer.weight_mix[h, g] * weights[g] for g in range(HEADS)) for h in range(HEADS)]
    return affine(layer.output, torch.cat([w @ value for w, value in zip(again, v, strict=True)], -1))


def define_gated(layer: rg.nn.MultiHeadAttention, x: Tensor, allowed: Tensor) -> Tensor:
    q, k, v = affine(layer.qkv, x).split([24, 12, 10], -1)
    k, v = ([part for part in each.chunk(2, -1) for _ in range(2)] for each in (k, v))
    heads = [w @ value for w, value in zip(softmaxes(q.chunk(4, -1), k, allowed), v, strict=True)]
    gate = 1 / (1 + torch.exp(-affine(layer.gate.projection, x)))
    if gate.shape[1] == HEADS:
        gate = gate.repeat_interleave(5, 1)
    return affine(layer.output, torch.cat(heads, -1) * gate)


DEFINITIONS: dict[str, Callable] = {
    "differential": define_differential, "talking": define_talking, "gated": define_gated,
    "gated per head": define_gated,
}  # fmt: skip


@layers
def test_outputs_and_gradients_equal_the_definition(name: str) -> None:
    layer = LAYERS[name](rg.Attention(mask=rg.causal()))
    x = torch.randn(1, 9, D, dtype=torch.float64, requires_grad=True)
    actual, expected = layer(x), DEFINITIONS[name](layer, x[0], torch.ones(9, 9).tril().bool())[None]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    inputs, upstream = (x, *layer.parameters()), torch.randn_like(actual)
    for ours, theirs in zip(*(torch.autograd.grad(y, inputs, upstream) for y in (actual, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("mask", MASKS)
@layers
@torch.no_grad()
def test_a_layer_decodes_the_same_as_a_full_pass(name: str, mask: str) -> None:
    x = torch.randn(2, N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    for bias in (None, rg.alibi(HEADS)):
        layer = LAYERS[name](rg.Attention(mask=MASKS[mask], bias=bias), rg.nn.Rotary())
        for steps in STEPS:
            cache = layer.cache()
            close(
                torch.cat([layer(x[:, at], cache=cache) for at in spans(steps)], 1), layer(x, mask=seen_so_far(steps))
            )


@layers
def test_padding_packing_and_a_source(name: str) -> None:
    layer, x = LAYERS[name](rg.Attention(mask=rg.causal()), rg.nn.Rotary()), torch.randn(2, 8, D, dtype=torch.float64)
    short = layer(x[1:, :5])
    padded = x.clone()
    padded[1, 5:] = torch.nan
    torch.testing.assert_close(layer(padded, mask=rg.padding([8, 5]))[1:, :5], short)
    packed = rg.pack([x[0], x[1, :5]])
    both = layer(packed.values[None], mask=packed.mask, positions=packed.positions)[0].split(packed.lengths)
    torch.testing.assert_close(both[0], layer(x[:1])[0])
    torch.testing.assert_close(both[1], short[0])
    cross = LAYERS[name](rg.Attention(offset=0))
    source, cache = torch.randn(2, 6, D, dtype=torch.float64), rg.nn.CrossCache()
    expected = cross(x, source)
    torch.testing.assert_close(cross(x[:, :3], source, cache=cache), expected[:, :3])
    beams = x[:, 3:].repeat_interleave(2, 0)
    torch.testing.assert_close(cross(beams, cache=cache), expected[:, 3:].repeat_interleave(2, 0))


@layers
@torch.no_grad()
def test_frozen_copied_saved_captured_and_compiled_layers_are_the_same(name: str) -> None:
    layer, x = LAYERS[name](rg.Attention(mask=rg.causal())).float(), torch.randn(1, 7, D)
    expected = layer(x)
    assert type(layer).__name__ in repr(layer)
    torch.testing.assert_close(copy.deepcopy(layer)(x), expected)
    other = LAYERS[name](rg.Attention(mask=rg.causal())).float()
    for parameter in other.parameters():
        parameter.zero_()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), expected)
    with rg.view.capture(layer) as record:
        assert torch.equal(layer(x), expected)
    assert record.attentions[0].heads == HEADS
    assert record.weights(0, head=3).shape == (7, 7)
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), expected)
    for dtype in (torch.bfloat16, torch.int8):
        cache = layer.cache(dtype=dtype)
        near = torch.cat([layer(part, cache=cache) for part in x.split(3, 1)], 1)
        assert (near - expected).abs().max() < 0.05 * expected.abs().max()


CAUSAL = rg.Attention(mask=rg.causal())
PACKED: dict[str, Callable] = {  # of a size that `freeze` packs
    "differential": lambda: rg.nn.DifferentialAttention(64, 2, attend=CAUSAL),
    "talking": lambda: rg.nn.TalkingHeadsAttention(64, 2, attend=CAUSAL),
    "gated": lambda: rg.nn.MultiHeadAttention(64, 4, attend=CAUSAL, gate=rg.nn.OutputGate(64, 64)),
    "latent": lambda: rg.nn.LatentAttention(
        64, 2, d_latent=16, d_query_latent=64, d_head=24, d_rotary=8, d_value=32, attend=CAUSAL
    ),
}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("weights", ["float32", "int8"])
@torch.no_grad()
def test_frozen_layers_and_stacks_compute_the_same(name: str, weights: str) -> None:
    torch.manual_seed(0)
    block = rg.nn.Block(PACKED[name](), rg.nn.FeedForward(64, 64), residual=lambda: rg.nn.PreNorm(64))
    stack, x = rg.nn.Encoder([block]).eval(), torch.randn(1, 6, 64)
    expected = stack(x)
    unpacked = rg.nn.freeze(stack, weights=weights)
    assert not any("query" in each or "qkv" in each or "output" in each for each in unpacked), unpacked
    error = 0.05 if weights == "int8" else 1e-5
    with torch.inference_mode():
        assert (stack(x) - expected).abs().max() < error
        cache = stack.cache()
        steps = [stack(part, cache=cache) for part in x.split([4, 1, 1], 1)]
        assert (torch.cat(steps, 1) - expected).abs().max() < error
    if weights == "float32":
        rg.nn.thaw(stack)
        assert torch.equal(stack(x), expected)


def test_a_gate_or_norm_added_to_a_frozen_stack_is_seen() -> None:
    def build() -> rg.nn.Encoder:
        torch.manual_seed(0)
        layer = rg.nn.MultiHeadAttention(D, 2, attend=rg.Attention(mask=rg.causal()))
        return rg.nn.Encoder([rg.nn.Block(layer, rg.nn.FeedForward(D, D), residual=lambda: rg.nn.PreNorm(D))]).eval()

    x = torch.randn(1, 5, D)
    for name, part in (("gate", rg.nn.OutputGate(D, D)), ("query_norm", torch.nn.LayerNorm(D // 2))):
        frozen, plain = build(), build()
        rg.nn.freeze(frozen)
        with torch.inference_mode():
            torch.testing.assert_close(frozen(x), plain(x))
            for stack in (frozen, plain):
                setattr(stack.layers[0].attention, name, part)
            torch.testing.assert_close(frozen(x), plain(x))


@pytest.mark.parametrize("name", ["differential", "talking"])
def test_descriptions_that_depend_on_widths_raise(name: str) -> None:
    shaw, x = rg.shaw(torch.zeros(5, 24, dtype=torch.float64)), torch.randn(1, 4, D, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"needs the score Dot\(\), got Cosine"):
        LAYERS[name](rg.Attention(score=rg.Cosine()))
    with pytest.raises(ValueError, match="may depend on queries or values"):
        LAYERS[name](rg.Attention(bias=shaw))
    with pytest.raises(ValueError, match="may depend on queries or values"):
        LAYERS[name](rg.Attention())(x, bias=shaw)
    with pytest.raises(ValueError, match="may depend on queries or values"):
        LAYERS[name](rg.Attention())(x, x, context=rg.nn.LayerContext(bias=shaw), cache=rg.nn.CrossCache())


def test_wrong_sizes_raise() -> None:
    with pytest.raises(ValueError, match=r"not a multiple of 2 \* heads = 6"):
        rg.nn.DifferentialAttention(16, 3)
    with pytest.raises(ValueError, match="leave out d_value"):
        rg.nn.DifferentialAttention(16, 2, d_value=4)
    with pytest.raises(ValueError, match="leave out kv_heads"):
        rg.nn.TalkingHeadsAttention(16, 2, kv_heads=1)
    with pytest.raises(ValueError, match=r"d_gate must be the number of heads, 2, or heads \* d_value = 16, got 5"):
        rg.nn.MultiHeadAttention(16, 2, gate=rg.nn.OutputGate(16, 5))(torch.randn(1, 3, 16))


# Keys and values of an earlier layer


def shared_stack(mask: str = "causal", rotary: rg.nn.Rotary | None = None) -> rg.nn.Encoder:
    torch.manual_seed(0)
    attend = rg.Attention(mask=MASKS[mask])
    owner = rg.nn.MultiHeadAttention(D, 4, kv_heads=2, attend=attend, rotary=rotary)
    other = rg.nn.MultiHeadAttention(D, 4, kv_heads=2, attend=attend, rotary=rotary)
    attentions = [owner, rg.nn.CrossLayerAttention(owner), other, rg.nn.CrossLayerAttention(owner, heads=2)]
    blocks = [rg.nn.Block(each, rg.nn.FeedForward(D, D), residual=lambda: rg.nn.PreNorm(D)) for each in attentions]
    return with_noise(rg.nn.Encoder(blocks))  # type: ignore[return-value]


def test_shared_keys_equal_the_definition() -> None:
    owner = rg.nn.MultiHeadAttention(D, 4, kv_heads=2, attend=rg.Attention(mask=rg.causal())).double()
    reader = rg.nn.CrossLayerAttention(owner, heads=2).double()
    assert not {id(p) for p in owner.parameters()} & {id(p) for p in reader.parameters()}
    context, x = rg.nn.LayerContext(), torch.randn(1, 6, D, dtype=torch.float64, requires_grad=True)
    y = owner(x, context=context)
    actual = reader(y, context=context)
    k, v = affine(owner.qkv, x[0])[:, 16:].split([8, 8], -1)
    q = affine(reader.qkv, y[0]).chunk(2, -1)
    weights = softmaxes(list(q), list(k.chunk(2, -1)), torch.ones(6, 6).tril().bool())
    heads = [w @ value for w, value in zip(weights, v.chunk(2, -1), strict=True)]
    expected = affine(reader.output, torch.cat(heads, -1))[None]
    torch.testing.assert_close(actual, expected)
    inputs = (x, *owner.parameters(), *reader.parameters())
    for ours, theirs in zip(*(torch.autograd.grad(each.square().sum(), inputs, retain_graph=True)
                              for each in (actual, expected)), strict=True):  # fmt: skip
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("mask", "kind"), [(rg.causal(), rg.nn.Cache), (rg.causal() & rg.window(5, 0), rg.nn.WindowCache)]
)
@torch.no_grad()
def test_a_layer_may_attend_farther_back_than_the_owner_of_its_keys(mask: rg.Mask, kind: type) -> None:
    owner = rg.nn.MultiHeadAttention(D, 4, attend=rg.Attention(mask=rg.causal() & rg.window(2, 0)))
    attentions = [owner, rg.nn.CrossLayerAttention(owner, attend=rg.Attention(mask=mask))]
    blocks = [rg.nn.Block(each, rg.nn.FeedForward(D, D), residual=lambda: rg.nn.PreNorm(D)) for each in attentions]
    stack, x = rg.nn.Encoder(blocks).double(), torch.randn(2, N, D, dtype=torch.float64)
    cache = stack.cache()
    assert type(cache[0]) is kind
    steps = [stack(part, cache=cache) for part in x.split(1, 1)]
    torch.testing.assert_close(torch.cat(steps, 1), stack(x))


@pytest.mark.parametrize("mask", MASKS)
@torch.no_grad()
def test_a_stack_with_shared_keys_decodes_the_same_as_a_full_pass(mask: str) -> None:
    x = torch.randn(2, N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    for rotary in (None, rg.nn.Rotary()):
        stack = shared_stack(mask, rotary)
        for steps in STEPS:
            caches = stack.cache()
            actual = torch.cat([stack(x[:, at], cache=caches) for at in spans(steps)], 1)
            close(actual, stack(x, mask=seen_so_far(steps)))
            assert [cache.seen_tokens for cache in caches] == [N, 0, N, 0]


@torch.no_grad()
def test_a_stack_with_shared_keys_is_copied_frozen_captured_and_packed() -> None:
    stack, x = shared_stack().float(), torch.randn(2, 7, D)
    expected = stack(x).detach()
    clone = copy.deepcopy(stack)
    torch.testing.assert_close(clone(x), expected)
    clone.layers[0].attention.qkv.weight.zero_()
    assert not torch.allclose(clone(x), expected), "the copy reads the keys of its own owner"
    torch.testing.assert_close(stack(x), expected)
    with rg.view.capture(stack) as record:
        stack(x)
    assert len(record.attentions) == 4
    packed = rg.pack([x[0], x[1, :4]])
    context = rg.nn.LayerContext(packed.mask, positions=packed.positions)
    first, second = stack(packed.values[None], context=context)[0].split(packed.lengths)
    torch.testing.assert_close(first, expected[0])
    torch.testing.assert_close(second, expected[1, :4])
    rg.nn.freeze(stack)
    with torch.inference_mode():
        torch.testing.assert_close(stack(x), expected)


def test_shared_keys_that_are_missing_or_stale_raise() -> None:
    stack, x = shared_stack().float(), torch.randn(1, 5, D)
    owner, reader = stack.layers[0].attention, stack.layers[1].attention
    with pytest.raises(ValueError, match="pass the `context`"):
        reader(x)
    with pytest.raises(ValueError, match="has not run with this context"):
        reader(x, context=rg.nn.LayerContext())
    context = rg.nn.LayerContext()
    owner(x, context=context)
    with pytest.raises(ValueError, match="pass the tokens of the same call"):
        reader(torch.randn(2, 5, D), context=context)
    with pytest.raises(ValueError, match="must be an empty Cache"):
        reader(x, context=context, cache=rg.nn.CrossCache())
    owner(x, context=context)
    reader(x, context=context)
    reader(x, context=context)
    with pytest.raises(ValueError, match="fewer times than the layers"):
        reader(x, context=context)
    with pytest.raises(TypeError, match="owner must be a MultiHeadAttention, got CrossLayerAttention"):
        rg.nn.CrossLayerAttention(reader)
    stack.train().checkpointing = True
    with pytest.raises(ValueError, match="without checkpointing"):
        stack(x).sum().backward()
