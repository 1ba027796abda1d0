"""What models share: parts by the names of configurations, and inputs in their three forms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.nn import (
    PostNorm,
    PreNorm,
    Residual,
    SandwichNorm,
    UnitRMSNorm,
)

T = TypeVar("T")

NORMS: dict[str, Callable[..., nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "unit_rms": UnitRMSNorm}
ARRANGEMENTS: dict[str, Callable[..., Residual]] = {"pre": PreNorm, "post": PostNorm, "sandwich": SandwichNorm}


def norm_factory(name: str, eps: float) -> Callable[[int], nn.Module]:
    """A maker of norms, by its name in a configuration."""
    return partial(choose("norm", name, NORMS), eps=eps)


def choose(what: str, name: str, among: dict[str, T]) -> T:
    """The part of this name."""
    if name not in among:
        raise ValueError(f"{what} must be one of {', '.join(among)}, but is {name!r}")
    return among[name]


def upcast(x: Tensor) -> Tensor:
    """In float32 at least: what is summed, or goes through a softmax."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def make_embedding(count: int, d_model: int, std: float = 0.02) -> nn.Embedding:
    """A table of vectors from N(0, std^2)."""
    made = nn.Embedding(count, d_model, device="meta").to_empty(device=torch.get_default_device())
    nn.init.normal_(made.weight, std=std)
    return made


def embed_tokens(ids: Tensor, table: nn.Embedding) -> Tensor:
    """The vectors (..., d_model) of token ids; ids that the table has not are told."""
    if torch.compiler.is_compiling():
        return F.embedding(ids, table.weight)
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"token ids must be whole numbers, int64 or int32, but are {ids.dtype}")
    try:
        return F.embedding(ids, table.weight)
    except IndexError:
        least, most = int(ids.min()), int(ids.max())
        raise ValueError(
            f"token ids must be in 0 ... {table.num_embeddings - 1}, but {least if least < 0 else most} came; "
            "is it the tokenizer of this model?"
        ) from None
