"""What `look` gives, for the problems that the kernels know: weights, maps and statistics."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from regard.engines.lowering import part_of
from regard.engines.native.attend import packed
from regard.engines.native.binding import COLUMNS, POOL, STATISTICS, call, place, rows_of
from regard.engines.native.engine import prepared
from regard.engines.problem import Problem
from regard.engines.visible import visible_to
from regard.positions.biases import DenseBias


def weights(problem: Problem, query: Tensor, key: Tensor, heads: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """As `look.weights`, but not differentiable."""
    (some, row_at), (picked, column_at) = (part.unique(return_inverse=True) for part in (rows, columns))
    frame, whole = problem.frame, len(some) == problem.frame.Q
    x, _, fixed = prepared(problem if whole else replace(problem, mask=None), query, key, key[..., :0], None)
    if not whole and problem.mask is not None:
        visible, strides = visible_to(problem.mask, frame, some)
        fixed = fixed._replace(visible=visible, sizes=(*fixed.sizes[:2], *strides))
    every = len(heads) == frame.H and bool((heads == torch.arange(frame.H, device="cpu")).all())
    found = torch.empty((frame.B, len(heads), len(some), len(picked)), dtype=problem.arithmetic, device="cpu")
    for n, head in enumerate([None] if every else heads.tolist()):
        one, own = part_of(x, fixed, head, some)
        room = found if head is None else found[:, n : n + 1]
        call("regard_dot_weights", packed(one, own), COLUMNS.pack(*rows_of(room), picked.data_ptr(), len(picked)))
    for axis, asked, at in ((2, rows, row_at), (3, columns, column_at)):
        if not torch.equal(asked, (some, picked)[axis - 2]):
            found = found.index_select(axis, at)
    return found.to(problem.dtype)


def takes_rows(problem: Problem, rows: Tensor) -> bool:
    """Whether `weights` can be asked for these rows: biases of distance are read along neighbouring rows."""
    apart = bool((rows.unique().diff() > 1).any())
    return not apart or problem.bias is None or all(isinstance(part, DenseBias) for part in problem.bias.parts())


def pooled(problem: Problem, query: Tensor, key: Tensor, size: tuple[int, int]) -> Tensor:
    """As `look.pooled`, in one pass."""
    x, _, fixed = prepared(problem, query, key, key[..., :0], None)
    found = torch.empty((*query.shape[:2], *size), dtype=problem.arithmetic, device="cpu")
    call("regard_dot_map", packed(x, fixed), POOL.pack(*rows_of(found), *size))
    return found.to(problem.dtype)


def statistics(
    problem: Problem, query: Tensor, key: Tensor, top: int, chosen: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """As `look.statistics`."""
    x, _, fixed = prepared(problem, query, key, key[..., :0], None)
    rows = query.shape[:3]
    numbers = [torch.empty(rows, dtype=problem.arithmetic, device="cpu") for _ in range(4)]
    keys = torch.empty((*rows, top), dtype=torch.int64, device="cpu")
    weights = torch.empty((*rows, top), dtype=problem.arithmetic, device="cpu")
    offset = torch.tensor(problem.frame.offsets(), device="cpu").expand(problem.frame.B).contiguous()
    places = [n for tensor in numbers for n in place(tensor)]
    mass, runs = None, torch.empty((2, 0), dtype=torch.int64, device="cpu")
    if chosen is not None:
        mass, runs = torch.empty(rows, dtype=problem.arithmetic, device="cpu"), runs_of(chosen)
    call(
        "regard_dot_look",
        packed(x, fixed._replace(offset=offset)),
        STATISTICS.pack(
            *places, top, keys.data_ptr(), weights.data_ptr(), *place(mass), runs[0].data_ptr(), runs[1].data_ptr(),
            runs.shape[1],
        ),
    )  # fmt: skip
    return *numbers, keys, weights, mass


def runs_of(places: Tensor) -> Tensor:
    """Starts and stops of the runs of neighbours among places, (2, runs)."""
    places = places.unique()
    edge = torch.ones(len(places) + 1, dtype=torch.bool, device="cpu")
    edge[1:-1] = places.diff() > 1
    edge[0] = edge[-1] = len(places) > 0
    return torch.stack([places[edge[:-1]], places[edge[1:]] + 1])
