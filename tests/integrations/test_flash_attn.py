"""FlashAttention's functions against a definition in plain torch, sequence by sequence."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window_size": (3, 1)},
    {"window_size": (-1, 2)},
    {"window_size": (2, -1)},
    {"causal": True, "window_size": (2, 5)},
    {"softcap": 3.0, "softmax_scale": 0.7, "causal": True},
]


def define(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None, softcap: float = 0.0, alibi_slopes: Tensor | None = None, first: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of one sequence, q (Q, H, D) and k, v (K, G, D); keys before `first` are hidden."""
    queries, keys, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    away = torch.arange(keys) - (torch.arange(queries)[:, None] + keys - queries)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[:, None, None] * away.abs()
    left, right = window_size[0], 0 if causal else window_size[1]
    seen = (torch.arange(keys) >= first) & ((away >= -left) | (left < 0)) & ((away <= right) | (right < 0))
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, v), lse


def tensors(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("options", MASKS, ids=str)
def test_a_batch(options: dict[str, Any]) -> None:
    for queries, keys in ((7, 7), (3, 9), (9, 3)):
        q, k, v = tensors(1, (2, queries, 4, 8), (2, keys, 2, 8), (2, keys, 2, 8))
        output, lse, _ = flash_attn_func(q, k, v, **options, return_attn_probs=True)
        for row in range(2):
            expected, expected_lse = define(q[row], k[row], v[row], **options)
            assert torch.allclose(output[row], expected, atol=1e-12)
            assert torch.allclose(lse[row], expected_lse, atol=1e-12)


def test_slopes_and_their_gradient() -> None:
    q, k, v = tensors(2, (1, 5, 2, 4), (1, 9, 2, 4), (1, 9, 2, 4))
    slopes = torch.tensor([0.3, 1.5], dtype=torch.float64, requires_grad=True)
    output = flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes)
    expected = define(q[0], k[0], v[0], causal=True, alibi_slopes=slopes)[0]
    assert isinstance(output, Tensor)
    assert torch.allclose(output[0], expected, atol=1e-12)
    ours, theirs = (torch.autograd.grad(x.square().sum(), slopes)[0] for x in (output, expected))
    assert torch.allclose(ours, theirs, atol=1e-11)


