"""Vision Transformers: an image as a sequence of patches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.geometry import format_shape
from regard.models.blocks import build_blocks
from regard.models.components import norm_factory
from regard.models.resnet import NORMS, Convolution
from regard.nn import Encoder, LayerContext, key_mask, linear
from regard.positions import learned


@dataclass(frozen=True)
class VisionConfig:
    """A Vision Transformer. The defaults are those of ViT-Base but for its sizes.

    image: height and width that the table of positions is for, in pixels, multiples of `patch`; others interpolate it.
    stem: channels of 3x3 convolutions before the patches, each of which halves the image; with them a model learns from
        fewer images. A patch is as many pixels as without.
    qkv_bias: whether queries, keys and values have a bias. classes: how many an `ImageClassifier` tells apart.
    attention_dropout: of the weights, dropout unless told otherwise.

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
    classes: int = 1000
    arrangement: str = "pre"
    norm: str = "layer"
    eps: float = 1e-12
    activation: str = "gelu"
    qkv_bias: bool = True
    dropout: float = 0.0
    attention_dropout: float | None = None

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.image[0] // self.patch, self.image[1] // self.patch


class VisionTransformer(nn.Module):
    """Pixels to hidden states, (B, C, height, width) to (B, 1 + patches, d_model); the first is the class token's.

    Height and width are at least one patch; what is left over at the right and the bottom is not looked at. Sizes other
    than `config.image` read the table of positions interpolated (bicubic). mask (B, patches): True where a patch, row
    by row, is to be seen. Patches are embedded by N(0, 1 / fan_in), class token and positions start from N(0, 0.02^2).

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
            raise ValueError(f"image must be whole patches of {config.patch} pixels each way, but is {config.image}")
        left = config.patch >> len(config.stem)
        if left << len(config.stem) != config.patch:
            raise ValueError(
                f"stem of {len(config.stem)} convolutions must halve a patch as often, but it has {config.patch} pixels"
            )
        seen = (config.channels, *config.stem)
        halves = (Convolution(*pair, 3, NORMS["group"], stride=2) for pair in pairwise(seen))
        self.stem = nn.Sequential(*(part for half in halves for part in (half, nn.ReLU())))
        self.patches = nn.Conv2d(seen[-1], config.d_model, left, stride=left)
        nn.init.normal_(self.patches.weight, std=1 / math.sqrt(self.patches.weight[0].numel()))
        assert self.patches.bias is not None
        nn.init.zeros_(self.patches.bias)
        self.first = learned(1, config.d_model)
        self.position = learned(1 + rows * columns, config.d_model)
        norm = norm_factory(config.norm, config.eps)
        self.stack = Encoder(
            build_blocks(config, config.layers, norm, qkv_bias=config.qkv_bias),
            norm=None if config.arrangement == "post" else norm(config.d_model),
        )

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Hidden states (B, 1 + patches, d_model)."""
        patch, channels = self.config.patch, self.config.channels
        if images.dim() != 4 or images.shape[1] != channels or min(images.shape[2:]) < patch:
            raise ValueError(
                f"images must be (B, {channels}, height, width) of at least {patch} x {patch} pixels, "
                f"but are {format_shape(images)}"
            )
        x = self.patches(self.stem(images))  # (B, d_model, rows, columns)
        positions = self.positions((x.shape[2], x.shape[3]))
        x = torch.cat((self.first.expand(len(x), 1, -1), x.flatten(2).mT), 1) + positions
        if self.config.dropout and self.training:
            x = F.dropout(x, self.config.dropout)
        seen = None if mask is None else key_mask(F.pad(mask, (1, 0), value=True), x)
        return self.stack(x, context=LayerContext(seen))

    def positions(self, grid: tuple[int, int]) -> Tensor:
        """The table for a grid of patches, (1 + rows * columns, width)."""
        if grid == self.config.grid:
            return self.position
        table = self.position[1:].unflatten(0, self.config.grid).permute(2, 0, 1)  # (width, rows, columns)
        table = F.interpolate(table[None], size=grid, mode="bicubic", align_corners=False)[0]
        return torch.cat((self.position[:1], table.flatten(1).mT))


class ImageClassifier(nn.Module):
    """Pixels to the logits of a class, (B, C, height, width) to (B, classes), read from the class token.

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
        self.classifier = linear(config.d_model, config.classes)

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits (B, classes)."""
        return self.classifier(self.encoder(images, mask)[:, 0])
