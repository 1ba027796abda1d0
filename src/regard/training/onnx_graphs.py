"""Graphs that `regard export` writes as ONNX: modules with named inputs, outputs and dynamic axes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.models.pointer import PointerTransformer
from regard.models.speech_synthesis import SpeechSynthesizer
from regard.models.translation import Transformer

Inputs = Mapping[str, tuple[Tensor, tuple[str, ...]]]
IDS = torch.full((2, 7), 5)
MASK = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
SOURCE = ("batch", "source")


class Graph(NamedTuple):
    """A module to trace.

    name: file name without .onnx.
    inputs: an example of each, in the order of `module.forward`, and the names of its leading, dynamic axes.
    outputs: names of the outputs.
    """

    name: str
    module: nn.Module
    inputs: Inputs
    outputs: tuple[str, ...]


def text_graph(model: nn.Module, output: str = "output") -> Graph:
    """Token ids and padding mask to one output."""
    axes = ("batch", "length")
    return Graph("model", model, {"ids": (IDS, axes), "mask": (MASK, axes)}, (output,))


def sound_graph(model: nn.Module, features: int) -> Graph:
    """Log-mel features and padding mask to one output."""
    axes, mask = ("batch", "frames"), torch.arange(200) < torch.tensor([[200], [120]])
    inputs = {"features": (torch.zeros(2, 200, features), axes), "mask": (mask, axes)}
    return Graph("model", model, inputs, ("output",))


def image_graph(model: nn.Module, shape: tuple[int, int, int], *outputs: str) -> Graph:
    """Pixels (batch, channels, height, width), of fixed size, to the outputs."""
    return Graph("model", model, {"pixels": (torch.zeros(2, *shape), ("batch",))}, outputs)


def pair_graphs(model: Transformer) -> tuple[Graph, Graph]:
    """Encoder and decoder of a sequence-to-sequence model."""
    inputs = {
        "target_ids": (torch.full((2, 5), 5), ("batch", "target")),
        "encoded": (torch.zeros(2, 7, model.config.d_model), SOURCE),
        "source_mask": (MASK, SOURCE),
    }
    if isinstance(model, PointerTransformer):
        inputs["source_ids"] = (IDS, SOURCE)
    return _encoder(model), Graph("decoder", Decode(model), inputs, ("logits",))


def speaker_graphs(model: SpeechSynthesizer) -> tuple[Graph, Graph]:
    """Encoder and decoder of a speech synthesizer."""
    inputs = {
        "last_frames": (torch.zeros(2, 5, model.config.features), ("batch", "steps")),
        "encoded": (torch.zeros(2, 7, model.config.d_model), SOURCE),
        "source_mask": (MASK, SOURCE),
    }
    return _encoder(model), Graph("decoder", DecodeFrames(model), inputs, ("frames", "end_logits"))


def _encoder(model: Transformer | SpeechSynthesizer) -> Graph:
    inputs = {"source_ids": (IDS, SOURCE), "source_mask": (MASK, SOURCE)}
    return Graph("encoder", Encode(model), inputs, ("encoded",))


class Encode(nn.Module):
    """Source ids (B, K) and mask (B, K) to hidden states (B, K, d_model)."""

    def __init__(self, model: Transformer | SpeechSynthesizer) -> None:
        super().__init__()
        self.model = model

    def forward(self, source_ids: Tensor, source_mask: Tensor) -> Tensor:
        encoded = self.model.encode(source_ids, source_mask)
        assert isinstance(encoded, Tensor)
        return encoded


class Decode(nn.Module):
    """Target ids (B, N) to the logits (B, N, vocabulary) of the next tokens.

    Logits of suppressed tokens are -inf, so that the largest one is the next token.
    """

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model
        size = model.config.target_vocabulary or model.config.vocabulary
        self.register_buffer("suppressed", torch.isin(torch.arange(size), torch.tensor(model.config.suppress_tokens)))

    def forward(
        self, target_ids: Tensor, encoded: Tensor, source_mask: Tensor, source_ids: Tensor | None = None
    ) -> Tensor:
        if isinstance(self.model, PointerTransformer):
            logits = self.model.decode(target_ids, encoded, source_mask, source=source_ids)
        else:
            logits = self.model.decode(target_ids, encoded, source_mask)
        assert isinstance(logits, Tensor)
        assert isinstance(self.suppressed, Tensor)
        return logits.masked_fill(self.suppressed, -math.inf)


class DecodeFrames(nn.Module):
    """The last frame before each step (B, S, features) to the frames of each step and its end logits."""

    def __init__(self, model: SpeechSynthesizer) -> None:
        super().__init__()
        self.model = model

    def forward(self, last_frames: Tensor, encoded: Tensor, source_mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.decode(last_frames, encoded, source_mask)
