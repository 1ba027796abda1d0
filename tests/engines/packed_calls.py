"""Tensors, masks and expected results of calls that are repeated with packed arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import regard as rg
from regard.engines.plans import Plans

from .calls import normal

LENGTHS = [7, 4]


def tokens(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [normal(2, heads, 7, 5, seed=seed + n, dtype=dtype) for n, heads in enumerate((4, 2, 2))]


def masks(name: str) -> tuple[rg.Mask | None, Tensor]:
    """A mask, and the tensor that it reads."""
    lengths = torch.tensor(LENGTHS)
    by_name = {
        "none": None,
        "causal": rg.causal(),
        "padding": rg.padding(lengths),
        "both": rg.causal() & rg.padding(lengths),
    }
    return by_name[name], lengths


def plans_of(attend: rg.Attention) -> Plans:
    return attend.__dict__["_plans"]


def warm(attend: rg.Attention, tensors: list[Tensor], **options: Any) -> None:
    """Call until the call is repeated."""
    for _ in range(3):
        attend(*tensors, **options)
    assert plans_of(attend).last is not None


def expected(attend: rg.Attention, tensors: list[Tensor], **options: Any) -> Any:
    wide = [tensor.double() for tensor in tensors]
    return rg.Attention(mask=attend.mask, offset=attend.offset)(*wide, engine="reference", **options)


def close(actual: Tensor, wanted: Tensor) -> bool:
    bound = 3e-2 if actual.dtype in (torch.bfloat16, torch.float16) else 1e-5
    return actual.shape == wanted.shape and torch.allclose(actual.double(), wanted.double(), bound, bound)
