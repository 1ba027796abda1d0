"""Encoder-decoders: the classic Transformer, Marian and T5, by the parts that a configuration names."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from regard.attention import OBSERVERS, Attention
from regard.engines.packed_linear import project
from regard.masks import causal
from regard.models.components import ARRANGEMENTS, choose, embed_tokens, make_embedding, norm_factory
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
    """An encoder-decoder. The defaults are the classic Transformer's, with norms before rather than after.

    Marian has position "halves", arrangement "post", activation "silu" and `logits_bias`. T5 has position "relative",
    norm "rms", no `bias`, scale 1, embedding_scale 1, and output_scale width ** -0.5 (1.0), or `gated` "gelu_tanh" and
    an output that is not tied (1.1).

    target_vocabulary: none is the source's, and then both sides share one embedding.
    decoder_layers: as many as layers unless told otherwise. d_head: d_model / heads unless told otherwise.
    position: "sinusoidal", "halves" (sines first, then cosines), "learned", of `positions` rows, or "relative",
        one table of `buckets` distances up to `max_distance` for all layers of the encoder, one for the decoder's.
    arrangement: "pre" or "post". norm: "layer" or "rms". scale: of the scores, 1 / sqrt(head_width) if none.
    embedding_scale: of the embedded tokens, sqrt(d_model) if none. tied: logits are products with the target embedding.
    output_scale: of what the logits are computed from. logits_bias: whether a bias is added to the logits.
    attention_dropout: of the weights, dropout unless told otherwise.
    window: how many tokens to each side the encoder sees, beside the first of the source, which sees all and is seen by
        all (Longformer): so a long source costs O(K). 0 is all.
    start: the token before the first target token. stop: the token that ends a target. never: tokens not generated.

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
    decoder_layers: int | None = None
    d_head: int | None = None
    position: str = "sinusoidal"
    positions: int = 512
    buckets: int = 32
    max_distance: int = 128
    arrangement: str = "pre"
    norm: str = "layer"
    eps: float = 1e-5
    activation: str = "relu"
    gated: bool = False
    bias: bool = True
    scale: float | None = None
    embedding_scale: float | None = None
    output_scale: float = 1.0
    tied: bool = True
    logits_bias: bool = False
    start: int = 1
    stop: int = 2
    suppress_tokens: tuple[int, ...] = ()
    dropout: float = 0.0
    attention_dropout: float | None = None
    window: int = 0


