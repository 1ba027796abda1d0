"""Results over parts of the keys, merged into the result over all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The output and log-sum-exp over the union of disjoint key shards, from those over each shard.

    outputs (..., Q, E) and lses (..., Q), as `attention(..., return_lse=True)` gives them. A sink must be given to one
    shard only, because the log-sum-exp includes it.

    >>> import regard as rg, torch
    >>> q, k, v = torch.randn(3, 1, 2, 8, 4)
    >>> parts = [rg.attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(0, 3), slice(3, 8))]
    >>> output, lse = rg.merge(*zip(*parts))
    >>> torch.allclose(output, rg.attention(q, k, v), atol=1e-6)
    True
    """
    outputs, lses = list(outputs), list(lses)
    if not all(isinstance(tensor, Tensor) for tensor in (*outputs, *lses)):
        raise TypeError("merge: outputs and lses must be tensors, as attention(..., return_lse=True) gives them")
    if not outputs or len(outputs) != len(lses):
        raise ValueError(f"merge takes as many outputs as lses, at least one, but {len(outputs)} and {len(lses)} came")
    for output, lse in zip(outputs, lses, strict=True):
        if output.shape[:-1] != lse.shape or output.shape != outputs[0].shape:
            raise ValueError(
                "merge: outputs must all be (..., Q, E) and lses (..., Q), but came as "
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
    """The same of two, in place: output (..., Q, E) and lse (..., Q) become those over a shard more."""
    total = torch.logaddexp(lse, part_lse)
    nothing = total == float("-inf")
    own, others = ((x - total).exp().masked_fill(nothing, 0.0).unsqueeze(-1) for x in (lse, part_lse))
    output.mul_(own).add_(part * others)
    lse.copy_(total)
