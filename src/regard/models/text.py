"""Encoders of text that read both ways: BERT and its kin, and what stands on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.engines.packed_linear import project
from regard.models.blocks import blocks
from regard.models.parts import Inputs, Rows, choose, embedded, embedding, norm_named, rows_of
from regard.nn import (
    ACTIVATIONS,
    AttentionPooling,
    Encoder,
    First,
    Max,
    Mean,
    Packed,
    linear,
)
from regard.nn.dropout import dropout

POOLINGS: dict[str, Callable[[int], nn.Module]] = {
    "mean": lambda width: Mean(),
    "max": lambda width: Max(),
    "first": lambda width: First(),
    "attention": AttentionPooling,
}
"""By the names that configurations use; each makes a pooling of a width."""


@dataclass(frozen=True)
class TextConfig:
    """An encoder of text. The defaults are BERT's.

    positions: rows of the learned table; first_position: where a sequence begins in it (RoBERTa begins at 2).
    segments: how many kinds of segment there are, 0 for none. embedding_width: width unless told otherwise (ALBERT).
    distinct: how many layers have weights of their own, all unless told otherwise; each then runs
        layers / distinct times (ALBERT has one that runs twelve times).
    pooling: "first", "mean", "max" or "attention". head_activation: within the head of a sequence classifier.
    unit: whether an embedder's vectors have length 1. attention_dropout: of the weights, dropout unless told otherwise.

    >>> from regard.models.text import TextConfig
    >>> TextConfig(vocabulary=100, width=32, layers=2, heads=4, hidden=64).arrangement
    'post'
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    hidden: int
    positions: int = 512
    first_position: int = 0
    segments: int = 2
    embedding_width: int | None = None
    distinct: int | None = None
    arrangement: str = "post"
    norm: str = "layer"
    eps: float = 1e-12
    activation: str = "gelu"
    head_activation: str = "tanh"
    pooling: str = "first"
    unit: bool = True
    classes: int = 2
    dropout: float = 0.1
    attention_dropout: float | None = None


