"""Token-by-token generation with cached keys and values: greedy, sampling and beam search."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.nn.cache import CrossCache
from regard.nn.context import LayerContext
from regard.nn.logits_processor import LogitsProcessor
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

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            "a GenerationState cannot be copied or pickled, because its forward writes to the caches of the original; "
            "to branch, repeat rows with reorder(rows), or start another generation"
        )


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
    """Sample from the softmax of logits / temperature, limited by `top_k`, `top_p` and `min_p`.

    top_k: sample from the k most likely tokens. top_p: sample from the smallest set of most likely tokens whose
    probabilities sum to at least p. min_p: sample from the tokens that are at least p times as likely as the most
    likely one. seed: makes sampling reproducible; without it torch's global generator is used.

    >>> import regard as rg, torch
    >>> rg.nn.Sample(top_k=1).chooser()(torch.tensor([[0.1, 0.7, 0.2]]))
    tensor([1])
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}; for the limit 0 use Greedy()")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}; omit it to sample from all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}; omit it to sample from all tokens")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}; omit it to sample from all tokens")

    def chooser(self) -> Callable[[Tensor], Tensor]:
        generator: torch.Generator | None = None

        def choose(logits: Tensor) -> Tensor:
            nonlocal generator
            if self.seed is not None and generator is None:
                generator = torch.Generator(logits.device).manual_seed(self.seed)
            logits = logits.float() / self.temperature
            if self.top_k is None and self.top_p is None and not self.min_p:
                return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
            values, tokens = logits.topk(min(self.top_k or logits.shape[-1], logits.shape[-1]), sorted=True)
            shares = values.softmax(-1)
            if self.top_p is not None:
                shares = shares.masked_fill(shares.cumsum(-1) - shares >= self.top_p, 0.0)
            if self.min_p:
                shares = shares.masked_fill(shares < self.min_p * shares[:, :1], 0.0)
            drawn = torch.multinomial(shares, 1, generator=generator)
            return tokens.gather(-1, drawn)[:, 0]

        return choose


@dataclass(frozen=True)
class Beam:
    """Beam search for the highest sum of log-probabilities divided by length ** length_penalty.

    early_stopping: True ends the search of a row once `width` hypotheses are complete; False also requires that the
    best running one, at its present length, is not better; "never" that it cannot become better at any length.

    >>> import regard as rg
    >>> rg.nn.Beam(width=4)
    Beam(width=4, length_penalty=1.0, early_stopping=False)
    """

    width: int = 4
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"width must be at least 1, got {self.width}")
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(f'early_stopping must be True, False or "never", got {self.early_stopping!r}')


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


class _Tokens:
    """All tokens (R, n) of the rows of a state, -1 for padding, as a `LogitsProcessor` reads them."""

    def __init__(self, state: GenerationState, first: Tensor) -> None:
        padding = getattr(state, "left_padding", None)
        places = torch.arange(first.shape[1], device=first.device)
        self.ids = first if padding is None else first.masked_fill(places < padding[:, None], -1)

    def append(self, tokens: Tensor) -> None:
        self.ids = torch.cat((self.ids, tokens[:, None]), 1)


def generate(
    state: GenerationState, first: Tensor, *, strategy: Strategy, max_new_tokens: int, stop: int | Sequence[int] = (),
    processor: LogitsProcessor | None = None, forced: int = 0,
) -> list[Tensor]:  # fmt: skip
    """Generate at most `max_new_tokens` tokens after the ids `first` (R, n); the stop token is not included.

    forced: how many of the last tokens of `first` count as generated in the length penalty of a beam search.
    """
    if isinstance(strategy, Beam):
        return beam_search(
            state, first, strategy, max_new_tokens=max_new_tokens, stop=stop, processor=processor, forced=forced
        )
    stop = stop_tokens(stop)
    steps = list(generate_steps(state, first, strategy, max_new_tokens=max_new_tokens, stop=stop, processor=processor))
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
    processor: LogitsProcessor | None = None,
) -> Iterator[Tensor]:
    """Yield the tokens (R,) of each step, up to and including the step in which the last row reaches a stop token."""
    stop = stop_tokens(stop)
    choose, stops = strategy.chooser(), torch.tensor(stop, device=first.device)
    running = torch.ones(len(first), dtype=torch.bool, device=first.device)
    tokens = None if processor is None else _Tokens(state, first)
    ids = first
    for n in range(max_new_tokens):
        with torch.inference_mode():
            logits = state.step(ids)
            if processor is not None and tokens is not None:
                remaining = max_new_tokens - n
                logits = processor(logits.float(), tokens.ids, generated=n, remaining=remaining, stop=stop)
            token = choose(logits)
            ids = token[:, None]
            if tokens is not None:
                tokens.append(token)
            if stop:
                running &= ~torch.isin(token, stops)
        yield token
        if stop and not bool(running.any()):
            return


