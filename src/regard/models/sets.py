"""The Set Transformer: a set of points to what is said of all of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import Attention
from regard.models.components import choose
from regard.models.inputs import Inputs, prepare_inputs
from regard.nn import (
    ACTIVATIONS,
    CrossBlock,
    FeedForward,
    InducedBlock,
    MultiHeadAttention,
    PostNorm,
    SeedPooling,
    linear,
)


@dataclass(frozen=True)
class SetConfig:
    """A Set Transformer.

    features: numbers of an element. layers: blocks of induced points, of which each has `points`.
    seeds: vectors that the set is pooled to. classes: how many are told apart; 1 for a number.

    >>> from regard.models.sets import SetConfig
    >>> SetConfig(features=3, d_model=32, layers=2, heads=4, d_hidden=64).points
    16
    """

    features: int
    d_model: int
    layers: int
    heads: int
    d_hidden: int
    points: int = 16
    seeds: int = 1
    classes: int = 2
    activation: str = "gelu"
    dropout: float = 0.0


class SetTransformer(nn.Module):
    """Sets of elements to the logits of a class, or to a number: (B, N, features) to (B, classes).

    Sets are (B, N, features) with a (B, N) bool mask, packed, or a list of (n, features). The order of the elements
    changes nothing. It begins with a linear map, and arranges its blocks with the norm behind the sum, as the paper.

    >>> import torch
    >>> from regard.models.sets import SetConfig, SetTransformer
    >>> model = SetTransformer(SetConfig(features=3, d_model=32, layers=2, heads=4, d_hidden=64, classes=10)).eval()
    >>> model([torch.randn(5, 3), torch.randn(2, 3)]).shape
    torch.Size([2, 10])
    """

    def __init__(self, config: SetConfig) -> None:
        super().__init__()
        self.config = config
        attend = Attention(offset=0, dropout=config.dropout)
        activation = choose("activation", config.activation, ACTIVATIONS)

        def block() -> CrossBlock:
            return CrossBlock(
                MultiHeadAttention(config.d_model, config.heads, attend=attend),
                FeedForward(config.d_model, config.d_hidden, activation=activation),
                residual=lambda: PostNorm(config.d_model, dropout=config.dropout),
            )

        self.embedding = linear(config.features, config.d_model)
        self.layers = nn.ModuleList(
            InducedBlock(config.d_model, config.points, block(), block()) for _ in range(config.layers)
        )
        self.pooling = SeedPooling(config.d_model, config.seeds, block())
        self.classifier = linear(config.seeds * config.d_model, config.classes)

    def forward(self, inputs: Inputs, mask: Tensor | None = None) -> Tensor:
        """Logits (B, classes)."""
        rows = prepare_inputs(inputs, mask)
        if rows.values.dim() != 3 or rows.values.shape[-1] != self.config.features:
            raise ValueError(
                f"sets must be (B, N, {self.config.features}), but the elements have {tuple(rows.values.shape[2:])}"
            )
        x = self.embedding(rows.values)
        if rows.packed is not None and len(x) != len(rows.packed):
            x = rows.packed.with_values(x[0])
        for layer in self.layers:
            x = layer(x, rows.mask)
        pooled = self.pooling(x, rows.mask).flatten(1)
        return self.classifier(F.dropout(pooled, self.config.dropout, self.training))
