"""Random calls: shapes, heads, offsets and compositions of masks, biases and scores."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import regard as rg


@dataclass
class Call:
    """A random call, with tensors in float64."""

    query: Tensor
    key: Tensor
    value: Tensor
    description: dict[str, Any]
    learned: list[Tensor] = field(default_factory=list)

    def tensors(self) -> list[Tensor]:
        return [self.query, self.key, self.value]

    def __repr__(self) -> str:
        shapes = ", ".join(str(tuple(t.shape)) for t in (self.query, self.key, self.value))
        return f"Call({shapes}, offset={self.description.get('offset')}, {rg.Attention(**self.description)})"


@dataclass(frozen=True)
class Waves:
    """A modifier with a learned tensor, described by its fields."""

    steepness: Tensor  # (H,)

    def __call__(self, s: Tensor, b: Tensor, h: Tensor, p: Tensor, j: Tensor) -> Tensor:
        return s.sin() - self.steepness[h] * (p - j).abs()


def one_a_row(B: int, numbers: st.SearchStrategy[int]) -> st.SearchStrategy:
    return st.lists(numbers, min_size=B, max_size=B) if B else st.just(torch.zeros(0, dtype=torch.int64))


def leaves(B: int, H: int, Q: int, K: int) -> st.SearchStrategy:
    small = st.integers(0, K + 2)
    rows = one_a_row(B, st.integers(0, K))
    seeds = st.integers(0, 99)

    def random(seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    def documents(seed: int, torn: bool) -> rg.Mask:
        ids = torch.randint(0, 4, (B, K), generator=random(seed))
        return rg.documents(ids if torn else ids.sort(-1).values)

    def blocks(seed: int, size: int, shape: int) -> rg.Mask:
        size = max(size, (Q + K) // 100)  # at most some hundred blocks
        n = -(-4 * (Q + K) // size)
        return rg.blocks(
            torch.rand(((n, n), (H, n, n), (max(B, 1), 1, n, n))[shape], generator=random(seed)) < 0.5, size
        )

    def dense(seed: int, shape: int) -> rg.Mask:
        sizes = ((Q, K), (B, 1, 1, K), (1, H, Q, K), (B, H, Q, K), (Q, 1))[shape]
        return rg.dense(torch.rand(sizes, generator=random(seed)) < 0.5)

    def edges(seed: int, count: int) -> rg.Mask:
        return rg.edges(torch.randint(0, max(K, 1), (2, count), generator=random(seed)))

    def varlen(seed: int, count: int, inside: rg.Mask | None) -> rg.Mask:
        inner = [torch.randint(0, n + 1, (count,), generator=random(seed)).sort().values.tolist() for n in (Q, K)]
        return rg.varlen([0, *inner[0], Q], [0, *inner[1], K], mask=inside)

    def tree(seed: int, nodes: int) -> rg.Mask:
        parents = [torch.randint(-1, node, (B,), generator=random(seed + node)) for node in range(min(nodes, K))]
        return rg.tree(torch.stack(parents, -1) if parents and B else torch.zeros(B or 1, 0, dtype=torch.int64))

    def selected(seed: int, size: int, heads: int) -> rg.Mask:
        return rg.selected(torch.randint(-2, -(-K // size), (1, (1, H)[heads], Q, 3), generator=random(seed)), size)

    def neighborhood(seed: int) -> rg.Mask:
        draw = Random(seed)
        first = draw.choice([n for n in range(1, K + 1) if K % n == 0])
        shape = draw.choice([(K,), (first, K // first)])
        dilation = [draw.randint(1, min(3, n)) for n in shape]
        window = [draw.randint(1, n // step) for n, step in zip(shape, dilation, strict=True)]
        return rg.neighborhood(shape, window, dilation)

    distances = st.sampled_from([None, rg.causal(), rg.window(2, 1), rg.dilated(2, 2), rg.causal() & rg.window(3, 0)])
    positive = [st.builds(neighborhood, seeds)] if K else []
    return st.one_of(
        *positive,
        st.builds(varlen, seeds, st.integers(0, 4), distances),
        st.builds(tree, seeds, st.integers(0, 12)),
        st.builds(selected, seeds, st.integers(1, 9), st.integers(0, 1)),
        st.builds(rg.causal),
        st.builds(rg.window, small, small),
        st.builds(rg.dilated, st.integers(0, 4), st.integers(1, 4)),
        st.builds(rg.prefix, small | rows),
        st.builds(rg.padding, rows),
        st.builds(documents, seeds, st.booleans()),
        st.builds(lambda s: rg.ranges(*torch.randint(0, K + 2, (2, B, K), generator=random(s)).sort(0).values), seeds),
        st.builds(rg.global_tokens, st.lists(st.integers(0, max(K, 1) - 1), max_size=3)),
        st.builds(blocks, seeds, st.integers(1, 9), st.integers(0, 2)),
        st.builds(rg.random_blocks, st.integers(1, 3), st.integers(1, 9), seeds),
        st.builds(edges, seeds, st.integers(0, 20)),
        st.builds(dense, seeds, st.integers(0, 4)),
        st.just(rg.where(lambda b, h, p, j: (p + j + h) % 3 != b % 2)),
    )


def masks(B: int, H: int, Q: int, K: int) -> st.SearchStrategy:
    def extend(inner: st.SearchStrategy) -> st.SearchStrategy:
        return st.one_of(
            st.builds(lambda a, b: a & b, inner, inner),
            st.builds(lambda a, b: a | b, inner, inner),
            st.builds(lambda a: ~a, inner),
        )

    return st.recursive(leaves(B, H, Q, K), extend, max_leaves=3)


@st.composite
def sizes(draw: st.DrawFn, longest: int = 40, widest: int = 9) -> tuple[int, ...]:
    """B, G, H / G, Q, K, D, E"""
    axes = (3, 2, 2, longest, longest, widest, widest)
    return tuple(draw(st.integers(1, most)) for most in axes)


@st.composite
def calls(
    draw: st.DrawFn, longest: int = 40, plain: bool = False, axes: st.SearchStrategy[tuple[int, ...]] | None = None,
    normalized: bool = False,
) -> Call:  # fmt: skip
    """Draw a call; `plain` draws neither score nor bias, `axes` replaces `sizes`.

    normalized: draw a normalisation other than softmax, and no sink.
    """
    B, G, repeats, Q, K, D, E = draw(sizes(longest) if axes is None else axes)
    H = G * repeats
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    learned: list[Tensor] = []

    def table(*shape: int) -> Tensor:
        learned.append(normal(*shape).requires_grad_())
        return learned[-1]

    R = draw(st.integers(0, 5))
    stretch = 1.0  # of query and key: a tanh is computed in several ways

    def scores() -> Any:
        kind = draw(st.integers(0, 8))
        if kind == 0:
            return rg.Cosine(scale=table(H))
        if kind == 1:
            nonlocal stretch
            stretch = draw(st.sampled_from([1.0, 0.1, 6.0, 40.0]))
            return rg.Additive(table(H, D) if draw(st.booleans()) else table(D))
        if kind == 2:
            return rg.Bilinear(table(H, D, D) if draw(st.booleans()) else table(D, D))
        if kind == 3:
            return rg.Dot(softcap=2.0)
        if kind == 4:
            return rg.Dot(scale=table(H))
        if kind == 8:
            return Waves(table(H))
        return rg.Dot()

    def biases() -> Any:
        kind = draw(st.integers(0, 8))
        if kind == 0:
            return rg.alibi(H)
        if kind == 1:
            return rg.relative(table(2 * R + 1, H))
        if kind == 2:
            return rg.t5(table(8, H), bidirectional=draw(st.booleans()), max_distance=draw(st.integers(5, 30)))
        if kind == 3:
            return rg.shaw(table(2 * R + 1, D), table(2 * R + 1, E) if draw(st.booleans()) else None)
        if kind == 4:
            return rg.shaw(table(H, 2 * R + 1, D), table(H, 2 * R + 1, E))
        if kind == 5:
            return rg.dense_bias(table(*draw(st.sampled_from([(Q, K), (B, 1, 1, K), (H, Q, 1), (B, H, Q, K)]))))
        if kind == 6:
            return rg.alibi(H) + rg.dense_bias(table(Q, K)) + rg.relative(table(2 * R + 1, H))
        return None

    def normalizations() -> Any:
        kind = draw(st.integers(0, 5))
        if kind < 2:
            return rg.Sigmoid(table(H) if kind else -1.5)
        return [rg.ReLU(), rg.ReLU(power=2), rg.Entmax(), rg.Entmax(alpha=2)][kind - 2]

    offset = draw(st.one_of(st.none(), st.integers(-5, K), one_a_row(B, st.integers(-5, K))))
    description = {
        "mask": draw(st.none() | masks(B, H, Q, K)),
        "offset": offset,
        "temperature": draw(st.sampled_from([1.0, 0.7, 3.0])),
    }
    if not plain:
        description |= {"score": scores(), "bias": biases()}
        if normalized:
            description["normalization"] = normalizations()
        elif draw(st.booleans()):
            description["sink"] = table(H) if draw(st.booleans()) else 0.5
    query, key = normal(B, H, Q, D) * stretch, normal(B, G, K, D) * stretch
    return Call(query, key, normal(B, G, K, E), description, learned)


NOT_FINITE = (float("nan"), float("inf"), float("-inf"))
ABSURD = 1e4  # larger numbers count as absurd


@dataclass
class Hostile:
    """A call in any dtype and layout, with absurd numbers in its tensors."""

    call: Call
    dtype: torch.dtype
    layouts: tuple[str, str, str]
    planted: list[tuple[int, float, float]]  # (index among query, key and value; relative position; number)
    engine: str | None
    threads: int
    spread: bool  # whether the output's gradient is one number expanded with strides of 0

    def tensors(self, dtype: torch.dtype | None = None, clean: bool = False) -> list[Tensor]:
        """Return query, key and value in the case's dtype; `clean` replaces absurd numbers by zeros."""
        layouts = []
        for n, tensor in enumerate((self.call.query, self.call.key, self.call.value)):
            tensor = tensor.to(self.dtype, copy=True)
            for which, share, number in self.planted:
                if which == n and tensor.numel():
                    tensor.view(-1)[int(share * tensor.numel())] = number
            if self.layouts[n] == "expanded":  # one row for all, as with strides of 0
                tensor = tensor[:1, :, :1].expand_as(tensor).contiguous()
            if clean:
                tensor = torch.where(tensor.abs() <= ABSURD, tensor, 0.0)
            layouts.append(lay_out(tensor.to(dtype or self.dtype), self.layouts[n]))
        return layouts

    def __repr__(self) -> str:
        rest = f"{self.layouts}, planted={self.planted}, threads={self.threads}, spread={self.spread}"
        dropout = f", dropout={self.call.description.get('dropout')}"
        return f"Hostile({self.call}, {self.dtype}, engine={self.engine}, {rest}{dropout})"


