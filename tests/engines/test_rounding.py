"""Every engine is within the a-priori rounding bound of the exact result, and on average as exact as dense torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tools.rounding import mean_errors, random_call
from torch import Tensor

import regard as rg
from regard.engines.select import ENGINES
from tests.bounds import judge
from tests.definition import Reader, dense
from tests.engines.calls import normal
from tests.hostile import Computed, check, within
from tests.strategies import Call, Hostile, calls

WITH_LSE = [name for name in ENGINES if name not in ("sdpa", "flex", "triton")]  # triton has tests/engines/triton


def plain(call: Call, dtype: torch.dtype, engine: str) -> Hostile:
    return Hostile(call, dtype, ("plain", "plain", "plain"), [], engine, 2, False)


def can(call: Call, dtype: torch.dtype, engine: str, lse: bool = True) -> bool:
    tensors = [t.to(dtype) for t in (call.query, call.key, call.value)]
    return not ENGINES[engine].why_not(rg.Attention(**call.description).problem(*tensors, return_lse=lse))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("engine", WITH_LSE)
@settings(max_examples=25)
@given(call=calls(longest=24))
def test_results_gradients_and_statistics_are_within_the_bound(engine: str, dtype: torch.dtype, call: Call) -> None:
    assume(can(call, dtype, engine))
    assert check(plain(call, dtype, engine)) == engine


@settings(max_examples=60)
@given(call=calls(longest=24))
def test_the_output_of_sdpa_is_within_the_bound(call: Call) -> None:
    assume(can(call, torch.float32, "sdpa", lse=False))
    tensors = [t.float() for t in (call.query, call.key, call.value)]
    with torch.no_grad():
        output = rg.attention(*tensors, engine="sdpa", **call.description)
    judged = judge([t.double() for t in tensors], call.description, [], torch.float32)
    within("output", output, judged.output, judged.output_bound)


def one_call(
    score: Any, D: int, stretch: float = 1.0, planted: float | None = None, seed: int = 0, **rest: Any
) -> Call:
    query, key, value = (normal(1, 2, 5, D, seed=seed + n) for n in range(3))
    query, key = query * stretch, key * stretch
    if planted is not None:
        query.view(-1)[3] = planted
    return Call(query, key, value, {"score": score}, list(score.tensors()))


def learned(*shape: int, seed: int) -> Tensor:
    return normal(*shape, seed=seed).requires_grad_()


LARGE = {
    "bilinear, logits in the hundreds": lambda seed: one_call(
        rg.Bilinear(learned(256, 256, seed=seed)), 256, planted=-300.0, seed=seed
    ),
    "additive of 587 numbers": lambda seed: one_call(rg.Additive(learned(587, seed=seed)), 587, 6.0, seed=seed),
    "cosine of a query that counts as longer": lambda seed: one_call(
        rg.Cosine(learned(2, seed=seed)), 1, planted=1.2e-38, seed=seed
    ),
    "one large number of 128": lambda seed: one_call(rg.Dot(), 128, planted=-300.0, seed=seed),
}


@pytest.mark.parametrize("engine", WITH_LSE)
@pytest.mark.parametrize("name", LARGE)
def test_single_calls_are_within_the_bound(name: str, engine: str) -> None:
    for seed in range(2):
        assert check(plain(LARGE[name](10 * seed), torch.float32, engine)) == engine


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("engine", [*WITH_LSE, "sdpa"])
def test_a_cosine_of_a_zero_query_is_zero(engine: str, dtype: torch.dtype) -> None:
    query, key, value = (normal(1, 1, 3, 4, seed=n).to(dtype) for n in range(3))
    query[0, 0, 1] = 0
    output = rg.attention(query, key, value, score=rg.Cosine(), engine=engine)
    torch.testing.assert_close(output[0, 0, 1], value[0, 0].float().mean(0).to(dtype), rtol=1e-2, atol=1e-2)


def test_sixteen_bit_gradients_of_tiles_are_added_up_before_they_are_rounded() -> None:
    """The gradient of a value is a sum over 16 tiles of queries, each too small to be a float16 number."""
    query, key = torch.zeros(1, 1, 4096, 1, dtype=torch.float16), torch.zeros(1, 1, 512, 1, dtype=torch.float16)
    value = torch.zeros(1, 1, 512, 1, dtype=torch.float16, requires_grad=True)
    output = rg.attention(query, key, value, engine="tiled")
    output.backward(torch.full_like(output, 2.0**-24))
    assert value.grad is not None
    torch.testing.assert_close(value.grad, torch.full_like(value, 2.0**-21), rtol=0, atol=2.0**-25)


@pytest.mark.parametrize("engine", ["native", "reference", "tiled"])
def test_numbers_near_the_least_of_a_dtype_are_within_the_bound(engine: str) -> None:
    for seed in range(8):
        scale = torch.tensor([-0.0046], dtype=torch.float64, requires_grad=True)
        call = one_call(rg.Cosine(scale=scale), 2, stretch=0.1, seed=seed)
        assert check(plain(call, torch.float16, engine)) == engine
        call = one_call(rg.Dot(), 2, seed=seed)
        call.value.mul_(torch.finfo(torch.float64).tiny)
        assert check(plain(call, torch.float64, engine)) == engine


def test_the_bound_sees_queries_that_were_rounded_to_bfloat16() -> None:
    call = one_call(rg.Dot(), 64)
    tensors = [t.float() for t in (call.query, call.key, call.value)]
    judged = judge([t.double() for t in tensors], call.description, [], torch.float32)
    rounded = [t.bfloat16().float() for t in tensors]
    output, lse = rg.attention(*rounded, return_lse=True, **call.description)
    for name, ours, exact, bound in (
        ("output", output, judged.output, judged.output_bound), ("lse", lse, judged.lse, judged.lse_bound),
    ):  # fmt: skip
        with pytest.raises(AssertionError, match="rounding allows"):
            within(name, ours, exact, bound)


@settings(max_examples=40)
@given(call=calls(longest=24), twice=st.booleans())
def test_the_bound_holds_for_dense_torch_in_float32(call: Call, twice: bool) -> None:
    """Also with keys in reverse order: the bound does not depend on the order of sums."""
    tensors = [t.float() for t in (call.query, call.key, call.value)]
    judged = judge([t.double() for t in tensors], call.description, [], torch.float32)
    if twice:
        tensors = [t.flip(-1) if n < 2 else t for n, t in enumerate(tensors)]
        assume(not isinstance(call.description.get("score"), rg.Additive | rg.Bilinear))
        assume("shaw" not in repr(call.description.get("bias")))
    with torch.no_grad():
        actual = dense(*tensors, call.description, Reader(torch.float32))
    ours = Computed(actual.output, actual.lse, [])
    within("output", ours.output, judged.output, judged.output_bound)
    within("lse", ours.lse.masked_fill(judged.lse.isneginf(), 0.0), judged.lse, judged.lse_bound)


@pytest.mark.parametrize("kind", ["plain", "causal", "bilinear", "additive"])
def test_the_mean_error_is_at_most_twice_that_of_dense_torch(kind: str) -> None:
    for name, (ours, torchs) in mean_errors("native", kind, 12).items():
        assert ours <= 2 * torchs, f"{name}: {ours:.3g}, and dense torch {torchs:.3g}"


def test_calls_of_one_seed_are_the_same() -> None:
    for one, other in zip(*(random_call("plain", 3).tensors() for _ in range(2)), strict=True):
        assert torch.equal(one, other)
