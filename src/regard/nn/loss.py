"""Cross entropy over a large vocabulary without materialising the logits of all tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.engines.derivatives import active_transforms, tangents_of
from regard.engines.packed_linear import PackedWeight

CHUNK_ROWS = 512  # tokens per chunk of logits
IGNORE_INDEX = -100  # target of ignored tokens, as in torch


def token_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    smoothing: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias), targets, reduction="sum", label_smoothing=smoothing)`.

    hidden (N, d_model), weight (vocabulary, d_model), targets (N,); tokens with target -100 are ignored, as in torch.
    softcap: logits are `softcap * tanh(logits / softcap)`. Matrix products use the wider dtype of weights and hidden
    states; everything else, including the returned loss, is at least float32.

    Logits and their gradients are computed in place in chunks of a few hundred tokens. The full (N, vocabulary) logits
    are materialised only for second derivatives, forward mode and inside torch.func.

    >>> import torch
    >>> import torch.nn.functional as F
    >>> from regard.nn import token_loss
    >>> hidden, weight, targets = torch.randn(5, 8), torch.randn(100, 8), torch.arange(5)
    >>> expected = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    >>> torch.testing.assert_close(token_loss(hidden, weight, targets), expected)
    """
    if hidden.dim() != 2 or weight.dim() != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(
            "expected hidden (N, d_model), weight (vocabulary, d_model) and targets (N,), got "
            f"{tuple(hidden.shape)}, {tuple(weight.shape)} and {tuple(targets.shape)}; flatten batches first"
        )
    if isinstance(weight, PackedWeight):
        weight = weight.clone()
    compiling = torch.compiler.is_compiling()
    if not compiling and (active_transforms() or tangents_of((hidden, weight, bias)) is not None):
        return _cross_entropy(hidden, weight, bias, targets, smoothing, softcap)
    if not compiling:
        if bool((ignored := targets == IGNORE_INDEX).any()):
            hidden, targets = hidden[~ignored], targets[~ignored]
        wrong = targets[(targets < 0) | (targets >= len(weight))]
        if len(wrong):
            raise ValueError(
                f"targets must be in 0 ... {len(weight) - 1}, or {IGNORE_INDEX} to ignore a token, got {int(wrong[0])}"
            )
    with torch.autocast(hidden.device.type, enabled=False):
        needs_grad = torch.is_grad_enabled() and any(
            each is not None and each.requires_grad for each in (hidden, weight, bias)
        )
        dtype = torch.promote_types(hidden.dtype, weight.dtype)
        inputs = hidden.to(dtype), weight.to(dtype), bias, targets
        return _TokenLoss.apply(*inputs, smoothing, softcap, needs_grad, compiling)


def _cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, smoothing: float, softcap: float | None
) -> Tensor:
    """Reference implementation with torch operators, which have derivatives of any order."""
    with torch.autocast(hidden.device.type, enabled=False):
        dtype = torch.promote_types(hidden.dtype, weight.dtype)
        logits = (hidden.to(dtype) @ weight.to(dtype).t()).to(torch.promote_types(dtype, torch.float32))
        if bias is not None:
            logits = logits + bias.to(logits.dtype)
        if softcap is not None:
            logits = softcap * (logits / softcap).tanh()
        return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)


def restricted_loss(logits: Tensor, targets: Tensor, allowed: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Sum of cross entropies over the classes where `allowed` (N, classes) is True; it must be for all targets (N,).

    `smoothing` is spread evenly over the allowed classes of each row, as `F.cross_entropy` does over all.

    >>> import torch
    >>> from regard.nn.loss import restricted_loss
    >>> logits, allowed = torch.zeros(1, 3), torch.tensor([[True, True, False]])
    >>> bool(restricted_loss(logits, torch.tensor([0]), allowed).exp() == 2)
    True
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).masked_fill(~allowed, -torch.inf)
    log_probs = logits.log_softmax(-1)
    loss = (smoothing - 1) * log_probs.gather(1, targets[:, None]).sum()
    if smoothing:
        mean_log_prob = log_probs.masked_fill(~allowed, 0.0).sum(-1) / allowed.sum(-1)
        loss = loss - smoothing * mean_log_prob.sum()
    return loss


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        smoothing: float,
        softcap: float | None,
        needs_grad: bool,
        may_ignore: bool,
    ) -> Tensor:
        vocabulary, wide = weight.shape[0], torch.promote_types(weight.dtype, torch.float32)
        total = hidden.new_zeros((), dtype=wide)
        d_hidden = torch.empty_like(hidden) if needs_grad else None
        d_weight = torch.zeros_like(weight, dtype=wide) if needs_grad else None
        d_bias = torch.zeros_like(bias, dtype=wide) if needs_grad and bias is not None else None
        buffer = hidden.new_empty(min(CHUNK_ROWS, len(hidden)), vocabulary)
        for start in range(0, len(hidden), CHUNK_ROWS):
            x, target = hidden[start : start + CHUNK_ROWS], targets[start : start + CHUNK_ROWS, None]
            real = target != IGNORE_INDEX if may_ignore else None
            target = target if real is None else target.where(real, 0)
            logits = torch.mm(x, weight.t(), out=buffer[: len(x)]).to(wide)
            if bias is not None:
                logits += bias
            slope = None
            if softcap is not None:
                capped = logits.div_(softcap).tanh_()
                slope = 1 - capped.square() if needs_grad else None
                logits = capped.mul_(softcap)
            target_logit = (1 - smoothing) * logits.gather(1, target)
            if smoothing:
                target_logit += smoothing * logits.mean(1, keepdim=True)
            top = logits.amax(1, keepdim=True)
            exponentials = logits.sub_(top).exp_()
            sums = exponentials.sum(1, keepdim=True)
            losses = sums.log() + top - target_logit
            total += (losses if real is None else losses * real).sum()
            if d_hidden is None or d_weight is None:
                continue
            d_logits = exponentials.mul_(1 / sums)
            if smoothing:
                d_logits -= smoothing / vocabulary
            d_logits.scatter_add_(1, target, d_logits.new_full(target.shape, smoothing - 1))
            if slope is not None:
                d_logits *= slope
            if real is not None:
                d_logits *= real
            if d_bias is not None:
                d_bias += d_logits.sum(0)
            narrow = d_logits.to(x.dtype)
            torch.mm(narrow, weight, out=d_hidden[start : start + CHUNK_ROWS])
            if x.dtype == wide:
                d_weight.addmm_(narrow.t(), x)
            else:
                d_weight += narrow.t() @ x
        ctx.save_for_backward(d_hidden, d_weight, d_bias, hidden, weight, bias, targets)
        ctx.options = smoothing, softcap
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grads, inputs, targets = ctx.saved_tensors[:3], ctx.saved_tensors[3:6], ctx.saved_tensors[6]
        needed = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # second derivatives may follow
            loss = _cross_entropy(*inputs, targets, *ctx.options)  # type: ignore[call-arg]
            differentiable = [x for x, need in zip(inputs, needed, strict=True) if need]
            computed = iter(torch.autograd.grad(loss, differentiable, grad_output, create_graph=True))
            return *(next(computed) if need else None for need in needed), *(None,) * 5
        pairs = zip(grads, inputs, strict=True)
        return *(None if grad is None else (grad * grad_output).to(x.dtype) for grad, x in pairs), *(None,) * 5
