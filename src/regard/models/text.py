"""Bidirectional text encoders (BERT and related models) and models with a head on top of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import Attention
from regard.engines.packed_linear import project
from regard.masks import Mask, causal, window
from regard.models.blocks import attention_dropout, build_blocks
from regard.models.components import choose, embed_tokens, make_embedding, norm_factory
from regard.models.config_fields import cycle, optional_count, per_layer, same_as
from regard.models.inputs import Inputs, ModelInputs, prepare_inputs
from regard.nn import (
    ACTIVATIONS,
    AttentionPooling,
    Block,
    Encoder,
    FeedForward,
    First,
    GatedFeedForward,
    LayerContext,
    Max,
    Mean,
    MultiHeadAttention,
    Packed,
    RelativeBias,
    RelativeEmbedding,
    Rotary,
    key_mask,
    linear,
)
from regard.nn.dropout import dropout
from regard.scores import Dot

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

    positions: rows of the learned position table, or the longest sequence. first_position: row of the first token (2 in
        RoBERTa).
    rotary: rotary embedding of q and k instead of a table. layer_rotary: rotary embeddings, cycled over the layers.
    buckets, max_distance: of a relative position bias shared by all layers, as in T5 (MPNet); 0 for none.
    disentangled: `span` of an `nn.RelativeEmbedding` with the same `max_distance`, instead of a table (DeBERTa); 0 for
        none.
    windows: how many tokens on each side a token attends to, cycled over the layers; None is no limit.
    causal: whether tokens attend to earlier tokens only (CLIP).
    segments: number of segment types, 0 for none. d_embedding: width of the embeddings, d_model by default (ALBERT).
    distinct: number of layers with distinct weights, all by default; each runs layers / distinct times (ALBERT runs one
        layer twelve times).
    norm: "layer", "layer_no_bias", "rms", or "unit_rms" (1 + weight). embedding_norm: whether to normalise embeddings.
    first_norm: whether the attention of the first layer normalises its input (not in ModernBERT).
    bias: of all projections, unless `qkv_bias` or `output_bias` are given for those of the attention.
    pooling: "first", "mean", "max" or "attention".
    head_activation, head_bias, head_norm: of the layer before the classifier of sequences; token_head: whether models
        that classify tokens have this layer too. mask_activation: in the head of a masked language model.
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
    rotary: Rotary | None = None
    layer_rotary: tuple[Rotary | None, ...] = per_layer(())
    buckets: int = optional_count(0)
    max_distance: int = 128
    disentangled: int = optional_count(0)
    windows: tuple[int | None, ...] = per_layer(())
    causal: bool = False
    segments: int = optional_count(2)
    d_embedding: int | None = same_as("d_model")
    distinct: int | None = same_as("layers")
    arrangement: str = "post"
    norm: str = "layer"
    eps: float = 1e-12
    embedding_norm: bool = True
    first_norm: bool = True
    activation: str = "gelu"
    gated: bool = False
    bias: bool = True
    qkv_bias: bool | None = same_as("bias")
    output_bias: bool | None = same_as("bias")
    mask_activation: str | None = same_as("activation")
    head_activation: str = "tanh"
    head_bias: bool = True
    head_norm: bool = False
    token_head: bool = False
    pooling: str = "first"
    unit: bool = True
    classes: int = 2
    dropout: float = 0.1
    attention_dropout: float | None = same_as("dropout")

    @property
    def rotaries(self) -> tuple[Rotary | None, ...]:
        """The rotary embedding of every layer."""
        return cycle(self.layer_rotary or (self.rotary,), self.layers)


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
        learned_positions = config.rotary is None and not config.layer_rotary and not config.disentangled
        self.position = make_embedding(config.positions, d_embedding) if learned_positions else None
        self.segment = make_embedding(config.segments, d_embedding) if config.segments else None
        self.embedding_norm = norm(d_embedding) if config.embedding_norm else None
        self.project = None if d_embedding == config.d_model else linear(d_embedding, config.d_model)
        distinct = config.distinct or config.layers
        if config.layers % distinct:
            raise ValueError(f"layers = {config.layers} must be a multiple of distinct = {distinct}")
        self.stack = Encoder(
            _build_blocks(config, distinct, norm),
            norm=None if config.arrangement == "post" else norm(config.d_model),
            bias=RelativeBias(config.heads, buckets=config.buckets, max_distance=config.max_distance)
            if config.buckets else None,
            relative=RelativeEmbedding(
                config.d_model, span=config.disentangled, max_distance=config.max_distance, norm=norm
            )
            if config.disentangled
            else None,
            repeat=config.layers // distinct,
        )  # fmt: skip

    def forward(
        self, inputs: Inputs, mask: Tensor | None = None, *, segments: Inputs | None = None
    ) -> Tensor | Packed | list[Tensor]:
        """Return hidden states (B, N, d_model), in the form of the inputs."""
        rows = prepare_inputs(inputs, mask).to_local()
        return rows.to_input_form(self.hidden(rows, segments))

    def hidden(self, rows: ModelInputs, segments: Inputs | None = None) -> Tensor:
        """Map prepared ids (B, N) to hidden states (B, N, d_model); used by models with a head."""
        x = embed_tokens(rows.values, self.embedding)
        if self.position is not None:
            x = x + F.embedding(self._table_rows(rows), self.position.weight)
        if self.segment is not None:
            if segments is None:
                x = x + self.segment.weight[0]
            else:
                x = x + F.embedding(_segments_like(segments, rows), self.segment.weight)
        x = x if self.embedding_norm is None else self.embedding_norm(x)
        if self.config.dropout and self.training:
            x = dropout(x, self.config.dropout)
        x = x if self.project is None else self.project(x)
        if self.config.disentangled and rows.packed is not None:  # its bias would grow with the square of all tokens
            padded, mask = rows.packed.with_values(x.flatten(0, 1)).padded()
            return self.stack(padded, context=LayerContext(key_mask(mask, padded)))[mask].view(x.shape)
        return self.stack(x, context=rows.context)

    def _table_rows(self, rows: ModelInputs) -> Tensor:
        """Return the rows of the position table for prepared ids (B, N)."""
        ids, first = rows.values, self.config.first_position
        may_exceed = ids.shape[1] > self.config.positions - first or (rows.context.is_local and ids.numel() > 0)
        if may_exceed and int(rows.positions.max()) >= self.config.positions - first:
            raise ValueError(
                f"the model has {self.config.positions - first} positions, but a sequence has "
                f"{int(rows.positions.max()) + 1} tokens; truncate or split it"
            )
        return rows.positions + first if first else rows.positions


def _build_blocks(config: TextConfig, count: int, norm: Callable[[int], nn.Module]) -> list[Block]:
    if config.layer_rotary and config.rotary is not None:
        raise ValueError("rotary and layer_rotary are alternatives; pass one of them")
    sizes, rotaries = config.windows or (None,), config.layer_rotary or (config.rotary,)  # cycled over the layers
    # Layers with the same window share one description and its plans.
    # Disentangled attention sums three products.
    score = Dot((3 * config.d_model // config.heads) ** -0.5 if config.disentangled else None)
    attends = {
        size: Attention(score, _build_mask(config, size), dropout=attention_dropout(config)) for size in {*sizes}
    }
    activation = choose("activation", config.activation, ACTIVATIONS)
    feedforward = GatedFeedForward if config.gated else FeedForward

    def attention(n: int) -> MultiHeadAttention:
        return MultiHeadAttention(
            config.d_model,
            config.heads,
            attend=attends[sizes[n % len(sizes)]],
            rotary=rotaries[n % len(rotaries)],
            bias=config.bias if config.qkv_bias is None else config.qkv_bias,
            output_bias=config.bias if config.output_bias is None else config.output_bias,
        )

    blocks = build_blocks(
        config, count, norm, attention=attention,
        feedforward=lambda: feedforward(config.d_model, config.d_hidden, activation=activation, bias=config.bias),
    )  # fmt: skip
    if not config.first_norm:
        if config.arrangement != "pre":
            raise ValueError(f'first_norm=False needs arrangement "pre", got {config.arrangement!r}')
        for block in blocks[:1]:
            block.attention_residual.norm = nn.Identity()
    return blocks


def _build_mask(config: TextConfig, size: int | None) -> Mask | None:
    if size is None:
        return causal() if config.causal else None
    return window(size, 0 if config.causal else size)


class _HeadModel(nn.Module):
    """Base class of classifiers: the encoder, and a layer before the classifier unless `head` is false."""

    def __init__(self, config: TextConfig, *, head: bool) -> None:
        super().__init__()
        self.config = config
        self.encoder = TextEncoder(config)
        self.transform = linear(config.d_model, config.d_model, bias=config.head_bias) if head else None
        norm = norm_factory(config.norm, config.eps)
        self.norm = norm(config.d_model) if head and config.head_norm else None
        self.activation = choose("head_activation", config.head_activation, ACTIVATIONS)

    def head(self, x: Tensor) -> Tensor:
        """Map hidden states (..., d_model) to the input of the classifier."""
        if self.transform is not None:
            x = self.activation(self.transform(x))
        return F.dropout(x if self.norm is None else self.norm(x), self.config.dropout, self.training)


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
        self.transform = linear(config.d_model, d_embedding, bias=config.head_bias)
        self.norm = norm_factory(config.norm, config.eps)(d_embedding)
        self.bias = nn.Parameter(torch.zeros(config.vocabulary))
        self.activation = choose("mask_activation", config.mask_activation or config.activation, ACTIVATIONS)

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


class SequenceClassifier(_HeadModel):
    """Classify sequences: ids (B, N) to logits (B, classes).

    >>> import torch
    >>> from regard.models.text import SequenceClassifier, TextConfig
    >>> model = SequenceClassifier(TextConfig(vocabulary=100, d_model=32, layers=2, heads=4, d_hidden=64)).eval()
    >>> model([torch.tensor([5, 6, 7]), torch.tensor([8, 9])]).shape
    torch.Size([2, 2])
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__(config, head=True)
        self.pooling = make_pooling(config.pooling, config.d_model)
        self.classifier = linear(config.d_model, config.classes)

    def forward(self, inputs: Inputs, mask: Tensor | None = None, *, segments: Inputs | None = None) -> Tensor:
        """Return logits (B, classes)."""
        rows = prepare_inputs(inputs, mask)
        return self.classifier(self.head(rows.pool(self.pooling, self.encoder.hidden(rows, segments))))


