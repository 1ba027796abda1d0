"""Masks: which keys each query may attend to."""

from regard.masks.algebra import Mask
from regard.masks.by_position import documents, ranges
from regard.masks.compositions import bigbird, longformer
from regard.masks.explicit import blocks, dense, edges, random_blocks, where
from regard.masks.patterns import causal, dilated, global_tokens, padding, prefix, window
from regard.masks.tiles import Tiles, tiles

__all__ = [
    "Mask",
    "Tiles",
    "bigbird",
    "blocks",
    "causal",
    "dense",
    "dilated",
    "documents",
    "edges",
    "global_tokens",
    "longformer",
    "padding",
    "prefix",
    "random_blocks",
    "ranges",
    "tiles",
    "where",
    "window",
]
