"""Run a model on a text or an image and return the record, with tokens and the model's output."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.files import require_file
from regard.nn.generate import Beam
from regard.view.capture import capture
from regard.view.inputs import data_url, token_texts
from regard.view.record import Record
from regard.view.token_labels import isolate, label


@torch.no_grad()
def capture_text(model: nn.Module, tokenizer: Any, text: str) -> Record:
    """Capture the attention of a regard model over a text; the model's output becomes `record.note`.

    A model with `encode` and `generate` is a translator: it translates first, and one forward pass over source and
    translation is captured. A model with `generate` only is a language model, and the note lists likely next tokens.
    """
    generates = hasattr(model, "generate")
    if generates and hasattr(model, "encode"):
        return _capture_translation(model, tokenizer, text)
    ids = torch.tensor([_ids(tokenizer, text)], device=next(model.parameters()).device)
    if not ids.shape[1]:
        raise ValueError(f"text must have at least one token, got {text!r}; enter at least one word")
    with capture(model) as record:
        output = model(ids)
    record.text = text
    record.decode(tokenizer)
    if generates:
        record.note = "next: " + _best(output[0, -1], tokenizer)
    elif hasattr(model, "logits"):
        masks = [tokenizer.token_to_id(name) for name in ("[MASK]", "<mask>")]
        at = [n for n, token in enumerate(ids[0].tolist()) if token in masks]
        record.note = "; ".join(_best(output[0, n], tokenizer) for n in at)
    elif hasattr(model, "classifier") and output.dim() == 2:
        record.note = _class(output[0])
    return record


def _ids(tokenizer: Any, text: str) -> list[int]:
    """Encode a text and drop padding, which many saved tokenizers add; the model would attend to it."""
    encoding = tokenizer.encode(text)
    return [token for token, real in zip(encoding.ids, encoding.attention_mask, strict=True) if real]


def _capture_translation(model: Any, tokenizer: Any, text: str) -> Record:
    ids = _ids(tokenizer, text)
    if not ids or ids[-1] != model.config.stop:
        ids = [*ids, model.config.stop]
    source = torch.tensor([ids], device=next(model.parameters()).device)
    generated = model.generate(source, max_new_tokens=min(2 * len(ids) + 16, 256), strategy=Beam(4))[0]
    target = torch.cat([generated.new_tensor([model.config.start]), generated])[None]
    with capture(model) as record:
        model(source, target)
    record.next_token = model.config.stop  # a beam need not end where the greedy next token is `stop`
    record.text = text
    record.decode(tokenizer)
    record.note = tokenizer.decode(generated.tolist())
    return record


@torch.no_grad()
def capture_image(model: nn.Module, path: str | os.PathLike[str], *, mean: float = 0.5, std: float = 0.5) -> Record:
    """Capture the attention of a Vision Transformer over the patches of an image file in any format that Pillow reads.

    The image is resized to the model's image size, and pixels in 0 ... 1 are normalised as (pixel - mean) / std.
    """
    from PIL import Image, ImageOps

    config: Any = next(
        (settings for each in model.modules() if hasattr(settings := getattr(each, "config", None), "grid")), None
    )
    if config is None:
        raise TypeError(f"model must be or contain a VisionTransformer, but is {type(model).__name__}")
    height, width = config.image
    with Image.open(require_file(path)) as file:
        image = ImageOps.exif_transpose(file).convert("L" if config.channels == 1 else "RGB")
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(image, np.float32) / 255)
    pixels = pixels[None] if pixels.dim() == 2 else pixels.permute(2, 0, 1)
    inputs = ((pixels - mean) / std).to(next(model.parameters()))[None]
    with capture(model) as record:
        output = model(inputs)
    if output.dim() == 2:
        record.note = _class(output[0])
    return record.set_image(data_url(image), config.grid, first=1)


def _best(logits: Tensor, tokenizer: Any, count: int = 5) -> str:
    chances, tokens = logits.float().softmax(-1).topk(min(count, logits.shape[-1]))
    words = [isolate(label(token_texts(tokenizer, [token])[0][0])) for token in tokens.tolist()]
    shares = ["<1%" if chance < 0.005 else f"{chance:.0%}" for chance in chances.tolist()]
    return ", ".join(f"{word} {share}" for word, share in zip(words, shares, strict=True))


def _class(logits: Tensor) -> str:
    chances = logits.float().softmax(-1)
    return f"class {int(chances.argmax())} ({float(chances.max()):.0%})"