def lay_out(tensor: Tensor, layout: str) -> Tensor:
    """Return the same numbers with another memory layout."""
    if layout == "heads last":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "turned":
        return tensor.mT.contiguous().mT
    if layout == "apart":
        roomy = tensor.new_full((*tensor.shape[:3], 2 * tensor.shape[3] + 1), float("nan"))
        roomy[..., 1::2] = tensor
        return roomy[..., 1::2]
    if layout == "unaligned":
        return torch.cat([tensor.new_full((1,), float("nan")), tensor.reshape(-1)])[1:].view(tensor.shape)
    if layout == "expanded":
        return tensor[:1, :, :1].expand(tensor.shape)
    return tensor


@st.composite
def extents(draw: st.DrawFn) -> tuple[int, ...]:
    """Draw odd, tiny, empty and large sizes, all of which are fast."""
    kind = draw(st.sampled_from(["small", "small", "tiles", "wide", "few rows", "many", "empty"]))
    if kind == "small":
        return draw(sizes())
    near = st.sampled_from([1, 63, 64, 65, 127, 128, 129, 191, 193]) | st.integers(1, 300)
    B, G, repeats, Q, K, D, E = draw(sizes(longest=40))
    if kind == "tiles":
        return min(B, 2), G, repeats, draw(near), draw(near), D, E
    width = st.sampled_from([16, 17, 32, 64, 96, 127, 128, 256, 511, 512, 513]) | st.integers(1, 600)
    if kind == "wide":
        return min(B, 2), G, repeats, min(Q, 20), K, draw(width), draw(width)
    if kind == "few rows":
        return B, G, repeats, min(Q, 4), draw(st.integers(1, 3000)), draw(st.integers(1, 40)), draw(st.integers(1, 40))
    if kind == "many":
        return draw(st.integers(1, 20)), draw(st.integers(1, 6)), draw(st.integers(1, 8)), min(Q, 7), min(K, 9), D, E
    emptied = [B, G, repeats, Q, K, D, E]
    emptied[draw(st.sampled_from([0, 3, 4, 6]))] = 0
    return tuple(emptied)


