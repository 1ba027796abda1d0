"""Readable inputs of a model: token ids as texts, pixels and spectrograms as images."""

from __future__ import annotations

import base64
import codecs
import inspect
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.nn.packing import Packed

SOURCES = ("input_ids", "inputs", "source", "ids", "src", "pixel_values", "images", "input_features", "input_values")
TARGETS = ("decoder_input_ids", "target", "tgt", "text")


def model_inputs(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Return source and target of a model call: ids (n,) of the first sequence or of packed ones, pixels (C, h, w)."""
    try:
        given = dict(inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments)
    except TypeError:
        given = {}
    given = {**{str(n): value for n, value in enumerate(args[:1])}, **given, **kwargs}
    sequences = {}
    for role, names in (("source", (*SOURCES, "0")), ("target", TARGETS)):
        for name in names:
            if (tensor := _first_sequence(given.get(name))) is not None:
                sequences[role] = tensor
                break
    return sequences


def next_token(output: Any) -> int | None:
    """Return the most likely next token if the output is logits (B, n, vocabulary), else None."""
    logits = getattr(output, "logits", output)
    if isinstance(logits, Packed):
        last = logits.values[logits.lengths[0] - 1] if logits.lengths and logits.values.dim() == 2 else None
    else:
        last = logits[0, -1] if isinstance(logits, Tensor) and logits.dim() == 3 and logits.numel() else None
    return None if last is None or not last.is_floating_point() else int(last.argmax())


def _first_sequence(value: Any) -> Tensor | None:
    if isinstance(value, Packed):
        same = len(set(value.lengths)) == 1  # equal lengths run as a batch, and its first row is shown
        value = value.values[: value.lengths[0]] if same else value.values
    elif isinstance(value, list | tuple) and value and all(isinstance(each, Tensor) for each in value):
        value = value[0] if len({len(each) for each in value}) == 1 else torch.cat(list(value))
    elif isinstance(value, Tensor) and value.dim() >= 2 and len(value):
        value = value[0]
    if not isinstance(value, Tensor) or value.dtype == torch.bool or value.dim() > 3:
        return None
    ids = value.dim() == 1 and not value.is_floating_point()
    return value.detach().clone() if ids or (value.dim() >= 2 and value.is_floating_point()) else None


def token_texts(tokenizer: Any, ids: Sequence[int]) -> tuple[list[str], list[int]]:
    """Return the text of every token, including spaces, and the indices of special tokens.

    A byte-level token that ends within a character becomes `…`; the token that completes the character shows it.
    """
    inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(inner, "id_to_token"):
        pieces = [str(piece) for piece in tokenizer.convert_ids_to_tokens(list(ids))]
        known = set(getattr(tokenizer, "all_special_ids", ()))
        return [piece.replace("▁", " ") for piece in pieces], [n for n, token in enumerate(ids) if token in known]
    added = {token for token, about in inner.get_added_tokens_decoder().items() if about.special}
    decoder = inner.decoder
    of_bytes = decoder is not None and "Ġ" not in decoder.decode(["xĠx"])
    letters = {letter: byte for byte, letter in _byte_letters().items()}
    texts, rest = [], codecs.getincrementaldecoder("utf-8")("replace")
    for token in ids:
        piece = inner.id_to_token(int(token))
        if piece is None:
            piece = f"#{int(token)}"
        elif token not in added and of_bytes and all(letter in letters for letter in piece):
            piece = rest.decode(bytes(letters[letter] for letter in piece)) or "…"
        elif token not in added:
            piece = piece.replace("▁", " ")
        else:
            rest.reset()
        texts.append(piece)
    return texts, [n for n, token in enumerate(ids) if int(token) in added]


def _byte_letters() -> dict[int, str]:
    """Return the character that byte-level tokenizers use for each byte: itself if printable, else one from 256 on."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def png_url(pixels: Tensor | np.ndarray) -> str:
    """Return the data URL of a PNG of numbers (C, h, w) or (h, w), scaled from their range to 0 ... 255."""
    from PIL import Image

    array = np.asarray(torch.as_tensor(pixels).float().cpu())
    array = array[None] if array.ndim == 2 else array
    low, high = float(array.min()), float(array.max())
    array = ((array - low) / max(high - low, 1e-12) * 255).round().astype(np.uint8)
    image = Image.fromarray(array[0] if len(array) != 3 else array.transpose(1, 2, 0))
    return data_url(image)


def data_url(image: Any) -> str:
    """Return a PIL image as the data URL of a PNG."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
