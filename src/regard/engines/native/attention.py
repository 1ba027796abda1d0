"""Forward and backward calls of the kernels, and their registration as torch operators."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from regard.engines.dropout import threshold_and_scale
from regard.engines.lowering import LoweredConstants, LoweredTensors
from regard.engines.native.binding import (
    ABSENT,
    DTYPES,
    GRADIENT,
    INTERVALS,
    NO_MASK,
    PROBLEM,
    RESULT,
    TILES,
    call,
    prefer_large_pages,
    row_fields,
    tensor_fields,
)
from regard.engines.tensor_memory import data_address
from regard.quantized import QuantizedTensor

Quantized = tuple[QuantizedTensor, QuantizedTensor]


def pack_problem(x: LoweredTensors, fixed: LoweredConstants, quantized: Quantized | None = None) -> bytes:
    """Pack the problem. `quantized` keys and values replace those of `x`, which then have only their shapes."""
    (B, H, Q, D), (_, G, K, E) = x.query.shape, x.value.shape
    key, value = x.key, x.value
    key_scale = value_scale = None
    if quantized is not None:
        (key, key_scale), (value, value_scale) = ((part.data, part.scale) for part in quantized)
    scale, softcap, temperature, dropout, normalization, normalization_bias = fixed.numbers
    threshold, dropout_scale = threshold_and_scale(dropout)
    radius, wants, *strides = fixed.sizes
    mask = NO_MASK
    intervals: tuple[int, ...] = (0,) * 5
    table: tuple[int, ...] = (0,) * 7
    if len(fixed.mask_layout) == 2:
        mask, (start, stop) = INTERVALS, fixed.mask_layout
        intervals = start.data_ptr(), stop.data_ptr(), *tensor_fields(start)[1:4]
    elif fixed.mask_layout:
        mask, table = TILES, (*(tensor.data_ptr() for tensor in fixed.mask_layout), *strides)
    return PROBLEM.pack(
        B, H, G, Q, K, D, E, DTYPES[x.query.dtype], torch.get_num_threads(), mask, x.sink is not None,
        scale, softcap, temperature, data_address(x.query), *x.query.stride(), 1, data_address(key), *key.stride(), 1,
        data_address(value), *value.stride(), 1,
        *intervals, *table, *row_fields(x.diagonal), *row_fields(x.row_table), *tensor_fields(x.bias),
        0 if x.bias is None else DTYPES[x.bias.dtype], wants, radius,
        0 if fixed.offset is None else fixed.offset.data_ptr(), 0 if x.sink is None else data_address(x.sink),
        0 if fixed.seed is None else int(fixed.seed) & 0xFFFFFFFFFFFFFFFF,
        threshold, DTYPES[key.dtype], dropout_scale, *row_fields(x.weight), *tensor_fields(key_scale),
        *tensor_fields(value_scale), int(normalization), 0, normalization_bias,
    )  # fmt: skip


def empty_output(query: Tensor, d_value: int) -> Tensor:
    """Allocate the output with the memory order of the query's axes."""
    return torch.empty_like(query if d_value == query.shape[3] else query[..., :1].expand(*query.shape[:3], d_value))


def empty_results(query: Tensor, value: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate output, log-sum-exp and mass by distance."""
    real = torch.float64 if query.dtype == torch.float64 else torch.float32
    rows, device = query.shape[:3], query.device
    output = empty_output(query, value.shape[3])
    lse = torch.empty(rows, dtype=real, device=device)
    return output, lse, torch.empty((*rows, 2 * sizes[0] + 1) if sizes[1] else (0,), dtype=real, device=device)


def forward(
    x: LoweredTensors, fixed: LoweredConstants, quantized: Quantized | None = None, max_logit: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, log-sum-exp and mass by distance; `max_logit` (B, H, Q) receives the largest logits."""
    output, lse, mass = empty_results(x.query, x.value, fixed.sizes)
    by_distance = row_fields(mass) if fixed.sizes[1] else ABSENT
    places = output.data_ptr(), *output.stride(), 1, lse.data_ptr(), *lse.stride(), 0, 1, *by_distance
    call("regard_dot_forward", pack_problem(x, fixed, quantized), RESULT.pack(*places, *tensor_fields(max_logit)))
    return output, lse, mass


def forward_output(x: LoweredTensors, fixed: LoweredConstants) -> Tensor:
    """Compute the output alone: for a few tokens, allocating more takes longer than the kernel."""
    output = empty_output(x.query, x.value.shape[3])
    places = output.data_ptr(), *output.stride(), 1, *ABSENT, *ABSENT, *ABSENT
    call("regard_dot_forward", pack_problem(x, fixed), RESULT.pack(*places))
    return output


def _empty_gradients(x: LoweredTensors) -> tuple[Tensor | None, ...]:
    """Allocate the gradients of the differentiated inputs, in the kernel's order; None where an input is None."""
    real = torch.float64 if x.query.dtype == torch.float64 else torch.float32
    grads: list[Tensor | None] = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in x[:3]]
    grads += [None if t is None else torch.empty_like(t) for t in (x.diagonal, x.row_table)]
    grads.append(None if x.bias is None else prefer_large_pages(x.bias.new_empty(x.bias.shape, dtype=real)))
    grads.append(None if x.sink is None else x.query.new_empty(x.query.shape[:3], dtype=real))
    per_head = (*x.query.shape[:2], 1, x.query.shape[3])
    grads.append(None if x.weight is None else x.query.new_empty(per_head, dtype=real))
    return tuple(grads)


