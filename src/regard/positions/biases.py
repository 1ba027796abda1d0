"""Relative positions as biases of the scores. Tables may require grad.

`bias.tile(at, query, scale)` is added to the scores of a tile. A bias that depends on head and distance `j - p` only is
`Diagonal`: a tile of it is read from one vector of `q + k - 1` values, and so are its gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.arguments import check_layout, describe_value
from regard.description import Description
from regard.geometry import CallSlice, Frame, Indices, broadcasts, format_shape, pad_leading


@dataclass(eq=False)
class Bias(Description):
    """Base class of biases; they can be added with `+`.

    >>> import regard as rg, torch
    >>> rg.alibi(2) + rg.relative(torch.zeros(9, 2))
    alibi(heads=2) + relative((9, 2))
    """

    def tile(self, at: Indices, query: Tensor, scale: float | Tensor) -> Tensor:
        """Return the bias of a tile, which broadcasts to (b, h, q, k). `query` is (b, h, q, D)."""
        raise NotImplementedError

    @property
    def has_values(self) -> bool:
        """Whether `aggregate` adds to the output."""
        return False

    def aggregate(self, at: Indices, weights: Tensor) -> Tensor | None:
        """Return the value part of a tile for its weights (b, h, q, k), to be added to the output, or None."""
        return None

    def cut(self, at: Indices) -> Bias:
        """Return the bias for the tiles of one box: a tensor along Q and K is replaced by its slice."""
        return self

    def narrow(self, part: CallSlice) -> Bias:
        """Return the bias for a slice of a call, with heads, queries and keys counted from the start of the slice."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot be used on a slice of a call, as in a WindowCache or a shared sequence: "
            "define narrow(part), which returns the bias with heads and positions counted from the start of the slice"
        )

    def parts(self) -> tuple[Bias, ...]:
        return (self,)

    def check(self, frame: Frame, d_head: int, d_value: int) -> None:
        """Raise if the bias does not fit a call of this size."""

    def __add__(self, other: Bias) -> Bias:
        if not isinstance(other, Bias):
            raise TypeError(
                f"a bias adds to a bias, got {type(other).__name__}; wrap a tensor as regard.dense_bias(tensor)"
            )
        return Sum(self.parts() + other.parts())

    def __radd__(self, other: object) -> Bias:
        return self + other  # type: ignore[operator]


@dataclass(eq=False, repr=False)
class Sum(Bias):
    terms: tuple[Bias, ...]

    def tile(self, at: Indices, query: Tensor, scale: float | Tensor) -> Tensor:
        first, *rest = (term.tile(at, query, scale) for term in self.terms)
        for bias in rest:
            first = first + bias
        return first

    @property
    def has_values(self) -> bool:
        return any(term.has_values for term in self.terms)

    def aggregate(self, at: Indices, weights: Tensor) -> Tensor | None:
        total = None
        for term in self.terms:
            if (value := term.aggregate(at, weights)) is not None:
                total = value if total is None else total + value
        return total

    def cut(self, at: Indices) -> Bias:
        return self.replace(terms=tuple(term.cut(at) for term in self.terms))

    def narrow(self, part: CallSlice) -> Bias:
        return self.replace(terms=tuple(term.narrow(part) for term in self.terms))

    def parts(self) -> tuple[Bias, ...]:
        return self.terms

    def check(self, frame: Frame, d_head: int, d_value: int) -> None:
        for term in self.terms:
            term.check(frame, d_head, d_value)

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.terms))


