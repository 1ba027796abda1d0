"""The recurrence of linear attention, with decays and the delta rule.

    S_t   = exp(decay_t) S_{t-1}
    u_t   = v_t, or beta_t (v_t - S_tᵀ k_t) with beta
    S_t  += k_t u_tᵀ
    out_t = S_tᵀ q_t

Tokens of a chunk interact by products, chunks by their state. A decay between two tokens is the exponential of the sum
of the decays between them, never a quotient, so that any decay may be -inf: it clears the state. The compiled kernels
(csrc/recurrence.h, engines/triton/kernels/linear.py) and torch's operators compute the same; the latter have all
derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.engines import derivatives, native, triton
from regard.engines.tensor_memory import is_direct

_CHUNK, _CHANNEL_CHUNK = 32, 16  # the products of a chunk with a decay per channel take O(chunk · D) memory per token


def run_recurrence(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor | None, beta: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return output (B, H, N, E) and the state (B, H, D, E) after the last token.

    query, key (B, heads, N, D), value (B, heads, N, E): H is the largest number of heads, a multiple of the others.
    decay (B, H, N) or (B, H, N, D), beta (B, H, N), state (B, H, D, E): float32 at least.
    """
    inputs = query, key, value, decay, beta, state
    if why_not_kernels(*inputs):
        return scan(*inputs)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    output, final, _ = derivatives.apply(_Recurrence(save, kernels_for(query.device)), *inputs)
    return output, final


def why_not_kernels(
    query: Tensor, key: Tensor, value: Tensor, *others: Tensor | None, features: int | None = None
) -> str:
    """Return why torch computes the recurrence of these tensors, or an empty string. features: of queries and keys."""
    if torch.compiler.is_compiling():
        return "the compiler traces torch's operators"
    if not query.numel() * value.numel():
        return "there is nothing to compute"
    if _is_capturing(query):
        return "a CUDA graph cannot check results"
    given = [x for x in (query, key, value, *others) if x is not None]
    if derivatives.active_transforms() or derivatives.tangents_of(given) is not None or not is_direct(given):
        return "torch's operators support all modes, and subclasses and modes see them"
    if kernels_for(query.device) is native:
        return native.why_missing()
    return triton.why_not_recurrence(query, value, query.shape[-1] if features is None else features)


def kernels_for(device: torch.device) -> ModuleType:
    """Return `native` or `triton`, which compute on a device if they can."""
    return native if device.type == "cpu" else triton


def has_readable_values(*tensors: Tensor) -> bool:
    """Whether a decision may depend on the values of tensors: not if they are traced, transformed, fake or meta."""
    if torch.compiler.is_compiling() or derivatives.active_transforms() or tensors[0].is_meta:
        return False
    return is_direct(tensors) and not _is_capturing(tensors[0])


