"""One captured attention: description, queries, keys and values, from which weights are computed on request."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy, deepcopy
from dataclasses import replace
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
from regard.view.captured_call import CapturedCall, append_tokens, match_rows, query_position
from regard.view.pool import bands, pool

Kind = Literal["encoder", "decoder", "cross"]
TOP = 8  # strongest keys kept per query
DIRECT = 1 << 24  # most weights computed for one window; a larger window is cut out of a pooled map
CELLS = 1024  # rows and columns of that map
BLOCK = 1 << 18  # weights computed per block


class Window(NamedTuple):
    """Part of a map. A cell is the mean weight over its queries and keys; a cell of one query and one key is exact."""

    weights: np.ndarray
    """cells, (r, c) float32"""
    rows: np.ndarray
    """start and stop of the queries of each row of cells, (r, 2)"""
    columns: np.ndarray
    """start and stop of the keys of each column of cells, (c, 2)"""


class CapturedAttention:
    """The attention of one module of a model; calls that continue each other, as in generation, are rows of it.

    name: dotted name of the module. layer: index among the attentions of its kind. kind: encoder, decoder or cross.
    """

    def __init__(self, name: str, layer: int, kind: Kind) -> None:
        self.name, self.layer, self.kind = name, layer, kind
        self.calls: list[CapturedCall] = []
        self._keys: Tensor | None = None  # (B, G, capacity, D)
        self._values: Tensor | None = None  # (B, G, capacity, E)
        self.row = 0  # the batch row that is inspected by default
        self.factors: Tensor | None = None  # (H,), of the heads' outputs, if an ablation changed them
        self._maps: dict[tuple[int, int, int], Tensor] = {}
        self._last_key: Tensor | None = None  # the key tensor of the last call, not a copy, while the model runs
        self.K = 0  # keys in use; a static cache may be longer

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
        """Token ids of the queries, (B, Q), or None if the model did not embed them during the capture."""
        parts = [call.ids for call in self.calls if call.ids is not None]
        return torch.cat(parts, 1) if len(parts) == len(self.calls) else None

    @property
    def softmax(self) -> bool:
        """Whether the weights are a softmax, so that one follows from its logit and the log-sum-exp of its row."""
        return self._problem(self.calls[0]).softmax

    @property
    def formula(self) -> str:
        """The description as text."""
        return repr(self.calls[0].attend)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored queries, keys, values and maps."""
        stored = sum(each.nbytes for each in (self._keys, self._values, *self._maps.values()) if each is not None)
        return stored + sum(call.query.nbytes for call in self.calls)

    @property
    def offset(self) -> int:
        """Position of the first query among the keys, in the inspected batch row."""
        call = self.calls[0]
        offsets = self._problem(call).frame.offsets()
        return call.first + offsets[self.row if len(offsets) > 1 else 0]

    def select(self, row: int) -> CapturedAttention:
        """Return the same attention with another batch row inspected by default; the tensors are shared."""
        if not 0 <= row < self.batch:
            raise ValueError(f"row must be in 0 ... {self.batch - 1}, the batch rows of {self.name}, but is {row}")
        other = copy(self)
        other.row, other._maps = row, self._maps
        return other

    # Recording, while the model runs

    def start(
        self, kind: Kind, attend: Attention, query: Tensor, key: Tensor, value: Tensor, ids: Tensor | None = None
    ) -> None:
        """Record a call that starts a new sequence: query (B, H, Q, D), key (B, G, K, D), value (B, G, K, E)."""
        self._clear_cache()
        self.kind, self._last_key = kind, key
        place = query_position(attend, query, key) if kind == "decoder" else None
        self.K = key.shape[2] if place is None else min(key.shape[2], place + query.shape[2])
        with torch.inference_mode(False), torch.no_grad():
            self._keys, self._values = key.detach().clone(), value.detach().clone()
            self.calls = [CapturedCall(attend, query.detach().clone(), 0, key.shape[2], ids)]

    def extend(
        self, attend: Attention, query: Tensor, key: Tensor, value: Tensor, ids: Tensor | None = None
    ) -> Tensor | None:
        """Record a self-attention call that continues the previous ones, as in generation with a cache.

        Its keys must be the stored keys (the last of them, or all of a static cache) followed by one key per query.
        Return the rows of the previous call that its rows continue, (B,), or None if it continues none; then nothing
        is recorded.
        """
        if self._keys is None or self._values is None or not self.calls or self.kind == "cross":
            return None
        held, count, place = self._keys, query.shape[2], query_position(attend, query, key)
        same = (key.shape[1], key.shape[3]) == (held.shape[1], held.shape[3])
        if not same or place is None or query.shape[1] != self.heads:
            return None
        static = self.calls[-1].stop > self.K
        old = self.K if static else key.shape[2] - count
        first = 0 if static else self.K - old
        if not 0 < old <= self.K or place != old or (static and key.shape[2] != self.calls[-1].stop):
            return None
        parents = match_rows(key[:, :, :old], held[:, :, self.K - old : self.K])
        if parents is None:
            return None
        moved = len(parents) != len(held) or not torch.equal(parents, torch.arange(len(held), device=parents.device))
        stop, end = (key.shape[2], old + count) if static else (self.K + count, self.K + count)
        self._clear_cache()
        with torch.inference_mode(False), torch.no_grad():
            if moved:
                self._keys, self._values = self._keys[parents], self._values[parents]
            self._keys = append_tokens(self._keys, self.K, key[:, :, old : old + count], stop)
            self._values = append_tokens(self._values, self.K, value[:, :, old : old + count], stop)
            self.calls.append(
                CapturedCall(attend, query.detach().clone(), first, stop, ids, parents.clone() if moved else None)
            )
        self.K, self.kind = end, "decoder"
        return parents

    def extend_cross(
        self, attend: Attention, query: Tensor, key: Tensor, ids: Tensor | None, parents: Tensor | None
    ) -> bool:
        """Record a cross-attention call with more queries for the same source; return whether it is one.

        parents: result of `extend` of the decoder's self-attention. Where it is None, the keys must be the same tensor,
        since equal keys may come from another pass over the same source.
        """
        if self._keys is None or not self.calls or self.kind != "cross" or query.shape[1] != self.heads:
            return False
        before = len(self.calls[-1].query)
        same = self._last_key is not None and key.data_ptr() == self._last_key.data_ptr()
        equal = parents is not None and key.shape == self._keys.shape and torch.equal(key, self._keys)
        if not same and not equal:
            return False
        if len(query) != (before if parents is None else len(parents)):
            return False
        self._clear_cache()
        with torch.inference_mode(False), torch.no_grad():
            rows = None if parents is None else parents.clone()
            self.calls.append(CapturedCall(attend, query.detach().clone(), 0, key.shape[2], ids, rows))
        return True

    def end(self) -> None:
        """Finish after the model has run: reorder the rows of earlier calls so that each beam has its own history, and
        keep the first beam of each source."""
        self._last_key = None
        self._move_to_cpu()
        if self._keys is None or all(call.parents is None for call in self.calls):
            return
        sources, beams = len(self.calls[0].query), len(self.calls[-1].query)
        rows = torch.arange(beams, device=self._keys.device)
        if beams > sources and beams % sources == 0:
            rows = rows[:: beams // sources]
        with torch.inference_mode(False), torch.no_grad():
            if len(self._keys) == beams:
                assert self._values is not None
                self._keys, self._values = self._keys[rows], self._values[rows]
            calls = []
            for call in reversed(self.calls):
                calls.append(call.select_rows(rows))
                rows = rows if call.parents is None else call.parents[rows]
        self.calls = calls[::-1]

    def _move_to_cpu(self) -> None:
        """Move what was recorded on an accelerator: pages, pictures and numbers are made on the CPU."""
        if self._keys is None or self._keys.is_cpu:
            return
        assert self._values is not None
        moved: dict[int, Attention] = {}
        with torch.inference_mode(False), torch.no_grad():
            self._keys, self._values = self._keys.cpu(), self._values.cpu()
            for n, call in enumerate(self.calls):
                if id(call.attend) not in moved:
                    moved[id(call.attend)] = deepcopy(call.attend).to("cpu")
                ids, parents = (None if each is None else each.cpu() for each in (call.ids, call.parents))
                attend = moved[id(call.attend)]
                self.calls[n] = replace(call, attend=attend, query=call.query.cpu(), ids=ids, parents=parents)

    def _clear_cache(self) -> None:
        self.__dict__.pop("statistics", None)
        self._maps.clear()

    # Inspection

    def key(self, call: CapturedCall) -> Tensor:
        """The keys of a call, (B, G, K, D)."""
        assert self._keys is not None
        return self._keys[:, :, call.first : call.stop]

    def value(self, call: CapturedCall) -> Tensor:
        """The values of a call, (B, G, K, E)."""
        assert self._values is not None
        return self._values[:, :, call.first : call.stop]

    def value_lengths(self, head: int, batch: int | None = None) -> Tensor:
        """Return the Euclidean length of the value of each key, (K,), in a head of one batch row."""
        assert self._values is not None
        group = head * self._values.shape[1] // self.heads
        return self._values[self.row if batch is None else batch, group, : self.K].double().norm(dim=-1)

    def _problem(self, call: CapturedCall) -> Problem:
        return call.attend.problem(call.query, self.key(call))

    def _calls_with_rows(self, rows: Tensor) -> Iterator[tuple[CapturedCall, Tensor, Tensor]]:
        """Yield each call that contains some of `rows`, their indices within the call, and their places in `rows`."""
        start = 0
        for call in self.calls:
            stop = start + call.query.shape[2]
            at = ((rows >= start) & (rows < stop)).nonzero()[:, 0]
            if len(at):
                yield call, rows[at] - start, at
            start = stop

    @torch.no_grad()
    def weights(
        self, *, heads: Index = None, rows: Index = None, columns: Index = None, batch: int | None = None
    ) -> Tensor:
        """Return the weights (heads, rows, columns) of one batch row; an axis stays even if one index is selected."""
        batch = self.row if batch is None else batch
        h, i = resolve_index("heads", heads, self.heads), resolve_index("rows", rows, self.Q)
        j = resolve_index("columns", columns, self.K)
        result = self.calls[0].query.new_zeros(len(h), len(i), len(j))
        for call, own, at in self._calls_with_rows(i):
            inside = ((j >= call.first) & (j < call.stop)).nonzero()[:, 0]
            part = call.attend.weights(call.query, self.key(call), rows=own, columns=j[inside] - call.first, heads=h)[
                batch
            ]
            if len(at) == len(i) and len(inside) == len(j):
                return part
            result[:, at[:, None], inside] = part
        return result

    @cached_property
    def statistics(self) -> Statistics:
        """Statistics of every query, (B, H, Q), and its strongest keys, (B, H, Q, 8); `mass` is on the first key."""
        result = []
        with torch.no_grad():
            for call in self.calls:
                first = [0] if call.first == 0 else []
                part = call.attend.statistics(call.query, self.key(call), top=TOP, mass_on=first)
                keys = torch.where(part.top_keys < 0, -1, part.top_keys + call.first)
                result.append(part._replace(top_keys=keys))
        return (
            result[0] if len(result) == 1 else Statistics(*(torch.cat(parts, 2) for parts in zip(*result, strict=True)))
        )

    @torch.no_grad()
    def map(self, size: tuple[int, int], batch: int | None = None) -> Tensor:
        """Return mean weights over `bands` of queries and keys, (H, rows, columns), like `Attention.map`."""
        batch = self.row if batch is None else batch
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
        result = torch.zeros(self.heads, rows, columns)
        for n, (first, stop) in enumerate(bands(self.Q, rows).tolist()):
            result[:, n] = pool(self.weights(rows=slice(first, stop), batch=batch).float(), (1, columns))[:, 0]
        return result

    def precompute(self) -> None:
        """Compute the statistics and the pooled map of a long sequence now, so that no window has to wait for them."""
        if self.Q * self.K > DIRECT:
            self.statistics  # noqa: B018
            self.map((CELLS, CELLS))

    @torch.no_grad()
    def weights_at(self, keys: Tensor, rows: Index = None, batch: int | None = None) -> Tensor:
        """Return the weights (H, rows, m) of `keys` (rows, m), listed separately for each query.

        The weight of a key that does not exist is 0. Costs O(rows · m · D), independent of the sequence length, if the
        weights are a softmax; otherwise whole rows are computed.
        """
        batch = self.row if batch is None else batch
        chosen = resolve_index("rows", rows, self.Q)
        if not self.softmax:
            return self._weights_from_rows(keys, chosen, batch)
        lse = self.statistics.lse[batch]
        result = torch.zeros(self.heads, len(chosen), keys.shape[1])
        for call, own, at in self._calls_with_rows(chosen):
            problem = self._problem(call)
            (query, key, _), bad = prepare_operands(problem, call.query, self.key(call), self.key(call)[..., :0])
            width = max(1, DIRECT // max(1, self.heads * keys.shape[1] * query.shape[3]))
            for some in torch.arange(len(own)).split(width):
                i, where = own[some], at[some]
                j = keys[where] - call.first
                inside = (j >= 0) & (j < call.stop - call.first)
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
                result[:, where] = part.masked_fill(~inside[:, None], 0.0).transpose(0, 1).float()
        return result

    def _weights_from_rows(self, keys: Tensor, rows: Tensor, batch: int) -> Tensor:
        """Return the weights (H, rows, m) of `keys` (rows, m), cut out of whole rows."""
        result = torch.zeros(self.heads, *keys.shape)
        inside = (keys >= 0) & (keys < self.K)
        places = keys.clamp(0, self.K - 1).expand(self.heads, -1, -1)
        for some in torch.arange(len(rows)).split(max(1, DIRECT // (self.heads * self.K))):
            whole = self.weights(rows=rows[some], batch=batch)  # (H, r, K)
            result[:, some] = whole.gather(2, places[:, some]).float()
        return result.masked_fill(~inside, 0.0)

    @torch.no_grad()
    def window(
        self,
        head: int,
        rows: tuple[int, int],
        columns: tuple[int, int],
        size: tuple[int, int],
        batch: int | None = None,
        *,
        scaled: bool = False,
    ) -> Window:
        """Return the weights of a window, pooled to their means over `bands` where it is larger than `size`.

        scaled: multiply each weight by the length of the value of its key.

        A window of more than 2^24 weights is made of the cells of a 1024 x 1024 map that overlap it. The map is
        computed once, and its outer cells may extend beyond the window.
        """
        if not 0 <= head < self.heads:
            raise ValueError(f"head must be in 0 ... {self.heads - 1}, but is {head}")
        batch = self.row if batch is None else batch
        (top, bottom), (left, right) = _check_range("rows", rows, self.Q), _check_range("columns", columns, self.K)
        size = (min(size[0], bottom - top), min(size[1], right - left))
        bias = self._problem(self.calls[0]).bias
        if scaled and bias is not None and bias.has_values:
            raise ValueError(
                "the values of this attention depend on the query, by their relative part, so that a key has no one "
                "length; explain_weight gives it for a pair"
            )
        lengths = self.value_lengths(head, batch)[left:right].float() if scaled else 1.0
        if (bottom - top) * (right - left) <= DIRECT:
            result = pool((self._window_weights(head, (top, bottom), (left, right), batch) * lengths)[None], size)[0]
        elif scaled:
            result = torch.empty(size)
            for n, (first, last) in enumerate(bands(bottom - top, size[0]).tolist()):
                part = self._window_weights(head, (top + first, top + last), (left, right), batch) * lengths
                result[n] = pool(part[None], (1, size[1]))[0, 0]
        else:
            cells = self.map((CELLS, CELLS), batch)[head]
            down, across = bands(self.Q, cells.shape[0]), bands(self.K, cells.shape[1])
            i, j = ((each[:, 1] > first) & (each[:, 0] < last) for each, first, last in
                    ((down, top, bottom), (across, left, right)))  # fmt: skip
            return Window(cells[i][:, j].numpy(), down[i].numpy(), across[j].numpy())
        return Window(
            result.numpy(), (top + bands(bottom - top, size[0])).numpy(), (left + bands(right - left, size[1])).numpy()
        )

    def _window_weights(self, head: int, rows: tuple[int, int], columns: tuple[int, int], batch: int) -> Tensor:
        """Return the exact weights of a window, from whole rows if they are short, else from their log-sum-exp."""
        if len(self.calls) == 1 and (rows[1] - rows[0]) * self.K > DIRECT and self.softmax:
            return self._weights_from_lse(head, rows, columns, batch)
        step = max(1, DIRECT // self.K)
        parts = [slice(first, min(first + step, rows[1])) for first in range(*rows, step)]
        weights = [self.weights(heads=[head], rows=i, columns=slice(*columns), batch=batch)[0] for i in parts]
        return torch.cat(weights).float()

    def _weights_from_lse(self, head: int, rows: tuple[int, int], columns: tuple[int, int], batch: int) -> Tensor:
        """Return the weights of a window from the log-sum-exp of its rows, reading no key outside of the window."""
        call, b, h, j = self.calls[0], slice(batch, batch + 1), slice(head, head + 1), slice(*columns)
        problem, key = self._problem(call), self.key(call)
        group = head * key.shape[1] // self.heads
        some, bad = key[b, group : group + 1, j].to(problem.compute_dtype), None
        if problem.mask is not None:
            good = some.isfinite()
            some, bad = torch.where(good, some, 0.0), ~good.all(-1)
        result = torch.empty(rows[1] - rows[0], columns[1] - columns[0])
        step = max(1, BLOCK // (columns[1] - columns[0]))  # small enough for the CPU cache
        for first in range(*rows, step):
            i = slice(first, min(first + step, rows[1]))
            query = call.query[b, h, i].to(problem.compute_dtype)
            scores = logits(problem, query, some, problem.frame.indices(b, h, i, j), problem.bias, bad)[0, 0]
            lse = self.statistics.lse[batch, head, i, None]
            result[i.start - rows[0] : i.stop - rows[0]] = scores.sub_(lse.masked_fill(lse == -torch.inf, 0.0)).exp_()
        return result

    def visible_counts(self, rows: Index = None, batch: int | None = None) -> Tensor:
        """Count the keys that the mask allows each of the queries, (1 or H, rows)."""
        batch = self.row if batch is None else batch
        chosen = resolve_index("rows", rows, self.Q)
        parts = []
        for call, own, at in self._calls_with_rows(chosen):
            frame, mask = self._problem(call).frame, call.attend.mask
            if mask is None:
                count = torch.full((1, len(own)), frame.K)
            elif (edges := mask.intervals(frame)) is not None:
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
                    allowed = mask.allows(at_)
                    bits.append(torch.broadcast_to(allowed, (1, self.heads, len(some), frame.K))[0].sum(-1))
                count = torch.cat(bits, -1)
            parts.append((at, count))
        tall = max(count.shape[0] for _, count in parts)
        result = torch.zeros(tall, len(chosen), dtype=torch.int64)
        for at, count in parts:
            result[:, at] = count.to(torch.int64)
        return result


def _check_range(name: str, edges: tuple[int, int], size: int) -> tuple[int, int]:
    first, last = edges
    if not 0 <= first < last <= size:
        raise ValueError(f"{name} must be (start, stop) with 0 <= start < stop <= {size}, but is ({first}, {last})")
    return first, last
