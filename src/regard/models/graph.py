"""Node classification with graph attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from regard.masks import Mask
from regard.models.components import choose
from regard.nn import ACTIVATIONS, Block, Encoder, FeedForward, GraphAttention, LayerContext, PreNorm, linear


@dataclass(frozen=True)
class GraphConfig:
    """Configuration of a node classifier.

    features: features per node. dropout: of input features, sublayer outputs and attention weights.

    >>> from regard.models.graph import GraphConfig
    >>> GraphConfig(features=5, d_model=16, layers=2, heads=2, d_hidden=32).classes
    2
    """

    features: int
    d_model: int
    layers: int
    heads: int
    d_hidden: int
    classes: int = 2
    activation: str = "gelu"
    dropout: float = 0.0


class NodeClassifier(nn.Module):
    """Classify nodes: features (B, N, features) to logits (B, N, classes).

    The mask defines the graph: `regard.edges(pairs)`, with both directions of every edge and a self-loop per node.

    >>> import regard as rg, torch
    >>> config = rg.models.GraphConfig(features=5, d_model=16, layers=2, heads=2, d_hidden=32)
    >>> model = rg.models.NodeClassifier(config).eval()
    >>> model(torch.randn(1, 3, 5), rg.edges(torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 1, 0]]))).shape
    torch.Size([1, 3, 2])
    """

    def __init__(self, config: GraphConfig) -> None:
        super().__init__()
        self.config = config
        activation = choose("activation", config.activation, ACTIVATIONS)
        self.embedding = linear(config.features, config.d_model)
        self.stack = Encoder(
            [
                Block(
                    GraphAttention(config.d_model, config.heads, dropout=config.dropout),
                    FeedForward(config.d_model, config.d_hidden, activation=activation),
                    residual=lambda: PreNorm(config.d_model, dropout=config.dropout),
                )
                for _ in range(config.layers)
            ],
            norm=nn.LayerNorm(config.d_model),
        )
        self.classifier = linear(config.d_model, config.classes)

    def forward(self, inputs: Tensor, mask: Mask | None = None) -> Tensor:
        """Logits (B, N, classes)."""
        x = self.embedding(F.dropout(inputs, self.config.dropout, self.training))
        x = F.dropout(x, self.config.dropout, self.training)
        x = self.stack(x, context=LayerContext(mask))
        return self.classifier(F.dropout(x, self.config.dropout, self.training))