@dataclass(eq=False)
class Diagonal(Bias):
    """A bias that depends on head and distance only."""

    def along(self, h: Tensor, distance: Tensor) -> Tensor:
        """Return the bias of heads `h` at distances `j - p`; both are index tensors that broadcast."""
        raise NotImplementedError

    def tile(self, at: Indices, query: Tensor, scale: float | Tensor) -> Tensor:
        if torch.compiler.is_exporting() or at.box is None or not at.i.numel() or not at.j.numel():
            return self.along(at.h, at.j - at.p).to(query)  # unfold would specialise a dynamic length
        return self.vector(at).to(query).unfold(-1, at.j.shape[-1], 1).flip(-2)  # query i starts at q - 1 - i

    def vector(self, at: Indices) -> Tensor:
        """Return the bias of a box per distance, from its last query and first key: (b or 1, h or 1, q + k - 1)."""
        steps = torch.arange(at.i.shape[-2] + at.j.shape[-1] - 1, device=at.j.device)
        nearest = (at.j[..., 0] - at.p[..., -1, 0]).reshape(-1, 1, 1)  # (b or 1, 1, 1)
        return self.along(at.h[..., 0], steps + nearest)


@dataclass(eq=False, repr=False)
class Alibi(Diagonal):
    heads: int
    head_range: tuple[int, int] | None = None  # first and one past the last of its heads, for a slice
    own_slopes: Tensor | None = None  # (H,), instead of the paper's

    def slopes(self, device: torch.device) -> Tensor:
        if self.own_slopes is not None:
            return self.own_slopes if self.head_range is None else self.own_slopes[slice(*self.head_range)]
        power = 2 ** int(math.log2(self.heads))
        first = [2 ** (-8 * (n + 1) / power) for n in range(power)]
        between = [2 ** (-4 * (n + 1) / power) for n in range(0, 2 * (self.heads - power), 2)]
        head_range = slice(None) if self.head_range is None else slice(*self.head_range)
        return torch.tensor((first + between)[head_range], dtype=torch.float64, device=device)

    def narrow(self, part: CallSlice) -> Bias:
        return (
            self if part.heads == slice(0, self.heads) else self.replace(head_range=(part.heads.start, part.heads.stop))
        )

    def along(self, h: Tensor, distance: Tensor) -> Tensor:
        return -self.slopes(h.device).double()[h] * distance.abs()  # in the dtype of slopes, far distances are rounded

    def check(self, frame: Frame, d_head: int, d_value: int) -> None:
        if (self.heads if self.head_range is None else self.head_range[1] - self.head_range[0]) != frame.H:
            raise ValueError(f"alibi was created for heads={self.heads}, but the query has H = {frame.H} heads")

    def __repr__(self) -> str:
        return f"alibi(heads={self.heads})" if self.own_slopes is None else f"alibi(slopes=({self.heads},))"


@dataclass(eq=False, repr=False)
class Relative(Diagonal):
    table: Tensor  # (2R+1, H or 1)

    def along(self, h: Tensor, distance: Tensor) -> Tensor:
        reach = len(self.table) // 2
        return _look_up(self.table, distance.clamp(-reach, reach) + reach, h)

    def narrow(self, part: CallSlice) -> Bias:
        return self.replace(table=_select_heads(self.table, 1, part))

    def check(self, frame: Frame, d_head: int, d_value: int) -> None:
        _check_heads("relative", self.table, "(2R+1, H)", frame)

    def __repr__(self) -> str:
        return f"relative({format_shape(self.table)})"


@dataclass(eq=False, repr=False)
class T5(Diagonal):
    table: Tensor  # (buckets, H or 1)
    bidirectional: bool
    max_distance: int

    def along(self, h: Tensor, distance: Tensor) -> Tensor:
        return _look_up(self.table, self.bucket(distance), h)

    def narrow(self, part: CallSlice) -> Bias:
        return self.replace(table=_select_heads(self.table, 1, part))

    def bucket(self, distance: Tensor) -> Tensor:
        """Return the bucket of a distance `j - p`: exact if near, then logarithmic, the last beyond `max_distance`."""
        buckets = len(self.table)
        first = torch.zeros_like(distance)
        if self.bidirectional:
            buckets //= 2
            first = (distance > 0) * buckets
            away = distance.abs()
        else:
            away = (-distance).clamp(min=0)
        exact = buckets // 2
        ratio = (away.clamp(min=1).float() / exact).log() / math.log(self.max_distance / exact)
        wide = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
        return first + torch.where(away < exact, away, wide)

    def check(self, frame: Frame, d_head: int, d_value: int) -> None:
        _check_heads("t5", self.table, "(buckets, H)", frame)

    def __repr__(self) -> str:
        return f"t5({format_shape(self.table)}, bidirectional={self.bidirectional}, max_distance={self.max_distance})"