@st.composite
def hostile(
    draw: st.DrawFn,
    engines: tuple[str | None, ...] = (None, "native", "native"),
    axes: st.SearchStrategy[tuple[int, ...]] | None = None,
    dtypes: tuple[torch.dtype, ...] = (
        torch.float64, torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16,
    ),
) -> Hostile:  # fmt: skip
    call = draw(calls(axes=extents() if axes is None else axes))
    if draw(st.integers(0, 3)) == 0:
        call.description["dropout"] = draw(st.sampled_from([0.1, 0.5, 0.99]))
    if draw(st.integers(0, 9)) == 0:
        call.description["offset"] = draw(st.sampled_from([2**31, -(2**31), 2**40, -(2**40)]))
    dtype = draw(st.sampled_from(dtypes))
    limits = torch.finfo(dtype)
    numbers = (*NOT_FINITE, *NOT_FINITE, 300.0, -300.0, limits.max, limits.tiny, limits.tiny / 4, -0.0)
    place = st.floats(0, 1, exclude_max=True)
    plants = st.lists(st.tuples(st.integers(0, 2), place, st.sampled_from(numbers)), max_size=3)
    layout = st.sampled_from(["plain", "plain", "heads last", "turned", "apart", "unaligned", "expanded"])
    return Hostile(
        call=call,
        dtype=dtype,
        layouts=draw(st.tuples(layout, layout, layout)),
        planted=draw(plants) if draw(st.booleans()) else [],
        engine=draw(st.sampled_from(engines)),
        threads=draw(st.sampled_from([1, 2, 3, 5])),
        spread=draw(st.booleans()),
    )
