"""The kernels as torch operators, for torch.compile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.engines.lowering import LoweredConstants, LoweredTensors
from regard.engines.triton.arguments import Layout, empty_output
from regard.engines.triton.attention import forward
from regard.engines.triton.gradients import backward

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? diagonal, Tensor? row_table, Tensor? bias, Tensor? sink, "
    "Tensor? weight, "
    "Tensor[] layout, Tensor? offset, Tensor? seed, float[] numbers, int[] sizes"
)
_TENSORS = len(LoweredTensors._fields)  # these are the first inputs
_OF_ROWS = {0: 0, 4: 2, 8: 5}  # tensors of a layout by rows, among those by rows and by keys


def run_operator(x: LoweredTensors, fixed: LoweredConstants, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, log-sum-exp and mass by distance by the registered operator."""
    constants = [*layout.rows, *layout.keys], fixed.offset, fixed.seed, list(fixed.numbers)
    return torch.ops.regard.triton_dot(*x, *constants, [*fixed.sizes, *layout.key_strides])


def _unpack(arguments: Sequence[Any]) -> tuple[LoweredTensors, LoweredConstants, Layout]:
    tensors, offset, seed, numbers, sizes = arguments[_TENSORS:]
    count = _OF_ROWS[len(tensors)]
    layout = Layout(tuple(tensors[:count]), tuple(tensors[count:]), (sizes[4], sizes[5]))
    fixed = LoweredConstants(layout.rows, offset, seed, tuple(numbers), tuple(sizes[:4]))
    return LoweredTensors(*arguments[:_TENSORS]), fixed, layout


@torch.library.custom_op("regard::triton_dot", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor, Tensor)")
def _dot(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return forward(*_unpack(arguments))


@_dot.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, value, (radius, wants, *_) = arguments[0], arguments[2], arguments[-1]
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    mass = lse.new_empty((*query.shape[:3], 2 * radius + 1) if wants else (0,))
    return empty_output(query, value.shape[3]), lse, mass


@torch.library.custom_op(
    "regard::triton_dot_backward",
    mutates_args=(),
    schema=f"({_INPUTS}, Tensor output, Tensor lse, Tensor mass, Tensor? d_output, Tensor? d_lse, Tensor? d_mass, "
    "bool[] wanted) -> Tensor[]",
)
def _dot_backward(*arguments: Any) -> list[Tensor]:
    *inputs, output, lse, mass, d_output, d_lse, d_mass, wanted = arguments
    result = backward(*_unpack(inputs), (output, lse, mass), (d_output, d_lse, d_mass), wanted)
    return [grad for grad, want in zip(result, wanted, strict=True) if want and grad is not None]


@_dot_backward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    pairs = zip(arguments[:_TENSORS], arguments[-1], strict=True)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x, want in pairs if want]


def _save_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    layout, offset, seed, *ctx.rest = inputs[_TENSORS:]
    ctx.save_for_backward(*inputs[:_TENSORS], *layout, offset, seed, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple:
    saved = ctx.saved_tensors
    x, layout, (offset, seed), results = saved[:_TENSORS], saved[_TENSORS:-5], saved[-5:-3], saved[-3:]
    wanted = [bool(want) for want in ctx.needs_input_grad[:_TENSORS]]
    result = iter(
        torch.ops.regard.triton_dot_backward(*x, list(layout), offset, seed, *ctx.rest, *results, *grads, wanted)
    )
    return *(next(result) if want else None for want in wanted), [None] * len(layout), None, None, None, None


_dot.register_autograd(_backward, setup_context=_save_context)
