"""Detection: DETR, which finds the objects of an image as one set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.geometry import format_shape
from regard.models.blocks import build_blocks
from regard.models.boxes import Objects, SetLoss, to_corners
from regard.models.components import make_embedding, norm_factory
from regard.models.resnet import ResNet, ResNetConfig
from regard.nn import Decoder, Encoder, LayerContext, MultiHeadAttention, key_mask, linear
from regard.sharding import current_sharding


@dataclass(frozen=True)
class DetrConfig:
    """DETR. The defaults are those of DETR with ResNet-50, trained on COCO.

    classes: without the one that says that there is no object. queries: how many objects are found at most.
    d_hidden: width within the feed-forward parts. decoder_layers: as many as layers unless told otherwise.
    attention_dropout: of the weights, dropout unless told otherwise.
    anchors: every query stands at a point of the image, first on a grid, and looks and tells its box from there; it
        is meant to find things after fewer steps than free queries, which DETR has.

    >>> from regard.models.detection import DetrConfig
    >>> DetrConfig().backbone.depths
    (3, 4, 6, 3)
    """

    classes: int = 91
    queries: int = 100
    d_model: int = 256
    layers: int = 6
    heads: int = 8
    d_hidden: int = 2048
    decoder_layers: int | None = None
    backbone: ResNetConfig = field(default_factory=ResNetConfig)
    arrangement: str = "post"
    eps: float = 1e-5
    activation: str = "relu"
    dropout: float = 0.1
    attention_dropout: float | None = None
    anchors: bool = False


class Detr(nn.Module):
    """Images to classes and boxes: (B, C, height, width) to logits (B, Q, classes + 1) and boxes (B, Q, 4).

    Boxes are centre x, centre y, width, height, as shares of the image; the last class is "no object". mask (B, height,
    width) bool: True for real pixels, where images of different sizes share a batch; boxes are then shares of the real
    part. Object queries start from N(0, 1), projections from N(0, 1 / fan_in).

    >>> import torch
    >>> from regard.models.detection import Detr, DetrConfig
    >>> from regard.models.resnet import ResNetConfig
    >>> small = ResNetConfig(stem=8, widths=(8, 16), depths=(1, 1), bottleneck=False)
    >>> config = DetrConfig(classes=5, queries=7, d_model=32, layers=2, heads=4, d_hidden=64, backbone=small)
    >>> logits, boxes = Detr(config).eval()(torch.randn(2, 3, 64, 48))
    >>> logits.shape, boxes.shape
    (torch.Size([2, 7, 6]), torch.Size([2, 7, 4]))
    """

    def __init__(self, config: DetrConfig) -> None:
        super().__init__()
        self.config = config
        d_model = config.d_model
        self.backbone = ResNet(config.backbone)
        self.project = linear(config.backbone.widths[-1], d_model)
        self.queries = make_embedding(config.queries, d_model, std=0.1 if config.anchors else 1.0)
        self.points = nn.Parameter(_grid(config.queries).logit()) if config.anchors else None
        norm = norm_factory("layer", config.eps)
        last = norm(d_model) if config.arrangement == "pre" else None
        self.encoder = Encoder(build_blocks(config, config.layers, norm), norm=last)
        crossed = build_blocks(config, config.decoder_layers or config.layers, norm, cross=True)
        self.decoder = Decoder(crossed, norm=norm(d_model))
        self.classifier = linear(d_model, config.classes + 1)
        self.boxes = nn.Sequential(
            linear(d_model, d_model), nn.ReLU(), linear(d_model, d_model), nn.ReLU(), linear(d_model, 4)
        )
        if config.anchors:
            self._init_local_attention()

    def forward(self, images: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits (B, Q, classes + 1) and boxes (B, Q, 4)."""
        return self.heads(self.hidden(images, mask)[-1])

    def heads(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states of the decoder (..., Q, d_model) to logits and boxes."""
        boxes = self.boxes(hidden)
        if self.points is not None:
            boxes = torch.cat((boxes[..., :2] + self.points, boxes[..., 2:]), -1)
        return self.classifier(hidden), boxes.sigmoid()

    @torch.no_grad()
    def _init_local_attention(self) -> None:
        """Start from queries and keys projected alike, so that a query attends to what is near it, and boxes there."""
        for layer in self.decoder.layers:
            cross = layer.cross
            assert isinstance(cross, MultiHeadAttention)
            wide = cross.widths[0]
            cross.qkv.weight[wide : 2 * wide] = cross.qkv.weight[:wide]
        last = self.boxes[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)

    def hidden(self, images: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """What each layer of the decoder makes of the queries, after the last norm: (B, Q, d_model) each."""
        features = self.backbone(images)  # (B, channels, rows, columns)
        seen = None if mask is None else _downsample_mask(mask, images, features)
        x = self.project(features.flatten(2).mT)  # (B, rows * columns, d_model)
        where = sine_positions if self.points is None else local_sine_positions
        place = where(features, self.config.d_model, seen)
        keys = None if seen is None else key_mask(seen.flatten(1))
        encoded = self.encoder(x, context=LayerContext(keys, query_position=place, key_position=place))
        query = self.queries.weight
        if self.points is not None:  # rows first, as `near_positions` has it
            query = query + _waves(self.points.sigmoid().flip(-1), self.config.d_model).flatten(-2).to(query.dtype)
        query = query.expand(len(x), -1, -1)
        among = LayerContext(query_position=query, key_position=query)
        cross_context = LayerContext(keys, query_position=query, key_position=place)
        x, found, sharding = torch.zeros_like(query), [], current_sharding()
        if sharding is not None:
            x, encoded, among, cross_context = (
                sharding.to_local(x, 1),
                sharding.to_local(encoded, 1),
                among.to_local(),
                cross_context.to_local(),
            )
        for layer in self.decoder.layers:
            x = layer(x, encoded, context=among, cross_context=cross_context)
            found.append(x if sharding is None else sharding.full_tensor(x, 1))
        assert self.decoder.norm is not None
        return [self.decoder.norm(x) for x in (found if self.training else found[-1:])]

    def loss(
        self,
        images: Tensor,
        objects: Sequence[Objects],
        mask: Tensor | None = None,
        *,
        criterion: SetLoss | None = None,
    ) -> Tensor:
        """The loss to train by, a scalar: of every layer of the decoder in training, else of the last."""
        criterion = criterion or SetLoss()
        hidden = self.hidden(images, mask)
        # The layers as one larger batch: each has the same objects, so that the mean over them is the sum over a share.
        return criterion.total(criterion(*self.heads(torch.cat(hidden)), [*objects] * len(hidden))) * len(hidden)

    @torch.inference_mode()
    def detect(
        self, images: Tensor, mask: Tensor | None = None, *, threshold: float = 0.7
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """What is in each image: labels (n,), scores (n,) of at least the threshold, best first, and boxes (n, 4).

        Boxes are left, top, right, bottom, as shares of the image.
        """
        logits, boxes = self(images, mask)
        scores, labels = logits.softmax(-1)[..., :-1].max(-1)
        found = []
        for score, label, box in zip(scores, labels, to_corners(boxes), strict=True):
            order = score.argsort(descending=True)
            order = order[score[order] >= threshold]
            found.append((label[order], score[order], box[order]))
        return found


def sine_positions(features: Tensor, d_model: int, seen: Tensor | None = None) -> Tensor:
    """Sines and cosines of row and column, (1 or B, rows * columns, d_model), of a map of features (B, C, rows,
    columns).

    Rows and columns are counted from 1 over what is `seen` (B, rows, columns) and scaled so that the last is at 2 pi.
    The first half of the width tells the row, the second the column.

    >>> import torch
    >>> from regard.models.detection import sine_positions
    >>> sine_positions(torch.zeros(2, 3, 5, 7), 16).shape
    torch.Size([1, 35, 16])
    """
    if seen is None:
        seen = torch.ones(1, *features.shape[2:], dtype=torch.bool, device=features.device)
    axes = []
    for axis in (1, 2):
        place = seen.cumsum(axis).float()
        place = place / (place.narrow(axis, place.shape[axis] - 1, 1) + 1e-6) * (2 * math.pi)
        axes.append(_sines(place, d_model))
    return torch.cat(axes, -1).flatten(1, 2).to(features.dtype)


def _sines(place: Tensor, d_model: int) -> Tensor:
    """Sines and cosines of places (...) at many frequencies, (..., d_model / 2)."""
    half = d_model // 2
    steps = torch.arange(half, device=place.device) // 2 * 2 / half
    angle = place[..., None] * 10000.0**-steps
    return torch.stack((angle[..., 0::2].sin(), angle[..., 1::2].cos()), -1).flatten(-2)


def local_sine_positions(features: Tensor, d_model: int, seen: Tensor | None = None) -> Tensor:
    """Like `sine_positions`, of the middle of each cell, in waves short enough that only near places are alike.

    The waves of `sine_positions` are as long as the image and longer: by them all places look nearly the same at first.

    >>> import torch
    >>> from regard.models.detection import local_sine_positions
    >>> place = local_sine_positions(torch.zeros(1, 3, 8, 8), 32)[0]
    >>> bool(place[9] @ place[10] > place[9] @ place[12])
    True
    """
    if seen is None:
        seen = torch.ones(1, *features.shape[2:], dtype=torch.bool, device=features.device)
    axes = []
    for axis in (1, 2):
        place = seen.cumsum(axis).float()
        axes.append(_waves((place - 0.5) / place.narrow(axis, place.shape[axis] - 1, 1).clamp(min=1), d_model))
    return torch.cat(axes, -1).flatten(1, 2).to(features.dtype)


def _waves(place: Tensor, d_model: int) -> Tensor:
    """Sines and cosines of places (...) in 0 ... 1, from half a wave to four over the image, (..., d_model / 2)."""
    frequencies = math.pi * 8.0 ** torch.linspace(0, 1, d_model // 4, device=place.device)
    angle = place[..., None] * frequencies
    return torch.cat((angle.sin(), angle.cos()), -1)


def _grid(count: int) -> Tensor:
    """Points (count, 2) as x and y, evenly over an image."""
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    at = torch.arange(count)
    return torch.stack(((at % columns + 0.5) / columns, (at // columns + 0.5) / rows), -1)


def _downsample_mask(mask: Tensor, images: Tensor, features: Tensor) -> Tensor:
    """A mask of pixels (B, height, width) as one of features (B, rows, columns)."""
    if mask.dtype != torch.bool or mask.shape != (len(images), *images.shape[2:]):
        raise ValueError(
            f"mask must be bool of (B, height, width) = {(len(images), *images.shape[2:])}, True for real pixels, "
            f"but is {mask.dtype} of {format_shape(mask)}; try mask.bool()"
        )
    return F.interpolate(mask[None].float(), size=features.shape[2:])[0].bool()
