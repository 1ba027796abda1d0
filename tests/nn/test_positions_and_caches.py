"""Decoding with a cache matches the full pass: every position scheme, mask, cache and level.

While decoding, a token attends to the tokens of its own and earlier steps that its mask allows. The full pass gets the
same limit as an additional mask, which has no effect if the mask is causal.
"""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor, nn

import regard as rg
from regard.nn import (
    Block,
    Cache,
    CrossCache,
    Decoder,
    Encoder,
    FixedCache,
    LayerContext,
    MultiHeadAttention,
    Rotary,
    WindowCache,
)

N, H, D = 12, 4, 4
STEPS = [(1,) * N, (5, 1, 1, 3, 2), (2, 7, 3)]


def table(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def later_is_better(score: Tensor, b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
    return score + 0.3 * (k_index % 5) - 0.1 * q_index * (k_index % 3)


SCHEMES: dict[str, dict] = {
    "none": {},
    "rotary": {"rotary": Rotary()},
    "part of a head, interleaved": {"rotary": Rotary(d_rotary=2, interleaved=True)},
    "yarn": {"rotary": Rotary(scaling=rg.positions.Yarn(4.0, original=8))},
    "dynamic within its length": {"rotary": Rotary(scaling=rg.positions.Dynamic(2.0, original=N))},
    "alibi": {"bias": rg.alibi(H)},
    "relative": {"bias": rg.relative(table(7, H))},
    "t5": {"bias": rg.t5(table(8, H), bidirectional=False, max_distance=9)},
    "shaw": {"bias": rg.shaw(table(5, D), table(5, D))},
    "shaw per head": {"bias": rg.shaw(table(H, 5, D))},
    "a constant bias": {"bias": table(H, 1, 1)},
    "a score function": {"score": later_is_better},
    "a sink": {"sink": table(H)},
    "offset 0": {"offset": 0, "rotary": Rotary()},
    "offset 2": {"offset": 2, "bias": rg.alibi(H)},
    "offset -1": {"offset": -1},
    "offsets": {"offset": [0, 3], "bias": rg.relative(table(7, H))},
}
LAYOUT = table(8, 8) > -0.5
MASKS: dict[str, rg.Mask | None] = {
    "none": None,
    "causal": rg.causal(),
    "window": rg.causal() & rg.window(3, 0),
    "window on both sides": rg.window(2, 2),
    "dilated": rg.causal() & rg.dilated(2, 2),
    "window and where": rg.window(3, 0) & rg.where(lambda b, h, p, j: (p + 2 * j + b) % 3 != 0),
    "window and blocks": rg.causal() & rg.window(4, 0) & rg.blocks(LAYOUT, 2),
    "window and global": rg.causal() & rg.window(5, 0) & rg.global_tokens([0, 4, 7]),
    "window or global": rg.causal() & (rg.window(2, 0) | rg.global_tokens([0, 5])),
    "window, not some": rg.window(3, 0) & ~rg.global_tokens([[1], [6, 9]]),
    "window or dilated": rg.causal() & (rg.window(1, 0) | rg.dilated(1, 3)),
    "window and ranges": rg.window(4, 0) & rg.ranges(list(range(N)), [2 * n + 1 for n in range(N)]),
    "prefix": rg.prefix(4),
    "prefixes": rg.prefix([4, 6]) & rg.window(6, 1),
    "longformer": rg.causal() & rg.longformer(2, [1], step=2),
    "bigbird": rg.causal() & rg.bigbird(2, blocks=1, random=1),
    "window and random blocks": rg.window(5, 0) & rg.random_blocks(1, 2, seed=3),
}


def seen_so_far(steps: tuple[int, ...]) -> rg.Mask:
    """Mask for a full pass: a token attends to all tokens up to the end of its step."""
    ends = torch.tensor([end for end, n in zip(accumulate(steps), steps, strict=True) for _ in range(n)])
    return rg.dense(torch.arange(N) < ends[:, None])


def spans(steps: tuple[int, ...]) -> list[slice]:
    return [slice(end - n, end) for end, n in zip(accumulate(steps), steps, strict=True)]


def close(decoded: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(decoded, expected, rtol=0, atol=1e-11)


def attention(scheme: str, mask: str, **more: object) -> MultiHeadAttention:
    torch.manual_seed(0)
    described = {name: part for name, part in SCHEMES[scheme].items() if name != "rotary"}
    attend = rg.Attention(mask=MASKS[mask], **described)
    layer = MultiHeadAttention(H * D, H, kv_heads=2, attend=attend, rotary=SCHEMES[scheme].get("rotary"), **more)
    return layer.double().eval()


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.randn(2, N, H * D, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


# Every mask with a scheme of each kind, and every scheme with a mask of each kind.
PAIRS = [
    (scheme, mask)
    for scheme in SCHEMES
    for mask in MASKS
    if scheme in ("rotary", "alibi", "a score function", "offsets")
    or mask in ("causal", "window", "window and where", "window or global")
]


@pytest.mark.parametrize(("scheme", "mask"), PAIRS)
@torch.no_grad()
def test_a_layer_decodes_the_same_as_a_full_pass(scheme: str, mask: str, x: Tensor) -> None:
    layer = attention(scheme, mask)
    for cache, steps in ((layer.cache(), STEPS[0]), (Cache(2), STEPS[1]), (FixedCache(N), STEPS[2])):
        decoded = [layer(x[:, at], cache=cache) for at in spans(steps)]
        close(torch.cat(decoded, 1), layer(x, mask=seen_so_far(steps)))
        assert cache.seen_tokens == N


@pytest.mark.parametrize("mask", [mask for mask in MASKS if "window" in mask])
@torch.no_grad()
def test_a_layer_decodes_the_same_in_steps_of_any_size(mask: str, x: Tensor) -> None:
    layer = attention("rotary", mask)
    for steps in STEPS[1:]:
        cache = layer.cache()
        decoded = [layer(x[:, at], cache=cache) for at in spans(steps)]
        close(torch.cat(decoded, 1), layer(x, mask=seen_so_far(steps)))


@pytest.mark.parametrize("mask", ["window", "window and where", "window or global", "dilated", "window or dilated"])
def test_only_a_window_limits_the_cache(mask: str, x: Tensor) -> None:
    layer = attention("none", mask)
    cache = layer.cache()
    assert isinstance(cache, WindowCache) == (mask != "window or global")
    for at in spans(STEPS[0]):
        layer(x[:, at], cache=cache)
    reach = {"window": 3, "window and where": 3, "dilated": 4, "window or dilated": 3}.get(mask, N - 1)
    assert cache.length == reach + 1


@torch.no_grad()
def test_a_window_cache_that_is_too_small_raises(x: Tensor) -> None:
    for mask in ("none", "causal", "window or global"):
        with pytest.raises(ValueError, match="attends to all earlier tokens, but the WindowCache keeps 3"):
            attention("none", mask)(x, cache=WindowCache(4))
    with pytest.raises(ValueError, match="attends to 3 earlier tokens, but the WindowCache keeps 2"):
        attention("none", "window")(x, cache=WindowCache(3))
    with pytest.raises(ValueError, match="attends to 4 earlier tokens"):
        attention("offset -1", "window")(x, cache=WindowCache(4))
    narrow = attention("none", "causal")(x, mask=rg.window(3, 0), cache=WindowCache(4))
    close(narrow, attention("none", "window")(x))


@pytest.mark.parametrize("mask", ["causal", "window"])
@torch.no_grad()
def test_masks_of_a_call_count_from_the_first_token_of_the_sequence(mask: str, x: Tensor) -> None:
    layer, cache = attention("rotary", mask), Cache()
    real = torch.rand(2, N, generator=torch.Generator().manual_seed(1)) > 0.3
    real[:, 0] = True
    expected = layer(x, mask=real[:, None, None])
    for cache in (Cache(), layer.cache()):
        decoded = [layer(x[:, at], mask=real[:, None, None, : at.stop], cache=cache) for at in spans(STEPS[1])]
        close(torch.cat(decoded, 1), expected)
        documents = torch.tensor([[0] * 4 + [1] * 8, [2] * 7 + [3] * 5])
    expected = layer(x, mask=rg.documents(documents), bias=(bias := table(N)))
    for cache in (Cache(), layer.cache()):
        decoded = [
            layer(x[:, at], mask=rg.documents(documents[:, : at.stop]), bias=bias[: at.stop], cache=cache)
            for at in spans(STEPS[1])
        ]
        close(torch.cat(decoded, 1), expected)


@pytest.mark.parametrize(
    ("described", "error"),
    [
        ({"bias": table(N, N)}, r"bias must broadcast to \(B, H, Q, K\)"),
        ({"bias": table(4)}, r"bias must broadcast to \(B, H, Q, K\)"),
        ({"mask": rg.causal() & rg.dense(LAYOUT[:1, :4])}, r"mask must broadcast to \(B, H, Q, K\)"),
        ({"mask": rg.causal() & rg.padding([5, 8])}, "lengths must be at most the number of keys"),
        ({"mask": rg.causal() & rg.documents([0] * 5 + [1] * 7)}, "ids must have one id for each of the"),
        ({"mask": rg.causal() & rg.edges([(0, 0), (11, 11)])}, "pairs contain key 11"),
    ],
)
@pytest.mark.parametrize("window", [None, 3])
@torch.no_grad()
def test_tensors_for_another_number_of_tokens_raise(described: dict, error: str, window: int | None, x: Tensor) -> None:
    described = {"mask": rg.causal()} | described
    if window is not None:
        described["mask"] = described["mask"] & rg.window(window, 0)
    layer = MultiHeadAttention(H * D, H, attend=rg.Attention(**described)).double().eval()
    cache = layer.cache()

    def decode() -> None:
        for at in spans((3, *[1] * 9)):
            layer(x[:, at], cache=cache)

    with pytest.raises(ValueError, match=error):
        decode()


@torch.no_grad()
def test_explicit_positions_are_used(x: Tensor) -> None:
    layer, at = attention("rotary", "causal"), torch.tensor([[3, 4, 6, 9, 9, 12, 13, 20, 21, 22, 30, 31], [*range(N)]])
    for where in (at, at[:1], at[0]):
        cache, expected = Cache(), layer(x, positions=where)
        decoded = [layer(x[:, span], positions=where[..., span], cache=cache) for span in spans(STEPS[1])]
        close(torch.cat(decoded, 1), expected)
    for where in (torch.tensor([5]), torch.arange(N - 1), torch.arange(N).expand(3, N)):
        with pytest.raises(ValueError, match="positions must be"):
            layer(x, positions=where)
    with pytest.raises(ValueError, match="used by rotary embeddings only"):
        attention("none", "causal")(x, positions=torch.arange(N))


@torch.no_grad()
def test_dynamic_scaling_with_a_cache_raises_beyond_the_original_length(x: Tensor) -> None:
    layer = MultiHeadAttention(H * D, H, rotary=Rotary(scaling=rg.positions.Dynamic(2.0, original=8))).double()
    cache = Cache()
    layer(x[:, :7], cache=cache)
    layer(x[:, 7:8], cache=cache)
    with pytest.raises(ValueError, match="compute the full sequence without a cache"):
        layer(x[:, 8:9], cache=cache)


@pytest.mark.parametrize("scheme", ["none", "rotary", "alibi", "shaw", "offset 0"])
@pytest.mark.parametrize("mask", ["causal", "window"])
@pytest.mark.parametrize("sizes", [(7, 1, 1, 3), (1, 3, 1, 7)])  # the second has calls of padding only
@torch.no_grad()
def test_left_padded_rows_match_unpadded_ones(scheme: str, mask: str, sizes: tuple[int, ...], x: Tensor) -> None:
    layer, filler = attention(scheme, mask), torch.tensor([0, 5])
    for cache in (layer.cache(), Cache()):
        decoded = torch.cat(
            [layer(x[:, at], context=LayerContext(left_padding=filler), cache=cache) for at in spans(sizes)], 1
        )
        close(decoded[:1], layer(x[:1]))
        close(decoded[1:, 5:], layer(x[1:, 5:]))


def test_left_padding_with_absolute_key_positions_raises(x: Tensor) -> None:
    for scheme, mask in (("none", "window or global"), ("none", "bigbird"), ("a score function", "causal")):
        with pytest.raises(ValueError, match="counts positions from the first key, which is padding"):
            attention(scheme, mask)(x, context=LayerContext(left_padding=torch.tensor([0, 5])), cache=Cache())


@pytest.mark.parametrize("mask", ["causal", "window", "window and where", "window or global"])
@torch.no_grad()
def test_reorder_makes_rows_continue_other_rows(mask: str, x: Tensor) -> None:
    layer, rows = attention("rotary", mask), torch.tensor([1, 1, 0])
    if mask == "window and where":  # depends on the batch row, which reorder changes
        layer.attend = layer.attend.replace(mask=rg.window(3, 0) & rg.where(lambda b, h, p, j: (p + 2 * j) % 3 != 0))
    expected = layer(torch.cat((x[rows, :6], x[[0, 0, 1], 6:]), 1))[:, 6:]
    for cache in (layer.cache(), Cache()):
        layer(x[:, :6], cache=cache)
        cache.reorder(rows)
        close(torch.cat([layer(x[[0, 0, 1], n : n + 1], cache=cache) for n in range(6, N)], 1), expected)


@torch.no_grad()
def test_tokens_of_the_wrong_shape_raise(x: Tensor) -> None:
    layer, cache = attention("none", "causal"), Cache()
    layer(x[:, :3], cache=cache)
    with pytest.raises(ValueError, match="use an empty cache for another batch"):
        layer(x[:1, 3:4], cache=cache)
    with pytest.raises(ValueError, match="use an empty cache for another batch"):
        layer.float()(x[:, 3:4].float(), cache=cache)


# Cross-attention


CROSS: dict[str, tuple[dict, rg.Mask | None]] = {
    "all": ({}, None),
    "offset 0": ({"offset": 0}, None),
    "rotary": ({"rotary": Rotary()}, None),
    "lengths": ({"rotary": Rotary()}, rg.padding([5, 3])),
    "a window": ({"offset": 0, "mask": rg.window(2, 1)}, None),
    "a window and lengths": ({"offset": 2, "mask": rg.window(2, 1), "rotary": Rotary()}, rg.padding([5, 3])),
    "alibi": ({"offset": 0, "bias": rg.alibi(H)}, None),
    "ranges": ({"offset": 0}, rg.ranges([n // 3 for n in range(N)], [n // 2 + 1 for n in range(N)])),
}


@pytest.mark.parametrize("case", CROSS)
@pytest.mark.parametrize("d_source", [None, 6])
@torch.no_grad()
def test_cross_attention_decodes_the_same_as_a_full_pass(case: str, d_source: int | None, x: Tensor) -> None:
    described, mask = CROSS[case]
    attend = rg.Attention(**{name: part for name, part in described.items() if name != "rotary"})
    layer = MultiHeadAttention(
        H * D, H, attend=attend, d_source=d_source, rotary=described.get("rotary"), query_norm=nn.LayerNorm(D)
    )
    layer, source, shared = layer.double().eval(), table(2, 5, d_source or H * D), LayerContext(mask)
    expected = layer(x, source, mask=mask)
    for steps in STEPS:
        cross_cache = CrossCache()
        decoded = [
            layer(x[:, at], source if at.start == 0 else None, mask=mask, cache=cross_cache) for at in spans(steps)
        ]
        close(torch.cat(decoded, 1), expected)
    beams = x.repeat_interleave(3, 0) + table(6, N, 1)
    if case in ("a window and lengths",):
        with pytest.raises(ValueError, match="one number for each of the 6 batch rows"):
            layer(beams[:, :1], source, context=shared, cache=CrossCache())
        return
    lengths = rg.padding([5, 5, 5, 3, 3, 3]) if case == "lengths" else mask
    expected, cross_cache = layer(beams, source.repeat_interleave(3, 0), mask=lengths), CrossCache()
    decoded = [layer(beams[:, at], source, context=shared, cache=cross_cache) for at in spans(STEPS[1])]
    close(torch.cat(decoded, 1), expected)


@torch.no_grad()
def test_queries_and_sources_are_rotated_by_their_own_positions(x: Tensor) -> None:
    """Reference: explicit projections and rotation by complex numbers."""

    def rotated(y: Tensor, at: Tensor) -> Tensor:  # (B, H, N, D)
        pairs = torch.complex(y[..., : D // 2], y[..., D // 2 :])
        angles = at[:, None] * 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
        pairs = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((pairs.real, pairs.imag), -1)

    torch.manual_seed(0)
    layer, source = MultiHeadAttention(H * D, H, rotary=Rotary()).double(), table(2, 5, H * D)
    weight, bias = layer.qkv.weight.chunk(3), layer.qkv.bias.chunk(3)
    for query, start in ((x, 0), (x[:, :1], 0), (x[:, :3], 4)):
        q, k, v = (
            (y @ w.T + b).unflatten(-1, (H, D)).transpose(1, 2)
            for y, w, b in zip((query, source, source), weight, bias, strict=True)
        )
        q, k = rotated(q, torch.arange(start, start + q.shape[2])), rotated(k, torch.arange(5))
        out = ((q @ k.mT / D**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
        expected = out @ layer.output.weight.T + layer.output.bias
        at = torch.arange(start, start + q.shape[2])
        close(layer(query, source, positions=at), expected)
        close(layer(query, source, context=LayerContext(positions=at, key_positions=torch.arange(5))), expected)
        if not start:
            close(layer(query, source), expected)
            close(layer(query, source, cache=CrossCache()), expected)


@torch.no_grad()
def test_a_cross_cache_raises_for_another_source(x: Tensor) -> None:
    layer, source, cross_cache = attention("none", "none"), table(2, 5, H * D), CrossCache()
    layer(x[:, :1], source, cache=cross_cache)
    layer(x[:, 1:2], source.clone(), cache=cross_cache)
    with pytest.raises(ValueError, match="keys and values of a different source"):
        layer(x[:, 1:2], source + 1, cache=cross_cache)
    with pytest.raises(ValueError, match="a multiple of the 2 sources"):
        layer(x[:1, 1:2], None, cache=cross_cache)
    with pytest.raises(ValueError, match="takes a CrossCache, got a Cache"):
        layer(x[:, :1], source, cache=Cache())
    with pytest.raises(ValueError, match="Pass an explicit offset"):
        attention("none", "window")(x[:, :1], source, cache=CrossCache())
    cross_cache.reorder(torch.tensor([0, 0, 1, 1]))
    cross_cache.reorder(torch.tensor([1, 0, 2, 2]))
    with pytest.raises(ValueError, match="a row of the same source"):
        cross_cache.reorder(torch.tensor([1, 0, 1, 2]))


# Stacks


def block(scheme: str, mask: str, cross: bool = False) -> Block:
    across = MultiHeadAttention(H * D, H, rotary=Rotary(), attend=rg.Attention(mask=rg.window(3, 9), offset=0))
    parts = attention(scheme, mask), rg.nn.FeedForward(H * D, 8)
    return Block(*parts, residual=lambda: rg.nn.PreNorm(H * D), cross=across if cross else None)


STACKS = {
    "rotary": [("rotary", "causal"), ("rotary", "window")],
    "two rotary parts": [("rotary", "causal"), ("part of a head, interleaved", "window and where")],
    "biases": [("alibi", "window or global"), ("t5", "causal"), ("shaw", "window")],
    "score functions": [("a score function", "window"), ("a score function", "causal")],
    "offsets": [("offset 0", "causal"), ("offset 2", "window"), ("offsets", "causal")],
    "sparse": [("rotary", "bigbird"), ("rotary", "longformer"), ("relative", "window and blocks")],
}


@pytest.mark.parametrize("repeat", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("parts", STACKS)
@torch.no_grad()
def test_an_encoder_decodes_the_same_as_a_full_pass(parts: str, bias: bool, repeat: int, x: Tensor) -> None:
    relative = rg.nn.RelativeBias(H, buckets=8, bidirectional=False) if bias else None
    stack = Encoder([block(*part) for part in STACKS[parts]], bias=relative, repeat=repeat, norm=nn.LayerNorm(H * D))
    stack = stack.double().eval()
    for steps in STEPS[:2]:
        expected, caches = stack(x, mask=seen_so_far(steps)), stack.cache()
        close(torch.cat([stack(x[:, at], cache=caches) for at in spans(steps)], 1), expected)


@pytest.mark.parametrize("repeat", [1, 2])
@torch.no_grad()
def test_a_decoder_decodes_the_same_as_a_full_pass(repeat: int, x: Tensor) -> None:
    blocks = [block("rotary", "causal", True), block("alibi", "window and where", True)]
    stack, source = Decoder(blocks, repeat=repeat).double().eval(), table(2, 5, H * D)
    lengths = rg.padding([5, 3])
    expected, once = stack(x, source, source_mask=lengths), x
    for layer in stack.layers:
        for _ in range(repeat):
            once = layer(once, source, source_mask=lengths)
    close(expected, once)
    for steps in STEPS[:2]:
        cache = stack.cache()
        decoded = [
            stack(x[:, at], source if at.start == 0 else None, source_mask=lengths, cache=cache) for at in spans(steps)
        ]
        close(torch.cat(decoded, 1), stack(x, source, mask=seen_so_far(steps), source_mask=lengths))


def test_checkpointing_with_caches_raises(x: Tensor) -> None:
    encoder = Encoder([block("rotary", "causal")], checkpointing=True).double()
    decoder = Decoder([block("rotary", "causal", True)], checkpointing=True).double()
    with pytest.raises(ValueError, match="checkpointing recomputes blocks"):
        encoder(x, cache=encoder.cache())
    with pytest.raises(ValueError, match="checkpointing recomputes blocks"):
        decoder(x, table(2, 5, H * D), cache=decoder.cache())
    caches, expected = encoder.cache(), encoder(x)
    with torch.no_grad():
        close(torch.cat([encoder(x[:, at], cache=caches) for at in spans(STEPS[1])], 1), expected.detach())


def test_every_run_of_a_layer_needs_a_cache(x: Tensor) -> None:
    stack = Encoder([block("rotary", "causal"), block("rotary", "window")], repeat=2).double()
    for caches in ([Cache()] * 4, [Cache(), Cache()], stack.cache()[:3]):
        with pytest.raises(ValueError, match="cache must hold 4 distinct caches"):
            stack(x, cache=caches)


def test_gradients_through_a_cached_step_match_those_without_cache(x: Tensor) -> None:
    layer = attention("rotary", "causal")
    before, after = x.clone().requires_grad_(), x.clone().requires_grad_()
    layer(before).square().sum().backward()
    layer(after, cache=Cache()).square().sum().backward()
    assert before.grad is not None
    assert after.grad is not None
    close(after.grad, before.grad)


@pytest.mark.parametrize("parts", STACKS)
@torch.no_grad()
def test_a_stack_compiled_as_one_graph_decodes_the_same_as_a_full_pass(parts: str, x: Tensor) -> None:
    stack = Encoder([block(*part) for part in STACKS[parts]]).double().eval()
    torch.compiler.reset()
    compiled, caches, steps = torch.compile(stack, backend="eager", fullgraph=True), stack.cache(), (6, 1, 1, 4)
    decoded = [compiled(x[:, at], cache=caches) for at in spans(steps)]
    close(torch.cat(decoded, 1), stack(x, mask=seen_so_far(steps)))


@torch.no_grad()
def test_a_compiled_stack_decodes_with_an_int8_cache(x: Tensor) -> None:
    torch.compiler.reset()
    stack = Encoder([block("rotary", "window and where")] * 2).double().eval()
    compiled, caches = torch.compile(stack, backend="eager"), stack.cache(dtype=torch.int8)
    decoded = [compiled(x[:, at], cache=caches) for at in spans((6, 1, 1, 4))]
    torch.testing.assert_close(torch.cat(decoded, 1), stack(x), rtol=0, atol=0.1)


# Models
