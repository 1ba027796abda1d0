"""Inspecting the weights without materialising them: windows, pooled maps and row statistics, tile by tile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from regard.engines.problem import Problem
from regard.engines.reference import logits, normalize, prepare_operands, sink_logit
from regard.engines.tiled import TiledInputs, TileRow, tile_rows
from regard.engines.whole_rows import block_weights, blocks
from regard.geometry import Indices


class Statistics(NamedTuple):
    """Row statistics of the weights: all (B, H, Q), the top keys and weights (B, H, Q, top).

    Entropy and distance are of the weights divided by their sum, which matters if the normalisation is not a softmax.
    A row without visible keys has log-sum-exp and largest logit -inf, entropy and distance 0, top keys -1.

    >>> import regard as rg, torch
    >>> rg.Attention().statistics(torch.zeros(1, 4), torch.zeros(8, 4)).entropy.exp()  # of eight keys, all alike
    tensor([8.])
    """

    lse: Tensor
    """log-sum-exp of the logits, including the sink's"""
    entropy: Tensor
    """entropy of the distribution over keys and sink, in nats"""
    max_logit: Tensor
    """the largest logit"""
    distance: Tensor
    """mean of |p - j| under the weights"""
    top_keys: Tensor
    """the keys with the largest weights in descending order, padded with -1"""
    top_weights: Tensor
    """their weights"""
    mass: Tensor | None = None
    """the sum of the weights of the keys in `mass_on`, or None"""


