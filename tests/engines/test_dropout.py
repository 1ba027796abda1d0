"""Dropout: its rate and seed, and that backward drops the weights that forward dropped."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.engines.dropout import threshold_and_scale
from tests.engines.calls import DROPPING, inputs, normal, run

LONG = {"H": 2, "G": 1, "Q": 64, "K": 96}


class TestDropout:
    @pytest.mark.parametrize("engine", DROPPING)
    def test_it_is_off_by_default(self, engine: str) -> None:
        tensors = inputs()
        torch.manual_seed(0)
        before = torch.get_rng_state()
        assert torch.equal(run(engine, tensors), run(engine, tensors, dropout=0.0))
        assert torch.equal(torch.get_rng_state(), before), "a call without dropout draws no random number"

    @pytest.mark.parametrize("engine", DROPPING)
    def test_manual_seed_reproduces_it_and_the_next_call_differs(self, engine: str) -> None:
        tensors, drawn = inputs(**LONG), []
        for _ in range(2):
            torch.manual_seed(7)
            drawn.append([run(engine, tensors, dropout=0.3) for _ in range(2)])
        assert torch.equal(drawn[0][0], drawn[1][0])
        assert torch.equal(drawn[0][1], drawn[1][1])
        assert not torch.allclose(drawn[0][0], drawn[0][1])

    @pytest.mark.parametrize("description", [{}, {"mask": rg.causal(), "bias": rg.shaw(normal(5, 5), normal(5, 5))}])
    def test_every_engine_drops_the_same_weights_and_differentiates_them(self, description: dict[str, Any]) -> None:
        results = []
        for engine in DROPPING:
            tensors = [tensor.requires_grad_() for tensor in inputs(**LONG)]
            torch.manual_seed(3)
            output = run(engine, tensors, dropout=0.4, **description)
            results.append([output, *torch.autograd.grad((output * normal(*output.shape)).sum(), tensors)])
        for other in results[1:]:
            for ours, theirs in zip(other, results[0], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)

    def test_the_requested_fraction_is_dropped_and_the_rest_is_scaled(self) -> None:
        query, key, _ = inputs(**LONG)
        value = torch.eye(96, dtype=torch.float64).expand(2, 1, 96, 96)  # the output is the dropped weights
        torch.manual_seed(0)
        dropped = rg.attention(query, key, value, dropout=0.25, engine="reference")
        weights = rg.Attention().weights(query, key)
        gone = dropped == 0
        assert abs(gone.double().mean() - 0.25) < 5 * math.sqrt(0.25 * 0.75 / gone.numel())
        torch.testing.assert_close(dropped[~gone], weights[~gone] / 0.75)
        by_row, by_column = gone.double().mean(-1), gone.double().mean(-2)
        assert (by_row - 0.25).abs().max() < 6 * math.sqrt(0.25 * 0.75 / 96)
        assert (by_column - 0.25).abs().max() < 6 * math.sqrt(0.25 * 0.75 / 64)
        assert len({tuple(row.tolist()) for row in gone.flatten(0, 2)}) == gone[..., 0].numel(), "rows drop alike"

    @pytest.mark.parametrize("engine", [*DROPPING, "native"])
    @pytest.mark.parametrize("dropout", [0.1, 0.7])
    def test_kept_weights_are_scaled_by_the_inverse_of_the_kept_fraction(self, engine: str, dropout: float) -> None:
        """A hash has 32 bits, so the fraction is a multiple of 2^-32; its scale makes the mean exact."""
        query, one = normal(1, 1, 200, 4), torch.ones(1, 1, 1, 4, dtype=torch.float64)
        kept = rg.attention(query, one, one, dropout=dropout, engine=engine)
        share = 1 - round(dropout * 2**32) / 2**32
        values = kept[kept != 0]
        assert values.tolist() == pytest.approx([1 / share] * len(values), rel=1e-14)

    @pytest.mark.parametrize("dropout", [0.0, 1e-12, 0.5, 1 - 3 * 2**-33, 1 - 2**-53])
    def test_the_threshold_fits_32_bits_and_its_scale_makes_the_mean_exact(self, dropout: float) -> None:
        threshold, scale = threshold_and_scale(dropout)
        assert threshold in range(2**32)
        assert abs(threshold - dropout * 2**32) <= 1
        assert scale == 2**32 / (2**32 - threshold)

    @pytest.mark.parametrize("engine", DROPPING)
    def test_its_expectation_is_the_output_without_it(self, engine: str) -> None:
        tensors = inputs(B=1, H=1, G=1, Q=4, K=8)
        torch.manual_seed(1)
        draws = torch.stack([run(engine, tensors, dropout=0.5) for _ in range(1500)])
        error = (draws.mean(0) - run(engine, tensors)).abs()
        assert (error < 5 * draws.std(0) / math.sqrt(len(draws))).all()

    @pytest.mark.parametrize("engine", DROPPING)
    def test_its_gradient_equals_finite_differences(self, engine: str) -> None:
        def dropped(*tensors: Tensor) -> Tensor:
            torch.manual_seed(5)
            return rg.attention(*tensors, dropout=0.5, sink=0.1, mask=rg.window(5, 5), engine=engine)

        assert torch.autograd.gradcheck(dropped, [t.requires_grad_() for t in inputs()], fast_mode=True)

    def test_weights_and_statistics_ignore_it(self) -> None:
        query, key, _ = inputs()
        assert torch.equal(rg.Attention(dropout=0.5).weights(query, key), rg.Attention().weights(query, key))