class TextEncoder(nn.Module):
    """Token ids to hidden states, (B, N) to (B, N, width).

    Inputs are ids (B, N) with a (B, N) bool mask, True for real tokens; packed ids; or a list of ids (n,) of different
    lengths, which is packed. The result has the form of the inputs. `segments` have the form of the ids.

    >>> import regard as rg, torch
    >>> from regard.models.text import TextConfig, TextEncoder
    >>> model = TextEncoder(TextConfig(vocabulary=100, width=32, layers=2, heads=4, hidden=64)).eval()
    >>> model(torch.tensor([[5, 6, 7]])).shape
    torch.Size([1, 3, 32])
    >>> [tuple(hidden.shape) for hidden in model([torch.tensor([5, 6, 7]), torch.tensor([8, 9])])]
    [(3, 32), (2, 32)]
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        inner = config.embedding_width or config.width
        norm = norm_named(config.norm, config.eps)
        self.embedding = embedding(config.vocabulary, inner)
        self.position = embedding(config.positions, inner)
        self.segment = embedding(config.segments, inner) if config.segments else None
        self.embedding_norm = norm(inner)
        self.project = None if inner == config.width else linear(inner, config.width)
        distinct = config.distinct or config.layers
        if config.layers % distinct:
            raise ValueError(f"layers = {config.layers} must be a multiple of distinct = {distinct}")
        self.stack = Encoder(
            blocks(config, distinct, norm),
            norm=None if config.arrangement == "post" else norm(config.width),
            repeat=config.layers // distinct,
        )

    def forward(
        self, inputs: Inputs, mask: Tensor | None = None, *, segments: Inputs | None = None
    ) -> Tensor | Packed | list[Tensor]:
        """Hidden states (B, N, width); of packed inputs packed, of a list a list."""
        rows = rows_of(inputs, mask).own()
        return rows.back(self.hidden(rows, segments))

    def hidden(self, rows: Rows, segments: Inputs | None = None) -> Tensor:
        """Ids (B, N) to hidden states (B, N, width), for what stands on the encoder."""
        ids, first = rows.values, self.config.first_position
        some = ids.shape[1] > self.config.positions - first or (rows.shared.parted and ids.numel() > 0)
        if some and int(rows.positions.max()) >= self.config.positions - first:
            raise ValueError(
                f"a sequence has {int(rows.positions.max()) + 1} tokens, but the model knows "
                f"{self.config.positions - first} positions; cut it, or split it into pieces"
            )
        at = rows.positions + first if first else rows.positions
        x = embedded(ids, self.embedding) + F.embedding(at, self.position.weight)
        if self.segment is not None:
            if segments is None:
                x = x + self.segment.weight[0]
            else:
                x = x + F.embedding(_alike(segments, rows), self.segment.weight)
        x = self.embedding_norm(x)
        if self.config.dropout and self.training:
            x = dropout(x, self.config.dropout)
        return self.stack(x if self.project is None else self.project(x), shared=rows.shared)


class MaskedLanguageModel(nn.Module):
    """Token ids to the logits of every token, (B, N) to (B, N, vocabulary); the output table is the embedding's.

    >>> import torch
    >>> from regard.models.text import MaskedLanguageModel, TextConfig
    >>> model = MaskedLanguageModel(TextConfig(vocabulary=100, width=32, layers=2, heads=4, hidden=64)).eval()
    >>> model(torch.tensor([[5, 6, 7]])).shape
    torch.Size([1, 3, 100])
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        inner = config.embedding_width or config.width
        self.encoder = TextEncoder(config)
        self.transform = linear(config.width, inner)
        self.norm = norm_named(config.norm, config.eps)(inner)
        self.bias = nn.Parameter(torch.zeros(config.vocabulary))
        self.activation = choose("activation", config.activation, ACTIVATIONS)

    def forward(
        self, inputs: Inputs, mask: Tensor | None = None, *, segments: Inputs | None = None
    ) -> Tensor | Packed | list[Tensor]:
        """Logits (B, N, vocabulary); of packed inputs packed, of a list a list."""
        rows = rows_of(inputs, mask).own()
        return rows.back(self.logits(self.encoder.hidden(rows, segments)))

    @property
    def output_layer(self) -> nn.Embedding:
        """The module whose weight gives the logits."""
        return self.encoder.embedding

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states of the encoder (..., width) to logits (..., vocabulary): of all tokens, or of a few."""
        x = self.norm(self.activation(self.transform(hidden)))
        return project(x, self.output_layer.weight, self.bias)


class SequenceClassifier(nn.Module):
    """Token ids to the logits of one class for each sequence, (B, N) to (B, classes).

    >>> import torch
    >>> from regard.models.text import SequenceClassifier, TextConfig
    >>> model = SequenceClassifier(TextConfig(vocabulary=100, width=32, layers=2, heads=4, hidden=64)).eval()
    >>> model([torch.tensor([5, 6, 7]), torch.tensor([8, 9])]).shape
    torch.Size([2, 2])
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = TextEncoder(config)
        self.pooling = pooling_named(config.pooling, config.width)
        self.transform = linear(config.width, config.width)
        self.classifier = linear(config.width, config.classes)
        self.activation = choose("head_activation", config.head_activation, ACTIVATIONS)

    def forward(self, inputs: Inputs, mask: Tensor | None = None, *, segments: Inputs | None = None) -> Tensor:
        """Logits (B, classes)."""
        rows = rows_of(inputs, mask)
        x = rows.pooled(self.pooling, self.encoder.hidden(rows, segments))
        x = self.activation(self.transform(x))
        return self.classifier(F.dropout(x, self.config.dropout, self.training))