class TokenClassifier(_HeadModel):
    """Classify tokens: ids (B, N) to logits (B, N, classes).

    >>> import torch
    >>> from regard.models.text import TextConfig, TokenClassifier
    >>> config = TextConfig(vocabulary=100, d_model=32, layers=2, heads=4, d_hidden=64, classes=5)
    >>> model = TokenClassifier(config).eval()
    >>> model(torch.tensor([[5, 6, 7]])).shape
    torch.Size([1, 3, 5])
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__(config, head=config.token_head)
        self.classifier = linear(config.d_model, config.classes)

    def forward(
        self, inputs: Inputs, mask: Tensor | None = None, *, segments: Inputs | None = None
    ) -> Tensor | Packed | list[Tensor]:
        """Return logits (B, N, classes), in the form of the inputs."""
        rows = prepare_inputs(inputs, mask).to_local()
        return rows.to_input_form(self.classifier(self.head(self.encoder.hidden(rows, segments))))


class QuestionAnswering(_HeadModel):
    """Extractive question answering: ids (B, N) to logits (B, N, 2) of the start and end of the answer.

    >>> import torch
    >>> from regard.models.text import QuestionAnswering, TextConfig
    >>> model = QuestionAnswering(TextConfig(vocabulary=100, d_model=32, layers=2, heads=4, d_hidden=64)).eval()
    >>> begin, end = model(torch.tensor([[5, 6, 7]])).unbind(-1)
    >>> begin.shape
    torch.Size([1, 3])
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__(config, head=config.token_head)
        self.ends = linear(config.d_model, 2)

    def forward(
        self, inputs: Inputs, mask: Tensor | None = None, *, segments: Inputs | None = None
    ) -> Tensor | Packed | list[Tensor]:
        """Return logits (B, N, 2), in the form of the inputs. segments: 0 for the question, 1 for the context."""
        rows = prepare_inputs(inputs, mask)
        return rows.to_input_form(self.ends(self.head(self.encoder.hidden(rows, segments))))


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
