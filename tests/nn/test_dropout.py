"""Dropout of hidden states."""

from __future__ import annotations

import math

import pytest
import torch

from regard.nn.dropout import dropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_share_that_is_dropped_and_the_mean_are_as_asked(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = dropout(torch.ones(499, 1003, dtype=dtype), p)
    assert x.dtype == dtype
    assert float((x == 0).double().mean()) == pytest.approx(p, abs=0.003)
    assert float(x.double().mean()) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("p", [1e-7, 0.6 / 65536, 0.001, 0.999, 1 - 0.6 / 65536, 1 - 1e-7])
def test_a_share_near_0_or_1_is_as_asked(p: float) -> None:
    torch.manual_seed(0)
    count = 1 << 24
    kept = dropout(torch.ones(count), p)
    spread = math.sqrt(count * p * (1 - p))
    assert abs(int((kept != 0).sum()) - count * (1 - p)) < 5 * spread + 1
    assert abs(float(kept.double().sum()) - count) < (5 * spread + 1) / (1 - p) + 1e-6 * count


@pytest.mark.parametrize("p", [0.1, 0.3, 0.99])
def test_what_is_kept_grows_by_the_inverse_of_the_share_that_is_kept(p: float) -> None:
    """Draws have 16 bits, so the share is a multiple of 2^-16; with the factor of that share the mean is exact."""
    kept = dropout(torch.ones(10_000, dtype=torch.float64), p).max()
    assert float(kept) == pytest.approx(65536 / (65536 - round(65536 * p)), rel=1e-14)


def test_the_factor_of_bfloat16_is_rounded_once() -> None:
    x = torch.full((1000,), 1.5, dtype=torch.bfloat16)
    expected = torch.tensor(1.5 * 65536 / (65536 - round(65536 * 0.35)), dtype=torch.float64).bfloat16()
    assert dropout(x, 0.35).max() == expected


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_a_share_outside_0_to_1_raises(p: float) -> None:
    with pytest.raises((ValueError, RuntimeError), match="dropout"):
        dropout(torch.ones(5), p)


def test_neighbours_and_the_four_parts_of_a_draw_do_not_depend_on_one_another() -> None:
    torch.manual_seed(0)
    kept = (dropout(torch.ones(400_000), 0.3) != 0).double().view(-1, 4)
    assert kept.mean(0).tolist() == pytest.approx([0.7] * 4, abs=0.005)
    shares = torch.corrcoef(torch.cat((kept[1:], kept[:-1]), 1).T) - torch.eye(8)
    assert float(shares.abs().max()) < 0.02


def test_the_gradient_is_dropped_where_the_value_is() -> None:
    x = torch.ones(64, requires_grad=True)
    y = dropout(x, 0.25)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())


def test_a_seed_repeats_it() -> None:
    x = torch.ones(7, 13)
    torch.manual_seed(3)
    first = dropout(x, 0.5)
    torch.manual_seed(3)
    assert torch.equal(first, dropout(x, 0.5))
    assert not torch.equal(first, dropout(x, 0.5))


def test_nothing_and_everything_may_be_dropped() -> None:
    assert torch.equal(dropout(torch.ones(5), 0.0), torch.ones(5))
    assert torch.equal(dropout(torch.ones(5), 1.0), torch.zeros(5))
    assert dropout(torch.ones(0, 3), 0.5).shape == (0, 3)
