"""Speech recognition: features to the labels of frames, by attention that looks no farther than it is allowed to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from regard.attention import Attention
from regard.geometry import shape_of
from regard.masks import window
from regard.models.parts import Inputs, Rows, rows_of
from regard.nn import (
    ACTIVATIONS,
    Block,
    Encoder,
    FeedForward,
    MultiHeadAttention,
    Packed,
    PreNorm,
    Rotary,
    Shared,
    linear,
    unpack,
)


@dataclass(frozen=True)
class SpeechConfig:
    """A recognizer of speech. Label 0 is CTC's blank.

    features: of an input frame. halvings: convolutions before the attention, each of which halves the frames.
    before, after: frames, after the halving, that a layer sees before and after its own; the delay of a stream is
        layers * after frames and what the convolutions need.

    >>> from regard.models.speech import SpeechConfig
    >>> SpeechConfig(labels=30, width=32, layers=2, heads=4, hidden=64).length(100)
    25
    """

    labels: int
    width: int
    layers: int
    heads: int
    hidden: int
    features: int = 80
    halvings: int = 2
    before: int = 64
    after: int = 16
    activation: str = "gelu"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if min(self.before, self.after, self.halvings) < 0 or min(self.labels, self.features) < 1:
            raise ValueError(
                "before, after and halvings must be at least 0, labels and features at least 1, but they are "
                f"{self.before, self.after, self.halvings, self.labels, self.features}"
            )

    def length(self, frames: int) -> int:
        """How many frames are left of so many."""
        for _ in range(self.halvings):
            frames = (frames + 1) // 2
        return frames


class SpeechRecognizer(nn.Module):
    """Features to the logits of labels, (B, N, features) to (B, M, labels), where M = config.length(N).

    mask (B, N): True for real frames, which come first. Packed features, or a list of them, give logits in the same
    form. Attention is truncated: `window(before, after)`; positions are rotary, so that it is the same at any time, and
    what `stream` computes of a sound that is still going on is what this computes of all of it.

    >>> import torch
    >>> from regard.models.speech import SpeechConfig, SpeechRecognizer
    >>> model = SpeechRecognizer(SpeechConfig(labels=30, width=32, layers=2, heads=4, hidden=64)).eval()
    >>> model(torch.randn(2, 100, 80)).shape
    torch.Size([2, 25, 30])
    >>> [len(logits) for logits in model([torch.randn(100, 80), torch.randn(31, 80)])]
    [25, 8]
    """

    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        self.config = config
        seen = (config.features, *(config.width for _ in range(config.halvings)))
        self.halves = nn.ModuleList(Half(*pair) for pair in zip(seen, seen[1:], strict=False))
        self.project = linear(seen[-1], config.width)
        attend = Attention(mask=window(config.before, config.after), dropout=config.dropout)
        rotary, activation = Rotary(), ACTIVATIONS[config.activation]
        blocks = [
            Block(
                MultiHeadAttention(config.width, config.heads, attend=attend, rotary=rotary),
                FeedForward(config.width, config.hidden, activation=activation),
                residual=lambda: PreNorm(config.width, dropout=config.dropout),
            )
            for _ in range(config.layers)
        ]
        self.stack = Encoder(blocks, norm=nn.LayerNorm(config.width))
        self.head = linear(config.width, config.labels)

    def forward(self, inputs: Inputs, mask: Tensor | None = None) -> Tensor | Packed | list[Tensor]:
        """Logits (B, M, labels); of packed features packed, of a list a list."""
        rows = self._halved(inputs, mask)
        return rows.back(self.head(self.stack(rows.values, shared=rows.shared)))

    def stream(self) -> Stream:
        """A listener to a sound that is still going on."""
        return Stream(self)

    def _halved(self, inputs: Inputs, mask: Tensor | None) -> Rows:
        """What enters the attention: padded for the convolutions, then in the form that came."""
        if isinstance(inputs, Tensor):
            x, kept = inputs, mask
        else:
            parts = unpack(inputs) if isinstance(inputs, Packed) else list(inputs)
            x = pad_sequence(parts, batch_first=True)
            kept = _first([len(part) for part in parts], x)
        if x.dim() != 3 or x.shape[-1] != self.config.features or not x.shape[1]:
            raise ValueError(
                f"inputs must be at least one frame of {self.config.features} features, "
                f"(B, N, {self.config.features}), but are {shape_of(x)}"
            )
        if kept is not None and not bool((kept[:, :-1] | ~kept[:, 1:]).all() & kept[:, 0].all()):
            raise ValueError("mask must be True for the first frames of each row and False behind them")
        for half in self.halves:
            if kept is not None:
                x = x * kept[..., None]  # filler is silence, as what is beyond the end
            x = half(x)
            kept = None if kept is None else kept[:, ::2]
        x = self.project(x)
        if isinstance(inputs, Tensor):
            return rows_of(x, kept)
        assert kept is not None
        packed = Packed(x[kept], tuple(kept.sum(1).tolist()))
        return rows_of(packed if isinstance(inputs, Packed) else unpack(packed))


class Half(nn.Module):
    """A convolution over three frames at every second one: (B, N, inputs) to (B, (N + 1) // 2, outputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, 3, stride=2)
        nn.init.normal_(self.conv.weight, std=(2 / (3 * inputs)) ** 0.5)
        assert self.conv.bias is not None
        nn.init.zeros_(self.conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(F.pad(x, (0, 0, 1, 1)))

    def inside(self, x: Tensor) -> Tensor:
        """Without the silence around it."""
        return F.gelu(self.conv(x.mT)).mT


class Stream:
    """A recognizer that hears a sound piece by piece. What it has said of a piece never changes.

    Every layer holds the frames that later ones may still look at, and says of a frame what it has to say once the
    frames after it that it looks at are there. So a piece costs what is new and one window a layer, however long the
    sound; all that comes, with `last` at the end, is what the model says of the whole.

    >>> import torch
    >>> from regard.models.speech import SpeechConfig, SpeechRecognizer
    >>> config = SpeechConfig(labels=30, width=32, layers=2, heads=4, hidden=64, before=8, after=2)
    >>> model, sound = SpeechRecognizer(config).eval(), torch.randn(100, 80)
    >>> stream = model.stream()
    >>> said = [stream(piece, last=n == 9) for n, piece in enumerate(sound.split(10))]
    >>> [len(piece) for piece in said], torch.allclose(torch.cat(said), model(sound[None])[0], atol=1e-5)
    ([0, 1, 2, 3, 2, 3, 2, 3, 2, 7], True)
    """

    def __init__(self, model: SpeechRecognizer) -> None:
        self.model, config = model, model.config
        like = model.head.weight
        self.rest = [like.new_zeros(1, 1, half.conv.in_channels) for half in model.halves]  # type: ignore[union-attr]
        self.held = [like.new_zeros(1, 0, config.width) for _ in range(config.layers)]
        self.first = [0] * config.layers  # where what a layer holds begins
        self.said = [0] * config.layers  # frames that a layer has told the next one
        self.ended = False

    @torch.no_grad()
    def __call__(self, features: Tensor, *, last: bool = False) -> Tensor:
        """The next frames (n, features) to the logits (m, labels) that are settled by them."""
        if self.ended:
            raise ValueError("the stream has ended; begin another with model.stream()")
        self.ended = last
        x = features[None]
        for n, half in enumerate(self.model.halves):
            assert isinstance(half, Half)
            x = torch.cat((self.rest[n], x), 1)
            if last:
                x = F.pad(x, (0, 0, 0, 1))
            count = max(0, (x.shape[1] - 1) // 2)
            self.rest[n] = x[:, 2 * count :]
            x = half.inside(x[:, : 2 * count + 1]) if count else x.new_zeros(1, 0, self.model.config.width)
        x = self.model.project(x)
        for n, block in enumerate(self.model.stack.layers):
            x = self._layer(n, block, x, last)
        assert self.model.stack.norm is not None
        return self.model.head(self.model.stack.norm(x))[0]

    def _layer(self, n: int, block: nn.Module, x: Tensor, last: bool) -> Tensor:
        before, after = self.model.config.before, self.model.config.after
        x = torch.cat((self.held[n], x), 1)
        end = self.first[n] + x.shape[1]
        settled = max(self.said[n], end if last else end - after)
        positions = torch.arange(self.first[n], end, device=x.device)
        out = block(x, shared=Shared(positions=positions)) if x.shape[1] else x
        out = out[:, self.said[n] - self.first[n] : settled - self.first[n]]
        keep = max(self.first[n], settled - before)
        self.held[n], self.first[n], self.said[n] = x[:, keep - self.first[n] :], keep, settled
        return out


def _first(lengths: list[int], like: Tensor) -> Tensor:
    """(B, N) True for so many frames of each row."""
    return torch.arange(like.shape[1], device=like.device) < torch.tensor(lengths, device=like.device)[:, None]
