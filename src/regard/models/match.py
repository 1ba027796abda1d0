"""An image and a text, and whether they belong together: cross-attention in both directions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models.blocks import blocks
from regard.models.parts import norm_named, rows_of
from regard.models.text import TextConfig, TextEncoder
from regard.models.vision import VisionConfig, VisionTransformer
from regard.nn import Mean, Shared, linear
from regard.sharding import sharding


@dataclass(frozen=True)
class MatchConfig:
    """A matcher of images and texts.

    text, vision: the encoders of each, of one width. layers: of cross-attention, in both directions at once; 0 for two
        vectors that know nothing of each other, and their cosine.

    >>> from regard.models import MatchConfig, TextConfig, VisionConfig
    >>> text = TextConfig(vocabulary=100, width=32, layers=1, heads=4, hidden=64)
    >>> MatchConfig(text, VisionConfig(width=32, layers=1, heads=4, hidden=64, image=(32, 32), patch=8)).layers
    2
    """

    text: TextConfig
    vision: VisionConfig
    layers: int = 2

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.vision.grid


class Fusion(nn.Module):
    """Words look at themselves and at patches, and patches at themselves and at words, both as they were before."""

    def __init__(self, config: MatchConfig) -> None:
        super().__init__()
        self.text, self.image = (
            blocks(side, 1, norm_named(side.norm, side.eps), cross=True)[0] for side in (config.text, config.vision)
        )

    def forward(self, words: Tensor, patches: Tensor, mask: Shared) -> tuple[Tensor, Tensor]:
        """words (B, N, width) and patches (B, 1 + patches, width); mask: of words."""
        every = Shared()
        if (together := sharding()) is not None:
            words, patches = together.own(words, 1), together.own(patches, 1)
            mask, every = mask.own(), every.own()
        found = (
            self.text(words, patches, shared=mask, across=every),
            self.image(patches, words, shared=every, across=mask),
        )
        return found if together is None else (together.whole(found[0], 1), together.whole(found[1], 1))


class ImageTextMatcher(nn.Module):
    """Pixels (B, C, height, width) and token ids (B, N) with a (B, N) bool mask to logits (B,): they belong together.

    Both sides are pooled by their mean: from a class token, what is in an image is learnt several times as slowly.

    >>> import torch
    >>> from regard.models import ImageTextMatcher, MatchConfig, TextConfig, VisionConfig
    >>> text = TextConfig(vocabulary=100, width=32, layers=1, heads=4, hidden=64)
    >>> vision = VisionConfig(width=32, layers=1, heads=4, hidden=64, image=(32, 32), patch=8)
    >>> model = ImageTextMatcher(MatchConfig(text, vision)).eval()
    >>> model(torch.randn(2, 3, 32, 32), torch.tensor([[5, 6], [7, 8]])).shape
    torch.Size([2])
    """

    def __init__(self, config: MatchConfig) -> None:
        super().__init__()
        self.config = config
        width = config.text.width
        if width != config.vision.width:
            raise ValueError(f"text and vision must have one width, but have {width} and {config.vision.width}")
        self.image, self.text = VisionTransformer(config.vision), TextEncoder(config.text)
        self.layers = nn.ModuleList(Fusion(config) for _ in range(config.layers))
        self.pooling = Mean()
        if config.layers:
            self.norm = nn.LayerNorm(2 * width)
            self.transform, self.classifier = linear(2 * width, width), linear(width, 1)
        else:
            self.scale, self.bias = nn.Parameter(torch.tensor(math.log(10.0))), nn.Parameter(torch.zeros(()))

    def forward(self, images: Tensor, text: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits (B,)."""
        return self.matched(images, text, mask)[0]

    def matched(self, images: Tensor, text: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (B,), and what the encoders say before they meet: unit vectors of images and of texts, (B, width)."""
        if len(images) != len(text):
            raise ValueError(f"images and texts must be as many, but are {len(images)} and {len(text)}")
        rows = rows_of(text, mask)
        patches, words = self.image(images), self.text.hidden(rows)
        seen, said = (F.normalize(each, dim=-1) for each in (patches[:, 1:].mean(1), self.pooling(words, mask)))
        if not self.config.layers:
            return (seen * said).sum(-1) * self.scale.exp() + self.bias, seen, said
        shared = Shared(rows.shared.mask)
        for layer in self.layers:
            words, patches = layer(words, patches, shared)
        pooled = self.norm(torch.cat((self.pooling(words, mask), patches[:, 1:].mean(1)), -1))
        return self.classifier(F.gelu(self.transform(pooled)))[:, 0], seen, said
