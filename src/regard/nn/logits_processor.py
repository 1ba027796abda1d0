"""Changes of the logits of the next token that depend on the tokens before it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogitsProcessor:
    """Changes the logits of the next token before one is chosen, as the processors of Transformers do.

    repetition_penalty: divides positive logits of tokens that occurred before, in the prompt or after it, and
        multiplies negative ones. In beam search, log-probabilities take the place of logits.
    no_repeat_ngram_size: sequences of this many tokens never occur twice; 0 means no limit.
    bad_words: sequences of tokens that are never generated.
    min_new_tokens: no stop token is generated before this many others.
    last_tokens: if `max_new_tokens` is reached, the last token is one of these; empty means any.

    >>> import regard as rg, torch
    >>> processor = rg.nn.LogitsProcessor(repetition_penalty=2.0, bad_words=((3,),))
    >>> processor(torch.tensor([[1.0, 2.0, -1.0, 5.0]]), torch.tensor([[1, 2]]))
    tensor([[ 1.,  1., -2., -inf]])
    """

    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_new_tokens: int = 0
    last_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty must be positive, got {self.repetition_penalty}")
        for name in ("no_repeat_ngram_size", "min_new_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for words in (*self.bad_words, *([self.last_tokens] if self.last_tokens else [])):
            if not words or min(words) < 0:
                raise ValueError(f"bad_words and last_tokens must be token ids of at least 0, got {words!r}")

    def __call__(
        self, logits: Tensor, tokens: Tensor, *, generated: int = 0, remaining: int | None = None,
        stop: Sequence[int] = (),
    ) -> Tensor:  # fmt: skip
        """Return the changed logits (R, vocabulary).

        tokens: all tokens before (R, n), -1 for padding. generated: how many of them are generated.
        remaining: how many tokens are generated at most from here on.
        """
        if self.repetition_penalty != 1:
            logits = self._penalize(logits, tokens)
        vocabulary, device = logits.shape[-1], logits.device
        if any(token >= vocabulary for words in self.bad_words for token in words[-1:]):
            raise ValueError(f"bad_words must be below the vocabulary size {vocabulary}, got {self.bad_words}")
        banned = [words[0] for words in self.bad_words if len(words) == 1]
        banned += stop if generated < self.min_new_tokens else []
        if banned:
            logits = logits.index_fill(-1, torch.tensor(banned, device=device), -math.inf)
        if self.no_repeat_ngram_size or any(len(words) > 1 for words in self.bad_words):
            pairs = [(n, token) for n, row in enumerate(tokens.tolist()) for token in self._banned_after(row)]
            if places := [pair for pair in pairs if pair[1] < vocabulary]:
                rows, columns = torch.tensor(places, device=device).unbind(1)
                logits = logits.index_put((rows, columns), logits.new_tensor(-math.inf))
        if self.last_tokens and remaining == 1:
            chosen = torch.tensor(self.last_tokens, device=device)
            logits = torch.full_like(logits, -math.inf).index_fill(-1, chosen, 0.0)
        return logits

    def _penalize(self, logits: Tensor, tokens: Tensor) -> Tensor:
        rows, vocabulary = logits.shape
        absent = (tokens < 0) | (tokens >= vocabulary)  # padding, and tokens of a larger input vocabulary
        seen = torch.zeros(rows, vocabulary + 1, dtype=torch.bool, device=logits.device)
        seen = seen.scatter(1, tokens.masked_fill(absent, vocabulary), True)[:, :vocabulary]
        penalized = torch.where(logits < 0, logits * self.repetition_penalty, logits / self.repetition_penalty)
        return torch.where(seen, penalized, logits)

    def _banned_after(self, row: list[int]) -> set[int]:
        """Return the tokens that must not follow a row, without single bad words."""
        banned = {words[-1] for words in self.bad_words if len(words) > 1 and row[1 - len(words) :] == [*words[:-1]]}
        size = self.no_repeat_ngram_size
        last = row[len(row) - size + 1 :]
        if not size or len(row) < size or -1 in last:
            return banned
        ngrams = (row[n : n + size] for n in range(len(row) - size + 1))
        return banned | {ngram[-1] for ngram in ngrams if ngram[:-1] == last and ngram[-1] >= 0}
