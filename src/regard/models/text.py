"""Encoders of text that read both ways: BERT and its kin, and what stands on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.engines.packed_linear import project
from regard.models.blocks import build_blocks
from regard.models.components import choose, embed_tokens, make_embedding, norm_factory
from regard.models.inputs import Inputs, ModelInputs, prepare_inputs
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
    "mean": lambda d_model: Mean(),
    "max": lambda d_model: Max(),
    "first": lambda d_model: First(),
    "attention": AttentionPooling,
}
"""By the names that configurations use; each makes a pooling of a width."""


@dataclass(frozen=True)
class TextConfig:
    """An encoder of text. The defaults are BERT's.

    positions: rows of the learned table; first_position: where a sequence begins in it (RoBERTa begins at 2).
    segments: how many kinds of segment there are, 0 for none. d_embedding: d_model unless told otherwise (ALBERT).
    distinct: how many layers have weights of their own, all unless told otherwise; each then runs
        layers / distinct times (ALBERT has one that runs twelve times).
    pooling: "first", "mean", "max" or "attention". head_activation: within the head of a sequence classifier.
    unit: whether an embedder's vectors have length 1. attention_dropout: of the weights, dropout unless told otherwise.

    >>> from regard.models.text import TextConfig
    >>> TextConfig(vocabulary=100, d_model=32, layers=2, heads=4, d_hidden=64).arrangement
    'post'
    """

    vocabulary: int
    d_model: int
    layers: int
    heads: int
    d_hidden: int
    positions: int = 512
    first_position: int = 0
    segments: int = 2
    d_embedding: int | None = None
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
    """Token ids to hidden states, (B, N) to (B, N, d_model).

    Inputs are ids (B, N) with a (B, N) bool mask, True for real tokens; packed ids; or a list of ids (n,) of different
    lengths, which is packed. The result has the form of the inputs. `segments` have the form of the ids.

    >>> import regard as rg, torch
    >>> from regard.models.text import TextConfig, TextEncoder
    >>> model = TextEncoder(TextConfig(vocabulary=100, d_model=32, layers=2, heads=4, d_hidden=64)).eval()
    >>> model(torch.tensor([[5, 6, 7]])).shape
    torch.Size([1, 3, 32])
    >>> [tuple(hidden.shape) for hidden in model([torch.tensor([5, 6, 7]), torch.tensor([8, 9])])]
    [(3, 32), (2, 32)]
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        inner = config.d_embedding or config.d_model
        norm = norm_factory(config.norm, config.eps)
        self.embedding = make_embedding(config.vocabulary, inner)
        self.position = make_embedding(config.positions, inner)
        self.segment = make_embedding(config.segments, inner) if config.segments else None
        self.embedding_norm = norm(inner)
        self.project = None if inner == config.d_model else linear(inner, config.d_model)
        distinct = config.distinct or config.layers
        if config.layers % distinct:
            raise ValueError(f"layers = {config.layers} must be a multiple of distinct = {distinct}")
        self.stack = Encoder(
            build_blocks(config, distinct, norm),
            norm=None if config.arrangement == "post" else norm(config.d_model),
            repeat=config.layers // distinct,
        )

    def forward(
        self, inputs: Inputs, mask: Tensor | None = None, *, segments: Inputs | None = None
    ) -> Tensor | Packed | list[Tensor]:
        """Hidden states (B, N, d_model); of packed inputs packed, of a list a list."""
        rows = prepare_inputs(inputs, mask).to_local()
        return rows.to_input_form(self.hidden(rows, segments))

    def hidden(self, rows: ModelInputs, segments: Inputs | None = None) -> Tensor:
        """Ids (B, N) to hidden states (B, N, d_model), for what stands on the encoder."""
        ids, first = rows.values, self.config.first_position
        some = ids.shape[1] > self.config.positions - first or (rows.context.is_local and ids.numel() > 0)
        if some and int(rows.positions.max()) >= self.config.positions - first:
            raise ValueError(
                f"a sequence has {int(rows.positions.max()) + 1} tokens, but the model knows "
                f"{self.config.positions - first} positions; cut it, or split it into pieces"
            )
        at = rows.positions + first if first else rows.positions
        x = embed_tokens(ids, self.embedding) + F.embedding(at, self.position.weight)
        if self.segment is not None:
            if segments is None:
                x = x + self.segment.weight[0]
            else:
                x = x + F.embedding(_segments_like(segments, rows), self.segment.weight)
        x = self.embedding_norm(x)
        if self.config.dropout and self.training:
            x = dropout(x, self.config.dropout)
        return self.stack(x if self.project is None else self.project(x), context=rows.context)