def weights(problem: Problem, query: Tensor, key: Tensor, heads: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the weights (B, heads, rows, columns) of a part, normalised over all keys; differentiable."""
    frame, device = problem.frame, query.device
    (query, key, _), bad = prepare_operands(problem, query, key, key[..., :0])
    batch = torch.arange(frame.B, device=device)[:, None, None, None]
    key, bad = key[:, heads], None if bad is None else bad[:, heads]
    parts = []
    for some in rows.split(max(1, (1 << 22) // max(1, frame.B * len(heads) * frame.K))):
        places = Indices(frame, batch, heads[:, None, None], some[:, None], torch.arange(frame.K, device=device))
        scores = logits(problem, query[:, heads][:, :, some], key, places, problem.bias, bad)
        parts.append(normalize(problem, scores, places)[0][..., columns])
    return torch.cat(parts, 2).to(problem.dtype) if parts else query.new_zeros(frame.B, len(heads), 0, len(columns))


def statistics(problem: Problem, query: Tensor, key: Tensor, top: int, chosen: Tensor | None = None) -> Statistics:
    """Compute row statistics in one pass, with sums relative to the largest logit so far; `chosen` keys get a mass."""
    frame = problem.frame
    shape = (frame.B, frame.H, frame.Q)
    lse, entropy, largest, distance = torch.zeros((4, *shape), dtype=problem.compute_dtype, device=query.device)
    keys = torch.full((*shape, top), -1, dtype=torch.int64, device=query.device)
    best = torch.zeros((*shape, top), dtype=problem.compute_dtype, device=query.device)
    mass = None if chosen is None else torch.zeros_like(lse)
    is_chosen = torch.zeros(frame.K, dtype=torch.bool, device=query.device)
    if chosen is not None:
        is_chosen[chosen] = True
    if problem.empty:
        lse.fill_(float("-inf")), largest.fill_(float("-inf"))
        return Statistics(lse, entropy, largest, distance, keys, best, mass)
    if not problem.softmax:
        whole = Statistics(lse, entropy, largest, distance, keys, best, mass)
        _statistics_by_rows(problem, TiledInputs(problem, query, key, None), whole, is_chosen)
        return whole
    for row, tiles, sink in _logit_rows(problem, TiledInputs(problem, query, key, None)):
        at = row.box
        state = _RunningSums(lse[at], top, is_chosen)
        for scores, places in tiles:
            state.add(scores, places)
        lse[at], entropy[at], largest[at], distance[at] = state.finish(sink)
        keys[at], best[at] = state.top_keys, (state.top_logits - lse[at].unsqueeze(-1)).exp().nan_to_num(0.0)
        if mass is not None:
            mass[at] = state.chosen_share(lse[at])
    return Statistics(lse, entropy, largest, distance, keys, best, mass)


def _statistics_by_rows(problem: Problem, pieces: TiledInputs, whole: Statistics, is_chosen: Tensor) -> None:
    """Compute the statistics of weights that need not sum to 1."""
    whole.lse.fill_(float("-inf")), whole.max_logit.fill_(float("-inf"))
    for row, tile in blocks(problem, pieces):
        if tile is None:
            continue
        at, places = row.box, tile.at
        scores, weights, _ = block_weights(problem, tile)
        total = weights.sum(-1, keepdim=True)
        shares = weights / total.masked_fill(total == 0, 1.0)
        whole.lse[at], whole.max_logit[at] = scores.logsumexp(-1), scores.amax(-1)
        whole.entropy[at] = torch.special.entr(shares).sum(-1)
        whole.distance[at] = (shares * (places.p - places.j).abs()).sum(-1)
        count = min(whole.top_keys.shape[-1], scores.shape[-1])
        logits, index = scores.topk(count, -1)
        whole.top_keys[at][..., :count] = (index + places.j[0]).masked_fill(logits == float("-inf"), -1)
        whole.top_weights[at][..., :count] = weights.gather(-1, index)
        if whole.mass is not None:
            whole.mass[at] = weights[..., is_chosen[places.j]].sum(-1)


class _RunningSums:
    """Running sums of a row of tiles: of e^s, s·e^s, |p - j|·e^s, and of e^s over the chosen keys."""

    def __init__(self, like: Tensor, top: int, is_chosen: Tensor) -> None:
        self.largest = torch.full_like(like, float("-inf"))
        self.mass, self.logit_mass, self.away, self.chosen = (torch.zeros_like(like) for _ in range(4))
        self.is_chosen = is_chosen
        self.top_logits = torch.full((*like.shape, top), float("-inf"), dtype=like.dtype, device=like.device)
        self.top_keys = torch.full((*like.shape, top), -1, dtype=torch.int64, device=like.device)

    def add(self, scores: Tensor, places: Indices) -> None:
        largest = self.largest.maximum(scores.amax(-1))
        anchor = largest.masked_fill(largest == float("-inf"), 0.0)
        fade = (self.largest - anchor).exp()
        mass = (scores - anchor.unsqueeze(-1)).exp()
        visible = scores.masked_fill(scores == float("-inf"), 0.0)
        self.mass = self.mass * fade + mass.sum(-1)
        self.logit_mass = self.logit_mass * fade + (mass * visible).sum(-1)
        self.away = self.away * fade + (mass * (places.p - places.j).abs()).sum(-1)
        self.chosen = self.chosen * fade + mass[..., self.is_chosen[places.j]].sum(-1)
        self.largest = largest
        count = min(self.top_logits.shape[-1], scores.shape[-1])
        logits, index = scores.topk(count, -1)
        index = (index + places.j[0]).masked_fill(logits == float("-inf"), -1)
        logits = torch.cat([self.top_logits, logits], -1)
        self.top_logits, order = logits.topk(self.top_logits.shape[-1], -1)
        self.top_keys = torch.cat([self.top_keys, index], -1).gather(-1, order)

    def chosen_share(self, lse: Tensor) -> Tensor:
        anchor = self.largest.masked_fill(self.largest == float("-inf"), 0.0)
        return torch.where(lse == float("-inf"), 0.0, self.chosen * (anchor - lse).exp())

    def finish(self, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return lse, entropy, max_logit, distance."""
        anchor = self.largest.masked_fill(self.largest == float("-inf"), 0.0)
        lse = anchor + self.mass.log()
        weighted = self.logit_mass / self.mass
        distance = (self.away / self.mass).nan_to_num(0.0) if not self.mass.isnan().any() else self.away / self.mass
        if sink is not None:
            sink = sink.squeeze(-1).expand_as(lse)
            whole = torch.logaddexp(lse, sink)
            share = (lse - whole).exp()
            weighted = torch.where(share > 0, weighted, 0.0) * share + sink * (sink - whole).exp()
            lse = whole
        entropy = torch.where(lse == float("-inf"), 0.0, lse - weighted).clamp(min=0)
        return lse, entropy, self.largest, distance


def pooled_weights(problem: Problem, query: Tensor, key: Tensor, size: tuple[int, int]) -> Tensor:
    """Average the weights (B, H, Q, K) to (B, H, *size) like adaptive_avg_pool2d, in two passes."""
    frame = problem.frame
    result = torch.zeros((frame.B, frame.H, *size), dtype=problem.compute_dtype, device=query.device)
    if problem.empty:
        return result.to(problem.dtype)
    pieces = TiledInputs(problem, query, key, None)
    if not problem.softmax:
        for row, tile in blocks(problem, pieces):
            if tile is not None and tile.at.box is not None:
                (down, rows), (across, columns) = (
                    _pool(part, length, bins, result)
                    for part, length, bins in zip(tile.at.box[2:], (frame.Q, frame.K), size, strict=True)
                )
                weights = block_weights(problem, tile)[1]
                result[row.batch, row.heads, rows, columns] += down.mT @ (weights @ across)
        return result.to(problem.dtype)
    for row, tiles, sink in _logit_rows(problem, pieces):
        lse = _lse(tiles, sink, result.new_empty(()))
        empty = lse == float("-inf")
        lse = lse.masked_fill(empty, 0.0)
        down, rows = _pool(row.rows, frame.Q, size[0], result)
        for scores, places in _logit_tiles(problem, pieces, row):
            assert places.box is not None
            across, columns = _pool(places.box[3], frame.K, size[1], result)
            mass = (scores - lse).exp()
            result[row.batch, row.heads, rows, columns] += down.mT @ (mass @ across)
    return result.to(problem.dtype)


def _lse(tiles: Iterator[tuple[Tensor, Indices]], sink: Tensor | None, like: Tensor) -> Tensor:
    """(b, h, q, 1)"""
    total = like.new_full((), float("-inf")) if sink is None else sink
    for scores, _ in tiles:
        total = torch.logaddexp(total, scores.logsumexp(-1, keepdim=True))
    return total


def _pool(part: slice, length: int, bins: int, like: Tensor) -> tuple[Tensor, slice]:
    """Return the share of each index of a part in the bins that it touches, (indices, touched), and these bins."""
    n = torch.arange(bins)
    start, stop = n * length // bins, -(-(n + 1) * length // bins)
    touched = ((stop > part.start) & (start < part.stop)).nonzero().flatten()
    bins_touched = slice(int(touched[0]), int(touched[-1]) + 1)
    start, stop = start[bins_touched], stop[bins_touched]
    at = torch.arange(part.start, part.stop)[:, None]
    share = ((at >= start) & (at < stop)).to(torch.float64) / (stop - start)
    return share.to(like), bins_touched


def _logit_rows(
    problem: Problem, pieces: TiledInputs
) -> Iterator[tuple[TileRow, Iterator[tuple[Tensor, Indices]], Tensor | None]]:
    """Iterate over the rows of tiles with the logits of their tiles and the sink."""
    for row in tile_rows(problem):
        query = pieces.query(row).to(problem.compute_dtype)
        place = problem.frame.indices(*row.box, slice(0, 0), query.device)
        yield row, _logit_tiles(problem, pieces, row), sink_logit(problem, place, query)


def _logit_tiles(problem: Problem, pieces: TiledInputs, row: TileRow) -> Iterator[tuple[Tensor, Indices]]:
    query = pieces.query(row).to(problem.compute_dtype)
    for columns, full in row.columns:
        tile = pieces.tile(row, columns, full)
        key, _, bad = tile.expand_heads(problem)
        yield logits(problem, query, key, tile.at, tile.bias, bad, full), tile.at
