"""Bidirectional text encoders (BERT and related models) and models with a head on top of them."""

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
from regard.models.config_fields import optional_count, same_as
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
"""Pooling factories by the names used in configurations, called with d_model."""


@dataclass(frozen=True)
class TextConfig:
    """Configuration of a text encoder. The defaults are BERT's.

    positions: rows of the learned position table. first_position: row of the first token (2 in RoBERTa).
    segments: number of segment types, 0 for none. d_embedding: width of the embeddings, d_model by default (ALBERT).
    distinct: number of layers with distinct weights, all by default; each runs layers / distinct times (ALBERT runs one
        layer twelve times).
    pooling: "first", "mean", "max" or "attention". head_activation: in the head of a sequence classifier.
    unit: whether an embedder normalises its vectors to length 1.
    attention_dropout: dropout of attention weights, `dropout` by default.

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
    first_position: int = optional_count(0)
    segments: int = optional_count(2)
    d_embedding: int | None = same_as("d_model")
    distinct: int | None = same_as("layers")
    arrangement: str = "post"
    norm: str = "layer"
    eps: float = 1e-12
    activation: str = "gelu"
    head_activation: str = "tanh"
    pooling: str = "first"
    unit: bool = True
    classes: int = 2
    dropout: float = 0.1
    attention_dropout: float | None = same_as("dropout")


class TextEncoder(nn.Module):
    """Encode token ids (B, N) to hidden states (B, N, d_model).

    Inputs are ids (B, N) with a (B, N) bool mask, True for real tokens; packed ids; or a list of ids (n,) of different
    lengths. The result has the form of the inputs. `segments` must have the form of the ids.

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
        d_embedding = config.d_embedding or config.d_model
        norm = norm_factory(config.norm, config.eps)
        self.embedding = make_embedding(config.vocabulary, d_embedding)
        self.position = make_embedding(config.positions, d_embedding)
        self.segment = make_embedding(config.segments, d_embedding) if config.segments else None
        self.embedding_norm = norm(d_embedding)
        self.project = None if d_embedding == config.d_model else linear(d_embedding, config.d_model)
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
        """Return hidden states (B, N, d_model), in the form of the inputs."""
        rows = prepare_inputs(inputs, mask).to_local()
        return rows.to_input_form(self.hidden(rows, segments))

    def hidden(self, rows: ModelInputs, segments: Inputs | None = None) -> Tensor:
        """Map prepared ids (B, N) to hidden states (B, N, d_model); used by models with a head."""
        ids, first = rows.values, self.config.first_position
        may_exceed = ids.shape[1] > self.config.positions - first or (rows.context.is_local and ids.numel() > 0)
        if may_exceed and int(rows.positions.max()) >= self.config.positions - first:
            raise ValueError(
                f"the model has {self.config.positions - first} positions, but a sequence has "
                f"{int(rows.positions.max()) + 1} tokens; truncate or split it"
            )
        positions = rows.positions + first if first else rows.positions
        x = embed_tokens(ids, self.embedding) + F.embedding(positions, self.position.weight)
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
    """Predict masked tokens: ids (B, N) to logits (B, N, vocabulary); the output weight is tied to the embedding.

    >>> import torch
    >>> from regard.models.text import MaskedLanguageModel, TextConfig
    >>> model = MaskedLanguageModel(TextConfig(vocabulary=100, d_model=32, layers=2, heads=4, d_hidden=64)).eval()
    >>> model(torch.tensor([[5, 6, 7]])).shape
    torch.Size([1, 3, 100])
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        d_embedding = config.d_embedding or config.d_model
        self.encoder = TextEncoder(config)
        self.transform = linear(config.d_model, d_embedding)
        self.norm = norm_factory(config.norm, config.eps)(d_embedding)
        self.bias = nn.Parameter(torch.zeros(config.vocabulary))
        self.activation = choose("activation", config.activation, ACTIVATIONS)

    def forward(
        self, inputs: Inputs, mask: Tensor | None = None, *, segments: Inputs | None = None
    ) -> Tensor | Packed | list[Tensor]:
        """Return logits (B, N, vocabulary), in the form of the inputs."""
        rows = prepare_inputs(inputs, mask).to_local()
        return rows.to_input_form(self.logits(self.encoder.hidden(rows, segments)))

    @property
    def output_layer(self) -> nn.Embedding:
        """The module whose weight computes the logits."""
        return self.encoder.embedding

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states of the encoder (..., d_model) to logits (..., vocabulary)."""
        x = self.norm(self.activation(self.transform(hidden)))
        return project(x, self.output_layer.weight, self.bias)


