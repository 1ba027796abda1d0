"""Set Transformer: classification and regression of sets."""

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
    """Configuration of a Set Transformer.

    features: features per element. layers: number of induced blocks, with `points` points each.
    seeds: number of vectors that the set is pooled to. classes: number of outputs; 1 for regression.

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
    """Classify sets: (B, N, features) to logits (B, classes).

    Sets are (B, N, features) with a (B, N) bool mask, packed, or a list of (n, features). The result does not depend on
    the order of elements. As in the paper, the elements are embedded linearly and the blocks are post-norm.

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
                f"sets must be (B, N, {self.config.features}), got elements of shape {tuple(rows.values.shape[2:])}"
            )
        x = self.embedding(rows.values)
        if rows.packed is not None and len(x) != len(rows.packed):
            x = rows.packed.with_values(x[0])
        for layer in self.layers:
            x = layer(x, rows.mask)
        pooled = self.pooling(x, rows.mask).flatten(1)
        return self.classifier(F.dropout(pooled, self.config.dropout, self.training))
