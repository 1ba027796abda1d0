"""Inspection by the kernels: weights, maps and statistics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.engines.lowering import LoweredConstants, LoweredTensors, select_part, why_not_rows
from regard.engines.mask_layout import layout_for_rows
from regard.engines.problem import Problem
from regard.engines.triton import engine
from regard.engines.triton import launch as launching
from regard.engines.triton.arguments import Layout, pack
from regard.engines.triton.attention import choose_blocks, widths
from regard.engines.triton.blocks import INSPECTION, Blocks

MOST_RANKS = 16  # largest weights of a row that one pass over the keys finds


class RowStatistics(NamedTuple):
    """Where the kernel stores statistics: tensors (B, H, Q) in float32."""

    lse: Tensor
    entropy: Tensor | None  # these three are all given or all None
    max_logit: Tensor | None
    distance: Tensor | None
    mass: Tensor | None
    chosen: Tensor | None  # (K,) int8: the keys of the mass


class Prepared(NamedTuple):
    """A lowered problem with the block sizes of its kernels."""

    x: LoweredTensors
    fixed: LoweredConstants
    layout: Layout
    blocks: Blocks

    def launch(self, kernel: Any, programs_per_head: int, *arguments: Any, **constants: Any) -> None:
        B, H, _, _ = self.x.query.shape
        sizes = {name: size for name, size in widths(self.x).items() if name != "BE"}
        launching.launch(
            self.x.query.device, kernel, programs_per_head * B * H, pack(self.x, self.fixed, self.layout), *arguments,
            BM=self.blocks.rows, BN=self.blocks.keys, **sizes, **constants, **self.blocks.options(),
        )  # fmt: skip

    @property
    def row_blocks(self) -> int:
        return -(-self.x.query.shape[2] // self.blocks.rows)

    def logsums(self) -> Tensor:
        """Return the log-sum-exp (B, H, Q)."""
        from regard.engines.triton.kernels.inspection import statistics_kernel

        lse = torch.empty(self.x.query.shape[:3], dtype=torch.float32, device=self.x.query.device)
        self.launch(statistics_kernel, self.row_blocks, RowStatistics(lse, None, None, None, None, None))
        return lse


def prepare(problem: Problem, query: Tensor, key: Tensor) -> Prepared:
    x, _, fixed, layout = engine.prepare(problem, query, key, key[..., :0], None)
    return with_blocks(x, fixed, layout)


def with_blocks(x: LoweredTensors, fixed: LoweredConstants, layout: Layout) -> Prepared:
    return Prepared(x, fixed, layout, choose_blocks(INSPECTION, x, layout))


def why_not(problem: Problem, rows: Tensor | None = None) -> list[str]:
    """Return reasons against inspecting a problem by the kernels, or some of its rows."""
    reasons = engine.why_not(replace(problem, E=problem.D)) + engine.why_avoid(problem)  # there are no values
    return reasons + ([] if rows is None else why_not_rows(problem, rows))


def weights(problem: Problem, query: Tensor, key: Tensor, heads: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Like `inspection.weights`, but not differentiable."""
    (unique_rows, row_at), (unique_columns, column_at) = (part.unique(return_inverse=True) for part in (rows, columns))
    frame, whole, device = problem.frame, len(unique_rows) == problem.frame.Q, query.device
    every = len(heads) == frame.H and bool((heads == torch.arange(frame.H, device=device)).all())
    whole_call = prepare(problem if whole else replace(problem, mask=None), query, key)
    x, fixed, layout, _ = whole_call
    if not whole and problem.mask is not None:
        tensors, strides = layout_for_rows(problem.mask, frame, unique_rows.cpu())
        layout = Layout(tuple(tensor.to(device) for tensor in tensors), (), (0, 0))
        fixed = fixed._replace(mask_layout=layout.rows, sizes=(*fixed.sizes[:2], *strides))
    size = frame.B, len(heads), len(unique_rows), len(unique_columns)
    result = torch.empty(size, dtype=problem.dtype, device=device)
    for n, head in enumerate([None] if every else heads.tolist()):
        one, own = select_part(x, fixed, head, unique_rows)
        part = with_blocks(one, own, Layout(own.mask_layout, (), (0, 0)))
        _store_weights(part, result if head is None else result[:, n : n + 1], unique_columns)
    for axis, requested, unique, at in ((2, rows, unique_rows, row_at), (3, columns, unique_columns, column_at)):
        if not torch.equal(requested, unique):
            result = result.index_select(axis, at)
    return result


def _store_weights(part: Prepared, result: Tensor, columns: Tensor) -> None:
    """Store the weights of all rows for some keys, in ascending order."""
    from regard.engines.triton.kernels.inspection import weights_kernel

    at = torch.full((part.x.key.shape[2],), -1, dtype=torch.int32, device=columns.device)
    at[columns] = torch.arange(len(columns), dtype=torch.int32, device=columns.device)
    blocks = (columns // part.blocks.keys).unique().int()
    part.launch(
        weights_kernel, part.row_blocks * len(blocks), part.logsums(), blocks, len(blocks), at, result, result.stride()
    )


def pooled_weights(problem: Problem, query: Tensor, key: Tensor, size: tuple[int, int]) -> Tensor:
    """Like `inspection.pooled_weights`."""
    from regard.engines.triton.kernels.inspection import pool_kernel

    call = prepare(problem, query, key)
    result = torch.empty((*query.shape[:2], *size), dtype=problem.dtype, device=query.device)
    call.launch(pool_kernel, size[0] * size[1], call.logsums(), result, *size)
    return result


def statistics(
    problem: Problem, query: Tensor, key: Tensor, top: int, chosen: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """Like `inspection.statistics`."""
    from regard.engines.triton.kernels.inspection import statistics_kernel, top_kernel

    call, rows, device = prepare(problem, query, key), query.shape[:3], query.device
    offset = torch.tensor(problem.frame.offsets(), device=device).expand(problem.frame.B).contiguous()
    call = call._replace(fixed=call.fixed._replace(offset=offset))
    lse, entropy, max_logit, distance = torch.empty((4, *rows), dtype=torch.float32, device=device)
    mass = is_chosen = None
    if chosen is not None:
        mass, is_chosen = torch.empty_like(lse), torch.zeros(key.shape[2], dtype=torch.int8, device=device)
        is_chosen[chosen] = 1
    call.launch(statistics_kernel, call.row_blocks, RowStatistics(lse, entropy, max_logit, distance, mass, is_chosen))
    keys = torch.full((*rows, top), -1, dtype=torch.int64, device=device)
    best = torch.zeros((*rows, top), dtype=torch.float32, device=device)
    after = torch.full(rows, float("inf"), dtype=torch.float32, device=device)
    after_key = torch.full(rows, -1, dtype=torch.int32, device=device)
    ranks = max(2, min(MOST_RANKS, 1 << (top - 1).bit_length()))
    for first in range(0, min(top, key.shape[2]), ranks):
        call.launch(top_kernel, call.row_blocks, lse, after, after_key, keys, best, first, top, TOP=ranks)
    return lse, entropy, max_logit, distance, keys, best, mass