class TokenClassifier(nn.Module):
    """Token ids to the logits of a class for each token, (B, N) to (B, N, classes).

    >>> import torch
    >>> from regard.models.text import TextConfig, TokenClassifier
    >>> model = TokenClassifier(TextConfig(vocabulary=100, width=32, layers=2, heads=4, hidden=64, classes=5)).eval()
    >>> model(torch.tensor([[5, 6, 7]])).shape
    torch.Size([1, 3, 5])
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = TextEncoder(config)
        self.classifier = linear(config.width, config.classes)

    def forward(
        self, inputs: Inputs, mask: Tensor | None = None, *, segments: Inputs | None = None
    ) -> Tensor | Packed | list[Tensor]:
        """Logits (B, N, classes); of packed inputs packed, of a list a list."""
        rows = rows_of(inputs, mask).own()
        x = self.encoder.hidden(rows, segments)
        return rows.back(self.classifier(F.dropout(x, self.config.dropout, self.training)))


class QuestionAnswering(nn.Module):
    """Ids of a question and a context to the logits of where the answer begins and ends, (B, N) to (B, N, 2).

    >>> import torch
    >>> from regard.models.text import QuestionAnswering, TextConfig
    >>> model = QuestionAnswering(TextConfig(vocabulary=100, width=32, layers=2, heads=4, hidden=64)).eval()
    >>> begin, end = model(torch.tensor([[5, 6, 7]])).unbind(-1)
    >>> begin.shape
    torch.Size([1, 3])
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = TextEncoder(config)
        self.ends = linear(config.width, 2)

    def forward(
        self, inputs: Inputs, mask: Tensor | None = None, *, segments: Inputs | None = None
    ) -> Tensor | Packed | list[Tensor]:
        """Logits (B, N, 2); of packed inputs packed, of a list a list. BERT's segments are 0 for the question."""
        rows = rows_of(inputs, mask)
        return rows.back(self.ends(self.encoder.hidden(rows, segments)))


class SentenceEmbedder(nn.Module):
    """Token ids to one unit vector for each sequence, (B, N) to (B, width): pooled hidden states.

    `embed` takes strings where there is a `tokenizer`, one of the library of that name; `regard.load` brings it along.

    >>> import torch
    >>> from regard.models.text import SentenceEmbedder, TextConfig
    >>> config = TextConfig(vocabulary=100, width=32, layers=2, heads=4, hidden=64, pooling="mean")
    >>> SentenceEmbedder(config).eval()([torch.tensor([5, 6, 7]), torch.tensor([8, 9])]).shape
    torch.Size([2, 32])
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = TextEncoder(config)
        self.pooling = pooling_named(config.pooling, config.width)
        self.tokenizer: Any = None

    def forward(self, inputs: Inputs, mask: Tensor | None = None, *, segments: Inputs | None = None) -> Tensor:
        """Unit vectors (B, width)."""
        rows = rows_of(inputs, mask)
        pooled = rows.pooled(self.pooling, self.encoder.hidden(rows, segments))
        return F.normalize(pooled, dim=-1) if self.config.unit else pooled

    @torch.inference_mode()
    def embed(self, texts: Sequence[str], *, tokens: int = 2048) -> Tensor:
        """The vectors of strings, (len(texts), width): packed, those alike in length together, `tokens` at a time."""
        if self.tokenizer is None:
            raise ValueError(
                "embed needs a tokenizer: load the model from a folder with tokenizer.json, or give it ids"
            )
        if isinstance(texts, str):
            raise TypeError("texts must be a list of strings, but is one string; try [text]")
        table = self.encoder.embedding.weight
        vectors = table.new_empty(len(texts), self.config.width)
        ids = [torch.tensor(found.ids, device=table.device) for found in self.tokenizer.encode_batch(list(texts))]
        for rows in alike([len(row) for row in ids], tokens):
            vectors[rows] = self([ids[row] for row in rows])
        return vectors


def alike(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Numbers of sequences in order of their length, together at most `tokens` long, one at least.

    >>> from regard.models.text import alike
    >>> list(alike([3, 9, 2, 4], tokens=9))
    [[2, 0, 3], [1]]
    """
    rows: list[int] = []
    held = 0
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if rows and held + lengths[row] > tokens:
            yield rows
            rows, held = [], 0
        rows.append(row)
        held += lengths[row]
    if rows:
        yield rows


def _alike(segments: Inputs, rows: Rows) -> Tensor:
    """Segments, which must have the form of the ids, for the tokens that are here."""
    found = rows_of(segments)
    values = rows.beside(found.values)
    if rows.packed is not None and found.packed is not None:
        ours, theirs = rows.packed.lengths, found.packed.lengths
    else:
        ours, theirs = tuple(rows.values.shape), tuple(values.shape)
    if ours != theirs:
        raise ValueError(f"segments must have the form of the ids, {ours}, but have {theirs}")
    return values


def pooling_named(name: str, width: int) -> nn.Module:
    """A pooling by its name in a configuration."""
    return choose("pooling", name, POOLINGS)(width)
