"""Dropout of hidden states."""

from __future__ import annotations

import math

import pytest
import torch

from regard.nn.dropout import dropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_dropped_share_and_the_mean_match_p(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = dropout(torch.ones(499, 1003, dtype=dtype), p)
    assert x.dtype == dtype
    assert float((x == 0).double().mean()) == pytest.approx(p, abs=0.003)
    assert float(x.double().mean()) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("p", [1e-7, 0.6 / 65536, 0.001, 0.999, 1 - 0.6 / 65536, 1 - 1e-7])
def test_p_near_0_or_1_is_exact(p: float) -> None:
    torch.manual_seed(0)
    count = 1 << 24
    kept = dropout(torch.ones(count), p)
    spread = math.sqrt(count * p * (1 - p))
    assert abs(int((kept != 0).sum()) - count * (1 - p)) < 5 * spread + 1
    assert abs(float(kept.double().sum()) - count) < (5 * spread + 1) / (1 - p) + 1e-6 * count


@pytest.mark.parametrize("p", [0.1, 0.3, 0.99])
def test_kept_elements_are_scaled_by_the_inverse_of_the_kept_share(p: float) -> None:
    """Draws have 16 bits, so p is rounded to a multiple of 2^-16; the factor matches the rounded p."""
    kept = dropout(torch.ones(10_000, dtype=torch.float64), p).max()
    assert float(kept) == pytest.approx(65536 / (65536 - round(65536 * p)), rel=1e-14)


def test_the_factor_of_bfloat16_is_rounded_once() -> None:
    x = torch.full((1000,), 1.5, dtype=torch.bfloat16)
    expected = torch.tensor(1.5 * 65536 / (65536 - round(65536 * 0.35)), dtype=torch.float64).bfloat16()
    assert dropout(x, 0.35).max() == expected


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_p_outside_0_to_1_raises(p: float) -> None:
    with pytest.raises((ValueError, RuntimeError), match="dropout"):
        dropout(torch.ones(5), p)


def test_elements_of_one_draw_are_independent() -> None:
    torch.manual_seed(0)
    kept = (dropout(torch.ones(400_000), 0.3) != 0).double().view(-1, 4)
    assert kept.mean(0).tolist() == pytest.approx([0.7] * 4, abs=0.005)
    shares = torch.corrcoef(torch.cat((kept[1:], kept[:-1]), 1).T) - torch.eye(8)
    assert float(shares.abs().max()) < 0.02


def test_gradients_are_dropped_with_their_values() -> None:
    x = torch.ones(64, requires_grad=True)
    y = dropout(x, 0.25)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())


def test_a_seed_makes_dropout_reproducible() -> None:
    x = torch.ones(7, 13)
    torch.manual_seed(3)
    first = dropout(x, 0.5)
    torch.manual_seed(3)
    assert torch.equal(first, dropout(x, 0.5))
    assert not torch.equal(first, dropout(x, 0.5))


def test_p_0_and_p_1_are_supported() -> None:
    assert torch.equal(dropout(torch.ones(5), 0.0), torch.ones(5))
    assert torch.equal(dropout(torch.ones(5), 1.0), torch.zeros(5))
    assert dropout(torch.ones(0, 3), 0.5).shape == (0, 3)
