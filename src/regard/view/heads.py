"""Classify heads by known attention patterns, from exact weights of single query-key pairs, without a weight matrix.

Long sequences are sampled at 2,048 evenly spaced queries, and a frequent token at its 16 nearest occurrences.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.view.captured_attention import DIRECT, CapturedAttention
from regard.view.record import Record

QUERIES = 2048
OCCURRENCES = 16
MIN_QUERIES = 3  # least number of queries to which a pattern must apply
NEAR = 2  # tokens to each side that count as local
THRESHOLD = 0.4  # least score, as a fraction of the way from chance to 1
CROSS_POSITIONAL_THRESHOLD = 0.8  # stricter, since the words of a translation are often in the same order
MIN_KEYS = 8  # keys that a query needs to count as uniform: with two keys almost every head is
MORE_SPECIFIC = {  # a head with one of these patterns does not get the general one
    "local": ("previous token", "same token", "next token"),
    "positional": ("induction", "duplicate token"),  # in periodic text, these are at a constant distance
}


@dataclass(frozen=True)
class HeadPattern:
    """A head and the pattern that it follows.

    score: mean attention mass on the keys of the pattern, as a share of the sum of the weights if they are not a
    softmax. chance: the score of uniform weights. For "uniform" the score is the effective fraction of the keys,
    exp(entropy) / number of keys. For "positional", `offset` is the position of the attended key relative to the query.
    """

    attention: int
    head: int
    name: str
    score: float
    chance: float
    offset: int | None = None


def find_patterns(record: Record, number: int) -> list[HeadPattern]:
    """Return the heads of an attention that follow a pattern, highest score first."""
    captured = record.attentions[number]
    rows = torch.linspace(0, captured.Q - 1, min(captured.Q, QUERIES)).round().long()
    keys = record.streams[record.stream_names(captured)[1]].tokens
    patterns = []
    named: dict[str, list[bool]] = {}
    for name, score, chance, offset in score_patterns(captured, rows, keys):
        cross_positional = name == "positional" and captured.kind == "cross"
        least = CROSS_POSITIONAL_THRESHOLD if cross_positional else THRESHOLD
        matches = (score - chance >= least * (1 - chance)).tolist()
        specific = [named[other] for other in MORE_SPECIFIC.get(name, ()) if other in named]
        matches = [yes and not any(other[h] for other in specific) for h, yes in enumerate(matches)]
        named[name] = matches
        for head in record.displayed_heads(captured):
            if matches[head]:
                at = None if offset is None else int(offset[head])
                patterns.append(HeadPattern(number, head, name, float(score[head]), float(chance[head]), at))
    return sorted(patterns, key=lambda each: -each.score)


def score_patterns(
    captured: CapturedAttention, rows: Tensor, tokens: Sequence[str]
) -> list[tuple[str, Tensor, Tensor, Tensor | None]]:
    """Return name, score (H,), chance (H,) and offset of every pattern that applies to these queries."""
    at = rows if captured.kind == "cross" else rows + captured.offset  # (R,), positions among the keys
    visible = captured.visible_counts(rows).clamp(min=1).float()  # (1 or H, R)
    patterns: list[tuple[str, Tensor, Tensor, Tensor | None]] = []

    def add(name: str, mass: Tensor, count: Tensor | float, valid: Tensor, offset: Tensor | None = None) -> None:
        """Add the mean mass (H, R) on `count` keys (R,) over the valid queries (R,)."""
        if int(valid.sum()) >= MIN_QUERIES:
            chance = (count / visible).clamp(max=1).expand(captured.heads, -1)
            patterns.append((name, mass[:, valid].mean(-1), chance[:, valid].mean(-1), offset))

    def shares(keys: Tensor) -> Tensor:
        """Return the parts (H, R, m) of the weights of each query that `keys` (R, m) have."""
        weights = captured.weights_at(keys, rows)
        return weights if totals is None else weights / totals[:, :, None]

    more = visible.amin(0) > 1  # queries with a choice of keys
    totals = None if captured.softmax else _sums(captured, rows)
    statistics = captured.statistics
    assert statistics.mass is not None
    mass = statistics.mass[captured.row][:, rows].float()
    add(
        "first token",
        mass if totals is None else mass / totals,
        1.0,
        more & ((at > 0) | (captured.kind == "cross")),
    )
    effective = statistics.entropy[captured.row][:, rows].float().exp() / visible
    many = visible.amin(0) >= MIN_KEYS
    if int(many.sum()) >= MIN_QUERIES:
        patterns.append(("uniform", effective[:, many].mean(-1), torch.full((captured.heads,), 2 / 3), None))
    if captured.kind != "cross":
        steps = torch.arange(-NEAR, NEAR + 1)
        near = at[:, None] + steps
        mass = shares(near)  # (H, R, 5)
        valid_key = (near >= 0) & (near < captured.K)
        if captured.kind == "decoder":
            valid_key &= steps <= 0
        for name, step in (("previous token", -1), ("same token", 0), ("next token", 1)):
            add(name, mass[:, :, step + NEAR], 1.0, valid_key[:, step + NEAR] & more)
        add("local", mass.sum(-1), valid_key.sum(-1).float(), more & (visible.amin(0) > 4 * NEAR + 2))
        for name, following in (("induction", 1), ("duplicate token", 0)):
            places = same_tokens(tokens, at.tolist(), following, ahead=captured.kind == "encoder")
            count = (places >= 0).sum(-1).float()
            if int(((count > 0) & more).sum()) >= MIN_QUERIES:
                add(name, shares(places).sum(-1), count, (count > 0) & more)
    offset = (statistics.top_keys[captured.row, :, :, 0][:, rows] - at).mode(-1).values  # (H,)
    each, which = offset.unique(return_inverse=True)
    mass = shares(at[:, None] + each)  # (H, R, offsets)
    mass = mass.gather(2, which[:, None, None].expand(-1, len(rows), 1))[..., 0]
    inside = (at + offset[:, None] >= 0) & (at + offset[:, None] < captured.K) & more  # (H, R)
    count = inside.sum(-1).clamp(min=1)
    score, chance = (mass * inside).sum(-1) / count, (inside / visible).sum(-1) / count
    own = (inside.sum(-1) >= max(MIN_QUERIES, len(rows) // 4)) & (
        (offset.abs() > 1) if captured.kind != "cross" else True
    )
    patterns.append(("positional", score * own, chance, offset))
    return patterns


def _sums(captured: CapturedAttention, rows: Tensor) -> Tensor:
    """Return the sum of the weights of each query (H, R); 1 where all are 0."""
    parts = rows.split(max(1, DIRECT // (captured.heads * captured.K)))
    sums = torch.cat([captured.weights(rows=some).float().sum(-1) for some in parts], 1)
    return sums.masked_fill(sums == 0, 1.0)


def same_tokens(tokens: Sequence[str], at: Sequence[int], following: int, *, ahead: bool) -> Tensor:
    """Return other occurrences of the tokens at positions `at`, nearest first, padded with -1: (R, m).

    following: added to each position; 1 for the token after each occurrence. ahead: include later occurrences.
    """
    known: dict[str, list[int]] = {}
    for n, token in enumerate(tokens):
        known.setdefault(token, []).append(n)
    rows = []
    for place in at:
        others = known.get(tokens[place], []) if 0 <= place < len(tokens) else []
        before = others[: bisect_left(others, place)][-OCCURRENCES:]
        after = others[bisect_right(others, place) :][:OCCURRENCES] if ahead else []
        nearest = sorted(before + after, key=lambda other: abs(other - place))
        rows.append([other + following for other in nearest[:OCCURRENCES] if other + following < len(tokens)])
    width = max(1, *map(len, rows)) if rows else 1
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows])
