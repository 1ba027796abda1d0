"""The kernel with all of its derivatives; in forward mode, one pass computes results and tangents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.engines.derivatives import Tensors
from regard.engines.lowering import LoweredConstants, LoweredOperator, LoweredTensors, select_wanted
from regard.engines.native.attention import (
    backward,
    backward_by_operator,
    empty_output,
    empty_results,
    forward,
    pack_problem,
)
from regard.engines.native.binding import ABSENT, RESULT, TANGENT, call, row_fields, tensor_fields
from regard.engines.tensor_memory import data_address, is_direct, materialize


@dataclass(frozen=True, eq=False)
class NativeOperator(LoweredOperator):
    """The kernel in eager mode, as an operator on `LoweredTensors`."""

    max_logit: Tensor | None = None  # (B, H, Q): receives the largest logits

    def compute(self, tensors: Tensors) -> tuple[Tensor, ...]:
        return forward(LoweredTensors(*tensors), self.fixed, max_logit=self.max_logit)

    def gradients(self, tensors: Tensors, results: Tensors, grads: Tensors, wanted: Sequence[bool]) -> Tensors:
        x, given = LoweredTensors(*tensors), (*grads, *(None,) * (3 - self.outputs))
        if not is_direct((*tensors, *results, *grads)):
            return select_wanted(backward_by_operator(x, self.fixed[:5], results, given), wanted)
        return select_wanted(backward(x, self.fixed, results, given, wanted[5]), wanted)

    def tangents(self, tensors: Tensors, tangents: Tensors) -> tuple[Tensor, ...]:
        x = LoweredTensors(*tensors)
        tangents = [None if t is None or t._is_zerotensor() else materialize(t) for t in tangents]
        has_kernel = x.weight is None and self.fixed.numbers[4] == 0  # of forward mode: products and softmax
        if has_kernel and is_direct((*tensors, *tangents)):
            return jvp(x, self.fixed, tangents)
        return super().tangents(tensors, tangents)


def jvp(x: LoweredTensors, fixed: LoweredConstants, tangents: Tensors) -> tuple[Tensor, ...]:
    """Return output, log-sum-exp and mass by distance, followed by their tangents; the mass's only if requested."""
    dq, dk, dv, diagonal, table, bias, sink, _ = tangents
    output, lse, mass = empty_results(x.query, x.value, fixed.sizes)
    d_output, d_lse, d_mass = empty_output(x.query, x.value.shape[3]), torch.empty_like(lse), torch.empty_like(mass)
    wants = bool(fixed.sizes[1])
    diagonal, table, sink = (None if tangent is None else tangent.contiguous() for tangent in (diagonal, table, sink))
    places = (
        tensor_fields(dq), tensor_fields(dk), tensor_fields(dv), row_fields(diagonal), row_fields(table),
        tensor_fields(bias), tensor_fields(d_output), tensor_fields(d_lse),
        row_fields(d_mass) if wants else ABSENT,
    )  # fmt: skip
    of_sink = (0, 0) if sink is None else (data_address(sink), 1)
    given = TANGENT.pack(*(n for place in places for n in place), *of_sink)
    results = *tensor_fields(output), *tensor_fields(lse), *(row_fields(mass) if wants else ABSENT), *ABSENT
    call("regard_dot_jvp", pack_problem(x, fixed), given, RESULT.pack(*results))
    return (output, lse, mass, d_output, d_lse, d_mass)[: 5 + wants]
