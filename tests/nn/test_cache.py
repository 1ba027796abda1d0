"""Caches return all appended tokens and copy little."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.nn import Cache, CrossCache, FixedCache, LayerContext, MultiHeadAttention, Rotary, WindowCache


def tokens(n: int) -> torch.Tensor:
    return torch.randn(2, 3, n, 4)


@pytest.mark.parametrize("make_cache", [lambda: Cache(2), lambda: FixedCache(64)])
def test_append_returns_all_tokens(make_cache) -> None:
    cache, appended = make_cache(), []
    for n in (5, 1, 1, 7, 1, 1, 1, 1):
        appended.append((tokens(n), tokens(n)))
        keys, values = cache.append(*appended[-1])
        assert torch.equal(keys, torch.cat([k for k, _ in appended], 2))
        assert torch.equal(values, torch.cat([v for _, v in appended], 2))


@pytest.mark.parametrize("window", [1, 2, 5])
def test_a_window_cache_returns_the_window_of_the_new_queries(window: int) -> None:
    cache, appended = WindowCache(window), torch.empty(2, 3, 0, 4)
    for n in (1, 1, 9, 1, 1, 1, 1, 1, 1, 3, 1):
        new = tokens(n)
        appended = torch.cat([appended, new], 2)
        keys, values = cache.append(new, new)
        expected = appended[:, :, -(window - 1 + n) :]
        assert torch.equal(keys, expected)
        assert torch.equal(values, expected)
        assert cache.seen_tokens == appended.shape[2]


@pytest.mark.parametrize(("cache", "max_allocations"), [(Cache(), 8), (WindowCache(16), 40)])
def test_allocations_are_rare(cache: Cache, max_allocations: int) -> None:
    places, token = set(), tokens(1)
    for _ in range(500):
        cache.append(token, token)
        places.add(cache._held[0].data_ptr())
        assert cache._held[0].shape[2] <= 1024
    assert len(places) <= max_allocations


def test_a_full_fixed_cache_raises() -> None:
    cache = FixedCache(4)
    cache.append(tokens(3), tokens(3))
    with pytest.raises(ValueError, match="capacity of 4 tokens, but 5 are needed"):
        cache.append(tokens(2), tokens(2))


@pytest.mark.parametrize("make_cache", [Cache, lambda: WindowCache(4)])
def test_reorder_makes_rows_continue_other_rows(make_cache) -> None:
    cache, k = make_cache(), torch.randn(4, 1, 3, 2)
    k[:, :, 0] = 1.0  # they agree on the first token
    cache.append(k, k)
    rows = torch.tensor([1, 1, 0, 3])
    cache.reorder(rows, 1)
    new = torch.randn(4, 1, 1, 2)
    keys, _ = cache.append(new, new)
    assert torch.equal(keys, torch.cat([k[rows], new], 2))


@pytest.mark.parametrize("mask", [rg.causal(), rg.causal() & rg.window(3, 0)])
@pytest.mark.parametrize("filler", [None, torch.tensor([0, 2])])
def test_cached_steps_match_the_full_sequence(mask: rg.Mask, filler: torch.Tensor | None) -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(16, heads=4, kv_heads=2, rotary=Rotary(), attend=rg.Attention(mask=mask)).eval()
    x, cache = torch.randn(2, 12, 16), layer.cache()
    whole = mask if filler is None else mask & ~rg.padding(filler)
    with torch.no_grad():
        expected = layer(x, mask=whole)
        steps = [(0, 5), (5, 6), (6, 7), (7, 10), (10, 11), (11, 12)]
        steps = [
            layer(x[:, a:b], context=LayerContext(positions=torch.arange(a, b), left_padding=filler), cache=cache)
            for a, b in steps
        ]
    torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=0, atol=1e-5)


def test_a_cross_cache_projects_its_source_once_for_all_beams() -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(16, heads=2, attend=rg.Attention(offset=0)).eval()
    source, x, memory = torch.randn(2, 5, 16), torch.randn(6, 1, 16), CrossCache()
    shared = LayerContext(rg.padding([5, 3]))
    with torch.no_grad():
        expected = layer(x, source.repeat_interleave(3, 0), mask=rg.padding([5, 5, 5, 3, 3, 3]))
        torch.testing.assert_close(layer(x, source, context=shared, cache=memory), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(layer(x, None, context=shared, cache=memory), expected, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="pass `source` in the first call"):
        layer(x, None, cache=CrossCache())


@torch.no_grad()
@pytest.mark.parametrize("write", ["in place", "data", "numpy"])
def test_a_cross_cache_rejects_a_modified_source(write: str) -> None:
    layer = MultiHeadAttention(16, heads=2, attend=rg.Attention(offset=0)).eval()
    source, x, memory = torch.randn(2, 5, 16), torch.randn(2, 1, 16), CrossCache()
    layer(x, source, cache=memory)
    layer(x, source, cache=memory)
    if write == "in place":
        source[1, 4, 3] += 1
    elif write == "data":
        source.data[1, 4, 3] += 1
    else:
        source.numpy()[1, 4, 3] += 1
    with pytest.raises(ValueError, match="was modified in place"):
        layer(x, source, cache=memory)
    layer(x, None, cache=memory)


@torch.no_grad()
def test_a_decoder_rejects_a_modified_source() -> None:
    def block() -> rg.nn.Block:
        own = MultiHeadAttention(16, heads=2, attend=rg.Attention(mask=rg.causal()))
        cross = MultiHeadAttention(16, heads=2, attend=rg.Attention(offset=0))
        return rg.nn.Block(own, rg.nn.FeedForward(16, 64), cross=cross, residual=lambda: rg.nn.PostNorm(16))

    decoder = rg.nn.Decoder([block() for _ in range(2)]).eval()
    source, x, cache = torch.randn(2, 5, 16), torch.randn(2, 1, 16), decoder.cache()
    assert not cache.holds_source
    decoder(x, source, cache=cache)
    assert cache.holds_source
    source[0, 0] = 0
    with pytest.raises(ValueError, match="was modified in place"):
        decoder(x, source, cache=cache)
