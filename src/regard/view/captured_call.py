"""One captured call, and how a call continues an earlier one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.attention import Attention


@dataclass(frozen=True, eq=False)
class CapturedCall:
    """One call: query (B, H, Q, D), and the range of the keys that it attends to, `first` to `stop`.

    ids: token ids of the queries, (B, Q), if known. parents: for each batch row, the row of the previous call that it
    continues, if beam search reordered them.
    """

    attend: Attention
    query: Tensor
    first: int
    stop: int
    ids: Tensor | None = None
    parents: Tensor | None = None

    def select_rows(self, rows: Tensor) -> CapturedCall:
        """Return the call restricted to some batch rows."""
        return replace(self, query=self.query[rows], ids=None if self.ids is None else self.ids[rows], parents=None)


def query_position(attend: Attention, query: Tensor, key: Tensor) -> int | None:
    """Return the position of the first query among the keys, or None if it differs between batch rows."""
    if attend.offset is None:
        return key.shape[2] - query.shape[2]
    return attend.offset if isinstance(attend.offset, int) else None


def match_rows(new: Tensor, old: Tensor) -> Tensor | None:
    """Match each row of `new` (B', G, n, D) with an equal row of `old` (B, G, n, D); None if one has no match."""
    if new.shape == old.shape and torch.equal(new, old):
        return torch.arange(len(old), device=old.device)
    if new.shape[1:] != old.shape[1:] or max(len(new), len(old)) > 1024:
        return None
    equal = (new[:, None, :, -1] == old[None, :, :, -1]).all(-1).all(-1)  # (B', B), by the last key
    result = []
    for row, others in zip(new, equal.tolist(), strict=True):
        result.append(next((n for n, like in enumerate(others) if like and torch.equal(row, old[n])), -1))
    return None if -1 in result else torch.tensor(result, device=old.device)


def append_tokens(held: Tensor, at: int, new: Tensor, size: int) -> Tensor:
    """Write `new` (B, G, n, D) into `held` from index `at` on, after doubling it if it is shorter than `size`."""
    if size > held.shape[2]:
        larger = held.new_empty(*held.shape[:2], 2 * size, held.shape[3])
        larger[:, :, :at] = held[:, :, :at]
        held = larger
    held[:, :, at : at + new.shape[2]] = new.detach()
    return held
