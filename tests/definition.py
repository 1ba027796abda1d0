"""Any call as dense torch, from the fields of its description: the yardstick of tests and fuzzing.

Nothing here calls the library: masks, biases, scores and dropout are reimplemented, in float64 for exact results, in
float32 for the result of a user of torch, or on absolute values for the bounds of `tests.bounds`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

SHORTEST = 1e-12  # shorter vectors count as this length in a cosine
SCORES = ("Dot", "Cosine", "Additive", "Bilinear", "Modified")
WORD, LOW = (1 << 64) - 1, (1 << 32) - 1


def kind(part: object) -> str:
    return type(part).__name__


@dataclass(frozen=True)
class Places:
    """Indices (b, h, i, j) of a call and the position p = offset + i of its queries; they broadcast."""

    shape: tuple[int, int, int, int]
    b: Tensor
    h: Tensor
    i: Tensor
    j: Tensor
    p: Tensor

    @classmethod
    def of(cls, shape: tuple[int, int, int, int], offset: Any) -> Places:
        b, h, i, j = (torch.arange(n) for n in shape)
        b, h, i = b[:, None, None, None], h[:, None, None], i[:, None]
        offset = torch.as_tensor(shape[3] - shape[2] if offset is None else offset).reshape(-1, 1, 1, 1)
        return cls(shape, b, h, i, j, i + offset)

    def whole(self, x: Tensor) -> Tensor:
        return x.broadcast_to(self.shape)


class Reader:
    """Tensors of a description as separate leaves: converted, and as absolute values if `magnitudes`."""

    def __init__(self, dtype: torch.dtype = torch.float64, magnitudes: bool = False) -> None:
        self.dtype, self.magnitudes = dtype, magnitudes
        self.leaves: dict[tuple[int, int], Tensor] = {}

    @staticmethod
    def place(x: Tensor) -> tuple[int, int]:
        """Return a key that is the same for a tensor and a view of all of it in another shape."""
        return (x.data_ptr(), x.numel()) if x.numel() else (0, id(x))

    def leaf(self, x: Tensor) -> Tensor:
        if (place := self.place(x)) not in self.leaves:
            copy = x.detach().to(self.dtype, copy=True)
            self.leaves[place] = (copy.abs() if self.magnitudes else copy).requires_grad_()
        return self.leaves[place]

    def __call__(self, x: Tensor) -> Tensor:
        return self.leaf(x).reshape(x.shape)

    def number(self, x: float) -> float:
        return abs(x) if self.magnitudes else x


def visible(mask: Any, at: Places) -> Tensor:
    """Return which keys a query may attend to, (B, H, Q, K)."""
    if mask is None or 0 in at.shape:
        return torch.ones(at.shape, dtype=torch.bool)
    if isinstance(mask, Tensor):
        return at.whole(mask)
    if kind(mask) == "FromTensors":  # built from the tensors as they are now
        mask = mask.snapshot()
    return at.whole(MASKS[kind(mask)](mask, at))


def _in_row(values: int | Tensor, at: Places) -> int | Tensor:
    return values if isinstance(values, int) else values.reshape(-1, 1, 1, 1)


def _global(mask: Any, at: Places) -> Tensor:
    rows = []
    for positions in mask.positions:
        chosen = torch.zeros(at.shape[1:], dtype=torch.bool).expand(at.p.shape[0], *at.shape[1:])
        for one in positions:
            chosen = chosen | (at.p == one) | (at.j == one)
        rows.append(chosen)
    if len(rows) == 1:
        return rows[0]
    return torch.stack([row[n if len(row) > 1 else 0] for n, row in enumerate(rows)])


def _of_position(table: Tensor, at: Places) -> tuple[Tensor, Tensor]:
    """Return the entry of a table (N,) or (B, N) at the position of every query, and whether there is one."""
    table = table if table.dim() == 2 else table[None]
    N = table.shape[1]
    inside = (at.p >= 0) & (at.p < N)
    if not N:
        return torch.zeros_like(at.p), inside
    rows = table[:, None, None, :].expand(max(len(table), at.p.shape[0]), 1, at.p.shape[2], N)
    return rows.gather(-1, at.p.clamp(0, N - 1).expand(*rows.shape[:3], 1)), inside


def _documents(mask: Any, at: Places) -> Tensor:
    own, inside = _of_position(mask.ids, at)
    return (own == mask.ids.reshape(*mask.ids.shape[:-1], 1, 1, mask.ids.shape[-1])) & inside


def _ranges(mask: Any, at: Places) -> Tensor:
    (start, inside), (stop, _) = _of_position(mask.start, at), _of_position(mask.stop, at)
    return (start <= at.j) & (at.j < stop) & inside


def _edges(mask: Any, at: Places) -> Tensor:
    allowed = torch.zeros(at.p.shape[0], 1, *at.shape[2:], dtype=torch.bool)
    for row, column in mask.pairs.T.tolist():
        allowed = allowed | ((at.p == row) & (at.j == column))
    return allowed


def _blocks(mask: Any, at: Places) -> Tensor:
    rows, columns = mask.layout.shape[2:]
    row = at.p // mask.size  # rounds down, also for negative positions
    inside = (row >= 0) & (row < rows)
    b, h = (x if n > 1 else torch.zeros_like(x) for n, x in zip(mask.layout.shape, (at.b, at.h), strict=False))
    return mask.layout[b, h, row.clamp(0, rows - 1), (at.j // mask.size).clamp(max=columns - 1)] & inside


def split_mix(x: int) -> int:
    """The low half of SplitMix64's finaliser."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return (x ^ (x >> 31)) & LOW


