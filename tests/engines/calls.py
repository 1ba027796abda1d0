"""Calls used to test every engine."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.engines.select import ENGINES

EXACT = [name for name in ("reference", "tiled", "sdpa", "native") if name in ENGINES]
DROPPING = [name for name in ("reference", "tiled") if name in ENGINES]
INF, NAN = math.inf, math.nan


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(B: int = 2, H: int = 4, G: int = 2, Q: int = 6, K: int = 9, D: int = 5, E: int = 5) -> list[Tensor]:
    return [normal(B, H, Q, D, seed=1), normal(B, G, K, D, seed=2), normal(B, G, K, E, seed=3)]


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def gradients(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.autograd.grad(output, inputs, torch.randn(output.shape, generator=generator).to(output)))


def run(engine: str, tensors: list[Tensor], **description: Any) -> Tensor:
    """Return the output; if the engine does not support the call, check that it raises and let another compute it."""
    problem = rg.Attention(**description).problem(*tensors)
    if engine in ENGINES and ENGINES[engine].why_not(problem):
        with pytest.raises(ValueError, match=f"engine '{engine}' cannot compute this"):
            rg.attention(*tensors, engine=engine, **description)
        return rg.attention(*tensors, **description)
    return rg.attention(*tensors, engine=engine, **description)
