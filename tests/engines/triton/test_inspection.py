"""Inspection by the kernels for GPUs, in Triton's interpreter, compared with dense weights in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard as rg
from regard.engines import inspection, triton
from tests.engines.calls import normal
from tests.engines.triton.selection import inspect_by_kernels
from tests.engines.triton.test_agreement import D, H, K, Q, described

pytestmark = pytest.mark.skipif(
    bool(triton.why_missing()) or not triton.is_interpreted(), reason="needs triton and TRITON_INTERPRET=1"
)


@pytest.fixture(autouse=True)
def called() -> Iterator[list[str]]:
    with inspect_by_kernels() as names:
        yield names


def exact_weights(attend: rg.Attention, query: Tensor, key: Tensor) -> Tensor:
    """Return the dense weights in float64, by torch."""
    query, key = query.detach().double(), key.detach().double()
    H, Q = query.shape[1:3]
    with torch.no_grad():
        every = torch.arange(H), torch.arange(Q), torch.arange(key.shape[2])
        return inspection.weights(attend.problem(query, key), query, key, *every)


def assert_near(ours: Tensor | None, exact: Tensor, *, rtol: float = 1e-5, atol: float = 2e-6) -> None:
    assert ours is not None
    torch.testing.assert_close(ours.double(), exact.double(), rtol=rtol, atol=atol, equal_nan=True)


FEATURES = [name for name in described() if "dropout" not in name]


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_is_inspected_by_the_kernels(name: str, called: list[str]) -> None:
    attend = rg.Attention(**described()[name][0])
    query, key = normal(1, H, Q, D, seed=1).float(), normal(1, 1, K, D, seed=2).float()
    dense, columns = exact_weights(attend, query, key), [K - 1, 0, 1, 63, 64, 1]
    with torch.no_grad():
        seen = attend.weights(query, key, heads=[1], rows=slice(11, 38), columns=columns)
        pooled = attend.map(query, key, size=(3, 4))
        ours = attend.statistics(query, key, top=3, mass_on=columns)
    assert set(called) == {"statistics_kernel", "top_kernel", "weights_kernel", "pool_kernel"}
    assert_near(seen, dense[:, [1], 11:38][..., columns])
    assert_near(pooled, F.adaptive_avg_pool2d(dense, (3, 4)))
    exact = attend.statistics(query.double(), key.double(), top=3, mass_on=columns)
    for field in ("lse", "entropy", "max_logit", "distance", "top_weights", "mass"):
        assert_near(getattr(ours, field), getattr(exact, field), rtol=2e-5, atol=1e-5)
    hidden = ours.top_keys < 0
    assert torch.equal(hidden, exact.top_keys < 0)
    assert_near(dense.gather(-1, ours.top_keys.clamp(min=0)).masked_fill(hidden, 0.0), exact.top_weights)


def test_rows_with_gaps_and_several_heads(called: list[str]) -> None:
    attend = rg.Attention(mask=rg.where(lambda b, h, p, j: (p * 7 + j * 3 + h) % 5 < 2), sink=torch.tensor([0.5, -1.0]))
    query, key = normal(2, H, Q, D, seed=1).float(), normal(2, 1, K, D, seed=2).float()
    dense, rows = exact_weights(attend, query, key), [39, 3, 3, -5]
    assert_near(attend.weights(query, key, heads=[1, 0, 1], rows=rows), dense[:, [1, 0, 1]][:, :, rows])
    assert_near(attend.weights(query, key), dense)
    assert called == ["statistics_kernel", "weights_kernel"] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_of_16_bits_are_rounded_once(dtype: torch.dtype) -> None:
    attend = rg.Attention(mask=rg.causal())
    query, key = normal(1, 2, Q, 17, seed=1).to(dtype), normal(1, 2, K, 17, seed=2).to(dtype)
    dense, eps = exact_weights(attend, query, key), torch.finfo(dtype).eps
    seen, pooled = attend.weights(query, key), attend.map(query, key, size=(2, 5))
    assert seen.dtype == pooled.dtype == dtype
    assert_near(seen, dense, rtol=0.51 * eps, atol=1e-7)
    assert_near(pooled, F.adaptive_avg_pool2d(dense, (2, 5)), rtol=0.51 * eps, atol=1e-7)
    lse = attend.statistics(query, key).lse
    assert lse.dtype == torch.float32
    assert_near(lse, attend.statistics(query.double(), key.double()).lse)


@pytest.mark.parametrize("size", [(1, 1), (7, 3), (6, 2), (1, K + 5)])
@pytest.mark.parametrize("mask", [None, rg.padding([0, 50]), rg.global_tokens([2, 65]) | rg.window(9, 4)], ids=repr)
def test_maps_of_any_size_are_means(mask: rg.Mask | None, size: tuple[int, int]) -> None:
    attend = rg.Attention(mask=mask, offset=3)
    query, key = normal(2, 1, 5, D, seed=1).float(), normal(2, 1, K, D, seed=2).float()
    assert_near(attend.map(query, key, size=size), F.adaptive_avg_pool2d(exact_weights(attend, query, key), size))


def test_more_top_keys_than_one_pass_finds(called: list[str]) -> None:
    query, key = torch.ones(1, 1, 2, 2), torch.zeros(1, 1, K, 2)
    key[0, 0, 5:40, 0] = 3.0  # equal weights: the first keys come first
    key[0, 0, 44, 0] = 7.0
    ours = rg.Attention(mask=rg.padding([60])).statistics(query, key, top=75)
    order = [44, *range(5, 40), *range(5), *range(40, 44), *range(45, 60), *[-1] * 15]
    assert ours.top_keys.tolist() == [[[order, order]]]
    assert called.count("top_kernel") == 5
    assert not ours.top_weights[..., 60:].any()
    assert_near(ours.top_weights.sum(-1), torch.ones(1, 1, 2))


def test_no_top_keys_are_found_in_no_pass(called: list[str]) -> None:
    ours = rg.Attention().statistics(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 3, 2), top=0)
    assert ours.top_keys.shape == (1, 1, 2, 0)
    assert called == ["statistics_kernel"]


@pytest.mark.parametrize("sink", [None, 0.5])
def test_rows_that_see_nothing_are_zero(sink: float | None) -> None:
    attend = rg.Attention(mask=rg.padding([0, K]), sink=sink)
    query, key = normal(2, 1, 5, D, seed=1).float(), normal(2, 1, K, D, seed=2).float()
    assert not attend.weights(query, key, rows=[1, 4], columns=[0, 7])[0].any()
    assert not attend.map(query, key, size=(2, 3))[0].any()
    rows = attend.statistics(query, key, mass_on=[0])
    assert rows.mass is not None
    assert (rows.lse[0] == (float("-inf") if sink is None else sink)).all()
    assert not torch.stack([rows.entropy[0], rows.distance[0], rows.mass[0]]).any()
    assert rows.max_logit[0].isneginf().all()
    assert (rows.top_keys[0] == -1).all()
    assert not rows.top_weights[0].any()


@pytest.mark.parametrize("edges", [[], [(3, 65)]], ids=["intervals", "tiles"])
def test_numbers_that_are_not_finite_affect_only_the_rows_that_see_them(edges: list[tuple[int, int]]) -> None:
    mask = rg.padding([60]) | rg.edges(edges) if edges else rg.padding([60])
    attend = rg.Attention(mask=mask, offset=0)
    query, key = normal(1, H, Q, D, seed=1).float(), normal(1, 1, K, D, seed=2).float()
    dense = exact_weights(attend, query, key)
    query[0, 1, 7, 0] = float("inf")
    key[0, 0, 65], key[0, 0, 69] = float("nan"), float("-inf")
    lost = torch.zeros(1, H, Q, dtype=torch.bool)
    lost[0, 1, 7] = True
    lost[0, :, 3] = bool(edges)
    seen, rows = attend.weights(query, key), attend.statistics(query, key, mass_on=[0, 50])
    assert_near(seen[~lost], dense[~lost])
    assert seen[lost].isnan().any(-1).all()
    pooled = attend.map(query, key, size=(Q, 1))
    assert torch.equal(pooled.isnan().any(-1), lost)
    assert_near(pooled[~lost], F.adaptive_avg_pool2d(dense, (Q, 1))[~lost])
    assert rows.mass is not None
    assert_near(rows.mass[~lost], dense[..., [0, 50]].sum(-1)[~lost])
    for field in (rows.lse, rows.entropy, rows.distance, rows.mass):
        assert torch.equal(field.isnan(), lost)
    assert (rows.top_keys < 60).logical_or(rows.top_keys == 65)[~lost].all()


def test_weights_that_require_gradients_are_left_to_torch(called: list[str]) -> None:
    query, key = normal(1, H, 6, D, seed=1).float().requires_grad_(), normal(1, 1, 9, D, seed=2).float()
    exact = query.detach().double().requires_grad_()
    attend = rg.Attention(mask=rg.causal())
    for x in (query, exact):
        attend.weights(x, key.to(x), columns=[1, 2]).square().sum().backward()
    assert query.grad is not None
    assert exact.grad is not None
    assert_near(query.grad, exact.grad)
    assert called == []


@pytest.mark.parametrize(
    "description",
    [{"normalization": rg.Sigmoid(0.0)}, {"bias": rg.alibi(H), "rows": [0, 4]}],
    ids=["a sigmoid", "a bias of distance and rows with gaps"],
)
def test_what_the_kernels_do_not_support_is_left_to_torch(description: dict[str, Any], called: list[str]) -> None:
    rows = description.pop("rows", None)
    attend = rg.Attention(**description)
    query, key = normal(1, H, 6, D, seed=1).float(), normal(1, 1, 9, D, seed=2).float()
    dense = exact_weights(attend, query, key)
    assert_near(attend.weights(query, key, rows=rows), dense if rows is None else dense[:, :, rows])
    assert called == []


def test_huge_offsets_give_huge_distances() -> None:
    query, key = normal(1, 1, 3, D, seed=1).float(), normal(1, 1, 9, D, seed=2).float()
    rows = rg.Attention(offset=2**40).statistics(query, key)
    assert_near(rows.distance, torch.full((1, 1, 3), 2.0**40), rtol=1e-6, atol=0.0)
