"""Scores: each against its formula, narrowed to some heads, and their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.geometry import CallSlice, Frame
from regard.scores import DEFAULT_SCORE, Score, to_score

B, H, Q, K, D = 2, 4, 3, 5, 6


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


QUERY, KEY = normal(B, H, Q, D, seed=1), normal(B, H, K, D, seed=2)
SCALES, VECTOR, VECTORS, MATRICES = normal(H), normal(D), normal(H, D), normal(H, D, D)


def unit(x: Tensor) -> Tensor:
    return x / x.square().sum().sqrt()


FORMULAS: dict[str, tuple[Score, Callable[[Tensor, Tensor, int], Tensor]]] = {
    "dot": (rg.Dot(), lambda q, k, h: q @ k / math.sqrt(D)),
    "dot, one scale per head": (rg.Dot(SCALES), lambda q, k, h: SCALES[h] * (q @ k)),
    "dot, softcap": (rg.Dot(scale=1.0, softcap=2.0), lambda q, k, h: 2 * torch.tanh(q @ k / 2)),
    "cosine": (rg.Cosine(), lambda q, k, h: unit(q) @ unit(k)),
    "cosine, one scale per head": (rg.Cosine(SCALES), lambda q, k, h: SCALES[h] * (unit(q) @ unit(k))),
    "additive": (rg.Additive(VECTOR), lambda q, k, h: VECTOR @ torch.tanh(q + k)),
    "additive, one weight per head": (rg.Additive(VECTORS), lambda q, k, h: VECTORS[h] @ torch.tanh(q + k)),
    "bilinear": (rg.Bilinear(MATRICES[0]), lambda q, k, h: q @ MATRICES[0] @ k),
    "bilinear, one matrix per head": (rg.Bilinear(MATRICES), lambda q, k, h: q @ MATRICES[h] @ k),
    "modified": (
        rg.Modified(lambda score, b, h, p, j: score * h, rg.Dot(scale=1.0)),
        lambda q, k, h: h * (q @ k),
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_tile_is_the_formula_of_each_entry(name: str) -> None:
    score, formula = FORMULAS[name]
    scores = score.tile(QUERY, KEY, Frame(B, H, Q, K, 0).indices())
    assert scores.shape == (B, H, Q, K)
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, (B, H, Q, K))).tolist():
        torch.testing.assert_close(scores[b, h, i, j], formula(QUERY[b, h, i], KEY[b, h, j], h))


@pytest.mark.parametrize("name", [name for name in FORMULAS if name != "modified"])
def test_a_narrowed_score_is_that_of_the_remaining_heads(name: str) -> None:
    score, part = FORMULAS[name][0], CallSlice(slice(1, 3), slice(0, Q), slice(0, K))
    expected = score.tile(QUERY, KEY, Frame(B, H, Q, K, 0).indices())[:, 1:3]
    narrowed = score.narrow(part).tile(QUERY[:, 1:3], KEY[:, 1:3], Frame(B, 2, Q, K, 0).indices())
    torch.testing.assert_close(narrowed, expected)


def test_the_argument_score_is_a_score_or_a_function() -> None:
    cosine = rg.Cosine()
    assert to_score(cosine) is cosine
    assert repr(to_score(DEFAULT_SCORE)) == "Dot()"
    assert isinstance(to_score(lambda score, b, h, p, j: score), rg.Modified)
    for value in (rg.Dot, "dot", None, torch.zeros(3)):
        with pytest.raises(TypeError, match="score must be"):
            to_score(value)


def test_every_description_has_a_score_of_its_own() -> None:
    first, second = rg.Attention(), rg.Attention()
    changed, other = rg.Modified(lambda score, b, h, p, j: score), rg.Modified(lambda score, b, h, p, j: score)
    assert first.score is not second.score
    assert changed.score is not other.score
    first.score.register_forward_hook(lambda *_: None)
    assert not second.score._forward_hooks
    assert repr(first) == "Attention()"


@pytest.mark.parametrize("score", [rg.Dot, rg.Cosine])
@pytest.mark.parametrize("scale", [torch.tensor([1, 2, 3, 4]), torch.tensor([1 + 2j])])
def test_a_scale_that_is_not_floating_point_is_refused(score: Callable, scale: Tensor) -> None:
    with pytest.raises(TypeError, match="floating-point"):
        score(scale=scale)
