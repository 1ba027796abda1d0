"""Speech recognition: features to the labels of frames, by attention that looks no farther than it is allowed to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import Attention
from regard.geometry import format_shape
from regard.masks import window
from regard.models.components import choose
from regard.models.inputs import Inputs, check_right_padding, prepare_inputs
from regard.nn import (
    ACTIVATIONS,
    Block,
    Encoder,
    FeedForward,
    LayerContext,
    MultiHeadAttention,
    Packed,
    PreNorm,
    Rotary,
    linear,
    pack,
    unpack,
)


@dataclass(frozen=True)
class SpeechConfig:
    """A recognizer of speech. Label 0 is CTC's blank.

    features: of an input frame. halvings: convolutions before the attention, each of which halves the frames.
    before, after: frames, after the halving, that a layer sees before and after its own; the delay of a stream is
        layers * after frames and what the convolutions need.

    >>> from regard.models.speech_recognition import SpeechConfig
    >>> SpeechConfig(labels=30, d_model=32, layers=2, heads=4, d_hidden=64).length(100)
    25
    """

    labels: int
    d_model: int
    layers: int
    heads: int
    d_hidden: int
    features: int = 80
    halvings: int = 2
    before: int = 64
    after: int = 16
    activation: str = "gelu"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if min(self.before, self.after) < 0 or min(self.labels, self.features, self.halvings) < 1:
            raise ValueError(
                "before and after must be at least 0, labels, features and halvings at least 1, but they are "
                f"{self.before, self.after, self.labels, self.features, self.halvings}"
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
    >>> from regard.models.speech_recognition import SpeechConfig, SpeechRecognizer
    >>> model = SpeechRecognizer(SpeechConfig(labels=30, d_model=32, layers=2, heads=4, d_hidden=64)).eval()
    >>> model(torch.randn(2, 100, 80)).shape
    torch.Size([2, 25, 30])
    >>> [len(logits) for logits in model([torch.randn(100, 80), torch.randn(31, 80)])]
    [25, 8]
    """

    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        self.config = config
        self.front = ConvSubsampling(config.features, config.d_model, (2,) * config.halvings)
        attend = Attention(mask=window(config.before, config.after), dropout=config.dropout)
        rotary, activation = Rotary(), choose("activation", config.activation, ACTIVATIONS)
        blocks = [
            Block(
                MultiHeadAttention(config.d_model, config.heads, attend=attend, rotary=rotary),
                FeedForward(config.d_model, config.d_hidden, activation=activation),
                residual=lambda: PreNorm(config.d_model, dropout=config.dropout),
            )
            for _ in range(config.layers)
        ]
        self.stack = Encoder(blocks, norm=nn.LayerNorm(config.d_model))
        self.head = linear(config.d_model, config.labels)

    def forward(self, inputs: Inputs, mask: Tensor | None = None) -> Tensor | Packed | list[Tensor]:
        """Logits (B, M, labels); of packed features packed, of a list a list."""
        rows = prepare_inputs(*self.front(inputs, mask))
        return rows.to_input_form(self.head(self.stack(rows.values, context=rows.context)))

    def stream(self) -> StreamingRecognizer:
        """A listener to a sound that is still going on."""
        return StreamingRecognizer(self)


