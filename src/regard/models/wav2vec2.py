"""Wav2Vec2 for speech recognition with CTC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.geometry import format_shape
from regard.models.blocks import build_blocks
from regard.models.components import choose, norm_factory
from regard.models.config_fields import same_as
from regard.models.inputs import check_right_padding
from regard.nn import ACTIVATIONS, Encoder, LayerContext, key_mask, linear

Count = TypeVar("Count", int, Tensor)


@dataclass(frozen=True)
class Wav2Vec2Config:
    """Configuration of Wav2Vec2. The defaults are those of the base model.

    The base model has arrangement "post" and conv_norm "group"; the large models have "pre" and "layer".

    channels, kernels, strides: of the successive convolutions over the wave.
    conv_norm: "layer" after every convolution, or "group" after the first only, over all frames.
    position_kernel, position_groups: of the convolution that encodes positions.

    >>> from regard.models.wav2vec2 import Wav2Vec2Config
    >>> Wav2Vec2Config(labels=32, d_model=32, layers=2, heads=4, d_hidden=64).length(16000)
    49
    """

    labels: int
    d_model: int
    layers: int
    heads: int
    d_hidden: int
    channels: tuple[int, ...] = (512,) * 7
    kernels: tuple[int, ...] = (10, 3, 3, 3, 3, 2, 2)
    strides: tuple[int, ...] = (5, 2, 2, 2, 2, 2, 2)
    conv_bias: bool = False
    conv_norm: str = "group"
    conv_activation: str = "gelu"
    position_kernel: int = 128
    position_groups: int = 16
    arrangement: str = "post"
    eps: float = 1e-5
    activation: str = "gelu"
    dropout: float = 0.0
    attention_dropout: float | None = same_as("dropout")

    def __post_init__(self) -> None:
        if not len(self.channels) == len(self.kernels) == len(self.strides):
            raise ValueError(
                f"channels, kernels and strides must have one length, got {self.channels, self.kernels, self.strides}"
            )
        if self.conv_norm not in ("group", "layer"):
            raise ValueError(f"conv_norm must be 'group' or 'layer', got {self.conv_norm!r}")

    def length(self, samples: int) -> int:
        """Number of frames of a wave of `samples` samples."""
        return max(0, self.frames(samples))

    def frames(self, samples: Count) -> Count:
        """Like `length`, for a number or a tensor, but not clamped: below 1 if the wave is too short for a frame."""
        for kernel, stride in zip(self.kernels, self.strides, strict=True):
            samples = (samples - kernel) // stride + 1
        return samples


class Wav2Vec2(nn.Module):
    """Waves (B, samples) at 16 kHz to label logits (B, frames, labels); label 0 is CTC's blank.

    mask (B, samples): True for real samples, which come first. Models with conv_norm "group" were trained without
    masks, on waves padded with zeros. Normalise waves with `regard.models.audio.normalize_waveform`.

    >>> import torch
    >>> from regard.models.wav2vec2 import Wav2Vec2, Wav2Vec2Config
    >>> config = Wav2Vec2Config(labels=32, d_model=32, layers=2, heads=4, d_hidden=64, channels=(16,) * 7)
    >>> Wav2Vec2(config).eval()(torch.randn(2, 16000)).shape
    torch.Size([2, 49, 32])
    """

    def __init__(self, config: Wav2Vec2Config) -> None:
        super().__init__()
        self.config = config
        d_model, norm = config.d_model, norm_factory("layer", config.eps)
        self.front = nn.ModuleList(_Layer(config, n) for n in range(len(config.channels)))
        self.front_norm = norm(config.channels[-1])
        self.project = linear(config.channels[-1], d_model)
        conv = nn.Conv1d(
            d_model, d_model, config.position_kernel, padding=config.position_kernel // 2, groups=config.position_groups
        )
        self.position = nn.utils.parametrizations.weight_norm(conv, dim=2)
        self.first_norm = None if config.arrangement == "pre" else norm(d_model)
        last = norm(d_model) if config.arrangement == "pre" else None
        self.stack = Encoder(build_blocks(config, config.layers, norm), norm=last)
        self.head = linear(d_model, config.labels)

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return logits (B, frames, labels)."""
        if not isinstance(inputs, Tensor) or inputs.dim() != 2 or not self.config.length(inputs.shape[1]):
            given = format_shape(inputs) if isinstance(inputs, Tensor) else type(inputs).__name__
            raise ValueError(f"inputs must be waves (B, samples) of at least one frame, got {given}")
        x = inputs[:, None]  # (B, 1, samples)
        for layer in self.front:
            x = layer(x)
        x = self.project(self.front_norm(x.mT))
        if mask is not None:
            check_right_padding(mask, inputs)
        frame_mask = None if mask is None else self._frames(mask, x)
        if frame_mask is not None:
            x = x.masked_fill(~frame_mask[..., None], 0.0)
        position = self.position(x.mT)[..., : x.shape[1]].mT
        x = x + choose("activation", self.config.conv_activation, ACTIVATIONS)(position)
        x = x if self.first_norm is None else self.first_norm(x)
        if self.config.dropout and self.training:
            x = F.dropout(x, self.config.dropout)
        return self.head(self.stack(x, context=LayerContext(key_mask(frame_mask))))

    def _frames(self, mask: Tensor, like: Tensor) -> Tensor:
        """Mask (B, frames), True where all samples of a frame are real."""
        return torch.arange(like.shape[1], device=like.device) < self.config.frames(mask.sum(1, keepdim=True))


class _Layer(nn.Module):
    """Convolution, optional norm and activation: (B, inputs, n) to (B, outputs, m)."""

    def __init__(self, config: Wav2Vec2Config, n: int) -> None:
        super().__init__()
        inputs = config.channels[n - 1] if n else 1
        channels, kernel, stride = config.channels[n], config.kernels[n], config.strides[n]
        self.conv = nn.Conv1d(inputs, channels, kernel, stride, bias=config.conv_bias)
        self.norm: nn.Module | None = None
        if config.conv_norm == "layer":
            self.norm = nn.LayerNorm(channels)
        elif n == 0:
            self.norm = nn.GroupNorm(channels, channels)
        self.activation = choose("activation", config.conv_activation, ACTIVATIONS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if isinstance(self.norm, nn.LayerNorm):
            x = self.norm(x.mT).mT
        elif self.norm is not None:
            x = self.norm(x)
        return self.activation(x)
