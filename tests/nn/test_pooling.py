"""Poolings of real tokens: padded at either end, with holes, packed, empty, in every dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import regard as rg
from regard.nn import AttentionPooling, First, Last, Max, Mean, Packed


def attended(tokens: Tensor, query: Tensor) -> Tensor:
    return (tokens @ query / math.sqrt(len(query))).softmax(0) @ tokens


class Pooling(NamedTuple):
    """A pooling, and its reference for the real tokens (n, d_model) of one sequence, n > 0."""

    module: nn.Module
    plain: Callable[[Tensor], Tensor]


WIDTH = 6
QUERY = torch.randn(WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def by_attention() -> nn.Module:
    pooling = AttentionPooling(WIDTH).double()
    with torch.no_grad():
        pooling.query.copy_(QUERY)
    return pooling


POOLINGS = {
    "mean": Pooling(Mean(), lambda tokens: tokens.mean(0)),
    "max": Pooling(Max(), lambda tokens: tokens.amax(0)),
    "first": Pooling(First(), lambda tokens: tokens[0]),
    "last": Pooling(Last(), lambda tokens: tokens[-1]),
    "attention": Pooling(by_attention(), lambda tokens: attended(tokens, QUERY)),
}
ROWS = {
    "right": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]],
    "left": [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]],
    "holes": [[0, 1, 0, 1, 0], [1, 0, 1, 1, 0], [0, 0, 1, 0, 1]],
    "empty": [[0, 0, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]],
    "all empty": [[0, 0, 0, 0, 0]] * 3,
}


def expected(pooling: Pooling, sequences: list[Tensor]) -> Tensor:
    return torch.stack([pooling.plain(tokens) if len(tokens) else tokens.sum(0) for tokens in sequences])


@pytest.mark.parametrize("name", POOLINGS)
@pytest.mark.parametrize("rows", ROWS)
def test_only_real_tokens_are_actualand_get_gradients(name: str, rows: str) -> None:
    torch.manual_seed(0)
    mask, pooling = torch.tensor(ROWS[rows], dtype=torch.bool), POOLINGS[name]
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, WIDTH, dtype=torch.float64)
    padded = torch.where(mask[..., None], x, math.nan)  # padding must reach neither the result nor the gradient
    sequences = [row[real] for row, real in zip(x, mask, strict=True)]
    reference = expected(pooling, sequences)
    (gradient,) = torch.autograd.grad((reference * weights).sum(), x, retain_graph=True)
    for actual in (pooling.module(padded, mask), pooling.module(rg.pack(sequences))):
        torch.testing.assert_close(actual, reference, rtol=0, atol=1e-12)
        (ours,) = torch.autograd.grad((actual * weights).sum(), x, retain_graph=True)
        torch.testing.assert_close(ours, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", POOLINGS)
def test_empty_inputs_are_supported(name: str) -> None:
    pooling, x = POOLINGS[name].module, torch.randn(2, 0, WIDTH).double()
    assert torch.equal(pooling(x), torch.zeros(2, WIDTH).double())
    assert torch.equal(pooling(x, torch.ones(2, 0, dtype=torch.bool)), torch.zeros(2, WIDTH).double())
    assert torch.equal(pooling(rg.pack([x[0], x[1]])), torch.zeros(2, WIDTH).double())
    assert pooling(Packed(x[0], ())).shape == (0, WIDTH)
    assert pooling(torch.randn(0, 3, WIDTH).double()).shape == (0, WIDTH)
    assert pooling(torch.randn(0, 3, WIDTH).double(), torch.ones(0, 3, dtype=torch.bool)).shape == (0, WIDTH)


@pytest.mark.parametrize("name", POOLINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_many_tokens_are_summed_in_float32_at_least(name: str, dtype: torch.dtype) -> None:
    """Result and gradients equal those of float64, rounded once."""
    torch.manual_seed(0)
    pooling, lengths = POOLINGS[name], (3000, 7, 1001)
    x = (torch.randn(3, 3000, WIDTH) + 5).to(dtype).requires_grad_()
    mask = torch.arange(3000) < torch.tensor(lengths)[:, None]
    exact = x.detach().double().requires_grad_()
    reference = expected(pooling, [row[:n] for row, n in zip(exact, lengths, strict=True)])
    (gradient,) = torch.autograd.grad(reference.sum(), exact)
    packed = rg.pack([row[:n] for row, n in zip(x, lengths, strict=True)])
    unit = torch.finfo(dtype).eps * (8 if name == "attention" and dtype == torch.float32 else 1)
    for actual in (pooling.module(x, mask), pooling.module(packed)):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), reference, rtol=2 * unit, atol=2 * unit)
        (ours,) = torch.autograd.grad(actual.sum(), x, retain_graph=True)
        torch.testing.assert_close(ours.double(), gradient, rtol=0.02 if name == "attention" else 2 * unit, atol=unit)
    torch.testing.assert_close(pooling.module(x[:1]).double(), reference[:1], rtol=2 * unit, atol=2 * unit)


@pytest.mark.parametrize("name", POOLINGS)
def test_a_mask_of_the_wrong_shape_or_dtype_raises(name: str) -> None:
    pooling, x = POOLINGS[name].module, torch.randn(2, 3, WIDTH).double()
    with pytest.raises(TypeError, match="bool"):
        pooling(x, torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(2, 4\)"):
        pooling(x, torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="packed"):
        pooling(rg.pack([x[0]]), torch.ones(1, 3, dtype=torch.bool))


@pytest.mark.parametrize("name", POOLINGS)
@pytest.mark.parametrize("packed", [False, True])
def test_second_derivatives_match_finite_differences(name: str, packed: bool) -> None:
    torch.manual_seed(0)
    mask = torch.tensor(ROWS["left"][:2], dtype=torch.bool)

    def pooled(x: Tensor) -> Tensor:
        x = x.tanh()
        actual = [row[real] for row, real in zip(x, mask, strict=True)]
        return POOLINGS[name].module(rg.pack(actual)) if packed else POOLINGS[name].module(x, mask)

    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(pooled, [x], fast_mode=True)