@dataclass(eq=False, repr=False)
class Shaw(Bias):
    keys: Tensor  # (2R+1, D) or (H, 2R+1, D)
    values: Tensor | None  # (2R+1, E) or (H, 2R+1, E)

    @property
    def reach(self) -> int:
        return self.keys.shape[-2] // 2

    def table(self, at: Indices, query: Tensor, scale: float | Tensor) -> Tensor:
        """Return scale * q · keys: the bias of each query at each distance, (b, h, q, 2R+1)."""
        keys = self._per_head(self.keys.to(query), at)
        scale = at.per_head(scale.to(query).reshape(-1)) if isinstance(scale, Tensor) else scale
        return (query * scale) @ keys.mT

    def tile(self, at: Indices, query: Tensor, scale: float | Tensor) -> Tensor:
        index = self._index(at)
        table = self.table(at, query, scale)
        return table.gather(-1, index.expand(*table.shape[:-1], index.shape[-1]))

    @property
    def has_values(self) -> bool:
        return self.values is not None

    def aggregate(self, at: Indices, weights: Tensor) -> Tensor | None:
        if self.values is None:
            return None
        index = self._index(at).expand(weights.shape)
        mass = weights.new_zeros(*weights.shape[:-1], 2 * self.reach + 1).scatter_add(-1, index, weights)
        return mass @ self._per_head(self.values.to(weights), at)

    def narrow(self, part: CallSlice) -> Bias:
        keys, values = (t if t is None or t.dim() == 2 else _select_heads(t, 0, part) for t in (self.keys, self.values))
        assert keys is not None
        return self.replace(keys=keys, values=values)

    def _index(self, at: Indices) -> Tensor:
        return (at.j - at.p).clamp(-self.reach, self.reach) + self.reach

    def _per_head(self, table: Tensor, at: Indices) -> Tensor:
        return table if table.dim() == 2 else at.per_head(table, axes=2).squeeze(-3).squeeze(-3)

    def check(self, frame: Frame, d_head: int, d_value: int) -> None:
        for name, table, size, letter in (("keys", self.keys, d_head, "D"), ("values", self.values, d_value, "E")):
            if table is not None and (
                table.shape[-1] != size or (table.dim() == 3 and not broadcasts(len(table), frame.H))
            ):
                if name == "values" and not d_value:
                    continue  # weights alone have no values
                raise ValueError(
                    f"shaw: {name} must be (2R+1, {letter}) or (H, 2R+1, {letter}), H = {frame.H}, {letter} = {size}, "
                    f"but is {format_shape(table)}"
                )

    def __repr__(self) -> str:
        return f"shaw({format_shape(self.keys)}{'' if self.values is None else ', ' + format_shape(self.values)})"


@dataclass(eq=False, repr=False)
class DenseBias(Bias):
    tensor: Tensor  # as passed in: a view would miss a tensor that torch puts in its place

    def tile(self, at: Indices, query: Tensor, scale: float | Tensor) -> Tensor:
        return at.take(pad_leading(self.tensor)).to(query)

    def cut(self, at: Indices) -> Bias:
        if type(self) is not DenseBias:  # a subclass may compute a tile another way
            return self
        part = at.take(pad_leading(self.tensor.detach()))
        return _Cut(part.requires_grad_(self.tensor.requires_grad))

    def narrow(self, part: CallSlice) -> Bias:
        tensor = pad_leading(self.tensor)
        axes = zip(tensor.shape, (slice(None), part.heads, part.rows, part.columns), strict=True)
        return self.replace(tensor=tensor[tuple(slice(None) if n == 1 else edge for n, edge in axes)])

    def check(self, frame: Frame, d_head: int, d_value: int) -> None:
        sizes = (frame.B, frame.H, frame.Q, frame.K)
        shape = (1,) * (4 - self.tensor.dim()) + tuple(self.tensor.shape)
        if any(not broadcasts(n, size) for n, size in zip(shape, sizes, strict=True)):
            raise ValueError(f"bias must broadcast to (B, H, Q, K) = {sizes}, but is {format_shape(self.tensor)}")

    def __repr__(self) -> str:
        return f"dense_bias({format_shape(self.tensor)})"


