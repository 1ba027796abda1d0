"""The loss of a large vocabulary, without the logits of all tokens at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 512  # tokens whose logits are held at a time


def token_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, smoothing: float = 0.0
) -> Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias), targets, reduction="sum", label_smoothing=smoothing)`.

    hidden (N, width), weight (vocabulary, width), targets (N,). Logits are computed for a few hundred tokens at a time,
    and what they give to the gradients at once, in place: (N, vocabulary) is never held, nor passed over thrice.
    Differentiable once.

    >>> import torch
    >>> import torch.nn.functional as F
    >>> from regard.nn import token_loss
    >>> hidden, weight, targets = torch.randn(5, 8), torch.randn(100, 8), torch.arange(5)
    >>> theirs = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    >>> torch.testing.assert_close(token_loss(hidden, weight, targets), theirs)
    """
    if hidden.dim() != 2 or weight.dim() != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(
            "expected hidden (N, width), weight (vocabulary, width) and targets (N,), but came "
            f"{tuple(hidden.shape)}, {tuple(weight.shape)} and {tuple(targets.shape)}; flatten batches first"
        )
    with torch.autocast(hidden.device.type, enabled=False):
        wanted = torch.is_grad_enabled() and any(
            each is not None and each.requires_grad for each in (hidden, weight, bias)
        )
        return _TokenLoss.apply(hidden.to(weight.dtype), weight, bias, targets, smoothing, wanted)


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, smoothing: float, wanted: bool
    ) -> Tensor:
        vocabulary, total = weight.shape[0], hidden.new_zeros(())
        d_hidden, d_weight = (torch.empty_like(hidden), torch.zeros_like(weight)) if wanted else (None, None)
        d_bias = torch.zeros_like(bias) if wanted and bias is not None else None
        room = hidden.new_empty(min(ROWS, len(hidden)), vocabulary)
        for start in range(0, len(hidden), ROWS):
            x, target = hidden[start : start + ROWS], targets[start : start + ROWS, None]
            logits = torch.mm(x, weight.t(), out=room[: len(x)])
            if bias is not None:
                logits += bias
            said = (1 - smoothing) * logits.gather(1, target)
            if smoothing:
                said += smoothing * logits.mean(1, keepdim=True)
            top = logits.amax(1, keepdim=True)
            exponentials = logits.sub_(top).exp_()
            sums = exponentials.sum(1, keepdim=True)
            total += (sums.log() + top - said).sum()
            if d_hidden is None or d_weight is None:
                continue
            d_logits = exponentials.mul_(1 / sums)
            if smoothing:
                d_logits -= smoothing / vocabulary
            d_logits.scatter_add_(1, target, d_logits.new_full(target.shape, smoothing - 1))
            torch.mm(d_logits, weight, out=d_hidden[start : start + ROWS])
            d_weight.addmm_(d_logits.t(), x)
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        return *(None if each is None else each * given for each in ctx.saved_tensors), None, None, None
