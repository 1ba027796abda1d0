"""Merging results over shards of the keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge outputs and log-sum-exps over disjoint shards of the keys into those over all keys.

    outputs (..., Q, E) and lses (..., Q) are results of `attention(..., return_lse=True)`. Pass a sink for one shard
    only, because the log-sum-exp includes it.

    >>> import regard as rg, torch
    >>> q, k, v = torch.randn(3, 1, 2, 8, 4)
    >>> parts = [rg.attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(0, 3), slice(3, 8))]
    >>> output, lse = rg.merge(*zip(*parts))
    >>> torch.allclose(output, rg.attention(q, k, v), atol=1e-6)
    True
    """
    outputs, lses = list(outputs), list(lses)
    if not all(isinstance(tensor, Tensor) for tensor in (*outputs, *lses)):
        raise TypeError("merge: outputs and lses must be tensors, as returned by attention(..., return_lse=True)")
    if not outputs or len(outputs) != len(lses):
        raise ValueError(f"merge needs as many outputs as lses, at least one, got {len(outputs)} and {len(lses)}")
    for output, lse in zip(outputs, lses, strict=True):
        if output.shape[:-1] != lse.shape or output.shape != outputs[0].shape:
            raise ValueError(
                "merge: outputs must all be (..., Q, E) and lses (..., Q), got "
                f"{[tuple(x.shape) for x in outputs]} and {[tuple(x.shape) for x in lses]}"
            )
    stacked = torch.stack(lses)  # (shards, ..., Q)
    largest = stacked.detach().amax(0)
    largest = largest.masked_fill(largest == float("-inf"), 0.0)
    shares = (stacked - largest).exp()
    total = shares.sum(0)
    nothing = total == 0
    total = total.masked_fill(nothing, 1.0)
    summed = (torch.stack(outputs).to(shares.dtype) * (shares / total).unsqueeze(-1)).sum(0)
    return summed.to(outputs[0].dtype), (largest + total.log()).masked_fill(nothing, float("-inf"))


def merge_into(output: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge one more shard into output (..., Q, E) and lse (..., Q), in place."""
    total = torch.logaddexp(lse, part_lse)
    nothing = total == float("-inf")
    own, others = ((x - total).exp().masked_fill(nothing, 0.0).unsqueeze(-1) for x in (lse, part_lse))
    output.mul_(own).add_(part * others)
    lse.copy_(total)
