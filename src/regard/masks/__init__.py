"""Masks: which keys each query may attend to."""

from regard.masks.algebra import Mask
from regard.masks.by_position import documents, ranges
from regard.masks.compositions import bigbird, longformer
from regard.masks.explicit import blocks, dense, edges, random_blocks, where
from regard.masks.neighborhood import neighborhood
from regard.masks.patterns import causal, dilated, global_tokens, padding, prefix, window
from regard.masks.selected import selected
from regard.masks.tiles import Tiles, tiles
from regard.masks.tree import tree
from regard.masks.varlen import varlen

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
    "neighborhood",
    "padding",
    "prefix",
    "random_blocks",
    "ranges",
    "selected",
    "tiles",
    "tree",
    "varlen",
    "where",
    "window",
]
