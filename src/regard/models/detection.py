"""DETR: object detection as set prediction."""

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
from regard.models.config_fields import same_as
from regard.models.resnet import ResNet, ResNetConfig
from regard.nn import Decoder, Encoder, LayerContext, MultiHeadAttention, key_mask, linear
from regard.sharding import current_sharding


@dataclass(frozen=True)
class DetrConfig:
    """DETR. The defaults are those of DETR with ResNet-50, trained on COCO.

    classes: number of classes without "no object". queries: maximum number of detected objects.
    d_hidden: width of the feed-forward layers. decoder_layers: number of decoder layers, `layers` by default.
    attention_dropout: dropout of attention weights, `dropout` by default.
    anchors: give every query a learned anchor point in the image, initialised on a grid, which its attention and its
        box start from. This is meant to converge in fewer steps than the free queries of the original DETR.

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
    decoder_layers: int | None = same_as("layers")
    backbone: ResNetConfig = field(default_factory=ResNetConfig)
    arrangement: str = "post"
    eps: float = 1e-5
    activation: str = "relu"
    dropout: float = 0.1
    attention_dropout: float | None = same_as("dropout")
    anchors: bool = False


class Detr(nn.Module):
    """Images to classes and boxes: (B, C, height, width) to logits (B, Q, classes + 1) and boxes (B, Q, 4).

    Boxes are centre x, centre y, width, height, relative to the image size; the last class is "no object". mask (B,
    height, width): True for real pixels in batches of images of different sizes; boxes are then relative to the real
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
        decoder_blocks = build_blocks(config, config.decoder_layers or config.layers, norm, cross=True)
        self.decoder = Decoder(decoder_blocks, norm=norm(d_model))
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
        """Map hidden states of the decoder (..., Q, d_model) to logits and boxes."""
        boxes = self.boxes(hidden)
        if self.points is not None:
            boxes = torch.cat((boxes[..., :2] + self.points, boxes[..., 2:]), -1)
        return self.classifier(hidden), boxes.sigmoid()

    @torch.no_grad()
    def _init_local_attention(self) -> None:
        """Initialise query and key projections alike, so that queries attend near their anchors; boxes start there."""
        for layer in self.decoder.layers:
            cross = layer.cross
            assert isinstance(cross, MultiHeadAttention)
            d_query = cross.widths[0]
            cross.qkv.weight[d_query : 2 * d_query] = cross.qkv.weight[:d_query]
        last = self.boxes[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)

    def hidden(self, images: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """Normed outputs (B, Q, d_model) of the decoder layers: of all layers in training, else of the last only."""
        features = self.backbone(images)  # (B, channels, rows, columns)
        cell_mask = None if mask is None else _downsample_mask(mask, images, features)
        x = self.project(features.flatten(2).mT)  # (B, rows * columns, d_model)
        positions_of = sine_positions if self.points is None else local_sine_positions
        position = positions_of(features, self.config.d_model, cell_mask)
        keys = None if cell_mask is None else key_mask(cell_mask.flatten(1))
        encoded = self.encoder(x, context=LayerContext(keys, query_position=position, key_position=position))
        query = self.queries.weight
        if self.points is not None:  # rows first, as in `local_sine_positions`
            query = query + _waves(self.points.sigmoid().flip(-1), self.config.d_model).flatten(-2).to(query.dtype)
        query = query.expand(len(x), -1, -1)
        self_context = LayerContext(query_position=query, key_position=query)
        cross_context = LayerContext(keys, query_position=query, key_position=position)
        x, outputs, sharding = torch.zeros_like(query), [], current_sharding()
        if sharding is not None:
            x, encoded, self_context, cross_context = (
                sharding.to_local(x, 1),
                sharding.to_local(encoded, 1),
                self_context.to_local(),
                cross_context.to_local(),
            )
        for layer in self.decoder.layers:
            x = layer(x, encoded, context=self_context, cross_context=cross_context)
            outputs.append(x if sharding is None else sharding.full_tensor(x, 1))
        assert self.decoder.norm is not None
        return [self.decoder.norm(x) for x in (outputs if self.training else outputs[-1:])]

    def loss(
        self,
        images: Tensor,
        objects: Sequence[Objects],
        mask: Tensor | None = None,
        *,
        criterion: SetLoss | None = None,
    ) -> Tensor:
        """Training loss, a scalar: summed over all decoder layers in training, else of the last layer."""
        criterion = criterion or SetLoss()
        hidden = self.hidden(images, mask)
        # The layers form one larger batch with the same objects; the loss is a mean over them, hence the factor.
        return criterion.total(criterion(*self.heads(torch.cat(hidden)), [*objects] * len(hidden))) * len(hidden)

    @torch.inference_mode()
    def detect(
        self, images: Tensor, mask: Tensor | None = None, *, threshold: float = 0.7
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Detect objects: labels (n,), scores (n,) of at least `threshold`, best first, and boxes (n, 4) per image.

        Boxes are left, top, right, bottom, relative to the image size.
        """
        logits, boxes = self(images, mask)
        scores, labels = logits.softmax(-1)[..., :-1].max(-1)
        outputs = []
        for score, label, box in zip(scores, labels, to_corners(boxes), strict=True):
            order = score.argsort(descending=True)
            order = order[score[order] >= threshold]
            outputs.append((label[order], score[order], box[order]))
        return outputs


def sine_positions(features: Tensor, d_model: int, mask: Tensor | None = None) -> Tensor:
    """Sinusoidal 2D positions (1 or B, rows * columns, d_model) of a feature map (B, C, rows, columns).

    Rows and columns are counted from 1 over the real cells `mask` (B, rows, columns) and scaled so that the last is at
    2 pi. The first half of the channels encodes the row, the second half the column.

    >>> import torch
    >>> from regard.models.detection import sine_positions
    >>> sine_positions(torch.zeros(2, 3, 5, 7), 16).shape
    torch.Size([1, 35, 16])
    """
    if mask is None:
        mask = torch.ones(1, *features.shape[2:], dtype=torch.bool, device=features.device)
    axes = []
    for axis in (1, 2):
        position = mask.cumsum(axis).float()
        position = position / (position.narrow(axis, position.shape[axis] - 1, 1) + 1e-6) * (2 * math.pi)
        axes.append(_sines(position, d_model))
    return torch.cat(axes, -1).flatten(1, 2).to(features.dtype)


def _sines(position: Tensor, d_model: int) -> Tensor:
    """Sines and cosines (..., d_model / 2) of positions (...)."""
    half = d_model // 2
    steps = torch.arange(half, device=position.device) // 2 * 2 / half
    angle = position[..., None] * 10000.0**-steps
    return torch.stack((angle[..., 0::2].sin(), angle[..., 1::2].cos()), -1).flatten(-2)


def local_sine_positions(features: Tensor, d_model: int, mask: Tensor | None = None) -> Tensor:
    """Like `sine_positions`, but of cell centres and with wavelengths so short that only nearby cells are similar.

    The wavelengths of `sine_positions` are at least the size of the image, so that initially all cells are similar.

    >>> import torch
    >>> from regard.models.detection import local_sine_positions
    >>> position = local_sine_positions(torch.zeros(1, 3, 8, 8), 32)[0]
    >>> bool(position[9] @ position[10] > position[9] @ position[12])
    True
    """
    if mask is None:
        mask = torch.ones(1, *features.shape[2:], dtype=torch.bool, device=features.device)
    axes = []
    for axis in (1, 2):
        position = mask.cumsum(axis).float()
        axes.append(_waves((position - 0.5) / position.narrow(axis, position.shape[axis] - 1, 1).clamp(min=1), d_model))
    return torch.cat(axes, -1).flatten(1, 2).to(features.dtype)


def _waves(position: Tensor, d_model: int) -> Tensor:
    """Sines and cosines (..., d_model / 2) of positions (...) in [0, 1], with 0.5 to 4 periods over the image."""
    frequencies = math.pi * 8.0 ** torch.linspace(0, 1, d_model // 4, device=position.device)
    angle = position[..., None] * frequencies
    return torch.cat((angle.sin(), angle.cos()), -1)


def _grid(count: int) -> Tensor:
    """Points (count, 2) as x and y, on a regular grid over the image."""
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    index = torch.arange(count)
    return torch.stack(((index % columns + 0.5) / columns, (index // columns + 0.5) / rows), -1)


def _downsample_mask(mask: Tensor, images: Tensor, features: Tensor) -> Tensor:
    """Downsample a mask of pixels (B, height, width) to feature cells (B, rows, columns)."""
    if mask.dtype != torch.bool or mask.shape != (len(images), *images.shape[2:]):
        raise ValueError(
            f"mask must be bool of (B, height, width) = {(len(images), *images.shape[2:])}, True for real pixels, "
            f"got {mask.dtype} of {format_shape(mask)}; try mask.bool()"
        )
    return F.interpolate(mask[None].float(), size=features.shape[2:])[0].bool()