class SequenceClassifier(nn.Module):
    """Classify sequences: ids (B, N) to logits (B, classes).

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
        """Return logits (B, classes)."""
        rows = prepare_inputs(inputs, mask)
        x = rows.pool(self.pooling, self.encoder.hidden(rows, segments))
        x = self.activation(self.transform(x))
        return self.classifier(F.dropout(x, self.config.dropout, self.training))


class TokenClassifier(nn.Module):
    """Classify tokens: ids (B, N) to logits (B, N, classes).

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
        """Return logits (B, N, classes), in the form of the inputs."""
        rows = prepare_inputs(inputs, mask).to_local()
        x = self.encoder.hidden(rows, segments)
        return rows.to_input_form(self.classifier(F.dropout(x, self.config.dropout, self.training)))


class QuestionAnswering(nn.Module):
    """Extractive question answering: ids (B, N) to logits (B, N, 2) of the start and end of the answer.

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
        """Return logits (B, N, 2), in the form of the inputs. segments: 0 for the question, 1 for the context."""
        rows = prepare_inputs(inputs, mask)
        return rows.to_input_form(self.ends(self.encoder.hidden(rows, segments)))


class SentenceEmbedder(nn.Module):
    """Embed sequences: ids (B, N) to pooled hidden states (B, d_model), by default of unit length.

    `embed` takes strings and needs a `tokenizer` (of the `tokenizers` library), which `regard.load` sets.

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
        """Return vectors (B, d_model)."""
        rows = prepare_inputs(inputs, mask)
        pooled = rows.pool(self.pooling, self.encoder.hidden(rows, segments))
        return F.normalize(pooled, dim=-1) if self.config.unit else pooled

    @torch.inference_mode()
    def embed(self, texts: Sequence[str], *, tokens: int = 2048) -> Tensor:
        """Embed strings as (len(texts), d_model), in batches of at most `tokens` tokens sorted by length."""
        if self.tokenizer is None:
            raise ValueError(
                "embed needs a tokenizer: load the model from a folder with tokenizer.json, or call it with ids"
            )
        if isinstance(texts, str):
            raise TypeError("texts must be a list of strings, got one string; try [text]")
        table = self.encoder.embedding.weight
        vectors = table.new_empty(len(texts), self.config.d_model)
        ids = [torch.tensor(encoding.ids, device=table.device) for encoding in self.tokenizer.encode_batch(list(texts))]
        for rows in batches_by_length([len(row) for row in ids], tokens):
            vectors[rows] = self([ids[row] for row in rows])
        return vectors


def batches_by_length(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Group indices of sequences, sorted by length, into batches of at most `tokens` tokens and at least one sequence.

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
    """Return the (local) segments after checking that they have the form of the ids."""
    prepared = prepare_inputs(segments)
    values = rows.shard_like(prepared.values)
    if rows.packed is not None and prepared.packed is not None:
        expected, given = rows.packed.lengths, prepared.packed.lengths
    else:
        expected, given = tuple(rows.values.shape), tuple(values.shape)
    if expected != given:
        raise ValueError(f"segments must have the form of the ids, {expected}, got {given}")
    return values


def make_pooling(name: str, d_model: int) -> nn.Module:
    """Build a pooling by its name in a configuration."""
    return choose("pooling", name, POOLINGS)(d_model)
