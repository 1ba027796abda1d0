"""The kernels for GPUs, in Triton's interpreter on a CPU: results and gradients are within the rounding bound."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from torch import Tensor

import regard as rg
from regard.engines import triton
from regard.engines.select import ENGINES
from tests.engines.calls import normal
from tests.engines.triton.selection import inspect_by_kernels
from tests.hostile import check
from tests.strategies import Call, Hostile, calls, hostile, sizes

pytestmark = pytest.mark.skipif(
    bool(triton.why_missing()) or not triton.is_interpreted(), reason="needs triton and TRITON_INTERPRET=1"
)
EXAMPLES = int(os.environ.get("REGARD_TRITON_EXAMPLES", "0"))  # the interpreter takes about a second for a call
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True, scope="module")
def called() -> Iterator[list[str]]:
    with inspect_by_kernels() as names:  # `check` inspects every call
        yield names


def plain(call: Call, dtype: torch.dtype) -> Hostile:
    return Hostile(call, dtype, ("plain", "plain", "plain"), [], "triton", 2, False)


def supports(case: Hostile) -> bool:
    try:
        problem = rg.Attention(**case.call.description).problem(*case.tensors(), return_lse=True)
    except ValueError:
        return False
    return not ENGINES["triton"].why_not(problem)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=max(3, EXAMPLES))
@given(call=calls(axes=sizes(longest=24)))
def test_random_calls_are_within_the_bound(dtype: torch.dtype, call: Call) -> None:
    assume(supports(plain(call, dtype)))
    assert check(plain(call, dtype)) == "triton"


@settings(max_examples=max(5, EXAMPLES))
@given(case=hostile(("triton",), sizes(longest=24), tuple(DTYPES)))
def test_absurd_numbers_layouts_and_dropout_are_within_the_bound(case: Hostile) -> None:
    assume(supports(case))
    assert check(case) == "triton"


def learned(*shape: int) -> Tensor:
    return normal(*shape, seed=9).requires_grad_()


H, Q, K, D, E = 2, 40, 70, 4, 5


def described() -> dict[str, tuple[dict[str, Any], list[Tensor]]]:
    """Every feature once, over several blocks and tiles."""
    table, buckets, keys, values, heads = learned(15, H), learned(8, H), learned(5, D), learned(5, E), learned(H)
    dense, column, weight = learned(1, H, Q, K), learned(1, 1, 1, K), learned(D)
    some = rg.where(lambda b, h, p, j: (p * 7 + j * 3 + h + b) % 5 < 2)
    shuffled = rg.documents((torch.arange(K) * 7 % 13) // 4)
    return {
        "causal": ({"mask": rg.causal()}, []),
        "window and alibi": ({"mask": rg.causal() & rg.window(20, 0), "bias": rg.alibi(H)}, []),
        "padding, cap and sink": ({"mask": rg.padding([50]), "score": rg.Dot(softcap=2.0), "sink": heads}, [heads]),
        "a table by distance": ({"bias": rg.relative(table), "mask": some, "temperature": 0.7}, [table]),
        "buckets": ({"bias": rg.t5(buckets)}, [buckets]),
        "documents out of order": ({"mask": shuffled}, []),
        "cosine": ({"score": rg.Cosine(scale=heads), "mask": rg.global_tokens([2]) | rg.window(9, 0)}, [heads]),
        "a dense bias": ({"bias": dense, "mask": some}, [dense]),
        "a bias for keys": ({"bias": column, "mask": rg.causal()}, [column]),
        "dropout": ({"dropout": 0.4, "mask": rg.causal()}, []),
        "shaw": ({"bias": rg.shaw(keys, values), "mask": rg.causal()}, [keys, values]),
        "shaw and dropout": ({"bias": rg.shaw(keys, values), "dropout": 0.5, "mask": some}, [keys, values]),
        "additive": ({"score": rg.Additive(weight), "mask": rg.window(30, 9)}, [weight]),
    }


@pytest.mark.parametrize("name", described())
def test_every_feature_is_within_the_bound(name: str) -> None:
    description, tables = described()[name]
    query, key, value = normal(1, H, Q, D, seed=1), normal(1, 1, K, D, seed=2), normal(1, 1, K, E, seed=3)
    call = Call(query, key, value, description, tables)
    assert check(plain(call, torch.float32)) == "triton"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_widths_up_to_256_are_supported(dtype: torch.dtype) -> None:
    call = Call(normal(1, 1, 20, 256, seed=1), normal(1, 1, 40, 256, seed=2), normal(1, 1, 40, 200, seed=3), {}, [])
    assert check(plain(call, dtype)) == "triton"


def test_rows_that_see_nothing_are_zero() -> None:
    query, key, value = (normal(1, 1, 5, 4, seed=n, dtype=torch.float32).requires_grad_() for n in range(3))
    output, lse = rg.attention(query, key, value, mask=rg.padding([0]), engine="triton", return_lse=True)
    assert (output == 0).all()
    assert lse.isneginf().all()
    assert all((grad == 0).all() for grad in torch.autograd.grad(output.sum(), [query, key, value]))


def test_dropout_drops_the_same_weights_as_other_engines() -> None:
    query, key, value = torch.zeros(1, 2, 70, 4), torch.zeros(1, 2, 40, 4), torch.eye(40).expand(1, 2, 40, 40)
    actual = []
    for engine in ("triton", "reference"):
        torch.manual_seed(3)
        actual.append(rg.attention(query, key, value, dropout=0.3, engine=engine))
    torch.testing.assert_close(*actual)
    assert ((actual[0] == 0) == (actual[1] == 0)).all()


def test_derivatives_of_derivatives_are_computed_by_tiles() -> None:
    query, key, value = (normal(1, 1, 6, 4, seed=n, dtype=torch.float32).requires_grad_() for n in range(3))
    attend = rg.Attention(mask=rg.causal())
    actual = []
    for engine in ("triton", "reference"):
        output = attend(query, key, value, engine=engine)
        (first,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
        seconds = torch.autograd.grad(first.square().sum(), [query, key, value])
        _, tangent = torch.func.jvp(lambda q, e=engine: attend(q, key, value, engine=e), (query,), (query.cos(),))
        actual.append([first, *seconds, tangent])
    for ours, exact in zip(*actual, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-5)
    explained = attend.explain(query, key, value, engine="triton")
    assert explained.fallbacks == ("tiled computes second derivatives",)
