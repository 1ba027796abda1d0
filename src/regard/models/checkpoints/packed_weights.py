"""Weights of fewer bytes in checkpoint folders: the tensors of a weight `name` (N, K), in regard's own format.

| weight | tensors |
| --- | --- |
| bfloat16 | `name.bfloat16` (N, K) |
| int8 | `name.int8` (N, K) and `name.scale` (N, ceil(K / 32)) float32 |
| int4 | `name.int4` (N, ceil(K / 2)) uint8 and `name.scale` |
| int4 with a minimum | `name.int4`, `name.scale` and `name.minimum` |

A number is int8 * scale, (int4 - 8) * scale or int4 * scale + minimum. Input 2 j is in the low and 2 j + 1 in the high
half of byte j; an odd K leaves the last high half 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.engines.packed_linear import PackedWeight
from regard.engines.weight_formats import GROUP, Quantized
from regard.models.checkpoints.tensor_names import Tensors
from regard.nn.freeze import packed_weights

_BODIES = {"bfloat16": torch.bfloat16, "int8": torch.int8, "int4": torch.uint8}


def rounded_weights(model: nn.Module) -> dict[str, PackedWeight]:
    """Return the packed weights of other formats than float32, by name."""
    return {name: weight for name, weight in packed_weights(model).items() if weight.format != "float32"}


def split(name: str, weight: PackedWeight) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the tensors of a rounded weight."""
    content = weight.quantized()
    if content is None:
        yield f"{name}.bfloat16", weight.unpack().bfloat16()
        return
    numbers = content.numbers
    if content.format != "int8":
        pairs = F.pad(numbers, (0, numbers.shape[1] % 2)).unflatten(1, (-1, 2))
        numbers = pairs[..., 0] | pairs[..., 1] << 4
    yield f"{name}.{'int8' if content.format == 'int8' else 'int4'}", numbers.contiguous()
    yield f"{name}.scale", content.scale.contiguous()  # of one panel, they are a view
    if content.minimum is not None:
        yield f"{name}.minimum", content.minimum.contiguous()


class RoundedWeights:
    """The tensors of a folder under the names of the model, and the content of those that are rounded.

    shapes: those that the model expects, by name; bytes of int4 do not tell whether K is odd.
    """

    def __init__(self, weights: Tensors, shapes: dict[str, tuple[int, ...]]) -> None:
        self.weights, self._shapes = weights, shapes
        names = set(weights.names())
        self._bodies = {
            base: suffix
            for name in names
            for base, _, suffix in [name.rpartition(".")]
            if suffix in _BODIES and base in shapes and base not in names
        }
        self.contents: dict[str, Quantized | Tensor] = {}

    def names(self) -> Iterable[str]:
        parts = {f"{base}.{part}" for base, body in self._bodies.items() for part in (body, "scale", "minimum")}
        return [*(name for name in self.weights.names() if name not in parts), *self._bodies]

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._bodies:
            return self.weights.shape(name)
        return tuple(self.read(name).shape)

    def read(self, name: str) -> Tensor:
        if name not in self._bodies:
            return self.weights.read(name)
        if name not in self.contents:
            self.contents[name] = self._content(name)
        content = self.contents[name]
        return content.dequantize() if isinstance(content, Quantized) else content.float()

    def _content(self, name: str) -> Quantized | Tensor:
        body = self._bodies[name]
        numbers = self.weights.read(f"{name}.{body}")
        if numbers.dim() != 2 or numbers.dtype != _BODIES[body]:
            raise ValueError(f"{name}.{body} must be a matrix of {_BODIES[body]}, got {numbers.dtype} {numbers.shape}")
        if body == "bfloat16":
            return numbers
        present = set(self.weights.names())
        if f"{name}.scale" not in present:
            raise ValueError(f"{name}.{body} has no {name}.scale")
        scale = self.weights.read(f"{name}.scale")
        minimum = self.weights.read(f"{name}.minimum") if f"{name}.minimum" in present else None
        if body == "int4":
            numbers = torch.stack((numbers & 15, numbers >> 4), -1).flatten(1)
            odd = self._shapes[name][-1] == numbers.shape[1] - 1
            numbers = numbers[:, :-1] if odd else numbers
        groups = -(-numbers.shape[1] // GROUP)
        for part in (scale, minimum):
            if part is None:
                continue
            if part.dtype != torch.float32 or part.shape != (len(numbers), groups) or not bool(part.isfinite().all()):
                raise ValueError(
                    f"scales of {name} must be finite float32 of shape {(len(numbers), groups)}, got {part.dtype} "
                    f"{tuple(part.shape)}"
                )
        if body == "int8":
            if minimum is not None:
                raise ValueError(f"{name}.int8 takes no {name}.minimum")
            return Quantized("int8", numbers, scale)
        return Quantized("int4" if minimum is None else "int4_minimum", numbers, scale, minimum)
