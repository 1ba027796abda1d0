"""Image-text matching by cross-attention in both directions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models.blocks import build_blocks
from regard.models.components import norm_factory
from regard.models.inputs import prepare_inputs
from regard.models.text import TextConfig, TextEncoder
from regard.models.vision import VisionConfig, VisionTransformer
from regard.nn import LayerContext, Mean, linear
from regard.sharding import current_sharding


@dataclass(frozen=True)
class MatchConfig:
    """Configuration of an image-text matcher.

    text, vision: the encoders, with equal d_model. layers: number of cross-attention layers, each in both directions; 0
        compares the cosine of independently encoded vectors.

    >>> from regard.models import MatchConfig, TextConfig, VisionConfig
    >>> text = TextConfig(vocabulary=100, d_model=32, layers=1, heads=4, d_hidden=64)
    >>> MatchConfig(text, VisionConfig(d_model=32, layers=1, heads=4, d_hidden=64, image=(32, 32), patch=8)).layers
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
    """One cross-attention layer: words attend to words and patches, patches to patches and words, in parallel."""

    def __init__(self, config: MatchConfig) -> None:
        super().__init__()
        self.text, self.image = (
            build_blocks(side, 1, norm_factory(side.norm, side.eps), cross=True)[0]
            for side in (config.text, config.vision)
        )

    def forward(self, words: Tensor, patches: Tensor, mask: LayerContext) -> tuple[Tensor, Tensor]:
        """Map words (B, N, d_model) and patches (B, 1 + patches, d_model) to the same shapes; mask: of words."""
        unmasked = LayerContext()
        if (sharding := current_sharding()) is not None:
            words, patches = sharding.to_local(words, 1), sharding.to_local(patches, 1)
            mask, unmasked = mask.to_local(), unmasked.to_local()
        outputs = (
            self.text(words, patches, context=mask, cross_context=unmasked),
            self.image(patches, words, context=unmasked, cross_context=mask),
        )
        return (
            outputs if sharding is None else (sharding.full_tensor(outputs[0], 1), sharding.full_tensor(outputs[1], 1))
        )


class ImageTextMatcher(nn.Module):
    """Match pixels (B, C, height, width) with token ids (B, N) and a (B, N) bool mask: logits (B,).

    Both sides are mean-pooled: with a class token, image content is learned several times more slowly.

    >>> import torch
    >>> from regard.models import ImageTextMatcher, MatchConfig, TextConfig, VisionConfig
    >>> text = TextConfig(vocabulary=100, d_model=32, layers=1, heads=4, d_hidden=64)
    >>> vision = VisionConfig(d_model=32, layers=1, heads=4, d_hidden=64, image=(32, 32), patch=8)
    >>> model = ImageTextMatcher(MatchConfig(text, vision)).eval()
    >>> model(torch.randn(2, 3, 32, 32), torch.tensor([[5, 6], [7, 8]])).shape
    torch.Size([2])
    """

    def __init__(self, config: MatchConfig) -> None:
        super().__init__()
        self.config = config
        d_model = config.text.d_model
        if d_model != config.vision.d_model:
            raise ValueError(f"text and vision must have equal d_model, got {d_model} and {config.vision.d_model}")
        if not config.vision.class_token:
            raise ValueError("the vision encoder needs a class token; set class_token=True")
        self.image, self.text = VisionTransformer(config.vision), TextEncoder(config.text)
        self.layers = nn.ModuleList(Fusion(config) for _ in range(config.layers))
        self.pooling = Mean()
        if config.layers:
            self.norm = nn.LayerNorm(2 * d_model)
            self.transform, self.classifier = linear(2 * d_model, d_model), linear(d_model, 1)
        else:
            self.scale, self.bias = nn.Parameter(torch.tensor(math.log(10.0))), nn.Parameter(torch.zeros(()))

    def forward(self, images: Tensor, text: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits (B,)."""
        return self.match(images, text, mask)[0]

    def match(self, images: Tensor, text: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits (B,), and unit vectors (B, d_model) of images and texts from before cross-attention."""
        if len(images) != len(text):
            raise ValueError(f"images and texts must be equally many, got {len(images)} and {len(text)}")
        rows = prepare_inputs(text, mask)
        patches, words = self.image(images), self.text.hidden(rows)
        image_vectors, text_vectors = (
            F.normalize(each, dim=-1) for each in (patches[:, 1:].mean(1), self.pooling(words, mask))
        )
        if not self.config.layers:
            return (image_vectors * text_vectors).sum(-1) * self.scale.exp() + self.bias, image_vectors, text_vectors
        context = LayerContext(rows.context.mask)
        for layer in self.layers:
            words, patches = layer(words, patches, context)
        pooled = self.norm(torch.cat((self.pooling(words, mask), patches[:, 1:].mean(1)), -1))
        return self.classifier(F.gelu(self.transform(pooled)))[:, 0], image_vectors, text_vectors