@dataclass(eq=False)
class _Cut(Bias):
    """The slice of a dense bias in one box."""

    tensor: Tensor  # (b or 1, h or 1, q or 1, k or 1)

    def tile(self, at: Indices, query: Tensor, scale: float | Tensor) -> Tensor:
        return self.tensor.to(query)


def is_built_in(bias: Bias) -> bool:
    """Whether the kernels support the bias: a built-in type, or a Diagonal that only defines `along`."""
    if isinstance(bias, Sum):
        return type(bias) is Sum and all(map(is_built_in, bias.terms))
    kind = type(bias)
    diagonal = issubclass(kind, Diagonal) and kind.tile is Diagonal.tile and kind.vector is Diagonal.vector
    return kind in (Shaw, DenseBias) or (diagonal and kind.aggregate is Bias.aggregate)


def _look_up(table: Tensor, row: Tensor, h: Tensor) -> Tensor:
    """Return the entries of a table (rows, H or 1), so that their gradients are added up in float32 at least."""
    table = table.to(torch.promote_types(table.dtype, torch.float32))
    return table[row, h if table.shape[1] > 1 else torch.zeros_like(h)]


def _check_heads(name: str, table: Tensor, form: str, frame: Frame) -> None:
    """Raise unless a table (rows, H or 1) fits the heads of a call."""
    if broadcasts(table.shape[1], frame.H):
        return
    advice = "; its axes are swapped" if len(table) == frame.H else ""
    raise ValueError(f"{name}: table must be {form} with H = {frame.H}, but is {format_shape(table)}{advice}")


def _select_heads(table: Tensor, axis: int, part: CallSlice) -> Tensor:
    """Select the heads of a slice from a table with an axis of heads, or of 1."""
    heads = part.heads
    return table if table.shape[axis] == 1 else table.narrow(axis, heads.start, heads.stop - heads.start)


def _check_table(name: str, table: Tensor, axes: tuple[int, ...], form: str) -> Tensor:
    if isinstance(table, Tensor):
        check_layout(name, table, sequences=False)
    if not isinstance(table, Tensor) or not table.is_floating_point() or table.dim() not in axes:
        actual = f"{table.dtype} of shape {format_shape(table)}" if isinstance(table, Tensor) else type(table).__name__
        raise TypeError(f"{name} must be a floating-point tensor {form}, but is {actual}")
    return table


def _check_odd(name: str, table: Tensor, axis: int, form: str) -> None:
    if table.shape[axis] % 2 == 0:
        raise ValueError(
            f"{name} must be {form}, with an odd number of distances, 2R+1 for -R..R, but is {format_shape(table)}"
        )


def alibi(heads: int | None = None, *, slopes: Tensor | None = None) -> Bias:
    """ALiBi: `-slope[h] * abs(p - j)`, with the paper's slopes, also if `heads` is not a power of two.

    `slopes` (H,) replaces the paper's; it may require grad.

    >>> import regard as rg, torch
    >>> rg.alibi(heads=8), rg.alibi(slopes=torch.tensor([0.5, 0.25]))
    (alibi(heads=8), alibi(slopes=(2,)))
    """
    if slopes is not None:
        if not isinstance(slopes, Tensor) or not slopes.is_floating_point() or slopes.dim() != 1:
            raise TypeError(f"alibi: slopes must be a floating-point tensor (H,), but is {describe_value(slopes)}")
        if heads not in (None, len(slopes)):
            raise ValueError(f"alibi: heads={heads} does not match the {len(slopes)} slopes; leave heads out")
        return Alibi(len(slopes), None, slopes)
    if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
        raise ValueError(f"alibi: heads must be a whole number of at least 1, but is {heads!r}")
    return Alibi(heads)


