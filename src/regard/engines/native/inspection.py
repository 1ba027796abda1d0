"""Inspection by the kernels: weights, maps and statistics."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from regard.engines.lowering import select_part, why_not_rows
from regard.engines.mask_layout import layout_for_rows
from regard.engines.native import engine
from regard.engines.native.attention import pack_problem
from regard.engines.native.binding import COLUMNS, POOL, STATISTICS, call, row_fields, tensor_fields
from regard.engines.native.engine import prepare
from regard.engines.problem import Problem


def why_not(problem: Problem, rows: Tensor | None = None) -> list[str]:
    """Return reasons against inspecting a problem by the kernels, or some of its rows."""
    whole = rows is None or len(rows) >= problem.frame.Q
    reasons = engine.why_not(problem) + (engine.why_avoid(problem) if whole else [])
    return reasons + ([] if rows is None else why_not_rows(problem, rows))


def weights(problem: Problem, query: Tensor, key: Tensor, heads: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Like `inspection.weights`, but not differentiable."""
    (unique_rows, row_at), (unique_columns, column_at) = (part.unique(return_inverse=True) for part in (rows, columns))
    frame, whole = problem.frame, len(unique_rows) == problem.frame.Q
    x, _, fixed = prepare(problem if whole else replace(problem, mask=None), query, key, key[..., :0], None)
    if not whole and problem.mask is not None:
        layout, strides = layout_for_rows(problem.mask, frame, unique_rows)
        fixed = fixed._replace(mask_layout=layout, sizes=(*fixed.sizes[:2], *strides))
    every = len(heads) == frame.H and bool((heads == torch.arange(frame.H, device="cpu")).all())
    result = torch.empty(
        (frame.B, len(heads), len(unique_rows), len(unique_columns)), dtype=problem.compute_dtype, device="cpu"
    )
    for n, head in enumerate([None] if every else heads.tolist()):
        one, own = select_part(x, fixed, head, unique_rows)
        target = result if head is None else result[:, n : n + 1]
        call(
            "regard_dot_weights",
            pack_problem(one, own),
            COLUMNS.pack(*row_fields(target), unique_columns.data_ptr(), len(unique_columns)),
        )
    for axis, requested, at in ((2, rows, row_at), (3, columns, column_at)):
        if not torch.equal(requested, (unique_rows, unique_columns)[axis - 2]):
            result = result.index_select(axis, at)
    return result.to(problem.dtype)


def pooled_weights(problem: Problem, query: Tensor, key: Tensor, size: tuple[int, int]) -> Tensor:
    """Like `inspection.pooled_weights`, in one pass."""
    x, _, fixed = prepare(problem, query, key, key[..., :0], None)
    result = torch.empty((*query.shape[:2], *size), dtype=problem.compute_dtype, device="cpu")
    call("regard_dot_map", pack_problem(x, fixed), POOL.pack(*row_fields(result), *size))
    return result.to(problem.dtype)


def statistics(
    problem: Problem, query: Tensor, key: Tensor, top: int, chosen: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """Like `inspection.statistics`."""
    x, _, fixed = prepare(problem, query, key, key[..., :0], None)
    rows = query.shape[:3]
    numbers = [torch.empty(rows, dtype=problem.compute_dtype, device="cpu") for _ in range(4)]
    keys = torch.empty((*rows, top), dtype=torch.int64, device="cpu")
    weights = torch.empty((*rows, top), dtype=problem.compute_dtype, device="cpu")
    offset = torch.tensor(problem.frame.offsets(), device="cpu").expand(problem.frame.B).contiguous()
    places = [n for tensor in numbers for n in tensor_fields(tensor)]
    mass, runs = None, torch.empty((2, 0), dtype=torch.int64, device="cpu")
    if chosen is not None:
        mass, runs = torch.empty(rows, dtype=problem.compute_dtype, device="cpu"), key_ranges(chosen)
    call(
        "regard_dot_row_statistics",
        pack_problem(x, fixed._replace(offset=offset)),
        STATISTICS.pack(
            *places, top, keys.data_ptr(), weights.data_ptr(), *tensor_fields(mass), runs[0].data_ptr(),
            runs[1].data_ptr(),
            runs.shape[1],
        ),
    )  # fmt: skip
    return *numbers, keys, weights, mass


def key_ranges(places: Tensor) -> Tensor:
    """Return starts and stops of the runs of consecutive indices, (2, runs)."""
    places = places.unique()
    edge = torch.ones(len(places) + 1, dtype=torch.bool, device="cpu")
    edge[1:-1] = places.diff() > 1
    edge[0] = edge[-1] = len(places) > 0
    return torch.stack([places[edge[:-1]], places[edge[1:]] + 1])
