"""One library for attention: every kind of it, exact, fused, trainable and visible."""

from regard import launch  # noqa: F401  # isort: skip  # before torch is imported
from regard import models, nn
from regard.attention import Attention
from regard.cache import CacheInfo, cache_info, clear_cache, set_cache_limit
from regard.engines import CannotCompute, Explanation, Statistics, merge
from regard.functional import attention
from regard.linear import LinearAttention, LinearState, favor
from regard.masks import (
    Mask,
    bigbird,
    blocks,
    causal,
    dense,
    dilated,
    documents,
    edges,
    global_tokens,
    longformer,
    neighborhood,
    padding,
    prefix,
    random_blocks,
    ranges,
    selected,
    tree,
    varlen,
    where,
    window,
)
from regard.models.checkpoints import load, save
from regard.nn.packing import Packed, pack, unpack
from regard.normalizations import Entmax, ReLU, Sigmoid, Softmax
from regard.positions import Bias, alibi, dense_bias, learned, relative, rotary, shaw, sinusoidal, t5
from regard.quantized import QuantizedTensor
from regard.scores import Additive, Bilinear, Cosine, Dot, Modified

__version__ = "0.1.0"

__all__ = [
    # the operator
    "Attention",
    "attention",
    "merge",
    "QuantizedTensor",
    "CannotCompute",
    "Explanation",
    "Statistics",
    # memory
    "CacheInfo",
    "cache_info",
    "clear_cache",
    "set_cache_limit",
    # scores
    "Additive",
    "Bilinear",
    "Cosine",
    "Dot",
    "Modified",
    # normalisations
    "Entmax",
    "ReLU",
    "Sigmoid",
    "Softmax",
    # masks
    "Mask",
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
    "tree",
    "varlen",
    "where",
    "window",
    # positions
    "Bias",
    "alibi",
    "dense_bias",
    "learned",
    "relative",
    "rotary",
    "shaw",
    "sinusoidal",
    "t5",
    # modules and models, and packed batches
    "models",
    "nn",
    "load",
    "save",
    "Packed",
    "pack",
    "unpack",
    # linear attention
    "LinearAttention",
    "LinearState",
    "favor",
]