class Transformer(nn.Module):
    """Source and target ids to the logits of the token that follows each target token: (B, N, vocabulary).

    Sources and targets are ids (B, K) and (B, N), or both packed, or both lists of ids: then nothing is filler, in
    training either, and logits come in the same form. Targets begin with `config.start`; filler at their end is seen by
    nobody. Embeddings start from N(0, 1 / embedding_scale^2), so that what enters the first layer has variance 1.

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
        apart = config.target_vocabulary is not None
        self.target_embedding = make_embedding(targets, d_model, std=1 / self.scale) if apart else None
        position = choose("position", config.position, POSITIONS)
        self.position, self.target_position = position(config.positions, d_model), position(config.positions, d_model)
        self.encoder = _stack(config, Encoder, config.layers)
        self.decoder = _stack(config, Decoder, config.decoder_layers or config.layers)
        self.head = None if config.tied else linear(d_model, targets, bias=False)
        self.logits_bias = nn.Parameter(torch.zeros(targets)) if config.logits_bias else None

    def forward(
        self, source: Inputs, target: Inputs, source_mask: Tensor | None = None
    ) -> Tensor | Packed | list[Tensor]:
        """Logits (B, N, vocabulary); of packed targets packed, of a list a list. source_mask (B, K): real tokens."""
        return self.decode(target, self.encode(source, source_mask), source_mask)

    def encode(self, source: Inputs, source_mask: Tensor | None = None) -> Tensor | Packed | list[Tensor]:
        """Hidden states (B, K, d_model) of the source; of packed sources packed, of a list a list."""
        rows = prepare_inputs(source, source_mask)
        x = self._embed(rows.values, rows.positions, self.embedding, self.position)
        context = rows.local_context(self.config.window) if self.config.window else rows.context
        return rows.to_input_form(self.encoder(x, context=context))

    def decode(
        self, target: Inputs, encoded: Inputs, source_mask: Tensor | None = None
    ) -> Tensor | Packed | list[Tensor]:
        """Logits of a target, by what `encode` gave of its source."""
        inputs = prepare_decoder_inputs(target, encoded, source_mask)
        return inputs.to_input_form(self.logits(self._decode_hidden(inputs)))

    @property
    def output_layer(self) -> nn.Embedding | nn.Linear:
        """The module whose weight gives the logits: an embedding, where that is tied."""
        return self.head or self.target_embedding or self.embedding

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states of the decoder (..., d_model) to logits (..., vocabulary)."""
        return project(self._scale_output(hidden), self.output_layer.weight, self.logits_bias)

    def loss(self, source: Packed, target: Packed, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
        """The sum of the cross entropies of the tokens `labels` each of the target (N,), by `token_loss`."""
        hidden = self._scale_output(self._decode_hidden(prepare_decoder_inputs(target, self.encode(source))))
        weight = self.output_layer.weight
        return token_loss(hidden.flatten(0, -2), weight, labels, bias=self.logits_bias, smoothing=smoothing)

    def _decode_hidden(self, inputs: DecoderInputs) -> Tensor:
        x = self._embed(inputs.ids, inputs.positions, self.target_embedding or self.embedding, self.target_position)
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
    ) -> list[Tensor]:
        """The target of each source, at most `max_new_tokens` tokens, without start and stop; greedy unless told
        otherwise.

        Keys and values of the source are computed once; the beams of a source share them.
        """
        with torch.inference_mode():
            state, first = self.start_generation(source, source_mask)
            return generate(
                state, first, strategy=strategy or Greedy(), max_new_tokens=max_new_tokens, stop=(self.config.stop,)
            )

    def start_generation(self, source: Inputs, source_mask: Tensor | None = None) -> tuple[GenerationState, Tensor]:
        """A state to generate from, and the start token of every source, (B, 1)."""
        return self.start_generation_from(self.encode(source, source_mask), source_mask)

    def start_generation_from(
        self, encoded: Inputs, source_mask: Tensor | None = None, to_logits: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[GenerationState, Tensor]:
        """The same, by what `encode` gave of the source.

        to_logits: hidden states (R, d_model) to logits (R, vocabulary), where it is not `logits`; R is a multiple of B.
        """
        encoded, source_mask = pad_sources(encoded, source_mask)
        to_logits = to_logits or self.logits
        cross_context, cache = LayerContext(key_mask(source_mask, encoded)), self.decoder.cache()
        suppress_tokens = torch.tensor(self.config.suppress_tokens, dtype=torch.long, device=encoded.device)

        def forward(ids: Tensor, context: LayerContext) -> Tensor:
            assert context.positions is not None
            table = self.target_embedding or self.embedding
            x = self._embed(ids, context.positions, table, self.target_position)
            source = None if cache.holds_source else encoded
            hidden = self.decoder(x, source, context=context, cross_context=cross_context, cache=cache)
            logits = to_logits(hidden[:, -1])
            return logits.index_fill_(-1, suppress_tokens, -math.inf) if len(suppress_tokens) else logits

        first = torch.full((len(encoded), 1), self.config.start, device=encoded.device)
        return GenerationState(forward, [*cache.self_attention, *cache.cross_attention]), first

    @torch.no_grad()
    def coverage(self, source: Tensor, target: Tensor) -> Tensor:
        """How much a target (N,) looks at each token of its source (K,): the sum of its cross-attention, (K,).

        The mean over heads and layers; it sums to N.
        """
        seen: list[tuple[Attention, Tensor, Tensor]] = []
        token = OBSERVERS.set((*OBSERVERS.get(), lambda *call: seen.append(call)))
        try:
            self(source[None], target[None])
        finally:
            OBSERVERS.reset(token)
        across = seen[len(self.encoder.layers) + 1 :: 2]  # a block looks at the target, then at the source
        return torch.stack([attend.weights(q, k)[0].sum(1).mean(0) for attend, q, k in across]).mean(0)

    def _embed(self, ids: Tensor, positions: Tensor, table: nn.Embedding, position: nn.Module) -> Tensor:
        x = embed_tokens(ids, table)
        if self.scale != 1:
            x = x * self.scale
        x = position(x, positions)
        return dropout(x, self.config.dropout) if self.config.dropout and self.training else x


def _stack(config: TransformerConfig, kind: type[S], layers: int) -> S:
    """An encoder, or a decoder, of the parts that the configuration names: the one place where they are chosen."""
    decoding = issubclass(kind, Decoder)
    norm = norm_factory(config.norm, config.eps)
    arrangement = choose("arrangement", config.arrangement, ARRANGEMENTS)
    activation = choose("activation", config.activation, ACTIVATIONS)
    feedforward = GatedFeedForward if config.gated else FeedForward
    score = Dot(config.scale)
    dropped = config.dropout if config.attention_dropout is None else config.attention_dropout
    own = Attention(score, causal() if decoding else None, dropout=dropped)
    across = Attention(score, offset=0, dropout=dropped)

    def attention(attend: Attention) -> MultiHeadAttention:
        return MultiHeadAttention(config.d_model, config.heads, d_head=config.d_head, attend=attend, bias=config.bias)

    blocks = [
        Block(
            attention(own),
            feedforward(config.d_model, config.d_hidden, activation=activation, bias=config.bias),
            residual=lambda: arrangement(config.d_model, norm, dropout=config.dropout),
            cross=attention(across) if decoding else None,
        )
        for _ in range(layers)
    ]
    bias = None
    if config.position == "relative":
        bias = RelativeBias(
            config.heads, buckets=config.buckets, max_distance=config.max_distance, bidirectional=not decoding
        )
    return kind(blocks, norm=None if config.arrangement == "post" else norm(config.d_model), bias=bias)
