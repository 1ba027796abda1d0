"""Residual networks (ResNet)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models.components import choose


class FrozenBatchNorm(nn.Module):
    """Batch norm with fixed statistics and weights: buffers, filled from a checkpoint and not trained.

    >>> import torch
    >>> from regard.models.resnet import FrozenBatchNorm
    >>> norm = FrozenBatchNorm(3).train()
    >>> torch.allclose(norm(torch.ones(2, 3, 4, 4)), torch.tensor(1.0), atol=1e-5), list(norm.parameters())
    (True, [])
    """

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight, self.bias = nn.Buffer(torch.ones(channels)), nn.Buffer(torch.zeros(channels))
        self.running_mean, self.running_var = nn.Buffer(torch.zeros(channels)), nn.Buffer(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


Norm = Callable[[int], nn.Module]
NORMS: dict[str, Norm] = {
    "frozen": FrozenBatchNorm,
    "batch": nn.BatchNorm2d,
    # Groups of a single channel would amplify the noise of inactive channels.
    "group": lambda channels: nn.GroupNorm(math.gcd(32, max(1, channels // 8), channels), channels),
}


@dataclass(frozen=True)
class ResNetConfig:
    """A residual network. The defaults are ResNet-50's.

    widths, depths: channels and blocks of each stage. bottleneck: blocks of 1x1, 3x3, 1x1
        convolutions instead of 3x3, 3x3.
    norm: "frozen" for pretrained weights, "batch", or "group", for training from scratch on few images.

    >>> from regard.models.resnet import RESNETS
    >>> RESNETS["resnet18"].widths
    (64, 128, 256, 512)
    """

    stem: int = 64
    widths: tuple[int, ...] = (256, 512, 1024, 2048)
    depths: tuple[int, ...] = (3, 4, 6, 3)
    bottleneck: bool = True
    channels: int = 3
    norm: str = "frozen"


RESNETS = {
    "resnet18": ResNetConfig(widths=(64, 128, 256, 512), depths=(2, 2, 2, 2), bottleneck=False),
    "resnet34": ResNetConfig(widths=(64, 128, 256, 512), bottleneck=False),
    "resnet50": ResNetConfig(),
}


class ResNet(nn.Module):
    """Images (B, C, height, width) to features (B, widths[-1], height / 32, width / 32), sizes rounded up.

    Convolutions start from N(0, 2 / fan_out). The weight of the last norm of every block starts from 0, so that blocks
    start as the identity; frozen norms, which are for pretrained weights, are the exception.

    >>> import torch
    >>> from regard.models.resnet import ResNet, ResNetConfig
    >>> model = ResNet(ResNetConfig(stem=8, widths=(8, 16), depths=(1, 1), bottleneck=False)).eval()
    >>> model(torch.randn(1, 3, 33, 64)).shape
    torch.Size([1, 16, 5, 8])
    """

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        norm = choose("norm", config.norm, NORMS)
        self.stem = Convolution(config.channels, config.stem, 7, norm, stride=2)
        stages, channels = [], config.stem
        for n, (width, depth) in enumerate(zip(config.widths, config.depths, strict=True)):
            blocks = [_Block(channels, width, norm, stride=2 if n else 1, bottleneck=config.bottleneck)]
            blocks += [_Block(width, width, norm, bottleneck=config.bottleneck) for _ in range(depth - 1)]
            stages.append(nn.Sequential(*blocks))
            channels = width
        self.stages = nn.Sequential(*stages)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem(images)), 3, stride=2, padding=1)
        return self.stages(x)


class Convolution(nn.Module):
    """A convolution without bias, followed by a norm."""

    def __init__(self, inputs: int, outputs: int, size: int, norm: Norm, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_out", nonlinearity="relu")
        self.norm = norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class _Block(nn.Module):
    """`relu(shortcut(x) + convolutions(x))`; the first 3x3 convolution has the stride."""

    def __init__(self, inputs: int, outputs: int, norm: Norm, *, stride: int = 1, bottleneck: bool) -> None:
        super().__init__()
        inner = outputs // 4 if bottleneck else outputs
        parts: Sequence[Convolution] = (
            (
                Convolution(inputs, inner, 1, norm),
                Convolution(inner, inner, 3, norm, stride),
                Convolution(inner, outputs, 1, norm),
            )
            if bottleneck
            else (Convolution(inputs, inner, 3, norm, stride), Convolution(inner, outputs, 3, norm))
        )
        self.parts = nn.ModuleList(parts)
        if isinstance(weight := parts[-1].norm.weight, nn.Parameter):
            nn.init.zeros_(weight)
        same = inputs == outputs and stride == 1
        self.shortcut = None if same else Convolution(inputs, outputs, 1, norm, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for part in self.parts[:-1]:
            y = F.relu(part(y))
        return F.relu(self.parts[-1](y) + (x if self.shortcut is None else self.shortcut(x)))
