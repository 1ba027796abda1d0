"""Encoder-decoders: the original Transformer, Marian, BART, T5 and others, selected by a configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from regard.attention import OBSERVERS, Attention
from regard.engines.packed_linear import project
from regard.masks import causal
from regard.models.components import ARRANGEMENTS, choose, embed_tokens, make_embedding, norm_factory
from regard.models.config_fields import computed_field, optional_count, same_as, token
from regard.models.decoder_inputs import DecoderInputs, pad_sources, prepare_decoder_inputs
from regard.models.inputs import Inputs, prepare_inputs
from regard.models.position_embeddings import POSITIONS
from regard.nn import (
    ACTIVATIONS,
    Block,
    Decoder,
    Encoder,
    FeedForward,
    GatedFeedForward,
    LayerContext,
    LogitsProcessor,
    MultiHeadAttention,
    Packed,
    RelativeBias,
    key_mask,
    linear,
)
from regard.nn.dropout import dropout
from regard.nn.generate import GenerationState, Greedy, Strategy, generate
from regard.nn.loss import token_loss
from regard.scores import Dot

S = TypeVar("S", bound=Encoder)


@dataclass(frozen=True)
class TransformerConfig:
    """Configuration of an encoder-decoder. The defaults are the original Transformer's, but pre-norm.

    Marian has position "halves", arrangement "post", activation "silu" and `logits_bias`. T5 has position "relative",
    norm "rms", no `bias`, scale 1, embedding_scale 1, and output_scale d_model ** -0.5 (1.0), or `gated` with
    activation "gelu_tanh" and an untied output (1.1).

    target_vocabulary: None means that source and target share vocabulary and embedding.
    decoder_layers: number of decoder layers, `layers` by default. d_head: d_model / heads by default.
    position: "sinusoidal", "halves" (sines first, then cosines), "fairseq" (also with slightly different frequencies),
        "learned" with `positions` rows, or "relative": one table of `buckets` distances up to `max_distance` for all
        encoder layers, another one for all decoder layers. first_position: row of the first token (2 in BART).
    arrangement: "pre" or "post". norm: "layer" or "rms". scale: of the scores, 1 / sqrt(d_head) by default.
    embedding_norm: whether to normalise the sums of embeddings and positions (BART).
    embedding_scale: factor of token embeddings, sqrt(d_model) by default. tied: use the target embedding for logits.
    output_scale: factor of the hidden states before the logits. logits_bias: whether to add a bias to the logits.
    attention_dropout: dropout of attention weights, `dropout` by default.
    window: encoder tokens attend to this many tokens on each side and to the first token, which attends to all
        (Longformer), so that a source costs O(K). 0 means no limit.
    start: the token before the first target token. prompt: tokens that follow it in every generated target, such as
        the language. stop: the token that ends a target.
    suppress_tokens: tokens that are never generated.

    >>> from regard.models.translation import TransformerConfig
    >>> TransformerConfig(vocabulary=100, d_model=32, layers=2, heads=4, d_hidden=64).position
    'sinusoidal'
    """

    vocabulary: int
    d_model: int
    layers: int
    heads: int
    d_hidden: int
    target_vocabulary: int | None = None
    decoder_layers: int | None = same_as("layers")
    d_head: int | None = computed_field(lambda config: config.d_model // config.heads)
    position: str = "sinusoidal"
    positions: int = 512
    first_position: int = optional_count(0)
    buckets: int = 32
    max_distance: int = 128
    arrangement: str = "pre"
    norm: str = "layer"
    eps: float = 1e-5
    activation: str = "relu"
    gated: bool = False
    bias: bool = True
    scale: float | None = None
    embedding_norm: bool = False
    embedding_scale: float | None = computed_field(lambda config: math.sqrt(config.d_model))
    output_scale: float = 1.0
    tied: bool = True
    logits_bias: bool = False
    start: int = token(1)
    prompt: tuple[int, ...] = token(())
    stop: int = token(2)
    suppress_tokens: tuple[int, ...] = token(())
    dropout: float = 0.0
    attention_dropout: float | None = same_as("dropout")
    window: int = optional_count(0)


class Transformer(nn.Module):
    """Next-token logits (B, N, vocabulary) for targets, given sources.

    Sources and targets are ids (B, K) and (B, N), both packed, or both lists of ids; packed batches and lists need no
    padding. Logits have the form of the target. Targets start with `config.start`; padding at their end has no effect
    on other tokens. Embeddings start from N(0, 1 / embedding_scale^2), so that the first layer's input has variance 1.

    >>> import torch
    >>> from regard.models.translation import Transformer, TransformerConfig
    >>> model = Transformer(TransformerConfig(vocabulary=100, d_model=32, layers=2, heads=4, d_hidden=64)).eval()
    >>> model(torch.tensor([[5, 6, 7]]), torch.tensor([[1, 8]])).shape
    torch.Size([1, 2, 100])
    >>> sources = [torch.tensor([5, 6, 7]), torch.tensor([9])]
    >>> [len(logits) for logits in model(sources, [torch.tensor([1, 8]), torch.tensor([1])])]
    [2, 1]
    >>> len(model.generate(sources, max_new_tokens=5))
    2
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        d_model, self.scale = config.d_model, config.embedding_scale or math.sqrt(config.d_model)
        targets = config.target_vocabulary or config.vocabulary
        self.embedding = make_embedding(config.vocabulary, d_model, std=1 / self.scale)
        separate = config.target_vocabulary is not None
        self.target_embedding = make_embedding(targets, d_model, std=1 / self.scale) if separate else None
        position = choose("position", config.position, POSITIONS)
        self.position, self.target_position = (
            position(config.positions, d_model, config.first_position) for _ in ("source", "target")
        )
        norm = norm_factory(config.norm, config.eps)
        self.embedding_norm = norm(d_model) if config.embedding_norm else None
        self.target_embedding_norm = norm(d_model) if config.embedding_norm else None
        self.encoder = _build_stack(config, Encoder, config.layers)
        self.decoder = _build_stack(config, Decoder, config.decoder_layers or config.layers)
        self.head = None if config.tied else linear(d_model, targets, bias=False)
        self.logits_bias = nn.Parameter(torch.zeros(targets)) if config.logits_bias else None

    def forward(
        self, source: Inputs, target: Inputs, source_mask: Tensor | None = None
    ) -> Tensor | Packed | list[Tensor]:
        """Return logits (B, N, vocabulary), in the form of the target. source_mask (B, K): True for real tokens."""
        return self.decode(target, self.encode(source, source_mask), source_mask)

    def encode(self, source: Inputs, source_mask: Tensor | None = None) -> Tensor | Packed | list[Tensor]:
        """Return hidden states (B, K, d_model) of the source, in its form."""
        rows = prepare_inputs(source, source_mask)
        x = self._embed_source(rows.values, rows.positions)
        context = rows.local_context(self.config.window) if self.config.window else rows.context
        return rows.to_input_form(self.encoder(x, context=context))

    def decode(
        self, target: Inputs, encoded: Inputs, source_mask: Tensor | None = None
    ) -> Tensor | Packed | list[Tensor]:
        """Return logits of a target, given the output of `encode`."""
        inputs = prepare_decoder_inputs(target, encoded, source_mask)
        return inputs.to_input_form(self.logits(self._decode_hidden(inputs)))

    @property
    def output_layer(self) -> nn.Embedding | nn.Linear:
        """The module whose weight computes the logits: an embedding if tied."""
        return self.head or self.target_embedding or self.embedding

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states of the decoder (..., d_model) to logits (..., vocabulary)."""
        return project(self._scale_output(hidden), self.output_layer.weight, self.logits_bias)

    def loss(self, source: Packed, target: Packed, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
        """Sum of the cross entropies of the labels (N,), the next token of each target token."""
        hidden = self._scale_output(self._decode_hidden(prepare_decoder_inputs(target, self.encode(source))))
        weight = self.output_layer.weight
        return token_loss(hidden.flatten(0, -2), weight, labels, bias=self.logits_bias, smoothing=smoothing)

    def _decode_hidden(self, inputs: DecoderInputs) -> Tensor:
        x = self._embed_target(inputs.ids, inputs.positions)
        return self.decoder(x, inputs.encoded, context=inputs.context, cross_context=inputs.cross_context)

    def _scale_output(self, hidden: Tensor) -> Tensor:
        return hidden * self.config.output_scale if self.config.output_scale != 1 else hidden

    def generate(
        self,
        source: Inputs,
        source_mask: Tensor | None = None,
        *,
        max_new_tokens: int = 64,
        strategy: Strategy | None = None,
        prompt: Sequence[int] | None = None,
        processor: LogitsProcessor | None = None,
    ) -> list[Tensor]:
        """Generate at most `max_new_tokens` target tokens for each source, without start, prompt and stop.

        Greedy by default. Keys and values of a source are computed once and shared by its beams.
        prompt: tokens after the start of every target, such as the language of a translation; `config.prompt` by
            default.
        processor: changes the logits in every step, in addition to `config.suppress_tokens`.
        """
        with torch.inference_mode():
            state, first = self.start_generation(source, source_mask)
            if prompt is not None:
                first = self._first_tokens(len(first), prompt, first.device)
            return generate(
                state, first, strategy=strategy or Greedy(), max_new_tokens=max_new_tokens, stop=(self.config.stop,),
                processor=self.logits_processor(processor), forced=first.shape[1] - 1,
            )  # fmt: skip

    def logits_processor(self, processor: LogitsProcessor | None = None) -> LogitsProcessor | None:
        """Return a processor that also keeps `config.suppress_tokens` from being generated."""
        if not self.config.suppress_tokens:
            return processor
        processor, suppressed = processor or LogitsProcessor(), tuple((n,) for n in self.config.suppress_tokens)
        return replace(processor, bad_words=(*processor.bad_words, *suppressed))

    def start_generation(self, source: Inputs, source_mask: Tensor | None = None) -> tuple[GenerationState, Tensor]:
        """Return a state to generate from, and the start and prompt tokens of every source, (B, 1 + prompt)."""
        return self.start_generation_from(self.encode(source, source_mask), source_mask)

    def start_generation_from(
        self, encoded: Inputs, source_mask: Tensor | None = None, to_logits: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[GenerationState, Tensor]:
        """Like `start_generation`, given the output of `encode`.

        to_logits: maps hidden states (R, d_model) to logits (R, vocabulary), by default `logits`; R is a multiple of B.
        """
        encoded, source_mask = pad_sources(encoded, source_mask)
        to_logits = to_logits or self.logits
        cross_context, cache = LayerContext(key_mask(source_mask, encoded)), self.decoder.cache()

        def forward(ids: Tensor, context: LayerContext) -> Tensor:
            assert context.positions is not None
            x = self._embed_target(ids, context.positions)
            source = None if cache.holds_source else encoded
            hidden = self.decoder(x, source, context=context, cross_context=cross_context, cache=cache)
            return to_logits(hidden[:, -1])

        first = self._first_tokens(len(encoded), self.config.prompt, encoded.device)
        return GenerationState(forward, [*cache.self_attention, *cache.cross_attention]), first

    def _first_tokens(self, rows: int, prompt: Sequence[int], device: torch.device) -> Tensor:
        """Return the start token and a prompt, (rows, 1 + prompt)."""
        return torch.tensor([self.config.start, *prompt], device=device).repeat(rows, 1)

    @torch.no_grad()
    def coverage(self, source: Tensor, target: Tensor) -> Tensor:
        """Total cross-attention (K,) of a target (N,) to each token of its source (K,).

        Averaged over heads and layers; it sums to N.
        """
        calls: list[tuple[Attention, Tensor, Tensor, Tensor]] = []
        token = OBSERVERS.set((*OBSERVERS.get(), lambda *call: calls.append(call)))
        try:
            self(source[None], target[None])
        finally:
            OBSERVERS.reset(token)
        cross_attend = calls[
            len(self.encoder.layers) + 1 :: 2
        ]  # a decoder block runs self-attention, then cross-attention
        return torch.stack([attend.weights(q, k)[0].sum(1).mean(0) for attend, q, k, _ in cross_attend]).mean(0)

    def _embed_source(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self._embed(ids, positions, self.embedding, self.position, self.embedding_norm)

    def _embed_target(self, ids: Tensor, positions: Tensor) -> Tensor:
        table = self.target_embedding or self.embedding
        return self._embed(ids, positions, table, self.target_position, self.target_embedding_norm)

    def _embed(
        self, ids: Tensor, positions: Tensor, table: nn.Embedding, position: nn.Module, norm: nn.Module | None
    ) -> Tensor:
        x = embed_tokens(ids, table)
        if self.scale != 1:
            x = x * self.scale
        x = position(x, positions)
        x = x if norm is None else norm(x)
        return dropout(x, self.config.dropout) if self.config.dropout and self.training else x


def _build_stack(config: TransformerConfig, kind: type[S], layers: int) -> S:
    """Build the encoder or decoder that a configuration describes."""
    decoding = issubclass(kind, Decoder)
    norm = norm_factory(config.norm, config.eps)
    arrangement = choose("arrangement", config.arrangement, ARRANGEMENTS)
    activation = choose("activation", config.activation, ACTIVATIONS)
    feedforward = GatedFeedForward if config.gated else FeedForward
    score = Dot(config.scale)
    attention_dropout = config.dropout if config.attention_dropout is None else config.attention_dropout
    self_attend = Attention(score, causal() if decoding else None, dropout=attention_dropout)
    cross_attend = Attention(score, offset=0, dropout=attention_dropout)

    def attention(attend: Attention) -> MultiHeadAttention:
        return MultiHeadAttention(config.d_model, config.heads, d_head=config.d_head, attend=attend, bias=config.bias)

    blocks = [
        Block(
            attention(self_attend),
            feedforward(config.d_model, config.d_hidden, activation=activation, bias=config.bias),
            residual=lambda: arrangement(config.d_model, norm, dropout=config.dropout),
            cross=attention(cross_attend) if decoding else None,
        )
        for _ in range(layers)
    ]
    bias = None
    if config.position == "relative":
        bias = RelativeBias(
            config.heads, buckets=config.buckets, max_distance=config.max_distance, bidirectional=not decoding
        )
    return kind(blocks, norm=None if config.arrangement == "post" else norm(config.d_model), bias=bias)
