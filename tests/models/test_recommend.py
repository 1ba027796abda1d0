"""Recommender: causality, packed and padded inputs, and losses compared with torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import regard as rg
from regard.models import LanguageConfig, Recommender

CONFIG = LanguageConfig(vocabulary=30, d_model=16, layers=2, heads=2, d_hidden=32, positions=12)
HISTORIES = [torch.tensor([3, 7, 7, 1]), torch.tensor([29]), torch.tensor([0, 5, 6, 2, 11, 4, 9])]


def model_of() -> Recommender:
    torch.manual_seed(0)
    return Recommender(CONFIG).double().eval()


def test_next_item_logits_are_those_of_the_last_item() -> None:
    model = model_of()
    result = model.next_item_logits(HISTORIES)
    for one, came in zip(HISTORIES, result, strict=True):
        torch.testing.assert_close(came, model(one[None])[0, -1], rtol=0, atol=1e-12)
    padded = torch.zeros(3, 7, dtype=torch.int64)
    mask = torch.arange(7) < torch.tensor([4, 1, 7])[:, None]
    padded[mask] = torch.cat(HISTORIES)
    torch.testing.assert_close(model.next_item_logits(padded, mask), result, rtol=0, atol=1e-12)


def test_items_do_not_depend_on_later_items() -> None:
    model, one = model_of(), HISTORIES[2][None]
    before = model(one)
    other = one.clone()
    other[0, 4:] = 17
    torch.testing.assert_close(model(other)[0, :4], before[0, :4], rtol=0, atol=0)
    assert not torch.allclose(model(other)[0, 4:], before[0, 4:])


def test_the_loss_matches_cross_entropy_over_all_items() -> None:
    model, packed = model_of(), rg.pack(HISTORIES)
    after = torch.tensor([7, -1, 1, 2, 5, 5, 6, -1, 11, 4, 9, 20])
    logits, asked = model(packed).values, after >= 0
    expected = F.cross_entropy(logits[asked], after[asked], reduction="sum")
    torch.testing.assert_close(model.loss(packed, after), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("cap", [None, 0.3])
@pytest.mark.parametrize("drawn", [False, True])
def test_all_losses_apply_smoothing_and_softcap(drawn: bool, cap: float | None, smoothing: float) -> None:
    torch.manual_seed(0)
    model, packed = Recommender(replace(CONFIG, final_softcap=cap)).double().eval(), rg.pack(HISTORIES)
    negatives = torch.tensor([5, 8, 8, 21]) if drawn else None
    after = torch.tensor([7, -1, 1, 2, 5, 5, 6, -1, 11, 4, 9, 20])
    expected = torch.zeros(()).double()
    for logits, target in zip(model(packed).values, after.tolist(), strict=True):
        if target >= 0:
            rest = range(30) if negatives is None else negatives.tolist()
            among = [target, *(n for n in rest if n != target)]
            shares = (logits[among].exp() / logits[among].exp().sum()).log()
            expected -= (1 - smoothing) * shares[0] + smoothing * shares.mean()
    loss = model.loss(packed, after, smoothing=smoothing, negatives=negatives)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)


def test_the_loss_of_bfloat16_is_summed_in_float32() -> None:
    torch.manual_seed(0)
    model = Recommender(replace(CONFIG, final_softcap=2.0)).bfloat16().eval()
    packed, negatives = rg.pack(HISTORIES * 60), torch.tensor([5, 8, 8, 21])
    after = torch.tensor([7, -1, 1, 2, 5, 5, 6, -1, 11, 4, 9, 20] * 60)
    once = rg.pack(HISTORIES)
    for chosen in (None, negatives):
        one, all_of_them = (model.loss(x, y, negatives=chosen) for x, y in ((once, after[:12]), (packed, after)))
        assert all_of_them.dtype == torch.float32
        torch.testing.assert_close(all_of_them, 60 * one, rtol=1e-3, atol=0)


def test_the_sampled_loss_counts_the_label_once() -> None:
    model, packed, negatives = model_of(), rg.pack(HISTORIES), torch.tensor([5, 8, 8, 21])
    after = torch.tensor([7, -1, 1, 2, 5, 5, 6, -1, 11, 4, 9, 20])
    expected = torch.zeros(()).double()
    for logits, target in zip(model(packed).values, after.tolist(), strict=True):
        if target >= 0:
            among = [target, *(n for n in negatives.tolist() if n != target)]
            expected += F.cross_entropy(logits[among], torch.tensor(0))
    torch.testing.assert_close(model.loss(packed, after, negatives=negatives), expected, rtol=0, atol=1e-10)


def test_a_saved_recommender_loads_as_a_recommender(tmp_path: Path) -> None:
    model = model_of()
    rg.save(model, tmp_path)
    again = rg.load(tmp_path)
    assert type(again) is Recommender
    torch.testing.assert_close(again.next_item_logits(HISTORIES), model.next_item_logits(HISTORIES), rtol=0, atol=0)