class MaskedLanguageModel(nn.Module):
    """Token ids to the logits of every token, (B, N) to (B, N, vocabulary); the output table is the embedding's.

    >>> import torch
    >>> from regard.models.text import MaskedLanguageModel, TextConfig
    >>> model = MaskedLanguageModel(TextConfig(vocabulary=100, d_model=32, layers=2, heads=4, d_hidden=64)).eval()
    >>> model(torch.tensor([[5, 6, 7]])).shape
    torch.Size([1, 3, 100])
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        inner = config.d_embedding or config.d_model
        self.encoder = TextEncoder(config)
        self.transform = linear(config.d_model, inner)
        self.norm = norm_factory(config.norm, config.eps)(inner)
        self.bias = nn.Parameter(torch.zeros(config.vocabulary))
        self.activation = choose("activation", config.activation, ACTIVATIONS)

    def forward(
        self, inputs: Inputs, mask: Tensor | None = None, *, segments: Inputs | None = None
    ) -> Tensor | Packed | list[Tensor]:
        """Logits (B, N, vocabulary); of packed inputs packed, of a list a list."""
        rows = prepare_inputs(inputs, mask).to_local()
        return rows.to_input_form(self.logits(self.encoder.hidden(rows, segments)))

    @property
    def output_layer(self) -> nn.Embedding:
        """The module whose weight gives the logits."""
        return self.encoder.embedding

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states of the encoder (..., d_model) to logits (..., vocabulary): of all tokens, or of a few."""
        x = self.norm(self.activation(self.transform(hidden)))
        return project(x, self.output_layer.weight, self.bias)


class SequenceClassifier(nn.Module):
    """Token ids to the logits of one class for each sequence, (B, N) to (B, classes).

    >>> import torch
    >>> from regard.models.text import SequenceClassifier, TextConfig
    >>> model = SequenceClassifier(TextConfig(vocabulary=100, d_model=32, layers=2, heads=4, d_hidden=64)).eval()
    >>> model([torch.tensor([5, 6, 7]), torch.tensor([8, 9])]).shape
    torch.Size([2, 2])
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = TextEncoder(config)
        self.pooling = make_pooling(config.pooling, config.d_model)
        self.transform = linear(config.d_model, config.d_model)
        self.classifier = linear(config.d_model, config.classes)
        self.activation = choose("head_activation", config.head_activation, ACTIVATIONS)

    def forward(self, inputs: Inputs, mask: Tensor | None = None, *, segments: Inputs | None = None) -> Tensor:
        """Logits (B, classes)."""
        rows = prepare_inputs(inputs, mask)
        x = rows.pool(self.pooling, self.encoder.hidden(rows, segments))
        x = self.activation(self.transform(x))
        return self.classifier(F.dropout(x, self.config.dropout, self.training))


class TokenClassifier(nn.Module):
    """Token ids to the logits of a class for each token, (B, N) to (B, N, classes).

    >>> import torch
    >>> from regard.models.text import TextConfig, TokenClassifier
    >>> config = TextConfig(vocabulary=100, d_model=32, layers=2, heads=4, d_hidden=64, classes=5)
    >>> model = TokenClassifier(config).eval()
    >>> model(torch.tensor([[5, 6, 7]])).shape
    torch.Size([1, 3, 5])
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = TextEncoder(config)
        self.classifier = linear(config.d_model, config.classes)

    def forward(
        self, inputs: Inputs, mask: Tensor | None = None, *, segments: Inputs | None = None
    ) -> Tensor | Packed | list[Tensor]:
        """Logits (B, N, classes); of packed inputs packed, of a list a list."""
        rows = prepare_inputs(inputs, mask).to_local()
        x = self.encoder.hidden(rows, segments)
        return rows.to_input_form(self.classifier(F.dropout(x, self.config.dropout, self.training)))


