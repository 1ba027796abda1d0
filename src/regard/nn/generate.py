"""Generation: one token after the other, from a state that remembers keys and values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard.nn.cache import Cache, CrossCache
from regard.nn.context import LayerContext


class GenerationState:
    """A model in the midst of generating: `step` takes tokens and gives the logits of what comes next.

    forward: ids (R, n) and what their layers share to logits (R, vocabulary) of the last token; it holds the caches.
    caches: all of them, of every layer. left_padding: how many tokens at the front of each row are filler.
    """

    def __init__(
        self,
        forward: Callable[[Tensor, LayerContext], Tensor],
        caches: Sequence[Cache | CrossCache],
        left_padding: Tensor | None = None,
    ) -> None:
        self.forward, self.caches, self.left_padding = forward, caches, left_padding
        self.seen_tokens = next((cache.seen_tokens for cache in caches if isinstance(cache, Cache)), 0)
        self._context = LayerContext(left_padding=left_padding)

    def step(self, ids: Tensor) -> Tensor:
        """(R, n) ids that come after those before, to logits (R, vocabulary)."""
        positions = torch.arange(self.seen_tokens, self.seen_tokens + ids.shape[1], device=ids.device)
        if self.left_padding is not None:
            positions = (positions - self.left_padding[:, None]).clamp(min=0)
        self.seen_tokens += ids.shape[1]
        return self.forward(ids, self._context.with_positions(positions))

    def reorder(self, rows: Tensor, start: int = 0) -> None:
        """Row r goes on from what row `rows[r]` was; where they differ, they agree on the tokens before `start`."""
        for cache in self.caches:
            cache.reorder(rows, start)
        if self.left_padding is not None:
            self.left_padding = self.left_padding[rows]
            self._context = LayerContext(left_padding=self.left_padding)


@dataclass(frozen=True)
class Greedy:
    """The most likely token, always.

    >>> import regard as rg, torch
    >>> rg.nn.Greedy().chooser()(torch.tensor([[0.1, 0.7, 0.2]]))
    tensor([1])
    """

    def chooser(self) -> Callable[[Tensor], Tensor]:
        return lambda logits: logits.argmax(-1)


@dataclass(frozen=True)
class Sample:
    """A token drawn from the softmax of logits / temperature, of the `top_k` most likely, of the fewest most likely
    that hold a share of `top_p`. A seed makes it reproducible; without one torch's generator draws.

    >>> import regard as rg, torch
    >>> rg.nn.Sample(top_k=1).chooser()(torch.tensor([[0.1, 0.7, 0.2]]))
    tensor([1])
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, but is {self.temperature}; Greedy() is its limit at 0")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, but is {self.top_k}; leave it out for all")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be a share in (0, 1], but is {self.top_p}; leave it out for all")

    def chooser(self) -> Callable[[Tensor], Tensor]:
        generator: torch.Generator | None = None

        def choose(logits: Tensor) -> Tensor:
            nonlocal generator
            if self.seed is not None and generator is None:
                generator = torch.Generator(logits.device).manual_seed(self.seed)
            logits = logits.float() / self.temperature
            if self.top_k is None and self.top_p is None:
                return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
            values, tokens = logits.topk(min(self.top_k or logits.shape[-1], logits.shape[-1]), sorted=True)
            shares = values.softmax(-1)
            if self.top_p is not None:
                shares = shares.masked_fill(shares.cumsum(-1) - shares >= self.top_p, 0.0)
            drawn = torch.multinomial(shares, 1, generator=generator)
            return tokens.gather(-1, drawn)[:, 0]

        return choose


@dataclass(frozen=True)
class Beam:
    """The sequence with the best sum of log-probabilities over length ** length_penalty, of `width` followed at a time.

    >>> import regard as rg
    >>> rg.nn.Beam(width=4)
    Beam(width=4, length_penalty=1.0)
    """

    width: int = 4
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"width must be at least 1, but is {self.width}")


Strategy = Greedy | Sample | Beam


def stop_tokens(stop: int | Sequence[int]) -> tuple[int, ...]:
    """The tokens that end generation, given as one token or as several.

    >>> from regard.nn.generate import stop_tokens
    >>> stop_tokens(2), stop_tokens([2, 3])
    ((2,), (2, 3))
    """
    try:
        return tuple(operator.index(token) for token in (stop if isinstance(stop, Iterable) else (stop,)))
    except TypeError:
        raise TypeError(f"stop must be a token id or a list of them, but is {stop!r}") from None