def backward(
    x: LoweredTensors,
    fixed: LoweredConstants,
    results: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    wants_bias: bool,
) -> tuple[Tensor | None, ...]:
    """Return gradients in the order of `LoweredTensors`."""
    output, lse, mass = results[0], results[1], results[2] if fixed.sizes[1] else None
    d_output, d_lse, d_mass = grads
    if d_output is None:
        d_output = torch.zeros_like(output)
    dq, dk, dv, d_diagonal, d_table, d_bias, delta, d_weight = _empty_gradients(
        x._replace(bias=x.bias if wants_bias else None)
    )
    d_mass = None if mass is None or d_mass is None else d_mass.contiguous()
    places = (
        tensor_fields(output),
        tensor_fields(lse),
        row_fields(mass),
        tensor_fields(d_output),
        tensor_fields(d_lse),
        row_fields(d_mass),
        tensor_fields(dq),
        tensor_fields(dk),
        tensor_fields(dv),
        row_fields(d_diagonal),
        row_fields(d_table),
        tensor_fields(d_bias),
        tensor_fields(delta),
        tensor_fields(d_weight),
    )
    call("regard_dot_backward", pack_problem(x, fixed), GRADIENT.pack(*chain.from_iterable(places)))
    d_sink = None
    if x.sink is not None and delta is not None:
        share = (x.sink[:, None] - lse).exp()  # the sink's share of each row
        d_sink = -torch.where(share > 0, share * delta, 0.0).sum((0, 2))
    if d_bias is not None and x.bias is not None:
        d_bias = d_bias.to(x.bias.dtype)
    if d_weight is not None and x.weight is not None:
        d_weight = d_weight.sum_to_size(x.weight.shape)
    return dq, dk, dv, d_diagonal, d_table, d_bias, d_sink, d_weight


# Registered operators, for torch.compile and torch.export

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? diagonal, Tensor? row_table, Tensor? bias, Tensor? sink, "
    "Tensor? weight, "
    "Tensor[] mask_layout, Tensor? offset, Tensor? seed, float[] numbers, int[] sizes"
)
_OUTPUTS = "Tensor output, Tensor lse, Tensor mass"
_TENSORS = len(LoweredTensors._fields)  # these are the first inputs


@torch.library.custom_op("regard::dot", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor, Tensor)")
def _dot(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return forward(LoweredTensors(*arguments[:_TENSORS]), LoweredConstants(*arguments[_TENSORS:]))


@_dot.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_results(arguments[0], arguments[2], arguments[_TENSORS + 4])


@torch.library.custom_op(
    "regard::dot_backward",
    mutates_args=(),
    schema=f"({_INPUTS}, {_OUTPUTS}, Tensor? d_output, Tensor? d_lse, Tensor? d_mass) -> Tensor[]",
)
def _dot_backward(*arguments: Any) -> list[Tensor]:
    x, rest = LoweredTensors(*arguments[:_TENSORS]), arguments[_TENSORS:]
    gradients = backward(x, LoweredConstants(*rest[:5]), rest[5:8], rest[8:], x.bias is not None)
    return [grad for grad in gradients if grad is not None]


@_dot_backward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    return [
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for tensor in arguments[:_TENSORS]
        if tensor is not None
    ]


def backward_by_operator(
    x: Sequence[Tensor | None], fixed: Sequence[Any], results: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Return gradients in the order of `LoweredTensors`."""
    gradients = iter(torch.ops.regard.dot_backward(*x, *fixed, *results, *grads))
    return tuple(None if tensor is None else next(gradients) for tensor in x)


def _save_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    layout, offset, seed, *ctx.rest = inputs[_TENSORS:]
    ctx.save_for_backward(*inputs[:_TENSORS], *layout, offset, seed, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple:
    saved = ctx.saved_tensors
    x, layout, (offset, seed), results = saved[:_TENSORS], saved[_TENSORS:-5], saved[-5:-3], saved[-3:]
    gradients = backward_by_operator(x, (layout, offset, seed, *ctx.rest), results, grads)
    return *gradients, [None] * len(layout), None, None, None, None


_dot.register_autograd(_backward, setup_context=_save_context)