class QuestionAnswering(nn.Module):
    """Ids of a question and a context to the logits of where the answer begins and ends, (B, N) to (B, N, 2).

    >>> import torch
    >>> from regard.models.text import QuestionAnswering, TextConfig
    >>> model = QuestionAnswering(TextConfig(vocabulary=100, d_model=32, layers=2, heads=4, d_hidden=64)).eval()
    >>> begin, end = model(torch.tensor([[5, 6, 7]])).unbind(-1)
    >>> begin.shape
    torch.Size([1, 3])
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = TextEncoder(config)
        self.ends = linear(config.d_model, 2)

    def forward(
        self, inputs: Inputs, mask: Tensor | None = None, *, segments: Inputs | None = None
    ) -> Tensor | Packed | list[Tensor]:
        """Logits (B, N, 2); of packed inputs packed, of a list a list. BERT's segments are 0 for the question."""
        rows = prepare_inputs(inputs, mask)
        return rows.to_input_form(self.ends(self.encoder.hidden(rows, segments)))


class SentenceEmbedder(nn.Module):
    """Token ids to one unit vector for each sequence, (B, N) to (B, d_model): pooled hidden states.

    `embed` takes strings where there is a `tokenizer`, one of the library of that name; `regard.load` brings it along.

    >>> import torch
    >>> from regard.models.text import SentenceEmbedder, TextConfig
    >>> config = TextConfig(vocabulary=100, d_model=32, layers=2, heads=4, d_hidden=64, pooling="mean")
    >>> SentenceEmbedder(config).eval()([torch.tensor([5, 6, 7]), torch.tensor([8, 9])]).shape
    torch.Size([2, 32])
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = TextEncoder(config)
        self.pooling = make_pooling(config.pooling, config.d_model)
        self.tokenizer: Any = None

    def forward(self, inputs: Inputs, mask: Tensor | None = None, *, segments: Inputs | None = None) -> Tensor:
        """Unit vectors (B, d_model)."""
        rows = prepare_inputs(inputs, mask)
        pooled = rows.pool(self.pooling, self.encoder.hidden(rows, segments))
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
        vectors = table.new_empty(len(texts), self.config.d_model)
        ids = [torch.tensor(found.ids, device=table.device) for found in self.tokenizer.encode_batch(list(texts))]
        for rows in batches_by_length([len(row) for row in ids], tokens):
            vectors[rows] = self([ids[row] for row in rows])
        return vectors


def batches_by_length(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Numbers of sequences in order of their length, together at most `tokens` long, one at least.

    >>> from regard.models.text import batches_by_length
    >>> list(batches_by_length([3, 9, 2, 4], tokens=9))
    [[2, 0, 3], [1]]
    """
    rows: list[int] = []
    total = 0
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if rows and total + lengths[row] > tokens:
            yield rows
            rows, total = [], 0
        rows.append(row)
        total += lengths[row]
    if rows:
        yield rows


def _segments_like(segments: Inputs, rows: ModelInputs) -> Tensor:
    """Segments, which must have the form of the ids, for the tokens that are here."""
    found = prepare_inputs(segments)
    values = rows.shard_like(found.values)
    if rows.packed is not None and found.packed is not None:
        ours, theirs = rows.packed.lengths, found.packed.lengths
    else:
        ours, theirs = tuple(rows.values.shape), tuple(values.shape)
    if ours != theirs:
        raise ValueError(f"segments must have the form of the ids, {ours}, but have {theirs}")
    return values


def make_pooling(name: str, d_model: int) -> nn.Module:
    """A pooling by its name in a configuration."""
    return choose("pooling", name, POOLINGS)(d_model)
