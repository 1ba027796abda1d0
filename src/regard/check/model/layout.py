"""How texts lie in a batch, and the calls that a model gets: padding, packed documents, chunks for a cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

PADDING = -1  # number of a text at a position of padding


@dataclass(frozen=True)
class Row:
    """One row of a batch: for every position the text that it belongs to, or PADDING.

    Position p of text n is token `first[n] + p` of one long text, so that rows of different layouts share tokens.

    >>> from regard.check.model.layout import Row
    >>> Row((-1, 0, 0, 1), first=(0, 2)).positions.tolist()
    [0, 0, 1, 0]
    """

    texts: tuple[int, ...]
    first: tuple[int, ...] = (0,)

    @cached_property
    def real(self) -> Tensor:
        return torch.tensor(self.texts) != PADDING

    @cached_property
    def positions(self) -> Tensor:
        """The position of each token in its text; 0 for padding."""
        counts, positions = dict.fromkeys(self.texts, 0), []
        for text in self.texts:
            positions.append(0 if text == PADDING else counts[text])
            counts[text] += 1
        return torch.tensor(positions)

    @cached_property
    def tokens(self) -> Tensor:
        """The number of each token; padding has numbers from the end of the row upwards."""
        ends = len(self.texts) + torch.arange(len(self.texts))
        starts = torch.tensor([0 if text == PADDING else self.first[text] for text in self.texts])
        return torch.where(self.real, starts + self.positions, ends)

    def slices(self) -> Iterator[tuple[slice, Row]]:
        """Yield for each text where it lies, and a row that contains it alone."""
        for text, first in enumerate(self.first):
            start, length = self.texts.index(text), self.texts.count(text)
            yield slice(start, start + length), Row((0,) * length, (first,))


@dataclass(frozen=True)
class Scenario:
    """One way to call a model.

    rows: the layout of the tokens; of an encoder-decoder, the tokens of the decoder. encoder: those of its encoder.
    chunks: lengths of the successive calls with a cache; empty for one call without a cache.
    mask, positions: whether the model is given an attention mask and position numbers.
    """

    name: str
    rows: tuple[Row, ...]
    encoder: tuple[Row, ...] = ()
    chunks: tuple[int, ...] = ()
    mask: bool = False
    positions: bool = False

    @property
    def hides(self) -> str:
        """What the scenario asks a model to hide: "padding", "documents" or nothing."""
        return "documents" if any(len(row.first) > 1 for row in self.rows) else "padding" if self.mask else ""


def alone(row: Row, encoder: Row | None = None) -> Scenario:
    """A call with one text, without padding, mask or cache."""
    return Scenario("plain", (row,), () if encoder is None else (encoder,))


def full(length: int) -> Row:
    return Row((0,) * length)


def padded_rows(length: int, side: str) -> tuple[Row, ...]:
    """Three rows: a text of the whole length, a shorter one and one of two tokens, padded on one side."""
    fill = [(n, (PADDING,) * (length - n)) for n in (length, max(length - 3, 2), min(length, 2))]
    return tuple(Row((0,) * n + pad if side == "right" else pad + (0,) * n) for n, pad in fill)


def packed_rows(length: int) -> tuple[Row, ...]:
    """Two rows of three documents in one row each, of different lengths."""
    edges = [(0, length // 2, length - 2), (0, 2, length // 2 + 1)]
    rows = []
    for edge in edges:
        ends = (*edge[1:], length)
        sizes = [end - start for start, end in zip(edge, ends, strict=True)]
        rows.append(Row(tuple(n for n, size in enumerate(sizes) for _ in range(size)), edge))
    return tuple(rows)


def chunks(length: int) -> tuple[int, ...]:
    """A prompt, a chunk of three tokens, and two single tokens; a short text has fewer."""
    if length <= 2:
        return (1,) * length
    rest = length - 2
    return (rest - 3, 3, 1, 1) if rest > 3 else (rest, 1, 1)


def scenarios(
    length: int, encoder: int = 0, *, padding: bool = True, cache: bool = True, documents: bool = True,
    encoder_padding: bool = True,
) -> tuple[Scenario, ...]:  # fmt: skip
    """The scenarios for texts of this length, and of length `encoder` for an encoder."""

    def source(side: str = "") -> tuple[Row, ...]:
        if not encoder:
            return ()
        rows = padded_rows(length, side) if side else (full(length),)
        return padded_rows(encoder, side) if side and encoder_padding else (full(encoder),) * len(rows)

    one, left, steps = (full(length),), padded_rows(length, "left"), chunks(length)
    scenarios = [Scenario("plain", one, source())]
    if padding:
        scenarios.append(Scenario("right padding", padded_rows(length, "right"), source("right"), mask=True))
        scenarios.append(Scenario("left padding", left, source("left"), mask=True, positions=True))
    if cache:
        scenarios.append(Scenario("cache", one, source(), steps))
    if cache and padding:
        scenarios.append(Scenario("cache, left padding", left, source("left"), steps, mask=True, positions=True))
    if documents and length >= 6:
        scenarios.append(Scenario("documents", packed_rows(length), positions=True))
    return tuple(scenarios)
