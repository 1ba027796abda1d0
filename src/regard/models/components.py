"""Components shared by models: norms and residual arrangements by name, embeddings, dtype promotion."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.nn import (
    LayerScale,
    OutputNorm,
    PostNorm,
    PreNorm,
    Residual,
    SandwichNorm,
    UnitRMSNorm,
)

T = TypeVar("T")

NORMS: dict[str, Callable[..., nn.Module]] = {
    "layer": nn.LayerNorm,
    "rms": nn.RMSNorm,
    "unit_rms": UnitRMSNorm,
    "layer_no_bias": partial(nn.LayerNorm, bias=False),
}
ARRANGEMENTS: dict[str, Callable[..., Residual]] = {
    "pre": PreNorm,
    "post": PostNorm,
    "sandwich": SandwichNorm,
    "output": OutputNorm,
    "layer_scale": LayerScale,
}


def norm_factory(name: str, eps: float) -> Callable[[int], nn.Module]:
    """Return a factory of norms by their name in a configuration."""
    return partial(choose("norm", name, NORMS), eps=eps)


def choose(what: str, name: str, among: dict[str, T]) -> T:
    """Look up a component by name; `what` is the field named in the error."""
    if name not in among:
        raise ValueError(f"{what} must be one of {', '.join(among)}, got {name!r}")
    return among[name]


def upcast(x: Tensor) -> Tensor:
    """Convert to float32 or wider, for sums and softmax."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def make_embedding(count: int, d_model: int, std: float = 0.02) -> nn.Embedding:
    """Return an embedding initialised from N(0, std^2)."""
    embedding = nn.Embedding(count, d_model, device="meta").to_empty(device=torch.get_default_device())
    nn.init.normal_(embedding.weight, std=std)
    return embedding


def embed_tokens(ids: Tensor, table: nn.Embedding) -> Tensor:
    """Embed token ids (...) as vectors (..., d_model); raise on ids outside of the table."""
    if torch.compiler.is_compiling():
        return F.embedding(ids, table.weight)
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"token ids must be int64 or int32, got {ids.dtype}")
    try:
        return F.embedding(ids, table.weight)
    except IndexError:
        lowest, highest = int(ids.min()), int(ids.max())
        raise ValueError(
            f"token ids must be in 0 ... {table.num_embeddings - 1}, got {lowest if lowest < 0 else highest}; "
            "check that the tokenizer belongs to this model"
        ) from None
