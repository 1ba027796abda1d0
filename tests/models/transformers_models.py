"""Small transformers models with random weights, and calls of their models and ours on the same inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from regard.attention import Attention
from regard.models import (
    Detr,
    DualEncoder,
    ImageClassifier,
    LanguageModel,
    MaskedLanguageModel,
    QuestionAnswering,
    SequenceClassifier,
    TextEncoder,
    TokenClassifier,
    Transformer,
    VisionTransformer,
    Wav2Vec2,
    Whisper,
)
from regard.models.checkpoints.families import FAMILIES
from regard.nn import Block, Encoder
from tests.models.tiny_configs import CASES

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

ARCHITECTURES = {name: entry for family in FAMILIES for name, entry in family.architectures.items()}
FIRST = {
    family.model_type: name for family in FAMILIES
    for name, case in reversed(CASES.items()) if case.architecture in family.architectures
}  # fmt: skip
"""The first case of every family."""


def _cases(*models: type[nn.Module]) -> list[str]:
    """Return the names of the cases that load as one of these models."""
    return [name for name, case in CASES.items() if ARCHITECTURES[case.architecture].model in models]


DECODERS, PAIRS = _cases(LanguageModel), _cases(Transformer)
PICTURES, SOUNDS = _cases(VisionTransformer, ImageClassifier, Detr), _cases(Whisper, Wav2Vec2)
DUALS = _cases(DualEncoder)
TEXTS = _cases(TextEncoder, MaskedLanguageModel, SequenceClassifier, TokenClassifier, QuestionAnswering)
GRADIENTS = sorted({*FIRST.values()} & {*DECODERS, *PAIRS} | {"bert-mlm", "t5-1.1"})

_draw = torch.Generator().manual_seed(0)
IDS = torch.randint(3, 97, (3, 11), generator=_draw)
TARGETS = torch.randint(3, 97, (3, 6), generator=_draw)
RIGHT = torch.arange(11) < torch.tensor([11, 7, 2])[:, None]
LEFT = RIGHT.flip(1)
TEXTS_WITH_STOP = IDS.masked_fill(torch.arange(11) == RIGHT.sum(1, keepdim=True) - 1, 98).masked_fill(~RIGHT, 1)
PIXELS = torch.randn(2, 3, 32, 48, generator=_draw)
PICTURE = torch.randn(2, 3, 96, 64, generator=_draw)
FEATURES = torch.randn(3, 50, 20, generator=_draw)
WAVES = torch.randn(3, 400, generator=_draw)
SAMPLES = torch.arange(400) < torch.tensor([400, 260, 77])[:, None]
PIXEL_MASK = torch.ones(2, 96, 64, dtype=torch.bool)
PIXEL_MASK[1, 60:] = PIXEL_MASK[1, :, 50:] = False


@cache
def their_model(name: str) -> Any:
    """Return their model, with weights that make attention uneven."""
    case = CASES[name]
    kind = getattr(transformers, case.architecture)
    torch.manual_seed(0)
    built = kind._from_config(kind.config_class(**case.before(case.values)), attn_implementation="eager")
    case.after(built)
    return randomize(built)


def randomize(model: nn.Module) -> Any:
    """Set variance-preserving random weights, and biases and norms that differ from their defaults."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 1.5, generator=draw)
            elif tensor.is_floating_point() and "embed_positions" not in name:  # Marian's are sinusoidal and not stored
                table = "embed" in name or "shared" in name or "wte" in name or "wpe" in name
                scale = 0.2 if tensor.dim() < 2 else 0.7 if table else 1.5 / math.sqrt(tensor[0].numel())
                tensor.copy_(torch.randn(tensor.shape, generator=draw) * scale + (1 if _is_norm(name, tensor) else 0))
    return model.eval()


def _is_norm(name: str, tensor: Tensor) -> bool:
    return tensor.dim() == 1 and name.endswith("weight")


def save_their_model(name: str, folder: Path) -> Path:
    their_model(name).save_pretrained(folder)
    return folder


