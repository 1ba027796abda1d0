"""Tile by tile in plain torch: exact, for every description, in memory that grows with Q + K and not with Q · K.

A tile gives its unnormalised sums relative to its own largest logit; sums of tiles are merged as they come. That
largest logit is a constant to autograd, because the result does not depend on it. Every tile is a checkpoint: backward
computes it anew, and autograd differentiates it, whatever the description holds, twice if need be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.engines.dropout import keep
from regard.engines.problem import Engine, Problem
from regard.engines.reference import finite, logits, sink_of
from regard.geometry import At
from regard.masks import tiles
from regard.positions.biases import Bias
from regard.scores import Additive, Modified

TILE_ELEMENTS = 1 << 21  # what the largest intermediate of a tile may hold


@dataclass(frozen=True)
class Row:
    """A row of tiles of some batch rows and heads: its place, and the columns (and fullness) of its tiles."""

    batch: slice
    heads: slice
    rows: slice
    columns: list[tuple[slice, bool]]


def tile_size(problem: Problem) -> tuple[int, int]:
    """Rows and columns of a tile."""
    score = problem.score.score if isinstance(problem.score, Modified) else problem.score
    lead = problem.frame.B * problem.frame.H * (problem.D if isinstance(score, Additive) else 1)
    rows, columns = 256, 512
    while rows * columns * lead > TILE_ELEMENTS and rows * columns > 1024:
        rows, columns = (rows // 2, columns) if rows * 4 > columns else (rows, columns // 2)
    return rows, columns


def rows_of(problem: Problem) -> Iterator[Row]:
    """The rows of tiles that the mask leaves; batch rows and heads go together unless the mask tells them apart."""
    frame, size = problem.frame, tile_size(problem)
    table = tiles(problem.mask, frame, size)
    for b in range(table.extent[0]):
        batch = slice(b, b + 1) if table.extent[0] > 1 else slice(0, frame.B)
        for h in range(table.extent[1]):
            heads = slice(h, h + 1) if table.extent[1] > 1 else slice(0, frame.H)
            for r in range(table.grid[0]):
                rows = slice(r * size[0], min((r + 1) * size[0], frame.Q))
                yield Row(batch, heads, rows, list(table.row(b, h, r)))


class Pieces:
    """Query, key, value and bias cut into tiles. Cut once: autograd then joins the gradients of the pieces once."""

    def __init__(self, problem: Problem, query: Tensor, key: Tensor, value: Tensor | None) -> None:
        self.problem, self.size = problem, tile_size(problem)
        extent = tiles(problem.mask, problem.frame, self.size).extent
        batch, heads = (1 if extent[0] > 1 else problem.frame.B), (1 if extent[1] > 1 else problem.frame.H)
        self.lead, self.repeats = (batch, heads), problem.frame.H // problem.G
        self.shared = heads if heads == 1 else problem.G
        value = key[..., :0] if value is None else value
        bad = None
        if problem.mask is not None:
            key, value, bad = finite(key, value)
        self.queries = _cut(query, (0, batch), (1, heads), (2, self.size[0]))
        self.keys, self.values = (
            _cut(tensor, (0, batch), (1, self.shared), (2, self.size[1])) for tensor in (key, value)
        )
        known_good = bad is None or not problem.functional and not bool(bad.any())
        self.bad = None if known_good else bad
        self.bias = None if problem.bias is None else problem.bias.split(*self.size)

    def query(self, row: Row) -> Tensor:
        """(b, h, q, D)"""
        b, h, r = row.batch.start // self.lead[0], row.heads.start // self.lead[1], row.rows.start // self.size[0]
        return self.queries[b][h][r].to(self.problem.arithmetic)

    def tile(self, row: Row, columns: slice) -> tuple[Tensor, Tensor, Bias | None, Tensor | None, At]:
        """Key (b, h, k, D), value (b, h, k, E), bias, bad keys (b, h, k) and places of a tile."""
        problem, c = self.problem, columns.start // self.size[1]
        group = 0 if self.shared == problem.G and self.lead[1] > 1 else row.heads.start // self.repeats
        key, value = (x[row.batch.start // self.lead[0]][group][c] for x in (self.keys, self.values))
        bad = None
        if self.bad is not None:
            bad = self.bad[row.batch, :, columns].repeat_interleave(self.repeats, 1)[:, row.heads]
        if self.lead[1] > 1:
            key, value = key.repeat_interleave(self.repeats, 1), value.repeat_interleave(self.repeats, 1)
        bias = None if self.bias is None else self.bias.cell(row.rows.start // self.size[0], c)
        at = problem.frame.at(row.batch, row.heads, row.rows, columns, key.device)
        return key.to(problem.arithmetic), value.to(problem.arithmetic), bias, bad, at


def _cut(tensor: Tensor, *cuts: tuple[int, int]) -> list:
    (axis, size), *rest = cuts
    pieces = list(tensor.split(size, axis))
    return [_cut(piece, *rest) for piece in pieces] if rest else pieces


def run(problem: Problem, query: Tensor, key: Tensor, value: Tensor, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    pieces = Pieces(problem, query, key, value)
    outputs: list[Tensor] = []
    for row in rows_of(problem):
        outputs.append(_row(problem, pieces, row, seed))
    frame, (batch, heads) = problem.frame, pieces.lead
    joined = _joined(outputs, frame.B // batch, frame.H // heads)  # (B, H, Q, E + 1)
    output, lse = joined[..., :-1], joined[..., -1]
    return output.to(problem.dtype), lse


def _joined(rows: list[Tensor], batches: int, heads: int) -> Tensor:
    per_head = len(rows) // (batches * heads)
    bands = [torch.cat(rows[n : n + per_head], 2) for n in range(0, len(rows), per_head)]
    return torch.cat([torch.cat(bands[n : n + heads], 1) for n in range(0, len(bands), heads)], 0)


def _row(problem: Problem, pieces: Pieces, row: Row, seed: Tensor | None) -> Tensor:
    """Output and log-sum-exp of a row of tiles, (b, h, q, E + 1)."""
    query = pieces.query(row)
    place = problem.frame.at(row.batch, row.heads, row.rows, slice(0, 0), query.device)
    sums = query[..., :1].masked_fill(query.new_ones((), dtype=torch.bool), 0.0) * query.new_zeros(problem.E + 1)
    largest = query.new_full((*query.shape[:-1], 1), float("-inf"))
    if (sink := sink_of(problem, place, query)) is not None:
        largest = largest.maximum(sink.detach())
        sums = torch.cat([sums[..., :-1], sums[..., -1:] + (sink - _anchor(largest)).exp()], -1)
    for columns, full in row.columns:
        key, value, bias, bad, at = pieces.tile(row, columns)
        arguments = (problem, query, key, value, bias, bad, at, full, seed)
        if problem.needs_grad:
            part, own = checkpoint(_tile, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            part, own = _tile(*arguments)
        sums, largest = _merged(sums, largest, part, own)
    total = sums[..., -1:]
    nothing = total == 0
    total = total.masked_fill(nothing, 1.0)
    lse = (_anchor(largest) + total.log()).masked_fill(nothing, float("-inf"))
    return torch.cat([sums[..., :-1] / total, lse], -1)


def _tile(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, bias: Bias | None, bad: Tensor | None, at: At, full: bool,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The sums of a tile, weights times values and weights, (b, h, q, E + 1), relative to its largest logits (b, h, q, 1)."""
    scores = logits(problem, query, key, at, bias, bad, full)
    largest = scores.detach().amax(-1, keepdim=True)
    weights = (scores - _anchor(largest)).exp()
    dropped = weights if seed is None else weights * keep(seed, problem.dropout, at).to(weights)
    output = dropped @ value
    if bias is not None and (more := bias.aggregate(at, dropped)) is not None:
        output = output + more
    return torch.cat([output, weights.sum(-1, keepdim=True)], -1), largest


