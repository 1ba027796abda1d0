"""Whisper: an encoder-decoder whose source is sound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.models.parts import Inputs, rows_of
from regard.models.places import Learned
from regard.models.speech import Front
from regard.models.translation import Transformer, TransformerConfig
from regard.nn import Packed
from regard.nn.dropout import dropout
from regard.nn.generate import Greedy, State, Strategy, generate
from regard.nn.shared import Shared
from regard.positions import sinusoidal


@dataclass(frozen=True)
class WhisperConfig(TransformerConfig):
    """A Transformer that listens: what `TransformerConfig` says, and of the sound:

    features: mel bands of a frame. frames: that the encoder knows places for, after the convolutions halved them.
    prompt: tokens after `start` that a target begins with, such as language and task.
    never_first: tokens that no target goes on with after that, beside those of `never`.

    >>> from regard.models.whisper import WhisperConfig
    >>> WhisperConfig(vocabulary=100, width=32, layers=2, heads=4, hidden=64).position
    'learned'
    """

    position: str = "learned"
    positions: int = 448
    activation: str = "gelu"
    embedding_scale: float | None = 1.0
    features: int = 80
    frames: int = 1500
    prompt: tuple[int, ...] = ()
    never_first: tuple[int, ...] = ()


class Whisper(Transformer):
    """Features and target ids to the logits of the token that follows each: (B, N, features), (B, M) to (B, M, words).

    Sources are what `regard.models.sound.whisper_features` gives, at most 2 * config.frames frames; the original is
    always given 30 seconds. source_mask (B, N): True for real frames, which come first.

    >>> import torch
    >>> from regard.models.whisper import Whisper, WhisperConfig
    >>> model = Whisper(WhisperConfig(vocabulary=100, width=32, layers=2, heads=4, hidden=64, frames=50)).eval()
    >>> model(torch.randn(1, 100, 80), torch.tensor([[1, 8]])).shape
    torch.Size([1, 2, 100])
    >>> len(model.generate(torch.randn(2, 100, 80), limit=5))
    2
    """

    config: WhisperConfig

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__(config)
        self.front = Front(config.features, config.width, (1, 2))
        self.position = Learned(config.frames, config.width)
        with torch.no_grad():
            table = sinusoidal(config.frames, config.width)
            self.position.embedding.weight.copy_(torch.cat((table[:, 0::2], table[:, 1::2]), -1))
        self.position.embedding.weight.requires_grad_(False)

    def encode(self, source: Inputs, source_mask: Tensor | None = None) -> Tensor | Packed | list[Tensor]:
        """Hidden states (B, (N + 1) // 2, width) of the sound; of packed sources packed, of a list a list."""
        rows = rows_of(*self.front(source, source_mask))
        x = self.position(rows.values, rows.positions)
        x = dropout(x, self.config.dropout) if self.config.dropout and self.training else x
        return rows.back(self.encoder(x, shared=rows.shared))

    def decode(
        self, target: Inputs, encoded: Inputs, source_mask: Tensor | None = None
    ) -> Tensor | Packed | list[Tensor]:
        return super().decode(target, encoded, None if source_mask is None else source_mask[:, ::2])

    def generate(
        self,
        source: Inputs,
        source_mask: Tensor | None = None,
        *,
        limit: int = 64,
        strategy: Strategy | None = None,
        prompt: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """The target of each source, at most `limit` tokens, without start, prompt and stop; the prompt of the
        configuration unless told otherwise."""
        with torch.inference_mode():
            state, first = self.begin(source, source_mask)
            asked = self.config.prompt if prompt is None else prompt
            first = torch.cat((first, first.new_tensor([list(asked)] * len(first), dtype=first.dtype)), 1)
            return generate(state, first, strategy=strategy or Greedy(), limit=limit, stop=(self.config.stop,))

    def begin(self, source: Inputs, source_mask: Tensor | None = None) -> tuple[State, Tensor]:
        encoded = self.encode(source, source_mask)
        state, first = self.begin_from(encoded, None if source_mask is None else source_mask[:, ::2])
        later, never = state.forward, torch.tensor(self.config.never_first, dtype=torch.long, device=first.device)

        def forward(ids: Tensor, shared: Shared) -> Tensor:
            state.forward = later
            logits = later(ids, shared)
            return logits.index_fill(-1, never, -math.inf) if len(never) else logits

        state.forward = forward
        return state, first
