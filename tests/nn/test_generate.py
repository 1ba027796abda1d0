"""Generation: choice of tokens, stopping, and beam search compared with exhaustive search."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from regard.models import LanguageConfig, LanguageModel
from regard.nn import Beam, GenerationState, Greedy, Sample
from regard.nn.generate import generate, generate_steps


class Chain:
    """A model whose next token depends on the last two, so that greedy choices can be wrong; counts its rows."""

    def __init__(self, vocabulary: int = 5, seed: int = 0) -> None:
        self.table = torch.randn(vocabulary, vocabulary, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2
        self.ids = torch.empty(0, 0, dtype=torch.long)

    def state(self) -> GenerationState:
        chain = self

        class Tokens:
            def reorder(self, rows: Tensor, start: int) -> None:
                chain.ids = chain.ids[rows]

        def forward(ids: Tensor, shared: object) -> Tensor:
            self.ids = ids if not self.ids.numel() else torch.cat([self.ids, ids], 1)
            return self.table[self.ids[:, -2], self.ids[:, -1]]

        return GenerationState(forward, [Tokens()])  # type: ignore[list-item]

    def score(self, start: list[int], tokens: tuple[int, ...]) -> float:
        ids, total = [*start], 0.0
        for token in tokens:
            total += float(self.table[ids[-2], ids[-1]].log_softmax(-1)[token])
            ids.append(token)
        return total


PROMPTS = torch.tensor([[0, 1], [2, 3], [4, 4]])


def test_greedy_takes_the_most_likely_token() -> None:
    generated = generate(Chain().state(), PROMPTS, strategy=Greedy(), max_new_tokens=6)
    chain = Chain()
    for start, tokens in zip(PROMPTS.tolist(), generated, strict=True):
        ids = list(start)
        for token in tokens.tolist():
            assert token == int(chain.table[ids[-2], ids[-1]].argmax())
            ids.append(token)


@pytest.mark.parametrize("seed", range(5))
def test_a_wide_beam_finds_the_best_sequence(seed: int) -> None:
    generated = generate(Chain(seed=seed).state(), PROMPTS, strategy=Beam(width=125), max_new_tokens=4)
    chain = Chain(seed=seed)
    for start, tokens in zip(PROMPTS.tolist(), generated, strict=True):
        best = max(itertools.product(range(5), repeat=4), key=lambda t, s=start: chain.score(s, t))
        assert tuple(tokens.tolist()) == best


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_a_beam_applies_the_length_penalty(penalty: float) -> None:
    generated = generate(
        Chain(seed=3).state(), PROMPTS, strategy=Beam(width=200, length_penalty=penalty), max_new_tokens=4, stop=[0]
    )
    chain = Chain(seed=3)
    for start, tokens in zip(PROMPTS.tolist(), generated, strict=True):
        ended = [(*t, 0) for n in range(4) for t in itertools.product(range(1, 5), repeat=n)]
        full = [*ended, *itertools.product(range(1, 5), repeat=4)]
        best = max(full, key=lambda t, s=start: chain.score(s, t) / len(t) ** penalty)
        assert (*tokens.tolist(), 0)[: len(best)] == best


@pytest.mark.parametrize("strategy", [Greedy(), Beam(width=3)], ids=["greedy", "beam"])
def test_one_stop_token_need_not_be_a_list(strategy: Greedy | Beam) -> None:
    full = generate(Chain().state(), PROMPTS, strategy=strategy, max_new_tokens=8)
    token = full[0][3]
    several = generate(Chain().state(), PROMPTS, strategy=strategy, max_new_tokens=8, stop=[int(token)])
    for one in (int(token), np.int64(int(token))):
        generated = generate(Chain().state(), PROMPTS, strategy=strategy, max_new_tokens=8, stop=one)
        assert [row.tolist() for row in generated] == [row.tolist() for row in several]


def test_a_row_ends_before_its_stop_token() -> None:
    full = generate(Chain().state(), PROMPTS, strategy=Greedy(), max_new_tokens=8)
    stop = int(full[0][3])
    for tokens, all_tokens in zip(
        generate(Chain().state(), PROMPTS, strategy=Greedy(), max_new_tokens=8, stop=[stop]), full, strict=True
    ):
        before = all_tokens.tolist()
        assert tokens.tolist() == (before[: before.index(stop)] if stop in before else before)


def test_no_step_is_computed_after_the_last_token() -> None:
    chain = Chain()
    steps = list(generate_steps(chain.state(), PROMPTS, Greedy(), max_new_tokens=3))
    assert len(steps) == 3
    assert chain.ids.shape[1] == 2 + 2


def test_top_k_and_top_p_limit_sampling() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(4000, -1)
    torch.manual_seed(0)
    assert set(Sample(top_k=2).chooser()(logits).tolist()) == {0, 1}
    assert set(Sample(top_p=0.75).chooser()(logits).tolist()) == {0, 1}
    assert set(Sample(top_p=0.81).chooser()(logits).tolist()) == {0, 1, 2}
    shares = Sample().chooser()(logits).bincount(minlength=4) / 4000
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.15, 0.05]), rtol=0, atol=0.03)
    sharp = Sample(temperature=0.5).chooser()(logits).bincount(minlength=4) / 4000
    torch.testing.assert_close(sharp, (logits[0] * 2).softmax(-1), rtol=0, atol=0.03)


def test_a_seed_makes_sampling_reproducible() -> None:
    generated = [generate(Chain().state(), PROMPTS, strategy=Sample(seed=7), max_new_tokens=9) for _ in range(2)]
    assert [t.tolist() for t in generated[0]] == [t.tolist() for t in generated[1]]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Sample(temperature=0.0), "temperature must be positive"),
        (lambda: Sample(top_k=0), "top_k must be at least 1"),
        (lambda: Sample(top_p=1.5), r"top_p must be in \(0, 1\]"),
        (lambda: Beam(width=0), "width must be at least 1"),
    ],
)
def test_invalid_strategies_raise(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@torch.no_grad()
def test_a_state_is_branched_by_its_rows_and_not_by_a_copy() -> None:
    sizes = {"vocabulary": 20, "d_model": 16, "layers": 2, "heads": 2, "d_hidden": 16}
    model = LanguageModel(LanguageConfig(**sizes, windows=(3, None))).double().eval()
    prompts = [torch.tensor([1, 2, 3, 4, 5]), torch.tensor([6, 7])]
    state, first = model.start_generation(prompts)
    state.step(first)
    with pytest.raises(TypeError, match=r"repeat rows with reorder\(rows\)"):
        copy.deepcopy(state)
    state.reorder(torch.tensor([0, 1, 1]))
    logits = state.step(torch.tensor([[8], [9], [10]]))
    for row, (n, token) in zip(logits, [(0, 8), (1, 9), (1, 10)], strict=True):
        torch.testing.assert_close(row, model(torch.cat((prompts[n], torch.tensor([token])))[None])[0, -1])