def _merged(a: Tensor, largest_a: Tensor, b: Tensor, largest_b: Tensor) -> tuple[Tensor, Tensor]:
    largest = largest_a.maximum(largest_b)
    anchor = _anchor(largest)
    return a * (largest_a - anchor).exp() + b * (largest_b - anchor).exp(), largest


def _anchor(largest: Tensor) -> Tensor:
    """What logits are taken relative to: the largest, or 0 where there is none."""
    return largest.masked_fill(largest == float("-inf"), 0.0)


def why_not(problem: Problem) -> list[str]:
    reasons = []
    if problem.empty:
        reasons.append("an axis is empty")
    if torch.compiler.is_compiling():
        reasons.append("torch.compile would unroll its loop over tiles")
    if problem.functional and problem.needs_grad:
        reasons.append("torch.func transforms do not support the checkpoints that its backward needs")
    return reasons


def why_rather_not(problem: Problem) -> list[str]:
    return []


def peak_bytes(problem: Problem) -> int:
    frame, (rows, columns) = problem.frame, tile_size(problem)
    width = 8 if problem.arithmetic == torch.float64 else 4
    hidden = problem.D if isinstance(problem.score, Additive) else 1
    tile = 4 * width * frame.B * frame.H * min(rows, frame.Q) * min(columns, frame.K) * hidden
    return tile + width * frame.B * frame.H * frame.Q * (problem.E + 1)


ENGINE = Engine("tiled", why_not, why_rather_not, run, peak_bytes, dense=lambda problem: False)