@dataclass
class Recording:
    """Recorded call of a model: its result, the outputs of its blocks and stacks, and attention weights."""

    result: Any
    hidden: list[Tensor]
    last: list[Tensor]
    weights: list[Tensor]


@contextmanager
def recording(model: nn.Module) -> Iterator[Recording]:
    """Record the outputs of blocks and stacks and all attention weights of our model."""
    record = Recording(None, [], [], [])
    call = Attention.__call__

    def attend(self: Attention, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Any:
        record.weights.append(self.weights(query, key))
        return call(self, query, key, value, **kwargs)

    hooks = []
    for module in model.modules():
        if isinstance(module, (Block, Encoder)):
            outputs = record.hidden if isinstance(module, Block) else record.last
            hooks.append(module.register_forward_hook(lambda _, __, out, outputs=outputs: outputs.append(out)))
    Attention.__call__ = attend  # type: ignore[method-assign]
    try:
        yield record
    finally:
        Attention.__call__ = call  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()


def mask_of(name: str) -> Tensor:
    """The real tokens; all, where in Transformers the longest row of a batch changes the others."""
    if not CASES[name].padded:
        return torch.ones_like(LEFT)
    return LEFT if name in DECODERS else RIGHT


def ours(name: str, model: Any) -> Any:
    """Return the result of our model."""
    if name in DUALS:
        return model(PIXELS[..., :32], TEXTS_WITH_STOP, RIGHT)
    if name in PICTURES:
        return model(PICTURE, PIXEL_MASK) if name == "detr" else model(_pixels(name))
    if name in SOUNDS:
        return model(FEATURES, TARGETS) if name == "whisper" else model(WAVES, SAMPLES)
    if name in PAIRS:
        return model(IDS, TARGETS, RIGHT)
    return model(IDS, mask_of(name))


def theirs(name: str, model: Any, **options: bool) -> Any:
    """Return the outputs of their model."""
    if name in DUALS:
        inputs = {"input_ids": TEXTS_WITH_STOP, "attention_mask": RIGHT.long(), "pixel_values": PIXELS[..., :32]}
        return model(**inputs, **options)
    if name == "detr":
        return model(PICTURE, pixel_mask=PIXEL_MASK.long(), **options)
    if name in PICTURES:
        return model(_pixels(name), **options)
    if name == "whisper":
        return model(input_features=FEATURES.mT, decoder_input_ids=TARGETS, **options)
    if name in SOUNDS:
        return model(WAVES, attention_mask=SAMPLES.long(), **options)
    if name in PAIRS:
        return model(input_ids=IDS, attention_mask=RIGHT.long(), decoder_input_ids=TARGETS, **options)
    mask = mask_of(name)
    positions = {"position_ids": (mask.long().cumsum(1) - 1).clamp(min=0)} if name in DECODERS else {}
    return model(input_ids=IDS, attention_mask=mask.long(), **positions, **options)


def _pixels(name: str) -> Tensor:
    return PIXELS if name == "vit-classifier" else PIXELS[..., :32]


def result(outputs: Any) -> Any:
    """Select the tensor of their outputs that our model returns."""
    if "logits_per_image" in outputs:
        return outputs.logits_per_image
    if "pred_boxes" in outputs:
        return outputs.logits, outputs.pred_boxes
    if "start_logits" in outputs:
        return torch.stack((outputs.start_logits, outputs.end_logits), -1)
    return next(outputs[key] for key in ("logits", "prediction_logits", "last_hidden_state") if key in outputs)


def real(name: str, tensor: Tensor) -> Tensor:
    """Select the values of real tokens, without padding."""
    if name in SOUNDS and name != "whisper":
        frames = torch.arange(tensor.shape[1]) < torch.tensor([19, 12, 3])[:, None]
        return tensor[frames]
    if name in PICTURES or name in DUALS or name in PAIRS or name in SOUNDS or tensor.dim() != 3:
        return tensor
    return tensor[mask_of(name)]