@pytest.mark.parametrize("seed", range(20))
def test_packed_sequences(seed: int) -> None:
    draw = Random(seed)
    sizes = [(draw.randint(0, 9), draw.randint(0, 30)) for _ in range(draw.randint(1, 5))]
    queries, keys = (torch.tensor([0, *(size[n] for size in sizes)]).cumsum(0).int() for n in (0, 1))
    q, k, v = tensors(seed, (int(queries[-1]), 4, 8), (int(keys[-1]), 2, 8), (int(keys[-1]), 2, 8))
    options = draw.choice(MASKS)
    paged = draw.random() < 0.5
    given = (k, v)
    table = None
    if paged:  # pages of 4 keys in any order
        pages = [-(-n // 4) for _, n in sizes]
        order = torch.randperm(sum(pages) + 2, generator=torch.Generator().manual_seed(seed))
        table = torch.zeros(len(sizes), max(max(pages), 1), dtype=torch.int32)
        caches = [torch.full((len(order), 4, 2, 8), torch.nan, dtype=torch.float64) for _ in range(2)]
        used = 0
        for row, count in enumerate(pages):
            table[row, :count] = order[used : used + count]
            for place in range(sizes[row][1]):
                for cache, x in zip(caches, (k, v), strict=True):
                    cache[table[row, place // 4], place % 4] = x[int(keys[row]) + place]
            used += count
        given = (caches[0], caches[1])
    output, lse, _ = flash_attn_varlen_func(
        q, *given, queries, keys, 9, 30, **options, return_attn_probs=True, block_table=table
    )
    for row in range(len(sizes)):
        a, b, c, d = int(queries[row]), int(queries[row + 1]), int(keys[row]), int(keys[row + 1])
        expected, expected_lse = define(q[a:b], k[c:d], v[c:d], **options)
        assert torch.allclose(output[a:b], expected, atol=1e-12)
        assert torch.allclose(lse[:, a:b], expected_lse, atol=1e-12)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate x (N, H, D), one channel pair after the other."""
    x, half = x.clone(), cos.shape[1]
    for pair in range(half):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
        first, second = x[..., a].clone(), x[..., b].clone()
        x[..., a] = first * cos[:, None, pair] - second * sin[:, None, pair]
        x[..., b] = first * sin[:, None, pair] + second * cos[:, None, pair]
    return x


@pytest.mark.parametrize("seed", range(24))
def test_a_cache(seed: int) -> None:
    draw = Random(seed)
    batch, queries, capacity = 3, draw.choice([1, 4]), 24
    new = draw.choice([0, queries])
    before = torch.tensor([draw.randint(5, capacity - 5) for _ in range(batch)])
    total = before + new
    options = draw.choice(MASKS)
    q, k, v = tensors(seed, (batch, queries, 4, 8), (batch, new, 2, 8), (batch, new, 2, 8))
    rows = torch.tensor([4, 0, 2]) if draw.random() < 0.3 else None
    table = None
    if rows is None and draw.random() < 0.5:
        k_cache, v_cache = tensors(seed + 1, (20, 4, 2, 8), (20, 4, 2, 8))
        order = torch.randperm(20, generator=torch.Generator().manual_seed(seed))
        table = order[: batch * 6].reshape(batch, 6).int()
    else:
        k_cache, v_cache = tensors(seed + 1, (5, capacity, 2, 8), (5, capacity, 2, 8))
    leftpad = torch.tensor([1, 0, 3]) if draw.random() < 0.5 else None
    rotary, interleaved = draw.random() < 0.5 and new > 0, draw.random() < 0.5
    angles = torch.arange(capacity)[:, None] * torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()

    def row_of(cache: Tensor, row: int) -> Tensor:
        if table is not None:
            return cache[table[row].long()].flatten(0, 1)
        return cache[row if rows is None else int(rows[row])]

    expected = []
    is_local = options.get("causal") or "window_size" in options
    for row in range(batch):
        keys, values, start = row_of(k_cache, row).clone(), row_of(v_cache, row).clone(), int(before[row])
        stop, own = int(total[row]), q[row]
        places = torch.arange(start, start + queries) if is_local else torch.full((queries,), start)
        keys[start:stop], values[start:stop] = k[row], v[row]
        if rotary:
            keys[start:stop] = rotate(k[row], cos[start:stop], sin[start:stop], interleaved)
            own = rotate(own, cos[places], sin[places], interleaved)
        first = 0 if leftpad is None else int(leftpad[row])
        expected.append((*define(own, keys[:stop], values[:stop], **options, first=first), keys))
    output, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, k if new else None, v if new else None,
        rotary_cos=cos if rotary else None, rotary_sin=sin if rotary else None, rotary_interleaved=interleaved,
        cache_seqlens=before.int(), cache_batch_idx=rows, cache_leftpad=leftpad, block_table=table,
        return_softmax_lse=True, **options,
    )  # fmt: skip
    for row, (row_output, row_lse, keys) in enumerate(expected):
        assert torch.allclose(output[row], row_output, atol=1e-12)
        assert torch.allclose(lse[row], row_lse, atol=1e-12)
        assert torch.allclose(row_of(k_cache, row), keys, atol=1e-14)


def test_what_is_not_supported_raises() -> None:
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(NotImplementedError, match="per batch row"):
        flash_attn_func(q, q, q, alibi_slopes=torch.rand(1, 2))
    with pytest.raises(ValueError, match="batch, sequence, heads, width"):
        flash_attn_func(q[0], q[0], q[0])
    with pytest.raises(ValueError, match="4 keys, but 5 are needed"):
        flash_attn_with_kvcache(q, q.clone(), q.clone(), q[:, :1], q[:, :1], cache_seqlens=4)
    with pytest.raises(ValueError, match="cache_seqlens"):
        flash_attn_with_kvcache(q, q.clone(), q.clone(), q[:, :1], q[:, :1])
    edges, others = torch.tensor([0, 4]), torch.tensor([0, 3])
    with pytest.raises(NotImplementedError, match="as many queries as keys"):
        flash_attn_varlen_func(q[0], q[0, :3], q[0, :3], edges, others, 4, 3, alibi_slopes=torch.rand(2))


def test_what_flash_attn_refuses_for_a_cache_raises() -> None:
    q, cache = torch.randn(2, 1, 4, 8), torch.randn(3, 4, 2, 8)
    table = torch.randn(16, 4)
    with pytest.raises(ValueError, match="rotary_cos and rotary_sin need new keys and values"):
        flash_attn_with_kvcache(q, cache, cache, rotary_cos=table, rotary_sin=table, cache_seqlens=3)
    with pytest.raises(ValueError, match="cache_batch_idx cannot be combined with block_table"):
        flash_attn_with_kvcache(
            q, cache, cache, cache_seqlens=3, block_table=torch.tensor([[0], [1]]), cache_batch_idx=torch.tensor([1, 0])
        )


def test_pages_after_the_end_of_a_row_are_not_read() -> None:
    (q,), caches = tensors(1, (2, 1, 4, 8)), tensors(2, (5, 4, 2, 8), (5, 4, 2, 8))
    lengths = torch.tensor([3, 10])
    actual = flash_attn_with_kvcache(
        q, *caches, cache_seqlens=lengths, block_table=torch.tensor([[2, 10**6, -7], [0, 4, 1]]), causal=True
    )
    for row, pages in enumerate(([2], [0, 4, 1])):
        k, v = (cache[pages].flatten(0, 1)[: lengths[row]] for cache in caches)
        torch.testing.assert_close(actual[row], define(q[row], k, v)[0])
