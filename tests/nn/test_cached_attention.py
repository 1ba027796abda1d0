"""How far a description looks back, which limits the window of a cache."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.nn.cached_attention import max_lookback


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        ({}, None),
        ({"mask": rg.causal()}, None),
        ({"mask": rg.window(3, 0)}, 3),
        ({"mask": rg.causal() & rg.window(3, 0) & rg.window(5, 0)}, 3),
        ({"mask": rg.window(3, 0) | rg.causal()}, None),
        ({"mask": rg.window(3, 0), "offset": -2}, 5),
        ({"mask": rg.window(3, 0), "offset": [0, -4]}, 7),
        ({"mask": rg.window(3, 0), "offset": torch.zeros(0, dtype=torch.int64)}, 3),
    ],
)
def test_the_lookback_is_that_of_mask_and_offset(description: dict, expected: int | None) -> None:
    assert max_lookback(rg.Attention(**description)) == expected


@pytest.mark.parametrize("mask", [rg.causal(), rg.window(3, 0), rg.causal() & rg.window(3, 0)])
def test_the_lookback_is_traced_in_one_graph(mask: rg.Mask) -> None:
    attend = rg.Attention(mask=mask)
    compiled = torch.compile(lambda x: x + (max_lookback(attend) or 0), backend="eager", fullgraph=True)
    assert compiled(torch.zeros(())) == (max_lookback(attend) or 0)
