"""Dynamic rotary scaling and LongRoPE in batches: a sequence has the same result as alone, or the batch raises."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.positions import Dynamic, LongRope, Scaling

SCALINGS = [Dynamic(2.0, original=4), LongRope((1.0, 1.5, 2.0, 3.0), (1.0, 3.0, 5.0, 9.0), original=4, factor=2.0)]


@pytest.fixture(params=SCALINGS, ids=["dynamic", "longrope"])
def model(request: pytest.FixtureRequest) -> rg.models.LanguageModel:
    torch.manual_seed(0)
    rotary = rg.nn.Rotary(scaling=request.param)
    config = rg.models.LanguageConfig(vocabulary=50, d_model=16, layers=2, heads=2, d_hidden=32, rotary=rotary)
    return rg.models.LanguageModel(config).eval().double()


SHORT, LONG = torch.arange(5), torch.arange(9) + 20


def padded(side: str) -> tuple[Tensor, Tensor]:
    ids, mask = torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 9, dtype=torch.bool)
    for row, sequence in enumerate((SHORT, LONG)):
        at = slice(0, len(sequence)) if side == "right" else slice(9 - len(sequence), 9)
        ids[row, at], mask[row, at] = sequence, True
    return ids, mask


@torch.no_grad()
def test_a_left_padded_row_has_the_same_result_as_alone(model: rg.models.LanguageModel) -> None:
    ids, mask = padded("left")
    logits = model(ids, mask=mask)
    torch.testing.assert_close(logits[0, 4:], model(SHORT[None])[0])
    torch.testing.assert_close(logits[1], model(LONG[None])[0])


@torch.no_grad()
def test_rows_of_unknown_length_raise(model: rg.models.LanguageModel) -> None:
    ids, mask = padded("right")
    with pytest.raises(ValueError, match="pad on the left"):
        model(ids, mask=mask)
    with pytest.raises(ValueError, match="pad on the left"):
        model([SHORT, LONG])
    model(ids[:, :4], mask=mask[:, :4])  # within the original length
    model(ids)


@torch.no_grad()
@pytest.mark.parametrize("scaling", SCALINGS, ids=["dynamic", "longrope"])
def test_positions_per_row_determine_its_length(scaling: Scaling) -> None:
    torch.manual_seed(0)
    layer = rg.nn.MultiHeadAttention(16, 2, rotary=rg.nn.Rotary(scaling=scaling)).double()
    x, positions = torch.randn(2, 9, 16, dtype=torch.float64), torch.arange(9).minimum(torch.tensor([[4], [8]]))
    logits = layer(x, mask=rg.padding([5, 9]), positions=positions)
    torch.testing.assert_close(logits[:1, :5], layer(x[:1, :5]))
    torch.testing.assert_close(logits[1:], layer(x[1:]))


@pytest.mark.parametrize("model", SCALINGS[1:], indirect=True)
def test_longrope_generates_from_prompts_beyond_the_original_length(model: rg.models.LanguageModel) -> None:
    generated = model.generate([SHORT, LONG], max_new_tokens=3)
    for prompt, tokens in zip((SHORT, LONG), generated, strict=True):
        for n, token in enumerate(tokens):
            assert int(model(torch.cat((prompt, tokens[:n]))[None])[0, -1].argmax()) == token
    with pytest.raises(ValueError, match="cached keys were rotated for a shorter one"):
        model.generate([SHORT[:3], LONG], max_new_tokens=3)  # the first row becomes longer than 4 tokens


def test_longrope_needs_a_factor_per_pair() -> None:
    with pytest.raises(ValueError, match=r"short must have a factor for each of the d_rotary / 2 = 2 pairs, got 1"):
        rg.rotary(torch.randn(3, 4), scaling=LongRope((1.0,), (1.0, 2.0), original=4))