def _is_capturing(tensor: Tensor) -> bool:
    """Whether calls are recorded into a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def head_count(*tensors: Tensor) -> int:
    return max(x.shape[1] for x in tensors)


@dataclass(frozen=True)
class _Recurrence(derivatives.Operator):
    """The kernels of `native`, or those of `triton`."""

    save: bool  # whether to keep checkpoints for the gradients
    kernels: ModuleType
    outputs = 2  # the third result are the checkpoints

    def compute(self, tensors: derivatives.Tensors) -> tuple[Tensor, ...]:
        results = self.kernels.recurrence_forward(tuple(tensors), head_count(*tensors[:3]), self.save)
        return results if self._are_valid(results) else (*scan(*tensors), results[2])

    def _are_valid(self, results: derivatives.Tensors) -> bool:
        """Whether 0 · NaN may have occurred: the kernels for GPUs do not look for NaN and infinities."""
        if self.kernels is native:
            return True
        return bool(torch.stack([x.isfinite().all() for x in results if x is not None]).all())

    def gradients(
        self,
        tensors: derivatives.Tensors,
        results: derivatives.Tensors,
        grads: derivatives.Tensors,
        wanted: Sequence[bool],
    ) -> derivatives.Tensors:
        if all(grad is None for grad in grads):
            return [None] * len(tensors)
        if not is_direct([x for x in (*tensors, *results, *grads) if x is not None]):
            return self._gradients_by_torch(tensors, grads)
        heads = head_count(*tensors[:3])
        grads_per_head = self.kernels.recurrence_backward(tuple(tensors), heads, results[2], *grads)
        if not self._are_valid(grads_per_head):
            return self._gradients_by_torch(tensors, grads)
        shared = [_sum_heads(grad, x.shape[1]) for grad, x in zip(grads_per_head[:3], tensors[:3], strict=True)]
        return [*shared, *grads_per_head[3:]]

    def _gradients_by_torch(self, tensors: derivatives.Tensors, grads: derivatives.Tensors) -> derivatives.Tensors:
        with torch.enable_grad():
            leaves = [None if x is None else x.detach().requires_grad_() for x in tensors]
            results = self.differentiable(leaves, True)
            pairs = [(x, grad) for x, grad in zip(results, grads, strict=True) if grad is not None]
            inputs = [leaf for leaf in leaves if leaf is not None]
            outputs, given = [x for x, _ in pairs], [grad for _, grad in pairs]
            pulled = iter(torch.autograd.grad(outputs, inputs, given, allow_unused=True))
            return [None if leaf is None else next(pulled) for leaf in leaves]

    def tangents(self, tensors: derivatives.Tensors, tangents: derivatives.Tensors) -> tuple[Tensor, ...]:
        moved = derivatives.push_forward(lambda given: self.differentiable(given, True), tensors, tangents)
        return *self.compute(tensors), *moved[self.outputs :]

    def differentiable(self, tensors: derivatives.Tensors, save: bool) -> tuple[Tensor, ...]:
        return scan(*tensors)


def _sum_heads(grad: Tensor | None, heads: int) -> Tensor | None:
    """Sum the gradients of the heads that share one of the `heads` heads of a tensor."""
    if grad is None or grad.shape[1] == heads:
        return grad
    real = torch.promote_types(grad.dtype, torch.float32)
    return grad.unflatten(1, (heads, -1)).sum(2, dtype=real).to(grad.dtype)


def scan(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor | None, beta: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence by torch's operators."""
    dtype, real = query.dtype, torch.promote_types(query.dtype, torch.float32)
    heads, (B, _, N, D), E = head_count(query, key, value), query.shape, value.shape[-1]
    query, key, value = (x.repeat_interleave(heads // x.shape[1], 1).to(real) for x in (query, key, value))
    state = query.new_zeros(B, heads, D, E) if state is None else state
    per_channel = decay is not None and decay.dim() == 4
    size = _CHANNEL_CHUNK if per_channel else _CHUNK
    if has_readable_values(query, key, value):
        # A product multiplies what a token may not see by 0, and 0 · NaN is NaN.
        given = [x for x in (query, key, value, beta, state) if x is not None]
        finite = all(bool(x.detach().isfinite().all()) for x in given)
        size = size if finite and (decay is None or not bool(decay.detach().isnan().any())) else 1
    if decay is None:
        decay = query.new_zeros(B, heads, N)
    decay = decay if per_channel else decay[..., None]

    query, key, value, decay = (_chunks(x, size) for x in (query, key, value, decay))  # (B, H, n, C, ...)
    beta = None if beta is None else _chunks(beta[..., None], size)
    later = torch.ones(size, size, dtype=torch.bool, device=query.device).tril(-1)[..., None]
    between = torch.where(later, decay[..., None, :], 0).cumsum(-3)  # from after token j to token i
    pairs = between.exp()  # of tokens j > i too, which tril removes
    scores = _products(query, key, pairs).tril()
    overlap = None if beta is None else beta * _products(key, key, pairs).tril(-1)
    before = decay.cumsum(-2).exp()
    readers, writers, keys_before = query * before, key * between[..., -1, :, :].exp(), key * before
    total = before[..., -1, :, None]  # (B, H, n, D or 1, 1)

    outputs = []
    for n in range(query.shape[2]):
        written = value[:, :, n]
        if size == 1:  # NaN in a state that is cleared must not be read
            state = torch.where(total[:, :, n] == 0, 0, state)
        if beta is not None and overlap is not None:
            error = beta[:, :, n] * (written - keys_before[:, :, n] @ state)
            written = torch.linalg.solve_triangular(overlap[:, :, n], error, upper=False, unitriangular=True)
        outputs.append(readers[:, :, n] @ state + scores[:, :, n] @ written)
        state = total[:, :, n] * state + writers[:, :, n].mT @ written
    output = torch.cat(outputs, 2)[:, :, :N] if outputs else query.new_zeros(B, heads, 0, E)
    return output.to(dtype), state


def _chunks(x: Tensor, size: int) -> Tensor:
    """Split (B, H, N, ...) into chunks (B, H, n, size, ...), the last one filled up with zeros."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size))


def _products(left: Tensor, right: Tensor, pairs: Tensor) -> Tensor:
    """Return left·right for all pairs of a chunk, each times its decay (..., C, C, 1 or D)."""
    if pairs.shape[-1] == 1:
        return left @ right.mT * pairs[..., 0]
    return (left[..., :, None, :] * pairs * right[..., None, :, :]).sum(-1)