def generate(
    state: GenerationState, first: Tensor, *, strategy: Strategy, max_new_tokens: int, stop: int | Sequence[int] = ()
) -> list[Tensor]:
    """What comes after the ids `first` (R, n), at most `max_new_tokens` tokens a row, without the stop token that ended
    it."""
    if isinstance(strategy, Beam):
        return beam_search(state, first, strategy, max_new_tokens=max_new_tokens, stop=stop)
    stop = stop_tokens(stop)
    steps = list(generate_steps(state, first, strategy, max_new_tokens=max_new_tokens, stop=stop))
    if not steps:
        return [first.new_empty(0) for _ in first]
    rows = torch.stack(steps, 1)  # (R, n)
    ends = torch.isin(rows, torch.tensor(list(stop), dtype=rows.dtype, device=rows.device))
    lengths = torch.where(ends.any(1), ends.int().argmax(1), rows.shape[1]).tolist()
    return [row[:n] for row, n in zip(rows, lengths, strict=True)]


def generate_steps(
    state: GenerationState,
    first: Tensor,
    strategy: Greedy | Sample,
    *,
    max_new_tokens: int,
    stop: int | Sequence[int] = (),
) -> Iterator[Tensor]:
    """The tokens (R,) of one step after the other, until every row has met a stop token, which comes too."""
    stop = stop_tokens(stop)
    choose, stops = strategy.chooser(), torch.tensor(stop, device=first.device)
    going = torch.ones(len(first), dtype=torch.bool, device=first.device)
    ids = first
    for _ in range(max_new_tokens):
        with torch.inference_mode():
            token = choose(state.step(ids))
            ids = token[:, None]
            if stop:
                going &= ~torch.isin(token, stops)
        yield token
        if stop and not bool(going.any()):
            return


@torch.inference_mode()
def beam_search(
    state: GenerationState, first: Tensor, strategy: Beam, *, max_new_tokens: int, stop: int | Sequence[int] = ()
) -> list[Tensor]:
    """Beam search. A row's beams are neighbours: beam w of row r is row r * width + w of the state."""
    stop = stop_tokens(stop)
    width, rows, penalty = strategy.width, len(first), strategy.length_penalty
    finished: list[list[tuple[float, np.ndarray]]] = [[] for _ in range(rows)]
    done = [max_new_tokens == 0] * rows
    history = np.zeros((rows * width, max_new_tokens), np.int64)
    logits, prompt = state.step(first), first.shape[1]
    state.reorder(torch.arange(rows, device=first.device).repeat_interleave(width))
    vocabulary = logits.shape[-1]
    scores = torch.zeros(rows, 1, device=first.device)
    for n in range(max_new_tokens):
        # The best of each beam are enough to find the best of all, and need no log-softmax over the vocabulary.
        each = min((len(stop) + 1) * width, vocabulary)
        values, tokens = logits.float().topk(each, -1)
        values = (values - logits.float().logsumexp(-1, keepdim=True)).view(rows, -1, each) + scores[:, :, None]
        values, places = values.flatten(1).topk(min((len(stop) + 1) * width, values[0].numel()))
        tokens = tokens.view(rows, -1).gather(1, places)
        beams = (places // each).tolist()
        chosen: list[tuple[int, int, float]] = []
        for row, found in enumerate(zip(values.tolist(), tokens.tolist(), beams, strict=True)):
            kept: list[tuple[int, int, float]] = []
            for rank, (score, token, which) in enumerate(zip(*found, strict=True)):
                source = row * width + which
                if token in stop:
                    if rank < width and not done[row]:
                        finished[row].append((score / (n + 1) ** penalty, history[source, :n].copy()))
                elif len(kept) < width:
                    kept.append((source, token, score))
            finished[row] = sorted(finished[row], key=lambda pair: -pair[0])[:width]
            kept += [(row * width, 0, -float("inf"))] * (width - len(kept))  # a vocabulary smaller than the beam
            if len(finished[row]) == width and finished[row][-1][0] >= kept[0][2] / (n + 1) ** penalty:
                done[row] = True
            chosen += kept
        sources = np.array([source for source, _, _ in chosen])
        start = _common_length(history, sources, n)
        history = history[sources]
        history[:, n] = [token for _, token, _ in chosen]
        scores = torch.tensor([score for _, _, score in chosen], device=first.device).view(rows, width)
        if all(done) or n + 1 == max_new_tokens:
            break
        if n:
            state.reorder(torch.from_numpy(sources).to(first.device), prompt + start)
        logits = state.step(torch.from_numpy(history[:, n : n + 1]).to(first.device))
    for row in range(rows):
        if not done[row] and max_new_tokens:
            length = n + 1
            for w, score in enumerate(scores[row].tolist()):
                finished[row].append((score / length**penalty, history[row * width + w, :length].copy()))
    best = [max(found, key=lambda pair: pair[0])[1] if found else np.zeros(0, np.int64) for found in finished]
    return [torch.from_numpy(tokens).to(first.device) for tokens in best]


def _common_length(history: np.ndarray, sources: np.ndarray, count: int) -> int:
    """How many tokens all rows have in common with the row that they go on from."""
    changed = np.flatnonzero(sources != np.arange(len(sources)))
    if not len(changed) or not count:
        return count
    differ = history[changed, :count] != history[sources[changed], :count]
    return int(np.where(differ.any(1), differ.argmax(1), count).min())