def beam_search(
    state: GenerationState, first: Tensor, strategy: Beam, *, max_new_tokens: int, stop: int | Sequence[int] = (),
    processor: LogitsProcessor | None = None, forced: int = 0,
) -> list[Tensor]:  # fmt: skip
    """Return the best hypothesis of each row."""
    beams = beam_hypotheses(
        state, first, strategy, max_new_tokens=max_new_tokens, stop=stop, processor=processor, forced=forced
    )
    return [hypotheses[0][1] if hypotheses else first.new_zeros(0) for hypotheses in beams]


@torch.inference_mode()
def beam_hypotheses(
    state: GenerationState, first: Tensor, strategy: Beam, *, max_new_tokens: int, stop: int | Sequence[int] = (),
    processor: LogitsProcessor | None = None, forced: int = 0,
) -> list[list[tuple[float, Tensor]]]:  # fmt: skip
    """Beam search: the hypotheses of each row as (score, tokens), best first; at most `width` of them.

    Beam w of row r is row r * width + w of the state.
    """
    stop = stop_tokens(stop)
    width, rows, penalty = strategy.width, len(first), strategy.length_penalty
    finished: list[list[tuple[float, np.ndarray]]] = [[] for _ in range(rows)]
    if not max_new_tokens:
        return [[] for _ in range(rows)]
    done = [False] * rows
    history = np.zeros((rows * width, max_new_tokens), np.int64)
    prompts = None if processor is None else _Tokens(state, first).ids  # before the rows of the state are repeated
    logits, prompt = state.step(first), first.shape[1]
    state.reorder(torch.arange(rows, device=first.device).repeat_interleave(width))
    vocabulary = logits.shape[-1]
    scores = torch.zeros(rows, 1, device=first.device)
    for n in range(max_new_tokens):
        # The overall best candidates are among the best of each beam, so no log-softmax over the vocabulary is needed.
        per_beam = min((len(stop) + 1) * width, vocabulary)
        logits = logits.float()
        if processor is None or prompts is None:
            values, tokens = logits.topk(per_beam, -1)
            values = values - logits.logsumexp(-1, keepdim=True)
        else:
            before = torch.from_numpy(history[: len(logits), :n]).to(first.device)
            before = torch.cat((prompts.repeat_interleave(len(logits) // rows, 0), before), 1)
            remaining = max_new_tokens - n
            log_probabilities = logits.log_softmax(-1)
            values, tokens = processor(log_probabilities, before, generated=n, remaining=remaining, stop=stop).topk(
                per_beam, -1
            )
        values = values.view(rows, -1, per_beam) + scores[:, :, None]
        values, indices = values.flatten(1).topk(min((len(stop) + 1) * width, values[0].numel()))
        tokens = tokens.view(rows, -1).gather(1, indices)
        beams = (indices // per_beam).tolist()
        length, is_last = n + 1 + forced, n + 1 == max_new_tokens
        chosen: list[tuple[int, int, float]] = []
        for row, candidates in enumerate(zip(values.tolist(), tokens.tolist(), beams, strict=True)):
            kept: list[tuple[int, int, float]] = []
            for rank, (score, token, beam) in enumerate(zip(*candidates, strict=True)):
                source = row * width + beam
                if token in stop or is_last:
                    if rank < width and not done[row]:
                        ended = history[source, :n].copy()
                        ended = ended if token in stop else np.append(ended, token)
                        finished[row].append((score / length**penalty, ended))
                elif len(kept) < width:
                    kept.append((source, token, score))
            finished[row] = sorted(finished[row], key=lambda pair: -pair[0])[:width]
            # if the vocabulary is smaller than the beam
            kept += [(row * width, 0, -float("inf"))] * (width - len(kept))
            if len(finished[row]) == width:
                longest = max_new_tokens + forced if strategy.early_stopping == "never" and penalty > 0 else length
                best = kept[0][2] / longest**penalty
                done[row] |= strategy.early_stopping is True or finished[row][-1][0] >= best
            chosen += kept
        if all(done) or is_last:
            break
        sources = np.array([source for source, _, _ in chosen])
        start = _common_length(history, sources, n)
        history = history[sources]
        history[:, n] = [token for _, token, _ in chosen]
        scores = torch.tensor([score for _, _, score in chosen], device=first.device).view(rows, width)
        if n:
            state.reorder(torch.from_numpy(sources).to(first.device), prompt + start)
        logits = state.step(torch.from_numpy(history[:, n : n + 1]).to(first.device))
    return [[(score, torch.from_numpy(tokens).to(first.device)) for score, tokens in each] for each in finished]


def _common_length(history: np.ndarray, sources: np.ndarray, count: int) -> int:
    """Length of the prefix that every row shares with the row it continues."""
    changed = np.flatnonzero(sources != np.arange(len(sources)))
    if not len(changed) or not count:
        return count
    differ = history[changed, :count] != history[sources[changed], :count]
    return int(np.where(differ.any(1), differ.argmax(1), count).min())
