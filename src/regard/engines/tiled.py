"""Tiled attention in plain torch: exact for every description, in memory that grows with Q + K, not with Q · K.

A tile returns unnormalised sums relative to its largest logit, and the sums of tiles are merged. The largest logit is a
constant to autograd, because the result does not depend on it. Backward recomputes every tile and lets autograd
differentiate it, for any description. Tangents pass through the same operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.description import replace_tensors
from regard.engines.derivatives import Operator, Tensors, active_transforms, apply, holds_transformed, push_forward
from regard.engines.dropout import RandomState, dropout_factors
from regard.engines.problem import Engine, Problem
from regard.engines.reference import logits, replace_nonfinite, sink_logit
from regard.geometry import Indices, pad_leading
from regard.masks import tiles
from regard.positions.biases import Bias
from regard.scores import Additive, Modified

TILE_ELEMENTS = 1 << 21  # size limit of the largest intermediate of a tile
BLOCK_ELEMENTS = 1 << 19  # of a block of whole rows, which is read several times


def run(problem: Problem, query: Tensor, key: Tensor, value: Tensor, seed: Tensor | None) -> tuple[Any, ...]:
    if problem.max_logit:  # in a second pass over the tiles
        from regard.engines import inspection  # uses this module

        with torch.no_grad():
            largest = inspection.statistics(problem, query.detach(), key.detach(), 0).max_logit
        output, lse = run(replace(problem, max_logit=False), query, key, value, seed)
        return output, lse, largest.masked_fill(lse.detach().isnan(), float("nan"))
    if not problem.softmax:
        from regard.engines import whole_rows  # uses this module

        return whole_rows.run(problem, query, key, value, seed)
    inputs, running = (query, key, value), active_transforms()
    if problem.torch_only or (running and (problem.custom or problem.dropout or "Grad" not in running)):
        return attend_by_tiles(problem, *inputs, seed)
    if problem.closes_over_trainable():
        return attend_by_tiles(problem, *inputs, seed, save=problem.grad and not problem.tangent)
    if not problem.grad and not running:  # tangents pass through torch's operators
        return attend_by_tiles(problem, *inputs, seed)
    random_state = RandomState(query.device) if problem.custom else None
    output, lse = apply(TiledOperator(problem, seed, random_state), *inputs, *problem.tensors)
    return output, lse


@dataclass(frozen=True)
class TileRow:
    """A row of tiles for some batch rows and heads: its location, and the columns (and fullness) of its tiles."""

    batch: slice
    heads: slice
    rows: slice
    columns: list[tuple[slice, bool]]

    @property
    def box(self) -> tuple[slice, slice, slice]:
        return self.batch, self.heads, self.rows


def tile_size(problem: Problem) -> tuple[int, int]:
    """Return the rows and columns of a tile."""
    score = problem.score.score if isinstance(problem.score, Modified) else problem.score
    lead = problem.frame.B * problem.frame.H * (problem.D if isinstance(score, Additive) else 1)
    rows, columns = 256, 512
    if not problem.softmax:  # blocks of whole rows
        while rows * problem.frame.K * lead > BLOCK_ELEMENTS and rows > 1:
            rows //= 2
        return rows, columns
    while rows * columns * lead > TILE_ELEMENTS and rows * columns > 1024:
        rows, columns = (rows // 2, columns) if rows * 4 > columns else (rows, columns // 2)
    return rows, columns


def tile_rows(problem: Problem) -> Iterator[TileRow]:
    """Iterate over the rows of non-empty tiles; batch rows and heads are grouped if they share the mask."""
    frame, size = problem.frame, tile_size(problem)
    table = tiles(problem.mask, frame, size)
    for b in range(table.extent[0]):
        batch = slice(b, b + 1) if table.extent[0] > 1 else slice(0, frame.B)
        for h in range(table.extent[1]):
            heads = slice(h, h + 1) if table.extent[1] > 1 else slice(0, frame.H)
            for r in range(table.grid[0]):
                rows = slice(r * size[0], min((r + 1) * size[0], frame.Q))
                yield TileRow(batch, heads, rows, list(table.row(b, h, r)))


@dataclass(frozen=True)
class Tile:
    """The inputs of one tile."""

    query: Tensor  # (b, h, q, D)
    key: Tensor  # (b, g, k, D)
    value: Tensor  # (b, g, k, E)
    bad: Tensor | None  # (b, g, k)
    bias: Bias | None
    at: Indices
    full: bool

    def expand_heads(self, problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return key, value and bad keys with one head per query head, in the compute dtype."""
        key, value, bad = self.key.to(problem.compute_dtype), self.value.to(problem.compute_dtype), self.bad
        if (repeats := self.query.shape[1] // key.shape[1]) > 1:
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
            bad = None if bad is None else bad.repeat_interleave(repeats, 1)
        return key, value, bad


class TiledInputs:
    """Query, key and value split into tiles. Split once, so that autograd joins the gradients of the pieces once."""

    def __init__(self, problem: Problem, query: Tensor, key: Tensor, value: Tensor | None) -> None:
        self.problem, self.size = problem, tile_size(problem)
        extent = tiles(problem.mask, problem.frame, self.size).extent
        self.batch = 1 if extent[0] > 1 else problem.frame.B
        self.heads = 1 if extent[1] > 1 else problem.frame.H
        self.kv_heads = 1 if extent[1] > 1 else problem.G
        value = key[..., :0] if value is None else value
        bad = None
        if problem.mask is not None:
            key, value, bad = replace_nonfinite(key, value)
        self.queries = _split(query, (0, self.batch), (1, self.heads), (2, self.size[0]))
        self.keys, self.values = (
            _split(tensor, (0, self.batch), (1, self.kv_heads), (2, self.size[1])) for tensor in (key, value)
        )
        unread = problem.in_transform or problem.torch_only
        known_good = bad is None or (not unread and not bool(bad.any()))
        self.bad = None if known_good else bad

    def query(self, row: TileRow) -> Tensor:
        """(b, h, q, D)"""
        return self.queries[row.batch.start // self.batch][row.heads.start // self.heads][
            row.rows.start // self.size[0]
        ]

    def tile(self, row: TileRow, columns: slice, full: bool) -> Tile:
        b, c = row.batch.start // self.batch, columns.start // self.size[1]
        shared = self.kv_head_slice(row)
        key, value = (pieces[b][shared.start // self.kv_heads][c] for pieces in (self.keys, self.values))
        bad = None if self.bad is None else self.bad[row.batch, shared, columns]
        at = self.problem.frame.indices(*row.box, columns, key.device)
        return Tile(self.query(row), key, value, bad, self.problem.bias, at, full)

    def join(self, row: TileRow) -> Tile:
        """Return the tiles of a row as one, with those between them that are empty."""
        columns, full = slice(row.columns[0][0].start, row.columns[-1][0].stop), all(full for _, full in row.columns)
        if len(row.columns) == 1:
            return self.tile(row, columns, full)
        full = full and sum(part.stop - part.start for part, _ in row.columns) == columns.stop - columns.start
        tile, places = self.tile(row, columns, full), range(columns.start, columns.stop, self.size[1])
        parts = [self.tile(row, slice(place, place), full) for place in places]
        return replace(tile, key=torch.cat([t.key for t in parts], 2), value=torch.cat([t.value for t in parts], 2))

    def kv_head_slice(self, row: TileRow) -> slice:
        """Return the key/value heads of the row's query heads."""
        repeats = self.problem.frame.H // self.problem.G
        return slice(row.heads.start // repeats, (row.heads.stop - 1) // repeats + 1)


def _split(tensor: Tensor, *cuts: tuple[int, int]) -> list:
    (axis, size), *rest = cuts
    pieces = list(tensor.split(size, axis))
    return [_split(piece, *rest) for piece in pieces] if rest else pieces


def attend_by_tiles(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, seed: Tensor | None, save: bool = False
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp; with `save`, every tile is a checkpoint for autograd."""
    # Converted before they are split, so that autograd sums the gradients of tiles in the compute dtype.
    query, key, value = (t.to(problem.compute_dtype) for t in (query, key, value))
    if own := problem.tensors:
        problem = with_tensors(problem, [t.to(torch.promote_types(t.dtype, problem.compute_dtype)) for t in own])
    pieces = TiledInputs(problem, query, key, value)
    rows = [_attend_row(problem, pieces, row, seed, save) for row in tile_rows(problem)]
    joined = join_rows(problem, pieces, rows)  # (B, H, Q, E + 1)
    return joined[..., :-1].to(problem.dtype), joined[..., -1].contiguous()


def join_rows(problem: Problem, pieces: TiledInputs, rows: list[Tensor]) -> Tensor:
    """Join the results of `tile_rows`, (b, h, q, ...), to (B, H, Q, ...)."""
    heads = problem.frame.H // pieces.heads
    per_head = len(rows) // (heads * (problem.frame.B // pieces.batch))
    bands = [torch.cat(rows[n : n + per_head], 2) for n in range(0, len(rows), per_head)]
    return torch.cat([torch.cat(bands[n : n + heads], 1) for n in range(0, len(bands), heads)], 0)


def _attend_row(problem: Problem, pieces: TiledInputs, row: TileRow, seed: Tensor | None, save: bool) -> Tensor:
    """Return output and log-sum-exp of a row of tiles, (b, h, q, E + 1)."""
    query = pieces.query(row)
    sums = query[..., :1].to(problem.compute_dtype).masked_fill(query.new_ones((), dtype=torch.bool), 0.0)
    sums = sums * sums.new_zeros(problem.E + 1)
    largest = sums.new_full((*query.shape[:-1], 1), float("-inf"))
    if (sink := sink_logit(problem, problem.frame.indices(*row.box, slice(0, 0), query.device), sums)) is not None:
        largest = largest.maximum(sink.detach())
        sums = torch.cat([sums[..., :-1], sums[..., -1:] + (sink - _anchor(largest)).exp()], -1)
    for columns, full in row.columns:
        tile = pieces.tile(row, columns, full)
        if save:
            known: list[Tensor] | None = [] if problem.unpredictable else None
            part, own = checkpoint(
                _attend_tile, problem, tile, seed, known, use_reentrant=False, preserve_rng_state=problem.custom
            )
        else:
            part, own = _attend_tile(problem, tile, seed)
        larger = largest.maximum(own)
        sums = sums * (largest - _anchor(larger)).exp() + part * (own - _anchor(larger)).exp()
        largest = larger
    total = sums[..., -1:]
    nothing = total == 0
    total = total.masked_fill(nothing, 1.0)
    lse = (_anchor(largest) + total.log()).masked_fill(nothing, float("-inf"))
    return torch.cat([sums[..., :-1] / total, lse], -1)


def _attend_tile(
    problem: Problem, tile: Tile, seed: Tensor | None, known: list[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the sums of a tile (weighted values, and weights), (b, h, q, E + 1), and its largest logits (b, h, q, 1).

    A recomputed tile must equal the `known` result of the first computation.
    """
    key, value, bad = tile.expand_heads(problem)
    scores = logits(problem, tile.query.to(problem.compute_dtype), key, tile.at, tile.bias, bad, tile.full)
    largest = scores.detach().amax(-1, keepdim=True)
    weights = (scores - _anchor(largest)).exp()
    if known is not None:  # checked here, because a checkpoint stops once it has all that backward needs
        mass = weights.detach().sum(-1, keepdim=True).log() + largest
        if not known:
            known.append(mass)
        elif not torch.allclose(mass, known[0], rtol=1e-5, atol=1e-3, equal_nan=True):
            raise mismatch_error(problem)
    dropped = weights if seed is None else weights * dropout_factors(seed, problem.dropout, tile.at).to(weights)
    output = dropped @ value
    if tile.bias is not None and (more := tile.bias.aggregate(tile.at, dropped)) is not None:
        output = output + more
    return torch.cat([output, weights.sum(-1, keepdim=True)], -1), largest


def _anchor(largest: Tensor) -> Tensor:
    """Return the reference of the logits: the largest, or 0 if all are -inf."""
    return largest.masked_fill(largest == float("-inf"), 0.0)


@dataclass(frozen=True, eq=False)
class TiledOperator(Operator):
    """The tiled computation without a graph, as an operator on query, key, value and the description's tensors.

    Its gradients recompute the tiles, with a graph of one tile at once.
    """

    problem: Problem
    seed: Tensor | None
    random_state: RandomState | None = None  # before the computation, if the description may draw random numbers
    outputs = 2

    def compute(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        return self._attend(tensors, False)

    def gradients(self, tensors: Tensors, results: Tensors, grads: Tensors, wanted: Sequence[bool]) -> Tensors:
        return self._gradients(tensors, results, grads, wanted, None)

    def curvature(
        self, tensors: Tensors, tangents: Tensors, results: Tensors, grads: Tensors, wanted: Sequence[bool]
    ) -> Tensors:
        return self._gradients(tensors, results[:2], grads, wanted, Motion(tangents, *results[2:]))

    def _gradients(
        self, tensors: Tensors, results: Tensors, grads: Tensors, wanted: Sequence[bool], motion: Motion | None
    ) -> Tensors:
        if self.problem.mask is not None:
            self.problem.mask.check_unchanged()
        output, lse = results
        given = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(results, grads, strict=True)]
        with self._replay_random():
            return gradients(
                self._problem_with(tensors), self.seed, list(tensors), list(wanted), output, lse, *given, whole=True,
                motion=motion,
            )  # fmt: skip

    def tangents(self, tensors: Tensors, tangents: Tensors) -> tuple[Tensor, ...]:
        with self._replay_random():
            return push_forward(lambda duals: self._attend(duals, False), tensors, tangents)

    def differentiable(self, tensors: Tensors, save: bool) -> tuple[Tensor, Tensor]:
        with self._replay_random():
            return self._attend(tensors, save)

    def _replay_random(self) -> AbstractContextManager:
        return nullcontext() if self.random_state is None else self.random_state.replay()

    def _attend(self, tensors: Tensors, save: bool) -> tuple[Tensor, Tensor]:
        query, key, value, *_ = tensors
        return attend_by_tiles(self._problem_with(tensors), query, key, value, self.seed, save)

    def _problem_with(self, tensors: Tensors) -> Problem:
        return with_tensors(self.problem, tensors[3:])


def with_tensors(problem: Problem, tensors: Tensors) -> Problem:
    """Return the problem with other tensors in its description."""
    known: dict[int, Tensor] = {}
    for old, new in zip(problem.tensors, tensors, strict=True):
        known.setdefault(id(old), new)
    sink = known.get(id(problem.sink), problem.sink)
    return replace(
        problem, score=replace_leaves(problem.score, known), bias=replace_leaves(problem.bias, known), sink=sink,
        normalization=replace_leaves(problem.normalization, known),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Motion:
    """Tangents of query, key, value and the description's tensors, where they move, and of output and log-sum-exp."""

    tensors: Tensors
    output: Tensor
    lse: Tensor

    def inside(self, n: int, like: Tensor, box: tuple[slice, ...], at: Indices) -> Tensor | None:
        """The tangent of the n-th tensor, as its part in a tile has it."""
        tangent = self.tensors[n]
        if tangent is None:
            return None
        if n < 3:
            tangent = tangent[box]
        elif tangent.shape != like.shape:
            tangent = at.take(pad_leading(tangent))
        return tangent.to(like.dtype)

    def without_nonfinite(self, problem: Problem, key: Tensor, value: Tensor) -> Motion:
        """With a mask, keys and values that are not finite are constants."""
        if problem.mask is None:
            return self
        still = [
            None if t is None else t.masked_fill(~x.isfinite(), 0.0)
            for x, t in zip((key, value), self.tensors[1:3], strict=True)
        ]
        return replace(self, tensors=(self.tensors[0], *still, *self.tensors[3:]))


def gradients(
    problem: Problem, seed: Tensor | None, tensors: list[Tensor], wanted: list[bool], output: Tensor, lse: Tensor,
    grad_output: Tensor, grad_lse: Tensor, *, whole: bool = False, motion: Motion | None = None,
) -> list[Tensor | None]:  # fmt: skip
    """Return gradients of query, key, value and the description's tensors; `whole` if there are no other keys.

    With output = sums / total and lse = log(total), the gradient of a tile's sums is grad_output / total, and that of
    its weights' sum (grad_lse - grad_output · output) / total. With a `motion`, how these gradients change along it:
    the gradient of a tile is linear in what it is given, so that only one tile is differentiated twice at a time.
    """
    query, key, value, *_ = tensors
    grads = [torch.zeros_like(t, dtype=problem.compute_dtype) for t in tensors]
    rest = grad_lse.unsqueeze(-1) - (grad_output.to(problem.compute_dtype) * output).sum(-1, keepdim=True)
    pairing = torch.cat([grad_output.to(problem.compute_dtype), rest], -1)  # (B, H, Q, E + 1)
    moved = [False] * len(tensors)
    if motion is not None:
        motion = motion.without_nonfinite(problem, key, value)
        moved = [tangent is not None for tangent in motion.tensors]
        rest_moves = -(grad_output.to(problem.compute_dtype) * motion.output).sum(-1, keepdim=True)
        lse_moves = motion.lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)
        pairing_moves = torch.cat([torch.zeros_like(pairing[..., :-1]), rest_moves], -1) - pairing * lse_moves
    varied = [want or moves for want, moves in zip(wanted, moved, strict=True)]
    leaves: dict[int, Tensor] = {}
    for tensor, want in zip(problem.tensors, varied[3:], strict=True):
        leaves.setdefault(id(tensor), tensor.detach().requires_grad_(want))
    problem = replace(problem, score=replace_leaves(problem.score, leaves), bias=replace_leaves(problem.bias, leaves))
    pieces = TiledInputs(problem, query.detach(), key.detach(), value.detach())
    for row in tile_rows(problem):
        # Leaves are in the dtype of the sums: the gradients of tiles are added up before they are rounded.
        leaf = pieces.query(row).detach().to(problem.compute_dtype).requires_grad_(varied[0])
        anchor = _anchor(lse[row.box]).unsqueeze(-1)
        shared = pieces.kv_head_slice(row)
        mass = torch.zeros_like(anchor)
        for columns, full in row.columns:
            tile = pieces.tile(row, columns, full)
            key_leaf, value_leaf = (t.detach().to(problem.compute_dtype) for t in (tile.key, tile.value))
            key_leaf.requires_grad_(varied[1]), value_leaf.requires_grad_(varied[2])
            with torch.enable_grad():
                bias = None if problem.bias is None else problem.bias.cut(tile.at)
                own = replace(tile, query=leaf, key=key_leaf, value=value_leaf, bias=bias)
                part, largest = _attend_tile(problem, own, seed)
            mass += part[..., -1:].detach() * (largest - anchor).exp()
            inputs = [leaf, key_leaf, value_leaf, *problem.score.tensors(), *(() if bias is None else bias.tensors())]
            boxes = [row.box, *[(row.batch, shared, columns)] * 2]
            first = {id(tensor): n for n, tensor in reversed(list(enumerate(inputs)))}  # a tensor may be used twice
            selected = [n for n, tensor in enumerate(inputs) if tensor.requires_grad and first[id(tensor)] == n]
            if not selected or not part.requires_grad:
                continue
            chosen, factor = [inputs[n] for n in selected], (largest - anchor).exp()
            grads_of_tile = torch.autograd.grad(
                part, chosen, pairing[row.box] * factor, create_graph=motion is not None, allow_unused=True
            )
            if motion is not None:
                along = [motion.inside(n, inputs[n], boxes[min(n, 2)], tile.at) for n in selected]
                pairs = [(x, t) for x, t in zip(grads_of_tile, along, strict=True) if x is not None and t is not None]
                pairs = [(x, t) for x, t in (*pairs, (part, pairing_moves[row.box] * factor)) if x.requires_grad]
                outputs, given = [x for x, _ in pairs], [t for _, t in pairs]
                grads_of_tile = torch.autograd.grad(outputs, chosen, given, allow_unused=True)
            for n, grad in zip(selected, grads_of_tile, strict=True):
                if grad is not None:
                    cut = n >= 3 and grad.shape != grads[n].shape
                    target = tile.at.take(pad_leading(grads[n])) if cut else grads[n][boxes[n]] if n < 3 else grads[n]
                    target += grad
        if whole and problem.unpredictable and not _sums_to_one(problem, row, mass, lse[row.box].unsqueeze(-1)):
            raise mismatch_error(problem)
    if problem.mask is not None:  # non-finite values were replaced by a constant
        for n, tensor in ((1, key), (2, value)):
            grads[n].masked_fill_(~tensor.isfinite(), 0.0)
    if isinstance(problem.sink, Tensor):
        sink = sink_logit(problem, problem.frame.indices(device=query.device), lse)
        assert sink is not None
        share = (sink - lse.unsqueeze(-1)).exp()
        if motion is not None:
            sink_moves = motion.tensors[-1]
            if sink_moves is not None:
                lse_moves = lse_moves - sink_moves.to(lse.dtype).reshape(1, -1, 1, 1)
            rest = rest_moves - rest * lse_moves
        mass = (share * rest).sum((0, 2, 3))  # (H,)
        grads[-1] = (mass if problem.sink.numel() > 1 else mass.sum()).reshape(problem.sink.shape)
    return [grad.to(tensor.dtype) if want else None for grad, tensor, want in zip(grads, tensors, wanted, strict=True)]


def replace_leaves(part: Any, leaves: dict[int, Tensor]) -> Any:
    """Return a score or bias over tensors without history, so that one computed from another is not counted twice."""

    def leaf(tensor: Tensor) -> Tensor:
        if id(tensor) not in leaves:
            leaves[id(tensor)] = tensor.detach().requires_grad_(tensor.requires_grad)
        return leaves[id(tensor)]

    return replace_tensors(part, leaf)


def _sums_to_one(problem: Problem, row: TileRow, mass: Tensor, lse: Tensor) -> bool:
    """Whether the recomputed weights of a row agree with the log-sum-exp."""
    if (sink := sink_logit(problem, problem.frame.indices(*row.box, slice(0, 0), mass.device), lse)) is not None:
        mass = mass + (sink - _anchor(lse)).exp()
    allowed = 1e-3 + 8 * torch.finfo(lse.dtype).eps * lse.abs()
    return not bool(((mass - 1).abs() > allowed)[lse > float("-inf")].any())


def mismatch_error(problem: Problem) -> RuntimeError:
    names = " and ".join(repr(part) for part in (problem.score, problem.mask, problem.bias) if part is not None)
    return RuntimeError(
        f"{names} returned different values in the backward pass than in the forward pass; if it uses tensors that are "
        "replaced in between, as by torch.func.functional_call, write it as an nn.Module that holds them; draw random "
        "numbers only from torch's default generator"
    )


def why_not(problem: Problem) -> list[str]:
    reasons = []
    if problem.empty:
        reasons.append("an axis is empty")
    if problem.device.type == "meta":
        reasons.append("it reads values, and meta tensors have none")
    if torch.compiler.is_compiling():
        reasons.append("torch.compile would unroll its loop over tiles")
    if problem.in_transform and holds_transformed(problem.mask):
        reasons.append("it reads the mask, which a torch.func transform wraps")
    return reasons


def why_avoid(problem: Problem) -> list[str]:
    return []


def peak_bytes(problem: Problem) -> int:
    frame, (rows, columns) = problem.frame, tile_size(problem)
    itemsize = 8 if problem.compute_dtype == torch.float64 else 4
    hidden = problem.D if isinstance(problem.score, Additive) else 1
    tile = 4 * itemsize * frame.B * frame.H * min(rows, frame.Q) * min(columns, frame.K) * hidden
    return tile + itemsize * frame.B * frame.H * frame.Q * (problem.E + 1)


ENGINE = Engine("tiled", why_not, why_avoid, run, peak_bytes, dense=lambda problem: False)
