"""The output of a model: probabilities of tokens or classes, or vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.nn.packing import Packed

LARGEST = 1 << 27  # most numbers to keep; of longer sequences, the last positions are kept

OutputKind = Literal["tokens", "classes", "vectors"]


@dataclass(frozen=True, eq=False)
class ModelOutput:
    """What a model returned: logits of tokens or classes, (B, N, V) or (B, 1, V), or other numbers (B, n).

    first: the position of the first row of `values`. labels: names of the classes, if known.
    """

    kind: OutputKind
    values: Tensor
    first: int = 0
    labels: tuple[str, ...] = ()

    @classmethod
    def read(cls, model: nn.Module, output: Any) -> ModelOutput | None:
        """Read the output of a whole model; None if it is of no known form."""
        named = hasattr(output, "logits")
        values = output.logits if named else output
        if not named and not isinstance(values, Tensor | Packed | list | tuple):
            values = getattr(output, "last_hidden_state", None)
        values = _batch(values)
        if values is None or not values.is_floating_point() or not values.numel():
            return None
        values = values.detach()
        config = getattr(model, "config", None)
        labels = getattr(config, "id2label", None) or {}
        classes = tuple(str(labels[n]) for n in range(len(labels))) if set(labels) == set(range(len(labels))) else ()
        if values.dim() == 3 and (hasattr(model, "logits") or (named and len(classes) != values.shape[-1])):
            kept = max(1, LARGEST // (len(values) * values.shape[2]))
            return cls("tokens", values[:, -kept:], max(0, values.shape[1] - kept))
        is_classifier = named or any(hasattr(part, "classifier") for part in (model, config)) or hasattr(config, "grid")
        if values.dim() in (2, 3) and is_classifier:
            values = values[:, None] if values.dim() == 2 else values
            return cls("classes", values, labels=classes if len(classes) == values.shape[-1] else ())
        return cls("vectors", values.flatten(1))

    @property
    def last(self) -> int:
        """The last position with an output."""
        return self.first + self.values.shape[1] - 1

    def probabilities(self, position: int, row: int = 0) -> Tensor:
        """Return the probabilities (V,) at a position, in float64."""
        if self.kind == "vectors":
            raise ValueError("the output of this model is not a distribution over tokens or classes")
        if not self.first <= position <= self.last:
            raise ValueError(f"position must be in {self.first} ... {self.last}, but is {position}")
        return self.values[row, position - self.first].double().softmax(-1)

    def log_likelihood(self, ids: Tensor, row: int = 0) -> Tensor:
        """Return the log-probability of each of the ids (n,) after those before it, (n - 1,)."""
        if self.kind != "tokens" or self.first or len(ids) != self.values.shape[1]:
            raise ValueError("log-probabilities need the logits of a language model at every token")
        return -F.cross_entropy(self.values[row, :-1].double(), ids[1:], reduction="none")

    def top(self, position: int, row: int = 0, count: int = 8) -> list[tuple[int, float]]:
        """Return the most likely (index, probability) at a position."""
        chances, indices = self.probabilities(position, row).topk(min(count, self.values.shape[-1]))
        return list(zip(indices.tolist(), chances.tolist(), strict=True))

    def similarity(self, other: ModelOutput, row: int = 0) -> float:
        """Return the cosine similarity of two outputs that are vectors of the same size."""
        ours, theirs = self.values[row].double(), other.values[row].double()
        if ours.shape != theirs.shape:
            raise ValueError("outputs of different sizes cannot be compared")
        return float(F.cosine_similarity(ours, theirs, 0))


def _batch(values: Any) -> Tensor | None:
    """Return the output of a batch, packed sequences or a list as one tensor (B, ...)."""
    if isinstance(values, Packed):
        same = len(set(values.lengths)) == 1
        return values.values.unflatten(0, (len(values.lengths), -1)) if same else values.values[None]
    if isinstance(values, tuple) and values:
        return _batch(values[0])
    if isinstance(values, list) and values and all(isinstance(each, Tensor) for each in values):
        return torch.stack(values) if len({each.shape for each in values}) == 1 else torch.cat(values)[None]
    return values if isinstance(values, Tensor) and values.dim() >= 2 else None
