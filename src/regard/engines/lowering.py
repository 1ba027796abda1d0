"""Lowering a problem to the inputs of the compiled kernels; torch does all O(N·D) work around the kernel.

A cosine is a dot product of unit vectors, a learned scale is multiplied into the query, a bias that depends on distance
only becomes one vector; torch differentiates these. `attend_lowered` computes the same by tiles for second derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from regard.engines import tiled, whole_rows
from regard.engines.derivatives import Operator, Tensors, holds_transformed, push_forward
from regard.engines.dot_product import as_dot
from regard.engines.problem import Problem
from regard.geometry import Indices, pad_leading
from regard.normalizations import ReLU, Sigmoid, Softmax
from regard.positions.biases import Bias, DenseBias, Diagonal, Shaw, is_built_in
from regard.scores import BUILT_IN, Additive, Dot


class LoweredConstants(NamedTuple):
    """The inputs of a call that are not differentiated."""

    # (), (start, stop), or (pointer, start, stop, bits_index, bits) of a tile table
    mask_layout: tuple[Tensor, ...]
    offset: Tensor | None  # (B,) int64, with Shaw's tables only
    seed: Tensor | None
    numbers: tuple[float, ...]  # scale, softcap or 0, temperature, dropout, kind and bias of the normalisation
    sizes: tuple[int, int, int, int]  # radius, whether the mass by distance is requested, strides of the tile table
    problem: Problem | None = None  # for second derivatives


class LoweredTensors(NamedTuple):
    """The inputs of a call that are differentiated."""

    query: Tensor
    key: Tensor
    value: Tensor
    diagonal: Tensor | None  # (B or 1, H or 1, 1, Q + K - 1)
    row_table: Tensor | None  # (B, H, Q, 2R + 1)
    bias: Tensor | None  # four axes, each full or 1
    sink: Tensor | None  # (H,)
    weight: Tensor | None  # (1, H or 1, 1, D), for the additive score


def why_not(problem: Problem, *, elementwise: bool = False) -> list[str]:
    """Return reasons why a problem has no lowered form, or why its kernels could not be differentiated.

    elementwise: whether the kernels compute a sigmoid, and a ReLU with a power of 1 or 2.
    """
    reasons = []
    if problem.empty:
        reasons.append("an axis is empty")
    if not problem.softmax and (not elementwise or lower_normalization(problem) is None):
        reasons.append(f"its kernels do not compute {problem.normalization!r}")
    if type(problem.score) not in BUILT_IN:
        reasons.append(f"its kernels support dot products and the additive score, not {problem.score!r}")
    if problem.bias is not None:
        if not is_built_in(problem.bias):
            reasons.append(f"its kernels do not support {problem.bias!r}")
        if sum(isinstance(part, Shaw) for part in problem.bias.parts()) > 1:
            reasons.append("its kernels support one shaw only")
    if problem.torch_only:
        reasons.append("transforms are nested deeper than its derivatives support")
    if problem.in_transform and problem.dropout:
        reasons.append("a torch.func transform may wrap the seed of dropout")
    if problem.in_transform and holds_transformed(problem.mask):
        reasons.append("it reads the mask, which a torch.func transform wraps")
    return reasons + (_why_not_traced(problem) if torch.compiler.is_compiling() else [])


def _why_not_traced(problem: Problem) -> list[str]:
    """Return reasons why the mask layout cannot be a constant of a graph."""
    reasons, frame = [], problem.frame
    fixed = all(type(n) is int for n in (frame.B, frame.H, frame.Q, frame.K, problem.D, problem.E))
    if torch.compiler.is_exporting() and problem.mask is not None and not fixed:
        reasons.append("the graph contains the mask layout, which dynamic lengths do not fix")
    if isinstance(frame.offset, Tensor):
        reasons.append("torch.compile cannot build a mask layout from a tensor of offsets")
    if problem.mask is not None and problem.mask.traced:
        reasons.append("torch.compile cannot read a mask that is built inside the compiled function")
    return reasons


def lower_normalization(problem: Problem) -> tuple[int, float] | None:
    """Return kind and bias of the normalisation as in csrc/regard.h, or None if the kernels do not compute it.

    The bias of a sigmoid that is a tensor is lowered with those that depend on distance.
    """
    match problem.normalization:
        case Softmax():
            return 0, 0.0
        case Sigmoid(bias=bias):
            return 1, 0.0 if isinstance(bias, Tensor) else float(bias)
        case ReLU(power=power) if power in (1, 2):
            return int(1 + power), 0.0
    return None


def in_float32(problem: Problem) -> Problem | None:
    """Return the problem in float32 if a half-precision gradient would be rounded before its parts are added up."""
    if problem.dtype == problem.compute_dtype:
        return None
    per_head = isinstance(problem.score, Additive) and problem.score.weight.numel() > problem.D
    in_parts = (per_head and problem.G < problem.frame.H) or any(
        isinstance(part, Shaw) for part in (problem.bias.parts() if problem.bias is not None else ())
    )
    return replace(problem, dtype=problem.compute_dtype) if in_parts else None


def add_shaw_values(problem: Problem, shaw: Shaw | None, output: Tensor, mass: Tensor) -> Tensor:
    """Add the value part of Shaw's positions to the output."""
    if shaw is None or shaw.values is None:
        return output
    return (output.to(mass) + mass @ shaw.values.to(mass)).to(problem.dtype)


