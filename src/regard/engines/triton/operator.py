"""The kernels with all of their derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from regard.engines.derivatives import Tensors
from regard.engines.lowering import LoweredOperator, LoweredTensors, select_wanted
from regard.engines.tensor_memory import is_direct, materialize
from regard.engines.triton.arguments import Layout
from regard.engines.triton.attention import forward
from regard.engines.triton.forward_mode import jvp
from regard.engines.triton.gradients import backward


@dataclass(frozen=True, eq=False)
class TritonOperator(LoweredOperator):
    """The kernels as an operator on `LoweredTensors`."""

    layout: Layout

    def compute(self, tensors: Tensors) -> tuple[Tensor, ...]:
        return forward(LoweredTensors(*tensors), self.fixed, self.layout)

    def tangents(self, tensors: Tensors, tangents: Tensors) -> tuple[Tensor, ...]:
        moved = [None if tangent is None or tangent._is_zerotensor() else tangent for tangent in tangents]
        if is_direct((*tensors, *moved)):
            return jvp(LoweredTensors(*tensors), self.fixed, self.layout, moved)
        return super().tangents(tensors, tangents)

    def gradients(self, tensors: Tensors, results: Tensors, grads: Tensors, wanted: Sequence[bool]) -> Tensors:
        given = [None if grad is None else materialize(grad) for grad in (*grads, *(None,) * (3 - self.outputs))]
        computed = backward(LoweredTensors(*tensors), self.fixed, self.layout, results, given, wanted)
        return select_wanted(computed, wanted)
