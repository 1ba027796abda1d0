"""Forward mode: the results of the forward kernel, and their tangents by a second one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.engines.derivatives import Tensors
from regard.engines.lowering import LoweredConstants, LoweredTensors
from regard.engines.tensor_memory import materialize
from regard.engines.triton import launch as launching
from regard.engines.triton.arguments import Layout, Strides, broadcast_strides, empty_output, pack
from regard.engines.triton.attention import choose_blocks, forward, widths
from regard.engines.triton.blocks import BACKWARD


class Tangents(NamedTuple):
    """The arguments of the kernel: tangents of the inputs, results, and tangents of the results."""

    query: Tensor | None
    query_strides: Strides
    key: Tensor | None
    key_strides: Strides
    value: Tensor | None
    value_strides: Strides
    diagonal: Tensor | None  # strides of these two as in `Arguments`
    row_table: Tensor | None
    bias: Tensor | None
    bias_strides: Strides
    sink: Tensor | None
    weight: Tensor | None
    output: Tensor  # float32
    output_strides: Strides
    lse: Tensor
    d_output: Tensor
    d_output_strides: Strides
    d_lse: Tensor
    d_mass: Tensor | None


def jvp(x: LoweredTensors, fixed: LoweredConstants, layout: Layout, tangents: Tensors) -> tuple[Tensor, ...]:
    """Return output, log-sum-exp and mass by distance, followed by their tangents; the mass's only if requested."""
    from regard.engines.triton.kernels.tangents import tangent_kernel

    given = (None if t is None else materialize(t) for t in tangents)
    dq, dk, dv, diagonal, table, bias, sink, weight = given
    diagonal, table, sink, weight = (None if t is None else t.contiguous() for t in (diagonal, table, sink, weight))
    output, lse, mass = forward(x, fixed, layout, dtype=torch.float32)
    d_output, d_lse = empty_output(x.query, x.value.shape[3]), torch.empty_like(lse)
    d_mass = torch.zeros_like(mass)
    (B, H, Q, _), wants = x.query.shape, bool(fixed.sizes[1])
    t = Tangents(
        dq, _strides(dq), dk, _strides(dk), dv, _strides(dv), diagonal, table, bias, broadcast_strides(bias, 4),
        sink, weight, output, output.stride(), lse, d_output, d_output.stride(), d_lse, d_mass if wants else None,
    )  # fmt: skip
    blocks = choose_blocks(BACKWARD, x, layout)
    launching.launch(
        x.query.device, tangent_kernel, -(-Q // blocks.rows) * B * H, pack(x, fixed, layout), t,
        BM=blocks.rows, BN=blocks.keys, **widths(x), **blocks.options(),
    )  # fmt: skip
    if wants:
        d_mass -= d_lse.unsqueeze(-1) * mass
    return (output.to(x.query.dtype), lse, mass, d_output, d_lse, d_mass)[: 5 + wants]


def _strides(tensor: Tensor | None) -> Strides:
    return (0,) * 4 if tensor is None else tensor.stride()