def _random_blocks(mask: Any, at: Places) -> Tensor:
    """Blocks of positions that drew one another; each draws `per_row` of those up to itself, by Floyd's sampling."""

    def draw(block: int) -> set[int]:
        drawn: set[int] = set()
        first = split_mix(((mask.seed << 31) + block) & WORD)
        for k in range(mask.per_row):
            if (last := block - mask.per_row + 1 + k) >= 0:
                pick = split_mix((first * mask.per_row + k) & WORD) % (last + 1)
                drawn.add(last if pick in drawn else pick)
        return drawn

    rows, columns = at.p // mask.size, at.j // mask.size
    drawn = {block: draw(block) for block in {*rows.unique().tolist(), *columns.unique().tolist()}}
    pairs = {(r, c): r >= 0 and (c in drawn[r] or r in drawn[c]) for r in set(rows.flatten().tolist())
             for c in set(columns.tolist())}  # fmt: skip
    bits = [[pairs[r, c] for c in columns.tolist()] for r in rows.flatten().tolist()]
    return torch.tensor(bits, dtype=torch.bool).reshape(*rows.shape[:3], len(columns))


def _dilated(mask: Any, at: Places) -> Tensor:
    away = (at.p - at.j).abs()
    return (away <= mask.width * mask.step) & (away % mask.step == 0)


def _varlen(mask: Any, at: Places) -> Tensor:
    start, stop, position = (edge[:, None] for edge in (mask.start, mask.stop, mask.position))
    bits = (start <= at.j) & (at.j < stop)
    for inside in mask.inside:
        bits = bits & MASKS[kind(inside)](inside, replace(at, p=position[None, None]))
    return bits


def _selected(mask: Any, at: Places) -> Tensor:
    bits = torch.zeros(*mask.indices.shape[:3], at.shape[3], dtype=torch.bool)
    for b, h, i in product(*map(range, mask.indices.shape[:3])):
        for block in mask.indices[b, h, i].tolist():
            if block >= 0:
                bits[b, h, i, block * mask.size : (block + 1) * mask.size] = True
    return bits


def _tree(mask: Any, at: Places) -> Tensor:
    before = at.shape[3] - mask.parents.shape[1]
    rows = []
    for parents in mask.parents.tolist():
        seen = torch.zeros(at.shape[3], at.shape[3], dtype=torch.bool)  # position, key
        for p in range(at.shape[3]):
            seen[p, : min(p + 1, before)] = True
            node = p - before
            while node >= 0:
                seen[p, before + node] = True
                node = parents[node]
        rows.append(seen)
    table = torch.stack(rows)
    where = at.p.clamp(0, at.shape[3] - 1).expand(max(len(rows), at.p.shape[0]), 1, at.shape[2], 1)
    bits = torch.stack([table[n if len(rows) > 1 else 0][where[n, 0, :, 0]] for n in range(len(where))])[:, None]
    past = (at.p >= at.shape[3]) & (at.j < before)  # a position beyond the tree sees what is before it
    return torch.where((at.p >= 0) & (at.p < at.shape[3]), bits, past)


