"""Speech synthesis: letters to log-mel features, a few frames after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import Attention
from regard.geometry import shape_of
from regard.masks import causal
from regard.models.parts import embedded, embedding, rows_of
from regard.models.places import Sinusoidal
from regard.nn import Block, Decoder, Encoder, FeedForward, MultiHeadAttention, PreNorm, Shared, key_mask, linear
from regard.nn.dropout import dropout


@dataclass(frozen=True)
class SpeakerConfig:
    """A speaker. vocabulary: letters that it reads.

    features: of a frame. reduction: frames that one step of the decoder says.
    narrow: width that the frame before is squeezed through, and squeeze: the dropout there, so that a step reads the
        text rather than going on from what was just said.

    >>> from regard.models.speaking import SpeakerConfig
    >>> SpeakerConfig(vocabulary=30, width=32, layers=2, heads=4, hidden=64).reduction
    4
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    hidden: int
    features: int = 80
    reduction: int = 4
    narrow: int = 64
    squeeze: float = 0.5
    dropout: float = 0.0


class Spoken(NamedTuple):
    """What a speaker says: frames (B, N, features), logits (B, N / reduction) of the end, cross-attention weights of
    every layer (B, H, N / reduction, K), where they were asked for."""

    frames: Tensor
    ends: Tensor
    weights: list[Tensor]


class Uttered(NamedTuple):
    """One text said aloud: frames (N, features), and how sure the speaker was that it had come to its end; 0 if it
    was stopped."""

    frames: Tensor
    score: float


