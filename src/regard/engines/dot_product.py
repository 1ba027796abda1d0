"""Scores as scaled dot products, for the kernels that know nothing else."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.engines.problem import Problem
from regard.scores import Bilinear, Cosine


def as_dot(problem: Problem, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return query, key and a factor whose scaled dot product is the score."""
    score, at, scale = problem.score, problem.frame.indices(device=query.device), problem.scale
    if isinstance(score, Cosine):
        good = key.isfinite().all(-1, keepdim=True)  # a bad key stays bad, but must not spread a gradient
        key = torch.where(good, _unit(problem, torch.where(good, key, 0.0)), float("nan"))
        query = _unit(problem, query)
    elif isinstance(score, Bilinear):
        # in the compute dtype, so that a more precise matrix keeps its digits
        query = score.project(query.to(problem.compute_dtype), at).to(query.dtype)
    if isinstance(scale, Tensor):
        query, scale = (query * at.per_head(scale.reshape(-1))).to(query.dtype), 1.0
    return query, key, scale


def _unit(problem: Problem, vectors: Tensor) -> Tensor:
    """Normalise vectors, rounding once: float16 cannot represent the smallest norm that they are divided by."""
    return F.normalize(vectors.to(problem.compute_dtype), dim=-1).to(vectors.dtype)
