"""Speech synthesis: letters to log-mel features, a few frames per decoder step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import Attention
from regard.geometry import format_shape
from regard.masks import causal
from regard.models.components import embed_tokens, make_embedding
from regard.models.config_fields import optional_count
from regard.models.inputs import prepare_inputs
from regard.models.position_embeddings import SinusoidalPositions
from regard.nn import (
    Block,
    Cache,
    Decoder,
    Encoder,
    FeedForward,
    LayerContext,
    MultiHeadAttention,
    PreNorm,
    key_mask,
    linear,
)
from regard.nn.dropout import dropout


@dataclass(frozen=True)
class SpeechSynthesizerConfig:
    """Configuration of a speech synthesizer. vocabulary: number of letters.

    features: features per frame. reduction: frames per decoder step.
    narrow, squeeze: width and dropout of the bottleneck (prenet) for the previous frame, which forces the decoder to
        read the text instead of continuing from the last frame.

    >>> from regard.models.speech_synthesis import SpeechSynthesizerConfig
    >>> SpeechSynthesizerConfig(vocabulary=30, d_model=32, layers=2, heads=4, d_hidden=64).reduction
    4
    """

    vocabulary: int
    d_model: int
    layers: int
    heads: int
    d_hidden: int
    features: int = 80
    reduction: int = 4
    narrow: int = optional_count(64)
    squeeze: float = 0.5
    dropout: float = 0.0


class SpeechOutput(NamedTuple):
    """Predicted frames (B, N, features), logits (B, N / reduction) of the end, and the cross-attention weights of every
    layer (B, H, N / reduction, K), if requested."""

    frames: Tensor
    ends: Tensor
    weights: list[Tensor]


class GeneratedSpeech(NamedTuple):
    """Generated frames (N, features), and the probability of the end at the last step, 0 if cut at `max_frames`."""

    frames: Tensor
    score: float


class SpeechSynthesizer(nn.Module):
    """Predict frames (B, N, features) from letter ids (B, K) and the preceding frames (B, N, features).

    Frame n is predicted from the frames before its group of `reduction` frames; the first group is predicted from
    zeros. N is a multiple of `reduction`.

    >>> import torch
    >>> from regard.models.speech_synthesis import SpeechSynthesizer, SpeechSynthesizerConfig
    >>> config = SpeechSynthesizerConfig(vocabulary=30, d_model=32, layers=2, heads=4, d_hidden=64)
    >>> model = SpeechSynthesizer(config).eval()
    >>> model(torch.tensor([[5, 6, 7]]), torch.randn(1, 12, 80)).shape
    torch.Size([1, 12, 80])
    >>> model.generate([torch.tensor([5, 6, 7])], max_frames=12)[0].frames.shape[1]
    80
    """

    def __init__(self, config: SpeechSynthesizerConfig) -> None:
        super().__init__()
        self.config = config
        d_model = config.d_model
        self.embedding = make_embedding(config.vocabulary, d_model, std=1.0)
        self.position, self.target_position = SinusoidalPositions(d_model), SinusoidalPositions(d_model)
        self.encoder = Encoder([_build_block(config, False) for _ in range(config.layers)], norm=nn.LayerNorm(d_model))
        self.squeeze = nn.ModuleList([linear(config.features, config.narrow), linear(config.narrow, config.narrow)])
        self.widen = linear(config.narrow, d_model)
        self.decoder = Decoder([_build_block(config, True) for _ in range(config.layers)], norm=nn.LayerNorm(d_model))
        self.frames = linear(d_model, config.reduction * config.features)
        self.end = linear(d_model, 1)

    def forward(self, source: Tensor, target: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """Return frames (B, N, features). source_mask (B, K): True for real letters."""
        return self.predict_frames(source, target, source_mask).frames

    def predict_frames(
        self, source: Tensor, target: Tensor, source_mask: Tensor | None = None, *, weights: bool = False
    ) -> SpeechOutput:
        """Return all outputs that the losses need; weights: whether to record cross-attention weights."""
        step, features = self.config.reduction, self.config.features
        if target.dim() != 3 or target.shape[-1] != features or target.shape[1] % step or not target.shape[1]:
            raise ValueError(
                f"target must be (B, N, {features}) with N a multiple of {step}, got {format_shape(target)}"
            )
        last = F.pad(
            target[:, step - 1 : -1 : step], (0, 0, 1, 0)
        )  # the last frame of every group, shifted by one group
        keys = key_mask(source_mask, source)
        cross_context = RecordingContext(keys) if weights else LayerContext(keys)
        frames, ends = self._decode(last, self.encode(source, source_mask), cross_context)
        return SpeechOutput(
            frames.view(target.shape),
            ends,
            cross_context.recorded if isinstance(cross_context, RecordingContext) else [],
        )

    def encode(self, source: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """Return hidden states (B, K, d_model) of the letters."""
        rows = prepare_inputs(source, source_mask)
        x = self.position(embed_tokens(rows.values, self.embedding), rows.positions)
        x = dropout(x, self.config.dropout) if self.config.dropout and self.training else x
        return self.encoder(x, context=rows.context)

    def decode(self, last: Tensor, encoded: Tensor, source_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the frames (B, S, reduction, features) of each step, and the logits (B, S) of it being the last.

        last (B, S, features): the last frame of the previous step, zeros for the first. encoded (B, K, d_model).
        """
        return self._decode(last, encoded, LayerContext(key_mask(source_mask, encoded)))

    def _decode(self, last: Tensor, encoded: Tensor, cross_context: LayerContext) -> tuple[Tensor, Tensor]:
        positions = torch.arange(last.shape[1], device=last.device)
        hidden = self.decoder(self._prenet(last, positions), encoded, cross_context=cross_context)
        frames = self.frames(hidden).unflatten(-1, (self.config.reduction, self.config.features))
        return frames, self.end(hidden)[..., 0]

    def _prenet(self, frames: Tensor, positions: Tensor) -> Tensor:
        x = frames
        for layer in self.squeeze:
            x = F.relu(layer(x))
            x = dropout(x, self.config.squeeze) if self.config.squeeze and self.training else x
        return self.target_position(self.widen(x), positions)

    @torch.no_grad()
    def generate(self, sources: list[Tensor], *, max_frames: int = 2000) -> list[GeneratedSpeech]:
        """Generate at most `max_frames` frames for each text (K,), until the end is more likely than not."""
        return [self._generate_one(source, max_frames) for source in sources]

    def _generate_one(self, source: Tensor, max_frames: int) -> GeneratedSpeech:
        encoded, cache = self.encode(source[None]), self.decoder.cache()
        last, pieces, score = encoded.new_zeros(1, 1, self.config.features), list[Tensor](), 0.0
        for n in range(max(1, max_frames // self.config.reduction)):
            positions = torch.tensor([n], device=encoded.device)
            source_states = None if cache.holds_source else encoded
            hidden = self.decoder(
                self._prenet(last, positions), source_states, context=LayerContext(positions=positions), cache=cache
            )
            frames = self.frames(hidden).view(-1, self.config.features)
            pieces.append(frames)
            last = frames[None, -1:]
            end_probability = float(self.end(hidden).sigmoid())
            if end_probability > 0.5:
                score = end_probability
                break
        return GeneratedSpeech(torch.cat(pieces), score)


class RecordingContext(LayerContext):
    """A `LayerContext` that records the attention weights (B, H, Q, K) of every layer."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.recorded: list[Tensor] = []

    def combine(self, own: Attention, cache: Cache | None = None) -> Attention:
        attention = super().combine(own, cache)

        def record(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.recorded.append(attention.weights(query, key))
            return attention(query, key, value)

        return record  # type: ignore[return-value]


def guided_attention(weights: Tensor, steps: Tensor, letters: Tensor, *, spread: float = 0.2) -> Tensor:
    """Guided attention loss: penalise weights (B, H, Q, K) off the diagonal, summed over B, mean over H.

        sum over i, j of weights[i, j] * (1 - exp(-(j / letters - i / steps)^2 / (2 spread^2)))

    steps, letters (B,): numbers of real rows and columns. (Tachibana, Uenoyama and Aihara 2017.)

    >>> import torch
    >>> from regard.models.speech_synthesis import guided_attention
    >>> diagonal, count = torch.eye(4)[None, None], torch.tensor([4])
    >>> float(guided_attention(diagonal, count, count)), float(guided_attention(diagonal.flip(2), count, count)) > 1
    (0.0, True)
    """
    Q, K = weights.shape[-2:]
    i = torch.arange(Q, device=weights.device)[:, None] / steps[:, None, None]  # (B, Q, 1)
    j = torch.arange(K, device=weights.device) / letters[:, None, None]
    penalty = (1 - torch.exp(-((j - i) ** 2) / (2 * spread**2))) * (i < 1) * (j < 1)
    return (weights * penalty[:, None]).sum((2, 3)).mean(1).sum()


def _build_block(config: SpeechSynthesizerConfig, decoding: bool) -> Block:
    self_attend = Attention(mask=causal() if decoding else None, dropout=config.dropout)
    cross_attend = Attention(offset=0)
    return Block(
        MultiHeadAttention(config.d_model, config.heads, attend=self_attend),
        FeedForward(config.d_model, config.d_hidden),
        residual=lambda: PreNorm(config.d_model, dropout=config.dropout),
        cross=MultiHeadAttention(config.d_model, config.heads, attend=cross_attend) if decoding else None,
    )
