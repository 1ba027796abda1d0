"""Backward calls of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.engines.derivatives import Tensors
from regard.engines.lowering import LoweredConstants, LoweredTensors
from regard.engines.triton import launch as launching
from regard.engines.triton.arguments import Layout, Strides, pack
from regard.engines.triton.attention import choose_blocks, widths
from regard.engines.triton.blocks import BACKWARD


class Gradients(NamedTuple):
    """The arguments of the backward kernels; all but d_output are contiguous."""

    d_output: Tensor
    d_output_strides: Strides
    d_mass: Tensor | None
    lse: Tensor
    delta: Tensor  # (B, H, Q): the sum over keys of weights and their gradients, less the gradient of the log-sum-exp
    d_query: Tensor
    d_key: Tensor
    d_value: Tensor
    d_row_table: Tensor | None
    d_weight: Tensor | None  # of the additive score, by block of queries


def backward(
    x: LoweredTensors, fixed: LoweredConstants, layout: Layout, results: Tensors, grads: Tensors,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return gradients in the order of `LoweredTensors`, None where they are not wanted."""
    from regard.engines.triton.kernels import backward as kernels
    from regard.engines.triton.kernels import biases

    output, lse, mass = results[0], results[1], results[2] if fixed.sizes[1] else None
    d_output, d_lse, d_mass = grads
    want = dict(zip(LoweredTensors._fields, wanted, strict=True))
    d_output = torch.zeros_like(output) if d_output is None else d_output
    d_mass = None if mass is None or d_mass is None else d_mass.float().contiguous()
    delta = (output.float() * d_output.float()).sum(-1)
    if d_mass is not None:
        delta = delta + (mass * d_mass).sum(-1)
    if d_lse is not None:
        delta = delta - d_lse
    delta = delta.masked_fill(lse.isneginf(), 0.0).contiguous()
    (B, H, Q, D), (_, G, K, _), device = x.query.shape, x.key.shape, x.query.device
    blocks = choose_blocks(BACKWARD, x, layout)
    row_blocks = -(-Q // blocks.rows)
    of_rows = x.row_table is not None and want["row_table"]
    d_query, d_key, d_value = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in x[:3])
    d_row_table = torch.zeros_like(x.row_table) if x.row_table is not None and of_rows else None
    d_weight = x.query.new_empty((B, H, row_blocks, D), dtype=torch.float32) if want["weight"] else None
    g = Gradients(d_output, d_output.stride(), d_mass, lse, delta, d_query, d_key, d_value, d_row_table, d_weight)
    arguments = pack(x, fixed, layout)
    constants = {"BM": blocks.rows, "BN": blocks.keys, **widths(x), **blocks.options()}
    if want["query"] or of_rows or want["weight"]:
        launching.launch(device, kernels.query_gradient_kernel, row_blocks * B * H, arguments, g, **constants)
    if want["key"] or want["value"]:
        launching.launch(device, kernels.key_gradient_kernel, -(-K // blocks.keys) * B * G, arguments, g, **constants)
    d_diagonal = d_bias = d_sink = None
    if x.diagonal is not None and want["diagonal"]:
        by_head = torch.empty((B, H, 1, Q + K - 1), dtype=torch.float32, device=device)
        programs = -(-(Q + K - 1) // blocks.keys) * B * H
        launching.launch(device, biases.diagonal_gradient_kernel, programs, arguments, g, by_head, **constants)
        d_diagonal = by_head.sum_to_size(x.diagonal.shape)
    if x.bias is not None and want["bias"]:
        d_bias = torch.empty(x.bias.shape, dtype=torch.float32, device=device)
        own_batch, own_heads, own_rows, _ = x.bias.shape
        programs = -(-K // blocks.keys) * -(-own_rows // blocks.rows) * own_heads * own_batch
        launching.launch(
            device, biases.bias_gradient_kernel, programs, arguments, g, d_bias, B, own_batch, own_heads, own_rows,
            **constants,
        )  # fmt: skip
        d_bias = d_bias.to(x.bias.dtype)
    if x.sink is not None and want["sink"]:
        share = (x.sink[:, None] - lse).exp()  # the sink's share of each row
        d_sink = -torch.where(share > 0, share * delta, 0.0).sum((0, 2))
    of_weight = (
        None if d_weight is None or x.weight is None else d_weight.sum(2, keepdim=True).sum_to_size(x.weight.shape)
    )
    return d_query, d_key, d_value, d_diagonal, d_row_table, d_bias, d_sink, of_weight