class Speaker(nn.Module):
    """Letters and the frames so far to the next frames: ids (B, K) and frames (B, N, features) to (B, N, features).

    Frame n of the result is what is said at n, by the frames before its group of `reduction`; the first group is said
    by silence, zeros. N is a multiple of `reduction`.

    >>> import torch
    >>> from regard.models.speaking import Speaker, SpeakerConfig
    >>> model = Speaker(SpeakerConfig(vocabulary=30, width=32, layers=2, heads=4, hidden=64)).eval()
    >>> model(torch.tensor([[5, 6, 7]]), torch.randn(1, 12, 80)).shape
    torch.Size([1, 12, 80])
    >>> model.generate([torch.tensor([5, 6, 7])], limit=12)[0].frames.shape[1]
    80
    """

    def __init__(self, config: SpeakerConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.embedding = embedding(config.vocabulary, width, std=1.0)
        self.position, self.target_position = Sinusoidal(width), Sinusoidal(width)
        self.encoder = Encoder([_block(config, False) for _ in range(config.layers)], norm=nn.LayerNorm(width))
        self.squeeze = nn.ModuleList([linear(config.features, config.narrow), linear(config.narrow, config.narrow)])
        self.widen = linear(config.narrow, width)
        self.decoder = Decoder([_block(config, True) for _ in range(config.layers)], norm=nn.LayerNorm(width))
        self.frames = linear(width, config.reduction * config.features)
        self.end = linear(width, 1)

    def forward(self, source: Tensor, target: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """Frames (B, N, features). source_mask (B, K): True for real letters."""
        return self.say(source, target, source_mask).frames

    def say(
        self, source: Tensor, target: Tensor, source_mask: Tensor | None = None, *, weights: bool = False
    ) -> Spoken:
        """The same with all that there is to learn from; weights: whether those of the cross-attention are kept."""
        step, features = self.config.reduction, self.config.features
        if target.dim() != 3 or target.shape[-1] != features or target.shape[1] % step or not target.shape[1]:
            raise ValueError(
                f"target must be (B, N, {features}) with N a multiple of {step}, but is {shape_of(target)}"
            )
        last = F.pad(target[:, step - 1 : -1 : step], (0, 0, 1, 0))  # of every group, one group later
        keys = key_mask(source_mask, source)
        across = Watched(keys) if weights else Shared(keys)
        frames, ends = self._decoded(last, self.encode(source, source_mask), across)
        return Spoken(frames.view(target.shape), ends, across.seen if isinstance(across, Watched) else [])

    def encode(self, source: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """Hidden states (B, K, width) of the letters."""
        rows = rows_of(source, source_mask)
        x = self.position(embedded(rows.values, self.embedding), rows.positions)
        x = dropout(x, self.config.dropout) if self.config.dropout and self.training else x
        return self.encoder(x, shared=rows.shared)

    def decode(self, last: Tensor, encoded: Tensor, source_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The frames (B, S, reduction, features) of each step, and the logits (B, S) that it is the last.

        last (B, S, features): the last frame of the step before each step, zeros for the first. encoded (B, K, width).
        """
        return self._decoded(last, encoded, Shared(key_mask(source_mask, encoded)))

    def _decoded(self, last: Tensor, encoded: Tensor, across: Shared) -> tuple[Tensor, Tensor]:
        at = torch.arange(last.shape[1], device=last.device)
        hidden = self.decoder(self._squeezed(last, at), encoded, across=across)
        frames = self.frames(hidden).unflatten(-1, (self.config.reduction, self.config.features))
        return frames, self.end(hidden)[..., 0]

    def _squeezed(self, frames: Tensor, positions: Tensor) -> Tensor:
        x = frames
        for layer in self.squeeze:
            x = F.relu(layer(x))
            x = dropout(x, self.config.squeeze) if self.config.squeeze and self.training else x
        return self.target_position(self.widen(x), positions)

    @torch.no_grad()
    def generate(self, sources: list[Tensor], *, limit: int = 2000) -> list[Uttered]:
        """Each text (K,) said aloud, at most `limit` frames: until an end is more likely than not."""
        return [self._uttered(source, limit) for source in sources]

    def _uttered(self, source: Tensor, limit: int) -> Uttered:
        encoded, cache = self.encode(source[None]), self.decoder.cache()
        last, said, score = encoded.new_zeros(1, 1, self.config.features), list[Tensor](), 0.0
        for n in range(max(1, limit // self.config.reduction)):
            at = torch.tensor([n], device=encoded.device)
            given = None if cache.holds_source else encoded
            hidden = self.decoder(self._squeezed(last, at), given, shared=Shared(positions=at), cache=cache)
            frames = self.frames(hidden).view(-1, self.config.features)
            said.append(frames)
            last = frames[None, -1:]
            ending = float(self.end(hidden).sigmoid())
            if ending > 0.5:
                score = ending
                break
        return Uttered(torch.cat(said), score)


class Watched(Shared):
    """What layers share, and the weights of their attention (B, H, Q, K) as they come by."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.seen: list[Tensor] = []

    def attend(self, own: Attention, *, cached: bool = False, dropped: int = 0) -> Attention:
        made = super().attend(own, cached=cached, dropped=dropped)

        def watched(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.seen.append(made.weights(query, key))
            return made(query, key, value)

        return watched  # type: ignore[return-value]


def guidance(weights: Tensor, steps: Tensor, letters: Tensor, *, spread: float = 0.2) -> Tensor:
    """How far attention (B, H, Q, K) is from going through the text steadily, the sum over B of means over H.

        sum over i, j of weights[i, j] * (1 - exp(-(j / letters - i / steps)^2 / (2 spread^2)))

    steps, letters (B,): how many of the first rows and columns are real. (Tachibana, Uenoyama and Aihara 2017.)

    >>> import torch
    >>> from regard.models.speaking import guidance
    >>> steady, count = torch.eye(4)[None, None], torch.tensor([4])
    >>> float(guidance(steady, count, count)), float(guidance(steady.flip(2), count, count)) > 1
    (0.0, True)
    """
    Q, K = weights.shape[-2:]
    i = torch.arange(Q, device=weights.device)[:, None] / steps[:, None, None]  # (B, Q, 1)
    j = torch.arange(K, device=weights.device) / letters[:, None, None]
    astray = (1 - torch.exp(-((j - i) ** 2) / (2 * spread**2))) * (i < 1) * (j < 1)
    return (weights * astray[:, None]).sum((2, 3)).mean(1).sum()


def _block(config: SpeakerConfig, decoding: bool) -> Block:
    own = Attention(mask=causal() if decoding else None, dropout=config.dropout)
    across = Attention(offset=0)
    return Block(
        MultiHeadAttention(config.width, config.heads, attend=own),
        FeedForward(config.width, config.hidden),
        residual=lambda: PreNorm(config.width, dropout=config.dropout),
        cross=MultiHeadAttention(config.width, config.heads, attend=across) if decoding else None,
    )