def _neighborhood(mask: Any, at: Places) -> Tensor:
    """The windows of NATTEN: of odd or even size, moved inside at the borders, by residue of the dilation."""
    total, tables = math.prod(mask.shape), []
    for n, width, step in zip(mask.shape, mask.window, mask.dilation, strict=True):
        table = torch.zeros(n, n, dtype=torch.bool)
        for place in range(n):
            line = list(range(place % step, n, step))  # places of the same residue
            start = min(max(place // step - width // 2, 0), len(line) - width)
            table[place, line[start : start + width]] = True
        tables.append(table)
    places = at.p.clamp(0, total - 1)[..., 0]
    rows = {}  # of the places that are asked for, the product of the rows of all axes
    for flat in places.unique().tolist():
        row, rest = torch.ones(1, dtype=torch.bool), flat
        for n, table in zip(reversed(mask.shape), reversed(tables), strict=True):
            rest, place = divmod(rest, n)
            row = (table[place][:, None] & row).flatten()
        rows[flat] = row
    bits = torch.stack([rows[place] for place in places.flatten().tolist()]).reshape(*places.shape, total)
    return bits & (at.p >= 0) & (at.p < total)


MASKS: dict[str, Callable[[Any, Places], Tensor]] = {
    "Causal": lambda mask, at: at.p - at.j >= 0,
    "Window": lambda mask, at: (at.p - at.j <= mask.before) & (at.j - at.p <= mask.after),
    "Dilated": _dilated,
    "Prefix": lambda mask, at: (at.j < _in_row(mask.length, at)) | (at.p - at.j >= 0),
    "Padding": lambda mask, at: at.whole(at.j < _in_row(mask.lengths, at)),
    "GlobalTokens": _global,
    "Documents": _documents,
    "Ranges": _ranges,
    "Dense": lambda mask, at: mask.tensor,
    "Where": lambda mask, at: mask.function(at.b, at.h, at.p, at.j),
    "Blocks": _blocks,
    "RandomBlocks": _random_blocks,
    "Edges": _edges,
    "Varlen": _varlen,
    "Selected": _selected,
    "Tree": _tree,
    "Neighborhood": _neighborhood,
    "And": lambda mask, at: torch.stack([visible(part, at) for part in mask.parts]).all(0),
    "Or": lambda mask, at: torch.stack([visible(part, at) for part in mask.parts]).any(0),
    "Not": lambda mask, at: ~visible(mask.negated, at),
}


def scale_of(score: Any, d_head: int, read: Reader) -> float | Tensor:
    """Return the factor of a score's products; a tensor is (H or 1, 1, 1)."""
    if kind(score) == "Modified":
        return scale_of(score.score, d_head, read)
    if kind(score) not in ("Dot", "Cosine"):
        return 1.0
    if isinstance(score.scale, Tensor):
        return read(score.scale).reshape(-1, 1, 1)
    return read.number(score.scale if score.scale is not None else d_head**-0.5 if kind(score) == "Dot" else 1.0)


def length(x: Tensor) -> Tensor:
    """Return the length of vectors as a cosine uses it."""
    return x.square().sum(-1, keepdim=True).sqrt().clamp(min=SHORTEST)


def products(score: Any, query: Tensor, key: Tensor, read: Reader) -> Tensor:
    """Return products (B, H, Q, K) of (B, H, Q, D) and (B, H, K, D), before a cap or modifier."""
    if kind(score) == "Modified":
        return products(score.score, query, key, read)
    if kind(score) == "Additive":
        weight = read(score.weight)
        letters = "bhqkd,d->bhqk" if weight.dim() == 1 else "bhqkd,hd->bhqk"
        return torch.einsum(letters, terms_of(query, key), weight)
    if kind(score) == "Bilinear":
        return (query @ read(score.matrix)) @ key.mT
    return (query * scale_of(score, query.shape[-1], read)) @ key.mT


def terms_of(query: Tensor, key: Tensor) -> Tensor:
    """Return the terms that an additive score sums over its last axis, before the weight: (B, H, Q, K, D)."""
    return torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3))


def weight_of(score: Any, read: Reader) -> Tensor:
    weight = read(score.weight)
    return weight if weight.dim() == 1 else weight[:, None, None, :]


def changed(score: Any, x: Tensor, read: Reader, at: Places) -> Tensor:
    """Apply a cap or a modifier to products."""
    if kind(score) == "Modified":
        x = changed(score.score, x, read, at)
        if kind(score.function) == "Waves":
            return x.sin() - read(score.function.steepness)[at.h] * (at.p - at.j).abs()
        return score.function(x, at.b, at.h, at.p, at.j).to(x.dtype)
    softcap = getattr(score, "softcap", None)
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def parts_of(bias: Any) -> tuple[Any, ...]:
    return () if bias is None else bias.terms if kind(bias) == "Sum" else (bias,)


