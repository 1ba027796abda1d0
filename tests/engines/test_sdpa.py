"""Numbers that torch's kernel mishandles: NaN, infinity, and products that overflow."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.engines import sdpa
from tests.test_attention import dense, seeded_inputs

BAD = [math.nan, math.inf]
LARGE = 3e38  # its product with a query overflows
MASKS: dict[str, rg.Mask | None] = {
    "none": None,
    "causal": rg.causal(),
    "window": rg.causal() & rg.window(5, 0),
    "padding": rg.padding([3, 0]),
    "first keys": rg.where(lambda b, h, p, j: j >= 16),
}


def tensors(queries: int, keys: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(queries + keys)
    shapes = ((2, 2, queries, 8), (2, 1, keys, 8), (2, 1, keys, 8))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def results(inputs: list[Tensor], engine: str, **description: Any) -> list[Tensor]:
    """The output and the gradients of query, key and value."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    output = rg.attention(*leaves, engine=engine, **description)
    grad = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("size", [(6, 6), (22, 22), (5, 40), (530, 530), (3, 1030)])
@pytest.mark.parametrize("where", ["query", "first key", "last key", "all keys", "last value", "late keys and values"])
def test_bad_numbers_reach_what_they_should(bad: float, mask: str, size: tuple[int, int], where: str) -> None:
    query, key, value = inputs = tensors(*size)
    if where == "query":
        query[:, :, 1, 3] = bad
    elif where == "last value":
        value[:, :, -1] = bad
    elif where == "late keys and values":
        key[:, :, size[1] // 2 :, 0], value[:, :, size[1] // 2 :, 1] = bad, bad
    else:
        key[:, :, {"first key": 0, "last key": -1, "all keys": slice(None)}[where], 2] = bad
    description = {"mask": MASKS[mask], "offset": 0 if mask == "causal" else None}
    with torch.no_grad():
        output = rg.attention(*inputs, engine="sdpa", **description)
        expected = rg.attention(*inputs, engine="reference", **description)
    torch.testing.assert_close(output, expected, equal_nan=True)
    actual, right = results(inputs, "sdpa", **description), results(inputs, "tiled", **description)
    torch.testing.assert_close(actual, right, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("size", [(6, 6), (22, 22), (530, 530), (3, 1030)])
def test_a_masked_key_whose_product_overflows_reaches_nothing(size: tuple[int, int]) -> None:
    query, key, value = inputs = tensors(*size)
    key[:, :, -1] = LARGE
    hidden = {"mask": rg.padding([size[1] - 1] * 2)}
    actual, right = results(inputs, "sdpa", **hidden), results([query, key[:, :, :-1], value[:, :, :-1]], "reference")
    torch.testing.assert_close(actual[:2], right[:2], rtol=1e-4, atol=1e-4)
    for grad, other in zip(actual[2:], right[2:], strict=True):
        torch.testing.assert_close(grad[:, :, :-1], other, rtol=1e-4, atol=1e-4)
        assert not grad[:, :, -1].any()
    if size[0] == size[1]:
        causal = rg.attention(*inputs, mask=rg.causal(), engine="sdpa")[:, :, :-1]
        expected = rg.attention(query[:, :, :-1], key[:, :, :-1], value[:, :, :-1], mask=rg.causal())
        torch.testing.assert_close(causal, expected)


@pytest.mark.parametrize("keys", [6, 22, 530])
def test_a_bias_of_nan_gives_nan(keys: int) -> None:
    query, key, value = tensors(4, keys)
    bias = torch.zeros(4, keys)
    bias[2] = math.nan
    bias[3] = -math.inf
    actual, expected = (results([query, key, value], engine, bias=bias) for engine in ("sdpa", "reference"))
    torch.testing.assert_close(actual, expected, equal_nan=True)


@pytest.mark.parametrize("large", [1e30, 3e38])
def test_large_masked_values_have_no_part_in_gradients(large: float) -> None:
    query, key, value = tensors(6, 6)
    value[:, :, 5] = large
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    output = rg.attention(*leaves, mask=rg.padding([5, 5]), engine="sdpa")
    grads = torch.autograd.grad(output, leaves, torch.full_like(output, 1e10))
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[1][:, :, 5].any()
    assert not grads[2][:, :, 5].any()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("where", ["query", "one key", "all keys", "one value", "bias"])
def test_the_same_without_reading_numbers(monkeypatch: pytest.MonkeyPatch, mask: str, where: str) -> None:
    monkeypatch.setattr(sdpa, "_may_read", lambda problem: False)
    query, key, value = tensors(6, 6)
    bias = None
    if where == "query":
        query[:, :, 1, 3] = math.nan
    elif where == "one value":
        value[:, :, 4] = math.nan
    elif where == "bias":
        bias = torch.zeros(6, 6)
        bias[1] = math.nan
    else:
        key[:, :, 4 if where == "one key" else slice(None), 2] = math.nan
    description = {"mask": MASKS[mask], "bias": bias}
    with torch.no_grad():
        output = rg.attention(query, key, value, engine="sdpa", **description)
        expected = rg.attention(query, key, value, engine="reference", **description)
    torch.testing.assert_close(output, expected, equal_nan=True)


def test_a_masked_key_that_overflows_reaches_nothing_without_reading_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "_may_read", lambda problem: False)
    query, key, value = tensors(6, 6)
    key[:, :, 5] = LARGE
    output = rg.attention(query, key, value, mask=rg.causal(), engine="sdpa")
    expected = rg.attention(query, key, value, mask=rg.causal(), engine="reference")
    torch.testing.assert_close(output[:, :, :5], expected[:, :, :5])


def test_a_query_of_nan_gives_nan_on_sdpa() -> None:
    query, key, value = seeded_inputs()
    query[0, 0, 3, 2] = math.nan
    output = rg.attention(query, key, value, engine="sdpa")
    assert output[0, 0, 3].isnan().all()
    assert output.isnan().sum() == 8


def test_a_masked_key_whose_product_overflows_reaches_nothing_on_sdpa() -> None:
    query, key, value = seeded_inputs()
    key[:, :, 5] = value[:, :, 5] = 1e38
    tensors = [tensor.requires_grad_() for tensor in (query, key, value)]
    output = rg.attention(query, key, value, mask=rg.padding([5, 5]), engine="sdpa")
    expected = dense(query[:, :, :], key[:, :, :5], value[:, :, :5], torch.ones(5, dtype=torch.bool))
    torch.testing.assert_close(output, expected.float())
    for grad, other in zip(
        torch.autograd.grad(output.sum(), tensors), torch.autograd.grad(expected.sum(), tensors), strict=True
    ):
        torch.testing.assert_close(grad, other)