def relative(table: Tensor) -> Bias:
    """Clipped relative bias `table[clip(j - p, -R, R) + R, h]`, table (2R+1, H), or (2R+1, 1) for all heads.

    >>> import regard as rg, torch
    >>> rg.relative(torch.zeros(33, 8))
    relative((33, 8))
    """
    form = "(2R+1, H)"
    _check_odd("relative: table", _check_table("relative: table", table, (2,), form), 0, form)
    return Relative(table)


def t5(table: Tensor, bidirectional: bool = True, max_distance: int = 128) -> Bias:
    """T5's bias `table[bucket(j - p), h]`, table (buckets, H): exact buckets when near, logarithmic ones beyond.

    The axes are those of `relative` and of published T5 weights: one row per bucket, one column per head.

    >>> import regard as rg, torch
    >>> rg.t5(torch.zeros(32, 8), bidirectional=False)
    t5((32, 8), bidirectional=False, max_distance=128)
    """
    _check_table("t5: table", table, (2,), "(buckets, H)")
    if isinstance(max_distance, bool) or not isinstance(max_distance, int):
        raise TypeError(f"t5: max_distance must be a whole number, but is {type(max_distance).__name__}")
    exact = len(table) // (4 if bidirectional else 2)
    if exact < 1 or max_distance <= exact:
        raise ValueError(
            f"t5: max_distance must exceed the {exact} exact buckets of a table of {len(table)} "
            f"(at least {4 if bidirectional else 2} are needed), but is {max_distance}"
        )
    return T5(table, bidirectional, max_distance)


def shaw(keys: Tensor, values: Tensor | None = None) -> Bias:
    """Shaw's relative positions: adds `scale * q_i · keys[clip(j - p, -R, R) + R]` to the score.

    With `values`, adds the weighted sum of `values[clip(j - p, -R, R) + R]` to the output. Tables are (2R+1, D) and
    (2R+1, E), or per head (H, 2R+1, ...). `scale` is that of the score.

    >>> import regard as rg, torch
    >>> rg.shaw(torch.zeros(17, 64), torch.zeros(17, 64))
    shaw((17, 64), (17, 64))
    """
    form = "(2R+1, D) or (H, 2R+1, D)"
    _check_odd("shaw: keys", _check_table("shaw: keys", keys, (2, 3), form), -2, form)
    if values is not None:
        _check_table("shaw: values", values, (2, 3), "(2R+1, E) or (H, 2R+1, E)")
        if values.shape[-2] != keys.shape[-2]:
            raise ValueError(
                f"shaw: values must have as many distances as keys, {keys.shape[-2]}, but have {values.shape[-2]}"
            )
    return Shaw(keys, values)


def dense_bias(tensor: Tensor) -> Bias:
    """Any bias as a tensor that broadcasts to (B, H, Q, K); `bias=tensor` is short for this.

    >>> import regard as rg, torch
    >>> rg.dense_bias(torch.zeros(16, 16))
    dense_bias((16, 16))
    """
    if isinstance(tensor, Tensor) and tensor.dtype == torch.bool:
        raise TypeError("bias must be numbers to add to the scores, but is torch.bool; pass a bool tensor as mask=")
    if callable(tensor):
        raise TypeError(f"bias must be a bias or a tensor, but is {type(tensor).__name__}; call it, as in alibi(heads)")
    return DenseBias(_check_table("bias", tensor, (0, 1, 2, 3, 4), "that broadcasts to (B, H, Q, K)"))
