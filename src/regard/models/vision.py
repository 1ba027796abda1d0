"""Vision Transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import Attention
from regard.geometry import format_shape
from regard.models.blocks import build_blocks
from regard.models.components import choose, norm_factory
from regard.models.config_fields import same_as
from regard.models.resnet import NORMS, Convolution
from regard.nn import (
    ACTIVATIONS,
    Encoder,
    FeedForward,
    First,
    GatedFeedForward,
    LayerContext,
    Mean,
    MultiHeadAttention,
    PreNorm,
    ProbePooling,
    key_mask,
    linear,
)
from regard.positions import learned


@dataclass(frozen=True)
class VisionConfig:
    """Configuration of a Vision Transformer. Except for the sizes, the defaults are those of ViT-Base.

    image: height and width in pixels, multiples of `patch`, for which the position table is learned; it is interpolated
        for other sizes.
    stem: channels of 3x3 convolutions before the patch embedding, each of which halves the image; they help a model to
        learn from fewer images. `patch` is counted in input pixels.
    class_token: whether a learned token is placed before the patches. patch_bias: of the patch embedding.
    embedding_norm: whether to normalise the sums of patches and positions (CLIP).
    arrangement: "pre", "post", "sandwich", "output" or "layer_scale". gated: whether feed-forward layers are gated.
    qkv_bias: whether queries, keys and values have a bias. classes: number of classes of an `ImageClassifier`.
    pooling: "first" token, "first_mean" (first token and mean of the patches, DINOv2), or "probe" (`nn.ProbePooling`).
    attention_dropout: dropout of attention weights, `dropout` by default.

    >>> from regard.models.vision import VisionConfig
    >>> VisionConfig(d_model=32, layers=2, heads=4, d_hidden=64, image=(32, 48), patch=8).grid
    (4, 6)
    """

    d_model: int
    layers: int
    heads: int
    d_hidden: int
    image: tuple[int, int] = (224, 224)
    patch: int = 16
    channels: int = 3
    stem: tuple[int, ...] = ()
    class_token: bool = True
    patch_bias: bool = True
    embedding_norm: bool = False
    pooling: str = "first"
    classes: int = 1000
    arrangement: str = "pre"
    norm: str = "layer"
    eps: float = 1e-12
    activation: str = "gelu"
    gated: bool = False
    qkv_bias: bool = True
    dropout: float = 0.0
    attention_dropout: float | None = same_as("dropout")

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.image[0] // self.patch, self.image[1] // self.patch


class VisionTransformer(nn.Module):
    """Encode images (B, C, height, width) to hidden states (B, 1 + patches, d_model).

    The first is the class token; without one, there are as many as patches.

    Height and width are at least one patch; incomplete patches at the right and bottom are dropped. For sizes other
    than `config.image` the position table is interpolated (bicubic). mask (B, patches): True for patches to attend
    to, in row-major order. The patch embedding starts from N(0, 1 / fan_in), class token and positions from
    N(0, 0.02^2).

    >>> import torch
    >>> from regard.models.vision import VisionConfig, VisionTransformer
    >>> config = VisionConfig(d_model=32, layers=2, heads=4, d_hidden=64, image=(32, 32), patch=8)
    >>> model = VisionTransformer(config).eval()
    >>> model(torch.randn(2, 3, 32, 32)).shape, model(torch.randn(2, 3, 40, 24)).shape
    (torch.Size([2, 17, 32]), torch.Size([2, 16, 32]))
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        rows, columns = config.grid
        if rows < 1 or columns < 1 or config.image != (rows * config.patch, columns * config.patch):
            raise ValueError(
                f"image must be a multiple of the patch size {config.patch} in each direction, got {config.image}"
            )
        kernel = config.patch >> len(config.stem)
        if kernel << len(config.stem) != config.patch:
            raise ValueError(
                f"patch must be a multiple of {2 ** len(config.stem)} for a stem of {len(config.stem)} convolutions, "
                f"got {config.patch}"
            )
        channels = (config.channels, *config.stem)
        halves = (Convolution(*pair, 3, NORMS["group"], stride=2) for pair in pairwise(channels))
        self.stem = nn.Sequential(*(part for half in halves for part in (half, nn.ReLU())))
        self.patches = nn.Conv2d(channels[-1], config.d_model, kernel, stride=kernel, bias=config.patch_bias)
        nn.init.normal_(self.patches.weight, std=1 / math.sqrt(self.patches.weight[0].numel()))
        if self.patches.bias is not None:
            nn.init.zeros_(self.patches.bias)
        self.first = learned(1, config.d_model) if config.class_token else None
        self.position = learned(config.class_token + rows * columns, config.d_model)
        norm = norm_factory(config.norm, config.eps)
        self.embedding_norm = norm(config.d_model) if config.embedding_norm else None
        self.stack = Encoder(
            build_blocks(
                config, config.layers, norm, qkv_bias=config.qkv_bias, feedforward=lambda: _build_feedforward(config)
            ),
            norm=None if config.arrangement == "post" else norm(config.d_model),
        )

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return hidden states (B, 1 + patches, d_model)."""
        patch, channels = self.config.patch, self.config.channels
        if images.dim() != 4 or images.shape[1] != channels or min(images.shape[2:]) < patch:
            raise ValueError(
                f"images must be (B, {channels}, height, width) of at least {patch} x {patch} pixels, "
                f"got {format_shape(images)}"
            )
        x = self.patches(self.stem(images))  # (B, d_model, rows, columns)
        positions = self.positions((x.shape[2], x.shape[3]))
        x = x.flatten(2).mT
        x = (x if self.first is None else torch.cat((self.first.expand(len(x), 1, -1), x), 1)) + positions
        x = x if self.embedding_norm is None else self.embedding_norm(x)
        if self.config.dropout and self.training:
            x = F.dropout(x, self.config.dropout)
        return self.stack(x, context=LayerContext(key_mask(self.token_mask(mask), x)))

    def token_mask(self, mask: Tensor | None) -> Tensor | None:
        """Extend a mask of patches (B, patches) by the class token, if there is one."""
        return mask if mask is None or self.first is None else F.pad(mask, (1, 0), value=True)

    def positions(self, grid: tuple[int, int]) -> Tensor:
        """Return the position table (1 + rows * columns, d_model) for a grid of patches."""
        if grid == self.config.grid:
            return self.position
        first = int(self.config.class_token)
        table = self.position[first:].unflatten(0, self.config.grid).permute(2, 0, 1)  # (d_model, rows, columns)
        table = F.interpolate(table[None], size=grid, mode="bicubic", align_corners=False)[0]
        return torch.cat((self.position[:first], table.flatten(1).mT))


def _build_feedforward(config: VisionConfig) -> nn.Module:
    kind = GatedFeedForward if config.gated else FeedForward
    activation = choose("activation", config.activation, ACTIVATIONS)
    return kind(config.d_model, config.d_hidden, activation=activation, bias=True)


class FirstAndMean(nn.Module):
    """The first token and the mean of the others, concatenated: (B, N, d_model) to (B, 2 * d_model)."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return torch.cat((x[:, 0], Mean()(x[:, 1:], None if mask is None else mask[:, 1:])), -1)


