"""No argument of a module is ignored: it has the documented effect, or raises."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import regard as rg
from regard.models import Whisper, WhisperConfig
from regard.nn import (
    Block,
    Cache,
    CrossCache,
    Decoder,
    Encoder,
    GraphAttention,
    LayerContext,
    MultiHeadAttention,
    Rotary,
)

H, D = 2, 4
PARTS = ("query_norm", "key_norm", "query_position", "key_position", "rotary", "source")
COMBINATIONS = [[part for n, part in enumerate(PARTS) if bits >> n & 1] for bits in range(2 ** len(PARTS))]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def reference(layer: MultiHeadAttention, x: Tensor, source: Tensor, *positions: Tensor) -> Tensor:
    """Reference attention in plain torch; positions are added to the inputs of the query and key projections."""
    D, E, G = layer.d_head, layer.d_value, layer.kv_heads
    holders = (layer.qkv,) if layer.source is None else (layer.qkv, layer.source)
    rows = [(row, number) for holder in holders for row, number in zip(holder.weight, holder.bias, strict=True)]
    cuts = (0, layer.heads * D, layer.heads * D + G * D, len(rows))
    parts = [tuple(map(torch.stack, zip(*rows[a:b], strict=True))) for a, b in pairwise(cuts)]
    inputs = (x + positions[0], source + positions[1], source)
    q, k, v = (y @ weight.T + bias for y, (weight, bias) in zip(inputs, parts, strict=True))
    q, k, v = q.unflatten(-1, (-1, D)), k.unflatten(-1, (-1, D)), v.unflatten(-1, (-1, E))  # (B, N, H, D)
    q = q if layer.query_norm is None else layer.query_norm(q)
    k = k if layer.key_norm is None else layer.key_norm(k)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if layer.rotary is not None:
        q, k = rg.rotary(q), rg.rotary(k)
    k, v = (y.repeat_interleave(layer.heads // G, 1) for y in (k, v))
    out = (q @ k.mT / D**0.5).softmax(-1) @ v
    return out.transpose(1, 2).flatten(2) @ layer.output.weight.T + layer.output.bias


@pytest.mark.parametrize(
    ("given", "widths"),
    [
        (given, widths)
        for given in COMBINATIONS
        for widths in ({}, {"d_head": 6, "d_value": 3, "kv_heads": 1}, {"d_source": 5})
        if "d_source" not in widths or "source" in given
    ],
    ids=str,
)
@torch.no_grad()
def test_every_combination_of_options_matches_the_reference(given: list[str], widths: dict) -> None:
    torch.manual_seed(0)
    d_head, d_source = widths.get("d_head", D), widths.get("d_source", H * D)

    def norm() -> nn.Module:
        norm = nn.LayerNorm(d_head)
        nn.init.normal_(norm.weight)
        return norm

    layer = MultiHeadAttention(
        H * D, H, rotary=Rotary() if "rotary" in given else None, query_norm=norm() if "query_norm" in given else None,
        key_norm=norm() if "key_norm" in given else None, **widths,
    ).double()  # fmt: skip
    x = random(2, 5, H * D)
    source = random(2, 3, d_source) if "source" in given else None
    places = {"query_position": random(5, H * D), "key_position": random(*(x if source is None else source).shape[1:])}
    shared = LayerContext(**{name: place for name, place in places.items() if name in given})
    none = torch.zeros((), dtype=torch.float64)
    expected = reference(
        layer, x, x if source is None else source, *(places[name] if name in given else none for name in places)
    )
    torch.testing.assert_close(layer(x, source, context=shared), expected, rtol=0, atol=1e-12)
    cache = Cache() if source is None else CrossCache()
    torch.testing.assert_close(layer(x, source, context=shared, cache=cache), expected, rtol=0, atol=1e-12)


def block(cross: bool = False) -> Block:
    across = MultiHeadAttention(H * D, H) if cross else None
    parts = MultiHeadAttention(H * D, H), rg.nn.FeedForward(H * D, 8)
    return Block(*parts, residual=lambda: rg.nn.PreNorm(H * D), cross=across)


X, SOURCE, MASK = torch.randn(1, 5, H * D), torch.randn(1, 3, H * D), rg.causal()
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "attention: mask": (lambda: MultiHeadAttention(8, 2)(X, mask=MASK, context=LayerContext()),
    "mask cannot be combined"),
    "attention: bias": (
        lambda: MultiHeadAttention(8, 2)(X, bias=rg.alibi(2), context=LayerContext()), "bias cannot be combined"
    ),
    "attention: positions": (
        lambda: MultiHeadAttention(8, 2, rotary=Rotary())(X, positions=torch.arange(5), context=LayerContext()),
        "positions cannot be combined",
    ),
    "attention: no rotary": (lambda: MultiHeadAttention(8, 2)(X, positions=torch.arange(5)), "used by rotary"),
    "attention: no source": (lambda: MultiHeadAttention(8, 2, d_source=6)(X), "d_source = 6 and needs a source"),
    "attention: cache of a source": (
        lambda: MultiHeadAttention(8, 2)(X, SOURCE, cache=Cache()), "takes a CrossCache, got a Cache"
    ),
    "attention: odd rotary": (lambda: MultiHeadAttention(8, 2, rotary=Rotary(d_rotary=3)), "even and between 2 and"),
    "attention: wide rotary": (lambda: MultiHeadAttention(8, 2, rotary=Rotary(d_rotary=8)), "even and between 2 and"),
    "attention: odd head": (lambda: MultiHeadAttention(6, 2, rotary=Rotary()), "even and between 2 and"),
    "block: mask": (lambda: block()(X, mask=MASK, context=LayerContext()), "mask cannot be combined"),
    "block: source_mask": (
        lambda: block(True)(X, SOURCE, source_mask=MASK, cross_context=LayerContext()),
        "source_mask cannot be combined"
    ),
    "block: source": (lambda: block()(X, SOURCE), "no cross-attention and takes no source"),
    "block: source mask": (lambda: block()(X, source_mask=MASK), "no cross-attention and takes no source"),
    "block: cross cache": (lambda: block()(X, cross_cache=CrossCache()), "no cross-attention and takes no source"),
    "block: no source": (lambda: block(True)(X), "needs a source"),
    "encoder: mask": (lambda: Encoder([block()])(X, mask=MASK, context=LayerContext()), "mask cannot be combined"),
    "encoder: cross": (lambda: Encoder([block(True)])(X), "needs a source"),
    "decoder: mask": (lambda: Decoder([block(True)])(X, SOURCE, mask=MASK, context=LayerContext()),
    "mask cannot be combined"),
    "decoder: source_mask": (
        lambda: Decoder([block(True)])(X, SOURCE, source_mask=MASK, cross_context=LayerContext()),
        "source_mask cannot be combined"
    ),
    "decoder: no cross": (lambda: Decoder([block()])(X, SOURCE), "no cross-attention and takes no source"),
    "graph: mask": (lambda: GraphAttention(8, 2)(X, mask=MASK, context=LayerContext()), "mask cannot be combined"),
    "graph: cache": (lambda: GraphAttention(8, 2)(X, cache=Cache()), "takes no cache"),  # type: ignore[arg-type]
    "graph: position": (lambda: GraphAttention(8, 2)(X, context=LayerContext(key_position=X)), "takes no cache"),
    "graph: caches": (
        lambda: Encoder([Block(GraphAttention(8, 2), nn.Identity(), residual=rg.nn.Residual)]).cache(),
        "only blocks with MultiHeadAttention or a recurrent layer have caches",
    ),
    "whisper: window": (
        lambda: Whisper(WhisperConfig(vocabulary=9, d_model=8, layers=1, heads=2, d_hidden=8, window=3)), "window"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_unused_arguments_raise(case: str) -> None:
    call, error = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=error):
        call()
