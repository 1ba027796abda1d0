"""Heads with a clear pattern are classified, and others are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.view import Record
from regard.view.heads import same_tokens
from tests.view.models import of_logits

N = 48
SURE = 9.0


def place(keys: Tensor) -> Tensor:
    """Return logits (1, N, N) of a head whose queries attend to one key each, if it exists."""
    logits = torch.zeros(N, N)
    inside = (keys >= 0) & (keys < N)
    logits[torch.arange(N)[inside], keys[inside]] = SURE
    return logits[None]


def names(record: Record) -> list[list[str]]:
    patterns = [[] for _ in range(record.attentions[0].heads)]
    for each in record.head_patterns:
        patterns[each.head].append(each.name)
    return patterns


def test_each_pattern_is_recognised() -> None:
    at = torch.arange(N)
    heads = [at - 1, at + 1, at, torch.zeros(N, dtype=torch.long), at + 5]
    near = torch.where((at[:, None] - at).abs() <= 3, SURE / 2, 0.0)[None]
    record = of_logits(torch.cat([*map(place, heads), near, torch.zeros(1, N, N)]))
    assert names(record) == [
        ["previous token"], ["next token"], ["same token"], ["first token"], ["positional"], ["local"], ["uniform"],
    ]  # fmt: skip
    assert next(each.offset for each in record.head_patterns if each.name == "positional") == 5


def test_the_score_is_the_mean_mass() -> None:
    record = of_logits(place(torch.arange(N) - 1))
    weights = record.weights(0)[0]
    expected = weights[range(1, N), range(N - 1)].mean().item()
    assert record.head_patterns[0].score == pytest.approx(expected, abs=1e-6)


def test_weights_that_are_no_softmax_count_as_shares() -> None:
    spread = torch.zeros(1, N, N)
    record = of_logits(torch.cat([spread, place(torch.arange(N) - 1)]), normalization=rg.Sigmoid(-6.0))
    assert names(record) == [["uniform"], ["previous token"]]
    weights = record.weights(0)[1]
    shares = weights / weights.sum(-1, keepdim=True)
    expected = shares[range(1, N), range(N - 1)].mean().item()
    assert next(each.score for each in record.head_patterns if each.head == 1) == pytest.approx(expected, abs=1e-6)


def test_induction_and_duplicates_are_recognised_by_tokens() -> None:
    half = N // 2
    at = torch.arange(N)
    after = torch.where(at >= half, at - half + 1, 0)  # a repeated text: the token after the first occurrence
    same = torch.where(at >= half, at - half, 0)
    logits = torch.cat([place(after), place(same)])
    record = of_logits(logits, rg.causal()).set_tokens([f"w{n % half}" for n in range(N)])
    patterns = names(record)
    assert "induction" in patterns[0]
    assert "duplicate token" in patterns[1]
    assert "induction" not in patterns[1]
    unnamed = of_logits(logits, rg.causal())  # all tokens are different
    assert not {"induction", "duplicate token"} & {each.name for each in unnamed.head_patterns}


def test_random_heads_have_no_pattern() -> None:
    torch.manual_seed(0)
    assert of_logits(2 * torch.randn(6, N, N)).head_patterns == []


def test_short_texts_have_no_patterns() -> None:
    assert [each.name for each in of_logits(SURE * torch.eye(2)[None]).head_patterns] == []


def test_other_occurrences_of_a_token() -> None:
    tokens = ["a", "b", "a", "c", "a"]
    assert same_tokens(tokens, [2, 3, 4], 0, ahead=False).tolist() == [[0, -1], [-1, -1], [2, 0]]
    assert same_tokens(tokens, [2], 0, ahead=True).tolist() == [[0, 4]]
    assert same_tokens(tokens, [4], 1, ahead=False).tolist() == [[3, 1]]


def test_two_tokens_are_not_uniform() -> None:
    """With two keys, almost every head attends to both."""
    torch.manual_seed(0)
    for size in (2, 4):
        assert of_logits(torch.randn(50, size, size)).head_patterns == []


def test_an_induction_head_is_not_positional() -> None:
    """In a repeated text, the token after the previous occurrence is always at the same distance."""
    at = torch.arange(40)
    logits = torch.zeros(40, 40)
    logits[at[20:], at[20:] - 19] = 2 * SURE
    record = of_logits(logits[None], rg.causal()).set_tokens([f"w{n % 20}" for n in range(40)])
    assert [each.name for each in record.head_patterns] == ["induction"]
    unnamed = of_logits(logits[None], rg.causal())
    assert [(each.name, each.offset) for each in unnamed.head_patterns] == [("positional", -19)]


def test_a_translation_in_nearly_the_same_order_is_not_positional() -> None:
    """Half of the words are at the same distance because of word order, not because of the head."""
    at = torch.arange(14)
    keys = torch.tensor([0, 2, 1, 1, 1, 3, 4, 4, 7, 6, 6, 8, 9, 10])
    logits = torch.zeros(14, 11)
    logits[at, keys] = SURE
    assert of_logits(logits[None]).head_patterns == []


def test_cross_attention_offsets_count_from_the_first_token() -> None:
    """A cross-attention head on the token of the same index has offset 0 at all lengths."""
    at = torch.arange(12)
    logits = torch.zeros(12, 30)
    logits[at, at] = SURE
    assert [(each.name, each.offset) for each in of_logits(logits[None]).head_patterns] == [("positional", 0)]