def _probe_pooling(config: VisionConfig) -> ProbePooling:
    attention = MultiHeadAttention(config.d_model, config.heads, attend=Attention(offset=0))
    residual = PreNorm(config.d_model, norm_factory(config.norm, config.eps))
    return ProbePooling(config.d_model, attention, _build_feedforward(config), residual)


POOLINGS: dict[str, Callable[[VisionConfig], nn.Module]] = {
    "first": lambda config: First(),
    "first_mean": lambda config: FirstAndMean(),
    "probe": _probe_pooling,
}
"""Factories of poolings of hidden states, by the names used in configurations."""


def make_image_pooling(config: VisionConfig) -> nn.Module:
    """Build the pooling of a configuration; it maps hidden states (B, N, d_model) and a (B, N) mask to vectors."""
    if config.pooling.startswith("first") and not config.class_token:
        raise ValueError(f"pooling {config.pooling!r} needs a class token; set class_token=True")
    return choose("pooling", config.pooling, POOLINGS)(config)


class ImageClassifier(nn.Module):
    """Classify images (B, C, height, width) by their pooled hidden states: logits (B, classes).

    >>> import torch
    >>> from regard.models.vision import ImageClassifier, VisionConfig
    >>> config = VisionConfig(d_model=32, layers=2, heads=4, d_hidden=64, image=(32, 32), patch=8, classes=10)
    >>> ImageClassifier(config).eval()(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = VisionTransformer(config)
        self.pooling = make_image_pooling(config)
        self.classifier = linear(config.d_model * (2 if config.pooling == "first_mean" else 1), config.classes)

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return logits (B, classes)."""
        return self.classifier(self.pooling(self.encoder(images, mask), self.encoder.token_mask(mask)))