class ConvSubsampling(nn.Module):
    """Convolutions over three frames each before the attention; each halves the frames or, with stride 1, does not.

    Frames beyond the beginning and the end, and filler, are silence: zeros. So it is the same in any batch.

    >>> import torch
    >>> from regard.models.speech_recognition import ConvSubsampling
    >>> front = ConvSubsampling(80, 32, strides=(2, 2))
    >>> front(torch.randn(1, 31, 80))[0].shape
    torch.Size([1, 8, 32])
    """

    def __init__(self, features: int, d_model: int, strides: tuple[int, ...]) -> None:
        super().__init__()
        seen = (features, *(d_model for _ in strides[1:]))
        self.convs = nn.ModuleList(nn.Conv1d(n, d_model, 3, stride) for n, stride in zip(seen, strides, strict=True))
        self.features = features
        for conv in self.convs:
            assert isinstance(conv, nn.Conv1d)
            assert conv.bias is not None
            nn.init.normal_(conv.weight, std=(2 / (3 * conv.in_channels)) ** 0.5)
            nn.init.zeros_(conv.bias)

    def forward(self, inputs: Inputs, mask: Tensor | None = None) -> tuple[Inputs, Tensor | None]:
        """(B, N, features) to (B, M, d_model) and the mask of what is left; packed and lists stay so, without a
        mask."""
        if isinstance(inputs, Tensor):
            if mask is not None:
                check_right_padding(mask, inputs)
            return self._apply_convs(inputs, mask)
        if mask is not None:
            raise ValueError("mask goes with inputs (B, N, features); packed inputs and lists say their lengths")
        x, kept = (inputs if isinstance(inputs, Packed) else pack(list(inputs))).padded()
        if not x.shape[1]:  # convolutions need a frame, be it filler
            x, kept = F.pad(x, (0, 0, 0, 1)), F.pad(kept, (0, 1))
        x, left = self._apply_convs(x, kept)
        assert left is not None
        packed = Packed(x[left], tuple(left.sum(1).tolist()))
        return packed if isinstance(inputs, Packed) else unpack(packed), None

    def _apply_convs(self, x: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if x.dim() != 3 or x.shape[-1] != self.features or not x.shape[1]:
            raise ValueError(
                f"inputs must be at least one frame of {self.features} features, (B, N, {self.features}), "
                f"but are {format_shape(x)}"
            )
        for conv in self.convs:
            assert isinstance(conv, nn.Conv1d)
            if kept is not None:
                x, kept = x.masked_fill(~kept[..., None], 0.0), kept[:, :: conv.stride[0]]
            x = conv_gelu(conv, F.pad(x, (0, 0, 1, 1)))
        return x, kept


def conv_gelu(conv: nn.Conv1d, x: Tensor) -> Tensor:
    """(B, N, inputs) to (B, (N - 3) // stride + 1, outputs)."""
    return F.gelu(conv(x.mT)).mT


class StreamingRecognizer:
    """A recognizer that hears a sound piece by piece. What it has said of a piece never changes.

    Every layer holds the frames that later ones may still look at, and says of a frame what it has to say once the
    frames after it that it looks at are there. So a piece costs what is new and one window a layer, however long the
    sound; all that comes, with `last` at the end, is what the model says of the whole.

    >>> import torch
    >>> from regard.models.speech_recognition import SpeechConfig, SpeechRecognizer
    >>> config = SpeechConfig(labels=30, d_model=32, layers=2, heads=4, d_hidden=64, before=8, after=2)
    >>> model, sound = SpeechRecognizer(config).eval(), torch.randn(100, 80)
    >>> stream = model.stream()
    >>> emitted = [stream(piece, last=n == 9) for n, piece in enumerate(sound.split(10))]
    >>> [len(piece) for piece in emitted], torch.allclose(torch.cat(emitted), model(sound[None])[0], atol=1e-5)
    ([0, 1, 2, 3, 2, 3, 2, 3, 2, 7], True)
    """

    def __init__(self, model: SpeechRecognizer) -> None:
        self.model, config = model, model.config
        like = model.head.weight
        convs = [conv for conv in model.front.convs if isinstance(conv, nn.Conv1d)]
        self.rest = [(conv, like.new_zeros(1, 1, conv.in_channels)) for conv in convs]  # what a convolution still needs
        self.context = [like.new_zeros(1, 0, config.d_model) for _ in range(config.layers)]
        self.first = [0] * config.layers  # where what a layer holds begins
        self.emitted = [0] * config.layers  # frames that a layer has told the next one
        self.ended = False

    @torch.no_grad()
    def __call__(self, features: Tensor, *, last: bool = False) -> Tensor:
        """The next frames (n, features) to the logits (m, labels) that are settled by them."""
        if self.ended:
            raise ValueError("the stream has ended; begin another with model.stream()")
        self.ended = last
        x = features[None]
        for n, (conv, rest) in enumerate(self.rest):
            x = torch.cat((rest, x), 1)
            if last:
                x = F.pad(x, (0, 0, 0, 1))
            count = max(0, (x.shape[1] - 1) // 2)
            self.rest[n] = conv, x[:, 2 * count :]
            x = conv_gelu(conv, x[:, : 2 * count + 1]) if count else x.new_zeros(1, 0, self.model.config.d_model)
        for n, block in enumerate(self.model.stack.layers):
            x = self._layer(n, block, x, last)
        assert self.model.stack.norm is not None
        return self.model.head(self.model.stack.norm(x))[0]

    def _layer(self, n: int, block: nn.Module, x: Tensor, last: bool) -> Tensor:
        before, after = self.model.config.before, self.model.config.after
        x = torch.cat((self.context[n], x), 1)
        end = self.first[n] + x.shape[1]
        final = max(self.emitted[n], end if last else end - after)
        positions = torch.arange(self.first[n], end, device=x.device)
        out = block(x, context=LayerContext(positions=positions)) if x.shape[1] else x
        out = out[:, self.emitted[n] - self.first[n] : final - self.first[n]]
        keep = max(self.first[n], final - before)
        self.context[n], self.first[n], self.emitted[n] = x[:, keep - self.first[n] :], keep, final
        return out