def bias_of(part: Any, query: Tensor, scale: float | Tensor, read: Reader, at: Places) -> Tensor:
    """Return the contribution of one bias to the scores."""
    name, away = kind(part), at.j - at.p
    if isinstance(part, Tensor) or name == "DenseBias":
        return at.whole(read(part if isinstance(part, Tensor) else part.tensor))
    if name == "Alibi":
        paper = torch.tensor(alibi_slopes(part.heads), dtype=query.dtype)
        slopes = paper if part.own_slopes is None else read(part.own_slopes)
        return at.whole(read.number(-1.0) * slopes.reshape(-1, 1, 1) * away.abs())
    if name == "Relative":
        table = read(part.table)
        radius = len(table) // 2
        return at.whole(table[away.clamp(-radius, radius) + radius, at.h if table.shape[1] > 1 else at.h * 0])
    if name == "T5":
        table = read(part.table)
        return at.whole(table[t5_bucket(away, part), at.h if table.shape[1] > 1 else at.h * 0])
    assert name == "Shaw"
    given = (query * scale) @ read(part.keys).mT  # (B, H, Q, 2R+1)
    index = clipped_index(part.keys, at)
    return given.gather(-1, index.expand(*given.shape[:3], at.shape[3]))


def clipped_index(table: Tensor, at: Places) -> Tensor:
    radius = table.shape[-2] // 2
    return (at.j - at.p).clamp(-radius, radius) + radius


def alibi_slopes(heads: int) -> list[float]:
    """Return the slopes of the paper's code: those of the next smaller power of two, then every second of the next."""

    def power(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (k + 1) / n) for k in range(n)]

    whole = 1 << (heads.bit_length() - 1)
    return power(whole) + power(2 * whole)[0::2][: heads - whole]


def t5_bucket(distance: Tensor, part: Any) -> Tensor:
    """Return T5's bucket (as in Hugging Face's port), with logarithms in float32."""
    buckets, shift = len(part.table), torch.zeros_like(distance)
    position = -distance
    if part.bidirectional:
        buckets //= 2
        shift = (distance > 0).long() * buckets
        position = position.abs()
    position = position.clamp(min=0)
    exact = buckets // 2
    far = torch.log(position.clamp(min=1).float() / exact) / math.log(part.max_distance / exact) * (buckets - exact)
    return shift + torch.where(position < exact, position, (exact + far.long()).clamp(max=buckets - 1))


def output_of(weights: Tensor, value: Tensor, bias: Any, read: Reader, at: Places) -> Tensor:
    """Return weights (B, H, Q, K) times values, plus the value part of a relative position scheme."""
    output = weights @ value
    for part in parts_of(bias):
        if kind(part) == "Shaw" and part.values is not None:
            index = clipped_index(part.values, at).expand(at.shape)
            mass = weights.new_zeros(*at.shape[:3], part.values.shape[-2]).scatter_add(-1, index, weights)
            output = output + mass @ read(part.values)
    return output


def dropout_factors(seed: int, dropout: float, at: Places) -> Tensor:
    """Return the factors of the weights: 0, or the inverse of the fraction that dropout keeps."""
    (B, H, Q, K), threshold = at.shape, min(round(dropout * 2**32), 2**32 - 1)
    rows = [split_mix((seed + 0x9E3779B97F4A7C15 * (n + 1)) & WORD) for n in range(B * H * Q)]
    bits = (torch.tensor(rows, dtype=torch.int64).reshape(B, H, Q, 1) + torch.arange(K) * 0x9E3779B9) & LOW
    bits = ((bits ^ (bits >> 16)) * 0x21F0AAAD) & LOW
    bits = ((bits ^ (bits >> 15)) * 0x735A2D97) & LOW
    return ((bits ^ (bits >> 15)) >= threshold).double() * (2**32 / (2**32 - threshold))


