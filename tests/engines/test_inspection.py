"""Inspection without materialised weights, compared with the dense weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard as rg
from regard.engines import inspection, native
from regard.engines.problem import Problem
from regard.geometry import Frame
from tests.engines.test_native import described
from tests.strategies import Call, calls

compiled = pytest.mark.skipif(bool(native.why_missing()), reason=native.why_missing() or "the library is there")

MASKS = {
    "none": None,
    "intervals": rg.causal() & rg.window(40, 0),
    "intervals of each batch row": rg.padding([33, 0]),
    "tiles": rg.global_tokens([2, 70]) | rg.window(9, 4),
    "bits": rg.where(lambda b, h, p, j: (p * 7 + j * 3 + h) % 5 < 2),
    "bits of each batch row": rg.where(lambda b, h, p, j: (p + j + b) % (2 + b) == 0) & rg.padding([90, 7]),
}


def inputs(
    *, Q: int = 70, K: int = 100, D: int = 16, dtype: torch.dtype = torch.float64, seed: int = 7
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn((2, 4, Q, D), generator=generator, dtype=torch.float64)
    return query.to(dtype), torch.randn((2, 2, K, D), generator=generator, dtype=torch.float64).to(dtype)


def problem_of(attend: rg.Attention, query: Tensor, key: Tensor) -> Problem:
    return attend.problem(query, key)


def dense_weights(attend: rg.Attention, query: Tensor, key: Tensor) -> Tensor:
    """Return the dense weights, in plain torch."""
    problem, (H, Q), K = problem_of(attend, query, key), query.shape[1:3], key.shape[2]
    with torch.no_grad():
        return inspection.weights(problem, query, key, torch.arange(H), torch.arange(Q), torch.arange(K))


def assert_exact(ours: Tensor | None, theirs: Tensor) -> None:
    assert ours is not None
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, equal_nan=True)


@compiled
@pytest.mark.parametrize("name", [name for name in described() if "dropout" not in name])
def test_inspection_supports_every_feature_of_the_kernel(name: str) -> None:
    attend, (query, key) = rg.Attention(**described()[name][1]), inputs()
    problem, dense = problem_of(attend, query, key), dense_weights(attend, query, key)
    heads, rows, columns = torch.tensor([3, 1]), torch.arange(11, 52), torch.tensor([99, 0, 1, 2, 63, 64, 2])
    with torch.no_grad():
        assert_exact(native.pooled_weights(problem, query, key, (9, 23)), F.adaptive_avg_pool2d(dense, (9, 23)))
        seen = native.weights(problem, query, key, heads, rows, columns)
        assert_exact(seen, dense[:, heads][:, :, rows][..., columns])
        for engine in (native, inspection):
            *_, mass = engine.statistics(problem, query, key, 1, columns)
            assert_exact(mass, dense[..., columns.unique()].sum(-1))


@settings(max_examples=60, deadline=None)
@given(calls(), st.data())
def test_random_calls_agree_with_the_dense_weights(call: Call, data: st.DataObject) -> None:
    attend = rg.Attention(**call.description)
    (H, Q), K = call.query.shape[1:3], call.key.shape[2]
    dense = dense_weights(attend, call.query, call.key)

    def some(n: int) -> list[int]:
        return data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n) | st.just(list(range(n))))

    size = data.draw(st.tuples(st.integers(1, 2 * Q + 3), st.integers(1, 2 * K + 3)))
    heads, rows, columns = some(H), some(Q), some(K)
    with torch.no_grad():
        assert_exact(attend.map(call.query, call.key, size=size), F.adaptive_avg_pool2d(dense, size))
        seen = attend.weights(call.query, call.key, heads=heads, rows=rows, columns=columns)
        assert_exact(seen, dense[:, heads][:, :, rows][..., columns])
        statistics = attend.statistics(call.query, call.key, mass_on=columns)
        assert_exact(statistics.mass, dense[..., sorted(set(columns))].sum(-1))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("size", [(1, 1), (1, 100), (70, 1), (70, 100), (71, 101), (13, 64), (300, 7), (139, 511)])
def test_a_map_of_any_size_equals_the_pooled_weights(mask: rg.Mask | None, size: tuple[int, int]) -> None:
    attend, (query, key) = rg.Attention(mask=mask, sink=0.5), inputs()
    pooled = F.adaptive_avg_pool2d(dense_weights(attend, query, key), size)
    assert_exact(attend.map(query, key, size=size), pooled)
    assert_exact(inspection.pooled_weights(problem_of(attend, query, key), query, key, size), pooled)


def test_a_bin_of_many_blocks_of_rows_is_one_mean() -> None:
    attend, (query, key) = rg.Attention(mask=rg.causal()), inputs(Q=1501, K=333)
    for size in [(1, 3), (2, 50), (7, 333)]:
        assert_exact(attend.map(query, key, size=size), F.adaptive_avg_pool2d(dense_weights(attend, query, key), size))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes_are_rounded_once(mask: rg.Mask | None, dtype: torch.dtype) -> None:
    attend, (query, key) = rg.Attention(mask=mask), inputs(dtype=dtype)
    exact = dense_weights(attend, query.double(), key.double())
    close = {"rtol": torch.finfo(dtype).eps if dtype != torch.float32 else 2e-6, "atol": 1e-7}
    columns = slice(5, 95, 3)
    seen = attend.weights(query, key, rows=slice(30, 60), columns=columns)
    assert seen.dtype == dtype
    torch.testing.assert_close(seen.double(), exact[:, :, 30:60, columns], **close)
    pooled = attend.map(query, key, size=(9, 14))
    assert pooled.dtype == dtype
    torch.testing.assert_close(pooled.double(), F.adaptive_avg_pool2d(exact, (9, 14)), **close)
    mass = attend.statistics(query, key, mass_on=columns).mass
    assert mass is not None
    assert mass.dtype == torch.float32
    torch.testing.assert_close(mass.double(), exact[..., columns].sum(-1), rtol=2e-6, atol=1e-7)


def test_strides_and_broadcast_axes_are_read_as_they_are() -> None:
    attend, (query, key) = rg.Attention(mask=rg.causal()), inputs()
    turned = query.transpose(1, 3).contiguous().transpose(1, 3)
    shared = key[:1, :, ::2].expand(2, -1, -1, -1)
    dense = dense_weights(attend, query, shared.contiguous())
    assert_exact(attend.map(turned, shared, size=(8, 9)), F.adaptive_avg_pool2d(dense, (8, 9)))
    assert_exact(attend.weights(turned, shared, rows=[3, 60], heads=-1), dense[:, 3:, [3, 60]])


@pytest.mark.parametrize("mask", [rg.padding([80]), rg.padding([80]) | rg.edges([(3, 90)])], ids=repr)
def test_non_finite_numbers_affect_only_the_rows_that_see_them(mask: rg.Mask) -> None:
    attend, (query, key) = rg.Attention(mask=mask, offset=0), inputs()
    query, key = query[:1], key[:1].clone()
    key[:, :, 90] = float("nan")
    key[:, 0, 95] = float("inf")
    dense = dense_weights(attend, query, key)
    blind = dense.isfinite().all(-1)  # (1, H, Q)
    assert blind.sum() in (4 * 69, 4 * 70)
    assert_exact(attend.weights(query, key, rows=slice(0, 66)), dense[:, :, :66])
    assert_exact(attend.map(query, key, size=(70, 4)), F.adaptive_avg_pool2d(dense, (70, 4)))
    assert_exact(attend.statistics(query, key, mass_on=[0, 50]).mass, dense[..., [0, 50]].sum(-1))


def test_rows_that_see_nothing_are_zero() -> None:
    attend, (query, key) = rg.Attention(mask=rg.padding([0, 100])), inputs()
    assert not attend.map(query, key, size=(5, 6))[0].any()
    assert not attend.weights(query, key, rows=[1, 5], columns=[0, 7])[0].any()
    mass = attend.statistics(query, key, mass_on=slice(None)).mass
    assert mass is not None
    assert not mass[0].any()
    torch.testing.assert_close(mass[1], torch.ones_like(mass[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_logits_are_all_one_key_and_never_nan(dtype: torch.dtype) -> None:
    query, key = (t.to(dtype) * 1e4 for t in inputs())
    for bias in (None, 1e30 * torch.arange(100, dtype=dtype)[None]):
        attend = rg.Attention(bias=bias)
        dense = dense_weights(attend, query, key)
        assert attend.map(query, key, size=(3, 100)).isfinite().all()
        torch.testing.assert_close(attend.weights(query, key), dense)
        torch.testing.assert_close(attend.statistics(query, key, mass_on=[99]).mass, dense[..., 99])


@pytest.mark.parametrize("rise", [0.0, 0.5, 40.0, -40.0])
@pytest.mark.parametrize("top", [1, 4, 11])
def test_statistics_hold_where_logits_rise_along_the_keys_and_repeat(rise: float, top: int) -> None:
    query, key = inputs(Q=9, K=1300)
    key = key[:, :, torch.arange(1300) % 650]  # every logit occurs twice, except for the bias
    attend = rg.Attention(bias=rise * (torch.arange(1300, dtype=torch.float64) // 400)[None])
    dense = dense_weights(attend, query, key)
    places = torch.arange(1300.0, dtype=torch.float64)
    away = (places[-9:, None] - places).abs()
    statistics = attend.statistics(query, key, top=top, mass_on=slice(3, 900))
    assert_exact(statistics.entropy, torch.special.entr(dense).sum(-1))
    assert_exact(statistics.distance, (dense * away).sum(-1))
    assert_exact(statistics.mass, dense[..., 3:900].sum(-1))
    largest = dense.topk(top).values
    assert_exact(statistics.top_weights, largest)
    assert_exact(dense.gather(-1, statistics.top_keys), largest)
    assert (statistics.top_keys.sort(-1).values.diff() > 0).all()


@compiled
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_the_number_of_threads_does_not_change_a_bit(mask: rg.Mask | None) -> None:
    attend, (query, key) = rg.Attention(mask=mask), inputs(Q=500, K=100, dtype=torch.float32)
    before, runs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            maps = [attend.map(query, key, size=size) for size in [(1, 7), (3, 100), (64, 64), (600, 9)]]
            windows = attend.weights(query, key), attend.weights(query, key, rows=slice(100, 400), columns=[1, 5, 6])
            runs.append([*maps, *windows, *attend.statistics(query, key, mass_on=[0, 50])])
    finally:
        torch.set_num_threads(before)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_windows_carry_gradients_if_requested() -> None:
    attend, (query, key) = rg.Attention(mask=rg.causal()), inputs()
    part = {"rows": [5, 69], "columns": slice(0, 40), "heads": 2}
    plain = attend.weights(query, key, **part)
    query.requires_grad_()
    seen = attend.weights(query, key, **part)
    assert_exact(seen.detach(), plain)
    seen.square().sum().backward()
    assert query.grad is not None
    assert query.grad[:, 2, [5, 69]].any()


def test_a_window_evaluates_a_mask_only_at_its_rows() -> None:
    asked = 0

    def rule(b: Tensor, h: Tensor, p: Tensor, j: Tensor) -> Tensor:
        nonlocal asked
        bits = (p - j) % 3 == 0
        asked += bits.numel()
        return bits

    query, key = torch.randn(2, 1, 1, 8192, 8)
    seen = rg.Attention(mask=rg.where(rule)).weights(query, key, rows=slice(4000, 4032), columns=slice(4000, 4032))
    assert bool(((seen > 0) == rg.where(rule).allows(Frame(1, 1, 32, 32, 0).indices())).all())
    assert asked < 3 * 32 * 8192


def test_the_mass_is_none_unless_keys_are_named() -> None:
    query, key = inputs()
    assert rg.Attention().statistics(query, key).mass is None
    none = rg.Attention().statistics(query, key, mass_on=[]).mass
    assert none is not None
    assert not none.any()
    last = rg.Attention().statistics(query[0, 0], key[0, 0], mass_on=-1).mass
    assert last is not None
    assert_exact(last, dense_weights(rg.Attention(), query, key)[0, 0, :, -1])


def test_missing_keys_have_no_mass() -> None:
    query, key = inputs()
    with pytest.raises(ValueError, match="mass_on must be between -100 and 99"):
        rg.Attention().statistics(query, key, mass_on=[100])
    with pytest.raises(TypeError, match="mass_on must be a number, a slice, a list or an index tensor"):
        rg.Attention().statistics(query, key, mass_on="first")  # type: ignore[arg-type]
