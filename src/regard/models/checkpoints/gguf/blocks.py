"""Quantised weights of a GGUF file, in the terms of packed weights: the numbers stay as they are stored."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from regard.engines.weight_formats import GROUP, Quantized
from regard.models.checkpoints.gguf.weights import GgufWeights
from regard.models.checkpoints.tensor_names import NOTHING, TensorMapping

FORMATS = {"Q8_0": "int8", "Q4_0": "int4", "Q4_1": "int4_minimum"}


def quantized_weights(
    weights: GgufWeights, mappings: Iterable[TensorMapping], stored_names: dict[str, str], names: Collection[str]
) -> dict[str, Quantized]:
    """Return the weights with these names of the model that are stored as matrices of one of `FORMATS`."""
    contents = {}
    for mapping in mappings:
        parts = [stored_names[name] for name in mapping.theirs if name != NOTHING]
        kinds = {weights.kind(part) for part in parts}
        if mapping.ours not in names or len(parts) != len(mapping.theirs) or len(kinds) != 1 or not kinds <= {*FORMATS}:
            continue
        if any(len(weights.shape(part)) != 2 for part in parts):
            continue
        content = _concatenate([parse_blocks(weights.kind(part), weights.blocks(part)) for part in parts])
        # Other ways to join tensors than one below the other would change the groups.
        if torch.equal(content.dequantize(), mapping.join(weights.read(part) for part in parts)):
            contents[mapping.ours] = content
    return contents


def parse_blocks(kind: str, blocks: Tensor) -> Quantized:
    """Convert the stored bytes of a matrix, uint8 (rows, bytes per row), of a kind in `FORMATS`.

    >>> import torch
    >>> from regard.models.checkpoints.gguf.blocks import parse_blocks
    >>> row = torch.cat([torch.tensor([0.5]).half().view(torch.uint8), torch.arange(32, dtype=torch.uint8)])
    >>> parse_blocks("Q8_0", row[None]).dequantize()[0, :3]
    tensor([0.0000, 0.5000, 1.0000])
    """
    heads = 2 if kind == "Q4_1" else 1
    size = 2 * heads + (GROUP if kind == "Q8_0" else GROUP // 2)
    groups = blocks.unflatten(1, (-1, size))
    scales = groups[..., : 2 * heads].contiguous().view(torch.float16).float()
    body = groups[..., 2 * heads :].contiguous()
    if kind == "Q8_0":
        numbers = body.view(torch.int8)
    else:
        numbers = torch.cat((body & 15, body >> 4), -1)
    minimum = scales[..., 1].clone() if heads == 2 else None
    return Quantized(FORMATS[kind], numbers.flatten(1), scales[..., 0].clone(), minimum)


def _concatenate(parts: list[Quantized]) -> Quantized:
    minimums = [part.minimum for part in parts if part.minimum is not None]
    return Quantized(
        parts[0].format,
        torch.cat([part.numbers for part in parts]),
        torch.cat([part.scale for part in parts]),
        torch.cat(minimums) if minimums else None,
    )