def per_query_head(tensor: Tensor, H: int) -> Tensor:
    """Repeat keys or values (B, G, K, D) for each query head."""
    return tensor if tensor.shape[1] == H else tensor.repeat_interleave(H // tensor.shape[1], 1)


@dataclass
class Dense:
    """A call and its intermediate results; see `dense`."""

    at: Places
    query: Tensor  # (B, H, Q, D), unit vectors for a cosine
    key: Tensor  # (B, H, K, D), unit vectors for a cosine
    value: Tensor  # (B, H, K, E)
    given: tuple[Tensor, Tensor]  # query and key before normalisation
    product: Tensor
    score: Tensor
    bias: list[Tensor]
    visible: Tensor
    logits: Tensor  # -inf where hidden
    sink: Tensor | None  # (H or 1, 1, 1)
    lse: Tensor  # (B, H, Q)
    weights: Tensor
    keep: Tensor | None
    output: Tensor


def dense(
    query: Tensor, key: Tensor, value: Tensor, description: dict[str, Any], read: Reader, seed: int | None = None
) -> Dense:
    """softmax((score + bias) / temperature) @ value in the dtype of the tensors; all of it differentiable."""
    (B, H, Q, D), K = query.shape, key.shape[2]
    at = Places.of((B, H, Q, K), description.get("offset"))
    score, bias = as_score(description.get("score")), description.get("bias")
    key, value = per_query_head(key, H), per_query_head(value, H)
    given = query, key
    if score_kind(score) == "Cosine":
        query, key = query / length(query), key / length(key)
    product = products(score, query, key, read)
    scores = changed(score, product, read, at)
    scale = scale_of(score, D, read)
    added = [bias_of(part, given[0], scale, read, at) for part in parts_of(bias)]
    logits = scores
    for one in added:
        logits = logits + one
    logits = logits / description.get("temperature", 1.0)
    seen = visible(description.get("mask"), at)
    logits = logits.masked_fill(~seen, -math.inf)
    sink = description.get("sink")
    if sink is not None:
        sink = read(sink) if isinstance(sink, Tensor) else torch.tensor(float(sink), dtype=query.dtype)
        sink = sink.reshape(-1, 1, 1)
    weights, lse = softmax(logits, sink)
    normalization = description.get("normalization")
    if normalization is not None and kind(normalization) != "Softmax":
        weights = normalized(logits, normalization, read, at)
    keep = None if seed is None else dropout_factors(seed, description["dropout"], at).to(query.dtype)
    output = output_of(weights if keep is None else weights * keep, value, bias, read, at)
    return Dense(at, query, key, value, given, product, scores, added, seen, logits, sink, lse, weights, keep, output)


def softmax(logits: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return weights and log-sum-exp. A row without visible keys has weights 0 and log-sum-exp -inf."""
    rows = logits if sink is None else torch.cat([sink.expand(*logits.shape[:3], 1), logits], -1)
    empty = (rows == -math.inf).all(-1, keepdim=True)
    rows = rows.masked_fill(empty, 0.0)
    if not rows.shape[-1]:
        return logits, logits.new_full(logits.shape[:3], -math.inf)
    weights = torch.softmax(rows, -1).masked_fill(empty, 0.0)
    lse = torch.logsumexp(rows, -1).masked_fill(empty.squeeze(-1), -math.inf)
    return weights if sink is None else weights[..., 1:], lse


def normalized(logits: Tensor, normalization: Any, read: Reader, at: Places) -> Tensor:
    """Return the weights of a normalisation other than softmax: of entmax by sorting, for alpha 1.5 and 2."""
    hidden, name = logits == -math.inf, kind(normalization)
    if name == "Sigmoid":
        bias = normalization.bias
        bias = read(bias).reshape(-1, 1, 1) if isinstance(bias, Tensor) else bias
        return (1 / (1 + torch.exp(-(logits.masked_fill(hidden, 0.0) + bias)))).masked_fill(hidden, 0.0)
    if name == "ReLU":
        return torch.where(logits > 0, logits, 0.0) ** normalization.power
    if not logits.shape[-1]:
        return logits
    alpha = normalization.alpha
    x = logits.masked_fill(hidden, 0.0)
    largest = logits.detach().amax(-1, keepdim=True)
    x = ((alpha - 1) * (x - largest.masked_fill(largest == -math.inf, 0.0))).masked_fill(hidden, -2.0)  # never weighs
    best = x.sort(-1, descending=True).values
    count = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype)
    mean = best.cumsum(-1) / count
    if alpha == 2:
        thresholds = mean - 1 / count
    else:
        spread = best.square().cumsum(-1) - count * mean.square()
        inside = (1 - spread) / count
        thresholds = mean - torch.where(inside > 0, inside.clamp(min=1e-300).sqrt(), 0.0)
    support = (thresholds <= best).sum(-1, keepdim=True)
    threshold = thresholds.gather(-1, support - 1)
    return torch.where(x > threshold, x - threshold, 0.0).pow(1 / (alpha - 1)).masked_fill(hidden, 0.0)


def score_kind(score: Any) -> str:
    return score_kind(score.score) if kind(score) == "Modified" else kind(score)


@dataclass
class Dot:
    scale: float | None = None
    softcap: float | None = None


@dataclass
class Modified:
    function: Any
    score: Any


def as_score(score: Any) -> Any:
    """Return a description's score: None is a plain dot product, a function modifies one."""
    if score is None:
        return Dot()
    return score if kind(score) in SCORES else Modified(score, Dot())
