"""The largest logit of each query, which `return_max=True` returns with the output."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regard as rg
from tests.engines.calls import INF, NAN, normal

ENGINES = ("native", "reference", "tiled")
SIZES = ((1, 300), (65, 130), (5, 1), (300, 700), (3, 2))
MASKS: dict[str, Any] = {  # each with its definition for batch row b, head h, position p and key j
    "no mask": (None, lambda b, h, p, j: b + h + p + j == b + h + p + j),
    "window": (rg.causal() & rg.window(7, 0), lambda b, h, p, j: (j <= p) & (j >= p - 7) & (b == b) & (h == h)),
    "padding": (rg.padding([1, 0]), lambda b, h, p, j: (j < 1 - b) & (h == h) & (p == p)),
    "tiles": (rg.where(lambda b, h, p, j: (p + j + h) % 3 != 0), lambda b, h, p, j: ((p + j + h) % 3 != 0) & (b == b)),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_it_is_the_largest_visible_logit(engine: str, mask: str, dtype: torch.dtype) -> None:
    close = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-4}
    for queries, keys in SIZES:
        query, key, value = (
            3 * normal(2, heads, n, 24, seed=seed).to(dtype)
            for seed, (heads, n) in enumerate(((4, queries), (2, keys), (2, keys)))
        )
        bias = rg.alibi(4)
        visible, allows = MASKS[mask]
        attend = rg.Attention(mask=visible, bias=bias, sink=2.0, temperature=0.8)
        places = torch.arange(keys) - (torch.arange(queries) + keys - queries)[:, None]
        logits = query.double() @ key.double().repeat_interleave(2, 1).mT / 24**0.5
        slopes = 2.0 ** (-8 * torch.arange(1, 5, dtype=torch.float64) / 4)
        logits = (logits - slopes[:, None, None] * places.abs()) / 0.8
        b, h, p, j = torch.meshgrid(*map(torch.arange, (2, 4, queries, keys)), indexing="ij")
        logits = logits.masked_fill(~allows(b, h, p + keys - queries, j), -INF)
        for grad in (False, True):
            output, lse, largest = attend(
                query.clone().requires_grad_(grad), key, value, engine=engine, return_lse=True, return_max=True
            )
            assert not largest.requires_grad
            torch.testing.assert_close(largest.double(), logits.amax(-1), **close)
            plain, plain_lse = attend(query, key, value, engine=engine, return_lse=True)
            torch.testing.assert_close(output.detach(), plain)
            torch.testing.assert_close(lse.detach(), plain_lse)
            assert output.requires_grad == grad


@pytest.mark.parametrize("engine", [None, "reference"])
def test_rows_without_keys_have_none_and_rows_with_nan_are_nan(engine: str | None) -> None:
    query = key = value = torch.ones(1, 1, 4, 8)
    _, largest = rg.attention(query, key[:, :, :0], value[:, :, :0], engine=engine, return_max=True)
    assert (largest == -INF).all()
    key = key.clone()
    key[0, 0, 2, 1] = NAN
    for mask in (None, rg.causal()):
        _, largest = rg.attention(query, key, value, mask=mask, engine=engine, return_max=True)
        assert largest.isnan().tolist() == [[[mask is None] * 2 + [True] * 2]]


def test_it_works_with_three_axes_compile_autocast_vmap_and_small_caches() -> None:
    query, key, value = (normal(2, 5, 8, seed=n).float() for n in range(3))
    expected = (query @ key.mT / 8**0.5).amax(-1)
    attend = rg.Attention()
    assert attend(query, key, value, return_max=True)[1].shape == (2, 5)
    torch.testing.assert_close(attend(query, key, value, return_max=True)[1], expected)
    compiled = torch.compile(lambda *x: attend(*x, return_max=True), backend="aot_eager")
    torch.testing.assert_close(compiled(query, key, value)[1], expected)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(attend(query, key, value, return_max=True)[1], expected, rtol=0.02, atol=0.02)
    batched = torch.func.vmap(lambda *x: attend(*x, return_max=True)[1])(*(x.unsqueeze(0) for x in (query, key, value)))
    torch.testing.assert_close(batched[0], expected)
    cache = rg.nn.Cache(dtype=torch.int8)
    kept = cache.append(key[None], value[None])
    torch.testing.assert_close(attend(query[None], *kept, return_max=True)[1][0], expected, rtol=0.05, atol=0.05)


def test_other_engines_refuse_it() -> None:
    x = torch.zeros(1, 1, 4, 8)
    for engine in ("sdpa", "flex"):
        with pytest.raises(rg.CannotCompute, match="largest logits"):
            rg.attention(x, x, x, engine=engine, return_max=True)
