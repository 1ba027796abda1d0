"""Two encoders that map images and texts to vectors of one space: CLIP and SigLIP."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models.components import choose
from regard.models.config_fields import optional_count
from regard.models.decoder_inputs import pad_sources
from regard.models.inputs import Inputs, prepare_inputs
from regard.models.text import TextConfig, TextEncoder
from regard.models.vision import VisionConfig, VisionTransformer, make_image_pooling
from regard.nn import linear


@dataclass(frozen=True)
class DualEncoderConfig:
    """Configuration of a pair of encoders for images and texts. The defaults are CLIP's.

    d_output: width of the space. image_projection: whether pooled images are projected; otherwise their width must be
        d_output. text_bias: of the projection of texts.
    text_pooling: "stop", the first `stop` token of a text, or its largest id if `stop` is None; or "last", the last
        position, for texts that are all padded to one length (SigLIP).
    logit_bias: whether a learned number is added to the logits.

    >>> from regard.models import DualEncoderConfig, TextConfig, VisionConfig
    >>> text = TextConfig(vocabulary=100, d_model=32, layers=1, heads=4, d_hidden=64)
    >>> vision = VisionConfig(d_model=48, layers=1, heads=4, d_hidden=64, image=(32, 32), patch=8)
    >>> DualEncoderConfig(text, vision, d_output=24).text_pooling
    'stop'
    """

    text: TextConfig
    vision: VisionConfig
    d_output: int = 512
    image_projection: bool = True
    text_bias: bool = False
    text_pooling: str = "stop"
    stop: int | None = optional_count(None)
    logit_bias: bool = False


class DualEncoder(nn.Module):
    """Compare images (B, C, height, width) with texts (T, N): logits (B, T), scaled cosines of their vectors.

    Texts are ids with a (T, N) bool mask, packed ids, or a list of ids.

    >>> import torch
    >>> from regard.models import DualEncoder, DualEncoderConfig, TextConfig, VisionConfig
    >>> text = TextConfig(vocabulary=100, d_model=32, layers=1, heads=4, d_hidden=64)
    >>> vision = VisionConfig(d_model=48, layers=1, heads=4, d_hidden=64, image=(32, 32), patch=8)
    >>> model = DualEncoder(DualEncoderConfig(text, vision, d_output=24)).eval()
    >>> model(torch.randn(2, 3, 32, 32), [torch.tensor([5, 6, 99]), torch.tensor([7, 99]), torch.tensor([8, 99])]).shape
    torch.Size([2, 3])
    """

    def __init__(self, config: DualEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.image, self.text = VisionTransformer(config.vision), TextEncoder(config.text)
        self.image_pooling = make_image_pooling(config.vision)
        d_image = config.vision.d_model * (2 if config.vision.pooling == "first_mean" else 1)
        if not config.image_projection and d_image != config.d_output:
            raise ValueError(f"without a projection of images, d_output must be {d_image}, got {config.d_output}")
        self.image_projection = linear(d_image, config.d_output, bias=False) if config.image_projection else None
        self.text_projection = linear(config.text.d_model, config.d_output, bias=config.text_bias)
        self.select = choose("text_pooling", config.text_pooling, {"stop": self._stop, "last": self._last})
        self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        self.bias = nn.Parameter(torch.zeros(())) if config.logit_bias else None

    def forward(self, images: Tensor, texts: Inputs, mask: Tensor | None = None) -> Tensor:
        """Return logits (B, T). mask (T, N): True for real tokens."""
        logits = self.embed_images(images) @ self.embed_texts(texts, mask).mT * self.scale.exp()
        return logits if self.bias is None else logits + self.bias

    def embed_images(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return unit vectors (B, d_output) of images. mask (B, patches): True for patches to attend to."""
        x = self.image_pooling(self.image(images, mask), self.image.token_mask(mask))
        return F.normalize(x if self.image_projection is None else self.image_projection(x), dim=-1)

    def embed_texts(self, texts: Inputs, mask: Tensor | None = None) -> Tensor:
        """Return unit vectors (T, d_output) of texts."""
        ids, mask = pad_sources(texts, mask)
        x = self.text.hidden(prepare_inputs(ids, mask))
        x = x[torch.arange(len(x), device=x.device), self.select(ids, mask)]
        return F.normalize(self.text_projection(x), dim=-1)

    def _stop(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Positions (T,) of the stop tokens."""
        real = ids if mask is None else ids.masked_fill(~mask, -1)
        if self.config.stop is None:
            return real.argmax(-1)
        is_stop = real == self.config.stop
        if not torch.compiler.is_compiling() and not bool(is_stop.any(-1).all()):
            raise ValueError(f"every text must have the stop token {self.config.stop}; add it to the ids")
        return is_stop.int().argmax(-1)

    def _last(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """The last position, for every text."""
        return ids.new_full((len(ids),), ids.shape[1] - 1)
