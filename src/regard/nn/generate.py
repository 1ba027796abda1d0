"""Token-by-token generation with cached keys and values: greedy, sampling and beam search."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard.nn.cache import CrossCache
from regard.nn.context import LayerContext
from regard.nn.recurrent import LayerCache


class GenerationState:
    """The state of a generating model; `step` takes tokens and returns the logits of the next token.

    forward: maps ids (R, n) and a `LayerContext` to the logits (R, vocabulary) of the last token, using the caches.
    caches: the caches of all layers. left_padding: number of padding tokens at the front of each row.
    """

    def __init__(
        self,
        forward: Callable[[Tensor, LayerContext], Tensor],
        caches: Sequence[LayerCache | CrossCache],
        left_padding: Tensor | None = None,
    ) -> None:
        self.forward, self.caches, self.left_padding = forward, caches, left_padding
        self.seen_tokens = next((cache.seen_tokens for cache in caches if isinstance(cache, LayerCache)), 0)
        self._context = LayerContext(left_padding=left_padding)

    def step(self, ids: Tensor) -> Tensor:
        """Append ids (R, n) to the sequences and return the logits (R, vocabulary) of the next token."""
        positions = torch.arange(self.seen_tokens, self.seen_tokens + ids.shape[1], device=ids.device)
        if self.left_padding is not None:
            positions = (positions - self.left_padding[:, None]).clamp(min=0)
        self.seen_tokens += ids.shape[1]
        return self.forward(ids, self._context.with_positions(positions))

    def reorder(self, rows: Tensor, start: int = 0) -> None:
        """Make row r continue row `rows[r]`. The two must agree on the tokens before `start`."""
        for cache in self.caches:
            cache.reorder(rows, start)
        if self.left_padding is not None:
            self.left_padding = self.left_padding[rows]
            self._context = LayerContext(left_padding=self.left_padding)


@dataclass(frozen=True)
class Greedy:
    """Choose the most likely token.

    >>> import regard as rg, torch
    >>> rg.nn.Greedy().chooser()(torch.tensor([[0.1, 0.7, 0.2]]))
    tensor([1])
    """

    def chooser(self) -> Callable[[Tensor], Tensor]:
        return lambda logits: logits.argmax(-1)


@dataclass(frozen=True)
class Sample:
    """Sample from the softmax of logits / temperature, limited by `top_k` and `top_p`.

    top_k: sample from the k most likely tokens. top_p: sample from the smallest set of most likely tokens whose
    probabilities sum to at least p. seed: makes sampling reproducible; without it torch's global generator is used.

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
            raise ValueError(f"temperature must be positive, got {self.temperature}; for the limit 0 use Greedy()")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}; omit it to sample from all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}; omit it to sample from all tokens")

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
    """Beam search for the highest sum of log-probabilities divided by length ** length_penalty.

    >>> import regard as rg
    >>> rg.nn.Beam(width=4)
    Beam(width=4, length_penalty=1.0)
    """

    width: int = 4
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"width must be at least 1, got {self.width}")


Strategy = Greedy | Sample | Beam


def stop_tokens(stop: int | Sequence[int]) -> tuple[int, ...]:
    """Normalise `stop`, one token id or several, to a tuple.

    >>> from regard.nn.generate import stop_tokens
    >>> stop_tokens(2), stop_tokens([2, 3])
    ((2,), (2, 3))
    """
    try:
        return tuple(operator.index(token) for token in (stop if isinstance(stop, Iterable) else (stop,)))
    except TypeError:
        raise TypeError(f"stop must be a token id or a list of token ids, got {stop!r}") from None


def generate(
    state: GenerationState, first: Tensor, *, strategy: Strategy, max_new_tokens: int, stop: int | Sequence[int] = ()
) -> list[Tensor]:
    """Generate at most `max_new_tokens` tokens after the ids `first` (R, n); the stop token is not included."""
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
    """Yield the tokens (R,) of each step, up to and including the step in which the last row reaches a stop token."""
    stop = stop_tokens(stop)
    choose, stops = strategy.chooser(), torch.tensor(stop, device=first.device)
    running = torch.ones(len(first), dtype=torch.bool, device=first.device)
    ids = first
    for _ in range(max_new_tokens):
        with torch.inference_mode():
            token = choose(state.step(ids))
            ids = token[:, None]
            if stop:
                running &= ~torch.isin(token, stops)
        yield token
        if stop and not bool(running.any()):
            return


def beam_search(
    state: GenerationState, first: Tensor, strategy: Beam, *, max_new_tokens: int, stop: int | Sequence[int] = ()
) -> list[Tensor]:
    """Return the best hypothesis of each row."""
    beams = beam_hypotheses(state, first, strategy, max_new_tokens=max_new_tokens, stop=stop)
    return [hypotheses[0][1] if hypotheses else first.new_zeros(0) for hypotheses in beams]


@torch.inference_mode()
def beam_hypotheses(
    state: GenerationState, first: Tensor, strategy: Beam, *, max_new_tokens: int, stop: int | Sequence[int] = ()
) -> list[list[tuple[float, Tensor]]]:
    """Beam search: the hypotheses of each row as (score, tokens), best first; at most `width` of them.

    Beam w of row r is row r * width + w of the state.
    """
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
        # The overall best candidates are among the best of each beam, so no log-softmax over the vocabulary is needed.
        per_beam = min((len(stop) + 1) * width, vocabulary)
        values, tokens = logits.float().topk(per_beam, -1)
        values = (values - logits.float().logsumexp(-1, keepdim=True)).view(rows, -1, per_beam) + scores[:, :, None]
        values, indices = values.flatten(1).topk(min((len(stop) + 1) * width, values[0].numel()))
        tokens = tokens.view(rows, -1).gather(1, indices)
        beams = (indices // per_beam).tolist()
        chosen: list[tuple[int, int, float]] = []
        for row, candidates in enumerate(zip(values.tolist(), tokens.tolist(), beams, strict=True)):
            kept: list[tuple[int, int, float]] = []
            for rank, (score, token, beam) in enumerate(zip(*candidates, strict=True)):
                source = row * width + beam
                if token in stop:
                    if rank < width and not done[row]:
                        finished[row].append((score / (n + 1) ** penalty, history[source, :n].copy()))
                elif len(kept) < width:
                    kept.append((source, token, score))
            finished[row] = sorted(finished[row], key=lambda pair: -pair[0])[:width]
            kept += [(row * width, 0, -float("inf"))] * (
                width - len(kept)
            )  # if the vocabulary is smaller than the beam
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
    return [
        [(score, torch.from_numpy(tokens).to(first.device)) for score, tokens in candidates[:width]]
        for candidates in (sorted(each, key=lambda pair: -pair[0]) for each in finished)
    ]


def _common_length(history: np.ndarray, sources: np.ndarray, count: int) -> int:
    """Length of the prefix that every row shares with the row it continues."""
    changed = np.flatnonzero(sources != np.arange(len(sources)))
    if not len(changed) or not count:
        return count
    differ = history[changed, :count] != history[sources[changed], :count]
    return int(np.where(differ.any(1), differ.argmax(1), count).min())
