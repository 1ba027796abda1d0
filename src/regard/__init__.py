"""One library for attention: every kind of it, exact, fused, trainable and visible."""

from regard.attention import Attention, attention
from regard.engines import Explanation, Statistics, merge
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
    padding,
    prefix,
    random_blocks,
    where,
    window,
)
from regard.positions import Bias, alibi, dense_bias, relative, shaw, t5
from regard.scores import Additive, Bilinear, Cosine, Dot, Modified
