"""Encoder-decoders: the classic Transformer, Marian and T5, by the parts that a configuration names."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from regard.attention import WATCHERS, Attention
from regard.engines.packed_linear import project
from regard.masks import causal
from regard.models.pairs import Sides, padded, sides_of
from regard.models.parts import ARRANGEMENTS, Inputs, choose, embedded, embedding, norm_named, rows_of
from regard.models.places import POSITIONS
from regard.nn import (
    ACTIVATIONS,
    Block,
    Decoder,
    Encoder,
    FeedForward,
    GatedFeedForward,
    MultiHeadAttention,
    Packed,
    RelativeBias,
    Shared,
    key_mask,
    linear,
)
from regard.nn.dropout import dropout
from regard.nn.generate import Greedy, State, Strategy, generate
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
    decoder_layers: as many as layers unless told otherwise. head_width: width / heads unless told otherwise.
    position: "sinusoidal", "halves" (sines first, then cosines), "learned", of `positions` rows, or "relative",
        one table of `buckets` distances up to `max_distance` for all layers of the encoder, one for the decoder's.
    arrangement: "pre" or "post". norm: "layer" or "rms". scale: of the scores, 1 / sqrt(head_width) if none.
    embedding_scale: of the embedded tokens, sqrt(width) if none. tied: logits are products with the target embedding.
    output_scale: of what the logits are computed from. logits_bias: whether a bias is added to the logits.
    attention_dropout: of the weights, dropout unless told otherwise.
    window: how many tokens to each side the encoder sees, beside the first of the source, which sees all and is seen by
        all (Longformer): so a long source costs O(K). 0 is all.
    start: the token before the first target token. stop: the token that ends a target. never: tokens not generated.

    >>> from regard.models.translation import TransformerConfig
    >>> TransformerConfig(vocabulary=100, width=32, layers=2, heads=4, hidden=64).position
    'sinusoidal'
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    hidden: int
    target_vocabulary: int | None = None
    decoder_layers: int | None = None
    head_width: int | None = None
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
    never: tuple[int, ...] = ()
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
    >>> model = Transformer(TransformerConfig(vocabulary=100, width=32, layers=2, heads=4, hidden=64)).eval()
    >>> model(torch.tensor([[5, 6, 7]]), torch.tensor([[1, 8]])).shape
    torch.Size([1, 2, 100])
    >>> sources = [torch.tensor([5, 6, 7]), torch.tensor([9])]
    >>> [len(logits) for logits in model(sources, [torch.tensor([1, 8]), torch.tensor([1])])]
    [2, 1]
    >>> len(model.generate(sources, limit=5))
    2
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        width, self.scale = config.width, config.embedding_scale or math.sqrt(config.width)
        targets = config.target_vocabulary or config.vocabulary
        self.embedding = embedding(config.vocabulary, width, std=1 / self.scale)
        apart = config.target_vocabulary is not None
        self.target_embedding = embedding(targets, width, std=1 / self.scale) if apart else None
        position = choose("position", config.position, POSITIONS)
        self.position, self.target_position = position(config.positions, width), position(config.positions, width)
        self.encoder = _stack(config, Encoder, config.layers)
        self.decoder = _stack(config, Decoder, config.decoder_layers or config.layers)
        self.head = None if config.tied else linear(width, targets, bias=False)
        self.logits_bias = nn.Parameter(torch.zeros(targets)) if config.logits_bias else None

    def forward(
        self, source: Inputs, target: Inputs, source_mask: Tensor | None = None
    ) -> Tensor | Packed | list[Tensor]:
        """Logits (B, N, vocabulary); of packed targets packed, of a list a list. source_mask (B, K): real tokens."""
        return self.decode(target, self.encode(source, source_mask), source_mask)

    def encode(self, source: Inputs, source_mask: Tensor | None = None) -> Tensor | Packed | list[Tensor]:
        """Hidden states (B, K, width) of the source; of packed sources packed, of a list a list."""
        rows = rows_of(source, source_mask)
        x = self._embedded(rows.values, rows.positions, self.embedding, self.position)
        shared = rows.near(self.config.window) if self.config.window else rows.shared
        return rows.back(self.encoder(x, shared=shared))

    def decode(
        self, target: Inputs, encoded: Inputs, source_mask: Tensor | None = None
    ) -> Tensor | Packed | list[Tensor]:
        """Logits of a target, by what `encode` gave of its source."""
        sides = sides_of(target, encoded, source_mask)
        return sides.back(self.logits(self._decoded(sides)))

    @property
    def output_layer(self) -> nn.Embedding | nn.Linear:
        """The module whose weight gives the logits: an embedding, where that is tied."""
        return self.head or self.target_embedding or self.embedding

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states of the decoder (..., width) to logits (..., vocabulary)."""
        return project(self._scaled(hidden), self.output_layer.weight, self.logits_bias)

    def loss(self, source: Packed, target: Packed, after: Tensor, *, smoothing: float = 0.0) -> Tensor:
        """The sum of the cross entropies of the tokens `after` each of the target (N,), by `token_loss`."""
        hidden = self._scaled(self._decoded(sides_of(target, self.encode(source))))
        weight = self.output_layer.weight
        return token_loss(hidden.flatten(0, -2), weight, after, bias=self.logits_bias, smoothing=smoothing)

    def _decoded(self, sides: Sides) -> Tensor:
        x = self._embedded(sides.ids, sides.positions, self.target_embedding or self.embedding, self.target_position)
        return self.decoder(x, sides.encoded, shared=sides.shared, across=sides.across)

    def _scaled(self, hidden: Tensor) -> Tensor:
        return hidden * self.config.output_scale if self.config.output_scale != 1 else hidden

    def generate(
        self, source: Inputs, source_mask: Tensor | None = None, *, limit: int = 64, strategy: Strategy | None = None
    ) -> list[Tensor]:
        """The target of each source, at most `limit` tokens, without start and stop; greedy unless told otherwise.

        Keys and values of the source are computed once; the beams of a source share them.
        """
        with torch.inference_mode():
            state, first = self.begin(source, source_mask)
            return generate(state, first, strategy=strategy or Greedy(), limit=limit, stop=(self.config.stop,))

    def begin(self, source: Inputs, source_mask: Tensor | None = None) -> tuple[State, Tensor]:
        """A state to generate from, and the start token of every source, (B, 1)."""
        return self.begin_from(self.encode(source, source_mask), source_mask)

    def begin_from(
        self, encoded: Inputs, source_mask: Tensor | None = None, say: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[State, Tensor]:
        """The same, by what `encode` gave of the source.

        say: hidden states (R, width) to logits (R, vocabulary), where it is not `logits`; R is a multiple of B.
        """
        encoded, source_mask = padded(encoded, source_mask)
        say = say or self.logits
        across, cache = Shared(key_mask(source_mask, encoded)), self.decoder.cache()
        never = torch.tensor(self.config.never, dtype=torch.long, device=encoded.device)

        def forward(ids: Tensor, shared: Shared) -> Tensor:
            assert shared.positions is not None
            table = self.target_embedding or self.embedding
            x = self._embedded(ids, shared.positions, table, self.target_position)
            source = None if cache.holds_source else encoded
            hidden = self.decoder(x, source, shared=shared, across=across, cache=cache)
            logits = say(hidden[:, -1])
            return logits.index_fill_(-1, never, -math.inf) if len(never) else logits

        first = torch.full((len(encoded), 1), self.config.start, device=encoded.device)
        return State(forward, [*cache.own, *cache.source]), first

    @torch.no_grad()
    def coverage(self, source: Tensor, target: Tensor) -> Tensor:
        """How much a target (N,) looks at each token of its source (K,): the sum of its cross-attention, (K,).

        The mean over heads and layers; it sums to N.
        """
        seen: list[tuple[Attention, Tensor, Tensor]] = []
        token = WATCHERS.set((*WATCHERS.get(), lambda *call: seen.append(call)))
        try:
            self(source[None], target[None])
        finally:
            WATCHERS.reset(token)
        across = seen[len(self.encoder.layers) + 1 :: 2]  # a block looks at the target, then at the source
        return torch.stack([attend.weights(q, k)[0].sum(1).mean(0) for attend, q, k in across]).mean(0)

    def _embedded(self, ids: Tensor, positions: Tensor, table: nn.Embedding, position: nn.Module) -> Tensor:
        x = embedded(ids, table)
        if self.scale != 1:
            x = x * self.scale
        x = position(x, positions)
        return dropout(x, self.config.dropout) if self.config.dropout and self.training else x


def _stack(config: TransformerConfig, kind: type[S], layers: int) -> S:
    """An encoder, or a decoder, of the parts that the configuration names: the one place where they are chosen."""
    decoding = issubclass(kind, Decoder)
    norm = norm_named(config.norm, config.eps)
    arrangement = choose("arrangement", config.arrangement, ARRANGEMENTS)
    activation = choose("activation", config.activation, ACTIVATIONS)
    feedforward = GatedFeedForward if config.gated else FeedForward
    score = Dot(config.scale)
    dropped = config.dropout if config.attention_dropout is None else config.attention_dropout
    own = Attention(score, causal() if decoding else None, dropout=dropped)
    across = Attention(score, offset=0, dropout=dropped)

    def attention(attend: Attention) -> MultiHeadAttention:
        return MultiHeadAttention(config.width, config.heads, d_head=config.head_width, attend=attend, bias=config.bias)

    blocks = [
        Block(
            attention(own),
            feedforward(config.width, config.hidden, activation=activation, bias=config.bias),
            residual=lambda: arrangement(config.width, norm, dropout=config.dropout),
            cross=attention(across) if decoding else None,
        )
        for _ in range(layers)
    ]
    bias = None
    if config.position == "relative":
        bias = RelativeBias(
            config.heads, buckets=config.buckets, max_distance=config.max_distance, bidirectional=not decoding
        )
    return kind(blocks, norm=None if config.arrangement == "post" else norm(config.width), bias=bias)