@dataclass(frozen=True, eq=False)
class LoweredOperator(Operator):
    """Kernels as an operator on `LoweredTensors`; all derivatives but gradients are computed by tiles."""

    fixed: LoweredConstants

    @property
    def outputs(self) -> int:  # type: ignore[override]
        return 2 + self.fixed.sizes[1]

    def tangents(self, tensors: Tensors, tangents: Tensors) -> tuple[Tensor, ...]:
        results = push_forward(lambda duals: self.differentiable(duals, False), tensors, tangents)
        if self.outputs == 3:
            return results
        return *results[:2], results[1].new_empty(0), *results[2:]

    def differentiable(self, tensors: Tensors, save: bool) -> tuple[Tensor, ...]:
        return attend_lowered(LoweredTensors(*tensors), self.fixed, save)

    def curvature(
        self, tensors: Tensors, tangents: Tensors, results: Tensors, grads: Tensors, wanted: Sequence[bool]
    ) -> Tensors:
        return curvature(LoweredTensors(*tensors), self.fixed, tangents, results, grads, wanted)


def select_wanted(gradients: Tensors, wanted: Sequence[bool]) -> Tensors:
    return [grad if want else None for grad, want in zip(gradients, wanted, strict=True)]


def lower(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> tuple[LoweredTensors, Shaw | None, float]:
    """Return the tensors for the kernels, the Shaw bias if there is one, and the scale of the dot product."""
    score, scale, shaw, frame = problem.score, problem.scale, None, problem.frame
    diagonal = row_table = dense = sink = weight = None
    own_bias = problem.normalization.bias if isinstance(problem.normalization, Sigmoid) else None
    plain = problem.bias is None and problem.sink is None and not isinstance(own_bias, Tensor)
    if plain and type(score) is Dot and type(scale) is float:
        return LoweredTensors(query, key, value, None, None, None, None, None), None, scale
    original = query
    if isinstance(score, Additive):
        weight, scale = score.weight.to(problem.compute_dtype).reshape(1, -1, 1, problem.D).contiguous(), 1.0
        if weight.shape[1] > 1 and problem.G < frame.H:  # the kernel has one weight for all heads that share a key
            key, value = (t.repeat_interleave(frame.H // problem.G, 1) for t in (key, value))
    elif isinstance(scale, Tensor) or not isinstance(score, Dot):
        query, key, scale = as_dot(problem, query, key)
    assert not isinstance(scale, Tensor)
    for part in () if problem.bias is None else problem.bias.parts():
        if isinstance(part, Diagonal):
            vector = part.vector(frame.indices(device=query.device)).to(problem.compute_dtype).unsqueeze(-2)
            diagonal = vector if diagonal is None else diagonal + vector
        elif isinstance(part, Shaw):
            at, shaw = frame.indices(device=query.device), part
            row_table = part.table(at, original.to(problem.compute_dtype), problem.scale).contiguous()
        elif isinstance(part, DenseBias):
            dense = pad_leading(part.tensor) if dense is None else dense + pad_leading(part.tensor)
    if isinstance(own_bias, Tensor):  # the kernel divides biases by the temperature
        vector = own_bias.to(problem.compute_dtype).reshape(1, -1, 1, 1) * problem.temperature
        vector = vector.expand(1, vector.shape[1], 1, frame.Q + frame.K - 1)
        diagonal = vector if diagonal is None else diagonal + vector
    if diagonal is not None:
        diagonal = diagonal.contiguous()
    if dense is not None:
        if dense.dtype not in (problem.dtype, problem.compute_dtype):
            dense = dense.to(problem.compute_dtype)
        if dense.requires_grad and dense.shape[3] != frame.K:
            dense = dense.expand(-1, -1, -1, frame.K)  # the kernel sums over the other axes, torch over this one
    if problem.sink is not None:
        sink = torch.as_tensor(problem.sink, dtype=problem.compute_dtype, device=query.device)
        sink = sink.reshape(-1).expand(frame.H).contiguous()
    return LoweredTensors(query, key, value, diagonal, row_table, dense, sink, weight), shaw, scale


def why_not_rows(problem: Problem, rows: Tensor) -> list[str]:
    """Return reasons why `select_part` does not support these rows."""
    has_gaps = bool((rows.unique().diff() > 1).any())
    if not has_gaps or problem.bias is None or all(isinstance(part, DenseBias) for part in problem.bias.parts()):
        return []
    return ["biases of distance need contiguous rows"]


def select_part(
    x: LoweredTensors, fixed: LoweredConstants, head: int | None, rows: Tensor
) -> tuple[LoweredTensors, LoweredConstants]:
    """Select one head (or all) and some ascending rows; the mask layout is already that of the rows.

    With a diagonal or Shaw's table, the rows must be contiguous.
    """
    H, Q, K, first, count = x.query.shape[1], x.query.shape[2], x.key.shape[2], int(rows[0]), len(rows)
    contiguous = int(rows[-1]) - first + 1 == count

    def select_head(tensor: Tensor) -> Tensor:
        if head is None or tensor.shape[1] == 1:
            return tensor
        at = head * tensor.shape[1] // H
        return tensor[:, at : at + 1]

    def select_rows(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or tensor.shape[2] == 1:
            return None if tensor is None else select_head(tensor)
        tensor = select_head(tensor)
        return tensor[:, :, first : first + count] if contiguous else tensor[:, :, rows]

    query = select_rows(x.query)
    assert query is not None
    diagonal, layout, strides = x.diagonal, fixed.mask_layout, fixed.sizes[2:]
    if diagonal is not None:
        diagonal = select_head(diagonal)[..., Q - first - count : Q - first + K - 1]
    if len(layout) == 2:
        layout = select_head(layout[0]), select_head(layout[1])
    elif layout and head is not None:
        layout, strides = (layout[0][head * strides[1] :], *layout[1:]), (strides[0], 0)
    part = LoweredTensors(
        query, select_head(x.key), select_head(x.value), diagonal, select_rows(x.row_table), select_rows(x.bias),
        x.sink if head is None or x.sink is None else x.sink[head : head + 1],
        None if x.weight is None else select_head(x.weight),
    )  # fmt: skip
    offset = None if fixed.offset is None else fixed.offset + first
    return part, fixed._replace(mask_layout=layout, offset=offset, sizes=(*fixed.sizes[:2], *strides))


@dataclass(eq=False)
class _LoweredBias(Bias):
    """The lowered biases. The value part is the mass by distance, in extra columns of the output."""

    diagonal: Tensor | None
    row_table: Tensor | None
    dense: Tensor | None
    radius: int
    values: int  # number of output columns before those of the mass; 0 without a mass by distance

    def tile(self, at: Indices, query: Tensor, scale: float | Tensor) -> Tensor:
        total = query.new_zeros(())
        if self.diagonal is not None:
            vector = self.diagonal[:, :, 0]
            b, h = (at.b if len(vector) > 1 else at.b * 0), (at.h if vector.shape[1] > 1 else at.h * 0)
            total = total + vector[b, h, at.j - at.i + at.frame.Q - 1]
        if self.row_table is not None:
            total = total + self.row_table[at.b, at.h, at.i, self._index(at)]
        return total if self.dense is None else total + at.take(self.dense).to(query)

    def aggregate(self, at: Indices, weights: Tensor) -> Tensor | None:
        if not self.values:
            return None
        mass = weights.new_zeros(*weights.shape[:-1], 2 * self.radius + 1)
        mass = mass.scatter_add(-1, self._index(at).expand(weights.shape), weights)
        return torch.cat([weights.new_zeros(*weights.shape[:-1], self.values), mass], -1)

    def _index(self, at: Indices) -> Tensor:
        return (at.j - at.p).clamp(-self.radius, self.radius) + self.radius


def attend_lowered(x: LoweredTensors, fixed: LoweredConstants, save: bool) -> tuple[Tensor, ...]:
    """Return output, log-sum-exp and, if requested, mass by distance, computed by torch's operators."""
    problem, value, d_value = _as_problem(x, fixed), _with_mass(x.value, fixed), x.value.shape[-1]
    if problem.softmax:
        output, lse = tiled.attend_by_tiles(problem, x.query, x.key, value, fixed.seed, save)
    else:
        output = whole_rows.attend_by_rows(problem, x.query, x.key, value, fixed.seed, save)
        lse = output.new_zeros(output.shape[:3], dtype=problem.compute_dtype)
    return (output[..., :d_value], lse, output[..., d_value:].to(lse))[: 2 + fixed.sizes[1]]


def curvature(
    x: LoweredTensors,
    fixed: LoweredConstants,
    tangents: Tensors,
    results: Tensors,
    grads: Tensors,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Return the derivatives of the gradients along tangents of the tensors, in the order of `LoweredTensors`."""
    problem, d_value = _as_problem(x, fixed), x.value.shape[-1]
    output, lse, mass, output_moves, lse_moves, mass_moves = (*results, None)[:6]
    d_output, d_lse, d_mass = (*grads, None)[:3]
    if fixed.sizes[1]:
        d_output = torch.zeros_like(output) if d_output is None else d_output
        d_mass = torch.zeros_like(mass) if d_mass is None else d_mass
        output, output_moves, d_output = (
            torch.cat([one, other.to(one)], -1)
            for one, other in ((output, mass), (output_moves, mass_moves), (d_output, d_mass))
        )
    moved = LoweredTensors(*tangents)
    value = None if moved.value is None else _with_mass(moved.value, fixed)
    held = [n for n in _ORDER if x[n] is not None]
    given = [x.query, x.key, _with_mass(x.value, fixed), *problem.tensors]
    along = [moved.query, moved.key, value, *(_as_held(tangents[n], n) for n in held)]
    needed = [*wanted[:3], *(wanted[n] for n in held)]
    known = output, lse, output_moves, lse_moves
    operator = tiled.TiledOperator if problem.softmax else whole_rows.RowsOperator
    moves = operator(problem, fixed.seed).curvature(given, along, known, (d_output, d_lse), needed)
    lowered: list[Tensor | None] = [*moves[:2], None if moves[2] is None else moves[2][..., :d_value], *[None] * 5]
    for n, one in zip(held, moves[3:], strict=True):
        lowered[n] = None if one is None else one.reshape(x[n].shape)  # type: ignore[union-attr]
    return lowered


# The fields in the order of `Problem.tensors`.
_ORDER = [LoweredTensors._fields.index(name) for name in ("weight", "diagonal", "row_table", "bias", "sink")]


def _as_held(tensor: Tensor | None, field: int) -> Tensor | None:
    """Return a tensor of `LoweredTensors` in the shape that `_as_problem` uses."""
    return tensor[0, :, 0] if tensor is not None and LoweredTensors._fields[field] == "weight" else tensor


def _with_mass(value: Tensor, fixed: LoweredConstants) -> Tensor:
    """Append columns for the mass by distance to the value, if it is requested."""
    if not fixed.sizes[1]:
        return value
    return torch.cat([value, value.new_zeros(*value.shape[:-1], 2 * fixed.sizes[0] + 1)], -1)


def _as_problem(x: LoweredTensors, fixed: LoweredConstants) -> Problem:
    """Return the problem that the lowered tensors describe."""
    assert fixed.problem is not None
    normalization = fixed.problem.normalization
    if fixed.problem.mask is not None:
        fixed.problem.mask.check_unchanged()
    scale, softcap, *_, normalization_bias = fixed.numbers
    return replace(
        fixed.problem,
        G=x.value.shape[1],
        E=x.value.shape[-1] + (2 * fixed.sizes[0] + 1 if fixed.sizes[1] else 0),
        score=Dot(scale, softcap or None) if x.weight is None else Additive(x.weight[0, :, 0]),
        bias=_LoweredBias(x.diagonal, x.row_table, x.bias, fixed.sizes[0], x.value.shape[-1] if fixed.sizes[1] else 0),
        sink=x.sink,
        normalization=Sigmoid(normalization_bias) if isinstance(normalization, Sigmoid) else normalization,
    )
