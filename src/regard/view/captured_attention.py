"""One attention of a model as it was computed: description, query and key. Weights are worked out when looked at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.arguments import Index, resolve_index
from regard.attention import Attention
from regard.engines.inspection import Statistics
from regard.engines.problem import Problem
from regard.engines.reference import logits, prepare_operands
from regard.geometry import Indices
from regard.view.pool import bands, pool

Kind = Literal["encoder", "decoder", "cross"]
TOP = 8  # strongest keys of a query that are kept
DIRECT = 1 << 24  # weights of one window that are computed for it; a larger one consists of cells of a map
CELLS = 1024  # rows and columns of that map
BLOCK = 1 << 18  # weights that are computed at once


@dataclass(frozen=True, eq=False)
class CapturedCall:
    """One call: query (B, H, Q, D), and which of the keys it was given, `first` to `stop`.

    ids: the tokens of the queries, (B, Q), if they are known. parents: the rows of the call before that its rows go on
    from, where beam search exchanged them.
    """

    attend: Attention
    query: Tensor
    first: int
    stop: int
    ids: Tensor | None = None
    parents: Tensor | None = None

    def select_rows(self, rows: Tensor) -> CapturedCall:
        """The same of some batch rows."""
        return replace(self, query=self.query[rows], ids=None if self.ids is None else self.ids[rows], parents=None)


class Window(NamedTuple):
    """A part of a map. A cell is the mean of the weights of its rows and columns; a cell of one of each is a weight."""

    weights: np.ndarray
    """(r, c) float32"""
    rows: np.ndarray
    """from and to of the queries of each cell, (r, 2)"""
    columns: np.ndarray
    """from and to of its keys, (c, 2)"""


class CapturedAttention:
    """An attention by its name in the model. Several calls are one attention where each goes on from the one before.

    name, layer, kind: the module's dotted name, its place among those of its kind, and which kind that is.
    """

    def __init__(self, name: str, layer: int, kind: Kind) -> None:
        self.name, self.layer, self.kind = name, layer, kind
        self.calls: list[CapturedCall] = []
        self._keys: Tensor | None = None  # (B, G, room, D)
        self._maps: dict[tuple[int, int, int], Tensor] = {}
        self._last_key: Tensor | None = None  # the keys of the last call themselves, while the model runs
        self.K = 0  # keys that were used: those of a static cache may be more

    def __repr__(self) -> str:
        return f"<{self.kind} {self.layer}: {self.name}, {self.heads} heads, {self.Q} x {self.K}, {self.formula}>"

    @property
    def heads(self) -> int:
        return self.calls[0].query.shape[1]

    @property
    def batch(self) -> int:
        return len(self.calls[0].query)

    @property
    def Q(self) -> int:
        return sum(call.query.shape[2] for call in self.calls)

    @property
    def ids(self) -> Tensor | None:
        """The tokens of the queries, (B, Q), if the model embedded them while it was captured."""
        parts = [call.ids for call in self.calls if call.ids is not None]
        return torch.cat(parts, 1) if len(parts) == len(self.calls) else None

    @property
    def formula(self) -> str:
        """The description in words."""
        return repr(self.calls[0].attend)

    @property
    def nbytes(self) -> int:
        """What is held of it."""
        keys = 0 if self._keys is None else self._keys.nbytes
        return keys + sum(call.query.nbytes for call in self.calls)

    @property
    def offset(self) -> int:
        """Where the first query stands among the keys, in batch row 0."""
        call = self.calls[0]
        return call.first + self._problem(call).frame.offsets()[0]

    # Filling, while the model runs

    def start(self, kind: Kind, attend: Attention, query: Tensor, key: Tensor, ids: Tensor | None = None) -> None:
        """The first call: query (B, H, Q, D), key (B, G, K, D)."""
        self._clear_cache()
        self.kind, self._last_key = kind, key
        place = _query_position(attend, query, key) if kind == "decoder" else None
        self.K = key.shape[2] if place is None else min(key.shape[2], place + query.shape[2])
        with torch.inference_mode(False), torch.no_grad():
            self._keys = key.detach().clone()
            self.calls = [CapturedCall(attend, query.detach().clone(), 0, key.shape[2], ids)]

    def extend(self, attend: Attention, query: Tensor, key: Tensor, ids: Tensor | None = None) -> Tensor | None:
        """A call of self-attention that goes on from those before, as in generation with a cache. The keys are those
        that were there (the last of them, or all of a static cache) and as many more as there are queries.

        Return the rows of the call before that its rows go on from, (B,); None, with nothing done, where it does not.
        """
        if self._keys is None or not self.calls or self.kind == "cross":
            return None
        held, count, place = self._keys, query.shape[2], _query_position(attend, query, key)
        same = (key.shape[1], key.shape[3]) == (held.shape[1], held.shape[3])
        if not same or place is None or query.shape[1] != self.heads:
            return None
        static = self.calls[-1].stop > self.K
        old = self.K if static else key.shape[2] - count
        first = 0 if static else self.K - old
        if not 0 < old <= self.K or place != old or (static and key.shape[2] != self.calls[-1].stop):
            return None
        parents = _parents(key[:, :, :old], held[:, :, self.K - old : self.K])
        if parents is None:
            return None
        moved = len(parents) != len(held) or not torch.equal(parents, torch.arange(len(held), device=parents.device))
        stop, end = (key.shape[2], old + count) if static else (self.K + count, self.K + count)
        self._clear_cache()
        with torch.inference_mode(False), torch.no_grad():
            if moved:
                held = self._keys = held[parents]
            if stop > held.shape[2]:
                self._keys = held.new_empty(*held.shape[:2], 2 * stop, held.shape[3])
                self._keys[:, :, : self.K] = held[:, :, : self.K]
            self._keys[:, :, self.K : end] = key[:, :, old : old + count].detach()
            self.calls.append(
                CapturedCall(attend, query.detach().clone(), first, stop, ids, parents.clone() if moved else None)
            )
        self.K, self.kind = end, "decoder"
        return parents

    def extend_cross(
        self, attend: Attention, query: Tensor, key: Tensor, ids: Tensor | None, parents: Tensor | None
    ) -> bool:
        """A call of cross-attention that looks at the same source for more queries. parents: what `go_on` of the
        decoder's own attention returned; None where that is not known, and then the keys must be the same tensor,
        since equal ones may be those of another pass over the same source."""
        if self._keys is None or not self.calls or self.kind != "cross" or query.shape[1] != self.heads:
            return False
        before = len(self.calls[-1].query)
        same = self._last_key is not None and key.data_ptr() == self._last_key.data_ptr()
        alike = parents is not None and key.shape == self._keys.shape and torch.equal(key, self._keys)
        if not same and not alike:
            return False
        if len(query) != (before if parents is None else len(parents)):
            return False
        self._clear_cache()
        with torch.inference_mode(False), torch.no_grad():
            rows = None if parents is None else parents.clone()
            self.calls.append(CapturedCall(attend, query.detach().clone(), 0, key.shape[2], ids, rows))
        return True

    def end(self) -> None:
        """The model has run. Of beams that changed places, each row gets its own past; of beams that were one row at
        first, the first is kept."""
        self._last_key = None
        if self._keys is None or all(call.parents is None for call in self.calls):
            return
        sources, beams = len(self.calls[0].query), len(self.calls[-1].query)
        rows = torch.arange(beams, device=self._keys.device)
        if beams > sources and beams % sources == 0:
            rows = rows[:: beams // sources]
        with torch.inference_mode(False), torch.no_grad():
            if len(self._keys) == beams:
                self._keys = self._keys[rows]
            calls = []
            for call in reversed(self.calls):
                calls.append(call.select_rows(rows))
                rows = rows if call.parents is None else call.parents[rows]
        self.calls = calls[::-1]

    def _clear_cache(self) -> None:
        self.__dict__.pop("statistics", None)
        self._maps.clear()

    # Looking

    def key(self, call: CapturedCall) -> Tensor:
        """The keys of a call, (B, G, K, D)."""
        assert self._keys is not None
        return self._keys[:, :, call.first : call.stop]

    def _problem(self, call: CapturedCall) -> Problem:
        return call.attend._problem(call.query, self.key(call), None, False)

    def _calls_with_rows(self, rows: Tensor) -> Iterator[tuple[CapturedCall, Tensor, Tensor]]:
        """For each call that has some of the rows: the rows in its own counting, and their places among `rows`."""
        start = 0
        for call in self.calls:
            stop = start + call.query.shape[2]
            at = ((rows >= start) & (rows < stop)).nonzero()[:, 0]
            if len(at):
                yield call, rows[at] - start, at
            start = stop

    @torch.no_grad()
    def weights(self, *, heads: Index = None, rows: Index = None, columns: Index = None, batch: int = 0) -> Tensor:
        """The weights (heads, rows, columns) of one batch row; parts keep their axis."""
        h, i = resolve_index("heads", heads, self.heads), resolve_index("rows", rows, self.Q)
        j = resolve_index("columns", columns, self.K)
        found = self.calls[0].query.new_zeros(len(h), len(i), len(j))
        for call, own, at in self._calls_with_rows(i):
            inside = ((j >= call.first) & (j < call.stop)).nonzero()[:, 0]
            part = call.attend.weights(call.query, self.key(call), rows=own, columns=j[inside] - call.first, heads=h)[
                batch
            ]
            if len(at) == len(i) and len(inside) == len(j):
                return part
            found[:, at[:, None], inside] = part
        return found

    @cached_property
    def statistics(self) -> Statistics:
        """Of every row, in one pass: (B, H, Q), the top (B, H, Q, 8); `mass` is what the first key has."""
        found = []
        with torch.no_grad():
            for call in self.calls:
                first = [0] if call.first == 0 else []
                part = call.attend.statistics(call.query, self.key(call), top=TOP, mass_on=first)
                keys = torch.where(part.top_keys < 0, -1, part.top_keys + call.first)
                found.append(part._replace(top_keys=keys))
        return found[0] if len(found) == 1 else Statistics(*(torch.cat(parts, 2) for parts in zip(*found, strict=True)))

    @torch.no_grad()
    def map(self, size: tuple[int, int], batch: int = 0) -> Tensor:
        """(H, rows, columns): the means of the weights over `bands` of queries and keys, as `Attention.map` gives."""
        rows, columns = min(size[0], self.Q), min(size[1], self.K)
        if (rows, columns, batch) not in self._maps:
            self._maps[rows, columns, batch] = self._map(rows, columns, batch)
        return self._maps[rows, columns, batch]

    def _map(self, rows: int, columns: int, batch: int) -> Tensor:
        cells = self._maps.get((CELLS, CELLS, batch))
        if cells is not None and not (self.Q % CELLS or self.K % CELLS or CELLS % rows or CELLS % columns):
            return pool(cells, (rows, columns))
        if (rows, columns) == (self.Q, self.K):
            return self.weights(batch=batch).float()
        call = self.calls[0]
        if len(self.calls) == 1 and call.stop == self.K:
            return call.attend.map(call.query, self.key(call), size=(rows, columns))[batch].float()
        found = torch.zeros(self.heads, rows, columns)
        for n, (first, stop) in enumerate(bands(self.Q, rows).tolist()):
            found[:, n] = pool(self.weights(rows=slice(first, stop), batch=batch).float(), (1, columns))[:, 0]
        return found

    def precompute(self) -> None:
        """Make what windows are read from, so that none of them waits: the rows' sums, and of long sequences a map."""
        if self.Q * self.K > DIRECT:
            self.statistics  # noqa: B018
            self.map((CELLS, CELLS))

    @torch.no_grad()
    def weights_at(self, keys: Tensor, rows: Index = None, batch: int = 0) -> Tensor:
        """What each of some queries gives to keys of its own: keys (rows, m) to weights (H, rows, m), 0 where there is
        no such key. Costs O(rows · m · D), whatever the length."""
        chosen, lse = resolve_index("rows", rows, self.Q), self.statistics.lse[batch]
        found = torch.zeros(self.heads, len(chosen), keys.shape[1])
        for call, own, at in self._calls_with_rows(chosen):
            problem = self._problem(call)
            (query, key, _), bad = prepare_operands(problem, call.query, self.key(call), self.key(call)[..., :0])
            width = max(1, DIRECT // max(1, self.heads * keys.shape[1] * query.shape[3]))
            for some in torch.arange(len(own)).split(width):
                i, where = own[some], at[some]
                j = keys[where] - call.first
                there = (j >= 0) & (j < call.stop - call.first)
                j = j.clamp(0, call.stop - call.first - 1)
                place = Indices(
                    problem.frame, torch.full((1, 1, 1, 1), batch), torch.arange(self.heads)[:, None, None],
                    i[:, None, None, None], j[:, None, None, :],
                )  # fmt: skip
                scores = logits(
                    problem,
                    query[batch][:, i].transpose(0, 1).unsqueeze(2),
                    key[batch][:, j].transpose(0, 1),
                    place,
                    problem.bias,
                    None if bad is None else bad[batch][:, j].transpose(0, 1),
                )  # fmt: skip (rows, H, 1, m)
                total = lse[:, chosen[where]].mT[:, :, None, None]
                part = (scores - total.masked_fill(total == -torch.inf, 0.0)).exp().squeeze(2)
                found[:, where] = part.masked_fill(~there[:, None], 0.0).transpose(0, 1).float()
        return found

    @torch.no_grad()
    def window(
        self, head: int, rows: tuple[int, int], columns: tuple[int, int], size: tuple[int, int], batch: int = 0
    ) -> Window:
        """The weights of a window; where it is larger than `size`, their means over `bands`.

        A window of many millions of weights consists of the cells of a map of 1024 x 1024 that it touches. That map is
        computed once, and its cells may reach beyond the window.
        """
        (top, bottom), (left, right) = _inside("rows", rows, self.Q), _inside("columns", columns, self.K)
        size = (min(size[0], bottom - top), min(size[1], right - left))
        if (bottom - top) * (right - left) > DIRECT:
            cells = self.map((CELLS, CELLS), batch)[head]
            down, across = bands(self.Q, cells.shape[0]), bands(self.K, cells.shape[1])
            i, j = ((each[:, 1] > first) & (each[:, 0] < last) for each, first, last in
                    ((down, top, bottom), (across, left, right)))  # fmt: skip
            return Window(cells[i][:, j].numpy(), down[i].numpy(), across[j].numpy())
        found = pool(self._window_weights(head, (top, bottom), (left, right), batch)[None], size)[0]
        return Window(
            found.numpy(), (top + bands(bottom - top, size[0])).numpy(), (left + bands(right - left, size[1])).numpy()
        )

    def _window_weights(self, head: int, rows: tuple[int, int], columns: tuple[int, int], batch: int) -> Tensor:
        """The weights of a window: of whole rows where they are few, else by the rows' known log-sum-exp."""
        if len(self.calls) == 1 and (rows[1] - rows[0]) * self.K > DIRECT:
            return self._by_lse(head, rows, columns, batch)
        step = max(1, DIRECT // self.K)
        parts = [slice(first, min(first + step, rows[1])) for first in range(*rows, step)]
        weights = [self.weights(heads=[head], rows=i, columns=slice(*columns), batch=batch)[0] for i in parts]
        return torch.cat(weights).float()

    def _by_lse(self, head: int, rows: tuple[int, int], columns: tuple[int, int], batch: int) -> Tensor:
        """Weights by the rows' known log-sum-exp: no key beyond the window is read."""
        call, b, h, j = self.calls[0], slice(batch, batch + 1), slice(head, head + 1), slice(*columns)
        problem, key = self._problem(call), self.key(call)
        group = head * key.shape[1] // self.heads
        some, bad = key[b, group : group + 1, j].to(problem.compute_dtype), None
        if problem.mask is not None:
            good = some.isfinite()
            some, bad = torch.where(good, some, 0.0), ~good.all(-1)
        found = torch.empty(rows[1] - rows[0], columns[1] - columns[0])
        step = max(1, BLOCK // (columns[1] - columns[0]))  # few enough to stay in the cache
        for first in range(*rows, step):
            i = slice(first, min(first + step, rows[1]))
            query = call.query[b, h, i].to(problem.compute_dtype)
            scores = logits(problem, query, some, problem.frame.indices(b, h, i, j), problem.bias, bad)[0, 0]
            lse = self.statistics.lse[batch, head, i, None]
            found[i.start - rows[0] : i.stop - rows[0]] = scores.sub_(lse.masked_fill(lse == -torch.inf, 0.0)).exp_()
        return found

    def visible_counts(self, rows: Index = None, batch: int = 0) -> Tensor:
        """How many keys each of some queries may look at, (1 or H, rows)."""
        chosen = resolve_index("rows", rows, self.Q)
        parts = []
        for call, own, at in self._calls_with_rows(chosen):
            frame, mask = self._problem(call).frame, call.attend.mask
            if mask is None:
                count = torch.full((1, len(own)), frame.K)
            elif (edges := mask.intervals(frame)) is not None:  # type: ignore[union-attr]
                start, stop = (
                    np.broadcast_to(edge.clip(0, frame.K), (frame.B, edge.shape[1], frame.Q)) for edge in edges
                )
                count = torch.from_numpy((stop - start).clip(0)[batch][:, own.numpy()])
            else:
                bits = []
                for some in own.split(max(1, DIRECT // (frame.K * self.heads))):
                    at_ = Indices(
                        frame, torch.full((1, 1, 1, 1), batch), torch.arange(self.heads)[:, None, None],
                        some[:, None], torch.arange(frame.K),
                    )  # fmt: skip
                    allowed = mask.allows(at_)  # type: ignore[union-attr]
                    bits.append(torch.broadcast_to(allowed, (1, self.heads, len(some), frame.K))[0].sum(-1))
                count = torch.cat(bits, -1)
            parts.append((at, count))
        tall = max(count.shape[0] for _, count in parts)
        found = torch.zeros(tall, len(chosen), dtype=torch.int64)
        for at, count in parts:
            found[:, at] = count.to(torch.int64)
        return found


def _query_position(attend: Attention, query: Tensor, key: Tensor) -> int | None:
    """Where the first query is among the keys, if that is one number."""
    if attend.offset is None:
        return key.shape[2] - query.shape[2]
    return attend.offset if isinstance(attend.offset, int) else None


def _parents(new: Tensor, old: Tensor) -> Tensor | None:
    """For each row of keys (B', G, n, D), the row of others (B, G, n, D) that is equal; None if there is none."""
    if new.shape == old.shape and torch.equal(new, old):
        return torch.arange(len(old), device=old.device)
    if new.shape[1:] != old.shape[1:] or max(len(new), len(old)) > 1024:
        return None
    alike = (new[:, None, :, -1] == old[None, :, :, -1]).all(-1).all(-1)  # (B', B), by the last key
    found = []
    for row, others in zip(new, alike.tolist(), strict=True):
        found.append(next((n for n, like in enumerate(others) if like and torch.equal(row, old[n])), -1))
    return None if -1 in found else torch.tensor(found, device=old.device)


def _inside(name: str, edges: tuple[int, int], size: int) -> tuple[int, int]:
    first, last = edges
    if not 0 <= first < last <= size:
        raise ValueError(f"{name} must be from and to within 0 ... {size}, but are {first} and {last}")
    return first, last
