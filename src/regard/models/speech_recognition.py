"""Speech recognition with CTC and windowed attention, for whole recordings and streams."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import Attention
from regard.geometry import format_shape
from regard.masks import window
from regard.models.components import choose
from regard.models.config_fields import optional_count
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
    """Configuration of a speech recognizer. Label 0 is CTC's blank.

    features: features per input frame. halvings: number of convolutions in front, each of which halves the frame rate.
    before, after: size of the attention window in (subsampled) frames. The latency of a stream is layers * after frames
        plus that of the convolutions.

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
    halvings: int = optional_count(2)
    before: int = optional_count(64)
    after: int = optional_count(16)
    activation: str = "gelu"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if min(self.before, self.after) < 0 or min(self.labels, self.features, self.halvings) < 1:
            raise ValueError(
                "before and after must be at least 0, labels, features and halvings at least 1, got "
                f"{self.before, self.after, self.labels, self.features, self.halvings}"
            )

    def length(self, frames: int) -> int:
        """Number of output frames for `frames` input frames."""
        for _ in range(self.halvings):
            frames = (frames + 1) // 2
        return frames


class SpeechRecognizer(nn.Module):
    """Features (B, N, features) to label logits (B, M, labels), where M = config.length(N).

    mask (B, N): True for real frames, which come first. For packed features or a list, the logits have the same form.
    Attention is limited to `window(before, after)` and positions are rotary, so the result does not depend on absolute
    time, and `stream` computes the same logits incrementally.

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
        """Return logits (B, M, labels), in the form of the inputs."""
        rows = prepare_inputs(*self.front(inputs, mask))
        return rows.to_input_form(self.head(self.stack(rows.values, context=rows.context)))

    def stream(self) -> StreamingRecognizer:
        """Return a streaming recognizer for audio that arrives in pieces."""
        return StreamingRecognizer(self)


class ConvSubsampling(nn.Module):
    """Convolutions of kernel size 3 in front of a stack; those of stride 2 halve the number of frames.

    Padding and frames beyond both ends are zeros, so that the result does not depend on the batch.

    >>> import torch
    >>> from regard.models.speech_recognition import ConvSubsampling
    >>> front = ConvSubsampling(80, 32, strides=(2, 2))
    >>> front(torch.randn(1, 31, 80))[0].shape
    torch.Size([1, 8, 32])
    """

    def __init__(self, features: int, d_model: int, strides: tuple[int, ...]) -> None:
        super().__init__()
        channels = (features, *(d_model for _ in strides[1:]))
        self.convs = nn.ModuleList(
            nn.Conv1d(n, d_model, 3, stride) for n, stride in zip(channels, strides, strict=True)
        )
        self.features = features
        for conv in self.convs:
            assert isinstance(conv, nn.Conv1d)
            assert conv.bias is not None
            nn.init.normal_(conv.weight, std=(2 / (3 * conv.in_channels)) ** 0.5)
            nn.init.zeros_(conv.bias)

    def forward(self, inputs: Inputs, mask: Tensor | None = None) -> tuple[Inputs, Tensor | None]:
        """Map (B, N, features) to (B, M, d_model) and its mask; packed batches and lists keep their form, mask None."""
        if isinstance(inputs, Tensor):
            if mask is not None:
                check_right_padding(mask, inputs)
            return self._apply_convs(inputs, mask)
        if mask is not None:
            raise ValueError("packed inputs and lists take no mask: their lengths are known; omit it")
        x, real = (inputs if isinstance(inputs, Packed) else pack(list(inputs))).padded()
        if not x.shape[1]:  # convolutions need at least one frame, even if it is padding
            x, real = F.pad(x, (0, 0, 0, 1)), F.pad(real, (0, 1))
        x, output_mask = self._apply_convs(x, real)
        assert output_mask is not None
        packed = Packed(x[output_mask], tuple(output_mask.sum(1).tolist()))
        return packed if isinstance(inputs, Packed) else unpack(packed), None

    def _apply_convs(self, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if x.dim() != 3 or x.shape[-1] != self.features or not x.shape[1]:
            raise ValueError(
                f"inputs must be at least one frame of {self.features} features, (B, N, {self.features}), "
                f"got {format_shape(x)}"
            )
        for conv in self.convs:
            assert isinstance(conv, nn.Conv1d)
            if real is not None:
                x, real = x.masked_fill(~real[..., None], 0.0), real[:, :: conv.stride[0]]
            x = conv_gelu(conv, F.pad(x, (0, 0, 1, 1)))
        return x, real


def conv_gelu(conv: nn.Conv1d, x: Tensor) -> Tensor:
    """Map (B, N, inputs) to (B, (N - 3) // stride + 1, outputs)."""
    return F.gelu(conv(x.mT)).mT


class StreamingRecognizer:
    """Recognize audio that arrives in pieces. Emitted logits never change.

    Every layer keeps the frames within the window of later frames, and emits a frame as soon as all frames in its own
    window have arrived. The cost of a piece is that of its frames plus one window per layer, for audio of any length.
    The concatenated outputs, ending with a call with `last=True`, equal those of the model on the full audio.

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
        self.rest = [
            (conv, like.new_zeros(1, 1, conv.in_channels)) for conv in convs
        ]  # inputs that the next output of a convolution needs
        self.context = [like.new_zeros(1, 0, config.d_model) for _ in range(config.layers)]
        self.first = [0] * config.layers  # position of the first frame kept by each layer
        self.emitted = [0] * config.layers  # frames that each layer has passed on
        self.ended = False

    @torch.no_grad()
    def __call__(self, features: Tensor, *, last: bool = False) -> Tensor:
        """Take the next frames (n, features) and return the logits (m, labels) that become final."""
        if self.ended:
            raise ValueError("the stream has ended; start another one with model.stream()")
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
