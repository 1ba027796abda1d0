"""Linear attention: calls of the kernels of its recurrence, as in engines/native/recurrence.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.engines.native.recurrence import Inputs
from regard.engines.triton import launch as launching
from regard.engines.triton.arguments import Strides
from regard.engines.triton.attention import architecture, product_precision
from regard.engines.triton.availability import why_not_on
from regard.engines.triton.blocks import RecurrenceBlocks, choose_recurrence
from regard.engines.triton.engine import MAX_SIZE, MAX_WIDTH


class RecurrenceArguments(NamedTuple):
    """One call."""

    query: Tensor
    query_strides: Strides
    key: Tensor
    key_strides: Strides
    value: Tensor
    value_strides: Strides
    decay: Tensor | None
    decay_strides: Strides  # four of a decay per channel
    beta: Tensor | None
    beta_strides: Strides
    heads: int
    query_group: int  # heads that share a head of the query
    key_group: int
    value_group: int
    tokens: int
    d: int
    e: int


class RecurrenceGradients(NamedTuple):
    """The arguments of the backward kernels; all that they store is contiguous."""

    d_output: Tensor
    d_output_strides: Strides
    d_final: Tensor | None
    d_final_strides: Strides
    d_query: Tensor  # of all heads, as d_key and d_value
    d_key: Tensor
    d_value: Tensor
    d_decay: Tensor | None  # of single heads: by block of channels
    d_beta: Tensor | None
    d_initial: Tensor | None
    d_written: Tensor | None  # (B, H, N, E)
    d_states: Tensor  # (B, H, chunks, D, E)


def why_not_recurrence(query: Tensor, value: Tensor, features: int) -> str:
    """Return why the kernels do not support queries and keys with this many features, or an empty string."""
    if reason := why_not_on(query.device):
        return reason
    if query.dtype == torch.float64:
        return "the kernels compute in float32, not in float64"
    if features > MAX_WIDTH:
        return f"the kernels support up to {MAX_WIDTH} features, but there are {features}"
    if max(*query.shape, *value.shape) > MAX_SIZE:
        return f"the kernels index up to {MAX_SIZE:,} along an axis"
    return ""


def recurrence_forward(inputs: Inputs, heads: int, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return output (B, H, N, E), the state (B, H, D, E) after the last token, and an empty tensor.

    The gradients compute the states again, so that nothing is saved.
    """
    from regard.engines.triton.kernels.linear import walk_kernel

    query, _, value, _, _, state = inputs
    (B, _, N, D), E, device = query.shape, value.shape[-1], query.device
    output = torch.empty_like(value) if value.shape[1] == heads else value.new_empty(B, heads, N, E)
    final = torch.empty((B, heads, D, E), dtype=torch.float32, device=device)
    blocks = _choose_blocks(inputs)
    x, constants = _pack(inputs, heads), _constants(query.dtype)
    products, _, inverses = _pairs(inputs, heads, blocks, False)
    launching.launch(
        device, walk_kernel, -(-E // blocks.columns) * B * heads, x, products, None, inverses, state, _strides(state),
        output, output.stride(), final, None, None,
        BD=_round_up(D), **constants, **blocks.walk_options(),
    )  # fmt: skip
    return output, final, torch.empty(0, device=device)


def recurrence_backward(
    inputs: Inputs, heads: int, saved: Tensor, d_output: Tensor | None, d_final: Tensor | None
) -> list[Tensor | None]:
    """Return the gradients of the inputs, given those of the output and of the final state (None: zero)."""
    from regard.engines.triton.kernels.linear import linear_gradient_kernel, walk_back_kernel, walk_kernel

    query, key, value, decay, beta, state = inputs
    (B, _, N, D), E, device = query.shape, value.shape[-1], query.device
    blocks = _choose_blocks(inputs)
    chunks, width_blocks = -(-N // blocks.chunk), -(-D // blocks.channels)
    x, constants = _pack(inputs, heads), _constants(query.dtype)

    def empty(*shape: int) -> Tensor:
        return torch.empty((B, heads, *shape), dtype=torch.float32, device=device)

    products, overlaps, inverses = _pairs(inputs, heads, blocks, True)
    states, errors = empty(chunks + 1, D, E), None if beta is None else empty(N, E)
    walks = {"BD": _round_up(D), **constants, **blocks.walk_options()}
    programs = -(-E // blocks.columns) * B * heads
    launching.launch(
        device, walk_kernel, programs, x, products, overlaps, inverses, state, _strides(state), None, (0, 0, 0, 0),
        None, states, errors, **walks,
    )  # fmt: skip
    if d_output is None:
        d_output = value.new_zeros(()).expand(B, heads, N, E)
    of_decay = None
    per_channel = decay is not None and decay.dim() == 4
    if decay is not None:
        shape = decay.shape if per_channel else (width_blocks, *decay.shape)
        of_decay = torch.empty(shape, dtype=torch.float32, device=device)
    g = RecurrenceGradients(
        d_output, d_output.stride(), d_final, _strides(d_final),
        query.new_empty(B, heads, N, D), key.new_empty(B, heads, N, D), value.new_empty(B, heads, N, E), of_decay,
        None if beta is None else empty(N), None if state is None else empty(D, E),
        None if beta is None else empty(N, E), empty(chunks, D, E),
    )  # fmt: skip
    launching.launch(device, walk_back_kernel, programs, x, g, products, inverses, **walks)
    launching.launch(
        device, linear_gradient_kernel, chunks * width_blocks * B * heads, x, g, states, errors,
        BE=blocks.columns, **constants, **blocks.chunk_options(),
    )  # fmt: skip
    d_decay = of_decay.sum(0) if of_decay is not None and not per_channel else of_decay
    return [g.d_query, g.d_key, g.d_value, d_decay, g.d_beta, g.d_initial]


def _pairs(
    inputs: Inputs, heads: int, blocks: RecurrenceBlocks, save: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return P, B if `save`, and T of all chunks, (B, H, chunks, C, C)."""
    from regard.engines.triton.kernels.linear import pairs_kernel

    query, beta, (B, _, N, _) = inputs[0], inputs[4], inputs[0].shape
    shape = B, heads, -(-N // blocks.chunk), blocks.chunk, blocks.chunk
    products = torch.empty(shape, dtype=torch.float32, device=query.device)
    inverses = None if beta is None else torch.empty_like(products)
    overlaps = None if beta is None or not save else torch.empty_like(products)
    launching.launch(
        query.device, pairs_kernel, shape[2] * B * heads, _pack(inputs, heads), products, overlaps, inverses,
        **_constants(query.dtype), **blocks.chunk_options(),
    )  # fmt: skip
    return products, overlaps, inverses


def _pack(inputs: Inputs, heads: int) -> RecurrenceArguments:
    query, key, value, decay, beta, _ = inputs
    return RecurrenceArguments(
        query, query.stride(), key, key.stride(), value, value.stride(), decay, _strides(decay), beta, _strides(beta),
        heads, heads // query.shape[1], heads // key.shape[1], heads // value.shape[1],
        query.shape[2], query.shape[3], value.shape[3],
    )  # fmt: skip


def _strides(tensor: Tensor | None) -> Strides:
    return (0, 0, 0) if tensor is None else tensor.stride()


def _choose_blocks(inputs: Inputs) -> RecurrenceBlocks:
    query, _, _, decay, _, _ = inputs
    single = query.dtype == torch.float32 and product_precision() == "ieee"
    per_channel = decay is not None and decay.dim() == 4
    return choose_recurrence(architecture(query.device), query.shape[2], query.shape[3], short=single or per_channel)


def _constants(dtype: torch.dtype) -> dict[str, Any]:
    """Return the precision of products: tf32 has all digits of numbers with 16 bits."""
    precision = product_precision()
    return {"PRECISION": "tf32" if precision == "ieee" and dtype != torch.float32 else precision}


def _round_up(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())
