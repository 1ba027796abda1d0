"""The recurrence of linear attention: decays, the delta rule, and a state that is passed on."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.engines.native.attention import empty_output
from regard.engines.native.binding import (
    CHECKPOINT,
    DTYPES,
    RECURRENCE,
    RECURRENCE_GRADIENT,
    RECURRENCE_RESULT,
    call,
    prefer_large_pages,
    row_fields,
    tensor_fields,
)

Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""query (B, heads, N, D), key (B, heads, N, D), value (B, heads, N, E), decay (B, H, N) or (B, H, N, D), beta (B, H, N)
and state (B, H, D, E). H is a multiple of the heads of each. Decay, beta and state are float32, or float64 with it."""


def recurrence_forward(inputs: Inputs, heads: int, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return output (B, H, N, E), the state (B, H, D, E) after the last token, and checkpoints if `save`."""
    query, _, value, *_ = inputs
    (B, _, N, D), E = query.shape, value.shape[-1]
    real = torch.promote_types(query.dtype, torch.float32)
    like_value = value.shape[1] == heads  # then also in memory, where models have (B, N, H, E)
    output = empty_output(value, E) if like_value else value.new_empty(B, heads, N, E)
    state = torch.empty(B, heads, D, E, dtype=real)
    checkpoints = torch.empty(B, heads, -(-N // CHECKPOINT) if save else 0, D * E, dtype=real)
    places = *tensor_fields(prefer_large_pages(output)), *tensor_fields(state)
    places += row_fields(prefer_large_pages(checkpoints) if save else None)
    call("regard_recurrence_forward", _pack(inputs, heads), RECURRENCE_RESULT.pack(*places))
    return output, state, checkpoints


def recurrence_backward(
    inputs: Inputs, heads: int, checkpoints: Tensor, d_output: Tensor | None, d_final: Tensor | None
) -> list[Tensor | None]:
    """Return the gradients of the inputs, given those of the output and of the final state (None: zero)."""
    query, key, value, decay, beta, state = inputs
    B, N, shared = query.shape[0], query.shape[2], (query, key, value)
    grads: list[Tensor | None] = [prefer_large_pages(x.new_empty(B, heads, N, x.shape[-1])) for x in shared]
    grads += [None if x is None else x.new_empty(x.shape) for x in (decay, beta, state)]
    places = [n for x in (d_output, d_final, *grads) for n in tensor_fields(x)]
    places = [*row_fields(checkpoints), *places]
    call("regard_recurrence_backward", _pack(inputs, heads), RECURRENCE_GRADIENT.pack(*places))
    return grads


def _pack(inputs: Inputs, heads: int) -> bytes:
    query, key, value, decay, beta, state = inputs
    (B, _, N, M), E = query.shape, value.shape[-1]
    places = [n for x in (query, key, value, decay, beta, state) for n in tensor_fields(x)]
    per_channel = decay is not None and decay.dim() == 4
    counts = (x.shape[1] for x in (query, key, value))
    return RECURRENCE.pack(
        B, heads, N, M, E, *counts, DTYPES[query.dtype], torch.get_num_threads(), per_channel, 0, *places
    )
